// CUDA's built-ins for the host's compiler: keywords, vector types, intrinsics, and counterparts of
// kernels/core/ptx.cuh and kernels/softmax/row_ptx.cuh. build.py includes this file before the unchanged source of a
// kernel, so the CPU runs the text that NVRTC compiles.
//
// It includes no standard header: parsing one takes longer than compiling the kernel.
#pragma once
#include "interface.hpp"

// ---------------------------------------------------------------------------------------------------------------------
// Keywords

#define __device__
#define __global__
#define __host__
#define __constant__ const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
// The launcher passes the cluster size to the runtime, which keeps the blocks of a cluster together.
#define CLUSTER_DIMS(blocks)
// Each block has contents of its own: the runtime swaps those of all __shared__ objects when it switches blocks.
#ifdef PARSE_ONLY  // an editor reads `extern __shared__` as it stands (compile_flags.txt)
#define __shared__
#else
#define __shared__ static
#endif
// build.py writes this for `extern __shared__`, which no macro can tell from plain `__shared__`, and defines the array.
#define __dynamic_shared__ __attribute__((visibility("hidden")))

#define threadIdx (host_thread_index())
#define blockIdx (host_block_index())
#define blockDim (host_block_size())
#define gridDim (host_grid_size())
constexpr int warpSize = 32;

// Place of a call in the kernel's source: default arguments of each function that reports it.
#define HOST_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// ---------------------------------------------------------------------------------------------------------------------
// Vector types

#define HOST_VECTORS(T, name)                                       \
  struct alignas(2 * sizeof(T)) name##2 {                           \
    T x, y;                                                         \
  };                                                                \
  struct name##3 {                                                  \
    T x, y, z;                                                      \
  };                                                                \
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { \
    T x, y, z, w;                                                   \
  };
HOST_VECTORS(unsigned char, uchar)
HOST_VECTORS(signed char, char)
HOST_VECTORS(unsigned short, ushort)
HOST_VECTORS(short, short)
HOST_VECTORS(unsigned, uint)
HOST_VECTORS(int, int)
HOST_VECTORS(unsigned long long, ulonglong)
HOST_VECTORS(long long, longlong)
HOST_VECTORS(float, float)
HOST_VECTORS(double, double)
#undef HOST_VECTORS

// ---------------------------------------------------------------------------------------------------------------------
// Barriers, votes, shuffles

inline void __syncthreads(HOST_SITE) {
  host_barrier(file, line);
}
inline int __syncthreads_or(int predicate, HOST_SITE) {
  return host_barrier_or(predicate, file, line);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, HOST_SITE) {
  host_warp_barrier(mask, file, line);
}
inline unsigned __activemask() {
  return host_active_mask();
}

