// Region losses: gradients with respect to input and target (kernel 2). The value takes one read of the operands, the
// gradients a second one.
//
//   kernel 1   sums.cuh, then groups.cuh in the block that arrives last: the value, and residual[n, c], the derivatives
//              by I, FP and FN of each cell; for a value per group, two launches
//   kernel 2   this file: with g_c, the derivative by p_c that follows from the residual,
//              softmax         d/dx_c = p_c (g_c - sum_j p_j g_j)
//              sigmoid         d/dx_c = p_c (1 - p_c) g_c
//              probabilities   d/dx_c = g_c
//              plus the gradient of the voxel loss, and d/dt_c for dense targets
//
// With softmax, g_c - sum_j p_j g_j would cancel for a class that is nearly certain. gradient_of_classes() takes
// differences to the largest class m instead: with h_c = g_c - g_m it is h_c - sum_j p_j h_j, where h_m = 0.
// LabelGradient describes the formula for labels.
//
// 1. Each block processes one chunk of a sample, the last chunk first, because L2 still holds what kernel 1 read last.
//    Each thread, or each group of lanes that shares the classes of a voxel (LaneGroup), loops over vectors of the
//    chunk and keeps them in registers (write_gradients). For labels with many classes, the block copies tiles of
//    voxels to shared memory (write_tile_gradients; write_stored_tiles in tiles.cuh). With more classes than fit on
//    chip, a thread reads its logits three times; L1 and L2 serve two of these reads. Where logits are staged through
//    shared memory (write_staged_gradients), the blocks form two waves, and each thread copies its next vector during
//    the arithmetic of the current one.
// 2. While the first vectors are in flight, the threads of the block load the sample's coefficients, times grad_output,
//    into shared memory. Blocks are small, so that other blocks compute during these loads.
//
// Traffic: input and target are read twice in total, the second time partly from L2; each gradient is written once.
// Preconditions: those of voxels.cuh and of the write_* functions.
#pragma once
#include "regions/groups.cuh"

// Gradient of a voxel with kLabelApart. y is the label, c any other class, S the sum of exponentials. A and B are the
// coefficients `row.exp_coeff` and `row.target` of the voxel loss, and k is its scale.
//   mean = sum over all classes of p_c g_c       excess = sum over the other classes of p_c (g_c - g_y)
//   d/dx_c = e_c (g_c / S - mean / S + k A)      d/dx_y = -p_y excess + k B
// Whatever all classes share is computed once. The mean is not computed as g_y + excess: that adds a rounding error of
// g_y, which is far larger than the mean and the other g_c if the label is rare and improbable.
template <class Compute>
struct LabelGradient {
  Compute by_label;
  Compute common;
  GradCoeffs<decltype(guarded(Compute(0)))> row;

  // Returns the gradient by the logit of another class with exponential e and coefficient g.
  __device__ __forceinline__ Compute of_other(Compute e, Compute g, Compute inv_sum) const {
    return e * scalar_fma(g, inv_sum, common);
  }
};

// Prepares the gradient of voxel i. `sum` is the sum of e_c g_c over the other classes.
template <class Program, class Classes, class Coeffs>
__device__ __forceinline__ LabelGradient<typename Program::Compute> gradient_of_label(
    const Program& program, const Classes& classes, const VoxelSoftmax<Program>& softmax, const VoxelTarget& target,
    int i, const Coeffs& coeffs, typename Program::Compute voxel_scale, typename Program::Compute sum) {
  using Compute = typename Program::Compute;
  using Guarded = typename Program::Guarded;
  const Compute at_label = coeffs.of_label(target.label);
  const Compute mean = scalar_fma(softmax.label_e, at_label, sum) * softmax.inv_sum;
  const Compute excess = (sum - at_label * softmax.others) * softmax.inv_sum;
  LabelGradient<Compute> y{-excess * (softmax.label_e * softmax.inv_sum), -mean * softmax.inv_sum,
                           GradCoeffs<Guarded>::all(Guarded(0))};
  if constexpr (Program::kVoxel == kRow) {
    // A NaN logit reaches every gradient through the sum, so it needs no mark. Weights may be NaN as well.
    constexpr bool kMarksLost = Program::kWeighted || Program::kSmoothed;
    y.row = voxel_row<kMarksLost>(program, classes, softmax, target.label, i).grad_coeffs;
    y.by_label = unguarded(scalar_fma(guarded(voxel_scale), y.row.target, guarded(y.by_label)));
    y.common = unguarded(scalar_fma(guarded(voxel_scale), y.row.exp_coeff, guarded(y.common)));
  }
  return y;
}

// A label that is compared with every class. With kClasses > 0 the label is a bit of one or more words, so that one
// instruction compares a class whose number is a compile-time constant; 0: the numbers are compared.
template <int kClasses>
struct LabelBits {
  static constexpr int kWords = (kClasses + 31) / 32;
  unsigned words[kWords];

