struct Term {
  using Compute = NestedDual<float>;

  __device__ __forceinline__ explicit Term(double beta_) {
  }

  static constexpr bool kAffine = false;
  static constexpr bool kBalanced = true;

  template <class log_p_, class log_q_, class weight_, class classes_>
  __device__ __forceinline__ auto
  operator()(const log_p_& log_p, const log_q_& log_q, const weight_& weight, const classes_& classes) const {
#line 1 "distillation_loss.plain"
    return ::lift<NestedDual<float>>(log_relative_entropy(log_q, log_p));
#line 1 "<distillation_loss_dense_hvp_f16-f16-none-none_f64_register_rows_x8_grad10_tangent10_plain_partial_no-value_4-per-thread_32-lanes>.entries"
  }
};

struct Penalty {
  using Compute = NestedDual<float>;

  __device__ __forceinline__ explicit Penalty(double beta_) {
  }

  template <class lse_>
  __device__ __forceinline__ auto
  operator()(const lse_& lse) const {
#line 1 "distillation_loss.penalty"
    return ::lift<NestedDual<float>>(0.0);
#line 1 "<distillation_loss_dense_hvp_f16-f16-none-none_f64_register_rows_x8_grad10_tangent10_plain_partial_no-value_4-per-thread_32-lanes>.entries"
  }
};

using Result = double;
using Space = RowSpace<1>;
using Program = DenseHvpProgram<DenseRowProgram<Term, Penalty, Space, half_t, half_t, Absent, Absent, double, true, false, true, false>, true, false, false>;
using Compute = Program::Compute;
using Reader = RegisterDenseHvpReader<8, 4, false, true, false>;

extern "C" __global__ void __launch_bounds__(128, 4)
distillation_loss_dense_hvp_f16(const half_t* input, const half_t* target, const half_t* input_tangent, half_t* input_gradients, const double* grad_output, double beta_, double logit_scale, double softcap, double divisor, double scale, int64 chunks, int width, const __grid_constant__ Space space) {
  const Program program{{Term{beta_}, Penalty{beta_}, space,
                        input, target,
                        input_gradients, nullptr,
                        nullptr,
                        nullptr, {logit_scale, softcap},
                        nullptr, nullptr}, input_tangent, nullptr};
  const SubwarpGroup group{32};
  row_gradient<Reader>(program, group, chunks, grad_output);
}
