// Dual numbers: a value together with its derivatives with respect to the differentiated operands.
//
//   f(x + dx) = f(x) + f'(x) dx,   carried through every primitive of a loss.
//
// `Dual<T, kMask>` carries a tangent for each operand whose bit is set in kMask and none for the others. The mask is a
// compile-time constant. A tangent that is structurally zero is therefore never multiplied: `0 * inf` cannot leak a NaN
// from one operand's gradient into another's, and a kernel that needs one gradient computes one. With kMask = 0 this is
// the plain value, so the same code computes the value, bit for bit, with and without gradients.
//
// Literals in an expression (`0.5 * d`) take the arithmetic type of the operand beside them.
#pragma once
#include "core/scalars.cuh"

constexpr int kMaxOperands = 12;  // MAX_OPERANDS of definition/base.py, and as many tangents

// Mask bit that marks every number of a tentative evaluation. Under it a primitive may skip the arithmetic that only
// the edges of its domain need, provided that the value of the loss is infinite or NaN there: the element is then
// evaluated again without this bit. A primitive that ignores the bit returns the same result either way.
constexpr unsigned kTentative = 1u << 31;

// True if a primitive may evaluate tentatively with polynomial fits of its own. Only the value of such a fit is
// accurate to 2^-16, not its derivative, so T must not be a number with a tangent.
template <class T, unsigned kMask>
constexpr bool kTentativeFit = (kMask & kTentative) != 0 && !kHasTangent<T>;

// Number of slots up to the last one of kMask; at least 1.
__device__ constexpr int slots_up_to_last(unsigned mask) {
  int count = 1;
  for (int k = 1; k < kMaxOperands; ++k) {
    if (mask >> k & 1u) count = k + 1;
  }
  return count;
}

template <class T, unsigned kMask_>
struct Dual {
  using Scalar = T;
  static constexpr unsigned kMask = kMask_;
  T value;
  T tangent[slots_up_to_last(kMask_)];  // slots outside kMask are never read or written
};

// Returns the number of bits that are set.
__host__ __device__ constexpr int count_bits(unsigned bits) {
  return bits == 0 ? 0 : static_cast<int>(bits & 1u) + count_bits(bits >> 1);
}

template <unsigned kMask>
__device__ __forceinline__ constexpr bool has(int slot) {
  return (kMask >> slot) & 1u;
}

// Calls f(slot) for each slot of kMask, in order. A loop over the slots would be unrolled only after the compiler's
// first passes that move small arrays to registers: with such loops, NVRTC 13.0 took 15 s for a loss of many numbers
// with four tangents each, which takes 3 s.
template <unsigned kMask, int kSlot = 0, class F>
__device__ __forceinline__ void for_each_slot(const F& f) {
  if constexpr (kSlot < kMaxOperands && (kMask & ~kTentative) >> kSlot != 0) {
    if constexpr (has<kMask>(kSlot)) f(kSlot);
    for_each_slot<kMask, kSlot + 1>(f);
  }
}

// True if a number with mask kMask depends on a differentiated operand.
template <unsigned kMask>
constexpr bool kDifferentiated = (kMask & ~kTentative) != 0;

// Makes a dual number of the operand in slot kSlot; it is differentiated if kMask has the slot's bit.
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

// Arithmetic type of two arguments, at least one of them a dual number. If neither is, `type` does not exist, which
// removes the overload (SFINAE).
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
// The chain rule: every primitive passes its value and its partial derivatives to `chain`

template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> chain(const Dual<T, kMask>& a, T value, T partial) {
  Dual<T, kMask> y;
  y.value = with_partials(value, partial, a.value);
  for_each_slot<kMask>([&](int k) { y.tangent[k] = partial * a.tangent[k]; });
  return y;
}

template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> chain(const Dual<T, kA>& a, const Dual<T, kB>& b, T value, T partial_a,
                                                  T partial_b) {
  Dual<T, kA | kB> y;
  y.value = with_partials(value, partial_a, a.value, partial_b, b.value);
  for_each_slot<kA & kB>([&](int k) { y.tangent[k] = partial_a * a.tangent[k] + partial_b * b.tangent[k]; });
  for_each_slot<kA & ~kB>([&](int k) { y.tangent[k] = partial_a * a.tangent[k]; });
  for_each_slot<kB & ~kA>([&](int k) { y.tangent[k] = partial_b * b.tangent[k]; });
  return y;
}

template <class T, unsigned kA, unsigned kB, unsigned kC>
__device__ __forceinline__ Dual<T, kA | kB | kC> chain(const Dual<T, kA>& a, const Dual<T, kB>& b, const Dual<T, kC>& c,
                                                       T value, T partial_a, T partial_b, T partial_c) {
  return chain(chain(a, b, value, partial_a, partial_b), c, value, T(1), partial_c);
}

// Returns the tangent of x in a slot, or 0 if the mask of x lacks the slot.
template <class T, unsigned kMask>
__device__ __forceinline__ T tangent_or_zero(const Dual<T, kMask>& x, int slot) {
  return has<kMask>(slot) ? x.tangent[slot] : T(0);
}

// Returns y with `derivative`, which the definition writes by hand, as its derivative with respect to the operand x,
// instead of that of the chain rule. Changes nothing unless x is differentiated.
template <class T, unsigned kMask, unsigned kX, unsigned kOther>
__device__ __forceinline__ Dual<T, kMask | kX> with_derivative(const Dual<T, kMask>& y, const Dual<T, kX>&,
                                                               const Dual<T, kOther>& derivative) {
  Dual<T, kMask | kX> z;
  z.value = y.value;
  for_each_slot<kX>([&](int k) { z.tangent[k] = derivative.value; });
  for_each_slot<kMask & ~kX>([&](int k) { z.tangent[k] = y.tangent[k]; });
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
