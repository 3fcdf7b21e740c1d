// Sums over some dimensions of a loss; the others are kept.
//
//   y[m] = sum over r of loss[m, r] / divisor                             m: index of the kept dimensions, "outputs"
//   g[m] = sum over r of grad_output[m, r] * d loss / d x_k [m, r]        r: index of the reduced dimensions
//            / divisor
//
// y is the value of a loss that is reduced over given dimensions. g is the gradient of a broadcast operand that is not
// summed together with the value (pointwise.cuh): m are its elements, r the dimensions along which it was broadcast.
//
// 1. The index space of r is divided into `slices` of `slice_length`, so that few outputs still fill the GPU.
// 2. A warp processes a slice of some outputs. There are two mappings, depending on which of m and r is innermost in
//    memory (engines/pointwise/layout.py):
//   kColumns   lanes along m: consecutive lanes read consecutive addresses of consecutive outputs. With few outputs,
//              some of the lanes share the terms of an output instead.
//   otherwise  lanes along r: one output per warp, or per part of a warp if slices are short
//    With few outputs and long slices, all warps of a block share the terms of an output. A lane reads kVecSize
//    neighbours along its direction at once if they are contiguous. A tree of shuffles adds the lanes of an output, and
//    shared memory its warps. The components of an operand are a dimension of m, along which the other streams have
//    stride 0; an extra stream counts them.
//    With kRagged, rows (the innermost dimension of that direction) have any length and begin at any address. The first
//    vector of a row begins with it, and the last one may lack elements. Vectors are cut out of the aligned words that
//    they touch (Access::kRagged). The direction is counted in vectors; an extra stream holds the position of each
//    vector's first element in its row.
// 3. With one slice, the result is stored at once. With several, partials[slice * outputs + m] holds the partial sums,
//    and a second launch (combine_slices) adds them in order.
//
// Order of additions: a lane adds in double, either single terms (along m) or vectors of terms (along r), which it
// first adds as a tree in Compute. Then lanes are added as a tree, warps in order, and slices by a fixed tree. All of
// this follows from the sizes, never from the grid. These terms have signs and cancel: float runs as long as those of
// pointwise.cuh lost digits that PyTorch keeps. A tree of at most 8 terms loses no more than the rounding of the terms
// themselves, and a conversion to double costs as much as eight additions. Along m, a sum of the terms in flight took
// so many registers that half of the warps were lost; in 16 bits, there are enough (kRuns).
//
// Traffic: each element of the index space is read once. Preconditions: stated at each function.
#pragma once
#include "pointwise/pointwise.cuh"

constexpr int kMostTerms = 4;         // maximum number of terms in flight ...
constexpr int kMostTermWords = 60;    // ... as long as they take no more registers
constexpr int kMostRaggedWords = 80;  // with kRagged; a quarter of them are padding
constexpr int kValue = -1;            // instead of a slot: the terms are values
constexpr int kMostWarps = 8;         // engines/pointwise/layout.py: MAX_THREADS / WARP

// Component of the operand whose derivative is summed; empty if the operand has one component.
template <bool kSeveral>
struct ChosenComponent {
  int64 component;
};
template <>
struct ChosenComponent<false> {};

// Tangent in one of several neighbouring slots. The choice differs between lanes.
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
  template <int kVecSize>
  using LoadedVector = typename LoadedOf<TypeAt<kSlot, Sources>, kVecSize>::type;
};
template <class Sources>
struct OperandAt<Sources, kValue> {
  static constexpr int kFirst = 0, kComponents = 0;
  template <int kVecSize>
  using LoadedVector = Absent;
};

// Loaded vectors of all sources except source kBut.
template <int kBut, int kVecSize, class Sources, class Slots>
struct LoadedButFor;
template <int kBut, int kVecSize, class Sources, int... kSlot>
struct LoadedButFor<kBut, kVecSize, Sources, Indices<kSlot...>> {
  using type = Tuple<Choose<kSlot == kBut, Absent, typename LoadedOf<TypeAt<kSlot, Sources>, kVecSize>::type>...>;
};

