// CTC: the forward-backward recursion, from both ends at once (Graves et al., ICML 2006; alpha and beta meet in the
// middle).
//
//   forward    b_j <- y(blank) (b_j + l_(j-1)),   l_j <- y(label_j) (l_j + b_j + [label_j != label_(j-1)] l_(j-1))
//   y_t(c) = exp(x[t, n, c]),   b_0 = 1 and all else 0 before the first frame
//
// The positions are j = 0 .. S. Each has two states: the blank b_j before label j, and l_j. Beta is the same recursion
// on reversed frames and labels, so both share one piece of code with reversed addresses. The sum in parentheses (the
// bracket) is kept apart from its product with y:
//
//   posterior of a state at frame t = (alpha's bracket at t) (beta's product at t) / Z, and the other way round
//
// Hence nothing is divided by y, and y = 0 is no special case. Numbers have an extended range (extended.cuh).
//
// 1. First half: alpha processes frames 0 .. M - 1, beta T - 1 .. M, with M = T / 2. Each stores its products in the
//    lattice if gradients are wanted, and the products of its last frame in the meeting rows.
// 2. Meeting: the meeting rows give Z. `meeting_terms` returns the factors of the summands of one position.
// 3. Second half: alpha continues over M .. T - 1 against beta's products, beta over M - 1 .. 0 against alpha's.
//    Posteriors, up to a factor per frame, replace the products in the lattice.
//
// A block processes one direction of one sample (a walk). Longer targets need several blocks, one for each band of 64
// positions, which pass label products through memory. A group of 32 positions has three or four warps, with a lane for
// each position:
//
//   kEmits          copies elements to shared memory ahead of their use, computes their exponentials one chunk of 8
//                   frames ahead of kSteps, and receives label products from the preceding band.
//   kSteps          runs the recursion from frame to frame. It accesses only shared memory, so it waits for nothing but
//                   its own chain of a shuffle, which brings l_(j-1) from the preceding lane, sums and products.
//   kStoresStates   stores what kSteps has left of the preceding chunk: products, or posteriors, for which it copies
//                   the other direction's products ahead of their use. It sends label products to the next band.
//   kStoresLabels   in the second half takes over the labels from kStoresStates, which has twice as much work there as
//                   the other warps. Where several blocks share a multiprocessor, they hide this imbalance, and a
//                   fourth warp costs time.
//
// The products of a state in a chunk share an exponent in the lattice (extended.cuh). Within a chunk a state may fall
// or rise by more than a word holds, 2^510. Then each product has an exponent of its own, in memory that is not
// accessed otherwise. Chunks of the two directions need not begin at the same frame: a chunk of one overlaps two of the
// other.
//
// The dependence runs one way, so groups are skewed: in round r, kSteps of group w processes chunk r - w, and reads the
// label products that kSteps of group w - 1 left in shared memory. One barrier serves a round. A single warp for all
// the work would wait for its own loads and stores, because a warp issues in order.
//
// Traffic, in words of 4 bytes (8 in double): (2 S + 1) T words written, read and written again; an exponent written
// and read for each state and chunk; T (S + 1) elements of x in each half, each in a sector of its own. With many
// classes, the first half stores the elements side by side for the second half (kKeeps). Preconditions: stated at each
// function, above all at walk_half.
#pragma once
#include "sequence/sequences.cuh"
#include "softmax/row_ptx.cuh"

// Number of frames per chunk, the unit in which warps exchange data.
template <class Mantissa>
constexpr int kChunkFrames = sizeof(Mantissa) == 4 ? 8 : 4;
// Maximum number of groups of a block, and of their positions. A sample may need several blocks.
constexpr int kMaxGroups = 2;
constexpr int kBand = 32 * kMaxGroups;
// Prefetch distance, in chunks, of elements and of the other direction's products. They are copied to shared memory,
// because asynchronous copies can be awaited chunk by chunk. Loads into registers cannot: the compiler tracks all of
// them with one scoreboard, so the first use of any waits for those of later chunks too.
constexpr int kElementsAhead = 2, kProductsAhead = 2;
// Lattices of more than kPrefetchedLattice bytes are prefetched into L2, kPrefetched chunks before their use: a copy
// has two rounds to arrive, which DRAM may exceed and L2 does not. A smaller lattice is still in L2 from the first
// half. With more than kMostOnTheirWay bytes in flight, some would be evicted before their use, so nothing is
// prefetched then.
constexpr int64 kPrefetchedLattice = 1 << 24, kMostOnTheirWay = 3 << 23;
constexpr int kPrefetched = 5;
// Work of a warp for a group of 32 positions, in the order of warps. Warps are assigned to the four schedulers of a
// multiprocessor in turn, so that with two groups of three warps, no other warp of the block shares a scheduler with a
// kSteps warp. The other warps share schedulers.
enum Role { kEmits, kSteps, kStoresStates, kStoresLabels };

// The states of all frames, in three arrays. `words` has a word for each state: the product that one direction has
// stored, and later the posterior. `exponents` has an exponent for each state, used only in chunks without a shared
// one. `shared` has a shared exponent for each state of a chunk. Rows have the same order in all three: the blanks of a
// frame by position, then its labels. The words are kept for backward. The exponents are not; the two arrays of
// exponents are contiguous, in memory of their own.
template <class Mantissa>
struct Lattice {
  using Word = typename PackedNumber<Mantissa>::Word;
  Word* words;
  int* exponents;
  int* shared;

  __device__ __forceinline__ Lattice(Mantissa* words, int* exponents, const Sequences& shape)
      : words(reinterpret_cast<Word*>(words)),
        exponents(exponents),
        shared(exponents + 2 * shape.positions * shape.frames) {
  }

  // Offset in `words` and `exponents` of the row of frame `t`, in a call of `frames` frames.
  static __device__ __forceinline__ int64 row(const Sample& sample, int64 frames, int64 t) {
    return 2 * (sample.first * frames + t * (sample.labels + 1));
  }
  // Address of the shared exponents of the first chunk in a direction's first half. Those of its next chunks follow,
  // and beta's are stored after alpha's. Alpha's first half has sample.frames / 2 frames.
  __device__ __forceinline__ int* first_shared(const Sample& sample, int64 frames, bool of_beta) const {
    constexpr int kChunk = kChunkFrames<Mantissa>;
    const int64 rows = frames / kChunk + 2, row = of_beta ? (sample.frames / 2 + kChunk - 1) / kChunk : 0;
    return shared + 2 * (sample.first * rows + row * (sample.labels + 1));
  }
};

// Address of the kept elements of all positions and frames (Kept). They are stored after the exponents of the lattice.
template <class Mantissa>
__device__ __forceinline__ Mantissa* kept_elements(int* exponents, const Sequences& shape) {
  return reinterpret_cast<Mantissa*>(exponents +
                                     2 * shape.positions * (shape.frames + shape.frames / kChunkFrames<Mantissa> + 2));
}

