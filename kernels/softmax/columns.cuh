// Value and gradient of softmax.cuh for strided classes, where neighbouring rows are contiguous: images (N, C, H, W) of
// few classes. Rows stay in registers (register_rows.cuh).
//
//   x[n, c, h, w]: a row is (n, :, h, w); lane l owns the kVecSize rows from w = (32 tile + l) kVecSize
//
// 1. A warp processes tiles of 32 kVecSize neighbouring rows, so it reads whole cache lines of each class.
// 2. Each lane evaluates its rows in registers.
// 3. It writes gradients with the access pattern of the logits.
//
// A lane owns its rows; a warp owns chunks of tiles and claims them (WarpTiles). Traffic: each logit is read once, each
// gradient written once. Preconditions: kVecSize divides the number of rows; rows of a vector are contiguous; there are
// kPerThread classes.
#pragma once
#include "softmax/register_rows.cuh"

// Maximum number of logits per lane for which the next rows are loaded ahead.
constexpr int kMaxAhead = 8;

// Logits and labels of kVecSize neighbouring rows. start() issues their loads.
template <class Program, int kVecSize, int kPerThread>
struct ColumnLoads {
  // Words, because compilers copy packs of 16-bit types element by element, and wait for their loads at once.
  using P = Pack<typename Program::Input, kVecSize>;
  using Word = typename P::Word;
  Word words[kPerThread][P::kWords];
  LaneLabels<kVecSize, Program> labels;

  // `at`: offsets of the first row.
  __device__ __forceinline__ void start(const Program& program, const int64 (&at)[kRowStreams]) {
    const auto* const from = program.input + at[kLogits];
    const int64 stride = program.space.class_stride[kLogits];
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
#pragma unroll
      for (int k = 0; k < P::kWords; ++k) words[j][k] = __ldcs(reinterpret_cast<const Word*>(from + j * stride) + k);
    }
    labels.read(program, at, kVecSize);
  }
};

// The kVecSize rows of a lane, starting with `row`.
template <class Program, int kVecSize_, int kPerThread_>
struct ColumnSource {
  static constexpr int kVecSize = kVecSize_;
  static constexpr int kPerThread = kPerThread_;
  static constexpr bool kMasks = false;
  using Storage = typename Program::Input;
  using Loads = ColumnLoads<Program, kVecSize, kPerThread>;
  const Loads& loads;
  int64 row;
  Storage* to;

  // Offsets of the i-th row. They are computed again, because kept offsets would cost registers throughout.
  __device__ __forceinline__ void offsets(const Program& program, int i, int64 (&at)[kRowStreams]) const {
    program.space.offsets(row, at);
#pragma unroll
    for (int s = 0; s < kRowStreams; ++s) at[s] += i * program.space.at.stride[s][0];
  }
  __device__ __forceinline__ void load(Pack<Storage, kVecSize> (&x)[kPerThread]) const {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      x[j] = load_words(reinterpret_cast<const Pack<Storage, kVecSize>*>(loads.words[j]));
    }
  }
  __device__ __forceinline__ void store(const Program& program, const Pack<Storage, kVecSize> (&x)[kPerThread]) const {
    const int64 stride = program.space.class_stride[kGradients];
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) store_pack<kVecSize>(to + j * stride, x[j]);
  }
};

// Reader with the interface of TwoPassReader.
template <int kVecSize, int kPerThread>
struct ColumnReader {
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    using Source = ColumnSource<Program, kVecSize, kPerThread>;
    const int64 vectors = program.space.rows / kVecSize, tiles = (vectors + kWarp - 1) / kWarp;
    WarpTiles left(group, work.claim_counter);
    if (left.chunk >= chunks) return;
    typename Source::Loads loads;
    int count;  // rows of the lane that exist: kVecSize or 0
    int64 row;
    typename Source::Storage* to;
    // Lanes without rows load the first rows instead.
    const auto start = [&] {
      const int64 vector = left.tile * kWarp + threadIdx.x % kWarp;
      count = vector < vectors ? kVecSize : 0;
      row = count > 0 ? vector * kVecSize : 0;
      int64 offset[kRowStreams];
      program.space.offsets(row, offset);
      to = program.gradients + offset[kGradients];
      loads.start(program, offset);
    };
    // The next rows are loaded as soon as the current ones have left their registers, if the lane has registers to
    // spare.
    constexpr bool kAhead = kVecSize * kPerThread <= kMaxAhead;
    if constexpr (kAhead) start();
    double total = 0.0;
#pragma unroll 1
    while (left.chunk < chunks) {
      if constexpr (!kAhead) start();
      const Source source{loads, row, to};
      const int chunk = left.chunk, count_now = count;
      const bool last = left.last_in_chunk(chunks, tiles);
      left.advance(group, chunks, tiles);
      total += visit_register_rows<kGradient>(program, source, loads.labels, scale, count_now, [&] {
        if constexpr (kAhead) start();
      });
      if (!last) continue;
      finish_chunk(group, scale, chunk, total, work.partials);
      total = 0.0;
    }
  }
};
