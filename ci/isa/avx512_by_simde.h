// AVX-512 for processors without it, so that the branches written for it run: included before a file of the kernels,
// which then takes them. Each intrinsic is SIMDe's portable one (Debian's libsimde-dev), on AVX2 and FMA.
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

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
#define _mm512_cvtph_ps(halves) emulated_cvtph_ps(halves)
#define _mm512_cvtepi32_ps(whole) emulated_cvtepi32_ps(whole)

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#if defined(EMULATE_VNNI)
#define __AVX512VNNI__ 1
#endif
