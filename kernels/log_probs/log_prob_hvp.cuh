// Second derivatives of log-probabilities and entropies of labels (log_probs.cuh), along a tangent v (R, C) of the
// logits, which may have any strides.
//
//   t_c = v_c dz_c/dx_c                      a = sum over c of p_c t_c
//   u_c = log p_c + H = (z_c - m) + D        b = sum over c of p_c (t_c - a) u_c,    the derivative of -H
//
//   values[r, k] = t_y - a                   derivative with respect to grad_output of each log-probability, k < K
//   values[r, K] = -b                        and of the entropy, if kEntropy
//   hvp_c = -p_c ((t_c - a) (sum of g_k + h (u_c + 1)) - h b)         derivative with respect to z_c
//
// The derivative with respect to x_c is hvp_c dz_c/dx_c, and with a cap also d^2 z_c/dx_c^2 v_c times the gradient dz_c
// of log_probs.cuh.
//
// 1. Each thread reads its part of the row with its tangents, and keeps the online softmax and gap of log_probs.cuh. It
//    also adds up A = sum of exp(z_c - m) (t_c - t_m) and Q = sum of exp(z_c - m) (t_c - t_m) (z_c - m), where t_m is
//    the tangent of the largest logit. For another maximum m' and its tangent t', with d = m - m' and s = t_m - t',
//
//      A' = exp(d) (A + s S)                 Q' = exp(d) (Q + d (A + s S) - s G)
//
// 2. Butterfly reductions combine the lanes of a warp, and one all_gather combines the warps of the group.
// 3. a - t_m = A / S and b = Q / S + D A / S. The threads share out the labels, and store the values.
// 4. Each thread reads its part again, from L2 as far as it has stayed there, and writes hvp.
//
// All tangents are taken relative to t_m. So a tangent that all classes share cancels before anything is rounded, and
// in a confident row, where a - t_m is a sum of small terms, the derivatives keep their digits.
//
// Tangents of z are in units of Logit::common_slope(). kValued: the values are stored. Program::kWrites: hvp is.
//
// A group owns a row; many rows of few classes have a thread each, and a warp copies its logits and tangents to shared
// memory together (log_prob_hvps_of_lanes). Traffic: rows of a group are read twice, others once; each result is
// written once. Preconditions: class stride 1 in logits and results; those of log_probs.cuh about threads and edges.
#pragma once
#include "log_probs/log_probs.cuh"
#include "softmax/hvp_rows.cuh"

// Program of rows with tangents. Base: a LogProbProgram.
template <class Base, bool kWrites_>
struct LogProbHvpProgram : Base {
  static constexpr bool kWrites = kWrites_;
  using Storage = typename Base::Input;
  const Storage* tangents;
};

// Contiguous classes of a row: z and its tangents. For 16-bit logits without a cap, `x` are the raw logits, so that z -
// m is a single fma, and maxima are compared in pairs; otherwise x is z.
template <class Program, int kVecSize>
struct ClassesAlong {
  using Compute = typename Program::Compute;
  using Storage = typename Program::Storage;
  static constexpr bool kRaw = Program::kShort;
  const Program& program;
  Compute x[kVecSize];
  Compute t[kVecSize];
  Compute maximum;  // of z, ignoring NaN

