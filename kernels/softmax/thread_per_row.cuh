// One thread per row: the classes of a row are strided, and neighbouring rows lie between them: images (N, C, H, W).
// Value and gradient of softmax.cuh.
//
//   x[n, c, h, w]: a row is (n, :, h, w); a thread takes kVecSize neighbouring rows along w
//
// 1. A thread starts asynchronous copies of all classes of its rows to shared memory. A warp reads whole cache lines of
//    each class.
// 2. First sweep over the classes: maximum. Second sweep: sum of exponentials. Both are complete in the thread, so
//    nothing is rescaled or exchanged.
// 3. The thread evaluates its rows.
// 4. Third sweep: the gradient.
//
// Shared memory and not registers: registers cannot be indexed by a class. Only the copying thread reads its column of
// shared memory, so no barrier is needed. Rows with more classes than fit are copied to contiguous rows first
// (engines/softmax/layout.py: copied). apply_grad_coeffs_thread_per_row reads logits from memory, each once, and stages
// nothing.
//
// Traffic: each logit is read once, each gradient written once. Preconditions: kVecSize divides the number of rows;
// rows of a vector are contiguous.
#pragma once
#include "softmax/rows.cuh"

// Type of a class index: 32 bits for staged classes, which are few.
template <bool kStaged>
struct ClassIndex {
  using type = int;
};
template <>
struct ClassIndex<false> {
  using type = int64;
};

// The logits of kVecSize rows, class by class, and the pointer to their gradients.
template <class Storage, int kVecSize_, bool kStaged_>
struct StridedRows {
  using P = Pack<Storage, kVecSize_>;
  using Value = Storage;
  using Index = typename ClassIndex<kStaged_>::type;
  static constexpr int kVecSize = kVecSize_;
  static constexpr bool kStaged = kStaged_;
  const Storage* at;
  Storage* gradients;
  int64 stride, gradient_stride;
  Index classes;
  P* stage;  // class c is at [c * blockDim.x]

  template <class Program>
  __device__ __forceinline__ StridedRows(const Program& program, const int64 (&offset)[kRowStreams])
      : at(program.input + offset[kLogits]),
        gradients(program.gradients + offset[kGradients]),
        stride(program.space.class_stride[kLogits]),
        gradient_stride(program.space.class_stride[kGradients]),
        classes(static_cast<Index>(program.space.classes)),
        stage(nullptr) {
    if constexpr (kStaged) {
      extern __shared__ uint4 staged[];
      stage = reinterpret_cast<P*>(staged) + threadIdx.x;
    }
  }
  // Starts all copies at once, so that as many as possible are in flight.
  __device__ __forceinline__ void load_all(bool wanted) const {
    if (!wanted) return;
    if constexpr (kStaged) {
#pragma unroll 4
      for (Index c = 0; c < classes; ++c) {
        cp_async(stage + c * blockDim.x, reinterpret_cast<const P*>(at + c * stride));
      }
      cp_async_wait_all();
    }
  }
  __device__ __forceinline__ P read(Index c) const {
    if constexpr (kStaged) return load_words(stage + c * blockDim.x);
    return load_stream<kVecSize>(at + c * stride);
  }
  // Replaces a logit of row i by -inf. Precondition: kStaged.
  __device__ __forceinline__ void mask_out(Index c, int i) const {
    stage[c * blockDim.x].element[i] = Narrow<Storage>::from(-scalar_infinity(0.0f));
  }
  // Replaces the staged logits of a class. Precondition: kStaged.
  __device__ __forceinline__ void overwrite(Index c, const P& x) const {
    stage[c * blockDim.x] = x;
  }
  __device__ __forceinline__ void store(Index c, const P& gradient) const {
    store_pack<kVecSize>(gradients + c * gradient_stride, gradient);
  }
  // Called after the gradients of all classes.
  __device__ __forceinline__ void flush() const {
  }
};

