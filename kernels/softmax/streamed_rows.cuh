// The value of rows whose gradients are not next_label for. Nothing is kept of a row, so that its partials can be taken
// one after another by fewer threads than share it where it stays on chip (resident_rows.cuh): a part is what a warp
// takes there, and goes through registers here. Many partials of many rows are on their way at once, and no phase waits
// for another.
//
// A part has the same bits here and there, and partials are put together in the same order, so the value has, too.
#pragma once
#include "softmax/resident_rows.cuh"

// A row ahead of its turn.
template <class Program>
struct PrefetchedRow {
  bool exists;
  RowTarget<typename Program::Compute> target;
  typename Program::Input logit;  // the target's
  typename Program::Input edge;   // what this thread takes of the row's ends
};

// What memory says of a row's label, which is on its way for a row's time; of no row, what it says of the first.
template <class Program>
__device__ __forceinline__ typename Program::LabelLoad load_label_of(const Program& program, int64 row) {
  int64 offset[kRowStreams];
  program.space.offsets(row < program.space.rows ? row : 0, offset);
  return program.load_label(offset);
}

template <class Program>
__device__ __forceinline__ PrefetchedRow<Program> prefetched_row(const Program& program, int64 row,
                                                                 const typename Program::LabelLoad& load) {
  PrefetchedRow<Program> ahead;
  ahead.exists = row < program.space.rows;
  program.space.offsets(ahead.exists ? row : 0, ahead.target.offset);
  program.validate_label(ahead.target, load);
  ahead.target.active &= ahead.exists;
  ahead.target.invalid_label &= ahead.exists;
  return ahead;
}

// Threads of a block that stand for more, as many as share a row where it stays on chip.
struct StreamingBlock : ClusterGroup<1> {
  int resident_threads;
};

template <int kVecSize>
struct StreamedReader {
  // Vectors of a thread, at most.
  static constexpr int kVectors = 8;
  // Warps that share a row, at most.
  static constexpr int kMaxPartials = 256;

  // Asks for what of a row goes to registers early. The rest is not brought nearer: whole rows of all blocks are more
  // than the second-level cache holds.
  template <class Program>
  static __device__ __forceinline__ void prefetch_operands(const Program& program, PrefetchedRow<Program>& ahead) {
    using Input = typename Program::Input;
    if (!ahead.target.active) return;
    const int64 offset = ahead.target.offset[kLogits];
    const RowVectors<Input, kVecSize, int> view(program.input, offset, static_cast<int>(program.space.classes));
    const Input* input = program.input + offset;
    ahead.logit = input[ahead.target.label];
    const int edge = view.edge_class(threadIdx.x);
    if (edge >= 0) ahead.edge = input[edge];
  }

