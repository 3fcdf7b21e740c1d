// Loss of one row with a class index y, and the coefficients of its gradient, from sums over the row's logits x.
//
//   z_c = scale x_c                              or, capped,  softcap tanh(scale x_c / softcap)
//   p_c = exp(z_c - m) / S                       m = max of z,  S = sum of exp(z_c - m)
//   nll = -log p_y,  complement = 1 - p_y,  lse = m + log S,  smooth = -(1 / C) sum of w_c log p_c
//
// The definition of a loss is an expression in nll, complement, lse and smooth. Let F_nll ... be its partial
// derivatives, and W = (1 / C) sum of w_c. Then
//
//   dL/dz_c = A p_c - (F_smooth / C) w_c         A = F_nll + F_complement p_y + F_lse + F_smooth W,   c != y
//   dL/dz_y = -(F_nll + F_complement p_y) complement + F_lse p_y + F_smooth (W p_y - w_y / C)
//
// 1. Logit maps x to z.
// 2. RowSums accumulates the exponentials without the target's (online_softmax.cuh), and the sums for smoothed labels.
// 3. row_result evaluates the loss on dual numbers, and returns four GradCoeffs, from which any thread can write its
//    part of the gradient.
//
// Excluding the target keeps confident rows exact. The sum of the other exponentials is S (1 - p_y), and if the target
// has the largest logit, nll is log1p of that sum. Computed as 1 - p_y, the complement would round to 0; all other
// implementations that we looked at had this bug.
//
// Every thread of a group calls row_result with the same sums and gets the same bits.
//
// Traffic: none to memory, all values are in registers. Preconditions: stated at each function.
#pragma once
#include "core/dual.cuh"
#include "softmax/online_softmax.cuh"

template <class X, class Y>
constexpr bool kSameType = false;
template <class X>
constexpr bool kSameType<X, X> = true;

__device__ __forceinline__ float with_sign_of(float size, float x) {
  return copysignf(size, x);
}
__device__ __forceinline__ double with_sign_of(double size, double x) {
  return copysign(size, x);
}

template <class Compute>
__device__ __forceinline__ Compute scaled_logit(Compute scale, Compute x) {
  return scale * x;
}

// z as a function of x. Preconditions: scale > 0 and softcap > 0, so z increases with x.
//
// Near 0 a capped logit is a polynomial in u = scale x / softcap, which needs no special function:
//
//   z = softcap tanh u                          dz/dx = scale (1 - tanh^2 u)
//
// Farther out it takes one exponential and one reciprocal, to compute r = 1 / (1 + exp(2 |u|)) in (0, 1/2]:
//
//   z = softcap (1 - 2 r) sign(x)               dz/dx = 4 scale r (1 - r)
//
// r, and with it the slope, stays accurate however far x exceeds the cap; tanh u is accurate near 0. With kNarrow an
// error of 2^-22 softcap is negligible, and exponentials are computed from z / softcap, which saves a multiplication.
// Double precision has no polynomial.
template <class Compute, bool kCapped_>
struct Logit {
  static constexpr bool kCapped = kCapped_;
  static constexpr bool kHasPolynomial = kSameType<Compute, float>;
  // True if capped logits are evaluated in units of the softcap, as z / softcap.
  static constexpr bool kUnitary = kHasPolynomial && kNarrow;
  Compute scale;
  Compute softcap;
  Compute ratio;  // 2 scale / softcap
  Compute reach;  // largest |x| for which the polynomial is valid

  __device__ __forceinline__ Logit(double scale, double softcap)
      : scale(static_cast<Compute>(scale)),
        softcap(static_cast<Compute>(softcap)),
        ratio(kCapped ? static_cast<Compute>(2.0 * scale / softcap) : Compute(0)),
        reach(kCapped ? static_cast<Compute>(0.5 * softcap / scale) : Compute(0)) {
  }

