// Sums over some dimensions of a loss; the others are kept.
//
//   y[m] = sum over r of loss[m, r] / divisor                             m: index of the kept dimensions, "outputs"
//   g[m] = sum over r of grad_output[m, r] * d loss / d x_k [m, r]        r: index of the reduced dimensions
//            / divisor
//
// y is the value of a loss that is reduced over given dimensions. g is the gradient of a broadcast operand that is not
// summed beside the value (pointwise.cuh): m are its elements, r the dimensions along which it was broadcast.
//
// 1. The index space of r is cut into `slices` of `slice_length`, so that few outputs still fill the GPU.
// 2. A warp takes a slice of some outputs. Two mappings, by which of m and r is innermost in memory
//    (engines/pointwise/layout.py):
//   kColumns   lanes along m: consecutive lanes read consecutive addresses of consecutive outputs. With few outputs
//              some of the lanes share the terms instead.
//   otherwise  lanes along r: one output per warp, or per part of a warp where slices are short
//    With few outputs and long slices all warps of a block share the terms of an output. A lane takes kVecSize
//    neighbours along its direction at once if they are contiguous. A butterfly adds the lanes of an output, shared
//    memory its warps. The components of an operand are a dimension of m, along which other streams have the stride
//    0; a stream of its own counts them.
// 3. With one slice the result is stored at once. With several, partials[slice * outputs + m] holds the sums, and a
//    second launch (combine_slices) adds them in order.
//
// Order of additions: a lane adds in double, terms one by one (along m) or vectors of them (along r), which it adds as
// a tree in Compute; then the butterfly, then warps in order, then slices by a fixed tree. All of it follows from the
// sizes, never from the grid. These terms have signs and cancel: float runs as long as in pointwise.cuh lost digits
// that PyTorch keeps. A tree of at most 8 terms loses no more than the rounding of the terms themselves, and a
// conversion to double costs as much as eight additions. Along m a tree of the terms in flight cost half of the warps
// their registers.
//
// Traffic: each element of the index space is read once. Preconditions: stated at each function.
#pragma once
#include "pointwise/pointwise.cuh"

constexpr int kMostTerms = 4;       // loads in flight, in terms ...
constexpr int kMostTermWords = 60;  // ... as long as they take no more registers
constexpr int kValue = -1;          // in place of a slot: the terms are values
constexpr int kMostWarps = 8;       // engines/pointwise/layout.py: MAX_THREADS / WARP

// The component whose derivative a sum is over, of an operand that has several.
template <bool kSeveral>
struct ChosenComponent {
  int64 component;
};
template <>
struct ChosenComponent<false> {};

// The tangent in one of several neighbouring slots, which differs between lanes.
template <int kFirst, int kCount, class T, unsigned kMask>
__device__ __forceinline__ T chosen_tangent(const Dual<T, kMask>& y, int64 component) {
  T tangent = tangent_or_zero(y, kFirst);
#pragma unroll
  for (int i = 1; i < kCount; ++i) tangent = component == i ? tangent_or_zero(y, kFirst + i) : tangent;
  return tangent;
}

template <class Sources, int kSlot>
struct OperandAt {
  static constexpr int kFirst = first_slot(kSlot, static_cast<const Sources*>(nullptr));
  static constexpr int kComponents = ElementOf<typename TypeAt<kSlot, Sources>::Storage, void>::kComponents;
};
template <class Sources>
struct OperandAt<Sources, kValue> {
  static constexpr int kFirst = 0, kComponents = 0;
};

template <class Loss_, class Sources_, class Element_, int kSlot_, int kKeptRank_, int kReducedRank_, int kVecSize_>
struct SumOver {
  using Loss = Loss_;
  using Compute = typename Loss::Compute;
  using Slots = typename MakeIndices<Sources_::kSize>::type;
  static constexpr int kVecSize = kVecSize_;
  static constexpr int kOperands = Sources_::kSize;
  static constexpr int kComponents = OperandAt<Sources_, kSlot_>::kComponents;
  static constexpr bool kSeveral = kComponents > 1;
  static constexpr int kStreams = kOperands + 2 + kSeveral;  // operands, grad_output, components, the result
  static constexpr int kElementStream = kOperands;
  static constexpr int kComponentStream = kOperands + 1;
  static constexpr int kResultStream = kStreams - 1;
  static constexpr unsigned kMask = ((1u << kComponents) - 1u) << OperandAt<Sources_, kSlot_>::kFirst;
  template <int kSlot>
  using Wide = typename ElementOf<typename TypeAt<kSlot, Sources_>::Storage, Compute>::Wide;
  static constexpr bool kScaledPerElement = IsSource<Element_>::value;

  Loss loss;
  Sources_ sources;
  Element_ element;
  const Dimensions<kStreams, kKeptRank_>& kept;  // kernel parameters: copies would go to local memory
  const Dimensions<kStreams, kReducedRank_>& reduced;

  // kVecSize neighbouring terms of a sum.
  struct Terms : ChosenComponent<kSeveral> {
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
    if constexpr (kSeveral) terms.component = at[kComponentStream];
  }

  template <int... kSlot>
  __device__ __forceinline__ Compute evaluate(const Terms& terms, int lane, Indices<kSlot...>) const {
    Compute value, derivative;
    bool settled = false;
    if constexpr (Loss::kTriedFirst) {
      if (loss.usual()) {
        differentiate<kTentative>(terms, lane, value, derivative, Slots{});
        settled = is_finite(value);
      }
    }
    if (!settled) differentiate<0u>(terms, lane, value, derivative, Slots{});
    if constexpr (kSlot_ == kValue) return value;
    const Compute d = value != value ? value : derivative;  // as in pointwise.cuh
    if constexpr (kScaledPerElement) return d * terms.grad_output.template element<Compute>(lane);
    return d;
  }

