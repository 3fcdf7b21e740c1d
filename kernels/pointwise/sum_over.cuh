// Sums over some dimensions of a loss; the others are kept.
//
//   y[m] = sum over r of loss[m, r] / divisor                             m: index of the kept dimensions, "outputs"
//   g[m] = sum over r of grad_output[m, r] * d loss / d x_k [m, r]        r: index of the reduced dimensions
//            / divisor
//
// y is the value of a loss that is reduced over given dimensions. g is the gradient of a broadcast operand: m are its
// elements, r the dimensions along which it was broadcast.
//
// 1. The index space of r is cut into `slices` of `slice_length`, so that few outputs still fill the GPU.
// 2. A warp takes a slice of some outputs. Two mappings, by which of m and r is innermost in memory
//    (engines/pointwise/layout.py):
//   kColumns   lanes along m: one output per lane, consecutive lanes read consecutive addresses
//   otherwise  lanes along r: one output per warp, a butterfly adds the lanes
// A lane takes kVecSize neighbours along its direction at once if they are contiguous.
// 3. With one slice the result is stored at once. With several, partials[slice * outputs + m] holds the sums, and a
//    second launch (combine_slices) adds them in order.
//
// Order of additions: a lane adds its terms in order, then the butterfly (lanes along r), then slices by a fixed tree.
// All of it follows from the sizes, never from the grid. Everything is added in double: these terms have signs and
// cancel, and float runs as in pointwise.cuh lost digits that PyTorch keeps.
//
// Warps work independently. Traffic: each element of the index space is read once. Preconditions: stated at each
// function.
#pragma once
#include "pointwise/pointwise.cuh"

constexpr int kMostTerms = 4;       // loads in flight, in terms ...
constexpr int kMostTermWords = 60;  // ... as long as they take no more registers
constexpr int kValue = -1;          // in place of a slot: the terms are values

template <class Loss_, class Sources_, class Element_, int kSlot_, int kRank_, int kVecSize_>
struct SumOver {
  using Loss = Loss_;
  using Compute = typename Loss::Compute;
  using Slots = typename MakeIndices<Sources_::kSize>::type;
  static constexpr int kVecSize = kVecSize_;
  static constexpr int kOperands = Sources_::kSize;
  static constexpr int kStreams = kOperands + 2;  // operands, grad_output, the result
  static constexpr int kElementStream = kOperands;
  static constexpr int kResultStream = kOperands + 1;
  static constexpr unsigned kMask = kSlot_ == kValue ? 0u : 1u << kSlot_;
  static constexpr bool kScaledPerElement = IsSource<Element_>::value;

  Loss loss;
  Sources_ sources;
  Element_ element;
  const Dimensions<kStreams, kRank_>& kept;  // kernel parameters: copies would go to local memory
  const Dimensions<kStreams, kRank_>& reduced;

  // kVecSize neighbouring terms of a sum.
  struct Terms {
    typename LoadedTuple<kVecSize, Sources_>::type operands;
    typename LoadedElement<Element_, kVecSize>::type grad_output;
  };

  __device__ __forceinline__ void load_terms(const int64 (&at)[kStreams], Terms& terms) const {
    load_terms(at, terms, Slots{});
  }
  __device__ __forceinline__ Compute evaluate(const Terms& terms, int lane) const {
    return evaluate(terms, lane, Slots{});
  }

 private:
  template <int... kSlot>
  __device__ __forceinline__ void load_terms(const int64 (&at)[kStreams], Terms& terms, Indices<kSlot...>) const {
    ((get<kSlot>(terms.operands) = ::load<kVecSize>(get<kSlot>(sources), at[kSlot])), ...);
    if constexpr (kScaledPerElement) terms.grad_output = ::load<kVecSize>(element, at[kElementStream]);
  }

  template <int... kSlot>
  __device__ __forceinline__ Compute evaluate(const Terms& terms, int lane, Indices<kSlot...>) const {
    const auto y = loss(variable<kMask, kSlot>(get<kSlot>(terms.operands).template element<Compute>(lane))...);
    if constexpr (kSlot_ == kValue) return y.value;
    const Compute d = y.value != y.value ? y.value : tangent_or_zero(y, kSlot_);  // as in pointwise.cuh
    if constexpr (kScaledPerElement) return d * terms.grad_output.template element<Compute>(lane);
    return d;
  }
};

