// Region losses: value from one read of the operands, gradients from a second.
//
//   kernel 1   sums.cuh, then in the block that arrives last groups.cuh: value, and residual[n, c], the derivatives by
//              I, FP and FN of each cell
//   kernel 2   here: with g_c the derivative by p_c that follows from the residual,
//              softmax         d/dx_c = p_c (g_c - sum_j p_j g_j)
//              sigmoid         d/dx_c = p_c (1 - p_c) g_c
//              probabilities   d/dx_c = g_c
//              and the gradient of the loss of the voxel, and d/dt_c of targets per class
//
// g_c - sum p_j g_j would cancel for a class that is nearly certain. With h_c = g_c - g_m for the largest class m it is
// h_c - sum p_j h_j, in which h_m is 0.
//
// 1. A block has part of a sample. Its threads load the sample's coefficients into shared memory, times grad_output.
// 2. A thread takes vectors of voxels in turn, in registers if there are few classes; otherwise it reads them three
//    times, of which L1 and L2 serve two.
//
// Traffic: input and target twice in all, each gradient written once.
#pragma once
#include "regions/groups.cuh"

// Gradients of one voxel, which `store(c, by input, by target)` takes.
template <bool kInput, bool kTarget, class Program, class Classes, class Coeffs, class Store>
__device__ __forceinline__ void voxel_gradient(const Program& program, const Classes& classes,
                                               const VoxelTarget& target, int i, const Coeffs& coeffs,
                                               typename Program::Compute voxel_scale, const Store& store) {
  using Compute = typename Program::Compute;
  if (!target.sound) {
#pragma unroll(Program::kUnroll)
    for (int c = 0; c < program.classes(); ++c) store(c, Compute(0), Compute(0));
    return;
  }
  VoxelSoftmax<Program> softmax;
  if constexpr (Program::kNeedsSoftmax) softmax.find(program, classes, i, target.label);
  GradCoeffs<Compute> row{Compute(0), Compute(0), Compute(0), Compute(0)};
  if constexpr (Program::kVoxel == kRow) row = voxel_row(program, classes, softmax, target.label, i).grad_coeffs;
  Compute log_sum = Compute(0), of_terms = Compute(0);
  if constexpr (Program::kVoxel == kTerm) {
    // The derivatives of all terms by their log p_c.
    log_sum = log_of_sum(softmax);
#pragma unroll(Program::kUnroll)
    for (int c = 0; c < program.classes(); ++c) {
      const auto y = program.loss(variable<1u, 0>(log_probability(classes, softmax, c, i, log_sum)),
                                  variable<0u, 1>(target_of<Program>(classes, target, c, i)),
                                  variable<0u, 2>(program.weight(c)), variable<0u, 3>(Compute(program.space.classes)));
      of_terms += tangent_or_zero(y, 0);
    }
  }
  // For a softmax: the derivative by p of the largest class, and the mean of the others' differences to it.
  Compute at_largest = Compute(0), mean = Compute(0);
  if constexpr (Program::kActivation == kSoftmax) {
#pragma unroll(Program::kUnroll)
    for (int c = 0; c < program.classes(); ++c) {
      const Compute e = softmax.exponential(classes, c, i);
      const Probability<Compute> p = probability(program, classes, softmax, c, i);
      const Compute g = derivative_by_p<Program::kOverlap>(coeffs(c), p, target_of<Program>(classes, target, c, i));
      at_largest = e == Compute(1) ? g : at_largest;
    }
#pragma unroll(Program::kUnroll)
    for (int c = 0; c < program.classes(); ++c) {
      const Probability<Compute> p = probability(program, classes, softmax, c, i);
      const Compute g = derivative_by_p<Program::kOverlap>(coeffs(c), p, target_of<Program>(classes, target, c, i));
      mean += p.p * (g - at_largest);
    }
  }
#pragma unroll(Program::kUnroll)
  for (int c = 0; c < program.classes(); ++c) {
    const Probability<Compute> p = probability(program, classes, softmax, c, i);
    const Compute t = target_of<Program>(classes, target, c, i);
    const Summands<Compute> of_cell = coeffs(c);
    const Compute g = derivative_by_p<Program::kOverlap>(of_cell, p, t);
    Compute by_input = g, by_target = Compute(0);
    if constexpr (Program::kActivation == kSoftmax) by_input = p.p * ((g - at_largest) - mean);
    if constexpr (Program::kActivation == kSigmoid) by_input = p.p * p.rest * g;
    if constexpr (kTarget) by_target = derivative_by_t<Program::kOverlap>(of_cell, p, t);
    if constexpr (Program::kVoxel == kRow) {
      Compute of_row = row.exp_coeff * softmax.exponential(classes, c, i);
      if constexpr (Program::kSmoothed) of_row -= row.weight_coeff * program.weight(c);
      by_input += voxel_scale * (c == target.label ? row.target : of_row);
    } else if constexpr (Program::kVoxel == kTerm) {
      constexpr unsigned kMask = kTarget ? 3u : 1u;
      const auto y = program.loss(variable<kMask & 1u, 0>(log_probability(classes, softmax, c, i, log_sum)),
                                  variable<kMask & 2u, 1>(t), variable<0u, 2>(program.weight(c)),
                                  variable<0u, 3>(Compute(program.space.classes)));
      const Compute share = softmax.exponential(classes, c, i) * softmax.inv_sum;
      by_input += voxel_scale * (tangent_or_zero(y, 0) - share * of_terms);
      by_target += voxel_scale * tangent_or_zero(y, 1);
    } else if constexpr (Program::kVoxel == kElement) {
      constexpr unsigned kMask = kTarget ? 3u : 1u;
      const auto y = program.loss(variable<kMask & 1u, 0>(classes.input(c, i)), variable<kMask & 2u, 1>(t),
                                  variable<0u, 2>(program.weight(c)), variable<0u, 3>(Compute(program.space.classes)));
      by_input += voxel_scale * tangent_or_zero(y, 0);
      by_target += voxel_scale * tangent_or_zero(y, 1);
    }
    store(c, by_input, by_target);
  }
}

