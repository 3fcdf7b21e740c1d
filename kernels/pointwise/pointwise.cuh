// Pointwise losses: an element-wise loss of up to kMaxOperands operands, optionally reduced to one number, and the
// gradients of any of its operands.
//
//   value       y[i] = loss(x_0[i], x_1[i], ...)                  stored per element, or summed
//   gradient    g_k[i] = grad_output * d loss / d x_k [i]         grad_output is one number, or per element
//
// i is an index into the broadcast shape of the operands, the index space.
//
// 1. The index space is divided into batches of 32 lanes x kUnroll vectors. Batch b belongs to chunk b % chunks:
//    neighbouring warps read neighbouring batches, and there are many chunks of equal size. Batches are numbered in the
//    order in which they are visited (layout.cuh: BatchOrder).
// 2. A warp processes chunks global_warp(), global_warp() + warps, ... Each lane loads several vectors of a batch
//    (flight) before it evaluates the first of them (Pointwise::visit). A heavy loss in 16 bits instead loads each
//    vector before it evaluates the previous one (visit_ahead).
// 3. The loss is evaluated on dual numbers. Gradients are stored immediately; values are stored or summed.
// 4. A lane adds its elements in order: runs of up to kMaxRun elements in Compute, the totals of the runs in double. A
//    butterfly reduction adds the lanes, and the warp stores one partial sum per chunk.
// 5. The last block to arrive adds the partial sums in order (reduce.cuh).
//
// The number of chunks and kUnroll depend only on the number of vectors and on their layout
// (engines/pointwise/layout.py). Therefore the result is the same bit for bit on every grid and GPU, with and without
// gradients.
//
// Gradients of broadcast operands are sums of derivatives. The same pass stores partial sums of them (SummedSink); the
// check in backward, or a launch after this one, combines them (combine_sums). If these sums run over rows or columns,
// chunks consist of the tasks of a StripLayout instead of batches (sweep_strips).
//
// A lane holds its vectors and running sums in registers, and a warp owns its chunks. Warps work independently: only
// the final reduction and combine_sums have barriers. Traffic: each element of a dense operand is read once, each
// gradient is written once, and partial sums take at most 8 bytes per 512 elements.
//
// The loss, the layout and the access to each operand are types that the generated glue (engines/pointwise/codegen.py)
// supplies:
//   Loss      a functor on dual numbers, with `Compute`, its arithmetic type, and `kHeavy` (definition.py: heavy). With
//             kTriedFirst, elements are first evaluated tentatively (dual.cuh: kTentative) if `usual()` is true, which
//             does not depend on the element.
//   Layout    FlatLayout, LinearLayout, StridedLayout, GatheredLayout, StripLayout or TiledLayout
//   Sources   Tuple of Source (TileSource), one per operand; operand k has stream k. An element may have Components:
//             each has its own slot of the dual numbers, and the functor receives the element as a Tuple.
//   Sinks     Tuple of Sink (TileSink, ScatteredSink, SummedSink, Absent), one per operand, for its gradient; the
//             gradient of operand k has stream operands + k
//   Element   Absent, Source (grad_output) or Sink (values), with stream 2 * operands
//
// Preconditions: blockDim.x is a multiple of 32. Pointers are aligned to the vectors of the layout, except those of
// shifted, gathered or periodic sources. A kShifted source has no element in memory past the last one of the index
// space.
#pragma once
#include "core/dual.cuh"
#include "core/layout.cuh"
#include "core/reduce.cuh"
#include "core/speculative_grad.cuh"
#include "core/tuple.cuh"

constexpr int kMaxRun = 64;
// Elements in flight per lane if tiles go through shared memory.
constexpr int kStagedFlight = 16;

// Maximum number of registers for vectors in flight; with more, registers of the arithmetic spill. Three derivatives
// leave fewer registers than two, and those of boxes fewer still, as does a `heavy` combination of arithmetic and
// layout.
__host__ __device__ constexpr int max_words(int gradients, bool heavy) {
  return gradients > 4 || (gradients > 2 && heavy) ? 30 : gradients > 2 ? 46 : 70;
}

// Number of vectors in flight, each of `words` registers: `vectors`, halved until they fit into `most` registers.
__host__ __device__ constexpr int vectors_in_flight(int vectors, int words, int most) {
  return vectors > 1 && vectors * words > most ? vectors_in_flight(vectors / 2, words, most) : vectors;
}

// Ways to read the vectors of an operand:
//   kStream         aligned vectors
//   kSplat          one number for the whole vector (stride 0 along it)
//   kShifted        vectors at addresses that are not aligned to them
//   kSingles        element by element: neighbours, at addresses that are aligned to one element only
//   kScalars        component by component: elements of several components that are not aligned, or whose components
//                   are not contiguous. Offsets count components.
//   kGather         element by element, at the offsets that a GatheredLayout computes
//   kGatherRow      like kGather, for one number per row of a GatheredLayout with kLongRows: at most two per vector
//   kGatherShifted  like kShifted within a row without gaps, element by element at its end
//   kRagged         like kShifted, for vectors that may lack elements
//   kPeriodic       element by element, from the period of a StripLayout with kRagged; neighbours are a stride of the
//                   stream apart
//   kStaged         element by element, from a tile in shared memory (staged_tiles.cuh)
enum class Access {
  kStream,
  kSplat,
  kShifted,
  kSingles,
  kScalars,
  kGather,
  kGatherRow,
  kGatherShifted,
  kRagged,
  kPeriodic,
  kStaged
};

// Directions in which a micro-tile is contiguous in memory: rows of kA elements of unit stride, columns of kB elements,
// rows without gaps between them, or none of these.
enum class Along { kA, kB, kBoth, kNeither };

template <class Storage_, Access kAccess_>
struct Source {
  using Storage = Storage_;
  static constexpr Access kAccess = kAccess_;
  const Storage* pointer;
};

template <class Storage_>
struct Source<Storage_, Access::kScalars> {
  using Storage = Storage_;
  static constexpr Access kAccess = Access::kScalars;
  const Storage* pointer;
  int64 component_step;
};

template <class Storage_>
struct Sink {
  using Storage = Storage_;
  Storage* pointer;
};

// A sink that is written element by element, at the offsets that a GatheredLayout computes.
template <class Storage_>
struct ScatteredSink {
  using Storage = Storage_;
  Storage* pointer;
};

// A sink for elements whose components are not contiguous. Its offsets count components.
template <class Storage_>
struct ScalarSink {
  using Storage = Storage_;
  Storage* pointer;
  int64 component_step;
};

// Gradient of a broadcast operand. The derivatives that contribute to one of its elements are added up to partial sums,
// which combine_sums combines. The operand is one number (kAll), has one number per row (kRow), or is the same in all
// rows of a plane (kColumn). kRow and kColumn require a StripLayout.
//   kAll     partials[chunk], or partials[task] for strips
//   kRow     partials[row of all planes][strip]
//   kColumn  partials[plane][range][column]
enum class SumOf { kAll, kRow, kColumn };

template <class Storage_, SumOf kSum>
struct SummedSink {
  using Storage = Storage_;
  double* partials;
};

// A source of micro-tiles of kA x kB elements (layout.cuh: TiledLayout), and a sink for them. Element i of a micro-tile
// is at i % kA along a and i / kA along b.
template <class Storage_, Along kAlong, int kA, int kB>
struct TileSource {
  using Storage = Storage_;
  static constexpr Access kAccess = Access::kStream;
  const Storage* pointer;
};

template <class Storage_, Along kAlong, int kA, int kB>
struct TileSink {
  using Storage = Storage_;
  Storage* pointer;
};

// The vectors in which a micro-tile is read or written.
template <Along kAlong, int kA, int kB>
struct TileVectors {
  // Rows without gaps are accessed as kA vectors of kB elements: kA need not be a power of two.
  static constexpr bool kPacked = kAlong == Along::kBoth;
  static constexpr int kWidth = kAlong == Along::kA ? kA : kAlong == Along::kB || kPacked ? kB : 1;
  static constexpr int kCount = kA * kB / kWidth;

  // Index of the vector that holds element i, and the element's position in that vector.
  static __device__ __forceinline__ constexpr int vector(int i) {
    return kPacked ? i / kB : kAlong == Along::kA ? i / kA : kAlong == Along::kB ? i % kA : i;
  }
  static __device__ __forceinline__ constexpr int place(int i) {
    return kPacked ? i % kB : kAlong == Along::kA ? i % kA : kAlong == Along::kB ? i / kA : 0;
  }
  static __device__ __forceinline__ constexpr int element(int vector, int place) {
    if (kPacked) return vector * kB + place;
    return kAlong == Along::kA ? vector * kA + place : kAlong == Along::kB ? place * kA + vector : vector;
  }
  static __device__ __forceinline__ int64 offset(int vector, int64 stride_a, int64 stride_b) {
    if (kPacked) return vector * kB;
    if (kAlong == Along::kA) return vector * stride_b;
    if (kAlong == Along::kB) return vector * stride_a;
    return vector % kA * stride_a + vector / kA * stride_b;
  }
};

// Rotates x by one position: the first element becomes the last one.
template <class T, int kCount>
__device__ __forceinline__ void rotate_elements(T (&x)[kCount]) {
  const T first = x[0];
#pragma unroll
  for (int i = 0; i + 1 < kCount; ++i) x[i] = x[i + 1];
  x[kCount - 1] = first;
}

// A vector of a source, as loaded. settle() completes it before element() reads it; rotate() moves every element one
// position to the front.
template <class S, int kVecSize>
struct Loaded {
  static constexpr bool kSplat = S::kAccess == Access::kSplat;
  Pack<typename S::Storage, kSplat ? 1 : kVecSize> pack;

