// Small kernels between the matrix products of a linear layer with a softmax loss on top, beside the row kernels of
// softmax/. Logits of N rows and V classes are computed in chunks of rows,
//
//   Z = X W^T + b,     G = d loss / d Z (written over Z by a row kernel),     dX = G W,     dW += G^T X,     db +=
//   sum_n G
//
// 1. snapshot_expected copies the expected grad_output, which may change at any moment, so that all chunks use one.
// 2. A row kernel of softmax/ per chunk leaves G and the chunk's share of the loss.
// 3. add_to_bias sums the columns of G.
// 4. finish_value adds the shares in the order of the chunks.
// 5. In backward, rescale multiplies gradients by true / expected grad_output, or leaves at once if the two are equal;
//    add_rescaled adds the product to an accumulated gradient of the weight.
//
// Nothing depends on the grid, and nothing is added atomically.
#pragma once
#include "core/reduce.cuh"
#include "core/types.cuh"

// The expected grad_output of this call, and that of calls to come. Precondition: one thread.
__device__ __forceinline__ void snapshot_expected(const double* expected, double* used) {
  *used = expected == nullptr ? 1.0 : __ldcg(expected);
}

// A gradient can be rescaled from what was expected unless that was 0 or not finite, so that is never expected.
__device__ __forceinline__ bool can_be_expected(double grad_output) {
  return grad_output != 0.0 && grad_output - grad_output == 0.0;
}

// grad_output as the double that row kernels read, which becomes the expected one. Precondition: one thread.
template <class Result>
__device__ __forceinline__ void widen_grad_output(const Result* grad_output, double* expected, double* used) {
  *used = widen<double>(*grad_output);
  if (expected != nullptr && can_be_expected(*used)) *expected = *used;
}

// The sum of the shares of all chunks, in their order. Precondition: one thread.
template <class Result>
__device__ __forceinline__ void finish_value(const double* shares, Result* value, int64 chunks) {
  double total = 0.0;
  for (int64 i = 0; i < chunks; ++i) total += shares[i];
  *value = Narrow<Result>::from(total);
}

// g *= true / used, for a gradient of `count` elements. The product is rounded once more than that of a right
// expectation. Preconditions: kVec elements are aligned; `expected` is null but in one launch of several.
template <int kVec, class Compute, class Storage, class Result>
__device__ __forceinline__ void rescale(const Result* grad_output, const double* used, double* expected,
                                        Storage* gradient, int64 count) {
  const double given = widen<double>(*grad_output), before = *used;
  if (__double_as_longlong(given) == __double_as_longlong(before)) return;
  const int64 thread = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64 step = static_cast<int64>(gridDim.x) * blockDim.x, vectors = count / kVec;
  if (expected != nullptr && thread == 0 && can_be_expected(given)) *expected = given;
  const Compute ratio = static_cast<Compute>(given / before);
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
// Preconditions: kVec elements of both arrays are aligned; `expected` is null but in one launch of several.
template <int kVec, class Storage, class Result, class Main>
__device__ __forceinline__ void add_rescaled(const Result* grad_output, const double* used, double* expected,
                                             const Storage* gradient, Main* main_grad, int64 count) {
  const double given = widen<double>(*grad_output);
  const int64 thread = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64 step = static_cast<int64>(gridDim.x) * blockDim.x, vectors = count / kVec;
  if (expected != nullptr && thread == 0 && can_be_expected(given)) *expected = given;
  const Main ratio = static_cast<Main>(given / *used);
  for (int64 v = thread; v < vectors; v += step) {
    const Pack<Storage, kVec> pack = reinterpret_cast<const Pack<Storage, kVec>*>(gradient)[v];
    Pack<Main, kVec> sum = reinterpret_cast<const Pack<Main, kVec>*>(main_grad)[v];
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum.element[i] += widen<Main>(pack.element[i]) * ratio;
    reinterpret_cast<Pack<Main, kVec>*>(main_grad)[v] = sum;
  }
  for (int64 i = vectors * kVec + thread; i < count; i += step) main_grad[i] += widen<Main>(gradient[i]) * ratio;
}

// The sums of the columns of G (rows x classes, rows `pitch` elements apart), added to `sums` unless this is the first
// chunk, and stored to `bias` if this is the last.
//
// 1. A block takes 32 columns, with as many warps; warp w adds rows w, w + 32, ... of them, one column per lane.
// 2. The 32 partial sums of a column are added in the order of the warps by one thread.
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