  __device__ __forceinline__ ClassesAlong(const Program& program, const TangentPack<Storage, kVecSize>& pack)
      : program(program) {
    unpack(pack.values, x);
    unpack(pack.tangents, t);
    if constexpr (kRaw) {
      RunningMax<Compute, Storage, kVecSize> largest;
      largest.add(pack.values);
      maximum = program.logit.value(largest.get());
    } else {
      maximum = -scalar_infinity(Compute());
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        Compute slope;
        program.logit_and_slope(x[i], x[i], slope);
        if constexpr (Program::kCapped) t[i] *= slope;
        maximum = max_ignoring_nan(maximum, x[i]);
      }
    }
  }
  __device__ __forceinline__ Compute z(int i) const {
    return kRaw ? program.logit.value(x[i]) : x[i];
  }
  // Returns z - shift.
  __device__ __forceinline__ Compute relative(int i, Compute shift) const {
    return kRaw ? scalar_fma(x[i], program.logit.scale, -shift) : x[i] - shift;
  }
  __device__ __forceinline__ void leave_out(int i) {
    x[i] = -scalar_infinity(Compute());
  }
  // Returns the tangent of the first class that has the maximum.
  __device__ __forceinline__ Compute tangent_of_maximum() const {
    Compute tangent = Compute(0);
#pragma unroll
    for (int i = kVecSize - 1; i >= 0; --i) tangent = z(i) == maximum ? t[i] : tangent;
    return tangent;
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// First pass

// Moments of a part of a row, with the sums A and Q of its tangents.
template <class Compute, bool kEntropy>
struct MomentsAlong {
  RowMoments<Compute, kEntropy> moments;
  Compute max_tangent;    // that of the class that has max_logit
  Compute change;         // A
  Compute change_of_gap;  // Q; 0 without kEntropy

  static __device__ __forceinline__ MomentsAlong empty() {
    return {RowMoments<Compute, kEntropy>::empty(), Compute(0), Compute(0), Compute(0)};
  }
  // Makes A and Q relative to another maximum and its tangent; the other moments stay as they are. Precondition:
  // maximum >= max_logit.
  __device__ __forceinline__ void move_tangents(Compute maximum, Compute tangent) {
    const bool same = identical(moments.max_logit, maximum);
    const Compute d = same ? Compute(0) : below_max(moments.max_logit, maximum), s = max_tangent - tangent;
    const Compute factor = same ? Compute(1) : exp_nonpositive(d);
    const Compute moved = scalar_fma(s, moments.exp_sum + moments.held, change);
    if constexpr (kEntropy) {
      change_of_gap = factor * scalar_fma(d, moved, scalar_fma(-s, moments.gap, change_of_gap));
    }
    change = factor * moved;
    max_tangent = tangent;
  }
  // Makes all of the part relative to another maximum, which one of the next classes has. Precondition: maximum >
  // max_logit.
  __device__ __forceinline__ void grow(Compute maximum, Compute tangent) {
    move_tangents(maximum, tangent);
    moments = {maximum, moments.rescaled_sum(maximum), Compute(0), moments.rescaled_gap(maximum)};
  }
};
// Combines `other` into `part`. Preconditions: those of the moments.
template <class Compute, bool kEntropy>
__device__ __forceinline__ void combine(MomentsAlong<Compute, kEntropy>& part, MomentsAlong<Compute, kEntropy> other) {
  const bool leads = !(other.moments.max_logit > part.moments.max_logit);
  const Compute maximum = leads ? part.moments.max_logit : other.moments.max_logit;
  const Compute tangent = leads ? part.max_tangent : other.max_tangent;
  part.move_tangents(maximum, tangent);
  other.move_tangents(maximum, tangent);
  combine(part.moments, other.moments);
  part.change += other.change;
  if constexpr (kEntropy) part.change_of_gap += other.change_of_gap;
}

// Returns the tangent of the first of `width` neighbouring lanes that `holds` the maximum; of the first lane if none
// does. Preconditions: all 32 lanes call it together; width is a power of two.
template <class Compute>
__device__ __forceinline__ Compute tangent_of_holder(Compute tangent, bool holds, int width) {
  const int first = static_cast<int>(threadIdx.x % kWarp) & -width;
  const int holder = __ffs(static_cast<int>(__ballot_sync(0xffffffffu, holds) >> first)) - 1;
  return __shfl_sync(0xffffffffu, tangent, first + (holder < 0 || holder >= width ? 0 : holder));
}
// Combines the parts of `width` neighbouring lanes, in each of these lanes. Preconditions: those of the moments.
template <class Compute, bool kEntropy>
__device__ __forceinline__ void subwarp_combine(MomentsAlong<Compute, kEntropy>& part, int width) {
  if (width == 1) return;
  const Compute maximum = subwarp_reduce(part.moments.max_logit, width, MaxOp{});
  part.move_tangents(maximum, tangent_of_holder(part.max_tangent, part.moments.holds(maximum), width));
  part.change = subwarp_reduce(part.change, width, AddOp{});
  if constexpr (kEntropy) part.change_of_gap = subwarp_reduce(part.change_of_gap, width, AddOp{});
  subwarp_combine(part.moments, width);
}

// Adds contiguous classes to a part. While `hold` is set, the first class that equals the maximum is left out of the
// sum of exponentials; its tangent is t_m, so it adds nothing to the other sums. Without kGrows, no class exceeds the
// maximum.
template <bool kGrows = true, class Program, int kVecSize, class Compute = typename Program::Compute>
__device__ __forceinline__ void add_along(ClassesAlong<Program, kVecSize> classes, bool& hold,
                                          MomentsAlong<Compute, Program::kEntropy>& part) {
  if (kGrows && classes.maximum > part.moments.max_logit) {  // rare
    part.grow(classes.maximum, classes.tangent_of_maximum());
    hold = true;
  }
  if (hold) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const bool held = hold && classes.z(i) == part.moments.max_logit;
      hold = hold && !held;
      if (held) classes.leave_out(i);
    }
    if (!hold) part.moments.held = Compute(1);
  }
  const Compute shift = exp_shift(part.moments.max_logit);
  Compute e[kVecSize], gap = Compute(0), change = Compute(0), change_of_gap = Compute(0);
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    const Compute d = classes.relative(i, shift), t = classes.t[i] - part.max_tangent;
    e[i] = Program::exponential(d);
    change = scalar_fma(e[i], t, change);
    if constexpr (Program::kEntropy) {
      const Compute of_class = e[i] * larger_or_nan(d, Compute(-1000));
      gap -= of_class;
      change_of_gap = scalar_fma(of_class, t, change_of_gap);
    }
  }
  part.moments.exp_sum += sum_elements(e);
  part.change += change;
  if constexpr (Program::kEntropy) {
    part.moments.gap += gap;
    part.change_of_gap += change_of_gap;
  }
}

