// Copies of blocks: every byte that is named, and no other.
#include "check.h"

namespace {

// Planes of random bytes with a gap after each.
struct Planes {
  int64_t blocks, size, stride;
  std::vector<char> bytes;

  Planes(int64_t planes, int64_t blocks, int64_t size, int64_t gap, Random& random)
      : blocks(blocks), size(size), stride(blocks * size + gap), bytes(size_t(planes * stride)) {
    for (char& byte : bytes) byte = char(random.bits());
  }
  char* block(int64_t plane, int64_t block) { return bytes.data() + plane * stride + block * size; }
};

void copy(int64_t planes, int64_t size, int count, Random& random, Result& result) {
  Planes from(planes, 9, size, 0, random), to(planes, 12, size, random.one_of({0, 24}), random), want = to;
  std::vector<int32_t> targets = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, pairs;
  random.shuffle(targets);
  for (int i = 0; i < count; i++) pairs.push_back(random.below(9)), pairs.push_back(targets[size_t(i)]);
  for (int64_t p = 0; p < planes; p++)
    for (int i = 0; i < count; i++)
      for (int64_t byte = 0; byte < size; byte++)
        want.block(p, pairs[size_t(2 * i + 1)])[byte] = from.block(p, pairs[size_t(2 * i)])[byte];
  pkv_copy(from.bytes.data(), from.stride, to.bytes.data(), to.stride, planes, size, pairs.data(), count);
  CHECK(to.bytes == want.bytes, "%d planes, %d bytes a block, %d pairs", int(planes), int(size), count);
  result.cases++;
}

}  // namespace

Result test_copy(const Kernels&, bool) {
  Random random(9);
  Result result;
  for (int64_t planes : {1, 5})
    for (int64_t size : {16, 48, 4096})
      for (int count : {0, 1, 11}) copy(planes, size, count, random, result);
  return result;
}
