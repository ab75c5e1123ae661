// Append: these slots and no others, in every pair of dtypes; and the conversions that it and attention share.
#include "check.h"

namespace {

struct Plane {
  int dim, width;
  int64_t stride;  // numbers from token to token of the source
  Numbers source;  // [tokens][heads][dim]
  Numbers cache;   // [heads][slots][width]
};

struct Setup {
  int heads, tokens, dtype, kv_dtype;
  int64_t slots;
};

Plane plane(const Setup& setup, int dim, Random& random) {
  const int width = dim + random.one_of({0, 1, 8});
  const int64_t stride = int64_t(setup.heads) * dim + random.one_of({0, 5});
  Plane made{dim, width, stride, Numbers(setup.dtype, setup.tokens * stride, NANS),
             Numbers(setup.kv_dtype, setup.heads * setup.slots * width, NANS)};
  for (int i = 0; i < setup.tokens; i++)
    for (int d = 0; d < setup.heads * dim; d++) made.source.set(i * stride + d, random.normal());
  return made;
}

pkv_layer layer(const Setup& setup, const Plane& keys, const Plane& values) {
  pkv_layer made{};
  made.keys = keys.cache.at(0), made.values = values.cache.at(0), made.slots = setup.slots;
  made.q_heads = made.kv_heads = setup.heads, made.dtype = setup.dtype, made.kv_dtype = setup.kv_dtype;
  made.k_dim = keys.dim, made.k_width = keys.width, made.v_dim = values.dim, made.v_width = values.width;
  return made;
}

void append(const pkv_context* context, const Setup& setup, const std::vector<int64_t>& slots, const Plane& keys,
            const Plane& values) {
  pkv_batch batch{};
  batch.slots = slots.data(), batch.num_slots = int64_t(slots.size()), batch.block_size = 1;
  const pkv_layer to = layer(setup, keys, values);
  pkv_append(context, &to, &batch, keys.source.at(0), keys.stride, values.source.at(0), values.stride);
}

// The cache as it should be: the source's numbers rounded once, zeros behind them, everything else as it was.
Numbers expected(const Setup& setup, const std::vector<int64_t>& slots, const Plane& plane) {
  Numbers cache(setup.kv_dtype, setup.heads * setup.slots * plane.width, NANS);
  for (int i = 0; i < setup.tokens; i++)
    for (int h = 0; slots[size_t(i)] >= 0 && h < setup.heads; h++)
      for (int d = 0; d < plane.width; d++)
        cache.set((h * setup.slots + slots[size_t(i)]) * plane.width + d,
                  d < plane.dim ? plane.source.get(i * plane.stride + h * plane.dim + d) : 0.0);
  return cache;
}

std::vector<int64_t> drawn_slots(const Setup& setup, Random& random) {
  std::vector<int64_t> all(size_t(setup.slots));
  for (size_t i = 0; i < all.size(); i++) all[i] = int64_t(i);
  random.shuffle(all);
  all.resize(size_t(setup.tokens));
  for (int64_t& slot : all)
    if (random.chance(15)) slot = -1;
  return all;
}

void run(const Setup& setup, const Kernels& kernels, Random& random, Result& result) {
  const std::vector<int64_t> slots = drawn_slots(setup, random);
  const int dim = random.one_of({1, 7, 8, 12, 33, 64, 256});
  const Plane keys = plane(setup, dim, random), values = plane(setup, random.chance(50) ? dim : 20, random);
  append(kernels.on(random.between(1, Kernels::MOST)), setup, slots, keys, values);
  for (const Plane* one : {&keys, &values})
    CHECK(one->cache.bytes == expected(setup, slots, *one).bytes, "%d tokens of %d x %d, %s into %s: another cache",
          setup.tokens, setup.heads, one->dim, name_of(setup.dtype), name_of(setup.kv_dtype));
  result.cases++;
}

// `source` [count] through an append of lines of `dim` numbers: what the cache holds then, without the padding.
Numbers converted(const Kernels& kernels, const Numbers& source, int64_t count, int kv_dtype, int dim) {
  const Setup setup{1, int(count / dim), source.dtype, kv_dtype, count / dim};
  Plane keys{dim, dim, dim, source, Numbers(kv_dtype, count, NANS)};
  const Plane values{1, 1, 0, source, Numbers(kv_dtype, setup.slots)};
  std::vector<int64_t> slots(size_t(setup.slots));
  for (size_t i = 0; i < slots.size(); i++) slots[i] = int64_t(i);
  append(kernels.on(1), setup, slots, keys, values);
  return keys.cache;
}

uint16_t bits_at(const Numbers& numbers, int64_t i) {
  uint16_t bits;
  memcpy(&bits, numbers.at(i), 2);
  return bits;
}

// All 65,536 numbers of a 16-bit dtype into float32.
void widened(const Kernels& kernels, int dtype, int dim) {
  Numbers all(dtype, 65536);
  for (int i = 0; i < 65536; i++) {
    const uint16_t bits = uint16_t(i);
    memcpy(all.data() + 2 * i, &bits, 2);
  }
  const Numbers wide = converted(kernels, all, 65536, PKV_FP32, dim);
  for (int i = 0; i < 65536; i++) {
    const double want = value_of(uint16_t(i), dtype), have = wide.get(i);
    const bool same = is_nan(uint16_t(i), dtype) ? isnan(have) : have == want && signbit(have) == signbit(want);
    CHECK(same, "%s %04x becomes %g, not %g", name_of(dtype), i, have, want);
  }
}

// Floats around every number of a 16-bit dtype: itself, half way to the next, and one step to either side of both.
std::vector<float> around(int dtype, Random& random) {
  std::vector<float> floats = {INFINITY,       -INFINITY, NAN,      -NAN,   3.4028235e38f,
                               -3.4028235e38f, 65519.99f, 65520.0f, 1e-45f, -1e-45f};
  for (int i = 0; i < 65536; i++) {
    const double here = value_of(uint16_t(i), dtype), next = value_of(uint16_t(i + 1), dtype);
    if (is_nan(uint16_t(i), dtype) || isinf(here)) continue;
    for (double x :
         {here, isfinite(next) ? here + (next - here) / 2 : here * (1 + ldexp(1.0, dtype == PKV_BF16 ? -9 : -12))}) {
      const float middle = float(x);
      for (float f : {middle, nextafterf(middle, INFINITY), nextafterf(middle, -INFINITY)}) floats.push_back(f);
    }
  }
  for (int i = 0; i < 10000; i++) {
    const uint32_t bits = random.bits();
    float any;
    memcpy(&any, &bits, 4);
    floats.push_back(any);
  }
  return floats;
}

void narrowed(const Kernels& kernels, int dtype, Random& random) {
  std::vector<float> floats = around(dtype, random);
  while (floats.size() % 11) floats.push_back(0.0f);
  Numbers source(PKV_FP32, int64_t(floats.size()));
  memcpy(source.data(), floats.data(), floats.size() * 4);
  const Numbers narrow = converted(kernels, source, int64_t(floats.size()), dtype, 11);
  for (size_t i = 0; i < floats.size(); i++) {
    const uint16_t want = nearest(floats[i], dtype), have = bits_at(narrow, int64_t(i));
    CHECK(isnan(floats[i]) ? is_nan(have, dtype) : have == want, "%s of %a is %04x, not %04x", name_of(dtype),
          double(floats[i]), have, want);
  }
}

}  // namespace

Result test_append(const Kernels& kernels, bool full) {
  Random random(2);
  Result result;
  for (int i = 0; i < (full ? 20 : 1); i++)
    for (int dtype = 0; dtype < 3; dtype++)
      for (int kv_dtype = 0; kv_dtype < 3; kv_dtype++)
        for (int tokens : {0, 1, 5, 70})
          run({random.between(1, 4), tokens, dtype, kv_dtype, tokens + random.below(9)}, kernels, random, result);
  return result;
}

Result test_conversion(const Kernels& kernels, bool) {
  Random random(3);
  Result result;
  for (int dtype : {PKV_BF16, PKV_FP16}) {
    for (int dim : {1, 4, 16, 64}) widened(kernels, dtype, dim), result.cases++;
    narrowed(kernels, dtype, random), result.cases++;
  }
  return result;
}
