// Negative log-likelihoods, and their building block: the logarithm of a factorial.
#pragma once
#include "primitives/divergence.cuh"

// log(t!) = log Gamma(1 + t) for 0 <= t <= 1, and its derivative, digamma(1 + t): polynomials in float, rational
// functions in double. The value has the accuracy of its type relative to t, the derivative relative to 1.
__device__ __forceinline__ ValueAndSlope<float> scalar_log_factorial(float t) {
  return {t * scalar_polynomial(t, -0.577215552f, 0.822456658f, -0.400458008f, 0.268425882f, -0.196365833f,
                                0.135368302f, -0.0746930093f, 0.0271075834f, -0.00462601706f),
          scalar_polynomial(t, -0.577215672f, 1.64493382f, -1.20202374f, 1.08157527f, -1.02935457f, 0.974021614f,
                            -0.852000177f, 0.622659445f, -0.336415797f, 0.114699475f, -0.0180953369f)};
}

__device__ __forceinline__ ValueAndSlope<double> scalar_log_factorial(double t) {
  const double value =
      scalar_polynomial(t, -0.5772156649015329, -0.7410253242511072, 0.26080419598936605, 0.7037642309661976,
                        0.30870703510417696, 0.043544749068222685, 0.0014207780246765984) /
      scalar_polynomial(t, 1.0, 2.7086797062964796, 2.7135610264939634, 1.2357634447936388, 0.25278927947968416,
                        0.0195197685718673, 0.00033139900786988954);
  const double slope =
      scalar_polynomial(t, -0.5772156649015329, 0.4267435154525359, 1.3871506051863378, 0.7821162351980017,
                        0.16309927511772468, 0.012358583895338605, 0.00022740420337934904) /
      scalar_polynomial(t, 1.0, 2.110459964047409, 1.5286487129303108, 0.481345865895638, 0.06658221501766075,
                        0.003465284039472801, 4.020850716302013e-05);
  return {t * value, slope};
}

// For t >= 1, the remainder of Stirling's formula, log(t!) - (t log t - t + log(2 pi t) / 2); as the slope, the
// derivative of log(t!), digamma(1 + t), minus log t. In float they are polynomials of 1 / t; in double, Stieltjes
// functions of t^2, which rational functions approximate fast.
__device__ __forceinline__ ValueAndSlope<float> scalar_stirling_remainder(float t) {
  const float w = scalar_divide_roughly(1.0f, t);
  return {w * scalar_polynomial(w, 0.0833332539f, 1.4261218e-06f, -0.00278320257f, -2.09734881e-05f, 0.000999916228f,
                                -0.000596316822f, 0.000127364794f),
          w * scalar_polynomial(w, 0.499999672f, -0.0833229125f, -0.00011061789f, 0.00887052435f, -0.00123787974f,
                                -0.00318499235f, 0.0023036066f, -0.000533068844f)};
}
__device__ __forceinline__ ValueAndSlope<double> scalar_stirling_remainder(double t) {
  const double w = 1.0 / t;
  const double z = w * w;
  const double value =
      scalar_polynomial(z, 0.08333333333333263, 1.2071754942141741, 5.778739451978612, 11.479743276635,
                        9.75103807161643, 3.274911060013725, 0.3441863784326947, 0.005385738189941016) /
      scalar_polynomial(z, 1.0, 14.519439263899768, 69.81933092348277, 139.95309280533883, 121.10622423617198,
                        42.37795357363523, 4.941527733747608, 0.11336083760695324);
  const double slope =
      scalar_polynomial(z, 0.08333333333329708, 1.2954179060952036, 6.701188898051949, 14.488987433394701,
                        13.480974203851403, 4.976132221337957, 0.5706848910257889, 0.009012640992493307) /
      scalar_polynomial(z, 1.0, 15.645014873019223, 81.9311492285053, 181.36596278624407, 176.6981656583708,
                        71.67383895921128, 10.190610492760948, 0.3202694958556699);
  return {w * value, 0.5 * w - z * slope};
}

// Terms of log(t!) that a Poisson loss adds.
enum LogFactorial { kNoTerm = 0, kStirling = 1, kExact = 2 };

