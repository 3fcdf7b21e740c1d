// Margin losses of many rows of few contiguous classes, with a list of labels each, or one label: one thread per row.
// Formula, value and gradient are those of row_margin.cuh.
//
// Lists (ThreadPerListReader):
// 1. The warp starts coalesced copies of its rows to shared memory. Meanwhile, each lane reads the labels of its row up
//    to the end of the list, several at a time.
// 2. A lane iterates over the classes that are no labels, and for each over the list. The gradient of a class
//    overwrites its score. Few labels and the counts of their active pairs are held in registers; the derivatives of
//    longer lists are added in shared memory.
// 3. The lane writes the gradients of its labels over their scores, and the warp writes the rows back, coalesced.
//
// With a warp per row, most lanes are idle, and every row pays for the length of its list, its reductions and the row
// itself: 2^20 rows of 20 classes with five labels took 1.84 ms on an H100, and take 0.25.
//
// One label (ThreadPerLabelReader): a warp has two buffers for rows. The next rows are copied to one of them while each
// lane processes its row in the other one as one_label_row does, two classes of 16 bits at a time if their number is
// even.
//
// A warp owns its rows and lists; only __syncwarp separates the steps. Traffic: scores are read once and gradients are
// written once; of labels, the sectors up to the end of the list are read. Order of additions: by class, then by label.
//
// Preconditions: rows have one dimension, and are contiguous except with ThreadPerListReader<true>; lists have at most
// program.capacity labels, and their rows C <= 128.
#pragma once
#include "row_margin/row_margin.cuh"
#include "softmax/rows_of_warp.cuh"

// Labels that a lane reads together.
constexpr int kLabelsTogether = 4;
// Maximum number of labels of a list that a lane holds in registers.
constexpr int kFewLabels = 8;

// Shared memory of a lane for its list: a bit for each class that is a label; and for label k, its class and the
// derivatives of its pairs, in a byte if they are a count. The threads of a block have theirs interleaved, after the
// scores of all rows.
template <class Program>
struct LaneList {
  using Slopes = Choose<Program::Hinge::kLinear, unsigned char, double>;
  unsigned* members;
  Slopes* slopes;
  unsigned char* classes;
  int words;  // of members

  __device__ __forceinline__ explicit LaneList(const Program& program)
      : words((static_cast<int>(program.space.classes) + 31) / 32) {
    extern __shared__ uint4 staged[];
    const int threads = blockDim.x, places = static_cast<int>(program.capacity) * threads;
    const int pitch = row_pitch<typename Program::Input>(static_cast<int>(program.space.classes));
    const int rows = (threads * pitch * static_cast<int>(sizeof(typename Program::Input)) + 7) / 8 * 8;
    members = reinterpret_cast<unsigned*>(reinterpret_cast<char*>(staged) + rows);
    slopes = reinterpret_cast<Slopes*>(members + words * threads);
    classes = reinterpret_cast<unsigned char*>(slopes + places);
  }
  __device__ __forceinline__ int place(int k) const {
    return k * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
  }
  __device__ __forceinline__ void clear() const {
    for (int w = 0; w < words; ++w) members[place(w)] = 0;
  }
  // Sets label k of the list.
  __device__ __forceinline__ void put(int k, int label) const {
    classes[place(k)] = static_cast<unsigned char>(label);
    members[place(label / 32)] |= 1u << label % 32;
  }
  __device__ __forceinline__ bool has(int c) const {
    return (members[place(c / 32)] >> c % 32 & 1u) != 0;
  }
  // Returns the number of classes that are labels.
  __device__ __forceinline__ int distinct() const {
    int count = 0;
    for (int w = 0; w < words; ++w) count += __popc(members[place(w)]);
    return count;
  }
  template <class Source>
  __device__ __forceinline__ typename Program::Gradient score(const Source& source, int k) const {
    return widen<typename Program::Gradient>(source.read(classes[place(k)]).element[0]);
  }
  // Returns how often label k occurs in the list, which has `length` labels.
  __device__ __forceinline__ int times(int k, int length) const {
    int count = 0;
#pragma unroll 1
    for (int l = 0; l < length; ++l) count += classes[place(l)] == classes[place(k)] ? 1 : 0;
    return count;
  }
};

// Reads the list of a row to its end.
template <class Program>
__device__ __forceinline__ ListExtent read_list(const Program& program, const int64 (&offset)[kRowStreams],
                                                const LaneList<Program>& list) {
  const int places = static_cast<int>(program.count);
  list.clear();
#pragma unroll 1
  for (int first = 0; first < places; first += kLabelsTogether) {
    int64 labels[kLabelsTogether];
#pragma unroll
    for (int i = 0; i < kLabelsTogether; ++i) labels[i] = first + i < places ? program.label(offset, first + i) : -1;
#pragma unroll
    for (int i = 0; i < kLabelsTogether; ++i) {
      if (!program.is_class(labels[i])) return {first + i, labels[i] == -1 ? -1 : first + i};
      list.put(first + i, static_cast<int>(labels[i]));
    }
  }
  return {places, -1};
}

