// Region losses: voxels, their classes, and the contribution of each to the sums of its sample.
//
//   input x (N, C, ...), target labels y (N, ...) or t (N, C, ...)
//   p = softmax over c of x, sigmoid(x) or x       t = [y = c], or dense targets t
//   I = sum p t,  FP = sum p (1 - t),  FN = sum (1 - p) t                       for each sample n and class c
//
// 1. VoxelSpace computes the offsets of a voxel in every stream; ClassesOf reads its classes. With kClasses > 0 the
//    classes of kVecSize neighbouring voxels are in registers, of one thread or of kLanes lanes of a warp (LaneGroup).
//    With kTile > 0 the logits of kTile voxels are in shared memory (TileClasses; StoredTile in tiles.cuh). Otherwise
//    every use reads memory, after the first use from L1 or L2.
// 2. VoxelSoftmax computes the maximum and the sum of exponentials. For one class, the label or else the largest one,
//    1 - p is the sum of the other probabilities: the plain difference would cancel where p is close to 1.
// 3. summands() returns the summands of I, FP and FN; derivative_by_p() and derivative_by_t() differentiate
//    a I + b FP + c FN. I, FP and FN above are those of kProduct; OverlapKind selects the others.
// 4. The voxel loss, if there is one, is an expression of the definition on dual numbers (kRow, kTerm, kElement).
//
// Labels are data and may be invalid: a label outside of [0, C) is counted in its sample and reported, but never used
// as an index. An ignored or masked voxel contributes nothing, and its values are never used.
//
// Ownership: except for tiles, everything is in registers of the thread that processes the voxel. Traffic: see sums.cuh
// and regions.cuh. Preconditions: with kWide and kVecSize > 1, neighbouring voxels are contiguous in input, target and
// gradients, and vectors are aligned; with kPackedInput, the classes of a voxel are contiguous, and voxels follow each
// other without gaps.
#pragma once
#include "softmax/rows.cuh"

enum RegionStream { kInputs, kTargets, kVoxelMasks, kGradientsOfInputs, kGradientsOfTargets, kRegionStreams };
enum Activation { kSoftmax, kSigmoid, kProbabilities };
enum OverlapKind { kProduct, kMinimum, kSquared };
enum VoxelLoss { kNoVoxelLoss, kRow, kTerm, kElement };

// Returns the value of a number, and a value with the tangent of another number. region_hvp.cuh has overloads for
// numbers with a tangent.
template <class T>
__device__ __forceinline__ T value_of(T x) {
  return x;
}
template <class T>
__device__ __forceinline__ T with_tangent_of(T value, T) {
  return value;
}
// Returns the exponential of a class, or 0 for the label.
template <class T>
__device__ __forceinline__ T without_label(bool is_label, T e) {
  return is_label ? T(0) : e;
}

// True if x is finite; overloaded for numbers with a tangent, whose tangent must be finite too (region_hvp.cuh).
template <class T>
__device__ __forceinline__ bool all_finite(T x) {
  return is_finite(x);
}
// Returns the value of a tentatively evaluated loss. It is not finite if the loss is not finite or, for numbers with a
// tangent, if the tangent of one of its derivatives is not.
template <class T, unsigned kMask>
__device__ __forceinline__ T tried_result(const Dual<T, kMask>& loss) {
  return loss.value;
}

// Convert a number to the type of the voxel loss, and a result of that loss back to the type of all other arithmetic.
// Only numbers with a tangent have two types, which differ in how they multiply (region_hvp.cuh).
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
// Returns a derivative of the voxel loss times a scale, in the type of all other arithmetic.
template <class T>
__device__ __forceinline__ T scaled_by(T scale, T derivative) {
  return scale * derivative;
}

// Offsets of kVecSize neighbouring voxels in every stream. With kWide, only the first voxel's offsets are stored: the
// others follow it directly, in masks at a distance of mask_step.
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