// Moments of one thread's part of a row. Preconditions: a thread has at most kEdges edge elements; if kWarps, the lanes
// of a warp share the row and call it together.
template <int kEdges, bool kWarps, class Program, class Source, class View, class Compute = typename Program::Compute>
__device__ __forceinline__ MomentsAlong<Compute, Program::kEntropy> partial_moments_along(const Program& program,
                                                                                          const Source& source,
                                                                                          const View& view,
                                                                                          int64 thread, int64 threads) {
  constexpr int kVecSize = View::kVecSize;
  MomentsAlong<Compute, Program::kEntropy> part = MomentsAlong<Compute, Program::kEntropy>::empty();
  bool hold = false;
  if constexpr (kWarps) {
    // As in forward, the lanes start with one maximum, so that they rarely find a larger one.
    Compute maximum = -scalar_infinity(Compute()), tangent = Compute(0);
    if (thread < view.vectors) {
      const ClassesAlong<Program, kVecSize> first(program, source.template load<kVecSize, false>(view.first(thread)));
      maximum = first.maximum;
      tangent = first.tangent_of_maximum();
    }
    part.moments.max_logit = subwarp_reduce(maximum, kWarp, MaxOp{});
    hold = maximum > -scalar_infinity(maximum) && identical(maximum, part.moments.max_logit);
    part.max_tangent = tangent_of_holder(tangent, hold, kWarp);
    hold = first_of_subwarp(hold, kWarp);
  }
#pragma unroll 1
  for (int64 vector = thread; vector < view.vectors; vector += threads) {
    const auto x = source.template load<kVecSize, false>(view.first(vector));
    add_along(ClassesAlong<Program, kVecSize>(program, x), hold, part);
  }
#pragma unroll 1
  for (int e = 0; e < kEdges; ++e) {
    const int64 edge = view.edge_class(static_cast<int>(thread + e * threads));
    if (edge >= 0) add_along(ClassesAlong<Program, 1>(program, source.template load<1, false>(edge)), hold, part);
  }
  return part;
}

// ---------------------------------------------------------------------------------------------------------------------
// Second pass

