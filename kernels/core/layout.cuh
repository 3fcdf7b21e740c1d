// Memory layouts: from the index of a vector to the offset of each stream (operand, gradient or result).
//
//   index space = broadcast shape of the loss, dimensions reordered and merged as far as all streams allow
//   vector v    = elements [v * kVecSize, (v + 1) * kVecSize) along the innermost dimension
//
// engines/pointwise/layout.py merges the dimensions and chooses kVecSize. Two layouts cover all cases:
//
// clang-format off: the formatter would join the lines of this list.
//   FlatLayout      one dimension: dense tensors of any rank and dimension order, and operands that are single numbers.
//   StridedLayout   an innermost dimension of whole vectors and kRank outer ones (1 for a matrix, or up to kMaxRank):
//                   broadcast operands, slices, and with kVecSize = 1 arbitrary strides.
// clang-format on
//
// A Cursor is the position of one lane; `advance` moves it by kWarp vectors. All indices have 64 bits: 2^31 elements of
// float32 are 8 GiB, which one GPU holds many times over.
#pragma once
#include "core/types.cuh"

constexpr int kMaxRank = 24;  // engines/strides.py: MAX_RANK
constexpr int kWarp = 32;

// Splits an index over dimensions of the given sizes, innermost first, into an offset for each stream. The outermost
// dimension takes the quotient that is left, so one dimension needs no division; kRank = 1 tells the compiler.
template <int kStreams, int kRank>
struct Dimensions {
  int64 rank;
  int64 size[kRank];
  int64 stride[kStreams][kRank];

  __device__ __forceinline__ void offsets(int64 index, int64 (&offset)[kStreams]) const {
    if constexpr (kRank == 1) {
#pragma unroll
      for (int s = 0; s < kStreams; ++s) offset[s] = index * stride[s][0];
    } else {
#pragma unroll
      for (int s = 0; s < kStreams; ++s) offset[s] = 0;
#pragma unroll 1
      for (int d = 0; d < rank; ++d) {
        const int64 outer_index = d + 1 < rank ? index / size[d] : 0;
        const int64 coordinate = index - outer_index * size[d];
#pragma unroll
        for (int s = 0; s < kStreams; ++s) offset[s] += coordinate * stride[s][d];
        index = outer_index;
      }
    }
  }
};

template <int kVecSize>
struct FlatLayout {
  static constexpr int kOuter = 0;  // outer dimensions: none, one offset serves all streams
  struct Cursor {
    int64 element;
  };
  int64 elements;

  __device__ __forceinline__ int64 vectors() const {
    return (elements + kVecSize - 1) / kVecSize;
  }
  // True if every vector up to and including `vector` exists and has all its elements.
  __device__ __forceinline__ bool whole_up_to(int64 vector) const {
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

template <int kVecSize, int kStreams, int kRank>
struct StridedLayout {
  static constexpr int kOuter = kRank;
  struct Cursor {
    int64 row;
    int64 column;  // in vectors
    int64 base[kStreams];
  };
  int64 rows;
  int64 vectors_per_row;  // kVecSize divides the length of a row
  int64 row_step;         // advancing by kWarp vectors adds this many rows ...
  int64 column_step;      // ... and this many vectors within the row
  int64 inner_stride[kStreams];
  Dimensions<kStreams, kRank> outer;

  __device__ __forceinline__ int64 vectors() const {
    return rows * vectors_per_row;
  }
  __device__ __forceinline__ bool whole_up_to(int64 vector) const {
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