  __device__ __forceinline__ Compute value(Compute x) const {
    if constexpr (kCapped) {
      Compute z, slope;
      evaluate(x, z, slope);
      return z;
    }
    return scaled_logit(scale, x);
  }
  // exp(value(x) - max_logit). Precondition: value(x) <= max_logit.
  __device__ __forceinline__ Compute exponential(Compute x, Compute max_logit) const {
    if constexpr (kCapped) return exponential_of(value(x), max_logit);
    // One fma, which is two instructions fewer. The rounding error of the product with max_logit is the same for all
    // classes.
    if constexpr (kNarrow && kSingle<Compute>) return exp2_ftz(fmaf(x, scale * kLog2E, -max_logit * kLog2E));
    return exp_nonpositive(scalar_fma(x, scale, -max_logit));
  }
  // Sets relative[i] = value(x[i]) - max_logit. With kNarrow this is one fma each, unless logits are capped.
  template <int kCount>
  __device__ __forceinline__ void relative_values(const Compute (&x)[kCount], Compute max_logit,
                                                  Compute (&relative)[kCount]) const {
    if constexpr (kNarrow && kSingle<Compute> && !kCapped) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) relative[i] = scalar_fma(x[i], scale, -max_logit);
    } else {
      values_of(x, relative);
#pragma unroll
      for (int i = 0; i < kCount; ++i) relative[i] -= max_logit;
    }
  }
  // exp(z - max_logit), given z = value(x).
  __device__ __forceinline__ Compute exponential_of(Compute z, Compute max_logit) const {
    if constexpr (kNarrow && kSingle<Compute>) return exp2_ftz(fmaf(z, kLog2E, -max_logit * kLog2E));
    // Capped logits are finite.
    if constexpr (kCapped && kSameType<Compute, float>) return exp_finite(z - max_logit);
    return exp_nonpositive(z - max_logit);
  }
  // dz/dx = common_slope() * slope(x). The first factor is the same for all logits.
  __device__ __forceinline__ Compute common_slope() const {
    return scale;
  }
  __device__ __forceinline__ Compute slope(Compute x) const {
    if constexpr (kCapped) {
      Compute z, slope;
      evaluate(x, z, slope);
      return slope;
    }
    return Compute(1);
  }
  // Computes power = exp(z - max_logit), z = value(x) and slope = slope(x). kNear: as in evaluate().
  template <bool kNear = false>
  __device__ __forceinline__ void exponential_value_slope(Compute x, Compute max_logit, Compute& power, Compute& z,
                                                          Compute& slope) const {
    if constexpr (kCapped) {
      Compute y;
      evaluate_unit<kNear>(x, y, slope);
      power = exponential_of_unit(y, max_logit);
      z = of_unit(y);
    } else {
      power = exponential(x, max_logit);
      z = scale * x;
      slope = Compute(1);
    }
  }
  // Overload for several logits. Results have the same bits as one logit at a time.
  template <int kCount>
  __device__ __forceinline__ void exponential_value_slope(const Compute (&x)[kCount],
                                                          const Compute (&max_logits)[kCount],
                                                          Compute (&powers)[kCount], Compute (&z)[kCount],
                                                          Compute (&slopes)[kCount]) const {
    Compute y[kCount];
    if constexpr (kCapped) evaluate_units(x, y, slopes);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kCapped) {
        powers[i] = exponential_of_unit(y[i], max_logits[i]);
        z[i] = of_unit(y[i]);
      } else {
        exponential_value_slope(x[i], max_logits[i], powers[i], z[i], slopes[i]);
      }
    }
  }
  // Overload for several logits of one row, which share max_logit.
  template <int kCount>
  __device__ __forceinline__ void exponential_value_slope(const Compute (&x)[kCount], Compute max_logit,
                                                          Compute (&powers)[kCount], Compute (&z)[kCount],
                                                          Compute (&slopes)[kCount]) const {
    Compute max_logits[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) max_logits[i] = max_logit;
    exponential_value_slope(x, max_logits, powers, z, slopes);
  }
  // True if the polynomial covers all logits, whose largest magnitude is `largest`; NaN counts as near. Always false
  // without a cap, and without a polynomial.
  __device__ __forceinline__ bool is_near(Compute largest) const {
    return kCapped && kHasPolynomial && !(largest > reach);
  }
  // Computes value and slope of a capped logit. kNear: the caller knows that x is near (is_near). Otherwise both
  // formulas are evaluated and one result is selected, without a branch: threads evaluate many logits side by side, and
  // a branch for each made rows in registers five times slower.
  template <bool kNear = false>
  __device__ __forceinline__ void evaluate(Compute x, Compute& value, Compute& slope) const {
    evaluate_unit<kNear>(x, value, slope);
    value = of_unit(value);
  }
  // Overload for several logits. Results have the same bits as one logit at a time. Usually all logits are near, and
  // only the polynomial is evaluated.
  template <int kCount>
  __device__ __forceinline__ void evaluate(const Compute (&x)[kCount], Compute (&values)[kCount],
                                           Compute (&slopes)[kCount]) const {
    evaluate_units(x, values, slopes);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = of_unit(values[i]);
  }
  // Computes values and slopes, with or without a cap.
  template <int kCount>
  __device__ __forceinline__ void values_and_slopes(const Compute (&x)[kCount], Compute (&values)[kCount],
                                                    Compute (&slopes)[kCount]) const {
    if constexpr (kCapped) {
      evaluate(x, values, slopes);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        values[i] = scaled_logit(scale, x[i]);
        slopes[i] = Compute(1);
      }
    }
  }
  // Sets y to the capped logits, or without a cap to x, which is not yet multiplied by the scale.
  template <int kCount>
  __device__ __forceinline__ void unscaled_of(const Compute (&x)[kCount], Compute (&y)[kCount]) const {
    if constexpr (kCapped) {
      values_of(x, y);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) y[i] = x[i];
    }
  }
  template <int kCount>
  __device__ __forceinline__ void unscaled_and_slopes(const Compute (&x)[kCount], Compute (&y)[kCount],
                                                      Compute (&slopes)[kCount]) const {
    values_and_slopes(x, y, slopes);
    if constexpr (!kCapped) unscaled_of(x, y);
  }
  // Computes values only.
  template <int kCount>
  __device__ __forceinline__ void values_of(const Compute (&x)[kCount], Compute (&values)[kCount]) const {
    if constexpr (kCapped) {
      Compute slopes[kCount];
      evaluate(x, values, slopes);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] = scaled_logit(scale, x[i]);
    }
  }

 private:
  // Return z and exp(z - max_logit), given y, which is z / softcap if kUnitary and z otherwise.
  __device__ __forceinline__ Compute of_unit(Compute y) const {
    return kUnitary ? softcap * y : y;
  }
  __device__ __forceinline__ Compute exponential_of_unit(Compute y, Compute max_logit) const {
    if constexpr (kUnitary) return exp2_ftz(fmaf(y, softcap * kLog2E, -max_logit * kLog2E));
    return exponential_of(y, max_logit);
  }
  template <bool kNear>
  __device__ __forceinline__ void evaluate_unit(Compute x, Compute& value, Compute& slope) const {
    if constexpr (kNear && kHasPolynomial) {
      evaluate_near(x, value, slope);
    } else {
      evaluate_far(x, value, slope);
      if constexpr (kHasPolynomial) {
        Compute near, near_slope;
        evaluate_near(x, near, near_slope);
        const bool is_far = scalar_abs(x) > reach;
        value = is_far ? value : near;
        slope = is_far ? slope : near_slope;
      }
    }
  }
  template <int kCount>
  __device__ __forceinline__ void evaluate_units(const Compute (&x)[kCount], Compute (&values)[kCount],
                                                 Compute (&slopes)[kCount]) const {
    if constexpr (kHasPolynomial && kCount > 1) {
      Compute largest = Compute(0);
#pragma unroll
      for (int i = 0; i < kCount; ++i) largest = max_ignoring_nan(largest, scalar_abs(x[i]));
      if (is_near(largest)) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) evaluate_unit<true>(x[i], values[i], slopes[i]);
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) evaluate_unit<false>(x[i], values[i], slopes[i]);
  }
  __device__ __forceinline__ void evaluate_near(float x, float& value, float& slope) const {
    float tanh;
    if (kNarrow) {
      // tanh u for |u| <= 1/2, to 2^-22.9.
      const float u = x * (0.5f * ratio), w = u * u;
      value = tanh = u * scalar_polynomial(w, 0.999997676f, -0.333206552f, 0.131451457f, -0.0433724837f);
    } else {
      // tanh u / u - 1 for |u| <= 1/2, accurate to a quarter of a unit in the last place of z before z is rounded.
      const float t = ratio * x, w = t * t, linear = scale * x, half = 0.5f * t;
      const float excess = scalar_polynomial(w, -0.083332859f, 0.0083286716f, -0.00082883064f, 0.0000673464892f);
      value = fmaf(linear * w, excess, linear);
      tanh = fmaf(half * w, excess, half);
    }
    slope = fmaf(-tanh, tanh, 1.0f);
  }
  __device__ __forceinline__ void evaluate_far(Compute x, Compute& value, Compute& slope) const {
    if constexpr (kSameType<Compute, float>) {
      float r;
      if (kNarrow) {
        r = reciprocal_ftz(1.0f + exp2_ftz(fabsf(x) * (ratio * kLog2E)));
      } else {
        const float e = exp_finite(-fminf(fabsf(ratio * x), 1000.0f)), one_and_e = 1.0f + e;
        const float inverse = reciprocal_ftz(one_and_e), rough = e * inverse;
        r = fmaf(fmaf(-rough, one_and_e, e), inverse, rough);
      }
      const float size = kUnitary ? 1.0f : softcap, r4 = 4.0f * r;
      value = with_sign_of(fmaf(r, -2.0f * size, size), x);
      slope = fmaf(-r4, r, r4);
    } else {
      const Compute t = scalar_abs(ratio * x), e = scalar_exp(-t);
      const Compute inverse = scalar_divide_closely(Compute(1), Compute(1) + e);
      const Compute tanh = scalar_divide_closely(kNarrow ? Compute(1) - e : scalar_complement(t, e), Compute(1) + e);
      value = with_sign_of(softcap * tanh, x);
      slope = Compute(4) * (e * inverse * inverse);
    }
  }
};

