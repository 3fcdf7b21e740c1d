// Primitives of losses of boxes: quotients of areas, and shapes.
#pragma once
#include "primitives/math.cuh"

// atan(width / height) to 1.2 units in the last place: a polynomial in the square of the smaller quotient, and pi / 2
// minus that. No branch, unlike atan2f. Precondition: not both are infinite.
__device__ __forceinline__ float scalar_angle(float width, float height) {
  const float w = fabsf(width), h = fabsf(height);
  const bool wide = w > h;
  const float larger = wide ? w : h, quotient = scalar_divide_without_branch(wide ? h : w, larger);
  const float squared = quotient * quotient;
  const float polynomial = scalar_polynomial(squared, -0.3333315253f, 0.199937731f, -0.1421105266f, 0.1066599339f,
                                             -0.0755218938f, 0.0432115644f, -0.0163677447f, 0.0029206460f);
  const float turned = force_computed(fmaf(polynomial, quotient * squared, quotient));
  const float angle = larger == 0.0f ? 0.0f : (wide ? 1.57079633f - turned : turned);
  return (width < 0.0f) != (height < 0.0f) ? -angle : angle;
}
__device__ __forceinline__ double scalar_angle(double width, double height) {
  return atan2(height < 0.0 ? -width : width, fabs(height));
}

// a / b, and 0 with derivatives 0 where both are 0.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> ratio(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  const bool undefined = (a.value == T(0)) & (b.value == T(0));
  const T close = force_computed(scalar_divide_without_branch(a.value, b.value));
  const T reciprocal = force_computed(scalar_divide_without_branch(T(1), b.value));
  const T quotient = undefined ? T(0) : close, inverse = undefined ? T(0) : reciprocal;
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
  const T reciprocal = force_computed(scalar_divide_without_branch(T(1), squared));
  const T inverse = squared == T(0) ? T(0) : reciprocal;
  return chain(width, height, scalar_angle(width.value, height.value), height.value * inverse,
               -(width.value * inverse));
}
