// Element-wise losses of operands that disagree about the innermost dimension, in tiles that go through shared memory.
// Micro-tiles (layout.cuh: TiledLayout) are single elements if no vector divides both dimensions: lanes that lie along
// one of them read and write a part of each sector along the other.
//
//   tile   kSideA = 32 elements along a, kSideB along b; a warp has one in a batch, lane l its elements with a = l
//
// 1. stage_in copies the tile of each staged source to shared memory, in lines along the direction in which the source
//    has unit stride. All copies are on their way before the first is waited for.
// 2. Pointwise::visit evaluates the elements, and writes results of unit stride along a at once, others to shared
//    memory. The gradient of an operand takes the place of the operand, whose element has been read then.
// 3. stage_out copies these from there, in lines along b.
//
// Elements of 16 bits are copied as the aligned words that hold them. A line may begin at the second half of a word:
// its phase, which is that in shared memory too. The words at both ends of a tile's line hold neighbours in the same
// line of memory, but for the words at the ends of that, of which the one element is copied.
//
// Warps work independently: each has tiles of its own. Preconditions: all lanes of a warp call these functions
// together; batches are tiles; dynamic shared memory as engines/pointwise/layout.py (staged_bytes) counts it.
#pragma once
#include "pointwise/pointwise.cuh"
#include "softmax/row_ptx.cuh"

// Elements from line to line of a tile in shared memory: an odd number of words, so that lanes meet in no bank, whether
// they have neighbours of a line or an element of each. Of 16 bits there is room for the phase.
template <class Storage>
__host__ __device__ constexpr int staged_pitch(int length) {
  return length + (sizeof(Storage) == 2 ? 2 : 1);
}

template <class Storage>
__device__ __forceinline__ int phase_of(const Storage* line) {
  return sizeof(Storage) == 2 ? static_cast<int>(reinterpret_cast<unsigned long long>(line) / 2) & 1 : 0;
}

// A source of which the lane's element at the cursor is at `place` in its tile. kSideB is even, so a line has one phase
// in all of its tiles.
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

// A sink of unit stride along b. It has no phase: where it takes the place of a source, no element lies behind that of
// the source.
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

// The tile of this warp that begins `place` bytes behind the first of its tiles, which take `bytes` together.
template <class Storage>
__device__ __forceinline__ Storage* staged_tile(int place, int bytes) {
  extern __shared__ uint4 staged[];
  return reinterpret_cast<Storage*>(reinterpret_cast<char*>(staged) + threadIdx.x / kWarp * bytes + place);
}

// Starts to copy kLines lines of kLength elements, of which so many of each are there. With `before`, lines go on in
// memory by an element in front of the tile. With `inside` all elements are there, and lines either go on by two behind
// it, too, or all begin with a word (`even`).
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
    const Storage* const own = x.pointer + first.base[kStream];
    const Storage* const from = own - lane * stride_a;
    if constexpr (S::kAlong == Along::kA) {
      copy_lines<Tile::kSideA, Tile::kSideB>(from, stride_b, x.tile, left_b, left_a, false, false, false);
    } else {
      const bool even = stride_a % 2 == 0 && phase_of(own) == 0;
      const bool inside = first.whole && (even || (first.b > 0 && left_b > Tile::kSideB + 1));
      copy_lines<Tile::kSideB, Tile::kSideA>(from, stride_a, x.tile, left_a, left_b, first.b > 0, inside, even);
      first.phases |= phase_of(own) << kStream;
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

// The tile that begins at the cursor of a lane, to shared memory.
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
  __syncwarp();  // the results of the tile before have been copied
  stage_in(program, first, typename Program::Slots{});
  cp_async_wait_all();
  __syncwarp();
}

// The results of the tile, from shared memory.
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
