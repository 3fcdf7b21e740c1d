// Rows with a target per class that stay on chip: as in resident_rows.cuh, with both operands in shared memory, each
// thread's vectors where nobody but itself reads them. A vector that has been used for the last time makes room for one
// of the thread's next row at once.
#pragma once
#include "softmax/row_terms.cuh"

// What this thread has of both operands, as visit_terms asks for it.
template <class Program_, class Unit, int kLanes>
struct StagedTerms {
  static constexpr bool kDense = true;
  using Program = Program_;
  using Input = typename Program::Input;
  using Target = typename Program::Target;
  using X = Pack<Input, kLanes>;
  using T = Pack<Target, kLanes>;
  using View = RowView<Input, kLanes, int>;

  // A row, and what this thread takes of its ends.
  struct Row {
    int64 offset[kRowStreams];
    bool exists;
    bool counts;
    Input end_x;
    Target end_t;
  };
  // This thread's vectors of one place.
  struct Place {
    X* x;
    T* t;
    __device__ __forceinline__ void advance() {
      const unsigned step = (sizeof(X) + sizeof(T)) * blockDim.x;
      x = reinterpret_cast<X*>(reinterpret_cast<char*>(x) + step);
      t = reinterpret_cast<T*>(reinterpret_cast<char*>(t) + step);
    }
  };

  const Program& program;
  const Unit& unit;
  Row now, ahead;
  View view;
  bool counts;
  // What is to be copied of the row ahead.
  const X* next_x;
  const T* next_t;
  int next_vectors;

  __device__ __forceinline__ StagedTerms(const Program& program, const Unit& unit, int64 row)
      : program(program), unit(unit), view(program.input, 0, 0), counts(false) {
    look(row);
    look_ahead();
    Place at = begin();
    for (int v = unit.index(); v < next_vectors; v += unit.count(), at.advance()) refill(v, at);
  }

  static __device__ __forceinline__ Place begin() {
    extern __shared__ uint4 staged[];
    X* const x = reinterpret_cast<X*>(staged);
    return {x + threadIdx.x, reinterpret_cast<T*>(x + blockDim.x) + threadIdx.x};
  }

  // Turns to the row ahead, and to `row`, if it is none behind the last, as the one ahead.
  __device__ __forceinline__ void turn_to_next(int64 row) {
    now = ahead;
    counts = now.counts;
    view = View(program.input, now.offset[kLogits], static_cast<int>(program.space.classes));
    look(row);
    wait_for_copies();
  }

  // Reads what of the row ahead goes to registers. Half a row before the rest is copied it is asked for, so that copies
  // do not wait for the memory itself.
  __device__ __forceinline__ void look_ahead() {
    next_vectors = 0;
    if (!ahead.counts) return;
    const Input* x = program.input + ahead.offset[kLogits];
    const Target* t = program.targets + ahead.offset[kLabels];
    const View next(program.input, ahead.offset[kLogits], static_cast<int>(program.space.classes));
    const int single = next.end(unit.index());
    if (single >= 0) {
      ahead.end_x = x[single];
      ahead.end_t = t[single];
    }
    next_x = reinterpret_cast<const X*>(x + next.head);
    next_t = reinterpret_cast<const T*>(t + next.head);
    next_vectors = next.vectors;
    if (Unit::kBlock && unit.index() == 0) {
      if (sizeof(X) == 16) bring_to_cache(next_x, next.vectors * 16u);
      if (sizeof(T) == 16) bring_to_cache(next_t, next.vectors * 16u);
    }
  }

  template <class F>
  __device__ __forceinline__ void each(F& f) const {
    const int vectors = counts ? view.vectors : 0;
    Place at = begin();
#pragma unroll 2
    for (int v = unit.index(); v < vectors; v += unit.count(), at.advance()) {
      f(view.first(v), whole(at.x), whole(at.t));
    }
    end(f, counts);
  }
  template <class F>
  __device__ __forceinline__ void last(F& f) const {
    pass_on(f, counts);
  }
  template <class F>
  __device__ __forceinline__ void last_all(const F& f) const {
    pass_on(f, now.exists);
  }

 private:
  __device__ __forceinline__ void look(int64 row) {
    ahead.exists = row >= 0 && row < program.space.rows;
    program.space.offsets(ahead.exists ? row : 0, ahead.offset);
    ahead.counts = ahead.exists && program.counts(ahead.offset);
  }

  __device__ __forceinline__ void refill(int v, const Place& at) const {
    if (v >= next_vectors) return;
    stage_pack(at.x, next_x + v);
    stage_pack(at.t, next_t + v);
  }

  template <class F>
  __device__ __forceinline__ void pass_on(F& f, bool visited) const {
    const int vectors = visited ? view.vectors : 0, all = larger(vectors, next_vectors);
    Place at = begin();
#pragma unroll 2
    for (int v = unit.index(); v < all; v += unit.count(), at.advance()) {
      if (v < vectors) f(view.first(v), whole(at.x), whole(at.t));
      refill(v, at);
    }
    end(f, visited);
  }

  template <class F>
  __device__ __forceinline__ void end(F& f, bool visited) const {
    const int single = view.end(unit.index());
    if (visited && single >= 0) f(single, Pack<Input, 1>{{now.end_x}}, Pack<Target, 1>{{now.end_t}});
  }
};

template <int kLanes>
struct ResidentTermReader {
  // As LongReader's.
  template <bool kGradient, class Unit, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Unit& unit, Scale& scale, int64 groups,
                                               const Workspace& work) {
    RowWalk<Unit> walk(unit);
    if (walk.group >= groups) return;
    unit.open();
    GroupQueue<Unit> queue(unit, work.drawn);
    StagedTerms<Program, Unit, kLanes> classes(program, unit, walk.first + unit.row());
    double total = 0.0;
    Turn turn{0, 0};
#pragma unroll 1
    for (;;) {
      const int group = walk.group;
      walk.advance(unit, queue, groups, program.space.rows, turn.joins);
      turn.drawn = queue.drawn;
      const bool more = walk.group < groups;
      classes.turn_to_next(more ? walk.first + unit.row() : -1);
      total += visit_terms<kGradient>(program, unit, classes.now.offset, classes, classes.now.exists, turn, scale);
      if (walk.group == group) continue;
      close_group(unit, scale, group, total, work.partials, turn);
      if (!more) return;
      total = 0.0;
    }
  }
};
