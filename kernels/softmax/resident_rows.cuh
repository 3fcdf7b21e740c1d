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
// take 64 registers instead of 40 (docs/performance/rows.md). Rows in registers were slower: compilers keep every
// logit in each form that it was converted to, and spill.
//
// With kKeepsProducts (capped logits of rows that no warps share) the product of exponential and slope replaces the
// logit. Longer rows compute both again: products would have to be relative to the maximum of the whole row, which
// takes a second all_gather, and those of 16-bit logits would leave room for half as many.
//
// With kShifted rows of gradients lie otherwise than those of logits, and the third sweep takes the vectors of the
// gradients: each is cut out of the two vectors of logits that it overlaps, of which a neighbouring lane copied one.
// Before it, and behind it, lanes wait for each other.
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

// The places of the vectors of a row of gradients between those of its logits. Each overlaps two of these: its own,
// which has its number and lies in a slot of the calling thread, and that of a neighbour. Lanes of a warp have slots
// next to each other. If other warps share the row (kMultiWarp) there is one slot more, where the lane at the end puts
// a copy of the vector that its neighbour in another warp has. Fewer than kVecSize elements lie in front of the first
// vector of logits or behind the last one: vectors of gradients from `begin` to `end` have none of them.
template <class Storage, int kVecSize, bool kMultiWarp>
struct StagedCuts {
  using P = Pack<Storage, kVecSize>;
  using View = RowVectors<Storage, kVecSize, int>;
  unsigned bytes;  // of the first of both vectors of logits that are in front of the vector of gradients
  int step;        // from the own vector to the neighbour's: 1, or -1 if that is the first one, or 0 if there is none
  int begin, end;
  bool at_end;       // no lane beside this one has the neighbour's vector
  int lower, upper;  // from the own slot to those of both vectors

  // `turn`: slots from one vector of a thread to its next one.
  __device__ __forceinline__ StagedCuts(const View& staged, const View& written, int lane, int lanes, int turn) {
    const int between = (written.head - staged.head) & (kVecSize - 1);
    bytes = static_cast<unsigned>(between * static_cast<int>(sizeof(Storage)));
    begin = written.head < staged.head ? 1 : 0;
    step = between == 0 ? 0 : begin == 1 ? -1 : 1;
    end = min(written.vectors, staged.vectors - max(step, 0));
    at_end = step == 0 ? false : lane == (begin == 1 ? 0 : lanes - 1);
    const int to_neighbour = !kMultiWarp && at_end ? step * (turn - (lanes - 1)) : step;
    lower = begin == 1 ? to_neighbour : 0;
    upper = begin == 1 ? 0 : to_neighbour;
  }
  // The staged numbers of the classes of a vector of gradients. `slot`: that of its own vector of logits.
  __device__ __forceinline__ P load(const P* slot) const {
    const P both[2] = {load_words(slot + lower), load_words(slot + upper)};
    return cut_out<sizeof(Storage)>(both, bytes);
  }
};

// The classes of a row that a thread takes: every count-th vector from `index` on, and up to kEdges elements at the
// ends; and whether the label is one of them.
template <class View, int kEdges>
struct OwnClasses {
  const View& view;
  int index, count;
  bool active;  // the row exists and its logits are read
  int own_edge;
  bool has_own_edge;
  int label;
  bool in_vector;  // the label's class is in a vector of some thread
  int target_vector, target_element;
  bool has_target;

  __device__ __forceinline__ OwnClasses(const View& view, int index, int count, bool active, int label)
      : view(view),
        index(index),
        count(count),
        active(active),
        own_edge(view.edge_class(index)),
        has_own_edge(active && own_edge >= 0),
        label(label) {
    // Behind the head it is in a vector.
    const int offset = label - view.head;
    in_vector = active && offset >= 0 && offset / View::kVecSize < view.vectors;
    target_vector = in_vector ? offset / View::kVecSize : -1;
    target_element = offset % View::kVecSize;
    has_target = in_vector && (target_vector & (count - 1)) == index;
#pragma unroll
    for (int e = 0; e < kEdges; ++e) has_target |= target_is_edge(e);
  }
  // The class of an edge element, or -1. Several are found again where they are used: arrays would spill registers.
  __device__ __forceinline__ int edge_class(int e) const {
    return kEdges == 1 ? own_edge : view.edge_class(index + e * count);
  }
  __device__ __forceinline__ bool has_edge(int e) const {
    return kEdges == 1 ? has_own_edge : active && edge_class(e) >= 0;
  }
  __device__ __forceinline__ bool target_is_edge(int e) const {
    return has_edge(e) && edge_class(e) == label;
  }
  // Loads the edge elements of a row that is read. Classes are `stride` elements apart.
  template <class Storage, int kCount>
  __device__ __forceinline__ void load_edges(const Storage* row, int64 stride, Storage (&edges)[kCount]) const {
#pragma unroll
    for (int e = 0; e < kEdges; ++e) {
      if (edge_class(e) >= 0) edges[e] = row[edge_class(e) * stride];
    }
  }
};

