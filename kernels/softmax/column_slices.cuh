// Value and gradient of softmax.cuh for strided classes, where neighbouring rows are contiguous: rows that are too long
// for shared memory, or too few to fill a GPU. Blocks divide the classes among themselves. Example: transposed matrices
// of many classes.
//
//   x[c, r]    A tile is kLanes kVecSize neighbouring rows. The classes of all tiles, one tile after another, are
//              cut into equal slices. A part is the classes of one tile in one slice.
//
// A block claims slices. Thread t of a block owns the kVecSize rows of the tile from row (t % kLanes) kVecSize. In each
// part it processes every (threads / kLanes)-th class, starting with the (t / kLanes)-th. kLanes exceeds a warp where
// tiles of 32 threads would split sectors at their boundaries.
//
// Each slice is two tasks: sum, then write gradients. Blocks claim tasks one by one, all sums first.
//
// 1. Sum task: each thread runs an online softmax over its classes of its rows. The block combines the sums of its
//    threads and stores them in the workspace, once per part.
// 2. The block that completes a tile combines the sums of its parts in order, evaluates the rows, and stores the
//    coefficients of their gradients after the records of grad_output.
// 3. Write task: the block issues its first loads, waits for the coefficients, and writes the gradients. It reads the
//    logits of the slice again, last ones first, because these are the likeliest to be in L2.
//
// A task waits only for tasks that were claimed before it and that never wait themselves, so blocks need not be
// co-resident. If there are as many slices as tiles, each slice is one tile, and its gradients are written right after
// its sums.
//
// Counters: one per tile that several slices share, 0 before and after a launch. It counts the parts that are summed,
// then the evaluation, then the parts that are written.
//
// Order of additions: threads of a block, then parts of a tile, in fixed trees that depend on the sizes alone.
//
// Traffic: each logit is read twice; each gradient is written once. Preconditions: kVecSize divides the number of rows;
// rows of a vector are contiguous; classes < 2^31; a block has 32 kWarps threads.
#pragma once
#include "softmax/column_tiles.cuh"

// Blocks that share the rows in `count` slices. The worker is a block.
struct ColumnSlices : ClusterGroup<1> {
  int count;
};

// Division of the classes of all tiles into slices of nearly equal length. It cuts between units of `classes_of_unit`
// classes; each tile has `of_tile` units, and its last unit may be shorter. If there are as many slices as tiles, each
// slice is one tile.
struct SlicePlan {
  int64 units;
  int slices, of_tile, classes_of_unit, classes;

  __device__ __forceinline__ SlicePlan(const ColumnSlices& group, int64 tiles, int classes, int classes_of_unit)
      : slices(group.count), classes_of_unit(classes_of_unit), classes(classes) {
    of_tile = (classes + classes_of_unit - 1) / classes_of_unit;
    units = tiles * of_tile;
  }
  // Part of a slice: classes [begin, end) of a tile.
  struct Part {
    int64 tile;
    int slice, begin, end;
  };
  // Calls visit(part) for each part of a slice.
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
  // First slice that has a part of the tile. parts() returns the number of its parts, one per slice.
  __device__ __forceinline__ int first_slice(int64 tile) const {
    return slice_of(tile * of_tile);
  }
  __device__ __forceinline__ unsigned parts(int64 tile) const {
    return slice_of(tile * of_tile + of_tile - 1) - first_slice(tile) + 1;
  }
  // Index of a part's sums in the workspace. Parts of a tile are consecutive.
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

// Classes of one thread in a part of a slice, in batches of kAhead vectors: one batch is processed while the next one
// is in flight. kLast: logits are read for the last time, with a streaming hint, and the last batch comes first.
template <class Program, int kVecSize_, int kAhead_, bool kLast>
struct SliceClasses {
  static constexpr int kAhead = kAhead_;
  using Value = typename Program::Input;
  using P = Pack<Value, kVecSize_>;
  const Value* from;  // first class of the thread
  typename Program::Gradient* to;
  int64 stride, gradient_stride;  // from one class of the thread to its next
  int first, step, count;         // classes first, first + step, ...

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
  // Loads kCount vectors, starting with the thread's k-th one.
  template <int kCount>
  __device__ __forceinline__ void load(int k, P (&x)[kCount]) const {
    const Value* at = from + k * stride;
#pragma unroll
    for (int j = 0; j < kCount; ++j, at += stride) x[j] = kLast ? load_stream<kVecSize_>(at) : load_pack<kVecSize_>(at);
  }
  template <bool kEach>
  __device__ __forceinline__ void store(typename Program::Gradient* at,
                                        const Pack<typename Program::Gradient, kVecSize_>& gradients) const {
    static_assert(!kEach, "vectors are whole");
    store_pack<kVecSize_>(at, gradients);
  }
  // Index of the first class of the n-th batch. Precondition: the thread has n + 1 full batches.
  __device__ __forceinline__ int batch(int n) const {
    return (kLast ? count / kAhead - 1 - n : n) * kAhead;
  }
  // Issues the loads of the first batch, which for_each_vector expects.
  __device__ __forceinline__ void start(P (&x)[kAhead]) const {
    if (count >= kAhead) load(batch(0), x);
  }
  // Returns k if class c is the thread's k-th class, otherwise -1, also for a negative c (a row without a label).
  // Precondition: kStep equals `step`.
  template <int kStep>
  __device__ __forceinline__ int index_of(int c) const {
    const int distance = c - first, k = distance / kStep;
    return c >= 0 && distance >= 0 && k < count && k * kStep == distance ? k : -1;
  }
};

// Visitors of for_each_vector. They are structs because NVRTC 11.8 takes generic lambdas for host functions.
//
// Adds kCount classes of a thread, starting with its k-th one, whose logits are x. Rescales each sum at most once.
// kMasks: replaces the logit of the label by -inf, instead of comparing each class with the label. own_label[i] is the
// index of the label's class among the thread's classes, or -1.
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

// Writes the gradients of kCount classes of a thread, starting with its k-th one, whose logits are x. kMasked and
// kSelects: as in store_class.
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
      store_class<false, kMasked, kSelects, false>(program, own, k + j, own.to + (k + j) * own.gradient_stride, labels,
                                                   x[j], coeffs, all_zero);
    }
  }
};

