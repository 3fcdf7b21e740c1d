// CTC: the recursion, from both ends at once (Graves et al., ICML 2006; the two sweeps meet in the middle).
//
//   forward    b_j <- y(blank) (b_j + l_(j-1)),   l_j <- y(label_j) (l_j + b_j + [label_j != label_(j-1)] l_(j-1))
//   y_t(c) = exp(x[t, n, c]),   b_0 = 1 and all else 0 before the first frame
//
// over positions j = 0 .. S, each with the blank b_j before label j, and l_j. Beta is the same recursion on reversed
// frames and labels: one piece of code with reversed addresses. The term in brackets stays apart from the product:
//
//   posterior of a state at frame t = (alpha's bracket at t) (beta's product at t) / Z, and the other way round
//
// so nothing is divided by y, and y = 0 is no special case. Numbers are extended (extended.cuh).
//
// 1. First half: alpha takes frames 0 .. M - 1, beta T - 1 .. M, with M = T / 2. Each stores its products into the
//    lattice, if gradients are wanted, and its last ones into the meeting rows.
// 2. The meeting rows give Z: `meeting_terms` are the summands of a position.
// 3. Second half: alpha goes on over M .. T - 1 against beta's products, beta over M - 1 .. 0 against alpha's.
//    Posteriors, up to a factor of the frame, replace the mantissas.
//
// A block takes one direction of one sample, a thread one position; longer targets take several blocks, one for each
// band of 128 positions, and pass label products through memory. A shuffle brings l_(j-1) from the lane before. The
// dependence runs one way, so warps are skewed: in round r warp w takes chunk r - w of 8 frames, and reads the 8 states
// that warp w - 1 has left in shared memory. One barrier serves 8 frames. Emissions are computed a chunk ahead, from
// elements that were loaded another chunk ahead.
//
// Traffic, in numbers of 8 bytes (16 in double): (2 S + 1) T written, read and half of them written again; T (S + 1)
// elements of x, each in a sector of its own, in both halves.
#pragma once
#include "sequence/sequences.cuh"
#include "softmax/row_ptx.cuh"

constexpr int kChunk = 8;
// Warps of a block of the recursion, and positions, of which a sample may need several blocks.
constexpr int kMaxWarps = 4;
constexpr int kBand = 32 * kMaxWarps;

// The states of all frames. A row has the blanks of a frame by position, and behind them its labels.
template <class Mantissa>
struct Lattice {
  StoredNumber<Mantissa>* states;

  // The row of frame `t`, in a call of so many frames.
  __device__ __forceinline__ StoredNumber<Mantissa>* row(const Sample& sample, int64 frames, int64 t) const {
    return states + 2 * (sample.first * frames + t * (sample.labels + 1));
  }
};

// The row of alpha's last products, or beta's, in the same order as in the lattice.
template <class Mantissa>
__device__ __forceinline__ StoredNumber<Mantissa>* meeting_row(StoredNumber<Mantissa>* meeting, const Sample& sample,
                                                               int64 positions, int direction) {
  return meeting + 2 * (direction * positions + sample.first);
}

// The products of the states of a position at the meeting: alpha's bracket at frame M and beta's product there.
template <class Mantissa>
struct MeetingTerms {
  Extended<Mantissa> of[4];  // bracket and product of the blank, then of the label
};

template <class Mantissa>
__device__ __forceinline__ MeetingTerms<Mantissa> meeting_terms(const StoredNumber<Mantissa>* alpha,
                                                                const StoredNumber<Mantissa>* beta, const int* labels,
                                                                int size, int j) {
  using Number = Extended<Mantissa>;
  MeetingTerms<Mantissa> found;
  const Number b = load_number(alpha + j);
  const Number before = j > 0 ? load_number(alpha + size + j - 1) : zero_number<Mantissa>();
  found.of[0] = sum(b, before);
  found.of[1] = load_number(beta + j);
  found.of[2] = found.of[3] = zero_number<Mantissa>();
  if (j < size - 1) {
    const bool skips = j > 0 && labels[j] != labels[j - 1];
    const Number skipped = skips ? before : zero_number<Mantissa>();
    found.of[2] = sum(load_number(alpha + size + j), b, skipped);
    found.of[3] = load_number(beta + size + j);
  }
  return found;
}

