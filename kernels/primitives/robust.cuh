// Robust losses of a residual. Each is one primitive: value and derivative share their exponential, root or quotient,
// and the formulas as usually written cancel for small residuals and overflow for large ones.
#pragma once
#include "primitives/logistic.cuh"

// The smallest positive number, in float the smallest that is not subnormal.
__device__ __forceinline__ float scalar_least(float) {
  return 0x1p-126f;
}
__device__ __forceinline__ double scalar_least(double) {
  return 0x1p-1074;
}

// x^2 / (2 beta) if |x| < beta, otherwise |x| - beta / 2; slope = 1 / beta. Composed of products and `where`, which
// carry both derivatives, it would take twice the instructions. With a beta of 0 the first and the second derivative at
// 0 are 0.
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> smooth_abs(const Dual<T, kMask>& x, const Dual<T, 0>& beta,
                                                     const Dual<T, 0>& slope) {
  const T size = scalar_abs(x.value);
  const bool near = size < max_ignoring_nan(beta.value, scalar_least(T()));
  // x is multiplied by the slope first: otherwise a beta of inf gives inf * 0, and the derivative of a tiny x is
  // flushed.
  const T steepest = beta.value > T(0) ? min(slope.value, scalar_max(T())) : T(0);
  const T ratio = x.value * steepest, side = copysign(T(1), x.value);
  return chain(x, near ? T(0.5) * (x.value * ratio) : size - T(0.5) * beta.value, near ? ratio : side);
}

// x^2 / 2 if |x| <= delta, otherwise delta (|x| - delta / 2). An infinite x is within an infinite delta.
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> clipped_square(const Dual<T, kMask>& x, const Dual<T, 0>& delta) {
  const T size = scalar_abs(x.value);
  const bool near = size <= delta.value;
  const T limit = copysign(delta.value, x.value);
  return chain(x, near ? x.value * (T(0.5) * x.value) : delta.value * (size - T(0.5) * delta.value),
               near ? x.value : limit);
}

// x, limited in size so that its square is far from overflow, yet so large that 1 is negligible beside it.
__device__ __forceinline__ float scalar_limited(float x) {
  return fabsf(x) > 0x1p60f ? copysignf(0x1p60f, x) : x;
}
__device__ __forceinline__ double scalar_limited(double x) {
  return fabs(x) > 0x1p500 ? copysign(0x1p500, x) : x;
}

// log(cosh(x)) and its derivative tanh(x). In float both come from one exponential, or from polynomials in x^2 where
// that cancels.
__device__ __forceinline__ ValueAndSlope<float> scalar_log_cosh(float x) {
  const float a = fabsf(x);
  const float w = x * x;
  const float e = scalar_exp(-2.0f * a);
  const float of_w = kNarrow ? scalar_polynomial(w, 0.499999791f, -0.0833133385f, 0.0219367072f, -0.00540476758f)
                             : scalar_polynomial(w, 0.5f, -0.083332695f, 0.022204667f, -0.0065939566f, 0.0016502878f);
  const float slope_of_w =
      kNarrow ? scalar_polynomial(w, 0.999997854f, -0.333140403f, 0.130578548f, -0.0409293883f)
              : scalar_polynomial(w, 1.0f, -0.333333f, 0.13331936f, -0.053784717f, 0.020798622f, -0.0058979555f);
  const float of_e =
      kNarrow ? scalar_polynomial(e, 0.999992192f, -0.499147117f, 0.318417877f, -0.161633551f)
              : scalar_polynomial(e, 1.0f, -0.4999902f, 0.33298832f, -0.24553773f, 0.17229533f, -0.078362785f);
  const float value = w * of_w;
  const float slope = x * slope_of_w;
  const float log1p = e * of_e;
  const bool near = a < 0.6f;
  return {near ? value : (a - 0.69314718f) + log1p,
          near ? slope : copysignf(scalar_divide_closely(1.0f - e, 1.0f + e), x)};
}
__device__ __forceinline__ ValueAndSlope<double> scalar_log_cosh(double x) {
  const double a = fabs(x);
  const double half = sinh(0.5 * x);
  return {a < 1.0 ? log1p(2.0 * half * half) : log1p(exp(-2.0 * a)) + (a - 0.69314718055994530942), tanh(x)};
}

template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> log_cosh(const Dual<T, kMask>& x) {
  const ValueAndSlope<T> y = scalar_log_cosh(x.value);
  return chain(x, y.value, y.slope);
}

