// Region losses of labels under a softmax, with more classes than registers hold, by tiles of voxels: the sums
// (kernel 1) and the gradients (kernel 2). Shared memory holds the logits of a tile as they are stored in the input,
// and in second derivatives (region_hvp.cuh) their tangents too.
//
// 1. The block copies the logits of Program::kTile voxels to shared memory: asynchronously, bypassing registers, in
//    words of Program::kTileWord elements; or, if the classes of a voxel are contiguous, element by element or in
//    pairs; or cut out of aligned words (StoredTile).
// 2. A thread processes kTogether neighbouring voxels; their logits of one class are one word. kParts threads share
//    these voxels, as many as the block has for each word: part q processes classes q, q + kParts and so on. The parts
//    compute the maximum and then the sum of exponentials, and exchange each through shared memory. The label's logit
//    is replaced by -inf, whose exponential is 0.
// 3. Exponentials are recomputed in each pass. In the arithmetic type they would take twice the shared memory of 16-bit
//    logits, and half as many blocks would hide each other's loads.
// 4. Sums of FP: warps loop over classes, and each lane adds the same voxels of the tile for every class, whose numbers
//    it keeps in registers. Sums of I and FN: lanes loop over voxels and add to the classes of their labels. Lanes keep
//    their sums in shared memory (SumsOfLanes); threads add these up, in double, after every kLaneVoxels voxels of a
//    lane. Chunks are added up by segments (add_up_segment).
//    Gradients: from the sums of exponentials, by the formula of label_gradient().
//
// Invalid labels are reported after the loop over tiles: NVRTC 13.0 to 13.2 lose lanes at shuffles after an atomic
// (sums.cuh).
//
// Traffic: as in the other kernels; input and tangents are read twice in total. Preconditions: blockDim.x is
// kSumThreads for sums, and kGradientThreads for gradients.
#pragma once
#include "regions/regions.cuh"

// Logits of a tile in shared memory, followed by their tangents: kPitch elements for each class.
template <class Program>
struct StoredTile {
  using Compute = typename Program::Compute;
  using Scalar = decltype(value_of(Compute(0)));
  using Input = typename Program::Input;
  static constexpr int kVoxels = Program::kTile, kWord = Program::kTileWord;
  static constexpr int kArrays = kHasTangent<Compute> ? 2 : 1;
  // Number of neighbouring voxels of a thread, whose logits of a class are one word.
  static constexpr int kTogether = sizeof(Input) == 2 && kVoxels >= 64 ? 2 : 1;
  static constexpr int kPlaces = kVoxels / kTogether;
  // True if 16-bit logits whose classes no word divides are cut out of aligned words, where shifts() allows it.
  static constexpr bool kShifts = kWord == 1 && !Program::kPackedInput && sizeof(Input) == 2;
  static constexpr int kShiftedWord = 16 / static_cast<int>(sizeof(Input));
  // If elements are stored one by one, the pitch is an odd number of words (4 bytes, or a double), which scatters the
  // classes of a voxel over the banks. If whole words are stored, the pitch keeps the rows of classes aligned. Padding
  // is at most 16 bytes a class, as `_stored_bytes` of engines/regions/layout.py counts: with 4 doubles of padding the
  // tile ran past the end of shared memory.
  static constexpr int kSize = static_cast<int>(sizeof(Input));
  static constexpr int kPitch = kVoxels + (kWord > 1 || kShifts ? 16 : (kSize < 4 ? 4 : kSize)) / kSize;
  Input* logits;
  Input* tangents;
  int classes;

