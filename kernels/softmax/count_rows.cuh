// The divisor of a mean over rows.
//
//   count = sum over active rows of the class weight of the label (or of 1)
//
// It is found in one of three ways:
//
// - count_rows, a launch of its own before the losses. Each warp adds the rows of a chunk, lane by lane, and stores one
//   partial sum; the block that arrives last adds the partial sums in order.
// - Tally (rows.cuh), while rows are evaluated: for values alone, and for gradients that assume that all rows are
// active.
// - self_count, in the kernels of the losses, for few rows: each warp reads all labels and counts them, or adds their
//   weights. It spares a launch, which takes longer on the host.
//
// The functions here read labels and mask only, and count_rows class weights.
#pragma once
#include "softmax/rows.cuh"

// Number of active rows, or with kWeighs the sum of their weights, in every lane. The labels of the first warp to read
// them stay in L1 for the others. A number is an integer, so the order of additions changes no bit; weights are added
// in the order of count_rows. Preconditions: every lane of the warp calls it together; with kWeighs count_rows takes
// the rows as one chunk.
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
      // No branch on whether a row exists: loads would wait for the labels before them.
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

// self_count and its reciprocal, computed where they are used. Preconditions: those of self_count, at that place.
template <class Program, bool kWeighs = false>
struct SelfCount {
  const Program& program;
  __device__ __forceinline__ operator double() const {
    return self_count<kWeighs>(program);
  }
  // The count from labels that are loaded already: this lane has those of rows lane, 32 + lane, ... Labels of rows
  // that do not exist are masked.
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
        // Outside of the condition, as in self_count.
        const double term = program.divisor_term(label_load[k]);
        total += row + k * step < rows ? term : 0.0;
      }
    }
    total = warp_sum(total);
    if (threadIdx.x % kWarp == 0) work.partials[chunk] = total;
  }
  divide_sum(chunks, memory, 1.0, count);
}
