// Rows that stay on chip: each thread of the unit has its vectors of the row in shared memory, where nobody but itself
// reads them, so that no barrier is needed. Where it has used a vector for the last time, it has that of its next row
// copied there at once, so that the memory of the GPU does not wait for arithmetic. What is known of the next row is
// asked for ahead, too, because its logits are not read before its label is known to count.
//
// Not in registers: compilers keep every logit in each form that it has been computed to, and spill.
//
// Exponentials are relative to the largest logit of a warp's part at first, and put together with the other warps' when
// those are known: one barrier for a row.

// A row ahead of its turn.
template <class Program>
struct RowAhead {
  int64 row;
  bool exists;
  RowTarget<typename Program::Compute> target;
  typename Program::Input logit;  // the target's
  typename Program::Input end;    // what this thread takes of the row's ends
};

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
  // This thread's k-th vector is at [k * blockDim.x].
  template <class P>
  static __device__ __forceinline__ P* stage() {
    extern __shared__ uint4 staged[];
    return reinterpret_cast<P*>(staged) + threadIdx.x;
  }

  template <class Program>
  static __device__ __forceinline__ RowAhead<Program> look(const Program& program, int64 row) {
    RowAhead<Program> ahead;
    ahead.exists = row < program.space.rows;
    ahead.row = ahead.exists ? row : 0;
    program.space.offsets(ahead.row, ahead.target.offset);
    program.read_label(ahead.target);
    ahead.target.counts &= ahead.exists;
    ahead.target.wrong &= ahead.exists;
    return ahead;
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
    if (Unit::kBlock && sizeof(P) == 16 && unit.index() == 0) bring_to_cache(from, view.vectors * 16u);
    return {from, view.vectors};
  }

  // As LongReader's.
  template <bool kGradient, class Unit, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Unit& unit, Scale& scale, int64 groups,
                                               double* partials) {
    using Compute = typename Program::Compute;
    using Input = typename Program::Input;
    using P = Pack<Input, kLanes>;
    // The target is replaced by -inf, which adds nothing, so that no class has to be compared with it.
    constexpr bool kPlain = !Program::kSmoothed && !Program::kCapped;
    const Input lowest = Narrow<Input>::from(-scalar_infinity(0.0f));
    RowWalk<Unit> walk(unit);
    if (walk.group >= groups) return;
    const int index = unit.index(), count = unit.count(), classes = static_cast<int>(program.space.classes);
    P* const row = stage<P>();
    RowAhead<Program> ahead = look(program, walk.first + unit.row());
    Refill<P> next = fetch<Unit, Program, P>(program, unit, ahead);
    P* at = row;
    for (int v = index; v < next.vectors; v += count, at += blockDim.x) next.place(v, at);
    double total = 0.0;
    int turn = 0;
#pragma unroll 1
    for (;;) {
      const RowAhead<Program> now = ahead;
      const RowTarget<Compute>& t = now.target;
      const int64 group = walk.group;
      walk.advance(unit, groups, program.space.rows);
      const bool more = walk.group < groups;
      if (more) ahead = look(program, walk.first + unit.row());

      const RowView<Input, kLanes, int> view(program.input, t.offset[kLogits], classes);
      const int single = view.end(index), present = t.counts ? view.vectors : 0;
      const bool has_end = t.counts && single >= 0;
      wait_for_copies();
      Largest<Compute, Input, kLanes> found;
      at = row;
#pragma unroll 4
      for (int v = index; v < present; v += count, at += blockDim.x) {
        found.add(whole(at));
      }
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

      const Compute z = t.counts ? program.logit.value(widen<Compute>(now.logit)) : Compute(0);
      RowPart<Compute> part{program.logit.value(join_lanes(raw, unit.lanes(), Larger{})), {0, 0, 0}};
      const Compute relative_to = reference(part.largest);
      at = row;
      const int visited = kGradient ? present : larger(present, next.vectors);
#pragma unroll 4
      for (int v = index; v < visited; v += count, at += blockDim.x) {
        const int lane = !kPlain && v == target_vector ? target_lane : -1;
        if (kGradient || v < present) {
          add_classes(program, view.first(v), lane, z, relative_to, whole(at), part.sums);
        }
        if constexpr (!kGradient) next.place(v, at);
      }
      if (has_end) {
        add_classes(program, single, !kPlain && in_end ? 0 : -1, z, relative_to, Pack<Input, 1>{{end}}, part.sums);
      }
      join_sums<Program::kSmoothed>(part.sums, unit.lanes());
      join_warps<Program::kSmoothed>(unit, part, turn);

      const RowLoss<Compute> y = program.finish(t, z, part.largest, part.sums, now.exists && index == 0);
      total += y.value;
      if constexpr (kGradient) {
        RowSlopes<Compute> slopes = y.slopes;
        scale_slopes(program, slopes, scale.factor());
        const bool none = slopes.none();
        Input* const gradients = program.gradients + t.offset[kGradients];
        at = row;
        Input* out = gradients + view.first(index);
        const int stored = now.exists ? view.vectors : 0, visited = larger(stored, next.vectors);
#pragma unroll 4
        for (int v = index; v < visited; v += count, at += blockDim.x, out += count * kLanes) {
          const int lane = !kPlain && v == target_vector ? target_lane : -1;
          if (v < stored) store_gradient(program, out, view.first(v), lane, slopes, none, whole(at));
          next.place(v, at);
        }
        if (now.exists && single >= 0) {
          store_gradient(program, gradients + single, single, !kPlain && in_end ? 0 : -1, slopes, none,
                         Pack<Input, 1>{{end}});
        }
        // By the thread that has just stored something else there.
        if (kPlain && has_target && !none) {
          gradients[t.label] = Narrow<Input>::from(slopes.target);
        }
      }
      turn ^= 1;

      if (walk.group == group) continue;
      if (partials != nullptr) {
        total = unit.total(total);
        if (unit.leads()) partials[group] = total;
      }
      if (!more) return;
      total = 0.0;
    }
  }
};
