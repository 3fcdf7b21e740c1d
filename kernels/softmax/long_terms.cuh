// Rows with a target per class that are too long for what is on chip: they are read three times, or twice without
// gradients.
#pragma once
#include "softmax/row_terms.cuh"

template <int kLanes, int kVectors>
struct LongTerms {
  template <class Program, class Unit>
  struct Classes {
    static constexpr bool kDense = true;
    using Input = typename Program::Input;
    using Target = typename Program::Target;

    const Unit& unit;
    const typename Program::template View<kLanes> view;
    typename PointerTo<Input>::type x;
    typename PointerTo<Target>::type t;
    bool exists;
    bool counts;

    __device__ __forceinline__ Classes(const Program& program, const Unit& unit, const int64 (&offset)[kRowStreams],
                                       bool exists)
        : unit(unit),
          view(program.input, offset[kLogits], program.space.classes),
          x(program.logits(offset)),
          t(program.targets_of(offset)),
          exists(exists),
          counts(exists && program.counts(offset)) {
    }
    __device__ __forceinline__ void look_ahead() const {
    }

    template <class F>
    __device__ __forceinline__ void each(F& f) const {
      if (counts) visit(f);
    }
    template <class F>
    __device__ __forceinline__ void last(F& f) const {
      each(f);
    }
    template <class F>
    __device__ __forceinline__ void last_all(const F& f) const {
      if (exists) visit(f);
    }

   private:
    template <class F>
    __device__ __forceinline__ void visit(F& f) const {
      const int64 step = unit.count(), single = view.end(unit.index());
#pragma unroll 1
      for (int64 v = unit.index(); v < view.vectors; v += step * kVectors) {
        Pack<Input, kLanes> of_x[kVectors];
        Pack<Target, kLanes> of_t[kVectors];
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
          if (!counts || v + k * step >= view.vectors) continue;
          of_x[k] = load_stream<kLanes>(x + view.first(v + k * step));
          if constexpr (F::kReadsTargets) of_t[k] = load_stream<kLanes>(t + view.first(v + k * step));
        }
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
          if (v + k * step < view.vectors) f(view.first(v + k * step), of_x[k], of_t[k]);
        }
      }
      if (single < 0) return;
      Pack<Input, 1> of_x;
      Pack<Target, 1> of_t;
      if (counts) {
        of_x = load_stream<1>(x + single);
        of_t = load_stream<1>(t + single);
      }
      f(single, of_x, of_t);
    }
  };
};
