// Region losses, kernel 1: the sums of every sample and class.
//
//   partials[(n chunks + j) K + k]     k-th of the K = 3 C + 3 numbers of chunk j of sample n: I, FP, FN of each class,
//                                      number of voxels with invalid labels, sum of voxel losses, and its divisor
//
// Few classes per thread (sum_in_registers): few classes in total, or more classes, whose target or loss differs from
// class to class, that the lanes of a warp share (LaneGroup):
// 1. Blocks loop over chunks. A thread loops over vectors of the chunk and adds to 3 numbers of each of its classes, in
//    the arithmetic type, for at most 64 voxels. On GPUs with enough shared memory, logits and labels may pass through
//    it, one vector ahead (kStaged, sum_staged).
// 2. Threads store their numbers in columns of shared memory, in batches of up to 32. Each lane of a warp adds up a
//    column over the threads of the warp. Lanes exchange nothing here: because of the atomic in report_label, NVRTC
//    puts a YIELD into the loop over voxels, so lanes that have left the loop may run ahead of those that have not.
//    NVRTC 13.0 to 13.2 compiled shuffles after the loop without a convergence check, and numbers were lost.
// 3. Threads add the sums of the warps, which are in shared memory, in the order of the warps.
//
// Many classes with labels, softmax and product overlap, and no voxel loss or only that of the label
// (sum_in_shared_tiles; sum_in_stored_tiles in tiles.cuh):
// 1. The block copies the logits of Program::kTile voxels to shared memory (load_tile). A thread computes the softmax
//    of a voxel. Exponentials overwrite the logits (kKeepsExponentials); the other results are stored beside them.
// 2. Warps loop over classes, and their lanes over the voxels of the tile; each class belongs to one warp. Each lane
//    has its own sums in shared memory. Threads add up the sums of the lanes, in double, after every 64 voxels of a
//    lane.
// More classes than fit on chip (sum_in_tiles): similar, but logits stay in global memory.
//
// Traffic: each logit and label is read once from memory; in sum_in_tiles a second time, from L1 or L2. Order of
// additions: depends on sizes only. Precondition: blockDim.x is kSumThreads.
#pragma once
#include "regions/voxels.cuh"

constexpr int kSumThreads = 256;  // engines/regions/layout.py: THREADS
constexpr int kSumWarps = kSumThreads / kWarp;
constexpr int kTile = 512;

// Converts a number from the arithmetic type to double; returns the sum over a warp, in every lane. region_hvp.cuh has
// overloads for numbers with a tangent. Precondition of the sum: all lanes call it together.
__device__ __forceinline__ double as_double(float x) {
  return x;
}
__device__ __forceinline__ double as_double(double x) {
  return x;
}
__device__ __forceinline__ double warp_total(double x) {
  return warp_sum(x);
}

// Adds up `count` columns of numbers, one number per thread of the block, over the lanes of each warp that have the
// same classes: one sum per column and place in a group of lanes, stored in `of_warp`. Lane l computes sums l, l + 32
// and so on. Words of up to 16 bytes are added in the arithmetic type and their sums in double, because conversions to
// double run at an eighth of the rate of additions. Each lane starts at a different word, so that lanes read different
// banks. Preconditions: `columns` is aligned to 16 bytes, and a barrier follows the writes to it.
template <class Program>
__device__ __forceinline__ void sum_columns(const typename Program::Compute* columns, int count, double* of_warp) {
  using Compute = typename Program::Compute;
  constexpr int kVectors = Program::Lanes::kVectors, kMost = 16 / static_cast<int>(sizeof(Compute));
  constexpr int kVecSize = kVectors < kMost ? kVectors : kMost, kWords = kVectors / kVecSize;
  const int lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (int k = lane; k < count * Program::kLanes; k += kWarp) {
    const int column = k / Program::kLanes, place = k % Program::kLanes;
    const Compute* own = columns + column * kSumThreads + (threadIdx.x - lane) + place * kVectors;
    double sums[kWords];
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      Pack<Compute, kVecSize> word = reinterpret_cast<const Pack<Compute, kVecSize>*>(own)[(j + lane) % kWords];
      sums[j] = static_cast<double>(sum_elements(word.element));
    }
    of_warp[k] = sum_elements(sums);
  }
}

