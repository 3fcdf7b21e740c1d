// Losses of binary decisions, weighted by confidence: focal, asymmetric, poly1, generalized cross entropy. They are
// computed from the logit x and the label y, so that neither 1 - p nor a logarithm of p cancels. An infinite x takes
// its limit: no 0 * inf arises.
#pragma once
#include "primitives/logistic.cuh"

// A logit compared with a label, by the sign of the logit: x > 0 decides for 1.
template <class T>
struct Decision {
  Logistic<T> at;
  T size;         // |x|
  bool negative;  // x < 0
  T side;         // the sign of x
  T wrong;        // share of the label on the other side
  T right;        // share of the label on the side of the logit

  // y, negated if x is negative. This is one select; a product with `side` takes a select and a multiplication. But
  // until then `negative` occupies a predicate register, of which there are few.
  __device__ __forceinline__ T signed_as_logit(T y) const {
    return negative ? -y : y;
  }
};

template <class T>
__device__ __forceinline__ Decision<T> scalar_decision(T x, T y) {
  const bool negative = x < T(0);
  const T not_y = T(1) - y;
  return {scalar_logistic(x),      scalar_abs(x),        negative,
          negative ? T(-1) : T(1), negative ? y : not_y, negative ? not_y : y};
}

// A probability n / (1 + e), with the relative rounding error of the quotient: a power would multiply that error.
template <class T>
struct Fraction {
  T value;
  T relative_residual;
};

template <class T>
__device__ __forceinline__ Fraction<T> scalar_fraction(T n, T e) {
  const T sum = T(1) + e;
  const T inverse = scalar_divide_roughly(T(1), sum);
  const T value = n * inverse;
  if (kNarrow) return {value, T(0)};
  const T remainder = scalar_fma(-value, sum, n) - value * (e - (sum - T(1)));
  return {value, value > T(0) ? scalar_divide_roughly(remainder * inverse, value) : T(0)};
}

// A power as two factors that are multiplied one after the other: its product with another number is in range if the
// result is.
template <class T>
struct Power {
  T first;
  T second;
  __device__ __forceinline__ T times(T x) const {
    return x * first * second;
  }
};

// x^t for 0 <= x <= 1 and t >= 0. In float, significand and exponent of x have separate logarithms, and the exponential
// is taken of what remains after whole powers of two, so no digits are lost where x^t is small. Common exponents are
// products instead. All threads have the same t, so the branch is uniform.
__device__ __forceinline__ Power<float> scalar_power(float x, float t) {
  if (kNarrow) {
    // One factor is enough: if it underflows, so does its product with the loss, which is about as small. 0^0 is 1.
    if (t == 2.0f) return {x * x, 1.0f};
    return {select_computed(t == 0.0f, 1.0f, __powf(x, t)), 1.0f};
  }
  if (t == 0.0f) return {1.0f, 1.0f};
  if (t == 1.0f) return {x, 1.0f};
  if (t == 2.0f) return {x, x};
  if (t == 4.0f) {
    const float square = x * x;
    return {square, scalar_fma(2.0f, scalar_fma(x, x, -square), square)};
  }
  // Only rounding makes x exceed 1. The bits of a negative number or NaN must not be taken apart.
  if (!(x > 0.0f && x < 2.0f)) return {x * 0.0f, 0.0f};
  const int exponent = (__float_as_int(x) - 0x3f2aaaab) & ~0x7fffff;
  const float log = scalar_log1p_near_zero(__int_as_float(__float_as_int(x) - exponent) - 1.0f);
  const float power = static_cast<float>(exponent) * 0x1p-23f;
  const float n = rintf(t * scalar_fma(log, 1.44269504f, power));
  const float factor = expf(scalar_fma(scalar_fma(t, power, -n), 0.693147181f, t * log));
  if (n < -250.0f) return {0.0f, 0.0f};
  const float half = rintf(0.5f * n);
  return {factor * scalar_power_of_two(half), scalar_power_of_two(n - half)};
}
__device__ __forceinline__ Power<double> scalar_power(double x, double t) {
  if (t == 0.0) return {1.0, 1.0};
  const double power = pow(x, t);
  if (power > 1e-280) return {power, 1.0};
  const double root = pow(x, 0.5 * t);
  return {root, root};
}
template <class T>
__device__ __forceinline__ Power<T> scalar_power(const Fraction<T>& x, T t) {
  const Power<T> power = scalar_power(x.value, t);
  if (kNarrow) return power;
  return {scalar_fma(power.first, t * x.relative_residual, power.first), power.second};
}

