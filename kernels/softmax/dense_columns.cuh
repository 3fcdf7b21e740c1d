// Dense targets of images: classes lie apart, neighbouring rows between them. A lane takes a row, or the lanes of the
// warps of a block do, and the worker moves 32 rows together. Value and gradients of dense_rows.cuh.
//
//   x[n, c, h, w]: a row is (n, :, h, w); a tile is 32 neighbouring rows
//
// 1. The worker, a warp or a block (ColumnWarps), copies all classes of a tile to shared memory, those of kVecSize rows
//    in a word: kVecSize classes and 32 rows at once in each warp.
// 2. Each lane makes the passes of dense_rows.cuh over its classes of a row. The last one leaves gradients in place of
//    what they are gradients of.
// 3. The worker writes the gradients that are wanted, in the same words.
//
// Moved by one lane each, elements of 16 bits take a load and a store to shared memory, because asynchronous copies
// have four bytes at least. A worker owns its tile; only its barrier separates the steps. With kShifted the words of an
// operand are those of the gradients though its address is none of a word: a lane shifts the two that it lies in.
//
// Traffic: each logit and target is read once, each gradient written once. Preconditions: kVecSize divides the number
// of rows; rows of a word are contiguous and aligned in all operands and gradients, with kShifted apart from the
// address of an operand; gradients have the dtypes of their operands.
#pragma once
#include "softmax/dense_rows.cuh"

// One operand of a worker's tile in shared memory: class c of the tile's row r is element 32 c + r. `thread` of
// `threads` moves its words.
template <class Storage, int kVecSize>
struct ColumnsOfTile {
  using Word = Pack<Storage, kVecSize>;
  static constexpr int kWords = kWarp / kVecSize;  // of a class
  Storage* stage;
  int thread, threads;

  // f(c, word) for each class c of the rows whose words this thread moves.
  template <int kUnroll = 4, class F>
  __device__ __forceinline__ void each(int classes, const F& f) const {
    Word* word = reinterpret_cast<Word*>(stage) + thread;
#pragma unroll kUnroll
    for (int c = thread / kWords; c < classes; c += threads / kWords, word += threads) f(c, word);
  }
  // `from` and `to`: the first class of the rows that this thread moves. With kShifted it need not be aligned.
  template <bool kShifted>
  __device__ __forceinline__ void copy_in(const Storage* from, int64 stride, int classes) const {
    if (kShifted && reinterpret_cast<unsigned long long>(from) % sizeof(Word) != 0) {
      copy_shifted(from, stride, classes);
    } else {
      each(classes, [&](int c, Word* word) { cp_async(word, reinterpret_cast<const Word*>(from + c * stride)); });
    }
  }
  __device__ __forceinline__ void copy_out(Storage* to, int64 stride, int classes) const {
    each(classes, [&](int c, const Word* word) { store_pack<kVecSize>(to + c * stride, load_words(word)); });
  }

 private:
  // Both words of each class that an unaligned one lies in have elements of it: classes are whole words apart. Four at
  // once would spill registers.
  __device__ __forceinline__ void copy_shifted(const Storage* from, int64 stride, int classes) const {
    if constexpr (Word::kWordBytes >= 4) {
      each<2>(classes, [&](int c, Word* word) {
        auto unaligned = load_unaligned<kVecSize>(from + c * stride);
        unaligned.align();
#pragma unroll
        for (int i = 0; i < Word::kWords; ++i) reinterpret_cast<typename Word::Word*>(word)[i] = unaligned.word[i];
      });
    }
  }
};

// The row of a lane in shared memory. Lane `rank` of the `threads` that share the row takes every threads-th pack of
// its classes.
template <class Program>
struct ColumnDenseClasses {
  static constexpr bool kContiguous = false;
  static constexpr bool kPlacesGradients = true;
  static constexpr bool kOnChip = false;
  static constexpr bool kAlone = true;
  using Input = typename Program::Input;
  using Target = typename Program::Target;
  using Compute = typename Program::Compute;
  static constexpr bool kHasRoom = sizeof(Input) == sizeof(Compute) && sizeof(Target) == sizeof(Compute);
  static constexpr int kEach = 4;
  Input* x;
  Target* t;
  int classes, rank, threads;
  bool exists, active;

