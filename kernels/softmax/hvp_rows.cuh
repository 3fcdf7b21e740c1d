// Second derivatives for class indices without a cap: JVP and HVP as in second_derivatives.cuh, but with the
// derivatives of the exponentials written out instead of evaluated on nested dual numbers.
//
//   logits x and their tangents v (R, C), labels y (R,),  z_c = scale x_c
//   e_c = exp(z_c - m),  u_c = v_c - v_m              v_m: tangent of the largest logit
//   S' = scale sum of e_c u_c                         tangent of the sum S of exponentials without the label's
//   hvp_c = e_c (A scale u_c + A') - B' w_c           A, B and their tangents A', B': GradCoeffs (softmax.cuh)
//
// 1. The first pass adds e_c and e_c u_c over the classes. The sums are rescaled, on nested numbers, only when a logit
//    reaches or exceeds the running maximum, which is rare because lanes that share a row in memory start with the
//    largest logit of their first vectors, and when partial sums are combined.
// 2. finish() evaluates the loss and the coefficients of the row on nested numbers.
// 3. The second pass computes hvp_c in about a dozen instructions. Nested numbers take eighty: they also compute values
//    that are never stored, multiply by tangents that are 0, and compare each factor with 0.
//
// v_m is subtracted before tangents are multiplied by the scale, so a tangent shared by all classes cancels before
// anything is rounded. A factor of 0 times an infinite tangent is NaN at first: a pack whose results are NaN is
// evaluated again with scaled_tangent, which returns 0 for such a product.
//
// A Source supplies the classes of a row. HvpRowInMemory reads memory in each pass; the threads of a group share the
// row. StagedHvpColumn and PackedHvpRows read shared memory; each thread owns a row. register_hvp.cuh covers rows in
// registers.
//
// Traffic: rows in memory are read twice, staged rows once; each result is written once. Preconditions:
// Program::kCapped is false.
#pragma once
#include "softmax/packed_rows.cuh"
#include "softmax/second_derivatives.cuh"

// Contiguous classes of a row with their tangents.
template <class Storage, int kVecSize>
struct TangentPack {
  Pack<Storage, kVecSize> values, tangents;
};

// exp(scale x - shift). For 16-bit storage it is a power of 2: the error of its exponent, 2^-18, does not matter there.
// The product of the shift and log2(e) must not be infinite, so it is clamped at -scalar_max().
template <class Storage, class T>
__device__ __forceinline__ T exponential_of_class(T x, T scale, T shift) {
  if constexpr (sizeof(Storage) == 2 && kSameType<T, float>) {
    return exp2_ftz(fmaf(x, scale * kLog2E, -max_ignoring_nan(shift * kLog2E, -scalar_max(shift))));
  } else {
    return exp_nonpositive(scalar_fma(x, scale, -shift));
  }
}

// Sums over classes: RowSums on nested numbers whose tangents are those of unscaled logits.
template <class Program>
using HvpSums = RowSums<typename Program::Compute, Program::kSmoothed>;

// Adds contiguous classes, starting at `first`, to the sums. `target` is the position of the label's class in the pack,
// or -1; z is the label's logit. Precondition: no logit of the pack exceeds the maximum of `sums`.
template <int kVecSize, class Program, class T>
__device__ __forceinline__ void add_with_tangents(const Program& program, int64 first, int target, NestedDual<T> z,
                                                  const TangentPack<typename Program::Storage, kVecSize>& pack,
                                                  HvpSums<Program>& sums) {
  T x[kVecSize], v[kVecSize], e[kVecSize], change[kVecSize], w[kVecSize];
  unpack(pack.values, x);
  unpack(pack.tangents, v);
  const T scale = program.logit.scale.value;
  const NestedDual<T> shift = exp_shift(sums.softmax.max_logit);
  if constexpr (Program::kSmoothed) {
    NestedDual<T> weights[kVecSize];
    program.weights_of(first, weights);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) w[i] = weights[i].value;
  }
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    e[i] = exponential_of_class<typename Program::Storage>(x[i], scale, shift.value);
    v[i] -= shift.tangent;
    change[i] = e[i] * v[i];
    if constexpr (Program::kSmoothed) {
      const T of_class = v[i] + shift.tangent;
      sums.weighted_gap.value += w[i] == T(0) ? T(0) : w[i] * (z.value - scale * x[i]);
      sums.weighted_gap.tangent += scaled_tangent(w[i], z.tangent - of_class);
      if constexpr (Program::kWeighted) sums.weight_sum.value += w[i];
    }
  }
  if (target >= 0) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      if (i == target) e[i] = change[i] = T(0);
    }
  }
  T changed = sum_elements(change);
  if (changed != changed) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) change[i] = i == target ? T(0) : scaled_tangent(e[i], v[i]);
    changed = sum_elements(change);
  }
  sums.softmax.exp_sum.value += sum_elements(e);
  sums.softmax.exp_sum.tangent += changed;
}

