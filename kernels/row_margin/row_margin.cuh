// Margin losses of rows of scores x (R, C), in which labels are to exceed all other classes by a margin:
//
//   z_ij  = margin + (x_i - x_j)                               j a label of the row, i a class that is no label
//   y[r]  = (w_y / C) * sum over i and j of h(z_ij), z_ij > 0
//   g[r, i] = factor * sum over j of h'(z_ij)                  factor = grad_output * scale * w_y / C
//   g[r, j] = -factor * sum over i of h'(z_ij)
//
// A row has one label, or a list of labels that ends at the first -1; each label counts as often as it is listed. A
// pair (i, j) is active if z > 0, and inactive if z = 0. The margin is added to the difference of scores, in double, so
// that it is not lost in large scores.
//
// One label (OneLabelReader): a group of threads processes a row: lanes of a warp, a block, or a cluster of blocks.
// 1. The label is loaded while the previous row is read; its score and the row's first vectors are loaded while the
//    previous row is reduced. The threads read the row as vectors and write the gradients of each vector immediately:
//    the gradient of a class depends only on its own score and the label's.
// 2. The group sums the hinges and their derivatives; if the hinge is z itself, both follow from the sum of the active
//    scores (linear_value). Then thread 0 overwrites the label's gradient. If the value of a row is NaN, all its
//    gradients are written again.
// Vectors are aligned as the gradients are. Scores with a different alignment are shifted to match, or read one by one
// (VectorAhead). If classes are far apart in memory, one thread processes a row in the same way (ThreadPerRowReader),
// or the same lane of each warp of a block does (SharedRowReader). Rows of lists with few classes have one thread each
// too (thread_per_list.cuh).
//
// Several labels (ListReader): a warp or a block processes a row. In a block whose warps process a row each, all
// threads process rows of long lists together (deferred_rows).
// 1. Lane k of each warp loads label k while the previous row is read. If none of these labels ends the list, the
//    threads read further labels until one of them finds the end.
// 2. Fewer labels than lanes, if the hinge is z itself: lane k holds label k, the smallest score that has an active
//    pair with it, and the number of classes that have one. A thread reads some vectors, marks the elements that are
//    labels, and compares all others with these smallest scores, which it gets by shuffles: no double precision is
//    needed for that. Pairs of five labels are counted in bit fields of one word. Class i has n active pairs, whose sum
//    follows from n and the counts of the labels (take_vectors). The threads write the gradients of their vectors, and
//    in the end lane k of the first warp writes that of label k.
// 3. More labels, if the hinge is z itself: the group sorts their scores v_0 <= v_1 <= ... in shared memory, and
//    computes prefix sums P_k = sum over l < k of v_l - v_0. Binary search finds the number n of active pairs of class
//    i, whose sum is n (margin + (x_i - v_0)) - P_n. A histogram counts the classes by n. Label k has as many active
//    pairs as there are classes with n > k.
// 4. Other hinges, lists that do not fit into shared memory, and rows in which a label's score is not finite: each
//    thread iterates over some of the classes, and for each over the list; then, for each label, the threads iterate
//    over the classes again to sum its pairs (list_in_memory).
//
// Threads hold vectors of a row in registers; a group owns a row; a worker owns a chunk (softmax/rows.cuh).
//
// Traffic: each score is read once, and each gradient is written once; labels are read up to the end of the list. In
// case 4, the row is read again, from a cache if it fits. Rows that do not count (masked, ignored, or of weight 0) are
// not read, except by thread_per_list.cuh.
//
// Labels are data and may be wrong: a row with a label that is no class has the value NaN and gradients of 0, and is
// reported in `status`.
//
// Order of additions: within a thread in the order of its vectors, then by the group's fixed tree. Derivatives of a
// hinge that is z itself are counted in integers.
//
// Preconditions: unless vectors are single elements, gradients have class stride 1, and so do scores except with
// kGathered. With kShifted, the first row is the first row of scores in memory, and the last row the last one. The
// number of threads of a group is a power of two, for lists at least 32. Unless vectors divide every row, the threads
// of a group process up to 2 (kVecSize - 1) edge elements, kEdges each.
#pragma once
#include "softmax/rows.cuh"

// A gradient while it waits in a register for the others of its vector: a double, or a float, which for 16-bit types
// rounds as the double does.
template <class Storage>
struct Waiting {
  using type = float;
  static __device__ __forceinline__ float from(double x) {
    return sizeof(Storage) == 2 ? as_float(x) : static_cast<float>(x);
  }
};
template <>
struct Waiting<double> {
  using type = double;
  static __device__ __forceinline__ double from(double x) {
    return x;
  }
};

// Sum of the hinges of some pairs, and sum of their derivatives.
template <class Slopes>
struct HingeSums {
  double value;
  Slopes slopes;
};

// Alignment of rows of scores relative to the vectors of their gradients.
enum class ScoresOfRows {
  kWhole,     // the same alignment, and every row begins and ends with a vector (short_lists.cuh)
  kAlike,     // the same alignment: as many elements from an aligned address
  kShifted,   // a different alignment; elements of 2 bytes
  kGathered,  // a different alignment, or classes not contiguous: elements are read one by one
};

// The classes of a row. With kApart they are `step` elements apart, otherwise contiguous.
template <bool kApart, class T>
struct ClassesOfRow {
  T* row;
  int64 step;

  template <class Index>
  __device__ __forceinline__ T* operator+(Index c) const {
    if constexpr (kApart) return row + c * step;
    return row + c;
  }
  template <class Index>
  __device__ __forceinline__ T& operator[](Index c) const {
    return *(*this + c);
  }
  // Returns the number of elements between two classes whose indices differ by `count`.
  template <class Index>
  __device__ __forceinline__ Choose<kApart, int64, Index> between(Index count) const {
    if constexpr (kApart) return count * step;
    return count;
  }
};

// Value of `shift` for scores next to which no memory may be read: those of the first row in memory, and of the last
// one.
constexpr int kNothingAround = -1;

// Loads contiguous elements one by one.
template <int kVecSize, class Storage>
__device__ __forceinline__ Pack<Storage, kVecSize> load_elements(const Storage* at) {
  Pack<Storage, kVecSize> pack;
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) pack.element[i] = load_pack<1>(at + i).element[0];
  return pack;
}

// A vector of scores in flight. A shifted vector is cut out of the two aligned packs that it overlaps; a neighbouring
// thread reads the second pack too, so that it comes from L1. With kNothingAround, its elements are read one by one.
template <ScoresOfRows kScores, class Storage, int kVecSize>
struct VectorAhead {
  static constexpr bool kShifted = kScores == ScoresOfRows::kShifted;
  using P = Pack<Storage, kVecSize>;
  P pack[kShifted ? 2 : 1];

  // `shift` is the number of elements from the preceding aligned address to `at`, `step` the number between classes.
  __device__ __forceinline__ void load(const Storage* at, int shift, int64 step) {
    if constexpr (kScores == ScoresOfRows::kGathered) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i, at += step) pack[0].element[i] = load_pack<1>(at).element[0];
    } else if constexpr (kShifted) {
      if (shift == kNothingAround) {
        pack[0] = load_elements<kVecSize>(at);
        return;
      }
      pack[0] = load_pack<kVecSize>(at - shift);
      if (shift != 0) pack[1] = load_pack<kVecSize>(at - shift + kVecSize);
    } else {
      pack[0] = load_pack<kVecSize>(at);
    }
  }
  __device__ __forceinline__ P get(int shift) const {
    if constexpr (kShifted) {
      return cut_out(pack, static_cast<unsigned>(max(shift, 0) * static_cast<int>(sizeof(Storage))));
    }
    // Gathered elements must not be copied as words: they would have to arrive first, to be packed. Other vectors are
    // copied as words, or the compiler would unpack them.
    if constexpr (kScores == ScoresOfRows::kGathered) return pack[0];
    return load_words(pack);
  }
};

// Number of elements from the preceding aligned address to `at`.
template <int kVecSize, class Storage>
__device__ __forceinline__ int behind_vector(const Storage* at) {
  return static_cast<int>(reinterpret_cast<unsigned long long>(at) / sizeof(Storage)) & (kVecSize - 1);
}

// `Base` is a RowProgram of softmax/rows.cuh, which has the operands, one label per row, mask and outputs. Its loss is
// the hinge: `margin()`, `kLinear` (true if the hinge is z itself), and h of a positive z as a functor on dual numbers.
template <class Base>
struct MarginProgram : Base {
  using Hinge = typename Base::Loss;
  using Input = typename Base::Input;
  // Sum of the derivatives of pairs: a count if each is 1.
  using Slopes = Choose<Hinge::kLinear, int, double>;
  using Sums = HingeSums<Slopes>;
  using Gradient = typename Waiting<Input>::type;

  double inverse;    // 1 / C
  int64 count;       // places of a list, including its end and what follows it
  int64 inner;       // rows between neighbouring labels of a list, for reports
  int64 capacity;    // labels of a group that fit into shared memory
  int64 mask_words;  // words of shared memory with a bit for each class; 0 if they do not fit

