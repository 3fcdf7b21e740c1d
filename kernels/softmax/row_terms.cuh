// Losses of rows with a target per class: the loss of a row is a sum over its classes of a term in log p_c and the
// target.
//
//   L = sum over c of h(log p_c, t_c) + penalty(lse),       p = softmax(z), z as in softmax.cuh
//
//   dL/dz_c = h_1(c) - p_c (sum over k of h_1(k) - penalty')         h_1 = dh / d log p
//   dL/dt_c = h_2(c)                                                 h_2 = dh / dt
//
// or, where the target is a teacher whose logits are given, h(log p_c, log q_c) and for its logits the same with h_2
// and q.
//
// Every thread goes over its classes three times: for the largest logit and the sum of exponentials, for the sums of h
// and its derivatives, and for the gradients. Each time is a functor f(first, x, t) of packs of neighbouring classes
// from `first`; where the packs come from is in the files behind this one. Functors have names, because compilers
// before CUDA 13.5 take no lambda in a template of a kernel.
#pragma once
#include "softmax/rows.cuh"

// The softmax of some classes: the largest z, and the sum of exp(z_c - largest) over the others. As for class indices
// the largest is not added, so that a sure row keeps what its probability falls short of 1 by.
template <class Compute>
struct Normal {
  Compute largest;
  Compute rest;
};

// Of the logits, and of those of a teacher if there is one.
template <class Compute, int kCount>
struct Normals {
  Normal<Compute> of[kCount];
};

// exp(d) for d <= 0, or NaN.
template <class Compute>
__device__ __forceinline__ Compute fraction(Compute d) {
  if constexpr (kNarrow && kSingle<Compute>) return exp2_or_zero(d * kLog2E);
  return scalar_exp(d);
}

// What classes add to the rest of a row whose largest z, no smaller than theirs, is none of them.
template <class Compute>
__device__ __forceinline__ Compute absorbed(const Normal<Compute>& part, Compute largest) {
  // exp(-inf - -inf) would be NaN. A rest of NaN stays.
  if (part.largest == -scalar_infinity(largest)) return part.rest * Compute(0);
  return (part.rest + Compute(1)) * fraction(part.largest - largest);
}

template <class Compute>
__device__ __forceinline__ void merge(Normal<Compute>& part, const Normal<Compute>& other) {
  const Compute largest = larger(part.largest, other.largest);
  part.rest = same(part.largest, largest) ? part.rest + absorbed(other, largest) : absorbed(part, largest) + other.rest;
  part.largest = largest;
}

// The parts of `lanes` neighbouring lanes as one, in each of them. Of equal largest logits that of the first lane
// leads. Preconditions: all 32 lanes call it together; `lanes` is a power of two, and the same in all of them.
template <class Compute>
__device__ __forceinline__ void join_normal(Normal<Compute>& part, int lanes) {
  if (lanes == 1) return;
  const Compute largest = join_lanes(part.largest, lanes, Larger{});
  const int lane = threadIdx.x % kWarp, first = lane & -lanes;
  const unsigned equal = __ballot_sync(0xffffffffu, same(part.largest, largest)) >> first;
  const bool leads = __ffs(static_cast<int>(equal)) - 1 == lane - first;
  part.rest = join_lanes(leads ? part.rest : absorbed(part, largest), lanes, Plus{});
  part.largest = largest;
}

// Adds the logits of a pack.
template <int kLanes, class Logits, class Storage, class Compute>
__device__ __forceinline__ void add_logits(const Logits& logit, const Pack<Storage, kLanes>& x, Normal<Compute>& part) {
  Compute z[kLanes], e[kLanes];
  unpack(x, z);
  Compute largest = -scalar_infinity(Compute());
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    z[i] = logit.value(z[i]);
    largest = larger(largest, z[i]);
  }
  // Seldom, after the first few.
  int leader = -1;
  if (largest > part.largest) {
    part.rest = absorbed(part, largest);
    part.largest = largest;
#pragma unroll
    for (int i = kLanes - 1; i >= 0; --i) leader = same(z[i], largest) ? i : leader;
  }
  const Compute relative_to = reference(part.largest);
#pragma unroll
  for (int i = 0; i < kLanes; ++i) e[i] = fraction(z[i] - relative_to);
  if (leader >= 0) {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      if (i == leader) e[i] = Compute(0);
    }
  }
  part.rest += sum_of_lanes(e);
}

// A softmax as its classes need it.
template <class Compute>
struct Softmax {
  Compute largest;
  Compute log_sum;
  Compute by_sum;
  Compute rest;  // what the probability of the largest logit falls short of 1 by