// Number of sums that a warp stores at a time: of 32 numbers for up to four lanes per group, of fewer for more lanes.
template <class Program>
constexpr int kSumsOfWarp = kWarp * (Program::kLanes < 4 ? Program::kLanes : 4);

// Adds up numbers `first` to `first + count` over kWarps warps, and stores them at their places in the numbers of a
// chunk. A warp's kPerWarp sums hold, for each number, one sum per place in a group of lanes. Preconditions: all
// threads call it, after a barrier.
template <int kWarps, int kPerWarp, class Program, class Sums, class Number>
__device__ __forceinline__ void store_numbers(const Program& program, int first, int count, const Number* of_warps,
                                              Number* partials) {
  constexpr int kLanes = Program::kLanes, kOfClasses = 3 * Program::kClasses;
  for (int k = threadIdx.x; k < count * kLanes; k += kSumThreads) {
    const int own = Sums::place(first + k / kLanes), lane_place = k % kLanes;
    // Numbers of whole voxels are added over the lanes of a group as well.
    const bool of_voxels = own >= kOfClasses;
    const int number = own + 3 * (of_voxels ? program.classes() - Program::kClasses : program.first_of(lane_place));
    if (of_voxels ? lane_place > 0 : !program.has(lane_place, own / 3)) continue;
    Number sum(0.0);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const Number* const of_warp = of_warps + w * kPerWarp + k;
      sum += of_warp[0];
      if (kLanes > 1 && of_voxels) {
        for (int place = 1; place < kLanes; ++place) sum += of_warp[place];
      }
    }
    partials[number] = sum;
  }
}

// Sums of a thread: I, FP and FN of each class, and those of whole voxels.
template <class Program, bool kApart = Program::kLabelApart>
struct ThreadSums {
  using Compute = typename Program::Compute;
  static constexpr int kClasses = Program::kClasses;
  static constexpr int kInColumns = 0, kInRegisters = 3 * kClasses + 3;
  Summands<Compute> of_class[kClasses];
  Compute spoilt, cost, count;

  __device__ __forceinline__ explicit ThreadSums(Compute*) {
#pragma unroll
    for (int c = 0; c < kClasses; ++c) of_class[c] = {Compute(0), Compute(0), Compute(0)};
    spoilt = cost = count = Compute(0);
  }
  __device__ __forceinline__ Compute number(int k) const {
    const int c = k / 3, part = k % 3;
    if (c < kClasses) {
      return part == 0 ? of_class[c].hit : (part == 1 ? of_class[c].false_positive : of_class[c].false_negative);
    }
    return part == 0 ? spoilt : (part == 1 ? cost : count);
  }
  // Returns the index of the k-th number of a thread among the numbers of a chunk.
  static __device__ __forceinline__ int place(int k) {
    return k;
  }
};

// With kLabelApart, a voxel adds to I and FN only for its label. These sums are in columns of shared memory, in which
// each thread has its own element: indexing registers with the label would take a comparison per class.
template <class Program>
struct ThreadSums<Program, true> {
  using Compute = typename Program::Compute;
  static constexpr int kClasses = Program::kClasses;
  static constexpr int kInColumns = 2 * kClasses, kInRegisters = kClasses + 3;
  Compute false_positive[kClasses];
  Compute spoilt, cost, count;
  Compute* of_labels;

  __device__ __forceinline__ explicit ThreadSums(Compute* columns) : of_labels(columns + threadIdx.x) {
#pragma unroll
    for (int c = 0; c < kClasses; ++c) {
      false_positive[c] = of_labels[2 * c * kSumThreads] = of_labels[(2 * c + 1) * kSumThreads] = Compute(0);
    }
    spoilt = cost = count = Compute(0);
  }
  __device__ __forceinline__ void add_label(int label, Compute hit, Compute false_negative) {
    of_labels[2 * label * kSumThreads] += hit;
    of_labels[(2 * label + 1) * kSumThreads] += false_negative;
  }
  __device__ __forceinline__ Compute number(int k) const {
    if (k < kClasses) return false_positive[k];
    return k == kClasses ? spoilt : (k == kClasses + 1 ? cost : count);
  }
  static __device__ __forceinline__ int place(int k) {
    if (k < kInColumns) return 3 * (k / 2) + 2 * (k % 2);
    return k - kInColumns < kClasses ? 3 * (k - kInColumns) + 1 : k;
  }
};

