// Many rows of few contiguous classes, in registers: each lane owns whole rows, and its warp moves many rows together.
// Value and gradient of softmax.cuh, computed by register_rows.cuh, or by rolled_rows.cuh if there are more than
// kMaxKept classes and logits are capped or labels smoothed.
//
//   tile of a warp = 32 kRows rows of kClasses classes, contiguous in memory; lane l owns its rows l, 32 + l, ...
//
// 1. The warp copies a tile to shared memory in words of kWordBytes, coalesced.
// 2. Each lane loads its rows into registers, one after another, in the widest words that divide a row. It evaluates
//    them and overwrites them in shared memory with their gradients.
// 3. The warp writes the tile back, coalesced.
//
// If each lane moved its own rows, every word would touch 32 cache lines. In shared memory rows are kPitch bytes apart,
// an odd number of their words, so that lanes have no bank conflicts. A warp owns its tile; only __syncwarp separates
// the steps.
//
// Logits may have gaps: between rows, which are `pitch` elements apart, and between classes, which are kStep elements
// apart. Step 1 then copies the gaps too, because they share memory sectors with the logits. Gradients are contiguous
// and overlap the logits of other lanes in shared memory, so each lane loads all its rows into registers before it
// writes gradients.
//
// Traffic: each logit is read once, together with the gaps around it; each gradient is written once. Preconditions:
// rows of gradients are contiguous and follow each other without gaps; they begin at a multiple of their words. The
// same holds for logits without kStep. With kStep each row of logits begins at a multiple of its words, `pitch`
// elements after the row before it, and rows do not overlap.
#pragma once
#include "softmax/register_rows.cuh"
#include "softmax/rolled_rows.cuh"

// The rows of a lane in shared memory, kWarp rows apart; `row` points to the first one. The tile begins at a multiple
// of 16 bytes.
template <class Storage, int kClasses, int kRows>
struct PackedSource {
  static constexpr int kVecSize = kRows;
  static constexpr int kPerThread = kClasses;
  // With fewer classes, comparing each class with the label takes no longer.
  static constexpr bool kMasks = kClasses >= 4;
  static constexpr int kRowBytes = kClasses * static_cast<int>(sizeof(Storage));
  // kBytes: the largest power of two that divides a row, at most 16 bytes. kPitch: bytes from row to row.
  static constexpr int kBytes = (kRowBytes & -kRowBytes) < 16 ? (kRowBytes & -kRowBytes) : 16;
  static constexpr int kPitch = kRowBytes + (kRowBytes % 32 == 0 ? 16 : 0);
  static constexpr int kEach = kBytes / static_cast<int>(sizeof(Storage));
  using Word = Pack<Storage, kEach>;
  char* row;
  int64 first;  // number of the lane's first row

