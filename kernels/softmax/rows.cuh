// The row engine: losses of rows of logits whose classes are neighbours in memory, with class indices for targets.
//
//   value      sum over rows of loss(row) / divisor, or a value per row
//   gradient   g[r, c] = grad_output * scale * d loss(r) / d x[r, c]
//
// Each logit is read once and each gradient written once: a unit of threads (row_units.cuh) keeps the row on chip
// (resident_rows.cuh) while it finds the largest logit, the sum of exponentials, and the gradient (softmax.cuh). Rows
// that are too long for that are read a second time. Nothing is known of a loss but the functor that the glue supplies.
//
// Labels are data, and may be wrong: a label out of range makes the row's value NaN and its gradient 0, and is reported
// in `status`; it is never used as an index. A row that is ignored or masked contributes 0 to the value, has a gradient
// of 0, and is not read.
//
// Order of additions: within a row by the unit's fixed tree, rows in the order of groups. Both follow from the sizes.
#pragma once
#include "pointwise/pointwise.cuh"
#include "softmax/row_units.cuh"
#include "softmax/row_view.cuh"
#include "softmax/softmax.cuh"

// Streams of a row.
enum RowStream { kLogits, kGradients, kLabels, kRowMask, kResults, kTargetGradients, kRowStreams };

// What a kernel reports of the first label out of range that it meets: in memory that the host can read at any time.
struct RowStatus {
  unsigned code;  // 0 nothing, 1 about to be written, 2 complete
  unsigned unused;
  int64 row;
  int64 label;
  int64 classes;
  int64 site;  // the call that it was met in, as the host numbers them
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

// What numbers are read through.
template <class Storage>
struct PointerTo {
  using type = const Storage*;
};

template <class X, class Y>
constexpr bool kSameType = false;
template <class X>
constexpr bool kSameType<X, X> = true;

template <class T>
constexpr bool kIsAbsent = false;
template <>
constexpr bool kIsAbsent<Absent> = true;

// Everything about the rows but how they are cut: a kernel parameter.
template <int kRank>
struct RowSpace {
  int64 rows;
  int64 classes;
  int64 class_stride[kRowStreams];  // of those that have classes
  Dimensions<kRowStreams, kRank> at;

  // Where a row begins in each stream. A division of 64 bits takes longer than a short row: 32 where they are enough.
  __device__ __forceinline__ void offsets(int64 row, int64 (&offset)[kRowStreams]) const {
    if constexpr (kRank == 1) {
      at.offsets(row, offset);
    } else {
      if (rows > 0xffffffffLL) {
        at.offsets(row, offset);
      } else {
        narrow_offsets(static_cast<unsigned>(row), offset);
      }
    }
  }

 private:
  __device__ __forceinline__ void narrow_offsets(unsigned index, int64 (&offset)[kRowStreams]) const {
#pragma unroll
    for (int s = 0; s < kRowStreams; ++s) offset[s] = 0;
#pragma unroll 1
    for (int d = 0; d < at.rank; ++d) {
      const unsigned size = static_cast<unsigned>(at.size[d]), rest = d + 1 < at.rank ? index / size : 0;
      const int64 coordinate = index - rest * size;
#pragma unroll
      for (int s = 0; s < kRowStreams; ++s) offset[s] += coordinate * at.stride[s][d];
      index = rest;
    }
  }
};

// What is known of a row before its logits are read.
template <class Compute>
struct RowTarget {
  int64 offset[kRowStreams];
  int64 label;
  Compute weight;
  bool counts;  // whether the logits matter
  bool wrong;   // whether the label is out of range
};

template <class Loss_, class Space_, class Input_, class Label_, class Weight_, class Mask_, class Result_,
          bool kSmoothed_, bool kCapped_>
struct RowProgram {
  using Loss = Loss_;
  using Compute = typename Loss::Compute;
  using Input = Input_;
  using Gradient = Input_;
  using Weight = Weight_;
  using Result = Result_;
  static constexpr bool kSmoothed = kSmoothed_;
  static constexpr bool kCapped = kCapped_;
  // Whether a class's exponential and slope are best found together, once: their product is all that gradients need.
  static constexpr bool kOnce = kCapped && !kSmoothed;
  static constexpr bool kWeighted = !kIsAbsent<Weight_>;
  static constexpr bool kMasked = !kIsAbsent<Mask_>;

