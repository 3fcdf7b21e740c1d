// Value and gradient of softmax.cuh for strided classes, where neighbouring rows are contiguous: images (N, C, H, W) of
// many classes, transposed matrices. The warps of a block, or of a cluster of blocks, share the rows.
//
//   x[n, c, h, w]: a row is (n, :, h, w); a tile is 32 kVecSize neighbouring rows
//
// Lane l of every warp owns the kVecSize rows from row l kVecSize of the tile. Warp k of the `warps` that share the
// tile processes classes k, k + warps, ... The worker, a block or a cluster, owns chunks of tiles.
//
// 1. Each thread issues asynchronous copies of all its classes to shared memory, then finds their maximum and sum of
//    exponentials.
// 2. Each warp stores its sums in shared memory. Warp i < kVecSize combines the sums of the lanes' i-th rows, in the
//    order of the warps. Blocks of a cluster then exchange their sums through DSMEM and combine them in the order of
//    the blocks.
// 3. The same warp evaluates these rows and stores the coefficients of their gradients in shared memory, so each block
//    pays only once for what a row costs besides its logits.
// 4. Each thread writes the gradients of its classes.
//
// Many warps share a tile, so shared memory holds few rows of many classes, and some warps compute while others wait
// for memory. A thread reads only those staged logits that it copied itself, so the copies need no barrier.
//
// Traffic: each logit is read once; each gradient is written once. Preconditions: kVecSize divides the number of rows,
// kVecSize <= kWarps; rows of a vector are contiguous; classes < 2^31; a block has kWarps warps.
#pragma once
#include "softmax/lane_rows.cuh"

// Classes of one thread: vectors of kVecSize rows, their slots in shared memory, and their gradients.
template <class Storage, int kVecSize_>
struct TileClasses {
  static constexpr int kVecSize = kVecSize_;
  using Value = Storage;
  using P = Pack<Storage, kVecSize>;
  const Storage* from;  // first class of the thread
  Storage* to;
  int64 stride, gradient_stride;  // from one class of the thread to its next
  int first, step, count;         // classes first, first + step, ...

  template <class Group, class Program>
  __device__ __forceinline__ TileClasses(const Group& group, const Program& program,
                                         const int64 (&offset)[kRowStreams]) {
    const int classes = static_cast<int>(program.space.classes);
    first = group.thread_rank() / kWarp;
    step = group.num_threads() / kWarp;
    count = classes > first ? (classes - first + step - 1) / step : 0;
    stride = step * program.space.class_stride[kLogits];
    gradient_stride = step * program.space.class_stride[kGradients];
    from = program.input + offset[kLogits] + first * program.space.class_stride[kLogits];
    to = program.gradients + offset[kGradients] + first * program.space.class_stride[kGradients];
  }
  __device__ __forceinline__ int class_of(int k) const {
    return first + k * step;
  }
  __device__ __forceinline__ P* place(int k) const {
    extern __shared__ uint4 staged[];
    return reinterpret_cast<P*>(staged) + k * static_cast<int>(blockDim.x) + threadIdx.x;
  }
  // Issues the copies of all vectors.
  __device__ __forceinline__ void copy_in() const {
    const Storage* at = from;
#pragma unroll 4
    for (int k = 0; k < count; ++k, at += stride) cp_async(place(k), reinterpret_cast<const P*>(at));
  }
  __device__ __forceinline__ P read(int k) const {
    return load_words(place(k));
  }
  // Calls f(k) if class c is the thread's k-th class. No thread owns a negative c. Precondition: kStep equals `step`.
  template <int kStep, class F>
  __device__ __forceinline__ void if_own(int c, const F& f) const {
    const int k = c / kStep;
    if (c >= 0 && c - k * kStep == first) f(k);
  }
};

// Part of a row's sums that threads exchange: without smoothing, only the softmax.
template <class Compute>
__device__ __forceinline__ const RowSums<Compute, true>& exchanged_sums(const RowSums<Compute, true>& sums) {
  return sums;
}
template <class Compute>
__device__ __forceinline__ const OnlineSoftmax<Compute, ExcludeTarget>& exchanged_sums(
    const RowSums<Compute, false>& sums) {
  return sums.softmax;
}
template <bool kSmoothed, class Compute>
struct ChooseExchangedSums {
  using type = RowSums<Compute, true>;
};
template <class Compute>
struct ChooseExchangedSums<false, Compute> {
  using type = OnlineSoftmax<Compute, ExcludeTarget>;
};
template <bool kSmoothed, class Compute>
using ExchangedSums = typename ChooseExchangedSums<kSmoothed, Compute>::type;