  __device__ __forceinline__ void prefetch_next() const {
  }
  // f.at<n>(c) for packs of n classes from c: of kEach, which share what is rare, then the others one by one.
  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
#pragma unroll 1
    for (int c = rank * kEach; c + kEach <= classes; c += threads * kEach) f.template at<kEach>(c);
#pragma unroll 1
    for (int c = classes / kEach * kEach + rank; c < classes; c += threads) f.template at<1>(c);
  }
  template <class F>
  struct Visit {
    const ColumnDenseClasses& row;
    F& f;
    template <int kCount>
    __device__ __forceinline__ void at(int c) const {
      f(c, gather<kCount>(row.x, c), gather<kCount>(row.t, c));
    }
  };
  template <class F>
  __device__ __forceinline__ void visit(F& f) const {
    each(Visit<F>{*this, f});
  }
  template <class F>
  __device__ __forceinline__ void for_each(F& f) const {
    if (active) visit(f);
  }
  template <class F>
  __device__ __forceinline__ void final_pass(F& f) const {
    for_each(f);
  }
  template <class F>
  __device__ __forceinline__ void final_pass_all(const F& f) const {
    if (exists) visit(f);
  }
  template <class F>
  struct Fill {
    const F& f;
    template <int kCount>
    __device__ __forceinline__ void at(int c) const {
      f.template write<kCount>(c);
    }
  };
  template <class F>
  __device__ __forceinline__ void fill(const F& f) const {
    if (exists) each(Fill<F>{f});
  }
  // With kHasRoom.
  template <class F>
  struct VisitAndKeep {
    const ColumnDenseClasses& row;
    F& f;
    template <int kCount>
    __device__ __forceinline__ void at(int c) const {
      Compute kept[2][kCount];
      f(c, gather<kCount>(row.x, c), gather<kCount>(row.t, c), kept);
      row.keep(c, kept);
    }
  };
  template <class F>
  __device__ __forceinline__ void for_each_kept(F& f) const {
    if (active) each(VisitAndKeep<F>{*this, f});
  }
  template <class F>
  struct VisitKept {
    const ColumnDenseClasses& row;
    const F& f;
    template <int kCount>
    __device__ __forceinline__ void at(int c) const {
      Compute kept[2][kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        kept[0][i] = reinterpret_cast<const Compute*>(row.x)[(c + i) * kWarp];
        kept[1][i] = reinterpret_cast<const Compute*>(row.t)[(c + i) * kWarp];
      }
      f(c, kept);
    }
  };
  template <class F>
  __device__ __forceinline__ void final_kept_pass(const F& f) const {
    if (exists) each(VisitKept<F>{*this, f});
  }
  template <int kCount>
  __device__ __forceinline__ void keep(int c, const Compute (&kept)[2][kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      reinterpret_cast<Compute*>(x)[(c + i) * kWarp] = kept[0][i];
      reinterpret_cast<Compute*>(t)[(c + i) * kWarp] = kept[1][i];
    }
  }
  __device__ __forceinline__ void read(int c, Pack<Input, 1>& of_input, Pack<Target, 1>& of_target) const {
    of_input = gather<1>(x, c);
    of_target = gather<1>(t, c);
  }
  __device__ __forceinline__ int count() const {
    return classes;
  }
  __device__ __forceinline__ void put_logit(int c, const Pack<Input, 1>& of_input) const {
    scatter(x, c, of_input);
  }
  __device__ __forceinline__ void put_target(int c, const Pack<Target, 1>& of_target) const {
    scatter(t, c, of_target);
  }
  template <int kCount>
  __device__ __forceinline__ void input(int64 c, const Pack<Input, kCount>& g) const {
    scatter(x, static_cast<int>(c), g);
  }
  template <int kCount>
  __device__ __forceinline__ void target(int64 c, const Pack<Target, kCount>& g) const {
    scatter(t, static_cast<int>(c), g);
  }

 private:
  template <int kCount, class Storage>
  static __device__ __forceinline__ Pack<Storage, kCount> gather(const Storage* row, int c) {
    Pack<Storage, kCount> pack;
#pragma unroll
    for (int i = 0; i < kCount; ++i) pack.element[i] = row[(c + i) * kWarp];
    return pack;
  }
  template <int kCount, class Storage>
  static __device__ __forceinline__ void scatter(Storage* row, int c, const Pack<Storage, kCount>& pack) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) row[(c + i) * kWarp] = pack.element[i];
  }
};

