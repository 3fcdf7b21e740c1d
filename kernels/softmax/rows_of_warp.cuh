// Rows of few contiguous classes in shared memory: a warp moves 32 rows together, and each of its lanes takes one.
//
//   32 rows of C classes = one contiguous stretch of 32 C elements per warp, or with kGaps 32 stretches of C
//
// Rows are `pitch` apart, so that the lanes of a warp do not conflict in a bank: an odd number of elements, or of words
// of two elements of 16 bits. With kGaps
//
//   linear    rows that follow each other in memory as they do in shared memory are moved by 16 bytes
//   pairs     an even number of classes of 16 bits by words
//   elements  others
//
// With kApart rows may also be next to each other, with their classes apart, which each lane moves one after another.
//
// A warp owns its rows; only __syncwarp separates loads, the lanes' own accesses, and stores.
//
// Preconditions: rows are contiguous (but with kApart), of one dimension, and follow each other without gaps unless
// kGaps; C <= 362.
#pragma once
#include "softmax/rows.cuh"

// Elements between the beginnings of two rows in shared memory: `row_pitch` of engines/row_margin/layout.py.
template <class Storage>
__device__ __forceinline__ int row_pitch(int classes) {
  if (sizeof(Storage) == 2 && classes % 2 == 0) return 2 * (classes / 2 | 1);
  return classes | 1;
}

// An element's row is i / classes by a multiplication, exact for 32 rows of up to 362 classes.
constexpr int kInverseBits = 22;

// The rows of a warp; this thread takes one of them.
template <class Storage, bool kGaps = false, bool kApart = false>
struct PackedRows {
  using P = Pack<Storage, 1>;
  using Value = Storage;
  using Index = int;
  static constexpr int kVecSize = 1;
  static constexpr bool kStoresAgain = true;
  static constexpr int kStoresTogether = 4;
  const Storage* from;  // the warp's first row
  Storage* to;
  int64 gap_from = 0, gap_to = 0;    // elements between rows
  int64 step_from = 1, step_to = 1;  // elements between classes
  int elements;                      // of all rows of the warp
  int count;
  P* stage;

