// Log-probabilities of labels and the entropy of a row of logits x (R, C), labels y (R, K).
//
//   z_c = scale x_c, or capped as in softmax/softmax.cuh        p = softmax(z)
//   values[r, k] = log p_y = z_y - lse                           k < K
//   values[r, K] = H = -sum over c of p_c log p_c                if kEntropy
//
// 1. Each thread reads its part of the row, kVectors vectors at a time, and keeps an online softmax of it (Milakov and
//    Gimelshein, arXiv 1805.02867); for the entropy also the gap G = sum over c of exp(z_c - m) (m - z_c). A larger
//    maximum m' rescales it: G' = exp(m - m') (G + (m' - m) S), with S the sum of all exponentials so far. The lanes of
//    a warp that share a row start with the maximum of all their first vectors. If each lane started with its own, it
//    would find a larger one in every third group of vectors, and the warp would wait for one of its lanes in nearly
//    every group.
// 2. Butterfly reductions combine the lanes of a warp, and one all_gather combines the warps of the group.
// 3. The threads share out the labels, read their logits again, and store log p_y = (z_y - m) - log S. One thread
//    stores H = log S + G / S and the coefficients that backward needs (LogProbCoeffs).
//
// All terms of S - 1 and of G are positive: nothing cancels, so the log-probability and the entropy of a confident row
// keep their digits, and no log-probability is above 0.
//
// Gradient, for grad_outputs g_k of the log-probabilities and h of the entropy, with D = G / S and c_c the sum of g_k
// over the labels that equal c:
//
//   dz_c = c_c (1 - p_c) - (sum of g_k - c_c) p_c - h p_c ((z_c - m) + D)
//
// 4. Each thread sums g_k over the labels of the row and marks which of its vectors contain a label.
// 5. It reads its vectors once more and writes their gradient; in vectors without a label c_c is 0.
//
// A group (softmax/row_groups.cuh) owns a row; the vectors of the row are distributed over its threads. In backward
// rows may be cut into slices, since nothing is exchanged, and the gradient may overwrite the logits: each thread
// writes only where it has read. Many rows of few classes have a thread each instead (log_probs_of_lanes,
// log_prob_gradients_of_lanes).
//
// Traffic: forward reads each logit once and one logit per label again; backward reads each logit once and writes each
// gradient once. A row without a gradient is not read.
//
// Labels are data and may be wrong: a label out of range has the value NaN and no gradient, and is reported in
// `status`. An ignored label has value and gradient 0. A row counts unless it is masked or all its labels are ignored;
// the logits of other rows are not read, and their values and gradients are 0.
//
// Preconditions: class stride 1; the number of threads of a group is a power of two; kEdges times it is at least
// 2 (kVecSize - 1), unless rows have no edge elements.
#pragma once
#include "softmax/dense_rows.cuh"
#include "softmax/rows_of_warp.cuh"

// z - m of a class, but at least -1000, where exp() is 0: -inf times 0 would be NaN.
template <class Compute>
__device__ __forceinline__ Compute below_max(Compute z, Compute max_logit) {
  return larger_or_nan(z - max_logit, Compute(-1000));
}

// Maximum, S and G of a part of a row. `exp_sum` leaves out one class that has the maximum, because the log-probability
// of a confident row follows from S - 1; in the part that contains this class, `held` is 1. The maximum of a part may
// be that of other parts.
template <class Compute, bool kEntropy>
struct RowMoments {
  Compute max_logit;  // not below any class of this part
  Compute exp_sum;    // relative to max_logit, without the held class
  Compute held;       // 1, or 0 if no class is left out
  Compute gap;        // relative to max_logit

