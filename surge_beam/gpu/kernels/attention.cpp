// Attention over the paged KV pool by a plan: append, work units, merge; see cpu_attention.py.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

extern "C" {

// What a plan fixes for all layers. A unit lets some rows see some keys of one item.
struct AttentionUnits {
  int64_t kv_heads, group, dim;
  int64_t head_stride, slot_stride;  // of the pool
  int64_t page_size;
  int64_t window;  // 0: none
  int64_t appended, units, merged, threads;
  float scale;
  const int64_t* new_slots;       // [appended], where the new keys and values go
  const int64_t* positions;       // [tokens]
  const int64_t* first_key;       // [units], position
  const int64_t* last_key;        // [units], position after the last one
  const int64_t* page_base;       // [units], place in pages of the page that holds position 0
  const int64_t* first_row;       // [units], place in rows
  const int64_t* row_count;       // [units]
  const int64_t* first_part;      // [units], partial result of the first row; -1: no other part
  const int64_t* rows;            // packed tokens
  const int64_t* pages;
  const int64_t* merged_rows;     // [merged], tokens that have parts
  const int64_t* merged_offsets;  // [merged + 1]
  const int64_t* merged_parts;    // numbers of parts
  float* outputs;               // [parts, kv_heads * group, dim]
  float* log_sums;              // [parts, kv_heads * group]
};

}  // extern "C"

namespace {

constexpr int kKeys = 64;  // scores of a block of keys stay in the first-level cache
constexpr int kSome = 32;  // keys whose values are read between two rounds of prefetches
constexpr int kRows = 3;   // a register block: kRows x 4 vectors
constexpr int kTall = 6;   // or kTall x 2
constexpr int kPack = 24;  // from so many queries on, transposing a block of keys pays
constexpr float kNothing = -std::numeric_limits<float>::infinity();

struct Scratch {
  std::vector<float> query, scores, peaks, sums, output, packed;
  std::vector<int64_t> begins, ends;
};

// Pages lie anywhere, so the processor cannot foresee which one comes next.
template <class T>
inline void prefetch(const T* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(row + d);
}

template <int W, int R, class T>
inline void score_block(const float* query, int64_t dim, const T* const* keys, float* scores) {
  Floats<W> a[R][4] = {};
  for (int64_t d = 0; d < dim; d += W) {
    Floats<W> q[R];
    for (int i = 0; i < R; ++i) q[i] = load<W>(query + i * dim + d);
    for (int j = 0; j < 4; ++j) {
      Floats<W> k = load<W>(keys[j] + d);
      for (int i = 0; i < R; ++i) a[i][j] += q[i] * k;
    }
  }
  for (int i = 0; i < R; ++i)
    store<4>(scores + i * kKeys, sums<W>(a[i][0], a[i][1], a[i][2], a[i][3]));
}

template <int W, class T>
inline void score(const float* query, int64_t queries, int64_t dim, const T* const* keys,
                  const T* const* values, int64_t count, float* scores) {
  for (int64_t k = 0; k < count; k += 4) {
    for (int64_t j = k; j < k + 4; ++j) prefetch(values[j], dim);
    int64_t i = 0;
    for (; i + kRows <= queries; i += kRows)
      score_block<W, kRows>(query + i * dim, dim, keys + k, scores + i * kKeys + k);
    for (; i < queries; ++i)
      score_block<W, 1>(query + i * dim, dim, keys + k, scores + i * kKeys + k);
  }
}

// Keys as columns: packed[d * kKeys + k]. ``count`` and ``dim`` are multiples of 4.
template <class T>
inline void transpose(const T* const* keys, int64_t count, int64_t dim, float* packed) {
  for (int64_t k = 0; k < count; k += 4) {
    for (int64_t d = 0; d < dim; d += 4) {
      Floats<4> a = load<4>(keys[k] + d), b = load<4>(keys[k + 1] + d);
      Floats<4> c = load<4>(keys[k + 2] + d), e = load<4>(keys[k + 3] + d);
      Floats<4> ab = __builtin_shufflevector(a, b, 0, 4, 1, 5);
      Floats<4> ce = __builtin_shufflevector(c, e, 0, 4, 1, 5);
      Floats<4> ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      Floats<4> ce_high = __builtin_shufflevector(c, e, 2, 6, 3, 7);
      float* to = packed + d * kKeys + k;
      store<4>(to, __builtin_shufflevector(ab, ce, 0, 1, 4, 5));
      store<4>(to + kKeys, __builtin_shufflevector(ab, ce, 2, 3, 6, 7));
      store<4>(to + 2 * kKeys, __builtin_shufflevector(ab_high, ce_high, 0, 1, 4, 5));
      store<4>(to + 3 * kKeys, __builtin_shufflevector(ab_high, ce_high, 2, 3, 6, 7));
    }
  }
}

template <int W, int R>
inline void score_packed(const float* query, int64_t dim, const float* packed, int64_t count,
                         float* scores) {
  for (int64_t k = 0; k < count; k += 2 * W) {
    Floats<W> a[R][2] = {};
    for (int64_t d = 0; d < dim; ++d) {
      Floats<W> low = load<W>(packed + d * kKeys + k), high = load<W>(packed + d * kKeys + k + W);
      for (int i = 0; i < R; ++i) {
        Floats<W> q = all<W>(query[i * dim + d]);
        a[i][0] += q * low;
        a[i][1] += q * high;
      }
    }
    for (int i = 0; i < R; ++i) {
      store<W>(scores + i * kKeys + k, a[i][0]);
      store<W>(scores + i * kKeys + k + W, a[i][1]);
    }
  }
}

template <int W, class T>
inline void score_tall(Scratch& s, int64_t queries, int64_t dim, const T* const* keys,
                       const T* const* values, int64_t filled) {
  transpose(keys, filled, dim, s.packed.data());
  for (int64_t k = 0; k < filled; ++k) prefetch(values[k], dim);
  auto block = [&](auto rows, int64_t i) {
    constexpr int R = decltype(rows)::value;
    const int64_t end = *std::max_element(s.ends.data() + i, s.ends.data() + i + R);
    score_packed<W, R>(s.query.data() + i * dim, dim, s.packed.data(), end,
                       s.scores.data() + i * kKeys);
  };
  int64_t i = 0;
  for (; i + kTall <= queries; i += kTall) block(std::integral_constant<int, kTall>(), i);
  for (; i < queries; ++i) block(std::integral_constant<int, 1>(), i);
}

template <int W, int R, int V, class T>
inline void weigh_block(const float* weights, const T* const* values, int64_t count, int64_t d,
                        int64_t dim, float* output) {
  Floats<W> a[R][V];
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < V; ++j) a[i][j] = load<W>(output + i * dim + d + j * W);
  for (int64_t k = 0; k < count; ++k) {
    const T* row = values[k] + d;
    Floats<W> w[R];
    for (int i = 0; i < R; ++i) w[i] = all<W>(weights[i * kKeys + k]);
    for (int j = 0; j < V; ++j) {
      Floats<W> v = load<W>(row + j * W);
      for (int i = 0; i < R; ++i) a[i][j] += w[i] * v;
    }
  }
  for (int i = 0; i < R; ++i)
    for (int j = 0; j < V; ++j) store<W>(output + i * dim + d + j * W, a[i][j]);
}

