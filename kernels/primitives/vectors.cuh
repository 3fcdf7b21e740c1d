// Primitives of losses of vectors, from sums over their components.
#pragma once
#include "primitives/math.cuh"

__device__ __forceinline__ float scalar_square_root(float x) {
  return sqrtf(x);
}
__device__ __forceinline__ double scalar_square_root(double x) {
  return sqrt(x);
}

// n in the exponent bits of a double, in two's complement.
__device__ __forceinline__ long long in_exponent(long long n) {
  return static_cast<long long>(static_cast<unsigned long long>(n) << 52);
}

// x^exponent to 2^-38, in a third of the instructions of pow, which is accurate to the last bit for all doubles.
//
//   x = 2^e m                                         m between sqrt(1/2) and sqrt(2)
//   log2 m = 2 / ln 2 (s + s^3 / 3 + s^5 / 5 + ...)   s = (m - 1) / (m + 1)
//   x^exponent = 2^n exp(f ln 2)                      n + f = exponent (e + log2 m), |f| <= 1/2
//
// Preconditions: x is the absolute value of a float32 or of a difference of two, and the exponent is between -6 and 6.
// With kMayVanish instead the power is below 2^1000 and the exponent between 0 and 64; the result is then accurate to
// 2^-34, and 2^-1000 for all powers below that. 0, infinity and NaN are returned as they are, which is right for
// positive exponents only.
template <bool kMayVanish = false>
__device__ __forceinline__ double narrow_power(double x, double exponent) {
  if (!(x > 0.0 && x <= scalar_max(double()))) return x;
  const long long bits = __double_as_longlong(x), one = 0x3ff0000000000000ll;
  // Significands above sqrt(2) move to the next exponent.
  const long long above = (bits - 0x3fe6a09e667f3bcdll) >> 52;
  const double m = __longlong_as_double(bits - in_exponent(above));
  const double below = m + 1.0;
  double inverse = 1.0f / static_cast<float>(below);
  inverse = fma(fma(-below, inverse, 1.0), inverse, inverse);
  const double s = (m - 1.0) * inverse, square = s * s;
  double log = 1.0 / 13;
#pragma unroll
  for (int k = 11; k > 0; k -= 2) log = fma(log, square, 1.0 / k);
  double y = exponent * fma(log * s, 2.8853900817779268, static_cast<double>(static_cast<int>(above)));
  if (kMayVanish && y < -1000.0) y = -1000.0;
  // The addition rounds the fraction away and leaves n in the lower bits.
  const double shifted = y + 6755399441055744.0, n = shifted - 6755399441055744.0, z = (y - n) * 0.6931471805599453;
  double power = 1.0 / 3628800;
  constexpr double kInverseFactorials[10] = {1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
                                             1.0 / 24,     1.0 / 6,     0.5,        1.0,       1.0};
#pragma unroll
  for (int k = 0; k < 10; ++k) power = fma(power, z, kInverseFactorials[k]);
  return power * __longlong_as_double(one + in_exponent(__double_as_longlong(shifted)));
}

// Limits a cosine to [-1, 1], which rounding may leave.
template <class T>
__device__ __forceinline__ T scalar_cosine(T x) {
  return x > T(1) ? T(1) : (x < T(-1) ? T(-1) : x);
}

// dot / sqrt((xx + eps) (yy + eps)): the cosine of two vectors, in [-1, 1], from their dot product and their
// squared lengths. 0 with derivatives 0 if a vector has the length 0, and so no direction.
template <class T, unsigned kDot, unsigned kX, unsigned kY>
__device__ __forceinline__ Dual<T, kDot | kX | kY> cosine(const Dual<T, kDot>& dot, const Dual<T, kX>& xx,
                                                          const Dual<T, kY>& yy, const Dual<T, 0>& eps) {
  const T x = xx.value + eps.value;
  const T y = yy.value + eps.value;
  // A NaN in the other vector is also in the dot product.
  const bool nowhere = xx.value == T(0) || yy.value == T(0);
  // The inverse of each length, because the product of the lengths may overflow. Two divisions instead of four, each of
  // which a row waits for.
  const T inverse_x = nowhere ? T(0) : T(1) / scalar_square_root(x);
  const T inverse_y = nowhere ? T(0) : T(1) / scalar_square_root(y);
  const T quotient = nowhere ? dot.value : dot.value * inverse_x * inverse_y;
  const T value = scalar_cosine(quotient);
  const T half = T(-0.5) * value;
  return chain(dot, xx, yy, value, inverse_x * inverse_y, half * inverse_x * inverse_x, half * inverse_y * inverse_y);
}

// dot / (max(|x|, eps) max(|y|, eps)): the cosine of two vectors, in [-1, 1], from their dot product and their
// squared lengths. A length below eps does not contribute to derivatives. 0 with derivatives 0 if a vector has the
// length 0.
template <class T, unsigned kDot, unsigned kX, unsigned kY>
__device__ __forceinline__ Dual<T, kDot | kX | kY> cosine_at_least(const Dual<T, kDot>& dot, const Dual<T, kX>& xx,
                                                                   const Dual<T, kY>& yy, const Dual<T, 0>& eps) {
  const T x = scalar_square_root(xx.value);
  const T y = scalar_square_root(yy.value);
  const bool nowhere = xx.value == T(0) || yy.value == T(0);
  const T length = nowhere ? T(1) : (x < eps.value ? eps.value : x) * (y < eps.value ? eps.value : y);
  const T quotient = dot.value / length;
  const T value = scalar_cosine(quotient);
  const T half = T(-0.5) * value;
  return chain(dot, xx, yy, value, nowhere ? T(0) : T(1) / length, nowhere || x < eps.value ? T(0) : half / xx.value,
               nowhere || y < eps.value ? T(0) : half / yy.value);
}
