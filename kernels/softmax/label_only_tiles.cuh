// Losses of log-probabilities as in label_only.cuh, for gradients without gaps: row r begins at element r C. Short rows
// are in label_only_rows.cuh.
//
//   value, gradient   as label_only.cuh
//
// 1. The gradients are cut into tiles of 16-byte vectors, regardless of row boundaries. A chunk consists of the tiles
//    whose number has the same remainder modulo `chunks`. A warp owns a chunk and processes its tiles in order.
// 2. A tile owns the rows that begin in it: it adds their losses to the sum of the chunk. A row that reaches into the
//    tile from the one before is visited again, because its label may be in this tile.
// 3. The lanes share the rows of a tile. Each lane loads the labels of kRows rows, then their log-probabilities, so
//    that these loads overlap.
// 4. The warp stores zeros while these loads are in flight, then the gradients of the labels over them. Few sectors are
//    written twice; with short rows every sector would be.
//
// With few rows (kFew) tiles own no rows: after its tiles, the first warp evaluates all rows once more, adds their
// losses and divides the sum. No block waits for the others then: waiting takes half as long as a short kernel.
//
// A warp owns its tiles, so __syncwarp() is the only barrier.
//
// Traffic: labels and one element of each row are read; each gradient is written once, that of a label twice.
// Preconditions: the gradients have no gaps and begin at a multiple of 16 bytes; the SubwarpGroup has width 1.
#pragma once
#include "softmax/label_only.cuh"

// kTileVectors: number of vectors of a tile that each lane stores. kOwns: tiles own the rows that begin in them.
template <int kVecSize, int kTileVectors, bool kOwns = true>
struct LabelOnlyTiles {
  static constexpr int kSize = kTileVectors * kWarp * kVecSize;  // elements of a tile
  static constexpr int kRows = 2;

  // Stores zeros to the first `length` gradients of a tile.
  template <class Gradient>
  static __device__ __forceinline__ void clear_tile(Gradient* to, int length) {
    const Pack<Gradient, kVecSize> zeros{};
#pragma unroll 1
    for (int i = threadIdx.x % kWarp * kVecSize; i < length; i += kWarp * kVecSize) {
      if (i + kVecSize <= length) {
        store_pack<kVecSize>(to + i, zeros);
      } else {
#pragma unroll
        for (int j = 0; j < kVecSize; ++j) {
          if (i + j < length) to[i + j] = zeros.element[j];
        }
      }
    }
  }

  // Processes the rows of the tile that begins at element `begin`. Source: LabelLosses or StoredLabelGradients.
  // Precondition: all lanes of the warp call it together.
  template <bool kGradient, class Program, class Source>
  static __device__ __forceinline__ void visit_tile(const Program& program, Source& source, int64 begin) {
    using Compute = typename Program::Compute;
    using Gradient = typename Program::Gradient;
    const int64 classes = program.space.classes, left = program.space.rows * classes - begin;
    const int length = left < kSize ? static_cast<int>(left) : kSize, lane = threadIdx.x % kWarp;
    // The first row of the tile begins `skipped` elements before the tile.
    const int64 first_row = quotient(begin, classes), skipped = begin - first_row * classes;
    // Positions in the tile: its second row begins at `second`, each further row `step` elements later. Both are
    // limited to kSize, which fits an int.
    const int second = static_cast<int>(classes - skipped < kSize ? classes - skipped : kSize),
              step = static_cast<int>(classes < kSize ? classes : kSize);
    Gradient* const to = program.gradients + begin;
    const auto begins_at = [&](int k) { return k == 0 ? 0 : second + (k - 1) * step; };
    const auto is_owned = [&](int k) { return kOwns && (k != 0 || skipped == 0); };
    // Position of the label of the tile's k-th row, or -1 if it is outside the tile or the row is inactive.
    const auto place_of = [&](int k, const RowTarget<Compute>& t) {
      const int64 place = t.label + (k == 0 ? -skipped : static_cast<int64>(begins_at(k)));
      return t.active && place >= 0 && place < length ? static_cast<int>(place) : -1;
    };
    // All lanes execute the first iteration, because they clear the tile together.
#pragma unroll 1
    for (int k = lane; k == lane || begins_at(k) < length; k += kRows * kWarp) {
      typename Program::LabelLoad labels[kRows] = {};
      typename Source::template Load<Program> loads[kRows] = {};
      RowTarget<Compute> t[kRows];
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const int row = k + j * kWarp;
        if (begins_at(row) >= length || !(kGradient || is_owned(row))) continue;
        program.space.offsets(first_row + row, t[j].offset);
        labels[j] = program.load_label(t[j].offset);
      }
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        // A label that has not been loaded counts as masked.
        program.validate_label(t[j], labels[j]);
        const int row = k + j * kWarp;
        if (t[j].active && (is_owned(row) || place_of(row, t[j]) >= 0)) loads[j] = source.load(program, t[j]);
      }
      if (kGradient && k == lane) {
        clear_tile(to, length);
        __syncwarp();
      }
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        const int row = k + j * kWarp, place = place_of(row, t[j]);
        const bool owned = is_owned(row) && begins_at(row) < length;
        if (!owned && place < 0) continue;
        const Compute gradient = source.gradient(program, t[j], loads[j], owned);
        if constexpr (kGradient) {
          if (place >= 0) to[place] = Narrow<Gradient>::from(gradient);
        }
      }
    }
  }

  // Processes the tiles of this warp, chunk by chunk. Calls finish(chunk) at the end of each chunk.
  template <bool kGradient, class Program, class Source, class Finish>
  static __device__ __forceinline__ void for_each_chunk(const Program& program, const SubwarpGroup& group,
                                                        Source& source, int64 chunks, const Finish& finish) {
    const int64 elements = program.space.rows * program.space.classes;
#pragma unroll 1
    for (int64 chunk = group.worker(); chunk < chunks; chunk += group.workers()) {
#pragma unroll 1
      for (int64 begin = chunk * kSize; begin < elements; begin += chunks * kSize) {
        visit_tile<kGradient>(program, source, begin);
      }
      finish(chunk);
    }
  }
};

