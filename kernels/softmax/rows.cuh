// Softmax losses with class indices: what all layouts share, and rows that are read twice (TwoPassReader).
//
//   input x (R, C), labels y (R,)
//   value      sum over r of loss(x[r, :], y[r]) / divisor, or a value per row
//   gradient   g[r, c] = grad_output * scale * d loss(r) / d x[r, c],   scale = 1 / divisor
//
// 1. A worker claims chunks of rows (row_groups.cuh). Its groups process the rows of a chunk one after another
//    (for_each_row).
// 2. A group reads the label, mask and class weight of its row (LabelLoad, RowTarget).
// 3. It computes the maximum and the sum of exponentials (online_softmax.cuh): from shared memory if the row stays on
//    chip (resident_rows.cuh), otherwise in a first pass over memory (partial_softmax).
// 4. Every thread evaluates the loss and the coefficients of the gradient (softmax.cuh). One thread stores the per-row
//    outputs that the caller requests.
// 5. The group writes the gradient: from shared memory, or in a second pass (store_gradients).
// 6. At the end of a chunk the worker stores its partial sum and records the expected grad_output. The block that
//    arrives last adds the partial sums in order (divide_sum).
//
// Threads hold vectors of a row in registers or shared memory; a group owns a row; a worker owns a chunk.
//
// Traffic: resident rows read each logit once, two-pass rows twice; each gradient is written once.
//
// Labels are data and may be wrong. An invalid label makes the row's value NaN and its gradient 0, and is reported in
// `status`; it is never used as an index. An ignored or masked row has value and gradient 0, and its logits are not
// read.
//
// Order of additions: within a row the group's fixed tree, across rows the order of chunks. Both follow from the sizes
// alone.
//
// Preconditions: class stride 1. If a vector is a single class, pointers with tangents and the logits of
// apply_grad_coeffs may have other strides. The loss is a functor that the glue supplies.
#pragma once
#include "core/reduce.cuh"
#include "softmax/row_vectors.cuh"
#include "softmax/softmax.cuh"

// Streams: the arrays that have an offset for each row.
enum RowStream { kLogits, kGradients, kLabels, kRowMask, kResults, kTargetGradients, kRowStreams };

// Report of the first invalid label that a kernel finds, in memory that the host can read at any time.
struct RowStatus {
  unsigned code;  // 0 no report, 1 about to be written, 2 complete
  unsigned unused;
  int64 row;
  int64 label;
  int64 classes;
  int64 site;  // number of the call, given by the host
};

__device__ __forceinline__ void report_label(RowStatus* status, int64 site, int64 row, int64 label, int64 classes) {
  if (status == nullptr || atomicCAS(&status->code, 0u, 1u) != 0u) return;
  status->row = row;
  status->label = label;
  status->classes = classes;
  status->site = site;
  __threadfence_system();
  atomicExch(&status->code, 2u);
}

// index / divisor, by a 32-bit division if both numbers fit, because a 64-bit division takes longer than a short row.
// Preconditions: index >= 0, divisor > 0.
__device__ __forceinline__ int64 quotient(int64 index, int64 divisor) {
  if ((index | divisor) >> 32) return index / divisor;
  return static_cast<unsigned>(index) / static_cast<unsigned>(divisor);
}

// Type of the pointer that operands are read through.
template <class Storage>
struct PointerTo {
  using type = const Storage*;
};

template <class T>
constexpr bool kIsAbsent = false;
template <>
constexpr bool kIsAbsent<Absent> = true;

// Division of a number n < 2^31 by the size of the inner dimension, for rows of two dimensions (Granlund and
// Montgomery, 1994):
//
//   n / size = (n * inverse) >> shift
//
// A plain division takes some twenty instructions, for every row of an image.
template <int kRank>
struct InnerDivision {};
template <>
struct InnerDivision<2> {
  int64 inverse;
  int64 shift;

  __device__ __forceinline__ unsigned quotient(unsigned n) const {
    const unsigned long long product = static_cast<unsigned long long>(n) * static_cast<unsigned>(inverse);
    return static_cast<unsigned>(product >> static_cast<unsigned>(shift));
  }
};

// Sizes and strides of the rows in all streams, the same for every layout. It is a kernel parameter. Precondition: rows
// < 2^31 if kRank is 2.
template <int kRank>
struct RowSpace : InnerDivision<kRank> {
  static constexpr bool kOneDimension = kRank == 1;
  int64 rows;
  int64 classes;
  int64 class_stride[kRowStreams];  // 0 for streams without classes
  Dimensions<kRowStreams, kRank> at;

  // Sets the offset of a row in each stream. Row numbers are divided with 32 bits where that is enough, because a
  // 64-bit division takes longer than a short row.
  __device__ __forceinline__ void offsets(int64 row, int64 (&offset)[kRowStreams]) const {
    if constexpr (kRank == 1) {
      at.offsets(row, offset);
    } else if constexpr (kRank == 2) {
      const unsigned index = static_cast<unsigned>(row), outer = this->quotient(index);
      const unsigned inner = index - outer * static_cast<unsigned>(at.size[0]);
#pragma unroll
      for (int s = 0; s < kRowStreams; ++s) offset[s] = inner * at.stride[s][0] + outer * at.stride[s][1];
    } else {
      if (rows > 0xffffffffLL) {
        at.offsets(row, offset);
      } else {
        at.offsets(static_cast<unsigned>(row), offset);
      }
    }
  }
};

