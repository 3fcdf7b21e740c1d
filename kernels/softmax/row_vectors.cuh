// Splits a contiguous row into aligned vectors and edge elements at its two ends.
//
//   row = head elements (fewer than kVecSize), vectors of kVecSize elements, tail elements (fewer than kVecSize)
//
// Vectors are aligned even if the row is not, so a row of an odd length is read by full-width loads. Each thread of a
// group processes at most one edge element. Precondition: a group has at least 2 (kVecSize - 1) threads, unless a
// reader says otherwise. The file also has operations on packs: copies to shared memory, conversion to arithmetic
// types, maxima.
#pragma once
#include "core/scalars.cuh"
#include "softmax/row_ptx.cuh"

// Index: int64, or int for rows that are known to be short.
template <class Storage, int kVecSize_, class Index = int64>
struct RowVectors {
  static constexpr int kVecSize = kVecSize_;
  int64 offset;  // of the row's first element
  Index vectors;
  int head;  // elements before the first vector
  int tail;  // elements after the last vector

  // Precondition: the row is read through `pointer`, whose address determines where vectors begin.
  __device__ __forceinline__ RowVectors(const Storage* pointer, int64 offset, Index classes) : offset(offset) {
    const unsigned address = static_cast<unsigned>(reinterpret_cast<unsigned long long>(pointer + offset));
    const int misaligned = static_cast<int>(address % (sizeof(Storage) * kVecSize) / sizeof(Storage));
    head = misaligned == 0 ? 0 : kVecSize - misaligned;
    if (head > classes) head = static_cast<int>(classes);
    vectors = (classes - head) / kVecSize;
    tail = static_cast<int>(classes - head - vectors * kVecSize);
  }

  // Returns the class of the vector's first element.
  __device__ __forceinline__ Index first(Index vector) const {
    return head + vector * kVecSize;
  }
  // Returns the class of edge element number `thread`, or -1 if there is none. The thread of that rank processes it.
  __device__ __forceinline__ Index edge_class(int thread) const {
    return thread < head ? thread : thread < head + tail ? first(vectors) + (thread - head) : -1;
  }
};

// Loads a pack word by word. By default the compiler reads element by element, 2 bytes at a time.
template <class P>
__device__ __forceinline__ P load_words(const P* at) {
  P pack;
#pragma unroll
  for (int i = 0; i < P::kWords; ++i) {
    reinterpret_cast<typename P::Word*>(&pack)[i] = reinterpret_cast<const typename P::Word*>(at)[i];
  }
  return pack;
}

// Returns the 16 bytes that start `bytes` bytes after the start of two adjacent packs. Preconditions: `bytes` is less
// than 16 and a multiple of kUnit; kUnit is 2, 4 or 8.
template <int kUnit = 2, class P>
__device__ __forceinline__ P cut_out(const P (&both)[2], unsigned bytes) {
  static_assert(sizeof(P) == 16, "vectors of 16 bytes");
  P vector;
  unsigned words[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) words[i] = reinterpret_cast<const unsigned*>(both)[i];
#pragma unroll
  for (int i = 0; i < 6; ++i) words[i] = bytes & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < 5 && kUnit <= 4; ++i) words[i] = bytes & 4 ? words[i + 1] : words[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned long long pair = static_cast<unsigned long long>(words[i + 1]) << 32 | words[i];
    reinterpret_cast<unsigned*>(&vector)[i] = kUnit < 4 ? static_cast<unsigned>(pair >> (8 * (bytes & 2))) : words[i];
  }
  return vector;
}

// Reads a row in the vectors of its gradient row, which are misaligned in the row itself. Elements of at least 4 bytes
// are copied one by one with cp.async, bypassing registers. Vectors of smaller elements are cut out of the two aligned
// packs that they overlap; neighbouring threads read the second pack too, so it comes from L1. kGathered: classes are
// `stride` elements apart.
template <class Storage, int kVecSize, bool kGathered>
struct ShiftedVectors {
  using P = Pack<Storage, kVecSize>;
  static_assert(sizeof(P) == 16, "vectors of 16 bytes");
  static constexpr bool kCopies = kHasCpAsync && sizeof(Storage) >= 4;
  const Storage* row;
  int64 stride;
  int classes;
  int shift;  // elements from the last aligned address to each vector