  // Precondition: 0 <= label < kClasses.
  __device__ __forceinline__ explicit LabelBits(int label) {
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      const unsigned bit = kWords == 1 ? 1u << label : label / 32 == k ? 1u << label % 32 : 0u;
      words[k] = opaque(bit);
    }
  }
  __device__ __forceinline__ bool is(int c) const {
    return (words[c / 32] & 1u << c % 32) != 0;
  }
};
template <>
struct LabelBits<0> {
  int label;

  __device__ __forceinline__ bool is(int c) const {
    return c == label;
  }
};

// Stores the gradients of all classes of voxel i, with kLabelApart. Returns false if the evaluation was tentative and
// the voxel loss is not finite; the caller then repeats it with another kMode (element_loss).
template <unsigned kMode, class Program, class Classes, class Coeffs, class Store>
__device__ __forceinline__ bool label_gradient(const Program& program, const Classes& classes,
                                               const VoxelSoftmax<Program>& softmax, const VoxelTarget& target, int i,
                                               const Coeffs& coeffs, typename Program::Compute voxel_scale,
                                               const Store& store) {
  using Compute = typename Program::Compute;
  Compute sum = Compute(0);
#pragma unroll(Program::kLoop)
  for (int c = 0; c < classes.count(); ++c) {
    sum = scalar_fma(softmax.exponential(classes, c, i), coeffs.of_other(c), sum);
  }
  const LabelGradient<Compute> of_label =
      gradient_of_label(program, classes, softmax, target, i, coeffs, voxel_scale, sum);
  const LabelBits<Program::kTile == 0 ? Program::kClasses : 0> label{target.label};
  Compute total = Compute(0);
#pragma unroll(Program::kLoop)
  for (int c = 0; c < classes.count(); ++c) {
    Compute y = of_label.of_other(softmax.exponential(classes, c, i), coeffs.of_other(c), softmax.inv_sum);
    if constexpr (Program::kVoxel == kRow && Program::kSmoothed) {
      y -= unguarded(guarded(voxel_scale) * (of_label.row.weight_coeff * guarded(program.weight(c))));
    }
    y = label.is(c) ? of_label.by_label : y;
    if constexpr (Program::kVoxel == kElement) {
      const auto cost = element_loss<kMode | 1u>(program, classes, c, i, c == target.label ? Compute(1) : Compute(0));
      y += scaled_by(voxel_scale, tangent_or_zero(cost, 0));
      if constexpr ((kMode & kTentative) != 0) total += tried_result(cost);
    }
    store(c, y, Compute(0));
  }
  return (kMode & kTentative) == 0 || all_finite(total);
}

