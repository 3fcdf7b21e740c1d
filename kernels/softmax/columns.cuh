// The row engine where the classes of a row lie `class_stride` apart and other rows lie between: images (N, C, H, W).
// A thread takes kLanes neighbouring rows, so that a warp reads whole lines of each class. What it has read it keeps in
// shared memory, where it alone uses it: registers cannot be indexed by a class. Rows with too many classes for that
// are copied first (row_launch.py); slopes are applied to logits that are read again, of which none has to be kept.
#pragma once
#include "softmax/rows.cuh"

// Classes are counted in 32 bits where they are few enough to be kept.
template <bool kStaged>
struct ClassIndex {
  using type = int;
};
template <>
struct ClassIndex<false> {
  using type = int64;
};

// Logits of kLanes rows, class by class, and where their gradients go.
template <class Storage, int kLanes_, bool kStaged_>
struct Column {
  using P = Pack<Storage, kLanes_>;
  using Value = Storage;
  using Index = typename ClassIndex<kStaged_>::type;
  static constexpr int kLanes = kLanes_;
  static constexpr bool kStaged = kStaged_;
  const Storage* at;
  Storage* gradients;
  int64 stride, gradient_stride;
  Index classes;
  P* stage;  // class c is at [c * blockDim.x]

  template <class Program>
  __device__ __forceinline__ Column(const Program& program, const int64 (&offset)[kRowStreams])
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
  // Everything at once, so that as much as possible is on its way.
  __device__ __forceinline__ void fetch(bool wanted) const {
    if (!wanted) return;
    if constexpr (kStaged) {
#pragma unroll 4
      for (Index c = 0; c < classes; ++c) {
        stage_pack(stage + c * blockDim.x, reinterpret_cast<const P*>(at + c * stride));
      }
      wait_for_copies();
    }
  }
  __device__ __forceinline__ P read(Index c) const {
    if constexpr (kStaged) return whole(stage + c * blockDim.x);
    return load_stream<kLanes>(at + c * stride);
  }
  // -inf in place of a logit of row i. Precondition: kStaged.
  __device__ __forceinline__ void drop(Index c, int i) const {
    stage[c * blockDim.x].lane[i] = Narrow<Storage>::from(-scalar_infinity(0.0f));
  }
  // What is kept of a class, in place of its logits. Precondition: kStaged.
  __device__ __forceinline__ void replace(Index c, const P& x) const {
    stage[c * blockDim.x] = x;
  }
  __device__ __forceinline__ void put(Index c, const P& gradient) const {
    store_pack<kLanes>(gradients + c * gradient_stride, gradient);
  }
  // Behind the gradients of all classes.
  __device__ __forceinline__ void close() const {
  }
};

// The gradients of kLanes rows; `read` is false where none of them needs its logits. A label of -1 is none.
// kExponentials: what is kept is exp(z - largest), and not the logits.
template <bool kExponentials, class Source, int kLanes, class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ void store_columns(const Program& program, const Source& column,
                                              const typename Source::Index (&labels)[kLanes],
                                              const RowSlopes<Compute> (&slopes)[kLanes], bool read) {
  using Input = typename Program::Input;
  bool none[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) none[i] = slopes[i].none();
  if (!read) {
    for (typename Source::Index c = 0; c < column.classes; ++c) {
      const Compute zeros[kLanes] = {};
      column.put(c, NarrowPack<Input, kLanes>::from(zeros));
    }
    return;
  }
#pragma unroll 4
  for (typename Source::Index c = 0; c < column.classes; ++c) {
    Compute g[kLanes], raw[kLanes];
    unpack(column.read(c), raw);
    const Compute w = Program::kSmoothed ? program.weight(c) : Compute(0);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      g[i] = slopes[i].common * (kExponentials ? raw[i] : program.logit.exponential(raw[i], slopes[i].largest));
      if constexpr (Program::kSmoothed) g[i] -= slopes[i].weighted * w;
      g[i] = c == labels[i] ? slopes[i].target : g[i];
      if constexpr (Program::kCapped) g[i] *= program.logit.slope(raw[i]);
      g[i] = none[i] ? Compute(0) : g[i];
    }
    column.put(c, NarrowPack<Input, kLanes>::from(g));
  }
}

