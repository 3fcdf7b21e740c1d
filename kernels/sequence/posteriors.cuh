// CTC: posterior probability of every label of a target, and of the blank, in each frame, given the target.
//
//   out[t, j] = alpha's bracket (l_j at t) beta's product (l_j at t) / sum over all states of frame t,   j = 0 .. S - 1
//   out[t, room] = the same, summed over the blanks b_0 .. b_S
//
// 1. The recursion (recursion.cuh) leaves unnormalised posteriors of all states in the lattice. Each block processes a
//    run of kFrames frames of one sample, and each of its warps a frame at a time.
// 2. The lanes of the warp sum the posteriors of the frame in double, separately for blanks and labels.
// 3. They divide each posterior by the frame's own sum, and store it. Frames past the end, and all frames of a sample
//    without alignments, get 0. Frames of a sample whose loss is NaN get NaN.
//
// These are posteriors of positions. frames.cuh writes posteriors of classes: they are the negated gradient of the
// loss.
//
// Traffic: 4 bytes (8 in double) read per state, of which a frame has 2 S + 1; `room` + 1 numbers written per frame.
// Preconditions: stated at the function.
#pragma once
#include "sequence/frames.cuh"

// Writes the posteriors of run `block`, where runs are numbered sample by sample. Preconditions: blocks of 128 threads;
// `out` has the gradient strides of `Sequences`, with room + 1 classes; both halves of the recursion have run.
template <class Mantissa>
__device__ __forceinline__ void write_positions(const Sequences& shape, Mantissa* out, const Sample* samples,
                                                const Mantissa* lattice, const unsigned* broken, unsigned block) {
  const unsigned runs = runs_of(shape, kFrames);
  const int64 n = block / runs, first = static_cast<int64>(block % runs) * kFrames;
  const int64 end = min(first + kFrames, shape.frames);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const Sample sample = samples[n];
  const int64 size = sample.labels + 1;
  bool is_nan;
  const bool exists = has_alignments(shape, sample, broken, n, kNanLoss, is_nan);
  for (int64 t = first + warp; t < end; t += warps) {
    Mantissa* const row = out + shape.g_offset(n) + t * shape.g_frame;
    if (!exists || is_nan || t >= sample.frames) {
      const Mantissa fill = is_nan && t < sample.frames ? not_a_number(Mantissa(0)) : Mantissa(0);
      for (int64 j = lane; j <= shape.room; j += 32) row[j * shape.g_class] = fill;
      continue;
    }
    const Mantissa* const posteriors = lattice + Lattice<Mantissa>::row(sample, shape.frames, t);
    double of_blank = 0.0, of_labels = 0.0;
    for (int64 j = lane; j < size; j += 32) {
      of_blank += posteriors[j];
      if (j < size - 1) of_labels += posteriors[size + j];
    }
    of_blank = warp_sum(of_blank);
    const double total = of_blank + warp_sum(of_labels);
    for (int64 j = lane; j < shape.room; j += 32) {
      const double label = j < size - 1 ? posteriors[size + j] : Mantissa(0);
      row[j * shape.g_class] = static_cast<Mantissa>(label / total);
    }
    if (lane == 0) row[shape.room * shape.g_class] = static_cast<Mantissa>(of_blank / total);
  }
}
