// Memory layouts: from the index of a vector to its offset in each stream (an operand, a gradient or a result).
//
//   index space = broadcast shape of the loss, dimensions reordered and merged as far as all streams allow
//   vector v    = elements [v * kVecSize, (v + 1) * kVecSize) along the innermost dimension
//
// engines/pointwise/layout.py merges the dimensions and chooses kVecSize. Six layouts cover all cases:
//
// clang-format off: the formatter would join the lines of this list.
//   FlatLayout      one dimension: dense tensors of any rank and dimension order, and operands that are single numbers.
//   LinearLayout    one dimension, any stride in each stream, element by element: every second element of a tensor.
//   StridedLayout   an innermost dimension of whole vectors and kRank outer dimensions (1, 2, or up to kMaxRank):
//                   broadcast operands, slices, and with kVecSize = 1 arbitrary strides.
//   StripLayout     the same dimensions in another order: a warp stays in a strip of columns and goes down the rows, so
//                   that it can accumulate derivatives of operands that are broadcast along rows or columns.
//   GatheredLayout  one dimension, in which some streams are dense and the others (of kRank dimensions) are gathered
//                   element by element: rows that no vector divides, short ones above all.
//   TiledLayout     two dimensions, each of unit stride in some streams, and kRank outer dimensions: a transposed
//                   operand. One of the two may be short.
// clang-format on
//
// A Cursor is the position of one lane; `advance` moves it to the lane's next vector, in most layouts kWarp vectors
// further. All indices have 64 bits: 2^31 float32 elements are 8 GiB, and one GPU holds many times that.
#pragma once
#include "core/types.cuh"

constexpr int kMaxRank = 24;  // engines/strides.py: MAX_RANK
constexpr int kWarp = 32;

// index / size by a multiplication, in a third of the instructions of a division whose divisor is unknown at compile
// time. `multiplier` is floor(2^(63 + bits) / size) + 1, where bits is the bit length of size - 1. Preconditions:
// size > 1, and index is not negative.
__device__ __forceinline__ int64 quotient(int64 index, int64 multiplier, int64 size) {
  const unsigned long long by = static_cast<unsigned long long>(multiplier);
  const int shift = 63 - __clzll(size - 1);
  return static_cast<int64>(__umul64hi(static_cast<unsigned long long>(index), by) >> shift);
}

// The dimensions of an index, innermost first, with their strides in each stream. `offsets` splits an index into
// coordinates. The outermost coordinate is the remaining quotient, so one dimension needs no division. kRank = 1 and
// kRank = 2 tell the compiler the number of dimensions: a loop over them, which reads strides at a computed index, took
// a fifth of the time of a cheap loss in double.
template <int kStreams, int kRank>
struct Dimensions {
  int64 rank;
  int64 size[kRank];
  int64 multiplier[kRank];  // for `quotient`
  int64 stride[kStreams][kRank];

  // Computes the offset in each stream. Coordinates have the type of the index. Precondition: its range includes all
  // sizes.
  template <class Index>
  __device__ __forceinline__ void offsets(Index index, int64 (&offset)[kStreams]) const {
    if constexpr (kRank == 1) {
#pragma unroll
      for (int s = 0; s < kStreams; ++s) offset[s] = static_cast<int64>(index) * stride[s][0];
    } else if constexpr (kRank == 2) {
      const Index outer_index = static_cast<Index>(quotient(index, multiplier[0], size[0]));
      const Index coordinate = index - outer_index * static_cast<Index>(size[0]);
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        offset[s] = static_cast<int64>(coordinate) * stride[s][0] + static_cast<int64>(outer_index) * stride[s][1];
      }
    } else {
#pragma unroll
      for (int s = 0; s < kStreams; ++s) offset[s] = 0;
#pragma unroll 1
      for (int d = 0; d < rank; ++d) {
        const bool outermost = d + 1 >= rank;
        const Index outer_index = outermost ? Index(0) : static_cast<Index>(quotient(index, multiplier[d], size[d]));
        const Index coordinate = index - outer_index * static_cast<Index>(size[d]);
#pragma unroll
        for (int s = 0; s < kStreams; ++s) offset[s] += static_cast<int64>(coordinate) * stride[s][d];
        index = outer_index;
      }
    }
  }
};

