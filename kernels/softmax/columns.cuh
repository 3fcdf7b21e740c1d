// Value and gradient of softmax.cuh for strided classes, where neighbouring rows are contiguous: images (N, C, H, W) of
// few classes. Rows stay in registers (register_rows.cuh).
//
//   x[n, c, h, w]: a row is (n, :, h, w); lane l owns the kVecSize rows from w = (32 tile + l) kVecSize
//   kApart: where vectors do not divide the rows, or their addresses, a lane owns the rows w = 32 kVecSize tile + l +
//   32 i, and tiles end with the inner dimension
//
// 1. A warp processes tiles of 32 kVecSize neighbouring rows, so it reads whole cache lines of each class.
// 2. Each lane evaluates its rows in registers.
// 3. It writes gradients with the access pattern of the logits.
//
// A lane owns its rows; a warp owns chunks of tiles and claims them (WarpTiles). Traffic: each logit is read once, each
// gradient written once. Preconditions: rows of a tile are contiguous; without kApart, kVecSize divides the number of
// rows, and only rows of a vector must be contiguous; there are kPerThread classes.
#pragma once
#include "softmax/register_rows.cuh"

// Maximum number of logits per lane for which the next rows are loaded ahead.
template <class Storage, bool kApart>
constexpr int kMaxAhead = kApart || sizeof(Storage) == 2 ? 16
                          : sizeof(Storage) == 4         ? 12
                                                         : 8;

// Logits and labels of kVecSize rows. start() issues their loads.
template <class Program, int kVecSize, int kPerThread, bool kApart>
struct ColumnLoads {
  // Words, because compilers copy packs of 16-bit types element by element, and wait for their loads at once.
  using P = Pack<typename Program::Input, kApart ? 1 : kVecSize>;
  using Word = typename P::Word;
  static constexpr int kWords = kApart ? kVecSize : P::kWords;
  Word words[kPerThread][kWords];
  LaneLabels<kVecSize, Program> labels;

  // `at`: offsets of the first row. Only the first `count` rows exist; the first one is loaded in place of others.
  __device__ __forceinline__ void start(const Program& program, const int64 (&at)[kRowStreams], int count) {
    const auto* const from = program.input + at[kLogits];
    const int64 stride = program.space.class_stride[kLogits];
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
#pragma unroll
      for (int k = 0; k < kWords; ++k) {
        const int word = !kApart ? k : k < count ? k * kWarp : 0;
        words[j][k] = __ldcs(reinterpret_cast<const Word*>(from + j * stride) + word);
      }
    }
    labels.read(program, at, kApart ? count : kVecSize, kApart ? kWarp : 1);
  }
};

// The kVecSize rows of a lane, starting with `row`. Only the first `count` of them exist.
template <class Program, int kVecSize_, int kPerThread_, bool kApart>
struct ColumnSource {
  static constexpr int kVecSize = kVecSize_;
  static constexpr int kPerThread = kPerThread_;
  static constexpr bool kMasks = false;
  using Storage = typename Program::Input;
  using Loads = ColumnLoads<Program, kVecSize, kPerThread, kApart>;
  const Loads& loads;
  int64 row;
  Storage* to;
  int count;

