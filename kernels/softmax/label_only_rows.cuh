// Losses of log-probabilities as in label_only.cuh, with several rows per lane. There are three versions:
//
//   value, gradient    as label_only.cuh
//   LabelOnlyShort     short rows whose gradients have no gaps: a tile is 32 kRows rows, one contiguous range of
//                      gradients; lane l owns rows l, 32 + l, ... of it
//   LabelOnlyColumns   strided classes with neighbouring rows between them, as in images (N, C, H, W): a tile is a
//                      slice of the classes of 32 kRows neighbouring rows; lane l owns the kRows rows from l kRows on
//   LabelOnlySparse    gradients that are zero already: a tile is 32 kRows rows; lane l owns rows l, 32 + l, ... of it
//
// 1. Each lane loads the labels of its rows: LabelOnlyShort and LabelOnlySparse one tile ahead of their use. Then it
//    loads the log-probabilities of all its labels, so that these loads overlap, and evaluates the rows.
// 2. LabelOnlyShort: the lane writes the gradients of its labels into an image of the tile in shared memory, which is 0
//    elsewhere. The warp stores the image as vectors of kVecSize elements; then each lane clears what it wrote.
//    LabelOnlyColumns: the lane stores vectors of kRows rows, class by class. If there are few rows, their classes are
//    cut into slices. Each slice is a tile, other warps process it and evaluate the rows again; the first slice owns
//    the losses. LabelOnlySparse: the lane stores the gradients of its labels directly.
//
// A warp owns its image and its tiles, so __syncwarp() is the only barrier.
//
// Traffic: each slice reads the labels and one element of each row. Each gradient is written once, by LabelOnlySparse
// only those of the labels. Preconditions: the gradients of LabelOnlyShort begin at a multiple of 16 bytes and have no
// gaps; for LabelOnlyColumns, kRows divides the number of rows, and the rows of a vector are adjacent in memory; the
// group is a SlicedRows of width 1.
#pragma once
#include "softmax/label_only_tiles.cuh"
#include "softmax/lane_rows.cuh"

// Warps that process the classes of rows in `slices` slices.
struct SlicedRows : SubwarpGroup {
  int slices;
};

// Evaluates the first `count` rows of a lane. places[i] receives the class of row i's label relative to class `first`,
// or -1 if the row is inactive or the label is not among the `classes` classes from `first` on. `owned`: this tile owns
// the losses of the rows. offsets(i, at) sets the offsets of row i, which exists.
template <int kRows, class Program, class Source, class Offsets, class Compute = typename Program::Compute>
__device__ __forceinline__ void evaluate_labels(const Program& program, Source& source,
                                                const LaneLabels<kRows, Program>& labels, int count,
                                                const Offsets& offsets, bool owned, int64 first, int classes,
                                                Compute (&gradients)[kRows], int (&places)[kRows]) {
  RowTarget<Compute> t[kRows];
  typename Source::template Load<Program> loads[kRows] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    // Labels of rows that do not exist have not been loaded and count as masked.
    program.validate_label(t[i], labels.label_load[i]);
    if (i < count) offsets(i, t[i].offset);
    if (t[i].active) loads[i] = source.load(program, t[i]);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    gradients[i] = Compute(0);
    if (i < count) gradients[i] = source.gradient(program, t[i], loads[i], owned);
    const int64 place = t[i].label - first;
    places[i] = t[i].active && place >= 0 && place < classes ? static_cast<int>(place) : -1;
  }
}

// Tiles of 32 kRows rows. Each lane owns every 32nd row of a tile.
template <int kRows>
struct LabelTiles {
  static constexpr int kTile = kRows * kWarp;  // rows

  // Number of rows of this lane in a tile.
  template <class Program>
  static __device__ __forceinline__ int count_of(const Program& program, int64 tile) {
    const int64 left = program.space.rows - tile * kTile - threadIdx.x % kWarp;
    return left >= kTile ? kRows : left <= 0 ? 0 : static_cast<int>((left + kWarp - 1) / kWarp);
  }
  // Starts the loads of the labels of this lane's rows.
  template <class Program>
  static __device__ __forceinline__ LaneLabels<kRows, Program> read(const Program& program, int64 tile) {
    const int64 row = tile * kTile + threadIdx.x % kWarp;
    LaneLabels<kRows, Program> labels;
    if constexpr (Program::Space::kOneDimension) {
      int64 offset[kRowStreams];
      program.space.offsets(row, offset);
      labels.read(program, offset, count_of(program, tile), kWarp);
    } else {
      labels.read_each(program, count_of(program, tile),
                       [&](int i, int64(&at)[kRowStreams]) { program.space.offsets(row + i * kWarp, at); });
    }
    return labels;
  }
};