// Sums over some classes of a row: the online softmax without the target and, for smoothed labels, the sums of w_c (z_y
// - z_c) and of w_c.
template <class Compute, bool kSmoothed>
struct RowSums {
  OnlineSoftmax<Compute, ExcludeTarget> softmax;
  Compute weighted_gap;
  Compute weight_sum;

  static __device__ __forceinline__ RowSums empty() {
    return {{-scalar_infinity(Compute()), Compute(0)}, Compute(0), Compute(0)};
  }
};

// Combines the sums of two disjoint sets of classes of a row: adds `other` to `sums`.
template <class Compute, bool kSmoothed>
__device__ __forceinline__ void combine(RowSums<Compute, kSmoothed>& sums, const RowSums<Compute, kSmoothed>& other) {
  combine(sums.softmax, other.softmax);
  if constexpr (kSmoothed) {
    sums.weighted_gap += other.weighted_gap;
    sums.weight_sum += other.weight_sum;
  }
}

// Adds the sums for smoothed labels of `width` neighbouring lanes; each of these lanes gets the result. Preconditions:
// those of subwarp_reduce.
template <class Compute, bool kSmoothed>
__device__ __forceinline__ void subwarp_add_smoothing(RowSums<Compute, kSmoothed>& sums, int width) {
  if constexpr (kSmoothed) {
    sums.weighted_gap = subwarp_reduce(sums.weighted_gap, width, AddOp{});
    sums.weight_sum = subwarp_reduce(sums.weight_sum, width, AddOp{});
  }
}

