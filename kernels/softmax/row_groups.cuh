// The threads that share a row: some neighbouring lanes of a warp, a block, or a cluster of blocks. Each reads every
// `num_threads()`-th vector of the row, and what they find out about it they share in every thread.
//
// Trees are fixed, so that a row that lies as another one does has the same bits, on any GPU.
#pragma once
#include "core/layout.cuh"
#include "core/reduce.cuh"
#include "core/speculative_grad.cuh"
#include "softmax/row_ptx.cuh"

// The larger one, and that of a number and NaN is the number: sums find NaN.
__device__ __forceinline__ float max_ignoring_nan(float x, float y) {
  return fmaxf(x, y);
}
__device__ __forceinline__ double max_ignoring_nan(double x, double y) {
  return fmax(x, y);
}
__device__ __forceinline__ int max_ignoring_nan(int x, int y) {
  return x < y ? y : x;
}

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

// What changes from visit to visit of rows by a unit: how often its threads have told each other something, and what
// the first of them publishes the others next (WorkQueue).
struct SyncState {
  unsigned syncs;
  unsigned claimed;
};

// What another lane of the warp has. Precondition: all 32 lanes call it together.
template <class T>
__device__ __forceinline__ T shuffle_xor(T x, int offset) {
  return __shfl_xor_sync(0xffffffffu, x, offset);
}

// x of `width` neighbouring lanes joined, in each of them.
// Preconditions: all 32 lanes call it together; width is a power of two.
template <class Op, class T>
__device__ __forceinline__ T subwarp_reduce(T x, int width, Op op) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const T other = shuffle_xor(x, offset);
    if (offset < width) x = op(x, other);
  }
  return x;
}

// Each warp takes 32 / width rows at once.
struct SubwarpGroup {
  static constexpr bool kMultiWarp = false;
  // Whether a team is a block.
  static constexpr bool kBlockWide = false;
  static constexpr int kClusterSize = 1;
  int width;

  __device__ __forceinline__ int block_rank() const {
    return 0;
  }
  __device__ __forceinline__ int thread_rank() const {
    return threadIdx.x % width;
  }
  __device__ __forceinline__ int num_threads() const {
    return width;
  }
  // Neighbouring lanes that share a row.
  __device__ __forceinline__ int subwarp_size() const {
    return width;
  }
  // Rows that a team takes at once. A team is a warp, and takes a note of its own (speculative_grad.cuh).
  __device__ __forceinline__ int rows_at_once() const {
    return kWarp / width;
  }
  __device__ __forceinline__ int row_slot() const {
    return threadIdx.x % kWarp / width;
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
  // Before anything else of the team's.
  __device__ __forceinline__ void cluster_start() const {
  }
  // What the team's first thread drew.
  __device__ __forceinline__ unsigned broadcast(const SyncState& sync) const {
    return __shfl_sync(0xffffffffu, sync.claimed, 0);
  }

  // The sum of what the first threads of the team's rows hold, in its leader.
  __device__ __forceinline__ double worker_sum(double x, SyncState&) const {
    return warp_sum(thread_rank() == 0 ? x : 0.0);
  }
};

// The same where the warps of a block are a team: a group is a row to each, so that none is left with several when the
// others have ended. Precondition: every thread of the block calls everything together.
struct BlockOfSubwarps : SubwarpGroup {
  static constexpr bool kBlockWide = true;

  __device__ __forceinline__ int rows_at_once() const {
    return blockDim.x / width;
  }
  __device__ __forceinline__ int row_slot() const {
    return threadIdx.x / width;
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
  // What the team's first thread drew before its last call of worker_sum().
  __device__ __forceinline__ unsigned broadcast(const SyncState& sync) const {
    return claim_slots()[(sync.syncs & 1) ^ 1];
  }
  // Also publishes what the first thread drew: one barrier for a group, because places alternate, and who reads a place
  // is behind it when it comes to the next barrier.
  __device__ __forceinline__ double worker_sum(double x, SyncState& sync) const {
    __shared__ double sums[2][kWarp];
    const int lane = threadIdx.x % kWarp, buffer = sync.syncs & 1;
    x = warp_sum(thread_rank() == 0 ? x : 0.0);
    if (lane == 0) sums[buffer][threadIdx.x / kWarp] = x;
    if (threadIdx.x == 0) claim_slots()[buffer] = sync.claimed;
    __syncthreads();
    ++sync.syncs;
    if (threadIdx.x >= kWarp) return 0.0;
    return warp_sum(lane < static_cast<int>(blockDim.x / kWarp) ? sums[buffer][lane] : 0.0);
  }

 private:
  static __device__ __forceinline__ unsigned* claim_slots() {
    __shared__ unsigned claimed[2];
    return claimed;
  }
};

// A row is taken by the blocks of a cluster, kClusterSize of them, or by one alone.
// Preconditions: blockDim.x is a multiple of 32 up to 1024, and every thread calls everything together.
template <int kClusterSize_>
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
  // Before the first call of all_gather(), which has to follow: nothing can be sent to a block that has not begun.
  __device__ __forceinline__ void cluster_start() const {
    if constexpr (kClusterSize > 1) cluster_arrive();
  }
  // What the team's first thread drew before its last call of all_gather().
  __device__ __forceinline__ unsigned broadcast(const SyncState& sync) const {
    return claim_slots()[(sync.syncs & 1) ^ 1];
  }

  // Tells all threads of a block what the first one drew, behind the next barrier.
  __device__ __forceinline__ void publish_claim(const SyncState& sync) const {
    if (threadIdx.x == 0) claim_slots()[sync.syncs & 1] = sync.claimed;
  }

