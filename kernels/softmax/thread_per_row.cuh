// One thread per row, for strided classes with neighbouring rows between them: images (N, C, H, W). Value and gradient
// of softmax.cuh.
//
//   x[n, c, h, w]: a row is (n, :, h, w); a thread owns kVecSize neighbouring rows along w
//   kInterleaved: where vectors do not divide the rows, or their addresses, a thread owns kVecSize rows that are kWarp
//   rows apart, so that a warp still owns 32 kVecSize neighbouring rows (paired_rows.cuh if elements have 16 bits)
//
// 1. A thread starts asynchronous copies of all classes of its rows to shared memory. A warp reads whole cache lines of
//    each class.
// 2. First sweep over the classes: maximum. Second sweep: sum of exponentials. Both are complete in the thread, so
//    nothing is rescaled or exchanged.
// 3. The thread evaluates its rows.
// 4. Third sweep: the gradient.
//
// Rows are in shared memory rather than in registers, because registers cannot be indexed by a class. Only the copying
// thread reads its column of shared memory, so no barrier is needed. Rows with more classes than fit are copied to
// contiguous rows first (engines/softmax/layout.py: copied). apply_grad_coeffs_thread_per_row reads logits from memory,
// each once, and stages nothing.
//
// Traffic: each logit is read once, each gradient written once. Preconditions: rows of the inner dimension are
// neighbours in logits and gradients; without kInterleaved, kVecSize divides their number; dynamic shared memory for
// all classes of a block's rows.
#pragma once
#include "softmax/lane_rows.cuh"

// Type of a class index: 32 bits for staged classes, which are few.
template <bool kStaged>
struct ClassIndex {
  using type = int;
};
template <>
struct ClassIndex<false> {
  using type = int64;
};

// Logits of kVecSize rows, class by class, and the pointer to their gradients. kClasses and kThreads: number of
// classes, and of threads of a block, or 0 if not known at compile time; as constants they leave few address
// calculations. With kInterleaved, rows are kWarp apart and only the first `rows` of them exist.
template <class Storage, int kVecSize_, bool kStaged_, int kClasses = 0, int kThreads = 0, bool kInterleaved = false>
struct StridedRows {
  using P = Pack<Storage, kVecSize_>;
  using Value = Storage;
  using Index = typename ClassIndex<kStaged_>::type;
  static constexpr int kVecSize = kVecSize_;
  static constexpr bool kStaged = kStaged_;
  // The gradients of the labels' classes are not stored again after those of all classes: (8, 19, 512, 512) took 1.05
  // to 1.1 times as long with it.
  static constexpr bool kStoresAgain = false;
  static constexpr int kStoresTogether = 4;  // classes whose gradients are computed side by side
  // Unit of a thread's staging memory: a class of all its rows or, if they are interleaved, of one row, because copies
  // of single elements to a vector per thread would have bank conflicts.
  using Slot = Pack<Storage, kInterleaved ? 1 : kVecSize>;
  const Storage* at;
  Storage* gradients;
  int64 stride, gradient_stride;
  Index count;
  int rows;
  Slot* stage;  // class c is at place(c); of interleaved row i, at place(c, i)

