// Strided classes with neighbouring rows between them, in 16 bits, where no vector divides the number of rows: images
// (N, C, H, W) with an odd number of pixels. Value and gradient of softmax.cuh.
//
//   x[n, c, h, w]: a row is (n, :, h, w); a tile is 32 kVecSize neighbouring rows, stored as 4-byte words of two rows
//   lower class    the tile begins in the lower half of a word: word 32 q + l has the rows 64 q + 2 l + (0, 1)
//   upper class    it begins in the upper half: word 32 q + l has the rows 64 q + 2 l + (-1, 0); one more word has the
//                  last row, which takes the place of row -1
//
// If the class stride is odd, every second class is an upper one (kAlternates); otherwise all are, or none.
//
// 1. The warp copies all words of a tile to shared memory: lane l copies every 32nd word, starting at word l.
// 2. Lane l reads the words 32 q + l of all classes, which hold other rows in upper classes than in lower ones. It
//    finds the maxima of both. Lanes exchange those of upper classes by shuffles, so that each lane has the maxima of
//    its rows in lower classes. They exchange sums of exponentials in the same way.
// 3. The lane evaluates these rows. It passes the coefficients of their gradients to the lane that has the rows in
//    upper classes.
// 4. The lane writes the gradients of its words. Without kAlike the gradients of a class begin in the other half of a
//    word than its logits, so each word of gradients combines two words of logits. Without kInWords they begin in the
//    same half in some classes or tiles and in the other half in others. In that case all gradients are written one by
//    one; with kInWords only those of partial tiles are.
//
// The lanes of a warp copy words for each other, so the copies need a __syncwarp() before and after. A word may contain
// an element of another tile, or of no tile.
//
// Traffic: each logit is read once, each gradient is written once. Preconditions: rows of the inner dimension are
// adjacent in logits and gradients; no stride of the logits is negative, and their class stride is positive; all lanes
// of a warp execute each step together.
#pragma once
#include "softmax/thread_per_row.cuh"

// Passes a number of each row in lower classes to the lane that has the row in upper classes. Precondition: all lanes
// of the warp call it together.
template <class T, int kVecSize>
__device__ __forceinline__ void to_upper(const T (&lower)[kVecSize], T (&upper)[kVecSize]) {
  constexpr int kPairs = kVecSize / 2;
  const int lane = threadIdx.x % kWarp;
  T previous[kPairs];
#pragma unroll
  for (int q = 0; q < kPairs; ++q) {
    previous[q] = __shfl_sync(0xffffffffu, lower[2 * q + 1], (lane + kWarp - 1) % kWarp);
  }
#pragma unroll
  for (int q = 0; q < kPairs; ++q) {
    upper[2 * q] = lane == 0 ? previous[(q + kPairs - 1) % kPairs] : previous[q];
    upper[2 * q + 1] = lower[2 * q];
  }
}
// Passes numbers back: from the lane that has a row in upper classes to the one that has it in lower classes.
// Precondition: that of to_upper.
template <class T, int kVecSize>
__device__ __forceinline__ void to_lower(const T (&upper)[kVecSize], T (&lower)[kVecSize]) {
  constexpr int kPairs = kVecSize / 2;
  const int lane = threadIdx.x % kWarp;
  T next[kPairs];
#pragma unroll
  for (int q = 0; q < kPairs; ++q) next[q] = __shfl_sync(0xffffffffu, upper[2 * q], (lane + 1) % kWarp);
#pragma unroll
  for (int q = 0; q < kPairs; ++q) {
    lower[2 * q] = upper[2 * q + 1];
    lower[2 * q + 1] = lane == kWarp - 1 ? next[(q + 1) % kPairs] : next[q];
  }
}

// Passes the member `number` of each row's struct in the same way. Precondition: that of to_upper.
template <class Row, class T, int kVecSize>
__device__ __forceinline__ void to_upper(const Row (&lower)[kVecSize], Row (&upper)[kVecSize], T Row::* number) {
  T own[kVecSize], moved[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) own[i] = lower[i].*number;
  to_upper(own, moved);
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) upper[i].*number = moved[i];
}

// Passes the member `number` of each row's struct back, and adds it to that of the receiving lane. Precondition: that
// of to_lower.
template <class Row, class T, int kVecSize>
__device__ __forceinline__ void add_to_lower(const Row (&upper)[kVecSize], Row (&lower)[kVecSize], T Row::* number) {
  T own[kVecSize], moved[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) own[i] = upper[i].*number;
  to_lower(own, moved);
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) lower[i].*number += moved[i];
}

