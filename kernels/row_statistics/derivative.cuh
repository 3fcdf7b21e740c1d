// Derivative of a row-statistics loss along tangents v of its operands (JVP), which is a row-statistics loss again:
//
//   D[r] = sum over k of a_k s'_k + sum over l of b_l t'_l      a_k = d f / d s_k,  b_l = d f / d t_l
//   s'_k = sum over i of v_i d e_k / d x_i                      t': tangents of labels
//
// Its statistics are the s_k followed by the s'_k. Its vectors are the x followed by their tangents, and likewise its
// labels. Its gradient with respect to x is the Hessian-vector product:
//
//   hvp_i = sum over k of d D / d s_k  d e_k / d x_i  +  a_k  d (v_i d e_k / d x_i) / d x_i
//
// So the kernels of row_statistics.cuh process D like any loss. The functors of D, SummandsAlong and ValueAlong,
// evaluate those of the loss on nested numbers. Threads, traffic and preconditions are those of row_statistics.cuh.
//
// Here a norm of small degree is a function of a sum. For other degrees the norm n and its derivative n' are statistics
// themselves. They are accumulated relative to a scale, so that no power overflows, and their derivatives are expressed
// by n:
//
//   n' = sum over i of w_i e'_i          w_i = d n / d e_i = sign(e_i) (|e_i| / n)^(p - 1)
//   d n' / d e_i = (p - 1) ((|e_i| / n)^(p - 2) e'_i - n' w_i) / n,   where the factor of w_i is uniform over the row
#pragma once
#include "core/nested.cuh"
#include "row_statistics/row_statistics.cuh"

// Returns |e|^exponent. Its derivatives are 0 where e is 0, even where they would be infinite.
template <unsigned kMask>
__device__ __forceinline__ auto power_of_length(const Dual<NestedDual<double>, kMask>& e, double exponent) {
  const double x = e.value.value;
  const double power = x == 0.0 ? 0.0 : exponent * narrow_power(fabs(x), exponent - 2.0);
  const NestedDual<double> slope{power * x, scaled_tangent((exponent - 1.0) * power, e.value.tangent)};
  return chain(e, NestedDual<double>(power * x * x / exponent), slope);
}

// Returns the term that is summed for a statistic: e for a sum, |e|^p for a norm.
template <int kForm, unsigned kMask>
__device__ __forceinline__ auto summed_for_norm(const Dual<NestedDual<double>, kMask>& e, double exponent) {
  static_assert(kForm < kMaximum, "norms of other degrees are not functions of a sum");
  if constexpr (kForm == kPowers) {
    return power_of_length(e, exponent);
  } else if constexpr (kForm == kSum) {
    return e;
  } else if constexpr (kForm == kEuclidean) {
    return square(e);
  } else if constexpr (kForm % 2 == 0) {
    return integral_power<kForm / 2>(square(e));
  } else {
    return integral_power<kForm>(abs(e));
  }
}

// Returns x^(1 / kDegree). The tangent of a root of 0 is 0.
template <int kDegree, class T>
__device__ __forceinline__ NestedDual<T> scalar_root(NestedDual<T> x) {
  if constexpr (kDegree == 1) {
    return x;
  } else {
    const T y = scalar_root<kDegree>(x.value);
    return {y, scaled_tangent(y == T(0) ? T(0) : T(1) / (kDegree * integral_power<kDegree - 1>(y)), x.tangent)};
  }
}

// Returns a term with a feature's derivatives of the statistic. For a norm that is a function of a sum it is
// summed_for_norm(e). For other norms it has the derivatives of n^(1 - p) |e|^p / p with n as a constant, without the
// factor that all features share; its value is not used. `kept` is n, or its scale if that is a power of two.
template <int kForm, unsigned kMask>
__device__ __forceinline__ auto own_part_along(const Dual<NestedDual<double>, kMask>& e, double kept, double exponent) {
  if constexpr (kForm < kMaximum) {
    return summed_for_norm<kForm>(e, exponent);
  } else {
    const double x = e.value.value, inverse = kForm > kScaledPowers ? inverse_scale(kept) : 1.0 / kept;
    const double ratio = kForm > kScaledPowers ? fabs(x) * inverse : fabs(x) / kept;
    NestedDual<double> slope(0.0);
    if constexpr (kForm == kMaximum) {
      slope.value = fabs(x) == kept ? scalar_sign(x) : 0.0;
    } else if (ratio != 0.0) {
      const double power = uniform_power<kForm>(ratio, exponent - 2.0);
      slope = {scalar_sign(x) * ratio * power, scaled_tangent((exponent - 1.0) * power * inverse, e.value.tangent)};
    }
    return chain(e, e.value, slope);
  }
}

