// CTC: sizes, strides and buffers of a call, and the preparation of its samples, which all its kernels share.
//
//   samples n = 0 .. N - 1 (of all batches), frames t < T_n, labels j < S_n, positions j = 0 .. S_n
//
// Position j holds two states: the blank before label j, and label j (none for j = S_n). Every buffer stores the
// positions of all samples one after another.
//
// prepare_sample prepares a sample per block, in a launch of its own. Alternatively, each block of the recursion's
// first half prepares its sample for itself (walk_given).
//
// 1. The block reads the lengths, the mask and the weight. It decides whether the sample counts, and which outcome is
//    known without the recursion.
// 2. It copies the labels as 32-bit integers and checks them. A label that is not a class, or that is the blank, is
//    reported through the status words of the device and never indexes memory.
//
// link_labels, launched beside the second half, links each label to its next occurrence, so that the gradient pass adds
// the posteriors of a class in the order of positions.
//
// Traffic: labels are read once, and 8 bytes are written for each. With concatenated targets, every sample reads all N
// target lengths of its batch. Preconditions: stated at each function.
#pragma once
#include "core/reduce.cuh"
#include "core/types.cuh"
#include "sequence/extended.cuh"
#include "softmax/row_ptx.cuh"

// Sizes and strides of a call. A kernel parameter that the plan fills.
struct Sequences {
  int64 samples, inner;                      // samples of all batches; of one batch
  int64 frames, classes, room;               // T, C, label capacity of a sample's target (a batch's if concatenated)
  int64 blank, concatenated, positions;      // class of the blank; boolean; positions of all samples
  int64 x_outer, x_inner, x_frame, x_class;  // strides of the first operand, in elements
  int64 g_outer, g_inner, g_frame, g_class;  // strides of its gradient
  int64 of_targets, of_input_lengths, of_target_lengths, of_weight;  // dtypes, see load_integer and load_weight
  int64 averages, zero_infinity;  // booleans: divide a sample's loss by its label count; 0 instead of inf
  int64 site;                     // number of the first of four error reports, in the order of Report
  int64 bands, column;            // blocks per direction of a sample; numbers that each passes to the next
  int64 buffer[8];                // byte offsets of a call's buffers in its memory, in the order of Buffers

  // Divides in 32 bits: a 64-bit division is a call, around which registers are spilled.
  __device__ __forceinline__ unsigned batch_of(int64 sample) const {
    return static_cast<unsigned>(sample) / static_cast<unsigned>(inner);
  }
  __device__ __forceinline__ int64 x_offset(int64 sample) const {
    const int64 batch = batch_of(sample);
    return batch * x_outer + (sample - batch * inner) * x_inner;
  }
  __device__ __forceinline__ int64 g_offset(int64 sample) const {
    const int64 batch = batch_of(sample);
    return batch * g_outer + (sample - batch * inner) * g_inner;
  }
};

// Flags of a `broken` word: a logit of a frame is NaN; an emission of the blank or of a label is NaN; the loss is NaN;
// the target has no alignment. The meeting of alpha and beta sets the last two.
constexpr unsigned kNanLogit = 1u, kNanEmission = 2u, kNanLoss = 4u, kNoAlignment = 8u;
// The link of a label is the position of the next label of its class plus one, or 0 if there is none. The bit kEarlier
// is set if there is an earlier label of the class.
constexpr unsigned kEarlier = 0x80000000u;

// Index of a sample's `broken` words, by writer: alpha's first half and beta's first half (emissions), the meeting, the
// log-sum-exps.
enum Broken { kByAlpha, kByBeta, kByMeeting, kByLogits, kBrokenWords };

// Verdict on a sample, from its lengths, labels, mask and weight. kRuns: the recursion decides. kSkipped: masked, or of
// weight 0. kBad: a length is out of range, the lengths of concatenated targets do not add up, or a label is the blank
// or no class. kImpossible: more labels than frames. kTrivial: no frame, no label.
enum Outcome { kRuns, kSkipped, kBad, kImpossible, kTrivial };
enum Report { kLabel, kInputLength, kTargetLength, kTotalLength };

struct alignas(16) Sample {
  int64 first;  // index of its first position in the buffers
  int frames, labels;
  int outcome, unused;
  double weight;  // 1 without weights
};

// Softmax statistics of a frame: the largest logit, the sum of the other logits' exponentials relative to it, and the
// class of the largest, which is valid if `others` is below 1.
template <class Compute>
struct FrameSum {
  Compute largest, others;
  int64 at;
};