template <int W, int R, class T>
inline void weigh_rows(const float* weights, const T* const* values, int64_t count, int64_t dim,
                       float* output) {
  int64_t d = 0;
  for (; d + 4 * W <= dim; d += 4 * W)
    weigh_block<W, R, 4>(weights, values, count, d, dim, output);
  for (; d < dim; d += W) weigh_block<W, R, 1>(weights, values, count, d, dim, output);
}

// Where the keys ``first`` and after of a unit and head lie in the pool; how many, a block at most.
inline int64_t locate(const AttentionUnits& p, int64_t unit, int64_t head, int64_t first,
                      int64_t* offsets) {
  const int64_t* pages = p.pages + p.page_base[unit];
  const int64_t size = std::min<int64_t>(kKeys, p.last_key[unit] - first);
  int64_t page = first / p.page_size, inside = first % p.page_size;
  for (int64_t k = 0; k < size; ++k) {
    offsets[k] = head * p.head_stride + (pages[page] * p.page_size + inside) * p.slot_stride;
    if (++inside == p.page_size) inside = 0, ++page;
  }
  return size;
}

// A piece of work is a unit for one head. Work ``then`` is probably what this thread does next.
template <int W, class T>
void attend_unit(const AttentionUnits& p, int64_t work, int64_t then, const T* keys,
                 const T* values, const T* query, int64_t query_stride, T* out,
                 int64_t out_stride, Scratch& s) {
  const int64_t unit = work / p.kv_heads, head = work % p.kv_heads;
  const int64_t dim = p.dim, group = p.group, heads = p.kv_heads * group;
  const int64_t* rows = p.rows + p.first_row[unit];
  const int64_t count = p.row_count[unit], queries = count * group;
  s.query.resize(queries * dim);
  s.output.assign(queries * dim, 0.0f);
  s.scores.resize(queries * kKeys);
  s.peaks.assign(queries, kNothing);
  s.sums.assign(queries, 0.0f);
  s.begins.resize(queries);
  s.ends.resize(queries);
  const bool tall = queries >= kPack;
  if (tall) s.packed.resize(dim * kKeys);

  for (int64_t r = 0; r < count; ++r) {
    const T* from = query + rows[r] * query_stride + head * group * dim;
    float* to = s.query.data() + r * group * dim;
    for (int64_t d = 0; d < group * dim; d += W) store<W>(to + d, load<W>(from + d) * p.scale);
  }
  const int64_t begin = p.first_key[unit], end = p.last_key[unit];
  int64_t offsets[2][kKeys];  // of this block's keys in the pool, and of what is read next
  const T *key_rows[kKeys], *value_rows[kKeys];
  int64_t size = locate(p, unit, head, begin, offsets[0]);
  for (int64_t first = begin, turn = 0; first < end; first += kKeys, turn ^= 1) {
    for (int64_t k = 0; k < size; ++k) {
      key_rows[k] = keys + offsets[turn][k];
      value_rows[k] = values + offsets[turn][k];
    }
    const int64_t step = tall ? 2 * W : std::max(W, 4);
    const int64_t filled = (size + step - 1) / step * step;
    for (int64_t k = size; k < filled; ++k) {
      key_rows[k] = key_rows[size - 1];
      value_rows[k] = value_rows[size - 1];
    }
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t position = p.positions[rows[i / group]];
      s.ends[i] = std::clamp<int64_t>(position + 1 - first, 0, size);
      s.begins[i] =
          p.window ? std::clamp<int64_t>(position - p.window + 1 - first, 0, s.ends[i]) : 0;
    }
    if (tall)
      score_tall<W>(s, queries, dim, key_rows, value_rows, filled);
    else
      score<W>(s.query.data(), queries, dim, key_rows, value_rows, filled, s.scores.data());

    for (int64_t i = 0; i < queries; ++i) {
      float* scores = s.scores.data() + i * kKeys;
      const int64_t seen = (s.ends[i] + W - 1) / W * W;
      std::fill(scores + seen, scores + filled, 0.0f);
      if (s.begins[i] == s.ends[i]) {
        std::fill(scores, scores + seen, 0.0f);
        continue;
      }
      std::fill(scores + s.ends[i], scores + seen, kNothing);
      std::fill(scores, scores + s.begins[i], kNothing);
      Floats<W> highest_scores = all<W>(kNothing);
      for (int64_t k = 0; k < seen; k += W) {
        Floats<W> x = load<W>(scores + k);
        highest_scores = x > highest_scores ? x : highest_scores;
      }
      const float before = s.peaks[i], peak = std::max(before, largest<W>(highest_scores));
      Floats<W> total{};
      for (int64_t k = 0; k < seen; k += W) {
        Floats<W> weight = exponential<W>(load<W>(scores + k) - peak);
        store<W>(scores + k, weight);
        total += weight;
      }
      s.peaks[i] = peak;
      if (before == peak || before == kNothing) {
        s.sums[i] += sum<W>(total);
      } else {
        const float fade = std::exp(before - peak);
        s.sums[i] = s.sums[i] * fade + sum<W>(total);
        float* output = s.output.data() + i * dim;
        for (int64_t d = 0; d < dim; d += W) store<W>(output + d, load<W>(output + d) * fade);
      }
    }
    int64_t ahead = 0;
    if (first + kKeys < end)
      ahead = locate(p, unit, head, first + kKeys, offsets[turn ^ 1]);
    else if (const int64_t other = then / p.kv_heads; other < p.units)
      ahead = locate(p, other, then % p.kv_heads, p.first_key[other], offsets[turn ^ 1]);
    for (int64_t k = 0; k < size; k += kSome) {
      const int64_t until = k + kSome < size ? std::min<int64_t>(ahead, k + kSome) : ahead;
      for (int64_t j = k; j < until; ++j) prefetch(keys + offsets[turn ^ 1][j], dim);
      int64_t i = 0;
      for (; i + kRows <= queries; i += kRows) {
        const int64_t end = *std::max_element(s.ends.data() + i, s.ends.data() + i + kRows);
        weigh_rows<W, kRows>(s.scores.data() + i * kKeys + k, value_rows + k,
                             std::min<int64_t>(kSome, end - k), dim, s.output.data() + i * dim);
      }
      for (; i < queries; ++i)
        weigh_rows<W, 1>(s.scores.data() + i * kKeys + k, value_rows + k,
                         std::min<int64_t>(kSome, s.ends[i] - k), dim, s.output.data() + i * dim);
    }
    size = ahead;
  }

  for (int64_t r = 0; r < count; ++r) {
    for (int64_t g = 0; g < group; ++g) {
      const int64_t i = r * group + g, h = head * group + g;
      const float* from = s.output.data() + i * dim;
      const float factor = s.sums[i] > 0.0f ? 1.0f / s.sums[i] : 0.0f;
      if (p.first_part[unit] < 0) {
        T* to = out + rows[r] * out_stride + h * dim;
        for (int64_t d = 0; d < dim; d += W) store<W>(to + d, load<W>(from + d) * factor);
      } else {
        const int64_t part = (p.first_part[unit] + r) * heads + h;
        float* to = p.outputs + part * dim;
        for (int64_t d = 0; d < dim; d += W) store<W>(to + d, load<W>(from + d) * factor);
        p.log_sums[part] =
            s.sums[i] > 0.0f ? s.peaks[i] + std::log(s.sums[i]) : kNothing;
      }
    }
  }
}

