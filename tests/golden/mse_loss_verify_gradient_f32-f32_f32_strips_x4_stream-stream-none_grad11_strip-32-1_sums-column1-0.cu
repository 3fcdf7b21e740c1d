struct Loss {
  using Compute = float;
  static constexpr int kHeavy = 0;

  template <class input_, class target_>
  __device__ __forceinline__ auto
  operator()(const input_& input, const target_& target) const {
#line 1 "mse_loss.value"
    return ::lift<float>(square(input - target));
#line 1 "<mse_loss_verify_gradient_f32-f32_f32_strips_x4_stream-stream-none_grad11_strip-32-1_sums-column1-0>.entries"
  }
  static constexpr bool kTriedFirst = false;
};

using Result = float;
using Sources = Tuple<Source<float, Access::kStream>, Source<float, Access::kStream>>;
using Sinks = Tuple<Absent, Sink<float>>;
using Element = Absent;
using Layout = StripLayout<4, 32, 1, 5, 1>;

extern "C" __global__ void __launch_bounds__(256, 2)
mse_loss_verify_gradient_f32(const float* input_, const float* target_, float* input_gradients, float* target_gradients, const Result* grad_output, const double* used_grad_output, double* expected_grad_output, double divisor, double scale, int64 chunks, const __grid_constant__ Layout layout, int64 input_sums, const __grid_constant__ Combination<1> input_combination) {
  const Pointwise<Loss, Layout, 4, Sources, Sinks, Element> program{
      Loss{}, layout, make_tuple(Source<float, Access::kStream>{input_}, Source<float, Access::kStream>{target_}),
      make_tuple(Absent{}, Sink<float>{target_gradients}), Absent{}};
  combine_sums(input_combination, used_grad_output + input_sums, input_gradients,
               scale * widen<double>(*grad_output));
  verify_gradient<4>(program, chunks, scale, grad_output, used_grad_output, expected_grad_output);
}
