struct Base {
  using Compute = float;

  template <class input_, class target_>
  __device__ __forceinline__ auto
  operator()(const input_& input, const target_& target) const {
    using _number = typename input_::Scalar;
    constexpr bool log_target = true;
    constexpr bool log_input = false;
#line 1 "kl_div.mass"
    const auto mass = where(log_target, exp(target), target);
#line 1 "kl_div.from_log"
    const auto from_log = where(log_target, mass * (target - input), times_log(target, input));
#line 1 "kl_div.from_probability"
    const auto from_probability = where(log_target, mass * (target - log(input)), times_log_ratio(target, input));
#line 1 "kl_div.value"
    return ::lift<_number>(where(mass == 0.0, zero_unless_nan(input), where(log_input, from_log, from_probability)));
#line 1 "<kl_div_tangent10_product_bf16-bf16-bf16_bf16_tiles_x16_along_a-along_b-along_b-none_grad110_flags10_tile-4-4-8-1-4_along_a_along_b>.entries"
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

using Result = bfloat16_t;
using Sources = Tuple<TileSource<bfloat16_t, Along::kA, 4, 4>, TileSource<bfloat16_t, Along::kB, 4, 4>, TileSource<bfloat16_t, Along::kB, 4, 4>>;
using Sinks = Tuple<TileSink<bfloat16_t, Along::kA, 4, 4>, TileSink<bfloat16_t, Along::kB, 4, 4>, Absent>;
using Element = Absent;
using Layout = TiledLayout<7, 1, TileShape<4, 4, 8, 1, 4>>;

extern "C" __global__ void __launch_bounds__(256, 2)
kl_div_product_bf16(const bfloat16_t* input_, const bfloat16_t* target_, const bfloat16_t* input__direction_, bfloat16_t* input_gradients, bfloat16_t* target_gradients, const Result* grad_output, double divisor, double scale, int64 chunks, const __grid_constant__ Layout layout) {
  const Pointwise<Loss, Layout, 16, Sources, Sinks, Element> program{
      Loss{Base{}}, layout, make_tuple(TileSource<bfloat16_t, Along::kA, 4, 4>{input_}, TileSource<bfloat16_t, Along::kB, 4, 4>{target_}, TileSource<bfloat16_t, Along::kB, 4, 4>{input__direction_}),
      make_tuple(TileSink<bfloat16_t, Along::kA, 4, 4>{input_gradients}, TileSink<bfloat16_t, Along::kB, 4, 4>{target_gradients}, Absent{}), Absent{}};
  write_gradients<4>(program, chunks, scale, grad_output);
}
