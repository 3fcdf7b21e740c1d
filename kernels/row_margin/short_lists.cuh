// Margin losses of many rows of contiguous scores, with a list of labels each, most of them short. Neighbouring lanes
// of a warp share a row. Formula, value and gradient are those of row_margin.cuh, for a hinge that is z itself.
//
// A warp processes 32 rows together (ShortListReader):
// 1. Each lane reads the list of its row and the scores of the labels, and finds the smallest score that has an active
//    pair with each of them. Everything that the lanes of a row need is stored in shared memory (ListRecord, and a bit
//    for each class).
// 2. kLanes lanes process a row, 32 / kLanes rows at once. A thread loads vectors of scores several rows ahead. It
//    marks the elements that are labels, compares all others with the smallest active scores, adds the hinges, and
//    writes the gradients of its vector. It counts the active pairs of each label in bit fields of a word, which the
//    lanes of a row add.
// 3. Each lane adds the labels' share of its row's value, and writes the gradients of the labels.
// 4. All lanes process the rows that are left, one after another, as list_row does: rows with longer lists, with labels
//    that are no classes, or with a score or a sum that is not finite.
//
// A warp per row pays for the length of the list and the counts of the labels in every row: 142705 rows of 128 classes
// in 16 bits took 0.248 ms on an H200. Here, all lanes read lists at the same time.
//
// With n_i active pairs of class i, a_k of label k, and o the lowest score of a label, the hinges of a row sum to
//
//   sum over i of n_i (x_i - o) + sum over k of a_k (margin - (x_k - o))
//
// which is at least the largest active x_i - o + margin. So in 16 bits, float sums over a vector are off by only some
// 2^-24 of the value.
//
// Rows may begin at any address (ScoresOfRows). Vectors are aligned as the gradients are, and are written as a whole,
// except the first and last one of a row. Elements of these two that belong to other rows are marked as labels are, and
// excluded from all comparisons. The first and last row of all are left for step 4: a vector of theirs might reach
// beyond the scores.
//
// A warp owns its rows and its part of shared memory; only __syncwarp separates the steps. Traffic: as in
// row_margin.cuh. Order of additions: a lane adds in the order of its rows; then the fixed tree of a chunk follows.
// Preconditions: vectors have 16 bytes; rows have one dimension, at most 256 classes, and at most kLanes vectors,
// incomplete ones included; unless vectors divide every row, rows of scores do not overlap and have at least 16
// classes.
#pragma once
#include "row_margin/row_margin.cuh"

// Maximum number of labels of a short list, and number of labels that a lane reads together: five and the end, in one
// turn.
constexpr int kShortList = 30;
constexpr int kReadTogether = 6;
static_assert(kShortList % kReadTogether == 0 && kShortList % kFields == 0, "whole turns");
// Length of a list whose row is left for step 4.
constexpr int kLeft = -1;

// A row's list, and what its lanes compute about it. A record has 60 words: lanes that each access their own record
// have four-way bank conflicts.
template <class Score>
struct alignas(16) ListRecord {
  Score smallest[kShortList];  // the smallest score that has an active pair with each label
  unsigned char classes[kShortList];
  // Counts of active pairs by label, in bit fields: two words for every kFields labels.
  unsigned counts[kShortList / kFields * 2];
  Score origin;  // the lowest score of a label
  Score high;    // the gradient of an active pair is high + low
  Score low;
  int length;                   // 0: nothing is active; kLeft: the row is left for step 4
  bool left;                    // the row is left for step 4, as found in step 2
  bool repeated;                // a label is listed several times
  unsigned char before, shift;  // ClassPlaces
  double sum;                   // sum of the hinges without the labels' share, if values of rows are stored

  __device__ __forceinline__ bool is_left() const {
    return left || length == kLeft;
  }
};

