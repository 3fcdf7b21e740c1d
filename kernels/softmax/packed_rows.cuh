// Rows in registers, of few contiguous classes: a lane takes a row, and its warp moves many rows together. Value and
// gradient of softmax.cuh, by register_rows.cuh.
//
//   32 kRows rows of kClasses classes = one contiguous stretch per warp, a tile; lane l takes its rows l, 32 + l, ...
//
// 1. A warp copies a tile to shared memory in words of kWordBytes, coalesced.
// 2. Each lane takes its rows to registers, one after another, in the widest words that a row consists of, evaluates
//    them, and leaves the gradients in their place.
// 3. The warp writes the tile back, coalesced.
//
// Moved by one lane each, rows would touch 32 cache lines per word. Lanes read rows kPitch bytes apart, an odd number
// of their words, so that they do not conflict in a bank. A warp owns its tile; only __syncwarp separates the steps.
//
// Traffic: each logit is read once, each gradient written once. Preconditions: rows are contiguous and follow each
// other without gaps, logits and gradients, which begin at multiples of their words.
#pragma once
#include "softmax/register_rows.cuh"

// The rows of a lane in shared memory: the first one, the others kWarp rows apart.
template <class Storage, int kClasses, int kRows>
struct PackedSource {
  static constexpr int kVecSize = kRows;
  static constexpr int kPerThread = kClasses;
  static constexpr int kRowBytes = kClasses * static_cast<int>(sizeof(Storage));
  // The largest power of two that divides a row, of 16 bytes at most, and the bytes from row to row.
  static constexpr int kBytes = (kRowBytes & -kRowBytes) < 16 ? (kRowBytes & -kRowBytes) : 16;
  static constexpr int kPitch = kRowBytes + (kRowBytes % 32 == 0 ? 16 : 0);
  static constexpr int kEach = kBytes / static_cast<int>(sizeof(Storage));
  using Word = Pack<Storage, kEach>;
  char* row;
  int64 first;  // the number of the first row

  // Offsets of the i-th row. Precondition: it exists.
  template <class Program>
  __device__ __forceinline__ void offsets(const Program& program, int i, int64 (&at)[kRowStreams]) const {
    program.space.offsets(first + i * kWarp, at);
  }
  __device__ __forceinline__ Word* word(int i, int j) const {
    return reinterpret_cast<Word*>(row + i * (kWarp * kPitch)) + j / kEach;
  }
  __device__ __forceinline__ void load(Pack<Storage, kRows> (&x)[kClasses]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kClasses; j += kEach) {
        const Word found = load_words(word(i, j));
#pragma unroll
        for (int k = 0; k < kEach; ++k) x[j + k].element[i] = found.element[k];
      }
    }
  }
  __device__ __forceinline__ void store(const Pack<Storage, kRows> (&x)[kClasses]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kClasses; j += kEach) {
        Word put;
#pragma unroll
        for (int k = 0; k < kEach; ++k) put.element[k] = x[j + k].element[i];
        store_words(word(i, j), put);
      }
    }
  }
};

// Rows of a warp in shared memory, `kRowsOfTile` of them: copied in and out in words of kWordBytes. Bytes between rows
// are those of PackedSource.
template <class Storage, int kClasses, int kRowsOfTile, int kWordBytes>
struct PackedTile {
  using Source = PackedSource<Storage, kClasses, 1>;
  // A word does not cross the padding behind a row.
  static constexpr int kEach = kWordBytes / static_cast<int>(sizeof(Storage));
  static constexpr int kBytes = kRowsOfTile * Source::kPitch;
  using Word = Pack<Storage, kEach>;
  static_assert(Source::kPitch == Source::kRowBytes || Source::kRowBytes % kWordBytes == 0, "rows of whole words");
  char* stage;  // of this warp

