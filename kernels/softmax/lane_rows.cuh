// Rows that each belong to a single lane: loads of their labels, and their evaluation side by side, without branches
// for the usual row.
//
// 1. LaneLabels loads the labels of the kVecSize rows of a lane.
// 2. active_classes maps each label to its class, or to a negative number if the row is inactive: masked, ignored, past
//    the last row, or with a label out of range.
// 3. evaluate_lane_rows evaluates all rows at once, also inactive ones, whose results it drops. Inactive rows, outputs
//    per row and rows without a gradient are rare, or rare enough: each case has one branch for all rows of the lane.
//    Ignored pixels are frequent in images, though, so that branch only counts them. Just rows with a label out of
//    range or with outputs find their offsets again and wait for their label.
//
// The fixed cost of a row, apart from its logits, limits short rows; all of it is in this file. WarpTiles claims tiles
// for a warp.
//
// Traffic: labels and masks are read once, and again in rare cases. Preconditions: stated at each function.
#pragma once
#include "softmax/rows.cuh"

// The tiles of a warp. Tile t belongs to chunk t % chunks, and a warp owns whole chunks. Its first chunk is static; it
// claims the following ones a tile ahead of their use, so that no lane waits for the atomic and the loads of the next
// tile can be in flight. Preconditions: all lanes of the warp call each function together; chunks <= tiles.
struct WarpTiles {
  int chunk;  // >= chunks after the last one
  int64 tile;
  unsigned* counter;  // nullptr: all chunks are static
  unsigned claimed;   // valid in the leader

  __device__ __forceinline__ WarpTiles(const SubwarpGroup& group, unsigned* counter)
      : chunk(static_cast<int>(group.worker())), tile(chunk), counter(counter), claimed(0) {
    claim(group);
  }
  // True if this is the last tile of its chunk.
  __device__ __forceinline__ bool last_in_chunk(int64 chunks, int64 tiles) const {
    return tile + chunks >= tiles;
  }
  __device__ __forceinline__ void advance(const SubwarpGroup& group, int64 chunks, int64 tiles) {
    const bool last = last_in_chunk(chunks, tiles);
    tile += chunks;
    if (!last) return;
    const int workers = static_cast<int>(group.workers());
    chunk = counter == nullptr ? chunk + workers : workers + static_cast<int>(group.broadcast({0, claimed}));
    tile = chunk;
    claim(group);
  }

 private:
  __device__ __forceinline__ void claim(const SubwarpGroup& group) {
    if (counter != nullptr && group.is_leader()) claimed = claim_next(counter);
  }
};

// Tiles of kRows neighbouring rows, in the order of the rows. A tile at the end of the inner dimension has fewer rows.
template <int kRows>
struct InnerTiles {
  int64 inner, of_inner, count;  // rows and tiles of the inner dimension, and all tiles
  struct Tile {
    int64 row;            // the first one
    int64 before, after;  // rows of the inner dimension before it, and from it on
  };

  template <class Space>
  __device__ __forceinline__ explicit InnerTiles(const Space& space)
      : inner(Space::kOneDimension ? space.rows : space.at.size[0]),
        of_inner((inner + kRows - 1) / kRows),
        count(space.rows / inner * of_inner) {
  }
  __device__ __forceinline__ Tile operator[](int64 tile) const {
    const int64 outer = quotient(tile, of_inner), before = (tile - outer * of_inner) * kRows;
    return {outer * inner + before, before, inner - before};
  }
};

// Labels and masks of a lane's rows, as loaded.
template <int kVecSize, class Program>
struct LaneLabels {
  // Labels of rows that do not exist stay 0: the branchless evaluation reads them too.
  typename Program::LabelLoad label_load[kVecSize] = {};

  // Loads the labels of rows [begin, count) of kVecSize. Row 0 is at `offset`, and rows are `apart` rows from each
  // other.
  __device__ __forceinline__ void read(const Program& program, const int64 (&offset)[kRowStreams], int count,
                                       int apart = 1, int begin = 0) {
    auto* label = program.labels + offset[kLabels];
    auto* mask = program.mask;
    if constexpr (Program::kMasked) mask += offset[kRowMask];
    const auto& step = program.space.at.stride;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      if (i >= begin && i < count) label_load[i] = program.load_label(label, mask);
      label += apart * step[kLabels][0];
      if constexpr (Program::kMasked) mask += apart * step[kRowMask][0];
    }
  }
  // Loads the labels of rows `row` + Rows::distance(i), where row 0 is at `offset`. Only the first `count` rows exist.
  template <class Rows>
  __device__ __forceinline__ void read_of(const Program& program, const int64 (&offset)[kRowStreams], int row,
                                          int count) {
    const auto& step = program.space.at.stride;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      if (i >= count) continue;
      const int64 rows = row + Rows::distance(i);
      auto* mask = program.mask;
      if constexpr (Program::kMasked) mask += offset[kRowMask] + rows * step[kRowMask][0];
      label_load[i] = program.load_label(program.labels + offset[kLabels] + rows * step[kLabels][0], mask);
    }
  }
  // Loads the labels of rows with separate offsets: offsets(i, at) sets those of row i.
  template <class Offsets>
  __device__ __forceinline__ void read_each(const Program& program, int count, const Offsets& offsets) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      if (i >= count) continue;
      int64 at[kRowStreams];
      offsets(i, at);
      label_load[i] = program.load_label(at);
    }
  }
  // Returns in `classes` the class of each label, or an InactiveClass. Only the first `count` rows exist.
  template <class Index>
  __device__ __forceinline__ void active_classes(const Program& program, int count, Index (&classes)[kVecSize]) const {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      const Index class_index = program.template active_class<Index>(label_load[i]);
      classes[i] = i < count ? class_index : Index(kNoLoss);
    }
  }
};

