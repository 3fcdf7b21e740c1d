// Rows whose classes lie apart, neighbouring rows between them, that are too long for shared memory or too few to fill
// a GPU: blocks share them by their classes. Transposed matrices of many classes. Value and gradient of softmax.cuh.
//
//   x[c, r]    a tile is kLanes kVecSize neighbouring rows; the classes of all tiles, one tile after another, are cut
//              into equal slices
//   lane l of kLanes takes rows l kVecSize, ... of a tile; thread t of a block starts at class t / kLanes of a slice;
//   where tiles of a warp's lanes would share the sectors at their ends, these are the threads of several warps
//
// A slice is two tasks of a block: to sum, and to write gradients. Blocks claim tasks one by one, first all sums.
//
// 1. Each thread sums its classes of its rows by an online softmax; the block combines its threads' sums and leaves
//    them in the workspace, for each tile that the slice has a part of.
// 2. The block that completes a tile combines its parts in their order, evaluates the rows, and leaves the coefficients
//    of their gradients behind the records of grad_output.
// 3. A task that writes starts to load, waits for the coefficients, and writes the gradients. It reads the logits of a
//    slice again, the last ones first: these are the likeliest to be in L2.
//
// A task waits only for tasks claimed before it, which never wait themselves: blocks need not run at the same time.
// If there are as many slices as tiles, each is one, and is written when it has been summed.
//
// Counters: one for each tile that several slices share, 0 before and after a launch. It counts the parts that are
// summed, then the evaluation, then the parts that are written.
//
// Order of additions: threads of a block, then parts of a tile, in fixed trees, which follow from the sizes alone.
//
// Traffic: each logit is read twice; each gradient is written once. Preconditions: kVecSize divides the number of rows;
// rows of a vector are contiguous; classes < 2^31; a block has 32 kWarps threads.
#pragma once
#include "softmax/column_tiles.cuh"

// Blocks that share rows by so many slices. A worker is a block.
struct ColumnSlices : ClusterGroup<1> {
  int count;
};

// Division of the classes of all tiles into slices, by units of some classes, of which each tile has the same number.
// If there are as many slices as tiles, each slice is one.
struct SlicePlan {
  int64 units;
  int slices, of_tile, classes_of_unit, classes;

  __device__ __forceinline__ SlicePlan(const ColumnSlices& group, int64 tiles, int classes, int classes_of_unit)
      : slices(group.count), classes_of_unit(classes_of_unit), classes(classes) {
    of_tile = (classes + classes_of_unit - 1) / classes_of_unit;
    units = tiles * of_tile;
  }
  // The classes of a tile that belong to a slice.
  struct Part {
    int64 tile;
    int slice, begin, end;
  };
  // visit(part) for each part of a slice.
  template <class Visit>
  __device__ __forceinline__ void for_each_part(int slice, const Visit& visit) const {
    const int64 end = start(slice + 1);
#pragma unroll 1
    for (int64 unit = start(slice); unit < end;) {
      const int64 tile = quotient(unit, of_tile), first = tile * of_tile;
      const int from = static_cast<int>(unit - first);
      const int to = end - first < of_tile ? static_cast<int>(end - first) : of_tile;
      visit(Part{tile, slice, from * classes_of_unit, to == of_tile ? classes : to * classes_of_unit});
      unit = first + to;
    }
  }
  // The first slice that has a part of a tile, and how many have one.
  __device__ __forceinline__ int first_slice(int64 tile) const {
    return slice_of(tile * of_tile);
  }
  __device__ __forceinline__ unsigned parts(int64 tile) const {
    return slice_of(tile * of_tile + of_tile - 1) - first_slice(tile) + 1;
  }
  // The place of a part's sums: those of a tile follow each other.
  static __device__ __forceinline__ int64 place(int64 tile, int slice) {
    return tile + slice;
  }

 private:
  __device__ __forceinline__ int64 start(int slice) const {
    return quotient(slice * units, slices);
  }
  __device__ __forceinline__ int slice_of(int64 unit) const {
    return static_cast<int>(quotient((unit + 1) * slices - 1, units));
  }
};

