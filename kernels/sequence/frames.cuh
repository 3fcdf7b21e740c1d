// CTC: frames, once the recursion has left its posteriors, and the loss of each sample.
//
//   lse[t, n] = log sum_c exp x[t, n, c]
//   loss_n    = sum_t lse[t, n] - log Z_n            lse is left out for log-probabilities
//   gradient  = scale_n (softmax[t, n, c] - occ[t, n, c])
//
// 1. read_frames: 1 to 32 lanes per frame find the largest logit, and the sum of the others' exponentials relative to
//    it: so one minus the largest probability keeps its digits. Online: each logit is read once.
// 2. finish_sample: a block per sample adds Z in double, in the order of threads, and log-sum-exps; the block that
//    arrives last adds the losses in the order of samples.
// 3. write_gradient: posteriors are divided by the frame's own sum, and those of a class added in the order of
//    positions. Of few classes, a warp copies the posteriors of a few frames to shared memory, and 8 to 32 lanes take
//    a frame in one pass over its classes. A block takes a frame of many classes. It writes every class once, and the
//    distinct labels and the blank once more, of which L2 still has the sectors. Labels of a class are found along
//    their links. Where one class has more than half of softmax and of occ, its
//    gradient is (the others' occ) - (the others' softmax).
//
// Traffic: x read by 1 and again by 3, the gradient written, posteriors read.
#pragma once
#include "core/reduce.cuh"
#include "core/speculative_grad.cuh"
#include "sequence/recursion.cuh"
#include "softmax/row_ptx.cuh"

__device__ __forceinline__ float infinity(float) {
  return __uint_as_float(0x7f800000u);
}
__device__ __forceinline__ double infinity(double) {
  return __longlong_as_double(0x7ffLL << 52);
}
__device__ __forceinline__ float not_a_number(float) {
  return __uint_as_float(0x7fc00000u);
}
__device__ __forceinline__ double not_a_number(double) {
  return __longlong_as_double(0xfffLL << 51);
}

__device__ __forceinline__ float exp_below(float x) {
  return exp2_ftz(x * 1.4426950408889634f);
}
__device__ __forceinline__ double exp_below(double x) {
  return exp(x);
}

// A logit as the recursion sees it: infinite or NaN beyond kLargestLogit.
template <class Compute, class Storage>
__device__ __forceinline__ Compute logit(Storage stored) {
  const Compute x = widen<Compute>(stored), limit = static_cast<Compute>(kLargestLogit);
  if (x < -limit) return -infinity(Compute(0));
  return x > limit ? not_a_number(x) : x;
}

// Both frames' logits together, with the same result whichever comes first.
template <class Compute>
__device__ __forceinline__ FrameSum<Compute> joined(const FrameSum<Compute>& a, const FrameSum<Compute>& b) {
  const Compute difference = b.largest - a.largest;
  const bool second = difference > Compute(0) || (difference == Compute(0) && b.at < a.at);
  const Compute e = exp_below(difference > Compute(0) ? -difference : difference);
  FrameSum<Compute> all = second ? b : a;
  const Compute fewer = second ? a.others : b.others;
  all.others = all.others + (fewer + Compute(1)) * e;
  return all;
}

// True if a row can be read and written by vectors of 16 bytes.
template <class Storage>
__device__ __forceinline__ bool is_vector(const Storage* row, int64 step) {
  return step == 1 && reinterpret_cast<unsigned long long>(row) % 16 == 0;
}
// The logits are read again by the gradient pass: without a hint.
template <int kVec, class Storage>
__device__ __forceinline__ Pack<Storage, kVec> load_vector(const Storage* from) {
  Pack<Storage, kVec> pack;
  *reinterpret_cast<uint4*>(&pack) = *reinterpret_cast<const uint4*>(from);
  return pack;
}

// The largest of a few logits, and the others' exponentials. `at(k)` is the class of x[k], ascending. NaN stays in
// `others`. One logit after the other would be a chain of comparison, exponential and selection. Changes `x`.
template <int kCount, class Compute, class ClassOf>
__device__ __forceinline__ FrameSum<Compute> sum_of(Compute (&x)[kCount], const ClassOf& at) {
  Compute size = Compute(0);
#pragma unroll
  for (int k = 0; k < kCount; ++k) size = max_ignoring_nan(size, x[k] < Compute(0) ? -x[k] : x[k]);
  if (size > static_cast<Compute>(kLargestLogit)) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) x[k] = logit<Compute>(x[k]);
  }
  FrameSum<Compute> sum = {x[0], Compute(0), 0};
#pragma unroll
  for (int k = 1; k < kCount; ++k) sum.largest = max_ignoring_nan(sum.largest, x[k]);
  int first = 0, equal = 0;
