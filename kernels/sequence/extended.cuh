// Extended-range numbers m 2^e: a floating-point mantissa m with an integer exponent e of its own. They hold products
// and sums of probabilities over any number of frames, without logarithms and without underflow.
//
//   product    m m' 2^(e + e')
//   sum        E = largest e_i,    m = sum_i m_i 2^(e_i - E), where the powers of two are assembled from their bits
//   e^x        2^f 2^k, with k = rint(x log2 e) and f the remainder; 2^f by a polynomial
//
// 1. Renormalising. The mantissa of a number that counts stays within 2^-4 and 2^18 between two renormalisations, which
//    are at most 8 frames apart, so nothing that counts is flushed to zero. `renormalised` returns the mantissa to [1,
//    2). It turns a number with an exponent below kLowest into zero, and one with an exponent above -kLowest into NaN.
// 2. Zero is m = 0 with exponent kZero. kZero is so low that no nonzero number has a lower exponent, whatever ordinary
//    factors either has been multiplied by since. `product` returns zero if either factor is zero, even if the other is
//    NaN: where no path passes, emissions have no effect. `ordinary_product` omits that test and requires ordinary
//    factors.
// 3. Ordinary logits have a magnitude below 2^21, so |e| of their exponentials is below 2^22. For other logits
//    `exponential` is slower, and numbers must be renormalised after each product.
// 4. Differences of exponents fit in 32-bit unsigned integers.
//
// In memory, consecutive numbers share an exponent (block floating point, see `pack`). A word of the mantissa's size
// holds the fraction of a number, and its exponent relative to the shared one in 9 bits for float and 12 bits for
// double:
//
//   word     [exponent of m 2^e - shared | fraction],   0 for zero;   shared = largest exponent - 511 (4095)
//
// Numbers cannot share an exponent if one of them is NaN, or too small compared with the largest. SharedExponent then
// returns kApart, and each number needs an exponent of its own, stored beside its mantissa.
//
// All arithmetic is IEEE arithmetic, so results have the same bits on every GPU and on the host.
//
// Each thread computes its own numbers in registers. Only load_number and store_number access memory: 8 bytes per
// number, 16 in double. Preconditions: stated at each function.
#pragma once
#include "core/scalars.cuh"

// Logits and log-probabilities of a larger magnitude count as infinite.
constexpr double kLargestLogit = 67108864.0;  // 2^26
constexpr double kOrdinaryLogit = 2097152.0;  // 2^21
constexpr int kLowest = -(1 << 29);
constexpr int kZero = -5 * (1 << 27);

template <class Mantissa>
struct Extended {
  Mantissa m;
  int e;
};

// An extended number in memory with an exponent of its own: two words of the mantissa's size.
template <class Mantissa>
struct StoredNumber;
template <>
struct alignas(8) StoredNumber<float> {
  float m;
  int e;
};
template <>
struct alignas(16) StoredNumber<double> {
  double m;
  int64 e;
};

__device__ __forceinline__ void store_number(StoredNumber<float>* to, float m, int e) {
  *reinterpret_cast<uint2*>(to) = uint2{__float_as_uint(m), static_cast<unsigned>(e)};
}
__device__ __forceinline__ void store_number(StoredNumber<double>* to, double m, int e) {
  *reinterpret_cast<longlong2*>(to) = longlong2{__double_as_longlong(m), e};
}
__device__ __forceinline__ Extended<float> load_number(const StoredNumber<float>* from) {
  const uint2 word = *reinterpret_cast<const uint2*>(from);
  return {__uint_as_float(word.x), static_cast<int>(word.y)};
}
__device__ __forceinline__ Extended<double> load_number(const StoredNumber<double>* from) {
  const longlong2 word = *reinterpret_cast<const longlong2*>(from);
  return {__longlong_as_double(word.x), static_cast<int>(word.y)};
}

template <class Mantissa>
__device__ __forceinline__ Extended<Mantissa> zero_number() {
  return {Mantissa(0), kZero};
}