// rate - t log_rate, plus log(t!) by `terms` (kStirling: Stirling's formula for t > 1, nothing below), and the
// derivative with respect to t. `log_rate` is log(rate + shift), `log_ratio` is log((rate + shift) / t).
//
// For t > 1, rate - t log_rate + t log t - t = t (e^u - 1 - u) - shift with u = log_ratio is computed as one
// expression: it is small beside its parts if the prediction is good, and a series replaces it where they cancel. With
// t = 0 an infinite logarithm contributes nothing: 0 log 0 = 0 log inf = 0, with derivative 0. If the rate overflows,
// so does the loss, whatever t log_rate is. An infinite t, and with kExact a negative one, has no log(t!): the result
// is NaN.
template <class T>
__device__ __forceinline__ ValueAndSlope<T> scalar_poisson(T rate, T shift, T log_rate, T log_ratio, T t, int terms) {
  if (terms != kNoTerm && (t > scalar_max(T()) || (terms == kExact && t < T(0)))) {
    return {scalar_nan(T()), scalar_nan(T())};
  }
  const bool overflow = rate > scalar_max(T()) && scalar_abs(log_rate) + scalar_abs(t) <= scalar_max(T());
  if (terms != kNoTerm && t > T(1)) {
    constexpr int kTerms = kSingle<T> ? 8 : 15;
    T series = T(1);
#pragma unroll
    for (int k = kTerms; k > 2; --k) series = scalar_fma(log_ratio * (T(1) / T(k)), series, T(1));
    const bool near = scalar_abs(log_ratio) < T(0.5);
    const T squared = T(0.5) * log_ratio * log_ratio;
    const T far = overflow ? rate : rate - scalar_fma(t, log_ratio, t);
    const T deviance = near ? scalar_fma(t, squared * series, -shift) : far;
    const T constant = scalar_fma(T(0.5), scalar_log(t), T(0.91893853320467274));  // log(2 pi t) / 2
    if (terms == kStirling) return {deviance + constant, scalar_divide_roughly(T(0.5), t) - log_ratio};
    const ValueAndSlope<T> remainder = scalar_stirling_remainder(t);
    return {deviance + (constant + remainder.value), remainder.slope - log_ratio};
  }
  const bool nothing = t == T(0) && scalar_abs(log_rate) > scalar_max(T());
  const ValueAndSlope<T> plain = {nothing || overflow ? rate : rate - t * log_rate, nothing ? T(0) : -log_rate};
  if (terms != kExact) return plain;
  const ValueAndSlope<T> factorial = scalar_log_factorial(t);
  return {plain.value + factorial.value, plain.slope + factorial.slope};
}

// log(rate / t). It must be 0 if rate and t are equal, because scalar_poisson multiplies the square of any error by t.
template <class T>
__device__ __forceinline__ T scalar_log_rate_ratio(T rate, T t) {
  return kNarrow ? scalar_log_ratio(rate, t, rate - t, rate + t).log : scalar_ratio(rate, t).log;
}

// e^x - t x, plus log(t!) by `terms`; see scalar_poisson.
template <class T, unsigned kX, unsigned kT>
__device__ __forceinline__ Dual<T, kX | kT> poisson_of_log_rate(const Dual<T, kX>& x, const Dual<T, kT>& t, int terms) {
  const T rate = scalar_exp(x.value);
  // The rate determines its distance from t to its own digits; x, which is large where the rate is, does not.
  const bool normal = rate > T(1e-30) && rate <= scalar_max(T());
  const T log_ratio = normal ? scalar_log_rate_ratio(rate, t.value) : x.value - scalar_log(t.value);
  const ValueAndSlope<T> loss = scalar_poisson(rate, T(0), x.value, log_ratio, t.value, terms);
  // At t = 0 an infinite x contributes nothing, so it must not become a derivative with respect to t either.
  const T against = t.value == T(0) && scalar_abs(x.value) > scalar_max(T()) ? T(0) : T(-1);
  return chain(x, t, loss.value, with_partials(rate - t.value, rate, x.value, against, t.value), loss.slope);
}

// x - t log(x + epsilon), plus log(t!) by `terms`; see scalar_poisson.
template <class T, unsigned kX, unsigned kT>
__device__ __forceinline__ Dual<T, kX | kT> poisson_of_rate(const Dual<T, kX>& x, const Dual<T, kT>& t,
                                                            const Dual<T, 0>& epsilon, int terms) {
  // For a rate of about 1, the rounding error of the sum is as large as the logarithm.
  const T rate = x.value + epsilon.value;
  const T part = rate - x.value;
  const T rounded_off = (x.value - (rate - part)) + (epsilon.value - part);
  const bool finite = rate > T(0) && rate <= scalar_max(T());
  const T log_rate = scalar_log(rate) + (finite ? scalar_divide_roughly(rounded_off, rate) : T(0));
  const T scale = t.value > T(1e30) ? T(0.0625) : T(1);  // the fast inverse of 2^126 is 0
  const T log_ratio = scalar_log_rate_ratio(rate * scale, t.value * scale);
  const ValueAndSlope<T> loss = scalar_poisson(x.value, epsilon.value, log_rate, log_ratio, t.value, terms);
  const T by_x = t.value == T(0) ? T(1) : T(1) - scalar_divide_in_range(t.value, rate);
  // If t and the rate are both 0, nothing contributes.
  const bool nothing = t.value == T(0) && rate == T(0);
  const T inverse = nothing ? T(0) : scalar_divide_in_range(T(1), rate);
  const T per_rate = nothing ? T(0) : scalar_divide_in_range(t.value, rate);
  return chain(x, t, loss.value, with_partials(by_x, per_rate * inverse, x.value, -inverse, t.value), loss.slope);
}