template <int kVecSize, int kRows>
struct LabelOnlyShort {
  using Tiles = LabelTiles<kRows>;
  static constexpr int kTile = Tiles::kTile;

  // Processes the tiles of this warp, chunk by chunk. Calls finish(chunk) at the end of each chunk.
  template <bool kGradient, class Program, class Source, class Finish>
  static __device__ __forceinline__ void for_each_chunk(const Program& program, const SlicedRows& group, Source& source,
                                                        int64 chunks, const Finish& finish) {
    using Compute = typename Program::Compute;
    using Gradient = typename Program::Gradient;
    using Vector = Pack<Gradient, kVecSize>;
    const int classes = static_cast<int>(program.space.classes), lane = threadIdx.x % kWarp;
    const int64 rows = program.space.rows, tiles = (rows + kTile - 1) / kTile;
    const int vectors = kTile * classes / kVecSize;
    extern __shared__ uint4 images[];
    Vector* const image = reinterpret_cast<Vector*>(images) + threadIdx.x / kWarp * vectors;
    Gradient* const own = reinterpret_cast<Gradient*>(image) + lane * classes;
    if constexpr (kGradient) {
      for (int k = lane; k < vectors; k += kWarp) image[k] = Vector{};
      __syncwarp();
    }
#pragma unroll 1
    for (int64 chunk = group.worker(); chunk < chunks; chunk += group.workers()) {
      LaneLabels<kRows, Program> ahead = Tiles::read(program, chunk);
#pragma unroll 1
      for (int64 tile = chunk; tile < tiles; tile += chunks) {
        const LaneLabels<kRows, Program> labels = ahead;
        const int64 row = tile * kTile + lane;
        const int count = Tiles::count_of(program, tile);
        ahead = Tiles::read(program, tile + chunks);
        Compute gradients[kRows];
        int places[kRows];
        evaluate_labels<kRows>(
            program, source, labels, count,
            [&](int i, int64(&at)[kRowStreams]) { program.space.offsets(row + i * kWarp, at); }, true, 0, classes,
            gradients, places);
        if constexpr (kGradient) {
          Gradient* const to = program.gradients + tile * kTile * classes;
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if (places[i] >= 0) own[i * kWarp * classes + places[i]] = Narrow<Gradient>::from(gradients[i]);
          }
          __syncwarp();
          if (rows - tile * kTile >= kTile) {
#pragma unroll 4
            for (int k = lane; k < vectors; k += kWarp) store_pack<kVecSize>(to + k * kVecSize, load_words(image + k));
          } else {
            const int elements = static_cast<int>(rows - tile * kTile) * classes;
            for (int k = lane; k < elements; k += kWarp) to[k] = reinterpret_cast<const Gradient*>(image)[k];
          }
          __syncwarp();
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if (places[i] >= 0) own[i * kWarp * classes + places[i]] = Narrow<Gradient>::from(Compute(0));
          }
        }
      }
      finish(chunk);
    }
  }
};

template <int kRows>
struct LabelOnlySparse {
  // Processes the tiles of this warp, as LabelOnlyShort::for_each_chunk.
  template <bool kGradient, class Program, class Source, class Finish>
  static __device__ __forceinline__ void for_each_chunk(const Program& program, const SlicedRows& group, Source& source,
                                                        int64 chunks, const Finish& finish) {
    using Tiles = LabelTiles<kRows>;
    using Compute = typename Program::Compute;
    using Gradient = typename Program::Gradient;
    const int64 tiles = (program.space.rows + Tiles::kTile - 1) / Tiles::kTile;
    const int classes = static_cast<int>(program.space.classes);
#pragma unroll 1
    for (int64 chunk = group.worker(); chunk < chunks; chunk += group.workers()) {
      LaneLabels<kRows, Program> ahead = Tiles::read(program, chunk);
#pragma unroll 1
      for (int64 tile = chunk; tile < tiles; tile += chunks) {
        const LaneLabels<kRows, Program> labels = ahead;
        const int64 row = tile * Tiles::kTile + threadIdx.x % kWarp;
        const auto offsets = [&](int i, int64(&at)[kRowStreams]) { program.space.offsets(row + i * kWarp, at); };
        ahead = Tiles::read(program, tile + chunks);
        Compute gradients[kRows];
        int places[kRows];
        evaluate_labels<kRows>(program, source, labels, Tiles::count_of(program, tile), offsets, true, 0, classes,
                               gradients, places);
        if constexpr (kGradient) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            if (places[i] < 0) continue;
            int64 at[kRowStreams];
            offsets(i, at);
            program.gradients[at[kGradients] + places[i] * program.space.class_stride[kGradients]] =
                Narrow<Gradient>::from(gradients[i]);
          }
        }
      }
      finish(chunk);
    }
  }
};

