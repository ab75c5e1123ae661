// AVX-512 for processors without it, so that the branches written for it run: included before a file of the kernels,
// which then takes them. Each intrinsic is SIMDe's portable one (Debian's libsimde-dev), on AVX2 and FMA.
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <string.h>

#undef _mm512_madd_epi16  // SIMDe 0.7.4 gives this name the arguments of the masked one
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)

// What it lacks.
static inline __m512 emulated_cvtph_ps(__m256i halves) {
  simde__m512_private wide;
  wide.m256[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  wide.m256[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
  return simde__m512_from_private(wide);
}
static inline __m512 emulated_cvtepi32_ps(__m512i whole) {
  simde__m512_private floats;
  const simde__m512i_private from = simde__m512i_to_private(whole);
  for (int i = 0; i < 16; i++) floats.f32[i] = float(from.i32[i]);
  return simde__m512_from_private(floats);
}
static inline __m256i emulated_cvtps_ph(__m512 floats) {
  const simde__m512_private wide = simde__m512_to_private(floats);
  return _mm256_set_m128i(_mm256_cvtps_ph(wide.m256[1], 0), _mm256_cvtps_ph(wide.m256[0], 0));
}
#define _mm512_cvtps_ph(floats, rounding) emulated_cvtps_ph(floats)
#define _mm512_cvtph_ps(halves) emulated_cvtph_ps(halves)
#define _mm512_cvtepi32_ps(whole) emulated_cvtepi32_ps(whole)

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#if defined(EMULATE_VNNI)
#define __AVX512VNNI__ 1
#endif
#if defined(EMULATE_BF16)
// In float32 throughout, where processors take small numbers for zero and round the first product by itself.
static inline __m512 emulated_dpbf16_ps(__m512 sum, __m512i a, __m512i b) {
  const simde__m512i_private left = simde__m512i_to_private(a), right = simde__m512i_to_private(b);
  simde__m512_private total = simde__m512_to_private(sum);
  for (int i = 0; i < 32; i++) {
    const uint32_t bits[2] = {uint32_t(left.u16[i]) << 16, uint32_t(right.u16[i]) << 16};
    float x[2];
    memcpy(x, bits, sizeof(x));
    total.f32[i / 2] += x[0] * x[1];
  }
  return simde__m512_from_private(total);
}
#undef __m512bh
#define __m512bh __m512i
#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps(sum, a, b) emulated_dpbf16_ps(sum, a, b)
#define __AVX512BF16__ 1
#endif
