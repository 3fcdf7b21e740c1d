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
__device__ __forceinline__ float scalar_expm1(float x) {
  return expm1f(x);
}
__device__ __forceinline__ double scalar_expm1(double x) {
  return expm1(x);
}
__device__ __forceinline__ float scalar_rsqrt(float x) {
  return rsqrtf(x);
}
__device__ __forceinline__ double scalar_rsqrt(double x) {
  return rsqrt(x);
}

__device__ __forceinline__ float scalar_largest(float) {
  return 3.40282347e38f;
}
__device__ __forceinline__ double scalar_largest(double) {
  return 1.79769313486231571e308;
}

template <class T>
__device__ __forceinline__ T scalar_infinity(T) {
  return scalar_largest(T()) * T(2);
}

__device__ __forceinline__ float scalar_nan(float) {
  return __int_as_float(0x7fffffff);
}
__device__ __forceinline__ double scalar_nan(double) {
  return __longlong_as_double(0x7fffffffffffffffLL);
}

template <class T>
__device__ __forceinline__ bool is_finite_and_not_negative(T x) {
  return x >= T(0) && x <= scalar_largest(T());
}

// -1, 0, 1, or NaN.
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

// x / y to a few units in the last place, for what is corrected or small beside what it is added to.
__device__ __forceinline__ float scalar_divide_roughly(float x, float y) {
  return __fdividef(x, y);
}
__device__ __forceinline__ double scalar_divide_roughly(double x, double y) {
  return x / y;
}

// x / y to little more than half a unit in the last place, where neither y nor 1 / y nor the quotient leaves the range.
// The exact operator takes several times as much for the sake of where they do.
__device__ __forceinline__ float scalar_divide_closely(float x, float y) {
  const float inverse = __fdividef(1.0f, y);
  const float rough = x * inverse;
  return fmaf(fmaf(-rough, y, x), inverse, rough);
}
__device__ __forceinline__ double scalar_divide_closely(double x, double y) {
  return x / y;
}

// x / y to two units in the last place, also for y beyond 2^126, where the GPU's own fast division gives 0.
__device__ __forceinline__ float scalar_divide_in_range(float x, float y) {
  const float scale = fabsf(y) > 1.0f ? 0.25f : 1.0f;
  return __fdividef(x * scale, y * scale);
}
__device__ __forceinline__ double scalar_divide_in_range(double x, double y) {
  return x / y;
}

// c + d x + e x^2 + ...
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
  return scalar_polynomial(z, 1.0f, -0.49999997f, 0.16666552f, -0.041652385f, 0.008254852f, -0.0011900248f);
}

// 1 - exp(-z), which is 1 - e, for z >= 0.
__device__ __forceinline__ float scalar_complement(float z, float e) {
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
// 2^n for an integer n in the range of exponents.
__device__ __forceinline__ float scalar_power_of_two(float n) {
  return __int_as_float((static_cast<int>(n) + 127) << 23);
}
__device__ __forceinline__ double scalar_power_of_two(double n) {
  return __longlong_as_double((static_cast<long long>(n) + 1023) << 52);
}

// log(1 + f) = f + f^2 excess for f between -1/3 and 1/3.
__device__ __forceinline__ float scalar_log1p_excess(float f) {
  return scalar_polynomial(f, -0.5f, 0.3333321f, -0.24999717f, 0.20010749f, -0.16682306f, 0.14001156f, -0.12167153f,
                           0.14004777f, -0.12948987f);
}
__device__ __forceinline__ float scalar_log1p_near_zero(float f) {
  return scalar_fma(f * f, scalar_log1p_excess(f), f);
}

// A function at a point, and its derivative there.
template <class T>
struct Point {
  T value;
  T slope;
};

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

// x^2 / 2, which overflows where itself does, not where x^2 does.
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> half_square(const Dual<T, kMask>& x) {
  return chain(x, x.value * (T(0.5) * x.value), x.value);
}

// log(1 + x)
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> log1p(const Dual<T, kMask>& x) {
  return chain(x, scalar_log1p(x.value), scalar_divide_roughly(T(1), x.value + T(1)));
}

// d^2 / (2 v). Half of it, because neither the value nor the derivative with respect to d overflows on the way.
template <class T, unsigned kD, unsigned kV>
__device__ __forceinline__ Dual<T, kD | kV> half_square_over(const Dual<T, kD>& d, const Dual<T, kV>& v) {
  const T ratio = d.value / v.value;
  const T half = T(0.5) * ratio;
  return chain(d, v, d.value * half, ratio, -(half * ratio));
}

// max(x, floor), whose derivative is 1 also where the floor is taken, as of a clamp outside of the graph.
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> at_least(const Dual<T, kMask>& x, const Dual<T, 0>& floor) {
  return chain(x, x.value < floor.value ? floor.value : x.value, T(1));
}

// x, or NaN where the condition does not hold: what an operand outside of its domain costs.
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> nan_unless(bool condition, const Dual<T, kMask>& x) {
  return chain(x, condition ? x.value : scalar_nan(T()), T(1));
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

// Of two literals, which take the arithmetic type of what they are used with.
__device__ __forceinline__ double where(bool condition, double a, double b) {
  return condition ? a : b;
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

// weight * x; an x of weight 0 counts for nothing, whatever it is, infinities and NaN included. The derivative with
// respect to a weight of 0 is x all the same, where that is finite, so that a weight can be learned from 0.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> weighted(const Dual<T, kA>& weight, const Dual<T, kB>& x) {
  const bool unused = weight.value == T(0);
  const T partial = unused && !(scalar_abs(x.value) <= scalar_largest(T())) ? T(0) : x.value;
  Dual<T, kA | kB> y;
  y.value = unused ? T(0) : weight.value * x.value;
#pragma unroll
  for (int k = 0; k < kMaxOperands; ++k) {
    if (has<kA>(k)) y.tangent[k] = partial * weight.tangent[k];
    if (has<kB>(k)) y.tangent[k] = unused ? T(0) : weight.value * x.tangent[k];
  }
  return y;
}
