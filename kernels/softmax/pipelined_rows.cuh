// Pipelined rows: the value of rows without gradients, through registers. While a row is computed, the loads of the
// next one are in flight.
//
//   value as in softmax.cuh; the bits are those of resident_rows.cuh
//
// 1. A chunk contains the same rows as in resident_rows.cuh. A row is shared by kLanes lanes of a warp, which processes
//    32 / kLanes rows at once. A longer row is cut into kParts parts, one for each warp of a block.
// 2. Each lane owns at most one row of a chunk. It loads that row's label and mask one chunk ahead. Step 3 skips rows
//    without a loss.
// 3. The warp copies its vectors out of the registers in which they arrive, and starts the loads of the next rows,
//    which may belong to the next chunk. It finds the maximum and the sum of exponentials of each row; the lane that
//    owns the row keeps them.
// 4. At the end of a chunk each lane evaluates the row that it owns. The values are added in the order of
//    resident_rows.cuh.
//
// So memory stays busy while a row is computed, the threads of a block synchronize once per chunk or never, and the
// rows of a chunk share the fixed cost of a row.
//
// Traffic: each logit is read once. Preconditions: class stride 1; rows consist of aligned vectors of 16 bytes, at most
// kVectors per lane; neither smoothing nor a cap; no gradients.
#pragma once
#include "softmax/rows.cuh"

// PipelinedWarp: the worker is a warp, which processes alone what a block processes in resident_rows.cuh.
// PipelinedBlock: the warps of a block share a row. `turns`: number of rows of a chunk that the same lanes process one
// after another, at most kLanes.
struct PipelinedWarp : SubwarpGroup {
  int turns;
};
struct PipelinedBlock : ClusterGroup<1> {
  int turns;
};

// Combines the sums of all parts of a row, with the bits of combine_warp_partials. Precondition: kParts is a power of
// two.
template <int kParts, class Sums>
__device__ __forceinline__ Sums combine_row_parts(const Sums* parts, int stride) {
  Sums sums[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) sums[i] = parts[i * stride];
  auto max_logit = sums[0].softmax.max_logit;
#pragma unroll
  for (int i = 1; i < kParts; ++i) max_logit = max_ignoring_nan(max_logit, sums[i].softmax.max_logit);
#pragma unroll
  for (int i = 0; i < kParts; ++i) rescale(sums[i].softmax, max_logit);
#pragma unroll
  for (int span = kParts / 2; span > 0; span /= 2) {
#pragma unroll
    for (int i = 0; i < span; ++i) sums[i].softmax.exp_sum += sums[i + span].softmax.exp_sum;
  }
  return sums[0];
}

// Shared memory through which the warps of a block exchange their results at the end of a chunk: for each row the sums
// of its parts and the label's logit; and the chunk that the leader claimed. Double-buffered, so one barrier is enough.
template <int kParts, class Sums, class Compute>
struct ChunkExchange {
  // An array of words, because Sums may have constructors.
  unsigned long long words[2][(kParts * kWarp * sizeof(Sums) + 7) / 8];
  Compute targets[2][kWarp];
  unsigned claims[2];

  __device__ __forceinline__ Sums* sums(unsigned buffer) {
    return reinterpret_cast<Sums*>(words[buffer]);
  }
};

// State of a warp that processes the chunks of its worker. kWarps: warps of a block in resident_rows.cuh, whose rows
// this warp processes one after another; 1 if warps share a row.
template <int kVecSize, int kVectors, int kLanes, int kParts, int kWarps, class Group, class Program>
struct PipelinedWorker {
  using Compute = typename Program::Compute;
  using Input = typename Program::Input;
  using P = Pack<Input, kVecSize>;
  using Sums = RowSums<Compute, false>;
  using Label = typename Program::LabelLoad;
  using Exchange = ChunkExchange<kParts, Sums, Compute>;
  static_assert(!Program::kSmoothed && !Program::kCapped, "neither smoothing nor a cap");
  static_assert(kLanes == kWarp || kParts == 1, "a warp shares a row with others, or takes several");
  static constexpr int kThreads = kLanes * kParts;  // that share a row
  // Number of rows that a warp processes at once, and the bit mask of the first lane of each.
  static constexpr int kTogether = kWarp / kLanes;
  static constexpr unsigned kFirstLanes = static_cast<unsigned>(0xffffffffull / ((1ull << kLanes) - 1));

  const Program& program;
  const Group& group;
  const int64 chunks;
  const Workspace& work;
  const int lane;
  const int slot;     // of these lanes' row among those that the warp processes at once
  const int index;    // of the lane among those that share a row; also the turn of the row that it owns
  const int first;    // this thread's first vector
  const int vectors;  // of a row