  __device__ __forceinline__ void settle() {
  }
  template <class Compute>
  __device__ __forceinline__ Compute element(int i) const {
    return widen_element<Compute>(pack, kSplat ? 0 : i);
  }
  __device__ __forceinline__ void rotate() {
    if constexpr (!kSplat) rotate_elements(pack.element);
  }
};
// A vector at an unaligned address. settle() shifts it rather than the load, so that loads of other vectors are issued
// in between.
template <class Storage, int kVecSize>
struct LoadedShifted {
  UnalignedPack<Storage, kVecSize> pack;

  __device__ __forceinline__ void settle() {
    pack.align();
  }
  template <class Compute>
  __device__ __forceinline__ Compute element(int i) const {
    return widen<Compute>(pack.element(i));
  }
  __device__ __forceinline__ void rotate() {
    rotate_elements(reinterpret_cast<Storage(&)[kVecSize]>(pack.word));
  }
};

template <class Storage, Along kAlong, int kA, int kB>
struct LoadedTile {
  using Vectors = TileVectors<kAlong, kA, kB>;
  Pack<Storage, Vectors::kWidth> pack[Vectors::kCount];

  __device__ __forceinline__ void settle() {
  }
  template <class Compute>
  __device__ __forceinline__ Compute element(int i) const {
    return widen_element<Compute>(pack[Vectors::vector(i)], Vectors::place(i));
  }
  __device__ __forceinline__ void rotate() {
    Storage elements[kA * kB];
#pragma unroll
    for (int i = 0; i < kA * kB; ++i) elements[i] = pack[Vectors::vector(i)].element[Vectors::place(i)];
    rotate_elements(elements);
#pragma unroll
    for (int i = 0; i < kA * kB; ++i) pack[Vectors::vector(i)].element[Vectors::place(i)] = elements[i];
  }
};

// A vector of a source that has one number per row, across up to two rows: the second one begins after `left` elements.
template <class Storage>
struct LoadedRowNumbers {
  Pack<Storage, 1> first, second;
  int left;

  __device__ __forceinline__ void settle() {
  }
  template <class Compute>
  __device__ __forceinline__ Compute element(int i) const {
    return i < left ? widen_element<Compute>(first, 0) : widen_element<Compute>(second, 0);
  }
  __device__ __forceinline__ void rotate() {
    --left;
  }
};

template <class S, int kVecSize>
struct LoadedOf {
  using type = Loaded<S, kVecSize>;
};
template <class Storage, int kVecSize>
struct LoadedOf<Source<Storage, Access::kGatherRow>, kVecSize> {
  using type = LoadedRowNumbers<Storage>;
};
template <class Storage, Along kAlong, int kA, int kB, int kVecSize>
struct LoadedOf<TileSource<Storage, kAlong, kA, kB>, kVecSize> {
  using type = LoadedTile<Storage, kAlong, kA, kB>;
};
template <class Storage, int kVecSize>
struct LoadedOf<Source<Storage, Access::kShifted>, kVecSize> {
  using type = LoadedShifted<Storage, kVecSize>;
};
template <class Storage, int kVecSize>
struct LoadedOf<Source<Storage, Access::kGatherShifted>, kVecSize> {
  using type = LoadedShifted<Storage, kVecSize>;
};
template <class Storage, int kVecSize>
struct LoadedOf<Source<Storage, Access::kRagged>, kVecSize> {
  using type = LoadedShifted<Storage, kVecSize>;
};
template <class Storage>
struct LoadedOf<Source<Storage, Access::kGatherShifted>, 1> {
  using type = Loaded<Source<Storage, Access::kGatherShifted>, 1>;
};
template <class Storage>
struct LoadedOf<Source<Storage, Access::kShifted>, 1> {
  using type = Loaded<Source<Storage, Access::kShifted>, 1>;
};

template <class Scalar, int kCount>
__device__ __forceinline__ Pack<Components<Scalar, kCount>, 1> load_scalars(const Components<Scalar, kCount>* pointer,
                                                                            int64 offset, int64 step) {
  Pack<Components<Scalar, kCount>, 1> pack;
  const Scalar* first = reinterpret_cast<const Scalar*>(pointer) + offset;
#pragma unroll
  for (int i = 0; i < kCount; ++i) pack.element[0].component[i] = load_pack<1>(first + i * step).element[0];
  return pack;
}

// True if an element has several components. These elements are also stored without a cache hint: part of a gain of 2
// us in 57 for 2^22 pairs of boxes on an H200.
template <class Storage>
constexpr bool kHasComponents = (ElementOf<Storage, void>::kComponents > 1);

template <int kVecSize, class S>
__device__ __forceinline__ typename LoadedOf<S, kVecSize>::type load(const S& source, int64 offset) {
  if constexpr (S::kAccess == Access::kShifted && kVecSize > 1) {
    return {load_unaligned<kVecSize>(source.pointer + offset)};
  } else if constexpr (S::kAccess == Access::kSingles) {
    typename LoadedOf<S, kVecSize>::type x;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) x.pack.element[i] = load_pack<1>(source.pointer + offset + i).element[0];
    return x;
  } else if constexpr (S::kAccess == Access::kScalars) {
    static_assert(kVecSize == 1, "vectors have aligned elements");
    return {load_scalars(source.pointer, offset, source.component_step)};
  } else if constexpr (S::kAccess == Access::kSplat) {
    return {load_pack<1>(source.pointer + offset)};
  } else {
    // No evict-first hint, even for data that is read once: with it, loads reach 3 to 6 % less of a copy's speed.
    return {load_pack<kVecSize>(source.pointer + offset)};
  }
}

// Loads a vector of which only `count` elements exist, at least one; the others are undefined. Without kInWords, a
// kRagged vector is loaded element by element.
template <int kVecSize, bool kInWords, class S>
__device__ __forceinline__ typename LoadedOf<S, kVecSize>::type load_present(const S& source, int64 offset, int count) {
  if constexpr (S::kAccess == Access::kRagged && kInWords) {
    return {load_unaligned<kVecSize>(source.pointer + offset, count)};
  } else if constexpr (S::kAccess == Access::kRagged) {
    return {load_elements<kVecSize>(source.pointer + offset, count)};
  } else {
    return load<kVecSize>(source, offset);
  }
}

// Loads a micro-tile. Loads of vectors use whole sectors. Loads of single elements do not, so the caches have to keep
// these sectors.
template <class Storage, Along kAlong, int kA, int kB>
__device__ __forceinline__ LoadedTile<Storage, kAlong, kA, kB> load_tile(
    const TileSource<Storage, kAlong, kA, kB>& source, int64 offset, int64 stride_a, int64 stride_b) {
  using Vectors = TileVectors<kAlong, kA, kB>;
  LoadedTile<Storage, kAlong, kA, kB> x;
#pragma unroll
  for (int v = 0; v < Vectors::kCount; ++v) {
    const Storage* pointer = source.pointer + offset + Vectors::offset(v, stride_a, stride_b);
    x.pack[v] = load_pack<Vectors::kWidth>(pointer);
  }
  return x;
}

template <class Storage, Along kAlong, int kA, int kB, class Compute>
__device__ __forceinline__ void store_tile(const TileSink<Storage, kAlong, kA, kB>& sink, int64 offset, int64 stride_a,
                                           int64 stride_b, const Compute (&x)[kA * kB]) {
  using Vectors = TileVectors<kAlong, kA, kB>;
#pragma unroll
  for (int v = 0; v < Vectors::kCount; ++v) {
    Compute vector[Vectors::kWidth];
#pragma unroll
    for (int i = 0; i < Vectors::kWidth; ++i) vector[i] = x[Vectors::element(v, i)];
    store_stream<Vectors::kWidth>(sink.pointer + offset + Vectors::offset(v, stride_a, stride_b),
                                  NarrowPack<Storage, Vectors::kWidth>::from(vector));
  }
}

template <int kVecSize, class Storage, class Compute>
__device__ __forceinline__ void store(const Sink<Storage>& sink, int64 offset, const Compute (&x)[kVecSize]) {
  const auto pack = NarrowPack<Storage, kVecSize>::from(x);
  if constexpr (kHasComponents<Storage>) {
    store_pack<kVecSize>(sink.pointer + offset, pack);
  } else {
    store_stream<kVecSize>(sink.pointer + offset, pack);
  }
}
template <int kVecSize, class Scalar, int kCount, class Compute>
__device__ __forceinline__ void store(const ScalarSink<Components<Scalar, kCount>>& sink, int64 offset,
                                      const Compute (&x)[kVecSize]) {
  static_assert(kVecSize == 1, "vectors have components side by side");
  const auto pack = NarrowPack<Components<Scalar, kCount>, 1>::from(x);
  Scalar* const first = reinterpret_cast<Scalar*>(sink.pointer) + offset;
#pragma unroll
  for (int i = 0; i < kCount; ++i) first[i * sink.component_step] = pack.element[0].component[i];
}
template <int kVecSize, class Compute>
__device__ __forceinline__ void store(Absent, int64, const Compute (&)[kVecSize]) {
}

template <class T>
struct IsSource {
  static constexpr bool value = false;
};
template <class Storage, Access kAccess>
struct IsSource<Source<Storage, kAccess>> {
  static constexpr bool value = true;
};
template <class Storage, Along kAlong, int kA, int kB>
struct IsSource<TileSource<Storage, kAlong, kA, kB>> {
  static constexpr bool value = true;
};
template <class T>
struct IsSink {
  static constexpr bool value = false;
};
template <class Storage>
struct IsSink<Sink<Storage>> {
  static constexpr bool value = true;
};
template <class Storage>
struct IsSink<ScatteredSink<Storage>> {
  static constexpr bool value = true;
};
template <class Storage>
struct IsSink<ScalarSink<Storage>> {
  static constexpr bool value = true;
};
template <class Storage, Along kAlong, int kA, int kB>
struct IsSink<TileSink<Storage, kAlong, kA, kB>> {
  static constexpr bool value = true;
};

