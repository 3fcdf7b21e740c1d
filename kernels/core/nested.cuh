// Second derivatives: numbers that carry their derivative along one direction, as the numbers of a dual.
//
//   Dual<Nest<T>, kMask>    dL/dx_k, and how it changes along v:    sum over i of v_i d^2 L / dx_k dx_i
//
// The primitives are templates, and take a Nest<T> for T; what they call on numbers is overloaded here, and found where
// they are instantiated, because all of it is global. A value is computed by the same functions as that of a T, bit for
// bit, and how it changes from its slopes. So a value is what the first derivative promises, conventions at kinks
// included, and only the partial derivatives of a primitive are differentiated as they are written.
//
// A slope of 0, and what does not move, count for nothing: 0 * inf does not arise.
#pragma once
#include "core/tuple.cuh"
#include "primitives/primitives.cuh"

template <class T>
struct Nest {
  T value;
  T along;

  Nest() = default;
  __device__ constexpr Nest(T value_, T along_) : value(value_), along(along_) {
  }
  template <class Literal>
  __device__ explicit constexpr Nest(Literal x) : value(static_cast<T>(x)), along(static_cast<T>(0)) {
  }
  // What is stored of it: the derivative.
  template <class Stored>
  __device__ __forceinline__ explicit operator Stored() const {
    return static_cast<Stored>(along);
  }

  __device__ __forceinline__ Nest& operator+=(Nest x) {
    return *this = *this + x;
  }
  __device__ __forceinline__ Nest& operator-=(Nest x) {
    return *this = *this - x;
  }
  __device__ __forceinline__ Nest& operator*=(Nest x) {
    return *this = *this * x;
  }
};

template <class T>
constexpr bool kSingle<Nest<T>> = kSingle<T>;

template <class T>
__device__ __forceinline__ T moved(T slope, T along) {
  return slope == T(0) || along == T(0) ? T(0) : slope * along;
}

