// Value and gradients of dense_rows.cuh for terms that are affine in log p, of few classes: rows stay in the registers
// of a lane.
//
//   a lane owns kRows rows, all kClasses classes of both operands
//
// 1. A lane finds the largest logit of each row. Then it adds the exponentials, h relative to the largest logit, and
//    h_1 (AffineSums of dense_rows.cuh). Exponentials stay in registers if there are few.
// 2. It evaluates its rows side by side, without a branch for usual rows.
// 3. It overwrites the operands in its registers by their gradients, which are then stored. Masked, absent and NaN rows
//    share one branch per lane.
//
// PackedDenseRegisterReader moves contiguous rows through shared memory, as packed_rows.cuh does.
// ColumnDenseRegisterReader reads strided classes of neighbouring rows, as columns.cuh does. The number of classes is a
// compile-time constant. A warp owns tiles of 32 kRows rows, and chunks of tiles.
//
// Traffic: each logit and target is read once, each gradient written once. Preconditions: logits have no cap; gradients
// have the dtypes of their operands.
#pragma once
#include "softmax/dense_rows.cuh"
#include "softmax/packed_rows.cuh"

// State of a lane's row for its gradients. `leader` is the class of the largest logit, `h_of_leader` is its h_1, and
// `factor` is the factor of the row's gradients (grad_factor).
template <class Row, class Compute>
struct DenseRegisterRow {
  Row row;
  Compute shift;
  int leader;
  Compute h_of_leader;
  Compute factor;
  bool active;
};

// exp(z - shift) of an uncapped logit.
template <class Program, class Compute>
__device__ __forceinline__ Compute dense_exponential(const Program& program, Compute raw, Compute shift) {
  if constexpr (kNarrow) return program.logit.exponential(raw, shift);
  return program.logit.exponential_of(program.logit.value(raw), shift);
}

// Replaces logits x and targets t of a lane's rows by those gradients that the program computes. kKept: e holds the
// exponentials.
template <bool kKept, int kRows, int kClasses, class Program, class Compute, int kKeptClasses>
__device__ __forceinline__ void gradients_of_dense_register_rows(
    const Program& program, Pack<typename Program::Input, kRows> (&x)[kClasses],
    Pack<typename Program::Target, kRows> (&t)[kClasses],
    const DenseRegisterRow<typename Program::Row, Compute> (&of)[kRows], const Compute (&e)[kKeptClasses][kRows]) {
  using Input = typename Program::Input;
  using Target = typename Program::Target;
  Compute gradient_of_leader[kRows], shared[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const auto& row = of[i].row;
    const SoftmaxVjp<Compute> vjp(row.softmax[0], row.sums.grad_log_p, row.penalty_grad,
                                  of[i].factor * program.logit.common_slope());
    gradient_of_leader[i] = vjp.at_largest(of[i].h_of_leader);
    shared[i] = vjp.shared;
  }
#pragma unroll
  for (int j = 0; j < kClasses; ++j) {
    Compute raw[kRows], target[kRows], grad_z[kRows], grad_t[kRows];
    unpack(x[j], raw);
    unpack(t[j], target);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      Compute power;
      if constexpr (kKept) {
        power = e[j][i];
      } else {
        power = dense_exponential(program, raw[i], of[i].shift);
      }
      const Compute log_p = of[i].row.softmax[0].log_p(program.logit.value(raw[i]));
      const auto y = program.evaluate_at(of[i].row, log_p, target[i], j);
      const Compute own = tangent_or_zero(y, 0) * (of[i].factor * program.logit.common_slope());
      grad_z[i] = j == of[i].leader ? gradient_of_leader[i] : scalar_fma(-power, shared[i], own);
      grad_t[i] = tangent_or_zero(y, 1) * of[i].factor;
    }
    if constexpr (Program::kInputGradient) x[j] = NarrowPack<Input, kRows>::from(grad_z);
    if constexpr (Program::kTargetGradient) t[j] = NarrowPack<Target, kRows>::from(grad_t);
  }
  bool usual = true;
#pragma unroll
  for (int i = 0; i < kRows; ++i) usual &= of[i].active & (of[i].row.value == of[i].row.value);
  if (usual) return;
  // A NaN row has no gradient: its gradients are NaN. The gradients of an inactive row are 0, whatever its operands
  // are.
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const Compute value = of[i].row.value;
    if (of[i].active && value == value) continue;
#pragma unroll
    for (int j = 0; j < kClasses; ++j) {
      if constexpr (Program::kInputGradient) x[j].element[i] = Narrow<Input>::from(value);
      if constexpr (Program::kTargetGradient) t[j].element[i] = Narrow<Target>::from(value);
    }
  }
}

