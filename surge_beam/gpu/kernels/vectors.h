// Vectors of W floats in the compiler's own terms, so that one source serves every instruction set.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__)
constexpr int kWidest = 16;
#elif defined(__AVX__)
constexpr int kWidest = 8;
#else
constexpr int kWidest = 4;
#endif

template <int W>
struct Lanes {
  typedef float Floats __attribute__((vector_size(W * 4)));
  typedef int32_t Ints __attribute__((vector_size(W * 4)));
  typedef uint16_t Halves __attribute__((vector_size(W * 2)));
};

template <int W>
using Floats = typename Lanes<W>::Floats;

// Calls run with the width of the widest vector that divides n.
template <class Run>
inline void by_width(int64_t n, Run run) {
  if (kWidest > 8 && n % 16 == 0)
    run(std::integral_constant<int, kWidest>());
  else if (kWidest >= 8 && n % 8 == 0)
    run(std::integral_constant<int, (kWidest < 8 ? kWidest : 8)>());
  else
    run(std::integral_constant<int, 4>());
}

struct BFloat16 {
  uint16_t bits;
};

template <int W>
inline Floats<W> load(const float* from) {
  Floats<W> x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

template <int W>
inline Floats<W> load(const BFloat16* from) {
  typename Lanes<W>::Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  auto wide = __builtin_convertvector(halves, typename Lanes<W>::Ints) << 16;
  Floats<W> x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

template <int W>
inline void store(float* to, Floats<W> x) {
  std::memcpy(to, &x, sizeof x);
}

template <int W>
inline void store(BFloat16* to, Floats<W> x) {
  // To nearest, ties to even. A NaN stays one: its sign and a quiet payload survive.
  typename Lanes<W>::Ints bits;
  std::memcpy(&bits, &x, sizeof x);
  auto rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  auto quiet = (bits >> 16) | 0x40;
  rounded = x == x ? rounded : quiet;
  auto halves = __builtin_convertvector(rounded, typename Lanes<W>::Halves);
  std::memcpy(to, &halves, sizeof halves);
}

template <int W>
inline Floats<W> all(float value) {
  return value - Floats<W>{};  // 0 + value would be added up: it is not value where that is -0
}

template <int W>
struct Pair {
  Floats<W / 2> low, high;
};

template <int W>
inline Pair<W> halves(Floats<W> x) {
  Pair<W> pair;
  std::memcpy(&pair, &x, sizeof pair);
  return pair;
}

template <int W>
inline float sum(Floats<W> x) {
  if constexpr (W == 1) {
    return x[0];
  } else {
    auto [low, high] = halves<W>(x);
    return sum<W / 2>(low + high);
  }
}

template <int W>
inline float largest(Floats<W> x) {
  if constexpr (W == 1) {
    return x[0];
  } else {
    auto [low, high] = halves<W>(x);
    return largest<W / 2>(low > high ? low : high);
  }
}

template <int W>
inline Floats<4> halved(Floats<W> x) {
  if constexpr (W == 4) {
    return x;
  } else {
    auto [low, high] = halves<W>(x);
    return halved<W / 2>(low + high);
  }
}

// The sums of four vectors.
template <int W>
inline Floats<4> sums(Floats<W> a, Floats<W> b, Floats<W> c, Floats<W> d) {
  Floats<4> p = halved<W>(a), q = halved<W>(b), r = halved<W>(c), s = halved<W>(d);
  Floats<4> pq = __builtin_shufflevector(p, q, 0, 1, 4, 5) + __builtin_shufflevector(p, q, 2, 3, 6, 7);
  Floats<4> rs = __builtin_shufflevector(r, s, 0, 1, 4, 5) + __builtin_shufflevector(r, s, 2, 3, 6, 7);
  return __builtin_shufflevector(pq, rs, 0, 2, 4, 6) + __builtin_shufflevector(pq, rs, 1, 3, 5, 7);
}

// exp to about one unit in the last place (Cephes' polynomial); 0 below -87, where float32 has no
// normal numbers left, e^88 above 88, and NaN of NaN.
template <int W>
inline Floats<W> exponential(Floats<W> x) {
  constexpr float kLog2e = 1.44269504088896341f, kRound = 12582912.0f;
  constexpr float kLow = -87.0f, kHigh = 88.0f;
  Floats<W> clipped = x < all<W>(kLow) ? all<W>(kLow) : x;  // NaN stays
  clipped = clipped > all<W>(kHigh) ? all<W>(kHigh) : clipped;
  Floats<W> shifted = clipped * kLog2e + kRound;
  Floats<W> power = shifted - kRound;
  Floats<W> r = clipped - power * 0.693359375f;
  r = r + power * 2.12194440e-4f;
  Floats<W> y = all<W>(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * (r * r) + r + 1.0f;
  typename Lanes<W>::Ints exponent = (__builtin_convertvector(power, typename Lanes<W>::Ints) + 127) << 23;
  Floats<W> scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return x < all<W>(kLow) ? Floats<W>{} : y * scale;
}