// With kRagged: number of elements of a row, and extent of each stream in memory, in elements, with the gaps between
// rows.
template <int kStreams, bool kRagged>
struct Rows {
  int64 length, sizes[kStreams];

  __device__ __forceinline__ int64 size(int stream) const {
    return sizes[stream];
  }
};
template <int kStreams>
struct Rows<kStreams, false> {
  __device__ __forceinline__ int64 size(int) const {
    return 0;
  }
};

template <class Loss_, class Sources_, class Element_, int kSlot_, int kKeptRank_, int kReducedRank_, int kVecSize_,
          bool kRagged_ = false>
struct SumOver {
  using Loss = Loss_;
  using Compute = typename Loss::Compute;
  using Slots = typename MakeIndices<Sources_::kSize>::type;
  static constexpr int kVecSize = kVecSize_;
  static constexpr int kOperands = Sources_::kSize;
  static constexpr int kComponents = OperandAt<Sources_, kSlot_>::kComponents;
  static constexpr bool kSeveral = kComponents > 1, kRagged = kRagged_;
  static_assert(!(kSeveral && kRagged), "a stream counts components or elements of a row");
  static constexpr int kStreams = kOperands + 2 + (kSeveral || kRagged);  // operands, grad_output, a count, the result
  static constexpr int kElementStream = kOperands;
  static constexpr int kCountStream = kOperands + 1;  // counts components, or elements of a row
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
  const Rows<kStreams, kRagged>& rows;

  // kVecSize neighbouring terms of a sum, without the elements that all terms share.
  struct Terms : ChosenComponent<kSeveral> {
    typename LoadedButFor<kSlot_, kVecSize, Sources_, Slots>::type operands;
    typename LoadedElement<Element_, kVecSize>::type grad_output;
  };
  // Elements of the operand whose gradient is summed. All terms of an output share them.
  using Shared = typename OperandAt<Sources_, kSlot_>::template LoadedVector<kVecSize>;

  // Number of elements of a vector that exist.
  __device__ __forceinline__ int present(const int64 (&at)[kStreams]) const {
    if constexpr (kRagged) {
      return static_cast<int>(min(rows.length - at[kCountStream], static_cast<int64>(kVecSize)));
    } else {
      return kVecSize;
    }
  }

  // True if no array ends within the words that contain elements of a vector.
  __device__ __forceinline__ bool in_words(const int64 (&at)[kStreams]) const {
    return in_words(at, Slots{});
  }

  // Preconditions of all loads: `count` elements exist, at least one; kInWords requires in_words().
  __device__ __forceinline__ void load_shared(const int64 (&at)[kStreams], int count, Shared& shared) const {
    if constexpr (kSlot_ != kValue) {
      shared = ::load_present<kVecSize, false>(get<kSlot_>(sources), at[kSlot_], count);
      shared.settle();
    }
  }
  template <bool kInWords>
  __device__ __forceinline__ void load_terms(const int64 (&at)[kStreams], int count, Terms& terms) const {
    load_terms<kInWords>(at, count, terms, Slots{});
  }
  // Shifts vectors that were loaded unaligned. Precondition: called once, before the terms are evaluated.
  __device__ __forceinline__ void settle(Terms& terms) const {
    settle(terms, Slots{});
  }
  __device__ __forceinline__ Compute evaluate(const Terms& terms, const Shared& shared, int lane) const {
    return evaluate(terms, shared, lane, Slots{});
  }

 private:
  template <class S>
  __device__ __forceinline__ bool ends_behind(const S&, int64 offset, int stream) const {
    if constexpr (S::kAccess == Access::kRagged) {
      constexpr int kWordElements = 16 / static_cast<int>(sizeof(typename S::Storage));
      return offset + kVecSize + kWordElements <= rows.size(stream);
    } else {
      return true;
    }
  }
  template <int... kSlot>
  __device__ __forceinline__ bool in_words(const int64 (&at)[kStreams], Indices<kSlot...>) const {
    bool inside = ((kSlot == kSlot_ || ends_behind(get<kSlot>(sources), at[kSlot], kSlot)) && ...);
    if constexpr (kScaledPerElement) inside &= ends_behind(element, at[kElementStream], kElementStream);
    return inside;
  }

