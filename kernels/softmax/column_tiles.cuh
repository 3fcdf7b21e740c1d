// Value and gradient of softmax.cuh for strided classes, where neighbouring rows are contiguous: images (N, C, H, W) of
// many classes, transposed matrices. The warps of a block, or of a cluster of blocks, share the rows.
//
//   x[n, c, h, w]: a row is (n, :, h, w); a tile is 32 kVecSize neighbouring rows
//
// Lane l of every warp owns the kVecSize rows from row l kVecSize of the tile. Warp k of the `warps` that share the
// tile processes classes k, k + warps, ... The worker, a block or a cluster, owns chunks of tiles.
//
// Staggered tiles (kStaggered): if no vector divides the number of neighbouring rows, such as an odd number of pixels,
// each class begins somewhere within a vector of memory. `warps` is a multiple of kVecSize, so all classes of a warp
// begin at the same place. A tile is then 30 kVecSize rows, but a warp writes whole vectors: those that begin in the
// tile or contain its first row, without that of the next tile's first row. So the tile also evaluates the kVecSize - 1
// rows before its first one, whose values the tile before counts. Only at the ends of the inner dimension elements are
// read and written one by one.
//
// 1. Each thread issues asynchronous copies of all its classes to shared memory, then finds their maximum and sum of
//    exponentials.
// 2. Each warp stores its sums in shared memory. Warp i < kVecSize combines the sums of the lanes' i-th rows, in the
//    order of the warps. Blocks of a cluster then exchange their sums through DSMEM and combine them in the order of
//    the blocks.
// 3. The same warp evaluates these rows and stores the coefficients of their gradients in shared memory, so each block
//    pays only once for what a row costs besides its logits.
// 4. Each thread writes the gradients of its classes.
//
// Many warps share a tile, so shared memory holds few rows of many classes, and some warps compute while others wait
// for memory. A thread reads only those staged logits that it copied itself, so the copies need no barrier.
//
// Traffic: each logit is read once; each gradient is written once. Preconditions: kVecSize <= kWarps; rows of a vector
// are contiguous; classes < 2^31; a block has kWarps warps. kVecSize divides the number of rows, or tiles are
// staggered; then logits and gradients of a class begin at the same place of a vector.
#pragma once
#include "softmax/lane_rows.cuh"

// Rows that the warps of a block or a cluster share.
struct ColumnTile {
  int64 row;            // the first one
  int rows;             // number of rows
  int64 before, after;  // as in InnerTiles, of a staggered tile
};

// All tiles, in the order of the rows. Only staggered ones end with the inner dimension.
template <int kVecSize, bool kStaggered>
struct ColumnTiles {
  static constexpr int kRows = kWarp * kVecSize;
  int64 rows, count;

  template <class Space>
  __device__ __forceinline__ explicit ColumnTiles(const Space& space)
      : rows(space.rows), count((rows + kRows - 1) / kRows) {
  }
  __device__ __forceinline__ ColumnTile operator[](int64 tile) const {
    const int64 row = tile * kRows, left = rows - row;
    return {row, left < kRows ? static_cast<int>(left) : kRows, 0, 0};
  }
};
template <int kVecSize>
struct ColumnTiles<kVecSize, true> {
  static constexpr int kRows = (kWarp - 2) * kVecSize;
  InnerTiles<kRows> tiles;
  int64 count;

  template <class Space>
  __device__ __forceinline__ explicit ColumnTiles(const Space& space) : tiles(space), count(tiles.count) {
  }
  __device__ __forceinline__ ColumnTile operator[](int64 tile) const {
    const auto found = tiles[tile];
    return {found.row, found.after < kRows ? static_cast<int>(found.after) : kRows, found.before, found.after};
  }
};

// The rows of a tile that a lane processes: a vector, of which elements [begin, end) are rows that the tile evaluates.
template <int kVecSize_, bool kStaggered_>
struct OwnRows {
  static constexpr int kVecSize = kVecSize_;
  static constexpr bool kStaggered = kStaggered_;
  int first;  // row of the tile of element 0; may be negative
  int begin, end;
  bool in_memory;             // all elements are neighbouring rows in memory
  bool written;               // the tile writes the gradients of these rows
  int64 offset[kRowStreams];  // of element 0, whose row may not exist