  int chunk;
  int next;          // the chunk after it
  unsigned claimed;  // claim of the chunk after that; valid in the leader
  int label;         // class of the lane's row; -1 without a loss
  Label next_label;  // of the lane's row in the next chunk
  unsigned active;   // bit mask of lanes whose rows have a loss
  unsigned missing;  // bit mask of lanes whose rows are still to be loaded, in this chunk or in the next one
  bool is_ahead;     // true if `missing` refers to the next chunk
  unsigned buffer;

  // Loaded ahead: this lane's vectors of the next row, and the label's logit if this part contains it, otherwise -inf.
  P ahead[kVectors];
  Input ahead_logit;

  // Of the row that this lane owns.
  Sums own_sums;
  Compute own_target;
  bool has_target;

  __device__ __forceinline__ PipelinedWorker(const Program& program, const Group& group, int64 chunks,
                                             const Workspace& work)
      : program(program),
        group(group),
        chunks(chunks),
        work(work),
        lane(threadIdx.x % kWarp),
        slot(lane / kLanes),
        index(lane % kLanes),
        first(kParts > 1 ? threadIdx.x : index),
        vectors(static_cast<int>(program.space.classes) / kVecSize),
        chunk(static_cast<int>(group.worker())),
        next(chunk + static_cast<int>(group.workers())),
        is_ahead(false),
        buffer(0) {
    claim();
    label = class_of(chunk, load_label(chunk));
    next_label = load_label(next);
    active = __ballot_sync(0xffffffffu, label >= 0);
    missing = active;
  }

  // Row that these lanes process in a turn of a chunk.
  __device__ __forceinline__ int64 row_of(int of_chunk, int turn) const {
    return ((turn / kWarps * chunks + of_chunk) * kWarps + turn % kWarps) * kTogether + slot;
  }
  // True if this lane owns a row of a chunk.
  __device__ __forceinline__ bool has_row(int of_chunk) const {
    return index < group.turns && of_chunk < chunks && row_of(of_chunk, index) < program.space.rows;
  }
  // Starts the loads of the label of the row that this lane owns. A lane without one loads that of row 0, which nothing
  // uses.
  __device__ __forceinline__ Label load_label(int of_chunk) const {
    int64 offset[kRowStreams];
    program.space.offsets(has_row(of_chunk) ? row_of(of_chunk, index) : 0, offset);
    return program.load_label(offset);
  }
  // Returns the class of this lane's row, given its label, or a negative number without a row or without a loss.
  __device__ __forceinline__ int class_of(int of_chunk, const Label& loaded) const {
    return has_row(of_chunk) ? program.template active_class<int>(loaded) : -1;
  }
  // Claims the chunk after the next one, if there is a counter.
  __device__ __forceinline__ void claim() {
    claimed = 0;
    if (work.claim_counter != nullptr && group.is_leader()) claimed = claim_next(work.claim_counter);
  }
  // Returns the first turn whose rows are owned by any of `lanes`, a bit mask. Precondition: it is not 0.
  static __device__ __forceinline__ int first_turn(unsigned lanes) {
#pragma unroll
    for (int shift = kWarp / 2; shift >= kLanes; shift /= 2) lanes |= lanes >> shift;
    return __ffs(static_cast<int>(lanes)) - 1;
  }

  // True if this warp's part contains the label: of every kThreads vectors of a row, each part has kWarp.
  __device__ __forceinline__ bool is_here(int label_of_row) const {
    return label_of_row >= 0 && (kParts == 1 || label_of_row / kVecSize % kThreads / kWarp == first / kWarp);
  }

