// Second derivatives for dense targets, as second_derivatives.cuh has them for class indices: tangents v of the logits
// and w of the targets (or of a teacher's logits). Either tangent may be missing.
//
//   jvp    sum over c of v_c dL/dx_c + w_c dL/dt_c                    per row, if kValued
//   hvp    grad_output times the tangents of dL/dx_c and dL/dt_c along v and w together
//
// Steps and ownership are those of dense_rows.cuh, on nested numbers. If the derivatives h_1 of a term sum to 0 over a
// row and only the logits have a gradient (kSkipsSums), the jvp is the only sum of terms, and the last pass adds it.
// Besides the term, the arithmetic per class is written out instead of using nested numbers, as in hvp_rows.cuh:
//
//   S' = sum of e_c u_c                          e_c = exp(z_c - m),  u_c = z_c' - m'        m: the largest logit
//   g_c' = factor h_c' - e_c (B u_c + B')        B: SoftmaxVjp::shared
//
// Traffic: operands and tangents are read in each pass; each result is written once. Preconditions: tangents have the
// strides of the gradients.
#pragma once
#include "softmax/dense_rows.cuh"
#include "softmax/second_derivatives.cuh"

// Adds the logits of a pack to `part`, and returns them in z. An exponential of 0 times an infinite tangent is NaN at
// first; then the tangents of the pack are computed again with scaled_tangent.
template <int kVecSize, class Logits, class Storage, bool kMoves, class T>
__device__ __forceinline__ void add_logits(const Logits& logit, const Pack<WithTangent<Storage, kMoves>, kVecSize>& x,
                                           OnlineSoftmax<NestedDual<T>, ExcludeMax>& part,
                                           NestedDual<T> (&z)[kVecSize]) {
  NestedDual<T> raw[kVecSize];
  unpack(x, raw);
  logit.values_of(raw, z);
  T largest = z[0].value;
#pragma unroll
  for (int i = 1; i < kVecSize; ++i) largest = max_ignoring_nan(largest, z[i].value);
  // Rare after the first few packs.
  int leader = -1;
  if (largest > part.max_logit.value) {
    NestedDual<T> max_logit = z[0];
#pragma unroll
    for (int i = 1; i < kVecSize; ++i) max_logit = max_ignoring_nan(max_logit, z[i]);
    rescale(part, max_logit);
#pragma unroll
    for (int i = kVecSize - 1; i >= 0; --i) leader = identical(z[i], max_logit) ? i : leader;
  }
  const NestedDual<T> shift = exp_shift(part.max_logit);
  T e[kVecSize], change[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    e[i] = exp_nonpositive(z[i].value - shift.value);
    change[i] = kMoves ? e[i] * (z[i].tangent - shift.tangent) : T(0);
  }
  if (leader >= 0) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      if (i == leader) e[i] = change[i] = T(0);
    }
  }
  T changed = sum_elements(change);
  if (changed != changed) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i)
      change[i] = scaled_tangent(e[i], i == leader ? T(0) : z[i].tangent - shift.tangent);
    changed = sum_elements(change);
  }
  part.exp_sum.value += sum_elements(e);
  part.exp_sum.tangent += changed;
}

// Sum of h over classes (`all`), and the tangent of the sum over all classes but the leader (`others`). The leader is
// the class of the largest logit.
//
// As p of the leader approaches 1, h' of the others and g' become as small as 1 - p. Along tangents of the other
// operand, h' of the leader does not: all.tangent minus h' of the leader would have no digits left. Each part of the
// classes has a leader of its own. If that is not the leader of the row, it is one of the others, and `others` becomes
// all.tangent (as_part), as ExcludeMax adds an exponential again.
template <class T>
struct SumBesideLeader<NestedDual<T>> {
  NestedDual<T> all;
  T others;

