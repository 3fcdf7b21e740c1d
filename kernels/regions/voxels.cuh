// Region losses: voxels, their classes, and how each contributes to the sums of its sample.
//
//   input x (N, C, ...), target labels y (N, ...) or t (N, C, ...)
//   p = softmax over c of x, sigmoid(x) or x       t = [y = c], or as given
//   I = sum p t,  FP = sum p (1 - t),  FN = sum (1 - p) t                       for each sample n and class c
//
// 1. VoxelSpace gives the offsets of a voxel in every stream; ClassesOf reads its classes. With kClasses > 0 those of
//    kVecSize neighbouring voxels are in registers, of one thread or of kLanes lanes of a warp (LaneGroup); with
//    kTile > 0 those of as many voxels are in shared memory (TileClasses); otherwise every use reads memory, which is
//    in L1 or L2 by then.
// 2. VoxelSoftmax finds maximum and sum of exponentials. 1 - p of one class, the label or else the largest one, is the
//    sum of the others: 1 - p as written would cancel where p is close to 1.
// 3. Overlap has the summands of I, FP and FN, and the derivatives by p and t of a FP-weighted sum of them.
// 4. The loss of a voxel, if there is one, is an expression of the definition, on dual numbers (Row, Term, Element).
//
// Labels are data and may be wrong: a label that is no class is counted in its sample, reported, and never an index. An
// ignored or masked voxel contributes nothing, and nothing of what it holds is used.
//
// All is in registers of the thread that has the voxel, but for tiles. Preconditions: with kWide and kVecSize > 1
// neighbouring voxels are contiguous in input, target and gradients, and vectors aligned; with kPackedInput the classes
// of a voxel are contiguous, and its neighbours behind them.
#pragma once
#include "softmax/rows.cuh"

enum RegionStream { kInputs, kTargets, kVoxelMasks, kGradientsOfInputs, kGradientsOfTargets, kRegionStreams };
enum Activation { kSoftmax, kSigmoid, kProbabilities };
enum OverlapKind { kProduct, kMinimum, kSquared };
enum VoxelLoss { kNoVoxelLoss, kRow, kTerm, kElement };

// The value of a number, and a value with the tangent of another number. Numbers with a tangent have versions of their
// own (region_hvp.cuh).
template <class T>
__device__ __forceinline__ T value_of(T x) {
  return x;
}
template <class T>
__device__ __forceinline__ T with_tangent_of(T value, T) {
  return value;
}
// The exponential of a class, 0 of the label.
template <class T>
__device__ __forceinline__ T without_label(bool is_label, T e) {
  return is_label ? T(0) : e;
}

// Of numbers with a tangent, that too (region_hvp.cuh).
template <class T>
__device__ __forceinline__ bool all_finite(T x) {
  return is_finite(x);
}
// The value of a tentative loss. It is not finite if the loss is not; with tangents, if one of a derivative is not,
// either.
template <class T, unsigned kMask>
__device__ __forceinline__ T tried_result(const Dual<T, kMask>& loss) {
  return loss.value;
}

// A number as the loss of a voxel takes it, and one of its results as all else does. Those with a tangent differ in how
// they are multiplied (region_hvp.cuh).
template <class T>
__device__ __forceinline__ T guarded(T x) {
  return x;
}
template <class T>
__device__ __forceinline__ T unguarded(T x) {
  return x;
}

template <bool kGuarded, class T>
__device__ __forceinline__ auto guarded_if(T x) {
  if constexpr (kGuarded) {
    return guarded(x);
  } else {
    return x;
  }
}
// A derivative of that loss times a scale, as all else takes it.
template <class T>
__device__ __forceinline__ T scaled_by(T scale, T derivative) {
  return scale * derivative;
}

// Offsets of kVecSize neighbouring voxels in every stream. With kWide they are contiguous where that matters.
template <int kVecSize, bool kWide>
struct VectorOffsets {
  int64 of[kWide ? 1 : kVecSize][kRegionStreams];
  int64 mask_step;

  __device__ __forceinline__ int64 at(int stream, int i) const {
    return kWide ? of[0][stream] + i : of[i][stream];
  }
  __device__ __forceinline__ int64 mask(int i) const {
    return kWide ? of[0][kVoxelMasks] + i * mask_step : of[i][kVoxelMasks];
  }
};

// Sizes and strides: a kernel parameter.
template <int kRank>
struct VoxelSpace {
  static constexpr bool kOneDimension = kRank == 1;
  int64 samples;
  int64 voxels;  // of a sample
  int64 classes;
  int64 class_stride[kRegionStreams];
  int64 sample_stride[kRegionStreams];
  Dimensions<kRegionStreams, kRank> at;

  template <int kVecSize, bool kWide>
  __device__ __forceinline__ void offsets(int64 sample, int64 voxel, VectorOffsets<kVecSize, kWide>& offset) const {
    offset.mask_step = at.stride[kVoxelMasks][0];
#pragma unroll
    for (int i = 0; i < (kWide ? 1 : kVecSize); ++i) {
      if (!kOneDimension && voxels <= 0xffffffff) {
        at.offsets(static_cast<unsigned>(voxel + i), offset.of[i]);
      } else {
        at.offsets(voxel + i, offset.of[i]);
      }
#pragma unroll
      for (int s = 0; s < kRegionStreams; ++s) offset.of[i][s] += sample * sample_stride[s];
    }
  }
};

// The number of another lane. One with a tangent takes two steps (region_hvp.cuh).
__device__ __forceinline__ float shuffled_number(unsigned mask, float x, int lane) {
  return __shfl_sync(mask, x, lane);
}
__device__ __forceinline__ double shuffled_number(unsigned mask, double x, int lane) {
  return __shfl_sync(mask, x, lane);
}

// The kLanes lanes of a warp that share the classes of a vector of voxels: lanes v, v + kVectors and so on those of
// vector v of the warp. The first have kClasses neighbouring classes each, the others one less: in place of their last
// are logits of -inf or 0, and targets of 0. Each counts its own from 0, and so a label, the largest class, weights and
// coefficients: one of another lane is below 0, or not below the number of its own.
//
// Preconditions of the exchanges: all lanes of a group call them together.
template <int kLanes_>
struct LaneGroup {
  static constexpr int kLanes = kLanes_, kVectors = kWarp / kLanes;

