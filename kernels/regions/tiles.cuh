// Region losses of labels under a softmax, of more classes than registers hold: the sums (kernel 1) and the gradients
// (kernel 2) by tiles of voxels, whose logits lie in shared memory as they are stored. With tangents (region_hvp.cuh)
// these lie beside them.
//
// 1. A block copies the logits of Program::kTile voxels to shared memory, in words of Program::kTileWord elements
//    without registers, or, with the classes of a voxel side by side, element by element (StoredTile).
// 2. A thread has kTogether neighbouring voxels, whose logits of a class are one word. They belong to kParts threads,
//    as many as the block has for each; part q takes classes q, q + kParts and so on. These find the maximum, and then
//    the sum of exponentials; between the two, and behind, parts exchange what they have through shared memory. The
//    label's logit is taken out, and -inf left in its place, whose exponential is 0.
// 3. Exponentials are computed again in each pass. Kept in the arithmetic type they would take twice the shared memory
//    of logits of 16 bits, and half as many blocks would hide each other's loads.
// 4. Sums: warps take classes in turn, lanes the voxels of the tile, each always the same, whose maximum and sum are in
//    registers. Lanes share out their sums of a class (LaneNumbers) and keep them in shared memory; threads add up
//    those of the lanes, in double, behind kLaneVoxels voxels of a lane. Chunks are added up by segments
//    (add_up_segment).
//    Gradients: from the sums of exponentials, as label_gradient().
//
// Bad labels are reported behind the loop over tiles: NVRTC 13.0 to 13.2 lose lanes at shuffles behind an atomic
// (sums.cuh).
//
// Traffic: as that of the other kernels; input and tangents twice in all.
// Preconditions: blockDim.x is kSumThreads, and kGradientThreads for gradients.
#pragma once
#include "regions/regions.cuh"

// The logits of a tile, and their tangents behind them: `pitch` elements for each class.
template <class Program>
struct StoredTile {
  using Compute = typename Program::Compute;
  using Scalar = decltype(value_of(Compute(0)));
  using Input = typename Program::Input;
  static constexpr int kVoxels = Program::kTile, kWord = Program::kTileWord;
  static constexpr int kArrays = kHasTangent<Compute> ? 2 : 1;
  // Neighbouring voxels of a thread, whose logits are a word.
  static constexpr int kTogether = sizeof(Input) == 2 && kVoxels >= 64 ? 2 : 1;
  static constexpr int kPlaces = kVoxels / kTogether;
  // Classes side by side are scattered over banks by a pitch of an odd number of words; whole words of a class keep
  // its rows aligned.
  static constexpr int kPitch =
      kVoxels + (kWord > 1 ? 16 : 4) / static_cast<int>(sizeof(Input) < 4 ? sizeof(Input) : 4);
  Input* logits;
  Input* tangents;
  int classes;