// Returns the norm as a function of that sum, or `sum` itself if it is already the norm. A norm of 0 or infinity has no
// direction: its derivatives are 0.
template <int kForm, class T, unsigned kMask>
__device__ __forceinline__ Dual<T, kMask> norm_of_sum(const Dual<T, kMask>& sum, double exponent) {
  if constexpr (kForm == kSum) {
    return sum;
  } else if constexpr (kForm == kPowers) {
    const double x = sum.value.value, norm = pow(x, 1.0 / exponent);
    const bool nowhere = norm == 0.0 || norm > scalar_max(double());
    const double slope = nowhere ? 0.0 : norm / (exponent * x);
    const double curvature = nowhere ? 0.0 : (1.0 / exponent - 1.0) * slope / x;
    return chain(sum, T(norm), T(slope, scaled_tangent(curvature, sum.value.tangent)));
  } else if constexpr (kForm >= kMaximum) {
    const double norm = sum.value.value;
    const bool nowhere = norm == 0.0 || norm > scalar_max(double());
    const double curvature = nowhere || kForm == kMaximum ? 0.0 : (1.0 - exponent) / norm;
    return chain(sum, T(norm), T(nowhere ? 0.0 : 1.0, scaled_tangent(curvature, sum.value.tangent)));
  } else {
    const T norm = scalar_root<kForm>(sum.value);
    const bool nowhere = norm == T(0) || norm > scalar_max(T());
    if constexpr (kForm == kAbsolute) {
      return chain(sum, norm, nowhere ? T(0) : T(1));
    } else {
      const T slope = T(1.0 / kForm) / integral_power<kForm - 1>(nowhere ? T(1) : norm);
      return chain(sum, norm, nowhere ? T(0) : slope);
    }
  }
}

// Split a dual number over nested numbers into two over doubles: without_tangent() returns its values, tangent_of() its
// tangents along v.
template <unsigned kMask>
__device__ __forceinline__ Dual<double, kMask> without_tangent(const Dual<NestedDual<double>, kMask>& x) {
  Dual<double, kMask> y;
  y.value = x.value.value;
  for_each_slot<kMask>([&](int k) { y.tangent[k] = x.tangent[k].value; });
  return y;
}
template <unsigned kMask>
__device__ __forceinline__ Dual<double, kMask> tangent_of(const Dual<NestedDual<double>, kMask>& x) {
  Dual<double, kMask> y;
  y.value = x.value.tangent;
  for_each_slot<kMask>([&](int k) { y.tangent[k] = x.tangent[k].tangent; });
  return y;
}

// Returns x with `tangent` along v, as the variable of slot kSlot. It is differentiated if x is.
template <int kSlot, unsigned kMask>
__device__ __forceinline__ auto with_tangent(const Dual<double, kMask>& x, double tangent) {
  return variable<kMask == 0u ? 0u : 1u << kSlot, kSlot>(NestedDual<double>{x.value, tangent});
}

// Returns the tangent of operand kSlot, or 0 if it has none. From index kFirst on `arguments` has kOwn operands,
// followed by the tangents of those in kHasTangent.
template <unsigned kHasTangent, int kFirst, int kOwn, int kSlot, class Arguments>
__device__ __forceinline__ double tangent_in(const Arguments& arguments) {
  if constexpr (has<kHasTangent>(kSlot)) {
    return get<kFirst + kOwn + count_bits(kHasTangent & ((1u << kSlot) - 1u))>(arguments).value;
  } else {
    return 0.0;
  }
}