// Merges the partial results of one head of a row (log-sum-exp).
template <int W, class T>
void merge(const AttentionUnits& p, int64_t row, int64_t head, T* out, Scratch& s) {
  const int64_t heads = p.kv_heads * p.group;
  const int64_t* of_row = p.merged_parts + p.merged_offsets[row];
  const int64_t parts = p.merged_offsets[row + 1] - p.merged_offsets[row];
  float peak = kNothing, total = 0.0f;
  s.sums.resize(parts);
  for (int64_t i = 0; i < parts; ++i) {
    s.sums[i] = p.log_sums[of_row[i] * heads + head];
    peak = std::max(peak, s.sums[i]);
  }
  for (int64_t i = 0; i < parts; ++i) total += s.sums[i] = std::exp(s.sums[i] - peak);
  for (int64_t d = 0; d < p.dim; d += W) {
    Floats<W> x{};
    for (int64_t i = 0; i < parts; ++i)
      x += load<W>(p.outputs + (of_row[i] * heads + head) * p.dim + d) * (s.sums[i] / total);
    store<W>(out + head * p.dim + d, x);
  }
}

template <class T>
void append(const AttentionUnits& p, int64_t token, T* pool, const T* from) {
  for (int64_t head = 0; head < p.kv_heads; ++head)
    std::memcpy(pool + head * p.head_stride + p.new_slots[token] * p.slot_stride,
                from + head * p.dim, p.dim * sizeof(T));
}

