// Rows that stay on chip: each thread of the unit has its vectors of the row in shared memory, where nobody but itself
// reads them, so that no barrier is needed. It has them copied there past the registers, waits, goes over them three
// times, and turns to its next row; meanwhile others of the multiprocessor wait or compute. To copy the next row's
// vectors where these have been used for the last time takes 64 registers instead of 40 (docs/performance.md).
//
// Not in registers: compilers keep every logit in each form that it has been computed to, and spill.
//
// Exponentials are relative to the largest logit of a warp's part at first, and put together with the other warps' when
// those are known: one barrier for a row.
#pragma once
#include "softmax/rows.cuh"

// What is kept of each class in place of its logit: its exponential and its slope as a product, where they take long.
// They may need twice the room: the second half is as far away as there are places.
template <class Compute, class P>
struct Products;
template <class Compute, class Storage, int kLanes>
struct Products<Compute, Pack<Storage, kLanes>> {
  using P = Pack<Storage, kLanes>;
  static constexpr int kHalves = sizeof(Compute) / sizeof(Storage);

  // The sum of the exponentials but that of lane `target`, as add_classes finds it.
  template <class Program>
  static __device__ __forceinline__ Compute put(const Program& program, int target, Compute largest, P* place,
                                                int half) {
    Compute raw[kLanes], e[kLanes];
    unpack(whole(place), raw);
    Pack<Compute, kLanes> products;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      Compute z, slope;
      program.logit.evaluate(raw[i], z, slope);
      e[i] = program.logit.exponential_of(z, largest);
      products.lane[i] = e[i] * slope;
    }
#pragma unroll
    for (int i = 0; i < kHalves; ++i) place[i * half] = whole(reinterpret_cast<const P*>(&products) + i);
    if (target >= 0) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        if (i == target) e[i] = Compute(0);
      }
    }
    return sum_of_lanes(e);
  }
  static __device__ __forceinline__ void get(const P* place, int half, Compute (&products)[kLanes]) {
    Pack<Compute, kLanes> all;
#pragma unroll
    for (int i = 0; i < kHalves; ++i) reinterpret_cast<P*>(&all)[i] = whole(place + i * half);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) products[i] = all.lane[i];
  }
};

// kAhead: whether a row is brought to the cache ahead of its turn. Precondition of that: a block takes it.
template <int kLanes, bool kAhead>
struct ResidentReader {
  // Vectors that a thread takes together, so that their steps overlap.
  static constexpr int kTogether = 4;

  // This thread's k-th vector is at [k * blockDim.x].
  template <class P>
  static __device__ __forceinline__ P* stage() {
    extern __shared__ uint4 staged[];
    return reinterpret_cast<P*>(staged) + threadIdx.x;
  }

  // f(v, at) for every staged vector v of the thread in front of `end`, which is at `at`.
  template <class P, class F>
  static __device__ __forceinline__ void each(int v, P* at, int end, int count, const F& f) {
#pragma unroll 1
    for (; v + (kTogether - 1) * count < end; v += kTogether * count, at += kTogether * blockDim.x) {
#pragma unroll
      for (int k = 0; k < kTogether; ++k) f(v + k * count, at + k * blockDim.x);
    }
#pragma unroll 1
    for (; v < end; v += count, at += blockDim.x) f(v, at);
  }

  // How many places there are for so many vectors.
  static __device__ __forceinline__ int places(int vectors, int count) {
    return (vectors + count - 1) / count * blockDim.x;
  }

  // Has a short row that counts brought to the cache, so that few blocks are enough to keep the memory busy: with many
  // of them, and with longer rows, what is read and written at once is more than the cache holds.
  template <class Unit, class Program>
  static __device__ __forceinline__ void bring(const Program& program, const Unit& unit, int64 row) {
    using Input = typename Program::Input;
    if (unit.index() != 0 || row >= program.space.rows) return;
    const auto t = program.target(row);
    if (!t.counts) return;
    const RowView<Input, kLanes, int> view(program.input, t.offset[kLogits], static_cast<int>(program.space.classes));
    if (view.vectors > 0) bring_to_cache(program.input + t.offset[kLogits] + view.head, view.vectors * 16u);
  }

