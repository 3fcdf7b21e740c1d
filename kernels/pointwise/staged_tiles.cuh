// Pointwise losses of operands whose innermost dimensions differ, in tiles that are staged in shared memory. Without
// staging, micro-tiles (layout.cuh: TiledLayout) are single elements if no vector divides both dimensions: lanes along
// one dimension then read and write only a part of each sector of the streams that are contiguous along the other.
//
//   value, gradient   those of pointwise.cuh
//   tile              kSideA = 32 elements along a, kSideB along b; lane l of the warp has the elements with a = l
//
// 1. stage_in copies the tile of each staged source to shared memory, in lines along the direction of its unit stride.
//    All copies are started before the first one is waited for.
// 2. Pointwise::visit evaluates the elements. It stores results of unit stride along a immediately, and all others to
//    shared memory. The gradient of an operand overwrites the operand, whose element has been read by then.
// 3. stage_out copies the results from shared memory to their arrays, in lines along b.
//
// Elements of 16 bits are copied as the aligned words that contain them. A line that begins at the second half of a
// word has phase 1, also in shared memory. The words at both ends of a tile's line contain neighbours from the same
// line of the array, except at the ends of the latter: there, only the element itself is copied.
//
// A warp owns its tiles, one per batch; only __syncwarp separates the steps. Traffic: as in pointwise.cuh; of 16-bit
// elements, a word that two neighbouring tiles share is read by both. Preconditions: all lanes of a warp call these
// functions together; batches are tiles; dynamic shared memory has the size that engines/pointwise/layout.py
// (staged_bytes) computes.
#pragma once
#include "pointwise/pointwise.cuh"
#include "softmax/row_ptx.cuh"

// Pitch of a tile in shared memory, in elements from line to line: an odd number of words, so that lanes have no bank
// conflicts, whether they access neighbours of one line or one element of each line. With 16-bit elements, there is
// room for the phase.
template <class Storage>
__host__ __device__ constexpr int staged_pitch(int length) {
  return length + (sizeof(Storage) == 2 ? 2 : 1);
}

// Phase of a line: 1 if its first element is the second half of a word, otherwise 0.
template <class Storage>
__device__ __forceinline__ int phase_of(const Storage* line) {
  return sizeof(Storage) == 2 ? static_cast<int>(reinterpret_cast<unsigned long long>(line) / 2) & 1 : 0;
}

// A staged source. The lane's element at the cursor is element `place` of the source's tile. kSideB is even, so a line
// has the same phase in all of its tiles.
template <class Storage_, Along kAlong_>
struct StagedSource {
  using Storage = Storage_;
  static constexpr Access kAccess = Access::kStaged;
  static constexpr Along kAlong = kAlong_;  // the direction of unit stride
  static_assert(kAlong == Along::kB || sizeof(Storage) > 2, "lines along a have no phase");
  const Storage* pointer;
  Storage* tile;

  template <int kStream, class Layout>
  __device__ __forceinline__ int place(const Layout&, const typename Layout::Cursor& at) const {
    using Tile = typename Layout::Tile;
    const int lane = threadIdx.x % kWarp;
    if constexpr (kAlong == Along::kA) return at.step * staged_pitch<Storage>(Tile::kSideA) + lane;
    const int phase = sizeof(Storage) == 2 ? at.phases >> kStream & 1 : 0;
    return lane * staged_pitch<Storage>(Tile::kSideB) + phase + at.step;
  }
};

// A staged sink, of unit stride along b. It has no phase: if it overwrites the tile of a source, it stores each element
// where the source has its own, or before that.
template <class Storage_>
struct StagedSink {
  using Storage = Storage_;
  Storage* pointer;
  Storage* tile;

  template <int kStream, class Layout>
  __device__ __forceinline__ int place(const Layout&, const typename Layout::Cursor& at) const {
    return threadIdx.x % kWarp * staged_pitch<Storage>(Layout::Tile::kSideB) + at.step;
  }
};

