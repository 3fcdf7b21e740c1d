// Region losses: from the sums of samples and classes to the value and the coefficients of the gradient.
//
//   I, FP, FN of a group = weighted sums of those of its cells (n, c)
//   E = max(I + alpha FP + beta FN + smooth_dr, floor)         S = (I + smooth_nr) / E
//   L = offset - S, or -log max(S, log_floor); optionally raised to the power gamma
//   value = mean of L over groups, or over the groups of each sample and then over samples
//   residual[n, c] = d value / d (I, FP, FN) of the cell, followed by the factor of the gradient of the voxel losses
//
// One block does everything, in double, once all chunks are summed:
// 1. Threads add up the chunks of each cell, in order (kAhead loads in flight each).
// 2. A thread, or for groups of many cells a warp, evaluates a group: the sums over its cells, the score, the loss, and
//    the derivatives of the loss by I, FP and FN. 1 - S is (alpha FP + beta FN + smooth_dr - smooth_nr) / E, where I
//    has cancelled.
// 3. The block adds up the groups: value and divisor.
// 4. Threads multiply the derivatives by the weights of the cells and by d value / d L, and store them.
//
// Conventions: at E = floor the denominator still follows the operands. At E = 0, S is 1 if no voxel is true, otherwise
// 0, and there is no gradient. L^gamma has derivative 0 at L <= 0. A group of weight 0 contributes 0, even if its loss
// is infinite or NaN. An invalid label makes the values of the groups of its sample NaN, but not their gradients.
//
// Traffic: the partial sums are read once; everything else is in shared memory, or in L1. Preconditions: one block of
// kThreads threads, all of which call the functions.
//
// Everything except counts and weights is a `Number`: double, or NestedDual<double> for a tangent along a direction
// (region_hvp.cuh). Counts and weights of cells are constants in every derivative.
#pragma once
#include "core/reduce.cuh"
#include "regions/sums.cuh"

enum Pool { kPoolNone, kPoolBatch, kPoolClass, kPoolBoth };
enum AbsentGroups { kSkipAbsent, kZeroAbsent, kKeepAbsent };
enum Weighting { kUniform, kSimple, kSquare };

// Settings of the formula, as compile-time constants; its numbers are in GroupNumbers.
template <int kPool_, int kAbsent_, int kWeighting_, bool kLogLoss_, bool kPower_, bool kPowerOfMean_, bool kBySamples_,
          bool kWeightInScore_, bool kMeanOfWeights_, bool kBackground_, bool kNormalized_, bool kSum_>
struct GroupRules {
  static constexpr int kPool = kPool_, kAbsent = kAbsent_, kWeighting = kWeighting_;
  static constexpr bool kPoolsBatch = kPool == kPoolBatch || kPool == kPoolBoth;
  static constexpr bool kPoolsClasses = kPool == kPoolClass || kPool == kPoolBoth;
  static constexpr bool kLogLoss = kLogLoss_, kPower = kPower_, kPowerOfMean = kPowerOfMean_;
  static constexpr bool kBySamples = kBySamples_, kWeightInScore = kWeightInScore_, kMeanOfWeights = kMeanOfWeights_;
  static constexpr bool kBackground = kBackground_, kNormalized = kNormalized_, kSum = kSum_;
};

struct GroupNumbers {
  double alpha, beta, smooth_nr, smooth_dr, floor, gamma, log_floor, offset, empty, share, voxel_share;
};

// Record of a group, kept between the steps.
template <class Number>
struct GroupRecord {  // 6 doubles, or 10: engines/regions/layout.py
  Number value;       // its loss times its weight; 0 if it does not count
  double divisor;     // its share of the divisor of the mean
  Number slope[3];
  double largest;  // weight of classes without a true voxel
};

