// Second derivatives for class indices without a cap, rows in registers. Results, formulas and passes of hvp_rows.cuh.
//
// 1. The threads that share a row load all of it at once, logits and tangents (lane_vectors.cuh).
// 2. They find the largest logit and its tangent, then the sums, which need no rescaling.
// 3. Each thread writes the results of its classes.
//
// Traffic: logits and tangents are read once, each result is written once. Preconditions: those of lane_vectors.cuh;
// Program::kCapped is false.
#pragma once
#include "softmax/hvp_rows.cuh"
#include "softmax/lane_vectors.cuh"

// Neighbouring classes of a lane: logits x and tangents v.
template <class Storage, int kVecSize>
struct HvpPack {
  static constexpr int kCount = kVecSize;
  using Input = Storage;
  Pack<Storage, kVecSize> x, v;

  __device__ __forceinline__ TangentPack<Storage, kVecSize> with_tangents() const {
    return {x, v};
  }
};

// Functors for LaneVectors::for_each on the packs of a lane: loads, sums, and results.
template <class Program, bool kShifted>
struct HvpLane {
  using Number = typename Program::Compute;
  using T = decltype(Number().value);
  using Storage = typename Program::Storage;
  const Program& program;
  const RowTarget<Number>& target;

  // Position of the label's class among the `count` classes from `first`, or -1.
  __device__ __forceinline__ int position(int first, int count) const {
    const int at = static_cast<int>(target.label) - first;
    return target.active && at >= 0 && at < count ? at : -1;
  }

  struct Load {
    const HvpLane& lane;
    template <int kCount>
    __device__ __forceinline__ void operator()(int first, HvpPack<Storage, kCount>& pack) const {
      const Program& program = lane.program;
      const int64(&offset)[kRowStreams] = lane.target.offset;
      const auto& step = program.space.class_stride;
      pack.x = load_of_lane<kCount, kShifted>(program.input + offset[kLogits], step[kLogits], first);
      pack.v = load_of_lane<kCount, kShifted>(program.tangents + offset[kTangents], step[kTangents], first);
    }
  };
  struct Add {
    const HvpLane& lane;
    const Number z;
    HvpSums<Program> sums;
    template <int kCount>
    __device__ __forceinline__ void operator()(int first, const HvpPack<Storage, kCount>& pack) {
      add_with_tangents<kCount>(lane.program, first, lane.position(first, kCount), z, pack.with_tangents(), sums);
    }
  };
  struct Store {
    const HvpLane& lane;
    const HvpCoeffs<T> coeffs;
    // Implements Source::store for store_hvp.
    template <int kCount>
    __device__ __forceinline__ void store(int64 first, const Pack<Storage, kCount>& g) const {
      const int64 at = kCount == 1 ? first * lane.program.space.class_stride[kGradients] : first;
      store_stream<kCount>(lane.program.gradients + lane.target.offset[kGradients] + at, g);
    }
    template <int kCount>
    __device__ __forceinline__ void operator()(int first, const HvpPack<Storage, kCount>& pack) const {
      if (coeffs.all_zero) {
        // The row may be inactive and its logits may hold anything.
        store(first, Pack<Storage, kCount>{});
      } else {
        store_hvp<kCount>(lane.program, *this, first, lane.position(first, kCount), coeffs, pack.with_tangents());
      }
    }
  };
};

// Template arguments are those of LaneVectors. kShifted: operands may be aligned differently from the results.
template <int kVecSize, int kHeld, bool kEdges, bool kPartial, bool kShifted>
struct RegisterHvpReader {
  template <class Group, class Program, class Scale>
  struct Visit {
    static constexpr bool kNeedsNextRow = false;
    using Lane = HvpLane<Program, kShifted>;
    using Storage = typename Program::Storage;
    const Program& program;
    const Group& group;
    Scale& scale;

    __device__ __forceinline__ auto operator()(int64 row, bool exists, int64, SyncState&) const {
      using Number = typename Program::Compute;
      using T = typename Lane::T;
      auto t = program.target(exists ? row : 0);
      t.active &= exists;
      t.invalid_label &= exists;
      const LaneVectors<Storage, kVecSize, kHeld, kEdges, kPartial> lanes(group, program.gradients,
                                                                          t.offset[kGradients], program.space.classes);
      const Lane lane{program, t};
      HvpPack<Storage, kVecSize> held[kHeld];
      HvpPack<Storage, 1> single, of_label;
      typename Lane::Load load{lane};
      Number z(T(0));
      const T of_logit = program.logit.scale.value;
      if (t.active) {
        lanes.for_each(held, single, load);
        load(static_cast<int>(t.label), of_label);
        z = {of_logit * widen<T>(of_label.x.element[0]), widen<T>(of_label.v.element[0])};
      }
      const MaxWithTangent<T> max = largest_of_lanes<T>(group, lanes, held, single, t.active);
      const Number max_logit{t.active ? of_logit * max.logit : T(0), t.active ? max.tangent : T(0)};
      typename Lane::Add add{lane, z, {{max_logit, Number(T(0))}, Number(T(0)), Number(T(0))}};
      if (t.active) lanes.for_each(held, single, add);
      row_add(group, add.sums);
      Number value(T(0));
      typename Lane::Store store{lane,
                                 hvp_coeffs(program, t, z, add.sums, scale, exists && group.thread_rank() == 0, value)};
      if (exists) lanes.for_each(held, single, store);
      return value;
    }
  };

  // Visits every row once, as TwoPassReader::sweep.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    static_assert(kGradient && !Program::kCapped, "second derivatives without a cap");
    for_each_row(group, scale, program.space.rows, chunks, work, Visit<Group, Program, Scale>{program, group, scale});
  }
};