// Address of the row of alpha's last products (direction 0) or beta's (1), in the order of a lattice row.
template <class Mantissa>
__device__ __forceinline__ StoredNumber<Mantissa>* meeting_row(StoredNumber<Mantissa>* meeting, const Sample& sample,
                                                               int64 positions, int direction) {
  return meeting + 2 * (direction * positions + sample.first);
}

// Factors of the summands of Z at one position: alpha's bracket at frame M, and beta's product there.
template <class Mantissa>
struct MeetingTerms {
  Extended<Mantissa> of[4];  // bracket and product of the blank, then those of the label
};

// Returns the terms of position j of a sample with `size` positions, from its meeting rows.
template <class Mantissa>
__device__ __forceinline__ MeetingTerms<Mantissa> meeting_terms(const StoredNumber<Mantissa>* alpha,
                                                                const StoredNumber<Mantissa>* beta, const int* labels,
                                                                int size, int j) {
  using Number = Extended<Mantissa>;
  MeetingTerms<Mantissa> terms;
  const Number b = load_number(alpha + j);
  const Number before = j > 0 ? load_number(alpha + size + j - 1) : zero_number<Mantissa>();
  terms.of[0] = sum(b, before);
  terms.of[1] = load_number(beta + j);
  terms.of[2] = terms.of[3] = zero_number<Mantissa>();
  if (j < size - 1) {
    const bool skips = j > 0 && labels[j] != labels[j - 1];
    const Number skipped = skips ? before : zero_number<Mantissa>();
    terms.of[2] = sum(load_number(alpha + size + j), b, skipped);
    terms.of[3] = load_number(beta + size + j);
  }
  return terms;
}

// Exponent of a product that is zero. It is lower than that of any other product of two extended numbers.
constexpr int64 kNoExponent = 8 * static_cast<int64>(kLowest);

// Returns the exponent of a bracket times a product; kNoExponent if the result is zero.
template <class Mantissa>
__device__ __forceinline__ int64 joint_exponent(const Extended<Mantissa>& a, const Extended<Mantissa>& b) {
  const bool zero = a.m == Mantissa(0) || b.m == Mantissa(0);
  return zero ? kNoExponent : static_cast<int64>(a.e) + b.e;
}

// True if a bracket times a product is NaN. Zero times NaN is zero.
template <class Mantissa>
__device__ __forceinline__ bool is_nan(const Extended<Mantissa>& a, const Extended<Mantissa>& b) {
  const Mantissa m = a.m * b.m;
  return joint_exponent(a, b) != kNoExponent && m != m;
}

// Returns 2^by for |by| below 127 (1023 in double), 0 for lower `by`, and the largest power of two for higher ones.
__device__ __forceinline__ float power_of_two(int by, float) {
  return __uint_as_float(static_cast<unsigned>(min(max(by, -127), 127) + 127) << 23);
}
__device__ __forceinline__ double power_of_two(int by, double) {
  return __longlong_as_double(static_cast<int64>(min(max(by, -1023), 1023) + 1023) << 52);
}

// Returns a bracket times the other direction's product, over 2^exponent. Zero if either factor is zero, even if the
// other is NaN.
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

// Returns the largest exponent of the summands of Z at positions first, first + step, ...; kNoExponent if all are zero.
template <class Mantissa>
__device__ __forceinline__ int64 exponent_of_some(const StoredNumber<Mantissa>* alpha,
                                                  const StoredNumber<Mantissa>* beta, const int* labels, int size,
                                                  int first, int step) {
  int64 largest = kNoExponent;
  for (int j = first; j < size; j += step) {
    const MeetingTerms<Mantissa> terms = meeting_terms(alpha, beta, labels, size, j);
    largest = max(largest, max(joint_exponent(terms.of[0], terms.of[1]), joint_exponent(terms.of[2], terms.of[3])));
  }
  return largest;
}
// Returns the largest `value` of a warp to every lane. Precondition: all 32 lanes call it together.
__device__ __forceinline__ int64 largest_of_warp(int64 value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// Returns the largest exponent of Z's summands to every thread; kNoExponent if Z is zero. A maximum of integers does
// not depend on their order. Precondition: all threads of the block call it. Ends in a barrier.
template <class Mantissa>
__device__ __forceinline__ int64 largest_exponent(const StoredNumber<Mantissa>* alpha,
                                                  const StoredNumber<Mantissa>* beta, const int* labels, int size) {
  __shared__ int64 largest[32];
  const int64 of_warp = largest_of_warp(
      exponent_of_some(alpha, beta, labels, size, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)));
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = of_warp;
  __syncthreads();
  int64 all = largest[0];
  for (int w = 1; w < blockDim.x / 32; ++w) all = max(all, largest[w]);
  __syncthreads();
  return all;
}

// A label product in transit to the next band, in the form in which a column stores it (sequences.cuh).
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

// One thread's position in one direction: addresses, and the products of the preceding frame.
template <class Mantissa, class Storage>
struct Walk {
  using Number = Extended<Mantissa>;
  Number b, l;
  bool has_blank, has_label, skips;
  const Storage* x;  // element of the label at the first frame of this half
  const Storage* blank;
  int64 step;              // elements from a frame to the next one in this direction
  int blank_at, label_at;  // indices of the states in a row of the lattice
};

// Products of a position in a frame, as kSteps leaves them in the first half.
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

// Numbers of a frame that all lanes of a group read: the emission of the blank, and `passed`, the label product that
// the position before the group's first had in the preceding frame. The first frame of a chunk has no `passed` (see
// `carried` of walk_chunk).
template <class Mantissa>
struct alignas(4 * sizeof(Mantissa)) Common {
  StoredNumber<Mantissa> blank, passed;
};

// Shared memory of a block. In a double buffer, one half serves even chunks and the other odd ones.
template <class Mantissa>
struct Exchange {
  static constexpr int kChunk = kChunkFrames<Mantissa>;
  // An entry for each group, and one after the last group for what that group passes on. `passed` of the first group is
  // zero, unless it is received from the preceding band.
  Common<Mantissa> common[kMaxGroups + 1][2][kChunk + 1];
  int ordinary[kMaxGroups][2];  // nonzero if all emissions of the chunk are ordinary
};

// Loads both numbers as a pair, with `passed` as its label.
__device__ __forceinline__ Pair<float> load_common(const Common<float>* from) {
  const uint4 word = *reinterpret_cast<const uint4*>(from);
  return {{__uint_as_float(word.x), static_cast<int>(word.y)}, {__uint_as_float(word.z), static_cast<int>(word.w)}};
}
__device__ __forceinline__ Pair<double> load_common(const Common<double>* from) {
  return {load_number(&from->blank), load_number(&from->passed)};
}

