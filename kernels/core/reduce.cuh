// Deterministic sums.
//
//   sum = sum over chunks of partials[chunk],   added in the order of the chunk's index
//
// 1. Each chunk of work stores one partial sum; which warp or block computed it does not matter.
// 2. The block that arrives last (arrive_last) adds all partials.
//
// There are no floating-point atomics, so neither the grid nor the schedule changes a bit. Traffic: 8 bytes written and
// read per chunk.
#pragma once
#include "core/ptx.cuh"
#include "core/types.cuh"

// Sum over the 32 lanes of a warp, in every lane. A butterfly: the tree is fixed, without shared memory or barrier.
// Preconditions: all 32 lanes call it together.
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// warp_sum as a loop, for sums outside of the innermost loops. Unrolled, each shuffle of a double, of which the
// compiler does not know that the warp is converged there, takes 30 instructions and as many on a path for diverged
// warps: a tenth of the time in which a kernel is compiled.
template <class T>
__device__ __forceinline__ T rolled_warp_sum(T x) {
#pragma unroll 1
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Sums of kCount numbers over the lanes of a warp, one in each lane, whose number is `place`; a lane without one has a
// place that is kNoPlace or more. At each step lanes exchange half of what they have, so that all sums take about as
// many shuffles as there are numbers, where a butterfly for each takes five times as many. The tree is fixed.
// Preconditions: all 32 lanes call it together with kOffset = 16; kCount <= 32.
constexpr int kNoPlace = 1 << 16;
template <int kOffset, int kCount, class T>
__device__ __forceinline__ T scattered_warp_sum(const T (&x)[kCount], int& place) {
  if constexpr (kOffset == 0) {
    place = 0;
    return x[0];
  } else {
    const bool upper = (threadIdx.x & kOffset) != 0;
    constexpr int kHalf = (kCount + 1) / 2;
    T half[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      if constexpr (kCount == 1) {
        half[i] = x[i] + __shfl_xor_sync(0xffffffffu, x[i], kOffset);
      } else {
        const T other = i + kHalf < kCount ? x[(i + kHalf) % kCount] : T(0);
        half[i] = (upper ? other : x[i]) + __shfl_xor_sync(0xffffffffu, upper ? x[i] : other, kOffset);
      }
    }
    const T sum = scattered_warp_sum<kOffset / 2>(half, place);
    if (place >= (upper ? kCount - kHalf : kHalf)) place = kNoPlace;
    if (upper) place += kHalf;
    return sum;
  }
}

// Sum over the threads of a block, in thread 0. Preconditions: every thread of the block calls it; blockDim.x is a
// power of two from 32 to 1024. It does not end in a barrier: a second call needs a __syncthreads() in between, because
// both use the same shared memory.
__device__ __forceinline__ double block_sum(double x) {
  __shared__ double warp_totals[32];
  x = rolled_warp_sum(x);
  if (threadIdx.x % 32 == 0) warp_totals[threadIdx.x / 32] = x;
  __syncthreads();
  const int warps = blockDim.x / 32;
  if (threadIdx.x < 32) {
    x = threadIdx.x < warps ? warp_totals[threadIdx.x] : 0.0;
#pragma unroll 1
    for (int offset = warps / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  return x;
}

// True in every thread of the block that arrives last. Everything that any block wrote before is visible to that block.
// Preconditions: every thread of every block calls it once. *ticket is 0 before the launch. It is 0 again afterwards
// (the increment wraps), so the next launch in the stream needs no memset. Two launches that run at the same time must
// not share a ticket: tickets belong to one stream. `alone`: no other block has written anything.
__device__ __forceinline__ bool arrive_last(unsigned* ticket, bool alone = false) {
  __shared__ bool last;
  __syncthreads();
  // A single block waits for nobody: its barrier orders what its threads wrote.
  if (alone || gridDim.x == 1) return true;
  if (threadIdx.x == 0) last = increment_and_synchronize(ticket, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  return last;
}

// x[first] + x[first + step] + ... up to `count`. The whole GPU waits for this sum: 16 loads are in flight, and
// additions form a tree instead of a chain. __ldcg bypasses L1, which may hold a stale line of an earlier launch.
template <class Index>
__device__ __forceinline__ double sum_every(const double* x, Index first, Index step, Index count) {
  constexpr int kAhead = 16;
  double total = 0.0;
#pragma unroll 1
  for (Index start = first; start < count; start += kAhead * step) {
    double term[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const Index i = start + j * step;
      term[j] = i < count ? __ldcg(x + i) : 0.0;
    }
#pragma unroll
    for (int span = 1; span < kAhead; span *= 2) {
#pragma unroll
      for (int j = 0; j < kAhead; j += 2 * span) term[j] += term[j + span];
    }
    total += term[0];
  }
  return total;
}

// partials[0] + partials[1] + ... in an order that depends on `count` and blockDim.x alone, in thread 0. Preconditions:
// those of block_sum; count < 2^31.
__device__ __forceinline__ double sum_partials(const double* partials, int64 count) {
  return block_sum(sum_every(partials, threadIdx.x, blockDim.x, static_cast<unsigned>(count)));
}
