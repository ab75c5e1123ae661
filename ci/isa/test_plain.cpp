// Products with weights of 16 bits.
#include "check.h"

namespace {

int format_of(int dtype) { return dtype == PKV_BF16 ? PKV_PLAIN_BF16 : PKV_PLAIN_FP16; }

struct Weights {
  int64_t n, k;
  Numbers values, bias;
  std::vector<char> packed;

  Weights(const Kernels& kernels, int dtype, int64_t n, int64_t k, Random& random)
      : n(n), k(k), values(dtype, n * k, 1.0, random), bias(dtype, random.chance(50) ? n : 0, 3.0, random) {
    packed = pack(kernels.on(1));
    CHECK(packed == pack(kernels.on(3)), "packed otherwise on three threads");
  }
  std::vector<char> pack(const pkv_context* context) {
    const int format = format_of(values.dtype);
    std::vector<char> out(size_t(pkv_packed_bytes(format, n, k)), char(NANS));
    pkv_pack(context, format, n, k, values.data(), out.data());
    return out;
  }
};

// Rows first .. first + m - 1 of x times the weights.
Numbers product(const pkv_context* context, const Weights& w, const Numbers& x, int64_t first, int64_t m) {
  const int format = format_of(x.dtype);
  Numbers out(x.dtype, m * w.n, NANS);
  std::vector<char> work(size_t(pkv_linear_work(format, m, w.k)));
  pkv_linear(context, format, m, w.n, w.k, x.at(first * w.k), w.packed.data(),
             w.bias.bytes.empty() ? nullptr : w.bias.at(0), out.data(), work.data());
  return out;
}

void compare(const Weights& w, const Numbers& x, const Numbers& out, int64_t m, Result& result) {
  for (int64_t r = 0; r < m; r += m > 40 ? 7 : 1)
    for (int64_t o = 0; o < w.n; o++) {
      double want = w.bias.bytes.empty() ? 0 : w.bias.get(o), size = fabs(want);
      for (int64_t i = 0; i < w.k; i++) {
        const double term = x.get(r * w.k + i) * w.values.get(o * w.k + i);
        want += term, size += fabs(term);
      }
      const double off = fabs(out.get(r * w.n + o) - want), allowed = rounding_of(want, x.dtype) + 4e-6 * size;
      result.error(off, allowed);
      CHECK(off <= allowed, "%s [%d][%d] x %d: row %d output %d is %g, not %g", name_of(x.dtype), int(w.n), int(w.k),
            int(m), int(r), int(o), out.get(r * w.n + o), want);
    }
}

void run(const Kernels& kernels, int dtype, int64_t m, int64_t n, int64_t k, Random& random, Result& result) {
  const Weights w(kernels, dtype, n, k, random);
  const Numbers x(dtype, m * k, 1.0, random), out = product(kernels.on(1), w, x, 0, m);
  compare(w, x, out, m, result);
  for (int threads = 2; threads <= Kernels::MOST; threads++)
    CHECK(product(kernels.on(threads), w, x, 0, m).bytes == out.bytes, "other bits on %d threads", threads);
  for (int i = 0; m && i < 4; i++) {
    const int64_t row = random.below(int(m)), count = std::min<int64_t>(m - row, random.one_of({1, 2, 3, 7, 9}));
    const Numbers some = product(kernels.on(random.between(1, 3)), w, x, row, count);
    CHECK(same(some.at(0), out.at(row * n), some.bytes.size()), "%s [%d][%d]: row %d of %d, with %d rows: other bits",
          name_of(dtype), int(n), int(k), int(row), int(m), int(count));
  }
  result.cases++;
}

}  // namespace

Result test_plain(const Kernels& kernels, bool full) {
  Random random(10);
  Result result;
  for (int dtype : {PKV_BF16, PKV_FP16}) {
    for (int64_t m : {0, 1, 2, 5, 8, 21, 150})
      for (int64_t n : {1, 16, 40, 131})
        if (full || (n != 16 && (m != 150 || n == 40)))
          run(kernels, dtype, m, n, random.one_of({1, 2, 31, 64, 300}), random, result);
  }
  return result;
}