// Stores the gradients of all classes of voxel i without kLabelApart. Returns the same as label_gradient().
template <unsigned kMode, bool kInput, bool kTarget, class Program, class Classes, class Coeffs, class Store>
__device__ __forceinline__ bool gradient_of_classes(const Program& program, const Classes& classes,
                                                    const VoxelTarget& target, int i, const Coeffs& coeffs,
                                                    typename Program::Compute voxel_scale, const Store& store) {
  using Compute = typename Program::Compute;
  using Guarded = typename Program::Guarded;
  VoxelSoftmax<Program> softmax;
  if constexpr (Program::kNeedsSoftmax) softmax.find(program, classes, i, target.label);
  GradCoeffs<Guarded> row = GradCoeffs<Guarded>::all(Guarded(0));
  const Guarded scale = guarded(voxel_scale);
  if constexpr (Program::kVoxel == kRow) row = voxel_row(program, classes, softmax, target.label, i).grad_coeffs;
  Compute log_sum = Compute(0);
  Guarded of_terms = Guarded(0);
  if constexpr (Program::kVoxel == kTerm) {
    // Sum over the classes of the derivatives of their terms by log p_c.
    log_sum = log_of_sum(softmax);
#pragma unroll(Program::kLoop)
    for (int c = 0; c < program.own_classes(); ++c) {
      if (!program.has(c)) continue;
      const auto y =
          program.loss(variable<1u, 0>(guarded(log_probability(classes, softmax, c, i, log_sum))),
                       variable<0u, 1>(guarded(target_of<Program>(classes, target, c, i))),
                       variable<0u, 2>(guarded(program.weight(c))), variable<0u, 3>(Guarded(program.space.classes)));
      of_terms += tangent_or_zero(y, 0);
    }
    of_terms = Program::Lanes::sum(of_terms);
  }
  // With softmax: g_m of the largest class m, and the mean of g_c - g_m.
  Compute at_largest = Compute(0), mean = Compute(0), total = Compute(0);
  if constexpr (Program::kActivation == kSoftmax) {
    using Lanes = typename Program::Lanes;
    int largest = 0;
    bool is_here = false;
#pragma unroll(Program::kLoop)
    for (int c = 0; c < program.own_classes(); ++c) {
      if (softmax.exponential(classes, c, i) == Compute(1)) {
        largest = c;
        is_here = true;
      }
    }
    // A class whose exponential is 1 has p = 1 / sum.
    const Probability<Compute> p{softmax.inv_sum, largest == softmax.pivot
                                                      ? softmax.others * softmax.inv_sum
                                                      : (softmax.sum - Compute(1)) * softmax.inv_sum};
    at_largest = Lanes::from_lane(coeffs.at(classes, target, largest, i, p), Lanes::first_lane(is_here));
#pragma unroll(Program::kLoop)
    for (int c = 0; c < program.own_classes(); ++c) {
      if (!program.has(c)) continue;
      const Probability<Compute> of_class = probability(program, classes, softmax, c, i);
      mean += of_class.p * (coeffs.derivative(classes, target, c, i, of_class) - at_largest);
    }
    mean = Lanes::sum(mean);
  }
#pragma unroll(Program::kLoop)
  for (int c = 0; c < program.own_classes(); ++c) {
    if (!program.has(c)) continue;
    const Probability<Compute> p = probability(program, classes, softmax, c, i);
    const Compute t = target_of<Program>(classes, target, c, i);
    const Compute g = coeffs.derivative(classes, target, c, i, p);
    Compute by_input = g, by_target = Compute(0);
    if constexpr (Program::kActivation == kSoftmax) by_input = p.p * ((g - at_largest) - mean);
    if constexpr (Program::kActivation == kSigmoid) by_input = p.p * p.rest * g;
    if constexpr (kTarget) by_target = derivative_by_t<Program::kOverlap>(coeffs.of_class(c), p, t);
    if constexpr (Program::kVoxel == kRow) {
      Guarded of_row = row.exp_coeff * guarded(softmax.exponential(classes, c, i));
      if constexpr (Program::kSmoothed) of_row -= row.weight_coeff * guarded(program.weight(c));
      by_input += unguarded(scale * (c == target.label ? row.target : of_row));
    } else if constexpr (Program::kVoxel == kTerm) {
      constexpr unsigned kMask = kTarget ? 3u : 1u;
      const auto y = program.loss(variable<kMask & 1u, 0>(guarded(log_probability(classes, softmax, c, i, log_sum))),
                                  variable<kMask & 2u, 1>(guarded(t)), variable<0u, 2>(guarded(program.weight(c))),
                                  variable<0u, 3>(Guarded(program.space.classes)));
      const Guarded share = guarded(softmax.exponential(classes, c, i) * softmax.inv_sum);
      by_input += unguarded(scale * (tangent_or_zero(y, 0) - share * of_terms));
      by_target += unguarded(scale * tangent_or_zero(y, 1));
    } else if constexpr (Program::kVoxel == kElement) {
      const auto y = element_loss<kMode | (kTarget ? 3u : 1u)>(program, classes, c, i, t);
      by_input += scaled_by(voxel_scale, tangent_or_zero(y, 0));
      by_target += scaled_by(voxel_scale, tangent_or_zero(y, 1));
      if constexpr ((kMode & kTentative) != 0) total += tried_result(y);
    }
    store(c, by_input, by_target);
  }
  return (kMode & kTentative) == 0 || all_finite(total);
}

// Stores the gradients of voxel i by label_gradient() or gradient_of_classes(), and returns its result.
template <unsigned kMode, bool kInput, bool kTarget, class Program, class Classes, class Coeffs, class Store>
__device__ __forceinline__ bool gradient_of_voxel(const Program& program, const Classes& classes,
                                                  const VectorOffsets<Program::kVecSize, Program::kWide>& offset,
                                                  const VoxelTarget& target, int i, const Coeffs& coeffs,
                                                  typename Program::Compute voxel_scale, const Store& store) {
  if constexpr (Program::kLabelApart) {
    VoxelSoftmax<Program> softmax;
    softmax.find_apart(program, classes, offset, i, target);
    return label_gradient<kMode>(program, classes, softmax, target, i, coeffs, voxel_scale, store);
  } else {
    return gradient_of_classes<kMode, kInput, kTarget>(program, classes, target, i, coeffs, voxel_scale, store);
  }
}

