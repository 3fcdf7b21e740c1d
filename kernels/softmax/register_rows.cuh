// Rows in registers: each logit is read once, and goes through no memory between its arrival and its gradient. Value
// and gradient of softmax.cuh.
//
//   a lane takes kVecSize rows       warp k of kWarps takes their classes k, k + kWarps, ...: kPerThread at most
//
// 1. Labels and logits are loaded together, so their latencies overlap.
// 2. A lane finds maximum and sum of exponentials of its classes. Each exponential stays in a register, in place of its
//    logit, if there are few; otherwise it is computed again in step 4.
// 3. The lane evaluates its rows. Warps that share rows leave their sums in shared memory. Warp i combines all sums of
//    the lanes' i-th rows in the order of the warps, evaluates these rows, and leaves the coefficients of their
//    gradients: what a row costs besides its logits is paid once.
// 4. Each thread writes the gradient of its classes.
//
// A source says where the logits of a lane are and where its gradients go: columns.cuh has classes that lie apart,
// packed_rows.cuh few contiguous ones. The number of classes is a constant of the kernel where one warp takes whole
// rows, so the label's class is found by comparing it with constants.
//
// Traffic: each logit is read once, each gradient written once. Preconditions: gradients have the dtype of logits;
// kVecSize <= kWarps if rows are shared; then blocks are workers, and all their threads call visit_register_rows
// together.
#pragma once
#include "softmax/rows.cuh"

// Values that a thread keeps as exponentials, at most: more registers would leave too few warps.
constexpr int kMaxKept = 32;

// The labels of the `count` rows of a lane.
template <int kVecSize, class Program>
struct LabelsOfLane {
  typename Program::LabelLoad label_load[kVecSize];

  template <class Source>
  __device__ __forceinline__ void read(const Program& program, const Source& source, int count) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      label_load[i] = {{}, true};
      if (i >= count) continue;
      int64 at[kRowStreams];
      source.offsets(program, i, at);
      label_load[i] = program.load_label(at);
    }
  }
};

// The exchange between warps of a block about rows that they share: sums of each warp, coefficients of each row.
template <class Sums, class Coeffs, int kVecSize, int kWarps>
struct SharedRows {
  // Arrays of words, because the types may have constructors.
  static __device__ __forceinline__ Sums* sums() {
    static_assert(sizeof(Sums) % 4 == 0, "kept in words of 4 bytes");
    alignas(16) __shared__ unsigned words[kWarps * kVecSize * kWarp * (sizeof(Sums) / 4)];
    return reinterpret_cast<Sums*>(words) + threadIdx.x % kWarp;
  }
  static __device__ __forceinline__ Coeffs* coeffs() {
    alignas(16) __shared__ unsigned words[kVecSize * kWarp * (sizeof(Coeffs) / 4)];
    return reinterpret_cast<Coeffs*>(words) + threadIdx.x % kWarp;
  }
  static __device__ __forceinline__ void put(const Sums (&own)[kVecSize]) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) sums()[(threadIdx.x / kWarp * kVecSize + i) * kWarp] = own[i];
  }
  // The sums of all warps for row i of each lane, in the order of the warps.
  static __device__ __forceinline__ Sums combined(int i) {
    Sums whole = Sums::empty();
#pragma unroll
    for (int k = 0; k < kWarps; ++k) {
      const auto other = sums()[(k * kVecSize + i) * kWarp].softmax.max_logit;
      whole.softmax.max_logit = max_ignoring_nan(whole.softmax.max_logit, other);
    }
#pragma unroll 4
    for (int k = 0; k < kWarps; ++k) {
      Sums part = sums()[(k * kVecSize + i) * kWarp];
      rescale(part.softmax, whole.softmax.max_logit);
      whole.softmax.exp_sum += part.softmax.exp_sum;
      whole.weighted_gap += part.weighted_gap;
      whole.weight_sum += part.weight_sum;
    }
    return whole;
  }
};

// The coefficients of the gradient of the source's i-th row. `active`: the row has a gradient, and so exists.
template <bool kGradient, class Program, class Source, class Scale, class Compute = typename Program::Compute>
__device__ __forceinline__ GradCoeffs<Compute> register_row_coeffs(const Program& program, const Source& source, int i,
                                                                   bool active, const RowResult<Compute>& y,
                                                                   Scale& scale) {
  GradCoeffs<Compute> coeffs = y.grad_coeffs;
  if (kGradient && active) {
    int64 offset[kRowStreams];
    source.offsets(program, i, offset);
    scale_grad_coeffs(program, coeffs, grad_factor(scale, offset));
  }
  return coeffs;
}