// The largest raw logit of each of kLanes rows.
template <class Source, int kLanes, class Compute>
__device__ __forceinline__ void largest_of_columns(const Source& column, Compute (&largest)[kLanes]) {
  using Storage = typename Source::Value;
  if constexpr (sizeof(Storage) == 2 && sizeof(Compute) == 4 && kLanes % 2 == 0 && kLargerPairs) {
    LargestOfPairs<Storage, 2> found[kLanes / 2];
#pragma unroll 4
    for (typename Source::Index c = 0; c < column.classes; ++c) {
      const auto x = column.read(c);
#pragma unroll
      for (int i = 0; i < kLanes / 2; ++i) found[i].add(reinterpret_cast<const Pack<Storage, 2>*>(&x)[i]);
    }
#pragma unroll
    for (int i = 0; i < kLanes; ++i) largest[i] = found[i / 2].half(i % 2);
  } else {
#pragma unroll 4
    for (typename Source::Index c = 0; c < column.classes; ++c) {
      Compute raw[kLanes];
      unpack(column.read(c), raw);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) largest[i] = larger(largest[i], raw[i]);
    }
  }
}

// The labels of kLanes neighbouring rows from `row`, read ahead of their turn; what is said of no rows is not used.
template <int kLanes, class Program>
struct ColumnNotes {
  typename Program::Note note[kLanes];

  __device__ __forceinline__ void read(const Program& program, int64 row) {
    int64 offset[kRowStreams];
    program.space.offsets(row < program.space.rows ? row : 0, offset);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      int64 at[kRowStreams];
#pragma unroll
      for (int s = 0; s < kRowStreams; ++s) at[s] = offset[s] + i * program.space.at.stride[s][0];
      note[i] = program.note(at);
    }
  }
  // Row i of those that begin at `offset`.
  __device__ __forceinline__ RowTarget<typename Program::Compute> target(const Program& program,
                                                                         const int64 (&offset)[kRowStreams],
                                                                         int i) const {
    RowTarget<typename Program::Compute> t;
#pragma unroll
    for (int s = 0; s < kRowStreams; ++s) t.offset[s] = offset[s] + i * program.space.at.stride[s][0];
    program.judge(t, note[i]);
    return t;
  }
};

// Losses and gradients of kLanes neighbouring rows that begin at `offset`, which `now` is about; the sum of the values.
template <bool kGradient, class Source, class Program, class Scale>
__device__ __forceinline__ double visit_columns(const Program& program, const Source& column,
                                                const int64 (&offset)[kRowStreams],
                                                const ColumnNotes<Source::kLanes, Program>& now, Scale& scale,
                                                bool exists = true) {
  using Compute = typename Program::Compute;
  using Input = typename Program::Input;
  using Index = typename Source::Index;
  constexpr int kLanes = Source::kLanes;
  // The target's logit is replaced by -inf, so that no class has to be compared with it.
  constexpr bool kPlain = !Program::kSmoothed && !Program::kCapped;
  // The exponentials take the places of their logits where they fit.
  constexpr bool kExponentials = kGradient && !Program::kCapped && kSameType<Input, Compute>;
  Index labels[kLanes];
  bool any = false;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    const auto t = now.target(program, offset, i);
    labels[i] = t.counts && exists ? static_cast<Index>(t.label) : Index(-1);
    any |= t.counts && exists;
  }
  Compute z[kLanes], largest[kLanes];
  RowSums<Compute> sums[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    z[i] = Compute(0);
    largest[i] = -scalar_infinity(Compute());
    sums[i] = {0, 0, 0};
  }
  column.fetch(any);
  if (any) {
    largest_of_columns<Source>(column, largest);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      largest[i] = program.logit.value(largest[i]);
      if (labels[i] < 0) continue;
      z[i] = program.logit.value(widen<Compute>(column.read(labels[i]).lane[i]));
      if constexpr (kPlain) column.drop(labels[i], i);
    }
