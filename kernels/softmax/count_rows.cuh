// The divisor of a mean over rows.
//
//   count = sum over active rows of the class weight of the label (or of 1)
//
// 1. Each warp adds the rows of a chunk, lane by lane, and stores one partial sum.
// 2. The block that arrives last adds the partial sums in order.
//
// A launch of its own, before the losses: speculative gradients need the divisor while values are computed. Reads
// labels, mask and class weights only.
#pragma once
#include "softmax/rows.cuh"

// Preconditions: every thread of every block calls it once; blockDim.x is a power of two.
template <class Program>
__device__ __forceinline__ void count_rows(const Program& program, int64 chunks, double* memory, double* count) {
  // Labels that a thread has in flight; a loop that may end at each label would have one.
  constexpr int kUnroll = 8;
  const Workspace work = workspace(memory);
  const int64 rows = program.space.rows, warps = static_cast<int64>(gridDim.x) * (blockDim.x / kWarp);
  const int64 step = chunks * kWarp;
#pragma unroll 1
  for (int64 chunk = global_warp(); chunk < chunks; chunk += warps) {
    double total = 0.0;
    for (int64 row = chunk * kWarp + threadIdx.x % kWarp; row < rows; row += kUnroll * step) {
      typename Program::LabelLoad label_load[kUnroll];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        int64 offset[kRowStreams];
        program.space.offsets(row + k * step < rows ? row + k * step : 0, offset);
        label_load[k] = program.load_label(offset);
      }
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        total += row + k * step < rows ? static_cast<double>(program.divisor_term(label_load[k])) : 0.0;
      }
    }
    total = warp_sum(total);
    if (threadIdx.x % kWarp == 0) work.partials[chunk] = total;
  }
  divide_sum(chunks, memory, 1.0, count);
}
