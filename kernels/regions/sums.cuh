// Region losses, kernel 1: the sums of every sample and class.
//
//   partials[(n chunks + j) K + k]     K = 3 C + 3: I, FP, FN of each class, voxels with bad labels, loss of voxels,
//   and
//                                      its divisor; over the voxels of chunk j of sample n
//
// Few classes (sum_in_registers):
// 1. A block takes chunks in turn; a thread takes vectors of the chunk in turn, and adds to 3 C numbers in registers:
// at
//    most 64 voxels in the arithmetic type.
// 2. The 32 lanes of a warp add theirs by recursive halving: at each step a lane keeps one half of the numbers and
// sends
//    the other, so that K numbers take K exchanges in place of 5 K. From the first step on they are doubles.
// 3. Warps add up through shared memory, in order.
//
// Many classes (sum_in_tiles): a thread cannot hold them.
// 1. A block takes a tile of kTile voxels; a thread finds the softmax of its voxels, and leaves it in shared memory.
// 2. Warps take classes in turn, lanes the voxels of the tile; each class's sums belong to one warp.
//
// Traffic: each logit and label once from memory; with many classes once more from L1 or L2.
// Order of additions: by sizes alone. Preconditions: blockDim.x is kSumThreads.
#pragma once
#include "regions/voxels.cuh"

constexpr int kSumThreads = 256;  // engines/regions/layout.py
constexpr int kSumWarps = kSumThreads / kWarp;
constexpr int kTile = 512;

__device__ __forceinline__ constexpr int next_power_of_two(int n) {
  int power = 1;
  while (power < n) power *= 2;
  return power;
}

// Sums of x[k] over the lanes of a warp, for kCount numbers, a power of two: lane l then holds those from
// halved_index(l) on, kCount / 32 of them or one. Precondition: all 32 lanes call it together.
template <int kCount, int kOffset>
__device__ __forceinline__ void halve(double (&x)[kCount]) {
  if constexpr (kOffset > 0) {
    if constexpr (kCount > 1) {
      const bool upper = threadIdx.x & kOffset;
      double kept[kCount / 2];
#pragma unroll
      for (int k = 0; k < kCount / 2; ++k) {
        const double sent = upper ? x[k] : x[k + kCount / 2];
        kept[k] = (upper ? x[k + kCount / 2] : x[k]) + __shfl_xor_sync(0xffffffffu, sent, kOffset);
      }
      halve<kCount / 2, kOffset / 2>(kept);
#pragma unroll
      for (int k = 0; k < kCount / 2; ++k) x[k] = kept[k];
    } else {
      x[0] += __shfl_xor_sync(0xffffffffu, x[0], kOffset);
      halve<1, kOffset / 2>(x);
    }
  }
}

template <int kCount>
__device__ __forceinline__ int halved_index(int lane) {
  int index = 0;
#pragma unroll
  for (int offset = 16, size = kCount; offset > 0 && size > 1; offset /= 2, size /= 2) {
    if (lane & offset) index += size / 2;
  }
  return index;
}

// Sums of a thread: for each class, and for voxels.
template <class Program, bool kApart = Program::kLabelApart>
struct ThreadSums {
  using Compute = typename Program::Compute;
  static constexpr int kClasses = Program::kClasses, kNumbers = 3 * kClasses + 3;
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
};

// A voxel adds to I and FN of its label alone. They are in shared memory, where each thread has a column of its own: an
// index into registers would take a comparison for every class.
template <class Program>
struct ThreadSums<Program, true> {
  using Compute = typename Program::Compute;
  static constexpr int kClasses = Program::kClasses, kNumbers = 3 * kClasses + 3;
  Compute false_positive[kClasses];
  Compute spoilt, cost, count;
  Compute* of_labels;

  __device__ __forceinline__ explicit ThreadSums(Compute* shared) : of_labels(shared + threadIdx.x) {
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
    const int c = k / 3, part = k % 3;
    if (c < kClasses) return part == 1 ? false_positive[c] : of_labels[(2 * c + part / 2) * kSumThreads];
    return part == 0 ? spoilt : (part == 1 ? cost : count);
  }
};