  static __device__ __forceinline__ int lane() {
    return threadIdx.x % kWarp;
  }
  // The index of this group in its warp, that of this lane in the group, and the vector of this thread in its block.
  static __device__ __forceinline__ int group() {
    return lane() % kVectors;
  }
  static __device__ __forceinline__ int place() {
    return kLanes == 1 ? 0 : lane() / kVectors;
  }
  static __device__ __forceinline__ int vector() {
    return kLanes == 1 ? static_cast<int>(threadIdx.x) : static_cast<int>(threadIdx.x) / kWarp * kVectors + group();
  }
  static __device__ __forceinline__ unsigned mask() {
    unsigned found = 1u;
#pragma unroll
    for (int shift = kVectors; shift < kWarp; shift *= 2) found |= found << shift;
    return found << group();
  }
  template <class T>
  static __device__ __forceinline__ T sum(T x) {
#pragma unroll
    for (int offset = kVectors; offset < kWarp; offset *= 2) x += shuffled(x, lane() ^ offset);
    return x;
  }
  template <class T>
  static __device__ __forceinline__ T largest(T x) {
#pragma unroll
    for (int offset = kVectors; offset < kWarp; offset *= 2) x = max_ignoring_nan(x, shuffled(x, lane() ^ offset));
    return x;
  }
  // The first lane of the group for which something is true, or the lane of its first classes if there is none.
  static __device__ __forceinline__ int first_lane(bool is_true) {
    if constexpr (kLanes == 1) return lane();
    const unsigned lanes = __ballot_sync(mask(), is_true);
    return lanes == 0 ? group() : __ffs(lanes) - 1;
  }
  static __device__ __forceinline__ bool all(bool is_true) {
    return kLanes == 1 ? is_true : __all_sync(mask(), is_true) != 0;
  }
  template <class T>
  static __device__ __forceinline__ T from_lane(T x, int lane) {
    return kLanes == 1 ? x : shuffled(x, lane);
  }
  template <class T>
  static __device__ __forceinline__ T shuffled(T x, int lane) {
    return shuffled_number(mask(), x, lane);
  }
};

// Operands and the choices that kernels are compiled for.
template <class Loss_, class Space_, class Input_, class Target_, class Weight_, bool kMasked_, bool kDense_,
          int kActivation_, int kOverlap_, int kVoxel_, bool kSmoothed_, int kClasses_, int kLanes_, int kVecSize_,
          bool kWide_, int kTile_, int kTileWord_, bool kPackedInput_, bool kPackedGradients_, bool kByWarps_>
struct RegionProgram {
  using Loss = Loss_;
  using Space = Space_;
  using Guarded = typename Loss::Compute;
  using Compute = decltype(unguarded(Guarded(0)));
  using Input = Input_;
  using Target = Target_;
  using Weight = Weight_;
  static constexpr bool kMasked = kMasked_, kDense = kDense_, kSmoothed = kSmoothed_;
  static constexpr bool kWeighted = !kIsAbsent<Weight_>;
  static constexpr int kActivation = kActivation_, kOverlap = kOverlap_, kVoxel = kVoxel_;
  // Classes of a thread in registers, or 0, and lanes that share a voxel's.
  static constexpr int kClasses = kClasses_, kLanes = kLanes_, kVecSize = kVecSize_;
  using Lanes = LaneGroup<kLanes_>;
  static constexpr bool kWide = kWide_;
  // Voxels of a tile whose logits are in shared memory, or 0, and of a word in which they are copied; and whether the
  // classes of a voxel lie side by side, and its neighbours behind them, in the input and in its gradients.
  static constexpr int kTile = kTile_, kTileWord = kTileWord_;
  static constexpr bool kPackedInput = kPackedInput_, kPackedGradients = kPackedGradients_;
  // True if the lanes of a warp move such vectors together (PackedStretch).
  static constexpr bool kByWarps = kByWarps_;
  static constexpr int kUnroll = kClasses > 0 ? kClasses : 1;
  // Classes of a loop without a branch between them.
  static constexpr int kLoop = kClasses > 0 ? kClasses : (kTile > 0 ? 4 : 1);
  static constexpr bool kProductOfLabels = !kDense && kActivation == kSoftmax && kOverlap == kProduct;
  // Of a tile's logits no more than softmax and label is needed. They lie there as they are stored (StoredTile), of 16
  // bits or with a tangent; or exponentials take their places.
  static_assert(kTile == 0 || (kProductOfLabels && (kVoxel == kNoVoxelLoss || (kVoxel == kRow && !kSmoothed))),
                "labels alone");
  static constexpr bool kStoredTile = kTile > 0 && (sizeof(Input) == 2 || kHasTangent<Compute>);
  static constexpr bool kKeepsExponentials = kTile > 0 && !kStoredTile;
  // Labels under a softmax, with classes in registers or shared memory: the label's class is taken apart from the
  // others, which then need no comparison of their own for each sum.
  static constexpr bool kLabelApart = kProductOfLabels && kLanes == 1 && (kClasses > 0 || kTile > 0);
  static constexpr bool kNeedsSoftmax = kActivation == kSoftmax || kVoxel == kRow || kVoxel == kTerm;

  Loss loss;
  const Space_& space;  // a kernel parameter: a copy would go to local memory
  const Input* input;
  const Target* target;
  const Weight* weights;
  const bool* mask;
  int64 ignored;
  RowStatus* status;
  int64 site;

  __device__ __forceinline__ int classes() const {
    return kClasses > 0 && kLanes == 1 ? kClasses : static_cast<int>(space.classes);
  }
  // Those of a thread, the first of them, and true of one that exists.
  __device__ __forceinline__ int own_classes() const {
    return kClasses > 0 ? kClasses : static_cast<int>(space.classes);
  }
  __device__ __forceinline__ int first_own() const {
    return first_of(Lanes::place());
  }
  __device__ __forceinline__ bool has(int c) const {
    return has(Lanes::place(), c);
  }
  // Of the lane at a place of a group.
  __device__ __forceinline__ int first_of(int place) const {
    return kLanes == 1 ? 0 : place * (kClasses - 1) + min(place, full_lanes());
  }
  __device__ __forceinline__ bool has(int place, int c) const {
    return kLanes == 1 || c < kClasses - 1 || place < full_lanes();
  }
  // Lanes with kClasses classes.
  __device__ __forceinline__ int full_lanes() const {
    return static_cast<int>(space.classes) - kLanes * (kClasses - 1);
  }
  // The first class of a voxel in the input or its gradients.
  static __device__ __forceinline__ int64 first_class(const VectorOffsets<kVecSize, kWide>& offset, int stream, int i) {
    return kPackedInput && kClasses > 0 ? offset.at(stream, 0) + i * kClasses : offset.at(stream, i);
  }
  // The logit of a class of a voxel.
  __device__ __forceinline__ Compute logit(const VectorOffsets<kVecSize, kWide>& offset, int i, int64 c) const {
    return widen<Compute>(input[first_class(offset, kInputs, i) + c * space.class_stride[kInputs]]);
  }
  __device__ __forceinline__ Compute weight(int c) const {
    if constexpr (kWeighted) return widen<Compute>(load_pack<1>(weights + first_own() + c).element[0]);
    return Compute(1);
  }
};

// Reads kVecSize neighbouring elements: at once, or one by one.
template <bool kLast, class Program, class Storage>
__device__ __forceinline__ Pack<Storage, Program::kVecSize> load_voxels(
    const Storage* from, const VectorOffsets<Program::kVecSize, Program::kWide>& offset, int stream) {
  if constexpr (Program::kWide) {
    // Nothing reads again what kernel 2 reads.
    if constexpr (kLast) return load_stream<Program::kVecSize>(from + offset.at(stream, 0));
    return load_pack<Program::kVecSize>(from + offset.at(stream, 0));
  } else {
    Pack<Storage, Program::kVecSize> pack;
#pragma unroll
    for (int i = 0; i < Program::kVecSize; ++i) pack.element[i] = from[offset.at(stream, i)];
    return pack;
  }
}

