// What a softmax loss of class indices knows of a row of logits x, and the gradient that follows from it.
//
//   z_c = scale x_c                              or, capped,  softcap tanh(scale x_c / softcap)
//   p_c = exp(z_c - m) / S                       m the largest z, S = sum of exp(z_c - m)
//   nll = -log p_y,  rest = 1 - p_y,  lse = m + log S,  smooth = -(1 / C) sum of w_c log p_c
//
// The loss of a row is an expression in these four. With F_nll ... its derivatives and W = (1 / C) sum of w_c,
//
//   dL/dz_c = A p_c - (F_smooth / C) w_c         A = F_nll + F_rest p_y + F_lse + F_smooth W,   c != y
//   dL/dz_y = -(F_nll + F_rest p_y) rest + F_lse p_y + F_smooth (W p_y - w_y / C)
//
// The exponentials are added without that of the target: `rest` is their share, not 1 - p_y, and nll of the largest
// logit is log1p of their sum. A confident row keeps its loss and its gradient so, where 1 - p_y would be 0; this was
// the bug of every implementation that we looked at.
#pragma once
#include "core/dual.cuh"

constexpr float kLog2E = 1.44269504f;

__device__ __forceinline__ float with_sign_of(float size, float x) {
  return copysignf(size, x);
}
__device__ __forceinline__ double with_sign_of(double size, double x) {
  return copysign(size, x);
}

// exp(x) of an x that is not above 0. In half the instructions of expf: what rounding x / log 2 leaves out is put right
// behind the power, and not in front of it. Below -1000, where the power is 0, it would be infinite.
__device__ __forceinline__ float exponential_below(float x) {
  constexpr float kLn2 = 0.693147181f;
  x = larger_or_nan(x, -1000.0f);
  const float power = x * kLog2E, e = exp2_or_zero(power);
  return fmaf(e, fmaf(-power, kLn2, x), e);
}
template <class T>
__device__ __forceinline__ T exponential_below(T x) {
  return scalar_exp(x);
}

// z as a function of x, and it rises with x: scale and softcap are above 0.
template <class Compute, bool kCapped_>
struct Logit {
  static constexpr bool kCapped = kCapped_;
  Compute scale;
  Compute softcap;
  Compute ratio;  // 2 scale / softcap

  __device__ __forceinline__ Logit(double scale, double softcap)
      : scale(static_cast<Compute>(scale)),
        softcap(static_cast<Compute>(softcap)),
        ratio(kCapped ? static_cast<Compute>(2.0 * scale / softcap) : Compute(0)) {
  }

  __device__ __forceinline__ Compute value(Compute x) const {
    if constexpr (kCapped) {
      const Compute twice = scalar_abs(ratio * x);
      return capped(x, twice, scalar_exp(-twice));
    }
    return scale * x;
  }
  // exp(value(x) - largest). Precondition: value(x) is no larger.
  __device__ __forceinline__ Compute exponential(Compute x, Compute largest) const {
    if constexpr (kCapped) return exponential_of(value(x), largest);
    // One rounding less, and two instructions: what `largest` loses in the product is the same for all classes.
    if constexpr (kNarrow && kSingle<Compute>) return exp2_or_zero(fmaf(x, scale * kLog2E, -largest * kLog2E));
    return exponential_below(scalar_fma(x, scale, -largest));
  }
  // The same of z = value(x), where that is known.
  __device__ __forceinline__ Compute exponential_of(Compute z, Compute largest) const {
    if constexpr (kNarrow && kSingle<Compute>) return exp2_or_zero(fmaf(z, kLog2E, -largest * kLog2E));
    return exponential_below(z - largest);
  }
  // dz/dx, but for the factor that is the same everywhere.
  __device__ __forceinline__ Compute common_slope() const {
    return scale;
  }
  __device__ __forceinline__ Compute slope(Compute x) const {
    if constexpr (kCapped) return slope_of(scalar_exp(-scalar_abs(ratio * x)));
    return Compute(1);
  }
  // Both, of a logit that is capped.
  __device__ __forceinline__ void evaluate(Compute x, Compute& value, Compute& slope) const {
    const Compute twice = scalar_abs(ratio * x), e = scalar_exp(-twice);
    value = capped(x, twice, e);
    slope = slope_of(e);
  }

 private:
  // softcap tanh(scale x / softcap), of which e = exp(-twice) is known.
  __device__ __forceinline__ Compute capped(Compute x, Compute twice, Compute e) const {
    // In 16 bits an error of 2^-24 of the softcap is none, whatever cancels.
    const Compute tanh = scalar_divide_closely(kNarrow ? Compute(1) - e : scalar_complement(twice, e), Compute(1) + e);
    return with_sign_of(softcap * tanh, x);
  }
  __device__ __forceinline__ Compute slope_of(Compute e) const {
    const Compute inverse = scalar_divide_closely(Compute(1), Compute(1) + e);
    return Compute(4) * e * inverse * inverse;
  }
};