  // `first_class`: a class of the warp.
  template <class Program>
  __device__ __forceinline__ OwnRows(const Program& program, const ColumnTile& tile, int first_class) {
    first = threadIdx.x % kWarp * kVecSize;
    if constexpr (kStaggered) {
      using Input = typename Program::Input;
      program.space.offsets(tile.row, offset);
      const Input* const at = program.input + offset[kLogits] + first_class * program.space.class_stride[kLogits];
      // Elements between a vector boundary and the tile's first row.
      const int skew = static_cast<int>(reinterpret_cast<unsigned long long>(at) / sizeof(Input) % kVecSize);
      first -= kVecSize - 1 + (skew + 1) % kVecSize;
      const int least = tile.before > 0 ? 1 - kVecSize : 0;
      begin = first < least ? least - first : 0;
      end = tile.rows - first < kVecSize ? tile.rows - first : kVecSize;
      in_memory = tile.before + first >= 0 && first + kVecSize <= tile.after;
      const int beyond = tile.after <= tile.rows ? tile.rows : tile.rows - skew;
      written = first >= -skew && first < beyond;
#pragma unroll
      for (int s = 0; s < kRowStreams; ++s) offset[s] += first * program.space.at.stride[s][0];
    } else {
      begin = 0;
      end = first < tile.rows ? kVecSize : 0;
      in_memory = true;
      written = end > 0;
      program.space.offsets(written ? tile.row + first : 0, offset);
    }
  }
  __device__ __forceinline__ bool has(int i) const {
    return (!kStaggered || i >= begin) && i < end;
  }
  // Position of element i among 32 kVecSize slots. For each i, those of the tile's rows l kVecSize + i are contiguous;
  // rows before the tile take the last slots.
  __device__ __forceinline__ int slot(int i) const {
    const unsigned row = static_cast<unsigned>(first + i) % (kWarp * kVecSize);
    return static_cast<int>(row % kVecSize * kWarp + row / kVecSize);
  }
  // Loads elements [begin, end) one by one; others are 0.
  template <class T>
  __device__ __forceinline__ Pack<T, kVecSize> load_each(const T* at) const {
    Pack<T, kVecSize> x = {};
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      if (has(i)) x.element[i] = at[i];
    }
    return x;
  }
  // Stores the vector; with kEach, only elements [begin, end). Preconditions: `written`; `in_memory` unless kEach.
  template <bool kEach, class T>
  __device__ __forceinline__ void store(T* to, const Pack<T, kVecSize>& x) const {
    if constexpr (kEach) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        if (has(i)) to[i] = x.element[i];
      }
    } else {
      store_pack<kVecSize>(to, x);
    }
  }
};

// Classes of one thread: vectors of kVecSize rows, their slots in shared memory, and their gradients.
template <class Storage, class Rows>
struct TileClasses {
  static constexpr int kVecSize = Rows::kVecSize;
  using Value = Storage;
  using P = Pack<Storage, kVecSize>;
  Rows rows;
  const Storage* from;  // first class of the thread
  Storage* to;
  int64 stride, gradient_stride;  // from one class of the thread to its next
  int first, step, count;         // classes first, first + step, ...

  template <class Group, class Program>
  __device__ __forceinline__ TileClasses(const Group& group, const Program& program, const Rows& rows) : rows(rows) {
    const int classes = static_cast<int>(program.space.classes);
    first = group.thread_rank() / kWarp;
    step = group.num_threads() / kWarp;
    count = classes > first ? (classes - first + step - 1) / step : 0;
    stride = step * program.space.class_stride[kLogits];
    gradient_stride = step * program.space.class_stride[kGradients];
    from = program.input + rows.offset[kLogits] + first * program.space.class_stride[kLogits];
    to = program.gradients;
    // Offsets of rows before the tile may be negative; without gradients the pointer is null.
    if (!Rows::kStaggered || to != nullptr) {
      to += rows.offset[kGradients] + first * program.space.class_stride[kGradients];
    }
  }
  __device__ __forceinline__ int class_of(int k) const {
    return first + k * step;
  }
  __device__ __forceinline__ P* place(int k) const {
    extern __shared__ uint4 staged[];
    return reinterpret_cast<P*>(staged) + k * static_cast<int>(blockDim.x) + threadIdx.x;
  }
  // Issues the copies of all vectors.
  __device__ __forceinline__ void copy_in() const {
    const Storage* at = from;
    if (Rows::kStaggered && !rows.in_memory) {
#pragma unroll 4
      for (int k = 0; k < count; ++k, at += stride) *place(k) = rows.load_each(at);
      return;
    }
#pragma unroll 4
    for (int k = 0; k < count; ++k, at += stride) cp_async(place(k), reinterpret_cast<const P*>(at));
  }
  __device__ __forceinline__ P read(int k) const {
    return load_words(place(k));
  }
  template <bool kEach>
  __device__ __forceinline__ void store(Storage* at, const P& gradients) const {
    rows.template store<kEach>(at, gradients);
  }
  // Calls f(k) if class c is the thread's k-th class. No thread owns a negative c. Precondition: kStep equals `step`.
  template <int kStep, class F>
  __device__ __forceinline__ void if_own(int c, const F& f) const {
    const int k = c / kStep;
    if (c >= 0 && c - k * kStep == first) f(k);
  }
};

