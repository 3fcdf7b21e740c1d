// Divergences between distributions, and what they are made of: the logarithm of a ratio.

// Where arithmetic on the remainder of a quotient is safe: what is below `small` is scaled first, and the quotient lies
// within 1 / `most` and `most`.
template <class T>
struct RatioRange {
  T small, scale, most;
};
__device__ __forceinline__ RatioRange<float> scalar_ratio_range(float) {
  return {2.3283064e-10f, 18446744073709551616.0f, 1e37f};  // 2^-32, 2^64
}
__device__ __forceinline__ RatioRange<double> scalar_ratio_range(double) {
  return {8.636168555094445e-78, 1.157920892373162e77, 1e300};  // 2^-256, 2^256
}

template <class T>
struct Ratio {
  T quotient;
  T log;
};

// a / b and its logarithm for a, b >= 0. log(a) - log(b) would cancel, and log(a / b) lack what the quotient rounded
// off: that remainder is exact in one fma and is added. (log1p of the excess over 1 took more arithmetic, by which such
// a loss is bound.) Small operands are scaled first, because a remainder below the range would be flushed. Where the
// quotient leaves the range (or b >= 2^126, whose fast inverse is 0) the logarithms are subtracted. That also gives the
// limits at 0, and NaN for what is no probability: the quotient of two negative numbers would look like one.
template <class T>
__device__ __forceinline__ Ratio<T> scalar_ratio(T a, T b) {
  const RatioRange<T> range = scalar_ratio_range(a);
  const T scale = a < range.small && b < range.small ? range.scale : T(1);
  const T x = a * scale;
  const T y = b * scale;
  const T inverse = scalar_divide_roughly(T(1), y);
  const T rough = x * inverse;
  const T quotient = scalar_fma(scalar_fma(-rough, y, x), inverse, rough);
  if (a > T(0) && quotient > T(1) / range.most && quotient < range.most) {
    const T remainder = scalar_fma(-quotient, y, x);
    return {quotient, scalar_log(quotient) + scalar_divide_roughly(remainder, x)};
  }
  return {a / b, scalar_log(a) - scalar_log(b)};
}

// a (log a - b) for a > 0. A primitive because its derivative, log a - b + 1, is not the product rule's, whose a * (1 /
// a) rounds and, for the smallest a, overflows.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> times_log(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  const T difference = scalar_log(a.value) - b.value;
  return chain(a, b, a.value * difference, difference + T(1), -a.value);
}

// a log(a / b) for a > 0, b >= 0; see scalar_ratio.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> times_log_ratio(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  const Ratio<T> ratio = scalar_ratio(a.value, b.value);
  return chain(a, b, a.value * ratio.log, ratio.log + T(1), -ratio.quotient);
}
