// The threads that share a row: some neighbouring lanes of a warp, a block, or a cluster of blocks. Each reads every
// `count()`-th vector of the row, and what they find out about it they share in every thread.
//
// Trees are fixed, so that a row that lies as another one does has the same bits, on any GPU.

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
  static constexpr int kBlocks = 1;
  int width;

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
  __device__ __forceinline__ int64 note() const {
    return team();
  }
  __device__ __forceinline__ bool leads() const {
    return threadIdx.x % kWarp == 0;
  }

  // The sum of what the first threads of the team's rows hold, in its leader.
  __device__ __forceinline__ double total(double x) const {
    return warp_sum(index() == 0 ? x : 0.0);
  }
};

// A row is taken by the blocks of a cluster, kBlocks of them, or by one alone.
// Preconditions: blockDim.x is a multiple of 32 up to 1024, and every thread calls everything together.
template <int kBlocks_>
struct BlocksUnit {
  static constexpr bool kBlock = true;
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
  // Each block of a cluster takes a note of its own, because it reads for itself what is expected.
  __device__ __forceinline__ int64 note() const {
    return blockIdx.x;
  }
  __device__ __forceinline__ bool leads() const {
    return index() == 0;
  }

  // Hands `mine`, the same in all lanes of a warp, to all warps of the unit: in `all`, in the order of the warps.
  // Precondition: `turn` alternates between 0 and 1 from call to call. Who still reads what it was handed in the last
  // call but one has not come to the barrier of the last call, so that one barrier is enough.
  template <class T>
  __device__ __forceinline__ void share(const T& mine, int turn, const T*& all) const {
    static_assert(sizeof(T) % 4 == 0, "what is shared travels in words of 4 bytes");
    // Words, because a T may have constructors.
    alignas(T) __shared__ unsigned words[2][kBlocks * kWarp * sizeof(T) / 4];
    T* const parts = reinterpret_cast<T*>(words[turn]);
    const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    T* place = &parts[rank() * warps + threadIdx.x / kWarp];
    if constexpr (kBlocks == 1) {
      if (lane == 0) *place = mine;
      __syncthreads();
    } else {
      if (lane < kBlocks) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(T) / 4); ++i) {
          store_in_cluster(reinterpret_cast<unsigned*>(place) + i, lane, reinterpret_cast<const unsigned*>(&mine)[i]);
        }
      }
      cluster_barrier();
    }
    all = parts;
  }
  // How many parts there are.
  __device__ __forceinline__ int warps() const {
    return kBlocks * (blockDim.x / kWarp);
  }

  __device__ __forceinline__ double total(double x) const {
    return x;
  }
};
using BlockUnit = BlocksUnit<1>;

// expected grad_output * weight, noted once per team, or block of it. As ExpectedScale, for teams of any size.
// Preconditions of the constructor: every thread of the team makes it together. Of factor(): a join of the unit lies
// between the constructor and the first call, in a block because thread 0 reads the slot for all of them.
template <class Unit, class Compute>
struct TeamScale {
  double weight;
  double grad_output;

  __device__ __forceinline__ TeamScale(const Unit& unit, const double* expected, double* used, double weight)
      : weight(weight) {
    const double loaded = expected == nullptr ? 1.0 : __ldcg(expected);
    if constexpr (Unit::kBlock) {
      if (threadIdx.x == 0) shared() = loaded;
    } else {
      grad_output = __shfl_sync(0xffffffffu, loaded, 0);
    }
    if (Unit::kBlock ? threadIdx.x == 0 : unit.leads()) used[unit.note()] = Unit::kBlock ? loaded : grad_output;
  }

  __device__ __forceinline__ Compute factor() {
    return static_cast<Compute>((Unit::kBlock ? shared() : grad_output) * weight);
  }

 private:
  static __device__ __forceinline__ double& shared() {
    __shared__ double expected;
    return expected;
  }
};

// Whether a part of the team's gradients was written with another grad_output than the true one, as `verify` of
// expectation.cuh: the same in all threads of the team, which can only compute together.
template <class Unit>
__device__ __forceinline__ bool verify_team(const Unit& unit, double true_grad_output, const double* used,
                                            double* expected) {
  bool stale = used == nullptr;
#pragma unroll
  for (int i = 0; i < Unit::kBlocks; ++i) {
    stale =
        stale || __double_as_longlong(used[unit.team() * Unit::kBlocks + i]) != __double_as_longlong(true_grad_output);
  }
  if (stale && expected != nullptr && unit.note() == 0 && threadIdx.x == 0) *expected = true_grad_output;
  return stale;
}