// Combines the sums of `width` neighbouring lanes; each of these lanes gets the result. Preconditions: those of
// subwarp_reduce.
template <class Compute, bool kSmoothed>
__device__ __forceinline__ void subwarp_combine(RowSums<Compute, kSmoothed>& sums, int width) {
  subwarp_combine(sums.softmax, width);
  subwarp_add_smoothing(sums, width);
}

// Variant of subwarp_combine for lanes that already share one max_logit: nothing is rescaled.
template <class Compute, bool kSmoothed>
__device__ __forceinline__ void subwarp_add(RowSums<Compute, kSmoothed>& sums, int width) {
  sums.softmax.exp_sum = subwarp_reduce(sums.softmax.exp_sum, width, AddOp{});
  subwarp_add_smoothing(sums, width);
}

// Adds the sums of all threads that share a row; each of them gets the result. Preconditions: those of row_reduce, and
// the threads already share one max_logit.
template <class Group, class Compute, bool kSmoothed>
__device__ __forceinline__ void row_add(const Group& group, RowSums<Compute, kSmoothed>& sums) {
  if constexpr (kSmoothed) {
    Compute x[] = {sums.softmax.exp_sum, sums.weighted_gap, sums.weight_sum};
    row_reduce(group, x, AddOp{});
    sums.softmax.exp_sum = x[0];
    sums.weighted_gap = x[1];
    sums.weight_sum = x[2];
  } else {
    Compute x[] = {sums.softmax.exp_sum};
    row_reduce(group, x, AddOp{});
    sums.softmax.exp_sum = x[0];
  }
}