inline unsigned __ballot_sync(unsigned mask, int predicate, HOST_SITE) {
  return host_vote(mask, predicate, file, line);
}
inline int __any_sync(unsigned mask, int predicate, HOST_SITE) {
  return host_vote(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, HOST_SITE) {
  return host_vote(mask, predicate, file, line) == mask;
}

template <class T>
T host_shuffle_value(unsigned mask, T value, HostShuffle kind, int lane, int width, const char* file, int line) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = host_shuffle(mask, bits, kind, lane, width, file, line);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, HOST_SITE) {
  return host_shuffle_value(mask, value, kHostShuffleIndex, lane, width, file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, HOST_SITE) {
  return host_shuffle_value(mask, value, kHostShuffleUp, static_cast<int>(delta), width, file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, HOST_SITE) {
  return host_shuffle_value(mask, value, kHostShuffleDown, static_cast<int>(delta), width, file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, HOST_SITE) {
  return host_shuffle_value(mask, value, kHostShuffleXor, lanes, width, file, line);
}

// ---------------------------------------------------------------------------------------------------------------------
// Fences and integer atomics

inline void __threadfence() {
  host_fence();
}
inline void __threadfence_system() {
  host_fence();
}

// Always inlined, so that an access is reported at the line of the caller.
#define HOST_ACCESS __attribute__((always_inline)) inline

template <class T, class Update>
__attribute__((no_sanitize("thread"))) T host_updated(T* address, Update update) {
  const T old = *address;
  *address = update(old);
  return old;
}
template <class T, class Update>
HOST_ACCESS T host_update(T* address, HostOrder order, Update update) {
  host_atomic(address, sizeof(T), order);
  return host_updated(address, update);
}

#define HOST_ATOMIC(name, T, result)                                    \
  HOST_ACCESS T name(T* p, T x) {                                       \
    return host_update(p, kHostRelaxed, [=](T old) { return result; }); \
  }
#define HOST_ATOMICS(T)                                                                   \
  inline T host_sum(T x, T y) {                                                           \
    T sum;                                                                                \
    (void)__builtin_add_overflow(x, y, &sum);                                             \
    return sum;                                                                           \
  }                                                                                       \
  HOST_ATOMIC(atomicAdd, T, host_sum(old, x))                                             \
  HOST_ATOMIC(atomicExch, T, (static_cast<void>(old), x))                                 \
  HOST_ATOMIC(atomicMax, T, old < x ? x : old)                                            \
  HOST_ATOMIC(atomicMin, T, x < old ? x : old)                                            \
  HOST_ATOMIC(atomicOr, T, old | x)                                                       \
  HOST_ATOMIC(atomicAnd, T, old& x)                                                       \
  HOST_ATOMIC(atomicXor, T, old ^ x)                                                      \
  HOST_ACCESS T atomicCAS(T* p, T compare, T x) {                                         \
    return host_update(p, kHostRelaxed, [=](T old) { return old == compare ? x : old; }); \
  }
HOST_ATOMICS(int)
HOST_ATOMICS(unsigned)
HOST_ATOMICS(unsigned long long)
#undef HOST_ATOMICS

// atomicInc: wraps to 0 beyond `limit`. atomicDec: wraps to `limit` below 0.
inline unsigned host_incremented(unsigned old, unsigned limit) {
  return old >= limit ? 0 : old + 1;
}
inline unsigned host_decremented(unsigned old, unsigned limit) {
  return old == 0 || old > limit ? limit : old - 1;
}
HOST_ATOMIC(atomicInc, unsigned, host_incremented(old, x))
HOST_ATOMIC(atomicDec, unsigned, host_decremented(old, x))
#undef HOST_ATOMIC

// ---------------------------------------------------------------------------------------------------------------------
// Loads and stores with cache hints, and operations on bits

// A GPU faults on a vector access that is not aligned to its size. x86 does not, so each access checks.
template <class T>
HOST_ACCESS void host_check_alignment(const T* p) {
  if (alignof(T) > 1) host_check_alignment(p, alignof(T));
}

#define HOST_LOAD(name)            \
  template <class T>               \
  HOST_ACCESS T name(const T* p) { \
    host_check_alignment(p);       \
    return *p;                     \
  }
HOST_LOAD(__ldg)
HOST_LOAD(__ldcs)
HOST_LOAD(__ldcg)
HOST_LOAD(__ldca)
#undef HOST_LOAD

#define HOST_STORE(name)             \
  template <class T>                 \
  HOST_ACCESS void name(T* p, T x) { \
    host_check_alignment(p);         \
    *p = x;                          \
  }
HOST_STORE(__stcs)
HOST_STORE(__stcg)
HOST_STORE(__stwb)
#undef HOST_STORE

template <class To, class From>
inline To host_bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "bits of one size");
  To y;
  __builtin_memcpy(&y, &x, sizeof(To));
  return y;
}
inline unsigned __float_as_uint(float x) {
  return host_bits<unsigned>(x);
}
inline int __float_as_int(float x) {
  return host_bits<int>(x);
}
inline float __uint_as_float(unsigned x) {
  return host_bits<float>(x);
}
inline float __int_as_float(int x) {
  return host_bits<float>(x);
}
inline long long __double_as_longlong(double x) {
  return host_bits<long long>(x);
}
inline double __longlong_as_double(long long x) {
  return host_bits<double>(x);
}

inline double __hiloint2double(int high, int low) {
  return host_bits<double>(static_cast<long long>(static_cast<unsigned long long>(static_cast<unsigned>(high)) << 32 |
                                                  static_cast<unsigned>(low)));
}
inline int __double2hiint(double x) {
  return static_cast<int>(host_bits<long long>(x) >> 32);
}

inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

inline int __clz(int x) {
  return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}
inline int __clzll(long long x) {
  return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}

// ---------------------------------------------------------------------------------------------------------------------
// Arithmetic. Float functions flush subnormal operands and results to zero, as with -ftz=true. For operators, the
// runtime sets the mode of the processor.

inline float host_flush(float x) {
  return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x;
}

#define HOST_MATH(name)                                    \
  inline float name##f(float x) {                          \
    return host_flush(__builtin_##name##f(host_flush(x))); \
  }                                                        \
  inline double name(double x) {                           \
    return __builtin_##name(x);                            \
  }
HOST_MATH(fabs)
HOST_MATH(exp)
HOST_MATH(exp2)
HOST_MATH(expm1)
HOST_MATH(log)
HOST_MATH(log2)
HOST_MATH(log1p)
HOST_MATH(sqrt)
HOST_MATH(cbrt)
HOST_MATH(sinh)
HOST_MATH(tanh)
HOST_MATH(floor)
HOST_MATH(ceil)
HOST_MATH(rint)
#undef HOST_MATH

#define HOST_MATH(name)                                                   \
  inline float name##f(float x, float y) {                                \
    return host_flush(__builtin_##name##f(host_flush(x), host_flush(y))); \
  }                                                                       \
  inline double name(double x, double y) {                                \
    return __builtin_##name(x, y);                                        \
  }
HOST_MATH(fmax)
HOST_MATH(fmin)
HOST_MATH(pow)
HOST_MATH(copysign)
HOST_MATH(atan2)
#undef HOST_MATH

inline float fmaf(float x, float y, float z) {
  return host_flush(__builtin_fmaf(host_flush(x), host_flush(y), host_flush(z)));
}
inline double fma(double x, double y, double z) {
  return __builtin_fma(x, y, z);
}
inline float rsqrtf(float x) {
  return 1.0f / sqrtf(x);
}
inline double rsqrt(double x) {
  return 1.0 / sqrt(x);
}
// CUDA guarantees less accuracy for the fast versions than these have.
inline float __expf(float x) {
  return expf(x);
}
inline float __logf(float x) {
  return logf(x);
}
inline float __log2f(float x) {
  return log2f(x);
}
inline float __powf(float x, float y) {
  return exp2f(y * log2f(x));
}
inline float __fdividef(float x, float y) {
  return x / y;
}
inline float __frcp_rn(float x) {
  return 1.0f / x;
}
inline float __fmul_rn(float x, float y) {
  return x * y;
}
inline float __fadd_rn(float x, float y) {
  return x + y;
}

// Rounds towards zero.
inline float __double2float_rz(double x) {
  const float y = static_cast<float>(x);
  const bool larger = __builtin_fabs(static_cast<double>(y)) > __builtin_fabs(x);
  return larger ? __uint_as_float(__float_as_uint(y) - 1u) : y;
}

inline double float_to_double(float x) {
  return static_cast<double>(x);
}
inline float double_to_float(double x) {
  return static_cast<float>(x);
}
inline float double_to_float_rz(double x) {
  return __double2float_rz(x);
}

inline long long wide_product(int a, int b) {
  return static_cast<long long>(a) * b;
}

template <class T>
void add_unless_less(T a, T b, unsigned x, unsigned& total) {
  if (!(a < b)) total += x;
}

#define HOST_ORDER(T)      \
  inline T min(T x, T y) { \
    return y < x ? y : x;  \
  }                        \
  inline T max(T x, T y) { \
    return x < y ? y : x;  \
  }
HOST_ORDER(int)
HOST_ORDER(unsigned)
HOST_ORDER(long long)
HOST_ORDER(unsigned long long)
#undef HOST_ORDER
inline float min(float x, float y) {
  return fminf(x, y);
}
inline float max(float x, float y) {
  return fmaxf(x, y);
}
inline double min(double x, double y) {
  return fmin(x, y);
}
inline double max(double x, double y) {
  return fmax(x, y);
}

// ---------------------------------------------------------------------------------------------------------------------
// The counterpart of kernels/core/ptx.cuh

// Works on the bits, because the processor may flush subnormal numbers.
inline float half_bits_to_float(unsigned short bits) {
  const unsigned sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 0x1fu, fraction = bits & 0x3ffu;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return __uint_as_float(sign | (exponent + 112u) << 23 | fraction << 13);
}

inline unsigned host_float_to_half(float x) {
  const unsigned bits = __float_as_uint(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;          // the NaN of cvt
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more round to infinity
  if (magnitude <= 0x33000000u) return sign;            // 2^-25 and less round to zero
  const unsigned exponent = magnitude >> 23;
  // Below 2^-14 the result is subnormal, and loses one bit per power of two.
  const unsigned shift = exponent < 113 ? 13 + (113 - exponent) : 13;
  const unsigned significand = exponent < 113 ? (magnitude & 0x7fffffu) | 0x800000u : magnitude - (112u << 23);
  const unsigned kept = significand >> shift, rest = significand & ((1u << shift) - 1), half = 1u << (shift - 1);
  return sign | (kept + (rest > half || (rest == half && (kept & 1u))));
}

inline void prefetch_line(const void*) {
}

inline float force_computed(float x) {
  return x;
}
inline unsigned floats_to_half_pair(float low, float high) {
  return host_float_to_half(high) << 16 | host_float_to_half(low);
}

HOST_ACCESS unsigned increment_and_synchronize(unsigned* counter, unsigned limit) {
  return host_update(counter, kHostAcquireRelease, [=](unsigned old) { return host_incremented(old, limit); });
}
HOST_ACCESS unsigned add_and_synchronize(unsigned* counter, unsigned x) {
  return host_update(counter, kHostAcquireRelease, [=](unsigned old) { return old + x; });
}
HOST_ACCESS unsigned load_and_synchronize(const unsigned* counter) {
  return host_update(const_cast<unsigned*>(counter), kHostAcquireRelease, [](unsigned old) { return old; });
}

// ---------------------------------------------------------------------------------------------------------------------
// The counterpart of kernels/softmax/row_ptx.cuh

inline float exp2_ftz(float x) {
  return exp2f(x);
}

inline float reciprocal_ftz(float x) {
  return 1.0f / x;
}

inline float smaller_or_nan(float x, float y) {
  return x < y ? x : (y <= x ? y : x + y);
}
inline float larger_or_nan(float x, float y) {
  return x > y ? x : (y >= x ? y : x + y);
}
inline int warp_sum_int(int x, HOST_SITE) {
  for (int offset = 16; offset > 0; offset /= 2) {
    x += host_shuffle_value(0xffffffffu, x, kHostShuffleXor, offset, 32, file, line);
  }
  return x;
}
inline float opaque(float x) {
  return x;
}
inline double opaque(double x) {
  return x;
}
inline unsigned opaque(unsigned x) {
  return x;
}
template <class T>
inline T* opaque(T* x) {
  return x;
}

inline unsigned select_bytes(unsigned x, unsigned y, unsigned which) {
  const unsigned long long both = static_cast<unsigned long long>(y) << 32 | x;
  unsigned z = 0;
  for (int i = 0; i < 4; ++i) z |= static_cast<unsigned>(both >> 8 * (which >> 4 * i & 7u) & 0xffu) << 8 * i;
  return z;
}
inline long long opaque_zero() {
  return 0;
}

constexpr bool kHasPairMax = true;
inline unsigned max_half_pair(unsigned x, unsigned y) {
  unsigned z = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const unsigned short a = x >> shift, b = y >> shift;
    const float u = half_bits_to_float(a), v = half_bits_to_float(b);
    z |= static_cast<unsigned>(u != u || u < v ? b : a) << shift;
  }
  return z;
}
inline unsigned max_bfloat16_pair(unsigned x, unsigned y) {
  unsigned z = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const unsigned a = x >> shift << 16, b = y >> shift << 16;
    const float u = __uint_as_float(a), v = __uint_as_float(b);
    z |= (u != u || u < v ? b : a) >> 16 << shift;
  }
  return z;
}

