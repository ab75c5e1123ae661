// What every test of the kernels uses: CHECK, random numbers, the three formats of numbers, a library to test.
//
// Expected values are computed in double, from definitions, with nothing taken from the kernels but their interface.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "pagedkv_cpu.h"

extern int failures;

// Counts a failure and shows the first twenty: CHECK(condition, "what happened %d", number).
#define CHECK(condition, ...)                                    \
  do {                                                           \
    if (!(condition) && ++failures <= 20) {                      \
      printf("%s:%d: %s\n    ", __FILE__, __LINE__, #condition); \
      printf(__VA_ARGS__);                                       \
      printf("\n");                                              \
    }                                                            \
  } while (0)

// The same numbers on every machine.
class Random {
 public:
  explicit Random(uint32_t seed) : source_(seed) {}
  uint32_t bits() { return uint32_t(source_()); }
  int below(int count) { return int(bits() % uint32_t(count)); }
  int between(int low, int high) { return low + below(high - low + 1); }
  bool chance(int percent) { return below(100) < percent; }
  double uniform() { return bits() * 0x1p-32; }
  double normal() { return (uniform() + uniform() + uniform() + uniform() - 2.0) * 1.7320508; }  // variance 1, nearly
  template <typename T>
  T one_of(std::initializer_list<T> values) {
    return values.begin()[below(int(values.size()))];
  }
  template <typename T>
  void shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i > 1; i--) std::swap(values[i - 1], values[size_t(below(int(i)))]);
  }

 private:
  std::mt19937 source_;
};

inline int bytes_of(int dtype) { return dtype == PKV_FP32 ? 4 : 2; }
inline const char* name_of(int dtype) { return dtype == PKV_FP32 ? "fp32" : dtype == PKV_BF16 ? "bf16" : "fp16"; }

// The value of 16 bits: sign, exponent, fraction of IEEE binary16 or of bfloat16.
double value_of(uint16_t bits, int dtype);
// The 16 bits nearest to x, ties to the even one; NaN is some NaN.
uint16_t nearest(double x, int dtype);
bool is_nan(uint16_t bits, int dtype);
// What rounding x to `dtype` may change, and a little: the number was computed in float32 before.
double rounding_of(double x, int dtype);

// `count` numbers of one dtype, exactly as many bytes as they need.
struct Numbers {
  int dtype;
  std::vector<char> bytes;

  Numbers(int dtype, int64_t count, int fill = 0)
      : dtype(dtype), bytes(size_t(count) * size_t(bytes_of(dtype)), char(fill)) {}
  char* data() { return bytes.data(); }
  const char* at(int64_t i) const { return bytes.data() + i * bytes_of(dtype); }
  // Normal numbers times `size`.
  Numbers(int dtype, int64_t count, double size, Random& random) : Numbers(dtype, count) {
    for (int64_t i = 0; i < count; i++) set(i, size * random.normal());
  }
  double get(int64_t i) const;
  void set(int64_t i, double x);
};

constexpr int NANS = 0xff;  // a fill that is NaN in every dtype

// The same bits; of nothing: yes.
template <typename T>
bool same(const T* a, const T* b, size_t count) {
  return count == 0 || memcmp(a, b, count * sizeof(T)) == 0;
}

// The library on one instruction set, with one, two and three threads.
class Kernels {
 public:
  static constexpr int MOST = 3;

  explicit Kernels(const char* isa);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  bool here() const { return contexts_[0] != nullptr; }
  const pkv_context* on(int threads) const { return contexts_[threads - 1]; }
  const char* isa() const { return pkv_isa(contexts_[0]); }

 private:
  pkv_context* contexts_[MOST];
};

// How many cases a test ran and the largest error it saw, as a part of what is allowed.
struct Result {
  int cases = 0;
  double worst = 0;

  void error(double off, double allowed) { worst = off <= allowed * worst ? worst : off / allowed; }  // NaN is kept
};

// Where `full` is false a few cases of each kind are enough.
Result test_attention(const Kernels&, bool full);
Result test_append(const Kernels&, bool full);
Result test_copy(const Kernels&, bool full);
Result test_conversion(const Kernels&, bool full);
Result test_linear(const Kernels&, bool full);
Result test_plain(const Kernels&, bool full);
Result test_narrow(const Kernels&, bool full);
Result test_rows(const Kernels&, bool full);
Result test_norm(const Kernels&, bool full);
Result test_rope(const Kernels&, bool full);
Result test_gated(const Kernels&, bool full);
