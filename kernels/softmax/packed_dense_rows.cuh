// Dense targets, many rows of few contiguous classes: one row per lane; each warp moves 32 rows together, as in
// packed_rows.cuh. Value and gradients of dense_rows.cuh.
//
//   tile of a warp = 32 rows of kClasses classes, contiguous in logits and in targets
//
// 1. The warp copies the tile of both operands to shared memory, coalesced.
// 2. Each lane runs the passes of dense_rows.cuh over its row. The last pass overwrites each operand with its gradient.
// 3. The warp writes the requested gradients, coalesced.
//
// A warp owns its tile; only __syncwarp separates the steps.
//
// Traffic: each logit and target is read once, each gradient is written once. Preconditions: in operands and gradients
// rows are contiguous and follow each other without gaps; each array begins at a multiple of kWordBytes; gradients have
// the dtypes of their operands.
#pragma once
#include "softmax/dense_rows.cuh"
#include "softmax/packed_rows.cuh"

// The row of a lane in shared memory. Implements Classes of visit_dense_row.
template <class Program, int kClasses>
struct PackedDenseClasses {
  static constexpr bool kContiguous = true;
  static constexpr bool kPlacesGradients = true;
  static constexpr bool kOnChip = false;
  static constexpr bool kManyPacks = false;
  static constexpr bool kAlone = true;
  using Input = typename Program::Input;
  using Target = typename Program::Target;
  using Compute = typename Program::Compute;
  static constexpr bool kHasRoom = sizeof(Input) == sizeof(Compute) && sizeof(Target) == sizeof(Compute);
  static constexpr bool kReplaces = false;
  // Classes that are read together: a power of two that divides the number of classes, in at most 16 bytes.
  static constexpr int kWidest = 16 / static_cast<int>(sizeof(Input) > sizeof(Target) ? sizeof(Input) : sizeof(Target));
  static constexpr int kEach = (kClasses & -kClasses) < kWidest ? (kClasses & -kClasses) : kWidest;
  using X = Pack<Input, kEach>;
  using T = Pack<Target, kEach>;
  char *x, *t;
  bool exists, active;