// Returns a number without its tangent.
__device__ __forceinline__ double without_tangent(double x) {
  return x;
}
// Block-wide sum of x, in thread 0. Preconditions: those of block_sum().
__device__ __forceinline__ double block_total(double x) {
  return block_sum(x);
}

// kAhead is the number of partial sums that a thread loads at a time.
template <class Rules_, class ClassWeight_, int kAhead_, class Number_ = double, int kThreads_ = kSumThreads>
struct GroupProgram {
  using Rules = Rules_;
  using Number = Number_;
  static constexpr int kParts = sizeof(Number) / sizeof(double);
  static constexpr int kAhead = kAhead_, kThreads = kThreads_;
  static constexpr bool kWeighted = !kIsAbsent<ClassWeight_>;
  GroupNumbers number;
  const ClassWeight_* class_weights;
  int64 samples;
  int64 classes;
  int64 chunks;       // number of chunks of a sample
  int64 per_segment;  // number of chunks whose sums are combined, stored as those of the first
  const double* partials;
  Number* sums;                  // samples x (3 C + 3)
  GroupRecord<Number>* records;  // one per group
  double* of_samples;            // divisor of each sample

  // Keeps sums and records in `room` doubles of shared memory if they fit, otherwise in global memory after the partial
  // sums. Each step reads what the previous one has written, and the whole GPU waits for it.
  __device__ __forceinline__ void keep(double* shared, int64 room) {
    constexpr int64 kRecord = sizeof(GroupRecord<Number>) / sizeof(double);
    const bool fits = samples * (kParts * numbers() + 1) + kRecord * groups() <= room;
    double* const global = const_cast<double*>(partials) + samples * chunks * kParts * numbers();
    sums = reinterpret_cast<Number*>(fits ? shared : global);
    records = reinterpret_cast<GroupRecord<Number>*>(sums + samples * numbers());
    of_samples = reinterpret_cast<double*>(records + groups());
  }
  __device__ __forceinline__ int64 numbers() const {
    return 3 * classes + 3;
  }
  __device__ __forceinline__ int64 first_class() const {
    return Rules::kBackground ? 0 : 1;
  }
  __device__ __forceinline__ int64 regions() const {
    return classes - first_class();
  }
  __device__ __forceinline__ int64 groups() const {
    return (Rules::kPoolsBatch ? 1 : samples) * (Rules::kPoolsClasses ? 1 : regions());
  }
  __device__ __forceinline__ int64 cells() const {
    return (Rules::kPoolsBatch ? samples : 1) * (Rules::kPoolsClasses ? regions() : 1);
  }
  // Sample and class of cell i of a group.
  __device__ __forceinline__ void cell(int64 group, int64 i, int64& sample, int64& c) const {
    if constexpr (Rules::kPool == kPoolNone) {
      sample = quotient(group, regions());
      c = group - sample * regions();
    } else if constexpr (Rules::kPool == kPoolBatch) {
      sample = i;
      c = group;
    } else {
      const int64 row = quotient(i, regions());
      sample = Rules::kPool == kPoolClass ? group : row;
      c = i - row * regions();
    }
    c += first_class();
  }
  __device__ __forceinline__ int64 group_of(int64 sample, int64 c) const {
    const int64 row = Rules::kPoolsBatch ? 0 : sample, column = Rules::kPoolsClasses ? 0 : c - first_class();
    return row * (Rules::kPoolsClasses ? 1 : regions()) + column;
  }
  __device__ __forceinline__ const Number* cell_sums(int64 sample, int64 c) const {
    return sums + sample * numbers() + 3 * c;
  }
  __device__ __forceinline__ double spoilt(int64 sample) const {
    return without_tangent(sums[sample * numbers() + 3 * classes]);
  }
  __device__ __forceinline__ double class_weight(int64 c) const {
    if constexpr (kWeighted) return widen<double>(load_pack<1>(class_weights + c).element[0]);
    return 1.0;
  }
  // Number T of true voxels of a class in a sample, or in all samples if they are pooled.
  __device__ __forceinline__ double size(int64 sample, int64 c) const {
    double total = 0.0;
    for (int64 n = Rules::kPoolsBatch ? 0 : sample; n < (Rules::kPoolsBatch ? samples : sample + 1); ++n) {
      total += without_tangent(cell_sums(n, c)[0]) + without_tangent(cell_sums(n, c)[2]);
    }
    return total;
  }
  // Returns 1 / T or 1 / T^2; 0 if T is 0.
  __device__ __forceinline__ double inverse_size(int64 sample, int64 c) const {
    const double t = size(sample, c);
    if (!(t > 0.0)) return t * 0.0;
    return Rules::kWeighting == kSquare ? 1.0 / (t * t) : 1.0 / t;
  }
  // Returns the factor of the sums of a cell. `largest` is the weight of a class with T = 0.
  __device__ __forceinline__ double weight(int64 sample, int64 c, double largest) const {
    double weight = 1.0;
    if constexpr (Rules::kWeighting != kUniform) {
      weight = inverse_size(sample, c);
      weight = weight == 0.0 ? largest : weight;
    }
    if constexpr (Rules::kWeightInScore) weight *= class_weight(c);
    return weight;
  }
};