// Adds voxel i to the sums of this thread. With kLabelApart, `find_softmax` computes its softmax.
template <class Program, class Classes, class FindSoftmax>
__device__ __forceinline__ void add_voxel(const Program& program, const Classes& classes, const VoxelTarget& target,
                                          int i, const FindSoftmax& find_softmax, ThreadSums<Program>& sums) {
  using Compute = typename Program::Compute;
  VoxelSoftmax<Program> softmax;
  if constexpr (Program::kLabelApart) {
    // A voxel that does not count has logits of 0, and adds zeros.
    find_softmax(softmax, i);
    const Compute factor = target.sound ? softmax.inv_sum : Compute(0);
#pragma unroll
    for (int c = 0; c < Program::kClasses; ++c) {
      sums.false_positive[c] = scalar_fma(softmax.e[c], factor, sums.false_positive[c]);
    }
    sums.add_label(target.label, softmax.label_e * factor, softmax.others * factor);
  } else {
    if (!target.sound) return;
    if constexpr (Program::kNeedsSoftmax) softmax.find(program, classes, i, target.label);
#pragma unroll
    for (int c = 0; c < Program::kClasses; ++c) {
      const Probability<Compute> p = probability(program, classes, softmax, c, i);
      Summands<Compute>& sum = sums.of_class[c];
      if constexpr (Program::kDense) {
        const Summands<Compute> s = summands<Program::kOverlap>(p, classes.target(c, i));
        sum.hit += s.hit;
        sum.false_positive += s.false_positive;
        sum.false_negative += s.false_negative;
      } else {
        const bool is_label = c == target.label;
        const Summands<Compute> in = summands<Program::kOverlap>(p, Compute(1));
        const Summands<Compute> out = summands<Program::kOverlap>(p, Compute(0));
        sum.false_positive += is_label ? in.false_positive : out.false_positive;
        sum.hit += is_label ? in.hit : Compute(0);
        sum.false_negative += is_label ? in.false_negative : Compute(0);
      }
    }
  }
  if constexpr (Program::kVoxel != kNoVoxelLoss) {
    const VoxelCost<Compute> cost = voxel_cost(program, classes, softmax, target, i);
    sums.cost += target.sound ? cost.value : Compute(0);
    sums.count += target.sound ? cost.count : Compute(0);
  }
}

// Determines the targets of a vector whose first voxel has index `first`. Counts and reports invalid labels; with
// kLabelApart, clears the logits of voxels that do not count.
template <class Program, class Classes>
__device__ __forceinline__ void voxel_targets(const Program& program, Classes& classes,
                                              const VectorOffsets<Program::kVecSize, Program::kWide>& offset,
                                              int64 first, VoxelTarget (&targets)[Program::kVecSize],
                                              ThreadSums<Program>& sums) {
  using Compute = typename Program::Compute;
  constexpr int kVecSize = Program::kVecSize;
  bool whole = true;
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    targets[i] = voxel_target(program, classes, offset, i);
    whole = whole && targets[i].sound;
  }
  if constexpr (!Program::kDense) {
    if (!whole) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        if (!targets[i].spoilt || Program::Lanes::place() != 0) continue;
        sums.spoilt += Compute(1);
        report_label(program.status, program.site, first + i, classes.label(i), program.space.classes);
      }
      if constexpr (Program::kLabelApart) classes.keep(PackMask<typename Program::Input, kVecSize>(targets));
    }
  }
}

