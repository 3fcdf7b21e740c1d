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
#line 1 "<kl_div_sum_over_bf16-bf16_bf16_matrix_x8_stream-stream-none_grad00_flags10>.entries"
  }
  static constexpr bool kTriedFirst = false;
};

using Result = bfloat16_t;
using Sources = Tuple<Source<bfloat16_t, Access::kStream>, Source<bfloat16_t, Access::kStream>>;
using Sinks = Tuple<Absent, Absent>;
using Element = Absent;

extern "C" __global__ void __launch_bounds__(256, 2)
kl_div_sum_over_bf16(const bfloat16_t* input_, const bfloat16_t* target_, Result* sums, double* partials, double divisor, double scale, int64 outputs, int64 length, int64 slices, int64 slice_length, int64 lanes, int64 warps, const __grid_constant__ Dimensions<4, 1> kept, const __grid_constant__ Dimensions<4, 1> reduced) {
  const SumOver<Loss, Sources, Element, kValue, 1, 1, 8> program{
      Loss{}, make_tuple(Source<bfloat16_t, Access::kStream>{input_}, Source<bfloat16_t, Access::kStream>{target_}),
      Element{}, kept, reduced, Rows<4, false>{}};
  const Deposit<Result, Result> deposit{
      sums, nullptr, divisor, 1.0};
  sum_slices<false, false>(program, deposit, outputs, length, slices, slice_length, lanes, warps, partials);
}