// Adds a voxel.
template <class Program, class Classes>
__device__ __forceinline__ void add_voxel(const Program& program, const Classes& classes,
                                          const VectorOffsets<Program::kVecSize, Program::kWide>& offset,
                                          const VoxelTarget& target, int i, ThreadSums<Program>& sums) {
  using Compute = typename Program::Compute;
  if (target.spoilt) sums.spoilt += Compute(1);
  if (!target.sound) return;
  VoxelSoftmax<Program> softmax;
  if constexpr (Program::kLabelApart) {
    softmax.find_apart(program, classes, offset, i, target.label);
#pragma unroll
    for (int c = 0; c < Program::kClasses; ++c) {
      sums.false_positive[c] = scalar_fma(softmax.e[c], softmax.inv_sum, sums.false_positive[c]);
    }
    sums.add_label(target.label, softmax.label_e * softmax.inv_sum, softmax.others * softmax.inv_sum);
  } else {
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
        const bool own = c == target.label;
        const Summands<Compute> in = summands<Program::kOverlap>(p, Compute(1));
        const Summands<Compute> out = summands<Program::kOverlap>(p, Compute(0));
        sum.false_positive += own ? in.false_positive : out.false_positive;
        sum.hit += own ? in.hit : Compute(0);
        sum.false_negative += own ? in.false_negative : Compute(0);
      }
    }
  }
  if constexpr (Program::kVoxel != kNoVoxelLoss) {
    const VoxelCost<Compute> cost = voxel_cost(program, classes, softmax, target, i);
    sums.cost += cost.value;
    sums.count += cost.count;
  }
}

// `of_labels` is shared memory for 2 C numbers of each thread, with kLabelApart.
template <class Program>
__device__ __forceinline__ void sum_in_registers(const Program& program, int64 chunks, int64 vectors_per_chunk,
                                                 double* partials, typename Program::Compute* of_labels) {
  using Compute = typename Program::Compute;
  using Sums = ThreadSums<Program>;
  constexpr int kVecSize = Program::kVecSize, kNumbers = Sums::kNumbers, kPadded = next_power_of_two(kNumbers);
  constexpr int kHeld = kPadded > kWarp ? kPadded / kWarp : 1;
  __shared__ double of_warp[kSumWarps][kPadded];
  const int64 vectors = program.space.voxels / kVecSize, total = chunks * program.space.samples;
#pragma unroll 1
  for (int64 chunk = blockIdx.x; chunk < total; chunk += gridDim.x) {
    const int64 sample = chunk / chunks, first = (chunk - sample * chunks) * vectors_per_chunk;
    Sums sums(of_labels);
#pragma unroll 1
    for (int64 turn = threadIdx.x; turn < vectors_per_chunk; turn += kSumThreads) {
      const int64 vector = first + turn;
      if (vector >= vectors) break;
      VectorOffsets<Program::kVecSize, Program::kWide> offset;
      program.space.offsets(sample, vector * kVecSize, offset);
      ClassesOf<Program> classes;
      classes.template load<false>(program, offset);
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        const VoxelTarget target = voxel_target(program, classes, offset, i);
        if constexpr (!Program::kDense) {
          if (target.spoilt) {
            report_label(program.status, program.site, sample * program.space.voxels + vector * kVecSize + i,
                         classes.label(i), program.space.classes);
          }
        }
        add_voxel(program, classes, offset, target, i, sums);
      }
    }
    // The first halving by hand: floats are exchanged, and half as many doubles are held.
    const bool upper = threadIdx.x & 16;
    double held[kPadded / 2];
#pragma unroll
    for (int k = 0; k < kPadded / 2; ++k) {
      const Compute low = k < kNumbers ? sums.number(k) : Compute(0);
      const Compute high = k + kPadded / 2 < kNumbers ? sums.number(k + kPadded / 2) : Compute(0);
      const Compute other = __shfl_xor_sync(0xffffffffu, upper ? low : high, 16);
      held[k] = static_cast<double>(upper ? high : low) + static_cast<double>(other);
    }
    halve<kPadded / 2, 8>(held);
    const int lane = threadIdx.x % kWarp, at = halved_index<kPadded>(lane);
    __syncthreads();  // the chunk before may still be read
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      // Of fewer numbers than lanes several lanes have the same.
      if (kPadded >= kWarp || lane % (kWarp / kPadded) == 0) of_warp[threadIdx.x / kWarp][at + k] = held[k];
    }
    __syncthreads();
    for (int k = threadIdx.x; k < kNumbers; k += kSumThreads) {
      double sum = 0.0;
#pragma unroll
      for (int w = 0; w < kSumWarps; ++w) sum += of_warp[w][k];
      partials[chunk * kNumbers + k] = sum;
    }
  }
}

// A voxel's softmax as a tile keeps it.
template <class Compute>
struct TileVoxel {
  Compute max_logit;
  Compute inv_sum;
  Compute others;
  Compute sum;
  int pivot;
  int label;  // -2 if it does not count
};

