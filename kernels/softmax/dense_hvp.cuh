// Second derivatives for dense targets with respect to the logits only: tangents v of the logits, and the hvp of the
// logits' gradient. Results of dense_second_derivatives.cuh.
//
// If a term is affine in log p, its derivatives h_c depend only on the targets. With logits x, tangents v and targets
// (R, C), z = s x with the largest logit at class m, e_c = exp(z_c - z_m), u_c = v_c - v_m, S = sum of e_c,
// M = sum of e_c u_c / S and H = sum of h_c:
//
//   lse'   = s (v_m + M)
//   jvp    = s (sum of h_c u_c - H M) + r lse'                                 r = penalty'(lse)
//   hvp_c  = e_c (A u_c + B)          A = s K (r - H),  B = K r' - A M,        K = grad_output s / S
//
// u_m is 0, so nothing cancels at the largest logit either. If the derivatives of a term sum to 0
// (Program::kSkipsSums), no sum over the term is needed: the tangent of each derivative is evaluated on nested numbers,
// without targets.
//
// 1. add() adds e_c, e_c u_c, h_c and h_c u_c of a pack of classes to the sums of a thread.
// 2. coeffs() evaluates the sums of a row.
// 3. results() computes hvp_c of a pack from its exponentials, or with kSkipsSums from the term.
//
// register_dense_hvp.cuh applies this to rows in registers, dense_hvp_rows.cuh to rows in memory.
//
// A product of 0 and an infinite tangent is NaN at first: a pack whose results are NaN is evaluated again with
// scaled_tangent.
//
// Traffic: none except the class weights; others load the packs. Preconditions: Program::kAffine, or
// Program::kSkipsSums without Program::kValued; Program::kInputMoves without Program::kTargetMoves; no cap.
#pragma once
#include "softmax/dense_second_derivatives.cuh"
#include "softmax/lane_vectors.cuh"

// Neighbouring classes of a thread: logits x, tangents v, targets t and exponentials e.
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

// Below, `max` is the largest logit z_m with the tangent v_m.
template <class Program>
struct LogitHvp {
  static_assert(!Program::kCapped && Program::kInputMoves && !Program::kTargetMoves &&
                    (Program::kAffine || (Program::kSkipsSums && !Program::kValued)),
                "second derivatives by the logits of an affine term");
  using Number = typename Program::Compute;
  using T = decltype(Number().value);
  // True if the results of a row need no sum over its terms.
  static constexpr bool kSkipsSums = Program::kSkipsSums;
  static constexpr int kSums = kSkipsSums ? 2 : Program::kValued ? 4 : 3;

  const Program& program;
  typename Program::Row row;  // as passed to the term

  __device__ __forceinline__ explicit LogitHvp(const Program& program) : program(program) {
    row.classes = constant<Number>(static_cast<double>(program.space.classes));
  }