// A tile in global memory, and its copy in shared memory.
template <class Storage_, int kVecSize_, int kClasses_, bool kAlternates_, bool kAlike_, bool kInWords_>
struct PairedTile {
  using Storage = Storage_;
  static_assert(sizeof(Storage) == 2 && kVecSize_ % 2 == 0, "pairs of 16 bits");
  static constexpr int kVecSize = kVecSize_, kClasses = kClasses_, kPairs = kVecSize / 2, kRows = kVecSize * kWarp;
  static constexpr int kWords = kRows / 2 + 1;  // of a class
  static constexpr bool kAlternates = kAlternates_, kAlike = kAlike_, kInWords = kInWords_;
  // Selectors for select_bytes: the upper half of x followed by the lower half of y; the lower half of x and the upper
  // half of y.
  static constexpr unsigned kUpperLower = 0x5432, kLowerUpper = 0x7610;
  const Storage* end;   // of the logits
  const Storage* from;  // the tile's first row, class 0
  Storage* gradients;   // of the tile's first row
  int64 stride, gradient_stride;
  int left;  // number of rows that exist
  unsigned* stage;

  // `offset`: that of the tile's first row.
  template <class Program>
  __device__ __forceinline__ PairedTile(const Program& program, const Storage* end, const int64 (&offset)[kRowStreams],
                                        int left)
      : end(end),
        from(program.input + offset[kLogits]),
        gradients(program.gradients + offset[kGradients]),
        stride(program.space.class_stride[kLogits]),
        gradient_stride(program.space.class_stride[kGradients]),
        left(left) {
    extern __shared__ uint4 staged[];
    stage = reinterpret_cast<unsigned*>(staged) + threadIdx.x / kWarp * (kClasses * kWords);
  }
  static __device__ __forceinline__ int lane() {
    return threadIdx.x % kWarp;
  }
  // Distance of the lane's i-th row in lower classes from its first one, which is row 2 lane() of the tile.
  static __device__ __forceinline__ constexpr int distance(int i) {
    return i / 2 * (2 * kWarp) + i % 2;
  }
  // Number of rows of this lane among the first `left` of a tile. They are its first ones.
  static __device__ __forceinline__ int count_of(int left) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) count += 2 * lane() + distance(i) < left ? 1 : 0;
    return count;
  }
  // Returns 1 if an element is the upper half of a word, otherwise 0.
  static __device__ __forceinline__ int half_of(const Storage* x) {
    return static_cast<int>(reinterpret_cast<unsigned long long>(x) / sizeof(Storage)) & 1;
  }
  __device__ __forceinline__ bool is_upper(int c) const {
    return half_of(from + c * stride) != 0;
  }
  __device__ __forceinline__ unsigned* word(int c, int i) const {
    return stage + c * kWords + i;
  }
  __device__ __forceinline__ Storage& at_row(int c, int row) const {
    return (reinterpret_cast<Storage*>(word(c, 0)) + is_upper(c))[row];
  }
  // Class c of the lane's i-th row in lower classes.
  __device__ __forceinline__ Storage& at(int c, int i) const {
    return at_row(c, 2 * lane() + distance(i));
  }
  // Copies the first `count` words of class c. Precondition: `from` is the beginning of a word.
  __device__ __forceinline__ void copy_words(int c, const Storage* from, int count) const {
#pragma unroll
    for (int i = lane(); i < kWords; i += kWarp) {
      if (i < count) cp_async_bytes<4>(word(c, i), reinterpret_cast<const unsigned*>(from) + i);
    }
  }
  // Copies the tile to shared memory.
  __device__ __forceinline__ void load() const {
    __syncwarp();  // all lanes have read the previous tile
    const Storage* of_class = from;
    if constexpr (kHasCpAsync) {
#pragma unroll 4
      for (int c = 0; c < kClasses - 1; ++c, of_class += stride) {
        const int before = half_of(of_class);
        copy_words(c, of_class - before, (left + before + 1) / 2);
      }
      // The last word may contain an element after the tile, but none after the end of the logits.
      const int before = half_of(of_class), whole = (left + before + (of_class + left < end ? 1 : 0)) / 2;
      copy_words(kClasses - 1, of_class - before, whole);
      if (2 * whole < left + before && lane() == 0) {
        at_row(kClasses - 1, left - 1) = load_pack<1>(of_class + left - 1).element[0];
      }
      cp_async_wait_all();
    } else {
      const int count = count_of(left);
#pragma unroll 1
      for (int c = 0; c < kClasses; ++c, of_class += stride) {
#pragma unroll
        for (int i = 0; i < kVecSize; ++i) {
          if (i < count) at(c, i) = load_pack<1>(of_class + 2 * lane() + distance(i)).element[0];
        }
      }
    }
    __syncwarp();
  }
};

