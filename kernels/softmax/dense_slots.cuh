// Dense targets whose operands move through slots of shared memory: what resident_dense_rows.cuh and
// windowed_dense_rows.cuh share.
//
// A slot of a thread holds a vector of each operand. A thread reads only slots that it has filled itself (cp.async), so
// no copy needs a barrier. While a row is evaluated, copies of the next row start.
//
// A group owns a row, and a thread the same vectors in all passes: each num_threads()-th one, starting with its rank.
// Preconditions: class stride 1, and equal alignment of all operands and gradients, with kShifted only of all
// gradients; dynamic shared memory for the slots of all threads of a block.
#pragma once
#include "softmax/dense_rows.cuh"

// The rows that a thread is at, and its slots.
template <class Program_, class Group, int kVecSize, bool kShifted>
struct DenseSlots {
  static constexpr bool kContiguous = true;
  static constexpr bool kPlacesGradients = false;
  static constexpr bool kAlone = false;
  using Program = Program_;
  using Input = typename Program::Input;
  using Target = typename Program::Target;
  using X = Pack<Input, kVecSize>;
  using T = Pack<Target, kVecSize>;
  using View = RowVectors<Input, kVecSize, int>;
  using Compute = typename Program::Compute;

  // A row, and this thread's edge elements.
  struct Row {
    int64 offset[kRowStreams];
    bool exists;
    bool active;
    Input edge_x;
    Target edge_t;
    Compute edge_kept[2][1];
  };
  // A slot: one vector of each operand.
  struct Slot {
    X* x;
    T* t;
    __device__ __forceinline__ void advance() {
      const unsigned step = (sizeof(X) + sizeof(T)) * blockDim.x;
      x = reinterpret_cast<X*>(reinterpret_cast<char*>(x) + step);
      t = reinterpret_cast<T*>(reinterpret_cast<char*>(t) + step);
    }
  };

  const Program& program;
  const Group& group;
  Row now, ahead;
  View view;
  bool active;
  // Vectors of the next row: pointers to the first ones, and their number.
  const Input* next_x;
  const Target* next_t;
  int next_vectors;

  __device__ __forceinline__ DenseSlots(const Program& program, const Group& group)
      : program(program), group(group), view(program.input, 0, 0), active(false), next_vectors(0) {
  }

  // Returns this thread's first slot.
  static __device__ __forceinline__ Slot begin() {
    extern __shared__ uint4 staged[];
    X* const x = reinterpret_cast<X*>(staged);
    return {x + threadIdx.x, reinterpret_cast<T*>(x + blockDim.x) + threadIdx.x};
  }
  template <class F>
  __device__ __forceinline__ void fill(const F& f) const {
    const int vectors = now.exists ? view.vectors : 0, edge = view.edge_class(group.thread_rank());
#pragma unroll 1
    for (int v = group.thread_rank(); v < vectors; v += group.num_threads()) f.template write<kVecSize>(view.first(v));
    if (now.exists && edge >= 0) f.template write<1>(edge);
  }

 protected:
  // Sets `ahead` to a row, without its edge elements.
  __device__ __forceinline__ void locate(int64 row) {
    ahead.exists = row >= 0 && row < program.space.rows;
    program.space.offsets(ahead.exists ? row : 0, ahead.offset);
    ahead.active = ahead.exists && program.active(ahead.offset);
  }
  // Makes `ahead` the current row.
  __device__ __forceinline__ void enter_row() {
    now = ahead;
    active = now.active;
    view = view_of(now);
  }
  // Sets the vectors of the next row, of which an inactive row has none, and loads its edge elements.
  __device__ __forceinline__ void open_next() {
    next_vectors = 0;
    if (!ahead.active) return;
    const Input* x = program.input + ahead.offset[kLogits];
    const Target* t = program.targets + ahead.offset[kLabels];
    const View next = view_of(ahead);
    const int edge = next.edge_class(group.thread_rank());
    if (edge >= 0) {
      ahead.edge_x = x[edge];
      ahead.edge_t = t[edge];
    }
    next_x = x + next.head;
    next_t = t + next.head;
    next_vectors = next.vectors;
  }

  // Returns the vectors of a row: those of its gradients with kShifted, otherwise those of its logits.
  __device__ __forceinline__ View view_of(const Row& row) const {
    const int classes = static_cast<int>(program.space.classes);
    if constexpr (kShifted) {
      static_assert(kSameType<Input, typename Program::Gradient>, "gradients lie apart from logits");
      return View(program.gradients, row.offset[kGradients], classes);
    } else {
      return View(program.input, row.offset[kLogits], classes);
    }
  }
  // Number of elements from the last aligned address to this one.
  template <class P, class Storage>
  static __device__ __forceinline__ int elements_behind(const Storage* at) {
    return static_cast<int>(static_cast<unsigned>(reinterpret_cast<unsigned long long>(at)) % sizeof(P) /
                            sizeof(Storage));
  }
  // Starts copying vector v of the next row, if it exists.
  __device__ __forceinline__ void refill(int v, const Slot& at) const {
    if (v >= next_vectors) return;
    copy(at.x, next_x + v * kVecSize);
    copy(at.t, next_t + v * kVecSize);
  }
  // Starts copying a vector, unless it has to be shifted in registers. kLast: as in cp_async_bytes.
  template <bool kLast = false, class P, class Storage>
  static __device__ __forceinline__ void copy(P* to, const Storage* from) {
    if (!kShifted || elements_behind<P>(from) == 0) {
      cp_async<kLast>(to, reinterpret_cast<const P*>(from));
    } else if constexpr (kHasCpAsync && sizeof(Storage) >= 4) {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        cp_async(reinterpret_cast<Pack<Storage, 1>*>(to) + i, reinterpret_cast<const Pack<Storage, 1>*>(from + i));
      }
    }
  }
  template <class F>
  __device__ __forceinline__ void visit_edge(F& f, bool visited) const {
    const int edge = view.edge_class(group.thread_rank());
    if (visited && edge >= 0) f(edge, Pack<Input, 1>{{now.edge_x}}, Pack<Target, 1>{{now.edge_t}});
  }
  // visit_edge() for for_each_replaced().
  template <class F>
  __device__ __forceinline__ void replace_edge(const F& f) {
    const int edge = view.edge_class(group.thread_rank());
    if (!active || edge < 0) return;
    now.edge_t = f(edge, Pack<Input, 1>{{now.edge_x}}, Pack<Target, 1>{{now.edge_t}}).element[0];
  }
};

// Reader of rows whose classes, Source::Classes<Program, Group>, move through slots.
template <class Source>
struct SlotReader {
  // As TwoPassReader::sweep.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    RowIterator<Group> next_row(group);
    if (next_row.chunk >= chunks) return;
    group.cluster_start();
    WorkQueue<Group> queue(group, work.claim_counter);
    typename Source::template Classes<Program, Group> classes(program, group, next_row.first + group.row_slot());
    double total = 0.0;
    SyncState sync{0, 0};
#pragma unroll 1
    for (;;) {
      const int chunk = next_row.chunk;
      next_row.advance(group, queue, chunks, program.space.rows, sync.syncs);
      sync.claimed = queue.claimed;
      const bool more = next_row.chunk < chunks;
      classes.advance_row(more ? next_row.first + group.row_slot() : -1);
      total += visit_dense_row<kGradient>(program, group, classes.now.offset, classes, classes.now.exists, sync, scale);
      if (next_row.chunk == chunk) continue;
      finish_chunk(group, scale, chunk, total, work.partials, sync);
      if (!more) return;
      total = 0.0;
    }
  }
};