  // Offsets of the i-th row. They are computed again, because kept offsets would cost registers throughout.
  __device__ __forceinline__ void offsets(const Program& program, int i, int64 (&at)[kRowStreams]) const {
    program.space.offsets(row, at);
#pragma unroll
    for (int s = 0; s < kRowStreams; ++s) at[s] += i * (kApart ? kWarp : 1) * program.space.at.stride[s][0];
  }
  __device__ __forceinline__ void load(Pack<Storage, kVecSize> (&x)[kPerThread]) const {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if constexpr (kApart) {
#pragma unroll
        for (int i = 0; i < kVecSize; ++i) {
          x[j].element[i] = reinterpret_cast<const Pack<Storage, 1>*>(&loads.words[j][i])->element[0];
        }
      } else {
        x[j] = load_words(reinterpret_cast<const Pack<Storage, kVecSize>*>(loads.words[j]));
      }
    }
  }
  __device__ __forceinline__ void store(const Program& program, const Pack<Storage, kVecSize> (&x)[kPerThread]) const {
    const int64 stride = program.space.class_stride[kGradients];
    if constexpr (kApart) {
      if (count == kVecSize) {
        store_apart<true>(stride, x);
      } else {
        store_apart<false>(stride, x);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) store_pack<kVecSize>(to + j * stride, x[j]);
    }
  }

 private:
  template <bool kWhole>
  __device__ __forceinline__ void store_apart(int64 stride, const Pack<Storage, kVecSize> (&x)[kPerThread]) const {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        if (kWhole || i < count) to[j * stride + i * kWarp] = x[j].element[i];
      }
    }
  }
};

// The tiles of ColumnReader, and the rows of a lane in a tile.
template <int kVecSize, bool kApart>
struct LaneColumns {
  int64 vectors, count;

  template <class Space>
  __device__ __forceinline__ explicit LaneColumns(const Space& space)
      : vectors(space.rows / kVecSize), count((vectors + kWarp - 1) / kWarp) {
  }
  // Sets the first row and the number of rows. Without rows, the first row is 0.
  __device__ __forceinline__ void find(int64 tile, int64& row, int& rows) const {
    const int64 vector = tile * kWarp + threadIdx.x % kWarp;
    rows = vector < vectors ? kVecSize : 0;
    row = rows > 0 ? vector * kVecSize : 0;
  }
};
template <int kVecSize>
struct LaneColumns<kVecSize, true> {
  static constexpr int kRows = kVecSize * kWarp;
  InnerTiles<kRows> tiles;
  int64 count;

  template <class Space>
  __device__ __forceinline__ explicit LaneColumns(const Space& space) : tiles(space), count(tiles.count) {
  }
  __device__ __forceinline__ void find(int64 tile, int64& row, int& rows) const {
    const int lane = threadIdx.x % kWarp;
    const auto found = tiles[tile];
    const int64 left = found.after - lane;
    rows = tile >= count || left <= 0 ? 0
           : found.after >= kRows     ? kVecSize
                                      : static_cast<int>((left + kWarp - 1) / kWarp);
    row = rows > 0 ? found.row + lane : 0;
  }
};

// Reader with the interface of TwoPassReader.
template <int kVecSize, int kPerThread, bool kApart>
struct ColumnReader {
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    using Source = ColumnSource<Program, kVecSize, kPerThread, kApart>;
    const LaneColumns<kVecSize, kApart> tiles(program.space);
    WarpTiles left(group, work.claim_counter);
    if (left.chunk >= chunks) return;
    typename Source::Loads loads;
    int count;  // rows of the lane that exist
    int64 row;
    typename Source::Storage* to;
    // Lanes without rows load the first rows instead.
    const auto start = [&] {
      tiles.find(left.tile, row, count);
      int64 offset[kRowStreams];
      program.space.offsets(row, offset);
      to = program.gradients + offset[kGradients];
      loads.start(program, offset, count);
    };
    // The next rows are loaded as soon as the current ones have left their registers, if the lane has registers to
    // spare.
    constexpr bool kAhead = kVecSize * kPerThread <= kMaxAhead<typename Program::Input, kApart>;
    if constexpr (kAhead) start();
    double total = 0.0;
#pragma unroll 1
    while (left.chunk < chunks) {
      if constexpr (!kAhead) start();
      const Source source{loads, row, to, count};
      const int chunk = left.chunk, count_now = count;
      const bool last = left.last_in_chunk(chunks, tiles.count);
      left.advance(group, chunks, tiles.count);
      total += visit_register_rows<kGradient>(program, source, loads.labels, scale, count_now, [&] {
        if constexpr (kAhead) start();
      });
      if (!last) continue;
      finish_chunk(group, scale, chunk, total, work.partials);
      total = 0.0;
    }
  }
};