// Stores the gradients of kVecSize rows. `read` is false if none of them needs its logits. Label -1: no target.
// kKeepsExponentials: exp(z - max_logit) was staged in place of the logits.
template <bool kKeepsExponentials, class Source, int kVecSize, class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ void store_rows_of_thread(const Program& program, const Source& column,
                                                     const typename Source::Index (&labels)[kVecSize],
                                                     const GradCoeffs<Compute> (&grad_coeffs)[kVecSize], bool read) {
  using Gradient = typename Program::Gradient;
  bool all_zero[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) all_zero[i] = grad_coeffs[i].all_zero();
  if (!read) {
    for (typename Source::Index c = 0; c < column.classes; ++c) {
      const Compute zeros[kVecSize] = {};
      column.store(c, NarrowPack<Gradient, kVecSize>::from(zeros));
    }
    return;
  }
#pragma unroll 4
  for (typename Source::Index c = 0; c < column.classes; ++c) {
    Compute g[kVecSize], raw[kVecSize];
    unpack(column.read(c), raw);
    const Compute w = Program::kSmoothed ? program.weight(c) : Compute(0);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      g[i] = grad_coeffs[i].exp_coeff *
             (kKeepsExponentials ? raw[i] : program.logit.exponential(raw[i], grad_coeffs[i].max_logit));
      if constexpr (Program::kSmoothed) g[i] -= grad_coeffs[i].weight_coeff * w;
      g[i] = c == labels[i] ? grad_coeffs[i].target : g[i];
      if constexpr (Program::kCapped) g[i] *= program.logit.slope(raw[i]);
      g[i] = all_zero[i] ? Compute(0) : g[i];
    }
    column.store(c, NarrowPack<Gradient, kVecSize>::from(g));
  }
}

// Maximum of the raw logits of each of kVecSize rows.
template <class Source, int kVecSize, class Compute>
__device__ __forceinline__ void max_per_row(const Source& column, Compute (&max_logit)[kVecSize]) {
  using Storage = typename Source::Value;
  if constexpr (sizeof(Storage) == 2 && sizeof(Compute) == 4 && kVecSize % 2 == 0 && kHasPairMax) {
    PackedPairMax<Storage, 2> running[kVecSize / 2];
#pragma unroll 4
    for (typename Source::Index c = 0; c < column.classes; ++c) {
      const auto x = column.read(c);
#pragma unroll
      for (int i = 0; i < kVecSize / 2; ++i) running[i].add(reinterpret_cast<const Pack<Storage, 2>*>(&x)[i]);
    }
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) max_logit[i] = running[i / 2].half(i % 2);
  } else {
#pragma unroll 4
    for (typename Source::Index c = 0; c < column.classes; ++c) {
      Compute raw[kVecSize];
      unpack(column.read(c), raw);
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) max_logit[i] = max_ignoring_nan(max_logit[i], raw[i]);
    }
  }
}

// The labels of kVecSize neighbouring rows from `row`, loaded one step ahead. Behind the last row those of row 0 are
// loaded and not used.
template <int kVecSize, class Program>
struct LabelLoads {
  typename Program::LabelLoad label_load[kVecSize];

  __device__ __forceinline__ void read(const Program& program, int64 row) {
    int64 offset[kRowStreams];
    program.space.offsets(row < program.space.rows ? row : 0, offset);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      int64 at[kRowStreams];
#pragma unroll
      for (int s = 0; s < kRowStreams; ++s) at[s] = offset[s] + i * program.space.at.stride[s][0];
      label_load[i] = program.load_label(at);
    }
  }
  // Row i of the rows that begin at `offset`.
  __device__ __forceinline__ RowTarget<typename Program::Compute> target(const Program& program,
                                                                         const int64 (&offset)[kRowStreams],
                                                                         int i) const {
    RowTarget<typename Program::Compute> t;
#pragma unroll
    for (int s = 0; s < kRowStreams; ++s) t.offset[s] = offset[s] + i * program.space.at.stride[s][0];
    program.validate_label(t, label_load[i]);
    return t;
  }
};

// Evaluates kVecSize neighbouring rows that begin at `offset` with labels `now`, and writes their gradients. Returns
// the sum of the values.
template <bool kGradient, class Source, class Program, class Scale>
__device__ __forceinline__ double visit_rows_of_thread(const Program& program, const Source& column,
                                                       const int64 (&offset)[kRowStreams],
                                                       const LabelLoads<Source::kVecSize, Program>& now, Scale& scale,
                                                       bool exists = true) {
  using Compute = typename Program::Compute;
  using Input = typename Program::Input;
  using Index = typename Source::Index;
  constexpr int kVecSize = Source::kVecSize;
  // The target's logit is replaced by -inf, so no class is compared with the label.
  constexpr bool kMasksTarget = !Program::kSmoothed && !Program::kCapped;
  // Exponentials replace their logits if they fit.
  constexpr bool kKeepsExponentials = kGradient && !Program::kCapped && kSameType<Input, Compute>;
  Index labels[kVecSize];
  bool any = false;
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    const auto t = now.target(program, offset, i);
    labels[i] = t.active && exists ? static_cast<Index>(t.label) : Index(-1);
    any |= t.active && exists;
  }
  Compute z[kVecSize], max_logit[kVecSize];
  RowSums<Compute, Program::kSmoothed> sums[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    z[i] = Compute(0);
    max_logit[i] = -scalar_infinity(Compute());
    sums[i] = RowSums<Compute, Program::kSmoothed>::empty();
  }
  column.load_all(any);
  if (any) {
    max_per_row<Source>(column, max_logit);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      sums[i].softmax.max_logit = program.logit.value(max_logit[i]);
      if (labels[i] < 0) continue;
      z[i] = program.logit.value(widen<Compute>(column.read(labels[i]).element[i]));
      if constexpr (kMasksTarget) column.mask_out(labels[i], i);
    }
