// Losses of rows that are a function of statistics, which are sums over the features of a row:
//
//   s_k[r] = sum over i of e_k(x[r, i])              x: vectors, operands of shape (rows, features)
//            or a norm of e_k over i, of degree p; e_k may depend on the first elements x[r, 0] too
//   y[r]   = f(s[r], t[r])                           t: labels, operands of shape (rows)
//   g[r, i] = factor[r] * sum over k of a_k[r] * d e_k / d x [r, i]    with a_k = d f / d s_k
//
// 1. A group of threads processes a row: neighbouring lanes of a warp for short rows (LanesOfRow), otherwise a block or
//    a cluster of blocks (BlocksOfRow). The threads read vectors of kVecSize features in turn, and each accumulates the
//    terms of every statistic in double. The group combines these partial results.
// 2. The lanes of a group, or the first warp of each block, evaluate f on dual numbers in double, which yields the
//    value and the coefficients a_k. For a norm n of degree p the derivative at feature i is sign(e) (|e| / n)^(p - 1);
//    the coefficient includes the factor that all features share. A norm of 0 or infinity has no direction: its
//    derivative is 0.
// 3. The threads traverse the same features again and write the gradients. With kStaged they write them to shared
//    memory, from which each warp stores those of all its rows. If shared memory has room (kHeld), a thread keeps
//    its vectors of the row there, in its own part: in registers they would be held as doubles beside those of step
//    2, and half as many rows would fit. Elements of 16 bits are kept as the upper words of doubles, so that they
//    are converted once (upper_t). With kCopied a thread copies all its vectors there at once with cp.async;
//    otherwise kAhead vectors of each operand are in flight. The second read of a longer row mostly hits a cache.
//    The blocks of a row prefetch their next row into L2 before step 2, so that memory is busy meanwhile.
// 4. Each chunk of rows yields one partial sum of values, and the block that arrives last adds the partial sums.
//
// If gradients are written with the value, a row that does not fit into a cluster is kept by as many blocks as it
// needs (speculate_apart). They keep only its first vectors if more rows are then in flight. If rows are too few for a
// GPU, blocks also share rows that do not fit even then, and they share rows in the other kernels too: each block
// sums its part of a row and stores its statistics in memory.
//
// Traffic: each element is read once (twice if not kHeld), and each gradient is written once. The assignment of
// features to threads follows from dtypes and sizes alone, so strides and grids change no bit. A coefficient of 0 skips
// its derivative, even if that is infinite: what does not contribute to the value has gradient 0.
//
// The gradient of a broadcast operand is a sum over rows or features: `write_coefficients` stores a_k, and sum_over.cuh
// sums (sum over k of a_k * d e_k / d x), with the coefficients as additional operands. Preconditions: stated at each
// function.
#pragma once
#include "pointwise/sum_over.cuh"
#include "primitives/primitives.cuh"
#include "softmax/row_ptx.cuh"

// Upper word of a 16-bit element in double, whose lower word is 0. Conversions run on a slow unit, which rows of such
// elements keep busy most of the time. Kept elements are therefore stored converted.
struct upper_t {
  int word;
};
// Type of an element of `Storage` while it is kept in shared memory.
template <class Storage>
struct KeptAs {
  using type = Storage;
};
template <>
struct KeptAs<half_t> {
  using type = upper_t;
};
template <>
struct KeptAs<bfloat16_t> {
  using type = upper_t;
};

// Converts an element to double exactly, including subnormal ones.
template <class Storage>
__device__ __forceinline__ double exactly(Storage x) {
  return widen<double>(x);
}
__device__ __forceinline__ double exactly(float x) {
  return float_to_double(x);
}
__device__ __forceinline__ double exactly(half_t x) {
  return float_to_double(to_float(x));
}
__device__ __forceinline__ double exactly(bfloat16_t x) {
  return float_to_double(to_float(x));
}
__device__ __forceinline__ double exactly(upper_t x) {
  return __hiloint2double(x.word, 0);
}

// Returns element i of a pack in double. Each bfloat16 is extracted from its register by one instruction.
template <class Storage, int kVecSize>
__device__ __forceinline__ double exactly_at(const Pack<Storage, kVecSize>& pack, int i) {
  return exactly(pack.element[i]);
}
template <int kVecSize>
__device__ __forceinline__ double exactly_at(const Pack<bfloat16_t, kVecSize>& pack, int i) {
  if constexpr (kVecSize % 2 != 0) {
    return exactly(pack.element[i]);
  } else {
    const unsigned pair = reinterpret_cast<const unsigned*>(&pack)[i / 2];
    return float_to_double(__uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16));
  }
}

// Converts a pack to the type that it is kept as.
template <class Storage, int kVecSize>
__device__ __forceinline__ Pack<typename KeptAs<Storage>::type, kVecSize> to_keep(const Pack<Storage, kVecSize>& pack) {
  if constexpr (sizeof(Storage) == 2) {
    Pack<upper_t, kVecSize> upper;
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) upper.element[i].word = __double2hiint(exactly_at(pack, i));
    return upper;
  } else {
    return pack;
  }
}

// A term that is a product x y. For elements of at most 32 bits it is exact in double, and `fma` adds it in one
// instruction.
template <class X, class Y>
struct Product {
  X x;
  Y y;
};
template <class X, class Y>
__device__ __forceinline__ Product<X, Y> product_of(const X& x, const Y& y) {
  return {x, y};
}
template <class X, class Y>
__device__ __forceinline__ auto as_dual(const Product<X, Y>& e) {
  return e.x * e.y;
}
template <class T, unsigned kMask>
__device__ __forceinline__ const Dual<T, kMask>& as_dual(const Dual<T, kMask>& e) {
  return e;
}

// Form of a statistic of terms e. kNorms and the degree of the loss select it at compile time:
//
//   kSum                       the sum
//   kAbsolute to kMostDegree   norm of a small integral degree, which is the number of the form
//   kPowers                    norm of another small degree
//   kMaximum                   norm of infinite degree
//   kScaledPowers              norm of any other degree
//   kShiftedPowers             norm of any other degree up to 256
//   kNarrowPowers              norm of any other degree up to 64, for elements of at most 32 bits
constexpr int kSum = 0, kAbsolute = 1, kEuclidean = 2, kMostDegree = 6, kPowers = 7, kMaximum = 8, kScaledPowers = 9;
constexpr int kShiftedPowers = 10, kNarrowPowers = 11;

// Returns x^kDegree.
template <int kDegree, class T>
__device__ __forceinline__ auto integral_power(const T& x) {
  if constexpr (kDegree == 1) {
    return x;
  } else if constexpr (kDegree % 2 == 0) {
    const auto root = integral_power<kDegree / 2>(x);
    return root * root;
  } else {
    return x * integral_power<kDegree - 1>(x);
  }
}

// Returns x^(1 / kDegree).
template <int kDegree>
__device__ __forceinline__ double scalar_root(double x) {
  if constexpr (kDegree == 1) {
    return x;
  } else if constexpr (kDegree % 2 == 0) {
    return sqrt(scalar_root<kDegree / 2>(x));
  } else if constexpr (kDegree == 3) {
    return cbrt(x);
  } else {
    return pow(x, 1.0 / kDegree);
  }
}

// Calls `narrow_power` out of line: inlined in a kernel of bfloat16, it took 13000 instructions instead of 8240.
__device__ __noinline__ double power_of_ratio(double x, double exponent) {
  return narrow_power<true>(x, exponent);
}

// Returns x^exponent. The exponent is uniform over the grid; an integral one up to 64 takes products instead of pow.
// Precondition: x >= 0.
template <int kForm>
__device__ __forceinline__ double uniform_power(double x, double exponent) {
  const int degree = static_cast<int>(exponent);
  if (degree != exponent || degree > 64) {
    return kForm == kNarrowPowers ? power_of_ratio(x, exponent) : pow(x, exponent);
  }
  double power = 1.0;
#pragma unroll 1
  for (int left = degree; left > 0; left /= 2) {
    if (left % 2 != 0) power *= x;
    x *= x;
  }
  return power;
}

// Returns the number of binary digits between neighbouring scales. The power of a component that exceeds a scale by
// that many digits does not overflow, and the power of one that is below it by half as many does not underflow to 0.
__device__ __forceinline__ int scale_step(double exponent) {
  return static_cast<int>(900.0 / (exponent < 3.0 ? 3.0 : exponent));
}
__device__ __forceinline__ double power_of_two(int exponent) {
  return __hiloint2double((exponent + 1023) << 20, 0);
}
// Returns the scale nearest to `size`. The parts of a row mostly have the same scale. Infinity and NaN have the
// largest.
__device__ __forceinline__ double scale_next_to(double size, int step) {
  const int digits = (__double2hiint(size) >> 20) - 1023;
  const int next = (digits + 2048 * step + step / 2) / step * step - 2048 * step;
  return power_of_two(next < -1022 ? -1022 : next > 1022 ? 1022 : next);
}
// Returns the exact inverse of a power of two, and 2^1023 for 0.
__device__ __forceinline__ double inverse_scale(double x) {
  return __hiloint2double(0x7fe00000 - __double2hiint(x), 0);
}

// The larger of two scales, and the ratio of the smaller scale to it. The lanes of a warp differ in which scale is
// larger; with the ratio, one power serves both cases.
template <int kForm>
struct CommonScale {
  bool of_other;
  double scale, ratio;

  __device__ __forceinline__ CommonScale(double own, double other) {
    // NaN counts as larger than all numbers, and stays.
    of_other = other > own || other != other;
    scale = of_other ? other : own;
    const double smaller = of_other ? own : other;
    if constexpr (kForm > kScaledPowers) {
      ratio = smaller * inverse_scale(scale);
    } else {
      // Equal scales have ratio 1, even if both are infinite.
      ratio = smaller == scale ? 1.0 : smaller / scale;
    }
  }
};