// Returns weight * x; 0 if the weight is 0, even if x is infinite or NaN.
template <class Number>
__device__ __forceinline__ Number weighted_sum_of(double weight, Number x) {
  return weight == 0.0 ? Number(0.0) : Number(weight) * x;
}

// Returns the derivative of base^gamma by base; 0 at base <= 0.
template <class Number>
__device__ __forceinline__ Number power_slope(Number base, double gamma) {
  return base > Number(0.0) ? Number(gamma) * pow(base, gamma - 1.0) : base * Number(0.0);
}

// Computes the value of a group and its derivatives by I, FP and FN from its sums.
template <class Program, class Number = typename Program::Number>
__device__ __forceinline__ void evaluate_group(const Program& program, const Number (&sum)[3], bool present,
                                               GroupRecord<Number>& record) {
  using Rules = typename Program::Rules;
  const GroupNumbers& number = program.number;
  const Number alpha(number.alpha), beta(number.beta), floor(number.floor), none(0.0), one(1.0);
  const Number wrong = alpha * sum[1] + beta * sum[2], size = sum[0] + wrong + Number(number.smooth_dr);
  const bool is_free = !(size < floor);
  const Number below = is_free ? size : floor;
  const Number missed =
      is_free ? wrong + Number(number.smooth_dr - number.smooth_nr) : below - Number(number.smooth_nr) - sum[0];
  const bool empty = below == none;
  const Number inverse = empty ? none : one / below;
  const Number lost = empty ? (present ? one : none) : missed * inverse;
  const Number score = empty ? one - lost : (sum[0] + Number(number.smooth_nr)) * inverse;
  Number value = Number(number.offset - 1.0) + lost, by_score(-1.0);
  if constexpr (Rules::kLogLoss) {
    const Number log_floor(number.log_floor);
    const bool low = score < log_floor;
    value = score > Number(0.5) ? -log1p(-lost) : -log(low ? log_floor : score);
    by_score = low ? none : Number(-1.0) / score;
  }
  if constexpr (Rules::kPower) {
    const Number base = value;
    value = base > none ? pow(base, number.gamma) : base * none;
    by_score *= power_slope(base, number.gamma);
  }
  record.value = value;
  record.slope[0] = by_score * (is_free ? lost * inverse : inverse);
  record.slope[1] = is_free ? -by_score * alpha * (score * inverse) : none;
  record.slope[2] = is_free ? -by_score * beta * (score * inverse) : none;
  if (empty) record.slope[0] = record.slope[1] = record.slope[2] = none;
}