// Calls visit(k, vectors) for all classes of a thread: in batches of kAhead, then one by one. The next batch is in
// flight while one is visited. Precondition: Classes::start() has loaded `first`.
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

// Reads a value that another block has stored. Bypasses the L1 cache, which may hold a stale line.
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

// Address of the coefficients of all rows, indexed by row number. They follow the grad_output record of each tile and
// the divisor that forward may have recorded. engines/softmax/layout.py: slice_records
template <class Compute>
__device__ __forceinline__ GradCoeffs<Compute>* coeffs_behind(double* records, int64 tiles) {
  return reinterpret_cast<GradCoeffs<Compute>*>(records + (tiles + 2) / 2 * 2);
}

// Sources of coefficients: scaled(program, row, place) returns the coefficients of a row times the factor of its
// gradient. RecordedCoeffs reads what a block of this launch has recorded: the coefficients, and the grad_output of the
// tile.
template <class Compute>
struct RecordedCoeffs {
  const GradCoeffs<Compute>* coeffs;
  const double* grad_output;
  double weight;

  template <class Program>
  __device__ __forceinline__ GradCoeffs<Compute> scaled(const Program& program, int64 row, int64) const {
    GradCoeffs<Compute> row_coeffs = load_shared_by_blocks(coeffs + row);
    scale_grad_coeffs(program, row_coeffs, static_cast<Compute>(load_shared_by_blocks(grad_output) * weight));
    return row_coeffs;
  }
};
// Reads coefficients that an earlier launch has recorded. One factor serves all rows.
template <class Compute>
struct KnownCoeffs {
  const GradCoeffs<Compute>* coeffs;
  Compute factor;

  template <class Program>
  __device__ __forceinline__ GradCoeffs<Compute> scaled(const Program& program, int64 row, int64) const {
    GradCoeffs<Compute> row_coeffs = coeffs[row];
    scale_grad_coeffs(program, row_coeffs, factor);
    return row_coeffs;
  }
};
// Reads coefficients from the residual, indexed by the row's position in the result.
template <class Result>
struct ResidualCoeffs {
  const Result* grad_output;
  int64 result_stride;
  double scale;

  template <class Program, class Compute = typename Program::Compute>
  __device__ __forceinline__ GradCoeffs<Compute> scaled(const Program& program, int64, int64 place) const {
    GradCoeffs<Compute> row_coeffs = program.grad_coeffs[place];
    scale_grad_coeffs(program, row_coeffs,
                      static_cast<Compute>(widen<double>(grad_output[place * result_stride]) * scale));
    return row_coeffs;
  }
};