// Partial result of a statistic over some features of a row. A sum is one number. A norm of small degree is one number
// too, the sum of |e|^p, in which no power of a float32 overflows or underflows to 0. kMaximum has the largest |e| and
// the number of terms that share it. Other norms have a scale and the sum of (|e| / scale)^p, so that no power
// overflows. The scale of kScaledPowers is the largest |e|. The scale of kShiftedPowers and kNarrowPowers is a power of
// two, so that no division is needed, and it seldom changes: powers relative to two scales needed a second power for
// most components. Only subnormal float64 may underflow to 0 there.
template <int kForm>
struct Statistic {
  static constexpr int kNumbers = kForm < kMaximum ? 1 : 2;
  double number[kNumbers];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) number[i] = 0.0;
  }
  template <class X, class Y>
  __device__ __forceinline__ void add(const Product<X, Y>& e, double) {
    static_assert(kForm == kSum, "products are terms of sums");
    number[0] = fma(e.x.value, e.y.value, number[0]);
  }
  __device__ __forceinline__ void add(const Dual<double, 0>& term, double exponent) {
    const double e = term.value;
    if constexpr (kForm == kSum) number[0] += e;
    if constexpr (kForm == kAbsolute) number[0] += fabs(e);
    if constexpr (kForm == kEuclidean) number[0] = fma(e, e, number[0]);
    if constexpr (kForm > kEuclidean && kForm <= kMostDegree) number[0] += integral_power<kForm>(fabs(e));
    if constexpr (kForm == kPowers) number[0] += narrow_power(fabs(e), exponent);
    if constexpr (kForm == kMaximum || kForm == kScaledPowers) merge(Statistic{{fabs(e), 1.0}}, exponent);
    if constexpr (kForm > kScaledPowers) {
      const int step = scale_step(exponent);
      // Also true for NaN.
      if (!(fabs(e) <= number[0] * power_of_two(step))) merge(Statistic{{scale_next_to(fabs(e), step), 0.0}}, exponent);
      number[1] += uniform_power<kForm>(fabs(e) * inverse_scale(number[0]), exponent);
    }
  }
  __device__ __forceinline__ void merge(const Statistic& x, double exponent) {
    if constexpr (kForm < kMaximum) {
      number[0] += x.number[0];
    } else if constexpr (kForm == kMaximum) {
      // NaN counts as larger than all numbers, and stays.
      const bool larger = x.number[0] > number[0] || x.number[0] != x.number[0];
      const double shared = x.number[0] == number[0] ? number[1] + x.number[1] : number[1];
      number[1] = larger ? x.number[1] : shared;
      number[0] = larger ? x.number[0] : number[0];
    } else {
      const CommonScale<kForm> common(number[0], x.number[0]);
      const double smaller = common.of_other ? number[1] : x.number[1];
      number[1] = fma(smaller, power(common.ratio, exponent), common.of_other ? x.number[1] : number[1]);
      number[0] = common.scale;
    }
  }
  __device__ __forceinline__ Statistic of_lane(int offset) const {
    Statistic x;
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) x.number[i] = __shfl_xor_sync(0xffffffffu, number[i], offset);
    return x;
  }
  __device__ __forceinline__ double value(double exponent) const {
    if constexpr (kForm == kPowers) {
      return pow(number[0], 1.0 / exponent);
    } else if constexpr (kForm >= kScaledPowers) {
      return number[0] == 0.0 ? 0.0 : number[0] * pow(number[1], 1.0 / exponent);
    } else if constexpr (kForm > kSum && kForm <= kMostDegree) {
      return scalar_root<kForm>(number[0]);
    } else {
      return number[0];
    }
  }
  // Returns `kept` of own_part(): the scale if it is a power of two, the norm otherwise.
  __device__ __forceinline__ double kept(double value) const {
    return kForm > kScaledPowers ? number[0] : value;
  }
  // Returns `slope` times the factor of the derivative of `value` that all features share.
  __device__ __forceinline__ double shared_part(double slope, double value, double exponent) const {
    const bool nowhere = value == 0.0 || value > scalar_max(double());
    if constexpr (kForm == kSum) {
      return slope;
    } else if constexpr (kForm > kAbsolute && kForm <= kMostDegree) {
      return nowhere ? 0.0 : slope / integral_power<kForm - 1>(value);
    } else if constexpr (kForm == kPowers) {
      return nowhere ? 0.0 : slope / pow(value, exponent - 1.0);
    } else if constexpr (kForm == kMaximum) {
      return nowhere ? 0.0 : slope / number[1];
    } else if constexpr (kForm > kScaledPowers) {
      return nowhere ? 0.0 : slope * (value * inverse_scale(number[0]) / number[1]);
    } else {
      return nowhere ? 0.0 : slope;
    }
  }

 private:
  __device__ __forceinline__ static double power(double ratio, double exponent) {
    return ratio == 0.0 || ratio == 1.0 ? ratio : uniform_power<kForm>(ratio, exponent);
  }
};

// Returns a term with the derivative of its statistic, without the factor that all features share. Its value is not
// used. `kept` is the norm, or its scale if that is a power of two.
template <int kForm, class Term>
__device__ __forceinline__ auto own_part(const Term& term, double kept, double exponent) {
  const auto e = as_dual(term);
  const double x = e.value;
  if constexpr (kForm == kSum) {
    return e;
  } else if constexpr (kForm == kAbsolute) {
    return chain(e, x, scalar_sign(x));
  } else if constexpr (kForm == kEuclidean) {
    return chain(e, x, x);
  } else if constexpr (kForm <= kMostDegree) {
    return chain(e, x, x * integral_power<kForm - 2>(fabs(x)));
  } else if constexpr (kForm == kMaximum) {
    return chain(e, x, fabs(x) == kept ? scalar_sign(x) : 0.0);
  } else {
    double power;
    if constexpr (kForm == kPowers) {
      power = narrow_power(fabs(x), exponent - 1.0);
    } else if constexpr (kForm == kScaledPowers) {
      power = uniform_power<kForm>(fabs(x) / kept, exponent - 1.0);
    } else {
      power = uniform_power<kForm>(fabs(x) * inverse_scale(kept), exponent - 1.0);
    }
    return chain(e, x, x == 0.0 ? 0.0 : scalar_sign(x) * power);
  }
}

// Returns the form of statistic k. kNorms has a bit for each statistic that is a norm.
template <class Summands, int k>
__device__ constexpr int form_of() {
  return (Summands::kNorms >> k) & 1u ? Summands::kForm : kSum;
}

// Partial results of several statistics over some features of a row.
template <class Slots, class... S>
struct EachStatistic;
template <int... k, class... S>
struct EachStatistic<Indices<k...>, S...> {
  Tuple<S...> each;

  __device__ __forceinline__ void clear() {
    (get<k>(each).clear(), ...);
  }
  template <class Terms>
  __device__ __forceinline__ void add(const Terms& terms, double exponent) {
    (get<k>(each).add(get<k>(terms), exponent), ...);
  }
  __device__ __forceinline__ void merge(const EachStatistic& x, double exponent) {
    (get<k>(each).merge(get<k>(x.each), exponent), ...);
  }
  __device__ __forceinline__ void merge_lanes(int offset, double exponent) {
    (get<k>(each).merge(get<k>(each).of_lane(offset), exponent), ...);
  }
};

// Partial results of all statistics over some features of a row. The argument `kept` of own_parts() has the kept
// numbers of the whole row's statistics.
template <class Summands, class Slots>
struct StatisticsOf;
template <class Summands, int... k>
struct StatisticsOf<Summands, Indices<k...>> : EachStatistic<Indices<k...>, Statistic<form_of<Summands, k>()>...> {
  template <int i>
  __device__ __forceinline__ double value(double exponent) const {
    return get<i>(this->each).value(exponent);
  }
  template <int i>
  __device__ __forceinline__ double kept(const double* values) const {
    return get<i>(this->each).kept(values[i]);
  }
  template <int i>
  __device__ __forceinline__ double shared_part(double slope, const double* values, double exponent) const {
    return get<i>(this->each).shared_part(slope, values[i], exponent);
  }
  template <class Terms>
  __device__ __forceinline__ static auto own_parts(const Terms& terms, const double* kept, double exponent) {
    return make_tuple(own_part<form_of<Summands, k>()>(get<k>(terms), kept[k], exponent)...);
  }
};

// Rows and features of every stream: vectors, labels, gradients of both, mask, and result. `step` is the distance
// between neighbouring features, in elements.
template <int kStreams, int kRank>
struct RowsOfFeatures {
  int64 rows;
  int64 features;
  int64 kept;  // vectors that a thread keeps of a row that is not held; whole batches
  int64 step[kStreams];
  Dimensions<kStreams, kRank> outer;
};

// kWidth neighbouring lanes of a warp share a row. The width and the number of threads of a block are compile-time
// constants, so that the compiler advances shared-memory addresses from vector to vector by a constant.
template <int kWidth_, int kThreads>
struct LanesOfRow {
  static constexpr bool kBlockWide = false;
  static constexpr int kWidth = kWidth_;
  static constexpr int kRounds = 1, kBlocks = 1;

  __device__ __forceinline__ static int rank() {
    return 0;
  }
  __device__ __forceinline__ int lane(int) const {
    return threadIdx.x % kWidth;
  }
  __device__ __forceinline__ int lanes() const {
    return kWidth;
  }
  __device__ __forceinline__ int group() const {
    return threadIdx.x / kWidth;
  }
  __device__ __forceinline__ int groups() const {
    return kThreads / kWidth;
  }
  __device__ __forceinline__ void enter() const {
  }
  __device__ __forceinline__ void leave() const {
  }
  template <class Statistics>
  __device__ __forceinline__ void contribute(Statistics&, int, double) const {
  }
  // Combines the statistics of the group's threads and returns `evaluate(statistics)` in all of them. Precondition: all
  // lanes of the warp call it together.
  template <class Evaluate, class Statistics>
  __device__ __forceinline__ auto finish(const Evaluate& evaluate, Statistics& statistics, double exponent) const {
#pragma unroll
    for (int offset = kWidth / 2; offset > 0; offset /= 2) statistics.merge_lanes(offset, exponent);
    return evaluate(statistics);
  }
};

// Stores x at `place` in each of `blocks` blocks of the cluster, and reports its bytes to each block's `barrier`.
// Preconditions: those of store_dsmem_async; all lanes of a warp call it together, with the same x.
template <class T>
__device__ __forceinline__ void store_everywhere(T& place, const T& x, int blocks, BytesBarrier& barrier) {
  using Word = unsigned long long;
  static_assert(sizeof(T) % sizeof(Word) == 0, "statistics travel in words of 8 bytes");
  const int rank = threadIdx.x % 32;
  if (rank >= blocks) return;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / sizeof(Word)); ++i) {
    store_dsmem_async(reinterpret_cast<Word*>(&place) + i, rank, reinterpret_cast<const Word*>(&x)[i], barrier);
  }
}

// Maximum number of blocks of a cluster.
constexpr int kMaxBlocks = 8;

// Returns the statistics of each team of kTeamWarps warps of a block in all of its threads, added in the order of the
// warps. Preconditions: all threads of the block call it together; the threads of a warp have the same statistics.
template <int kWarps, int kTeamWarps, class Statistics>
__device__ __forceinline__ Statistics sum_of_warps(const Statistics& of_warp, double exponent) {
  __shared__ Statistics per_warp[kWarps];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  __syncthreads();  // the statistics of the previous round may still be read
  if (threadIdx.x % 32 == 0) per_warp[warp] = of_warp;
  __syncthreads();
  const Statistics* const of_team = per_warp + warp / kTeamWarps * kTeamWarps;
  Statistics sum = of_team[0];
#pragma unroll 4
  for (int i = 1; i < kTeamWarps; ++i) sum.merge(of_team[i], exponent);
  return sum;
}

// A row is split into kParts parts, and a team of threads processes each part. With kCluster a row has a cluster of
// blocks; a team is a block, which keeps its part on chip. Otherwise one block has the teams of all parts, or processes
// them in kRounds. The order of additions depends only on kParts and the size of a team.
//
// 1. Each warp adds up its statistics and publishes them to all blocks of the row (`contribute`).
// 2. The first warp of each block adds up the statistics of all warps and evaluates the loss for the block (`finish`).
//    Double precision is expensive, and other warps leave their issue slots to the rows of other blocks.
//
// In a cluster the statistics of a row arrive by asynchronous stores, which a barrier in each block counts. A cluster
// barrier would release all writes of its threads, and thus wait for their gradients. Statistics are double-buffered by
// row: a warp publishes those of the next row only once it has its coefficients of this row. So when a block has all
// statistics of the next row, every block has read those of this row.
//
// A row with more parts than a cluster has blocks (kMany) is processed in rounds in a cluster too, and each team adds
// up the statistics of its part before it publishes them.
//
// Preconditions: all threads of all blocks of the row call each function together; kParts divides 32 or is a multiple
// of 32; blocks have kThreads threads. If other blocks write the records of a row (speculate_apart), `kRecords_` is
// their number, otherwise 0.
template <int kParts, int kRounds_, bool kCluster, int kThreads, int kRecords_ = 0>
struct BlocksOfRow {
  static constexpr int kWidth = 32;  // lanes of a warp that share a row
  static constexpr bool kBlockWide = true, kMany = kParts > kMaxBlocks;
  static constexpr int kRounds = kRounds_, kBlocks = kCluster ? (kMany ? kMaxBlocks : kParts) : 1;
  static constexpr int kTeams = kParts / (kBlocks * kRounds), kTeamSize = kThreads / kTeams;
  static constexpr int kTeamWarps = kTeamSize / 32, kShown = kMany ? 1 : kTeamWarps, kWarps = kParts * kShown;
  static constexpr int kRecords = kRecords_ > 0 ? kRecords_ : kBlocks;