  __device__ __forceinline__ StoredTile(void* memory, int classes)
      : logits(static_cast<Input*>(memory)), tangents(logits + classes * kPitch), classes(classes) {
  }
  static __device__ __forceinline__ int place(int c, int voxel) {
    return c * kPitch + voxel;
  }
  // Returns a logit, with its tangent.
  __device__ __forceinline__ Compute number(int at) const {
    if constexpr (kHasTangent<Compute>) {
      return Compute{widen<Scalar>(logits[at]), widen<Scalar>(tangents[at])};
    } else {
      return widen<Compute>(logits[at]);
    }
  }
  __device__ __forceinline__ void numbers_from(int at, Compute (&x)[kTogether]) const {
    using Word = Pack<Input, kTogether>;
    const Word logit = *reinterpret_cast<const Word*>(logits + at);
    if constexpr (kHasTangent<Compute>) {
      const Word tangent = *reinterpret_cast<const Word*>(tangents + at);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) x[i] = {widen_element<Scalar>(logit, i), widen_element<Scalar>(tangent, i)};
    } else {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) x[i] = widen_element<Compute>(logit, i);
    }
  }
  __device__ __forceinline__ void clear(int at) const {
    logits[at] = Input{};
    if constexpr (kArrays > 1) tangents[at] = Input{};
  }

  // Starts the copy of `count` voxels of a sample, from voxel `begin` on. The caller waits for the copy and
  // synchronizes the block before using the tile.
  template <int kThreads>
  __device__ __forceinline__ void copy(const Program& program, int64 sample, int64 begin, int count) const {
    const Input* arrays[kArrays] = {program.input};
    if constexpr (kArrays > 1) arrays[1] = program.tangents;
    if constexpr (Program::kPackedInput) {
      bool pairs = true;
#pragma unroll
      for (int k = 0; k < kArrays; ++k) {
        arrays[k] += sample * program.space.sample_stride[stream_of(k)] + begin * classes;
        pairs = pairs && in_pairs(arrays[k]);
      }
      if (pairs) {
        copy_pairs<kThreads>(arrays, count * classes);
      } else {
        copy_elements<kThreads>(arrays, threadIdx.x, count * classes);
      }
    } else if (kShifts && shifts(program, begin)) {
#pragma unroll 1
      for (int k = 0; k < kArrays; ++k) {
        const auto& space = program.space;
        const int64 step = k == 0 ? space.class_stride[kInputs] : space.class_stride[kGradientsOfInputs];
        const int64 apart = k == 0 ? space.sample_stride[kInputs] : space.sample_stride[kGradientsOfInputs];
        const Input* const from = arrays[kArrays - 1];
        copy_shifted<kThreads>((k == 0 ? program.input : from) + sample * apart + begin, step,
                               k == 0 ? logits : tangents);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kArrays; ++k) {
        copy_classes<kThreads>(program, arrays[k], stream_of(k), k == 0 ? logits : tangents, sample, begin, count);
      }
    }
    cp_async_commit();
  }
  static __device__ __forceinline__ constexpr int stream_of(int array) {
    return array == 0 ? kInputs : kGradientsOfInputs;
  }
  // Copies every kThreads-th element of packed classes, from element `begin` on.
  template <int kThreads>
  __device__ __forceinline__ void copy_elements(const Input* const (&arrays)[kArrays], int begin, int all) const {
    const unsigned inverse = inverse_of(classes);
#pragma unroll
    for (int array = 0; array < kArrays; ++array) {
      const Input* const first = arrays[array] + begin;
      Input* const to = array == 0 ? logits : tangents;
      copy_stored((all - begin + kThreads - 1) / kThreads, [=](int k) { return first + k * kThreads; },
                  [=](int k) {
                    const int i = begin + k * kThreads, voxel = divided(i, inverse);
                    return to + place(i - voxel * classes, voxel);
                  });
    }
  }
  // Copies all elements of packed classes in words of 4 bytes. Their places are computed once for all arrays.
  template <int kThreads>
  __device__ __forceinline__ void copy_pairs(const Input* const (&arrays)[kArrays], int all) const {
    using Places = PairPlaces<kThreads, kPitch>;
    constexpr int kBatch = kStoredBatch / kArrays, kApart = Places::kApart;
    Places places(classes);
#pragma unroll 1
    for (int begin = 2 * threadIdx.x; begin + 1 < all; begin += kBatch * kApart) {
      Pack<Input, 2> x[kBatch][kArrays];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (begin + k * kApart + 1 >= all) continue;
#pragma unroll
        for (int array = 0; array < kArrays; ++array) x[k][array] = load_pack<2>(arrays[array] + begin + k * kApart);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (begin + k * kApart + 1 < all) {
          const int second = places.second();
#pragma unroll
          for (int array = 0; array < kArrays; ++array) {
            Input* const to = array == 0 ? logits : tangents;
            to[places.first] = x[k][array].element[0];
            to[second] = x[k][array].element[1];
          }
        }
        places.next();
      }
    }
    if (all % 2 != 0 && threadIdx.x == 0) copy_elements<kThreads>(arrays, all - 1, all);
  }
  template <int kThreads>
  __device__ __forceinline__ void copy_classes(const Program& program, const Input* array, int stream, Input* to,
                                               int64 sample, int64 begin, int count) const {
    constexpr int kWords = kVoxels / kWord, kApart = kThreads / kWords;
    const int thread = threadIdx.x, voxel = thread % kWords * kWord;
    if (voxel >= count) return;
    VectorOffsets<Program::kVecSize, Program::kWide> offset;
    program.space.offsets(sample, begin + voxel, offset);
    const int64 step = program.space.class_stride[stream];
    const Input* const first = array + offset.at(stream, 0);
    if constexpr (kWord > 1) {
#pragma unroll 4
      for (int c = thread / kWords; c < classes; c += kApart) {
        cp_async_word<kWord * sizeof(Input)>(to + place(c, voxel), first + c * step);
      }
    } else {
      const int c = thread / kWords;
      copy_stored((classes - c + kApart - 1) / kApart, [=](int k) { return first + (c + k * kApart) * step; },
                  [=](int k) { return to + place(c + k * kApart, voxel); });
    }
  }
  // True if the tile is full, its voxels are contiguous, and the aligned words that cover it contain only voxels of the
  // same class.
  static __device__ __forceinline__ bool shifts(const Program& program, int64 begin) {
    const auto& space = program.space;
    const bool inside = begin >= kShiftedWord && space.voxels - begin >= kVoxels + kShiftedWord;
    if (!Program::Space::kOneDimension || space.at.stride[kInputs][0] != 1) return false;
    return inside && (kArrays == 1 || space.at.stride[kGradientsOfInputs][0] == 1);
  }
  // Copies classes that start `step` elements apart, at any alignment. Neighbouring threads also read the second of two
  // words, which then comes from L1.
  template <int kThreads>
  __device__ __forceinline__ void copy_shifted(const Input* from, int64 step, Input* to) const {
    using Word = Pack<Input, kShiftedWord>;
    constexpr int kWords = kVoxels / kShiftedWord, kApart = kThreads / kWords, kBatch = kThreads < kSumThreads ? 2 : 1;
    const int voxel = static_cast<int>(threadIdx.x) % kWords * kShiftedWord;
    const int begin = static_cast<int>(threadIdx.x) / kWords;
    from += begin * step + voxel;
    Word* at = reinterpret_cast<Word*>(to + place(begin, voxel));
#pragma unroll 1
    for (int left = classes - begin; left > 0; left -= kBatch * kApart) {
      Word both[kBatch][2];
      int shift[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        shift[k] = behind_word(from);
        if (k * kApart < left) {
          const Word* const word = reinterpret_cast<const Word*>(from - shift[k]);
          both[k][0] = load_words(word);
          both[k][1] = load_words(word + (shift[k] == 0 ? 0 : 1));
        }
        from += kApart * step;
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (k * kApart < left) {
          const unsigned bytes = static_cast<unsigned>(shift[k]) * static_cast<unsigned>(sizeof(Input));
          store_words(at, cut_out(both[k], bytes));
        }
        at += kApart * kPitch / kShiftedWord;
      }
    }
  }
  // Returns the number of elements between an address and the aligned word before it.
  static __device__ __forceinline__ int behind_word(const Input* at) {
    return static_cast<int>(reinterpret_cast<unsigned long long>(at) % 16 / sizeof(Input));
  }
  template <int kBytes>
  static __device__ __forceinline__ void cp_async_word(Input* to, const Input* from) {
    if constexpr (kHasCpAsync) {
      cp_async_bytes<kBytes>(to, from);
    } else {
      using Word = typename WordOf<kBytes>::type;
      *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(from);
    }
  }
  template <class From, class To>
  static __device__ __forceinline__ void copy_stored(int count, const From& from, const To& to) {
    if constexpr (sizeof(Input) >= 4) {
#pragma unroll 4
      for (int k = 0; k < count; ++k) cp_async_element(to(k), from(k));
    } else {
      copy_in_batches<kStoredBatch, Input>(count, from, to, [](const Pack<Input, 1>& x) { return x.element[0]; });
    }
  }
};

