// Dense targets for images: classes are strided, and neighbouring rows are contiguous. Value and gradients of
// dense_rows.cuh. Either a lane owns a row, or lane l of every warp of a block shares row l of a tile.
//
//   x[n, c, h, w]: a row is (n, :, h, w); a tile is 32 neighbouring rows
//
// 1. The worker, a warp or a block (ColumnWarps), copies all classes of a tile to shared memory. A word holds kVecSize
//    rows of a class, so each instruction of a warp copies kVecSize classes of 32 rows.
// 2. Each lane runs the passes of dense_rows.cuh over its classes of a row. The last pass overwrites each operand in
//    shared memory by its gradient.
// 3. The worker writes the requested gradients in the same words.
//
// Words are there for 16-bit elements: cp.async copies at least four bytes, so single elements would take a load and a
// store to shared memory each. A worker owns its tile; only its barrier separates the steps. With kShifted, an operand
// is divided into the same words as its gradients, although they are not aligned in the operand. A lane loads the two
// aligned words that contain such a word, and shifts them.
//
// Traffic: each logit and target is read once, each gradient written once. Preconditions: kVecSize divides the number
// of rows; rows of a word are contiguous and aligned in all operands and gradients, except that with kShifted the
// address of an operand may be misaligned; gradients have the dtypes of their operands.
#pragma once
#include "softmax/dense_rows.cuh"

// One operand of a worker's tile in shared memory: class c of the tile's row r is element 32 c + r. The calling thread,
// number `thread` of `threads`, moves one word of every (threads / kWords)-th class.
template <class Storage, int kVecSize>
struct ColumnsOfTile {
  using Word = Pack<Storage, kVecSize>;
  static constexpr int kWords = kWarp / kVecSize;  // per class
  Storage* stage;
  int thread, threads;

  // Calls f(c, word) for each class c of which this thread moves a word; `word` is its slot in shared memory.
  template <int kUnroll = 4, class F>
  __device__ __forceinline__ void each(int classes, const F& f) const {
    Word* word = reinterpret_cast<Word*>(stage) + thread;
#pragma unroll kUnroll
    for (int c = thread / kWords; c < classes; c += threads / kWords, word += threads) f(c, word);
  }
  // `from` and `to`: first class of the rows that this thread moves. With kShifted, `from` may be misaligned.
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
  // Classes are whole words apart, so a misaligned operand is misaligned in every class. Each of the two aligned words
  // that are loaded then holds elements of the operand. Unrolling by four would spill registers.
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

// A lane's row in shared memory. `threads` lanes, one per warp of the worker, share the row; lane `rank` of them
// processes every threads-th pack of classes.
template <class Program>
struct ColumnDenseClasses {
  static constexpr bool kContiguous = false;
  static constexpr bool kPlacesGradients = true;
  static constexpr bool kOnChip = false;
  static constexpr bool kManyPacks = false;
  static constexpr bool kAlone = true;
  using Input = typename Program::Input;
  using Target = typename Program::Target;
  using Compute = typename Program::Compute;
  static constexpr bool kHasRoom = sizeof(Input) == sizeof(Compute) && sizeof(Target) == sizeof(Compute);
  static constexpr bool kReplaces = false;
  static constexpr int kEach = 4;
  Input* x;
  Target* t;
  int classes, rank, threads;
  bool exists, active;

  __device__ __forceinline__ void prefetch_next() const {
  }
  // Calls f.at<n>(c) for packs of n classes from c: first packs of kEach classes, which share the rare branches, then
  // the remaining classes one by one.
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
  // Precondition, also of for_each_kept(), final_kept_pass() and keep(): kHasRoom.
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

// Reads rows in tiles of 32; a word holds kVecSize rows of a class.
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
      // First of the rows whose words this thread moves.
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
        // The next tile is copied to the same shared memory.
        group.worker_barrier();
      }
      return value;
    }
  };

  // Interface of TwoPassReader::sweep. Precondition: Group is a SubwarpGroup of width 1, or ColumnWarps.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    for_each_row(group, scale, program.space.rows, chunks, work,
                 Visit<kGradient, Group, Program, Scale>{program, group, scale});
  }
};