  // Starts the loads of the next turn's rows, if there are any.
  __device__ __forceinline__ void load_ahead() {
    if (missing == 0) {
      if (is_ahead || next >= chunks) return;
      is_ahead = true;
      missing = __ballot_sync(0xffffffffu, class_of(next, next_label) >= 0);
      if (missing == 0) return;
    }
    const int turn = first_turn(missing);
    missing &= ~(kFirstLanes << turn);
    const int of_lane = is_ahead ? class_of(next, next_label) : label;
    const int label_of_row = __shfl_sync(0xffffffffu, of_lane, slot * kLanes + turn);
    const bool exists = kTogether == 1 || label_of_row >= 0;
    int64 offset[kRowStreams];
    program.space.offsets(exists ? row_of(is_ahead ? next : chunk, turn) : 0, offset);
    const Input* const row = program.input + offset[kLogits];
    const Input lowest = Narrow<Input>::from(-scalar_infinity(0.0f));
    ahead_logit = is_here(label_of_row) ? row[label_of_row] : lowest;
    const P nothing = pack_of_words<P>(lowest);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int v = k * kThreads + first;
      ahead[k] = exists && v < vectors ? load_stream<kVecSize>(row + v * kVecSize) : nothing;
    }
  }

  // Finds the sums of the rows of a turn, and starts the loads of the next rows.
  __device__ __forceinline__ void visit(int turn) {
    const Input lowest = Narrow<Input>::from(-scalar_infinity(0.0f));
    const int label_of_row = __shfl_sync(0xffffffffu, label, slot * kLanes + turn);
    const bool here = is_here(label_of_row);
    const int target = here ? label_of_row - first * kVecSize : -1;
    const Compute of_label = widen<Compute>(ahead_logit), z = program.logit.value(of_label);
    P x[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      x[k] = ahead[k];
      // The label's logit becomes -inf, whose exponential is 0.
      const int element = target - k * kThreads * kVecSize;
      if (element >= 0 && element < kVecSize) {
#pragma unroll
        for (int j = 0; j < kVecSize; ++j) {
          if (j == element) x[k].element[j] = lowest;
        }
      }
    }
    load_ahead();

    RunningMax<Compute, Input, kVecSize> running;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) running.add(x[k]);
    const Compute raw = max_ignoring_nan(running.get(), of_label);
    Sums sums{{program.logit.value(subwarp_reduce(raw, kLanes, MaxOp{})), Compute(0)}, Compute(0), Compute(0)};
    const Compute shift = exp_shift(sums.softmax.max_logit);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) add_classes(program, 0, -1, z, shift, x[k], sums);
    subwarp_add(sums, kLanes);
    if (index == turn) {
      own_sums = sums;
      own_target = z;
      has_target = here;
    }
  }

  // Evaluates the row that this lane owns. Returns its value, or 0 without a row.
  __device__ __forceinline__ Compute evaluate(Exchange& shared) {
    if (!has_row(chunk)) return Compute(0);
    RowTarget<Compute> t;
    program.space.offsets(row_of(chunk, index), t.offset);
    program.read_label(t);
    if (kParts > 1 && t.active) {
      own_sums = combine_row_parts<kParts>(shared.sums(buffer) + lane, kWarp);
      own_target = shared.targets[buffer][lane];
    }
    return program.finish(t, own_target, own_sums, true).value;
  }

  // Evaluates the rows of the chunk, and stores the sum of their values. They are added in the order of
  // resident_rows.cuh: the rows of each of its warps one after another, then the sums of its warps as in worker_sum().
  __device__ __forceinline__ void finish(Exchange& shared) {
    if constexpr (kParts > 1) {
      shared.sums(buffer)[threadIdx.x] = own_sums;
      if (has_target) shared.targets[buffer][lane] = own_target;
      if (threadIdx.x == 0) shared.claims[buffer] = claimed;
      __syncthreads();
      if (threadIdx.x >= kWarp) return;
    }
    const Compute value = evaluate(shared);
    if (work.partials == nullptr) return;
    double total = 0.0;
#pragma unroll 1
    for (int turn = 0; turn < group.turns; turn += kWarps) {
      total += static_cast<double>(__shfl_sync(0xffffffffu, value, slot * kLanes + (turn + index) % kLanes));
    }
    total = warp_sum(index < kWarps ? total : 0.0);
    if (lane == 0) work.partials[chunk] = total;
  }

  // Moves on to the next chunk. Precondition: it exists.
  __device__ __forceinline__ void advance(Exchange& shared) {
    const int workers = static_cast<int>(group.workers());
    chunk = next;
    if (work.claim_counter == nullptr) {
      next = chunk + workers;
    } else {
      const unsigned drawn = kParts == 1 ? __shfl_sync(0xffffffffu, claimed, 0) : shared.claims[buffer];
      next = 2 * workers + static_cast<int>(drawn);
      claim();
    }
    buffer ^= 1;
    label = class_of(chunk, next_label);
    next_label = load_label(next);
    active = __ballot_sync(0xffffffffu, label >= 0);
    if (!is_ahead) missing = active;
    is_ahead = false;
  }

  // Processes all chunks of the worker. Precondition: the first one exists.
  __device__ __forceinline__ void run(Exchange& shared) {
#pragma unroll 1
    for (;;) {
      // Otherwise the loads of the first rows are in flight.
      if (missing == active && active != 0) load_ahead();
      own_sums = Sums::empty();
      own_target = Compute(0);
      has_target = false;
#pragma unroll 1
      for (unsigned left = active; left != 0;) {
        const int turn = first_turn(left);
        left &= ~(kFirstLanes << turn);
        visit(turn);
      }
      finish(shared);
      if (next >= chunks) return;
      advance(shared);
    }
  }
};

template <int kVecSize, int kVectors, int kLanes, int kParts, int kWarps>
struct PipelinedReader {
  // Visits every row once, as TwoPassReader::sweep.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale&, int64 chunks,
                                               const Workspace& work) {
    static_assert(!kGradient, "nothing is kept for gradients");
    using Worker = PipelinedWorker<kVecSize, kVectors, kLanes, kParts, kWarps, Group, Program>;
    using Exchange = typename Worker::Exchange;
    if (group.worker() >= chunks) return;
    __shared__ unsigned long long words[kParts > 1 ? (sizeof(Exchange) + 7) / 8 : 1];
    Worker worker(program, group, chunks, work);
    worker.run(reinterpret_cast<Exchange&>(words));
  }
};