// Places of a row's classes in its vectors.
template <ScoresOfRows kScores, int kVecSize>
struct ClassPlaces {
  static constexpr bool kWhole = kScores == ScoresOfRows::kWhole;
  static constexpr bool kAlike = kWhole || kScores == ScoresOfRows::kAlike;
  // Maximum number of places that are no classes.
  static constexpr int kOutside = kWhole ? 0 : 2 * (kVecSize - 1);
  int before;  // places before class 0
  int shift;   // elements from the preceding aligned address to the scores of each vector

  // Computes the places of a row. If scores and gradients differ in alignment, vectors are aligned as the gradients
  // are, or without kGradient begin with class 0.
  template <bool kGradient, class Program>
  static __device__ __forceinline__ ClassPlaces of(const Program& program, const int64 (&offset)[kRowStreams]) {
    if constexpr (kWhole) return {0, 0};
    const int scores = behind_vector<kVecSize>(program.logits(offset));
    if constexpr (kAlike) return {scores, 0};
    const int gradients = kGradient ? behind_vector<kVecSize>(program.gradients + offset[kGradients]) : 0;
    return {gradients, (scores - gradients) & (kVecSize - 1)};
  }
  // Returns word `w` of a mask of the places that are no classes.
  __device__ __forceinline__ unsigned outside(int w, int classes) const {
    if constexpr (kWhole) return 0u;
    const int end = before + classes - 32 * w;
    const unsigned past_end = end >= 32 ? 0u : end <= 0 ? 0xffffffffu : 0xffffffffu << end;
    return past_end | (w == 0 ? (1u << before) - 1u : 0u);
  }
};

// Converts a small count to float. n becomes the low mantissa bits of 2^23 + n, without a conversion.
__device__ __forceinline__ float small_to_float(unsigned n) {
  return __uint_as_float(0x4b000000u | n) - 8388608.0f;
}
// Sum over kLanes neighbouring lanes, in each of them. Precondition: all lanes of the warp call it together.
template <int kLanes, class T>
__device__ __forceinline__ T sum_of_neighbours(T x) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x += shuffle_xor(x, offset);
  return x;
}

// Shared memory of a warp, after that of list_by_memory.
template <class Program>
struct ShortLists {
  using Record = ListRecord<typename Program::Gradient>;
  static_assert(sizeof(Record) == 240, "engines/row_margin/layout.py: RECORD_BYTES");
  Record* records;
  unsigned* members;
  int words;  // of a row's members

  // `outside` is the maximum number of places in a row's vectors that are no classes.
  __device__ __forceinline__ ShortLists(const Program& program, int outside)
      : words((static_cast<int>(program.space.classes) + outside + 31) / 32) {
    extern __shared__ uint4 staged[];
    using Sorted = ListMemory<typename Program::Input>;
    const int64 capacity = program.capacity;
    const int64 bytes = (capacity > 0 ? Sorted::sorted_bytes(capacity) : 0) + program.mask_words * 4;
    const int sorted = static_cast<int>((bytes + 7) / 8 * 8);
    const int warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp;
    char* const base = reinterpret_cast<char*>(staged) + (warps * sorted + 15) / 16 * 16;
    records = reinterpret_cast<Record*>(base) + warp * kWarp;
    members = reinterpret_cast<unsigned*>(base + warps * kWarp * sizeof(Record)) + warp * kWarp * words;
  }
};

