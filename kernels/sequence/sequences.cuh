// CTC: what its kernels share. Sizes, strides and buffers of a call, the samples as they are found to be, and how they
// are prepared.
//
//   samples n = 0 .. N - 1 (of all batches), frames t < T_n, labels j < S_n, positions j = 0 .. S_n; each position
//   holds the blank before label j, and label j. Positions of all samples stand one after another in every buffer.
//
// prepare_sample, a launch of a block per sample; or each block of the recursion's first half for itself (walk_given):
//
// 1. Reads the lengths, mask and weight, and decides whether the sample counts and what can be said already.
// 2. Copies its labels as 32-bit integers, and checks them. A label that is no class, or blank, is reported through the
//    device's status words, and never indexes memory.
//
// link_labels, beside the second half, links each label to its next occurrence: the gradient pass adds the posteriors
// of a class in the order of positions.
//
// Traffic: labels, read once, and 8 bytes written for each. Reads of lengths: N by every sample of concatenated
// targets.
#pragma once
#include "core/reduce.cuh"
#include "core/types.cuh"
#include "sequence/extended.cuh"
#include "softmax/row_ptx.cuh"

// Sizes and strides of a call: a kernel parameter, made by the plan.
struct Sequences {
  int64 samples, inner;         // of all batches; of one batch
  int64 frames, classes, room;  // T, C, labels that the targets of a sample (of a batch, if concatenated) have room for
  int64 blank, concatenated, positions;                              // number of positions of all samples
  int64 x_outer, x_inner, x_frame, x_class;                          // strides of the first operand, in elements
  int64 g_outer, g_inner, g_frame, g_class;                          // of its gradient
  int64 of_targets, of_input_lengths, of_target_lengths, of_weight;  // dtypes of arrays, see load_integer, load_weight
  int64 averages, zero_infinity;  // whether the loss of a sample is divided by its labels; 0 for inf
  int64 site;                     // number of the first of four reports, in the order of Report
  int64 bands, column;            // blocks that share a direction of a sample; numbers that one passes to the next
  int64 buffer[8];                // where the buffers of a call begin in its memory, in bytes, in the order of Buffers

