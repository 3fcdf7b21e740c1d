// Dual numbers: a value together with its derivatives with respect to the differentiated operands.
//
//   f(x + dx) = f(x) + f'(x) dx,   carried through every primitive of a loss.
//
// `Dual<T, kMask>` carries a tangent for each operand whose bit is set in kMask and none for the others, known when the
// kernel is compiled. A tangent that is structurally zero is therefore never multiplied: `0 * inf` cannot leak a NaN
// from one operand's gradient into another's, and a kernel that needs one gradient computes one. With kMask = 0 this is
// the plain value, so the value is computed by the same code, bit for bit, with and without gradients.
//
// Literals in an expression (`0.5 * d`) take the arithmetic type of the operand beside them.
#pragma once
#include "core/scalars.cuh"

constexpr int kMaxOperands = 12;  // definition/base.py: MAX_OPERANDS, and as many tangents

// A bit of masks that all numbers of a tentative evaluation have. In it a primitive may leave out what only edges of
// its domain need, if the value of the loss is infinite or NaN there: then it is evaluated again, without this bit. A
// primitive that does not look at the bit gives the same result either way.
constexpr unsigned kTentative = 1u << 31;

// True if a primitive may take a form of its own for tentative evaluation that fits polynomials: of these only the
// value is good to 2^-16, so not if T is a number with a tangent.
template <class T, unsigned kMask>
constexpr bool kTentativeFit = (kMask & kTentative) != 0 && !kHasTangent<T>;

template <class T, unsigned kMask_>
struct Dual {
  using Scalar = T;
  static constexpr unsigned kMask = kMask_;
  T value;
  T tangent[kMaxOperands];  // slots outside kMask are never read or written
};

template <unsigned kMask>
__device__ __forceinline__ constexpr bool has(int slot) {
  return (kMask >> slot) & 1u;
}

// True if a number of such a mask depends on a differentiated operand.
template <unsigned kMask>
constexpr bool kDifferentiated = (kMask & ~kTentative) != 0;

// The operand in slot kSlot, differentiated if kMask has its bit.
template <unsigned kMask, int kSlot, class T>
__device__ __forceinline__ Dual<T, kMask & (1u << kSlot | kTentative)> variable(T value) {
  Dual<T, kMask & (1u << kSlot | kTentative)> x;
  x.value = value;
  if constexpr (has<kMask>(kSlot)) x.tangent[kSlot] = T(1);
  return x;
}

