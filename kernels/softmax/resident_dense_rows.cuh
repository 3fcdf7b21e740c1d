// Resident rows with dense targets: both operands stay in shared memory, and each is read from memory once. Value,
// gradients and passes of dense_rows.cuh.
//
// 1. Each thread copies its vectors of both operands to shared memory (cp.async), and loads its edge elements.
// 2. All passes read shared memory. A thread reads only what it copied itself, so the copies need no barrier. The pass
//    that computes the sums may replace the operands by numbers that the gradient needs.
// 3. In the last pass, as soon as a vector is used up, the thread starts copying a vector of its next row to the same
//    slots. L2 prefetch of that row starts between the first two passes.
//
// A group owns a row, and a thread the same vectors in all passes.
//
// With kShifted, vectors are aligned as the gradients are, and operands with another alignment are shifted on their way
// to shared memory: element by element where cp.async can copy single elements, otherwise in registers
// (ShiftedVectors). Registers would have to be held across the last pass, so operands of the second kind are loaded
// when their row begins.
//
// Traffic: both operands are read once, each gradient is written once. Preconditions: class stride 1, and equal
// alignment of all operands and gradients, with kShifted only of all gradients; vectors of 16 bytes with kShifted;
// dynamic shared memory for all vectors of a row.
#pragma once
#include "softmax/dense_slots.cuh"

// This thread's classes of a row, as visit_dense_row (dense_rows.cuh) expects them.
template <class Program_, class Group, int kVecSize, bool kShifted>
struct StagedDenseRow : DenseSlots<Program_, Group, kVecSize, kShifted> {
  using Base = DenseSlots<Program_, Group, kVecSize, kShifted>;
  using Base::active;
  using Base::begin;
  using Base::group;
  using Base::next_t;
  using Base::next_vectors;
  using Base::next_x;
  using Base::now;
  using Base::program;
  using Base::refill;
  using Base::view;
  using Base::visit_edge;
  using typename Base::Compute;
  using typename Base::Input;
  using typename Base::Program;
  using typename Base::Slot;
  using typename Base::T;
  using typename Base::Target;
  using typename Base::X;
  static constexpr bool kOnChip = true;
  static constexpr bool kManyPacks = false;
  static constexpr bool kHasRoom = sizeof(Input) == sizeof(Compute) && sizeof(Target) == sizeof(Compute);
  static constexpr bool kReplaces = true;
  // Number of vectors per iteration. The code for two vectors of eight classes, or with two softmaxes, does not fit
  // into the nearest instruction cache.
  static constexpr int kUnrolled = Program::kTeacher || kVecSize >= 8 ? 1 : 2;

  __device__ __forceinline__ StagedDenseRow(const Program& program, const Group& group, int64 row)
      : Base(program, group) {
    this->locate(row);
    prefetch_next();
    Slot at = begin();
    for (int v = group.thread_rank(); v < next_vectors; v += group.num_threads(), at.advance()) refill(v, at);
  }

  // Makes the next row the current one, and `row` the next one (-1 if there is none).
  __device__ __forceinline__ void advance_row(int64 row) {
    this->enter_row();
    if constexpr (kShifted) {
      if (active) {
        shift_in(program.input + now.offset[kLogits], begin().x);
        shift_in(program.targets + now.offset[kLabels], begin().t);
      }
    }
    this->locate(row);
    cp_async_wait_all();
  }

  // Loads the edge elements of the next row, and prefetches this row to L2. Half a row later its copies start, and hit
  // L2.
  __device__ __forceinline__ void prefetch_next() {
    this->open_next();
    if (next_vectors > 0 && Group::kMultiWarp && group.thread_rank() == 0) {
      if (sizeof(X) == 16) prefetch_l2(aligned_before<X>(next_x), next_vectors * 16u);
      if (sizeof(T) == 16) prefetch_l2(aligned_before<T>(next_t), next_vectors * 16u);
    }
  }