// Lowest exponent of a product of two extended numbers: that of zero.
constexpr int64 kNoExponent = 8 * static_cast<int64>(kLowest);

// The exponent of bracket times product, kNoExponent if that is zero.
template <class Mantissa>
__device__ __forceinline__ int64 joint_exponent(const Extended<Mantissa>& a, const Extended<Mantissa>& b) {
  const bool zero = a.m == Mantissa(0) || b.m == Mantissa(0);
  return zero ? kNoExponent : static_cast<int64>(a.e) + b.e;
}

// True if it is NaN.
template <class Mantissa>
__device__ __forceinline__ bool is_nan(const Extended<Mantissa>& a, const Extended<Mantissa>& b) {
  const Mantissa m = a.m * b.m;
  return joint_exponent(a, b) != kNoExponent && m != m;
}

// 2^by for |by| below 127 and 1023; 0 below, and the largest power above.
__device__ __forceinline__ float power_of_two(int by, float) {
  return __uint_as_float(static_cast<unsigned>(min(max(by, -127), 127) + 127) << 23);
}
__device__ __forceinline__ double power_of_two(int by, double) {
  return __longlong_as_double(static_cast<int64>(min(max(by, -1023), 1023) + 1023) << 52);
}

// The product of a bracket and of what the other direction has, over 2^exponent: zero if either is, even of NaN.
template <class Mantissa>
__device__ __forceinline__ Mantissa posterior(const Extended<Mantissa>& a, const Extended<Mantissa>& b,
                                              int64 exponent) {
  const int64 e = joint_exponent(a, b);
  if (e == kNoExponent) return Mantissa(0);
  const int64 by = e - exponent;
  return a.m * b.m *
         power_of_two(static_cast<int>(by < kLowest    ? kLowest
                                       : by > -kLowest ? -kLowest
                                                       : by),
                      Mantissa(0));
}

// The largest exponent of Z's summands, in every thread; kNoExponent if Z is zero. The largest of integers does not
// depend on the order. Preconditions: all threads of the block; it ends in a barrier.
template <class Mantissa>
__device__ __forceinline__ int64 largest_exponent(const StoredNumber<Mantissa>* alpha,
                                                  const StoredNumber<Mantissa>* beta, const int* labels, int size) {
  __shared__ int64 largest[32];
  int64 mine = kNoExponent;
  for (int j = threadIdx.x; j < size; j += blockDim.x) {
    const MeetingTerms<Mantissa> terms = meeting_terms(alpha, beta, labels, size, j);
    mine = max(mine, max(joint_exponent(terms.of[0], terms.of[1]), joint_exponent(terms.of[2], terms.of[3])));
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) mine = max(mine, __shfl_xor_sync(0xffffffffu, mine, offset));
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = mine;
  __syncthreads();
  int64 all = largest[0];
  for (int w = 1; w < blockDim.x / 32; ++w) all = max(all, largest[w]);
  __syncthreads();
  return all;
}

template <class Mantissa>
__device__ __forceinline__ Extended<Mantissa> shuffled_up(const Extended<Mantissa>& a) {
  return {__shfl_up_sync(0xffffffffu, a.m, 1), __shfl_up_sync(0xffffffffu, a.e, 1)};
}

// A label product on its way to the next band, as it lies in a column (sequences.cuh).
template <class Mantissa>
struct Words;
template <>
struct Words<float> {
  unsigned long long both;
};
template <>
struct Words<double> {
  unsigned long long m, e;
};