// Sizes and strides; a kernel parameter.
template <int kRank>
struct VoxelSpace {
  static constexpr bool kOneDimension = kRank == 1;
  int64 samples;
  int64 voxels;  // number of voxels of a sample
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

// Returns the number of another lane. A number with a tangent takes two shuffles (region_hvp.cuh).
__device__ __forceinline__ float shuffled_number(unsigned mask, float x, int lane) {
  return __shfl_sync(mask, x, lane);
}
__device__ __forceinline__ double shuffled_number(unsigned mask, double x, int lane) {
  return __shfl_sync(mask, x, lane);
}

// The kLanes lanes of a warp that share the classes of a vector of voxels: lanes v, v + kVectors and so on share vector
// v of the warp. The first lanes have kClasses neighbouring classes each, the others one less: their last slot holds
// logits of -inf or 0, and targets of 0. Each lane numbers its classes from 0. Labels, the largest class, weights and
// coefficients use this numbering, so the index of another lane's class is negative or at least the number of own
// classes.
//
// Preconditions of the exchanges: all lanes of a group call them together.
template <int kLanes_>
struct LaneGroup {
  static constexpr int kLanes = kLanes_, kVectors = kWarp / kLanes;

  static __device__ __forceinline__ int lane() {
    return threadIdx.x % kWarp;
  }
  // Index of this group in its warp, of this lane in its group (place), and of this thread's vector in its block.
  static __device__ __forceinline__ int group() {
    return lane() % kVectors;
  }
  static __device__ __forceinline__ int place() {
    return kLanes == 1 ? 0 : lane() / kVectors;
  }
  static __device__ __forceinline__ int vector() {
    return kLanes == 1 ? static_cast<int>(threadIdx.x) : static_cast<int>(threadIdx.x) / kWarp * kVectors + group();
  }
  // Mask of the lanes of this group.
  static __device__ __forceinline__ unsigned mask() {
    unsigned bits = 1u;
#pragma unroll
    for (int shift = kVectors; shift < kWarp; shift *= 2) bits |= bits << shift;
    return bits << group();
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
  // Returns the first lane of the group for which `is_true` holds, or the lane at place 0 if there is none.
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

// Operands, and the choices that kernels are compiled for.
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
  // Number of classes that a thread has in registers, or 0; number of lanes that share a voxel.
  static constexpr int kClasses = kClasses_, kLanes = kLanes_, kVecSize = kVecSize_;
  using Lanes = LaneGroup<kLanes_>;
  static constexpr bool kWide = kWide_;
  // Number of voxels of a tile whose logits are in shared memory, or 0, and of a word in which they are copied. Packed:
  // the classes of a voxel are contiguous, and voxels follow each other without gaps, in the input or in its gradients.
  static constexpr int kTile = kTile_, kTileWord = kTileWord_;
  static constexpr bool kPackedInput = kPackedInput_, kPackedGradients = kPackedGradients_;
  // True if the lanes of a warp move packed vectors together (PackedStretch).
  static constexpr bool kByWarps = kByWarps_;
  static constexpr int kUnroll = kClasses > 0 ? kClasses : 1;
  // Unroll factor of loops over classes.
  static constexpr int kLoop = kClasses > 0 ? kClasses : (kTile > 0 ? 4 : 1);
  static constexpr bool kProductOfLabels = !kDense && kActivation == kSoftmax && kOverlap == kProduct;
  // Tiles serve losses that need only the softmax and the label of a voxel. A tile keeps logits of 16 bits, and logits
  // with a tangent, as they are stored (StoredTile); otherwise exponentials overwrite the logits.
  static_assert(kTile == 0 || (kProductOfLabels && (kVoxel == kNoVoxelLoss || (kVoxel == kRow && !kSmoothed))),
                "labels alone");
  static constexpr bool kStoredTile = kTile > 0 && (sizeof(Input) == 2 || kHasTangent<Compute>);
  static constexpr bool kKeepsExponentials = kTile > 0 && !kStoredTile;
  // True for labels under a softmax, with classes in registers or shared memory. The label's class is then handled
  // apart from the others, which saves a comparison for each class and sum.
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
  // Number of classes of this thread, its first class, and true if class c of this thread exists.
  __device__ __forceinline__ int own_classes() const {
    return kClasses > 0 ? kClasses : static_cast<int>(space.classes);
  }
  __device__ __forceinline__ int first_own() const {
    return first_of(Lanes::place());
  }
  __device__ __forceinline__ bool has(int c) const {
    return has(Lanes::place(), c);
  }
  // First class, and existence of class c, of the lane at a place of a group.
  __device__ __forceinline__ int first_of(int place) const {
    return kLanes == 1 ? 0 : place * (kClasses - 1) + min(place, full_lanes());
  }
  __device__ __forceinline__ bool has(int place, int c) const {
    return kLanes == 1 || c < kClasses - 1 || place < full_lanes();
  }
  // Number of lanes that have kClasses classes.
  __device__ __forceinline__ int full_lanes() const {
    return static_cast<int>(space.classes) - kLanes * (kClasses - 1);
  }
  // Offset of the first class of voxel i in the input or its gradients.
  static __device__ __forceinline__ int64 first_class(const VectorOffsets<kVecSize, kWide>& offset, int stream, int i) {
    return kPackedInput && kClasses > 0 ? offset.at(stream, 0) + i * kClasses : offset.at(stream, i);
  }
  // Returns the logit of class c of voxel i.
  __device__ __forceinline__ Compute logit(const VectorOffsets<kVecSize, kWide>& offset, int i, int64 c) const {
    return widen<Compute>(input[first_class(offset, kInputs, i) + c * space.class_stride[kInputs]]);
  }
  __device__ __forceinline__ Compute weight(int c) const {
    if constexpr (kWeighted) return widen<Compute>(load_pack<1>(weights + first_own() + c).element[0]);
    return Compute(1);
  }
};

// Reads kVecSize neighbouring elements of one stream: at once with kWide, otherwise one by one.
template <bool kLast, class Program, class Storage>
__device__ __forceinline__ Pack<Storage, Program::kVecSize> load_voxels(
    const Storage* from, const VectorOffsets<Program::kVecSize, Program::kWide>& offset, int stream) {
  if constexpr (Program::kWide) {
    // Nothing reads again what kernel 2 has read.
    if constexpr (kLast) return load_stream<Program::kVecSize>(from + offset.at(stream, 0));
    return load_pack<Program::kVecSize>(from + offset.at(stream, 0));
  } else {
    Pack<Storage, Program::kVecSize> pack;
#pragma unroll
    for (int i = 0; i < Program::kVecSize; ++i) pack.element[i] = from[offset.at(stream, i)];
    return pack;
  }
}

// Label of a voxel, and if the voxel counts.
struct VoxelTarget {
  int label;    // index among the thread's classes; if not sound, 0 with kLabelApart, otherwise no class
  bool sound;   // true if it counts and its label is valid
  bool spoilt;  // true if it counts and its label is invalid
};

// Clears the elements of a pack whose voxels do not count. It takes one instruction per register and no branch, so that
// the compiler interleaves the voxels of a vector.
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

// Loads and stores the classes of kVecSize neighbouring voxels that are contiguous, voxel by voxel, in the widest words
// that divide the vector. Neighbouring threads have neighbouring vectors, so L1 or L2 holds whole sectors between the
// accesses of two words.
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