// Part of a row's sums that threads exchange: without smoothing, only the softmax.
template <class Compute>
__device__ __forceinline__ const RowSums<Compute, true>& exchanged_sums(const RowSums<Compute, true>& sums) {
  return sums;
}
template <class Compute>
__device__ __forceinline__ const OnlineSoftmax<Compute, ExcludeTarget>& exchanged_sums(
    const RowSums<Compute, false>& sums) {
  return sums.softmax;
}
template <bool kSmoothed, class Compute>
struct ChooseExchangedSums {
  using type = RowSums<Compute, true>;
};
template <class Compute>
struct ChooseExchangedSums<false, Compute> {
  using type = OnlineSoftmax<Compute, ExcludeTarget>;
};
template <bool kSmoothed, class Compute>
using ExchangedSums = typename ChooseExchangedSums<kSmoothed, Compute>::type;

// Exchange between the warps that share a tile: sums per warp and per block, and coefficients per row, in the slots of
// OwnRows. Lane l of the i-th warp evaluates the row whose slot is 32 i + l. The arrays consist of words, because the
// types may have constructors.
template <class Program, int kVecSize, int kWarps, int kClusterSize>
struct TileExchange {
  using Compute = typename Program::Compute;
  using Sums = RowSums<Compute, Program::kSmoothed>;
  using Part = ExchangedSums<Program::kSmoothed, Compute>;
  using Coeffs = GradCoeffs<Compute>;
  static constexpr int kRows = kVecSize * kWarp;
  static constexpr int kPartWords = sizeof(Part) / 4, kCoeffWords = sizeof(Coeffs) / 4;

  static __device__ __forceinline__ Part* of_warps() {
    alignas(16) __shared__ unsigned words[kWarps * kRows * kPartWords];
    return reinterpret_cast<Part*>(words);
  }
  static __device__ __forceinline__ Part* of_blocks(int buffer) {
    alignas(16) __shared__ unsigned words[2 * kClusterSize * kRows * kPartWords];
    return reinterpret_cast<Part*>(words) + buffer * kClusterSize * kRows + threadIdx.x % kWarp;
  }
  static __device__ __forceinline__ Coeffs* coeffs() {
    alignas(16) __shared__ unsigned words[kRows * kCoeffWords];
    return reinterpret_cast<Coeffs*>(words);
  }
  template <class Rows>
  static __device__ __forceinline__ void put(const Rows& rows, const Sums (&own)[kVecSize]) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      of_warps()[threadIdx.x / kWarp * kRows + rows.slot(i)] = exchanged_sums(own[i]);
    }
  }
  // Combines the sums of kCount parts in order; the parts are `apart` slots from each other.
  template <int kCount>
  static __device__ __forceinline__ Sums combined(const Part* parts, int apart) {
    Sums whole = Sums::empty();
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      whole.softmax.max_logit = max_ignoring_nan(whole.softmax.max_logit, softmax_of(parts[k * apart]).max_logit);
    }
