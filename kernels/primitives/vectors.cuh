// Primitives of losses of vectors, from sums over their components.
#pragma once
#include "primitives/math.cuh"

__device__ __forceinline__ float scalar_square_root(float x) {
  return sqrtf(x);
}
__device__ __forceinline__ double scalar_square_root(double x) {
  return sqrt(x);
}

// A quotient that is within -1 and 1 but for rounding.
template <class T>
__device__ __forceinline__ T scalar_cosine(T x) {
  return x > T(1) ? T(1) : (x < T(-1) ? T(-1) : x);
}

// dot / sqrt((xx + eps) (yy + eps)), the cosine of two vectors from their product and their squared lengths, and within
// -1 and 1. 0 with derivatives 0 if one of them has the length 0, and no direction.
template <class T, unsigned kDot, unsigned kX, unsigned kY>
__device__ __forceinline__ Dual<T, kDot | kX | kY> cosine(const Dual<T, kDot>& dot, const Dual<T, kX>& xx,
                                                          const Dual<T, kY>& yy, const Dual<T, 0>& eps) {
  const T x = xx.value + eps.value;
  const T y = yy.value + eps.value;
  // NaN of the other vector is in the product.
  const bool nowhere = xx.value == T(0) || yy.value == T(0);
  // Inverses of both lengths: their product may overflow. Two quotients in place of four, each of which a row waits
  // for.
  const T inverse_x = nowhere ? T(0) : T(1) / scalar_square_root(x);
  const T inverse_y = nowhere ? T(0) : T(1) / scalar_square_root(y);
  const T quotient = nowhere ? dot.value : dot.value * inverse_x * inverse_y;
  const T value = scalar_cosine(quotient);
  const T half = T(-0.5) * value;
  return chain(dot, xx, yy, value, inverse_x * inverse_y, half * inverse_x * inverse_x, half * inverse_y * inverse_y);
}

// dot / (max(|x|, eps) max(|y|, eps)), the cosine of two vectors from their product and their squared lengths, and
// within -1 and 1. A length below eps has no part in derivatives. 0 with derivatives 0 if one of the lengths is 0.
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