  __device__ __forceinline__ void prefetch_next() const {
  }
  template <class F>
  __device__ __forceinline__ void visit(F& f) const {
#pragma unroll 2
    for (int c = 0; c < kClasses; c += kEach) {
      f(c, load_words(reinterpret_cast<const X*>(x) + c / kEach),
        load_words(reinterpret_cast<const T*>(t) + c / kEach));
    }
  }
  template <class F>
  __device__ __forceinline__ void for_each(F& f) const {
    if (active) visit(f);
  }
  template <class F>
  __device__ __forceinline__ void final_pass(F& f) const {
    for_each(f);
  }
  template <class F>
  __device__ __forceinline__ void final_pass_all(const F& f) const {
    if (exists) visit(f);
  }
  template <class F>
  __device__ __forceinline__ void fill(const F& f) const {
    if (!exists) return;
#pragma unroll 1
    for (int c = 0; c < kClasses; c += kEach) f.template write<kEach>(c);
  }
  // Only if kHasRoom: two numbers of each class replace its operands.
  template <class F>
  __device__ __forceinline__ void for_each_kept(F& f) const {
    if (!active) return;
#pragma unroll 2
    for (int c = 0; c < kClasses; c += kEach) {
      Compute kept[2][kEach];
      f(c, load_words(reinterpret_cast<const X*>(x) + c / kEach), load_words(reinterpret_cast<const T*>(t) + c / kEach),
        kept);
      keep(c, kept);
    }
  }
  template <class F>
  __device__ __forceinline__ void final_kept_pass(const F& f) const {
    if (!exists) return;
#pragma unroll 2
    for (int c = 0; c < kClasses; c += kEach) {
      using Kept = Pack<Compute, kEach>;
      const Kept at[2] = {load_words(reinterpret_cast<const Kept*>(x) + c / kEach),
                          load_words(reinterpret_cast<const Kept*>(t) + c / kEach)};
      Compute kept[2][kEach];
#pragma unroll
      for (int i = 0; i < 2 * kEach; ++i) kept[i / kEach][i % kEach] = at[i / kEach].element[i % kEach];
      f(c, kept);
    }
  }
  template <int kCount>
  __device__ __forceinline__ void keep(int first, const Compute (&kept)[2][kCount]) const {
    char* const place[2] = {x, t};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      Pack<Compute, kCount> pack;
#pragma unroll
      for (int i = 0; i < kCount; ++i) pack.element[i] = kept[k][i];
      store_words(reinterpret_cast<Pack<Compute, kCount>*>(reinterpret_cast<Compute*>(place[k]) + first), pack);
    }
  }
  __device__ __forceinline__ void read(int c, Pack<Input, 1>& of_input, Pack<Target, 1>& of_target) const {
    of_input.element[0] = reinterpret_cast<const Input*>(x)[c];
    of_target.element[0] = reinterpret_cast<const Target*>(t)[c];
  }
  __device__ __forceinline__ int count() const {
    return kClasses;
  }
  __device__ __forceinline__ void put_logit(int c, const Pack<Input, 1>& of_input) const {
    input(c, of_input);
  }
  __device__ __forceinline__ void put_target(int c, const Pack<Target, 1>& of_target) const {
    target(c, of_target);
  }
  template <int kVecSize>
  __device__ __forceinline__ void input(int64 first, const Pack<Input, kVecSize>& g) const {
    store_words(reinterpret_cast<Pack<Input, kVecSize>*>(reinterpret_cast<Input*>(x) + static_cast<int>(first)), g);
  }
  template <int kVecSize>
  __device__ __forceinline__ void target(int64 first, const Pack<Target, kVecSize>& g) const {
    store_words(reinterpret_cast<Pack<Target, kVecSize>*>(reinterpret_cast<Target*>(t) + static_cast<int>(first)), g);
  }
};

// Visits every row once, as TwoPassReader.
template <int kClasses, int kWordBytes>
struct PackedDenseReader {
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    using Inputs = PackedTile<typename Program::Input, kClasses, kWarp, kWordBytes>;
    using Targets = PackedTile<typename Program::Target, kClasses, kWarp, kWordBytes>;
    static_assert(kSameType<typename Program::Input, typename Program::Gradient>, "gradients take the place of logits");
    const int64 rows = program.space.rows, tiles = (rows + kWarp - 1) / kWarp;
    const int lane = threadIdx.x % kWarp;
    const Inputs inputs{shared_of_warp(Inputs::kBytes + Targets::kBytes)};
    const Targets targets{inputs.stage + Inputs::kBytes};
    SyncState sync{0, 0};
    for_each_chunk(group, scale, chunks, work, [&](int chunk) {
      double total = 0.0;
#pragma unroll 1
      for (int64 tile = chunk; tile < tiles; tile += chunks) {
        const int64 first = tile * kWarp;
        const int here = rows - first < kWarp ? static_cast<int>(rows - first) : kWarp;
        const bool exists = lane < here;
        int64 offset[kRowStreams];
        program.space.offsets(exists ? first + lane : 0, offset);
        const bool active = exists && program.active(offset);
        inputs.copy_in(program.input + first * kClasses, here);
        targets.copy_in(program.targets + first * kClasses, here);
        cp_async_wait_all();
        __syncwarp();
        const PackedDenseClasses<Program, kClasses> classes{inputs.row(lane), targets.row(lane), exists, active};
        total += visit_dense_row<kGradient>(program, group, offset, classes, exists, sync, scale);
        __syncwarp();
        if constexpr (kGradient) {
          if constexpr (Program::kInputGradient) inputs.copy_out(program.gradients + first * kClasses, here);
          if constexpr (Program::kTargetGradient) targets.copy_out(program.target_gradients + first * kClasses, here);
          // The next tile is copied to the same place.
          __syncwarp();
        }
      }
      return total;
    });
  }
};
