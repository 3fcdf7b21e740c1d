// Divergences between distributions, and their building block: the logarithm of a ratio.
#pragma once
#include "primitives/math.cuh"

// Range in which the remainder of a quotient can be computed: if both operands are below `small`, they are multiplied
// by `scale` first, and the quotient must be between 1 / `most` and `most`.
template <class T>
struct RatioRange {
  T small, scale, most;
};
__device__ __forceinline__ RatioRange<float> scalar_ratio_range(float) {
  return {2.3283064e-10f, 18446744073709551616.0f, 1e37f};  // 2^-32, 2^64
}
__device__ __forceinline__ RatioRange<double> scalar_ratio_range(double) {
  return {8.636168555094445e-78, 1.157920892373162e77, 1e300};  // 2^-256, 2^256
}

template <class T>
struct Ratio {
  T quotient;
  T log;
};

// log(a) - log(b), for arguments whose logarithms do not cancel, and where the result is infinite or NaN.
__device__ __forceinline__ float scalar_log_difference(float a, float b) {
  return (__log2f(a) - __log2f(b)) * 0.693147181f;
}
__device__ __forceinline__ double scalar_log_difference(double a, double b) {
  return log(a) - log(b);
}

// log(2 x) / 2
template <class T>
__device__ __forceinline__ T scalar_half_log_of_twice(T x) {
  return scalar_fma(scalar_log2(x), T(0.34657359027997264), T(0.34657359027997264));
}

// a / b and its logarithm for a, b >= 0. log(a) - log(b) would cancel, and log(a / b) would lack the part that the
// quotient rounded off. That remainder is exact in one fma, and is added. (log1p of the excess over 1 took more
// arithmetic, by which such a loss is bound.) Small operands are scaled first, because a remainder below the range
// would be flushed to 0. If the quotient leaves the range (or b >= 2^126, whose fast inverse is 0), the logarithms are
// subtracted. The subtraction also gives the limits at 0, and NaN for operands that are not probabilities: the quotient
// of two negative numbers would look like a valid one.
template <class T>
__device__ __forceinline__ Ratio<T> scalar_ratio(T a, T b) {
  const RatioRange<T> range = scalar_ratio_range(a);
  if (kNarrow) {
    const T quotient = a * scalar_divide_roughly(T(1), b);
    if (a > T(0) && quotient > T(1) / range.most && quotient < range.most) return {quotient, scalar_log(quotient)};
    return {scalar_divide(a, b), scalar_log_difference(a, b)};
  }
  const T scale = a < range.small && b < range.small ? range.scale : T(1);
  const T x = a * scale;
  const T y = b * scale;
  const T inverse = scalar_divide_roughly(T(1), y);
  const T rough = x * inverse;
  const T quotient = scalar_fma(scalar_fma(-rough, y, x), inverse, rough);
  if (a > T(0) && quotient > T(1) / range.most && quotient < range.most) {
    const T remainder = scalar_fma(-quotient, y, x);
    return {quotient, scalar_log(quotient) + scalar_divide_roughly(remainder, x)};
  }
  return {a / b, scalar_log(a) - scalar_log(b)};
}

// a (log a - b) for a > 0. A primitive because its derivative is log a - b + 1; the product rule's a * (1 / a) rounds
// and, for the smallest a, overflows.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> times_log(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  const T difference = scalar_log(a.value) - b.value;
  return chain(a, b, a.value * difference, difference + T(1), -a.value);
}

// log a - b
template <class T>
__device__ __forceinline__ T scalar_log_minus(T a, T b) {
  return scalar_log(a) - b;
}
__device__ __forceinline__ float scalar_log_minus(float a, float b) {
  return kNarrow ? scalar_fma(__log2f(a), 0.693147181f, -b) : scalar_log(a) - b;
}

// -x of a probability x. With tangents (nested.cuh), the result for x = 0 has the tangent 0.
template <class T>
__device__ __forceinline__ T scalar_minus_probability(T x) {
  return -x;
}

// a (log a - b) for a probability a and a log-probability b: a term of the Kullback-Leibler divergence. If a is 0, the
// value and its derivatives are 0, whatever b is.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> kl_term(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  const bool nothing = a.value == T(0);
  const T excess = scalar_log_minus(a.value, b.value);
  return chain(a, b, nothing ? T(0) : a.value * excess, nothing ? T(0) : excess + T(1),
               scalar_minus_probability(a.value));
}

