// Online softmax (Milakov and Gimelshein, arXiv 1805.02867): maximum and sum of exponentials of a row in one read.
//
//   m = max over c of z_c                  S = sum over c of exp(z_c - m)
//   a larger maximum m' arrives            S' = S exp(m - m')
//   two parts a and b of a row             m = max(m_a, m_b),   S = S_a exp(m_a - m) + S_b exp(m_b - m)
//
// 1. Each thread keeps m and S of its classes (OnlineSoftmax), and rescales S when m grows.
// 2. subwarp_combine: a butterfly reduction over the lanes of a subwarp finds m, each lane rescales its S, and a second
//    butterfly adds the sums.
// 3. group_combine: each warp contributes its part to all warps of the group. Every warp combines all parts again, so
//    all threads of the group hold the same bits.
//
// S excludes the exponential of one class: 1 - p of a confident row is the share of the other classes, and would
// otherwise suffer cancellation. The kind of target decides which class is excluded, as a template parameter:
//
//   ExcludeTarget   class indices: the label's class. A part may contain no excluded class; rescaling multiplies S.
//   ExcludeMax      dense targets have no distinguished class, so the class of the maximum is excluded. A part whose
//                   maximum is not the row's has excluded an exponential of 1, and adds it back: (S + 1) exp(m - m').
//
// The loops over classes are in the files of their kernels (partial_softmax in rows.cuh, add_logits in dense_rows.cuh),
// because they compute exponentials in different ways, which decide the bits of results. Class indices fold the scale
// of the logits into the exponent and use exp_nonpositive; dense targets need z_c itself for log p_c and use
// exp_of_difference.
//
// Traffic: none to global memory; one all_gather of OnlineSoftmax per warp and row if a group spans several warps.
// Preconditions: stated at each function.
#pragma once
#include "core/scalars.cuh"
#include "softmax/row_groups.cuh"

constexpr float kLog2E = 1.44269504f;

// Maximum and sum of exponentials of a part of a row. Excluded: ExcludeTarget or ExcludeMax.
template <class Compute, class Excluded>
struct OnlineSoftmax {
  Compute max_logit;
  Compute exp_sum;  // relative to max_logit, without the excluded class

  static __device__ __forceinline__ OnlineSoftmax empty() {
    return {-scalar_infinity(Compute()), Compute(0)};
  }
};

// Returns the number that is subtracted from logits before exp: the maximum, or 0 if all logits so far are -inf, so
// that their exponentials are 0 instead of NaN.
template <class Compute>
__device__ __forceinline__ Compute exp_shift(Compute max_logit) {
  return max_logit == -scalar_infinity(max_logit) ? Compute(0) : max_logit;
}

__device__ __forceinline__ float exp_shift(float max_logit) {
  // Any finite number serves instead of 0, and clamping takes one instruction. With kNarrow the product of that number
  // and log2(e) is finite too.
  return max_ignoring_nan(max_logit, kNarrow ? -0x1.6p127f : -scalar_max(max_logit));
}

// exp(x) in half the instructions of expf: it corrects the rounding error of x / log 2 after the power instead of
// before it. Precondition: x <= 0 and finite, or NaN.
__device__ __forceinline__ float exp_finite(float x) {
  constexpr float kLn2 = 0.693147181f;
  const float power = x * kLog2E, e = exp2_ftz(power);
  // The minus sign is at the constant: at `power` it would take a second product.
  return fmaf(e, fmaf(power, -kLn2, x), e);
}
// exp(x), also for x = -inf: x is clamped at -1000, where the power is 0, because the correction could be infinite.
__device__ __forceinline__ float exp_nonpositive(float x) {
  return exp_finite(larger_or_nan(x, -1000.0f));
}
template <class T>
__device__ __forceinline__ T exp_nonpositive(T x) {
  return scalar_exp(x);
}

// exp(d); with kNarrow accurate to 2^-16. Precondition: d <= 0, or NaN.
template <class Compute>
__device__ __forceinline__ Compute exp_of_difference(Compute d) {
  if constexpr (kNarrow && kSingle<Compute>) return exp2_ftz(d * kLog2E);
  return exp_nonpositive(d);
}

// Excludes the label's class from the sums of exponentials.
struct ExcludeTarget {
  static constexpr bool kMax = false;

  // Returns exp_sum relative to `max_logit`. Precondition here and below: max_logit >= part.max_logit.
  template <class Compute>
  static __device__ __forceinline__ Compute rescaled(const OnlineSoftmax<Compute, ExcludeTarget>& part,
                                                     Compute max_logit) {
    // In a part without logits above -inf there is nothing to rescale, and exp(0 - max_logit) could be infinite.
    const Compute factor =
        part.max_logit == -scalar_infinity(max_logit) ? Compute(1) : exp_of_difference(part.max_logit - max_logit);
    return part.exp_sum * factor;
  }
  // Returns the sum of two parts relative to `max_logit`. Precondition: it is the larger of their maxima.
  template <class Compute>
  static __device__ __forceinline__ Compute combined(const OnlineSoftmax<Compute, ExcludeTarget>& a,
                                                     const OnlineSoftmax<Compute, ExcludeTarget>& b,
                                                     Compute max_logit) {
    return rescaled(a, max_logit) + rescaled(b, max_logit);
  }
};