__device__ __forceinline__ void send(StoredNumber<float>* to, const Extended<float>& a) {
  const unsigned long long m = __float_as_uint(a.m), e = static_cast<unsigned>(a.e);
  store_relaxed(reinterpret_cast<unsigned long long*>(to), m << 32 | e);
}
__device__ __forceinline__ void send(StoredNumber<double>* to, const Extended<double>& a) {
  unsigned long long* const words = reinterpret_cast<unsigned long long*>(to);
  store_relaxed(words, static_cast<unsigned long long>(__double_as_longlong(a.m)));
  store_relaxed(words + 1, static_cast<unsigned>(a.e));
}
__device__ __forceinline__ Words<float> look(const StoredNumber<float>* at) {
  return {load_relaxed(reinterpret_cast<const unsigned long long*>(at))};
}
__device__ __forceinline__ Words<double> look(const StoredNumber<double>* at) {
  const unsigned long long* const words = reinterpret_cast<const unsigned long long*>(at);
  return {load_relaxed(words), load_relaxed(words + 1)};
}
__device__ __forceinline__ bool arrived(const Words<float>& words) {
  return words.both != kAbsent;
}
__device__ __forceinline__ bool arrived(const Words<double>& words) {
  return words.m != kAbsent && words.e != kAbsent;
}
__device__ __forceinline__ Extended<float> number_of(const Words<float>& words) {
  return {__uint_as_float(static_cast<unsigned>(words.both >> 32)),
          static_cast<int>(static_cast<unsigned>(words.both))};
}
__device__ __forceinline__ Extended<double> number_of(const Words<double>& words) {
  return {__longlong_as_double(static_cast<int64>(words.m)), static_cast<int>(static_cast<unsigned>(words.e))};
}
__device__ __forceinline__ void set_absent(StoredNumber<float>* at) {
  store_relaxed(reinterpret_cast<unsigned long long*>(at), kAbsent);
}
__device__ __forceinline__ void set_absent(StoredNumber<double>* at) {
  store_relaxed(reinterpret_cast<unsigned long long*>(at), kAbsent);
  store_relaxed(reinterpret_cast<unsigned long long*>(at) + 1, kAbsent);
}

// One thread's position of one direction: addresses, and what it carries from frame to frame.
template <class Mantissa, class Storage>
struct Walk {
  using Number = Extended<Mantissa>;
  Number b, l;  // products of the frame before
  bool has_blank, has_label, skips;
  const Storage* x;  // the label's element at the first frame of this half
  const Storage* blank;
  int64 step;                        // elements from a frame to the next one of this direction
  StoredNumber<Mantissa>* at_blank;  // in the lattice, at the first frame of this half
  StoredNumber<Mantissa>* at_label;
  int64 row_step;          // numbers from a row to the next one of this direction
  int blank_at, label_at;  // of the states, in a row
};

// State that a thread has loaded and computed ahead of the recursion: emissions of this chunk, elements of the next one
// and of that behind it, and what the other direction has stored for this chunk and the next one. So loads are a chunk
// ahead, and exponentials run beside the recursion's chain. The blank's are of frame lane % kChunk.
//
// Frames behind the last one are read as the last one: the loads of a chunk have no conditions, which would keep the
// compiler from scheduling across them.
template <int kPhase, class Mantissa, class Storage>
struct Ahead {
  Extended<Mantissa> y[kChunk], y_blank;
  Storage raw[kChunk], raw_blank, later[kChunk], later_blank;
  // Doubles are read when they are used: two chunks of them do not fit the registers.
  static constexpr bool kNext = sizeof(Mantissa) == 4;
  static constexpr int kFetched = kPhase == 2 && kNext ? kChunk : 1;
  Extended<Mantissa> others[kFetched][2], next[kFetched][2];
  bool ordinary;  // of the warp's emissions of this chunk