// a (log a - b) for a = e^x: kl_term of a probability given by its logarithm.
template <class T, unsigned kX, unsigned kB>
__device__ __forceinline__ Dual<T, kX | kB> kl_term_of_log(const Dual<T, kX>& x, const Dual<T, kB>& b) {
  const T a = scalar_exp(x.value), excess = x.value - b.value;
  const bool nothing = a == T(0);
  return chain(x, b, nothing ? T(0) : a * excess, nothing ? T(0) : a * excess + a, scalar_minus_probability(a));
}

// a log(a / b) for a > 0, b >= 0; see scalar_ratio.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> times_log_ratio(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  const Ratio<T> ratio = scalar_ratio(a.value, b.value);
  return chain(a, b, a.value * ratio.log, ratio.log + T(1), -ratio.quotient);
}

// ---------------------------------------------------------------------------------------------------------------------
// Divergences. They combine log(a / b) with a - b, and these nearly cancel if a is near b. There the logarithm is
// expanded in tangent = (a - b) / (a + b): log(a / b) = 2 tangent (1 + tangent^2 tail).

template <class T>
struct LogRatio {
  T log;
  T tangent;
  T tail;
  bool near;  // a is near b; tangent and tail are defined only then
};

// log(a / b) to 16 bits, from a - b and a + b where a is near b, and otherwise `log`, the logarithm computed by the
// caller, which has enough digits where it is not small.
__device__ __forceinline__ LogRatio<float> scalar_log_ratio(float difference, float sum, float log) {
  const float twice = scalar_divide_in_range(difference + difference, sum);
  const float tangent = 0.5f * twice;
  const float w = tangent * tangent;
  const float tail = scalar_atanh_tail(w);
  const bool near = fabsf(difference) * 3.0f <= sum && sum <= scalar_max(0.0f);
  return {near ? scalar_fma(twice * w, tail, twice) : log, tangent, tail, near};
}

// log(a / b). If a is near b, it follows from a - b and a + b, which the caller may know better than a and b
// themselves; otherwise from the quotient numerator / denominator, where a / b = quotient 2^(exponent / 2^23).
__device__ __forceinline__ LogRatio<float> scalar_log_ratio(bool near, float difference, float sum, float numerator,
                                                            float denominator, int exponent) {
  const float minus = near ? difference : numerator - denominator;
  const float twice = scalar_divide_closely(minus + minus, near ? sum : numerator + denominator);
  const float tangent = 0.5f * twice;
  const float w = tangent * tangent;
  const float tail = scalar_atanh_tail(w);
  const float log2_low = near ? 0.0f : static_cast<float>(exponent) * 8.26295824e-8f;  // log(2) / 2^23
  return {scalar_fma(twice * w, tail, twice) + log2_low, tangent, tail, near};
}

// log(a / b) = log(1 + f) with kNarrow, from f = (a - b) / b: f + f^2 excess if f is near 0, otherwise `far`. The
// inverse of b also serves the derivatives, so this takes one quotient; tangent = (a - b) / (a + b) would take two.
// Both sides are computed, because a branch would keep the compiler from interleaving the elements of a vector.
template <class T>
struct NarrowLog {
  T log;
  T excess;
  bool near;
};
template <class T>
__device__ __forceinline__ NarrowLog<T> scalar_narrow_log(T f, T far, bool valid = true) {
  const T excess = scalar_log1p_excess(f);
  const bool near = (scalar_abs(f) < T(0.33)) & valid;
  return {select_computed(near, scalar_fma(f * f, excess, f), far), excess, near};
}

// a log(a / b) - a + b with kNarrow, from difference = a - b and f = difference / b.
template <class T>
__device__ __forceinline__ T scalar_relative_entropy(T a, const NarrowLog<T>& ratio, T difference, T f) {
  const T near = difference * f * scalar_fma(T(1) + f, ratio.excess, T(1));
  return select_computed(ratio.near, near, scalar_fma(a, ratio.log, -difference));
}

// The inverse of y for several quotients x / y, which are in range even where 1 / y is not. Precondition: y >= 0.
template <class T>
struct NarrowInverse {
  T scale;
  T inverse;
  __device__ __forceinline__ T times(T x) const {
    return x * scale * inverse;
  }
};
template <class T>
__device__ __forceinline__ NarrowInverse<T> scalar_narrow_inverse(T y) {
  const T scale = y > T(0x1p64) ? T(0.25) : T(1);
  return {scale, scalar_divide_roughly(T(1), y * scale)};
}