// sqrt(1 + x^2) - 1
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> hypotenuse_minus_one(const Dual<T, kMask>& x) {
  const T limited = scalar_limited(x.value);
  const T square = limited * limited;
  const T sum = scalar_fma(limited, limited, T(1));
  const T inverse = scalar_rsqrt(sum);
  const T rough = sum * inverse;
  const T root = scalar_fma(scalar_fma(-rough, rough, sum), T(0.5) * inverse, rough);
  const T beyond = scalar_abs(x.value) - scalar_abs(limited);
  return chain(x, scalar_divide_closely(square, root + T(1)) + beyond,
               with_partials(limited * inverse, inverse * inverse * inverse, x.value));
}

// log(1 + x^2 / 2)
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> log1p_half_square(const Dual<T, kMask>& x) {
  // For large x the value is 2 log(x) - log(2). The derivative is 2 / x, with numerator and denominator scaled into
  // range.
  const T a = scalar_abs(x.value);
  const bool far = a > T(0x1p60);
  const T half = T(0.5) * x.value;
  const T log = scalar_log1p(far ? a : half * x.value);
  const T slope =
      scalar_divide_roughly(far ? T(0x1p-63) : x.value, far ? x.value * T(0x1p-64) : scalar_fma(half, x.value, T(1)));
  return chain(x, scalar_fma(far ? T(2) : T(1), log, far ? T(-0.69314718055994530942) : T(0)), slope);
}

// 1 - exp(-x^2 / 2)
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> one_minus_gaussian(const Dual<T, kMask>& x) {
  const T z = T(0.5) * x.value * x.value;
  const T e = scalar_exp(-z);
  // Avoids inf * 0 for large x.
  return chain(x, scalar_complement(z, e), e == T(0) ? T(0) : x.value * e);
}

// 2 x^2 / (x^2 + 4)
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> geman_mcclure(const Dual<T, kMask>& x) {
  const T limited = scalar_limited(x.value);
  const T inverse = scalar_divide_closely(T(1), scalar_fma(limited, limited, T(4)));
  return chain(x, T(2) * limited * limited * inverse, T(16) * limited * inverse * inverse);
}

// ---------------------------------------------------------------------------------------------------------------------
// Barron's family of robust losses (arXiv 1701.03077): f = (b / alpha) (P - 1) with P = (1 + u)^(alpha / 2),
// b = |alpha - 2|, u = z / b, z = r^2 and a residual r = d / scale. Below, L = log(1 + u) and v = alpha L / 2, the
// logarithm of P.

// x = 2^exponent e^remainder. Precondition: x > 0, not subnormal.
template <class T>
struct LogParts {
  T exponent;
  T remainder;
};

// The power of two by which x has to be divided to be between 2/3 and 4/3, as an integer to subtract from the bits of
// x.
__device__ __forceinline__ int exponent_bits(float x) {
  return (__float_as_int(x) - 0x3f2aaaab) & ~0x7fffff;
}
__device__ __forceinline__ long long exponent_bits(double x) {
  return (__double_as_longlong(x) - 0x3fe5555555555555LL) & ~0xfffffffffffffLL;
}

__device__ __forceinline__ LogParts<float> scalar_log_parts(float x) {
  const int exponent = exponent_bits(x);
  const float f = __int_as_float(__float_as_int(x) - exponent) - 1.0f;
  return {static_cast<float>(exponent) * 0x1p-23f, scalar_log1p_near_zero(f)};
}
__device__ __forceinline__ LogParts<double> scalar_log_parts(double x) {
  const long long exponent = exponent_bits(x);
  return {static_cast<double>(exponent >> 52), log(__longlong_as_double(__double_as_longlong(x) - exponent))};
}

// LogParts of 1 + u. The remainder is computed without forming 1 + u, so the digits of u survive.
__device__ __forceinline__ LogParts<float> scalar_log1p_parts(float u) {
  const int exponent = exponent_bits(1.0f + u);
  const float scale = __int_as_float(0x3f800000 - exponent);
  return {static_cast<float>(exponent) * 0x1p-23f, scalar_log1p_near_zero(fmaf(u, scale, scale - 1.0f))};
}
__device__ __forceinline__ LogParts<double> scalar_log1p_parts(double u) {
  const long long exponent = exponent_bits(1.0 + u);
  const double scale = __longlong_as_double(0x3ff0000000000000LL - exponent);
  return {static_cast<double>(exponent >> 52), log1p(fma(u, scale, scale - 1.0))};
}

