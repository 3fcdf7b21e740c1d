// Where the elements of a loss lie in memory.
//
// The index space of a loss is its broadcast shape with the dimensions reordered and merged as far as all streams
// (operands, gradients, results) allow; launch.py does that. It is walked in vectors of kVecSize elements, numbered
// along the innermost dimension first. Two layouts cover everything:
//
// clang-format off: the formatter would join the lines of this list.
//   Flat   one dimension: dense tensors of any rank and any order, with operands that are single numbers.
//   Rows   an innermost dimension of whole vectors and kRank outer ones (1, a matrix, or up to kMaxRank):
//          broadcasting along rows or columns, slices, and (with kVecSize = 1) arbitrary strides.
// clang-format on
//
// A cursor is a lane's place; `advance` moves it by one vector per lane of the warp. All indices have 64 bits: 2^31
// elements are 8 GiB of float32, which one GPU holds many times over.
#pragma once
#include "core/types.cuh"

constexpr int kMaxRank = 24;  // launch.py: MAX_RANK
constexpr int kWarp = 32;

// Splits an index over dimensions of the given sizes (innermost first) into an offset for each stream. The outermost
// dimension takes what is left, so one dimension costs no division; kRank = 1 says so to the compiler.
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
  static constexpr int kOuter = 0;  // dimensions in which streams differ: one offset serves all of them
  struct Cursor {
    int64 element;
  };
  int64 elements;

  __device__ __forceinline__ int64 vectors() const {
    return (elements + kVecSize - 1) / kVecSize;
  }
  // Whether every vector up to `vector` exists and has all its elements.
  __device__ __forceinline__ bool whole_up_to(int64 vector) const {
    return (vector + 1) * kVecSize <= elements;
  }
  __device__ __forceinline__ Cursor at(int64 vector) const {
    return {vector * kVecSize};
  }
  __device__ __forceinline__ void advance(Cursor& cursor) const {
    cursor.element += kWarp * kVecSize;
  }
  // How many elements of the cursor's vector exist: kVecSize, fewer in the last one, 0 or less behind it.
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
  int64 vectors_per_row;  // rows are whole vectors: kVecSize divides their length
  int64 row_step;         // kWarp vectors further on is this many rows ...
  int64 column_step;      // ... and this many vectors
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
    // More than one lane means unit stride, which spares the multiplication.
    const int64 element = cursor.column * kVecSize;
    return cursor.base[kStream] + (kVecSize > 1 ? element : element * inner_stride[kStream]);
  }
};