// Returns the maximum of `max_logit` and the logits of a pack, with its tangent, which is that of an unscaled logit.
template <class T, class Storage, int kVecSize>
__device__ __forceinline__ NestedDual<T> max_with_tangents(T scale, const TangentPack<Storage, kVecSize>& pack,
                                                           NestedDual<T> max_logit) {
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    const NestedDual<T> of_class{scale * widen<T>(pack.values.element[i]), widen<T>(pack.tangents.element[i])};
    max_logit = max_ignoring_nan(max_logit, of_class);
  }
  return max_logit;
}

// Returns the logit from which the maximum of a thread's part of a row starts: the label's logit z, or the largest one
// of the first vectors of the lanes that share the row. Precondition: all 32 lanes of a warp call it together.
template <class Group, class Source, class View, class T>
__device__ __forceinline__ NestedDual<T> first_max(const Group& group, T scale, const Source& source, const View& view,
                                                   bool active, NestedDual<T> z) {
  NestedDual<T> max_logit = z;
  if (active && group.thread_rank() < view.vectors) {
    const auto x = source.template load<View::kVecSize, false>(view.first(group.thread_rank()));
    max_logit = max_with_tangents(scale, x, z);
  }
  return subwarp_reduce(max_logit, group.subwarp_size(), MaxOp{});
}

// Sums over a thread's part of a row, as partial_softmax: every `step`-th vector from `begin` to `end`, and the edge
// class `edge` (or -1). The maximum starts from `start`.
template <int kVectors, class Program, class Source, class View, class Index, class T>
__device__ __forceinline__ HvpSums<Program> sums_with_tangents(const Program& program, const Source& source,
                                                               const View& view, Index label, NestedDual<T> z,
                                                               NestedDual<T> start, Index begin, Index end, Index step,
                                                               Index edge) {
  using Storage = typename Program::Storage;
  constexpr int kVecSize = View::kVecSize;
  const T scale = program.logit.scale.value;
  HvpSums<Program> sums{{start, NestedDual<T>(0)}, NestedDual<T>(0), NestedDual<T>(0)};
  if constexpr (Source::kStaged) {
    // The maximum needs a pass of its own: in nearly every pack some lane of the warp would meet a new maximum.
    NestedDual<T> max_logit = start;
#pragma unroll 2
    for (Index vector = begin; vector < end; vector += step) {
      max_logit = max_with_tangents(scale, source.template load<kVecSize, false>(view.first(vector)), max_logit);
    }
    sums.softmax.max_logit = max_logit;
  }
  if (edge >= 0) {
    const auto x = source.template load<1, false>(edge);
    rescale(sums.softmax, max_with_tangents(scale, x, sums.softmax.max_logit));
    add_with_tangents(program, edge, edge == label ? 0 : -1, z, x, sums);
  }
#pragma unroll 1
  for (Index vector = begin; vector < end; vector += step * kVectors) {
    TangentPack<Storage, kVecSize> x[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (vector + k * step < end) x[k] = source.template load<kVecSize, false>(view.first(vector + k * step));
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (vector + k * step >= end) continue;
      const Index first = view.first(vector + k * step);
      if constexpr (!Source::kStaged) {
        RunningMax<T, Storage, kVecSize> largest;
        largest.add(x[k].values);
        // Rare after the first few packs. A tie counts too: the largest tangent of equal logits is chosen.
        if (!(scale * largest.get() < sums.softmax.max_logit.value)) {
          rescale(sums.softmax, max_with_tangents(scale, x[k], sums.softmax.max_logit));
        }
      }
      const Index target = label - first;
      add_with_tangents(program, first, target >= 0 && target < kVecSize ? static_cast<int>(target) : -1, z, x[k],
                        sums);
    }
  }
  return sums;
}