template <class Storage, SumOf kSum>
struct IsSink<SummedSink<Storage, kSum>> {
  static constexpr bool value = true;
};

template <class T>
struct IsSummed {
  static constexpr bool value = false;
};
template <class Storage, SumOf kSum>
struct IsSummed<SummedSink<Storage, kSum>> {
  static constexpr bool value = true;
};
template <class T>
struct IsSumOfRows {
  static constexpr bool value = false;
};
template <class Storage>
struct IsSumOfRows<SummedSink<Storage, SumOf::kRow>> {
  static constexpr bool value = true;
};

template <class T>
struct IsScattered {
  static constexpr bool value = false;
};
template <class Storage>
struct IsScattered<ScatteredSink<Storage>> {
  static constexpr bool value = true;
};

template <class T>
struct IsTile {
  static constexpr bool value = false;
};
template <class Storage, Along kAlong, int kA, int kB>
struct IsTile<TileSource<Storage, kAlong, kA, kB>> {
  static constexpr bool value = true;
};
template <class Storage, Along kAlong, int kA, int kB>
struct IsTile<TileSink<Storage, kAlong, kA, kB>> {
  static constexpr bool value = true;
};

// True for the sources and sinks of staged_tiles.cuh.
template <class T>
struct IsStaged {
  static constexpr bool value = false;
};
template <class... S>
__device__ constexpr bool any_staged(const Tuple<S...>*) {
  return (IsStaged<S>::value || ... || false);
}

// First slot of an operand. Each component of the operands before it has one slot.
template <class... S>
__device__ constexpr int first_slot(int operand, const Tuple<S...>*) {
  int slot = 0, k = 0;
  ((slot += k++ < operand ? ElementOf<typename S::Storage, void>::kComponents : 0), ...);
  return slot;
}

template <class... S>
__device__ constexpr bool has_components(const Tuple<S...>*) {
  return ((ElementOf<typename S::Storage, void>::kComponents > 1) || ... || false);
}

template <class S>
struct ComponentsOfSink {
  static constexpr int kCount = 1;
};
template <class Storage>
struct ComponentsOfSink<Sink<Storage>> {
  static constexpr int kCount = ElementOf<Storage, void>::kComponents;
};
template <class Storage>
struct ComponentsOfSink<ScalarSink<Storage>> {
  static constexpr int kCount = ElementOf<Storage, void>::kComponents;
};

// Mask of slots: one bit for each component of the operands that have a gradient.
template <class... S, class... Source>
__device__ constexpr unsigned gradient_mask(const Tuple<S...>*, const Tuple<Source...>* sources) {
  unsigned mask = 0;
  int k = 0;
  ((mask |= IsSink<S>::value ? ((1u << ComponentsOfSink<S>::kCount) - 1u) << first_slot(k, sources) : 0u, ++k), ...);
  return mask;
}

// Number of gradients that are stored rather than summed.
template <class... S>
__device__ constexpr int gradient_count(const Tuple<S...>*) {
  return ((IsSink<S>::value && !IsSummed<S>::value ? 1 : 0) + ... + 0);
}

template <class... S>
__device__ constexpr bool sums_rows(const Tuple<S...>*) {
  return (IsSumOfRows<S>::value || ... || false);
}
template <class Layout>
__device__ constexpr bool ends_rows(bool sums_rows) {
  if constexpr (Layout::kStrips) return sums_rows && Layout::kSteps == 1;
  return false;
}

template <class... S>
__device__ constexpr int derivative_count(const Tuple<S...>*) {
  return ((IsSink<S>::value ? ComponentsOfSink<S>::kCount : 0) + ... + 0);
}

// Converts an element to dual numbers, one per component, the first of them in slot kSlot.
template <unsigned kMask, int kSlot, class T>
__device__ __forceinline__ auto element_variable(T x) {
  return variable<kMask, kSlot>(x);
}
template <unsigned kMask, int kSlot, class T, int kCount, int... kComponent>
__device__ __forceinline__ auto element_variable(const Components<T, kCount>& x, Indices<kComponent...>) {
  return make_tuple(variable<kMask, kSlot + kComponent>(x.component[kComponent])...);
}
template <unsigned kMask, int kSlot, class T, int kCount>
__device__ __forceinline__ auto element_variable(const Components<T, kCount>& x) {
  return element_variable<kMask, kSlot>(x, typename MakeIndices<kCount>::type{});
}

// Sets the gradient of an element whose first slot is `slot`. If the loss is NaN, its gradient is NaN too, even if the
// formula of the derivative happens to be finite.
template <class T, unsigned kMask>
__device__ __forceinline__ void set_gradient(T& gradient, const Dual<T, kMask>& y, int slot, T factor) {
  const bool no_number = (kMask & kTentative) == 0 && y.value != y.value;
  gradient = no_number ? y.value : tangent_or_zero(y, slot) * factor;
}
template <class T, int kCount, unsigned kMask>
__device__ __forceinline__ void set_gradient(Components<T, kCount>& gradient, const Dual<T, kMask>& y, int slot,
                                             T factor) {
  // A NaN instead of the factor makes every product NaN.
  const T by = (kMask & kTentative) != 0 || y.value == y.value ? factor : y.value;
#pragma unroll
  for (int i = 0; i < kCount; ++i) gradient.component[i] = tangent_or_zero(y, slot + i) * by;
}

// Gradients with respect to one vector of each operand.
template <class Wide, int kVecSize>
struct GradientVector {
  Wide element[kVecSize];
};
template <class Compute, int kVecSize, class T>
struct GradientVectors;
template <class Compute, int kVecSize, class... S>
struct GradientVectors<Compute, kVecSize, Tuple<S...>> {
  using type = Tuple<GradientVector<typename ElementOf<typename S::Storage, Compute>::Wide, kVecSize>...>;
};

// A loaded vector of grad_output if there is one per element; otherwise empty.
template <class Element, int kVecSize>
struct LoadedElement {
  using type = Absent;
};
template <class Storage, Access kAccess, int kVecSize>
struct LoadedElement<Source<Storage, kAccess>, kVecSize> {
  using type = typename LoadedOf<Source<Storage, kAccess>, kVecSize>::type;
};
template <class Storage, Along kAlong, int kA, int kB, int kVecSize>
struct LoadedElement<TileSource<Storage, kAlong, kA, kB>, kVecSize> {
  using type = LoadedTile<Storage, kAlong, kA, kB>;
};

// Sum of a vector's terms, as a tree in their own type. If that overflows, they are added again in double: the sum may
// be in range once it is scaled.
template <int kCount, class Compute>
__device__ __forceinline__ double sum_tree(const Compute (&x)[kCount]) {
  Compute tree[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) tree[i] = x[i];
#pragma unroll
  for (int span = 1; span < kCount; span *= 2) {
#pragma unroll
    for (int i = 0; i + span < kCount; i += 2 * span) tree[i] += tree[i + span];
  }
  if (scalar_abs(tree[0]) <= scalar_max(Compute())) return tree[0];
  double total = 0.0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) total += x[i];
  return total;
}

// Running sums of a lane over the derivatives of an operand. Empty unless its sink is a SummedSink.
template <class Compute, int kVecSize, class S>
struct LaneSum {
  template <class X>
  __device__ __forceinline__ void add(const X&) {
  }
  __device__ __forceinline__ void end_run() {
  }
};
// One sum over all vectors (kAll), or over those of one row (kRow).
template <class Compute, int kVecSize>
struct LaneSumOfVectors {
  double total = 0.0;

  template <int kWidth>
  __device__ __forceinline__ void add(const Compute (&x)[kWidth]) {
    total += sum_tree(x);
  }
  __device__ __forceinline__ void end_run() {
  }
};
template <class Compute, int kVecSize, class Storage>
struct LaneSum<Compute, kVecSize, SummedSink<Storage, SumOf::kAll>> : LaneSumOfVectors<Compute, kVecSize> {};
template <class Compute, int kVecSize, class Storage>
struct LaneSum<Compute, kVecSize, SummedSink<Storage, SumOf::kRow>> : LaneSumOfVectors<Compute, kVecSize> {};
// One sum per column of the vector. Runs of up to 16 terms are added in Compute, scaled down so that they cannot
// overflow: converting each term to double would take as long as the loss.
template <class Compute, int kVecSize, class Storage>
struct LaneSum<Compute, kVecSize, SummedSink<Storage, SumOf::kColumn>> {
  static constexpr double kUp = sizeof(Compute) == 8 ? 1.0 : 64.0;
  Compute run[kVecSize] = {};
  double total[kVecSize] = {};

  __device__ __forceinline__ void add(const Compute (&x)[kVecSize]) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) run[i] += x[i] * static_cast<Compute>(1.0 / kUp);
  }
  __device__ __forceinline__ void end_run() {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      total[i] += kUp * run[i];
      run[i] = 0;
    }
  }
};

template <class Compute, int kVecSize, class T>
struct LaneSums;
template <class Compute, int kVecSize, class... S>
struct LaneSums<Compute, kVecSize, Tuple<S...>> {
  using type = Tuple<LaneSum<Compute, kVecSize, S>...>;
};

// Loaded vectors of all operands.
template <int kVecSize, class T>
struct LoadedTuple;
template <int kVecSize, class... S>
struct LoadedTuple<kVecSize, Tuple<S...>> {
  using type = Tuple<typename LoadedOf<S, kVecSize>::type...>;
};

