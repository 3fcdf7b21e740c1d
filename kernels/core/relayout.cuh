// A copy of an array whose fastest dimension is another one: a transposition, for any number of outer dimensions.
//
//   to[a * to_step + b] = from[a + b * from_step]      a fastest in `from`, b fastest in `to`
//
// 1. A block takes a tile of kA x kB elements. It reads vectors of kVec neighbours along a, coalesced, into registers,
//    all of them before the first is used, and spreads them in shared memory.
// 2. After a barrier it gathers vectors of kVec neighbours along b and writes them, coalesced.
//
// Rows of the tile are kA + 1 elements apart, an odd number, so that neither direction conflicts in a bank.
//
// Traffic: each element is read once and written once; lines at the border of a tile twice at most. Preconditions:
// blocks of kThreads threads, one per tile; for kVec > 1 both bases, both counts and all strides are multiples of kVec.
#pragma once
#include "core/layout.cuh"

template <class Element, int kVec, int kA, int kB, int kThreads, int kRank>
__device__ __forceinline__ void relayout(const Element* from, Element* to, int64 count_a, int64 count_b,
                                         int64 from_step, int64 to_step, const Dimensions<2, kRank>& outer) {
  constexpr int kAcross = kA / kVec, kDown = kB / kVec;  // vectors of a tile along a, along b
  constexpr int kReads = kAcross * kB / kThreads, kWrites = kDown * kA / kThreads;
  static_assert(kReads * kThreads == kAcross * kB && kWrites * kThreads == kDown * kA, "whole rounds");
  constexpr int kPitch = kA + 1;
  __shared__ Element tile[kB * kPitch];
  using P = Pack<Element, kVec>;
  const int64 tiles_a = (count_a + kA - 1) / kA, tiles_b = (count_b + kB - 1) / kB;
  const int64 index = blockIdx.x, matrix = index / (tiles_a * tiles_b), rest = index - matrix * tiles_a * tiles_b;
  const int64 first_a = rest % tiles_a * kA, first_b = rest / tiles_a * kB;
  int64 offset[2];
  outer.offsets(matrix, offset);
  from += offset[0];
  to += offset[1];
  P x[kReads];
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    const int unit = threadIdx.x + i * kThreads;
    const int64 a = first_a + unit % kAcross * kVec, b = first_b + unit / kAcross;
    if (a < count_a && b < count_b) x[i] = load_stream<kVec>(from + a + b * from_step);
  }
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    const int unit = threadIdx.x + i * kThreads;
    Element* const at = tile + unit / kAcross * kPitch + unit % kAcross * kVec;
    if (first_a + unit % kAcross * kVec < count_a && first_b + unit / kAcross < count_b) {
#pragma unroll
      for (int k = 0; k < kVec; ++k) at[k] = x[i].element[k];
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWrites; ++i) {
    const int unit = threadIdx.x + i * kThreads;
    const int b = unit % kDown * kVec, a = unit / kDown;
    if (first_a + a >= count_a || first_b + b >= count_b) continue;
    P y;
#pragma unroll
    for (int k = 0; k < kVec; ++k) y.element[k] = tile[(b + k) * kPitch + a];
    store_pack<kVec>(to + (first_a + a) * to_step + first_b + b, y);
  }
}
