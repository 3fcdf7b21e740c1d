// The row engine for a target per class: the loss of a row is a sum over its classes of a term in log p_c and the
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
// Every thread goes over its classes several times: for the largest logit, the sum of exponentials, the sums of h and
// its derivatives, and the gradients. A short row lies in registers meanwhile; a long one, or one whose classes lie
// apart, is read again each time.
//
// As for class indices the exponentials are added without the largest, whose probability falls short of 1 by `rest`.

// How a row is normalized: log p = (z - largest) - log1p(rest), where the largest logit is the one at `index`.
template <class Compute>
struct Normal {
  Compute largest;
  Compute rest;
  int64 index;

  __device__ __forceinline__ Compute log_sum() const {
    return scalar_log1p(rest);
  }
};

// The two distributions of a row; without a teacher the second one says nothing.
template <class Compute>
struct TermState {
  Normal<Compute> student;
  Normal<Compute> teacher;
};

// A probability, its logarithm, and what it falls short of 1 by.
template <class Compute>
struct Share {
  Compute log_p;
  Compute p;
  Compute rest;
};

template <class Compute>
__device__ __forceinline__ Share<Compute> share(const Normal<Compute>& n, Compute log_sum, Compute z, int64 c) {
  const Compute sum = Compute(1) + n.rest;
  Share<Compute> s;
  s.log_p = (z - n.largest) - log_sum;
  s.p = scalar_exp(z - n.largest) / sum;
  s.rest = c == n.index ? n.rest / sum : Compute(1) - s.p;
  return s;
}

template <class Term_, class Penalty_, class Space_, class Input_, class Target_, class Weight_, class Mask_,
          class Result_, bool kTeacher_, bool kCapped_, bool kInputGradient_, bool kTargetGradient_>
struct TermProgram {
  using Term = Term_;
  using Compute = typename Term::Compute;
  using Input = Input_;
  using Target = Target_;
  using Result = Result_;
  static constexpr bool kTeacher = kTeacher_;
  static constexpr bool kWeighted = !kIsAbsent<Weight_>;
  static constexpr bool kInputGradient = kInputGradient_;
  static constexpr bool kTargetGradient = kTargetGradient_;

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

  __device__ __forceinline__ Compute student(Input x) const {
    return logit.value(widen<Compute>(x));
  }
  __device__ __forceinline__ Compute teacher(Target t) const {
    return logit.value(widen<Compute>(t));
  }
  // What count_rows asks of a row.
  struct Counted {
    bool counts;
    Compute weight;
  };
  __device__ __forceinline__ Counted target(int64 row) const {
    int64 offset[kRowStreams];
    space.offsets(row, offset);
    return {counts(offset), Compute(1)};
  }

  __device__ __forceinline__ bool counts(const int64 (&offset)[kRowStreams]) const {
    if constexpr (!kIsAbsent<Mask_>) return mask[offset[kRowMask]] != Mask_(0);
    return true;
  }