template <class Compute, int kVecSize, class S>
__device__ constexpr int vector_bytes_of() {
  using Storage = typename S::Storage;
  constexpr int kConverted = sizeof(typename ElementOf<Storage, Compute>::Wide) * kVecSize;
  constexpr int kLoaded = sizeof(typename LoadedOf<S, kVecSize>::type);
  return ElementOf<Storage, Compute>::kComponents > 1 && kConverted > kLoaded ? kConverted : kLoaded;
}
template <class Compute, int kVecSize, class... S>
__device__ constexpr int vector_bytes(const Tuple<S...>*) {
  return (vector_bytes_of<Compute, kVecSize, S>() + ... + 0);
}

template <class... S>
__device__ constexpr bool any_shifted(const Tuple<S...>*) {
  return ((S::kAccess == Access::kShifted) || ... || false);
}
template <class... S>
__device__ constexpr int gathered_count(const Tuple<S...>*) {
  return ((S::kAccess == Access::kGather ? 1 : 0) + ... + 0);
}
template <class... S>
__device__ constexpr bool any_gathered(const Tuple<S...>*) {
  return ((S::kAccess == Access::kGather || S::kAccess == Access::kGatherShifted) || ... || false);
}
template <class Element>
__device__ constexpr bool is_shifted(const Element*) {
  return false;
}
template <class Storage>
__device__ constexpr bool is_shifted(const Source<Storage, Access::kShifted>*) {
  return true;
}

// Cursor of a vector whose operands may be gathered and whose results may be scattered; empty for all other layouts.
template <class Layout>
struct PlaceOf {
  using type = Absent;
  static constexpr bool kKept = false;
};
template <int kVecSize, int kStreams, int kRank, bool kLongRows>
struct PlaceOf<GatheredLayout<kVecSize, kStreams, kRank, kLongRows>> {
  using type = typename GatheredLayout<kVecSize, kStreams, kRank, kLongRows>::Cursor;
  static constexpr bool kKept = true;
};

// Presence of a vector: a bool, or with kRagged a mask with one bit per element.
template <bool kRagged>
struct PresentOf {
  using type = bool;
};
template <>
struct PresentOf<true> {
  using type = unsigned;
};

template <class Loss_, class Layout_, int kVecSize, class Sources_, class Sinks_, class Element_>
struct Pointwise {
  using Loss = Loss_;
  using Compute = typename Loss::Compute;
  using Layout = Layout_;
  using Cursor = typename Layout::Cursor;
  using Slots = typename MakeIndices<Sources_::kSize>::type;
  using Sums = typename LaneSums<Compute, kVecSize, Sinks_>::type;
  static constexpr int kVector = kVecSize;
  static constexpr bool kGathered = PlaceOf<Layout>::kKept;
  static constexpr bool kRagged = Layout::kRagged;
  using Present = typename PresentOf<kRagged>::type;
  static constexpr int kGathers = gathered_count(static_cast<const Sources_*>(nullptr));
  static constexpr bool kFewInFlight = any_gathered(static_cast<const Sources_*>(nullptr));
  static constexpr int kOperands = Sources_::kSize;
  static constexpr int kElementStream = 2 * kOperands;
  static constexpr unsigned kMask =
      gradient_mask(static_cast<const Sinks_*>(nullptr), static_cast<const Sources_*>(nullptr));
  template <int kSlot>
  static constexpr int kFirst = first_slot(kSlot, static_cast<const Sources_*>(nullptr));
  template <int kSlot>
  using Wide = typename ElementOf<typename TypeAt<kSlot, Sources_>::Storage, Compute>::Wide;
  static constexpr bool kScaledPerElement = IsSource<Element_>::value;
  static constexpr bool kStoresValues = IsSink<Element_>::value;
  static constexpr bool kSumsRows = sums_rows(static_cast<const Sinks_*>(nullptr));
  static constexpr bool kEndsRows = ends_rows<Layout>(kSumsRows);  // each vector completes its rows
  // Prefetches in strips that have too few warps to hide the latency of loads.
  static constexpr bool kPrefetches = Layout::kStrips && kVecSize > 1 && (kRagged || (kNarrow && kSumsRows));
  static constexpr int kGradients = gradient_count(static_cast<const Sinks_*>(nullptr));
  static constexpr int kDerivatives = derivative_count(static_cast<const Sinks_*>(nullptr));
  static constexpr bool kComponents = has_components(static_cast<const Sources_*>(nullptr));
  static constexpr bool kStaged = any_staged(static_cast<const Sources_*>(nullptr)) ||
                                  any_staged(static_cast<const Sinks_*>(nullptr)) || IsStaged<Element_>::value;
  // Number of vectors that must follow a vector that is read as a whole: a shifted load also reads words past the
  // vector.
  static constexpr int kReadsAhead =
      any_shifted(static_cast<const Sources_*>(nullptr)) || is_shifted(static_cast<const Element_*>(nullptr));
  // Registers of a vector between its load and its results: the loaded words, and offsets of the results. Elements of
  // several components are converted before the arithmetic begins.
  static constexpr int kVectorWords = (vector_bytes<Compute, kVecSize>(static_cast<const Sources_*>(nullptr)) +
                                       sizeof(typename LoadedElement<Element_, kVecSize>::type)) /
                                          4 +
                                      (Layout::kOuter > 0 ? 2 * kGradients : 0);

  // A vector between its load and its results: loaded operands, and offsets of the results.
  template <int kWidth>
  struct Registers {
    typename LoadedTuple<kWidth, Sources_>::type operands;
    typename LoadedElement<Element_, kWidth>::type grad_output;
    int64 sink_offset[kOperands];
    int64 element_offset;
    typename PlaceOf<Layout>::type place;
  };

  Loss loss;
  const Layout& layout;  // a kernel parameter: a copy of a StridedLayout would go to local memory
  Sources_ sources;
  Sinks_ sinks;
  Element_ element;

