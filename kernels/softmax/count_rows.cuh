// What a mean over rows is divided by: the sum of the class weights of the labels that count, or their number. It is
// found before the losses are, because gradients are written together with them.
#pragma once
#include "softmax/rows.cuh"

// One sum per warp and step, in order; then by the block that arrives last.
// Preconditions: every thread of every block calls it once; blockDim.x is a power of two.
template <class Program>
__device__ __forceinline__ void count_rows(const Program& program, int64 chunks, double* memory, double* count) {
  // Labels that a thread has on their way together; a loop that may end at each of them has one.
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