// Returns 2^-by; 0 if `by` is 127 or more.
__device__ __forceinline__ float power_below(unsigned by, float) {
  return __uint_as_float((127u - min(by, 127u)) << 23);
}
// Returns 2^-by; 0 if `by` is 1023 or more.
__device__ __forceinline__ double power_below(unsigned by, double) {
  return __longlong_as_double(static_cast<int64>(1023u - min(by, 1023u)) << 52);
}

template <class Mantissa>
__device__ __forceinline__ Extended<Mantissa> sum(const Extended<Mantissa>& a, const Extended<Mantissa>& b) {
  const int e = max(a.e, b.e);
  const unsigned top = static_cast<unsigned>(e);
  // Scaling by a power of two is exact, so the fma rounds like a plain addition.
  return {scalar_fma(b.m, power_below(top - static_cast<unsigned>(b.e), Mantissa(0)),
                     a.m * power_below(top - static_cast<unsigned>(a.e), Mantissa(0))),
          e};
}
template <class Mantissa>
__device__ __forceinline__ Extended<Mantissa> sum(const Extended<Mantissa>& a, const Extended<Mantissa>& b,
                                                  const Extended<Mantissa>& c) {
  const int e = max(max(a.e, b.e), c.e);
  const unsigned top = static_cast<unsigned>(e);
  const Mantissa first = a.m * power_below(top - static_cast<unsigned>(a.e), Mantissa(0));
  const Mantissa two = scalar_fma(b.m, power_below(top - static_cast<unsigned>(b.e), Mantissa(0)), first);
  return {scalar_fma(c.m, power_below(top - static_cast<unsigned>(c.e), Mantissa(0)), two), e};
}

// Returns a b; zero if either factor is zero, even if the other is NaN.
template <class Mantissa>
__device__ __forceinline__ Extended<Mantissa> product(const Extended<Mantissa>& a, const Extended<Mantissa>& b) {
  const bool zero = a.m == Mantissa(0) || b.m == Mantissa(0);
  return {zero ? Mantissa(0) : a.m * b.m, zero ? kZero : a.e + b.e};
}

// Returns a b without testing for zero. Precondition: `b` is the exponential of an ordinary logit.
template <class Mantissa>
__device__ __forceinline__ Extended<Mantissa> ordinary_product(const Extended<Mantissa>& a,
                                                               const Extended<Mantissa>& b) {
  return {a.m * b.m, a.e + b.e};
}

// Returns `a` with its mantissa in [1, 2), or zero, or NaN (item 1 of the header). Uses selects, not branches, because
// it is part of the dependency chain from chunk to chunk.
__device__ __forceinline__ Extended<float> renormalised(const Extended<float>& a) {
  const unsigned bits = __float_as_uint(a.m), field = bits >> 23 & 0xffu;
  const int e = a.e + static_cast<int>(field) - 127;
  const bool zero = (field == 0u) | (e < kLowest), nan = (field == 0xffu) | (e > -kLowest);
  const unsigned m = nan ? 0x7fc00000u : (bits & 0x7fffffu) | 0x3f800000u;
  return {__uint_as_float(zero ? 0u : m), zero ? kZero : nan ? 0 : e};
}
__device__ __forceinline__ Extended<double> renormalised(const Extended<double>& a) {
  const int64 bits = __double_as_longlong(a.m);
  const int field = static_cast<int>(bits >> 52 & 0x7ff), e = a.e + field - 1023;
  const bool zero = (field == 0) | (e < kLowest), nan = (field == 0x7ff) | (e > -kLowest);
  const int64 m = nan ? 0x7ff8LL << 48 : (bits & 0xfffffffffffffLL) | 1023LL << 52;
  return {__longlong_as_double(zero ? 0 : m), zero ? kZero : nan ? 0 : e};
}

// The word of a number that shares its exponent. No number is negative, so the sign bit serves as an exponent bit.
template <class Mantissa>
struct PackedNumber;
template <>
struct PackedNumber<float> {
  using Word = unsigned;
  static constexpr int kFraction = 23, kBias = 127, kLargest = 511;  // fraction bits; bias; largest exponent of a word
  static constexpr Word kOne = 127u << 23;
};
template <>
struct PackedNumber<double> {
  using Word = unsigned long long;
  static constexpr int kFraction = 52, kBias = 1023, kLargest = 4095;
  static constexpr Word kOne = 1023ull << 52;
};