constexpr bool kHasCpAsync = true;
// Copies immediately, which is one of the times at which a GPU may copy. Reads before cp_async_wait_all() are not
// detected.
template <int kBytes, bool kLast = false>
HOST_ACCESS void cp_async_bytes(void* to, const void* from) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "copies ahead are of 4, 8 or 16 bytes");
  struct alignas(kBytes) Word {};
  host_check_alignment(static_cast<const Word*>(from));
  host_check_alignment(static_cast<Word*>(to));
#pragma GCC unroll 4
  for (int i = 0; i < kBytes / 4; ++i) static_cast<unsigned*>(to)[i] = static_cast<const unsigned*>(from)[i];
}
inline void cp_async_wait_all() {
}
inline void cp_async_commit() {
}
template <int kPending>
inline void cp_async_wait_groups() {
}
// Copies the element alone: the rest of its 4-byte word may be memory that nobody owns on the host.
template <class Element>
HOST_ACCESS void cp_async_element(void* to, const Element* from) {
  const unsigned long long behind = reinterpret_cast<unsigned long long>(from) % 4;
  *reinterpret_cast<Element*>(static_cast<char*>(to) + (sizeof(Element) == 2 ? behind : 0)) = *from;
}

inline void prefetch_l2(const void*, unsigned) {
}

