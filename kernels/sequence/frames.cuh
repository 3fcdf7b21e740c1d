// CTC: log-sum-exps of frames, the loss of each sample, and the gradient of each frame.
//
//   lse[t, n]         = log sum_c exp x[t, n, c]
//   loss[n]           = sum_t lse[t, n] - log Z[n]                        without lse for log-probabilities
//   gradient[t, n, c] = scale[n] (softmax[t, n, c] - occ[t, n, c])        for log-probabilities see GradientKind
//
// occ[t, n, c] is the posterior of class c: the sum of its states' posteriors, which the recursion leaves in the
// lattice (recursion.cuh).
//
// 1. read_frames: 1 to 32 lanes per frame find the largest logit and the sum of the others' exponentials relative to
//    it. The sum leaves out the largest, so that one minus the largest probability keeps its digits. Online softmax:
//    each logit is read once. Blocks of either half of the recursion do this beside the walks, which wait for latency
//    most of the time.
// 2. finish_sample: a block per sample adds Z in double, in the order of threads, and the log-sum-exps. The block that
//    arrives last adds the losses in the order of samples.
// 3. write_gradient: divides posteriors by the frame's own sum, and adds those of a class in the order of positions.
//    With few classes, a warp copies the posteriors of a few frames to shared memory, and 8 to 32 lanes process a frame
//    in one pass over its classes. With many classes, a block processes a frame: it writes occ of the blank and the
//    labels, found along their links, to an array of all classes in shared memory, and then writes every class once.
//    Where one class has more than half of softmax and of occ, its gradient is (the others' occ) - (the others'
//    softmax).
// 4. With kFindsSums, step 3 also does the work of step 1, from a copy of the frame in shared memory. Afterwards
//    write_nan writes NaN to the gradients of samples in which it has met a NaN.
//
// Traffic: x is read by step 1 and again by step 3, or once with kFindsSums; the gradient is written, and posteriors
// are read. Preconditions: stated at each function.
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

// Returns a logit as the recursion sees it: -inf below -kLargestLogit, NaN above kLargestLogit.
template <class Compute, class Storage>
__device__ __forceinline__ Compute logit(Storage stored) {
  const Compute x = widen<Compute>(stored), limit = static_cast<Compute>(kLargestLogit);
  if (x < -limit) return -infinity(Compute(0));
  return x > limit ? not_a_number(x) : x;
}

// Scales a number for use as the `shift` of `power`: x / log 2 in float, for the bare instruction for 2^x; x in double,
// for exact exponentials.
__device__ __forceinline__ float scaled(float x) {
  return x * 1.4426950408889634f;
}
__device__ __forceinline__ double scaled(double x) {
  return x;
}
// Returns exp(x - s) for `shift` = scaled(s). In float the product is not rounded, so the rounding error of `shift` is
// a common factor of all powers with that shift: power(-s, -shift) cancels it.
__device__ __forceinline__ float power(float x, float shift) {
  return exp2_ftz(fmaf(x, 1.4426950408889634f, -shift));
}
__device__ __forceinline__ double power(double x, double shift) {
  return exp(x - shift);
}

// True if a row can be read and written in vectors of 16 bytes.
template <class Storage>
__device__ __forceinline__ bool is_vector(const Storage* row, int64 step) {
  return step == 1 && reinterpret_cast<unsigned long long>(row) % 16 == 0;
}
// Number of classes of a row before its first vector of 16 bytes. Precondition: class stride 1.
template <class Storage>
__device__ __forceinline__ int classes_before_vectors(const Storage* row, int classes) {
  constexpr unsigned kVec = 16 / sizeof(Storage);
  const unsigned place = static_cast<unsigned>(reinterpret_cast<unsigned long long>(row) / sizeof(Storage));
  return min(static_cast<int>((0u - place) % kVec), classes);
}
// Loads a vector without a cache hint: the gradient pass reads the logits again.
template <int kVec, class Storage>
__device__ __forceinline__ Pack<Storage, kVec> load_vector(const Storage* from) {
  Pack<Storage, kVec> pack;
  *reinterpret_cast<uint4*>(&pack) = *reinterpret_cast<const uint4*>(from);
  return pack;
}

// Online softmax of the logits that a lane has read: the largest, and the sum of the others' exponentials. The sum is
// relative to `shift`, which is set to the scaled largest only when that exceeds it by more than kFar, so that few
// batches rescale.
template <class Compute>
struct RunningSum {
  static constexpr float kFar = 16.0f;
  Compute largest = -infinity(Compute(0)), others = Compute(0);
  Compute shift = static_cast<Compute>(-1e38f);  // finite, so that -inf minus it is -inf
  int place = 0;                                 // place of the batch that had the largest

  // Adds a batch of logits; `at` is its place. NaN goes to `others`; +inf is left to the caller. Overwrites `x`.
  template <int kCount>
  __device__ __forceinline__ void add(Compute (&x)[kCount], int at) {
    static_assert((kCount & (kCount - 1)) == 0, "the logits play a tournament");
    // The losers of the comparisons are the others, so the largest is left out without comparing with it again.
#pragma unroll
    for (int span = 1; span < kCount; span *= 2) {
#pragma unroll
      for (int k = 0; k < kCount; k += 2 * span) play(x[k], x[k + span]);
    }
    place = x[0] > largest ? at : place;
    play(largest, x[0]);
    const Compute needed = scaled(largest);
    if (needed > shift + Compute(kFar)) {
      others *= power(Compute(0), needed - shift);
      shift = needed;
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) x[k] = power(x[k], shift);
#pragma unroll
    for (int span = 1; span < kCount; span *= 2) {
#pragma unroll
      for (int k = 0; k < kCount; k += 2 * span) x[k] += x[k + span];
    }
    others += x[0];
  }

 private:
  static __device__ __forceinline__ void play(Compute& winner, Compute& loser) {
    const Compute smaller = smaller_or_nan(winner, loser);
    winner = max_ignoring_nan(winner, loser);
    loser = smaller;
  }
};

// Number of lanes that share a frame: a power of two. If rows are read in vectors, each lane has at least four of them,
// unless the row has fewer.
template <class Storage>
__device__ __forceinline__ int lanes_of(const Sequences& shape) {
  const int64 vectors = shape.classes * static_cast<int64>(sizeof(Storage)) / 16;
  if (shape.x_class != 1) return vectors <= 8 ? 8 : vectors <= 16 ? 16 : 32;
  return vectors >= 128 ? 32 : vectors >= 64 ? 16 : vectors >= 32 ? 8 : vectors >= 16 ? 4 : vectors >= 8 ? 2 : 1;
}

// Number of vectors that a lane has in flight, and of those that it adds together. With more, 16-bit logits would spill
// registers.
template <class Storage>
constexpr int kReadAhead = sizeof(Storage) == 2 ? 2 : 4;
template <class Storage>
constexpr int kReadTogether = sizeof(Storage) == 2 ? 1 : 2;