  __device__ __forceinline__ void set(const Normal<Compute>& n) {
    largest = n.largest;
    log_sum = scalar_log1p(n.rest);
    by_sum = Compute(1) / (Compute(1) + n.rest);
    rest = n.rest * by_sum;
  }
  __device__ __forceinline__ Compute log_p(Compute z) const {
    return (z - largest) - log_sum;
  }
  __device__ __forceinline__ Compute p(Compute z) const {
    return fraction(z - largest) * by_sum;
  }
  // 1 - p. Of two classes that share the largest logit each has half at most, so that nothing cancels for either.
  __device__ __forceinline__ Compute complement(Compute z, Compute p) const {
    return same(z, largest) ? rest : Compute(1) - p;
  }
};

// Sums over the classes of a row of h, h_1 and h_2.
template <class Compute>
struct TermSums {
  Compute value;
  Compute by_p;
  Compute by_q;
};

// What is known of a row when its gradients are written. `slope` is the penalty's.
template <class Compute, int kCount>
struct TermRow {
  Softmax<Compute> of[kCount];
  TermSums<Compute> sums;
  Compute value;
  Compute slope;
  Compute factor;
};

template <class Term_, class Penalty_, class Space_, class Input_, class Target_, class Weight_, class Mask_,
          class Result_, bool kTeacher_, bool kCapped_, bool kInputGradient_, bool kTargetGradient_>
struct TermProgram {
  using Term = Term_;
  using Compute = typename Term::Compute;
  using Input = Input_;
  using Target = Target_;
  using Gradient = Input_;
  using TargetGradient = Target_;
  using Result = Result_;
  template <int kLanes>
  using View = RowView<Input_, kLanes>;
  static constexpr bool kTeacher = kTeacher_;
  static constexpr int kSoftmaxes = kTeacher ? 2 : 1;
  static constexpr bool kWeighted = !kIsAbsent<Weight_>;
  static constexpr bool kInputGradient = kInputGradient_;
  static constexpr bool kTargetGradient = kTargetGradient_;
  using Row = TermRow<Compute, kSoftmaxes>;

  Term term;
  Penalty_ penalty;
  const Space_& space;
  const Input* input;
  const Target* targets;
  Input* gradients;
  Target* target_gradients;
  const Weight_* weights;
  const Mask_* mask;
  Logit<Compute, kCapped_> logit;
  // Per row, where they are wanted.
  Result* values;
  Compute* lse;

  // As RowProgram's, for count_rows.
  struct Note {
    bool counts;
  };
  __device__ __forceinline__ Note note(const int64 (&offset)[kRowStreams]) const {
    return {counts(offset)};
  }
  __device__ __forceinline__ Compute counted(const Note& found) const {
    return found.counts ? Compute(1) : Compute(0);
  }

  __device__ __forceinline__ bool counts(const int64 (&offset)[kRowStreams]) const {
    if constexpr (!kIsAbsent<Mask_>) return mask[offset[kRowMask]] != Mask_(0);
    return true;
  }

  // Both operands of a row from its first class on, and the way from one to the next.
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

  // h and its derivatives for class c, of which z is the logit, and t the target or the teacher's logit.
  __device__ __forceinline__ auto evaluate(const Row& row, Compute z, Compute t, int64 c) const {
    Compute second = t;
    if constexpr (kTeacher) second = row.of[1].log_p(t);
    Compute weight = Compute(1);
    if constexpr (kWeighted) weight = widen<Compute>(load_reused<1>(weights + c).lane[0]);
    return term(variable<3u, 0>(row.of[0].log_p(z)), variable<3u, 1>(second), variable<0u, 2>(weight),
                constant<Compute>(static_cast<double>(space.classes)));
  }
  // The second operand of a class as evaluate() takes it.
  __device__ __forceinline__ Compute second(Compute t) const {
    if constexpr (kTeacher) return logit.value(t);
    return t;
  }