inline unsigned cluster_rank() {
  return host_cluster_rank();
}
// The wait is the whole barrier; an arrival does nothing.
inline void cluster_arrive() {
}
inline void cluster_wait(HOST_SITE) {
  host_cluster_barrier(file, line);
}
inline void cluster_arrive_relaxed() {
}
inline void store_dsmem(unsigned* place, unsigned rank, unsigned x) {
  host_store_dsmem(place, rank, x);
}
// Stand-in for a barrier that counts bytes: its phase ends for all threads of the cluster at once.
using BytesBarrier = unsigned long long;
inline void start_barrier(BytesBarrier&) {
}
inline void expect_bytes(BytesBarrier&, unsigned) {
}
inline void await_bytes(BytesBarrier&, unsigned, HOST_SITE) {
  host_cluster_barrier(file, line);
}
inline void store_dsmem_async(unsigned long long* place, unsigned rank, unsigned long long x, BytesBarrier&) {
  unsigned* const words = reinterpret_cast<unsigned*>(place);
  host_store_dsmem(words, rank, static_cast<unsigned>(x));
  host_store_dsmem(words + 1, rank, static_cast<unsigned>(x >> 32));
}

HOST_ACCESS unsigned long long load_relaxed(const unsigned long long* from) {
  return host_update(const_cast<unsigned long long*>(from), kHostRelaxed, [](unsigned long long old) { return old; });
}
HOST_ACCESS void store_relaxed(unsigned long long* to, unsigned long long x) {
  host_update(to, kHostRelaxed, [=](unsigned long long) { return x; });
}
// All blocks run on one multiprocessor.
inline unsigned multiprocessor() {
  return 0;
}
inline void block_barrier() {
  __syncthreads();
}
inline void let_others_run() {
  host_pause();
}