  __device__ __forceinline__ StoredTile(void* memory, int classes)
      : logits(static_cast<Input*>(memory)), tangents(logits + classes * kPitch), classes(classes) {
  }
  static __device__ __forceinline__ int place(int c, int voxel) {
    return c * kPitch + voxel;
  }
  // A logit, with its tangent.
  __device__ __forceinline__ Compute number(int at) const {
    if constexpr (kHasTangent<Compute>) {
      return Compute{widen<Scalar>(logits[at]), widen<Scalar>(tangents[at])};
    } else {
      return widen<Compute>(logits[at]);
    }
  }
  __device__ __forceinline__ void numbers_from(int at, Compute (&x)[kTogether]) const {
    using Word = Pack<Input, kTogether>;
    const Word logit = *reinterpret_cast<const Word*>(logits + at);
    if constexpr (kHasTangent<Compute>) {
      const Word tangent = *reinterpret_cast<const Word*>(tangents + at);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) x[i] = {widen_element<Scalar>(logit, i), widen_element<Scalar>(tangent, i)};
    } else {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) x[i] = widen_element<Compute>(logit, i);
    }
  }
  __device__ __forceinline__ void clear(int at) const {
    logits[at] = Input{};
    if constexpr (kArrays > 1) tangents[at] = Input{};
  }

  // Starts the copy of `count` voxels of a sample from `begin` on. A barrier stands between a wait and their use.
  template <int kThreads>
  __device__ __forceinline__ void copy(const Program& program, int64 sample, int64 begin, int count) const {
    copy_array<kThreads>(program, program.input, kInputs, logits, sample, begin, count);
    if constexpr (kArrays > 1) {
      copy_array<kThreads>(program, program.tangents, kGradientsOfInputs, tangents, sample, begin, count);
    }
    cp_async_commit();
  }
  template <int kThreads>
  __device__ __forceinline__ void copy_array(const Program& program, const Input* array, int stream, Input* to,
                                             int64 sample, int64 begin, int count) const {
    const int thread = threadIdx.x;
    if constexpr (Program::kPackedInput) {
      const Input* const first = array + sample * program.space.sample_stride[stream] + begin * classes;
      const int own = (count * classes - thread + kThreads - 1) / kThreads;
      const unsigned inverse = inverse_of(classes);
      copy_stored(
          own, [=](int k) { return first + thread + k * kThreads; },
          [=](int k) {
            const int i = thread + k * kThreads, voxel = divided(i, inverse);
            return to + place(i - voxel * classes, voxel);
          });
    } else {
      constexpr int kWords = kVoxels / kWord, kApart = kThreads / kWords;
      const int voxel = thread % kWords * kWord;
      if (voxel >= count) return;
      VectorOffsets<Program::kVecSize, Program::kWide> offset;
      program.space.offsets(sample, begin + voxel, offset);
      const int64 step = program.space.class_stride[stream];
      const Input* const first = array + offset.at(stream, 0);
      if constexpr (kWord > 1) {
#pragma unroll 4
        for (int c = thread / kWords; c < classes; c += kApart) {
          cp_async_word<kWord * sizeof(Input)>(to + place(c, voxel), first + c * step);
        }
      } else {
        const int c = thread / kWords;
        copy_stored((classes - c + kApart - 1) / kApart, [=](int k) { return first + (c + k * kApart) * step; },
                    [=](int k) { return to + place(c + k * kApart, voxel); });
      }
    }
  }
  template <int kBytes>
  static __device__ __forceinline__ void cp_async_word(Input* to, const Input* from) {
    if constexpr (kHasCpAsync) {
      cp_async_bytes<kBytes>(to, from);
    } else {
      using Word = typename WordOf<kBytes>::type;
      *reinterpret_cast<Word*>(to) = *reinterpret_cast<const Word*>(from);
    }
  }
  template <class From, class To>
  static __device__ __forceinline__ void copy_stored(int count, const From& from, const To& to) {
    if constexpr (sizeof(Input) >= 4) {
#pragma unroll 4
      for (int k = 0; k < count; ++k) cp_async_element(to(k), from(k));
    } else {
      copy_in_batches<kStoredBatch, Input>(count, from, to, [](const Pack<Input, 1>& x) { return x.element[0]; });
    }
  }
};

// The label of a voxel of a sample.
template <class Program>
struct TileLabel {
  using Offset = VectorOffsets<Program::kVecSize, Program::kWide>;
  Offset offset;
  const Program& program;

  __device__ __forceinline__ TileLabel(const Program& program, int64 sample, int64 voxel) : program(program) {
    program.space.offsets(sample, voxel, offset);
  }
  __device__ __forceinline__ int64 label(int) const {
    return static_cast<int64>(program.target[offset.at(kTargets, 0)]);
  }
  // That of a voxel that does not count if it does not exist.
  __device__ __forceinline__ VoxelTarget target(bool exists) const {
    return exists ? voxel_target(program, *this, offset, 0) : VoxelTarget{0, false, false};
  }
};

// The softmax that the threads of a word of voxels find together, and the targets.
template <class Program>
struct TileSoftmax {
  using Compute = typename Program::Compute;
  using Scalar = decltype(value_of(Compute(0)));
  using Input = typename Program::Input;
  using Tile = StoredTile<Program>;
  static constexpr int kTogether = Tile::kTogether;
  VoxelSoftmax<Program> softmax[kTogether];
  VoxelTarget target[kTogether];