// Adds this thread's vectors from `first` to `end`, while the next vector is being copied to `places`.
template <class Program>
__device__ __forceinline__ void sum_staged(const Program& program, int64 sample, int64 first, int64 end, void* places,
                                           ThreadSums<Program>& sums) {
  using Compute = typename Program::Compute;
  constexpr int kVecSize = Program::kVecSize;
  int64 vector = first + threadIdx.x;
  if (vector >= end) return;
  VectorOffsets<kVecSize, Program::kWide> offset;
  program.space.offsets(sample, vector * kVecSize, offset);
  StagedVectors<Program, kSumThreads> staged(places, program, offset, kSumThreads);
  const int count = static_cast<int>(end - vector + kSumThreads - 1) / kSumThreads;
  staged.copy(true);
#pragma unroll 1
  for (int turn = 0; turn < count; ++turn) {
    staged.copy(turn + 1 < count);
    ClassesOf<Program> classes;
    classes.t[0] = staged.wait();
    if constexpr (Program::kMasked) program.space.offsets(sample, vector * kVecSize, offset);
    Compute label_logits[kVecSize];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      label_logits[i] = staged.take_label(voxel_target(program, classes, offset, i).label, i);
    }
    staged.take(classes.x);
    VoxelTarget targets[kVecSize];
    voxel_targets(program, classes, offset, sample * program.space.voxels + vector * kVecSize, targets, sums);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const auto find_softmax = [&](VoxelSoftmax<Program>& softmax, int i) {
        softmax.template find_apart<true>(classes, i, targets[i], label_logits[i]);
      };
      add_voxel(program, classes, targets[i], i, find_softmax, sums);
    }
    vector += kSumThreads;
  }
  cp_async_wait_all();
}

// Computes the sums of chunks of `vectors_per_chunk` vectors, with classes in registers. `columns` is shared memory for
// `columns_of_sums` (engines/regions/layout.py) columns, followed, at column `staged_at`, by the memory of
// StagedVectors or PackedStretch.
template <bool kStaged, class Program>
__device__ __forceinline__ void sum_in_registers(const Program& program, int64 chunks, int64 vectors_per_chunk,
                                                 double* partials, typename Program::Compute* columns, int staged_at) {
  using Compute = typename Program::Compute;
  using Sums = ThreadSums<Program>;
  constexpr int kVecSize = Program::kVecSize, kLanes = Program::kLanes, kApart = kSumThreads / kLanes;
  constexpr int kBatch = kSumsOfWarp<Program> / kLanes;
  constexpr int kPerWarp = Sums::kInColumns > kSumsOfWarp<Program> ? Sums::kInColumns : kSumsOfWarp<Program>;
  __shared__ double of_warps[kSumWarps * kPerWarp];
  const int64 vectors = program.space.voxels / kVecSize;
  // Chunk numbers fit in 32 bits, and 32-bit division is faster.
  const unsigned of_sample = static_cast<unsigned>(chunks);
  const unsigned total = of_sample * static_cast<unsigned>(program.space.samples);
#pragma unroll 1
  for (unsigned chunk = blockIdx.x; chunk < total; chunk += gridDim.x) {
    const int64 sample = chunk / of_sample, first = (chunk - sample * of_sample) * vectors_per_chunk;
    Sums sums(columns);
    if constexpr (kStaged) {
      sum_staged(program, sample, first, min(first + vectors_per_chunk, vectors), columns + staged_at * kSumThreads,
                 sums);
    }
#pragma unroll 1
    for (int64 turn = Program::Lanes::vector(); !kStaged && turn < vectors_per_chunk; turn += kApart) {
      const int64 vector = first + turn;
      if (vector >= vectors) break;
      VectorOffsets<Program::kVecSize, Program::kWide> offset;
      program.space.offsets(sample, vector * kVecSize, offset);
      ClassesOf<Program> classes;
      const int64 left = min(vectors_per_chunk - turn, vectors - vector);
      classes.template load<false>(program, offset, WarpOfVectors(columns + staged_at * kSumThreads, left));
      VoxelTarget targets[kVecSize];
      voxel_targets(program, classes, offset, sample * program.space.voxels + vector * kVecSize, targets, sums);
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        const auto find_softmax = [&](VoxelSoftmax<Program>& softmax, int i) {
          if constexpr (Program::kLabelApart) softmax.find_apart(program, classes, offset, i, targets[i]);
        };
        add_voxel(program, classes, targets[i], i, find_softmax, sums);
      }
    }
    double* const of_chunk = partials + chunk * (3 * static_cast<int64>(program.classes()) + 3);
    const auto add_up = [&](int first, int count) {
      __syncthreads();
      sum_columns<Program>(columns, count, of_warps + threadIdx.x / kWarp * kPerWarp);
      __syncthreads();
      store_numbers<kSumWarps, kPerWarp, Program, Sums>(program, first, count, of_warps, of_chunk);
    };
    if constexpr (Sums::kInColumns > 0) add_up(0, Sums::kInColumns);
#pragma unroll
    for (int begin = 0; begin < Sums::kInRegisters; begin += kBatch) {
      const int count = min(Sums::kInRegisters - begin, kBatch);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (k < count) columns[k * kSumThreads + threadIdx.x] = sums.number(begin + k);
      }
      add_up(Sums::kInColumns + begin, count);
    }
  }
}

