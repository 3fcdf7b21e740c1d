// One thread per row, for contiguous rows of few classes. Value and gradient of softmax.cuh.
//
//   32 rows of C classes = one contiguous stretch of 32 C elements per warp
//
// 1. A warp copies its 32 rows to shared memory, with coalesced loads.
// 2. Each thread evaluates one row, as in thread_per_row.cuh. It overwrites the logits in shared memory by the
//    gradient.
// 3. The warp writes the 32 rows back, with coalesced stores.
//
// If each thread moved its own row, a warp would touch 32 cache lines per class: gradients were written at a quarter of
// the speed.
//
// Traffic: each logit is read once, each gradient written once. Preconditions: rows are contiguous and follow each
// other without gaps; C <= 32.
#pragma once
#include "softmax/rows_of_warp.cuh"
#include "softmax/thread_per_row.cuh"

// As ThreadPerRowReader, with one contiguous row per lane.
struct PackedThreadPerRowReader {
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    const int64 rows = program.space.rows, step = chunks * kWarp;
    for_each_chunk(group, scale, chunks, work, [&](int chunk) {
      double total = 0.0;
      int64 next[kRowStreams];
      LaneLabels<1, Program> ahead;
      int64 first = static_cast<int64>(chunk) * kWarp;
      const auto advance = [&] {
        const int64 row = first + group.row_slot();
        program.space.offsets(row < rows ? row : 0, next);
        ahead.read(program, next, row < rows);
      };
      advance();
#pragma unroll 1
      while (first < rows) {
        const LaneLabels<1, Program> now = ahead;
        const int64 row_now = first + group.row_slot();
        const PackedRows<typename Program::Input> source(program, first);
        const int count = row_now < rows;
        first += step;
        advance();
        total += visit_rows_of_thread<kGradient>(program, source, row_now, now, scale, count);
        if constexpr (!kGradient) __syncwarp();
      }
      return total;
    });
  }
};