// One dimension, dense in every stream. With kWholeBatches the elements fill all batches, so kernels have no code for a
// partial batch. A kernel of a light loss compiles in a fifth less time without that code.
template <int kVecSize, bool kWholeBatches_ = false>
struct FlatLayout {
  static constexpr int kOuter = 0;  // no outer dimensions: one offset serves all streams
  static constexpr bool kTiled = false, kStrips = false, kRagged = false, kFronts = false,
                        kWholeBatches = kWholeBatches_;
  struct Cursor {
    int64 element;
  };
  int64 elements;

  __device__ __forceinline__ int64 vectors() const {
    return (elements + kVecSize - 1) / kVecSize;
  }
  // True if every vector from the cursor's, the first of a batch, up to and including `vector` has all its elements.
  __device__ __forceinline__ bool whole_batch(const Cursor&, int64 vector) const {
    return (vector + 1) * kVecSize <= elements;
  }
  __device__ __forceinline__ Cursor at(int64 vector) const {
    return {vector * kVecSize};
  }
  __device__ __forceinline__ void advance(Cursor& cursor) const {
    cursor.element += kWarp * kVecSize;
  }
  // Number of elements from the cursor on: kVecSize or more if its vector is whole, fewer in the partial last vector, 0
  // or less past the end.
  __device__ __forceinline__ int64 present(const Cursor& cursor) const {
    return elements - cursor.element;
  }
  template <int kStream, bool kSplat>
  __device__ __forceinline__ int64 offset(const Cursor& cursor) const {
    return kSplat ? 0 : cursor.element;
  }
};

// One dimension, with a stride in each stream; a vector is one element. A StridedLayout would spend two thirds of a
// cheap loss's instructions on rows, and registers on offsets that do not exist here.
template <int kStreams>
struct LinearLayout {
  static constexpr int kOuter = 1;  // each stream has its own offset
  static constexpr bool kTiled = false, kStrips = false, kRagged = false, kFronts = false, kWholeBatches = false;
  struct Cursor {
    int64 element;
    int64 base[kStreams];
  };
  int64 elements;
  int64 stride[kStreams];

  __device__ __forceinline__ int64 vectors() const {
    return elements;
  }
  __device__ __forceinline__ bool whole_batch(const Cursor&, int64 vector) const {
    return vector < elements;
  }
  __device__ __forceinline__ Cursor at(int64 vector) const {
    Cursor cursor;
    cursor.element = vector;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) cursor.base[s] = vector * stride[s];
    return cursor;
  }
  __device__ __forceinline__ void advance(Cursor& cursor) const {
    cursor.element += kWarp;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) cursor.base[s] += kWarp * stride[s];
  }
  __device__ __forceinline__ int64 present(const Cursor& cursor) const {
    return cursor.element < elements;
  }
  template <int kStream, bool kSplat>
  __device__ __forceinline__ int64 offset(const Cursor& cursor) const {
    return cursor.base[kStream];
  }
};

template <int kVecSize, int kStreams, int kRank>
struct StridedLayout {
  static constexpr int kOuter = kRank;
  static constexpr bool kTiled = false, kStrips = false, kRagged = false, kFronts = true, kWholeBatches = false;
  struct Cursor {
    int64 row;
    int64 column;  // in vectors
    int64 base[kStreams];
  };
  int64 rows;
  int64 vectors_per_row;  // kVecSize divides the length of a row
  int64 row_step;         // advancing by kWarp vectors adds this many rows ...
  int64 column_step;      // ... and this many vectors within the row
  int64 fronts;           // stretches of the index space: see BatchOrder
  int64 inner_stride[kStreams];
  Dimensions<kStreams, kRank> outer;

