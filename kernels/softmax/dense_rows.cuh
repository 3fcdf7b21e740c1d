// Softmax losses with dense targets t (R, C): what all layouts share.
//
//   L = sum over c of h(log p_c, t_c) + penalty(lse),       p = softmax(z), z as in softmax.cuh
//
//   dL/dz_c = h_1(c) - p_c (sum over k of h_1(k) - penalty')         h_1 = dh / d log p
//   dL/dt_c = h_2(c)                                                 h_2 = dh / dt
//
// With a teacher's logits in place of t it is h(log p_c, log q_c), and the gradient of the teacher's logits follows in
// the same way from h_2 and q.
//
// 1. SoftmaxPass: maximum and sum of exponentials of the logits, and of the teacher's (online_softmax.cuh).
// 2. subwarp_combine and group_combine: every thread of the group holds the softmax of the row.
// 3. SumPass: sums of h, h_1 and h_2. group_reduce_sums adds those of all threads.
// 4. GradientPass: the gradients of both operands.
//
// A term that is affine in log p needs no sum of exponentials for its own sums, only the shift m of the logits:
//
//   sum of h(log p_c, t_c) = sum of h(z_c - m, t_c) - log S (sum of h_1)             log p_c = z_c - m - log S
//
// so that AffinePass takes the place of SoftmaxPass and SumPass, and one exchange of a group that of two. Where h is a
// weighted -log p, nothing cancels: both parts have the same sign.
//
// Each pass is a functor f(first, x, t) on packs of contiguous classes from `first`. A Classes type yields the packs:
// from shared memory (resident_dense_rows.cuh), from memory again in each pass (two_pass_dense.cuh), or class by class
// in one thread (dense_thread_per_row.cuh). Functors are structs: compilers before CUDA 13.5 reject lambdas in
// templates of a kernel.
//
// A thread owns the same classes in all passes; a group owns a row; a worker owns a chunk, as in rows.cuh. Traffic and
// preconditions: those of the Classes type.
#pragma once
#include "softmax/rows.cuh"

// The online softmax of the logits, and of the teacher's logits if there are any.
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

// Adds the logits of a pack, and returns them in z.
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

// The softmax of a row, as each class needs it.
template <class Compute>
struct Softmax {
  Compute max_logit;
  Compute log_sum;
  Compute inv_sum;
  Compute max_complement;  // 1 - p of the largest logit

  __device__ __forceinline__ void set(const OnlineSoftmax<Compute, ExcludeMax>& n) {
    max_logit = n.max_logit;
    log_sum = scalar_log1p(n.exp_sum);
    inv_sum = scalar_divide_closely(Compute(1), Compute(1) + n.exp_sum);
    max_complement = n.exp_sum * inv_sum;
  }
  __device__ __forceinline__ Compute log_p(Compute z) const {
    return (z - max_logit) - log_sum;
  }
};

// Sums over the classes of a row: h, h_1 and h_2.
template <class Compute>
struct DenseSums {
  Compute value;
  Compute grad_log_p;
  Compute grad_log_q;
};

// A row as GradientPass needs it. `slope` is the derivative of the penalty, `factor` that of grad_output.
template <class Compute, int kCount>
struct DenseRow {
  Softmax<Compute> softmax[kCount];
  DenseSums<Compute> sums;
  Compute value;
  Compute slope;
  Compute factor;
  Dual<Compute, 0> classes;  // converted once: compilers would do it for every vector
};

