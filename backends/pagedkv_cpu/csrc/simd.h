// A vector of floats as wide as the instruction set has, and the few operations that the kernels need of it.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "pagedkv_cpu.h"

#if defined(__AVX512F__)
#define PKV_W 16
#elif defined(__AVX2__)
#define PKV_W 8
#else
#define PKV_W 4
#endif

namespace PKV_ISA {

constexpr int W = PKV_W;
typedef float vf __attribute__((vector_size(4 * PKV_W), aligned(4), may_alias));
typedef int8_t vc __attribute__((vector_size(PKV_W), aligned(1), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * PKV_W), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * PKV_W), aligned(2), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * PKV_W), aligned(4), may_alias));

static inline vf load(const float* p) { return *reinterpret_cast<const vf*>(p); }
static inline void store(float* p, vf v) { *reinterpret_cast<vf*>(p) = v; }
static inline vf splat(float x) { return x - vf{}; }
static inline vf select(vi mask, vf a, vf b) { return mask ? a : b; }
static inline vf vmax(vf a, vf b) { return a > b ? a : b; }

static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// The sum of all entries, always in the order ((0+1)+(2+3)) + ((4+5)+(6+7)), halves of 16 first added to each other.
static inline float sum8(const float* x) { return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])); }

static inline float sum(vf v) {
  float x[16] = {};
  store(x, v);
  if (W == 16)
    for (int i = 0; i < 8; i++) x[i] += x[i + 8];
  return sum8(x);
}

static inline float highest(vf v) {
  float x[W];
  store(x, v);
  float top = x[0];
  for (int i = 1; i < W; i++) top = x[i] > top ? x[i] : top;
  return top;
}

// Eight sums of vectors a[0..7] at once, each in the order of `sum`.
static inline void sums8(const vf* a, float* out) {
#if defined(__AVX2__)
  __m256 v[8];
  for (int i = 0; i < 8; i++) {
#if defined(__AVX512F__)
    __m512 wide = a[i];
    v[i] = _mm256_add_ps(_mm512_castps512_ps256(wide),
                         _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(wide), 1)));
#else
    v[i] = a[i];
#endif
  }
  __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(v[4], v[5]), _mm256_hadd_ps(v[6], v[7]));
  __m128 first = _mm_add_ps(_mm256_castps256_ps128(low), _mm256_extractf128_ps(low, 1));
  __m128 second = _mm_add_ps(_mm256_castps256_ps128(high), _mm256_extractf128_ps(high, 1));
  _mm256_storeu_ps(out, _mm256_set_m128(second, first));
#else
  for (int i = 0; i < 8; i++) out[i] = sum(a[i]);
#endif
}

static inline float from_half(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#elif defined(__aarch64__)
  __fp16 x;
  memcpy(&x, &h, 2);
  return x;
#else
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | (mantissa << 13);
  } else if (exponent) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {
    float tiny = float(mantissa) * 5.9604644775390625e-8f;  // 2^-24
    memcpy(&bits, &tiny, 4);
    bits |= sign;
  }
  float x;
  memcpy(&x, &bits, 4);
  return x;
#endif
}

// Round to the nearest, ties to even.
static inline uint16_t to_half(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, 0);
#elif defined(__aarch64__)
  __fp16 h = (__fp16)x;
  uint16_t bits;
  memcpy(&bits, &h, 2);
  return bits;
#else
  uint32_t u;
  memcpy(&u, &x, 4);
  uint16_t sign = uint16_t(u >> 16) & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7e00;
  if (u >= 0x477ff000) return sign | 0x7c00;
  if (u < 0x38800000) {  // below the normal numbers: units of 2^-24
    float scaled;
    memcpy(&scaled, &u, 4);
    return sign | uint16_t(nearbyintf(scaled * 16777216.0f));
  }
  u += 0xfff + ((u >> 13) & 1);
  return sign | uint16_t((u - 0x38000000) >> 13);
#endif
}