  template <class Program>
  __device__ __forceinline__ StridedRows(const Program& program, const int64 (&offset)[kRowStreams],
                                         int rows = kVecSize_)
      : at(program.input + offset[kLogits]),
        gradients(program.gradients + offset[kGradients]),
        stride(program.space.class_stride[kLogits]),
        gradient_stride(program.space.class_stride[kGradients]),
        count(static_cast<Index>(program.space.classes)),
        rows(rows),
        stage(nullptr) {
    if constexpr (kStaged) {
      extern __shared__ uint4 staged[];
      stage = reinterpret_cast<Slot*>(staged) + threadIdx.x;
    }
  }
  __device__ __forceinline__ Index classes() const {
    return kClasses == 0 ? count : static_cast<Index>(kClasses);
  }
  // Number of the source's c-th class.
  static __device__ __forceinline__ Index class_of(Index c) {
    return c;
  }
  // Copies all classes to shared memory if `wanted`, and waits for them. All copies start at once, so that as many as
  // possible are in flight.
  __device__ __forceinline__ void load_all(bool wanted) const {
    if (!wanted) return;
    if constexpr (kInterleaved) {
      // Without tests for each row: only the last lanes of a row of pixels have rows that do not exist.
      if (rows == kVecSize) {
        load_interleaved<true>();
      } else {
        load_interleaved<false>();
      }
      cp_async_wait_all();
    } else if constexpr (kStaged) {
      cp_async_strided(stage, static_cast<int>(kThreads == 0 ? blockDim.x : kThreads), at, stride, classes());
      cp_async_wait_all();
    }
  }
  __device__ __forceinline__ P read(Index c) const {
    if constexpr (kInterleaved) {
      P x;
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) x.element[i] = place(c, i)->element[0];
      return x;
    } else if constexpr (kStaged) {
      return load_words(place(c));
    } else {
      return load_stream<kVecSize>(at + c * stride);
    }
  }
  // mask_out() replaces a logit of row i by -inf, clear() by 0. Precondition of both, and of overwrite(): kStaged.
  __device__ __forceinline__ void mask_out(Index c, int i) const {
    put(c, i, Narrow<Storage>::from(-scalar_infinity(0.0f)));
  }
  __device__ __forceinline__ void clear(Index c, int i) const {
    put(c, i, Narrow<Storage>::from(0.0f));
  }
  // Replaces the staged logits of a class.
  __device__ __forceinline__ void overwrite(Index c, const P& x) const {
    if constexpr (kInterleaved) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) place(c, i)->element[0] = x.element[i];
    } else {
      *place(c) = x;
    }
  }
  // Pointer to the gradients of a class. It moves from class to class, because a multiplication for each takes five
  // instructions.
  struct Cursor {
    Storage* to;
  };
  __device__ __forceinline__ Cursor first_class() const {
    return {gradients};
  }
  // Stores the gradients of class c, to which the cursor points, and moves it to the next class.
  __device__ __forceinline__ void store(Cursor& cursor, Index, const P& gradient) const {
    if constexpr (kInterleaved) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        if (i < rows) store_pack<1>(cursor.to + i * kWarp, Pack<Storage, 1>{{gradient.element[i]}});
      }
    } else {
      store_pack<kVecSize>(cursor.to, gradient);
    }
    cursor.to += gradient_stride;
  }
  // Called after the gradients of all classes are stored. There is nothing to do here.
  __device__ __forceinline__ void flush() const {
  }

 private:
  template <bool kWhole>
  __device__ __forceinline__ void load_interleaved() const {
    using Element = Pack<Storage, 1>;
    const Storage* of_class = at;
#pragma unroll 4
    for (Index c = 0; c < classes(); ++c, of_class += stride) {
      const Element* const from = reinterpret_cast<const Element*>(of_class);
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        if (!kWhole && i >= rows) break;
        cp_async(place(c, i), from + i * kWarp);
      }
    }
  }
  __device__ __forceinline__ void put(Index c, int i, Storage x) const {
    if constexpr (kInterleaved) {
      place(c, i)->element[0] = x;
    } else {
      place(c)->element[i] = x;
    }
  }
  __device__ __forceinline__ Slot* place(Index c) const {
    return stage + c * static_cast<int>(kThreads == 0 ? blockDim.x : kThreads);
  }
  __device__ __forceinline__ Slot* place(Index c, int i) const {
    return place(c * kVecSize + i);
  }
};

// Stores the gradients of kVecSize rows. `read` is false if all of them are 0, so that no logit is read. A negative
// label means that the row has no target. kKeepsExponentials: exp(z - max_logit) was staged in place of the logits.
// kMasked: the labels' logits have been replaced by -inf, so the labels' gradients are written after all others.
// kSelectsZeros: zeros are selected for rows without a gradient, because their logits may be infinite.
template <bool kKeepsExponentials, bool kMasked, bool kSelectsZeros, class Source, int kVecSize, class Program,
          class Compute = typename Program::Compute>