// Numbers that the derivatives of all classes of a row share:
//
//   hvp_c = exp(z_c - m) ((t_c - a) (constant + per_gap (z_c - m)) + of_all)
//
// The last three contain 1 / S and the slopes that all logits share.
template <class Compute>
struct RowAlong {
  LogProbCoeffs<Compute> softmax;
  Compute max_tangent;  // t_m
  Compute mean;         // a - t_m
  Compute of_entropy;   // b
  Compute constant, per_gap, of_all;

  template <bool kEntropy>
  __device__ __forceinline__ RowAlong(const MomentsAlong<Compute, kEntropy>& whole, const RowUpstream<Compute>& up,
                                      Compute slope) {
    const Softmax<Compute> row = softmax_of(whole.moments);
    const Compute mean_gap = kEntropy ? whole.moments.gap * row.inv_sum : Compute(0);
    softmax = {row.max_logit, row.inv_sum, row.max_complement, mean_gap};
    max_tangent = whole.max_tangent;
    mean = whole.change * row.inv_sum;
    of_entropy = kEntropy ? scalar_fma(mean_gap, mean, whole.change_of_gap * row.inv_sum) : Compute(0);
    const Compute factor = slope * row.inv_sum;
    constant = -factor * scalar_fma(up.entropy, mean_gap + Compute(1), up.total);
    per_gap = -factor * up.entropy;
    of_all = factor * up.entropy * of_entropy;
  }
  // Returns t_c - a.
  __device__ __forceinline__ Compute beside_mean(Compute t) const {
    return (t - max_tangent) - mean;
  }
  // Returns hvp_c for d = z_c - m.
  template <class Program>
  __device__ __forceinline__ Compute hvp(const Program&, Compute d, Compute t) const {
    if constexpr (!Program::kEntropy) return Program::exponential(d) * (beside_mean(t) * constant);
    d = larger_or_nan(d, Compute(-1000));
    return Program::exponential(d) * scalar_fma(beside_mean(t), scalar_fma(per_gap, d, constant), of_all);
  }
};

// Returns hvp of contiguous classes from `first` on; `has_label` is true if one of them may be a label.
template <int kVecSize, class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ Pack<typename Program::Gradient, kVecSize> hvp_of_classes(
    const Program& program, const int64 (&offset)[kRowStreams], int64 first, bool has_label,
    const RowUpstream<Compute>& up, const RowAlong<Compute>& row,
    const TangentPack<typename Program::Storage, kVecSize>& pack) {
  Compute g[kVecSize];
  if constexpr (Program::kCapped) {
    Compute raw[kVecSize], z[kVecSize], slope[kVecSize], t[kVecSize];
    unpack(pack.values, raw);
    unpack(pack.tangents, t);
    logit_gradients(program, offset, first, has_label, up, row.softmax, raw, g, z, slope);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      t[i] *= slope[i];
      const Compute hvp = row.hvp(program, z[i] - row.softmax.max_logit, t[i]);
      // d slope / dx = -2 tanh(u) slope d(u)/dx, with tanh(u) = z / softcap.
      const Compute change_of_slope = -program.logit.ratio * (z[i] / program.logit.softcap) * t[i];
      g[i] = scalar_fma(hvp, slope[i], g[i] * change_of_slope);
    }
  } else {
    const ClassesAlong<Program, kVecSize> classes(program, pack);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      g[i] = row.hvp(program, classes.relative(i, row.softmax.max_logit), classes.t[i]);
    }
  }
  return NarrowPack<typename Program::Gradient, kVecSize>::from(g);
}

// Stores the derivatives of a row's values; `at(label)` is the logit of a label with its tangent.
template <class Program, class At, class Compute = typename Program::Compute>
__device__ __forceinline__ void store_values_along(const Program& program, const int64 (&offset)[kRowStreams],
                                                   bool counts, const RowAlong<Compute>& row, const At& at,
                                                   int64 thread, int64 threads) {
  const Compute slope = program.logit.common_slope();
  Compute* const values = program.values + program.first_value(offset);
  for (int64 k = thread; k < program.count; k += threads) {
    const int64 label = program.label(offset, k);
    Compute value = Compute(0);
    if (counts && program.is_class(label)) {
      value = slope * row.beside_mean(ClassesAlong<Program, 1>(program, at(label)).t[0]);
    }
    values[k] = value;
  }
  if (Program::kEntropy && thread == 0) values[program.count] = counts ? -slope * row.of_entropy : Compute(0);
}