  mutable unsigned turn;  // index of the row among the rows of this block

  __device__ __forceinline__ static int rank() {
    return kCluster ? static_cast<int>(cluster_rank()) : 0;
  }
  __device__ __forceinline__ static int part(int round) {
    return (round * kTeams + static_cast<int>(threadIdx.x) / kTeamSize) * kBlocks + rank();
  }
  __device__ __forceinline__ int lane(int round) const {
    return part(round) * kTeamSize + static_cast<int>(threadIdx.x) % kTeamSize;
  }
  __device__ __forceinline__ int lanes() const {
    return kParts * kTeamSize;
  }
  __device__ __forceinline__ int group() const {
    return 0;
  }
  __device__ __forceinline__ int groups() const {
    return 1;
  }
  // Initializes the barriers and arrives at the cluster barrier. Shared memory of another block must not be written
  // before that block has started, so the first row waits for this barrier.
  __device__ __forceinline__ void enter() const {
    if constexpr (kCluster) {
      if (threadIdx.x == 0) {
        start_barrier(barriers()[0]);
        start_barrier(barriers()[1]);
      }
      cluster_arrive_relaxed();
    }
  }
  // Called before the block ends: its shared memory must not be written after that. With its last row a block has
  // received everything that the others write; a block without a row waits for the barrier of enter().
  __device__ __forceinline__ void leave() const {
    if constexpr (kCluster) {
      if (turn == 0) cluster_wait();
    }
  }

  // Combines the statistics that the threads have accumulated in a round, and publishes them to all blocks of the row.
  template <class Statistics>
  __device__ __forceinline__ void contribute(Statistics& statistics, int round, double exponent) const {
    for (int offset = 16; offset > 0; offset /= 2) statistics.merge_lanes(offset, exponent);
    const int warp = static_cast<int>(threadIdx.x) % kTeamSize / 32;
    if constexpr (kCluster) {
      if (turn == 0 && round == 0) cluster_wait();
    }
    if constexpr (kMany) {
      statistics = sum_of_warps<kThreads / 32, kTeamWarps>(statistics, exponent);
      if (warp != 0) return;
    }
    Statistics& place = of_warps<Statistics>(turn)[part(round) * kShown + (kMany ? 0 : warp)];
    if constexpr (kCluster) {
      BytesBarrier& barrier = barriers()[turn % 2];
      if (threadIdx.x == 0 && round == 0) expect_bytes(barrier, kWarps * sizeof(Statistics));
      store_everywhere(place, statistics, kBlocks, barrier);
    } else if (threadIdx.x % 32 == 0) {
      place = statistics;
    }
  }
  // Combines the statistics of the row and returns `evaluate(statistics)` in all threads.
  template <class Evaluate, class Statistics>
  __device__ __forceinline__ auto finish(const Evaluate& evaluate, Statistics& statistics, double exponent) const {
    using Row = decltype(evaluate(statistics));
    __shared__ Row row;
    if constexpr (kCluster) {
      await_bytes(barriers()[turn % 2], turn / 2 % 2);
    } else {
      __syncthreads();
    }
    if (threadIdx.x < 32) {
      constexpr int kLanes = kParts < 32 ? kParts : 32;
      const Statistics* const of_lane = of_warps<Statistics>(turn) + threadIdx.x % kLanes * kShown;
      statistics = of_lane[0];
      constexpr int kCount = kMany ? kParts / kLanes : kShown, kStep = kMany ? kLanes : 1;
#pragma unroll 4
      for (int i = 1; i < kCount; ++i) statistics.merge(of_lane[i * kStep], exponent);
#pragma unroll
      for (int offset = 1; offset < kLanes; offset *= 2) statistics.merge_lanes(offset, exponent);
      const Row result = evaluate(statistics);
      if (threadIdx.x == 0) row = result;
    }
    // This barrier also keeps threads from contributing to the next row too early.
    __syncthreads();
    ++turn;
    return row;
  }

 private:
  // Returns the buffer of row `turn` for the statistics of the warps of all parts, in order.
  template <class Statistics>
  __device__ __forceinline__ static Statistics* of_warps(unsigned turn) {
    __shared__ Statistics result[kCluster ? 2 : 1][kWarps];
    return result[kCluster ? turn % 2 : 0];
  }
  __device__ __forceinline__ static BytesBarrier* barriers() {
    __shared__ BytesBarrier result[2];
    return result;
  }
};

// True unless a gradient is Absent.
template <class T>
struct IsWritten {
  static constexpr bool value = true;
};
template <>
struct IsWritten<Absent> {
  static constexpr bool value = false;
};

// Returns a mask with a bit for each gradient that is written.
template <class... S>
__device__ constexpr unsigned written_mask(const Tuple<S...>*) {
  unsigned mask = 0, bit = 1;
  ((mask |= IsWritten<S>::value ? bit : 0u, bit <<= 1), ...);
  return mask;
}

template <class P>
struct Pointee;
template <class T>
struct Pointee<const T*> {
  using type = T;
};
template <class T>
struct Pointee<T*> {
  using type = T;
};

template <class T>
struct ElementTuple;
template <class... P>
struct ElementTuple<Tuple<P...>> {
  using type = Tuple<typename Pointee<P>::type...>;
};

template <int kVecSize, class T>
struct PackTuple;
template <int kVecSize, class... P>
struct PackTuple<kVecSize, Tuple<P...>> {
  using type = Tuple<Pack<typename Pointee<P>::type, kVecSize>...>;
  using Kept = Tuple<Pack<typename KeptAs<typename Pointee<P>::type>::type, kVecSize>...>;
};

// Converts a gradient to the form in which it waits for the others of its vector, in fewer registers: a float that
// rounds to a 16-bit operand as the double does, the float itself, or the double if operands have 64 bits.
template <class Rounded, class Storage>
__device__ __forceinline__ Rounded round_for(const Storage*, double x) {
  if constexpr (sizeof(Storage) == 2) {
    return as_float(x);
  } else if constexpr (sizeof(Rounded) == 4) {
    return double_to_float(x);
  } else {
    return x;
  }
}

template <class... P>
__device__ constexpr int largest_size(const Tuple<P...>*) {
  int largest = 0;
  ((largest = static_cast<int>(sizeof(P)) > largest ? static_cast<int>(sizeof(P)) : largest), ...);
  return largest;
}

// Value of a row, its coefficients, the kept numbers of their statistics, and the derivatives with respect to labels.
template <int kStatistics, int kLabels>
struct RowResult {
  double value;
  double of_statistic[kStatistics];
  double kept[kStatistics];
  double of_label[kLabels + 1];
};

// A loss with the arrays of a launch. Parameters:
//
//   Summands                   functor on dual numbers: the terms of all statistics from the vectors' elements
//   Value                      functor on dual numbers: the value of a row from statistics and labels
//   Vectors, Labels            tuples of pointers
//   VectorSinks, LabelSinks    tuples with a pointer for each gradient to write, Absent for the others
//   Mask                       pointer to the mask of rows, or Absent
//   kOfStatistics, kLabelMask  Value is differentiated with respect to the statistics, and to these labels
//   kVecSize                   features of a vector; divides the number of features
//   kWide                      a bit for each of Vectors, then VectorSinks, whose vectors are loaded or stored whole,
//                              not element by element
//   kPaired                    a bit for each of Vectors whose vectors are every second element of two whole vectors
//   kHeld, kCopied, kAhead     step 3 above
//   kThreads                   threads of a block
//   kFeatures                  number of features of short rows that single lanes process, in registers; 0 for other
//                              rows, whose number of features is in the layout
//   kStaged                    gradients of the rows of a warp are staged in shared memory and stored together
//
// Streams are numbered in this order: vectors, labels, gradients of vectors, gradients of labels, mask, result.
template <class Summands_, class Value_, class Vectors_, class Labels_, class VectorSinks_, class LabelSinks_,
          class Mask_, class Layout_, bool kOfStatistics, unsigned kLabelMask, int kVecSize_, unsigned kWide_,
          unsigned kPaired_, bool kHeld_, bool kCopied_, int kAhead_, int kThreads_, int kFeatures_, bool kStaged_>
struct RowStatistics {
  static constexpr int kVecSize = kVecSize_, kAhead = kAhead_;
  static constexpr bool kHeld = kHeld_, kStaged = kStaged_;
  static constexpr int kVectors = Vectors_::kSize, kLabels = Labels_::kSize;
  static constexpr int kStatistics = Summands_::kStatistics;
  static constexpr int kVectorSink = kVectors + kLabels, kLabelSink = kVectorSink + kVectors;
  static constexpr int kMaskStream = kLabelSink + kLabels, kResultStream = kMaskStream + 1;
  static constexpr int kStreams = kResultStream + 1;
  static constexpr unsigned kVectorMask = written_mask(static_cast<const VectorSinks_*>(nullptr));
  static constexpr bool kKeepsNorms = Summands_::kNorms != 0u && Summands_::kForm >= kMaximum;
  using VectorSlots = typename MakeIndices<kVectors>::type;
  using LabelSlots = typename MakeIndices<kLabels>::type;
  using StatisticSlots = typename MakeIndices<kStatistics>::type;
  using Packs = typename PackTuple<kVecSize, Vectors_>::type;
  using KeptPacks = typename PackTuple<kVecSize, Vectors_>::Kept;
  // Bytes of the largest vector, and of the largest kept vector.
  static constexpr int kVectorBytes = largest_size(static_cast<const Packs*>(nullptr));
  static constexpr int kKeptBytes = largest_size(static_cast<const KeptPacks*>(nullptr));
  // True if vectors are copied to shared memory as they are. No element has 16 bits then.
  static constexpr bool kCopied = kCopied_ && kHasCpAsync;
  static constexpr unsigned kAllVectors = (1u << kVectors) - 1u;
  static_assert(!kCopied_ || ((kWide_ & kAllVectors) == kAllVectors && kHeld_),
                "only whole vectors that are kept are copied");
  // Number of kept vectors that a thread reads together. More vectors would take registers that rows need.
  static constexpr int kTogether = kVectorBytes < 16 ? 4 : 1;
  static constexpr int kTogetherOfLong = kKeptBytes < 16 ? kTogether : 1;
  static constexpr int kTogetherInBlocks = kCopied || kVecSize > 4 ? kTogether : kHeld_ ? 2 : kTogetherOfLong;
  using Statistics = StatisticsOf<Summands_, StatisticSlots>;
  using Rounded = Choose<kVectorBytes == 8 * kVecSize, double, float>;
  using Row = RowResult<kStatistics, kLabels>;
  static constexpr bool kFirsts = Summands_::kFirsts;
  // True if a lane keeps all vectors of a row in registers.
  static constexpr bool kInRegisters = kFeatures_ > 0;
  struct OwnVectors {
    Packs of[kInRegisters ? kFeatures_ / kVecSize : 1];
  };
  // First elements of a row in all vectors. With kFirsts the functors take them after their own arguments.
  struct Firsts {
    double of[kVectors];
  };

  Summands_ summands;
  Value_ value;
  Vectors_ vectors;
  Labels_ labels;
  VectorSinks_ vector_sinks;
  LabelSinks_ label_sinks;
  Mask_ mask;
  const Layout_& layout;

  // Computes the offsets of a row in all streams. Returns false for groups past the last row, which are assigned row 0
  // but read no features.
  __device__ __forceinline__ bool locate(int64 row, int64 (&at)[kStreams]) const {
    const bool exists = row < layout.rows;
    layout.outer.offsets(exists ? row : 0, at);
    return exists;
  }

