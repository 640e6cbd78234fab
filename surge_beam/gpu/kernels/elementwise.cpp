// What stands between the products of a layer, each in one pass: of a decoder (operations.py), and of
// an encoder (models/elementwise.py).

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

// The error function: odd, x P(x^2) / Q(x^2), fitted to 2e-8 up to 4, where it is 1 in float32.
template <int W>
inline Floats<W> error_function(Floats<W> x) {
  x = x < all<W>(-4.0f) ? all<W>(-4.0f) : x;  // NaN stays
  x = x > all<W>(4.0f) ? all<W>(4.0f) : x;
  const Floats<W> t = x * x;
  Floats<W> p = all<W>(1.974841097762692e-06f), q = all<W>(3.748083327081986e-05f);
  p = p * t + 2.880386891774833e-04f;
  p = p * t + 4.003547132015228e-03f;
  p = p * t + 5.346717685461044e-02f;
  p = p * t + 1.9624674320220947e-01f;
  p = p * t + 1.128378987312317f;
  q = q * t + 1.2163349892944098e-03f;
  q = q * t + 1.5444225631654263e-02f;
  q = q * t + 1.1647549271583557e-01f;
  q = q * t + 5.072503089904785e-01f;
  q = q * t + 1.0f;
  return x * p / q;
}

void gelu(int64_t count, int64_t threads, float* x) {
  by_width(count, [=](auto w) {
    constexpr int W = decltype(w)::value;
#pragma omp parallel for num_threads(threads) if (count > kSmall)
    for (int64_t i = 0; i < count; i += W) {
      const Floats<W> v = load<W>(x + i);
      store<W>(x + i, 0.5f * v * (error_function<W>(v * 0.70710678118654752f) + 1.0f));
    }
  });
}

void add_layer_norm(int64_t rows, int64_t width, int64_t threads, float eps, float* x,
                    const float* added, const float* weight, const float* bias) {
  by_width(width, [=](auto w) {
    constexpr int W = decltype(w)::value;
#pragma omp parallel for num_threads(threads) if (rows * width > kSmall)
    for (int64_t r = 0; r < rows; ++r) {
      float* row = x + r * width;
      Floats<W> total{}, squares{};
      for (int64_t i = 0; i < width; i += W) {
        if (added) store<W>(row + i, load<W>(row + i) + load<W>(added + r * width + i));
        total += load<W>(row + i);
      }
      const float mean = sum<W>(total) / width;
      for (int64_t i = 0; i < width; i += W) {
        const Floats<W> v = load<W>(row + i) - mean;
        squares += v * v;
      }
      const float factor = 1.0f / std::sqrt(sum<W>(squares) / width + eps);
      for (int64_t i = 0; i < width; i += W)
        store<W>(row + i, (load<W>(row + i) - mean) * factor * load<W>(weight + i) +
                              load<W>(bias + i));
    }
  });
}

}  // namespace

extern "C" {

void surge_gelu_float32(int64_t count, int64_t threads, float* x) { gelu(count, threads, x); }

void surge_add_layer_norm_float32(int64_t rows, int64_t width, int64_t threads, float eps, float* x,
                                  const float* added, const float* weight, const float* bias) {
  add_layer_norm(rows, width, threads, eps, x, added, weight, bias);
}

}  // extern "C"

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