  // kParts threads of a block call it for each word of voxels, of which `voxel` is the first; `exchange` has room for
  // the numbers of each thread. `add(c, e, sum)` adds something of each class of a part, of which `weighted` is the sum
  // over all classes. Of a voxel that does not count all logits are cleared.
  template <int kParts, class Add>
  __device__ __forceinline__ void find(const Tile& tile, int voxel, int part, Compute* exchange,
                                       Compute (&weighted)[kTogether], const Add& add) {
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      softmax[i].label_logit = tile.number(Tile::place(target[i].label, voxel + i));
    }
    if constexpr (kParts > 1) __syncthreads();  // all have read it
    Compute largest[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int label = target[i].label;
      if (!target[i].sound) {
        softmax[i].label_logit = Compute(0);
        for (int c = part; c < tile.classes; c += kParts) tile.clear(Tile::place(c, voxel + i));
      } else if (label % kParts == part) {
        tile.logits[Tile::place(label, voxel + i)] = Narrow<Input>::from(-scalar_infinity(Scalar()));
      }
      largest[i] = softmax[i].label_logit;
    }
    find_largest<kParts>(tile, voxel, part, largest);
    if constexpr (kParts > 1) {
      combine<kParts>(largest, exchange, [](Compute a, Compute b) {
        return with_tangent_of(max_ignoring_nan(value_of(a), value_of(b)), a);
      });
    }
    Compute others[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      // Exponentials are relative to the maximum with the tangent of the label, which cancels in all that follows.
      softmax[i].max_logit = with_tangent_of(value_of(largest[i]), softmax[i].label_logit);
      others[i] = weighted[i] = Compute(0);
    }
#pragma unroll 4
    for (int c = part; c < tile.classes; c += kParts) {
      Compute e[kTogether];
      exponentials(tile, c, voxel, e);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        others[i] += e[i];
        weighted[i] = add(c, e[i], weighted[i]);
      }
    }
    if constexpr (kParts > 1) {
      const auto sum = [](Compute a, Compute b) { return a + b; };
      combine<kParts>(others, exchange, sum);
      combine<kParts>(weighted, exchange, sum);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      softmax[i].others = others[i];
      softmax[i].pivot = target[i].label;
      // As in row_result, for which the compiler then finds it and the sum once.
      softmax[i].label_e = exp_of_difference(softmax[i].label_logit - softmax[i].max_logit);
      softmax[i].sum = softmax[i].others + softmax[i].label_e;
      softmax[i].inv_sum = scalar_divide_closely(Compute(1), softmax[i].sum);
    }
  }
  // 0 of a label's class.
  __device__ __forceinline__ void exponentials(const Tile& tile, int c, int voxel, Compute (&e)[kTogether]) const {
    tile.numbers_from(Tile::place(c, voxel), e);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) e[i] = difference_exponential<Input>(e[i], softmax[i].max_logit);
  }
  // The largest logit of a part and `largest`, by value. Those of 16 bits are compared in pairs.
  template <int kParts>
  static __device__ __forceinline__ void find_largest(const Tile& tile, int voxel, int part,
                                                      Compute (&largest)[kTogether]) {
    using Word = Pack<Input, kTogether>;
    if constexpr (kTogether == 2 && kHasPairMax) {
      Word pair;
      unsigned& word = reinterpret_cast<unsigned&>(pair);
      word = *reinterpret_cast<const unsigned*>(tile.logits + Tile::place(part < tile.classes ? part : 0, voxel));
#pragma unroll 4
      for (int c = part + kParts; c < tile.classes; c += kParts) {
        word = max_pair(word, *reinterpret_cast<const unsigned*>(tile.logits + Tile::place(c, voxel)), Input{});
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const Scalar x = widen_element<Scalar>(pair, i);
        largest[i] = with_tangent_of(max_ignoring_nan(value_of(largest[i]), x), largest[i]);
      }
    } else {
#pragma unroll 4
      for (int c = part; c < tile.classes; c += kParts) {
        const Word word = *reinterpret_cast<const Word*>(tile.logits + Tile::place(c, voxel));
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const Scalar x = widen_element<Scalar>(word, i);
          largest[i] = with_tangent_of(max_ignoring_nan(value_of(largest[i]), x), largest[i]);
        }
      }
    }
  }
  // Combines the numbers of the threads of a word of voxels, in all of them and in the order of parts.
  template <int kParts, class Combine>
  static __device__ __forceinline__ void combine(Compute (&x)[kTogether], Compute* exchange, const Combine& with) {
    constexpr int kThreads = kParts * Tile::kPlaces;
    const int place = threadIdx.x % Tile::kPlaces;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) exchange[i * kThreads + threadIdx.x] = x[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      x[i] = exchange[i * kThreads + place];
#pragma unroll
      for (int q = 1; q < kParts; ++q) x[i] = with(x[i], exchange[i * kThreads + q * Tile::kPlaces + place]);
    }
    __syncthreads();
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Sums