  Loss loss;
  const Space_& space;  // a kernel parameter: a copy would go to local memory
  const Input* input;
  Input* gradients;
  const Label_* labels;
  const Weight_* weights;
  const Mask_* mask;
  Logit<Compute, kCapped> logit;
  int64 ignored;  // the label that marks a row as ignored
  RowStatus* status;
  int64 site;
  // Per row, where they are wanted: the value, log-sum-exp, whether no logit is larger than the target's, the slopes.
  Result* values;
  Compute* lse;
  unsigned char* correct;
  RowSlopes<Compute>* slopes;
  int64 per_row;  // 0 where none of these is wanted: one question instead of four

  __device__ __forceinline__ Compute weight(int64 c) const {
    if constexpr (kWeighted) return widen<Compute>(load_reused<1>(weights + c).lane[0]);
    return Compute(1);
  }

  __device__ __forceinline__ RowTarget<Compute> target(int64 row) const {
    RowTarget<Compute> t;
    space.offsets(row, t.offset);
    read_label(t);
    return t;
  }
  // What the label says. Precondition: the offsets are known.
  __device__ __forceinline__ void read_label(RowTarget<Compute>& t) const {
    judge(t, note(t.offset));
  }

  // What memory says of a row's label. It is read without a look at it, so that it can be on its way for long.
  struct Note {
    Label_ label;
    bool shown;
  };
  __device__ __forceinline__ Note note(const int64 (&offset)[kRowStreams]) const {
    const int64 zero = unknown_zero();
    Note found{labels[offset[kLabels] + zero], true};
    if constexpr (kMasked) found.shown = mask[offset[kRowMask] + zero] != Mask_(0);
    return found;
  }
  __device__ __forceinline__ void judge(RowTarget<Compute>& t, const Note& found) const {
    t.label = found.shown ? static_cast<int64>(found.label) : 0;
    t.counts = found.shown && t.label != ignored;
    t.wrong = t.counts && (t.label < 0 || t.label >= space.classes);
    t.counts &= !t.wrong;
    t.weight = t.counts ? weight(t.label) : Compute(0);
  }
  // What such a row adds to what a mean is divided by.
  __device__ __forceinline__ Compute counted(const Note& found) const {
    RowTarget<Compute> t;
    judge(t, found);
    return t.weight;
  }

  // The logits of a row from its first class on, and that of a class.
  __device__ __forceinline__ const Input* logits(const int64 (&offset)[kRowStreams]) const {
    return input + offset[kLogits];
  }
  // Where the gradients of a row are stored.
  __device__ __forceinline__ Gradient* places(const int64 (&offset)[kRowStreams]) const {
    return gradients + offset[kGradients];
  }
  __device__ __forceinline__ Input raw(const int64 (&offset)[kRowStreams], int64 c) const {
    return input[offset[kLogits] + c * space.class_stride[kLogits]];
  }
  // A row whose classes are neighbours.
  template <int kLanes>
  __device__ __forceinline__ RowView<Input, kLanes> view(const int64 (&offset)[kRowStreams]) const {
    return {input, offset[kLogits], space.classes};
  }

  // The loss of a row of which the sums are known, and whatever of it is to be stored.
  // Precondition: `first` holds in one thread of the unit.
  __device__ __forceinline__ RowLoss<Compute> finish(const RowTarget<Compute>& t, Compute z, Compute largest,
                                                     const RowSums<Compute>& sums, bool first) const {
    RowLoss<Compute> y = uncounted(t);
    if (t.counts) y = row_loss<kSmoothed>(loss, z, largest, sums, t.weight, space.classes);
    if (first) store(t, y, t.counts && z == largest);
    return y;
  }