  __device__ __forceinline__ int64 vectors() const {
    return rows * vectors_per_row;
  }
  __device__ __forceinline__ bool whole_batch(const Cursor&, int64 vector) const {
    return vector < vectors();
  }
  __device__ __forceinline__ Cursor at(int64 vector) const {
    Cursor cursor;
    cursor.row = vector / vectors_per_row;
    cursor.column = vector - cursor.row * vectors_per_row;
    outer.offsets(cursor.row, cursor.base);
    return cursor;
  }
  __device__ __forceinline__ void advance(Cursor& cursor) const {
    const int64 row = cursor.row;
    cursor.row += row_step;
    cursor.column += column_step;
    if (cursor.column >= vectors_per_row) {
      cursor.column -= vectors_per_row;
      ++cursor.row;
    }
    if (cursor.row != row) outer.offsets(cursor.row, cursor.base);
  }
  __device__ __forceinline__ int64 present(const Cursor& cursor) const {
    return cursor.row < rows ? kVecSize : 0;
  }
  template <int kStream, bool kSplat>
  __device__ __forceinline__ int64 offset(const Cursor& cursor) const {
    if (kSplat) return cursor.base[kStream];
    // kVecSize > 1 implies unit stride, which saves the multiplication.
    const int64 element = cursor.column * kVecSize;
    return cursor.base[kStream] + (kVecSize > 1 ? element : element * inner_stride[kStream]);
  }
};

// Streams that are dense in the order of the index space, as in a FlatLayout, beside streams of any strides, whose
// vectors are gathered from kVecSize addresses.
//
// Offsets of the latter are updated step by step: from one element to the next by a stride, plus the `wrap` of each
// dimension that ends there; from one vector of a lane to its next by `step_offset`, plus the same wraps. Only the
// first vector of a batch takes divisions, which were half of a cheap loss's instructions. With kLongRows a row (the
// innermost dimension) is at least one vector long, so at most one row ends within a vector; the elements past its end
// are a `jump` away.
//
// Element by element, as rows of a StridedLayout, 6.7M elements in rows of 3 took four times as long as dense ones.
template <int kVecSize, int kStreams, int kRank, bool kLongRows_ = false>
struct GatheredLayout {
  static constexpr int kOuter = 1;
  static constexpr bool kTiled = false, kStrips = false, kRagged = false, kFronts = true, kWholeBatches = false;
  static constexpr int kCounted = kRank > 1 ? kRank - 1 : 1;
  static constexpr bool kLongRows = kLongRows_ && kRank > 1;
  struct Cursor {
    int64 element;
    int64 base[kStreams];  // of gathered streams
    int left[kCounted];    // elements left in each dimension but the outermost; fits an int
  };
  int64 elements;
  int64 fronts;  // stretches of the index space: see BatchOrder
  int64 size[kRank];
  int64 step[kRank];            // advancing by kWarp vectors adds this to each coordinate ...
  int64 step_offset[kStreams];  // ... and this to each offset
  int64 multiplier[kCounted];   // for `quotient`
  int64 stride[kStreams][kRank];
  int64 wrap[kStreams][kRank];  // stride[d + 1] - size[d] * stride[d]

  __device__ __forceinline__ int64 vectors() const {
    return (elements + kVecSize - 1) / kVecSize;
  }
  __device__ __forceinline__ bool whole_batch(const Cursor&, int64 vector) const {
    return vector * kVecSize + kVecSize <= elements;
  }
  __device__ __forceinline__ Cursor at(int64 vector) const {
    return at_element(vector * kVecSize);
  }
  __device__ __forceinline__ void advance(Cursor& cursor) const {
    cursor.element += kWarp * kVecSize;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) cursor.base[s] += step_offset[s];
    int borrow = 0;
#pragma unroll
    for (int d = 0; d + 1 < kRank; ++d) {
      cursor.left[d] -= static_cast<int>(step[d]) + borrow;
      const bool ends = cursor.left[d] <= 0;
      borrow = ends;
      cursor.left[d] += ends ? static_cast<int>(size[d]) : 0;
#pragma unroll
      for (int s = 0; s < kStreams; ++s) cursor.base[s] += ends ? wrap[s][d] : 0;
    }
  }
  __device__ __forceinline__ int64 present(const Cursor& cursor) const {
    return elements - cursor.element;
  }
  template <int kStream, bool kSplat>
  __device__ __forceinline__ int64 offset(const Cursor& cursor) const {
    return kSplat ? 0 : cursor.element;
  }

  __device__ __forceinline__ Cursor at_element(int64 element) const {
    Cursor cursor;
    cursor.element = element;
    int64 index = element;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) cursor.base[s] = 0;