  SumBesideLeader() = default;
  __device__ __forceinline__ SumBesideLeader(NestedDual<T> all, T others) : all(all), others(others) {
  }
  // Sum over classes without the leader.
  __device__ __forceinline__ SumBesideLeader(NestedDual<T> all) : all(all), others(all.tangent) {
  }
  __device__ __forceinline__ SumBesideLeader& operator+=(SumBesideLeader x) {
    return *this = *this + x;
  }
};
template <class T>
__device__ __forceinline__ SumBesideLeader<T> operator+(SumBesideLeader<T> x, SumBesideLeader<T> y) {
  return {x.all + y.all, x.others + y.others};
}
template <class T>
__device__ __forceinline__ SumBesideLeader<T> shuffle_xor(SumBesideLeader<T> x, int offset) {
  return {shuffle_xor(x.all, offset), shuffle_xor(x.others, offset)};
}
template <class T>
__device__ __forceinline__ void add_class(SumBesideLeader<NestedDual<T>>& sum, NestedDual<T> h, bool leads) {
  sum.all += h;
  sum.others += leads ? T(0) : h.tangent;
}
template <class T>
__device__ __forceinline__ SumBesideLeader<T> as_part(SumBesideLeader<T> sum, bool leads) {
  return {sum.all, leads ? sum.others : sum.all.tangent};
}
template <class T>
__device__ __forceinline__ T with_leader(SumBesideLeader<T> sum) {
  return sum.all;
}
// Sum over all classes but the leader, given h of the leader. Its value may lack digits: it is multiplied by p', which
// is as small as 1 - p.
template <class T>
__device__ __forceinline__ NestedDual<T> without_leader(NestedDual<T> sum, NestedDual<T> h) {
  return sum - h;
}
template <class T>
__device__ __forceinline__ NestedDual<T> without_leader(SumBesideLeader<NestedDual<T>> sum, NestedDual<T> h) {
  return {sum.all.value - h.value, sum.others};
}

// SoftmaxVjp on nested numbers. Precondition: `factor` has no tangent.
template <class T, class Sum>
struct SoftmaxVjp<NestedDual<T>, Sum> {
  using Number = NestedDual<T>;
  static constexpr bool kApart = !kSameType<Sum, Number>;
  Number max_logit, factor, shared;
  Sum sum;
  Number penalty_grad, inv_sum, max_complement;

  __device__ __forceinline__ SoftmaxVjp(const Softmax<Number>& s, Sum sum, Number penalty_grad, Number factor)
      : max_logit(s.max_logit),
        factor(factor.value, T(0)),
        shared((with_leader(sum) - penalty_grad) * s.inv_sum * factor),
        sum(sum),
        penalty_grad(penalty_grad),
        inv_sum(s.inv_sum),
        max_complement(s.max_complement) {
  }
  __device__ __forceinline__ Number at_largest(Number h) const {
    return (h * max_complement - inv_sum * (without_leader(sum, h) - penalty_grad)) * factor;
  }
  template <class Logits, int kVecSize>
  __device__ __forceinline__ void apply(const Logits&, const Number (&z)[kVecSize], Number (&h)[kVecSize]) const {
    Number of_term[kVecSize];
    T e[kVecSize], largest = z[0].value, of_all = T(0);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      largest = max_ignoring_nan(largest, z[i].value);
      of_term[i] = h[i];
      e[i] = exp_nonpositive(z[i].value - max_logit.value);
      const T coeff = scalar_fma(z[i].tangent - max_logit.tangent, shared.value, shared.tangent);
      h[i] = {scalar_fma(-e[i], shared.value, h[i].value * factor.value),
              scalar_fma(-e[i], coeff, h[i].tangent * factor.value)};
      of_all += h[i].tangent;
    }
    if (of_all != of_all) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        const Number exponential{e[i], scaled_tangent(e[i], z[i].tangent - max_logit.tangent)};
        h[i] = scalar_fma(-exponential, shared, of_term[i] * factor);
      }
    }
    // Rare. `others` leaves out all classes that share the largest logit, so at_largest() does not hold if there are
    // several. Each of them has p <= 1/2, possibly rounded up, and needs no other formula.
    if (!(largest == max_logit.value) || (kApart && !(inv_sum.value > T(0.51)))) return;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) h[i] = identical(z[i], max_logit) ? at_largest(of_term[i]) : h[i];
  }
};

