// Rows in registers whose classes lie apart, neighbouring rows between them: images (N, C, H, W) of few classes. Value
// and gradient of softmax.cuh, by register_rows.cuh.
//
//   x[n, c, h, w]: a row is (n, :, h, w); lane l takes the kVecSize rows from w = (32 tile + l) kVecSize
//
// 1. A warp takes tiles of 32 kVecSize neighbouring rows: of each class it reads whole cache lines.
// 2. Gradients are written as logits were read.
//
// Traffic: each logit is read once, each gradient written once. Preconditions: kVecSize divides the number of rows;
// rows of a vector are contiguous; there are kPerThread classes.
#pragma once
#include "softmax/register_rows.cuh"

// The logits of kVecSize neighbouring rows.
template <class Storage, int kVecSize_, int kPerThread_>
struct ColumnSource {
  static constexpr int kVecSize = kVecSize_;
  static constexpr int kPerThread = kPerThread_;
  const Storage* from;
  Storage* to;
  int64 stride, gradient_stride;
  int64 first[kRowStreams];  // offsets of the first row

  // Precondition: `row` is a multiple of kVecSize.
  template <class Program>
  __device__ __forceinline__ ColumnSource(const Program& program, int64 row)
      : stride(program.space.class_stride[kLogits]), gradient_stride(program.space.class_stride[kGradients]) {
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
  __device__ __forceinline__ void load(Pack<Storage, kVecSize> (&x)[kPerThread]) const {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) x[j] = load_stream<kVecSize>(from + j * stride);
  }
  __device__ __forceinline__ void store(const Pack<Storage, kVecSize> (&x)[kPerThread]) const {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) store_pack<kVecSize>(to + j * gradient_stride, x[j]);
  }
};

// As TwoPassReader. Warps take chunks in turn.
template <int kVecSize, int kPerThread>
struct ColumnReader {
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    const int64 vectors = program.space.rows / kVecSize, step = chunks * kWarp;
#pragma unroll 1
    for (int64 chunk = group.worker(); chunk < chunks; chunk += group.workers()) {
      double total = 0.0;
#pragma unroll 1
      for (int64 first = chunk * kWarp; first < vectors; first += step) {
        const int64 vector = first + threadIdx.x % kWarp;
        const int count = vector < vectors ? kVecSize : 0;
        const ColumnSource<typename Program::Input, kVecSize, kPerThread> source(program,
                                                                                 count > 0 ? vector * kVecSize : 0);
        LaneLabels<kVecSize, Program> labels;
        labels.read(program, source.first, count);
        total += visit_register_rows<kGradient>(program, source, labels, scale, count);
      }
      finish_chunk(group, scale, chunk, total, work.partials);
    }
  }
};