  // Returns the first elements of a row. They are 0 without kFirsts and for a row that does not count.
  __device__ __forceinline__ Firsts firsts(const int64 (&at)[kStreams], bool counts) const {
    Firsts first_elements = {};
    if (kFirsts && counts && layout.features > 0) load_firsts(at, first_elements, VectorSlots{});
    return first_elements;
  }
  // Overload for a row in registers.
  __device__ __forceinline__ Firsts firsts(const OwnVectors& own, bool counts) const {
    Firsts first_elements = {};
    if (kFirsts && counts) take_firsts(own.of[0], first_elements, VectorSlots{});
    return first_elements;
  }

  // Labels of a row as loaded. Nothing has used them yet, so the loads may still be in flight.
  using LoadedLabels = typename ElementTuple<Labels_>::type;
  __device__ __forceinline__ void load_labels(const int64 (&at)[kStreams], LoadedLabels& loaded) const {
    load_labels(at, loaded, LabelSlots{});
  }

  // True if a thread keeps vectors of a row in shared memory.
  __device__ __forceinline__ bool keeps() const {
    return kHeld || layout.kept > 0;
  }

  // True if no mask excludes the row.
  __device__ __forceinline__ bool counts(const int64 (&at)[kStreams]) const {
    if constexpr (IsWritten<Mask_>::value) {
      return mask[at[kMaskStream]];
    } else {
      return true;
    }
  }

