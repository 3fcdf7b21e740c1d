// Second derivatives for dense targets with respect to the logits only, rows in memory. Formulas of dense_hvp.cuh.
//
// 1. The lanes of a warp start with the largest logit of their first vectors, so that they rarely find a larger one.
// 2. Each thread reads its part of the row. If a logit m' with tangent t' reaches or exceeds the running maximum m,
//    whose tangent is t, the sums become relative to it. With f = exp(m - m') and d = t - t':
//
//      S' = f S       (sum of e_c u_c)' = f (sum of e_c u_c + d S)       (sum of h_c u_c)' = sum of h_c u_c + d H
//
// 3. Butterfly reductions combine the lanes of a warp, and one all_gather combines the warps of the group.
// 4. Each thread reads logits and tangents of its part again, from L2 as far as they have stayed there, and writes the
//    results.
//
// A group owns a row. Traffic: logits and tangents are read twice, targets once, and not at all with kSkipsSums; each
// result is written once. The first vectors are read once more. Preconditions: those of dense_hvp.cuh; with a kVecSize
// above 1 classes are contiguous.
#pragma once
#include "softmax/dense_hvp.cuh"
#include "softmax/hvp_rows.cuh"

// Returns the larger logit with its tangent; of equal logits, the larger tangent.
template <class T>
__device__ __forceinline__ MaxWithTangent<T> larger_of(MaxWithTangent<T> x, MaxWithTangent<T> y) {
  if (x.logit == y.logit) return {x.logit, max_ignoring_nan(x.tangent, y.tangent)};
  return y.logit > x.logit ? y : x;
}
// Returns the largest logit of `width` neighbouring lanes with its tangent. Preconditions: those of subwarp_reduce.
template <class T>
__device__ __forceinline__ MaxWithTangent<T> largest_of_subwarp(MaxWithTangent<T> x, int width) {
  const T logit = subwarp_reduce(x.logit, width, MaxOp{});
  const T tangent = x.logit == logit ? x.tangent : -scalar_infinity(T());
  return {logit, subwarp_reduce(tangent, width, MaxOp{})};
}

// Sums over a part of a row, relative to the maximum of the part.
template <class T, int kSums>
struct DenseHvpPart {
  MaxWithTangent<T> max;
  T sums[kSums];

  static __device__ __forceinline__ DenseHvpPart empty() {
    return {{-scalar_infinity(T()), T(0)}, {}};
  }
  // Makes the sums relative to another maximum. Precondition: its logit is not smaller.
  __device__ __forceinline__ void move(MaxWithTangent<T> to) {
    const T factor = max.logit == to.logit ? T(1) : exp_nonpositive(max.logit - to.logit);
    const T d = max.tangent - to.tangent;
    sums[kChanged] = factor * (sums[kChanged] + scaled_tangent(sums[kExpSum], d));
    sums[kExpSum] *= factor;
    if constexpr (kSums > kAlong) sums[kAlong] += scaled_tangent(sums[kGradLogP], d);
    max = to;
  }
};
// Combines `other` into `part`.
template <class T, int kSums>
__device__ __forceinline__ void combine(DenseHvpPart<T, kSums>& part, DenseHvpPart<T, kSums> other) {
  const MaxWithTangent<T> max = larger_of(part.max, other.max);
  part.move(max);
  other.move(max);
#pragma unroll
  for (int i = 0; i < kSums; ++i) part.sums[i] += other.sums[i];
}
// Combines the parts of `width` neighbouring lanes, in each of these lanes. Preconditions: those of subwarp_reduce.
template <class T, int kSums>
__device__ __forceinline__ void subwarp_combine(DenseHvpPart<T, kSums>& part, int width) {
  part.move(largest_of_subwarp(part.max, width));
#pragma unroll
  for (int i = 0; i < kSums; ++i) part.sums[i] = subwarp_reduce(part.sums[i], width, AddOp{});
}

// A row in memory. kVecSize: elements of a vector of the results; operands may be aligned differently.
template <class Program, int kVecSize>
struct DenseHvpRow {
  using Input = typename Program::InputStorage;
  using Target = typename Program::TargetStorage;
  static constexpr bool kReadsTargets = !LogitHvp<Program>::kSkipsSums;
  const RowVectors<Input, kVecSize> view;
  HvpRowInMemory<Input, true> logits;
  const Target* const targets;
  const int64 target_step;
  bool vectors_of_targets;  // true if their vectors are aligned where those of the results are

  __device__ __forceinline__ DenseHvpRow(const Program& program, const int64 (&offset)[kRowStreams])
      : view(program.gradients, offset[kGradients], program.space.classes),
        logits{{program.input + offset[kLogits], program.tangents + offset[kGradients],
                program.space.class_stride[kLogits], program.space.class_stride[kGradients]},
               {program.gradients + offset[kGradients], program.space.class_stride[kGradients]},
               false,
               false},
        targets(program.targets + offset[kLabels]),
        target_step(program.space.class_stride[kLabels]) {
    logits.find_vectors(view);
    const unsigned long long first = reinterpret_cast<unsigned long long>(targets + view.head);
    vectors_of_targets = first % sizeof(Pack<Target, kVecSize>) == 0;
  }
  // Loads kCount classes. kLast: they are not read again, and their targets are not needed.
  template <int kCount, bool kLast>
  __device__ __forceinline__ DenseHvpPack<Program, kCount> load(int64 first) const {
    DenseHvpPack<Program, kCount> pack;
    const auto with_tangents = logits.template load<kCount, kLast>(first);
    pack.x = with_tangents.values;
    pack.v = with_tangents.tangents;
    if constexpr (kReadsTargets && !kLast) {
      const Target* const at = targets + (kCount == 1 ? first * target_step : first);
      pack.t = kCount == 1 || vectors_of_targets ? load_stream<kCount>(at) : load_by_words<kCount>(at);
    }
    return pack;
  }
};

