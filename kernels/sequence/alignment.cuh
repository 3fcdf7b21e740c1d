// The most probable alignment of a target to the frames of a sample (Viterbi): the class and target position of each
// frame.
//
//   y[t, c]   log-probability of class c in frame t of one sample with T frames and S labels
//   b_j, l_j  log-probability of the best path that ends in the blank before label j, or in label j
//   b_j <- y[t, blank] + max(b_j, l_(j-1))
//   l_j <- y[t, label_j] + max(l_j, b_j, l_(j-1) if label_j differs from label_(j-1))
//
// A block aligns one sample, and each lane owns one position j: the blank before label j, and label j. Sums are doubles
// and are rounded only at the end, so paths that differ only in digits that a float loses are still told apart.
//
// 1. Forward pass, in sweeps of blockDim.x positions. l_(j-1) comes from the preceding lane by a shuffle, and in lane 0
//    from the preceding warp through shared memory. This dependence runs one way, so warps are skewed: in round r, warp
//    w processes chunk r - w of kChunk frames, and reads what warp w - 1 left in round r - 1 in one of two buffers. One
//    barrier serves kChunk frames. A later sweep reads the last column of the preceding sweep from memory.
// 2. Backpointers. For each frame, three ballots per warp record where every state came from: 12 bytes for 64 states.
//    Lane i of a warp keeps word i of a chunk, and the lanes write these words together.
// 3. Backtrace, by the first warp. Each lane holds the words of one of 32 frames. All lanes track the state of the
//    path; the lane that holds a frame broadcasts by a shuffle where the state came from. In 32 frames a path moves at
//    most into the preceding group of 32 positions.
//
// Among equal sums the path stays in its state; otherwise it prefers the blank to the preceding label. It ends in the
// last label if the last blank is no better. If the best path is NaN, or there is none, no frame has a class.
//
// Traffic: T (S + 1) elements read, each from a sector of 32 bytes; T (S + 1) 3 / 8 bytes of ballots written, of which
// the backtrace reads 24 bytes per frame. Preconditions: blockDim.x is a multiple of 32, at most 512; one block per
// sample; prepare_sample (sequences.cuh) has run.
#pragma once
#include "core/scalars.cuh"
#include "core/types.cuh"
#include "sequence/sequences.cuh"

constexpr int kChunk = 8;
constexpr int kLanes = 32;
// Number of ballots per frame, with a bit per position: the blank was entered from the preceding label; the label was
// entered from its blank; the label was entered from the preceding label.
constexpr int kBallots = 3;

// Kernel arguments. Per-frame results have the gradient strides of `Sequences`.
template <class Input_, class Compute_>
struct AlignmentProgram {
  using Input = Input_;
  using Compute = Compute_;
  const Input* input;
  const Sample* samples;
  const int* targets;  // labels by position
  int64* labels;
  int64* positions;
  Compute* log_probs;
  Compute* scores;
  unsigned* came_from;  // ballots by sample, group of 32 positions, and frame
  double* columns;      // two per sample, a double per frame: sum of a sweep's last label before that frame
  Sequences shape;
};

// Addresses and sizes of one sample.
template <class Input>
struct AlignedSample {
  const Input* input;
  const int* labels;
  int64 frames, length;
  unsigned* came_from;
  double* columns;

  // Number of ballot words per group of 32 positions.
  __device__ __forceinline__ int64 words() const {
    return (frames + kChunk - 1) / kChunk * (kChunk * kBallots);
  }
};

// True if a path with sum `x` replaces one with sum `best`. NaN replaces any number, and no number replaces NaN.
__device__ __forceinline__ bool is_better(double x, double best) {
  return x > best || x != x;
}

// Returns the sum of a path extended by the emission `y` of a frame. -inf if either is -inf, even if the other is NaN:
// no path leads through it. +inf counts as NaN, as in the loss.
__device__ __forceinline__ double extended(double sum, double y) {
  const double largest = scalar_max(double());
  const double total = sum + (y > largest ? scalar_nan(double()) : y);
  return sum < -largest || y < -largest ? -scalar_infinity(double()) : total;
}

// Emissions (log-probabilities) of a chunk: those of the lane's own label as stored, and in lane f that of the blank in
// frame f.
template <class Input, class Compute>
struct ChunkEmissions {
  Input label[kChunk];
  Compute blank;

