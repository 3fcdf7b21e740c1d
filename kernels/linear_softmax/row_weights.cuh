// Weights of rows, such as the tokens of a sequence, applied around the row kernels of softmax/, which do not know
// them.
//
//   loss = (1 / d) sum_n w_n l_n,    d = sum over rows that count of w_n (times the class weight of the label)
//
// 1. sum_row_weights computes d, where it depends on the weights.
// 2. weigh_rows computes the grad_output of each row, grad_output w_n / d, for the row kernels that take one per row.
// 3. sum_weighted_rows adds the losses of the rows; without a reduction, weigh_rows scales them.
//
// N numbers are few beside N rows of logits: one block computes a sum, in an order that depends on N alone.
#pragma once
#include "core/reduce.cuh"
#include "core/types.cuh"

// multiple * *count, or `multiple` if `count` is null.
__device__ __forceinline__ double divisor_of(double multiple, const double* count) {
  return count == nullptr ? multiple : multiple * *count;
}

// Sums the shares of the rows that count. A row's share is its weight, times the class weight of its label if there are
// class weights. A row counts unless it is masked, or its label is ignored or out of range; without a mask, or without
// labels, that condition is dropped. Preconditions: one block, blockDim.x a power of two.
template <class Label, class ClassWeight, class Weight>
__device__ __forceinline__ void sum_row_weights(const Label* labels, const ClassWeight* class_weights, const bool* mask,
                                                const Weight* weights, double* total, int64 rows, int64 ignored,
                                                int64 classes) {
  double sum = 0.0;
  for (int64 n = threadIdx.x; n < rows; n += blockDim.x) {
    if (mask != nullptr && !mask[n]) continue;
    double share = widen<double>(weights[n]);
    if (labels != nullptr) {
      const int64 label = static_cast<int64>(labels[n]);
      if (label == ignored || label < 0 || label >= classes) continue;
      if (class_weights != nullptr) share *= widen<double>(class_weights[label]);
    }
    sum += share;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) *total = sum;
}

// to[n] = from[n * step] * w[n] / d, or 0 if d is 0: a mean over nothing. Threads stride over the rows; any grid will
// do.
template <class From, class Weight, class To>
__device__ __forceinline__ void weigh_rows(const From* from, int64 step, const Weight* weights, double multiple,
                                           const double* count, To* to, int64 rows) {
  const double divisor = divisor_of(multiple, count), scale = divisor == 0.0 ? 0.0 : 1.0 / divisor;
  const int64 threads = static_cast<int64>(gridDim.x) * blockDim.x;
  for (int64 n = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; n < rows; n += threads) {
    to[n] = Narrow<To>::from(widen<double>(from[n * step]) * widen<double>(weights[n]) * scale);
  }
}

// value = sum_n w[n] * losses[n] / d. Preconditions: one block, blockDim.x a power of two.
template <class Loss, class Weight, class Result>
__device__ __forceinline__ void sum_weighted_rows(const Loss* losses, const Weight* weights, double multiple,
                                                  const double* count, Result* value, int64 rows) {
  double sum = 0.0;
  for (int64 n = threadIdx.x; n < rows; n += blockDim.x) sum += widen<double>(losses[n]) * widen<double>(weights[n]);
  sum = block_sum(sum);
  if (threadIdx.x == 0) *value = Narrow<Result>::from(sum / divisor_of(multiple, count));
}