// Partial result of a statistic of the loss and of its derivative along the tangents, over some features of a row. For
// a norm of small degree it has the sum that the norm is a function of, and the derivative of that sum. For other norms
// it has two sums relative to the scale of `Statistic`: of (|e| / scale)^p, and of sign(e) (|e| / scale)^(p - 1) e'.
// For the norm of infinite degree these are the sums of 1 and of sign(e) e' over the terms that share the largest |e|.
template <int kForm>
struct StatisticAlong {
  static constexpr int kNumbers = kForm < kMaximum ? 2 : 3;
  double number[kNumbers];  // both sums and the scale

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) number[i] = 0.0;
  }
  template <unsigned kMask>
  __device__ __forceinline__ void add(const Dual<NestedDual<double>, kMask>& term, double exponent) {
    if constexpr (kForm < kMaximum) {
      const NestedDual<double> e = summed_for_norm<kForm>(term, exponent).value;
      number[0] += e.value;
      number[1] += e.tangent;
    } else {
      const double size = fabs(term.value.value);
      const double along = scaled_tangent(scalar_sign(term.value.value), term.value.tangent);
      if constexpr (kForm <= kScaledPowers) {
        merge(StatisticAlong{{1.0, along, size}}, exponent);
      } else {
        const int step = scale_step(exponent);
        // Also true for NaN.
        if (!(size <= number[2] * power_of_two(step))) {
          merge(StatisticAlong{{0.0, 0.0, scale_next_to(size, step)}}, exponent);
        }
        const double ratio = size * inverse_scale(number[2]), factor = factor_of(ratio, exponent);
        number[0] = fma(factor, ratio, number[0]);
        number[1] = fma(factor, along, number[1]);
      }
    }
  }
  __device__ __forceinline__ void merge(const StatisticAlong& x, double exponent) {
    if constexpr (kForm < kMaximum) {
      number[0] += x.number[0];
      number[1] += x.number[1];
    } else {
      const CommonScale<kForm> common(number[2], x.number[2]);
      const StatisticAlong smaller = common.of_other ? *this : x, other = common.of_other ? x : *this;
      const double factor = factor_of(common.ratio, exponent);
      number[0] = fma(smaller.number[0], factor * common.ratio, other.number[0]);
      number[1] = fma(smaller.number[1], factor, other.number[1]);
      number[2] = common.scale;
    }
  }
  __device__ __forceinline__ StatisticAlong of_lane(int offset) const {
    StatisticAlong x;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) x.number[i] = __shfl_xor_sync(0xffffffffu, number[i], offset);
    return x;
  }
  __device__ __forceinline__ double value(double exponent) const {
    if constexpr (kForm < kMaximum) {
      return number[0];
    } else if constexpr (kForm == kMaximum) {
      return number[2];
    } else {
      return number[2] == 0.0 ? 0.0 : number[2] * pow(number[0], 1.0 / exponent);
    }
  }
  __device__ __forceinline__ double derivative(double value) const {
    if constexpr (kForm < kMaximum) {
      return number[1];
    } else {
      return number[1] * factor_of_row(value);
    }
  }
  // Returns `kept` of own_part_along(): the scale if it is a power of two, the norm otherwise.
  __device__ __forceinline__ double kept(double value) const {
    return kForm > kScaledPowers ? number[2] : value;
  }
  // Returns `slope` times the factor of both derivatives that all features share. `slope` is 0 for a norm of 0 or
  // infinity.
  __device__ __forceinline__ double shared_part(double slope, double value) const {
    if constexpr (kForm == kMaximum || kForm > kScaledPowers) {
      return scaled_tangent(slope, factor_of_row(value));
    } else {
      return slope;
    }
  }

 private:
  // Returns (scale / n)^(p - 1), or for the norm of infinite degree 1 / the number of terms that share the largest |e|.
  __device__ __forceinline__ double factor_of_row(double value) const {
    if constexpr (kForm == kMaximum) {
      return 1.0 / number[0];
    } else {
      return (kForm > kScaledPowers ? value * inverse_scale(number[2]) : value / number[2]) / number[0];
    }
  }
  // Returns the factor that brings a derivative from one scale to a larger one: ratio^(p - 1), where ratio is the
  // quotient of the scales.
  __device__ __forceinline__ static double factor_of(double ratio, double exponent) {
    if (ratio == 0.0 || ratio == 1.0 || kForm == kMaximum) return ratio == 1.0 ? 1.0 : 0.0;
    return uniform_power<kForm>(ratio, exponent - 1.0);
  }
};

// Functor of the terms of D's statistics. It evaluates those of the loss, `Base` of kOwn vectors, on nested numbers,
// whose values are the terms of the s and whose tangents are the terms of the s'. Arguments are the vectors, the
// tangents of those in kHasTangent, and with kFirsts the first elements of all of these.
template <class Base, int kOwn, unsigned kHasTangent>
struct SummandsAlong {
  static constexpr int kStatistics = 2 * Base::kStatistics, kForm = Base::kForm;
  static constexpr unsigned kNorms = Base::kNorms;
  static constexpr bool kFirsts = Base::kFirsts;
  Base base;

  __device__ __forceinline__ double exponent() const {
    return base.exponent();
  }
  template <class... X>
  __device__ __forceinline__ auto operator()(const X&... x) const {
    return terms(make_tuple(x...), typename MakeIndices<kOwn>::type{}, typename MakeIndices<Base::kStatistics>::type{});
  }

 private:
  static constexpr int kVectors = kOwn + count_bits(kHasTangent);

  template <class Arguments, int... kSlot, int... kStatistic>
  __device__ __forceinline__ auto terms(const Arguments& x, Indices<kSlot...>, Indices<kStatistic...>) const {
    const auto nested = of_base(x, Indices<kSlot...>{});
    return make_tuple(as_dual(get<kStatistic>(nested))...);
  }
  template <class Arguments, int... kSlot>
  __device__ __forceinline__ auto of_base(const Arguments& x, Indices<kSlot...>) const {
    if constexpr (kFirsts) {
      return base(with_tangent<kSlot>(get<kSlot>(x), tangent_in<kHasTangent, 0, kOwn, kSlot>(x))...,
                  constant<NestedDual<double>>(get<kVectors + kSlot>(x).value)...);
    } else {
      return base(with_tangent<kSlot>(get<kSlot>(x), tangent_in<kHasTangent, 0, kOwn, kSlot>(x))...);
    }
  }
};