// Computes the gradients of voxel i and passes them to `store(c, by_input, by_target)`, after a tentative evaluation if
// the loss asks for one. With kLabelApart, the caller clears the gradients of voxels that do not count.
template <bool kInput, bool kTarget, class Program, class Classes, class Coeffs, class Store>
__device__ __forceinline__ void voxel_gradient(const Program& program, const Classes& classes,
                                               const VectorOffsets<Program::kVecSize, Program::kWide>& offset,
                                               const VoxelTarget& target, int i, const Coeffs& coeffs,
                                               typename Program::Compute voxel_scale, const Store& store) {
  using Compute = typename Program::Compute;
  if (!Program::kLabelApart && !target.sound) {
#pragma unroll(Program::kLoop)
    for (int c = 0; c < program.own_classes(); ++c) store(c, Compute(0), Compute(0));
    return;
  }
  if constexpr (Program::Loss::kTriedFirst) {
    bool done = false;
    if (program.loss.usual()) {
      done = gradient_of_voxel<kTentative, kInput, kTarget>(program, classes, offset, target, i, coeffs, voxel_scale,
                                                            store);
      // Lanes that share a voxel repeat the evaluation together.
      done = Program::Lanes::all(done);
    }
    // Opaque; otherwise the compiler duplicates the code that follows.
    if (opaque(static_cast<unsigned>(done)) != 0) return;
  }
  gradient_of_voxel<0u, kInput, kTarget>(program, classes, offset, target, i, coeffs, voxel_scale, store);
}

// Coefficients of a sample in shared memory: the derivatives a, b and c by I, FP and FN of each class. With kPairs
// (labels and product overlap) there are only b of all classes, followed by a - c of all classes, which the label
// needs. The memory holds 3 numbers for every class slot of every lane; slots of classes that do not exist are unused.
template <class Program>
struct SharedCoeffs {
  using Compute = typename Program::Compute;
  static constexpr bool kPairs = !Program::kDense && Program::kOverlap == kProduct;
  const Compute* numbers;
  int count;  // number of classes
  int first;  // first class of this thread

  __device__ __forceinline__ SharedCoeffs(const Program& program, const Compute* numbers)
      : numbers(numbers), count(program.classes()), first(program.first_own()) {
  }
  __device__ __forceinline__ Summands<Compute> of_class(int c) const {
    const Compute* const own = numbers + 3 * (first + c);
    return {own[0], own[1], own[2]};
  }
  __device__ __forceinline__ Compute of_label(int label) const {
    return numbers[count + label];
  }
  __device__ __forceinline__ Compute of_other(int c) const {
    return numbers[c];
  }
  // Returns the derivative by the probability of class c.
  template <class Classes>
  __device__ __forceinline__ Compute derivative(const Classes& classes, const VoxelTarget& target, int c, int i,
                                                const Probability<Compute>& p) const {
    if constexpr (kPairs) {
      return numbers[first + (c == target.label ? count + c : c)];
    } else {
      return derivative_by_p<Program::kOverlap>(of_class(c), p, target_of<Program>(classes, target, c, i));
    }
  }
  // Variant for a class index that is not a compile-time constant: indexing registers with it would move them to local
  // memory.
  template <class Classes>
  __device__ __forceinline__ Compute at(const Classes& classes, const VoxelTarget& target, int c, int i,
                                        const Probability<Compute>& p) const {
    if constexpr (!Program::kDense || Program::kClasses == 0) {
      return derivative(classes, target, c, i, p);
    } else {
      Compute selected = Compute(0);
#pragma unroll
      for (int k = 0; k < Program::kClasses; ++k) {
        const Compute t = force_computed(classes.target(k, i));
        selected = k == c ? t : selected;
      }
      return derivative_by_p<Program::kOverlap>(of_class(c), p, selected);
    }
  }
};

// Collects the gradients of kCount voxels in the arithmetic type, so that 16-bit gradients are rounded in pairs.
template <bool kInput, bool kTarget, int kCount, class Program>
struct StoreInRegisters {
  using Compute = typename Program::Compute;
  Compute (&inputs)[Program::kUnroll][kCount];
  Compute (&targets)[Program::kUnroll][kCount];
  int i;
  __device__ __forceinline__ void operator()(int c, Compute by_input, Compute by_target) const {
    if constexpr (kInput) inputs[c][i] = by_input;
    if constexpr (kTarget) targets[c][i] = by_target;
  }
};

// Converts kCount numbers and puts them into a pack at element `first`. Precondition: `first` is a multiple of kCount.
template <int kCount, class Storage, int kVecSize, class Compute>
__device__ __forceinline__ void put(const Compute (&x)[kCount], int first, Pack<Storage, kVecSize>& pack) {
  reinterpret_cast<Pack<Storage, kCount>*>(&pack)[first / kCount] = NarrowPack<Storage, kCount>::from(x);
}

// Stores the gradients of one voxel directly in global memory.
template <bool kInput, bool kTarget, class Program>
struct StoreInMemory {
  using Compute = typename Program::Compute;
  typename Program::Input* inputs;
  typename Program::Target* targets;
  int64 stride, target_stride;
  __device__ __forceinline__ void operator()(int c, Compute by_input, Compute by_target) const {
    if constexpr (kInput) inputs[c * stride] = Narrow<typename Program::Input>::from(by_input);
    if constexpr (kTarget) targets[c * target_stride] = Narrow<typename Program::Target>::from(by_target);
  }
};

