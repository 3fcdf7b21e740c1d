// Storage types, their arithmetic types, and packs: how numbers enter and leave registers.
//
// Half, bfloat16 and float compute in float, double computes in double; no arithmetic happens in 16 bits. The file
// needs no CUDA header on purpose: CuPy wheels carry no cuda_bf16.h (and since 14.1 no cuda_fp16.h). Half and bfloat16
// are therefore 16-bit words, and each conversion is a single PTX instruction (ptx.cuh).
#pragma once
#include "core/ptx.cuh"

typedef long long int64;

// Type of an operand, a gradient or an option that a kernel does not have.
struct Absent {};

struct half_t {
  unsigned short bits;
};
struct bfloat16_t {
  unsigned short bits;
};

template <bool kCondition, class A, class B>
struct ChosenType {
  using type = A;
};
template <class A, class B>
struct ChosenType<false, A, B> {
  using type = B;
};
// A if the condition is true, B otherwise.
template <bool kCondition, class A, class B>
using Choose = typename ChosenType<kCondition, A, B>::type;

// ---------------------------------------------------------------------------------------------------------------------
// Scalars: storage -> arithmetic

__device__ __forceinline__ float to_float(half_t x) {
  return half_bits_to_float(x.bits);
}
__device__ __forceinline__ float to_float(bfloat16_t x) {
  return __uint_as_float(static_cast<unsigned>(x.bits) << 16);
}

template <class Compute>
__device__ __forceinline__ Compute widen(half_t x) {
  return static_cast<Compute>(to_float(x));
}
template <class Compute>
__device__ __forceinline__ Compute widen(bfloat16_t x) {
  return static_cast<Compute>(to_float(x));
}
// For float, double and the integer types of labels.
template <class Compute, class Storage>
__device__ __forceinline__ Compute widen(Storage x) {
  return static_cast<Compute>(x);
}

// An element of several components, such as a box. It is loaded, stored and laid out as a whole.
template <class Scalar, int kCount>
struct Components {
  Scalar component[kCount];

  Components() = default;
  // Converts each component: `widen` calls it.
  template <class Narrower>
  __device__ __forceinline__ explicit Components(const Components<Narrower, kCount>& x) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) component[i] = widen<Scalar>(x.component[i]);
  }
};

// The arithmetic type of a stored element, and the number of its components.
template <class Storage, class Compute>
struct ElementOf {
  using Wide = Compute;
  static constexpr int kComponents = 1;
};
template <class Scalar, int kCount, class Compute>
struct ElementOf<Components<Scalar, kCount>, Compute> {
  using Wide = Components<Compute, kCount>;
  static constexpr int kComponents = kCount;
};

// ---------------------------------------------------------------------------------------------------------------------
// Scalars: arithmetic -> storage, rounded once to nearest even

// Rounds two floats to two 16-bit words in one register, `low` in the lower half.
__device__ __forceinline__ unsigned narrow_pair(float low, float high, half_t) {
  return floats_to_half_pair(low, high);
}

