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
// A block takes one direction of one sample; longer targets take several blocks, one for each band of 64 positions, and
// pass label products through memory. A group of 32 positions has three warps, with a lane for each position:
//
//   kSteps          goes from frame to frame. It touches shared memory alone: the chain of a shuffle, which brings
//                   l_(j-1) from the lane before, sums and products is all that it waits for.
//   kEmits          loads elements, and leaves their exponentials a chunk of 8 frames ahead of kSteps.
//   kStoresStates   stores what kSteps has left of the chunk before: products, or posteriors.
//
// The products of a state in a chunk share an exponent in the lattice (extended.cuh). A state may fall or rise by more
// than a word holds, 2^510, within a chunk: then each product has an exponent of its own, in memory that is not touched
// otherwise. Chunks of the two directions need not begin at the same frame: those of one overlap two of the other.
//
// The dependence runs one way, so groups are skewed: in round r kSteps of group w takes chunk r - w, and reads the
// label products that kSteps of group w - 1 has left in shared memory. One barrier serves a round. One warp for all
// three would wait for its own loads and stores, since it issues in order.
//
// Traffic, in words of 4 bytes (8 in double): (2 S + 1) T written, read and written again, and an exponent for each
// chunk of a state written and read; T (S + 1) elements of x, each in a sector of its own, in both halves.
#pragma once
#include "sequence/sequences.cuh"
#include "softmax/row_ptx.cuh"

// Frames that warps exchange at a time: a chunk.
template <class Mantissa>
constexpr int kChunkFrames = sizeof(Mantissa) == 4 ? 8 : 4;
// Groups of a block, and their positions. A sample may need several blocks.
constexpr int kMaxGroups = 2;
constexpr int kBand = 32 * kMaxGroups;
// Lattices of more bytes are prefetched into L2, so many chunks before they are used: a load has one or two rounds to
// arrive in, which memory may exceed and L2 does not. A smaller one is still in L2 from the first half. Beyond as many
// bytes on their way, some would be evicted before they are used.
constexpr int64 kPrefetchedLattice = 1 << 24, kMostOnTheirWay = 3 << 23;
constexpr int kPrefetched = 5;
// The work of a warp for a group of 32 positions, in the order of warps. Four schedulers issue for the warps of a
// multiprocessor in turn: of two groups, whose other warps share schedulers, those that step have one each.
enum Role { kEmits, kSteps, kStoresStates, kRoles };

// The states of all frames: for each a word, which is the product that one direction has stored and then the posterior;
// an exponent of its own, in use only where a chunk has no shared one; and for each chunk a shared exponent. Each of
// the three has rows of the same order: the blanks of a frame by position, and behind them its labels.
template <class Mantissa>
struct Lattice {
  using Word = typename PackedNumber<Mantissa>::Word;
  Word* words;
  int* exponents;
  int* shared;

  __device__ __forceinline__ Lattice(Mantissa* memory, const Sequences& shape)
      : words(reinterpret_cast<Word*>(memory)),
        exponents(reinterpret_cast<int*>(memory + 2 * shape.positions * shape.frames)),
        shared(exponents + 2 * shape.positions * shape.frames) {
  }

  // The row of frame `t` in `words`, in a call of so many frames.
  static __device__ __forceinline__ int64 row(const Sample& sample, int64 frames, int64 t) {
    return 2 * (sample.first * frames + t * (sample.labels + 1));
  }
  // The shared exponents of the first chunk of a direction in its first half. Those of its next chunks follow, and
  // beta's stand behind alpha's. Half of the frames is alpha's.
  __device__ __forceinline__ int* first_shared(const Sample& sample, int64 frames, bool of_beta) const {
    constexpr int kChunk = kChunkFrames<Mantissa>;
    const int64 rows = frames / kChunk + 2, row = of_beta ? (sample.frames / 2 + kChunk - 1) / kChunk : 0;
    return shared + 2 * (sample.first * rows + row * (sample.labels + 1));
  }
};

// The row of alpha's last products, or beta's, in the order of the lattice.
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