#pragma unroll 4
    for (int k = 0; k < kCount; ++k) {
      const Part part = parts[k * apart];
      OnlineSoftmax<Compute, ExcludeTarget> softmax = softmax_of(part);
      rescale(softmax, whole.softmax.max_logit);
      whole.softmax.exp_sum += softmax.exp_sum;
      if constexpr (Program::kSmoothed) {
        whole.weighted_gap += part.weighted_gap;
        whole.weight_sum += part.weight_sum;
      }
    }
    return whole;
  }
  // Sends the sums of row i of each lane to all blocks of the cluster. Precondition: all of them are running.
  static __device__ __forceinline__ void send(const Sums& sums, int i, int block, int buffer) {
    const Part part = exchanged_sums(sums);
    const unsigned* const words = reinterpret_cast<const unsigned*>(&part);
    unsigned* const slot = reinterpret_cast<unsigned*>(of_blocks(buffer) + (block * kVecSize + i) * kWarp);
#pragma unroll
    for (int to = 0; to < kClusterSize; ++to) {
#pragma unroll
      for (int word = 0; word < kPartWords; ++word) store_dsmem(slot + word, to, words[word]);
    }
  }

 private:
  static __device__ __forceinline__ const OnlineSoftmax<Compute, ExcludeTarget>& softmax_of(
      const OnlineSoftmax<Compute, ExcludeTarget>& part) {
    return part;
  }
  static __device__ __forceinline__ const OnlineSoftmax<Compute, ExcludeTarget>& softmax_of(
      const RowSums<Compute, true>& part) {
    return part.softmax;
  }
};

// Adds a class to the sums of a thread's rows; `power` receives the exponentials. kMasked: the logits of the labels
// have been replaced by -inf, so the class is not compared with the labels. Precondition: `max_logit` of the sums is at
// least the logit of the class.
template <bool kMasked, int kVecSize, class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ void add_class(const Program& program, int c, const int (&labels)[kVecSize],
                                          const Compute (&z)[kVecSize],
                                          const Pack<typename Program::Input, kVecSize>& x,
                                          RowSums<Compute, Program::kSmoothed> (&sums)[kVecSize],
                                          Pack<Compute, kVecSize>& power) {
  Compute raw[kVecSize];
  unpack(x, raw);
  const Compute w = Program::kSmoothed ? program.weight(c) : Compute(1);
  Compute shifts[kVecSize], of_class[kVecSize], slopes[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) shifts[i] = exp_shift(sums[i].softmax.max_logit);
  program.logit.exponential_value_slope(raw, shifts, power.element, of_class, slopes);
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    sums[i].softmax.exp_sum += !kMasked && c == labels[i] ? Compute(0) : power.element[i];
    if constexpr (Program::kSmoothed) {
      sums[i].weighted_gap += w == Compute(0) ? Compute(0) : w * (z[i] - of_class[i]);
      sums[i].weight_sum += w;
    }
  }
}

// Largest logit of each of a thread's rows, updated vector by vector. kPairs: 16-bit logits are compared in pairs.
template <class Storage, int kVecSize, class Compute, bool kPairs>
struct LargestOfRowsBy {
  Compute largest[kVecSize];

  __device__ __forceinline__ LargestOfRowsBy() {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) largest[i] = -scalar_infinity(Compute());
  }
  __device__ __forceinline__ void add(const Pack<Storage, kVecSize>& x) {
    Compute raw[kVecSize];
    unpack(x, raw);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) largest[i] = max_ignoring_nan(largest[i], raw[i]);
  }
  __device__ __forceinline__ Compute of_row(int i) const {
    return largest[i];
  }
};
template <class Storage, int kVecSize, class Compute>
struct LargestOfRowsBy<Storage, kVecSize, Compute, true> {
  PackedPairMax<Storage, 2> largest[kVecSize / 2];

  __device__ __forceinline__ void add(const Pack<Storage, kVecSize>& x) {
#pragma unroll
    for (int i = 0; i < kVecSize / 2; ++i) largest[i].add(reinterpret_cast<const Pack<Storage, 2>*>(&x)[i]);
  }
  __device__ __forceinline__ Compute of_row(int i) const {
    return largest[i / 2].half(i % 2);
  }
};
template <class Storage, int kVecSize, class Compute>
using LargestOfRows = LargestOfRowsBy<Storage, kVecSize, Compute,
                                      sizeof(Storage) == 2 && sizeof(Compute) == 4 && kVecSize % 2 == 0 && kHasPairMax>;