__device__ __forceinline__ unsigned bits_of(float m) {
  return __float_as_uint(m);
}
__device__ __forceinline__ unsigned long long bits_of(double m) {
  return static_cast<unsigned long long>(__double_as_longlong(m));
}
__device__ __forceinline__ float from_bits(unsigned bits) {
  return __uint_as_float(bits);
}
__device__ __forceinline__ double from_bits(unsigned long long bits) {
  return __longlong_as_double(static_cast<int64>(bits));
}

// Returned instead of a shared exponent if the numbers have none.
constexpr int kApart = -2147483647 - 1;
// Between two renormalisations, exponents of zeros stay below this bound, and those of other numbers above it.
constexpr int kAboveZero = kLowest - (1 << 26);

// Accumulates the shared exponent of a few numbers. Precondition: the exponents of zeros among them are below
// kAboveZero, and those of other numbers above it.
template <class Mantissa>
struct SharedExponent {
  using Packed = PackedNumber<Mantissa>;
  int largest = kAboveZero + Packed::kLargest;
  unsigned least = 0xffffffffu;  // above kAboveZero; zeros wrap around to large values
  Mantissa total = Mantissa(0);  // NaN if a number is NaN

  __device__ __forceinline__ void add(const Extended<Mantissa>& a) {
    const int e = a.e + static_cast<int>(bits_of(a.m) >> Packed::kFraction);
    largest = max(largest, e);
    least = min(least, static_cast<unsigned>(e) - static_cast<unsigned>(kAboveZero));
    total += a.m;
  }
  __device__ __forceinline__ int shared() const {
    const bool fits = least > static_cast<unsigned>(largest - Packed::kLargest - kAboveZero) && total == total;
    return fits ? largest - Packed::kLargest - Packed::kBias : kApart;
  }
};

// Returns the word of a number that shares exponent `shared`. Precondition: `shared` is not kApart.
template <class Mantissa>
__device__ __forceinline__ typename PackedNumber<Mantissa>::Word pack(const Extended<Mantissa>& a, int shared) {
  using Packed = PackedNumber<Mantissa>;
  using Word = typename Packed::Word;
  const Word bits = bits_of(a.m), fraction = bits & ((Word(1) << Packed::kFraction) - 1);
  const int e = static_cast<int>(bits >> Packed::kFraction) + (a.e - (shared + Packed::kBias));
  return static_cast<Word>(max(e, 0)) << Packed::kFraction | fraction;
}
// Returns the number of a nonzero word, with its mantissa in [1, 2).
template <class Mantissa>
__device__ __forceinline__ Extended<Mantissa> unpack_nonzero(typename PackedNumber<Mantissa>::Word word, int shared) {
  using Packed = PackedNumber<Mantissa>;
  using Word = typename Packed::Word;
  return {from_bits((word & ((Word(1) << Packed::kFraction) - 1)) | Packed::kOne),
          shared + static_cast<int>(word >> Packed::kFraction)};
}
// Returns the number of a word times 2^by in plain floating point; 0 for the word 0, and if the result is below the
// smallest normal number. Precondition: the result does not overflow.
__device__ __forceinline__ float scaled_word(unsigned word, int by, float) {
  const int field = static_cast<int>(word >> 23) + (by + 127);
  return word != 0u && field > 0 ? __uint_as_float(word + (static_cast<unsigned>(by + 127) << 23)) : 0.0f;
}
__device__ __forceinline__ double scaled_word(unsigned long long word, int by, double) {
  const int field = static_cast<int>(word >> 52) + (by + 1023);
  const unsigned long long scaled = word + (static_cast<unsigned long long>(static_cast<int64>(by + 1023)) << 52);
  return word != 0u && field > 0 ? __longlong_as_double(static_cast<int64>(scaled)) : 0.0;
}

// True if the logit is ordinary. False for NaN.
__device__ __forceinline__ bool is_ordinary(float x) {
  return fabsf(x) < static_cast<float>(kOrdinaryLogit);
}
__device__ __forceinline__ bool is_ordinary(double x) {
  return fabs(x) < kOrdinaryLogit;
}