  // An odd number of 16-bit elements, hence of one voxel: words of 4 bytes, plus the single element before or after
  // them.
  static constexpr bool kInPairs = kEach == 1 && sizeof(Input) == 2 && kElements > 1;
  static constexpr int kPairs = kElements / 2;
  using Pair = Pack<Input, 2>;

  static __device__ __forceinline__ bool begins_behind_word(const Input* at) {
    return reinterpret_cast<unsigned long long>(at) % sizeof(Pair) != 0;
  }
  static __device__ __forceinline__ void load_pairs(const Input* from, Pack<Input, kVecSize> (&x)[kClasses]) {
    const bool misaligned = begins_behind_word(from);
    const unsigned selector = misaligned ? 0x5432u : 0x7654u;
    Pair words[kPairs + 1];
    words[kPairs].element[0] = load_pack<1>(from + (misaligned ? 0 : kElements - 1)).element[0];
    words[kPairs].element[1] = words[kPairs].element[0];
#pragma unroll
    for (int j = 0; j < kPairs; ++j) words[j] = load_pack<2>(from + (misaligned ? 1 : 0) + 2 * j);
    unsigned before = reinterpret_cast<const unsigned&>(words[kPairs]);
#pragma unroll
    for (int j = 0; j <= kPairs; ++j) {
      const unsigned word = reinterpret_cast<const unsigned&>(words[j]);
      Pair pair;
      reinterpret_cast<unsigned&>(pair) = select_bytes(before, word, selector);
      x[2 * j].element[0] = pair.element[0];
      if (j < kPairs) x[2 * j + 1].element[0] = pair.element[1];
      before = word;
    }
  }
  static __device__ __forceinline__ void store_pairs(Input* to, const Pack<Input, kVecSize> (&x)[kClasses]) {
    const bool misaligned = begins_behind_word(to);
    const unsigned selector = misaligned ? 0x5432u : 0x3210u;
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
      reinterpret_cast<unsigned&>(pair) = select_bytes(words[j], words[j + 1], selector);
      store_pack<2>(to + (misaligned ? 1 : 0) + 2 * j, pair);
    }
    to[misaligned ? 0 : kElements - 1] = misaligned ? x[0].element[0] : x[kElements - 1].element[0];
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

// Vectors of neighbouring lanes whose classes are contiguous form one stretch of memory. Lanes read and write
// neighbouring words of the stretch (coalesced) and find their own vectors in shared memory. If each lane accessed its
// own words directly, a request of a warp would touch one sector per lane.
//
//   load     start() of each operand, then wait(), then take() of each
//   store    put(), then write()
//
// Each operand has its own place in `memory`, with kPitch words for each thread of the block. Preconditions: the first
// `lanes` lanes of the warp call together and have neighbouring vectors; `memory` is aligned to 16 bytes.
template <class Program>
struct PackedStretch {
  using Vector = PackedVector<Program>;
  using Input = typename Program::Input;
  static constexpr int kVecSize = Program::kVecSize, kClasses = Program::kClasses;
  static constexpr int kEach = Vector::kEach, kWords = Vector::kElements / kEach;
  // Odd, so that lanes reading one word each of their own vectors do not conflict in a bank.
  static constexpr int kPitch = kWords | 1;
  using Word = Pack<Input, kEach>;
  Word* words;  // place of this warp
  int lanes;