// Adds all classes of a thread to its sums. kKeeps: replaces the logits in shared memory by exponentials. kMasks: once
// the maxima are known, replaces the logits of the labels there by -inf. Precondition: the thread's copies are
// complete.
template <bool kKeeps, bool kMasks, int kStep, class Classes, int kVecSize, class Program,
          class Compute = typename Program::Compute>
__device__ __forceinline__ void sum_of_classes(const Program& program, const Classes& own,
                                               const int (&labels)[kVecSize], const Compute (&z)[kVecSize],
                                               RowSums<Compute, Program::kSmoothed> (&sums)[kVecSize]) {
  Pack<Compute, kVecSize> power;
  LargestOfRows<typename Program::Input, kVecSize, Compute> largest;
#pragma unroll 4
  for (int k = 0; k < own.count; ++k) largest.add(own.read(k));
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    sums[i].softmax.max_logit = program.logit.value(largest.of_row(i));
    if constexpr (kMasks) {
      own.template if_own<kStep>(labels[i], [&](int k) {
        own.place(k)->element[i] = Narrow<typename Program::Input>::from(-scalar_infinity(0.0f));
      });
    }
  }
#pragma unroll 4
  for (int k = 0; k < own.count; ++k) {
    add_class<kMasks>(program, own.class_of(k), labels, z, own.read(k), sums, power);
    if constexpr (kKeeps) *own.place(k) = power;
  }
}

// Writes the gradients of one class of a thread's rows to `to`. kKeeps: x holds exponentials. kMasked: the gradients of
// the labels are written elsewhere. kSelects: some rows may have gradients of 0 whatever their logits are (all_zero).
// kEach: gradients are stored one by one.
template <bool kKeeps, bool kMasked, bool kSelects, bool kEach, class Classes, int kVecSize, class Program,
          class Compute = typename Program::Compute>
__device__ __forceinline__ void store_class(const Program& program, const Classes& own, int k,
                                            typename Program::Gradient* to, const int (&labels)[kVecSize],
                                            const typename Classes::P& x, const GradCoeffs<Compute> (&coeffs)[kVecSize],
                                            const bool (&all_zero)[kVecSize]) {
  const int c = own.class_of(k);
  Compute raw[kVecSize], g[kVecSize];
  unpack(x, raw);
  const Compute w = Program::kSmoothed ? program.weight(c) : Compute(0);
  Compute powers[kVecSize], of_class[kVecSize], slopes[kVecSize], max_logits[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) max_logits[i] = coeffs[i].max_logit;
  if constexpr (!kKeeps) program.logit.exponential_value_slope(raw, max_logits, powers, of_class, slopes);
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    g[i] = coeffs[i].exp_coeff * (kKeeps ? raw[i] : powers[i]);
    if constexpr (Program::kSmoothed) g[i] -= coeffs[i].weight_coeff * w;
    if constexpr (!kMasked) g[i] = c == labels[i] ? coeffs[i].target : g[i];
    if constexpr (Program::kCapped) g[i] *= slopes[i];
    if constexpr (kSelects) g[i] = all_zero[i] ? Compute(0) : g[i];
  }
  own.template store<kEach>(to, NarrowPack<typename Program::Gradient, kVecSize>::from(g));
}

// Writes the gradients of all classes of a thread. Reads logits or exponentials from shared memory.
template <bool kKeeps, bool kMasked, bool kSelects, bool kEach, class Classes, int kVecSize, class Program,
          class Compute = typename Program::Compute>
__device__ __forceinline__ void store_staged_classes(const Program& program, const Classes& own,
                                                     const int (&labels)[kVecSize],
                                                     const GradCoeffs<Compute> (&coeffs)[kVecSize],
                                                     const bool (&all_zero)[kVecSize]) {
  auto* to = own.to;
#pragma unroll 4
  for (int k = 0; k < own.count; ++k, to += own.gradient_stride) {
    store_class<kKeeps, kMasked, kSelects, kEach>(program, own, k, to, labels, own.read(k), coeffs, all_zero);
  }
}

// Classes of the labels of a thread's rows, or an InactiveClass. `loads` are those of the rows' labels.
template <class Rows, class Program>
__device__ __forceinline__ void active_classes(const Program& program, const Rows& rows,
                                               const LaneLabels<Rows::kVecSize, Program>& loads,
                                               int (&labels)[Rows::kVecSize]) {
  loads.active_classes(program, rows.end, labels);
#pragma unroll
  for (int i = 0; Rows::kStaggered && i < Rows::kVecSize; ++i) labels[i] = i < rows.begin ? kNoLoss : labels[i];
}