// Adds a lane's share of the vectors from `from` on: vector `rank`, and every `lanes`-th one after it. The place of a
// batch is the index of its first vector.
template <class Compute, class Storage>
__device__ __forceinline__ void add_vectors(RunningSum<Compute>& sum, const Storage* from, int vectors, int rank,
                                            int lanes) {
  constexpr int kVec = 16 / sizeof(Storage), kAhead = kReadAhead<Storage>, kTogether = kReadTogether<Storage>;
  from += rank * kVec;
  Pack<Storage, kVec> raw[kAhead];
  auto load = [&](int i, int v) {
    if (v + lanes * i < vectors) raw[i] = load_vector<kVec>(from + lanes * i * kVec);
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(i, rank);
  int v = rank;
#pragma unroll 1
  for (int left = vectors; left >= lanes * kAhead; left -= lanes * kAhead, v += lanes * kAhead) {
    from += lanes * kAhead * kVec;
#pragma unroll
    for (int i = 0; i < kAhead; i += kTogether) {
      Compute x[kTogether * kVec];
#pragma unroll
      for (int k = 0; k < kTogether * kVec; ++k) x[k] = widen<Compute>(raw[i + k / kVec].element[k % kVec]);
      sum.add(x, v + lanes * i);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) load(i + j, v + lanes * kAhead);
    }
  }
  // The remainder has fewer than `lanes` * kAhead vectors.
#pragma unroll
  for (int i = 0; i < kAhead; i += kTogether) {
    if (v - rank + lanes * i >= vectors) break;
    Compute x[kTogether * kVec];
#pragma unroll
    for (int k = 0; k < kTogether * kVec; ++k) {
      const Compute read = widen<Compute>(raw[i + k / kVec].element[k % kVec]);
      x[k] = v + lanes * (i + k / kVec) < vectors ? read : -infinity(read);
    }
    sum.add(x, v + lanes * i);
  }
}

// A frame that several lanes share. Of `sharing` lanes, each processes the vector of its rank and every `sharing`-th
// one after it. The classes around the vectors are shared in the same way.
template <class Storage>
struct SharedFrame {
  static constexpr int kVec = 16 / sizeof(Storage);
  const Storage* row;
  int classes;
  int64 step;
  int head, vectors;  // classes before the first vector

  __device__ __forceinline__ SharedFrame(const Storage* row, int classes, int64 step)
      : row(row),
        classes(classes),
        step(step),
        head(step == 1 ? classes_before_vectors(row, classes) : 0),
        vectors(step == 1 ? (classes - head) / kVec : 0) {
  }
};

// Returns the sums of the parts of a frame that the `lanes` lanes around this one process, to each of these lanes.
// `sum` has the lane's vectors already; the lane's other classes are added here. The largest may be -inf.
// Preconditions: all lanes of the warp call it; `lanes` is a power of two.
template <class Compute, class Storage>
__device__ __forceinline__ FrameSum<Compute> sums_of_lanes(RunningSum<Compute> sum, const SharedFrame<Storage>& frame,
                                                           int lanes, int rank, int sharing) {
  constexpr int kVec = 16 / sizeof(Storage);
  const Storage* const row = frame.row;
  const int classes = frame.classes, head = frame.head, vectors = frame.vectors, lane = threadIdx.x % 32;
  const int64 step = frame.step;
  // The place of a single class c is -1 - c.
#pragma unroll 1
  for (int i = rank; i < classes - vectors * kVec; i += sharing) {
    const int c = i < head ? i : i + vectors * kVec;
    Compute x[1] = {widen<Compute>(row[c * step])};
    sum.add(x, -1 - c);
  }
  auto largest_of_lanes = [&] {
    Compute largest = sum.largest;
    for (int offset = lanes / 2; offset > 0; offset /= 2)
      largest = max_ignoring_nan(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    return largest;
  };
  Compute largest = largest_of_lanes();
  // Logits below -kLimit need no limiting if the largest is so far above it that their exponentials are 0.
  constexpr Compute kLimit = static_cast<Compute>(kLargestLogit);
  const bool ordinary = largest <= kLimit && largest >= Compute(1000) - kLimit;
  if (__any_sync(0xffffffffu, !ordinary)) {
    RunningSum<Compute> limited;
    // Only the classes that the lane has added above: lanes of other warps that share the frame may have no such
    // logits.
    const int all = (vectors - rank + sharing - 1) / sharing * kVec;
#pragma unroll 1
    for (int i = 0; rank < vectors && i < all; ++i) {
      const int c = head + (rank + i / kVec * sharing) * kVec + i % kVec;
      Compute x[1] = {logit<Compute>(row[c * step])};
      limited.add(x, -1 - c);
    }
#pragma unroll 1
    for (int i = rank; i < classes - vectors * kVec; i += sharing) {
      const int c = i < head ? i : i + vectors * kVec;
      Compute x[1] = {logit<Compute>(row[c * step])};
      limited.add(x, -1 - c);
    }
    if (!ordinary) sum = limited;
    largest = largest_of_lanes();
  }
  const int own_first = lane - lane % lanes;
  const unsigned have = __ballot_sync(0xffffffffu, sum.largest == largest) >> own_first & (0xffffffffu >> (32 - lanes));
  const int winner = own_first + max(__ffs(static_cast<int>(have)) - 1, 0);
  const Compute unclamped = largest;
  // If all logits are -inf, -kLimit replaces the largest, so that no difference is NaN.
  largest = larger_or_nan(largest, -kLimit);
  Compute others = sum.others * power(-largest, -sum.shift);
  if (lane != winner) others += power(Compute(0), scaled(largest - sum.largest));
  for (int offset = lanes / 2; offset > 0; offset /= 2) others += __shfl_xor_sync(0xffffffffu, others, offset);
  // If the others add up to less than 1, none of them equals the largest logit, so comparing with it finds its class.
  int at = -1 - sum.place;
  if (lane == winner && sum.place >= 0 && others < Compute(1)) {
    for (int v = sum.place; v < vectors && v < sum.place + sharing * kReadTogether<Storage>; v += sharing) {
      const int c = head + v * kVec;
#pragma unroll
      for (int k = 0; k < kVec; ++k) at = widen<Compute>(row[c + k]) == largest ? c + k : at;
    }
  }
  return {unclamped, others, __shfl_sync(0xffffffffu, at, winner)};
}

// Returns the sums of a frame to each of the `lanes` lanes that share it. Preconditions: those of sums_of_lanes.
template <class Compute, class Storage>
__device__ __forceinline__ FrameSum<Compute> read_frame(const Storage* row, int classes, int64 step, int lanes) {
  const SharedFrame<Storage> frame(row, classes, step);
  const int rank = threadIdx.x % 32 % lanes;
  RunningSum<Compute> sum;
  if (lanes == 32) {
    add_vectors(sum, row + frame.head, frame.vectors, rank, 32);
  } else {
    add_vectors(sum, row + frame.head, frame.vectors, rank, lanes);
  }
  FrameSum<Compute> frame_sum = sums_of_lanes(sum, frame, lanes, rank, lanes);
  frame_sum.largest = larger_or_nan(frame_sum.largest, -static_cast<Compute>(kLargestLogit));
  return frame_sum;
}

// Number of warps of a block that writes the gradient of a frame of many classes and finds its sums as well
// (kFindsSums). Each warp adds up one part of the frame. A warp that reads a frame by itself (read_parts) adds the same
// parts in the same order.
constexpr int kParts = 4;
// Returns the sums of a frame from those of its parts.
template <class Compute>
__device__ __forceinline__ FrameSum<Compute> joined(const FrameSum<Compute> (&parts)[kParts]) {
  constexpr Compute kLeast = -static_cast<Compute>(kLargestLogit);
  FrameSum<Compute> all = {kLeast, Compute(0), -1};
#pragma unroll
  for (int i = 0; i < kParts; ++i) all.largest = larger_or_nan(all.largest, parts[i].largest);
  bool is_found = false;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const Compute largest = parts[i].largest;
    all.others += parts[i].others * power(Compute(0), scaled(all.largest - larger_or_nan(largest, kLeast)));
    if (!is_found && largest == all.largest) {
      is_found = true;
      all.at = parts[i].at;
    } else {
      all.others += power(Compute(0), scaled(all.largest - largest));
    }
  }
  return all;
}
// Returns the sums of a frame of many classes to all lanes of the warp that reads it. Precondition: all lanes of the
// warp call it.
template <class Compute, class Storage>
__device__ __forceinline__ FrameSum<Compute> read_parts(const Storage* row, int classes, int64 step) {
  const SharedFrame<Storage> frame(row, classes, step);
  FrameSum<Compute> parts[kParts];
#pragma unroll 1
  for (int i = 0; i < kParts; ++i) {
    const int rank = 32 * i + threadIdx.x % 32;
    RunningSum<Compute> sum;
    add_vectors(sum, row + frame.head, frame.vectors, rank, 32 * kParts);
    const FrameSum<Compute> part = sums_of_lanes(sum, frame, 32, rank, 32 * kParts);
#pragma unroll
    for (int j = 0; j < kParts; ++j) {
      if (i == j) parts[j] = part;
    }
  }
  return joined(parts);
}

