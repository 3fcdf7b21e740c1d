// Deterministic sums. Partial sums are stored one per group of elements, and the block that finishes last adds them in
// the order of their index: which block computed which partial, and when, does not matter. No floating-point atomics.
#pragma once
#include "core/ptx.cuh"
#include "core/types.cuh"

// Sum over the 32 lanes of a warp, in every lane.
// Preconditions: all 32 lanes call it together. The tree is fixed; it needs no shared memory and no barrier.
__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Sum over the threads of a block, in thread 0.
// Preconditions: every thread of the block calls it; blockDim.x is a power of two from 32 to 1024. Ends without a
// barrier: a second call needs a __syncthreads() between, because the shared memory is the same.
__device__ __forceinline__ double block_sum(double x) {
  __shared__ double warp_totals[32];
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) warp_totals[threadIdx.x / 32] = x;
  __syncthreads();
  const int warps = blockDim.x / 32;
  if (threadIdx.x < 32) {
    x = threadIdx.x < warps ? warp_totals[threadIdx.x] : 0.0;
    for (int offset = warps / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  return x;
}

// True in every thread of the block that arrives last; what any block wrote before is then visible to it.
// Preconditions: every thread of every block calls it once; *ticket is 0 before the launch, and is 0 again after it
// (the increment wraps), so that the next launch in the stream needs no memset. A launch that shares the ticket with
// another one running at the same time would count both: tickets belong to one stream.
__device__ __forceinline__ bool arrive_last(unsigned* ticket) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) last = increment_and_synchronize(ticket, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  return last;
}

// x[first] + x[first + step] + ... up to `count`, for sums that the whole GPU waits for: loads overlap, and additions
// form a tree instead of a chain. Reads past L1, where a stale line of an earlier launch could lie.
__device__ __forceinline__ double sum_every(const double* x, int64 first, int64 step, int64 count) {
  constexpr int kAhead = 16;
  double total = 0.0;
  for (int64 start = first; start < count; start += kAhead * step) {
    double term[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const int64 i = start + j * step;
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

// partials[0] + partials[1] + ... in an order that depends on `count` and blockDim.x alone, in thread 0.
// Preconditions: those of block_sum.
__device__ __forceinline__ double sum_partials(const double* partials, int64 count) {
  return block_sum(sum_every(partials, threadIdx.x, blockDim.x, count));
}