// Sums over the classes of a row: of the exponentials but the target's, and where labels are smoothed of
// w_c (z_y - z_c) and of w_c.
template <class Compute>
struct RowSums {
  Compute rest;
  Compute distance;
  Compute weights;
};

// The sums of some classes of a row, and the largest z among them, or a larger one, that they are relative to.
template <class Compute>
struct RowPart {
  Compute largest;
  RowSums<Compute> sums;
};

// What exponentials are relative to, where all logits so far are -inf: their sum is 0 then, not NaN.
template <class Compute>
__device__ __forceinline__ Compute reference(Compute largest) {
  return largest == -scalar_infinity(largest) ? Compute(0) : largest;
}

// The part, relative to another z that is no smaller.
template <class Compute>
__device__ __forceinline__ void relate(RowPart<Compute>& part, Compute largest) {
  // A part without logits above -inf has nothing to relate, and exp(0 - largest) could be infinite.
  const Compute factor = part.largest == -scalar_infinity(largest) ? Compute(1) : scalar_exp(part.largest - largest);
  part.sums.rest *= factor;
  part.largest = largest;
}

// The gradient of a row: common_slope() slope(x_c) * (common exp(z_c - largest) - weighted w_c), and `target` in place
// of the bracket at the target. All of them are 0 where a row does not count, whatever its logits are.
template <class Compute>
struct RowSlopes {
  Compute common;
  Compute weighted;
  Compute target;
  Compute largest;

  __device__ __forceinline__ bool none() const {
    return vanishes(common) && vanishes(weighted) && vanishes(target);
  }
};

template <class Compute>
struct RowLoss {
  Compute value;
  Compute lse;
  RowSlopes<Compute> slopes;
};

// The loss of a row and its slopes, from z_y, the largest z, and the sums.
template <bool kSmoothed, class Loss, class Compute>
__device__ __forceinline__ RowLoss<Compute> row_loss(const Loss& loss, Compute z, Compute largest,
                                                     const RowSums<Compute>& sums, Compute weight, int64 classes) {
  const Compute e = scalar_exp(z - largest);
  const Compute sum = sums.rest + e;
  // The largest logit adds 1 to the sum, in `e` if it is the target's and in `rest` if not. An e of 1 may move.
  const bool leads = e == Compute(1);
  const Compute log_sum = scalar_log1p((leads ? sums.rest : sums.rest - Compute(1)) + (leads ? e - Compute(1) : e));
  const Compute nll = (largest - z) + log_sum;
  // One division instead of four: every warp of a block does this for each row.
  const Compute by_sum = Compute(1) / sum,
                by_count = kSmoothed ? Compute(1) / static_cast<Compute>(classes) : Compute(0);
  const Compute rest = sums.rest * by_sum, p = e * by_sum, lse = largest + log_sum;
  const Compute mean_weight = kSmoothed ? sums.weights * by_count : Compute(0);
  Compute smooth = Compute(0);
  if constexpr (kSmoothed) {
    // A target of probability 0 is a class that is smoothed over.
    smooth = nll == scalar_infinity(nll) ? nll : mean_weight * nll + sums.distance * by_count;
  }
  constexpr unsigned kAll = kSmoothed ? 15u : 7u;
  const auto y = loss(variable<kAll, 0>(nll), variable<kAll, 1>(rest), variable<kAll, 2>(lse),
                      variable<kAll, 3>(smooth), variable<0u, 4>(weight));
  // A loss that is NaN has no gradient to follow.
  const bool lost = y.value != y.value;
  const Compute value = lost ? undefined(y.value) : y.value;
  const Compute by_target = tangent_or_zero(y, 0) + tangent_or_zero(y, 1) * p;
  const Compute by_lse = tangent_or_zero(y, 2), by_smooth = tangent_or_zero(y, 3);
  RowLoss<Compute> result;
  result.value = value;
  result.lse = lse;
  result.slopes.common = lost ? value : (by_target + by_lse + by_smooth * mean_weight) * by_sum;
  result.slopes.weighted = kSmoothed ? by_smooth * by_count : Compute(0);
  result.slopes.target =
      lost ? value : p * (by_lse + by_smooth * mean_weight) - by_target * rest - result.slopes.weighted * weight;
  result.slopes.largest = lost ? value : largest;
  return result;
}
