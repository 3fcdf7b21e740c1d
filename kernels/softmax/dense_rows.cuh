// Softmax losses with dense targets t (R, C): the part that all layouts share.
//
//   L = sum over c of h(log p_c, t_c) + penalty(lse),       p = softmax(z), z as in softmax.cuh
//
//   dL/dz_c = h_1(c) - p_c (sum over k of h_1(k) - penalty')         h_1 = dh / d log p
//   dL/dt_c = h_2(c)                                                 h_2 = dh / dt
//
// With a teacher's logits instead of t, the term is h(log p_c, log q_c), where q is the teacher's softmax. The gradient
// of the teacher's logits follows in the same way from h_2 and q.
//
// 1. SoftmaxPass: maximum and sum of exponentials of the logits, and of the teacher's logits (online_softmax.cuh). For
//    a row on chip, MaxPass finds the maxima first, and ExpPass then adds exponentials without rescaling. A thread with
//    many packs (Classes::kManyPacks) takes RunningSoftmaxPass, in which a pack that does not raise the maximum costs
//    as much as in ExpPass.
// 2. subwarp_combine and group_combine: every thread of the group holds the softmax of the row.
// 3. SumPass: sums of h, h_1 and h_2. group_reduce_sums adds those of all threads. With a teacher and known leaders
//    (the classes of the largest logits), terms receive KnownLogs: both probabilities, and the logarithm of their
//    ratio, computed from the difference of the logits.
// 4. GradientPass: gradients of both operands. If SumPass has replaced the operands by numbers that the gradients need,
//    KeptGradientPass computes them from these. In 16 bits, where only one number per class has room, a GradByPSumPass
//    replaces the teacher's logits by dh/dp, for GradByPGradientPass; and h_1 is the gradient where it sums to 0, so
//    SumAndGradientPass writes it while it adds.
//
// A thread that shares a row on chip with no other lane of its warp (Classes::kAlone) also uses KnownLogs
// (visit_known_row), but has no branch for the largest logits: with 32 rows per warp, some lane would take that branch
// in every pack. It masks the largest logits instead (OwnLeaders).
//
// The sums of a term that is affine in log p do not need the sum S of exponentials, only the shift m of the logits:
//
//   sum of h(log p_c, t_c) = sum of h(z_c - m, t_c) - log S (sum of h_1)             log p_c = z_c - m - log S
//
// AffinePass (AffineSumPass, RunningAffinePass) therefore replaces SoftmaxPass and SumPass, and the group exchanges
// once instead of twice. Where h is a weighted -log p, nothing cancels: both parts have the same sign.
//
// Each pass is a functor f(first, x, t) on packs of contiguous classes, starting with class `first`. A Classes type
// yields the packs: from shared memory (resident_dense_rows.cuh), through a window in it (windowed_dense_rows.cuh),
// from memory again in each pass (two_pass_dense.cuh), or class by class in one thread (dense_thread_per_row.cuh).
// Functors are structs, because compilers before CUDA 13.5 reject lambdas in templates of a kernel.
//
// A thread owns the same classes in all passes; a group owns a row; a worker owns a chunk, as in rows.cuh. Traffic and
// preconditions: those of the Classes type.
#pragma once
#include "primitives/divergence.cuh"
#include "softmax/rows.cuh"

// Online softmax of the logits, and of the teacher's logits if there are any.
template <class Compute, int kCount>
struct OnlineSoftmaxes {
  OnlineSoftmax<Compute, ExcludeMax> softmax[kCount];

  static __device__ __forceinline__ OnlineSoftmaxes empty() {
    OnlineSoftmaxes all;
#pragma unroll
    for (int k = 0; k < kCount; ++k) all.softmax[k] = {-scalar_infinity(Compute()), Compute(0)};
    return all;
  }
};
template <class Compute, int kCount>
__device__ __forceinline__ void combine(OnlineSoftmaxes<Compute, kCount>& part,
                                        const OnlineSoftmaxes<Compute, kCount>& other) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) combine(part.softmax[k], other.softmax[k]);
}
// Preconditions: those of subwarp_combine of an OnlineSoftmax.
template <class Compute, int kCount>
__device__ __forceinline__ void subwarp_combine(OnlineSoftmaxes<Compute, kCount>& part, int width) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) subwarp_combine(part.softmax[k], width);
}

// Adds the logits of a pack to `part`, and returns them in z.
template <int kVecSize, class Logits, class Storage, class Compute>
__device__ __forceinline__ void add_logits(const Logits& logit, const Pack<Storage, kVecSize>& x,
                                           OnlineSoftmax<Compute, ExcludeMax>& part, Compute (&z)[kVecSize]) {
  Compute raw[kVecSize], e[kVecSize];
  unpack(x, raw);
  logit.values_of(raw, z);
  Compute max_logit = -scalar_infinity(Compute());
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) max_logit = max_ignoring_nan(max_logit, z[i]);
  // Rare after the first few packs.
  int leader = -1;
  if (max_logit > part.max_logit) {
    rescale(part, max_logit);
#pragma unroll
    for (int i = kVecSize - 1; i >= 0; --i) leader = identical(z[i], max_logit) ? i : leader;
  }
  const Compute shift = exp_shift(part.max_logit);
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) e[i] = logit.exponential_of(z[i], shift);
  if (leader >= 0) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      if (i == leader) e[i] = Compute(0);
    }
  }
  part.exp_sum += sum_elements(e);
}

// Returns element i of an array in registers, for loops that are not unrolled.
template <class Compute, int kCount>
__device__ __forceinline__ Compute element_at(const Compute (&x)[kCount], int i) {
  Compute y = x[0];
#pragma unroll
  for (int j = 1; j < kCount; ++j) y = i == j ? x[j] : y;
  return y;
}
template <class Compute, int kCount>
__device__ __forceinline__ void set_element_at(Compute (&x)[kCount], int i, Compute y) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) x[j] = i == j ? y : x[j];
}

// Largest logit among the classes of some neighbouring lanes. The sum of exponentials leaves out its class: `leader` is
// the first class of its pack in the one thread that holds it, and -1 in all others.
template <class Compute>
struct KnownMax {
  Compute max_logit;
  int leader;
};

// Largest logit of a thread, before scale and cap, and the first class of its pack (-1 if there is none).
template <class Compute>
struct RunningLeader {
  Compute raw;
  int pack;

  __device__ __forceinline__ RunningLeader() : raw(-scalar_infinity(Compute())), pack(-1) {
  }
  // Returns true if the pack has the largest logit so far.
  template <class Storage, int kVecSize>
  __device__ __forceinline__ bool add(int first, const Pack<Storage, kVecSize>& x) {
    RunningMax<Compute, Storage, kVecSize> of_pack;
    of_pack.add(x);
    const Compute largest = of_pack.get();
    const bool leads = largest > raw;
    if (leads) {
      raw = largest;
      pack = first;
    }
    return leads;
  }
  // Largest logit of `width` neighbouring lanes. Preconditions: those of subwarp_reduce.
  template <class Logits>
  __device__ __forceinline__ KnownMax<Compute> of_subwarp(const Logits& logit, int width) const {
    const Compute local_max = pack < 0 ? -scalar_infinity(Compute()) : logit.value(raw);
    if (width == 1) return {local_max, pack};
    const Compute largest = subwarp_reduce(local_max, width, MaxOp{});
    return {largest, first_of_subwarp(identical(local_max, largest), width) ? pack : -1};
  }
};

// Adds the exponentials of a pack, relative to a maximum that is already known.
template <int kVecSize, class Logits, class Storage, class Compute>
__device__ __forceinline__ void add_exponentials(const Logits& logit, int first, const Pack<Storage, kVecSize>& x,
                                                 const KnownMax<Compute>& known, Compute& exp_sum) {
  Compute raw[kVecSize], e[kVecSize];
  unpack(x, raw);
  const Compute shift = exp_shift(known.max_logit);
  if constexpr (Logits::kCapped || !kNarrow) {
    Compute z[kVecSize];
    logit.values_of(raw, z);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) e[i] = logit.exponential_of(z[i], shift);
  } else {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) e[i] = logit.exponential(raw[i], shift);
  }
  if (first == known.leader) {
    bool excluded = false;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const bool leads = identical(logit.value(raw[i]), known.max_logit) & !excluded;
      e[i] = leads ? Compute(0) : e[i];
      excluded |= leads;
    }
  }
  exp_sum += sum_elements(e);
}

// Softmax of a row, in the form in which passes use it for each class.
template <class Compute>
struct Softmax {
  Compute max_logit;
  Compute exp_sum;  // without the exponential of the largest logit
  Compute log_sum;
  Compute inv_sum;
  Compute max_complement;  // 1 - p of the largest logit

  __device__ __forceinline__ void set(const OnlineSoftmax<Compute, ExcludeMax>& n) {
    max_logit = n.max_logit;
    exp_sum = n.exp_sum;
    log_sum = scalar_log1p(n.exp_sum);
    inv_sum = scalar_divide_closely(Compute(1), Compute(1) + n.exp_sum);
    max_complement = n.exp_sum * inv_sum;
  }
  __device__ __forceinline__ Compute log_p(Compute z) const {
    return (z - max_logit) - log_sum;
  }
};

// Sum of h_1 or h_2 over classes of a row: a number, or a SumBesideLeader where SoftmaxVjp also needs the sum without
// the leader, the class of the largest logit. Only numbers with tangents use one (dense_second_derivatives.cuh).
template <class Compute>
struct SumBesideLeader;

// Adds h of a class to such a sum. `leads`: true if the class is the leader.
template <class Compute>
__device__ __forceinline__ void add_class(Compute& sum, Compute h, bool) {
  sum += h;
}
// Returns the sum over a part of the classes as a summand of a larger sum. `leads`: true if the part holds the leader
// of the larger sum.
template <class Compute>
__device__ __forceinline__ Compute as_part(Compute sum, bool) {
  return sum;
}
// Returns the sum over all classes, including the leader, as a number.
template <class Compute>
__device__ __forceinline__ Compute with_leader(Compute sum) {
  return sum;
}

// Sums over the classes of a row: h, h_1 and h_2.
template <class Compute, class OfInput = Compute, class OfTarget = Compute>
struct DenseSums {
  Compute value;
  OfInput grad_log_p;
  OfTarget grad_log_q;
};

// Probabilities p and q of a class, their logarithms, and the logarithm of their ratio. With kNarrow, each logarithm
// takes one fma:
//
//   log p = rate y - lse,    log q = rate t - lse',    log(q / p) = rate (t - y) + gap         gap = lse - lse'
//
// where y and t are the logits of student and teacher, before they are scaled or after a cap. The ratio does not
// inherit the rounding errors of both logarithms. A largest logit with most of the probability, whose logarithm is near
// 0, needs digits that rate y - lse lacks, so Softmax::log_p evaluates it. Without kNarrow, p is the exponential
// divided by the sum of exponentials, and as accurate as both: where p and q are far apart, errors of the logarithms
// would not cancel in their divergence. If the maxima of both rows are far apart, t is shifted toward y.
template <class Compute>
struct KnownLogs {
  Compute rate, gap;
  Compute shift;
  Compute rate2, gap2, lse2, teacher_lse2;  // of base-2 logarithms, with kNarrow

