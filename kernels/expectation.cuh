// One pass: the gradient is written while the value is computed, before its scale is known.
//
// The forward kernel scales the gradient with an expected grad_output, and each block notes the one it used. In backward
// each block compares its note with the true grad_output and leaves at once when they agree; otherwise it computes its
// part of the gradient again, with the true scale and otherwise the same arithmetic, so the bits do not depend on which
// kernel wrote them. The true value becomes the expectation of the next call. Nothing waits for the host.
//
// The expectation is one double in a table shared by all calls. It may change at any moment (another stream, another
// loss that hashes to the same slot), and two blocks of one launch may read different values: hence one note per block,
// and the same grid in both kernels. A wrong expectation costs a second pass, never a wrong gradient.

// The expected grad_output, in every thread of the block. Without a table the expectation is 1.
// Preconditions: every thread of the block calls it once.
__device__ __forceinline__ double expect(const double* expected, double* used) {
  __shared__ double grad_output;
  if (threadIdx.x == 0) {
    // One thread reads for all: the slot may change between two reads.
    grad_output = expected == nullptr ? 1.0 : __ldcg(expected);
    if (used != nullptr) used[blockIdx.x] = grad_output;
  }
  __syncthreads();
  return grad_output;
}

// The true grad_output in every thread of the block; `stale` tells whether this block's gradient was written with
// another one. Compared as bits: a NaN equals itself, and -0 differs from 0. Without notes the gradient is always stale.
// Preconditions: every thread of the block calls it once.
__device__ __forceinline__ double verify(double true_grad_output, const double* used, double* expected, bool* stale) {
  __shared__ bool differs;
  if (threadIdx.x == 0) {
    differs = used == nullptr || __double_as_longlong(used[blockIdx.x]) != __double_as_longlong(true_grad_output);
    if (differs && expected != nullptr && blockIdx.x == 0) *expected = true_grad_output;
  }
  __syncthreads();
  *stale = differs;
  return true_grad_output;
}
