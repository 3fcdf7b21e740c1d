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
// so nothing is divided by y, and y = 0 is no special case. Numbers are extended (extended.cuh), with exponents
// relative to those of the blank's emissions up to there: blanks have mantissas alone, and the exponents' sum is added
// to log Z.
//
// 1. First half: alpha takes frames 0 .. M - 1, beta T - 1 .. M, with M about T / 2, a multiple of 8. Each stores its
//    products into the lattice, if gradients are wanted, and its last ones into the meeting rows.
// 2. The meeting rows give Z: `meeting_terms` are the summands of a position.
// 3. Second half: alpha goes on over M .. T - 1 against beta's products, beta over M - 1 .. 0 against alpha's.
//    Posteriors, up to a factor of the frame, replace the values.
//
// A block takes one direction of one sample, a thread one position; longer targets take several blocks, one for each
// band of 128 positions, and pass label products through memory. A shuffle brings l_(j-1) from the lane before. The
// dependence runs one way, so warps are skewed: in round r warp w takes chunk r - w of 8 frames, and reads the 8 states
// that warp w - 1 has left in shared memory. One barrier serves 8 frames. Emissions are computed a chunk ahead, from
// elements that were loaded another chunk ahead.
//
// A chunk takes one of three paths, each exact; which one depends on the numbers alone:
//
//   walk_fast    exponents stay for 8 frames, those of neighbours differ by fixed powers of two: a step is a shuffle,
//                fused sums of products, and two products
//   walk_apart   an exponent of each number: for states whose sizes change by more than a float holds in 8 frames, as
//                where a trained model is sure
//   walk_slowly  the same, and any number: infinities, NaN, huge logits, chunks that are not whole
//
// Traffic: (2 S + 1) T numbers written, read, replaced by posteriors, and an exponent for each 8 of them, or for each;
// T (S + 1) elements of x, each in a sector of its own, in both halves.
#pragma once
#include "sequence/sequences.cuh"
#include "softmax/row_ptx.cuh"

constexpr int kChunk = 8;
// Chunks ahead of the recursion that are prefetched.
constexpr int kPrefetched = 5;
// Warps of a block of the recursion, and positions, of which a sample may need several blocks.
constexpr int kMaxWarps = 4;
constexpr int kBand = 32 * kMaxWarps;

// Exponents that frames of a chunk share: in its place, each state of each frame has its own.
constexpr int kOwnExponents = -2147483647 - 1;

// The states of all frames. A row has the blanks of a frame by position, and behind them its labels. A state is its
// value times 2^e, with an exponent e for each run of kChunk frames, or, where that is kOwnExponents, for each frame.
// The second half replaces values by posteriors.
template <class Mantissa>
struct Lattice {
  Mantissa* values;
  int* exponents;  // as values
  int* scales;     // a row for each run of kChunk frames