  // The loss of a row of which the sums are known, and whatever of it is to be stored.
  // Precondition: `first` holds in one thread of the unit.
  __device__ __forceinline__ void finish(Row& row, const int64 (&offset)[kRowStreams], bool counts, bool first) const {
    const Compute lse_of_row = counts ? row.of[0].largest + row.of[0].log_sum : Compute(0);
    const auto found = penalty(variable<1u, 0>(lse_of_row));
    row.value = counts ? row.sums.value + found.value : Compute(0);
    row.slope = tangent_or_zero(found, 0);
    if (row.value != row.value) row.value = undefined(row.value);
    if (!first) return;
    if (values != nullptr) values[offset[kResults]] = Narrow<Result>::from(row.value);
    if (lse != nullptr) lse[offset[kResults]] = lse_of_row;
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// The three times

template <class Program, class Compute = typename Program::Compute>
struct AddLogits {
  static constexpr bool kReadsTargets = Program::kTeacher;
  const Program& program;
  Normals<Compute, Program::kSoftmaxes> found;

  __device__ __forceinline__ explicit AddLogits(const Program& program) : program(program) {
#pragma unroll
    for (int i = 0; i < Program::kSoftmaxes; ++i) found.of[i] = {-scalar_infinity(Compute()), Compute(0)};
  }
  template <class X, class T>
  __device__ __forceinline__ void operator()(int64, const X& x, const T& t) {
    add_logits(program.logit, x, found.of[0]);
    if constexpr (Program::kTeacher) add_logits(program.logit, t, found.of[1]);
  }
};

template <bool kGradient, class Program, class Compute = typename Program::Compute>
struct AddTerms {
  static constexpr bool kReadsTargets = true;
  const Program& program;
  typename Program::Row& row;

  template <int kLanes>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kLanes>& x,
                                             const Pack<typename Program::Target, kLanes>& t) {
    Compute z[kLanes], second[kLanes];
    unpack(x, z);
    unpack(t, second);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const auto y = program.evaluate(row, program.logit.value(z[i]), program.second(second[i]), first + i);
      row.sums.value += y.value;
      if constexpr (kGradient && Program::kInputGradient) row.sums.by_p += tangent_or_zero(y, 0);
      if constexpr (kGradient && Program::kTargetGradient && Program::kTeacher) row.sums.by_q += tangent_or_zero(y, 1);
    }
  }
  // What `how` makes of all sums that are added.
  template <class How>
  __device__ __forceinline__ static void over(TermSums<Compute>& sums, const How& how) {
    how(sums.value);
    if constexpr (kGradient && Program::kInputGradient) how(sums.by_p);
    if constexpr (kGradient && Program::kTargetGradient && Program::kTeacher) how(sums.by_q);
  }
};

template <class Program, class Compute = typename Program::Compute>
struct StoreTerms {
  static constexpr bool kReadsTargets = true;
  const Program& program;
  const typename Program::Row& row;
  const int64 (&offset)[kRowStreams];
  int64 stride, target_stride;  // from class to class
  bool counts;

  template <int kLanes>
  __device__ __forceinline__ void operator()(int64 first, const Pack<typename Program::Input, kLanes>& x,
                                             const Pack<typename Program::Target, kLanes>& t) const {
    Compute by_z[kLanes], by_t[kLanes];
    // Of a row that is NaN nothing follows.
    if (!counts || row.value != row.value) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) by_z[i] = by_t[i] = row.value;
    } else {
      Compute raw[kLanes], target[kLanes];
      unpack(x, raw);
      unpack(t, target);
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        const Compute z = program.logit.value(raw[i]), second = program.second(target[i]);
        const auto y = program.evaluate(row, z, second, first + i);
        const Compute of_p = tangent_or_zero(y, 0), of_t = tangent_or_zero(y, 1);
        if constexpr (Program::kInputGradient) {
          by_z[i] = through(row.of[0], z, of_p, row.sums.by_p, row.slope) * program.logit.slope(raw[i]);
        }
        by_t[i] = of_t * row.factor;
        if constexpr (Program::kTeacher && Program::kTargetGradient) {
          by_t[i] = through(row.of[1], second, of_t, row.sums.by_q, Compute(0)) * program.logit.slope(target[i]);
        }
      }
    }
    if constexpr (Program::kInputGradient) {
      store_stream<kLanes>(program.gradients + offset[kGradients] + first * stride,
                           NarrowPack<typename Program::Gradient, kLanes>::from(by_z));
    }
    if constexpr (Program::kTargetGradient) {
      store_stream<kLanes>(program.target_gradients + offset[kTargetGradients] + first * target_stride,
                           NarrowPack<typename Program::TargetGradient, kLanes>::from(by_t));
    }
  }

 private:
  // h_1 - p (sum of h_1 - slope), in which the class's own h_1 does not cancel.
  __device__ __forceinline__ Compute through(const Softmax<Compute>& s, Compute z, Compute by_log, Compute sum,
                                             Compute slope) const {
    const Compute p = s.p(z);
    return (by_log * s.complement(z, p) - p * ((sum - by_log) - slope)) * (row.factor * program.logit.common_slope());
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// One row

struct JoinLanes {
  int lanes;
  template <class Compute>
  __device__ __forceinline__ void operator()(Compute& x) const {
    if (lanes > 1) x = join_lanes(x, lanes, Plus{});
  }
};

// What all threads of a unit found of a row, in each of them.
template <class Unit, class Compute, int kCount>
__device__ __forceinline__ void join_normals(const Unit& unit, Normals<Compute, kCount>& found, Turn& turn) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) join_normal(found.of[i], unit.lanes());
  if constexpr (Unit::kBlock) {
    const Normals<Compute, kCount>* all;
    unit.share(found, turn, all);
    const int lane = threadIdx.x % kWarp, warps = unit.warps();
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      Normal<Compute>& part = found.of[k];
      part = {-scalar_infinity(Compute()), Compute(0)};
      if (lane < warps) part = all[lane].of[k];
#pragma unroll
      for (int i = kWarp; i < Unit::kBlocks * kWarp; i += kWarp) {
        if (lane + i < warps) merge(part, all[lane + i].of[k]);
      }
      join_normal(part, kWarp);
    }
  }
}