  __device__ __forceinline__ PackedStretch(void* memory, int place, int lanes)
      : words(static_cast<Word*>(memory) +
              (place * static_cast<int>(blockDim.x) + threadIdx.x / kWarp * kWarp) * kPitch),
        lanes(lanes) {
  }
  static __device__ __forceinline__ int lane() {
    return threadIdx.x % kWarp;
  }
  // Returns the place of a word of the stretch in `words`.
  static __device__ __forceinline__ int place_of(int word) {
    return word + (kPitch - kWords) * (word / kWords);
  }
  __device__ __forceinline__ void synchronize() const {
    __syncwarp(0xffffffffu >> (kWarp - lanes));
  }

  // Starts the copy of the stretch that contains this lane's vector `from`. Precondition: no lane still reads this
  // place.
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
  // Writes the stretch that contains this lane's vector `to`.
  __device__ __forceinline__ void write(Input* to) const {
    Word* const first = reinterpret_cast<Word*>(to - lane() * Vector::kElements);
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      const int word = k * lanes + lane();
      store_pack<kEach>(reinterpret_cast<Input*>(first + word), words[place_of(word)]);
    }
  }
};

// Number of lanes of this thread's warp that have a vector, and memory that they share. `left` is the number of vectors
// from this thread's on.
struct WarpOfVectors {
  void* memory;
  int lanes;

  __device__ __forceinline__ WarpOfVectors(void* memory, int64 left) : memory(memory) {
    const int64 of_warp = left + threadIdx.x % kWarp;
    lanes = of_warp < kWarp ? static_cast<int>(of_warp) : kWarp;
  }
};

// Stores a packed vector, by warps with kByWarps. Precondition with kByWarps: that of PackedStretch.
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

// Returns the largest logit of voxel i of a vector. Logits of 16 bits are compared in pairs of voxels.
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

// Logits of a class that does not exist; with softmax their exponentials are 0.
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

// Loads the targets of kVecSize neighbouring voxels: labels, or dense targets.
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

// Classes of kVecSize neighbouring voxels, as they are stored. `warp` describes the lanes that have such vectors; this
// lane is one of them.
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
      stretch.synchronize();  // all lanes have read the previous vectors
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
  // Clears the logits of voxels that do not count.
  __device__ __forceinline__ void keep(const PackMask<typename Program::Input, kVecSize>& mask) {
#pragma unroll
    for (int c = 0; c < Program::kClasses; ++c) mask.apply(x[c]);
  }
};