  // Visits kBatch vectors of the lane. All loads are issued before the first result is needed, and before
  // scale.factor(), which may wait for a load of its own. With kWhole, all vectors are present. Otherwise, a vector of
  // a strip or tile may be absent: another one is loaded in its place and the results are dropped, so that no branch
  // delays a load.
  template <int kBatch, bool kWhole, class Scale>
  __device__ __forceinline__ void visit(Cursor& cursor, Compute& sum, Scale& scale, Sums& sums) const {
    Registers<kVecSize> vectors[kBatch];
    Present present[kBatch];
    bool row_present[kBatch];
    constexpr bool kTriedTogether = Loss::kTriedFirst && kComponents && !kEndsRows && kWhole;
    const Cursor begin = cursor;
    int64 row_sum = 0;
    if constexpr (kEndsRows) row_sum = cursor.row_sum;
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if constexpr (kWhole) {
        present[u] = true;
      } else if constexpr (kRagged) {
        present[u] = layout.elements_present(cursor);
      } else {
        present[u] = layout.present(cursor) > 0;
      }
      if constexpr (kEndsRows) row_present[u] = kWhole || cursor.row < layout.rows;
      if constexpr (kWhole) {
        load_all(cursor, 0, vectors[u], Slots{});
      } else {
        load_all(layout.inside(cursor), 0, vectors[u], Slots{});
      }
      layout.advance(cursor);
    }
    if constexpr (kTriedTogether) {
      // Evaluates all vectors of the batch before the first branch, which would keep the compiler from interleaving
      // them.
      Results<kVecSize> results[kBatch];
      const Compute before = sum, factor = scale.factor();
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        settle(vectors[u], Slots{});
        evaluate_all<kTentative, true>(vectors[u], true, sum, factor, results[u]);
      }
      if (is_finite(sum)) {
#pragma unroll
        for (int u = 0; u < kBatch; ++u) keep(vectors[u], results[u], sums, Slots{});
      } else {
        sum = before;
        visit_edges(begin, kBatch, sum, factor, sums);
      }
    } else {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        settle(vectors[u], Slots{});
        evaluate<kVecSize, kWhole>(vectors[u], present[u], sum, scale.factor(), sums, Slots{});
        if constexpr (kEndsRows) {
          end_row(sums, row_present[u], row_sum + u * Layout::kDown * layout.strips, Slots{});
        }
      }
    }
  }

  // Prefetches kBatch vectors of the lane, for the operands that have their own elements in each row. Does nothing in
  // joined rows, except in 16 bits: those of float32 took 1.02 times as long with it.
  template <int kBatch>
  __device__ __forceinline__ void prefetch(Cursor cursor) const {
    if constexpr (kRagged && !kNarrow) {
      if (layout.period > 0) return;
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      bool exists = layout.present(cursor);
      // The last row may touch fewer vectors than others.
      if constexpr (kRagged) exists &= cursor.element < layout.elements;
      if (exists) prefetch_all(cursor, Slots{});
      layout.advance(cursor);
    }
  }

  // Visits kBatch vectors of the lane; `ahead` already holds the first one. Each vector is loaded before the previous
  // one is evaluated, and so is the first vector of the next batch, if there is one (`load_next`). Otherwise, warps
  // that were released together wait for memory together, and compute together.
  template <int kBatch, class Next>
  __device__ __forceinline__ void visit_ahead(Cursor& cursor, const Next& load_next, Registers<kVecSize>& ahead,
                                              Compute& sum, Compute factor, Sums& sums) const {
#pragma unroll 1
    for (int u = 0; u < kBatch; ++u) {
      Registers<kVecSize> vector = ahead;
      set_offsets(cursor, vector, Slots{});
      layout.advance(cursor);
      if (u + 1 < kBatch) {
        load_words(cursor, ahead, Slots{});
      } else {
        load_next();
      }
      evaluate<kVecSize, true>(vector, true, sum, factor, sums, Slots{});
    }
  }
  __device__ __forceinline__ void load_ahead(const Cursor& at, bool present, Registers<kVecSize>& to) const {
    if (present) load_words(at, to, Slots{});
  }

  // Visits vectors with tentative values that are not finite. They are loaded again, so that all other vectors need no
  // registers to keep what was loaded.
  __device__ __forceinline__ void visit_edges(Cursor cursor, int count, Compute& sum, Compute factor,
                                              Sums& sums) const {
#pragma unroll 1
    for (int u = 0; u < count; ++u) {
      Registers<kVecSize> vector;
      Results<kVecSize> results;
      load_all(cursor, 0, vector, Slots{});
      settle(vector, Slots{});
      settle_edges<true>(vector, true, sum, factor, results);
      keep(vector, results, sums, Slots{});
      layout.advance(cursor);
    }
  }

  template <int... kSlot>
  __device__ __forceinline__ void prefetch_all(const Cursor& at, Indices<kSlot...>) const {
    (prefetch_one<kSlot>(at, get<kSlot>(sources)), ...);
  }
  template <int kStream, class S>
  __device__ __forceinline__ void prefetch_one(const Cursor& at, const S& source) const {
    if constexpr (S::kAccess == Access::kStream) {
      if (layout.row_stride[kStream] != 0) prefetch_line(source.pointer + layout.template offset<kStream, false>(at));
    }
  }

  // Visits a vector that is only partly present, element by element. Rare, so the code is kept small. Vectors of tiles
  // and strips are present or absent as a whole.
  template <class Scale>
  __device__ __forceinline__ void visit_partial(Cursor& cursor, Compute& sum, Scale& scale, Sums& sums) const {
    const int64 present = layout.present(cursor);
    const Compute factor = scale.factor();  // queried here, where the warp is converged
    constexpr int kAtOnce = Layout::kTiled || Layout::kStrips ? kVecSize : 1;
#pragma unroll 1
    for (int i = 0; i < kVecSize / kAtOnce && i < present; ++i) {
      Registers<kAtOnce> elements;
      load_all(cursor, i, elements, Slots{});
      evaluate<kAtOnce, true>(elements, true, sum, factor, sums, Slots{});
    }
    if constexpr (kEndsRows) {
      __syncwarp();
      end_row(sums, cursor.row < layout.rows, cursor.row_sum, Slots{});
    }
    layout.advance(cursor);
  }

  // Visits a batch that is not present as a whole. All batches of a strip may be incomplete, and so may one tile in
  // five (bfloat16, 300 x 111849, one operand transposed: 0.173 ms when each element of these tiles waited for its own
  // load, 0.120 in groups of eight).
  template <int kUnroll, int kFlight, class Scale>
  __device__ __forceinline__ void visit_edge(Cursor& cursor, Compute& sum, Scale& scale, Sums& sums) const {
    constexpr int kPresent = kStaged && kFlight > 8 ? 8 : kStaged ? kFlight : 2;
    if constexpr (kRagged) {
#pragma unroll 1
      for (int u = 0; u < kUnroll; u += kFlight) visit<kFlight, false>(cursor, sum, scale, sums);
    } else if constexpr ((Layout::kStrips && kFlight > 2) || (Layout::kTiled && kFlight > 1)) {
#pragma unroll 1
      for (int u = 0; u < kUnroll; u += kPresent) visit<kPresent, false>(cursor, sum, scale, sums);
    } else {
#pragma unroll 1
      for (int u = 0; u < kUnroll; ++u) visit_partial(cursor, sum, scale, sums);
    }
  }

  // Ends the rows that the lanes have just visited: a vector of each row, or with several steps along a row a batch of
  // it. Adds each row's sum over the lanes and stores it. Preconditions: all lanes call it together.
  __device__ __forceinline__ void end_row(Sums& sums, bool present, int64 index) const {
    end_row(sums, present, index, Slots{});
  }
  __device__ __forceinline__ void end_run(Sums& sums) const {
    end_run(sums, Slots{});
  }
  // Adds the sums of all lanes over a chunk, or over a task of strips, and stores the partial sums. Preconditions: all
  // lanes call it together.
  __device__ __forceinline__ void end_sums(Sums& sums, int64 index) const {
    end_sums(sums, index, Slots{});
  }
  // Stores the sums of the columns of a strip, of which this lane has one vector. `index` counts ranges of all planes.
  __device__ __forceinline__ void end_columns(Sums& sums, const Cursor& cursor, int64 index) const {
    end_columns(sums, cursor, index, Slots{});
  }

 private:
  template <int kWidth>
  struct Results {
    Compute value[kWidth];
    typename GradientVectors<Compute, kWidth, Sources_>::type gradients;
  };

  template <int kWidth, int... kSlot>
  __device__ __forceinline__ void load_all(const Cursor& at, int i, Registers<kWidth>& to, Indices<kSlot...>) const {
    if constexpr (kGathered) to.place = i == 0 ? at : layout.at_element(at.element + i);
    ((get<kSlot>(to.operands) = load_from<kSlot, kWidth>(at, i, get<kSlot>(sources), to.place)), ...);
    if constexpr (kScaledPerElement) to.grad_output = load_from<kElementStream, kWidth>(at, i, element, to.place);
    ((to.sink_offset[kSlot] = result_offset<kOperands + kSlot>(at, get<kSlot>(sinks)) + i), ...);
    to.element_offset = result_offset<kElementStream>(at, element) + i;
  }
  template <int kStream, class S>
  __device__ __forceinline__ int64 result_offset(const Cursor& at, const S& sink) const {
    if constexpr (IsStaged<S>::value) {
      return sink.template place<kStream>(layout, at);
    } else {
      return layout.template offset<kStream, false>(at);
    }
  }

  // Loads like load_all, but word by word: otherwise, the compiler would split a vector into elements to keep it while
  // another one is evaluated.
  template <int... kSlot>
  __device__ __forceinline__ void load_words(const Cursor& at, Registers<kVecSize>& to, Indices<kSlot...>) const {
    (load_words_from<kSlot>(at, get<kSlot>(sources), get<kSlot>(to.operands)), ...);
  }
  template <int kStream, class S, class L>
  __device__ __forceinline__ void load_words_from(const Cursor& at, const S& source, L& to) const {
    if constexpr (S::kAccess == Access::kStream && !IsTile<S>::value) {
      using P = Pack<typename S::Storage, kVecSize>;
      using Word = typename P::Word;
      const Word* pointer = reinterpret_cast<const Word*>(source.pointer + layout.template offset<kStream, false>(at));
#pragma unroll
      for (int i = 0; i < P::kWords; ++i) reinterpret_cast<Word*>(&to.pack)[i] = __ldg(pointer + i);
    } else {
      to = load_from<kStream, kVecSize>(at, 0, source, at);
    }
  }
  template <int... kSlot>
  __device__ __forceinline__ void set_offsets(const Cursor& at, Registers<kVecSize>& to, Indices<kSlot...>) const {
    ((to.sink_offset[kSlot] = layout.template offset<kOperands + kSlot, false>(at)), ...);
    to.element_offset = layout.template offset<kElementStream, false>(at);
  }

  template <int kWidth, int... kSlot>
  __device__ __forceinline__ void settle(Registers<kWidth>& x, Indices<kSlot...>) const {
    (get<kSlot>(x.operands).settle(), ...);
    if constexpr (kScaledPerElement) x.grad_output.settle();
  }

  template <int kStream, int kWidth, class S, class Place>
  __device__ __forceinline__ auto load_from(const Cursor& at, int i, const S& source, const Place& place) const {
    constexpr bool kSplat = S::kAccess == Access::kSplat;
    if constexpr (kRagged && S::kAccess == Access::kStream) {
      const int64 from = layout.template offset<kStream, false>(at);
      if (from + kWidth <= layout.elements) return load<kWidth>(source, from);
      typename LoadedOf<S, kWidth>::type to;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        to.pack.element[j] = load_pack<1>(source.pointer + min(from + j, layout.elements - 1)).element[0];
      }
      return to;
    } else if constexpr (S::kAccess == Access::kPeriodic) {
      typename LoadedOf<S, kWidth>::type to;
      int place = at.place;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        to.pack.element[j] = load_pack<1>(source.pointer + place * layout.inner_stride[kStream]).element[0];
        place = place + 1 == static_cast<int>(layout.period) ? 0 : place + 1;
      }
      return to;
    } else if constexpr (S::kAccess == Access::kGather) {
      typename LoadedOf<S, kWidth>::type to;
      layout.template each<kStream, kWidth>(
          place, [&](int j, int64 from) { to.pack.element[j] = load_pack<1>(source.pointer + from).element[0]; });
      return to;
    } else if constexpr (S::kAccess == Access::kGatherShifted && kWidth == 1) {
      return load<1>(source, place.base[kStream]);
    } else if constexpr (S::kAccess == Access::kGatherShifted) {
      typename LoadedOf<S, kWidth>::type to;
      if (place.left[0] >= 2 * kWidth) {  // the word after the vector's last one is in the row too
        to.pack = load_unaligned<kWidth>(source.pointer + place.base[kStream]);
      } else {
        to.pack.skipped = 0;
        auto* const elements = reinterpret_cast<typename S::Storage*>(to.pack.word);
        layout.template each<kStream, kWidth>(
            place, [&](int j, int64 from) { elements[j] = load_pack<1>(source.pointer + from).element[0]; });
      }
      return to;
    } else if constexpr (S::kAccess == Access::kGatherRow) {
      // The last row of all has no next row: its second number repeats the first.
      const int64 from = place.base[kStream];
      const bool ends = place.left[0] < kWidth && place.element + place.left[0] < layout.elements;
      const int64 next = from + (ends ? layout.template jump<kStream>(place) : 0);
      return LoadedRowNumbers<typename S::Storage>{load_pack<1>(source.pointer + from),
                                                   load_pack<1>(source.pointer + next), place.left[0]};
    } else if constexpr (IsStaged<S>::value) {
      typename LoadedOf<S, kWidth>::type to;
      to.pack.element[0] = source.tile[source.template place<kStream>(layout, at)];
      return to;
    } else if constexpr (IsTile<S>::value) {
      const int64 offset = layout.template offset<kStream, false>(at) + i;
      return load_tile(source, offset, layout.stride_a[kStream], layout.stride_b[kStream]);
    } else {
      return load<kWidth>(source, layout.template offset<kStream, kSplat>(at) + (kSplat ? 0 : i));
    }
  }

  template <int kStream, int kWidth, class S, class X, class Place>
  __device__ __forceinline__ void store_to(const S& sink, int64 offset, const X (&x)[kWidth],
                                           const Place& place) const {
    if constexpr (IsScattered<S>::value) {
      const auto pack = NarrowPack<typename S::Storage, kWidth>::from(x);
      layout.template each<kStream, kWidth>(place, [&](int j, int64 to) { sink.pointer[to] = pack.element[j]; });
    } else if constexpr (IsStaged<S>::value) {
      sink.tile[offset] = NarrowPack<typename S::Storage, kWidth>::from(x).element[0];
    } else if constexpr (IsTile<S>::value && kStaged) {
      // Stores without the cache hint of store_tile: partly written sectors wait in L2 for neighbouring tiles.
      store_pack<1>(sink.pointer + offset, NarrowPack<typename S::Storage, kWidth>::from(x));
    } else if constexpr (IsTile<S>::value) {
      store_tile(sink, offset, layout.stride_a[kStream], layout.stride_b[kStream], x);
    } else if constexpr (!IsSummed<S>::value) {
      store<kWidth>(sink, offset, x);
    }
  }

  template <int kWidth, bool kWhole, int... kSlot>
  __device__ __forceinline__ void evaluate(const Registers<kWidth>& x, Present present, Compute& sum, Compute scale,
                                           Sums& sums, Indices<kSlot...>) const {
    Results<kWidth> results;
    if constexpr (Loss::kTriedFirst) {
      if (loss.usual()) {
        const Compute before = sum;
        evaluate_all<kTentative, kWhole>(x, present, sum, scale, results);
        if (!is_finite(sum)) {
          sum = before;
          settle_edges<kWhole>(x, present, sum, scale, results);
        }
      } else {
        evaluate_all<0u, kWhole>(x, present, sum, scale, results);
      }
    } else {
      evaluate_all<0u, kWhole>(x, present, sum, scale, results);
    }
    if (!kWhole && !present) return;
    if constexpr (kRagged && !kWhole) {
      keep_present(x, results, present, sums, Slots{});
    } else {
      keep(x, results, sums, Slots{});
    }
  }
  template <bool kWhole>
  static __device__ __forceinline__ bool is_present(Present present, int i) {
    if constexpr (kWhole) {
      return true;
    } else if constexpr (kRagged) {
      return present >> i & 1;
    } else {
      return present;
    }
  }

  // Does the same as `keep`, for the elements that are present.
  template <int kWidth, int... kSlot>
  __device__ __forceinline__ void keep_present(const Registers<kWidth>& x, Results<kWidth>& results, Present present,
                                               Sums& sums, Indices<kSlot...>) const {
    if constexpr (kStoresValues) store_present<kWidth>(element, x.element_offset, results.value, present);
    (store_present<kWidth>(get<kSlot>(sinks), x.sink_offset[kSlot], get<kSlot>(results.gradients).element, present),
     ...);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (!(present >> i & 1)) ((get<kSlot>(results.gradients).element[i] = {}), ...);
    }
    (get<kSlot>(sums).add(get<kSlot>(results.gradients).element), ...);
  }
  template <int kWidth, class S, class X>
  __device__ __forceinline__ void store_present(const S& sink, int64 offset, const X (&x)[kWidth],
                                                Present present) const {
    if constexpr (IsSink<S>::value && !IsSummed<S>::value) {
      if (present == (1u << kWidth) - 1u) {
        store<kWidth>(sink, offset, x);
        return;
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const X one[1] = {x[i]};
        if (present >> i & 1) store<1>(sink, offset + i, one);
      }
    }
  }

  // Stores the results of a vector, and adds derivatives that are summed to `sums`.
  template <int kWidth, int... kSlot>
  __device__ __forceinline__ void keep(const Registers<kWidth>& x, const Results<kWidth>& results, Sums& sums,
                                       Indices<kSlot...>) const {
    if constexpr (kStoresValues) store_to<kElementStream, kWidth>(element, x.element_offset, results.value, x.place);
    (store_to<kOperands + kSlot, kWidth>(get<kSlot>(sinks), x.sink_offset[kSlot], get<kSlot>(results.gradients).element,
                                         x.place),
     ...);
    (get<kSlot>(sums).add(get<kSlot>(results.gradients).element), ...);
  }

  template <unsigned kMode, bool kWhole, int kWidth>
  __device__ __forceinline__ void evaluate_all(const Registers<kWidth>& x, Present present, Compute& sum, Compute scale,
                                               Results<kWidth>& results) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      evaluate_element<kMode>(x, i, scale, results, Slots{});
      sum += is_present<kWhole>(present, i) ? results.value[i] : Compute(0);
    }
  }

  // Computes value and gradients of element i. A tentative value of NaN does not set the gradients to NaN, because
  // settle_edges follows. Derivatives that are summed stay unscaled: the finished sum is scaled.
  template <unsigned kMode, int kWidth, int... kSlot>
  __device__ __forceinline__ void evaluate_element(const Registers<kWidth>& x, int i, Compute scale,
                                                   Results<kWidth>& results, Indices<kSlot...>) const {
    const auto y = loss(
        element_variable<kMask | kMode, kFirst<kSlot>>(get<kSlot>(x.operands).template element<Wide<kSlot>>(i))...);
    results.value[i] = y.value;
    Compute unscaled = 1;
    if constexpr (kScaledPerElement) unscaled = x.grad_output.template element<Compute>(i);
    const Compute factor = kScaledPerElement ? scale * unscaled : scale;
    (set_gradient(get<kSlot>(results.gradients).element[i], y, kFirst<kSlot>,
                  IsSummed<TypeAt<kSlot, Sinks_>>::value ? unscaled : factor),
     ...);
  }

  // Evaluates a vector with tentative values that are not finite, and adds its values to `sum`. An element whose
  // tentative value is finite keeps it, whatever its neighbours are. Rare, so the code is kept small: a loop evaluates
  // the first element and rotates the vector, because registers cannot be indexed.
  template <bool kWhole, int kWidth>
  __device__ __forceinline__ void settle_edges(Registers<kWidth> x, Present present, Compute& sum, Compute scale,
                                               Results<kWidth>& results) const {
#pragma unroll 1
    for (int i = 0; i < kWidth; ++i) {
      evaluate_element<kTentative>(x, 0, scale, results, Slots{});
      if (!is_finite(results.value[0])) evaluate_element<0u>(x, 0, scale, results, Slots{});
      sum += is_present<kWhole>(present, i) ? results.value[0] : Compute(0);
      rotate(x, results, Slots{});
    }
  }
  template <int kWidth, int... kSlot>
  __device__ __forceinline__ void rotate(Registers<kWidth>& x, Results<kWidth>& results, Indices<kSlot...>) const {
    (get<kSlot>(x.operands).rotate(), ...);
    if constexpr (kScaledPerElement) x.grad_output.rotate();
    if constexpr (kStoresValues) rotate_elements(results.value);
    (rotate_elements(get<kSlot>(results.gradients).element), ...);
  }

  // Adds the lanes' sums of a row of a strip, of which each lane has a vector, and stores the result.
  template <int... kSlot>
  __device__ __forceinline__ void end_row(Sums& sums, bool present, int64 index, Indices<kSlot...>) const {
    (end_row(get<kSlot>(sinks), get<kSlot>(sums), present, index), ...);
  }
  template <class Storage, class S>
  __device__ __forceinline__ void end_row(const SummedSink<Storage, SumOf::kRow>& sink, S& sum, bool present,
                                          int64 index) const {
    double x = sum.total;
    sum.total = 0.0;
#pragma unroll
    for (int offset = 1; offset < Layout::kAcross; offset *= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    if (present && threadIdx.x % Layout::kAcross == 0) sink.partials[index] = x;
  }
  template <class S, class L>
  __device__ __forceinline__ void end_row(const S&, L&, bool, int64) const {
  }

  template <int... kSlot>
  __device__ __forceinline__ void end_run(Sums& sums, Indices<kSlot...>) const {
    (get<kSlot>(sums).end_run(), ...);
  }

  template <int... kSlot>
  __device__ __forceinline__ void end_sums(Sums& sums, int64 index, Indices<kSlot...>) const {
    (end_sum(get<kSlot>(sinks), get<kSlot>(sums), index), ...);
  }
  template <class Storage, class S>
  __device__ __forceinline__ void end_sum(const SummedSink<Storage, SumOf::kAll>& sink, S& sum, int64 index) const {
    const double total = rolled_warp_sum(sum.total);
    sum.total = 0.0;
    if (threadIdx.x % kWarp == 0) sink.partials[index] = total;
  }
  template <class S, class L>
  __device__ __forceinline__ void end_sum(const S&, L&, int64) const {
  }

  template <int... kSlot>
  __device__ __forceinline__ void end_columns(Sums& sums, const Cursor& cursor, int64 index, Indices<kSlot...>) const {
    (end_column(get<kSlot>(sinks), get<kSlot>(sums), cursor, index), ...);
  }
  template <class Storage, class S>
  __device__ __forceinline__ void end_column(const SummedSink<Storage, SumOf::kColumn>& sink, S& sum,
                                             const Cursor& cursor, int64 index) const {
    double* const at = sink.partials + (index * layout.columns + cursor.column) * kVecSize;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      double x = sum.total[i];
      sum.total[i] = 0.0;
#pragma unroll
      for (int offset = Layout::kAcross; offset < kWarp; offset *= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
      if (threadIdx.x % kWarp < Layout::kAcross && cursor.column < layout.columns) at[i] = x;
    }
  }
  template <class S, class L>
  __device__ __forceinline__ void end_column(const S&, L&, const Cursor&, int64) const {
  }
};