// Common factors and rounding of a finished sum. Values are divided; gradients are scaled by the inverse, which is 0
// and not inf for the mean of nothing.
template <class Storage, class Result>
struct Deposit {
  Storage* pointer;
  const Result* grad_output;  // null for values, and when grad_output came per element
  double divisor;
  double scale;

  __device__ __forceinline__ void store(int64 offset, double sum) const {
    const double factor = grad_output == nullptr ? scale : scale * widen<double>(*grad_output);
    pointer[offset] = Narrow<Storage>::from(sum * factor / divisor);
  }
};

// Preconditions: blockDim.x is a multiple of 32. If kVecSize > 1, it divides `outputs` (kColumns) or `length` and
// `slice_length`. Warps work independently.
template <bool kColumns, class Program, class Storage, class Result>
__device__ __forceinline__ void sum_slices(const Program& program, const Deposit<Storage, Result>& deposit,
                                           int64 outputs, int64 length, int64 slices, int64 slice_length,
                                           double* partials) {
  constexpr int kStreams = Program::kStreams;
  constexpr int kVecSize = Program::kVecSize;
  // Fewer for a heavy loss in 16 bits, whose elements are computed together without a branch between them.
  constexpr int kMost = kNarrow ? kMostTerms >> Program::Loss::kHeavy : kMostTerms;
  constexpr int kInFlight = vectors_in_flight(kMost, sizeof(typename Program::Terms) / 4, kMostTermWords);
  constexpr int kTotals = kColumns ? kVecSize : 1;
  constexpr int kBundle = kWarp * kTotals;  // outputs of a warp with lanes along them
  constexpr int kStride = kColumns ? 1 : kWarp * kVecSize;
  const int lane = threadIdx.x % kWarp;
  const int64 warps = static_cast<int64>(gridDim.x) * (blockDim.x / kWarp);
  const int64 bundles = kColumns ? (outputs + kBundle - 1) / kBundle : outputs;
  for (int64 task = global_warp(); task < bundles * slices; task += warps) {
    const int64 slice = task / bundles;
    const int64 bundle = task - slice * bundles;
    const int64 output = kColumns ? bundle * kBundle + lane * kTotals : bundle;
    const bool active = output < outputs;
    const int64 end = min((slice + 1) * slice_length, length);
    int64 base[kStreams];
    program.kept.offsets(active ? output : 0, base);
    double total[kTotals] = {};
    for (int64 r = slice * slice_length + (kColumns ? 0 : lane * kVecSize); r < end; r += kInFlight * kStride) {
      typename Program::Terms terms[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        // Lanes behind the end load the first terms instead, so that loads need no branch. The result is dropped.
        int64 at[kStreams];
        program.reduced.offsets(r + i * kStride < end ? r + i * kStride : 0, at);
#pragma unroll
        for (int s = 0; s < kStreams; ++s) at[s] += base[s];
        program.load_terms(at, terms[i]);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (r + i * kStride >= end) continue;
#pragma unroll
        for (int v = 0; v < kVecSize; ++v) total[v % kTotals] += program.evaluate(terms[i], v);
      }
    }
    if (!kColumns) {
      // Lanes whose first term lies behind the end have skipped the loop: converge before the shuffles.
      __syncwarp();
      total[0] = warp_sum(total[0]);
    }
    if (!active || (!kColumns && lane != 0)) continue;
#pragma unroll
    for (int v = 0; v < kTotals; ++v) {
      if (slices > 1) {
        partials[slice * outputs + output + v] = total[v];
      } else {
        deposit.store(base[Program::kResultStream] + v, total[v]);
      }
    }
  }
}

// g[m] from its slices, one warp per output: few outputs have many slices. Preconditions: blockDim.x is a multiple of
// 32.
template <class Program, class Storage, class Result>
__device__ __forceinline__ void combine_slices(const Program& program, const Deposit<Storage, Result>& deposit,
                                               int64 outputs, int64 slices, const double* partials) {
  const int lane = threadIdx.x % kWarp;
  const int64 warps = static_cast<int64>(gridDim.x) * (blockDim.x / kWarp);
  for (int64 m = global_warp(); m < outputs; m += warps) {
    const double total = warp_sum(sum_every(partials + m, lane * outputs, kWarp * outputs, slices * outputs));
    int64 base[Program::kStreams];
    program.kept.offsets(m, base);
    if (lane == 0) deposit.store(base[Program::kResultStream], total);
  }
}
