// Norms, turns and gates.
#include "check.h"

namespace {

std::vector<float> normals(int64_t count, double size, Random& random) {
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) x = float(size * random.normal());
  return out;
}

struct Normed {
  std::vector<float> residual, out;
};

Normed normed(const pkv_context* context, const float* x, const float* residual, int64_t m, int64_t dim,
              const std::vector<float>& weight, float eps) {
  Normed got{std::vector<float>(residual, residual + m * dim), std::vector<float>(size_t(m * dim), NAN)};
  pkv_add_rms_norm(context, PKV_FP32, PKV_FP32, m, dim, x, got.residual.data(), weight.data(), eps, got.out.data());
  return got;
}

void norm(const Kernels& kernels, int64_t m, int64_t dim, bool added, Random& random, Result& result) {
  const float eps = random.one_of({1e-5f, 1e-6f});
  const double size = random.one_of({1e-3, 1.0, 300.0});
  const std::vector<float> x = normals(m * dim, size, random), residual = normals(m * dim, size, random),
                           weight = normals(dim, 1, random);
  const float* addend = added ? x.data() : nullptr;
  const Normed got = normed(kernels.on(1), addend, residual.data(), m, dim, weight, eps);
  for (int64_t r = 0; r < m; r++) {
    double squares = 0;
    for (int64_t i = r * dim; i < (r + 1) * dim; i++) {
      const float sum = added ? residual[size_t(i)] + x[size_t(i)] : residual[size_t(i)];
      CHECK(got.residual[size_t(i)] == sum, "dim %d: residual %d is %g, not %g", int(dim), int(i),
            double(got.residual[size_t(i)]), double(sum));
      squares += double(sum) * double(sum);
    }
    const double factor = 1 / sqrt(squares / double(dim) + double(eps));
    for (int64_t d = 0; d < dim; d++) {
      const double want = got.residual[size_t(r * dim + d)] * factor * weight[size_t(d)],
                   have = got.out[size_t(r * dim + d)];
      result.error(fabs(have - want), 1e-6 * fabs(want) + 1e-38);
      CHECK(fabs(have - want) <= 1e-6 * fabs(want) + 1e-38, "dim %d row %d entry %d is %g, not %g", int(dim), int(r),
            int(d), have, want);
    }
  }
  const int64_t row = random.below(int(m));
  const Normed alone =
      normed(kernels.on(2), added ? addend + row * dim : nullptr, residual.data() + row * dim, 1, dim, weight, eps);
  CHECK(same(alone.out.data(), got.out.data() + row * dim, size_t(dim)), "row %d of %d alone, dim %d: other bits",
        int(row), int(m), int(dim));
  const Normed again = normed(kernels.on(3), addend, residual.data(), m, dim, weight, eps);
  CHECK(same(again.out.data(), got.out.data(), size_t(m * dim)), "%d rows of %d on three threads: other bits", int(m),
        int(dim));
  result.cases++;
}

struct Heads {
  int64_t count, stride, head_stride;
  std::vector<float> values;  // [m] lines of `stride`, NaN between what belongs to the heads

  Heads(int64_t m, int64_t count, int64_t dim, int64_t head_stride, int64_t gap, Random& random)
      : count(count), stride(count * head_stride + gap), head_stride(head_stride), values(size_t(m * stride), NAN) {
    for (int64_t r = 0; r < m; r++)
      for (int64_t h = 0; h < count; h++)
        for (int64_t d = 0; d < dim; d++) values[size_t(r * stride + h * head_stride + d)] = float(random.normal());
  }
};

// `after` against `before` turned: entry i with entry i + half by the angle of its row; everything else untouched.
void compare(const Heads& before, const Heads& after, int64_t m, int64_t half, const std::vector<float>& c,
             const std::vector<float>& s, Result& result) {
  for (int64_t i = 0; i < m * before.stride; i++) {
    const int64_t r = i / before.stride, in_line = i % before.stride, h = in_line / before.head_stride,
                  d = in_line % before.head_stride;
    const float was = before.values[size_t(i)], have = after.values[size_t(i)];
    if (h >= before.count || d >= 2 * half) {
      CHECK(same(&was, &have, 1), "entry %d of head %d was not to be turned", int(d), int(h));
      continue;
    }
    const int64_t pair = d % half;
    const double other = before.values[size_t(d < half ? i + half : i - half)];
    const double cosine = c[size_t(r * half + pair)], sine = s[size_t(r * half + pair)];
    const double want = was * cosine + (d < half ? -other : other) * sine, off = fabs(have - want);
    const double allowed = 2e-7 * (fabs(was * cosine) + fabs(other * sine)) + 1e-38;
    result.error(off, allowed);
    CHECK(off <= allowed, "row %d head %d entry %d is %g, not %g", int(r), int(h), int(d), double(have), want);
  }
}

