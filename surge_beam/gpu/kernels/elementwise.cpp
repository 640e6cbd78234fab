// What stands between the products of a decoder layer, each in one pass; see elementwise.py.

#include <cmath>

#include "vectors.h"

namespace {

// Numbers below which a second thread costs more than it saves.
constexpr int64_t kSmall = 16384;

template <class T>
void add_norm(int64_t rows, int64_t width, int64_t threads, float eps, T* x, const T* added,
              const T* weight, T* out) {
  by_width(width, [=](auto w) {
    constexpr int W = decltype(w)::value;
#pragma omp parallel for num_threads(threads) if (rows * width > kSmall)
    for (int64_t r = 0; r < rows; ++r) {
      T* row = x + r * width;
      Floats<W> squares{};
      for (int64_t i = 0; i < width; i += W) {
        if (added) store<W>(row + i, load<W>(row + i) + load<W>(added + r * width + i));
        Floats<W> v = load<W>(row + i);
        squares += v * v;
      }
      const float factor = 1.0f / std::sqrt(sum<W>(squares) / width + eps);
      for (int64_t i = 0; i < width; i += W)
        store<W>(out + r * width + i, load<W>(row + i) * factor * load<W>(weight + i));
    }
  });
}

template <class T>
void silu_mul(int64_t rows, int64_t inner, int64_t threads, const T* gate_up, T* out) {
  by_width(inner, [=](auto w) {
    constexpr int W = decltype(w)::value;
#pragma omp parallel for num_threads(threads) if (rows * inner > kSmall)
    for (int64_t r = 0; r < rows; ++r) {
      const T *gate = gate_up + r * 2 * inner, *up = gate + inner;
      for (int64_t i = 0; i < inner; i += W) {
        Floats<W> g = load<W>(gate + i);
        store<W>(out + r * inner + i, g / (exponential<W>(-g) + 1.0f) * load<W>(up + i));
      }
    }
  });
}

template <class T>
void rotate(int64_t rows, int64_t heads, int64_t half, int64_t stride, int64_t threads, T* x,
            const T* cosines, const T* sines) {
  by_width(half, [=](auto w) {
    constexpr int W = decltype(w)::value;
#pragma omp parallel for num_threads(threads) if (rows * heads * half > kSmall)
    for (int64_t r = 0; r < rows; ++r) {
      const T *c = cosines + r * half, *s = sines + r * half;
      for (int64_t h = 0; h < heads; ++h) {
        T *left = x + r * stride + h * 2 * half, *right = left + half;
        for (int64_t i = 0; i < half; i += W) {
          Floats<W> a = load<W>(left + i), b = load<W>(right + i);
          Floats<W> cosine = load<W>(c + i), sine = load<W>(s + i);
          store<W>(left + i, a * cosine - b * sine);
          store<W>(right + i, b * cosine + a * sine);
        }
      }
    }
  });
}

}  // namespace

#define SURGE_ELEMENTWISE(name, T)                                                              \
  extern "C" void surge_add_norm_##name(int64_t rows, int64_t width, int64_t threads, float eps, \
                                        T* x, const T* added, const T* weight, T* out) {         \
    add_norm(rows, width, threads, eps, x, added, weight, out);                                  \
  }                                                                                              \
  extern "C" void surge_silu_mul_##name(int64_t rows, int64_t inner, int64_t threads,            \
                                        const T* gate_up, T* out) {                              \
    silu_mul(rows, inner, threads, gate_up, out);                                                \
  }                                                                                              \
  extern "C" void surge_rotate_##name(int64_t rows, int64_t heads, int64_t half, int64_t stride, \
                                      int64_t threads, T* x, const T* cosines, const T* sines) { \
    rotate(rows, heads, half, stride, threads, x, cosines, sines);                               \
  }

SURGE_ELEMENTWISE(float32, float)
SURGE_ELEMENTWISE(bfloat16, BFloat16)
