// Primitives of losses of boxes: quotients of areas, and shapes.
#pragma once
#include "primitives/math.cuh"

// atan(width / height) to 1.2 units in the last place: a polynomial of the smaller size divided by the larger one, or
// pi / 2 minus the polynomial if the width is larger. Unlike atan2f it has no branch. Precondition: width and height
// are not both infinite.
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

// Angle between the vector (x, y) and the x axis, from -pi to pi, to 1.3 units in the last place; with kNowhere 0 for
// the vector (0, 0). Unlike atan2f it has no branch. Preconditions: no component is infinite, or beyond 2^126.
template <bool kNowhere>
__device__ __forceinline__ float scalar_direction(float y, float x) {
  const float across = fabsf(y), along = fabsf(x);
  const bool steep = across > along;
  const float larger = steep ? across : along;
  const float quotient = force_computed(scalar_divide_closely(steep ? along : across, larger));
  const float squared = quotient * quotient;
  const float polynomial = scalar_polynomial(squared, -0.3333315253f, 0.199937731f, -0.1421105266f, 0.1066599339f,
                                             -0.0755218938f, 0.0432115644f, -0.0163677447f, 0.0029206460f);
  const float turned = force_computed(fmaf(polynomial, quotient * squared, quotient));
  const float angle = steep ? 1.57079633f - turned : turned, acute = kNowhere && larger == 0.0f ? 0.0f : angle;
  return copysign(x < 0.0f ? 3.14159265f - acute : acute, y);
}
template <bool kNowhere>
__device__ __forceinline__ double scalar_direction(double y, double x) {
  return atan2(y, x);
}

// a / b; 0 with derivatives 0 where both are 0.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> ratio(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  if constexpr (((kA | kB) & kTentative) != 0) {
    // A product with the unscaled reciprocal of b. It is NaN or infinite where b is 0, infinite or NaN, so no power of
    // two has to scale b to near 1.
    const T inverse = scalar_divide_roughly(T(1), b.value), rough = a.value * inverse;
    // NaN for b from 2^126 on, where the reciprocal is 0.
    const T marked = scalar_fma(b.value * T(4), T(0), rough);
    const T quotient = scalar_fma(scalar_fma(-rough, b.value, a.value), inverse, marked);
    auto y = chain(a, b, quotient, inverse, -(quotient * inverse));
    for_each_slot<kA & kB>([&](int k) { y.tangent[k] = inverse * scalar_fma(-quotient, b.tangent[k], a.tangent[k]); });
    return y;
  }
  const bool undefined = (a.value == T(0)) & (b.value == T(0));
  const QuotientAndInverse<T> by = scalar_divide_and_invert(a.value, b.value);
  const T close = force_computed(by.quotient), reciprocal = force_computed(by.inverse);
  const T quotient = undefined ? T(0) : close, inverse = undefined ? T(0) : reciprocal;
  auto y = chain(a, b, quotient, inverse, -(quotient * inverse));
  // Each tangent takes two instructions, and is exactly 0 where numerator and denominator change in proportion.
  for_each_slot<kA & kB>([&](int k) { y.tangent[k] = inverse * scalar_fma(-quotient, b.tangent[k], a.tangent[k]); });
  return y;
}

// Derivative of max(a, b) with respect to a: 1, 0, or 1/2 where they are equal; NaN if either is NaN. In a tentative
// evaluation 1/2 serves NaN, too, because the value is NaN then.
template <bool kTried, class T>
__device__ __forceinline__ T scalar_share_of_larger(T a, T b) {
  const T tied = kTried || a == b ? T(0.5) : scalar_nan(T());
  return a < b || b < a ? (a > b ? T(1) : T(0)) : tied;
}

// min(a, b) of edges of boxes. Where a equals b, each has the derivative 1/2. Precondition: the derivatives of a and b
// are finite, because that of the edge that is not chosen is multiplied by 0.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> smaller_edge(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  constexpr bool kTried = ((kA | kB) & kTentative) != 0;
  const T share = T(1) - scalar_share_of_larger<kTried>(a.value, b.value);
  return chain(a, b, smaller_or_nan(a.value, b.value), share, T(1) - share);
}

// max(a, b) of edges of boxes. Where a equals b, each has the derivative 1/2. Precondition: the derivatives of a and b
// are finite, because that of the edge that is not chosen is multiplied by 0.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> larger_edge(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  constexpr bool kTried = ((kA | kB) & kTentative) != 0;
  const T share = scalar_share_of_larger<kTried>(a.value, b.value);
  return chain(a, b, larger_or_nan(a.value, b.value), share, T(1) - share);
}