template <class T>
__device__ __forceinline__ Dual<T, 0> constant(double value) {
  Dual<T, 0> x;
  x.value = static_cast<T>(value);
  return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// Mixed arguments: a dual and a literal, or duals with different masks

template <class A>
struct IsDual {
  static constexpr bool value = false;
};
template <class T, unsigned kMask>
struct IsDual<Dual<T, kMask>> {
  static constexpr bool value = true;
};

template <bool kCondition, class T>
struct EnableIf {};
template <class T>
struct EnableIf<true, T> {
  using type = T;
};

// The arithmetic type of two arguments of which at least one is a dual number. Otherwise there is no type, which
// removes the overload.
template <class A, class B, bool kA = IsDual<A>::value, bool kB = IsDual<B>::value>
struct ScalarOf {};
template <class A, class B, bool kB>
struct ScalarOf<A, B, true, kB> {
  using type = typename A::Scalar;
};
template <class A, class B>
struct ScalarOf<A, B, false, true> {
  using type = typename B::Scalar;
};

template <class T, unsigned kMask>
__device__ __forceinline__ const Dual<T, kMask>& lift(const Dual<T, kMask>& x) {
  return x;
}
template <class T, class Literal>
__device__ __forceinline__ Dual<T, 0> lift(Literal x) {
  return constant<T>(static_cast<double>(x));
}

// ---------------------------------------------------------------------------------------------------------------------
// The chain rule: every primitive is one of these with its value and partial derivatives

template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> chain(const Dual<T, kMask>& a, T value, T partial) {
  Dual<T, kMask> y;
  y.value = with_partials(value, partial, a.value);
#pragma unroll
  for (int k = 0; k < kMaxOperands; ++k) {
    if (has<kMask>(k)) y.tangent[k] = partial * a.tangent[k];
  }
  return y;
}

template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> chain(const Dual<T, kA>& a, const Dual<T, kB>& b, T value, T partial_a,
                                                  T partial_b) {
  Dual<T, kA | kB> y;
  y.value = with_partials(value, partial_a, a.value, partial_b, b.value);
#pragma unroll
  for (int k = 0; k < kMaxOperands; ++k) {
    if (has<kA & kB>(k)) {
      y.tangent[k] = partial_a * a.tangent[k] + partial_b * b.tangent[k];
    } else if (has<kA>(k)) {
      y.tangent[k] = partial_a * a.tangent[k];
    } else if (has<kB>(k)) {
      y.tangent[k] = partial_b * b.tangent[k];
    }
  }
  return y;
}

template <class T, unsigned kA, unsigned kB, unsigned kC>
__device__ __forceinline__ Dual<T, kA | kB | kC> chain(const Dual<T, kA>& a, const Dual<T, kB>& b, const Dual<T, kC>& c,
                                                       T value, T partial_a, T partial_b, T partial_c) {
  return chain(chain(a, b, value, partial_a, partial_b), c, value, T(1), partial_c);
}

// The tangent of x in a slot, 0 if its mask lacks the slot.
template <class T, unsigned kMask>
__device__ __forceinline__ T tangent_or_zero(const Dual<T, kMask>& x, int slot) {
  return has<kMask>(slot) ? x.tangent[slot] : T(0);
}

// y with a derivative with respect to the operand x that the definition gives by hand, in place of the chain rule's.
// Only if x is differentiated.
template <class T, unsigned kMask, unsigned kX, unsigned kOther>
__device__ __forceinline__ Dual<T, kMask | kX> with_derivative(const Dual<T, kMask>& y, const Dual<T, kX>&,
                                                               const Dual<T, kOther>& derivative) {
  Dual<T, kMask | kX> z;
  z.value = y.value;
#pragma unroll
  for (int k = 0; k < kMaxOperands; ++k) {
    if (has<kX>(k)) {
      z.tangent[k] = derivative.value;
    } else if (has<kMask>(k)) {
      z.tangent[k] = y.tangent[k];
    }
  }
  return z;
}

// ---------------------------------------------------------------------------------------------------------------------
// Operators

template <class A, class B, class T = typename ScalarOf<A, B>::type>
__device__ __forceinline__ auto operator+(const A& a, const B& b) {
  const auto x = lift<T>(a);
  const auto y = lift<T>(b);
  return chain(x, y, x.value + y.value, T(1), T(1));
}

template <class A, class B, class T = typename ScalarOf<A, B>::type>
__device__ __forceinline__ auto operator-(const A& a, const B& b) {
  const auto x = lift<T>(a);
  const auto y = lift<T>(b);
  return chain(x, y, x.value - y.value, T(1), T(-1));
}

template <class A, class B, class T = typename ScalarOf<A, B>::type>
__device__ __forceinline__ auto operator*(const A& a, const B& b) {
  const auto x = lift<T>(a);
  const auto y = lift<T>(b);
  return chain(x, y, x.value * y.value, y.value, x.value);
}

template <class A, class B, class T = typename ScalarOf<A, B>::type>
__device__ __forceinline__ auto operator/(const A& a, const B& b) {
  const auto x = lift<T>(a);
  const auto y = lift<T>(b);
  const T quotient = scalar_divide(x.value, y.value);
  return chain(x, y, quotient, scalar_divide(T(1), y.value), -scalar_divide(quotient, y.value));
}

template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> operator-(const Dual<T, kMask>& x) {
  return chain(x, -x.value, T(-1));
}

// Comparisons compare values only.
template <class A, class B, class T = typename ScalarOf<A, B>::type>
__device__ __forceinline__ bool operator<(const A& a, const B& b) {
  return lift<T>(a).value < lift<T>(b).value;
}
template <class A, class B, class T = typename ScalarOf<A, B>::type>
__device__ __forceinline__ bool operator>(const A& a, const B& b) {
  return lift<T>(a).value > lift<T>(b).value;
}
template <class A, class B, class T = typename ScalarOf<A, B>::type>
__device__ __forceinline__ bool operator<=(const A& a, const B& b) {
  return lift<T>(a).value <= lift<T>(b).value;
}
template <class A, class B, class T = typename ScalarOf<A, B>::type>
__device__ __forceinline__ bool operator>=(const A& a, const B& b) {
  return lift<T>(a).value >= lift<T>(b).value;
}
template <class A, class B, class T = typename ScalarOf<A, B>::type>
__device__ __forceinline__ bool operator==(const A& a, const B& b) {
  return lift<T>(a).value == lift<T>(b).value;
}
template <class A, class B, class T = typename ScalarOf<A, B>::type>
__device__ __forceinline__ bool operator!=(const A& a, const B& b) {
  return lift<T>(a).value != lift<T>(b).value;
}