// Offsets, label and class weight of a row: what is known before its logits are read.
template <class Compute>
struct RowTarget {
  int64 offset[kRowStreams];
  int64 label;
  Compute weight;
  bool active;         // the row has a loss: its logits are read
  bool invalid_label;  // the label is out of range
};

// Negative numbers instead of the class of inactive rows: kNoLoss if the row is masked or ignored, kInvalidLabel if its
// label is out of range.
enum InactiveClass { kNoLoss = -1, kInvalidLabel = -2 };

// Operands, outputs and options of a kernel, with the steps that all layouts share: reading a label, evaluating a row,
// storing its per-row outputs.
template <class Loss_, class Space_, class Input_, class Label_, class Weight_, class Mask_, class Result_,
          bool kSmoothed_, bool kCapped_, class Gradient_ = Input_, bool kInPlace_ = false>
struct RowProgram {
  using Loss = Loss_;
  using Space = Space_;
  using Compute = typename Loss::Compute;
  using Input = Input_;
  using Gradient = Gradient_;
  using Weight = Weight_;
  using Result = Result_;
  static constexpr bool kSmoothed = kSmoothed_;
  static constexpr bool kCapped = kCapped_;
  // True if gradients need only the product of a class's exponential and slope, so that both are computed once.
  static constexpr bool kKeepsProducts = kCapped && !kSmoothed;
  static constexpr bool kWeighted = !kIsAbsent<Weight_>;
  static constexpr bool kMasked = !kIsAbsent<Mask_>;
  // True if the gradients of a row overwrite its logits. By then all threads of the row must have read these.
  static constexpr bool kInPlace = kInPlace_;

  Loss loss;
  const Space_& space;  // a kernel parameter: a copy would go to local memory
  const Input* input;
  Gradient* gradients;
  const Label_* labels;
  const Weight_* weights;
  const Mask_* mask;
  Logit<Compute, kCapped> logit;
  int64 ignored;  // the label that marks a row as ignored
  RowStatus* status;
  int64 site;
  // Per-row outputs, or null: value, log-sum-exp, 1 if no logit exceeds the target's, coefficients of the gradient.
  Result* values;
  Compute* lse;
  unsigned char* correct;
  GradCoeffs<Compute>* grad_coeffs;
  int64 per_row;  // 0 if all are null: one test instead of four
  // Number of inactive rows that this thread has stored, for a Tally. Kernels without a Tally do not compute it.
  mutable unsigned inactive_rows = 0;

  __device__ __forceinline__ Compute weight(int64 c) const {
    if constexpr (kWeighted) return widen<Compute>(load_pack<1>(weights + c).element[0]);
    return Compute(1);
  }