  template <class Logits>
  __device__ __forceinline__ void set(const Logits& logit, const Softmax<Compute>& of_student,
                                      const Softmax<Compute>& of_teacher) {
    rate = Logits::kCapped ? Compute(1) : logit.scale;
    // Ratio of both sums of exponentials, and its excess over 1. exp_sum lacks the 1 of the largest logit.
    const Compute ratio = (Compute(1) + of_student.exp_sum) * of_teacher.inv_sum;
    const Compute excess = (of_student.exp_sum - of_teacher.exp_sum) * of_teacher.inv_sum;
    const Compute between = of_teacher.max_logit - of_student.max_logit;
    shift = !kNarrow && scalar_abs(between) > Compute(16) ? between / rate : Compute(0);
    gap = (scalar_fma(rate, shift, -of_teacher.max_logit) + of_student.max_logit) +
          scalar_narrow_log(excess, scalar_log(ratio)).log;
    rate2 = rate * kLog2E;
    gap2 = gap * kLog2E;
    // Rounded like the shifts in the exponents of the exponentials that were added.
    lse2 = of_student.max_logit * kLog2E + of_student.log_sum * kLog2E;
    teacher_lse2 = of_teacher.max_logit * kLog2E + of_teacher.log_sum * kLog2E;
  }
  // Operands of a term: log_p() is for its first slot, log_q() for its second one.
  __device__ __forceinline__ KnownLog<Compute, 1u> log_p(const Softmax<Compute>& softmax, Compute y, Compute t) const {
    auto x = known<0>(softmax, y, lse2);
    x.log_ratio = -log_ratio(y, t);
    x.log2_ratio = -log2_ratio(y, t);
    return x;
  }
  __device__ __forceinline__ KnownLog<Compute, 2u> log_q(const Softmax<Compute>& softmax, Compute y, Compute t) const {
    auto x = known<1>(softmax, t, teacher_lse2);
    x.log_ratio = log_ratio(y, t);
    x.log2_ratio = log2_ratio(y, t);
    return x;
  }
  // Sets both operands from the logarithms of the softmaxes, so that no class lacks digits. Where p is large, their
  // difference has more digits than the ratio: a logarithm near 0 does not inherit the rounding errors of large logits.
  __device__ __forceinline__ void set_exact(const Softmax<Compute>& of_student, const Softmax<Compute>& of_teacher,
                                            Compute y, Compute t, KnownLog<Compute, 1u>& log_p,
                                            KnownLog<Compute, 2u>& log_q) const {
    log_p.value = of_student.log_p(rate * y);
    log_q.value = of_teacher.log_p(rate * t);
    log_q.log_ratio = log_p.value > Compute(-0.5) ? log_q.value - log_p.value : log_ratio(y, t);
    log_p.log_ratio = -log_q.log_ratio;
    log_p.number = scalar_exp(log_p.value);
    log_q.number = scalar_exp(log_q.value);
    log_p.log2 = log_p.value * kLog2E;
    log_q.log2 = log_q.value * kLog2E;
    log_q.log2_ratio = log_q.log_ratio * kLog2E;
    log_p.log2_ratio = -log_q.log2_ratio;
    log_p.tangent[0] = log_q.tangent[1] = Compute(1);
  }

 private:
  __device__ __forceinline__ Compute log_ratio(Compute y, Compute t) const {
    return scalar_fma((kNarrow ? t : t - shift) - y, rate, gap);
  }
  __device__ __forceinline__ Compute log2_ratio(Compute y, Compute t) const {
    return scalar_fma(t - y, rate2, gap2);
  }
  template <int kSlot>
  __device__ __forceinline__ KnownLog<Compute, (1u << kSlot)> known(const Softmax<Compute>& softmax, Compute y,
                                                                    Compute of_sum) const {
    KnownLog<Compute, (1u << kSlot)> x;
    x.tangent[kSlot] = Compute(1);
    if constexpr (kNarrow) {
      x.log2 = scalar_fma(y, rate2, -of_sum);
      x.value = x.log2 * Compute(0.693147181);
      x.number = exp2_ftz(x.log2);
    } else {
      const Compute difference = rate * y - softmax.max_logit;
      x.value = difference - softmax.log_sum;
      x.number = exp_nonpositive(difference) * softmax.inv_sum;
    }
    return x;
  }
};

// Returns the leader in a thread whose KnownMax has a leader and equals the largest logit of the row, and -1 in all
// others. It is -1 in all threads if p = exp(-log_sum) of the largest logit is below exp(-most): a leader matters only
// where log p or 1 - p lacks digits.
template <class Compute>
__device__ __forceinline__ int leader_of_row(const KnownMax<Compute>& known, const Softmax<Compute>& softmax,
                                             Compute most) {
  if (softmax.log_sum > most) return -1;
  return identical(known.max_logit, softmax.max_logit) ? known.leader : -1;
}

// State of a row for GradientPass. `penalty_grad` is the derivative of the penalty. `factor` is the factor of the row's
// gradients (grad_factor).
template <class Compute, int kCount, class Sums = DenseSums<Compute>>
struct DenseRow {
  Softmax<Compute> softmax[kCount];
  // Set for rows on chip only; `logs` and `known` only if Program::kKnown. `known` is false in a thread with values
  // that KnownLogs do not cover. `leader` is the first class of the pack with the largest logit, or the class itself in
  // visit_known_row. It is -1 in threads without that class.
  KnownLogs<Compute> logs;
  int leader[kCount];
  bool known;
  Sums sums;
  Compute value;
  Compute penalty_grad;
  Compute factor;
  Dual<Compute, 0> classes;  // their number, converted once: compilers would convert it for every vector

  // True if class c is a leader. Precondition: visit_known_row has set `leader`.
  __device__ __forceinline__ bool leads(int c) const {
    return (c == leader[0]) | (c == leader[kCount - 1]);
  }
};

// True for the type of a term that also has its derivative with respect to p.
template <class T>
constexpr bool kHasGradByP = false;
template <class T, unsigned kMask>
constexpr bool kHasGradByP<TermOfKnownLogs<T, kMask>> = true;

// Type of a term of KnownLogs; Absent if a row has none.
template <class Term, bool kKnown>
struct TermType {
  using type = Absent;
};
template <class Term>
struct TermType<Term, true> {
  using type = decltype((*static_cast<const Term*>(nullptr))(KnownLog<float, 1u>(), KnownLog<float, 2u>(),
                                                             Dual<float, 0>(), Dual<float, 0>()));
};

template <class Term_, class Penalty_, class Space_, class Input_, class Target_, class Weight_, class Mask_,
          class Result_, bool kTeacher_, bool kCapped_, bool kInputGradient_, bool kTargetGradient_,
          class Gradient_ = Input_, bool kInPlace_ = false, bool kInputApart_ = false, bool kTargetApart_ = false>
struct DenseRowProgram {
  using Term = Term_;
  using Compute = typename Term::Compute;
  using Input = Input_;
  using Target = Target_;
  using Gradient = Gradient_;
  using TargetGradient = Target_;
  using Result = Result_;
  template <int kVecSize>
  using View = RowVectors<Input_, kVecSize>;
  static constexpr bool kTeacher = kTeacher_;
  static constexpr bool kCapped = kCapped_;
  static constexpr int kSoftmaxes = kTeacher ? 2 : 1;
  // True if the gradients of a row overwrite its logits, which all of its threads must have read by then.
  static constexpr bool kInPlace = kInPlace_;
  static constexpr bool kWeighted = !kIsAbsent<Weight_>;
  // True if AffinePass replaces SoftmaxPass and SumPass. Numbers with tangents use it, too, but not AffineSumPass.
  static constexpr bool kAffine = Term_::kAffine && !kTeacher;
  static constexpr bool kInputGradient = kInputGradient_;
  static constexpr bool kTargetGradient = kTargetGradient_;
  // True if terms receive KnownLogs for rows on chip.
  static constexpr bool kKnown = kTeacher && kSameType<Compute, float>;
  // True if SumPass replaces the operands of a row on chip by h_1 and p of each class, if these fit, so that the
  // gradient need not evaluate the term again.
  static constexpr bool kKeeps = kTeacher && kInputGradient && !kTargetGradient && !kCapped_;
  // True if h_1 sums to 0 over a row and therefore is the gradient, up to rounding errors of the sums of exponentials.
  static constexpr bool kTermIsGradient = kKeeps && kKnown && kNarrow && Term_::kBalanced;
  // True if GradByPSumPass may replace the teacher's logits of a row on chip by dh/dp: the term has it at no cost, the
  // gradient would otherwise evaluate the term again, and what has room in their place is finer than a gradient.
  static constexpr bool kKeepsGradsByP = kKeeps && kHasGradByP<typename TermType<Term_, kKnown && kNarrow>::type> &&
                                         (sizeof(Target_) == 4 || kSameType<Gradient_, bfloat16_t>);
  // kSkipsSums: true if neither the gradients nor the outputs need SumPass. kValued: true if there is a value.
  // DenseHvpProgram (dense_second_derivatives.cuh) sets other values.
  static constexpr bool kSkipsSums = false;
  static constexpr bool kValued = true;
  // Sums of h_1 and h_2. Apart is this program with a SumBesideLeader for one of them, or for both.
  using InputSum = Choose<kInputApart_, SumBesideLeader<Compute>, Compute>;
  using TargetSum = Choose<kTargetApart_, SumBesideLeader<Compute>, Compute>;
  template <bool kOfInput, bool kOfTarget>
  using Apart = DenseRowProgram<Term_, Penalty_, Space_, Input_, Target_, Weight_, Mask_, Result_, kTeacher_, kCapped_,
                                kInputGradient_, kTargetGradient_, Gradient_, kInPlace_, kOfInput, kOfTarget>;
  using Sums = DenseSums<Compute, InputSum, TargetSum>;
  using Row = DenseRow<Compute, kSoftmaxes, Sums>;

  Term term;
  Penalty_ penalty;
  const Space_& space;
  const Input* input;
  const Target* targets;
  Gradient* gradients;
  Target* target_gradients;
  const Weight_* weights;
  const Mask_* mask;
  Logit<Compute, kCapped_> logit;
  // Outputs per row, or null.
  Result* values;
  Compute* lse;

  // Interface of RowProgram for count_rows: without labels, the mask alone makes a row active.
  struct LabelLoad {
    bool active;
  };
  __device__ __forceinline__ LabelLoad load_label(const int64 (&offset)[kRowStreams]) const {
    return {active(offset)};
  }
  __device__ __forceinline__ bool is_active(const LabelLoad& load) const {
    return load.active;
  }
  __device__ __forceinline__ Compute divisor_term(const LabelLoad& load) const {
    return load.active ? Compute(1) : Compute(0);
  }

  __device__ __forceinline__ bool active(const int64 (&offset)[kRowStreams]) const {
    if constexpr (!kIsAbsent<Mask_>) return mask[offset[kRowMask]] != Mask_(0);
    return true;
  }