#pragma unroll
    for (int d = 0; d + 1 < kRank; ++d) {
      const int64 outer_index = quotient(index, multiplier[d], size[d]);
      const int coordinate = static_cast<int>(index) - static_cast<int>(outer_index) * static_cast<int>(size[d]);
      cursor.left[d] = static_cast<int>(size[d]) - coordinate;
#pragma unroll
      for (int s = 0; s < kStreams; ++s) cursor.base[s] += coordinate * stride[s][d];
      index = outer_index;
    }
#pragma unroll
    for (int s = 0; s < kStreams; ++s) cursor.base[s] += index * stride[s][kRank - 1];
    return cursor;
  }
  // The step from the last element of the row to the first element of the next row, minus the stride. Precondition:
  // kLongRows.
  template <int kStream>
  __device__ __forceinline__ int64 jump(const Cursor& cursor) const {
    int64 distance = wrap[kStream][0];
    bool ends = true;
#pragma unroll
    for (int d = 1; d + 1 < kRank; ++d) {
      ends = ends && cursor.left[d] == 1;
      distance += ends ? wrap[kStream][d] : 0;
    }
    return distance;
  }
  // Calls visit(i, offset) for each of kCount elements, starting at the cursor.
  template <int kStream, int kCount, class Visit>
  __device__ __forceinline__ void each(const Cursor& cursor, const Visit& visit) const {
    int64 offset = cursor.base[kStream];
    if constexpr (kLongRows) {
      const int64 more = jump<kStream>(cursor);
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        visit(i, offset);
        offset += stride[kStream][0];
        if (i + 1 == cursor.left[0]) offset += more;
      }
    } else {
      int left[kCounted];
#pragma unroll
      for (int d = 0; d + 1 < kRank; ++d) left[d] = cursor.left[d];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        visit(i, offset);
        offset += stride[kStream][0];
        bool ends = true;
#pragma unroll
        for (int d = 0; d + 1 < kRank; ++d) {
          left[d] -= ends;
          ends = ends && left[d] == 0;
          if (ends) {
            left[d] = static_cast<int>(size[d]);
            offset += wrap[kStream][d];
          }
        }
      }
    }
  }
};

// Rows of whole vectors, in strips. In one step the lanes of a warp cover kAcross neighbouring vectors of each of kDown
// rows. With kSteps = 1 a strip is kAcross vectors wide, and the warp steps down from row to row. Otherwise kDown is 1,
// and the strip is as wide as the kSteps steps of a batch, which go along a row. Rows form planes; within a plane the
// stride from row to row is constant. kRank dimensions remain between planes.
//
// A batch covers one group of rows. A task is every `ranges`-th group of one strip of one plane. Each vector is present
// as a whole or absent.
//
// With kRagged no vector divides a row, and every stream is either dense in the order of the index space or broadcast.
// In the dense streams vectors start at multiples of their size. There are two cases:
//
// - The broadcast streams have one number per row. Then a vector at the end of a row is shared with the neighbouring
//   row, and each of the two rows has some of its elements.
// - The broadcast streams are the same in all rows. Then rows are joined, as many as it takes for vectors to divide the
//   joined row, in which the broadcast streams repeat with a `period`.
template <bool kRagged>
struct RowEnds {};
template <>
struct RowEnds<true> {
  int64 length;    // elements of a row
  int64 elements;  // of all rows; the last joined row may have fewer
  int64 period;    // of broadcast streams in joined rows, fits an int; otherwise 0
};

template <int kVecSize, int kAcross_, int kSteps_, int kStreams, int kRank, bool kRagged_ = false>
struct StripLayout : RowEnds<kRagged_> {
  static constexpr int kOuter = 1;
  static constexpr bool kTiled = false, kStrips = true, kFronts = false, kWholeBatches = false, kRagged = kRagged_;
  static constexpr int kAcross = kAcross_, kDown = kWarp / kAcross, kSteps = kSteps_, kWidth = kAcross * kSteps;
  static_assert(kSteps == 1 || kDown == 1, "steps along a row of which a warp has one");
  struct Cursor {
    int64 row;      // within the plane
    int64 column;   // in vectors
    int64 row_sum;  // index of the row's sum over this strip: strips innermost, then the rows of all planes in order
    int64 base[kStreams];
    int64 element;  // with kRagged: index in dense streams; the lane's vector contains it
    int place;      // of that element within the period
  };
  int64 columns;  // vectors per row
  int64 rows;     // rows per plane
  int64 planes;
  int64 strips;  // columns / kWidth, rounded up
  int64 ranges;
  int64 inner_stride[kStreams], row_stride[kStreams];
  Dimensions<kStreams, kRank> outer;