// Source of gradients: evaluates each row from the log-probability of its label. `owned` is true in one tile per row,
// which adds the row's loss to `total` and stores the outputs per row.
template <class Scale>
struct LabelLosses {
  Scale& scale;
  double total;

  template <class Program>
  using Load = typename Program::Input;

  template <class Program, class Compute>
  __device__ __forceinline__ Load<Program> load(const Program& program, const RowTarget<Compute>& t) const {
    return program.raw(t.offset, t.label);
  }
  template <class Program, class Compute>
  __device__ __forceinline__ Compute gradient(const Program& program, const RowTarget<Compute>& t,
                                              const Load<Program>& loaded, bool owned) {
    const auto y = label_only_result(program, t, loaded, owned);
    if (owned) total += static_cast<double>(y.value);
    return y.grad_coeffs.target * grad_factor(scale, t.offset);
  }
};

// Source of gradients, as LabelLosses, from stored coefficients.
template <class Stored>
struct StoredLabelGradients {
  const Stored* grad_output;
  int64 result_stride;
  double scale;

  template <class Compute>
  struct CoefficientAndGradOutput {
    Compute coefficient;
    Stored grad_output;
  };
  template <class Program>
  using Load = CoefficientAndGradOutput<typename Program::Compute>;

  template <class Program, class Compute>
  __device__ __forceinline__ Load<Program> load(const Program& program, const RowTarget<Compute>& t) const {
    const int64 row = t.offset[kResults];
    return {program.grad_coeffs[row].target, grad_output[row * result_stride]};
  }
  template <class Program, class Compute>
  __device__ __forceinline__ Compute gradient(const Program&, const RowTarget<Compute>&, const Load<Program>& loaded,
                                              bool) const {
    return scaled_coefficient(loaded.coefficient, widen<double>(loaded.grad_output) * scale);
  }
};

// Rows of each lane of the warp that evaluates all rows if there are few.
constexpr int kFewRows = 2;

// Returns the divisor, given the labels of all rows, `kCount` in each lane; labels of rows that do not exist are
// masked. Precondition: all lanes of the warp call it together.
template <int kCount, class Divisor, class LabelLoad>
__device__ __forceinline__ double divisor_of(const Divisor& divisor, const LabelLoad (&labels)[kCount]) {
  if constexpr (kSameType<Divisor, double>) {
    return divisor;
  } else {
    return divisor.of(labels);
  }
}

// Visits every row once, as TwoPassReader.
template <int kVecSize, int kTileVectors, bool kFew>
struct LabelOnlyTilesReader {
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    if constexpr (kGradient || !kFew) {
      LabelLosses<Scale> source{scale, 0.0};
      const auto finish = [&](int64 chunk) {
        finish_chunk(group, scale, chunk, source.total, kFew ? nullptr : work.partials);
        source.total = 0.0;
      };
      LabelOnlyTiles<kVecSize, kTileVectors, !kFew>::template for_each_chunk<kGradient>(program, group, source, chunks,
                                                                                        finish);
    }
  }

  // value = sum of the losses of few rows / divisor. Also stores the outputs per row. Preconditions: every thread of
  // every block calls it once, after its tiles; there are at most kFewRows kWarp rows.
  template <class Program, class Divisor, class Result>
  static __device__ __forceinline__ void find_value(const Program& program, const Divisor& divisor, Result* value) {
    using Compute = typename Program::Compute;
    if (global_warp() != 0) return;
    RowTarget<Compute> t[kFewRows];
    typename Program::LabelLoad labels[kFewRows] = {};
    typename Program::Input log_probs[kFewRows] = {};
    const auto exists = [&](int i) { return threadIdx.x % kWarp + i * kWarp < program.space.rows; };
#pragma unroll
    for (int i = 0; i < kFewRows; ++i) {
      if (!exists(i)) continue;
      program.space.offsets(threadIdx.x % kWarp + i * kWarp, t[i].offset);
      labels[i] = program.load_label(t[i].offset);
    }
#pragma unroll
    for (int i = 0; i < kFewRows; ++i) {
      program.validate_label(t[i], labels[i]);
      if (t[i].active) log_probs[i] = program.raw(t[i].offset, t[i].label);
    }
    // Counts labels while the log-probabilities are in flight.
    const double by = divisor_of(divisor, labels);
    double total = 0.0;
#pragma unroll
    for (int i = 0; i < kFewRows; ++i) {
      if (exists(i)) total += static_cast<double>(label_only_result(program, t[i], log_probs[i], true).value);
    }
    total = warp_sum(total);
    if (threadIdx.x % kWarp == 0) *value = Narrow<Result>::from(total / by);
  }
};
template <int kVecSize, int kTileVectors>
constexpr bool kFindsValue<LabelOnlyTilesReader<kVecSize, kTileVectors, true>> = true;

// Writes the gradients from stored coefficients, as apply_grad_coeffs.
template <int kVecSize, int kTileVectors, class Program, class Stored>
__device__ __forceinline__ void apply_grad_coeffs_label_only_tiles(const Program& program, const SubwarpGroup& group,
                                                                   int64 chunks, int64 result_stride, double scale,
                                                                   const Stored* grad_output) {
  StoredLabelGradients<Stored> source{grad_output, result_stride, scale};
  LabelOnlyTiles<kVecSize, kTileVectors>::template for_each_chunk<true>(program, group, source, chunks, [](int64) {});
}