#pragma unroll
  for (int k = kCount - 1; k >= 0; --k) {
    const bool is_largest = x[k] == sum.largest;
    const Compute e = exp_below(x[k] - sum.largest);
    sum.others += is_largest ? Compute(0) : e;
    first = is_largest ? k : first;
    equal += is_largest;
  }
  sum.others += static_cast<Compute>(equal > 1 ? equal - 1 : 0);
  sum.at = at(first);
  return sum;
}

// Lanes that share a frame: a power of two. Rows that are read by vectors have four of them in flight for each lane, if
// they have as many.
template <class Storage>
__device__ __forceinline__ int lanes_of(const Sequences& shape, const Storage* x) {
  constexpr int kVec = 16 / sizeof(Storage);
  const int64 vectors = shape.classes / kVec;
  const bool aligned = ((shape.x_frame | shape.x_inner | shape.x_outer) & (kVec - 1)) == 0;
  if (aligned && vectors >= 4 && is_vector(x, shape.x_class)) {
    return vectors >= 128 ? 32 : vectors >= 64 ? 16 : vectors >= 32 ? 8 : vectors >= 16 ? 4 : vectors >= 8 ? 2 : 1;
  }
  return vectors <= 8 ? 8 : vectors <= 16 ? 16 : 32;
}

// The sums of a frame, in each of the `lanes` lanes that share it. Preconditions: all lanes of the warp; `lanes` is a
// power of two.
template <class Compute, class Storage>
__device__ __forceinline__ FrameSum<Compute> read_frame(const Storage* row, int64 classes, int64 step, int lanes) {
  constexpr int kVec = 16 / sizeof(Storage), kAhead = 4;
  const int rank = threadIdx.x % lanes;
  // Finite, so that no difference of two of them is NaN.
  FrameSum<Compute> sum = {static_cast<Compute>(-3e38f), Compute(0), 0};
  int64 c = rank;
  if (is_vector(row, step)) {
    const int vectors = static_cast<int>(classes) / kVec;
    int v = rank;
    for (; v + lanes * (kAhead - 1) < vectors; v += lanes * kAhead) {
      Pack<Storage, kVec> raw[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) raw[i] = load_vector<kVec>(row + (v + lanes * i) * kVec);
      // Of 16-bit logits, more at once would spill registers.
      constexpr int kTogether = kAhead * kVec > 16 ? 16 / kVec : kAhead;
#pragma unroll
      for (int i = 0; i < kAhead; i += kTogether) {
        Compute x[kTogether * kVec];
#pragma unroll
        for (int k = 0; k < kTogether * kVec; ++k) x[k] = widen<Compute>(raw[i + k / kVec].element[k % kVec]);
        sum = joined(sum, sum_of(x, [&](int k) -> int64 { return (v + lanes * (i + k / kVec)) * kVec + k % kVec; }));
      }
    }
    for (; v < vectors; v += lanes) {
      const Pack<Storage, kVec> raw = load_vector<kVec>(row + v * kVec);
      Compute x[kVec];
#pragma unroll
      for (int k = 0; k < kVec; ++k) x[k] = widen<Compute>(raw.element[k]);
      sum = joined(sum, sum_of(x, [&](int k) -> int64 { return v * kVec + k; }));
    }
    c = vectors * kVec + rank;
  }
  for (; c < classes; c += lanes) {
    Compute x[1] = {widen<Compute>(row[c * step])};
    sum = joined(sum, sum_of(x, [&](int) -> int64 { return c; }));
  }
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    const FrameSum<Compute> other = {__shfl_xor_sync(0xffffffffu, sum.largest, offset),
                                     __shfl_xor_sync(0xffffffffu, sum.others, offset),
                                     __shfl_xor_sync(0xffffffffu, sum.at, offset)};
    sum = joined(sum, other);
  }
  return sum;
}