  __device__ __forceinline__ int64 tasks() const {
    return planes * ranges * strips;
  }
  // Cursor of the lane in its first row of a plane.
  __device__ __forceinline__ Cursor top(int64 plane, int64 strip) const {
    const int lane = threadIdx.x % kWarp;
    Cursor cursor;
    cursor.row = lane / kAcross;
    cursor.column = strip * kWidth + lane % kAcross;
    cursor.row_sum = (plane * rows + cursor.row) * strips + strip;
    outer.offsets(plane, cursor.base);
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      cursor.base[s] += cursor.row * row_stride[s] + cursor.column * kVecSize * inner_stride[s];
    }
    if constexpr (kRagged) {
      const int64 column = cursor.column * kVecSize;
      cursor.element = (plane * rows + cursor.row) * this->length + column;
      cursor.place = this->period > 0 ? static_cast<int>(column % this->period) : 0;
    }
    return cursor;
  }
  __device__ __forceinline__ void move_down(Cursor& cursor, int64 more) const {
    cursor.row += more;
    cursor.row_sum += more * strips;
#pragma unroll
    for (int s = 0; s < kStreams; ++s) cursor.base[s] += more * row_stride[s];
    if constexpr (kRagged) cursor.element += more * this->length;
  }
  // Moves the cursor to the lane's vector of the next step in the batch.
  __device__ __forceinline__ void advance(Cursor& cursor) const {
    if constexpr (kSteps == 1) {
      move_down(cursor, kDown);
    } else {
      cursor.column += kAcross;
#pragma unroll
      for (int s = 0; s < kStreams; ++s) cursor.base[s] += kAcross * kVecSize * inner_stride[s];
      if constexpr (kRagged) cursor.element += kAcross * kVecSize;
    }
  }
  __device__ __forceinline__ int64 present(const Cursor& cursor) const {
    return cursor.row < rows && cursor.column < columns;
  }
  // True if all elements of the strip's vectors are present in the rows before `end`.
  __device__ __forceinline__ bool whole_strip(int64 strip, int64 end) const {
    if constexpr (kRagged) {
      // Joined rows start and end at the edges of vectors, but the last one may have fewer elements.
      const bool last_rows = this->period > 0 && end >= rows;
      return (this->period > 0 || strip > 0) && !last_rows && (strip + 1) * kWidth * kVecSize <= this->length;
    } else {
      return (strip + 1) * kWidth <= columns;
    }
  }
  // Bit mask of the elements of the vector that exist and belong to this row. Precondition: kRagged.
  __device__ __forceinline__ unsigned elements_present(const Cursor& cursor) const {
    const int skipped = static_cast<int>(cursor.element & (kVecSize - 1));
    const int64 left = this->period > 0 ? this->elements - cursor.element : this->length - cursor.column * kVecSize;
    const int64 end = present(cursor) && left + skipped > 0 ? left + skipped : 0;  // of the row, within the vector
    const unsigned before_end = end < kVecSize ? (1u << static_cast<int>(end)) - 1u : (1u << kVecSize) - 1u;
    return cursor.column == 0 ? before_end & (~0u << skipped) : before_end;
  }
  // Returns the cursor, or if it is absent one that is present: in the same plane, or with kRagged the very first.
  __device__ __forceinline__ Cursor inside(const Cursor& cursor) const {
    Cursor clamped = cursor;
    if constexpr (kRagged) {
      const bool is_present = present(cursor);
      clamped.element = is_present ? cursor.element : 0;
#pragma unroll
      for (int s = 0; s < kStreams; ++s) clamped.base[s] = is_present ? cursor.base[s] : 0;
    } else {
      const int64 up = cursor.row < rows ? 0 : cursor.row - rows + 1;
      const int64 left = cursor.column < columns ? 0 : (cursor.column - columns + 1) * kVecSize;
#pragma unroll
      for (int s = 0; s < kStreams; ++s) clamped.base[s] -= up * row_stride[s] + left * inner_stride[s];
    }
    return clamped;
  }
  template <int kStream, bool kSplat>
  __device__ __forceinline__ int64 offset(const Cursor& cursor) const {
    if constexpr (kRagged && !kSplat) {
      return cursor.element & ~static_cast<int64>(kVecSize - 1);
    } else {
      return cursor.base[kStream];
    }
  }
};

