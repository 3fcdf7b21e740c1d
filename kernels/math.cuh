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

__device__ __forceinline__ float scalar_largest(float) {
  return 3.40282347e38f;
}
__device__ __forceinline__ double scalar_largest(double) {
  return 1.79769313486231571e308;
}

__device__ __forceinline__ float scalar_nan(float) {
  return __int_as_float(0x7fffffff);
}
__device__ __forceinline__ double scalar_nan(double) {
  return __longlong_as_double(0x7fffffffffffffffLL);
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

// c + d x + e x^2 + ...
template <class T>
__device__ __forceinline__ T scalar_polynomial(T, T c) {
  return c;
}
template <class T, class... Ts>
__device__ __forceinline__ T scalar_polynomial(T x, T c, Ts... higher) {
  return scalar_fma(scalar_polynomial(x, higher...), x, c);
}

// log(1 + e) for 0 <= e <= 1. In float a polynomial, to 2^-27 before rounding: less than half of log1pf's arithmetic.
__device__ __forceinline__ float scalar_log1p_of_fraction(float e) {
  const float excess = scalar_polynomial(e, -0.499999315f, 0.333304644f, -0.249580204f, 0.196921214f, -0.153449774f,
                                         0.106613711f, -0.0574604832f, 0.0200884603f, -0.00329107419f);
  return scalar_fma(e * e, excess, e);
}
__device__ __forceinline__ double scalar_log1p_of_fraction(double e) {
  return log1p(e);
}

template <class T>
struct Logs {
  T success;  // -log p
  T failure;  // -log(1 - p)
};

// For 0 <= p <= 1. In float the smaller one of p and 1 - p is exact, and gives both: its own logarithm is the GPU's
// fast one, which up to 1/2 is within 3.4 units in the last place, and that of the other one a polynomial.
__device__ __forceinline__ Logs<float> scalar_minus_logs(float p) {
  const bool low = p < 0.5f;
  const float small = low ? p : 1.0f - p;
  const float excess = scalar_polynomial(small, 0.500000894f, 0.333263248f, 0.251868635f, 0.175874531f, 0.34006843f,
                                         -0.592270017f, 1.97093475f, -2.47645473f, 1.74344373f);
  const float of_small = -__logf(small);
  const float of_large = scalar_fma(small * small, excess, small);
  return {low ? of_small : of_large, low ? of_large : of_small};
}
__device__ __forceinline__ Logs<double> scalar_minus_logs(double p) {
  return {-log(p), -log1p(-p)};
}

// What softplus and sigmoid of x and -x have in common: one exponential.
template <class T>
struct Logistic {
  T excess;   // log(1 + e^-|x|), by which softplus(x) exceeds max(x, 0)
  T larger;   // the larger one of sigmoid(x) and sigmoid(-x)
  T smaller;  // the other one, not as 1 - larger, which would cancel
};

template <class T>
__device__ __forceinline__ Logistic<T> scalar_logistic(T x) {
  const T e = scalar_exp(-scalar_abs(x));
  const T larger = scalar_divide_roughly(T(1), T(1) + e);
  return {scalar_log1p_of_fraction(e), larger, e * larger};
}

// A function at a point, and its derivative there.
template <class T>
struct Point {
  T value;
  T slope;
};

// log(t!) = log Gamma(1 + t) for 0 <= t <= 1, and its derivative, digamma(1 + t): polynomials in float, rational
// functions in double, each to the accuracy of its type relative to t, or to 1.
__device__ __forceinline__ Point<float> scalar_log_factorial(float t) {
  return {t * scalar_polynomial(t, -0.577215552f, 0.822456658f, -0.400458008f, 0.268425882f, -0.196365833f,
                                0.135368302f, -0.0746930093f, 0.0271075834f, -0.00462601706f),
          scalar_polynomial(t, -0.577215672f, 1.64493382f, -1.20202374f, 1.08157527f, -1.02935457f, 0.974021614f,
                            -0.852000177f, 0.622659445f, -0.336415797f, 0.114699475f, -0.0180953369f)};
}

__device__ __forceinline__ Point<double> scalar_log_factorial(double t) {
  const double value =
      scalar_polynomial(t, -0.5772156649015329, -0.7410253242511072, 0.26080419598936605, 0.7037642309661976,
                        0.30870703510417696, 0.043544749068222685, 0.0014207780246765984) /
      scalar_polynomial(t, 1.0, 2.7086797062964796, 2.7135610264939634, 1.2357634447936388, 0.25278927947968416,
                        0.0195197685718673, 0.00033139900786988954);
  const double slope =
      scalar_polynomial(t, -0.5772156649015329, 0.4267435154525359, 1.3871506051863378, 0.7821162351980017,
                        0.16309927511772468, 0.012358583895338605, 0.00022740420337934904) /
      scalar_polynomial(t, 1.0, 2.110459964047409, 1.5286487129303108, 0.481345865895638, 0.06658221501766075,
                        0.003465284039472801, 4.020850716302013e-05);
  return {t * value, slope};
}

// What Stirling's formula, t log t - t + log(2 pi t) / 2, leaves of log(t!) for t >= 1, and what log t leaves of the
// derivative of log(t!), which is digamma(1 + t). In float polynomials of 1 / t; in double Stieltjes functions of t^2,
// which rational functions approach fast.
__device__ __forceinline__ Point<float> scalar_stirling_remainder(float t) {
  const float w = scalar_divide_roughly(1.0f, t);
  return {w * scalar_polynomial(w, 0.0833332539f, 1.4261218e-06f, -0.00278320257f, -2.09734881e-05f, 0.000999916228f,
                                -0.000596316822f, 0.000127364794f),
          w * scalar_polynomial(w, 0.499999672f, -0.0833229125f, -0.00011061789f, 0.00887052435f, -0.00123787974f,
                                -0.00318499235f, 0.0023036066f, -0.000533068844f)};
}
__device__ __forceinline__ Point<double> scalar_stirling_remainder(double t) {
  const double w = 1.0 / t;
  const double z = w * w;
  const double value =
      scalar_polynomial(z, 0.08333333333333263, 1.2071754942141741, 5.778739451978612, 11.479743276635,
                        9.75103807161643, 3.274911060013725, 0.3441863784326947, 0.005385738189941016) /
      scalar_polynomial(z, 1.0, 14.519439263899768, 69.81933092348277, 139.95309280533883, 121.10622423617198,
                        42.37795357363523, 4.941527733747608, 0.11336083760695324);
  const double slope =
      scalar_polynomial(z, 0.08333333333329708, 1.2954179060952036, 6.701188898051949, 14.488987433394701,
                        13.480974203851403, 4.976132221337957, 0.5706848910257889, 0.009012640992493307) /
      scalar_polynomial(z, 1.0, 15.645014873019223, 81.9311492285053, 181.36596278624407, 176.6981656583708,
                        71.67383895921128, 10.190610492760948, 0.3202694958556699);
  return {w * value, 0.5 * w - z * slope};
}

// The terms of log(t!) that a Poisson loss takes along.
enum LogFactorial { kNoTerm = 0, kStirling = 1, kExact = 2 };

// rate - t log_rate, plus log(t!) by `terms`, of which kStirling has Stirling's formula for t > 1 and nothing below;
// and the derivative with respect to t. `log_rate` is log(rate + shift), `log_ratio` log((rate + shift) / t).
//
// For t > 1, rate - t log_rate + t log t - t = t (e^u - 1 - u) - shift with u = log_ratio is computed as one, because
// it is small beside its parts wherever the prediction is good: by a series where they cancel. Where t = 0 nothing is
// counted: 0 log 0 = 0 log inf = 0, with derivative 0. Where e^x overflows, so does the loss, whatever t x is. A number
// that is no count has no log(t!).
template <class T>
__device__ __forceinline__ Point<T> scalar_poisson(T rate, T shift, T log_rate, T log_ratio, T t, int terms) {
  if (terms != kNoTerm && (t > scalar_largest(T()) || (terms == kExact && t < T(0)))) {
    return {scalar_nan(T()), scalar_nan(T())};
  }
  const bool overflow = rate > scalar_largest(T()) && scalar_abs(log_rate) + scalar_abs(t) <= scalar_largest(T());
  if (terms != kNoTerm && t > T(1)) {
    constexpr int kTerms = sizeof(T) == 4 ? 8 : 15;
    T series = T(1);
#pragma unroll
    for (int k = kTerms; k > 2; --k) series = scalar_fma(log_ratio * (T(1) / T(k)), series, T(1));
    const bool near = scalar_abs(log_ratio) < T(0.5);
    const T squared = T(0.5) * log_ratio * log_ratio;
    const T far = overflow ? rate : rate - scalar_fma(t, log_ratio, t);
    const T deviance = near ? scalar_fma(t, squared * series, -shift) : far;
    const T constant = scalar_fma(T(0.5), scalar_log(t), T(0.91893853320467274));  // log(2 pi t) / 2
    if (terms == kStirling) return {deviance + constant, scalar_divide_roughly(T(0.5), t) - log_ratio};
    const Point<T> remainder = scalar_stirling_remainder(t);
    return {deviance + (constant + remainder.value), remainder.slope - log_ratio};
  }
  const bool nothing = t == T(0) && scalar_abs(log_rate) > scalar_largest(T());
  const Point<T> plain = {nothing || overflow ? rate : rate - t * log_rate, nothing ? T(0) : -log_rate};
  if (terms != kExact) return plain;
  const Point<T> factorial = scalar_log_factorial(t);
  return {plain.value + factorial.value, plain.slope + factorial.slope};
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

// a log(a / b) for a > 0, b >= 0; see scalar_ratio.
template <class T, unsigned kA, unsigned kB>
__device__ __forceinline__ Dual<T, kA | kB> times_log_ratio(const Dual<T, kA>& a, const Dual<T, kB>& b) {
  const Ratio<T> ratio = scalar_ratio(a.value, b.value);
  return chain(a, b, a.value * ratio.log, ratio.log + T(1), -ratio.quotient);
}

// log(1 + e^x), which overflows nowhere and keeps its digits. Where the derivative is 0 it is, whatever x depends on.
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> softplus(const Dual<T, kMask>& x) {
  const Logistic<T> at = scalar_logistic(x.value);
  const T partial = x.value < T(0) ? at.smaller : at.larger;
  Dual<T, kMask> y = chain(x, (x.value > T(0) ? x.value : T(0)) + at.excess, partial);
#pragma unroll
  for (int k = 0; k < kMaxOperands; ++k) {
    if (has<kMask>(k) && partial == T(0)) y.tangent[k] = T(0);
  }
  return y;
}

// (1 - y) softplus(x) + w y softplus(-x) for finite w. No term cancels, neither in the value nor in a derivative. An
// infinite x against a factor of 0 costs nothing, with derivatives 0.
template <class T, unsigned kX, unsigned kY, class W>
__device__ __forceinline__ auto logistic_loss(const Dual<T, kX>& x, const Dual<T, kY>& y, const W& weight) {
  const auto w = lift<T>(weight);
  const Logistic<T> at = scalar_logistic(x.value);
  const T size = scalar_abs(x.value);
  const T not_y = T(1) - y.value;
  const bool negative = x.value < T(0);
  const T label = negative ? y.value : not_y;
  const T factor = negative ? w.value : T(1);
  const bool nothing = label == T(0) || factor == T(0);
  const T linear = nothing ? T(0) : factor * (label * size);
  // 0 * w is NaN for an infinite w, whose product with 0 has no one value.
  const T value = scalar_fma(scalar_fma(w.value, y.value, not_y), at.excess, linear) + T(0) * w.value;
  const T falling = w.value * y.value;
  const T partial = scalar_fma(negative ? falling : not_y, at.larger, -((negative ? not_y : falling) * at.smaller));
  const bool free = nothing && size > scalar_largest(T());
  const T by_label = free ? T(0) : (negative ? w.value * size : -size);
  const T against = at.excess + (negative && !free ? size : T(0));
  return chain(x, y, w, value, negative ? -partial : partial, scalar_fma(w.value - T(1), at.excess, by_label),
               y.value * against);
}

// -(y log p + (1 - y) log(1 - p)) with logarithms no less than -100; NaN where p or y is no probability. In derivatives
// 1 / p and 1 / (1 - p) are no more than 10^12, also where the logarithm is cut off, so that 0 * inf does not arise.
template <class T, unsigned kP, unsigned kY>
__device__ __forceinline__ Dual<T, kP | kY> log_loss(const Dual<T, kP>& p, const Dual<T, kY>& y) {
  const T not_p = T(1) - p.value;
  const T not_y = T(1) - y.value;
  const bool valid = p.value * not_p >= T(0) && y.value * not_y >= T(0);
  const Logs<T> logs = scalar_minus_logs(p.value);
  const T hit = min(logs.success, T(100));
  const T miss = min(logs.failure, T(100));
  const T value = scalar_fma(y.value, hit, not_y * miss);
  const T per_p = min(scalar_divide_roughly(T(1), p.value), T(1e12));
  const T per_not_p = min(scalar_divide_roughly(T(1), not_p), T(1e12));
  // The logarithm of (1 - p) / p, where the logarithms cancel: 1 - 2 p is exact there.
  const T excess = not_p - p.value;
  const T odds = scalar_abs(excess) < T(0.5) ? scalar_log1p(excess / p.value) : hit - miss;
  return chain(p, y, valid ? value : scalar_nan(T()), scalar_fma(not_y, per_not_p, -(y.value * per_p)), odds);
}

// e^x - t x, plus log(t!) by `terms`; see scalar_poisson.
template <class T, unsigned kX, unsigned kT>
__device__ __forceinline__ Dual<T, kX | kT> poisson_of_log_rate(const Dual<T, kX>& x, const Dual<T, kT>& t, int terms) {
  const T rate = scalar_exp(x.value);
  // The rate knows its distance from t to its own digits; x, which is large where the rate is, does not.
  const bool normal = rate > T(1e-30) && rate <= scalar_largest(T());
  const T log_ratio = normal ? scalar_ratio(rate, t.value).log : x.value - scalar_log(t.value);
  const Point<T> loss = scalar_poisson(rate, T(0), x.value, log_ratio, t.value, terms);
  return chain(x, t, loss.value, rate - t.value, loss.slope);
}

// x - t log(x + epsilon), plus log(t!) by `terms`; see scalar_poisson.
template <class T, unsigned kX, unsigned kT>
__device__ __forceinline__ Dual<T, kX | kT> poisson_of_rate(const Dual<T, kX>& x, const Dual<T, kT>& t,
                                                            const Dual<T, 0>& epsilon, int terms) {
  // Where the rate is about 1, what the sum rounds off is as large as its logarithm.
  const T rate = x.value + epsilon.value;
  const T part = rate - x.value;
  const T rounded_off = (x.value - (rate - part)) + (epsilon.value - part);
  const bool finite = rate > T(0) && rate <= scalar_largest(T());
  const T log_rate = scalar_log(rate) + (finite ? scalar_divide_roughly(rounded_off, rate) : T(0));
  const T log_ratio = scalar_ratio(rate, t.value).log;
  const Point<T> loss = scalar_poisson(x.value, epsilon.value, log_rate, log_ratio, t.value, terms);
  return chain(x, t, loss.value, t.value == T(0) ? T(1) : T(1) - scalar_divide_roughly(t.value, rate), loss.slope);
}

// x^2 / 2, which overflows where itself does, not where x^2 does.
template <class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> half_square(const Dual<T, kMask>& x) {
  return chain(x, x.value * (T(0.5) * x.value), x.value);
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
