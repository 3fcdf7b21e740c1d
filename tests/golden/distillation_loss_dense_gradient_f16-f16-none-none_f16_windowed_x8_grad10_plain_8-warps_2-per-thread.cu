struct Term {
  using Compute = float;

  __device__ __forceinline__ explicit Term(double beta_) {
  }

  static constexpr bool kAffine = false;
  static constexpr bool kBalanced = true;

  template <class log_p_, class log_q_, class weight_, class classes_>
  __device__ __forceinline__ auto
  operator()(const log_p_& log_p, const log_q_& log_q, const weight_& weight, const classes_& classes) const {
#line 1 "distillation_loss.plain"
    return ::lift<float>(log_relative_entropy(log_q, log_p));
#line 1 "<distillation_loss_dense_gradient_f16-f16-none-none_f16_windowed_x8_grad10_plain_8-warps_2-per-thread>.entries"
  }
};

struct Penalty {
  using Compute = float;

  __device__ __forceinline__ explicit Penalty(double beta_) {
  }

  template <class lse_>
  __device__ __forceinline__ auto
  operator()(const lse_& lse) const {
#line 1 "distillation_loss.penalty"
    return ::lift<float>(0.0);
#line 1 "<distillation_loss_dense_gradient_f16-f16-none-none_f16_windowed_x8_grad10_plain_8-warps_2-per-thread>.entries"
  }
};

using Result = half_t;
using Space = RowSpace<1>;
using Program = DenseRowProgram<Term, Penalty, Space, half_t, half_t, Absent, Absent, half_t, true, false, true, false>;
using Compute = Program::Compute;
using Reader = WindowedDenseReader<8, 2>;

extern "C" __global__ void __launch_bounds__(1024)
distillation_loss_dense_gradient_f16(const half_t* input, const half_t* target, half_t* input_gradients, const half_t* grad_output, double beta_, double logit_scale, double softcap, double divisor, double scale, int64 chunks, int width, const __grid_constant__ Space space) {
  const Program program{Term{beta_}, Penalty{beta_}, space,
                        input, target,
                        input_gradients, nullptr,
                        nullptr,
                        nullptr, {logit_scale, softcap},
                        nullptr, nullptr};
  const ClusterGroup<1> group;
  row_gradient<Reader>(program, group, chunks, grad_output);
}
