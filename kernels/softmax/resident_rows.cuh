// Resident rows: a row stays in shared memory, and each logit is read from memory once. Value and gradient of
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
// A group owns a row, and a thread the same vectors in all sweeps (OwnClasses). It reads only vectors that it copied
// itself, so the copies need no barrier. While a thread waits for its copies, other warps of the SM wait or compute.
// Copying vectors of the next row into the slots of vectors that are used up would take 64 registers instead of 40
// (docs/performance/rows.md). Rows in registers were slower: compilers keep every logit in each form that it was
// converted to, and spill.
//
// With kKeepsProducts (capped logits, rows within a warp) the product of exponential and slope replaces the logit. Rows
// that several warps share compute both again: their products would have to be relative to the maximum of the whole
// row, which takes a second all_gather, and with 16-bit logits products would halve the number of classes that fit.
//
// With kShifted the gradients are aligned differently from the logits, and the third sweep goes over the vectors of the
// gradients. Each is cut out of the two vectors of logits that it overlaps, one of which a neighbouring lane copied.
// Lanes wait for each other before and after this sweep.
//
// Traffic: each logit is read once, each gradient written once. Preconditions: class stride 1 (of logits only if they
// are not gathered); dynamic shared memory for all vectors of a row, twice as much for products of 16-bit logits.
#pragma once
#include "softmax/rows.cuh"

// Keeps the product of exponential and slope of each class in place of its logit, for capped logits. Products may take
// twice the space of logits. Their second half is then `half` slots after the first.
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
  // Loads the products of a vector.
  static __device__ __forceinline__ void load(const P* slot, int half, Compute (&products)[kVecSize]) {
    Pack<Compute, kVecSize> all;
#pragma unroll
    for (int i = 0; i < kHalves; ++i) reinterpret_cast<P*>(&all)[i] = load_words(slot + i * half);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) products[i] = all.element[i];
  }
};

// Position of the gradient vectors of a row relative to its staged logit vectors. Each gradient vector overlaps two
// logit vectors: its own, which has the same number and is in a slot of the calling thread, and a neighbour's. Lanes of
// a warp have adjacent slots. If other warps share the row (kMultiWarp), each warp has one more slot, where the lane at
// the end keeps a copy of the vector that its neighbour in another warp has. Up to kVecSize - 1 elements at each end of
// the row of logits are in no vector, and the gradient vectors from `begin` to `end` contain none of them.
template <class Storage, int kVecSize, bool kMultiWarp>
struct StagedCuts {
  using P = Pack<Storage, kVecSize>;
  using View = RowVectors<Storage, kVecSize, int>;
  unsigned bytes;  // distance from the first of both logit vectors to the gradient vector, in bytes
  int step;        // from the own vector to the neighbour's: 1, -1 if the neighbour's is first, 0 if there is none
  int begin, end;
  bool at_end;       // true if no lane next to this one has the neighbour's vector
  int lower, upper;  // slots from the own one to those of the first and the second vector

  // `turn`: number of slots from one vector of a thread to its next one.
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
  // Returns the staged numbers for the classes of a gradient vector. `slot` is the slot of its own logit vector.
  __device__ __forceinline__ P load(const P* slot) const {
    const P both[2] = {load_words(slot + lower), load_words(slot + upper)};
    return cut_out<sizeof(Storage)>(both, bytes);
  }
};

// Classes of a row that a thread owns: every count-th vector from `index` on, and up to kEdges edge elements. Also
// tells if the label's class is one of them. Precondition: count is a power of two.
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
    // A label past the head is in a vector, unless it is in the tail.
    const int offset = label - view.head;
    in_vector = active && offset >= 0 && offset / View::kVecSize < view.vectors;
    target_vector = in_vector ? offset / View::kVecSize : -1;
    target_element = offset % View::kVecSize;
    has_target = in_vector && (target_vector & (count - 1)) == index;
#pragma unroll
    for (int e = 0; e < kEdges; ++e) has_target |= target_is_edge(e);
  }
  // Class of edge element e, or -1. If there are several, each is computed where it is used, because arrays would spill
  // registers.
  __device__ __forceinline__ int edge_class(int e) const {
    return kEdges == 1 ? own_edge : view.edge_class(index + e * count);
  }
  __device__ __forceinline__ bool has_edge(int e) const {
    return kEdges == 1 ? has_own_edge : active && edge_class(e) >= 0;
  }
  __device__ __forceinline__ bool target_is_edge(int e) const {
    return has_edge(e) && edge_class(e) == label;
  }
  // Loads the edge elements. Classes are `stride` elements apart. Precondition: the row is active.
  template <class Storage, int kCount>
  __device__ __forceinline__ void load_edges(const Storage* row, int64 stride, Storage (&edges)[kCount]) const {
#pragma unroll
    for (int e = 0; e < kEdges; ++e) {
      if (edge_class(e) >= 0) edges[e] = row[edge_class(e) * stride];
    }
  }
};

// Reader of resident rows.
//
// kEdges: maximum number of edge elements of a thread. With several of them few lanes share a row, so a warp has many
// rows in flight. Precondition: kEdges num_threads() >= 2 (kVecSize - 1), or all rows begin and end with a vector.
//
// kPrefetch: the next row is prefetched to L2. Precondition: a block owns the row.
//
// kShifted: logits and gradients are aligned differently. If the logits also have a class stride (kGathered), they are
// gathered on their way to shared memory, and all sweeps go over the vectors of the gradients.
template <int kVecSize, int kEdges, bool kPrefetch, bool kShifted = false, bool kGathered = false>
struct ResidentReader {
  static_assert(kShifted || !kGathered, "gathered logits lie otherwise than their gradients");
  static_assert(!(kPrefetch && kShifted), "rows are prefetched in aligned vectors");
  // True if gradient vectors are cut out of logit vectors.
  static constexpr bool kCuts = kShifted && !kGathered;
  // Length of arrays of edge elements. Arrays need at least one element.
  static constexpr int kEdgeSlots = kEdges > 0 ? kEdges : 1;
  // Number of vectors that a thread processes together, so that their instructions overlap.
  static constexpr int kUnroll = 4;

