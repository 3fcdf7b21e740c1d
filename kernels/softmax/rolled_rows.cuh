// Rows of a lane in shared memory, for classes whose arithmetic would take too many registers, and too much code, with
// rows in registers (register_rows.cuh). Value and gradient of softmax.cuh.
//
//   a lane owns one row, and all its classes
//
// 1. The lane finds the largest logit of its row, and the largest magnitude.
// 2. It adds the exponentials, kRolledClasses classes at a time.
// 3. It evaluates the row (lane_rows.cuh).
// 4. It computes each class again, and replaces the logit by its gradient.
//
// Traffic: shared memory only. Preconditions: gradients have the dtype of logits; the row is complete in shared memory,
// and no other lane reads it.
#pragma once
#include "softmax/lane_rows.cuh"

// Number of classes that are evaluated side by side.
constexpr int kRolledClasses = 8;

// Calls f(j, word) for each word of a row. j is the first class of the word.
template <class Source, class F>
__device__ __forceinline__ void for_each_word(const Source& source, const F& f) {
  constexpr int kWords = Source::kEach < kRolledClasses ? kRolledClasses / Source::kEach : 1;
#pragma unroll kWords
  for (int j = 0; j < Source::kPerThread; j += Source::kEach) f(j, source.word(0, j));
}

// Adds the classes of a row to its sums, whose max_logit is set. z is the label's logit. kNear: capped logits are known
// to be near.
template <bool kNear, class Source, class Program, class Compute>
__device__ __forceinline__ void add_rolled_row(const Program& program, const Source& source, int label, Compute z,
                                               RowSums<Compute, Program::kSmoothed>& sums) {
  constexpr int kEach = Source::kEach;
  const Compute shift = exp_shift(sums.softmax.max_logit);
  for_each_word(source, [&](int j, const typename Source::Word* at) {
    Compute raw[kEach], w[kEach];
    unpack(load_words(at), raw);
    if constexpr (Program::kSmoothed) program.weights_of(j, w);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      Compute power, of_class, slope;
      program.logit.template exponential_value_slope<kNear>(raw[k], shift, power, of_class, slope);
      sums.softmax.exp_sum += j + k == label ? Compute(0) : power;
      if constexpr (Program::kSmoothed) {
        const Compute gap = z - of_class;
        sums.weighted_gap = scalar_fma(w[k], w[k] == Compute(0) ? Compute(0) : gap, sums.weighted_gap);
        sums.weight_sum += w[k];
      }
    }
  });
}

// Replaces the logits of a row by their gradients. kNear: as in add_rolled_row.
template <bool kNear, class Source, class Program, class Compute>
__device__ __forceinline__ void gradients_of_rolled_row(const Program& program, const Source& source, int label,
                                                        const GradCoeffs<Compute>& coeffs) {
  constexpr int kEach = Source::kEach;
  for_each_word(source, [&](int j, typename Source::Word* at) {
    Compute raw[kEach], w[kEach], g[kEach];
    unpack(load_words(at), raw);
    if constexpr (Program::kSmoothed) program.weights_of(j, w);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      Compute power, of_class, slope;
      program.logit.template exponential_value_slope<kNear>(raw[k], coeffs.max_logit, power, of_class, slope);
      g[k] = coeffs.exp_coeff * power;
      if constexpr (Program::kSmoothed) g[k] = scalar_fma(coeffs.exp_coeff, power, -coeffs.weight_coeff * w[k]);
      g[k] = j + k == label ? coeffs.target : g[k];
      if constexpr (Program::kCapped) g[k] *= slope;
    }
    store_words(at, NarrowPack<typename Program::Input, kEach>::from(g));
  });
}

// Variant of visit_register_rows for lanes with one row each, in shared memory. Gradients replace the logits there.
template <bool kGradient, class Source, class Program, class Scale, class Ahead>
__device__ __forceinline__ double visit_rolled_row(const Program& program, const Source& source,
                                                   const LaneLabels<1, Program>& labels_of, Scale& scale, int count,
                                                   const Ahead& ahead) {
  using Compute = typename Program::Compute;
  using Input = typename Program::Input;
  constexpr int kEach = Source::kEach;
  static_assert(kSameType<Input, typename Program::Gradient>, "gradients take the place of logits");
  int labels[1];
  labels_of.active_classes(program, count, labels);
  Compute largest = -scalar_infinity(Compute()), farthest = Compute(0);
  for_each_word(source, [&](int, const typename Source::Word* at) {
    Compute raw[kEach];
    unpack(load_words(at), raw);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      largest = max_ignoring_nan(largest, raw[k]);
      if constexpr (Program::kCapped) farthest = max_ignoring_nan(farthest, scalar_abs(raw[k]));
    }
  });
  Compute z[1] = {program.logit.value(widen<Compute>(*source.element(0, labels[0] < 0 ? 0 : labels[0])))};
  RowSums<Compute, Program::kSmoothed> sums[1] = {RowSums<Compute, Program::kSmoothed>::empty()};
  sums[0].softmax.max_logit = program.logit.value(largest);
  const bool is_near = program.logit.is_near(farthest);
  if (is_near) {
    add_rolled_row<true>(program, source, labels[0], z[0], sums[0]);
  } else {
    add_rolled_row<false>(program, source, labels[0], z[0], sums[0]);
  }
  ahead();
  GradCoeffs<Compute> coeffs[1];
  unsigned zero_rows;
  const double total = evaluate_lane_rows<kGradient>(
      program, labels, z, sums, count, [&](int i, int64(&at)[kRowStreams]) { source.offsets(program, i, at); }, scale,
      coeffs, zero_rows);
  if constexpr (kGradient) {
    if (count <= 0) return total;
    if (zero_rows != 0) {
      // Products with coefficients of 0 could be NaN, because logits and weights may be infinite.
      for_each_word(source, [&](int, typename Source::Word* at) { store_words(at, typename Source::Word{}); });
    } else if (is_near) {
      gradients_of_rolled_row<true>(program, source, labels[0], coeffs[0]);
    } else {
      gradients_of_rolled_row<false>(program, source, labels[0], coeffs[0]);
    }
  }
  return total;
}