// Step 1, for the row of a lane if it exists. Returns the number of elements of `smallest` that have been set.
template <bool kGradient, class Places, class Program, class Scale>
__device__ __forceinline__ int read_short_list(const Program& program, const ShortLists<Program>& lists, int64 row,
                                               bool exists, Scale& scale) {
  using Score = typename Program::Gradient;
  const int lane = threadIdx.x % kWarp;
  auto& record = lists.records[lane];
  unsigned* const members = lists.members + lane * lists.words;
  record.length = 0;
  record.left = record.repeated = false;
  if (!exists) return 0;
  int64 offset[kRowStreams];
  program.space.offsets(row, offset);
  const Places at = Places::template of<kGradient>(program, offset);
  if constexpr (!Places::kWhole) {
    record.before = static_cast<unsigned char>(at.before);
    record.shift = static_cast<unsigned char>(at.shift);
  }
  if constexpr (Program::kMasked) {
    if (!program.mask[offset[kRowMask]]) return 0;
  }
  const int classes = static_cast<int>(program.space.classes);
  for (int w = 0; w < lists.words; ++w) members[w] = at.outside(w, classes);
  const double margin = program.loss.margin();
  const int places = static_cast<int>(program.count);
  bool ended = false, taken = is_finite(margin), repeated = false;
  if constexpr (!Places::kWhole) taken = taken && row != 0 && row != program.space.rows - 1;
  Score origin = scalar_infinity(Score());
  int length = 0, first = 0;
#pragma unroll 1
  for (; first < kShortList && !ended && taken; first += kReadTogether) {
    int64 label[kReadTogether];
    typename Program::Input raw[kReadTogether];
#pragma unroll
    for (int k = 0; k < kReadTogether; ++k) label[k] = first + k < places ? program.label(offset, first + k) : -1;
#pragma unroll
    for (int k = 0; k < kReadTogether; ++k) {
      ended |= label[k] == -1;
      taken &= ended || program.is_class(label[k]);
      if (ended || !taken) continue;
      raw[k] = program.raw(offset, label[k]);
      ++length;
    }
#pragma unroll
    for (int k = 0; k < kReadTogether; ++k) {
      if (first + k >= length) {
        record.smallest[first + k] = scalar_infinity(Score());
        continue;
      }
      const Score score = widen<Score>(raw[k]);
      const int c = static_cast<int>(label[k]);
      taken &= is_finite(score);
      origin = score < origin ? score : origin;
      record.smallest[first + k] = smallest_active<Score>(in_double(score), margin);
      record.classes[first + k] = static_cast<unsigned char>(c);
      const int place = at.before + c;
      repeated |= (members[place / 32] >> place % 32 & 1u) != 0u;
      members[place / 32] |= 1u << place % 32;
    }
  }
  if (!taken || (!ended && places > kShortList)) length = kLeft;
  record.length = length;
  record.repeated = repeated;
  record.origin = origin;
  if constexpr (kGradient) {
    const double factor = grad_factor(scale, offset) * program.inverse;
    const Score high = static_cast<Score>(factor);
    record.high = high;
    record.low = is_finite(high) ? static_cast<Score>(factor - in_double(high)) : Score(0);
  }
  return first;
}

// Reader of rows with short lists: kLanes lanes share a row of vectors of kVecSize.
template <int kVecSize, int kLanes, ScoresOfRows kScores>
struct ShortListReader {
  using Places = ClassPlaces<kScores, kVecSize>;
  template <class Program>
  using Ahead = VectorAhead<kScores, typename Program::Input, kVecSize>;
  // Vectors that a thread has in flight, each of another row: as many as spill no register.
  static constexpr int kMost = Places::kWhole ? 4 : kScores == ScoresOfRows::kGathered ? 1 : 2;
  static constexpr int kTogether = kLanes < kMost ? kLanes : kMost;
  static constexpr int kRows = kWarp / kLanes;

