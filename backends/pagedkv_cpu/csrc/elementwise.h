// Norms, turns and gates: rows of any dtype, computed in float32 and rounded once, each row on its own.
#pragma once
#include "simd.h"

namespace PKV_ISA {

template <int D, int WD>
static void norm_rows(int64_t m, int64_t dim, const void* x, void* residual, const void* weights, float eps, void* out,
                      int threads) {
  const int64_t whole = dim / W * W;
  const number<WD>* weight = static_cast<const number<WD>*>(weights);
#pragma omp parallel for num_threads(threads) if (m * dim >= 32768)
  for (int64_t r = 0; r < m; r++) {
    number<D>*line = static_cast<number<D>*>(residual) + r * dim, *to = static_cast<number<D>*>(out) + r * dim;
    const number<D>* added = x ? static_cast<const number<D>*>(x) + r * dim : nullptr;
    vf squares = vf{};
    float rest = 0;
    for (int64_t d = 0; d < whole; d += W) {
      if (added) put<D>(line + d, take<D>(line + d) + take<D>(added + d));
      const vf v = take<D>(line + d);
      squares = fma(v, v, squares);
    }
    for (int64_t d = whole; d < dim; d++) {
      if (added) line[d] = put1<D>(take1<D>(line[d]) + take1<D>(added[d]));
      rest = fmaf(take1<D>(line[d]), take1<D>(line[d]), rest);
    }
    const float factor = 1.0f / sqrtf((sum(squares) + rest) / float(dim) + eps);
    for (int64_t d = 0; d < whole; d += W) put<D>(to + d, take<D>(line + d) * splat(factor) * take<WD>(weight + d));
    for (int64_t d = whole; d < dim; d++) to[d] = put1<D>(take1<D>(line[d]) * factor * take1<WD>(weight[d]));
  }
}

static void add_rms_norm(int dtype, int weight_dtype, int64_t m, int64_t dim, const void* x, void* residual,
                         const void* weight, float eps, void* out, int threads) {
  const bool wide = weight_dtype == PKV_FP32;
  auto rows = norm_rows<PKV_FP32, PKV_FP32>;
  if (dtype == PKV_BF16) rows = wide ? norm_rows<PKV_BF16, PKV_FP32> : norm_rows<PKV_BF16, PKV_BF16>;
  if (dtype == PKV_FP16) rows = wide ? norm_rows<PKV_FP16, PKV_FP32> : norm_rows<PKV_FP16, PKV_FP16>;
  rows(m, dim, x, residual, weight, eps, out, threads);
}

template <int D>
static void turn(number<D>* head, int half, const float* cosines, const float* sines) {
  int i = 0;
  for (; i + W <= half; i += W) {
    const vf left = take<D>(head + i), right = take<D>(head + half + i), c = load(cosines + i), s = load(sines + i);
    put<D>(head + i, left * c - right * s);
    put<D>(head + half + i, right * c + left * s);
  }
  for (; i < half; i++) {
    const float left = take1<D>(head[i]), right = take1<D>(head[half + i]);
    head[i] = put1<D>(left * cosines[i] - right * sines[i]);
    head[half + i] = put1<D>(right * cosines[i] + left * sines[i]);
  }
}

template <int D>
static void turn_rows(int64_t m, int32_t q_heads, int32_t kv_heads, int32_t rotary, void* q, int64_t q_stride, void* k,
                      int64_t k_stride, int64_t head_stride, const float* cosines, const float* sines, int threads) {
  const int half = rotary / 2;
#pragma omp parallel for num_threads(threads) if (m >= 64)
  for (int64_t r = 0; r < m; r++) {
    number<D>*queries = static_cast<number<D>*>(q) + r * q_stride, *keys = static_cast<number<D>*>(k) + r * k_stride;
    for (int h = 0; h < q_heads; h++) turn<D>(queries + h * head_stride, half, cosines + r * half, sines + r * half);
    for (int h = 0; h < kv_heads; h++) turn<D>(keys + h * head_stride, half, cosines + r * half, sines + r * half);
  }
}

static void rope(int dtype, int64_t m, int32_t q_heads, int32_t kv_heads, int32_t rotary, void* q, int64_t q_stride,
                 void* k, int64_t k_stride, int64_t head_stride, const float* cosines, const float* sines,
                 int threads) {
  const auto rows = dtype == PKV_BF16   ? turn_rows<PKV_BF16>
                    : dtype == PKV_FP16 ? turn_rows<PKV_FP16>
                                        : turn_rows<PKV_FP32>;
  rows(m, q_heads, kv_heads, rotary, q, q_stride, k, k_stride, head_stride, cosines, sines, threads);
}

// gate / (1 + e^u): u = -gate for silu, u = -2 sqrt(2 / pi) (gate + 0.044715 gate^3) for gelu by its tanh form.
static inline vf gate_of(int kind, vf g) {
  vf u = -g;
  if (kind == 1) u = splat(-1.5957691216f) * g * (splat(1.0f) + splat(0.044715f) * g * g);
  const vi shut = u > splat(88.0f);  // further than vexp goes
  return select(shut, vf{}, g / (splat(1.0f) + vexp(select(shut, vf{}, u))));
}

template <int D>
static void gated_rows(int kind, int64_t m, int64_t dim, const void* x, void* out, int threads) {
  const int64_t whole = dim / W * W;
#pragma omp parallel for num_threads(threads) if (m * dim >= 16384)
  for (int64_t r = 0; r < m; r++) {
    const number<D>*gate = static_cast<const number<D>*>(x) + r * 2 * dim, *up = gate + dim;
    number<D>* to = static_cast<number<D>*>(out) + r * dim;
    for (int64_t d = 0; d < whole; d += W) put<D>(to + d, gate_of(kind, take<D>(gate + d)) * take<D>(up + d));
    if (whole < dim) {  // the same steps on a padded vector
      float g[W] = {}, result[W];
      for (int64_t d = whole; d < dim; d++) g[d - whole] = take1<D>(gate[d]);
      store(result, gate_of(kind, load(g)));
      for (int64_t d = whole; d < dim; d++) to[d] = put1<D>(result[d - whole] * take1<D>(up[d]));
    }
  }
}

static void gated(int dtype, int kind, int64_t m, int64_t dim, const void* x, void* out, int threads) {
  const auto rows = dtype == PKV_BF16   ? gated_rows<PKV_BF16>
                    : dtype == PKV_FP16 ? gated_rows<PKV_FP16>
                                        : gated_rows<PKV_FP32>;
  rows(kind, m, dim, x, out, threads);
}

}  // namespace PKV_ISA