// A voxel of a tile when sums are added up.
template <class Compute>
struct SummedVoxel {
  Compute max_logit;
  Compute inv_sum;
  Compute hit;
  Compute false_negative;
  int label;  // -1 if it does not count
};

// Sums of a class over a lane's voxels, whose numbers lanes share out: of kCount numbers a lane has kOwn in the end,
// added up over the lanes that differ from it by 4, 8 and 16. Every second group of four lanes keeps them, in kKept
// numbers of shared memory.
template <class Compute>
struct LaneNumbers {
  using Scalar = decltype(value_of(Compute(0)));
  static constexpr int kCount = kHasTangent<Compute> ? 8 : 4, kOwn = kCount / 4, kKept = kOwn * kWarp / 2;
  Scalar x[kCount];

  __device__ __forceinline__ explicit LaneNumbers(const Summands<Compute>& sum) {
    const Compute numbers[3] = {sum.hit, sum.false_positive, sum.false_negative};
#pragma unroll
    for (int k = 0; k < kCount; ++k) x[k] = Scalar(0);
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      x[k] = value_of(numbers[k]);
      if constexpr (kCount > 4) x[4 + k] = tangent_of(numbers[k]);
    }
  }
  __device__ __forceinline__ void share_out(int lane) {
    halve<kCount / 2, 16>(lane);
    halve<kCount / 4, 8>(lane);
#pragma unroll
    for (int k = 0; k < kOwn; ++k) x[k] += __shfl_xor_sync(0xffffffffu, x[k], 4);
  }
  __device__ __forceinline__ void add_to(Scalar* kept, int lane) const {
    if ((lane & 4) != 0) return;
#pragma unroll
    for (int k = 0; k < kOwn; ++k) kept[k * (kWarp / 2) + lane / 8 * 4 + lane % 4] += x[k];
  }
  // Takes the sum of number k, and leaves zeros.
  static __device__ __forceinline__ double take(Scalar* kept, int k) {
    Scalar* const own = kept + k % kOwn * (kWarp / 2) + k / kOwn * 4;
    Scalar sums[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sums[j] = own[j];
      own[j] = Scalar(0);
    }
    return static_cast<double>(sum_elements(sums));
  }
  template <int kHalf, int kDistance>
  __device__ __forceinline__ void halve(int lane) {
    const bool upper = (lane & kDistance) != 0;
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
      const Scalar given = upper ? x[k] : x[kHalf + k], kept = upper ? x[kHalf + k] : x[k];
      x[k] = kept + __shfl_xor_sync(0xffffffffu, given, kDistance);
    }
  }
};

// Adds up the `numbers` sums of each chunk of a segment, in the block that arrives last in it, in the place of those of
// its first chunk: one block alone would read those of all chunks at the speed of one multiprocessor, while the others
// wait. A sample has `chunks`, and segments of `per_segment` of them. Preconditions: all threads call it, for each
// chunk once; `numbers` is even if they have tangents.
__device__ __forceinline__ void add_up_segment(unsigned* tickets, int64 chunk, int64 chunks, int64 per_segment,
                                               double* partials, int64 numbers) {
  if (per_segment == 1) return;
  __shared__ bool last;
  const int64 sample = chunk / chunks, segment = (chunk - sample * chunks) / per_segment;
  const int64 first = segment * per_segment, count = min(per_segment, chunks - first);
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned* const ticket = tickets + sample * ((chunks + per_segment - 1) / per_segment) + segment;
    const unsigned limit = static_cast<unsigned>(count - 1);
    last = increment_and_synchronize(ticket, limit) == limit;
  }
  __syncthreads();
  if (last) {
    double* const own = partials + (sample * chunks + first) * numbers;
    for (int64 k = threadIdx.x; k < numbers; k += kSumThreads) {
      own[k] = sum_apart<16>(own + k, static_cast<int>(numbers), count);
    }
  }
  __syncthreads();
}