// Evaluates the rows of a lane, of which the first `count` exist. With kGradient, replaces logits x and targets t by
// their gradients. offsets(i, at) sets the offsets of row i. Returns the sum of the values.
template <bool kGradient, int kRows, int kClasses, class Program, class Offsets, class Scale>
__device__ __forceinline__ double visit_dense_register_rows(const Program& program,
                                                            Pack<typename Program::Input, kRows> (&x)[kClasses],
                                                            Pack<typename Program::Target, kRows> (&t)[kClasses],
                                                            int count, const Offsets& offsets, Scale& scale) {
  using Compute = typename Program::Compute;
  static_assert(Program::kAffine && !Program::kCapped, "a term that is affine in log p, and logits without a cap");
  constexpr bool kKept = kGradient && kRows * kClasses <= kMaxKept;
  DenseRegisterRow<typename Program::Row, Compute> of[kRows];
  Compute largest[kRows], exp_sum[kRows], e[kKept ? kClasses : 1][kRows];
#pragma unroll
  for (int j = 0; j < kClasses; ++j) {
    Compute raw[kRows];
    unpack(x[j], raw);
#pragma unroll
    for (int i = 0; i < kRows; ++i) largest[i] = j == 0 ? raw[i] : max_ignoring_nan(largest[i], raw[i]);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    of[i].row.classes = constant<Compute>(static_cast<double>(program.space.classes));
    of[i].row.softmax[0].max_logit = program.logit.value(largest[i]);
    of[i].shift = exp_shift(of[i].row.softmax[0].max_logit);
    of[i].row.sums = {Compute(0), Compute(0), Compute(0)};
    exp_sum[i] = of[i].h_of_leader = Compute(0);
    of[i].leader = -1;
  }
#pragma unroll
  for (int j = 0; j < kClasses; ++j) {
    Compute raw[kRows], target[kRows];
    unpack(x[j], raw);
    unpack(t[j], target);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Compute power = dense_exponential(program, raw[i], of[i].shift);
      const auto y = program.evaluate_at(of[i].row, program.logit.value(raw[i]) - of[i].shift, target[i], j);
      of[i].row.sums.value += y.value;
      of[i].row.sums.grad_log_p += tangent_or_zero(y, 0);
      // The sum leaves out the first class that has the largest logit.
      const bool leads = (raw[i] == largest[i]) & (of[i].leader < 0);
      exp_sum[i] += leads ? Compute(0) : power;
      of[i].h_of_leader = leads ? tangent_or_zero(y, 0) : of[i].h_of_leader;
      of[i].leader = leads ? j : of[i].leader;
      if constexpr (kKept) e[j][i] = power;
    }
  }
  double total = 0.0;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    auto& row = of[i].row;
    Softmax<Compute>& softmax = row.softmax[0];
    softmax.exp_sum = exp_sum[i];
    softmax.log_sum = scalar_log1p_of_positive(exp_sum[i]);
    softmax.inv_sum = scalar_divide_closely(Compute(1), Compute(1) + exp_sum[i]);
    softmax.max_complement = exp_sum[i] * softmax.inv_sum;
    // NaN for a row without a distribution, as in visit_dense_row.
    const Compute no_distribution = softmax.max_logit - softmax.max_logit;
    row.sums.value = scalar_fma(-softmax.log_sum, row.sums.grad_log_p, row.sums.value) + no_distribution;
    int64 at[kRowStreams] = {};
    const bool exists = i < count;
    if (exists) offsets(i, at);
    of[i].active = exists && program.active(at);
    program.finish(row, at, of[i].active, exists);
    total += static_cast<double>(row.value);
    of[i].factor = Compute(0);
    if constexpr (kGradient) of[i].factor = exists ? grad_factor(scale, at) : Compute(0);
  }
  if constexpr (kGradient) gradients_of_dense_register_rows<kKept>(program, x, t, of, e);
  return total;
}