  // Contiguous logits of a row as vectors.
  template <int kVecSize>
  __device__ __forceinline__ View<kVecSize> view(const int64 (&offset)[kRowStreams]) const {
    return {input, offset[kLogits], space.classes};
  }
  // Pointers to both operands of a row. step() and target_step() return the distances between their classes.
  __device__ __forceinline__ const Input* logits(const int64 (&offset)[kRowStreams]) const {
    return input + offset[kLogits];
  }
  __device__ __forceinline__ const Target* targets_of(const int64 (&offset)[kRowStreams]) const {
    return targets + offset[kLabels];
  }
  __device__ __forceinline__ int64 step() const {
    return space.class_stride[kLogits];
  }
  __device__ __forceinline__ int64 target_step() const {
    return space.class_stride[kLabels];
  }

  // Returns the weight of class c, 1 without weights.
  __device__ __forceinline__ Compute class_weight(int64 c) const {
    if constexpr (kWeighted) return widen<Compute>(load_pack<1>(weights + c).element[0]);
    return Compute(1);
  }
  // Evaluates h and its derivatives at class c. z: the logit. t: the target, or the teacher's logit.
  __device__ __forceinline__ auto evaluate(const Row& row, Compute z, Compute t, int64 c) const {
    Compute second = t;
    if constexpr (kTeacher) second = row.softmax[1].log_p(t);
    return evaluate_at(row, row.softmax[0].log_p(z), second, c);
  }
  // Evaluates the term given log p_c (any number if the term is affine) and the target or log q_c.
  __device__ __forceinline__ auto evaluate_at(const Row& row, Compute log_p, Compute second, int64 c) const {
    return term(variable<3u, 0>(log_p), variable<3u, 1>(second), variable<0u, 2>(class_weight(c)), row.classes);
  }
  // Evaluates the term given KnownLogs. y and t: logits as KnownLogs describes them.
  __device__ __forceinline__ auto evaluate_known(const Row& row, Compute y, Compute t, int64 c) const {
    return term(row.logs.log_p(row.softmax[0], y, t), row.logs.log_q(row.softmax[1], y, t),
                variable<0u, 2>(class_weight(c)), row.classes);
  }
  // Version with the logarithms of the softmaxes.
  __device__ __forceinline__ auto evaluate_exactly(const Row& row, Compute y, Compute t, int64 c) const {
    KnownLog<Compute, 1u> log_p;
    KnownLog<Compute, 2u> log_q;
    row.logs.set_exact(row.softmax[0], row.softmax[1], y, t, log_p, log_q);
    return term(log_p, log_q, variable<0u, 2>(class_weight(c)), row.classes);
  }
  // Bit mask of those classes of a pack for which evaluate_known() lacks digits: the largest logits, or all classes if
  // not row.known.
  template <int kVecSize>
  __device__ __forceinline__ unsigned lacking_digits(const Row& row, int first, const Compute (&x)[kVecSize],
                                                     const Compute (&t)[kVecSize]) const {
    unsigned classes = leading(row, first, x);
    if (first == row.leader[kSoftmaxes - 1]) classes |= equal_bits(t, row.softmax[kSoftmaxes - 1].max_logit);
    return row.known ? classes : (1u << kVecSize) - 1u;
  }
  // Bit mask of the student's leader in a pack.
  template <int kVecSize>
  __device__ __forceinline__ unsigned leading(const Row& row, int first, const Compute (&x)[kVecSize]) const {
    return first == row.leader[0] ? equal_bits(x, row.softmax[0].max_logit) : 0u;
  }
  template <int kVecSize>
  __device__ __forceinline__ unsigned equal_bits(const Compute (&x)[kVecSize], Compute z) const {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) bits |= identical(logit.value(x[i]), z) ? 1u << i : 0u;
    return bits;
  }
  // Replaces both logits of the given classes by -inf in evaluate_known()'s operands, so that these classes add
  // nothing.
  template <int kVecSize>
  __device__ __forceinline__ void without(unsigned classes, Compute (&y)[kVecSize], Compute (&t)[kVecSize]) const {
    if (classes == 0) return;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      if (classes >> i & 1) y[i] = t[i] = -scalar_infinity(Compute());
    }
  }
  // Replaces both logits of the row's leaders by -inf. Precondition: that of DenseRow::leads().
  template <int kVecSize>
  __device__ __forceinline__ void without_leaders(const Row& row, int first, Compute (&y)[kVecSize],
                                                  Compute (&t)[kVecSize]) const {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const bool leads = row.leads(first + i);
      y[i] = leads ? -scalar_infinity(Compute()) : y[i];
      t[i] = leads ? -scalar_infinity(Compute()) : t[i];
    }
  }
  // Returns the second operand as evaluate() expects it.
  __device__ __forceinline__ Compute second(Compute t) const {
    if constexpr (kTeacher) return logit.value(t);
    return t;
  }

  // Evaluates a row from its sums, and stores the per-row outputs that are wanted. Precondition: `first` is true in one
  // thread of the group.
  __device__ __forceinline__ void finish(Row& row, const int64 (&offset)[kRowStreams], bool active, bool first) const {
    const Compute lse_of_row = active ? row.softmax[0].max_logit + row.softmax[0].log_sum : Compute(0);
    const auto added = penalty(variable<1u, 0>(lse_of_row));
    row.value = active ? row.sums.value + added.value : Compute(0);
    row.penalty_grad = tangent_or_zero(added, 0);
    if (row.value != row.value) row.value = nan_result(row.value);
    if (!first) return;
    if (values != nullptr) values[offset[kResults]] = Narrow<Result>::from(row.value);
    if (lse != nullptr) lse[offset[kResults]] = lse_of_row;
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// The passes

// Finds the online softmax of the logits of a thread's classes, and of the teacher's logits.
template <class Program, class Compute = typename Program::Compute>
struct SoftmaxPass {
  static constexpr bool kReadsTargets = Program::kTeacher;
  const Program& program;
  OnlineSoftmaxes<Compute, Program::kSoftmaxes> softmaxes;

  __device__ __forceinline__ explicit SoftmaxPass(const Program& program) : program(program) {
#pragma unroll
    for (int i = 0; i < Program::kSoftmaxes; ++i) softmaxes.softmax[i] = {-scalar_infinity(Compute()), Compute(0)};
  }
  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64, const Pack<typename Program::Input, kVecSize>& x,
                                             const Pack<typename Program::Target, kVecSize>& t) {
    Compute z[kVecSize];
    add_logits(program.logit, x, softmaxes.softmax[0], z);
    if constexpr (Program::kTeacher) add_logits(program.logit, t, softmaxes.softmax[1], z);
  }
};

// Version of SoftmaxPass for a thread with many packs, few of which raise the maximum. It keeps track of the leaders.
template <class Program, class Compute = typename Program::Compute>
struct RunningSoftmaxPass {
  static constexpr bool kReadsTargets = Program::kTeacher;
  const Program& program;
  OnlineSoftmaxes<Compute, Program::kSoftmaxes> softmaxes;
  RunningLeader<Compute> leaders[Program::kSoftmaxes];

  __device__ __forceinline__ explicit RunningSoftmaxPass(const Program& program)
      : program(program), softmaxes(decltype(softmaxes)::empty()) {
  }
  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kVecSize>& x,
                                             const Pack<typename Program::Target, kVecSize>& t) {
    add<0>(static_cast<int>(first), x);
    if constexpr (Program::kTeacher) add<1>(static_cast<int>(first), t);
  }
  // Largest logit of the thread.
  __device__ __forceinline__ KnownMax<Compute> known(int i) const {
    return {softmaxes.softmax[i].max_logit, leaders[i].pack};
  }

 private:
  template <int kSlot, class Storage, int kVecSize>
  __device__ __forceinline__ void add(int first, const Pack<Storage, kVecSize>& x) {
    auto& softmax = softmaxes.softmax[kSlot];
    if (leaders[kSlot].add(first, x)) rescale(softmax, program.logit.value(leaders[kSlot].raw));
    add_exponentials(program.logit, first, x, known(kSlot), softmax.exp_sum);
  }
};

// Finds the largest logits of a row on chip.
template <class Program, class Compute = typename Program::Compute>
struct MaxPass {
  static constexpr bool kReadsTargets = Program::kTeacher;
  RunningLeader<Compute> leaders[Program::kSoftmaxes];

  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kVecSize>& x,
                                             const Pack<typename Program::Target, kVecSize>& t) {
    leaders[0].add(static_cast<int>(first), x);
    if constexpr (Program::kTeacher) leaders[1].add(static_cast<int>(first), t);
  }
};

// Adds the exponentials of a row on chip, relative to the maxima of those lanes of a warp that share it.
template <class Program, class Compute = typename Program::Compute>
struct ExpPass {
  static constexpr bool kReadsTargets = Program::kTeacher;
  const Program& program;
  KnownMax<Compute> known[Program::kSoftmaxes];
  Compute exp_sum[Program::kSoftmaxes];

  // Preconditions: those of subwarp_reduce.
  __device__ __forceinline__ ExpPass(const Program& program, const MaxPass<Program>& maxima, int width)
      : program(program) {
#pragma unroll
    for (int i = 0; i < Program::kSoftmaxes; ++i) {
      known[i] = maxima.leaders[i].of_subwarp(program.logit, width);
      exp_sum[i] = Compute(0);
    }
  }
  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kVecSize>& x,
                                             const Pack<typename Program::Target, kVecSize>& t) {
    add_exponentials(program.logit, static_cast<int>(first), x, known[0], exp_sum[0]);
    if constexpr (Program::kTeacher) {
      add_exponentials(program.logit, static_cast<int>(first), t, known[1], exp_sum[1]);
    }
  }
  // Softmaxes of the classes of all these lanes. Preconditions: those of subwarp_reduce.
  __device__ __forceinline__ OnlineSoftmaxes<Compute, Program::kSoftmaxes> of_subwarp(int width) const {
    OnlineSoftmaxes<Compute, Program::kSoftmaxes> all;
#pragma unroll
    for (int i = 0; i < Program::kSoftmaxes; ++i) {
      all.softmax[i] = {known[i].max_logit, subwarp_reduce(exp_sum[i], width, AddOp{})};
    }
    return all;
  }
};

// Source of probabilities and their logarithms in a pass: the softmax of the row; KnownLogs, except for classes for
// which they lack digits (kKnownInLanes if lanes of a warp have different rows); KnownLogs alone, for classes that are
// not leaders; or the softmax of the row, with the ratio of KnownLogs.
enum LogsOf { kOfSoftmax, kKnownInPacks, kKnownInLanes, kKnownAlone, kKnownRatio };

// True if a pass evaluates packs by KnownLogs and then the classes for which they lack digits.
template <int kLogs>
constexpr bool kKnownWithExceptions = kLogs == kKnownInPacks || kLogs == kKnownInLanes;

// Calls f(i) for each set bit of `bits`. Rare, and not unrolled because that would fill the instruction cache. With
// kKnownInLanes each lane takes its own next bit, so that lanes with different ones run together. Otherwise all lanes
// take the same bit, for which the compiler needs fewer registers.
template <int kLogs, class F>
__device__ __forceinline__ void for_each_bit(unsigned bits, const F& f) {
  if constexpr (kLogs == kKnownInLanes) {
#pragma unroll 1
    for (; bits != 0; bits &= bits - 1) f(__ffs(static_cast<int>(bits)) - 1);
  } else {
#pragma unroll 1
    for (int i = 0; bits != 0; ++i, bits >>= 1) {
      if (bits & 1) f(i);
    }
  }
}