// Target and softmax of a voxel, as a tile in shared memory keeps them.
template <class Program>
struct TileVoxel {
  using Compute = typename Program::Compute;
  Compute max_logit;
  Compute inv_sum;
  Compute others;
  Compute sum;
  int pivot;
  int label;  // -2 if the voxel does not count

  __device__ __forceinline__ void keep(const VoxelSoftmax<Program>& softmax, const VoxelTarget& target) {
    if constexpr (Program::kNeedsSoftmax) {
      max_logit = softmax.max_logit;
      inv_sum = softmax.inv_sum;
      others = softmax.others;
      sum = softmax.sum;
      pivot = softmax.pivot;
    }
    label = Program::kDense ? 0 : target.label;
  }
  // Returns the summands of this voxel for class c.
  template <class Classes>
  __device__ __forceinline__ Summands<Compute> summands_of(const Program& program, const Classes& classes,
                                                           int c) const {
    VoxelSoftmax<Program> softmax;
    softmax.max_logit = max_logit;
    softmax.inv_sum = inv_sum;
    softmax.others = others;
    softmax.sum = sum;
    softmax.pivot = pivot;
    const VoxelTarget target{label, true, false};
    return summands<Program::kOverlap>(probability(program, classes, softmax, c, 0),
                                       target_of<Program>(classes, target, c, 0));
  }
};

// Stores the numbers of a chunk: the sums of classes from `totals`, and each thread's sums of whole voxels, which warps
// add up into `of_warp`. Preconditions: all threads call it, after a barrier that follows the writes to `totals`.
template <class Total>
__device__ __forceinline__ void store_chunk(const Total* totals, Total spoilt, Total cost, Total count,
                                            Total (*of_warp)[3], int classes, Total* partials) {
  const Total of_voxels[3] = {spoilt, cost, count};
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    const Total sum = warp_total(of_voxels[k]);
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp][k] = sum;
  }
  __syncthreads();
  for (int k = threadIdx.x; k < 3 * classes + 3; k += kSumThreads) {
    Total sum(0.0);
    if (k < 3 * classes) {
      sum = totals[k];
    } else {
      for (int w = 0; w < kSumWarps; ++w) sum += of_warp[w][k - 3 * classes];
    }
    partials[k] = sum;
  }
  __syncthreads();
}