// Which voxels of a vector count, and what is wrong with the others.
struct VoxelTarget {
  int label;    // -1, with kLabelApart 0, if it does not count
  bool sound;   // it counts, and its label is a class
  bool spoilt;  // it counts, and its label is none
};

// Zeros in place of the elements of a pack that do not count, in one instruction for each register and without a
// branch: the compiler interleaves the voxels of a vector.
template <class Storage, int kVecSize>
struct PackMask {
  using Register = typename WordOf<(sizeof(Storage) * kVecSize < 4 ? sizeof(Storage) * kVecSize : 4)>::type;
  static constexpr int kRegisters = sizeof(Storage) * kVecSize / sizeof(Register);
  Register kept[kRegisters];

  __device__ __forceinline__ explicit PackMask(const VoxelTarget (&targets)[kVecSize]) {
#pragma unroll
    for (int r = 0; r < kRegisters; ++r) {
      kept[r] = 0;
#pragma unroll
      for (int byte = 0; byte < static_cast<int>(sizeof(Register)); ++byte) {
        const int i = (r * static_cast<int>(sizeof(Register)) + byte) / static_cast<int>(sizeof(Storage));
        if (targets[i].sound) kept[r] |= static_cast<Register>(0xffu << 8 * byte);
      }
    }
  }
  __device__ __forceinline__ void apply(Pack<Storage, kVecSize>& x) const {
#pragma unroll
    for (int r = 0; r < kRegisters; ++r) reinterpret_cast<Register*>(&x)[r] &= kept[r];
  }
};

// The classes of kVecSize neighbouring voxels where they lie side by side, voxel by voxel: words that are as wide as
// divide them. Neighbouring threads have neighbouring vectors, whose sectors are whole in L1 or L2 between two words.
template <class Program>
struct PackedVector {
  using Input = typename Program::Input;
  static constexpr int kVecSize = Program::kVecSize, kClasses = Program::kClasses;
  static constexpr int kElements = kClasses * kVecSize;

  static constexpr int kMost = 16 / static_cast<int>(sizeof(Input));
  static constexpr int kEach = kElements % kMost == 0             ? kMost
                               : kElements % (kMost / 2) == 0     ? kMost / 2
                               : kMost >= 8 && kElements % 2 == 0 ? 2
                                                                  : 1;

  // An odd number of elements of 16 bits, of one voxel: words of 4 bytes, and the element in front of or behind them.
  static constexpr bool kInPairs = kEach == 1 && sizeof(Input) == 2 && kElements > 1;
  static constexpr int kPairs = kElements / 2;
  using Pair = Pack<Input, 2>;

  static __device__ __forceinline__ bool begins_behind_word(const Input* at) {
    return reinterpret_cast<unsigned long long>(at) % sizeof(Pair) != 0;
  }
  static __device__ __forceinline__ void load_pairs(const Input* from, Pack<Input, kVecSize> (&x)[kClasses]) {
    const bool behind = begins_behind_word(from);
    const unsigned which = behind ? 0x5432u : 0x7654u;
    Pair words[kPairs + 1];
    words[kPairs].element[0] = load_pack<1>(from + (behind ? 0 : kElements - 1)).element[0];
    words[kPairs].element[1] = words[kPairs].element[0];
#pragma unroll
    for (int j = 0; j < kPairs; ++j) words[j] = load_pack<2>(from + (behind ? 1 : 0) + 2 * j);
    unsigned before = reinterpret_cast<const unsigned&>(words[kPairs]);
#pragma unroll
    for (int j = 0; j <= kPairs; ++j) {
      const unsigned word = reinterpret_cast<const unsigned&>(words[j]);
      Pair pair;
      reinterpret_cast<unsigned&>(pair) = select_bytes(before, word, which);
      x[2 * j].element[0] = pair.element[0];
      if (j < kPairs) x[2 * j + 1].element[0] = pair.element[1];
      before = word;
    }
  }
  static __device__ __forceinline__ void store_pairs(Input* to, const Pack<Input, kVecSize> (&x)[kClasses]) {
    const bool behind = begins_behind_word(to);
    const unsigned which = behind ? 0x5432u : 0x3210u;
    unsigned words[kPairs + 1];
#pragma unroll
    for (int j = 0; j <= kPairs; ++j) {
      Pair pair;
      pair.element[0] = x[2 * j].element[0];
      pair.element[1] = x[j < kPairs ? 2 * j + 1 : 2 * j].element[0];
      words[j] = reinterpret_cast<const unsigned&>(pair);
    }
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      Pair pair;
      reinterpret_cast<unsigned&>(pair) = select_bytes(words[j], words[j + 1], which);
      store_pack<2>(to + (behind ? 1 : 0) + 2 * j, pair);
    }
    to[behind ? 0 : kElements - 1] = behind ? x[0].element[0] : x[kElements - 1].element[0];
  }

  static __device__ __forceinline__ void load(const Input* from, Pack<Input, kVecSize> (&x)[kClasses]) {
    if constexpr (kInPairs) return load_pairs(from, x);
#pragma unroll
    for (int first = 0; first < kElements; first += kEach) {
      const Pack<Input, kEach> word = load_pack<kEach>(from + first);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        x[(first + j) % kClasses].element[(first + j) / kClasses] = word.element[j];
      }
    }
  }
  static __device__ __forceinline__ void store(Input* to, const Pack<Input, kVecSize> (&x)[kClasses]) {
    if constexpr (kInPairs) return store_pairs(to, x);
#pragma unroll
    for (int first = 0; first < kElements; first += kEach) {
      Pack<Input, kEach> word;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        word.element[j] = x[(first + j) % kClasses].element[(first + j) / kClasses];
      }
      store_pack<kEach>(to + first, word);
    }
  }
};

// Vectors of neighbouring lanes whose classes lie side by side are one stretch of memory. Lanes read and write
// neighbouring words of it, and find their own vectors in shared memory: where each reads its own words, a request of a
// warp touches a sector for each lane.
//
//   load     start() of each operand, then wait(), then take() of each
//   store    put(), then write()
//
// Each operand has a place of its own, kPitch words for each thread of the block. Preconditions: the first `lanes`
// lanes of the warp call together, and have neighbouring vectors; `memory` is aligned to 16 bytes.
template <class Program>
struct PackedStretch {
  using Vector = PackedVector<Program>;
  using Input = typename Program::Input;
  static constexpr int kVecSize = Program::kVecSize, kClasses = Program::kClasses;
  static constexpr int kEach = Vector::kEach, kWords = Vector::kElements / kEach;
  // Odd, so that lanes which read their words one after another do not conflict in a bank.
  static constexpr int kPitch = kWords | 1;
  using Word = Pack<Input, kEach>;
  Word* words;  // of this warp
  int lanes;

  __device__ __forceinline__ PackedStretch(void* memory, int place, int lanes)
      : words(static_cast<Word*>(memory) +
              (place * static_cast<int>(blockDim.x) + threadIdx.x / kWarp * kWarp) * kPitch),
        lanes(lanes) {
  }
  static __device__ __forceinline__ int lane() {
    return threadIdx.x % kWarp;
  }
  // The place of a word of the stretch.
  static __device__ __forceinline__ int place_of(int word) {
    return word + (kPitch - kWords) * (word / kWords);
  }
  __device__ __forceinline__ void synchronize() const {
    __syncwarp(0xffffffffu >> (kWarp - lanes));
  }

