// Stages rows of few contiguous classes in shared memory: a warp copies 32 rows together, and each lane processes one.
//
//   32 rows of C classes = one contiguous range of 32 C elements per warp, or with kGaps 32 ranges of C elements
//
// In shared memory rows are `pitch` elements apart: an odd number of elements, or of words of two 16-bit elements. So
// the lanes of a warp, each in its own row, cause no bank conflicts. With kGaps a copy moves
//
//   linear    16 bytes at a time, if rows follow each other in global memory as they do in shared memory
//   pairs     words, if the number of classes is even and elements have 16 bits
//   elements  single elements otherwise
//
// With kApart rows may also be interleaved, with strided classes. Then each lane copies its own row class by class.
//
// A warp owns its rows; only __syncwarp separates loads, the lanes' own accesses, and stores.
//
// Preconditions: rows are contiguous (except with kApart), of one dimension, and follow each other without gaps unless
// kGaps; C <= 362.
#pragma once
#include "softmax/rows.cuh"

// Elements between the starts of neighbouring rows in shared memory. On the host: `row_pitch` of
// engines/softmax/layout.py.
template <class Storage>
__device__ __forceinline__ int row_pitch(int classes) {
  if (sizeof(Storage) == 2 && classes % 2 == 0) return 2 * (classes / 2 | 1);
  return classes | 1;
}

// Fractional bits of the fixed-point inverse of the number of classes. The row of element i is i / classes, computed as
// a product with the inverse: exact for 32 rows of up to 362 classes.
constexpr int kInverseBits = 22;

// The rows of one warp, of which each lane processes one.
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
  int64 gap_from = 0, gap_to = 0;    // row stride, minus the number of classes
  int64 step_from = 1, step_to = 1;  // elements from one class to the next
  int elements;                      // number of elements of all rows of the warp
  int count;
  P* stage;

  // `first` is the first row of the warp. Precondition: shared memory has `buffers` buffers of 32 rows for each warp,
  // of which these rows use number `buffer`.
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
  // Calls f(i, row, slot) for every 32nd element i of the rows, starting at this lane's.
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

  // Calls f(i) for the first element i of every 32nd vector of 16 bytes, and element(i) for the elements after the last
  // vector.
  static constexpr int kVector = 16 / static_cast<int>(sizeof(Storage));
  template <class F, class Element>
  __device__ __forceinline__ void each_vector(const F& f, const Element& element) const {
    const int lane = threadIdx.x % kWarp, whole = elements / kVector * kVector;
#pragma unroll 4
    for (int i = lane * kVector; i < whole; i += kWarp * kVector) f(i);
    if (whole + lane < elements) element(whole + lane);
  }
  // Calls f(i, row, slot) for the first element i of every 32nd pair of the rows. Precondition: the number of classes
  // is even.
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
  // Calls f(address, row, slot) for the elements (kCount 1) or pairs (kCount 2) that each_of() visits, with their
  // addresses in the rows that start at `at`. Rows without gaps, the usual case, need no multiplication per element.
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

  // Starts copies of the rows whose bit is set in `mask`.
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
  // True if this lane has a row.
  __device__ __forceinline__ bool exists() const {
    return static_cast<int>(threadIdx.x) % kWarp * count < elements;
  }
  // Copies this lane's row, whose classes may be strided: asynchronously if elements have at least 4 bytes.
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
  // Copies the rows of the lanes that pass true for `wanted`, and waits for them. Precondition here and of flush(): all
  // lanes of the warp call it together.
  __device__ __forceinline__ void load_all(bool wanted) const {
    start(__ballot_sync(0xffffffffu, wanted));
    cp_async_wait_all();
    __syncwarp();
  }
  // Copies elements of 2 bytes, through registers. The loads of a batch are in flight together. There is no remainder
  // loop, whose loads would wait for each other.
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
  // Reads kCount neighbouring classes, starting at c. Preconditions here and of overwrite_some(): kCount divides c;
  // kCount is 1, or 2 for 16-bit elements with kGaps in rows of an even number of classes.
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
  // As in StridedRows, but without state: the class alone locates an element.
  struct Cursor {};
  __device__ __forceinline__ Cursor first_class() const {
    return {};
  }
  // Overwrites the logit, which is no longer needed.
  __device__ __forceinline__ void store(Cursor&, int c, const P& gradient) const {
    own_row()[c] = gradient;
  }
  __device__ __forceinline__ void store_again(int c, Storage gradient) const {
    own_row()[c].element[0] = gradient;
  }
  // Copies all rows from shared memory to `to`.
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
    // The next rows are copied to the same buffer.
    __syncwarp();
  }
};
