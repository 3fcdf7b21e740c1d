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
#line 1 "<kl_div_elements_bf16-bf16_bf16_tiles_x32_along_a-along_b-none_grad00_flags10_tile-8-4-4-1-2_along_a>.entries"
  }
  static constexpr bool kTriedFirst = false;
};

using Result = bfloat16_t;
using Sources = Tuple<TileSource<bfloat16_t, Along::kA, 8, 4>, TileSource<bfloat16_t, Along::kB, 8, 4>>;
using Sinks = Tuple<Absent, Absent>;
using Element = TileSink<bfloat16_t, Along::kA, 8, 4>;
using Layout = TiledLayout<5, 1, TileShape<8, 4, 4, 1, 2>>;

extern "C" __global__ void __launch_bounds__(256, 2)
kl_div_elements_bf16(const bfloat16_t* input_, const bfloat16_t* target_, Result* values, double divisor, double scale, int64 chunks, const __grid_constant__ Layout layout) {
  const Pointwise<Loss, Layout, 32, Sources, Sinks, Element> program{
      Loss{}, layout, make_tuple(TileSource<bfloat16_t, Along::kA, 8, 4>{input_}, TileSource<bfloat16_t, Along::kB, 8, 4>{target_}),
      make_tuple(Absent{}, Absent{}), Element{values}};
  map_elements<2>(program, chunks, scale);
}