// Buffers of a call, in one allocation. It begins with the grad_output that the gradients were written for, and the
// ticket.
template <class Compute>
struct Buffers {
  double* used;
  unsigned* ticket;
  Sample* samples;
  int* labels;                     // by position
  unsigned* links;                 // by position
  unsigned* broken;                // by Broken and sample: flags kNanLogit .. kNoAlignment
  StoredNumber<Compute>* meeting;  // alpha's last products, then beta's: blanks and labels by sample
  FrameSum<Compute>* sums;         // by sample and frame
  double* losses;
  StoredNumber<Compute>* columns;  // by sample, direction, band and frame
  unsigned* started;               // counters of start_number for each half, then of claimed_task

  __device__ __forceinline__ Buffers(char* memory, const Sequences& shape)
      : used(reinterpret_cast<double*>(memory)),
        ticket(reinterpret_cast<unsigned*>(memory + 8)),
        samples(reinterpret_cast<Sample*>(memory + shape.buffer[0])),
        labels(reinterpret_cast<int*>(memory + shape.buffer[1])),
        links(reinterpret_cast<unsigned*>(memory + shape.buffer[2])),
        broken(reinterpret_cast<unsigned*>(memory + shape.buffer[3])),
        meeting(reinterpret_cast<StoredNumber<Compute>*>(memory + shape.buffer[4])),
        sums(reinterpret_cast<FrameSum<Compute>*>(memory + shape.buffer[5])),
        losses(reinterpret_cast<double*>(memory + shape.buffer[6])),
        columns(reinterpret_cast<StoredNumber<Compute>*>(memory + shape.buffer[7])),
        started(reinterpret_cast<unsigned*>(memory + 16)) {
  }
};

// Status words of the device, in the same layout as in softmax/rows.cuh.
struct SequenceStatus {
  unsigned code;  // 0 empty, 1 being written, 2 complete
  unsigned unused;
  int64 place, value, limit, site;
};

// Reports an error to the host, unless the status words already hold one or `status` is null.
__device__ __forceinline__ void report(SequenceStatus* status, int64 site, int64 place, int64 value, int64 limit) {
  if (status == nullptr || atomicCAS(&status->code, 0u, 1u) != 0u) return;
  status->place = place;
  status->value = value;
  status->limit = limit;
  status->site = site;
  __threadfence_system();
  atomicExch(&status->code, 2u);
}

// Loads element `i` of an array of integers. `dtype` is the size of an element in bytes, negative if unsigned.
__device__ __forceinline__ int64 load_integer(const void* array, int64 dtype, int64 i) {
  if (dtype == 8) return static_cast<const int64*>(array)[i];
  if (dtype == 4) return static_cast<const int*>(array)[i];
  if (dtype == 2) return static_cast<const short*>(array)[i];
  if (dtype == 1) return static_cast<const signed char*>(array)[i];
  return static_cast<const unsigned char*>(array)[i];
}

// Loads element `i` of an array of floating-point numbers. `dtype` is 8 for double, 4 for float, 2 for half, 3 for
// bfloat16.
__device__ __forceinline__ double load_weight(const void* array, int64 dtype, int64 i) {
  if (dtype == 8) return static_cast<const double*>(array)[i];
  if (dtype == 4) return static_cast<const float*>(array)[i];
  if (dtype == 2) return widen<double>(static_cast<const half_t*>(array)[i]);
  return widen<double>(static_cast<const bfloat16_t*>(array)[i]);
}

// True if the gradient that forward wrote for the grad_output `used` is valid for the true one, so that backward has
// nothing to do. False in forward, which has no `grad_output`, and if `used` is null: nothing was written.
template <class Result>
__device__ __forceinline__ bool is_fresh(const Result* grad_output, const double* used) {
  if (grad_output == nullptr || used == nullptr) return false;
  return __double_as_longlong(widen<double>(*grad_output)) == __double_as_longlong(*used);
}

// Label products in transit from the block of one band of positions to the block of the next. Each word signals its own
// arrival: until then it holds kAbsent, which encodes no number. The reader restores kAbsent for the next launch.
constexpr unsigned long long kAbsent = 0xfff80000dead0000ull;

// Sets the `count` words of the columns to kAbsent. Precondition: called by the blocks past the first `samples` blocks.
__device__ __forceinline__ void empty_columns(const Sequences& shape, unsigned long long* words, int64 count) {
  const int64 step = (gridDim.x - shape.samples) * blockDim.x;
  for (int64 i = (blockIdx.x - shape.samples) * blockDim.x + threadIdx.x; i < count; i += step) words[i] = kAbsent;
}