  // Counts the active pairs of each element of a vector in `pairs`, and those of each label, over the lanes of the row,
  // in the row's record if `stores`. Compares with `most` labels, the same number in all lanes of the warp.
  // Preconditions: all lanes call it together.
  template <class Program>
  static __device__ __forceinline__ void count_pairs(const typename Program::Gradient (&score)[kVecSize],
                                                     ListRecord<typename Program::Gradient>& record, int most,
                                                     bool stores, unsigned (&pairs)[kVecSize]) {
    using Score = typename Program::Gradient;
    constexpr int kAbove = kFields * kFieldBits;
    constexpr unsigned kWide = 1u << 2 * kFieldBits, kEven = 0x1fu * (1u + kWide + kWide * kWide);
    static_assert(kFields == 5 && kFieldBits == 5, "three even fields, and two odd ones");
#pragma unroll
    for (int e = 0; e < kVecSize; ++e) pairs[e] = 0u;
#pragma unroll 1
    for (int first = 0, word = 0; first < most; first += kFields, word += 2) {
      unsigned counted = 0u;
      if (first > 0) {
#pragma unroll
        for (int e = 0; e < kVecSize; ++e) pairs[e] = pairs[e] >> kAbove << kAbove;
      }
#pragma unroll
      for (int field = 0; field < kFields; ++field) {
        if (field > 0 && first + field >= most) break;
        const Score smallest = record.smallest[first + field];
        const unsigned pair = (1u << kAbove) + (1u << field * kFieldBits);
#pragma unroll
        for (int e = 0; e < kVecSize; ++e) add_unless_less(score[e], smallest, pair, pairs[e]);
      }
#pragma unroll
      for (int e = 0; e < kVecSize; ++e) counted += pairs[e];
      const unsigned even = sum_of_neighbours<kLanes>(counted & kEven);
      const unsigned odd = sum_of_neighbours<kLanes>(counted >> kFieldBits & kEven & (kWide * kWide - 1u));
      if (stores) {
        record.counts[word] = even;
        record.counts[word + 1] = odd;
      }
    }
#pragma unroll
    for (int e = 0; e < kVecSize; ++e) pairs[e] >>= kAbove;
  }

  // Returns the number of active pairs of label k.
  template <class Record>
  static __device__ __forceinline__ int pairs_of_label(const Record& record, int k) {
    const int field = k % kFields;
    return static_cast<int>(record.counts[k / kFields * 2 + field % 2] >> field / 2 * 2 * kFieldBits & 1023u);
  }

  // Step 2, for a thread's vector in row `at` of the warp's rows. Returns its share of the sum of hinges; 0 if the row
  // is left.
  template <bool kGradient, class Program>
  static __device__ __forceinline__ double take(const Program& program, const ShortLists<Program>& lists, int64 first,
                                                int count, int at, int most, const Ahead<Program>& ahead,
                                                bool present) {
    using Input = typename Program::Input;
    using Score = typename Program::Gradient;
    const int rank = threadIdx.x % kLanes, lane = threadIdx.x % kWarp, place = rank * kVecSize;
    auto& record = lists.records[at % kWarp];
    const int length = at < count ? record.length : kLeft;
    unsigned skipped = 0u;
    if (present) skipped = lists.members[at * lists.words + place / 32] >> place % 32;
    const Places places = places_of(record);
    const auto x = ahead.get(places.shift);
    Score score[kVecSize];
#pragma unroll
    for (int e = 0; e < kVecSize; ++e) {
      const bool is_skipped = !present || (skipped >> e & 1u) != 0u;
      score[e] = is_skipped ? -scalar_infinity(Score()) : widen_element<Score>(x, e);
    }
    unsigned pairs[kVecSize];
    count_pairs<Program>(score, record, most, rank == 0 && length > 0, pairs);
    const Score origin = record.origin;
    double sum = 0.0;
    float count_of[kVecSize], rounded = 0.0f;
#pragma unroll
    for (int e = 0; e < kVecSize; ++e) {
      count_of[e] = small_to_float(pairs[e]);
      if constexpr (sizeof(Input) == 2) {
        rounded = fmaf(count_of[e], pairs[e] != 0u ? score[e] - origin : Score(0), rounded);
      } else {
        const double above = pairs[e] != 0u ? in_double(score[e]) - in_double(origin) : 0.0;
        sum = fma(small_to_double(static_cast<int>(pairs[e])), above, sum);
      }
    }
    if constexpr (sizeof(Input) == 2) sum = in_double(rounded);
    if constexpr (kGradient) {
      Score g[kVecSize];
#pragma unroll
      for (int e = 0; e < kVecSize; ++e) {
        // For 16 bits, one of the two numbers is enough.
        const Score low_part = sizeof(Input) == 2 ? Score(0) : count_of[e] * record.low;
        g[e] = pairs[e] != 0u ? fmaf(count_of[e], record.high, low_part) : Score(0);
      }
      // Rows that are left are written later; rows that do not count have gradients of 0.
      if (length != kLeft) {
        store<Program>(program, first + at, place - places.before, NarrowPack<Input, kVecSize>::from(g));
      }
    }
    const unsigned infinite = __ballot_sync(0xffffffffu, !is_finite(sum));
    const unsigned of_row = (kLanes < kWarp ? (1u << kLanes % kWarp) - 1u : 0xffffffffu) << lane / kLanes * kLanes;
    const bool left = (infinite & of_row) != 0u;
    double of_lanes = 0.0;
    if (program.values != nullptr) of_lanes = sum_of_neighbours<kLanes>(sum);
    if (rank == 0 && length > 0) {
      record.sum = of_lanes;
      record.left = left;
    }
    return left ? 0.0 : sum;
  }