// Does what list_of_thread does, for at most kFewLabels labels and a hinge that is z itself. Counts the active pairs of
// each class and each label, by comparisons in registers as in list_in_lanes. In float32, the scores of labels are kept
// in registers, and -inf, which has no active pair, takes their places in the row; other dtypes leave no registers for
// them. Returns false, and has written nothing, if the score of a label is not finite.
template <bool kGradient, class Program, class Source>
__device__ __forceinline__ bool few_labels_of_thread(const Program& program, const Source& source,
                                                     const LaneList<Program>& list, int length, double factor,
                                                     double& total) {
  using Input = typename Program::Input;
  using Score = typename Program::Gradient;
  const double margin = program.loss.margin();
  // The number of active pairs of each label has a byte: it is at most 255.
  constexpr int kBytes = 4, kCounters = kFewLabels / kBytes;
  constexpr bool kMasks = sizeof(Input) == 4;
  Score smallest[kFewLabels], own[kMasks ? kFewLabels : 1];
  unsigned active[kCounters] = {};
  // Scores in double are added as differences from the lowest score of a label.
  double origin = 0.0;
  bool finite = is_finite(margin);
#pragma unroll
  for (int k = 0; k < kFewLabels; ++k) {
    smallest[k] = scalar_infinity(Score());
    if (k >= length) continue;
    const Score score = list.score(source, k);
    if constexpr (kMasks) own[k] = score;
    const double of_label = in_double(score);
    finite = finite && is_finite(of_label);
    smallest[k] = smallest_active<Score>(of_label, margin);
    if constexpr (sizeof(Score) == sizeof(double)) origin = k == 0 || of_label < origin ? of_label : origin;
  }
  if (!finite) return false;
#pragma unroll
  for (int k = 0; k < kFewLabels; ++k) {
    if (kMasks && k < length) source.mask_out(list.classes[list.place(k)]);
  }
  double sum = 0.0;
  unsigned members = 0;
#pragma unroll 1
  for (int c = 0; c < source.classes(); ++c) {
    if constexpr (!kMasks) {
      if (c % 32 == 0) members = list.members[list.place(c / 32)];
      if (members >> c % 32 & 1u) continue;
    }
    const Score x = widen<Score>(source.read(c).element[0]);
    int count = 0;
#pragma unroll
    for (int j = 0; j < kCounters; ++j) {
      unsigned of_class = 0;
#pragma unroll
      for (int i = 0; i < kBytes; ++i) {
        // The comparison is true for NaN.
        if (!(x < smallest[j * kBytes + i])) of_class += 1u << 8 * i;
      }
      active[j] += of_class;
      count += static_cast<int>(of_class * 0x01010101u >> 24);
    }
    // An infinite score is also active with the infinity that stands for missing labels.
    count = min(count, length);
    if (count > 0) sum += small_to_double(count) * (in_double(x) - origin);
    if constexpr (kGradient) {
      source.overwrite(
          c, {{Narrow<Input>::from(Waiting<Input>::from(count == 0 ? 0.0 : small_to_double(count) * factor))}});
    }
  }
  const auto pairs_of = [&](int k) { return static_cast<int>(active[k / kBytes] >> k % kBytes * 8 & 255u); };
#pragma unroll
  for (int k = 0; k < kFewLabels; ++k) {
    if (k >= length) continue;
    const double of_label = in_double(kMasks ? own[kMasks ? k : 0] : list.score(source, k));
    sum += small_to_double(pairs_of(k)) * (margin - (of_label - origin));
  }
  total += sum;
  if constexpr (kGradient) {
    const bool repeated = list.distinct() != length;
#pragma unroll
    for (int k = 0; k < kFewLabels; ++k) {
      if (k >= length) continue;
      const int times = repeated ? list.times(k, length) : 1;
      const int c = list.classes[list.place(k)];
      source.overwrite(c, {{Narrow<Input>::from(Program::gradient(pairs_of(k) * times, -factor))}});
    }
  }
  return true;
}

