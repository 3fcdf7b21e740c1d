// Second derivatives of losses of rows with a target per class, as row_second.cuh has those of class indices: logits
// and targets (or the logits of a teacher) are read with their directions, of which one of both may be missing.
//
//   along      sum over c of v_c dL/dx_c + w_c dL/dt_c        per row
//   changed    grad_output times how dL/dx_c, and dL/dt_c, move along v and w together
//
// Directions lie as the gradients do.
#pragma once
#include "softmax/row_second.cuh"
#include "softmax/row_terms.cuh"

// The program of such rows. Base: a TermProgram whose arithmetic is on nested numbers.
template <class Base>
struct MovingTermProgram : Base {
  using Input = Moving<typename Base::Input>;
  using Target = Moving<typename Base::Target>;
  const typename Base::Input* directions;
  const typename Base::Target* target_directions;

  __device__ __forceinline__ auto logits(const int64 (&offset)[kRowStreams]) const {
    return moving(Base::logits(offset), Base::step(), directions, offset[kGradients],
                  this->space.class_stride[kGradients]);
  }
  __device__ __forceinline__ auto targets_of(const int64 (&offset)[kRowStreams]) const {
    return moving(Base::targets_of(offset), Base::target_step(), target_directions, offset[kTargetGradients],
                  this->space.class_stride[kTargetGradients]);
  }
  __device__ __forceinline__ int64 step() const {
    return 1;
  }
  __device__ __forceinline__ int64 target_step() const {
    return 1;
  }

 private:
  template <class Storage>
  static __device__ __forceinline__ MovingPointer<Storage> moving(const Storage* numbers, int64 step,
                                                                  const Storage* directions, int64 offset,
                                                                  int64 direction_step) {
    return {numbers, directions == nullptr ? nullptr : directions + offset, step, direction_step};
  }
};