  // Sets `total` to the statistics of the features that the thread reads of a row. With kKeeps the thread keeps their
  // vectors. `features` is 0 for a row that is not read.
  template <bool kKeeps, class Group>
  __device__ __forceinline__ void add_up(const Group& group, int round, const int64 (&at)[kStreams], int64 features,
                                         const Firsts& firsts, Statistics& total) const {
    total.clear();
    const int64 step = static_cast<int64>(group.lanes()) * kVecSize;
    int64 first = static_cast<int64>(group.lane(round)) * kVecSize;
    if constexpr (kKeeps && kCopied) {
      constexpr int kUnroll = Group::kBlockWide ? kTogetherInBlocks : kTogether;
      int kept = first_kept(group, round), vector = kept;
#pragma unroll 4
      for (int64 i = first; i < features; i += step, ++vector) copy(vector, i, at, VectorSlots{});
      // A thread reads only its own copies, so no barrier is needed.
      cp_async_wait_all();
#pragma unroll kUnroll
      for (; first < features; first += step, ++kept) {
        KeptPacks packs;
        take(kept, packs, VectorSlots{});
#pragma unroll
        for (int i = 0; i < kVecSize; ++i) {
          total.add(terms<0u>(packs, i, firsts, VectorSlots{}), summands.exponent());
        }
      }
    } else if constexpr (kKeeps) {
      const int64 end = kHeld_ ? features : first + layout.kept * step;
      add_batches<true, Group::kBlockWide>(first_kept(group, round), first, step, end < features ? end : features, at,
                                           features, firsts, total);
      if (!kHeld_) add_batches<false, Group::kBlockWide>(0, end, step, features, at, features, firsts, total);
    } else {
      add_batches<false, Group::kBlockWide>(0, first, step, features, at, features, firsts, total);
    }
  }
  // Adds the batches of vectors from feature `first` to `end`.
  template <bool kKeeps, bool kLong>
  __device__ __forceinline__ void add_batches(int kept, int64 first, int64 step, int64 end, const int64 (&at)[kStreams],
                                              int64 features, const Firsts& firsts, Statistics& total) const {
    for (; first < end; first += kAhead * step) {
      if (kLong && is_whole(first, step, features)) {
        add_batch<kKeeps, true>(kept, first, step, at, features, firsts, total);
      } else {
        add_batch<kKeeps, false>(kept, first, step, at, features, firsts, total);
      }
      kept += kAhead;
    }
  }
  // True if all vectors of a batch are known to be within the row, so that no condition separates their loads. Only
  // long rows are checked: in short rows the registers of the check left room for fewer rows.
  __device__ __forceinline__ static bool is_whole(int64 first, int64 step, int64 features) {
    return first + (kAhead - 1) * step < features;
  }
  template <bool kKeeps, bool kWhole>
  __device__ __forceinline__ void add_batch(int kept, int64 first, int64 step, const int64 (&at)[kStreams],
                                            int64 features, const Firsts& firsts, Statistics& total) const {
    Packs batch[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) load<false, kWhole>(at, first + j * step, features, batch[j], VectorSlots{});
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (!kWhole && first + j * step >= features) continue;
      if (kKeeps) keep(kept + j, batch[j], VectorSlots{});
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        total.add(terms<0u>(batch[j], i, firsts, VectorSlots{}), summands.exponent());
      }
    }
  }

  // Loads the vectors of a row that a single lane processes.
  __device__ __forceinline__ void load_own(const int64 (&at)[kStreams], OwnVectors& own) const {
#pragma unroll
    for (int v = 0; v < kFeatures_ / kVecSize; ++v) {
      load<false, true>(at, v * kVecSize, kFeatures_, own.of[v], VectorSlots{});
    }
  }
  // Adds their terms to `total`, in the order of add_up().
  __device__ __forceinline__ void add_own(const OwnVectors& own, const Firsts& firsts, Statistics& total) const {
#pragma unroll
    for (int i = 0; i < kFeatures_; ++i) {
      total.add(terms<0u>(own.of[i / kVecSize], i % kVecSize, firsts, VectorSlots{}), summands.exponent());
    }
  }

  // Prefetches the vectors of a row into L2. Precondition: one thread calls it.
  __device__ __forceinline__ void prefetch(int64 index) const {
    int64 at[kStreams];
    if (locate(index, at)) prefetch(at, 0, layout.features);
  }
  __device__ __forceinline__ void prefetch(const int64 (&at)[kStreams], int64 first, int64 features) const {
    prefetch(at, first, features, VectorSlots{});
  }
  // Prefetches `count` features from `first` on, if they begin and end at a multiple of 16 bytes in memory.
  __device__ __forceinline__ void prefetch_aligned(const int64 (&at)[kStreams], int64 first, int count) const {
    prefetch_aligned(at, first, count, VectorSlots{});
  }
  // Prefetches a block's share of the row. Precondition: one thread of each block of the row calls it.
  template <class Group>
  __device__ __forceinline__ void prefetch_share(const Group& group, const int64 (&at)[kStreams]) const {
    const int64 share = layout.features / (kVecSize * Group::kBlocks) * kVecSize, first = group.rank() * share;
    prefetch(at, first, group.rank() == Group::kBlocks - 1 ? layout.features - first : share);
  }

  // Returns the value and coefficients of a row from its statistics. If the value is NaN, the gradients are NaN.
  template <bool kGradients>
  __device__ __forceinline__ Row evaluate(const LoadedLabels& loaded, const Firsts& firsts,
                                          const Statistics& total) const {
    return evaluate<kGradients>(loaded, firsts, total, StatisticSlots{}, LabelSlots{}, VectorSlots{});
  }

  // Writes the gradients of a row's vectors from its coefficients, which include the factor. A row that does not count
  // has coefficients of 0.
  template <class Group>
  __device__ __forceinline__ void write(const Group& group, const int64 (&at)[kStreams], int64 features,
                                        const Firsts& firsts, const Row& row, bool counts) const {
    if (has_no_zero(row)) {
      write<false>(group, at, features, firsts, row, counts);
    } else {
      write<true>(group, at, features, firsts, row, counts);
    }
  }
  // Writes the gradients of a row that a single lane processes.
  __device__ __forceinline__ void write_own(const OwnVectors& own, const int64 (&at)[kStreams], const Firsts& firsts,
                                            const Row& row, bool counts) const {
    if (has_no_zero(row)) {
      write_own<false>(own, at, firsts, row, counts);
    } else {
      write_own<true>(own, at, firsts, row, counts);
    }
  }

  // Stores the gradients that the lanes of a warp have staged for their rows, of which `first_row` is the first one. If
  // each lane stored its own vectors, it would write a part of a sector each time. Preconditions: kStaged; in each
  // gradient rows follow each other without gaps; all lanes of the warp call it together.
  template <class Group>
  __device__ __forceinline__ void store_staged(const Group&, int64 first_row) const {
    constexpr int kRows = 32 / Group::kWidth;
    const int lane = static_cast<int>(threadIdx.x) % 32, count = static_cast<int>(layout.features) / kVecSize;
    const int64 left = layout.rows - first_row;
    const int rows = left < kRows ? static_cast<int>(left) : kRows;
    // Fixed-point inverse: exact for the vectors of a warp.
    constexpr int kBits = 22;
    const unsigned inverse = (1u << kBits) / static_cast<unsigned>(count) + 1u;
    __syncwarp();
#pragma unroll 2
    for (int i = lane; i < rows * count; i += 32) {
      const int row = static_cast<int>(i * inverse >> kBits);
      store_staged<Group::kWidth>(row, i - row * count, first_row * layout.features + i * kVecSize, VectorSlots{});
    }
    // The next rows take the same memory.
    __syncwarp();
  }

  // With kSomeAreZero, derivatives whose coefficient is 0 are skipped.
  template <bool kSomeAreZero, class Group>
  __device__ __forceinline__ void write(const Group& group, const int64 (&at)[kStreams], int64 features,
                                        const Firsts& firsts, const Row& row, bool counts) const {
#pragma unroll 1
    for (int round = 0; round < Group::kRounds; ++round) {
      write<kSomeAreZero>(group, round, at, features, firsts, row, counts);
    }
  }
  template <bool kSomeAreZero, class Group>
  __device__ __forceinline__ void write(const Group& group, int round, const int64 (&at)[kStreams], int64 features,
                                        const Firsts& firsts, const Row& row, bool counts) const {
    const int64 step = static_cast<int64>(group.lanes()) * kVecSize;
    const int64 first = static_cast<int64>(group.lane(round)) * kVecSize;
    if constexpr (kHeld_) {
      write_kept<kSomeAreZero, Group>(first_kept(group, round), first, step, features, at, firsts, row, counts);
    } else {
      // Backwards from the end, because caches have what was read last.
      const int64 batch_step = kAhead * step, begin = first + layout.kept * step;
      int64 last = first < features ? first + (features - 1 - first) / batch_step * batch_step : -1;
#pragma unroll 1
      for (; last >= begin; last -= batch_step) {
        if (is_whole(last, step, features)) {
          write_batch<kSomeAreZero, true>(last, step, at, features, firsts, row, counts);
        } else {
          write_batch<kSomeAreZero, false>(last, step, at, features, firsts, row, counts);
        }
      }
      write_kept<kSomeAreZero, Group>(0, first, step, begin < features ? begin : features, at, firsts, row, counts);
    }
  }
  template <bool kSomeAreZero, bool kWhole>
  __device__ __forceinline__ void write_batch(int64 first, int64 step, const int64 (&at)[kStreams], int64 features,
                                              const Firsts& firsts, const Row& row, bool counts) const {
    Packs batch[kAhead];
    if (counts) {
#pragma unroll
      for (int j = 0; j < kAhead; ++j) load<true, kWhole>(at, first + j * step, features, batch[j], VectorSlots{});
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (!kWhole && first + j * step >= features) continue;
      write_pack<kSomeAreZero, 1>(at, first + j * step, firsts, batch[j], row, counts, VectorSlots{});
    }
  }
  // Writes the gradients of the vectors from feature `first` to `end`, which the thread has kept.
  template <bool kSomeAreZero, class Group>
  __device__ __forceinline__ void write_kept(int kept, int64 first, int64 step, int64 end, const int64 (&at)[kStreams],
                                             const Firsts& firsts, const Row& row, bool counts) const {
    constexpr int kUnroll = Group::kBlockWide ? kTogetherInBlocks : kTogether;
#pragma unroll kUnroll
    for (; first < end; first += step, ++kept) {
      KeptPacks packs;
      if (counts) take(kept, packs, VectorSlots{});
      write_pack<kSomeAreZero, Group::kWidth>(at, first, firsts, packs, row, counts, VectorSlots{});
    }
  }

  // Writes the gradients of labels.
  __device__ __forceinline__ void write_labels(const int64 (&at)[kStreams], const Row& row) const {
    write_labels(at, row, LabelSlots{});
  }

 private:
  // True if no coefficient is 0.
  __device__ __forceinline__ static bool has_no_zero(const Row& row) {
    bool all = true;
#pragma unroll
    for (int k = 0; k < kStatistics; ++k) all = all && row.of_statistic[k] != 0.0;
    return all;
  }

  template <bool kSomeAreZero>
  __device__ __forceinline__ void write_own(const OwnVectors& own, const int64 (&at)[kStreams], const Firsts& firsts,
                                            const Row& row, bool counts) const {
#pragma unroll
    for (int v = 0; v < kFeatures_ / kVecSize; ++v) {
      write_pack<kSomeAreZero, 1>(at, v * kVecSize, firsts, own.of[v], row, counts, VectorSlots{});
    }
  }

  // Loads the vectors at feature `first`. With kAgain they are read for the second time; with kWhole they are within
  // the row.
  template <bool kAgain, bool kWhole, int... kSlot>
  __device__ __forceinline__ void load(const int64 (&at)[kStreams], int64 first, int64 features, Packs& packs,
                                       Indices<kSlot...>) const {
    (load_one<has<kWide_>(kSlot), has<kPaired_>(kSlot), kAgain, kWhole>(
         get<kSlot>(vectors) + at[kSlot], layout.step[kSlot], first, features, get<kSlot>(packs)),
     ...);
  }
  template <bool kAtOnce, bool kEverySecond, bool kAgain, bool kWhole, class Storage>
  __device__ __forceinline__ void load_one(const Storage* row, int64 step, int64 first, int64 features,
                                           Pack<Storage, kVecSize>& pack) const {
    // No vector is partial: kVecSize divides the number of features.
    if (!kWhole && first >= features) return;
    if constexpr (kAtOnce) {
      if constexpr (kAgain) {
        pack = load_stream<kVecSize>(row + first);
      } else {
        // Also for rows that are read only once: evict-first loads take longer.
        pack = load_pack<kVecSize>(row + first);
      }
    } else if constexpr (kEverySecond) {
      load_every_second(row + 2 * first, first + kVecSize < features, pack);
    } else {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        pack.element[i] = row[(first + i) * step];
      }
    }
  }

  // Loads every second element from `from` on, as two whole vectors. The element after the last one of a row need not
  // belong to the operand. So if no further vector of the row follows (`followed`), the second half is read element by
  // element.
  template <class Storage>
  __device__ __forceinline__ static void load_every_second(const Storage* from, bool followed,
                                                           Pack<Storage, kVecSize>& pack) {
    Pack<Storage, kVecSize> pair[2] = {load_pack<kVecSize>(from)};
    if (followed) {
      pair[1] = load_pack<kVecSize>(from + kVecSize);
    } else {
#pragma unroll
      for (int i = 0; i < kVecSize; i += 2) pair[1].element[i] = from[kVecSize + i];
    }
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) pack.element[i] = pair[2 * i / kVecSize].element[2 * i % kVecSize];
  }

  // Returns the index of the first vector that a thread keeps in a round. Each round has whole batches of vectors.
  template <class Group>
  __device__ __forceinline__ int first_kept(const Group& group, int round) const {
    if (Group::kRounds == 1) return 0;
    const int64 batch = static_cast<int64>(group.lanes()) * kVecSize * kAhead;
    return round * static_cast<int>((layout.features + batch - 1) / batch) * kAhead;
  }
  // Returns the address of word i of a kept vector. It is next to the words of neighbouring threads. No other thread
  // reads it.
  static constexpr int kKeptWord = kKeptBytes < 16 ? kKeptBytes : 16, kKeptWords = kKeptBytes / kKeptWord;
  __device__ __forceinline__ char* kept_word(int vector, int slot, int i) const {
    extern __shared__ uint4 staged[];
    const int word = (vector * kVectors + slot) * kKeptWords + i;
    return reinterpret_cast<char*>(staged) + (word * kThreads_ + static_cast<int>(threadIdx.x)) * kKeptWord;
  }
  template <int... kSlot>
  __device__ __forceinline__ void copy(int vector, int64 first, const int64 (&at)[kStreams], Indices<kSlot...>) const {
    (copy_one(vector, kSlot, get<kSlot>(vectors) + at[kSlot] + first), ...);
  }
  template <class Storage>
  __device__ __forceinline__ void copy_one(int vector, int slot, const Storage* from) const {
    using P = Pack<Storage, kVecSize>;
    using Word = typename P::Word;
#pragma unroll
    for (int i = 0; i < P::kWords; ++i) {
      cp_async_bytes<P::kWordBytes>(kept_word(vector, slot, i), reinterpret_cast<const Word*>(from) + i);
    }
  }
  template <int... kSlot>
  __device__ __forceinline__ void keep(int vector, const Packs& packs, Indices<kSlot...>) const {
    (keep_one(vector, kSlot, to_keep(get<kSlot>(packs))), ...);
  }
  template <class P>
  __device__ __forceinline__ void keep_one(int vector, int slot, const P& pack) const {
    using Word = typename P::Word;
#pragma unroll
    for (int i = 0; i < P::kWords; ++i) {
      *reinterpret_cast<Word*>(kept_word(vector, slot, i)) = reinterpret_cast<const Word*>(&pack)[i];
    }
  }
  template <int... kSlot>
  __device__ __forceinline__ void take(int vector, KeptPacks& packs, Indices<kSlot...>) const {
    (take_one(vector, kSlot, get<kSlot>(packs)), ...);
  }
  template <class P>
  __device__ __forceinline__ void take_one(int vector, int slot, P& pack) const {
    using Word = typename P::Word;
#pragma unroll
    for (int i = 0; i < P::kWords; ++i) {
      reinterpret_cast<Word*>(&pack)[i] = *reinterpret_cast<const Word*>(kept_word(vector, slot, i));
    }
  }

  template <int... kSlot>
  __device__ __forceinline__ void prefetch(const int64 (&at)[kStreams], int64 first, int64 features,
                                           Indices<kSlot...>) const {
    (prefetch_one<kSlot>(get<kSlot>(vectors) + at[kSlot] + first, features), ...);
  }
  template <int kSlot, class Storage>
  __device__ __forceinline__ void prefetch_one(const Storage* from, int64 features) const {
    // Rows of shorter vectors need not begin at a multiple of 16 bytes.
    if constexpr (has<kWide_>(kSlot) && sizeof(Storage) * kVecSize == 16) {
      prefetch_l2(from, static_cast<unsigned>(features * static_cast<int64>(sizeof(Storage))));
    }
  }

  template <int... kSlot>
  __device__ __forceinline__ void prefetch_aligned(const int64 (&at)[kStreams], int64 first, int count,
                                                   Indices<kSlot...>) const {
    (prefetch_aligned_one<has<kWide_>(kSlot)>(get<kSlot>(vectors) + at[kSlot] + first, count), ...);
  }
  template <bool kAtOnce, class Storage>
  __device__ __forceinline__ void prefetch_aligned_one(const Storage* from, int count) const {
    const unsigned bytes = count * static_cast<unsigned>(sizeof(Storage));
    if constexpr (kAtOnce) {
      if ((reinterpret_cast<unsigned long long>(from) | bytes) % 16 == 0) prefetch_l2(from, bytes);
    }
  }

  template <int... kLabel>
  __device__ __forceinline__ void load_labels(const int64 (&at)[kStreams], LoadedLabels& loaded,
                                              Indices<kLabel...>) const {
    ((get<kLabel>(loaded) = get<kLabel>(labels)[at[kVectors + kLabel]]), ...);
  }
  template <int... kSlot>
  __device__ __forceinline__ void load_firsts(const int64 (&at)[kStreams], Firsts& first_elements,
                                              Indices<kSlot...>) const {
    ((first_elements.of[kSlot] = exactly(get<kSlot>(vectors)[at[kSlot]])), ...);
  }
  template <int... kSlot>
  __device__ __forceinline__ void take_firsts(const Packs& packs, Firsts& first_elements, Indices<kSlot...>) const {
    ((first_elements.of[kSlot] = exactly_at(get<kSlot>(packs), 0)), ...);
  }

  // Returns the terms of element i of each pack.
  template <unsigned kMask, class Elements, int... kSlot>
  __device__ __forceinline__ auto terms(const Elements& packs, int i, const Firsts& firsts, Indices<kSlot...>) const {
    if constexpr (kFirsts) {
      return summands(variable<kMask, kSlot>(exactly_at(get<kSlot>(packs), i))...,
                      constant<double>(firsts.of[kSlot])...);
    } else {
      return summands(variable<kMask, kSlot>(exactly_at(get<kSlot>(packs), i))...);
    }
  }

  template <int... kSlot, class... Arguments>
  __device__ __forceinline__ auto apply(const Firsts& firsts, Indices<kSlot...>, const Arguments&... arguments) const {
    if constexpr (kFirsts) {
      return value(arguments..., constant<double>(firsts.of[kSlot])...);
    } else {
      return value(arguments...);
    }
  }

  template <bool kGradients, int... kStatistic, int... kLabel, int... kSlot>
  __device__ __forceinline__ Row evaluate(const LoadedLabels& loaded, const Firsts& firsts, const Statistics& total,
                                          Indices<kStatistic...>, Indices<kLabel...>, Indices<kSlot...>) const {
    constexpr unsigned kAll = kOfStatistics ? (1u << kStatistics) - 1u : 0u;
    constexpr unsigned kMask = kGradients ? kAll | kLabelMask << kStatistics : 0u;
    Row row;
    const double values[] = {total.template value<kStatistic>(summands.exponent())...};
    ((row.kept[kStatistic] = total.template kept<kStatistic>(values)), ...);
    const auto y = apply(firsts, Indices<kSlot...>{}, variable<kMask, kStatistic>(values[kStatistic])...,
                         variable<kMask, kStatistics + kLabel>(widen<double>(get<kLabel>(loaded)))...);
    const bool undefined = y.value != y.value;
    row.value = y.value;
    ((row.of_statistic[kStatistic] = undefined ? y.value
                                               : total.template shared_part<kStatistic>(tangent_or_zero(y, kStatistic),
                                                                                        values, summands.exponent())),
     ...);
    ((row.of_label[kLabel] = undefined ? y.value : tangent_or_zero(y, kStatistics + kLabel)), ...);
    return row;
  }

  // Writes the gradients of the vector at feature `first`; with kStaged to shared memory, for one of the rows of a warp
  // that kWidth lanes each share.
  template <bool kSomeAreZero, int kWidth, class Elements, int... kSlot>
  __device__ __forceinline__ void write_pack(const int64 (&at)[kStreams], int64 first, const Firsts& firsts,
                                             const Elements& packs, const Row& row, bool counts,
                                             Indices<kSlot...>) const {
    Rounded gradient[kVectors][kVecSize];
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) {
      if (kSomeAreZero && !counts) {
        ((gradient[kSlot][i] = Rounded(0)), ...);
        continue;
      }
      const auto all = terms<kVectorMask>(packs, i, firsts, Indices<kSlot...>{});
      const auto parts = Statistics::own_parts(all, row.kept, summands.exponent());
      ((gradient[kSlot][i] =
            round_for<Rounded>(get<kSlot>(vectors), add_slopes<kSomeAreZero, kSlot>(parts, row, StatisticSlots{}))),
       ...);
    }
    if constexpr (kStaged) {
      const int row = static_cast<int>(threadIdx.x) % 32 / kWidth, vector = static_cast<int>(first) / kVecSize;
      (stage_one(get<kSlot>(vector_sinks), staged_vector<kWidth>(kSlot, row, vector), gradient[kSlot]), ...);
    } else {
      (store_one<has<kWide_>(kVectors + kSlot)>(get<kSlot>(vector_sinks), at[kVectorSink + kSlot],
                                                layout.step[kVectorSink + kSlot], first, gradient[kSlot]),
       ...);
    }
  }

  // Returns the address of a staged vector of the gradient of operand `slot`, in row `row` of the warp. Staged
  // gradients follow what the threads of the block keep. Rows are an odd number of vectors apart, so that lanes in
  // different rows access different banks of shared memory.
  template <int kWidth>
  __device__ __forceinline__ char* staged_vector(int slot, int row, int vector) const {
    extern __shared__ uint4 staged[];
    constexpr int kRows = 32 / kWidth, kBatch = kWidth * kAhead, kSinks = count_bits(kVectorMask);
    const int count = static_cast<int>(layout.features) / kVecSize, pitch = count | 1;
    const int kept = kInRegisters ? 0 : (count + kBatch - 1) / kBatch * kAhead * kVectors * kKeptBytes * kThreads_;
    const int sink = static_cast<int>(threadIdx.x) / 32 * kSinks + count_bits(kVectorMask & ((1u << slot) - 1u));
    return reinterpret_cast<char*>(staged) + kept + ((sink * kRows + row) * pitch + vector) * kVectorBytes;
  }
  __device__ __forceinline__ void stage_one(Absent, char*, const Rounded (&)[kVecSize]) const {
  }
  template <class Storage>
  __device__ __forceinline__ void stage_one(Storage*, char* place, const Rounded (&gradient)[kVecSize]) const {
    using Word = typename Pack<Storage, kVecSize>::Word;
    static_assert(sizeof(Word) == sizeof(Pack<Storage, kVecSize>), "staged vectors are single words");
    const auto pack = NarrowPack<Storage, kVecSize>::from(gradient);
    *reinterpret_cast<Word*>(place) = reinterpret_cast<const Word&>(pack);
  }
  template <int kWidth, int... kSlot>
  __device__ __forceinline__ void store_staged(int row, int vector, int64 first, Indices<kSlot...>) const {
    (store_staged_one(get<kSlot>(vector_sinks), staged_vector<kWidth>(kSlot, row, vector), first), ...);
  }
  __device__ __forceinline__ void store_staged_one(Absent, const char*, int64) const {
  }
  template <class Storage>
  __device__ __forceinline__ void store_staged_one(Storage* sink, const char* place, int64 first) const {
    using Word = typename Pack<Storage, kVecSize>::Word;
    Pack<Storage, kVecSize> pack;
    reinterpret_cast<Word&>(pack) = *reinterpret_cast<const Word*>(place);
    store_stream<kVecSize>(sink + first, pack);
  }

  template <bool kSomeAreZero, int kSlot, class Parts, int... kStatistic>
  __device__ __forceinline__ double add_slopes(const Parts& parts, const Row& row, Indices<kStatistic...>) const {
    double total = 0.0;
    (add_slope<kSomeAreZero, kSlot>(get<kStatistic>(parts), row.of_statistic[kStatistic], total), ...);
    return total;
  }
  template <bool kSomeAreZero, int kSlot, unsigned kMask>
  __device__ __forceinline__ static void add_slope(const Dual<double, kMask>& part, double coefficient, double& total) {
    if constexpr (has<kMask>(kSlot)) {
      if (kSomeAreZero && coefficient == 0.0) return;
      total = fma(coefficient, part.tangent[kSlot], total);
    }
  }

  template <bool kAtOnce>
  __device__ __forceinline__ void store_one(Absent, int64, int64, int64, const Rounded (&)[kVecSize]) const {
  }
  template <bool kAtOnce, class Storage>
  __device__ __forceinline__ void store_one(Storage* sink, int64 row, int64 step, int64 first,
                                            const Rounded (&gradient)[kVecSize]) const {
    if constexpr (kAtOnce) {
      // A streaming store, so that L2 keeps the elements that are to be read: again, or because they were prefetched.
      store_stream<kVecSize>(sink + row + first, NarrowPack<Storage, kVecSize>::from(gradient));
    } else {
#pragma unroll
      for (int i = 0; i < kVecSize; ++i) {
        sink[row + (first + i) * step] = Narrow<Storage>::from(gradient[i]);
      }
    }
  }

  template <int... kLabel>
  __device__ __forceinline__ void write_labels(const int64 (&at)[kStreams], const Row& row, Indices<kLabel...>) const {
    (write_label(get<kLabel>(label_sinks), at[kLabelSink + kLabel], row.of_label[kLabel]), ...);
  }
  __device__ __forceinline__ void write_label(Absent, int64, double) const {
  }
  template <class Storage>
  __device__ __forceinline__ void write_label(Storage* sink, int64 offset, double slope) const {
    sink[offset] = Narrow<Storage>::from(slope);
  }
};

