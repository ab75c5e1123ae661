// Norms, turns and gates of 16-bit numbers: computed in float32, rounded once.
#include "check.h"

namespace {

bool same_bits(const Numbers& part, const Numbers& whole, int64_t from) {
  return same(part.at(0), whole.at(from), part.bytes.size());
}

void check(const char* what, int64_t i, double have, double want, double allowed, Result& result) {
  result.error(fabs(have - want), allowed);
  CHECK(fabs(have - want) <= allowed, "%s: entry %d is %g, not %g", what, int(i), have, want);
}

struct Normed {
  Numbers residual, out;
};

Normed normed(const pkv_context* context, const char* x, const char* residual, int64_t m, int64_t dim,
              const Numbers& weight, int dtype) {
  Normed got{Numbers(dtype, m * dim), Numbers(dtype, m * dim, NANS)};
  memcpy(got.residual.data(), residual, got.residual.bytes.size());
  pkv_add_rms_norm(context, dtype, weight.dtype, m, dim, x, got.residual.data(), weight.at(0), 1e-5f, got.out.data());
  return got;
}

void norm(const Kernels& kernels, int dtype, int64_t m, int64_t dim, bool wide, bool added, Random& random,
          Result& result) {
  const double size = random.one_of({0.1, 1.0, 20.0});
  const Numbers x(dtype, m * dim, size, random), before(dtype, m * dim, size, random),
      weight(wide ? int(PKV_FP32) : dtype, dim, 1.0, random);
  const Normed got = normed(kernels.on(1), added ? x.at(0) : nullptr, before.at(0), m, dim, weight, dtype);
  for (int64_t r = 0; r < m; r++) {
    double squares = 0;
    for (int64_t i = r * dim; i < (r + 1) * dim; i++) {
      const double sum = before.get(i) + (added ? x.get(i) : 0), have = got.residual.get(i);
      check("residual", i, have, sum, added ? rounding_of(sum, dtype) : 0, result);
      squares += have * have;
    }
    const double factor = 1 / sqrt(squares / double(dim) + 1e-5f);
    for (int64_t d = 0; d < dim; d++) {
      const double want = got.residual.get(r * dim + d) * factor * weight.get(d);
      check("norm", d, got.out.get(r * dim + d), want, rounding_of(want, dtype), result);
    }
  }
  const int64_t row = random.below(int(m));
  const Normed alone =
      normed(kernels.on(2), added ? x.at(row * dim) : nullptr, before.at(row * dim), 1, dim, weight, dtype);
  CHECK(same_bits(alone.out, got.out, row * dim), "row %d of %d alone, dim %d: other bits", int(row), int(m), int(dim));
  result.cases++;
}

// Sums of every special number with every other, in each place of a vector: rounded as they must be.
void specials(const Kernels& kernels, int dtype, Result& result) {
  const std::vector<double> some = {0,     1,      -1,      INFINITY, -INFINITY, NAN,
                                    65504, -65504, 0x1p-24, 3e38,     0x1p-8,    1.0078125};
  const int64_t count = int64_t(some.size()), dim = count * count;
  Numbers x(dtype, dim), sums(dtype, dim), weight(dtype, dim), out(dtype, dim);
  for (int64_t i = 0; i < dim; i++) x.set(i, some[size_t(i / count)]), sums.set(i, some[size_t(i % count)]);
  Numbers want = sums;
  for (int64_t i = 0; i < dim; i++) want.set(i, float(x.get(i)) + float(sums.get(i)));
  pkv_add_rms_norm(kernels.on(1), dtype, dtype, 1, dim, x.at(0), sums.data(), weight.at(0), 1e-5f, out.data());
  for (int64_t i = 0; i < dim; i++)
    CHECK(sums.get(i) == want.get(i) || (isnan(sums.get(i)) && isnan(want.get(i))), "%s %g + %g is %g, not %g",
          name_of(dtype), x.get(i), some[size_t(i % count)], sums.get(i), want.get(i));
  result.cases++;
}

void turn(const Kernels& kernels, int dtype, int64_t m, int64_t half, int64_t rest, Random& random, Result& result) {
  const int64_t dim = 2 * half + rest;
  const Numbers q(dtype, m * 3 * dim, 1.0, random), k(dtype, m * dim, 1.0, random);
  const Numbers cosines(PKV_FP32, m * half, 1.0, random), sines(PKV_FP32, m * half, 1.0, random);
  Numbers a = q, b = k;
  const auto floats = [](const Numbers& numbers) { return reinterpret_cast<const float*>(numbers.at(0)); };
  pkv_rope(kernels.on(2), dtype, m, 3, 1, int32_t(2 * half), a.data(), 3 * dim, b.data(), dim, dim, floats(cosines),
           floats(sines));
  const auto compare = [&](const Numbers& before, const Numbers& after, int64_t heads) {
    for (int64_t i = 0; i < m * heads * dim; i++) {
      const int64_t r = i / (heads * dim), d = i % dim, at = r * half + d % half;
      if (d >= 2 * half) {
        CHECK(same(before.at(i), after.at(i), 2), "entry %d was not to be turned", int(d));
        continue;
      }
      const double other = before.get(d < half ? i + half : i - half), c = cosines.get(at), s = sines.get(at);
      const double want = before.get(i) * c + (d < half ? -other : other) * s;
      const double size = fabs(before.get(i) * c) + fabs(other * s);
      check("turn", i, after.get(i), want, rounding_of(want, dtype) + 2e-7 * size, result);
    }
  };
  compare(q, a, 3), compare(k, b, 1);
  result.cases++;
}

void gates(const Kernels& kernels, int dtype, int kind, int64_t m, int64_t dim, Random& random, Result& result) {
  const Numbers x(dtype, m * 2 * dim, random.one_of({1.0, 6.0}), random);
  Numbers out(dtype, m * dim, NANS);
  pkv_gated(kernels.on(3), dtype, kind, m, dim, x.at(0), out.data());
  for (int64_t i = 0; i < m * dim; i++) {
    const double g = x.get(i / dim * 2 * dim + i % dim), up = x.get(i / dim * 2 * dim + dim + i % dim);
    const double u = kind == 0 ? -g : -2 * sqrt(2 / M_PI) * (g + 0.044715 * g * g * g);
    const double want = g / (1 + exp(u)) * up;
    check("gate", i, out.get(i), want, rounding_of(want, dtype) + 1e-6 * (1 + fabs(u)) * fabs(want) + 1e-34, result);
  }
  if (m > 1) {
    Numbers alone(dtype, dim, NANS);
    pkv_gated(kernels.on(1), dtype, kind, 1, dim, x.at(2 * dim), alone.data());
    CHECK(same_bits(alone, out, dim), "row 1 alone, dim %d: other bits", int(dim));
  }
  result.cases++;
}

}  // namespace

Result test_narrow(const Kernels& kernels, bool full) {
  Random random(11);
  Result result;
  for (int dtype : {PKV_BF16, PKV_FP16}) {
    for (int64_t dim : {1, 7, 16, 33, 576})
      for (int64_t m : {1, 60})
        for (bool wide : {true, false})
          if (full || m == 1 || dim != 576) norm(kernels, dtype, m, dim, wide, random.chance(50), random, result);
    specials(kernels, dtype, result);
    for (int64_t half : {1, 5, 16, 32}) turn(kernels, dtype, random.one_of({1, 5, 65}), half, half % 3, random, result);
    for (int kind : {0, 1})
      for (int64_t dim : {1, 15, 16, 100}) gates(kernels, dtype, kind, random.one_of({1, 12}), dim, random, result);
  }
  return result;
}