// Exchange between the warps that share a tile: sums per warp and per block, and coefficients per row. For each row of
// a lane, the slots of the 32 lanes are contiguous. The arrays consist of words, because the types may have
// constructors.
template <class Program, int kVecSize, int kWarps, int kClusterSize>
struct TileExchange {
  using Compute = typename Program::Compute;
  using Sums = RowSums<Compute, Program::kSmoothed>;
  using Part = ExchangedSums<Program::kSmoothed, Compute>;
  using Coeffs = GradCoeffs<Compute>;
  static constexpr int kRows = kVecSize * kWarp;
  static constexpr int kPartWords = sizeof(Part) / 4, kCoeffWords = sizeof(Coeffs) / 4;

  static __device__ __forceinline__ Part* of_warps() {
    alignas(16) __shared__ unsigned words[kWarps * kRows * kPartWords];
    return reinterpret_cast<Part*>(words) + threadIdx.x % kWarp;
  }
  static __device__ __forceinline__ Part* of_blocks(int buffer) {
    alignas(16) __shared__ unsigned words[2 * kClusterSize * kRows * kPartWords];
    return reinterpret_cast<Part*>(words) + buffer * kClusterSize * kRows + threadIdx.x % kWarp;
  }
  static __device__ __forceinline__ Coeffs* coeffs() {
    alignas(16) __shared__ unsigned words[kRows * kCoeffWords];
    return reinterpret_cast<Coeffs*>(words) + threadIdx.x % kWarp;
  }
  static __device__ __forceinline__ void put(const Sums (&own)[kVecSize]) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      of_warps()[(threadIdx.x / kWarp * kVecSize + i) * kWarp] = exchanged_sums(own[i]);
    }
  }
  // Combines the sums of kCount parts in order; the parts are `apart` slots from each other.
  template <int kCount>
  static __device__ __forceinline__ Sums combined(const Part* parts, int apart) {
    Sums whole = Sums::empty();
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      whole.softmax.max_logit = max_ignoring_nan(whole.softmax.max_logit, softmax_of(parts[k * apart]).max_logit);
    }
#pragma unroll 4
    for (int k = 0; k < kCount; ++k) {
      const Part part = parts[k * apart];
      OnlineSoftmax<Compute, ExcludeTarget> softmax = softmax_of(part);
      rescale(softmax, whole.softmax.max_logit);
      whole.softmax.exp_sum += softmax.exp_sum;
      if constexpr (Program::kSmoothed) {
        whole.weighted_gap += part.weighted_gap;
        whole.weight_sum += part.weight_sum;
      }
    }
    return whole;
  }
  // Sends the sums of row i of each lane to all blocks of the cluster. Precondition: all of them are running.
  static __device__ __forceinline__ void send(const Sums& sums, int i, int block, int buffer) {
    const Part part = exchanged_sums(sums);
    const unsigned* const words = reinterpret_cast<const unsigned*>(&part);
    unsigned* const slot = reinterpret_cast<unsigned*>(of_blocks(buffer) + (block * kVecSize + i) * kWarp);
#pragma unroll
    for (int to = 0; to < kClusterSize; ++to) {
#pragma unroll
      for (int word = 0; word < kPartWords; ++word) store_dsmem(slot + word, to, words[word]);
    }
  }

 private:
  static __device__ __forceinline__ const OnlineSoftmax<Compute, ExcludeTarget>& softmax_of(
      const OnlineSoftmax<Compute, ExcludeTarget>& part) {
    return part;
  }
  static __device__ __forceinline__ const OnlineSoftmax<Compute, ExcludeTarget>& softmax_of(
      const RowSums<Compute, true>& part) {
    return part.softmax;
  }
};