  // The loss of a row that does not count, or has a wrong label.
  __device__ __forceinline__ RowLoss<Compute> uncounted(const RowTarget<Compute>& t) const {
    const Compute value = t.wrong ? scalar_nan(Compute()) : Compute(0);
    return {value, value, {Compute(0), Compute(0), Compute(0), Compute(0)}};
  }

  __device__ __forceinline__ void store(const RowTarget<Compute>& t, const RowLoss<Compute>& y, bool is_correct) const {
    const int64 at = t.offset[kResults];
    if (t.wrong) report_label(status, site, at, t.label, space.classes);
    if (per_row == 0) return;
    if (values != nullptr) values[at] = Narrow<Result>::from(y.value);
    if (lse != nullptr) lse[at] = y.lse;
    if (correct != nullptr) correct[at] = is_correct;
    if (slopes != nullptr) slopes[at] = y.slopes;
  }
};

// Which of kLanes neighbouring classes from `first` is the target, or -1.
template <int kLanes, class Compute>
__device__ __forceinline__ int target_lane(const RowTarget<Compute>& t, int64 first) {
  const int64 lane = t.label - first;
  return t.counts && lane >= 0 && lane < kLanes ? static_cast<int>(lane) : -1;
}

// The gradient of neighbouring classes from `first`, of which lane `target` is the label's, to `place`. `none`:
// slopes.none(). kExponentials: x holds not the logits but exp(z - largest), of logits without a cap.
template <bool kExponentials = false, int kLanes, class Program, class Place, class Compute = typename Program::Compute>
__device__ __forceinline__ void store_gradient(const Program& program, Place place, int64 first, int target,
                                               const RowSlopes<Compute>& slopes, bool none,
                                               const Pack<typename Program::Input, kLanes>& x) {
  Compute g[kLanes];
  if (none) {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) g[i] = Compute(0);
  } else {
    Compute raw[kLanes];
    unpack(x, raw);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const Compute slope = program.logit.slope(raw[i]);
      g[i] = kExponentials ? raw[i] : program.logit.exponential(raw[i], slopes.largest);
      if constexpr (Program::kOnce) g[i] *= slope;
      g[i] *= slopes.common;
      if constexpr (Program::kSmoothed) g[i] -= slopes.weighted * program.weight(first + i);
      if constexpr (!Program::kOnce) g[i] = (i == target ? slopes.target : g[i]) * slope;
      if (Program::kOnce && i == target) g[i] = slopes.target * slope;
    }
  }
  store_pack<kLanes>(place, NarrowPack<typename Program::Gradient, kLanes>::from(g));
}

// The sums of neighbouring classes from `first`; lane `target` is the label's class, and `z` its logit. Where there is
// a place for them, the exponentials are kept.
template <int kLanes, class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ void add_classes(const Program& program, int64 first, int target, Compute z, Compute largest,
                                            const Pack<typename Program::Input, kLanes>& x, RowSums<Compute>& sums,
                                            Pack<Compute, kLanes>* exponentials = nullptr) {
  Compute raw[kLanes], e[kLanes];
  unpack(x, raw);
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    e[i] = program.logit.exponential(raw[i], largest);
    if constexpr (Program::kSmoothed) {
      const Compute w = program.weight(first + i);
      sums.distance += w == Compute(0) ? Compute(0) : w * (z - program.logit.value(raw[i]));
      sums.weights += w;
    }
  }
  if (exponentials != nullptr) {
    Pack<Compute, kLanes> kept;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) kept.lane[i] = e[i];
    *exponentials = whole(&kept);
  }
  if (target >= 0) {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      if (i == target) e[i] = Compute(0);
    }
  }
  sums.rest += sum_of_lanes(e);
}

template <int kLanes, class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ Compute largest_of(const Program& program, const Pack<typename Program::Input, kLanes>& x,
                                              Compute largest) {
  Largest<Compute, typename Program::Input, kLanes> raw;
  raw.add(x);
  return larger(largest, program.logit.value(raw.get()));
}