__device__ __forceinline__ void store_rows_of_thread(const Program& program, const Source& column,
                                                     const typename Source::Index (&labels)[kVecSize],
                                                     const GradCoeffs<Compute> (&grad_coeffs)[kVecSize], bool read) {
  using Gradient = typename Program::Gradient;
  bool all_zero[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) all_zero[i] = grad_coeffs[i].all_zero();
  auto cursor = column.first_class();
  if (!read) {
    for (typename Source::Index c = 0; c < column.classes(); ++c) {
      const Compute zeros[kVecSize] = {};
      column.store(cursor, c, NarrowPack<Gradient, kVecSize>::from(zeros));
    }
    return;
  }
#pragma unroll Source::kStoresTogether
  for (typename Source::Index c = 0; c < column.classes(); ++c) {
    Compute g[kVecSize], raw[kVecSize];
    unpack(column.read(c), raw);
    const Compute w = Program::kSmoothed ? program.weight(column.class_of(c)) : Compute(0);
    Compute powers[kVecSize], of_class[kVecSize], slopes[kVecSize], max_logits[kVecSize];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) max_logits[i] = grad_coeffs[i].max_logit;
    if constexpr (!kKeepsExponentials) {
      program.logit.exponential_value_slope(raw, max_logits, powers, of_class, slopes);
    }
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      g[i] = grad_coeffs[i].exp_coeff * (kKeepsExponentials ? raw[i] : powers[i]);
      if constexpr (Program::kSmoothed) g[i] -= grad_coeffs[i].weight_coeff * w;
      if constexpr (!kMasked) g[i] = c == labels[i] ? grad_coeffs[i].target : g[i];
      if constexpr (Program::kCapped) g[i] *= slopes[i];
      if constexpr (kSelectsZeros) g[i] = all_zero[i] ? Compute(0) : g[i];
    }
    column.store(cursor, c, NarrowPack<Gradient, kVecSize>::from(g));
  }
  if constexpr (kMasked) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      if (labels[i] >= 0) column.store_again(labels[i], Narrow<Gradient>::from(grad_coeffs[i].target));
    }
  }
}

// Computes the maximum of the raw logits of each of kVecSize rows. Precondition: max_logit[i] is -inf.
template <class Source, int kVecSize, class Compute>
__device__ __forceinline__ void max_per_row(const Source& column, Compute (&max_logit)[kVecSize]) {
  using Storage = typename Source::Value;
  if constexpr (sizeof(Storage) == 2 && sizeof(Compute) == 4 && kVecSize % 2 == 0 && kHasPairMax) {
    PackedPairMax<Storage, 2> running[kVecSize / 2];
#pragma unroll 4
    for (typename Source::Index c = 0; c < column.classes(); ++c) {
      const auto x = column.read(c);
#pragma unroll
      for (int i = 0; i < kVecSize / 2; ++i) running[i].add(reinterpret_cast<const Pack<Storage, 2>*>(&x)[i]);
    }
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) max_logit[i] = running[i / 2].half(i % 2);
  } else {
#pragma unroll 4
    for (typename Source::Index c = 0; c < column.classes(); ++c) {
      Compute raw[kVecSize];
      unpack(column.read(c), raw);
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) max_logit[i] = max_ignoring_nan(max_logit[i], raw[i]);
    }
  }
}

// Adds the exponentials of each of kVecSize rows to `sums`, whose max_logit is set. The label's exponential is left
// out; with kMasked it is 0 already, because the label's logit has been replaced by -inf. With kKeeps, which requires
// logits of type Compute, exponentials replace their logits.
template <bool kMasked, bool kKeeps, class Source, int kVecSize, class Program,
          class Compute = typename Program::Compute>