  // Precondition: `steps` is not 0.
  __device__ __forceinline__ void fetch(const Walk<Mantissa, Storage>& walk, int first, int steps) {
    const int last = steps - 1;
    later_blank = walk.blank[min(first + static_cast<int>(threadIdx.x) % kChunk, last) * walk.step];
    if (first + kChunk <= steps) {
      const Storage* at = walk.x + first * walk.step;
#pragma unroll
      for (int f = 0; f < kChunk; ++f) later[f] = at[f * walk.step];
    } else {
#pragma unroll
      for (int f = 0; f < kChunk; ++f) later[f] = walk.x[min(first + f, last) * walk.step];
    }
  }
  __device__ __forceinline__ void fetch_others(const Walk<Mantissa, Storage>& walk, int first, int steps) {
    const int last = steps - 1;
    if (walk.has_blank) {
#pragma unroll
      for (int f = 0; f < kChunk; ++f) next[f][0] = load_number(walk.at_blank + min(first + f, last) * walk.row_step);
    }
    if (walk.has_label) {
#pragma unroll
      for (int f = 0; f < kChunk; ++f) next[f][1] = load_number(walk.at_label + min(first + f, last) * walk.row_step);
    }
  }
  __device__ __forceinline__ void emit(const Walk<Mantissa, Storage>& walk, int f) {
    y[f] = ordinary_exponential(widen<Mantissa>(raw[f]));
    y[f].m = walk.has_label ? y[f].m : Mantissa(0);
  }
  // Ends a chunk: what was ahead is now. Returns true if a NaN is among the emissions. Precondition: the whole warp.
  __device__ __forceinline__ bool advance(const Walk<Mantissa, Storage>& walk) {
    bool odd = !is_ordinary(widen<Mantissa>(raw_blank)), found = false;
#pragma unroll
    for (int f = 0; f < kChunk; ++f) odd = odd || !is_ordinary(widen<Mantissa>(raw[f]));
    y_blank = ordinary_exponential(widen<Mantissa>(raw_blank));
    ordinary = __any_sync(0xffffffffu, odd) == 0;
    if (!ordinary) {
#pragma unroll
      for (int f = 0; f < kChunk; ++f) {
        y[f] = walk.has_label ? exponential(widen<Mantissa>(raw[f])) : zero_number<Mantissa>();
        found = found || y[f].m != y[f].m;
      }
      y_blank = exponential(widen<Mantissa>(raw_blank));
      found = found || y_blank.m != y_blank.m;
    }
#pragma unroll
    for (int f = 0; f < kChunk; ++f) raw[f] = later[f];
    raw_blank = later_blank;
    if constexpr (kPhase == 2 && kNext) {
#pragma unroll
      for (int f = 0; f < kChunk; ++f) {
        others[f][0] = next[f][0];
        others[f][1] = next[f][1];
      }
    }
    return found;
  }

  // Before the first chunk.
  __device__ __forceinline__ bool begin(const Walk<Mantissa, Storage>& walk, int steps) {
    fetch(walk, 0, steps);
    if constexpr (kPhase == 2 && kNext) {
#pragma unroll
      for (int f = 0; f < kChunk; ++f) next[f][0] = next[f][1] = zero_number<Mantissa>();
      fetch_others(walk, 0, steps);
    }
#pragma unroll
    for (int f = 0; f < kChunk; ++f) raw[f] = later[f];
    raw_blank = later_blank;
    fetch(walk, kChunk, steps);
#pragma unroll
    for (int f = 0; f < kChunk; ++f) emit(walk, f);
    return advance(walk);
  }
};

