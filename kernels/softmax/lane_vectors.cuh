// Rows in registers for second derivatives: the vectors of each lane, and the largest logit of a row.
//
// A row is shared by `width` neighbouring lanes of a warp, or by one lane of each of `width` warps (ColumnWarps). The
// thread of rank l holds the vectors l, width + l, ... of the row, at most kHeld, and at most one edge element.
//
// Traffic: that of the functors. Preconditions: vectors are aligned in the results, and in the operands too unless
// kShifted; rows may be strided if a vector is a single class.
#pragma once
#include "softmax/second_derivatives.cuh"

// kEdges: rows may have single elements at their ends. kPartial: some lanes have fewer than kHeld vectors.
// Precondition: every lane has at least kHeld - 1 vectors, unless rows have edges.
template <class Storage, int kVecSize, int kHeld, bool kEdges, bool kPartial>
struct LaneVectors {
  const RowVectors<Storage, kVecSize, int> view;
  const int rank, width, edge;

  // Precondition: `offset` is the offset of the row in the results.
  template <class Group>
  __device__ __forceinline__ LaneVectors(const Group& group, const Storage* results, int64 offset, int64 classes)
      : view(results, offset, static_cast<int>(classes)),
        rank(group.thread_rank()),
        width(group.num_threads()),
        edge(kEdges ? view.edge_class(rank) : -1) {
  }
  // Calls f(first, pack) for each vector of this lane, with its pack in `held`, and for its edge element, whose
  // one-class pack is `single`.
  template <class Pack, class Single, class F>
  __device__ __forceinline__ void for_each(Pack (&held)[kHeld], Single& single, F& f) const {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const bool certain = !kPartial || (!kEdges && k + 1 < kHeld);
      if (certain || rank + k * width < view.vectors) f(view.first(rank + k * width), held[k]);
    }
    if (kEdges && edge >= 0) f(edge, single);
  }
};

// Loads kCount neighbouring classes of a row, starting at class `first`. Only single classes have a `step`.
template <int kCount, bool kShifted, class Storage>
__device__ __forceinline__ Pack<Storage, kCount> load_of_lane(const Storage* row, int64 step, int first) {
  if constexpr (kCount == 1) return load_stream<1>(row + first * step);
  const Storage* const at = row + first;
  if constexpr (kShifted) {
    const bool between = reinterpret_cast<unsigned long long>(at) % sizeof(Pack<Storage, kCount>) != 0;
    if (between) return load_by_words<kCount>(at);
  }
  return load_stream<kCount>(at);
}

// A logit, the largest of some classes, and its tangent.
template <class T>
struct MaxWithTangent {
  T logit, tangent;
};

// Functors for LaneVectors::for_each on packs with logits x and tangents v. LargestLogit finds the largest logit; then
// LargestTangent finds the largest tangent among the logits that are equal to it.
template <class T>
struct LargestLogit {
  T logit = -scalar_infinity(T());

  template <class Pack>
  static __device__ __forceinline__ T of(const Pack& pack) {
    RunningMax<T, typename Pack::Input, Pack::kCount> running;
    running.add(pack.x);
    return running.get();
  }
  template <class Pack>
  __device__ __forceinline__ void operator()(int, const Pack& pack) {
    logit = max_ignoring_nan(logit, of(pack));
  }
};
template <class T>
struct LargestTangent {
  MaxWithTangent<T> max;

  template <class Pack>
  __device__ __forceinline__ void operator()(int, const Pack& pack) {
    // Rare: usually only one pack of a row has the largest logit.
    if (!(LargestLogit<T>::of(pack) == max.logit)) return;
    T x[Pack::kCount], v[Pack::kCount];
    unpack(pack.x, x);
    unpack(pack.v, v);
#pragma unroll
    for (int i = 0; i < Pack::kCount; ++i) {
      if (x[i] == max.logit) max.tangent = max_ignoring_nan(max.tangent, v[i]);
    }
  }
};

// Finds the largest logit of a row, and its tangent, among the packs of the threads that share the row. Preconditions:
// those of row_reduce; `active` is the same in all of these threads.
template <class T, class Group, class Lanes, class Pack, int kHeld, class Single>
__device__ __forceinline__ MaxWithTangent<T> largest_of_lanes(const Group& group, const Lanes& lanes,
                                                              Pack (&held)[kHeld], Single& single, bool active) {
  LargestLogit<T> logit;
  if (active) lanes.for_each(held, single, logit);
  T largest[] = {logit.logit};
  row_reduce(group, largest, MaxOp{});
  LargestTangent<T> tangent{{largest[0], -scalar_infinity(T())}};
  if (active) lanes.for_each(held, single, tangent);
  T along[] = {tangent.max.tangent};
  row_reduce(group, along, MaxOp{});
  return {largest[0], along[0]};
}
