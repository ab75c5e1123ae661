// Products with weights that stay packed as GGUF has them, and activations rounded to 8 bits in groups of 32.
//
// A panel is 16 outputs; its groups of 32 inputs follow one another:
//     Q4_0   half d[16]             codes 256 bytes    w = d (q - 8)
//     Q4_1   half d[16], half m[16] codes 256 bytes    w = d q + m
//     Q8_0   half d[16]             codes 512 bytes    w = d q
// 64 bytes of codes are 16 outputs x 4 inputs of one step; a 4-bit byte holds step s low and step s + 4 high.
//
// x = e c with codes c of -127..127 and one float e for each group. With whole numbers S = sum q c and C = sum c:
//     Q4_0   d e S - 8 d e C        Q4_1   d e S + m e C        Q8_0   d e S
// Whole numbers are exact; the groups are added in their order: a row's bits depend on the row alone.
#pragma once
#include "simd.h"

namespace PKV_ISA {

constexpr int PANEL = 16, GROUP = 32, STEPS = 8;
constexpr int ROWS = 32;     // rows of a tile: their sums stay in the first cache
constexpr int FEW = 8;       // up to so many rows memory is the limit
constexpr int AHEAD = 2048;  // bytes of weights asked for ahead: processors do not look beyond a page
constexpr int BLOCK = 256;   // rows whose codes stay in the second cache while all panels pass

static inline int group_bytes(int format) {
  return format == PKV_Q4_0 ? 32 + 256 : format == PKV_Q4_1 ? 64 + 256 : 32 + 512;
}

// The largest size of one group. Sizes are compared by their bits: a NaN is larger than any number and is kept.
static inline float largest_of(const float* x) {
  vi top = vi{};
  for (int i = 0; i < GROUP; i += W) {
    const vf v = load(x + i);
    const vi size = reinterpret_cast<const vi&>(v) & 0x7fffffff;
    top = size > top ? size : top;
  }
  int32_t bits = 0;
  for (int i = 0; i < W; i++) bits = top[i] > bits ? top[i] : bits;
  float largest;
  memcpy(&largest, &bits, 4);
  return largest;
}

// One row of x: codes [k], scales e [k / 32] and e C [k / 32]. A group that is not finite has NaN for its scale, one
// whose 1 / e would not be finite is zero.
static inline void quantize(const float* x, int64_t k, int8_t* codes, float* scales, float* sums) {
  for (int64_t g = 0; g < k / GROUP; g++) {
    const float* from = x + g * GROUP;
    const float largest = largest_of(from);
    if (!(largest < INFINITY)) {
      memset(codes + g * GROUP, 0, GROUP);
      scales[g] = sums[g] = NAN;
      continue;
    }
    const bool tiny = largest < 1e-36f;
    const float scale = tiny ? 0.0f : largest / 127.0f, inverse = tiny ? 0.0f : 127.0f / largest;
    const vf rounder = splat(12582912.0f);
    vi total = vi{};
    for (int i = 0; i < GROUP; i += W) {
      const vf rounded = (load(from + i) * splat(inverse) + rounder) - rounder;
      const vi whole = __builtin_convertvector(rounded, vi);
      *reinterpret_cast<vc*>(codes + g * GROUP + i) = __builtin_convertvector(whole, vc);
      total += whole;
    }
    int32_t sum = 0;
    for (int i = 0; i < W; i++) sum += total[i];
    scales[g] = scale;
    sums[g] = scale * float(sum);
  }
}

static inline int32_t four(const int8_t* c) {
  int32_t bits;
  memcpy(&bits, c, 4);
  return bits;
}

// The codes of W outputs of one group, unpacked: steps [8]. `part`: which W of the 16 outputs.
struct Codes {
#if defined(__AVX512F__)
  __m512i step[STEPS];
#elif defined(__AVX2__)
  __m256i step[STEPS];
#else
  int8_t step[STEPS][W * 4];
#endif
};

template <int FORMAT>
static inline void unpack(const uint8_t* codes, int part, Codes& out) {
  const int at = part * W * 4;
#if defined(__AVX512F__)
  const __m512i low = _mm512_set1_epi8(15);
  for (int s = 0; s < STEPS; s++) {
    if (FORMAT == PKV_Q8_0) {
      out.step[s] = _mm512_loadu_si512(codes + s * 64 + at);
    } else if (s < 4) {
      __m512i both = _mm512_loadu_si512(codes + s * 64 + at);
      out.step[s] = _mm512_and_si512(both, low);
      out.step[s + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
  }
#elif defined(__AVX2__)
  const __m256i low = _mm256_set1_epi8(15);
  for (int s = 0; s < STEPS; s++) {
    if (FORMAT == PKV_Q8_0) {
      out.step[s] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + s * 64 + at));
    } else if (s < 4) {
      __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + s * 64 + at));
      out.step[s] = _mm256_and_si256(both, low);
      out.step[s + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    }
  }
#else
  for (int s = 0; s < STEPS; s++)
    for (int i = 0; i < W * 4; i++) {
      if (FORMAT == PKV_Q8_0)
        out.step[s][i] = int8_t(codes[s * 64 + at + i]);
      else
        out.step[s][i] = s < 4 ? codes[s * 64 + at + i] & 15 : codes[(s - 4) * 64 + at + i] >> 4;
    }
#endif
}