  static __device__ __forceinline__ RowMoments empty() {
    return {-scalar_infinity(Compute()), Compute(0), Compute(0), Compute(0)};
  }
  __device__ __forceinline__ bool holds(Compute maximum) const {
    return held != Compute(0) && identical(max_logit, maximum);
  }
  // S of all classes of the part, and G, both relative to `maximum`. Precondition: maximum >= max_logit.
  __device__ __forceinline__ Compute rescaled_sum(Compute maximum) const {
    const Compute sum = exp_sum + held;
    return identical(max_logit, maximum) ? sum : sum * exp_nonpositive(below_max(max_logit, maximum));
  }
  __device__ __forceinline__ Compute rescaled_gap(Compute maximum) const {
    if (!kEntropy || identical(max_logit, maximum)) return gap;
    const Compute d = below_max(max_logit, maximum);
    return exp_nonpositive(d) * (gap - d * (exp_sum + held));
  }
};
// `held` of a part whose maximum is its own: 1, unless all classes are -inf.
template <class Compute>
__device__ __forceinline__ Compute held_at(Compute maximum) {
  return Compute(maximum > -scalar_infinity(maximum));
}
// Combines `other` into `part`. Precondition: both parts hold their maximum, unless it is -inf.
template <class Compute, bool kEntropy>
__device__ __forceinline__ void combine(RowMoments<Compute, kEntropy>& part,
                                        const RowMoments<Compute, kEntropy>& other) {
  const Compute maximum = max_ignoring_nan(part.max_logit, other.max_logit);
  const Compute gap = part.rescaled_gap(maximum) + other.rescaled_gap(maximum);
  const Compute sum =
      part.holds(maximum) ? part.exp_sum + other.rescaled_sum(maximum) : part.rescaled_sum(maximum) + other.exp_sum;
  part = {maximum, sum, held_at(maximum), gap};
}
// Combines the parts of `width` neighbouring lanes, in each of these lanes. At least one lane holds the largest
// maximum, unless it is -inf; if several do, only the first one leaves its held class out. Preconditions: all 32 lanes
// call it together; width is a power of two and the same in all of them.
template <class Compute, bool kEntropy>
__device__ __forceinline__ void subwarp_combine(RowMoments<Compute, kEntropy>& part, int width) {
  if (width == 1) return;
  const Compute maximum = subwarp_reduce(part.max_logit, width, MaxOp{});
  const bool left_out = first_of_subwarp(part.holds(maximum), width);
  const Compute sum = left_out ? part.exp_sum : part.rescaled_sum(maximum);
  if constexpr (kEntropy) part.gap = subwarp_reduce(part.rescaled_gap(maximum), width, AddOp{});
  part.exp_sum = subwarp_reduce(sum, width, AddOp{});
  part.max_logit = maximum;
  part.held = held_at(maximum);
}

// Residuals of a row that backward reads besides its logits. All are 0 if the row does not count.
template <class Compute>
struct alignas(16) LogProbCoeffs {
  Compute max_logit;
  Compute inv_sum;         // 1 / S
  Compute max_complement;  // 1 - p of the largest logit
  Compute mean_gap;        // D
};

template <class Space_, class Input_, class Label_, class Mask_, class Compute_, bool kCapped_, bool kEntropy_,
          class Gradient_ = Input_>
struct LogProbProgram {
  using Compute = Compute_;
  using Input = Input_;
  using Gradient = Gradient_;
  static constexpr bool kCapped = kCapped_;
  static constexpr bool kEntropy = kEntropy_;
  // True for 16-bit logits without a cap, whose arithmetic is cheaper than that of wider logits.
  static constexpr bool kShort = kSingle<Compute> && sizeof(Input) == 2 && !kCapped;
  using Moments = RowMoments<Compute, kEntropy>;

  const Space_& space;  // a kernel parameter: a copy would go to local memory
  const Input* input;
  const Label_* labels;
  const Mask_* mask;
  Gradient* gradients;
  Logit<Compute, kCapped> logit;
  int64 ignored;       // label that does not count
  int64 count;         // labels per row
  int64 label_stride;  // distance between the labels of a row
  RowStatus* status;
  int64 site;
  Compute* values;
  LogProbCoeffs<Compute>* coeffs;
  const Compute* grad_output;
  int64 result_stride;  // 0 if one grad_output serves all values