// State of a tile's evaluation. wait() blocks until the tile has been evaluated, unless `counter` is null.
// Precondition: all threads of the block call it together.
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

// Reader with the interface of TwoPassReader. Where the entry points of rows.cuh do not serve, those at the end of this
// file do.
template <int kVecSize, int kLanes, int kWarps, int kAhead>
struct ColumnSliceReader {
  static constexpr int kThreads = kWarps * kWarp, kRows = kLanes * kVecSize;
  // True if threads have so few vectors that the first fetch of instructions takes longer than running them.
  static constexpr bool kRunsOnce = kAhead < 16;
  // kSlots: threads of a block that own the same rows. kTeams: teams of kRows threads in a block; each combines some of
  // the parts of a tile.
  static constexpr int kSlots = kThreads / kLanes, kTeams = kThreads / kRows;
  // kSpan: threads of the fewest whole warps that own all rows of a tile. kSpans: such spans in a block.
  static constexpr int kSpan = kLanes > kWarp ? kLanes : kWarp, kSpans = kThreads / kSpan;
  static_assert(kRows <= kThreads, "each thread evaluates one row at most");
  // True if the label's class is left out by setting its logit to -inf, not by comparing each class with the label.
  template <class Program>
  static constexpr bool kMasks = !Program::kCapped && !Program::kSmoothed;

  static __device__ __forceinline__ int lane() {
    return threadIdx.x % kLanes;
  }
  // Row of the tile whose sums are the n-th. Below, the n-th row of a tile is row_of(n).
  static __device__ __forceinline__ int row_of(int n) {
    return n % kLanes * kVecSize + n / kLanes;
  }

  // The vector of rows of a tile that the calling thread owns.
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
    // Class of each row's label, or a negative number for an inactive row. Consumes the loaded labels; until then their
    // loads are in flight.
    __device__ __forceinline__ void active_classes(const Program& program, int (&labels)[kVecSize]) const {
      loads.active_classes(program, exists ? kVecSize : 0, labels);
    }
    // The thread's classes of a part.
    template <bool kLast>
    __device__ __forceinline__ SliceClasses<Program, kVecSize, kAhead, kLast> classes(
        const Program& program, const SlicePlan::Part& part) const {
      const int first_class = part.begin + static_cast<int>(threadIdx.x) / kLanes;
      return {program, offset, first_class, kSlots, exists ? part.end : 0};
    }
  };

  // Sums of a part: returns those of the tile's n-th row in thread n. Preconditions: all threads of the block call it
  // together, and pass a barrier before the next call.
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
      const Exchanged span_sums = combined_lanes<kLanes>(Exchanged(exchanged_sums(sums[i])));
      if (threadIdx.x % kSpan < kLanes) shared_sums<Exchanged>(threadIdx.x / kSpan, i * kLanes + lane()) = span_sums;
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

  // Evaluates the rows of a tile. Stores the partial sum of their values, and the coefficients of their gradients
  // unless `coeffs` is null. Preconditions: those of sums_of_part; thread n holds the sums of the n-th row.
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

  // Writes the gradients of a part. Waits for the tile's evaluation before it reads the coefficients. Precondition: all
  // threads of the block call it together.
  template <class Program, class Coeffs, class Compute = typename Program::Compute>
  static __device__ __forceinline__ void write(const Program& program, const SlicePlan::Part& part,
                                               const TileEvaluation& evaluation, const Coeffs& coeffs_of) {
    const Rows<Program> rows(program, part.tile);
    const auto own = rows.template classes<true>(program, part);
    Pack<typename Program::Input, kVecSize> first[kAhead];
    own.start(first);
    evaluation.wait();
    int labels[kVecSize];
    GradCoeffs<Compute> coeffs[kVecSize];
    bool all_zero[kVecSize], any_zero = false;
    if (rows.exists) {
      rows.active_classes(program, labels);
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        coeffs[i] =
            coeffs_of.scaled(program, rows.first + i, rows.offset[kResults] + i * program.space.at.stride[kResults][0]);
        all_zero[i] = coeffs[i].all_zero();
        any_zero |= all_zero[i];
      }
    }
    // A warp whose lanes took both branches would write each class twice, a part of its sectors each time.
    if constexpr (!kRunsOnce) any_zero = __any_sync(0xffffffffu, any_zero) != 0;
    if (!rows.exists) return;
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

  // Runs all tasks. Precondition: the workspace also fits the sums of all parts, after the partial sums.
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
    // If slices are tiles, each is written right after it has been summed.
    const bool alone = slices.slices == tiles;
    const int tasks = (kGradient && !alone ? 2 : 1) * slices.slices;
    if (threadIdx.x == 0) claimed = static_cast<int>(claim_next(work.claim_counter));
    __syncthreads();
    int n = claimed;
