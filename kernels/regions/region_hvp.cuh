// Second derivatives of region losses (Hessian-vector products, HVP), along a tangent v of the input:
//
//   kernel 1   the sums of every sample and class, and their tangents along v; here, in tiles.cuh or in sums.cuh
//   kernel 2   groups.cuh on numbers with a tangent: the derivative of the value along v, and coefficients[n, c], the
//              derivatives by I, FP and FN of each cell with their tangents
//   kernel 3   here or in tiles.cuh: the tangent of the gradient of each voxel, from the coefficients
//
// 1. Each input is a NestedDual (nested.cuh): the value and its tangent. So are the coefficients. Softmax, sums,
//    formula and gradients are the same functions as without a tangent.
// 2. Storing a NestedDual stores its tangent.
// 3. As in first derivatives, few classes are in registers, of one thread or of lanes that share a voxel; the limits
//    are lower. More classes are in tiles (tiles.cuh), or are read from memory at every use.
//
// Traffic: input, tangent and target are read twice in total; each product is written once. Order of additions: depends
// on sizes only. Preconditions: tangents have the same layout as the gradient of the input, and share its stream
// (kGradientsOfInputs).
#pragma once
#include "core/nested.cuh"
#include "regions/tiles.cuh"
#include "softmax/second_derivatives.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// Functions of groups and sums