// Processes the row of a lane, whose scores are in `source`, and overwrites them with the gradients. Returns the sum of
// the hinges.
template <bool kGradient, class Program, class Source>
__device__ __forceinline__ double list_of_thread(const Program& program, const Source& source,
                                                 const LaneList<Program>& list, int length, double factor) {
  using Input = typename Program::Input;
  using Score = typename Program::Gradient;
  using Slopes = typename Program::Slopes;
  double total = 0.0;
  if constexpr (Program::Hinge::kLinear) {
    if (length <= kFewLabels && few_labels_of_thread<kGradient>(program, source, list, length, factor, total)) {
      return total;
    }
  }
  using Kept = typename LaneList<Program>::Slopes;
  if constexpr (kGradient) {
#pragma unroll 1
    for (int k = 0; k < length; ++k) list.slopes[list.place(k)] = Kept(0);
  }
#pragma unroll 1
  for (int c = 0; c < source.classes(); ++c) {
    if (list.has(c)) continue;
    const double x = in_double(widen<Score>(source.read(c).element[0]));
    Slopes of_class(0);
#pragma unroll 2
    for (int k = 0; k < length; ++k) {
      // The scores of labels stay in place until the end.
      const Slopes slope = program.add(program.excess(x, in_double(list.score(source, k))), total);
      of_class += slope;
      if constexpr (kGradient) list.slopes[list.place(k)] += static_cast<Kept>(slope);
    }
    if constexpr (kGradient) source.overwrite(c, {{Narrow<Input>::from(Program::gradient(of_class, factor))}});
  }
  if constexpr (kGradient) {
#pragma unroll 1
    for (int k = 0; k < length; ++k) {
      const int c = list.classes[list.place(k)];
      const Slopes slopes =
          static_cast<Slopes>(list.slopes[list.place(k)]) * static_cast<Slopes>(list.times(k, length));
      source.overwrite(c, {{Narrow<Input>::from(Program::gradient(slopes, -factor))}});
    }
  }
  return total;
}

// Visits every row once, by Reader::visit. The members of `work` may be null.
template <bool kGradient, class Reader, class Program, class Scale>
__device__ __forceinline__ void sweep_rows_of_warps(const Program& program, const SubwarpGroup& group, Scale& scale,
                                                    int64 chunks, const Workspace& work) {
  const int64 rows = program.space.rows, step = chunks * kWarp;
  for_each_chunk(group, scale, chunks, work, [&](int chunk) {
    double total = 0.0;
    int64 first = static_cast<int64>(chunk) * kWarp;
    int buffer = 0;
    typename Reader::template Ahead<Program> next;
    next.load(program, first, buffer);
#pragma unroll 1
    for (; first < rows; first += step, buffer ^= 1) {
      const int64 row = first + group.row_slot();
      const auto ahead = next;
      next.load(program, first + step, buffer ^ 1);
      total += Reader::template visit<kGradient>(program, first, row, row < rows, ahead, buffer, scale);
    }
    return total;
  });
}

// Reader of rows of lists. With kApart, rows are next to each other and their classes are not. The group is a lane.
template <bool kApart>
struct ThreadPerListReader {
  template <class Program>
  struct Ahead {
    __device__ __forceinline__ void load(const Program&, int64, int) {
    }
  };
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ double visit(const Program& program, int64 first, int64 row, bool exists,
                                                 const Ahead<Program>&, int, Scale& scale) {
    using Input = typename Program::Input;
    const LaneList<Program> list(program);
    const PackedRows<Input, true, kApart> source(program, first);
    // In flight while the list is read.
    source.start(0xffffffffu);
    bool counts = exists;
    int length = 0, bad = -1;
    double value = 0.0, factor = 0.0;
    {
      int64 offset[kRowStreams];
      program.space.offsets(exists ? row : 0, offset);
      if constexpr (Program::kMasked) counts = counts && program.mask[offset[kRowMask]];
      if (counts) {
        const ListExtent extent = read_list(program, offset, list);
        length = static_cast<int>(extent.length);
        bad = static_cast<int>(extent.bad);
      }
      counts = counts && bad < 0 && length > 0;
      if constexpr (kGradient) {
        if (counts) factor = grad_factor(scale, offset) * program.inverse;
      }
    }
    cp_async_wait_all();
    __syncwarp();
    if (counts) value = list_of_thread<kGradient>(program, source, list, length, factor) * program.inverse;
    if (bad >= 0) value = scalar_nan(0.0);
    if constexpr (kGradient) {
      if (!counts || value != value) {
        for (int c = 0; c < source.classes(); ++c) source.overwrite(c, {{Narrow<Input>::from(counts ? value : 0.0)}});
      }
      // Addresses of the rows are computed again, here and below: kept, they would take registers in the meantime.
      PackedRows<Input, true, kApart>(program, first + opaque_zero()).flush();
    } else {
      __syncwarp();
    }
    if (!exists) return 0.0;
    int64 offset[kRowStreams];
    program.space.offsets(row + opaque_zero(), offset);
    if (bad >= 0) report_list(program, offset, bad);
    program.store(offset, value);
    return value;
  }

  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    sweep_rows_of_warps<kGradient, ThreadPerListReader<kApart>>(program, group, scale, chunks, work);
  }
};