#pragma unroll 1
    while (n < tasks) {
      // Claims the next task while this one runs.
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
            // Loads label and target logit while the sums of other slices arrive.
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

  // Writes all gradients from coefficients that an earlier launch has stored.
  template <class Program, class Coeffs>
  static __device__ __forceinline__ void write_all(const Program& program, const ColumnSlices& group, int64 tiles,
                                                   const Coeffs& coeffs) {
    const SlicePlan slices = plan(group, tiles, program.space.classes);
#pragma unroll 1
    for (int slice = blockIdx.x; slice < slices.slices; slice += gridDim.x) {
      slices.for_each_part(slice, [&](const SlicePlan::Part& part) { write(program, part, {nullptr, 0}, coeffs); });
    }
  }

  // True if any tile was written with a grad_output other than the true one, as in worker_grad_scale_is_stale.
  // Precondition: all threads of the block call it together.
  static __device__ __forceinline__ bool is_stale(const ColumnSlices& group, int64 tiles, double true_grad_output,
                                                  const double* used_grad_output, double* expected_grad_output) {
    // If blocks do not share tiles, each block checks only its own.
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
  // Shared-memory slot for the sums of a tile's n-th row by span or team `who`. The array consists of words, because
  // Sums may have constructors.
  template <class Sums>
  static __device__ __forceinline__ Sums& shared_sums(int who, int n) {
    constexpr int kParts = kSpans > kTeams ? kSpans : kTeams;
    alignas(16) __shared__ unsigned words[kParts * kRows * sizeof(Sums) / 4];
    return reinterpret_cast<Sums*>(words)[who * kRows + n];
  }
  // Combines the sums of every kEach-th lane of a warp; each of these lanes gets the result. Both lanes of a pair put
  // the lower lane's sums first, so both compute the same bits.
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
  // Combines kCount slots of shared_sums in order. Thread n gets the sums of the n-th row.
  template <int kCount, class Sums>
  static __device__ __forceinline__ Sums combined() {
    Sums sums = Sums::empty();
    // Sums of several words are combined in a rolled loop: its code is short, and a block runs it once.
    constexpr int kAtOnce = sizeof(Sums) > 8 ? 1 : 4;
    if (threadIdx.x < kRows) {
#pragma unroll kAtOnce
      for (int who = 0; who < kCount; ++who) combine(sums, shared_sums<Sums>(who, threadIdx.x));
    }
    return sums;
  }
  // True in all threads of the block that completes the tile. Precondition: all threads of the block call it together.
  static __device__ __forceinline__ bool arrives_last(unsigned* counter, unsigned parts) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) last = add_and_synchronize(counter, 1) == parts - 1;
    __syncthreads();
    return last;
  }
  // Combines the sums of a tile's parts; thread n gets those of the n-th row. Each team of kRows threads combines every
  // kTeams-th part. Then the teams of each warp are combined by shuffles, and warps (or teams of several warps) in
  // order.
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

// Stores a value per row and the coefficients of its gradient. `memory` is a workspace as for a reduced value.
template <class Reader, class Program>
__device__ __forceinline__ void sliced_row_values(const Program& program, const ColumnSlices& group, int64 tiles,
                                                  double* memory) {
  KnownScale<typename Program::Compute> unused{0};
  const Workspace work = workspace(memory);
  Reader::template sweep<false>(program, group, unused, tiles, work);
  if (arrive_last(work.ticket) && threadIdx.x == 0) *work.claim_counter = 0;
}

// Writes the gradients for the true grad_output, unless they are in place already. The kernel of the value has left the
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
// Version for gradients that assumed a divisor. The true divisor is recorded after the used grad_outputs.
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

// Version of apply_grad_coeffs for slices. Gradients may overwrite the logits.
template <class Reader, class Program, class Result>
__device__ __forceinline__ void apply_grad_coeffs_in_slices(const Program& program, const ColumnSlices& group,
                                                            int64 tiles, int64 result_stride, double scale,
                                                            const Result* grad_output) {
  Reader::write_all(program, group, tiles, ResidualCoeffs<Result>{grad_output, result_stride, scale});
}