  // Loads the weights of kCount contiguous classes from `first` on, as one pack if they are aligned.
  template <int kCount>
  __device__ __forceinline__ void weights_of(int64 first, Compute (&w)[kCount]) const {
    if constexpr (kWeighted && kCount > 1) {
      using P = Pack<Weight_, kCount>;
      if (reinterpret_cast<unsigned long long>(weights + first) % sizeof(typename P::Word) == 0) {
        unpack(load_pack<kCount>(weights + first), w);
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) w[i] = weight(first + i);
  }

  __device__ __forceinline__ RowTarget<Compute> target(int64 row) const {
    RowTarget<Compute> t;
    space.offsets(row, t.offset);
    read_label(t);
    return t;
  }
  // Loads and validates the label. Precondition: t.offset is set.
  __device__ __forceinline__ void read_label(RowTarget<Compute>& t) const {
    validate_label(t, load_label(t.offset));
  }

  // Label and mask as loaded. validate_label() or active_class() is the first to use them, so the loads can stay in
  // flight while a row is processed.
  struct LabelLoad {
    Label_ label;
    bool unmasked;
  };
  __device__ __forceinline__ LabelLoad load_label(const int64 (&offset)[kRowStreams]) const {
    const int64 zero = opaque_zero();
    if constexpr (kMasked) return load_label(labels + offset[kLabels] + zero, mask + offset[kRowMask] + zero);
    return load_label(labels + offset[kLabels] + zero, mask);
  }
  __device__ __forceinline__ LabelLoad load_label(const Label_* label, const Mask_* unmasked) const {
    LabelLoad load{*label, true};
    if constexpr (kMasked) load.unmasked = *unmasked != Mask_(0);
    return load;
  }
  __device__ __forceinline__ void validate_label(RowTarget<Compute>& t, const LabelLoad& load) const {
    t.label = load.unmasked ? static_cast<int64>(load.label) : 0;
    // One unsigned comparison checks both bounds, and there is no branch: each would cost short rows time.
    const bool counts = load.unmasked & (t.label != ignored);
    const bool in_range = static_cast<unsigned long long>(t.label) < static_cast<unsigned long long>(space.classes);
    t.active = counts & in_range;
    t.invalid_label = counts != t.active;
    t.weight = t.active ? weight(t.label) : Compute(0);
  }
  // Returns the label's class; kNoLoss if the row is masked or ignored, kInvalidLabel if the label is out of range.
  // Precondition: Index is int only if classes < 2^31.
  template <class Index>
  __device__ __forceinline__ Index active_class(const LabelLoad& load) const {
    const int64 label = static_cast<int64>(load.label);
    const bool in_range = static_cast<unsigned long long>(label) < static_cast<unsigned long long>(space.classes);
    // No branch, because branches of neighbouring rows would not interleave.
    bool counts = label != ignored;
    if constexpr (kMasked) counts &= load.unmasked;
    const Index none = counts ? Index(kInvalidLabel) : Index(kNoLoss);
    return counts & in_range ? static_cast<Index>(label) : none;
  }
  __device__ __forceinline__ bool is_active(const LabelLoad& load) const {
    RowTarget<Compute> t;
    validate_label(t, load);
    return t.active;
  }
  // Returns the row's contribution to the divisor of a mean: its class weight, or 1 without weights; 0 if the row is
  // inactive.
  __device__ __forceinline__ Compute divisor_term(const LabelLoad& load) const {
    RowTarget<Compute> t;
    validate_label(t, load);
    return t.weight;
  }

  // Pointer to the logits of a row.
  __device__ __forceinline__ const Input* logits(const int64 (&offset)[kRowStreams]) const {
    return input + offset[kLogits];
  }
  // Pointer to the gradients of a row.
  __device__ __forceinline__ Gradient* gradient_pointer(const int64 (&offset)[kRowStreams]) const {
    return gradients + offset[kGradients];
  }
  __device__ __forceinline__ Input raw(const int64 (&offset)[kRowStreams], int64 c) const {
    return input[offset[kLogits] + c * space.class_stride[kLogits]];
  }
  // The row's logits as vectors. Precondition: class stride 1.
  template <int kVecSize>
  __device__ __forceinline__ RowVectors<Input, kVecSize> view(const int64 (&offset)[kRowStreams]) const {
    return {input, offset[kLogits], space.classes};
  }

  // Evaluates a row and stores the requested per-row outputs. Precondition: `first` is true in one thread of the group.
  __device__ __forceinline__ RowResult<Compute> finish(const RowTarget<Compute>& t, Compute z,
                                                       const RowSums<Compute, kSmoothed>& sums, bool first) const {
    RowResult<Compute> y = inactive_result(t);
    if (t.active) y = active_result(t, z, sums);
    if (first) store(t, y, t.active && z == sums.softmax.max_logit);
    return y;
  }
  // Returns the result of an active row. kMarksLost: as in row_result.
  template <bool kMarksLost = true>
  __device__ __forceinline__ RowResult<Compute> active_result(const RowTarget<Compute>& t, Compute z,
                                                              const RowSums<Compute, kSmoothed>& sums) const {
    RowSums<Compute, kSmoothed> all = sums;
    if (kSmoothed && !kWeighted) all.weight_sum = static_cast<Compute>(space.classes);
    return row_result<kSmoothed, kMarksLost>(loss, z, all, t.weight, space.classes);
  }

  // Returns the result of an inactive row: the value is 0, or NaN if the label is invalid; all coefficients are 0.
  __device__ __forceinline__ RowResult<Compute> inactive_result(const RowTarget<Compute>& t) const {
    const Compute value = t.invalid_label ? scalar_nan(Compute()) : Compute(0);
    return {value, value, {Compute(0), Compute(0), Compute(0), Compute(0)}};
  }

  __device__ __forceinline__ void store(const RowTarget<Compute>& t, const RowResult<Compute>& y,
                                        bool is_correct) const {
    const int64 at = t.offset[kResults];
    if (!t.active) ++inactive_rows;
    if (t.invalid_label) report_label(status, site, at, t.label, space.classes);
    if (per_row == 0) return;
    if (values != nullptr) values[at] = Narrow<Result>::from(y.value);
    if (lse != nullptr) lse[at] = y.lse;
    if (correct != nullptr) correct[at] = is_correct;
    if (grad_coeffs != nullptr) grad_coeffs[at] = y.grad_coeffs;
  }
};

// Position of the target among kVecSize contiguous classes from `first`, or -1.
template <int kVecSize, class Compute>
__device__ __forceinline__ int target_element(const RowTarget<Compute>& t, int64 first) {
  const int64 lane = t.label - first;
  return t.active && lane >= 0 && lane < kVecSize ? static_cast<int>(lane) : -1;
}

// Stores the gradient of contiguous classes from `first` on. `target` is the position of the label's class among them,
// or -1. all_zero is grad_coeffs.all_zero(); x is not used then. kKeepsExponentials: x holds exp(z - max_logit) instead
// of logits, which have no cap.
template <bool kKeepsExponentials = false, int kVecSize, class Program, class Pointer,
          class Compute = typename Program::Compute>
__device__ __forceinline__ void store_gradient(const Program& program, Pointer to, int64 first, int target,
                                               const GradCoeffs<Compute>& grad_coeffs, bool all_zero,
                                               const Pack<typename Program::Input, kVecSize>& x) {
  Compute g[kVecSize];
  if (all_zero) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) g[i] = Compute(0);
  } else {
    Compute raw[kVecSize], e[kVecSize], z[kVecSize], slopes[kVecSize];
    unpack(x, raw);
    program.logit.exponential_value_slope(raw, grad_coeffs.max_logit, e, z, slopes);
    Compute w[kVecSize];
    if constexpr (Program::kSmoothed) program.weights_of(first, w);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      g[i] = kKeepsExponentials ? raw[i] : e[i];
      if constexpr (Program::kKeepsProducts) g[i] *= slopes[i];
      if constexpr (Program::kSmoothed) {
        g[i] = scalar_fma(g[i], grad_coeffs.exp_coeff, -grad_coeffs.weight_coeff * w[i]);
      } else {
        g[i] *= grad_coeffs.exp_coeff;
      }
      if constexpr (!Program::kKeepsProducts) g[i] *= slopes[i];
    }
    if (target >= 0) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        if (i == target) g[i] = grad_coeffs.target * slopes[i];
      }
    }
  }
  store_pack<kVecSize>(to, NarrowPack<typename Program::Gradient, kVecSize>::from(g));
}