// The sums of all frames, by blocks `block`, `block` + `blocks`, ...: each takes a few frames of a sample at a time.
template <class Compute, class Storage>
__device__ __forceinline__ void read_frames(const Sequences& shape, const Storage* x, const Sample* samples,
                                            FrameSum<Compute>* sums, unsigned* broken, unsigned block,
                                            unsigned blocks) {
  const int lanes = lanes_of(shape, x), warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const unsigned together = 32u / static_cast<unsigned>(lanes), taken = 2u * warps * together;
  const unsigned runs = (static_cast<unsigned>(shape.frames) + taken - 1) / taken;
  const unsigned count = static_cast<unsigned>(shape.samples), all = runs * count;
  for (unsigned i = block; i < all; i += blocks) {
    // From both ends, as the recursion goes, so that it finds its elements in L2 or leaves them there.
    const unsigned place = i / count, run = place % 2 == 0 ? place / 2 : runs - 1 - place / 2;
    const int64 n = i % count;
    const int frames = samples[n].frames;
    const Storage* const logits = x + shape.x_offset(n);
    for (int part = 0; part < 2; ++part) {
      const int64 first = static_cast<int64>(run) * taken + (part * warps + warp) * together;
      if (first >= frames) break;
      // Lanes behind the last frame read that once more.
      const int64 t = first + threadIdx.x % 32 / lanes;
      const int64 row = t < frames ? t : frames - 1;
      const FrameSum<Compute> sum =
          read_frame<Compute>(logits + row * shape.x_frame, shape.classes, shape.x_class, lanes);
      if (t < frames && threadIdx.x % lanes == 0) {
        sums[n * shape.frames + t] = sum;
        if (sum.others != sum.others) atomicOr(broken + n, kNanLogit);
      }
    }
  }
}

// Outcome of the meeting for a sample that runs. Z = `total` 2^`exponent`. Preconditions: all threads of a block, which
// is a power of two from 32 to 1024; it ends in a barrier. The result is thread 0's.
template <class Mantissa>
__device__ __forceinline__ double alignments(const StoredNumber<Mantissa>* alpha, const StoredNumber<Mantissa>* beta,
                                             const int* labels, int size, int64& exponent) {
  exponent = largest_exponent(alpha, beta, labels, size);
  double total = 0.0;
  for (int j = threadIdx.x; j < size; j += blockDim.x) {
    const MeetingTerms<Mantissa> terms = meeting_terms(alpha, beta, labels, size, j);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int64 e = joint_exponent(terms.of[i], terms.of[i + 1]);
      const double product = static_cast<double>(terms.of[i].m) * static_cast<double>(terms.of[i + 1].m);
      if (e != kNoExponent)
        total += product * power_of_two(static_cast<int>(max(e - exponent, static_cast<int64>(-1023))), 0.0);
    }
  }
  total = block_sum(total);
  __syncthreads();
  return total;
}

// The loss of sample n in `losses`, weighted and divided by its labels if it averages, and in `values` if that is not
// null; its final outcome in `outcomes`. The block that comes last adds the losses up. Preconditions: blocks of 128
// threads; one block for each sample.
template <bool kLogits, class Mantissa, class Result>
__device__ __forceinline__ void finish_sample(const Sequences& shape, int64 n, const Sample* samples, const int* labels,
                                              const StoredNumber<Mantissa>* meeting, const FrameSum<Mantissa>* sums,
                                              const unsigned* broken, double* losses, Result* values, Result* value,
                                              double multiple, const double* count, unsigned* ticket) {
  __shared__ bool last;
  const Sample sample = samples[n];
  double loss = 0.0;
  if (sample.outcome == kRuns) {
    int64 exponent;
    const StoredNumber<Mantissa>* const alpha = meeting + 2 * sample.first;
    const StoredNumber<Mantissa>* const beta = meeting + 2 * (shape.positions + sample.first);
    const double z = alignments(alpha, beta, labels + sample.first, sample.labels + 1, exponent);
    double rows = 0.0;
    if constexpr (kLogits) {
      for (int64 t = threadIdx.x; t < sample.frames; t += blockDim.x) {
        const FrameSum<Mantissa> sum = sums[n * shape.frames + t];
        rows += static_cast<double>(sum.largest) + log1p(static_cast<double>(sum.others));
      }
      rows = block_sum(rows);
      __syncthreads();
    }
    loss = rows - (0.6931471805599453 * static_cast<double>(exponent) + log(z));
    if (kLogits && loss < 0.0) loss = 0.0;
    if (exponent == kNoExponent) loss = shape.zero_infinity != 0 ? 0.0 : infinity(0.0);
  } else if (sample.outcome == kImpossible) {
    loss = shape.zero_infinity != 0 ? 0.0 : infinity(0.0);
  } else if (sample.outcome == kBad) {
    loss = not_a_number(0.0);
  }
  if (kLogits && sample.outcome != kBad && sample.outcome != kSkipped && (broken[n] & kNanLogit) != 0u)
    loss = not_a_number(0.0);
  if (threadIdx.x == 0) {
    if (sample.outcome != kSkipped) loss = (loss + 0.0) * sample.weight;
    if (values != nullptr) values[n] = Narrow<Result>::from(loss);
    if (shape.averages != 0 && sample.labels > 1) loss /= static_cast<double>(sample.labels);
    losses[n] = loss;
  }
  if (value == nullptr) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    const unsigned limit = static_cast<unsigned>(shape.samples - 1);
    last = increment_and_synchronize(ticket, limit) == limit;
  }
  __syncthreads();
  if (!last) return;
  const double total = sum_partials(losses, shape.samples);
  if (threadIdx.x == 0) {
    const double divisor = count == nullptr ? multiple : multiple * __ldcg(count);
    *value = Narrow<Result>::from(total / divisor);
  }
}