// Stores gradients by the input over the logits of the tile, where they wait to be written.
template <class Program>
struct StoreInTile {
  using Compute = typename Program::Compute;
  const TileClasses<Program>& classes;
  __device__ __forceinline__ void operator()(int c, Compute by_input, Compute) const {
    classes.overwrite(c, by_input);
  }
};

// Stores one vector: at once with kWide, otherwise element by element.
template <class Program, class Storage>
__device__ __forceinline__ void store_voxels(Storage* to,
                                             const VectorOffsets<Program::kVecSize, Program::kWide>& offset, int stream,
                                             const Pack<Storage, Program::kVecSize>& pack) {
  if constexpr (Program::kWide) {
    // Evict-first, so that gradients leave L2 before the voxels that kernel 1 left there and later blocks still read.
    store_stream<Program::kVecSize>(to + offset.at(stream, 0), pack);
  } else {
#pragma unroll
    for (int i = 0; i < Program::kVecSize; ++i) to[offset.at(stream, i)] = pack.element[i];
  }
}

// Stores the vectors of all classes of the thread if kWanted.
template <bool kWanted, class Program, class Storage>
__device__ __forceinline__ void store_classes(const Program& program,
                                              const VectorOffsets<Program::kVecSize, Program::kWide>& offset,
                                              int stream, const Pack<Storage, Program::kVecSize> (&x)[Program::kUnroll],
                                              Storage* to) {
  if constexpr (kWanted) {
    const int64 stride = program.space.class_stride[stream];
    to += program.first_own() * stride;
#pragma unroll
    for (int c = 0; c < Program::kClasses; ++c) {
      if (program.has(c)) store_voxels<Program>(to + c * stride, offset, stream, x[c]);
    }
  }
}

// Loads the coefficients of a sample, times grad_output, into `numbers`. `groups.group_of` maps a class of a sample to
// its group; `per_group` is nonzero if grad_output has one element per group. Precondition: all threads call it, and
// the caller synchronizes the block before using `numbers`.
template <class Program, class Groups, class Result>
__device__ __forceinline__ void load_coefficients(const Program& program, const Groups& groups, const double* residual,
                                                  const Result* grad_output, int64 per_group, int64 sample,
                                                  typename Program::Compute* numbers) {
  using Compute = typename Program::Compute;
  const int count = program.classes();
  for (int c = threadIdx.x; c < count; c += blockDim.x) {
    const int64 group = c < groups.first_class() ? 0 : groups.group_of(sample, c);
    const double upstream = widen<double>(grad_output[per_group ? group : 0]);
    const double* of_cell = residual + 3 * (sample * count + c);
    if constexpr (SharedCoeffs<Program>::kPairs) {
      numbers[c] = static_cast<Compute>(of_cell[1] * upstream);
      numbers[count + c] = static_cast<Compute>((of_cell[0] - of_cell[2]) * upstream);
    } else {
      for (int k = 0; k < 3; ++k) numbers[3 * c + k] = static_cast<Compute>(of_cell[k] * upstream);
    }
  }
}

// Returns the factor of the gradients of the voxel losses.
template <class Program, class Result>
__device__ __forceinline__ typename Program::Compute scale_of_voxels(const Program& program, const double* residual,
                                                                     const Result* grad_output) {
  const double factor = residual[program.space.samples * 3 * program.classes()];
  return static_cast<typename Program::Compute>(factor * widen<double>(grad_output[0]));
}

// Clears the gradients of voxels that do not count.
template <class Program>
__device__ __forceinline__ void clear_uncounted(
    const VoxelTarget (&targets)[Program::kVecSize],
    Pack<typename Program::Input, Program::kVecSize> (&of_classes)[Program::kUnroll]) {
  bool whole = true;
#pragma unroll
  for (int i = 0; i < Program::kVecSize; ++i) whole = whole && targets[i].sound;
  if (whole) return;
  const PackMask<typename Program::Input, Program::kVecSize> mask(targets);
#pragma unroll
  for (int c = 0; c < Program::kClasses; ++c) mask.apply(of_classes[c]);
}

// Returns the memory of PackedStretch, which follows the 3 C coefficients.
template <class Program>
__device__ __forceinline__ void* behind_coefficients(typename Program::Compute* numbers) {
  constexpr int kNumbers = 3 * Program::kLanes * Program::kClasses;
  constexpr int kBytes = kNumbers * static_cast<int>(sizeof(typename Program::Compute));
  return reinterpret_cast<char*>(numbers) + (kBytes + 15) / 16 * 16;
}