// LogParts of (d / c)^2 / b, where this or d / c may be out of range.
template <class T>
__device__ __forceinline__ LogParts<T> scalar_log_parts(T d, T c, T b) {
  constexpr T kPower = kSingle<T> ? T(64) : T(512);
  constexpr T kDown = T(kSingle<T> ? 0x1p-64 : 0x1p-512);
  const bool large = d > T(1), small = c < T(1);
  const LogParts<T> r = scalar_log_parts((large ? d * kDown : d) / (small ? c / kDown : c));
  const LogParts<T> of_b = scalar_log_parts(b);
  const T shift = (large ? kPower : T(0)) + (small ? kPower : T(0));
  return {T(2) * (r.exponent + shift) - of_b.exponent, T(2) * r.remainder - of_b.remainder};
}

// A number that may be out of range, as a factor and two powers of two of similar size that are multiplied one after
// the other: its product with another number, or with a quotient, is in range if the result is.
template <class T>
struct Scaled {
  T factor;
  T first;
  T second;
  __device__ __forceinline__ T times(T x) const {
    return x * factor * first * second;
  }
  __device__ __forceinline__ T times(T x, T divisor) const {
    return factor == T(0) ? T(0) : scalar_divide_in_range(x * factor * first, divisor) * second;
  }
};

// x^t. The exponential is taken of what remains after the powers of two, so it is as accurate for large x as for small
// x.
template <class T>
__device__ __forceinline__ Scaled<T> scalar_power(const LogParts<T>& x, T t) {
  constexpr T kMost = kSingle<T> ? T(254) : T(2046);
  const T n = scalar_round(t * scalar_fma(x.remainder, T(1.4426950408889634), x.exponent));
  const T factor = scalar_exp(scalar_fma(scalar_fma(t, x.exponent, -n), T(0.69314718055994530942), t * x.remainder));
  if (!(n <= kMost)) return {n * scalar_infinity(T()), T(1), T(1)};
  if (n < T(2) - kMost) return {T(0), T(1), T(1)};
  const T half = scalar_round(T(0.5) * n);
  return {factor, scalar_power_of_two(half), scalar_power_of_two(n - half)};
}

// rho(t) = 2 (exp(-t) - 1 + t) / t^2 for t >= 0, given exp(-t).
template <class T>
__device__ __forceinline__ T scalar_rho(T t, T e) {
  constexpr int kOrder = kSingle<T> ? 10 : 18;
  T series = T(1);
#pragma unroll
  for (int n = kOrder; n > 2; --n) series = scalar_fma(t * (T(-1) / T(n)), series, T(1));
  return t < T(1) ? series : T(2) / t * (T(1) - (T(1) - e) / t);
}

// Derivative of f with respect to alpha: with the sign of alpha - 2, it is P (L / 2)^2 (rho(L) - rho(v)). If both rho
// are near 1, it is computed as (b / 4) L^3 times the integral of exp(v y) (exp(-L y) - 1 + L y) / L^2 over y from 0 to
// 1: a series in the moments M_n = integral of y^n exp(v y). All terms of the integral are positive.
template <class T>
__device__ __forceinline__ T scalar_robust_slope(T alpha, T b, T log, T v, T p, const Scaled<T>& power) {
  constexpr int kTerms = kSingle<T> ? 16 : 28;
  // exp(-v) M_n by downward recurrence, which divides the error of its start by a factorial.
  T moment = T(0), series = T(0), first = T(0);
#pragma unroll
  for (int n = kTerms; n > 1; --n) {
    moment = scalar_fma(-v, moment, T(1)) * (T(1) / T(n));  // now moment n - 1
    if (n > 2) series = scalar_fma(log * (T(-1) / T(n)), series, moment);
    if (n == 2) first = moment;
  }
  const bool moderate = scalar_abs(v) <= T(2);
  if (moderate && log < T(2)) return T(0.125) * (power.times(b) * log) * log * log * series;
  const T e = scalar_exp(-log);
  if (b < T(0.5)) {
    // With v = L + p, the parts without the factor p cancel analytically.
    const T inverse = scalar_divide_roughly(T(1), log * v);
    const T joined = scalar_fma(p * (v + log), T(1) - e, e * log * log * scalar_expm1(-p));
    return scalar_abs(T(0.5) * power.times(log / v * scalar_fma(-joined, inverse, p)));
  }
  const T of_log = scalar_rho(log, e);
  const T quarter = T(0.25) * log * log;
  if (v < T(-2)) {
    const T bracket = scalar_fma(power.times(T(1)), v - T(1), T(1));
    return T(2) / alpha * bracket / alpha - power.times(quarter * of_log);
  }
  const T of_v = moderate ? T(2) * first : T(2) / v * (T(1) - (T(1) - scalar_exp(-v)) / v);
  return power.times(quarter * (alpha > T(2) ? of_log - of_v : of_v - of_log));
}