// The upper classes of a tile (kUpper), or its lower ones, as a source for the passes of thread_per_row.cuh.
// kUpperRows: with the rows that a lane has in upper classes, instead of those in lower ones. kInWords: gradients are
// written in words. kStoresTogether_: number of classes whose gradients are computed side by side.
template <class Tile, bool kUpper, bool kUpperRows = kUpper, bool kInWords = true, int kStoresTogether_ = 4>
struct PairedClasses {
  using Value = typename Tile::Storage;
  using Index = int;
  static constexpr int kVecSize = Tile::kVecSize, kPairs = Tile::kPairs, kStep = Tile::kAlternates ? 2 : 1;
  static constexpr int kStoresTogether = kStoresTogether_;
  using P = Pack<Value, kVecSize>;
  const Tile& tile;
  int first, count;
  const unsigned* words;  // of this lane, in the first class

  __device__ __forceinline__ explicit PairedClasses(const Tile& tile) : tile(tile) {
    const bool alike = tile.is_upper(0) == kUpper;
    first = Tile::kAlternates && !alike ? 1 : 0;
    count = Tile::kAlternates || alike ? (Tile::kClasses - first + kStep - 1) / kStep : 0;
    words = tile.word(first, Tile::lane());
  }
  __device__ __forceinline__ int classes() const {
    return count;
  }
  __device__ __forceinline__ int class_of(int k) const {
    return first + kStep * k;
  }
  // Converts labels, given for the lane's rows in lower classes, to indices into these classes, or -1 if the label is
  // none of them. The results are for the rows selected by kUpperRows. Precondition: all lanes of the warp call it
  // together.
  __device__ __forceinline__ void index_labels(const int (&labels)[kVecSize], int (&indices)[kVecSize]) const {
    if constexpr (kUpperRows) {
      to_upper(labels, indices);
    } else {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) indices[i] = labels[i];
    }
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const bool is_here = Tile::kAlternates ? indices[i] % 2 == first : count > 0;
      indices[i] = indices[i] >= 0 && is_here ? indices[i] / kStep : -1;
    }
  }
  __device__ __forceinline__ P read(int k) const {
    const unsigned* const from = words + k * (kStep * Tile::kWords);
    // Row -1 of the first lane stands for the tile's last row.
    const bool wraps = kUpperRows && Tile::lane() == 0;
    P x;
#pragma unroll
    for (int q = 0; q < kPairs; ++q) {
      unsigned pair = from[q * kWarp];
      if constexpr (kUpper == kUpperRows) {
        if (q == 0 && wraps) pair = select_bytes(from[Tile::kWords - 1], pair, Tile::kLowerUpper);
      } else {
        const unsigned other = kUpper ? from[q * kWarp + 1] : from[q == 0 && wraps ? Tile::kWords - 2 : q * kWarp - 1];
        pair = kUpper ? select_bytes(pair, other, Tile::kUpperLower) : select_bytes(other, pair, Tile::kUpperLower);
      }
      reinterpret_cast<unsigned*>(&x)[q] = pair;
    }
    return x;
  }
  struct Cursor {
    Value* to;  // at the lane's first row in lower classes
  };
  __device__ __forceinline__ Cursor first_class() const {
    return {tile.gradients + first * tile.gradient_stride + 2 * Tile::lane()};
  }
  __device__ __forceinline__ void store(Cursor& cursor, int, const P& gradient) const {
#pragma unroll
    for (int q = 0; q < kPairs; ++q) {
      const int row = q * (2 * kWarp) - (kUpperRows ? 1 : 0);
      const bool wraps = kUpperRows && q == 0 && Tile::lane() == 0;
      if (kInWords && !wraps) {
        const unsigned pair = reinterpret_cast<const unsigned*>(&gradient)[q];
        store_pack<2>(cursor.to + row, reinterpret_cast<const Pack<Value, 2>&>(pair));
      } else {
        store_one(cursor.to, wraps ? Tile::kRows - 1 : row, gradient.element[2 * q]);
        store_one(cursor.to, row + 1, gradient.element[2 * q + 1]);
      }
    }
    // Opaque, because the compiler would keep multiples of the step in registers.
    cursor.to = opaque(cursor.to + kStep * tile.gradient_stride);
  }

 private:
  __device__ __forceinline__ void store_one(Value* to, int row, Value x) const {
    if (kInWords || row + 2 * Tile::lane() < tile.left) store_pack<1>(to + row, Pack<Value, 1>{{x}});
  }
};