// log(a / b) for finite a, b > 0 that are not subnormal. In float only the quotient of the significands is formed, so
// nothing overflows; one polynomial serves near and far.
__device__ __forceinline__ LogRatio<float> scalar_log_ratio(float a, float b, float difference, float sum) {
  if (kNarrow) return scalar_log_ratio(difference, sum, force_computed(scalar_log_difference(a, b)));
  constexpr int kSignificand = 0x007fffff, kOne = 0x3f800000, kExponent = 0x7f800000;
  const int a_bits = __float_as_int(a), b_bits = __float_as_int(b);
  const float x = __int_as_float((a_bits & kSignificand) | kOne);
  const float y = __int_as_float((b_bits & kSignificand) | kOne);
  // Multiplies the quotient by 2 or 1/2 if it is outside of [sqrt(1/2), sqrt(2)], which moves it into this interval.
  const int power = __float_as_int(scalar_divide_roughly(x, y) * 1.41421356f) & kExponent;
  const float scaled = x * __int_as_float(2 * kOne - power);
  const unsigned a_exponent = a_bits & kExponent, b_exponent = b_bits & kExponent;
  const int exponent = static_cast<int>(a_exponent - b_exponent + (power - kOne));
  // The inverse of a large sum is out of range.
  const bool near = fabsf(difference) * 3.0f <= sum && sum < 0x1p100f;
  return scalar_log_ratio(near, difference, sum, scaled, y, exponent);
}
__device__ __forceinline__ LogRatio<double> scalar_log_ratio(double a, double b, double difference, double sum) {
  const double tangent = difference / sum;
  const double w = tangent * tangent;
  const double tail = scalar_atanh_tail(w);
  if (fabs(difference) * 3.0 <= sum && sum <= scalar_max(0.0))
    return {2.0 * scalar_fma(tangent * w, tail, tangent), tangent, tail, true};
  const double ratio = a / b;
  const bool in_range = ratio > 1e-300 && ratio < 1e300;
  return {in_range ? log(ratio) + fma(-ratio, b, a) / a : log(a) - log(b), 0.0, 0.0, false};
}

// log((1 + a) / (1 + b))^2 for a, b >= -1.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> squared_log_error(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  const T x = T(1) + a.value;
  const T y = T(1) + b.value;
  const T ends = scalar_log_difference(x, y);
  if constexpr (kNarrow) {
    // One inverse serves the logarithm and the derivative. It is that of a quarter of x, because the inverse of the
    // largest x is out of range.
    const T inverse = T(0.25) * scalar_divide_roughly(T(1), T(0.25) * x);
    const T log = -scalar_narrow_log((b.value - a.value) * inverse, -ends).log;
    const T twice = log + log;
    return chain(a, b, log * log, twice * inverse, T(-0.25) * scalar_divide_roughly(twice, T(0.25) * y));
  }
  const bool usual = scalar_abs(ends) <= scalar_max(T());
  const T log = usual ? scalar_log_ratio(x, y, a.value - b.value, T(2) + (a.value + b.value)).log : ends;
  // The inverse of the largest numbers is out of range.
  const T twice = log + log;
  return chain(a, b, log * log, T(0.25) * scalar_divide_roughly(twice, T(0.25) * x),
               T(-0.25) * scalar_divide_roughly(twice, T(0.25) * y));
}

// a log(a / b) - a + b for a, b > 0, never negative; `difference` is a - b.
template <class T>
__device__ __forceinline__ T scalar_relative_entropy(T a, const LogRatio<T>& ratio, T difference) {
  const T correction = scalar_fma(scalar_fma(ratio.tangent, ratio.tangent, ratio.tangent), ratio.tail, T(1));
  return ratio.near ? difference * ratio.tangent * correction : scalar_fma(a, ratio.log, -difference);
}

// log(a / b) for tentative evaluation, from f = (a - b) / b and quotient = a / b: NaN for negative quotients; finite
// for a quotient of 0, because it is multiplied by 0.
template <class T>
__device__ __forceinline__ NarrowLog<T> scalar_tentative_log(T f, T quotient) {
  return scalar_narrow_log(f, scalar_log(quotient + T(0x1p-126)));
}

// 1 / b as two equal factors, because 1 / b is out of range for some b in range. NaN for a negative b.
template <class T>
struct InverseRoot {
  T root;
  __device__ __forceinline__ T times(T x) const {
    return x * root * root;
  }
};
template <class T>
__device__ __forceinline__ InverseRoot<T> scalar_inverse_root(T b) {
  return {scalar_rsqrt(b)};
}