// Reads rows in tiles of 32, of which each word has kVecSize rows of a class.
template <int kVecSize, bool kShifted>
struct DenseColumnReader {
  template <bool kGradient, class Group, class Program, class Scale>
  struct Visit {
    static constexpr bool kNeedsNextRow = false;
    using Input = typename Program::Input;
    using Target = typename Program::Target;
    using Inputs = ColumnsOfTile<Input, kVecSize>;
    using Targets = ColumnsOfTile<Target, kVecSize>;
    const Program& program;
    const Group& group;
    Scale& scale;

    __device__ __forceinline__ auto operator()(int64 row, bool exists, int64, SyncState& sync) const {
      static_assert(kSameType<Input, typename Program::Gradient>, "gradients take the place of logits");
      extern __shared__ uint4 staged[];
      const int thread = group.worker_thread(), threads = group.worker_threads();
      const int lane = group.row_slot(), classes = static_cast<int>(program.space.classes);
      const auto& stride = program.space.class_stride;
      constexpr int kRowBytes = static_cast<int>(sizeof(Input) + sizeof(Target));
      char* const own = reinterpret_cast<char*>(staged) + group.worker_offset(kWarp * kRowBytes * classes);
      const Inputs inputs{reinterpret_cast<Input*>(own), thread, threads};
      const Targets targets{reinterpret_cast<Target*>(inputs.stage + kWarp * classes), thread, threads};
      // The first of the rows whose words this thread moves.
      const int64 moved_row = row - lane + thread % Inputs::kWords * kVecSize;
      const bool moves = moved_row < program.space.rows;
      int64 offset[kRowStreams], moved[kRowStreams];
      program.space.offsets(exists ? row : 0, offset);
      program.space.offsets(moves ? moved_row : 0, moved);
      const bool active = exists && program.active(offset);
      const int moved_classes = moves ? classes : 0;
      inputs.template copy_in<kShifted>(program.input + moved[kLogits], stride[kLogits], moved_classes);
      targets.template copy_in<kShifted>(program.targets + moved[kLabels], stride[kLabels], moved_classes);
      cp_async_wait_all();
      group.worker_barrier();
      const ColumnDenseClasses<Program> of_lane{
          inputs.stage + lane, targets.stage + lane, classes, group.thread_rank(), group.num_threads(), exists, active};
      const auto value = visit_dense_row<kGradient>(program, group, offset, of_lane, exists, sync, scale);
      group.worker_barrier();
      if constexpr (kGradient) {
        if constexpr (Program::kInputGradient) {
          inputs.copy_out(program.gradients + moved[kGradients], stride[kGradients], moved_classes);
        }
        if constexpr (Program::kTargetGradient) {
          targets.copy_out(program.target_gradients + moved[kTargetGradients], stride[kTargetGradients], moved_classes);
        }
        // The next rows are copied to the same place.
        group.worker_barrier();
      }
      return value;
    }
  };

  // As TwoPassReader::sweep. For a SubwarpGroup of width 1, or ColumnWarps.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    for_each_row(group, scale, program.space.rows, chunks, work,
                 Visit<kGradient, Group, Program, Scale>{program, group, scale});
  }
};
