// Thread groups: which threads share a row of logits, how they exchange values, and how they claim work.
//
//   group    threads that share one row: 1 to 32 lanes of a warp (a subwarp), a lane of each warp of a block, a block,
//            or a cluster of blocks
//   worker   threads that claim chunks of rows: a warp (SubwarpGroup), a block (BlockOfSubwarps, ColumnWarps), a block
//            or cluster (ClusterGroup)
//   chunk    the rows that share one partial sum and one record of the speculative scale
//
// 1. Each worker starts with chunk worker(). It continues with chunks worker() + workers(), worker() + 2 workers(),
//    ..., or claims them from a WorkQueue.
// 2. Each thread of a group reads every num_threads()-th vector of a row.
// 3. The threads exchange partial results: subwarp_reduce within a warp, all_gather between warps and blocks, exchange
//    between warps whose lanes have different rows.
// 4. At the end of a chunk, worker_sum adds the values of its rows, and the scale is recorded.
//
// Reduction trees are fixed, so a row with the same layout gets the same bits on any GPU, whichever worker processes
// its chunk.
//
// Traffic: shared memory or DSMEM, one barrier per all_gather; one atomic per claimed chunk. Preconditions: stated at
// each function.
#pragma once
#include "core/layout.cuh"
#include "core/reduce.cuh"
#include "core/scalars.cuh"
#include "core/speculative_grad.cuh"
#include "softmax/row_ptx.cuh"

struct MaxOp {
  template <class T>
  __device__ __forceinline__ T operator()(T x, T y) const {
    return max_ignoring_nan(x, y);
  }
};
struct AddOp {
  template <class T>
  __device__ __forceinline__ T operator()(T x, T y) const {
    return x + y;
  }
};

// State of a worker's exchanges: the number of exchanges so far, whose parity selects the buffer, and the leader's
// claimed chunk, which the next exchange broadcasts.
struct SyncState {
  unsigned syncs;
  unsigned claimed;
};

// Returns the x of the lane whose number differs from this lane's by `offset` (XOR). Precondition: all 32 lanes call it
// together.
template <class T>
__device__ __forceinline__ T shuffle_xor(T x, int offset) {
  return __shfl_xor_sync(0xffffffffu, x, offset);
}

// Butterfly reduction over `width` neighbouring lanes; every lane gets the result. Preconditions: all 32 lanes call it
// together; width is a power of two.
template <class Op, class T>
__device__ __forceinline__ T subwarp_reduce(T x, int width, Op op) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const T other = shuffle_xor(x, offset);
    if (offset < width) x = op(x, other);
  }
  return x;
}

// Returns log2(x). A shift by the result replaces a division, which takes 20 instructions. Precondition: x is a power
// of two.
__device__ __forceinline__ int log2_exact(int x) {
  return 31 - __clz(x);
}

// `width` neighbouring lanes, a power of two, share a row. A warp processes 32 / width rows at once. The worker is a
// warp.
struct SubwarpGroup {
  static constexpr bool kMultiWarp = false;
  // True if the worker is a block or a cluster.
  static constexpr bool kBlockWide = false;
  static constexpr int kClusterSize = 1;
  int width;

  __device__ __forceinline__ int block_rank() const {
    return 0;
  }
  __device__ __forceinline__ int thread_rank() const {
    return threadIdx.x & (width - 1);
  }
  __device__ __forceinline__ int num_threads() const {
    return width;
  }
  // Number of lanes of one warp that share a row.
  __device__ __forceinline__ int subwarp_size() const {
    return width;
  }
  // Number of rows that the worker processes at once.
  __device__ __forceinline__ int rows_at_once() const {
    return kWarp >> log2_exact(width);
  }
  // Index of the calling thread's row among them.
  __device__ __forceinline__ int row_slot() const {
    return threadIdx.x % kWarp >> log2_exact(width);
  }
  __device__ __forceinline__ int64 worker() const {
    return global_warp();
  }
  __device__ __forceinline__ int64 workers() const {
    return static_cast<int64>(gridDim.x) * (blockDim.x / kWarp);
  }
  __device__ __forceinline__ bool is_leader() const {
    return threadIdx.x % kWarp == 0;
  }
  // Rank of the calling thread in its worker, and the number of threads of a worker.
  __device__ __forceinline__ int worker_thread() const {
    return threadIdx.x % kWarp;
  }
  __device__ __forceinline__ int worker_threads() const {
    return kWarp;
  }
  // Byte offset of the worker's part of dynamic shared memory, in which each worker of the block has `bytes` bytes.
  __device__ __forceinline__ int worker_offset(int bytes) const {
    return static_cast<int>(threadIdx.x / kWarp) * bytes;
  }
  __device__ __forceinline__ void worker_barrier() const {
    __syncwarp();
  }
  // Called before all exchanges. Warps need no preparation.
  __device__ __forceinline__ void cluster_start() const {
  }
  // Returns the chunk that the leader claimed, in all lanes.
  __device__ __forceinline__ unsigned broadcast(const SyncState& sync) const {
    return __shfl_sync(0xffffffffu, sync.claimed, 0);
  }

