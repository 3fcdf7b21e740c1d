// Second derivatives for dense targets with respect to the logits only: tangents v of the logits, and the hvp of the
// logits' gradient. Rows in registers. Results of dense_second_derivatives.cuh.
//
// If a term is affine in log p, its derivatives h_c depend only on the targets. With logits x, tangents v and targets
// (R, C), z = s x with the largest logit at class m, e_c = exp(z_c - z_m), u_c = v_c - v_m, S = sum of e_c,
// M = sum of e_c u_c / S and H = sum of h_c:
//
//   lse'   = s (v_m + M)
//   jvp    = s (sum of h_c u_c - H M) + slope lse'                             slope = penalty'(lse)
//   hvp_c  = e_c (A u_c + B)          A = s K (slope - H),  B = K slope' - A M,  K = grad_output s / S
//
// u_m is 0, so nothing cancels at the largest logit either. If the derivatives of a term sum to 0
// (Program::kSkipsSums), no sum over the term is needed: the tangent of each derivative is evaluated on nested numbers,
// without targets.
//
// 1. The threads that share a row load all of it at once: vectors and edge elements of all operands (lane_vectors.cuh).
// 2. They find the largest logit, then its tangent (the largest one of equal logits), then the sums.
// 3. Each thread writes the results of its classes, from the exponentials, which it has kept, or with kSkipsSums from
//    the term, which it evaluates again.
//
// A product of 0 and an infinite tangent is NaN at first: a pack whose results are NaN is evaluated again with
// scaled_tangent.
//
// Traffic: each operand is read once, each result is written once. Preconditions: Program::kAffine, or
// Program::kSkipsSums without Program::kValued; no cap; those of lane_vectors.cuh.
#pragma once
#include "softmax/dense_second_derivatives.cuh"
#include "softmax/lane_vectors.cuh"

// Neighbouring classes of a lane: logits x, tangents v, targets t and exponentials e.
template <class Program, int kVecSize>
struct DenseHvpPack {
  static constexpr int kCount = kVecSize;
  using Input = typename Program::InputStorage;
  Pack<typename Program::InputStorage, kVecSize> x, v;
  Pack<typename Program::TargetStorage, kVecSize> t;
  decltype(typename Program::Compute().value) e[kVecSize];
};

// Indices of the sums over the classes of a row: of e_c, e_c u_c, h_c and h_c u_c.
enum DenseHvpSum { kExpSum, kChanged, kGradLogP, kAlong };

// Coefficients of a row's results, besides the maximum. `coeff` and `constant` are A and B; B is NaN in a row without a
// distribution. The others are for terms that are evaluated again (kSkipsSums): M, log S and the factor of the results.
template <class T>
struct DenseHvpCoeffs {
  T coeff, constant;
  T mean, log_sum, factor;
};

// Functors for LaneVectors::for_each on the packs of a lane: loads, sums, and results.
template <class Program, bool kShifted>
struct DenseHvpLane {
  using Number = typename Program::Compute;
  using T = decltype(Number().value);
  using Input = typename Program::InputStorage;
  // True if the results of a row need no sum over its terms.
  static constexpr bool kSkipsSums = Program::kSkipsSums;
  static constexpr int kSums = kSkipsSums ? 2 : Program::kValued ? 4 : 3;

  const Program& program;
  const int64 (&offset)[kRowStreams];
  typename Program::Row row;  // as passed to the term

  __device__ __forceinline__ DenseHvpLane(const Program& program, const int64 (&offset)[kRowStreams])
      : program(program), offset(offset) {
    row.classes = constant<Number>(static_cast<double>(program.space.classes));
  }

  struct Load {
    const DenseHvpLane& lane;
    template <int kCount>
    __device__ __forceinline__ void operator()(int first, DenseHvpPack<Program, kCount>& pack) const {
      const Program& program = lane.program;
      const auto& step = program.space.class_stride;
      pack.x = load_of_lane<kCount, kShifted>(program.input + lane.offset[kLogits], step[kLogits], first);
      pack.v = load_of_lane<kCount, kShifted>(program.tangents + lane.offset[kGradients], step[kGradients], first);
      if constexpr (!kSkipsSums) {
        pack.t = load_of_lane<kCount, kShifted>(program.targets + lane.offset[kLabels], step[kLabels], first);
      }
    }
  };
  struct Add {
    const DenseHvpLane& lane;
    const MaxWithTangent<T> max;
    T sums[kSums] = {};

    template <int kCount>
    __device__ __forceinline__ void operator()(int first, DenseHvpPack<Program, kCount>& pack) {
      T x[kCount], u[kCount], t[kCount], changed = T(0);
      unpack(pack.x, x);
      unpack(pack.v, u);
      if constexpr (!kSkipsSums) unpack(pack.t, t);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        u[i] -= max.tangent;
        pack.e[i] = exponential(x[i]);
        sums[kExpSum] += pack.e[i];
        changed = scalar_fma(pack.e[i], u[i], changed);
        if constexpr (!kSkipsSums) {
          const auto y = lane.program.evaluate_at(lane.row, Number(0), Number(t[i], T(0)), first + i);
          const T h = tangent_or_zero(y, 0).value;
          sums[kGradLogP] += h;
          if constexpr (Program::kValued) sums[kAlong] += scaled_tangent(h, u[i]);
        }
      }
      if (changed != changed) {
        changed = T(0);
#pragma unroll
        for (int i = 0; i < kCount; ++i) changed += scaled_tangent(pack.e[i], u[i]);
      }
      sums[kChanged] += changed;
    }