  template <unsigned kMode, int... kSlot>
  __device__ __forceinline__ void differentiate(const Terms& terms, int lane, Compute& value, Compute& derivative,
                                                Indices<kSlot...>) const {
    const auto y = loss(element_variable<kMask | kMode, OperandAt<Sources_, kSlot>::kFirst>(
        get<kSlot>(terms.operands).template element<Wide<kSlot>>(lane))...);
    value = y.value;
    constexpr int kFirst = OperandAt<Sources_, kSlot_>::kFirst;
    if constexpr (kSlot_ == kValue) {
      derivative = 0;
    } else if constexpr (kSeveral) {
      derivative = chosen_tangent<kFirst, kComponents>(y, terms.component);
    } else {
      derivative = tangent_or_zero(y, kFirst);
    }
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

// With kShared, `lanes` lanes of a warp, and `warps` warps of a block, take terms of an output in turn; the other lanes
// and warps have other outputs. Without, an output has a lane (kColumns) or a warp: as constants they take a third
// fewer registers. Preconditions: every thread of every block calls it once. blockDim.x is 32 * kMostWarps; `lanes` is
// a power of two up to 32; `warps` is 1 or kMostWarps. If kVecSize > 1, it divides `outputs` (kColumns) or `length` and
// `slice_length`.
template <bool kColumns, bool kShared, class Program, class Storage, class Result>
__device__ __forceinline__ void sum_slices(const Program& program, const Deposit<Storage, Result>& deposit,
                                           int64 outputs, int64 length, int64 slices, int64 slice_length,
                                           int64 lanes_shared, int64 warps_shared, double* partials) {
  using Compute = typename Program::Compute;
  constexpr int kStreams = Program::kStreams;
  constexpr int kVecSize = Program::kVecSize;
  // Fewer for a heavy loss in 16 bits, whose elements are computed together without a branch between them.
  constexpr int kCost = Program::Loss::kHeavy < 2 ? Program::Loss::kHeavy : 2;
  constexpr int kMost = kNarrow ? kMostTerms >> kCost : kMostTerms;
  constexpr int kInFlight = vectors_in_flight(kMost, sizeof(typename Program::Terms) / 4, kMostTermWords);
  constexpr int kTotals = kColumns ? kVecSize : 1;
  constexpr int kStep = kColumns ? 1 : kVecSize;
  __shared__ double warp_totals[kShared ? kMostWarps : 1][kShared ? kWarp * kTotals : 1];
  const int lanes = kShared ? static_cast<int>(lanes_shared) : kColumns ? 1 : kWarp;
  const int warps = kShared ? static_cast<int>(warps_shared) : 1;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int lanes_across = kWarp / lanes;
  const int across = kColumns ? lane % lanes_across : lane / lanes;
  const int along = kColumns ? lane / lanes_across : lane % lanes;
  const int share = warp % warps;  // this warp's among those of its outputs
  const int64 stride = static_cast<int64>(lanes) * warps * kStep;
  const int64 bundle_size = lanes_across * kTotals;
  const int64 bundles = (outputs + bundle_size - 1) / bundle_size;
  const int64 at_once = kMostWarps / warps;
  // All warps of a block make equally many rounds, because of the barriers.
  for (int64 first = blockIdx.x * at_once; first < bundles * slices; first += gridDim.x * at_once) {
    const int64 task = first + warp / warps;
    const int64 slice = task / bundles;
    const int64 output = (task - slice * bundles) * bundle_size + across * kTotals;
    const bool active = slice < slices && output < outputs;
    const int64 end = active ? min((slice + 1) * slice_length, length) : 0;
    int64 base[kStreams];
    program.kept.offsets(active ? output : 0, base);
    double total[kTotals] = {};
    for (int64 r = slice * slice_length + (share * lanes + along) * kStep; r < end; r += kInFlight * stride) {
      typename Program::Terms terms[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        // Lanes behind the end load the first terms instead, so that loads need no branch. The result is dropped.
        int64 at[kStreams];
        program.reduced.offsets(r + i * stride < end ? r + i * stride : 0, at);
#pragma unroll
        for (int s = 0; s < kStreams; ++s) at[s] += base[s];
        program.load_terms(at, terms[i]);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        if (r + i * stride >= end) continue;
        if constexpr (kColumns) {
#pragma unroll
          for (int v = 0; v < kVecSize; ++v) total[v] += program.evaluate(terms[i], v);
        } else {
          Compute term[kVecSize];
#pragma unroll
          for (int v = 0; v < kVecSize; ++v) term[v] = program.evaluate(terms[i], v);
          total[0] += sum_tree(term);
        }
      }
    }
    // Lanes whose first term lies behind the end have skipped the loop: converge before the shuffles.
    __syncwarp();
    for (int offset = kColumns ? lanes_across : 1; offset < (kColumns ? kWarp : lanes); offset *= 2) {
#pragma unroll
      for (int v = 0; v < kTotals; ++v) total[v] += __shfl_xor_sync(0xffffffffu, total[v], offset);
    }
    if constexpr (kShared) {
      if (warps > 1) {
        __syncthreads();  // the sums of the round before have been read
        if (along == 0) {
#pragma unroll
          for (int v = 0; v < kTotals; ++v) warp_totals[warp][across * kTotals + v] = total[v];
        }
        __syncthreads();
        if (along == 0 && share == 0) {
          for (int w = 1; w < kMostWarps; ++w) {
#pragma unroll
            for (int v = 0; v < kTotals; ++v) total[v] += warp_totals[w][across * kTotals + v];
          }
        }
      }
    }
    if (!active || along != 0 || share != 0) continue;
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