  // Returns the sum over the worker's rows, in the leader. The first thread of each row holds the row's value in `x`.
  __device__ __forceinline__ double worker_sum(double x, SyncState&) const {
    return rolled_warp_sum(thread_rank() == 0 ? x : 0.0);
  }
};

// Subwarps whose worker is the block. Each chunk assigns one row to every subwarp, so no warp still has several rows
// when the others have finished. Precondition: every thread of the block calls each function, together.
struct BlockOfSubwarps : SubwarpGroup {
  static constexpr bool kBlockWide = true;

  __device__ __forceinline__ int rows_at_once() const {
    return blockDim.x >> log2_exact(width);
  }
  __device__ __forceinline__ int row_slot() const {
    return threadIdx.x >> log2_exact(width);
  }
  __device__ __forceinline__ int64 worker() const {
    return blockIdx.x;
  }
  __device__ __forceinline__ int64 workers() const {
    return gridDim.x;
  }
  __device__ __forceinline__ bool is_leader() const {
    return threadIdx.x == 0;
  }
  // Returns the chunk that the leader had claimed at the last call of worker_sum().
  __device__ __forceinline__ unsigned broadcast(const SyncState& sync) const {
    return claim_slots()[(sync.syncs & 1) ^ 1];
  }
  // As SubwarpGroup::worker_sum(). Also publishes the leader's claim. Double-buffered, so one barrier per chunk is
  // enough: a thread still reading one buffer has not reached the next barrier, hence nobody overwrites it.
  __device__ __forceinline__ double worker_sum(double x, SyncState& sync) const {
    __shared__ double sums[2][kWarp];
    const int lane = threadIdx.x % kWarp, buffer = sync.syncs & 1;
    x = rolled_warp_sum(thread_rank() == 0 ? x : 0.0);
    if (lane == 0) sums[buffer][threadIdx.x / kWarp] = x;
    if (threadIdx.x == 0) claim_slots()[buffer] = sync.claimed;
    __syncthreads();
    ++sync.syncs;
    if (threadIdx.x >= kWarp) return 0.0;
    return rolled_warp_sum(lane < static_cast<int>(blockDim.x / kWarp) ? sums[buffer][lane] : 0.0);
  }

 protected:
  static __device__ __forceinline__ unsigned* claim_slots() {
    __shared__ unsigned claimed[2];
    return claimed;
  }
};

// The kWarps warps of a block share 32 neighbouring rows with strided classes: lane l of each warp holds a part of row
// l, so a warp reads whole sectors of each class. The worker is the block. Preconditions: blockDim.x is 32 kWarps;
// every thread of the block calls each function, together.
template <int kWarps>
struct ColumnWarps : BlockOfSubwarps {
  __device__ __forceinline__ int thread_rank() const {
    return threadIdx.x / kWarp;
  }
  __device__ __forceinline__ int num_threads() const {
    return kWarps;
  }
  __device__ __forceinline__ int rows_at_once() const {
    return kWarp;
  }
  __device__ __forceinline__ int row_slot() const {
    return threadIdx.x % kWarp;
  }
  __device__ __forceinline__ int worker_thread() const {
    return threadIdx.x;
  }
  __device__ __forceinline__ int worker_threads() const {
    return kWarps * kWarp;
  }
  __device__ __forceinline__ int worker_offset(int) const {
    return 0;
  }
  __device__ __forceinline__ void worker_barrier() const {
    __syncthreads();
  }
  // Returns the sum over the worker's rows, in the leader. Each lane of the first warp holds its row's value in `x`.
  // Also publishes the leader's claim, as in BlockOfSubwarps.
  __device__ __forceinline__ double worker_sum(double x, SyncState& sync) const {
    if (threadIdx.x == 0) claim_slots()[sync.syncs & 1] = sync.claimed;
    __syncthreads();
    ++sync.syncs;
    return threadIdx.x < kWarp ? rolled_warp_sum(x) : 0.0;
  }
  // Shares `local_part` with the threads of the same row. Returns the parts that part_of() reads; they stay valid until
  // the next call.
  template <class Part>
  __device__ __forceinline__ const unsigned* exchange(const Part& local_part) const {
    static_assert(sizeof(Part) % 4 == 0, "what is shared travels in words of 4 bytes");
    constexpr int kWords = sizeof(Part) / 4;
    __shared__ unsigned words[kWarps * kWords * kWarp];
    unsigned* const parts = words + threadIdx.x % kWarp;
    const unsigned* const own = reinterpret_cast<const unsigned*>(&local_part);
    __syncthreads();  // all threads have read the parts of the previous call
#pragma unroll
    for (int k = 0; k < kWords; ++k) parts[(thread_rank() * kWords + k) * kWarp] = own[k];
    __syncthreads();
    return parts;
  }
  // Copies the part of warp `warp` to `part`. `parts` is the result of exchange().
  template <class Part>
  static __device__ __forceinline__ void part_of(const unsigned* parts, int warp, Part& part) {
    constexpr int kWords = sizeof(Part) / 4;
    unsigned* const to = reinterpret_cast<unsigned*>(&part);
#pragma unroll
    for (int k = 0; k < kWords; ++k) to[k] = parts[(warp * kWords + k) * kWarp];
  }
};