// Label of a voxel of a sample.
template <class Program>
struct TileLabel {
  using Offset = VectorOffsets<Program::kVecSize, Program::kWide>;
  Offset offset;
  const Program& program;

  __device__ __forceinline__ TileLabel(const Program& program, int64 sample, int64 voxel) : program(program) {
    program.space.offsets(sample, voxel, offset);
  }
  __device__ __forceinline__ int64 label(int) const {
    return static_cast<int64>(program.target[offset.at(kTargets, 0)]);
  }
  // Returns the target; a voxel that does not exist does not count.
  __device__ __forceinline__ VoxelTarget target(bool exists) const {
    return exists ? voxel_target(program, *this, offset, 0) : VoxelTarget{0, false, false};
  }
};

// Targets and softmax of a word of voxels, computed jointly by kParts threads.
template <class Program>
struct TileSoftmax {
  using Compute = typename Program::Compute;
  using Scalar = decltype(value_of(Compute(0)));
  using Input = typename Program::Input;
  using Tile = StoredTile<Program>;
  static constexpr int kTogether = Tile::kTogether;
  VoxelSoftmax<Program> softmax[kTogether];
  VoxelTarget target[kTogether];

  // Computes the softmax of a word of voxels that starts at `voxel`, over all parts. With kWeighted, `add(c, e, sum)`
  // adds a term of class c to `sum`, and `weighted` becomes the total over all classes. All logits of voxels that do
  // not count are cleared. Preconditions: all threads of the block call it, kParts of them for each word; `exchange`
  // has memory for kExchanged numbers of each thread, and is not used again before the next barrier.
  template <int kParts, bool kWeighted, class Add>
  __device__ __forceinline__ void find(const Tile& tile, int voxel, int part, Compute* exchange,
                                       Compute (&weighted)[kTogether], const Add& add) {
    Compute largest[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      softmax[i].label_logit = tile.number(Tile::place(target[i].label, voxel + i));
      largest[i] = softmax[i].label_logit;
    }
    find_largest<kParts>(tile, voxel, part, largest);
    // After the barrier in combine(), all threads have read the label's logit.
    combine<kParts, kTogether>(largest, exchange, [](Compute a, Compute b) {
      return with_tangent_of(max_ignoring_nan(value_of(a), value_of(b)), a);
    });
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int label = target[i].label;
      if (!target[i].sound) {
        softmax[i].label_logit = largest[i] = Compute(0);
        for (int c = part; c < tile.classes; c += kParts) tile.clear(Tile::place(c, voxel + i));
      } else if (label % kParts == part) {
        tile.logits[Tile::place(label, voxel + i)] = Narrow<Input>::from(-scalar_infinity(Scalar()));
      }
    }
    constexpr int kSums = kWeighted ? 2 * kTogether : kTogether;
    Compute sums[kSums];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      // Exponentials are relative to the maximum, with the tangent of the label's logit; it cancels in everything that
      // follows.
      softmax[i].max_logit = with_tangent_of(value_of(largest[i]), softmax[i].label_logit);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = Compute(0);
#pragma unroll 4
    for (int c = part; c < tile.classes; c += kParts) {
      Compute e[kTogether];
      exponentials(tile, c, voxel, e);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        sums[i] += e[i];
        if constexpr (kWeighted) sums[kTogether + i] = add(c, e[i], sums[kTogether + i]);
      }
    }
    combine<kParts, kSums>(sums, exchange + kTogether * kParts * Tile::kPlaces,
                           [](Compute a, Compute b) { return a + b; });
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if constexpr (kWeighted) weighted[i] = sums[kTogether + i];
      softmax[i].others = sums[i];
      softmax[i].pivot = target[i].label;
      // Same expression as in row_result(), so that the compiler computes it and the sum only once.
      softmax[i].label_e = exp_of_difference(softmax[i].label_logit - softmax[i].max_logit);
      softmax[i].sum = softmax[i].others + softmax[i].label_e;
      softmax[i].inv_sum = scalar_divide_closely(Compute(1), softmax[i].sum);
    }
  }
  template <bool kWeighted>
  static constexpr int kExchanged = (kWeighted ? 3 : 2) * kTogether;
  // Returns the exponentials of class c; 0 for the label's class.
  __device__ __forceinline__ void exponentials(const Tile& tile, int c, int voxel, Compute (&e)[kTogether]) const {
    tile.numbers_from(Tile::place(c, voxel), e);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) e[i] = difference_exponential<Input>(e[i], softmax[i].max_logit);
  }
  // Updates `largest` with the logits of a part, by value. Logits of 16 bits are compared in pairs.
  template <int kParts>
  static __device__ __forceinline__ void find_largest(const Tile& tile, int voxel, int part,
                                                      Compute (&largest)[kTogether]) {
    using Word = Pack<Input, kTogether>;
    if constexpr (kTogether == 2 && kHasPairMax) {
      Word pair;
      unsigned& word = reinterpret_cast<unsigned&>(pair);
      word = *reinterpret_cast<const unsigned*>(tile.logits + Tile::place(part < tile.classes ? part : 0, voxel));
#pragma unroll 4
      for (int c = part + kParts; c < tile.classes; c += kParts) {
        word = max_pair(word, *reinterpret_cast<const unsigned*>(tile.logits + Tile::place(c, voxel)), Input{});
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const Scalar x = widen_element<Scalar>(pair, i);
        largest[i] = with_tangent_of(max_ignoring_nan(value_of(largest[i]), x), largest[i]);
      }
    } else {
#pragma unroll 4
      for (int c = part; c < tile.classes; c += kParts) {
        const Word word = *reinterpret_cast<const Word*>(tile.logits + Tile::place(c, voxel));
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const Scalar x = widen_element<Scalar>(word, i);
          largest[i] = with_tangent_of(max_ignoring_nan(value_of(largest[i]), x), largest[i]);
        }
      }
    }
  }
  // Combines kCount numbers over the threads of a word of voxels, in the order of the parts; all of them get the
  // result. Precondition: all threads of the block call it.
  template <int kParts, int kCount, class Combine>
  static __device__ __forceinline__ void combine(Compute (&x)[kCount], Compute* exchange, const Combine& with) {
    if constexpr (kParts > 1) {
      constexpr int kThreads = kParts * Tile::kPlaces;
      const int place = threadIdx.x % Tile::kPlaces;
#pragma unroll
      for (int i = 0; i < kCount; ++i) exchange[i * kThreads + threadIdx.x] = x[i];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        x[i] = exchange[i * kThreads + place];
#pragma unroll
        for (int q = 1; q < kParts; ++q) x[i] = with(x[i], exchange[i * kThreads + q * Tile::kPlaces + place]);
      }
    }
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Sums