// The tile that a warp visits in one batch, in steps of kLanesA x kLanesB lanes. In each step a lane processes a
// micro-tile of kA x kB neighbouring elements.
template <int kA_, int kB_, int kLanesA_, int kStepsA, int kStepsB_>
struct TileShape {
  static constexpr int kA = kA_, kB = kB_;
  static constexpr int kLanesA = kLanesA_, kLanesB = kWarp / kLanesA;
  static constexpr int kStepsB = kStepsB_;  // steps along b before the next one along a
  static constexpr int kStepA = kLanesA * kA, kStepB = kLanesB * kB;
  static constexpr int kSideA = kStepA * kStepsA, kSideB = kStepB * kStepsB;
  static constexpr int kVectors = kWarp * kStepsA * kStepsB;
};

// Elements of streams that disagree about the innermost dimension, in tiles along a and b, each of which has unit
// stride in some streams.
//
// A vector is a micro-tile. Its lane reads it as kB vectors of kA elements from a stream with unit stride along a, and
// as kA vectors of kB elements from a stream with unit stride along b. Which register holds an element is a
// compile-time constant in both cases, so transposing takes neither shared memory nor shuffles. The lanes of a step
// read whole sectors in both directions. With micro-tiles of one element, for sizes that no vector divides, one step
// along a reads whole sectors of float32; along b two consecutive steps do, and the second finds them in L1.
//
// A short dimension along a is one micro-tile long: kA elements, not necessarily a power of two. In streams in which it
// is innermost and without gaps the micro-tile is contiguous, and is also read as kA vectors of kB elements.
//
// Vectors are numbered tile by tile. Vectors outside of the index space, in tiles at its ends, are absent.
// Precondition: batches are tiles.
template <int kStreams, int kRank, class Tile_ = TileShape<1, 1, 8, 2, 4>>
struct TiledLayout {
  using Tile = Tile_;
  static constexpr int kOuter = kRank;
  static constexpr bool kTiled = true, kStrips = false, kRagged = false, kFronts = false, kWholeBatches = false;
  static constexpr int64 kMostShifts = 1 << 16;
  // The lane visits single elements along a line, so bases include the element's offset.
  static constexpr bool kOneLine = Tile::kSideA == kWarp && Tile::kLanesA == kWarp && Tile::kB == 1;
  struct Cursor {
    int64 a, b;
    int step;
    bool whole;  // all vectors of the tile are present
    int64 base[kStreams];
    unsigned phases;  // one bit per stream (staged_tiles.cuh)
  };
  int64 size_a, size_b;
  int64 tiles_a;    // tiles along a
  int64 per_plane;  // tiles of one plane of a and b
  int64 planes;
  int64 stride_a[kStreams], stride_b[kStreams];
  Dimensions<kStreams, kRank> outer;

