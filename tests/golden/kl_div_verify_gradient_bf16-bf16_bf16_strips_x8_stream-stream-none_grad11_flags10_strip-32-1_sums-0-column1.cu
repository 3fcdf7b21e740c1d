struct Loss {
  using Compute = float;
  static constexpr int kHeavy = 0;

  template <class input_, class target_>
  __device__ __forceinline__ auto
  operator()(const input_& input, const target_& target) const {
    constexpr bool log_target = true;
    constexpr bool log_input = false;
#line 1 "kl_div.mass"
    const auto mass = where(log_target, exp(target), target);
#line 1 "kl_div.from_log"
    const auto from_log = where(log_target, mass * (target - input), times_log(target, input));
#line 1 "kl_div.from_probability"
    const auto from_probability = where(log_target, mass * (target - log(input)), times_log_ratio(target, input));
#line 1 "kl_div.value"
    return ::lift<float>(where(mass == 0.0, zero_unless_nan(input), where(log_input, from_log, from_probability)));
#line 1 "<kl_div_verify_gradient_bf16-bf16_bf16_strips_x8_stream-stream-none_grad11_flags10_strip-32-1_sums-0-column1>.entries"
  }
  static constexpr bool kTriedFirst = false;
};

using Result = bfloat16_t;
using Sources = Tuple<Source<bfloat16_t, Access::kStream>, Source<bfloat16_t, Access::kStream>>;
using Sinks = Tuple<Sink<bfloat16_t>, Absent>;
using Element = Absent;
using Layout = StripLayout<8, 32, 1, 5, 1>;

extern "C" __global__ void __launch_bounds__(256, 2)
kl_div_verify_gradient_bf16(const bfloat16_t* input_, const bfloat16_t* target_, bfloat16_t* input_gradients, bfloat16_t* target_gradients, const Result* grad_output, const double* used_grad_output, double* expected_grad_output, double divisor, double scale, int64 chunks, const __grid_constant__ Layout layout, int64 target_sums, const __grid_constant__ Combination<1> target_combination) {
  const Pointwise<Loss, Layout, 8, Sources, Sinks, Element> program{
      Loss{}, layout, make_tuple(Source<bfloat16_t, Access::kStream>{input_}, Source<bfloat16_t, Access::kStream>{target_}),
      make_tuple(Sink<bfloat16_t>{input_gradients}, Absent{}), Absent{}};
  combine_sums(target_combination, used_grad_output + target_sums, target_gradients,
               scale * widen<double>(*grad_output));
  verify_gradient<4>(program, chunks, scale, grad_output, used_grad_output, expected_grad_output);
}
