// Scalar functions under one name for float and double.
//
// With 16-bit operands and results (kNarrow: the generated source defines NARROW) arithmetic stays in float but is
// accurate to 2^-16 only, five bits more than float16 keeps: functions run on the GPU's special function units, and
// polynomials have fewer terms. Otherwise every loss with a logarithm would be bound by arithmetic in 16 bits.
#pragma once
#include "core/types.cuh"

#ifndef NARROW
#define NARROW false
#endif
constexpr bool kNarrow = NARROW;

__device__ __forceinline__ float scalar_abs(float x) {
  return fabsf(x);
}
__device__ __forceinline__ double scalar_abs(double x) {
  return fabs(x);
}
__device__ __forceinline__ double force_computed(double x) {
  return x;
}
// condition ? x : y. With kNarrow both x and y are computed in any case, without a branch around either: see
// force_computed.
template <class T>
__device__ __forceinline__ T select_computed(bool condition, T x, T y) {
  if (kNarrow) {
    x = force_computed(x);
    y = force_computed(y);
  }
  return condition ? x : y;
}
__device__ __forceinline__ float scalar_exp(float x) {
  return kNarrow ? __expf(x) : expf(x);
}
__device__ __forceinline__ double scalar_exp(double x) {
  return exp(x);
}
__device__ __forceinline__ float scalar_log(float x) {
  return kNarrow ? __logf(x) : logf(x);
}
__device__ __forceinline__ double scalar_log(double x) {
  return log(x);
}
// Exponential and logarithm to base 2: fewer instructions where the argument or the result is multiplied by a factor
// anyway.
__device__ __forceinline__ float scalar_exp2(float x) {
  return kNarrow ? exp2_ftz(x) : exp2f(x);
}
__device__ __forceinline__ double scalar_exp2(double x) {
  return exp2(x);
}
__device__ __forceinline__ float scalar_log2(float x) {
  return kNarrow ? __log2f(x) : log2f(x);
}
__device__ __forceinline__ double scalar_log2(double x) {
  return log2(x);
}
__device__ __forceinline__ float scalar_rsqrt(float x) {
  return rsqrtf(x);
}
__device__ __forceinline__ double scalar_rsqrt(double x) {
  return rsqrt(x);
}

__device__ __forceinline__ float scalar_max(float) {
  return 3.40282347e38f;
}
__device__ __forceinline__ double scalar_max(double) {
  return 1.79769313486231571e308;
}

template <class T>
__device__ __forceinline__ T scalar_infinity(T) {
  return scalar_max(T()) * T(2);
}

__device__ __forceinline__ float scalar_nan(float) {
  return __int_as_float(0x7fffffff);
}
__device__ __forceinline__ double scalar_nan(double) {
  return __longlong_as_double(0x7fffffffffffffffLL);
}

// Maximum of two numbers; of a number and NaN it is the number. A NaN still reaches the results through the sums.
__device__ __forceinline__ float max_ignoring_nan(float x, float y) {
  return fmaxf(x, y);
}
__device__ __forceinline__ double max_ignoring_nan(double x, double y) {
  return fmax(x, y);
}

// max(x, 0) and max(-x, 0). Their difference is x, and the difference of their tangents (nested.cuh) is the tangent of
// x. For NaN both are 0.
template <class T>
__device__ __forceinline__ T scalar_above_zero(T x) {
  return max_ignoring_nan(x, T(0));
}
template <class T>
__device__ __forceinline__ T scalar_below_zero(T x) {
  return max_ignoring_nan(-x, T(0));
}

// Minimum and maximum, NaN if either argument is NaN, as for float in core/ptx.cuh.
__device__ __forceinline__ double smaller_or_nan(double x, double y) {
  return x < y ? x : (y <= x ? y : x + y);
}
__device__ __forceinline__ double larger_or_nan(double x, double y) {
  return x > y ? x : (y >= x ? y : x + y);
}

template <class T>
__device__ __forceinline__ bool is_finite(T x) {
  return scalar_abs(x) <= scalar_max(T());
}
template <class T>
__device__ __forceinline__ bool is_finite_and_not_negative(T x) {
  return x >= T(0) && x <= scalar_max(T());
}

// Sign of x: -1, 0, 1, or NaN.
template <class T>
__device__ __forceinline__ T scalar_sign(T x) {
  return x > T(0) ? T(1) : (x < T(0) ? T(-1) : x * T(0));
}

__device__ __forceinline__ float scalar_fma(float x, float y, float z) {
  return fmaf(x, y, z);
}
__device__ __forceinline__ double scalar_fma(double x, double y, double z) {
  return fma(x, y, z);
}

// x / y to a few units in the last place, for quotients that are corrected later, or that are small beside what they
// are added to.
__device__ __forceinline__ float scalar_divide_roughly(float x, float y) {
  return __fdividef(x, y);
}
__device__ __forceinline__ double scalar_divide_roughly(double x, double y) {
  return x / y;
}