// Coefficients of hvp_c, shared by all classes of a row.
template <class T>
struct HvpCoeffs {
  T max_logit, max_tangent;  // max_tangent is that of the unscaled logit
  T exp_coeff;               // includes a factor `scale`
  T exp_tangent, weight_tangent, target;
  bool all_zero;
};

// Computes and stores hvp_c of contiguous classes, starting at `first`. `target` is the position of the label's class
// in the pack, or -1.
template <int kVecSize, class Program, class Source, class T>
__device__ __forceinline__ void store_hvp(const Program& program, const Source& source, int64 first, int target,
                                          const HvpCoeffs<T>& coeffs,
                                          const TangentPack<typename Program::Storage, kVecSize>& pack) {
  T x[kVecSize], v[kVecSize], e[kVecSize], g[kVecSize], sum = T(0);
  unpack(pack.values, x);
  unpack(pack.tangents, v);
  const T scale = program.logit.scale.value;
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) {
    e[i] = exponential_of_class<typename Program::Storage>(x[i], scale, coeffs.max_logit);
    v[i] -= coeffs.max_tangent;
    g[i] = e[i] * scalar_fma(v[i], coeffs.exp_coeff, coeffs.exp_tangent);
    sum += g[i];
  }
  if (sum != sum) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      g[i] = scaled_tangent(e[i], coeffs.exp_tangent) + scaled_tangent(coeffs.exp_coeff, scaled_tangent(e[i], v[i]));
    }
  }
  if constexpr (Program::kSmoothed) {
    NestedDual<T> w[kVecSize];
    program.weights_of(first, w);
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) g[i] -= scaled_tangent(w[i].value, coeffs.weight_tangent);
  }
  if (target >= 0) {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) g[i] = i == target ? coeffs.target : g[i];
  }
  source.template store<kVecSize>(first, NarrowPack<typename Program::Storage, kVecSize>::from(g));
}

// Stores the results of a thread's part of a row, the one that sums_with_tangents visits.
template <int kVectors, class Program, class Source, class View, class Index, class T>
__device__ __forceinline__ void store_hvps(const Program& program, const Source& source, const View& view, Index label,
                                           const HvpCoeffs<T>& coeffs, Index begin, Index end, Index step, Index edge) {
  using Storage = typename Program::Storage;
  constexpr int kVecSize = View::kVecSize;
  if (coeffs.all_zero) {
    // The row may be inactive and its logits may hold anything, so nothing is loaded.
    if (edge >= 0) source.template store<1>(edge, Pack<Storage, 1>{});
#pragma unroll 1
    for (Index vector = begin; vector < end; vector += step) {
      source.template store<kVecSize>(view.first(vector), Pack<Storage, kVecSize>{});
    }
    return;
  }
  if (edge >= 0) {
    store_hvp(program, source, edge, edge == label ? 0 : -1, coeffs, source.template load<1, true>(edge));
  }
#pragma unroll 1
  for (Index vector = begin; vector < end; vector += step * kVectors) {
    TangentPack<Storage, kVecSize> x[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (vector + k * step < end) x[k] = source.template load<kVecSize, true>(view.first(vector + k * step));
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (vector + k * step >= end) continue;
      const Index first = view.first(vector + k * step), target = label - first;
      store_hvp(program, source, first, target >= 0 && target < kVecSize ? static_cast<int>(target) : -1, coeffs, x[k]);
    }
  }
}