// Returns the number of the block in the order in which blocks start. A block only ever waits for blocks of lower
// numbers, which are running or have finished. Preconditions: all threads call it; the counter is 0 before `blocks`
// blocks of a launch take numbers. It is 0 again afterwards.
__device__ __forceinline__ unsigned start_number(unsigned* counter, unsigned blocks) {
  __shared__ unsigned number;
  if (threadIdx.x == 0) number = atomicInc(counter, blocks - 1);
  __syncthreads();
  // The shuffle tells the compiler that the value is uniform over a warp. Otherwise it splits each step where lanes
  // might diverge.
  return __shfl_sync(0xffffffffu, number, 0);
}

// Returns the task of the block in a launch of `walks` + `others` blocks: a walk, below `walks`, or one of the others,
// from `walks` on. Walks are numbered in the order in which they start. The first `most` blocks of a multiprocessor
// claim walks as long as any are left. The remaining blocks claim other tasks first. If the block index decided
// instead, some multiprocessors would get three walks before others have one, and all would wait for the slowest.
//
// `claims` counts claimed walks, other claimed tasks, and the blocks of each multiprocessor. Preconditions: all threads
// call it; all of `claims` is 0 before the launch.
constexpr int kMultiprocessors = 256, kClaims = 2 + kMultiprocessors;
__device__ __forceinline__ unsigned claimed_task(unsigned* claims, unsigned most, unsigned walks, unsigned others) {
  __shared__ unsigned task;
  if (threadIdx.x == 0) {
    unsigned walk = walks, other = 0;
    if (atomicAdd(claims + 2 + multiprocessor() % kMultiprocessors, 1u) < most) walk = atomicAdd(claims, 1u);
    if (walk >= walks) {
      other = atomicAdd(claims + 1, 1u);
      if (other >= others) walk = atomicAdd(claims, 1u);
    }
    task = walk < walks ? walk : walks + other;
  }
  __syncthreads();
  // The shuffle tells the compiler that the value is uniform over a warp. Otherwise it splits each step where lanes
  // might diverge.
  return __shfl_sync(0xffffffffu, task, 0);
}

// Arrays of a call besides its first operand. All but `targets` may be null.
struct GivenArrays {
  const void *targets, *input_lengths, *target_lengths, *weights;
  const bool* mask;
};

// Reads and checks the lengths, mask, weight and labels of sample n, and returns the sample with its verdict. For
// concatenated targets, `before` is the number of labels of the batch before those of the sample, `total` is the sum of
// the batch's target lengths, and `uneven` is true if that is not `room` or a length is out of range.
//
// Stores the labels in `to`, from the sample's first position on, unless `to` is null, and the first `count` of them in
// `near`. The whole block may read both afterwards. Reports nothing if `status` is null. Precondition: all threads of
// the block call it.
__device__ __forceinline__ Sample examined_sample(const Sequences& shape, const GivenArrays& arrays, int64 n,
                                                  int64 before, bool uneven, int64 total, int* to, int* near, int count,
                                                  SequenceStatus* status) {
  const int64 group = shape.batch_of(n), batch = group * shape.inner;
  const bool concatenated = shape.concatenated != 0;
  const auto label_at = [&](int64 i) { return load_integer(arrays.targets, shape.of_targets, i); };
  // A padded target has `room` labels in memory, so they can be loaded before their number is known.
  const int rank = threadIdx.x;
  const int64 early = !concatenated && rank < shape.room ? label_at(n * shape.room + rank) : 0;
  // All loads, including that of the weight, precede the first use of any: one scoreboard counts them all.
  const int64 frames =
      arrays.input_lengths == nullptr ? shape.frames : load_integer(arrays.input_lengths, shape.of_input_lengths, n);
  const int64 labels =
      arrays.target_lengths == nullptr ? shape.room : load_integer(arrays.target_lengths, shape.of_target_lengths, n);
  Sample sample;
  sample.weight = arrays.weights == nullptr ? 1.0 : load_weight(arrays.weights, shape.of_weight, n);
  const bool is_kept = arrays.mask == nullptr || arrays.mask[n];
  const bool wrong_frames = frames < 0 || frames > shape.frames, wrong_labels = labels < 0 || labels > shape.room;
  const bool counts = is_kept && sample.weight != 0.0;
  sample.outcome = kRuns;
  if (!counts) {
    sample.outcome = kSkipped;
  } else if (wrong_frames || wrong_labels || uneven) {
    sample.outcome = kBad;
    if (rank == 0) {
      if (wrong_frames) {
        report(status, shape.site + kInputLength, n, frames, shape.frames);
      } else if (wrong_labels) {
        report(status, shape.site + kTargetLength, n, labels, shape.room);
      } else {
        report(status, shape.site + kTotalLength, n, total, shape.room);
      }
    }
  }
  const bool usable = sample.outcome == kRuns;
  const int size = usable ? static_cast<int>(labels) : 0;
  sample.first = n * (shape.room + 1);
  int64 from = n * shape.room;
  if (concatenated) {
    sample.first = usable ? group * (shape.room + shape.inner) + before + (n - batch) : 0;
    from = usable ? group * shape.room + before : 0;
  }
  bool wrong = false;
  for (int j = rank; j < size; j += blockDim.x) {
    const int64 label = concatenated || j != rank ? label_at(from + j) : early;
    const bool is_class = label >= 0 && label < shape.classes && label != shape.blank;
    if (!is_class) report(status, shape.site + kLabel, from + j, label, shape.classes);
    wrong = wrong || !is_class;
    const int safe_label = is_class ? static_cast<int>(label) : 0;
    if (to != nullptr) to[sample.first + j] = safe_label;
    if (j < count) near[j] = safe_label;
  }
  if (__syncthreads_or(wrong)) sample.outcome = kBad;
  if (sample.outcome == kRuns) {
    if (labels > frames) {
      sample.outcome = kImpossible;
    } else if (frames == 0) {
      sample.outcome = kTrivial;
    }
  }
  const bool is_read = sample.outcome != kBad && sample.outcome != kSkipped;
  sample.frames = is_read ? static_cast<int>(frames) : 0;
  sample.labels = is_read ? static_cast<int>(labels) : 0;
  sample.unused = 0;
  return sample;
}

