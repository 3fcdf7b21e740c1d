struct Loss {
  using Compute = NestedDual<float>;

  __device__ __forceinline__ explicit Loss(double label_smoothing_, double z_loss_, double gamma_, double poly_) {
  }

  template <class nll_, class rest_, class lse_, class smooth_, class weight_>
  __device__ __forceinline__ auto
  operator()(const nll_& nll, const rest_& rest, const lse_& lse, const smooth_& smooth, const weight_& weight) const {
    constexpr double label_smoothing_ = 0.0;
    constexpr double hard_ = 1.0 - label_smoothing_;
    const auto label_smoothing = ::constant<NestedDual<float>>(static_cast<float>(label_smoothing_));
    const auto hard = ::constant<NestedDual<float>>(static_cast<float>(hard_));
#line 1 "cross_entropy.plain"
    const auto _row = ::lift<NestedDual<float>>(weighted(hard * weight, nll) + weighted(label_smoothing, smooth));
    return _row;
#line 1 "<cross_entropy_hvp_f16-i64-none-none_f64_register_rows_x8_tangent1_plain_partial_4-per-thread_32-lanes>.entries"
  }
};

using Result = double;
using Space = RowSpace<1>;
using Program = HvpProgram<RowProgram<Loss, Space, half_t, int64, Absent, Absent, double, false, false>>;
using Compute = Program::Compute;
using Reader = RegisterHvpReader<8, 4, false, true, false>;

extern "C" __global__ void __launch_bounds__(128, 4)
cross_entropy_hvp_f16(const half_t* input, const int64* target, const half_t* input_tangent, half_t* input_gradients, double* values, const double* grad_output, double label_smoothing_, double z_loss_, double gamma_, double poly_, double logit_scale, double softcap, RowStatus* status, double divisor, double scale, int64 ignored, int64 site, int64 chunks, int width, const __grid_constant__ Space space) {
  const Program program{{Loss{label_smoothing_, z_loss_, gamma_, poly_}, space, input, input_gradients, target,
                          nullptr,
                          nullptr, {logit_scale, softcap},
                          ignored, status, site, values, nullptr, nullptr, nullptr,
                          values != nullptr}, input_tangent};
  const SubwarpGroup group{32};
  row_gradient<Reader>(program, group, chunks, grad_output);
}