// 2^(of - over), 0 below the smallest power that is not subnormal. Precondition: it is not beyond the largest.
__device__ __forceinline__ float power_below_limit(int of, int over, float) {
  return __uint_as_float(static_cast<unsigned>(max(of + (127 - over), 0)) << 23);
}
__device__ __forceinline__ double power_below_limit(int of, int over, double) {
  return __longlong_as_double(static_cast<int64>(max(of + (1023 - over), 0)) << 52);
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

// One thread's position of one direction: addresses, and the products of the frame before.
template <class Mantissa, class Storage>
struct Walk {
  using Number = Extended<Mantissa>;
  Number b, l;
  bool has_blank, has_label, skips;
  const Storage* x;  // the label's element at the first frame of this half
  const Storage* blank;
  int64 step;              // elements from a frame to the next one of this direction
  int blank_at, label_at;  // of the states, in a row
};

// A position and a frame, as warps exchange it. kEmits leaves the label's emission in `label`; kSteps overwrites it by
// two states, products in the first half and brackets in the second.
template <class Mantissa>
struct alignas(4 * sizeof(Mantissa)) Slot {
  StoredNumber<Mantissa> blank, label;
};
template <class Mantissa>
struct Pair {
  Extended<Mantissa> blank, label;
};

__device__ __forceinline__ void store_pair(Slot<float>* to, const Extended<float>& b, const Extended<float>& l) {
  *reinterpret_cast<uint4*>(to) =
      uint4{__float_as_uint(b.m), static_cast<unsigned>(b.e), __float_as_uint(l.m), static_cast<unsigned>(l.e)};
}
__device__ __forceinline__ void store_pair(Slot<double>* to, const Extended<double>& b, const Extended<double>& l) {
  store_number(&to->blank, b.m, b.e);
  store_number(&to->label, l.m, l.e);
}
__device__ __forceinline__ Pair<float> load_pair(const Slot<float>* from) {
  const uint4 word = *reinterpret_cast<const uint4*>(from);
  return {{__uint_as_float(word.x), static_cast<int>(word.y)}, {__uint_as_float(word.z), static_cast<int>(word.w)}};
}
__device__ __forceinline__ Pair<double> load_pair(const Slot<double>* from) {
  return {load_number(&from->blank), load_number(&from->label)};
}

// Shared memory of a block. Of a buffer of two, one half serves even chunks, the other odd ones. Slots are in use for
// three rounds: by the warp that emits, then by the one that steps, then by the one that stores.
template <class Mantissa>
struct Exchange {
  static constexpr int kChunk = kChunkFrames<Mantissa>;
  StoredNumber<Mantissa> blanks[kMaxGroups][2][kChunk];      // emissions of the blank, of each group
  StoredNumber<Mantissa> passed[kMaxGroups + 1][2][kChunk];  // label products at the last position of each group, by
                                                             // group + 1; zeros in front of the first
  int ordinary[kMaxGroups][2];                               // nonzero if all emissions of the chunk are

  // The lane's slot in the first frame of a chunk; those of the next frames are 32 apart.
  static __device__ __forceinline__ Slot<Mantissa>* slots(int group, int chunk) {
    extern __shared__ uint4 staged[];
    return reinterpret_cast<Slot<Mantissa>*>(staged) + (group * 3 + chunk % 3) * kChunk * 32 + threadIdx.x % 32;
  }
};

// Steps through a chunk, or `count` frames of it if that is less, whose emissions are in `slots` and `blanks`.
//
// kOrdinary: all frames, of ordinary emissions. kLeaves: the states of each frame are left in `slots`, those of the
// first half if kPhase is 1.
//
// `incoming` are the label products of the position before the warp's first, in the frames of this chunk, and `carried`
// the one of the frame before; `outgoing` takes those of the warp's last position.
template <int kPhase, bool kLeaves, bool kOrdinary, class Mantissa, class Storage>
__device__ __forceinline__ void walk_chunk(Walk<Mantissa, Storage>& walk, Slot<Mantissa>* slots,
                                           const StoredNumber<Mantissa>* blanks, int count, Extended<Mantissa>& carried,
                                           const StoredNumber<Mantissa>* incoming, StoredNumber<Mantissa>* outgoing) {
  using Number = Extended<Mantissa>;
  constexpr int kChunk = kChunkFrames<Mantissa>;
  const int lane = threadIdx.x % 32;
  // One select stands between a shuffle and the sums: lane 0 takes what came from outside, and who may not skip, zero.
  const bool takes_other = lane == 0 || !walk.skips;
  auto step = [&](int f, const Number& outside, const Number& of_label, const Number& of_blank) {
    const Number inside = {__shfl_up_sync(0xffffffffu, walk.l.m, 1), __shfl_up_sync(0xffffffffu, walk.l.e, 1)};
    const Number staying = sum(walk.l, walk.b), other = walk.skips ? outside : zero_number<Mantissa>();
    const Number before = {lane == 0 ? outside.m : inside.m, lane == 0 ? outside.e : inside.e};
    const Number skipped = {takes_other ? other.m : inside.m, takes_other ? other.e : inside.e};
    const Number bracket_b = sum(walk.b, before), bracket_l = sum(staying, skipped);
    if constexpr (kOrdinary) {
      walk.b = ordinary_product(bracket_b, of_blank);
      walk.l = ordinary_product(bracket_l, of_label);
    } else {
      walk.b = renormalised(product(bracket_b, of_blank));
      walk.l = renormalised(product(bracket_l, of_label));
    }
    if constexpr (kLeaves) {
      store_pair(slots + 32 * f, kPhase == 1 ? walk.b : bracket_b, kPhase == 1 ? walk.l : bracket_l);
    }
    if (f < kChunk - 1 && lane == 31) store_number(outgoing + f, walk.l.m, walk.l.e);
  };
  if constexpr (kOrdinary) {
    // Loads stand ahead in the chain of steps: stores of slots would keep the compiler from moving them there. Without
    // such stores all stand in front of it, but for GPUs without cp.async, where they would spill registers.
    constexpr int kAhead = (kLeaves || !kHasCpAsync) && kChunk > 4 ? 4 : kChunk;
    Number of_label[kAhead], of_blank[kAhead], outside[kAhead];
    const auto load = [&](int f) {
      of_label[f % kAhead] = load_number(&slots[32 * f].label);
      of_blank[f % kAhead] = load_number(blanks + f);
      outside[f % kAhead] = f == 0 ? carried : load_number(incoming + f - 1);
    };
#pragma unroll
    for (int f = 0; f < kAhead; ++f) load(f);
#pragma unroll
    for (int f = 0; f < kChunk; ++f) {
      step(f, outside[f % kAhead], of_label[f % kAhead], of_blank[f % kAhead]);
      if (f + kAhead < kChunk) load(f + kAhead);
    }
  } else {
#pragma unroll 1
    for (int f = 0; f < min(count, kChunk); ++f) {
      const Number outside = f == 0 ? carried : load_number(incoming + f - 1);
      step(f, outside, load_number(&slots[32 * f].label), load_number(blanks + f));
    }
  }
  if (kOrdinary || count >= kChunk) {
    walk.b = renormalised(walk.b);
    walk.l = renormalised(walk.l);
    if (lane == 31) store_number(outgoing + kChunk - 1, walk.l.m, walk.l.e);
    carried = load_number(incoming + kChunk - 1);
  }
}

// The emissions of a position. Elements of two chunks are on their way, in registers of their own: to move one that has
// not arrived is to wait for it.
//
// Frames behind the last one are read as the last one: the loads of a chunk have no conditions, which would keep the
// compiler from scheduling across them. The blank's element is that of frame lane % kChunk.
template <class Mantissa, class Storage>
struct Elements {
  static constexpr int kChunk = kChunkFrames<Mantissa>;
  Storage of_label[kChunk], of_blank;

  // Loads those from frame `first` on. Precondition: `steps` is not 0.
  __device__ __forceinline__ void load(const Walk<Mantissa, Storage>& walk, int first, int steps) {
    const int last = steps - 1;
    of_blank = walk.blank[min(first + static_cast<int>(threadIdx.x) % kChunk, last) * walk.step];
    if (first + kChunk <= steps) {
      const Storage* at = walk.x + first * walk.step;
#pragma unroll
      for (int f = 0; f < kChunk; ++f) of_label[f] = at[f * walk.step];
    } else {
#pragma unroll
      for (int f = 0; f < kChunk; ++f) of_label[f] = walk.x[min(first + f, last) * walk.step];
    }
  }

  // Leaves their exponentials. Returns true if a NaN is among them. Precondition: the whole warp.
  __device__ __forceinline__ bool emit(bool has_label, Slot<Mantissa>* slots, StoredNumber<Mantissa>* blanks,
                                       int* is_chunk_ordinary) const {
    const int lane = threadIdx.x % 32;
    bool odd = !is_ordinary(widen<Mantissa>(of_blank)), nan = false;
#pragma unroll
    for (int f = 0; f < kChunk; ++f) odd = odd || !is_ordinary(widen<Mantissa>(of_label[f]));
    const bool ordinary = __any_sync(0xffffffffu, odd) == 0;
    Extended<Mantissa> y;
    if (ordinary) {
#pragma unroll
      for (int f = 0; f < kChunk; ++f) {
        y = ordinary_exponential(widen<Mantissa>(of_label[f]));
        store_number(&slots[32 * f].label, has_label ? y.m : Mantissa(0), y.e);
      }
      y = ordinary_exponential(widen<Mantissa>(of_blank));
    } else {
#pragma unroll
      for (int f = 0; f < kChunk; ++f) {
        y = has_label ? exponential(widen<Mantissa>(of_label[f])) : zero_number<Mantissa>();
        nan = nan || y.m != y.m;
        store_number(&slots[32 * f].label, y.m, y.e);
      }
      y = exponential(widen<Mantissa>(of_blank));
      nan = nan || y.m != y.m;
    }
    if (lane < kChunk) store_number(blanks + lane, y.m, y.e);
    if (lane == 0) *is_chunk_ordinary = ordinary;
    return nan;
  }
};

// The states of a position in the lattice, from the first frame of a half on. Rows of successive frames are `step`
// bytes apart in words, and `own_step` in exponents; rows of shared exponents `shared_step`, from a chunk of the
// direction that stores the products to its next one.
//
// The last position has no label, and a row a place to spare, which serves as one: lanes have both states or none.
template <class Mantissa>
struct States {
  using Word = typename PackedNumber<Mantissa>::Word;
  bool exist;
  Word *row, *blank, *label;
  int *own_blank, *own_label;
  int *shared_blank, *shared_label;
  int step, own_step, shared_step;
};

// Row `i` from `first` on.
template <class T>
__device__ __forceinline__ T* row_at(T* first, int i, int step) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(first) + wide_product(i, step));
}