template <int kRows>
struct LabelOnlyColumns {
  // Stores the gradients of `classes` classes of a lane's rows: 0, except those of the labels, whose classes are
  // `places`.
  template <class Gradient, class Compute>
  static __device__ __forceinline__ void store_columns(Gradient* to, int64 stride, int classes,
                                                       const int (&places)[kRows], const Compute (&gradients)[kRows]) {
#pragma unroll 4
    for (int c = 0; c < classes; ++c, to += stride) {
      Compute g[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) g[i] = c == places[i] ? gradients[i] : Compute(0);
      store_pack<kRows>(to, NarrowPack<Gradient, kRows>::from(g));
    }
  }
  // Processes the tiles of this warp, as LabelOnlyShort::for_each_chunk.
  template <bool kGradient, class Program, class Source, class Finish>
  static __device__ __forceinline__ void for_each_chunk(const Program& program, const SlicedRows& group, Source& source,
                                                        int64 chunks, const Finish& finish) {
    using Compute = typename Program::Compute;
    using Gradient = typename Program::Gradient;
    const int64 vectors = program.space.rows / kRows, of_slice = (vectors + kWarp - 1) / kWarp;
    const int64 classes = program.space.classes, length = (classes + group.slices - 1) / group.slices;
    const int64 tiles = of_slice * group.slices, stride = program.space.class_stride[kGradients];
#pragma unroll 1
    for (int64 chunk = group.worker(); chunk < chunks; chunk += group.workers()) {
#pragma unroll 1
      for (int64 tile = chunk; tile < tiles; tile += chunks) {
        const int64 slice = group.slices == 1 ? 0 : quotient(tile, of_slice), first = slice * length;
        const int64 vector = (tile - slice * of_slice) * kWarp + threadIdx.x % kWarp;
        const int count = vector < vectors ? kRows : 0,
                  here = static_cast<int>(classes - first < length ? classes - first : length);
        int64 offset[kRowStreams];
        program.space.offsets(count > 0 ? vector * kRows : 0, offset);
        LaneLabels<kRows, Program> labels;
        labels.read(program, offset, count);
        Compute gradients[kRows];
        int places[kRows];
        evaluate_labels<kRows>(
            program, source, labels, count,
            [&](int i, int64(&at)[kRowStreams]) {
#pragma unroll
              for (int s = 0; s < kRowStreams; ++s) at[s] = offset[s] + i * program.space.at.stride[s][0];
            },
            slice == 0, first, here, gradients, places);
        if constexpr (kGradient) {
          if (count > 0) {
            store_columns(program.gradients + offset[kGradients] + first * stride, stride, here, places, gradients);
          }
        }
      }
      finish(chunk);
    }
  }
};

// Visits every row once, as TwoPassReader. Rows: LabelOnlyShort, LabelOnlySparse or LabelOnlyColumns.
template <class Rows>
struct LabelOnlyRowsReader {
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SlicedRows& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    LabelLosses<Scale> source{scale, 0.0};
    SyncState unused{0, 0};
    const auto finish = [&](int64 chunk) {
      finish_chunk(group, scale, chunk, source.total, work.partials, unused);
      source.total = 0.0;
    };
    Rows::template for_each_chunk<kGradient>(program, group, source, chunks, finish);
  }
};

// Writes the gradients from stored coefficients, as apply_grad_coeffs.
template <class Rows, class Program, class Stored>
__device__ __forceinline__ void apply_grad_coeffs_label_only_rows(const Program& program, const SlicedRows& group,
                                                                  int64 chunks, int64 result_stride, double scale,
                                                                  const Stored* grad_output) {
  StoredLabelGradients<Stored> source{grad_output, result_stride, scale};
  Rows::template for_each_chunk<true>(program, group, source, chunks, [](int64) {});
}