  // Offsets of the i-th row. Precondition: it exists.
  template <class Program>
  __device__ __forceinline__ void offsets(const Program& program, int i, int64 (&at)[kRowStreams]) const {
    program.space.offsets(first + i * kWarp, at);
  }
  // Returns the logit of class c of row i, and replaces it by -inf. Returns -inf for class -1.
  __device__ __forceinline__ Storage mask_out(int i, int c) const {
    const Storage none = Narrow<Storage>::from(-scalar_infinity(0.0f));
    if (c < 0) return none;
    Storage* const at = element(i, c);
    const Storage x = *at;
    *at = none;
    return x;
  }
  // Stores the gradient of class c of row i, unless c is -1.
  __device__ __forceinline__ void store_target(int i, int c, Storage gradient) const {
    if (c >= 0) *element(i, c) = gradient;
  }
  __device__ __forceinline__ Storage* element(int i, int c) const {
    return reinterpret_cast<Storage*>(row + i * (kWarp * kPitch)) + c;
  }
  __device__ __forceinline__ Word* word(int i, int j) const {
    return reinterpret_cast<Word*>(row + i * (kWarp * kPitch)) + j / kEach;
  }
  __device__ __forceinline__ void load(Pack<Storage, kRows> (&x)[kClasses]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kClasses; j += kEach) {
        const Word loaded = load_words(word(i, j));
#pragma unroll
        for (int k = 0; k < kEach; ++k) x[j + k].element[i] = loaded.element[k];
      }
    }
  }
  template <class Program>
  __device__ __forceinline__ void store(const Program&, const Pack<Storage, kRows> (&x)[kClasses]) const {
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

// The logits of a lane in shared memory with the gaps that they have in global memory: row i begins at
// row + i * kWarp * pitch, and its class c is the element c * kStep from there. Rows are read in words of kBytes.
// Preconditions: each row begins at a multiple of kBytes; the last word of a row may be read completely.
template <class Storage, int kClasses, int kRows, int kStep, int kBytes>
struct StretchedRows {
  static constexpr int kEach = kBytes / static_cast<int>(sizeof(Storage));
  using Word = Pack<Storage, kEach>;
  const char* row;
  int pitch;  // bytes from row to row

  __device__ __forceinline__ void load(Pack<Storage, kRows> (&x)[kClasses]) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Word* const words = reinterpret_cast<const Word*>(row + i * (kWarp * pitch));
      Word loaded;
#pragma unroll
      for (int j = 0; j < kClasses; ++j) {
        // Words without a class are skipped.
        const int word = j * kStep / kEach;
        if (j == 0 || word != (j - 1) * kStep / kEach) loaded = load_words(words + word);
        x[j].element[i] = loaded.element[j * kStep % kEach];
      }
    }
  }
};

// Starts copies of `bytes` bytes to shared memory in words of 16 bytes; the warp sees them after cp_async_wait_all()
// and __syncwarp(). The copy begins at the same distance from a multiple of 16 bytes as `from`. `before` and `after`:
// true if the tensor has at least 16 more bytes before and after the range; otherwise nothing outside of it is read on
// that side. kPadding bytes, 16 or 0, are inserted after every `pitch` bytes, counted from the multiple of 16 at or
// before `from`. Preconditions: all lanes of the warp call it together; `stage` is a multiple of 16 and has room for 16
// bytes more; `pitch` is a multiple of 16 if there is padding.
template <int kPadding, class Storage>
__device__ __forceinline__ void copy_stretch(char* stage, const Storage* from, int bytes, bool before, bool after,
                                             int pitch) {
  using Chunk = Pack<Storage, 16 / static_cast<int>(sizeof(Storage))>;
  constexpr int kAtOnce = 16 * kWarp;
  const int lane = threadIdx.x % kWarp;
  const int shift = static_cast<int>(reinterpret_cast<unsigned long long>(from) % 16);
  const int end = shift + bytes;
  const char* const aligned = reinterpret_cast<const char*>(from) - shift;
  // Updates the position of this lane's word incrementally, without a division: `within` is its distance from the last
  // padding.
  const int added_step = kPadding == 0 ? 0 : kAtOnce / pitch, within_step = kPadding == 0 ? 0 : kAtOnce % pitch;
  int added = kPadding == 0 ? 0 : 16 * lane / pitch, within = kPadding == 0 ? 0 : 16 * lane % pitch;
#pragma unroll 4
  for (int byte = 16 * lane; byte < end; byte += kAtOnce) {
    char* const place = stage + byte + added * kPadding;
    if constexpr (kPadding != 0) {
      added += added_step;
      within += within_step;
      if (within >= pitch) {
        within -= pitch;
        ++added;
      }
    }
    if ((before || byte >= shift) && (after || byte + 16 <= end)) {
      cp_async(reinterpret_cast<Chunk*>(place), reinterpret_cast<const Chunk*>(aligned + byte));
      continue;
    }
#pragma unroll 1
    for (int at = 0; at < 16; at += static_cast<int>(sizeof(Storage))) {
      if (byte + at < shift || byte + at >= end) continue;
      *reinterpret_cast<Storage*>(place + at) = *reinterpret_cast<const Storage*>(aligned + byte + at);
    }
  }
}

