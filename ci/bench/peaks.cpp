// What the processor computes from registers alone and how fast it reads memory: limits that no kernel passes.
//
//     peaks THREADS BYTES    prints: float32 operations, 8-bit multiply-adds and bytes read, each a second
//
// Compiled for one instruction set, with the vectors that the kernels use (csrc/simd.h); the fastest of a few rounds.
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "simd.h"

using namespace PKV_ISA;

constexpr int CHAINS = 10;  // sums that do not wait for each other: latency times units, and all in registers
constexpr int64_t TURNS = 4000000;
constexpr int ROUNDS = 7;
constexpr int AHEAD = 2048;

static float floats_of_one_thread() {
  vf sums[CHAINS], factor = splat(0.999f), addend = splat(0.001f);
  for (int i = 0; i < CHAINS; i++) sums[i] = splat(float(i));  // different ones, or they would be computed once
  for (int64_t turn = 0; turn < TURNS; turn++)
#pragma GCC unroll 10
    for (int i = 0; i < CHAINS; i++) sums[i] = fma(sums[i], factor, addend);
  float total = 0;
  for (int i = 0; i < CHAINS; i++) total += sum(sums[i]);
  return total;
}

// One step of a product of bytes, as the kernels' inner loops take it, and the multiply-adds in it. With AVX2 and
// AVX-512 pairs are added in 16 bits and those sums in 16 bits again, which is what products of 4-bit codes need. The
// sum is also a factor, so that no step can be computed ahead; written out, because GCC keeps such sums in memory.
#if defined(__AVX512BW__)
typedef __m512i Whole;
constexpr int MACS = 64;
#elif defined(__AVX2__)
typedef __m256i Whole;
constexpr int MACS = 32;
#else
typedef int16_t Whole __attribute__((vector_size(16)));
constexpr int MACS = 8;
#endif

static inline Whole step(Whole sum, Whole w, Whole x) {
#if defined(__AVX512VNNI__)
  __asm__("vpdpbusd %0, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
#elif defined(__AVX2__)
  __asm__("vpmaddubsw %0, %1, %0\n\tvpaddw %2, %0, %0" : "+v"(sum) : "v"(w), "v"(x));
#else
  sum = sum * w + x;
#endif
  return sum;
}

static int bytes_of_one_thread() {
  const Whole w = Whole{} + 3, x = Whole{} + 1;
  Whole sums[CHAINS] = {};
  for (int i = 0; i < CHAINS; i++) sums[i] += decltype(Whole{}[0])(i);
  for (int64_t turn = 0; turn < TURNS; turn++)
#pragma GCC unroll 10
    for (int i = 0; i < CHAINS; i++) sums[i] = step(sums[i], w, x);
  Whole all = {};
  for (int i = 0; i < CHAINS; i++) all ^= sums[i];
  int total;
  memcpy(&total, &all, sizeof total);
  return total;
}

static float read(const float* from, int64_t count) {
  vf sums[8] = {};
  for (int64_t i = 0; i < count; i += 8 * W) {
    for (int j = 0; j < 8 * W; j += 16) __builtin_prefetch(reinterpret_cast<const char*>(from + i + j) + AHEAD);
    for (int j = 0; j < 8; j++) sums[j] += load(from + i + j * W);
  }
  float total = 0;
  for (int j = 0; j < 8; j++) total += sum(sums[j]);
  return total;
}

// Seconds of the fastest round of `work` by each of `threads`; its results are kept, or it would be left out.
template <typename Work>
static double fastest(int threads, Work work) {
  static volatile float kept;
  double best = 1e9;
  for (int round = 0; round < ROUNDS; round++) {
    const double began = omp_get_wtime();
    float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    total += work(omp_get_thread_num());
    kept = total;
    const double seconds = omp_get_wtime() - began;
    best = seconds < best ? seconds : best;
  }
  (void)kept;
  return best;
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const int threads = atoi(argv[1]);
  const int64_t share = atoll(argv[2]) / 4 / threads / (8 * W) * (8 * W);
  const std::vector<float> array(size_t(share * threads + AHEAD), 1.0f);
  const double turns = double(TURNS) * CHAINS * threads;
  const double floats = fastest(threads, [](int) { return floats_of_one_thread(); });
  const double bytes = fastest(threads, [](int) { return float(bytes_of_one_thread()); });
  const double reading = fastest(threads, [&](int t) { return read(array.data() + t * share, share); });
  printf("%.6g %.6g %.6g\n", turns * 2 * W / floats, turns * MACS / bytes, double(share) * 4 * threads / reading);
  return 0;
}