// `totals` are 3 C doubles of shared memory.
template <class Program>
__device__ __forceinline__ void sum_in_tiles(const Program& program, int64 chunks, int64 tiles_per_chunk,
                                             double* partials, double* totals) {
  using Compute = typename Program::Compute;
  __shared__ TileVoxel<Compute> tile[kTile];
  __shared__ double of_warp[kSumWarps][3];
  const int classes_count = program.classes(), numbers = 3 * classes_count + 3;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64 voxels = program.space.voxels, total = chunks * program.space.samples;
#pragma unroll 1
  for (int64 chunk = blockIdx.x; chunk < total; chunk += gridDim.x) {
    const int64 sample = chunk / chunks, first = (chunk - sample * chunks) * tiles_per_chunk;
    double spoilt = 0.0, cost = 0.0, count = 0.0;
#pragma unroll 1
    for (int64 turn = 0; turn < tiles_per_chunk; ++turn) {
      const int64 begin = (first + turn) * kTile;
      __syncthreads();  // the tile before may still be read
      for (int v = threadIdx.x; v < kTile; v += kSumThreads) {
        TileVoxel<Compute> kept;
        kept.label = -2;
        if (begin + v < voxels) {
          VectorOffsets<Program::kVecSize, Program::kWide> offset;
          program.space.offsets(sample, begin + v, offset);
          ClassesOf<Program> classes;
          classes.template load<false>(program, offset);
          const VoxelTarget target = voxel_target(program, classes, offset, 0);
          if constexpr (!Program::kDense) {
            if (target.spoilt) {
              report_label(program.status, program.site, sample * voxels + begin + v, classes.label(0),
                           program.space.classes);
            }
          }
          if (target.spoilt) spoilt += 1.0;
          if (target.sound) {
            VoxelSoftmax<Program> softmax;
            if constexpr (Program::kNeedsSoftmax) {
              softmax.find(program, classes, 0, target.label);
              kept.max_logit = softmax.max_logit;
              kept.inv_sum = softmax.inv_sum;
              kept.others = softmax.others;
              kept.sum = softmax.sum;
              kept.pivot = softmax.pivot;
            }
            kept.label = Program::kDense ? 0 : target.label;
            if constexpr (Program::kVoxel != kNoVoxelLoss) {
              const VoxelCost<Compute> of_voxel = voxel_cost(program, classes, softmax, target, 0);
              cost += static_cast<double>(of_voxel.value);
              count += static_cast<double>(of_voxel.count);
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
          const TileVoxel<Compute> kept = tile[v];
          if (kept.label == -2) continue;
          VectorOffsets<Program::kVecSize, Program::kWide> offset;
          program.space.offsets(sample, begin + v, offset);
          ClassesOf<Program> classes;
          classes.template load<false>(program, offset);
          VoxelSoftmax<Program> softmax;
          softmax.max_logit = kept.max_logit;
          softmax.inv_sum = kept.inv_sum;
          softmax.others = kept.others;
          softmax.sum = kept.sum;
          softmax.pivot = kept.pivot;
          const VoxelTarget target{kept.label, true, false};
          const Summands<Compute> s = summands<Program::kOverlap>(probability(program, classes, softmax, c, 0),
                                                                  target_of<Program>(classes, target, c, 0));
          sum.hit += s.hit;
          sum.false_positive += s.false_positive;
          sum.false_negative += s.false_negative;
        }
        const double hit = warp_sum(static_cast<double>(sum.hit));
        const double positive = warp_sum(static_cast<double>(sum.false_positive));
        const double negative = warp_sum(static_cast<double>(sum.false_negative));
        if (lane == 0) {
          totals[3 * c] = (turn ? totals[3 * c] : 0.0) + hit;
          totals[3 * c + 1] = (turn ? totals[3 * c + 1] : 0.0) + positive;
          totals[3 * c + 2] = (turn ? totals[3 * c + 2] : 0.0) + negative;
        }
      }
    }
    spoilt = warp_sum(spoilt);
    cost = warp_sum(cost);
    count = warp_sum(count);
    if (lane == 0) {
      of_warp[warp][0] = spoilt;
      of_warp[warp][1] = cost;
      of_warp[warp][2] = count;
    }
    __syncthreads();
    for (int k = threadIdx.x; k < numbers; k += kSumThreads) {
      double sum = 0.0;
      if (k < 3 * classes_count) {
        sum = totals[k];
      } else {
        for (int w = 0; w < kSumWarps; ++w) sum += of_warp[w][k - 3 * classes_count];
      }
      partials[chunk * numbers + k] = sum;
    }
    __syncthreads();
  }
}
