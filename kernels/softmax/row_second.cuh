// Second derivatives of losses of rows of class indices. Of the gradient g of a row's loss L and of a direction v,
//
//   along      sum over c of v_c dL/dx_c                        per row, for the derivative with respect to grad_output
//   changed    grad_output * sum over k of v_k d^2 L / dx_c dx_k        for that with respect to the logits
//
// The row engine computes L and g of whatever numbers; here of ones that carry a derivative along v (nested.cuh): a
// logit is read together with its direction, and what is stored of a value or a gradient is how it moves along v. So
// value and gradient are written nowhere, and what keeps the digits of sure rows keeps those of their second
// derivatives. The largest logit moves too, by which all directions are relative to its own: a direction that is the
// same for all classes cancels before anything is rounded.
//
// Logits and directions are read twice, by a unit of threads or, where classes lie apart or are few, a single one.
#pragma once
#include "core/nested.cuh"
#include "softmax/rows.cuh"

// The stream of the directions: of class indices there are no gradients.
constexpr RowStream kDirections = kTargetGradients;

// ---------------------------------------------------------------------------------------------------------------------
// What the row engine calls on numbers

// Of equal values that with the larger derivative, in whatever order they are compared.
template <class T>
__device__ __forceinline__ Nest<T> larger(Nest<T> x, Nest<T> y) {
  const T value = larger(x.value, y.value);
  if (x.value == y.value) return {value, larger(x.along, y.along)};
  return {value, value == x.value ? x.along : y.along};
}
template <class T>
__device__ __forceinline__ Nest<T> with_sign_of(Nest<T> size, Nest<T> x) {
  return {with_sign_of(size.value, x.value), x.value < T(0) ? -size.along : size.along};
}
template <class T>
__device__ __forceinline__ Nest<T> of_lane(Nest<T> x, int offset) {
  return {of_lane(x.value, offset), of_lane(x.along, offset)};
}
template <class T>
__device__ __forceinline__ float as_float(Nest<T> x) {
  return as_float(x.along);
}

// ---------------------------------------------------------------------------------------------------------------------
// Logits with their directions

template <class Storage>
struct Moving {
  Storage number;
  Storage direction;
};

template <class Number, class Storage>
__device__ __forceinline__ Number widen(Moving<Storage> x) {
  const Number number = widen<Number>(x.number), direction = widen<Number>(x.direction);
  return {number.value, direction.value};
}

// Both, from some class on; without directions nothing moves.
template <class Storage>
struct MovingPointer {
  const Storage* numbers;
  const Storage* directions;
  int64 number_step;  // from class to class
  int64 direction_step;

  __device__ __forceinline__ MovingPointer operator+(int64 classes) const {
    const Storage* const moved = directions == nullptr ? nullptr : directions + classes * direction_step;
    return {numbers + classes * number_step, moved, number_step, direction_step};
  }
};
template <class Storage>
struct PointerTo<Moving<Storage>> {
  using type = MovingPointer<Storage>;
};

// Directions may lie anywhere, the same one for several classes or rows included.
template <int kLanes, class Storage>
__device__ __forceinline__ Pack<Storage, kLanes> load_apart(const Storage* from, int64 step) {
  using P = Pack<Storage, kLanes>;
  if (from != nullptr && step == 1 && reinterpret_cast<unsigned long long>(from) % sizeof(P) == 0)
    return load_stream<kLanes>(from);
  P pack{};
  if (from == nullptr) return pack;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) pack.lane[i] = load_reused<1>(from + i * step).lane[0];
  return pack;
}

// Precondition: several logits are neighbours.
template <int kLanes, class Storage>
__device__ __forceinline__ Pack<Moving<Storage>, kLanes> load_stream(MovingPointer<Storage> at) {
  const auto numbers = load_stream<kLanes>(at.numbers);
  const auto directions = load_apart<kLanes>(at.directions, at.direction_step);
  Pack<Moving<Storage>, kLanes> pack;
#pragma unroll
  for (int i = 0; i < kLanes; ++i) pack.lane[i] = {numbers.lane[i], directions.lane[i]};
  return pack;
}

// Where gradients are stored, from some class on.
template <class Storage>
struct Places {
  Storage* at;
  int64 step;

  __device__ __forceinline__ Places operator+(int64 classes) const {
    return {at + classes * step, step};
  }
};
template <int kLanes, class Storage>
__device__ __forceinline__ void store_pack(Places<Storage> to, const Pack<Storage, kLanes>& pack) {
  store_pack<kLanes>(to.at, pack);
}

// The program of rows with directions: `along` is its value, `changed` its gradient. Base: a RowProgram whose
// arithmetic is on nested numbers.
template <class Base>
struct MovingProgram : Base {
  using Compute = typename Base::Compute;
  using Storage = typename Base::Input;
  using Input = Moving<Storage>;
  const Storage* directions;

  __device__ __forceinline__ MovingPointer<Storage> logits(const int64 (&offset)[kRowStreams]) const {
    const auto& stride = this->space.class_stride;
    return {Base::logits(offset), directions + offset[kDirections], stride[kLogits], stride[kDirections]};
  }
  __device__ __forceinline__ Places<Storage> places(const int64 (&offset)[kRowStreams]) const {
    return {Base::places(offset), this->space.class_stride[kGradients]};
  }
  __device__ __forceinline__ Input raw(const int64 (&offset)[kRowStreams], int64 c) const {
    return {Base::raw(offset, c), directions[offset[kDirections] + c * this->space.class_stride[kDirections]]};
  }
};