// The gradient of a frame, by `group` threads: a warp, or the block, which all call it together. `posteriors` are those
// of the recursion, and each warp adds up all of them. kPlain: 0 but for labels; kOfLogits: plus exp(x); kSoftmax: plus
// softmax.
enum GradientKind { kPlain, kOfLogits, kSoftmax };
constexpr int kKept = 4;

template <GradientKind kKind, class Mantissa, class Storage>
__device__ __forceinline__ void write_frame(const Sequences& shape, const Storage* x, Storage* g, const int* labels,
                                            const unsigned* links, const Mantissa* posteriors, int size,
                                            const FrameSum<Mantissa>& sum, Mantissa scale, int group) {
  const int lane = threadIdx.x % 32, rank = threadIdx.x % group, warp = rank / 32, warps = group / 32;
  const Mantissa inverse = Mantissa(1) / (Mantissa(1) + sum.others);
  // The class that has more than half of softmax, or none.
  const int likely = kKind == kSoftmax && sum.others < Mantissa(1) ? static_cast<int>(sum.at) : -1;
  auto probability = [&](Storage stored) -> Mantissa {
    const Mantissa z = logit<Mantissa>(stored);
    if constexpr (kKind == kSoftmax) return exp_below(z - sum.largest) * inverse;
    if constexpr (kKind == kOfLogits) return static_cast<Mantissa>(exp(z));
    return Mantissa(0);
  };
  auto before = [&](int c) -> Mantissa {
    if constexpr (kKind == kPlain) return Mantissa(0);
    return probability(x[c * shape.x_class]);
  };
  // A lane has positions lane, lane + 32, ...: the first kKept of them in registers.
  Mantissa kept[kKept], of_blank = 0, of_labels = 0, of_others = 0;
  auto add = [&](int j, Mantissa blank, Mantissa label) {
    of_blank += blank;
    of_labels += label;
    if (likely >= 0) {
      of_others += likely != static_cast<int>(shape.blank) ? blank : Mantissa(0);
      of_others += j < size - 1 && labels[j] != likely ? label : Mantissa(0);
    }
  };
  // Posteriors of labels are on their way while all classes are written, most of which need none.
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int j = lane + 32 * i;
    kept[i] = j < size - 1 ? posteriors[size + j] : Mantissa(0);
  }
  constexpr int kVec = 16 / sizeof(Storage);
  int done = 0;
  if (is_vector(g, shape.g_class) && (kKind == kPlain || is_vector(x, shape.x_class))) {
    const int vectors = static_cast<int>(shape.classes) / kVec;
    auto write_vector = [&](int v, const Pack<Storage, kVec>& raw) {
      Mantissa found[kVec];
#pragma unroll
      for (int k = 0; k < kVec; ++k) {
        found[k] = Mantissa(0);
        if constexpr (kKind != kPlain) found[k] = probability(raw.element[k]) * scale;
      }
      store_pack(g + v * kVec, NarrowPack<Storage, kVec>::from(found));
    };
    // Beside exact exponentials, or conversions of more than one instruction, more vectors would spill registers.
    constexpr int kAhead = kKind == kOfLogits ? 1 : kVec == 8 && !kHasCpAsync ? 2 : 4;
    int v = rank;
    for (; v + group * (kAhead - 1) < vectors; v += group * kAhead) {
      Pack<Storage, kVec> raw[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if constexpr (kKind != kPlain) raw[i] = load_vector<kVec>(x + (v + group * i) * kVec);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) write_vector(v + group * i, raw[i]);
    }
    for (; v < vectors; v += group) {
      Pack<Storage, kVec> raw;
      if constexpr (kKind != kPlain) raw = load_vector<kVec>(x + v * kVec);
      write_vector(v, raw);
    }
    done = vectors * kVec;
  }
  for (int c = done + rank; c < static_cast<int>(shape.classes); c += group) {
    g[c * shape.g_class] = Narrow<Storage>::from(kKind == kPlain ? Mantissa(0) : before(c) * scale);
  }
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if (lane + 32 * i < size) add(lane + 32 * i, posteriors[lane + 32 * i], kept[i]);
  }
  for (int j = lane + 32 * kKept; j < size; j += 32) {
    add(j, posteriors[j], j < size - 1 ? posteriors[size + j] : Mantissa(0));
  }
  of_blank = warp_sum(of_blank);
  of_labels = warp_sum(of_labels);
  if (likely >= 0) of_others = warp_sum(of_others);
  const Mantissa share = Mantissa(1) / (of_blank + of_labels);
  // The rest of softmax, and of occ, for the class that has most of both.
  auto write = [&](int c, Mantissa of_class) {
    const Mantissa occ = of_class * share;
    Mantissa found = before(c) - occ;
    if (c == likely && occ > Mantissa(0.5)) found = of_others * share - sum.others * inverse;
    g[c * shape.g_class] = Narrow<Storage>::from(found * scale);
  };
  // The first occurrence of a class adds the others.
  auto write_label = [&](int j, Mantissa of_class) {
    unsigned link = links[j];
    if (link & kEarlier) return;
    while (link != 0u) {
      const int next = static_cast<int>(link) - 1;
      of_class += posteriors[size + next];
      link = links[next] & ~kEarlier;
    }
    write(labels[j], of_class);
  };
  // Labels are written over their classes.
  if (warps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if (i % warps == warp && lane + 32 * i < size - 1) write_label(lane + 32 * i, kept[i]);
  }
  for (int j = rank + 32 * kKept; j < size - 1; j += group) write_label(j, posteriors[size + j]);
  if (rank == 0) write(static_cast<int>(shape.blank), of_blank);
}