// A voxel of a tile when FP of each class is added up. With p = exp(x - max_logit) / sum, it adds p and, for tangents
// v, p (v - mean), where mean is the average of v with weights p. Where 2^-16 is accurate enough (kInExponent), the
// quotient is a difference of exponents.
template <class Program>
struct SummedVoxel {
  using Compute = typename Program::Compute;
  using Scalar = decltype(value_of(Compute(0)));
  static constexpr bool kInExponent =
      kSingle<Scalar> && (kHasTangent<Compute> ? sizeof(typename Program::Input) == 2 : kNarrow);
  Scalar offset;  // with kInExponent added to the exponent, otherwise the largest logit
  Scalar factor;  // unused with kInExponent
  Scalar mean;

  SummedVoxel() = default;
  // For a voxel that does not count, p is 0; its logits are cleared.
  __device__ __forceinline__ SummedVoxel(const VoxelSoftmax<Program>& softmax, bool sound) {
    const Scalar max_logit = value_of(softmax.max_logit);
    factor = sound ? value_of(softmax.inv_sum) : Scalar(0);
    offset = max_logit;
    mean = Scalar(0);
    if constexpr (kInExponent) {
      offset = sound ? -scalar_fma(max_logit, kLog2E, scalar_log2(value_of(softmax.sum))) : -scalar_infinity(Scalar());
    }
    if constexpr (kHasTangent<Compute>) {
      // Exponentials have the tangents e (v - v_label).
      const Scalar v = tangent_of(softmax.max_logit);
      mean = sound ? scalar_fma(tangent_of(softmax.others), factor, v) : Scalar(0);
    }
  }
  __device__ __forceinline__ void add(Compute x, Compute& sum) const {
    Scalar p;
    if constexpr (kInExponent) {
      p = exp2_ftz(fmaf(value_of(x), kLog2E, offset));
    } else {
      p = exp_of_difference(value_of(x) - offset) * factor;
    }
    if constexpr (kHasTangent<Compute>) {
      sum = {value_of(sum) + p, scalar_fma(p, tangent_of(x) - mean, tangent_of(sum))};
    } else {
      sum += p;
    }
  }
};