template <class Term_, class Penalty_, class Space_, class Input_, class Target_, class Weight_, class Mask_,
          class Result_, bool kTeacher_, bool kCapped_, bool kInputGradient_, bool kTargetGradient_,
          class Gradient_ = Input_, bool kInPlace_ = false>
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
  static constexpr int kSoftmaxes = kTeacher ? 2 : 1;
  // Whether the gradients of a row are written over its logits, which its threads have to have read by then.
  static constexpr bool kInPlace = kInPlace_;
  static constexpr bool kWeighted = !kIsAbsent<Weight_>;
  // True if AffinePass serves. Numbers with tangents take the general passes.
  static constexpr bool kAffine =
      Term_::kAffine && !kTeacher && (kSameType<Compute, float> || kSameType<Compute, double>);
  static constexpr bool kInputGradient = kInputGradient_;
  static constexpr bool kTargetGradient = kTargetGradient_;
  using Row = DenseRow<Compute, kSoftmaxes>;

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

  // As in RowProgram, for count_rows.
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

  // Pointers to both operands of a row, and the distance of classes.
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

  // h and its derivatives at class c. z: the logit. t: the target, or the teacher's logit.
  __device__ __forceinline__ auto evaluate(const Row& row, Compute z, Compute t, int64 c) const {
    Compute second = t;
    if constexpr (kTeacher) second = row.softmax[1].log_p(t);
    return evaluate_at(row, row.softmax[0].log_p(z), second, c);
  }
  // The term given log p_c (or, if it is affine, any number) and the target, or log q_c.
  __device__ __forceinline__ auto evaluate_at(const Row& row, Compute log_p, Compute second, int64 c) const {
    Compute weight = Compute(1);
    if constexpr (kWeighted) weight = widen<Compute>(load_reused<1>(weights + c).element[0]);
    return term(variable<3u, 0>(log_p), variable<3u, 1>(second), variable<0u, 2>(weight), row.classes);
  }
  // The second operand as evaluate() expects it.
  __device__ __forceinline__ Compute second(Compute t) const {
    if constexpr (kTeacher) return logit.value(t);
    return t;
  }

  // Evaluates a row, and stores the outputs that are wanted per row. Precondition: `first` holds in one thread of the
  // group.
  __device__ __forceinline__ void finish(Row& row, const int64 (&offset)[kRowStreams], bool active, bool first) const {
    const Compute lse_of_row = active ? row.softmax[0].max_logit + row.softmax[0].log_sum : Compute(0);
    const auto added = penalty(variable<1u, 0>(lse_of_row));
    row.value = active ? row.sums.value + added.value : Compute(0);
    row.slope = tangent_or_zero(added, 0);
    if (row.value != row.value) row.value = nan_result(row.value);
    if (!first) return;
    if (values != nullptr) values[offset[kResults]] = Narrow<Result>::from(row.value);
    if (lse != nullptr) lse[offset[kResults]] = lse_of_row;
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// The passes

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

template <bool kGradient, class Program, class Compute = typename Program::Compute>
struct SumPass {
  static constexpr bool kReadsTargets = true;
  const Program& program;
  typename Program::Row& row;

  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kVecSize>& x,
                                             const Pack<typename Program::Target, kVecSize>& t) {
    Compute z[kVecSize], second[kVecSize];
    unpack(x, z);
    unpack(t, second);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const auto y = program.evaluate(row, program.logit.value(z[i]), program.second(second[i]), first + i);
      row.sums.value += y.value;
      if constexpr (kGradient && Program::kInputGradient) row.sums.grad_log_p += tangent_or_zero(y, 0);
      if constexpr (kGradient && Program::kTargetGradient && Program::kTeacher)
        row.sums.grad_log_q += tangent_or_zero(y, 1);
    }
  }
  // Applies `op` to each sum that is needed.
  template <class Op>
  __device__ __forceinline__ static void over(DenseSums<Compute>& sums, const Op& op) {
    op(sums.value);
    if constexpr (kGradient && Program::kInputGradient) op(sums.grad_log_p);
    if constexpr (kGradient && Program::kTargetGradient && Program::kTeacher) op(sums.grad_log_q);
  }
};

// Sums of AffinePass over some classes: the softmax, and relative to its shift the sum of h; and the sum of h_1.
template <class Compute>
struct AffineSums {
  OnlineSoftmax<Compute, ExcludeMax> softmax;
  Compute value;
  Compute grad_log_p;

