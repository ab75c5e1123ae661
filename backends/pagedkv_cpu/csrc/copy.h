// Copies of blocks: bytes moved from plane to plane, for every instruction set by the C library's own memcpy.
#pragma once
#include <stdint.h>
#include <string.h>

// One plane after the other, so that the ends of a copy lie in as few pages as the blocks do.
static inline void copy_planes(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t planes,
                               int64_t block_bytes, const int32_t* pairs, int64_t count) {
  for (int64_t p = 0; p < planes; p++, from += from_stride, to += to_stride)
    for (int64_t i = 0; i < count; i++)
      memcpy(to + pairs[2 * i + 1] * block_bytes, from + pairs[2 * i] * block_bytes, size_t(block_bytes));
}