  // Starts the copy of the stretch that the lane's vector `from` is part of, when nothing reads the place any more.
  __device__ __forceinline__ void start(const Input* from) const {
    const Word* const first = reinterpret_cast<const Word*>(from - lane() * Vector::kElements);
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      const int word = k * lanes + lane();
      cp_async(words + place_of(word), first + word);
    }
  }
  __device__ __forceinline__ void wait() const {
    cp_async_commit();
    cp_async_wait_all();
    synchronize();
  }
  __device__ __forceinline__ void take(Pack<Input, kVecSize> (&x)[kClasses]) const {
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      const Word word = load_words(words + lane() * kPitch + k);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int element = k * kEach + j;
        x[element % kClasses].element[element / kClasses] = word.element[j];
      }
    }
  }
  __device__ __forceinline__ void put(const Pack<Input, kVecSize> (&x)[kClasses]) const {
    synchronize();
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      Word word;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const int element = k * kEach + j;
        word.element[j] = x[element % kClasses].element[element / kClasses];
      }
      words[lane() * kPitch + k] = word;
    }
    synchronize();
  }
  // Writes the stretch that the lane's vector `to` is part of.
  __device__ __forceinline__ void write(Input* to) const {
    Word* const first = reinterpret_cast<Word*>(to - lane() * Vector::kElements);
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      const int word = k * lanes + lane();
      store_pack<kEach>(reinterpret_cast<Input*>(first + word), words[place_of(word)]);
    }
  }
};

// Lanes of this thread's warp that have vectors, where `left` vectors are left from that of the thread on; and memory
// that they may use together.
struct WarpOfVectors {
  void* memory;
  int lanes;

  __device__ __forceinline__ WarpOfVectors(void* memory, int64 left) : memory(memory) {
    const int64 of_warp = left + threadIdx.x % kWarp;
    lanes = of_warp < kWarp ? static_cast<int>(of_warp) : kWarp;
  }
};

template <class Program>
__device__ __forceinline__ void store_packed(
    typename Program::Input* to, const WarpOfVectors& warp,
    const Pack<typename Program::Input, Program::kVecSize> (&x)[Program::kClasses]) {
  if constexpr (Program::kByWarps) {
    const PackedStretch<Program> stretch(warp.memory, 0, warp.lanes);
    stretch.put(x);
    stretch.write(to);
  } else {
    PackedVector<Program>::store(to, x);
  }
}

// The largest logit of voxel i of a vector. Those of 16 bits are compared in pairs of voxels.
template <class Number, class Storage, int kVecSize, int kClasses>
__device__ __forceinline__ Number largest_logit(const Pack<Storage, kVecSize> (&x)[kClasses], int i) {
  if constexpr (sizeof(Storage) == 2 && kVecSize % 2 == 0 && kHasPairMax) {
    Pack<Storage, 2> pair;
    unsigned& word = reinterpret_cast<unsigned&>(pair);
    word = reinterpret_cast<const unsigned*>(&x[0])[i / 2];
#pragma unroll
    for (int c = 1; c < kClasses; ++c) {
      word = max_pair(word, reinterpret_cast<const unsigned*>(&x[c])[i / 2], Storage{});
    }
    return widen_element<Number>(pair, i % 2);
  } else {
    Number y = widen_element<Number>(x[0], i);
#pragma unroll
    for (int c = 1; c < kClasses; ++c) y = max_ignoring_nan(y, widen_element<Number>(x[c], i));
    return y;
  }
}

// The logits of a class that does not exist: its exponentials are 0.
template <class Program>
__device__ __forceinline__ Pack<typename Program::Input, Program::kVecSize> no_logits() {
  using Scalar = decltype(value_of(typename Program::Compute(0)));
  Pack<typename Program::Input, Program::kVecSize> x;
#pragma unroll
  for (int i = 0; i < Program::kVecSize; ++i) {
    x.element[i] =
        Narrow<typename Program::Input>::from(Program::kNeedsSoftmax ? -scalar_infinity(Scalar()) : Scalar(0));
  }
  return x;
}

// The targets of kVecSize neighbouring voxels: labels, or a target for each class.
template <bool kLast, class Program, int kTargets_>
__device__ __forceinline__ void load_target_vectors(const Program& program,
                                                    const VectorOffsets<Program::kVecSize, Program::kWide>& offset,
                                                    Pack<typename Program::Target, Program::kVecSize> (&t)[kTargets_]) {
  const int64 stride = program.space.class_stride[kTargets];
  const auto* const first = program.target + (Program::kDense ? program.first_own() * stride : 0);
#pragma unroll
  for (int c = 0; c < kTargets_; ++c) {
    if (Program::kDense && !program.has(c)) {
      t[c] = Pack<typename Program::Target, Program::kVecSize>{};
      continue;
    }
    t[c] = load_voxels<kLast, Program>(first + c * stride, offset, kTargets);
  }
}

// The classes of kVecSize neighbouring voxels as they are stored. `warp`: the lanes that have such vectors, this one
// among them.
template <class Program, bool kOnChip = (Program::kClasses > 0)>
struct ClassesOf {
  using Compute = typename Program::Compute;
  static constexpr int kVecSize = Program::kVecSize;
  Pack<typename Program::Input, kVecSize> x[Program::kClasses];
  Pack<typename Program::Target, kVecSize> t[Program::kDense ? Program::kClasses : 1];

  template <bool kLast>
  __device__ __forceinline__ void load(const Program& program, const VectorOffsets<kVecSize, Program::kWide>& offset,
                                       const WarpOfVectors& warp) {
    if constexpr (Program::kPackedInput && Program::kByWarps) {
      const PackedStretch<Program> stretch(warp.memory, 0, warp.lanes);
      stretch.synchronize();  // what lies there has been read
      stretch.start(program.input + offset.at(kInputs, 0));
      stretch.wait();
      stretch.take(x);
    } else if constexpr (Program::kPackedInput) {
      PackedVector<Program>::load(program.input + offset.at(kInputs, 0), x);
    } else {
      const auto* const first = program.input + program.first_own() * program.space.class_stride[kInputs];
#pragma unroll
      for (int c = 0; c < Program::kClasses; ++c) {
        if (!program.has(c)) {
          x[c] = no_logits<Program>();
          continue;
        }
        x[c] = load_voxels<kLast, Program>(first + c * program.space.class_stride[kInputs], offset, kInputs);
      }
    }
    load_targets<kLast>(program, offset);
  }
  template <bool kLast>
  __device__ __forceinline__ void load_targets(const Program& program,
                                               const VectorOffsets<kVecSize, Program::kWide>& offset) {
    load_target_vectors<kLast>(program, offset, t);
  }
  static __device__ __forceinline__ int count() {
    return Program::kClasses;
  }
  __device__ __forceinline__ Compute input(int c, int i) const {
    Compute y[kVecSize];
    unpack(x[c], y);
    return y[i];
  }
  __device__ __forceinline__ Compute largest(int i) const {
    return largest_logit<Compute>(x, i);
  }
  __device__ __forceinline__ Compute target(int c, int i) const {
    return widen<Compute>(t[Program::kDense ? c : 0].element[i]);
  }
  __device__ __forceinline__ int64 label(int i) const {
    return static_cast<int64>(t[0].element[i]);
  }
  // Zeros in place of the logits of voxels that do not count.
  __device__ __forceinline__ void keep(const PackMask<typename Program::Input, kVecSize>& mask) {
#pragma unroll
    for (int c = 0; c < Program::kClasses; ++c) mask.apply(x[c]);
  }
};