  __device__ __forceinline__ double excess(double x, double own) const {
    return this->loss.margin() + (x - own);
  }
  // Returns the hinge of a pair and its derivative: 0 unless the pair is active and `counts`. NaN counts as above 0.
  __device__ __forceinline__ HingeSums<Slopes> pair(double z, bool counts = true) const {
    const bool is_active = !(z <= 0.0) && counts;
    if constexpr (Hinge::kLinear) {
      return {is_active ? z : 0.0, is_active};
    } else {
      // No branch: some lanes of nearly every warp would take it, and it would cost more than a hinge.
      const auto y = this->loss(variable<1u, 0>(z));
      return {is_active ? y.value : 0.0, is_active ? tangent_or_zero(y, 0) : 0.0};
    }
  }
  // Adds the hinge of a pair to `total`, and returns its derivative.
  __device__ __forceinline__ Slopes add(double z, double& total) const {
    const auto y = pair(z);
    total += y.value;
    return y.slopes;
  }
  // Returns a gradient. An infinite factor does not change a gradient of 0.
  static __device__ __forceinline__ Gradient gradient(Slopes slopes, double factor) {
    return Waiting<Input>::from(slopes == Slopes(0) ? 0.0 : static_cast<double>(slopes) * factor);
  }
  template <int kVecSize, ScoresOfRows kScores = ScoresOfRows::kAlike>
  __device__ __forceinline__ auto scores(const int64 (&offset)[kRowStreams]) const {
    constexpr bool kApart = kVecSize == 1 || kScores == ScoresOfRows::kGathered;
    return ClassesOfRow<kApart, const Input>{this->logits(offset), this->space.class_stride[kLogits]};
  }
  // The gradients of a row; null without kGradient.
  template <int kVecSize, bool kGradient = true>
  __device__ __forceinline__ ClassesOfRow<kVecSize == 1, Input> gradients_of(const int64 (&offset)[kRowStreams]) const {
    return {kGradient ? this->gradient_pointer(offset) : nullptr, this->space.class_stride[kGradients]};
  }
  // Returns the vectors of a row. They are aligned as its gradients are.
  template <int kVecSize, ScoresOfRows kScores, class Index>
  __device__ __forceinline__ RowVectors<Input, kVecSize, Index> vectors(const int64 (&offset)[kRowStreams]) const {
    const Index classes = static_cast<Index>(this->space.classes);
    if constexpr (kScores == ScoresOfRows::kAlike) return {this->input, offset[kLogits], classes};
    return {this->gradients, offset[kGradients], classes};
  }
  // Returns the shift of the vectors of a row. `first` is the first element of one of them, `last` the offset of the
  // last row.
  template <int kVecSize, ScoresOfRows kScores>
  static __device__ __forceinline__ int shift_of(const Input* first, const int64 (&offset)[kRowStreams], int64 last) {
    if constexpr (kScores != ScoresOfRows::kShifted) return 0;
    const bool is_inner = offset[kLogits] >= kVecSize && offset[kLogits] + kVecSize <= last;
    return is_inner ? behind_vector<kVecSize>(first) : kNothingAround;
  }
  __device__ __forceinline__ int64 last_row() const {
    int64 offset[kRowStreams];
    this->space.offsets(this->space.rows - 1, offset);
    return offset[kLogits];
  }
  __device__ __forceinline__ double score(const int64 (&offset)[kRowStreams], int64 c) const {
    return widen<double>(this->raw(offset, c));
  }
  __device__ __forceinline__ int64 label(const int64 (&offset)[kRowStreams], int64 k) const {
    return static_cast<int64>(this->labels[offset[kLabels] + k * this->space.class_stride[kLabels]]);
  }
  __device__ __forceinline__ bool is_class(int64 label) const {
    return static_cast<unsigned long long>(label) < static_cast<unsigned long long>(this->space.classes);
  }
  // Stores the value of a row of one label, and reports the label if it is invalid.
  __device__ __forceinline__ void store(const RowTarget<double>& t, double value) const {
    if (!t.active) ++this->inactive_rows;
    if (t.invalid_label) report_label(this->status, this->site, t.offset[kResults], t.label, this->space.classes);
    store(t.offset, value);
  }
  __device__ __forceinline__ void store(const int64 (&offset)[kRowStreams], double value) const {
    if (this->values != nullptr) this->values[offset[kResults]] = Narrow<typename Base::Result>::from(value);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Groups

// Reduces x over the threads of a group; every thread gets the result. Preconditions: every thread of the group calls
// it together; if groups are lanes of a warp, all groups of the warp do.
template <class Group, class Op, class T>
__device__ __forceinline__ T group_reduce(const Group& group, T x, Op op, SyncState& sync) {
  x = subwarp_reduce(x, group.subwarp_size(), op);
  if constexpr (Group::kMultiWarp) {
    const T* all;
    group.all_gather(x, sync, all);
    const int warps = group.num_warps();
    x = all[0];
    for (int i = 1; i < warps; ++i) x = op(x, all[i]);
  }
  return x;
}
struct MinOp {
  template <class T>
  __device__ __forceinline__ T operator()(T x, T y) const {
    return x < y ? x : y;
  }
};
// Sums x over the threads of a group. Preconditions: those of group_reduce.
template <class Group, class Slopes>
__device__ __forceinline__ HingeSums<Slopes> group_sum(const Group& group, HingeSums<Slopes> x, SyncState& sync) {
  x.value = subwarp_reduce(x.value, group.subwarp_size(), AddOp{});
  x.slopes = subwarp_reduce(x.slopes, group.subwarp_size(), AddOp{});
  if constexpr (Group::kMultiWarp) {
    const HingeSums<Slopes>* all;
    group.all_gather(x, sync, all);
    const int warps = group.num_warps();
    x = {0.0, Slopes(0)};
    for (int i = threadIdx.x % kWarp; i < warps; i += kWarp) {
      x.value += all[i].value;
      x.slopes += all[i].slopes;
    }
    x.value = subwarp_reduce(x.value, kWarp, AddOp{});
    x.slopes = subwarp_reduce(x.slopes, kWarp, AddOp{});
  }
  return x;
}
// Barrier of a whole warp, or of the block. What its threads wrote before is visible to all of them afterwards.
template <class Group>
__device__ __forceinline__ void group_sync(const Group&) {
  if constexpr (Group::kMultiWarp) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}
template <class Group>
__device__ __forceinline__ bool group_any(const Group&, bool x) {
  if constexpr (Group::kMultiWarp) {
    return __syncthreads_or(x) != 0;
  } else {
    return __any_sync(0xffffffffu, x) != 0;
  }
}

// Writes one number to all gradients of a row.
template <int kVecSize, ScoresOfRows kScores = ScoresOfRows::kAlike, class Group, class Program>
__device__ __forceinline__ void fill_gradients(const Program& program, const Group& group,
                                               const int64 (&offset)[kRowStreams], double x) {
  using Input = typename Program::Input;
  const auto view = program.template vectors<kVecSize, kScores, int64>(offset);
  const auto to = program.template gradients_of<kVecSize>(offset);
  const Input filled = Narrow<Input>::from(x);
  for (int e = group.thread_rank(); e < view.head + view.tail; e += group.num_threads())
    to[view.edge_class(e)] = filled;
  Pack<Input, kVecSize> pack;
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) pack.element[i] = filled;
  for (int64 v = group.thread_rank(); v < view.vectors; v += group.num_threads()) {
    store_pack<kVecSize>(to + view.first(v), pack);
  }
}

// Returns the exponent of a power of two.
__device__ __forceinline__ int exponent_of(int x) {
  return 31 - __clz(x);
}
// Type of a class index. Lanes of a warp share only short rows.
template <class Group>
using IndexOf = Choose<Group::kMultiWarp, int64, int>;
// Loads vectors that are `step` elements apart: `left` of them, but no more than kVectors. Each is read only once, but
// evict-first loads are slower (docs/performance/scores.md). The last two arguments are those of VectorAhead::load.
template <int kVectors, class Vector, class Input, class Step, class Index>
__device__ __forceinline__ void load_vectors(const Input* from, Step step, Index left, Vector (&x)[kVectors],
                                             int shift = 0, int64 of_classes = 1) {
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (k < left) x[k].load(from + static_cast<Index>(k) * step, shift, of_classes);
  }
}
// Converts an integer from 0 to 2^32 - 1 to double. n becomes the low mantissa bits of 2^52 + n, without a conversion.
__device__ __forceinline__ double small_to_double(int n) {
  return __hiloint2double(0x43300000, n) - 4503599627370496.0;
}
// Converts a score to double, exactly.
__device__ __forceinline__ double in_double(float x) {
  return float_to_double(x);
}
__device__ __forceinline__ double in_double(double x) {
  return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// Active pairs

// Returns the next number above x. In float, it skips subnormal numbers, because kernels flush them.
__device__ __forceinline__ float next_above(float x) {
  const float smallest = 1.17549435e-38f;
  if (x == 0.0f) return smallest;
  if (x == -smallest) return 0.0f;
  return __int_as_float(__float_as_int(x) + (x > 0.0f ? 1 : -1));
}
__device__ __forceinline__ double next_above(double x) {
  if (x == 0.0) return __longlong_as_double(1);
  return __longlong_as_double(__double_as_longlong(x) + (x > 0.0 ? 1 : -1));
}

// Returns the smallest score that has an active pair with a label of score `own`: the next one above own - margin.
// `error` is the rounding error of that difference in double. Comparing a score with the result is exact, and needs no
// double precision. Preconditions: `own` and `margin` are finite.
template <class Score>
__device__ __forceinline__ Score smallest_active(double own, double margin) {
  const double difference = own - margin, subtracted = difference - own;
  const double error = (own - (difference - subtracted)) - (margin + subtracted);
  const Score nearest = static_cast<Score>(difference);
  const double wide = static_cast<double>(nearest);
  const bool above = wide > difference || (wide == difference && error < 0.0);
  return above ? nearest : next_above(nearest);
}

// ---------------------------------------------------------------------------------------------------------------------
// One label

// Compares some classes of a row with a label of finite score `own`, for a linear hinge, and returns their gradients.
// The label may be among them: its pair would be active with z = margin, and adds nothing to the sum of differences.
// For scores in double the differences are added, for all others the scores: any rounding of a sum of scores is small
// beside the result (linear_value).
template <int kVecSize, class Program>
__device__ __forceinline__ Pack<typename Program::Input, kVecSize> linear_classes(
    const Pack<typename Program::Input, kVecSize>& x, typename Program::Gradient smallest, double own,
    typename Program::Gradient active, typename Program::Sums& sums) {
  using Score = typename Program::Gradient;
  Score g[kVecSize];
  double addend[kVecSize];
  int count = 0;
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    const Score score = widen_element<Score>(x, i);
    // The comparison is true for NaN.
    const bool is_active = !(score < smallest);
    if constexpr (sizeof(Score) == sizeof(double)) {
      addend[i] = is_active ? score - own : 0.0;
    } else {
      addend[i] = in_double(is_active ? score : Score(0));
    }
    count += is_active ? 1 : 0;
    g[i] = is_active ? active : Score(0);
  }
  sums.value += sum_elements(addend);
  sums.slopes += count;
  return NarrowPack<typename Program::Input, kVecSize>::from(g);
}
template <bool kGradient, int kVecSize, class Program>
__device__ __forceinline__ void take_linear(typename Program::Input* to,
                                            const Pack<typename Program::Input, kVecSize>& x,
                                            typename Program::Gradient smallest, double own,
                                            typename Program::Gradient active, typename Program::Sums& sums) {
  const auto g = linear_classes<kVecSize, Program>(x, smallest, own, active, sums);
  if constexpr (kGradient) store_pack<kVecSize>(to, g);
}

