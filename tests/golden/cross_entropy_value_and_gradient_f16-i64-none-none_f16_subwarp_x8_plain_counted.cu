struct Loss {
  using Compute = float;

  __device__ __forceinline__ explicit Loss(double label_smoothing_, double z_loss_, double gamma_, double poly_) {
  }

  template <class nll_, class rest_, class lse_, class smooth_, class weight_>
  __device__ __forceinline__ auto
  operator()(const nll_& nll, const rest_& rest, const lse_& lse, const smooth_& smooth, const weight_& weight) const {
    constexpr double label_smoothing_ = 0.0;
    constexpr double hard_ = 1.0 - label_smoothing_;
    const auto label_smoothing = ::constant<float>(static_cast<float>(label_smoothing_));
    const auto hard = ::constant<float>(static_cast<float>(hard_));
#line 1 "cross_entropy.plain"
    const auto _row = ::lift<float>(weighted(hard * weight, nll) + weighted(label_smoothing, smooth));
    return _row;
#line 1 "<cross_entropy_value_and_gradient_f16-i64-none-none_f16_subwarp_x8_plain_counted>.entries"
  }
};

using Result = half_t;
using Space = RowSpace<1>;
using Program = RowProgram<Loss, Space, half_t, int64, Absent, Absent, half_t, false, false>;
using Compute = Program::Compute;
using Reader = ResidentReader<8, 0, false, false, false>;

extern "C" __global__ void __launch_bounds__(128, 8)
cross_entropy_value_and_gradient_f16(const half_t* input, const int64* target, half_t* input_gradients, float* lse, unsigned char* correct, GradCoeffs<float>* residual, double* memory, half_t* value, const half_t* grad_output, double* expected_grad_output, double* used_grad_output, double label_smoothing_, double z_loss_, double gamma_, double poly_, double logit_scale, double softcap, RowStatus* status, double multiple, const double* count, int64 ignored, int64 site, int64 chunks, int width, const __grid_constant__ Space space) {
  const double divisor = multiple * __ldcg(count);
  const double scale = divisor == 0.0 ? 0.0 : 1.0 / divisor;
  const Program program{Loss{label_smoothing_, z_loss_, gamma_, poly_}, space, input, input_gradients, target,
                          nullptr,
                          nullptr, {logit_scale, softcap},
                          ignored, status, site, nullptr, lse, correct, residual,
                          lse != nullptr || correct != nullptr || residual != nullptr};
  const BlockOfSubwarps group{{width}};
  if (worker_gradient_is_in_place(group, chunks, grad_output, used_grad_output, expected_grad_output)) return;
  row_value_and_gradient<Reader>(program, group, chunks, memory, divisor, scale, value, grad_output, expected_grad_output, used_grad_output);
}
