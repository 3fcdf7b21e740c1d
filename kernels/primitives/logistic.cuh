// Losses of binary decisions, and their building blocks: the logistic function and its logarithm.
#pragma once
#include "primitives/math.cuh"

// log(1 + e) for 0 <= e <= 1. In float a polynomial, to 2^-27 before rounding: less than half of log1pf's arithmetic.
__device__ __forceinline__ float scalar_log1p_of_fraction(float e) {
  if (kNarrow) {
    const float excess = scalar_polynomial(e, -0.499539465f, 0.326226056f, -0.212404132f, 0.103592552f, -0.0247345064f);
    return scalar_fma(e * e, excess, e);
  }
  const float excess = scalar_polynomial(e, -0.499999315f, 0.333304644f, -0.249580204f, 0.196921214f, -0.153449774f,
                                         0.106613711f, -0.0574604832f, 0.0200884603f, -0.00329107419f);
  return scalar_fma(e * e, excess, e);
}
__device__ __forceinline__ double scalar_log1p_of_fraction(double e) {
  return log1p(e);
}

template <class T>
struct Logs {
  T success;  // -log p
  T failure;  // -log(1 - p)
};

// -log(1 - p) - p for 0 <= p <= 1/2.
__device__ __forceinline__ float scalar_log_beyond_linear(float p) {
  if (kNarrow) {
    return p * p *
           scalar_polynomial(p, 0.499994487f, 0.334105581f, 0.232870683f, 0.334603935f, -0.28428486f, 0.744241774f);
  }
  const float excess = scalar_polynomial(p, 0.500000894f, 0.333263248f, 0.251868635f, 0.175874531f, 0.34006843f,
                                         -0.592270017f, 1.97093475f, -2.47645473f, 1.74344373f);
  return p * p * excess;
}
// It is 2 atanh(t) - p with t = p / (2 - p), and 2 t - p = p t, so nothing cancels.
__device__ __forceinline__ double scalar_log_beyond_linear(double p) {
  const double t = p / (2.0 - p);
  const double w = t * t;
  return fma(2.0 * t * w, scalar_atanh_tail(w), p * t);
}

// min(x, 100), but NaN for NaN, for which `min` would return 100.
template <class T>
__device__ __forceinline__ T scalar_no_more_than_100(T x) {
  return x > T(100) ? T(100) : x;
}

// -log p and -log(1 - p), at most 100; NaN if p is not a probability. In float the smaller of p and 1 - p is exact, and
// both results follow from it. Its own logarithm is the GPU's fast one, which for arguments up to 1/2 is within 3.4
// units in the last place; the other logarithm is small, and a polynomial.
__device__ __forceinline__ Logs<float> scalar_minus_logs(float p) {
  const bool low = p < 0.5f;
  const float small = low ? p : 1.0f - p;
  const float of_small = scalar_no_more_than_100(-__logf(small));
  const float of_large = small + scalar_log_beyond_linear(small);
  return {low ? of_small : of_large, low ? of_large : of_small};
}
__device__ __forceinline__ Logs<double> scalar_minus_logs(double p) {
  return {scalar_no_more_than_100(-log(p)), scalar_no_more_than_100(-log1p(-p))};
}

// Terms that softplus and sigmoid of x and -x share, from one exponential.
template <class T>
struct Logistic {
  T excess;   // log(1 + e^-|x|), by which softplus(x) exceeds max(x, 0)
  T larger;   // the larger of sigmoid(x) and sigmoid(-x)
  T smaller;  // the smaller; not computed as 1 - larger, which would cancel
};

template <class T>
__device__ __forceinline__ Logistic<T> scalar_logistic(T x) {
  const T e = scalar_exp(-scalar_abs(x));
  const T larger = scalar_divide_roughly(T(1), T(1) + e);
  return {scalar_log1p_of_fraction(e), larger, e * larger};
}

// log(1 + e^x), without overflow or loss of digits. Where the derivative is 0, the tangent is 0 whatever x depends on.
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> softplus(const Dual<T, kMask>& x) {
  const Logistic<T> at = scalar_logistic(x.value);
  const T partial = x.value < T(0) ? at.smaller : at.larger;
  Dual<T, kMask> y = chain(x, (x.value > T(0) ? x.value : T(0)) + at.excess, partial);
  for_each_slot<kMask>([&](int k) {
    if (partial == T(0)) y.tangent[k] = T(0);
  });
  return y;
}

