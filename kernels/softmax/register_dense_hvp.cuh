// Second derivatives for dense targets with respect to the logits only, rows in registers. Formulas of dense_hvp.cuh.
//
// 1. The threads that share a row load all of it at once: vectors and edge elements of all operands (lane_vectors.cuh).
// 2. They find the largest logit, then its tangent (the largest one of equal logits), then the sums.
// 3. Each thread writes the results of its classes, from the exponentials, which it has kept, or with kSkipsSums from
//    the term, which it evaluates again.
//
// Traffic: each operand is read once, each result is written once. Preconditions: those of dense_hvp.cuh and
// lane_vectors.cuh.
#pragma once
#include "softmax/dense_hvp.cuh"

// Functors for LaneVectors::for_each on the packs of a lane: loads, sums, and results.
template <class Program, bool kShifted>
struct DenseHvpLane {
  using Formulas = LogitHvp<Program>;
  using Number = typename Formulas::Number;
  using T = typename Formulas::T;
  using Input = typename Program::InputStorage;

  const Formulas formulas;
  const int64 (&offset)[kRowStreams];

  __device__ __forceinline__ DenseHvpLane(const Program& program, const int64 (&offset)[kRowStreams])
      : formulas(program), offset(offset) {
  }

  struct Load {
    const DenseHvpLane& lane;
    template <int kCount>
    __device__ __forceinline__ void operator()(int first, DenseHvpPack<Program, kCount>& pack) const {
      const Program& program = lane.formulas.program;
      const auto& step = program.space.class_stride;
      pack.x = load_of_lane<kCount, kShifted>(program.input + lane.offset[kLogits], step[kLogits], first);
      pack.v = load_of_lane<kCount, kShifted>(program.tangents + lane.offset[kGradients], step[kGradients], first);
      if constexpr (!Formulas::kSkipsSums) {
        pack.t = load_of_lane<kCount, kShifted>(program.targets + lane.offset[kLabels], step[kLabels], first);
      }
    }
  };
  struct Add {
    const DenseHvpLane& lane;
    const MaxWithTangent<T> max;
    T sums[Formulas::kSums] = {};

    template <int kCount>
    __device__ __forceinline__ void operator()(int first, DenseHvpPack<Program, kCount>& pack) {
      lane.formulas.add(first, max, pack, sums);
    }
  };
  struct Store {
    const DenseHvpLane& lane;
    const MaxWithTangent<T> max;
    const DenseHvpCoeffs<T> coeffs;
    const bool active;

    template <int kCount>
    __device__ __forceinline__ void operator()(int first, const DenseHvpPack<Program, kCount>& pack) const {
      const Program& program = lane.formulas.program;
      const int64 at = kCount == 1 ? first * program.space.class_stride[kGradients] : first;
      Pack<Input, kCount> g{};
      if (active) g = lane.formulas.results(first, max, coeffs, pack);
      store_stream<kCount>(program.gradients + lane.offset[kGradients] + at, g);
    }
  };
};

// Template arguments are those of LaneVectors. kShifted: operands may be aligned differently from the results.
template <int kVecSize, int kHeld, bool kEdges, bool kPartial, bool kShifted>
struct RegisterDenseHvpReader {
  template <class Group, class Program, class Scale>
  struct Visit {
    static constexpr bool kNeedsNextRow = false;
    using Lane = DenseHvpLane<Program, kShifted>;
    using Number = typename Lane::Number;
    using T = typename Lane::T;
    const Program& program;
    const Group& group;
    Scale& scale;

    __device__ __forceinline__ T operator()(int64 row, bool exists, int64, SyncState&) const {
      int64 offset[kRowStreams];
      program.space.offsets(exists ? row : 0, offset);
      const bool active = exists && program.active(offset);
      const LaneVectors<typename Lane::Input, kVecSize, kHeld, kEdges, kPartial> lanes(
          group, program.gradients, offset[kGradients], program.space.classes);
      Lane lane(program, offset);
      DenseHvpPack<Program, kVecSize> held[kHeld];
      DenseHvpPack<Program, 1> single;
      typename Lane::Load load{lane};
      if (active) lanes.for_each(held, single, load);
      const T factor = exists ? static_cast<Number>(grad_factor(scale, offset)).value : T(0);
      MaxWithTangent<T> max = largest_of_lanes<T>(group, lanes, held, single, active);
      max.logit *= program.logit.scale.value;
      typename Lane::Add add{lane, max};
      if (active) lanes.for_each(held, single, add);

      row_reduce(group, add.sums, AddOp{});
      T value = T(0);
      const DenseHvpCoeffs<T> coeffs = lane.formulas.coeffs(max, add.sums, factor, value);
      value = store_jvp(program, offset, active, exists && group.thread_rank() == 0, value);
      typename Lane::Store store{lane, max, coeffs, active};
      if (exists) lanes.for_each(held, single, store);
      return value;
    }
  };

  // Visits every row once, as TwoPassReader::sweep.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    static_assert(kGradient, "second derivatives");
    for_each_row(group, scale, program.space.rows, chunks, work, Visit<Group, Program, Scale>{program, group, scale});
  }
};