  // Every count-th vector of a row from `index` on, and one class of its ends.
  template <class Program, class Compute = typename Program::Compute>
  static __device__ __forceinline__ RowSums<Compute, Program::kSmoothed> read_partial(const Program& program,
                                                                                      const PrefetchedRow<Program>& row,
                                                                                      Compute z, int index, int count) {
    using Input = typename Program::Input;
    using P = Pack<Input, kVecSize>;
    // As in resident_rows.cuh.
    constexpr bool kMasksTarget = !Program::kSmoothed && !Program::kCapped;
    const Input lowest = Narrow<Input>::from(-scalar_infinity(0.0f));
    const RowTarget<Compute>& t = row.target;
    const RowVectors<Input, kVecSize, int> view(program.input, t.offset[kLogits],
                                                static_cast<int>(program.space.classes));
    const P* const from = reinterpret_cast<const P*>(program.input + t.offset[kLogits] + view.head) + index;
    const int vectors = t.active ? view.vectors - index : 0, edge = view.edge_class(index);
    const bool has_edge = t.active && edge >= 0, target_in_edge = has_edge && edge == t.label;
    const int target_offset = static_cast<int>(t.label) - view.head - index * kVecSize;

    P x[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (k * count < vectors) x[k] = load_stream<kVecSize>(reinterpret_cast<const Input*>(from + k * count));
    }
    RunningMax<Compute, Input, kVecSize> running;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (k * count < vectors) running.add(x[k]);
    }
    const Compute raw = has_edge ? max_ignoring_nan(running.get(), widen<Compute>(row.edge)) : running.get();
    RowSums<Compute, Program::kSmoothed> sums{
        {program.logit.value(subwarp_reduce(raw, kWarp, MaxOp{})), Compute(0)}, Compute(0), Compute(0)};
    const Compute shift = exp_shift(sums.softmax.max_logit);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (k * count >= vectors) continue;
      P y = opaque_pack(x[k]);
      // The class of this vector that is the target, if it is none behind or in front of it.
      const int lane = target_offset - k * count * kVecSize;
      const bool has_target = lane >= 0 && lane < kVecSize;
      if (kMasksTarget && has_target) {
#pragma unroll
        for (int i = 0; i < kVecSize; ++i) {
          if (i == lane) y.element[i] = lowest;
        }
      }
      add_classes(program, view.first(index + k * count), !kMasksTarget && has_target ? lane : -1, z, shift, y, sums);
    }
    if (has_edge) {
      const Input edge_logit = kMasksTarget && target_in_edge ? lowest : row.edge;
      add_classes(program, edge, !kMasksTarget && target_in_edge ? 0 : -1, z, shift, Pack<Input, 1>{{edge_logit}},
                  sums);
    }
    subwarp_add(sums, kWarp);
    return sums;
  }

  // As TwoPassReader's.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    static_assert(!kGradient, "nothing is kept for gradients");
    using Compute = typename Program::Compute;
    RowIterator<Group> current(group);
    if (current.chunk >= chunks) return;
    WorkQueue<Group> queue(group, work.claim_counter);
    // A part is what a warp takes of a row that stays on chip.
    const int count = group.resident_threads, partials = count / kWarp, warp = threadIdx.x / kWarp,
              warps = blockDim.x / kWarp;
    PrefetchedRow<Program> ahead = prefetched_row(program, current.first, load_label_of(program, current.first));
    RowIterator<Group> later = current;
    later.advance(group, queue, chunks, program.space.rows, 0);
    typename Program::LabelLoad next_label = load_label_of(program, later.first);
    prefetch_operands(program, ahead);
    double total = 0.0;
    SyncState sync{0, 0};
#pragma unroll 1
    for (;;) {
      const PrefetchedRow<Program> now = ahead;
      const int chunk = current.chunk;
      current = later;
      const bool more = current.chunk < chunks;
      if (more) {
        later.advance(group, queue, chunks, program.space.rows, sync.syncs);
        ahead = prefetched_row(program, current.first, next_label);
        next_label = load_label_of(program, later.first);
        prefetch_operands(program, ahead);
      }
      const Compute z = now.target.active ? program.logit.value(widen<Compute>(now.logit)) : Compute(0);
      __shared__ RowSums<Compute, Program::kSmoothed> all[2][kMaxPartials];
#pragma unroll 1
      for (int i = warp; i < partials; i += warps) {
        const auto mine = read_partial(program, now, z, i * kWarp + threadIdx.x % kWarp, count);
        if (threadIdx.x % kWarp == 0) all[sync.syncs & 1][i] = mine;
      }
      sync.claimed = queue.claimed;
      group.publish_claim(sync);
      __syncthreads();
      // The first warp puts the row together, while others turn to the next one.
      if (warp == 0) {
        const auto found = combine_warp_partials<kMaxPartials>(all[sync.syncs & 1], partials);
        total += program.finish(now.target, z, found, now.exists && threadIdx.x == 0).value;
      }
      ++sync.syncs;

      if (current.chunk == chunk) continue;
      finish_chunk(group, scale, chunk, total, work.partials, sync);
      if (!more) return;
      total = 0.0;
    }
  }
};