// Adds contiguous classes from `first` on to the sums. `target` is the position of the label's class among them, or -1,
// and `z` the target's logit. Stores the exponentials if `exponentials` is not null.
template <int kVecSize, class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ void add_classes(const Program& program, int64 first, int target, Compute z,
                                            Compute max_logit, const Pack<typename Program::Input, kVecSize>& x,
                                            RowSums<Compute, Program::kSmoothed>& sums,
                                            Pack<Compute, kVecSize>* exponentials = nullptr) {
  Compute raw[kVecSize], of_class[kVecSize], e[kVecSize], slopes[kVecSize];
  unpack(x, raw);
  program.logit.exponential_value_slope(raw, max_logit, e, of_class, slopes);
  Compute w[kVecSize];
  if constexpr (Program::kSmoothed) program.weights_of(first, w);
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    if constexpr (Program::kSmoothed) {
      // Only logits without a cap may lead to 0 * inf: capped logits are finite, or the row is NaN.
      const Compute gap = z - of_class[i], shorter = !Program::kCapped && w[i] == Compute(0) ? Compute(0) : gap;
      sums.weighted_gap = scalar_fma(w[i], shorter, sums.weighted_gap);
      // Without class weights, active_result() sets the sum.
      if constexpr (Program::kWeighted) sums.weight_sum += w[i];
    }
  }
  if (exponentials != nullptr) {
    Pack<Compute, kVecSize> kept;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) kept.element[i] = e[i];
    *exponentials = load_words(&kept);
  }
  if (target >= 0) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      if (i == target) e[i] = Compute(0);
    }
  }
  sums.softmax.exp_sum += sum_elements(e);
}

template <int kVecSize, class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ Compute max_with_pack(const Program& program,
                                                 const Pack<typename Program::Input, kVecSize>& x, Compute max_logit) {
  RunningMax<Compute, typename Program::Input, kVecSize> raw;
  raw.add(x);
  return max_ignoring_nan(max_logit, program.logit.value(raw.get()));
}

template <class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ Compute target_logit(const Program& program, const RowTarget<Compute>& t) {
  return t.active ? program.logit.value(widen<Compute>(program.raw(t.offset, t.label))) : Compute(0);
}

// Multiplies the coefficients by the factor of the gradient, and by the slope common to all logits.
template <class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ void scale_grad_coeffs(const Program& program, GradCoeffs<Compute>& grad_coeffs,
                                                  Compute factor) {
  // Rows without a gradient must not compute 0 * inf.
  if (grad_coeffs.all_zero()) return;
  factor *= program.logit.common_slope();
  grad_coeffs.exp_coeff *= factor;
  if constexpr (Program::kSmoothed) grad_coeffs.weight_coeff *= factor;
  grad_coeffs.target *= factor;
}

// Scale of gradients with a grad_output per row. grad_factor() returns the factor of a row's gradient, also for scales
// that have one grad_output for all rows.
template <class Compute, class Result>
struct PerRowScale {
  const Result* grad_output;
  double weight;
};
template <class Scale>
constexpr bool kIsPerRow = false;
template <class Compute, class Result>
constexpr bool kIsPerRow<PerRowScale<Compute, Result>> = true;
template <class Compute, class Result>
__device__ __forceinline__ Compute grad_factor(PerRowScale<Compute, Result>& scale,
                                               const int64 (&offset)[kRowStreams]) {
  return static_cast<Compute>(widen<double>(scale.grad_output[offset[kResults]]) * scale.weight);
}
template <class Scale>
__device__ __forceinline__ auto grad_factor(Scale& scale, const int64 (&)[kRowStreams]) {
  return scale.factor();
}

// Online softmax of a thread's part of a row: every `step`-th vector from `begin` to `end`, and the edge class `edge`
// (-1 if there is none). Reads each logit once. kVectors vectors are in flight, and the sum is rescaled at most once
// for all of them. Preconditions: the row is active; z is the target's logit, with which the running maximum starts.
template <int kVectors, class Program, class View, class Compute = typename Program::Compute>
__device__ __forceinline__ RowSums<Compute, Program::kSmoothed> partial_softmax(const Program& program,
                                                                                const View& view,
                                                                                const RowTarget<Compute>& t, Compute z,
                                                                                int64 begin, int64 end, int64 step,
                                                                                int64 edge) {
  using Input = typename Program::Input;
  constexpr int kVecSize = View::kVecSize;
  RowSums<Compute, Program::kSmoothed> sums{{z, Compute(0)}, Compute(0), Compute(0)};
  const auto input = program.logits(t.offset);
  if (edge >= 0) {
    const auto x = load_stream<1>(input + edge);
    sums.softmax.max_logit = max_with_pack(program, x, z);
    add_classes(program, edge, target_element<1>(t, edge), z, exp_shift(sums.softmax.max_logit), x, sums);
  }
#pragma unroll 1
  for (int64 vector = begin; vector < end; vector += step * kVectors) {
    Pack<Input, kVecSize> x[kVectors];
    Compute max_logit = sums.softmax.max_logit;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (vector + k * step < end) x[k] = load_stream<kVecSize>(input + view.first(vector + k * step));
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (vector + k * step < end) max_logit = max_with_pack(program, x[k], max_logit);
    }
    rescale(sums.softmax, max_logit);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (vector + k * step < end) {
        const int64 first = view.first(vector + k * step);
        add_classes(program, first, target_element<kVecSize>(t, first), z, exp_shift(max_logit), x[k], sums);
      }
    }
  }
  return sums;
}

