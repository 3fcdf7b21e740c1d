// Rows in registers whose classes lie apart, neighbouring rows between them: images (N, C, H, W). Value and gradient of
// softmax.cuh, by register_rows.cuh.
//
//   x[n, c, h, w]: a row is (n, :, h, w); lane l takes the kVecSize rows from w = (32 tile + l) kVecSize
//
// 1. A tile is 32 kVecSize neighbouring rows: of each class a warp reads whole cache lines.
// 2. Up to 32 classes, a warp takes a tile, all its classes. Of more, the kWarps warps of a block share a tile and take
//    every kWarps-th class each.
// 3. Gradients are written as logits were read.
//
// Traffic: each logit is read once, each gradient written once. Preconditions: kVecSize divides the number of rows;
// rows of a vector are contiguous; classes <= kWarps kPerThread, equal to it if kWarps is 1.
#pragma once
#include "softmax/register_rows.cuh"

// The logits of kVecSize neighbouring rows.
template <class Storage, int kVecSize_, int kPerThread_, int kWarps>
struct ColumnSource {
  static constexpr int kVecSize = kVecSize_;
  static constexpr int kPerThread = kPerThread_;
  const Storage* from;
  Storage* to;
  int64 stride, gradient_stride;
  int warp, classes;
  int64 first[kRowStreams];  // offsets of the first row

  // Precondition: `row` is a multiple of kVecSize.
  template <class Program>
  __device__ __forceinline__ ColumnSource(const Program& program, int64 row)
      : stride(program.space.class_stride[kLogits]),
        gradient_stride(program.space.class_stride[kGradients]),
        warp(kWarps == 1 ? 0 : threadIdx.x / kWarp),
        classes(static_cast<int>(program.space.classes)) {
    program.space.offsets(row, first);
    from = program.input + first[kLogits];
    to = program.gradients + first[kGradients];
  }
  // Offsets of the i-th row.
  template <class Program>
  __device__ __forceinline__ void offsets(const Program& program, int i, int64 (&at)[kRowStreams]) const {
#pragma unroll
    for (int s = 0; s < kRowStreams; ++s) at[s] = first[s] + i * program.space.at.stride[s][0];
  }
  __device__ __forceinline__ int class_of(int j) const {
    return kWarps == 1 ? j : warp + j * kWarps;
  }
  __device__ __forceinline__ bool has(int j) const {
    return kWarps == 1 || class_of(j) < classes;
  }
  __device__ __forceinline__ Storage at(int c, int i) const {
    return from[c * stride + i];
  }
  __device__ __forceinline__ void load(Pack<Storage, kVecSize> (&x)[kPerThread]) const {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if (has(j)) x[j] = load_stream<kVecSize>(from + class_of(j) * stride);
    }
  }
  __device__ __forceinline__ void store(const Pack<Storage, kVecSize> (&x)[kPerThread]) const {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if (has(j)) store_pack<kVecSize>(to + class_of(j) * gradient_stride, x[j]);
    }
  }
};

// As TwoPassReader. Workers take chunks in turn.
template <int kVecSize, int kPerThread, int kWarps>
struct ColumnReader {
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    const int64 vectors = program.space.rows / kVecSize, tiles = (vectors + kWarp - 1) / kWarp;
    SyncState sync{0, 0};
#pragma unroll 1
    for (int64 chunk = group.worker(); chunk < chunks; chunk += group.workers()) {
      double total = 0.0;
#pragma unroll 1
      for (int64 tile = chunk; tile < tiles; tile += chunks) {
        const int64 vector = tile * kWarp + threadIdx.x % kWarp;
        const int count = vector < vectors ? kVecSize : 0;
        const ColumnSource<typename Program::Input, kVecSize, kPerThread, kWarps> source(
            program, count > 0 ? vector * kVecSize : 0);
        LabelsOfLane<kVecSize, Program> labels;
        labels.read(program, source, count);
        total += visit_register_rows<kGradient, kWarps>(program, source, labels, scale, count);
      }
      finish_chunk(group, scale, chunk, total, work.partials, sync);
    }
  }
};
