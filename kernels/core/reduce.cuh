// Deterministic sums.
//
//   sum = sum over chunks of partials[chunk],   in an order that depends on their number and on the block size alone
//
// 1. Each chunk of work stores one partial sum; which warp or block computed it does not matter.
// 2. The block that arrives last (arrive_last) adds all partial sums.
//
// There are no floating-point atomics, so neither the grid nor the schedule changes a bit. Traffic: 8 bytes written and
// read per chunk.
#pragma once
#include "core/ptx.cuh"
#include "core/types.cuh"

// Sum over the 32 lanes of a warp, in every lane. A butterfly reduction: the tree is fixed, and it needs neither shared
// memory nor a barrier. Precondition: all 32 lanes call it together.
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// warp_sum as a rolled loop, for sums outside of innermost loops. Where the compiler cannot tell that the warp is
// converged, each unrolled shuffle of a double takes 30 instructions, and as many again on a path for diverged warps: a
// tenth of a kernel's compile time.
template <class T>
__device__ __forceinline__ T rolled_warp_sum(T x) {
#pragma unroll 1
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Sums each of kCount numbers over the lanes of a warp and leaves one sum in each lane. `place` receives the index of
// the lane's sum, or kNoPlace or more if the lane has none. At each step lanes exchange half of their numbers, so all
// sums together take about as many shuffles as there are numbers; a butterfly for each takes five times as many. The
// tree is fixed. Preconditions: all 32 lanes call it together with kOffset = 16; kCount <= 32.
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
// power of two from 32 to 1024. It does not end in a barrier: a second call needs a __syncthreads() before it, because
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

// Number of counters in a workspace besides ticket and claim counter.
constexpr int kCounters = 512;  // engines/device.py: COUNTERS

// Workspace of a reduced loss: the ticket, the counter of claimed chunks, and counters for work that blocks share, such
// as segments or tiles. All of them are 0 before and after a launch. One partial sum per chunk follows.
struct Workspace {
  unsigned* ticket;
  unsigned* claim_counter;
  unsigned* counters;
  double* partials;
};
__device__ __forceinline__ Workspace workspace(double* memory) {
  unsigned* const tickets = reinterpret_cast<unsigned*>(memory);
  return {tickets, tickets + 2, tickets + 4, memory + 2 + kCounters / 2};
}

// Returns true in every thread of the block that arrives last. Everything that any block wrote before is visible to
// that block. If `alone`, no other block has written anything, and the result is true without a ticket.
//
// Preconditions: every thread of every block calls it once. *ticket is 0 before the launch. It is 0 again afterwards
// (the increment wraps), so the next launch in the stream needs no memset. Two launches that run at the same time must
// not share a ticket: tickets belong to one stream.
__device__ __forceinline__ bool arrive_last(unsigned* ticket, bool alone = false) {
  __shared__ bool last;
  __syncthreads();
  // A single block needs no ticket: its barrier orders what its threads wrote.
  if (alone || gridDim.x == 1) return true;
  if (threadIdx.x == 0) last = increment_and_synchronize(ticket, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  return last;
}

// x[first] + x[first + step] + ... over the indices below `count`. The whole GPU waits for this sum, so 16 loads are in
// flight, and the additions form a tree instead of a chain. __ldcg bypasses L1, which may hold a stale line of an
// earlier launch.
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

// sum / divisor, correctly rounded unless numbers underflow or the reciprocal overflows: the remainder of the rounded
// product is exact, and its quotient corrects the product. `reciprocal` is 1 / divisor, or anything if the divisor is
// 0. A division of doubles is a function of 100 instructions, with which a kernel takes 7 % longer to compile.
__device__ __forceinline__ double divide_sum_by(double sum, double divisor, double reciprocal) {
  const double product = sum * (divisor == 0.0 ? __longlong_as_double(0x7ff0000000000000ll) : reciprocal);
  const double quotient = fma(fma(-product, divisor, sum), reciprocal, product);
  return quotient == quotient ? quotient : product;  // an infinite sum has no remainder
}

// partials[0] + ... + partials[count - 1], in thread 0, in an order that depends on `count` and blockDim.x alone.
// Preconditions: those of block_sum; count < 2^31.
__device__ __forceinline__ double sum_partials(const double* partials, int64 count) {
  return block_sum(sum_every(partials, threadIdx.x, blockDim.x, static_cast<unsigned>(count)));
}