template <class Storage, Along kAlong>
struct IsSource<StagedSource<Storage, kAlong>> {
  static constexpr bool value = true;
};
template <class Storage>
struct IsSink<StagedSink<Storage>> {
  static constexpr bool value = true;
};
template <class Storage, Along kAlong>
struct IsStaged<StagedSource<Storage, kAlong>> {
  static constexpr bool value = true;
};
template <class Storage>
struct IsStaged<StagedSink<Storage>> {
  static constexpr bool value = true;
};
template <class Storage, Along kAlong, int kVecSize>
struct LoadedElement<StagedSource<Storage, kAlong>, kVecSize> {
  using type = typename LoadedOf<StagedSource<Storage, kAlong>, kVecSize>::type;
};

// Returns the tile that begins `place` bytes after the first tile of this warp. All tiles of a warp take `bytes`.
template <class Storage>
__device__ __forceinline__ Storage* staged_tile(int place, int bytes) {
  extern __shared__ uint4 staged[];
  return reinterpret_cast<Storage*>(reinterpret_cast<char*>(staged) + threadIdx.x / kWarp * bytes + place);
}

// Starts copies of kLines lines of kLength elements, of which `lines` lines with `length` elements each exist. With
// `before`, lines continue in memory by at least one element before the tile. With `inside`, all elements exist, and
// either lines also continue by two elements after the tile, or every line begins with a whole word (`even`).
template <int kLength, int kLines, class Storage>
__device__ __forceinline__ void copy_lines(const Storage* from, int64 stride, Storage* tile, int64 lines, int64 length,
                                           bool before, bool inside, bool even) {
  constexpr int kPitch = staged_pitch<Storage>(kLength);
  const int lane = threadIdx.x % kWarp;
  if constexpr (sizeof(Storage) == 2 && kHasCpAsync) {
    static_assert(kLength == 2 * kWarp && kLines == kWarp, "a lane has a word of each line, and the last of one");
    unsigned* const to = reinterpret_cast<unsigned*>(tile);
    if (inside) {
      const auto aligned = [](const Storage* x) {
        return reinterpret_cast<const unsigned*>(reinterpret_cast<unsigned long long>(x) & ~3ull);
      };
#pragma unroll 16
      for (int line = 0; line < kLines; ++line) {
        cp_async_bytes<4>(to + line * (kPitch / 2) + lane, aligned(from + line * stride) + lane);
      }
      if (!even) cp_async_bytes<4>(to + lane * (kPitch / 2) + kWarp, aligned(from + lane * stride) + kWarp);
      return;
    }
    const auto copy_word = [&](int line, int word) {
      const Storage* const first = from + line * stride;
      const int phase = phase_of(first), left = 2 * word - phase, right = left + 1;
      if (line >= lines || left >= length) return;
      if (left >= (before ? -1 : 0) && right < length) {
        cp_async_bytes<4>(to + line * (kPitch / 2) + word, reinterpret_cast<const unsigned*>(first + left));
      } else {
        const int only = left < 0 ? right : left;
        tile[line * kPitch + phase + only] = first[only];
      }
    };
#pragma unroll 8
    for (int line = 0; line < kLines; ++line) copy_word(line, lane);
    copy_word(lane, kWarp);
  } else {
    const Storage* at = from + lane;
#pragma unroll 8
    for (int line = 0; line < kLines; ++line, at += stride) {
#pragma unroll
      for (int i = 0; i < kLength; i += kWarp) {
        if (line >= lines || lane + i >= length) continue;
        Storage* const to = tile + line * kPitch + lane + i;
        if constexpr (sizeof(Storage) == 2) {
          to[phase_of(at - lane)] = at[i];
        } else {
          cp_async_element(to, at + i);
        }
      }
    }
  }
}