// Pointer to class c of a row. With kVecSize 1 classes may have a stride; pointers with tangents contain theirs.
template <int kVecSize, class Program, class Storage>
__device__ __forceinline__ const Storage* class_at(const Program& program, const Storage* row, int64 c) {
  return row + (kVecSize == 1 ? c * program.space.class_stride[kLogits] : c);
}
template <int kVecSize, class Program, class Pointer>
__device__ __forceinline__ Pointer class_at(const Program&, const Pointer& row, int64 c) {
  return row + c;
}

// Writes the gradient of a thread's part of a row: the vectors and the edge class that partial_softmax describes. Reads
// the logits again, unless all coefficients are 0. kShifted: vectors are aligned as gradients are, and logits are not.
template <int kVectors, bool kShifted = false, class Program, class View, class Compute = typename Program::Compute>
__device__ __forceinline__ void store_gradients(const Program& program, const View& view, const RowTarget<Compute>& t,
                                                const GradCoeffs<Compute>& grad_coeffs, int64 begin, int64 end,
                                                int64 step, int64 edge) {
  using Input = typename Program::Input;
  constexpr int kVecSize = View::kVecSize;
  const bool all_zero = grad_coeffs.all_zero(), read = !all_zero;
  const auto input = program.logits(t.offset);
  const auto gradients = program.gradient_pointer(t.offset);
  if (edge >= 0) {
    store_gradient(program, gradients + edge, edge, target_element<1>(t, edge), grad_coeffs, all_zero,
                   read ? load_stream<1>(input + edge) : Pack<Input, 1>{});
  }
#pragma unroll 1
  for (int64 vector = begin; vector < end; vector += step * kVectors) {
    Pack<Input, kVecSize> x[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (!read || vector + k * step >= end) continue;
      const int64 first = view.first(vector + k * step);
      if constexpr (kShifted) {
        const ShiftedVectors<Input, kVecSize, false> vectors(input, 1, static_cast<int>(program.space.classes),
                                                             static_cast<int>(view.head));
        x[k] = vectors.load(static_cast<int>(first));
      } else {
        x[k] = load_stream<kVecSize>(class_at<kVecSize>(program, input, first));
      }
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (vector + k * step >= end) continue;
      const int64 first = view.first(vector + k * step);
      store_gradient(program, gradients + first, first, target_element<kVecSize>(t, first), grad_coeffs, all_zero,
                     x[k]);
    }
  }
}

// Evaluates a row of any length in two passes: the first computes the sums, the second writes the gradient. Returns the
// row's value. `exists` is false for groups past the last row, if a warp has fewer rows left than groups.
// Preconditions: every thread of the group calls it together; with a SubwarpGroup, every lane of the warp.
template <bool kGradient, int kVecSize, int kVectors, class Group, class Program, class Scale>
__device__ __forceinline__ typename Program::Compute two_pass_row(const Program& program, const Group& group, int64 row,
                                                                  bool exists, SyncState& sync, Scale& scale) {
  using Compute = typename Program::Compute;
  RowTarget<Compute> t = program.target(exists ? row : 0);
  t.active &= exists;
  t.invalid_label &= exists;
  const auto view = program.template view<kVecSize>(t.offset);
  const Compute z = target_logit(program, t);
  RowSums<Compute, Program::kSmoothed> sums{{z, Compute(0)}, Compute(0), Compute(0)};
  if (t.active) {
    sums = partial_softmax<kVectors>(program, view, t, z, group.thread_rank(), view.vectors, group.num_threads(),
                                     view.edge_class(group.thread_rank()));
  }
  subwarp_combine(sums, group.subwarp_size());
  group_combine(group, sums, sync);
  const RowResult<Compute> y = program.finish(t, z, sums, exists && group.thread_rank() == 0);
  if constexpr (kGradient) {
    GradCoeffs<Compute> grad_coeffs = y.grad_coeffs;
    scale_grad_coeffs(program, grad_coeffs, grad_factor(scale, t.offset));
    if (exists) {
      store_gradients<kVectors>(program, view, t, grad_coeffs, group.thread_rank(), view.vectors, group.num_threads(),
                                view.edge_class(group.thread_rank()));
    }
  }
  return y.value;
}

// ---------------------------------------------------------------------------------------------------------------------
// Many rows

// Iterates over the rows of a worker. Row r belongs to chunk r / rows_at_once() % chunks, and one worker processes the
// whole chunk.
template <class Group>
struct RowIterator {
  int chunk;
  int64 first;