template <class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ Compute target_logit(const Program& program, const RowTarget<Compute>& t) {
  return t.counts ? program.logit.value(widen<Compute>(program.raw(t.offset, t.label))) : Compute(0);
}

// The slopes of a row for a grad_output, with what all logits have in common.
template <class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ void scale_slopes(const Program& program, RowSlopes<Compute>& slopes, Compute factor) {
  // 0 * inf must not arise where nothing is to follow.
  if (slopes.none()) return;
  factor *= program.logit.common_slope();
  slopes.common *= factor;
  slopes.weighted *= factor;
  slopes.target *= factor;
}

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

// The part of a row that is every `step`-th vector from `begin` to `end`, and one class of its ends (or -1), read once.
template <int kVectors, class Program, class View, class Compute = typename Program::Compute>
__device__ __forceinline__ RowPart<Compute> row_part(const Program& program, const View& view,
                                                     const RowTarget<Compute>& t, Compute z, int64 begin, int64 end,
                                                     int64 step, int64 single) {
  using Input = typename Program::Input;
  constexpr int kLanes = View::kLanes;
  RowPart<Compute> part{z, {}};
  const auto input = program.logits(t.offset);
  if (single >= 0) {
    const auto x = load_stream<1>(input + single);
    part.largest = largest_of(program, x, z);
    add_classes(program, single, target_lane<1>(t, single), z, reference(part.largest), x, part.sums);
  }
#pragma unroll 1
  for (int64 vector = begin; vector < end; vector += step * kVectors) {
    Pack<Input, kLanes> x[kVectors];
    Compute largest = part.largest;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (vector + k * step < end) x[k] = load_stream<kLanes>(input + view.first(vector + k * step));
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (vector + k * step < end) largest = largest_of(program, x[k], largest);
    }
    relate(part, largest);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (vector + k * step < end) {
        const int64 first = view.first(vector + k * step);
        add_classes(program, first, target_lane<kLanes>(t, first), z, reference(largest), x[k], part.sums);
      }
    }
  }
  return part;
}

// The sums of all lanes that share a row, of which the parts are relative to the same z.
template <bool kSmoothed, class Compute>
__device__ __forceinline__ void join_sums(RowSums<Compute>& sums, int lanes) {
  sums.rest = join_lanes(sums.rest, lanes, Plus{});
  if constexpr (kSmoothed) {
    sums.distance = join_lanes(sums.distance, lanes, Plus{});
    sums.weights = join_lanes(sums.weights, lanes, Plus{});
  }
}

// The parts of some neighbouring lanes, in each of them.
template <bool kSmoothed, class Compute>
__device__ __forceinline__ void join_parts(RowPart<Compute>& part, int lanes) {
  relate(part, join_lanes(part.largest, lanes, Larger{}));
  join_sums<kSmoothed>(part.sums, lanes);
}

// The parts of `count` warps, at most kMost, in each lane of a warp.
template <bool kSmoothed, int kMost, class Compute>
__device__ __forceinline__ RowPart<Compute> join_shared(const RowPart<Compute>* all, int count) {
  const int lane = threadIdx.x % kWarp;
  RowPart<Compute> part{-scalar_infinity(Compute()), {}};
  if (lane < count) part = all[lane];
#pragma unroll
  for (int i = kWarp; i < kMost; i += kWarp) {
    if (lane + i >= count) continue;
    RowPart<Compute> other = all[lane + i];
    const Compute largest = larger(part.largest, other.largest);
    relate(part, largest);
    relate(other, largest);
    part.sums.rest += other.sums.rest;
    if constexpr (kSmoothed) {
      part.sums.distance += other.sums.distance;
      part.sums.weights += other.sums.weights;
    }
  }
  join_parts<kSmoothed>(part, kWarp);
  return part;
}

// The parts that the warps of a unit found, in each thread of it.
template <bool kSmoothed, class Unit, class Compute>
__device__ __forceinline__ void join_warps(const Unit& unit, RowPart<Compute>& part, Turn& turn) {
  if constexpr (Unit::kBlock) {
    const RowPart<Compute>* all;
    unit.share(part, turn, all);
    part = join_shared<kSmoothed, Unit::kBlocks * kWarp>(all, unit.warps());
  }
}