// The classes of one thread in a part of a slice. It visits kAhead vectors at once, and as many are on their way.
// kLast: logits are read for the last time, the last ones first.
template <class Program, int kVecSize_, int kAhead_, bool kLast>
struct SliceClasses {
  static constexpr int kAhead = kAhead_;
  using Value = typename Program::Input;
  using P = Pack<Value, kVecSize_>;
  const Value* from;  // of the thread's first class
  typename Program::Gradient* to;
  int64 stride, gradient_stride;  // from one class of the thread to the next
  int first, step, count;         // its classes

  __device__ __forceinline__ SliceClasses(const Program& program, const int64 (&offset)[kRowStreams], int first,
                                          int step, int end)
      : first(first), step(step), count(end > first ? (end - first + step - 1) / step : 0) {
    const int64 input_stride = program.space.class_stride[kLogits], to_stride = program.space.class_stride[kGradients];
    stride = step * input_stride;
    gradient_stride = step * to_stride;
    from = program.input + offset[kLogits] + first * input_stride;
    to = program.gradients + offset[kGradients] + first * to_stride;
  }
  __device__ __forceinline__ int class_of(int k) const {
    return first + k * step;
  }
  // kCount vectors from the k-th one.
  template <int kCount>
  __device__ __forceinline__ void load(int k, P (&x)[kCount]) const {
    const Value* at = from + k * stride;
#pragma unroll
    for (int j = 0; j < kCount; ++j, at += stride) x[j] = kLast ? load_stream<kVecSize_>(at) : load_pack<kVecSize_>(at);
  }
  // The first of the n-th kAhead classes, if there are so many.
  __device__ __forceinline__ int batch(int n) const {
    return (kLast ? count / kAhead - 1 - n : n) * kAhead;
  }
  // Starts to load the first of these, for for_each_vector.
  __device__ __forceinline__ void start(P (&x)[kAhead]) const {
    if (count >= kAhead) load(batch(0), x);
  }
  // k if class c is the thread's k-th one, otherwise -1; so it is for -1, of a row without a label. kStep is `step`.
  template <int kStep>
  __device__ __forceinline__ int index_of(int c) const {
    const int distance = c - first, k = distance / kStep;
    return c >= 0 && distance >= 0 && k < count && k * kStep == distance ? k : -1;
  }
};

// Visitors of for_each_vector. They are no generic lambdas, which NVRTC 11.8 takes for functions of the host.
//
// Adds kCount classes of a thread from its k-th one, whose logits are x. The sums are rescaled at most once. kMasks:
// -inf replaces the logits of the labels, which are the thread's `own_label`-th classes, instead of a comparison for
// each.
template <bool kMasks, class Program, class Classes, int kVecSize>
struct AddVectors {
  using Compute = typename Program::Compute;
  using Input = typename Program::Input;
  const Program& program;
  const Classes& own;
  const int (&labels)[kVecSize];
  const int (&own_label)[kVecSize];
  const Compute (&z)[kVecSize];
  RowSums<Compute, Program::kSmoothed> (&sums)[kVecSize];

  template <int kCount>
  __device__ __forceinline__ void operator()(int k, Pack<Input, kVecSize> (&x)[kCount]) const {
    LargestOfRows<Input, kVecSize, Compute> largest;
#pragma unroll
    for (int j = 0; j < kCount; ++j) largest.add(x[j]);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      rescale(sums[i].softmax, max_ignoring_nan(sums[i].softmax.max_logit, program.logit.value(largest.of_row(i))));
      if constexpr (kMasks) {
        const unsigned place = static_cast<unsigned>(own_label[i] - k);
        if (place < kCount) {
#pragma unroll
          for (int j = 0; j < kCount; ++j) {
            if (j == place) x[j].element[i] = Narrow<Input>::from(-scalar_infinity(0.0f));
          }
        }
      }
    }
    Pack<Compute, kVecSize> power;
#pragma unroll
    for (int j = 0; j < kCount; ++j) add_class<kMasks>(program, own.class_of(k + j), labels, z, x[j], sums, power);
  }
};

