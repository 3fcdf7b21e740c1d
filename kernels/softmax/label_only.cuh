// Losses of log-probabilities x (R, C) that depend on the label's class only: negative log-likelihood. Gradients of any
// strides; those without gaps are label_only_tiles.cuh's.
//
//   value      loss(-x[r, y_r])
//   gradient   d loss / d x at class y_r, 0 at all other classes
//
// 1. A group loads the label and one element of the row, and evaluates the loss.
// 2. Its threads write the gradient of all classes: a warp per row if classes are contiguous, otherwise a thread per
//    row.
//
// Traffic: one element of each row is read; every gradient is written once. Preconditions: none on strides.
#pragma once
#include "softmax/rows.cuh"

// The loss of a row, of which log_prob is the label's class if the row is active; stores what is wanted per row if
// `first`.
template <class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ RowResult<Compute> label_only_result(const Program& program, const RowTarget<Compute>& t,
                                                                const typename Program::Input& log_prob, bool first) {
  RowResult<Compute> y = program.inactive_result(t);
  if (t.active) {
    // 0 - x: a probability of 1 costs 0, not -0.
    const Compute nll = Compute(0) - widen<Compute>(log_prob);
    const auto loss = program.loss(variable<1u, 0>(nll), variable<0u, 1>(t.weight));
    const bool lost = loss.value != loss.value;
    y.value = lost ? nan_result(loss.value) : loss.value;
    y.grad_coeffs.target = lost ? y.value : -tangent_or_zero(loss, 0);
  }
  // A row without outputs of its own, as most are, takes one test.
  if (first && (program.per_row != 0 || !t.active)) program.store(t, y, false);
  return y;
}

template <class Group, class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ void store_label_only(const Program& program, const Group& group,
                                                 const RowTarget<Compute>& t, Compute slope) {
  using Gradient = typename Program::Gradient;
  const int64 stride = program.space.class_stride[kGradients];
  for (int64 c = group.thread_rank(); c < program.space.classes; c += group.num_threads()) {
    const Compute g = t.active && c == t.label ? slope : Compute(0);
    program.gradients[t.offset[kGradients] + c * stride] = Narrow<Gradient>::from(g);
  }
}

// As TwoPassReader.
struct LabelOnlyReader {
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    const int64 rows = program.space.rows;
#pragma unroll 1
    for (int chunk = static_cast<int>(group.worker()); chunk < chunks; chunk += static_cast<int>(group.workers())) {
      double total = 0.0;
#pragma unroll 1
      for (int64 first = static_cast<int64>(chunk) * group.rows_at_once(); first < rows;
           first += chunks * group.rows_at_once()) {
        const int64 row = first + group.row_slot();
        if (row >= rows) continue;
        const auto t = program.target(row);
        typename Program::Input log_prob{};
        if (t.active) log_prob = program.raw(t.offset, t.label);
        const auto y = label_only_result(program, t, log_prob, group.thread_rank() == 0);
        total += static_cast<double>(y.value);
        if constexpr (kGradient)
          store_label_only(program, group, t, y.grad_coeffs.target * grad_factor(scale, t.offset));
      }
      finish_chunk(group, scale, chunk, total, work.partials);
    }
  }
};

// A coefficient times a factor. No 0 * inf for rows without a gradient.
template <class Compute>
__device__ __forceinline__ Compute scaled_coefficient(Compute coefficient, double factor) {
  return is_zero(coefficient) ? coefficient : coefficient * static_cast<Compute>(factor);
}

// As apply_grad_coeffs.
template <class Group, class Program, class Result>
__device__ __forceinline__ void apply_grad_coeffs_label_only(const Program& program, const Group& group,
                                                             int64 result_stride, double scale,
                                                             const Result* grad_output) {
  using Compute = typename Program::Compute;
  const int64 rows = program.space.rows;
#pragma unroll 1
  for (int64 first = group.worker() * group.rows_at_once(); first < rows;
       first += group.workers() * group.rows_at_once()) {
    const int64 row = first + group.row_slot();
    if (row >= rows) continue;
    const auto t = program.target(row);
    const Compute slope = program.grad_coeffs[t.offset[kResults]].target;
    const double g = widen<double>(grad_output[t.offset[kResults] * result_stride]);
    store_label_only(program, group, t, scaled_coefficient(slope, g * scale));
  }
}
