// The largest absolute value of each row of x, shape (rows, columns), and its gradient.
//
//   value[r] = max_c |x[r, c]|        g[r, c] = grad_output[r] sign(x[r, c]) at the first c of that value, 0 elsewhere
//
// 1. One block of a single warp takes all rows, one after another.
// 2. Its lanes stride over the columns, each with the largest value it met and where; a butterfly keeps the larger one,
//    and of equal ones the first column. NaN is larger than any number.
// 3. Every lane knows the result: the lanes stride over the columns again and write the gradient.
//
// Each element is read once; a row of the gradient is written once.
// Preconditions: rows are contiguous; one block of 32 threads.
#pragma once
#include "core/speculative_grad.cuh"
#include "core/reduce.cuh"

struct Largest {
  double size;
  int64 column;
};

__device__ __forceinline__ bool precedes(const Largest& a, const Largest& b) {
  const bool a_nan = a.size != a.size, b_nan = b.size != b.size;
  if (a_nan != b_nan) return a_nan;
  return a.size > b.size || ((a.size == b.size || a_nan) && a.column < b.column);
}

// In every lane. Preconditions: all 32 lanes call it together.
template <class Storage>
__device__ __forceinline__ Largest largest_of(const Storage* row, int64 columns) {
  Largest mine{-1.0, columns};
  for (int64 c = threadIdx.x; c < columns; c += 32) {
    const Largest next{fabs(widen<double>(row[c])), c};
    if (precedes(next, mine)) mine = next;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Largest other{__shfl_xor_sync(0xffffffffu, mine.size, offset),
                        __shfl_xor_sync(0xffffffffu, mine.column, offset)};
    if (precedes(other, mine)) mine = other;
  }
  return mine;
}

template <class Storage>
__device__ __forceinline__ void write_gradient(const Storage* row, Storage* gradient, int64 columns, Largest at,
                                               double grad_output) {
  for (int64 c = threadIdx.x; c < columns; c += 32) {
    const double x = widen<double>(row[c]);
    const double slope = at.size != at.size ? at.size : x < 0.0 ? -1.0 : x > 0.0 ? 1.0 : 0.0;
    const bool here = c == at.column || at.size != at.size;
    gradient[c] = Narrow<Storage>::from(here ? grad_output * slope : 0.0);
  }
}

// Values per row where `values` is not null, and the sum of all; gradients by `scale` where `gradients` is not null.
template <class Storage, class Result, class Scale>
__device__ __forceinline__ double take_rows(const Storage* input, Storage* gradients, Result* values, int64 rows,
                                            int64 columns, Scale&& scale) {
  double total = 0.0;
  for (int64 r = 0; r < rows; ++r) {
    const Largest found = largest_of(input + r * columns, columns);
    total += found.size;
    if (values != nullptr && threadIdx.x == 0) values[r] = Narrow<Result>::from(found.size);
    if (gradients != nullptr) write_gradient(input + r * columns, gradients + r * columns, columns, found, scale(r));
  }
  return total;
}