// Evaluates a row, sets `value`, whose tangent is the jvp, and returns the coefficients of hvp_c. The tangents of z, of
// the maximum and of the sums are those of unscaled logits. Precondition: `first` is true in exactly one thread of the
// row, which stores the outputs per row.
template <class Program, class Scale, class T>
__device__ __forceinline__ HvpCoeffs<T> hvp_coeffs(const Program& program, const RowTarget<NestedDual<T>>& t,
                                                   NestedDual<T> z, HvpSums<Program> sums, Scale& scale, bool first,
                                                   NestedDual<T>& value) {
  using Number = NestedDual<T>;
  const T of_logit = program.logit.scale.value, max_tangent = sums.softmax.max_logit.tangent;
  // From here on, tangents are those of scaled logits.
  z.tangent = scaled_tangent(of_logit, z.tangent);
  sums.softmax.max_logit.tangent = scaled_tangent(of_logit, max_tangent);
  sums.softmax.exp_sum.tangent = scaled_tangent(of_logit, sums.softmax.exp_sum.tangent);
  if constexpr (Program::kSmoothed) sums.weighted_gap.tangent = scaled_tangent(of_logit, sums.weighted_gap.tangent);
  const RowResult<Number> y = program.finish(t, z, sums, first);
  GradCoeffs<Number> grad_coeffs = y.grad_coeffs;
  scale_grad_coeffs(program, grad_coeffs, grad_factor(scale, t.offset));
  value = y.value;
  return {grad_coeffs.max_logit.value,
          max_tangent,
          scaled_tangent(of_logit, grad_coeffs.exp_coeff.value),
          grad_coeffs.exp_coeff.tangent,
          grad_coeffs.weight_coeff.tangent,
          grad_coeffs.target.tangent,
          grad_coeffs.all_zero()};
}

// Computes a row in two passes, as two_pass_row. Preconditions: those of two_pass_row. source.open(active) and
// source.close() are warp-collective: all lanes of a warp call them together.
template <int kVectors, class Group, class Program, class Source, class View, class Scale>
__device__ __forceinline__ typename Program::Compute hvp_row(const Program& program, const Group& group,
                                                             const RowTarget<typename Program::Compute>& t,
                                                             const Source& source, const View& view, bool exists,
                                                             SyncState& sync, Scale& scale) {
  using Number = typename Program::Compute;
  using T = decltype(Number().value);
  source.open(t.active);
  const T of_logit = program.logit.scale.value;
  Number z(T(0));
  if (t.active) {
    const auto x = source.template load<1, false>(t.label);
    z = {of_logit * widen<T>(x.values.element[0]), widen<T>(x.tangents.element[0])};
  }
  HvpSums<Program> sums{{z, Number(0)}, Number(0), Number(0)};
  using Index = decltype(view.vectors + 0);
  const Index label = t.active ? static_cast<Index>(t.label) : Index(-1), edge = view.edge_class(group.thread_rank());
  const Index rank = group.thread_rank(), threads = group.num_threads();
  Number start = z;
  if constexpr (!Source::kStaged) start = first_max(group, of_logit, source, view, t.active, z);
  if (t.active) {
    const Index vectors = view.vectors;
    sums = sums_with_tangents<kVectors>(program, source, view, label, z, start, rank, vectors, threads, edge);
  }
  subwarp_combine(sums, group.subwarp_size());
  group_combine(group, sums, sync);
  Number value(T(0));
  const HvpCoeffs<T> coeffs = hvp_coeffs(program, t, z, sums, scale, exists && group.thread_rank() == 0, value);
  if (exists) {
    store_hvps<kVectors>(program, source, view, label, coeffs, rank, Index(view.vectors), threads, edge);
  }
  source.close();
  return value;
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows in memory

// A row in global memory, read in both passes; the second pass finds it in L2 as far as it has stayed there. kShifted:
// logits and results may be aligned differently. Vectors are aligned in the results, and those of logits may then start
// at any element.
template <class Storage, bool kShifted>
struct HvpRowInMemory {
  static constexpr bool kStaged = false;
  PointerWithTangent<Storage> from;
  StridedPointer<Storage> to;
  bool vectors_of_logits, vectors_of_tangents;  // true if their vectors are aligned where those of the results are

  // Sets these flags. `view`: vectors of the results.
  template <class View>
  __device__ __forceinline__ void find_vectors(const View& view) {
    constexpr unsigned long long kBytes = sizeof(Pack<Storage, View::kVecSize>);
    if constexpr (kShifted) {
      vectors_of_logits = reinterpret_cast<unsigned long long>(from.values + view.head) % kBytes == 0;
    }
    vectors_of_tangents =
        from.tangent_step == 1 && reinterpret_cast<unsigned long long>(from.tangents + view.head) % kBytes == 0;
  }
  __device__ __forceinline__ void open(bool) const {
  }
  __device__ __forceinline__ void close() const {
  }
  template <int kVecSize, bool kLast>
  __device__ __forceinline__ TangentPack<Storage, kVecSize> load(int64 first) const {
    TangentPack<Storage, kVecSize> x;
    // Vectors of logits are contiguous. A 64-bit product with their step would cost as many instructions as a class.
    const Storage* const at = from.values + (kVecSize == 1 ? first * from.value_step : first);
    if (!kShifted || kVecSize == 1 || vectors_of_logits) {
      x.values = kLast ? load_stream<kVecSize>(at) : load_pack<kVecSize>(at);
    } else {
      x.values = load_by_words<kVecSize>(at);
    }
    if (kVecSize > 1 && vectors_of_tangents) {
      x.tangents = kLast ? load_stream<kVecSize>(from.tangents + first) : load_pack<kVecSize>(from.tangents + first);
    } else if (kShifted && kVecSize > 1 && from.tangent_step == 1) {
      x.tangents = load_by_words<kVecSize>(from.tangents + first);
    } else {
      const Storage* const tangents = from.tangents + first * from.tangent_step;
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        x.tangents.element[i] = load_pack<1>(tangents + i * from.tangent_step).element[0];
      }
    }
    return x;
  }
  template <int kVecSize>
  __device__ __forceinline__ void store(int64 first, const Pack<Storage, kVecSize>& g) const {
    store_pack<kVecSize>(to.at + (kVecSize == 1 ? first * to.step : first), g);
  }
};