// Number of voxels of a tile from which on a warp adds up labels with all of its lanes.
constexpr int kLargeTile = 256;

// Sums of each class in shared memory; only one lane adds to each. For I and FN, there are kCount numbers for each of
// kStreams interleaved streams of voxels; for FP, kShares numbers (and as many tangents). Adding takes no shuffle or
// comparison per class and voxel.
template <class Compute, int kTileSize>
struct SumsOfLanes {
  using Scalar = decltype(value_of(Compute(0)));
  static constexpr int kCount = kHasTangent<Compute> ? 4 : 2;
  // Small tiles occur with many classes, for which no more sums fit in shared memory.
  static constexpr int kStreams = kTileSize >= kLargeTile ? kWarp / kCount : 8, kOfLabels = kCount * kStreams;
  static constexpr int kShares = 8, kOfPositives = kCount / 2 * kShares;
  Scalar* of_labels;     // kOfLabels numbers for each class
  Scalar* of_positives;  // kOfPositives numbers for each class

  __device__ __forceinline__ SumsOfLanes(Scalar* memory, int classes)
      : of_labels(memory), of_positives(memory + classes * kOfLabels) {
  }
  __device__ __forceinline__ static int size(int classes) {
    return classes * (kOfLabels + kOfPositives);
  }
  // Stores I and FN of a voxel in the order in which lanes read them, one number per lane.
  static __device__ __forceinline__ void split(Compute hit, Compute false_negative, Scalar* numbers) {
    numbers[0] = value_of(hit);
    numbers[kCount / 2] = value_of(false_negative);
    if constexpr (kCount > 2) {
      numbers[1] = tangent_of(hit);
      numbers[3] = tangent_of(false_negative);
    }
  }
  // Adds the `numbers` of kVoxels voxels, kCount each, to the classes of their labels. Precondition: only one warp
  // calls it.
  template <int kVoxels>
  __device__ __forceinline__ void add_labels(const int* labels, const Scalar* numbers, int lane) const {
    constexpr int kAhead = 4;
    static_assert(kVoxels % (kAhead * kStreams) == 0, "whole batches");
    if (lane >= kOfLabels) return;
#pragma unroll 1
    for (int first = 0; first < kVoxels; first += kAhead * kStreams) {
      Scalar number[kAhead];
      Scalar* to[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        number[j] = numbers[(first + j * kStreams) * kCount + lane];
        to[j] = of_labels + labels[first + j * kStreams + lane / kCount] * kOfLabels + lane;
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) *to[j] += number[j];
    }
  }
  // Adds the FP of a class. With tangents, the upper half of the warp adds the tangents. Precondition: all lanes of a
  // warp call it together.
  __device__ __forceinline__ void add_positives(int c, Compute sum, int lane) const {
    const bool upper = lane >= kWarp / 2;
    Scalar own = value_of(sum), sent = own;
    if constexpr (kHasTangent<Compute>) {
      sent = upper ? own : tangent_of(sum);
      own = upper ? tangent_of(sum) : own;
    }
    own += __shfl_xor_sync(0xffffffffu, sent, kWarp / 2);
    own += __shfl_xor_sync(0xffffffffu, own, kShares);
    if ((lane & kShares) == 0 && (kHasTangent<Compute> || !upper)) {
      of_positives[c * kOfPositives + (upper ? kShares : 0) + lane % kShares] += own;
    }
  }
  // Returns the sum of I, FP or FN (`number`) of a class, or of its tangents, and resets it to 0.
  __device__ __forceinline__ double take(int c, int number, int of_tangent) const {
    if (number == 1) return take_every<1, kShares>(of_positives + c * kOfPositives + of_tangent * kShares);
    return take_every<kCount, kStreams>(of_labels + c * kOfLabels + number / 2 * (kCount / 2) + of_tangent);
  }
  template <int kStep, int kNumbers>
  static __device__ __forceinline__ double take_every(Scalar* own) {
    Scalar sums[kNumbers];
#pragma unroll
    for (int j = 0; j < kNumbers; ++j) {
      sums[j] = own[j * kStep];
      own[j * kStep] = Scalar(0);
    }
    return static_cast<double>(sum_elements(sums));
  }
};

