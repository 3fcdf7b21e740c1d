struct Term {
  using Compute = float;
  float beta_kept;
  float remainder_kept;

  __device__ __forceinline__ explicit Term(double beta_) {
#line 1 "distillation_loss.remainder"
    const double remainder_ = 1.0 - beta_;
    beta_kept = opaque(static_cast<float>(beta_));
    remainder_kept = opaque(static_cast<float>(remainder_));
  }

  static constexpr bool kAffine = false;
  static constexpr bool kBalanced = false;

  template <class log_p_, class log_q_, class weight_, class classes_>
  __device__ __forceinline__ auto
  operator()(const log_p_& log_p, const log_q_& log_q, const weight_& weight, const classes_& classes) const {
    const auto beta = ::constant<float>(beta_kept);
    const auto remainder = ::constant<float>(remainder_kept);
#line 1 "distillation_loss.term"
    return ::lift<float>(mixed_divergence(log_q, log_p, beta, remainder));
#line 1 "<distillation_loss_dense_gradient_f16-f16-none-none_f16_thread_per_row_x1_grad10>.entries"
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
#line 1 "<distillation_loss_dense_gradient_f16-f16-none-none_f16_thread_per_row_x1_grad10>.entries"
  }
};

using Result = half_t;
using Space = RowSpace<1>;
using Program = DenseRowProgram<Term, Penalty, Space, half_t, half_t, Absent, Absent, half_t, true, false, true, false>;
using Compute = Program::Compute;
using Reader = DenseReader<DenseThreadPerRow<true>>;

extern "C" __global__ void __launch_bounds__(256)
distillation_loss_dense_gradient_f16(const half_t* input, const half_t* target, half_t* input_gradients, const half_t* grad_output, double beta_, double logit_scale, double softcap, double divisor, double scale, int64 chunks, int width, const __grid_constant__ Space space) {
  const Program program{Term{beta_}, Penalty{beta_}, space,
                        input, target,
                        input_gradients, nullptr,
                        nullptr,
                        nullptr, {logit_scale, softcap},
                        nullptr, nullptr};
  const SubwarpGroup group{1};
  row_gradient<Reader>(program, group, chunks, grad_output);
}