// Reader with the interface of TwoPassReader. kRows: rows per lane. Operands are read, and gradients written, in words
// of kWordBytes. A warp evaluates one tile while the next one is copied.
template <int kClasses, int kRows, int kWordBytes>
struct PackedDenseRegisterReader {
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    using Input = typename Program::Input;
    using Target = typename Program::Target;
    static_assert(kSameType<Input, typename Program::Gradient>, "gradients take the place of logits");
    constexpr int kTile = kWarp * kRows;
    using Inputs = PackedTile<Input, kClasses, kTile, kWordBytes>;
    using Targets = PackedTile<Target, kClasses, kTile, kWordBytes>;
    constexpr int kBytes = Inputs::kBytes + Targets::kBytes;
    const int64 rows = program.space.rows, tiles = (rows + kTile - 1) / kTile;
    char* const stage = shared_of_warp(2 * kBytes);
    const int lane = threadIdx.x % kWarp;
    const auto rows_of = [&](int64 tile) {
      const int64 remaining = rows - tile * kTile;
      return remaining < kTile ? static_cast<int>(remaining) : kTile;
    };
    WarpTiles left(group, work.claim_counter);
    if (left.chunk >= chunks) return;
    unsigned buffer = 0;
    const auto start = [&] {
      if (left.chunk >= chunks) return;
      char* const to = stage + buffer * kBytes;
      const int64 first = left.tile * (kTile * kClasses);
      Inputs{to}.copy_in(program.input + first, rows_of(left.tile));
      Targets{to + Inputs::kBytes}.copy_in(program.targets + first, rows_of(left.tile));
    };
    start();
    double total = 0.0;
#pragma unroll 1
    while (left.chunk < chunks) {
      const int64 first = left.tile * kTile;
      const int here = rows_of(left.tile), count = (here - lane + kWarp - 1) / kWarp, chunk = left.chunk;
      const bool last = left.last_in_chunk(chunks, tiles);
      const Inputs inputs{stage + buffer * kBytes};
      const Targets targets{inputs.stage + Inputs::kBytes};
      cp_async_wait_all();
      __syncwarp();
      left.advance(group, chunks, tiles);
      buffer ^= 1u;
      start();
      Pack<Input, kRows> x[kClasses];
      Pack<Target, kRows> t[kClasses];
      const PackedSource<Input, kClasses, kRows> input_rows{inputs.row(lane), first + lane};
      const PackedSource<Target, kClasses, kRows> target_rows{targets.row(lane), first + lane};
      input_rows.load(x);
      target_rows.load(t);
      total += visit_dense_register_rows<kGradient>(
          program, x, t, count, [&](int i, int64(&at)[kRowStreams]) { input_rows.offsets(program, i, at); }, scale);
      if constexpr (kGradient) {
        if constexpr (Program::kInputGradient) input_rows.store(program, x);
        if constexpr (Program::kTargetGradient) target_rows.store(program, t);
      }
      __syncwarp();
      if constexpr (kGradient) {
        if constexpr (Program::kInputGradient) inputs.copy_out(program.gradients + first * kClasses, here);
        if constexpr (Program::kTargetGradient) targets.copy_out(program.target_gradients + first * kClasses, here);
        // The tile after the next one is copied to the same buffer.
        __syncwarp();
      }
      if (!last) continue;
      finish_chunk(group, scale, chunk, total, work.partials);
      total = 0.0;
    }
  }
};

// Reader with the interface of TwoPassReader. Preconditions: kRows divides the number of rows; rows of a lane are
// contiguous and aligned in all operands and gradients.
template <int kClasses, int kRows>
struct ColumnDenseRegisterReader {
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    using Input = typename Program::Input;
    using Target = typename Program::Target;
    static_assert(kSameType<Input, typename Program::Gradient>, "gradients take the place of logits");
    const int64 vectors = program.space.rows / kRows, tiles = (vectors + kWarp - 1) / kWarp;
    const auto& stride = program.space.class_stride;
    for_each_chunk(group, scale, chunks, work, [&](int chunk) {
      double total = 0.0;
#pragma unroll 1
      for (int64 tile = chunk; tile < tiles; tile += chunks) {
        const int64 vector = tile * kWarp + threadIdx.x % kWarp;
        if (vector >= vectors) break;
        int64 first[kRowStreams];
        program.space.offsets(vector * kRows, first);
        Pack<Input, kRows> x[kClasses];
        Pack<Target, kRows> t[kClasses];
#pragma unroll
        for (int j = 0; j < kClasses; ++j) {
          x[j] = load_stream<kRows>(program.input + first[kLogits] + j * stride[kLogits]);
          t[j] = load_stream<kRows>(program.targets + first[kLabels] + j * stride[kLabels]);
        }
        total += visit_dense_register_rows<kGradient>(
            program, x, t, kRows,
            [&](int i, int64(&at)[kRowStreams]) {
#pragma unroll
              for (int s = 0; s < kRowStreams; ++s) at[s] = first[s] + i * program.space.at.stride[s][0];
            },
            scale);
        if constexpr (kGradient) {
#pragma unroll
          for (int j = 0; j < kClasses; ++j) {
            if constexpr (Program::kInputGradient) {
              store_pack<kRows>(program.gradients + first[kGradients] + j * stride[kGradients], x[j]);
            }
            if constexpr (Program::kTargetGradient) {
              store_pack<kRows>(program.target_gradients + first[kTargetGradients] + j * stride[kTargetGradients],
                                t[j]);
            }
          }
        }
      }
      return total;
    });
  }
};
