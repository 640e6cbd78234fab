// x W^T + b over weights packed in panels; see models/linear.py.

#include <algorithm>

#include "vectors.h"

namespace {

constexpr int W = kWidest;
constexpr int kPanel = 2 * W;  // columns of a panel
constexpr int kRows = 6;       // a register block: kRows x 2 vectors
constexpr int kBlock = 96;     // rows of x that stay in the second-level cache
constexpr int kDepth = 256;    // lines of a panel that stay in the first-level cache
constexpr int kDirect = 2;     // groups of rows for which a panel of bfloat16 is widened each time

// Adds the product of R rows of x and ``depth`` lines of a panel to sums [R, kPanel]. Meanwhile
// ``lines`` cache lines of what comes next are fetched for every eight lines of the panel: the
// hardware does not look that far ahead.
template <int R, class T>
inline void multiply(const float* x, int64_t stride, const T* panel, int64_t depth,
                     const char* ahead, int lines, float* sums) {
  Floats<W> a[R][2];
  for (int i = 0; i < R; ++i) {
    a[i][0] = load<W>(sums + i * kPanel);
    a[i][1] = load<W>(sums + i * kPanel + W);
  }
  auto step = [&](int64_t k) {
    Floats<W> low = load<W>(panel + k * kPanel), high = load<W>(panel + k * kPanel + W);
    for (int i = 0; i < R; ++i) {
      Floats<W> value = all<W>(x[i * stride + k]);
      a[i][0] += value * low;
      a[i][1] += value * high;
    }
  };
  int64_t k = 0;
  for (; k + 8 <= depth; k += 8) {
    for (int i = 0; i < lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    for (int j = 0; j < 8; ++j) step(k + j);
  }
  for (; k < depth; ++k) step(k);
  for (int i = 0; i < R; ++i) {
    store<W>(sums + i * kPanel, a[i][0]);
    store<W>(sums + i * kPanel + W, a[i][1]);
  }
}

template <class T>
inline void multiply_rows(int64_t rows, const float* x, int64_t stride, const T* panel,
                          int64_t depth, const char* ahead, int lines, float* sums) {
  switch (rows) {
    case 1: return multiply<1>(x, stride, panel, depth, ahead, lines, sums);
    case 2: return multiply<2>(x, stride, panel, depth, ahead, lines, sums);
    case 3: return multiply<3>(x, stride, panel, depth, ahead, lines, sums);
    case 4: return multiply<4>(x, stride, panel, depth, ahead, lines, sums);
    case 5: return multiply<5>(x, stride, panel, depth, ahead, lines, sums);
    case 6: return multiply<6>(x, stride, panel, depth, ahead, lines, sums);
  }
}

// A panel times up to kBlock rows.
template <class T>
inline void multiply_panel(int64_t rows, int64_t depth, const float* x, const T* panel,
                           const float* bias, int64_t columns, float* out, int64_t out_stride) {
  alignas(64) float sums[kBlock * kPanel];
  alignas(64) float wide[std::is_same_v<T, float> ? 1 : kDepth * kPanel];
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < kPanel; ++c) sums[r * kPanel + c] = bias ? bias[c] : 0.0f;
  const int64_t parts = (depth + kDepth - 1) / kDepth, groups = (rows + kRows - 1) / kRows;
  const int64_t eight = 8 * kPanel * sizeof(T) / 64;  // cache lines of eight lines of the panel
  const int64_t lines = (eight + groups - 1) / groups;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = depth * part / parts, size = depth * (part + 1) / parts - first;
    const T* own = panel + first * kPanel;
    auto each_group = [&](const auto* from) {
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t row = rows * g / groups;
        const T* next = own + (size + size * g / groups) * kPanel;
        multiply_rows(rows * (g + 1) / groups - row, x + row * depth + first, depth, from, size,
                      reinterpret_cast<const char*>(next), lines, sums + row * kPanel);
      }
    };
    if constexpr (!std::is_same_v<T, float>) {
      if (groups > kDirect) {
        for (int64_t i = 0; i < size * kPanel; i += W) store<W>(wide + i, load<W>(own + i));
        each_group(wide);
        continue;
      }
    }
    each_group(own);
  }
  for (int64_t r = 0; r < rows; ++r)
    std::copy_n(sums + r * kPanel, columns, out + r * out_stride);
}

template <class T>
void linear(int64_t rows, int64_t depth, int64_t columns, int64_t threads, const float* x,
            const T* panels, const float* bias, float* out) {
  const int64_t count = (columns + kPanel - 1) / kPanel;
  const int64_t blocks = (rows + kBlock - 1) / kBlock;
#pragma omp parallel for num_threads(threads) schedule(guided) collapse(2)
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t p = 0; p < count; ++p) {
      const int64_t first = rows * block / blocks;
      multiply_panel(rows * (block + 1) / blocks - first, depth, x + first * depth,
                     panels + p * depth * kPanel, bias ? bias + p * kPanel : nullptr,
                     std::min<int64_t>(kPanel, columns - p * kPanel),
                     out + first * columns + p * kPanel, columns);
    }
  }
}

}  // namespace

extern "C" {

int64_t surge_panel_columns() { return kPanel; }

// x [rows, depth], panels [ceil(columns / kPanel), depth, kPanel], bias the same columns or null,
// out [rows, columns]. A row's result depends on no other row, nor on the number of threads. It is
// the same from panels in bfloat16 as from the same numbers in float32.
void surge_linear_float32(int64_t rows, int64_t depth, int64_t columns, int64_t threads,
                          const float* x, const float* panels, const float* bias, float* out) {
  linear(rows, depth, columns, threads, x, panels, bias, out);
}

void surge_linear_bfloat16(int64_t rows, int64_t depth, int64_t columns, int64_t threads,
                           const float* x, const BFloat16* panels, const float* bias, float* out) {
  linear(rows, depth, columns, threads, x, panels, bias, out);
}

}  // extern "C"