  // In the memory at `at`, of a call.
  __device__ __forceinline__ Lattice(void* at, const Sequences& shape) {
    const int64 states = 2 * shape.positions * shape.frames;
    values = static_cast<Mantissa*>(at);
    exponents = reinterpret_cast<int*>(values + states);
    scales = exponents + states;
  }
  // Where the row of frame `t` begins among values and exponents.
  __device__ __forceinline__ static int64 row(const Sequences& shape, const Sample& sample, int64 t) {
    return 2 * (sample.first * shape.frames + t * (sample.labels + 1));
  }
  // Where that of run `t / kChunk` begins among scales.
  __device__ __forceinline__ static int64 scale_row(const Sequences& shape, const Sample& sample, int64 t) {
    return 2 * (sample.first * ((shape.frames + kChunk - 1) / kChunk) + t / kChunk * (sample.labels + 1));
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

// One thread's position of one direction: addresses, and what it carries from frame to frame. Steps are counted from
// the first frame of the first chunk.
template <class Mantissa, class Storage>
struct Walk {
  using Number = Extended<Mantissa>;
  Number b, l;  // products of the frame before, renormalised between chunks
  bool has_blank, has_label, skips;
  const Storage* x;  // the label's element at step 0
  const Storage* blank;
  int64 step;              // elements from a frame to the next one of this direction
  int begin, end;          // steps that are frames
  int64 at, scale;         // in the lattice: the row of step 0, that of the first chunk's scales
  int64 row_step;          // numbers from a row to the next one of this direction
  int blank_at, label_at;  // of the states, in a row

  // The step that is read for step `i`: the nearest that is a frame.
  __device__ __forceinline__ int within(int i) const {
    return min(max(i, begin), end - 1);
  }
};

// Exponents are relative to those of blanks: y = m 2^k, and every number of a frame lacks the sum of the blanks' k up
// to there. Posteriors do not know; the blank's product is a matter of mantissas alone.
//
// Blanks without an ordinary exponent have k = 0 instead.
template <class Mantissa, class Storage>
__device__ __forceinline__ Extended<Mantissa> blank_emission(Storage raw, int& k, bool& ordinary) {
  const Mantissa x = widen<Mantissa>(raw);
  ordinary = is_ordinary(x);
  if (!ordinary) {
    k = 0;
    return exponential(x);
  }
  const Extended<Mantissa> y = ordinary_exponential(x);
  k = y.e;
  return {y.m, 0};
}

// A word that orders numbers by size, with NaN above all.
__device__ __forceinline__ unsigned size_word(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
}
__device__ __forceinline__ unsigned size_word(double x) {
  return static_cast<unsigned>(__double_as_longlong(x) >> 32) & 0x7fffffffu;
}

// m 2^by for an m within a half and 2, and |by| up to 100.
__device__ __forceinline__ float scaled_by(float m, int by) {
  return __uint_as_float(__float_as_uint(m) + (static_cast<unsigned>(by) << 23));
}
__device__ __forceinline__ double scaled_by(double m, int by) {
  return __longlong_as_double(__double_as_longlong(m) + static_cast<int64>(static_cast<unsigned long long>(by) << 52));
}

// Bounds of the fast path, in powers of two, so that nothing is flushed that counts. Each state has an exponent for a
// chunk, about that of its largest value.
//
// - Emissions over the blank's are within kLeast and kMost.
// - A blank loses at most 2^-4 in a chunk. A label has no less than its own path keeps, and no less than its emission
//   times the blank before it: one of them is to be above kSmall. What is below kNothing is nothing beside kCounts.
// - What comes to a state is at most 2^kAbove times as large as it. Beyond 2^kSteep, exponents follow what comes.
// - States that are reached within the chunk consist of their emissions, along all that one path can reach.
// - No value has grown beyond 2^kMost at the end; infinities last.
constexpr int kLeast = -100, kMost = 50, kSmall = -74, kCounts = -50, kNothing = -126, kAbove = 60;
constexpr int kLeastFront = -10, kSteep = 12, kSlack = 4;

// State that a thread has loaded and computed ahead of the recursion: emissions of this chunk, elements of the next one
// and of that behind it, and what the other direction has stored for this chunk and the next one. So loads are a chunk
// ahead, and exponentials run beside the recursion's chain. The blank's are of frame lane % kChunk.
//
// Buffers alternate with the parity of their chunk: a copy from one to the other would wait for the loads.
//
// Steps that are no frames are read as the nearest one: the loads of a chunk have no conditions, which would keep the
// compiler from scheduling across them.
template <int kPhase, class Mantissa, class Storage>
struct Ahead {
  Mantissa y[kChunk];  // emissions over the power of two of the blank's
  Mantissa blank, next_blank;
  int k, next_k;  // exponents of the blank's emission
  // Of this chunk and the next one: bounds of the exponents of y, the sum of the
  // negative ones, and the largest size of elements, as an ordered word.
  int least, most, loss, next_least, next_most, next_loss;
  unsigned largest, next_largest;
  Storage raw[2][kChunk], raw_blank[2];
  // Doubles are read when they are used: two chunks of them do not fit the registers.
  static constexpr bool kNext = sizeof(Mantissa) == 4;
  static constexpr int kFetched = kPhase == 2 && kNext ? kChunk : 1;
  Mantissa others[2][kFetched][2];
  int scales[2][2];

  // The elements of the chunk that begins at step `first`.
  template <int kParity>
  __device__ __forceinline__ void fetch(const Walk<Mantissa, Storage>& walk, int first) {
    raw_blank[kParity] = walk.blank[walk.within(first + static_cast<int>(threadIdx.x) % kChunk) * walk.step];
    if (first >= walk.begin && first + kChunk <= walk.end) {
      const Storage* at = walk.x + first * walk.step;
#pragma unroll
      for (int f = 0; f < kChunk; ++f) raw[kParity][f] = at[f * walk.step];
    } else {
#pragma unroll
      for (int f = 0; f < kChunk; ++f) raw[kParity][f] = walk.x[walk.within(first + f) * walk.step];
    }
  }
  template <int kParity>
  __device__ __forceinline__ void fetch_others(const Lattice<Mantissa>& lattice, const Walk<Mantissa, Storage>& walk,
                                               int first) {
    const int64 scales_at = walk.scale + (walk.within(first) / kChunk) * walk.row_step;
    if (walk.has_blank) {
      scales[kParity][0] = lattice.scales[scales_at + walk.blank_at];
      const Mantissa* const at = lattice.values + walk.at + walk.blank_at;
#pragma unroll
      for (int f = 0; f < kFetched; ++f) others[kParity][f][0] = at[walk.within(first + f) * walk.row_step];
    }
    if (walk.has_label) {
      scales[kParity][1] = lattice.scales[scales_at + walk.label_at];
      const Mantissa* const at = lattice.values + walk.at + walk.label_at;
#pragma unroll
      for (int f = 0; f < kFetched; ++f) others[kParity][f][1] = at[walk.within(first + f) * walk.row_step];
    }
  }

  // Moves what a chunk reads towards the multiprocessor: a chunk takes less time than memory.
  __device__ __forceinline__ void prefetch(const Lattice<Mantissa>& lattice, const Walk<Mantissa, Storage>& walk,
                                           int first) const {
    if (first + kChunk > walk.end) return;
#pragma unroll
    for (int f = 0; f < kChunk; ++f) {
      prefetch_line_l2(walk.x + (first + f) * walk.step);
      if constexpr (kPhase == 2) {
        const Mantissa* const row = lattice.values + walk.at + (first + f) * walk.row_step;
        if (walk.has_blank) prefetch_line_l2(row + walk.blank_at);
        if (walk.has_label) prefetch_line_l2(row + walk.label_at);
      }
    }
  }

  // Begins to compute the emissions of a chunk, whose parity this is.
  template <int kParity>
  __device__ __forceinline__ void begin_emissions() {
    const Mantissa x = widen<Mantissa>(raw_blank[kParity]);
    const Extended<Mantissa> e = ordinary_exponential(x);
    next_blank = e.m;
    next_k = e.e;
    next_loss = 0;
    next_largest = size_word(x);
  }
  // Precondition: the whole warp.
  template <int kParity>
  __device__ __forceinline__ void emit(const Walk<Mantissa, Storage>& walk, int f) {
    const Mantissa x = widen<Mantissa>(raw[kParity][f]);
    const Extended<Mantissa> e = ordinary_exponential(x);
    const int by = e.e - __shfl_sync(0xffffffffu, next_k, f);
    next_least = f == 0 ? by : min(next_least, by);
    next_most = f == 0 ? by : max(next_most, by);
    next_loss += min(by, 0);
    next_largest = max(next_largest, size_word(x));
    y[f] = walk.has_label ? scaled_by(e.m, by) : Mantissa(0);
  }
  // Makes the chunk that has been computed this one.
  __device__ __forceinline__ void advance() {
    blank = next_blank;
    k = next_k;
    least = next_least;
    most = next_most;
    loss = next_loss;
    largest = next_largest;
  }

  // Before the first chunk.
  __device__ __forceinline__ void begin(const Lattice<Mantissa>& lattice, const Walk<Mantissa, Storage>& walk) {
    fetch<0>(walk, 0);
    if constexpr (kPhase == 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scales[i][0] = scales[i][1] = 0;
#pragma unroll
        for (int f = 0; f < kFetched; ++f) others[i][f][0] = others[i][f][1] = Mantissa(0);
      }
      fetch_others<0>(lattice, walk, 0);
    }
    fetch<1>(walk, kChunk);
    begin_emissions<0>();
#pragma unroll
    for (int f = 0; f < kChunk; ++f) emit<0>(walk, f);
    advance();
  }
};

// The states of a lane in a chunk of the fast path: values over 2^e, with an exponent for each state.
template <class Mantissa>
struct Aligned {
  Mantissa b, l;
  int e_b, e_l;
  // Powers of two between exponents: from the blank's to the label's, from those of the label of the lane before to
  // both. Lane 0 takes `incoming` instead, which is over its blank's.
  Mantissa across, to_blank, to_label;
  Mantissa incoming;  // label product before lane 0 and frame `lane`
};

// Gives the states of each lane exponents for a chunk. Returns false if a lane's states are not for the fast path.
// Precondition: the whole warp.
template <int kPhase, class Mantissa, class Storage>
__device__ __forceinline__ bool align(const Walk<Mantissa, Storage>& walk,
                                      const Ahead<kPhase, Mantissa, Storage>& ahead, const Extended<Mantissa>& carried,
                                      const Extended<Mantissa>* incoming, Aligned<Mantissa>& to) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  const Extended<Mantissa> before = lane == 0 ? carried : incoming[(lane - 1) % kChunk];
  const Extended<Mantissa> in = renormalised(before);
  const bool no_blank = walk.b.m == Mantissa(0), no_label = walk.l.m == Mantissa(0), zero = no_blank & no_label;
  const bool comes = (lane < kChunk) & (in.m != Mantissa(0));
  // False for NaN.
  bool fine = (walk.b.m < Mantissa(2)) & (walk.l.m < Mantissa(2)) & ((lane >= kChunk) | (in.m < Mantissa(2)));
  fine &= zero | !no_blank;
  int e_b = walk.b.e, e_l = max(walk.l.e, walk.b.e + ahead.most), small = ahead.least + e_b - e_l - 4;
  small = no_label ? small : max(small, walk.l.e - e_l + ahead.loss);
  const unsigned zeros = __ballot_sync(kAll, zero);
  if (zeros != 0u) {
    // The lane of the last state that is reached, or -1. States behind it get exponents from what can reach them.
    const int front = 31 - __clz(static_cast<int>(~zeros));
    int top = e_l;
    if (front >= 0) {
      top = __shfl_sync(kAll, e_l, front);
      fine &= (zeros & ((1u << front) - 1u)) == 0u;
      fine &= (lane != front) | no_label | (walk.l.e >= e_l + kLeastFront);
    } else {
      top = comes ? in.e : kZero;
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) top = max(top, __shfl_xor_sync(kAll, top, offset));
      fine &= !comes | (in.e >= top + kLeastFront);
      top = top == kZero ? 0 : top;
    }
    int most = zero ? ahead.most : 0, spread = zero ? ahead.most - ahead.least : 0;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int more = __shfl_up_sync(kAll, most, offset), wider = __shfl_up_sync(kAll, spread, offset);
      most += lane >= offset ? more : 0;
      spread += lane >= offset ? wider : 0;
    }
    e_l = zero ? top + most : e_l;
    e_b = zero ? e_l - ahead.most : e_b;
    small = zero ? lane > front + kChunk ? -kNothing : kLeastFront - spread : small;
  }
  fine &= ahead.largest < size_word(Mantissa(kOrdinaryLogit));
  fine &= (ahead.least >= kLeast) & (ahead.most <= kMost);
  int before_e = __shfl_up_sync(kAll, e_l, 1), small_blank = 0;
  if (__any_sync(kAll, (lane != 0) & (before_e - e_b > kSteep))) {
    // Much comes from the lanes before, within the chunk: exponents are no less than theirs allow, a scan.
    int most = ahead.most - kSlack, largest = e_l;
#pragma unroll
    for (int offset = 1; offset <= kChunk / 2; offset *= 2) {
      const int more = __shfl_up_sync(kAll, most, offset), larger = __shfl_up_sync(kAll, largest, offset);
      largest = lane >= offset ? max(largest, larger + most) : largest;
      most += lane >= offset ? more : 0;
    }
    small += e_l - largest;
    e_l = largest;
    before_e = __shfl_up_sync(kAll, e_l, 1);
    small_blank = e_b;
    e_b = lane == 0 ? e_b : max(e_b, before_e - kSlack);
    small_blank = zero ? 0 : small_blank - e_b;
  }
  fine &= (small >= kSmall) & (small_blank >= kSmall);
  const int first_e = __shfl_sync(kAll, e_b, 0);
  const int across = e_b - e_l, to_blank = lane == 0 ? 0 : before_e - e_b, to_label = lane == 0 ? 0 : before_e - e_l;
  fine &= (to_blank <= kAbove) & (to_label <= kAbove);
  fine &= ((to_label >= kNothing) & (across >= kNothing)) | (small >= kCounts);
  fine &= (to_blank >= kNothing) | (small_blank >= kCounts);
  const int by = in.e - first_e;
  fine &= !comes | (by <= kMost);
  to.b = walk.b.m * power_of_two(walk.b.e - e_b, Mantissa(0));
  to.l = walk.l.m * power_of_two(walk.l.e - e_l, Mantissa(0));
  to.e_b = e_b;
  to.e_l = e_l;
  to.across = power_of_two(across, Mantissa(0));
  to.to_blank = lane == 0 ? Mantissa(0) : power_of_two(to_blank, Mantissa(0));
  to.to_label = (lane == 0) | !walk.skips ? Mantissa(0) : power_of_two(to_label, Mantissa(0));
  to.incoming = comes ? in.m * power_of_two(by, Mantissa(0)) : Mantissa(0);
  return fine;
}