  template <bool kGradient, class Unit, class Program, class Scale>
  static __device__ __forceinline__ typename Program::Compute visit(const Program& program, const Unit& unit, int64 r,
                                                                    bool exists, int64 next, Turn& turn, Scale& scale) {
    using Compute = typename Program::Compute;
    using Input = typename Program::Input;
    using P = Pack<Input, kLanes>;
    // The target is replaced by -inf, which adds nothing, so that no class has to be compared with it.
    constexpr bool kPlain = !Program::kSmoothed && !Program::kCapped, kOnce = Program::kOnce;
    // The exponentials take the places of their logits where they fit, and are relative to the largest logit of the row
    // at once: those of a warp's part would have to be related to it, and gradients of one pass had other bits then.
    constexpr bool kExponentials = kGradient && !Program::kCapped && !Unit::kBlock && kSameType<Input, Compute>;
    const Input lowest = Narrow<Input>::from(-scalar_infinity(0.0f));
    const int index = unit.index(), count = unit.count(), classes = static_cast<int>(program.space.classes);
    P* const row = stage<P>();

    RowTarget<Compute> t = program.target(exists ? r : 0);
    t.counts &= exists;
    t.wrong &= exists;
    const RowView<Input, kLanes, int> view(program.input, t.offset[kLogits], classes);
    const Input* const input = program.input + t.offset[kLogits];
    const int single = view.end(index), present = t.counts ? view.vectors : 0;
    const bool has_end = t.counts && single >= 0;
    const P* const from = reinterpret_cast<const P*>(input + view.head);
    each(index, row, present, count, [&](int i, P* place) { stage_pack(place, from + i); });
    Input logit{}, end{};
    if (t.counts) logit = input[t.label];
    if (has_end) end = input[single];

    // Where the target is: behind the head it is in a vector.
    const int behind = static_cast<int>(t.label) - view.head;
    const bool in_vector = t.counts && behind >= 0 && behind / kLanes < view.vectors;
    const int target_vector = in_vector ? behind / kLanes : -1, target_lane = behind % kLanes;
    const bool in_end = has_end && single == t.label;
    const bool has_target = in_end || (in_vector && (target_vector & (count - 1)) == index);
    const auto lane_of = [&](int i) { return !kPlain && i == target_vector ? target_lane : -1; };
    const int end_lane = !kPlain && in_end ? 0 : -1;

    if constexpr (kAhead && sizeof(P) == 16) bring(program, unit, next);
    wait_for_copies();
    Largest<Compute, Input, kLanes> found;
    each(index, row, present, count, [&](int, const P* place) { found.add(whole(place)); });
    const Compute raw = has_end ? larger(found.get(), widen<Compute>(end)) : found.get();
    const int half = places(view.vectors, count);
    if (kPlain && has_target && in_vector) {
      reinterpret_cast<Input*>(row + target_vector / count * blockDim.x)[target_lane] = lowest;
    }
    if (kPlain && in_end) end = lowest;

    const auto of_target = [&] { return t.counts ? program.logit.value(widen<Compute>(logit)) : Compute(0); };
    Compute z = Compute(0);
    if constexpr (Program::kSmoothed) z = of_target();
    RowPart<Compute> part{program.logit.value(join_lanes(raw, unit.lanes(), Larger{})), {0, 0, 0}};
    // Of products that are kept nothing may be relative to a part of the row.
    if constexpr (kOnce) part.largest = largest_of_warps(unit, part.largest, turn);
    const Compute relative_to = reference(part.largest);
    each(index, row, present, count, [&](int i, P* place) {
      if constexpr (kOnce && kGradient) {
        part.sums.rest += Products<Compute, P>::put(program, lane_of(i), relative_to, place, half);
      } else if constexpr (kExponentials) {
        add_classes(program, view.first(i), lane_of(i), z, relative_to, whole(place), part.sums, place);
      } else {
        add_classes(program, view.first(i), lane_of(i), z, relative_to, whole(place), part.sums);
      }
    });
    if (has_end) add_classes(program, single, end_lane, z, relative_to, Pack<Input, 1>{{end}}, part.sums);
    join_sums<Program::kSmoothed>(part.sums, unit.lanes());
    join_warps<Program::kSmoothed>(unit, part, turn);
    if constexpr (!Program::kSmoothed) z = of_target();

    const RowLoss<Compute> y = program.finish(t, z, part.largest, part.sums, exists && index == 0);
    if constexpr (kGradient) {
      RowSlopes<Compute> slopes = y.slopes;
      scale_slopes(program, slopes, scale.factor());
      const bool none = slopes.none();
      Input* const gradients = program.gradients + t.offset[kGradients];
      const int stored = exists ? view.vectors : 0;
      if (exists && single >= 0) {
        store_gradient(program, gradients + single, single, end_lane, slopes, none, Pack<Input, 1>{{end}});
      }
      if (none) {
        for (int i = index; i < stored; i += count) {
          store_gradient(program, gradients + view.first(i), 0, -1, slopes, true, Pack<Input, kLanes>{});
        }
      } else {
        each(index, row, stored, count, [&](int i, P* place) {
          if constexpr (kOnce) {
            Compute g[kLanes];
            Products<Compute, P>::get(place, half, g);
#pragma unroll
            for (int k = 0; k < kLanes; ++k) g[k] *= slopes.common;
            store_pack<kLanes>(gradients + view.first(i), NarrowPack<Input, kLanes>::from(g));
          } else {
            store_gradient<kExponentials>(program, gradients + view.first(i), view.first(i), lane_of(i), slopes, false,
                                          whole(place));
          }
        });
      }
      // By the thread that has just stored something else there.
      if ((kPlain || (kOnce && in_vector)) && has_target && !none) {
        gradients[t.label] = Narrow<Input>::from(slopes.target * program.logit.slope(widen<Compute>(logit)));
      }
    }
    return y.value;
  }

  template <bool kGradient, class Unit, class Program, class Scale>
  struct Visit {
    static constexpr bool kLooksAhead = kAhead;
    const Program& program;
    const Unit& unit;
    Scale& scale;
    __device__ __forceinline__ auto operator()(int64 row, bool exists, int64 next, Turn& turn) const {
      return visit<kGradient>(program, unit, row, exists, next, turn, scale);
    }
  };

  // As LongReader's.
  template <bool kGradient, class Unit, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Unit& unit, Scale& scale, int64 groups,
                                               const Workspace& work) {
    walk_rows(unit, scale, program.space.rows, groups, work,
              Visit<kGradient, Unit, Program, Scale>{program, unit, scale});
  }
};