// The largest of what the warps of a unit found, in each thread of it.
template <class Unit, class Compute>
__device__ __forceinline__ Compute largest_of_warps(const Unit& unit, Compute largest, Turn& turn) {
  if constexpr (Unit::kBlock) {
    const Compute* all;
    unit.share(largest, turn, all);
    const int lane = threadIdx.x % kWarp, warps = unit.warps();
    largest = -scalar_infinity(Compute());
    for (int i = lane; i < warps; i += kWarp) largest = larger(largest, all[i]);
    largest = join_lanes(largest, kWarp, Larger{});
  }
  return largest;
}

// The gradients of such a part, which is read again.
template <int kVectors, class Program, class View, class Compute = typename Program::Compute>
__device__ __forceinline__ void store_gradients(const Program& program, const View& view, const RowTarget<Compute>& t,
                                                const RowSlopes<Compute>& slopes, int64 begin, int64 end, int64 step,
                                                int64 single) {
  using Input = typename Program::Input;
  constexpr int kLanes = View::kLanes;
  const bool none = slopes.none(), read = !none;
  const auto input = program.logits(t.offset);
  const auto gradients = program.places(t.offset);
  if (single >= 0) {
    store_gradient(program, gradients + single, single, target_lane<1>(t, single), slopes, none,
                   read ? load_stream<1>(input + single) : Pack<Input, 1>{});
  }
#pragma unroll 1
  for (int64 vector = begin; vector < end; vector += step * kVectors) {
    Pack<Input, kLanes> x[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (read && vector + k * step < end) x[k] = load_stream<kLanes>(input + view.first(vector + k * step));
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (vector + k * step >= end) continue;
      const int64 first = view.first(vector + k * step);
      store_gradient(program, gradients + first, first, target_lane<kLanes>(t, first), slopes, none, x[k]);
    }
  }
}

// One row of any length: a first read finds the sums, relative to the largest logit so far, a second one the gradient.
// Preconditions: every thread of the unit calls it together, for a LaneUnit every lane of the warp; `exists` is false
// where a warp has fewer rows left than it takes at once.
template <bool kGradient, int kLanes, int kVectors, class Unit, class Program, class Scale>
__device__ __forceinline__ typename Program::Compute long_row(const Program& program, const Unit& unit, int64 row,
                                                              bool exists, Turn& turn, Scale& scale) {
  using Compute = typename Program::Compute;
  RowTarget<Compute> t = program.target(exists ? row : 0);
  t.counts &= exists;
  t.wrong &= exists;
  const auto view = program.template view<kLanes>(t.offset);
  const Compute z = target_logit(program, t);
  RowPart<Compute> part{z, {}};
  if (t.counts) {
    part = row_part<kVectors>(program, view, t, z, unit.index(), view.vectors, unit.count(), view.end(unit.index()));
  }
  join_parts<Program::kSmoothed>(part, unit.lanes());
  join_warps<Program::kSmoothed>(unit, part, turn);
  const RowLoss<Compute> y = program.finish(t, z, part.largest, part.sums, exists && unit.index() == 0);
  if constexpr (kGradient) {
    RowSlopes<Compute> slopes = y.slopes;
    scale_slopes(program, slopes, row_factor(scale, t.offset));
    if (exists) {
      store_gradients<kVectors>(program, view, t, slopes, unit.index(), view.vectors, unit.count(),
                                view.end(unit.index()));
    }
  }
  return y.value;
}

// ---------------------------------------------------------------------------------------------------------------------
// Many rows

// The rows that a team visits. Row r belongs to group r / unit.rows() % groups, which one team takes whole.
template <class Unit>
struct RowWalk {
  int group;
  int64 first;