// A chunk of kChunk frames on the fast path: exponents stay, so a step is a shuffle and sums of products. Returns
// false, with the states as they were, if a value has grown out of range. kParity is the chunk's.
//
// `outgoing` takes the label products of the warp's last position. Precondition: the whole warp.
template <int kPhase, bool kStores, int kParity, class Mantissa, class Storage>
__device__ __forceinline__ bool walk_fast(const Lattice<Mantissa>& lattice, Walk<Mantissa, Storage>& walk,
                                          Ahead<kPhase, Mantissa, Storage>& ahead, int chunk,
                                          const Aligned<Mantissa>& from, Extended<Mantissa>* outgoing, int64 exponent) {
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  Mantissa b = from.b, l = from.l, labels[kChunk];
  const Mantissa is_first = lane == 0 ? Mantissa(1) : Mantissa(0);
  const Mantissa skips_first = (lane == 0) & walk.skips ? from.across : Mantissa(0);
  const int64 at = walk.at + static_cast<int64>(chunk) * kChunk * walk.row_step;
  // The powers of two of posteriors, as two factors each: values are up to 2^kMost, and so is their product.
  Mantissa factor[2][2];
  if constexpr (kPhase == 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int own = i == 0 ? from.e_b : from.e_l;
      const int e = min(max(own + ahead.scales[kParity][i] - static_cast<int>(exponent), -2000), 3 * kMost);
      factor[i][0] = power_of_two(e >> 1, Mantissa(0));
      factor[i][1] = power_of_two(e - (e >> 1), Mantissa(0));
    }
  }