  template <bool kInWords, int kSlot>
  __device__ __forceinline__ void load_operand(const int64 (&at)[kStreams], int count, Terms& terms) const {
    if constexpr (kSlot != kSlot_) {
      get<kSlot>(terms.operands) = ::load_present<kVecSize, kInWords>(get<kSlot>(sources), at[kSlot], count);
    }
  }
  template <bool kInWords, int... kSlot>
  __device__ __forceinline__ void load_terms(const int64 (&at)[kStreams], int count, Terms& terms,
                                             Indices<kSlot...>) const {
    (load_operand<kInWords, kSlot>(at, count, terms), ...);
    if constexpr (kScaledPerElement) {
      terms.grad_output = ::load_present<kVecSize, kInWords>(element, at[kElementStream], count);
    }
    if constexpr (kSeveral) terms.component = at[kCountStream];
  }

  template <int kSlot>
  __device__ __forceinline__ void settle_operand(Terms& terms) const {
    if constexpr (kSlot != kSlot_) get<kSlot>(terms.operands).settle();
  }
  template <int... kSlot>
  __device__ __forceinline__ void settle(Terms& terms, Indices<kSlot...>) const {
    (settle_operand<kSlot>(terms), ...);
    if constexpr (kScaledPerElement) terms.grad_output.settle();
  }

  template <int kSlot>
  __device__ __forceinline__ auto element_of(const Terms& terms, const Shared& shared, int lane) const {
    if constexpr (kSlot == kSlot_) {
      return shared.template element<Wide<kSlot>>(lane);
    } else {
      return get<kSlot>(terms.operands).template element<Wide<kSlot>>(lane);
    }
  }

  template <int... kSlot>
  __device__ __forceinline__ Compute evaluate(const Terms& terms, const Shared& shared, int lane,
                                              Indices<kSlot...>) const {
    Compute value, derivative;
    bool settled = false;
    if constexpr (Loss::kTriedFirst) {
      if (loss.usual()) {
        differentiate<kTentative>(terms, shared, lane, value, derivative, Slots{});
        settled = is_finite(value);
      }
    }
    if (!settled) differentiate<0u>(terms, shared, lane, value, derivative, Slots{});
    if constexpr (kSlot_ == kValue) return value;
    const Compute d = value != value ? value : derivative;  // as in pointwise.cuh
    if constexpr (kScaledPerElement) return d * terms.grad_output.template element<Compute>(lane);
    return d;
  }