// Frames `chunk` * kChunk on, `count` of them if that is less than kChunk, of one direction.
//
// kOrdinary: all frames, of ordinary emissions; kPhase 2 also of samples without NaN, and of an ordinary exponent of Z.
//
// `incoming` are the label products of the position before the warp's first, in the frames of this chunk, and `carried`
// the one of the frame before; `outgoing` takes those of the warp's last position.
template <int kPhase, bool kStores, bool kOrdinary, class Mantissa, class Storage>
__device__ __forceinline__ void walk_chunk(Walk<Mantissa, Storage>& walk, Ahead<kPhase, Mantissa, Storage>& ahead,
                                           int count, Extended<Mantissa>& carried, const Extended<Mantissa>* incoming,
                                           Extended<Mantissa>* outgoing, StoredNumber<Mantissa>* at_blank,
                                           StoredNumber<Mantissa>* at_label, int64 exponent) {
  using Number = Extended<Mantissa>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int f = 0; f < kChunk; ++f) {
    if (kOrdinary || f < count) {
      const Number inside = shuffled_up(walk.l), outside = f == 0 ? carried : incoming[f - 1];
      const Number before = {lane == 0 ? outside.m : inside.m, lane == 0 ? outside.e : inside.e};
      const Number skipped = {walk.skips ? before.m : Mantissa(0), walk.skips ? before.e : kZero};
      const Number of_blank = {__shfl_sync(0xffffffffu, ahead.y_blank.m, f),
                               __shfl_sync(0xffffffffu, ahead.y_blank.e, f)};
      const Number bracket_b = sum(walk.b, before), bracket_l = sum(walk.l, walk.b, skipped);
      if constexpr (kOrdinary) {
        walk.b = ordinary_product(bracket_b, of_blank);
        walk.l = ordinary_product(bracket_l, ahead.y[f]);
      } else {
        walk.b = renormalised(product(bracket_b, of_blank));
        walk.l = renormalised(product(bracket_l, ahead.y[f]));
      }
      if constexpr (kPhase == 1 && kStores) {
        if (walk.has_blank) store_number(at_blank, walk.b.m, walk.b.e);
        if (walk.has_label) store_number(at_label, walk.l.m, walk.l.e);
      }
      if constexpr (kPhase == 2) {
        Number other_b, other_l;
        if constexpr (Ahead<kPhase, Mantissa, Storage>::kNext) {
          other_b = ahead.others[f][0], other_l = ahead.others[f][1];
        } else {
          other_b = other_l = zero_number<Mantissa>();
          if (walk.has_blank) other_b = load_number(at_blank);
          if (walk.has_label) other_l = load_number(at_label);
        }
        Mantissa of_b, of_l;
        if constexpr (kOrdinary) {
          const int e = static_cast<int>(exponent);
          of_b = bracket_b.m * other_b.m * power_of_two(bracket_b.e + other_b.e - e, Mantissa(0));
          of_l = bracket_l.m * other_l.m * power_of_two(bracket_l.e + other_l.e - e, Mantissa(0));
        } else {
          of_b = posterior(bracket_b, other_b, exponent);
          of_l = posterior(bracket_l, other_l, exponent);
        }
        if (walk.has_blank) at_blank->m = of_b;
        if (walk.has_label) at_label->m = of_l;
      }
      if constexpr (kPhase == 2 || kStores) {
        at_blank += walk.row_step;
        at_label += walk.row_step;
      }
      if (f < kChunk - 1 && lane == 31) outgoing[f] = walk.l;
    }
    if (kOrdinary || count >= kChunk) ahead.emit(walk, f);
  }
  if (kOrdinary || count >= kChunk) {
    walk.b = renormalised(walk.b);
    walk.l = renormalised(walk.l);
    if (lane == 31) outgoing[kChunk - 1] = walk.l;
    carried = incoming[kChunk - 1];
  }
}

// Takes the label products of a chunk from the band before, `passes` of them, into `to`. `words` holds what lies at
// `at`, the lane's place in the column, and gets what lies there a chunk later, which is in flight meanwhile.
// Precondition: the whole warp.
template <class Mantissa>
__device__ __forceinline__ void receive_chunk(StoredNumber<Mantissa>* at, int passes, Words<Mantissa>& words,
                                              Extended<Mantissa>* to) {
  const int lane = threadIdx.x % 32;
  bool here = lane >= passes || arrived(words);
  while (!__all_sync(0xffffffffu, here)) {
    if (!here) {
      let_others_run();
      words = look(at);
      here = arrived(words);
    }
  }
  if (lane < passes) {
    to[lane] = number_of(words);
    set_absent(at);
  }
  if (lane < kChunk) words = look(at + kChunk);
  __syncwarp();
}