#pragma unroll
  for (int f = 0; f < kChunk; ++f) {
    const Mantissa inside = __shfl_up_sync(kAll, l, 1), outside = __shfl_sync(kAll, from.incoming, f);
    const Mantissa of_blank = __shfl_sync(kAll, ahead.blank, f);
    const Mantissa bracket_b = fused(from.to_blank, inside, fused(outside, is_first, b));
    const Mantissa bracket_l = fused(from.to_label, inside, fused(outside, skips_first, fused(from.across, b, l)));
    b = bracket_b * of_blank;
    l = bracket_l * ahead.y[f];
    labels[f] = l;
    if constexpr (kPhase == 1 && kStores) {
      Mantissa* const row = lattice.values + at + f * walk.row_step;
      if (walk.has_blank) row[walk.blank_at] = b;
      if (walk.has_label) row[walk.label_at] = l;
    }
    if constexpr (kPhase == 2) {
      Mantissa* const other = ahead.others[kParity][f];
      other[0] = (bracket_b * factor[0][0]) * (other[0] * factor[0][1]);
      other[1] = (bracket_l * factor[1][0]) * (other[1] * factor[1][1]);
    }
    ahead.template emit<1 - kParity>(walk, f);
  }
  if (lane == 31) {
#pragma unroll
    for (int f = 0; f < kChunk; ++f) outgoing[f] = {labels[f], from.e_l};
  }
  const Mantissa limit = power_of_two(kMost, Mantissa(0));
  if (__all_sync(kAll, b < limit && l < limit) == 0) return false;
  if constexpr (kPhase == 1 && kStores) {
    int* const scales = lattice.scales + walk.scale + chunk * walk.row_step;
    if (walk.has_blank) scales[walk.blank_at] = from.e_b;
    if (walk.has_label) scales[walk.label_at] = from.e_l;
  }
  if constexpr (kPhase == 2) {
    Mantissa* const row = lattice.values + at;
#pragma unroll
    for (int f = 0; f < kChunk; ++f) {
      if (walk.has_blank) row[f * walk.row_step + walk.blank_at] = ahead.others[kParity][f][0];
      if (walk.has_label) row[f * walk.row_step + walk.label_at] = ahead.others[kParity][f][1];
    }
  }
  walk.b = renormalised(Extended<Mantissa>{b, from.e_b});
  walk.l = renormalised(Extended<Mantissa>{l, from.e_l});
  return true;
}

