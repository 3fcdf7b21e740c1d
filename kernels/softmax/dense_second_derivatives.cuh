// Second derivatives for dense targets, as second_derivatives.cuh for class indices: tangents v of the logits and w of
// the targets (or of a teacher's logits). Either may be missing.
//
//   jvp    sum over c of v_c dL/dx_c + w_c dL/dt_c                    per row
//   hvp    grad_output times the tangents of dL/dx_c and dL/dt_c along v and w together
//
// Steps and ownership are those of dense_rows.cuh, on nested numbers. Traffic: operands and tangents are read in each
// pass; each result is written once. Preconditions: tangents have the strides of the gradients.
#pragma once
#include "softmax/dense_rows.cuh"
#include "softmax/second_derivatives.cuh"

// The program of these rows. Base: a DenseRowProgram that computes on NestedDual.
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