// Returns 2^f for |f| up to 0.5, with a relative error of 1.9e-9.
__device__ __forceinline__ float power_of_fraction(float f) {
  float y = 1.53458118e-04f;
  y = fmaf(y, f, 1.33999314e-03f);
  y = fmaf(y, f, 9.61848896e-03f);
  y = fmaf(y, f, 5.55032878e-02f);
  y = fmaf(y, f, 2.40226469e-01f);
  y = fmaf(y, f, 6.93147206e-01f);
  return fmaf(y, f, 1.0f);
}
// Returns e^r for |r| up to ln(2) / 2 by a Taylor series of degree 13, with a relative error of 4e-18.
__device__ __forceinline__ double exp_of_rest(double r) {
  double y = 1.0 / 6227020800.0;
  y = fma(y, r, 1.0 / 479001600.0);
  y = fma(y, r, 1.0 / 39916800.0);
  y = fma(y, r, 1.0 / 3628800.0);
  y = fma(y, r, 1.0 / 362880.0);
  y = fma(y, r, 1.0 / 40320.0);
  y = fma(y, r, 1.0 / 5040.0);
  y = fma(y, r, 1.0 / 720.0);
  y = fma(y, r, 1.0 / 120.0);
  y = fma(y, r, 1.0 / 24.0);
  y = fma(y, r, 1.0 / 6.0);
  y = fma(y, r, 0.5);
  y = fma(y, r, 1.0);
  return fma(y, r, 1.0);
}

constexpr float kHigh = 1.44269502e+00f, kLow = 1.92596303e-08f;  // log2 e = kHigh + kLow
constexpr double kLn2 = 0.6931471805599453, kLn2Low = 2.3190468138462996e-17;

// Returns e^x for an ordinary logit; for other arguments the result is unspecified. Adding kMagic, 1.5 times 2^23 (2^52
// in double), leaves the rounded integer in the low bits of the sum. This needs neither a conversion nor a rounding
// instruction, which take four times as long.
__device__ __forceinline__ Extended<float> ordinary_exponential(float x) {
  constexpr float kMagic = 12582912.0f;
  const float sum = fmaf(x, kHigh, kMagic), k = sum - kMagic;
  return {power_of_fraction(fmaf(x, kLow, fmaf(x, kHigh, -k))),
          static_cast<int>(__float_as_uint(sum)) - static_cast<int>(__float_as_uint(kMagic))};
}
__device__ __forceinline__ Extended<double> ordinary_exponential(double x) {
  constexpr double kMagic = 6755399441055744.0;
  const double sum = fma(x, 1.4426950408889634, kMagic), k = sum - kMagic;
  return {exp_of_rest(fma(k, -kLn2Low, fma(k, -kLn2, x))), static_cast<int>(__double_as_longlong(sum))};
}

// Returns e^x for any logit: zero for -inf, NaN for +inf and NaN. |e| is at most 2^27. Beyond 2^24 a float k loses its
// own last digits; `more` restores them.
__device__ __forceinline__ Extended<float> exponential(float x) {
  constexpr float kLargest = static_cast<float>(kLargestLogit);
  if (is_ordinary(x)) return ordinary_exponential(x);
  if (x < -kLargest) return zero_number<float>();
  if (!(x <= kLargest)) return {__uint_as_float(0x7fc00000u), 0};
  const float k = rintf(x * kHigh), residual = fmaf(x, kHigh, -k) + x * kLow, more = rintf(residual);
  return {power_of_fraction(residual - more), static_cast<int>(k) + static_cast<int>(more)};
}
__device__ __forceinline__ Extended<double> exponential(double x) {
  if (is_ordinary(x)) return ordinary_exponential(x);
  if (x < -kLargestLogit) return zero_number<double>();
  if (!(x <= kLargestLogit)) return {__longlong_as_double(0x7ff8LL << 48), 0};
  const double k = rint(x * 1.4426950408889634);
  return {exp_of_rest(fma(k, -kLn2Low, fma(k, -kLn2, x))), static_cast<int>(k)};
}