// Writes the gradients of kCount classes of a thread from its k-th one, whose logits are x.
template <bool kMasked, bool kSelects, class Program, class Classes, int kVecSize>
struct StoreVectors {
  using Compute = typename Program::Compute;
  const Program& program;
  const Classes& own;
  const int (&labels)[kVecSize];
  const GradCoeffs<Compute> (&coeffs)[kVecSize];
  const bool (&all_zero)[kVecSize];

  template <int kCount>
  __device__ __forceinline__ void operator()(int k, const Pack<typename Program::Input, kVecSize> (&x)[kCount]) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      store_class<false, kMasked, kSelects>(program, own, k + j, own.to + (k + j) * own.gradient_stride, labels, x[j],
                                            coeffs, all_zero);
    }
  }
};

// visit(k, vectors) for all classes of a thread, kAhead at a time and then one by one. The next vectors are on their
// way while some are visited; the first ones have been loaded by Classes::start().
template <class Classes, int kAhead, class Visit>
__device__ __forceinline__ void for_each_vector(const Classes& own, typename Classes::P (&first)[kAhead],
                                                const Visit& visit) {
  const int whole = own.count / kAhead;
  typename Classes::P second[kAhead], last[1];
#pragma unroll 1
  for (int n = 0; n < whole; n += 2) {
    if (n + 1 < whole) own.load(own.batch(n + 1), second);
    visit(own.batch(n), first);
    if (n + 1 >= whole) break;
    if (n + 2 < whole) own.load(own.batch(n + 2), first);
    visit(own.batch(n + 1), second);
  }
#pragma unroll 1
  for (int k = whole * kAhead; k < own.count; ++k) {
    own.load(k, last);
    visit(k, last);
  }
}

// A value that another block has stored, read past the L1 cache, which may hold a stale line.
template <class T>
__device__ __forceinline__ T load_shared_by_blocks(const T* from) {
  static_assert(sizeof(T) % 8 == 0, "read in words of 8 bytes");
  alignas(16) unsigned long long words[sizeof(T) / 8];
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 8); ++i) {
    words[i] = __ldcg(reinterpret_cast<const unsigned long long*>(from) + i);
  }
  return reinterpret_cast<const T&>(words);
}

// Coefficients of the rows, by their numbers, behind the records of grad_output of the tiles and the divisor that
// forward may have recorded. engines/softmax/layout.py: slice_records
template <class Compute>
__device__ __forceinline__ GradCoeffs<Compute>* coeffs_behind(double* records, int64 tiles) {
  return reinterpret_cast<GradCoeffs<Compute>*>(records + (tiles + 2) / 2 * 2);
}

// Sources of the coefficients of a row, multiplied by the factor of its gradient. RecordedCoeffs reads those that a
// block of this launch has recorded, and the grad_output of its tile.
template <class Compute>
struct RecordedCoeffs {
  const GradCoeffs<Compute>* coeffs;
  const double* grad_output;
  double weight;

  template <class Program>
  __device__ __forceinline__ GradCoeffs<Compute> scaled(const Program& program, int64 row, int64) const {
    GradCoeffs<Compute> found = load_shared_by_blocks(coeffs + row);
    scale_grad_coeffs(program, found, static_cast<Compute>(load_shared_by_blocks(grad_output) * weight));
    return found;
  }
};
// Coefficients that an earlier launch has recorded, for one factor.
template <class Compute>
struct KnownCoeffs {
  const GradCoeffs<Compute>* coeffs;
  Compute factor;

  template <class Program>
  __device__ __forceinline__ GradCoeffs<Compute> scaled(const Program& program, int64 row, int64) const {
    GradCoeffs<Compute> found = coeffs[row];
    scale_grad_coeffs(program, found, factor);
    return found;
  }
};
// Coefficients in the residual, by the place of the row in the result.
template <class Result>
struct ResidualCoeffs {
  const Result* grad_output;
  int64 result_stride;
  double scale;