void turn(const Kernels& kernels, int64_t m, int64_t half, int64_t rest, Random& random, Result& result) {
  const int64_t dim = 2 * half + rest, head_stride = dim + random.one_of({0, 3});
  const Heads q(m, random.between(1, 5), dim, head_stride, random.one_of({0, 7}), random),
      k(m, random.below(3), dim, head_stride, 4, random);
  std::vector<float> cosines, sines;
  for (int64_t i = 0; i < m * half; i++) {
    const double angle = 2000 * random.uniform();
    cosines.push_back(float(cos(angle))), sines.push_back(float(sin(angle)));
  }
  std::vector<float> first;
  for (int threads = 1; threads <= Kernels::MOST; threads++) {
    Heads a = q, b = k;
    pkv_rope(kernels.on(threads), PKV_FP32, m, int32_t(q.count), int32_t(k.count), int32_t(2 * half), a.values.data(),
             a.stride, b.values.data(), b.stride, head_stride, cosines.data(), sines.data());
    if (threads == 1)
      compare(q, a, m, half, cosines, sines, result), compare(k, b, m, half, cosines, sines, result), first = a.values;
    CHECK(same(first.data(), a.values.data(), first.size()), "%d rows on %d threads: other bits", int(m), threads);
  }
  result.cases++;
}

double gate(int kind, double g) {
  return kind == 0 ? g / (1 + exp(-g)) : 0.5 * g * (1 + tanh(sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
}

std::vector<float> gated(const pkv_context* context, int kind, const float* x, int64_t m, int64_t dim) {
  std::vector<float> out(size_t(m * dim), NAN);
  pkv_gated(context, PKV_FP32, kind, m, dim, x, out.data());
  return out;
}

void gates(const Kernels& kernels, int kind, int64_t m, int64_t dim, Random& random, Result& result) {
  std::vector<float> x = normals(m * 2 * dim, random.one_of({1.0, 5.0, 60.0}), random);
  if (m) x[0] = 0.0f;
  const std::vector<float> out = gated(kernels.on(1), kind, x.data(), m, dim);
  for (int64_t i = 0; i < m * dim; i++) {
    const double g = x[size_t(i / dim * 2 * dim + i % dim)], up = x[size_t(i / dim * 2 * dim + dim + i % dim)];
    // The exponent's own rounding grows with its size; below -10 the tanh form of gelu is nothing in double either.
    const double want = gate(kind, g) * up, size = 1 + fabs(g) * (kind ? 1 + g * g : 1);
    const double allowed = 4e-7 * fabs(want) * size + 2e-7 * fabs(up) * exp(-fabs(g)) + 1e-34,
                 off = fabs(out[size_t(i)] - want);
    result.error(off, allowed);
    CHECK(off <= allowed, "kind %d of %g times %g is %g, not %g", kind, g, up, double(out[size_t(i)]), want);
  }
  CHECK(same(out.data(), gated(kernels.on(3), kind, x.data(), m, dim).data(), size_t(m * dim)),
        "other bits on three threads");
  if (m > 1)
    CHECK(same(out.data() + dim, gated(kernels.on(2), kind, x.data() + 2 * dim, 1, dim).data(), size_t(dim)),
          "row 1 alone, dim %d: other bits", int(dim));
  result.cases++;
}

// A large gate lets everything through or nothing; a NaN stays where it is.
void far_gates(const Kernels& kernels, int kind, Result& result) {
  const std::vector<float> x = {1e4f, -1e4f, 88.5f, -88.5f, NAN,  3e38f, -3e38f, 0.0f, -0.0f,
                                2.0f, 2.0f,  2.0f,  2.0f,   2.0f, 1.0f,  1.0f,   1.0f, 1.0f};
  const float want[] = {2e4f, 0.0f, 177.0f, 0.0f, NAN, 3e38f, 0.0f, 0.0f, 0.0f};
  const std::vector<float> out = gated(kernels.on(1), kind, x.data(), 1, 9);
  for (size_t i = 0; i < 9; i++)
    CHECK(isnan(want[i]) ? isnan(out[i]) : fabs(out[i] - want[i]) <= 1e-6f * want[i] + 2e-37f, "kind %d of %g is %g",
          kind, double(x[i]), double(out[i]));
  result.cases++;
}

}  // namespace

Result test_norm(const Kernels& kernels, bool full) {
  Random random(6);
  Result result;
  for (int64_t dim : {1, 3, 4, 8, 16, 31, 33, 576, 1024})
    for (int64_t m : {1, 5, 70})
      for (bool added : {true, false})
        if (full || m != 5) norm(kernels, m, dim, added, random, result);
  return result;
}

Result test_rope(const Kernels& kernels, bool full) {
  Random random(7);
  Result result;
  for (int64_t half : {1, 4, 5, 16, 20, 32, 64})
    for (int64_t m : {0, 1, 3, 70})
      for (int64_t rest : {0, 6})
        if (full || m != 3) turn(kernels, m, half, rest, random, result);
  return result;
}

Result test_gated(const Kernels& kernels, bool full) {
  Random random(8);
  Result result;
  for (int kind : {0, 1}) {
    for (int64_t dim : {1, 3, 4, 8, 15, 16, 100, 1536})
      for (int64_t m : {0, 1, 12})
        if (full || m != 1) gates(kernels, kind, m, dim, random, result);
    far_gates(kernels, kind, result);
  }
  return result;
}