  __device__ __forceinline__ void load(const Input* input, int64 stride, int64 first, int64 frames, int64 of_label,
                                       int64 of_blank, bool labelled) {
    const int lane = threadIdx.x % kLanes;
#pragma unroll
    for (int f = 0; f < kChunk; ++f) {
      if (labelled && first + f < frames) label[f] = load_pack<1>(input + (first + f) * stride + of_label).element[0];
    }
    if (lane < kChunk && first + lane < frames) {
      blank = widen<Compute>(load_pack<1>(input + (first + lane) * stride + of_blank).element[0]);
    }
  }
};

// Steps 1 and 2 for the blockDim.x positions from `base` on. Stores the sums of the sample's last two states in `ends`,
// the blank's first, if the sweep has them. Precondition: all threads of the block call it. Ends in a barrier.
template <class Program, class Sample>
__device__ __forceinline__ void align_positions(const Program& program, const Sample& sample, int64 base,
                                                double (&ends)[2]) {
  using Input = typename Program::Input;
  using Compute = typename Program::Compute;
  __shared__ double passed[2][kLanes][kChunk];  // a warp's last label sum before each frame, by parity of rounds
  const Sequences& shape = program.shape;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  const int64 j = base + threadIdx.x, frames = sample.frames, chunks = (frames + kChunk - 1) / kChunk;
  const bool labelled = j < sample.length;
  const int64 label = labelled ? sample.labels[j] : shape.blank;
  const bool skips = labelled && j > 0 && label != sample.labels[j - 1];
  const int64 of_label = label * shape.x_class, of_blank = shape.blank * shape.x_class;
  const int64 remaining = sample.length + 1 - base, most = blockDim.x;
  const int64 warps = ((remaining < most ? remaining : most) + kLanes - 1) / kLanes;
  // The two columns alternate: a sweep writes one while it reads the other.
  const int64 sweep = base / most;
  const double* read = sample.columns + (sweep + 1) % 2 * shape.frames;
  double* written = sample.columns + sweep % 2 * shape.frames;
  unsigned* words = sample.came_from + (base / kLanes + warp) * sample.words() + lane;
  double b = j == 0 ? 0.0 : -scalar_infinity(double()), l = -scalar_infinity(double());
  ChunkEmissions<Input, Compute> next;
  if (warp < warps) next.load(sample.input, shape.x_frame, 0, frames, of_label, of_blank, labelled);
#pragma unroll 1
  for (int64 round = 0; round < chunks + warps - 1; ++round) {
    const int64 chunk = round - warp, first = chunk * kChunk;
    if (warp < warps && chunk >= 0 && chunk < chunks) {
      const ChunkEmissions<Input, Compute> now = next;
      next.load(sample.input, shape.x_frame, first + kChunk, frames, of_label, of_blank, labelled);
      const double* arriving = warp > 0 ? passed[(round + 1) % 2][warp - 1] : read + first;
      unsigned kept = 0;
#pragma unroll
      for (int f = 0; f < kChunk; ++f) {
        if (first + f < frames) {
          double left = __shfl_up_sync(0xffffffffu, l, 1);
          if (lane == 0) left = warp + base > 0 ? arriving[f] : -scalar_infinity(double());
          if (lane == kLanes - 1) {
            passed[round % 2][warp][f] = l;
            if (warp == warps - 1 && remaining > most) written[first + f] = l;
          }
          const bool entered = is_better(left, b);
          const double blank = entered ? left : b;
          const bool from_blank = is_better(b, l);
          const double best = from_blank ? b : l;
          const bool skipped = skips && is_better(left, best);
          b = extended(blank, widen<double>(__shfl_sync(0xffffffffu, now.blank, f)));
          if (labelled) l = extended(skipped ? left : best, widen<double>(now.label[f]));
          const unsigned ballots[kBallots] = {__ballot_sync(0xffffffffu, entered),
                                              __ballot_sync(0xffffffffu, from_blank),
                                              __ballot_sync(0xffffffffu, skipped)};
#pragma unroll
          for (int k = 0; k < kBallots; ++k) kept = lane == f * kBallots + k ? ballots[k] : kept;
        }
      }
      if (lane < kChunk * kBallots) words[chunk * (kChunk * kBallots)] = kept;
    }
    __syncthreads();
  }
  if (j == sample.length) ends[0] = b;
  if (j + 1 == sample.length) ends[1] = l;
  __syncthreads();
}