// Returns the sum of `count` numbers with stride `step`. It loads kAhead numbers at a time and adds each batch by a
// tree. __ldcg bypasses L1, as in sum_every().
template <int kAhead>
__device__ __forceinline__ double sum_apart(const double* from, int step, int64 count) {
  double total = 0.0;
#pragma unroll 1
  for (; count > 0; count -= kAhead, from += static_cast<int64>(kAhead) * step) {
    const int left = static_cast<int>(count < kAhead ? count : kAhead);
    double term[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) term[j] = j < left ? __ldcg(from + static_cast<int64>(j) * step) : 0.0;
    total += sum_elements(term);
  }
  return total;
}

// Adds up the chunks of each sample into `sums`; with segments, only the first chunk of each, which holds the sums of
// its segment. If there are fewer numbers than threads, several threads (slices) share a number. Precondition: all
// threads call it.
template <class Program>
__device__ __forceinline__ void sum_chunks(const Program& program) {
  __shared__ double slices_of[Program::kThreads];
  const int64 numbers = Program::kParts * program.numbers(), total = program.samples * numbers;
  const int64 step = program.chunks * numbers;
  double* const sums = reinterpret_cast<double*>(program.sums);
  int64 slices = 1;
  const int64 segments = (program.chunks + program.per_segment - 1) / program.per_segment;
  const int64 apart = program.per_segment * numbers;
  if (segments == 1) {
    // Unrolled for many samples, so that several loads of a thread are in flight.
#pragma unroll 4
    for (int64 at = threadIdx.x; at < total; at += Program::kThreads) {
      const int64 sample = quotient(at, numbers);
      sums[at] = __ldcg(program.partials + sample * step + (at - sample * numbers));
    }
    __syncthreads();
    return;
  }
  while (2 * slices * total <= Program::kThreads && 2 * slices <= segments) slices *= 2;
  for (int64 begin = 0; begin < total * slices; begin += Program::kThreads) {
    const int64 at = begin + threadIdx.x, slice = quotient(at, total), number = at - slice * total;
    double sum = 0.0;
    if (at < total * slices) {
      const int64 sample = quotient(number, numbers), k = number - sample * numbers;
      sum = sum_apart<Program::kAhead>(program.partials + sample * step + slice * apart + k,
                                       static_cast<int>(slices * apart), (segments - slice + slices - 1) / slices);
    }
    if (slices == 1) {
      if (at < total) sums[number] = sum;
    } else {
      slices_of[threadIdx.x] = sum;
    }
  }
  __syncthreads();
  // Several slices imply that all numbers fit in one iteration of the loop above.
  if (slices > 1 && threadIdx.x < total) {
    double sum = 0.0;
    for (int64 slice = 0; slice < slices; ++slice) sum += slices_of[slice * total + threadIdx.x];
    sums[threadIdx.x] = sum;
  }
  __syncthreads();
}

// Number of cells of a group from which on a warp, instead of a thread, evaluates it.
constexpr int64 kCellsOfWarp = 24;