// Writes the gradients of one chunk per block. A sample has `chunks` chunks of `vectors_per_chunk` vectors. `numbers`
// is shared memory for 3 C coefficients (SharedCoeffs), followed by the memory of PackedStretch. Preconditions: the
// grid has one block per chunk of all samples; `vectors_per_chunk` is a multiple of blockDim.x / kLanes.
template <bool kInput, bool kTarget, class Program, class Groups, class Result>
__device__ __forceinline__ void write_gradients(const Program& program, const Groups& groups, const double* residual,
                                                const Result* grad_output, int64 per_group, int64 chunks,
                                                int64 vectors_per_chunk, typename Program::Input* input_gradients,
                                                typename Program::Target* target_gradients,
                                                typename Program::Compute* numbers) {
  using Compute = typename Program::Compute;
  constexpr int kVecSize = Program::kVecSize;
  constexpr int kTogether = kVecSize % 2 == 0 && sizeof(typename Program::Input) == 2 ? 2 : 1;
  // Chunk numbers fit in 32 bits, and 32-bit division is faster.
  const unsigned of_sample = static_cast<unsigned>(chunks), chunk = gridDim.x - 1 - blockIdx.x;
  const int64 sample = chunk / of_sample, first = (chunk - sample * chunks) * vectors_per_chunk;
  const int64 vectors = program.space.voxels / kVecSize;
  const SharedCoeffs<Program> coeffs(program, numbers);
  void* const exchanged = behind_coefficients<Program>(numbers);
  Compute voxel_scale = Compute(0);
#pragma unroll 1
  for (int64 turn = 0; turn < vectors_per_chunk && first + turn < vectors; turn += blockDim.x / Program::kLanes) {
    const int64 own = first + turn + Program::Lanes::vector();
    const bool exists = own < vectors;
    // All threads load, because all reach the barrier; with kByWarps, only those that have a vector.
    const int64 vector = exists ? own : vectors - 1;
    const WarpOfVectors warp(exchanged, vectors - own);
    VectorOffsets<Program::kVecSize, Program::kWide> offset;
    program.space.offsets(sample, vector * kVecSize, offset);
    ClassesOf<Program> classes;
    if (exists || !Program::kByWarps) classes.template load<true>(program, offset, warp);
    if (turn == 0) {
      load_coefficients(program, groups, residual, grad_output, per_group, sample, numbers);
      voxel_scale = scale_of_voxels(program, residual, grad_output);
      __syncthreads();
    }
    if (!exists) break;
    if constexpr (Program::kClasses > 0) {
      Pack<typename Program::Input, kVecSize> of_inputs[Program::kUnroll];
      Pack<typename Program::Target, kVecSize> of_targets[Program::kUnroll];
      VoxelTarget targets[kVecSize];
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) targets[i] = voxel_target(program, classes, offset, i);
#pragma unroll
      for (int first = 0; first < kVecSize; first += kTogether) {
        Compute by_input[Program::kUnroll][kTogether];
        Compute by_target[Program::kUnroll][kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const StoreInRegisters<kInput, kTarget, kTogether, Program> store{by_input, by_target, i};
          voxel_gradient<kInput, kTarget>(program, classes, offset, targets[first + i], first + i, coeffs, voxel_scale,
                                          store);
        }
#pragma unroll
        for (int c = 0; c < Program::kClasses; ++c) {
          if constexpr (kInput) put(by_input[c], first, of_inputs[c]);
          if constexpr (kTarget) put(by_target[c], first, of_targets[c]);
        }
      }
      if constexpr (Program::kLabelApart && kInput) clear_uncounted<Program>(targets, of_inputs);
      if constexpr (kInput && Program::kPackedGradients) {
        store_packed<Program>(input_gradients + offset.at(kGradientsOfInputs, 0), warp, of_inputs);
      }
      store_classes<kInput && !Program::kPackedGradients>(program, offset, kGradientsOfInputs, of_inputs,
                                                          input_gradients);
      store_classes<kTarget>(program, offset, kGradientsOfTargets, of_targets, target_gradients);
    } else {
      const VoxelTarget target = voxel_target(program, classes, offset, 0);
      const StoreInMemory<kInput, kTarget, Program> store{
          kInput ? input_gradients + offset.at(kGradientsOfInputs, 0) : nullptr,
          kTarget ? target_gradients + offset.at(kGradientsOfTargets, 0) : nullptr,
          program.space.class_stride[kGradientsOfInputs], program.space.class_stride[kGradientsOfTargets]};
      voxel_gradient<kInput, kTarget>(program, classes, offset, target, 0, coeffs, voxel_scale, store);
    }
  }
}

constexpr int kGradientThreads = 128;  // engines/regions/layout.py: GRADIENT_THREADS