// a log(a / b) - a + b for a, b >= 0. At a = 0 the derivative with respect to a would be -inf; by convention it is 0.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> relative_entropy(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  const T difference = a.value - b.value;
  const bool empty = a.value == T(0);
  const bool impossible = b.value == T(0);
  if constexpr (kTentativeFit<T, kA | kB>) {
    const InverseRoot<T> of_b = scalar_inverse_root(b.value);
    const T f = of_b.times(difference), quotient = of_b.times(a.value);
    const NarrowLog<T> ratio = scalar_tentative_log(f, quotient);
    const T near = difference * f * scalar_fma(quotient, ratio.excess, T(1));
    const T value = select_computed(ratio.near, near, scalar_fma(a.value, ratio.log, -difference));
    T by_a = T(0);
    if constexpr (kDifferentiated<kA>) {
      // The quotient may be out of range.
      const T log = select_computed(ratio.near, ratio.log, scalar_log_difference(a.value, b.value));
      by_a = empty ? T(0) : log;
    }
    return chain(a, b, a.value >= T(0) ? value : scalar_nan(T()), by_a, -f);
  }
  if constexpr (kNarrow) {
    // The logarithm of an operand that is 0, negative or NaN yields the limit or NaN, unless a is 0.
    const T f = scalar_narrow_inverse(b.value).times(difference);
    const NarrowLog<T> ratio = scalar_narrow_log(f, scalar_log_difference(a.value, b.value), b.value > T(0));
    const T usual = scalar_relative_entropy(a.value, ratio, difference, f);
    const T alone = (b.value >= T(0)) & (b.value <= scalar_max(T())) ? b.value : scalar_nan(T());
    return chain(a, b, empty ? alone : usual, empty ? T(0) : ratio.log, empty ? T(1) : -f);
  }
  const bool valid = is_finite_and_not_negative(a.value) && is_finite_and_not_negative(b.value);
  const LogRatio<T> ratio = scalar_log_ratio(a.value, b.value, difference, a.value + b.value);
  const T usual = force_computed(scalar_relative_entropy(a.value, ratio, difference));
  const T positive = impossible ? scalar_infinity(T()) : usual;
  const T value = valid ? (empty ? b.value : positive) : scalar_nan(T());
  const T slope = impossible ? scalar_infinity(T()) : ratio.log;
  const T inverse = scalar_divide_in_range(T(1), b.value), quotient = scalar_divide_in_range(a.value, b.value);
  return chain(a, b, value, empty ? T(0) : slope,
               empty ? T(1)
                     : with_partials(scalar_divide_in_range(-difference, b.value), -inverse, a.value,
                                     quotient * inverse, b.value));
}

// log(a / m) and a log(a / m) - a + m, for a >= 0 and an m > 0 of moderate size, from a - m and 1 / m.
template <class T>
struct Entropy {
  T log;
  T value;
};

__device__ __forceinline__ Entropy<float> scalar_entropy(float a, float m, float difference, float inverse) {
  if (kNarrow) {
    // In units of m, with r = a / m. For a = 0 the logarithm is finite, because it is multiplied by 0.
    const float f = difference * inverse, r = a * inverse;
    const NarrowLog<float> log_ratio = scalar_narrow_log(f, scalar_log_difference(fmaxf(a, 1e-37f), m));
    return {log_ratio.log, m * select_computed(log_ratio.near, f * f * scalar_fma(r, log_ratio.excess, 1.0f),
                                               scalar_fma(r, log_ratio.log, -f))};
  }
  const int ratio = __float_as_int(a * inverse);
  // Without this exponent the quotient is between 1 / sqrt(2) and sqrt(2). Unsigned, because a may be -0.
  const int exponent = static_cast<int>((static_cast<unsigned>(ratio) - 0x3f3504f3u) & ~0x7fffffu);
  const bool near = fabsf(difference) * 3.0f <= a + m;
  const LogRatio<float> log_ratio =
      scalar_log_ratio(near, difference, a + m,
                       __int_as_float(static_cast<int>(static_cast<unsigned>(ratio) - exponent)), 1.0f, exponent);
  return {log_ratio.log, scalar_relative_entropy(a, log_ratio, difference)};
}
__device__ __forceinline__ Entropy<double> scalar_entropy(double a, double m, double difference, double) {
  const LogRatio<double> ratio = scalar_log_ratio(a, m, difference, a + m);
  return {ratio.log, a == 0.0 ? m : scalar_relative_entropy(a, ratio, difference)};
}

