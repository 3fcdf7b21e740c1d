// The threads that share a row: some neighbouring lanes of a warp, a block, or a cluster of blocks. Each reads every
// `count()`-th vector of the row, and what they find out about it they share in every thread.
//
// Trees are fixed, so that a row that lies as another one does has the same bits, on any GPU.
#pragma once
#include "core/expectation.cuh"
#include "core/layout.cuh"
#include "core/reduce.cuh"
#include "softmax/row_ptx.cuh"

// The larger one, and that of a number and NaN is the number: sums find NaN.
__device__ __forceinline__ float larger(float x, float y) {
  return fmaxf(x, y);
}
__device__ __forceinline__ double larger(double x, double y) {
  return fmax(x, y);
}
__device__ __forceinline__ int larger(int x, int y) {
  return x < y ? y : x;
}

struct Larger {
  template <class T>
  __device__ __forceinline__ T operator()(T x, T y) const {
    return larger(x, y);
  }
};
struct Plus {
  template <class T>
  __device__ __forceinline__ T operator()(T x, T y) const {
    return x + y;
  }
};

// What changes from visit to visit of rows by a unit: how often its threads have told each other something, and what
// the first of them tells the others next (GroupQueue).
struct Turn {
  unsigned joins;
  unsigned drawn;
};

// What another lane of the warp has. Precondition: all 32 lanes call it together.
template <class T>
__device__ __forceinline__ T of_lane(T x, int offset) {
  return __shfl_xor_sync(0xffffffffu, x, offset);
}

// x of `width` neighbouring lanes joined, in each of them.
// Preconditions: all 32 lanes call it together; width is a power of two.
template <class Join, class T>
__device__ __forceinline__ T join_lanes(T x, int width, Join join) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const T other = of_lane(x, offset);
    if (offset < width) x = join(x, other);
  }
  return x;
}

// Each warp takes 32 / width rows at once.
struct LaneUnit {
  static constexpr bool kBlock = false;
  // Whether a team is a block.
  static constexpr bool kTogether = false;
  static constexpr int kBlocks = 1;
  int width;

  __device__ __forceinline__ int rank() const {
    return 0;
  }
  __device__ __forceinline__ int index() const {
    return threadIdx.x % width;
  }
  __device__ __forceinline__ int count() const {
    return width;
  }
  // Neighbouring lanes that share a row.
  __device__ __forceinline__ int lanes() const {
    return width;
  }
  // Rows that a team takes at once. A team is a warp, and takes a note of its own (expectation.cuh).
  __device__ __forceinline__ int rows() const {
    return kWarp / width;
  }
  __device__ __forceinline__ int row() const {
    return threadIdx.x % kWarp / width;
  }
  __device__ __forceinline__ int64 team() const {
    return global_warp();
  }
  __device__ __forceinline__ int64 teams() const {
    return static_cast<int64>(gridDim.x) * (blockDim.x / kWarp);
  }
  __device__ __forceinline__ bool leads() const {
    return threadIdx.x % kWarp == 0;
  }
  // Before anything else of the team's.
  __device__ __forceinline__ void open() const {
  }
  // What the team's first thread drew.
  __device__ __forceinline__ unsigned told(const Turn& turn) const {
    return __shfl_sync(0xffffffffu, turn.drawn, 0);
  }

  // The sum of what the first threads of the team's rows hold, in its leader.
  __device__ __forceinline__ double total(double x, Turn&) const {
    return warp_sum(index() == 0 ? x : 0.0);
  }
};

// The same where the warps of a block are a team: a group is a row to each, so that none is left with several when the
// others have ended. Precondition: every thread of the block calls everything together.
struct LanesUnit : LaneUnit {
  static constexpr bool kTogether = true;

  __device__ __forceinline__ int rows() const {
    return blockDim.x / width;
  }
  __device__ __forceinline__ int row() const {
    return threadIdx.x / width;
  }
  __device__ __forceinline__ int64 team() const {
    return blockIdx.x;
  }
  __device__ __forceinline__ int64 teams() const {
    return gridDim.x;
  }
  __device__ __forceinline__ bool leads() const {
    return threadIdx.x == 0;
  }
  // What the team's first thread drew before its last call of total().
  __device__ __forceinline__ unsigned told(const Turn& turn) const {
    return tellings()[(turn.joins & 1) ^ 1];
  }
  // Also tells what the first thread drew: one barrier for a group, because places alternate, and who reads a place is
  // behind it when it comes to the next barrier.
  __device__ __forceinline__ double total(double x, Turn& turn) const {
    __shared__ double sums[2][kWarp];
    const int lane = threadIdx.x % kWarp, place = turn.joins & 1;
    x = warp_sum(index() == 0 ? x : 0.0);
    if (lane == 0) sums[place][threadIdx.x / kWarp] = x;
    if (threadIdx.x == 0) tellings()[place] = turn.drawn;
    __syncthreads();
    ++turn.joins;
    if (threadIdx.x >= kWarp) return 0.0;
    return warp_sum(lane < static_cast<int>(blockDim.x / kWarp) ? sums[place][lane] : 0.0);
  }

