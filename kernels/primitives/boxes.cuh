// Primitives of losses of boxes: quotients of areas, and shapes.
#pragma once
#include "primitives/math.cuh"

__device__ __forceinline__ float scalar_angle(float width, float height) {
  return atan2f(height < 0.0f ? -width : width, fabsf(height));
}
__device__ __forceinline__ double scalar_angle(double width, double height) {
  return atan2(height < 0.0 ? -width : width, fabs(height));
}

// a / b, and 0 with derivatives 0 where both are 0.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> ratio(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  const bool undefined = a.value == T(0) && b.value == T(0);
  const T quotient = undefined ? T(0) : scalar_divide(a.value, b.value);
  const T inverse = undefined ? T(0) : scalar_divide_in_range(T(1), b.value);
  return chain(a, b, quotient, inverse, -(quotient * inverse));
}

// max(x, floor). The derivative is 0 below the floor, and 1 from there on.
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> floored(const Dual<T, kMask>& x, const Dual<T, 0>& floor) {
  const bool below = x.value < floor.value;
  return chain(x, below ? floor.value : x.value, below ? T(0) : T(1));
}

// x without its derivatives: a constant in every derivative.
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, 0> detached(const Dual<T, kMask>& x) {
  Dual<T, 0> y;
  y.value = constant_if(true, x.value);
  return y;
}

// atan(width / height), which is pi / 2 for height 0, and 0 with derivatives 0 for a box without width and height.
template <class T, unsigned kWidth, unsigned kHeight>
__device__ __forceinline__ Dual<T, kWidth | kHeight> angle(const Dual<T, kWidth>& width,
                                                           const Dual<T, kHeight>& height) {
  const T squared = width.value * width.value + height.value * height.value;
  const T inverse = squared == T(0) ? T(0) : scalar_divide_in_range(T(1), squared);
  return chain(width, height, scalar_angle(width.value, height.value), height.value * inverse,
               -(width.value * inverse));
}