  template <class Program, class Compute = typename Program::Compute>
  __device__ __forceinline__ GradCoeffs<Compute> scaled(const Program& program, int64, int64 place) const {
    GradCoeffs<Compute> found = program.grad_coeffs[place];
    scale_grad_coeffs(program, found, static_cast<Compute>(widen<double>(grad_output[place * result_stride]) * scale));
    return found;
  }
};

// The evaluation of a tile, which wait() waits for if the tile has a counter. Preconditions: every thread of the block
// calls it together.
struct TileEvaluation {
  const unsigned* counter;
  unsigned parts;

  __device__ __forceinline__ void wait() const {
    if (counter == nullptr) return;
    if (threadIdx.x == 0) {
      while (load_and_synchronize(counter) <= parts) let_others_run();
    }
    __syncthreads();
  }
};

// A reader as TwoPassReader, with entry points of its own for what it leaves out.
template <int kVecSize, int kLanes, int kWarps, int kAhead>
struct ColumnSliceReader {
  static constexpr int kThreads = kWarps * kWarp, kRows = kLanes * kVecSize;
  // True where threads have so few vectors that fetching instructions for the first time takes longer than running
  // them.
  static constexpr bool kRunsOnce = kAhead < 16;
  // Threads that have the same rows, and those of a block that combine slices of the same row.
  static constexpr int kSlots = kThreads / kLanes, kTeams = kThreads / kRows;
  // Threads of which each has other rows, a warp at least, and how often a block has so many.
  static constexpr int kSpan = kLanes > kWarp ? kLanes : kWarp, kSpans = kThreads / kSpan;
  static_assert(kRows <= kThreads, "each thread evaluates one row at most");
  // True if the label's class is left out by its logit, not by a comparison of each class.
  template <class Program>
  static constexpr bool kMasks = !Program::kCapped && !Program::kSmoothed;

  static __device__ __forceinline__ int lane() {
    return threadIdx.x % kLanes;
  }
  // The n-th sums of a tile are those of row_of(n).
  static __device__ __forceinline__ int row_of(int n) {
    return n % kLanes * kVecSize + n / kLanes;
  }

  // The vector of rows that a lane has of a tile.
  template <class Program>
  struct Rows {
    int64 first;
    bool exists;
    int64 offset[kRowStreams];
    LaneLabels<kVecSize, Program> loads;

    __device__ __forceinline__ Rows(const Program& program, int64 tile) {
      first = tile * kRows + lane() * kVecSize;
      exists = first < program.space.rows;
      program.space.offsets(exists ? first : 0, offset);
      loads.read(program, offset, exists ? kVecSize : 0);
    }
    // The label of each row, or -1. Nothing looks at what has been loaded before.
    __device__ __forceinline__ void active_classes(const Program& program, int (&labels)[kVecSize]) const {
      loads.active_classes(program, exists ? kVecSize : 0, labels);
    }
    // Its classes of a part.
    template <bool kLast>
    __device__ __forceinline__ SliceClasses<Program, kVecSize, kAhead, kLast> classes(
        const Program& program, const SlicePlan::Part& part) const {
      const int first_class = part.begin + static_cast<int>(threadIdx.x) / kLanes;
      return {program, offset, first_class, kSlots, exists ? part.end : 0};
    }
  };