// -log(1 - q), given q and 1 - q. The larger of the two may have rounded away digits of the smaller one.
__device__ __forceinline__ float scalar_minus_log_of_complement(float q, float complement) {
  return select_computed(q < 0.33f, -scalar_log1p_near_zero(-q), -scalar_log(complement));
}
__device__ __forceinline__ double scalar_minus_log_of_complement(double q, double complement) {
  return q < 0.5 ? -log1p(-q) : -log(complement);
}

// sigmoid(|x|) - sigmoid(-|x|) = tanh(|x| / 2)
template <class T>
__device__ __forceinline__ T scalar_confidence(const Decision<T>& d) {
  return scalar_complement(d.size, scalar_exp(-d.size)) * d.at.larger;
}

// `focal` for tentative evaluation and a gamma of 2. With s the sigmoid of |x|, the derivative of m with respect to |x|
// is (wrong - right) s (1 - s).
template <class T, unsigned kX, unsigned kY>
__device__ __forceinline__ Dual<T, kX | kY> tentative_focal(const Dual<T, kX>& x, const Dual<T, kY>& y,
                                                            const Decision<T>& d, T alpha, T complement) {
  const bool balanced = alpha >= T(0);
  const T of_yes = balanced ? alpha : T(1);
  const T of_no = balanced ? complement : T(1);
  const T factor = scalar_fma(of_yes, y.value, of_no * (T(1) - y.value));
  const T log_loss = scalar_fma(d.wrong, d.size, d.at.excess);
  const T miss = scalar_fma(d.right, d.at.smaller, d.wrong * d.at.larger);
  const T scaled = factor * miss;
  const T product = miss * log_loss;
  // The derivative of the log loss is wrong s - right (1 - s), and wrong + right = 1.
  const T rise = T(2) * (d.at.larger * d.at.smaller) * log_loss;
  const T bent = scalar_fma(d.wrong - d.right, rise, miss * (d.wrong - d.at.smaller));
  const T by_logit = d.side * (scaled * bent);
  const bool valid = d.wrong * d.right >= T(0);
  T by_label = T(0);
  if constexpr (kDifferentiated<kY>) {
    const T by_miss = scalar_fma(T(2) * scalar_confidence(d), scaled * log_loss, scaled * (miss * d.size));
    by_label = scalar_fma((of_yes - of_no) * miss, product, -d.side * by_miss);
  }
  return chain(x, y, valid ? scaled * product : scalar_nan(T()), by_logit, by_label);
}

// a m^gamma L, where L is the log loss of the logit x, m is the probability of a wrong decision, and
// a = alpha y + complement (1 - y), or 1 if alpha < 0; complement = 1 - alpha. NaN if y is not a probability. For an
// infinite x the derivative with respect to y is 0 by convention.
template <class T, unsigned kX, unsigned kY>
__device__ __forceinline__ Dual<T, kX | kY> focal(const Dual<T, kX>& x, const Dual<T, kY>& y, const Dual<T, 0>& alpha,
                                                  const Dual<T, 0>& complement, const Dual<T, 0>& gamma) {
  const Decision<T> d = scalar_decision(x.value, y.value);
  if constexpr (((kX | kY) & kTentative) != 0) return tentative_focal(x, y, d, alpha.value, complement.value);
  const bool balanced = alpha.value >= T(0);
  const T of_yes = balanced ? alpha.value : T(1);
  const T of_no = balanced ? complement.value : T(1);
  const T factor = scalar_fma(of_yes, y.value, of_no * (T(1) - y.value));
  const T log_loss = with_partials(scalar_fma(d.wrong, d.wrong == T(0) ? T(0) : d.size, d.at.excess), d.size, d.wrong,
                                   d.wrong, d.size, T(1), d.at.excess);
  const T e = scalar_exp(-d.size);
  const Fraction<T> miss = scalar_fraction(scalar_fma(d.right, e, d.wrong), e);
  const Power<T> power = scalar_power(miss, gamma.value);
  const bool possible = miss.value > T(0);
  T per_miss = T(0);
  if (kNarrow) {
    per_miss = select_computed(possible, scalar_divide_roughly(T(1), miss.value), T(0));
  } else if (possible) {
    per_miss = scalar_divide_roughly(T(1), miss.value);
  }
  const T change = d.at.larger * d.at.smaller * per_miss;
  const T slope = scalar_fma(d.wrong, d.at.larger, -(d.right * d.at.smaller));
  const T bent =
      select_computed(change == T(0), slope, scalar_fma(gamma.value * (d.wrong - d.right) * change, log_loss, slope));
  const bool infinite = d.size > scalar_max(T());
  const bool nothing = factor == T(0) || (infinite ? d.wrong : power.first) == T(0);
  const bool valid = d.wrong * d.right >= T(0);
  const T by_power = scalar_fma(gamma.value * scalar_confidence(d), power.times(factor * (log_loss * per_miss)),
                                power.times(factor * d.size));
  const T by_factor = (of_yes - of_no) * power.times(log_loss);
  const T value = nothing ? T(0) : (infinite ? d.size : factor * power.times(log_loss));
  const T by_logit = d.side * (factor * power.times(bent));
  return chain(x, y, valid ? value : scalar_nan(T()),
               constant_if(infinite, with_partials(nothing ? T(0) : by_logit, T(1), by_logit)),
               infinite ? T(0) : by_factor - d.side * by_power);
}