// Evaluates a tile and writes its gradients. Returns the sum of the values of the rows that this thread evaluates.
// `visits` is the number of earlier calls. Preconditions: all threads of the group call it together, the first time
// after group.cluster_start().
template <bool kGradient, int kVecSize, int kWarps, bool kStaggered, class Group, class Program, class Scale>
__device__ __forceinline__ double visit_tile(const Program& program, const Group& group, const ColumnTile& tile,
                                             unsigned visits, Scale& scale) {
  using Compute = typename Program::Compute;
  using Input = typename Program::Input;
  using Sums = RowSums<Compute, Program::kSmoothed>;
  using Exchange = TileExchange<Program, kVecSize, kWarps, Group::kClusterSize>;
  using Rows = OwnRows<kVecSize, kStaggered>;
  using Classes = TileClasses<Input, Rows>;
  static_assert(kSameType<Input, typename Program::Gradient>, "gradients have the layout of logits");
  static_assert(kVecSize <= kWarps, "a warp evaluates one row of each lane");
  constexpr bool kKeeps = kGradient && !Program::kCapped && kSameType<Input, Compute>;
  constexpr bool kMasks = !Program::kCapped && !Program::kSmoothed;
  constexpr int kStep = kWarps * Group::kClusterSize;
  static_assert(!kStaggered || kStep % kVecSize == 0, "all classes of a warp begin at the same place of a vector");
  static_assert(!kStaggered || !Program::kInPlace, "a tile reads rows whose gradients another one writes");
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Rows rows(program, tile, group.thread_rank() / kWarp);
  const Classes own(group, program, rows);
  LaneLabels<kVecSize, Program> loads;
  loads.read(program, rows.offset, rows.end, 1, rows.begin);
  // In flight while labels and their logits arrive.
  own.copy_in();
  int labels[kVecSize];
  active_classes(program, rows, loads, labels);
  Compute z[kVecSize];
  Sums sums[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    z[i] = Compute(0);
    sums[i] = Sums::empty();
    // Must be loaded before any block of the cluster writes gradients, which may overwrite the logits.
    if ((Program::kSmoothed || (!kStaggered && i == warp)) && labels[i] >= 0) {
      const int64 at = rows.offset[kLogits] + i * program.space.at.stride[kLogits][0];
      z[i] = program.logit.value(widen<Compute>(program.input[at + labels[i] * program.space.class_stride[kLogits]]));
    }
  }
  // The row of the tile that this thread evaluates, its label and the label's logit. `counts`: its value is the tile's.
  int evaluated = lane * kVecSize + warp;
  const bool counts = warp < kVecSize && evaluated < tile.rows;
  bool evaluates = counts;
  if (kStaggered && evaluated > (kWarp - 1) * kVecSize) {
    evaluated -= kWarp * kVecSize;
    evaluates = warp < kVecSize && tile.before > 0;
  }
  typename Program::LabelLoad load = {};
  Compute target_logit = Compute(0);
  if constexpr (kStaggered) {
    if (evaluates) {
      int64 offset[kRowStreams];
      program.space.offsets(tile.row + evaluated, offset);
      load = program.load_label(offset);
      const int c = program.template active_class<int>(load);
      if (c >= 0) target_logit = program.logit.value(widen<Compute>(program.raw(offset, c)));
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      if (i != warp) continue;
      load = loads.label_load[i];
      target_logit = z[i];
    }
  }
  cp_async_wait_all();
  sum_of_classes<kKeeps, kMasks, kStep>(program, own, labels, z, sums);
  Exchange::put(rows, sums);
  __syncthreads();
  Sums whole = Sums::empty();
  if (warp < kVecSize)
    whole = Exchange::template combined<kWarps>(Exchange::of_warps() + warp * kWarp + lane, Exchange::kRows);
  if constexpr (Group::kClusterSize > 1) {
    const int buffer = visits & 1;
    if (visits == 0) cluster_wait();
    if (warp < kVecSize) Exchange::send(whole, warp, group.block_rank(), buffer);
    cluster_arrive();
    cluster_wait();
    if (warp < kVecSize) {
      whole =
          Exchange::template combined<Group::kClusterSize>(Exchange::of_blocks(buffer) + warp * kWarp, Exchange::kRows);
    }
  }
  double total = 0.0;
  if (warp < kVecSize) {
    RowTarget<Compute> t;
    if constexpr (kStaggered) {
      program.space.offsets(tile.row + evaluated, t.offset);
    } else {
#pragma unroll
      for (int s = 0; s < kRowStreams; ++s) t.offset[s] = rows.offset[s] + warp * program.space.at.stride[s][0];
    }
    program.validate_label(t, load);
    t.active &= evaluates;
    t.invalid_label &= evaluates;
    const RowResult<Compute> y = program.finish(t, target_logit, whole, counts && group.block_rank() == 0);
    if (counts) total = static_cast<double>(y.value);
    GradCoeffs<Compute> coeffs = y.grad_coeffs;
    if (kGradient && t.active) scale_grad_coeffs(program, coeffs, grad_factor(scale, t.offset));
    Exchange::coeffs()[warp * kWarp + lane] = coeffs;
  }
  // The next tile stores its sums after this barrier, and its coefficients after its own first barrier.
  __syncthreads();
  if constexpr (kGradient) {
    GradCoeffs<Compute> coeffs[kVecSize];
    bool all_zero[kVecSize], any_zero = false;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      coeffs[i] = Exchange::coeffs()[rows.slot(i)];
      all_zero[i] = coeffs[i].all_zero() && (!kStaggered || rows.has(i));
      any_zero |= all_zero[i];
      if constexpr (kKeeps) {
        // Exponentials are relative to the maximum of the thread's own classes.
        const Compute largest = sums[i].softmax.max_logit;
        const bool none = largest == -scalar_infinity(Compute());
        coeffs[i].exp_coeff *= none ? Compute(0) : scalar_exp(largest - exp_shift(coeffs[i].max_logit));
      }
    }
    // A warp whose lanes took both branches would write each class twice, a part of its sectors each time.
    any_zero = __any_sync(0xffffffffu, any_zero) != 0;
    const bool any_each = kStaggered && __any_sync(0xffffffffu, rows.written && !rows.in_memory) != 0;
    if (!rows.written) return total;
    if (any_each) {
      store_staged_classes<kKeeps, kMasks, true, kStaggered>(program, own, labels, coeffs, all_zero);
    } else if (any_zero) {
      store_staged_classes<kKeeps, kMasks, true, false>(program, own, labels, coeffs, all_zero);
    } else {
      store_staged_classes<kKeeps, kMasks, false, false>(program, own, labels, coeffs, all_zero);
    }
    if constexpr (kMasks) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        own.template if_own<kStep>(labels[i], [&](int k) {
          own.to[k * own.gradient_stride + i] = Narrow<typename Program::Gradient>::from(coeffs[i].target);
        });
      }
    }
  }
  return total;
}

