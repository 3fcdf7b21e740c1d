// Rows in registers: each logit is read once, and goes through no memory between its load and its gradient. Value and
// gradient of softmax.cuh.
//
//   a lane owns kVecSize rows, and all kPerThread classes of each
//
// 1. Labels and logits are loaded together, so that their latencies overlap.
// 2. A lane computes the maximum and the sum of exponentials of its rows. If there are few, each exponential replaces
//    its logit in a register; otherwise it is computed again in step 4.
// 3. The lane evaluates its rows side by side (lane_rows.cuh).
// 4. It writes their gradients.
//
// A source tells where a lane finds its logits, and where its gradients go: columns.cuh has strided classes,
// packed_rows.cuh few contiguous ones. Lanes without rows load arbitrary logits, and drop the results. The number of
// classes is a compile-time constant, and the label's class is found by comparing the label with constants.
//
// With capped logits a lane has one branch per sweep: if all logits of its rows are near (softmax.cuh), which is usual,
// no exponential and no reciprocal is computed for the cap. The loops over classes are unrolled, and a branch for each
// logit would keep them from interleaving two logits.
//
// Traffic: each logit is read once, each gradient written once. Preconditions: gradients have the dtype of logits.
#pragma once
#include "softmax/lane_rows.cuh"

// Maximum number of exponentials that a thread keeps: with more registers, too few warps would be resident.
constexpr int kMaxKept = 32;

// Adds the classes of a lane's rows to `sums`, whose max_logit is set. z[i] is the label's logit of row i. With kKept,
// e[j] receives the exponentials of class j; with capped logits, their products with the slopes. kNear: capped logits
// are known to be near. kMasks: the labels' logits have been replaced by -inf.
template <bool kNear, bool kKept, bool kMasks, int kPerThread, int kVecSize, class Program, class Compute,
          int kKeptClasses>
__device__ __forceinline__ void add_register_rows(const Program& program,
                                                  const Pack<typename Program::Input, kVecSize> (&x)[kPerThread],
                                                  const int (&labels)[kVecSize], const Compute (&z)[kVecSize],
                                                  RowSums<Compute, Program::kSmoothed> (&sums)[kVecSize],
                                                  Compute (&e)[kKeptClasses][kVecSize]) {
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    Compute raw[kVecSize];
    unpack(x[j], raw);
    const Compute w = Program::kSmoothed ? program.weight(j) : Compute(1);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      Compute power, of_class, slope;
      program.logit.template exponential_value_slope<kNear>(raw[i], exp_shift(sums[i].softmax.max_logit), power,
                                                            of_class, slope);
      const Compute counted = !kMasks && j == labels[i] ? Compute(0) : power;
      sums[i].softmax.exp_sum = j == 0 ? counted : sums[i].softmax.exp_sum + counted;
      if constexpr (kKept) e[j][i] = Program::kKeepsProducts ? power * slope : power;
      if constexpr (Program::kSmoothed) {
        sums[i].weighted_gap += w == Compute(0) ? Compute(0) : w * (z[i] - of_class);
        sums[i].weight_sum += w;
      }
    }
  }
}

// Replaces the logits of a lane's rows by their gradients. With kMasks the gradients of the labels' classes are left to
// the caller. If bit i of zero_rows is set, all gradients of row i are 0. e, kKept and kNear: as in add_register_rows.
template <bool kNear, bool kKept, bool kMasks, int kPerThread, int kVecSize, class Program, class Compute,
          int kKeptClasses>
__device__ __forceinline__ void gradients_of_register_rows(
    const Program& program, Pack<typename Program::Input, kVecSize> (&x)[kPerThread], const int (&labels)[kVecSize],
    const GradCoeffs<Compute> (&coeffs)[kVecSize], unsigned zero_rows, const Compute (&e)[kKeptClasses][kVecSize]) {
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    Compute raw[kVecSize], g[kVecSize];
    unpack(x[j], raw);
    const Compute w = Program::kSmoothed ? program.weight(j) : Compute(0);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      Compute power, of_class, slope;
      if constexpr (kKept) {
        power = e[j][i];
      } else {
        program.logit.template exponential_value_slope<kNear>(raw[i], coeffs[i].max_logit, power, of_class, slope);
      }
      g[i] = coeffs[i].exp_coeff * power;
      if constexpr (Program::kSmoothed) g[i] -= coeffs[i].weight_coeff * w;
      if constexpr (!kMasks) g[i] = j == labels[i] ? coeffs[i].target : g[i];
      if constexpr (Program::kCapped && !kKept) g[i] *= slope;
      // In rows without a gradient an infinite weight would lead to NaN, so zeros are selected.
      if constexpr (Program::kSmoothed) g[i] = zero_rows >> i & 1u ? Compute(0) : g[i];
    }
    x[j] = NarrowPack<typename Program::Input, kVecSize>::from(g);
  }
}