// The halves of the recursion divide the frames between them: of every kShares places, the first `share` are the first
// half's, and the others the second half's.
constexpr unsigned kShares = 8;

// Computes the sums of a half's frames. This is block `block` of `blocks`; each of its warps processes one place at a
// time, which is a few frames of a sample. kFirst: from both ends to the middle, like the recursion, which finds its
// elements in L2 or leaves them there. The second half goes the other way.
template <bool kFirst, bool kInParts, class Compute, class Storage>
__device__ __forceinline__ void read_frames(const Sequences& shape, const Storage* x, const Sample* samples,
                                            FrameSum<Compute>* sums, unsigned* broken, unsigned share, unsigned block,
                                            unsigned blocks) {
  const int lanes = kInParts ? 32 : lanes_of<Storage>(shape);
  const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), of_block = blockDim.x / 32;
  const unsigned together = 32u / static_cast<unsigned>(lanes);
  const unsigned runs = (static_cast<unsigned>(shape.frames) + together - 1) / together;
  const unsigned begin = kFirst ? 0 : share, width = kFirst ? share : kShares - share;
  const unsigned count = static_cast<unsigned>(shape.samples), places = (runs + kShares - 1) / kShares * width;
  for (unsigned i = block * of_block + warp; i < places * count; i += blocks * of_block) {
    const unsigned at = i / count, index = kFirst ? at : places - 1 - at;
    const unsigned place = index / width * kShares + begin + index % width;
    const unsigned run = place % 2 == 0 ? place / 2 : runs - 1 - place / 2;
    const int64 n = i % count;
    const int frames = samples[n].frames;
    const Storage* const logits = x + shape.x_offset(n);
    const int64 first = static_cast<int64>(run) * together;
    if (place >= runs || first >= frames) continue;
    // Lanes past the last frame read it again.
    const int64 t = first + threadIdx.x % 32 / lanes;
    const int64 row = t < frames ? t : frames - 1;
    const Storage* const from = logits + row * shape.x_frame;
    const int classes = static_cast<int>(shape.classes);
    FrameSum<Compute> sum;
    if constexpr (kInParts) {
      sum = read_parts<Compute>(from, classes, shape.x_class);
    } else {
      sum = read_frame<Compute>(from, classes, shape.x_class, lanes);
    }
    if (t < frames && threadIdx.x % lanes == 0) {
      sums[n * shape.frames + t] = sum;
      if (sum.others != sum.others) atomicOr(broken + kByLogits * shape.samples + n, kNanLogit);
    }
  }
}

// Computes Z of a sample that runs from its meeting rows, as Z = total 2^`exponent`. Returns the total to thread 0, and
// `exponent` to every thread. Preconditions: all threads of a block call it; their number is a power of two from 32 to
// 1024. Ends in a barrier.
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

// Computes the loss of sample n. `values`, unless null, receives the weighted loss. `losses` receives the same, divided
// by the number of labels if `averages` is set. `value`, unless null, receives the sum of `losses` over the divisor,
// from the block that arrives last. Each thread loads the sums of kAtOnce frames at once. Preconditions: blocks of 128
// threads, one per sample.
template <bool kLogits, int kAtOnce, class Mantissa, class Result>
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
      const FrameSum<Mantissa>* const of_sample = sums + n * shape.frames;
#pragma unroll 1
      for (int first = threadIdx.x; first < sample.frames; first += kAtOnce * blockDim.x) {
        FrameSum<Mantissa> sum[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int t = min(first + i * static_cast<int>(blockDim.x), sample.frames - 1);
          sum[i].largest = of_sample[t].largest;
          sum[i].others = of_sample[t].others;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i * static_cast<int>(blockDim.x) < sample.frames)
            rows += static_cast<double>(sum[i].largest) + log1p(static_cast<double>(sum[i].others));
        }
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
  if (kLogits && sample.outcome != kBad && sample.outcome != kSkipped &&
      (broken[kByLogits * shape.samples + n] & kNanLogit) != 0u)
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

// Gradient before scaling. kPlain: -occ. kOfLogits: exp(x) - occ. kSoftmax: softmax - occ.
enum GradientKind { kPlain, kOfLogits, kSoftmax };

// The summand of a frame's gradient beside -occ: 0, exp(x) or softmax, according to kKind.
template <GradientKind kKind, class Mantissa>
struct FrameSoftmax {
  Mantissa shift = 0, factor = 1;

  __device__ __forceinline__ FrameSoftmax() {
  }
  __device__ __forceinline__ explicit FrameSoftmax(const FrameSum<Mantissa>& sum) {
    if constexpr (kKind == kSoftmax) {
      shift = scaled(sum.largest);
      factor = power(-sum.largest, -shift) / (Mantissa(1) + sum.others);
    }
  }
  // Returns the summand for a stored logit, with `multiple` as its factor instead of `factor`.
  template <class Storage>
  __device__ __forceinline__ Mantissa of(Storage stored, Mantissa multiple) const {
    if constexpr (kKind == kSoftmax) {
      // A logit above kLargestLogit needs no check: the loss is NaN then.
      const Mantissa z = widen<Mantissa>(stored), lowest = static_cast<Mantissa>(-kLargestLogit);
      return power(z < lowest ? -infinity(z) : z, shift) * multiple;
    }
    if constexpr (kKind == kOfLogits) return static_cast<Mantissa>(exp(logit<Mantissa>(stored))) * multiple;
    return Mantissa(0);
  }
};

