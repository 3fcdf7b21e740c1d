// Copy of an array into a layout with another fastest dimension: a transpose, with any number of outer dimensions.
//
//   to[a * to_step + b] = from[a + b * from_step]      a is contiguous in `from`, b is contiguous in `to`
//
// 1. Each block copies one tile of kA x kB elements. A thread loads all of its vectors of kRead elements along a,
//    coalesced, into registers before it uses the first, and scatters them into shared memory.
// 2. After a barrier it gathers vectors of kWritten elements along b and stores them, coalesced.
//
// Rows of the tile are kA + 1 elements apart, an odd number, so neither direction has bank conflicts.
//
// Traffic: each element is read once and written once; cache lines at the border of a tile are touched at most twice.
// Preconditions: one block of kThreads threads per tile; kA and kB are even; the base, the count along a and all
// strides of `from` are multiples of kRead; those of `to`, with the count along b, are multiples of kWritten.
#pragma once
#include "core/layout.cuh"

template <class Element, int kRead, int kWritten, int kA, int kB, int kThreads, int kRank>
__device__ __forceinline__ void relayout(const Element* from, Element* to, int64 count_a, int64 count_b,
                                         int64 from_step, int64 to_step, const Dimensions<2, kRank>& outer) {
  constexpr int kAcross = kA / kRead, kDown = kB / kWritten;                      // vectors of a tile along a, along b
  constexpr int kReadLines = kThreads / kAcross, kWriteLines = kThreads / kDown;  // lines that a block covers at once
  constexpr int kReads = (kB + kReadLines - 1) / kReadLines, kWrites = (kA + kWriteLines - 1) / kWriteLines;
  static_assert(kAcross * kRead == kA && kDown * kWritten == kB && kReadLines > 0 && kWriteLines > 0, "whole vectors");
  constexpr int kPitch = kA + 1;
  __shared__ Element tile[kB * kPitch];
  const int64 tiles_a = (count_a + kA - 1) / kA, tiles_b = (count_b + kB - 1) / kB;
  const int64 index = blockIdx.x, matrix = index / (tiles_a * tiles_b), tile_index = index - matrix * tiles_a * tiles_b;
  // Consecutive tiles are neighbours along the dimension with fewer tiles. Blocks that run at the same time then cover
  // whole rows of one array and long parts of rows of the other.
  const bool along_a = tiles_a <= tiles_b;
  const int64 fewest = along_a ? tiles_a : tiles_b, fast = tile_index % fewest, slow = tile_index / fewest;
  const int64 first_a = (along_a ? fast : slow) * kA, first_b = (along_a ? slow : fast) * kB;
  // Number of elements of this tile along a and along b.
  const int length_a = static_cast<int>(count_a - first_a < kA ? count_a - first_a : kA);
  const int length_b = static_cast<int>(count_b - first_b < kB ? count_b - first_b : kB);
  int64 offset[2];
  outer.offsets(matrix, offset);
  const int thread = static_cast<int>(threadIdx.x);
  {
    const int a = thread % kAcross * kRead, b = thread / kAcross;
    const bool reads = b < kReadLines && a < length_a;
    const Element* at = from + offset[0] + first_a + a + (first_b + b) * from_step;
    Pack<Element, kRead> x[kReads];
#pragma unroll
    for (int i = 0; i < kReads; ++i, at += kReadLines * from_step) {
      if (reads && b + i * kReadLines < length_b) x[i] = load_stream<kRead>(at);
    }
    Element* const place = tile + b * kPitch + a;
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      if (!reads || b + i * kReadLines >= length_b) continue;
#pragma unroll
      for (int k = 0; k < kRead; ++k) place[i * kReadLines * kPitch + k] = x[i].element[k];
    }
  }
  __syncthreads();
  const int b = thread % kDown * kWritten, a = thread / kDown;
  const bool writes = a < kWriteLines && b < length_b;
  Element* at = to + offset[1] + (first_a + a) * to_step + first_b + b;
  const Element* const place = tile + b * kPitch + a;
#pragma unroll
  for (int i = 0; i < kWrites; ++i, at += kWriteLines * to_step) {
    if (!writes || a + i * kWriteLines >= length_a) continue;
    Pack<Element, kWritten> y;
#pragma unroll
    for (int k = 0; k < kWritten; ++k) y.element[k] = place[k * kPitch + i * kWriteLines];
    store_pack<kWritten>(at, y);
  }
}