  static __device__ __forceinline__ AffineSums empty() {
    return {{-scalar_infinity(Compute()), Compute(0)}, Compute(0), Compute(0)};
  }
  // The value relative to the shift of another maximum.
  __device__ __forceinline__ Compute value_for(Compute max_logit) const {
    return scalar_fma(exp_shift(softmax.max_logit) - exp_shift(max_logit), grad_log_p, value);
  }
};
template <class Compute>
__device__ __forceinline__ void combine(AffineSums<Compute>& part, const AffineSums<Compute>& other) {
  const Compute max_logit = max_ignoring_nan(part.softmax.max_logit, other.softmax.max_logit);
  part.value = part.value_for(max_logit) + other.value_for(max_logit);
  part.grad_log_p += other.grad_log_p;
  combine(part.softmax, other.softmax);
}
// Preconditions: those of subwarp_combine of an OnlineSoftmax.
template <class Compute>
__device__ __forceinline__ void subwarp_combine(AffineSums<Compute>& part, int width) {
  if (width == 1) return;
  const Compute before = part.value, old = part.softmax.max_logit;
  subwarp_combine(part.softmax, width);
  const Compute moved = scalar_fma(exp_shift(old) - exp_shift(part.softmax.max_logit), part.grad_log_p, before);
  part.value = subwarp_reduce(moved, width, AddOp{});
  part.grad_log_p = subwarp_reduce(part.grad_log_p, width, AddOp{});
}

template <class Program, class Compute = typename Program::Compute>
struct AffinePass {
  static constexpr bool kReadsTargets = true;
  const Program& program;
  const typename Program::Row& row;
  AffineSums<Compute> sums;

  __device__ __forceinline__ AffinePass(const Program& program, const typename Program::Row& row)
      : program(program), row(row), sums(AffineSums<Compute>::empty()) {
  }
  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kVecSize>& x,
                                             const Pack<typename Program::Target, kVecSize>& t) {
    const Compute old = sums.softmax.max_logit;
    Compute z[kVecSize], target[kVecSize];
    add_logits(program.logit, x, sums.softmax, z);
    unpack(t, target);
    if (!identical(old, sums.softmax.max_logit)) {
      sums.value = scalar_fma(exp_shift(old) - exp_shift(sums.softmax.max_logit), sums.grad_log_p, sums.value);
    }
    const Compute shift = exp_shift(sums.softmax.max_logit);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const auto y = program.evaluate_at(row, z[i] - shift, target[i], first + i);
      sums.value += y.value;
      sums.grad_log_p += tangent_or_zero(y, 0);
    }
  }
};

// Gradients of classes from `first` go to memory.
template <class Program>
struct GradientsInMemory {
  const Program& program;
  const int64 (&offset)[kRowStreams];
  int64 stride, target_stride;  // distance of classes

  template <int kVecSize>
  __device__ __forceinline__ void input(int64 first, const Pack<typename Program::Gradient, kVecSize>& g) const {
    store_stream<kVecSize>(program.gradients + offset[kGradients] + first * stride, g);
  }
  template <int kVecSize>
  __device__ __forceinline__ void target(int64 first, const Pack<typename Program::TargetGradient, kVecSize>& g) const {
    store_stream<kVecSize>(program.target_gradients + offset[kTargetGradients] + first * target_stride, g);
  }
};

// From the derivatives h_c with respect to the log-probabilities of a softmax to those with respect to its logits:
//
//   g_c = factor (h_c - p_c (sum - slope))                                         sum = sum over k of h_k
//   g_m = factor (h_m (1 - p_m) - p_m ((sum - h_m) - slope))                       at the largest logit
//
// Both are the same number. The first takes three instructions with the exponential in place of p_c, and loses no more
// than a unit in the last place while p_c <= 1/2. Only the largest logit can exceed that: its own h_m must not cancel.
// If two classes share the maximum, both take the second formula, and p <= 1/2.
template <class Compute>
struct SoftmaxVjp {
  Compute max_logit;
  Compute factor;
  Compute shared;  // factor (sum - slope) / sum of exponentials
  Compute sum, slope, inv_sum, max_complement;

