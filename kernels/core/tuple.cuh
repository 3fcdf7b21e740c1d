// Tuple: a list of values of different types, one per operand. NVRTC has no <tuple>.
#pragma once

template <int... kIndex>
struct Indices {};

template <int kCount, int... kIndex>
struct MakeIndices : MakeIndices<kCount - 1, kCount - 1, kIndex...> {};
template <int... kIndex>
struct MakeIndices<0, kIndex...> {
  using type = Indices<kIndex...>;
};

template <int kIndex, class T>
struct Leaf {
  T value;
};

template <class Sequence, class... T>
struct Leaves;
template <int... kIndex, class... T>
struct Leaves<Indices<kIndex...>, T...> : Leaf<kIndex, T>... {};

template <class... T>
struct Tuple : Leaves<typename MakeIndices<sizeof...(T)>::type, T...> {
  static constexpr int kSize = sizeof...(T);
};

template <int kIndex, class T>
__device__ __forceinline__ T& get(Leaf<kIndex, T>& leaf) {
  return leaf.value;
}
template <int kIndex, class T>
__device__ __forceinline__ const T& get(const Leaf<kIndex, T>& leaf) {
  return leaf.value;
}

// The type at kIndex. `value_of` is only declared, for decltype.
template <int kIndex, class T>
__device__ T value_of(const Leaf<kIndex, T>& leaf);
template <int kIndex, class T>
using TypeAt = decltype(value_of<kIndex>(*static_cast<const T*>(nullptr)));

template <int... kIndex, class... T>
__device__ __forceinline__ Tuple<T...> fill_tuple(Indices<kIndex...>, T... values) {
  Tuple<T...> tuple;
  ((get<kIndex>(tuple) = values), ...);
  return tuple;
}
template <class... T>
__device__ __forceinline__ Tuple<T...> make_tuple(T... values) {
  return fill_tuple(typename MakeIndices<sizeof...(T)>::type{}, values...);
}