  __device__ __forceinline__ explicit RowIterator(const Group& group)
      : chunk(static_cast<int>(group.worker())), first(group.worker() * group.rows_at_once()) {
  }
  // True if these are the last rows of their chunk.
  __device__ __forceinline__ bool last_in_chunk(const Group& group, int64 chunks, int64 rows) const {
    return first + chunks * group.rows_at_once() >= rows;
  }
  // Moves on to the next rows of the chunk, or to the next chunk. Preconditions: those of WorkQueue::next.
  __device__ __forceinline__ void advance(const Group& group, WorkQueue<Group>& queue, int64 chunks, int64 rows,
                                          unsigned syncs) {
    const bool last = last_in_chunk(group, chunks, rows);
    first += chunks * group.rows_at_once();
    if (!last) return;
    chunk = queue.next(group, chunk, syncs);
    first = static_cast<int64>(chunk) * group.rows_at_once();
  }
};

// Ends a chunk: records the scale and, unless `partials` is null, stores the sum of the chunk's values.
template <class Group, class Scale>
__device__ __forceinline__ void finish_chunk(const Group& group, const Scale& scale, int64 chunk, double total,
                                             double* partials, SyncState& sync) {
  record_scale(scale, group, chunk);
  if (partials == nullptr) return;
  total = group.worker_sum(total, sync);
  if (group.is_leader()) partials[chunk] = total;
}
// Overload for a warp, which exchanges nothing through memory.
template <class Scale>
__device__ __forceinline__ void finish_chunk(const SubwarpGroup& group, const Scale& scale, int64 chunk, double total,
                                             double* partials) {
  SyncState unused{0, 0};
  finish_chunk(group, scale, chunk, total, partials, unused);
}
// Evaluates the chunks of a warp one after another. visit(chunk) returns the sum of the values of the chunk's rows.
// Preconditions: all lanes of the warp call it together.
template <class Scale, class Visit>
__device__ __forceinline__ void for_each_chunk(const SubwarpGroup& group, const Scale& scale, int64 chunks,
                                               const Workspace& work, const Visit& visit) {
#pragma unroll 1
  for (int chunk = static_cast<int>(group.worker()); chunk < chunks;
       chunk = next_chunk(group, chunk, work.claim_counter)) {
    finish_chunk(group, scale, chunk, visit(chunk), work.partials);
  }
}

// Visits every row once. visit(row, exists, next, sync) returns the row's value. With Visit::kNeedsNextRow, `next` is
// the row that the group visits after this one, or >= rows after the last one; it costs a register.
template <class Group, class Scale, class Visit>
__device__ __forceinline__ void for_each_row(const Group& group, const Scale& scale, int64 rows, int64 chunks,
                                             const Workspace& work, const Visit& visit) {
  RowIterator<Group> rows_left(group);
  if (rows_left.chunk >= chunks) return;
  group.cluster_start();
  WorkQueue<Group> queue(group, work.claim_counter);
  SyncState sync{0, 0};
  double total = 0.0;
#pragma unroll 1
  while (rows_left.chunk < chunks) {
    const int chunk = rows_left.chunk;
    const int64 row = rows_left.first + group.row_slot();
    const bool last = rows_left.last_in_chunk(group, chunks, rows);
    int64 next = rows;
    if constexpr (Visit::kNeedsNextRow) {
      rows_left.advance(group, queue, chunks, rows, sync.syncs);
      if (rows_left.chunk < chunks) next = rows_left.first + group.row_slot();
    }
    sync.claimed = queue.claimed;
    total += static_cast<double>(visit(row, row < rows, next, sync));
    if (last) {
      finish_chunk(group, scale, chunk, total, work.partials, sync);
      total = 0.0;
    }
    if constexpr (!Visit::kNeedsNextRow) rows_left.advance(group, queue, chunks, rows, sync.syncs);
  }
}

// Reader of rows that are too long for shared memory: logits are read twice.
template <int kVecSize, int kVectors>
struct TwoPassReader {
  template <bool kGradient, class Group, class Program, class Scale>
  struct Visit {
    static constexpr bool kNeedsNextRow = false;
    const Program& program;
    const Group& group;
    Scale& scale;
    __device__ __forceinline__ auto operator()(int64 row, bool exists, int64, SyncState& sync) const {
      return two_pass_row<kGradient, kVecSize, kVectors>(program, group, row, exists, sync, scale);
    }
  };

  // Evaluates every row once, and with kGradient writes its gradient, multiplied by the factor that `scale` supplies.
  // The members of `work` may be null.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    for_each_row(group, scale, program.space.rows, chunks, work,
                 Visit<kGradient, Group, Program, Scale>{program, group, scale});
  }
};

// Memory of a workspace, or null in backward, where nothing is added up and no chunk is claimed. It is a separate type
// because forward-only kernels always have memory: with the comparison, the value of 32768 x 4096 float32 took 2 %
// longer.
struct MemoryOrNone {
  double* address;

  __device__ __forceinline__ MemoryOrNone(double* address) : address(address) {
  }
};
__device__ __forceinline__ Workspace workspace(MemoryOrNone memory) {
  if (memory.address == nullptr) return {};
  return workspace(memory.address);
}
__device__ __forceinline__ double* address_of(double* memory) {
  return memory;
}
__device__ __forceinline__ double* address_of(MemoryOrNone memory) {
  return memory.address;
}