  // Preconditions: `first` is the first row of the warp, which has `buffers` places for rows.
  template <class Program>
  __device__ __forceinline__ PackedRows(const Program& program, int64 first, int buffer = 0, int buffers = 1)
      : count(static_cast<int>(program.space.classes)) {
    if constexpr (kGaps) {
      gap_from = program.space.at.stride[kLogits][0] - count;
      gap_to = program.space.at.stride[kGradients][0] - count;
    }
    if constexpr (kApart) {
      step_from = program.space.class_stride[kLogits];
      step_to = program.space.class_stride[kGradients];
    }
    from = program.input + first * (count + gap_from);
    to = program.gradients + first * (count + gap_to);
    extern __shared__ uint4 staged[];
    const int64 rows = program.space.rows - first;
    elements = count * static_cast<int>(rows < kWarp ? rows : kWarp);
    stage = reinterpret_cast<P*>(staged) + (threadIdx.x / kWarp * buffers + buffer) * (kWarp * pitch());
  }
  __device__ __forceinline__ int classes() const {
    return count;
  }
  __device__ __forceinline__ int pitch() const {
    return kGaps ? row_pitch<Storage>(count) : count | 1;
  }
  // f(i, row, slot) for every 32nd element i of the rows, from this lane's on.
  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
    const unsigned inverse = (1u << kInverseBits) / count + 1;
#pragma unroll 4
    for (int i = threadIdx.x % kWarp; i < elements; i += kWarp) {
      const int row = static_cast<int>(i * inverse >> kInverseBits);
      f(i, row, stage + row * pitch() + (i - row * count));
    }
  }
  __device__ __forceinline__ P* row_of(int lane) const {
    return stage + lane * pitch();
  }
  __device__ __forceinline__ P* own_row() const {
    return row_of(threadIdx.x % kWarp);
  }

  // f(i) for the first element i of every 32nd vector of 16 bytes, and element(i) for the elements behind the last one.
  static constexpr int kVector = 16 / static_cast<int>(sizeof(Storage));
  template <class F, class Element>
  __device__ __forceinline__ void each_vector(const F& f, const Element& element) const {
    const int lane = threadIdx.x % kWarp, whole = elements / kVector * kVector;
#pragma unroll 4
    for (int i = lane * kVector; i < whole; i += kWarp * kVector) f(i);
    if (whole + lane < elements) element(whole + lane);
  }
  // f(i, row, slot) for the first element i of every 32nd pair of the rows.
  template <class F>
  __device__ __forceinline__ void each_pair(const F& f) const {
    const int half = count / 2;
    const unsigned inverse = (1u << kInverseBits) / half + 1;
#pragma unroll 4
    for (int i = threadIdx.x % kWarp; i < elements / 2; i += kWarp) {
      const int row = static_cast<int>(i * inverse >> kInverseBits);
      f(2 * i, row, stage + row * pitch() + 2 * (i - row * half));
    }
  }
  template <int kCount, class F>
  __device__ __forceinline__ void each_of(const F& f) const {
    if constexpr (kCount == 2) {
      each_pair(f);
    } else {
      each(f);
    }
  }
  // f(element, row, slot) for the elements at `at` that each() takes, or, of kCount 2, the pairs. Rows without gaps,
  // which are usual, take no product for each.
  template <int kCount, class Element, class F>
  __device__ __forceinline__ void each_at(Element* at, int64 gap, const F& f) const {
    if (!kGaps || gap == 0) {
      each_of<kCount>([&](int i, int row, P* slot) { f(at + i, row, slot); });
    } else {
      each_of<kCount>([&](int i, int row, P* slot) { f(at + i + row * gap, row, slot); });
    }
  }
  __device__ __forceinline__ bool is_linear(const Storage* at, int64 gap) const {
    return kGaps && pitch() == count && gap == 0 && reinterpret_cast<unsigned long long>(at) % 16 == 0;
  }
  __device__ __forceinline__ bool has_pairs(const Storage* at, int64 gap) const {
    return kGaps && sizeof(Storage) == 2 && count % 2 == 0 && gap % 2 == 0 &&
           reinterpret_cast<unsigned long long>(at) % 4 == 0;
  }

  // Starts copies of the rows whose bit is in `mask`.
  __device__ __forceinline__ void start(unsigned mask) const {
    using Pair = Pack<Storage, 2>;
    using Vector = Pack<Storage, kVector>;
    if (kApart && step_from != 1) {
      if (mask >> threadIdx.x % kWarp & 1u) start_own_row();
    } else if (mask == 0xffffffffu && is_linear(from, gap_from)) {
      each_vector(
          [&](int i) { cp_async(reinterpret_cast<Vector*>(stage + i), reinterpret_cast<const Vector*>(from + i)); },
          [&](int i) { cp_async(stage + i, reinterpret_cast<const P*>(from + i)); });
    } else if (has_pairs(from, gap_from)) {
      each_at<2>(from, gap_from, [&](const Storage* at, int row, P* slot) {
        if (mask >> row & 1u) cp_async(reinterpret_cast<Pair*>(slot), reinterpret_cast<const Pair*>(at));
      });
    } else if constexpr (kGaps && sizeof(Storage) == 2) {
      load_in_batches(mask);
    } else {
      each_at<1>(from, gap_from, [&](const Storage* at, int row, P* slot) {
        if (mask >> row & 1u) cp_async(slot, reinterpret_cast<const P*>(at));
      });
    }
  }
  // Of rows next to each other, whose classes lie apart, each lane moves its own.
  __device__ __forceinline__ bool exists() const {
    return static_cast<int>(threadIdx.x) % kWarp * count < elements;
  }
  __device__ __forceinline__ void start_own_row() const {
    if (!exists()) return;
    constexpr int kBatch = 4;
    const Storage* at = from + threadIdx.x % kWarp * (count + gap_from);
    P* slot = own_row();
#pragma unroll 1
    for (int left = count; left > 0; left -= kBatch) {
      P x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i, at += step_from) {
        if (i >= left) continue;
        if constexpr (sizeof(Storage) >= 4) {
          cp_async(slot + i, reinterpret_cast<const P*>(at));
        } else {
          x[i] = load_pack<1>(at);
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (sizeof(Storage) < 4 && i < left) slot[i] = x[i];
      }
      slot += kBatch;
    }
  }
  // Copies the rows whose lane passes `wanted`. Precondition here and of flush(): all lanes of the warp call it
  // together.
  __device__ __forceinline__ void load_all(bool wanted) const {
    start(__ballot_sync(0xffffffffu, wanted));
    cp_async_wait_all();
    __syncwarp();
  }
  // Elements of 2 bytes go through registers. A batch is in flight together, without a loop behind it, whose loads
  // would wait for each other.
  __device__ __forceinline__ void load_in_batches(unsigned mask) const {
    constexpr int kBatch = 8;
    const unsigned inverse = (1u << kInverseBits) / count + 1;
    const int lane = threadIdx.x % kWarp;
#pragma unroll 1
    for (int first = lane; first < elements; first += kBatch * kWarp) {
      P x[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int i = first + k * kWarp, row = static_cast<int>(i * inverse >> kInverseBits);
        if (i < elements && (mask >> row & 1u)) x[k] = load_pack<1>(from + i + row * gap_from);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int i = first + k * kWarp, row = static_cast<int>(i * inverse >> kInverseBits);
        if (i < elements && (mask >> row & 1u)) stage[row * pitch() + (i - row * count)] = x[k];
      }
    }
  }
  static __device__ __forceinline__ int class_of(int c) {
    return c;
  }
  __device__ __forceinline__ P read(int c) const {
    return load_words(own_row() + c);
  }
  __device__ __forceinline__ void overwrite(int c, const P& x) const {
    own_row()[c] = x;
  }
  // kCount neighbouring classes from c on. Preconditions here and of overwrite_some(): kCount divides c; it is 1, or 2
  // of elements of 16 bits with kGaps in rows of an even number of classes.
  template <int kCount>
  __device__ __forceinline__ Pack<Storage, kCount> read_some(int c) const {
    return load_words(reinterpret_cast<const Pack<Storage, kCount>*>(own_row() + c));
  }
  template <int kCount>
  __device__ __forceinline__ void overwrite_some(int c, const Pack<Storage, kCount>& x) const {
    *reinterpret_cast<Pack<Storage, kCount>*>(own_row() + c) = x;
  }
  __device__ __forceinline__ void mask_out(int c, int = 0) const {
    own_row()[c].element[0] = Narrow<Storage>::from(-scalar_infinity(0.0f));
  }
  __device__ __forceinline__ void clear(int c, int) const {
    own_row()[c].element[0] = Narrow<Storage>::from(0.0f);
  }
  // As StridedRows; nothing moves.
  struct Cursor {};
  __device__ __forceinline__ Cursor first_class() const {
    return {};
  }
  // Replaces the logit, which is not needed any more.
  __device__ __forceinline__ void store(Cursor&, int c, const P& gradient) const {
    own_row()[c] = gradient;
  }
  __device__ __forceinline__ void store_again(int c, Storage gradient) const {
    own_row()[c].element[0] = gradient;
  }
  __device__ __forceinline__ void flush() const {
    __syncwarp();
    if (kApart && step_to != 1) {
      Storage* const own = to + threadIdx.x % kWarp * (count + gap_to);
#pragma unroll 4
      for (int c = 0; c < count; ++c) {
        if (exists()) store_pack<1>(own + c * step_to, own_row()[c]);
      }
    } else if (is_linear(to, gap_to)) {
      each_vector(
          [&](int i) {
            store_pack<kVector>(to + i, load_words(reinterpret_cast<const Pack<Storage, kVector>*>(stage + i)));
          },
          [&](int i) { store_pack<1>(to + i, stage[i]); });
    } else if (has_pairs(to, gap_to)) {
      each_at<2>(to, gap_to, [&](Storage* at, int, const P* slot) {
        store_pack<2>(at, load_words(reinterpret_cast<const Pack<Storage, 2>*>(slot)));
      });
    } else {
      each_at<1>(to, gap_to, [&](Storage* at, int, const P* slot) { store_pack<1>(at, *slot); });
    }
    // The next rows are copied to the same place.
    __syncwarp();
  }
};