// Multiplies a derivative by the factor of its row. 0 stays 0, even if the factor is infinite.
__device__ __forceinline__ void scale_slope(double& slope, double factor) {
  slope = slope == 0.0 ? 0.0 : slope * factor;
}

// Functor that returns the value and coefficients of a row, or zeros for a row that does not count. With kGradients the
// coefficients include the factor `scale(at)`.
template <bool kGradients, bool kLabelsLoaded, class Program, class Scale>
struct EvaluateRow {
  const Program& program;
  const Scale& scale;
  const int64 (&at)[Program::kStreams];
  const typename Program::Firsts& firsts;
  const typename Program::LoadedLabels& loaded;
  bool counts;

  __device__ __forceinline__ typename Program::Row operator()(const typename Program::Statistics& total) const {
    typename Program::Row row = {};
    if (!counts) return row;
    typename Program::LoadedLabels labels = loaded;
    if constexpr (!kLabelsLoaded) program.load_labels(at, labels);
    row = program.template evaluate<kGradients>(labels, firsts, total);
    if constexpr (kGradients) {
      const double factor = scale(at);
#pragma unroll
      for (int k = 0; k < Program::kStatistics; ++k) scale_slope(row.of_statistic[k], factor);
#pragma unroll
      for (int k = 0; k < Program::kLabels; ++k) scale_slope(row.of_label[k], factor);
    }
    return row;
  }
};

// Processes a row. `finish(at, row, firsts)` gets its value and coefficients in all threads of its group. With
// kGradients the coefficients include the factor `scale(at)`, and gradients are written. `next` is the group's next
// row, if there is one; `alone` is true if the group processes no other row. Precondition: all threads of the group
// call it together.
template <bool kGradients, class Program, class Group, class Scale, class Finish>
__device__ __forceinline__ void take_row(const Program& program, const Group& group, int64 index, int64 next,
                                         bool alone, const Scale& scale, const Finish& finish) {
  int64 at[Program::kStreams];
  const bool exists = program.locate(index, at);
  const bool counts = exists && program.counts(at);
  typename Program::Statistics total;
  typename Program::OwnVectors own;
  if (Program::kInRegisters && counts) program.load_own(at, own);
  typename Program::Firsts firsts;
  if constexpr (Program::kInRegisters) {
    firsts = program.firsts(own, counts);
  } else {
    firsts = program.firsts(at, counts);
  }
  // The labels are in flight while the features are read. In a block only the first warp needs them, and the other
  // warps need the registers, so a block loads them later.
  constexpr bool kLoadsLabels = !Group::kBlockWide;
  typename Program::LoadedLabels loaded;
  if (kLoadsLabels && counts) program.load_labels(at, loaded);
  constexpr bool kWrites = kGradients && Program::kVectorMask != 0u;
  // The only row of a group has not been prefetched into L2 before. This prefetch has more in flight than threads have
  // registers for.
  constexpr bool kShares = kWrites && Program::kHeld && !Program::kCopied && Group::kBlocks > 1;
  if (kShares && alone && counts && threadIdx.x == 0) program.prefetch_share(group, at);
  if constexpr (Program::kInRegisters) {
    total.clear();
    if (counts) program.add_own(own, firsts, total);
  } else {
#pragma unroll 1
    for (int round = 0; round < Group::kRounds; ++round) {
      program.template add_up<kWrites>(group, round, at, counts ? program.layout.features : 0, firsts, total);
      group.contribute(total, round, program.summands.exponent());
    }
  }
  // Only kept rows prefetch the next one: a row that is not kept is read twice from L2, which has no room for another.
  if (Group::kBlockWide && Program::kHeld && group.lane(0) == 0) program.prefetch(next);
  const EvaluateRow<kGradients, kLoadsLabels, Program, Scale> evaluate{program, scale, at, firsts, loaded, counts};
  const typename Program::Row row = group.finish(evaluate, total, program.summands.exponent());
  if constexpr (kWrites) {
    if (exists) {
      if constexpr (Program::kInRegisters) {
        program.write_own(own, at, firsts, row, counts);
      } else {
        program.write(group, at, program.layout.features, firsts, row, counts);
      }
    }
    if constexpr (Program::kStaged) program.store_staged(group, index - threadIdx.x % 32 / Group::kWidth);
  }
  if (!exists) return;
  if (kGradients && group.lane(0) == 0) program.write_labels(at, row);
  finish(at, row, firsts);
}

// Functors rather than lambdas, which NVRTC 11 treats as host functions.

// A factor that all rows share.
struct SharedFactor {
  double value;

  template <class Offsets>
  __device__ __forceinline__ double operator()(const Offsets&) const {
    return value;
  }
};

// The grad_output of a row times `scale`. It is one number for all rows unless kPerRow.
template <bool kPerRow, class Program, class Result>
struct UpstreamOfRow {
  const Result* grad_output;
  double scale;

  __device__ __forceinline__ double operator()(const int64 (&at)[Program::kStreams]) const {
    return widen<double>(grad_output[kPerRow ? at[Program::kResultStream] : 0]) * scale;
  }
};

struct KeepNothing {
  template <class Offsets, class Row, class Firsts>
  __device__ __forceinline__ void operator()(const Offsets&, const Row&, const Firsts&) const {
  }
};

// Adds the value of a row to the sum of the thread's rows.
struct AddValue {
  bool first;  // true in the first thread of a group
  double& total;

  template <class Offsets, class Row, class Firsts>
  __device__ __forceinline__ void operator()(const Offsets&, const Row& row, const Firsts&) const {
    if (first) total += row.value;
  }
};

template <class Program, class Result>
struct StoreValue {
  bool first;
  double scale;
  Result* values;

  template <class Offsets, class Row, class Firsts>
  __device__ __forceinline__ void operator()(const Offsets& at, const Row& row, const Firsts&) const {
    if (first) values[at[Program::kResultStream]] = Narrow<Result>::from(row.value * scale);
  }
};

// Stores number k of row r at k * rows + r, where rows are numbered as in the result. The numbers are the coefficients,
// the derivatives with respect to labels, with kKeepsNorms the kept numbers of the statistics, which derivatives of
// norms depend on, and with kFirsts the first elements.
template <class Program>
struct StoreCoefficients {
  bool first;
  int64 rows;
  double* coefficients;

  template <class Offsets, class Row, class Firsts>
  __device__ __forceinline__ void operator()(const Offsets& at, const Row& row, const Firsts& firsts) const {
    if (!first) return;
    double* const of_row = coefficients + at[Program::kResultStream];
#pragma unroll
    for (int k = 0; k < Program::kStatistics; ++k) of_row[k * rows] = row.of_statistic[k];
#pragma unroll
    for (int k = 0; k < Program::kLabels; ++k) of_row[(Program::kStatistics + k) * rows] = row.of_label[k];
    if constexpr (Program::kKeepsNorms) {
#pragma unroll
      for (int k = 0; k < Program::kStatistics; ++k) {
        of_row[(Program::kStatistics + Program::kLabels + k) * rows] = row.kept[k];
      }
    }
    if constexpr (Program::kFirsts) {
      constexpr int kBefore = (Program::kKeepsNorms ? 2 : 1) * Program::kStatistics + Program::kLabels;
#pragma unroll
      for (int k = 0; k < Program::kVectors; ++k) of_row[(kBefore + k) * rows] = firsts.of[k];
    }
  }
};

