// Memory layouts: from the index of a vector to the offset of each stream (operand, gradient or result).
//
//   index space = broadcast shape of the loss, dimensions reordered and merged as far as all streams allow
//   vector v    = elements [v * kVecSize, (v + 1) * kVecSize) along the innermost dimension
//
// engines/pointwise/layout.py merges the dimensions and chooses kVecSize. Six layouts cover all cases:
//
// clang-format off: the formatter would join the lines of this list.
//   FlatLayout      one dimension: dense tensors of any rank and dimension order, and operands that are single numbers.
//   LinearLayout    one dimension, of any stride in each stream, element by element: every second element of a tensor.
//   StridedLayout   an innermost dimension of whole vectors and kRank outer ones (1, 2, or up to kMaxRank):
//                   broadcast operands, slices, and with kVecSize = 1 arbitrary strides.
//   StripLayout     the same, in another order: a warp stays in a strip of columns and goes down the rows, so that
//                   it can add up derivatives of operands that are broadcast along rows or columns.
//   GatheredLayout  one dimension, in which some streams are dense, and others (kRank dimensions) are read element by
//                   element: rows that no vector divides, short ones above all.
//   TiledLayout     two dimensions, each of unit stride in some streams, and kRank outer ones: a transposed operand.
//                   One of the two may be short.
// clang-format on
//
// A Cursor is the position of one lane; `advance` moves it by kWarp vectors. All indices have 64 bits: 2^31 elements of
// float32 are 8 GiB, which one GPU holds many times over.
#pragma once
#include "core/types.cuh"

constexpr int kMaxRank = 24;  // engines/strides.py: MAX_RANK
constexpr int kWarp = 32;

// index / size, where `multiplier` is 2^(63 + bits) / size + 1, rounded down, of the bits of size - 1: a third of the
// instructions of a division, which does not know the divisor. Preconditions: 0 <= index < 2^63, size > 1.
__device__ __forceinline__ int64 quotient(int64 index, int64 multiplier, int64 size) {
  const unsigned long long by = static_cast<unsigned long long>(multiplier);
  const int shift = 63 - __clzll(size - 1);
  return static_cast<int64>(__umul64hi(static_cast<unsigned long long>(index), by) >> shift);
}

// Splits an index over dimensions of the given sizes, innermost first, into an offset for each stream. The outermost
// dimension takes the quotient that is left, so one dimension needs no division; kRank = 1 tells the compiler, and
// kRank = 2 that there are two. A loop over them, whose strides are read by a computed index, took a fifth of the time
// of a cheap loss in double.
template <int kStreams, int kRank>
struct Dimensions {
  int64 rank;
  int64 size[kRank];
  int64 multiplier[kRank];  // of `quotient`
  int64 stride[kStreams][kRank];

  // Coordinates are computed in the type of the index. Precondition: no size is out of its range.
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

// kWholeBatches: batches fill the elements, so that kernels have no code for a part of one. A kernel of a light loss is
// compiled in a fifth less time without it.
template <int kVecSize, bool kWholeBatches_ = false>
struct FlatLayout {
  static constexpr int kOuter = 0;  // outer dimensions: none, one offset serves all streams
  static constexpr bool kTiled = false, kStrips = false, kRagged = false, kFronts = false,
                        kWholeBatches = kWholeBatches_;
  struct Cursor {
    int64 element;
  };
  int64 elements;

  __device__ __forceinline__ int64 vectors() const {
    return (elements + kVecSize - 1) / kVecSize;
  }
  // True if every vector of the batch that the cursor begins, up to and including `vector`, has all its elements.
  __device__ __forceinline__ bool whole_batch(const Cursor&, int64 vector) const {
    return (vector + 1) * kVecSize <= elements;
  }
  __device__ __forceinline__ Cursor at(int64 vector) const {
    return {vector * kVecSize};
  }
  __device__ __forceinline__ void advance(Cursor& cursor) const {
    cursor.element += kWarp * kVecSize;
  }
  // Number of elements of the cursor's vector that exist: kVecSize, fewer in the last vector, 0 or less behind it.
  __device__ __forceinline__ int64 present(const Cursor& cursor) const {
    return elements - cursor.element;
  }
  template <int kStream, bool kSplat>
  __device__ __forceinline__ int64 offset(const Cursor& cursor) const {
    return kSplat ? 0 : cursor.element;
  }
};

// A StridedLayout would spend two thirds of a cheap loss's instructions on rows, and registers on offsets that are not
// there.
template <int kStreams>
struct LinearLayout {
  static constexpr int kOuter = 1;  // streams have offsets of their own
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
  int64 fronts;           // as BatchOrder has them
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
    // kVecSize > 1 implies unit stride, which spares the multiplication.
    const int64 element = cursor.column * kVecSize;
    return cursor.base[kStream] + (kVecSize > 1 ? element : element * inner_stride[kStream]);
  }
};