// Computes the sums of chunks of `tiles_per_chunk` tiles of kTile voxels, with logits in global memory. `totals` is
// shared memory for 3 C numbers.
template <class Program, class Classes = ClassesOf<Program>, class Total>
__device__ __forceinline__ void sum_in_tiles(const Program& program, int64 chunks, int64 tiles_per_chunk,
                                             Total* partials, Total* totals) {
  using Compute = typename Program::Compute;
  // Declared as doubles, because numbers with a tangent have constructors.
  __shared__ double tile_memory[kTile * sizeof(TileVoxel<Program>) / sizeof(double)];
  __shared__ double memory_of_warps[kSumWarps * 3 * sizeof(Total) / sizeof(double)];
  TileVoxel<Program>* const tile = reinterpret_cast<TileVoxel<Program>*>(tile_memory);
  Total(*const of_warp)[3] = reinterpret_cast<Total(*)[3]>(memory_of_warps);
  const int classes_count = program.classes(), numbers = 3 * classes_count + 3;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64 voxels = program.space.voxels, total = chunks * program.space.samples;
#pragma unroll 1
  for (int64 chunk = blockIdx.x; chunk < total; chunk += gridDim.x) {
    const int64 sample = chunk / chunks, first = (chunk - sample * chunks) * tiles_per_chunk;
    Total spoilt(0.0), cost(0.0), count(0.0);
#pragma unroll 1
    for (int64 turn = 0; turn < tiles_per_chunk; ++turn) {
      const int64 begin = (first + turn) * kTile;
      __syncthreads();  // the previous tile may still be read
      for (int v = threadIdx.x; v < kTile; v += kSumThreads) {
        TileVoxel<Program> kept;
        kept.label = -2;
        if (begin + v < voxels) {
          VectorOffsets<Program::kVecSize, Program::kWide> offset;
          program.space.offsets(sample, begin + v, offset);
          Classes classes;
          classes.template load<false>(program, offset, WarpOfVectors(nullptr, kWarp));
          const VoxelTarget target = voxel_target(program, classes, offset, 0);
          if constexpr (!Program::kDense) {
            if (target.spoilt) {
              report_label(program.status, program.site, sample * voxels + begin + v, classes.label(0),
                           program.space.classes);
            }
          }
          if (target.spoilt) spoilt += Total(1.0);
          if (target.sound) {
            VoxelSoftmax<Program> softmax;
            if constexpr (Program::kNeedsSoftmax) softmax.find(program, classes, 0, target.label);
            kept.keep(softmax, target);
            if constexpr (Program::kVoxel != kNoVoxelLoss) {
              const VoxelCost<Compute> of_voxel = voxel_cost(program, classes, softmax, target, 0);
              cost += as_double(of_voxel.value);
              count += as_double(of_voxel.count);
            }
          }
        }
        tile[v] = kept;
      }
      __syncthreads();
#pragma unroll 1
      for (int c = warp; c < classes_count; c += kSumWarps) {
        Summands<Compute> sum{Compute(0), Compute(0), Compute(0)};
#pragma unroll 1
        for (int v = lane; v < kTile; v += kWarp) {
          const TileVoxel<Program> kept = tile[v];
          if (kept.label == -2) continue;
          VectorOffsets<Program::kVecSize, Program::kWide> offset;
          program.space.offsets(sample, begin + v, offset);
          Classes classes;
          classes.template load<false>(program, offset, WarpOfVectors(nullptr, kWarp));
          const Summands<Compute> s = kept.summands_of(program, classes, c);
          sum.hit += s.hit;
          sum.false_positive += s.false_positive;
          sum.false_negative += s.false_negative;
        }
        const Total hit = warp_total(as_double(sum.hit));
        const Total positive = warp_total(as_double(sum.false_positive));
        const Total negative = warp_total(as_double(sum.false_negative));
        if (lane == 0) {
          totals[3 * c] = (turn ? totals[3 * c] : Total(0.0)) + hit;
          totals[3 * c + 1] = (turn ? totals[3 * c + 1] : Total(0.0)) + positive;
          totals[3 * c + 2] = (turn ? totals[3 * c + 2] : Total(0.0)) + negative;
        }
      }
    }
    __syncthreads();
    store_chunk(totals, spoilt, cost, count, of_warp, classes_count, partials + chunk * numbers);
  }
}

// A voxel of a tile in shared memory: the reciprocal of its sum of exponentials, and its summands of I and FN.
template <class Compute>
struct LabelledVoxel {
  Compute inv_sum;
  Compute hit;
  Compute false_negative;
  int label;  // -1 if the voxel does not count
};

// Number of voxels that a lane adds in the arithmetic type.
constexpr int kLaneVoxels = 64;