// Stores the products of a chunk in the first half.
template <class Mantissa>
struct Products {
  using Word = typename PackedNumber<Mantissa>::Word;
  static constexpr int kChunk = kChunkFrames<Mantissa>;

  __device__ __forceinline__ void load(const States<Mantissa>&, int, int) {
  }
  __device__ __forceinline__ bool is_plain() const {
    return true;
  }
  static __device__ __forceinline__ void prefetch(const States<Mantissa>&, int, int) {
  }

  static __device__ __forceinline__ void store_state(Word* word, int* own, const Extended<Mantissa>& a, int shared) {
    if (shared != kApart) {
      *word = pack(a, shared);
    } else {
      *word = bits_of(a.m);
      *own = a.e;
    }
  }

  // Stores a chunk of any number of frames, whether or not its states share exponents.
  static __device__ __forceinline__ void store_any(const States<Mantissa>& states, const Slot<Mantissa>* slots,
                                                   int chunk, int count) {
    if (!states.exist) return;
    SharedExponent<Mantissa> of_blank, of_label;
#pragma unroll 1
    for (int f = 0; f < count; ++f) {
      const Pair<Mantissa> left = load_pair(slots + 32 * f);
      of_blank.add(left.blank);
      of_label.add(left.label);
    }
    const int blank = of_blank.shared(), label = of_label.shared();
    *row_at(states.shared_blank, chunk, states.shared_step) = blank;
    *row_at(states.shared_label, chunk, states.shared_step) = label;
#pragma unroll 1
    for (int f = 0; f < count; ++f) {
      const Pair<Mantissa> left = load_pair(slots + 32 * f);
      const int t = chunk * kChunk + f;
      store_state(row_at(states.blank, t, states.step), row_at(states.own_blank, t, states.own_step), left.blank,
                  blank);
      store_state(row_at(states.label, t, states.step), row_at(states.own_label, t, states.own_step), left.label,
                  label);
    }
  }

