// Dense targets, one thread per row: classes are strided, or few. The passes are those of dense_rows.cuh.
//
// 1. With kStaged, a thread first copies all classes of both operands to shared memory. Without it (second
//    derivatives), each pass reads memory again.
// 2. The thread runs all passes alone; the lanes of a warp read neighbouring rows. Threads exchange nothing.
//
// Traffic: with kStaged each operand is read once, otherwise once per pass; each gradient is written once.
// Preconditions: with kStaged, dynamic shared memory for both operands of all rows of the block.
#pragma once
#include "softmax/dense_rows.cuh"

// Source of a DenseReader. kStaged: classes are read from shared memory. Precondition: the group is a SubwarpGroup of
// width 1.
template <bool kStaged>
struct DenseThreadPerRow {
  template <class Program, class Group>
  struct Classes {
    static constexpr bool kContiguous = false;
    static constexpr bool kPlacesGradients = false;
    static constexpr bool kOnChip = false;
    static constexpr bool kManyPacks = false;
    static constexpr bool kAlone = kStaged;
    static constexpr int kEach = 1;
    using Input = typename Program::Input;
    using Target = typename Program::Target;
    using Compute = typename Program::Compute;
    static constexpr bool kHasRoom = kStaged && sizeof(Input) == sizeof(Compute) && sizeof(Target) == sizeof(Compute);
    static constexpr bool kReplaces = false;
    using X = Pack<Input, 1>;
    using T = Pack<Target, 1>;

    typename PointerTo<Input>::type x;
    typename PointerTo<Target>::type t;
    int64 x_stride, t_stride, classes;
    bool exists;
    bool active;

    __device__ __forceinline__ Classes(const Program& program, const Group&, const int64 (&offset)[kRowStreams],
                                       bool exists)
        : x(program.logits(offset)),
          t(program.targets_of(offset)),
          x_stride(program.step()),
          t_stride(program.target_step()),
          classes(program.space.classes),
          exists(exists),
          active(exists && program.active(offset)) {
      if constexpr (kStaged) {
        if (active) stage();
      }
    }
    __device__ __forceinline__ void prefetch_next() const {
    }

    __device__ __forceinline__ void read(int c, X& of_input, T& of_target) const {
      of_input = read_x(c);
      of_target = read_t(c);
    }
    template <class F>
    __device__ __forceinline__ void for_each(F& f) const {
      if (!active) return;
#pragma unroll 2
      for (int64 c = 0; c < classes; ++c) f(c, read_x(c), F::kReadsTargets ? read_t(c) : T{});
    }
    template <class F>
    __device__ __forceinline__ void final_pass(F& f) const {
      for_each(f);
    }
    template <class F>
    __device__ __forceinline__ void final_pass_all(const F& f) const {
      if (!exists) return;
#pragma unroll 2
      for (int64 c = 0; c < classes; ++c) f(c, active ? read_x(c) : X{}, active ? read_t(c) : T{});
    }
    template <class F>
    __device__ __forceinline__ void fill(const F& f) const {
      if (!exists) return;
#pragma unroll 1
      for (int64 c = 0; c < classes; ++c) f.template write<1>(c);
    }
    // Precondition, also of final_kept_pass() and keep(): kHasRoom.
    template <class F>
    __device__ __forceinline__ void for_each_kept(F& f) const {
      if (!active) return;
#pragma unroll 2
      for (int64 c = 0; c < classes; ++c) {
        Compute kept[2][1];
        f(c, read_x(c), read_t(c), kept);
        keep(c, kept);
      }
    }
    template <class F>
    __device__ __forceinline__ void final_kept_pass(const F& f) const {
      if (!exists) return;
#pragma unroll 2
      for (int64 c = 0; c < classes; ++c) {
        const Compute kept[2][1] = {{*kept_at(staged_x(c))}, {*kept_at(staged_t(c))}};
        f(c, kept);
      }
    }
    __device__ __forceinline__ int64 count() const {
      return classes;
    }
    __device__ __forceinline__ void put_logit(int c, const X& of_input) const {
      store_words(staged_x(c), of_input);
    }
    __device__ __forceinline__ void put_target(int c, const T& of_target) const {
      store_words(staged_t(c), of_target);
    }
    __device__ __forceinline__ void keep(int64 c, const Compute (&kept)[2][1]) const {
      *kept_at(staged_x(c)) = kept[0][0];
      *kept_at(staged_t(c)) = kept[1][0];
    }

   private:
    // Issues all copies at once, so that as many as possible are in flight.
    __device__ __forceinline__ void stage() const {
      for (int64 c = 0; c < classes; ++c) {
        cp_async(staged_x(c), reinterpret_cast<const X*>(x + c * x_stride));
        cp_async(staged_t(c), reinterpret_cast<const T*>(t + c * t_stride));
      }
      cp_async_wait_all();
    }
    template <class P>
    static __device__ __forceinline__ Compute* kept_at(P* place) {
      return reinterpret_cast<Compute*>(place);
    }
    // All logits come first, then all targets, so that both are aligned.
    __device__ __forceinline__ X* staged_x(int64 c) const {
      extern __shared__ uint4 staged[];
      return reinterpret_cast<X*>(staged) + static_cast<int>(c) * blockDim.x + threadIdx.x;
    }
    __device__ __forceinline__ T* staged_t(int64 c) const {
      extern __shared__ uint4 staged[];
      T* const first = reinterpret_cast<T*>(reinterpret_cast<X*>(staged) + static_cast<int>(classes) * blockDim.x);
      return first + static_cast<int>(c) * blockDim.x + threadIdx.x;
    }
    __device__ __forceinline__ X read_x(int64 c) const {
      if constexpr (kStaged) return load_words(staged_x(c));
      return load_stream<1>(x + c * x_stride);
    }
    __device__ __forceinline__ T read_t(int64 c) const {
      if constexpr (kStaged) return load_words(staged_t(c));
      return load_stream<1>(t + c * t_stride);
    }
  };
};