// x / y to little more than half a unit in the last place. The exact operator takes several times as long, because it
// also handles arguments that violate the precondition. Precondition: y, 1 / y and the quotient are in the range of
// floats.
__device__ __forceinline__ float scalar_divide_closely(float x, float y) {
  const float inverse = __fdividef(1.0f, y);
  const float rough = x * inverse;
  if (kNarrow) return rough;
  return fmaf(fmaf(-rough, y, x), inverse, rough);
}
__device__ __forceinline__ double scalar_divide_closely(double x, double y) {
  return x / y;
}

// x / y to two units in the last place, also for |y| beyond 2^126, where the GPU's fast division returns 0.
__device__ __forceinline__ float scalar_divide_in_range(float x, float y) {
  const float scale = fabsf(y) > 0x1p64f ? 0.25f : 1.0f;
  return __fdividef(x * scale, y * scale);
}
__device__ __forceinline__ double scalar_divide_in_range(double x, double y) {
  return x / y;
}

// The power of two that scales y to near 1; the product with an infinite y stays infinite. One instruction adds and
// takes the maximum.
__device__ __forceinline__ float scalar_inverse_scale(float y) {
  return __int_as_float(max(0x7f000000 - (__float_as_int(y) & 0x7f800000), 0x00800000));
}

// x / y to little more than half a unit in the last place, for all arguments, without a branch. The exact operator has
// a branch, across which the compiler does not interleave elements. A power of two scales y to near 1, where its
// reciprocal is in range. Where the quotient is 0 or infinite, its correction may be NaN and is then left out.
__device__ __forceinline__ float scalar_divide_without_branch(float x, float y) {
  const float scale = scalar_inverse_scale(y);
  const float scaled = y * scale, dividend = x * scale, inverse = __fdividef(1.0f, scaled);
  const float rough = dividend * inverse;
  if (kNarrow) return rough;
  const float close = fmaf(fmaf(-rough, scaled, dividend), inverse, rough);
  return close == close ? close : rough;
}
__device__ __forceinline__ double scalar_divide_without_branch(double x, double y) {
  return x / y;
}

// x / y, as by scalar_divide_without_branch, and 1 / y to two units in the last place.
template <class T>
struct QuotientAndInverse {
  T quotient;
  T inverse;
};
__device__ __forceinline__ QuotientAndInverse<float> scalar_divide_and_invert(float x, float y) {
  const float scale = scalar_inverse_scale(y);
  const float scaled = y * scale, dividend = x * scale, inverse = __fdividef(1.0f, scaled);
  const float rough = dividend * inverse;
  if (kNarrow) return {rough, inverse * scale};
  const float close = fmaf(fmaf(-rough, scaled, dividend), inverse, rough);
  return {close == close ? close : rough, inverse * scale};
}
__device__ __forceinline__ QuotientAndInverse<double> scalar_divide_and_invert(double x, double y) {
  return {x / y, 1.0 / y};
}

// x / y, exactly rounded; with kNarrow to two units in the last place.
__device__ __forceinline__ float scalar_divide(float x, float y) {
  return kNarrow ? scalar_divide_in_range(x, y) : x / y;
}
__device__ __forceinline__ double scalar_divide(double x, double y) {
  return x / y;
}

// The polynomial c + d x + e x^2 + ..., by Horner's scheme.
template <class T>
__device__ __forceinline__ T scalar_polynomial(T, T c) {
  return c;
}
template <class T, class... Ts>
__device__ __forceinline__ T scalar_polynomial(T x, T c, Ts... higher) {
  return scalar_fma(scalar_polynomial(x, higher...), x, c);
}

// (1 - exp(-z)) / z for 0 <= z < 0.35.
__device__ __forceinline__ float scalar_complement_ratio(float z) {
  if (kNarrow) return scalar_polynomial(z, 0.999999106f, -0.499917775f, 0.165497586f, -0.0362395719f);
  return scalar_polynomial(z, 1.0f, -0.49999997f, 0.16666552f, -0.041652385f, 0.008254852f, -0.0011900248f);
}

// 1 - exp(-z) for z >= 0, given e = exp(-z).
__device__ __forceinline__ float scalar_complement(float z, float e) {
  if (kNarrow) return select_computed(z < 0.35f, z * scalar_complement_ratio(z), 1.0f - e);
  return z < 0.35f ? z * scalar_complement_ratio(z) : 1.0f - e;
}
__device__ __forceinline__ double scalar_complement(double z, double) {
  return -expm1(-z);
}

__device__ __forceinline__ float scalar_round(float x) {
  return rintf(x);
}
__device__ __forceinline__ double scalar_round(double x) {
  return rint(x);
}
// 2^n for an integer n within the range of exponents.
__device__ __forceinline__ float scalar_power_of_two(float n) {
  return __int_as_float((static_cast<int>(n) + 127) << 23);
}
__device__ __forceinline__ double scalar_power_of_two(double n) {
  return __longlong_as_double((static_cast<long long>(n) + 1023) << 52);
}