// The walk of position j, of `size` in the sample, before its first frame, `first_frame`: without what it carries.
template <class Mantissa, class Storage>
__device__ __forceinline__ Walk<Mantissa, Storage> walk_of(const Sequences& shape, const Storage* x, int64 n,
                                                           const int* labels, StoredNumber<Mantissa>* row, int size,
                                                           int j, bool backward, int64 first_frame) {
  Walk<Mantissa, Storage> walk;
  walk.b = walk.l = zero_number<Mantissa>();
  walk.has_blank = j < size;
  walk.has_label = j < size - 1;
  // Place of the states of this position in a row.
  walk.blank_at = walk.has_blank ? backward ? size - 1 - j : j : 0;
  walk.label_at = walk.has_label ? size + (backward ? size - 2 - j : j) : 0;
  int64 label = shape.blank;
  walk.skips = false;
  if (walk.has_label) {
    label = labels[backward ? size - 2 - j : j];
    walk.skips = j > 0 && labels[backward ? size - 1 - j : j - 1] != label;
  }
  const Storage* const frame = x + shape.x_offset(n) + first_frame * shape.x_frame;
  walk.x = frame + label * shape.x_class;
  walk.blank = frame + shape.blank * shape.x_class;
  walk.step = backward ? -shape.x_frame : shape.x_frame;
  walk.row_step = backward ? -2 * static_cast<int64>(size) : 2 * static_cast<int64>(size);
  walk.at_blank = row + walk.blank_at;
  walk.at_label = row + walk.label_at;
  return walk;
}