// f and its derivative with respect to d with kNarrow, by the formula as written, where every part is in range: for
// b >= 1/2, |alpha| <= 8 and a moderate scale, if u < 2^30. An alpha near 0 counts as 0. If alpha and scale are
// numbers, the conditions on them and the quotients by them are the same for all elements.
template <class T>
struct NarrowRobust {
  T value;
  T slope;
  bool valid;
};
template <class T>
__device__ __forceinline__ NarrowRobust<T> scalar_narrow_robust(T d, T a, T c) {
  const T b = scalar_abs(a - T(2));
  const bool usual = (b >= T(0.5)) & (scalar_abs(a) <= T(8)) & (c >= T(0x1p-20)) & (c <= T(0x1p20));
  const T of_c = scalar_divide_roughly(T(1), c), of_b = scalar_divide_roughly(T(1), b);
  const T ratio = scalar_divide_roughly(b, a);
  const T r = d * of_c;
  const T z = r * r;
  const T u = z * of_b;
  const T log = scalar_log1p(u);
  const T v = T(0.5) * a * log;
  const T of_log = T(0.5) * b * log;
  const T value = select_computed(scalar_abs(a) < T(0x1p-20), of_log, ratio * scalar_expm1(v));
  const T slope = scalar_exp(v) * (r * of_c) * scalar_divide_roughly(T(1), T(1) + u);
  // A small z still counts where u is flushed to 0.
  const bool valid = usual & (u < T(0x1p30));
  return {select_computed(u < T(0x1p-26), T(0.5) * z, value), slope, valid};
}

// robust_loss for tentative evaluation, with numbers for alpha and scale: an alpha of 0, or of a size between 1/16 and
// 4, and a moderate scale. For small u it is the first terms of the binomial series, otherwise the formula as written,
// or b L / 2 for an alpha of 0. A b below 2^-10 counts as 2^-10, which changes nothing at alpha = 2. Terms that depend
// on alpha and scale alone are the same for all elements.
template <class T, unsigned kD>
__device__ __forceinline__ Dual<T, kD> tentative_robust(const Dual<T, kD>& d, T a, T c) {
  const T b = max_ignoring_nan(scalar_abs(a - T(2)), T(0x1p-10));
  const T of_c = T(1) / c, of_b = T(1) / b, half = T(0.5) * a;
  const T c1 = T(0.5) * (half - T(1)), c2 = c1 * (half - T(2)) * T(1.0 / 3.0), c3 = c2 * (half - T(3)) * T(0.25);
  const bool log_only = a == T(0);
  const T of_power = log_only ? T(0) : b / a, of_log = log_only ? T(0.5 * 0.69314718055994530942) * b : T(0);
  const T ratio = d.value * (of_c * of_c);
  const T z = d.value * ratio;
  const T u = z * of_b;
  const T sum = T(1) + u;
  const T log = scalar_log2(sum);
  const T power = scalar_exp2(half * log);
  const T far = scalar_fma(of_power, power, scalar_fma(of_log, log, -of_power));
  const T near = z * scalar_polynomial(u, T(0.5), T(0.5) * c1, T(0.5) * c2, T(0.5) * c3);
  const T slope = scalar_divide_roughly(power, sum) * ratio;
  return chain(d, select_computed(u < T(0.0625), near, far), slope);
}