// Streams that are dense in the order of the index space, as in a FlatLayout, beside others of any strides. A vector of
// the latter is gathered from kVecSize places. From element to element offsets change by a stride, and by `wrap` of
// each dimension that ends there; from vector to vector of a lane by `step_offset`, and the same. Only the first vector
// of a batch takes divisions, which were half of a cheap loss's instructions. With kLongRows the innermost dimension
// has a vector at least, of which one ends in a vector at most: elements behind its end are a `jump` away.
//
// As rows of a StridedLayout, element by element, 6.7M elements in rows of 3 took four times as long as when dense.
template <int kVecSize, int kStreams, int kRank, bool kLongRows_ = false>
struct GatheredLayout {
  static constexpr int kOuter = 1;
  static constexpr bool kTiled = false, kStrips = false, kRagged = false, kFronts = true, kWholeBatches = false;
  static constexpr int kCounted = kRank > 1 ? kRank - 1 : 1;
  static constexpr bool kLongRows = kLongRows_ && kRank > 1;
  struct Cursor {
    int64 element;
    int64 base[kStreams];  // of streams that are gathered
    int left[kCounted];    // elements of each dimension but the last before it ends, of the size of an int at most
  };
  int64 elements;
  int64 fronts;  // as BatchOrder has them
  int64 size[kRank];
  int64 step[kRank];            // advancing by kWarp vectors adds so much to each coordinate ...
  int64 step_offset[kStreams];  // ... and this to each offset
  int64 multiplier[kCounted];   // of `quotient`
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
  // The step from the last element of a row to the first of the next one, less the stride. Precondition: kLongRows.
  template <int kStream>
  __device__ __forceinline__ int64 jump(const Cursor& cursor) const {
    int64 found = wrap[kStream][0];
    bool ends = true;
#pragma unroll
    for (int d = 1; d + 1 < kRank; ++d) {
      ends = ends && cursor.left[d] == 1;
      found += ends ? wrap[kStream][d] : 0;
    }
    return found;
  }
  // Calls visit(i, offset) for kCount elements from the cursor on.
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

// Rows of whole vectors, in strips. The lanes of a warp have kAcross neighbouring vectors of kDown rows in a step. With
// kSteps = 1 a strip is kAcross vectors wide, and a warp steps down from row to row. Otherwise (kDown is 1) it is as
// wide as the kSteps steps of a batch, which go along a row. Rows form planes, in each of which the stride from row to
// row is constant; kRank dimensions are left between planes.
//
// A task is a strip of a plane, of which it has every `ranges`-th group of rows, a batch each. A vector is present or
// not.
//
// With kRagged no vector divides a row, and every stream is dense in the order of the index space or broadcast. Vectors
// lie at multiples of their size in the dense streams. Either the others have one number per row: then the vectors at
// the ends of a row are shared with the rows beside it, and each row has some of their elements. Or the others are the
// same in all rows: then as many rows as vectors divide are joined to one, and the others repeat in it with a `period`.
template <bool kRagged>
struct RowEnds {};
template <>
struct RowEnds<true> {
  int64 length;    // elements of a row
  int64 elements;  // of all rows; of joined ones the last may have fewer
  int64 period;    // of joined rows, of the size of an int at most; otherwise 0
};

template <int kVecSize, int kAcross_, int kSteps_, int kStreams, int kRank, bool kRagged_ = false>
struct StripLayout : RowEnds<kRagged_> {
  static constexpr int kOuter = 1;
  static constexpr bool kTiled = false, kStrips = true, kFronts = false, kWholeBatches = false, kRagged = kRagged_;
  static constexpr int kAcross = kAcross_, kDown = kWarp / kAcross, kSteps = kSteps_, kWidth = kAcross * kSteps;
  static_assert(kSteps == 1 || kDown == 1, "steps along a row of which a warp has one");
  struct Cursor {
    int64 row;      // in the plane
    int64 column;   // in vectors
    int64 row_sum;  // the sum over a row of this strip has this index: rows of all planes in order, strips innermost
    int64 base[kStreams];
    int64 element;  // with kRagged, in dense streams: their vector is the one that has it
    int place;      // of that element in the period
  };
  int64 columns;  // vectors of a row
  int64 rows;     // of a plane
  int64 planes;
  int64 strips;  // columns / kWidth, rounded up
  int64 ranges;
  int64 inner_stride[kStreams], row_stride[kStreams];
  Dimensions<kStreams, kRank> outer;