__device__ __forceinline__ unsigned bfloat16_bits(float x) {
  // Rounds to nearest even by integer arithmetic. A NaN keeps its sign and becomes quiet; rounding could turn it into
  // inf.
  const unsigned bits = __float_as_uint(x);
  if (x != x) return (bits >> 16) | 0x40u;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

__device__ __forceinline__ unsigned narrow_pair(float low, float high, bfloat16_t) {
#if __CUDA_ARCH__ >= 800
  return floats_to_bfloat16_pair(low, high);
#else
  return bfloat16_bits(high) << 16 | bfloat16_bits(low);
#endif
}

// Rounds a double to a float that rounds to any narrower type as the double would ("round to odd"): it truncates, and
// sets the last bit if anything was cut off. Rounding to nearest twice would be off by one unit at ties. A float lacks
// the last 29 bits of a double; testing these takes fewer cycles than a conversion back, which runs on a slow unit.
__device__ __forceinline__ float round_to_odd(double x) {
  const unsigned cut_off = static_cast<unsigned>(__double_as_longlong(x)) & 0x1fffffffu;
  return __uint_as_float(__float_as_uint(double_to_float_rz(x)) | (cut_off != 0u ? 1u : 0u));
}

__device__ __forceinline__ float as_float(float x) {
  return x;
}
__device__ __forceinline__ float as_float(double x) {
  return round_to_odd(x);
}

template <class Storage>
struct Narrow {
  template <class Compute>
  static __device__ __forceinline__ Storage from(Compute x) {
    return static_cast<Storage>(x);
  }
};
template <>
struct Narrow<half_t> {
  template <class Compute>
  static __device__ __forceinline__ half_t from(Compute x) {
    return half_t{static_cast<unsigned short>(narrow_pair(as_float(x), 0.0f, half_t{}))};
  }
};
template <>
struct Narrow<bfloat16_t> {
  template <class Compute>
  static __device__ __forceinline__ bfloat16_t from(Compute x) {
    return bfloat16_t{static_cast<unsigned short>(narrow_pair(as_float(x), 0.0f, bfloat16_t{}))};
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Packs: kVecSize contiguous elements that are loaded and stored together, in words of at most 16 bytes

template <int kBytes>
struct WordOf;
template <>
struct WordOf<16> {
  using type = uint4;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<4> {
  using type = unsigned;
};
template <>
struct WordOf<2> {
  using type = unsigned short;
};
template <>
struct WordOf<1> {
  using type = unsigned char;
};

template <class Storage, int kVecSize>
struct alignas(sizeof(Storage) * kVecSize < 16 ? sizeof(Storage) * kVecSize : 16) Pack {
  static constexpr int kWordBytes = sizeof(Storage) * kVecSize < 16 ? sizeof(Storage) * kVecSize : 16;
  static constexpr int kWords = sizeof(Storage) * kVecSize / kWordBytes;
  using Word = typename WordOf<kWordBytes>::type;
  Storage element[kVecSize];
};

// Element i of a pack, in the arithmetic type. Each of the two bfloat16 in a register takes one instruction.
template <class Compute, class Storage, int kVecSize>
__device__ __forceinline__ Compute widen_element(const Pack<Storage, kVecSize>& pack, int i) {
  return widen<Compute>(pack.element[i]);
}
template <class Compute, int kVecSize>
__device__ __forceinline__ Compute widen_element(const Pack<bfloat16_t, kVecSize>& pack, int i) {
  if constexpr (kVecSize % 2 == 0) {
    const unsigned pair = reinterpret_cast<const unsigned*>(&pack)[i / 2];
    return static_cast<Compute>(__uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16));
  } else {
    return widen<Compute>(pack.element[i]);
  }
}

// Loads a pack whose elements are not read again, with an evict-first hint to the caches. Precondition of all loads and
// stores of packs: `pointer` is aligned to the pack's words.
template <int kVecSize, class Storage>
__device__ __forceinline__ Pack<Storage, kVecSize> load_stream(const Storage* pointer) {
  using P = Pack<Storage, kVecSize>;
  P pack;
#pragma unroll
  for (int i = 0; i < P::kWords; ++i) {
    reinterpret_cast<typename P::Word*>(&pack)[i] = __ldcs(reinterpret_cast<const typename P::Word*>(pointer) + i);
  }
  return pack;
}

// Loads a pack without a cache hint.
template <int kVecSize, class Storage>
__device__ __forceinline__ Pack<Storage, kVecSize> load_pack(const Storage* pointer) {
  using P = Pack<Storage, kVecSize>;
  P pack;
#pragma unroll
  for (int i = 0; i < P::kWords; ++i) {
    reinterpret_cast<typename P::Word*>(&pack)[i] = __ldg(reinterpret_cast<const typename P::Word*>(pointer) + i);
  }
  return pack;
}

// A pack at an address that is aligned to its elements only, as the aligned words that cover it. `align` shifts the
// elements to the front, within the registers of a thread.
template <class Storage, int kVecSize>
struct UnalignedPack {
  using P = Pack<Storage, kVecSize>;
  static constexpr int kWords = P::kWords + 1;
  static constexpr int kRegistersOfWord = P::kWordBytes / 4;
  static constexpr int kRegisters = kWords * kRegistersOfWord;
  static_assert(P::kWordBytes >= 4, "words are shifted in registers of four bytes");
  typename P::Word word[kWords];
  int skipped;  // bytes before the first element

  __device__ __forceinline__ void align() {
    unsigned (&x)[kRegisters] = reinterpret_cast<unsigned (&)[kRegisters]>(word);
#pragma unroll
    for (int step = kRegistersOfWord / 2; step > 0; step /= 2) {
#pragma unroll
      for (int j = 0; j + step < kRegisters; ++j) x[j] = (skipped / 4) & step ? x[j + step] : x[j];
    }
    if constexpr (sizeof(Storage) < 4) {
#pragma unroll
      for (int j = 0; j + kRegistersOfWord < kRegisters; ++j) {
        x[j] = static_cast<unsigned>((static_cast<unsigned long long>(x[j + 1]) << 32 | x[j]) >> (8 * (skipped % 4)));
      }
    }
  }

  // Precondition: `align` has been called.
  __device__ __forceinline__ Storage element(int i) const {
    return reinterpret_cast<const Storage*>(word)[i];
  }
};

// Returns the address of the first word that a pack touches. pack.skipped receives the number of bytes of that word
// which precede the pack.
template <int kVecSize, class Storage>
__device__ __forceinline__ auto first_word(const Storage* pointer, UnalignedPack<Storage, kVecSize>& pack) {
  using Word = typename UnalignedPack<Storage, kVecSize>::P::Word;
  const unsigned long long address = reinterpret_cast<unsigned long long>(pointer);
  pack.skipped = static_cast<int>(address % sizeof(Word));
  return reinterpret_cast<const Word*>(address - pack.skipped);
}

// Loads a pack at any element. Neighbouring threads read neighbouring packs, so each word comes from L1 the second
// time. Precondition: the word after the pack's last one may be read, too.
template <int kVecSize, class Storage>
__device__ __forceinline__ UnalignedPack<Storage, kVecSize> load_unaligned(const Storage* pointer) {
  using P = UnalignedPack<Storage, kVecSize>;
  P pack;
  const auto first = first_word(pointer, pack);
#pragma unroll
  for (int i = 0; i < P::kWords; ++i) pack.word[i] = __ldg(first + i);
  return pack;
}

// As above, for a pack of which only the first `count` elements exist, at least one. Reads no word without one of them.
template <int kVecSize, class Storage>
__device__ __forceinline__ UnalignedPack<Storage, kVecSize> load_unaligned(const Storage* pointer, int count) {
  using P = UnalignedPack<Storage, kVecSize>;
  P pack;
  const auto first = first_word(pointer, pack);
  const unsigned bytes = static_cast<unsigned>(pack.skipped) + static_cast<unsigned>(count) * sizeof(Storage);
  const unsigned last = (bytes - 1) / static_cast<unsigned>(sizeof(*first));
#pragma unroll
  for (unsigned i = 0; i < P::kWords; ++i) pack.word[i] = __ldg(first + (i < last ? i : last));
  return pack;
}

// Loads a pack of which only the first `count` elements exist, one by one.
template <int kVecSize, class Storage>
__device__ __forceinline__ UnalignedPack<Storage, kVecSize> load_elements(const Storage* pointer, int count) {
  UnalignedPack<Storage, kVecSize> pack = {};
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    if (i < count) reinterpret_cast<Storage*>(pack.word)[i] = load_pack<1>(pointer + i).element[0];
  }
  return pack;
}

template <int kVecSize, class Storage>
__device__ __forceinline__ void store_stream(Storage* pointer, const Pack<Storage, kVecSize>& pack) {
  using P = Pack<Storage, kVecSize>;
#pragma unroll
  for (int i = 0; i < P::kWords; ++i) {
    __stcs(reinterpret_cast<typename P::Word*>(pointer) + i, reinterpret_cast<const typename P::Word*>(&pack)[i]);
  }
}

// Stores without a cache hint: gradients of rows are written 1 to 2 % faster this way.
template <int kVecSize, class Storage>
__device__ __forceinline__ void store_pack(Storage* pointer, const Pack<Storage, kVecSize>& pack) {
  using P = Pack<Storage, kVecSize>;
#pragma unroll
  for (int i = 0; i < P::kWords; ++i) {
    __stwb(reinterpret_cast<typename P::Word*>(pointer) + i, reinterpret_cast<const typename P::Word*>(&pack)[i]);
  }
}

// Rounds kVecSize results into a pack. 16-bit types are converted in pairs, which takes one instruction from compute
// capability 8.0 on.
template <class Storage, int kVecSize>
struct NarrowPack {
  template <class Compute>
  static __device__ __forceinline__ Pack<Storage, kVecSize> from(const Compute (&x)[kVecSize]) {
    Pack<Storage, kVecSize> pack;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) pack.element[i] = Narrow<Storage>::from(x[i]);
    return pack;
  }
};

template <class Storage, int kVecSize, class Compute>
__device__ __forceinline__ Pack<Storage, kVecSize> narrow_in_pairs(const Compute (&x)[kVecSize]) {
  Pack<Storage, kVecSize> pack;
#pragma unroll
  for (int i = 0; i + 1 < kVecSize; i += 2) {
    reinterpret_cast<unsigned*>(&pack)[i / 2] = narrow_pair(as_float(x[i]), as_float(x[i + 1]), Storage{});
  }
  if (kVecSize % 2) pack.element[kVecSize - 1] = Narrow<Storage>::from(x[kVecSize - 1]);
  return pack;
}

// Returns a pack of another type of the same size, with the same bits.
template <class To, class From, int kVecSize>
__device__ __forceinline__ Pack<To, kVecSize> reinterpret_pack(const Pack<From, kVecSize>& pack) {
  static_assert(sizeof(To) == sizeof(From), "elements of the same size");
  Pack<To, kVecSize> result;
#pragma unroll
  for (int i = 0; i < Pack<To, kVecSize>::kWords; ++i) {
    reinterpret_cast<typename Pack<To, kVecSize>::Word*>(&result)[i] =
        reinterpret_cast<const typename Pack<From, kVecSize>::Word*>(&pack)[i];
  }
  return result;
}

template <class Scalar, int kCount, int kVecSize>
struct NarrowPack<Components<Scalar, kCount>, kVecSize> {
  template <class Compute>
  static __device__ __forceinline__ Pack<Components<Scalar, kCount>, kVecSize> from(
      const Components<Compute, kCount> (&x)[kVecSize]) {
    Pack<Components<Scalar, kCount>, kVecSize> pack;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const Pack<Scalar, kCount> element = NarrowPack<Scalar, kCount>::from(x[i].component);
#pragma unroll
      for (int c = 0; c < kCount; ++c) pack.element[i].component[c] = element.element[c];
    }
    return pack;
  }
};

template <int kVecSize>
struct NarrowPack<half_t, kVecSize> {
  template <class Compute>
  static __device__ __forceinline__ Pack<half_t, kVecSize> from(const Compute (&x)[kVecSize]) {
    return narrow_in_pairs<half_t>(x);
  }
};
template <int kVecSize>
struct NarrowPack<bfloat16_t, kVecSize> {
  template <class Compute>
  static __device__ __forceinline__ Pack<bfloat16_t, kVecSize> from(const Compute (&x)[kVecSize]) {
    return narrow_in_pairs<bfloat16_t>(x);
  }
};