// Number of vectors in flight: a batch, or fewer if registers would spill. A double takes two registers. So does the
// offset of each stream of each vector, and computing offsets in many dimensions takes more. A heavy loss needs
// registers for its arithmetic, and shifting needs some too. With only one vector of 16-bit numbers, a heavy loss still
// waits for memory: two vectors gave up to a sixth more bandwidth. A micro-tile consists of several vectors by itself.
template <class Program, int kUnroll>
__host__ __device__ constexpr int flight() {
  constexpr bool kWide = sizeof(typename Program::Compute) == 8;
  constexpr bool kTight = Program::Layout::kOuter > (kWide ? 0 : 1) || Program::kReadsAhead > 0;
  constexpr int kHalved = kUnroll > 1 ? kUnroll / 2 : 1;
  constexpr int kTightFree = kWide && Program::kScaledPerElement && kUnroll > 2 ? 2 : kHalved;
  constexpr bool kMicroTile = Program::Layout::kTiled && Program::kVector > 1;
  // Sums of derivatives take registers, and so do the offsets of gathered elements.
  constexpr bool kSummed = Program::kDerivatives > Program::kGradients &&
                           (Program::Layout::kOuter == 0 || (kNarrow && Program::kScaledPerElement));
  // So do ragged rows, if sums of eight or more columns add to the mask of elements that are present, or if the loss is
  // heavy.
  constexpr int kCost = Program::Loss::kHeavy;
  constexpr bool kSums = Program::kRagged && Program::kDerivatives > Program::kGradients;
  constexpr bool kColumns = kSums && !Program::kSumsRows && Program::kVector >= 8;
  constexpr bool kHalf = kSummed || Program::kFewInFlight || kColumns || (Program::kRagged && kCost > 1);
  constexpr bool kMany = Program::kGathers * Program::kVector >= 16 || (kSums && kCost > 1) ||
                         (kColumns && (kCost > 0 || Program::kOperands > 2));
  constexpr int kFree = kMicroTile || kMany ? 1 : kTight ? kTightFree : kHalf ? kHalved : kUnroll;
  constexpr bool kRoom =
      kNarrow && Program::Loss::kHeavy == 1 && (Program::Layout::kOuter == 0 || Program::Layout::kStrips);
  // With two outer dimensions, this lets a third block fit on an SM.
  constexpr bool kFewWide = Program::kGathered || Program::Layout::kOuter == 2;
  constexpr int kElements = kWide ? (kFewWide ? 2 : 4) : kRoom ? 16 : 8;
  constexpr int kFew = Program::kVector < kElements ? kElements / Program::kVector : 1;
  constexpr int kMost = Program::Loss::kHeavy > 0 && kFew < kFree ? kFew : kFree;
  // Second derivatives of components leave no registers for a second vector.
  if (Program::kComponents && Program::Loss::kHeavy > 2) return 1;
  if (Program::kStaged && kMost > kStagedFlight) return vectors_in_flight(kStagedFlight, Program::kVectorWords, 70);
  constexpr bool kHeavy = Program::kComponents || (Program::Loss::kHeavy > 1 && Program::Layout::kOuter > 0);
  return vectors_in_flight(kMost, Program::kVectorWords, max_words(Program::kDerivatives, kHeavy));
}