  // Sets the exponentials of a pack. They are 0 where all logits up to now are -inf.
  template <int kCount>
  __device__ __forceinline__ void set_exponentials(const MaxWithTangent<T>& max,
                                                   DenseHvpPack<Program, kCount>& pack) const {
    const T of_logit = program.logit.scale.value, shift = exp_shift(max.logit);
    T x[kCount];
    unpack(pack.x, x);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kNarrow && kSingle<T>) {
        pack.e[i] = exp2_ftz(fmaf(x[i], of_logit * kLog2E, -(shift * kLog2E)));
      } else {
        pack.e[i] = exp_nonpositive(scalar_fma(x[i], of_logit, -shift));
      }
    }
  }
  // Sets the exponentials of a pack that starts at class `first`, and adds its classes to `sums`.
  template <class Index, int kCount>
  __device__ __forceinline__ void add(Index first, const MaxWithTangent<T>& max, DenseHvpPack<Program, kCount>& pack,
                                      T (&sums)[kSums]) const {
    T u[kCount], t[kCount], changed = T(0);
    set_exponentials(max, pack);
    unpack(pack.v, u);
    if constexpr (!kSkipsSums) unpack(pack.t, t);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      u[i] -= max.tangent;
      sums[kExpSum] += pack.e[i];
      changed = scalar_fma(pack.e[i], u[i], changed);
      if constexpr (!kSkipsSums) {
        const auto y = program.evaluate_at(row, Number(0), Number(t[i], T(0)), first + i);
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
  // Returns the coefficients of a row from the sums over all its classes, and in `value` its jvp if kValued.
  __device__ __forceinline__ DenseHvpCoeffs<T> coeffs(const MaxWithTangent<T>& max, const T (&sums)[kSums], T factor,
                                                      T& value) const {
    const T of_logit = program.logit.scale.value, inverse = scalar_divide_closely(T(1), sums[kExpSum]);
    const T mean = sums[kChanged] * inverse, log_sum = scalar_log(sums[kExpSum]);
    // A row whose largest logit is infinite has no distribution: its results are NaN.
    const T no_distribution = max.logit - max.logit;
    if constexpr (kSkipsSums) {
      return {T(0), no_distribution, mean, log_sum, factor * of_logit};
    } else {
      const Number lse{max.logit + log_sum, of_logit * (max.tangent + mean)};
      const Number penalty_grad = tangent_or_zero(program.penalty(variable<1u, 0>(lse)), 0);
      if constexpr (Program::kValued) {
        value = scalar_fma(of_logit, scalar_fma(-sums[kGradLogP], mean, sums[kAlong]),
                           scaled_tangent(penalty_grad.value, lse.tangent));
      }
      const T common = factor * of_logit * inverse;
      const T coeff = common * (penalty_grad.value - sums[kGradLogP]) * of_logit;
      const T constant = scalar_fma(-coeff, mean, scaled_tangent(common, penalty_grad.tangent));
      return {coeff, constant + no_distribution, mean, log_sum, factor};
    }
  }
  // Returns the results of a pack that starts at class `first`. Precondition: its exponentials are set, or kSkipsSums.
  template <class Index, int kCount>
  __device__ __forceinline__ Pack<typename Program::InputStorage, kCount> results(
      Index first, const MaxWithTangent<T>& max, const DenseHvpCoeffs<T>& coeffs,
      const DenseHvpPack<Program, kCount>& pack) const {
    T u[kCount], g[kCount];
    unpack(pack.v, u);
#pragma unroll
    for (int i = 0; i < kCount; ++i) u[i] -= max.tangent;
    if constexpr (kSkipsSums) {
      of_term(first, max, coeffs, pack, u, g);
    } else {
      of_exponentials(coeffs, pack, u, g);
    }
    return NarrowPack<typename Program::InputStorage, kCount>::from(g);
  }

 private:
  // e_c (A u_c + B).
  template <int kCount>
  static __device__ __forceinline__ void of_exponentials(const DenseHvpCoeffs<T>& coeffs,
                                                         const DenseHvpPack<Program, kCount>& pack,
                                                         const T (&u)[kCount], T (&g)[kCount]) {
    T sum = T(0);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      g[i] = pack.e[i] * scalar_fma(u[i], coeffs.coeff, coeffs.constant);
      sum += g[i];
    }
    if (sum == sum) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      g[i] = scaled_tangent(pack.e[i], coeffs.constant) + scaled_tangent(coeffs.coeff, scaled_tangent(pack.e[i], u[i]));
    }
  }
  // The tangents of the derivatives of a term, times `factor`.
  template <class Index, int kCount>
  __device__ __forceinline__ void of_term(Index first, const MaxWithTangent<T>& max, const DenseHvpCoeffs<T>& coeffs,
                                          const DenseHvpPack<Program, kCount>& pack, const T (&u)[kCount],
                                          T (&g)[kCount]) const {
    const T of_logit = program.logit.scale.value;
    T x[kCount];
    unpack(pack.x, x);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const Number log_p{scalar_fma(x[i], of_logit, -max.logit) - coeffs.log_sum, of_logit * (u[i] - coeffs.mean)};
      const auto y = program.evaluate_at(row, log_p, Number(0), first + i);
      g[i] = scalar_fma(tangent_or_zero(y, 0).tangent, coeffs.factor, coeffs.constant);
    }
  }
};

// Stores the jvp of a row, if it is wanted; returns it, or 0 for an inactive row. Precondition: `first` is true in
// exactly one thread of the row.
template <class Program, class T>
__device__ __forceinline__ T store_jvp(const Program& program, const int64 (&offset)[kRowStreams], bool active,
                                       bool first, T value) {
  value = active ? value : T(0);
  if (Program::kValued && first) {
    program.values[offset[kResults]] = Narrow<typename Program::Result>::from(typename Program::Compute(T(0), value));
  }
  return value;
}