// Resets the ticket of later launches, and records the grad_output that gradients are written for: 1 if `expected` is
// null. Precondition: one thread of a launch calls it.
__device__ __forceinline__ void begin_call(const double* expected, double* used, unsigned* ticket) {
  *ticket = 0;
  *used = expected == nullptr ? 1.0 : __ldcg(expected);
}

// Prepares sample blockIdx.x and resets the counters of later launches. `expected` may be null; `used` receives the
// grad_output that gradients are written for. Preconditions: one block of 256 threads per sample.
__device__ __forceinline__ void prepare_sample(const Sequences& shape, const GivenArrays& arrays,
                                               const double* expected, double* used, Sample* samples, int* labels,
                                               unsigned* broken, unsigned* ticket, unsigned* started,
                                               SequenceStatus* status) {
  const int64 n = blockIdx.x, batch = shape.batch_of(n) * shape.inner;
  for (int i = threadIdx.x; n == 0 && i < 2 + kClaims; i += blockDim.x) started[i] = 0;
  __shared__ int64 totals[2];
  __shared__ int out_of_range;
  if (threadIdx.x == 0) {
    totals[0] = totals[1] = 0;
    out_of_range = 0;
    for (int i = 0; i < kBrokenWords; ++i) broken[i * shape.samples + n] = 0;
  }
  if (shape.concatenated != 0) {
    __syncthreads();
    // Integer sums do not depend on the order of additions.
    unsigned long long before = 0, all = 0;
    bool out = false;
    for (int64 i = threadIdx.x; i < shape.inner; i += blockDim.x) {
      const int64 length = load_integer(arrays.target_lengths, shape.of_target_lengths, batch + i);
      out = out || length < 0 || length > shape.room;
      all += static_cast<unsigned long long>(length);
      if (batch + i < n) before += static_cast<unsigned long long>(length);
    }
    atomicAdd(reinterpret_cast<unsigned long long*>(totals), before);
    atomicAdd(reinterpret_cast<unsigned long long*>(totals) + 1, all);
    if (out) atomicOr(&out_of_range, 1);
    __syncthreads();
  }
  const bool concatenated = shape.concatenated != 0;
  const int64 before = concatenated ? totals[0] : 0, total = concatenated ? totals[1] : 0;
  const bool uneven = concatenated && (out_of_range != 0 || total != shape.room);
  const Sample sample = examined_sample(shape, arrays, n, before, uneven, total, labels, nullptr, 0, status);
  if (threadIdx.x == 0) samples[n] = sample;
  if (threadIdx.x == 32 && n == 0) begin_call(expected, used, ticket);
}

// Writes the links of the labels of a sample that runs. Preconditions: all threads of a block call it; an earlier
// launch has prepared the sample.
__device__ __forceinline__ void link_labels(const Sample& sample, const int* labels, unsigned* links) {
  if (sample.outcome != kRuns) return;
  const int* const sample_labels = labels + sample.first;
  for (int j = threadIdx.x; j < sample.labels; j += blockDim.x) {
    const int label = sample_labels[j];
    unsigned next = 0u, earlier = 0u;
    for (int i = 0; i < sample.labels; ++i) {
      const bool same = sample_labels[i] == label;
      earlier = same && i < j ? kEarlier : earlier;
      next = same && i > j && next == 0u ? i + 1u : next;
    }
    links[sample.first + j] = next | earlier;
  }
}