// Reduces each of kCount numbers over the threads that share a row; every thread gets the results. Preconditions: those
// of subwarp_reduce.
template <class Op, class T, int kCount>
__device__ __forceinline__ void row_reduce(const SubwarpGroup& group, T (&x)[kCount], Op op) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = subwarp_reduce(x[i], group.num_threads(), op);
}
// Each thread of ColumnWarps reduces the numbers of its own row, in the order of the warps. Precondition: every thread
// of the block calls it.
template <class Op, class T, int kCount, int kWarps>
__device__ __forceinline__ void row_reduce(const ColumnWarps<kWarps>& group, T (&x)[kCount], Op op) {
  const unsigned* const parts = group.exchange(x);
  group.part_of(parts, 0, x);
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    T other[kCount];
    group.part_of(parts, w, other);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = op(x[i], other[i]);
  }
}

// The kClusterSize blocks of a cluster share a row (1: a single block). The worker is the cluster. Preconditions:
// blockDim.x is a multiple of 32, at most 32 kWarpsOfBlock; every thread calls each function, together.
template <int kClusterSize_, int kWarpsOfBlock = kWarp>
struct ClusterGroup {
  static constexpr bool kMultiWarp = true;
  static constexpr bool kBlockWide = true;
  static constexpr int kClusterSize = kClusterSize_;

  __device__ __forceinline__ int block_rank() const {
    return kClusterSize == 1 ? 0 : static_cast<int>(cluster_rank());
  }
  __device__ __forceinline__ int thread_rank() const {
    return block_rank() * blockDim.x + threadIdx.x;
  }
  __device__ __forceinline__ int num_threads() const {
    return kClusterSize * blockDim.x;
  }
  __device__ __forceinline__ int subwarp_size() const {
    return kWarp;
  }
  __device__ __forceinline__ int rows_at_once() const {
    return 1;
  }
  __device__ __forceinline__ int row_slot() const {
    return 0;
  }
  __device__ __forceinline__ int64 worker() const {
    return blockIdx.x / kClusterSize;
  }
  __device__ __forceinline__ int64 workers() const {
    return gridDim.x / kClusterSize;
  }
  __device__ __forceinline__ bool is_leader() const {
    return thread_rank() == 0;
  }
  // Arrives at the cluster barrier that the first all_gather() waits for, because the DSMEM of a block that has not
  // started must not be written. Precondition: an all_gather() follows.
  __device__ __forceinline__ void cluster_start() const {
    if constexpr (kClusterSize > 1) cluster_arrive();
  }
  // Returns the chunk that the leader had claimed at the last call of all_gather().
  __device__ __forceinline__ unsigned broadcast(const SyncState& sync) const {
    return claim_slots()[(sync.syncs & 1) ^ 1];
  }

  // Publishes thread 0's claim to the block. Precondition: a barrier follows.
  __device__ __forceinline__ void publish_claim(const SyncState& sync) const {
    if (threadIdx.x == 0) claim_slots()[sync.syncs & 1] = sync.claimed;
  }

