// The instructions of the row engine that CUDA C++ has no name for without its headers, as ptx.cuh; what compiles
// kernels for something else has its own of each.
#pragma once

#ifdef __CUDA_ARCH__

// 2^x, with 0 for what would be subnormal: the instruction alone, where exp2f has four more around it for those.
__device__ __forceinline__ float exp2_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger one, or NaN if x is.
__device__ __forceinline__ float max_propagating_nan(float x, float y) {
#if __CUDA_ARCH__ >= 800
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
#else
  return x < y ? y : x;
#endif
}

// The same number, which the compiler does not find out again where it is used, but keeps.
__device__ __forceinline__ float opaque(float x) {
  asm volatile("" : "+f"(x));
  return x;
}
__device__ __forceinline__ double opaque(double x) {
  asm volatile("" : "+d"(x));
  return x;
}
__device__ __forceinline__ unsigned opaque(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// 0, as the compiler does not know: what is read from an address with it is no number that threads share, for all it
// can tell. It moves those to registers of their own, and for that it waits for the memory.
__device__ __forceinline__ int64 opaque_zero() {
  unsigned y;
  asm("mov.u32 %0, %%tid.y;" : "=r"(y));
  return y;
}

// Whether pairs of 16-bit numbers can be compared in their word.
constexpr bool kHasPairMax = __CUDA_ARCH__ >= 800;

// The larger of two numbers in each half of a word, and that of a number and NaN is the number.
__device__ __forceinline__ unsigned max_half_pair(unsigned x, unsigned y) {
  unsigned z = 0;
#if __CUDA_ARCH__ >= 800
  asm("max.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
#endif
  return z;
}
__device__ __forceinline__ unsigned max_bfloat16_pair(unsigned x, unsigned y) {
  unsigned z = 0;
#if __CUDA_ARCH__ >= 800
  asm("max.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
#endif
  return z;
}

// Whether there are copies past the registers.
constexpr bool kHasCpAsync = __CUDA_ARCH__ >= 800;

// Begins to copy kBytes (4, 8 or 16, to which both addresses are aligned) from memory to shared memory, past the
// registers. Who asked for it sees it after cp_async_wait_all(), others behind a barrier after that.
template <int kBytes>
__device__ __forceinline__ void cp_async_bytes(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(from), "n"(kBytes) : "memory");
  }
#endif
}
__device__ __forceinline__ void cp_async_wait_all() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Has bytes (a multiple of 16, to which the address is aligned) brought from memory to the second-level cache.
__device__ __forceinline__ void prefetch_l2(const void* from, unsigned bytes) {
  // CUDA 11.8 knows the GPU, but not the instruction.
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 12
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// Clusters: blocks that run at once and reach each other's shared memory. An attribute of a kernel that runs so.
#if __CUDA_ARCH__ >= 900
#define CLUSTER_DIMS(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define CLUSTER_DIMS(blocks)
#endif
// The place of this block in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
// A barrier of all threads of the cluster's blocks, in two steps: what any of them wrote before its arrival, the others
// see behind their wait.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Writes x where block `rank` has what this block has at `place`, an object in shared memory.
// Precondition: block `rank` still runs.
__device__ __forceinline__ void store_dsmem(unsigned* slot, unsigned rank, unsigned x) {
#if __CUDA_ARCH__ >= 900
  const unsigned here = static_cast<unsigned>(__cvta_generic_to_shared(slot));
  asm volatile(
      "{\n.reg .u32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.u32 [there], %2;\n}" ::"r"(
          here),
      "r"(rank), "r"(x)
      : "memory");
#endif
}

#endif
