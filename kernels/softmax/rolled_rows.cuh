// Rows of a lane that stay in shared memory: classes whose arithmetic takes too many registers, and too much code,
// where a row is in registers (register_rows.cuh). Value and gradient of softmax.cuh.
//
// 1. A lane finds the largest logit of its row, and the largest magnitude.
// 2. It adds the exponentials, some classes at a time.
// 3. It evaluates the row (lane_rows.cuh).
// 4. It computes each class again, and writes the gradient in the place of the logit.
//
// Traffic: none to memory. Preconditions: gradients have the dtype of logits; the row is complete, and no other lane
// reads it.
#pragma once
#include "softmax/lane_rows.cuh"

// Classes that are evaluated side by side.
constexpr int kRolledClasses = 8;

// f(j, words) for each word of a row, which begins with class j.
template <class Source, class F>
__device__ __forceinline__ void for_each_word(const Source& source, const F& f) {
  constexpr int kWords = Source::kEach < kRolledClasses ? kRolledClasses / Source::kEach : 1;
#pragma unroll kWords
  for (int j = 0; j < Source::kPerThread; j += Source::kEach) f(j, source.word(0, j));
}

// Adds the classes of a row to its sums, whose max_logit is set. kNear: capped logits are known to be near.
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

// Replaces the logits of a row by their gradients.
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

// As visit_register_rows, of the one row of a lane.
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
      // Logits and weights may be infinite.
      for_each_word(source, [&](int, typename Source::Word* at) { store_words(at, typename Source::Word{}); });
    } else if (is_near) {
      gradients_of_rolled_row<true>(program, source, labels[0], coeffs[0]);
    } else {
      gradients_of_rolled_row<false>(program, source, labels[0], coeffs[0]);
    }
  }
  return total;
}