// Returns the sum of the hinges and of their derivatives, from what take_linear() has added over all classes.
//
//   sum of z = (n - [label]) margin + (sum of x - n own)      n active classes, including the label if active
//
// Scores have at most 24 significant bits, and active ones are above own - margin. If |own| is at most 4 |margin|,
// rounding is some 2^-53 of n margin. Otherwise, an active score has the sign of own and at least 3/4 of its magnitude,
// or differs from it by at least |own| / 2. So scores below 2 |own| are multiples of one unit, and their sum stays
// below 2^53 units, so the difference is exact. Any other score makes the sum of differences as large as its own share
// of the rounding.
template <class Score>
__device__ __forceinline__ HingeSums<int> linear_value(const HingeSums<int>& sums, Score smallest, double own,
                                                       double margin) {
  const int count = sums.slopes - (static_cast<Score>(own) < smallest ? 0 : 1);
  double differences = sums.value;
  if constexpr (sizeof(Score) < sizeof(double)) differences -= small_to_double(sums.slopes) * own;
  return {small_to_double(count) * margin + differences, count};
}

// Adds the hinges of the pairs of some classes, and with kSlopes also their derivatives. Returns the gradients of the
// classes; that of the label, which is element `target` (-1 if absent), is 0.
template <int kVecSize, bool kSlopes = true, class Program>
__device__ __forceinline__ Pack<typename Program::Input, kVecSize> pairs_of_classes(
    const Program& program, const Pack<typename Program::Input, kVecSize>& x, int target, double own, double factor,
    typename Program::Sums& sums) {
  using Slopes = typename Program::Slopes;
  using Score = typename Program::Gradient;
  Score g[kVecSize];
  double addend[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    const auto y = program.pair(program.excess(in_double(widen_element<Score>(x, i)), own), i != target);
    addend[i] = y.value;
    if constexpr (kSlopes) sums.slopes += y.slopes;
    g[i] = Program::gradient(y.slopes, factor);
  }
  sums.value += sum_elements(addend);
  return NarrowPack<typename Program::Input, kVecSize>::from(g);
}
template <bool kGradient, int kVecSize, class Program>
__device__ __forceinline__ void take_classes(const Program& program, typename Program::Input* to,
                                             const Pack<typename Program::Input, kVecSize>& x, int target, double own,
                                             double factor, typename Program::Sums& sums) {
  const auto g = pairs_of_classes<kVecSize, kGradient>(program, x, target, own, factor, sums);
  if constexpr (kGradient) store_pack<kVecSize>(to, g);
}

// A row in flight: its label, its first vectors and the label's score, as loaded. They are not used before the row is
// processed, so that the loads are in flight while the previous row is reduced.
template <int kVecSize, int kVectors, int kEdges, ScoresOfRows kScores, class Group, class Program>
struct RowAhead {
  using Input = typename Program::Input;
  using Index = IndexOf<Group>;

  typename Program::LabelLoad label;
  RowTarget<double> target;
  bool started;  // false before the first row
  bool counts;
  Index left;          // number of vectors of this thread
  Index first;         // class at which the first of them begins
  Index edge[kEdges];  // classes of its edge elements, or -1
  int shift;           // shift of the vectors
  int64 last;          // offset of the last row
  VectorAhead<kScores, Input, kVecSize> x[kVectors];
  Pack<Input, 1> of_edge[kEdges];
  Input own;

  __device__ __forceinline__ void load_label(const Program& program, int64 next) {
    int64 offset[kRowStreams];
    program.space.offsets(next, offset);
    label = program.load_label(offset);
  }
  // Starts the loads of a row whose label has been loaded.
  __device__ __forceinline__ void start(const Program& program, int rank, int threads, int64 next) {
    program.space.offsets(next, target.offset);
    program.validate_label(target, label);
    counts = target.active && target.weight != 0.0;
    if (!counts) return;
    const auto view = program.template vectors<kVecSize, kScores, Index>(target.offset);
    const auto from = program.template scores<kVecSize, kScores>(target.offset);
    const Index numerator = view.vectors - rank + threads - 1;
    left = numerator < 0 ? Index(0) : numerator >> exponent_of(threads);
    first = view.first(rank);
    shift = program.template shift_of<kVecSize, kScores>(from + view.head, target.offset, last);
    load_more(program, from + first, from.between(threads * kVecSize), left);
#pragma unroll
    for (int e = 0; e < kEdges; ++e) {
      edge[e] = view.head + view.tail > 0 ? view.edge_class(rank + e * threads) : Index(-1);
      if (edge[e] >= 0) of_edge[e] = load_stream<1>(from + edge[e]);
    }
    own = program.raw(target.offset, target.label);
  }
  template <class Step>
  __device__ __forceinline__ void load_more(const Program& program, const Input* from, Step step, Index count) {
    load_vectors(from, step, count, x, shift, program.space.class_stride[kLogits]);
  }
};

// Processes a row of one label, starts the loads of row `next`, and returns the row's value. Preconditions: every
// thread of the group calls it together, with a SubwarpGroup every lane of the warp. `exists` is false if the warp has
// fewer rows left than it processes at once. `rank` is the thread's rank in its group.
template <bool kGradient, int kVecSize, int kVectors, int kEdges, ScoresOfRows kScores, class Group, class Program,
          class Scale>
__device__ __forceinline__ double one_label_row(const Program& program, const Group& group, int rank, int64 row,
                                                bool exists, int64 next,
                                                RowAhead<kVecSize, kVectors, kEdges, kScores, Group, Program>& ahead,
                                                SyncState& sync, Scale& scale) {
  using Input = typename Program::Input;
  using Score = typename Program::Gradient;
  using Index = IndexOf<Group>;
  const int threads = group.num_threads();
  if (exists && !ahead.started) {
    ahead.load_label(program, row);
    ahead.start(program, rank, threads, row);
  }
  ahead.started = true;
  const bool has_next = next < program.space.rows;
  if (has_next) ahead.load_label(program, next);
  const RowTarget<double> t = ahead.target;
  const bool counts = exists && ahead.counts;
  typename Program::Sums sums{0.0, typename Program::Slopes(0)};
  double own = 0.0, factor = 0.0;
  Score smallest = Score(0);
  bool is_linear = false;
  if (counts) {
    own = in_double(widen<Score>(ahead.own));
    const double margin = program.loss.margin();
    if constexpr (Program::Hinge::kLinear) {
      is_linear = is_finite(own - margin);
      if (is_linear) smallest = smallest_active<Score>(own, margin);
    }
    if constexpr (kGradient) factor = grad_factor(scale, t.offset) * (t.weight * program.inverse);
    // Opaque: otherwise it is computed again for each vector.
    const auto active = opaque(Waiting<Input>::from(factor));
    const auto to = program.template gradients_of<kVecSize, kGradient>(t.offset);
    const auto from = program.template scores<kVecSize, kScores>(t.offset);
    const int step = threads * kVecSize;
    const auto apart = from.between(step);
#pragma unroll
    for (int e = 0; e < kEdges; ++e) {
      const Index edge = ahead.edge[e];
      if (edge < 0) continue;
      if (is_linear) {
        if constexpr (Program::Hinge::kLinear) {
          take_linear<kGradient, 1, Program>(to + edge, ahead.of_edge[e], smallest, own, active, sums);
        }
      } else {
        take_classes<kGradient, 1>(program, to + edge, ahead.of_edge[e], edge == t.label ? 0 : -1, own, factor, sums);
      }
    }
    Index first = ahead.first;
    if (is_linear) {
      if constexpr (Program::Hinge::kLinear) {
#pragma unroll 1
        for (Index left = ahead.left; left > 0; left -= kVectors) {
#pragma unroll
          for (int k = 0; k < kVectors; ++k) {
            if (k < left) {
              take_linear<kGradient, kVecSize, Program>(to + (first + static_cast<Index>(k) * step),
                                                        ahead.x[k].get(ahead.shift), smallest, own, active, sums);
            }
          }
          first += kVectors * step;
          ahead.load_more(program, from + first, apart, left - kVectors);
        }
      }
    } else if constexpr (Program::Hinge::kLinear) {
      // The label's score is not finite. Such rows are rare: they are loaded again, one vector at a time.
#pragma unroll 1
      for (Index left = ahead.left; left > 0; --left, first += step) {
        Pack<Input, kVecSize> again;
        if constexpr (kScores == ScoresOfRows::kAlike) {
          again = load_stream<kVecSize>(from + first);
        } else {
#pragma unroll
          for (int i = 0; i < kVecSize; ++i) again.element[i] = from[first + i];
        }
        take_classes<kGradient>(program, to + first, again, target_element<kVecSize>(t, first), own, factor, sums);
      }
    } else {
#pragma unroll 1
      for (Index left = ahead.left; left > 0; left -= kVectors) {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
          if (k < left) {
            const Index at = first + static_cast<Index>(k) * step;
            take_classes<kGradient>(program, to + at, ahead.x[k].get(ahead.shift), target_element<kVecSize>(t, at), own,
                                    factor, sums);
          }
        }
        first += kVectors * step;
        ahead.load_more(program, from + first, apart, left - kVectors);
      }
    }
  }
  if (has_next) ahead.start(program, rank, threads, next);
  sums = group_sum(group, sums, sync);
  if constexpr (Program::Hinge::kLinear) {
    if (is_linear) sums = linear_value(sums, smallest, own, program.loss.margin());
  }
  double value = exists && t.invalid_label ? scalar_nan(0.0) : 0.0;
  if (counts) value = t.weight * (sums.value * program.inverse);
  if constexpr (kGradient) {
    // Other threads may have written the vector that contains the label.
    if constexpr (!Group::kMultiWarp) __syncwarp();
    if (!exists) return 0.0;
    if (!counts) {
      fill_gradients<kVecSize, kScores>(program, group, t.offset, 0.0);
    } else if (value != value) {
      fill_gradients<kVecSize, kScores>(program, group, t.offset, value);
    } else if (rank == 0) {
      const auto to = program.template gradients_of<kVecSize>(t.offset);
      to[t.label] = Narrow<Input>::from(Program::gradient(sums.slopes, -factor));
    }
  }
  if (!exists) return 0.0;
  if (rank == 0) program.store(t, value);
  return value;
}

