struct Loss {
  using Compute = float;
  static constexpr int kHeavy = 0;

  template <class input_, class target_>
  __device__ __forceinline__ auto
  operator()(const input_& input, const target_& target) const {
#line 1 "mse_loss.value"
    return ::lift<float>(square(input - target));
#line 1 "<mse_loss_broadcast_gradient_f32-f32_f32_matrix_x1_stream-stream-none_grad01_columns>.entries"
  }
  static constexpr bool kTriedFirst = false;
};

using Result = float;
using Sources = Tuple<Source<float, Access::kStream>, Source<float, Access::kStream>>;
using Sinks = Tuple<Absent, Sink<float>>;
using Element = Absent;

extern "C" __global__ void __launch_bounds__(256, 2)
mse_loss_broadcast_gradient_f32(const float* input_, const float* target_, float* target_gradients, const Result* grad_output, double* partials, double divisor, double scale, int64 outputs, int64 length, int64 slices, int64 slice_length, int64 lanes, int64 warps, const __grid_constant__ Dimensions<4, 1> kept, const __grid_constant__ Dimensions<4, 1> reduced) {
  const SumOver<Loss, Sources, Element, 1, 1, 1, 1> program{
      Loss{}, make_tuple(Source<float, Access::kStream>{input_}, Source<float, Access::kStream>{target_}),
      Element{}, kept, reduced, Rows<4, false>{}};
  const Deposit<float, Result> deposit{
      target_gradients, grad_output, 1.0, scale};
  sum_slices<true, false>(program, deposit, outputs, length, slices, slice_length, lanes, warps, partials);
}