// Posteriors of one position, or sums of several: of the blank, of the label, and of both, excluding one class.
template <class Mantissa>
struct PositionPosteriors {
  Mantissa blank = 0, label = 0, others = 0;
};

// Number of classes outside of vectors that a lane loads before it writes the gradient of the first. Where the vectors
// of logits and of gradients are not aligned alike, these are all classes, and loads of one at a time would each wait
// for memory.
template <GradientKind kKind>
constexpr int kSingles = kKind == kPlain ? 1 : 4;

// Number of threads of a block that writes gradients of frames of many classes.
constexpr int kLongThreads = 128;
// Number of blocks that a multiprocessor is to hold, for gradients of frames of many classes; the second is with
// kFindsSums. With more, GPUs of a compute capability other than 9.0 would spill registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int kLongBlocks = 5, kFindingBlocks = 4;
#else
constexpr int kLongBlocks = 6, kFindingBlocks = 5;
#endif
// Block-wide sums of `posteriors`, in every thread; `others` is summed only if `has_others`. Preconditions: all threads
// of a block of kLongThreads call it; the caller synchronizes the block after using the result, before the next call.
// Contains a barrier.
template <class Mantissa>
__device__ __forceinline__ PositionPosteriors<Mantissa> add_posteriors(PositionPosteriors<Mantissa> posteriors,
                                                                       bool has_others) {
  __shared__ PositionPosteriors<Mantissa> of_warps[kLongThreads / 32];
  posteriors.blank = warp_sum(posteriors.blank);
  posteriors.label = warp_sum(posteriors.label);
  if (has_others) posteriors.others = warp_sum(posteriors.others);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = posteriors;
  __syncthreads();
  PositionPosteriors<Mantissa> all;
#pragma unroll
  for (int w = 0; w < kLongThreads / 32; ++w) {
    all.blank += of_warps[w].blank;
    all.label += of_warps[w].label;
    all.others += of_warps[w].others;
  }
  return all;
}

// Block-wide sum of `others`, in every thread. Preconditions: those of add_posteriors. Contains a barrier.
template <class Mantissa>
__device__ __forceinline__ Mantissa add_others(Mantissa others) {
  __shared__ Mantissa of_warps[kLongThreads / 32];
  others = warp_sum(others);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = others;
  __syncthreads();
  Mantissa all = 0;
#pragma unroll
  for (int w = 0; w < kLongThreads / 32; ++w) all += of_warps[w];
  return all;
}

// Number of classes in a window, at most. Frames of many classes are written in windows, and shared memory has a number
// for each class of a window.
template <class Mantissa>
constexpr int kWindow = 32768 / static_cast<int>(sizeof(Mantissa));
// Number of windows of a frame. Frames of few classes are not divided.
template <bool kMany, class Mantissa>
__device__ __forceinline__ unsigned windows_of(const Sequences& shape) {
  return kMany ? (static_cast<unsigned>(shape.classes) - 1) / kWindow<Mantissa> + 1 : 1;
}

// The vectors of successive frames, which a block reads and writes in turn. While some are written, loads of the next
// ones, of the same frame or of the next, are in flight.
template <GradientKind kKind, class Storage>
struct LongRows {
  static constexpr int kVec = 16 / sizeof(Storage);
  // More vectors would spill registers beside exact exponentials, or with 16-bit logits where kLongBlocks is 5.
  static constexpr int kAhead = kKind == kOfLogits ? 1 : kVec == 8 && kLongBlocks == 5 ? 2 : 4;
  static constexpr int kStep = kLongThreads * kAhead;
  Pack<Storage, kVec> raw[kAhead] = {};

  // Loads the thread's i-th vector if fewer than `left` vectors precede it; `from` points at the thread's first vector.
  __device__ __forceinline__ void load(const Storage* from, int left, int i) {
    if constexpr (kKind != kPlain) {
      if (static_cast<int>(threadIdx.x) + kLongThreads * i < left)
        raw[i] = load_vector<kVec>(from + kLongThreads * i * kVec);
    }
  }
  // Writes of(vector, numbers) for the thread's share of `left` vectors; `numbers` has a number for each of their
  // elements. Loads the first of the `next_left` vectors at `next` meanwhile. All pointers are to the thread's first
  // vector.
  template <class Mantissa, class Of>
  __device__ __forceinline__ void write(const Storage* from, Storage* to, const Mantissa* numbers, int left,
                                        const Storage* next, int next_left, const Of& of) {
    bool more = true;
#pragma unroll 1
    while (more) {
      more = left > kStep;
      from = more ? from + kStep * kVec : next;
      const int remaining = more ? left - kStep : next_left;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const bool exists = static_cast<int>(threadIdx.x) + kLongThreads * i < left;
        Pack<Storage, kVec> gradient;
        if (exists)
          gradient = of(raw[i], *reinterpret_cast<const Pack<Mantissa, kVec>*>(numbers + kLongThreads * i * kVec));
        load(from, remaining, i);
        if (exists) store_pack(to + kLongThreads * i * kVec, gradient);
      }
      to += kStep * kVec;
      numbers += kStep * kVec;
      left = remaining;
    }
  }
};

// A frame in shared memory, for blocks that find its sums as well. Each thread copies and reads only its own vectors.
// It starts to copy a vector of the next frame over one of this frame once it has written the gradient of the latter.
template <class Storage>
struct CopiedFrame {
  static constexpr int kVec = 16 / sizeof(Storage);
  using Vector = Pack<Storage, kVec>;
  Vector* own;  // the thread's first vector; the others are kLongThreads apart

  // Returns the copy of the block. It is stored after a number for each class, and a few more (write_long_frames).
  template <class Mantissa>
  static __device__ __forceinline__ CopiedFrame of_block(const Sequences& shape) {
    extern __shared__ uint4 staged[];
    Mantissa* const numbers = reinterpret_cast<Mantissa*>(staged);
    return {reinterpret_cast<Vector*>(numbers + (static_cast<int>(shape.classes) + 15) / 8 * 8) + threadIdx.x};
  }

  // Starts the copies of the thread's vectors.
  __device__ __forceinline__ void begin(const SharedFrame<Storage>& frame) const {
#pragma unroll 1
    for (int v = threadIdx.x; v < frame.vectors; v += kLongThreads) copy(frame, v);
  }
  // Starts the copy of vector `v`, if there is one.
  __device__ __forceinline__ void copy(const SharedFrame<Storage>& frame, int v) const {
    if (v >= frame.vectors) return;
    Vector* const to = own + (v - static_cast<int>(threadIdx.x));
    const Storage* const from = frame.row + frame.head + v * kVec;
    if constexpr (kHasCpAsync) {
      cp_async_bytes<16>(to, from);
    } else {
      *to = load_vector<kVec>(from);
    }
  }
  // Returns the sums of the warp's part of `frame`. Precondition: its copies have arrived.
  template <class Compute>
  __device__ __forceinline__ FrameSum<Compute> sums(const SharedFrame<Storage>& frame) const {
    constexpr int kTogether = kReadTogether<Storage>;
    const int rank = threadIdx.x;
    RunningSum<Compute> sum;
#pragma unroll 1
    for (int v = 0; v < frame.vectors; v += kTogether * kLongThreads) {
      Compute x[kTogether * kVec];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const bool exists = v + rank + kLongThreads * i < frame.vectors;
        Vector raw;
        if (exists) raw = own[v + kLongThreads * i];
#pragma unroll
        for (int k = 0; k < kVec; ++k) {
          const Compute read = widen<Compute>(raw.element[k]);
          x[i * kVec + k] = exists ? read : -infinity(read);
        }
      }
      sum.add(x, v + rank);
    }
    return sums_of_lanes(sum, frame, 32, rank, kLongThreads);
  }
};

