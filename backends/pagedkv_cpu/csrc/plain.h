// Products with weights of 16 bits, bf16 or fp16, and activations of the same; sums are float32.
//
// A panel is 16 outputs; its pairs of inputs follow one another, 64 bytes each, a last odd input beside zeros:
//     bf16   (w[o][2i], w[o][2i + 1]) of each output o      one instruction's operand, or two shifts to floats
//     fp16   w[0..15][2i], w[0..15][2i + 1]
//
// Every sum runs over its inputs in their order, however many rows and panels a tile has: a row's bits depend on the
// row alone.
#pragma once
#include "linear.h"

namespace PKV_ISA {

constexpr int PARTS = PANEL / W;
constexpr int TALL = W == 16 ? 8 : 4;            // rows of a tile whose sums fill the registers
constexpr int WIDE = PARTS < 4 ? 4 / PARTS : 1;  // panels for one row, whose additions would wait for each other
constexpr int NARROW = PARTS < 2 ? 2 : 1;        // panels for more rows
constexpr int STRIP = 64;                        // rows that stay in the second cache while all panels pass
constexpr int PAIR = 2 * PANEL;                  // weights of two inputs

// Weights of W outputs for two inputs, and one row's two inputs as they lie in the working memory.
template <int D>
struct Pair {
  static constexpr int BYTES = 8;
  vf even, odd;

  Pair(const uint16_t* from, int part) {
    if constexpr (D == PKV_BF16) {
      const vu both = *reinterpret_cast<const vu*>(from + part * 2 * W);
      const vu low = both << 16, high = both & 0xffff0000u;
      even = reinterpret_cast<const vf&>(low), odd = reinterpret_cast<const vf&>(high);
    } else {
      even = halves(from + part * W), odd = halves(from + PANEL + part * W);
    }
  }
  vf add(vf sum, const char* inputs) const {
    const float* x = reinterpret_cast<const float*>(inputs);
    return fma(splat(x[1]), odd, fma(splat(x[0]), even, sum));
  }
  static void inputs(const uint16_t* x, int64_t k, char* to) {
    float* wide = reinterpret_cast<float*>(to);
    widen(x, D, int(k), wide);
    if (k % 2) wide[k] = 0.0f;
  }
};

#if defined(__AVX512BF16__)
template <>
struct Pair<PKV_BF16> {
  static constexpr int BYTES = 4;
  __m512bh both;