  // Divisions of 32 bits: those of 64 are calls, around which registers are spilled.
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

// A NaN among the logits of a frame; one among the emissions of blank and labels; what the meeting says of the loss.
constexpr unsigned kNanLogit = 1u, kNanEmission = 2u, kNanLoss = 4u, kNoAlignment = 8u;
// The link of a label: the position of the next one of its class, plus one, or 0, and kEarlier if there is an earlier
// one.
constexpr unsigned kEarlier = 0x80000000u;

// Writers of the words of a sample that say why it is broken: emissions of alpha's first half and of beta's, the
// meeting, log-sum-exps.
enum Broken { kByAlpha, kByBeta, kByMeeting, kByLogits, kBrokenWords };

// Verdict on a sample. kRuns: the recursion decides.
enum Outcome { kRuns, kSkipped, kBad, kImpossible, kTrivial, kNan };
enum Report { kLabel, kInputLength, kTargetLength, kTotalLength };

struct alignas(16) Sample {
  int64 first;  // its first position
  int frames, labels;
  int outcome, unused;
  double weight;  // 1 without weights
};

// The largest logit of a frame, its class, and the sum of the exponentials of all others relative to it.
template <class Compute>
struct FrameSum {
  Compute largest, others;
  int64 at;
};

// The buffers of a call, in its memory: first the grad_output that gradients are written for, and the ticket.
template <class Compute>
struct Buffers {
  double* used;
  unsigned* ticket;
  Sample* samples;
  int* labels;                     // by position
  unsigned* links;                 // by position
  unsigned* broken;                // by Broken and sample: reasons why a loss is NaN
  StoredNumber<Compute>* meeting;  // rows of alpha's products, then beta's: blanks and labels of all positions
  FrameSum<Compute>* sums;         // by sample and frame
  double* losses;
  StoredNumber<Compute>* columns;  // by direction, band and frame
  unsigned* started;               // blocks of each half, and Claims

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

// The device's status words (softmax/rows.cuh has the same).
struct SequenceStatus {
  unsigned code;  // 0 nothing, 1 about to be written, 2 complete
  unsigned unused;
  int64 place, value, limit, site;
};

__device__ __forceinline__ void report(SequenceStatus* status, int64 site, int64 place, int64 value, int64 limit) {
  if (status == nullptr || atomicCAS(&status->code, 0u, 1u) != 0u) return;
  status->place = place;
  status->value = value;
  status->limit = limit;
  status->site = site;
  __threadfence_system();
  atomicExch(&status->code, 2u);
}

// Element `i` of an array of integers: bytes of an element, negative if it has no sign.
__device__ __forceinline__ int64 load_integer(const void* array, int64 dtype, int64 i) {
  if (dtype == 8) return static_cast<const int64*>(array)[i];
  if (dtype == 4) return static_cast<const int*>(array)[i];
  if (dtype == 2) return static_cast<const short*>(array)[i];
  if (dtype == 1) return static_cast<const signed char*>(array)[i];
  return static_cast<const unsigned char*>(array)[i];
}

// Element `i` of an array of numbers: 8 and 4 for double and float, 2 for half, 3 for bfloat16.
__device__ __forceinline__ double load_weight(const void* array, int64 dtype, int64 i) {
  if (dtype == 8) return static_cast<const double*>(array)[i];
  if (dtype == 4) return static_cast<const float*>(array)[i];
  if (dtype == 2) return widen<double>(static_cast<const half_t*>(array)[i]);
  return widen<double>(static_cast<const bfloat16_t*>(array)[i]);
}

// True if the gradient that forward wrote for the grad_output `used` is that for the true one: backward has nothing to
// do. Without `grad_output` this is forward, without `used` nothing was written.
template <class Result>
__device__ __forceinline__ bool is_fresh(const Result* grad_output, const double* used) {
  if (grad_output == nullptr || used == nullptr) return false;
  return __double_as_longlong(widen<double>(*grad_output)) == __double_as_longlong(*used);
}

// Label products on their way from the block of one band of positions to that of the next. Each word says itself that
// it has arrived: before, it is kAbsent, which no number is, and the reader leaves it so for the next launch.
constexpr unsigned long long kAbsent = 0xfff80000dead0000ull;

// Empties the columns, of so many words. Preconditions: blocks behind those of the samples.
__device__ __forceinline__ void empty_columns(const Sequences& shape, unsigned long long* words, int64 count) {
  const int64 step = (gridDim.x - shape.samples) * blockDim.x;
  for (int64 i = (blockIdx.x - shape.samples) * blockDim.x + threadIdx.x; i < count; i += step) words[i] = kAbsent;
}

// The number of the block in the order in which blocks start: a block only ever waits for those of lower numbers, which
// run or have run. Preconditions: all threads; the counter is 0 before `blocks` blocks of a launch take numbers, and
// again afterwards.
__device__ __forceinline__ unsigned start_number(unsigned* counter, unsigned blocks) {
  __shared__ unsigned number;
  if (threadIdx.x == 0) number = atomicInc(counter, blocks - 1);
  __syncthreads();
  // Uniform over a warp, as far as the compiler can tell: else it splits each step where lanes might part.
  return __shfl_sync(0xffffffffu, number, 0);
}

// Tasks of a launch of `walks` and `others`, whose blocks find out which is theirs: walks are numbered in the order in
// which they start, and the others follow. The first `most` blocks of a multiprocessor take walks, as long as there are
// any: by their index, some multiprocessors would get three walks before others have one, and all wait for the slowest.
//
// `claims` counts walks, others and the blocks of each multiprocessor, from 0.
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
  // Uniform over a warp, as far as the compiler can tell: else it splits each step where lanes might part.
  return __shfl_sync(0xffffffffu, task, 0);
}

// Arrays that a call is given beside its first operand. All but `targets` may be null.
struct GivenArrays {
  const void *targets, *input_lengths, *target_lengths, *weights;
  const bool* mask;
};

// Examines sample n. In concatenated targets `before` labels of its batch stand in front of its own, and `uneven` says
// that lengths do not add up to `total`. Labels go to `to`, from the sample's first position on, unless that is null,
// and the first `count` of them to `near`: both are complete for the block. Without `status` nothing is reported.
// Precondition: all threads of the block.
__device__ __forceinline__ Sample examined_sample(const Sequences& shape, const GivenArrays& given, int64 n,
                                                  int64 before, bool uneven, int64 total, int* to, int* near, int count,
                                                  SequenceStatus* status) {
  const int64 group = shape.batch_of(n), batch = group * shape.inner;
  const bool concatenated = shape.concatenated != 0;
  const auto label_at = [&](int64 i) { return load_integer(given.targets, shape.of_targets, i); };
  // Room for a label is memory: loads of labels need not wait for their number.
  const int rank = threadIdx.x;
  const int64 early = !concatenated && rank < shape.room ? label_at(n * shape.room + rank) : 0;
  // All loads stand in front of the first use of any, of the weight too: one scoreboard counts them.
  const int64 frames =
      given.input_lengths == nullptr ? shape.frames : load_integer(given.input_lengths, shape.of_input_lengths, n);
  const int64 labels =
      given.target_lengths == nullptr ? shape.room : load_integer(given.target_lengths, shape.of_target_lengths, n);
  Sample sample;
  sample.weight = given.weights == nullptr ? 1.0 : load_weight(given.weights, shape.of_weight, n);
  const bool is_kept = given.mask == nullptr || given.mask[n];
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
    const int found = is_class ? static_cast<int>(label) : 0;
    if (to != nullptr) to[sample.first + j] = found;
    if (j < count) near[j] = found;
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

// Zeroes what later launches count, and notes the grad_output that gradients are written for. `expected` may be null.
// Precondition: one thread of a launch.
__device__ __forceinline__ void begin_call(const double* expected, double* used, unsigned* ticket) {
  *ticket = 0;
  *used = expected == nullptr ? 1.0 : __ldcg(expected);
}

// Prepares sample blockIdx.x. Preconditions: blocks of 256 threads, one per sample. `expected` may be null; `used` gets
// the grad_output that gradients are written for.
__device__ __forceinline__ void prepare_sample(const Sequences& shape, const GivenArrays& given, const double* expected,
                                               double* used, Sample* samples, int* labels, unsigned* broken,
                                               unsigned* ticket, unsigned* started, SequenceStatus* status) {
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
    // Integers, so that the order of additions does not matter.
    unsigned long long before = 0, all = 0;
    bool out = false;
    for (int64 i = threadIdx.x; i < shape.inner; i += blockDim.x) {
      const int64 length = load_integer(given.target_lengths, shape.of_target_lengths, batch + i);
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
  const Sample sample = examined_sample(shape, given, n, before, uneven, total, labels, nullptr, 0, status);
  if (threadIdx.x == 0) samples[n] = sample;
  if (threadIdx.x == 32 && n == 0) begin_call(expected, used, ticket);
}

// Links the labels of a sample that runs. Preconditions: a block, and prepare_sample in an earlier launch.
__device__ __forceinline__ void link_labels(const Sample& sample, const int* labels, unsigned* links) {
  if (sample.outcome != kRuns) return;
  const int* const mine = labels + sample.first;
  for (int j = threadIdx.x; j < sample.labels; j += blockDim.x) {
    const int label = mine[j];
    unsigned next = 0u, earlier = 0u;
    for (int i = 0; i < sample.labels; ++i) {
      const bool same = mine[i] == label;
      earlier = same && i < j ? kEarlier : earlier;
      next = same && i > j && next == 0u ? i + 1u : next;
    }
    links[sample.first + j] = next | earlier;
  }
}
