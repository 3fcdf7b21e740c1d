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
#line 1 "<kl_div_combine_gradients_bf16-bf16_bf16_strips_x8_stream-stream-none_grad11_flags10_strip-32-1_sums-0-column1>.entries"
  }
  static constexpr bool kTriedFirst = false;
};

using Result = bfloat16_t;

extern "C" __global__ void __launch_bounds__(256)
kl_div_combine_gradients_bf16(const bfloat16_t* input_, const bfloat16_t* target_, bfloat16_t* input_gradients, bfloat16_t* target_gradients, const Result* grad_output, double* partials, double divisor, double scale, int64 target_sums, const __grid_constant__ Combination<1> target_combination) {
  combine_sums(target_combination, partials + target_sums, target_gradients,
               scale);
}