// S of W outputs with one row's codes c [32].
template <int FORMAT>
static inline vf whole_products(const Codes& w, const int8_t* c) {
#if defined(__AVX512F__)
  __m512i total = _mm512_setzero_si512();
#if defined(__AVX512VNNI__)
  for (int s = 0; s < STEPS; s++) {
    __m512i x = _mm512_set1_epi32(four(c + 4 * s));
    if (FORMAT == PKV_Q8_0) {
      // w x = |w| (x with w's sign)
      __mmask64 negative = _mm512_movepi8_mask(w.step[s]);
      x = _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x);
      total = _mm512_dpbusd_epi32(total, _mm512_abs_epi8(w.step[s]), x);
    } else {
      total = _mm512_dpbusd_epi32(total, w.step[s], x);
    }
  }
#else
  const __m512i ones = _mm512_set1_epi16(1);
  __m512i pairs = _mm512_setzero_si512();
  for (int s = 0; s < STEPS; s++) {
    __m512i x = _mm512_set1_epi32(four(c + 4 * s));
    if (FORMAT == PKV_Q8_0) {
      __mmask64 negative = _mm512_movepi8_mask(w.step[s]);
      x = _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x);
      pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w.step[s]), x);  // at most 2 * 128 * 127: no overflow
      total = _mm512_add_epi32(total, _mm512_madd_epi16(pairs, ones));
    } else {
      pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(w.step[s], x));
    }
  }
  if (FORMAT != PKV_Q8_0) total = _mm512_madd_epi16(pairs, ones);
#endif
  return _mm512_cvtepi32_ps(total);
#elif defined(__AVX2__)
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i total = _mm256_setzero_si256();
  for (int s = 0; s < STEPS; s++) {
    __m256i x = _mm256_set1_epi32(four(c + 4 * s));
    // w x = |w| (x with w's sign); pairs reach 2 * 128 * 127 at most, which 16 bits hold
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w.step[s]), _mm256_sign_epi8(x, w.step[s]));
    total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, ones));
  }
  return _mm256_cvtepi32_ps(total);
#else
  vf out;
  for (int o = 0; o < W; o++) {
    int32_t total = 0;
    for (int s = 0; s < STEPS; s++)
      for (int i = 0; i < 4; i++) total += int32_t(w.step[s][o * 4 + i]) * c[4 * s + i];
    out[o] = float(total);
  }
  return out;
#endif
}

// Activations of all rows as `quantize` leaves them.
struct Rows {
  const int8_t* codes;
  const float *scales, *sums;
  int64_t k;
};