// ---------------------------------------------------------------------------------------------------------------------
// Calls a kernel with the arguments that a table of pointers refers to, as the driver of a GPU does.

template <int... kIndex>
struct HostIndices {};
template <int kCount, int... kIndex>
struct HostCount : HostCount<kCount - 1, kCount - 1, kIndex...> {};
template <int... kIndex>
struct HostCount<0, kIndex...> {
  using type = HostIndices<kIndex...>;
};

template <class... Argument, int... kIndex>
__attribute__((no_sanitize("thread"))) void host_call(void (*kernel)(Argument...), void** table,
                                                      HostIndices<kIndex...>) {
  kernel(*static_cast<Argument*>(table[kIndex])...);
}
template <class... Argument>
__attribute__((no_sanitize("thread"))) void host_call(void (*kernel)(Argument...), void** table) {
  host_call(kernel, table, typename HostCount<sizeof...(Argument)>::type{});
}

// These macros follow the source: the entry point for the runtime, and the range of the kernel's __shared__ objects.
// These are its only writable objects, so the linker's symbols for the ends of writable memory delimit them.
extern "C" __attribute__((visibility("hidden"))) char __bss_start[], _end[];
#define HOST_DYNAMIC_SHARED(address)                                              \
  extern "C" __attribute__((visibility("default"))) void* host_dynamic_shared() { \
    return address;                                                               \
  }
#define HOST_ENTRY(kernel)                                                                   \
  extern "C" __attribute__((visibility("default"))) void host_entry_##kernel(void** table) { \
    host_call(kernel, table);                                                                \
  }
#define HOST_SHARED()                                                           \
  extern "C" __attribute__((visibility("default"))) char* host_shared_begin() { \
    return __bss_start;                                                         \
  }                                                                             \
  extern "C" __attribute__((visibility("default"))) char* host_shared_end() {   \
    return _end;                                                                \
  }
