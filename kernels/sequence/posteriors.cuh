// CTC: the probability of every label of a target, and of the blank, in each frame, given the target.
//
//   out[t, j] = alpha's bracket (l_j at t) beta's product (l_j at t) / sum over all states of frame t,   j = 0 .. S - 1
//   out[t, room] = the same, summed over the blanks b_0 .. b_S
//
// A warp takes a frame of the lattice that the recursion has left (recursion.cuh), a block a run of frames.
// Probabilities of classes are the gradient of the loss with the other sign: frames.cuh writes these.
//
// Traffic: 4 (8) bytes read for each state, of which there are 2 S + 1 per frame; `room` + 1 numbers written.
#pragma once
#include "sequence/frames.cuh"

// Preconditions: blocks of 128 threads; `out` lies as `Sequences` says of a gradient, with room + 1 classes.
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