// Reader of rows of one label. A thread has kVectors vectors in flight, and all its edge elements, at most kEdges.
template <int kVecSize, int kVectors, int kEdges, ScoresOfRows kScores>
struct OneLabelReader {
  template <bool kGradient, class Group, class Program, class Scale>
  struct Visit {
    static constexpr bool kNeedsNextRow = true;
    const Program& program;
    const Group& group;
    Scale& scale;
    int rank;
    RowAhead<kVecSize, kVectors, kEdges, kScores, Group, Program>& ahead;
    __device__ __forceinline__ double operator()(int64 row, bool exists, int64 next, SyncState& sync) const {
      return one_label_row<kGradient>(program, group, rank, row, exists, next, ahead, sync, scale);
    }
  };

  // Visits every row once. The members of `work` may be null.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    // Gradients are written before the first exchange: wait until thread 0 has read the scale.
    if constexpr (Group::kMultiWarp) __syncthreads();
    RowAhead<kVecSize, kVectors, kEdges, kScores, Group, Program> ahead;
    ahead.started = false;
    ahead.last = program.last_row();
    // Opaque: otherwise each row divides by the number of threads.
    const int rank = static_cast<int>(opaque(static_cast<unsigned>(group.thread_rank())));
    for_each_row(group, scale, program.space.rows, chunks, work,
                 Visit<kGradient, Group, Program, Scale>{program, group, scale, rank, ahead});
  }
};

// A row of one label whose classes are not contiguous, as seen by a thread that processes all of its classes, or some.
// Neighbouring threads have neighbouring rows, so that a warp's accesses to each class of its rows are coalesced.
template <bool kGradient, class Program>
struct RowApart {
  using Input = typename Program::Input;
  using Score = typename Program::Gradient;
  using Sums = typename Program::Sums;
  RowTarget<double> target;
  bool counts;
  bool is_linear;
  Score smallest;
  double own, factor;

  template <class Scale>
  __device__ __forceinline__ RowApart(const Program& program, int64 row, Scale& scale)
      : target(program.target(row)), is_linear(false), smallest(0), own(0.0), factor(0.0) {
    counts = target.active && target.weight != 0.0;
    if (!counts) return;
    own = program.score(target.offset, target.label);
    if constexpr (Program::Hinge::kLinear) {
      is_linear = is_finite(own - program.loss.margin());
      if (is_linear) smallest = smallest_active<Score>(own, program.loss.margin());
    }
    if constexpr (kGradient) factor = grad_factor(scale, target.offset) * (target.weight * program.inverse);
  }
  // Processes kTogether classes from each of first, first + stride, ..., with all kTogether in flight: adds their
  // pairs, and writes their gradients. For a linear hinge, the sums are inputs of linear_value().
  template <int kTogether>
  __device__ __forceinline__ Sums add(const Program& program, int64 first, int64 stride) const {
    Sums sums{0.0, typename Program::Slopes(0)};
    if (!counts) return sums;
    const auto from = program.template scores<1>(target.offset);
    const auto to = program.template gradients_of<1, kGradient>(target.offset);
    if constexpr (Program::Hinge::kLinear) {
      if (is_linear) {
        // Opaque: otherwise it is computed again for each class.
        const auto active = opaque(Waiting<Input>::from(factor));
        each_batch<kTogether>(from, program.space.classes, first, stride, TakeLinear{to, smallest, own, active, sums});
        return sums;
      }
    }
    each_batch<kTogether>(from, program.space.classes, first, stride, TakePairs{program, *this, to, sums});
    return sums;
  }
  // Returns the sums of the row. `added` is the sum of what add() has returned for all of its classes.
  __device__ __forceinline__ Sums total(const Program& program, const Sums& added) const {
    if constexpr (Program::Hinge::kLinear) {
      if (is_linear) return linear_value(added, smallest, own, program.loss.margin());
    }
    return added;
  }
  __device__ __forceinline__ double value(const Program& program, const Sums& sums) const {
    if (counts) return target.weight * (sums.value * program.inverse);
    return target.invalid_label ? scalar_nan(0.0) : 0.0;
  }
  // Writes the gradient of the label if first = 0. If the row does not count or its value is NaN, overwrites the
  // gradients of classes first, first + stride, ... instead. Precondition: all threads that share the row have written
  // what add() writes.
  __device__ __forceinline__ void write_rest(const Program& program, const Sums& sums, double value, int64 first,
                                             int64 stride) const {
    if constexpr (kGradient) {
      const auto to = program.template gradients_of<1>(target.offset);
      if (!counts || value != value) {
        const Input filled = Narrow<Input>::from(counts ? value : 0.0);
        for (int64 c = first; c < program.space.classes; c += stride) to[c] = filled;
      } else if (first == 0) {
        to[target.label] = Narrow<Input>::from(Program::gradient(sums.slopes, -factor));
      }
    }
  }

 private:
  struct TakeLinear {
    ClassesOfRow<true, Input> to;
    Score smallest;
    double own;
    Score active;
    Sums& sums;
    __device__ __forceinline__ void operator()(Input* at, int64, const Pack<Input, 1>& x) const {
      take_linear<kGradient, 1, Program>(at, x, smallest, own, active, sums);
    }
  };
  struct TakePairs {
    const Program& program;
    const RowApart& row;
    ClassesOfRow<true, Input> to;
    Sums& sums;
    __device__ __forceinline__ void operator()(Input* at, int64 c, const Pack<Input, 1>& x) const {
      take_classes<kGradient, 1>(program, at, x, c == row.target.label ? 0 : -1, row.own, row.factor, sums);
    }
  };
  template <int kTogether, class Take>
  static __device__ __forceinline__ void each_batch(const ClassesOfRow<true, const Input>& scores, int64 classes,
                                                    int64 first, int64 stride, const Take& take) {
    const Input* from = scores + first;
    Input* to = take.to + first;
#pragma unroll 1
    for (; first < classes; first += stride) {
      const int count = static_cast<int>(min(classes - first, static_cast<int64>(kTogether)));
      VectorAhead<ScoresOfRows::kAlike, Input, 1> x[kTogether];
      load_vectors(from, scores.step, count, x);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (i < count) take(to + i * take.to.step, first + i, x[i].pack[0]);
      }
      from += stride * scores.step;
      to += stride * take.to.step;
    }
  }
};

// Reader of rows of one label whose classes are not contiguous, with one thread per row. The group is a lane.
template <int kTogether>
struct ThreadPerRowReader {
  template <bool kGradient, class Group, class Program, class Scale>
  struct Visit {
    static constexpr bool kNeedsNextRow = false;
    const Program& program;
    Scale& scale;
    __device__ __forceinline__ double operator()(int64 index, bool exists, int64, SyncState&) const {
      if (!exists) return 0.0;
      const RowApart<kGradient, Program> row(program, index, scale);
      const auto sums = row.total(program, row.template add<kTogether>(program, 0, kTogether));
      const double value = row.value(program, sums);
      row.write_rest(program, sums, value, 0, 1);
      program.store(row.target, value);
      return value;
    }
  };

  // Visits every row once. The members of `work` may be null.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    for_each_row(group, scale, program.space.rows, chunks, work,
                 Visit<kGradient, Group, Program, Scale>{program, scale});
  }
};

// A block as a worker whose warps share 32 rows: lane l of every warp has row l. The first warp returns the values of
// the rows, and the others return 0. Precondition: width is 1.
struct WarpsShareRows : BlockOfSubwarps {
  __device__ __forceinline__ int rows_at_once() const {
    return kWarp;
  }
  __device__ __forceinline__ int row_slot() const {
    return threadIdx.x % kWarp;
  }
};