  // Hands `mine`, the same in all lanes of a warp, to all warps of the unit: in `all`, in the order of the warps; and
  // what the first thread drew.
  //
  // Who still reads what it was handed in the last call but one has sent nothing in the last one, for which all wait,
  // so that two places are enough.
  template <class T>
  __device__ __forceinline__ void all_gather(const T& mine, SyncState& sync, const T*& all) const {
    static_assert(sizeof(T) % 4 == 0, "what is shared travels in words of 4 bytes");
    constexpr int kWords = sizeof(T) / 4;
    // Words, because a T may have constructors.
    alignas(16) __shared__ unsigned words[2][kClusterSize * kWarp * kWords];
    T* const all_parts = reinterpret_cast<T*>(words[sync.syncs & 1]);
    const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    unsigned* const slot = reinterpret_cast<unsigned*>(&all_parts[block_rank() * warps + threadIdx.x / kWarp]);
    const unsigned* const own = reinterpret_cast<const unsigned*>(&mine);
    if constexpr (kClusterSize == 1) {
      if (lane == 0) reinterpret_cast<T&>(*slot) = mine;
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
  // How many all_parts there are.
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

// The groups that a team takes: the first ones by its number, and then always the next one that nobody has drawn,
// because multiprocessors are not equally fast. Which team takes a group changes no bit. A number is drawn long before
// it is needed, so that nobody waits for it.
template <class Group>
struct WorkQueue {
  // Each team has so many without drawing: as many as may be asked for before a join of the unit.
  static constexpr int kStatic = 3;
  unsigned* counter;  // how many were drawn by all teams; nullptr where all are given
  unsigned claimed;   // in the first thread of the team

  __device__ __forceinline__ WorkQueue(const Group& group, unsigned* counter) : counter(counter), claimed(0) {
    claim(group);
  }
  // The group after `group`. Preconditions: all threads of the team call it together, with the turn of a visit of which
  // no join has begun; between two calls that draw lies a join of the unit.
  __device__ __forceinline__ int next(const Group& group, int chunk, unsigned syncs) {
    const int workers = static_cast<int>(group.workers());
    if (counter == nullptr || chunk < (kStatic - 1) * workers) return chunk + workers;
    const int claimed_chunk = kStatic * workers + static_cast<int>(group.broadcast({syncs, claimed}));
    claim(group);
    return claimed_chunk;
  }

 private:
  __device__ __forceinline__ void claim(const Group& group) {
    if (counter != nullptr && group.is_leader()) claimed = atomicAdd(counter, 1u);
  }
};

// The group after `group` of a warp, which has the first one without drawing, and waits for what it draws: what others
// of the same multiprocessor do not notice, and a register less. Preconditions: all lanes of the warp call it together.
__device__ __forceinline__ int next_chunk(const SubwarpGroup& group, int chunk, unsigned* counter) {
  const int workers = static_cast<int>(group.workers());
  if (counter == nullptr) return chunk + workers;
  unsigned claimed = 0;
  if (group.is_leader()) claimed = atomicAdd(counter, 1u);
  return workers + static_cast<int>(group.broadcast({0, claimed}));
}

// expected grad_output * weight, noted for each group, by each block of a cluster for itself, because it has read for
// itself what is expected. As SpeculativeScale, for teams of any size.
// Preconditions of the constructor: every thread of the team makes it together. Of what follows: a join of the unit
// lies between the constructor and the first call, in a block because thread 0 reads the slot for all of them.
template <class Group, class Compute>
struct WorkerSpeculativeScale {
  double* used_grad_output;
  double weight;
  double grad_output;

  __device__ __forceinline__ WorkerSpeculativeScale(const double* expected_grad_output, double* used_grad_output,
                                                    double weight)
      : used_grad_output(used_grad_output), weight(weight) {
    const double loaded = expected_grad_output == nullptr ? 1.0 : __ldcg(expected_grad_output);
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
// What else a gradient is multiplied by is known.
template <class Scale, class Group>
__device__ __forceinline__ void record_scale(const Scale&, const Group&, int64) {
}
template <class Group, class Compute>
__device__ __forceinline__ void record_scale(const WorkerSpeculativeScale<Group, Compute>& scale, const Group& group,
                                             int64 chunk) {
  scale.record(group, chunk);
}

// Whether the gradients of a group that is the team's own were written with another grad_output than the true one, as
// `verify` of speculative_grad.cuh: the same in all threads of the team, which can only compute together.
template <class Group>
__device__ __forceinline__ bool worker_grad_scale_is_stale(const Group& group, int64 chunks, double true_grad_output,
                                                           const double* used_grad_output,
                                                           double* expected_grad_output) {
  // Each block of it looks at all of them, or each warp: there are few.
  constexpr int kClusterSize = Group::kClusterSize;
  const int threads = Group::kBlockWide ? static_cast<int>(blockDim.x) : kWarp;
  const int64 step = group.workers(), records = (chunks - group.worker() + step - 1) / step * kClusterSize;
  bool stale = used_grad_output == nullptr;
  for (int64 i = threadIdx.x % threads; !stale && i < records; i += threads) {
    const double recorded =
        used_grad_output[(group.worker() + i / kClusterSize * step) * kClusterSize + i % kClusterSize];
    stale = __double_as_longlong(recorded) != __double_as_longlong(true_grad_output);
  }
  stale = (Group::kBlockWide ? __syncthreads_or(stale) : __any_sync(0xffffffffu, stale)) != 0;
  if (stale && expected_grad_output != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
    *expected_grad_output = true_grad_output;
  return stale;
}