template <int kVecSize>
struct DenseHvpReader {
  template <class Group, class Program, class Scale>
  struct Visit {
    static constexpr bool kNeedsNextRow = false;
    using Formulas = LogitHvp<Program>;
    using T = typename Formulas::T;
    using Part = DenseHvpPart<T, Formulas::kSums>;
    using Row = DenseHvpRow<Program, kVecSize>;
    const Program& program;
    const Group& group;
    Scale& scale;

    __device__ __forceinline__ T operator()(int64 row, bool exists, int64, SyncState& sync) const {
      int64 offset[kRowStreams];
      program.space.offsets(exists ? row : 0, offset);
      const bool active = exists && program.active(offset);
      const T factor = exists ? static_cast<typename Formulas::Number>(grad_factor(scale, offset)).value : T(0);
      const Formulas formulas(program);
      const Row classes(program, offset);
      Part part = part_of_thread(formulas, classes, active);
      subwarp_combine(part, group.subwarp_size());
      group_combine(group, part, sync);

      T value = T(0);
      const DenseHvpCoeffs<T> coeffs = formulas.coeffs(part.max, part.sums, factor, value);
      value = store_jvp(program, offset, active, exists && group.thread_rank() == 0, value);
      if (exists) store_results(formulas, classes, active, part.max, coeffs);
      return value;
    }

   private:
    // Sums over the classes of this thread. Precondition: all 32 lanes of a warp call it together.
    __device__ __forceinline__ Part part_of_thread(const Formulas& formulas, const Row& row, bool active) const {
      const int64 rank = group.thread_rank(), step = group.num_threads(),
                  edge = row.view.edge_class(group.thread_rank());
      Part part = Part::empty();
      if (active && rank < row.view.vectors) {
        part.max = largest_of(row.template load<kVecSize, false>(row.view.first(rank)));
      }
      part.max = largest_of_subwarp(part.max, group.subwarp_size());
      if (!active) return part;
#pragma unroll 1
      for (int64 v = rank; v < row.view.vectors; v += step) {
        add(formulas, row.view.first(v), row.template load<kVecSize, false>(row.view.first(v)), part);
      }
      if (edge >= 0) add(formulas, edge, row.template load<1, false>(edge), part);
      return part;
    }
    template <int kCount>
    __device__ __forceinline__ void add(const Formulas& formulas, int64 first, DenseHvpPack<Program, kCount> pack,
                                        Part& part) const {
      // Rare after the first packs. A tie counts too: the largest tangent of equal logits is chosen.
      if (!(program.logit.scale.value * LargestLogit<T>::of(pack) < part.max.logit)) {
        part.move(larger_of(part.max, largest_of(pack)));
      }
      formulas.add(first, part.max, pack, part.sums);
    }
    // Largest logit z of a pack with the tangent of x.
    template <int kCount>
    __device__ __forceinline__ MaxWithTangent<T> largest_of(const DenseHvpPack<Program, kCount>& pack) const {
      LargestTangent<T> largest{{LargestLogit<T>::of(pack), -scalar_infinity(T())}};
      largest(0, pack);
      return {program.logit.scale.value * largest.max.logit, largest.max.tangent};
    }
    // Stores the results of this thread's classes.
    __device__ __forceinline__ void store_results(const Formulas& formulas, const Row& row, bool active,
                                                  const MaxWithTangent<T>& max, const DenseHvpCoeffs<T>& coeffs) const {
      const int64 rank = group.thread_rank(), step = group.num_threads(),
                  edge = row.view.edge_class(group.thread_rank());
      if (edge >= 0) store<1>(formulas, row, edge, active, max, coeffs);
#pragma unroll 1
      for (int64 v = rank; v < row.view.vectors; v += step) {
        store<kVecSize>(formulas, row, row.view.first(v), active, max, coeffs);
      }
    }
    // An inactive row may hold anything, so it is not loaded.
    template <int kCount>
    __device__ __forceinline__ void store(const Formulas& formulas, const Row& row, int64 first, bool active,
                                          const MaxWithTangent<T>& max, const DenseHvpCoeffs<T>& coeffs) const {
      Pack<typename Program::InputStorage, kCount> g{};
      if (active) {
        auto pack = row.template load<kCount, true>(first);
        if constexpr (!Formulas::kSkipsSums) formulas.set_exponentials(max, pack);
        g = formulas.results(first, max, coeffs, pack);
      }
      row.logits.template store<kCount>(first, g);
    }
  };

  // Visits every row once, as TwoPassReader::sweep.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    static_assert(kGradient, "second derivatives");
    for_each_row(group, scale, program.space.rows, chunks, work, Visit<Group, Program, Scale>{program, group, scale});
  }
};