// `tail` in log((1 + t) / (1 - t)) = 2 atanh(t) = 2 t (1 + w tail) with w = t^2, for t between -1/3 and 1/3.
__device__ __forceinline__ float scalar_atanh_tail(float w) {
  if (kNarrow) return scalar_polynomial(w, 0.332455456f, 0.224556133f);
  return scalar_polynomial(w, 0.33333206f, 0.20010851f, 0.13999526f, 0.14012474f);
}
__device__ __forceinline__ double scalar_atanh_tail(double w) {
  return scalar_polynomial(w, 0.33333333333333154, 0.20000000000078666, 0.14285714273920425, 0.11111111985313143,
                           0.09090871945398053, 0.07693280349226594, 0.06650481421906265, 0.06053087611756998,
                           0.04169848443101636, 0.08509676187994455);
}

// `excess` in log(1 + f) = f + f^2 excess, for f between -1/3 and 1/3.
__device__ __forceinline__ float scalar_log1p_excess(float f) {
  if (kNarrow) {
    return scalar_polynomial(f, -0.500012636f, 0.332463652f, -0.248727709f, 0.224467024f, -0.191963911f);
  }
  return scalar_polynomial(f, -0.5f, 0.3333321f, -0.24999717f, 0.20010749f, -0.16682306f, 0.14001156f, -0.12167153f,
                           0.14004777f, -0.12948987f);
}
__device__ __forceinline__ float scalar_log1p_near_zero(float f) {
  return scalar_fma(f * f, scalar_log1p_excess(f), f);
}

__device__ __forceinline__ float scalar_log1p(float x) {
  if (kNarrow) return select_computed(fabsf(x) < 0.33f, scalar_log1p_near_zero(x), __logf(1.0f + x));
  return log1pf(x);
}
__device__ __forceinline__ double scalar_log1p(double x) {
  return log1p(x);
}

// log(1 + x) for x >= 0, inf or NaN, without the branches of log1pf, which keep compilers from interleaving rows.
__device__ __forceinline__ float scalar_log1p_of_positive(float x) {
  if (kNarrow) return scalar_log1p(x);
  // 1 + x = 2^n (1 + f) with 1 + f between 2/3 and 4/3. f is computed without forming 1 + x, so the digits of x
  // survive.
  const int exponent = (__float_as_int(1.0f + x) - 0x3f2aaaab) & ~0x7fffff;
  const float scale = __int_as_float(0x3f800000 - exponent);
  const float f = fmaf(x, scale, scale - 1.0f), n = static_cast<float>(exponent) * 0x1p-23f;
  const float log = fmaf(n, 0.693147181f, scalar_log1p_near_zero(f));
  return x < scalar_infinity(x) ? log : x;
}
template <class T>
__device__ __forceinline__ T scalar_log1p_of_positive(T x) {
  return scalar_log1p(x);
}

__device__ __forceinline__ float scalar_expm1(float x) {
  if (kNarrow) {
    const float excess = scalar_polynomial(x, 0.499974757f, 0.166673958f, 0.0420927145f, 0.00834228657f);
    return select_computed(fabsf(x) < 0.5f, scalar_fma(x * x, excess, x), __expf(x) - 1.0f);
  }
  return expm1f(x);
}
__device__ __forceinline__ double scalar_expm1(double x) {
  return expm1(x);
}

// True if arithmetic has 24 significant bits.
template <class T>
constexpr bool kSingle = sizeof(T) == 4;
// True for numbers with a tangent (nested.cuh).
template <class T>
constexpr bool kHasTangent = false;

// Hooks that nested.cuh overloads for numbers with a tangent; for float and double they return the value unchanged.
// with_partials replaces the tangent of `value` by the one that follows from the given pairs of a partial derivative
// and its variable, where differentiating the expression as written would lose digits. constant_if drops the tangent if
// the condition holds, because the value is then a convention. nan_result makes the tangent of a NaN NaN, too.
template <class T, class... Ts>
__device__ __forceinline__ T with_partials(T value, Ts...) {
  return value;
}
template <class T>
__device__ __forceinline__ T constant_if(bool, T value) {
  return value;
}
template <class T>
__device__ __forceinline__ T nan_result(T nan) {
  return nan;
}
// True if x and y are equal, tangents included.
template <class T>
__device__ __forceinline__ bool identical(T x, T y) {
  return x == y;
}
// True if x and its tangent are 0.
template <class T>
__device__ __forceinline__ bool is_zero(T x) {
  return x == T(0);
}

// Value and derivative of a function at a point.
template <class T>
struct ValueAndSlope {
  T value;
  T slope;
};
