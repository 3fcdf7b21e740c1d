// Second derivatives for dense targets, many rows of few contiguous classes: one row per lane; each warp moves 32 rows
// together, as in packed_dense_rows.cuh. Results of dense_second_derivatives.cuh.
//
//   tile of a warp = 32 rows of kClasses classes, contiguous in each operand and each tangent
//
// 1. The warp copies the tile of each operand and tangent to shared memory, coalesced.
// 2. Each lane runs the passes of dense_rows.cuh over its row, on nested numbers. The last pass overwrites the operands
//    with the results.
// 3. The warp writes the requested results, coalesced.
//
// A warp owns its tiles; only __syncwarp separates the steps.
//
// Traffic: each operand and tangent is read once, each result is written once. Preconditions: in each of these arrays
// rows are contiguous and follow each other without gaps; each array begins at a multiple of kWordBytes.
#pragma once
#include "softmax/dense_second_derivatives.cuh"
#include "softmax/packed_rows.cuh"

// The row of a lane in shared memory: values and tangents of both operands. Implements Classes of visit_dense_row.
template <class Program, int kClasses>
struct PackedDenseHvpClasses {
  static constexpr bool kContiguous = true;
  static constexpr bool kPlacesGradients = true;
  static constexpr bool kOnChip = false;
  static constexpr bool kManyPacks = false;
  static constexpr bool kAlone = false;
  static constexpr bool kHasRoom = false;
  static constexpr bool kReplaces = false;
  using Input = typename Program::InputStorage;
  using Target = typename Program::TargetStorage;
  // Classes that are read together: a power of two that divides the number of classes, at most 4, in at most 16 bytes.
  static constexpr int kWidest = 16 / static_cast<int>(sizeof(Input) > sizeof(Target) ? sizeof(Input) : sizeof(Target));
  static constexpr int kMost = kWidest < 4 ? kWidest : 4;
  static constexpr int kEach = (kClasses & -kClasses) < kMost ? (kClasses & -kClasses) : kMost;
  char *x, *x_tangents, *t, *t_tangents;
  bool exists, active;

  __device__ __forceinline__ void prefetch_next() const {
  }
  template <class F>
  __device__ __forceinline__ void visit(F& f) const {
#pragma unroll 1
    for (int c = 0; c < kClasses; c += kEach) {
      f(c, load<Input, Program::kInputMoves>(x, x_tangents, c), load<Target, Program::kTargetMoves>(t, t_tangents, c));
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
  template <int kVecSize>
  __device__ __forceinline__ void input(int64 first, const Pack<Input, kVecSize>& g) const {
    store_words(reinterpret_cast<Pack<Input, kVecSize>*>(x) + static_cast<int>(first) / kEach, g);
  }
  template <int kVecSize>
  __device__ __forceinline__ void target(int64 first, const Pack<Target, kVecSize>& g) const {
    store_words(reinterpret_cast<Pack<Target, kVecSize>*>(t) + static_cast<int>(first) / kEach, g);
  }

 private:
  template <class Storage, bool kMoves>
  static __device__ __forceinline__ Pack<WithTangent<Storage, kMoves>, kEach> load(const char* values,
                                                                                   const char* tangents, int c) {
    using P = Pack<Storage, kEach>;
    const P of_values = load_words(reinterpret_cast<const P*>(values) + c / kEach);
    Pack<WithTangent<Storage, kMoves>, kEach> pack;
#pragma unroll
    for (int i = 0; i < kEach; ++i) pack.element[i].value = of_values.element[i];
    if constexpr (kMoves) {
      const P of_tangents = load_words(reinterpret_cast<const P*>(tangents) + c / kEach);
#pragma unroll
      for (int i = 0; i < kEach; ++i) pack.element[i].tangent = of_tangents.element[i];
    }
    return pack;
  }
};

// Visits every row once, as TwoPassReader.
template <int kClasses, int kWordBytes>
struct PackedDenseHvpReader {
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    using Inputs = PackedTile<typename Program::InputStorage, kClasses, kWarp, kWordBytes>;
    using Targets = PackedTile<typename Program::TargetStorage, kClasses, kWarp, kWordBytes>;
    static_assert(kGradient, "second derivatives");
    constexpr int kInputs = Program::kInputMoves ? 2 : 1, kTargets = Program::kTargetMoves ? 2 : 1;
    const int64 rows = program.space.rows, tiles = (rows + kWarp - 1) / kWarp;
    const int lane = threadIdx.x % kWarp;
    const Inputs inputs{shared_of_warp(kInputs * Inputs::kBytes + kTargets * Targets::kBytes)};
    const Inputs input_tangents{inputs.stage + (kInputs - 1) * Inputs::kBytes};
    const Targets targets{inputs.stage + kInputs * Inputs::kBytes};
    const Targets target_tangents{targets.stage + (kTargets - 1) * Targets::kBytes};
    SyncState sync{0, 0};
    for_each_chunk(group, scale, chunks, work, [&](int chunk) {
      double total = 0.0;
#pragma unroll 1
      for (int64 tile = chunk; tile < tiles; tile += chunks) {
        const int64 first = tile * kWarp, at = first * kClasses;
        const int here = rows - first < kWarp ? static_cast<int>(rows - first) : kWarp;
        const bool exists = lane < here;
        int64 offset[kRowStreams];
        program.space.offsets(exists ? first + lane : 0, offset);
        const bool active = exists && program.active(offset);
        inputs.copy_in(program.input + at, here);
        targets.copy_in(program.targets + at, here);
        if constexpr (Program::kInputMoves) input_tangents.copy_in(program.tangents + at, here);
        if constexpr (Program::kTargetMoves) target_tangents.copy_in(program.target_tangents + at, here);
        cp_async_wait_all();
        __syncwarp();
        const PackedDenseHvpClasses<Program, kClasses> classes{
            inputs.row(lane), input_tangents.row(lane), targets.row(lane), target_tangents.row(lane), exists, active};
        total += static_cast<double>(visit_dense_row<kGradient>(program, group, offset, classes, exists, sync, scale));
        __syncwarp();
        if constexpr (Program::kInputGradient) inputs.copy_out(program.gradients + at, here);
        if constexpr (Program::kTargetGradient) targets.copy_out(program.target_gradients + at, here);
        // The next tile is copied to the same place.
        __syncwarp();
      }
      return total;
    });
  }
};