  // Precondition: the whole warp.
  template <bool kPlain>
  __device__ __forceinline__ void store(const States<Mantissa>& states, const Slot<Mantissa>* slots, int chunk,
                                        int steps, int64) const {
    if constexpr (!kPlain) {
      store_any(states, slots, chunk, min(steps - chunk * kChunk, kChunk));
    } else {
      // All loads stand in front of all stores: a load from shared memory waits in line behind stores that memory holds
      // up. Without cp.async GPUs have too few registers for that.
      Pair<Mantissa> products[kChunk];
#pragma unroll
      for (int f = 0; f < kChunk; ++f) products[f] = load_pair(slots + 32 * f);
      SharedExponent<Mantissa> of_blank, of_label;
#pragma unroll
      for (int f = 0; f < kChunk; ++f) {
        of_blank.add(products[f].blank);
        of_label.add(products[f].label);
      }
      const int blank = of_blank.shared(), label = of_label.shared();
      if (__any_sync(0xffffffffu, states.exist && (blank == kApart || label == kApart))) {
        store_any(states, slots, chunk, kChunk);
      } else if (states.exist) {
        *row_at(states.shared_blank, chunk, states.shared_step) = blank;
        *row_at(states.shared_label, chunk, states.shared_step) = label;
#pragma unroll
        for (int f = 0; f < kChunk; ++f) {
          const Pair<Mantissa> left = kHasCpAsync ? products[f] : load_pair(slots + 32 * f);
          const int t = chunk * kChunk + f;
          *row_at(states.blank, t, states.step) = pack(left.blank, blank);
          *row_at(states.label, t, states.step) = pack(left.label, label);
        }
      }
    }
  }
};