  __device__ __forceinline__ explicit RowWalk(const Unit& unit)
      : group(static_cast<int>(unit.team())), first(unit.team() * unit.rows()) {
  }
  // Whether these are the last ones of their group.
  __device__ __forceinline__ bool ends(const Unit& unit, int64 groups, int64 rows) const {
    return first + groups * unit.rows() >= rows;
  }
  // Preconditions: those of GroupQueue::after.
  __device__ __forceinline__ void advance(const Unit& unit, GroupQueue<Unit>& queue, int64 groups, int64 rows,
                                          unsigned joins) {
    const bool last = ends(unit, groups, rows);
    first += groups * unit.rows();
    if (!last) return;
    group = queue.after(unit, group, joins);
    first = static_cast<int64>(group) * unit.rows();
  }
};

// What is left of a group: the sum of its values, if there is room for it, and the grad_output that it expected.
template <class Unit, class Scale>
__device__ __forceinline__ void close_group(const Unit& unit, const Scale& scale, int64 group, double total,
                                            double* partials, Turn& turn) {
  note_scale(scale, unit, group);
  if (partials == nullptr) return;
  total = unit.total(total, turn);
  if (unit.leads()) partials[group] = total;
}
// Of a warp, which tells nobody anything.
template <class Scale>
__device__ __forceinline__ void close_group(const LaneUnit& unit, const Scale& scale, int64 group, double total,
                                            double* partials) {
  Turn none{0, 0};
  close_group(unit, scale, group, total, partials, none);
}

// Visits every row once: visit(row, exists, next, turn) yields its value, where `next` is the row after it, for visits
// that look ahead, and none if it is beyond the last. It is a register more.
template <class Unit, class Scale, class Visit>
__device__ __forceinline__ void walk_rows(const Unit& unit, const Scale& scale, int64 rows, int64 groups,
                                          const Workspace& work, const Visit& visit) {
  RowWalk<Unit> walk(unit);
  if (walk.group >= groups) return;
  unit.open();
  GroupQueue<Unit> queue(unit, work.drawn);
  Turn turn{0, 0};
  double total = 0.0;
#pragma unroll 1
  while (walk.group < groups) {
    const int group = walk.group;
    const int64 row = walk.first + unit.row();
    const bool last = walk.ends(unit, groups, rows);
    int64 next = rows;
    if constexpr (Visit::kLooksAhead) {
      walk.advance(unit, queue, groups, rows, turn.joins);
      if (walk.group < groups) next = walk.first + unit.row();
    }
    turn.drawn = queue.drawn;
    total += static_cast<double>(visit(row, row < rows, next, turn));
    if (last) {
      close_group(unit, scale, group, total, work.partials, turn);
      total = 0.0;
    }
    if constexpr (!Visit::kLooksAhead) walk.advance(unit, queue, groups, rows, turn.joins);
  }
}

// Rows that are read twice, because they are too long for what is on chip.
template <int kLanes, int kVectors>
struct LongReader {
  template <bool kGradient, class Unit, class Program, class Scale>
  struct Visit {
    static constexpr bool kLooksAhead = false;
    const Program& program;
    const Unit& unit;
    Scale& scale;
    __device__ __forceinline__ auto operator()(int64 row, bool exists, int64, Turn& turn) const {
      return long_row<kGradient, kLanes, kVectors>(program, unit, row, exists, turn, scale);
    }
  };

  // Every row once; `work` may hold nothing.
  template <bool kGradient, class Unit, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Unit& unit, Scale& scale, int64 groups,
                                               const Workspace& work) {
    walk_rows(unit, scale, program.space.rows, groups, work,
              Visit<kGradient, Unit, Program, Scale>{program, unit, scale});
  }
};

// The sum of all partials over the divisor, by the block that arrives last.
// Preconditions: every thread of every block calls it once; blockDim.x is a power of two.
template <class Result>
__device__ __forceinline__ void divide_sum(int64 groups, double* memory, double divisor, Result* value) {
  const Workspace work = workspace(memory);
  if (!arrive_last(work.ticket)) return;
  if (threadIdx.x == 0) *work.drawn = 0;
  const double total = sum_partials(work.partials, groups);
  if (threadIdx.x == 0) *value = Narrow<Result>::from(total / divisor);
}