__device__ __forceinline__ void add_exponentials_per_row(const Program& program, const Source& column,
                                                         const typename Source::Index (&labels)[kVecSize],
                                                         const Compute (&z)[kVecSize],
                                                         RowSums<Compute, Program::kSmoothed> (&sums)[kVecSize]) {
#pragma unroll 4
  for (typename Source::Index c = 0; c < column.classes(); ++c) {
    Compute raw[kVecSize];
    unpack(column.read(c), raw);
    const Compute w = Program::kSmoothed ? program.weight(column.class_of(c)) : Compute(1);
    Pack<Compute, kVecSize> e;
    Compute shifts[kVecSize], of_class[kVecSize], slopes[kVecSize];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) shifts[i] = exp_shift(sums[i].softmax.max_logit);
    program.logit.exponential_value_slope(raw, shifts, e.element, of_class, slopes);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      sums[i].softmax.exp_sum += !kMasked && c == labels[i] ? Compute(0) : e.element[i];
      if constexpr (Program::kSmoothed) {
        sums[i].weighted_gap += w == Compute(0) ? Compute(0) : w * (z[i] - of_class[i]);
        sums[i].weight_sum += w;
      }
    }
    if constexpr (kKeeps) column.overwrite(c, e);
  }
}

// Evaluates the kVecSize rows `row`, `row` + kApart, ... with the labels `now`, and writes their gradients if
// kGradient. Only the first `count` rows exist. Returns the sum of their values.
template <bool kGradient, int kApart = 1, class Source, class Program, class Scale>
__device__ __forceinline__ double visit_rows_of_thread(const Program& program, const Source& column, int64 row,
                                                       const LaneLabels<Source::kVecSize, Program>& now, Scale& scale,
                                                       int count = Source::kVecSize) {
  using Compute = typename Program::Compute;
  using Input = typename Program::Input;
  using Index = typename Source::Index;
  constexpr int kVecSize = Source::kVecSize;
  // The target's logit is replaced by -inf, so no class is compared with the label.
  constexpr bool kMasksTarget = !Program::kSmoothed && !Program::kCapped;
  // Exponentials replace their logits if they fit.
  constexpr bool kKeepsExponentials = kGradient && !Program::kCapped && kSameType<Input, Compute>;
  Index labels[kVecSize];
  now.active_classes(program, count, labels);
  bool any = false;
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) any |= labels[i] >= 0;
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
      const Index at = labels[i] < 0 ? Index(0) : labels[i];
      z[i] = program.logit.value(widen<Compute>(column.read(at).element[i]));
      if constexpr (kMasksTarget) {
        if (labels[i] >= 0) column.mask_out(labels[i], i);
      }
    }
    add_exponentials_per_row<kMasksTarget, kKeepsExponentials>(program, column, labels, z, sums);
  }
  GradCoeffs<Compute> grad_coeffs[kVecSize];
  unsigned zero_rows;
  const double total = evaluate_lane_rows<kGradient>(
      program, labels, z, sums, count,
      [&](int i, int64(&at)[kRowStreams]) {
        // Computed again, because offsets kept until here would take registers in all calls.
        program.space.offsets(row, at);
#pragma unroll
        for (int s = 0; s < kRowStreams; ++s) at[s] += i * kApart * program.space.at.stride[s][0];
      },
      scale, grad_coeffs, zero_rows);
  if constexpr (kGradient) {
    if (any && zero_rows != 0) {
      // Logits or exponentials of rows without a gradient may be infinite, so they are replaced by 0.
#pragma unroll 1
      for (Index c = 0; c < column.classes(); ++c) {
#pragma unroll
        for (int i = 0; i < kVecSize; ++i) {
          if (zero_rows >> i & 1u) column.clear(c, i);
        }
      }
    }
    store_rows_of_thread<kKeepsExponentials, kMasksTarget && Source::kStoresAgain, Program::kSmoothed>(
        program, column, labels, grad_coeffs, any);
    column.flush();
  }
  return total;
}