// Classes of one voxel, read from memory: logits, and a target per class.
template <class Program>
struct ClassesOf<Program, false> {
  using Compute = typename Program::Compute;
  const typename Program::Input* x;
  const typename Program::Target* t;
  int64 stride, target_stride;

  template <bool kLast>
  __device__ __forceinline__ void load(const Program& program,
                                       const VectorOffsets<Program::kVecSize, Program::kWide>& offset,
                                       const WarpOfVectors&) {
    x = program.input + offset.at(kInputs, 0);
    t = program.target + offset.at(kTargets, 0);
    stride = program.space.class_stride[kInputs];
    target_stride = program.space.class_stride[kTargets];
  }
  __device__ __forceinline__ Compute input(int c, int) const {
    return widen<Compute>(load_pack<1>(x + c * stride).element[0]);
  }
  __device__ __forceinline__ Compute target(int c, int) const {
    return widen<Compute>(load_pack<1>(t + c * target_stride).element[0]);
  }
  __device__ __forceinline__ int64 label(int) const {
    return static_cast<int64>(*t);
  }
};

// Classes of one voxel of a tile: logits in shared memory, in which a class's voxels lie side by side.
template <class Program>
struct TileClasses {
  using Compute = typename Program::Compute;
  using Offset = VectorOffsets<Program::kVecSize, Program::kWide>;
  // Odd, so that neither the voxels of a class nor the classes of a voxel conflict in a bank.
  static constexpr int kPitch = Program::kTile + 1;
  Compute* x;
  const typename Program::Target* t;
  int number;  // of classes

  __device__ __forceinline__ TileClasses(const Program& program, Compute* tile, int voxel, const Offset& offset)
      : x(tile + voxel), t(program.target + offset.at(kTargets, 0)), number(program.classes()) {
  }
  __device__ __forceinline__ int count() const {
    return number;
  }
  // A logit, or, with kKeepsExponentials behind VoxelSoftmax::find_apart, its exponential.
  __device__ __forceinline__ Compute input(int c, int) const {
    return x[c * kPitch];
  }
  __device__ __forceinline__ void overwrite(int c, Compute y) const {
    x[c * kPitch] = y;
  }
  __device__ __forceinline__ Compute largest(int) const {
    Compute y = x[0];
#pragma unroll 4
    for (int c = 1; c < number; ++c) y = max_ignoring_nan(y, x[c * kPitch]);
    return y;
  }
  __device__ __forceinline__ int64 label(int) const {
    return static_cast<int64>(*t);
  }
};

// Elements of a tile that a thread has in flight, if they pass through its registers.
constexpr int kTileBatch = 16;
constexpr int kStoredBatch = 8;

// Copies elements to a tile, of which element k of this thread is `from(k)` and belongs to `to(k)`, for k below
// `count`; `converted` is what a pack of one is stored as. A batch has no loop behind it, whose loads would wait for
// each other.
template <int kBatch, class Input, class From, class To, class Converted>
__device__ __forceinline__ void copy_in_batches(int count, const From& from, const To& to, const Converted& converted) {
#pragma unroll 1
  for (int first = 0; first < count; first += kBatch) {
    Pack<Input, 1> x[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (first + k < count) x[k] = load_pack<1>(from(first + k));
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (first + k < count) *to(first + k) = converted(x[k]);
    }
  }
}

// Version for numbers of the arithmetic. Those that are stored as such go without registers, all at once.
template <class Input, class Compute, class From, class To>
__device__ __forceinline__ void copy_to_tile(int count, const From& from, const To& to) {
  if constexpr (kSameType<Input, Compute>) {
#pragma unroll 4
    for (int k = 0; k < count; ++k) cp_async_element(to(k), from(k));
    cp_async_commit();
    cp_async_wait_all();
  } else {
    copy_in_batches<kTileBatch, Input>(count, from, to,
                                       [](const Pack<Input, 1>& x) { return widen_element<Compute>(x, 0); });
  }
}

// i / divisor = i times this number / 2^32: exact for the elements of a tile, as kTile C^2 is below 2^32.
__device__ __forceinline__ unsigned inverse_of(int divisor) {
  return 0xffffffffu / static_cast<unsigned>(divisor) + 1u;
}
__device__ __forceinline__ int divided(int i, unsigned inverse) {
  return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(i)) * inverse >> 32);
}

// True if elements of 2 bytes from `first` on are words of 4 bytes in pairs.
template <class Storage>
__device__ __forceinline__ bool in_pairs(const Storage* first) {
  return sizeof(Storage) == 2 && reinterpret_cast<unsigned long long>(first) % 4 == 0;
}

// Places in a tile of elements 2 j and 2 j + 1 of voxels whose classes lie side by side, for every kThreads-th j from
// that of this thread on, without a division for each.
template <int kThreads, int kPitch>
struct PairPlaces {
  static constexpr int kApart = 2 * kThreads;
  int classes, classes_apart, to_next, to_next_voxel;
  int c, first;

  __device__ __forceinline__ explicit PairPlaces(int classes) : classes(classes) {
    const unsigned inverse = inverse_of(classes);
    const int i = 2 * static_cast<int>(threadIdx.x), voxel = divided(i, inverse);
    const int voxels_apart = divided(kApart, inverse);
    classes_apart = kApart - voxels_apart * classes;
    to_next = classes_apart * kPitch + voxels_apart;
    to_next_voxel = 1 - classes * kPitch;
    c = i - voxel * classes;
    first = c * kPitch + voxel;
  }
  __device__ __forceinline__ int second() const {
    return first + kPitch + (c + 1 == classes ? to_next_voxel : 0);
  }
  __device__ __forceinline__ void next() {
    c += classes_apart;
    first += to_next;
    if (c >= classes) {
      c -= classes;
      first += to_next_voxel;
    }
  }
};