  // h and its derivatives for a class.
  __device__ __forceinline__ auto evaluate(const TermState<Compute>& s, Compute log_sum, Compute teacher_log_sum,
                                           Input x, Target t, int64 c) const {
    const Share<Compute> p = share(s.student, log_sum, student(x), c);
    Compute second = widen<Compute>(t);
    if constexpr (kTeacher) second = share(s.teacher, teacher_log_sum, teacher(t), c).log_p;
    Compute weight = Compute(1);
    if constexpr (kWeighted) weight = widen<Compute>(load_reused<1>(weights + c).lane[0]);
    return term(variable<3u, 0>(p.log_p), variable<3u, 1>(second), variable<0u, 2>(weight),
                constant<Compute>(static_cast<double>(space.classes)));
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Where the classes of a row come from: each(f) calls f(c, x, t) for every class of this thread, none of a row that
// does not count; store(g) stores the gradients that g(c, x, t, of_input, of_target) finds, also of such a row, which
// is not read.

template <int kLanes, class Program, class Input, class Target, class G>
__device__ __forceinline__ void store_pack(const Program& program, const int64 (&offset)[kRowStreams], int64 first,
                                           const Pack<Input, kLanes>& x, const Pack<Target, kLanes>& t, const G& g) {
  using Compute = typename Program::Compute;
  Compute of_input[kLanes], of_target[kLanes];
#pragma unroll
  for (int i = 0; i < kLanes; ++i) g(first + i, x.lane[i], t.lane[i], of_input[i], of_target[i]);
  if constexpr (Program::kInputGradient) {
    store_stream<kLanes>(program.gradients + offset[kGradients] + first, NarrowPack<Input, kLanes>::from(of_input));
  }
  if constexpr (Program::kTargetGradient) {
    store_stream<kLanes>(program.target_gradients + offset[kTargetGradients] + first,
                         NarrowPack<Target, kLanes>::from(of_target));
  }
}

// In registers.
template <class Input, class Target, int kLanes, int kVectors>
struct KeptClasses {
  Pack<Input, kLanes> x[kVectors];
  Pack<Target, kLanes> t[kVectors];
  Pack<Input, 1> end_x;
  Pack<Target, 1> end_t;
  const RowView<Input, kLanes>& view;
  int index, count, vectors, single;
  bool counts;

  template <class Unit, class Program>
  __device__ __forceinline__ KeptClasses(const Program& program, const Unit& unit, const RowView<Input, kLanes>& view,
                                         const int64 (&offset)[kRowStreams], bool exists, bool counts)
      : view(view), index(unit.index()), count(unit.count()), counts(counts) {
    vectors = exists ? static_cast<int>(view.vectors) : 0;
    single = exists ? static_cast<int>(view.end(index)) : -1;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (counts && index + k * count < vectors) {
        const int64 first = view.first(index + k * count);
        x[k] = load_stream<kLanes>(program.input + offset[kLogits] + first);
        t[k] = load_stream<kLanes>(program.targets + offset[kLabels] + first);
      }
    }
    if (counts && single >= 0) {
      end_x = load_stream<1>(program.input + offset[kLogits] + single);
      end_t = load_stream<1>(program.targets + offset[kLabels] + single);
    }
  }

  template <class F>
  __device__ __forceinline__ void each(F& f) const {
    if (!counts) return;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (index + k * count < vectors) {
        const int64 first = view.first(index + k * count);
#pragma unroll
        for (int i = 0; i < kLanes; ++i) f(first + i, x[k].lane[i], t[k].lane[i]);
      }
    }
    if (single >= 0) f(single, end_x.lane[0], end_t.lane[0]);
  }

  template <class Program, class G>
  __device__ __forceinline__ void store(const Program& program, const int64 (&offset)[kRowStreams], const G& g) const {
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (index + k * count < vectors) {
        store_pack<kLanes>(program, offset, view.first(index + k * count), x[k], t[k], g);
      }
    }
    if (single >= 0) store_pack<1>(program, offset, single, end_x, end_t, g);
  }
};

// In memory, wherever they lie: every `step`-th class from `begin`, read again each time.
template <class Input, class Target>
struct ReadClasses {
  const Input* x;
  const Target* t;
  int64 x_stride, t_stride, begin, end, step;
  bool counts;

  template <class F>
  __device__ __forceinline__ void each(F& f) const {
    if (!counts) return;
#pragma unroll 4
    for (int64 c = begin; c < end; c += step) f(c, x[c * x_stride], t[c * t_stride]);
  }