// Copies a tile, of numbers in the arithmetic type or of stored elements, to contiguous gradients: the inverse of
// load_tile(). Preconditions: blockDim.x is kThreads; all threads call it after a barrier.
template <int kThreads, int kPitch, class Program, class Number>
__device__ __forceinline__ void store_packed_tile(const Program& program, int64 sample, int64 begin, int count,
                                                  const Number* tile, typename Program::Input* gradients) {
  using Input = typename Program::Input;
  const int classes = program.classes(), all = count * classes;
  Input* const to = gradients + sample * program.space.sample_stride[kGradientsOfInputs] + begin * classes;
  const unsigned inverse = inverse_of(classes);
  const auto element = [=](int place) {
    const Number x = tile[place];
    if constexpr (kSameType<Number, Input>) {
      return x;
    } else {
      return Narrow<Input>::from(x);
    }
  };
  int singles = 0;
  if (in_pairs(to)) {
    using Places = PairPlaces<kThreads, kPitch>;
    singles = all / 2 * 2;
    Places places(classes);
#pragma unroll 4
    for (int i = 2 * threadIdx.x; i < singles; i += Places::kApart) {
      Pack<Input, 2> pair;
      pair.element[0] = element(places.first);
      pair.element[1] = element(places.second());
      store_pack<2>(to + i, pair);
      places.next();
    }
  }
#pragma unroll 4
  for (int i = singles + threadIdx.x; i < all; i += kThreads) {
    const int voxel = divided(i, inverse);
    to[i] = element((i - voxel * classes) * kPitch + voxel);
  }
}

// Stores the gradients of one voxel of a tile of labels; zeros if the voxel does not count.
template <class Program, class Coeffs, class Store>
__device__ __forceinline__ void tile_gradient(const Program& program, const TileClasses<Program>& classes,
                                              const VectorOffsets<Program::kVecSize, Program::kWide>& offset,
                                              const VoxelTarget& target, const Coeffs& coeffs,
                                              typename Program::Compute voxel_scale, const Store& store) {
  using Compute = typename Program::Compute;
  if (!target.sound) {
    for (int c = 0; c < classes.count(); ++c) store(c, Compute(0), Compute(0));
    return;
  }
  voxel_gradient<true, false>(program, classes, offset, target, 0, coeffs, voxel_scale, store);
}

// Variant of write_gradients() for tiles of kGradientThreads voxels, one per thread. In shared memory, the tile follows
// the 3 C `numbers`, padded to a multiple of 4. Preconditions: blockDim.x is kGradientThreads; the grid has one block
// per chunk; `voxels_per_chunk` is a multiple of kTile.
template <class Program, class Groups, class Result>
__device__ __forceinline__ void write_tile_gradients(const Program& program, const Groups& groups,
                                                     const double* residual, const Result* grad_output, int64 per_group,
                                                     int64 chunks, int64 voxels_per_chunk,
                                                     typename Program::Input* gradients,
                                                     typename Program::Compute* numbers) {
  using Compute = typename Program::Compute;
  static_assert(Program::kTile == kGradientThreads, "a thread for each voxel of a tile");
  const int classes_count = program.classes();
  Compute* const tile = numbers + (3 * classes_count + 3) / 4 * 4;
  // Chunk numbers fit in 32 bits, and 32-bit division is faster.
  const unsigned of_sample = static_cast<unsigned>(chunks), chunk = gridDim.x - 1 - blockIdx.x;
  const int64 sample = chunk / of_sample, first = (chunk - sample * chunks) * voxels_per_chunk;
  const int64 end = min(first + voxels_per_chunk, program.space.voxels);
  const SharedCoeffs<Program> coeffs(program, numbers);
  Compute voxel_scale = Compute(0);
#pragma unroll 1
  for (int64 begin = first; begin < end; begin += Program::kTile) {
    const int count = static_cast<int>(min(end - begin, static_cast<int64>(Program::kTile)));
    load_tile<kGradientThreads>(program, sample, begin, count, tile);
    if (begin == first) {
      load_coefficients(program, groups, residual, grad_output, per_group, sample, numbers);
      voxel_scale = scale_of_voxels(program, residual, grad_output);
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < count) {
      VectorOffsets<Program::kVecSize, Program::kWide> offset;
      program.space.offsets(sample, begin + threadIdx.x, offset);
      const TileClasses<Program> classes(program, tile, threadIdx.x, offset);
      const VoxelTarget target = voxel_target(program, classes, offset, 0);
      if constexpr (Program::kPackedGradients) {
        tile_gradient(program, classes, offset, target, coeffs, voxel_scale, StoreInTile<Program>{classes});
      } else {
        const StoreInMemory<true, false, Program> store{gradients + offset.at(kGradientsOfInputs, 0), nullptr,
                                                        program.space.class_stride[kGradientsOfInputs], 0};
        tile_gradient(program, classes, offset, target, coeffs, voxel_scale, store);
      }
    }
    __syncthreads();
    if constexpr (Program::kPackedGradients) {
      store_packed_tile<kGradientThreads, TileClasses<Program>::kPitch>(program, sample, begin, count, tile, gradients);
      __syncthreads();
    }
  }
}