   private:
    // e_c, apart from a factor near 1 that all classes share: the rounding error of the maximum that is subtracted.
    __device__ __forceinline__ T exponential(T x) const {
      const T of_logit = lane.program.logit.scale.value;
      if constexpr (kNarrow && kSingle<T>) {
        return exp2_ftz(fmaf(x, of_logit * kLog2E, -max.logit * (of_logit * kLog2E)));
      } else {
        return exp_nonpositive(scalar_fma(x, of_logit, -(of_logit * max.logit)));
      }
    }
  };
  struct Store {
    const DenseHvpLane& lane;
    const MaxWithTangent<T> max;
    const DenseHvpCoeffs<T> coeffs;
    const bool active;

    template <int kCount>
    __device__ __forceinline__ void operator()(int first, const DenseHvpPack<Program, kCount>& pack) const {
      T g[kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) g[i] = T(0);
      if (active) {
        T u[kCount];
        unpack(pack.v, u);
#pragma unroll
        for (int i = 0; i < kCount; ++i) u[i] -= max.tangent;
        if constexpr (kSkipsSums) {
          of_term(first, pack, u, g);
        } else {
          of_exponentials(pack, u, g);
        }
      }
      const Program& program = lane.program;
      const int64 at = kCount == 1 ? first * program.space.class_stride[kGradients] : first;
      store_stream<kCount>(program.gradients + lane.offset[kGradients] + at, NarrowPack<Input, kCount>::from(g));
    }

   private:
    // Results from the exponentials: e_c (A u_c + B).
    template <int kCount>
    __device__ __forceinline__ void of_exponentials(const DenseHvpPack<Program, kCount>& pack, const T (&u)[kCount],
                                                    T (&g)[kCount]) const {
      T sum = T(0);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        g[i] = pack.e[i] * scalar_fma(u[i], coeffs.coeff, coeffs.constant);
        sum += g[i];
      }
      if (sum == sum) return;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        g[i] =
            scaled_tangent(pack.e[i], coeffs.constant) + scaled_tangent(coeffs.coeff, scaled_tangent(pack.e[i], u[i]));
      }
    }
    // Results from a term whose derivatives sum to 0: the tangents of these derivatives, times `factor`.
    template <int kCount>
    __device__ __forceinline__ void of_term(int first, const DenseHvpPack<Program, kCount>& pack, const T (&u)[kCount],
                                            T (&g)[kCount]) const {
      const T of_logit = lane.program.logit.scale.value;
      T x[kCount];
      unpack(pack.x, x);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const Number log_p{scalar_fma(x[i], of_logit, -(of_logit * max.logit)) - coeffs.log_sum,
                           of_logit * (u[i] - coeffs.mean)};
        const auto y = lane.program.evaluate_at(lane.row, log_p, Number(0), first + i);
        g[i] = scalar_fma(tangent_or_zero(y, 0).tangent, coeffs.factor, coeffs.constant);
      }
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
      const MaxWithTangent<T> max = largest_of_lanes<T>(group, lanes, held, single, active);
      typename Lane::Add add{lane, max};
      if (active) lanes.for_each(held, single, add);

      T value = T(0);
      const DenseHvpCoeffs<T> coeffs = coeffs_of(max, add.sums, factor, value);
      if (Program::kValued && exists && group.thread_rank() == 0) {
        value = active ? value : T(0);
        program.values[offset[kResults]] = Narrow<typename Program::Result>::from(Number(T(0), value));
      }
      typename Lane::Store store{lane, max, coeffs, active};
      if (exists) lanes.for_each(held, single, store);
      return value;
    }

   private:
    // Adds the sums of all threads of a row. Returns its coefficients, and in `value` its jvp if kValued. Precondition:
    // that of row_reduce.
    __device__ __forceinline__ DenseHvpCoeffs<T> coeffs_of(const MaxWithTangent<T>& max, T (&sums)[Lane::kSums],
                                                           T factor, T& value) const {
      row_reduce(group, sums, AddOp{});
      const T of_logit = program.logit.scale.value, inverse = scalar_divide_closely(T(1), sums[kExpSum]);
      const T mean = sums[kChanged] * inverse, log_sum = scalar_log(sums[kExpSum]);
      // A row whose largest logit is infinite has no distribution: its results are NaN.
      const T no_distribution = max.logit - max.logit;
      if constexpr (Lane::kSkipsSums) {
        return {T(0), no_distribution, mean, log_sum, factor * of_logit};
      } else {
        const Number lse{scalar_fma(of_logit, max.logit, log_sum), of_logit * (max.tangent + mean)};
        const Number slope = tangent_or_zero(program.penalty(variable<1u, 0>(lse)), 0);
        if constexpr (Program::kValued) {
          value = scalar_fma(of_logit, scalar_fma(-sums[kGradLogP], mean, sums[kAlong]),
                             scaled_tangent(slope.value, lse.tangent));
        }
        const T common = factor * of_logit * inverse;
        const T coeff = common * (slope.value - sums[kGradLogP]) * of_logit;
        const T constant = scalar_fma(-coeff, mean, scaled_tangent(common, slope.tangent));
        return {coeff, constant + no_distribution, mean, log_sum, factor};
      }
    }
  };

  // Visits every row once, as TwoPassReader::sweep.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    static_assert(kGradient && !Program::kCapped && Program::kInputMoves && !Program::kTargetMoves &&
                      (Program::kAffine || (Program::kSkipsSums && !Program::kValued)),
                  "second derivatives by the logits of an affine term");
    for_each_row(group, scale, program.space.rows, chunks, work, Visit<Group, Program, Scale>{program, group, scale});
  }
};