// Numbers per class that the gradients need and SumPass returns: none; h_1, which is the gradient; h_1 and p; or dh/dp.
enum Kept { kKeepsNothing, kKeepsGradient, kKeepsGradientAndP, kKeepsGradByP };

// dh/dp of a term. Where it has none, it follows from h_1 = p dh/dp.
template <class T, unsigned kMask>
__device__ __forceinline__ T grad_by_p_of(const TermOfKnownLogs<T, kMask>& y, T) {
  return y.by_p;
}
template <class T, unsigned kMask>
__device__ __forceinline__ T grad_by_p_of(const Dual<T, kMask>& y, T p) {
  const T h = tangent_or_zero(y, 0);
  return h == T(0) ? T(0) : scalar_divide_in_range(h, p);
}

// Adds h, h_1 and h_2 of a thread's classes to row.sums. kLogs is any but kKnownAlone, and matters only with a teacher.
template <bool kGradient, int kLogs, int kKept, class Program, class Compute = typename Program::Compute>
struct SumPass {
  static constexpr bool kReadsTargets = true;
  static constexpr int kNumbers = kKept == kKeepsGradientAndP ? 2 : kKept == kKeepsNothing ? 0 : 1;
  const Program& program;
  typename Program::Row& row;

  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kVecSize>& x,
                                             const Pack<typename Program::Target, kVecSize>& t) {
    Compute kept[2][kVecSize];
    (*this)(first, x, t, kept);
  }
  // Also returns in `kept` the numbers that the gradients need.
  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kVecSize>& x,
                                             const Pack<typename Program::Target, kVecSize>& t,
                                             Compute (&kept)[2][kVecSize]) {
    Compute(&of_term)[kVecSize] = kept[0];
    Compute raw[kVecSize], target[kVecSize];
    unpack(x, raw);
    unpack(t, target);
    if constexpr (kKnownWithExceptions<kLogs> && Program::kKnown) {
      Compute y[kVecSize], second[kVecSize];
      unsigned classes = program.lacking_digits(row, static_cast<int>(first), raw, target);
      program.logit.unscaled_of(raw, y);
      program.logit.unscaled_of(target, second);
      program.without(classes, y, second);
      const typename Program::Sums before = row.sums;
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        const Compute p = row.logs.log_p(row.softmax[0], y[i], second[i]).number;
        add(program.evaluate_known(row, y[i], second[i], first + i), p, of_term[i]);
        kept[1][i] = p;
      }
      if (row.sums.value != row.sums.value) {
        row.known = false;
        row.sums = before;
        classes = (1u << kVecSize) - 1u;
      }
      for_each_bit<kLogs>(classes, [&](int i) {
        Compute of_class[2];
        evaluate(first + i, element_at(raw, i), element_at(target, i), of_class[0], of_class[1]);
#pragma unroll
        for (int k = 0; k < kNumbers; ++k) set_element_at(kept[k], i, of_class[k]);
      });
    } else if constexpr (kLogs == kKnownRatio && Program::kKnown) {
      Compute y[kVecSize], second[kVecSize];
      program.logit.unscaled_of(raw, y);
      program.logit.unscaled_of(target, second);
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        add(program.evaluate_exactly(row, y[i], second[i], first + i), Compute(0), of_term[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) evaluate(first + i, raw[i], target[i], kept[0][i], kept[1][i]);
    }
  }
  // Applies `op` to each sum that is needed.
  template <class Op>
  __device__ __forceinline__ static void over(typename Program::Sums& sums, const Op& op) {
    op(sums.value);
    if constexpr (kGradient && Program::kInputGradient && kKept != kKeepsGradient) op(sums.grad_log_p);
    if constexpr (kGradient && Program::kTargetGradient && Program::kTeacher) op(sums.grad_log_q);
  }
  // Adds a class, evaluated from the softmaxes, given its logit before scaling and the target.
  __device__ __forceinline__ void evaluate(int64 c, Compute x, Compute t, Compute& of_term, Compute& p) const {
    const Compute z = program.logit.value(x), second = program.second(t);
    const Softmax<Compute>& softmax = row.softmax[0];
    const bool leads = identical(z, softmax.max_logit);
    const bool teacher_leads = identical(second, row.softmax[Program::kSoftmaxes - 1].max_logit);
    p = program.logit.exponential_of(z, softmax.max_logit) * softmax.inv_sum;
    add(program.evaluate(row, z, second, c), p, of_term, leads, teacher_leads);
  }
  // Adds h of a class and its derivatives. Only a SumBesideLeader depends on `leads` and `teacher_leads`.
  template <class Y>
  __device__ __forceinline__ static void add_to(typename Program::Sums& sums, const Y& y, bool leads = false,
                                                bool teacher_leads = false) {
    sums.value += y.value;
    if constexpr (kGradient && Program::kInputGradient && kKept != kKeepsGradient) {
      add_class(sums.grad_log_p, tangent_or_zero(y, 0), leads);
    }
    if constexpr (kGradient && Program::kTargetGradient && Program::kTeacher) {
      add_class(sums.grad_log_q, tangent_or_zero(y, 1), teacher_leads);
    }
  }

 private:
  // Also returns the number of the term that is kept. `p` matters only for kKeepsGradByP.
  template <class Y>
  __device__ __forceinline__ void add(const Y& y, Compute p, Compute& of_term, bool leads = false,
                                      bool teacher_leads = false) const {
    of_term = tangent_or_zero(y, 0);
    if constexpr (kKept == kKeepsGradByP) of_term = grad_by_p_of(y, p);
    add_to(row.sums, y, leads, teacher_leads);
  }
};

// SumPass of a row whose h_1 is the gradient: also writes the gradients. `factor` is the factor of the row's gradients
// times the slope that all logits share. `Place`: as in GradientPass.
template <class Sums, class Program, class Place, class Compute = typename Program::Compute>
struct SumAndGradientPass {
  static constexpr bool kReadsTargets = true;
  Sums& sums;
  const Place& place;
  Compute factor;

  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kVecSize>& x,
                                             const Pack<typename Program::Target, kVecSize>& t) const {
    Compute kept[2][kVecSize];
    sums(first, x, t, kept);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) kept[0][i] *= factor;
    place.template input<kVecSize>(first, NarrowPack<typename Program::Gradient, kVecSize>::from(kept[0]));
  }
};

// dh/dp in place of the teacher's logits, in as many bytes. The factor makes the best of a half's range: |dh/dp| is
// below 250, and small where the logarithms of p and q nearly agree.
template <class Target>
struct GradByPInPlace {
  static_assert(sizeof(Target) == 2 || sizeof(Target) == 4, "a half or a float");
  using Storage = Choose<sizeof(Target) == 2, half_t, float>;
  static constexpr float kFactor = 256.0f;

  template <int kVecSize>
  static __device__ __forceinline__ Pack<Target, kVecSize> from(const float (&by_p)[kVecSize]) {
    float scaled[kVecSize];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) scaled[i] = by_p[i] * kFactor;
    return reinterpret_pack<Target>(NarrowPack<Storage, kVecSize>::from(scaled));
  }
  // Sets by_p to kFactor dh/dp.
  template <int kVecSize>
  static __device__ __forceinline__ void scaled_of(const Pack<Target, kVecSize>& pack, float (&by_p)[kVecSize]) {
    unpack(reinterpret_pack<Storage>(pack), by_p);
  }
};

// SumPass that replaces the teacher's logits of a pack by dh/dp, except those of the student's leader.
template <class Sums, class Program, class Compute = typename Program::Compute>
struct GradByPSumPass {
  static constexpr bool kReadsTargets = true;
  using Target = typename Program::Target;
  Sums& sums;

  template <int kVecSize>
  __device__ __forceinline__ Pack<Target, kVecSize> operator()(int64 first,
                                                               const Pack<typename Program::Input, kVecSize>& x,
                                                               const Pack<Target, kVecSize>& t) const {
    Compute kept[2][kVecSize], raw[kVecSize];
    sums(first, x, t, kept);
    Pack<Target, kVecSize> replacement = GradByPInPlace<Target>::from(kept[0]);
    unpack(x, raw);
    if (const unsigned leading = sums.program.leading(sums.row, static_cast<int>(first), raw)) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        if (leading >> i & 1) replacement.element[i] = t.element[i];
      }
    }
    return replacement;
  }
};

// Writes one number to all gradients of a row.
template <class Program, class Place, class Compute = typename Program::Compute>
struct FillPass {
  const Place& place;
  Compute number;

  template <int kVecSize>
  __device__ __forceinline__ void write(int64 first) const {
    Compute g[kVecSize];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) g[i] = number;
    place.template input<kVecSize>(first, NarrowPack<typename Program::Gradient, kVecSize>::from(g));
  }
};

// Leaders among a thread's own classes of both operands: the first class of the largest logit, or -1. The row is on
// chip, and no other lane of the warp shares it. A masked leader holds -inf, the logit of an impossible class, so that
// no pass compares each class with it. With a cap there is no masking: the cap would make that logit finite.
template <class Program>
struct OwnLeaders {
  static constexpr bool kMasks = !Program::kCapped;
  using Input = typename Program::Input;
  using Target = typename Program::Target;
  using Compute = typename Program::Compute;
  int leader[2];
  // Both operands of each leader, as they were before masking.
  Pack<Input, 1> x[2];
  Pack<Target, 1> t[2];

  template <class Classes>
  __device__ __forceinline__ OwnLeaders(const Classes& classes, const MaxPass<Program>& maxima)
      : leader{maxima.leaders[0].pack, maxima.leaders[1].pack} {
    find<0>(classes, maxima.leaders[0].raw);
    find<1>(classes, maxima.leaders[1].raw);
    if constexpr (kMasks) {
      if (leader[0] >= 0) classes.put_logit(leader[0], impossible<Input>());
      if (leader[1] >= 0) classes.put_target(leader[1], impossible<Target>());
    }
  }
  // Masks both operands of those leaders that are leaders of the row, and restores all others.
  template <class Classes, class Row>
  __device__ __forceinline__ void mask(const Classes& classes, const Row& row) const {
    if constexpr (kMasks) {
      if (leader[0] >= 0 && row.leader[0] < 0) classes.put_logit(leader[0], x[0]);
      if (leader[1] >= 0 && row.leader[1] < 0) classes.put_target(leader[1], t[1]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (row.leader[i] < 0) continue;
        classes.put_logit(leader[i], impossible<Input>());
        classes.put_target(leader[i], impossible<Target>());
      }
    }
  }
  // Restores all masked operands.
  template <class Classes>
  __device__ __forceinline__ void restore(const Classes& classes) const {
    if constexpr (kMasks) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (leader[i] < 0) continue;
        classes.put_logit(leader[i], x[i]);
        classes.put_target(leader[i], t[i]);
      }
    }
  }

 private:
  template <class Storage>
  static __device__ __forceinline__ Pack<Storage, 1> impossible() {
    return {{Narrow<Storage>::from(-scalar_infinity(Compute()))}};
  }
  // Advances the leader from the first class of its pack to the class that holds the largest logit, and loads its
  // operands.
  template <int kWhich, class Classes>
  __device__ __forceinline__ void find(const Classes& classes, Compute largest) {
    if (leader[kWhich] < 0) return;
#pragma unroll 1
    for (int i = 1;; ++i, ++leader[kWhich]) {
      classes.read(leader[kWhich], x[kWhich], t[kWhich]);
      const Compute logit = kWhich == 0 ? widen<Compute>(x[kWhich].element[0]) : widen<Compute>(t[kWhich].element[0]);
      if (logit == largest || i == Classes::kEach) return;
    }
  }
};