// One group's share of one row's sums of W outputs: S, e, e C, d and the offset as above.
template <int FORMAT>
static inline void add_group(float* sum, vf products, float scale, float total, vf d, vf offset) {
  vf all = fma(products * splat(scale), d, load(sum));
  if (FORMAT != PKV_Q8_0) all = fma(splat(total), offset, all);
  store(sum, all);
}

template <int FORMAT>
static inline vf offsets(const uint16_t* d, int part, vf scale) {
  return FORMAT == PKV_Q4_1 ? halves(d + PANEL + part * W) : scale * splat(-8.0f);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Four steps of 16 outputs fill the registers, and each value of x is loaded once for all of them: the low halves of
// the bytes for every row first, then the high ones. A pair of 4-bit products is at most 2 * 15 * 127 = 3810 and eight
// of them 30480: 16 bits hold a whole group.
static inline void four_steps(const uint8_t* codes, bool high, __m256i (&w)[2][4]) {
  const __m256i low = _mm256_set1_epi8(15);
  for (int part = 0; part < 2; part++)
    for (int s = 0; s < 4; s++) {
      __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + s * 64 + part * 32));
      w[part][s] = _mm256_and_si256(high ? _mm256_srli_epi16(both, 4) : both, low);
    }
}

static inline void pair_products(const __m256i (&w)[2][4], const int8_t* c, __m256i& first, __m256i& second) {
  const __m256i x0 = _mm256_set1_epi32(four(c)), x1 = _mm256_set1_epi32(four(c + 4));
  const __m256i x2 = _mm256_set1_epi32(four(c + 8)), x3 = _mm256_set1_epi32(four(c + 12));
  first = _mm256_add_epi16(_mm256_add_epi16(_mm256_maddubs_epi16(w[0][0], x0), _mm256_maddubs_epi16(w[0][1], x1)),
                           _mm256_add_epi16(_mm256_maddubs_epi16(w[0][2], x2), _mm256_maddubs_epi16(w[0][3], x3)));
  second = _mm256_add_epi16(_mm256_add_epi16(_mm256_maddubs_epi16(w[1][0], x0), _mm256_maddubs_epi16(w[1][1], x1)),
                            _mm256_add_epi16(_mm256_maddubs_epi16(w[1][2], x2), _mm256_maddubs_epi16(w[1][3], x3)));
}

template <int FORMAT>
static inline void four_bit_group(const uint16_t* d, const uint8_t* codes, const Rows& x, int64_t first, int count,
                                  int64_t g, float* out) {
  const __m256i ones = _mm256_set1_epi16(1);
  const int64_t groups = x.k / GROUP;
  __m256i kept[ROWS][2], w[2][4], a, b;
  four_steps(codes, false, w);
  for (int r = 0; r < count; r++) pair_products(w, x.codes + (first + r) * x.k + g * GROUP, kept[r][0], kept[r][1]);
  four_steps(codes, true, w);
  const vf d0 = halves(d), d1 = halves(d + W);
  const vf o0 = offsets<FORMAT>(d, 0, d0), o1 = offsets<FORMAT>(d, 1, d1);
  for (int r = 0; r < count; r++) {
    const int64_t at = (first + r) * groups + g;
    pair_products(w, x.codes + (first + r) * x.k + g * GROUP + 16, a, b);
    a = _mm256_madd_epi16(_mm256_add_epi16(a, kept[r][0]), ones);
    b = _mm256_madd_epi16(_mm256_add_epi16(b, kept[r][1]), ones);
    add_group<FORMAT>(out + r * PANEL, _mm256_cvtepi32_ps(a), x.scales[at], x.sums[at], d0, o0);
    add_group<FORMAT>(out + r * PANEL + W, _mm256_cvtepi32_ps(b), x.scales[at], x.sums[at], d1, o1);
  }
}
#endif