// Products that the other direction has stored of a position, for a chunk of the second half, which replaces them by
// posteriors. As of elements, two chunks are on their way, or one (kAhead), where a multiprocessor shall have registers
// for four blocks in place of three.
//
// Frame s of this half is frame `steps` - 1 - s of the other direction's first half: a chunk begins in one chunk of
// that direction, and ends in the chunk before.
template <class Mantissa>
struct Posteriors {
  using Word = typename PackedNumber<Mantissa>::Word;
  static constexpr int kChunk = kChunkFrames<Mantissa>;
  Word of_blank[kChunk] = {}, of_label[kChunk] = {};
  int shared_blank[2] = {}, shared_label[2] = {};

  // Loads those of a chunk; frames behind the last one are read as the last one. Precondition: `steps` is not 0.
  __device__ __forceinline__ void load(const States<Mantissa>& states, int chunk, int steps) {
    if (!states.exist) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = max((steps - 1) / kChunk - chunk - i, 0);
      shared_blank[i] = *row_at(states.shared_blank, at, states.shared_step);
      shared_label[i] = *row_at(states.shared_label, at, states.shared_step);
    }
#pragma unroll
    for (int f = 0; f < kChunk; ++f) {
      const int t = min(chunk * kChunk + f, steps - 1);
      of_blank[f] = *row_at(states.blank, t, states.step);
      of_label[f] = *row_at(states.label, t, states.step);
    }
  }

  // True if all states of the warp share exponents. Precondition: the whole warp.
  __device__ __forceinline__ bool is_plain() const {
    const bool apart = shared_blank[0] == kApart || shared_blank[1] == kApart || shared_label[0] == kApart ||
                       shared_label[1] == kApart;
    return __any_sync(0xffffffffu, apart) == 0;
  }

  // Stores posteriors of the frames of a chunk.
  //
  // kPlain: all frames, of a sample without NaN, exponents of posteriors fit 32 bits, and `is_plain`.
  template <bool kPlain>
  __device__ __forceinline__ void store(const States<Mantissa>& states, const Slot<Mantissa>* slots, int chunk,
                                        int steps, int64 exponent) const {
    if (!states.exist) return;
    const int over = kPlain ? static_cast<int>(exponent) : 0, turn = (steps - 1) % kChunk;
    const int blanks[2] = {shared_blank[0] - over, shared_blank[1] - over};
    const int labels[2] = {shared_label[0] - over, shared_label[1] - over};
#pragma unroll
    for (int f = 0; f < kChunk; ++f) {
      const int t = chunk * kChunk + f;
      if (kPlain || t < steps) {
        const Pair<Mantissa> left = load_pair(slots + 32 * f);
        const int blank = f <= turn ? blanks[0] : blanks[1];
        const int label = f <= turn ? labels[0] : labels[1];
        Mantissa found_b, found_l;
        if constexpr (kPlain) {
          found_b = left.blank.m * scaled_word(of_blank[f], blank + left.blank.e, Mantissa(0));
          found_l = left.label.m * scaled_word(of_label[f], label + left.label.e, Mantissa(0));
        } else {
          found_b =
              any_posterior(left.blank, of_blank[f], blank, row_at(states.own_blank, t, states.own_step), exponent);
          found_l =
              any_posterior(left.label, of_label[f], label, row_at(states.own_label, t, states.own_step), exponent);
        }
        *row_at(states.blank, t, states.step) = bits_of(found_b);
        *row_at(states.label, t, states.step) = bits_of(found_l);
      }
    }
  }

  static __device__ __forceinline__ Mantissa any_posterior(const Extended<Mantissa>& left, Word word, int shared,
                                                           const int* own, int64 exponent) {
    if (word == 0) return Mantissa(0);
    const Extended<Mantissa> other =
        shared == kApart ? Extended<Mantissa>{from_bits(word), *own} : unpack_nonzero<Mantissa>(word, shared);
    return posterior(left, other, exponent);
  }

  // Prefetches the words of a chunk into L2. Rows need not begin at multiples of 16 bytes: the lattice has as many
  // bytes behind it.
  static __device__ __forceinline__ void prefetch(const States<Mantissa>& states, int chunk, int steps) {
    const int first = chunk * kChunk, last = first + kChunk - 1;
    if (last >= steps) return;
    // Rows of successive frames lie one behind the other.
    const unsigned long long at =
        reinterpret_cast<unsigned long long>(row_at(states.row, states.step > 0 ? first : last, states.step));
    const unsigned bytes = static_cast<unsigned>(kChunk * (states.step > 0 ? states.step : -states.step));
    const unsigned before = static_cast<unsigned>(at) & 15u;
    prefetch_l2(reinterpret_cast<const void*>(at - before), (before + bytes + 15u) & ~15u);
  }
};