// complement^gamma nll, where nll = -log p and complement = 1 - p for the same p, with 0^0 = 1. For an infinite nll the
// derivative with respect to the complement is 0 by convention.
template <class T, unsigned kN, unsigned kR>
__device__ __forceinline__ Dual<T, kN | kR> focused(const Dual<T, kN>& nll, const Dual<T, kR>& complement,
                                                    const Dual<T, 0>& gamma) {
  // The usual case. The branch is uniform, because all rows have the same gamma.
  if (gamma.value == T(0)) return chain(nll, complement, nll.value, T(1), T(0));
  const Power<T> power = scalar_power(Fraction<T>{complement.value, T(0)}, gamma.value);
  const bool infinite = nll.value > scalar_max(T());
  // As the complement goes to 0, nll does so at the same rate.
  const T ratio = complement.value > T(0) ? scalar_divide_roughly(nll.value, complement.value) : T(1);
  return chain(nll, complement, power.times(nll.value), power.times(T(1)),
               infinite ? T(0) : gamma.value * power.times(ratio));
}

// -log p + epsilon (1 - p), where p is the probability of the label y; sum is 1 + epsilon. -log p enters as 1 - p plus
// the higher powers of 1 - p, so nothing cancels for an epsilon of -1. For an infinite x the derivative with respect to
// y is 0 by convention.
template <class T, unsigned kX, unsigned kY>
__device__ __forceinline__ Dual<T, kX | kY> poly1(const Dual<T, kX>& x, const Dual<T, kY>& y, const Dual<T, 0>& epsilon,
                                                  const Dual<T, 0>& sum) {
  const Decision<T> d = scalar_decision(x.value, y.value);
  if constexpr (((kX | kY) & kTentative) != 0) {
    const T smaller = d.at.smaller;
    const T of_right = scalar_fma(sum.value, smaller, scalar_log_beyond_linear(smaller));
    const T more = scalar_fma(epsilon.value, d.at.larger - smaller, d.size);
    const T slope = scalar_fma(d.wrong * d.at.larger, scalar_fma(epsilon.value, smaller, T(1)),
                               -(d.right * smaller * scalar_fma(-epsilon.value, smaller, sum.value)));
    T by_label = T(0);
    if constexpr (kDifferentiated<kY>) {
      by_label = -d.signed_as_logit(scalar_fma(epsilon.value, scalar_confidence(d), d.size));
    }
    return chain(x, y, scalar_fma(d.wrong, more, of_right), d.signed_as_logit(slope), by_label);
  }
  // For an epsilon of -1, where the two terms of the right label cancel, an error of one unit in the last place of
  // `smaller` counts threefold.
  const T e = scalar_exp(-d.size);
  const Fraction<T> fraction = scalar_fraction(e, e);
  const T smaller = kNarrow ? fraction.value : scalar_fma(fraction.value, fraction.relative_residual, fraction.value);
  const T of_right = scalar_fma(sum.value, smaller, scalar_log_beyond_linear(smaller));
  const T more = scalar_fma(epsilon.value, scalar_confidence(d), d.size);
  const T slope = scalar_fma(d.wrong * d.at.larger, scalar_fma(epsilon.value, smaller, T(1)),
                             -(d.right * smaller * scalar_fma(-epsilon.value, smaller, sum.value)));
  const bool infinite = d.size > scalar_max(T());
  return chain(x, y, scalar_fma(d.wrong, d.wrong == T(0) ? T(0) : more, of_right),
               constant_if(infinite, d.side * slope), infinite ? T(0) : -d.side * more);
}