// Shared memory of a block about a sample of few labels in frames of few classes. `head` is the first label of each
// class, and `next` that behind each label of a class; where there is none it is the last position, which has no label.
// `rows` are posteriors of the frames that a warp takes together, as they lie in the lattice.
constexpr int kShortClasses = 1024;
template <class Mantissa>
struct ShortFrames {
  static constexpr int kRow = 4096 / static_cast<int>(sizeof(Mantissa)), kLabels = kRow / 2;
  static constexpr int kVector = 16 / static_cast<int>(sizeof(Mantissa)), kWarps = 4;
  alignas(16) unsigned short head[kShortClasses];
  unsigned short next[kLabels];
  alignas(16) Mantissa rows[kWarps][kRow + kVector];

  static __device__ __forceinline__ ShortFrames& of_block() {
    extern __shared__ uint4 staged[];
    return *reinterpret_cast<ShortFrames*>(staged);
  }

  // Precondition: all threads of the block, before any reads `head` and `next`.
  __device__ __forceinline__ void begin(const Sequences& shape, const int* labels, const unsigned* links, int count) {
    const unsigned short none = static_cast<unsigned short>(count);
    for (int c = threadIdx.x; c < (shape.classes + 3) / 4 * 4; c += blockDim.x) head[c] = none;
    __syncthreads();
    for (int j = threadIdx.x; j < count; j += blockDim.x) {
      const unsigned link = links[j], behind = link & ~kEarlier;
      next[j] = behind != 0u ? static_cast<unsigned short>(behind - 1u) : none;
      if ((link & kEarlier) == 0u) head[labels[j]] = static_cast<unsigned short>(j);
    }
    if (threadIdx.x == 0) next[count] = none;
    __syncthreads();
  }

  // Starts to copy `count` posteriors to the warp's rows. Vectors are copied whole: the lattice has more on both sides.
  // Returns where the first one comes to lie.
  __device__ __forceinline__ Mantissa* copy(const Mantissa* from, int count) {
    const int before = static_cast<int>(reinterpret_cast<unsigned long long>(from) % 16 / sizeof(Mantissa));
    const uint4* const vectors = reinterpret_cast<const uint4*>(from - before);
    Mantissa* const own = rows[threadIdx.x / 32];
#pragma unroll kHasCpAsync ? 4 : 1
    for (int i = threadIdx.x % 32; i < (before + count + kVector - 1) / kVector; i += 32) {
      if constexpr (kHasCpAsync) {
        cp_async_bytes<16>(own + i * kVector, vectors + i);
      } else {
        reinterpret_cast<uint4*>(own)[i] = vectors[i];
      }
    }
    return own + before;
  }
};

// Lanes that share a frame of few classes: a power of two. Fewer would take more than two vectors each.
template <class Storage>
__device__ __forceinline__ int short_lanes(const Sequences& shape) {
  const int64 vectors = shape.classes * static_cast<int64>(sizeof(Storage)) / 16;
  return vectors <= 16 ? 8 : vectors <= 32 ? 16 : 32;
}
// Frames of few classes of a sample, which a warp takes a few at a time; `lanes` share one.
template <GradientKind kKind, class Mantissa, class Storage>
struct ShortRun {
  static constexpr int kVec = 16 / sizeof(Storage);
  // Frames that a lane takes at once: links of labels are read for all of them. Beside exact exponentials of eight
  // logits two would spill registers.
  static constexpr int kAtOnce = kKind == kOfLogits && kVec == 8 ? 1 : 2;
  const Storage* x;  // of the sample
  Storage* g;
  const FrameSum<Mantissa>* sums;
  int lanes, vectors;  // vectors of a frame: 0 if they are not aligned
  Mantissa scale;
  int first, count;  // the frames that the warp has now
  Mantissa* rows;
  FrameSum<Mantissa> sum[kAtOnce];
  Pack<Storage, kVec> first_vector[kAtOnce];