// Adds a class to the sums of a thread's rows; `power` receives the exponentials. kMasked: the logits of the labels
// have been replaced by -inf, so the class is not compared with the labels. Precondition: `max_logit` of the sums is at
// least the logit of the class.
template <bool kMasked, int kVecSize, class Program, class Compute = typename Program::Compute>
__device__ __forceinline__ void add_class(const Program& program, int c, const int (&labels)[kVecSize],
                                          const Compute (&z)[kVecSize],
                                          const Pack<typename Program::Input, kVecSize>& x,
                                          RowSums<Compute, Program::kSmoothed> (&sums)[kVecSize],
                                          Pack<Compute, kVecSize>& power) {
  Compute raw[kVecSize];
  unpack(x, raw);
  const Compute w = Program::kSmoothed ? program.weight(c) : Compute(1);
  Compute shifts[kVecSize], of_class[kVecSize], slopes[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) shifts[i] = exp_shift(sums[i].softmax.max_logit);
  program.logit.exponential_value_slope(raw, shifts, power.element, of_class, slopes);
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    sums[i].softmax.exp_sum += !kMasked && c == labels[i] ? Compute(0) : power.element[i];
    if constexpr (Program::kSmoothed) {
      sums[i].weighted_gap += w == Compute(0) ? Compute(0) : w * (z[i] - of_class[i]);
      sums[i].weight_sum += w;
    }
  }
}

// Largest logit of each of a thread's rows, updated vector by vector. kPairs: 16-bit logits are compared in pairs.
template <class Storage, int kVecSize, class Compute, bool kPairs>
struct LargestOfRowsBy {
  Compute largest[kVecSize];

  __device__ __forceinline__ LargestOfRowsBy() {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) largest[i] = -scalar_infinity(Compute());
  }
  __device__ __forceinline__ void add(const Pack<Storage, kVecSize>& x) {
    Compute raw[kVecSize];
    unpack(x, raw);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) largest[i] = max_ignoring_nan(largest[i], raw[i]);
  }
  __device__ __forceinline__ Compute of_row(int i) const {
    return largest[i];
  }
};
template <class Storage, int kVecSize, class Compute>
struct LargestOfRowsBy<Storage, kVecSize, Compute, true> {
  PackedPairMax<Storage, 2> largest[kVecSize / 2];

  __device__ __forceinline__ void add(const Pack<Storage, kVecSize>& x) {
#pragma unroll
    for (int i = 0; i < kVecSize / 2; ++i) largest[i].add(reinterpret_cast<const Pack<Storage, 2>*>(&x)[i]);
  }
  __device__ __forceinline__ Compute of_row(int i) const {
    return largest[i / 2].half(i % 2);
  }
};
template <class Storage, int kVecSize, class Compute>
using LargestOfRows = LargestOfRowsBy<Storage, kVecSize, Compute,
                                      sizeof(Storage) == 2 && sizeof(Compute) == 4 && kVecSize % 2 == 0 && kHasPairMax>;

// Adds all classes of a thread to its sums. kKeeps: replaces the logits in shared memory by exponentials. kMasks: once
// the maxima are known, replaces the logits of the labels there by -inf. Precondition: the thread's copies are
// complete.
template <bool kKeeps, bool kMasks, int kStep, class Classes, int kVecSize, class Program,
          class Compute = typename Program::Compute>
__device__ __forceinline__ void sum_of_classes(const Program& program, const Classes& own,
                                               const int (&labels)[kVecSize], const Compute (&z)[kVecSize],
                                               RowSums<Compute, Program::kSmoothed> (&sums)[kVecSize]) {
  Pack<Compute, kVecSize> power;
  LargestOfRows<typename Program::Input, kVecSize, Compute> largest;
#pragma unroll 4
  for (int k = 0; k < own.count; ++k) largest.add(own.read(k));
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    sums[i].softmax.max_logit = program.logit.value(largest.of_row(i));
    if constexpr (kMasks) {
      own.template if_own<kStep>(labels[i], [&](int k) {
        own.place(k)->element[i] = Narrow<typename Program::Input>::from(-scalar_infinity(0.0f));
      });
    }
  }
#pragma unroll 4
  for (int k = 0; k < own.count; ++k) {
    add_class<kMasks>(program, own.class_of(k), labels, z, own.read(k), sums, power);
    if constexpr (kKeeps) *own.place(k) = power;
  }
}

// Writes the gradients of one class of a thread's rows to `to`. kKeeps: x holds exponentials. kMasked: the gradients of
// the labels are written elsewhere. kSelects: some rows may have gradients of 0 whatever their logits are (all_zero).
template <bool kKeeps, bool kMasked, bool kSelects, class Classes, int kVecSize, class Program,
          class Compute = typename Program::Compute>
