// Second derivatives of losses of rows with a target per class, as second_derivatives.cuh has those of class indices:
// logits and targets (or the logits of a teacher) are read with their directions, of which one of both may be missing.
//
//   along      sum over c of v_c dL/dx_c + w_c dL/dt_c        per row
//   changed    grad_output times how dL/dx_c, and dL/dt_c, move along v and w together
//
// Directions lie as the gradients do.
#pragma once
#include "softmax/dense_rows.cuh"
#include "softmax/second_derivatives.cuh"

// The program of such rows. Base: a DenseRowProgram whose arithmetic is on nested numbers.
template <class Base>
struct DenseHvpProgram : Base {
  using Input = WithTangent<typename Base::Input>;
  using Target = WithTangent<typename Base::Target>;
  const typename Base::Input* tangents;
  const typename Base::Target* target_tangents;

  __device__ __forceinline__ auto logits(const int64 (&offset)[kRowStreams]) const {
    return with_tangent(Base::logits(offset), Base::step(), tangents, offset[kGradients],
                        this->space.class_stride[kGradients]);
  }
  __device__ __forceinline__ auto targets_of(const int64 (&offset)[kRowStreams]) const {
    return with_tangent(Base::targets_of(offset), Base::target_step(), target_tangents, offset[kTargetGradients],
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
  static __device__ __forceinline__ PointerWithTangent<Storage> with_tangent(const Storage* values, int64 step,
                                                                             const Storage* tangents, int64 offset,
                                                                             int64 tangent_step) {
    return {values, tangents == nullptr ? nullptr : tangents + offset, step, tangent_step};
  }
};