// (1 - y) softplus(x) + w y softplus(-x) for finite w. No term cancels, neither in the value nor in a derivative. An
// infinite x with the factor 0 contributes nothing, with derivatives 0.
template <class T, unsigned kX, unsigned kY, class W>
__device__ __forceinline__ auto log_loss_of_logit(const Dual<T, kX>& x, const Dual<T, kY>& y, const W& weight) {
  const auto w = lift<T>(weight);
  const Logistic<T> at = scalar_logistic(x.value);
  const T size = scalar_abs(x.value);
  const T not_y = T(1) - y.value;
  const bool negative = x.value < T(0);
  if constexpr (((kX | kY) & kTentative) != 0) {
    const T p = negative ? at.smaller : at.larger, not_p = negative ? at.larger : at.smaller;
    const T above = scalar_above_zero(x.value), below = scalar_below_zero(x.value);
    const T falling = w.value * y.value;
    const T value = scalar_fma(not_y + falling, at.excess, scalar_fma(not_y, above, falling * below));
    return chain(x, y, w, value, scalar_fma(not_y, p, -(falling * not_p)),
                 scalar_fma(w.value - T(1), at.excess, scalar_fma(w.value, below, -above)),
                 y.value * (at.excess + below));
  }
  const T label = negative ? y.value : not_y;
  const T factor = negative ? w.value : T(1);
  const bool nothing = label == T(0) || factor == T(0);
  const T linear = nothing ? T(0) : factor * (label * size);
  // 0 * w makes the value NaN for an infinite w, whose product with 0 is undefined.
  const T value = scalar_fma(scalar_fma(w.value, y.value, not_y), at.excess, linear) + T(0) * w.value;
  const T falling = w.value * y.value;
  const T partial = scalar_fma(negative ? falling : not_y, at.larger, -((negative ? not_y : falling) * at.smaller));
  const bool free = nothing && size > scalar_max(T());
  const T by_label = free ? T(0) : (negative ? w.value * size : -size);
  const T against = at.excess + (negative && !free ? size : T(0));
  return chain(x, y, w, value, constant_if(free, negative ? -partial : partial),
               scalar_fma(w.value - T(1), at.excess, by_label), y.value * against);
}

// log((1 - p) / p), given excess = 1 - 2 p and the difference of the two logarithms, which cancel around p = 1/2. There
// 1 - 2 p is exact.
template <class T>
__device__ __forceinline__ T scalar_log_odds_against(T p, T excess, T difference) {
  if constexpr (kNarrow) {
    const T w = excess * excess, twice = excess + excess;
    const T near = scalar_fma(twice * w, scalar_atanh_tail(w), twice);
    return select_computed(scalar_abs(excess) < T(0.33), near, difference);
  } else {
    return scalar_abs(excess) < T(0.5) ? scalar_log1p(excess / p) : difference;
  }
}

// -(y log p + (1 - y) log(1 - p)) with logarithms of at least -100; NaN if p or y is not a probability. In derivatives
// 1 / p and 1 / (1 - p) are at most 10^12, also where the logarithm is cut off, so 0 * inf does not arise.
template <class T, unsigned kP, unsigned kY>
__device__ __forceinline__ Dual<T, kP | kY> log_loss(const Dual<T, kP>& p, const Dual<T, kY>& y) {
  const T not_p = T(1) - p.value;
  const T not_y = T(1) - y.value;
  const bool valid = y.value * not_y >= T(0);
  const Logs<T> logs = scalar_minus_logs(p.value);
  const T value = scalar_fma(y.value, logs.success, not_y * logs.failure);
  const T per_p = min(scalar_divide_roughly(T(1), p.value), T(1e12));
  const T per_not_p = min(scalar_divide_roughly(T(1), not_p), T(1e12));
  const T odds = scalar_log_odds_against(p.value, not_p - p.value, logs.success - logs.failure);
  return chain(p, y, valid ? value : scalar_nan(T()), scalar_fma(not_y, per_not_p, -(y.value * per_p)), odds);
}
