// Losses of log-probabilities x (R, C) that depend only on the entry of the label's class, such as the negative
// log-likelihood. Gradients may have any strides; label_only_tiles.cuh and label_only_rows.cuh cover special layouts.
//
//   labels y (R,)
//   value      sum over r of loss(-x[r, y_r]) / divisor, or a value per row
//   gradient   grad_output * scale * d loss / d x[r, y_r] at class y_r, 0 at all other classes;  scale = 1 / divisor
//
// 1. Each thread of a group loads the label and one element of the row, and evaluates the loss.
// 2. The threads of the group write the gradient of all classes. The group is a warp if classes are contiguous,
//    otherwise a single thread.
// 3. The worker, a warp, stores the partial sum of each of its chunks.
//
// Traffic: one element of each row is read; each gradient is written once. Preconditions: none on strides.
#pragma once
#include "softmax/rows.cuh"

// Evaluates a row. `log_prob` is the entry of the label's class; it is not used if the row is inactive. The thread with
// `first` stores the outputs per row.
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
  // Most programs have no outputs per row: a single test skips them.
  if (first && (program.per_row != 0 || !t.active)) program.store(t, y, false);
  return y;
}

// Stores the gradient of a row: `slope` at the label's class of an active row, 0 elsewhere. The threads of the group
// share the classes.
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

// Visits every row once, as TwoPassReader.
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

// A coefficient times a factor. A coefficient of 0 stays 0, even if the factor is infinite.
template <class Compute>
__device__ __forceinline__ Compute scaled_coefficient(Compute coefficient, double factor) {
  return is_zero(coefficient) ? coefficient : coefficient * static_cast<Compute>(factor);
}

// Writes the gradients from stored coefficients, as apply_grad_coeffs.
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