// y (1 - p)^gamma_pos (-log p) + (1 - y) q^gamma_neg (-log(1 - q)) with p = sigmoid(x), q = max(p - clip, 0). An
// infinite logarithm whose factor, y or 1 - y, is 0 contributes nothing, with derivatives 0.
template <class T, unsigned kX, unsigned kY>
__device__ __forceinline__ Dual<T, kX | kY> asymmetric(const Dual<T, kX>& x, const Dual<T, kY>& y,
                                                       const Dual<T, 0>& gamma_neg, const Dual<T, 0>& gamma_pos,
                                                       const Dual<T, 0>& clip) {
  const Logistic<T> at = scalar_logistic(x.value);
  const bool negative = x.value < T(0);
  const T e = scalar_exp(-scalar_abs(x.value));
  const T not_y = T(1) - y.value;
  if constexpr (((kX | kY) & kTentative) != 0) {
    // For the default exponents and a clip that is not small. The derivative of q^4 L is q^3 p (1 - p) (4 L + q / m)
    // with m = 1 - q. A small q is known no better than the logarithm of m.
    const T p = negative ? at.smaller : at.larger, not_p = negative ? at.larger : at.smaller;
    const T q = max_ignoring_nan(p - clip.value, T(0));
    const T not_q = not_p + clip.value;
    const T log_hit = at.excess + scalar_below_zero(x.value);
    const T log_miss = -scalar_log(not_q);
    const T square = q * q;
    const T hit = not_p * log_hit, miss = square * square * log_miss;
    const T bent_hit = not_p * scalar_fma(p, log_hit, not_p);
    const T bent = scalar_fma(T(4), log_miss, q * scalar_divide_roughly(T(1), not_q));
    const T bent_miss = square * q * (at.larger * at.smaller) * bent;
    return chain(x, y, scalar_fma(y.value, hit, not_y * miss), scalar_fma(not_y, bent_miss, -(y.value * bent_hit)),
                 hit - miss);
  }

  const Fraction<T> not_p = scalar_fraction(negative ? T(1) : e, e);
  const Fraction<T> p = scalar_fraction(negative ? e : T(1), e);
  const T log_hit = at.excess + (negative ? -x.value : T(0));
  T hit, miss, bent_hit, bent_miss;
  if constexpr (kNarrow) {
    // The only branch is uniform. With m = 1 - q the derivative of q^gamma L is q^gamma (p (1 - p) / (q m))
    // (gamma L m + q), which takes one quotient; without a clip p (1 - p) / (q m) is 1.
    const bool clips = clip.value > T(0);
    const T difference = p.value - clip.value, not_q = not_p.value + clip.value;
    const bool active = difference > T(0);
    const T q = active ? difference : T(0) * p.value;
    const T above = at.excess + (negative ? T(0) : x.value);
    const T log_of_q = select_computed(active, scalar_minus_log_of_complement(q, not_q), q);
    const T log_miss = select_computed(clips, log_of_q, above);
    T power_hit = not_p.value, power_miss = q * q * (q * q);
    if (gamma_pos.value != T(1) || gamma_neg.value != T(4)) {  // not the defaults
      power_hit = scalar_power(not_p.value, gamma_pos.value).first;
      power_miss = scalar_power(q, gamma_neg.value).first;
    }
    hit = power_hit * log_hit;
    miss = power_miss * log_miss;
    bent_hit = power_hit * select_computed(p.value == T(0), not_p.value,
                                           scalar_fma(gamma_pos.value * p.value, log_hit, not_p.value));
    const T change = scalar_divide_roughly(at.larger * at.smaller, difference * not_q);
    const T factor = select_computed(clips, change, T(1));
    const T bent = select_computed(not_q == T(0), q, scalar_fma(gamma_neg.value * log_miss, not_q, q));
    bent_miss = select_computed(active, power_miss * (factor * bent), T(0));
  } else {
    const Power<T> power_hit = scalar_power(not_p, gamma_pos.value);
    hit = power_hit.times(log_hit);
    bent_hit =
        power_hit.times(p.value == T(0) ? not_p.value : scalar_fma(gamma_pos.value * p.value, log_hit, not_p.value));

    Fraction<T> q = p;
    T log_miss = at.excess + (negative ? T(0) : x.value);
    T per_q = not_p.value;
    T per_not_q = p.value;
    if (clip.value > T(0)) {
      const T difference = p.value - clip.value;
      const bool active = difference > T(0);
      const T inverse = active ? scalar_divide_roughly(T(1), difference) : T(0);
      const T rounded_off = (p.value - difference) - clip.value;
      q = {active ? difference : T(0) * p.value, scalar_fma(p.value, p.relative_residual, rounded_off) * inverse};
      const T not_q = not_p.value + clip.value;
      const T change = active ? at.larger * at.smaller : T(0);
      log_miss = active ? scalar_minus_log_of_complement(q.value, not_q) : q.value;
      per_q = change * inverse;
      per_not_q = scalar_divide_roughly(change, not_q);
    }
    const Power<T> power_miss = scalar_power(q, gamma_neg.value);
    miss = power_miss.times(log_miss);
    bent_miss = power_miss.times(per_q == T(0) ? per_not_q : scalar_fma(gamma_neg.value * per_q, log_miss, per_not_q));
  }

  const T of_hit = y.value == T(0) && hit > scalar_max(T()) ? T(0) : hit;
  const T of_miss = not_y == T(0) && miss > scalar_max(T()) ? T(0) : miss;
  const T by_logit = scalar_fma(not_y, bent_miss, -(y.value * bent_hit));
  return chain(x, y, scalar_fma(y.value, of_hit, not_y * of_miss),
               constant_if(scalar_abs(x.value) > scalar_max(T()), by_logit), of_hit - of_miss);
}