// Adds the sums over upper classes to those over lower classes, except for the maxima, which they share. Precondition:
// that of to_lower.
template <class Compute, bool kSmoothed, int kVecSize>
__device__ __forceinline__ void add_upper_sums(const RowSums<Compute, kSmoothed> (&upper)[kVecSize],
                                               RowSums<Compute, kSmoothed> (&lower)[kVecSize]) {
  using Sums = RowSums<Compute, kSmoothed>;
  Compute own[kVecSize], moved[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) own[i] = upper[i].softmax.exp_sum;
  to_lower(own, moved);
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) lower[i].softmax.exp_sum += moved[i];
  if constexpr (kSmoothed) {
    add_to_lower(upper, lower, &Sums::weighted_gap);
    add_to_lower(upper, lower, &Sums::weight_sum);
  }
}

// Writes the gradients of a tile, given labels and coefficients of the lane's rows in lower classes. `read`: as in
// store_rows_of_thread. Precondition: all lanes of the warp call it together.
template <bool kInWords, class Tile, class Program, class Coeffs>
__device__ __forceinline__ void store_paired_rows(const Program& program, const Tile& tile,
                                                  const int (&labels)[Tile::kVecSize],
                                                  const Coeffs (&coeffs)[Tile::kVecSize], bool read) {
  constexpr bool kSmoothed = Program::kSmoothed, kAlike = Tile::kAlike;
  // With Tile::kInWords, only partial tiles write elements one by one, which is rare. Computed side by side, such
  // elements would take many registers, and so would capped logits.
  constexpr int kTogether = kInWords != Tile::kInWords || Program::kCapped ? 1 : 4;
  // Classes whose gradients are lower classes, and those whose gradients are upper classes.
  const PairedClasses<Tile, !kAlike, false, kInWords, kTogether> lower(tile);
  const PairedClasses<Tile, kAlike, true, kInWords, kTogether> upper(tile);
  int of_class[Tile::kVecSize];
  lower.index_labels(labels, of_class);
  store_rows_of_thread<false, false, kSmoothed>(program, lower, of_class, coeffs, read);
  Coeffs moved[Tile::kVecSize];
  to_upper(coeffs, moved, &Coeffs::exp_coeff);
  if constexpr (kSmoothed) to_upper(coeffs, moved, &Coeffs::weight_coeff);
  to_upper(coeffs, moved, &Coeffs::target);
  to_upper(coeffs, moved, &Coeffs::max_logit);
  upper.index_labels(labels, of_class);
  store_rows_of_thread<false, false, kSmoothed>(program, upper, of_class, moved, read);
}