// Shared memory of a group, by frame and lane. In a double buffer, one half serves even chunks and the other odd ones.
// Copies in flight, of elements and, in the second half, of the other direction's products, belong to the lane that has
// started them.
template <class Mantissa>
struct Group {
  static constexpr int kChunk = kChunkFrames<Mantissa>;
  using Word = typename PackedNumber<Mantissa>::Word;
  // The label's elements by frame; in the last row, the blank's element of frame lane % kChunk.
  struct alignas(16) Elements {
    Mantissa of[kChunk + 1][32];
  };
  struct alignas(16) Products {
    Word of[kChunk][32];
    int shared[32];
  };
  StoredNumber<Mantissa> emission[2][kChunk][32];
  Slot<Mantissa> slot[2][kChunk][32];
  Elements elements[kElementsAhead];
  Products products[2][kProductsAhead];  // blanks, then labels

  // Returns the memory of a group. In the first half, groups have no `products`.
  template <int kPhase>
  static __device__ __forceinline__ Group& of_block(int group) {
    extern __shared__ uint4 staged[];
    constexpr int kBytes = sizeof(Group) - (kPhase == 1 ? sizeof(Group::products) : 0);
    return *reinterpret_cast<Group*>(reinterpret_cast<char*>(staged) + group * kBytes);
  }
  // Addresses of the lane's entries for the first frame of a chunk. Those of the next frames are 32 entries apart.
  __device__ __forceinline__ StoredNumber<Mantissa>* emissions(int chunk) {
    return &emission[chunk & 1][0][threadIdx.x % 32];
  }
  __device__ __forceinline__ Slot<Mantissa>* slots(int chunk) {
    return &slot[chunk & 1][0][threadIdx.x % 32];
  }
  // In the second half, brackets take the place of slots: those of all blanks, then those of all labels, because
  // different warps may read the two.
  __device__ __forceinline__ StoredNumber<Mantissa>* brackets(int chunk, bool labels) {
    StoredNumber<Mantissa>* const all = reinterpret_cast<StoredNumber<Mantissa>*>(&slot[chunk & 1][0][0]);
    return all + (labels ? kChunk * 32 : 0) + threadIdx.x % 32;
  }
};

// Runs the recursion through a chunk, or through its first `count` frames if those are fewer.
//
// kOrdinary: the chunk has all its frames, and their emissions are ordinary. kLeaves: stores the states of each frame
// for the warps that read them, products in the first half and brackets in the second.
//
// `carried` is the label product of the position before the warp's first, in the frame before the chunk; it is updated
// for the next chunk. `next` receives the label products of the warp's last position, unless it is null.
template <int kPhase, bool kLeaves, bool kOrdinary, class Mantissa, class Storage>
__device__ __forceinline__ void walk_chunk(Walk<Mantissa, Storage>& walk, Group<Mantissa>& group, int chunk,
                                           const Common<Mantissa>* common, int count, Extended<Mantissa>& carried,
                                           Common<Mantissa>* next) {
  using Number = Extended<Mantissa>;
  constexpr int kChunk = kChunkFrames<Mantissa>;
  const int lane = threadIdx.x % 32;
  const StoredNumber<Mantissa>* const emissions = group.emissions(chunk);
  // A single select separates a shuffle from the sums: lane 0 takes the product from outside, and a lane that may not
  // skip takes zero.
  const bool takes_other = lane == 0 || !walk.skips, passes = lane == 31 && next != nullptr;
  auto step = [&](int f, const Number& outside, const Number& of_label, const Number& of_blank) {
    const Number inside = {__shfl_up_sync(0xffffffffu, walk.l.m, 1), __shfl_up_sync(0xffffffffu, walk.l.e, 1)};
    const Number other = walk.skips ? outside : zero_number<Mantissa>();
    const Number before = {lane == 0 ? outside.m : inside.m, lane == 0 ? outside.e : inside.e};
    const Number skipped = {takes_other ? other.m : inside.m, takes_other ? other.e : inside.e};
    const Number bracket_b = sum(walk.b, before), bracket_l = sum(walk.l, walk.b, skipped);
    if constexpr (kOrdinary) {
      walk.b = ordinary_product(bracket_b, of_blank);
      walk.l = ordinary_product(bracket_l, of_label);
    } else {
      walk.b = renormalised(product(bracket_b, of_blank));
      walk.l = renormalised(product(bracket_l, of_label));
    }
    if constexpr (kLeaves && kPhase == 1) store_pair(group.slots(chunk) + 32 * f, walk.b, walk.l);
    if constexpr (kLeaves && kPhase == 2) {
      store_number(group.brackets(chunk, false) + 32 * f, bracket_b.m, bracket_b.e);
      store_number(group.brackets(chunk, true) + 32 * f, bracket_l.m, bracket_l.e);
    }
    if (f < kChunk - 1 && passes) store_number(&next[f + 1].passed, walk.l.m, walk.l.e);
  };
  if constexpr (kOrdinary) {
    // Loads are issued kAhead frames before their step: the compiler would not move them above the stores of slots.
    // Without such stores, all loads precede the steps, except on GPUs without cp.async, where they would spill
    // registers.
    constexpr int kAhead = (kLeaves || !kHasCpAsync) && kChunk > 4 ? 4 : kChunk;
    Number of_label[kAhead], of_blank[kAhead], outside[kAhead];
    const auto load = [&](int f) {
      of_label[f % kAhead] = load_number(emissions + 32 * f);
      const Pair<Mantissa> both = load_common(common + f);
      of_blank[f % kAhead] = both.blank;
      outside[f % kAhead] = f == 0 ? carried : both.label;
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
      const Pair<Mantissa> both = load_common(common + f);
      const Number outside = {f == 0 ? carried.m : both.label.m, f == 0 ? carried.e : both.label.e};
      step(f, outside, load_number(emissions + 32 * f), both.blank);
    }
  }
  if (kOrdinary || count >= kChunk) {
    walk.b = renormalised(walk.b);
    walk.l = renormalised(walk.l);
    if (passes) store_number(&next[kChunk].passed, walk.l.m, walk.l.e);
    carried = load_number(&common[kChunk].passed);
  }
}

// Returns the address of row `i`, counted from `first`, of rows that are `step` bytes apart.
template <class T>
__device__ __forceinline__ T* row_at(T* first, int i, int step) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(first) + wide_product(i, step));
}

// Elements that the first half stores for the second: for each frame those of the labels by position, then the blank's.
// Neighbours in memory arrive together, whereas elements of many classes need a sector each. `label` and `blank` are
// the lane's addresses in the first frame of the half, or null.
template <class Mantissa>
struct Kept {
  Mantissa *label, *blank;
  int step;  // bytes from a frame to the next one
};