// The tile of a warp in shared memory, kRowsOfTile rows. It is copied in and out in words of kWordBytes. Rows have the
// pitch of PackedSource.
template <class Storage, int kClasses, int kRowsOfTile, int kWordBytes>
struct PackedTile {
  using Source = PackedSource<Storage, kClasses, 1>;
  // A word does not cross the padding after a row.
  static constexpr int kEach = kWordBytes / static_cast<int>(sizeof(Storage));
  static constexpr int kBytes = kRowsOfTile * Source::kPitch;
  using Word = Pack<Storage, kEach>;
  static_assert(Source::kPitch == Source::kRowBytes || Source::kRowBytes % kWordBytes == 0, "rows of whole words");
  char* stage;  // of this warp

  __device__ __forceinline__ char* row(int r) const {
    return stage + r * Source::kPitch;
  }
  // Calls f(i, at) for each word i of `rows` rows, where `at` is its address in the tile, and g(i, at) for each element
  // i after the last whole word. Precondition: all lanes of the warp call it together.
  template <class F, class G>
  __device__ __forceinline__ void each(int rows, const F& f, const G& g) const {
    const int lane = threadIdx.x % kWarp, elements = rows * kClasses, words = elements / kEach;
    constexpr int kWords = kRowsOfTile * kClasses / kEach;
    if (rows == kRowsOfTile && kRowsOfTile * kClasses % kEach == 0) {
      // All tiles but the last are full: the number of words is a constant.
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
  // Address of byte `byte` of the rows, which are padded in shared memory.
  __device__ __forceinline__ char* place(int byte) const {
    return stage + (Source::kPitch == Source::kRowBytes
                        ? byte
                        : byte + byte / Source::kRowBytes * (Source::kPitch - Source::kRowBytes));
  }
  // Starts copies of the first `rows` rows; the warp sees them after cp_async_wait_all() and __syncwarp().
  __device__ __forceinline__ void copy_in(const Storage* from, int rows) const {
    each(
        rows, [&](int i, Word* at) { cp_async(at, reinterpret_cast<const Word*>(from) + i); },
        [&](int i, Storage* at) { *at = from[i]; });
  }
  // Writes the first `rows` rows. Precondition: the warp has synchronized since the tile was written.
  __device__ __forceinline__ void copy_out(Storage* to, int rows) const {
    each(
        rows, [&](int i, const Word* at) { store_pack<kEach>(to + i * kEach, load_words(at)); },
        [&](int i, const Storage* at) { to[i] = *at; });
  }
};

// Returns this warp's part of dynamic shared memory, of which each warp has `bytes` bytes.
__device__ __forceinline__ char* shared_of_warp(int bytes) {
  extern __shared__ uint4 staged[];
  return reinterpret_cast<char*>(staged) + threadIdx.x / kWarp * bytes;
}

// The rows of a PackedSource after they have been loaded into registers.
template <class Source, class Storage>
struct LoadedRows {
  static constexpr int kVecSize = Source::kVecSize;
  static constexpr int kPerThread = Source::kPerThread;
  static constexpr bool kMasks = false;
  using Rows = Pack<Storage, kVecSize>[kPerThread];
  const Source& source;
  const Rows& rows;

  template <class Program>
  __device__ __forceinline__ void offsets(const Program& program, int i, int64 (&at)[kRowStreams]) const {
    source.offsets(program, i, at);
  }
  __device__ __forceinline__ void load(Rows& x) const {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) x[j] = rows[j];
  }
  template <class Program>
  __device__ __forceinline__ void store(const Program& program, const Rows& x) const {
    source.store(program, x);
  }
};

// Visits every row once, as TwoPassReader.
//
// kRows: rows per lane. kAhead: while a warp evaluates a tile, the next one is copied to a second buffer. kWordBytes:
// size of the words in which logits are read and gradients written. kShifted: logits are aligned differently from their
// gradients, which are aligned to 16 bytes and written in such words. kStep: elements from class to class of logits
// with gaps, which need kShifted; otherwise 0. kPadded: 16 bytes are inserted between the pitches of rows with gaps,
// which would otherwise have bank conflicts. Preconditions with kPadded: the pitch is a multiple of 16 bytes, and each
// row ends within one pitch of the last multiple of 16 bytes at or before its beginning.
template <int kClasses, int kRows, bool kAhead, int kWordBytes, bool kShifted = false, int kStep = 0,
          bool kPadded = false>
struct PackedReader {
  template <class Program>
  struct Tiles {
    using Storage = typename Program::Input;
    using Tile = PackedTile<Storage, kClasses, kWarp * kRows, kWordBytes>;
    using Stored = PackedTile<Storage, kClasses, kWarp * kRows, kShifted ? 16 : kWordBytes>;
    using Place = PackedSource<Storage, kClasses, kRows>;
    static constexpr bool kGaps = kStep > 0;
    // True if logits are copied as one range of bytes (copy_stretch). Rows that PackedSource pads have no common shift,
    // so their logits are copied in words of kWordBytes.
    static constexpr bool kCut = kGaps || (kShifted && Place::kPitch == Place::kRowBytes);
    static constexpr int kTile = kWarp * kRows, kSize = static_cast<int>(sizeof(Storage));
    // Bytes from the beginning of a row's first class to the end of its last one.
    static constexpr int kSpan = kGaps ? ((kClasses - 1) * kStep + 1) * kSize : Place::kRowBytes;
    static constexpr int kPadding = kPadded ? 16 : 0;
    using Logits = StretchedRows<Storage, kClasses, kRows, kGaps ? kStep : 1, kGaps ? kWordBytes : kSize>;
    static_assert(kShifted || !kGaps, "gradients lie otherwise than logits with gaps");
    const Program& program;
    char* stage;
    LaneLabels<kRows, Program> labels;