  template <class Program, class G>
  __device__ __forceinline__ void store(const Program& program, const int64 (&offset)[kRowStreams], const G& g) const {
    using Compute = typename Program::Compute;
    const auto& stride = program.space.class_stride;
#pragma unroll 2
    for (int64 c = begin; c < end; c += step) {
      Compute of_input, of_target;
      g(c, counts ? x[c * x_stride] : Input{}, counts ? t[c * t_stride] : Target{}, of_input, of_target);
      if constexpr (Program::kInputGradient) {
        program.gradients[offset[kGradients] + c * stride[kGradients]] = Narrow<Input>::from(of_input);
      }
      if constexpr (Program::kTargetGradient) {
        program.target_gradients[offset[kTargetGradients] + c * stride[kTargetGradients]] =
            Narrow<Target>::from(of_target);
      }
    }
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// One row

struct Smaller {
  template <class T>
  __device__ __forceinline__ T operator()(T x, T y) const {
    return y < x ? y : x;
  }
};

// What `each` is given has a name, because compilers before CUDA 13.5 take no lambda in a template of a kernel.

// The logit of a class that is meant: the student's, or the teacher's.
template <class Program>
struct StudentLogit {
  const Program& program;
  __device__ __forceinline__ auto operator()(typename Program::Input x, typename Program::Target) const {
    return program.student(x);
  }
};
template <class Program>
struct TeacherLogit {
  const Program& program;
  __device__ __forceinline__ auto operator()(typename Program::Input, typename Program::Target t) const {
    return program.teacher(t);
  }
};

template <class Z, class Compute>
struct FindLargest {
  const Z& z;
  Compute largest;
  template <class X, class T>
  __device__ __forceinline__ void operator()(int64, X x, T t) {
    largest = larger(largest, z(x, t));
  }
};

// The first class with that logit.
template <class Z, class Compute>
struct FindIndex {
  const Z& z;
  Compute largest;
  int64 index;
  template <class X, class T>
  __device__ __forceinline__ void operator()(int64 c, X x, T t) {
    if (z(x, t) == largest && c < index) index = c;
  }
};

template <class Z, class Compute>
struct AddOthers {
  const Z& z;
  Compute largest;
  int64 index;
  Compute rest;
  template <class X, class T>
  __device__ __forceinline__ void operator()(int64 c, X x, T t) {
    if (c != index) rest += scalar_exp(z(x, t) - largest);
  }
};

// How the logits are normalized that `z` picks of each class.
// Preconditions: those of Unit::join.
template <class Unit, class Classes, class Compute, class Z>
__device__ __forceinline__ Normal<Compute> normalize(const Unit& unit, const Classes& classes, Compute lowest,
                                                     const Z& z) {
  constexpr int64 kNone = 0x7fffffffffffffffLL;
  FindLargest<Z, Compute> find{z, lowest};
  classes.each(find);
  Compute largest[1] = {find.largest};
  unit.join(largest, lowest, Larger{});
  FindIndex<Z, Compute> find_index{z, largest[0], kNone};
  classes.each(find_index);
  int64 index[1] = {find_index.index};
  unit.join(index, kNone, Smaller{});
  AddOthers<Z, Compute> add{z, largest[0], index[0], Compute(0)};
  classes.each(add);
  Compute rest[1] = {add.rest};
  unit.join(rest, Compute(0), Plus{});
  return {largest[0], rest[0], index[0]};
}

// The sums of h and of its derivatives.
template <class Program, class Compute = typename Program::Compute>
struct AddTerms {
  const Program& program;
  const TermState<Compute>& state;
  Compute log_sum, teacher_log_sum;
  Compute sums[3];
  template <class X, class T>
  __device__ __forceinline__ void operator()(int64 c, X x, T t) {
    const auto y = program.evaluate(state, log_sum, teacher_log_sum, x, t, c);
    sums[0] += y.value;
    sums[1] += tangent_or_zero(y, 0);
    sums[2] += tangent_or_zero(y, 1);
  }
};

// The gradients of a class; `slope` is the penalty's.
template <class Program, class Compute = typename Program::Compute>
struct TermGradient {
  const AddTerms<Program>& terms;
  Compute value, slope, factor;
  bool counts;
  template <class X, class T>
  __device__ __forceinline__ void operator()(int64 c, X x, T t, Compute& of_input, Compute& of_target) const {
    const bool lost = value != value;
    of_input = of_target = lost ? value : Compute(0);
    if (!counts || lost) return;
    const Program& program = terms.program;
    const TermState<Compute>& s = terms.state;
    const auto y = program.evaluate(s, terms.log_sum, terms.teacher_log_sum, x, t, c);
    const Share<Compute> p = share(s.student, terms.log_sum, program.student(x), c);
    // h_1 - p (sum of h_1), in which the class's own h_1 does not cancel.
    const Compute by_p = tangent_or_zero(y, 0), by_t = tangent_or_zero(y, 1);
    of_input = by_p * p.rest - p.p * ((terms.sums[1] - by_p) - slope);
    of_input *= factor * program.logit.common_slope() * program.logit.slope(widen<Compute>(x));
    of_target = by_t * factor;
    if constexpr (Program::kTeacher) {
      const Share<Compute> q = share(s.teacher, terms.teacher_log_sum, program.teacher(t), c);
      of_target = (by_t * q.rest - q.p * (terms.sums[2] - by_t)) * factor * program.logit.common_slope() *
                  program.logit.slope(widen<Compute>(t));
    }
  }
};

// The factor of a row's gradient: for a grad_output per row, or one for all.
template <class Compute, class Result>
struct RowScale {
  const Result* grad_output;
  double weight;
};
template <class Compute, class Result>
__device__ __forceinline__ Compute row_factor(RowScale<Compute, Result>& scale, const int64 (&offset)[kRowStreams]) {
  return static_cast<Compute>(widen<double>(scale.grad_output[offset[kResults]]) * scale.weight);
}
template <class Scale>
__device__ __forceinline__ auto row_factor(Scale& scale, const int64 (&)[kRowStreams]) {
  return scale.factor();
}

// The loss of a row whose classes `classes` yields to the threads of a unit, and its gradients if there are any.
// Preconditions: those of Unit::join.
template <bool kGradient, class Unit, class Program, class Classes, class Scale>
__device__ __forceinline__ typename Program::Compute visit_terms(const Program& program, const Unit& unit,
                                                                 const int64 (&offset)[kRowStreams],
                                                                 const Classes& classes, bool exists, Scale& scale) {
  using Compute = typename Program::Compute;
  const Compute lowest = -scalar_infinity(Compute());
  const bool counts = classes.counts;
  TermState<Compute> s;
  s.student = normalize(unit, classes, lowest, StudentLogit<Program>{program});
  s.teacher = s.student;
  if constexpr (Program::kTeacher) s.teacher = normalize(unit, classes, lowest, TeacherLogit<Program>{program});
  AddTerms<Program> terms{program, s, s.student.log_sum(), s.teacher.log_sum(), {Compute(0), Compute(0), Compute(0)}};
  classes.each(terms);
  unit.join(terms.sums, Compute(0), Plus{});

  const Compute lse = counts ? s.student.largest + terms.log_sum : Compute(0);
  const auto penalty = program.penalty(variable<1u, 0>(lse));
  const Compute value = counts ? terms.sums[0] + penalty.value : Compute(0);
  if (exists && unit.index() == 0) {
    if (program.values != nullptr) program.values[offset[kResults]] = Narrow<typename Program::Result>::from(value);
    if (program.lse != nullptr) program.lse[offset[kResults]] = lse;
  }
  if constexpr (kGradient) {
    const Compute factor = row_factor(scale, offset), slope = tangent_or_zero(penalty, 0);
    classes.store(program, offset, TermGradient<Program>{terms, value, slope, factor, counts});
  }
  return value;
}

// ---------------------------------------------------------------------------------------------------------------------
// Many rows

// Rows whose classes are neighbours: in registers, or, if kLong, in memory.
template <int kLanes, int kVectors, bool kLong>
struct TermReader {
  template <bool kGradient, class Unit, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Unit& unit, Scale& scale, int64 groups,
                                               double* partials) {
    using Input = typename Program::Input;
    using Target = typename Program::Target;
    const int64 rows = program.space.rows;
#pragma unroll 1
    for (int64 group = unit.team(); group < groups; group += unit.teams()) {
      double total = 0.0;
#pragma unroll 1
      for (int64 first = group * unit.rows(); first < rows; first += groups * unit.rows()) {
        const int64 row = first + unit.row();
        const bool exists = row < rows;
        int64 offset[kRowStreams];
        program.space.offsets(exists ? row : 0, offset);
        const bool counts = exists && program.counts(offset);
        if constexpr (kLong) {
          const auto& stride = program.space.class_stride;
          const ReadClasses<Input, Target> classes{program.input + offset[kLogits],
                                                   program.targets + offset[kLabels],
                                                   stride[kLogits],
                                                   stride[kLabels],
                                                   unit.index(),
                                                   exists ? program.space.classes : 0,
                                                   unit.count(),
                                                   counts};
          total += visit_terms<kGradient>(program, unit, offset, classes, exists, scale);
        } else {
          const RowView<Input, kLanes> view(program.input, offset[kLogits], program.space.classes);
          const KeptClasses<Input, Target, kLanes, kVectors> classes(program, unit, view, offset, exists, counts);
          total += visit_terms<kGradient>(program, unit, offset, classes, exists, scale);
        }
      }
      if (partials != nullptr) {
        total = unit.total(total);
        if (unit.leads()) partials[group] = total;
      }
    }
  }
};

// The gradients for a grad_output per row.
template <class Reader, class Unit, class Program, class Result>
__device__ __forceinline__ void row_gradient(const Program& program, const Unit& unit, int64 groups,
                                             const Result* grad_output) {
  RowScale<typename Program::Compute, Result> scale{grad_output, 1.0};
  Reader::template sweep<true>(program, unit, scale, groups, nullptr);
}
