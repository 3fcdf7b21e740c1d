// Inline PTX of the softmax kernels, in addition to core/ptx.cuh: asynchronous copies to shared memory, L2 prefetch,
// clusters, maxima of packed 16-bit pairs. A compiler for another target supplies its own version of each function.
#pragma once

#ifdef __CUDA_ARCH__

// Returns 1 / x to within one unit in the last place, and 0 for subnormal results: the bare instruction. Precondition:
// x is not subnormal.
__device__ __forceinline__ float reciprocal_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Sum over the 32 lanes of a warp, in every lane. Preconditions: all 32 lanes call it together.
__device__ __forceinline__ int warp_sum_int(int x) {
#if __CUDA_ARCH__ >= 800
  int sum;
  asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(sum) : "r"(x));
  return sum;
#else
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
#endif
}

// Returns x, opaque to the compiler, which then keeps the value in a register instead of computing it again at each
// use.
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
template <class T>
__device__ __forceinline__ T* opaque(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

// Selects four of the eight bytes of two words. Each hexadecimal digit of `which`, lowest first, names the source of
// one result byte: 0 to 3 for the bytes of x, 4 to 7 for the bytes of y.
__device__ __forceinline__ unsigned select_bytes(unsigned x, unsigned y, unsigned which) {
  return __byte_perm(x, y, which);
}

// Returns 0, as a value unknown to the compiler. An address that contains it is not provably uniform across threads.
// Otherwise the compiler moves uniform loads to uniform registers, and waits for the memory to do so. Precondition:
// blockDim.y is 1.
__device__ __forceinline__ int64 opaque_zero() {
  unsigned y;
  asm("mov.u32 %0, %%tid.y;" : "=r"(y));
  return y;
}

// True if the GPU has an instruction for the maximum of packed pairs of 16-bit numbers.
constexpr bool kHasPairMax = __CUDA_ARCH__ >= 800;

// Returns the maximum in each half of a word. The maximum of a number and NaN is the number. Precondition: kHasPairMax.
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

// True if the GPU has cp.async.
constexpr bool kHasCpAsync = __CUDA_ARCH__ >= 800;

// Starts an asynchronous copy of kBytes (4, 8 or 16) from global to shared memory, bypassing registers. kLast: nobody
// reads the 16 bytes again, so that L2 evicts them first. Preconditions: kHasCpAsync; both addresses are aligned to
// kBytes. The calling thread may read the copy after cp_async_wait_all(), other threads after a barrier that follows
// it.
template <int kBytes, bool kLast = false>
__device__ __forceinline__ void cp_async_bytes(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16 && kLast) {
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "l"(policy)
                 : "memory");
  } else if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(from), "n"(kBytes) : "memory");
  }
#endif
}
// Waits until all asynchronous copies of the calling thread have arrived.
__device__ __forceinline__ void cp_async_wait_all() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Commits a group of asynchronous copies: those that the thread has started since its previous commit.
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most the kPending latest groups are in flight. Afterwards the calling thread may read the copies of
// all earlier groups.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_groups() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Starts an asynchronous copy of an element of 2, 4 or 8 bytes to a slot of shared memory of at least 4 bytes. A copy
// has at least 4 bytes, so an element of 2 bytes arrives together with its neighbour, at the offset in the 4-byte word
// that it has in global memory. On a GPU without cp.async the copy is synchronous.
template <class Element>
__device__ __forceinline__ void cp_async_element(void* to, const Element* from) {
  const unsigned long long at = reinterpret_cast<unsigned long long>(from);
  if constexpr (!kHasCpAsync) {
    *reinterpret_cast<Element*>(static_cast<char*>(to) + (sizeof(Element) == 2 ? at % 4 : 0)) = *from;
  } else if constexpr (sizeof(Element) == 2) {
    cp_async_bytes<4>(to, reinterpret_cast<const void*>(at & ~3ull));
  } else {
    cp_async_bytes<sizeof(Element)>(to, from);
  }
}