// A chunk of kChunk frames with an exponent of each number, of emissions that the fast path could take.
// Precondition: the whole warp.
template <int kPhase, bool kStores, int kParity, class Mantissa, class Storage>
__device__ __forceinline__ void walk_apart(const Lattice<Mantissa>& lattice, Walk<Mantissa, Storage>& walk,
                                           Ahead<kPhase, Mantissa, Storage>& ahead, int chunk,
                                           const Extended<Mantissa>& carried, const Extended<Mantissa>* incoming,
                                           Extended<Mantissa>* outgoing, int64 exponent) {
  using Number = Extended<Mantissa>;
  constexpr unsigned kAll = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  const int64 scales = walk.scale + chunk * walk.row_step;
  const int64 at = walk.at + static_cast<int64>(chunk) * kChunk * walk.row_step;
  // Loads of all frames are in flight together, of doubles those of a frame.
  constexpr bool kNext = Ahead<kPhase, Mantissa, Storage>::kNext;
  int exponents[kPhase == 2 && kNext ? kChunk : 1][2];
  auto fetch_exponents = [&](int f, int to) {
    const int* const row = lattice.exponents + at + f * walk.row_step;
    exponents[to][0] = ahead.scales[kParity][0];
    exponents[to][1] = ahead.scales[kParity][1];
    if (exponents[to][0] == kOwnExponents) exponents[to][0] = row[walk.blank_at];
    if (exponents[to][1] == kOwnExponents) exponents[to][1] = row[walk.label_at];
  };
  if constexpr (kPhase == 2 && kNext) {
#pragma unroll
    for (int f = 0; f < kChunk; ++f) fetch_exponents(f, f);
  }
  if constexpr (kPhase == 1 && kStores) {
    if (walk.has_blank) lattice.scales[scales + walk.blank_at] = kOwnExponents;
    if (walk.has_label) lattice.scales[scales + walk.label_at] = kOwnExponents;
  }
  // Before lane 0.
  const Number before = renormalised(lane == 0 ? carried : incoming[(lane - 1) % kChunk]);
#pragma unroll
  for (int f = 0; f < kChunk; ++f) {
    const Number inside = shuffled_up(walk.l);
    const Number outside = {__shfl_sync(kAll, before.m, f), __shfl_sync(kAll, before.e, f)};
    const Number from = {lane == 0 ? outside.m : inside.m, lane == 0 ? outside.e : inside.e};
    const Number skipped = {walk.skips ? from.m : Mantissa(0), walk.skips ? from.e : kZero};
    const Number bracket_b = sum(walk.b, from), bracket_l = sum(walk.l, walk.b, skipped);
    walk.b = renormalised(Number{bracket_b.m * __shfl_sync(kAll, ahead.blank, f), bracket_b.e});
    walk.l = renormalised(Number{bracket_l.m * ahead.y[f], bracket_l.e});
    const int64 row = at + f * walk.row_step;
    if constexpr (kPhase == 1 && kStores) {
      if (walk.has_blank) {
        lattice.values[row + walk.blank_at] = walk.b.m;
        lattice.exponents[row + walk.blank_at] = walk.b.e;
      }
      if (walk.has_label) {
        lattice.values[row + walk.label_at] = walk.l.m;
        lattice.exponents[row + walk.label_at] = walk.l.e;
      }
    }
    if constexpr (kPhase == 2) {
      Mantissa other[2] = {Mantissa(0), Mantissa(0)};
      constexpr int kAt = kNext ? kChunk : 1;
      const int i = f % kAt;
      if constexpr (kNext) {
        other[0] = ahead.others[kParity][f][0];
        other[1] = ahead.others[kParity][f][1];
      } else {
        fetch_exponents(f, 0);
        if (walk.has_blank) other[0] = lattice.values[row + walk.blank_at];
        if (walk.has_label) other[1] = lattice.values[row + walk.label_at];
      }
      const Mantissa of_b = posterior(bracket_b, {other[0], exponents[i][0]}, exponent);
      const Mantissa of_l = posterior(bracket_l, {other[1], exponents[i][1]}, exponent);
      if (walk.has_blank) lattice.values[row + walk.blank_at] = of_b;
      if (walk.has_label) lattice.values[row + walk.label_at] = of_l;
    }
    if (lane == 31) outgoing[f] = walk.l;
    ahead.template emit<1 - kParity>(walk, f);
  }
}