// Excludes the class of the maximum from the sums of exponentials.
struct ExcludeMax {
  static constexpr bool kMax = true;

  // Returns exp_sum relative to `max_logit`, whose class is excluded instead of the part's own maximum.
  template <class Compute>
  static __device__ __forceinline__ Compute rescaled(const OnlineSoftmax<Compute, ExcludeMax>& part,
                                                     Compute max_logit) {
    // exp(-inf - -inf) would be NaN. A sum that is NaN stays NaN.
    if (part.max_logit == -scalar_infinity(max_logit)) return part.exp_sum * Compute(0);
    return (part.exp_sum + Compute(1)) * exp_of_difference(part.max_logit - max_logit);
  }
  // Returns the sum of two parts relative to `max_logit`, which one of them excludes already.
  template <class Compute>
  static __device__ __forceinline__ Compute combined(const OnlineSoftmax<Compute, ExcludeMax>& a,
                                                     const OnlineSoftmax<Compute, ExcludeMax>& b, Compute max_logit) {
    return identical(a.max_logit, max_logit) ? a.exp_sum + rescaled(b, max_logit) : rescaled(a, max_logit) + b.exp_sum;
  }
};

// Makes a part relative to `max_logit`. Precondition: max_logit >= part.max_logit.
template <class Compute, class Excluded>
__device__ __forceinline__ void rescale(OnlineSoftmax<Compute, Excluded>& part, Compute max_logit) {
  part.exp_sum = Excluded::rescaled(part, max_logit);
  part.max_logit = max_logit;
}

// Adds `other` to `part`.
template <class Compute, class Excluded>
__device__ __forceinline__ void combine(OnlineSoftmax<Compute, Excluded>& part,
                                        const OnlineSoftmax<Compute, Excluded>& other) {
  const Compute max_logit = max_ignoring_nan(part.max_logit, other.max_logit);
  part.exp_sum = Excluded::combined(part, other, max_logit);
  part.max_logit = max_logit;
}

// True in the first lane of `width` neighbouring ones whose `condition` is true. Preconditions: all 32 lanes call it
// together; width is a power of two and the same in all of them.
__device__ __forceinline__ bool first_of_subwarp(bool condition, int width) {
  const int lane = threadIdx.x % kWarp, first = lane & -width;
  const unsigned ballot = __ballot_sync(0xffffffffu, condition) >> first;
  return __ffs(static_cast<int>(ballot)) - 1 == lane - first;
}

// Combines the parts of `width` neighbouring lanes; every one of them gets the result. If several lanes hold the
// maximum, ExcludeMax excludes that of the first one. Preconditions: all 32 lanes call it together; width is a power of
// two and the same in all of them.
template <class Compute>
__device__ __forceinline__ void subwarp_combine(OnlineSoftmax<Compute, ExcludeTarget>& part, int width) {
  rescale(part, subwarp_reduce(part.max_logit, width, MaxOp{}));
  part.exp_sum = subwarp_reduce(part.exp_sum, width, AddOp{});
}
template <class Compute>
__device__ __forceinline__ void subwarp_combine(OnlineSoftmax<Compute, ExcludeMax>& part, int width) {
  if (width == 1) return;
  const Compute max_logit = subwarp_reduce(part.max_logit, width, MaxOp{});
  const bool has_max = first_of_subwarp(identical(part.max_logit, max_logit), width);
  part.exp_sum = subwarp_reduce(has_max ? part.exp_sum : ExcludeMax::rescaled(part, max_logit), width, AddOp{});
  part.max_logit = max_logit;
}

// Combines the parts of `count` warps; each lane of the calling warp gets the result. Part: OnlineSoftmax, or a struct
// around it with its own empty(), combine() and subwarp_combine(). Preconditions: all 32 lanes call it together; count
// <= kMost; `all` is visible to the warp.
template <int kMost, class Part>
__device__ __forceinline__ Part combine_warp_partials(const Part* all, int count) {
  const int lane = threadIdx.x % kWarp;
  Part part = Part::empty();
  if (lane < count) part = all[lane];
#pragma unroll
  for (int i = kWarp; i < kMost; i += kWarp) {
    if (lane + i < count) combine(part, all[lane + i]);
  }
  subwarp_combine(part, kWarp);
  return part;
}

// Combines the parts of all warps of a group; each of its threads gets the result. Preconditions: every thread of the
// group calls it; `part` is the same in all lanes of a warp.
template <class Group, class Part>
__device__ __forceinline__ void group_combine(const Group& group, Part& part, SyncState& sync) {
  if constexpr (Group::kMultiWarp) {
    const Part* all;
    group.all_gather(part, sync, all);
    part = combine_warp_partials<Group::kClusterSize * kWarp>(all, group.num_warps());
  }
}
// The threads of a warp of ColumnWarps have parts of different rows. Each thread combines the parts of its own row, in
// the order of the warps. Precondition: every thread of the block calls it.
template <int kWarps, class Part>
__device__ __forceinline__ void group_combine(const ColumnWarps<kWarps>& group, Part& part, SyncState&) {
  const unsigned* const parts = group.exchange(part);
  Part other = part;
  group.part_of(parts, 0, part);
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    group.part_of(parts, w, other);
    combine(part, other);
  }
}
