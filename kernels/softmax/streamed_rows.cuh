// The value of rows whose gradients are not asked for. Nothing is kept of a row, so that its parts can be taken one
// after another by fewer threads than share it where it stays on chip (resident_rows.cuh): a part is what a warp takes
// there, and goes through registers here. Many parts of many rows are on their way at once, and no phase waits for
// another.
//
// A part has the same bits here and there, and parts are put together in the same order, so the value has, too.
#pragma once
#include "softmax/resident_rows.cuh"

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

// Threads of a block that stand for more, as many as share a row where it stays on chip.
struct StandingUnit : BlocksUnit<1> {
  int shared_by;
};

template <int kLanes>
struct StreamedReader {
  // Vectors of a thread, at most.
  static constexpr int kVectors = 8;
  // Warps that share a row, at most.
  static constexpr int kParts = 256;

  // Asks for what of a row goes to registers early. The rest is not brought nearer: whole rows of all blocks are more
  // than the second-level cache holds.
  template <class Program>
  static __device__ __forceinline__ void fetch(const Program& program, RowAhead<Program>& ahead) {
    using Input = typename Program::Input;
    if (!ahead.target.counts) return;
    const int64 offset = ahead.target.offset[kLogits];
    const RowView<Input, kLanes, int> view(program.input, offset, static_cast<int>(program.space.classes));
    const Input* input = program.input + offset;
    ahead.logit = input[ahead.target.label];
    const int single = view.end(threadIdx.x);
    if (single >= 0) ahead.end = input[single];
  }

  // Every count-th vector of a row from `index` on, and one class of its ends.
  template <class Program, class Compute = typename Program::Compute>
  static __device__ __forceinline__ RowPart<Compute> part(const Program& program, const RowAhead<Program>& row,
                                                          Compute z, int index, int count) {
    using Input = typename Program::Input;
    using P = Pack<Input, kLanes>;
    // As in resident_rows.cuh.
    constexpr bool kPlain = !Program::kSmoothed && !Program::kCapped;
    const Input lowest = Narrow<Input>::from(-scalar_infinity(0.0f));
    const RowTarget<Compute>& t = row.target;
    const RowView<Input, kLanes, int> view(program.input, t.offset[kLogits], static_cast<int>(program.space.classes));
    const P* const from = reinterpret_cast<const P*>(program.input + t.offset[kLogits] + view.head) + index;
    const int vectors = t.counts ? view.vectors - index : 0, single = view.end(index);
    const bool has_end = t.counts && single >= 0, in_end = has_end && single == t.label;
    const int behind = static_cast<int>(t.label) - view.head - index * kLanes;

    P x[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (k * count < vectors) x[k] = load_stream<kLanes>(reinterpret_cast<const Input*>(from + k * count));
    }
    Largest<Compute, Input, kLanes> found;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (k * count < vectors) found.add(x[k]);
    }
    const Compute raw = has_end ? larger(found.get(), widen<Compute>(row.end)) : found.get();
    RowPart<Compute> part{program.logit.value(join_lanes(raw, kWarp, Larger{})), {0, 0, 0}};
    const Compute relative_to = reference(part.largest);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (k * count >= vectors) continue;
      P y = kept_pack(x[k]);
      // The class of this vector that is the target, if it is none behind or in front of it.
      const int lane = behind - k * count * kLanes;
      const bool has_target = lane >= 0 && lane < kLanes;
      if (kPlain && has_target) {
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          if (i == lane) y.lane[i] = lowest;
        }
      }
      add_classes(program, view.first(index + k * count), !kPlain && has_target ? lane : -1, z, relative_to, y,
                  part.sums);
    }
    if (has_end) {
      const Input end = kPlain && in_end ? lowest : row.end;
      add_classes(program, single, !kPlain && in_end ? 0 : -1, z, relative_to, Pack<Input, 1>{{end}}, part.sums);
    }
    join_sums<Program::kSmoothed>(part.sums, kWarp);
    return part;
  }

  // As LongReader's.
  template <bool kGradient, class Unit, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Unit& unit, Scale& scale, int64 groups,
                                               const Workspace& work) {
    static_assert(!kGradient, "nothing is kept for gradients");
    using Compute = typename Program::Compute;
    RowWalk<Unit> walk(unit);
    if (walk.group >= groups) return;
    GroupQueue<Unit> queue(unit, work.drawn);
    // A part is what a warp takes of a row that stays on chip.
    const int count = unit.shared_by, parts = count / kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    RowAhead<Program> ahead = look(program, walk.first, ask(program, walk.first));
    RowWalk<Unit> later = walk;
    later.advance(unit, queue, groups, program.space.rows, 0);
    typename Program::Note asked = ask(program, later.first);
    fetch(program, ahead);
    double total = 0.0;
    Turn turn{0, 0};
#pragma unroll 1
    for (;;) {
      const RowAhead<Program> now = ahead;
      const int group = walk.group;
      walk = later;
      const bool more = walk.group < groups;
      if (more) {
        later.advance(unit, queue, groups, program.space.rows, turn.joins);
        ahead = look(program, walk.first, asked);
        asked = ask(program, later.first);
        fetch(program, ahead);
      }
      const Compute z = now.target.counts ? program.logit.value(widen<Compute>(now.logit)) : Compute(0);
      __shared__ RowPart<Compute> all[2][kParts];
#pragma unroll 1
      for (int i = warp; i < parts; i += warps) {
        const auto mine = part(program, now, z, i * kWarp + threadIdx.x % kWarp, count);
        if (threadIdx.x % kWarp == 0) all[turn.joins & 1][i] = mine;
      }
      turn.drawn = queue.drawn;
      unit.tell(turn);
      __syncthreads();
      // The first warp puts the row together, while others turn to the next one.
      if (warp == 0) {
        const auto found = join_shared<Program::kSmoothed, kParts>(all[turn.joins & 1], parts);
        total += program.finish(now.target, z, found.largest, found.sums, now.exists && threadIdx.x == 0).value;
      }
      ++turn.joins;

      if (walk.group == group) continue;
      close_group(unit, scale, group, total, work.partials, turn);
      if (!more) return;
      total = 0.0;
    }
  }
};