#pragma unroll 4
    for (Index c = 0; c < column.classes; ++c) {
      Compute raw[kVecSize];
      unpack(column.read(c), raw);
      const Compute w = Program::kSmoothed ? program.weight(c) : Compute(1);
      Pack<Compute, kVecSize> e;
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        e.element[i] = program.logit.exponential(raw[i], exp_shift(sums[i].softmax.max_logit));
        sums[i].softmax.exp_sum += !kMasksTarget && c == labels[i] ? Compute(0) : e.element[i];
        if constexpr (Program::kSmoothed) {
          sums[i].weighted_gap += w == Compute(0) ? Compute(0) : w * (z[i] - program.logit.value(raw[i]));
          sums[i].weight_sum += w;
        }
      }
      if constexpr (kKeepsExponentials) column.overwrite(c, e);
    }
  }
  double total = 0.0;
  GradCoeffs<Compute> grad_coeffs[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    RowTarget<Compute> t = now.target(program, offset, i);
    t.active &= exists;
    t.invalid_label &= exists;
    const RowResult<Compute> y = program.finish(t, z[i], sums[i], exists);
    total += y.value;
    grad_coeffs[i] = y.grad_coeffs;
    if constexpr (kGradient) scale_grad_coeffs(program, grad_coeffs[i], grad_factor(scale, t.offset));
  }
  if constexpr (kGradient) {
    store_rows_of_thread<kKeepsExponentials>(program, column, labels, grad_coeffs, any);
    column.flush();
  }
  return total;
}

// As TwoPassReader, with kVecSize rows per lane. Precondition: kVecSize divides the number of rows.
template <int kVecSize>
struct ThreadPerRowReader {
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    const int64 vectors = program.space.rows / kVecSize, step = chunks * kWarp;
#pragma unroll 1
    for (int chunk = static_cast<int>(group.worker()); chunk < chunks;
         chunk = next_chunk(group, chunk, work.claim_counter)) {
      double total = 0.0;
      int64 v = static_cast<int64>(chunk) * kWarp + group.row_slot();
      LabelLoads<kVecSize, Program> ahead;
      ahead.read(program, v * kVecSize);
#pragma unroll 1
      for (; v < vectors; v += step) {
        const LabelLoads<kVecSize, Program> now = ahead;
        ahead.read(program, (v + step) * kVecSize);
        int64 offset[kRowStreams];
        program.space.offsets(v * kVecSize, offset);
        const StridedRows<typename Program::Input, kVecSize, true> column(program, offset);
        total += visit_rows_of_thread<kGradient>(program, column, offset, now, scale);
      }
      finish_chunk(group, scale, chunk, total, work.partials);
    }
  }
};

// As apply_grad_coeffs.
template <int kVecSize, class Program, class Result>
__device__ __forceinline__ void apply_grad_coeffs_thread_per_row(const Program& program, int64 result_stride,
                                                                 double scale, const Result* grad_output) {
  using Compute = typename Program::Compute;
  const int64 vectors = program.space.rows / kVecSize, threads = static_cast<int64>(gridDim.x) * blockDim.x;
#pragma unroll 1
  for (int64 v = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; v < vectors; v += threads) {
    int64 offset[kRowStreams];
    program.space.offsets(v * kVecSize, offset);
    LabelLoads<kVecSize, Program> now;
    now.read(program, v * kVecSize);
    int64 labels[kVecSize];
    GradCoeffs<Compute> grad_coeffs[kVecSize];
    bool any = false;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const auto t = now.target(program, offset, i);
      labels[i] = t.active ? t.label : -1;
      grad_coeffs[i] = program.grad_coeffs[t.offset[kResults]];
      any |= !grad_coeffs[i].all_zero();
      const double g = widen<double>(grad_output[t.offset[kResults] * result_stride]);
      scale_grad_coeffs(program, grad_coeffs[i], static_cast<Compute>(g * scale));
    }
    const StridedRows<typename Program::Input, kVecSize, false> column(program, offset);
    store_rows_of_thread<false>(program, column, labels, grad_coeffs, any);
  }
}