// ---------------------------------------------------------------------------------------------------------------------
// What the entry points call

// value = sum of losses / divisor; per row what the program asks for.
template <class Reader, class Unit, class Program, class Result>
__device__ __forceinline__ void row_value(const Program& program, const Unit& unit, int64 groups, double* memory,
                                          double divisor, Result* value) {
  KnownScale<typename Program::Compute> unused{0};
  Reader::template sweep<false>(program, unit, unused, groups, workspace(memory));
  divide_sum(groups, memory, divisor, value);
}

// The same, and the gradients for the expected grad_output; scale = 1 / divisor.
template <class Reader, class Unit, class Program, class Result>
__device__ __forceinline__ void row_value_and_gradient(const Program& program, const Unit& unit, int64 groups,
                                                       double* memory, double divisor, double scale, Result* value,
                                                       const double* expected, double* used) {
  TeamScale<Unit, typename Program::Compute> expectation(expected, used, scale);
  Reader::template sweep<true>(program, unit, expectation, groups, workspace(memory));
  divide_sum(groups, memory, divisor, value);
}

// The gradients for the true grad_output, unless those of this team's groups were written with it already.
template <class Reader, class Unit, class Program, class Result>
__device__ __forceinline__ void verify_row_gradient(const Program& program, const Unit& unit, int64 groups,
                                                    double scale, const Result* grad_output, const double* used,
                                                    double* expected) {
  const double g = widen<double>(*grad_output);
  if (!verify_team(unit, groups, g, used, expected)) return;
  KnownScale<typename Program::Compute> known{static_cast<typename Program::Compute>(g * scale)};
  Reader::template sweep<true>(program, unit, known, groups, {});
}

// A value per row, and the slopes for the gradient.
template <class Reader, class Unit, class Program>
__device__ __forceinline__ void row_values(const Program& program, const Unit& unit, int64 groups) {
  KnownScale<typename Program::Compute> unused{0};
  Reader::template sweep<false>(program, unit, unused, groups, {});
}

// The gradients for a grad_output per row.
template <class Reader, class Unit, class Program, class Result>
__device__ __forceinline__ void row_gradient(const Program& program, const Unit& unit, int64 groups,
                                             const Result* grad_output) {
  RowScale<typename Program::Compute, Result> scale{grad_output, 1.0};
  Reader::template sweep<true>(program, unit, scale, groups, {});
}

// The gradients from slopes that were stored, in pieces of rows: for a grad_output per row (`result_stride` 1) or one
// for all (0). The gradient may lie where the logits do.
template <int kLanes, int kVectors, class Unit, class Program, class Result>
__device__ __forceinline__ void apply_row_slopes(const Program& program, const Unit& unit, int64 pieces,
                                                 int64 result_stride, double scale, const Result* grad_output) {
  using Compute = typename Program::Compute;
  const int64 items = program.space.rows * pieces, per = unit.rows();
#pragma unroll 1
  for (int64 first = unit.team() * per; first < items; first += unit.teams() * per) {
    const int64 item = first + unit.row();
    if (item >= items) continue;
    const int64 row = item / pieces, piece = item - row * pieces;
    const RowTarget<Compute> t = program.target(row);
    const RowView<typename Program::Input, kLanes> view(program.input, t.offset[kLogits], program.space.classes);
    RowSlopes<Compute> slopes = program.slopes[t.offset[kResults]];
    const double g = widen<double>(grad_output[t.offset[kResults] * result_stride]);
    scale_slopes(program, slopes, static_cast<Compute>(g * scale));
    const int64 length = (view.vectors + pieces - 1) / pieces;
    const int64 end = (piece + 1) * length < view.vectors ? (piece + 1) * length : view.vectors;
    store_gradients<kVectors>(program, view, t, slopes, piece * length + unit.index(), end, unit.count(),
                              piece == 0 ? view.end(unit.index()) : -1);
  }
}