template <int W, class T>
void attend(const AttentionUnits& p, T* keys, T* values, const T* query, int64_t query_stride,
            const T* key, int64_t key_stride, const T* value, int64_t value_stride, T* out) {
  const int64_t heads = p.kv_heads * p.group, out_stride = heads * p.dim;
#pragma omp parallel num_threads(p.threads)
  {
    static thread_local Scratch scratch;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < p.appended; ++t) {
      append(p, t, keys, key + t * key_stride);
      append(p, t, values, value + t * value_stride);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t work = 0; work < p.units * p.kv_heads; ++work)
      attend_unit<W>(p, work, work + p.threads, keys, values, query, query_stride, out, out_stride,
                     scratch);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < p.merged; ++r)
      for (int64_t h = 0; h < heads; ++h)
        merge<W>(p, r, h, out + p.merged_rows[r] * out_stride, scratch);
  }
}

template <class T>
void dispatch(const AttentionUnits& p, T* keys, T* values, const T* query, int64_t query_stride,
              const T* key, int64_t key_stride, const T* value, int64_t value_stride, T* out) {
  by_width(p.dim, [&](auto w) {
    attend<decltype(w)::value>(p, keys, values, query, query_stride, key, key_stride, value,
                               value_stride, out);
  });
}

}  // namespace

extern "C" {

void surge_attend_float32(const AttentionUnits* p, float* keys, float* values, const float* query,
                          int64_t query_stride, const float* key, int64_t key_stride,
                          const float* value, int64_t value_stride, float* out) {
  dispatch(*p, keys, values, query, query_stride, key, key_stride, value, value_stride, out);
}

void surge_attend_bfloat16(const AttentionUnits* p, BFloat16* keys, BFloat16* values,
                           const BFloat16* query, int64_t query_stride, const BFloat16* key,
                           int64_t key_stride, const BFloat16* value, int64_t value_stride,
                           BFloat16* out) {
  dispatch(*p, keys, values, query, query_stride, key, key_stride, value, value_stride, out);
}

}  // extern "C"