// Reader of rows of one label whose classes are not contiguous, for fewer rows than it takes to keep memory busy with
// one thread per row. Warp w of W processes kTogether classes from each of w kTogether, (W + w) kTogether, ... Sums are
// exchanged through shared memory, with one barrier per 32 rows. It is double-buffered, so that the sums that a warp
// still reads are not those that another one writes. Preconditions: blockDim.x <= 32 kWarps; the group is
// WarpsShareRows.
template <int kTogether, int kWarps>
struct SharedRowReader {
  template <bool kGradient, class Program, class Scale>
  struct Visit {
    using Sums = typename Program::Sums;
    static constexpr bool kNeedsNextRow = false;
    const Program& program;
    Scale& scale;
    Sums (&exchanged)[2][kWarps][kWarp];
    int& turn;

    __device__ __forceinline__ double operator()(int64 index, bool exists, int64, SyncState&) const {
      const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
      auto& of_warps = exchanged[turn];
      turn ^= 1;
      const RowApart<kGradient, Program> row(program, exists ? index : 0, scale);
      if (exists) of_warps[warp][lane] = row.template add<kTogether>(program, warp * kTogether, warps * kTogether);
      __syncthreads();
      if (!exists) return 0.0;
      Sums sums = of_warps[0][lane];
      for (int w = 1; w < warps; ++w) {
        sums.value += of_warps[w][lane].value;
        sums.slopes += of_warps[w][lane].slopes;
      }
      sums = row.total(program, sums);
      const double value = row.value(program, sums);
      row.write_rest(program, sums, value, warp, warps);
      if (warp != 0) return 0.0;
      program.store(row.target, value);
      return value;
    }
  };

  // Visits every row once. The members of `work` may be null.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    __shared__ typename Program::Sums exchanged[2][kWarps][kWarp];
    int turn = 0;
    // Gradients are written before the first exchange: wait until thread 0 has read the scale.
    __syncthreads();
    for_each_row(group, scale, program.space.rows, chunks, work,
                 Visit<kGradient, Program, Scale>{program, scale, exchanged, turn});
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Several labels

// Shared memory of a group: score and class of each label that is sorted; prefix sums of the scores; a histogram
// with as many entries; and a bit for each class that is a label.
template <class Input>
struct ListMemory {
  using Score = typename Waiting<Input>::type;
  double* prefix;     // capacity + 1
  Score* score;       // capacity
  int* classes;       // capacity
  int* histogram;     // capacity + 1
  unsigned* members;  // mask_words

  // Returns the size in bytes of all arrays except `members`.
  static __device__ __forceinline__ constexpr int64 sorted_bytes(int64 capacity) {
    return (capacity + 1) * 8 + capacity * static_cast<int64>(sizeof(Score)) + capacity * 4 + (capacity + 1) * 4;
  }
  template <class Program, class Group>
  __device__ __forceinline__ ListMemory(const Program& program, const Group&) {
    extern __shared__ uint4 staged[];
    const int64 capacity = program.capacity;
    const int64 bytes = ((capacity > 0 ? sorted_bytes(capacity) : 0) + program.mask_words * 4 + 7) / 8 * 8;
    char* at = reinterpret_cast<char*>(staged) + (Group::kMultiWarp ? 0 : threadIdx.x / kWarp) * bytes;
    prefix = reinterpret_cast<double*>(at);
    score = reinterpret_cast<Score*>(prefix + (capacity > 0 ? capacity + 1 : 0));
    classes = reinterpret_cast<int*>(score + capacity);
    histogram = classes + capacity;
    members = reinterpret_cast<unsigned*>(histogram + (capacity > 0 ? capacity + 1 : 0));
  }
};

// Extent of a list of labels: its length, and the position of a label before its end that is no class.
struct ListExtent {
  int64 length;
  int64 bad;  // -1 if there is none
};

// Finds the extent of a list. `label` is label k of the list in lane k of every warp, and -1 past the last place of a
// shorter list. Preconditions: every thread of the group calls it together.
template <class Group, class Program>
__device__ __forceinline__ ListExtent list_extent(const Program& program, const Group& group,
                                                  const int64 (&offset)[kRowStreams], int64 label, SyncState& sync) {
  const unsigned others = __ballot_sync(0xffffffffu, !program.is_class(label));
  if (others != 0u) {
    const int place = __ffs(static_cast<int>(others)) - 1;
    return {place, __shfl_sync(0xffffffffu, label, place) == -1 ? -1 : place};
  }
  // Twice the position of the first label that is no class, plus 1 if it is not the end of the list.
  int64 packed = 2 * program.count;
  for (int64 first = kWarp; first < program.count && packed == 2 * program.count; first += group.num_threads()) {
    const int64 k = first + group.thread_rank();
    if (k < program.count) {
      const int64 other = program.label(offset, k);
      if (!program.is_class(other)) packed = 2 * k + (other != -1);
    }
    packed = group_reduce(group, packed, MinOp{}, sync);
  }
  return {packed / 2, packed % 2 != 0 ? packed / 2 : -1};
}

// Adds the derivatives of labels over the warps of the block, in order; lane k of every warp holds a part of those of
// label k. All threads of the group pass a barrier before it returns.
template <class Group, class Slopes>
__device__ __forceinline__ Slopes sum_of_warps(const Group& group, Slopes slopes) {
  if constexpr (Group::kMultiWarp) {
    __shared__ Slopes of_warp[kWarp][kWarp];
    const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    of_warp[threadIdx.x / kWarp][lane] = slopes;
    __syncthreads();
    slopes = of_warp[0][lane];
    for (int w = 1; w < warps; ++w) slopes += of_warp[w][lane];
  } else {
    __syncwarp();
  }
  return slopes;
}

// A lane's share of a list: the smallest score that has an active pair with the lane's label, and the gradient of a
// class that has as many active pairs as there are lanes before this one.
template <class Program>
struct LaneOfList {
  typename Program::Gradient smallest;
  typename Program::Gradient gradient;
};

// Number of labels whose active pairs are counted in bit fields of one word. The bits above the fields count the active
// pairs of a class with all labels. A field is wide enough for the elements that a thread processes at once.
constexpr int kFields = 5;
constexpr int kFieldBits = 5;
// Elements that a thread processes at once: no more than a field can count, and no more than registers can hold. With
// 16, only code for compute capability 9.0 does not spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int kTakenWords = 8;
#else
constexpr int kTakenWords = 16;
#endif
template <class Input>
constexpr int kTaken = sizeof(Input) <= 4 ? kTakenWords : 4;

// Compares some vectors of a thread with the labels that the lanes of its warp hold, and stores their gradients. Bit e
// of `skipped` is set if element e is a label or does not exist. For a class i with n active pairs, adds n x_i to
// `total`. Two terms of the pairs' sum are left out: the scores x_j of the labels, which are subtracted at the end, for
// each label as often as it is active, and n margin. `origin` is subtracted from each score. Lane j adds the active
// pairs of label j, over all lanes, to `of_label`. Preconditions: all lanes of the warp call it together.
template <bool kGradient, int kVecSize, int kCount, class Program>
__device__ __forceinline__ void take_vectors(const Pack<typename Program::Input, kVecSize>* x, unsigned skipped,
                                             typename Program::Input* to, int64 step, int present, int length,
                                             const LaneOfList<Program>& lane, double origin, double& total,
                                             int& of_label) {
  using Score = typename Program::Gradient;
  constexpr int kElements = kVecSize * kCount;
  static_assert(kElements < 1 << kFieldBits, "as many as a field counts");
  const int place = threadIdx.x % kWarp;
  Score score[kElements];
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    const bool is_skipped = (skipped >> e & 1u) != 0;
    score[e] = is_skipped ? -scalar_infinity(Score()) : widen_element<Score>(x[e / kVecSize], e % kVecSize);
  }
  constexpr int kAbove = kFields * kFieldBits;
  unsigned active[kElements] = {};
#pragma unroll 1
  for (int first = 0; first < length; first += kFields) {
    unsigned counted = 0;
    if (first > 0) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) active[e] = active[e] >> kAbove << kAbove;
    }
#pragma unroll
    for (int field = 0; field < kFields; ++field) {
      // Not checked for the first field: the check would spill a register.
      if (field > 0 && first + field >= length) break;
      const Score smallest = __shfl_sync(0xffffffffu, lane.smallest, first + field);
      const unsigned pair = (1u << kAbove) + (1u << field * kFieldBits);
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        // The comparison is true for NaN.
        add_unless_less(score[e], smallest, pair, active[e]);
      }
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) counted += active[e];
    // Every second field, so that each has room for the sum over a warp.
    constexpr unsigned kWide = 1u << 2 * kFieldBits, kEven = 0x1fu * (1u + kWide + kWide * kWide);
    static_assert(kFields == 5 && kFieldBits == 5, "three even fields, and two odd ones");
    const unsigned even = warp_sum_int(static_cast<int>(counted & kEven));
    const unsigned odd = warp_sum_int(static_cast<int>(counted >> kFieldBits & kEven & (kWide * kWide - 1u)));
    const int field = place - first;
    if (field >= 0 && field < kFields) {
      of_label += static_cast<int>((field % 2 ? odd : even) >> (field / 2 * 2 * kFieldBits) & (kWide - 1u));
    }
  }
#pragma unroll
  for (int e = 0; e < kElements; ++e) {
    const int pairs = static_cast<int>(active[e] >> kAbove);
    double addend = in_double(pairs > 0 ? score[e] : Score(0));
    if constexpr (sizeof(Score) == sizeof(double)) addend = pairs > 0 ? score[e] - origin : 0.0;
    // The product is exact for scores of at most 32 bits.
    total = fma(small_to_double(pairs), addend, total);
  }
  if constexpr (kGradient) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      Score g[kVecSize];
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        g[i] = __shfl_sync(0xffffffffu, lane.gradient, static_cast<int>(active[k * kVecSize + i] >> kAbove));
      }
      if (k < present) {
        store_pack<kVecSize>(to + k * step, NarrowPack<typename Program::Input, kVecSize>::from(g));
      }
    }
  }
}

