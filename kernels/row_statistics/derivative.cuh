// The derivative of a loss of row statistics along tangents v of its operands, which is a loss of row statistics again:
//
//   D[r] = sum over k of a_k s'_k + sum over l of b_l t'_l      a_k = d f / d s_k,  b_l = d f / d t_l
//   s'_k = sum over i of v_i d e_k / d x_i                      t': tangents of labels
//
// Its statistics are the s_k and then the s'_k, its vectors the x and then their tangents, and its labels likewise. Its
// gradient with respect to x is the product of the second derivatives with the tangents:
//
//   hvp_i = sum over k of d D / d s_k  d e_k / d x_i  +  a_k  d (v_i d e_k / d x_i) / d x_i
//
// so kernels of rows take it as they take any loss. Both functors evaluate those of the loss on nested numbers.
//
// A norm of small degree is a function of a sum here. Of other degrees n and n' are statistics themselves, added up
// beside a scale, so that no power overflows, and their derivatives are written with n:
//
//   n' = sum over i of w_i e'_i          w_i = d n / d e_i = sign(e_i) (|e_i| / n)^(p - 1)
//   d n' / d e_i = (p - 1) ((|e_i| / n)^(p - 2) e'_i - n' w_i) / n,   of which the second part is a factor of the row
#pragma once
#include "core/nested.cuh"
#include "row_statistics/row_statistics.cuh"

// |e|^exponent. Where e is 0, so are its derivatives, also where they are infinite.
template <unsigned kMask>
__device__ __forceinline__ auto power_of_length(const Dual<NestedDual<double>, kMask>& e, double exponent) {
  const double x = e.value.value;
  const double power = x == 0.0 ? 0.0 : exponent * narrow_power(fabs(x), exponent - 2.0);
  const NestedDual<double> slope{power * x, scaled_tangent((exponent - 1.0) * power, e.value.tangent)};
  return chain(e, NestedDual<double>(power * x * x / exponent), slope);
}

// The term that is summed for a statistic that is a norm.
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

template <int kDegree, class T>
__device__ __forceinline__ NestedDual<T> scalar_root(NestedDual<T> x) {
  if constexpr (kDegree == 1) {
    return x;
  } else {
    const T y = scalar_root<kDegree>(x.value);
    return {y, scaled_tangent(y == T(0) ? T(0) : T(1) / (kDegree * integral_power<kDegree - 1>(y)), x.tangent)};
  }
}

// That term; of a norm that is no function of a sum, one that has its derivatives with n as a constant, but for the
// part that all features share: n^(1 - p) |e|^p / p. Its value is not used.
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

// The norm of that sum, or of itself. A norm of 0, or an infinite one, has no direction: its derivatives are 0.
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

// The value of a nested number as a dual number, and its tangent.
template <unsigned kMask>
__device__ __forceinline__ Dual<double, kMask> without_tangent(const Dual<NestedDual<double>, kMask>& x) {
  Dual<double, kMask> y;
  y.value = x.value.value;
#pragma unroll
  for (int k = 0; k < kMaxOperands; ++k) {
    if (has<kMask>(k)) y.tangent[k] = x.tangent[k].value;
  }
  return y;
}
template <unsigned kMask>
__device__ __forceinline__ Dual<double, kMask> tangent_of(const Dual<NestedDual<double>, kMask>& x) {
  Dual<double, kMask> y;
  y.value = x.value.tangent;
#pragma unroll
  for (int k = 0; k < kMaxOperands; ++k) {
    if (has<kMask>(k)) y.tangent[k] = x.tangent[k].tangent;
  }
  return y;
}

// A number in slot kSlot with a tangent, differentiated if x is.
template <int kSlot, unsigned kMask>
__device__ __forceinline__ auto with_tangent(const Dual<double, kMask>& x, double tangent) {
  return variable<kMask == 0u ? 0u : 1u << kSlot, kSlot>(NestedDual<double>{x.value, tangent});
}

// The tangent of operand kSlot of kOwn, of which those in kHasTangent have one behind them all, from kFirst on; else 0.
template <unsigned kHasTangent, int kFirst, int kOwn, int kSlot, class Arguments>
__device__ __forceinline__ double tangent_in(const Arguments& arguments) {
  if constexpr (has<kHasTangent>(kSlot)) {
    return get<kFirst + kOwn + count_bits(kHasTangent & ((1u << kSlot) - 1u))>(arguments).value;
  } else {
    return 0.0;
  }
}

// A statistic of the loss and its derivative along the tangents, of some features of a row. Of a norm of small degree
// these are the sum that it is a function of, and its derivative. Of others they are sums beside a scale, that of
// `Statistic`: of (|e| / scale)^p, and of sign(e) (|e| / scale)^(p - 1) e'; or, of infinite degree, of 1 and of
// sign(e) e' over the terms that share the largest |e|.
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
        // Also of NaN.
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
  // The number that `own_part_along` depends on.
  __device__ __forceinline__ double kept(double value) const {
    return kForm > kScaledPowers ? number[2] : value;
  }
  // The part of both derivatives that all features share, times `slope`, which is 0 of a norm of 0 or infinity.
  __device__ __forceinline__ double shared_part(double slope, double value) const {
    if constexpr (kForm == kMaximum || kForm > kScaledPowers) {
      return scaled_tangent(slope, factor_of_row(value));
    } else {
      return slope;
    }
  }

 private:
  // (scale / n)^(p - 1), or 1 of the terms that share the largest |e|.
  __device__ __forceinline__ double factor_of_row(double value) const {
    if constexpr (kForm == kMaximum) {
      return 1.0 / number[0];
    } else {
      return (kForm > kScaledPowers ? value * inverse_scale(number[2]) : value / number[2]) / number[0];
    }
  }
  // The factor of a derivative at the scale of another term.
  __device__ __forceinline__ static double factor_of(double ratio, double exponent) {
    if (ratio == 0.0 || ratio == 1.0 || kForm == kMaximum) return ratio == 1.0 ? 1.0 : 0.0;
    return uniform_power<kForm>(ratio, exponent - 1.0);
  }
};

// The terms of the statistics of the loss on nested numbers, which have those of D: `Base` takes kOwn vectors.
// Arguments are the vectors, the tangents of those in kHasTangent, and with kFirsts the first elements of all of these.
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
    const auto found = of_base(x, Indices<kSlot...>{});
    return make_tuple(as_dual(get<kStatistic>(found))...);
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

// All statistics of D: those of the loss, and then their derivatives.
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

// D from its statistics and labels, from the value of the loss: `Base` takes as many statistics as `Summands` has,
// kLabels labels, and with kFirsts the first elements of kOwn vectors. D is NaN where the value is.
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
  __device__ __forceinline__ auto of_base(const Arguments& x, Indices<kSlot...>, const X&... own) const {
    if constexpr (Summands::kFirsts) {
      return base(own..., constant<NestedDual<double>>(get<kFirstOfFirsts + kSlot>(x).value)...);
    } else {
      return base(own...);
    }
  }
};
