// Products with packed weights, and exact rows of a packed table.
#include "check.h"

namespace {

const char* const NAMES[] = {"Q4_0", "Q4_1", "Q8_0"};

// Weights [n][k] as a GGUF file has them, and what they are.
struct Weights {
  int format;
  int64_t n, k;
  std::vector<uint8_t> blocks;
  std::vector<double> values;

  Weights(int format, int64_t n, int64_t k, Random& random) : format(format), n(n), k(k) {
    for (int64_t g = 0; g < n * k / 32; g++) draw(random);
  }

  std::vector<char> packed(const pkv_context* context) const {
    std::vector<char> out(size_t(pkv_packed_bytes(format, n, k)), char(NANS));
    pkv_pack(context, format, n, k, blocks.data(), out.data());
    return out;
  }

 private:
  double half(double x) {
    const uint16_t bits = nearest(x, PKV_FP16);
    blocks.push_back(uint8_t(bits)), blocks.push_back(uint8_t(bits >> 8));
    return value_of(bits, PKV_FP16);
  }

  // One block: a half d, for Q4_1 a half m, then codes; a 4-bit byte j holds weight j low and weight j + 16 high.
  void draw(Random& random) {
    const double d = half(random.chance(5) ? 3e-6 : random.normal() * 0.01),
                 m = format == PKV_Q4_1 ? half(random.normal()) : 0;
    int codes[32];
    const bool extreme = random.chance(5);
    for (int& code : codes) {
      code = format == PKV_Q8_0 ? random.between(-128, 127) : random.below(16);
      if (extreme) code = format == PKV_Q8_0 ? -128 : 15;
      values.push_back(format == PKV_Q4_0 ? d * (code - 8) : d * code + m);
    }
    for (int j = 0; j < (format == PKV_Q8_0 ? 32 : 16); j++)
      blocks.push_back(uint8_t(format == PKV_Q8_0 ? codes[j] : codes[j] | codes[j + 16] << 4));
  }
};

std::vector<float> product(const pkv_context* context, const Weights& w, const std::vector<char>& packed,
                           const float* x, int64_t m, const float* bias) {
  std::vector<float> out(size_t(m * w.n), NAN);
  std::vector<char> work(size_t(pkv_linear_work(w.format, m, w.k)));
  pkv_linear(context, w.format, m, w.n, w.k, x, packed.data(), bias, out.data(), work.data());
  return out;
}

// The largest of each group of 32 of one row, over all of the row's weights: what rounding to 8 bits may cost.
double rounding(const Weights& w, const float* x, int64_t o) {
  double cost = 0;
  for (int64_t g = 0; g < w.k / 32; g++) {
    double largest = 0, weights = 0;
    for (int64_t i = g * 32; i < g * 32 + 32; i++) {
      largest = std::max(largest, fabs(double(x[i])));
      weights += fabs(w.values[size_t(o * w.k + i)]);
    }
    cost += weights * largest / 127 / 2;
  }
  return cost;
}

// `exact`: x are whole multiples, so that rounding to 8 bits costs nothing.
void compare(const Weights& w, const std::vector<float>& x, const std::vector<float>& bias,
             const std::vector<float>& out, bool exact, Result& result) {
  const int64_t m = int64_t(x.size()) / w.k;
  for (int64_t r = 0; r < m; r += m > 40 ? 7 : 1)
    for (int64_t o = 0; o < w.n; o++) {
      double want = bias.empty() ? 0 : bias[size_t(o)], size = fabs(want);
      for (int64_t i = 0; i < w.k; i++) {
        const double term = double(x[size_t(r * w.k + i)]) * w.values[size_t(o * w.k + i)];
        want += term, size += fabs(term);
      }
      const double have = out[size_t(r * w.n + o)], off = fabs(have - want);
      // Q4 sums d e S and its offset apart, which are larger than their difference.
      const double allowed = 4e-6 * (size + fabs(have)) + 1e-4 * (exact ? 0 : size) +
                             (exact ? 0 : rounding(w, x.data() + r * w.k, o)) + 1e-30;
      result.error(off, allowed);
      CHECK(off <= allowed, "%s [%d][%d] x %d%s: row %d output %d is %g, not %g", NAMES[w.format], int(w.n), int(w.k),
            int(m), exact ? " exact" : "", int(r), int(o), have, want);
    }
}

std::vector<float> activations(int64_t m, int64_t k, bool exact, Random& random) {
  std::vector<float> x(size_t(m * k));
  for (size_t g = 0; g < x.size(); g += 32) {
    const double e = ldexp(1.0, random.between(-12, 2));
    for (size_t i = g; i < g + 32; i++) x[i] = float(e * (exact ? random.between(-127, 127) : 60 * random.normal()));
    if (exact) x[g + size_t(random.below(32))] = float(random.chance(50) ? 127 * e : -127 * e);
    if (random.chance(3)) std::fill(x.begin() + int64_t(g), x.begin() + int64_t(g) + 32, 0.0f);
  }
  return x;
}

// A row's bits among m rows and alone, on any number of threads.
void same_bits(const Kernels& kernels, const Weights& w, const std::vector<char>& packed, const std::vector<float>& x,
               const float* bias, const std::vector<float>& out, Random& random) {
  const int64_t m = int64_t(x.size()) / w.k;
  for (int threads = 2; threads <= Kernels::MOST; threads++)
    CHECK(same(product(kernels.on(threads), w, packed, x.data(), m, bias).data(), out.data(), out.size()),
          "other bits on %d threads", threads);
  for (int i = 0; m && i < 3; i++) {
    const int64_t row = random.below(int(m)), count = std::min<int64_t>(m - row, random.one_of({1, 2, 6}));
    const std::vector<float> some =
        product(kernels.on(random.between(1, 3)), w, packed, x.data() + row * w.k, count, bias);
    CHECK(same(some.data(), out.data() + row * w.n, some.size()), "%s [%d][%d]: row %d of %d, with %d rows: other bits",
          NAMES[w.format], int(w.n), int(w.k), int(row), int(m), int(count));
  }
}

void run(const Kernels& kernels, const Weights& w, int64_t m, Random& random, Result& result) {
  const std::vector<char> packed = w.packed(kernels.on(1));
  CHECK(packed == w.packed(kernels.on(3)), "packed otherwise on three threads");
  std::vector<float> bias(random.chance(50) ? size_t(w.n) : 0);
  for (float& b : bias) b = float(random.normal());
  for (bool exact : {true, false}) {
    const std::vector<float> x = activations(m, w.k, exact, random);
    const float* added = bias.empty() ? nullptr : bias.data();
    const std::vector<float> out = product(kernels.on(1), w, packed, x.data(), m, added);
    compare(w, x, bias, out, exact, result);
    same_bits(kernels, w, packed, x, added, out, random);
  }
  result.cases++;
}

// What cannot be rounded to 8 bits is not lost: such a row is NaN, and the others are as they were.
void not_finite(const Kernels& kernels, int format, Random& random, Result& result) {
  const Weights w(format, 20, 96, random);
  const std::vector<char> packed = w.packed(kernels.on(1));
  const std::vector<float> x = activations(9, w.k, false, random);
  const std::vector<float> before = product(kernels.on(2), w, packed, x.data(), 9, nullptr);
  for (float bad : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> wrong = x;
    wrong[size_t(4 * w.k + 31)] = bad, wrong[size_t(4 * w.k + 33)] = bad, wrong[size_t(4 * w.k + 34)] = bad;
    const std::vector<float> out = product(kernels.on(2), w, packed, wrong.data(), 9, nullptr);
    for (int64_t i = 0; i < 9 * w.n; i++) {
      const float have = out[size_t(i)];
      const bool row = i / w.n == 4;
      CHECK(row ? !isfinite(have) : have == before[size_t(i)], "%s: %g in row 4: row %d is %g", NAMES[format],
            double(bad), int(i / w.n), double(have));
    }
  }
  result.cases++;
}

// Numbers so small that 127 / largest overflows.
void tiny(const Kernels& kernels, int format, Random& random, Result& result) {
  const Weights w(format, 16, 32, random);
  std::vector<float> x(32, 1e-40f);
  x[3] = 3e-38f, x[5] = -1e-45f;
  for (float y : product(kernels.on(1), w, w.packed(kernels.on(1)), x.data(), 1, nullptr))
    CHECK(fabs(y) < 1e-34f, "%s of numbers below 1e-37: %g", NAMES[format], double(y));
  result.cases++;
}

void exact_rows(const Kernels& kernels, const Weights& w, int64_t m, Random& random, Result& result) {
  std::vector<int64_t> ids(static_cast<size_t>(m));
  for (int64_t& id : ids) id = random.below(int(w.n));
  std::vector<float> out(size_t(m * w.k), NAN);
  const std::vector<char> packed = w.packed(kernels.on(1));
  pkv_rows(kernels.on(random.between(1, Kernels::MOST)), w.format, m, w.k, ids.data(), packed.data(), out.data());
  for (int64_t i = 0; i < m * w.k; i++) {
    const float want = float(w.values[size_t(ids[size_t(i / w.k)] * w.k + i % w.k)]);
    CHECK(out[size_t(i)] == want, "%s: entry %d of row %d is %a, not %a", NAMES[w.format], int(i % w.k),
          int(ids[size_t(i / w.k)]), double(out[size_t(i)]), double(want));
  }
  result.cases++;
}

}  // namespace

Result test_linear(const Kernels& kernels, bool full) {
  Random random(4);
  Result result;
  for (int format : {PKV_Q4_0, PKV_Q4_1, PKV_Q8_0}) {
    for (int64_t m : {0, 1, 2, 5, 33, 300})
      for (int64_t n : {1, 16, 40, 131}) {
        if (!full && (n == 16 || (m == 300 && n != 40))) continue;
        run(kernels, Weights(format, n, random.one_of({32, 64, 160, 576}), random), m, random, result);
      }
    not_finite(kernels, format, random, result);
    tiny(kernels, format, random, result);
  }
  return result;
}

Result test_rows(const Kernels& kernels, bool full) {
  Random random(5);
  Result result;
  for (int format : {PKV_Q4_0, PKV_Q4_1, PKV_Q8_0})
    for (int64_t n : {1, 15, 16, 50})
      for (int64_t m : {0, 1, 5, 100})
        if (full || m != 1)
          exact_rows(kernels, Weights(format, n, random.one_of({32, 96, 256}), random), m, random, result);
  return result;
}