template <class T>
__device__ __forceinline__ Nest<T> with_slopes(Nest<T> value, Nest<T> slope, Nest<T> x) {
  return {value.value, moved(slope.value, x.along)};
}
template <class T, class... Ts>
__device__ __forceinline__ Nest<T> with_slopes(Nest<T> value, Nest<T> slope, Nest<T> x, Ts... others) {
  return {value.value, moved(slope.value, x.along) + with_slopes(value, others...).along};
}
template <class T>
__device__ __forceinline__ Nest<T> fixed_if(bool condition, Nest<T> x) {
  return {x.value, condition ? T(0) : x.along};
}
template <class T>
__device__ __forceinline__ Nest<T> undefined(Nest<T> nan) {
  return {nan.value, nan.value};
}
template <class T>
__device__ __forceinline__ bool same(Nest<T> x, Nest<T> y) {
  return x.value == y.value && x.along == y.along;
}
template <class T>
__device__ __forceinline__ bool vanishes(Nest<T> x) {
  return x.value == T(0) && x.along == T(0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Arithmetic

template <class T>
__device__ __forceinline__ Nest<T> operator-(Nest<T> x) {
  return {-x.value, -x.along};
}
template <class T>
__device__ __forceinline__ Nest<T> operator+(Nest<T> x, Nest<T> y) {
  return {x.value + y.value, x.along + y.along};
}
template <class T>
__device__ __forceinline__ Nest<T> operator-(Nest<T> x, Nest<T> y) {
  return {x.value - y.value, x.along - y.along};
}
template <class T>
__device__ __forceinline__ Nest<T> operator*(Nest<T> x, Nest<T> y) {
  return {x.value * y.value, moved(y.value, x.along) + moved(x.value, y.along)};
}

// x / y, of which the quotient is known.
template <class T>
__device__ __forceinline__ Nest<T> quotient_of(T quotient, Nest<T> x, Nest<T> y) {
  const T rest = x.along - moved(quotient, y.along);
  return {quotient, rest == T(0) ? T(0) : scalar_divide_in_range(rest, y.value)};
}
template <class T>
__device__ __forceinline__ Nest<T> operator/(Nest<T> x, Nest<T> y) {
  return quotient_of(x.value / y.value, x, y);
}
template <class T>
__device__ __forceinline__ Nest<T> scalar_divide(Nest<T> x, Nest<T> y) {
  return quotient_of(scalar_divide(x.value, y.value), x, y);
}
template <class T>
__device__ __forceinline__ Nest<T> scalar_divide_roughly(Nest<T> x, Nest<T> y) {
  return quotient_of(scalar_divide_roughly(x.value, y.value), x, y);
}
template <class T>
__device__ __forceinline__ Nest<T> scalar_divide_closely(Nest<T> x, Nest<T> y) {
  return quotient_of(scalar_divide_closely(x.value, y.value), x, y);
}
template <class T>
__device__ __forceinline__ Nest<T> scalar_divide_in_range(Nest<T> x, Nest<T> y) {
  return quotient_of(scalar_divide_in_range(x.value, y.value), x, y);
}
template <class T>
__device__ __forceinline__ Nest<T> scalar_fma(Nest<T> x, Nest<T> y, Nest<T> z) {
  return {scalar_fma(x.value, y.value, z.value), moved(y.value, x.along) + moved(x.value, y.along) + z.along};
}

template <class T>
__device__ __forceinline__ bool operator<(Nest<T> x, Nest<T> y) {
  return x.value < y.value;
}
template <class T>
__device__ __forceinline__ bool operator>(Nest<T> x, Nest<T> y) {
  return x.value > y.value;
}
template <class T>
__device__ __forceinline__ bool operator<=(Nest<T> x, Nest<T> y) {
  return x.value <= y.value;
}
template <class T>
__device__ __forceinline__ bool operator>=(Nest<T> x, Nest<T> y) {
  return x.value >= y.value;
}
template <class T>
__device__ __forceinline__ bool operator==(Nest<T> x, Nest<T> y) {
  return x.value == y.value;
}
template <class T>
__device__ __forceinline__ bool operator!=(Nest<T> x, Nest<T> y) {
  return x.value != y.value;
}

// ---------------------------------------------------------------------------------------------------------------------
// scalars.cuh

// At 0 as to the right of it: primitives ask for x < 0 where a side matters, and what |x| stands in is smooth there.
template <class T>
__device__ __forceinline__ Nest<T> scalar_abs(Nest<T> x) {
  return {scalar_abs(x.value), x.value < T(0) ? -x.along : x.along};
}
template <class T>
__device__ __forceinline__ Nest<T> scalar_sign(Nest<T> x) {
  return {scalar_sign(x.value), T(0)};
}
template <class T>
__device__ __forceinline__ Nest<T> computed(Nest<T> x) {
  return {computed(x.value), x.along};
}
template <class T>
__device__ __forceinline__ Nest<T> min(Nest<T> x, Nest<T> y) {
  return {min(x.value, y.value), x.value < y.value ? x.along : y.along};
}
template <class T>
__device__ __forceinline__ Nest<T> copysign(Nest<T> x, Nest<T> y) {
  const T value = copysign(x.value, y.value);
  return {value, value == x.value ? x.along : -x.along};
}
template <class T>
__device__ __forceinline__ Nest<T> scalar_largest(Nest<T>) {
  return {scalar_largest(T()), T(0)};
}
template <class T>
__device__ __forceinline__ Nest<T> scalar_nan(Nest<T>) {
  return {scalar_nan(T()), T(0)};
}
template <class T>
__device__ __forceinline__ Nest<T> scalar_exp(Nest<T> x) {
  const T y = scalar_exp(x.value);
  return {y, moved(y, x.along)};
}
template <class T>
__device__ __forceinline__ Nest<T> scalar_expm1(Nest<T> x) {
  return {scalar_expm1(x.value), moved(scalar_exp(x.value), x.along)};
}

// A logarithm, of which x is what it is taken of.
template <class T>
__device__ __forceinline__ Nest<T> log_of(T log, Nest<T> x) {
  return {log, x.along == T(0) ? T(0) : scalar_divide_in_range(x.along, x.value)};
}
template <class T>
__device__ __forceinline__ Nest<T> scalar_log(Nest<T> x) {
  return log_of(scalar_log(x.value), x);
}
template <class T>
__device__ __forceinline__ Nest<T> scalar_log1p(Nest<T> x) {
  return log_of(scalar_log1p(x.value), Nest<T>(T(1) + x.value, x.along));
}
template <class T>
__device__ __forceinline__ Nest<T> scalar_rsqrt(Nest<T> x) {
  const T y = scalar_rsqrt(x.value);
  return {y, T(-0.5) * moved(y * y * y, x.along)};
}
template <class T>
__device__ __forceinline__ Nest<T> scalar_complement(Nest<T> z, Nest<T> e) {
  return {scalar_complement(z.value, e.value), moved(e.value, z.along)};
}

// ---------------------------------------------------------------------------------------------------------------------
// math.cuh

template <class T, unsigned kMask>
__device__ __forceinline__ Dual<Nest<T>, 0> zero_unless_nan(const Dual<Nest<T>, kMask>& x) {
  Dual<Nest<T>, 0> y;
  y.value = Nest<T>(x.value.value != x.value.value ? x.value.value : T(0));
  return y;
}

template <class T>
__device__ __forceinline__ T finite_or_zero(T x) {
  return scalar_abs(x) <= scalar_largest(T()) ? x : T(0);
}

// An x of weight 0 counts for nothing. But it is the derivative with respect to the weight, which moves as x does: by
// derivatives that count where they and x are finite.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<Nest<T>, kA | kB> weighted(const Dual<Nest<T>, kA>& weight,
                                                           const Dual<Nest<T>, kB>& x) {
  const bool unused = weight.value.value == T(0);
  const bool defined = scalar_abs(x.value.value) <= scalar_largest(T());
  Dual<Nest<T>, kB> counted = x;
  if (unused) {
    counted.value = defined ? Nest<T>(x.value.value, finite_or_zero(x.value.along)) : Nest<T>(0);
#pragma unroll
    for (int k = 0; k < kMaxOperands; ++k) {
      if (has<kB>(k)) counted.tangent[k] = Nest<T>(defined ? finite_or_zero(x.tangent[k].value) : T(0));
    }
  }
  return chain(weight, counted, unused ? Nest<T>(0) : weight.value * x.value, counted.value, weight.value);
}

// ---------------------------------------------------------------------------------------------------------------------
// logistic.cuh

template <class T>
__device__ __forceinline__ Nest<T> scalar_log_beyond_linear(Nest<T> p) {
  return {scalar_log_beyond_linear(p.value), moved(scalar_divide_roughly(p.value, T(1) - p.value), p.along)};
}

template <class T>
__device__ __forceinline__ Logs<Nest<T>> scalar_minus_logs(Nest<T> p) {
  const Logs<T> logs = scalar_minus_logs(p.value);
  const T per_p = min(scalar_divide_roughly(T(1), p.value), T(1e12));
  const T per_not_p = min(scalar_divide_roughly(T(1), T(1) - p.value), T(1e12));
  return {{logs.success, -moved(per_p, p.along)}, {logs.failure, moved(per_not_p, p.along)}};
}

template <class T>
__device__ __forceinline__ Logistic<Nest<T>> scalar_logistic(Nest<T> x) {
  const Logistic<T> at = scalar_logistic(x.value);
  const T outwards = x.value < T(0) ? -x.along : x.along;
  const T change = moved(at.larger * at.smaller, outwards);
  return {{at.excess, -moved(at.smaller, outwards)}, {at.larger, change}, {at.smaller, -change}};
}

// ---------------------------------------------------------------------------------------------------------------------
// focal.cuh

template <class T>
__device__ __forceinline__ Fraction<Nest<T>> scalar_fraction(Nest<T> n, Nest<T> e) {
  const Fraction<T> x = scalar_fraction(n.value, e.value);
  return {quotient_of(x.value, n, Nest<T>(1) + e), {x.rest, T(0)}};
}

// The exponent is a parameter, which does not move.
template <class T>
__device__ __forceinline__ Power<Nest<T>> scalar_power(const Fraction<Nest<T>>& x, Nest<T> t) {
  const Power<T> power = scalar_power(Fraction<T>{x.value.value, x.rest.value}, t.value);
  T along = t.value == T(1) ? x.value.along : T(0);
  if (x.value.value > T(0)) along = moved(power.first * t.value, scalar_divide_in_range(x.value.along, x.value.value));
  return {{power.first, along}, {power.second, T(0)}};
}

template <class T>
__device__ __forceinline__ Nest<T> scalar_minus_log_of_rest(Nest<T> q, Nest<T> rest) {
  return {scalar_minus_log_of_rest(q.value, rest.value), scalar_divide_in_range(q.along, rest.value)};
}

template <class T>
__device__ __forceinline__ Nest<T> scalar_integral(Nest<T> s, Nest<T> q, Nest<T> inverse, Nest<T> e) {
  return {scalar_integral(s.value, q.value, inverse.value, e.value), moved(e.value, s.along)};
}

// ---------------------------------------------------------------------------------------------------------------------
// divergence.cuh

// log(a / b), known.
template <class T>
__device__ __forceinline__ Nest<T> log_of(T log, Nest<T> a, Nest<T> b) {
  return {log, log_of(log, a).along - log_of(log, b).along};
}

template <class T>
__device__ __forceinline__ Nest<T> scalar_log_difference(Nest<T> a, Nest<T> b) {
  return log_of(scalar_log_difference(a.value, b.value), a, b);
}

template <class T>
__device__ __forceinline__ Ratio<Nest<T>> scalar_ratio(Nest<T> a, Nest<T> b) {
  const Ratio<T> ratio = scalar_ratio(a.value, b.value);
  return {quotient_of(ratio.quotient, a, b), log_of(ratio.log, a, b)};
}

// All but the logarithm stands in values alone.
template <class T>
__device__ __forceinline__ LogRatio<Nest<T>> scalar_log_ratio(Nest<T> a, Nest<T> b, Nest<T> difference, Nest<T> sum) {
  const LogRatio<T> ratio = scalar_log_ratio(a.value, b.value, difference.value, sum.value);
  return {log_of(ratio.log, a, b), Nest<T>(ratio.tangent), Nest<T>(ratio.tail), ratio.near};
}

template <class T>
__device__ __forceinline__ Entropy<Nest<T>> scalar_entropy(Nest<T> a, Nest<T> m, Nest<T> difference, Nest<T> inverse) {
  const Entropy<T> entropy = scalar_entropy(a.value, m.value, difference.value, inverse.value);
  return {log_of(entropy.log, a, m), Nest<T>(entropy.value)};
}

// ---------------------------------------------------------------------------------------------------------------------
// likelihood.cuh

// The second derivative of log(t!), trigamma(1 + t), for t >= 0: upwards by whole steps, to where its asymptotic series
// has all digits.
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

// The values stand in values alone.
template <class T>
__device__ __forceinline__ Point<Nest<T>> scalar_log_factorial(Nest<T> t) {
  const Point<T> x = scalar_log_factorial(t.value);
  return {Nest<T>(x.value), {x.slope, moved(scalar_trigamma_beyond(t.value), t.along)}};
}
template <class T>
__device__ __forceinline__ Point<Nest<T>> scalar_stirling_remainder(Nest<T> t) {
  const Point<T> x = scalar_stirling_remainder(t.value);
  const T change = scalar_trigamma_beyond(t.value) - scalar_divide_in_range(T(1), t.value);
  return {Nest<T>(x.value), {x.slope, moved(change, t.along)}};
}

// ---------------------------------------------------------------------------------------------------------------------
// robust.cuh

template <class T>
__device__ __forceinline__ Nest<T> scalar_limited(Nest<T> x) {
  const T limited = scalar_limited(x.value);
  return {limited, limited == x.value ? x.along : T(0)};
}

// 1 - tanh(x)^2 would cancel.
template <class T>
__device__ __forceinline__ Point<Nest<T>> scalar_log_cosh(Nest<T> x) {
  const Point<T> y = scalar_log_cosh(x.value);
  const T e = scalar_exp(T(-2) * scalar_abs(x.value));
  const T sum = T(1) + e;
  return {Nest<T>(y.value), {y.slope, moved(scalar_divide_closely(T(4) * e, sum * sum), x.along)}};
}

template <class T>
__device__ __forceinline__ LogParts<Nest<T>> scalar_log_parts(Nest<T> x) {
  const LogParts<T> parts = scalar_log_parts(x.value);
  return {Nest<T>(parts.exponent), log_of(parts.rest, x)};
}
template <class T>
__device__ __forceinline__ LogParts<Nest<T>> scalar_log1p_parts(Nest<T> u) {
  const LogParts<T> parts = scalar_log1p_parts(u.value);
  return {Nest<T>(parts.exponent), log_of(parts.rest, Nest<T>(T(1) + u.value, u.along))};
}
template <class T>
__device__ __forceinline__ Scaled<Nest<T>> scalar_power(const LogParts<Nest<T>>& x, Nest<T> t) {
  const Scaled<T> power = scalar_power(LogParts<T>{x.exponent.value, x.rest.value}, t.value);
  const T log = scalar_fma(x.exponent.value, T(0.69314718055994530942), x.rest.value);
  const T rate = moved(log, t.along) + moved(t.value, x.rest.along);
  return {{power.factor, moved(power.factor, rate)}, Nest<T>(power.first), Nest<T>(power.second)};
}

// ---------------------------------------------------------------------------------------------------------------------
// The derivative of a loss along a direction, as a loss

__host__ __device__ constexpr int count_bits(unsigned bits) {
  return bits == 0 ? 0 : static_cast<int>(bits & 1u) + count_bits(bits >> 1);
}

// y, whose derivatives are given by hand in part, so that it does not move as it was computed; x are the operands.
template <class Y, class... X>
__device__ __forceinline__ Y with_directions(const Y& y, const X&...) {
  return y;
}
template <class T, unsigned kMask, int... kSlot, class... X>
__device__ __forceinline__ Dual<Nest<T>, kMask> moved_as_given(Dual<Nest<T>, kMask> y, Indices<kSlot...>,
                                                               const X&... x) {
  y.value.along = ((has<kMask>(kSlot) ? moved(y.tangent[kSlot].value, x.value.along) : T(0)) + ...);
  return y;
}
template <class T, unsigned kMask, class... X>
__device__ __forceinline__ Dual<Nest<T>, kMask> with_directions(const Dual<Nest<T>, kMask>& y, const X&... x) {
  return moved_as_given(y, typename MakeIndices<sizeof...(X)>::type{}, x...);
}

// An operand and, where it has one, its direction: the operand's own number where none is differentiated, else nested.
template <class T>
struct Given {
  template <unsigned kMask, int kSlot>
  static __device__ __forceinline__ auto operand(T x, T) {
    return variable<kMask, kSlot>(x);
  }
  static __device__ __forceinline__ T slope(T x) {
    return x;
  }
  static __device__ __forceinline__ T slope_along(T) {
    return T(0);
  }
};
template <class T>
struct Given<Nest<T>> {
  template <unsigned kMask, int kSlot>
  static __device__ __forceinline__ auto operand(T x, T along) {
    return variable<kMask, kSlot>(Nest<T>{x, along});
  }
  static __device__ __forceinline__ T slope(Nest<T> x) {
    return x.value;
  }
  static __device__ __forceinline__ T slope_along(Nest<T> x) {
    return x.along;
  }
};

template <bool kCondition, class A, class B>
struct Choose {
  using type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using type = B;
};

// The sum over i of v_i dL/dx_i, given the operands x of the loss L and then the directions v of those in kAlong, in
// order. Its derivatives are dL/dx_i with respect to v_i, and along the direction those of dL/dx_k with respect to x_k:
// only for these are numbers nested. Where an element does not count, a slope of 0 is 0 along whatever the direction
// holds.
template <unsigned kAlong, class Base, int... kSlot, class... X>
__device__ __forceinline__ auto directional(const Base& base, bool counts, Indices<kSlot...>,
                                            const Tuple<X...>& given) {
  using T = typename Base::Compute;
  constexpr int kOwn = sizeof...(kSlot);
  constexpr unsigned kMask = (X::kMask | ...);
  constexpr unsigned kOfOwn = kMask & ((1u << kOwn) - 1u);
  using Number = typename Choose<kOfOwn != 0, Nest<T>, T>::type;
  using G = Given<Number>;
  // The slot of the direction of an operand; without one, its own.
  constexpr int kDirection[] = {has<kAlong>(kSlot) ? kOwn + count_bits(kAlong & ((1u << kSlot) - 1u)) : kSlot...};
  const T direction[] = {has<kAlong>(kSlot) ? get<kDirection[kSlot]>(given).value : T(0)...};
  const auto z = base(G::template operand<kAlong | kOfOwn, kSlot>(get<kSlot>(given).value, direction[kSlot])...);
  const bool undefined = G::slope(z.value) != G::slope(z.value);
  Dual<T, kMask> y;
  y.value = T(0);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const T slope = undefined ? G::slope(z.value) : G::slope(tangent_or_zero(z, i));
    if (has<kAlong>(i)) y.value += counts ? slope * direction[i] : moved(slope, direction[i]);
    if (has<kAlong>(i) && has<kMask>(kDirection[i])) y.tangent[kDirection[i]] = slope;
    if (has<kOfOwn>(i)) y.tangent[i] = G::slope_along(tangent_or_zero(z, i));
  }
  return y;
}
template <unsigned kAlong, class Base, class... X>
__device__ __forceinline__ auto directional(const Base& base, bool counts, const X&... given) {
  constexpr int kOwn = static_cast<int>(sizeof...(X)) - count_bits(kAlong);
  return directional<kAlong>(base, counts, typename MakeIndices<kOwn>::type{}, make_tuple(given...));
}