// Copies `count` voxels of a sample from `begin` on to a tile. Preconditions: blockDim.x is kThreads, a multiple of
// kTile; all threads call it, with a barrier before, for what they have read of the tile, and another behind.
template <int kThreads, class Program>
__device__ __forceinline__ void load_tile(const Program& program, int64 sample, int64 begin, int count,
                                          typename Program::Compute* tile) {
  using Compute = typename Program::Compute;
  using Input = typename Program::Input;
  constexpr int kPitch = TileClasses<Program>::kPitch;
  const int classes = program.classes(), thread = threadIdx.x;
  if constexpr (Program::kPackedInput) {
    const Input* const first = program.input + sample * program.space.sample_stride[kInputs] + begin * classes;
    const int own = (count * classes - thread + kThreads - 1) / kThreads;
    const unsigned inverse = inverse_of(classes);
    copy_to_tile<Input, Compute>(
        own, [=](int k) { return first + thread + k * kThreads; },
        [=](int k) {
          const int i = thread + k * kThreads, voxel = divided(i, inverse);
          return tile + (i - voxel * classes) * kPitch + voxel;
        });
  } else {
    constexpr int kApart = kThreads / Program::kTile;
    const int voxel = thread % Program::kTile, c = thread / Program::kTile;
    if (voxel >= count) return;
    VectorOffsets<Program::kVecSize, Program::kWide> offset;
    program.space.offsets(sample, begin + voxel, offset);
    const int64 step = program.space.class_stride[kInputs];
    const Input* const first = program.input + offset.at(kInputs, 0) + c * step;
    Compute* const to = tile + c * kPitch + voxel;
    copy_to_tile<Input, Compute>((classes - c + kApart - 1) / kApart,
                                 [=](int k) { return first + k * (kApart * step); },
                                 [=](int k) { return to + k * (kApart * kPitch); });
  }
}

template <class Program, class Classes>
__device__ __forceinline__ VoxelTarget voxel_target(const Program& program, const Classes& classes,
                                                    const VectorOffsets<Program::kVecSize, Program::kWide>& offset,
                                                    int i) {
  bool counts = true;
  if constexpr (Program::kMasked) counts = program.mask[offset.mask(i)];
  VoxelTarget found{0, counts, false};
  if constexpr (!Program::kDense) {
    // Labels of up to 16 bits are compared in 32 bits, where none of them is kNoLabel.
    constexpr bool kShort = sizeof(typename Program::Target) <= 2;
    constexpr int kNoLabel = 1 << 20;
    using Label = Choose<kShort, int, int64>;
    using Unsigned = Choose<kShort, unsigned, unsigned long long>;
    const int64 given = classes.label(i), limit = program.classes();
    const Label label = static_cast<Label>(given);
    const bool is_short = program.ignored == static_cast<Label>(program.ignored);
    const Label ignored = is_short ? static_cast<Label>(program.ignored) : kNoLabel;
    counts = counts && label != ignored;
    const Unsigned classes_count = static_cast<Unsigned>(kShort && limit > kNoLabel ? kNoLabel : limit);
    const bool in_range = static_cast<Unsigned>(label) < classes_count;
    found.sound = counts && in_range;
    found.spoilt = counts && !in_range;
    // No class of any lane is that of a voxel that does not count.
    const int own = static_cast<int>(label) - program.first_own();
    found.label = found.sound ? own : (Program::kLabelApart ? 0 : -program.classes() - 1);
  }
  return found;
}

__device__ __forceinline__ float exp2_of_difference(float x, float max_logit) {
  return exp2_ftz(fmaf(x, kLog2E, -max_logit * kLog2E));
}
// exp(x - max_logit) of a logit that is stored as `Input`, with kNarrow in two instructions.
template <class Input, class Compute>
__device__ __forceinline__ Compute difference_exponential(Compute x, Compute max_logit) {
  if constexpr (kNarrow && kSingle<Compute>) return exp2_of_difference(x, max_logit);
  return exp_of_difference(x - max_logit);
}

// Softmax of one voxel.
template <class Program, bool kOnChip = (Program::kClasses > 0)>
struct VoxelSoftmax {
  using Compute = typename Program::Compute;
  Compute max_logit;
  Compute inv_sum;
  Compute others;  // sum of exponentials without that of `pivot`
  Compute sum;
  int pivot;  // the label; the largest class of a target per class
  Compute e[kOnChip ? Program::kUnroll : 1];
  // With kLabelApart: the label's logit and exponential, which is 0 in `e`.
  Compute label_logit;
  Compute label_e;

  // The logit of the label is read again: to select it among registers takes an instruction for every class.
  template <class Classes>
  __device__ __forceinline__ void find_apart(const Program& program, const Classes& classes,
                                             const VectorOffsets<Program::kVecSize, Program::kWide>& offset, int i,
                                             const VoxelTarget& target) {
    const int label = target.label;
    if constexpr (Program::kTile > 0) {
      const Compute logit = classes.input(label, i);
      classes.overwrite(label, -scalar_infinity(Compute()));
      find_apart<true>(classes, i, target, logit);
    } else {
      find_apart<false>(classes, i, target, program.logit(offset, i, label));
    }
  }
  // With kLabelOut the label's logit is -inf among the classes.
  template <bool kLabelOut, class Classes>
  __device__ __forceinline__ void find_apart(const Classes& classes, int i, const VoxelTarget& target, Compute logit) {
    const int label = target.label;
    label_logit = target.sound ? logit : Compute(0);
    auto largest = classes.largest(i);
    if constexpr (kLabelOut) largest = max_ignoring_nan(largest, value_of(label_logit));
    // A tangent of the maximum cancels in all that follows.
    max_logit = with_tangent_of(largest, label_logit);
    pivot = label;
    others = Compute(0);
#pragma unroll(Program::kLoop)
    for (int c = 0; c < classes.count(); ++c) {
      Compute y = difference_exponential<typename Program::Input>(classes.input(c, i), max_logit);
      if constexpr (!kLabelOut) y = without_label(c == label, y);
      keep(classes, c, y);
      others += y;
    }
    // As in row_result, for which the compiler then finds it and the sum once.
    label_e = exp_of_difference(label_logit - max_logit);
    sum = others + label_e;
    inv_sum = scalar_divide_closely(Compute(1), sum);
  }

  template <class Classes>
  __device__ __forceinline__ void find(const Program& program, const Classes& classes, int i, int label) {
    using Lanes = typename Program::Lanes;
    max_logit = -scalar_infinity(Compute());
#pragma unroll(Program::kLoop)
    for (int c = 0; c < program.own_classes(); ++c) max_logit = max_ignoring_nan(max_logit, classes.input(c, i));
    pivot = label;
    bool found = false;
    if constexpr (Program::kLanes > 1) {
      // One lane has the largest class and gives its logit, with its tangent, to all.
      const int owner = Lanes::first_lane(value_of(max_logit) == Lanes::largest(value_of(max_logit)));
      max_logit = Lanes::from_lane(max_logit, owner);
      found = owner != Lanes::lane();
      if constexpr (Program::kDense) pivot = -1;
    }
    others = sum = Compute(0);
#pragma unroll(Program::kLoop)
    for (int c = 0; c < program.own_classes(); ++c) {
      const Compute x = classes.input(c, i), y = exp_of_difference(x - max_logit);
      keep(classes, c, y);
      bool is_pivot = c == label;
      if constexpr (Program::kDense) {
        is_pivot = !found && x == max_logit;
        pivot = is_pivot ? c : pivot;
        found = found || is_pivot;
      }
      others += is_pivot ? Compute(0) : y;
      sum += y;
    }
    others = Lanes::sum(others);
    sum = Lanes::sum(sum);
    inv_sum = scalar_divide_closely(Compute(1), sum);
  }
  template <class Classes>
  __device__ __forceinline__ void keep(const Classes& classes, int c, Compute y) {
    if constexpr (kOnChip) e[c] = y;
    if constexpr (Program::kKeepsExponentials) classes.overwrite(c, y);
  }
  template <class Classes>
  __device__ __forceinline__ Compute exponential(const Classes& classes, int c, int i) const {
    if constexpr (kOnChip) return e[c];
    if constexpr (Program::kKeepsExponentials) return classes.input(c, i);
    return exp_of_difference(classes.input(c, i) - max_logit);
  }
};