// Evaluates the rows of a tile and writes their gradients. This lane has the rows `row` + Tile::distance(i), with
// labels `now`; the first `count` of them exist. Returns the sum of their values. Precondition: all lanes of the warp
// call it together.
template <bool kGradient, class Tile, class Program, class Scale>
__device__ __forceinline__ double visit_paired_rows(const Program& program, const Tile& tile, int64 row,
                                                    const LaneLabels<Tile::kVecSize, Program>& now, Scale& scale,
                                                    int count) {
  using Compute = typename Program::Compute;
  using Storage = typename Tile::Storage;
  constexpr int kVecSize = Tile::kVecSize;
  constexpr bool kMasksTarget = !Program::kSmoothed && !Program::kCapped;
  const PairedClasses<Tile, false> lower(tile);
  const PairedClasses<Tile, true> upper(tile);
  int labels[kVecSize];
  now.active_classes(program, count, labels);
  bool any = false;
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) any |= labels[i] >= 0;
  any = __any_sync(0xffffffffu, any) != 0;
  Compute z[kVecSize];
  RowSums<Compute, Program::kSmoothed> sums[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    z[i] = Compute(0);
    sums[i] = RowSums<Compute, Program::kSmoothed>::empty();
  }
  if (any) {
    tile.load();
    Compute largest[kVecSize], largest_of_upper[kVecSize], moved[kVecSize];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) largest[i] = largest_of_upper[i] = -scalar_infinity(Compute());
    max_per_row(lower, largest);
    max_per_row(upper, largest_of_upper);
    to_lower(largest_of_upper, moved);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      sums[i].softmax.max_logit = program.logit.value(max_ignoring_nan(largest[i], moved[i]));
      z[i] = program.logit.value(widen<Compute>(tile.at(labels[i] < 0 ? 0 : labels[i], i)));
    }
    if constexpr (kMasksTarget) {
      // A lane reads words in which a neighbour replaces one half.
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        if (labels[i] >= 0) tile.at(labels[i], i) = Narrow<Storage>::from(-scalar_infinity(0.0f));
      }
      __syncwarp();
    }
    RowSums<Compute, Program::kSmoothed> upper_sums[kVecSize];
    Compute max_logits[kVecSize], upper_z[kVecSize];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) max_logits[i] = sums[i].softmax.max_logit;
    to_upper(max_logits, moved);
    if constexpr (Program::kSmoothed) to_upper(z, upper_z);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      upper_sums[i] = {{moved[i], Compute(0)}, Compute(0), Compute(0)};
      sums[i] = {{max_logits[i], Compute(0)}, Compute(0), Compute(0)};
    }
    int of_class[kVecSize] = {};
    if constexpr (!kMasksTarget) lower.index_labels(labels, of_class);
    add_exponentials_per_row<kMasksTarget, false>(program, lower, of_class, z, sums);
    if constexpr (!kMasksTarget) upper.index_labels(labels, of_class);
    add_exponentials_per_row<kMasksTarget, false>(program, upper, of_class, upper_z, upper_sums);
    add_upper_sums(upper_sums, sums);
  }
  GradCoeffs<Compute> coeffs[kVecSize];
  unsigned zero_rows;
  const double total = evaluate_lane_rows<kGradient>(
      program, labels, z, sums, count,
      [&](int i, int64(&at)[kRowStreams]) {
        // Finds the offsets again: kept from before, they would take registers in all calls.
        program.space.offsets(row, at);
#pragma unroll
        for (int s = 0; s < kRowStreams; ++s) at[s] += Tile::distance(i) * program.space.at.stride[s][0];
      },
      scale, coeffs, zero_rows);
  if constexpr (kGradient) {
    if (any && __any_sync(0xffffffffu, zero_rows != 0) != 0) {
      // The logits of these rows may be infinite.
      __syncwarp();
#pragma unroll 1
      for (int c = 0; c < Tile::kClasses; ++c) {
#pragma unroll
        for (int i = 0; i < kVecSize; ++i) {
          if (zero_rows >> i & 1u) tile.at(c, i) = Narrow<Storage>::from(0.0f);
        }
      }
      __syncwarp();
    }
    if (Tile::kInWords && tile.left == Tile::kRows) {
      store_paired_rows<Tile::kInWords>(program, tile, labels, coeffs, any);
    } else {
      store_paired_rows<false>(program, tile, labels, coeffs, any);
    }
  }
  return total;
}

// Visits every row once, as TwoPassReader. Rows have kClasses classes. A tile does not cross the end of the inner
// dimension.
template <int kVecSize, int kClasses, bool kAlternates, bool kAlike, bool kInWords>
struct PairedRowsReader {
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    using Tile = PairedTile<typename Program::Input, kVecSize, kClasses, kAlternates, kAlike, kInWords>;
    constexpr int kRows = Tile::kRows;
    const int64 rows = program.space.rows;
    const InnerTiles<kRows> tiles(program.space);
    const int lane_row = 2 * Tile::lane();
    int64 last[kRowStreams];
    program.space.offsets(rows - 1, last);
    const auto* const end = program.input + last[kLogits] + (kClasses - 1) * program.space.class_stride[kLogits] + 1;
    for_each_chunk(group, scale, chunks, work, [&](int chunk) {
      double total = 0.0;
      // Finds the first row of a tile and the number of its rows that exist, which is 0 past the last tile.
      const auto find = [&](int64 tile, int64& row, int& left) {
        const auto found = tiles[tile];
        left = tile >= tiles.count ? 0 : found.after >= kRows ? kRows : static_cast<int>(found.after);
        row = left > 0 ? found.row : 0;
      };
      // Labels are loaded one step ahead. Offsets are computed twice: kept, they would take registers in all passes.
      LaneLabels<kVecSize, Program> ahead;
      const auto read_labels = [&](int64 tile) {
        int64 row, offset[kRowStreams];
        int left;
        find(tile, row, left);
        program.space.offsets(row, offset);
        ahead.template read_of<Tile>(program, offset, lane_row, Tile::count_of(left));
      };
      read_labels(chunk);
#pragma unroll 1
      for (int64 tile = chunk; tile < tiles.count; tile += chunks) {
        const LaneLabels<kVecSize, Program> now = ahead;
        read_labels(tile + chunks);
        int64 row, offset[kRowStreams];
        int left;
        find(tile, row, left);
        program.space.offsets(row, offset);
        total += visit_paired_rows<kGradient>(program, Tile(program, end, offset, left), row + lane_row, now, scale,
                                              Tile::count_of(left));
      }
      return total;
    });
  }
};