// Evaluates kVecSize rows of a lane, given their labels (active_classes), the logits z of the labels, and the sums.
// Returns the sum of the values, and in `coeffs` the coefficients of the gradients, scaled if kGradient. Bit i of
// `zero_rows` is set if all coefficients of row i are 0: its gradients are 0 whatever its logits hold, so the caller
// must replace the logits. offsets(i, at) sets the offsets of row i. Row i exists if i < count.
template <bool kGradient, int kVecSize, class Program, class Index, class Offsets, class Scale,
          class Compute = typename Program::Compute>
__device__ __forceinline__ double evaluate_lane_rows(const Program& program, const Index (&labels)[kVecSize],
                                                     const Compute (&z)[kVecSize],
                                                     const RowSums<Compute, Program::kSmoothed> (&sums)[kVecSize],
                                                     int count, const Offsets& offsets, Scale& scale,
                                                     GradCoeffs<Compute> (&coeffs)[kVecSize], unsigned& zero_rows) {
  Compute values[kVecSize], lse[kVecSize];
  // Outputs per row are rare: a single test covers all rows of the lane.
  bool exceptional = program.per_row != 0, may_be_zero = false;
  Index labels_of_all = Index(0);
  Compute sum_of_values = Compute(0);
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    RowTarget<Compute> t;
    t.weight = Compute(1);
    if constexpr (Program::kWeighted) t.weight = labels[i] < 0 ? Compute(0) : program.weight(labels[i]);
    const RowResult<Compute> y = program.template active_result<false>(t, z[i], sums[i]);
    values[i] = y.value;
    lse[i] = y.lse;
    coeffs[i] = y.grad_coeffs;
    labels_of_all |= labels[i];
    sum_of_values = i == 0 ? y.value : sum_of_values + y.value;
    may_be_zero |= coeffs[i].exp_coeff == Compute(0);
  }
  // A single negative label makes the OR of all labels negative, and a single NaN makes the sum of the values NaN.
  exceptional |= labels_of_all < 0 || sum_of_values != sum_of_values;
  zero_rows = 0;
  if (exceptional) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      if (labels[i] < 0) {
        values[i] = Compute(0);
        zero_rows |= 1u << i;
      }
      if (values[i] != values[i]) coeffs[i] = GradCoeffs<Compute>::all(values[i]);
      if (i >= count) continue;
      if (program.per_row == 0 && labels[i] != Index(kInvalidLabel)) {
        program.inactive_rows += labels[i] < 0 ? 1u : 0u;
        continue;
      }
      // Finds offsets and label again: kept from before, they would take registers in all other calls.
      RowTarget<Compute> again;
      offsets(i, again.offset);
      program.read_label(again);
      RowResult<Compute> y = program.inactive_result(again);
      values[i] = again.active ? values[i] : y.value;
      if (again.active) y = {values[i], lse[i], coeffs[i]};
      program.store(again, y, again.active && z[i] == sums[i].softmax.max_logit);
    }
  }
  if (may_be_zero) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) zero_rows |= coeffs[i].all_zero() ? 1u << i : 0u;
  }
  double total = 0.0;
  if constexpr (kNarrow && kSingle<Compute>) {
    // A conversion to double takes as long as four other instructions.
    Compute sum = values[0];
#pragma unroll
    for (int i = 1; i < kVecSize; ++i) sum += values[i];
    total = static_cast<double>(sum);
  } else {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) total += static_cast<double>(values[i]);
  }
  if constexpr (kGradient) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      int64 offset[kRowStreams] = {};
      if constexpr (kIsPerRow<Scale>) {
        // A row that does not exist has no offsets; its factor does not matter.
        if (i < count) offsets(i, offset);
      }
      const Compute factor = grad_factor(scale, offset) * program.logit.common_slope();
      coeffs[i].exp_coeff *= factor;
      if constexpr (Program::kSmoothed) coeffs[i].weight_coeff *= factor;
      coeffs[i].target *= factor;
    }
    // Avoids 0 * inf in rows without a gradient.
    if (zero_rows != 0) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        if (zero_rows >> i & 1u) coeffs[i] = {Compute(0), Compute(0), Compute(0), Compute(0)};
      }
    }
  }
  return total;
}