// Adds up the `numbers` sums of all chunks of a segment, in the block that arrives last in the segment, and stores them
// over those of its first chunk. A single block would read the sums of all chunks at the speed of one
// multiprocessor, while the others wait. A sample has `chunks` chunks, in segments of `per_segment`. Preconditions: all
// threads call it, once for each chunk; `numbers` is even if they have tangents.
__device__ __forceinline__ void add_up_segment(unsigned* tickets, int64 chunk, int64 chunks, int64 per_segment,
                                               double* partials, int64 numbers) {
  if (per_segment == 1) return;
  __shared__ bool last;
  const int64 sample = chunk / chunks, segment = (chunk - sample * chunks) / per_segment;
  const int64 first = segment * per_segment, count = min(per_segment, chunks - first);
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned* const ticket = tickets + sample * ((chunks + per_segment - 1) / per_segment) + segment;
    const unsigned limit = static_cast<unsigned>(count - 1);
    last = increment_and_synchronize(ticket, limit) == limit;
  }
  __syncthreads();
  if (last) {
    double* const own = partials + (sample * chunks + first) * numbers;
    for (int64 k = threadIdx.x; k < numbers; k += kSumThreads) {
      own[k] = sum_apart<16>(own + k, static_cast<int>(numbers), count);
    }
  }
  __syncthreads();
}

