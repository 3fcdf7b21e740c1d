// One pass: the gradient is written while the value is computed, before its scale is known.
//
// The forward kernel scales the gradient with an expected_grad_output grad_output, and each warp notes the one it used.
// In backward each warp compares its note with the true grad_output and leaves at once when they agree; otherwise it
// computes its part of the gradient again, with the true scale and otherwise the same arithmetic, so the bits do not
// depend on which kernel wrote them. The true value becomes the speculative of the next call. Nothing waits for the
// host.
//
// The speculative is one double in a table shared by all calls. It may change at any moment (another stream, another
// loss that hashes to the same slot), and two warps of one launch may read different values: hence one note per warp,
// and the same grid in both kernels. A wrong speculative costs a second pass, never a wrong gradient.
//
// Per warp, not per block, because then no barrier stands between the note and the loads of the operands.
#pragma once
#include "core/types.cuh"

__device__ __forceinline__ int64 global_warp() {
  return static_cast<int64>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
}

// grad_output * weight when it is known from the start.
template <class Compute>
struct KnownScale {
  Compute value;
  __device__ __forceinline__ Compute factor() {
    return value;
  }
};

// expected_grad_output grad_output * weight, noted in used_grad_output[warp]. Without a table the speculative is 1. The
// load is issued when this is made and awaited when the factor is first asked for, behind the loads of the operands: a
// small loss is all latency. A weight and not a divisor, because a division in double is a call, around which those
// loads would have to be spilled. Preconditions: every lane of the warp makes it, and asks the first time, together.
template <class Compute>
struct SpeculativeScale {
  double* used_grad_output;
  double weight;
  double loaded;
  bool known;
  Compute value;

  __device__ __forceinline__ SpeculativeScale(const double* expected_grad_output, double* used_grad_output,
                                              double weight)
      : used_grad_output(used_grad_output),
        weight(weight),
        loaded(expected_grad_output == nullptr ? 1.0 : __ldcg(expected_grad_output)),
        known(false) {
  }

  __device__ __forceinline__ Compute factor() {
    if (!known) {
      // Lane 0's for all: the slot may change between two reads.
      const double grad_output = __shfl_sync(0xffffffffu, loaded, 0);
      if (threadIdx.x % 32 == 0) used_grad_output[global_warp()] = grad_output;
      value = static_cast<Compute>(grad_output * weight);
      known = true;
    }
    return value;
  }
};

// Whether this warp's gradient was written with another grad_output than the true one, the same in every lane. Compared
// as bits: a NaN equals itself, and -0 differs from 0. Without notes the gradient is always stale.
// Preconditions: every lane of the warp calls it together.
__device__ __forceinline__ bool grad_scale_is_stale(double true_grad_output, const double* used_grad_output,
                                                    double* expected_grad_output) {
  const bool stale = used_grad_output == nullptr ||
                     __double_as_longlong(used_grad_output[global_warp()]) != __double_as_longlong(true_grad_output);
  if (stale && expected_grad_output != nullptr && global_warp() == 0 && threadIdx.x == 0)
    *expected_grad_output = true_grad_output;
  return stale;
}