  // Precondition: a vector starts at class `head`.
  __device__ __forceinline__ ShiftedVectors(const Storage* row, int64 stride, int classes, int head)
      : row(row), stride(stride), classes(classes) {
    const unsigned address = static_cast<unsigned>(reinterpret_cast<unsigned long long>(row + head));
    shift = static_cast<int>(address % sizeof(P) / sizeof(Storage));
  }
  // Starts a copy of the vector that starts at class `first`. Precondition: kCopies.
  __device__ __forceinline__ void copy(int first, P* to) const {
    const int64 step = kGathered ? stride : 1;
    const Storage* from = row + first * step;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i, from += step) {
      cp_async(reinterpret_cast<Pack<Storage, 1>*>(to) + i, reinterpret_cast<const Pack<Storage, 1>*>(from));
    }
  }
  // Returns the vector that starts at class `first`.
  __device__ __forceinline__ P load(int first) const {
    const int from = first - shift, end = from + (shift == 0 ? kVecSize : 2 * kVecSize);
    P vector;
    if (kGathered || from < 0 || end > classes) {
      // At the ends of a row, aligned packs would extend beyond it.
      const int64 step = kGathered ? stride : 1;
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) vector.element[i] = row[(first + i) * step];
      return vector;
    }
    const P* const at = reinterpret_cast<const P*>(row + from);
    const P both[2] = {load_words(at), load_words(at + (shift == 0 ? 0 : 1))};
    return cut_out(both, static_cast<unsigned>(shift * static_cast<int>(sizeof(Storage))));
  }
};

// Stores a pack word by word.
template <class P>
__device__ __forceinline__ void store_words(P* at, const P& pack) {
#pragma unroll
  for (int i = 0; i < P::kWords; ++i) {
    reinterpret_cast<typename P::Word*>(at)[i] = reinterpret_cast<const typename P::Word*>(&pack)[i];
  }
}

// Returns the pack, opaque to the compiler, which otherwise keeps every form that the pack was converted to.
template <class P>
__device__ __forceinline__ P opaque_pack(P pack) {
  if constexpr (sizeof(P) % 4 == 0) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(P) / 4); ++i) {
      unsigned& word = reinterpret_cast<unsigned*>(&pack)[i];
      word = opaque(word);
    }
  }
  return pack;
}

// Returns a pack with all elements equal to x, built word by word.
template <class P, class Storage>
__device__ __forceinline__ P pack_of_words(Storage x) {
  Pack<Storage, 4 / sizeof(Storage)> word;
#pragma unroll
  for (int i = 0; i < static_cast<int>(4 / sizeof(Storage)); ++i) word.element[i] = x;
  P pack;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(P) / 4); ++i) {
    reinterpret_cast<unsigned*>(&pack)[i] = reinterpret_cast<const unsigned&>(word);
  }
  return pack;
}

// Starts an asynchronous copy of a pack to shared memory (a plain copy below 4 bytes or without cp.async). The calling
// thread may read it after cp_async_wait_all(). kLast: as in cp_async_bytes.
template <bool kLast = false, class P>
__device__ __forceinline__ void cp_async(P* to, const P* from) {
  if constexpr (kHasCpAsync && sizeof(P) >= 4) {
    cp_async_bytes<sizeof(P), kLast>(to, from);
  } else {
#pragma unroll
    for (int i = 0; i < P::kWords; ++i) {
      reinterpret_cast<typename P::Word*>(to)[i] = __ldcs(reinterpret_cast<const typename P::Word*>(from) + i);
    }
  }
}

// Copies `count` packs: sources are `from_step` elements apart, destinations `to_step` packs. Packs that are too small
// for asynchronous copies go through registers in batches, so that their loads overlap: if each pack were stored at
// once, its store would wait for this one load.
template <class P, class Storage, class Index>
__device__ __forceinline__ void cp_async_strided(P* to, int to_step, const Storage* from, int64 from_step,
                                                 Index count) {
  if constexpr (kHasCpAsync && sizeof(P) >= 4) {
#pragma unroll 4
    for (Index i = 0; i < count; ++i, from += from_step) {
      cp_async(to + i * to_step, reinterpret_cast<const P*>(from));
    }
  } else {
    constexpr int kBatch = 16;
#pragma unroll 1
    for (Index first = 0; first < count; first += kBatch) {
      P packs[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k, from += from_step) {
        if (first + k < count) cp_async(packs + k, reinterpret_cast<const P*>(from));
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (first + k < count) to[(first + k) * to_step] = packs[k];
      }
    }
  }
}