  __device__ __forceinline__ SoftmaxVjp(const Softmax<Compute>& s, Compute sum, Compute slope, Compute factor)
      : max_logit(s.max_logit),
        factor(factor),
        shared((sum - slope) * s.inv_sum * factor),
        sum(sum),
        slope(slope),
        inv_sum(s.inv_sum),
        max_complement(s.max_complement) {
  }
  // Replaces the derivatives h by g, given z.
  template <class Logits, int kVecSize>
  __device__ __forceinline__ void apply(const Logits& logit, const Compute (&z)[kVecSize],
                                        Compute (&h)[kVecSize]) const {
    Compute at_max[kVecSize], largest = z[0];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      largest = max_ignoring_nan(largest, z[i]);
      at_max[i] = h[i];
      h[i] = scalar_fma(-logit.exponential_of(z[i], max_logit), shared, h[i] * factor);
    }
    // Rare.
    if (!identical(largest, max_logit)) return;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const Compute g = (at_max[i] * max_complement - inv_sum * ((sum - at_max[i]) - slope)) * factor;
      h[i] = identical(z[i], max_logit) ? g : h[i];
    }
  }
};

// `Place` takes the gradients, as GradientsInMemory.
template <class Program, class Place, class Compute = typename Program::Compute>
struct GradientPass {
  static constexpr bool kReadsTargets = true;
  const Program& program;
  const typename Program::Row& row;
  const Place& place;
  bool active;
  SoftmaxVjp<Compute> of_logits, of_teacher;

  __device__ __forceinline__ GradientPass(const Program& program, const typename Program::Row& row, const Place& place,
                                          bool active)
      : program(program),
        row(row),
        place(place),
        active(active),
        of_logits(row.softmax[0], row.sums.grad_log_p, row.slope, row.factor * program.logit.common_slope()),
        of_teacher(row.softmax[Program::kSoftmaxes - 1], row.sums.grad_log_q, Compute(0),
                   row.factor * program.logit.common_slope()) {
  }
  template <int kVecSize>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kVecSize>& x,
                                             const Pack<typename Program::Target, kVecSize>& t) const {
    Compute grad_z[kVecSize], grad_t[kVecSize];
    // A row that is NaN has no gradient: NaN. An inactive row has gradient 0.
    if (!active || row.value != row.value) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) grad_z[i] = grad_t[i] = row.value;
      store(first, grad_z, grad_t);
      return;
    }
    Compute raw[kVecSize], target[kVecSize], z[kVecSize], slopes[kVecSize], second[kVecSize];
    unpack(x, raw);
    unpack(t, target);
    program.logit.values_and_slopes(raw, z, slopes);
    if constexpr (Program::kTeacher) program.logit.values_of(target, second);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const auto y = program.evaluate(row, z[i], Program::kTeacher ? second[i] : target[i], first + i);
      grad_z[i] = tangent_or_zero(y, 0);
      grad_t[i] = tangent_or_zero(y, 1);
    }
    if constexpr (Program::kInputGradient) of_logits.apply(program.logit, z, grad_z);
    if constexpr (Program::kTeacher && Program::kTargetGradient) of_teacher.apply(program.logit, second, grad_t);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      if constexpr (Program::kInputGradient) grad_z[i] *= slopes[i];
      if constexpr (Program::kTargetGradient) {
        grad_t[i] *= Program::kTeacher ? program.logit.slope(target[i]) : row.factor;
      }
    }
    store(first, grad_z, grad_t);
  }

 private:
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

// ---------------------------------------------------------------------------------------------------------------------
// One row

struct SubwarpAdd {
  int lanes;
  template <class Compute>
  __device__ __forceinline__ void operator()(Compute& x) const {
    if (lanes > 1) x = subwarp_reduce(x, lanes, AddOp{});
  }
};