template <int FORMAT>
static inline void any_group(const uint16_t* d, const uint8_t* codes, const Rows& x, int64_t first, int count,
                             int64_t g, float* out) {
  const int64_t groups = x.k / GROUP;
  for (int part = 0; part < PANEL / W; part++) {
    Codes w;
    unpack<FORMAT>(codes, part, w);
    const vf scale = halves(d + part * W), offset = offsets<FORMAT>(d, part, scale);
    for (int r = 0; r < count; r++) {
      const int64_t at = (first + r) * groups + g;
      const vf products = whole_products<FORMAT>(w, x.codes + (first + r) * x.k + g * GROUP);
      add_group<FORMAT>(out + r * PANEL + part * W, products, x.scales[at], x.sums[at], scale, offset);
    }
  }
}

// One panel times `count` rows from row `first`: sums [count][16].
template <int FORMAT>
static void panel_times_rows(const uint8_t* panel, const Rows& x, int64_t first, int count, float* out) {
  const int64_t groups = x.k / GROUP;
  for (int i = 0; i < count * PANEL; i += W) store(out + i, vf{});
  for (int64_t g = 0; g < groups; g++, panel += group_bytes(FORMAT)) {
    const uint16_t* d = reinterpret_cast<const uint16_t*>(panel);
    const uint8_t* codes = panel + (FORMAT == PKV_Q4_1 ? 64 : 32);
    if (count <= FEW)
      for (int i = 0; i < group_bytes(FORMAT); i += 64) __builtin_prefetch(panel + AHEAD + i);
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (FORMAT != PKV_Q8_0)
      four_bit_group<FORMAT>(d, codes, x, first, count, g, out);
    else
#endif
      any_group<FORMAT>(d, codes, x, first, count, g, out);
  }
}

// `count` rows of sums [count][16] into out [.][n] from row `first`, columns `at` and on.
static inline void write_out(const float* sums, int64_t first, int count, int64_t at, int64_t n, const float* bias,
                             float* out) {
  const int width = int(n - at < PANEL ? n - at : PANEL);
  for (int i = 0; i < count; i++) {
    const float* from = sums + i * PANEL;
    float* to = out + (first + i) * n + at;
    if (width == PANEL)
      for (int o = 0; o < PANEL; o += W) store(to + o, bias ? load(from + o) + load(bias + at + o) : load(from + o));
    else
      for (int o = 0; o < width; o++) to[o] = bias ? from[o] + bias[at + o] : from[o];
  }
}

// One panel times the rows of one block.
template <int FORMAT>
static void panel_times_block(const uint8_t* packed, const Rows& x, int64_t p, int64_t first, int64_t end, int64_t n,
                              const float* bias, float* out) {
  alignas(64) float sums[ROWS * PANEL];
  for (int64_t r = first; r < end; r += ROWS) {
    const int count = int(end - r < ROWS ? end - r : ROWS);
    panel_times_rows<FORMAT>(packed + p * (x.k / GROUP) * group_bytes(FORMAT), x, r, count, sums);
    write_out(sums, r, count, p * PANEL, n, bias, out);
  }
}

template <int FORMAT>
static void times_panels(const uint8_t* packed, const Rows& x, int64_t m, int64_t n, const float* bias, float* out,
                         int threads) {
  const int64_t panels = (n + PANEL - 1) / PANEL, blocks = (m + BLOCK - 1) / BLOCK;
  if (m <= FEW) {  // reading the weights is the work: each thread reads one stretch of memory
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t p = 0; p < panels; p++) panel_times_block<FORMAT>(packed, x, p, 0, m, n, bias, out);
    return;
  }
#pragma omp parallel for collapse(2) schedule(dynamic, 4) num_threads(threads)
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t p = 0; p < panels; p++)
      panel_times_block<FORMAT>(packed, x, p, b * BLOCK, m < (b + 1) * BLOCK ? m : (b + 1) * BLOCK, n, bias, out);
}