// kEdges: elements at the ends of a row that a thread takes, at most. With several of them few lanes share a row, so a
// warp has many rows on their way. Precondition: kEdges num_threads() >= 2 (kVecSize - 1), or all rows begin and end
// with a vector.
// kPrefetch: the next row is prefetched to L2. Precondition: a block takes the row.
// kShifted: logits and gradients lie differently. If their classes lie apart (kGathered), vectors are those of the
// gradients in all sweeps, and logits are gathered on their way to shared memory.
template <int kVecSize, int kEdges, bool kPrefetch, bool kShifted = false, bool kGathered = false>
struct ResidentReader {
  static_assert(kShifted || !kGathered, "gathered logits lie otherwise than their gradients");
  static_assert(!(kPrefetch && kShifted), "rows are prefetched in aligned vectors");
  // True if the vectors of gradients are cut out of those of logits.
  static constexpr bool kCuts = kShifted && !kGathered;
  // An array has one element at least.
  static constexpr int kEdgeSlots = kEdges > 0 ? kEdges : 1;
  // Vectors that a thread takes together, so that their instructions overlap.
  static constexpr int kUnroll = 4;

  // Fewer where a class takes many registers: 8 classes.
  static constexpr int kUnrollCapped = kVecSize >= 8 ? 1 : 8 / kVecSize < kUnroll ? 8 / kVecSize : kUnroll;

  // Vectors that are cut out take two packs each.
  static constexpr int kUnrollCuts = 2;

  // This thread's k-th vector is at [k * turn()].
  template <class P, bool kCopies>
  static __device__ __forceinline__ P* stage() {
    extern __shared__ uint4 staged[];
    return reinterpret_cast<P*>(staged) + threadIdx.x + (kCopies ? threadIdx.x / kWarp : 0);
  }
  // Slots of all threads for a vector of each, and with kCopies for a vector that each warp copies from another one.
  template <bool kCopies>
  static __device__ __forceinline__ unsigned turn() {
    return blockDim.x + (kCopies ? blockDim.x / kWarp : 0);
  }