// Takes the label products of a chunk from the band before, `passes` of them, into `to`. `words` holds what lies at
// `at`, the lane's place in the column, and gets what lies there a chunk later, which is in flight meanwhile.
// Precondition: the whole warp.
template <class Mantissa>
__device__ __forceinline__ void receive_chunk(StoredNumber<Mantissa>* at, int passes, Words<Mantissa>& words,
                                              StoredNumber<Mantissa>* to) {
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
    const Extended<Mantissa> found = number_of(words);
    store_number(to + lane, found.m, found.e);
    set_absent(at);
  }
  if (lane < kChunkFrames<Mantissa>) words = look(at + kChunkFrames<Mantissa>);
  __syncwarp();
}

// The walk of position j, of `size` in the sample, before its first frame, `first_frame`: without what it carries.
template <class Mantissa, class Storage>
__device__ __forceinline__ Walk<Mantissa, Storage> walk_of(const Sequences& shape, const Storage* x, int64 n,
                                                           const int* labels, int size, int j, bool backward,
                                                           int64 first_frame) {
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
  return walk;
}

// A half of one direction, as all warps of a block see it.
template <class Mantissa>
struct Half {
  Exchange<Mantissa>& shared;
  int steps, chunks, rounds;  // frames, chunks, barriers
  int group;                  // of the warp
  bool runs;                  // whether the group has positions, and frames
  bool prefetches;            // the lattice, for all groups and bands
};

// Waits for `idle` rounds, and lets buffers take turns in the others.
template <class Buffer, class Turn>
__device__ __forceinline__ void take_turns(int idle, int rounds, Buffer& first, Buffer& second, const Turn& turn) {
  int r = 0;
  for (; r < min(idle, rounds); ++r) block_barrier();
  while (r < rounds) {
    turn(first);
    block_barrier();
    if (++r == rounds) break;
    turn(second);
    block_barrier();
    ++r;
  }
}

// kEmits. Returns true if the lane has found a NaN.
template <class Mantissa, class Storage>
__device__ __forceinline__ bool emit_chunks(const Half<Mantissa>& half, const Walk<Mantissa, Storage>& walk) {
  constexpr int kChunk = kChunkFrames<Mantissa>;
  const int group = half.group;
  Elements<Mantissa, Storage> even, odd;
  bool nan = false;
  int chunk = 0;
  const auto emit = [&](Elements<Mantissa, Storage>& elements) {
    if (half.runs && chunk < half.chunks) {
      const int buffer = chunk & 1;
      nan = elements.emit(walk.has_label, half.shared.slots(group, chunk), half.shared.blanks[group][buffer],
                          &half.shared.ordinary[group][buffer]) ||
            nan;
      elements.load(walk, (chunk + 2) * kChunk, half.steps);
    }
    ++chunk;
  };
  if (half.runs) {
    even.load(walk, 0, half.steps);
    odd.load(walk, kChunk, half.steps);
  }
  emit(even);
  block_barrier();
  take_turns(group, half.rounds, odd, even, emit);
  return nan;
}