static void block_linear(int format, int64_t m, int64_t n, int64_t k, const float* x, const void* packed,
                         const float* bias, float* out, void* work, int threads) {
  const int64_t groups = k / GROUP;
  float* scales = static_cast<float*>(work);
  float* sums = scales + m * groups;
  int8_t* codes = reinterpret_cast<int8_t*>(sums + m * groups);
#pragma omp parallel for num_threads(threads) if (m >= 8)
  for (int64_t r = 0; r < m; r++) quantize(x + r * k, k, codes + r * k, scales + r * groups, sums + r * groups);
  const Rows rows{codes, scales, sums, k};
  const uint8_t* panels = static_cast<const uint8_t*>(packed);
  if (format == PKV_Q4_0) times_panels<PKV_Q4_0>(panels, rows, m, n, bias, out, threads);
  if (format == PKV_Q4_1) times_panels<PKV_Q4_1>(panels, rows, m, n, bias, out, threads);
  if (format == PKV_Q8_0) times_panels<PKV_Q8_0>(panels, rows, m, n, bias, out, threads);
}

// GGUF blocks [n][k / 32] -> panels; outputs beyond n are zero.
static void pack_blocks(int format, int64_t n, int64_t k, const void* blocks, void* packed, int threads) {
  const int64_t groups = k / GROUP, panels = (n + PANEL - 1) / PANEL;
  const int head = format == PKV_Q4_1 ? 4 : 2, block = head + (format == PKV_Q8_0 ? 32 : 16);
  const uint8_t* from = static_cast<const uint8_t*>(blocks);
#pragma omp parallel for num_threads(threads)
  for (int64_t p = 0; p < panels; p++)
    for (int64_t g = 0; g < groups; g++) {
      uint8_t* to = static_cast<uint8_t*>(packed) + (p * groups + g) * group_bytes(format);
      memset(to, 0, size_t(group_bytes(format)));
      uint8_t* codes = to + (format == PKV_Q4_1 ? 64 : 32);
      for (int o = 0; o < PANEL && p * PANEL + o < n; o++) {
        const uint8_t* b = from + ((p * PANEL + o) * groups + g) * block;
        memcpy(to + 2 * o, b, 2);
        if (format == PKV_Q4_1) memcpy(to + 32 + 2 * o, b + 2, 2);
        for (int i = 0; i < GROUP; i++) {
          if (format == PKV_Q8_0) {
            codes[(i / 4) * 64 + o * 4 + i % 4] = b[head + i];
          } else {
            // In GGUF byte j holds weight j low and weight j + 16 high, which are steps s and s + 4 here too.
            const uint8_t q = i < 16 ? b[head + i] & 15 : b[head + i - 16] >> 4;
            const int s = i / 4;
            codes[(s % 4) * 64 + o * 4 + i % 4] |= s < 4 ? q : uint8_t(q << 4);
          }
        }
      }
    }
}

// Row `id` of a packed table, as floats [k].
static void unpack_row(int format, int64_t k, int64_t id, const void* packed, float* out) {
  const int64_t groups = k / GROUP;
  const int o = int(id % PANEL);
  for (int64_t g = 0; g < groups; g++) {
    const uint8_t* from = static_cast<const uint8_t*>(packed) + ((id / PANEL) * groups + g) * group_bytes(format);
    const uint8_t* codes = from + (format == PKV_Q4_1 ? 64 : 32);
    const uint16_t* d = reinterpret_cast<const uint16_t*>(from);
    const float scale = from_half(d[o]), offset = format == PKV_Q4_1 ? from_half(d[PANEL + o]) : 0.0f;
    for (int i = 0; i < GROUP; i++) {
      const int s = i / 4, at = o * 4 + i % 4;
      float q;
      if (format == PKV_Q8_0)
        q = float(int8_t(codes[s * 64 + at]));
      else
        q = float(s < 4 ? codes[s * 64 + at] & 15 : codes[(s - 4) * 64 + at] >> 4) - (format == PKV_Q4_0 ? 8.0f : 0.0f);
      out[g * GROUP + i] = format == PKV_Q4_1 ? q * scale + offset : q * scale;
    }
  }
}

static void rows(int format, int64_t m, int64_t k, const int64_t* ids, const void* packed, float* out, int threads) {
#pragma omp parallel for num_threads(threads) if (m >= 64)
  for (int64_t r = 0; r < m; r++) unpack_row(format, k, ids[r], packed, out + r * k);
}

}  // namespace PKV_ISA
