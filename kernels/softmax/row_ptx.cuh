// Inline PTX of the softmax kernels, as core/ptx.cuh: asynchronous copies to shared memory, L2 prefetch, clusters,
// maxima of packed 16-bit pairs. A compiler for another target supplies its own version of each function.
#pragma once

#ifdef __CUDA_ARCH__

// 1 / x to one unit in the last place, with 0 for subnormal results: the bare instruction. Precondition: x is not
// subnormal.
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

// x, opaque to the compiler: it keeps the value in a register instead of computing it again at each use.
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

// Four of the eight bytes of two words, low to high as the digits of `which` say: 0 to 3 of x, 4 to 7 of y.
__device__ __forceinline__ unsigned select_bytes(unsigned x, unsigned y, unsigned which) {
  return __byte_perm(x, y, which);
}

// 0, but unknown to the compiler. An address that contains it is not uniform across threads, as far as the compiler can
// tell. It would move uniform loads to uniform registers, and for that wait for the memory.
__device__ __forceinline__ int64 opaque_zero() {
  unsigned y;
  asm("mov.u32 %0, %%tid.y;" : "=r"(y));
  return y;
}

// True if packed pairs of 16-bit numbers can be compared in one instruction.
constexpr bool kHasPairMax = __CUDA_ARCH__ >= 800;

// The maximum in each half of a word; of a number and NaN it is the number.
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

// Starts an asynchronous copy of kBytes (4, 8 or 16) from global to shared memory, without registers. Preconditions:
// both addresses are aligned to kBytes. The calling thread reads the copy after cp_async_wait_all(), other threads
// after a barrier behind that.
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

// Closes a group of asynchronous copies: those that the thread has started since it closed the one before.
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most the last kPending groups are on their way. The calling thread reads the others' copies
// afterwards.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_groups() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

// Starts an asynchronous copy of an element of 2, 4 or 8 bytes to a word of shared memory, of 4 bytes at least.
// There it lies as far behind the last address that 4 divides as in global memory: of 2 bytes, its neighbour comes
// with it. A GPU without cp.async copies at once.
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

// Prefetches `bytes` bytes into L2. Preconditions: `bytes` is a multiple of 16; the address is aligned to 16.
__device__ __forceinline__ void prefetch_l2(const void* from, unsigned bytes) {
  // CUDA 11.8 knows compute capability 9.0, but not this instruction.
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ >= 12
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// Thread block clusters: blocks that are resident together and write to each other's shared memory (DSMEM). The
// attribute of a kernel that is launched in clusters.
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
// The barrier of a cluster, split into arrive and wait: what any thread wrote before it arrived is visible to all
// threads after their wait.
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

// A barrier in shared memory that counts the bytes of asynchronous stores (mbarrier), phase by phase. A store to
// another block that reports to it needs no fence, where a barrier of the cluster waits for all earlier writes of its
// threads. Before CUDA 12.1 compilers lack such stores, and a phase ends with a barrier of the cluster.
using BytesBarrier = unsigned long long;
#if __CUDA_ARCH__ >= 900 && (__CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ > 0))
#define HAS_BYTES_BARRIER 1
#else
#define HAS_BYTES_BARRIER 0
#endif
// An arrival that says no more than that the block has started, and so have its barriers.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if HAS_BYTES_BARRIER
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#else
  cluster_arrive();
#endif
}
// Preconditions of these: `barrier` is in this block's shared memory; one thread calls the first two.
__device__ __forceinline__ void start_barrier(BytesBarrier& barrier) {
#if HAS_BYTES_BARRIER
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(&barrier)))
               : "memory");
#endif
}
// The bytes of the phase.
__device__ __forceinline__ void expect_bytes(BytesBarrier& barrier, unsigned bytes) {
#if HAS_BYTES_BARRIER
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(&barrier))),
               "r"(bytes)
               : "memory");
#endif
}
// Waits until the bytes of the phase have arrived; `parity` is that of the phase's number. Preconditions: all threads
// of all blocks of the cluster call it together.
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
// Writes x to block `rank`'s copy of *slot, and its 8 bytes to that block's copy of `barrier`. Preconditions: both are
// objects in this block's shared memory; block `rank` is still running.
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

// Memory that blocks of one launch write and read at the same time: whole words of 64 bits, in no order with others.
__device__ __forceinline__ unsigned long long load_relaxed(const unsigned long long* from) {
  unsigned long long x;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void store_relaxed(unsigned long long* to, unsigned long long x) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(x) : "memory");
}

// The number of the multiprocessor that the thread runs on. Some numbers may be missing.
__device__ __forceinline__ unsigned multiprocessor() {
  unsigned number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}

// A barrier of the block that its warps may reach at different places of the program: __syncthreads() is defined where
// all take the same way. Preconditions: all threads of the block; no other warp waits in a barrier of another kind.
__device__ __forceinline__ void block_barrier() {
  asm volatile("barrier.sync 0;" ::: "memory");
}

// Called by a loop that waits for another block, which a GPU runs meanwhile, and the host by turns.
__device__ __forceinline__ void let_others_run() {
}

#endif