// kStoresStates, of Products or Posteriors. `exponent` is that of Z in the second half. `plain` if exponents of
// posteriors fit 32 bits and no state is NaN.
template <class Stored, int kAhead, class Mantissa>
__device__ __forceinline__ void store_chunks(const Half<Mantissa>& half, const States<Mantissa>& states, int64 exponent,
                                             bool plain) {
  constexpr int kChunk = kChunkFrames<Mantissa>;
  Stored stored[kAhead];
  int chunk = 0;
  const auto store = [&](Stored& own) {
    if (half.runs && chunk < half.chunks) {
      const Slot<Mantissa>* const slots = half.shared.slots(half.group, chunk);
      if (plain && chunk * kChunk + kChunk <= half.steps && own.is_plain()) {
        own.template store<true>(states, slots, chunk, half.steps, exponent);
      } else {
        own.template store<false>(states, slots, chunk, half.steps, exponent);
      }
      own.load(states, chunk + kAhead, half.steps);
      if (half.prefetches && threadIdx.x % 32 == 0) own.prefetch(states, chunk + kPrefetched, half.steps);
    }
    ++chunk;
  };
  if (half.runs) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) stored[i].load(states, i, half.steps);
  }
  block_barrier();
  take_turns(half.group + 1, half.rounds, stored[0], stored[kAhead - 1], store);
}

// kSteps. `carried` is the label product of the position before the group's first, in the frame before. Label products
// come from the band before by the column `from`, and go to the next one by `to`, unless that is null.
template <int kPhase, bool kLeaves, class Mantissa, class Storage>
__device__ __forceinline__ void step_chunks(const Half<Mantissa>& half, Walk<Mantissa, Storage>& walk,
                                            Extended<Mantissa> carried, StoredNumber<Mantissa>* from,
                                            StoredNumber<Mantissa>* to) {
  constexpr int kChunk = kChunkFrames<Mantissa>;
  const int lane = threadIdx.x % 32, group = half.group;
  Words<Mantissa> words = {};
  if (from != nullptr && lane < kChunk) words = look(from + lane);
  block_barrier();
  for (int r = 0; r < half.rounds; ++r) {
    const int chunk = r - group, buffer = chunk & 1;
    if (half.runs && chunk >= 0 && chunk < half.chunks) {
      StoredNumber<Mantissa>* const incoming = half.shared.passed[group][buffer];
      StoredNumber<Mantissa>* const outgoing = half.shared.passed[group + 1][buffer];
      const StoredNumber<Mantissa>* const blanks = half.shared.blanks[group][buffer];
      Slot<Mantissa>* const slots = half.shared.slots(group, chunk);
      const int count = half.steps - chunk * kChunk, passes = count < kChunk ? count - 1 : kChunk;
      if (from != nullptr) receive_chunk(from + chunk * kChunk + lane, passes, words, incoming);
      if (half.shared.ordinary[group][buffer] != 0 && count >= kChunk) {
        walk_chunk<kPhase, kLeaves, true>(walk, slots, blanks, count, carried, incoming, outgoing);
      } else {
        walk_chunk<kPhase, kLeaves, false>(walk, slots, blanks, count, carried, incoming, outgoing);
      }
      if (to != nullptr) {
        __syncwarp();
        const Extended<Mantissa> sent = load_number(outgoing + lane % kChunk);
        if (lane < passes) send(to + chunk * kChunk + lane, sent);
      }
    }
    block_barrier();
  }
}