template <class Sums, class Group, class Compute>
__device__ __forceinline__ void group_reduce_sums(const Group& group, DenseSums<Compute>& sums, SyncState& sync) {
  Sums::over(sums, SubwarpAdd{group.subwarp_size()});
  if constexpr (Group::kMultiWarp) {
    const DenseSums<Compute>* all;
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

// Evaluates a row, and writes its gradients if kGradient. `classes` yields the row's classes to the threads of the
// group:
//
//   classes.for_each(f)          f for every class of this thread, for none of an inactive row
//   classes.final_pass(f)        the same, in the last pass
//   classes.final_pass_all(f)    the same, but also for an inactive row, whose packs hold anything
//
// With Classes::kPlacesGradients it takes the gradients too, as GradientsInMemory.
//
// Precondition: all threads of the group call it together, with a SubwarpGroup every lane of the warp.
template <bool kGradient, class Group, class Program, class Classes, class Scale>
__device__ __forceinline__ typename Program::Compute visit_dense_row(const Program& program, const Group& group,
                                                                     const int64 (&offset)[kRowStreams],
                                                                     Classes& classes, bool exists, SyncState& sync,
                                                                     Scale& scale) {
  using Compute = typename Program::Compute;
  typename Program::Row row;
  row.sums = {Compute(0), Compute(0), Compute(0)};
  row.classes = constant<Compute>(static_cast<double>(program.space.classes));
  if constexpr (Program::kAffine) {
    AffinePass<Program> pass(program, row);
    if constexpr (kGradient) {
      classes.for_each(pass);
      classes.prefetch_next();
    } else {
      classes.prefetch_next();
      classes.final_pass(pass);
    }
    subwarp_combine(pass.sums, group.subwarp_size());
    group_combine(group, pass.sums, sync);
    row.softmax[0].set(pass.sums.softmax);
    // Without a distribution, its largest logit being infinite, a row is NaN.
    const Compute max_logit = row.softmax[0].max_logit, no_distribution = max_logit - max_logit;
    row.sums.value = scalar_fma(-row.softmax[0].log_sum, pass.sums.grad_log_p, pass.sums.value) + no_distribution;
    row.sums.grad_log_p = pass.sums.grad_log_p;
  } else {
    using Sums = SumPass<kGradient, Program>;
    SoftmaxPass<Program> softmax_pass(program);
    classes.for_each(softmax_pass);
    classes.prefetch_next();
    subwarp_combine(softmax_pass.softmaxes, group.subwarp_size());
    group_combine(group, softmax_pass.softmaxes, sync);
#pragma unroll
    for (int i = 0; i < Program::kSoftmaxes; ++i) row.softmax[i].set(softmax_pass.softmaxes.softmax[i]);
    Sums sum_pass{program, row};
    if constexpr (kGradient) {
      classes.for_each(sum_pass);
    } else {
      classes.final_pass(sum_pass);
    }
    group_reduce_sums<Sums>(group, row.sums, sync);
  }
  program.finish(row, offset, classes.active, exists && group.thread_rank() == 0);
  if constexpr (kGradient) {
    // As in resident_rows.cuh: a narrower gradient lies over logits that other lanes read.
    if constexpr (Program::kInPlace && !Group::kMultiWarp) __syncwarp();
    row.factor = grad_factor(scale, offset);
    const auto& stride = program.space.class_stride;
    const GradientsInMemory<Program> memory{program, offset, Classes::kContiguous ? 1 : stride[kGradients],
                                            Classes::kContiguous ? 1 : stride[kTargetGradients]};
    if constexpr (Classes::kPlacesGradients) {
      classes.final_pass_all(GradientPass<Program, Classes>(program, row, classes, classes.active));
    } else {
      classes.final_pass_all(GradientPass<Program, GradientsInMemory<Program>>(program, row, memory, classes.active));
    }
  }
  return row.value;
}

// Rows whose classes Source::Classes yields, constructed for each row.
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

  // As TwoPassReader::sweep.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    for_each_row(group, scale, program.space.rows, chunks, work,
                 Visit<kGradient, Group, Program, Scale>{program, group, scale});
  }
};
