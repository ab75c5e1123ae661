// Norms, turns and gates: float32 rows, each computed on its own.
#pragma once
#include "simd.h"

namespace PKV_ISA {

static void add_rms_norm(int64_t m, int64_t dim, const float* x, float* residual, const float* weight, float eps,
                         float* out, int threads) {
  const int64_t whole = dim / W * W;
#pragma omp parallel for num_threads(threads) if (m * dim >= 32768)
  for (int64_t r = 0; r < m; r++) {
    float *line = residual + r * dim, *to = out + r * dim;
    const float* added = x ? x + r * dim : nullptr;
    vf squares = vf{};
    float rest = 0;
    for (int64_t d = 0; d < whole; d += W) {
      vf v = load(line + d);
      if (added) store(line + d, v = v + load(added + d));
      squares = fma(v, v, squares);
    }
    for (int64_t d = whole; d < dim; d++) {
      if (added) line[d] += added[d];
      rest = fmaf(line[d], line[d], rest);
    }
    const float factor = 1.0f / sqrtf((sum(squares) + rest) / float(dim) + eps);
    for (int64_t d = 0; d < whole; d += W) store(to + d, load(line + d) * splat(factor) * load(weight + d));
    for (int64_t d = whole; d < dim; d++) to[d] = line[d] * factor * weight[d];
  }
}

static void turn(float* head, int half, const float* cosines, const float* sines) {
  int i = 0;
  for (; i + W <= half; i += W) {
    const vf left = load(head + i), right = load(head + half + i), c = load(cosines + i), s = load(sines + i);
    store(head + i, left * c - right * s);
    store(head + half + i, right * c + left * s);
  }
  for (; i < half; i++) {
    const float left = head[i], right = head[half + i];
    head[i] = left * cosines[i] - right * sines[i];
    head[half + i] = right * cosines[i] + left * sines[i];
  }
}

static void rope(int64_t m, int32_t q_heads, int32_t kv_heads, int32_t rotary, float* q, int64_t q_stride, float* k,
                 int64_t k_stride, int64_t head_stride, const float* cosines, const float* sines, int threads) {
  const int half = rotary / 2;
#pragma omp parallel for num_threads(threads) if (m >= 64)
  for (int64_t r = 0; r < m; r++) {
    for (int h = 0; h < q_heads; h++)
      turn(q + r * q_stride + h * head_stride, half, cosines + r * half, sines + r * half);
    for (int h = 0; h < kv_heads; h++)
      turn(k + r * k_stride + h * head_stride, half, cosines + r * half, sines + r * half);
  }
}

// gate / (1 + e^u): u = -gate for silu, u = -2 sqrt(2 / pi) (gate + 0.044715 gate^3) for gelu by its tanh form.
static inline vf gate_of(int kind, vf g) {
  vf u = -g;
  if (kind == 1) u = splat(-1.5957691216f) * g * (splat(1.0f) + splat(0.044715f) * g * g);
  const vi shut = u > splat(88.0f);  // further than vexp goes
  return select(shut, vf{}, g / (splat(1.0f) + vexp(select(shut, vf{}, u))));
}

static void gated(int kind, int64_t m, int64_t dim, const float* x, float* out, int threads) {
  const int64_t whole = dim / W * W;
#pragma omp parallel for num_threads(threads) if (m * dim >= 16384)
  for (int64_t r = 0; r < m; r++) {
    const float *gate = x + r * 2 * dim, *up = gate + dim;
    float* to = out + r * dim;
    for (int64_t d = 0; d < whole; d += W) store(to + d, gate_of(kind, load(gate + d)) * load(up + d));
    if (whole < dim) {  // the same steps on a padded vector
      float g[W] = {}, result[W];
      memcpy(g, gate + whole, size_t(dim - whole) * 4);
      store(result, gate_of(kind, load(g)));
      for (int64_t d = whole; d < dim; d++) to[d] = result[d - whole] * up[d];
    }
  }
}

}  // namespace PKV_ISA
