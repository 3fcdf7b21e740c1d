// The primitives that losses are composed of, on dual numbers: each with its correct derivative and its convention at
// kinks. A loss written with them needs no derivative of its own.
//
// Order of cases: NaN, the interior, the convention at the boundary. NaN propagates into value and derivative.
#pragma once
#include "core/dual.cuh"

template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> square(const Dual<T, kMask>& x) {
  return chain(x, x.value * x.value, x.value + x.value);
}

// |x|, derivative 0 at 0.
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> abs(const Dual<T, kMask>& x) {
  return chain(x, scalar_abs(x.value), scalar_sign(x.value));
}

template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> exp(const Dual<T, kMask>& x) {
  const T y = scalar_exp(x.value);
  return chain(x, y, y);
}

template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> log(const Dual<T, kMask>& x) {
  return chain(x, scalar_log(x.value), scalar_divide(T(1), x.value));
}

// x^2 / 2. It overflows only if the result does, not where x^2 does.
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> half_square(const Dual<T, kMask>& x) {
  return chain(x, x.value * (T(0.5) * x.value), x.value);
}

// log(1 + x)
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> log1p(const Dual<T, kMask>& x) {
  return chain(x, scalar_log1p(x.value), scalar_divide_roughly(T(1), x.value + T(1)));
}

// d^2 / (2 v). The factor 1/2 belongs to the primitive, so that neither the value nor the derivative with respect to d
// overflows on the way.
template <class T, unsigned kD, unsigned kV>
__device__ __forceinline__ Dual<T, kD | kV> half_square_over(const Dual<T, kD>& d, const Dual<T, kV>& v) {
  const T ratio = scalar_divide(d.value, v.value);
  const T half = T(0.5) * ratio;
  return chain(d, v, d.value * half, ratio, -(half * ratio));
}

// max(x, floor). The derivative is 1 everywhere, also below the floor, as for a clamp outside of the autograd graph.
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> at_least(const Dual<T, kMask>& x, const Dual<T, 0>& floor) {
  return chain(x, x.value < floor.value ? floor.value : x.value, T(1));
}

// x if the condition holds, otherwise NaN: for operands outside of the domain of a loss.
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> nan_unless(bool condition, const Dual<T, kMask>& x) {
  return chain(x, condition ? x.value : scalar_nan(T()), T(1));
}

// `condition ? a : b`, tangents included: the branch that is not chosen cannot leak, not even as 0 * inf.
template <class A, class B, class T = typename ScalarOf<A, B>::type>
__device__ __forceinline__ auto where(bool condition, const A& a, const B& b) {
  const auto x = lift<T>(a);
  const auto y = lift<T>(b);
  constexpr unsigned kMask = decltype(x + y)::kMask;
  Dual<T, kMask> z;
  z.value = condition ? x.value : y.value;
  for_each_slot<kMask>([&](int k) { z.tangent[k] = condition ? tangent_or_zero(x, k) : tangent_or_zero(y, k); });
  return z;
}

// `where` for two literals, which take the arithmetic type of the expression around them.
__device__ __forceinline__ double where(bool condition, double a, double b) {
  return condition ? a : b;
}

// max(x, 0). The derivative at 0 is 1, as for torch's clamp(min=0).
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> relu_active(const Dual<T, kMask>& x) {
  return where(x.value < T(0), constant<T>(0), x);
}

// max(x, 0). The derivative at 0 is 0, as for a hinge that only counts the excess over 0.
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> relu_inactive(const Dual<T, kMask>& x) {
  return where(x.value <= T(0), constant<T>(0), x);
}

// `value` with the derivatives of a if `takes_a`, those of b if `takes_b`, and otherwise, where a equals b, half of the
// derivatives of both.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> either(T value, bool takes_a, bool takes_b, const Dual<T, kA>& a,
                                                   const Dual<T, kB>& b) {
  const T tied = a.value == b.value ? T(0.5) : value;  // NaN if either is NaN
  Dual<T, kA | kB> y;
  y.value = value;
  for_each_slot<kA | kB>([&](int k) {
    // The operand that is not chosen cannot leak, not even as 0 * inf.
    T of_a = T(0), of_b = T(0);
    if (has<kA>(k)) of_a = takes_a ? a.tangent[k] : (takes_b ? T(0) : tied * a.tangent[k]);
    if (has<kB>(k)) of_b = takes_b ? b.tangent[k] : (takes_a ? T(0) : tied * b.tangent[k]);
    y.tangent[k] = has<kA>(k) && has<kB>(k) ? of_a + of_b : (has<kA>(k) ? of_a : of_b);
  });
  return y;
}

// min(a, b). Where a equals b, each has the derivative 1/2.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> smaller(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  return either(smaller_or_nan(a.value, b.value), a.value < b.value, b.value < a.value, a, b);
}

// max(a, b). Where a equals b, each has the derivative 1/2.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> larger(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  return either(larger_or_nan(a.value, b.value), a.value > b.value, b.value > a.value, a, b);
}

// 0, or NaN if x is NaN: the value of "0 times x" where infinities count as finite.
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, 0> zero_unless_nan(const Dual<T, kMask>& x) {
  return constant<T>(x.value != x.value ? x.value : T(0));
}

// weight * x. An x of weight 0 contributes nothing, infinities and NaN included. The derivative with respect to a
// weight of 0 is x if that is finite, so that a weight can be learned from 0.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> weighted(const Dual<T, kA>& weight, const Dual<T, kB>& x) {
  // A tentative x may be NaN although its true value is finite, and the derivative with respect to the weight needs the
  // true value.
  constexpr bool kMustKnow = (kB & kTentative) != 0 && kDifferentiated<kA>;
  const bool unused = weight.value == T(0) && (!kMustKnow || is_finite(x.value));
  const T partial = unused && !(scalar_abs(x.value) <= scalar_max(T())) ? T(0) : x.value;
  Dual<T, kA | kB> y;
  y.value = unused ? T(0) : weight.value * x.value;
  for_each_slot<kA>([&](int k) { y.tangent[k] = partial * weight.tangent[k]; });
  for_each_slot<kB>([&](int k) {
    const T by_x = unused ? T(0) : weight.value * x.tangent[k];
    y.tangent[k] = has<kA>(k) ? y.tangent[k] + by_x : by_x;
  });
  return y;
}