// Elements of a position in a half. Each lane copies its own elements to shared memory, and reads only those copies.
template <class Mantissa, class Storage>
struct Elements {
  static constexpr int kChunk = kChunkFrames<Mantissa>;
  using Ring = typename Group<Mantissa>::Elements;
  const Walk<Mantissa, Storage>& walk;
  Ring* ring;
  int steps;

  // Starts the copies of a chunk's elements, if there is such a chunk. Frames past the last one read the last one.
  __device__ __forceinline__ void copy(int chunk) const {
    const int lane = threadIdx.x % 32, first = chunk * kChunk, last = steps - 1;
    if (first <= last) {
      Ring& to = ring[chunk % kElementsAhead];
      cp_async_element(&to.of[kChunk][lane], walk.blank + min(first + lane % kChunk, last) * walk.step);
      if (first + kChunk <= steps) {
        const Storage* at = walk.x + first * walk.step;
#pragma unroll
        for (int f = 0; f < kChunk; ++f) {
          cp_async_element(&to.of[f][lane], at);
          at += walk.step;
        }
      } else {
#pragma unroll 1
        for (int f = 0; f < kChunk; ++f) cp_async_element(&to.of[f][lane], walk.x + min(first + f, last) * walk.step);
      }
    }
    cp_async_commit();
  }

  // Prefetches the elements of a chunk into L2. Preconditions: the first half has kept them; 16 bytes of memory are
  // allocated on both sides of them.
  __device__ __forceinline__ void prefetch(int chunk) const {
    const int first = chunk * kChunk, last = first + kChunk - 1;
    if (last >= steps) return;
    const bool up = walk.step > 0;
    const unsigned bytes = static_cast<unsigned>(kChunk * (up ? walk.step : -walk.step)) * sizeof(Storage);
    const unsigned long long end =
        reinterpret_cast<unsigned long long>(walk.blank + (up ? last : first) * walk.step) + sizeof(Storage);
    const unsigned long long at = end - bytes;
    const unsigned before = static_cast<unsigned>(at) & 15u;
    prefetch_l2(reinterpret_cast<const void*>(at - before), (before + bytes + 15u) & ~15u);
  }

  // Returns the element in row f of a chunk. It was copied from frame `t`, counted from `first`.
  __device__ __forceinline__ Mantissa element(const Ring& ring, int f, const Storage* first, int t) const {
    const char* at = reinterpret_cast<const char*>(&ring.of[f][threadIdx.x % 32]);
    if constexpr (sizeof(Storage) == 2) {
      // The copy is a whole word of 4 bytes; the low bits of the source address select the element in it.
      const unsigned index = static_cast<unsigned>(t) * static_cast<unsigned>(walk.step);
      at += (static_cast<unsigned>(reinterpret_cast<unsigned long long>(first)) + 2u * index) & 3u;
    }
    return widen<Mantissa>(*reinterpret_cast<const Storage*>(at));
  }

  // Computes the exponentials of a chunk whose copies have arrived, and leaves them in shared memory for kSteps.
  // Returns true if the lane has found a NaN. Precondition: the whole warp calls it.
  template <bool kKeeps>
  __device__ __forceinline__ bool emit(int chunk, StoredNumber<Mantissa>* emissions, Common<Mantissa>* common,
                                       int* is_chunk_ordinary, const Kept<Mantissa>& kept) const {
    const int lane = threadIdx.x % 32, first = chunk * kChunk, last = steps - 1;
    const Ring& from = ring[chunk % kElementsAhead];
    const Mantissa of_blank = element(from, kChunk, walk.blank, min(first + lane % kChunk, last));
    Mantissa of_label[kChunk];
#pragma unroll
    for (int f = 0; f < kChunk; ++f) of_label[f] = element(from, f, walk.x, min(first + f, last));
    if constexpr (kKeeps) {
      if (kept.label != nullptr) {
#pragma unroll
        for (int f = 0; f < kChunk; ++f) {
          if (first + f <= last) *row_at(kept.label, first + f, kept.step) = of_label[f];
        }
      }
      if (kept.blank != nullptr && first + lane <= last) *row_at(kept.blank, first + lane, kept.step) = of_blank;
    }
    bool odd = !is_ordinary(of_blank), nan = false;
#pragma unroll
    for (int f = 0; f < kChunk; ++f) odd = odd || !is_ordinary(of_label[f]);
    const bool ordinary = __any_sync(0xffffffffu, odd) == 0;
    Extended<Mantissa> y;
    if (ordinary) {
#pragma unroll
      for (int f = 0; f < kChunk; ++f) {
        y = ordinary_exponential(of_label[f]);
        store_number(emissions + 32 * f, walk.has_label ? y.m : Mantissa(0), y.e);
      }
      y = ordinary_exponential(of_blank);
    } else {
#pragma unroll 1
      for (int f = 0; f < kChunk; ++f) {
        const Mantissa x = element(from, f, walk.x, min(first + f, last));
        y = walk.has_label ? exponential(x) : zero_number<Mantissa>();
        nan = nan || y.m != y.m;
        store_number(emissions + 32 * f, y.m, y.e);
      }
      y = exponential(of_blank);
      nan = nan || y.m != y.m;
    }
    if (lane < kChunk) store_number(&common[lane].blank, y.m, y.e);
    if (lane == 0) *is_chunk_ordinary = ordinary;
    return nan;
  }
};

// Addresses of a position's states in the lattice, at the first frame of a half. Rows of successive frames are `step`
// bytes apart in words, and `own_step` bytes in exponents. Rows of shared exponents are `shared_step` bytes apart, from
// a chunk of the direction that stores the products to its next one.
//
// The last position has no label. A row of the lattice has a spare entry that serves as one, so lanes have both states
// or none.
template <class Mantissa>
struct States {
  using Word = typename PackedNumber<Mantissa>::Word;
  bool exist;
  Word *blank, *label;
  int *own_blank, *own_label;
  int *shared_blank, *shared_label;
  int step, own_step, shared_step;
};

// Stores the products of a chunk in the first half.
template <class Mantissa>
struct Products {
  using Word = typename PackedNumber<Mantissa>::Word;
  static constexpr int kChunk = kChunkFrames<Mantissa>;

  static __device__ __forceinline__ void store_state(Word* word, int* own_exponent, const Extended<Mantissa>& a,
                                                     int shared) {
    if (shared != kApart) {
      *word = pack(a, shared);
    } else {
      *word = bits_of(a.m);
      *own_exponent = a.e;
    }
  }

  // Stores the first `count` frames of a chunk, whether or not their states share exponents.
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