__device__ __forceinline__ void store_class(const Program& program, const Classes& own, int k,
                                            typename Program::Gradient* to, const int (&labels)[kVecSize],
                                            const typename Classes::P& x, const GradCoeffs<Compute> (&coeffs)[kVecSize],
                                            const bool (&all_zero)[kVecSize]) {
  const int c = own.class_of(k);
  Compute raw[kVecSize], g[kVecSize];
  unpack(x, raw);
  const Compute w = Program::kSmoothed ? program.weight(c) : Compute(0);
  Compute powers[kVecSize], of_class[kVecSize], slopes[kVecSize], max_logits[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) max_logits[i] = coeffs[i].max_logit;
  if constexpr (!kKeeps) program.logit.exponential_value_slope(raw, max_logits, powers, of_class, slopes);
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    g[i] = coeffs[i].exp_coeff * (kKeeps ? raw[i] : powers[i]);
    if constexpr (Program::kSmoothed) g[i] -= coeffs[i].weight_coeff * w;
    if constexpr (!kMasked) g[i] = c == labels[i] ? coeffs[i].target : g[i];
    if constexpr (Program::kCapped) g[i] *= slopes[i];
    if constexpr (kSelects) g[i] = all_zero[i] ? Compute(0) : g[i];
  }
  store_pack<kVecSize>(to, NarrowPack<typename Program::Gradient, kVecSize>::from(g));
}

// Writes the gradients of all classes of a thread. Reads logits or exponentials from shared memory.
template <bool kKeeps, bool kMasked, bool kSelects, class Classes, int kVecSize, class Program,
          class Compute = typename Program::Compute>
__device__ __forceinline__ void store_staged_classes(const Program& program, const Classes& own,
                                                     const int (&labels)[kVecSize],
                                                     const GradCoeffs<Compute> (&coeffs)[kVecSize],
                                                     const bool (&all_zero)[kVecSize]) {
  auto* to = own.to;
#pragma unroll 4
  for (int k = 0; k < own.count; ++k, to += own.gradient_stride) {
    store_class<kKeeps, kMasked, kSelects>(program, own, k, to, labels, own.read(k), coeffs, all_zero);
  }
}

// Evaluates a tile and writes its gradients. Returns the sum of the values of the rows that this thread evaluates.
// `count` is kVecSize, or 0 if the lane has no rows; `visits` is the number of earlier calls. Preconditions: all
// threads of the group call it together, the first time after group.cluster_start().
template <bool kGradient, int kVecSize, int kWarps, class Group, class Program, class Scale>
__device__ __forceinline__ double visit_tile(const Program& program, const Group& group, int64 row, int count,
                                             unsigned visits, Scale& scale) {
  using Compute = typename Program::Compute;
  using Input = typename Program::Input;
  using Sums = RowSums<Compute, Program::kSmoothed>;
  using Exchange = TileExchange<Program, kVecSize, kWarps, Group::kClusterSize>;
  using Classes = TileClasses<Input, kVecSize>;
  static_assert(kSameType<Input, typename Program::Gradient>, "gradients have the layout of logits");
  static_assert(kVecSize <= kWarps, "a warp evaluates one row of each lane");
  constexpr bool kKeeps = kGradient && !Program::kCapped && kSameType<Input, Compute>;
  constexpr bool kMasks = !Program::kCapped && !Program::kSmoothed;
  constexpr int kStep = kWarps * Group::kClusterSize;
  const int warp = threadIdx.x / kWarp;
  int64 offset[kRowStreams];
  program.space.offsets(row, offset);
  const Classes own(group, program, offset);
  LaneLabels<kVecSize, Program> loads;
  loads.read(program, offset, count);
  // In flight while labels and their logits arrive.
  own.copy_in();
  int labels[kVecSize];
  loads.active_classes(program, count, labels);
  Compute z[kVecSize];
  Sums sums[kVecSize];
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    z[i] = Compute(0);
    sums[i] = Sums::empty();
    // Must be loaded before any block of the cluster writes gradients, which may overwrite the logits.
    if ((Program::kSmoothed || i == warp) && labels[i] >= 0) {
      const int64 at = offset[kLogits] + i * program.space.at.stride[kLogits][0];
      z[i] = program.logit.value(widen<Compute>(program.input[at + labels[i] * program.space.class_stride[kLogits]]));
    }
  }
  cp_async_wait_all();
  sum_of_classes<kKeeps, kMasks, kStep>(program, own, labels, z, sums);
  Exchange::put(sums);
  __syncthreads();
  Sums whole = Sums::empty();
  if (warp < kVecSize)
    whole = Exchange::template combined<kWarps>(Exchange::of_warps() + warp * kWarp, Exchange::kRows);
  if constexpr (Group::kClusterSize > 1) {
    const int buffer = visits & 1;
    if (visits == 0) cluster_wait();
    if (warp < kVecSize) Exchange::send(whole, warp, group.block_rank(), buffer);
    cluster_arrive();
    cluster_wait();
    if (warp < kVecSize) {
      whole =
          Exchange::template combined<Group::kClusterSize>(Exchange::of_blocks(buffer) + warp * kWarp, Exchange::kRows);
    }
  }
  double total = 0.0;
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    if (i != warp) continue;
    RowTarget<Compute> t;
