struct Loss {
  using Compute = double;
  double label_smoothing_kept;
  double hard_kept;

  __device__ __forceinline__ explicit Loss(double label_smoothing_, double z_loss_, double gamma_, double poly_) {
#line 1 "cross_entropy.hard"
    const double hard_ = 1.0 - label_smoothing_;
    label_smoothing_kept = opaque(static_cast<double>(label_smoothing_));
    hard_kept = opaque(static_cast<double>(hard_));
  }

  template <class nll_, class rest_, class lse_, class smooth_, class weight_>
  __device__ __forceinline__ auto
  operator()(const nll_& nll, const rest_& rest, const lse_& lse, const smooth_& smooth, const weight_& weight) const {
    const auto label_smoothing = ::constant<double>(label_smoothing_kept);
    const auto hard = ::constant<double>(hard_kept);
#line 1 "cross_entropy.plain"
    const auto _row = ::lift<double>(weighted(hard * weight, nll) + weighted(label_smoothing, smooth));
    return _row;
#line 1 "<cross_entropy_value_f64-i64-none-none_f64_column_tiles_two_pass_x1_rank2_plain_counted_16-warps>.entries"
  }
};

using Result = double;
using Space = RowSpace<2>;
using Program = RowProgram<Loss, Space, double, int64, Absent, Absent, double, false, false>;
using Compute = Program::Compute;
using Reader = TileReader<1, 16, false>;

extern "C" __global__ void __launch_bounds__(512, 1)
cross_entropy_value_f64(const double* input, const int64* target, double* lse, unsigned char* correct, GradCoeffs<double>* residual, double* memory, double* value, double label_smoothing_, double z_loss_, double gamma_, double poly_, double logit_scale, double softcap, RowStatus* status, double multiple, const double* count, int64 ignored, int64 site, int64 chunks, int width, const __grid_constant__ Space space) {
  const double divisor = multiple * __ldcg(count);
  const Program program{Loss{label_smoothing_, z_loss_, gamma_, poly_}, space, input, nullptr, target,
                          nullptr,
                          nullptr, {logit_scale, softcap},
                          ignored, status, site, nullptr, lse, correct, residual,
                          lse != nullptr || correct != nullptr || residual != nullptr};
  const ClusterGroup<1> group;
  row_value<Reader>(program, group, chunks, memory, divisor, value);
}