// Fewest classes of a row of 16 bits whose leaders are masked: with masking, rows of 8 lose 12 %, and rows of 19 gain 4
// to 20 %.
constexpr int kFewClasses = 12;

// Adds the exponentials of a thread's own classes, without their leaders.
template <class Program, class Compute = typename Program::Compute>
struct OwnExpPass {
  static constexpr bool kReadsTargets = true;
  const Program& program;
  const OwnLeaders<Program>& own;
  Compute shift[2];
  OnlineSoftmaxes<Compute, 2> softmaxes;

  __device__ __forceinline__ OwnExpPass(const Program& program, const MaxPass<Program>& maxima,
                                        const OwnLeaders<Program>& own)
      : program(program), own(own) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Compute none = -scalar_infinity(Compute());
      softmaxes.softmax[i] = {own.leader[i] < 0 ? none : program.logit.value(maxima.leaders[i].raw), Compute(0)};
      shift[i] = exp_shift(softmaxes.softmax[i].max_logit);
    }
  }
  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kVecSize>& x,
                                             const Pack<typename Program::Target, kVecSize>& t) {
    add<0>(static_cast<int>(first), x);
    add<1>(static_cast<int>(first), t);
  }

 private:
  template <int kWhich, class Storage, int kVecSize>
  __device__ __forceinline__ void add(int first, const Pack<Storage, kVecSize>& x) {
    Compute raw[kVecSize], e[kVecSize];
    unpack(x, raw);
    if constexpr (Program::kCapped || !kNarrow) {
      Compute z[kVecSize];
      program.logit.values_of(raw, z);
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) e[i] = program.logit.exponential_of(z[i], shift[kWhich]);
    } else {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) e[i] = program.logit.exponential(raw[i], shift[kWhich]);
    }
    if constexpr (!OwnLeaders<Program>::kMasks) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) e[i] = first + i == own.leader[kWhich] ? Compute(0) : e[i];
    }
    softmaxes.softmax[kWhich].exp_sum += sum_elements(e);
  }
};

// SumPass that evaluates classes by KnownLogs. It leaves out the leaders, for which KnownLogs lack digits. Values that
// KnownLogs do not cover make the sum NaN.
template <class Sums, class Program, class Compute = typename Program::Compute>
struct KnownSumPass {
  static constexpr bool kReadsTargets = true;
  Sums& sums;

  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kVecSize>& x,
                                             const Pack<typename Program::Target, kVecSize>& t) const {
    Compute raw[kVecSize], target[kVecSize], kept[2][kVecSize];
    unpack(x, raw);
    unpack(t, target);
    add(first, raw, target, kept);
  }
  // Also returns the kept numbers; those of leaders are meaningless. They will overwrite the operands, so a pack with
  // values that KnownLogs do not cover is evaluated from the softmaxes at once.
  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kVecSize>& x,
                                             const Pack<typename Program::Target, kVecSize>& t,
                                             Compute (&kept)[2][kVecSize]) const {
    Compute raw[kVecSize], target[kVecSize];
    unpack(x, raw);
    unpack(t, target);
    typename Program::Row& row = sums.row;
    const typename Program::Sums before = row.sums;
    add(first, raw, target, kept);
    if (row.sums.value == row.sums.value) return;
    row.sums = before;
    // Not unrolled, as in SumPass.
#pragma unroll 1
    for (int i = 0; i < kVecSize; ++i) {
      if (row.leads(static_cast<int>(first) + i)) continue;
      Compute of_class[2];
      sums.evaluate(first + i, element_at(raw, i), element_at(target, i), of_class[0], of_class[1]);
#pragma unroll
      for (int k = 0; k < 2; ++k) set_element_at(kept[k], i, of_class[k]);
    }
  }

 private:
  template <int kVecSize>
  __device__ __forceinline__ void add(int64 first, const Compute (&raw)[kVecSize], const Compute (&target)[kVecSize],
                                      Compute (&kept)[2][kVecSize]) const {
    const Program& program = sums.program;
    typename Program::Row& row = sums.row;
    Compute y[kVecSize], second[kVecSize];
    program.logit.unscaled_of(raw, y);
    program.logit.unscaled_of(target, second);
    if constexpr (!OwnLeaders<Program>::kMasks) program.without_leaders(row, static_cast<int>(first), y, second);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const auto of_class = program.evaluate_known(row, y[i], second[i], first + i);
      Sums::add_to(row.sums, of_class);
      kept[0][i] = tangent_or_zero(of_class, 0);
      kept[1][i] = row.logs.log_p(row.softmax[0], y[i], second[i]).number;
    }
  }
};

// Sums of AffinePass over some classes: the softmax, the sum of h relative to its shift, and the sum of h_1.
template <class Compute, class Sum = Compute>
struct AffineSums {
  OnlineSoftmax<Compute, ExcludeMax> softmax;
  Compute value;
  Sum grad_log_p;

  static __device__ __forceinline__ AffineSums empty() {
    return {{-scalar_infinity(Compute()), Compute(0)}, Compute(0), Compute(0)};
  }
  // Returns the sum of h relative to the shift of another maximum.
  __device__ __forceinline__ Compute value_for(Compute max_logit) const {
    return scalar_fma(exp_shift(softmax.max_logit) - exp_shift(max_logit), with_leader(grad_log_p), value);
  }
};
template <class Compute, class Sum>
__device__ __forceinline__ void combine(AffineSums<Compute, Sum>& part, const AffineSums<Compute, Sum>& other) {
  const Compute max_logit = max_ignoring_nan(part.softmax.max_logit, other.softmax.max_logit);
  part.value = part.value_for(max_logit) + other.value_for(max_logit);
  part.grad_log_p = as_part(part.grad_log_p, identical(part.softmax.max_logit, max_logit)) +
                    as_part(other.grad_log_p, identical(other.softmax.max_logit, max_logit));
  combine(part.softmax, other.softmax);
}
// Preconditions: those of subwarp_combine of an OnlineSoftmax.
template <class Compute, class Sum>
__device__ __forceinline__ void subwarp_combine(AffineSums<Compute, Sum>& part, int width) {
  if (width == 1) return;
  const Compute before = part.value, old = part.softmax.max_logit;
  subwarp_combine(part.softmax, width);
  const Compute max_logit = part.softmax.max_logit;
  const Compute moved = scalar_fma(exp_shift(old) - exp_shift(max_logit), with_leader(part.grad_log_p), before);
  part.value = subwarp_reduce(moved, width, AddOp{});
  part.grad_log_p = subwarp_reduce(as_part(part.grad_log_p, identical(old, max_logit)), width, AddOp{});
}

// Adds an affine term of a class and its derivative. `log_p` is relative to the largest logit, as if that were the
// log-sum-exp.
template <class Program, class Compute>
__device__ __forceinline__ void add_affine(const Program& program, const typename Program::Row& row, int64 c,
                                           Compute log_p, Compute target, bool leads, Compute& value,
                                           typename Program::InputSum& grad_log_p) {
  const auto y = program.evaluate_at(row, log_p, target, c);
  value += y.value;
  add_class(grad_log_p, tangent_or_zero(y, 0), leads);
}

// Adds the AffineSums of a thread's classes in one pass.
template <class Program, class Compute = typename Program::Compute>
struct AffinePass {
  static constexpr bool kReadsTargets = true;
  const Program& program;
  const typename Program::Row& row;
  AffineSums<Compute, typename Program::InputSum> sums;

  __device__ __forceinline__ AffinePass(const Program& program, const typename Program::Row& row)
      : program(program), row(row), sums(decltype(sums)::empty()) {
  }
  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kVecSize>& x,
                                             const Pack<typename Program::Target, kVecSize>& t) {
    const Compute old = sums.softmax.max_logit;
    Compute z[kVecSize], target[kVecSize];
    add_logits(program.logit, x, sums.softmax, z);
    unpack(t, target);
    const Compute max_logit = sums.softmax.max_logit;
    if (!identical(old, max_logit)) {
      sums.value = scalar_fma(exp_shift(old) - exp_shift(max_logit), with_leader(sums.grad_log_p), sums.value);
      sums.grad_log_p = as_part(sums.grad_log_p, false);
    }
    const Compute shift = exp_shift(max_logit);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const bool leads = identical(z[i], max_logit);
      add_affine(program, row, first + i, z[i] - shift, target[i], leads, sums.value, sums.grad_log_p);
    }
  }
};

// Version of AffinePass for a thread with many packs, few of which raise the maximum. It keeps track of the leader.
template <class Program, class Compute = typename Program::Compute>
struct RunningAffinePass {
  static constexpr bool kReadsTargets = true;
  const Program& program;
  const typename Program::Row& row;
  RunningLeader<Compute> leader;
  AffineSums<Compute> sums;

  __device__ __forceinline__ RunningAffinePass(const Program& program, const typename Program::Row& row)
      : program(program), row(row), sums(decltype(sums)::empty()) {
  }
  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kVecSize>& x,
                                             const Pack<typename Program::Target, kVecSize>& t) {
    if (leader.add(static_cast<int>(first), x)) {
      const Compute max_logit = program.logit.value(leader.raw);
      sums.value = sums.value_for(max_logit);
      rescale(sums.softmax, max_logit);
    }
    Compute raw[kVecSize], log_p[kVecSize], target[kVecSize];
    add_exponentials(program.logit, static_cast<int>(first), x, known(), sums.softmax.exp_sum);
    unpack(x, raw);
    unpack(t, target);
    program.logit.relative_values(raw, exp_shift(sums.softmax.max_logit), log_p);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      add_affine(program, row, first + i, log_p[i], target[i], false, sums.value, sums.grad_log_p);
    }
  }
  // Largest logit of the thread.
  __device__ __forceinline__ KnownMax<Compute> known() const {
    return {sums.softmax.max_logit, leader.pack};
  }
};

// AffinePass for a row on chip, relative to the maximum of those lanes of a warp that share it.
template <class Program, class Compute = typename Program::Compute>
struct AffineSumPass {
  static constexpr bool kReadsTargets = true;
  const Program& program;
  const typename Program::Row& row;
  KnownMax<Compute> known;
  Compute exp_sum, value, grad_log_p;

  // Preconditions: those of subwarp_reduce.
  __device__ __forceinline__ AffineSumPass(const Program& program, const typename Program::Row& row,
                                           const MaxPass<Program>& maxima, int width)
      : program(program),
        row(row),
        known(maxima.leaders[0].of_subwarp(program.logit, width)),
        exp_sum(Compute(0)),
        value(Compute(0)),
        grad_log_p(Compute(0)) {
  }
  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kVecSize>& x,
                                             const Pack<typename Program::Target, kVecSize>& t) {
    Compute raw[kVecSize], log_p[kVecSize], target[kVecSize];
    add_exponentials(program.logit, static_cast<int>(first), x, known, exp_sum);
    unpack(x, raw);
    unpack(t, target);
    program.logit.relative_values(raw, exp_shift(known.max_logit), log_p);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      // Sums on chip are numbers, which do not depend on the leader.
      add_affine(program, row, first + i, log_p[i], target[i], false, value, grad_log_p);
    }
  }
  // Sums over the classes of all these lanes. Preconditions: those of subwarp_reduce.
  __device__ __forceinline__ AffineSums<Compute> of_subwarp(int width) const {
    return {{known.max_logit, subwarp_reduce(exp_sum, width, AddOp{})},
            subwarp_reduce(value, width, AddOp{}),
            subwarp_reduce(grad_log_p, width, AddOp{})};
  }
};

