// Rows that stay on chip: each thread of the unit has its vectors of the row in shared memory, where nobody but itself
// reads them, so that no barrier is needed. Where it has used a vector for the last time, it has that of its next row
// copied there at once, so that the memory of the GPU does not wait for arithmetic. What is known of the next row is
// asked for ahead, too, because its logits are not read before its label is known to count; and its label a row
// earlier, so that nobody waits for that.
//
// Not in registers: compilers keep every logit in each form that it has been computed to, and spill.
//
// Exponentials are relative to the largest logit of a warp's part at first, and put together with the other warps' when
// those are known: one barrier for a row.

// A row ahead of its turn.
template <class Program>
struct RowAhead {
  bool exists;
  RowTarget<typename Program::Compute> target;
  typename Program::Input logit;  // the target's
  typename Program::Input end;    // what this thread takes of the row's ends
};

// What memory says of a row's label, which is on its way for a row's time; of no row, what it says of the first.
template <class Program>
__device__ __forceinline__ typename Program::Note ask(const Program& program, int64 row) {
  int64 offset[kRowStreams];
  program.space.offsets(row < program.space.rows ? row : 0, offset);
  return program.note(offset);
}

template <class Program>
__device__ __forceinline__ RowAhead<Program> look(const Program& program, int64 row,
                                                  const typename Program::Note& note) {
  RowAhead<Program> ahead;
  ahead.exists = row < program.space.rows;
  program.space.offsets(ahead.exists ? row : 0, ahead.target.offset);
  program.judge(ahead.target, note);
  ahead.target.counts &= ahead.exists;
  ahead.target.wrong &= ahead.exists;
  return ahead;
}

// What is copied to the places of a row that are free again.
template <class P>
struct Refill {
  const P* from;
  int vectors;

  __device__ __forceinline__ void place(int v, P* to) const {
    if (v < vectors) stage_pack(to, from + v);
  }
};

template <int kLanes>
struct ResidentReader {
  // Vectors that a thread takes together, so that their steps overlap.
  static constexpr int kTogether = 4;

  // This thread's k-th vector is at [k * blockDim.x].
  template <class P>
  static __device__ __forceinline__ P* stage() {
    extern __shared__ uint4 staged[];
    return reinterpret_cast<P*>(staged) + threadIdx.x;
  }

  // f(v, at) for every staged vector v of the thread in front of `end`, from `v` and its place `at` on, which are moved
  // behind them; behind it, or some of it, then(v, at).
  template <class P, class F, class Then>
  static __device__ __forceinline__ void each(int& v, P*& at, int end, int count, const F& f, const Then& then) {
#pragma unroll 1
    for (; v + (kTogether - 1) * count < end; v += kTogether * count, at += kTogether * blockDim.x) {
#pragma unroll
      for (int k = 0; k < kTogether; ++k) f(v + k * count, at + k * blockDim.x);
#pragma unroll
      for (int k = 0; k < kTogether; ++k) then(v + k * count, at + k * blockDim.x);
    }
#pragma unroll 1
    for (; v < end; v += count, at += blockDim.x) {
      f(v, at);
      then(v, at);
    }
  }
  template <class P, class F>
  static __device__ __forceinline__ void each(int& v, P*& at, int end, int count, const F& f) {
    each(v, at, end, count, f, [](int, const P*) {});
  }

  // Reads what of a row goes to registers; what is to be copied of it.
  template <class Unit, class Program, class P>
  static __device__ __forceinline__ Refill<P> fetch(const Program& program, const Unit& unit,
                                                    RowAhead<Program>& ahead) {
    using Input = typename Program::Input;
    if (!ahead.target.counts) return {nullptr, 0};
    const int64 offset = ahead.target.offset[kLogits];
    const RowView<Input, kLanes, int> view(program.input, offset, static_cast<int>(program.space.classes));
    const Input* input = program.input + offset;
    ahead.logit = input[ahead.target.label];
    const int single = view.end(unit.index());
    if (single >= 0) ahead.end = input[single];
    const P* from = reinterpret_cast<const P*>(input + view.head);
    // Half a row ahead of when it is copied, so that copies do not wait for the memory itself.
    if (sizeof(P) == 16 && unit.index() == 0 && view.vectors >= kWarp) bring_to_cache(from, view.vectors * 16u);
    return {from, view.vectors};
  }