  // Frame i of a lane, from `first` on. Where there are no more, a lane takes its first one again, and lanes without
  // one take the first of all.
  __device__ __forceinline__ int frame(int i) const {
    const int group = threadIdx.x % 32 / lanes, behind = group + 32 / lanes * i;
    return behind < count ? behind : group < count ? group : 0;
  }
  __device__ __forceinline__ bool exists(int i) const {
    return static_cast<int>(threadIdx.x % 32) / lanes + 32 / lanes * i < count;
  }

  // Starts to load what the lanes need of their frames, whose posteriors begin at `posteriors`.
  __device__ __forceinline__ void load(const Sequences& shape, ShortFrames<Mantissa>& few, const Mantissa* posteriors,
                                       int size) {
    const int rank = threadIdx.x % lanes;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64 t = first + frame(i);
      sum[i] = {Mantissa(0), Mantissa(0), 0};
      if constexpr (kKind == kSoftmax) sum[i] = sums[t];
      if constexpr (kKind != kPlain) {
        if (rank < vectors) first_vector[i] = load_vector<kVec>(x + t * shape.x_frame + rank * kVec);
      }
    }
    rows = few.copy(posteriors, 2 * size * count);
  }
};

// Does what write_frame does for the frames that `run` has loaded, and writes each class once. Preconditions: all lanes
// of the warp; it ends before all lanes have read the rows.
template <GradientKind kKind, class Mantissa, class Storage>
__device__ __forceinline__ void write_short_frames(const Sequences& shape, const ShortFrames<Mantissa>& few,
                                                   const ShortRun<kKind, Mantissa, Storage>& run, int size) {
  using Run = ShortRun<kKind, Mantissa, Storage>;
  constexpr int kVec = Run::kVec, kAtOnce = Run::kAtOnce;
  const int lane = threadIdx.x % 32, lanes = run.lanes, rank = lane % lanes;
  const int classes = static_cast<int>(shape.classes), blank = static_cast<int>(shape.blank), none = size - 1;
  const FrameSum<Mantissa>(&sum)[kAtOnce] = run.sum;
  Mantissa *blanks[kAtOnce], *labels[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    blanks[i] = row_at(run.rows, run.frame(i), 2 * size * static_cast<int>(sizeof(Mantissa)));
    labels[i] = row_at(blanks[i], size, static_cast<int>(sizeof(Mantissa)));
  }
  cp_async_wait_all();
  __syncwarp();
  // The place that a row has to spare: what a class without labels has.
  if (lane < run.count) run.rows[2 * size * lane + 2 * size - 1] = Mantissa(0);
  __syncwarp();
  Mantissa of_blank[kAtOnce] = {}, of_labels[kAtOnce] = {}, of_others[kAtOnce] = {};
  for (int j = 2 * rank; j < size - 1; j += 2 * lanes) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const auto pair = *reinterpret_cast<const Pack<Mantissa, 2>*>(blanks[i] + j);
      of_blank[i] += pair.element[0] + pair.element[1];
    }
  }
  if (size % 2 != 0 && rank == 0) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) of_blank[i] += blanks[i][size - 1];
  }
  int likely[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    likely[i] = kKind == kSoftmax && sum[i].others < Mantissa(1) ? static_cast<int>(sum[i].at) : -1;
  }
  // The first label of a class takes the sum of all: a lane has all labels of its classes, which no other lane reads.
  constexpr int kClasses = 4;
#pragma unroll 1
  for (int c = rank * kClasses; run.exists(0) && c < classes; c += lanes * kClasses) {
    const auto heads = *reinterpret_cast<const Pack<unsigned short, kClasses>*>(few.head + c);
    int at[kClasses];
    Mantissa found[kAtOnce][kClasses] = {};
#pragma unroll
    for (int k = 0; k < kClasses; ++k) at[k] = heads.element[k];
#pragma unroll 1
    while (min(min(at[0], at[1]), min(at[2], at[3])) < none) {
#pragma unroll
      for (int k = 0; k < kClasses; ++k) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) found[i][k] += labels[i][at[k]];
        at[k] = few.next[at[k]];
      }
    }