  // The sums of a part; those of its n-th row are returned in thread n. Preconditions: every thread of the block calls
  // it together, and passes a barrier before the next call.
  template <class Program>
  static __device__ __forceinline__ auto sums_of_part(const Program& program, const SlicePlan::Part& part) {
    using Compute = typename Program::Compute;
    using Sums = RowSums<Compute, Program::kSmoothed>;
    using Exchanged = ExchangedSums<Program::kSmoothed, Compute>;
    const Rows<Program> rows(program, part.tile);
    const auto own = rows.template classes<false>(program, part);
    Pack<typename Program::Input, kVecSize> first[kAhead];
    own.start(first);
    int labels[kVecSize], own_label[kVecSize];
    rows.active_classes(program, labels);
    Compute z[kVecSize];
    Sums sums[kVecSize];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      z[i] = Compute(0);
      sums[i] = Sums::empty();
      own_label[i] = own.template index_of<kSlots>(labels[i]);
      if (Program::kSmoothed && labels[i] >= 0) {
        const int64 at = rows.offset[kLogits] + i * program.space.at.stride[kLogits][0];
        const int64 place = at + labels[i] * program.space.class_stride[kLogits];
        z[i] = program.logit.value(widen<Compute>(program.input[place]));
      }
    }
    using Classes = SliceClasses<Program, kVecSize, kAhead, false>;
    const AddVectors<kMasks<Program>, Program, Classes, kVecSize> add{program, own, labels, own_label, z, sums};
    for_each_vector(own, first, add);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const Exchanged mine = combined_lanes<kLanes>(Exchanged(exchanged_sums(sums[i])));
      if (threadIdx.x % kSpan < kLanes) shared_sums<Exchanged>(threadIdx.x / kSpan, i * kLanes + lane()) = mine;
    }
    __syncthreads();
    return combined<kSpans, Exchanged>();
  }

  // Label and target logit of the tile's n-th row, in thread n.
  template <class Program>
  struct Target {
    using Compute = typename Program::Compute;
    int64 row;
    bool exists;
    RowTarget<Compute> target;
    Compute z;

    __device__ __forceinline__ Target(const Program& program, int64 tile) {
      row = tile * kRows + row_of(threadIdx.x);
      exists = threadIdx.x < kRows && row < program.space.rows;
      target = program.target(exists ? row : 0);
      target.active &= exists;
      target.invalid_label &= exists;
      z = target_logit(program, target);
    }
  };

  // Evaluates the rows of a tile. The partial sum of their values is stored, and the coefficients of their gradients if
  // `coeffs` is a place. Preconditions: as above; thread n has the sums of the n-th row.
  template <class Program, class Exchanged, class Compute = typename Program::Compute>
  static __device__ __forceinline__ void evaluate(const Program& program, int64 tile, const Target<Program>& row,
                                                  const Exchanged& exchanged, double* partials,
                                                  GradCoeffs<Compute>* coeffs) {
    double value = 0.0;
    if (threadIdx.x < kRows) {
      RowSums<Compute, Program::kSmoothed> sums = RowSums<Compute, Program::kSmoothed>::empty();
      if constexpr (Program::kSmoothed) {
        sums = exchanged;
      } else {
        sums.softmax = exchanged;
      }
      const RowResult<Compute> y = program.finish(row.target, row.z, sums, row.exists);
      value = static_cast<double>(y.value);
      if (row.exists && coeffs != nullptr) coeffs[row.row] = y.grad_coeffs;
    }
    value = block_sum(value);
    if (threadIdx.x == 0) partials[tile] = value;
  }

  // Writes the gradients of a part, whose coefficients are there after the evaluation of its tile. Preconditions: every
  // thread of the block calls it together.
  template <class Program, class Coeffs, class Compute = typename Program::Compute>
  static __device__ __forceinline__ void write(const Program& program, const SlicePlan::Part& part,
                                               const TileEvaluation& evaluation, const Coeffs& coeffs_of) {
    const Rows<Program> rows(program, part.tile);
    const auto own = rows.template classes<true>(program, part);
    Pack<typename Program::Input, kVecSize> first[kAhead];
    own.start(first);
    evaluation.wait();
    if (!rows.exists) return;
    int labels[kVecSize];
    rows.active_classes(program, labels);
    GradCoeffs<Compute> coeffs[kVecSize];
    bool all_zero[kVecSize], any_zero = false;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      coeffs[i] =
          coeffs_of.scaled(program, rows.first + i, rows.offset[kResults] + i * program.space.at.stride[kResults][0]);
      all_zero[i] = coeffs[i].all_zero();
      any_zero |= all_zero[i];
    }
    using Classes = SliceClasses<Program, kVecSize, kAhead, true>;
    if (any_zero || kRunsOnce) {
      using Store = StoreVectors<kMasks<Program>, true, Program, Classes, kVecSize>;
      for_each_vector(own, first, Store{program, own, labels, coeffs, all_zero});
    } else {
      using Store = StoreVectors<kMasks<Program>, false, Program, Classes, kVecSize>;
      for_each_vector(own, first, Store{program, own, labels, coeffs, all_zero});
    }
    if constexpr (kMasks<Program>) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        const int k = own.template index_of<kSlots>(labels[i]);
        if (k >= 0) own.to[k * own.gradient_stride + i] = Narrow<typename Program::Gradient>::from(coeffs[i].target);
      }
    }
  }

  static __device__ __forceinline__ SlicePlan plan(const ColumnSlices& group, int64 tiles, int64 classes) {
    return {group, tiles, static_cast<int>(classes), kSlots * kAhead};
  }

  // Runs all tasks. Preconditions: `work` has room for the sums of all parts behind the partial sums.
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const ColumnSlices& group, Scale& scale,
                                               int64 tiles, const Workspace& work) {
    using Compute = typename Program::Compute;
    using Sums = ExchangedSums<Program::kSmoothed, Compute>;
    __shared__ int claimed;
    const SlicePlan slices = plan(group, tiles, program.space.classes);
    Sums* const part_sums = reinterpret_cast<Sums*>(work.partials + (tiles + 1) / 2 * 2);
    GradCoeffs<Compute>* coeffs = nullptr;
    if constexpr (kGradient) coeffs = coeffs_behind<Compute>(scale.used_grad_output, tiles);
    const auto write_part = [&](const SlicePlan::Part& part, const TileEvaluation& evaluation) {
      if constexpr (kGradient) {
        const double* const used = scale.used_grad_output + part.tile;
        write(program, part, evaluation, RecordedCoeffs<Compute>{coeffs, used, scale.weight});
      }
    };
    // Slices that are tiles are written when they have been summed.
    const bool alone = slices.slices == tiles;
    const int tasks = (kGradient && !alone ? 2 : 1) * slices.slices;
    if (threadIdx.x == 0) claimed = static_cast<int>(claim_next(work.claim_counter));
    __syncthreads();
    int n = claimed;
#pragma unroll 1
    while (n < tasks) {
      // The next task is claimed while this one runs.
      int next = 0;
      if (threadIdx.x == 0) next = static_cast<int>(claim_next(work.claim_counter));
      const bool sums_up = n < slices.slices;
      slices.for_each_part(sums_up ? n : n - slices.slices, [&](const SlicePlan::Part& part) {
        unsigned* const counter = work.counters + part.tile;
        const unsigned parts = slices.parts(part.tile);
        bool complete = alone;
        if (sums_up) {
          Sums sums = sums_of_part(program, part);
          if (!complete) {
            Sums* const own = part_sums + slices.place(part.tile, part.slice) * kRows;
            if (threadIdx.x < kRows) own[threadIdx.x] = sums;
            complete = arrives_last(counter, parts);
          }
          if (complete) {
            // On its way while the sums of other slices arrive.
            const Target<Program> row(program, part.tile);
            if (!alone) {
              const int first = slices.first_slice(part.tile);
              sums = sums_of_tile(part_sums + slices.place(part.tile, first) * kRows, parts);
            }
            record_scale(scale, group, part.tile);
            evaluate(program, part.tile, row, sums, work.partials, coeffs);
          }
          __syncthreads();
        }
        if (alone || !sums_up) write_part(part, {alone ? nullptr : counter, parts});
        if (!alone && threadIdx.x == 0) {
          if (!sums_up) {
            if (atomicAdd(counter, 1u) == 2 * parts) *counter = 0;
          } else if (complete && kGradient) {
            add_and_synchronize(counter, 1);
          } else if (complete) {
            *counter = 0;
          }
        }
      });
      if (threadIdx.x == 0) claimed = next;
      __syncthreads();
      n = claimed;
    }
  }

  // Writes the gradients from coefficients that an earlier kernel has left.
  template <class Program, class Coeffs>
  static __device__ __forceinline__ void write_all(const Program& program, const ColumnSlices& group, int64 tiles,
                                                   const Coeffs& coeffs) {
    const SlicePlan slices = plan(group, tiles, program.space.classes);
#pragma unroll 1
    for (int slice = blockIdx.x; slice < slices.slices; slice += gridDim.x) {
      slices.for_each_part(slice, [&](const SlicePlan::Part& part) { write(program, part, {nullptr, 0}, coeffs); });
    }
  }

  // True if a tile was written with another grad_output than the true one. As worker_grad_scale_is_stale.
  static __device__ __forceinline__ bool is_stale(const ColumnSlices& group, int64 tiles, double true_grad_output,
                                                  const double* used_grad_output, double* expected_grad_output) {
    // Of tiles that no blocks share each block looks at its own.
    const bool shared = group.count != tiles;
    const int lane = threadIdx.x % kWarp;
    bool stale = false;
#pragma unroll 1
    for (int64 tile = shared ? lane : blockIdx.x + static_cast<int64>(lane) * gridDim.x; !stale && tile < tiles;
         tile += shared ? kWarp : static_cast<int64>(kWarp) * gridDim.x) {
      stale = __double_as_longlong(used_grad_output[tile]) != __double_as_longlong(true_grad_output);
    }
    stale = __any_sync(0xffffffffu, stale) != 0;
    if (stale && expected_grad_output != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
      *expected_grad_output = true_grad_output;
    return stale;
  }

 private:
  // The place of the sums of a tile's n-th row by one of several. An array of words, because they may have
  // constructors.
  template <class Sums>
  static __device__ __forceinline__ Sums& shared_sums(int who, int n) {
    constexpr int kParts = kSpans > kTeams ? kSpans : kTeams;
    alignas(16) __shared__ unsigned words[kParts * kRows * sizeof(Sums) / 4];
    return reinterpret_cast<Sums*>(words)[who * kRows + n];
  }
  // The sums of every kEach-th lane of a warp together, in each of them. Of two lanes the lower one's come first in
  // both, so that they have the same bits.
  template <int kEach, class Sums>
  static __device__ __forceinline__ Sums combined_lanes(Sums sums) {
#pragma unroll
    for (int offset = kWarp / 2; offset >= kEach; offset /= 2) {
      Sums other = sums;
#pragma unroll
      for (int word = 0; word < static_cast<int>(sizeof(Sums) / 4); ++word) {
        unsigned& x = reinterpret_cast<unsigned*>(&other)[word];
        x = __shfl_xor_sync(0xffffffffu, x, offset);
      }
      const bool upper = (threadIdx.x & offset) != 0;
      const Sums second = upper ? sums : other;
      sums = upper ? other : sums;
      combine(sums, second);
    }
    return sums;
  }
  // Those of kCount together, in their order; of the n-th row in thread n.
  template <int kCount, class Sums>
  static __device__ __forceinline__ Sums combined() {
    Sums sums = Sums::empty();
    // Sums of several words are combined in a loop, whose code is short: a block runs it once.
    constexpr int kAtOnce = sizeof(Sums) > 8 ? 1 : 4;
    if (threadIdx.x < kRows) {
#pragma unroll kAtOnce
      for (int who = 0; who < kCount; ++who) combine(sums, shared_sums<Sums>(who, threadIdx.x));
    }
    return sums;
  }
  // True in the block that completes the tile.
  static __device__ __forceinline__ bool arrives_last(unsigned* counter, unsigned parts) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) last = add_and_synchronize(counter, 1) == parts - 1;
    __syncthreads();
    return last;
  }
  // The sums of a tile's parts: each team of kRows threads combines every kTeams-th one; then the teams of a warp, and
  // warps or teams in turn.
  template <class Sums>
  static __device__ __forceinline__ Sums sums_of_tile(const Sums* of_parts, int count) {
    constexpr int kInFlight = !kRunsOnce ? 16 : sizeof(Sums) > 8 ? 4 : 8;
    const int n = threadIdx.x % kRows, team = threadIdx.x / kRows;
    Sums sums = Sums::empty();
#pragma unroll 1
    for (int k0 = team; k0 < count; k0 += kInFlight * kTeams) {
      Sums next[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int k = k0 + j * kTeams;
        next[j] = Sums::empty();
        if (k < count) next[j] = load_shared_by_blocks(of_parts + static_cast<int64>(k) * kRows + n);
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) combine(sums, next[j]);
    }
    constexpr int kOfWarp = kWarp > kRows ? kWarp / kRows : 1;
    sums = combined_lanes<kRows>(sums);
    if (team % kOfWarp == 0) shared_sums<Sums>(team / kOfWarp, n) = sums;
    __syncthreads();
    return combined<kTeams / kOfWarp, Sums>();
  }
};