  __device__ __forceinline__ int64 tasks() const {
    return planes * ranges * strips;
  }
  // The lane's first row of a plane.
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
  // A step of a batch.
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
  // True if all elements of the strip's vectors are there, in rows before `end`.
  __device__ __forceinline__ bool whole_strip(int64 strip, int64 end) const {
    if constexpr (kRagged) {
      // Vectors lie at the ends of rows that are joined, of which the last may have fewer elements.
      const bool last_rows = this->period > 0 && end >= rows;
      return (this->period > 0 || strip > 0) && !last_rows && (strip + 1) * kWidth * kVecSize <= this->length;
    } else {
      return (strip + 1) * kWidth <= columns;
    }
  }
  // A bit for each element of the vector that is there, in this row. Precondition: kRagged.
  __device__ __forceinline__ unsigned elements_present(const Cursor& cursor) const {
    const int skipped = static_cast<int>(cursor.element & (kVecSize - 1));
    const int64 left = this->period > 0 ? this->elements - cursor.element : this->length - cursor.column * kVecSize;
    const int64 end = present(cursor) && left + skipped > 0 ? left + skipped : 0;  // of the row, in the vector
    const unsigned before_end = end < kVecSize ? (1u << static_cast<int>(end)) - 1u : (1u << kVecSize) - 1u;
    return cursor.column == 0 ? before_end & (~0u << skipped) : before_end;
  }
  // The cursor, or another one that is present: of the same plane, or the very first.
  __device__ __forceinline__ Cursor inside(const Cursor& cursor) const {
    Cursor found = cursor;
    if constexpr (kRagged) {
      const bool there = present(cursor);
      found.element = there ? cursor.element : 0;
#pragma unroll
      for (int s = 0; s < kStreams; ++s) found.base[s] = there ? cursor.base[s] : 0;
    } else {
      const int64 up = cursor.row < rows ? 0 : cursor.row - rows + 1;
      const int64 left = cursor.column < columns ? 0 : (cursor.column - columns + 1) * kVecSize;
#pragma unroll
      for (int s = 0; s < kStreams; ++s) found.base[s] -= up * row_stride[s] + left * inner_stride[s];
    }
    return found;
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

// The tile that a warp visits in one batch, in steps of kLanesA x kLanesB lanes. A lane takes kA x kB neighbouring
// elements in a step: its micro-tile.
template <int kA_, int kB_, int kLanesA_, int kStepsA, int kStepsB_>
struct TileShape {
  static constexpr int kA = kA_, kB = kB_;
  static constexpr int kLanesA = kLanesA_, kLanesB = kWarp / kLanesA;
  static constexpr int kStepsB = kStepsB_;  // steps along b before the next along a
  static constexpr int kStepA = kLanesA * kA, kStepB = kLanesB * kB;
  static constexpr int kSideA = kStepA * kStepsA, kSideB = kStepB * kStepsB;
  static constexpr int kVectors = kWarp * kStepsA * kStepsB;
};

// Elements of streams that disagree about the innermost dimension: tiles of elements along a and b, each of unit stride
// in some streams.
//
// A vector is a micro-tile. The lane reads it as kB vectors of kA elements from a stream of unit stride along a, and as
// kA vectors of kB elements from one along b. Which register holds an element is a constant in both cases, so nothing
// is transposed: neither shared memory nor a shuffle is needed. The lanes of a step read whole sectors in both
// directions. With micro-tiles of one element, for sizes that no vector divides, steps along a read whole sectors of
// float32; along b two steps in turn do, of which the second finds them in L1.
//
// A short dimension along a is one micro-tile long, of kA elements, no power of two perhaps. Streams in which it is
// innermost and without gaps have the micro-tile in one piece, which is also read as kA vectors of kB elements.
//
// Vectors are numbered tile by tile. Those outside of the index space, in tiles at its ends, are not present.
// Precondition: batches are tiles.
template <int kStreams, int kRank, class Tile_ = TileShape<1, 1, 8, 2, 4>>
struct TiledLayout {
  using Tile = Tile_;
  static constexpr int kOuter = kRank;
  static constexpr bool kTiled = true, kStrips = false, kRagged = false, kFronts = false, kWholeBatches = false;
  static constexpr int64 kMostShifts = 1 << 16;
  // A lane has a line of single elements: bases are those of the element.
  static constexpr bool kOneLine = Tile::kSideA == kWarp && Tile::kLanesA == kWarp && Tile::kB == 1;
  struct Cursor {
    int64 a, b;
    int step;
    bool whole;  // all vectors of the tile are present
    int64 base[kStreams];
    unsigned phases;  // a bit for each stream (staged_tiles.cuh)
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
  // A tile's place along a. Shifted from row to row of tiles, by all numbers below a power of two: a chunk may take
  // every n-th tile of a multiple of a row, and would have nothing but tiles at the end of their rows, which take
  // longer. A division would take longer than it gains.
  __device__ __forceinline__ int64 across(int64 place, int64 tile_b) const {
    const int limited = static_cast<int>(tiles_a < kMostShifts ? tiles_a : kMostShifts);
    const int64 power = 1LL << (31 - __clz(limited));
    const int64 shifted = place + (tile_b & (power - 1));
    return shifted < tiles_a ? shifted : shifted - tiles_a;
  }
  __device__ __forceinline__ Cursor at(int64 vector) const {
    const int64 tile = vector / Tile::kVectors, plane = tile / per_plane, rest = tile - plane * per_plane;
    const int within = static_cast<int>(vector % Tile::kVectors), lane = within % kWarp;
    const int64 tile_b = rest / tiles_a;
    Cursor cursor;
    cursor.step = within / kWarp;
    cursor.phases = 0;
    const int64 tile_a = across(rest - tile_b * tiles_a, tile_b);
    cursor.whole = plane < planes && (tile_a + 1) * Tile::kSideA <= size_a && (tile_b + 1) * Tile::kSideB <= size_b;
    cursor.a = tile_a * Tile::kSideA + cursor.step / Tile::kStepsB * Tile::kStepA + lane % Tile::kLanesA * Tile::kA;
    cursor.b = tile_b * Tile::kSideB + cursor.step % Tile::kStepsB * Tile::kStepB + lane / Tile::kLanesA * Tile::kB;
    outer.offsets(plane, cursor.base);
    // A tile behind the last one.
    if (plane >= planes) cursor.a = size_a;
    if constexpr (kOneLine) {
#pragma unroll
      for (int s = 0; s < kStreams; ++s) cursor.base[s] += cursor.a * stride_a[s] + cursor.b * stride_b[s];
    }
    return cursor;
  }
  // Within a tile.
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
  // The cursor, or another one of the same plane that is present.
  __device__ __forceinline__ Cursor inside(const Cursor& cursor) const {
    Cursor found = cursor;
    found.a = cursor.a < size_a ? cursor.a : size_a - Tile::kA;
    found.b = cursor.b < size_b ? cursor.b : size_b - Tile::kB;
    if constexpr (kOneLine) {
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        found.base[s] -= (cursor.a - found.a) * stride_a[s] + (cursor.b - found.b) * stride_b[s];
      }
    }
    return found;
  }
  template <int kStream, bool kSplat>
  __device__ __forceinline__ int64 offset(const Cursor& cursor) const {
    if constexpr (kOneLine) return cursor.base[kStream];
    return cursor.base[kStream] + cursor.a * stride_a[kStream] + cursor.b * stride_b[kStream];
  }
};

// The order in which batches of kBatch vectors are visited. With several fronts the index space is cut into as many
// stretches, whose first batches come first, then their second ones. Neighbours in memory of a stream whose order of
// dimensions is another one may lie a stretch apart: a sector that two of them share is then read, or completed, before
// it leaves L2. Batches behind the end of the last stretches are not present.
template <class Layout, int kBatch>
struct BatchOrder {
  // In vectors, absent ones included.
  static __device__ __forceinline__ int64 end(const Layout& layout) {
    if constexpr (Layout::kFronts) {
      if (layout.fronts > 1) return layout.fronts * batches_per_front(layout) * kBatch;
    }
    return layout.vectors();
  }
  // The first vector of the batch that is visited when a single front would have come to vector `first`.
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
  // Divided in each batch: kept in registers, it would cost some losses a block of each multiprocessor.
  static __device__ __forceinline__ int64 batches_per_front(const Layout& layout) {
    return ((layout.vectors() + kBatch - 1) / kBatch + layout.fronts - 1) / layout.fronts;
  }
};
