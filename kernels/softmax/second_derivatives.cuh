// Second derivatives for class indices: JVP and HVP of a row's loss L with gradient g, along a tangent v of the logits.
//
//   jvp    sum over c of v_c dL/dx_c                                per row:   derivative with respect to grad_output
//   hvp    grad_output * sum over k of v_k d^2 L / dx_c dx_k        per class: derivative with respect to the logits
//
// 1. Each logit is loaded together with its tangent, as a NestedDual (nested.cuh).
// 2. The kernels of rows.cuh compute L and g as always, on nested numbers.
// 3. Storing a nested number stores its tangent: the jvp instead of the value, the hvp instead of the gradient.
//
// No formula is written a second time, and what keeps confident rows accurate also keeps their second derivatives
// accurate. The maximum has a tangent too, and tangents are taken relative to it: a tangent that is the same for all
// classes cancels before anything is rounded.
//
// A group owns a row; if classes are strided or few, a single thread does. Traffic: logits and tangents are read twice,
// each result is written once. Preconditions: those of TwoPassReader; tangents may have any strides.
#pragma once
#include "core/nested.cuh"
#include "softmax/rows.cuh"

// Stream of the tangents. It reuses the stream of target gradients, because class indices have no gradients.
constexpr RowStream kTangents = kTargetGradients;

// ---------------------------------------------------------------------------------------------------------------------
// Scalar functions of the softmax kernels

template <class T>
__device__ __forceinline__ NestedDual<T> with_sign_of(NestedDual<T> size, NestedDual<T> x) {
  return {with_sign_of(size.value, x.value), x.value < T(0) ? -size.tangent : size.tangent};
}
template <class T>
__device__ __forceinline__ NestedDual<T> shuffle_xor(NestedDual<T> x, int offset) {
  return {shuffle_xor(x.value, offset), shuffle_xor(x.tangent, offset)};
}
// Precondition: scale is not 0 and has no tangent.
template <class T>
__device__ __forceinline__ NestedDual<T> scaled_logit(NestedDual<T> scale, NestedDual<T> x) {
  return {scale.value * x.value, scale.value * x.tangent};
}
template <class T>
__device__ __forceinline__ float as_float(NestedDual<T> x) {
  return as_float(x.tangent);
}

// ---------------------------------------------------------------------------------------------------------------------
// Logits with their tangents

// A logit with its tangent. Without kMoves the tangent is 0 and is not stored.
template <class Storage, bool kMoves = true>
struct WithTangent {
  Storage value;
  Storage tangent;
};
template <class Storage>
struct WithTangent<Storage, false> {
  Storage value;
};

template <class Number, class Storage>
__device__ __forceinline__ Number widen(WithTangent<Storage> x) {
  const Number value = widen<Number>(x.value), tangent = widen<Number>(x.tangent);
  return {value.value, tangent.value};
}

template <class Number, class Storage>
__device__ __forceinline__ Number widen(WithTangent<Storage, false> x) {
  return {widen<Number>(x.value).value, 0};
}

// Pointer to the logits and tangents of a row, from some class on.
template <class Storage>
struct PointerWithTangent {
  const Storage* values;
  const Storage* tangents;
  int64 value_step;  // elements between classes
  int64 tangent_step;

  __device__ __forceinline__ PointerWithTangent operator+(int64 classes) const {
    return {values + classes * value_step, tangents + classes * tangent_step, value_step, tangent_step};
  }
};
// Pointer to the logits of a row without tangents, from some class on.
template <class Storage>
struct PointerWithoutTangent {
  const Storage* values;
  int64 value_step;

  __device__ __forceinline__ PointerWithoutTangent operator+(int64 classes) const {
    return {values + classes * value_step, value_step};
  }
};
template <class Storage>
struct PointerTo<WithTangent<Storage>> {
  using type = PointerWithTangent<Storage>;
};
template <class Storage>
struct PointerTo<WithTangent<Storage, false>> {
  using type = PointerWithoutTangent<Storage>;
};

