// PTX instructions for which CUDA C++ has no name without its headers. All inline PTX is in this file and in
// softmax/row_ptx.cuh, so a build for another target (cupylosses/testing/host, the CPU) only has to supply these few
// functions.
#pragma once

#ifdef __CUDA_ARCH__

__device__ __forceinline__ float half_bits_to_float(unsigned short bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

// Rounds two floats to nearest even and packs them into one register, `low` in the lower half.
__device__ __forceinline__ unsigned floats_to_half_pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
  unsigned word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  unsigned short a, b;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(a) : "f"(low));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(b) : "f"(high));
  return static_cast<unsigned>(b) << 16 | a;
#endif
}

#if __CUDA_ARCH__ >= 800
__device__ __forceinline__ unsigned floats_to_bfloat16_pair(float low, float high) {
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
#endif

// Prefetches the cache line at `address` into L2. Precondition: the address is that of an element.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// 2^x by one instruction that flushes subnormal results to 0. exp2f adds four instructions for subnormal numbers.
__device__ __forceinline__ float exp2_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Conversions between float and double that keep subnormal numbers, which -ftz=true flushes to 0. Each is one
// instruction; a cast in C++ takes up to two more, which flush. The last conversion rounds towards zero.
__device__ __forceinline__ double float_to_double(float x) {
  double y;
  asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float double_to_float(double x) {
  float y;
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
  return y;
}
__device__ __forceinline__ float double_to_float_rz(double x) {
  float y;
  asm("cvt.rz.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
  return y;
}

// Minimum and maximum of two numbers; NaN if either is NaN.
__device__ __forceinline__ float smaller_or_nan(float x, float y) {
#if __CUDA_ARCH__ >= 800
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
#else
  return x < y ? x : (y <= x ? y : x + y);
#endif
}
__device__ __forceinline__ float larger_or_nan(float x, float y) {
#if __CUDA_ARCH__ >= 800
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
#else
  return x > y ? x : (y >= x ? y : x + y);
#endif
}

// Adds x to `total` unless a < b, so also if a or b is NaN: two instructions.
__device__ __forceinline__ void add_unless_less(float a, float b, unsigned x, unsigned& total) {
  asm("{\n.reg .pred active;\nsetp.geu.ftz.f32 active, %1, %2;\n@active add.u32 %0, %0, %3;\n}"
      : "+r"(total)
      : "f"(a), "f"(b), "r"(x));
}
__device__ __forceinline__ void add_unless_less(double a, double b, unsigned x, unsigned& total) {
  asm("{\n.reg .pred active;\nsetp.geu.f64 active, %1, %2;\n@active add.u32 %0, %0, %3;\n}"
      : "+r"(total)
      : "d"(a), "d"(b), "r"(x));
}

// Returns x and makes the compiler evaluate it unconditionally. Otherwise it branches around a few instructions that
// only one side of a select needs; the branch keeps it from interleaving elements and costs more than the instructions.
// The asm is not volatile, so an unused result is still eliminated. It contains an instruction, because with empty text
// and without volatile NVRTC 13 lost the value after it, and entropies of log-probabilities were 1.4e-45.
__device__ __forceinline__ float force_computed(float x) {
  float computed;
  asm("mov.f32 %0, %1;" : "=f"(computed) : "f"(x));
  return computed;
}

// a * b in 64 bits, which an address computation absorbs in one instruction. Where the compiler keeps a factor as a
// 64-bit integer because many products use it, a product takes four.
__device__ __forceinline__ long long wide_product(int a, int b) {
  long long y;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(y) : "r"(a), "r"(b));
  return y;
}

// Increments *counter, which wraps around to 0 after `limit`, and returns the old value. Acquire and release:
// everything that the block wrote before its last barrier is visible to any thread that reads the new value here, and
// everything that the blocks counted so far wrote is visible to this thread. One instruction instead of an atomic
// between two full fences, which took a microsecond of every small loss.
__device__ __forceinline__ unsigned increment_and_synchronize(unsigned* counter, unsigned limit) {
  unsigned old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(limit) : "memory");
  return old;
}
// Adds x to *counter and returns the old value, with the same acquire and release.
__device__ __forceinline__ unsigned add_and_synchronize(unsigned* counter, unsigned x) {
  unsigned old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(x) : "memory");
  return old;
}
// Reads a counter that others increase by add_and_synchronize. Acquire: everything that they wrote before is visible to
// this thread.
__device__ __forceinline__ unsigned load_and_synchronize(const unsigned* counter) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
}

#endif
