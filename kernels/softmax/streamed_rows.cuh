// Streamed rows: the value of long rows without gradients, through registers.
//
//   value as in softmax.cuh, with the bits of resident_rows.cuh
//
// 1. A row is cut into the parts that the warps of resident_rows.cuh would process. A block has fewer warps, and each
//    warp processes several parts, one after another.
// 2. A warp loads up to kVectors vectors per thread, computes their maximum and sum of exponentials, and stores the
//    part's sums in shared memory.
// 3. After a barrier the first warp combines the parts, in the same order as resident rows do, and evaluates the loss.
//    Meanwhile the other warps go on to the next row.
// 4. Labels are loaded two rows ahead; the target's logit and edge elements one row ahead.
//
// A block owns a row, a warp a part of it. No logit is kept, so loads of many parts of many rows are in flight at once,
// and no phase waits for another.
//
// Traffic: each logit is read once. Preconditions: class stride 1; a row has at most kMaxPartials parts of kVectors
// vectors per thread; no gradients.
#pragma once
#include "softmax/resident_rows.cuh"

// The next row: its label and, once loaded, the target's logit and this thread's edge element.
template <class Program>
struct PrefetchedRow {
  bool exists;
  RowTarget<typename Program::Compute> target;
  typename Program::Input logit;  // the target's logit
  typename Program::Input edge;   // this thread's edge element
};

// Starts loading the label of a row. Past the last row it loads that of row 0, which nothing uses.
template <class Program>
__device__ __forceinline__ typename Program::LabelLoad load_label_of(const Program& program, int64 row) {
  int64 offset[kRowStreams];
  program.space.offsets(row < program.space.rows ? row : 0, offset);
  return program.load_label(offset);
}

// Locates a row and validates its label, which load_label_of() has loaded.
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

// A block that processes rows which `resident_threads` threads would share in resident_rows.cuh.
struct StreamingBlock : ClusterGroup<1> {
  int resident_threads;
};

// kVectors: maximum number of vectors of a part that a thread loads.
template <int kVecSize, int kVectors>
struct StreamedReader {
  // Maximum number of parts of a row.
  static constexpr int kMaxPartials = 256;

  // Starts loading the target's logit and the edge element. The rest of the row is not prefetched, because whole rows
  // of all blocks exceed L2.
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

  // Returns the sums of one part. The calling thread reads every count-th vector of the row from `index` on, and at
  // most one edge class; z is the target's logit. Precondition: all lanes of the warp call it together.
  template <class Program, class Compute = typename Program::Compute>
  static __device__ __forceinline__ RowSums<Compute, Program::kSmoothed> read_partial(const Program& program,
                                                                                      const PrefetchedRow<Program>& row,
                                                                                      Compute z, int index, int count) {
    using Input = typename Program::Input;
    using P = Pack<Input, kVecSize>;
    // As in resident_rows.cuh, the target's logit is replaced by -inf.
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
      // Position of the target relative to this vector; outside of [0, kVecSize) if it is elsewhere.
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

  // As TwoPassReader::sweep, without gradients.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    static_assert(!kGradient, "nothing is kept for gradients");
    using Compute = typename Program::Compute;
    RowIterator<Group> current(group);
    if (current.chunk >= chunks) return;
    WorkQueue<Group> queue(group, work.claim_counter);
    // A part is what one warp processes of a resident row.
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
        const auto part = read_partial(program, now, z, i * kWarp + threadIdx.x % kWarp, count);
        if (threadIdx.x % kWarp == 0) all[sync.syncs & 1][i] = part;
      }
      sync.claimed = queue.claimed;
      group.publish_claim(sync);
      __syncthreads();
      // The first warp combines the parts while the others go on to the next row.
      if (warp == 0) {
        const auto row_sums = combine_warp_partials<kMaxPartials>(all[sync.syncs & 1], partials);
        total += program.finish(now.target, z, row_sums, now.exists && threadIdx.x == 0).value;
      }
      ++sync.syncs;

      if (current.chunk == chunk) continue;
      finish_chunk(group, scale, chunk, total, work.partials, sync);
      if (!more) return;
      total = 0.0;
    }
  }
};