  // All-gather across warps: each warp contributes `value` (uniform within the warp). Afterwards all[w] holds warp w's
  // value in every thread of the group. Also broadcasts the chunk that the leader claimed.
  //
  // Double-buffered, so one barrier is enough: a thread that still reads the buffer of the call before the previous one
  // has not contributed to the previous call, and every thread waits in that call until all have contributed.
  template <class T>
  __device__ __forceinline__ void all_gather(const T& value, SyncState& sync, const T*& all) const {
    static_assert(sizeof(T) % 4 == 0, "what is shared travels in words of 4 bytes");
    constexpr int kWords = sizeof(T) / 4;
    // An array of words, because T may have constructors.
    alignas(16) __shared__ unsigned words[2][kClusterSize * kWarpsOfBlock * kWords];
    T* const all_parts = reinterpret_cast<T*>(words[sync.syncs & 1]);
    const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    unsigned* const slot = reinterpret_cast<unsigned*>(&all_parts[block_rank() * warps + threadIdx.x / kWarp]);
    const unsigned* const own = reinterpret_cast<const unsigned*>(&value);
    if constexpr (kClusterSize == 1) {
      if (lane == 0) reinterpret_cast<T&>(*slot) = value;
      publish_claim(sync);
      __syncthreads();
    } else {
      unsigned* const claim_slot = claim_slots() + (sync.syncs & 1);
      const unsigned claimed = __shfl_sync(0xffffffffu, sync.claimed, 0);
      const bool sends = lane < kClusterSize, publishes = sends && block_rank() == 0 && threadIdx.x < kWarp;
      if (sync.syncs == 0) cluster_wait();
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if (sends) store_dsmem(slot + i, lane, own[i]);
      }
      if (publishes) store_dsmem(claim_slot, lane, claimed);
      cluster_arrive();
      cluster_wait();
    }
    ++sync.syncs;
    all = all_parts;
  }
  // Number of values that all_gather() returns.
  __device__ __forceinline__ int num_warps() const {
    return kClusterSize * (blockDim.x / kWarp);
  }

  __device__ __forceinline__ double worker_sum(double x, SyncState&) const {
    return x;
  }

 private:
  static __device__ __forceinline__ unsigned* claim_slots() {
    __shared__ unsigned claimed[2];
    return claimed;
  }
};

// Claims the next item of `counter` and returns its number. The atomic is an increment that wraps around at a number
// which is never reached. An addition would be slower: the assembler turns an addition by one lane into one by all
// active lanes, followed by a shuffle that distributes the result, and at that shuffle the whole warp waits for the
// atomic.
__device__ __forceinline__ unsigned claim_next(unsigned* counter) {
  return atomicInc(counter, 0x7fffffffu);
}

// Sequence of the chunks of one worker. Its first kStatic chunks are assigned statically. After them it claims the next
// unclaimed chunk, because SMs are not equally fast. Which worker processes a chunk changes no bit. A chunk is claimed
// long before it is needed, so that nobody waits for the atomic.
template <class Group>
struct WorkQueue {
  // Number of chunks that a worker may request before its first exchange (all_gather or worker_sum).
  static constexpr int kStatic = 3;
  unsigned* counter;  // number of chunks that all workers claimed; nullptr: all chunks are static
  unsigned claimed;   // valid in the leader

  __device__ __forceinline__ WorkQueue(const Group& group, unsigned* counter) : counter(counter), claimed(0) {
    claim(group);
  }
  // Returns the worker's chunk after `chunk`. `syncs` is SyncState::syncs after the last exchange of one visit and
  // before the first one of the next. Preconditions: all threads of the worker call it together; an exchange separates
  // two calls that claim.
  __device__ __forceinline__ int next(const Group& group, int chunk, unsigned syncs) {
    const int workers = static_cast<int>(group.workers());
    if (counter == nullptr || chunk < (kStatic - 1) * workers) return chunk + workers;
    const int claimed_chunk = kStatic * workers + static_cast<int>(group.broadcast({syncs, claimed}));
    claim(group);
    return claimed_chunk;
  }

 private:
  // is_leader() is tested first: the other way round NVRTC 13.0 spilled 20 bytes in kernels with clusters, and cross
  // entropy of 8192 x 32000 in float32 took 3 % longer.
  __device__ __forceinline__ void claim(const Group& group) {
    if (group.is_leader() && counter != nullptr) claimed = claim_next(counter);
  }
};