// log(1 + t) / 2 for t between -1/3 and 1/3, to 2^-17.
template <class T>
__device__ __forceinline__ T scalar_half_log1p(T t) {
  return t * scalar_polynomial(t, T(0.50000356), T(-0.250010033), T(0.166098446), T(-0.124251707), T(0.113203362),
                               T(-0.0967189643));
}

// jensen_shannon for tentative evaluation and a beta of 1/2, which makes it an even function of t = (a - b) / (a + b):
// (a - b) t (1/4 + t^2 / 24 + ...) where t is small.
template <class T, unsigned kA, unsigned kB, unsigned kD>
__device__ __forceinline__ Dual<T, kA | kB> tentative_jensen_shannon(const Dual<T, kA>& a, const Dual<T, kB>& b,
                                                                     const Dual<T, kD>& difference) {
  const T sum = a.value + b.value;
  const T inverse = scalar_divide_roughly(T(1), max_ignoring_nan(sum, T(0x1p-100)));
  const T t = difference.value * inverse, w = t * t;
  const bool near = scalar_abs(t) < T(0.33);
  // Finite for a quotient of 0, because it is multiplied by 0; NaN for a negative one.
  const T half_a = scalar_half_log_of_twice(scalar_fma(a.value, inverse, T(0x1p-126)));
  const T half_b = scalar_half_log_of_twice(scalar_fma(b.value, inverse, T(0x1p-126)));
  const T close = difference.value * t * scalar_polynomial(w, T(0.250000437), T(0.0415970964), T(0.0182873622));
  const T value = select_computed(near, close, scalar_fma(a.value, half_a, b.value * half_b));
  // For a smaller sum, the difference may have been flushed to 0; for a larger sum, the inverse is 0.
  const bool known = ((sum >= T(0x1p-100)) & (sum < T(0x1p126))) | (sum == T(0));
  T by_a = T(0), by_b = T(0);
  if constexpr (kDifferentiated<kA>) {
    by_a = a.value == T(0) ? T(0) : select_computed(near, scalar_half_log1p(t), half_a);
  }
  if constexpr (kDifferentiated<kB>) {
    by_b = b.value == T(0) ? T(0) : select_computed(near, scalar_half_log1p(-t), half_b);
  }
  return chain(a, b, known ? value : scalar_nan(T()), by_a, by_b);
}

// beta a log(a / m) + complement b log(b / m) with complement = 1 - beta and m = beta a + complement b, for a, b >= 0;
// never negative. `difference` is a - b. With beta = 0 it is a log(a / b) instead, and with beta = 1 it is
// b log(b / a). If a or b is 0, the derivative with respect to it is 0 by convention.
template <class T, unsigned kA, unsigned kB, unsigned kD>
__device__ __forceinline__ Dual<T, kA | kB> jensen_shannon(const Dual<T, kA>& a, const Dual<T, kB>& b,
                                                           const Dual<T, kD>& difference, const Dual<T, 0>& beta,
                                                           const Dual<T, 0>& complement) {
  const bool empty_a = a.value == T(0), empty_b = b.value == T(0);
  if constexpr (kTentativeFit<T, kA | kB>) return tentative_jensen_shannon(a, b, difference);
  bool valid = is_finite_and_not_negative(a.value) && is_finite_and_not_negative(b.value);
  if (beta.value == T(0) || complement.value == T(0)) {
    const bool swapped = complement.value == T(0);
    const T x = swapped ? b.value : a.value;
    const T y = swapped ? a.value : b.value;
    const LogRatio<T> ratio = scalar_log_ratio(x, y, swapped ? -difference.value : difference.value, x + y);
    const T log = y == T(0) ? scalar_infinity(T()) : ratio.log;
    const T by_x = x == T(0) ? T(0) : log + T(1);
    const T by_y = x == T(0) || y == T(0) ? T(0) : scalar_divide_in_range(-x, y);
    return chain(a, b, valid ? (x == T(0) ? T(0) : x * log) : scalar_nan(T()), swapped ? by_y : by_x,
                 swapped ? by_x : by_y);
  }
  // Scaled by 2^24 so that differences of the smallest numbers are not flushed to 0.
  const T x = a.value * T(0x1p24), y = b.value * T(0x1p24);
  const T gap = difference.value == T(0) ? x - y : difference.value * T(0x1p24);
  const T mean = scalar_fma(beta.value, gap, y);
  const T m = mean > T(0) ? mean : T(1);
  // Negative operands are not probabilities; from 2^126 on the fast inverse is 0.
  if (kNarrow) valid = (a.value >= T(0)) & (b.value >= T(0)) & (mean < T(0x1p126));
  const T inverse = scalar_divide_roughly(T(1), m);
  const Entropy<T> of_a = scalar_entropy(x, m, complement.value * gap, inverse);
  const Entropy<T> of_b = scalar_entropy(y, m, -beta.value * gap, inverse);
  const T sum = scalar_fma(beta.value, of_a.value, complement.value * of_b.value) * T(0x1p-24);
  // A probability of 0 has no tangent.
  const T across = -(beta.value * complement.value * (inverse * T(0x1p24)));
  const T by_a = with_partials(beta.value * of_a.log, -across * scalar_divide_in_range(y, x), a.value,
                               empty_b ? T(0) : across, b.value);
  const T by_b = with_partials(complement.value * of_b.log, empty_a ? T(0) : across, a.value,
                               -across * scalar_divide_in_range(x, y), b.value);
  return chain(a, b, valid ? (mean > T(0) ? sum : T(0)) : scalar_nan(T()), empty_a ? T(0) : by_a,
               empty_b ? T(0) : by_b);
}