// (1 - e^(-q s)) / q, the integral of e^(-q t) over t from 0 to s, given inverse = 1 / q and e = e^(-q s).
__device__ __forceinline__ float scalar_integral(float s, float q, float inverse, float e) {
  const float z = q * s;
  if (kNarrow) return select_computed(z < 0.35f, s * scalar_complement_ratio(z), (1.0f - e) * inverse);
  return z < 0.35f ? s * scalar_complement_ratio(z) : (1.0f - e) * inverse;
}
__device__ __forceinline__ double scalar_integral(double s, double q, double inverse, double) {
  const double z = q * s;
  return z < 1e-20 ? s : -expm1(-z) * inverse;
}

// (1 - e^-z) / z for z between 0 and log(2), to 2^-21.
template <class T>
__device__ __forceinline__ T scalar_mean_of_fall(T z) {
  return scalar_polynomial(z, T(0.999999583), T(-0.499972582), T(0.166358694), T(-0.0404294617), T(0.00623448379));
}

// (1 - p^q) / q for q > 0, where p = sigmoid(x) for a label of 1, p = sigmoid(-x) for a label of 0, and labels in
// between weight both in proportion; for q = 0 the limit, which is the log loss. With z = q (-log of the larger p), the
// label of the larger p has the loss (1 - e^-z) / q, and the other label adds e^-z (1 - e^(-q |x|)) / q to it.
template <class T, unsigned kX, unsigned kY>
__device__ __forceinline__ Dual<T, kX | kY> generalized_log_loss(const Dual<T, kX>& x, const Dual<T, kY>& y,
                                                                 const Dual<T, 0>& q) {
  const Decision<T> d = scalar_decision(x.value, y.value);
  if constexpr (kTentativeFit<T, kX | kY>) {
    // The larger p is at least 1/2, so its power, 1 - q easy, does not cancel. `more` cancels where |x| is small, but
    // there `easy` is not small.
    const T easy = d.at.excess * scalar_mean_of_fall(q.value * d.at.excess);
    const T e = scalar_fma(-q.value, easy, T(1));
    const T f = scalar_exp2(T(-1.4426950408889634) * q.value * d.size);
    const T inverse = T(1) / q.value;
    const T more = e * scalar_fma(-inverse, f, inverse);
    const T slope = scalar_fma(d.wrong * f, d.at.larger, -(d.right * d.at.smaller));
    T by_label = T(0);
    if constexpr (kDifferentiated<kY>) by_label = -d.signed_as_logit(e * scalar_integral(d.size, q.value, inverse, f));
    return chain(x, y, scalar_fma(d.wrong, more, easy), d.signed_as_logit(e * slope), by_label);
  }
  const T e = scalar_exp(-(q.value * d.at.excess));
  const T f = scalar_exp(-(q.value * d.size));
  const T inverse = T(1) / q.value;
  const T easy = scalar_integral(d.at.excess, q.value, inverse, e);
  const T more = e * scalar_integral(d.size, q.value, inverse, f);
  const T slope = scalar_fma(d.wrong * f, d.at.larger, -(d.right * d.at.smaller));
  const auto power = chain(x, y, scalar_fma(d.wrong, more, easy), d.side * e * slope, -d.side * more);
  return where(q.value > T(0), power, log_loss_of_logit(x, y, constant<T>(1.0)));
}