// The block that arrives last stores value = sum of all partials / divisor, and resets the counter of the work queue.
// `divisor` is a number, or a SelfCount, which is evaluated here, where no row needs the registers. `shared`: several
// workers may contribute to a chunk. Preconditions: every thread of every block calls it once; blockDim.x is a power of
// two.
template <class Memory, class Divisor, class Result>
__device__ __forceinline__ void divide_sum(int64 chunks, Memory memory, const Divisor& divisor, Result* value,
                                           bool shared = false) {
  const Workspace work = workspace(memory);
  // With a single chunk, the leader of its worker is in block 0 and has the whole sum. A ticket is not needed, and
  // would wait for all gradients of the block.
  const bool alone = chunks == 1 && !shared;
  if (alone && blockIdx.x != 0) return;
  if (!arrive_last(work.ticket, alone)) return;
  if (threadIdx.x == 0) *work.claim_counter = 0;
  const double total = sum_partials(work.partials, chunks), by = divisor;
  if (threadIdx.x == 0) *value = Narrow<Result>::from(total / by);
}

// 1 / count, correctly rounded, for a whole number below 2^32; NaN for 0. Each Newton step squares the error of the
// float's reciprocal, which is below 2^-22. A division of doubles is a function of 100 instructions, with which a
// kernel would take a twentieth longer to compile.
__device__ __forceinline__ double reciprocal_of_count(double count) {
  double y = reciprocal_ftz(static_cast<float>(count));
#pragma unroll
  for (int i = 0; i < 2; ++i) y = scalar_fma(y, scalar_fma(-count, y, 1.0), y);
  return y;
}

// Divisor of a mean that is counted while rows are evaluated: each thread counts the inactive rows that it stores. The
// counts are added to an integer in the workspace, which is 0 before and after a launch, so the order of additions
// changes no bit. Precondition: rows < 2^32.
template <class Program>
struct Tally {
  const Program& program;

  // The word after the counter of claimed chunks.
  static __device__ __forceinline__ unsigned* counter(double* memory) {
    return reinterpret_cast<unsigned*>(memory + 1) + 1;
  }
  // Adds the number of inactive rows of this warp to the counter. Preconditions: all lanes call it together, once,
  // after their last row.
  __device__ __forceinline__ void flush(double* memory) const {
    const unsigned inactive = warp_sum_int(static_cast<int>(program.inactive_rows));
    if (threadIdx.x % kWarp == 0 && inactive != 0) atomicAdd(counter(memory), inactive);
  }
  // Returns the number of inactive rows and resets the counter. Preconditions: all warps have called flush(); one
  // thread calls it.
  static __device__ __forceinline__ unsigned take(double* memory) {
    return atomicExch(counter(memory), 0u);
  }
};

// Overload for a Tally. Returns the divisor in thread 0 of the block that arrives last, and -1 in all other threads.
template <class Program, class Memory, class Result>
__device__ __forceinline__ double divide_sum(int64 chunks, Memory memory, const Tally<Program>& tally, Result* value,
                                             bool = true) {
  tally.flush(address_of(memory));
  const Workspace work = workspace(memory);
  if (!arrive_last(work.ticket)) return -1.0;
  // Before the sum, so that the atomic is in flight meanwhile.
  unsigned inactive = 0;
  if (threadIdx.x == 0) inactive = tally.take(address_of(memory));
  const double total = sum_partials(work.partials, chunks);
  if (threadIdx.x != 0) return -1.0;
  *work.claim_counter = 0;
  const double divisor = static_cast<double>(tally.program.space.rows) - inactive;
  *value = Narrow<Result>::from(divide_sum_by(total, divisor, reciprocal_of_count(divisor)));
  return divisor;
}

// 1 / divisor; 0 for a mean over no rows, so that its gradients are 0.
__device__ __forceinline__ double reciprocal_or_zero(double divisor) {
  return divisor == 0.0 ? 0.0 : 1.0 / divisor;
}

// ---------------------------------------------------------------------------------------------------------------------
// Called by the entry points

// True for a reader that computes the value without partial sums.
template <class Reader>
constexpr bool kFindsValue = false;
// True for a reader whose chunks are shared by several workers.
template <class Reader>
constexpr bool kSharesChunks = false;

template <class Reader, class Program, class Memory, class Divisor, class Result>
__device__ __forceinline__ void finish_value(const Program& program, int64 chunks, Memory memory,
                                             const Divisor& divisor, Result* value) {
  if constexpr (kFindsValue<Reader>) {
    Reader::find_value(program, divisor, value);
  } else {
    divide_sum(chunks, memory, divisor, value, kSharesChunks<Reader>);
  }
}

// Computes value = sum of losses / divisor, and the per-row outputs that the program requests.
template <class Reader, class Group, class Program, class Divisor, class Result>
__device__ __forceinline__ void row_value(const Program& program, const Group& group, int64 chunks, double* memory,
                                          const Divisor& divisor, Result* value) {
  KnownScale<typename Program::Compute> unused{0};
  Reader::template sweep<false>(program, group, unused, chunks, workspace(memory));
  finish_value<Reader>(program, chunks, memory, divisor, value);
}

// Forward: computes the value as row_value does, and the gradients for the expected grad_output; scale = 1 / divisor.
// Backward, where grad_output is not null and there is no workspace: writes only the gradients, for the true
// grad_output; entry points call worker_gradient_is_in_place before it.
template <class Reader, class Group, class Program, class Result>
__device__ __forceinline__ void row_value_and_gradient(const Program& program, const Group& group, int64 chunks,
                                                       MemoryOrNone memory, double divisor, double scale, Result* value,
                                                       const Result* grad_output, const double* expected_grad_output,
                                                       double* used_grad_output) {
  using Scale = WorkerSpeculativeScale<Group, typename Program::Compute>;
  Scale speculative(grad_output, expected_grad_output, used_grad_output, scale);
  Reader::template sweep<true>(program, group, speculative, chunks, workspace(memory));
  if (grad_output == nullptr) finish_value<Reader>(program, chunks, memory, divisor, value);
}