// One half of one direction of a sample, over one band of positions. Blocks are numbered as they start, so that a block
// only ever waits for one that runs or has run.
//
// Preconditions: blockDim.x is kBand, or a multiple of 32 and no less than the number of positions of any sample that
// is possible; blockIdx.x below 2 * samples * bands; kPhase 2 runs after all blocks of kPhase 1. `lattice` is read and
// written unless kPhase is 1 and kStores false.
template <int kPhase, bool kStores, class Mantissa, class Storage>
__device__ __forceinline__ void walk_half(const Sequences& shape, const Storage* x, const Sample* samples,
                                          const int* labels, StoredNumber<Mantissa>* lattice,
                                          StoredNumber<Mantissa>* meeting, StoredNumber<Mantissa>* columns,
                                          unsigned* started, unsigned* broken) {
  using Number = Extended<Mantissa>;
  // Label products at the last position of each warp, by warp + 1 and parity of the chunk; zeros in front of the first.
  __shared__ Number passed[kMaxWarps + 1][2][kChunk];
  __shared__ unsigned place;
  if (shape.bands > 1) {
    if (threadIdx.x == 0) place = atomicInc(started, static_cast<unsigned>(2 * shape.samples * shape.bands) - 1);
    __syncthreads();
  }
  const unsigned order = shape.bands > 1 ? place : blockIdx.x, walks = static_cast<unsigned>(2 * shape.samples);
  const int64 which = order % walks, band = order / walks, n = which / 2;
  const bool backward = which % 2 != 0;
  const Sample sample = samples[n];
  if (sample.outcome != kRuns) return;
  const int size = sample.labels + 1, lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  const int first = static_cast<int>(band) * kBand, j = first + static_cast<int>(threadIdx.x);
  if (first >= size) return;
  const int* const own = labels + sample.first;
  const int half = sample.frames / 2;
  const int steps_before = kPhase == 1 ? 0 : backward ? sample.frames - half : half;
  const int steps = (kPhase == 1) == backward ? sample.frames - half : half;
  StoredNumber<Mantissa>* const alpha = meeting_row(meeting, sample, shape.positions, 0);
  StoredNumber<Mantissa>* const beta = meeting_row(meeting, sample, shape.positions, 1);
  StoredNumber<Mantissa>* const last = backward ? beta : alpha;
  int64 exponent = 0;
  if constexpr (kPhase == 2) {
    exponent = largest_exponent(alpha, beta, own, size);
    const bool reports = which % 2 == 0 && band == 0 && threadIdx.x == 0;
    if (exponent == kNoExponent) {
      if (reports) broken[shape.samples + n] = kNoAlignment;
      return;
    }
    if ((broken[n] & kNanEmission) != 0u) {
      bool nan = false;
      for (int i = threadIdx.x; i < size; i += blockDim.x) {
        const MeetingTerms<Mantissa> terms = meeting_terms(alpha, beta, own, size, i);
        nan = nan || is_nan(terms.of[0], terms.of[1]) || is_nan(terms.of[2], terms.of[3]);
      }
      nan = __syncthreads_or(nan) != 0;
      if (nan && reports) broken[shape.samples + n] = kNanLoss;
    }
  }
  const int64 first_frame = backward ? sample.frames - 1 - steps_before : steps_before;
  StoredNumber<Mantissa>* row = last;  // without a lattice nothing is stored
  if constexpr (kPhase == 2 || kStores) {
    row = Lattice<Mantissa>{lattice}.row(sample, shape.frames, first_frame);
  }
  Walk<Mantissa, Storage> walk = walk_of(shape, x, n, own, row, size, j, backward, first_frame);
  Number carried = zero_number<Mantissa>();
  if constexpr (kPhase == 1) {
    if (j == 0) walk.b = {Mantissa(1), 0};
  } else {
    if (walk.has_blank) walk.b = load_number(last + walk.blank_at);
    if (walk.has_label) walk.l = load_number(last + walk.label_at);
    if (lane == 0 && j > 0 && j < size) carried = load_number(last + size + (backward ? size - 1 - j : j - 1));
  }
  for (int i = threadIdx.x; i < 2 * kChunk; i += blockDim.x)
    passed[0][i / kChunk][i % kChunk] = zero_number<Mantissa>();
  __syncthreads();
  // Label products come from the band before, and go to the next one, if there are any.
  StoredNumber<Mantissa>* const to = columns + (which * (shape.bands - 1) + band) * shape.column;
  StoredNumber<Mantissa>* const from = to - shape.column;
  const bool receives = band > 0 && warp == 0;
  const bool sends = size - first > kBand && warp == kMaxWarps - 1;
  Words<Mantissa> words = {};
  if (receives && lane < kChunk) words = look(from + lane);
  const int warps = min((size - first + 31) / 32, kMaxWarps);
  const int chunks = (steps + kChunk - 1) / kChunk, rounds = chunks + warps - 1;
  // Exponents of posteriors fit 32 bits, and no state is NaN.
  const bool plain = kPhase == 1 || (exponent >= kLowest && exponent <= -kLowest && (broken[n] & kNanEmission) == 0);
  Ahead<kPhase, Mantissa, Storage> ahead;
  bool nan = false;
  if (warp < warps && steps > 0) nan = ahead.begin(walk, steps);
  for (int r = 0; r < rounds; ++r) {
    const int chunk = r - warp;
    if (warp < warps && chunk >= 0 && chunk < chunks) {
      const Number* const incoming = passed[warp][chunk & 1];
      Number* const outgoing = passed[warp + 1][chunk & 1];
      const int count = steps - chunk * kChunk, passes = count < kChunk ? count - 1 : kChunk;
      if (receives) receive_chunk(from + chunk * kChunk + lane, passes, words, passed[0][chunk & 1]);
      StoredNumber<Mantissa>* at_blank = walk.at_blank;
      StoredNumber<Mantissa>* at_label = walk.at_label;
      if constexpr (kPhase == 2 || kStores) {
        at_blank += chunk * kChunk * walk.row_step;
        at_label += chunk * kChunk * walk.row_step;
      }
      ahead.fetch(walk, (chunk + 2) * kChunk, steps);
      if constexpr (kPhase == 2 && Ahead<kPhase, Mantissa, Storage>::kNext) {
        ahead.fetch_others(walk, (chunk + 1) * kChunk, steps);
      }
      if (plain && ahead.ordinary && count >= kChunk) {
        walk_chunk<kPhase, kStores, true>(walk, ahead, count, carried, incoming, outgoing, at_blank, at_label,
                                          exponent);
      } else {
        walk_chunk<kPhase, kStores, false>(walk, ahead, count, carried, incoming, outgoing, at_blank, at_label,
                                           exponent);
      }
      nan = ahead.advance(walk) || nan;
      if (sends) {
        __syncwarp();
        if (lane < passes) send(to + chunk * kChunk + lane, outgoing[lane]);
      }
    }
    __syncthreads();
  }
  if constexpr (kPhase == 1) {
    if (nan) atomicOr(broken + n, kNanEmission);
    walk.b = renormalised(walk.b);
    walk.l = renormalised(walk.l);
    if (walk.has_blank) store_number(last + walk.blank_at, walk.b.m, walk.b.e);
    if (walk.has_label) store_number(last + walk.label_at, walk.l.m, walk.l.e);
  }
}