// Stores the sums of a frame, and flags them in `broken` if they are NaN. Precondition: one thread calls it.
template <class Compute>
__device__ __forceinline__ void tell_sum(const FrameSum<Compute>& sum, FrameSum<Compute>* to, unsigned* broken) {
  *to = sum;
  if (sum.others != sum.others) atomicOr(broken, kNanLogit);
}
// Computes and stores the sums of a frame whose gradient is not written. Precondition: all threads of a block of
// kLongThreads call it.
template <class Compute, class Storage>
__device__ __forceinline__ void find_sum(const Storage* row, int classes, int64 step, FrameSum<Compute>* to,
                                         unsigned* broken) {
  __shared__ FrameSum<Compute> parts[kParts];
  const SharedFrame<Storage> frame(row, classes, step);
  const int rank = threadIdx.x;
  RunningSum<Compute> sum;
  add_vectors(sum, row + frame.head, frame.vectors, rank, kLongThreads);
  const FrameSum<Compute> part = sums_of_lanes(sum, frame, 32, rank, kLongThreads);
  if (rank % 32 == 0) parts[rank / 32] = part;
  __syncthreads();
  if (rank == 0) tell_sum(joined(parts), to, broken);
  __syncthreads();
}

// Writes the gradients of classes begin .. begin + count - 1 in frames first, first + step, ... before `end`.
// Posteriors are loaded a frame ahead. kFindsSums: computes the sums of each frame; unless `broken` is null, stores
// them in `sums` and flags NaN in `broken`. Otherwise reads `sums`.
//
// Preconditions: all threads of a block of kLongThreads call it; dynamic shared memory has count + 8 numbers, which no
// thread uses before; with kFindsSums, the window has all classes, and copies of the first frame have begun
// (CopiedFrame).
template <GradientKind kKind, bool kFindsSums, class Mantissa, class Storage>
__device__ __forceinline__ void write_long_frames(const Sequences& shape, const Storage* x, Storage* g,
                                                  const int* labels, const unsigned* links, const Mantissa* states,
                                                  int size, FrameSum<Mantissa>* sums, unsigned* broken, Mantissa scale,
                                                  int first, int step, int end, int begin, int count) {
  using Rows = LongRows<kKind, Storage>;
  constexpr int kVec = Rows::kVec;
  extern __shared__ uint4 staged[];
  Mantissa* const occ = reinterpret_cast<Mantissa*>(staged);  // occ by class, times `scale`
  const int rank = threadIdx.x, blank = static_cast<int>(shape.blank);
  if (first >= end) return;
  bool alike = shape.g_class == 1;
  if constexpr (kKind != kPlain) {
    alike = alike && shape.x_class == 1 && (shape.x_frame - shape.g_frame) % kVec == 0 &&
            (reinterpret_cast<unsigned long long>(x) - reinterpret_cast<unsigned long long>(g)) % 16 == 0;
  }
  const int64 of_step_x = step * shape.x_frame, of_step_g = step * shape.g_frame;
  const bool moves = alike && of_step_g % kVec != 0;
  x += first * shape.x_frame + begin * shape.x_class;
  g += first * shape.g_frame + begin * shape.g_class;
  // Number of the window's classes before the first vector of a frame: all of them if the vectors of x and of g are not
  // aligned alike.
  auto head_of = [&](const Storage* row) { return alike ? classes_before_vectors(row, count) : count; };
  // A thread owns positions rank, rank + kLongThreads, ...
  const bool has_label = rank < size - 1;
  const int own_class = has_label ? labels[rank] : 0;
  const unsigned own_link = has_label ? links[rank] : kEarlier;
  FrameSum<Mantissa> next_sum = {Mantissa(0), Mantissa(0), 0};
  Mantissa next_blank = 0, next_label = 0;
  auto load_next = [&](int t) {
    const Mantissa* const posteriors = states + 2 * wide_product(t, size);
    if (rank < size) next_blank = posteriors[rank];
    if (has_label) next_label = posteriors[size + rank];
    if constexpr (kKind == kSoftmax && !kFindsSums) next_sum = sums[t];
  };
  load_next(first);
  int head = head_of(g);
  Rows rows;
  const CopiedFrame<Storage> copied = CopiedFrame<Storage>::template of_block<Mantissa>(shape);
  auto frame_of = [&](const Storage* row) {
    return SharedFrame<Storage>(row, static_cast<int>(shape.classes), shape.x_class);
  };
  if constexpr (!kFindsSums) {
#pragma unroll
    for (int i = 0; i < Rows::kAhead; ++i) rows.load(x + head + rank * kVec, (count - head) / kVec, i);
  }
  for (int i = rank; i < count + kVec; i += kLongThreads) occ[i] = Mantissa(0);
#pragma unroll 1
  for (int t = first; t < end; t += step) {
    FrameSum<Mantissa> sum = next_sum;
    const Mantissa* const posteriors = states + 2 * wide_product(t, size);
    PositionPosteriors<Mantissa> of_thread = {next_blank, next_label, Mantissa(0)};
    if (t + step < end) load_next(t + step);
    __shared__ FrameSum<Mantissa> parts[kParts];
    if constexpr (kFindsSums) {
      cp_async_wait_all();
      const FrameSum<Mantissa> part = copied.template sums<Mantissa>(frame_of(x));
      if (rank % 32 == 0) parts[rank / 32] = part;
    }
    // The class that has more than half of softmax, or -1.
    int likely = kKind == kSoftmax && sum.others < Mantissa(1) ? static_cast<int>(sum.at) : -1;
    if constexpr (kFindsSums) likely = -1;
    auto others_of = [&](Mantissa at_blank, Mantissa at_label, int c) {
      return (likely != blank ? at_blank : Mantissa(0)) + (likely != c ? at_label : Mantissa(0));
    };
    // Returns the sum over all labels of a class, from its first label on.
    auto of_class = [&](unsigned link, Mantissa of_label) {
      while (link != 0u) {
        const int j = static_cast<int>(link) - 1;
        of_label += posteriors[size + j];
        link = links[j] & ~kEarlier;
      }
      return of_label;
    };
    if (likely >= 0) of_thread.others = others_of(of_thread.blank, of_thread.label, own_class);
    const Mantissa own_label = of_thread.label;
#pragma unroll 2
    for (int j = rank + kLongThreads; j < size; j += kLongThreads) {
      const Mantissa at_blank = posteriors[j], at_label = j < size - 1 ? posteriors[size + j] : Mantissa(0);
      of_thread.blank += at_blank;
      of_thread.label += at_label;
      if (likely >= 0) of_thread.others += others_of(at_blank, at_label, j < size - 1 ? labels[j] : blank);
    }
    // After the barrier in add_posteriors, no thread needs the occ of the preceding frame.
    auto all = add_posteriors(of_thread, likely >= 0);
    if constexpr (kFindsSums) {
      sum = joined(parts);
      if (rank == 0 && broken != nullptr) tell_sum(sum, sums + t, broken);
      likely = sum.others < Mantissa(1) ? static_cast<int>(sum.at) : -1;
      if (likely >= 0) {
        // If the model is uncertain, few frames come here.
        of_thread = {};
#pragma unroll 1
        for (int j = rank; j < size; j += kLongThreads) {
          of_thread.others += others_of(posteriors[j], j < size - 1 ? posteriors[size + j] : Mantissa(0),
                                        j < size - 1 ? labels[j] : blank);
        }
        all.others = add_others(of_thread.others);
      }
    }
    const Mantissa share = scale / (all.blank + all.label);
    // Index in `occ` of the window's first class, chosen so that vectors are aligned there too. All frames have the
    // same labels, so other entries stay 0, unless the origin moves.
    int origin = alike ? kVec - head : 0;
    auto put = [&](int c, Mantissa value) {
      const unsigned place = static_cast<unsigned>(c - begin);
      if (place < static_cast<unsigned>(count)) occ[origin + static_cast<int>(place)] = value;
    };
    if (moves && t > first) {
      const int now = origin;
      origin = kVec - classes_before_vectors(g - of_step_g, count);
#pragma unroll 1
      for (int j = rank; j < size - 1; j += kLongThreads) {
        if ((links[j] & kEarlier) == 0u) put(labels[j], Mantissa(0));
      }
      if (rank == 0) put(blank, Mantissa(0));
      __syncthreads();
      origin = now;
    }
    // By now L1 has all posteriors of the frame.
    if ((own_link & kEarlier) == 0u) put(own_class, of_class(own_link, own_label) * share);
#pragma unroll 1
    for (int j = rank + kLongThreads; j < size - 1; j += kLongThreads) {
      const unsigned link = links[j];
      if ((link & kEarlier) == 0u) put(labels[j], of_class(link, posteriors[size + j]) * share);
    }
    if (rank == kLongThreads - 1) put(blank, all.blank * share);
    __syncthreads();
    const int next_head = head_of(g + of_step_g), vectors = (count - head) / kVec;
    // The gradient of a class with more than half of both softmax and occ is the others' occ minus the others' softmax.
    // The thread that writes its vector rewrites this element afterwards.
    int rewritten = -1;
    Mantissa of_likely = 0;
    if (likely >= begin && likely - begin < count) {
      const int place = likely - begin, offset = place - head;
      const int edge = offset < 0 ? place : place - vectors * kVec;
      const int owner = offset >= 0 && offset < vectors * kVec ? offset / kVec : edge;
      const Mantissa most = occ[origin + place], half = Mantissa(0.5) * scale;
      if (owner % kLongThreads == rank && (most > half || most < -half)) rewritten = place;
      of_likely = all.others * share - sum.others / (Mantissa(1) + sum.others) * scale;
    }
    const FrameSoftmax<kKind, Mantissa> softmax(sum);
    const Mantissa multiple = softmax.factor * scale;
    const auto gradient = [&](const Pack<Storage, kVec>& raw, const Pack<Mantissa, kVec>& of_labels) {
      Mantissa value[kVec];
#pragma unroll
      for (int k = 0; k < kVec; ++k) value[k] = softmax.of(raw.element[k], multiple) - of_labels.element[k];
      return NarrowPack<Storage, kVec>::from(value);
    };
    if constexpr (kFindsSums) {
      SharedFrame<Storage> next = frame_of(x + of_step_x);
      if (t + step >= end) next.vectors = 0;
      constexpr int kAtOnce = 2;
#pragma unroll 1
      for (int v = rank; v - rank < max(vectors, next.vectors); v += kLongThreads * kAtOnce) {
        Pack<Storage, kVec> raw[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (v + kLongThreads * i < vectors) raw[i] = copied.own[v - rank + kLongThreads * i];
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int index = v + kLongThreads * i;
          if (index < vectors) {
            store_pack(g + head + index * kVec,
                       gradient(raw[i], *reinterpret_cast<const Pack<Mantissa, kVec>*>(occ + (index + 1) * kVec)));
          }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) copied.copy(next, v + kLongThreads * i);
      }
    } else {
      rows.write(x + head + rank * kVec, g + head + rank * kVec, occ + (rank + 1) * kVec, vectors,
                 x + of_step_x + next_head + rank * kVec, t + step < end ? (count - next_head) / kVec : 0, gradient);
    }
    const int singles = count - vectors * kVec;
#pragma unroll 1
    for (int first_single = rank; first_single < singles; first_single += kLongThreads * kSingles<kKind>) {
      Storage stored[kSingles<kKind>] = {};
      auto class_of = [&](int i) { return i < head ? i : i + vectors * kVec; };
#pragma unroll
      for (int k = 0; k < kSingles<kKind>; ++k) {
        const int i = first_single + kLongThreads * k;
        if constexpr (kKind != kPlain) {
          if (i < singles) stored[k] = x[class_of(i) * shape.x_class];
        }
      }
#pragma unroll
      for (int k = 0; k < kSingles<kKind>; ++k) {
        const int i = first_single + kLongThreads * k, c = class_of(i);
        if (i < singles)
          g[c * shape.g_class] = Narrow<Storage>::from(softmax.of(stored[k], multiple) - occ[origin + c]);
      }
    }
    if (rewritten >= 0) g[rewritten * shape.g_class] = Narrow<Storage>::from(of_likely);
    x += of_step_x;
    g += of_step_g;
    head = next_head;
  }
}

