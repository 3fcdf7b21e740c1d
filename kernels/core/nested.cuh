// Second derivatives: NestedDual<T>, a number with its tangent along one direction v, as the scalar of a dual number.
//
//   x        = value + tangent * epsilon
//   Dual<NestedDual<T>, kMask>    dL/dx_k, and its tangent along v:    sum over i of v_i d^2 L / dx_k dx_i
//
// 1. Operands enter with their tangents v_i.
// 2. Primitives are templates and are instantiated with NestedDual<T> for T. This file overloads the scalar functions
//    that they call. Overloads are found at instantiation, because everything is in the global namespace.
// 3. The functions of T compute the value, bit for bit; the tangent follows from the partial derivatives. So the values
//    of first derivatives keep their conventions at kinks, and only the partial derivatives of a primitive are
//    differentiated as they are written.
//
// The product of a partial derivative and a tangent is 0 if either is 0, so 0 * inf does not arise. This guard takes
// three of the four instructions of a product. Without kGuarded it is a plain product, for computations in which no
// partial derivative is infinite or a NaN is noticed. Everything is in registers; no memory traffic.
#pragma once
#include "core/tuple.cuh"
#include "primitives/primitives.cuh"

template <class T, bool kGuarded = true>
struct NestedDual {
  T value;
  T tangent;

  NestedDual() = default;
  __device__ constexpr NestedDual(T value_, T along_) : value(value_), tangent(along_) {
  }
  template <class Literal>
  __device__ explicit constexpr NestedDual(Literal x) : value(static_cast<T>(x)), tangent(static_cast<T>(0)) {
  }
  // Conversion to a storage type keeps the tangent.
  template <class Stored>
  __device__ __forceinline__ explicit operator Stored() const {
    return static_cast<Stored>(tangent);
  }

  __device__ __forceinline__ NestedDual& operator+=(NestedDual x) {
    return *this = *this + x;
  }
  __device__ __forceinline__ NestedDual& operator-=(NestedDual x) {
    return *this = *this - x;
  }
  __device__ __forceinline__ NestedDual& operator*=(NestedDual x) {
    return *this = *this * x;
  }
};

template <class T, bool kGuarded>
constexpr bool kSingle<NestedDual<T, kGuarded>> = kSingle<T>;
template <class T, bool kGuarded>
constexpr bool kHasTangent<NestedDual<T, kGuarded>> = true;

template <class T>
__device__ __forceinline__ T scaled_tangent(T slope, T tangent) {
  return slope == T(0) || tangent == T(0) ? T(0) : slope * tangent;
}
template <bool kGuarded, class T>
__device__ __forceinline__ T tangent_product(T slope, T tangent) {
  if constexpr (!kGuarded) return slope * tangent;
  return scaled_tangent(slope, tangent);
}

// slope * tangent + sum; one instruction without kGuarded.
template <bool kGuarded, class T>
__device__ __forceinline__ T add_tangent_product(T slope, T tangent, T sum) {
  if constexpr (!kGuarded) return scalar_fma(slope, tangent, sum);
  return scaled_tangent(slope, tangent) + sum;
}