// Computes the sums of chunks of `tiles_per_chunk` tiles. `memory` is shared memory for 3 C `Total`, SumsOfLanes, and
// the tile (engines/regions/layout.py: `stored_sums_bytes`).
template <class Program, class Total>
__device__ __forceinline__ void sum_in_stored_tiles(const Program& program, int64 chunks, int64 tiles_per_chunk,
                                                    int64 per_segment, unsigned* segment_tickets, Total* partials,
                                                    void* memory) {
  using Compute = typename Program::Compute;
  using Scalar = decltype(value_of(Compute(0)));
  using Tile = StoredTile<Program>;
  using Lanes = SumsOfLanes<Compute, Program::kTile>;
  using Kept = SummedVoxel<Program>;
  constexpr int kTileSize = Program::kTile, kEach = kTileSize / kWarp, kTogether = Tile::kTogether;
  constexpr int kParts = kSumThreads / Tile::kPlaces;
  constexpr int kDoubles = sizeof(Total) / sizeof(double);
  // Declared as doubles, because these types have constructors.
  __shared__ double kept_memory[kTileSize * sizeof(Kept) / sizeof(double)];
  __shared__ Scalar of_labels[kTileSize * Lanes::kCount];
  __shared__ int labels[kTileSize];
  constexpr int kExchanged = TileSoftmax<Program>::template kExchanged<false>;
  __shared__ double exchange_memory[kParts > 1 ? kExchanged * kSumThreads * sizeof(Compute) / sizeof(double) : 1];
  __shared__ double memory_of_warps[kSumWarps * 3 * sizeof(Total) / sizeof(double)];
  Kept* const kept_of = reinterpret_cast<Kept*>(kept_memory);
  Compute* const exchange = reinterpret_cast<Compute*>(exchange_memory);
  Total(*const of_warp)[3] = reinterpret_cast<Total(*)[3]>(memory_of_warps);
  const int classes_count = program.classes(), numbers = 3 * classes_count + 3;
  Total* const totals = static_cast<Total*>(memory);
  Scalar* const sums = reinterpret_cast<Scalar*>(totals + (3 * classes_count + 1) / 2 * 2);
  const Lanes of_lanes(sums, classes_count);
  const Tile tile(sums + Lanes::size(classes_count), classes_count);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int v = threadIdx.x % Tile::kPlaces * kTogether, part = threadIdx.x / Tile::kPlaces;
  const int64 voxels = program.space.voxels, total = chunks * program.space.samples;
#pragma unroll 1
  for (int64 chunk = blockIdx.x; chunk < total; chunk += gridDim.x) {
    const int64 sample = chunk / chunks, first = (chunk - sample * chunks) * tiles_per_chunk;
    Total spoilt(0.0), cost(0.0), voxel_count(0.0);
    int64 bad_voxel = -1;
    for (int k = threadIdx.x; k < 3 * classes_count; k += kSumThreads) totals[k] = Total(0.0);
    for (int k = threadIdx.x; k < Lanes::size(classes_count); k += kSumThreads) sums[k] = Scalar(0);
    int added = 0;  // number of voxels of the lane that has most
#pragma unroll 1
    for (int64 turn = 0; turn < tiles_per_chunk; ++turn) {
      const int64 begin = (first + turn) * kTileSize;
      if (begin >= voxels) break;
      const int count = static_cast<int>(min(voxels - begin, static_cast<int64>(kTileSize)));
      __syncthreads();  // the previous tile may still be read
      tile.template copy<kSumThreads>(program, sample, begin, count);
      TileSoftmax<Program> of_word;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        of_word.target[i] = TileLabel<Program>(program, sample, begin + v + i).target(v + i < count);
        if (part == 0 && of_word.target[i].spoilt) {
          spoilt += Total(1.0);
          bad_voxel = begin + v + i;
        }
      }
      cp_async_wait_all();
      __syncthreads();
      Compute unused[kTogether];
      of_word.template find<kParts, false>(tile, v, part, exchange, unused,
                                           [](int, Compute, Compute) { return Compute(0); });
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (part != 0) continue;
        const VoxelTarget& target = of_word.target[i];
        const VoxelSoftmax<Program>& softmax = of_word.softmax[i];
        const Compute factor = target.sound ? softmax.inv_sum : Compute(0);
        kept_of[v + i] = Kept(softmax, target.sound);
        labels[v + i] = target.label;
        Lanes::split(softmax.label_e * factor, softmax.others * factor, of_labels + (v + i) * Lanes::kCount);
        if constexpr (Program::kVoxel != kNoVoxelLoss) {
          if (target.sound) {
            const VoxelCost<Compute> of_row = voxel_cost(program, tile, softmax, target, 0);
            cost += as_double(of_row.value);
            voxel_count += as_double(of_row.count);
          }
        }
      }
      __syncthreads();
      // The last warp has the fewest classes.
      if (warp == kSumWarps - 1) of_lanes.template add_labels<kTileSize>(labels, of_labels, lane);
      Kept own[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) own[j] = kept_of[(j / kTogether * kWarp + lane) * kTogether + j % kTogether];
#pragma unroll 1
      for (int c = warp; c < classes_count; c += kSumWarps) {
        Compute sum = Compute(0);
#pragma unroll
        for (int j = 0; j < kEach; j += kTogether) {
          Compute x[kTogether];
          tile.numbers_from(Tile::place(c, j * kWarp + lane * kTogether), x);
#pragma unroll
          for (int i = 0; i < kTogether; ++i) own[j + i].add(x[i], sum);
        }
        of_lanes.add_positives(c, sum, lane);
      }
      added += max(kEach, kTileSize / Lanes::kStreams);
      if (added < kLaneVoxels && turn + 1 < tiles_per_chunk && begin + kTileSize < voxels) continue;
      added = 0;
      __syncthreads();
      for (int k = threadIdx.x; k < 3 * classes_count; k += kSumThreads) {
        const int c = k / 3, number = k - 3 * c;
        if constexpr (kHasTangent<Compute>) {
          totals[k] += Total{of_lanes.take(c, number, 0), of_lanes.take(c, number, 1)};
        } else {
          totals[k] += of_lanes.take(c, number, 0);
        }
      }
    }
    if (bad_voxel >= 0) {
      const TileLabel<Program> label(program, sample, bad_voxel);
      report_label(program.status, program.site, sample * voxels + bad_voxel, label.label(0), program.space.classes);
    }
    __syncthreads();
    store_chunk(totals, spoilt, cost, voxel_count, of_warp, classes_count, partials + chunk * numbers);
    add_up_segment(segment_tickets, chunk, chunks, per_segment, reinterpret_cast<double*>(partials),
                   kDoubles * numbers);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Gradients