// Returns the warp's chunk after `chunk`. Only the first chunk is static. For every other one the warp waits for the
// atomic, which saves a register; other warps of the SM hide the latency. Precondition: all lanes of the warp call it
// together.
__device__ __forceinline__ int next_chunk(const SubwarpGroup& group, int chunk, unsigned* counter) {
  const int workers = static_cast<int>(group.workers());
  if (counter == nullptr) return chunk + workers;
  unsigned claimed = 0;
  if (group.is_leader()) claimed = claim_next(counter);
  return workers + static_cast<int>(group.broadcast({0, claimed}));
}

// SpeculativeScale for workers of any size. Each block of the worker records the grad_output once per chunk, because
// each block of a cluster reads the table by itself. In backward a worker records the true grad_output after an
// exchange, so all of its threads have compared the old record. Preconditions: all threads of the worker construct it
// together; an exchange of the group separates the constructor from the first call of factor() or record(), because in
// a block thread 0 reads the slot for all threads.
template <class Group, class Compute>
struct WorkerSpeculativeScale {
  double* used_grad_output;
  double weight;
  double grad_output;

  template <class Result>
  __device__ __forceinline__ WorkerSpeculativeScale(const Result* true_grad_output, const double* expected_grad_output,
                                                    double* used_grad_output, double weight)
      : used_grad_output(used_grad_output), weight(weight) {
    const double loaded = given_or_expected(true_grad_output, expected_grad_output);
    if constexpr (Group::kBlockWide) {
      if (threadIdx.x == 0) shared() = loaded;
      if constexpr (!Group::kMultiWarp) __syncthreads();
    } else {
      grad_output = __shfl_sync(0xffffffffu, loaded, 0);
    }
  }

  __device__ __forceinline__ Compute factor() {
    return static_cast<Compute>((Group::kBlockWide ? shared() : grad_output) * weight);
  }
  __device__ __forceinline__ void record(const Group& group, int64 chunk) const {
    if (used_grad_output == nullptr) return;
    if constexpr (Group::kBlockWide) {
      if (threadIdx.x == 0) used_grad_output[chunk * Group::kClusterSize + group.block_rank()] = shared();
    } else {
      if (group.is_leader()) used_grad_output[chunk] = grad_output;
    }
  }

 private:
  static __device__ __forceinline__ double& shared() {
    __shared__ double expected;
    return expected;
  }
};
// Scales that are known at launch are not recorded.
template <class Scale, class Group>
__device__ __forceinline__ void record_scale(const Scale&, const Group&, int64) {
}
template <class Group, class Compute>
__device__ __forceinline__ void record_scale(const WorkerSpeculativeScale<Group, Compute>& scale, const Group& group,
                                             int64 chunk) {
  scale.record(group, chunk);
}

// True if the gradients of a chunk of this worker were written with a grad_output other than the true one. As
// grad_scale_is_stale of core/speculative_grad.cuh, but with the same result in all threads of the worker, because only
// all of them together can recompute rows. Precondition: every thread of the worker calls it together.
template <class Group>
__device__ __forceinline__ bool worker_grad_scale_is_stale(const Group& group, int64 chunks, double true_grad_output,
                                                           const double* used_grad_output,
                                                           double* expected_grad_output) {
  // Each warp checks all records of the worker, so no barrier is needed; there are few records. Counting them would
  // take a 64-bit division, which this loop avoids.
  constexpr int kClusterSize = Group::kClusterSize;
  const int lane = threadIdx.x % kWarp;
  const int64 step = group.workers();
  bool stale = used_grad_output == nullptr;
  for (int64 chunk = group.worker() + lane / kClusterSize * step; !stale && chunk < chunks;
       chunk += kWarp / kClusterSize * step) {
    const double recorded = used_grad_output[chunk * kClusterSize + lane % kClusterSize];
    stale = __double_as_longlong(recorded) != __double_as_longlong(true_grad_output);
  }
  stale = __any_sync(0xffffffffu, stale) != 0;
  if (stale && expected_grad_output != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
    *expected_grad_output = true_grad_output;
  return stale;
}

// True if this worker has nothing to write: in backward, where grad_output is not null, if its gradients are already in
// place. Preconditions: those of worker_grad_scale_is_stale.
template <class Group, class Result>
__device__ __forceinline__ bool worker_gradient_is_in_place(const Group& group, int64 chunks, const Result* grad_output,
                                                            const double* used_grad_output,
                                                            double* expected_grad_output) {
  if (grad_output == nullptr) return false;
  const double g = widen<double>(*grad_output);
  const bool stale = worker_grad_scale_is_stale(group, chunks, g, used_grad_output, expected_grad_output);
  __syncwarp();  // all lanes have read the records that one of them writes next
  return !stale;
}