// Assignment of chunks of rows: the blocks of a row start with chunk worker(), and continue with every workers()-th.
template <class Group>
__device__ __forceinline__ int64 worker() {
  return blockIdx.x / Group::kBlocks;
}
template <class Group>
__device__ __forceinline__ int64 workers() {
  return gridDim.x / Group::kBlocks;
}

// Returns the row that a group processes after its row r of a chunk.
template <class Group>
__device__ __forceinline__ int64 next_row(const Group& group, int64 chunk, int64 r, int64 rows_per_chunk) {
  const int64 following = r + group.groups();
  const bool same = following < rows_per_chunk;
  return (same ? chunk : chunk + workers<Group>()) * rows_per_chunk + (same ? following : 0) + group.group();
}

// Records of the speculative scale of core/speculative_grad.cuh. Each warp that evaluates rows leaves a record for each
// of its chunks; in a block that shares a row this is the first warp. A grid that only checks for stale records need
// not be as large as one that processes rows.
template <class Group>
__device__ __forceinline__ int64 records_of_chunk() {
  if constexpr (Group::kBlockWide) return Group::kRecords;
  return blockDim.x / 32;
}
struct NoRecord {
  template <class Group>
  __device__ __forceinline__ void keep(const Group&, int64) const {
  }
};
struct Record {
  double grad_output;
  double* used_grad_output;

  template <class Group>
  __device__ __forceinline__ void keep(const Group& group, int64 chunk) const {
    const bool evaluates = threadIdx.x % (Group::kBlockWide ? blockDim.x : 32) == 0;
    const int place = Group::kBlockWide ? group.rank() : static_cast<int>(threadIdx.x / 32);
    if (!evaluates || used_grad_output == nullptr) return;
    used_grad_output[chunk * records_of_chunk<Group>() + place] = grad_output;
  }
};

// True if a warp has written gradients of this block's chunks with a grad_output other than the true one. The result is
// the same in all blocks that share its rows. Precondition: every thread of the block calls it.
template <class Group>
__device__ __forceinline__ bool chunks_are_stale(int64 chunks, double true_grad_output, const double* used_grad_output,
                                                 double* expected_grad_output) {
  // The number of records is a power of two, so shifts replace divisions.
  const int64 records = records_of_chunk<Group>(), first = worker<Group>(), step = workers<Group>();
  const int64 count = first < chunks ? (chunks - first + step - 1) / step * records : 0;
  const int shift = __ffs(static_cast<int>(records)) - 1;
  bool stale = used_grad_output == nullptr;
  if (!stale) {
    // Most launches end after this loop, so all loads of an iteration are in flight together.
    constexpr int kAhead = 4;
    const long long expected = __double_as_longlong(true_grad_output);
    for (int64 i = threadIdx.x; i < count; i += kAhead * blockDim.x) {
      double recorded[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        const int64 at = i + j * static_cast<int64>(blockDim.x), chunk = first + (at >> shift) * step;
        recorded[j] = at < count ? used_grad_output[(chunk << shift) + (at & (records - 1))] : true_grad_output;
      }
#pragma unroll
      for (int j = 0; j < kAhead; ++j) stale |= __double_as_longlong(recorded[j]) != expected;
    }
  }
  stale = __syncthreads_or(stale) != 0;
  if (stale && expected_grad_output != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
    *expected_grad_output = true_grad_output;
  return stale;
}

// Computes value = sum of all rows / divisor, and with kGradients writes the gradients. In backward there is no value,
// because other launches may use the workspace then. Preconditions: every thread of every block calls it; blockDim.x is
// a power of two and at least 32; `rows_per_chunk`, the number of rows of a chunk, is a multiple of the number that a
// block processes at once.
template <bool kGradients, class Program, class Group, class Result, class Kept>
__device__ __forceinline__ void reduce_rows(const Program& program, const Group& group, int64 chunks,
                                            int64 rows_per_chunk, double* memory, double divisor, Result* value,
                                            double factor, const Kept& record, bool backward = false) {
  const Workspace work = workspace(memory);
  group.enter();
  for (int64 chunk = worker<Group>(); chunk < chunks; chunk += workers<Group>()) {
    double total = 0.0;
    record.keep(group, chunk);
    for (int64 r = 0; r < rows_per_chunk; r += group.groups()) {
      take_row<kGradients>(program, group, chunk * rows_per_chunk + r + group.group(),
                           next_row(group, chunk, r, rows_per_chunk), rows_per_chunk == 1, SharedFactor{factor},
                           AddValue{group.lane(0) == 0, total});
    }
    if (group.rank() != 0 || backward) continue;
    total = block_sum(total);
    if (threadIdx.x == 0) work.partials[chunk] = total;
    // block_sum uses the same shared memory for the next chunk.
    __syncthreads();
  }
  group.leave();
  if (backward || !arrive_last(work.ticket)) return;
  const double total = sum_partials(work.partials, chunks);
  if (threadIdx.x == 0) *value = Narrow<Result>::from(total / divisor);
}

// Processes each row by itself, without a sum over rows. Preconditions: those of take_row.
template <bool kGradients, class Program, class Group, class Scale, class Finish>
__device__ __forceinline__ void map_rows(const Program& program, const Group& group, int64 chunks, int64 rows_per_chunk,
                                         const Scale& scale, const Finish& finish) {
  group.enter();
  for (int64 chunk = worker<Group>(); chunk < chunks; chunk += workers<Group>()) {
    for (int64 r = 0; r < rows_per_chunk; r += group.groups()) {
      take_row<kGradients>(program, group, chunk * rows_per_chunk + r + group.group(),
                           next_row(group, chunk, r, rows_per_chunk), rows_per_chunk == 1, scale, finish);
    }
  }
  group.leave();
}

// Stores the value of each row, times `scale`.
template <class Program, class Group, class Result>
__device__ __forceinline__ void value_of_rows(const Program& program, const Group& group, int64 chunks,
                                              int64 rows_per_chunk, double scale, Result* values) {
  const StoreValue<Program, Result> store{group.lane(0) == 0, scale, values};
  map_rows<false>(program, group, chunks, rows_per_chunk, SharedFactor{1.0}, store);
}

// Computes the value of all rows, and writes their gradients for the expected grad_output. In backward, where
// grad_output is not null, it only writes the gradients for the true grad_output, unless they are in place.
template <class Program, class Group, class Result>
__device__ __forceinline__ void speculate(const Program& program, const Group& group, int64 chunks,
                                          int64 rows_per_chunk, double* memory, double divisor, double scale,
                                          Result* value, const Result* grad_output, double* expected_grad_output,
                                          double* used_grad_output) {
  const bool backward = grad_output != nullptr;
  const double loaded = given_or_expected(grad_output, expected_grad_output);
  if (backward && !chunks_are_stale<Group>(chunks, loaded, used_grad_output, expected_grad_output)) return;
  // Every lane uses lane 0's value: the slot may change between two reads.
  const double used = __shfl_sync(0xffffffffu, loaded, 0);
  reduce_rows<true>(program, group, chunks, rows_per_chunk, memory, divisor, value, used * scale,
                    Record{used, backward ? nullptr : used_grad_output}, backward);
}

// Writes the gradients for the true grad_output, unless they are in place. In forward each part of a row had a block of
// its own (speculate_apart).
template <class Program, class Group, class Result>
__device__ __forceinline__ void verify(const Program& program, const Group& group, int64 chunks, int64 rows_per_chunk,
                                       double scale, const Result* grad_output, const double* used_grad_output,
                                       double* expected_grad_output) {
  const double true_grad_output = widen<double>(*grad_output);
  if (!chunks_are_stale<Group>(chunks, true_grad_output, used_grad_output, expected_grad_output)) return;
  map_rows<true>(program, group, chunks, rows_per_chunk, SharedFactor{true_grad_output * scale}, KeepNothing{});
}

// Writes the gradients of operands that are not broadcast.
template <bool kPerRow, class Program, class Group, class Result>
__device__ __forceinline__ void gradients_of_rows(const Program& program, const Group& group, int64 chunks,
                                                  int64 rows_per_chunk, double scale, const Result* grad_output) {
  const UpstreamOfRow<kPerRow, Program, Result> upstream{grad_output, scale};
  map_rows<true>(program, group, chunks, rows_per_chunk, upstream, KeepNothing{});
}

// Stores the coefficients of each row, and its derivatives with respect to labels.
template <bool kPerRow, class Program, class Group, class Result>
__device__ __forceinline__ void write_coefficients(const Program& program, const Group& group, int64 chunks,
                                                   int64 rows_per_chunk, double scale, const Result* grad_output,
                                                   double* coefficients) {
  const UpstreamOfRow<kPerRow, Program, Result> upstream{grad_output, scale};
  const StoreCoefficients<Program> store{group.lane(0) == 0, program.layout.rows, coefficients};
  map_rows<true>(program, group, chunks, rows_per_chunk, upstream, store);
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows that kParts blocks share. Each block processes a part of a row, and the blocks exchange statistics through
// memory.

// One part of a row, which one block processes.
template <int kParts, int kThreads>
struct PartOfRow {
  static constexpr int kWidth = 32;  // lanes of a warp that share a row
  static constexpr bool kBlockWide = true;
  static constexpr int kRounds = 1;
  int part;

  __device__ __forceinline__ int lane(int) const {
    return part * kThreads + static_cast<int>(threadIdx.x);
  }
  __device__ __forceinline__ int lanes() const {
    return kParts * kThreads;
  }
};

// Memory that the blocks of all rows share, after the records of `used_grad_output`: the statistics of each part, a
// mark for each part that is left to another block, and a counter for each row. The lower half of a counter is the
// number of parts that have arrived, the upper half the number of parts that are left. Marks and counters are 0 between
// launches.
template <class Statistics>
struct PartsInMemory {
  Statistics* statistics;
  unsigned* left;
  unsigned* counters;

  // `numbers` is the number of doubles of a part: `part_numbers` of engines/row_statistics/layout.py.
  __device__ __forceinline__ PartsInMemory(double* records, int64 parts, int numbers) {
    double* const records_end = records + parts;
    statistics = reinterpret_cast<Statistics*>(records_end);
    left = reinterpret_cast<unsigned*>(records_end + parts * numbers);
    counters = left + parts;
  }
};

// Loads statistics that another block has stored, bypassing L1.
template <class Statistics>
__device__ __forceinline__ Statistics load_statistics(const Statistics* from) {
  Statistics x;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Statistics) / sizeof(double)); ++i) {
    reinterpret_cast<double*>(&x)[i] = __ldcg(reinterpret_cast<const double*>(from) + i);
  }
  return x;
}

// Returns the statistics of a part in all threads of its block, added in the order of BlocksOfRow. Precondition: all
// threads of the block call it together.
template <bool kKeeps, int kParts, int kThreads, class Program>
__device__ __forceinline__ typename Program::Statistics sum_of_part(const Program& program,
                                                                    const PartOfRow<kParts, kThreads>& group,
                                                                    const int64 (&at)[Program::kStreams], bool counts,
                                                                    const typename Program::Firsts& firsts) {
  constexpr int kWarps = kThreads / 32;
  const double exponent = program.summands.exponent();
  typename Program::Statistics total;
  program.template add_up<kKeeps>(group, 0, at, counts ? program.layout.features : 0, firsts, total);
  for (int offset = 16; offset > 0; offset /= 2) total.merge_lanes(offset, exponent);
  return sum_of_warps<kWarps, kWarps>(total, exponent);
}