// Classes of one voxel, read from memory at every use: logits, and a label or dense targets.
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

// Classes of one voxel of a tile. Logits are in shared memory, where the voxels of a class are contiguous.
template <class Program>
struct TileClasses {
  using Compute = typename Program::Compute;
  using Offset = VectorOffsets<Program::kVecSize, Program::kWide>;
  // Odd, so that neither the voxels of a class nor the classes of a voxel conflict in a bank.
  static constexpr int kPitch = Program::kTile + 1;
  Compute* x;
  const typename Program::Target* t;
  int number;  // number of classes

  __device__ __forceinline__ TileClasses(const Program& program, Compute* tile, int voxel, const Offset& offset)
      : x(tile + voxel), t(program.target + offset.at(kTargets, 0)), number(program.classes()) {
  }
  __device__ __forceinline__ int count() const {
    return number;
  }
  // Returns the logit, or with kKeepsExponentials, after VoxelSoftmax::find_apart, its exponential.
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

// Number of elements of a tile that a thread has in flight where they pass through its registers.
constexpr int kTileBatch = 16;
constexpr int kStoredBatch = 8;

// Copies elements to a tile: for k < `count`, element k of this thread from `from(k)` to `to(k)`. `converted` maps a
// pack of one element to what is stored. Batches are predicated: there is no remainder loop, whose loads would wait for
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

// Copies elements to a tile of numbers in the arithmetic type. Elements of that type are copied asynchronously,
// bypassing registers, all at once.
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

// Division by multiplication: i / divisor = i * inverse_of(divisor) / 2^32. Exact for the elements of a tile, because
// kTile C^2 < 2^32.
__device__ __forceinline__ unsigned inverse_of(int divisor) {
  return 0xffffffffu / static_cast<unsigned>(divisor) + 1u;
}
__device__ __forceinline__ int divided(int i, unsigned inverse) {
  return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(i)) * inverse >> 32);
}

// True if elements of 2 bytes can be accessed from `first` on as pairs, in aligned words of 4 bytes.
template <class Storage>
__device__ __forceinline__ bool in_pairs(const Storage* first) {
  return sizeof(Storage) == 2 && reinterpret_cast<unsigned long long>(first) % 4 == 0;
}

// Places in a tile of elements 2 j and 2 j + 1 of packed voxels. j starts at threadIdx.x and advances by kThreads;
// next() needs no division.
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

// Copies `count` voxels of a sample, from voxel `begin` on, to a tile. Preconditions: blockDim.x is kThreads, a
// multiple of kTile; all threads call it; the caller synchronizes the block before the call, because threads may still
// read the tile, and after it.
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

// Returns the target of voxel i of a vector, by mask, ignored label and range.
template <class Program, class Classes>
__device__ __forceinline__ VoxelTarget voxel_target(const Program& program, const Classes& classes,
                                                    const VectorOffsets<Program::kVecSize, Program::kWide>& offset,
                                                    int i) {
  bool counts = true;
  if constexpr (Program::kMasked) counts = program.mask[offset.mask(i)];
  VoxelTarget target{0, counts, false};
  if constexpr (!Program::kDense) {
    // Labels of up to 16 bits are compared in 32 bits; none of them equals kNoLabel.
    constexpr bool kShort = sizeof(typename Program::Target) <= 2;
    constexpr int kNoLabel = 1 << 20;
    using Label = Choose<kShort, int, int64>;
    using Unsigned = Choose<kShort, unsigned, unsigned long long>;
    const int64 raw_label = classes.label(i), limit = program.classes();
    const Label label = static_cast<Label>(raw_label);
    const bool is_short = program.ignored == static_cast<Label>(program.ignored);
    const Label ignored = is_short ? static_cast<Label>(program.ignored) : kNoLabel;
    counts = counts && label != ignored;
    const Unsigned classes_count = static_cast<Unsigned>(kShort && limit > kNoLabel ? kNoLabel : limit);
    const bool in_range = static_cast<Unsigned>(label) < classes_count;
    target.sound = counts && in_range;
    target.spoilt = counts && !in_range;
    // Without kLabelApart, the label of a voxel that does not count equals no class of any lane.
    const int local_label = static_cast<int>(label) - program.first_own();
    target.label = target.sound ? local_label : (Program::kLabelApart ? 0 : -program.classes() - 1);
  }
  return target;
}