// Writes the gradients of the chunk of this block, or, for numbers with a tangent, the tangents of the gradients. In
// shared memory, the tile follows the 3 C `numbers`, padded to a multiple of 4. Preconditions: blockDim.x is
// kGradientThreads; the grid has one block per chunk of all samples; `voxels_per_chunk` is a multiple of kTile.
template <class Program, class Groups, class Residual, class Result>
__device__ __forceinline__ void write_stored_tiles(const Program& program, const Groups& groups,
                                                   const Residual* residual, const Result* grad_output, int64 per_group,
                                                   int64 chunks, int64 voxels_per_chunk,
                                                   typename Program::Input* gradients,
                                                   typename Program::Compute* numbers) {
  using Compute = typename Program::Compute;
  using Scalar = decltype(value_of(Compute(0)));
  using Input = typename Program::Input;
  using Tile = StoredTile<Program>;
  constexpr int kTileSize = Program::kTile, kTogether = Tile::kTogether, kParts = kGradientThreads / Tile::kPlaces;
  constexpr int kExchanged = TileSoftmax<Program>::template kExchanged<true>;
  __shared__ double exchange_memory[kParts > 1 ? kExchanged * kGradientThreads * sizeof(Compute) / sizeof(double) : 1];
  Compute* const exchange = reinterpret_cast<Compute*>(exchange_memory);
  const int classes_count = program.classes();
  const Tile tile(numbers + (3 * classes_count + 3) / 4 * 4, classes_count);
  const int v = threadIdx.x % Tile::kPlaces * kTogether, part = threadIdx.x / Tile::kPlaces;
  // Chunk numbers fit in 32 bits, and 32-bit division is faster.
  const unsigned of_sample = static_cast<unsigned>(chunks), chunk = gridDim.x - 1 - blockIdx.x;
  const int64 sample = chunk / of_sample, first = (chunk - sample * chunks) * voxels_per_chunk;
  const int64 end = min(first + voxels_per_chunk, program.space.voxels);
  const SharedCoeffs<Program> coeffs(program, numbers);
  Compute voxel_scale = Compute(0);
#pragma unroll 1
  for (int64 begin = first; begin < end; begin += kTileSize) {
    const int count = static_cast<int>(min(end - begin, static_cast<int64>(kTileSize)));
    tile.template copy<kGradientThreads>(program, sample, begin, count);
    TileSoftmax<Program> of_word;
    int64 at[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const TileLabel<Program> label(program, sample, begin + v + i);
      of_word.target[i] = label.target(v + i < count);
      at[i] = label.offset.at(kGradientsOfInputs, 0);
    }
    if (begin == first) {
      load_coefficients(program, groups, residual, grad_output, per_group, sample, numbers);
      voxel_scale = scale_of_voxels(program, residual, grad_output);
    }
    cp_async_wait_all();
    __syncthreads();
    Compute sums[kTogether];
    of_word.template find<kParts, true>(tile, v, part, exchange, sums, [&](int c, Compute e, Compute sum) {
      return scalar_fma(e, coeffs.of_other(c), sum);
    });
    LabelGradient<Compute> of_label[kTogether];
    Compute inv_sum[kTogether];
    Scalar by_label[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const VoxelTarget& target = of_word.target[i];
      of_label[i] = gradient_of_label(program, tile, of_word.softmax[i], target, 0, coeffs, voxel_scale, sums[i]);
      // A voxel that does not count has exponentials of 1, but gradients of 0.
      if (!target.sound) of_label[i].common = Compute(0);
      inv_sum[i] = target.sound ? of_word.softmax[i].inv_sum : Compute(0);
      by_label[i] = target.sound ? static_cast<Scalar>(of_label[i].by_label) : Scalar(0);
    }
    // No branch per class, and addresses advance by addition: branches and address arithmetic took two thirds of the
    // instructions.
    constexpr bool kInTile = Program::kPackedGradients;
    constexpr bool kInWords = kTogether == 1 || kInTile || Tile::kWord > 1;
    const int64 step = kInTile ? Tile::kPitch : program.space.class_stride[kGradientsOfInputs];
    Input* to = (kInTile ? tile.logits + v : gradients + at[0]) + part * step;
    const int64 apart = at[kTogether - 1] - at[0];
    const bool both = v + kTogether <= count;
    if (v < count) {
#pragma unroll 4
      for (int c = part; c < classes_count; c += kParts) {
        Compute e[kTogether];
        Scalar y[kTogether];
        of_word.exponentials(tile, c, v, e);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const Compute of_other = of_label[i].of_other(e[i], coeffs.of_other(c), inv_sum[i]);
          y[i] = c == of_word.target[i].label ? by_label[i] : static_cast<Scalar>(of_other);
        }
        const Pack<Input, kTogether> stored = NarrowPack<Input, kTogether>::from(y);
        if constexpr (kInWords) {
          *reinterpret_cast<Pack<Input, kTogether>*>(to) = stored;
        } else {
          to[0] = stored.element[0];
          if (both) to[apart] = stored.element[kTogether - 1];
        }
        to += kParts * step;
      }
    }
    __syncthreads();
    if constexpr (Program::kPackedGradients) {
      store_packed_tile<kGradientThreads, Tile::kPitch>(program, sample, begin, count, tile.logits, gradients);
      __syncthreads();
    }
  }
}