// Applies linear_classes to the row of a lane, kCount classes at a time.
template <bool kGradient, int kCount, class Program, class Source>
__device__ __forceinline__ void linear_row(const Source& source, typename Program::Gradient smallest, double own,
                                           typename Program::Gradient active, typename Program::Sums& sums) {
#pragma unroll 4
  for (int c = 0; c < source.classes(); c += kCount) {
    const auto g = linear_classes<kCount, Program>(source.template read_some<kCount>(c), smallest, own, active, sums);
    if constexpr (kGradient) source.overwrite_some(c, g);
  }
}

// Processes the row of a lane that has one label. Gradients overwrite the scores, except the label's, which is left to
// the caller. Returns the sums of the hinges and of their derivatives.
template <bool kGradient, class Program, class Source>
__device__ __forceinline__ typename Program::Sums label_of_thread(const Program& program, const Source& source,
                                                                  const RowTarget<double>& t, double factor) {
  using Score = typename Program::Gradient;
  using Input = typename Program::Input;
  typename Program::Sums sums{0.0, typename Program::Slopes(0)};
  const double own = in_double(widen<Score>(source.read(static_cast<int>(t.label)).element[0]));
  if constexpr (Program::Hinge::kLinear) {
    const double margin = program.loss.margin();
    if (is_finite(own - margin)) {
      const Score smallest = smallest_active<Score>(own, margin);
      const auto active = opaque(Waiting<Input>::from(factor));
      if (sizeof(Input) == 2 && source.classes() % 2 == 0) {
        linear_row<kGradient, sizeof(Input) == 2 ? 2 : 1, Program>(source, smallest, own, active, sums);
      } else {
        linear_row<kGradient, 1, Program>(source, smallest, own, active, sums);
      }
      return linear_value(sums, smallest, own, margin);
    }
  }
#pragma unroll 2
  for (int c = 0; c < source.classes(); ++c) {
    const auto g = pairs_of_classes<1>(program, source.read(c), c == t.label ? 0 : -1, own, factor, sums);
    if constexpr (kGradient) source.overwrite(c, g);
  }
  return sums;
}

// Reader of rows of one label. The group is a lane.
struct ThreadPerLabelReader {
  static constexpr int kBuffers = 2;

  // The next rows and their labels, in flight while the current rows are processed.
  template <class Program>
  struct Ahead {
    typename Program::LabelLoad label;
    __device__ __forceinline__ void load(const Program& program, int64 first, int buffer) {
      if (first < program.space.rows) {
        const int64 row = first + threadIdx.x % kWarp;
        int64 offset[kRowStreams];
        program.space.offsets(row < program.space.rows ? row : 0, offset);
        label = program.load_label(offset);
        PackedRows<typename Program::Input, true>(program, first, buffer, kBuffers).start(0xffffffffu);
      }
      cp_async_commit();
    }
  };
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ double visit(const Program& program, int64 first, int64 row, bool exists,
                                                 const Ahead<Program>& ahead, int buffer, Scale& scale) {
    using Input = typename Program::Input;
    const PackedRows<Input, true> source(program, first, buffer, kBuffers);
    RowTarget<double> t{};
    if (exists) {
      program.space.offsets(row, t.offset);
      program.validate_label(t, ahead.label);
    }
    const bool counts = exists && t.active && t.weight != 0.0;
    cp_async_wait_groups<1>();
    __syncwarp();
    double value = exists && t.invalid_label ? scalar_nan(0.0) : 0.0, factor = 0.0;
    typename Program::Sums sums{0.0, typename Program::Slopes(0)};
    if (counts) {
      if constexpr (kGradient) factor = grad_factor(scale, t.offset) * (t.weight * program.inverse);
      sums = label_of_thread<kGradient>(program, source, t, factor);
      value = t.weight * (sums.value * program.inverse);
    }
    if constexpr (kGradient) {
      if (!counts || value != value) {
        for (int c = 0; c < source.classes(); ++c) source.overwrite(c, {{Narrow<Input>::from(counts ? value : 0.0)}});
      } else {
        source.overwrite(static_cast<int>(t.label), {{Narrow<Input>::from(Program::gradient(sums.slopes, -factor))}});
      }
      source.flush();
    } else {
      __syncwarp();
    }
    if (!exists) return 0.0;
    program.store(t, value);
    return value;
  }

  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    sweep_rows_of_warps<kGradient, ThreadPerLabelReader>(program, group, scale, chunks, work);
  }
};