// Reader, as TwoPassReader, with kVecSize neighbouring rows per lane. kClasses and kThreads: as in StridedRows.
// Precondition: kVecSize divides the number of rows.
template <int kVecSize, int kClasses, int kThreads>
struct ThreadPerRowReader {
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    using Source = StridedRows<typename Program::Input, kVecSize, true, kClasses, kThreads>;
    const int64 vectors = program.space.rows / kVecSize, step = chunks * kWarp;
    for_each_chunk(group, scale, chunks, work, [&](int chunk) {
      double total = 0.0;
      int64 v = static_cast<int64>(chunk) * kWarp + group.row_slot();
      // Offsets and labels are loaded one step ahead.
      int64 next[kRowStreams];
      LaneLabels<kVecSize, Program> ahead;
      const auto advance = [&] {
        program.space.offsets(v < vectors ? v * kVecSize : 0, next);
        ahead.read(program, next, v < vectors ? kVecSize : 0);
      };
      advance();
#pragma unroll 1
      while (v < vectors) {
        const LaneLabels<kVecSize, Program> now = ahead;
        int64 offset[kRowStreams];
#pragma unroll
        for (int s = 0; s < kRowStreams; ++s) offset[s] = next[s];
        const int64 row = v * kVecSize;
        v += step;
        advance();
        const Source column(program, offset);
        total += visit_rows_of_thread<kGradient>(program, column, row, now, scale);
      }
      return total;
    });
  }
};

// Reader, as TwoPassReader, with kVecSize rows per lane that are kWarp rows apart. A tile of 32 kVecSize rows does not
// cross the end of the inner dimension.
template <int kVecSize, int kClasses, int kThreads>
struct InterleavedRowsReader {
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    using Source = StridedRows<typename Program::Input, kVecSize, true, kClasses, kThreads, true>;
    constexpr int kTile = kVecSize * kWarp;
    const InnerTiles<kTile> tiles(program.space);
    for_each_chunk(group, scale, chunks, work, [&](int chunk) {
      double total = 0.0;
      // Offsets and labels are loaded one step ahead.
      int64 next[kRowStreams], next_row = 0;
      int next_count = 0;
      LaneLabels<kVecSize, Program> ahead;
      const auto advance = [&](int64 tile) {
        const auto found = tiles[tile];
        const int64 left = found.after - group.row_slot();
        next_count = tile >= tiles.count || left <= 0 ? 0
                     : left >= kTile                  ? kVecSize
                                                      : static_cast<int>((left + kWarp - 1) / kWarp);
        next_row = next_count > 0 ? found.row + group.row_slot() : 0;
        program.space.offsets(next_row, next);
        ahead.read(program, next, next_count, kWarp);
      };
      advance(chunk);
#pragma unroll 1
      for (int64 tile = chunk; tile < tiles.count; tile += chunks) {
        const LaneLabels<kVecSize, Program> now = ahead;
        const int count = next_count;
        const int64 row = next_row;
        int64 offset[kRowStreams];
#pragma unroll
        for (int s = 0; s < kRowStreams; ++s) offset[s] = next[s];
        advance(tile + chunks);
        if (count == 0) continue;
        const Source column(program, offset, count);
        total += visit_rows_of_thread<kGradient, kWarp>(program, column, row, now, scale, count);
      }
      return total;
    });
  }
};

// As apply_grad_coeffs, with kVecSize neighbouring rows per thread. Precondition: kVecSize divides the number of rows.
template <int kVecSize, class Program, class Result>
__device__ __forceinline__ void apply_grad_coeffs_thread_per_row(const Program& program, int64 result_stride,
                                                                 double scale, const Result* grad_output) {
  using Compute = typename Program::Compute;
  const int64 vectors = program.space.rows / kVecSize, threads = static_cast<int64>(gridDim.x) * blockDim.x;
#pragma unroll 1
  for (int64 v = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; v < vectors; v += threads) {
    int64 offset[kRowStreams];
    program.space.offsets(v * kVecSize, offset);
    LaneLabels<kVecSize, Program> now;
    now.read(program, offset, kVecSize);
    int64 labels[kVecSize];
    now.active_classes(program, kVecSize, labels);
    GradCoeffs<Compute> grad_coeffs[kVecSize];
    bool any = false;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const int64 result = offset[kResults] + i * program.space.at.stride[kResults][0];
      grad_coeffs[i] = program.grad_coeffs[result];
      any |= !grad_coeffs[i].all_zero();
      const double g = widen<double>(grad_output[result * result_stride]);
      scale_grad_coeffs(program, grad_coeffs[i], static_cast<Compute>(g * scale));
    }
    const StridedRows<typename Program::Input, kVecSize, false> column(program, offset);
    store_rows_of_thread<false, false, true>(program, column, labels, grad_coeffs, any);
  }
}