#pragma unroll
    for (int k = 0; k < kClasses; ++k) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        of_labels[i] += found[i][k];
        if constexpr (kKind == kSoftmax) of_others[i] += c + k == likely[i] ? Mantissa(0) : found[i][k];
        if (heads.element[k] < none) labels[i][heads.element[k]] = found[i][k];
      }
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    if (offset >= lanes) continue;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      of_blank[i] += __shfl_xor_sync(0xffffffffu, of_blank[i], offset);
      of_labels[i] += __shfl_xor_sync(0xffffffffu, of_labels[i], offset);
      if constexpr (kKind == kSoftmax) of_others[i] += __shfl_xor_sync(0xffffffffu, of_others[i], offset);
    }
  }
  __syncwarp();
  if (!run.exists(0)) return;
  const int64 own = run.first + run.frame(0), step = run.frame(1) - run.frame(0);
  const Storage* const x = run.x + own * shape.x_frame;
  Storage* const g = run.g + own * shape.g_frame;
  Mantissa inverse[kAtOnce], share[kAtOnce], rest[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    inverse[i] = Mantissa(1) / (Mantissa(1) + sum[i].others);
    share[i] = Mantissa(1) / (of_blank[i] + of_labels[i]);
    if (likely[i] != blank) of_others[i] += of_blank[i];
    rest[i] = of_others[i] * share[i] - sum[i].others * inverse[i];
  }
  auto gradient = [&](int i, int c, int head, Storage stored) -> Mantissa {
    Mantissa before = 0;
    if constexpr (kKind == kSoftmax) {
      // None is above the largest that counts: there the loss is NaN.
      Mantissa z = widen<Mantissa>(stored);
      z = z < static_cast<Mantissa>(-kLargestLogit) ? -infinity(z) : z;
      before = exp_below(z - sum[i].largest) * inverse[i];
    }
    if constexpr (kKind == kOfLogits) before = static_cast<Mantissa>(exp(logit<Mantissa>(stored)));
    const Mantissa occ = (c == blank ? of_blank[i] : labels[i][head]) * share[i];
    return (c == likely[i] && occ > Mantissa(0.5) ? rest[i] : before - occ) * run.scale;
  };
#pragma unroll 1
  for (int v = rank; v < run.vectors; v += lanes) {
    const auto heads = *reinterpret_cast<const Pack<unsigned short, kVec>*>(few.head + v * kVec);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      Pack<Storage, kVec> raw = run.first_vector[i];
      if constexpr (kKind != kPlain) {
        if (v != rank) raw = load_vector<kVec>(x + i * step * shape.x_frame + v * kVec);
      }
      Mantissa found[kVec];
#pragma unroll
      for (int k = 0; k < kVec; ++k) found[k] = gradient(i, v * kVec + k, heads.element[k], raw.element[k]);
      if (run.exists(i)) store_pack(g + i * step * shape.g_frame + v * kVec, NarrowPack<Storage, kVec>::from(found));
    }
  }
#pragma unroll 1
  for (int c = run.vectors * kVec + rank; c < classes; c += lanes) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (!run.exists(i)) continue;
      Storage raw = Storage();
      if constexpr (kKind != kPlain) raw = x[i * step * shape.x_frame + c * shape.x_class];
      g[i * step * shape.g_frame + c * shape.g_class] = Narrow<Storage>::from(gradient(i, c, few.head[c], raw));
    }
  }
}

// True if sample n has alignments, as the recursion has found at the meeting. `is_nan` if its loss is, for a reason
// among `reasons`.
__device__ __forceinline__ bool has_alignments(const Sequences& shape, const Sample& sample, const unsigned* broken,
                                               int64 n, unsigned reasons, bool& is_nan) {
  const unsigned found = broken[n] | broken[shape.samples + n];
  is_nan = sample.outcome != kBad && sample.outcome != kSkipped && (found & reasons) != 0u;
  return sample.outcome == kRuns && (found & kNoAlignment) == 0u;
}

// Frames of a sample that a block takes.
constexpr int kFrames = 16;
// Runs of so many frames of a sample.
__device__ __forceinline__ unsigned runs_of(const Sequences& shape, int frames) {
  return (static_cast<unsigned>(shape.frames) + frames - 1) / frames;
}