// Shared memory of a block, for a sample of few labels in frames of few classes. `head` is the position of the first
// label of each class, and `next` that of the next label of the same class. Where there is none, it is the last
// position, which has no label. `rows` has the posteriors of the frames that a warp processes together, in the order of
// the lattice.
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

  // Fills `head` and `next`. Precondition: all threads of the block call it, before any reads these. Ends in a barrier.
  __device__ __forceinline__ void begin(const Sequences& shape, const int* labels, const unsigned* links, int count) {
    const unsigned short none = static_cast<unsigned short>(count);
    for (int c = threadIdx.x; c < (shape.classes + 3) / 4 * 4; c += blockDim.x) head[c] = none;
    __syncthreads();
    for (int j = threadIdx.x; j < count; j += blockDim.x) {
      const unsigned link = links[j], successor = link & ~kEarlier;
      next[j] = successor != 0u ? static_cast<unsigned short>(successor - 1u) : none;
      if ((link & kEarlier) == 0u) head[labels[j]] = static_cast<unsigned short>(j);
    }
    if (threadIdx.x == 0) next[count] = none;
    __syncthreads();
  }

  // Starts to copy `count` posteriors to the warp's rows, and returns the address of the first one there. Copies whole
  // vectors: memory of the lattice extends past both ends.
  __device__ __forceinline__ Mantissa* copy(const Mantissa* from, int count) {
    const int before = static_cast<int>(reinterpret_cast<unsigned long long>(from) % 16 / sizeof(Mantissa));
    const uint4* const vectors = reinterpret_cast<const uint4*>(from - before);
    Mantissa* const row = rows[threadIdx.x / 32];
#pragma unroll kHasCpAsync ? 4 : 1
    for (int i = threadIdx.x % 32; i < (before + count + kVector - 1) / kVector; i += 32) {
      if constexpr (kHasCpAsync) {
        cp_async_bytes<16>(row + i * kVector, vectors + i);
      } else {
        reinterpret_cast<uint4*>(row)[i] = vectors[i];
      }
    }
    return row + before;
  }
};

