struct Loss {
  using Compute = float;
  static constexpr int kHeavy = 0;

  template <class input_, class target_>
  __device__ __forceinline__ auto
  operator()(const input_& input, const target_& target) const {
#line 1 "mse_loss.value"
    return ::lift<float>(square(input - target));
#line 1 "<mse_loss_value_f32-f32_f32_flat_x4_stream-stream-none_grad00_whole>.entries"
  }
  static constexpr bool kTriedFirst = false;
};

using Result = float;
using Sources = Tuple<Source<float, Access::kStream>, Source<float, Access::kStream>>;
using Sinks = Tuple<Absent, Absent>;
using Element = Absent;
using Layout = FlatLayout<4, true>;

extern "C" __global__ void __launch_bounds__(256, 3)
mse_loss_value_f32(const float* input_, const float* target_, double* memory, Result* value, double divisor, double scale, int64 chunks, int64 elements) {
  const Layout layout{elements};
  const Pointwise<Loss, Layout, 4, Sources, Sinks, Element> program{
      Loss{}, layout, make_tuple(Source<float, Access::kStream>{input_}, Source<float, Access::kStream>{target_}),
      make_tuple(Absent{}, Absent{}), Absent{}};
  reduce_value<4>(program, chunks, memory, divisor, scale, value);
}