template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> with_partials(NestedDual<T, kGuarded> value,
                                                                 NestedDual<T, kGuarded> slope,
                                                                 NestedDual<T, kGuarded> x) {
  return {value.value, tangent_product<kGuarded>(slope.value, x.tangent)};
}
template <class T, bool kGuarded, class... Ts>
__device__ __forceinline__ NestedDual<T, kGuarded> with_partials(NestedDual<T, kGuarded> value,
                                                                 NestedDual<T, kGuarded> slope,
                                                                 NestedDual<T, kGuarded> x, Ts... others) {
  return {value.value, add_tangent_product<kGuarded>(slope.value, x.tangent, with_partials(value, others...).tangent)};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> constant_if(bool condition, NestedDual<T, kGuarded> x) {
  return {x.value, condition ? T(0) : x.tangent};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> nan_result(NestedDual<T, kGuarded> nan) {
  return {nan.value, nan.value};
}
template <class T, bool kGuarded>
__device__ __forceinline__ bool identical(NestedDual<T, kGuarded> x, NestedDual<T, kGuarded> y) {
  return x.value == y.value && x.tangent == y.tangent;
}
template <class T, bool kGuarded>
__device__ __forceinline__ bool is_zero(NestedDual<T, kGuarded> x) {
  return x.value == T(0) && x.tangent == T(0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Arithmetic

template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> operator-(NestedDual<T, kGuarded> x) {
  return {-x.value, -x.tangent};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> operator+(NestedDual<T, kGuarded> x, NestedDual<T, kGuarded> y) {
  return {x.value + y.value, x.tangent + y.tangent};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> operator-(NestedDual<T, kGuarded> x, NestedDual<T, kGuarded> y) {
  return {x.value - y.value, x.tangent - y.tangent};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> operator*(NestedDual<T, kGuarded> x, NestedDual<T, kGuarded> y) {
  return {x.value * y.value,
          add_tangent_product<kGuarded>(y.value, x.tangent, tangent_product<kGuarded>(x.value, y.tangent))};
}

// x / y with its tangent, given the quotient of the values.
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> quotient_with_tangent(T quotient, NestedDual<T, kGuarded> x,
                                                                         NestedDual<T, kGuarded> y) {
  const T numerator_tangent = add_tangent_product<kGuarded>(-quotient, y.tangent, x.tangent);
  const bool nothing = kGuarded && numerator_tangent == T(0);
  return {quotient, nothing ? T(0) : scalar_divide_in_range(numerator_tangent, y.value)};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> operator/(NestedDual<T, kGuarded> x, NestedDual<T, kGuarded> y) {
  return quotient_with_tangent(x.value / y.value, x, y);
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_divide(NestedDual<T, kGuarded> x, NestedDual<T, kGuarded> y) {
  return quotient_with_tangent(scalar_divide(x.value, y.value), x, y);
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_divide_roughly(NestedDual<T, kGuarded> x,
                                                                         NestedDual<T, kGuarded> y) {
  return quotient_with_tangent(scalar_divide_roughly(x.value, y.value), x, y);
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_divide_closely(NestedDual<T, kGuarded> x,
                                                                         NestedDual<T, kGuarded> y) {
  return quotient_with_tangent(scalar_divide_closely(x.value, y.value), x, y);
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_divide_without_branch(NestedDual<T, kGuarded> x,
                                                                                NestedDual<T, kGuarded> y) {
  return quotient_with_tangent(scalar_divide_without_branch(x.value, y.value), x, y);
}
template <class T, bool kGuarded>
__device__ __forceinline__ QuotientAndInverse<NestedDual<T, kGuarded>> scalar_divide_and_invert(
    NestedDual<T, kGuarded> x, NestedDual<T, kGuarded> y) {
  const QuotientAndInverse<T> by = scalar_divide_and_invert(x.value, y.value);
  return {quotient_with_tangent(by.quotient, x, y),
          quotient_with_tangent(by.inverse, NestedDual<T, kGuarded>(T(1), T(0)), y)};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_divide_in_range(NestedDual<T, kGuarded> x,
                                                                          NestedDual<T, kGuarded> y) {
  return quotient_with_tangent(scalar_divide_in_range(x.value, y.value), x, y);
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_fma(NestedDual<T, kGuarded> x, NestedDual<T, kGuarded> y,
                                                              NestedDual<T, kGuarded> z) {
  const T value = scalar_fma(x.value, y.value, z.value);
  if constexpr (kGuarded) {
    return {value, scaled_tangent(y.value, x.tangent) + scaled_tangent(x.value, y.tangent) + z.tangent};
  } else {
    return {value, scalar_fma(y.value, x.tangent, scalar_fma(x.value, y.tangent, z.tangent))};
  }
}

template <class T, bool kGuarded>
__device__ __forceinline__ bool operator<(NestedDual<T, kGuarded> x, NestedDual<T, kGuarded> y) {
  return x.value < y.value;
}
template <class T, bool kGuarded>
__device__ __forceinline__ bool operator>(NestedDual<T, kGuarded> x, NestedDual<T, kGuarded> y) {
  return x.value > y.value;
}
template <class T, bool kGuarded>
__device__ __forceinline__ bool operator<=(NestedDual<T, kGuarded> x, NestedDual<T, kGuarded> y) {
  return x.value <= y.value;
}
template <class T, bool kGuarded>
__device__ __forceinline__ bool operator>=(NestedDual<T, kGuarded> x, NestedDual<T, kGuarded> y) {
  return x.value >= y.value;
}
template <class T, bool kGuarded>
__device__ __forceinline__ bool operator==(NestedDual<T, kGuarded> x, NestedDual<T, kGuarded> y) {
  return x.value == y.value;
}
template <class T, bool kGuarded>
__device__ __forceinline__ bool operator!=(NestedDual<T, kGuarded> x, NestedDual<T, kGuarded> y) {
  return x.value != y.value;
}

// ---------------------------------------------------------------------------------------------------------------------
// scalars.cuh

// At 0 the tangent is that from the right: primitives test x < 0 where the side matters, and what they compute of |x|
// is smooth there.
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_abs(NestedDual<T, kGuarded> x) {
  return {scalar_abs(x.value), x.value < T(0) ? -x.tangent : x.tangent};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_sign(NestedDual<T, kGuarded> x) {
  return {scalar_sign(x.value), T(0)};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> force_computed(NestedDual<T, kGuarded> x) {
  return {force_computed(x.value), x.tangent};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> smaller_or_nan(NestedDual<T, kGuarded> x,
                                                                  NestedDual<T, kGuarded> y) {
  const T tied = T(0.5) * (x.tangent + y.tangent);
  return {smaller_or_nan(x.value, y.value), x.value < y.value ? x.tangent : (y.value < x.value ? y.tangent : tied)};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> larger_or_nan(NestedDual<T, kGuarded> x, NestedDual<T, kGuarded> y) {
  const T tied = T(0.5) * (x.tangent + y.tangent);
  return {larger_or_nan(x.value, y.value), x.value > y.value ? x.tangent : (y.value > x.value ? y.tangent : tied)};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> min(NestedDual<T, kGuarded> x, NestedDual<T, kGuarded> y) {
  return {min(x.value, y.value), x.value < y.value ? x.tangent : y.tangent};
}
// Of two equal values, returns the one with the larger tangent, in whatever order they are compared: all threads must
// choose the same.
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> max_ignoring_nan(NestedDual<T, kGuarded> x,
                                                                    NestedDual<T, kGuarded> y) {
  const T value = max_ignoring_nan(x.value, y.value);
  if (x.value == y.value) return {value, max_ignoring_nan(x.tangent, y.tangent)};
  return {value, value == x.value ? x.tangent : y.tangent};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_above_zero(NestedDual<T, kGuarded> x) {
  return {scalar_above_zero(x.value), x.value < T(0) ? T(0) : x.tangent};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_below_zero(NestedDual<T, kGuarded> x) {
  return {scalar_below_zero(x.value), x.value < T(0) ? -x.tangent : T(0)};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> copysign(NestedDual<T, kGuarded> x, NestedDual<T, kGuarded> y) {
  const T value = copysign(x.value, y.value);
  return {value, value == x.value ? x.tangent : -x.tangent};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_least(NestedDual<T, kGuarded>) {
  return {scalar_least(T()), T(0)};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_max(NestedDual<T, kGuarded>) {
  return {scalar_max(T()), T(0)};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_nan(NestedDual<T, kGuarded>) {
  return {scalar_nan(T()), T(0)};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_exp(NestedDual<T, kGuarded> x) {
  const T y = scalar_exp(x.value);
  return {y, tangent_product<kGuarded>(y, x.tangent)};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_expm1(NestedDual<T, kGuarded> x) {
  return {scalar_expm1(x.value), tangent_product<kGuarded>(scalar_exp(x.value), x.tangent)};
}

// log(x) with its tangent, given the logarithm of the value.
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> log_with_tangent(T log, NestedDual<T, kGuarded> x) {
  return {log, x.tangent == T(0) ? T(0) : scalar_divide_in_range(x.tangent, x.value)};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_log(NestedDual<T, kGuarded> x) {
  return log_with_tangent(scalar_log(x.value), x);
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_log1p(NestedDual<T, kGuarded> x) {
  return log_with_tangent(scalar_log1p(x.value), NestedDual<T, kGuarded>(T(1) + x.value, x.tangent));
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_rsqrt(NestedDual<T, kGuarded> x) {
  const T y = scalar_rsqrt(x.value);
  return {y, T(-0.5) * tangent_product<kGuarded>(y * y * y, x.tangent)};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_complement(NestedDual<T, kGuarded> z,
                                                                     NestedDual<T, kGuarded> e) {
  return {scalar_complement(z.value, e.value), tangent_product<kGuarded>(e.value, z.tangent)};
}

// ---------------------------------------------------------------------------------------------------------------------
// math.cuh, divergence.cuh

template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_minus_probability(NestedDual<T, kGuarded> x) {
  return {-x.value, x.value == T(0) ? T(0) : -x.tangent};
}

template <class T, unsigned kMask, bool kGuarded>
__device__ __forceinline__ Dual<NestedDual<T, kGuarded>, 0> zero_unless_nan(
    const Dual<NestedDual<T, kGuarded>, kMask>& x) {
  Dual<NestedDual<T, kGuarded>, 0> y;
  y.value = NestedDual<T, kGuarded>(x.value.value != x.value.value ? x.value.value : T(0));
  return y;
}

template <class T>
__device__ __forceinline__ T finite_or_zero(T x) {
  return scalar_abs(x) <= scalar_max(T()) ? x : T(0);
}

// An x of weight 0 contributes nothing to the value. The derivative with respect to the weight is x, and the tangent of
// that derivative is the tangent of x. Partial derivatives of x contribute to it where they and x are finite.
template <class T, unsigned kA, unsigned kB, bool kGuarded>
__device__ __forceinline__ Dual<NestedDual<T, kGuarded>, kA | kB> weighted(
    const Dual<NestedDual<T, kGuarded>, kA>& weight, const Dual<NestedDual<T, kGuarded>, kB>& x) {
  const bool unused = weight.value.value == T(0);
  const bool defined = scalar_abs(x.value.value) <= scalar_max(T());
  Dual<NestedDual<T, kGuarded>, kB> divisor_term = x;
  if (unused) {
    divisor_term.value =
        defined ? NestedDual<T, kGuarded>(x.value.value, finite_or_zero(x.value.tangent)) : NestedDual<T, kGuarded>(0);
    for_each_slot<kB>([&](int k) {
      divisor_term.tangent[k] = NestedDual<T, kGuarded>(defined ? finite_or_zero(x.tangent[k].value) : T(0));
    });
  }
  return chain(weight, divisor_term, unused ? NestedDual<T, kGuarded>(0) : weight.value * x.value, divisor_term.value,
               weight.value);
}

// ---------------------------------------------------------------------------------------------------------------------
// boxes.cuh

template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_angle(NestedDual<T, kGuarded> width,
                                                                NestedDual<T, kGuarded> height) {
  const T squared = width.value * width.value + height.value * height.value;
  const T turned =
      tangent_product<kGuarded>(height.value, width.tangent) - tangent_product<kGuarded>(width.value, height.tangent);
  return {scalar_angle(width.value, height.value), turned == T(0) ? T(0) : scalar_divide_in_range(turned, squared)};
}

// The result enters values only, so it has no tangent.
template <bool kNowhere, class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_direction(NestedDual<T, kGuarded> y,
                                                                    NestedDual<T, kGuarded> x) {
  return NestedDual<T, kGuarded>(scalar_direction<kNowhere>(y.value, x.value));
}

// ---------------------------------------------------------------------------------------------------------------------
// vectors.cuh

template <class T>
__device__ __forceinline__ NestedDual<T> scalar_square_root(NestedDual<T> x) {
  const T y = scalar_square_root(x.value);
  return {y, x.tangent == T(0) ? T(0) : scalar_divide_in_range(T(0.5) * x.tangent, y)};
}
template <class T>
__device__ __forceinline__ NestedDual<T> scalar_cosine(NestedDual<T> x) {
  return {scalar_cosine(x.value), x.tangent};
}

// ---------------------------------------------------------------------------------------------------------------------
// logistic.cuh

template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_log_beyond_linear(NestedDual<T, kGuarded> p) {
  return {scalar_log_beyond_linear(p.value),
          tangent_product<kGuarded>(scalar_divide_roughly(p.value, T(1) - p.value), p.tangent)};
}

template <class T, bool kGuarded>
__device__ __forceinline__ Logs<NestedDual<T, kGuarded>> scalar_minus_logs(NestedDual<T, kGuarded> p) {
  const Logs<T> logs = scalar_minus_logs(p.value);
  const T per_p = min(scalar_divide_roughly(T(1), p.value), T(1e12));
  const T per_not_p = min(scalar_divide_roughly(T(1), T(1) - p.value), T(1e12));
  return {{logs.success, -tangent_product<kGuarded>(per_p, p.tangent)},
          {logs.failure, tangent_product<kGuarded>(per_not_p, p.tangent)}};
}

template <class T, bool kGuarded>
__device__ __forceinline__ Logistic<NestedDual<T, kGuarded>> scalar_logistic(NestedDual<T, kGuarded> x) {
  const Logistic<T> at = scalar_logistic(x.value);
  const T outwards = x.value < T(0) ? -x.tangent : x.tangent;
  const T change = tangent_product<kGuarded>(at.larger * at.smaller, outwards);
  return {{at.excess, -tangent_product<kGuarded>(at.smaller, outwards)}, {at.larger, change}, {at.smaller, -change}};
}

// ---------------------------------------------------------------------------------------------------------------------
// focal.cuh

template <class T, bool kGuarded>
__device__ __forceinline__ Fraction<NestedDual<T, kGuarded>> scalar_fraction(NestedDual<T, kGuarded> n,
                                                                             NestedDual<T, kGuarded> e) {
  const Fraction<T> x = scalar_fraction(n.value, e.value);
  return {quotient_with_tangent(x.value, n, NestedDual<T, kGuarded>(1) + e), {x.relative_residual, T(0)}};
}

// The exponent is a parameter and has no tangent.
template <class T, bool kGuarded>
__device__ __forceinline__ Power<NestedDual<T, kGuarded>> scalar_power(const Fraction<NestedDual<T, kGuarded>>& x,
                                                                       NestedDual<T, kGuarded> t) {
  const Power<T> power = scalar_power(Fraction<T>{x.value.value, x.relative_residual.value}, t.value);
  T tangent = t.value == T(1) ? x.value.tangent : T(0);
  if (x.value.value > T(0))
    tangent = tangent_product<kGuarded>(power.first * t.value, scalar_divide_in_range(x.value.tangent, x.value.value));
  return {{power.first, tangent}, {power.second, T(0)}};
}

template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_minus_log_of_complement(NestedDual<T, kGuarded> q,
                                                                                  NestedDual<T, kGuarded> complement) {
  return {scalar_minus_log_of_complement(q.value, complement.value),
          scalar_divide_in_range(q.tangent, complement.value)};
}

template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_integral(NestedDual<T, kGuarded> s, NestedDual<T, kGuarded> q,
                                                                   NestedDual<T, kGuarded> inverse,
                                                                   NestedDual<T, kGuarded> e) {
  return {scalar_integral(s.value, q.value, inverse.value, e.value), tangent_product<kGuarded>(e.value, s.tangent)};
}

// ---------------------------------------------------------------------------------------------------------------------
// divergence.cuh

// log(a / b) with its tangent, given the logarithm of the values.
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> log_with_tangent(T log, NestedDual<T, kGuarded> a,
                                                                    NestedDual<T, kGuarded> b) {
  return {log, log_with_tangent(log, a).tangent - log_with_tangent(log, b).tangent};
}

template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_log_difference(NestedDual<T, kGuarded> a,
                                                                         NestedDual<T, kGuarded> b) {
  return log_with_tangent(scalar_log_difference(a.value, b.value), a, b);
}

template <class T, bool kGuarded>
__device__ __forceinline__ Ratio<NestedDual<T, kGuarded>> scalar_ratio(NestedDual<T, kGuarded> a,
                                                                       NestedDual<T, kGuarded> b) {
  const Ratio<T> ratio = scalar_ratio(a.value, b.value);
  return {quotient_with_tangent(ratio.quotient, a, b), log_with_tangent(ratio.log, a, b)};
}

// All fields but the logarithm enter values only, so they have no tangent.
template <class T, bool kGuarded>
__device__ __forceinline__ LogRatio<NestedDual<T, kGuarded>> scalar_log_ratio(NestedDual<T, kGuarded> a,
                                                                              NestedDual<T, kGuarded> b,
                                                                              NestedDual<T, kGuarded> difference,
                                                                              NestedDual<T, kGuarded> sum) {
  const LogRatio<T> ratio = scalar_log_ratio(a.value, b.value, difference.value, sum.value);
  return {log_with_tangent(ratio.log, a, b), NestedDual<T, kGuarded>(ratio.tangent),
          NestedDual<T, kGuarded>(ratio.tail), ratio.near};
}

template <class T, bool kGuarded>
__device__ __forceinline__ Entropy<NestedDual<T, kGuarded>> scalar_entropy(NestedDual<T, kGuarded> a,
                                                                           NestedDual<T, kGuarded> m,
                                                                           NestedDual<T, kGuarded> difference,
                                                                           NestedDual<T, kGuarded> inverse) {
  const Entropy<T> entropy = scalar_entropy(a.value, m.value, difference.value, inverse.value);
  return {log_with_tangent(entropy.log, a, m), NestedDual<T, kGuarded>(entropy.value)};
}

// Relative entropy for numbers with a tangent; its `value` enters values only. In float it is computed without the
// quotient, which the tangents do not need either.
__device__ __forceinline__ RelativeEntropy<float> scalar_entropy_beside_tangents(float log_a, float log_b, float a,
                                                                                 float b) {
  return scalar_known_relative_entropy(a, b, log_a - log_b);
}
__device__ __forceinline__ RelativeEntropy<double> scalar_entropy_beside_tangents(double log_a, double log_b, double,
                                                                                  double) {
  return scalar_log_relative_entropy(log_a, log_b);
}
template <class T>
__device__ __forceinline__ RelativeEntropy<NestedDual<T>> scalar_log_relative_entropy(NestedDual<T> log_a,
                                                                                      NestedDual<T> log_b) {
  const T a = scalar_exp(log_a.value), b = scalar_exp(log_b.value);
  const RelativeEntropy<T> y = scalar_entropy_beside_tangents(log_a.value, log_b.value, a, b);
  const T of_a = scaled_tangent(a, log_a.tangent), of_b = scaled_tangent(b, log_b.tangent);
  const T of_product =
      scaled_tangent(log_a.value - log_b.value, of_a) + scaled_tangent(a, log_a.tangent - log_b.tangent);
  return {NestedDual<T>(y.value), {y.by_log_a, of_product}, {y.by_log_b, of_b - of_a}};
}

// ---------------------------------------------------------------------------------------------------------------------
// likelihood.cuh

// Second derivative of log(t!), trigamma(1 + t), for t >= 0: the recurrence leads up to where the asymptotic series has
// all digits.
template <class T>
__device__ __forceinline__ T scalar_trigamma_beyond(T t) {
  constexpr int kSteps = kSingle<T> ? 4 : 11;
  T sum = T(0);
#pragma unroll 1
  for (int k = 1; k <= kSteps; ++k) {
    const T inverse = scalar_divide_in_range(T(1), t + T(k));
    sum += inverse * inverse;
  }
  const T w = scalar_divide_in_range(T(1), t + T(kSteps + 1));
  const T z = w * w;
  const T series = scalar_polynomial(z, T(1.0 / 6), T(-1.0 / 30), T(1.0 / 42), T(-1.0 / 30), T(5.0 / 66),
                                     T(-691.0 / 2730), T(7.0 / 6));
  return sum + scalar_fma(w * z, series, scalar_fma(T(0.5), z, w));
}

// The field `value` enters values only, so it has no tangent.
template <class T, bool kGuarded>
__device__ __forceinline__ ValueAndSlope<NestedDual<T, kGuarded>> scalar_log_factorial(NestedDual<T, kGuarded> t) {
  const ValueAndSlope<T> x = scalar_log_factorial(t.value);
  return {NestedDual<T, kGuarded>(x.value),
          {x.slope, tangent_product<kGuarded>(scalar_trigamma_beyond(t.value), t.tangent)}};
}
template <class T, bool kGuarded>
__device__ __forceinline__ ValueAndSlope<NestedDual<T, kGuarded>> scalar_stirling_remainder(NestedDual<T, kGuarded> t) {
  const ValueAndSlope<T> x = scalar_stirling_remainder(t.value);
  const T change = scalar_trigamma_beyond(t.value) - scalar_divide_in_range(T(1), t.value);
  return {NestedDual<T, kGuarded>(x.value), {x.slope, tangent_product<kGuarded>(change, t.tangent)}};
}

// ---------------------------------------------------------------------------------------------------------------------
// robust.cuh

template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> scalar_limited(NestedDual<T, kGuarded> x) {
  const T limited = scalar_limited(x.value);
  return {limited, limited == x.value ? x.tangent : T(0)};
}

// The derivative of tanh(x) is not computed as 1 - tanh(x)^2, which would cancel.
template <class T, bool kGuarded>
__device__ __forceinline__ ValueAndSlope<NestedDual<T, kGuarded>> scalar_log_cosh(NestedDual<T, kGuarded> x) {
  const ValueAndSlope<T> y = scalar_log_cosh(x.value);
  const T e = scalar_exp(T(-2) * scalar_abs(x.value));
  const T sum = T(1) + e;
  return {NestedDual<T, kGuarded>(y.value),
          {y.slope, tangent_product<kGuarded>(scalar_divide_closely(T(4) * e, sum * sum), x.tangent)}};
}

template <class T, bool kGuarded>
__device__ __forceinline__ LogParts<NestedDual<T, kGuarded>> scalar_log_parts(NestedDual<T, kGuarded> x) {
  const LogParts<T> parts = scalar_log_parts(x.value);
  return {NestedDual<T, kGuarded>(parts.exponent), log_with_tangent(parts.remainder, x)};
}
template <class T, bool kGuarded>
__device__ __forceinline__ LogParts<NestedDual<T, kGuarded>> scalar_log1p_parts(NestedDual<T, kGuarded> u) {
  const LogParts<T> parts = scalar_log1p_parts(u.value);
  return {NestedDual<T, kGuarded>(parts.exponent),
          log_with_tangent(parts.remainder, NestedDual<T, kGuarded>(T(1) + u.value, u.tangent))};
}
template <class T, bool kGuarded>
__device__ __forceinline__ Scaled<NestedDual<T, kGuarded>> scalar_power(const LogParts<NestedDual<T, kGuarded>>& x,
                                                                        NestedDual<T, kGuarded> t) {
  const Scaled<T> power = scalar_power(LogParts<T>{x.exponent.value, x.remainder.value}, t.value);
  const T log = scalar_fma(x.exponent.value, T(0.69314718055994530942), x.remainder.value);
  const T rate = tangent_product<kGuarded>(log, t.tangent) + tangent_product<kGuarded>(t.value, x.remainder.tangent);
  return {{power.factor, tangent_product<kGuarded>(power.factor, rate)},
          NestedDual<T, kGuarded>(power.first),
          NestedDual<T, kGuarded>(power.second)};
}

// ---------------------------------------------------------------------------------------------------------------------
// The derivative of a loss along a direction (JVP), as a loss

// Returns y with the tangent that follows from its partial derivatives with respect to the operands x. For losses that
// write derivatives by hand: the computation of the value carries a different tangent.
template <class Y, class... X>
__device__ __forceinline__ Y with_tangents(const Y& y, const X&...) {
  return y;
}
template <class T, bool kGuarded, unsigned kMask, int... kSlot, class... X>
__device__ __forceinline__ auto with_given_partials(Dual<NestedDual<T, kGuarded>, kMask> y, Indices<kSlot...>,
                                                    const X&... x) {
  y.value.tangent =
      ((has<kMask>(kSlot) ? tangent_product<kGuarded>(y.tangent[kSlot].value, x.value.tangent) : T(0)) + ...);
  return y;
}
template <class T, bool kGuarded, unsigned kMask, class... X>
__device__ __forceinline__ auto with_tangents(const Dual<NestedDual<T, kGuarded>, kMask>& y, const X&... x) {
  return with_given_partials(y, typename MakeIndices<sizeof...(X)>::type{}, x...);
}

// Operands of `jvp`: with T = NestedDual, if an operand of the loss is differentiated, they carry their tangents;
// otherwise they are plain numbers. `slope` and `slope_tangent` read a derivative back.
template <class T>
struct OperandNumber {
  template <unsigned kMask, int kSlot>
  static __device__ __forceinline__ auto operand(T x, T) {
    return variable<kMask, kSlot>(x);
  }
  static __device__ __forceinline__ T slope(T x) {
    return x;
  }
  static __device__ __forceinline__ T slope_tangent(T) {
    return T(0);
  }
};
template <class T, bool kGuarded>
struct OperandNumber<NestedDual<T, kGuarded>> {
  template <unsigned kMask, int kSlot>
  static __device__ __forceinline__ auto operand(T x, T tangent) {
    return variable<kMask, kSlot>(NestedDual<T, kGuarded>{x, tangent});
  }
  static __device__ __forceinline__ T slope(NestedDual<T, kGuarded> x) {
    return x.value;
  }
  static __device__ __forceinline__ T slope_tangent(NestedDual<T, kGuarded> x) {
    return x.tangent;
  }
};

// Derivative of the loss L along a direction, sum over i of v_i dL/dx_i. `operands` are the operands x of L, followed
// by the tangents v of the operands in kHasTangent, in order. The derivative of the result with respect to v_i is
// dL/dx_i; with respect to x_k it is the tangent of dL/dx_k, and numbers are nested only if one of the latter is
// wanted. If the element is not active, a slope of 0 contributes 0, whatever the tangent is. A tentative evaluation
// does not guard products of tangents, so its value is NaN if the value of L or a derivative is not finite.
template <unsigned kHasTangent, class Base, int... kSlot, class... X>
__device__ __forceinline__ auto jvp(const Base& base, bool active, Indices<kSlot...>, const Tuple<X...>& operands) {
  using T = typename Base::Compute;
  constexpr int kOwn = sizeof...(kSlot);
  constexpr unsigned kMask = (X::kMask | ...);
  constexpr unsigned kTried = kMask & kTentative;
  constexpr unsigned kOfOwn = kMask & ((1u << kOwn) - 1u);
  using Number = Choose<kOfOwn != 0, NestedDual<T, kTried == 0>, T>;
  using G = OperandNumber<Number>;
  // The slot of each operand's tangent; the operand's own slot if it has none.
  constexpr int kTangentSlot[] = {has<kHasTangent>(kSlot) ? kOwn + count_bits(kHasTangent & ((1u << kSlot) - 1u))
                                                          : kSlot...};
  const T tangent[] = {has<kHasTangent>(kSlot) ? get<kTangentSlot[kSlot]>(operands).value : T(0)...};
  const auto z =
      base(G::template operand<kHasTangent | kOfOwn | kTried, kSlot>(get<kSlot>(operands).value, tangent[kSlot])...);
  const bool is_nan = kTried == 0 && G::slope(z.value) != G::slope(z.value);
  Dual<T, kMask> y;
  y.value = T(0);
  T sum = G::slope(z.value);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const T slope = is_nan ? G::slope(z.value) : G::slope(tangent_or_zero(z, i));
    if (has<kHasTangent>(i)) y.value += active ? slope * tangent[i] : scaled_tangent(slope, tangent[i]);
    if (has<kHasTangent>(i) && has<kMask>(kTangentSlot[i])) sum += y.tangent[kTangentSlot[i]] = slope;
    if (has<kOfOwn>(i)) sum += y.tangent[i] = G::slope_tangent(tangent_or_zero(z, i));
  }
  if constexpr (kTried != 0) y.value += sum - sum;
  return y;
}
template <unsigned kHasTangent, class Base, class... X>
__device__ __forceinline__ auto jvp(const Base& base, bool active, const X&... operands) {
  constexpr int kOwn = static_cast<int>(sizeof...(X)) - count_bits(kHasTangent);
  return jvp<kHasTangent>(base, active, typename MakeIndices<kOwn>::type{}, make_tuple(operands...));
}

// ---------------------------------------------------------------------------------------------------------------------
// Nested numbers for elements of several components

// The scalar type of a functor's operand, which is a dual number or a tuple of dual numbers.
template <class X>
struct NumberOf;
template <class T, unsigned kMask>
struct NumberOf<Dual<T, kMask>> {
  using type = T;
};
template <class First, class... Others>
struct NumberOf<Tuple<First, Others...>> : NumberOf<First> {};

// Nests x: its value gets the given tangent, or 0; its derivatives get the tangent 0.
template <class T, unsigned kMask>
__device__ __forceinline__ auto nest(const Dual<T, kMask>& x, T tangent) {
  using Number = NestedDual<T, (kMask & kTentative) == 0>;
  Dual<Number, kMask> y;
  y.value = {x.value, tangent};
  for_each_slot<kMask>([&](int k) { y.tangent[k] = Number(x.tangent[k], T(0)); });
  return y;
}
template <class T, unsigned kMask, unsigned kOther>
__device__ __forceinline__ auto nest(const Dual<T, kMask>& x, const Dual<T, kOther>& tangent) {
  return nest(x, tangent.value);
}
template <class T, unsigned kMask>
__device__ __forceinline__ auto nest(const Dual<T, kMask>& x) {
  return nest(x, T(0));
}
template <class... X, class... V, int... kIndex>
__device__ __forceinline__ auto nest(const Tuple<X...>& x, const Tuple<V...>& tangent, Indices<kIndex...>) {
  return make_tuple(nest(get<kIndex>(x), get<kIndex>(tangent))...);
}
template <class... X, class... V>
__device__ __forceinline__ auto nest(const Tuple<X...>& x, const Tuple<V...>& tangent) {
  return nest(x, tangent, typename MakeIndices<sizeof...(X)>::type{});
}
template <class... X, int... kIndex>
__device__ __forceinline__ auto nest(const Tuple<X...>& x, Indices<kIndex...>) {
  return make_tuple(nest(get<kIndex>(x))...);
}
template <class... X>
__device__ __forceinline__ auto nest(const Tuple<X...>& x) {
  return nest(x, typename MakeIndices<sizeof...(X)>::type{});
}

// Turns the nested value z of a loss into the derivative of the loss along the direction, whose derivatives are the
// tangents of the loss's derivatives. In a tentative evaluation it is NaN where the value of the loss or one of these
// tangents is not finite.
template <class T, bool kGuarded, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> along_direction(const Dual<NestedDual<T, kGuarded>, kMask>& z) {
  Dual<T, kMask> y;
  y.value = z.value.value != z.value.value ? z.value.value : z.value.tangent;
  T sum = z.value.value;
  for_each_slot<kMask>([&](int k) { sum += y.tangent[k] = z.tangent[k].tangent; });
  if constexpr ((kMask & kTentative) != 0) y.value = z.value.tangent + (sum - sum);
  return y;
}