// Number of lanes that share a frame of few classes: a power of two. Fewer would process more than two vectors each.
template <class Storage>
__device__ __forceinline__ int short_lanes(const Sequences& shape) {
  const int64 vectors = shape.classes * static_cast<int64>(sizeof(Storage)) / 16;
  return vectors <= 16 ? 8 : vectors <= 32 ? 16 : 32;
}
// Frames of few classes of a sample. A warp processes a few of them at a time, and `lanes` lanes share one.
template <GradientKind kKind, class Mantissa, class Storage>
struct ShortRun {
  static constexpr int kVec = 16 / sizeof(Storage);
  // Number of frames that a lane processes at once, so that the links of labels are read once for all of them. Beside
  // exact exponentials of eight logits, two would spill registers.
  static constexpr int kAtOnce = kKind == kOfLogits && kVec == 8 ? 1 : 2;
  const Storage* x;  // first operand and gradient of the sample
  Storage* g;
  const FrameSum<Mantissa>* sums;
  int lanes, vectors;  // vectors of a frame, 0 if they are not aligned
  Mantissa scale;
  int first, count;  // frames that the warp processes now
  Mantissa* rows;
  FrameSum<Mantissa> sum[kAtOnce];
  Pack<Storage, kVec> first_vector[kAtOnce];

  // Index of the lane's i-th frame, counted from `first`. Past the last frame, a lane repeats its first frame; a lane
  // without any uses frame 0.
  __device__ __forceinline__ int frame(int i) const {
    const int group = threadIdx.x % 32 / lanes, index = group + 32 / lanes * i;
    return index < count ? index : group < count ? group : 0;
  }
  // True if the lane has an i-th frame.
  __device__ __forceinline__ bool exists(int i) const {
    return static_cast<int>(threadIdx.x % 32) / lanes + 32 / lanes * i < count;
  }

  // Starts the loads of the lanes' frames: sums, first vectors, and posteriors, which begin at `posteriors`.
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

// Writes the gradients of the frames that `run` has loaded, each class once. Precondition: all lanes of the warp call
// it. A lane may return before others have read the rows.
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
  // The spare entry of a row is the posterior of a class without labels.
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
  // The entry of a class's first label takes the sum over all its labels. A lane owns all labels of its classes, which
  // no other lane reads.
  constexpr int kClasses = 4;
#pragma unroll 1
  for (int c = rank * kClasses; run.exists(0) && c < classes; c += lanes * kClasses) {
    const auto heads = *reinterpret_cast<const Pack<unsigned short, kClasses>*>(few.head + c);
    int at[kClasses];
    Mantissa values[kAtOnce][kClasses] = {};
#pragma unroll
    for (int k = 0; k < kClasses; ++k) at[k] = heads.element[k];
#pragma unroll 1
    while (min(min(at[0], at[1]), min(at[2], at[3])) < none) {
#pragma unroll
      for (int k = 0; k < kClasses; ++k) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) values[i][k] += labels[i][at[k]];
        at[k] = few.next[at[k]];
      }
    }
#pragma unroll
    for (int k = 0; k < kClasses; ++k) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        of_labels[i] += values[i][k];
        if constexpr (kKind == kSoftmax) of_others[i] += c + k == likely[i] ? Mantissa(0) : values[i][k];
        if (heads.element[k] < none) labels[i][heads.element[k]] = values[i][k];
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
  const int64 t = run.first + run.frame(0), step = run.frame(1) - run.frame(0);
  const Storage* const x = run.x + t * shape.x_frame;
  Storage* const g = run.g + t * shape.g_frame;
  FrameSoftmax<kKind, Mantissa> softmax[kAtOnce];
  Mantissa share[kAtOnce], of_likely[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    softmax[i] = FrameSoftmax<kKind, Mantissa>(sum[i]);
    share[i] = Mantissa(1) / (of_blank[i] + of_labels[i]);
    if (likely[i] != blank) of_others[i] += of_blank[i];
    of_likely[i] = of_others[i] * share[i] - sum[i].others / (Mantissa(1) + sum[i].others);
  }
  auto gradient = [&](int i, int c, int head, Storage stored) -> Mantissa {
    const Mantissa before = softmax[i].of(stored, softmax[i].factor);
    const Mantissa occ = (c == blank ? of_blank[i] : labels[i][head]) * share[i];
    return (c == likely[i] && occ > Mantissa(0.5) ? of_likely[i] : before - occ) * run.scale;
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
      Mantissa values[kVec];
#pragma unroll
      for (int k = 0; k < kVec; ++k) values[k] = gradient(i, v * kVec + k, heads.element[k], raw.element[k]);
      if (run.exists(i)) store_pack(g + i * step * shape.g_frame + v * kVec, NarrowPack<Storage, kVec>::from(values));
    }
  }
#pragma unroll 1
  for (int first_single = run.vectors * kVec + rank; first_single < classes; first_single += lanes * kSingles<kKind>) {
    Storage raw[kSingles<kKind>][kAtOnce] = {};
#pragma unroll
    for (int k = 0; k < kSingles<kKind>; ++k) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int c = first_single + lanes * k;
        if constexpr (kKind != kPlain) {
          if (c < classes && run.exists(i)) raw[k][i] = x[i * step * shape.x_frame + c * shape.x_class];
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kSingles<kKind>; ++k) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int c = first_single + lanes * k;
        if (c >= classes || !run.exists(i)) continue;
        g[i * step * shape.g_frame + c * shape.g_class] = Narrow<Storage>::from(gradient(i, c, few.head[c], raw[k][i]));
      }
    }
  }
}

// True if sample n has alignments, as the recursion has found at the meeting. Sets `is_nan` if its loss is NaN for one
// of `reasons`.
__device__ __forceinline__ bool has_alignments(const Sequences& shape, const Sample& sample, const unsigned* broken,
                                               int64 n, unsigned reasons, bool& is_nan) {
  unsigned flags = broken[kByMeeting * shape.samples + n];
  if ((reasons & kNanLogit) != 0u) flags |= broken[kByLogits * shape.samples + n];
  is_nan = sample.outcome != kBad && sample.outcome != kSkipped && (flags & reasons) != 0u;
  return sample.outcome == kRuns && (flags & kNoAlignment) == 0u;
}

// Number of frames of a sample per block that writes posteriors (posteriors.cuh).
constexpr int kFrames = 16;
// Number of runs of `frames` frames per sample.
__device__ __forceinline__ unsigned runs_of(const Sequences& shape, int frames) {
  return (static_cast<unsigned>(shape.frames) + frames - 1) / frames;
}