  template <class F>
  __device__ __forceinline__ void for_each(F& f) const {
    const int vectors = active ? view.vectors : 0;
    Slot at = begin();
#pragma unroll(kUnrolled)
    for (int v = group.thread_rank(); v < vectors; v += group.num_threads(), at.advance()) {
      f(view.first(v), load_words(at.x), load_words(at.t));
    }
    visit_edge(f, active);
  }
  // Precondition: kHasRoom.
  template <class F>
  __device__ __forceinline__ void for_each_kept(F& f) {
    const int vectors = active ? view.vectors : 0;
    Slot at = begin();
#pragma unroll(kUnrolled)
    for (int v = group.thread_rank(); v < vectors; v += group.num_threads(), at.advance()) {
      Compute kept[2][kVecSize];
      f(view.first(v), load_words(at.x), load_words(at.t), kept);
      store_kept(kept[0], at.x);
      store_kept(kept[1], at.t);
    }
    const int edge = view.edge_class(group.thread_rank());
    if (active && edge >= 0) f(edge, Pack<Input, 1>{{now.edge_x}}, Pack<Target, 1>{{now.edge_t}}, now.edge_kept);
  }
  template <class F>
  __device__ __forceinline__ void for_each_replaced(const F& f) {
    const int vectors = active ? view.vectors : 0;
    Slot at = begin();
#pragma unroll(kUnrolled)
    for (int v = group.thread_rank(); v < vectors; v += group.num_threads(), at.advance()) {
      store_words(at.t, f(view.first(v), load_words(at.x), load_words(at.t)));
    }
    this->replace_edge(f);
  }
  template <class F>
  __device__ __forceinline__ void final_replaced_pass(const F& f) const {
    final_pass_all(f);
  }
  template <class F>
  __device__ __forceinline__ void final_kept_pass(const F& f) const {
    const int vectors = now.exists ? view.vectors : 0, all = max(vectors, next_vectors);
    Slot at = begin();
#pragma unroll(kUnrolled)
    for (int v = group.thread_rank(); v < all; v += group.num_threads(), at.advance()) {
      if (v < vectors) {
        Compute kept[2][kVecSize];
        load_kept(kept[0], at.x);
        load_kept(kept[1], at.t);
        f(view.first(v), kept);
      }
      refill(v, at);
    }
    const int edge = view.edge_class(group.thread_rank());
    if (now.exists && edge >= 0) f(edge, now.edge_kept);
  }
  template <class F>
  __device__ __forceinline__ void final_pass(F& f) const {
    visit_and_refill(f, active);
  }
  template <class F>
  __device__ __forceinline__ void final_pass_all(const F& f) const {
    visit_and_refill(f, now.exists);
  }

 private:
  // store_kept() stores the numbers of the classes of a vector in place of an operand; load_kept() loads them.
  template <class P>
  static __device__ __forceinline__ void store_kept(const Compute (&kept)[kVecSize], P* at) {
    Pack<Compute, kVecSize> pack;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) pack.element[i] = kept[i];
    store_words(reinterpret_cast<Pack<Compute, kVecSize>*>(at), pack);
  }
  template <class P>
  static __device__ __forceinline__ void load_kept(Compute (&kept)[kVecSize], const P* at) {
    const Pack<Compute, kVecSize> pack = load_words(reinterpret_cast<const Pack<Compute, kVecSize>*>(at));
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) kept[i] = pack.element[i];
  }

  // Returns the last aligned pack that begins at an element or before it.
  template <class P, class Storage>
  static __device__ __forceinline__ const P* aligned_before(const Storage* at) {
    return reinterpret_cast<const P*>(at - (kShifted ? Base::template elements_behind<P>(at) : 0));
  }
  // Loads this thread's vectors of an operand that copy() leaves out to the slots from `at` on, two at a time, so that
  // their loads are in flight together.
  template <class P, class Storage>
  __device__ __forceinline__ void shift_in(const Storage* row, P* at) const {
    using Vectors = ShiftedVectors<Storage, kVecSize, false>;
    const Vectors vectors(row, 1, static_cast<int>(program.space.classes), view.head);
    if (Vectors::kCopies || vectors.shift == 0) return;
    constexpr int kTogether = 2;
    const int count = group.num_threads(), end = view.vectors;
    const unsigned step = (sizeof(X) + sizeof(T)) / sizeof(P) * blockDim.x;
#pragma unroll 1
    for (int v = group.thread_rank(); v < end; v += kTogether * count, at += kTogether * step) {
      P x[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) x[k] = vectors.load(view.first(v + k * count < end ? v + k * count : v));
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (v + k * count < end) store_words(at + k * step, x[k]);
      }
    }
  }

  template <class F>
  __device__ __forceinline__ void visit_and_refill(F& f, bool visited) const {
    const int vectors = visited ? view.vectors : 0, all = max(vectors, next_vectors);
    Slot at = begin();
#pragma unroll(kUnrolled)
    for (int v = group.thread_rank(); v < all; v += group.num_threads(), at.advance()) {
      if (v < vectors) f(view.first(v), load_words(at.x), load_words(at.t));
      refill(v, at);
    }
    visit_edge(f, visited);
  }
};

template <int kVecSize, bool kShifted>
struct ResidentDense {
  template <class Program, class Group>
  using Classes = StagedDenseRow<Program, Group, kVecSize, kShifted>;
};

template <int kVecSize, bool kShifted = false>
using ResidentDenseReader = SlotReader<ResidentDense<kVecSize, kShifted>>;