// A DenseRowProgram that uses a SumBesideLeader for each operand that has a gradient while the other operand moves.
// Along tangents of the operand itself, h' of the leader has the factor (log p)', which is as small as 1 - p. If the
// h_1 of a row sum to 0, so do their tangents, and g' is h': no digits are lost.
template <class Program, bool kInputMoves, bool kTargetMoves>
using WithLeadersApart =
    typename Program::template Apart<Program::kInputGradient && kTargetMoves && !Program::Term::kBalanced,
                                     Program::kTargetGradient && kInputMoves && Program::kTeacher>;

// Program of rows with tangents: its value is the jvp, its gradients are the hvp. Program: a DenseRowProgram that
// computes on NestedDual. kInputMoves, kTargetMoves: the operand has tangents. kValued: the jvp is wanted.
template <class Program, bool kInputMoves_, bool kTargetMoves_, bool kValued_>
struct DenseHvpProgram : WithLeadersApart<Program, kInputMoves_, kTargetMoves_> {
  using Base = WithLeadersApart<Program, kInputMoves_, kTargetMoves_>;
  using Number = typename Base::Compute;
  using InputStorage = typename Base::Input;
  using TargetStorage = typename Base::Target;
  static constexpr bool kInputMoves = kInputMoves_;
  static constexpr bool kTargetMoves = kTargetMoves_;
  using Input = WithTangent<typename Base::Input, kInputMoves>;
  using Target = WithTangent<typename Base::Target, kTargetMoves>;
  static constexpr bool kValued = kValued_;
  static constexpr bool kSkipsSums = Base::Term::kBalanced && Base::kInputGradient && !Base::kTargetGradient;
  const typename Base::Input* tangents;
  const typename Base::Target* target_tangents;

  static __device__ __forceinline__ void add_to_value(Number of_class, Number& value) {
    value.tangent += of_class.tangent;
  }
  __device__ __forceinline__ auto logits(const int64 (&offset)[kRowStreams]) const {
    return with_tangent<kInputMoves>(Base::logits(offset), Base::step(), tangents, offset[kGradients],
                                     this->space.class_stride[kGradients]);
  }
  __device__ __forceinline__ auto targets_of(const int64 (&offset)[kRowStreams]) const {
    return with_tangent<kTargetMoves>(Base::targets_of(offset), Base::target_step(), target_tangents,
                                      offset[kTargetGradients], this->space.class_stride[kTargetGradients]);
  }
  // The row as vectors that are aligned in the results, wherever the operands start. Without results they are aligned
  // in the logits.
  template <int kVecSize>
  using View =
      RowVectors<Choose<Base::kInputGradient || !Base::kTargetGradient, typename Base::Input, typename Base::Target>,
                 kVecSize>;
  template <int kVecSize>
  __device__ __forceinline__ View<kVecSize> view(const int64 (&offset)[kRowStreams]) const {
    if constexpr (Base::kInputGradient) {
      return {this->gradients, offset[kGradients], this->space.classes};
    } else if constexpr (Base::kTargetGradient) {
      return {this->target_gradients, offset[kTargetGradients], this->space.classes};
    } else {
      return Base::template view<kVecSize>(offset);
    }
  }
  // As DenseRowProgram::evaluate(). Tangents that are 0 at compile time cost the term no instructions.
  __device__ __forceinline__ auto evaluate(const typename Base::Row& row, Number z, Number t, int64 c) const {
    Number log_p = row.softmax[0].log_p(z), second = t;
    if constexpr (Base::kTeacher) second = row.softmax[1].log_p(t);
    if constexpr (!kInputMoves) log_p.tangent = 0;
    if constexpr (!kTargetMoves) second.tangent = 0;
    return Base::evaluate_at(row, log_p, second, c);
  }
  __device__ __forceinline__ int64 step() const {
    return 1;
  }
  __device__ __forceinline__ int64 target_step() const {
    return 1;
  }

 private:
  template <bool kMoves, class Storage>
  static __device__ __forceinline__ auto with_tangent(const Storage* values, int64 step, const Storage* tangents,
                                                      int64 offset, int64 tangent_step) {
    if constexpr (kMoves) {
      return PointerWithTangent<Storage>{values, tangents + offset, step, tangent_step};
    } else {
      return PointerWithoutTangent<Storage>{values, step};
    }
  }
};