// width * height if both are positive, otherwise 0 with derivatives 0. Precondition: the derivatives of width and
// height are finite.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> positive_area(const Dual<T, kA>& width, const Dual<T, kB>& height) {
  const bool positive = (width.value > T(0)) & (height.value > T(0));
  const T across = positive ? width.value : T(0), down = positive ? height.value : T(0);
  return chain(width, height, across * down, down, across);
}

// max(x, floor). The derivative is 0 below the floor, and 1 from the floor on.
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

// A vector in the right half plane whose angle is that of a box: y / x = width / height. With kNowhere it is (1, 0) for
// a box with neither width nor height.
template <class T>
struct BoxDirection {
  T x;
  T y;
};
template <bool kNowhere, class T>
__device__ __forceinline__ BoxDirection<T> scalar_box_direction(T width, T height) {
  const bool nowhere = kNowhere && ((width == T(0)) & (height == T(0)));
  return {nowhere ? T(1) : scalar_abs(height), height < T(0) ? -width : width};
}

// 1 / (width^2 + height^2), a factor of the angle's derivatives; 0 for a box with neither width nor height.
template <class T>
__device__ __forceinline__ T scalar_angle_slope(T width, T height) {
  const T squared = scalar_fma(width, width, height * height);
  const T reciprocal = force_computed(scalar_divide_and_invert(T(1), squared).inverse);
  return squared == T(0) ? T(0) : reciprocal;
}

// atan(width2 / height2) - atan(width1 / height1) of two boxes, with one arctangent: that of the cross product of the
// boxes' vectors over their dot product. A height of 0 has the angle pi / 2. A box with neither width nor height has
// the angle 0, with derivatives 0.
template <class T, unsigned kWidth1, unsigned kHeight1, unsigned kWidth2, unsigned kHeight2>
__device__ __forceinline__ Dual<T, kWidth1 | kHeight1 | kWidth2 | kHeight2> angle_between(
    const Dual<T, kWidth1>& width1, const Dual<T, kHeight1>& height1, const Dual<T, kWidth2>& width2,
    const Dual<T, kHeight2>& height2) {
  constexpr bool kTried = ((kWidth1 | kHeight1 | kWidth2 | kHeight2) & kTentative) != 0;
  const BoxDirection<T> a = scalar_box_direction<!kTried>(width1.value, height1.value);
  const BoxDirection<T> b = scalar_box_direction<!kTried>(width2.value, height2.value);
  const T across = scalar_fma(b.y, a.x, -(a.y * b.x)), along = scalar_fma(a.x, b.x, a.y * b.y);
  T value = scalar_direction<!kTried>(across, along);
  T slope1 = T(0), slope2 = T(0);
  if constexpr (kTried) {
    // Computed in kernels without derivatives, too, so that their values have the same bits.
    const T squared1 = scalar_fma(width1.value, width1.value, height1.value * height1.value);
    const T squared2 = scalar_fma(width2.value, width2.value, height2.value * height2.value);
    slope1 = scalar_divide_roughly(T(1), squared1);
    slope2 = scalar_divide_roughly(T(1), squared2);
    // NaN where a square or its reciprocal leaves the range of the fast division.
    value = scalar_fma(scalar_fma(squared1, T(4), T(4) * squared2), T(0), value);
    value = scalar_fma(slope1 + slope2, T(0), value);
  } else {
    if constexpr (kHasTangent<T> || kDifferentiated<kWidth1 | kHeight1>)
      slope1 = scalar_angle_slope(width1.value, height1.value);
    if constexpr (kHasTangent<T> || kDifferentiated<kWidth2 | kHeight2>)
      slope2 = scalar_angle_slope(width2.value, height2.value);
  }
  const auto of_first = chain(width1, height1, value, -(height1.value * slope1), width1.value * slope1);
  return of_first + chain(width2, height2, T(0), height2.value * slope2, -(width2.value * slope2));
}

// atan(width / height), which is pi / 2 for height 0; 0 with derivatives 0 for a box with neither width nor height.
template <class T, unsigned kWidth, unsigned kHeight>
__device__ __forceinline__ Dual<T, kWidth | kHeight> angle(const Dual<T, kWidth>& width,
                                                           const Dual<T, kHeight>& height) {
  const T squared = width.value * width.value + height.value * height.value;
  const T reciprocal = force_computed(scalar_divide_without_branch(T(1), squared));
  const T inverse = squared == T(0) ? T(0) : reciprocal;
  return chain(width, height, scalar_angle(width.value, height.value), height.value * inverse,
               -(width.value * inverse));
}