// Processes the vectors of a batch. Bit e of `skipped` is set if element e of the batch is a label.
template <bool kGradient, int kVecSize, int kVectors, ScoresOfRows kScores, class Program>
__device__ __forceinline__ void take_batch(const VectorAhead<kScores, typename Program::Input, kVecSize> (&x)[kVectors],
                                           int shift, unsigned skipped, typename Program::Input* to, int64 step,
                                           int present, int most_present, int length, const LaneOfList<Program>& lane,
                                           double origin, double& total, int& of_label) {
  static_assert(kVecSize * kVectors <= 32, "a bit for each element");
  constexpr int kMost = kTaken<typename Program::Input> / kVecSize;
  constexpr int kCount = kVectors < kMost ? kVectors : kMost;
  constexpr unsigned kMask = kVecSize * kCount < 32 ? (1u << kVecSize * kCount % 32) - 1u : 0xffffffffu;
#pragma unroll
  for (int k = 0; k < kVectors; k += kCount) {
    if (k >= most_present) break;
    const int left = min(max(present - k, 0), kCount);
    const unsigned absent = left < kCount ? kMask << left * kVecSize : 0u;
    Pack<typename Program::Input, kVecSize> some[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) some[i] = x[k + i].get(shift);
    take_vectors<kGradient, kVecSize, kCount, Program>(some, (skipped >> k * kVecSize | absent) & kMask, to + k * step,
                                                       step, left, length, lane, origin, total, of_label);
  }
}

// Number of threads of a group that processes rows of lists. For a warp it is a constant, so that it is part of the
// vectors' addresses.
template <class Group>
__device__ __forceinline__ int threads_of_list(const Group& group) {
  return Group::kMultiWarp ? group.num_threads() : kWarp;
}

// A row in flight: the labels that the lanes of each warp hold and, if the list ends among them, the row's first
// vectors and the labels' scores, as loaded.
template <int kVecSize, int kVectors, ScoresOfRows kScores, class Group, class Program>
struct ListAhead {
  using Input = typename Program::Input;
  using Index = IndexOf<Group>;

  int64 next;    // label of this lane in the next row
  Index label;   // label of this lane in this row, if lane < length
  bool started;  // false before the first row
  int length;    // length of the list; 0 if nothing has been loaded
  int shift;     // shift of the vectors
  int64 last;    // offset of the last row
  VectorAhead<kScores, Input, kVecSize> x[kVectors];
  Input own;

  // Prefetches a row into L2 if `start` will load only a part of it: the loads of the rest have no work to overlap
  // with.
  __device__ __forceinline__ void prefetch(const Program& program, const Group& group, int rank,
                                           const int64 (&offset)[kRowStreams]) {
    if constexpr (sizeof(Input) * kVecSize == 16 && !Program::kMasked) {
      const auto view = program.template vectors<kVecSize, kScores, Index>(offset);
      if (rank != 0 || view.vectors <= kVectors * threads_of_list(group)) return;
      const auto from = program.template scores<kVecSize, kScores>(offset);
      const Input *first = from + view.head, *end = from + (view.head + view.vectors * kVecSize - 1);
      // Rounded outwards to whole aligned vectors.
      first -= behind_vector<kVecSize>(first);
      end += kVecSize - behind_vector<kVecSize>(end);
      prefetch_l2(first, static_cast<unsigned>(end - first) * static_cast<unsigned>(sizeof(Input)));
    }
  }
  // Starts the loads of a row whose labels are in `next`. Preconditions: every thread of the group calls it together.
  __device__ __forceinline__ void start(const Program& program, const Group& group, int rank,
                                        const int64 (&offset)[kRowStreams]) {
    label = static_cast<Index>(next);
    const unsigned others = __ballot_sync(0xffffffffu, !program.is_class(next));
    length = 0;
    if constexpr (Program::kMasked) {
      if (!program.mask[offset[kRowMask]]) return;
    }
    if (others == 0u) return;
    const int place = __ffs(static_cast<int>(others)) - 1;
    if (__shfl_sync(0xffffffffu, next, place) != -1) return;
    length = place;
    const auto view = program.template vectors<kVecSize, kScores, Index>(offset);
    const int threads = threads_of_list(group), lane = threadIdx.x % kWarp;
    const auto from = program.template scores<kVecSize, kScores>(offset);
    shift = program.template shift_of<kVecSize, kScores>(from + view.head, offset, last);
    load_more(program, from + view.first(rank), from.between(threads * kVecSize), vectors_of(view, rank, threads));
    if (lane < length) own = program.raw(offset, label);
  }
  template <class Step>
  __device__ __forceinline__ void load_more(const Program& program, const Input* from, Step step, Index count) {
    load_vectors(from, step, count, x, shift, program.space.class_stride[kLogits]);
  }
  template <class View>
  static __device__ __forceinline__ Index vectors_of(const View& view, int rank, int threads) {
    const Index numerator = view.vectors - rank + threads - 1;
    return numerator < 0 ? Index(0) : numerator >> exponent_of(threads);
  }
};

// Case 2 of the file header, for a row whose loads have been started. Returns false, and has written nothing, if the
// score of a label is not finite. Preconditions: every thread of the group calls it together; ahead.length > 0.
template <bool kGradient, int kVecSize, int kVectors, ScoresOfRows kScores, class Group, class Program>
__device__ __forceinline__ bool list_in_lanes(const Program& program, const Group& group, int rank,
                                              const int64 (&offset)[kRowStreams],
                                              ListAhead<kVecSize, kVectors, kScores, Group, Program>& ahead,
                                              double factor, typename Program::Sums& sums) {
  using Input = typename Program::Input;
  using Score = typename Program::Gradient;
  using Index = IndexOf<Group>;
  const int threads = threads_of_list(group), place = threadIdx.x % kWarp, length = ahead.length;
  const double own = place < length ? in_double(widen<Score>(ahead.own)) : scalar_infinity(0.0);
  const double margin = program.loss.margin();
  if (__any_sync(0xffffffffu, (place < length && !is_finite(own)) || !is_finite(margin))) return false;
  const auto view = program.template vectors<kVecSize, kScores, Index>(offset);
  // Opaque: otherwise they are computed again for each vector.
  auto from = program.template scores<kVecSize, kScores>(offset);
  auto to = program.template gradients_of<kVecSize, kGradient>(offset);
  from.row = opaque(from.row);
  if constexpr (kGradient) to.row = opaque(to.row);
  LaneOfList<Program> lane;
  lane.smallest = smallest_active<Score>(place < length ? own : 0.0, margin);
  lane.gradient = Program::gradient(place, factor);
  double origin = 0.0;
  if constexpr (sizeof(Score) == sizeof(double)) origin = subwarp_reduce(own, kWarp, MinOp{});
  // Rank of the thread whose vectors contain the lane's label, and the label's index among that thread's elements.
  const Index position = ahead.label - view.head, vector = position / kVecSize;
  const bool in_vectors = place < length && position >= 0 && vector < view.vectors;
  const int owner = in_vectors ? static_cast<int>(vector & (threads - 1)) : -1;
  const Index element = (vector >> exponent_of(threads)) * kVecSize + position % kVecSize;
  int of_label = 0;
  if (view.head + view.tail > 0) {
    const Index edge = view.edge_class(rank);
    unsigned skipped = edge < 0 ? 1u : 0u;
#pragma unroll 1
    for (int j = 0; j < length; ++j) skipped |= __shfl_sync(0xffffffffu, ahead.label, j) == edge ? 1u : 0u;
    Pack<Input, 1> of_edge{};
    if (edge >= 0) of_edge = load_stream<1>(from + edge);
    take_vectors<kGradient, 1, 1, Program>(&of_edge, skipped, to + max(edge, Index(0)), 0, edge >= 0, length, lane,
                                           origin, sums.value, of_label);
  }
  const int step = threads * kVecSize;
  const Index num_vectors = ahead.vectors_of(view, rank, threads), most = ahead.vectors_of(view, rank - place, threads);
  Index first = view.first(rank);
  // All lanes of a warp run the same number of turns, because each holds labels for the others.
#pragma unroll 1
  for (Index turn = 0; turn < most; turn += kVectors) {
    unsigned skipped = 0;
#pragma unroll 1
    for (int j = 0; j < length; ++j) {
      const int owner_of_label = __shfl_sync(0xffffffffu, owner, j);
      const Index at = __shfl_sync(0xffffffffu, element, j) - turn * kVecSize;
      if (owner_of_label == rank && at >= 0 && at < kVecSize * kVectors) skipped |= 1u << static_cast<int>(at);
    }
    const int present = static_cast<int>(min(max(num_vectors - turn, Index(0)), Index(kVectors)));
    const int most_present = static_cast<int>(min(most - turn, Index(kVectors)));
    take_batch<kGradient, kVecSize, kVectors, kScores, Program>(ahead.x, ahead.shift, skipped, to + first,
                                                                to.between(step), present, most_present, length, lane,
                                                                origin, sums.value, of_label);
    first += kVectors * step;
    ahead.load_more(program, from + first, from.between(step), num_vectors - turn - kVectors);
  }
  if (place < length) {
    sums.value -= small_to_double(of_label) * (in_double(widen<Score>(ahead.own)) - origin);
  }
  sums.slopes = of_label;
  if constexpr (kGradient) {
    // Only after a barrier: other threads have written 0 to the gradients of labels.
    of_label = sum_of_warps(group, of_label);
    int times = 0;
    bool is_first = true;
#pragma unroll 1
    for (int j = 0; j < length; ++j) {
      const bool same = __shfl_sync(0xffffffffu, ahead.label, j) == ahead.label;
      times += same;
      is_first &= !(same && j < place);
    }
    if (rank < length && is_first) to[ahead.label] = Narrow<Input>::from(Program::gradient(of_label * times, -factor));
  }
  return true;
}