template <class Program>
__device__ __forceinline__ void evaluate_groups(const Program& program, bool shared_by_warp) {
  using Rules = typename Program::Rules;
  using Number = typename Program::Number;
  const int width = shared_by_warp ? kWarp : 1, lane = threadIdx.x % width;
  const int64 groups = program.groups(), cells = program.cells();
  for (int64 begin = 0; begin < groups; begin += Program::kThreads / width) {
    const int64 group = begin + threadIdx.x / width;
    const bool exists = group < groups;
    double largest = 0.0, size = 0.0, spoilt = 0.0;
    Number sum[3] = {Number(0.0), Number(0.0), Number(0.0)};
    if constexpr (Rules::kWeighting != kUniform) {
      for (int64 i = lane; exists && i < cells; i += width) {
        int64 sample;
        int64 c;
        program.cell(group, i, sample, c);
        largest = fmax(largest, program.inverse_size(sample, c));
      }
      if (shared_by_warp) {
        for (int offset = 16; offset > 0; offset /= 2) {
          largest = fmax(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
        }
      }
    }
    for (int64 i = lane; exists && i < cells; i += width) {
      int64 sample;
      int64 c;
      program.cell(group, i, sample, c);
      const double weight = program.weight(sample, c, largest);
      const Number* of_cell = program.cell_sums(sample, c);
      for (int k = 0; k < 3; ++k) sum[k] += weighted_sum_of(weight, of_cell[k]);
      size += without_tangent(of_cell[0]) + without_tangent(of_cell[2]);
      spoilt += program.spoilt(sample);
    }
    if (shared_by_warp) {
      for (int k = 0; k < 3; ++k) sum[k] = warp_total(sum[k]);
      size = warp_sum(size);
      spoilt = warp_sum(spoilt);
    }
    if (!exists || lane != 0) continue;
    GroupRecord<Number> record;
    record.largest = largest;
    const bool present = size > 0.0;
    evaluate_group(program, sum, present, record);
    const Number all = sum[0] + sum[1] + sum[2];
    const bool unknown = all != all;
    double weight = 1.0;
    if constexpr (Program::kWeighted && !Rules::kWeightInScore && !Rules::kPoolsClasses) {
      weight = program.class_weight(group % program.regions() + program.first_class());
    }
    const bool counts = Rules::kAbsent != kSkipAbsent || present || unknown;
    const bool used = (Rules::kAbsent == kKeepAbsent || present || unknown) && weight != 0.0;
    record.divisor = counts ? (Rules::kMeanOfWeights ? weight : 1.0) : 0.0;
    record.value = used ? record.value * Number(weight) : Number(0.0);
    for (int k = 0; k < 3; ++k) record.slope[k] = used ? record.slope[k] * Number(weight) : Number(0.0);
    if (spoilt > 0.0) record.value += Number(scalar_nan(0.0));
    program.records[group] = record;
  }
  __syncthreads();
}

// Returns the mean or sum of the groups, in every thread. `scale` becomes the factor of the derivatives of each group,
// without the divisor of its sample (of_samples). Precondition: all threads call it.
template <class Program, class Number = typename Program::Number>
__device__ __forceinline__ Number mean_of_groups(const Program& program, double divisor, Number& scale) {
  using Rules = typename Program::Rules;
  __shared__ double results[Program::kParts + 1];  // doubles, because numbers with a tangent have constructors
  Number& total_of_all = *reinterpret_cast<Number*>(results);
  double& below_all = results[Program::kParts];
  Number total(0.0);
  double below = 0.0;
  const int64 groups = program.groups();
  if constexpr (Rules::kBySamples) {
    const int64 each = groups / program.samples;
    for (int64 n = threadIdx.x; n < program.samples; n += Program::kThreads) {
      Number value(0.0);
      double count = 0.0;
      for (int64 g = n * each; g < (n + 1) * each; ++g) {
        value += program.records[g].value;
        count += program.records[g].divisor;
      }
      const bool has = count != 0.0, stands = program.number.empty == program.number.empty;
      // A sample without a counted group contributes `empty`, or is not counted if `empty` is NaN. If it has an invalid
      // label, it makes the value NaN in either case.
      total += has ? value / Number(count) : Number(stands ? program.number.empty : 0.0) + value;
      below += has || stands ? 1.0 : 0.0;
      program.of_samples[n] = has ? count : 1.0;
    }
  } else {
    for (int64 g = threadIdx.x; g < groups; g += Program::kThreads) {
      total += program.records[g].value;
      below += program.records[g].divisor;
    }
  }
  total = block_total(total);
  __syncthreads();
  below = block_sum(below);
  if (threadIdx.x == 0) {
    total_of_all = total;
    below_all = Rules::kNormalized ? divisor : below;
  }
  __syncthreads();
  total = total_of_all;
  below = Rules::kSum ? 1.0 : below_all;
  Number value = total / Number(below);
  scale = Number(below == 0.0 ? 0.0 : 1.0 / below);
  if constexpr (Rules::kPowerOfMean) {
    scale *= power_slope(value, program.number.gamma);
    value = value > Number(0.0) ? pow(value, program.number.gamma) : value * Number(0.0);
  }
  return value;
}

// Stores d value / d (I, FP, FN) of each cell, followed by `voxel_scale`.
template <class Program, class Number = typename Program::Number>
__device__ __forceinline__ void store_coefficients(const Program& program, Number scale, Number voxel_scale,
                                                   Number* residual) {
  using Rules = typename Program::Rules;
  const int64 cells = program.samples * program.classes;
  for (int64 i = threadIdx.x; i < cells; i += Program::kThreads) {
    const int64 sample = quotient(i, program.classes);
    const int64 c = i - sample * program.classes;
    Number slope[3] = {Number(0.0), Number(0.0), Number(0.0)};
    if (c >= program.first_class()) {
      const GroupRecord<Number>& record = program.records[program.group_of(sample, c)];
      const double weight = program.weight(sample, c, record.largest);
      const Number factor = Rules::kBySamples ? scale / Number(program.of_samples[sample]) : scale;
      for (int k = 0; k < 3; ++k) {
        slope[k] = weight == 0.0 ? Number(0.0) : record.slope[k] * Number(weight) * factor;
      }
    }
    for (int k = 0; k < 3; ++k) residual[3 * i + k] = slope[k];
  }
  if (threadIdx.x == 0) residual[3 * cells] = voxel_scale;
}

// Returns the mean of the voxel losses, in every thread. `scale` becomes the factor of their gradient.
template <class Program, class Number = typename Program::Number>
__device__ __forceinline__ Number mean_of_voxels(const Program& program, Number& scale) {
  Number cost(0.0);
  double count = 0.0, spoilt = 0.0;
  for (int64 n = 0; n < program.samples; ++n) {
    const Number* of_sample = program.sums + n * program.numbers() + 3 * program.classes;
    spoilt += without_tangent(of_sample[0]);
    cost += of_sample[1];
    count += without_tangent(of_sample[2]);
  }
  scale = Number(count == 0.0 ? 0.0 : 1.0 / count);
  return spoilt > 0.0 ? Number(scalar_nan(0.0)) : cost / Number(count);
}

// Performs all steps for a reduced value. `divisor` is used with kNormalized; `residual` may be null.
template <bool kVoxels, class Program, class Result, class Number = typename Program::Number>
__device__ __forceinline__ void finish_value(const Program& program, double divisor, Result* value, Number* residual) {
  sum_chunks(program);
  evaluate_groups(program, program.cells() >= kCellsOfWarp);
  Number scale, voxel_scale(0.0);
  Number total = mean_of_groups(program, divisor, scale);
  if constexpr (kVoxels) {
    const Number mean = mean_of_voxels(program, voxel_scale), share(program.number.share);
    const Number voxel_share(program.number.voxel_share);
    total = share * total + voxel_share * mean;
    scale *= share;
    voxel_scale *= voxel_share;
  }
  if (threadIdx.x == 0) *value = Narrow<Result>::from(total);
  if (residual != nullptr) store_coefficients(program, scale, voxel_scale, residual);
}

// Performs all steps for one value per group. `residual` may be null.
template <class Program, class Result, class Number = typename Program::Number>
__device__ __forceinline__ void finish_groups(const Program& program, Result* values, Number* residual) {
  sum_chunks(program);
  evaluate_groups(program, program.cells() >= kCellsOfWarp);
  for (int64 g = threadIdx.x; g < program.groups(); g += Program::kThreads) {
    values[g] = Narrow<Result>::from(program.records[g].value);
  }
  if (residual != nullptr) store_coefficients(program, Number(1.0), Number(0.0), residual);
}
