// Resident rows: the row stays in shared memory, each logit is read from memory once. Value and gradient of
// softmax.cuh.
//
// 1. Each thread starts asynchronous copies of its vectors to shared memory (cp.async, no registers), and loads the
//    target's logit and its edge elements.
// 2. First sweep over its vectors: maximum of the raw logits.
// 3. Second sweep: exponentials relative to the maximum of the warp's part, added up without the target's. Where they
//    fit, exponentials replace their logits.
// 4. One all_gather combines the parts of all warps: one barrier per row.
// 5. Third sweep: the gradient.
//
// A thread reads only the vectors that it copied itself, so the copies need no barrier. While a thread waits for its
// copies, other warps of the SM wait or compute. Copying the next row's vectors into place as these are used up would
// take 64 registers instead of 40 (docs/performance.md). Rows in registers were slower: compilers keep every logit in
// each form that it was converted to, and spill.
//
// With kKeepsProducts (capped logits of rows that no warps share) the product of exponential and slope replaces the
// logit. Longer rows compute both again: products would have to be relative to the maximum of the whole row, which
// takes a second all_gather, and those of 16-bit logits would leave room for half as many.
//
// Traffic: each logit is read once, each gradient written once. Preconditions: class stride 1, of logits unless they
// are gathered; dynamic shared memory for all vectors of a row, twice as much for products of 16-bit logits.
#pragma once
#include "softmax/rows.cuh"

// The product of exponential and slope of each class in place of its logit, for capped logits. Products may need twice
// the room: the second half lies `half` slots away.
template <class Compute, class P>
struct ExpSlopeProducts;
template <class Compute, class Storage, int kVecSize>
struct ExpSlopeProducts<Compute, Pack<Storage, kVecSize>> {
  using P = Pack<Storage, kVecSize>;
  static constexpr int kHalves = sizeof(Compute) / sizeof(Storage);

  // Stores the products of a vector. Returns the sum of its exponentials without that of element `target`, as
  // add_classes computes it.
  template <class Program>
  static __device__ __forceinline__ Compute store(const Program& program, int target, Compute max_logit, P* slot,
                                                  int half) {
    Compute raw[kVecSize], z[kVecSize], slopes[kVecSize], e[kVecSize];
    unpack(load_words(slot), raw);
    program.logit.exponential_value_slope(raw, max_logit, e, z, slopes);
    Pack<Compute, kVecSize> products;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) products.element[i] = e[i] * slopes[i];
#pragma unroll
    for (int i = 0; i < kHalves; ++i) slot[i * half] = load_words(reinterpret_cast<const P*>(&products) + i);
    if (target >= 0) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        if (i == target) e[i] = Compute(0);
      }
    }
    return sum_elements(e);
  }
  static __device__ __forceinline__ void load(const P* slot, int half, Compute (&products)[kVecSize]) {
    Pack<Compute, kVecSize> all;
#pragma unroll
    for (int i = 0; i < kHalves; ++i) reinterpret_cast<P*>(&all)[i] = load_words(slot + i * half);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) products[i] = all.element[i];
  }
};

// kEdges: elements at the ends of a row that a thread takes, at most. With several of them few lanes share a row, so a
// warp has many rows on their way. Precondition: kEdges num_threads() >= 2 (kVecSize - 1), or all rows begin and end
// with a vector.
// kPrefetch: the next row is prefetched to L2. Precondition: a block takes the row.
// kShifted: logits and gradients lie differently; vectors are those of the gradients, and logits are shifted to them on
// their way to shared memory, or gathered if their classes lie apart (kGathered).
template <int kVecSize, int kEdges, bool kPrefetch, bool kShifted = false, bool kGathered = false>
struct ResidentReader {
  static_assert(!(kPrefetch && kShifted), "rows are prefetched in aligned vectors");
  // An array has one element at least.
  static constexpr int kEdgeSlots = kEdges > 0 ? kEdges : 1;
  // Vectors that a thread takes together, so that their instructions overlap.
  static constexpr int kUnroll = 4;