// Variant of row_value_and_gradient for a mean whose divisor is not known in advance: gradients are computed on the
// assumption that all rows are active. The true divisor is recorded after the records of grad_output. If the assumption
// was wrong, *missed becomes 1. The host may read it at any time, and counts rows first from then on, because gradients
// are written twice where labels are ignored. Backward uses the recorded divisor; with kCounts it counts the rows if
// there are no records.
template <class Reader, bool kCounts = false, class Group, class Program, class Result>
__device__ __forceinline__ void row_value_and_assumed_gradient(const Program& program, const Group& group, int64 chunks,
                                                               MemoryOrNone memory, unsigned* missed, Result* value,
                                                               const Result* grad_output, double* expected_grad_output,
                                                               double* used_grad_output) {
  const bool backward = grad_output != nullptr;
  const double rows = static_cast<double>(program.space.rows);
  double assumed = rows;
  if (backward) {
    const bool recorded = !kCounts || used_grad_output != nullptr;
    if (recorded) assumed = used_grad_output[chunks * Group::kClusterSize];
    if constexpr (kCounts) {
      if (!recorded) assumed = self_count(program);
    }
    if (worker_gradient_is_in_place(group, chunks, grad_output, used_grad_output, expected_grad_output) &&
        assumed == rows) {
      return;
    }
  }
  using Scale = WorkerSpeculativeScale<Group, typename Program::Compute>;
  const double scale = assumed == 0.0 ? 0.0 : reciprocal_of_count(assumed);
  Scale speculative(grad_output, expected_grad_output, used_grad_output, scale);
  Reader::template sweep<true>(program, group, speculative, chunks, workspace(memory));
  if (backward) return;
  const double divisor = divide_sum(chunks, memory, Tally<Program>{program}, value);
  if (divisor < 0.0) return;
  used_grad_output[chunks * Group::kClusterSize] = divisor;
  if (divisor != rows && missed != nullptr) *missed = 1;
}

// Computes a value per row, and the coefficients of its gradient if the program stores them.
template <class Reader, class Group, class Program>
__device__ __forceinline__ void row_values(const Program& program, const Group& group, int64 chunks) {
  KnownScale<typename Program::Compute> unused{0};
  Reader::template sweep<false>(program, group, unused, chunks, {});
}

// Writes the gradients for a grad_output per row.
template <class Reader, class Group, class Program, class Result>
__device__ __forceinline__ void row_gradient(const Program& program, const Group& group, int64 chunks,
                                             const Result* grad_output) {
  PerRowScale<typename Program::Compute, Result> scale{grad_output, 1.0};
  Reader::template sweep<true>(program, group, scale, chunks, {});
}

// The vectors of a row: of its gradients if kOfGradients, otherwise of its logits.
template <int kVecSize, bool kOfGradients, class Index = int64, class Program>
__device__ __forceinline__ RowVectors<typename Program::Input, kVecSize, Index> vectors_of_row(
    const Program& program, const int64 (&offset)[kRowStreams]) {
  const Index classes = static_cast<Index>(program.space.classes);
  if constexpr (kOfGradients) {
    static_assert(kSameType<typename Program::Input, typename Program::Gradient>, "gradients lie apart from logits");
    return {program.gradients, offset[kGradients], classes};
  } else {
    return {program.input, offset[kLogits], classes};
  }
}

// Writes the gradients from stored coefficients, for a grad_output per row (result_stride 1) or one for all rows (0).
// Each row is cut into `slices` parts, so that few rows fill the GPU too. The gradient may overwrite the logits.
// kShifted: as in store_gradients; a row then has fewer than 2^31 classes.
template <int kVecSize, int kVectors, bool kShifted = false, class Group, class Program, class Result>
__device__ __forceinline__ void apply_grad_coeffs(const Program& program, const Group& group, int64 slices,
                                                  int64 result_stride, double scale, const Result* grad_output) {
  using Compute = typename Program::Compute;
  const int64 items = program.space.rows * slices, rows_per_step = group.rows_at_once();
#pragma unroll 1
  for (int64 first = group.worker() * rows_per_step; first < items; first += group.workers() * rows_per_step) {
    const int64 item = first + group.row_slot();
    if (item >= items) continue;
    const int64 row = item / slices, slice = item - row * slices;
    const RowTarget<Compute> t = program.target(row);
    const auto view = vectors_of_row<kVecSize, kShifted>(program, t.offset);
    GradCoeffs<Compute> grad_coeffs = program.grad_coeffs[t.offset[kResults]];
    const double g = widen<double>(grad_output[t.offset[kResults] * result_stride]);
    scale_grad_coeffs(program, grad_coeffs, static_cast<Compute>(g * scale));
    const int64 length = (view.vectors + slices - 1) / slices;
    const int64 end = (slice + 1) * length < view.vectors ? (slice + 1) * length : view.vectors;
    store_gradients<kVectors, kShifted>(program, view, t, grad_coeffs, slice * length + group.thread_rank(), end,
                                        group.num_threads(), slice == 0 ? view.edge_class(group.thread_rank()) : -1);
  }
}