template <int kVecSize, int kVectors, bool kShifted>
struct HvpReader {
  template <class Group, class Program, class Scale>
  struct Visit {
    static constexpr bool kNeedsNextRow = false;
    const Program& program;
    const Group& group;
    Scale& scale;
    __device__ __forceinline__ auto operator()(int64 row, bool exists, int64, SyncState& sync) const {
      using Storage = typename Program::Storage;
      auto t = program.target(exists ? row : 0);
      t.active &= exists;
      t.invalid_label &= exists;
      const auto view = [&] {
        if constexpr (kShifted)
          return program.template view_of_results<kVecSize>(t.offset);
        else
          return program.template view<kVecSize>(t.offset);
      }();
      HvpRowInMemory<Storage, kShifted> source{program.logits(t.offset), program.gradient_pointer(t.offset), false,
                                               false};
      source.find_vectors(view);
      return hvp_row<kVectors>(program, group, t, source, view, exists, sync, scale);
    }
  };

  // Visits every row once, as TwoPassReader::sweep.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    static_assert(kGradient && !Program::kCapped, "second derivatives without a cap");
    for_each_row(group, scale, program.space.rows, chunks, work, Visit<Group, Program, Scale>{program, group, scale});
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Rows in shared memory, one thread per row

// View of all classes of a row as vectors of kVecSize classes, without edge elements.
template <int kVecSize_>
struct ClassesOfThread {
  static constexpr int kVecSize = kVecSize_;
  int vectors;

  __device__ __forceinline__ int first(int vector) const {
    return vector * kVecSize;
  }
  __device__ __forceinline__ int edge_class(int) const {
    return -1;
  }
};

// A row with strided classes. The thread that owns it copies its logits and tangents to shared memory asynchronously.
// No other thread reads them, so no barrier is needed.
template <class Storage>
struct StagedHvpColumn {
  static constexpr bool kStaged = true;
  static constexpr int kVecSize = 1;
  static constexpr int kVectors = 2;
  using P = Pack<Storage, 1>;
  PointerWithTangent<Storage> from;
  StridedPointer<Storage> to;
  int classes;

  template <class Program>
  __device__ __forceinline__ StagedHvpColumn(const Program& program, const int64 (&offset)[kRowStreams], int64)
      : from(program.logits(offset)),
        to(program.gradient_pointer(offset)),
        classes(static_cast<int>(program.space.classes)) {
  }
  __device__ __forceinline__ int vectors() const {
    return classes;
  }
  __device__ __forceinline__ void open(bool active) const {
    if (!active) return;
#pragma unroll 4
    for (int c = 0; c < classes; ++c) {
      cp_async(place(c), reinterpret_cast<const P*>(from.values + c * from.value_step));
      cp_async(place(c + classes), reinterpret_cast<const P*>(from.tangents + c * from.tangent_step));
    }
    cp_async_wait_all();
  }
  __device__ __forceinline__ void close() const {
  }
  template <int kVecSize, bool kLast>
  __device__ __forceinline__ TangentPack<Storage, 1> load(int c) const {
    return {load_words(place(c)), load_words(place(c + classes))};
  }
  template <int kVecSize>
  __device__ __forceinline__ void store(int c, const P& g) const {
    store_pack<1>(to.at + c * to.step, g);
  }