// exp(a) - exp(b), given both exponentials `of_a` and `of_b`.
template <class T>
__device__ __forceinline__ T scalar_exp_difference(T a, T b, T of_a, T of_b) {
  const bool above = a > b;
  const T fraction = scalar_expm1(above ? b - a : a - b);
  const T difference = above ? -of_a * fraction : of_b * fraction;
  return of_a == of_b && of_a == T(0) ? T(0) : difference;
}

// exp(a) - exp(b), accurate also where a is near b; 0 where both are -inf.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> exp_difference(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  const T of_a = scalar_exp(a.value);
  const T of_b = scalar_exp(b.value);
  return chain(a, b, scalar_exp_difference(a.value, b.value, of_a, of_b), of_a, -of_b);
}

// a log(a / b) - a + b for a and b, given by their logarithms, and its derivatives by these: a log(a / b) and b - a.
template <class T>
struct RelativeEntropy {
  T value;
  T by_log_a;
  T by_log_b;
};
template <class T>
__device__ __forceinline__ RelativeEntropy<T> scalar_log_relative_entropy(T log_a, T log_b) {
  const T a = scalar_exp(log_a), b = scalar_exp(log_b);
  const T difference = scalar_exp_difference(log_a, log_b, a, b);
  const T product = a == T(0) ? T(0) : a * (log_a - log_b);
  const LogRatio<T> ratio = scalar_log_ratio(a, b, difference, a + b);
  const bool near = ratio.near && a > T(0) && b > T(0);
  return {force_computed(near ? scalar_relative_entropy(a, ratio, difference) : product - difference), product,
          -difference};
}
// Relative entropy from a, b and r = log(a / b), without a quotient. Near r = 0 the value is a (exp(-r) - 1 + r), a
// polynomial to 2^-26, or with kNarrow to 2^-17, and b - a follows from the value.
__device__ __forceinline__ RelativeEntropy<float> scalar_known_relative_entropy(float a, float b, float r) {
  const float product = a == 0.0f ? 0.0f : a * r;
  const float series = kNarrow ? scalar_polynomial(r, 0.499997407f, -0.166667789f, 0.0418369137f, -0.0083414223f)
                               : scalar_polynomial(r, 0.5f, -0.166666701f, 0.0416666493f, -0.00833275542f,
                                                   0.00138894725f, -0.000200780472f, 2.48799861e-05f);
  const bool near = fabsf(r) < (kNarrow ? 0.35f : 0.7f);
  const float close = product * r * series, far = b - a;
  return {near ? close : product + far, product, near ? close - product : far};
}
__device__ __forceinline__ RelativeEntropy<float> scalar_log_relative_entropy(float log_a, float log_b) {
  if (!kNarrow) return scalar_log_relative_entropy<float>(log_a, log_b);
  return scalar_known_relative_entropy(scalar_exp(log_a), scalar_exp(log_b), log_a - log_b);
}

// Logarithm of a probability as the operand of a divergence, with two numbers that are known besides: the probability
// itself, and the logarithm of its ratio to the other operand, which the difference of the two logarithms would round.
// With kNarrow, both logarithms are also known to base 2. A primitive without an overload for it uses the logarithm. As
// with kTentative, the value may be NaN at an edge of the domain that the overload leaves out.
template <class T, unsigned kMask>
struct KnownLog : Dual<T, kMask> {
  T number;
  T log_ratio;
  T log2, log2_ratio;
};