  // Index of the row's first value among all values.
  __device__ __forceinline__ int64 first_value(const int64 (&offset)[kRowStreams]) const {
    return offset[kResults] * (count + kEntropy);
  }
  __device__ __forceinline__ int64 label(const int64 (&offset)[kRowStreams], int64 k) const {
    return static_cast<int64>(labels[offset[kLabels] + k * label_stride]);
  }
  __device__ __forceinline__ bool is_class(int64 label) const {
    return label >= 0 && label < space.classes && label != ignored;
  }
  // exp(d), also of -inf; for 16-bit logits without the correction of the rounded power. Precondition: d <= 0, or NaN.
  static __device__ __forceinline__ Compute exponential(Compute d) {
    if constexpr (kSingle<Compute> && sizeof(Input) == 2) return exp2_ftz(d * kLog2E);
    return exp_nonpositive(d);
  }
  // Computes z of a raw logit, and dz/dx without the factor that all logits share.
  __device__ __forceinline__ void logit_and_slope(Compute raw, Compute& z, Compute& slope) const {
    if constexpr (kCapped) {
      logit.evaluate(raw, z, slope);
    } else {
      z = logit.value(raw);
      slope = Compute(1);
    }
  }
  // True if the row counts. A row that has no labels counts unless it is masked.
  __device__ __forceinline__ bool counts(const int64 (&offset)[kRowStreams]) const {
    if constexpr (!kIsAbsent<Mask_>) {
      if (mask[offset[kRowMask]] == Mask_(0)) return false;
    }
    for (int64 k = 0; k < count; ++k) {
      if (label(offset, k) != ignored) return true;
    }
    return count == 0;
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// Packs of logits that a thread adds to its part of a row: z of all their classes. Packs from index `present` on do not
// exist, and count as -inf.
template <class Program, int kVecSize, int kCount, bool kPairs>
struct LogitPacks {
  using Compute = typename Program::Compute;
  using P = Pack<typename Program::Input, kVecSize>;
  Compute z[kCount][kVecSize];
  Compute maximum = -scalar_infinity(Compute());

  __device__ __forceinline__ LogitPacks(const Program& program, const P (&x)[kCount], int present) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      unpack(x[k], z[k]);
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        z[k][i] = k < present ? program.logit.value(z[k][i]) : -scalar_infinity(Compute());
        maximum = max_ignoring_nan(maximum, z[k][i]);
      }
    }
  }
  // Replaces the first class that equals the maximum by -inf.
  __device__ __forceinline__ void leave_out_maximum() {
    bool missing = true;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        const bool held = missing && z[k][i] == maximum;
        missing = missing && !held;
        z[k][i] = held ? -scalar_infinity(Compute()) : z[k][i];
      }
    }
  }
  // Computes z - shift of the classes of pack k.
  __device__ __forceinline__ void relative(const Program&, int k, Compute shift, Compute (&d)[kVecSize]) const {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) d[i] = z[k][i] - shift;
  }
};

// Packs of 16-bit logits without a cap. Maxima are compared in pairs and before scaling, and z - shift is a single fma.
template <class Program, int kVecSize, int kCount>
struct LogitPacks<Program, kVecSize, kCount, true> {
  using Input = typename Program::Input;
  using P = Pack<Input, kVecSize>;
  P x[kCount];
  float largest[kCount];  // of each pack, before scaling
  float largest_of_all;
  float maximum;

  __device__ __forceinline__ LogitPacks(const Program& program, const P (&packs)[kCount], int present) {
    const Input lowest = Narrow<Input>::from(-scalar_infinity(0.0f));
    largest_of_all = -scalar_infinity(0.0f);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      x[k] = k < present ? packs[k] : pack_of_words<P>(lowest);
      RunningMax<float, Input, kVecSize> of_pack;
      of_pack.add(x[k]);
      largest[k] = of_pack.get();
      largest_of_all = max_ignoring_nan(largest_of_all, largest[k]);
    }
    maximum = program.logit.value(largest_of_all);
  }
  __device__ __forceinline__ void leave_out_maximum() {
    bool missing = true;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (!missing || largest[k] != largest_of_all) continue;
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        const bool held = missing && widen<float>(x[k].element[i]) == largest_of_all;
        missing = missing && !held;
        if (held) x[k].element[i] = Narrow<Input>::from(-scalar_infinity(0.0f));
      }
    }
  }
  __device__ __forceinline__ void relative(const Program& program, int k, float shift, float (&d)[kVecSize]) const {
    unpack(x[k], d);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) d[i] = scalar_fma(d[i], program.logit.scale, -shift);
  }
};
template <class Program, int kVecSize, int kCount>
using PacksOf = LogitPacks<Program, kVecSize, kCount, Program::kShort && kVecSize % 2 == 0>;