// Writes the gradient of one window in a run of `frames` frames of a sample, for the sample's grad_output over the
// divisor. Successive values of `block` go through the windows of a run, then the samples, then the runs. `again`: an
// earlier launch has flagged NaN logits in `broken`, and this one reads these flags instead of setting them.
//
// Preconditions: blocks of 128 threads; dynamic shared memory has a ShortFrames that the labels and classes fit, or
// with kMany what write_long_frames needs; no warp still reads shared memory of an earlier call.
template <GradientKind kKind, bool kMany, bool kFindsSums, class Mantissa, class Storage, class Result>
__device__ __forceinline__ void write_gradient(const Sequences& shape, const Storage* x, Storage* g,
                                               const Sample* samples, const int* labels, const unsigned* links,
                                               const Mantissa* lattice, FrameSum<Mantissa>* sums, unsigned* broken,
                                               const Result* grad_output, const double* used, int64 per_sample,
                                               double multiple, const double* count, int frames, bool again,
                                               unsigned block) {
  const unsigned windows = windows_of < kMany && !kFindsSums, Mantissa > (shape);
  const unsigned row = block / windows, samples_in_all = static_cast<unsigned>(shape.samples);
  const int64 n = row % samples_in_all;
  // With many classes, the frames of a run are spread over the sample, so that blocks running at the same time access
  // the same parts of memory.
  const int run = static_cast<int>(row / samples_in_all), classes = static_cast<int>(shape.classes);
  const int first = kMany ? run : run * frames, step = kMany ? static_cast<int>(runs_of(shape, frames)) : 1;
  const int all_frames = static_cast<int>(shape.frames),
            end = kMany ? all_frames : first + min(frames, all_frames - first);
  // Windows have whole vectors.
  const int window = kMany && !kFindsSums ? ((classes - 1) / static_cast<int>(windows) + 8) / 8 * 8 : classes;
  const int begin = kMany && !kFindsSums ? static_cast<int>(block % windows) * window : 0,
            width = min(window, classes - begin);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if constexpr (kFindsSums) {
    // Started before anything that waits for loads.
    CopiedFrame<Storage>::template of_block<Mantissa>(shape).begin(
        SharedFrame<Storage>(x + shape.x_offset(n) + first * shape.x_frame, classes, shape.x_class));
  }
  const Sample sample = samples[n];
  const double divisor = count == nullptr ? multiple : multiple * __ldcg(count);
  double scale = grad_output == nullptr ? *used : widen<double>(grad_output[per_sample != 0 ? n : 0]);
  // A mean over no samples has no gradient.
  scale = divisor == 0.0 ? 0.0 : scale * sample.weight / divisor;
  if (shape.averages != 0 && sample.labels > 1) scale /= static_cast<double>(sample.labels);
  bool is_nan;
  const bool exists =
      has_alignments(shape, sample, broken, n, kKind == kSoftmax && again ? kNanLogit | kNanLoss : kNanLoss, is_nan);
  const int size = sample.labels + 1;
  x += shape.x_offset(n);
  g += shape.g_offset(n);
  const int* const sample_labels = labels + sample.first;
  const unsigned* const next = links + sample.first;
  const Mantissa* const states = lattice + Lattice<Mantissa>::row(sample, shape.frames, 0);
  FrameSum<Mantissa>* const frame_sums = sums + n * shape.frames;
  const int filled = exists && !is_nan ? min(end, sample.frames) : first;
  // Frames of this run without a gradient: all from `empty` on.
  const int empty = filled > first ? first + (filled - first + step - 1) / step * step : first;
  for (int64 t = empty + static_cast<int64>(warp) * step; t < end; t += warps * step) {
    Storage* const row = g + t * shape.g_frame + begin * shape.g_class;
    const Storage fill = Narrow<Storage>::from(is_nan && t < sample.frames ? not_a_number(Mantissa(0)) : Mantissa(0));
    for (int64 c = lane; c < width; c += 32) row[c * shape.g_class] = fill;
  }
  unsigned* const broken_logits = again ? nullptr : broken + kByLogits * shape.samples + n;
  if constexpr (kFindsSums) {
    // Frames without a gradient still count in the loss.
    for (int t = filled > first ? end : first; !again && t < min(end, sample.frames); t += step)
      find_sum(x + t * shape.x_frame, classes, shape.x_class, frame_sums + t, broken_logits);
    if (filled <= first) cp_async_wait_all();
  }
  if constexpr (kMany) {
    write_long_frames<kKind, kFindsSums>(shape, x, g, sample_labels, next, states, size, frame_sums, broken_logits,
                                         static_cast<Mantissa>(scale), first, step, filled, begin, width);
  } else {
    using Short = ShortFrames<Mantissa>;
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
      if (!begun) few.begin(shape, sample_labels, next, size - 1);
      begun = true;
      if (run.count <= 0) break;
      write_short_frames(shape, few, run, size);
      __syncwarp();  // other lanes may still read the rows
      run.first += warps * together;
    }
  }
}

// Writes NaN to the gradient of sample n in every `blocks`-th frame from `block` on, if an earlier launch has met a NaN
// among the logits of its frames. Precondition: all threads of a block call it.
template <class Compute, class Storage>
__device__ __forceinline__ void write_nan(const Sequences& shape, Storage* g, const Sample* samples,
                                          const unsigned* broken, int64 n, int64 block, int64 blocks) {
  const Sample sample = samples[n];
  if ((broken[kByLogits * shape.samples + n] & kNanLogit) == 0u) return;
  if (sample.outcome == kBad || sample.outcome == kSkipped) return;
  const Storage nan = Narrow<Storage>::from(not_a_number(Compute(0)));
  for (int64 t = block; t < sample.frames; t += blocks) {
    Storage* const row = g + shape.g_offset(n) + t * shape.g_frame;
    for (int64 c = threadIdx.x; c < shape.classes; c += blockDim.x) row[c * shape.g_class] = nan;
  }
}

// Writes the gradients of windows of runs `block`, `block` + `blocks`, ... of all samples (see write_gradient).
template <GradientKind kKind, bool kMany, bool kFindsSums, class Mantissa, class Storage, class Result>
__device__ __forceinline__ void write_gradients(const Sequences& shape, const Storage* x, Storage* g,
                                                const Sample* samples, const int* labels, const unsigned* links,
                                                const Mantissa* lattice, FrameSum<Mantissa>* sums, unsigned* broken,
                                                const Result* grad_output, const double* used, int64 per_sample,
                                                double multiple, const double* count, int frames, bool again,
                                                int64 block, int64 blocks) {
  const int64 all = static_cast<int64>(runs_of(shape, frames)) * shape.samples * windows_of < kMany && !kFindsSums,
              Mantissa > (shape);
  for (; block < all; block += blocks) {
    write_gradient<kKind, kMany, kFindsSums>(shape, x, g, samples, labels, links, lattice, sums, broken, grad_output,
                                             used, per_sample, multiple, count, frames, again,
                                             static_cast<unsigned>(block));
    __syncthreads();
  }
}