// p and 1 - p of a class.
template <class Compute>
struct Probability {
  Compute p;
  Compute rest;
};

template <class Compute>
__device__ __forceinline__ Probability<Compute> sigmoid_of(Compute x) {
  const Compute e = exp_of_difference(-scalar_abs(x));
  const Compute large = scalar_divide_closely(Compute(1), Compute(1) + e), small = e * large;
  return x >= Compute(0) ? Probability<Compute>{large, small} : Probability<Compute>{small, large};
}

template <class Program, class Classes>
__device__ __forceinline__ Probability<typename Program::Compute> probability(const Program&, const Classes& classes,
                                                                              const VoxelSoftmax<Program>& softmax,
                                                                              int c, int i) {
  using Compute = typename Program::Compute;
  if constexpr (Program::kActivation == kSoftmax) {
    const Compute e = softmax.exponential(classes, c, i);
    const Compute others = c == softmax.pivot ? softmax.others : softmax.sum - e;
    return {e * softmax.inv_sum, others * softmax.inv_sum};
  } else {
    const Compute x = classes.input(c, i);
    if constexpr (Program::kActivation == kSigmoid) return sigmoid_of(x);
    return {x, Compute(1) - x};
  }
}

// Summands of I, FP and FN, and the derivatives of a I + b FP + c FN.
template <class Compute>
struct Summands {
  Compute hit;
  Compute false_positive;
  Compute false_negative;
};

// p - t, with the digits of 1 - p.
template <class Compute>
__device__ __forceinline__ Compute apart(const Probability<Compute>& p, Compute t) {
  return t == Compute(1) ? -p.rest : p.p - t;
}

template <int kOverlap, class Compute>
__device__ __forceinline__ Summands<Compute> summands(const Probability<Compute>& p, Compute t) {
  if constexpr (kOverlap == kProduct) {
    return {p.p * t, p.p * (Compute(1) - t), p.rest * t};
  } else {
    const Compute d = apart(p, t);
    if constexpr (kOverlap == kSquared) return {p.p * t, p.p * d, -t * d};
    // A NaN is in all three.
    return {d < Compute(0) ? p.p : t + d * Compute(0), d < Compute(0) ? Compute(0) : d,
            d > Compute(0) ? Compute(0) : -d};
  }
}

template <int kOverlap, class Compute>
__device__ __forceinline__ Compute derivative_by_p(const Summands<Compute>& g, const Probability<Compute>& p,
                                                   Compute t) {
  const Compute a = g.hit, b = g.false_positive, c = g.false_negative;
  if constexpr (kOverlap == kProduct) {
    return t == Compute(1) ? a - c : (a - b - c) * t + b;
  } else {
    if constexpr (kOverlap == kSquared) return (a - b - c) * t + Compute(2) * b * p.p;
    const Compute d = apart(p, t);
    return d < Compute(0) ? a - c : (d > Compute(0) ? b : Compute(0.5) * (a + b - c));
  }
}

template <int kOverlap, class Compute>
__device__ __forceinline__ Compute derivative_by_t(const Summands<Compute>& g, const Probability<Compute>& p,
                                                   Compute t) {
  const Compute a = g.hit, b = g.false_positive, c = g.false_negative;
  if constexpr (kOverlap == kProduct) {
    return (a - b - c) * p.p + c;
  } else {
    if constexpr (kOverlap == kSquared) return (a - b - c) * p.p + Compute(2) * c * t;
    const Compute d = apart(p, t);
    return d < Compute(0) ? c : (d > Compute(0) ? a - b : Compute(0.5) * (a - b + c));
  }
}

// The target of a class as a number. Labels are compared, and nothing is stored.
template <class Program, class Classes>
__device__ __forceinline__ typename Program::Compute target_of(const Classes& classes, const VoxelTarget& target, int c,
                                                               int i) {
  using Compute = typename Program::Compute;
  if constexpr (Program::kDense) return classes.target(c, i);
  return c == target.label ? Compute(1) : Compute(0);
}

// The loss of a voxel and its share of the divisor of a mean.
template <class Compute>
struct VoxelCost {
  Compute value;
  Compute count;
};

// Numbers that the loss of a label under a softmax leaves for its gradient. kMarksLost: that of row_result.
template <bool kMarksLost = true, class Program, class Classes>
__device__ __forceinline__ RowResult<typename Program::Guarded> voxel_row(const Program& program,
                                                                          const Classes& classes,
                                                                          const VoxelSoftmax<Program>& softmax,
                                                                          int label, int i) {
  using Compute = typename Program::Compute;
  using Guarded = typename Program::Guarded;
  RowSums<Guarded, Program::kSmoothed> sums;
  sums.softmax.max_logit = guarded(softmax.max_logit);
  sums.softmax.exp_sum = guarded(softmax.others);
  sums.weighted_gap = sums.weight_sum = Guarded(0);
  Compute z = Compute(0);
  if constexpr (Program::kLabelApart) {
    z = softmax.label_logit;
  } else {
#pragma unroll(Program::kLoop)
    for (int c = 0; c < program.own_classes(); ++c) {
      // Read in front of the comparison: behind it the index would be the label, and the array in local memory.
      const Compute x = force_computed(classes.input(c, i));
      z = c == label && program.has(c) ? x : z;
    }
    z = Program::Lanes::sum(z);
  }
  if constexpr (Program::kSmoothed) {
#pragma unroll(Program::kLoop)
    for (int c = 0; c < program.own_classes(); ++c) {
      if (!program.has(c)) continue;
      const Guarded weight = guarded(program.weight(c));
      sums.weight_sum += weight;
      sums.weighted_gap += is_zero(weight) ? Guarded(0) : weight * guarded(z - classes.input(c, i));
    }
    sums.weight_sum = Program::Lanes::sum(sums.weight_sum);
    sums.weighted_gap = Program::Lanes::sum(sums.weighted_gap);
  }
  return row_result<Program::kSmoothed, kMarksLost>(program.loss, guarded(z), sums, guarded(program.weight(label)),
                                                    program.space.classes);
}

// log p_c, given the softmax.
template <class Program, class Classes>
__device__ __forceinline__ typename Program::Compute log_probability(const Classes& classes,
                                                                     const VoxelSoftmax<Program>& softmax, int c, int i,
                                                                     typename Program::Compute log_sum) {
  return (classes.input(c, i) - softmax.max_logit) - log_sum;
}

template <class Program>
__device__ __forceinline__ typename Program::Compute log_of_sum(const VoxelSoftmax<Program>& softmax) {
  using Compute = typename Program::Compute;
  // The largest exponential is 1.
  return scalar_log1p(Program::kDense ? softmax.others : softmax.sum - Compute(1));
}