// Adds the exponentials and the gaps of packs to `part`; if `hold`, all but one class that has their maximum, which is
// part.max_logit. Precondition: part.max_logit is not below any class.
template <class Program, int kVecSize, int kCount, bool kPairs>
__device__ __forceinline__ void add_exponentials(const Program& program,
                                                 LogitPacks<Program, kVecSize, kCount, kPairs>& packs, bool hold,
                                                 typename Program::Moments& part) {
  using Compute = typename Program::Compute;
  if (hold) {
    // Before the exponentials: a condition at each of them would become a select for all packs.
    packs.leave_out_maximum();
    part.held = Compute(1);
  }
  const Compute shift = exp_shift(part.max_logit);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    Compute d[kVecSize], e[kVecSize], gap = Compute(0);
    packs.relative(program, k, shift, d);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      e[i] = Program::exponential(d[i]);
      if constexpr (Program::kEntropy) gap = scalar_fma(e[i], -larger_or_nan(d[i], Compute(-1000)), gap);
    }
    part.exp_sum += sum_elements(e);
    if constexpr (Program::kEntropy) part.gap += gap;
  }
}

// Adds packs, of which those from index `present` on do not exist, and rescales `part` if they contain a larger
// maximum.
template <int kVecSize, int kCount, class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ void add_packs(const Program& program,
                                          const Pack<typename Program::Input, kVecSize> (&x)[kCount], int present,
                                          typename Program::Moments& part) {
  PacksOf<Program, kVecSize, kCount> packs(program, x, present);
  const bool grows = packs.maximum > part.max_logit;  // rare
  if (grows) {
    const Compute gap = part.rescaled_gap(packs.maximum);
    part = {packs.maximum, part.rescaled_sum(packs.maximum), Compute(1), gap};
  }
  add_exponentials(program, packs, grows, part);
}

// The edge elements of one thread: every `threads`-th one from its rank on, kCount at most.
template <class Input, int kCount>
struct OwnEdges {
  Pack<Input, 1> x[kCount];
  int present = 0;

  template <class View>
  __device__ __forceinline__ OwnEdges(const View& view, const Input* row, int64 thread, int64 threads) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const int64 edge = view.edge_class(static_cast<int>(thread + e * threads));
      x[e] = {};
      if (edge < 0) continue;
      x[e] = load_stream<1>(row + edge);
      present = e + 1;
    }
  }
};

// Moments of one thread's part of a row. Preconditions: a thread has at most kEdges edge elements; if kWarps, the lanes
// of a warp share the row and call it together.
template <int kVecSize, int kVectors, int kEdges, bool kWarps, class Program>
__device__ __forceinline__ typename Program::Moments partial_moments(const Program& program,
                                                                     const int64 (&offset)[kRowStreams], int64 thread,
                                                                     int64 threads) {
  using Input = typename Program::Input;
  using Compute = typename Program::Compute;
  typename Program::Moments part = Program::Moments::empty();
  const RowVectors<Input, kVecSize> view(program.input, offset[kLogits], program.space.classes);
  const Input* const input = program.input + offset[kLogits];
  {
    Pack<Input, kVecSize> x[kVectors];
    int present = 0;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      x[k] = {};
      if (thread + k * threads < view.vectors) {
        x[k] = load_stream<kVecSize>(input + view.first(thread + k * threads));
        present = k + 1;
      }
    }
    PacksOf<Program, kVecSize, kVectors> packs(program, x, present);
    const Compute local_max = packs.maximum;
    part.max_logit = kWarps ? subwarp_reduce(local_max, kWarp, MaxOp{}) : local_max;
    // Only the first lane that has the maximum holds a class. All such lanes could, at the price of spilled registers.
    bool hold = local_max > -scalar_infinity(local_max) && identical(local_max, part.max_logit);
    if (kWarps) hold = first_of_subwarp(hold, kWarp);
    add_exponentials(program, packs, hold, part);
  }
  int64 vector = thread + threads * kVectors;