// Variant of sum_in_tiles() that reads logits once, to a tile in shared memory. Each lane has its own sums of each
// class: three columns of kWarp numbers in shared memory. `memory` holds 3 C doubles, these columns, and the tile.
template <class Program>
__device__ __forceinline__ void sum_in_shared_tiles(const Program& program, int64 chunks, int64 tiles_per_chunk,
                                                    double* partials, double* memory) {
  using Compute = typename Program::Compute;
  constexpr int kTileSize = Program::kTile, kEach = kTileSize / kWarp, kPitch = TileClasses<Program>::kPitch;
  constexpr int kWords = 16 / static_cast<int>(sizeof(Compute));
  using Kept = LabelledVoxel<Compute>;
  __shared__ Kept kept_of[kTileSize];
  __shared__ double of_warp[kSumWarps][3];
  const int classes_count = program.classes(), numbers = 3 * classes_count + 3;
  double* const totals = memory;
  Compute* const of_lanes = reinterpret_cast<Compute*>(totals + (3 * classes_count + 1) / 2 * 2);
  Compute* const tile = of_lanes + 3 * classes_count * kWarp;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64 voxels = program.space.voxels, total = chunks * program.space.samples;
#pragma unroll 1
  for (int64 chunk = blockIdx.x; chunk < total; chunk += gridDim.x) {
    const int64 sample = chunk / chunks, first = (chunk - sample * chunks) * tiles_per_chunk;
    double spoilt = 0.0, cost = 0.0, voxel_count = 0.0;
    for (int k = threadIdx.x; k < 3 * classes_count; k += kSumThreads) totals[k] = 0.0;
    for (int k = threadIdx.x; k < 3 * classes_count * kWarp; k += kSumThreads) of_lanes[k] = Compute(0);
    int added = 0;  // number of voxels of a lane
#pragma unroll 1
    for (int64 turn = 0; turn < tiles_per_chunk; ++turn) {
      const int64 begin = (first + turn) * kTileSize;
      if (begin >= voxels) break;
      const int count = static_cast<int>(min(voxels - begin, static_cast<int64>(kTileSize)));
      __syncthreads();  // the previous tile may still be read
      load_tile<kSumThreads>(program, sample, begin, count, tile);
      __syncthreads();
      if (const int v = threadIdx.x; v < kTileSize) {
        Kept kept{};
        kept.label = -1;
        bool sound = false;
        if (v < count) {
          VectorOffsets<Program::kVecSize, Program::kWide> offset;
          program.space.offsets(sample, begin + v, offset);
          const TileClasses<Program> classes(program, tile, v, offset);
          const VoxelTarget target = voxel_target(program, classes, offset, 0);
          if (target.spoilt) {
            report_label(program.status, program.site, sample * voxels + begin + v, classes.label(0),
                         program.space.classes);
            spoilt += 1.0;
          }
          sound = target.sound;
          if (sound) {
            VoxelSoftmax<Program> softmax;
            softmax.find_apart(program, classes, offset, 0, target);
            kept = {softmax.inv_sum, softmax.label_e * softmax.inv_sum, softmax.others * softmax.inv_sum, target.label};
            if constexpr (Program::kVoxel != kNoVoxelLoss) {
              const VoxelCost<Compute> of_voxel = voxel_cost(program, classes, softmax, target, 0);
              cost += static_cast<double>(of_voxel.value);
              voxel_count += static_cast<double>(of_voxel.count);
            }
          }
        }
        if (!sound) {
          for (int c = 0; c < classes_count; ++c) tile[c * kPitch + v] = Compute(0);
        }
        kept_of[v] = kept;
      }
      __syncthreads();
      Kept own[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) own[j] = kept_of[j * kWarp + lane];
#pragma unroll 1
      for (int c = warp; c < classes_count; c += kSumWarps) {
        Summands<Compute> sum{Compute(0), Compute(0), Compute(0)};
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
          sum.false_positive = scalar_fma(tile[c * kPitch + j * kWarp + lane], own[j].inv_sum, sum.false_positive);
          const bool is_label = own[j].label == c;
          sum.hit += is_label ? own[j].hit : Compute(0);
          sum.false_negative += is_label ? own[j].false_negative : Compute(0);
        }
        Compute* const of_class = of_lanes + 3 * c * kWarp + lane;
        of_class[0] += sum.hit;
        of_class[kWarp] += sum.false_positive;
        of_class[2 * kWarp] += sum.false_negative;
      }
      added += kEach;
      if (added < kLaneVoxels && turn + 1 < tiles_per_chunk && begin + kTileSize < voxels) continue;
      added = 0;
      __syncthreads();
      for (int k = threadIdx.x; k < 3 * classes_count; k += kSumThreads) {
        Pack<Compute, kWords>* const column = reinterpret_cast<Pack<Compute, kWords>*>(of_lanes + k * kWarp);
        double sum = 0.0;
#pragma unroll
        for (int j = 0; j < kWarp / kWords; ++j) {
          // Each thread starts at a different word, because all columns begin in the same bank.
          Pack<Compute, kWords>& word = column[(j + threadIdx.x) % (kWarp / kWords)];
          sum += static_cast<double>(sum_elements(word.element));
          word = Pack<Compute, kWords>{};
        }
        totals[k] += sum;
      }
    }
    __syncthreads();
    store_chunk(totals, spoilt, cost, voxel_count, of_warp, classes_count, partials + chunk * numbers);
  }
}