// The coefficients of a sample in shared memory, three numbers per class.
template <class Compute>
struct SharedCoeffs {
  const Compute* numbers;
  __device__ __forceinline__ Summands<Compute> operator()(int c) const {
    return {numbers[3 * c], numbers[3 * c + 1], numbers[3 * c + 2]};
  }
};

// Gradients of the kClasses x kVecSize elements of a thread, which overwrite its logits.
template <bool kInput, bool kTarget, class Program>
struct StoreInPacks {
  using Compute = typename Program::Compute;
  Pack<typename Program::Input, Program::kVecSize> (&inputs)[Program::kUnroll];
  Pack<typename Program::Target, Program::kVecSize> (&targets)[Program::kUnroll];
  int i;
  __device__ __forceinline__ void operator()(int c, Compute by_input, Compute by_target) const {
    if constexpr (kInput) inputs[c].element[i] = Narrow<typename Program::Input>::from(by_input);
    if constexpr (kTarget) targets[c].element[i] = Narrow<typename Program::Target>::from(by_target);
  }
};

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

template <class Program, class Storage>
__device__ __forceinline__ void store_voxels(Storage* to,
                                             const VectorOffsets<Program::kVecSize, Program::kWide>& offset, int stream,
                                             const Pack<Storage, Program::kVecSize>& pack) {
  if constexpr (Program::kWide) {
    store_pack<Program::kVecSize>(to + offset.at(stream, 0), pack);
  } else {
#pragma unroll
    for (int i = 0; i < Program::kVecSize; ++i) to[offset.at(stream, i)] = pack.element[i];
  }
}

// `numbers` are 3 C of Compute in shared memory. `group_of` gives the group of a class of a sample, for grad_output.
template <bool kInput, bool kTarget, class Program, class Groups, class Result>
__device__ __forceinline__ void write_gradients(const Program& program, const Groups& groups, const double* residual,
                                                const Result* grad_output, int64 per_group, int64 blocks_per_sample,
                                                typename Program::Input* input_gradients,
                                                typename Program::Target* target_gradients,
                                                typename Program::Compute* numbers) {
  using Compute = typename Program::Compute;
  constexpr int kVecSize = Program::kVecSize;
  const int64 sample = blockIdx.x / blocks_per_sample, part = blockIdx.x - sample * blocks_per_sample;
  const int count = program.classes();
  for (int k = threadIdx.x; k < 3 * count; k += blockDim.x) {
    const int c = k / 3;
    const int64 group = c < groups.first_class() ? 0 : groups.group_of(sample, c);
    const double upstream = widen<double>(grad_output[per_group ? group : 0]);
    numbers[k] = static_cast<Compute>(residual[sample * 3 * count + k] * upstream);
  }
  const Compute voxel_scale =
      static_cast<Compute>(residual[program.space.samples * 3 * count] * widen<double>(grad_output[0]));
  __syncthreads();
  const SharedCoeffs<Compute> coeffs{numbers};
  const int64 vectors = program.space.voxels / kVecSize;
#pragma unroll 1
  for (int64 vector = part * blockDim.x + threadIdx.x; vector < vectors; vector += blocks_per_sample * blockDim.x) {
    VectorOffsets<Program::kVecSize, Program::kWide> offset;
    program.space.offsets(sample, vector * kVecSize, offset);
    ClassesOf<Program> classes;
    classes.template load<true>(program, offset);
    if constexpr (Program::kClasses > 0) {
      Pack<typename Program::Input, kVecSize> of_inputs[Program::kUnroll];
      Pack<typename Program::Target, kVecSize> of_targets[Program::kUnroll];
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        const VoxelTarget target = voxel_target(program, classes, offset, i);
        const StoreInPacks<kInput, kTarget, Program> store{of_inputs, of_targets, i};
        voxel_gradient<kInput, kTarget>(program, classes, target, i, coeffs, voxel_scale, store);
      }
#pragma unroll
      for (int c = 0; c < Program::kClasses; ++c) {
        if constexpr (kInput) {
          store_voxels<Program>(input_gradients + c * program.space.class_stride[kGradientsOfInputs], offset,
                                kGradientsOfInputs, of_inputs[c]);
        }
        if constexpr (kTarget) {
          store_voxels<Program>(target_gradients + c * program.space.class_stride[kGradientsOfTargets], offset,
                                kGradientsOfTargets, of_targets[c]);
        }
      }
    } else {
      const VoxelTarget target = voxel_target(program, classes, offset, 0);
      const StoreInMemory<kInput, kTarget, Program> store{
          kInput ? input_gradients + offset.at(kGradientsOfInputs, 0) : nullptr,
          kTarget ? target_gradients + offset.at(kGradientsOfTargets, 0) : nullptr,
          program.space.class_stride[kGradientsOfInputs], program.space.class_stride[kGradientsOfTargets]};
      voxel_gradient<kInput, kTarget>(program, classes, target, 0, coeffs, voxel_scale, store);
    }
  }
}