template <unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<float, kA | kB> log_relative_entropy(const KnownLog<float, kA>& log_a,
                                                                     const KnownLog<float, kB>& log_b) {
  const RelativeEntropy<float> y = scalar_known_relative_entropy(log_a.number, log_b.number, log_a.log_ratio);
  return chain(static_cast<const Dual<float, kA>&>(log_a), static_cast<const Dual<float, kB>&>(log_b), y.value,
               y.by_log_a, y.by_log_b);
}

// Term of known logarithms. `by_p` is its derivative with respect to the probability whose logarithm has the first
// slot. It is finite, also where that probability is 0.
template <class T, unsigned kMask>
struct TermOfKnownLogs : Dual<T, kMask> {
  T by_p;
};
template <class Scalar, class T, unsigned kMask>
__device__ __forceinline__ const TermOfKnownLogs<T, kMask>& lift(const TermOfKnownLogs<T, kMask>& x) {
  return x;
}

// mixed_divergence (see below) of known logarithms, with kNarrow for a beta between 0 and 1. With r = log(q / p) and
// k(r) = log(complement + beta exp(r)) = log(m / p), the value is m (r k'(r) - k(r)), and k generates the cumulants of
// a random number that is 1 with probability beta and 0 otherwise:
//
//   k(r) = sum over n of c_n r^n / n!                 r k'(r) - k(r) = sum over n > 1 of (n - 1) c_n r^n / n!
//
// Near r = 0 both are polynomials, to 2^-15. Farther out they follow from the logarithm of m. All logarithms are to
// base 2.
template <unsigned kQ, unsigned kP>
__device__ __forceinline__ auto mixed_divergence(const KnownLog<float, kQ>& log_q, const KnownLog<float, kP>& log_p,
                                                 const Dual<float, 0>& beta, const Dual<float, 0>& complement) {
  const Dual<float, kQ>& x = log_q;
  const Dual<float, kP>& y = log_p;
  if constexpr (!kNarrow) {
    return mixed_divergence(x, y, beta, complement);
  } else {
    // Constants, the same for all classes: powers of log 2; beta, or NaN; cumulants divided by the variance.
    constexpr float kLog2 = 0.693147181f, kSquare = 0.480453014f, kCube = 0.333024651f, kFourth = 0.230835099f,
                    kFifth = 0.160002699f;
    const float b = beta.value * complement.value > 0.0f ? beta.value : scalar_nan(0.0f), c = complement.value;
    const float variance = b * c, third = c - b;
    const float fourth = scalar_fma(-6.0f, variance, 1.0f), fifth = third * scalar_fma(-12.0f, variance, 1.0f);

    const float q = log_q.number, p = log_p.number, r = log_q.log2_ratio;
    const float m = scalar_fma(b, q, scalar_fma(c, p, 1e-37f)), log2_m = __log2f(m);
    const bool near = fabsf(r) < 0.288539008f;  // 0.2 / log 2
    const float near_k = r * scalar_polynomial(r, b, variance * (kLog2 / 2), variance * third * (kSquare / 6),
                                               variance * fourth * (kCube / 24));
    // Limited to finite values, because a number is 0 where its logarithm is infinite.
    const float k = select_computed(near, near_k, fminf(log2_m - log_p.log2, 250.0f));
    const float q_over_m = select_computed(near, r - k, fmaxf(log_q.log2 - log2_m, -250.0f));
    const float by_p = -(c * kLog2) * k, by_log_p = p * by_p, by_q = (b * kLog2) * q_over_m;
    const float series = scalar_polynomial(r, variance * (kSquare / 2), variance * third * (kCube / 3),
                                           variance * fourth * (kFourth / 8), variance * fifth * (kFifth / 30));
    const float value = select_computed(near, m * r * r * series, scalar_fma(q, by_q, by_log_p));
    return TermOfKnownLogs<float, kQ | kP>{chain(x, y, value, q * by_q, by_log_p), by_p};
  }
}

// a log(a / b) - a + b from the logarithms of a and b, also if one of a and b underflows; never negative.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> log_relative_entropy(const Dual<T, kA>& log_a, const Dual<T, kB>& log_b) {
  const RelativeEntropy<T> y = scalar_log_relative_entropy(log_a.value, log_b.value);
  return chain(log_a, log_b, y.value, y.by_log_a, y.by_log_b);
}

