struct Base {
  using Compute = float;

  template <class input_, class target_>
  __device__ __forceinline__ auto
  operator()(const input_& input, const target_& target) const {
    using _number = typename input_::Scalar;
#line 1 "mse_loss.value"
    return ::lift<_number>(square(input - target));
#line 1 "<mse_loss_tangent10_product_f32-f32-f32_f32_flat_x4_stream-stream-stream-none_grad110_whole>.entries"
  }
  static constexpr bool kTriedFirst = false;
};

struct Loss {
  using Compute = float;
  static constexpr int kHeavy = 1;
  static constexpr bool kTriedFirst = false;
  Base _base;

  template <class input_, class target_, class input__direction_>
  __device__ __forceinline__ auto
  operator()(const input_& input, const target_& target, const input__direction_& input__direction) const {
    const bool _active = true;
    return ::jvp<1u>(_base, _active, input, target, input__direction);
  }
};

using Result = float;
using Sources = Tuple<Source<float, Access::kStream>, Source<float, Access::kStream>, Source<float, Access::kStream>>;
using Sinks = Tuple<Sink<float>, Sink<float>, Absent>;
using Element = Absent;
using Layout = FlatLayout<4, true>;

extern "C" __global__ void __launch_bounds__(256, 2)
mse_loss_product_f32(const float* input_, const float* target_, const float* input__direction_, float* input_gradients, float* target_gradients, const Result* grad_output, double divisor, double scale, int64 chunks, int64 elements) {
  const Layout layout{elements};
  const Pointwise<Loss, Layout, 4, Sources, Sinks, Element> program{
      Loss{Base{}}, layout, make_tuple(Source<float, Access::kStream>{input_}, Source<float, Access::kStream>{target_}, Source<float, Access::kStream>{input__direction_}),
      make_tuple(Sink<float>{input_gradients}, Sink<float>{target_gradients}, Absent{}), Absent{}};
  write_gradients<4>(program, chunks, scale, grad_output);
}