// One half of one direction of a sample, over one band of positions: walk `order` of the launch, which waits for walks
// of lower numbers alone.
//
// Preconditions: blockDim.x is kRoles times kBand, or times a multiple of 32 no less than the number of positions of
// any sample that is possible; dynamic shared memory has the Slots of three chunks of so many positions; `order` is
// below 2 * samples * bands; kPhase 2 runs after all blocks of kPhase 1. `lattice` is read and written unless kPhase is
// 1 and kStores false.
template <int kPhase, bool kStores, int kAhead, class Mantissa, class Storage>
__device__ __forceinline__ void walk_half(const Sequences& shape, const Storage* x, const Sample* samples,
                                          const int* labels, Mantissa* lattice, StoredNumber<Mantissa>* meeting,
                                          StoredNumber<Mantissa>* columns, unsigned* broken, unsigned order) {
  using Number = Extended<Mantissa>;
  constexpr int kChunk = kChunkFrames<Mantissa>;
  constexpr bool kLeaves = kPhase == 2 || kStores;
  __shared__ Exchange<Mantissa> shared;
  const unsigned walks = static_cast<unsigned>(2 * shape.samples);
  const int64 which = order % walks, band = order / walks, n = which / 2;
  const bool backward = which % 2 != 0;
  const Sample sample = samples[n];
  if (sample.outcome != kRuns) return;
  const int size = sample.labels + 1, lane = threadIdx.x % 32;
  // Uniform over a warp, as far as the compiler can tell: else it splits each step where lanes might part.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  const int launched = static_cast<int>(blockDim.x) / (32 * kRoles), role = warp / launched, group = warp % launched;
  const int first = static_cast<int>(band) * kBand, j = first + 32 * group + lane;
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
  Walk<Mantissa, Storage> walk = walk_of<Mantissa>(shape, x, n, own, size, j, backward, first_frame);
  Number carried = zero_number<Mantissa>();
  if constexpr (kPhase == 1) {
    if (j == 0) walk.b = {Mantissa(1), 0};
  } else {
    if (walk.has_blank) walk.b = load_number(last + walk.blank_at);
    if (walk.has_label) walk.l = load_number(last + walk.label_at);
    if (lane == 0 && j > 0 && j < size) carried = load_number(last + size + (backward ? size - 1 - j : j - 1));
  }
  for (int i = threadIdx.x; i < 2 * kChunk; i += blockDim.x) {
    store_number(&shared.passed[0][i / kChunk][i % kChunk], Mantissa(0), kZero);
  }
  const int groups = min((size - first + 31) / 32, kMaxGroups);
  const int chunks = (steps + kChunk - 1) / kChunk, rounds = chunks + groups - 1 + kLeaves;
  const bool runs = group < groups && steps > 0;
  const int64 of_frame = 2 * shape.positions * static_cast<int64>(sizeof(Mantissa));
  const bool prefetches = kPhase == 2 && band == 0 && group == 0 && of_frame * shape.frames > kPrefetchedLattice &&
                          of_frame * (2 * kChunk * kPrefetched) <= kMostOnTheirWay;
  const Half<Mantissa> part = {shared, steps, chunks, rounds, group, runs, prefetches};
  if (role == kEmits) {
    const bool nan = emit_chunks(part, walk);
    if (kPhase == 1 && nan) atomicOr(broken + n, kNanEmission);
    return;
  }
  if (role == kStoresStates) {
    if constexpr (kLeaves) {
      const Lattice<Mantissa> all(lattice, shape);
      const int64 row = all.row(sample, shape.frames, first_frame);
      typename Lattice<Mantissa>::Word* const words = all.words + row;
      int* const own_exponents = all.exponents + row;
      int* const shared_exponents = all.first_shared(sample, shape.frames, backward == (kPhase == 1));
      const int of_row = 2 * size, signed_row = backward ? -of_row : of_row;
      const int label_at = walk.has_label ? walk.label_at : of_row - 1;
      const States<Mantissa> states = {walk.has_blank,
                                       words,
                                       words + walk.blank_at,
                                       words + label_at,
                                       own_exponents + walk.blank_at,
                                       own_exponents + label_at,
                                       shared_exponents + walk.blank_at,
                                       shared_exponents + label_at,
                                       signed_row * static_cast<int>(sizeof(Mantissa)),
                                       signed_row * static_cast<int>(sizeof(int)),
                                       of_row * static_cast<int>(sizeof(int))};
      if constexpr (kPhase == 1) {
        store_chunks<Products<Mantissa>, kAhead>(part, states, 0, true);
      } else {
        const bool plain = exponent >= kLowest && exponent <= -kLowest && (broken[n] & kNanEmission) == 0u;
        store_chunks<Posteriors<Mantissa>, kAhead>(part, states, exponent, plain);
      }
    } else {
      for (int r = 0; r <= rounds; ++r) block_barrier();
    }
    return;
  }
  StoredNumber<Mantissa>* const column = columns + (which * (shape.bands - 1) + band) * shape.column;
  StoredNumber<Mantissa>* const from = band > 0 && group == 0 ? column - shape.column : nullptr;
  StoredNumber<Mantissa>* const to = size - first > kBand && group == kMaxGroups - 1 ? column : nullptr;
  step_chunks<kPhase, kLeaves>(part, walk, carried, from, to);
  if constexpr (kPhase == 1) {
    walk.b = renormalised(walk.b);
    walk.l = renormalised(walk.l);
    if (walk.has_blank) store_number(last + walk.blank_at, walk.b.m, walk.b.e);
    if (walk.has_label) store_number(last + walk.label_at, walk.l.m, walk.l.e);
  }
}