template <int kStream, class Layout, class S>
__device__ __forceinline__ void stage_source(const Layout& layout, typename Layout::Cursor& first, const S& x) {
  if constexpr (IsStaged<S>::value) {
    using Storage = typename S::Storage;
    using Tile = typename Layout::Tile;
    const int lane = threadIdx.x % kWarp;
    const int64 stride_a = layout.stride_a[kStream], stride_b = layout.stride_b[kStream];
    const int64 first_a = first.a - lane, left_a = layout.size_a - first_a, left_b = layout.size_b - first.b;
    const Storage* const lane_start = x.pointer + first.base[kStream];
    const Storage* const from = lane_start - lane * stride_a;
    if constexpr (S::kAlong == Along::kA) {
      copy_lines<Tile::kSideA, Tile::kSideB>(from, stride_b, x.tile, left_b, left_a, false, false, false);
    } else {
      const bool even = stride_a % 2 == 0 && phase_of(lane_start) == 0;
      const bool inside = first.whole && (even || (first.b > 0 && left_b > Tile::kSideB + 1));
      copy_lines<Tile::kSideB, Tile::kSideA>(from, stride_a, x.tile, left_a, left_b, first.b > 0, inside, even);
      first.phases |= phase_of(lane_start) << kStream;
    }
  }
}

template <int kStream, class Layout, class S>
__device__ __forceinline__ void stage_sink(const Layout& layout, const typename Layout::Cursor& first, const S& x) {
  if constexpr (IsStaged<S>::value) {
    using Tile = typename Layout::Tile;
    constexpr int kPitch = staged_pitch<typename S::Storage>(Tile::kSideB);
    const int lane = threadIdx.x % kWarp;
    const int64 first_a = first.a - lane, stride = layout.stride_a[kStream];
    const int64 lines = layout.size_a - first_a, length = layout.size_b - first.b - lane;
    auto* to = x.pointer + first.base[kStream] - lane * stride + lane;
#pragma unroll 8
    for (int line = 0; line < Tile::kSideA; ++line, to += stride) {
#pragma unroll
      for (int i = 0; i < Tile::kSideB; i += kWarp) {
        if (line < lines && i < length) to[i] = x.tile[line * kPitch + lane + i];
      }
    }
  }
}

// Copies the tile that begins at the lane's cursor to shared memory.
template <class Program, int... kSlot>
__device__ __forceinline__ void stage_in(const Program& program, typename Program::Cursor& first, Indices<kSlot...>) {
  (stage_source<kSlot>(program.layout, first, get<kSlot>(program.sources)), ...);
  if constexpr (Program::kScaledPerElement) {
    stage_source<Program::kElementStream>(program.layout, first, program.element);
  }
}
template <class Program>
__device__ __forceinline__ void stage_in(const Program& program, typename Program::Cursor& first) {
  using Tile = typename Program::Layout::Tile;
  static_assert(Tile::kSideA == kWarp && Tile::kLanesA == kWarp && Program::kVector == 1, "a lane has one a");
  static_assert(Program::kElementStream < 32, "a bit for each stream");
  __syncwarp();  // the results of the previous tile have been copied
  stage_in(program, first, typename Program::Slots{});
  cp_async_wait_all();
  __syncwarp();
}

// Copies the results of the tile from shared memory to their arrays.
template <class Program, int... kSlot>
__device__ __forceinline__ void stage_out(const Program& program, const typename Program::Cursor& first,
                                          Indices<kSlot...>) {
  (stage_sink<Program::kOperands + kSlot>(program.layout, first, get<kSlot>(program.sinks)), ...);
  if constexpr (Program::kStoresValues) {
    stage_sink<Program::kElementStream>(program.layout, first, program.element);
  }
}
template <class Program>
__device__ __forceinline__ void stage_out(const Program& program, const typename Program::Cursor& first) {
  __syncwarp();
  stage_out(program, first, typename Program::Slots{});
}