#pragma unroll 1
  for (; vector + (kVectors - 1) * threads < view.vectors; vector += threads * kVectors) {
    Pack<Input, kVecSize> x[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) x[k] = load_stream<kVecSize>(input + view.first(vector + k * threads));
    add_packs(program, x, kVectors, part);
  }
#pragma unroll 1
  for (; vector < view.vectors; vector += threads) {
    const Pack<Input, kVecSize> x[1] = {load_stream<kVecSize>(input + view.first(vector))};
    add_packs(program, x, 1, part);
  }
  if constexpr (kEdges > 0) {
    const OwnEdges<Input, kEdges> edges(view, input, thread, threads);
    if (edges.present > 0) add_packs(program, edges.x, edges.present, part);
  }
  return part;
}

// Returns the softmax of a whole row. All but its maximum is NaN if no logit is a number above -inf, or if one is inf.
template <class Compute, bool kEntropy>
__device__ __forceinline__ Softmax<Compute> softmax_of(const RowMoments<Compute, kEntropy>& whole) {
  Softmax<Compute> row;
  row.set(OnlineSoftmax<Compute, ExcludeMax>{whole.max_logit, whole.exp_sum});
  if (!(scalar_abs(row.max_logit) <= scalar_max(Compute()))) {
    row.log_sum = row.inv_sum = row.max_complement = scalar_nan(Compute());
  }
  return row;
}

// Stores the values of a row and its coefficients; raw(c) is the raw logit of class c. Precondition: `part` is that of
// the whole row, in every thread.
template <class Program, class Raw, class Compute = typename Program::Compute>
__device__ __forceinline__ void store_values(const Program& program, const int64 (&offset)[kRowStreams], bool counts,
                                             const typename Program::Moments& part, const Raw& raw, int64 thread,
                                             int64 threads) {
  const Softmax<Compute> row = softmax_of(part);
  const Compute gap = Program::kEntropy ? part.gap * row.inv_sum : Compute(0);
  Compute* const values = program.values + program.first_value(offset);
  for (int64 k = thread; k < program.count; k += threads) {
    const int64 label = program.label(offset, k);
    Compute value = Compute(0);
    if (counts && label != program.ignored) {
      if (program.is_class(label)) {
        value = row.log_p(program.logit.value(widen<Compute>(raw(label))));
        value = value > Compute(0) ? Compute(0) : value;
      } else {
        value = scalar_nan(Compute());
        report_label(program.status, program.site, offset[kResults] * program.count + k, label, program.space.classes);
      }
    }
    values[k] = value;
  }
  if (thread != 0) return;
  if (Program::kEntropy) values[program.count] = counts ? row.log_sum + gap : Compute(0);
  if (program.coeffs != nullptr) {
    LogProbCoeffs<Compute> coeffs{row.max_logit, row.inv_sum, row.max_complement, gap};
    if (!counts) coeffs = {};
    program.coeffs[offset[kResults]] = coeffs;
  }
}