__device__ __forceinline__ float exp2_of_difference(float x, float max_logit) {
  return exp2_ftz(fmaf(x, kLog2E, -max_logit * kLog2E));
}
// Returns exp(x - max_logit) of a logit that is stored as `Input`; with kNarrow in two instructions.
template <class Input, class Compute>
__device__ __forceinline__ Compute difference_exponential(Compute x, Compute max_logit) {
  if constexpr (kNarrow && kSingle<Compute>) return exp2_of_difference(x, max_logit);
  return exp_of_difference(x - max_logit);
}

// Softmax of one voxel. max_logit is the largest logit, and exponentials are relative to it.
template <class Program, bool kOnChip = (Program::kClasses > 0)>
struct VoxelSoftmax {
  using Compute = typename Program::Compute;
  Compute max_logit;
  Compute inv_sum;
  Compute others;  // sum of exponentials except that of `pivot`
  Compute sum;
  int pivot;  // the label, or for dense targets the largest class
  Compute e[kOnChip ? Program::kUnroll : 1];
  // With kLabelApart: the label's logit and exponential. In `e`, the label's exponential is 0.
  Compute label_logit;
  Compute label_e;

  // Computes the softmax of voxel i with kLabelApart. The label's logit is read again, since selecting it among
  // registers takes an instruction per class.
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
  // Computes the same, given the label's logit. kLabelOut: among the classes, the label's logit is already -inf.
  template <bool kLabelOut, class Classes>
  __device__ __forceinline__ void find_apart(const Classes& classes, int i, const VoxelTarget& target, Compute logit) {
    const int label = target.label;
    label_logit = target.sound ? logit : Compute(0);
    auto largest = classes.largest(i);
    if constexpr (kLabelOut) largest = max_ignoring_nan(largest, value_of(label_logit));
    // The tangent of the maximum cancels in everything that follows.
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
    // Same expression as in row_result(), so that the compiler computes it and the sum only once.
    label_e = exp_of_difference(label_logit - max_logit);
    sum = others + label_e;
    inv_sum = scalar_divide_closely(Compute(1), sum);
  }