// Returns by how many states the path moved into state s, as the ballots of the frame say. States are numbered s = 2 j
// for the blank before label j, and 2 j + 1 for label j.
__device__ __forceinline__ int steps_back(unsigned entered, unsigned from_blank, unsigned skipped, int64 s) {
  const int bit = static_cast<int>(s / 2 % kLanes);
  if (s % 2 == 0) return static_cast<int>(entered >> bit & 1u);
  return skipped >> bit & 1u ? 2 : static_cast<int>(from_blank >> bit & 1u);
}

// Step 3: writes class, position (-1 for the blank) and log-probability of each frame, backwards from the last state
// `s`. Preconditions: one whole warp calls it, after a barrier.
template <class Program, class Sample>
__device__ __forceinline__ void walk_back(const Program& program, const Sample& sample, int64 n, int64 s) {
  using Compute = typename Program::Compute;
  const Sequences& shape = program.shape;
  const int lane = threadIdx.x % kLanes;
#pragma unroll 1
  for (int64 last = sample.frames - 1; last >= 0; last -= kLanes) {
    const int64 t = last - lane, group = s / 2 / kLanes;
    unsigned here[kBallots] = {}, before[kBallots] = {};
    if (t >= 0) {
      const unsigned* words = sample.came_from + group * sample.words() + t * kBallots;
#pragma unroll
      for (int k = 0; k < kBallots; ++k) {
        here[k] = words[k];
        before[k] = group > 0 ? words[k - sample.words()] : 0u;
      }
    }
    int64 state = s;
#pragma unroll 1
    for (int i = 0; i < kLanes; ++i) {
      state = lane == i ? s : state;
      const bool inside = s / 2 / kLanes == group;
      const int steps =
          steps_back(inside ? here[0] : before[0], inside ? here[1] : before[1], inside ? here[2] : before[2], s);
      s -= __shfl_sync(0xffffffffu, steps, i);
    }
    if (t >= 0) {
      const int64 label = state % 2 != 0 ? sample.labels[state / 2] : shape.blank;
      const int64 out = shape.g_offset(n) + t * shape.g_frame;
      program.labels[out] = label;
      program.positions[out] = state % 2 != 0 ? state / 2 : -1;
      program.log_probs[out] = widen<Compute>(sample.input[t * shape.x_frame + label * shape.x_class]);
    }
  }
}

// Aligns sample blockIdx.x. Preconditions: those of the header; all threads of the block call it.
template <class Program>
__device__ __forceinline__ void align(const Program& program) {
  __shared__ double ends[2];
  const Sequences& shape = program.shape;
  const int64 n = blockIdx.x;
  const Sample& prepared = program.samples[n];
  const int64 most = 1 + (shape.room < shape.frames ? shape.room : shape.frames), groups = (most + kLanes - 1) / kLanes;
  AlignedSample<typename Program::Input> sample;
  sample.input = program.input + shape.x_offset(n);
  sample.labels = program.targets + prepared.first;
  sample.frames = prepared.frames;
  sample.length = prepared.labels;
  sample.came_from = program.came_from + n * groups * ((shape.frames + kChunk - 1) / kChunk * (kChunk * kBallots));
  sample.columns = program.columns + n * 2 * shape.frames;
  // Without frames, only the empty target has an alignment.
  if (threadIdx.x == 0) {
    ends[0] = prepared.outcome == kTrivial && sample.length == 0 ? 0.0 : -scalar_infinity(double());
    ends[1] = -scalar_infinity(double());
  }
  __syncthreads();
  if (prepared.outcome == kRuns) {
    for (int64 base = 0; base <= sample.length; base += blockDim.x) align_positions(program, sample, base, ends);
  }
  const bool in_label = sample.length > 0 && !is_better(ends[0], ends[1]);
  const double score = prepared.outcome == kBad ? scalar_nan(double()) : ends[in_label];
  const bool has_path = score >= -scalar_max(double());
  if (threadIdx.x == 0) program.scores[n] = Narrow<typename Program::Compute>::from(score);
  if (has_path && threadIdx.x < kLanes) walk_back(program, sample, n, 2 * sample.length - in_label);
  for (int64 t = (has_path ? sample.frames : 0) + threadIdx.x; t < shape.frames; t += blockDim.x) {
    const int64 out = shape.g_offset(n) + t * shape.g_frame;
    program.labels[out] = program.positions[out] = -1;
    program.log_probs[out] = typename Program::Compute(0);
  }
}