  // Capped logits take many registers, so no more than 8 classes are processed together.
  static constexpr int kUnrollCapped = kVecSize >= 8 ? 1 : 8 / kVecSize < kUnroll ? 8 / kVecSize : kUnroll;

  // Each vector that is cut out takes two packs.
  static constexpr int kUnrollCuts = 2;

  // Returns the slot of this thread's first vector. Its k-th vector is at [k * turn()].
  template <class P, bool kCopies>
  static __device__ __forceinline__ P* stage() {
    extern __shared__ uint4 staged[];
    return reinterpret_cast<P*>(staged) + threadIdx.x + (kCopies ? threadIdx.x / kWarp : 0);
  }
  // Number of slots from one vector of a thread to its next one: a slot per thread and, with kCopies, a slot per warp
  // for the vector that it copies from another warp.
  template <bool kCopies>
  static __device__ __forceinline__ unsigned turn() {
    return blockDim.x + (kCopies ? blockDim.x / kWarp : 0);
  }

  // Calls f(v, at) for every staged vector v < end of the thread; `at` is the vector's slot. turn() is computed
  // wherever it is added: as an argument it spilled registers of threads that have 40 (NVRTC 13.0).
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

  // Number of slots that a block has for `vectors` vectors per row, if `count` threads share a row. Precondition: count
  // is a power of two.
  static __device__ __forceinline__ int slots(int vectors, int count) {
    return (vectors + count - 1 >> log2_exact(count)) * blockDim.x;
  }

  // Prefetches a row to L2 if it exists and is active, so that few blocks keep the memory busy. It is meant for short
  // rows: with many blocks, and with longer rows, reads and writes in flight exceed L2.
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

  // Gathers this thread's vectors into shared memory: by asynchronous copies with Vectors::kCopies, otherwise through
  // registers, kTogether at a time, so that their loads are in flight together.
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

  // Evaluates a row and, if kGradient, writes its gradient. Returns the row's value. Preconditions: those of
  // two_pass_row. `next`: as in for_each_row.
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
    // Exponentials replace their logits if they fit, and if they are relative to the maximum of the row: with several
    // warps they would have to be rescaled, and speculative gradients would differ in bits from recomputed ones.
    constexpr bool kKeepsExponentials =
        kGradient && !Program::kCapped && !Group::kMultiWarp && kSameType<Input, Compute>;
    const Input lowest = Narrow<Input>::from(-scalar_infinity(0.0f));
    const int index = group.thread_rank(), count = group.num_threads();
    constexpr bool kCopies = kCuts && kGradient && Group::kMultiWarp;

    RowTarget<Compute> t = program.target(exists ? r : 0);
    t.active &= exists;
    t.invalid_label &= exists;
    using View = RowVectors<Input, kVecSize, int>;
    // Gathered logits are staged in the vectors of their gradients.
    const View view = vectors_of_row<kVecSize, kGathered, int>(program, t.offset);
    const Input* const input = program.input + t.offset[kLogits];
    const OwnClasses<View, kEdges> own(view, index, count, t.active, static_cast<int>(t.label));
    const int present = t.active ? view.vectors : 0;
    // Computed at both uses: kept from one to the other, cuts would spill registers.
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
          // The first vector has no neighbour before it.
          const bool later = index + cuts.step < 0;
          P* const beside = row + cuts.step + (later ? turn<kCopies>() : 0);
          // The last vector of a row has no neighbour after it.
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
    // Position of the label's class in a vector, or in an edge element; -1 if it is not there, or if its logit is
    // masked.
    const auto element_of = [&](const OwnClasses<View, kEdges>& of, int i) {
      return !kMasksTarget && i == of.target_vector ? of.target_element : -1;
    };
    const auto edge_element_of = [&](const OwnClasses<View, kEdges>& of, int e) {
      return !kMasksTarget && of.target_is_edge(e) ? 0 : -1;
    };

    if constexpr (kGathered) {
      const ShiftedVectors<Input, kVecSize, kGathered> vectors(input, stride, static_cast<int>(program.space.classes),
                                                               view.head);
      // If a single block owns the row, threads have registers for more elements.
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
      // Lanes read each other's slots, or overwrite the label's logit, and shuffles do not order memory accesses.
      // Between warps, group_combine had a barrier.
      if constexpr (kCuts || (Program::kInPlace && !Group::kMultiWarp)) __syncwarp();
      Gradient* const gradients = program.gradients + t.offset[kGradients];
      // Vectors and edge elements of the gradients, if these are aligned differently from logits.
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
          // The first and the last gradient vector, if they contain edge elements of the row of logits.
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
      // After the vectors, because these edge elements have only just been loaded.
      if constexpr (kCuts) store_edges();
      // Written by the thread that has just stored another number there.
      if ((kMasksTarget || (kKeepsProducts && own.in_vector)) && stored.has_target && !all_zero) {
        gradients[t.label] = Narrow<Gradient>::from(grad_coeffs.target * program.logit.slope(widen<Compute>(logit)));
      }
      // A neighbour may still read slots to which the next row is copied.
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