// Marks the classes of a list. Preconditions: every thread of the group calls it together; mask_words > 0.
template <class Group, class Program, class Memory>
__device__ __forceinline__ void mark_members(const Program& program, const Group& group,
                                             const int64 (&offset)[kRowStreams], int64 length, const Memory& memory) {
  const int rank = group.thread_rank(), threads = group.num_threads();
  for (int64 w = rank; w < program.mask_words; w += threads) memory.members[w] = 0;
  group_sync(group);
  for (int64 k = rank; k < length; k += threads) {
    const int64 label = program.label(offset, k);
    atomicOr(memory.members + label / 32, 1u << (label % 32));
  }
  group_sync(group);
}

// Functors rather than lambdas, because NVRTC 11 considers lambdas host functions.

// True for classes that are labels: looks at their bits, or searches the list if there are none.
template <class Program, class Memory>
struct IsLabel {
  const Program& program;
  const int64 (&offset)[kRowStreams];
  int64 length;
  const Memory& memory;

  __device__ __forceinline__ bool operator()(int64 c) const {
    if (program.mask_words > 0) return (memory.members[c / 32] >> (c % 32) & 1u) != 0;
#pragma unroll 1
    for (int64 k = 0; k < length; ++k) {
      if (program.label(offset, k) == c) return true;
    }
    return false;
  }
};

// Case 4 of the file header. Preconditions: every thread of the group calls it together.
template <bool kGradient, class Group, class Program>
__device__ __forceinline__ void list_in_memory(const Program& program, const Group& group,
                                               const int64 (&offset)[kRowStreams], int64 length, double factor,
                                               double& total, SyncState& sync) {
  using Input = typename Program::Input;
  using Memory = ListMemory<Input>;
  const Memory memory(program, group);
  using Slopes = typename Program::Slopes;
  const int rank = group.thread_rank(), threads = group.num_threads();
  group_sync(group);
  if (program.mask_words > 0) mark_members(program, group, offset, length, memory);
  const auto to = program.template gradients_of<1, kGradient>(offset);
  const IsLabel<Program, Memory> is_label{program, offset, length, memory};
#pragma unroll 1
  for (int64 c = rank; c < program.space.classes; c += threads) {
    if (is_label(c)) continue;
    const double x = program.score(offset, c);
    Slopes slopes = Slopes(0);
#pragma unroll 1
    for (int64 k = 0; k < length; ++k) {
      slopes += program.add(program.excess(x, program.score(offset, program.label(offset, k))), total);
    }
    if constexpr (kGradient) to[c] = Narrow<Input>::from(Program::gradient(slopes, factor));
  }
  if constexpr (kGradient) {
#pragma unroll 1
    for (int64 k = 0; k < length; ++k) {
      const int64 label = program.label(offset, k);
      int listed = 0;
      bool before = false;
#pragma unroll 1
      for (int64 l = rank; l < length; l += threads) {
        if (program.label(offset, l) != label) continue;
        ++listed;
        before |= l < k;
      }
      if (group_any(group, before)) continue;
      listed = group_reduce(group, listed, AddOp{}, sync);
      const double own = program.score(offset, label);
      Slopes slopes = Slopes(0);
      double unused = 0.0;
#pragma unroll 1
      for (int64 c = rank; c < program.space.classes; c += threads) {
        if (!is_label(c)) slopes += program.add(program.excess(program.score(offset, c), own), unused);
      }
      slopes = group_reduce(group, slopes, AddOp{}, sync);
      if (rank == 0) {
        to[label] = Narrow<Input>::from(Program::gradient(slopes * static_cast<Slopes>(listed), -factor));
      }
    }
  }
}

// Sorts the labels of a list by score, then by class. A bitonic network for any length: all comparisons put the smaller
// element first, so that missing elements at the end count as infinite. Preconditions: every thread of the group calls
// it together.
template <class Group, class Memory>
__device__ __forceinline__ void sort_labels(const Group& group, int length, const Memory& memory) {
  const int rank = group.thread_rank(), threads = group.num_threads();
#pragma unroll 1
  for (int size = 2; size < 2 * length; size *= 2) {
#pragma unroll 1
    for (int step = size / 2; step > 0; step /= 2) {
#pragma unroll 1
      for (int i = rank; i < length; i += threads) {
        // The first step of each size compares with the mirrored second half.
        const int other = step == size / 2 ? i ^ (size - 1) : i ^ step;
        if (other <= i || other >= length) continue;
        const auto a = memory.score[i], b = memory.score[other];
        const int class_a = memory.classes[i], class_b = memory.classes[other];
        if (b < a || (b == a && class_b < class_a)) {
          memory.score[i] = b;
          memory.score[other] = a;
          memory.classes[i] = class_b;
          memory.classes[other] = class_a;
        }
      }
      group_sync(group);
    }
  }
}

// Returns the number of active pairs of a class, 0 for a label. Adds their sum to `total`, and the class to the
// histogram.
template <class Program, class Memory>
struct SortedList {
  const Program& program;
  const Memory& memory;
  int length;
  double lowest;
  double& total;

  __device__ __forceinline__ int operator()(int64 c, typename Program::Input raw) const {
    if ((memory.members[c / 32] >> (c % 32) & 1u) != 0) return 0;
    const double x = widen<double>(raw);
    int active = 0;
#pragma unroll 1
    for (int above = length; active < above;) {
      const int middle = (active + above) / 2;
      const bool is_active = !(program.excess(x, static_cast<double>(memory.score[middle])) <= 0.0);
      active = is_active ? middle + 1 : active;
      above = is_active ? above : middle;
    }
    if (active > 0) total += active * program.excess(x, lowest) - memory.prefix[active];
    atomicAdd(memory.histogram + active, 1);
    return active;
  }
};

// Case 3 of the file header. Returns false, and has written nothing, if the score of a label is not finite.
// Preconditions: every thread of the group calls it together.
template <bool kGradient, int kVecSize, class Group, class Program>
__device__ __forceinline__ bool list_sorted(const Program& program, const Group& group,
                                            const int64 (&offset)[kRowStreams], int length, double factor,
                                            double& total) {
  using Input = typename Program::Input;
  using Memory = ListMemory<Input>;
  const int rank = group.thread_rank(), threads = group.num_threads(), lane = threadIdx.x % kWarp;
  const Memory memory(program, group);
  // Wait until no thread reads the shared memory of the previous row.
  group_sync(group);
  bool infinite = false;
#pragma unroll 1
  for (int k = rank; k < length; k += threads) {
    const int64 label = program.label(offset, k);
    const auto own = widen<typename Program::Gradient>(program.raw(offset, label));
    memory.score[k] = own;
    memory.classes[k] = static_cast<int>(label);
    infinite |= !is_finite(own);
  }
  if (group_any(group, infinite)) return false;
  mark_members(program, group, offset, length, memory);
#pragma unroll 1
  for (int k = rank; k <= length; k += threads) memory.histogram[k] = 0;
  sort_labels(group, length, memory);
  const double lowest = static_cast<double>(memory.score[0]);
  const int part = (length + kWarp - 1) / kWarp;
  const int begin = min(lane * part, length), end = min(begin + part, length);
  if (rank < kWarp) {
    double sum = 0.0;
#pragma unroll 1
    for (int k = begin; k < end; ++k) {
      memory.prefix[k] = sum;
      sum += static_cast<double>(memory.score[k]) - lowest;
    }
    double before = 0.0;
#pragma unroll 1
    for (int l = 0; l < kWarp; ++l) {
      const double of_lane = __shfl_sync(0xffffffffu, sum, l);
      before += l < lane ? of_lane : 0.0;
    }
#pragma unroll 1
    for (int k = begin; k < end; ++k) memory.prefix[k] += before;
    if (lane == kWarp - 1) memory.prefix[length] = before + sum;
  }
  group_sync(group);
  const auto view = program.template view<kVecSize>(offset);
  const auto from = program.template scores<kVecSize>(offset);
  const auto to = program.template gradients_of<kVecSize, kGradient>(offset);
  const SortedList<Program, Memory> take{program, memory, length, lowest, total};
  const int64 edge = view.edge_class(rank);
  if (edge >= 0) {
    const int active = take(edge, from[edge]);
    if constexpr (kGradient) to[edge] = Narrow<Input>::from(Program::gradient(active, factor));
  }
#pragma unroll 1
  for (int64 v = rank; v < view.vectors; v += threads) {
    const Pack<Input, kVecSize> x = load_stream<kVecSize>(from + view.first(v));
    typename Program::Gradient g[kVecSize];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) g[i] = Program::gradient(take(view.first(v) + i, x.element[i]), factor);
    if constexpr (kGradient) {
      store_pack<kVecSize>(to + view.first(v), NarrowPack<Input, kVecSize>::from(g));
    }
  }
  if constexpr (!kGradient) return true;
  group_sync(group);
  // Suffix sums: histogram[k + 1] becomes the number of classes with more than k active pairs.
  if (rank < kWarp) {
    int sum = 0;
#pragma unroll 1
    for (int k = end - 1; k >= begin; --k) {
      sum += memory.histogram[k + 1];
      memory.histogram[k + 1] = sum;
    }
    int suffix = 0;
#pragma unroll 1
    for (int l = 0; l < kWarp; ++l) {
      const int of_lane = __shfl_sync(0xffffffffu, sum, l);
      suffix += l > lane ? of_lane : 0;
    }
#pragma unroll 1
    for (int k = begin; k < end; ++k) memory.histogram[k + 1] += suffix;
  }
  group_sync(group);
