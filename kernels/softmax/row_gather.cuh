// The row engine where only the class of the label counts: negative log-likelihood of log-probabilities.
//
//   value      loss(-x[r, y_r])
//   gradient   0, but for the label's class
//
// One element of each row is read, and all gradients are written.
#pragma once
#include "softmax/rows.cuh"

template <class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ RowLoss<Compute> gathered_loss(const Program& program, const RowTarget<Compute>& t,
                                                          bool first) {
  RowLoss<Compute> y = program.uncounted(t);
  if (t.counts) {
    // 0 - x, because a probability of 1 costs 0, not -0.
    const Compute nll = Compute(0) - widen<Compute>(program.raw(t.offset, t.label));
    const auto found = program.loss(variable<1u, 0>(nll), variable<0u, 1>(t.weight));
    const bool lost = found.value != found.value;
    y.value = lost ? undefined(found.value) : found.value;
    y.slopes.target = lost ? y.value : -tangent_or_zero(found, 0);
  }
  if (first) program.store(t, y, false);
  return y;
}

template <class Unit, class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ void store_gathered(const Program& program, const Unit& unit, const RowTarget<Compute>& t,
                                               Compute slope) {
  using Gradient = typename Program::Gradient;
  const int64 stride = program.space.class_stride[kGradients];
  for (int64 c = unit.index(); c < program.space.classes; c += unit.count()) {
    const Compute g = t.counts && c == t.label ? slope : Compute(0);
    program.gradients[t.offset[kGradients] + c * stride] = Narrow<Gradient>::from(g);
  }
}

// As LongReader.
struct GatherReader {
  template <bool kGradient, class Unit, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Unit& unit, Scale& scale, int64 groups,
                                               const Workspace& work) {
    const int64 rows = program.space.rows;
#pragma unroll 1
    for (int group = static_cast<int>(unit.team()); group < groups; group += static_cast<int>(unit.teams())) {
      double total = 0.0;
#pragma unroll 1
      for (int64 first = static_cast<int64>(group) * unit.rows(); first < rows; first += groups * unit.rows()) {
        const int64 row = first + unit.row();
        if (row >= rows) continue;
        const auto t = program.target(row);
        const auto y = gathered_loss(program, t, unit.index() == 0);
        total += static_cast<double>(y.value);
        if constexpr (kGradient) store_gathered(program, unit, t, y.slopes.target * row_factor(scale, t.offset));
      }
      close_group(unit, scale, group, total, work.partials);
    }
  }
};

// The gradients from slopes that were stored, as apply_row_slopes.
template <class Unit, class Program, class Result>
__device__ __forceinline__ void apply_gathered_slopes(const Program& program, const Unit& unit, int64 result_stride,
                                                      double scale, const Result* grad_output) {
  using Compute = typename Program::Compute;
  const int64 rows = program.space.rows;
#pragma unroll 1
  for (int64 first = unit.team() * unit.rows(); first < rows; first += unit.teams() * unit.rows()) {
    const int64 row = first + unit.row();
    if (row >= rows) continue;
    const auto t = program.target(row);
    const Compute slope = program.slopes[t.offset[kResults]].target;
    const double g = widen<double>(grad_output[t.offset[kResults] * result_stride]);
    store_gathered(program, unit, t, slope == Compute(0) ? slope : slope * static_cast<Compute>(g * scale));
  }
}
