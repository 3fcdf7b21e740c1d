// The primitives of which a loss is composed, on dual numbers: each with its right derivative and its convention at
// kinks. A loss written with them needs no derivative of its own.
//
// Order of cases: NaN, the interior, the convention at the boundary. NaN propagates into value and derivative.

// ---------------------------------------------------------------------------------------------------------------------
// Scalars, so that one name serves both arithmetic types

__device__ __forceinline__ float scalar_abs(float x) {
  return fabsf(x);
}
__device__ __forceinline__ double scalar_abs(double x) {
  return fabs(x);
}
__device__ __forceinline__ float scalar_exp(float x) {
  return expf(x);
}
__device__ __forceinline__ double scalar_exp(double x) {
  return exp(x);
}
__device__ __forceinline__ float scalar_log(float x) {
  return logf(x);
}
__device__ __forceinline__ double scalar_log(double x) {
  return log(x);
}
__device__ __forceinline__ float scalar_log1p(float x) {
  return log1pf(x);
}
__device__ __forceinline__ double scalar_log1p(double x) {
  return log1p(x);
}

// -1, 0, 1, or NaN.
template <class T>
__device__ __forceinline__ T scalar_sign(T x) {
  return x > T(0) ? T(1) : (x < T(0) ? T(-1) : x * T(0));
}

// log(a / b) for a, b >= 0, where log(a) - log(b) would cancel: with the larger over the smaller it is log1p of a
// quotient whose numerator is exact near 1 (Sterbenz) and good to half a unit elsewhere. Only where that quotient
// leaves the range of T are the logarithms subtracted; that also gives the limits at 0, and NaN for what is no
// probability: the quotient of two negative numbers would look like one.
template <class T>
__device__ __forceinline__ T scalar_log_ratio(T a, T b) {
  const bool less = a < b;
  const T high = less ? b : a;
  const T low = less ? a : b;
  const T excess = (high - low) / low;
  const bool in_range = low > T(0) && excess < T(1e38);
  const T ratio = in_range ? scalar_log1p(excess) : scalar_log(high) - scalar_log(low);
  return less ? -ratio : ratio;
}

// ---------------------------------------------------------------------------------------------------------------------
// Primitives

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
  return chain(x, scalar_log(x.value), T(1) / x.value);
}

// a (log a - b) for a > 0. A primitive because its derivative, log a - b + 1, is not the product rule's, whose a * (1 /
// a) rounds and, for the smallest a, overflows.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> times_log(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  const T difference = scalar_log(a.value) - b.value;
  return chain(a, b, a.value * difference, difference + T(1), -a.value);
}

// a log(a / b) for a > 0, b >= 0; see scalar_log_ratio.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> times_log_ratio(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  const T ratio = scalar_log_ratio(a.value, b.value);
  return chain(a, b, a.value * ratio, ratio + T(1), -(a.value / b.value));
}

// `condition ? a : b`, tangents included: what is not chosen cannot leak, not even as 0 * inf.
template <class A, class B, class T = typename ScalarOf<A, B>::type>
__device__ __forceinline__ auto where(bool condition, const A& a, const B& b) {
  const auto x = lift<T>(a);
  const auto y = lift<T>(b);
  constexpr unsigned kMask = decltype(x + y)::kMask;
  Dual<T, kMask> z;
  z.value = condition ? x.value : y.value;
#pragma unroll
  for (int k = 0; k < kMaxOperands; ++k) {
    if (has<kMask>(k)) z.tangent[k] = condition ? tangent_or_zero(x, k) : tangent_or_zero(y, k);
  }
  return z;
}

// max(x, 0) whose derivative at 0 is 1 ("active"), as torch's clamp(min=0) has it.
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> relu_active(const Dual<T, kMask>& x) {
  return where(x.value < T(0), constant<T>(0), x);
}

// 0, or NaN where x is NaN: the value of "0 times whatever x is, infinities included".
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, 0> zero_unless_nan(const Dual<T, kMask>& x) {
  return constant<T>(x.value != x.value ? x.value : T(0));
}
