struct Loss {
  using Compute = float;
  float label_smoothing_kept;
  float hard_kept;

  __device__ __forceinline__ explicit Loss(double label_smoothing_, double z_loss_, double gamma_, double poly_) {
#line 1 "cross_entropy.hard"
    const double hard_ = 1.0 - label_smoothing_;
    label_smoothing_kept = opaque(static_cast<float>(label_smoothing_));
    hard_kept = opaque(static_cast<float>(hard_));
  }

  template <class nll_, class rest_, class lse_, class smooth_, class weight_>
  __device__ __forceinline__ auto
  operator()(const nll_& nll, const rest_& rest, const lse_& lse, const smooth_& smooth, const weight_& weight) const {
    const auto label_smoothing = ::constant<float>(label_smoothing_kept);
    const auto hard = ::constant<float>(hard_kept);
#line 1 "cross_entropy.plain"
    const auto _row = ::lift<float>(weighted(hard * weight, nll) + weighted(label_smoothing, smooth));
    return _row;
#line 1 "<cross_entropy_value_f16-i64-none-none_f16_pipelined_x8_plain_counted_4-warps_16-lanes>.entries"
  }
};

using Result = half_t;
using Space = RowSpace<1>;
using Program = RowProgram<Loss, Space, half_t, int64, Absent, Absent, half_t, false, false>;
using Compute = Program::Compute;
using Reader = PipelinedReader<8, 8, 16, 1, 4>;

extern "C" __global__ void __launch_bounds__(128, 4)
cross_entropy_value_f16(const half_t* input, const int64* target, float* lse, unsigned char* correct, GradCoeffs<float>* residual, double* memory, half_t* value, double label_smoothing_, double z_loss_, double gamma_, double poly_, double logit_scale, double softcap, RowStatus* status, double multiple, const double* count, int64 ignored, int64 site, int64 chunks, int width, const __grid_constant__ Space space) {
  const double divisor = multiple * __ldcg(count);
  const Program program{Loss{label_smoothing_, z_loss_, gamma_, poly_}, space, input, nullptr, target,
                          nullptr,
                          nullptr, {logit_scale, softcap},
                          ignored, status, site, nullptr, lse, correct, residual,
                          lse != nullptr || correct != nullptr || residual != nullptr};
  const PipelinedWarp group{{{32}}, width};
  row_value<Reader>(program, group, chunks, memory, divisor, value);
}
