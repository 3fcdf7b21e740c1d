struct Loss {
  using Compute = float;
  static constexpr int kHeavy = 0;

  template <class input_, class target_, class weight_, class mask_>
  __device__ __forceinline__ auto
  operator()(const input_& input, const target_& target, const weight_& weight, const mask_& mask) const {
    constexpr bool log_target = true;
    constexpr bool log_input = false;
#line 1 "kl_div.mass"
    const auto mass = where(log_target, exp(target), target);
#line 1 "kl_div.from_log"
    const auto from_log = where(log_target, mass * (target - input), times_log(target, input));
#line 1 "kl_div.from_probability"
    const auto from_probability = where(log_target, mass * (target - log(input)), times_log_ratio(target, input));
#line 1 "kl_div.value"
    const auto unweighted = ::lift<float>(where(mass == 0.0, zero_unless_nan(input), where(log_input, from_log, from_probability)));
    return ::where(mask != 0, ::weighted(weight, unweighted), 0);
#line 1 "<kl_div_weight-array_mask_value_bf16-bf16-bf16-bool_bf16_matrix_x8_stream-stream-stream-stream-none_grad0000_flags10_counted>.entries"
  }
  static constexpr bool kTriedFirst = false;
};

using Result = bfloat16_t;
using Sources = Tuple<Source<bfloat16_t, Access::kStream>, Source<bfloat16_t, Access::kStream>, Source<bfloat16_t, Access::kStream>, Source<bool, Access::kStream>>;
using Sinks = Tuple<Absent, Absent, Absent, Absent>;
using Element = Absent;
using Layout = StridedLayout<8, 9, 1>;

extern "C" __global__ void __launch_bounds__(256, 2)
kl_div_value_bf16_bool(const bfloat16_t* input_, const bfloat16_t* target_, const bfloat16_t* weight_, const bool* mask_, double* memory, Result* value, double multiple, const double* count, int64 chunks, const __grid_constant__ Layout layout) {
  const double divisor = multiple * __ldcg(count);
  const double scale = divisor == 0.0 ? 0.0 : 1.0 / divisor;
  const Pointwise<Loss, Layout, 8, Sources, Sinks, Element> program{
      Loss{}, layout, make_tuple(Source<bfloat16_t, Access::kStream>{input_}, Source<bfloat16_t, Access::kStream>{target_}, Source<bfloat16_t, Access::kStream>{weight_}, Source<bool, Access::kStream>{mask_}),
      make_tuple(Absent{}, Absent{}, Absent{}, Absent{}), Absent{}};
  reduce_value<4>(program, chunks, memory, divisor, scale, value);
}