// Reader with the interface of TwoPassReader. Each worker, a block or a cluster, processes every workers()-th chunk.
template <int kVecSize, int kWarps, bool kStaggered>
struct TileReader {
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    const ColumnTiles<kVecSize, kStaggered> tiles(program.space);
    unsigned visits = 0;
    SyncState sync{0, 0};
    if (group.worker() < chunks) group.cluster_start();
#pragma unroll 1
    for (int64 chunk = group.worker(); chunk < chunks; chunk += group.workers()) {
      double total = 0.0;
#pragma unroll 1
      for (int64 tile = chunk; tile < tiles.count; tile += chunks) {
        total += visit_tile<kGradient, kVecSize, kWarps, kStaggered>(program, group, tiles[tile], visits++, scale);
      }
      // Used between the exchanges of two tiles, whose barriers separate one use from the next.
      __shared__ double of_warp[kVecSize];
      total = warp_sum(total);
      if (threadIdx.x % kWarp == 0 && threadIdx.x / kWarp < kVecSize) of_warp[threadIdx.x / kWarp] = total;
      __syncthreads();
      if (threadIdx.x == 0) {
        total = 0.0;
#pragma unroll
        for (int i = 0; i < kVecSize; ++i) total += of_warp[i];
      }
      finish_chunk(group, scale, chunk, total, work.partials, sync);
    }
  }
};