// `memory` has 3 C `Total`, LaneNumbers::kKept numbers of each class, and the tile
// (engines/regions/layout.py: `stored_sums_bytes`).
template <class Program, class Total>
__device__ __forceinline__ void sum_in_stored_tiles(const Program& program, int64 chunks, int64 tiles_per_chunk,
                                                    int64 per_segment, unsigned* segment_tickets, Total* partials,
                                                    void* memory) {
  using Compute = typename Program::Compute;
  using Scalar = decltype(value_of(Compute(0)));
  using Tile = StoredTile<Program>;
  using Lanes = LaneNumbers<Compute>;
  using Kept = SummedVoxel<Compute>;
  constexpr int kTileSize = Program::kTile, kEach = kTileSize / kWarp, kTogether = Tile::kTogether;
  constexpr int kParts = kSumThreads / Tile::kPlaces;
  constexpr int kDoubles = sizeof(Total) / sizeof(double);
  // Doubles, because numbers with a tangent have constructors.
  __shared__ double kept_memory[kTileSize * sizeof(Kept) / sizeof(double) + 1];
  __shared__ double exchange_memory[kParts > 1 ? kTogether * kSumThreads * sizeof(Compute) / sizeof(double) : 1];
  __shared__ double memory_of_warps[kSumWarps * 3 * sizeof(Total) / sizeof(double)];
  Kept* const kept_of = reinterpret_cast<Kept*>(kept_memory);
  Compute* const exchange = reinterpret_cast<Compute*>(exchange_memory);
  Total(*const of_warp)[3] = reinterpret_cast<Total(*)[3]>(memory_of_warps);
  const int classes_count = program.classes(), numbers = 3 * classes_count + 3;
  Total* const totals = static_cast<Total*>(memory);
  Scalar* const of_lanes = reinterpret_cast<Scalar*>(totals + (3 * classes_count + 1) / 2 * 2);
  const Tile tile(of_lanes + classes_count * Lanes::kKept, classes_count);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int v = threadIdx.x % Tile::kPlaces * kTogether, part = threadIdx.x / Tile::kPlaces;
  const int64 voxels = program.space.voxels, total = chunks * program.space.samples;
#pragma unroll 1
  for (int64 chunk = blockIdx.x; chunk < total; chunk += gridDim.x) {
    const int64 sample = chunk / chunks, first = (chunk - sample * chunks) * tiles_per_chunk;
    Total spoilt(0.0), cost(0.0), voxel_count(0.0);
    int64 bad_voxel = -1;
    for (int k = threadIdx.x; k < 3 * classes_count; k += kSumThreads) totals[k] = Total(0.0);
    for (int k = threadIdx.x; k < classes_count * Lanes::kKept; k += kSumThreads) of_lanes[k] = Scalar(0);
    int added = 0;  // voxels of a lane
#pragma unroll 1
    for (int64 turn = 0; turn < tiles_per_chunk; ++turn) {
      const int64 begin = (first + turn) * kTileSize;
      if (begin >= voxels) break;
      const int count = static_cast<int>(min(voxels - begin, static_cast<int64>(kTileSize)));
      __syncthreads();  // the tile before may still be read
      tile.template copy<kSumThreads>(program, sample, begin, count);
      TileSoftmax<Program> of_word;
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        of_word.target[i] = TileLabel<Program>(program, sample, begin + v + i).target(v + i < count);
        if (part == 0 && of_word.target[i].spoilt) {
          spoilt += Total(1.0);
          bad_voxel = begin + v + i;
        }
      }
      cp_async_wait_all();
      __syncthreads();
      Compute unused[kTogether];
      of_word.template find<kParts>(tile, v, part, exchange, unused, [](int, Compute, Compute) { return Compute(0); });
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (part != 0) continue;
        const VoxelTarget& target = of_word.target[i];
        const VoxelSoftmax<Program>& softmax = of_word.softmax[i];
        kept_of[v + i] =
            Kept{softmax.max_logit, target.sound ? softmax.inv_sum : Compute(0), softmax.label_e * softmax.inv_sum,
                 softmax.others * softmax.inv_sum, target.sound ? target.label : -1};
        if constexpr (Program::kVoxel != kNoVoxelLoss) {
          if (target.sound) {
            const VoxelCost<Compute> of_row = voxel_cost(program, tile, softmax, target, 0);
            cost += as_double(of_row.value);
            voxel_count += as_double(of_row.count);
          }
        }
      }
      __syncthreads();
      Kept own[kEach];
#pragma unroll
      for (int j = 0; j < kEach; ++j) own[j] = kept_of[(j / kTogether * kWarp + lane) * kTogether + j % kTogether];
#pragma unroll 1
      for (int c = warp; c < classes_count; c += kSumWarps) {
        Summands<Compute> sum{Compute(0), Compute(0), Compute(0)};
#pragma unroll
        for (int j = 0; j < kEach; j += kTogether) {
          Compute x[kTogether];
          tile.numbers_from(Tile::place(c, j * kWarp + lane * kTogether), x);
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            const Kept& kept = own[j + i];
            const Compute e = difference_exponential<typename Program::Input>(x[i], kept.max_logit);
            sum.false_positive = scalar_fma(e, kept.inv_sum, sum.false_positive);
            if (kept.label == c) {
              sum.hit += kept.hit;
              sum.false_negative += kept.false_negative;
            }
          }
        }
        Lanes of_lane(sum);
        of_lane.share_out(lane);
        of_lane.add_to(of_lanes + c * Lanes::kKept, lane);
      }
      added += kEach;
      if (added < kLaneVoxels && turn + 1 < tiles_per_chunk && begin + kTileSize < voxels) continue;
      added = 0;
      __syncthreads();
      for (int k = threadIdx.x; k < 3 * classes_count; k += kSumThreads) {
        const int c = k / 3, number = k - 3 * c;
        Scalar* const kept = of_lanes + c * Lanes::kKept;
        if constexpr (kHasTangent<Compute>) {
          totals[k] += Total{Lanes::take(kept, number), Lanes::take(kept, 4 + number)};
        } else {
          totals[k] += Lanes::take(kept, number);
        }
      }
    }
    if (bad_voxel >= 0) {
      const TileLabel<Program> label(program, sample, bad_voxel);
      report_label(program.status, program.site, sample * voxels + bad_voxel, label.label(0), program.space.classes);
    }
    __syncthreads();
    store_chunk(totals, spoilt, cost, voxel_count, of_warp, classes_count, partials + chunk * numbers);
    add_up_segment(segment_tickets, chunk, chunks, per_segment, reinterpret_cast<double*>(partials),
                   kDoubles * numbers);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Gradients

