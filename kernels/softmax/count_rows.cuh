// Divisor of a mean over rows.
//
//   count = sum over active rows of the class weight of the label (or of 1)
//
// There are three ways to compute it:
//
// - count_rows: a launch of its own before the losses. Each warp adds the rows of a chunk, lane by lane, and stores one
//   partial sum. The block that arrives last adds the partial sums in order.
// - Tally (rows.cuh): counts while rows are evaluated. It serves values without gradients, and gradients that assume
//   that all rows are active.
// - self_count: runs inside the kernels of the losses, for few rows. Each warp reads all labels and counts the active
//   rows, or adds their weights. It saves a launch, which takes longer on the host.
//
// Traffic: labels and mask are read, and class weights if the divisor is a sum of weights. Preconditions: stated at
// each function.
#pragma once
#include "softmax/rows.cuh"

// Number of active rows, or with kWeighs the sum of their weights, in every lane. The labels that the first warp reads
// stay in L1 for the others. A count is an integer, so the order of additions changes no bit; weights are added in the
// order of count_rows. Preconditions: all lanes of the warp call it together; with kWeighs, count_rows would process
// all rows as one chunk.
template <bool kWeighs = false, class Program>
__device__ __forceinline__ double self_count(const Program& program) {
  constexpr int kUnroll = 8;
  const int rows = static_cast<int>(program.space.rows);
  int count = 0;
  double weight = 0.0;
#pragma unroll 1
  for (int row = threadIdx.x % kWarp; row < rows; row += kUnroll * kWarp) {
    typename Program::LabelLoad label_load[kUnroll];
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      int64 offset[kRowStreams];
      program.space.offsets(row + k * kWarp < rows ? row + k * kWarp : 0, offset);
      label_load[k] = program.load_label(offset);
    }
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      // No branch on `exists`: loads would wait for the labels before them.
      const bool exists = row + k * kWarp < rows;
      if constexpr (kWeighs) {
        const double term = program.divisor_term(label_load[k]);
        weight += exists ? term : 0.0;
      } else {
        count += static_cast<int>(exists & program.is_active(label_load[k]));
      }
    }
  }
  return warp_sum(kWeighs ? weight : static_cast<double>(count));
}

// self_count and its reciprocal, evaluated at the place of use. Preconditions: those of self_count, at that place.
template <class Program, bool kWeighs = false>
struct SelfCount {
  const Program& program;
  __device__ __forceinline__ operator double() const {
    return self_count<kWeighs>(program);
  }
  // Count from labels that are loaded already: this lane holds those of rows lane, 32 + lane, ... Precondition: labels
  // of rows that do not exist are masked.
  template <int kCount>
  __device__ __forceinline__ double of(const typename Program::LabelLoad (&labels)[kCount]) const {
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sum += kWeighs ? static_cast<double>(program.divisor_term(labels[i])) : program.is_active(labels[i]);
    }
    return warp_sum(sum);
  }
};
template <class Program, bool kWeighs = false>
struct SelfCountedScale {
  const Program& program;
  __device__ __forceinline__ operator double() const {
    return reciprocal_or_zero(self_count<kWeighs>(program));
  }
};

// Writes the divisor to *count. `memory` is a workspace with a partial sum per chunk. Preconditions: every thread of
// every block calls it once; blockDim.x is a power of two.
template <class Program>
__device__ __forceinline__ void count_rows(const Program& program, int64 chunks, double* memory, double* count) {
  // Labels in flight per thread. A loop that may end at each label would have only one in flight.
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
        // Outside the condition, as in self_count.
        const double term = program.divisor_term(label_load[k]);
        total += row + k * step < rows ? term : 0.0;
      }
    }
    total = warp_sum(total);
    if (threadIdx.x % kWarp == 0) work.partials[chunk] = total;
  }
  divide_sum(chunks, memory, 1.0, count);
}