// The loss of a class of a voxel by its logit. kMode: bit 0 if it is differentiated by the logit, bit 1 by the target;
// kTentative.
template <unsigned kMode, class Program, class Classes>
__device__ __forceinline__ auto element_loss(const Program& program, const Classes& classes, int c, int i,
                                             typename Program::Compute t) {
  using Compute = typename Program::Compute;
  constexpr bool kGuarded = (kMode & kTentative) == 0;
  return program.loss(variable<kMode, 0>(guarded_if<kGuarded>(classes.input(c, i))),
                      variable<kMode, 1>(guarded_if<kGuarded>(t)),
                      variable<kMode, 2>(guarded_if<kGuarded>(program.weight(c))),
                      variable<kMode, 3>(guarded_if<kGuarded>(Compute(program.space.classes))));
}

// The sum of these losses over the classes of a thread.
template <unsigned kMode, class Program, class Classes>
__device__ __forceinline__ typename Program::Compute element_sum(const Program& program, const Classes& classes,
                                                                 const VoxelTarget& target, int i) {
  typename Program::Compute total(0);
#pragma unroll(Program::kLoop)
  for (int c = 0; c < program.own_classes(); ++c) {
    if (!program.has(c)) continue;
    total += unguarded(element_loss<kMode>(program, classes, c, i, target_of<Program>(classes, target, c, i)).value);
  }
  return total;
}

// Of lanes that share a voxel each has its part.
template <class Program, class Classes>
__device__ __forceinline__ VoxelCost<typename Program::Compute> voxel_cost(const Program& program,
                                                                           const Classes& classes,
                                                                           const VoxelSoftmax<Program>& softmax,
                                                                           const VoxelTarget& target, int i) {
  using Compute = typename Program::Compute;
  const bool is_first = Program::Lanes::place() == 0;
  if constexpr (Program::kVoxel == kRow) {
    const Compute value = unguarded(voxel_row(program, classes, softmax, target.label, i).value);
    if (!is_first) return {Compute(0), Compute(0)};
    return {value, Program::Loss::kOfWeights ? program.weight(target.label) : Compute(1)};
  } else if constexpr (Program::kVoxel == kElement) {
    const Compute count = is_first ? Compute(program.space.classes) : Compute(0);
    if constexpr (Program::Loss::kTriedFirst) {
      Compute total(0);
      bool done = false;
      if (program.loss.usual()) {
        total = element_sum<kTentative>(program, classes, target, i);
        done = all_finite(total);
      }
      // Opaque, or the compiler has what follows twice.
      if (opaque(static_cast<unsigned>(done)) != 0) return {total, count};
    }
    return {element_sum<0u>(program, classes, target, i), count};
  } else {
    using Guarded = typename Program::Guarded;
    Guarded total = Guarded(0);
    const Compute log_sum = log_of_sum(softmax);
#pragma unroll(Program::kLoop)
    for (int c = 0; c < program.own_classes(); ++c) {
      if (!program.has(c)) continue;
      const auto t = variable<0u, 1>(guarded(target_of<Program>(classes, target, c, i)));
      const auto weight = variable<0u, 2>(guarded(program.weight(c)));
      const Guarded log_p = guarded(log_probability(classes, softmax, c, i, log_sum));
      total += program.loss(variable<0u, 0>(log_p), t, weight, variable<0u, 3>(Guarded(program.space.classes))).value;
    }
    return {unguarded(total), is_first ? Compute(1) : Compute(0)};
  }
}

// The next vector of a thread on its way to shared memory while it computes with the one before: two places, each with
// a pack of logits for each class and thread, and a pack of labels for each thread. A thread reads what it copied
// itself. There the label's logit is taken out, and -inf left in its place, whose exponential is 0: among registers
// that would take a comparison and a selection for every class.
template <class Program, int kThreads>
struct StagedVectors {
  using Compute = typename Program::Compute;
  using Input = typename Program::Input;
  using Target = typename Program::Target;
  static constexpr int kVecSize = Program::kVecSize, kClasses = Program::kClasses;
  using Logits = Pack<Input, kVecSize>;
  using Labels = Pack<Target, kVecSize>;
  // A copy has 4 bytes at least: two labels of a byte come with their neighbours.
  using LabelWord = typename Labels::Word;
  static constexpr int kLabelBytes = sizeof(Labels) < 4 ? 4 : sizeof(Labels);
  static constexpr int kPlaceBytes = kThreads * (kClasses * static_cast<int>(sizeof(Logits)) + kLabelBytes);
  char* places;
  // The next vector to be copied, and how far the one behind it is.
  const Input* input;
  const Target* target;
  int64 input_step, target_step;
  int64 class_stride;
  int copied = 0, taken = 0;  // places of the next vectors to be copied and taken

  __device__ __forceinline__ StagedVectors(void* places, const Program& program,
                                           const VectorOffsets<kVecSize, Program::kWide>& first, int step)
      : places(static_cast<char*>(places)),
        input(program.input + first.at(kInputs, 0)),
        target(program.target + first.at(kTargets, 0)),
        input_step(step * kVecSize),
        target_step(step * kVecSize),
        class_stride(program.space.class_stride[kInputs]) {
  }
  __device__ __forceinline__ Logits* logits_of(int place) const {
    return reinterpret_cast<Logits*>(places + place) + threadIdx.x;
  }
  __device__ __forceinline__ char* labels_of(int place) const {
    return places + place + kThreads * kClasses * sizeof(Logits) + threadIdx.x * kLabelBytes;
  }
  static __device__ __forceinline__ int other(int place) {
    return kPlaceBytes - place;
  }
  // Starts the copy of the next vector, if `exists`.
  __device__ __forceinline__ void copy(bool exists) {
    if (exists) {
      Logits* const own = logits_of(copied);
#pragma unroll
      for (int c = 0; c < kClasses; ++c) cp_async_bytes<sizeof(Logits)>(own + c * kThreads, input + c * class_stride);
#pragma unroll
      for (int i = 0; i < Labels::kWords; ++i) {
        cp_async_element(labels_of(copied) + i * sizeof(LabelWord), reinterpret_cast<const LabelWord*>(target) + i);
      }
      input += input_step;
      target += target_step;
    }
    cp_async_commit();
    copied = other(copied);
  }
  // Waits for the vector that is taken next, while the one behind it is on its way.
  __device__ __forceinline__ Labels wait() const {
    cp_async_wait_groups<1>();
    // Labels that came with their neighbours lie as in memory.
    const unsigned at = sizeof(Labels) == 2 ? reinterpret_cast<unsigned long long>(target) % 4 : 0;
    Labels labels;
#pragma unroll
    for (int i = 0; i < Labels::kWords; ++i) {
      reinterpret_cast<LabelWord*>(&labels)[i] = reinterpret_cast<const LabelWord*>(labels_of(taken) + at)[i];
    }
    return labels;
  }
  __device__ __forceinline__ Compute take_label(int label, int i) const {
    Input& element = logits_of(taken)[label * kThreads].element[i];
    const Compute logit = widen<Compute>(element);
    element = Narrow<Input>::from(-scalar_infinity(Compute()));
    return logit;
  }
  __device__ __forceinline__ void take(Logits (&logits)[kClasses]) {
    const Logits* const own = logits_of(taken);
#pragma unroll
    for (int c = 0; c < kClasses; ++c) logits[c] = load_words(own + c * kThreads);
    taken = other(taken);
  }
};