// Prefetches `bytes` bytes into L2; does nothing below compute capability 9.0 and before CUDA 12. Preconditions:
// `bytes` is a multiple of 16; the address is aligned to 16.
__device__ __forceinline__ void prefetch_l2(const void* from, unsigned bytes) {
  // CUDA 11.8 supports compute capability 9.0, but not this instruction.
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 12
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// Thread block clusters: blocks that are resident together and write to each other's shared memory (DSMEM).
// CLUSTER_DIMS is the attribute of a kernel that is launched in clusters.
#if __CUDA_ARCH__ >= 900
#define CLUSTER_DIMS(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define CLUSTER_DIMS(blocks)
#endif
// Rank of this block in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
// Cluster barrier, split into arrive and wait: everything that a thread writes before it arrives is visible to all
// threads of the cluster after their wait.
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

// Writes x to block `rank`'s copy of *slot, an object in this block's shared memory. Precondition: block `rank` is
// still running.
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

// Barrier in shared memory (mbarrier) that counts the bytes of asynchronous stores, phase by phase. A store to another
// block that reports to it needs no fence, whereas a cluster barrier waits for all earlier writes of its threads.
// Compilers before CUDA 12.1 lack such stores; there a phase ends with a cluster barrier.
using BytesBarrier = unsigned long long;
#if __CUDA_ARCH__ >= 900 && (__CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ > 0))
#define HAS_BYTES_BARRIER 1
#else
#define HAS_BYTES_BARRIER 0
#endif
// Arrives at the cluster barrier without release semantics: announces only that the block has started and has
// initialized its barriers.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if HAS_BYTES_BARRIER
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
  cluster_arrive();
#endif
}
// Initializes `barrier`. Preconditions here and of the next two functions: `barrier` is in this block's shared memory.
// Preconditions here and of expect_bytes(): one thread calls it.
__device__ __forceinline__ void start_barrier(BytesBarrier& barrier) {
#if HAS_BYTES_BARRIER
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(&barrier)))
               : "memory");
#endif
}
// Announces that `bytes` bytes arrive in the current phase, which this arrival would otherwise complete.
__device__ __forceinline__ void expect_bytes(BytesBarrier& barrier, unsigned bytes) {
#if HAS_BYTES_BARRIER
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(&barrier))),
               "r"(bytes)
               : "memory");
#endif
}
// Waits until all bytes of the phase have arrived. `parity` is the parity of the phase's number. Precondition: all
// threads of all blocks of the cluster call it together.
__device__ __forceinline__ void await_bytes(BytesBarrier& barrier, unsigned parity) {
#if HAS_BYTES_BARRIER
  unsigned done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(static_cast<unsigned>(__cvta_generic_to_shared(&barrier))), "r"(parity)
        : "memory");
  }
#else
  cluster_arrive();
  cluster_wait();
#endif
}
// Writes x to block `rank`'s copy of *slot asynchronously, and reports 8 bytes to that block's copy of `barrier`.
// Preconditions: both are objects in this block's shared memory; block `rank` is still running.
__device__ __forceinline__ void store_dsmem_async(unsigned long long* slot, unsigned rank, unsigned long long x,
                                                  BytesBarrier& barrier) {
#if HAS_BYTES_BARRIER
  asm volatile(
      "{\n.reg .u32 there, counter;\nmapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [there], %3, [counter];\n}" ::"r"(
          static_cast<unsigned>(__cvta_generic_to_shared(slot))),
      "r"(static_cast<unsigned>(__cvta_generic_to_shared(&barrier))), "r"(rank), "l"(x)
      : "memory");
#else
  store_dsmem(reinterpret_cast<unsigned*>(slot), rank, static_cast<unsigned>(x));
  store_dsmem(reinterpret_cast<unsigned*>(slot) + 1, rank, static_cast<unsigned>(x >> 32));
#endif
}

// Relaxed accesses to memory that blocks of one launch read and write concurrently. Each access moves a whole 64-bit
// word, unordered with respect to other accesses.
__device__ __forceinline__ unsigned long long load_relaxed(const unsigned long long* from) {
  unsigned long long x;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void store_relaxed(unsigned long long* to, unsigned long long x) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}

// Returns the number of the multiprocessor that the thread runs on. Numbers may have gaps.
__device__ __forceinline__ unsigned multiprocessor() {
  unsigned number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}

// Block barrier that warps may reach at different points of the program. __syncthreads() is defined only where all
// threads take the same path. Preconditions: all threads of the block call it; no other warp waits at a barrier of
// another kind.
__device__ __forceinline__ void block_barrier() {
  asm volatile("barrier.sync 0;" ::: "memory");
}

// Called by a loop that waits for another block. A GPU runs that block at the same time, so nothing is to be done. On
// the host, where blocks take turns, the loop yields here.
__device__ __forceinline__ void let_others_run() {
}

#endif