static inline float from_bf16(uint16_t b) {
  uint32_t bits = uint32_t(b) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static inline uint16_t to_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(u >> 16) | 0x40;
  return uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static inline int size_of(int32_t dtype) { return dtype == PKV_FP32 ? 4 : 2; }

// `count` numbers of `dtype` as floats.
static inline void widen(const void* from, int32_t dtype, int count, float* to) {
  if (dtype == PKV_FP32) {
    memcpy(to, from, size_t(count) * 4);
    return;
  }
  const uint16_t* h = static_cast<const uint16_t*>(from);
  int i = 0;
  if (dtype == PKV_BF16) {
#if defined(__AVX2__)
    for (; i + 8 <= count; i += 8) {
      __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h + i)));
      _mm256_storeu_ps(to + i, _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
    }
#endif
    for (; i < count; i++) to[i] = from_bf16(h[i]);
    return;
  }
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h + i))));
#endif
  for (; i < count; i++) to[i] = from_half(h[i]);
}

// `count` floats as numbers of `dtype`.
static inline void narrow(const float* from, int32_t dtype, int count, void* to) {
  if (dtype == PKV_FP32) {
    memcpy(to, from, size_t(count) * 4);
    return;
  }
  uint16_t* h = static_cast<uint16_t*>(to);
  for (int i = 0; i < count; i++) h[i] = dtype == PKV_BF16 ? to_bf16(from[i]) : to_half(from[i]);
}

// W halves as floats.
static inline vf halves(const uint16_t* h) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(h)));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h)));
#else
  vf out;
  for (int i = 0; i < W; i++) out[i] = from_half(h[i]);
  return out;
#endif
}

static inline void to_halves(uint16_t* h, vf v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(h), _mm512_cvtps_ph(v, 0));
#elif defined(__AVX2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(h), _mm256_cvtps_ph(v, 0));
#else
  for (int i = 0; i < W; i++) h[i] = to_half(v[i]);
#endif
}

static inline vf from_bf16s(const uint16_t* b) {
  const vu bits = __builtin_convertvector(*reinterpret_cast<const vh*>(b), vu) << 16;
  return reinterpret_cast<const vf&>(bits);
}

static inline void to_bf16s(uint16_t* b, vf v) {
  const vu bits = reinterpret_cast<const vu&>(v);
  const vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, nan = (bits >> 16) | 0x40;
  *reinterpret_cast<vh*>(b) = __builtin_convertvector(v != v ? nan : rounded, vh);
}

// How a number of dtype D lies in memory; `take` and `put` one or W of them as floats.
template <int D>
struct Stored {
  typedef uint16_t type;
};
template <>
struct Stored<PKV_FP32> {
  typedef float type;
};
template <int D>
using number = typename Stored<D>::type;

template <int D>
static inline vf take(const number<D>* p) {
  if constexpr (D == PKV_FP32)
    return load(p);
  else
    return D == PKV_BF16 ? from_bf16s(p) : halves(p);
}

template <int D>
static inline float take1(number<D> x) {
  if constexpr (D == PKV_FP32)
    return x;
  else
    return D == PKV_BF16 ? from_bf16(x) : from_half(x);
}

template <int D>
static inline void put(number<D>* p, vf v) {
  if constexpr (D == PKV_FP32)
    store(p, v);
  else
    D == PKV_BF16 ? to_bf16s(p, v) : to_halves(p, v);
}

template <int D>
static inline number<D> put1(float x) {
  if constexpr (D == PKV_FP32)
    return x;
  else
    return D == PKV_BF16 ? to_bf16(x) : to_half(x);
}

// e^x for x <= 88, relative error below 2e-7; 0 below -87.3 and for minus infinity; NaN stays NaN.
// 2^n e^r with |r| <= ln 2 / 2; the polynomial is the one of Cephes' expf.
static inline vf vexp(vf x) {
  const vf rounder = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  vi tiny = x < splat(-87.3f);
  vf bounded = select(tiny, splat(-87.3f), x);
  vf shifted = fma(bounded, splat(1.44269504088896341f), rounder);
  vf n = shifted - rounder;
  vf r = fma(n, splat(-0.693359375f), bounded);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  vi exponent = __builtin_convertvector(n, vi);
  vi bits = reinterpret_cast<vi&>(p) + (exponent << 23);
  vf result = reinterpret_cast<vf&>(bits);
  return select(tiny, vf{}, select(x != x, x, result));
}

static inline float exp1(float x) {
  float out[W];
  store(out, vexp(splat(x)));
  return out[0];
}

}  // namespace PKV_ISA
