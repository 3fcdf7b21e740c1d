// Dense targets, rows in memory: each pass of dense_rows.cuh reads its operands again. Second derivatives use it, whose
// numbers with tangents leave no room for rows on chip.
//
// 1. SoftmaxPass reads the logits, and a teacher's.
// 2. SumPass reads both operands. With an affine term, AffinePass replaces steps 1 and 2, and reads both operands too.
// 3. GradientPass reads both operands again. It is omitted if SumPass has already written the gradient.
//
// A group owns a row, whose vectors are distributed over its threads. Each thread has kVectors vectors of each operand
// in flight.
//
// Traffic: logits are read three times, or twice without gradients; targets once less (a teacher's logits as often).
// With an affine term both operands are read twice, or once; if SumPass writes the gradient, twice. Preconditions:
// class stride 1 (second derivatives with kVecSize 1 may have others) and equal alignment of all operands and
// gradients.
#pragma once
#include "softmax/dense_rows.cuh"

template <int kVecSize, int kVectors>
struct TwoPassDense {
  // The classes of a row, as visit_dense_row (dense_rows.cuh) expects them. Each pass reads memory.
  template <class Program, class Group>
  struct Classes {
    // With kVecSize 1, second derivatives also read classes with a stride.
    static constexpr bool kContiguous = kVecSize > 1;
    static constexpr bool kPlacesGradients = false;
    static constexpr bool kOnChip = false;
    static constexpr bool kManyPacks = false;
    static constexpr bool kAlone = false;
    static constexpr bool kHasRoom = false;
    static constexpr bool kReplaces = false;
    using Input = typename Program::Input;
    using Target = typename Program::Target;

    const Group& group;
    const typename Program::template View<kVecSize> view;
    typename PointerTo<Input>::type x;
    typename PointerTo<Target>::type t;
    bool exists;
    bool active;

    __device__ __forceinline__ Classes(const Program& program, const Group& group, const int64 (&offset)[kRowStreams],
                                       bool exists)
        : group(group),
          view(program.template view<kVecSize>(offset)),
          x(program.logits(offset)),
          t(program.targets_of(offset)),
          exists(exists),
          active(exists && program.active(offset)) {
    }
    __device__ __forceinline__ void prefetch_next() const {
    }

    template <class F>
    __device__ __forceinline__ void for_each(F& f) const {
      if (active) visit(f);
    }
    template <class F>
    __device__ __forceinline__ void final_pass(F& f) const {
      for_each(f);
    }
    template <class F>
    __device__ __forceinline__ void final_pass_all(const F& f) const {
      if (exists) visit(f);
    }
    template <class F>
    __device__ __forceinline__ void fill(const F& f) const {
      if (!exists) return;
      const int64 step = group.num_threads(), edge = view.edge_class(group.thread_rank());
#pragma unroll 1
      for (int64 v = group.thread_rank(); v < view.vectors; v += step) f.template write<kVecSize>(view.first(v));
      if (edge >= 0) f.template write<1>(edge);
    }

   private:
    template <class F>
    __device__ __forceinline__ void visit(F& f) const {
      const int64 step = group.num_threads(), edge = view.edge_class(group.thread_rank());
#pragma unroll 1
      for (int64 v = group.thread_rank(); v < view.vectors; v += step * kVectors) {
        Pack<Input, kVecSize> of_x[kVectors];
        Pack<Target, kVecSize> of_t[kVectors];
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
          if (!active || v + k * step >= view.vectors) continue;
          of_x[k] = load_stream<kVecSize>(x + view.first(v + k * step));
          if constexpr (F::kReadsTargets) of_t[k] = load_stream<kVecSize>(t + view.first(v + k * step));
        }
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
          if (v + k * step < view.vectors) f(view.first(v + k * step), of_x[k], of_t[k]);
        }
      }
      if (edge < 0) return;
      Pack<Input, 1> of_x;
      Pack<Target, 1> of_t;
      if (active) {
        of_x = load_stream<1>(x + edge);
        of_t = load_stream<1>(t + edge);
      }
      f(edge, of_x, of_t);
    }
  };
};