// beta q log(q / m) + complement p log(p / m) with complement = 1 - beta and m = beta q + complement p, from the
// logarithms of q and p; never negative. With beta = 0 it is q log(q / p) - q + p instead, and with beta = 1 it is
// p log(p / q) - p + q.
template <class T, unsigned kQ, unsigned kP>
__device__ __forceinline__ Dual<T, kQ | kP> mixed_divergence(const Dual<T, kQ>& log_q, const Dual<T, kP>& log_p,
                                                             const Dual<T, 0>& beta, const Dual<T, 0>& complement) {
  if (beta.value == T(0)) return log_relative_entropy(log_q, log_p);
  if (complement.value == T(0)) return log_relative_entropy(log_p, log_q);
  return jensen_shannon(exp(log_q), exp(log_p), exp_difference(log_q, log_p), beta, complement);
}

// t / x - log(t / x) - 1 for t, x >= 0; never negative.
template <class T, unsigned kT, unsigned kX>
__device__ __forceinline__ Dual<T, kT | kX> itakura_saito(const Dual<T, kT>& t, const Dual<T, kX>& x) {
  const T difference = t.value - x.value;
  T excess, value, by_x;
  if constexpr (kTentativeFit<T, kT | kX>) {
    const InverseRoot<T> of_x = scalar_inverse_root(x.value);
    excess = of_x.times(difference);
    by_x = -of_x.times(excess);
    const NarrowLog<T> ratio = scalar_narrow_log(excess, scalar_log(of_x.times(t.value)));
    value = select_computed(ratio.near, -(excess * excess * ratio.excess), excess - ratio.log);
  } else if constexpr (kNarrow) {
    // The logarithm of an operand that is 0, negative or NaN yields the limit or NaN, unless x is 0.
    const NarrowInverse<T> of_x = scalar_narrow_inverse(x.value);
    excess = of_x.times(difference);
    by_x = -of_x.times(excess);
    const NarrowLog<T> ratio = scalar_narrow_log(excess, scalar_log_difference(t.value, x.value), x.value > T(0));
    value = select_computed(ratio.near, -(excess * excess * ratio.excess), excess - ratio.log);
    value = (x.value == T(0)) & (t.value > T(0)) & (t.value <= scalar_max(T())) ? scalar_infinity(T()) : value;
  } else {
    const LogRatio<T> ratio = scalar_log_ratio(t.value, x.value, difference, t.value + x.value);
    excess = scalar_divide_in_range(difference, x.value);
    by_x = -scalar_divide_in_range(excess, x.value);
    const T correction = scalar_fma(scalar_fma(ratio.tangent, ratio.tangent, -ratio.tangent), ratio.tail, T(1));
    const T usual = force_computed(ratio.near ? excess * ratio.tangent * correction : excess - ratio.log);
    const bool silent = t.value == T(0) || x.value == T(0);
    const bool valid =
        is_finite_and_not_negative(t.value) && is_finite_and_not_negative(x.value) && !(silent && t.value == x.value);
    value = valid ? (silent ? scalar_infinity(T()) : usual) : scalar_nan(T());
  }
  const bool beyond = excess > scalar_max(T());
  // The derivative with respect to t, 1 / x - 1 / t.
  const T grad_t = scalar_divide_in_range(beyond ? T(1) : excess, beyond ? x.value : t.value);
  const T of_t = scalar_divide_in_range(T(1), t.value), of_x = scalar_divide_in_range(T(1), x.value);
  return chain(t, x, value, with_partials(grad_t, of_t * of_t, t.value, -(of_x * of_x), x.value), by_x);
}

// 100 |t - x| / max(|t|, floor). The derivative needs no difference of two quotients. It is 0 at t = x, and at
// |t| = floor it is that of a constant denominator.
template <class T, unsigned kX, unsigned kT>
__device__ __forceinline__ Dual<T, kX | kT> percentage_error(const Dual<T, kX>& x, const Dual<T, kT>& t,
                                                             const Dual<T, 0>& floor) {
  const T size = scalar_abs(t.value);
  const bool relative = !(size <= floor.value);
  const T rate = scalar_divide_in_range(T(100), relative ? size : floor.value);
  const T difference = t.value - x.value;
  const T rising = scalar_sign(difference) * rate;
  // rising x / t, in the order whose intermediate result is in range.
  const bool small = scalar_abs(x.value) < T(1);
  const T quotient = scalar_divide_in_range(small ? x.value * rising : x.value, t.value);
  const T against = relative ? (small ? quotient : quotient * rising) : rising;
  return chain(x, t, scalar_abs(difference) * rate, -rising, against);
}