// Evaluates the `count` rows of a lane and, if kGradient, writes their gradients. Returns the sum of the values.
// ahead() starts loading the next rows. It is called when the logits and labels of the source are no longer needed.
template <bool kGradient, class Source, class Program, class Scale, class Ahead>
__device__ __forceinline__ double visit_register_rows(const Program& program, const Source& source,
                                                      const LaneLabels<Source::kVecSize, Program>& labels_of,
                                                      Scale& scale, int count, const Ahead& ahead) {
  using Compute = typename Program::Compute;
  using Input = typename Program::Input;
  using Sums = RowSums<Compute, Program::kSmoothed>;
  constexpr int kVecSize = Source::kVecSize, kPerThread = Source::kPerThread;
  constexpr bool kKept =
      kGradient && (Program::kKeepsProducts || (!Program::kCapped && kPerThread * kVecSize <= kMaxKept));
  static_assert(kSameType<Input, typename Program::Gradient>, "gradients take the place of logits in registers");
  // With kMasks the source looks up the labels' logits, and no class is compared with the label.
  constexpr bool kMasks = Source::kMasks && !Program::kSmoothed && !Program::kCapped;
  Pack<Input, kVecSize> x[kPerThread];
  int labels[kVecSize];
  labels_of.active_classes(program, count, labels);
  Compute z[kVecSize], largest[kVecSize], e[kKept ? kPerThread : 1][kVecSize];
  Compute slope_of_label[kVecSize], farthest = Compute(0);
  Sums sums[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    largest[i] = -scalar_infinity(Compute());
    sums[i] = Sums::empty();
    if constexpr (kMasks) largest[i] = z[i] = widen<Compute>(source.mask_out(i, labels[i]));
  }
  source.load(x);
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    Compute raw[kVecSize];
    unpack(x[j], raw);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      largest[i] = j == 0 && !kMasks ? raw[i] : max_ignoring_nan(largest[i], raw[i]);
      // Rows without a label drop the logit found here.
      if constexpr (!kMasks) z[i] = j == 0 || j == labels[i] ? raw[i] : z[i];
      if constexpr (Program::kCapped) farthest = max_ignoring_nan(farthest, scalar_abs(raw[i]));
    }
  }
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    sums[i].softmax.max_logit = program.logit.value(largest[i]);
    if constexpr (kKept && Program::kCapped) slope_of_label[i] = program.logit.slope(z[i]);
    z[i] = program.logit.value(z[i]);
  }
  const bool is_near = program.logit.is_near(farthest);
  if (is_near) {
    add_register_rows<true, kKept, kMasks>(program, x, labels, z, sums, e);
  } else {
    add_register_rows<false, kKept, kMasks>(program, x, labels, z, sums, e);
  }
  ahead();
  GradCoeffs<Compute> coeffs[kVecSize];
  unsigned zero_rows;
  const double total = evaluate_lane_rows<kGradient>(
      program, labels, z, sums, count, [&](int i, int64(&at)[kRowStreams]) { source.offsets(program, i, at); }, scale,
      coeffs, zero_rows);
  if constexpr (kGradient) {
    if (count <= 0) return total;
    // Opaque labels are compared again. With few classes, compilers would otherwise keep the result of each comparison
    // as a bit of a register.
    const int zero = static_cast<int>(opaque_zero());
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) labels[i] += zero;
    if (zero_rows != 0) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        x[j] = opaque_pack(x[j]);
#pragma unroll
        for (int i = 0; i < kVecSize; ++i) {
          if (!(zero_rows >> i & 1u)) continue;
          x[j].element[i] = Narrow<Input>::from(Compute(0));
          if constexpr (kKept) e[j][i] = Compute(0);
        }
      }
    }
    if constexpr (kKept && Program::kCapped) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) coeffs[i].target *= slope_of_label[i];
    }
    if (!kKept && is_near) {
      gradients_of_register_rows<true, kKept, kMasks>(program, x, labels, coeffs, zero_rows, e);
    } else {
      gradients_of_register_rows<false, kKept, kMasks>(program, x, labels, coeffs, zero_rows, e);
    }
    source.store(program, x);
    if constexpr (kMasks) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) source.store_target(i, labels[i], Narrow<Input>::from(coeffs[i].target));
    }
  }
  return total;
}