// The frames from `begin` to `end` of a chunk, with an exponent of each number: for any numbers. Returns true if a NaN
// is among its emissions; lane 0's `blanks` gets the sum of the exponents of the blank's. Precondition: the whole warp.
template <int kPhase, bool kStores, class Mantissa, class Storage>
__device__ __forceinline__ bool walk_slowly(const Lattice<Mantissa>& lattice, Walk<Mantissa, Storage>& walk, int chunk,
                                            int begin, int end, const Extended<Mantissa>& carried,
                                            const Extended<Mantissa>* incoming, Extended<Mantissa>* outgoing,
                                            int64 exponent, int64& blanks) {
  using Number = Extended<Mantissa>;
  const int lane = threadIdx.x % 32;
  const int64 scales = walk.scale + chunk * walk.row_step;
  bool found = false;
  int k;
  if constexpr (kPhase == 1 && kStores) {
    if (walk.has_blank) lattice.scales[scales + walk.blank_at] = kOwnExponents;
    if (walk.has_label) lattice.scales[scales + walk.label_at] = kOwnExponents;
  }
#pragma unroll 1
  for (int f = begin; f < end; ++f) {
    const int step = chunk * kChunk + f;
    bool ordinary;
    const Number of_blank = blank_emission<Mantissa>(walk.blank[step * walk.step], k, ordinary);
    Number of_label = zero_number<Mantissa>();
    if (walk.has_label) {
      of_label = exponential(widen<Mantissa>(walk.x[step * walk.step]));
      of_label.e = of_label.m == Mantissa(0) ? kZero : of_label.e - k;
    }
    if (lane == 0) blanks += k;
    found = found || of_blank.m != of_blank.m || of_label.m != of_label.m;
    const Number inside = shuffled_up(walk.l), outside = renormalised(f == begin ? carried : incoming[f - 1]);
    const Number before = {lane == 0 ? outside.m : inside.m, lane == 0 ? outside.e : inside.e};
    const Number skipped = {walk.skips ? before.m : Mantissa(0), walk.skips ? before.e : kZero};
    const Number bracket_b = sum(walk.b, before), bracket_l = sum(walk.l, walk.b, skipped);
    walk.b = renormalised(product(bracket_b, of_blank));
    walk.l = renormalised(product(bracket_l, of_label));
    const int64 at = walk.at + step * walk.row_step;
    if constexpr (kPhase == 1 && kStores) {
      if (walk.has_blank) {
        lattice.values[at + walk.blank_at] = walk.b.m;
        lattice.exponents[at + walk.blank_at] = walk.b.e;
      }
      if (walk.has_label) {
        lattice.values[at + walk.label_at] = walk.l.m;
        lattice.exponents[at + walk.label_at] = walk.l.e;
      }
    }
    if constexpr (kPhase == 2) {
      auto replace = [&](const Number& bracket, int state) {
        Mantissa& value = lattice.values[at + state];
        const int scale = lattice.scales[scales + state];
        value = posterior(bracket, {value, scale == kOwnExponents ? lattice.exponents[at + state] : scale}, exponent);
      };
      if (walk.has_blank) replace(bracket_b, walk.blank_at);
      if (walk.has_label) replace(bracket_l, walk.label_at);
    }
    if (lane == 31) outgoing[f] = walk.l;
  }
  return found;
}