  // f(v, at) for every staged vector v < end of the thread; `at` is the vector's slot. The distance of slots is found
  // again wherever it is added: as an argument it spilled registers of threads that have 40 (NVRTC 13.0).
  template <bool kCopies, int kVectors = kUnroll, class P, class F>
  static __device__ __forceinline__ void for_each_staged(int v, P* at, int end, int count, const F& f) {
    if constexpr (kVectors > 1) {
#pragma unroll 1
      for (; v + (kVectors - 1) * count < end; v += kVectors * count, at += kVectors * turn<kCopies>()) {
#pragma unroll
        for (int k = 0; k < kVectors; ++k) f(v + k * count, at + k * turn<kCopies>());
      }
    }
#pragma unroll 1
    for (; v < end; v += count, at += turn<kCopies>()) f(v, at);
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

  // Gathers this thread's vectors: without registers, or kTogether at a time so that their loads are in flight
  // together.
  template <int kTogether, class Vectors, class View, class P>
  static __device__ __forceinline__ void gather(const Vectors& vectors, const View& view, int v, P* at, int end,
                                                int count) {
    if constexpr (Vectors::kCopies) {
      for_each_staged<false>(v, at, end, count, [&](int i, P* slot) { vectors.copy(view.first(i), slot); });
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
                   kKeepsProducts =
                       Program::kKeepsProducts && !Group::kMultiWarp && (!kCuts || kSameType<Input, Compute>);
    // Exponentials replace their logits if they fit, and are relative to the maximum of the row: with several warps
    // they would have to be rescaled, and speculative gradients would differ in bits from recomputed ones.
    constexpr bool kKeepsExponentials =
        kGradient && !Program::kCapped && !Group::kMultiWarp && kSameType<Input, Compute>;
    const Input lowest = Narrow<Input>::from(-scalar_infinity(0.0f));
    const int index = group.thread_rank(), count = group.num_threads();
    constexpr bool kCopies = kCuts && kGradient && Group::kMultiWarp;

    RowTarget<Compute> t = program.target(exists ? r : 0);
    t.active &= exists;
    t.invalid_label &= exists;
    using View = RowVectors<Input, kVecSize, int>;
    // Gathered logits have the vectors of their gradients.
    const View view = vectors_of_row<kVecSize, kGathered, int>(program, t.offset);
    const Input* const input = program.input + t.offset[kLogits];
    const OwnClasses<View, kEdges> own(view, index, count, t.active, static_cast<int>(t.label));
    const int present = t.active ? view.vectors : 0;
    // Both uses find the cuts for themselves: kept from one to the other they would spill registers.
    [[maybe_unused]] const auto cuts_of = [&](const View& written) {
      const int lanes = group.subwarp_size();
      return StagedCuts<Input, kVecSize, Group::kMultiWarp>(view, written, index & (lanes - 1), lanes, turn<kCopies>());
    };
    P* row = stage<P, kCopies>();
    if constexpr (!kGathered) {
      const P* const from = reinterpret_cast<const P*>(input + view.head);
      const auto copy = [&](int i, P* slot) { cp_async(slot, from + i); };
      if constexpr (kCopies) {
        const auto cuts = cuts_of(vectors_of_row<kVecSize, kShifted, int>(program, t.offset));
        row += cuts.begin;
        if (cuts.at_end) {
          // The first vector has no neighbour in front of it.
          const bool later = index + cuts.step < 0;
          P* const beside = row + cuts.step + (later ? turn<kCopies>() : 0);
          // The last vector of a row lies in front of none.
          const int neighbour = index + cuts.step + (later ? count : 0), last = present + min(cuts.step, 0);
          for_each_staged<kCopies>(neighbour, beside, last, count, copy);
        }
      }
      for_each_staged<kCopies>(index, row, present, count, copy);
    }
    Input logit{}, edge_logits[kEdgeSlots]{};
    const int64 stride = kGathered ? program.space.class_stride[kLogits] : 1;
    if (t.active) {
      logit = input[t.label * stride];
      own.load_edges(input, stride, edge_logits);
    }
    // The element of a vector, or of an edge, that is the label's; -1 if there is none, or if its logit is masked.
    const auto element_of = [&](const OwnClasses<View, kEdges>& of, int i) {
      return !kMasksTarget && i == of.target_vector ? of.target_element : -1;
    };
    const auto edge_element_of = [&](const OwnClasses<View, kEdges>& of, int e) {
      return !kMasksTarget && of.target_is_edge(e) ? 0 : -1;
    };

    if constexpr (kGathered) {
      const ShiftedVectors<Input, kVecSize, kGathered> vectors(input, stride, static_cast<int>(program.space.classes),
                                                               view.head);
      // Threads of a single block have registers for more elements.
      constexpr int kTogether = Group::kMultiWarp && Group::kClusterSize == 1 ? 4 : 2;
      gather<kTogether>(vectors, view, index, row, present, count);
    }
    if constexpr (kPrefetch && sizeof(P) == 16) prefetch_row(program, group, next);
    cp_async_wait_all();
    RunningMax<Compute, Input, kVecSize> running;
    for_each_staged<kCopies>(index, row, present, count, [&](int, const P* slot) { running.add(load_words(slot)); });
    Compute raw = running.get();
#pragma unroll
    for (int e = 0; e < kEdges; ++e) {
      raw = own.has_edge(e) ? max_ignoring_nan(raw, widen<Compute>(edge_logits[e])) : raw;
    }
    [[maybe_unused]] const int half = slots(view.vectors, count);
    if (kMasksTarget && own.has_target && own.in_vector) {
      P* const slot = row + (own.target_vector >> log2_exact(count)) * turn<kCopies>();
      reinterpret_cast<Input*>(slot)[own.target_element] = lowest;
    }
#pragma unroll
    for (int e = 0; e < kEdges; ++e) {
      if (kMasksTarget && own.target_is_edge(e)) edge_logits[e] = lowest;
    }

    const auto of_target = [&] { return t.active ? program.logit.value(widen<Compute>(logit)) : Compute(0); };
    Compute z = Compute(0);
    if constexpr (Program::kSmoothed) z = of_target();
    RowSums<Compute, Program::kSmoothed> sums{
        {program.logit.value(subwarp_reduce(raw, group.subwarp_size(), MaxOp{})), Compute(0)}, Compute(0), Compute(0)};
    const Compute shift = exp_shift(sums.softmax.max_logit);
    constexpr int kVectors = Program::kCapped ? kUnrollCapped : kUnroll;
    for_each_staged<kCopies, kVectors>(index, row, present, count, [&](int i, P* slot) {
      if constexpr (kKeepsProducts && kGradient) {
        sums.softmax.exp_sum += ExpSlopeProducts<Compute, P>::store(program, element_of(own, i), shift, slot, half);
      } else if constexpr (kKeepsExponentials) {
        add_classes(program, view.first(i), element_of(own, i), z, shift, load_words(slot), sums, slot);
      } else {
        add_classes(program, view.first(i), element_of(own, i), z, shift, load_words(slot), sums);
      }
    });
#pragma unroll
    for (int e = 0; e < kEdges; ++e) {
      if (!own.has_edge(e)) continue;
      const Pack<Input, 1> x{{edge_logits[e]}};
      add_classes(program, own.edge_class(e), edge_element_of(own, e), z, shift, x, sums);
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
      // Lanes read slots of each other, or write over the label's logit, and shuffles order no memory. Between warps
      // there was a barrier.
      if constexpr (kCuts || (Program::kInPlace && !Group::kMultiWarp)) __syncwarp();
      Gradient* const gradients = program.gradients + t.offset[kGradients];
      // The vectors and the edge elements of the gradients, if those lie otherwise.
      [[maybe_unused]] const View written = vectors_of_row<kVecSize, kShifted, int>(program, t.offset);
      [[maybe_unused]] const OwnClasses<View, kEdges> own_written(written, index, count, t.active,
                                                                  static_cast<int>(t.label));
      const OwnClasses<View, kEdges>& stored = kCuts ? own_written : own;
      if (kCuts && t.active) own_written.load_edges(input, 1, edge_logits);
      const int vectors = exists ? stored.view.vectors : 0;
      const auto store_edges = [&] {
#pragma unroll
        for (int e = 0; e < kEdges; ++e) {
          const int edge = stored.edge_class(e);
          if (exists && edge >= 0) {
            store_gradient(program, gradients + edge, edge, edge_element_of(stored, e), grad_coeffs, all_zero,
                           Pack<Input, 1>{{edge_logits[e]}});
          }
        }
      };
      if constexpr (!kCuts) store_edges();
      if (all_zero) {
        for (int i = index; i < vectors; i += count) {
          store_gradient(program, gradients + stored.view.first(i), 0, -1, grad_coeffs, true, Pack<Input, kVecSize>{});
        }
      } else {
        [[maybe_unused]] const auto cuts = cuts_of(written);
        const bool later = kCuts && index < cuts.begin;
        const int from = later ? index + count : index, end = kCuts ? (exists ? cuts.end : 0) : vectors;
        P* const slots = later ? row + turn<kCopies>() : row;
        constexpr int kMost = kCuts ? kUnrollCuts : kUnroll,
                      kWritten = kKeepsProducts || kVectors > kMost ? kMost : kVectors;
        for_each_staged<kCopies, kWritten>(from, slots, end, count, [&](int i, P* slot) {
          const int first = stored.view.first(i);
          if constexpr (kKeepsProducts) {
            Compute g[kVecSize];
            if constexpr (kCuts) {
              unpack(cuts.load(slot), g);
            } else {
              ExpSlopeProducts<Compute, P>::load(slot, half, g);
            }
#pragma unroll
            for (int k = 0; k < kVecSize; ++k) g[k] *= grad_coeffs.exp_coeff;
            store_pack<kVecSize>(gradients + first, NarrowPack<Gradient, kVecSize>::from(g));
          } else {
            P x;
            if constexpr (kCuts) {
              x = cuts.load(slot);
            } else {
              x = load_words(slot);
            }
            store_gradient<kKeepsExponentials>(program, gradients + first, first, element_of(stored, i), grad_coeffs,
                                               false, x);
          }
        });
        if constexpr (kCuts) {
          // The first and the last vector, if some of their classes are at an end of the row of logits.
          const int last = max(end, cuts.begin);
#pragma unroll 1
          for (int i = later ? 0 : last;; i = last) {
            if (i < vectors && (i & (count - 1)) == index) {
              const int first = written.first(i);
              P x;
#pragma unroll
              for (int k = 0; k < kVecSize; ++k) x.element[k] = input[first + k];
              store_gradient(program, gradients + first, first, element_of(stored, i), grad_coeffs, false, x);
            }
            if (i == last) break;
          }
        }
      }
      // Behind the vectors, since these edges have only just been loaded.
      if constexpr (kCuts) store_edges();
      // Written by the thread that has just stored another number there.
      if ((kMasksTarget || (kKeepsProducts && own.in_vector)) && stored.has_target && !all_zero) {
        gradients[t.label] = Narrow<Gradient>::from(grad_coeffs.target * program.logit.slope(widen<Compute>(logit)));
      }
      // A neighbour may still read slots that the next row is copied to.
      if constexpr (kCuts) __syncwarp();
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