 private:
  static __device__ __forceinline__ unsigned* tellings() {
    __shared__ unsigned drawn[2];
    return drawn;
  }
};

// A row is taken by the blocks of a cluster, kBlocks of them, or by one alone.
// Preconditions: blockDim.x is a multiple of 32 up to 1024, and every thread calls everything together.
template <int kBlocks_>
struct BlocksUnit {
  static constexpr bool kBlock = true;
  static constexpr bool kTogether = true;
  static constexpr int kBlocks = kBlocks_;

  __device__ __forceinline__ int rank() const {
    return kBlocks == 1 ? 0 : static_cast<int>(cluster_rank());
  }
  __device__ __forceinline__ int index() const {
    return rank() * blockDim.x + threadIdx.x;
  }
  __device__ __forceinline__ int count() const {
    return kBlocks * blockDim.x;
  }
  __device__ __forceinline__ int lanes() const {
    return kWarp;
  }
  __device__ __forceinline__ int rows() const {
    return 1;
  }
  __device__ __forceinline__ int row() const {
    return 0;
  }
  __device__ __forceinline__ int64 team() const {
    return blockIdx.x / kBlocks;
  }
  __device__ __forceinline__ int64 teams() const {
    return gridDim.x / kBlocks;
  }
  __device__ __forceinline__ bool leads() const {
    return index() == 0;
  }
  // Before the first call of share(), which has to follow: nothing can be sent to a block that has not begun.
  __device__ __forceinline__ void open() const {
    if constexpr (kBlocks > 1) arrive_in_cluster();
  }
  // What the team's first thread drew before its last call of share().
  __device__ __forceinline__ unsigned told(const Turn& turn) const {
    return tellings()[(turn.joins & 1) ^ 1];
  }

  // Tells all threads of a block what the first one drew, behind the next barrier.
  __device__ __forceinline__ void tell(const Turn& turn) const {
    if (threadIdx.x == 0) tellings()[turn.joins & 1] = turn.drawn;
  }

  // Hands `mine`, the same in all lanes of a warp, to all warps of the unit: in `all`, in the order of the warps; and
  // what the first thread drew.
  //
  // Who still reads what it was handed in the last call but one has sent nothing in the last one, for which all wait,
  // so that two places are enough.
  template <class T>
  __device__ __forceinline__ void share(const T& mine, Turn& turn, const T*& all) const {
    static_assert(sizeof(T) % 4 == 0, "what is shared travels in words of 4 bytes");
    constexpr int kWords = sizeof(T) / 4;
    // Words, because a T may have constructors.
    alignas(16) __shared__ unsigned words[2][kBlocks * kWarp * kWords];
    T* const parts = reinterpret_cast<T*>(words[turn.joins & 1]);
    const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    unsigned* const place = reinterpret_cast<unsigned*>(&parts[rank() * warps + threadIdx.x / kWarp]);
    const unsigned* const own = reinterpret_cast<const unsigned*>(&mine);
    if constexpr (kBlocks == 1) {
      if (lane == 0) reinterpret_cast<T&>(*place) = mine;
      tell(turn);
      __syncthreads();
    } else {
      unsigned* const telling = tellings() + (turn.joins & 1);
      const unsigned drawn = __shfl_sync(0xffffffffu, turn.drawn, 0);
      const bool sends = lane < kBlocks, tells = sends && rank() == 0 && threadIdx.x < kWarp;
      if (turn.joins == 0) wait_for_cluster();
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        if (sends) store_in_cluster(place + i, lane, own[i]);
      }
      if (tells) store_in_cluster(telling, lane, drawn);
      arrive_in_cluster();
      wait_for_cluster();
    }
    ++turn.joins;
    all = parts;
  }
  // How many parts there are.
  __device__ __forceinline__ int warps() const {
    return kBlocks * (blockDim.x / kWarp);
  }

  __device__ __forceinline__ double total(double x, Turn&) const {
    return x;
  }

 private:
  static __device__ __forceinline__ unsigned* tellings() {
    __shared__ unsigned drawn[2];
    return drawn;
  }
};