// True if each vector is loaded before the previous one is evaluated. A heavier loss has no registers for that beside
// two derivatives.
template <class Program>
__device__ constexpr bool loads_ahead() {
  constexpr int kHeavy = Program::Loss::kHeavy;
  constexpr bool kRoom = kHeavy == 1 || (kHeavy > 1 && Program::kDerivatives < 2);
  constexpr bool kVectors = Program::kVector > 1 && Program::kReadsAhead == 0 && !Program::kComponents;
  return kNarrow && kRoom && kVectors && Program::Layout::kOuter == 0 && !Program::kScaledPerElement;
}

// Returns `first` if kFirst, and otherwise `second`. Their types may differ.
template <bool kFirst, class A, class B>
__device__ __forceinline__ auto& either(A& first, B& second) {
  if constexpr (kFirst) {
    return first;
  } else {
    return second;
  }
}

// Visits every element once. With kSum, stores the sum of each chunk in partials[chunk] if `stores_sums`.
// Preconditions: blockDim.x is a multiple of 32. Warps work independently: no barrier inside.
template <bool kSum, int kUnroll, class Program, class Scale>
__device__ __forceinline__ void sweep(const Program& program, Scale& scale, int64 chunks, double* partials,
                                      bool stores_sums) {
  constexpr int kBatch = kUnroll * kWarp;
  constexpr int kRun = kMaxRun / (kUnroll * Program::kVector);
  constexpr int kFlight = flight<Program, kUnroll>();
  static_assert(kRun > 0 && kUnroll % kFlight == 0, "whole runs of whole batches");
  const int lane = threadIdx.x % kWarp;
  const int64 warps = static_cast<int64>(gridDim.x) * (blockDim.x / kWarp);
  using Order = BatchOrder<typename Program::Layout, kBatch>;
  const int64 end = Order::end(program.layout);
  constexpr bool kAhead = loads_ahead<Program>();
  // The scale is known before the loop: visit() would query it for every vector, in a staged tile for every element.
  constexpr bool kKnown = kAhead || Program::kStaged;
  const auto is_whole = [&](int64 at) {
    return program.layout.whole_batch(program.layout.at(at), at + kBatch - 1 + Program::kReadsAhead);
  };
  for (int64 chunk = global_warp(); chunk < chunks; chunk += warps) {
    double total = 0.0;
    typename Program::Sums sums;
    int64 first = chunk * kBatch;
    typename Program::template Registers<Program::kVector> ahead{};
    const auto load = [&](int64 at) { program.load_ahead(program.layout.at(at + lane), is_whole(at), ahead); };
    KnownScale<typename Program::Compute> known{0};
    if constexpr (kAhead) load(first);
    if constexpr (kKnown) known.value = scale.factor();
    auto& factor = either<kKnown>(known, scale);
    while (first < end) {
      typename Program::Compute partial = 0;
#pragma unroll 1
      for (int run = 0; run < kRun && first < end; ++run, first += chunks * kBatch) {
        const int64 here = Order::first_of(program.layout, first);
        auto cursor = program.layout.at(here + lane);
        if constexpr (Program::kStaged) stage_in(program, cursor);
        if (Program::Layout::kWholeBatches ||
            program.layout.whole_batch(cursor, here + kBatch - 1 + Program::kReadsAhead)) {
          if constexpr (kAhead) {
            program.template visit_ahead<kUnroll>(
                cursor, [&] { load(first + chunks * kBatch); }, ahead, partial, known.value, sums);
          } else {
#pragma unroll 1
            for (int u = 0; u < kUnroll; u += kFlight)
              program.template visit<kFlight, true>(cursor, partial, factor, sums);
          }
        } else if constexpr (!Program::Layout::kWholeBatches) {
          program.template visit_edge<kUnroll, kFlight>(cursor, partial, factor, sums);
        }
        if constexpr (Program::kStaged) stage_out(program, program.layout.at(here + lane));
      }
      total += partial;
    }
    program.end_sums(sums, chunk);
    if (kSum) {
      total = rolled_warp_sum(total);
      if (lane == 0 && stores_sums) partials[chunk] = total;
    }
  }
}

// Visits every element of a StripLayout once. A chunk consists of every chunks-th task. A group is one batch of a task:
// kUnroll steps down, or along a row. Preconditions: those of sweep.
template <bool kSum, int kUnroll, class Program, class Scale>
__device__ __forceinline__ void sweep_strips(const Program& program, Scale& scale, int64 chunks, double* partials,
                                             bool stores_sums) {
  using Layout = typename Program::Layout;
  constexpr int kGroup = Layout::kSteps == 1 ? kUnroll * Layout::kDown : 1;
  static_assert(Layout::kSteps == 1 || Layout::kSteps == kUnroll, "a batch is as wide as a strip");
  constexpr int kRun = kMaxRun / (kUnroll * Program::kVector);
  constexpr bool kShort = kRun * kUnroll > 16;  // column runs end with each group
  // In float32, a separate path for whole rows beside the one for their ends took 1.1 to 1.2 times as long as the
  // latter alone. With both paths, heavy losses spill more registers.
  constexpr bool kWholeFirst = !Program::kRagged || (kNarrow && Program::Loss::kHeavy == 0);
  constexpr int kFlight = flight<Program, kUnroll>();
  const Layout& layout = program.layout;
  const int lane = threadIdx.x % kWarp;
  const int64 warps = static_cast<int64>(gridDim.x) * (blockDim.x / kWarp);
  const int64 tasks = layout.tasks(), groups = (layout.rows + kGroup - 1) / kGroup;
  for (int64 chunk = global_warp(); chunk < chunks; chunk += warps) {
    double total = 0.0;
    for (int64 task = chunk; task < tasks; task += chunks) {
      const int64 part = task / layout.strips, strip = task - part * layout.strips;
      const int64 plane = part / layout.ranges;
      const auto top = layout.top(plane, strip);
      typename Program::Sums sums;
      int64 group = part - plane * layout.ranges;
      while (group < groups) {
        typename Program::Compute partial = 0;
#pragma unroll 1
        for (int run = 0; run < kRun && group < groups; ++run, group += layout.ranges) {
          if constexpr (Program::kPrefetches) {
            if (group + layout.ranges < groups) {
              auto next = top;
              layout.move_down(next, (group + layout.ranges) * kGroup);
              program.template prefetch<kUnroll>(next);
            }
          }
          auto cursor = top;
          layout.move_down(cursor, group * kGroup);
          const int64 end = (group + 1) * kGroup;
          if (kWholeFirst && layout.whole_strip(strip, end) && end <= layout.rows) {
#pragma unroll 1
            for (int u = 0; u < kUnroll; u += kFlight)
              program.template visit<kFlight, true>(cursor, partial, scale, sums);
          } else {
            program.template visit_edge<kUnroll, kFlight>(cursor, partial, scale, sums);
          }
          if constexpr (Program::kSumsRows && !Program::kEndsRows) {
            __syncwarp();
            program.end_row(sums, true, top.row_sum + group * layout.strips);
          }
          if (kShort) program.end_run(sums);
        }
        program.end_run(sums);
        total += partial;
      }
      program.end_sums(sums, task);
      program.end_columns(sums, top, part);
    }
    if (kSum) {
      total = rolled_warp_sum(total);
      if (lane == 0 && stores_sums) partials[chunk] = total;
    }
  }
}