  // Computes the softmax of voxel i without kLabelApart.
  template <class Classes>
  __device__ __forceinline__ void find(const Program& program, const Classes& classes, int i, int label) {
    using Lanes = typename Program::Lanes;
    max_logit = -scalar_infinity(Compute());
#pragma unroll(Program::kLoop)
    for (int c = 0; c < program.own_classes(); ++c) max_logit = max_ignoring_nan(max_logit, classes.input(c, i));
    pivot = label;
    bool pivot_found = false;
    if constexpr (Program::kLanes > 1) {
      // One lane holds the largest class and broadcasts its logit, with its tangent, to the group.
      const int owner = Lanes::first_lane(value_of(max_logit) == Lanes::largest(value_of(max_logit)));
      max_logit = Lanes::from_lane(max_logit, owner);
      pivot_found = owner != Lanes::lane();
      if constexpr (Program::kDense) pivot = -1;
    }
    others = sum = Compute(0);
#pragma unroll(Program::kLoop)
    for (int c = 0; c < program.own_classes(); ++c) {
      const Compute x = classes.input(c, i), y = exp_of_difference(x - max_logit);
      keep(classes, c, y);
      bool is_pivot = c == label;
      if constexpr (Program::kDense) {
        is_pivot = !pivot_found && x == max_logit;
        pivot = is_pivot ? c : pivot;
        pivot_found = pivot_found || is_pivot;
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

// Summands of I, FP and FN; or the coefficients a, b and c of a I + b FP + c FN.
template <class Compute>
struct Summands {
  Compute hit;
  Compute false_positive;
  Compute false_negative;
};

// Returns p - t with the accuracy of 1 - p.
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
    // All three become NaN if p or t is NaN.
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

// Returns the target of a class as a number. Labels are compared with the class; no one-hot target is stored.
template <class Program, class Classes>
__device__ __forceinline__ typename Program::Compute target_of(const Classes& classes, const VoxelTarget& target, int c,
                                                               int i) {
  using Compute = typename Program::Compute;
  if constexpr (Program::kDense) return classes.target(c, i);
  return c == target.label ? Compute(1) : Compute(0);
}

// Loss of a voxel, and its share of the divisor of the mean.
template <class Compute>
struct VoxelCost {
  Compute value;
  Compute count;
};

// Evaluates the row loss of voxel i for a label under a softmax, with the coefficients of its gradient. kMarksLost: see
// row_result().
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
      // Read before the comparison: otherwise the compiler indexes with the label, and the array moves to local memory.
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

// Returns log p_c, given the softmax and the logarithm of its sum (log_of_sum).
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

// Returns the element loss of class c as a function of its logit. kMode: bit 0 if it is differentiated by the logit,
// bit 1 if by the target, and kTentative.
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

// Returns the sum of element losses over the classes of this thread.
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

// Returns the loss of voxel i. With kLanes > 1, the lanes that share the voxel return parts that add up to it.
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
      // Opaque; otherwise the compiler duplicates the code that follows.
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

// Double buffer in shared memory: copies the thread's next vector while the thread computes with the current one. Each
// of the two places holds a pack of logits for each class and thread, and a pack of labels for each thread. A thread
// reads only what it copied itself. take_label() replaces the label's logit in shared memory by -inf, whose exponential
// is 0: among registers that would take a comparison and a selection per class.
template <class Program, int kThreads>
struct StagedVectors {
  using Compute = typename Program::Compute;
  using Input = typename Program::Input;
  using Target = typename Program::Target;
  static constexpr int kVecSize = Program::kVecSize, kClasses = Program::kClasses;
  using Logits = Pack<Input, kVecSize>;
  using Labels = Pack<Target, kVecSize>;
  // A copy has at least 4 bytes: two labels of one byte are copied together with their neighbours.
  using LabelWord = typename Labels::Word;
  static constexpr int kLabelBytes = sizeof(Labels) < 4 ? 4 : sizeof(Labels);
  static constexpr int kPlaceBytes = kThreads * (kClasses * static_cast<int>(sizeof(Logits)) + kLabelBytes);
  char* places;
  // Next vector to be copied, and the distance to the one after it.
  const Input* input;
  const Target* target;
  int64 input_step, target_step;
  int64 class_stride;
  int copied = 0, taken = 0;  // byte offsets of the next places to copy to and to take

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
  // Starts the copy of the next vector if `exists`.
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
  // Waits for the vector to be taken next, and returns its labels; the copy of the vector after it stays in flight.
  __device__ __forceinline__ Labels wait() const {
    cp_async_wait_groups<1>();
    // Labels that were copied with their neighbours keep their offset within the word.
    const unsigned at = sizeof(Labels) == 2 ? reinterpret_cast<unsigned long long>(target) % 4 : 0;
    Labels labels;
#pragma unroll
    for (int i = 0; i < Labels::kWords; ++i) {
      reinterpret_cast<LabelWord*>(&labels)[i] = reinterpret_cast<const LabelWord*>(labels_of(taken) + at)[i];
    }
    return labels;
  }
  // Returns the label's logit of voxel i, and leaves -inf in its place.
  __device__ __forceinline__ Compute take_label(int label, int i) const {
    Input& element = logits_of(taken)[label * kThreads].element[i];
    const Compute logit = widen<Compute>(element);
    element = Narrow<Input>::from(-scalar_infinity(Compute()));
    return logit;
  }
  // Loads the logits of the current vector, and moves on to the next place.
  __device__ __forceinline__ void take(Logits (&logits)[kClasses]) {
    const Logits* const own = logits_of(taken);
#pragma unroll
    for (int c = 0; c < kClasses; ++c) logits[c] = load_words(own + c * kThreads);
    taken = other(taken);
  }
};
