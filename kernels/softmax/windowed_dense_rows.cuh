// Dense targets, rows that are longer than shared memory, or that leave it room for too few rows: each thread keeps a
// window of its vectors of both operands in shared memory. Value, gradients and passes are those of dense_rows.cuh.
//
//   v_0 v_1 ... v_(n-1)    the vectors of a thread
//   slot of v_j            j mod kWindow; the window is kWindow neighbouring vectors
//
// 1. The first kWindow vectors arrive while the row before is evaluated.
// 2. The first pass goes from v_0 to v_(n-1), the next one back to v_0, and so on. As soon as a vector has been
//    evaluated, the copy (cp.async) of the one that takes its slot next starts, kWindow vectors ahead. A pass thus
//    begins with the vectors that the previous pass has left in the window.
// 3. In the last pass, slots that the row needs no longer take the first vectors of the thread's next row.
//
// A group owns a row, and a thread the same vectors in all passes. Each step of a pass commits one group of copies,
// perhaps an empty one, so that a vector has arrived once all groups but the last kWindow - 1 have.
//
// Numbers that replace targets for the last pass stay in the window, or are stored where the gradients will be.
//
// Traffic: the first pass reads both operands, each further one all vectors but a window of them; each gradient is
// written once, and so is what replaces targets. Preconditions: those of dense_slots.cuh; shared memory for kWindow
// slots per thread.
#pragma once
#include "softmax/dense_slots.cuh"

// This thread's classes of a row, as visit_dense_row (dense_rows.cuh) expects them.
template <class Program_, class Group, int kVecSize, int kWindow>
struct WindowedDenseRow : DenseSlots<Program_, Group, kVecSize, false> {
  using Base = DenseSlots<Program_, Group, kVecSize, false>;
  using Base::active;
  using Base::group;
  using Base::next_vectors;
  using Base::now;
  using Base::program;
  using Base::view;
  using typename Base::Input;
  using typename Base::Program;
  using typename Base::Slot;
  using typename Base::Target;
  static constexpr bool kOnChip = false;
  static constexpr bool kManyPacks = true;
  static constexpr bool kHasRoom = false;
  // Replacements lie where the gradients will, so these must have as many bytes and leave the logits in place.
  static constexpr bool kReplaces = sizeof(Target) == sizeof(typename Program::Gradient) && !Program::kInPlace;

  bool backward;  // the next pass begins with the thread's last vector

  __device__ __forceinline__ WindowedDenseRow(const Program& program, const Group& group, int64 row)
      : Base(program, group), backward(false) {
    this->locate(row);
    prefetch_next();
    const int next = min(count_of(next_vectors), kWindow);
#pragma unroll 1
    for (int j = 0; j < next; ++j) this->refill(vector(j), slot(j));
  }

  // Makes the next row the current one, and `row` the next one (-1 if there is none).
  __device__ __forceinline__ void advance_row(int64 row) {
    this->enter_row();
    backward = false;
    this->locate(row);
    cp_async_wait_all();
  }
  __device__ __forceinline__ void prefetch_next() {
    this->open_next();
  }
  template <class F>
  __device__ __forceinline__ void for_each(F& f) {
    pass<false>(f, active);
  }
  template <class F>
  __device__ __forceinline__ void for_each_replaced(const F& f) {
    pass<false, true>(f, active);
  }
  template <class F>
  __device__ __forceinline__ void final_replaced_pass(const F& f) {
    pass<true, true>(f, now.exists);
  }
  template <class F>
  __device__ __forceinline__ void final_pass(F& f) {
    pass<true>(f, active);
  }
  template <class F>
  __device__ __forceinline__ void final_pass_all(const F& f) {
    pass<true>(f, now.exists);
  }

 private:
  static_assert((kWindow & (kWindow - 1)) == 0, "a power of two");

  // Number of this thread's vectors of a row that has `vectors` of them.
  __device__ __forceinline__ int count_of(int vectors) const {
    const int threads = group.num_threads(), rest = vectors - group.thread_rank();
    return rest > 0 ? (rest - 1) / threads + 1 : 0;
  }
  // Index within the row of this thread's j-th vector.
  __device__ __forceinline__ int vector(int j) const {
    return group.thread_rank() + j * group.num_threads();
  }
  static __device__ __forceinline__ Slot slot(int i) {
    const Slot first = Base::begin();
    const unsigned step = (sizeof(*first.x) + sizeof(*first.t)) * blockDim.x;
    return {reinterpret_cast<typename Base::X*>(reinterpret_cast<char*>(first.x) + i * step),
            reinterpret_cast<typename Base::T*>(reinterpret_cast<char*>(first.t) + i * step)};
  }

  // Visits the row if it is to be `visited`. kLast: refills the window with the vectors of the next row. kReplaced: one
  // pass replaces targets, in the window or else in memory, and the last pass reads these numbers.
  template <bool kLast, bool kReplaced = false, class F>
  __device__ __forceinline__ void pass(F& f, bool visited) {
    const Input* const x = program.input + now.offset[kLogits] + view.head;
    const Target* const t = program.targets + now.offset[kLabels] + view.head;
    Target* replacements = nullptr;  // of targets behind the window
    if constexpr (kReplaced) replacements = reinterpret_cast<Target*>(program.gradients + now.offset[kGradients]);
    const int count = visited ? count_of(view.vectors) : 0;
    const unsigned copied = active ? view.vectors : 0;
    const int step = backward ? -group.num_threads() : group.num_threads();
    int v = vector(backward ? count - 1 : 0), i = backward ? (count - 1) % kWindow : 0;
#pragma unroll 1
    for (int left = count; left > 0; --left) {
      const Slot at = slot(i);
      cp_async_wait_groups<kWindow - 1>();
      const int follower = v + step * kWindow;
      const bool stays = static_cast<unsigned>(follower) >= copied;
      if constexpr (kReplaced && !kLast) {
        const auto replacement = f(view.first(v), load_words(at.x), load_words(at.t));
        if (stays) {
          store_words(at.t, replacement);
        } else {
          store_pack<kVecSize>(replacements + view.first(v), replacement);
        }
      } else {
        f(view.first(v), load_words(at.x), load_words(at.t));
      }
      if (!stays) {
        Base::template copy<kLast>(at.x, x + follower * kVecSize);
        if constexpr (kReplaced && kLast) {
          // Gradients follow soon, so L2 shall keep these numbers.
          Base::copy(at.t, replacements + view.first(follower));
        } else {
          Base::template copy<kLast>(at.t, t + follower * kVecSize);
        }
      } else if (kLast) {
        this->refill(vector(i), at);
      }
      cp_async_commit();
      v += step;
      i = (backward ? i - 1 : i + 1) & (kWindow - 1);
    }
    if (kLast) {
#pragma unroll 1
      for (int j = count; j < kWindow; ++j) this->refill(vector(j), slot(j));
    }
    if constexpr (kReplaced && !kLast) {
      this->replace_edge(f);
    } else {
      this->visit_edge(f, visited);
    }
    backward = !backward;
  }
};

template <int kVecSize, int kWindow>
struct WindowedDense {
  template <class Program, class Group>
  using Classes = WindowedDenseRow<Program, Group, kVecSize, kWindow>;
};

template <int kVecSize, int kWindow>
using WindowedDenseReader = SlotReader<WindowedDense<kVecSize, kWindow>>;