  // Stores the gradients of a vector whose first class is `c`. It may hold fewer classes than elements, or none.
  template <class Program>
  static __device__ __forceinline__ void store(const Program& program, int64 row, int c,
                                               const Pack<typename Program::Input, kVecSize>& g) {
    // A comparison in 32 bits would spill registers.
    const int64 classes = program.space.classes;
    if (c >= classes) return;
    int64 offset[kRowStreams];
    program.space.offsets(row, offset);
    const auto to = program.template gradients_of<kVecSize>(offset);
    if (Places::kWhole || (c >= 0 && c + kVecSize <= classes)) {
      store_pack<kVecSize>(to + c, g);
    } else {
      const int first = max(-c, 0), end = min(static_cast<int>(classes) - c, kVecSize);
      const unsigned own = (1u << end) - (1u << first);
#pragma unroll
      for (int e = 0; e < kVecSize; ++e) {
        if (own >> e & 1u) to[c + e] = g.element[e];
      }
    }
  }
  template <class Record>
  static __device__ __forceinline__ Places places_of(const Record& record) {
    if constexpr (Places::kWhole) return {0, 0};
    return {record.before, record.shift};
  }

  // Starts the load of a thread's vector in row `at` of the warp's rows. Returns false if there is none, or if the row
  // has no labels or is left for step 4.
  template <class Program>
  static __device__ __forceinline__ bool load(const Program& program, const ShortLists<Program>& lists, int64 first,
                                              int count, int at, Ahead<Program>& ahead) {
    if (at >= count) return false;
    const Places places = places_of(lists.records[at]);
    const int c = threadIdx.x % kLanes * kVecSize - places.before;
    if (c >= program.space.classes || lists.records[at].length <= 0) return false;
    int64 offset[kRowStreams];
    program.space.offsets(first + at, offset);
    ahead.load(program.logits(offset) + c, places.shift, 1);
    return true;
  }

