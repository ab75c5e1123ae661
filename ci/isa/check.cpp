#include "check.h"

int failures = 0;

static int fraction_bits(int dtype) { return dtype == PKV_BF16 ? 7 : 10; }
static int highest_exponent(int dtype) { return dtype == PKV_BF16 ? 255 : 31; }
static uint16_t infinity(int dtype) { return uint16_t(highest_exponent(dtype) << fraction_bits(dtype)); }

double value_of(uint16_t bits, int dtype) {
  const int width = fraction_bits(dtype), top = highest_exponent(dtype);
  const int exponent = (bits >> width) & top, fraction = bits & ((1 << width) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == top) return fraction ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * ldexp(fraction, 1 - top / 2 - width);
  return sign * ldexp((1 << width) + fraction, exponent - top / 2 - width);
}

bool is_nan(uint16_t bits, int dtype) { return (bits & 0x7fff) > infinity(dtype); }

// The values of all positive numbers in order, and where infinity stands, the power of two that would follow them.
static const std::vector<double>& ladder(int dtype) {
  static std::vector<double> ladders[3];
  std::vector<double>& values = ladders[dtype];
  if (values.empty()) {
    for (int bits = 0; bits < infinity(dtype); bits++) values.push_back(value_of(uint16_t(bits), dtype));
    values.push_back(ldexp(1.0, highest_exponent(dtype) / 2 + 1));
  }
  return values;
}

uint16_t nearest(double x, int dtype) {
  if (x != x) return 0x7fff;
  const std::vector<double>& values = ladder(dtype);
  const uint16_t sign = signbit(x) ? 0x8000 : 0;
  const double size = fabs(x);
  if (size >= values.back()) return sign | infinity(dtype);
  const size_t above = size_t(std::upper_bound(values.begin(), values.end(), size) - values.begin());
  const double down = size - values[above - 1], up = values[above] - size;
  const bool low = down < up || (down == up && above % 2 == 1);
  return sign | uint16_t(low ? above - 1 : above);
}

double rounding_of(double x, int dtype) {
  const double unit = dtype == PKV_FP32 ? 0x1p-24 : dtype == PKV_BF16 ? 0x1p-8 : 0x1p-11;
  return 1.01 * unit * fabs(x) + (dtype == PKV_FP16 ? 0x1p-25 : 0x1p-133);
}

double Numbers::get(int64_t i) const {
  if (dtype == PKV_FP32) {
    float x;
    memcpy(&x, at(i), 4);
    return x;
  }
  uint16_t bits;
  memcpy(&bits, at(i), 2);
  return value_of(bits, dtype);
}

void Numbers::set(int64_t i, double x) {
  const float whole = float(x);
  const uint16_t half = dtype == PKV_FP32 ? 0 : nearest(x, dtype);
  memcpy(bytes.data() + i * bytes_of(dtype), dtype == PKV_FP32 ? static_cast<const void*>(&whole) : &half,
         size_t(bytes_of(dtype)));
}

Kernels::Kernels(const char* isa) {
  for (int i = 0; i < MOST; i++) contexts_[i] = pkv_open(isa, i + 1);
}

Kernels::~Kernels() {
  for (pkv_context* context : contexts_) pkv_close(context);
}