  __device__ __forceinline__ int64 vectors() const {
    return planes * per_plane * Tile::kVectors;
  }
  __device__ __forceinline__ bool whole_batch(const Cursor& cursor, int64) const {
    return cursor.whole;
  }
  // Position of a tile along a. Positions are rotated from one row of tiles to the next, by each number below a power
  // of two in turn: a chunk may take every n-th tile where n is a multiple of a row's tiles, and would otherwise
  // consist only of tiles at the ends of their rows, which take longer. A division would cost more than it gains.
  __device__ __forceinline__ int64 across(int64 place, int64 tile_b) const {
    const int limited = static_cast<int>(tiles_a < kMostShifts ? tiles_a : kMostShifts);
    const int64 power = 1LL << (31 - __clz(limited));
    const int64 shifted = place + (tile_b & (power - 1));
    return shifted < tiles_a ? shifted : shifted - tiles_a;
  }
  __device__ __forceinline__ Cursor at(int64 vector) const {
    const int64 tile = vector / Tile::kVectors, plane = tile / per_plane, tile_in_plane = tile - plane * per_plane;
    const int within = static_cast<int>(vector % Tile::kVectors), lane = within % kWarp;
    const int64 tile_b = tile_in_plane / tiles_a;
    Cursor cursor;
    cursor.step = within / kWarp;
    cursor.phases = 0;
    const int64 tile_a = across(tile_in_plane - tile_b * tiles_a, tile_b);
    cursor.whole = plane < planes && (tile_a + 1) * Tile::kSideA <= size_a && (tile_b + 1) * Tile::kSideB <= size_b;
    cursor.a = tile_a * Tile::kSideA + cursor.step / Tile::kStepsB * Tile::kStepA + lane % Tile::kLanesA * Tile::kA;
    cursor.b = tile_b * Tile::kSideB + cursor.step % Tile::kStepsB * Tile::kStepB + lane / Tile::kLanesA * Tile::kB;
    outer.offsets(plane, cursor.base);
    // A tile past the last one.
    if (plane >= planes) cursor.a = size_a;
    if constexpr (kOneLine) {
#pragma unroll
      for (int s = 0; s < kStreams; ++s) cursor.base[s] += cursor.a * stride_a[s] + cursor.b * stride_b[s];
    }
    return cursor;
  }
  // Moves the cursor to the lane's next vector within the tile.
  __device__ __forceinline__ void advance(Cursor& cursor) const {
    if constexpr (kOneLine) {
      ++cursor.step;
      ++cursor.b;
#pragma unroll
      for (int s = 0; s < kStreams; ++s) cursor.base[s] += stride_b[s];
      return;
    }
    const bool next_a = ++cursor.step % Tile::kStepsB == 0;
    cursor.a += next_a ? Tile::kStepA : 0;
    cursor.b += next_a ? Tile::kStepB - Tile::kSideB : Tile::kStepB;
  }
  __device__ __forceinline__ int64 present(const Cursor& cursor) const {
    return cursor.a < size_a && cursor.b < size_b;
  }
  // Returns the cursor, or if it is absent one of the same plane that is present.
  __device__ __forceinline__ Cursor inside(const Cursor& cursor) const {
    Cursor clamped = cursor;
    clamped.a = cursor.a < size_a ? cursor.a : size_a - Tile::kA;
    clamped.b = cursor.b < size_b ? cursor.b : size_b - Tile::kB;
    if constexpr (kOneLine) {
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        clamped.base[s] -= (cursor.a - clamped.a) * stride_a[s] + (cursor.b - clamped.b) * stride_b[s];
      }
    }
    return clamped;
  }
  template <int kStream, bool kSplat>
  __device__ __forceinline__ int64 offset(const Cursor& cursor) const {
    if constexpr (kOneLine) return cursor.base[kStream];
    return cursor.base[kStream] + cursor.a * stride_a[kStream] + cursor.b * stride_b[kStream];
  }
};

// The order in which batches of kBatch vectors are visited. With several fronts the index space is cut into as many
// stretches: the first batch of each stretch is visited first, then the second of each, and so on. Elements that are
// neighbours in the memory of a stream whose dimensions are in another order may be a whole stretch apart in the index
// space; a sector that two of them share is then read, or completed, before it is evicted from L2. Batches past the end
// of the last stretches are absent.
template <class Layout, int kBatch>
struct BatchOrder {
  // End of the visited indices, in vectors, including absent ones.
  static __device__ __forceinline__ int64 end(const Layout& layout) {
    if constexpr (Layout::kFronts) {
      if (layout.fronts > 1) return layout.fronts * batches_per_front(layout) * kBatch;
    }
    return layout.vectors();
  }
  // First vector of the batch that is visited when a single front would reach vector `first`.
  static __device__ __forceinline__ int64 first_of(const Layout& layout, int64 first) {
    if constexpr (Layout::kFronts) {
      if (layout.fronts > 1) {
        const int64 batch = first / kBatch, row = batch / layout.fronts;
        return ((batch - row * layout.fronts) * batches_per_front(layout) + row) * kBatch;
      }
    }
    return first;
  }

 private:
  // Divided anew for each batch: kept in registers, the quotient would cost some losses one resident block per
  // multiprocessor.
  static __device__ __forceinline__ int64 batches_per_front(const Layout& layout) {
    return ((layout.vectors() + kBatch - 1) / kBatch + layout.fronts - 1) / layout.fronts;
  }
};