// Loads ahead of chunk `chunk`, emissions of the next one, and the chunk itself. Returns false if it is not for the
// paths of whole chunks, with the states as they were. `plain`: the chunk has all frames, the sample no NaN, and Z an
// ordinary exponent. `carried` is the label product before the warp's first position of the frame before, `incoming`
// has those of the frames of this chunk. Precondition: the whole warp.
template <int kPhase, bool kStores, int kParity, class Mantissa, class Storage>
__device__ __forceinline__ bool take_chunk(const Lattice<Mantissa>& lattice, Walk<Mantissa, Storage>& walk,
                                           Ahead<kPhase, Mantissa, Storage>& ahead, int chunk, bool plain,
                                           const Extended<Mantissa>& carried, const Extended<Mantissa>* incoming,
                                           Extended<Mantissa>* outgoing, int64 exponent, int64& blanks) {
  constexpr unsigned kAll = 0xffffffffu;
  // Posteriors of a fast chunk wait in registers, of which doubles have too few.
  constexpr bool kFast = kPhase == 1 || Ahead<kPhase, Mantissa, Storage>::kNext;
  const int first = chunk * kChunk;
  if constexpr (kPhase == 2) ahead.template fetch_others<1 - kParity>(lattice, walk, first + kChunk);
  ahead.template fetch<kParity>(walk, first + 2 * kChunk);
  if constexpr (kPrefetched > 0) ahead.prefetch(lattice, walk, first + kPrefetched * kChunk);
  Aligned<Mantissa> aligned;
  bool fast = false;
  if constexpr (kFast) {
    bool fine = align(walk, ahead, carried, incoming, aligned);
    if constexpr (kPhase == 2) {
      fine &= (ahead.scales[kParity][0] != kOwnExponents) & (ahead.scales[kParity][1] != kOwnExponents);
    }
    fast = plain && __all_sync(kAll, fine);
  }
  const bool tame =
      (ahead.largest < size_word(Mantissa(kOrdinaryLogit))) & (ahead.least >= kLeast) & (ahead.most <= kMost);
  const bool apart = plain && !fast && __all_sync(kAll, tame);
  ahead.template begin_emissions<1 - kParity>();
  bool done = true;
  if (fast) {
    if constexpr (kFast) {
      done = walk_fast<kPhase, kStores, kParity>(lattice, walk, ahead, chunk, aligned, outgoing, exponent);
    }
  } else if (apart) {
    walk_apart<kPhase, kStores, kParity>(lattice, walk, ahead, chunk, carried, incoming, outgoing, exponent);
  } else {
    done = false;
#pragma unroll
    for (int f = 0; f < kChunk; ++f) ahead.template emit<1 - kParity>(walk, f);
  }
  if (done && threadIdx.x % 32 < kChunk) blanks += ahead.k;
  ahead.advance();
  return done;
}

// Takes the label products of a chunk from the band before into `to`, if `passes`, of the frame `lane`. `words` holds
// what lies at `at`, the lane's place in the column, and gets what lies there a chunk later, which is in flight
// meanwhile. Precondition: the whole warp.
template <class Mantissa>
__device__ __forceinline__ void receive_chunk(StoredNumber<Mantissa>* at, bool passes, Words<Mantissa>& words,
                                              Extended<Mantissa>* to) {
  const int lane = threadIdx.x % 32;
  bool here = !passes || arrived(words);
  while (!__all_sync(0xffffffffu, here)) {
    if (!here) {
      let_others_run();
      words = look(at);
      here = arrived(words);
    }
  }
  if (passes) {
    to[lane] = number_of(words);
    set_absent(at);
  }
  if (lane < kChunk) words = look(at + kChunk);
  __syncwarp();
}