// Converts a pack to the arithmetic type. Each bfloat16 of a word takes one instruction; via two 16-bit registers the
// compiler needs more.
template <class Compute, class Storage, int kVecSize>
__device__ __forceinline__ void unpack(const Pack<Storage, kVecSize>& x, Compute (&y)[kVecSize]) {
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) y[i] = widen<Compute>(x.element[i]);
}
template <int kVecSize>
__device__ __forceinline__ void unpack(const Pack<bfloat16_t, kVecSize>& x, float (&y)[kVecSize]) {
  if constexpr (kVecSize % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kVecSize; i += 2) {
      const unsigned word = reinterpret_cast<const unsigned*>(&x)[i / 2];
      y[i] = __uint_as_float(word << 16);
      y[i + 1] = __uint_as_float(word & 0xffff0000u);
    }
  } else {
    y[0] = to_float(x.element[0]);
  }
}

// Returns the sum of an array, added as a tree; overwrites x.
template <class Compute, int kVecSize>
__device__ __forceinline__ Compute sum_elements(Compute (&x)[kVecSize]) {
#pragma unroll
  for (int span = 1; span < kVecSize; span *= 2) {
#pragma unroll
    for (int i = 0; i + span < kVecSize; i += 2 * span) x[i] += x[i + span];
  }
  return x[0];
}

// Running maximum over packs, element by element. RunningMax compares 16-bit types in pairs instead (PackedPairMax).
template <class Compute, class Storage, int kVecSize>
struct ElementwiseMax {
  Compute value;

  __device__ __forceinline__ ElementwiseMax() : value(-scalar_infinity(Compute())) {
  }
  __device__ __forceinline__ void add(const Pack<Storage, kVecSize>& x) {
    Compute y[kVecSize];
    unpack(x, y);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) value = max_ignoring_nan(value, y[i]);
  }
  __device__ __forceinline__ Compute get() const {
    return value;
  }
};

__device__ __forceinline__ unsigned max_pair(unsigned x, unsigned y, half_t) {
  return max_half_pair(x, y);
}
__device__ __forceinline__ unsigned max_pair(unsigned x, unsigned y, bfloat16_t) {
  return max_bfloat16_pair(x, y);
}

template <class Storage, int kVecSize>
struct PackedPairMax {
  unsigned value;

  __device__ __forceinline__ PackedPairMax() {
    const unsigned lowest = Narrow<Storage>::from(-scalar_infinity(0.0f)).bits;
    value = lowest << 16 | lowest;
  }
  __device__ __forceinline__ void add(const Pack<Storage, kVecSize>& x) {
#pragma unroll
    for (int i = 0; i < kVecSize / 2; ++i) {
      value = max_pair(value, reinterpret_cast<const unsigned*>(&x)[i], Storage{});
    }
  }
  // Returns the maximum of the even (i = 0) or odd (i = 1) elements.
  __device__ __forceinline__ float half(int i) const {
    Pack<Storage, 2> pair;
    reinterpret_cast<unsigned&>(pair) = value;
    return widen<float>(pair.element[i]);
  }
  __device__ __forceinline__ float get() const {
    return max_ignoring_nan(half(0), half(1));
  }
};

template <bool kPairs, class Compute, class Storage, int kVecSize>
struct ChooseRunningMax {
  using type = ElementwiseMax<Compute, Storage, kVecSize>;
};
template <class Compute, class Storage, int kVecSize>
struct ChooseRunningMax<true, Compute, Storage, kVecSize> {
  using type = PackedPairMax<Storage, kVecSize>;
};
template <class Compute, class Storage, int kVecSize>
using RunningMax =
    typename ChooseRunningMax<sizeof(Storage) == 2 && sizeof(Compute) == 4 && kVecSize % 2 == 0 && kHasPairMax, Compute,
                              Storage, kVecSize>::type;
