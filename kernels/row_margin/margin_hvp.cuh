// Second derivatives of margin losses of rows of one label, along a tangent v of the scores:
//
//   d_i   = v_i - v_y                                     the tangent of z_i, y the label, i another class
//   hvp[r, i] = factor * h''(z_i) d_i,  z_i > 0           factor = grad_output * scale * w_y / C
//   hvp[r, y] = -factor * sum over i of h''(z_i) d_i
//
// The hinge h is evaluated on nested dual numbers (nested.cuh). For a linear hinge, all products are 0, and no kernel
// is launched (engines/row_margin/plan.py).
//
// 1. A group of threads processes a row: lanes of a warp, a block, or a cluster of blocks. If classes are not
//    contiguous, one thread processes a row.
// 2. The threads read scores and tangents as vectors if these are contiguous and aligned, several in flight, and write
//    the products of each vector immediately.
// 3. The group sums the products, and thread 0 overwrites that of the label. If the value of a row is NaN, all its
//    products are written again.
//
// Threads hold vectors of a row in registers; a group owns a row; a worker owns a chunk (softmax/rows.cuh).
//
// Traffic: scores and tangents are read once, products are written once. Rows that do not count are not read.
//
// Order of additions: as in row_margin.cuh. Preconditions: with kVecSize > 1, the class strides are 1 and vectors
// divide every row.
#pragma once
#include "core/nested.cuh"
#include "row_margin/row_margin.cuh"

// Stream of the tangents: that of the labels' gradients, which do not exist.
constexpr RowStream kTangents = kTargetGradients;

// `Base` is a MarginProgram whose hinge also accepts nested dual numbers.
template <class Base>
struct MarginHvpProgram : Base {
  using Input = typename Base::Input;
  const Input* tangents;

  __device__ __forceinline__ double tangent(const int64 (&offset)[kRowStreams], int64 c) const {
    return widen<double>(tangents[offset[kTangents] + c * this->space.class_stride[kTangents]]);
  }
  // Adds the hinge of a pair to `total`, and returns the tangent of its derivative. NaN counts as above 0.
  __device__ __forceinline__ double add(double z, double along, double& total) const {
    if (z <= 0.0) return 0.0;
    const auto y = this->loss(variable<1u, 0>(NestedDual<double>(z, along)));
    total += y.value.value;
    return tangent_or_zero(y, 0).tangent;
  }
};

// Writes the products of a row. Preconditions: every thread of the group calls it together, with a SubwarpGroup every
// lane of the warp. `exists` is false if the warp has fewer rows left than it processes at once.
template <int kVecSize, class Group, class Program, class Scale>
__device__ __forceinline__ void second_row(const Program& program, const Group& group, int64 row, bool exists,
                                           SyncState& sync, Scale& scale) {
  using Input = typename Program::Input;
  constexpr int kAhead = 4;
  const int rank = group.thread_rank(), threads = group.num_threads();
  const auto& stride = program.space.class_stride;
  const int64 classes = program.space.classes, step = static_cast<int64>(threads) * kVecSize;
  RowTarget<double> t{};
  if (exists) t = program.target(row);
  const bool counts = exists && t.active && t.weight != 0.0;
  Input* const to = program.gradient_pointer(t.offset);
  HingeSums<double> sums{0.0, 0.0};
  double factor = 0.0;
  if (counts) {
    const double own = program.score(t.offset, t.label), along_own = program.tangent(t.offset, t.label);
    const Input* const from = program.logits(t.offset);
    const Input* const tangents = program.tangents + t.offset[kTangents];
    factor = grad_factor(scale, t.offset) * (t.weight * program.inverse);
#pragma unroll 1
    for (int64 first = static_cast<int64>(rank) * kVecSize; first < classes; first += kAhead * step) {
      Pack<Input, kVecSize> x[kAhead], v[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int64 c = first + k * step;
        if (c >= classes) continue;
        x[k] = load_stream<kVecSize>(from + c * stride[kLogits]);
        v[k] = load_stream<kVecSize>(tangents + c * stride[kTangents]);
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int64 c = first + k * step;
        if (c >= classes) continue;
        typename Program::Gradient products[kVecSize];
#pragma unroll
        for (int i = 0; i < kVecSize; ++i) {
          double product = 0.0;
          if (c + i != t.label) {
            product = program.add(program.excess(widen<double>(x[k].element[i]), own),
                                  widen<double>(v[k].element[i]) - along_own, sums.value);
          }
          sums.slopes += product;
          products[i] = Program::gradient(product, factor);
        }
        store_pack<kVecSize>(to + c * stride[kGradients], NarrowPack<Input, kVecSize>::from(products));
      }
    }
  }
  sums = group_sum(group, sums, sync);
  // Other threads may have written the vector that contains the label.
  group_sync(group);
  if (!exists) return;
  if (!counts || sums.value != sums.value) {
    const Input filled = Narrow<Input>::from(counts ? sums.value : 0.0);
    for (int64 c = rank; c < classes; c += threads) to[c * stride[kGradients]] = filled;
  } else if (rank == 0) {
    to[t.label * stride[kGradients]] = Narrow<Input>::from(Program::gradient(sums.slopes, -factor));
  }
}

// Reader that writes the second derivatives of rows of one label.
template <int kVecSize>
struct HvpReader {
  template <class Group, class Program, class Scale>
  struct Visit {
    static constexpr bool kNeedsNextRow = false;
    const Program& program;
    const Group& group;
    Scale& scale;
    __device__ __forceinline__ double operator()(int64 row, bool exists, int64, SyncState& sync) const {
      second_row<kVecSize>(program, group, row, exists, sync, scale);
      return 0.0;
    }
  };

  // Visits every row once. The members of `work` are null.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    for_each_row(group, scale, program.space.rows, chunks, work, Visit<Group, Program, Scale>{program, group, scale});
  }
};