  __device__ __forceinline__ char* row(int r) const {
    return stage + r * Source::kPitch;
  }
  // f(i, at) for each word i of `rows` rows, `at` its place; g(i, at) for each element i behind the last whole word.
  // Precondition: all lanes of the warp call it together.
  template <class F, class G>
  __device__ __forceinline__ void each(int rows, const F& f, const G& g) const {
    const int lane = threadIdx.x % kWarp, elements = rows * kClasses, words = elements / kEach;
    constexpr int kWords = kRowsOfTile * kClasses / kEach;
    if (rows == kRowsOfTile && kRowsOfTile * kClasses % kEach == 0) {
      // All tiles but the last: the number of words is a constant.
#pragma unroll 8
      for (int k = 0; k < (kWords + kWarp - 1) / kWarp; ++k) {
        const int i = k * kWarp + lane;
        if (i < kWords) f(i, reinterpret_cast<Word*>(place(i * kWordBytes)));
      }
      return;
    }
#pragma unroll 1
    for (int i = lane; i < words; i += kWarp) f(i, reinterpret_cast<Word*>(place(i * kWordBytes)));
#pragma unroll 1
    for (int i = words * kEach + lane; i < elements; i += kWarp) {
      g(i, reinterpret_cast<Storage*>(place(i * static_cast<int>(sizeof(Storage)))));
    }
  }
  // The place of a byte of the tile.
  __device__ __forceinline__ char* place(int byte) const {
    return stage + (Source::kPitch == Source::kRowBytes
                        ? byte
                        : byte + byte / Source::kRowBytes * (Source::kPitch - Source::kRowBytes));
  }
  // Starts copies, which the warp sees after cp_async_wait_all() and __syncwarp().
  __device__ __forceinline__ void copy_in(const Storage* from, int rows) const {
    each(
        rows, [&](int i, Word* at) { cp_async(at, reinterpret_cast<const Word*>(from) + i); },
        [&](int i, Storage* at) { *at = from[i]; });
  }
  // Precondition: the warp has synchronised since the tile was written.
  __device__ __forceinline__ void copy_out(Storage* to, int rows) const {
    each(
        rows, [&](int i, const Word* at) { store_pack<kEach>(to + i * kEach, load_words(at)); },
        [&](int i, const Storage* at) { to[i] = *at; });
  }
};

// Bytes of shared memory that belong to this warp, of `bytes` for each.
__device__ __forceinline__ char* shared_of_warp(int bytes) {
  extern __shared__ uint4 staged[];
  return reinterpret_cast<char*>(staged) + threadIdx.x / kWarp * bytes;
}

// As TwoPassReader. kRows: rows of a lane. Logits are read in words of kWordBytes, gradients written in kStoredBytes.
template <int kClasses, int kRows, int kWordBytes, int kStoredBytes = kWordBytes>
struct PackedReader {
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    using Storage = typename Program::Input;
    constexpr int kTile = kWarp * kRows;
    const int64 rows = program.space.rows;
    using Tile = PackedTile<Storage, kClasses, kTile, kWordBytes>;
    const Tile tile_of_warp{shared_of_warp(Tile::kBytes)};
    const PackedTile<Storage, kClasses, kTile, kStoredBytes> stored{tile_of_warp.stage};
    const int64 tiles = (rows + kTile - 1) / kTile;
    const auto visit = [&](int64 tile) {
      const int64 first = tile * kTile;
      const int here = rows - first < kTile ? static_cast<int>(rows - first) : kTile;
      const int lane = threadIdx.x % kWarp, count = (here - lane + kWarp - 1) / kWarp;
      const PackedSource<Storage, kClasses, kRows> source{tile_of_warp.row(lane), first + lane};
      LaneLabels<kRows, Program> labels;
      const auto offsets = [&](int i, int64(&at)[kRowStreams]) { source.offsets(program, i, at); };
      if constexpr (Program::Space::kOneDimension) {
        int64 offset[kRowStreams];
        offsets(0, offset);
        labels.read(program, offset, count, kWarp);
      } else {
        labels.read_each(program, count, offsets);
      }
      tile_of_warp.copy_in(program.input + first * kClasses, here);
      cp_async_wait_all();
      __syncwarp();
      const double total = visit_register_rows<kGradient>(program, source, labels, scale, count);
      __syncwarp();
      if constexpr (kGradient) {
        stored.copy_out(program.gradients + first * kClasses, here);
        // The next rows are copied to the same place.
        __syncwarp();
      }
      return total;
    };
    for_each_chunk(group, scale, chunks, work, [&](int chunk) {
      double total = 0.0;
#pragma unroll 1
      for (int64 tile = chunk; tile < tiles; tile += chunks) total += visit(tile);
      return total;
    });
  }
};