// Stores hvp of one thread's part of a row, the one that partial_moments_along reads.
template <int kEdges, class Program, class Source, class View, class Compute = typename Program::Compute>
__device__ __forceinline__ void store_hvps_along(const Program& program, const int64 (&offset)[kRowStreams],
                                                 const Source& source, const View& view, const RowUpstream<Compute>& up,
                                                 const RowAlong<Compute>& row, int64 thread, int64 threads) {
  constexpr int kVecSize = View::kVecSize;
#pragma unroll 1
  for (int e = 0; e < kEdges; ++e) {
    const int64 edge = view.edge_class(static_cast<int>(thread + e * threads));
    if (edge < 0) continue;
    Pack<typename Program::Gradient, 1> g{};
    if (!up.all_zero) g = hvp_of_classes(program, offset, edge, true, up, row, source.template load<1, true>(edge));
    source.template store<1>(edge, g);
  }
  unsigned number_of_own = 0;
#pragma unroll 1
  for (int64 vector = thread; vector < view.vectors; vector += threads, ++number_of_own) {
    const int64 first = view.first(vector);
    const bool has_label = (up.hits >> (number_of_own & 63) & 1) != 0;
    Pack<typename Program::Gradient, kVecSize> g{};
    if (!up.all_zero) {
      g = hvp_of_classes(program, offset, first, has_label, up, row, source.template load<kVecSize, true>(first));
    }
    source.template store<kVecSize>(first, g);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

// Derivatives of all rows along their tangents. Each thread has a single vector in flight: more of them leave registers
// for fewer threads, which took longer.
template <int kVecSize, int kEdges, bool kValued, class Group, class Program>
__device__ __forceinline__ void log_prob_hvps(const Program& program, const Group& group) {
  using Compute = typename Program::Compute;
  using Storage = typename Program::Storage;
  const int64 step = group.workers() * group.rows_at_once(), first = group.worker() * group.rows_at_once();
  if (first >= program.space.rows) return;
  group.cluster_start();
  SyncState sync{0, 0};
  const int64 thread = group.thread_rank(), threads = group.num_threads();
  const int64 tangent_step = program.space.class_stride[kTangents];
#pragma unroll 1
  for (int64 r = first; r < program.space.rows; r += step) {
    const int64 number = r + group.row_slot();
    const bool exists = number < program.space.rows;
    int64 offset[kRowStreams];
    program.space.offsets(exists ? number : 0, offset);
    const Storage* const input = program.input + offset[kLogits];
    Storage* const to = program.gradients + (Program::kWrites ? offset[kGradients] : 0);
    // Vectors begin where those of the results do.
    const RowVectors<Storage, kVecSize> view(Program::kWrites ? program.gradients : program.input,
                                             offset[Program::kWrites ? kGradients : kLogits], program.space.classes);
    HvpRowInMemory<Storage, true> source{
        {input, program.tangents + offset[kTangents], 1, tangent_step}, {to, 1}, false, false};
    source.find_vectors(view);
    RowUpstream<Compute> up{Compute(0), Compute(0), 0, true};
    if (Program::kWrites && exists) {
      up = row_upstream(program, view, offset, 0, view.vectors, thread, static_cast<int>(threads));
    }
    const bool counts = exists && program.counts(offset), reads = counts && (kValued || !up.all_zero);
    auto part = MomentsAlong<Compute, Program::kEntropy>::empty();
    if (reads) {
      part = partial_moments_along<kEdges, Group::kMultiWarp>(program, source, view, thread, threads);
    }
    subwarp_combine(part, group.subwarp_size());
    group_combine(group, part, sync);
    if (!exists) continue;
    const RowAlong<Compute> row(part, up, program.logit.common_slope());
    if constexpr (kValued) {
      const auto at = [&](int64 label) { return source.template load<1, false>(label); };
      store_values_along(program, offset, counts, row, at, thread, threads);
    }
    if constexpr (Program::kWrites) {
      store_hvps_along<kEdges>(program, offset, source, view, up, row, thread, threads);
    }
  }
}

// Logit of a class with its tangent, for rows in shared memory.
template <class Rows, class Storage = typename Rows::Value>
__device__ __forceinline__ TangentPack<Storage, 1> class_along(const Rows& values, const Rows& tangents, int c) {
  return {values.read(c), tangents.read(c)};
}

// Moments of the row of one lane. The maximum has a pass of its own: with an online maximum, some lane of the warp
// would find a larger one in nearly every class.
template <class Program, class Rows, class Compute = typename Program::Compute>
__device__ __forceinline__ MomentsAlong<Compute, Program::kEntropy> moments_along_of_lane(const Program& program,
                                                                                          const Rows& values,
                                                                                          const Rows& tangents) {
  auto part = MomentsAlong<Compute, Program::kEntropy>::empty();
  const int classes = values.classes();
#pragma unroll 4
  for (int c = 0; c < classes; ++c) {
    const ClassesAlong<Program, 1> found(program, class_along(values, tangents, c));
    if (!(found.maximum > part.moments.max_logit)) continue;
    part.moments.max_logit = found.maximum;
    part.max_tangent = found.t[0];
  }
  bool hold = part.moments.max_logit > -scalar_infinity(Compute());
#pragma unroll 4
  for (int c = 0; c < classes; ++c) {
    add_along<false>(ClassesAlong<Program, 1>(program, class_along(values, tangents, c)), hold, part);
  }
  return part;
}

// One thread per row, as log_probs_of_lanes. Preconditions: those of PackedRows; tangents are contiguous in a row;
// shared memory has two buffers for each warp.
template <bool kValued, class Program>
__device__ __forceinline__ void log_prob_hvps_of_lanes(const Program& program) {
  using Compute = typename Program::Compute;
  using Row = RowOfLane<Program>;
#pragma unroll 1
  for (int64 first = Row::begin(); first < program.space.rows; first += Row::step()) {
    const Row row(program, first, 2);
    const int classes = row.rows.classes();
    auto tangents = row.rows;
    tangents.stage += kWarp * tangents.pitch();
    tangents.gap_from = program.space.at.stride[kTangents][0] - classes;
    tangents.from = program.tangents + first * (classes + tangents.gap_from);
    RowUpstream<Compute> up{Compute(0), Compute(0), 0, true};
    if (Program::kWrites && row.exists) {
      const RowVectors<typename Program::Input, 1> view(program.input, row.offset[kLogits], classes);
      up = row_upstream(program, view, row.offset, 0, classes, 0, 1);
    }
    const bool counts = row.exists && program.counts(row.offset), reads = counts && (kValued || !up.all_zero);
    const unsigned mask = __ballot_sync(0xffffffffu, reads);
    row.rows.start(mask);
    tangents.start(mask);
    cp_async_wait_all();
    __syncwarp();
    auto part = MomentsAlong<Compute, Program::kEntropy>::empty();
    if (reads) part = moments_along_of_lane(program, row.rows, tangents);
    const RowAlong<Compute> along(part, up, program.logit.common_slope());
    if (kValued && row.exists) {
      const auto at = [&](int64 label) { return class_along(row.rows, tangents, static_cast<int>(label)); };
      store_values_along(program, row.offset, counts, along, at, 0, 1);
    }
    if constexpr (Program::kWrites) {
#pragma unroll 4
      for (int c = 0; c < classes; ++c) {
        Pack<typename Program::Gradient, 1> g{};
        const bool has_label = (up.hits >> (c & 63) & 1) != 0;
        if (!up.all_zero) {
          g = hvp_of_classes(program, row.offset, c, has_label, up, along, class_along(row.rows, tangents, c));
        }
        row.rows.overwrite(c, g);
      }
      row.rows.flush();
    } else {
      __syncwarp();  // the next rows are copied to the same memory
    }
  }
}