#pragma unroll 4
    for (Index c = 0; c < column.classes; ++c) {
      Compute raw[kLanes];
      unpack(column.read(c), raw);
      const Compute w = Program::kSmoothed ? program.weight(c) : Compute(1);
      Pack<Compute, kLanes> e;
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        e.lane[i] = program.logit.exponential(raw[i], reference(largest[i]));
        sums[i].rest += !kPlain && c == labels[i] ? Compute(0) : e.lane[i];
        if constexpr (Program::kSmoothed) {
          sums[i].distance += w == Compute(0) ? Compute(0) : w * (z[i] - program.logit.value(raw[i]));
          sums[i].weights += w;
        }
      }
      if constexpr (kExponentials) column.replace(c, e);
    }
  }
  double total = 0.0;
  RowSlopes<Compute> slopes[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    RowTarget<Compute> t = now.target(program, offset, i);
    t.counts &= exists;
    t.wrong &= exists;
    const RowLoss<Compute> y = program.finish(t, z[i], largest[i], sums[i], exists);
    total += y.value;
    slopes[i] = y.slopes;
    if constexpr (kGradient) scale_slopes(program, slopes[i], scale.factor());
  }
  if constexpr (kGradient) {
    store_columns<kExponentials>(program, column, labels, slopes, any);
    column.close();
  }
  return total;
}

// As LongReader, for lanes of their own, each of which takes kLanes rows. Precondition: the rows are whole vectors.
template <int kLanes>
struct ColumnReader {
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const LaneUnit& unit, Scale& scale, int64 groups,
                                               const Workspace& work) {
    const int64 vectors = program.space.rows / kLanes, step = groups * kWarp;
#pragma unroll 1
    for (int group = static_cast<int>(unit.team()); group < groups; group = next_group(unit, group, work.drawn)) {
      double total = 0.0;
      int64 v = static_cast<int64>(group) * kWarp + unit.row();
      ColumnNotes<kLanes, Program> ahead;
      ahead.read(program, v * kLanes);
#pragma unroll 1
      for (; v < vectors; v += step) {
        const ColumnNotes<kLanes, Program> now = ahead;
        ahead.read(program, (v + step) * kLanes);
        int64 offset[kRowStreams];
        program.space.offsets(v * kLanes, offset);
        const Column<typename Program::Input, kLanes, true> column(program, offset);
        total += visit_columns<kGradient>(program, column, offset, now, scale);
      }
      close_group(unit, scale, group, total, work.partials);
    }
  }
};

// The gradients from slopes that were stored, as apply_row_slopes.
template <int kLanes, class Program, class Result>
__device__ __forceinline__ void apply_column_slopes(const Program& program, int64 result_stride, double scale,
                                                    const Result* grad_output) {
  using Compute = typename Program::Compute;
  const int64 vectors = program.space.rows / kLanes, threads = static_cast<int64>(gridDim.x) * blockDim.x;
#pragma unroll 1
  for (int64 v = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; v < vectors; v += threads) {
    int64 offset[kRowStreams];
    program.space.offsets(v * kLanes, offset);
    ColumnNotes<kLanes, Program> now;
    now.read(program, v * kLanes);
    int64 labels[kLanes];
    RowSlopes<Compute> slopes[kLanes];
    bool any = false;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const auto t = now.target(program, offset, i);
      labels[i] = t.counts ? t.label : -1;
      slopes[i] = program.slopes[t.offset[kResults]];
      any |= !slopes[i].none();
      const double g = widen<double>(grad_output[t.offset[kResults] * result_stride]);
      scale_slopes(program, slopes[i], static_cast<Compute>(g * scale));
    }
    const Column<typename Program::Input, kLanes, false> column(program, offset);
    store_columns<false>(program, column, labels, slopes, any);
  }
}
