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
#line 1 "<cross_entropy_value_f16-i64-none-none_f16_columns_x4_rank2_plain_counted_5-per-thread>.entries"
  }
};

using Result = half_t;
using Space = RowSpace<2>;
using Program = RowProgram<Loss, Space, half_t, int64, Absent, Absent, half_t, false, false>;
using Compute = Program::Compute;
using Reader = ColumnReader<4, 5, false>;

extern "C" __global__ void __launch_bounds__(256, 2)
cross_entropy_value_f16(const half_t* input, const int64* target, float* lse, unsigned char* correct, GradCoeffs<float>* residual, double* memory, half_t* value, double label_smoothing_, double z_loss_, double gamma_, double poly_, double logit_scale, double softcap, RowStatus* status, double multiple, const double* count, int64 ignored, int64 site, int64 chunks, int width, const __grid_constant__ Space space) {
  const double divisor = multiple * __ldcg(count);
  const Program program{Loss{label_smoothing_, z_loss_, gamma_, poly_}, space, input, nullptr, target,
                          nullptr,
                          nullptr, {logit_scale, softcap},
                          ignored, status, site, nullptr, lse, correct, residual,
                          lse != nullptr || correct != nullptr || residual != nullptr};
  const SubwarpGroup group{1};
  row_value<Reader>(program, group, chunks, memory, divisor, value);
}