  template <unsigned kMode, int... kSlot>
  __device__ __forceinline__ void differentiate(const Terms& terms, const Shared& shared, int lane, Compute& value,
                                                Compute& derivative, Indices<kSlot...>) const {
    const auto y = loss(
        element_variable<kMask | kMode, OperandAt<Sources_, kSlot>::kFirst>(element_of<kSlot>(terms, shared, lane))...);
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

// Scales, rounds and stores a finished sum. Values are divided; gradients are multiplied by the inverse, which is 0
// rather than inf for the mean of nothing.
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

// Sums each slice of each output, and stores the results, or partial sums of several slices. With kShared,
// `lanes_shared` lanes of a warp and `warps_shared` warps of a block take turns at the terms of an output; other lanes
// and warps have other outputs. Without kShared, an output has one lane (kColumns) or one warp: as constants, these
// numbers save a third of the registers. With kRagged, `outputs` (kColumns) or `length` and `slice_length` count
// vectors, and partial sums of outputs that do not exist have places too: partials is [slices][outputs][kVecSize].
// Preconditions: every thread of every block calls it once. blockDim.x is 32 * kMostWarps; `lanes_shared` is up to 32,
// a power of two unless kColumns; `warps_shared` is 1 or kMostWarps. If kVecSize > 1 without kRagged, it divides
// `outputs` (kColumns) or `length` and `slice_length`.
template <bool kColumns, bool kShared, class Program, class Storage, class Result>
__device__ __forceinline__ void sum_slices(const Program& program, const Deposit<Storage, Result>& deposit,
                                           int64 outputs, int64 length, int64 slices, int64 slice_length,
                                           int64 lanes_shared, int64 warps_shared, double* partials) {
  using Compute = typename Program::Compute;
  constexpr int kStreams = Program::kStreams;
  constexpr int kVecSize = Program::kVecSize;
  // Fewer terms for a heavy loss in 16 bits, whose elements are evaluated together, without a branch between them.
  constexpr int kCost = Program::Loss::kHeavy < 2 ? Program::Loss::kHeavy : 2;
  constexpr int kMost = kNarrow ? kMostTerms >> kCost : kMostTerms;
  constexpr int kInFlight = vectors_in_flight(kMost, sizeof(typename Program::Terms) / 4,
                                              Program::kRagged ? kMostRaggedWords : kMostTermWords);
  constexpr int kTotals = kColumns ? kVecSize : 1;
  constexpr bool kRuns = kNarrow && kVecSize > 1;            // adds terms in flight in Compute first
  constexpr int kCounted = Program::kRagged ? 1 : kVecSize;  // outputs or terms that a vector counts for
  constexpr int kStep = kColumns ? 1 : kCounted;
  __shared__ double warp_totals[kShared ? kMostWarps : 1][kShared ? kWarp * kTotals : 1];
  const int lanes = kShared ? static_cast<int>(lanes_shared) : kColumns ? 1 : kWarp;
  const int warps = kShared ? static_cast<int>(warps_shared) : 1;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int lanes_across = kWarp / lanes;
  const int across = kColumns ? lane % lanes_across : lane / lanes;
  const int along = kColumns ? lane / lanes_across : lane % lanes;
  const int share = warp % warps;  // index of this warp among those that share its outputs
  const int64 stride = static_cast<int64>(lanes) * warps * kStep;
  const int64 bundle_size = lanes_across * (kColumns ? kCounted : 1);
  const int64 bundles = (outputs + bundle_size - 1) / bundle_size;
  const int64 at_once = kMostWarps / warps;
  // All warps of a block run the same number of rounds, because of the barriers.
  for (int64 first = blockIdx.x * at_once; first < bundles * slices; first += gridDim.x * at_once) {
    const int64 task = first + warp / warps;
    const int64 slice = task / bundles;
    const int64 output = (task - slice * bundles) * bundle_size + across * (kColumns ? kCounted : 1);
    // Leftover lanes have no output.
    const bool active = slice < slices && output < outputs && along < lanes;
    const int64 end = active ? min((slice + 1) * slice_length, length) : 0;
    int64 base[kStreams];
    program.kept.offsets(active ? output : 0, base);
    const int present = program.present(base);  // outputs of the vector that exist
    typename Program::Shared shared;
    program.load_shared(base, present, shared);
    double total[kTotals] = {};
    const auto add = [&](const typename Program::Terms& terms, int terms_present, Compute(&run)[kTotals]) {
      if constexpr (kColumns) {
#pragma unroll
        for (int v = 0; v < kVecSize; ++v) {
          if constexpr (kRuns) {
            run[v] += program.evaluate(terms, shared, v);
          } else {
            total[v] += program.evaluate(terms, shared, v);
          }
        }
      } else {
        Compute term[kVecSize];
#pragma unroll
        for (int v = 0; v < kVecSize; ++v) {
          const Compute summand = program.evaluate(terms, shared, v);
          term[v] = !Program::kRagged || v < terms_present ? summand : Compute(0);
        }
        total[0] += sum_tree(term);
      }
    };
    const auto end_run = [&](const Compute(&run)[kTotals]) {
      if constexpr (kColumns && kRuns) {
#pragma unroll
        for (int v = 0; v < kVecSize; ++v) total[v] += run[v];
      }
    };
    const auto locate = [&](int64 term, int64(&at)[kStreams]) {
      program.reduced.offsets(term, at);
      const int terms_present = kColumns ? present : program.present(at);
#pragma unroll
      for (int s = 0; s < kStreams; ++s) at[s] += base[s];
      return terms_present;
    };
    int64 r = slice * slice_length + (share * lanes + along) * kStep;
    if constexpr (Program::kRagged) {
      // Between loads there must be no branch: the compiler would wait there for loaded data. Therefore batches are
      // whole. The rest of the slice, and vectors near the end of an array, are processed one by one.
      for (; r + (kInFlight - 1) * stride < end; r += kInFlight * stride) {
        int64 at[kInFlight][kStreams];
        int terms_present[kInFlight];
        bool in_words = true;
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          terms_present[i] = locate(r + i * stride, at[i]);
          in_words &= program.in_words(at[i]);
        }
        if (!in_words) break;
        typename Program::Terms terms[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) program.template load_terms<true>(at[i], terms_present[i], terms[i]);
        Compute run[kTotals] = {};
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          program.settle(terms[i]);
          add(terms[i], terms_present[i], run);
        }
        end_run(run);
      }
#pragma unroll 1
      for (; r < end; r += stride) {
        int64 at[kStreams];
        const int terms_present = locate(r, at);
        typename Program::Terms terms;
        if (program.in_words(at)) {
          program.template load_terms<true>(at, terms_present, terms);
          program.settle(terms);
        } else {
          program.template load_terms<false>(at, terms_present, terms);
        }
        Compute run[kTotals] = {};
        add(terms, terms_present, run);
        end_run(run);
      }
    } else {
      for (; r < end; r += kInFlight * stride) {
        typename Program::Terms terms[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          // Lanes past the end load the first terms instead, so that loads need no branch. Their results are dropped.
          int64 at[kStreams];
          const int terms_present = locate(r + i * stride < end ? r + i * stride : 0, at);
          program.template load_terms<true>(at, terms_present, terms[i]);
        }
        Compute run[kTotals] = {};
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          if (r + i * stride < end) add(terms[i], kVecSize, run);
        }
        end_run(run);
      }
    }
    // Lanes whose first term is past the end have skipped the loop: converge before the shuffles.
    __syncwarp();
    for (int step = 1; step < lanes; step *= 2) {
      const int offset = kColumns ? step * lanes_across : step;
#pragma unroll
      for (int v = 0; v < kTotals; ++v) {
        const double other = __shfl_down_sync(0xffffffffu, total[v], offset);
        total[v] += along + step < lanes ? other : 0.0;
      }
    }
    if constexpr (kShared) {
      if (warps > 1) {
        __syncthreads();  // the sums of the previous round have been read
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
    const int64 place = (slice * outputs + output) * (kTotals / (kColumns ? kCounted : 1));
#pragma unroll
    for (int v = 0; v < kTotals; ++v) {
      if (slices > 1) {
        partials[place + v] = total[v];
      } else if (!Program::kRagged || !kColumns || v < present) {
        deposit.store(base[Program::kResultStream] + v, total[v]);
      }
    }
  }
}

// Computes g[m] from its slices, with one warp per output: few outputs have many slices. Preconditions: `outputs`,
// `slices` and `partials` are those of sum_slices; blockDim.x is a multiple of 32.
template <bool kColumns, class Program, class Storage, class Result>
__device__ __forceinline__ void combine_slices(const Program& program, const Deposit<Storage, Result>& deposit,
                                               int64 outputs, int64 slices, const double* partials) {
  constexpr int kPlaces = Program::kRagged && kColumns ? Program::kVecSize : 1;  // outputs of a vector
  const int lane = threadIdx.x % kWarp;
  const int64 warps = static_cast<int64>(gridDim.x) * (blockDim.x / kWarp), places = outputs * kPlaces;
  for (int64 m = global_warp(); m < places; m += warps) {
    int64 base[Program::kStreams];
    program.kept.offsets(m / kPlaces, base);
    const int place = static_cast<int>(m % kPlaces);
    if (kPlaces > 1 && place >= program.present(base)) continue;
    const double total = warp_sum(sum_every(partials + m, lane * places, kWarp * places, slices * places));
    if (lane == 0) deposit.store(base[Program::kResultStream] + place, total);
  }
}