  Pair(const uint16_t* from, int) : both((__m512bh)_mm512_loadu_si512(from)) {}
  vf add(vf sum, const char* inputs) const {
    int32_t x;
    memcpy(&x, inputs, 4);
    return _mm512_dpbf16_ps(sum, both, (__m512bh)_mm512_set1_epi32(x));
  }
  static void inputs(const uint16_t* x, int64_t k, char* to) {
    memcpy(to, x, size_t(k) * 2);
    if (k % 2) memset(to + k * 2, 0, 2);
  }
};
#endif

// A product: `x` are the rows' inputs, `out` [m][n].
template <int D>
struct Plain {
  const uint16_t* packed;
  const char* x;
  const uint16_t* bias;
  uint16_t* out;
  int64_t m, n, pairs;
};

template <int D>
static inline void finish(const Plain<D>& job, const float* sums, int64_t row, int64_t at) {
  const int width = int(job.n - at < PANEL ? job.n - at : PANEL);
  uint16_t* to = job.out + row * job.n + at;
  if (width == PANEL)
    for (int o = 0; o < PANEL; o += W)
      put<D>(to + o, job.bias ? load(sums + o) + take<D>(job.bias + at + o) : load(sums + o));
  else
    for (int o = 0; o < width; o++) to[o] = put1<D>(job.bias ? sums[o] + take1<D>(job.bias[at + o]) : sums[o]);
}

// Rows row .. row + ROWS - 1 times panels p .. p + PANELS - 1.
template <int D, int ROWS, int PANELS>
static void tile(const Plain<D>& job, int64_t row, int64_t p) {
  constexpr int VECTORS = PANELS * PARTS;
  const int64_t length = job.pairs * Pair<D>::BYTES, panel = job.pairs * PAIR;
  const uint16_t* w = job.packed + p * panel;
  const char* x = job.x + row * length;
  const bool streams = job.m <= FEW;
  vf sum[ROWS][VECTORS] = {};
  for (int64_t i = 0; i < job.pairs; i++, w += PAIR, x += Pair<D>::BYTES)
    for (int v = 0; v < VECTORS; v++) {
      const uint16_t* from = w + v / PARTS * panel;
      if (streams && v % PARTS == 0) __builtin_prefetch(from + AHEAD / 2);
      const Pair<D> pair(from, v % PARTS);
      for (int r = 0; r < ROWS; r++) sum[r][v] = pair.add(sum[r][v], x + r * length);
    }
  for (int r = 0; r < ROWS; r++) {
    float sums[VECTORS * W];
    for (int v = 0; v < VECTORS; v++) store(sums + v * W, sum[r][v]);
    for (int i = 0; i < PANELS; i++) finish(job, sums + i * PANEL, row + r, (p + i) * PANEL);
  }
}

// `count` of at most ROWS rows times panels p .. end - 1.
template <int D, int ROWS>
static void tiles(const Plain<D>& job, int64_t row, int count, int64_t p, int64_t end) {
  if constexpr (ROWS > 1)
    if (count < ROWS) return tiles<D, ROWS - 1>(job, row, count, p, end);
  constexpr int STEP = ROWS == 1 ? WIDE : NARROW;
  for (; p + STEP <= end; p += STEP) tile<D, ROWS, STEP>(job, row, p);
  for (; p < end; p++) tile<D, ROWS, 1>(job, row, p);
}

template <int D>
static void strip(const Plain<D>& job, int64_t first, int64_t last, int64_t p, int64_t end) {
  for (int64_t r = first; r < last; r += TALL) tiles<D, TALL>(job, r, int(last - r < TALL ? last - r : TALL), p, end);
}

template <int D>
static void plain(int64_t m, int64_t n, int64_t k, const void* x, const void* packed, const void* bias, void* out,
                  void* work, int threads) {
  const int64_t pairs = (k + 1) / 2, panels = (n + PANEL - 1) / PANEL, steps = (panels + WIDE - 1) / WIDE;
  const int64_t strips = (m + STRIP - 1) / STRIP;
  char* inputs = static_cast<char*>(work);
  const uint16_t* rows = static_cast<const uint16_t*>(x);
#pragma omp parallel for num_threads(threads) if (m >= 8)
  for (int64_t r = 0; r < m; r++) Pair<D>::inputs(rows + r * k, k, inputs + r * pairs * Pair<D>::BYTES);
  const Plain<D> job{static_cast<const uint16_t*>(packed),
                     inputs,
                     static_cast<const uint16_t*>(bias),
                     static_cast<uint16_t*>(out),
                     m,
                     n,
                     pairs};
  const auto end = [&](int64_t step) { return (step + 1) * WIDE < panels ? (step + 1) * WIDE : panels; };
  if (m <= FEW) {  // reading the weights is the work: each thread reads one stretch of memory
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t s = 0; s < steps; s++) strip(job, 0, m, s * WIDE, end(s));
    return;
  }
#pragma omp parallel for collapse(2) schedule(dynamic, 4) num_threads(threads)
  for (int64_t b = 0; b < strips; b++)
    for (int64_t s = 0; s < steps; s++)
      strip(job, b * STRIP, m < (b + 1) * STRIP ? m : (b + 1) * STRIP, s * WIDE, end(s));
}

static void pack_plain(int format, int64_t n, int64_t k, const void* weights, void* packed, int threads) {
  const int64_t pairs = (k + 1) / 2, panels = (n + PANEL - 1) / PANEL;
  const uint16_t* from = static_cast<const uint16_t*>(weights);
  const int output = format == PKV_PLAIN_BF16 ? 2 : 1, input = format == PKV_PLAIN_BF16 ? 1 : PANEL;
#pragma omp parallel for num_threads(threads)
  for (int64_t p = 0; p < panels; p++) {
    uint16_t* to = static_cast<uint16_t*>(packed) + p * pairs * PAIR;
    memset(to, 0, size_t(pairs * PAIR) * 2);
    for (int o = 0; o < PANEL && p * PANEL + o < n; o++)
      for (int64_t i = 0; i < k; i++) to[i / 2 * PAIR + o * output + i % 2 * input] = from[(p * PANEL + o) * k + i];
  }
}

static void linear(int format, int64_t m, int64_t n, int64_t k, const void* x, const void* packed, const void* bias,
                   void* out, void* work, int threads) {
  if (format == PKV_PLAIN_BF16)
    plain<PKV_BF16>(m, n, k, x, packed, bias, out, work, threads);
  else if (format == PKV_PLAIN_FP16)
    plain<PKV_FP16>(m, n, k, x, packed, bias, out, work, threads);
  else
    block_linear(format, m, n, k, static_cast<const float*>(x), packed, static_cast<const float*>(bias),
                 static_cast<float*>(out), work, threads);
}

static void pack(int format, int64_t n, int64_t k, const void* weights, void* packed, int threads) {
  if (format == PKV_PLAIN_BF16 || format == PKV_PLAIN_FP16)
    pack_plain(format, n, k, weights, packed, threads);
  else
    pack_blocks(format, n, k, weights, packed, threads);
}

}  // namespace PKV_ISA