// The walk of position j, of `size` in the sample, without what it carries: of `steps` frames from `first_frame` on, of
// which the first is step `begin`.
template <class Mantissa, class Storage>
__device__ __forceinline__ Walk<Mantissa, Storage> walk_of(const Sequences& shape, const Storage* x, int64 n,
                                                           const Sample& sample, const int* labels, int j,
                                                           bool backward, int first_frame, int begin, int steps) {
  const int size = sample.labels + 1;
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
  walk.begin = begin;
  walk.end = begin + steps;
  const int64 frame = backward ? first_frame + begin : first_frame - begin;  // of step 0
  const Storage* const row = x + shape.x_offset(n) + frame * shape.x_frame;
  walk.x = row + label * shape.x_class;
  walk.blank = row + shape.blank * shape.x_class;
  walk.step = backward ? -shape.x_frame : shape.x_frame;
  walk.row_step = backward ? -2 * static_cast<int64>(size) : 2 * static_cast<int64>(size);
  walk.at = Lattice<Mantissa>::row(shape, sample, frame);
  walk.scale = Lattice<Mantissa>::scale_row(shape, sample, first_frame);
  return walk;
}

// One half of one direction of a sample, over one band of positions. Blocks are numbered as they start, so that a block
// only ever waits for one that runs or has run.
//
// Preconditions: blockDim.x is kBand, or a multiple of 32 and no less than the number of positions of any sample that
// is possible; blockIdx.x below 2 * samples * bands; kPhase 2 runs after all blocks of kPhase 1. `states` is the
// memory of the lattice, which is read and written unless kPhase is 1 and kStores false.
template <int kPhase, bool kStores, class Mantissa, class Storage>
__device__ __forceinline__ void walk_half(const Sequences& shape, const Storage* x, const Sample* samples,
                                          const int* labels, void* states, StoredNumber<Mantissa>* meeting,
                                          StoredNumber<Mantissa>* columns, unsigned* started, unsigned* broken,
                                          int64* blanks) {
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
  // Both directions have the same runs of frames, which begin at multiples of kChunk.
  const int half = sample.frames / 2 / kChunk * kChunk;
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
  const int first_frame = backward ? sample.frames - 1 - steps_before : steps_before;
  const int begin = kPhase == 1 && backward ? (kChunk - steps % kChunk) % kChunk : 0;
  const Lattice<Mantissa> lattice(states, shape);
  Walk<Mantissa, Storage> walk = walk_of<Mantissa>(shape, x, n, sample, own, j, backward, first_frame, begin, steps);
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
  const int chunks = (begin + steps + kChunk - 1) / kChunk, rounds = chunks + warps - 1;
  // Exponents of posteriors fit 32 bits, and no state is NaN.
  const bool plain = kPhase == 1 || (exponent >= kLowest && exponent <= -kLowest && (broken[n] & kNanEmission) == 0);
  Ahead<kPhase, Mantissa, Storage> ahead;
  bool nan = false;
  int64 of_blanks = 0;
  if (warp < warps && steps > 0) ahead.begin(lattice, walk);
  for (int r = 0; r < rounds; ++r) {
    const int chunk = r - warp;
    if (warp < warps && chunk >= 0 && chunk < chunks) {
      const Number* const incoming = passed[warp][chunk & 1];
      Number* const outgoing = passed[warp + 1][chunk & 1];
      const int low = max(begin - chunk * kChunk, 0), high = min(begin + steps - chunk * kChunk, kChunk);
      // Frames whose label products pass to the next band: the last frame's are not needed.
      const bool passes = lane >= low && lane < (high < kChunk ? high - 1 : kChunk);
      if (receives) receive_chunk(from + chunk * kChunk + lane, passes, words, passed[0][chunk & 1]);
      const bool whole = plain && high - low == kChunk;
      bool done;
      if ((chunk & 1) == 0) {
        done = take_chunk<kPhase, kStores, 0>(lattice, walk, ahead, chunk, whole, carried, incoming, outgoing, exponent,
                                              of_blanks);
      } else {
        done = take_chunk<kPhase, kStores, 1>(lattice, walk, ahead, chunk, whole, carried, incoming, outgoing, exponent,
                                              of_blanks);
      }
      if (!done) {
        nan = walk_slowly<kPhase, kStores>(lattice, walk, chunk, low, high, carried, incoming, outgoing, exponent,
                                           of_blanks) ||
              nan;
      }
      carried = incoming[kChunk - 1];
      if (sends) {
        __syncwarp();
        if (passes) send(to + chunk * kChunk + lane, renormalised(outgoing[lane]));
      }
    }
    __syncthreads();
  }
  if constexpr (kPhase == 1) {
    if (nan) atomicOr(broken + n, kNanEmission);
    if (walk.has_blank) store_number(last + walk.blank_at, walk.b.m, walk.b.e);
    if (walk.has_label) store_number(last + walk.label_at, walk.l.m, walk.l.e);
    if (band == 0 && warp == 0) {
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) of_blanks += __shfl_xor_sync(0xffffffffu, of_blanks, offset);
      if (lane == 0) blanks[which] = of_blanks;
    }
  }
}