  // Stores a chunk. Precondition: the whole warp calls it.
  static __device__ __forceinline__ void store(const States<Mantissa>& states, const Slot<Mantissa>* slots, int chunk,
                                               int steps) {
    const int count = steps - chunk * kChunk;
    if (count < kChunk) {
      store_any(states, slots, chunk, count);
    } else {
      // All loads precede all stores: a load from shared memory queues behind stores that memory holds up. GPUs without
      // cp.async have too few registers for that.
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

// States of one kind, blanks or labels, of a position in the lattice; see States. `first` is the address of the whole
// row.
template <class Mantissa>
struct StatesOfKind {
  using Word = typename PackedNumber<Mantissa>::Word;
  bool exist;
  Word *first, *word;
  int *own, *shared;
  int step, own_step, shared_step;
};

// Products that the other direction has stored for a position's blanks or labels, which posteriors replace in the
// second half. As with elements, each lane copies its own.
//
// Frame s of this half is frame `steps` - 1 - s of the other direction's first half. Hence a chunk begins in one chunk
// of that direction and ends in the preceding one. `begins` and `shared` are the shared exponents of the two.
template <class Mantissa>
struct Posteriors {
  using Word = typename PackedNumber<Mantissa>::Word;
  using Ring = typename Group<Mantissa>::Products;
  static constexpr int kChunk = kChunkFrames<Mantissa>;
  StatesOfKind<Mantissa> states;
  Ring* ring;
  int steps, begins, shared;

  // Loads the shared exponent of the chunk in which the half begins. Precondition: `steps` is not 0.
  __device__ __forceinline__ void begin() {
    shared = states.exist ? *row_at(states.shared, (steps - 1) / kChunk, states.shared_step) : 0;
  }

  // Starts the copies of a chunk's products, if there is such a chunk, and of the shared exponent of the other
  // direction's chunk in which it ends.
  __device__ __forceinline__ void copy(int chunk) const {
    const int left = steps - chunk * kChunk;
    if (states.exist && left > 0) {
      const int lane = threadIdx.x % 32, ends = max((steps - 1) / kChunk - chunk - 1, 0);
      Ring& to = ring[chunk % kProductsAhead];
      cp_async_element(&to.shared[lane], row_at(states.shared, ends, states.shared_step));
      Word* const from = row_at(states.word, chunk * kChunk, states.step);
      if (left >= kChunk) {
#pragma unroll
        for (int f = 0; f < kChunk; ++f) cp_async_element(&to.of[f][lane], row_at(from, f, states.step));
      } else {
#pragma unroll 1
        for (int f = 0; f < left; ++f) cp_async_element(&to.of[f][lane], row_at(from, f, states.step));
      }
    }
  }

  // Advances to a chunk whose copies have arrived; chunks are visited in order. Returns true if none of the lane's
  // products in it has an exponent of its own.
  __device__ __forceinline__ bool go_on(int chunk) {
    begins = shared;
    if (states.exist) shared = arrived(chunk).shared[threadIdx.x % 32];
    return begins != kApart && shared != kApart;
  }
  __device__ __forceinline__ const Ring& arrived(int chunk) const {
    return ring[chunk % kProductsAhead];
  }
  // Returns the shared exponent of the product in frame f of the chunk.
  __device__ __forceinline__ int shared_of(int f) const {
    return f <= (steps - 1) % kChunk ? begins : shared;
  }

  // Stores the posteriors of a chunk, whatever its exponents. `exponent` is that of Z.
  __device__ __forceinline__ void store_any(const StoredNumber<Mantissa>* brackets, int chunk, int64 exponent) const {
#pragma unroll 1
    for (int f = 0; f < min(steps - chunk * kChunk, kChunk); ++f) {
      const int t = chunk * kChunk + f;
      *row_at(states.word, t, states.step) =
          bits_of(any_posterior(load_number(brackets + 32 * f), arrived(chunk).of[f][threadIdx.x % 32], shared_of(f),
                                row_at(states.own, t, states.own_step), exponent));
    }
  }

  static __device__ __forceinline__ Mantissa any_posterior(const Extended<Mantissa>& left, Word word, int shared,
                                                           const int* own_exponent, int64 exponent) {
    if (word == 0) return Mantissa(0);
    const Extended<Mantissa> other =
        shared == kApart ? Extended<Mantissa>{from_bits(word), *own_exponent} : unpack_nonzero<Mantissa>(word, shared);
    return posterior(left, other, exponent);
  }

  // Prefetches the words of a chunk, blanks and labels, into L2. Rows need not begin at multiples of 16 bytes: another
  // 16 bytes of memory follow the lattice.
  __device__ __forceinline__ void prefetch(int chunk) const {
    const int first = chunk * kChunk, last = first + kChunk - 1;
    if (last >= steps) return;
    // Rows of successive frames are contiguous.
    const unsigned long long at =
        reinterpret_cast<unsigned long long>(row_at(states.first, states.step > 0 ? first : last, states.step));
    const unsigned bytes = static_cast<unsigned>(kChunk * (states.step > 0 ? states.step : -states.step));
    const unsigned before = static_cast<unsigned>(at) & 15u;
    prefetch_l2(reinterpret_cast<const void*>(at - before), (before + bytes + 15u) & ~15u);
  }
};

// Receives `passes` label products of a chunk from the preceding band into `to`. `at` is the lane's address in the
// column. `words` holds what was last read there, and is replaced by what is stored a chunk later, whose load is still
// in flight on return. Precondition: the whole warp calls it.
template <class Mantissa>
__device__ __forceinline__ void receive_chunk(StoredNumber<Mantissa>* at, int passes, Words<Mantissa>& words,
                                              Common<Mantissa>* to) {
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
    const Extended<Mantissa> received = number_of(words);
    store_number(&to[lane + 1].passed, received.m, received.e);
    set_absent(at);
  }
  if (lane < kChunkFrames<Mantissa>) words = look(at + kChunkFrames<Mantissa>);
  __syncwarp();
}

// Returns the walk of position j, of the sample's `size` positions, from frame `first_frame` on. Its products are zero;
// the caller sets those that it continues from.
template <class Mantissa, class Storage>
__device__ __forceinline__ Walk<Mantissa, Storage> walk_of(const Sequences& shape, const Storage* x, int64 n,
                                                           const int* labels, int size, int j, bool backward,
                                                           int64 first_frame) {
  Walk<Mantissa, Storage> walk;
  walk.b = walk.l = zero_number<Mantissa>();
  walk.has_blank = j < size;
  walk.has_label = j < size - 1;
  // Indices of this position's states in a row.
  walk.blank_at = walk.has_blank ? backward ? size - 1 - j : j : 0;
  walk.label_at = walk.has_label ? size + (backward ? size - 2 - j : j) : 0;
  int64 label = shape.blank;
  walk.skips = false;
  if (walk.has_label) {
    label = labels[backward ? size - 2 - j : j];
    walk.skips = j > 0 && labels[backward ? size - 1 - j : j - 1] != label;
  }
  walk.x = walk.blank = nullptr;
  walk.step = 0;
  if (x != nullptr) {
    const Storage* const frame = x + shape.x_offset(n) + first_frame * shape.x_frame;
    walk.x = frame + label * shape.x_class;
    walk.blank = frame + shape.blank * shape.x_class;
    walk.step = backward ? -shape.x_frame : shape.x_frame;
  }
  return walk;
}

// One half of one direction, as the warps of a group see it. Label products arrive from the preceding band through
// column `from`, and go to the next band through column `to`; either may be null.
template <class Mantissa>
struct Half {
  Exchange<Mantissa>& shared;
  Group<Mantissa>& own;
  int steps, chunks, rounds;  // frames; chunks of the group, 0 if it has no positions; rounds of the block
  int group;                  // group of the warp
  bool is_last;               // true if nothing needs the group's label products
  StoredNumber<Mantissa>*from, *to;

  // Number of label products of a chunk that later positions need. In a chunk that is cut short, they do not need that
  // of the last frame, since the half has no frame after it.
  __device__ __forceinline__ int passes(int chunk) const {
    const int count = steps - chunk * kChunkFrames<Mantissa>;
    return count < kChunkFrames<Mantissa> ? count - 1 : kChunkFrames<Mantissa>;
  }

  // Calls `turn` for each chunk of the group, `delay` rounds after kSteps processes it. Precondition: all warps of the
  // block call it. Each round ends in a barrier.
  template <class Turn>
  __device__ __forceinline__ void take_turns(int delay, const Turn& turn) const {
    for (int r = -1; r < rounds; ++r) {
      const int chunk = r - group - delay;
      if (chunk >= 0 && chunk < chunks) turn(chunk);
      block_barrier();
    }
  }
};

// Work of kEmits in a half. Returns true if the lane has found a NaN. `prefetches`: the warp prefetches kept elements.
template <bool kKeeps, class Mantissa, class Storage>
__device__ __forceinline__ bool emit_chunks(const Half<Mantissa>& half, const Walk<Mantissa, Storage>& walk,
                                            const Kept<Mantissa>& kept, bool prefetches) {
  constexpr int kChunk = kChunkFrames<Mantissa>;
  const int group = half.group, lane = threadIdx.x % 32;
  const Elements<Mantissa, Storage> elements = {walk, half.own.elements, half.steps};
  Words<Mantissa> words = {};
  if (half.chunks > 0) {
    for (int i = 0; i < kElementsAhead; ++i) elements.copy(i);
    if (half.from != nullptr && lane < kChunk) words = look(half.from + lane);
  }
  bool nan = false;
  half.take_turns(-1, [&](int chunk) {
    const int buffer = chunk & 1;
    // Loads of label products have one round to arrive.
    if (half.from != nullptr) {
      receive_chunk(half.from + chunk * kChunk + lane, half.passes(chunk), words, half.shared.common[group][buffer]);
    }
    cp_async_wait_groups<kElementsAhead - 1>();
    nan = elements.template emit<kKeeps>(chunk, half.own.emissions(chunk), half.shared.common[group][buffer],
                                         &half.shared.ordinary[group][buffer], kept) ||
          nan;
    // Issued after all other accesses to shared memory, which would queue behind these copies.
    elements.copy(chunk + kElementsAhead);
    if (prefetches && lane == 0) elements.prefetch(chunk + kPrefetched);
  });
  return nan;
}

// Sends the label products of a chunk to the next band, if there is one.
template <class Mantissa>
__device__ __forceinline__ void send_chunk(const Half<Mantissa>& half, int chunk) {
  const int lane = threadIdx.x % 32;
  if (half.to == nullptr || lane >= half.passes(chunk)) return;
  send(half.to + chunk * kChunkFrames<Mantissa> + lane,
       load_number(&half.shared.common[half.group + 1][chunk & 1][lane + 1].passed));
}

// Work of kStoresStates in the first half: stores products if kStores, and sends label products.
template <bool kStores, class Mantissa>
__device__ __forceinline__ void store_products(const Half<Mantissa>& half, const States<Mantissa>& states) {
  half.take_turns(1, [&](int chunk) {
    send_chunk(half, chunk);
    if constexpr (kStores) Products<Mantissa>::store(states, half.own.slots(chunk), chunk, half.steps);
  });
}

// Work of kStoresStates and kStoresLabels in the second half: stores the posteriors of kKinds kinds of states, unless Z
// is zero. The kinds are blanks and then labels, or labels alone if `labels`. `exponent` is that of Z. `plain`:
// exponents of posteriors fit 32 bits, and no state is NaN. `prefetches`: the warp prefetches words for all groups and
// bands.
template <int kKinds, class Mantissa>
__device__ __forceinline__ void store_posteriors(const Half<Mantissa>& half, Posteriors<Mantissa> (&posteriors)[kKinds],
                                                 bool labels, int64 exponent, bool plain, bool prefetches) {
  constexpr int kChunk = kChunkFrames<Mantissa>;
  const bool stores = half.chunks > 0 && exponent != kNoExponent;
  const int lane = threadIdx.x % 32;
  const auto copy = [&](int chunk) {
#pragma unroll
    for (int i = 0; i < kKinds; ++i) posteriors[i].copy(chunk);
    cp_async_commit();
  };
  if (stores) {
#pragma unroll
    for (int i = 0; i < kKinds; ++i) posteriors[i].begin();
    for (int chunk = 0; chunk < kProductsAhead; ++chunk) copy(chunk);
  }
  half.take_turns(1, [&](int chunk) {
    if (!labels) send_chunk(half, chunk);
    if (!stores) return;
    cp_async_wait_groups<kProductsAhead - 1>();
    bool fast = plain && chunk * kChunk + kChunk <= half.steps;
    const StoredNumber<Mantissa>* brackets[kKinds];
#pragma unroll
    for (int i = 0; i < kKinds; ++i) {
      fast = posteriors[i].go_on(chunk) && fast;
      brackets[i] = half.own.brackets(chunk, labels || i > 0);
    }
    if (__all_sync(0xffffffffu, fast) != 0) {
      // Loads precede stores, as in Products::store.
      constexpr int kTogether = kKinds == 1 ? kChunk / 2 : kChunk;
#pragma unroll
      for (int first = 0; posteriors[0].states.exist && first < kChunk; first += kTogether) {
        Extended<Mantissa> bracket[kTogether][kKinds];
        typename Posteriors<Mantissa>::Word word[kTogether][kKinds];
#pragma unroll
        for (int f = 0; f < kTogether; ++f) {
#pragma unroll
          for (int i = 0; i < kKinds; ++i) {
            bracket[f][i] = load_number(brackets[i] + 32 * (first + f));
            word[f][i] = posteriors[i].arrived(chunk).of[first + f][lane];
          }
        }
#pragma unroll
        for (int f = 0; f < kTogether; ++f) {
#pragma unroll
          for (int i = 0; i < kKinds; ++i) {
            const Posteriors<Mantissa>& of_kind = posteriors[i];
            const int by = of_kind.shared_of(first + f) - static_cast<int>(exponent) + bracket[f][i].e;
            *row_at(of_kind.states.word, chunk * kChunk + first + f, of_kind.states.step) =
                bits_of(bracket[f][i].m * scaled_word(word[f][i], by, Mantissa(0)));
          }
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kKinds; ++i) {
        if (posteriors[i].states.exist) posteriors[i].store_any(brackets[i], chunk, exponent);
      }
    }
    copy(chunk + kProductsAhead);
    if (prefetches && lane == 0) posteriors[0].prefetch(chunk + kPrefetched);
  });
}

// Work of kSteps in a half. `carried` is the label product of the position before the group's first, in the frame
// before the half.
template <int kPhase, bool kLeaves, class Mantissa, class Storage>
__device__ __forceinline__ void step_chunks(const Half<Mantissa>& half, Walk<Mantissa, Storage>& walk,
                                            Extended<Mantissa> carried) {
  constexpr int kChunk = kChunkFrames<Mantissa>;
  const int group = half.group;
  half.take_turns(0, [&](int chunk) {
    const int buffer = chunk & 1, count = half.steps - chunk * kChunk;
    const Common<Mantissa>* const common = half.shared.common[group][buffer];
    Common<Mantissa>* const next = half.is_last ? nullptr : half.shared.common[group + 1][buffer];
    if (half.shared.ordinary[group][buffer] != 0 && count >= kChunk) {
      walk_chunk<kPhase, kLeaves, true>(walk, half.own, chunk, common, count, carried, next);
    } else {
      walk_chunk<kPhase, kLeaves, false>(walk, half.own, chunk, common, count, carried, next);
    }
  });
}

// Processes one half of one direction of a sample with labels `own`, over one band of positions. This is walk `order`
// of the launch; it waits only for walks of lower numbers.
//
// Preconditions: blockDim.x is kRoles times kBand, or kRoles times a multiple of 32 that is at least the number of
// positions of any sample with an alignment; dynamic shared memory has a Group for every 32 of these positions; `order`
// is below 2 * samples * bands; kPhase 2 runs after all blocks of kPhase 1. `lattice` and `exponents` are read and
// written unless kPhase is 1 and kStores is false.
template <int kPhase, bool kStores, int kRoles, bool kKeeps, class Mantissa, class Storage>
__device__ __forceinline__ void walk_half(const Sequences& shape, const Storage* x, const Sample& sample,
                                          const int* own, Mantissa* lattice, int* exponents,
                                          StoredNumber<Mantissa>* meeting, StoredNumber<Mantissa>* columns,
                                          unsigned* broken, unsigned order) {
  using Number = Extended<Mantissa>;
  constexpr int kChunk = kChunkFrames<Mantissa>;
  constexpr bool kLeaves = kPhase == 2 || kStores;
  __shared__ Exchange<Mantissa> shared;
  const unsigned walks = static_cast<unsigned>(2 * shape.samples);
  const int64 which = order % walks, band = order / walks, n = which / 2;
  const bool backward = which % 2 != 0;
  if (sample.outcome != kRuns) return;
  const int size = sample.labels + 1, lane = threadIdx.x % 32;
  // The shuffle tells the compiler that the value is uniform over a warp. Otherwise it splits each step where lanes
  // might diverge.
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / 32), 0);
  const int launched = static_cast<int>(blockDim.x) / (32 * kRoles), role = warp / launched;
  const int group = warp % launched;
  const int first = static_cast<int>(band) * kBand, j = first + 32 * group + lane;
  if (first >= size) return;
  const int half = sample.frames / 2;
  const int steps_before = kPhase == 1 ? 0 : backward ? sample.frames - half : half;
  const int steps = (kPhase == 1) == backward ? sample.frames - half : half;
  StoredNumber<Mantissa>* const alpha = meeting_row(meeting, sample, shape.positions, 0);
  StoredNumber<Mantissa>* const beta = meeting_row(meeting, sample, shape.positions, 1);
  StoredNumber<Mantissa>* const last = backward ? beta : alpha;
  const int64 first_frame = backward ? sample.frames - 1 - steps_before : steps_before;
  Walk<Mantissa, Storage> walk = walk_of<Mantissa>(shape, x, n, own, size, j, backward, first_frame);
  Kept<Mantissa> kept = {};
  if constexpr (kKeeps) {
    Mantissa* const row =
        kept_elements<Mantissa>(exponents, shape) + sample.first * shape.frames + wide_product(first_frame, size);
    Mantissa* const blank = row + size - 1;
    Mantissa* const label = walk.has_label ? row + (backward ? size - 2 - j : j) : blank;
    if constexpr (kPhase == 1) {
      const int step = size * static_cast<int>(sizeof(Mantissa));
      kept = {walk.has_label ? label : nullptr, j < kChunk ? blank : nullptr, backward ? -step : step};
    } else {
      walk.x = label;
      walk.blank = blank;
      walk.step = backward ? -size : size;
    }
  }
  Number carried = zero_number<Mantissa>();
  if constexpr (kPhase == 1) {
    if (j == 0) walk.b = {Mantissa(1), 0};
  } else {
    if (walk.has_blank) walk.b = load_number(last + walk.blank_at);
    if (walk.has_label) walk.l = load_number(last + walk.label_at);
    if (lane == 0 && j > 0 && j < size) carried = load_number(last + size + (backward ? size - 1 - j : j - 1));
  }
  for (int i = threadIdx.x; i < 2 * kChunk; i += blockDim.x) {
    store_number(&shared.common[0][i / kChunk][i % kChunk + 1].passed, Mantissa(0), kZero);
  }
  const int groups = min((size - first + 31) / 32, kMaxGroups), chunks = (steps + kChunk - 1) / kChunk;
  // One more round stores states and sends products of the last chunk.
  const int rounds = chunks + groups - 1 + (kLeaves || shape.bands > 1);
  StoredNumber<Mantissa>* const column = columns + (which * (shape.bands - 1) + band) * shape.column;
  StoredNumber<Mantissa>* const from = band > 0 && group == 0 ? column - shape.column : nullptr;
  StoredNumber<Mantissa>* const to = size - first > kBand && group == kMaxGroups - 1 ? column : nullptr;
  const Half<Mantissa> part = {shared,
                               Group<Mantissa>::template of_block<kPhase>(group),
                               steps,
                               group < groups ? chunks : 0,
                               rounds,
                               group,
                               group == groups - 1 && to == nullptr,
                               from,
                               to};
  if (role == kEmits) {
    const bool nan = emit_chunks < kKeeps && kPhase == 1 > (part, walk, kept, kKeeps && kPhase == 2 && j - lane == 0);
    if (kPhase == 1 && nan) atomicOr(broken + (backward ? kByBeta : kByAlpha) * shape.samples + n, kNanEmission);
    return;
  }
  if (role >= kStoresStates) {
    const bool labels = role == kStoresLabels;
    const Lattice<Mantissa> all(lattice, exponents, shape);
    const int64 row = all.row(sample, shape.frames, first_frame);
    typename Lattice<Mantissa>::Word* const words = all.words + row;
    int* const own_exponents = all.exponents + row;
    int* const shared_exponents = all.first_shared(sample, shape.frames, backward == (kPhase == 1));
    const int of_row = 2 * size, signed_row = backward ? -of_row : of_row;
    const int label_at = walk.has_label ? walk.label_at : of_row - 1;
    const int step = signed_row * static_cast<int>(sizeof(Mantissa));
    const int own_step = signed_row * static_cast<int>(sizeof(int));
    const int shared_step = of_row * static_cast<int>(sizeof(int));
    if constexpr (kPhase == 1) {
      const States<Mantissa> states = {walk.has_blank,
                                       words + walk.blank_at,
                                       words + label_at,
                                       own_exponents + walk.blank_at,
                                       own_exponents + label_at,
                                       shared_exponents + walk.blank_at,
                                       shared_exponents + label_at,
                                       step,
                                       own_step,
                                       shared_step};
      store_products<kLeaves>(part, states);
    } else {
      constexpr int kKinds = kRoles == 4 ? 1 : 2;
      Posteriors<Mantissa> posteriors[kKinds];
#pragma unroll
      for (int i = 0; i < kKinds; ++i) {
        const int at = labels || i > 0 ? label_at : walk.blank_at;
        posteriors[i] = {
            {walk.has_blank, words, words + at, own_exponents + at, shared_exponents + at, step, own_step, shared_step},
            part.own.products[labels || i > 0],
            steps,
            0,
            0};
      }
      // Each storing warp computes the exponent of Z by itself, during the first rounds of the other warps.
      const int64 exponent = largest_of_warp(exponent_of_some(alpha, beta, own, size, lane, 32));
      const bool may_be_nan = (broken[kByAlpha * shape.samples + n] | broken[kByBeta * shape.samples + n]) != 0u;
      if (which % 2 == 0 && band == 0 && group == 0 && !labels) {
        bool nan = false;
        for (int i = lane; may_be_nan && i < size; i += 32) {
          const MeetingTerms<Mantissa> terms = meeting_terms(alpha, beta, own, size, i);
          nan = nan || is_nan(terms.of[0], terms.of[1]) || is_nan(terms.of[2], terms.of[3]);
        }
        nan = __any_sync(0xffffffffu, nan) != 0;
        if (lane == 0 && exponent == kNoExponent) {
          broken[kByMeeting * shape.samples + n] = kNoAlignment;
        } else if (lane == 0 && nan) {
          broken[kByMeeting * shape.samples + n] = kNanLoss;
        }
      }
      const int64 of_frame = 2 * shape.positions * static_cast<int64>(sizeof(Mantissa));
      const bool prefetches = band == 0 && group == 0 && !labels && of_frame * shape.frames > kPrefetchedLattice &&
                              of_frame * (2 * kChunk * kPrefetched) <= kMostOnTheirWay;
      const bool plain = exponent >= kLowest && exponent <= -kLowest && !may_be_nan;
      store_posteriors(part, posteriors, labels, exponent, plain, prefetches);
    }
    return;
  }
  step_chunks<kPhase, kLeaves>(part, walk, carried);
  if constexpr (kPhase == 1) {
    walk.b = renormalised(walk.b);
    walk.l = renormalised(walk.l);
    if (walk.has_blank) store_number(last + walk.blank_at, walk.b.m, walk.b.e);
    if (walk.has_label) store_number(last + walk.label_at, walk.l.m, walk.l.e);
  }
}

// Returns the sample of walk `order`.
__device__ __forceinline__ int64 sample_of_walk(const Sequences& shape, unsigned order) {
  return order % static_cast<unsigned>(2 * shape.samples) / 2u;
}

// Runs walk_half for a sample that an earlier launch has prepared.
template <int kPhase, bool kStores, int kRoles, bool kKeeps, class Mantissa, class Storage>
__device__ __forceinline__ void walk_prepared(const Sequences& shape, const Storage* x, const Buffers<Mantissa>& at,
                                              Mantissa* lattice, int* exponents, unsigned order) {
  const Sample sample = at.samples[sample_of_walk(shape, order)];
  walk_half<kPhase, kStores, kRoles, kKeeps>(shape, x, sample, at.labels + sample.first, lattice, exponents, at.meeting,
                                             at.columns, at.broken, order);
}

// Runs the first half of a sample that no launch has prepared: each of its two blocks examines the sample for itself,
// and alpha's block stores the result for later launches. Preconditions: targets are not concatenated; one block
// processes a direction of a sample.
template <bool kStores, int kRoles, bool kKeeps, class Mantissa, class Storage>
__device__ __forceinline__ void walk_given(const Sequences& shape, const GivenArrays& arrays, const double* expected,
                                           SequenceStatus* status, const Storage* x, const Buffers<Mantissa>& at,
                                           Mantissa* lattice, int* exponents, unsigned order) {
  __shared__ int labels[kBand];
  const int64 n = sample_of_walk(shape, order);
  const bool tells = order % 2 == 0;
  if (threadIdx.x == 0) {
    at.broken[(tells ? kByAlpha : kByBeta) * shape.samples + n] = 0;
    if (tells) at.broken[kByMeeting * shape.samples + n] = at.broken[kByLogits * shape.samples + n] = 0;
  }
  const Sample sample = examined_sample(shape, arrays, n, 0, false, 0, tells ? at.labels : nullptr, labels, kBand,
                                        tells ? status : nullptr);
  // Done by a storing warp, which no other warp waits for.
  if (tells && threadIdx.x == blockDim.x - 1) {
    at.samples[n] = sample;
    if (order == 0) begin_call(expected, at.used, at.ticket);
  }
  walk_half<1, kStores, kRoles, kKeeps>(shape, x, sample, labels, lattice, exponents, at.meeting, at.columns, at.broken,
                                        order);
}