// The gradient of run `block` of `frames` frames, for grad_output of the sample over the divisor.
//
// Preconditions: blocks of 128 threads; dynamic shared memory has a ShortFrames if classes are few; no warp reads
// shared memory of an earlier call.
template <GradientKind kKind, class Mantissa, class Storage, class Result>
__device__ __forceinline__ void write_gradient(const Sequences& shape, const Storage* x, Storage* g,
                                               const Sample* samples, const int* labels, const unsigned* links,
                                               const Mantissa* lattice, const FrameSum<Mantissa>* sums,
                                               const unsigned* broken, const Result* grad_output, const double* used,
                                               int64 per_sample, double multiple, const double* count, int frames,
                                               unsigned block) {
  const unsigned runs = runs_of(shape, frames);
  const int64 n = block / runs;
  const int first = static_cast<int>(block % runs) * frames;
  const int end = first + min(frames, static_cast<int>(shape.frames) - first);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const Sample sample = samples[n];
  const double divisor = count == nullptr ? multiple : multiple * __ldcg(count);
  double scale = grad_output == nullptr ? *used : widen<double>(grad_output[per_sample != 0 ? n : 0]);
  // A mean of nothing has no gradient.
  scale = divisor == 0.0 ? 0.0 : scale * sample.weight / divisor;
  if (shape.averages != 0 && sample.labels > 1) scale /= static_cast<double>(sample.labels);
  bool is_nan;
  const bool exists =
      has_alignments(shape, sample, broken, n, kKind == kSoftmax ? kNanLogit | kNanLoss : kNanLoss, is_nan);
  const int size = sample.labels + 1;
  x += shape.x_offset(n);
  g += shape.g_offset(n);
  const int* const own = labels + sample.first;
  const unsigned* const next = links + sample.first;
  const Mantissa* const states = lattice + Lattice<Mantissa>::row(sample, shape.frames, 0);
  const FrameSum<Mantissa>* const frame_sums = sums + n * shape.frames;
  const int filled = exists && !is_nan ? min(end, sample.frames) : first;
  for (int64 t = max(filled, first) + warp; t < end; t += warps) {
    Storage* const row = g + t * shape.g_frame;
    const Storage fill = Narrow<Storage>::from(is_nan && t < sample.frames ? not_a_number(Mantissa(0)) : Mantissa(0));
    for (int64 c = lane; c < shape.classes; c += 32) row[c * shape.g_class] = fill;
  }
  using Short = ShortFrames<Mantissa>;
  if (shape.classes <= kShortClasses && size <= Short::kLabels) {
    Short& few = Short::of_block();
    using Run = ShortRun<kKind, Mantissa, Storage>;
    constexpr int kVec = Run::kVec;
    const int lanes = short_lanes<Storage>(shape), together = min(Run::kAtOnce * 32 / lanes, Short::kRow / (2 * size));
    const bool fits = is_vector(g, shape.g_class) && shape.g_frame % kVec == 0 && shape.classes >= lanes * kVec &&
                      (kKind == kPlain || (is_vector(x, shape.x_class) && shape.x_frame % kVec == 0));
    Run run;
    run.x = x;
    run.g = g;
    run.sums = frame_sums;
    run.lanes = lanes;
    run.vectors = fits ? static_cast<int>(shape.classes) / kVec : 0;
    run.scale = static_cast<Mantissa>(scale);
    run.first = first + warp * together;
    bool begun = filled <= first;
    while (true) {
      run.count = min(together, filled - run.first);
      if (run.count > 0) run.load(shape, few, states + 2 * wide_product(run.first, size), size);
      if (!begun) few.begin(shape, own, next, size - 1);
      begun = true;
      if (run.count <= 0) break;
      write_short_frames(shape, few, run, size);
      __syncwarp();  // the rows are still read
      run.first += warps * together;
    }
  } else {
    const int group = shape.classes > kShortClasses ? static_cast<int>(blockDim.x) : 32;
    for (int64 t = first + static_cast<int>(threadIdx.x) / group; t < filled; t += blockDim.x / group) {
      FrameSum<Mantissa> sum = {Mantissa(0), Mantissa(0), 0};
      if constexpr (kKind == kSoftmax) sum = frame_sums[t];
      write_frame<kKind>(shape, x + t * shape.x_frame, g + t * shape.g_frame, own, next, states + 2 * t * size, size,
                         sum, static_cast<Mantissa>(scale), group);
    }
  }
}

// The gradients of runs `block`, `block` + `blocks`, ... of frames of all samples.
template <GradientKind kKind, class Mantissa, class Storage, class Result>
__device__ __forceinline__ void write_gradients(const Sequences& shape, const Storage* x, Storage* g,
                                                const Sample* samples, const int* labels, const unsigned* links,
                                                const Mantissa* lattice, const FrameSum<Mantissa>* sums,
                                                const unsigned* broken, const Result* grad_output, const double* used,
                                                int64 per_sample, double multiple, const double* count, int frames,
                                                int64 block, int64 blocks) {
  const int64 all = static_cast<int64>(runs_of(shape, frames)) * shape.samples;
  for (; block < all; block += blocks) {
    write_gradient<kKind>(shape, x, g, samples, labels, links, lattice, sums, broken, grad_output, used, per_sample,
                          multiple, count, frames, static_cast<unsigned>(block));
    __syncthreads();
  }
}