template <int kVecSize, int kLanes, int kWarps, int kAhead>
constexpr bool kSharesChunks<ColumnSliceReader<kVecSize, kLanes, kWarps, kAhead>> = true;

// ---------------------------------------------------------------------------------------------------------------------
// Called by the entry points

// A value per row, and the coefficients of its gradient. The workspace is that of a sum.
template <class Reader, class Program>
__device__ __forceinline__ void sliced_row_values(const Program& program, const ColumnSlices& group, int64 tiles,
                                                  double* memory) {
  KnownScale<typename Program::Compute> unused{0};
  const Workspace work = workspace(memory);
  Reader::template sweep<false>(program, group, unused, tiles, work);
  if (arrive_last(work.ticket) && threadIdx.x == 0) *work.claim_counter = 0;
}

// Writes the gradients for the true grad_output, unless they are there already. The value's kernel has left the
// coefficients, so nothing is summed again.
template <class Reader, class Program, class Factor, class Result>
__device__ __forceinline__ void verify_sliced_gradient(const Program& program, const ColumnSlices& group, int64 tiles,
                                                       const Factor& scale, const Result* grad_output,
                                                       double* used_grad_output, double* expected_grad_output) {
  using Compute = typename Program::Compute;
  const double g = widen<double>(*grad_output);
  if (!Reader::is_stale(group, tiles, g, used_grad_output, expected_grad_output)) return;
  const GradCoeffs<Compute>* const coeffs = coeffs_behind<Compute>(used_grad_output, tiles);
  Reader::write_all(program, group, tiles, KnownCoeffs<Compute>{coeffs, static_cast<Compute>(g * scale)});
}
// Version for gradients of an assumed divisor: the true one is recorded behind the used grad_outputs.
template <class Reader, class Program, class Result>
__device__ __forceinline__ void verify_assumed_sliced_gradient(const Program& program, const ColumnSlices& group,
                                                               int64 tiles, const Result* grad_output,
                                                               double* used_grad_output, double* expected_grad_output) {
  using Compute = typename Program::Compute;
  const double g = widen<double>(*grad_output), divisor = used_grad_output[tiles];
  const bool wrong = divisor != static_cast<double>(program.space.rows);
  if (!Reader::is_stale(group, tiles, g, used_grad_output, expected_grad_output) && !wrong) return;
  const double scale = divisor == 0.0 ? 0.0 : reciprocal_of_count(divisor);
  const GradCoeffs<Compute>* const coeffs = coeffs_behind<Compute>(used_grad_output, tiles);
  Reader::write_all(program, group, tiles, KnownCoeffs<Compute>{coeffs, static_cast<Compute>(g * scale)});
}

// apply_grad_coeffs. The gradient may overwrite the logits.
template <class Reader, class Program, class Result>
__device__ __forceinline__ void apply_grad_coeffs_in_slices(const Program& program, const ColumnSlices& group,
                                                            int64 tiles, int64 result_stride, double scale,
                                                            const Result* grad_output) {
  Reader::write_all(program, group, tiles, ResidualCoeffs<Result>{grad_output, result_stride, scale});
}