 private:
  __device__ __forceinline__ P* place(int i) const {
    extern __shared__ uint4 staged[];
    return reinterpret_cast<P*>(staged) + threadIdx.x + i * static_cast<int>(blockDim.x);
  }
};

// Contiguous rows of kClasses classes, without gaps in logits, tangents and results. A warp copies tiles of 32 rows to
// shared memory and back, and each lane owns a row, as in packed_rows.cuh. The results overwrite the staged logits.
template <class Storage, int kClasses, int kWordBytes>
struct PackedHvpRows {
  static constexpr bool kStaged = true;
  static constexpr int kVectors = 1;
  using Tile = PackedTile<Storage, kClasses, kWarp, kWordBytes>;
  using Word = typename Tile::Source::Word;
  static constexpr int kVecSize = Tile::Source::kEach;
  Tile values, tangents;
  const Storage *from, *from_tangents;
  Storage* to;
  int rows;

  template <class Program>
  __device__ __forceinline__ PackedHvpRows(const Program& program, const int64 (&)[kRowStreams], int64 row)
      : values{shared_of_warp(2 * Tile::kBytes)}, tangents{values.stage + Tile::kBytes} {
    const int64 first = row - threadIdx.x % kWarp, left = program.space.rows - first;
    from = program.input + first * kClasses;
    from_tangents = program.tangents + first * kClasses;
    to = program.gradients + first * kClasses;
    rows = left < kWarp ? static_cast<int>(left) : kWarp;
  }
  __device__ __forceinline__ int vectors() const {
    return kClasses / kVecSize;
  }
  __device__ __forceinline__ void open(bool) const {
    values.copy_in(from, rows);
    tangents.copy_in(from_tangents, rows);
    cp_async_wait_all();
    __syncwarp();
  }
  __device__ __forceinline__ void close() const {
    __syncwarp();
    values.copy_out(to, rows);
    // The next tile is copied to the same place.
    __syncwarp();
  }
  template <int kCount, bool kLast>
  __device__ __forceinline__ TangentPack<Storage, kCount> load(int c) const {
    using P = Pack<Storage, kCount>;
    return {load_words(reinterpret_cast<const P*>(own(values)) + c / kCount),
            load_words(reinterpret_cast<const P*>(own(tangents)) + c / kCount)};
  }
  template <int kCount>
  __device__ __forceinline__ void store(int c, const Pack<Storage, kCount>& g) const {
    store_words(reinterpret_cast<Pack<Storage, kCount>*>(own(values)) + c / kCount, g);
  }

 private:
  static __device__ __forceinline__ char* own(const Tile& tile) {
    return tile.row(threadIdx.x % kWarp);
  }
};

// Source: StagedHvpColumn or PackedHvpRows.
template <class Source>
struct StagedHvpReader {
  template <class Group, class Program, class Scale>
  struct Visit {
    static constexpr bool kNeedsNextRow = false;
    const Program& program;
    const Group& group;
    Scale& scale;
    __device__ __forceinline__ auto operator()(int64 row, bool exists, int64, SyncState& sync) const {
      auto t = program.target(exists ? row : 0);
      t.active &= exists;
      t.invalid_label &= exists;
      const Source source(program, t.offset, row);
      const ClassesOfThread<Source::kVecSize> view{source.vectors()};
      return hvp_row<Source::kVectors>(program, group, t, source, view, exists, sync, scale);
    }
  };

  // Visits every row once, as TwoPassReader::sweep.
  template <bool kGradient, class Group, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const Group& group, Scale& scale, int64 chunks,
                                               const Workspace& work) {
    static_assert(kGradient && !Program::kCapped, "second derivatives without a cap");
    for_each_row(group, scale, program.space.rows, chunks, work, Visit<Group, Program, Scale>{program, group, scale});
  }
};