template <int kVecSize, int kVectors, int kEdges, class Group, class Program>
__device__ __forceinline__ void log_probs(const Program& program, const Group& group) {
  const int64 step = group.workers() * group.rows_at_once(), first = group.worker() * group.rows_at_once();
  if (first >= program.space.rows) return;
  group.cluster_start();
  SyncState sync{0, 0};
#pragma unroll 1
  for (int64 r = first; r < program.space.rows; r += step) {
    const int64 row = r + group.row_slot();
    const bool exists = row < program.space.rows;
    int64 offset[kRowStreams];
    program.space.offsets(exists ? row : 0, offset);
    const bool counts = exists && program.counts(offset);
    typename Program::Moments part = Program::Moments::empty();
    if (counts) {
      part = partial_moments<kVecSize, kVectors, kEdges, Group::kMultiWarp>(program, offset, group.thread_rank(),
                                                                            group.num_threads());
    }
    subwarp_combine(part, group.subwarp_size());
    group_combine(group, part, sync);
    const auto raw = [&](int64 c) { return program.input[offset[kLogits] + c]; };
    if (exists) store_values(program, offset, counts, part, raw, group.thread_rank(), group.num_threads());
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward

// Grad_outputs of a row: their sum over the labels, and that of the entropy, both times the slope that all logits
// share. Bit i of `hits` is set if a vector of the calling thread whose number is i modulo 64 contains a label.
template <class Compute>
struct RowUpstream {
  Compute total;
  Compute entropy;
  unsigned long long hits;
  bool all_zero;
};

// Factors of the gradient of a class that is no label, -exp(z_c - m) (of_p + of_gap (z_c - m)). Both contain 1 / S.
template <class Compute>
struct RowSlopes {
  Compute of_p, of_gap;

  __device__ __forceinline__ RowSlopes(const RowUpstream<Compute>& up, const LogProbCoeffs<Compute>& row)
      : of_p(row.inv_sum * scalar_fma(up.entropy, row.mean_gap, up.total)), of_gap(row.inv_sum * up.entropy) {
  }
};

template <class Program, class View, class Compute = typename Program::Compute>
__device__ __forceinline__ RowUpstream<Compute> row_upstream(const Program& program, const View& view,
                                                             const int64 (&offset)[kRowStreams], int64 begin, int64 end,
                                                             int64 thread, int threads) {
  RowUpstream<Compute> up{Compute(0), Compute(0), 0, true};
  if (!program.counts(offset)) return up;
  const Compute* const grad_output = program.grad_output + program.first_value(offset) * program.result_stride;
  const int log_threads = __ffs(threads) - 1;
  for (int64 k = 0; k < program.count; ++k) {
    const int64 label = program.label(offset, k);
    if (!program.is_class(label)) continue;
    const Compute g = grad_output[k * program.result_stride];
    up.total += g;
    up.all_zero &= g == Compute(0);
    const int64 vector = label < view.head ? view.vectors : (label - view.head) / View::kVecSize, own = vector - begin;
    if (vector >= begin && vector < end && (own & (threads - 1)) == thread)
      up.hits |= 1ull << (own >> log_threads & 63);
  }
  if (Program::kEntropy) up.entropy = grad_output[program.count * program.result_stride];
  up.all_zero &= up.entropy == Compute(0);
  up.total *= program.logit.common_slope();
  up.entropy *= program.logit.common_slope();
  return up;
}

// Computes z and its slope for raw logits of kVecSize contiguous classes from `first` on, and the gradient with respect
// to z, times the slope that all logits share. `has_label` is true if one of the classes may be a label.
template <int kVecSize, class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ void logit_gradients(const Program& program, const int64 (&offset)[kRowStreams], int64 first,
                                                bool has_label, const RowUpstream<Compute>& up,
                                                const LogProbCoeffs<Compute>& row, const Compute (&raw)[kVecSize],
                                                Compute (&g)[kVecSize], Compute (&z)[kVecSize],
                                                Compute (&slope)[kVecSize]) {
  Compute of_label[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) g[i] = of_label[i] = Compute(0);
  if (has_label) {
#pragma unroll 1
    for (int64 k = 0; k < program.count; ++k) {
      const int64 label = program.label(offset, k), i_of_label = label - first;
      if (i_of_label < 0 || i_of_label >= kVecSize || !program.is_class(label)) continue;
      const Compute of_k = program.grad_output[(program.first_value(offset) + k) * program.result_stride];
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        if (i == i_of_label) of_label[i] += of_k * program.logit.common_slope();
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    program.logit_and_slope(raw[i], z[i], slope[i]);
    const Compute d = below_max(z[i], row.max_logit), p = exp_nonpositive(d) * row.inv_sum;
    Compute p_coeff = up.total;
    if (has_label) {
      const Compute complement = identical(z[i], row.max_logit) ? row.max_complement : Compute(1) - p;
      p_coeff -= of_label[i];
      g[i] = of_label[i] * complement;
    }
    if (Program::kEntropy) p_coeff += up.entropy * (d + row.mean_gap);
    g[i] -= p * p_coeff;
  }
}

// Returns the gradient of kVecSize contiguous classes from `first` on; `has_label` is true if one of them may be a
// label.
template <int kVecSize, class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ Pack<typename Program::Gradient, kVecSize> log_prob_gradient(
    const Program& program, const int64 (&offset)[kRowStreams], int64 first, bool has_label,
    const RowUpstream<Compute>& up, const LogProbCoeffs<Compute>& row,
    const Pack<typename Program::Input, kVecSize>& x) {
  Compute g[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) g[i] = Compute(0);
  if (Program::kShort && !has_label && !up.all_zero) {
    const RowSlopes<Compute> slopes(up, row);
    unpack(x, g);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const Compute d = larger_or_nan(scalar_fma(g[i], program.logit.scale, -row.max_logit), Compute(-1000));
      const Compute of_p = Program::kEntropy ? scalar_fma(slopes.of_gap, d, slopes.of_p) : slopes.of_p;
      g[i] = -Program::exponential(d) * of_p;
    }
  } else if (!up.all_zero) {
    Compute raw[kVecSize], z[kVecSize], slope[kVecSize];
    unpack(x, raw);
    logit_gradients(program, offset, first, has_label, up, row, raw, g, z, slope);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) g[i] *= slope[i];
  }
  return NarrowPack<typename Program::Gradient, kVecSize>::from(g);
}

// Gradients of all rows. Rows are cut into `slices`, so that a few rows still fill the GPU; a group processes one slice
// of a row at a time.
template <int kVecSize, int kVectors, int kEdges, class Group, class Program>
__device__ __forceinline__ void log_prob_gradients(const Program& program, const Group& group, int64 slices) {
  using Compute = typename Program::Compute;
  using Input = typename Program::Input;
  const int64 items = program.space.rows * slices, at_once = group.rows_at_once();
  const int64 thread = group.thread_rank(), threads = group.num_threads();
#pragma unroll 1
  for (int64 r = group.worker() * at_once; r < items; r += group.workers() * at_once) {
    const int64 item = r + group.row_slot();
    if (item >= items) continue;
    const int64 number = item / slices, slice = item - number * slices;
    int64 offset[kRowStreams];
    program.space.offsets(number, offset);
    const RowVectors<Input, kVecSize> view(program.input, offset[kLogits], program.space.classes);
    const int64 length = (view.vectors + slices - 1) / slices, begin = slice * length;
    const int64 end = begin + length < view.vectors ? begin + length : view.vectors;
    const RowUpstream<Compute> up = row_upstream(program, view, offset, begin, end, thread, static_cast<int>(threads));
    LogProbCoeffs<Compute> row{};
    if (!up.all_zero) row = program.coeffs[offset[kResults]];
    const Input* const input = program.input + offset[kLogits];
    typename Program::Gradient* const gradients = program.gradients + offset[kGradients];
#pragma unroll 1
    for (int e = static_cast<int>(thread); kEdges > 0 && slice == 0 && view.edge_class(e) >= 0;
         e += static_cast<int>(threads)) {
      const int64 edge = view.edge_class(e);
      const Pack<Input, 1> x = up.all_zero ? Pack<Input, 1>{} : load_stream<1>(input + edge);
      store_pack<1>(gradients + edge, log_prob_gradient(program, offset, edge, true, up, row, x));
    }
    unsigned number_of_own = 0;
#pragma unroll 1
    for (int64 vector = begin + thread; vector < end; vector += threads * kVectors) {
      Pack<Input, kVecSize> x[kVectors];
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        x[k] = {};
        if (!up.all_zero && vector + k * threads < end) {
          x[k] = load_stream<kVecSize>(input + view.first(vector + k * threads));
        }
      }
#pragma unroll
      for (int k = 0; k < kVectors; ++k, ++number_of_own) {
        if (vector + k * threads >= end) continue;
        const int64 of_pack = view.first(vector + k * threads);
        const bool has_label = (up.hits >> (number_of_own & 63) & 1) != 0;
        store_pack<kVecSize>(gradients + of_pack,
                             log_prob_gradient(program, offset, of_pack, has_label, up, row, x[k]));
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Many rows of few classes: one thread per row. A warp copies its 32 rows to shared memory and, in backward, their
// gradients back; only __syncwarp separates the copies from the lanes. Lanes that read few classes each from global
// memory would use a part of every sector. Preconditions: those of PackedRows.

// Moments of the row of one lane.
template <class Program, class Rows>
__device__ __forceinline__ typename Program::Moments moments_of_lane(const Program& program, const Rows& rows) {
  using Compute = typename Program::Compute;
  const int classes = rows.classes();
  typename Program::Moments part = Program::Moments::empty();
  const auto logit = [&](int c) { return program.logit.value(widen<Compute>(rows.read(c).element[0])); };
#pragma unroll 4
  for (int c = 0; c < classes; ++c) part.max_logit = max_ignoring_nan(part.max_logit, logit(c));
  part.held = held_at(part.max_logit);
  const Compute shift = exp_shift(part.max_logit);
  bool missing = part.held != Compute(0);
#pragma unroll 4
  for (int c = 0; c < classes; ++c) {
    const Compute z = logit(c), d = z - shift;
    const bool held = missing && z == part.max_logit;
    missing = missing && !held;
    const Compute e = held ? Compute(0) : Program::exponential(d);
    part.exp_sum += e;
    if constexpr (Program::kEntropy) part.gap = scalar_fma(e, -larger_or_nan(d, Compute(-1000)), part.gap);
  }
  return part;
}

// The rows of a warp from row `first` on, and the row of the calling lane among them.
template <class Program>
struct RowOfLane {
  PackedRows<typename Program::Input, true> rows;
  bool exists;
  int64 offset[kRowStreams];

  // `buffers`: number of buffers that each warp has in shared memory. The rows use the first one.
  __device__ __forceinline__ RowOfLane(const Program& program, int64 first, int buffers = 1)
      : rows(program, first, 0, buffers) {
    const int64 row = first + threadIdx.x % kWarp;
    exists = row < program.space.rows;
    program.space.offsets(exists ? row : 0, offset);
  }
  // The first row of the calling warp, and the distance to its next ones.
  static __device__ __forceinline__ int64 begin() {
    return static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x / kWarp * kWarp;
  }
  static __device__ __forceinline__ int64 step() {
    return static_cast<int64>(gridDim.x) * blockDim.x;
  }
};

template <class Program>
__device__ __forceinline__ void log_probs_of_lanes(const Program& program) {
  using Row = RowOfLane<Program>;
#pragma unroll 1
  for (int64 first = Row::begin(); first < program.space.rows; first += Row::step()) {
    const Row row(program, first);
    const bool counts = row.exists && program.counts(row.offset);
    row.rows.load_all(counts);
    typename Program::Moments part = Program::Moments::empty();
    if (counts) part = moments_of_lane(program, row.rows);
    const auto raw = [&](int64 c) { return row.rows.read(static_cast<int>(c)).element[0]; };
    if (row.exists) store_values(program, row.offset, counts, part, raw, 0, 1);
    __syncwarp();  // the next rows are copied to the same memory
  }
}

template <class Program>
__device__ __forceinline__ void log_prob_gradients_of_lanes(const Program& program) {
  using Compute = typename Program::Compute;
  using Row = RowOfLane<Program>;
#pragma unroll 1
  for (int64 first = Row::begin(); first < program.space.rows; first += Row::step()) {
    const Row row(program, first);
    const int classes = row.rows.classes();
    RowUpstream<Compute> up{Compute(0), Compute(0), 0, true};
    if (row.exists) {
      const RowVectors<typename Program::Input, 1> view(program.input, row.offset[kLogits], classes);
      up = row_upstream(program, view, row.offset, 0, classes, 0, 1);
    }
    row.rows.load_all(!up.all_zero);
    LogProbCoeffs<Compute> coeffs{};
    if (!up.all_zero) coeffs = program.coeffs[row.offset[kResults]];
#pragma unroll 4
    for (int c = 0; c < classes; ++c) {
      const bool has_label = (up.hits >> (c & 63) & 1) != 0;
      row.rows.overwrite(c, log_prob_gradient(program, row.offset, c, has_label, up, coeffs, row.rows.read(c)));
    }
    row.rows.flush();
  }
}
