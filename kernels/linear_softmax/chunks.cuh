// Small kernels between the matrix products of a linear layer with a softmax loss on top, beside the row kernels of
// softmax/. Logits of N rows and V classes are computed in chunks of rows,
//
//   Z = X W^T + b,     G = d loss / d Z (a row kernel writes it over Z),
//   dX = G W,          dW += G^T X,          db += sum_n G
//
// 1. snapshot_expected copies the expected grad_output, which may change at any moment, so that all chunks use the same
//    one.
// 2. For each chunk, a row kernel of softmax/ leaves G and the chunk's share of the loss.
// 3. add_to_bias sums the columns of G.
// 4. finish_value adds the shares in the order of the chunks.
// 5. In backward, rescale multiplies gradients by true / expected grad_output, or exits at once if the two are equal;
//    add_rescaled adds the product to an accumulated gradient of the weight.
//
// Results do not depend on the grid, and nothing is added atomically.
#pragma once
#include "core/reduce.cuh"
#include "core/types.cuh"

// Copies the expected grad_output, or 1 without a table, for this call. Precondition: one thread.
__device__ __forceinline__ void snapshot_expected(const double* expected, double* used) {
  *used = expected == nullptr ? 1.0 : __ldcg(expected);
}

// True if `grad_output` may become the expected one. A gradient cannot be rescaled from an expectation that is 0 or not
// finite, so such values are never expected.
__device__ __forceinline__ bool can_be_expected(double grad_output) {
  return grad_output != 0.0 && grad_output - grad_output == 0.0;
}

// Converts grad_output to the double that row kernels read, and makes it the expected one if it
// can be. Precondition: one thread.
template <class Result>
__device__ __forceinline__ void widen_grad_output(const Result* grad_output, double* expected, double* used) {
  *used = widen<double>(*grad_output);
  if (expected != nullptr && can_be_expected(*used)) *expected = *used;
}

// Sum of the shares of all chunks, in the order of the chunks. Precondition: one thread.
template <class Result>
__device__ __forceinline__ void finish_value(const double* shares, Result* value, int64 chunks) {
  double total = 0.0;
  for (int64 i = 0; i < chunks; ++i) total += shares[i];
  *value = Narrow<Result>::from(total);
}

// g *= true / used, for a gradient of `count` elements. The result is rounded once more than where the expectation was
// right. Preconditions: `gradient` is aligned to kVec elements; `expected` is null in all but one of several launches.
template <int kVec, class Compute, class Storage, class Result>
__device__ __forceinline__ void rescale(const Result* grad_output, const double* used, double* expected,
                                        Storage* gradient, int64 count) {
  const double true_grad_output = widen<double>(*grad_output), before = *used;
  if (__double_as_longlong(true_grad_output) == __double_as_longlong(before)) return;
  const int64 thread = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64 step = static_cast<int64>(gridDim.x) * blockDim.x, vectors = count / kVec;
  if (expected != nullptr && thread == 0 && can_be_expected(true_grad_output)) *expected = true_grad_output;
  const Compute ratio = static_cast<Compute>(true_grad_output / before);
  for (int64 v = thread; v < vectors; v += step) {
    Pack<Storage, kVec> pack = reinterpret_cast<const Pack<Storage, kVec>*>(gradient)[v];
#pragma unroll
    for (int i = 0; i < kVec; ++i) pack.element[i] = Narrow<Storage>::from(widen<Compute>(pack.element[i]) * ratio);
    reinterpret_cast<Pack<Storage, kVec>*>(gradient)[v] = pack;
  }
  for (int64 i = vectors * kVec + thread; i < count; i += step) {
    gradient[i] = Narrow<Storage>::from(widen<Compute>(gradient[i]) * ratio);
  }
}

// main_grad += g * true / used, for `count` elements. Main is float, or double for gradients of double.
//
// Preconditions: both arrays are aligned to kVec elements; `expected` is null in all but one of several launches.
template <int kVec, class Storage, class Result, class Main>
__device__ __forceinline__ void add_rescaled(const Result* grad_output, const double* used, double* expected,
                                             const Storage* gradient, Main* main_grad, int64 count) {
  const double true_grad_output = widen<double>(*grad_output);
  const int64 thread = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64 step = static_cast<int64>(gridDim.x) * blockDim.x, vectors = count / kVec;
  if (expected != nullptr && thread == 0 && can_be_expected(true_grad_output)) *expected = true_grad_output;
  const Main ratio = static_cast<Main>(true_grad_output / *used);
  for (int64 v = thread; v < vectors; v += step) {
    const Pack<Storage, kVec> pack = reinterpret_cast<const Pack<Storage, kVec>*>(gradient)[v];
    Pack<Main, kVec> sum = reinterpret_cast<const Pack<Main, kVec>*>(main_grad)[v];
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum.element[i] += widen<Main>(pack.element[i]) * ratio;
    reinterpret_cast<Pack<Main, kVec>*>(main_grad)[v] = sum;
  }
  for (int64 i = vectors * kVec + thread; i < count; i += step) main_grad[i] += widen<Main>(gradient[i]) * ratio;
}

// Sums the columns of G (rows x classes, rows `pitch` elements apart), adds them to `sums` unless this is the first
// chunk, and stores them to `bias` if this is the last.
//
// 1. A block of 32 warps sums 32 columns, one column per lane; warp w adds rows w, w + 32, ...
// 2. One thread per column adds its 32 partial sums in the order of the warps.
//
// Preconditions: blocks of 1024 threads; gridDim.x * 32 >= classes.
template <class Storage, class Bias>
__device__ __forceinline__ void add_to_bias(const Storage* gradient, double* sums, Bias* bias, int64 rows, int64 first,
                                            int64 last, int64 classes, int64 pitch) {
  __shared__ double partial[32][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64 column = static_cast<int64>(blockIdx.x) * 32 + lane;
  double total = 0.0;
  if (column < classes) {
    for (int64 row = warp; row < rows; row += 32) total += widen<double>(gradient[row * pitch + column]);
  }
  partial[warp][lane] = total;
  __syncthreads();
  if (warp == 0 && column < classes) {
    double sum = first != 0 ? 0.0 : sums[column];
    for (int i = 0; i < 32; ++i) sum += partial[i][lane];
    sums[column] = sum;
    if (last != 0) bias[column] = Narrow<Bias>::from(sum);
  }
}

// to = from, rounded once.
template <class From, class To>
__device__ __forceinline__ void narrow_all(const From* from, To* to, int64 count) {
  const int64 step = static_cast<int64>(gridDim.x) * blockDim.x;
  for (int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
    to[i] = Narrow<To>::from(widen<From>(from[i]));
  }
}