// Barron's robust loss f = (b / alpha) (P - 1) with P = (1 + u)^(alpha / 2), b = |alpha - 2|, u = z / b and
// z = (d / scale)^2. No limit needs a formula of its own: beyond 2^60 alpha counts as infinite, and near 0 f is b L / 2
// with L = log(1 + u), which goes to z / 2 as u goes to 0. Near 2, where P is nearly 1 + u, P - 1 is the sum of u and
// of the rest of the power, each times a power near 1. For large u only its logarithm is known. Precondition: the scale
// is not subnormal.
template <class T, unsigned kD, unsigned kA, unsigned kC>
__device__ __forceinline__ Dual<T, kD | kA | kC> robust_loss(const Dual<T, kD>& d, const Dual<T, kA>& alpha,
                                                             const Dual<T, kC>& scale) {
  constexpr bool kFloat = kSingle<T>;
  const T c = scale.value;
  if constexpr (kTentativeFit<T, kD | kA | kC>) return tentative_robust(d, alpha.value, c);
  if constexpr (kNarrow && !kDifferentiated<kA | kC>) {
    const NarrowRobust<T> usual = scalar_narrow_robust(d.value, alpha.value, c);
    if (usual.valid) return chain(d, usual.value, usual.slope);
  }
  const bool endless = scalar_abs(alpha.value) > T(0x1p60);
  const T a = endless ? copysign(T(0x1p60), alpha.value) : alpha.value;
  const T b = scalar_abs(a - T(2));
  const T r = d.value / c;
  const T z = r * r;
  const T u = b == T(0) ? T(0) : scalar_divide_in_range(z, b);
  const bool far = b > T(0) && !(u < T(kFloat ? 0x1p30 : 0x1p60));
  const LogParts<T> parts = far ? scalar_log_parts(scalar_abs(d.value), c, b) : scalar_log1p_parts(u);
  const T log = scalar_fma(parts.exponent, T(0.69314718055994530942), parts.remainder);
  const Scaled<T> power = scalar_power(parts, T(0.5) * a);
  const T inverse = scalar_divide_roughly(T(1), far ? T(1) : T(1) + u);
  const T mass = far ? b : z * inverse;  // z / (1 + u)

  const T v = T(0.5) * a * log;
  const T p = (a > T(2) ? T(0.5) : T(-0.5)) * b * log;
  const bool linear = scalar_abs(v) < T(kFloat ? 0x1p-26 : 0x1p-55);
  const bool near_two = b < T(0.5);
  const bool steep = scalar_abs(v) > T(1);
  const T expm1 = scalar_expm1(near_two ? p : v);
  const T product = u < T(kFloat ? 0x1p-26 : 0x1p-55) ? z : b * log;
  const T ratio = scalar_divide_closely(b, a);
  const T plain = steep ? power.times(ratio) - ratio : ratio * expm1;
  const T about_two = scalar_fma(ratio, expm1, power.times(scalar_divide_closely(mass, a)));
  const T value = linear ? T(0.5) * product : (near_two ? about_two : plain);

  const T by_d = power.times(far ? b : r * inverse, far ? d.value : c);
  const T by_scale = z < T(1) ? -r * by_d : power.times(-mass, c);
  // Second derivatives, from the derivatives of log(by_d), whose parts cancel for small residuals.
  const T bend = a > T(2) ? mass : -mass;
  const T fraction = far ? T(1) : u * inverse;
  const T excess = fraction < T(0.5) ? scalar_log_beyond_linear(fraction) : log - fraction;
  const T curve = (far ? scalar_divide_in_range(by_d, d.value) : scalar_divide_in_range(power.times(inverse, c), c));
  const T turn = endless || b == T(0) ? T(0) : T(0.5) * by_d * excess;
  const T across = -scalar_divide_in_range(by_d, c) * (T(2) + bend);
  const T along_d = with_partials(by_d, curve * (T(1) + bend), d.value, turn, alpha.value, across, c);
  const T along_scale = with_partials(by_scale, across, d.value, -r * turn, alpha.value,
                                      r * scalar_divide_in_range(by_d, c) * (T(3) + bend), c);
  const T by_alpha = b == T(0) || log == T(0) || endless ? T(0) : scalar_robust_slope(a, b, log, v, p, power);
  const bool valid = c >= T(kFloat ? 0x1p-126 : 0x1p-1022) && scalar_abs(d.value) <= scalar_max(T());
  T result = valid ? value : scalar_nan(T());
  T slope = along_d;
  if constexpr (kNarrow && kDifferentiated<kA | kC>) {
    // So bits do not depend on which other gradients are computed.
    const NarrowRobust<T> usual = scalar_narrow_robust(d.value, alpha.value, c);
    result = usual.valid ? usual.value : result;
    slope = usual.valid ? usual.slope : along_d;
  }
  return chain(d, alpha, scale, result, slope, by_alpha, along_scale);
}