// Loads a pack that starts at any element. Elements of 16 bits are loaded in words of 32 bits. If the pack starts in
// the middle of a word, its first and its last element are loaded separately, because nothing outside the pack may be
// read.
template <int kVecSize, class Storage>
__device__ __forceinline__ Pack<Storage, kVecSize> load_by_words(const Storage* from) {
  Pack<Storage, kVecSize> pack;
  if constexpr (sizeof(Storage) == 2 && kVecSize % 2 == 0) {
    constexpr int kWords = kVecSize / 2;
    const unsigned long long address = reinterpret_cast<unsigned long long>(from);
    const unsigned* const at = reinterpret_cast<const unsigned*>(address & ~3ull);
    const bool between = address % 4 != 0;
    unsigned words[kWords + 1];
    words[0] = between ? static_cast<unsigned>(load_pack<1>(from).element[0].bits) << 16 : __ldg(at);
#pragma unroll
    for (int i = 1; i < kWords; ++i) words[i] = __ldg(at + i);
    words[kWords] = between ? load_pack<1>(from + kVecSize - 1).element[0].bits : 0u;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      reinterpret_cast<unsigned*>(&pack)[i] = select_bytes(words[i], words[i + 1], between ? 0x5432u : 0x3210u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVecSize; ++i) pack.element[i] = load_pack<1>(from + i).element[0];
  }
  return pack;
}

// Loads elements that are `step` apart. Tangents may have any strides, also 0, where several classes or rows share one.
template <int kVecSize, class Storage>
__device__ __forceinline__ Pack<Storage, kVecSize> load_strided(const Storage* from, int64 step) {
  using P = Pack<Storage, kVecSize>;
  if (step == 1 && reinterpret_cast<unsigned long long>(from) % sizeof(P) == 0) return load_stream<kVecSize>(from);
  P pack{};
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) pack.element[i] = load_pack<1>(from + i * step).element[0];
  return pack;
}

// Loads logits with their tangents. Precondition: kVecSize = 1, or the logits are contiguous. Vectors are aligned as
// those of the results, so operands may be misaligned.
template <int kVecSize, class Storage>
__device__ __forceinline__ Pack<WithTangent<Storage>, kVecSize> load_stream(PointerWithTangent<Storage> at) {
  const auto values = load_strided<kVecSize>(at.values, 1);
  const auto tangents = load_strided<kVecSize>(at.tangents, at.tangent_step);
  Pack<WithTangent<Storage>, kVecSize> pack;
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) pack.element[i] = {values.element[i], tangents.element[i]};
  return pack;
}

template <int kVecSize, class Storage>
__device__ __forceinline__ Pack<WithTangent<Storage, false>, kVecSize> load_stream(PointerWithoutTangent<Storage> at) {
  const auto values = load_strided<kVecSize>(at.values, 1);
  Pack<WithTangent<Storage, false>, kVecSize> pack;
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) pack.element[i] = {values.element[i]};
  return pack;
}

// Pointer to the gradients of a row, from some class on.
template <class Storage>
struct StridedPointer {
  Storage* at;
  int64 step;

  __device__ __forceinline__ StridedPointer operator+(int64 classes) const {
    return {at + classes * step, step};
  }
};
template <int kVecSize, class Storage>
__device__ __forceinline__ void store_pack(StridedPointer<Storage> to, const Pack<Storage, kVecSize>& pack) {
  store_pack<kVecSize>(to.at, pack);
}

// Program of rows with tangents: its value is the jvp, its gradient the hvp. Base: a RowProgram that computes on
// NestedDual.
template <class Base>
struct HvpProgram : Base {
  using Compute = typename Base::Compute;
  using Storage = typename Base::Input;
  using Input = WithTangent<Storage>;
  const Storage* tangents;

  __device__ __forceinline__ PointerWithTangent<Storage> logits(const int64 (&offset)[kRowStreams]) const {
    const auto& stride = this->space.class_stride;
    return {Base::logits(offset), tangents + offset[kTangents], stride[kLogits], stride[kTangents]};
  }
  __device__ __forceinline__ StridedPointer<Storage> gradient_pointer(const int64 (&offset)[kRowStreams]) const {
    return {Base::gradient_pointer(offset), this->space.class_stride[kGradients]};
  }
  // Returns the vectors of the results. The address of the results decides where they begin, not that of the operands.
  template <int kVecSize>
  __device__ __forceinline__ RowVectors<Storage, kVecSize> view_of_results(const int64 (&offset)[kRowStreams]) const {
    return {this->gradients, offset[kGradients], this->space.classes};
  }
  __device__ __forceinline__ Input raw(const int64 (&offset)[kRowStreams], int64 c) const {
    return {Base::raw(offset, c), tangents[offset[kTangents] + c * this->space.class_stride[kTangents]]};
  }
};