  // As LongReader's.
  template <bool kGradient, class Unit, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Unit& unit, Scale& scale, int64 groups,
                                               const Workspace& work) {
    using Compute = typename Program::Compute;
    using Input = typename Program::Input;
    using P = Pack<Input, kLanes>;
    // The target is replaced by -inf, which adds nothing, so that no class has to be compared with it.
    constexpr bool kPlain = !Program::kSmoothed && !Program::kCapped;
    const Input lowest = Narrow<Input>::from(-scalar_infinity(0.0f));
    RowWalk<Unit> walk(unit);
    if (walk.group >= groups) return;
    GroupQueue<Unit> queue(unit, work.drawn);
    const int index = unit.index(), count = unit.count(), classes = static_cast<int>(program.space.classes);
    P* const row = stage<P>();
    const int64 first = walk.first + unit.row();
    RowAhead<Program> ahead = look(program, first, ask(program, first));
    RowWalk<Unit> later = walk;
    later.advance(unit, queue, groups, program.space.rows, 0);
    typename Program::Note asked = ask(program, later.first + unit.row());
    Refill<P> next = fetch<Unit, Program, P>(program, unit, ahead);
    P* at = row;
    int v = index;
    const auto refill = [&](int i, P* place) { next.place(i, place); };
    each(v, at, next.vectors, count, refill);
    double total = 0.0;
    Compute factor = 0;
    bool scaled = false;
    int parity = 0;
#pragma unroll 1
    for (;;) {
      const RowAhead<Program> now = ahead;
      const RowTarget<Compute>& t = now.target;
      const int group = walk.group;
      walk = later;
      const bool more = walk.group < groups;
      if (more) {
        later.advance(unit, queue, groups, program.space.rows, parity);
        ahead = look(program, walk.first + unit.row(), asked);
        asked = ask(program, later.first + unit.row());
      }

      const RowView<Input, kLanes, int> view(program.input, t.offset[kLogits], classes);
      const int single = view.end(index), present = t.counts ? view.vectors : 0;
      const bool has_end = t.counts && single >= 0;
      wait_for_copies();
      Largest<Compute, Input, kLanes> found;
      v = index;
      at = row;
      each(v, at, present, count, [&](int, const P* place) { found.add(whole(place)); });
      const Compute raw = has_end ? larger(found.get(), widen<Compute>(now.end)) : found.get();
      next = {nullptr, 0};
      if (more) next = fetch<Unit, Program, P>(program, unit, ahead);

      // Where the target is: behind the head it is in a vector.
      const int behind = static_cast<int>(t.label) - view.head;
      const bool in_vector = t.counts && behind >= 0 && behind / kLanes < view.vectors;
      const int target_vector = in_vector ? behind / kLanes : -1, target_lane = behind % kLanes;
      const bool in_end = has_end && single == t.label;
      const bool has_target = in_end || (in_vector && (target_vector & (count - 1)) == index);
      if (kPlain && has_target && in_vector) {
        reinterpret_cast<Input*>(row + target_vector / count * blockDim.x)[target_lane] = lowest;
      }
      const Input end = kPlain && in_end ? lowest : now.end;
      const auto lane_of = [&](int i) { return !kPlain && i == target_vector ? target_lane : -1; };
      const int end_lane = !kPlain && in_end ? 0 : -1;

      const Compute z = t.counts ? program.logit.value(widen<Compute>(now.logit)) : Compute(0);
      RowPart<Compute> part{program.logit.value(join_lanes(raw, unit.lanes(), Larger{})), {0, 0, 0}};
      const Compute relative_to = reference(part.largest);
      v = index;
      at = row;
      each(
          v, at, present, count,
          [&](int i, P* place) {
            add_classes(program, view.first(i), lane_of(i), z, relative_to, whole(place), part.sums);
          },
          [&](int i, P* place) {
            if constexpr (!kGradient) refill(i, place);
          });
      if constexpr (!kGradient) each(v, at, next.vectors, count, refill);
      if (has_end) add_classes(program, single, end_lane, z, relative_to, Pack<Input, 1>{{end}}, part.sums);
      join_sums<Program::kSmoothed>(part.sums, unit.lanes());
      join_warps<Program::kSmoothed>(unit, part, Turn{parity, queue.drawn});

      const RowLoss<Compute> y = program.finish(t, z, part.largest, part.sums, now.exists && index == 0);
      total += y.value;
      if constexpr (kGradient) {
        if (!scaled) factor = kept(scale.factor());
        scaled = true;
        RowSlopes<Compute> slopes = y.slopes;
        scale_slopes(program, slopes, factor);
        const bool none = slopes.none();
        Input* const gradients = program.gradients + t.offset[kGradients];
        const int stored = now.exists ? view.vectors : 0;
        v = index;
        at = row;
        if (none) {
          for (int i = index; i < stored; i += count) {
            store_gradient(program, gradients + view.first(i), 0, -1, slopes, true, Pack<Input, kLanes>{});
          }
        } else {
          each(
              v, at, stored, count,
              [&](int i, P* place) {
                store_gradient(program, gradients + view.first(i), view.first(i), lane_of(i), slopes, false,
                               whole(place));
              },
              refill);
        }
        each(v, at, next.vectors, count, refill);
        if (now.exists && single >= 0) {
          store_gradient(program, gradients + single, single, end_lane, slopes, none, Pack<Input, 1>{{end}});
        }
        // By the thread that has just stored something else there.
        if (kPlain && has_target && !none) {
          gradients[t.label] = Narrow<Input>::from(slopes.target);
        }
      }
      parity ^= 1;

      if (walk.group == group) continue;
      close_group(unit, scale, group, total, work.partials);
      if (!more) return;
      total = 0.0;
    }
  }
};
