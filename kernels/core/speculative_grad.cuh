// Speculative gradients: forward writes the gradient together with the value, before backward knows its scale.
//
//   gradient = grad_output * weight * d loss / d x        weight = 1 / divisor, a factor of the launch
//
// 1. Forward scales the gradient with an expected grad_output, read from a table in device memory. Each warp records
//    the grad_output that it used.
// 2. Backward launches the same kernel with the true grad_output, and each warp compares its record with it. If they
//    have the same bits, it exits: the gradient is already in place.
// 3. If they differ, the warp computes its part of the gradient again with the true scale. The arithmetic is the same,
//    so the bits do not depend on which launch wrote them.
// 4. If the warp that finds a difference is warp 0, it makes the true grad_output the expected one of the next call.
//    The host never waits.
//
// The expected grad_output is one double in a table that all calls share. It may change at any moment: another stream
// writes it, or another loss hashes to the same slot. Two warps of one launch may therefore read different values.
// Hence one record per warp, and the same grid in both launches. A wrong expectation costs a second pass, never a wrong
// gradient.
//
// Both launches use one kernel, because a process waits for the compilation of a second kernel about as long as for
// that of the first. Where backward continues from what forward has left (partial sums, or coefficients of rows), it
// has a kernel of its own, verify_gradient.
//
// Records belong to warps and not to blocks, because a record per block needs a barrier between the record and the
// loads of the operands.
//
// Traffic: 8 bytes read and 8 bytes written per warp. Preconditions: stated at each function.
#pragma once
#include "core/types.cuh"

__device__ __forceinline__ int64 global_warp() {
  return static_cast<int64>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
}

// grad_output * weight where the product is known at launch.
template <class Compute>
struct KnownScale {
  Compute value;
  __device__ __forceinline__ Compute factor() {
    return value;
  }
};

// Returns the grad_output that gradients are scaled with: the true one if there is one, in backward; otherwise the
// expected one, or 1 if there is no table.
template <class Result>
__device__ __forceinline__ double given_or_expected(const Result* grad_output, const double* expected_grad_output) {
  if (grad_output != nullptr) return widen<double>(*grad_output);
  return expected_grad_output == nullptr ? 1.0 : __ldcg(expected_grad_output);
}

// given_or_expected() * weight. An expected grad_output is recorded in used_grad_output[global_warp()].
//
// The constructor issues the load. The first call of factor() waits for it, after the loads of the operands: a small
// loss is bound by latency. The parameter is a weight and not a divisor, because a division in double is a function
// call, and the operands in flight would be spilled around it.
//
// Preconditions: every lane of the warp constructs it, and all lanes make the first call of factor() together.
template <class Compute>
struct SpeculativeScale {
  double* used_grad_output;
  double weight;
  double loaded;
  bool records;
  bool known;
  Compute value;

  template <class Result>
  __device__ __forceinline__ SpeculativeScale(const Result* grad_output, const double* expected_grad_output,
                                              double* used_grad_output, double weight)
      : used_grad_output(used_grad_output),
        weight(weight),
        loaded(given_or_expected(grad_output, expected_grad_output)),
        records(grad_output == nullptr),
        known(false) {
  }

  __device__ __forceinline__ Compute factor() {
    if (!known) {
      // Every lane takes lane 0's value: the slot may change between two reads.
      const double grad_output = __shfl_sync(0xffffffffu, loaded, 0);
      if (threadIdx.x % 32 == 0 && records) used_grad_output[global_warp()] = grad_output;
      value = static_cast<Compute>(grad_output * weight);
      known = true;
    }
    return value;
  }
};

// The true grad_output * weight. As in SpeculativeScale, the first call of factor() waits for the load. Preconditions:
// those of SpeculativeScale.
template <class Compute, class Result>
struct UpstreamScale {
  double weight;
  Result loaded;
  bool known;
  Compute value;

  __device__ __forceinline__ UpstreamScale(const Result* grad_output, double weight)
      : weight(weight), loaded(*grad_output), known(false) {
  }

  __device__ __forceinline__ Compute factor() {
    if (!known) {
      // The shuffle keeps the compiler from waiting for the value before it has issued the loads of the operands.
      value = static_cast<Compute>(__shfl_sync(0xffffffffu, widen<double>(loaded), 0) * weight);
      known = true;
    }
    return value;
  }
};

// Returns true in every lane if the gradient of this warp was written with a grad_output other than the true one; warp
// 0 of the grid then makes the true one the expected one. Values are compared as bits: a NaN equals itself, and -0
// differs from 0. Without records the gradient is always stale. Precondition: every lane of the warp calls it together.
__device__ __forceinline__ bool grad_scale_is_stale(double true_grad_output, const double* used_grad_output,
                                                    double* expected_grad_output) {
  const bool stale = used_grad_output == nullptr ||
                     __double_as_longlong(used_grad_output[global_warp()]) != __double_as_longlong(true_grad_output);
  if (stale && expected_grad_output != nullptr && global_warp() == 0 && threadIdx.x == 0)
    *expected_grad_output = true_grad_output;
  return stale;
}