template <class T, bool kGuarded>
__device__ __forceinline__ T value_of(NestedDual<T, kGuarded> x) {
  return x.value;
}
template <class T, bool kGuarded>
__device__ __forceinline__ T tangent_of(NestedDual<T, kGuarded> x) {
  return x.tangent;
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> with_tangent_of(T value, NestedDual<T, kGuarded> x) {
  return {value, x.tangent};
}
// The tangent is 0 already, because max_logit has the tangent of the label's logit.
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> without_label(bool is_label, NestedDual<T, kGuarded> e) {
  return {is_label ? T(0) : e.value, e.tangent};
}
template <class T, bool kGuarded>
__device__ __forceinline__ bool all_finite(NestedDual<T, kGuarded> x) {
  return is_finite(x.value) && is_finite(x.tangent);
}
template <class T, unsigned kMask>
__device__ __forceinline__ NestedDual<T, false> tried_result(const Dual<NestedDual<T, false>, kMask>& loss) {
  NestedDual<T, false> x = loss.value;
  for_each_slot<kMask>([&](int k) { x.tangent += loss.tangent[k].tangent; });
  return x;
}
// guarded() selects products in which 0 * inf does not arise (kGuarded in nested.cuh). Derivatives of an overlap are
// never infinite and need no guard. Those of a voxel loss may be, so they are guarded unless the loss is evaluated
// tentatively.
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, true> guarded(NestedDual<T, kGuarded> x) {
  return {x.value, x.tangent};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, false> unguarded(NestedDual<T, kGuarded> x) {
  return {x.value, x.tangent};
}
template <class T>
__device__ __forceinline__ NestedDual<T, false> scaled_by(NestedDual<T, false> scale, NestedDual<T, true> derivative) {
  return unguarded(guarded(scale) * derivative);
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<double> as_double(NestedDual<T, kGuarded> x) {
  return {static_cast<double>(x.value), static_cast<double>(x.tangent)};
}
template <class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> shuffled_number(unsigned mask, NestedDual<T, kGuarded> x, int lane) {
  return {shuffled_number(mask, x.value, lane), shuffled_number(mask, x.tangent, lane)};
}
__device__ __forceinline__ double without_tangent(NestedDual<double> x) {
  return x.value;
}
__device__ __forceinline__ NestedDual<double> warp_total(NestedDual<double> x) {
  return {warp_sum(x.value), warp_sum(x.tangent)};
}
__device__ __forceinline__ NestedDual<double> block_total(NestedDual<double> x) {
  const double value = block_sum(x.value);
  __syncthreads();
  return {value, block_sum(x.tangent)};
}
__device__ __forceinline__ NestedDual<double> log(NestedDual<double> x) {
  return {log(x.value), x.tangent == 0.0 ? 0.0 : x.tangent / x.value};
}
__device__ __forceinline__ NestedDual<double> log1p(NestedDual<double> x) {
  return {log1p(x.value), x.tangent == 0.0 ? 0.0 : x.tangent / (1.0 + x.value)};
}
// Precondition: x > 0.
__device__ __forceinline__ NestedDual<double> pow(NestedDual<double> x, double exponent) {
  return {pow(x.value, exponent), scaled_tangent(exponent * pow(x.value, exponent - 1.0), x.tangent)};
}

// Accurate to 2^-16 where logits have 16 bits, whatever the dtype of the results.
template <class Input, class T, bool kGuarded>
__device__ __forceinline__ NestedDual<T, kGuarded> difference_exponential(NestedDual<T, kGuarded> x,
                                                                          NestedDual<T, kGuarded> max_logit) {
  T e;
  if constexpr (sizeof(Input) == 2 && kSingle<T>) {
    e = exp2_of_difference(x.value, max_logit.value);
  } else {
    e = exp_nonpositive(x.value - max_logit.value);
  }
  return {e, tangent_product<kGuarded>(e, x.tangent - max_logit.tangent)};
}

// ---------------------------------------------------------------------------------------------------------------------
// Voxels

// A RegionProgram with tangents of the input. `Base` is a RegionProgram that computes on NestedDual.
template <class Base>
struct RegionHvpProgram : Base {
  using Compute = typename Base::Compute;
  using Scalar = decltype(Compute::value);
  const typename Base::Input* tangents;

  // Returns the logit of class c of voxel i, with its tangent.
  __device__ __forceinline__ Compute logit(const VectorOffsets<Base::kVecSize, Base::kWide>& offset, int i,
                                           int64 c) const {
    const auto& stride = this->space.class_stride;
    return {widen<Scalar>(this->input[Base::first_class(offset, kInputs, i) + c * stride[kInputs]]),
            widen<Scalar>(tangents[Base::first_class(offset, kGradientsOfInputs, i) + c * stride[kGradientsOfInputs]])};
  }
};

// Classes of kVecSize neighbouring voxels with their tangents, as they are stored: ClassesOf for NestedDual.
template <class Program, bool kOnChip = (Program::kClasses > 0)>
struct ClassesWithTangents {
  using Compute = typename Program::Compute;
  using Scalar = decltype(Compute::value);
  static constexpr int kVecSize = Program::kVecSize;
  Pack<typename Program::Input, kVecSize> x[Program::kClasses];
  Pack<typename Program::Input, kVecSize> v[Program::kClasses];
  Pack<typename Program::Target, kVecSize> t[Program::kDense ? Program::kClasses : 1];

  template <bool kLast>
  __device__ __forceinline__ void load(const Program& program, const VectorOffsets<kVecSize, Program::kWide>& offset,
                                       const WarpOfVectors& warp) {
    const auto& stride = program.space.class_stride;
    if constexpr (Program::kPackedInput && Program::kByWarps) {
      const PackedStretch<Program> inputs(warp.memory, 0, warp.lanes), tangents(warp.memory, 1, warp.lanes);
      inputs.synchronize();  // all lanes have read the previous vectors
      inputs.start(program.input + offset.at(kInputs, 0));
      tangents.start(program.tangents + offset.at(kGradientsOfInputs, 0));
      inputs.wait();
      inputs.take(x);
      tangents.take(v);
    } else if constexpr (Program::kPackedInput) {
      PackedVector<Program>::load(program.input + offset.at(kInputs, 0), x);
      PackedVector<Program>::load(program.tangents + offset.at(kGradientsOfInputs, 0), v);
    } else {
      const int64 first = program.first_own();
      const auto* const logits = program.input + first * stride[kInputs];
      const auto* const own_tangents = program.tangents + first * stride[kGradientsOfInputs];
#pragma unroll
      for (int c = 0; c < Program::kClasses; ++c) {
        if (!program.has(c)) {
          x[c] = no_logits<Program>();
          v[c] = Pack<typename Program::Input, kVecSize>{};
          continue;
        }
        x[c] = load_voxels<kLast, Program>(logits + c * stride[kInputs], offset, kInputs);
        v[c] = load_voxels<kLast, Program>(own_tangents + c * stride[kGradientsOfInputs], offset, kGradientsOfInputs);
      }
    }
    load_target_vectors<kLast>(program, offset, t);
  }
  static __device__ __forceinline__ int count() {
    return Program::kClasses;
  }
  __device__ __forceinline__ Compute input(int c, int i) const {
    return {widen_element<Scalar>(x[c], i), widen_element<Scalar>(v[c], i)};
  }
  __device__ __forceinline__ Scalar largest(int i) const {
    return largest_logit<Scalar>(x, i);
  }
  // Clears the logits and tangents of voxels that do not count.
  __device__ __forceinline__ void keep(const PackMask<typename Program::Input, kVecSize>& mask) {
#pragma unroll
    for (int c = 0; c < Program::kClasses; ++c) {
      mask.apply(x[c]);
      mask.apply(v[c]);
    }
  }
  __device__ __forceinline__ Compute target(int c, int i) const {
    return Compute(widen<Scalar>(t[Program::kDense ? c : 0].element[i]));
  }
  __device__ __forceinline__ int64 label(int i) const {
    return static_cast<int64>(t[0].element[i]);
  }
};

// Classes of one voxel with their tangents, read from memory at every use.
template <class Program>
struct ClassesWithTangents<Program, false> {
  using Compute = typename Program::Compute;
  using Scalar = decltype(Compute::value);
  const typename Program::Input* x;
  const typename Program::Input* v;
  const typename Program::Target* t;
  int64 stride, tangent_stride, target_stride;

  template <bool kLast>
  __device__ __forceinline__ void load(const Program& program,
                                       const VectorOffsets<Program::kVecSize, Program::kWide>& offset,
                                       const WarpOfVectors&) {
    x = program.input + offset.at(kInputs, 0);
    v = program.tangents + offset.at(kGradientsOfInputs, 0);
    t = program.target + offset.at(kTargets, 0);
    stride = program.space.class_stride[kInputs];
    tangent_stride = program.space.class_stride[kGradientsOfInputs];
    target_stride = program.space.class_stride[kTargets];
  }
  __device__ __forceinline__ Compute input(int c, int) const {
    return {widen<Scalar>(load_pack<1>(x + c * stride).element[0]),
            widen<Scalar>(load_pack<1>(v + c * tangent_stride).element[0])};
  }
  __device__ __forceinline__ Compute target(int c, int) const {
    return Compute(widen<Scalar>(load_pack<1>(t + c * target_stride).element[0]));
  }
  __device__ __forceinline__ int64 label(int) const {
    return static_cast<int64>(*t);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Sums

// Determines the targets of a vector; with kLabelApart, clears the logits of voxels that do not count.
template <class Program, class Classes>
__device__ __forceinline__ void find_targets(const Program& program, Classes& classes,
                                             const VectorOffsets<Program::kVecSize, Program::kWide>& offset,
                                             VoxelTarget (&targets)[Program::kVecSize]) {
  bool whole = true;
#pragma unroll
  for (int i = 0; i < Program::kVecSize; ++i) {
    targets[i] = voxel_target(program, classes, offset, i);
    whole = whole && targets[i].sound;
  }
  if constexpr (Program::kLabelApart) {
    if (!whole) classes.keep(PackMask<typename Program::Input, Program::kVecSize>(targets));
  }
}

// Adds up numbers kBegin to kEnd, with their tangents, over the threads of a warp that have the same classes, half as
// many numbers at a time as there are such threads. The sum of number k over the lanes at place g of their groups goes
// to of_warp[2 * ((k - kFirst) * kLanes + g)], followed by its tangent. Each thread reads only its own elements of
// `columns`. Precondition: all lanes of the warp call it together.
template <int kFirst, int kBegin, int kEnd, class Program, class Sums>
__device__ __forceinline__ void sum_of_threads(const Sums& sums, const typename Sums::Compute* columns,
                                               double* of_warp) {
  constexpr int kMost = Program::Lanes::kVectors / 2, kCount = kEnd - kBegin < kMost ? kEnd - kBegin : kMost;
  double numbers[2 * kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int k = kBegin + i;
    const auto own = as_double(k < Sums::kInColumns ? columns[k * kSumThreads + threadIdx.x]
                                                    : sums.number(k < Sums::kInColumns ? 0 : k - Sums::kInColumns));
    numbers[2 * i] = own.value;
    numbers[2 * i + 1] = own.tangent;
  }
  int place;
  const double sum = scattered_warp_sum<kMost>(numbers, place);
  const int number = kBegin - kFirst + place / 2;
  if (place < 2 * kCount) of_warp[2 * (number * Program::kLanes + Program::Lanes::place()) + place % 2] = sum;
  if constexpr (kBegin + kCount < kEnd) sum_of_threads<kFirst, kBegin + kCount, kEnd, Program>(sums, columns, of_warp);
}

// Adds up the numbers of all threads of a block from kFirst on, in batches, and stores them as numbers of a chunk.
// Precondition: all threads call it together.
template <int kFirst, class Program, class Sums>
__device__ __forceinline__ void store_sums(const Program& program, const Sums& sums,
                                           const typename Sums::Compute* columns, double* of_warps,
                                           NestedDual<double>* partials) {
  constexpr int kNumbers = Sums::kInColumns + Sums::kInRegisters;
  constexpr int kBatch = kSumsOfWarp<Program> / (2 * Program::kLanes);
  constexpr int kEnd = kNumbers - kFirst < kBatch ? kNumbers : kFirst + kBatch, kPerWarp = kSumsOfWarp<Program>;
  __syncwarp();
  __syncthreads();  // the numbers of the previous batch have been read
  sum_of_threads<kFirst, kFirst, kEnd, Program>(sums, columns, of_warps + kPerWarp * (threadIdx.x / kWarp));
  __syncthreads();
  store_numbers<kSumWarps, kPerWarp / 2, Program, Sums>(
      program, kFirst, kEnd - kFirst, reinterpret_cast<const NestedDual<double>*>(of_warps), partials);
  if constexpr (kEnd < kNumbers) store_sums<kEnd>(program, sums, columns, of_warps, partials);
}

// Computes the sums of chunks of `vectors_per_chunk` vectors, with classes in registers: sum_in_registers() with
// tangents. Threads of a warp exchange numbers by shuffles: no label is reported here, so the loop over voxels has no
// atomic. `columns` is shared memory for the columns of ThreadSums, followed by the memory of PackedStretch.
template <class Program>
__device__ __forceinline__ void sum_with_tangents(const Program& program, int64 chunks, int64 vectors_per_chunk,
                                                  NestedDual<double>* partials, typename Program::Compute* columns) {
  using Compute = typename Program::Compute;
  using Sums = ThreadSums<Program>;
  constexpr int kVecSize = Program::kVecSize, kApart = kSumThreads / Program::kLanes;
  // The next vector is loaded while the current one is added, where registers suffice: with four blocks per
  // multiprocessor (up to 24 bytes of logits) for up to 8 bytes of logits, with two blocks for up to 32 bytes.
  constexpr int kLogitBytes = Program::kClasses * kVecSize * static_cast<int>(sizeof(Compute)) / 2;
  constexpr bool kAhead = kLogitBytes <= 8 || (kLogitBytes > 24 && kLogitBytes <= 32);
  __shared__ double of_warps[kSumWarps * kSumsOfWarp<Program>];  // doubles, because NestedDual has constructors
  const int64 vectors = program.space.voxels / kVecSize;
  void* const exchanged = columns + Sums::kInColumns * kSumThreads;
  const unsigned of_sample = static_cast<unsigned>(chunks);
  const unsigned total = of_sample * static_cast<unsigned>(program.space.samples);
#pragma unroll 1
  for (unsigned chunk = blockIdx.x; chunk < total; chunk += gridDim.x) {
    const int64 sample = chunk / of_sample, first = (chunk - sample * of_sample) * vectors_per_chunk;
    Sums sums(columns);
    const int64 end = min(first + vectors_per_chunk, vectors);
    ClassesWithTangents<Program> next;
    const auto load_next = [&](int64 vector) {
      if (vector >= end) return;
      VectorOffsets<kVecSize, Program::kWide> offset;
      program.space.offsets(sample, vector * kVecSize, offset);
      next.template load<false>(program, offset, WarpOfVectors(exchanged, end - vector));
    };
    if constexpr (kAhead) load_next(first + Program::Lanes::vector());
#pragma unroll 1
    for (int64 vector = first + Program::Lanes::vector(); vector < end; vector += kApart) {
      VectorOffsets<kVecSize, Program::kWide> offset;
      program.space.offsets(sample, vector * kVecSize, offset);
      ClassesWithTangents<Program> classes;
      if constexpr (kAhead) {
        classes = next;
        load_next(vector + kApart);
      } else {
        classes.template load<false>(program, offset, WarpOfVectors(exchanged, end - vector));
      }
      VoxelTarget targets[kVecSize];
      find_targets(program, classes, offset, targets);
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        if (targets[i].spoilt && Program::Lanes::place() == 0) sums.spoilt += Compute(1);
        const auto find_softmax = [&](VoxelSoftmax<Program>& softmax, int i) {
          if constexpr (Program::kLabelApart) {
            const Compute logit = program.logit(offset, i, targets[i].label);
            softmax.template find_apart<false>(classes, i, targets[i], logit);
          }
        };
        add_voxel(program, classes, targets[i], i, find_softmax, sums);
      }
    }
    store_sums<0>(program, sums, columns, of_warps, partials + chunk * (3 * int64(program.classes()) + 3));
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Products

// Overload of load_coefficients() for coefficients with tangents.
template <class Program, class Groups, class Result>
__device__ __forceinline__ void load_coefficients(const Program& program, const Groups& groups,
                                                  const NestedDual<double>* coefficients, const Result* grad_output,
                                                  int64 per_group, int64 sample, typename Program::Compute* numbers) {
  using Compute = typename Program::Compute;
  using Scalar = decltype(Compute::value);
  const int count = program.classes();
  const auto narrowed = [](NestedDual<double> x) {
    return Compute{static_cast<Scalar>(x.value), static_cast<Scalar>(x.tangent)};
  };
  for (int c = threadIdx.x; c < count; c += blockDim.x) {
    const int64 group = c < groups.first_class() ? 0 : groups.group_of(sample, c);
    const NestedDual<double> upstream(widen<double>(grad_output[per_group ? group : 0]));
    const NestedDual<double>* of_cell = coefficients + 3 * (sample * count + c);
    if constexpr (SharedCoeffs<Program>::kPairs) {
      numbers[c] = narrowed(of_cell[1] * upstream);
      numbers[count + c] = narrowed((of_cell[0] - of_cell[2]) * upstream);
    } else {
      for (int k = 0; k < 3; ++k) numbers[3 * c + k] = narrowed(of_cell[k] * upstream);
    }
  }
}

// Overload of scale_of_voxels(): the factor is a constant in every derivative, so it has no tangent.
template <class Program, class Result>
__device__ __forceinline__ typename Program::Compute scale_of_voxels(const Program& program,
                                                                     const NestedDual<double>* coefficients,
                                                                     const Result* grad_output) {
  using Compute = typename Program::Compute;
  const double factor = coefficients[program.space.samples * 3 * program.classes()].value;
  return Compute(static_cast<decltype(Compute::value)>(factor * widen<double>(grad_output[0])));
}

// Stores the tangents of the gradients of kCount voxels in registers.
template <bool kInput, bool kTarget, int kCount, class Program>
struct StoreTangents {
  using Compute = typename Program::Compute;
  using Scalar = decltype(Compute::value);
  Scalar (&inputs)[Program::kUnroll][kCount];
  Scalar (&targets)[Program::kUnroll][kCount];
  int i;
  __device__ __forceinline__ void operator()(int c, Compute by_input, Compute by_target) const {
    if constexpr (kInput) inputs[c][i] = by_input.tangent;
    if constexpr (kTarget) targets[c][i] = by_target.tangent;
  }
};

// Stores the tangents of the gradients of one voxel directly in global memory.
template <bool kInput, bool kTarget, class Program>
struct StoreTangentsInMemory {
  using Compute = typename Program::Compute;
  typename Program::Input* inputs;
  typename Program::Target* targets;
  int64 stride, target_stride;
  __device__ __forceinline__ void operator()(int c, Compute by_input, Compute by_target) const {
    if constexpr (kInput) inputs[c * stride] = Narrow<typename Program::Input>::from(by_input.tangent);
    if constexpr (kTarget) targets[c * target_stride] = Narrow<typename Program::Target>::from(by_target.tangent);
  }
};

// Writes the products of the chunk of this block. A sample has `chunks` chunks of `vectors_per_chunk` vectors.
// `numbers` is shared memory for 3 C coefficients (SharedCoeffs), followed by the memory of PackedStretch.
// Precondition: the grid has one block per chunk of all samples.
template <bool kInput, bool kTarget, class Program, class Groups, class Result>
__device__ __forceinline__ void write_products(const Program& program, const Groups& groups,
                                               const NestedDual<double>* coefficients, const Result* grad_output,
                                               int64 per_group, int64 chunks, int64 vectors_per_chunk,
                                               typename Program::Input* input_gradients,
                                               typename Program::Target* target_gradients,
                                               typename Program::Compute* numbers) {
  using Compute = typename Program::Compute;
  using Scalar = decltype(Compute::value);
  constexpr int kVecSize = Program::kVecSize;
  constexpr int kTogether = kVecSize % 2 == 0 && sizeof(typename Program::Input) == 2 ? 2 : 1;
  const unsigned of_sample = static_cast<unsigned>(chunks);
  const int64 sample = blockIdx.x / of_sample, first = (blockIdx.x - sample * of_sample) * vectors_per_chunk;
  const int64 end = min(first + vectors_per_chunk, program.space.voxels / kVecSize);
  load_coefficients(program, groups, coefficients, grad_output, per_group, sample, numbers);
  const Compute voxel_scale = scale_of_voxels(program, coefficients, grad_output);
  const SharedCoeffs<Program> coeffs(program, numbers);
  void* const exchanged = behind_coefficients<Program>(numbers);
  __syncthreads();
#pragma unroll 1
  for (int64 vector = first + Program::Lanes::vector(); vector < end; vector += blockDim.x / Program::kLanes) {
    VectorOffsets<kVecSize, Program::kWide> offset;
    program.space.offsets(sample, vector * kVecSize, offset);
    ClassesWithTangents<Program> classes;
    const WarpOfVectors warp(exchanged, end - vector);
    classes.template load<true>(program, offset, warp);
    if constexpr (Program::kClasses > 0) {
      Pack<typename Program::Input, kVecSize> of_inputs[Program::kUnroll];
      Pack<typename Program::Target, kVecSize> of_targets[Program::kUnroll];
      VoxelTarget targets[kVecSize];
      find_targets(program, classes, offset, targets);
#pragma unroll
      for (int at = 0; at < kVecSize; at += kTogether) {
        Scalar by_input[Program::kUnroll][kTogether];
        Scalar by_target[Program::kUnroll][kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const StoreTangents<kInput, kTarget, kTogether, Program> store{by_input, by_target, i};
          voxel_gradient<kInput, kTarget>(program, classes, offset, targets[at + i], at + i, coeffs, voxel_scale,
                                          store);
        }
#pragma unroll
        for (int c = 0; c < Program::kClasses; ++c) {
          if constexpr (kInput) put(by_input[c], at, of_inputs[c]);
          if constexpr (kTarget) put(by_target[c], at, of_targets[c]);
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
      const auto& stride = program.space.class_stride;
      const StoreTangentsInMemory<kInput, kTarget, Program> store{
          kInput ? input_gradients + offset.at(kGradientsOfInputs, 0) : nullptr,
          kTarget ? target_gradients + offset.at(kGradientsOfTargets, 0) : nullptr, stride[kGradientsOfInputs],
          stride[kGradientsOfTargets]};
      const VoxelTarget target = voxel_target(program, classes, offset, 0);
      voxel_gradient<kInput, kTarget>(program, classes, offset, target, 0, coeffs, voxel_scale, store);
    }
  }
}