template <bool kSum, int kUnroll, class Program, class Scale>
__device__ __forceinline__ void sweep_all(const Program& program, Scale& scale, int64 chunks,
                                          double* partials = nullptr, bool stores_sums = false) {
  if constexpr (Program::Layout::kStrips) {
    sweep_strips<kSum, kUnroll>(program, scale, chunks, partials, stores_sums);
  } else {
    sweep<kSum, kUnroll>(program, scale, chunks, partials, stores_sums);
  }
}

// Visits all elements, and returns their sum in thread 0 of one block; *result is true in that block. Backward computes
// no sum, because other launches may use the workspace by then. Preconditions: every thread of every block calls it
// once, except those of warps that have returned early in backward.
template <int kUnroll, class Program, class Scale>
__device__ __forceinline__ double reduce_all(const Program& program, Scale& scale, int64 chunks, double* memory,
                                             bool* result, bool backward) {
  // A single block with at most one partial sum per lane adds them in shared memory, which saves half the time of a
  // small loss. The tree is that of sum_partials, with zeros for its other leaves.
  __shared__ double shared_partials[kWarp];
  const bool alone = gridDim.x == 1 && chunks <= kWarp;
  const Workspace work = workspace(memory);
  double* partials = alone ? shared_partials : work.partials;
  sweep_all<true, kUnroll>(program, scale, chunks, partials, !backward);
  *result = false;
  if (backward) return 0.0;
  if (alone) {
    __syncthreads();
    *result = true;
    return threadIdx.x < kWarp ? rolled_warp_sum(threadIdx.x < chunks ? partials[threadIdx.x] : 0.0) : 0.0;
  }
  *result = arrive_last(work.ticket);
  return *result ? sum_partials(partials, chunks) : 0.0;
}

// ---------------------------------------------------------------------------------------------------------------------
// Called by the entry points

// value = sum(loss) / divisor; reciprocal = 1 / divisor
template <int kUnroll, class Program, class Scale, class Result>
__device__ __forceinline__ void reduce(const Program& program, Scale& scale, int64 chunks, double* memory,
                                       double divisor, double reciprocal, Result* value, bool backward = false) {
  bool result;
  const double total = reduce_all<kUnroll>(program, scale, chunks, memory, &result, backward);
  if (result && threadIdx.x == 0) *value = Narrow<Result>::from(divide_sum_by(total, divisor, reciprocal));
}

template <int kUnroll, class Program, class Result>
__device__ __forceinline__ void reduce_value(const Program& program, int64 chunks, double* memory, double divisor,
                                             double reciprocal, Result* value) {
  KnownScale<typename Program::Compute> unused{0};
  reduce<kUnroll>(program, unused, chunks, memory, divisor, reciprocal, value);
}

// Computes the value as reduce_value does, and the gradients for the expected grad_output; scale = 1 / divisor. In
// backward, where grad_output is not null, writes only the gradients, for the true grad_output, unless this warp has
// already written its part with it.
template <int kUnroll, class Program, class Result>
__device__ __forceinline__ void reduce_value_and_gradient(const Program& program, int64 chunks, double* memory,
                                                          double divisor, double scale, Result* value,
                                                          const Result* grad_output, double* expected_grad_output,
                                                          double* used_grad_output) {
  const bool backward = grad_output != nullptr;
  if (backward) {
    if (global_warp() >= chunks) return;  // this warp has no chunk, hence no record
    if (!grad_scale_is_stale(widen<double>(*grad_output), used_grad_output, expected_grad_output)) return;
  }
  using Scale = SpeculativeScale<typename Program::Compute>;
  Scale speculative(grad_output, expected_grad_output, used_grad_output, scale);
  reduce<kUnroll>(program, speculative, chunks, memory, divisor, scale, value, backward);
}

// Backward of a kernel that sums some gradients beside the value: writes the others for the true grad_output, unless
// this warp has already written its part with it. Leaves the sums alone: entry points call combine_sums before it.
template <int kUnroll, class Program, class Result>
__device__ __forceinline__ void verify_gradient(const Program& program, int64 chunks, double scale,
                                                const Result* grad_output, const double* used_grad_output,
                                                double* expected_grad_output) {
  if (Program::kGradients == 0) return;
  if (global_warp() >= chunks) return;  // this warp has no chunk, hence no record
  const double g = widen<double>(*grad_output);
  if (!grad_scale_is_stale(g, used_grad_output, expected_grad_output)) return;
  KnownScale<typename Program::Compute> known{static_cast<typename Program::Compute>(g * scale)};
  sweep_all<false, kUnroll>(program, known, chunks);
}

// Writes the gradients for the true grad_output if no earlier launch has written any; scale = 1 / divisor.
template <int kUnroll, class Program, class Result>
__device__ __forceinline__ void write_gradients(const Program& program, int64 chunks, double scale,
                                                const Result* grad_output) {
  UpstreamScale<typename Program::Compute, Result> upstream(grad_output, scale);
  sweep_all<false, kUnroll>(program, upstream, chunks);
}

// The partial sums of a broadcast operand that belong to each element of its gradient. The streams of `kept` are the
// partial sums and the gradient; the only stream of `reduced` is the partial sums.
template <int kRank>
struct Combination {
  int64 outputs;
  int64 terms;
  int64 lanes;  // lanes of a warp that share an output, a power of two; consecutive lanes add consecutive terms
  int64 warps;  // warps of a block that share an output: 1 or all of them
  Dimensions<2, kRank> kept;
  Dimensions<1, kRank> reduced;
};

// Computes gradient[m] = factor * sum of the partial sums of m. The lanes of an output take turns at its terms, each
// with eight terms in flight, which it adds as a tree. A butterfly reduction adds the lanes, and shared memory the
// warps in order. Preconditions: every thread of every block calls it once.
template <int kRank, class Storage>
__device__ __forceinline__ void combine_sums(const Combination<kRank>& how, const double* partials, Storage* gradient,
                                             double factor) {
  constexpr int kMostWarps = 8, kAhead = 8;
  __shared__ double warp_totals[kMostWarps][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int lanes = static_cast<int>(how.lanes), sharing = how.warps > 1 ? warps : 1;
  const int64 step = static_cast<int64>(lanes) * sharing, at_once = warps / sharing;
  const int64 bundle = kWarp / lanes, bundles = (how.outputs + bundle - 1) / bundle;
  // All warps of a block run the same number of rounds, because of the barriers.
  for (int64 first = blockIdx.x * at_once; first < bundles; first += gridDim.x * at_once) {
    const int64 output = (first + warp / sharing) * bundle + lane / lanes;
    const bool active = output < how.outputs;
    int64 base[2];
    how.kept.offsets(active ? output : 0, base);
    double total = 0.0;
    for (int64 start = warp % sharing * lanes + lane % lanes; start < how.terms; start += kAhead * step) {
      double term[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        int64 at[1];
        how.reduced.offsets(start + j * step, at);
        term[j] = active && start + j * step < how.terms ? __ldcg(partials + base[0] + at[0]) : 0.0;
      }
#pragma unroll
      for (int span = 1; span < kAhead; span *= 2) {
#pragma unroll
        for (int j = 0; j < kAhead; j += 2 * span) term[j] += term[j + span];
      }
      total += term[0];
    }
    __syncwarp();
    for (int offset = 1; offset < lanes; offset *= 2) total += __shfl_xor_sync(0xffffffffu, total, offset);
    if (sharing > 1) {
      __syncthreads();  // the sums of the previous round have been read
      warp_totals[warp][lane] = total;
      __syncthreads();
      if (warp == 0) {
        for (int w = 1; w < warps; ++w) total += warp_totals[w][lane];
      }
    }
    if (active && warp % sharing == 0 && lane % lanes == 0) {
      gradient[base[1]] = Narrow<Storage>::from(total * factor);
    }
  }
}

// Writes values, or gradients for a grad_output per element, times `scale`. There is no reduction.
template <int kUnroll, class Program>
__device__ __forceinline__ void map_elements(const Program& program, int64 chunks, double scale) {
  KnownScale<typename Program::Compute> known{static_cast<typename Program::Compute>(scale)};
  sweep_all<false, kUnroll>(program, known, chunks);
}