// Stores the gradients of a pack in memory. `first` is its first class.
template <class Program>
struct GradientsInMemory {
  const Program& program;
  const int64 (&offset)[kRowStreams];
  int64 stride, target_stride;  // between classes

  template <int kVecSize>
  __device__ __forceinline__ void input(int64 first, const Pack<typename Program::Gradient, kVecSize>& g) const {
    store_stream<kVecSize>(program.gradients + offset[kGradients] + first * stride, g);
  }
  template <int kVecSize>
  __device__ __forceinline__ void target(int64 first, const Pack<typename Program::TargetGradient, kVecSize>& g) const {
    store_stream<kVecSize>(program.target_gradients + offset[kTargetGradients] + first * target_stride, g);
  }
};

// Stores the gradients of a pack where Classes keeps its operands. `first` is its first class.
template <class Classes>
struct GradientsInPlace {
  const Classes& classes;

  template <int kVecSize, class Storage>
  __device__ __forceinline__ void input(int64 first, const Pack<Storage, kVecSize>& g) const {
    classes.template input<kVecSize>(first, g);
  }
  template <int kVecSize, class Storage>
  __device__ __forceinline__ void target(int64 first, const Pack<Storage, kVecSize>& g) const {
    classes.template target<kVecSize>(first, g);
  }
};

// Vector-Jacobian product of a log-softmax: from the derivatives h_c with respect to the log-probabilities to the
// derivatives g_c with respect to the logits.
//
//   g_c = factor (h_c - p_c (sum - penalty_grad))                                  sum = sum over k of h_k
//   g_m = factor (h_m (1 - p_m) - p_m ((sum - h_m) - penalty_grad))                at the largest logit
//
// Both formulas have the same exact value. The first takes three instructions, with the exponential instead of p_c, and
// loses no more than a unit in the last place while p_c <= 1/2. Only the largest logit can exceed that: its own h_m
// must not cancel. If two classes share the maximum, both use the second formula, and p <= 1/2.
template <class Compute, class Sum = Compute>
struct SoftmaxVjp {
  Compute max_logit;
  Compute factor;
  Compute of_all;  // factor (sum - penalty_grad)
  Compute shared;  // of_all divided by the sum of exponentials
  Compute sum, penalty_grad, inv_sum, max_complement;

  __device__ __forceinline__ SoftmaxVjp(const Softmax<Compute>& s, Compute sum, Compute penalty_grad, Compute factor)
      : max_logit(s.max_logit),
        factor(factor),
        of_all((sum - penalty_grad) * factor),
        shared((sum - penalty_grad) * s.inv_sum * factor),
        sum(sum),
        penalty_grad(penalty_grad),
        inv_sum(s.inv_sum),
        max_complement(s.max_complement) {
  }
  // Returns g of a class other than that of the largest logit, given p and h.
  __device__ __forceinline__ Compute apply(Compute p, Compute h) const {
    return scalar_fma(-p, of_all, h * factor);
  }
  // Returns g of the class of the largest logit, given h.
  __device__ __forceinline__ Compute at_largest(Compute h) const {
    return (h * max_complement - inv_sum * ((sum - h) - penalty_grad)) * factor;
  }
  // Replaces the derivatives h of a pack by g, given its logits z. `has_largest`: true if one of these is the largest
  // logit of the row; may be false if no probability exceeds 1/2.
  template <class Logits, int kVecSize>
  __device__ __forceinline__ void apply(const Logits& logit, const Compute (&z)[kVecSize], bool has_largest,
                                        Compute (&h)[kVecSize]) const {
    Compute at_max[kVecSize];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      at_max[i] = h[i];
      h[i] = scalar_fma(-logit.exponential_of(z[i], max_logit), shared, h[i] * factor);
    }
    // The rest is rare.
    if (!has_largest) return;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) h[i] = identical(z[i], max_logit) ? at_largest(at_max[i]) : h[i];
  }
  template <class Logits, int kVecSize>
  __device__ __forceinline__ void apply(const Logits& logit, const Compute (&z)[kVecSize],
                                        Compute (&h)[kVecSize]) const {
    Compute largest = z[0];
#pragma unroll
    for (int i = 1; i < kVecSize; ++i) largest = max_ignoring_nan(largest, z[i]);
    apply(logit, z, identical(largest, max_logit), h);
  }
  // Version for 16 bits, given logits before scaling.
  template <class Logits, int kVecSize>
  __device__ __forceinline__ void apply_to_raw(const Logits& logit, const Compute (&raw)[kVecSize], bool has_largest,
                                               Compute (&h)[kVecSize]) const {
    Compute before[kVecSize];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      before[i] = h[i];
      h[i] = scalar_fma(-logit.exponential(raw[i], max_logit), shared, h[i] * factor);
    }
    // The rest is rare.
    if (!has_largest) return;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      h[i] = identical(logit.value(raw[i]), max_logit) ? at_largest(before[i]) : h[i];
    }
  }
  // Replaces the derivatives h of a pack by g, given p.
  template <int kVecSize>
  __device__ __forceinline__ void apply_to(const Compute (&p)[kVecSize], Compute (&h)[kVecSize]) const {
    Compute at_max[kVecSize], largest = p[0];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      largest = max_ignoring_nan(largest, p[i]);
      at_max[i] = h[i];
      h[i] = apply(p[i], h[i]);
    }
    if (!identical(largest, inv_sum)) return;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) h[i] = identical(p[i], inv_sum) ? at_largest(at_max[i]) : h[i];
  }
};

// Computes the gradients of a thread's classes. `Place` stores them; it has the interface of GradientsInMemory.
template <int kLogs, class Program, class Place, class Compute = typename Program::Compute>
struct GradientPass {
  static constexpr bool kReadsTargets = !Program::kSkipsSums || Program::kValued;
  // True if row.leader is set without KnownLogs: only the leader's pack is then compared with the largest logit.
  static constexpr bool kKnowsLeader = kKnownWithExceptions<kLogs> && Program::kAffine;
  const Program& program;
  const typename Program::Row& row;
  const Place& place;
  bool active;
  // With Program::kSkipsSums and kValued: the value of the row, to which Program::add_to_value adds.
  Compute* value;
  SoftmaxVjp<Compute, typename Program::InputSum> of_logits;
  SoftmaxVjp<Compute, typename Program::TargetSum> of_teacher;

  __device__ __forceinline__ GradientPass(const Program& program, const typename Program::Row& row, const Place& place,
                                          bool active, Compute* value = nullptr)
      : program(program),
        row(row),
        place(place),
        active(active),
        value(value),
        of_logits(row.softmax[0], row.sums.grad_log_p, row.penalty_grad, row.factor * program.logit.common_slope()),
        of_teacher(row.softmax[Program::kSoftmaxes - 1], row.sums.grad_log_q, Compute(0),
                   row.factor * program.logit.common_slope()) {
  }
  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kVecSize>& x,
                                             const Pack<typename Program::Target, kVecSize>& t) const {
    if (stores_value<kVecSize>(first)) return;
    Compute raw[kVecSize], target[kVecSize], grad_z[kVecSize], grad_t[kVecSize];
    unpack(x, raw);
    if constexpr (kReadsTargets) {
      unpack(t, target);
    } else {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) target[i] = Compute(0);
    }
    if constexpr (kLogs != kOfSoftmax && Program::kKnown) {
      evaluate_known(first, raw, target, grad_z, grad_t);
    } else {
      evaluate(first, raw, target, grad_z, grad_t);
    }
    store(first, grad_z, grad_t);
  }
  // If the row has no gradient, stores that of a pack, and returns true: NaN for a NaN row, 0 for an inactive one.
  template <int kVecSize>
  __device__ __forceinline__ bool stores_value(int64 first) const {
    if (active && row.value == row.value) return false;
    Compute g[kVecSize];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) g[i] = row.value;
    store(first, g, g);
    return true;
  }
  // Returns the gradient of a class, evaluated from the softmaxes.
  __device__ __forceinline__ Compute exactly(int64 c, Compute x, Compute t) const {
    const Compute raw[1] = {x}, target[1] = {t};
    Compute grad_z[1], grad_t[1];
    evaluate(c, raw, target, grad_z, grad_t);
    return grad_z[0];
  }

 private:
  template <int kVecSize>
  __device__ __forceinline__ void evaluate_known(int64 first, const Compute (&raw)[kVecSize],
                                                 const Compute (&target)[kVecSize], Compute (&grad_z)[kVecSize],
                                                 Compute (&grad_t)[kVecSize]) const {
    Compute y[kVecSize], t[kVecSize], slopes[kVecSize], teacher_slopes[kVecSize];
    program.logit.unscaled_and_slopes(raw, y, slopes);
    program.logit.unscaled_and_slopes(target, t, teacher_slopes);
    unsigned classes = 0;
    if constexpr (kLogs == kKnownAlone) {
      if constexpr (!OwnLeaders<Program>::kMasks) program.without_leaders(row, static_cast<int>(first), y, t);
    } else {
      classes = program.lacking_digits(row, static_cast<int>(first), raw, target);
      program.without(classes, y, t);
    }
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const auto of_class = program.evaluate_known(row, y[i], t[i], first + i);
      const Compute p = row.logs.log_p(row.softmax[0], y[i], t[i]).number;
      const Compute q = row.logs.log_q(row.softmax[1], y[i], t[i]).number;
      grad_z[i] = of_logits.apply(p, tangent_or_zero(of_class, 0)) * slopes[i];
      grad_t[i] = of_teacher.apply(q, tangent_or_zero(of_class, 1)) * teacher_slopes[i];
    }
    for_each_bit<kLogs>(classes, [&](int i) {
      const Compute x[1] = {element_at(raw, i)}, of_target[1] = {element_at(target, i)};
      Compute g[1], g_t[1];
      evaluate(first + i, x, of_target, g, g_t);
      set_element_at(grad_z, i, g[0]);
      set_element_at(grad_t, i, g_t[0]);
    });
  }
  template <int kVecSize>
  __device__ __forceinline__ void evaluate(int64 first, const Compute (&raw)[kVecSize],
                                           const Compute (&target)[kVecSize], Compute (&grad_z)[kVecSize],
                                           Compute (&grad_t)[kVecSize]) const {
    Compute z[kVecSize], slopes[kVecSize], second[kVecSize];
    program.logit.values_and_slopes(raw, z, slopes);
    if constexpr (Program::kTeacher) program.logit.values_of(target, second);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const auto y = program.evaluate(row, z[i], Program::kTeacher ? second[i] : target[i], first + i);
      grad_z[i] = tangent_or_zero(y, 0);
      grad_t[i] = tangent_or_zero(y, 1);
      if constexpr (Program::kSkipsSums) {
        if constexpr (Program::kValued) Program::add_to_value(y.value, *value);
        grad_z[i] *= of_logits.factor;
      }
    }
    if constexpr (Program::kInputGradient && kKnowsLeader) {
      const bool has_largest = static_cast<int>(first) == row.leader[0];
      if constexpr (kNarrow && !Program::kCapped) {
        of_logits.apply_to_raw(program.logit, raw, has_largest, grad_z);
      } else {
        of_logits.apply(program.logit, z, has_largest, grad_z);
      }
    } else if constexpr (Program::kInputGradient && !Program::kSkipsSums) {
      of_logits.apply(program.logit, z, grad_z);
    }
    if constexpr (Program::kTeacher && Program::kTargetGradient) of_teacher.apply(program.logit, second, grad_t);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      if constexpr (Program::kInputGradient && Program::kCapped) grad_z[i] *= slopes[i];
      if constexpr (Program::kTargetGradient && (!Program::kTeacher || Program::kCapped)) {
        grad_t[i] *= Program::kTeacher ? program.logit.slope(target[i]) : row.factor;
      }
    }
  }
  template <int kVecSize>
  __device__ __forceinline__ void store(int64 first, const Compute (&grad_z)[kVecSize],
                                        const Compute (&grad_t)[kVecSize]) const {
    if constexpr (Program::kInputGradient) {
      place.template input<kVecSize>(first, NarrowPack<typename Program::Gradient, kVecSize>::from(grad_z));
    }
    if constexpr (Program::kTargetGradient) {
      place.template target<kVecSize>(first, NarrowPack<typename Program::TargetGradient, kVecSize>::from(grad_t));
    }
  }
};