  // Step 3, for the row of a lane. Returns the labels' share of its value.
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ double end(const Program& program, const ShortLists<Program>& lists, int64 row,
                                               bool exists, Scale& scale) {
    using Input = typename Program::Input;
    using Score = typename Program::Gradient;
    constexpr int kOwn = sizeof(Input) == 2 ? 2 : 4;  // as many as spill no register
    const auto& record = lists.records[threadIdx.x % kWarp];
    const int length = record.length;
    if (!exists || record.is_left()) return 0.0;
    const double margin = program.loss.margin(), origin = in_double(record.origin);
    int64 offset[kRowStreams];
    program.space.offsets(row, offset);
    double factor = 0.0, sum = 0.0;
    if constexpr (kGradient) {
      if (length > 0) factor = grad_factor(scale, offset) * program.inverse;
    }
#pragma unroll 1
    for (int begin = 0; begin < length; begin += kOwn) {
      Input own[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (begin + i < length) own[i] = program.raw(offset, record.classes[begin + i]);
      }
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (begin + i >= length) continue;
        const int active = pairs_of_label(record, begin + i), c = record.classes[begin + i];
        sum += small_to_double(active) * (margin - (in_double(widen<Score>(own[i])) - origin));
        if constexpr (kGradient) {
          int times = record.repeated ? 0 : 1;
          for (int l = 0; record.repeated && l < length; ++l) times += record.classes[l] == c ? 1 : 0;
          const auto g = Program::gradient(active * times, -factor);
          program.template gradients_of<kVecSize>(offset)[c] = Narrow<Input>::from(g);
        }
      }
    }
    program.store(offset, length > 0 ? (record.sum + sum) * program.inverse : 0.0);
    return sum * program.inverse;
  }

  // Visits at most 32 rows: `count` rows from `first` on. Returns the lane's share of the sum of their values.
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ double visit(const Program& program, int64 first, int count, Scale& scale) {
    const ShortLists<Program> lists(program, Places::kOutside);
    const int lane = threadIdx.x % kWarp, slot = lane / kLanes;
    const bool exists = lane < count;
    __syncwarp();
    const int set = read_short_list<kGradient, Places>(program, lists, first + lane, exists, scale);
    const int most = -subwarp_reduce(min(-lists.records[lane].length, 0), kWarp, MinOp{});
    // Infinity stands for labels that a shorter list lacks. Only an infinite score has active pairs with it, and such a
    // row is left.
    for (int k = set; k < most; ++k) lists.records[lane].smallest[k] = scalar_infinity(typename Program::Gradient());
    __syncwarp();
    double total = 0.0;
    Ahead<Program> x[kTogether];
    bool present[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) present[j] = load(program, lists, first, count, j * kRows + slot, x[j]);
#pragma unroll 1
    for (int turn = 0; turn * kRows < count; turn += kTogether) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int at = (turn + j) * kRows + slot;
        total += take<kGradient>(program, lists, first, count, at, most, x[j], present[j]);
        present[j] = load(program, lists, first, count, at + kTogether * kRows, x[j]);
      }
    }
    // After the gradients that other lanes have written in the places of labels.
    __syncwarp();
    return total * program.inverse + end<kGradient>(program, lists, first + lane, exists, scale);
  }

  // Step 4. Returns the sum of the values of these rows in lane 0, and 0 in all others.
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ double take_left(const Program& program, int64 first, int count, Scale& scale) {
    const ShortLists<Program> lists(program, Places::kOutside);
    const int lane = threadIdx.x % kWarp;
    unsigned left = __ballot_sync(0xffffffffu, lane < count && lists.records[lane].is_left());
    const SubwarpGroup warp{kWarp};
    SyncState sync{0, 0};
    double total = 0.0;
#pragma unroll 1
    for (; left != 0u; left &= left - 1u) {
      const int64 row = first + __ffs(static_cast<int>(left)) - 1;
      total += row_by_memory<kGradient, kAgain<kVecSize, kScores>>(program, warp, row, sync, scale);
    }
    return lane == 0 ? total : 0.0;
  }

  // Visits every row once. The members of `work` may be null. The group is a lane.
  template <bool kGradient, class Program, class Scale>
  static __device__ __forceinline__ void sweep(const Program& program, const SubwarpGroup& group, Scale& scale,
                                               int64 chunks, const Workspace& work) {
    for_each_chunk(group, scale, chunks, work, [&](int chunk) {
      double total = 0.0;
      const int64 rows = program.space.rows, of_chunk = (rows + chunks - 1) / chunks;
      const int64 begin = chunk * of_chunk;
      int left = static_cast<int>(begin < rows ? (rows - begin < of_chunk ? rows - begin : of_chunk) : 0);
#pragma unroll 1
      for (int64 first = begin; left > 0; first += kWarp, left -= kWarp) {
        total += visit<kGradient>(program, first, min(left, kWarp), scale);
        total += take_left<kGradient>(program, first, min(left, kWarp), scale);
      }
      return total;
    });
  }
};