template <class Terms, class Unit, class Compute>
__device__ __forceinline__ void join_terms(const Unit& unit, TermSums<Compute>& sums, Turn& turn) {
  Terms::over(sums, JoinLanes{unit.lanes()});
  if constexpr (Unit::kBlock) {
    const TermSums<Compute>* all;
    unit.share(sums, turn, all);
    const int lane = threadIdx.x % kWarp, warps = unit.warps();
    sums = {Compute(0), Compute(0), Compute(0)};
#pragma unroll
    for (int i = 0; i < Unit::kBlocks * kWarp; i += kWarp) {
      if (lane + i >= warps) continue;
      sums.value += all[lane + i].value;
      sums.by_p += all[lane + i].by_p;
      sums.by_q += all[lane + i].by_q;
    }
    Terms::over(sums, JoinLanes{kWarp});
  }
}

// The loss of a row whose classes `classes` yields to the threads of a unit, and its gradients if there are any.
//
//   classes.each(f)        every class of this thread, none of a row that does not count
//   classes.last(f)        the same for the last time
//   classes.last_all(f)    the same, also of a row that does not count, whose packs hold anything
//
// Precondition: all threads of the unit call it together, for a LaneUnit every lane of the warp.
template <bool kGradient, class Unit, class Program, class Classes, class Scale>
__device__ __forceinline__ typename Program::Compute visit_terms(const Program& program, const Unit& unit,
                                                                 const int64 (&offset)[kRowStreams], Classes& classes,
                                                                 bool exists, Turn& turn, Scale& scale) {
  using Compute = typename Program::Compute;
  using Terms = AddTerms<kGradient, Program>;
  AddLogits<Program> logits(program);
  classes.each(logits);
  classes.look_ahead();
  join_normals(unit, logits.found, turn);
  typename Program::Row row;
#pragma unroll
  for (int i = 0; i < Program::kSoftmaxes; ++i) row.of[i].set(logits.found.of[i]);
  row.sums = {Compute(0), Compute(0), Compute(0)};
  Terms terms{program, row};
  if constexpr (kGradient) {
    classes.each(terms);
  } else {
    classes.last(terms);
  }
  join_terms<Terms>(unit, row.sums, turn);
  program.finish(row, offset, classes.counts, exists && unit.index() == 0);
  if constexpr (kGradient) {
    row.factor = row_factor(scale, offset);
    const auto& stride = program.space.class_stride;
    const StoreTerms<Program> store{program,
                                    row,
                                    offset,
                                    Classes::kDense ? 1 : stride[kGradients],
                                    Classes::kDense ? 1 : stride[kTargetGradients],
                                    classes.counts};
    classes.last_all(store);
  }
  return row.value;
}

// Rows whose classes are read as Source::Classes says, for each row from the beginning.
template <class Source>
struct TermReader {
  template <bool kGradient, class Unit, class Program, class Scale>
  struct Visit {
    static constexpr bool kLooksAhead = false;
    const Program& program;
    const Unit& unit;
    Scale& scale;
    __device__ __forceinline__ auto operator()(int64 row, bool exists, int64, Turn& turn) const {
      int64 offset[kRowStreams];
      program.space.offsets(exists ? row : 0, offset);
      const typename Source::template Classes<Program, Unit> classes(program, unit, offset, exists);
      return visit_terms<kGradient>(program, unit, offset, classes, exists, turn, scale);
    }
  };

  // As LongReader's.
  template <bool kGradient, class Unit, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Unit& unit, Scale& scale, int64 groups,
                                               const Workspace& work) {
    walk_rows(unit, scale, program.space.rows, groups, work,
              Visit<kGradient, Unit, Program, Scale>{program, unit, scale});
  }
};