    __device__ __forceinline__ explicit Tiles(const Program& program) : program(program), stage(nullptr) {
      stage = shared_of_warp((kAhead ? 2 : 1) * bytes());
    }
    // Bytes from row to row of the logits, in global memory.
    __device__ __forceinline__ int pitch() const {
      if constexpr (!kGaps) return Place::kRowBytes;
      return static_cast<int>(program.space.at.stride[kLogits][0]) * kSize;
    }
    // Bytes from the last multiple of 16 to a tile's first logit. They are the same for all tiles, because a tile has a
    // multiple of 32 rows.
    __device__ __forceinline__ int shift() const {
      return static_cast<int>(reinterpret_cast<unsigned long long>(program.input) % 16);
    }
    // Bytes of shared memory for one tile, as packed_stage of engines/softmax/layout.py.
    __device__ __forceinline__ int bytes() const {
      if constexpr (!kGaps) return Tile::kBytes + (kCut ? 16 : 0);
      const int logits = kTile * (pitch() + kPadding);
      return (logits > Stored::kBytes ? logits : Stored::kBytes) + 16;
    }
    // Number of rows of a tile.
    __device__ __forceinline__ int rows_of(int64 tile) const {
      const int64 remaining = program.space.rows - tile * kTile;
      return remaining < kTile ? static_cast<int>(remaining) : kTile;
    }
    // Number of rows of this lane, if the tile has `here` rows.
    static __device__ __forceinline__ int count_of(int here) {
      return (here - static_cast<int>(threadIdx.x % kWarp) + kWarp - 1) / kWarp;
    }
    __device__ __forceinline__ void start_labels(int64 tile, int count) {
      const int64 row = tile * kTile + threadIdx.x % kWarp;
      if constexpr (Program::Space::kOneDimension) {
        int64 offset[kRowStreams];
        program.space.offsets(row, offset);
        labels.read(program, offset, count, kWarp);
      } else {
        labels.read_each(program, count,
                         [&](int i, int64(&at)[kRowStreams]) { program.space.offsets(row + i * kWarp, at); });
      }
    }
    // Starts copies of the logits of a tile of `here` rows. Precondition: all lanes of the warp call it together.
    __device__ __forceinline__ void start_logits(int64 tile, int here, unsigned buffer) const {
      char* const place = stage + buffer * bytes();
      const int64 first = tile * kTile;
      if constexpr (kCut) {
        // The last row ends with its last class.
        const int last = (here - 1) * pitch() + kSpan;
        const bool remaining = (program.space.rows - first - here) * pitch() >= 16;
        copy_stretch<kPadding>(place, program.input + first * (pitch() / kSize), last, first > 0, remaining, pitch());
      } else {
        Tile{place}.copy_in(program.input + first * kClasses, here);
      }
    }
    // Evaluates a tile whose copies are complete, and writes its gradients. Returns the sum of its values. ahead(): as
    // in visit_register_rows. Precondition: all lanes of the warp call it together.
    template <bool kGradient, class Scale, class Ahead>
    __device__ __forceinline__ double visit(int64 tile, int here, unsigned buffer, Scale& scale, const Ahead& ahead) {
      const int lane = threadIdx.x % kWarp;
      const int64 first = tile * kTile;
      const Stored stored{stage + buffer * bytes()};
      const Place place{stored.row(lane), first + lane};
      double total;
      if constexpr (kCut) {
        // The gradients overlap logits of other lanes' rows in shared memory.
        const int apart = pitch() + kPadding;
        Pack<Storage, kRows> x[kClasses];
        Logits{stored.stage + lane * apart + shift(), apart}.load(x);
        __syncwarp();
        const LoadedRows<Place, Storage> loaded{place, x};
        total = visit_register_rows<kGradient>(program, loaded, labels, scale, count_of(here), ahead);
      } else if constexpr ((Program::kCapped || Program::kSmoothed) && kRows == 1 && kClasses > kMaxKept) {
        total = visit_rolled_row<kGradient>(program, place, labels, scale, count_of(here), ahead);
      } else {
        total = visit_register_rows<kGradient>(program, place, labels, scale, count_of(here), ahead);
      }
      __syncwarp();
      if constexpr (kGradient) {
        stored.copy_out(program.gradients + first * kClasses, here);
        // A later tile is copied to the same place.
        __syncwarp();
      }
      return total;
    }
  };

  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    using Rows = Tiles<Program>;
    const int64 tiles = (program.space.rows + Rows::kTile - 1) / Rows::kTile;
    Rows rows(program);
    if constexpr (!kAhead) {
      for_each_chunk(group, scale, chunks, work, [&](int chunk) {
        double total = 0.0;
#pragma unroll 1
        for (int64 tile = chunk; tile < tiles; tile += chunks) {
          const int here = rows.rows_of(tile);
          rows.start_labels(tile, Rows::count_of(here));
          rows.start_logits(tile, here, 0u);
          cp_async_wait_all();
          __syncwarp();
          total += rows.template visit<kGradient>(tile, here, 0u, scale, [] {});
        }
        return total;
      });
      return;
    }
    WarpTiles left(group, work.claim_counter);
    if (left.chunk >= chunks) return;
    unsigned buffer = 0;
    int here = rows.rows_of(left.tile);
    rows.start_logits(left.tile, here, buffer);
    rows.start_labels(left.tile, Rows::count_of(here));
    double total = 0.0;
#pragma unroll 1
    while (left.chunk < chunks) {
      const int64 tile = left.tile;
      const int chunk = left.chunk, here_now = here;
      const unsigned buffer_now = buffer;
      const bool last = left.last_in_chunk(chunks, tiles);
      cp_async_wait_all();
      __syncwarp();
      left.advance(group, chunks, tiles);
      // Nothing is loaded after the last tile.
      here = left.chunk < chunks ? rows.rows_of(left.tile) : 0;
      buffer ^= 1u;
      if (here > 0) rows.start_logits(left.tile, here, buffer);
      total += rows.template visit<kGradient>(tile, here_now, buffer_now, scale,
                                              [&] { rows.start_labels(left.tile, Rows::count_of(here)); });
      if (!last) continue;
      finish_chunk(group, scale, chunk, total, work.partials);
      total = 0.0;
    }
  }
};