// Writes gradients for labels, with logits and labels staged through shared memory (StagedVectors). Chunks are those of
// kernel 1. Each block writes the gradients of one piece of a chunk, from its last vectors to its first; the first
// blocks take the last pieces of all chunks, which kernel 1 read last. In shared memory, the staged vectors follow the
// 3 C `numbers`, padded to a multiple of 4. Preconditions: blockDim.x is kGradientThreads; the grid has one block per
// piece; `vectors_per_piece` is a multiple of blockDim.x.
template <class Program, class Groups, class Result>
__device__ __forceinline__ void write_staged_gradients(const Program& program, const Groups& groups,
                                                       const double* residual, const Result* grad_output,
                                                       int64 per_group, int64 chunks, int64 vectors_per_chunk,
                                                       int64 vectors_per_piece, typename Program::Input* gradients,
                                                       typename Program::Compute* numbers) {
  using Compute = typename Program::Compute;
  constexpr int kCoeffs = (3 * Program::kClasses + 3) / 4 * 4;
  constexpr int kVecSize = Program::kVecSize;
  constexpr int kTogether = kVecSize % 2 == 0 && sizeof(typename Program::Input) == 2 ? 2 : 1;
  // Piece and chunk numbers fit in 32 bits, and 32-bit division is faster.
  const unsigned of_sample = static_cast<unsigned>(chunks);
  const unsigned all = of_sample * static_cast<unsigned>(program.space.samples);
  const unsigned piece = blockIdx.x / all, chunk = blockIdx.x - piece * all;
  const int64 sample = chunk / of_sample, begin = (chunk - sample * of_sample) * vectors_per_chunk;
  const int64 piece_end = begin + vectors_per_chunk - piece * vectors_per_piece;
  const int64 first = max(begin, piece_end - vectors_per_piece), end = min(piece_end, program.space.voxels / kVecSize);
  if (first >= end) return;
  const SharedCoeffs<Program> coeffs(program, numbers);
  int64 vector = end - kGradientThreads + threadIdx.x;
  const int count = vector < first ? 0 : static_cast<int>(vector - first) / kGradientThreads + 1;
  VectorOffsets<kVecSize, Program::kWide> offset;
  program.space.offsets(sample, max(vector, first) * kVecSize, offset);
  StagedVectors<Program, kGradientThreads> staged(numbers + kCoeffs, program, offset, -kGradientThreads);
  typename Program::Input* to = gradients + offset.at(kGradientsOfInputs, 0);
  staged.copy(count > 0);
  load_coefficients(program, groups, residual, grad_output, per_group, sample, numbers);
  const Compute voxel_scale = scale_of_voxels(program, residual, grad_output);
  __syncthreads();
#pragma unroll 1
  for (int turn = 0; turn < count; ++turn) {
    staged.copy(turn + 1 < count);
    ClassesOf<Program> classes;
    classes.t[0] = staged.wait();
    if constexpr (Program::kMasked) program.space.offsets(sample, vector * kVecSize, offset);
    Compute label_logits[kVecSize];
    VoxelTarget targets[kVecSize];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      targets[i] = voxel_target(program, classes, offset, i);
      label_logits[i] = staged.take_label(targets[i].label, i);
    }
    staged.take(classes.x);
    Pack<typename Program::Input, kVecSize> of_inputs[Program::kUnroll];
#pragma unroll
    for (int at = 0; at < kVecSize; at += kTogether) {
      Compute by_input[Program::kUnroll][kTogether];
      Compute by_target[Program::kUnroll][kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const StoreInRegisters<true, false, kTogether, Program> store{by_input, by_target, i};
        VoxelSoftmax<Program> softmax;
        softmax.template find_apart<true>(classes, at + i, targets[at + i], label_logits[at + i]);
        label_gradient<0u>(program, classes, softmax, targets[at + i], at + i, coeffs, voxel_scale, store);
      }
#pragma unroll
      for (int c = 0; c < Program::kClasses; ++c) put(by_input[c], at, of_inputs[c]);
    }
    clear_uncounted<Program>(targets, of_inputs);
#pragma unroll
    for (int c = 0; c < Program::kClasses; ++c) {
      // Evict-first, as in store_voxels().
      store_stream<kVecSize>(to + c * program.space.class_stride[kGradientsOfInputs], of_inputs[c]);
    }
    to -= kGradientThreads * kVecSize;
    vector -= kGradientThreads;
  }
}