// dL/dx_c = common_slope() slope(x_c) (exp_coeff exp(z_c - max_logit) - weight_coeff w_c); at the target, `target`
// replaces the bracket. All coefficients are 0 for an inactive row, whatever its logits hold.
template <class Compute>
struct GradCoeffs {
  Compute exp_coeff;
  Compute weight_coeff;
  Compute target;
  Compute max_logit;

  static __device__ __forceinline__ GradCoeffs all(Compute x) {
    return {x, x, x, x};
  }
  __device__ __forceinline__ bool all_zero() const {
    return is_zero(exp_coeff) && is_zero(weight_coeff) && is_zero(target);
  }
};

template <class Compute>
struct RowResult {
  Compute value;
  Compute lse;
  GradCoeffs<Compute> grad_coeffs;
};

// Computes the loss of a row and the coefficients of its gradient, given z = z_y and the sums. If the loss is NaN, all
// coefficients are NaN; without kMarksLost the caller has to set them so.
template <bool kSmoothed, bool kMarksLost = true, class Loss, class Compute>
__device__ __forceinline__ RowResult<Compute> row_result(const Loss& loss, Compute z,
                                                         const RowSums<Compute, kSmoothed>& sums, Compute weight,
                                                         int64 classes) {
  const Compute max_logit = sums.softmax.max_logit, exp_sum = sums.softmax.exp_sum;
  const Compute e = exp_of_difference(z - max_logit);
  const Compute sum = exp_sum + e;
  // The largest logit contributes 1 to the sum: in `e` if it is the target's, otherwise in exp_sum. An e of 1 may still
  // have a tangent, so e - 1 is not replaced by 0.
  const bool leads = e == Compute(1);
  const Compute log_sum =
      scalar_log1p_of_positive((leads ? exp_sum : exp_sum - Compute(1)) + (leads ? e - Compute(1) : e));
  const Compute nll = (max_logit - z) + log_sum;
  // One division instead of four, because every warp of a block evaluates each row. The sum is at least 1, or NaN.
  const Compute inv_sum = scalar_divide_closely(Compute(1), sum),
                inv_count = kSmoothed ? Compute(1) / static_cast<Compute>(classes) : Compute(0);
  const Compute complement = exp_sum * inv_sum, p = e * inv_sum, lse = max_logit + log_sum;
  const Compute mean_weight = kSmoothed ? sums.weight_sum * inv_count : Compute(0);
  Compute smooth = Compute(0);
  if constexpr (kSmoothed) {
    // If the target has probability 0, the smoothing term is infinite too.
    smooth = nll == scalar_infinity(nll) ? nll : mean_weight * nll + sums.weighted_gap * inv_count;
  }
  constexpr unsigned kAll = kSmoothed ? 15u : 7u;
  const auto y = loss(variable<kAll, 0>(nll), variable<kAll, 1>(complement), variable<kAll, 2>(lse),
                      variable<kAll, 3>(smooth), variable<0u, 4>(weight));
  const bool lost = kMarksLost && y.value != y.value;
  const Compute value = lost ? nan_result(y.value) : y.value;
  // Terms of derivatives that the loss does not have are omitted: compilers would keep a product with 0, because it
  // could be NaN.
  constexpr unsigned kMask = decltype(y)::kMask;
  Compute target_grad = tangent_or_zero(y, 0), shared_grad = tangent_or_zero(y, 2);
  const Compute smooth_grad = tangent_or_zero(y, 3);
  if constexpr (has<kMask>(1)) target_grad = target_grad + tangent_or_zero(y, 1) * p;
  if constexpr (has<kMask>(3)) shared_grad = shared_grad + smooth_grad * mean_weight;
  const Compute weight_coeff = kSmoothed ? smooth_grad * inv_count : Compute(0);
  Compute all_grads = target_grad, at_target = -target_grad * complement;
  if constexpr (has<kMask>(2) || has<kMask>(3)) {
    all_grads = target_grad + shared_grad;
    at_target = p * shared_grad - target_grad * complement;
  }
  if constexpr (kSmoothed) at_target = at_target - weight_coeff * weight;
  RowResult<Compute> result;
  result.value = value;
  result.lse = lse;
  result.grad_coeffs.exp_coeff = lost ? value : all_grads * inv_sum;
  result.grad_coeffs.weight_coeff = weight_coeff;
  result.grad_coeffs.target = lost ? value : at_target;
  result.grad_coeffs.max_logit = lost ? value : max_logit;
  return result;
}