// The groups that a team takes: the first ones by its number, and then always the next one that nobody has drawn,
// because multiprocessors are not equally fast. Which team takes a group changes no bit. A number is drawn long before
// it is needed, so that nobody waits for it.
template <class Unit>
struct GroupQueue {
  // Each team has so many without drawing: as many as may be asked for before a join of the unit.
  static constexpr int kGiven = 3;
  unsigned* counter;  // how many were drawn by all teams; nullptr where all are given
  unsigned drawn;     // in the first thread of the team

  __device__ __forceinline__ GroupQueue(const Unit& unit, unsigned* counter) : counter(counter), drawn(0) {
    draw(unit);
  }
  // The group after `group`. Preconditions: all threads of the team call it together, with the turn of a visit of which
  // no join has begun; between two calls that draw lies a join of the unit.
  __device__ __forceinline__ int after(const Unit& unit, int group, unsigned joins) {
    const int teams = static_cast<int>(unit.teams());
    if (counter == nullptr || group < (kGiven - 1) * teams) return group + teams;
    const int next = kGiven * teams + static_cast<int>(unit.told({joins, drawn}));
    draw(unit);
    return next;
  }

 private:
  __device__ __forceinline__ void draw(const Unit& unit) {
    if (counter != nullptr && unit.leads()) drawn = atomicAdd(counter, 1u);
  }
};

// The group after `group` of a warp, which has the first one without drawing, and waits for what it draws: what others
// of the same multiprocessor do not notice, and a register less. Preconditions: all lanes of the warp call it together.
__device__ __forceinline__ int next_group(const LaneUnit& unit, int group, unsigned* counter) {
  const int teams = static_cast<int>(unit.teams());
  if (counter == nullptr) return group + teams;
  unsigned drawn = 0;
  if (unit.leads()) drawn = atomicAdd(counter, 1u);
  return teams + static_cast<int>(unit.told({0, drawn}));
}

// expected grad_output * weight, noted for each group, by each block of a cluster for itself, because it has read for
// itself what is expected. As ExpectedScale, for teams of any size.
// Preconditions of the constructor: every thread of the team makes it together. Of what follows: a join of the unit
// lies between the constructor and the first call, in a block because thread 0 reads the slot for all of them.
template <class Unit, class Compute>
struct TeamScale {
  double* used;
  double weight;
  double grad_output;

  __device__ __forceinline__ TeamScale(const double* expected, double* used, double weight)
      : used(used), weight(weight) {
    const double loaded = expected == nullptr ? 1.0 : __ldcg(expected);
    if constexpr (Unit::kTogether) {
      if (threadIdx.x == 0) shared() = loaded;
      if constexpr (!Unit::kBlock) __syncthreads();
    } else {
      grad_output = __shfl_sync(0xffffffffu, loaded, 0);
    }
  }

  __device__ __forceinline__ Compute factor() {
    return static_cast<Compute>((Unit::kTogether ? shared() : grad_output) * weight);
  }
  __device__ __forceinline__ void note(const Unit& unit, int64 group) const {
    if constexpr (Unit::kTogether) {
      if (threadIdx.x == 0) used[group * Unit::kBlocks + unit.rank()] = shared();
    } else {
      if (unit.leads()) used[group] = grad_output;
    }
  }

 private:
  static __device__ __forceinline__ double& shared() {
    __shared__ double expected;
    return expected;
  }
};
// What else a gradient is multiplied by is known.
template <class Scale, class Unit>
__device__ __forceinline__ void note_scale(const Scale&, const Unit&, int64) {
}
template <class Unit, class Compute>
__device__ __forceinline__ void note_scale(const TeamScale<Unit, Compute>& scale, const Unit& unit, int64 group) {
  scale.note(unit, group);
}

// Whether the gradients of a group that is the team's own were written with another grad_output than the true one, as
// `verify` of expectation.cuh: the same in all threads of the team, which can only compute together.
template <class Unit>
__device__ __forceinline__ bool verify_team(const Unit& unit, int64 groups, double true_grad_output, const double* used,
                                            double* expected) {
  // Each block of it looks at all of them, or each warp: there are few.
  constexpr int kBlocks = Unit::kBlocks;
  const int threads = Unit::kTogether ? static_cast<int>(blockDim.x) : kWarp;
  const int64 step = unit.teams(), notes = (groups - unit.team() + step - 1) / step * kBlocks;
  bool stale = used == nullptr;
  for (int64 i = threadIdx.x % threads; !stale && i < notes; i += threads) {
    const double note = used[(unit.team() + i / kBlocks * step) * kBlocks + i % kBlocks];
    stale = __double_as_longlong(note) != __double_as_longlong(true_grad_output);
  }
  stale = (Unit::kTogether ? __syncthreads_or(stale) : __any_sync(0xffffffffu, stale)) != 0;
  if (stale && expected != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *expected = true_grad_output;
  return stale;
}