// Writes the gradients of the chunk of this block, or, of numbers with a tangent, their tangents. `numbers` are 3 C of
// Compute, rounded up to 16 bytes, with the tile behind them. Preconditions: those of write_gradients().
template <class Program, class Groups, class Residual, class Result>
__device__ __forceinline__ void write_stored_tiles(const Program& program, const Groups& groups,
                                                   const Residual* residual, const Result* grad_output, int64 per_group,
                                                   int64 chunks, int64 voxels_per_chunk,
                                                   typename Program::Input* gradients,
                                                   typename Program::Compute* numbers) {
  using Compute = typename Program::Compute;
  using Scalar = decltype(value_of(Compute(0)));
  using Input = typename Program::Input;
  using Tile = StoredTile<Program>;
  constexpr int kTileSize = Program::kTile, kTogether = Tile::kTogether, kParts = kGradientThreads / Tile::kPlaces;
  __shared__ double exchange_memory[kParts > 1 ? kTogether * kGradientThreads * sizeof(Compute) / sizeof(double) : 1];
  Compute* const exchange = reinterpret_cast<Compute*>(exchange_memory);
  const int classes_count = program.classes();
  const Tile tile(numbers + (3 * classes_count + 3) / 4 * 4, classes_count);
  const int v = threadIdx.x % Tile::kPlaces * kTogether, part = threadIdx.x / Tile::kPlaces;
  // 32 bits hold any number of blocks, and divide faster than 64.
  const unsigned of_sample = static_cast<unsigned>(chunks), chunk = gridDim.x - 1 - blockIdx.x;
  const int64 sample = chunk / of_sample, first = (chunk - sample * chunks) * voxels_per_chunk;
  const int64 end = min(first + voxels_per_chunk, program.space.voxels);
  const SharedCoeffs<Program> coeffs{numbers, classes_count};
  Compute voxel_scale = Compute(0);
#pragma unroll 1
  for (int64 begin = first; begin < end; begin += kTileSize) {
    const int count = static_cast<int>(min(end - begin, static_cast<int64>(kTileSize)));
    tile.template copy<kGradientThreads>(program, sample, begin, count);
    TileSoftmax<Program> of_word;
    int64 at[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const TileLabel<Program> label(program, sample, begin + v + i);
      of_word.target[i] = label.target(v + i < count);
      at[i] = label.offset.at(kGradientsOfInputs, 0);
    }
    if (begin == first) {
      load_coefficients(program, groups, residual, grad_output, per_group, sample, numbers);
      voxel_scale = scale_of_voxels(program, residual, grad_output);
    }
    cp_async_wait_all();
    __syncthreads();
    Compute sums[kTogether];
    of_word.template find<kParts>(tile, v, part, exchange, sums, [&](int c, Compute e, Compute sum) {
      return scalar_fma(e, coeffs.of_other(c), sum);
    });
    LabelGradient<Compute> of_label[kTogether];
    Compute inv_sum[kTogether];
    Scalar by_label[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const VoxelTarget& target = of_word.target[i];
      of_label[i] = gradient_of_label(program, tile, of_word.softmax[i], target, 0, coeffs, voxel_scale, sums[i]);
      // A voxel that does not count has exponentials of 1, and gradients of 0.
      if (!target.sound) of_label[i].common = Compute(0);
      inv_sum[i] = target.sound ? of_word.softmax[i].inv_sum : Compute(0);
      by_label[i] = target.sound ? static_cast<Scalar>(of_label[i].by_label) : Scalar(0);
    }
    // No branch between classes, and addresses by addition: these took two thirds of the instructions.
    constexpr bool kInTile = Program::kPackedGradients;
    constexpr bool kInWords = kTogether == 1 || kInTile || Tile::kWord > 1;
    const int64 step = kInTile ? Tile::kPitch : program.space.class_stride[kGradientsOfInputs];
    Input* to = (kInTile ? tile.logits + v : gradients + at[0]) + part * step;
    const int64 apart = at[kTogether - 1] - at[0];
    const bool both = v + kTogether <= count;
    if (v < count) {
#pragma unroll 4
      for (int c = part; c < classes_count; c += kParts) {
        Compute e[kTogether];
        Scalar y[kTogether];
        of_word.exponentials(tile, c, v, e);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const Compute of_other = of_label[i].of_other(e[i], coeffs.of_other(c), inv_sum[i]);
          y[i] = c == of_word.target[i].label ? by_label[i] : static_cast<Scalar>(of_other);
        }
        const Pack<Input, kTogether> stored = NarrowPack<Input, kTogether>::from(y);
        if constexpr (kInWords) {
          *reinterpret_cast<Pack<Input, kTogether>*>(to) = stored;
        } else {
          to[0] = stored.element[0];
          if (both) to[apart] = stored.element[kTogether - 1];
        }
        to += kParts * step;
      }
    }
    __syncthreads();
    if constexpr (Program::kPackedGradients) {
      store_packed_tile<kGradientThreads, Tile::kPitch>(program, sample, begin, count, tile.logits, gradients);
      __syncthreads();
    }
  }
}