// Evaluates the `count` rows of a lane and writes their gradients.
// Returns the sum of the values, where rows are shared in the warps that evaluate them. Preconditions: those of the
// file.
template <bool kGradient, int kWarps, class Source, class Program, class Scale>
__device__ __forceinline__ double visit_register_rows(const Program& program, const Source& source,
                                                      const LabelsOfLane<Source::kVecSize, Program>& labels_of,
                                                      Scale& scale, int count) {
  using Compute = typename Program::Compute;
  using Input = typename Program::Input;
  using Sums = RowSums<Compute, Program::kSmoothed>;
  constexpr int kVecSize = Source::kVecSize, kPerThread = Source::kPerThread;
  constexpr bool kKept = kGradient && !Program::kCapped && kPerThread * kVecSize <= kMaxKept;
  constexpr bool kShared = kWarps > 1;
  using Exchange = SharedRows<Sums, GradCoeffs<Compute>, kVecSize, kWarps>;
  static_assert(kSameType<Input, typename Program::Gradient>, "gradients take the place of logits in registers");
  static_assert(!kShared || kVecSize <= kWarps, "a warp evaluates one row of each lane");
  const int warp = kShared ? threadIdx.x / kWarp : 0;
  Pack<Input, kVecSize> x[kPerThread];
  if (count > 0) source.load(x);
  RowTarget<Compute> t[kVecSize];
  int labels[kVecSize];
  bool any = false;
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    if constexpr (kShared) source.offsets(program, i, t[i].offset);
    program.validate_label(t[i], labels_of.label_load[i]);
    t[i].active &= i < count;
    t[i].invalid_label &= i < count;
    labels[i] = t[i].active ? static_cast<int>(t[i].label) : -1;
    any |= t[i].active;
  }
  Compute z[kVecSize], e[kKept ? kPerThread : 1][kVecSize];
  Sums sums[kVecSize];
  Compute largest[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    z[i] = Compute(0);
    largest[i] = -scalar_infinity(Compute());
    sums[i] = Sums::empty();
  }
  if (any) {
    if constexpr (kShared) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        if ((Program::kSmoothed || i == warp) && labels[i] >= 0) z[i] = widen<Compute>(source.at(labels[i], i));
      }
    }
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if (!source.has(j)) continue;
      Compute raw[kVecSize];
      unpack(x[j], raw);
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        largest[i] = max_ignoring_nan(largest[i], raw[i]);
        if (!kShared) z[i] = j == labels[i] ? raw[i] : z[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      sums[i].softmax.max_logit = program.logit.value(largest[i]);
      z[i] = program.logit.value(z[i]);
    }
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if (!source.has(j)) continue;
      const int c = source.class_of(j);
      Compute raw[kVecSize];
      unpack(x[j], raw);
      const Compute w = Program::kSmoothed ? program.weight(c) : Compute(1);
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        const Compute power = program.logit.exponential(raw[i], exp_shift(sums[i].softmax.max_logit));
        sums[i].softmax.exp_sum += c == labels[i] ? Compute(0) : power;
        if constexpr (kKept) e[j][i] = power;
        if constexpr (Program::kSmoothed) {
          sums[i].weighted_gap += w == Compute(0) ? Compute(0) : w * (z[i] - program.logit.value(raw[i]));
          sums[i].weight_sum += w;
        }
      }
    }
  }
  double total = 0.0;
  GradCoeffs<Compute> coeffs[kVecSize];
  if constexpr (kShared) {
    Exchange::put(sums);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      if (i != warp) continue;
      const RowResult<Compute> y = program.finish(t[i], z[i], Exchange::combined(i), i < count);
      total = static_cast<double>(y.value);
      Exchange::coeffs()[i * kWarp] = register_row_coeffs<kGradient>(program, source, i, t[i].active, y, scale);
    }
    // Sums of the next visit are put behind this barrier, coefficients behind its first one.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) coeffs[i] = Exchange::coeffs()[i * kWarp];
  } else {
    // Outputs per row are rare: one test for all rows of the lane.
    bool stores = program.per_row != 0;
    RowResult<Compute> y[kVecSize];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      stores |= t[i].invalid_label;
      y[i] = program.evaluate(t[i], z[i], sums[i]);
      total += static_cast<double>(y[i].value);
    }
    if (stores) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        if (i >= count) continue;
        // Offsets and label are found again, for they would take registers of all other calls.
        RowTarget<Compute> again;
        source.offsets(program, i, again.offset);
        program.read_label(again);
        program.store(again, y[i], again.active && z[i] == sums[i].softmax.max_logit);
      }
    }
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      coeffs[i] = register_row_coeffs<kGradient>(program, source, i, t[i].active, y[i], scale);
    }
  }
  if constexpr (kGradient) {
    bool all_zero[kVecSize];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      all_zero[i] = coeffs[i].all_zero();
      if constexpr (kKept && kShared) {
        // Exponentials are relative to the warp's own maximum.
        const Compute own = sums[i].softmax.max_logit;
        const bool none = own == -scalar_infinity(Compute());
        coeffs[i].exp_coeff *= none ? Compute(0) : scalar_exp(own - exp_shift(coeffs[i].max_logit));
      }
    }
    if (count <= 0) return total;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if (!source.has(j)) continue;
      const int c = source.class_of(j);
      Compute raw[kVecSize], g[kVecSize];
      unpack(x[j], raw);
      const Compute w = Program::kSmoothed ? program.weight(c) : Compute(0);
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        g[i] = coeffs[i].exp_coeff *
               (kKept ? e[kKept ? j : 0][i] : program.logit.exponential(raw[i], coeffs[i].max_logit));
        if constexpr (Program::kSmoothed) g[i] -= coeffs[i].weight_coeff * w;
        g[i] = c == labels[i] ? coeffs[i].target : g[i];
        if constexpr (Program::kCapped) g[i] *= program.logit.slope(raw[i]);
        g[i] = all_zero[i] ? Compute(0) : g[i];
      }
      x[j] = NarrowPack<Input, kVecSize>::from(g);
    }
    source.store(x);
  }
  return total;
}