  // Fewer where a class takes many registers: 8 classes.
  static constexpr int kUnrollCapped = kVecSize >= 8 ? 1 : 8 / kVecSize < kUnroll ? 8 / kVecSize : kUnroll;

  // This thread's k-th vector is at [k * blockDim.x].
  template <class P>
  static __device__ __forceinline__ P* stage() {
    extern __shared__ uint4 staged[];
    return reinterpret_cast<P*>(staged) + threadIdx.x;
  }

  // f(v, at) for every staged vector v < end of the thread; `at` is the vector's slot.
  template <int kVectors = kUnroll, class P, class F>
  static __device__ __forceinline__ void for_each_staged(int v, P* at, int end, int count, const F& f) {
    if constexpr (kVectors > 1) {
#pragma unroll 1
      for (; v + (kVectors - 1) * count < end; v += kVectors * count, at += kVectors * blockDim.x) {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) f(v + k * count, at + k * blockDim.x);
      }
    }
#pragma unroll 1
    for (; v < end; v += count, at += blockDim.x) f(v, at);
  }

  // Slots for so many vectors.
  static __device__ __forceinline__ int slots(int vectors, int count) {
    return (vectors + count - 1 >> log2_exact(count)) * blockDim.x;
  }

  // Prefetches a short active row to L2, so that few blocks keep the memory busy. With many blocks, and with longer
  // rows, reads and writes in flight exceed L2.
  template <class Group, class Program>
  static __device__ __forceinline__ void prefetch_row(const Program& program, const Group& group, int64 row) {
    using Input = typename Program::Input;
    if (group.thread_rank() != 0 || row >= program.space.rows) return;
    const auto t = program.target(row);
    if (!t.active) return;
    const RowVectors<Input, kVecSize, int> view(program.input, t.offset[kLogits],
                                                static_cast<int>(program.space.classes));
    if (view.vectors > 0) prefetch_l2(program.input + t.offset[kLogits] + view.head, view.vectors * 16u);
  }

  // The vectors of a row: those of its logits, or those of its gradients.
  template <class Program>
  static __device__ __forceinline__ RowVectors<typename Program::Input, kVecSize, int> view_of(
      const Program& program, const int64 (&offset)[kRowStreams], int classes) {
    if constexpr (kShifted) {
      static_assert(kSameType<typename Program::Input, typename Program::Gradient>, "gradients lie apart from logits");
      return {program.gradients, offset[kGradients], classes};
    } else {
      return {program.input, offset[kLogits], classes};
    }
  }

  // Copies this thread's vectors: without registers, or kTogether at a time so that their loads are in flight together.
  template <int kTogether, class Vectors, class View, class P>
  static __device__ __forceinline__ void copy_shifted(const Vectors& vectors, const View& view, int v, P* at, int end,
                                                      int count) {
    if constexpr (Vectors::kCopies) {
      for_each_staged(v, at, end, count, [&](int i, P* slot) { vectors.copy(view.first(i), slot); });
      return;
    }
#pragma unroll 1
    for (; v < end; v += kTogether * count, at += kTogether * blockDim.x) {
      P x[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) x[k] = vectors.load(view.first(v + k * count < end ? v + k * count : v));
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        if (v + k * count < end) store_words(at + k * blockDim.x, x[k]);
      }
    }
  }

  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ typename Program::Compute visit(const Program& program, const Group& group, int64 r,
                                                                    bool exists, int64 next, SyncState& sync,
                                                                    Scale& scale) {
    using Compute = typename Program::Compute;
    using Input = typename Program::Input;
    using P = Pack<Input, kVecSize>;
    // The target's logit is replaced by -inf, whose exponential is 0, so no class is compared with the label.
    constexpr bool kMasksTarget = !Program::kSmoothed && !Program::kCapped,
                   kKeepsProducts = Program::kKeepsProducts && !Group::kMultiWarp;
    // Exponentials replace their logits if they fit, and are relative to the maximum of the row: with several warps
    // they would have to be rescaled, and speculative gradients would differ in bits from recomputed ones.
    constexpr bool kKeepsExponentials =
        kGradient && !Program::kCapped && !Group::kMultiWarp && kSameType<Input, Compute>;
    const Input lowest = Narrow<Input>::from(-scalar_infinity(0.0f));
    const int index = group.thread_rank(), count = group.num_threads(),
              classes = static_cast<int>(program.space.classes);
    P* const row = stage<P>();

    RowTarget<Compute> t = program.target(exists ? r : 0);
    t.active &= exists;
    t.invalid_label &= exists;
    const auto view = view_of(program, t.offset, classes);
    const Input* const input = program.input + t.offset[kLogits];
    // The class of an edge element, or -1. Several are found again where they are used: arrays would spill registers.
    const int own_edge = view.edge_class(index), present = t.active ? view.vectors : 0;
    const bool has_own_edge = t.active && own_edge >= 0;
    const auto edge_class = [&](int e) { return kEdges == 1 ? own_edge : view.edge_class(index + e * count); };
    const auto has_edge = [&](int e) { return kEdges == 1 ? has_own_edge : t.active && edge_class(e) >= 0; };
    if constexpr (!kShifted) {
      const P* const from = reinterpret_cast<const P*>(input + view.head);
      for_each_staged(index, row, present, count, [&](int i, P* slot) { cp_async(slot, from + i); });
    }
    Input logit{}, edge_logits[kEdgeSlots]{};
    const int64 stride = kGathered ? program.space.class_stride[kLogits] : 1;
    if (t.active) {
      logit = input[t.label * stride];
#pragma unroll
      for (int e = 0; e < kEdges; ++e) {
        if (edge_class(e) >= 0) edge_logits[e] = input[edge_class(e) * stride];
      }
    }

    // Position of the target: behind the head it is in a vector.
    const int target_offset = static_cast<int>(t.label) - view.head;
    const bool in_vector = t.active && target_offset >= 0 && target_offset / kVecSize < view.vectors;
    const int target_vector = in_vector ? target_offset / kVecSize : -1, target_element = target_offset % kVecSize;
    bool has_target = in_vector && (target_vector & (count - 1)) == index;
    const auto target_is_edge = [&](int e) { return has_edge(e) && edge_class(e) == t.label; };
#pragma unroll
    for (int e = 0; e < kEdges; ++e) has_target |= target_is_edge(e);
    const auto element_of = [&](int i) { return !kMasksTarget && i == target_vector ? target_element : -1; };
    const auto edge_element_of = [&](int e) { return !kMasksTarget && target_is_edge(e) ? 0 : -1; };

    if constexpr (kShifted) {
      const ShiftedVectors<Input, kVecSize, kGathered> vectors(input, stride, classes, view.head);
      // Threads of a single block have registers for more elements; vectors take two packs each.
      constexpr int kTogether = kGathered && Group::kMultiWarp && Group::kClusterSize == 1 ? 4 : 2;
      copy_shifted<kTogether>(vectors, view, index, row, present, count);
    }
    if constexpr (kPrefetch && sizeof(P) == 16) prefetch_row(program, group, next);
    cp_async_wait_all();
    RunningMax<Compute, Input, kVecSize> running;
    for_each_staged(index, row, present, count, [&](int, const P* slot) { running.add(load_words(slot)); });
    Compute raw = running.get();
#pragma unroll
    for (int e = 0; e < kEdges; ++e) {
      raw = has_edge(e) ? max_ignoring_nan(raw, widen<Compute>(edge_logits[e])) : raw;
    }
    const int half = slots(view.vectors, count);
    if (kMasksTarget && has_target && in_vector) {
      reinterpret_cast<Input*>(row + (target_vector >> log2_exact(count)) * blockDim.x)[target_element] = lowest;
    }
#pragma unroll
    for (int e = 0; e < kEdges; ++e) {
      if (kMasksTarget && target_is_edge(e)) edge_logits[e] = lowest;
    }

    const auto of_target = [&] { return t.active ? program.logit.value(widen<Compute>(logit)) : Compute(0); };
    Compute z = Compute(0);
    if constexpr (Program::kSmoothed) z = of_target();
    RowSums<Compute, Program::kSmoothed> sums{
        {program.logit.value(subwarp_reduce(raw, group.subwarp_size(), MaxOp{})), Compute(0)}, Compute(0), Compute(0)};
    const Compute shift = exp_shift(sums.softmax.max_logit);
    constexpr int kVectors = Program::kCapped ? kUnrollCapped : kUnroll;
    for_each_staged<kVectors>(index, row, present, count, [&](int i, P* slot) {
      if constexpr (kKeepsProducts && kGradient) {
        sums.softmax.exp_sum += ExpSlopeProducts<Compute, P>::store(program, element_of(i), shift, slot, half);
      } else if constexpr (kKeepsExponentials) {
        add_classes(program, view.first(i), element_of(i), z, shift, load_words(slot), sums, slot);
      } else {
        add_classes(program, view.first(i), element_of(i), z, shift, load_words(slot), sums);
      }
    });
#pragma unroll
    for (int e = 0; e < kEdges; ++e) {
      if (!has_edge(e)) continue;
      add_classes(program, edge_class(e), edge_element_of(e), z, shift, Pack<Input, 1>{{edge_logits[e]}}, sums);
    }
    subwarp_add(sums, group.subwarp_size());
    group_combine(group, sums, sync);
    if constexpr (!Program::kSmoothed) z = of_target();

    const RowResult<Compute> y = program.finish(t, z, sums, exists && index == 0);
    if constexpr (kGradient) {
      GradCoeffs<Compute> grad_coeffs = y.grad_coeffs;
      scale_grad_coeffs(program, grad_coeffs, grad_factor(scale, t.offset));
      const bool all_zero = grad_coeffs.all_zero();
      using Gradient = typename Program::Gradient;
      // Other lanes read the label's logit too, and shuffles order no memory. Between warps there was a barrier.
      if constexpr (Program::kInPlace && !Group::kMultiWarp) __syncwarp();
      Gradient* const gradients = program.gradients + t.offset[kGradients];
      const int stored = exists ? view.vectors : 0;
#pragma unroll
      for (int e = 0; e < kEdges; ++e) {
        const int edge = edge_class(e);
        if (exists && edge >= 0) {
          store_gradient(program, gradients + edge, edge, edge_element_of(e), grad_coeffs, all_zero,
                         Pack<Input, 1>{{edge_logits[e]}});
        }
      }
      if (all_zero) {
        for (int i = index; i < stored; i += count) {
          store_gradient(program, gradients + view.first(i), 0, -1, grad_coeffs, true, Pack<Input, kVecSize>{});
        }
      } else {
        for_each_staged<kKeepsProducts ? kUnroll : kVectors>(index, row, stored, count, [&](int i, P* slot) {
          if constexpr (kKeepsProducts) {
            Compute g[kVecSize];
            ExpSlopeProducts<Compute, P>::load(slot, half, g);
#pragma unroll
            for (int k = 0; k < kVecSize; ++k) g[k] *= grad_coeffs.exp_coeff;
            store_pack<kVecSize>(gradients + view.first(i), NarrowPack<Gradient, kVecSize>::from(g));
          } else {
            store_gradient<kKeepsExponentials>(program, gradients + view.first(i), view.first(i), element_of(i),
                                               grad_coeffs, false, load_words(slot));
          }
        });
      }
      // Written by the thread that has just stored another number there.
      if ((kMasksTarget || (kKeepsProducts && in_vector)) && has_target && !all_zero) {
        gradients[t.label] = Narrow<Gradient>::from(grad_coeffs.target * program.logit.slope(widen<Compute>(logit)));
      }
    }
    return y.value;
  }

  template <bool kGradient, class Group, class Program, class Scale>
  struct Visit {
    static constexpr bool kNeedsNextRow = kPrefetch;
    const Program& program;
    const Group& group;
    Scale& scale;
    __device__ __forceinline__ auto operator()(int64 row, bool exists, int64 next, SyncState& sync) const {
      return visit<kGradient>(program, group, row, exists, next, sync, scale);
    }
  };

  // As TwoPassReader::sweep.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    for_each_row(group, scale, program.space.rows, chunks, work,
                 Visit<kGradient, Group, Program, Scale>{program, group, scale});
  }
};
