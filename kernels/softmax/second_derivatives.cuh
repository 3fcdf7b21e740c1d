// Second derivatives for class indices: JVP and HVP of a row's loss L with gradient g, along a tangent v of the logits.
//
//   jvp    sum over c of v_c dL/dx_c                                per row: the derivative with respect to grad_output
//   hvp    grad_output * sum over k of v_k d^2 L / dx_c dx_k        per class: the derivative with respect to the
//   logits
//
// 1. A logit is loaded together with its tangent, as a NestedDual (nested.cuh).
// 2. The kernels of rows.cuh compute L and g as always, on nested numbers.
// 3. Storing a nested number stores its tangent: the jvp in place of the value, the hvp in place of the gradient.
//
// No formula is written a second time, and what keeps the digits of confident rows keeps those of their second
// derivatives. The maximum has a tangent too, and tangents are relative to it: a tangent that is the same for all
// classes cancels before anything is rounded.
//
// A group takes a row, or a thread if classes are strided or few. Traffic: logits and tangents are read twice, each
// result is written once. Preconditions: those of TwoPassReader; tangents may have any strides.
#pragma once
#include "core/nested.cuh"
#include "softmax/rows.cuh"

// The stream of the tangents: class indices have no gradients, so theirs is free.
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
// A scale has no tangent and is not 0.
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

// kMoves: it has a tangent; otherwise that is 0.
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

// Pointer to logits and tangents from some class on.
template <class Storage>
struct PointerWithTangent {
  const Storage* values;
  const Storage* tangents;
  int64 value_step;  // distance of classes
  int64 tangent_step;

  __device__ __forceinline__ PointerWithTangent operator+(int64 classes) const {
    return {values + classes * value_step, tangents + classes * tangent_step, value_step, tangent_step};
  }
};
// Pointer to logits that have no tangents.
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

// Loads a pack that begins at any element. Elements of 16 bits come by words, but for those at the ends of a pack that
// begins between two words, since nothing else may be read.
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

// Loads tangents of any strides; one tangent may serve several classes or rows.
template <int kVecSize, class Storage>
__device__ __forceinline__ Pack<Storage, kVecSize> load_strided(const Storage* from, int64 step) {
  using P = Pack<Storage, kVecSize>;
  if (step == 1 && reinterpret_cast<unsigned long long>(from) % sizeof(P) == 0) return load_stream<kVecSize>(from);
  P pack{};
#pragma unroll
  for (int i = 0; i < kVecSize; ++i) pack.element[i] = load_pack<1>(from + i * step).element[0];
  return pack;
}

// Precondition: kVecSize = 1, or the logits are contiguous. Vectors may lie otherwise than those of the results.
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

// Pointer to gradients from some class on.
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

// The program of rows with tangents: its value is the jvp, its gradient the hvp. Base: a RowProgram that computes on
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
  // The vectors of the results, wherever the operands begin.
  template <int kVecSize>
  __device__ __forceinline__ RowVectors<Storage, kVecSize> view_of_results(const int64 (&offset)[kRowStreams]) const {
    return {this->gradients, offset[kGradients], this->space.classes};
  }
  __device__ __forceinline__ Input raw(const int64 (&offset)[kRowStreams], int64 c) const {
    return {Base::raw(offset, c), tangents[offset[kTangents] + c * this->space.class_stride[kTangents]]};
  }
};