#pragma unroll 1
  for (int k = rank; k < length; k += threads) {
    // Places of a label that is listed several times are neighbours.
    const int label = memory.classes[k];
    if (k > 0 && memory.classes[k - 1] == label) continue;
    int times = 1;
    while (k + times < length && memory.classes[k + times] == label) ++times;
    to[label] = Narrow<Input>::from(Program::gradient(memory.histogram[k + 1] * times, -factor));
  }
  return true;
}

template <class Program>
__device__ __forceinline__ int64 label_of_lane(const Program& program, const int64 (&offset)[kRowStreams]) {
  const int lane = threadIdx.x % kWarp;
  return lane < program.count ? program.label(offset, lane) : -1;
}

// Reports that position `bad` of the list of a row has a label that is no class.
template <class Program>
__device__ __forceinline__ void report_list(const Program& program, const int64 (&offset)[kRowStreams], int64 bad) {
  const int64 at = offset[kResults], outer = at / program.inner;
  const int64 place = (outer * program.count + bad) * program.inner + (at - outer * program.inner);
  report_label(program.status, program.site, place, program.label(offset, bad), program.space.classes);
}

// Ends a row whose hinges sum to `sum`: stores its value, and its gradients if all of them have the same value.
template <bool kGradient, int kVecSize, class Group, class Program>
__device__ __forceinline__ double end_list(const Program& program, const Group& group, int rank,
                                           const int64 (&offset)[kRowStreams], const ListExtent& list, bool counts,
                                           double sum) {
  const bool invalid = list.bad >= 0;
  const double value = invalid ? scalar_nan(0.0) : sum * program.inverse;
  if constexpr (kGradient) {
    if (!counts || value != value) {
      // Only after other threads have written their gradients.
      group_sync(group);
      fill_gradients<kVecSize>(program, group, offset, counts ? value : 0.0);
    }
  }
  if (rank == 0) {
    if (invalid) report_list(program, offset, list.bad);
    program.store(offset, value);
  }
  return value;
}

// Processes a row that list_in_lanes() does not. Preconditions: every thread of the group calls it together; a group is
// a warp or a block.
template <bool kGradient, int kVecSize, class Group, class Program>
__device__ __forceinline__ void list_by_memory(const Program& program, const Group& group,
                                               const int64 (&offset)[kRowStreams], int64 length, double factor,
                                               double& total, SyncState& sync) {
  bool done = false;
  if constexpr (Program::Hinge::kLinear) {
    if (length >= kWarp && length <= program.capacity) {
      done = list_sorted<kGradient, kVecSize>(program, group, offset, static_cast<int>(length), factor, total);
    }
  }
  if (!done) list_in_memory<kGradient>(program, group, offset, length, factor, total, sync);
}

// Vector size in rows that are read again.
template <int kVecSize, ScoresOfRows kScores>
constexpr int kAgain = kScores == ScoresOfRows::kAlike || kScores == ScoresOfRows::kWhole ? kVecSize : 1;

// Processes the row of a group, which is a warp or a block, and returns its value. With kDefers, rows of long lists are
// left to deferred_rows(): `deferred` is set, nothing has been written, and the value is 0. Preconditions: every thread
// of the group calls it together.
template <bool kGradient, bool kDefers, int kVecSize, int kVectors, ScoresOfRows kScores, class Group, class Program,
          class Scale>
__device__ __forceinline__ double list_row(const Program& program, const Group& group, int rank, int64 row, bool exists,
                                           int64 next, ListAhead<kVecSize, kVectors, kScores, Group, Program>& ahead,
                                           SyncState& sync, Scale& scale, bool& deferred) {
  int64 offset[kRowStreams], of_next[kRowStreams];
  program.space.offsets(exists ? row : 0, offset);
  if (!ahead.started) {
    ahead.next = label_of_lane(program, offset);
    ahead.start(program, group, rank, offset);
    ahead.started = true;
  }
  const bool has_next = next < program.space.rows;
  if (has_next) {
    program.space.offsets(next, of_next);
    ahead.next = label_of_lane(program, of_next);
    if constexpr (!Group::kMultiWarp) ahead.prefetch(program, group, rank, of_next);
  }
  bool counts = exists;
  if constexpr (Program::kMasked) counts = counts && program.mask[offset[kRowMask]];
  ListExtent list{ahead.length, -1};
  if (counts && ahead.length == 0) list = list_extent(program, group, offset, label_of_lane(program, offset), sync);
  counts = counts && list.bad < 0 && list.length > 0;
  typename Program::Sums sums{0.0, typename Program::Slopes(0)};
  bool in_lanes = false;
  deferred = false;
  if (counts) {
    double factor = 0.0;
    if constexpr (kGradient) factor = grad_factor(scale, offset) * program.inverse;
    if constexpr (Program::Hinge::kLinear) {
      if (ahead.length > 0) {
        in_lanes = list_in_lanes<kGradient>(program, group, rank, offset, ahead, factor, sums);
      }
    }
    deferred = kDefers && !in_lanes;
    if (!kDefers && !in_lanes) {
      list_by_memory<kGradient, kAgain<kVecSize, kScores>>(program, group, offset, list.length, factor, sums.value,
                                                           sync);
    }
  }
  if (has_next) ahead.start(program, group, rank, of_next);
  sums = group_sum(group, sums, sync);
  if (!exists || deferred) return 0.0;
  if constexpr (Program::Hinge::kLinear) {
    if (in_lanes) sums.value += small_to_double(sums.slopes) * program.loss.margin();
  }
  return end_list<kGradient, kAgain<kVecSize, kScores>>(program, group, rank, offset, list, counts, sums.value);
}

// Processes a row for which list_in_lanes() has written nothing, with all threads of a warp or of a block. Returns its
// value. Preconditions: every thread of the group calls it together; `sync` is the group's.
template <bool kGradient, int kVecSize, class Group, class Program, class Scale>
__device__ __forceinline__ double row_by_memory(const Program& program, const Group& group, int64 row, SyncState& sync,
                                                Scale& scale) {
  int64 offset[kRowStreams];
  program.space.offsets(row, offset);
  const ListExtent list = list_extent(program, group, offset, label_of_lane(program, offset), sync);
  const bool counts = list.bad < 0 && list.length > 0;
  double factor = 0.0;
  if constexpr (kGradient) factor = grad_factor(scale, offset) * program.inverse;
  typename Program::Sums sums{0.0, typename Program::Slopes(0)};
  if (counts) list_by_memory<kGradient, kVecSize>(program, group, offset, list.length, factor, sums.value, sync);
  sums = group_sum(group, sums, sync);
  return end_list<kGradient, kVecSize>(program, group, group.thread_rank(), offset, list, counts, sums.value);
}

// Processes the rows that the warps of a block have deferred, one after another, with all threads. Returns the value of
// this warp's row if it was deferred, and otherwise `value`. Preconditions: every thread of the block calls it
// together.
template <bool kGradient, int kVecSize, class Program, class Scale>
__device__ __forceinline__ double deferred_rows(const Program& program, int64 row, bool deferred, SyncState& sync,
                                                Scale& scale, double value) {
  __shared__ int64 rows[kWarp];
  const ClusterGroup<1> block;
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  if (threadIdx.x % kWarp == 0) rows[warp] = deferred ? row : -1;
  __syncthreads();
#pragma unroll 1
  for (int w = 0; w < warps; ++w) {
    if (rows[w] < 0) continue;
    const double of_row = row_by_memory<kGradient, kVecSize>(program, block, rows[w], sync, scale);
    if (w == warp) value = of_row;
  }
  return value;
}

// True for blocks whose warps process a row each, unless its list is long.
template <class Group>
constexpr bool kDefersRows = kSameType<Group, BlockOfSubwarps>;
// The group that processes a row.
template <class Group>
using RowGroup = Choose<kDefersRows<Group>, SubwarpGroup, Group>;

// Reader of rows of lists of labels. A thread has kVectors vectors in flight.
template <int kVecSize, int kVectors, ScoresOfRows kScores>
struct ListReader {
  template <bool kGradient, class Group, class Program, class Scale>
  struct Visit {
    static constexpr bool kNeedsNextRow = true;
    using OfRow = RowGroup<Group>;
    const Program& program;
    const Group& group;
    Scale& scale;
    int rank;
    ListAhead<kVecSize, kVectors, kScores, OfRow, Program>& ahead;
    SyncState& of_block;  // exchanges of deferred rows
    __device__ __forceinline__ double operator()(int64 row, bool exists, int64 next, SyncState& sync) const {
      constexpr bool kDefers = kDefersRows<Group>;
      const OfRow& of_row = group;
      bool deferred;
      const double value =
          list_row<kGradient, kDefers>(program, of_row, rank, row, exists, next, ahead, sync, scale, deferred);
      if constexpr (kDefers) {
        if (__syncthreads_or(deferred) != 0) {
          return deferred_rows<kGradient, kAgain<kVecSize, kScores>>(program, row, deferred, of_block, scale, value);
        }
      }
      return value;
    }
  };

  // Visits every row once. The members of `work` may be null.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    // Gradients are written before the first exchange: wait until thread 0 has read the scale.
    if constexpr (Group::kMultiWarp) __syncthreads();
    ListAhead<kVecSize, kVectors, kScores, RowGroup<Group>, Program> ahead;
    ahead.started = false;
    ahead.last = program.last_row();
    SyncState of_block{0, 0};
    const int rank = static_cast<int>(opaque(static_cast<unsigned>(group.thread_rank())));
    for_each_row(group, scale, program.space.rows, chunks, work,
                 Visit<kGradient, Group, Program, Scale>{program, group, scale, rank, ahead, of_block});
  }
};