// Computes the gradients of a row from what GradByPSumPass left. If KnownLogs do not cover all values of the thread,
// dh/dp may be out of range, and the thread reads its teacher's logits from memory again.
template <int kLogs, class Program, class Place, class Compute = typename Program::Compute>
struct GradByPGradientPass {
  static constexpr bool kReadsTargets = true;
  using Input = typename Program::Input;
  using Target = typename Program::Target;
  const Program& program;
  const typename Program::Row& row;
  const Target* teacher;
  GradientPass<kLogs, Program, Place> gradients;
  Compute factor;  // of dh/dp in its place

  __device__ __forceinline__ GradByPGradientPass(const Program& program, const typename Program::Row& row,
                                                 const int64 (&offset)[kRowStreams], const Place& place, bool active)
      : program(program),
        row(row),
        teacher(program.targets_of(offset)),
        gradients(program, row, place, active),
        factor(gradients.of_logits.factor * (Compute(1) / GradByPInPlace<Target>::kFactor)) {
  }
  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Pack<Input, kVecSize>& x,
                                             const Pack<Target, kVecSize>& t) const {
    if (gradients.template stores_value<kVecSize>(first)) return;
    Compute raw[kVecSize], y[kVecSize], g[kVecSize];
    unpack(x, raw);
    program.logit.unscaled_of(raw, y);
    GradByPInPlace<Target>::scaled_of(t, g);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const Compute p = row.logs.log_p(row.softmax[0], y[i], Compute(0)).number;
      g[i] = p * scalar_fma(g[i], factor, -gradients.of_logits.of_all);
    }
    const unsigned leading = program.leading(row, static_cast<int>(first), raw);
    for_each_bit<kLogs>(row.known ? leading : (1u << kVecSize) - 1u, [&](int i) {
      const Target of_teacher = row.known ? element_at(t.element, i) : teacher[first + i];
      set_element_at(g, i, gradients.exactly(first + i, element_at(raw, i), widen<Compute>(of_teacher)));
    });
    gradients.place.template input<kVecSize>(first, NarrowPack<typename Program::Gradient, kVecSize>::from(g));
  }
};

// Computes the gradients of a row whose SumPass has kept h_1 and p of each class.
template <class Program, class Place, class Compute = typename Program::Compute>
struct KeptGradientPass {
  const Place& place;
  Compute instead;  // gradient of an inactive row (0) or of a NaN row (NaN)
  bool usual;
  SoftmaxVjp<Compute> of_logits;

  __device__ __forceinline__ KeptGradientPass(const Program& program, const typename Program::Row& row,
                                              const Place& place, bool active)
      : place(place),
        instead(row.value),
        usual(active && row.value == row.value),
        of_logits(row.softmax[0], row.sums.grad_log_p, row.penalty_grad, row.factor * program.logit.common_slope()) {
  }
  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Compute (&kept)[2][kVecSize]) const {
    Compute g[kVecSize];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) g[i] = kept[0][i];
    of_logits.apply_to(kept[1], g);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) g[i] = usual ? g[i] : instead;
    place.template input<kVecSize>(first, NarrowPack<typename Program::Gradient, kVecSize>::from(g));
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// One row

struct SubwarpAdd {
  int lanes;
  template <class Compute>
  __device__ __forceinline__ void operator()(Compute& x) const {
    if (lanes > 1) x = subwarp_reduce(x, lanes, AddOp{});
  }
};

// Adds the sums of all threads of the group; every one of them gets the result. Precondition: all threads of the group
// call it together, with a SubwarpGroup all lanes of the warp.
template <class Sums, class Group, class Compute, class OfInput, class OfTarget>
__device__ __forceinline__ void group_reduce_sums(const Group& group, DenseSums<Compute, OfInput, OfTarget>& sums,
                                                  SyncState& sync) {
  Sums::over(sums, SubwarpAdd{group.subwarp_size()});
  if constexpr (Group::kMultiWarp) {
    const DenseSums<Compute, OfInput, OfTarget>* all;
    group.all_gather(sums, sync, all);
    const int lane = threadIdx.x % kWarp, warps = group.num_warps();
    sums = {Compute(0), Compute(0), Compute(0)};
#pragma unroll
    for (int i = 0; i < Group::kClusterSize * kWarp; i += kWarp) {
      if (lane + i >= warps) continue;
      sums.value += all[lane + i].value;
      sums.grad_log_p += all[lane + i].grad_log_p;
      sums.grad_log_q += all[lane + i].grad_log_q;
    }
    Sums::over(sums, SubwarpAdd{kWarp});
  }
}

template <class Sums, int kWarps, class Compute>
__device__ __forceinline__ void group_reduce_sums(const ColumnWarps<kWarps>& group, DenseSums<Compute>& sums,
                                                  SyncState&) {
  Compute x[] = {sums.value, sums.grad_log_p, sums.grad_log_q};
  row_reduce(group, x, AddOp{});
  sums = {x[0], x[1], x[2]};
}

// Returns the destination of a row's gradients: its classes, or memory. Returned by reference, it cost kernels of
// second derivatives 31 registers (NVRTC 13.0).
template <class Program, class Classes>
__device__ __forceinline__ auto gradient_place(const Program& program, const int64 (&offset)[kRowStreams],
                                               const Classes& classes) {
  if constexpr (Classes::kPlacesGradients) {
    return GradientsInPlace<Classes>{classes};
  } else {
    const auto& stride = program.space.class_stride;
    return GradientsInMemory<Program>{program, offset, Classes::kContiguous ? 1 : stride[kGradients],
                                      Classes::kContiguous ? 1 : stride[kTargetGradients]};
  }
}

// Runs the pass before the gradients. Without gradients it is the last pass.
template <bool kGradient, class Classes, class Pass>
__device__ __forceinline__ void visit_before_gradient(Classes& classes, Pass& pass) {
  if constexpr (kGradient) {
    classes.for_each(pass);
    classes.prefetch_next();
  } else {
    classes.prefetch_next();
    classes.final_pass(pass);
  }
}

// Writes the gradients of a row for visit_known_row. The leaders' gradients are written one by one.
template <class Program, class Place, class Classes>
__device__ __forceinline__ void write_known_gradients(const Program& program, const typename Program::Row& row,
                                                      const Place& place, const Classes& classes,
                                                      const bool (&leads)[2], const OwnLeaders<Program>& own) {
  const GradientPass<kOfSoftmax, Program, Place> gradients(program, row, place, classes.active);
  if (!row.known) {
    classes.final_pass_all(gradients);
    return;
  }
  classes.final_pass_all(GradientPass<kKnownAlone, Program, Place>(program, row, place, classes.active));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (leads[i]) gradients(row.leader[i], own.x[i], own.t[i]);
  }
}

// Version of visit_dense_row for two softmaxes and Classes::kAlone. KnownLogs evaluate all classes but the leaders.
// The softmaxes evaluate values that KnownLogs do not cover: their pack if numbers are kept, otherwise all classes of
// the thread.
template <bool kGradient, class Group, class Program, class Classes, class Scale>
__device__ __forceinline__ typename Program::Compute visit_known_row(const Program& program, const Group& group,
                                                                     const int64 (&offset)[kRowStreams],
                                                                     Classes& classes, bool exists, SyncState& sync,
                                                                     Scale& scale) {
  using Compute = typename Program::Compute;
  constexpr bool kKept = kGradient && Program::kKeeps && Classes::kHasRoom;
  using Sums = SumPass<kGradient, kOfSoftmax, kKept ? kKeepsGradientAndP : kKeepsNothing, Program>;
  typename Program::Row row;
  row.sums = {Compute(0), Compute(0), Compute(0)};
  row.classes = constant<Compute>(static_cast<double>(program.space.classes));
  MaxPass<Program> maxima;
  classes.for_each(maxima);
  const OwnLeaders<Program> own(classes, maxima);
  OwnExpPass<Program> exponentials(program, maxima, own);
  classes.for_each(exponentials);
  auto softmaxes = exponentials.softmaxes;
  group_combine(group, softmaxes, sync);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    row.softmax[i].set(softmaxes.softmax[i]);
    const bool leads = identical(exponentials.softmaxes.softmax[i].max_logit, row.softmax[i].max_logit);
    row.leader[i] = leads ? own.leader[i] : -1;
  }
  own.mask(classes, row);
  row.logs.set(program.logit, row.softmax[0], row.softmax[1]);
  const bool leads[2] = {row.leader[0] >= 0, row.leader[1] >= 0 && row.leader[1] != row.leader[0]};
  Sums sums{program, row};
  KnownSumPass<Sums, Program> known_sums{sums};
  if constexpr (kKept) {
    classes.for_each_kept(known_sums);
  } else {
    classes.for_each(known_sums);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!leads[i]) continue;
    Compute kept[2][1];
    sums(row.leader[i], own.x[i], own.t[i], kept);
    if constexpr (kKept) classes.keep(row.leader[i], kept);
  }
  row.known = row.sums.value == row.sums.value;
  if (!kKept && !row.known) {
    row.sums = {Compute(0), Compute(0), Compute(0)};
    own.restore(classes);
    classes.for_each(sums);
  }
  group_reduce_sums<Sums>(group, row.sums, sync);
  program.finish(row, offset, classes.active, exists && group.thread_rank() == 0);
  if constexpr (kGradient) {
    row.factor = grad_factor(scale, offset);
    const auto place = gradient_place(program, offset, classes);
    if constexpr (kKept) {
      classes.final_kept_pass(KeptGradientPass<Program, decltype(place)>(program, row, place, classes.active));
    } else {
      write_known_gradients(program, row, place, classes, leads, own);
    }
  }
  return row.value;
}