// All statistics of D: those of the loss, followed by their derivatives.
template <class Base, class Slots>
struct StatisticsAlong;
template <class Base, int... k>
struct StatisticsAlong<Base, Indices<k...>> : EachStatistic<Indices<k...>, StatisticAlong<form_of<Base, k>()>...> {
  template <int i>
  __device__ __forceinline__ double value(double exponent) const {
    const auto& statistic = get<i % Base::kStatistics>(this->each);
    const double value = statistic.value(exponent);
    return i < Base::kStatistics ? value : statistic.derivative(value);
  }
  template <int i>
  __device__ __forceinline__ double kept(const double* values) const {
    return get<i % Base::kStatistics>(this->each).kept(values[i % Base::kStatistics]);
  }
  template <int i>
  __device__ __forceinline__ double shared_part(double slope, const double* values, double) const {
    return get<i % Base::kStatistics>(this->each).shared_part(slope, values[i % Base::kStatistics]);
  }
  template <class Terms>
  __device__ __forceinline__ static auto own_parts(const Terms& terms, const double* kept, double exponent) {
    const auto nested = make_tuple(own_part_along<form_of<Base, k>()>(get<k>(terms), kept[k], exponent)...);
    return make_tuple(without_tangent(get<k>(nested))..., tangent_of(get<k>(nested))...);
  }
};
template <class Base, int kOwn, unsigned kHasTangent, int... kAll>
struct StatisticsOf<SummandsAlong<Base, kOwn, kHasTangent>, Indices<kAll...>>
    : StatisticsAlong<Base, typename MakeIndices<Base::kStatistics>::type> {};

// Functor of D from its statistics and labels. It evaluates the value of the loss on nested numbers: `Base` takes the
// statistics of `Summands`, kLabels labels, and with kFirsts the first elements of kOwn vectors. D is NaN where the
// value of the loss is.
template <class Base, class Summands, int kOwn, unsigned kHasTangent, int kLabels, unsigned kLabelHasTangent>
struct ValueAlong {
  Base base;

  template <class... X>
  __device__ __forceinline__ auto operator()(const X&... x) const {
    return along<(X::kMask | ... | 0u)>(make_tuple(x...), typename MakeIndices<kStatistics>::type{},
                                        typename MakeIndices<kLabels>::type{}, typename MakeIndices<kOwn>::type{});
  }

 private:
  static constexpr int kStatistics = Summands::kStatistics, kFirstLabel = 2 * kStatistics;
  static constexpr int kFirstOfFirsts = kFirstLabel + kLabels + count_bits(kLabelHasTangent);

  template <unsigned kMask, class Arguments, int... kStatistic, int... kLabel, int... kSlot>
  __device__ __forceinline__ auto along(const Arguments& x, Indices<kStatistic...>, Indices<kLabel...>,
                                        Indices<kSlot...>) const {
    const auto y = of_base(
        x, Indices<kSlot...>{},
        norm_of_sum<form_of<Summands, kStatistic>()>(
            with_tangent<kStatistic>(get<kStatistic>(x), get<kStatistics + kStatistic>(x).value), base.exponent())...,
        with_tangent<kStatistics + kLabel>(get<kFirstLabel + kLabel>(x),
                                           tangent_in<kLabelHasTangent, kFirstLabel, kLabels, kLabel>(x))...);
    Dual<double, kMask> z;
    z.value = y.value.value != y.value.value ? y.value.value : y.value.tangent;
#pragma unroll
    for (int k = 0; k < kStatistics; ++k) {
      const NestedDual<double> slope = tangent_or_zero(y, k);
      if (has<kMask>(k)) z.tangent[k] = slope.tangent;
      if (has<kMask>(kStatistics + k)) z.tangent[kStatistics + k] = slope.value;
    }
#pragma unroll
    for (int k = 0; k < kLabels; ++k) {
      if (has<kMask>(kFirstLabel + k)) z.tangent[kFirstLabel + k] = tangent_or_zero(y, kStatistics + k).tangent;
    }
    return z;
  }
  template <class Arguments, int... kSlot, class... X>
  __device__ __forceinline__ auto of_base(const Arguments& x, Indices<kSlot...>, const X&... nested) const {
    if constexpr (Summands::kFirsts) {
      return base(nested..., constant<NestedDual<double>>(get<kFirstOfFirsts + kSlot>(x).value)...);
    } else {
      return base(nested...);
    }
  }
};