#pragma unroll
    for (int s = 0; s < kRowStreams; ++s) t.offset[s] = offset[s] + i * program.space.at.stride[s][0];
    program.validate_label(t, loads.label_load[i]);
    t.active &= i < count;
    t.invalid_label &= i < count;
    const RowResult<Compute> y = program.finish(t, z[i], whole, i < count && group.block_rank() == 0);
    total = static_cast<double>(y.value);
    GradCoeffs<Compute> coeffs = y.grad_coeffs;
    if (kGradient && t.active) scale_grad_coeffs(program, coeffs, grad_factor(scale, t.offset));
    Exchange::coeffs()[i * kWarp] = coeffs;
  }
  // The next tile stores its sums after this barrier, and its coefficients after its own first barrier.
  __syncthreads();
  if constexpr (kGradient) {
    GradCoeffs<Compute> coeffs[kVecSize];
    bool all_zero[kVecSize], any_zero = false;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      coeffs[i] = Exchange::coeffs()[i * kWarp];
      all_zero[i] = coeffs[i].all_zero();
      any_zero |= all_zero[i];
      if constexpr (kKeeps) {
        // Exponentials are relative to the maximum of the thread's own classes.
        const Compute largest = sums[i].softmax.max_logit;
        const bool none = largest == -scalar_infinity(Compute());
        coeffs[i].exp_coeff *= none ? Compute(0) : scalar_exp(largest - exp_shift(coeffs[i].max_logit));
      }
    }
    // A warp whose lanes took both branches would write each class twice, a part of its sectors each time.
    any_zero = __any_sync(0xffffffffu, any_zero) != 0;
    if (count <= 0) return total;
    if (any_zero) {
      store_staged_classes<kKeeps, kMasks, true>(program, own, labels, coeffs, all_zero);
    } else {
      store_staged_classes<kKeeps, kMasks, false>(program, own, labels, coeffs, all_zero);
    }
    if constexpr (kMasks) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        own.template if_own<kStep>(labels[i], [&](int k) {
          own.to[k * own.gradient_stride + i] = Narrow<typename Program::Gradient>::from(coeffs[i].target);
        });
      }
    }
  }
  return total;
}

// Reader with the interface of TwoPassReader. Each worker, a block or a cluster, processes every workers()-th chunk.
template <int kVecSize, int kWarps>
struct TileReader {
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    const int64 vectors = program.space.rows / kVecSize, tiles = (vectors + kWarp - 1) / kWarp;
    unsigned visits = 0;
    SyncState sync{0, 0};
    if (group.worker() < chunks) group.cluster_start();
#pragma unroll 1
    for (int64 chunk = group.worker(); chunk < chunks; chunk += group.workers()) {
      double total = 0.0;
#pragma unroll 1
      for (int64 tile = chunk; tile < tiles; tile += chunks) {
        const int64 vector = tile * kWarp + threadIdx.x % kWarp;
        const bool exists = vector < vectors;
        total += visit_tile<kGradient, kVecSize, kWarps>(program, group, exists ? vector * kVecSize : 0,
                                                         exists ? kVecSize : 0, visits++, scale);
      }
      // Used between the exchanges of two tiles, whose barriers separate one use from the next.
      __shared__ double of_warp[kVecSize];
      total = warp_sum(total);
      if (threadIdx.x % kWarp == 0 && threadIdx.x / kWarp < kVecSize) of_warp[threadIdx.x / kWarp] = total;
      __syncthreads();
      if (threadIdx.x == 0) {
        total = 0.0;
#pragma unroll
        for (int i = 0; i < kVecSize; ++i) total += of_warp[i];
      }
      finish_chunk(group, scale, chunk, total, work.partials, sync);
    }
  }
};