// Evaluates a row, and with kGradient writes its gradients. `classes` yields the row's classes to the threads of the
// group:
//
//   classes.for_each(f)          calls f for all classes of this thread; for none if the row is inactive
//   classes.final_pass(f)        for_each() for the last pass
//   classes.final_pass_all(f)    final_pass() also for an inactive row, whose packs are undefined
//   classes.fill(f)              calls f.write<n>(first) for each n classes of this thread, also if the row is inactive
//
// With Classes::kPlacesGradients, `classes` also stores the gradients, with the interface of GradientsInMemory. With
// Classes::kOnChip, another pass costs no traffic. With Classes::kHasRoom, two numbers per class can replace the
// operands:
//
//   classes.for_each_kept(f)     calls f(first, x, t, kept) for all classes of this thread, and keeps `kept`
//   classes.final_kept_pass(f)   calls f(first, kept) in the last pass; for an inactive row `kept` is undefined
//
// With Classes::kReplaces, numbers can replace targets:
//
//   classes.for_each_replaced(f)   calls t = f(first, x, t) for all classes of this thread
//   classes.final_replaced_pass(f) calls f(first, x, t) with these targets, otherwise as final_pass_all()
//
// With Classes::kAlone, the row is on chip too, and no other lane of the warp has classes of it:
//
//   classes.read(c, x, t)        returns the operands of a class of this thread
//   classes.put_logit(c, x)      replaces the logit of such a class; put_target(c, t) replaces its target
//   classes.keep(c, kept)        keeps these numbers of the class (with kHasRoom)
//   classes.count()              number of classes of the row
//   Classes::kEach               most classes of a pack
//
// Precondition: all threads of the worker call it together.
template <bool kGradient, class Group, class Program, class Classes, class Scale>
__device__ __forceinline__ typename Program::Compute visit_dense_row(const Program& program, const Group& group,
                                                                     const int64 (&offset)[kRowStreams],
                                                                     Classes& classes, bool exists, SyncState& sync,
                                                                     Scale& scale) {
  using Compute = typename Program::Compute;
  // With kNarrow, the general passes are as fast for terms whose derivatives with respect to log p sum to 0.
  if constexpr (Classes::kAlone && Program::kKnown && !(kNarrow && Program::Term::kBalanced)) {
    return visit_known_row<kGradient>(program, group, offset, classes, exists, sync, scale);
  }
  typename Program::Row row;
  row.sums = {Compute(0), Compute(0), Compute(0)};
  row.classes = constant<Compute>(static_cast<double>(program.space.classes));
  constexpr bool kPlain = kSameType<Compute, float> || kSameType<Compute, double>;
  constexpr bool kOnChip = Classes::kOnChip && kPlain;
  // True if passes know the leaders of the row.
  constexpr bool kLed = kOnChip || (Classes::kManyPacks && kPlain);
  constexpr int kInPacks = Group::kMultiWarp ? kKnownInPacks : kKnownInLanes;
  constexpr bool kAlone = Classes::kAlone && Program::kTeacher && kPlain;
  // Gradients that overwrite logits in memory could destroy logits that other lanes are still to read.
  constexpr bool kAtOnce = kGradient && Program::kTermIsGradient && (Classes::kOnChip || !Program::kInPlace);
  constexpr bool kKept = kGradient && (kOnChip || kAlone) && !kAtOnce && Program::kKeeps && Classes::kHasRoom;
  constexpr bool kGradsByP = kGradient && kLed && Program::kKeepsGradsByP && Classes::kReplaces && !kKept;
  const int width = group.subwarp_size();
  MaxPass<Program> maxima;
  if constexpr (kOnChip) classes.for_each(maxima);
  if constexpr (Program::kAffine) {
    AffineSums<Compute, typename Program::InputSum> sums;
    KnownMax<Compute> known;
    if constexpr (kOnChip) {
      AffineSumPass<Program> pass(program, row, maxima, width);
      visit_before_gradient<kGradient>(classes, pass);
      sums = pass.of_subwarp(width);
      known = pass.known;
    } else if constexpr (kLed) {
      RunningAffinePass<Program> pass(program, row);
      visit_before_gradient<kGradient>(classes, pass);
      sums = pass.sums;
      known = pass.known();
      subwarp_combine(sums, width);
    } else {
      AffinePass<Program> pass(program, row);
      visit_before_gradient<kGradient>(classes, pass);
      sums = pass.sums;
      subwarp_combine(sums, width);
    }
    group_combine(group, sums, sync);
    row.softmax[0].set(sums.softmax);
    // at_largest() is for p > 1/2.
    if constexpr (kLed) row.leader[0] = leader_of_row(known, row.softmax[0], Compute(0.69315));
    // A row without a distribution, whose largest logit is infinite, is NaN.
    const Compute max_logit = row.softmax[0].max_logit, no_distribution = max_logit - max_logit;
    row.sums.value = scalar_fma(-row.softmax[0].log_sum, with_leader(sums.grad_log_p), sums.value) + no_distribution;
    row.sums.grad_log_p = sums.grad_log_p;
  } else {
    // In 16 bits, the logarithms of the softmaxes take fewer instructions than KnownLogs and their exceptions.
    constexpr int kLogs = !kLed ? kOfSoftmax : kAtOnce ? kKnownRatio : kInPacks;
    constexpr int kKeeps = kAtOnce     ? kKeepsGradient
                           : kKept     ? kKeepsGradientAndP
                           : kGradsByP ? kKeepsGradByP
                                       : kKeepsNothing;
    using Sums = SumPass<kGradient, kLogs, kKeeps, Program>;
    OnlineSoftmaxes<Compute, Program::kSoftmaxes> softmaxes;
    KnownMax<Compute> known[Program::kSoftmaxes];
    if constexpr (kOnChip) {
      ExpPass<Program> pass(program, maxima, width);
      classes.for_each(pass);
      softmaxes = pass.of_subwarp(width);
#pragma unroll
      for (int i = 0; i < Program::kSoftmaxes; ++i) known[i] = pass.known[i];
    } else if constexpr (kAlone) {
      // For few classes, whose exponentials are cheap, comparing each of them is faster than finding and masking
      // leaders.
      if (kNarrow && classes.count() < kFewClasses) {
        SoftmaxPass<Program> pass(program);
        classes.for_each(pass);
        softmaxes = pass.softmaxes;
      } else {
        classes.for_each(maxima);
        const OwnLeaders<Program> own(classes, maxima);
        OwnExpPass<Program> pass(program, maxima, own);
        classes.for_each(pass);
        softmaxes = pass.softmaxes;
        own.restore(classes);
      }
    } else if constexpr (kLed) {
      RunningSoftmaxPass<Program> pass(program);
      classes.for_each(pass);
      softmaxes = pass.softmaxes;
#pragma unroll
      for (int i = 0; i < Program::kSoftmaxes; ++i) known[i] = pass.known(i);
      subwarp_combine(softmaxes, width);
    } else {
      SoftmaxPass<Program> pass(program);
      classes.for_each(pass);
      softmaxes = pass.softmaxes;
      subwarp_combine(softmaxes, width);
    }
    classes.prefetch_next();
    group_combine(group, softmaxes, sync);
#pragma unroll
    for (int i = 0; i < Program::kSoftmaxes; ++i) row.softmax[i].set(softmaxes.softmax[i]);
    if constexpr (kLed && Program::kKnown) {
      row.logs.set(program.logit, row.softmax[0], row.softmax[1]);
      row.known = true;
#pragma unroll
      for (int i = 0; i < Program::kSoftmaxes; ++i) {
        // KnownLogs lack digits where log p is near 0.
        row.leader[i] = leader_of_row(known[i], row.softmax[i], Compute(0.5));
      }
    }
    Sums sum_pass{program, row};
    if constexpr (Program::kSkipsSums) {
#pragma unroll
      for (int i = 0; i < Program::kSoftmaxes; ++i) {
        row.sums.value += row.softmax[i].max_logit - row.softmax[i].max_logit;
      }
    } else if constexpr (kAtOnce) {
      // As in resident_rows.cuh: a narrower gradient overwrites logits that other lanes read.
      if constexpr (Program::kInPlace && !Group::kMultiWarp) __syncwarp();
      row.factor = grad_factor(scale, offset);
      const auto place = gradient_place(program, offset, classes);
      const SumAndGradientPass<Sums, Program, decltype(place)> pass{sum_pass, place,
                                                                    row.factor * program.logit.common_slope()};
      classes.final_pass(pass);
    } else if constexpr (kKept) {
      classes.for_each_kept(sum_pass);
    } else if constexpr (kGradsByP) {
      classes.for_each_replaced(GradByPSumPass<Sums, Program>{sum_pass});
    } else if constexpr (kGradient) {
      classes.for_each(sum_pass);
    } else {
      classes.final_pass(sum_pass);
    }
    if constexpr (!Program::kSkipsSums) group_reduce_sums<Sums>(group, row.sums, sync);
  }
  const bool first = exists && group.thread_rank() == 0;
  constexpr bool kAddsLast = Program::kSkipsSums && Program::kValued;
  program.finish(row, offset, classes.active, first && !kAddsLast);
  if constexpr (kAtOnce) {
    if (!classes.active || row.value != row.value) {
      const auto place = gradient_place(program, offset, classes);
      classes.fill(FillPass<Program, decltype(place)>{place, row.value});
    }
  } else if constexpr (kGradient) {
    // So does a narrower gradient that is written after the sums.
    if constexpr (Program::kInPlace && !Group::kMultiWarp) __syncwarp();
    row.factor = grad_factor(scale, offset);
    const auto place = gradient_place(program, offset, classes);
    using Place = decltype(place);
    if constexpr (kKept) {
      classes.final_kept_pass(KeptGradientPass<Program, Place>(program, row, place, classes.active));
    } else if constexpr (kGradsByP) {
      classes.final_replaced_pass(
          GradByPGradientPass<kInPacks, Program, Place>(program, row, offset, place, classes.active));
    } else {
      Compute value = Compute(0);
      constexpr int kLogs = kLed ? kInPacks : kOfSoftmax;
      classes.final_pass_all(GradientPass<kLogs, Program, Place>(program, row, place, classes.active, &value));
      if constexpr (kAddsLast) {
        typename Program::Sums sums{value, Compute(0), Compute(0)};
        group_reduce_sums<SumPass<false, kLed ? kInPacks : kOfSoftmax, 0, Program>>(group, sums, sync);
        row.sums.value += sums.value;
        program.finish(row, offset, classes.active, first);
      }
    }
  }
  return row.value;
}

// Reader whose rows' classes are those of Source::Classes, constructed for each row.
template <class Source>
struct DenseReader {
  template <bool kGradient, class Group, class Program, class Scale>
  struct Visit {
    static constexpr bool kNeedsNextRow = false;
    const Program& program;
    const Group& group;
    Scale& scale;
    __device__ __forceinline__ auto operator()(int64 row, bool exists, int64, SyncState& sync) const {
      int64 offset[kRowStreams];
      program.space.offsets(exists ? row : 0, offset);
      const typename Source::template Classes<Program, Group> classes(program, group, offset, exists);
      return visit_dense_row<kGradient>(program, group, offset, classes, exists, sync, scale);
    }
  };

  // Interface of TwoPassReader::sweep.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    for_each_row(group, scale, program.space.rows, chunks, work,
                 Visit<kGradient, Group, Program, Scale>{program, group, scale});
  }
};
