// Robust losses of a residual. Each is one primitive, because value and derivative share their exponential, root or
// quotient, and because the formulas as they are written cancel for small residuals and overflow for large ones.

// x, or the number nearest to it whose square is far from overflow, yet so large that 1 does not count beside it.
__device__ __forceinline__ float scalar_limited(float x) {
  return fabsf(x) > 0x1p60f ? copysignf(0x1p60f, x) : x;
}
__device__ __forceinline__ double scalar_limited(double x) {
  return fabs(x) > 0x1p500 ? copysign(0x1p500, x) : x;
}

// log(cosh(x)) and tanh(x). In float both from one exponential, and polynomials in x^2 where that cancels.
__device__ __forceinline__ Point<float> scalar_log_cosh(float x) {
  const float a = fabsf(x);
  const float w = x * x;
  const float value = w * scalar_polynomial(w, 0.5f, -0.083332695f, 0.022204667f, -0.0065939566f, 0.0016502878f);
  const float slope =
      x * scalar_polynomial(w, 1.0f, -0.333333f, 0.13331936f, -0.053784717f, 0.020798622f, -0.0058979555f);
  const float e = expf(-2.0f * a);
  const float log1p =
      e * scalar_polynomial(e, 1.0f, -0.4999902f, 0.33298832f, -0.24553773f, 0.17229533f, -0.078362785f);
  const bool near = a < 0.6f;
  return {near ? value : (a - 0.69314718f) + log1p,
          near ? slope : copysignf(scalar_divide_closely(1.0f - e, 1.0f + e), x)};
}
__device__ __forceinline__ Point<double> scalar_log_cosh(double x) {
  const double a = fabs(x);
  const double half = sinh(0.5 * x);
  return {a < 1.0 ? log1p(2.0 * half * half) : log1p(exp(-2.0 * a)) + (a - 0.69314718055994530942), tanh(x)};
}

template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> log_cosh(const Dual<T, kMask>& x) {
  const Point<T> y = scalar_log_cosh(x.value);
  return chain(x, y.value, y.slope);
}

// sqrt(1 + x^2) - 1
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> hypotenuse_minus_one(const Dual<T, kMask>& x) {
  const T limited = scalar_limited(x.value);
  const T square = limited * limited;
  const T sum = scalar_fma(limited, limited, T(1));
  const T inverse = scalar_rsqrt(sum);
  const T rough = sum * inverse;
  const T root = scalar_fma(scalar_fma(-rough, rough, sum), T(0.5) * inverse, rough);
  const T beyond = scalar_abs(x.value) - scalar_abs(limited);
  return chain(x, scalar_divide_closely(square, root + T(1)) + beyond, limited * inverse);
}

// log(1 + x^2 / 2)
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> log1p_half_square(const Dual<T, kMask>& x) {
  // Far out it is 2 log(x) - log(2), with the derivative 2 / x, both parts of which are scaled into range.
  const T a = scalar_abs(x.value);
  const bool far = a > T(0x1p60);
  const T half = T(0.5) * x.value;
  const T log = scalar_log1p(far ? a : half * x.value);
  const T slope =
      scalar_divide_roughly(far ? T(0x1p-63) : x.value, far ? x.value * T(0x1p-64) : scalar_fma(half, x.value, T(1)));
  return chain(x, scalar_fma(far ? T(2) : T(1), log, far ? T(-0.69314718055994530942) : T(0)), slope);
}

// 1 - exp(-x^2 / 2)
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> one_minus_gaussian(const Dual<T, kMask>& x) {
  const T z = T(0.5) * x.value * x.value;
  const T e = scalar_exp(-z);
  // Not inf * 0 far out.
  return chain(x, scalar_complement(z, e), e == T(0) ? T(0) : x.value * e);
}

// 2 x^2 / (x^2 + 4)
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> geman_mcclure(const Dual<T, kMask>& x) {
  const T limited = scalar_limited(x.value);
  const T inverse = scalar_divide_closely(T(1), scalar_fma(limited, limited, T(4)));
  return chain(x, T(2) * limited * limited * inverse, T(16) * limited * inverse * inverse);
}