// Returns the value and coefficients of a row from the statistics of its parts, added in the order of BlocksOfRow.
// Preconditions: all lanes of a warp call it together; kParts divides 32 or is a multiple of 32.
template <bool kGradients, int kParts, class Program, class Scale>
__device__ __forceinline__ typename Program::Row row_of_parts(const Program& program,
                                                              const typename Program::Statistics* parts,
                                                              const Scale& scale, const int64 (&at)[Program::kStreams],
                                                              const typename Program::Firsts& firsts, bool counts) {
  const double exponent = program.summands.exponent();
  constexpr int kLanes = kParts < 32 ? kParts : 32;
  const typename Program::Statistics* const of_lane = parts + threadIdx.x % kLanes;
  typename Program::Statistics all = load_statistics(of_lane);
#pragma unroll
  for (int i = 1; i < kParts / kLanes; ++i) all.merge(load_statistics(of_lane + kLanes * i), exponent);
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) all.merge_lanes(offset, exponent);
  const typename Program::LoadedLabels none = {};
  const EvaluateRow<kGradients, false, Program, Scale> evaluate{program, scale, at, firsts, none, counts};
  return evaluate(all);
}

// Stores the statistics of each part in `statistics`. Block b processes part b % kParts of row b / kParts.
// Precondition: the launch has a block of kThreads threads for each part.
template <int kParts, int kThreads, class Program>
__device__ __forceinline__ void sum_parts(const Program& program, typename Program::Statistics* statistics) {
  int64 at[Program::kStreams];
  program.locate(blockIdx.x / kParts, at);
  const bool counts = program.counts(at);
  const typename Program::Firsts firsts = program.firsts(at, counts);
  const PartOfRow<kParts, kThreads> group{static_cast<int>(blockIdx.x % kParts)};
  const typename Program::Statistics total = sum_of_part<false>(program, group, at, counts, firsts);
  if (threadIdx.x == 0) statistics[blockIdx.x] = total;
}

// Computes the value of all rows. The block that arrives last evaluates them, each row by a warp. Preconditions: those
// of sum_parts; `memory` has room for one partial sum per row, followed by the statistics.
template <int kParts, int kThreads, class Program, class Result>
__device__ __forceinline__ void value_of_parts(const Program& program, double* memory, double divisor, Result* value) {
  using Statistics = typename Program::Statistics;
  const Workspace work = workspace(memory);
  const int64 rows = program.layout.rows;
  Statistics* const statistics = reinterpret_cast<Statistics*>(work.partials + rows);
  sum_parts<kParts, kThreads>(program, statistics);
  if (!arrive_last(work.ticket)) return;
  for (int64 row = threadIdx.x / 32; row < rows; row += kThreads / 32) {
    int64 at[Program::kStreams];
    program.locate(row, at);
    const bool counts = program.counts(at);
    const typename Program::Firsts firsts = program.firsts(at, counts);
    const typename Program::Row evaluated =
        row_of_parts<false, kParts>(program, statistics + row * kParts, SharedFactor{1.0}, at, firsts, counts);
    if (threadIdx.x % 32 == 0) work.partials[row] = evaluated.value;
  }
  __syncthreads();
  const double total = sum_partials(work.partials, rows);
  if (threadIdx.x == 0) *value = Narrow<Result>::from(total / divisor);
}

// Stores the value of each row, times `scale`, from the statistics that sum_parts has stored. Precondition: the launch
// has a block of 32 threads for each row.
template <int kParts, class Program, class Result>
__device__ __forceinline__ void values_of_sums(const Program& program, const typename Program::Statistics* statistics,
                                               double scale, Result* values) {
  int64 at[Program::kStreams];
  program.locate(blockIdx.x, at);
  const bool counts = program.counts(at);
  const typename Program::Firsts firsts = program.firsts(at, counts);
  const typename Program::Row row =
      row_of_parts<false, kParts>(program, statistics + blockIdx.x * kParts, SharedFactor{1.0}, at, firsts, counts);
  StoreValue<Program, Result>{threadIdx.x == 0, scale, values}(at, row, firsts);
}

// Writes the gradients from the statistics that sum_parts has stored. Preconditions: those of sum_parts.
template <bool kPerRow, int kParts, int kThreads, class Program, class Result>
__device__ __forceinline__ void gradients_of_sums(const Program& program,
                                                  const typename Program::Statistics* statistics, double scale,
                                                  const Result* grad_output) {
  __shared__ typename Program::Row shared_row;
  int64 at[Program::kStreams];
  const int64 index = blockIdx.x / kParts;
  program.locate(index, at);
  const bool counts = program.counts(at);
  const typename Program::Firsts firsts = program.firsts(at, counts);
  if (threadIdx.x < 32) {
    const UpstreamOfRow<kPerRow, Program, Result> upstream{grad_output, scale};
    const typename Program::Row evaluated =
        row_of_parts<true, kParts>(program, statistics + index * kParts, upstream, at, firsts, counts);
    if (threadIdx.x == 0) shared_row = evaluated;
  }
  __syncthreads();
  const typename Program::Row row = shared_row;
  const PartOfRow<kParts, kThreads> group{static_cast<int>(blockIdx.x % kParts)};
  if constexpr (Program::kVectorMask != 0u) {
    program.write(group, at, program.layout.features, firsts, row, counts);
  }
  if (group.part == 0 && threadIdx.x == 0) program.write_labels(at, row);
}

// Number of times that a block polls for the other parts of its row; a poll takes some 0.4 us. Parts that are not kept
// take longer, so their blocks poll kLongerLooks times as many times.
constexpr int kLooks = 128, kLongerLooks = 16;

// Prefetches into L2 a quarter of the part of `block`, a block that is yet to run, if there is such a block. Memory
// then has work while the parts of a row wait for each other. Prefetching more takes longer than they wait.
// Precondition: all threads of the block call it.
template <int kParts, int kThreads, class Program>
__device__ __forceinline__ void prefetch_part(const Program& program, int64 block) {
  constexpr int kEach = kThreads * Program::kVecSize;
  const int64 row = block / kParts, features = program.layout.features;
  // The first warp polls for the other parts.
  const int vector = static_cast<int>(threadIdx.x) - 32;
  if (vector < 0 || row >= program.layout.rows) return;
  const int64 first = (static_cast<int64>(vector) * kParts + block % kParts) * kEach;
  if (4 * first >= features || first + kEach > features) return;
  int64 at[Program::kStreams];
  program.locate(row, at);
  program.prefetch_aligned(at, first, kEach);
}

// Computes the value of all rows and writes their gradients, as speculate() does in forward. Block b processes part
// number b % kParts of row b / kParts. About `resident` blocks run at once, so that block b + resident is likely to
// follow it.
//
// 1. Each block sums its part, stores the statistics and increments the counter of its row.
// 2. It waits until all parts of the row have arrived, adds them in order, evaluates the row and writes the gradients
//    of its part.
// 3. The blocks of a row need not run at the same time. A block that has waited too long marks its part as left, and
//    ends. The last block of the row reads such parts again and writes their gradients. It alone waits for a mark,
//    which a running block is about to set.
//
// Order of additions: that of BlocksOfRow. Preconditions: kParts divides 32 or is a multiple of 32; the launch has a
// block of kThreads threads for each part.
template <int kParts, int kThreads, class Program, class Result>
__device__ __forceinline__ void speculate_apart(const Program& program, int64 resident, double* memory, double divisor,
                                                double scale, Result* value, const double* expected_grad_output,
                                                double* used_grad_output, int numbers) {
  using Statistics = typename Program::Statistics;
  using Row = typename Program::Row;
  constexpr unsigned kLeft = 1u << 16;
  constexpr int kMostLooks = Program::kHeld ? kLooks : kLongerLooks * kLooks;
  static_assert(kParts < static_cast<int>(kLeft), "half a counter for the parts of a row");
  __shared__ Row shared_row;
  __shared__ unsigned shared_state[2];  // 1 if the row is complete, 2 in its last block; parts left to this block
  __shared__ int shared_part;
  const Workspace work = workspace(memory);
  const int64 rows = program.layout.rows, row_index = blockIdx.x / kParts, first_part = row_index * kParts;
  const PartsInMemory<Statistics> parts(used_grad_output, rows * kParts, numbers);
  unsigned* const counter = parts.counters + row_index;
  // All warps read it, but only the first warp evaluates with it.
  const double loaded = expected_grad_output == nullptr ? 1.0 : __ldcg(expected_grad_output);
  const double grad_output = __shfl_sync(0xffffffffu, loaded, 0);
  int64 at[Program::kStreams];
  program.locate(row_index, at);
  const bool counts = program.counts(at);
  const typename Program::Firsts firsts = program.firsts(at, counts);
  PartOfRow<kParts, kThreads> group{static_cast<int>(blockIdx.x % kParts)};
  bool is_first = true, is_last = false;
  unsigned left = 0;
#pragma unroll 1
  while (true) {
    // A part that another block has left is read only to keep its vectors, not for its statistics.
    Statistics total;
    if (is_first || program.keeps()) total = sum_of_part<true>(program, group, at, counts, firsts);
    if (is_first) {
      prefetch_part<kParts, kThreads>(program, blockIdx.x + resident);
      if (threadIdx.x == 0) {
        parts.statistics[first_part + group.part] = total;
        const unsigned before = add_and_synchronize(counter, 1);
        unsigned arrived = before % kLeft + 1;
        const bool last = arrived == kParts;
        for (int look = 0; look < kMostLooks && arrived < kParts; ++look) {
          let_others_run();
          arrived = load_and_synchronize(counter) % kLeft;
        }
        // If the row is complete after all, its last block arrived before this addition and has not counted this part
        // as left.
        if (arrived < kParts) arrived = add_and_synchronize(counter, kLeft) % kLeft;
        const bool complete = arrived == kParts;
        if (!complete) add_and_synchronize(parts.left + first_part + group.part, 1);
        shared_state[0] = complete ? (last ? 2 : 1) : 0;
        shared_state[1] = last ? before / kLeft : 0;
      }
      __syncthreads();
      if (shared_state[0] == 0) break;
      is_last = shared_state[0] == 2;
      left = shared_state[1];
      if (threadIdx.x < 32) {
        const Row evaluated = row_of_parts<true, kParts>(program, parts.statistics + first_part,
                                                         SharedFactor{grad_output * scale}, at, firsts, counts);
        if (threadIdx.x == 0) shared_row = evaluated;
      }
      __syncthreads();
      is_first = false;
    }
    const Row row = shared_row;
    program.write(group, at, program.layout.features, firsts, row, counts);
    if (threadIdx.x == 0) used_grad_output[first_part + group.part] = grad_output;
    if (left == 0) break;
    // Continue with a part that another block has left.
    --left;
    __syncthreads();
    if (threadIdx.x == 0) {
      unsigned* const marks = parts.left + first_part;
      int part = 0;
      while (load_and_synchronize(marks + part) == 0) {
        part = part + 1 < kParts ? part + 1 : 0;
        if (part == 0) let_others_run();
      }
      marks[part] = 0;
      shared_part = part;
    }
    __syncthreads();
    group.part = shared_part;
  }
  if (is_last && threadIdx.x == 0) {
    program.write_labels(at, shared_row);
    work.partials[row_index] = shared_row.value;
  }
  if (!arrive_last(work.ticket)) return;
  for (int64 r = threadIdx.x; r < rows; r += kThreads) parts.counters[r] = 0;
  const double total = sum_partials(work.partials, rows);
  if (threadIdx.x == 0) *value = Narrow<Result>::from(total / divisor);
}
