// The kernels of one instruction set.
#pragma once
#include "pagedkv_cpu.h"

struct pkv_table {
  int64_t (*attend_work)(int64_t rows, int64_t tokens, int64_t context, int32_t v_dim, int threads);
  void (*attend)(const pkv_layer&, const pkv_batch&, const void* q, int64_t q_stride, void* out, float* lse, void* work,
                 int threads);
  void (*append)(const pkv_layer&, const pkv_batch&, const void* k, int64_t k_stride, const void* v, int64_t v_stride,
                 int threads);
  void (*linear)(int format, int64_t m, int64_t n, int64_t k, const void* x, const void* packed, const void* bias,
                 void* out, void* work, int threads);
  void (*pack)(int format, int64_t n, int64_t k, const void* weights, void* packed, int threads);
  void (*rows)(int format, int64_t m, int64_t k, const int64_t* ids, const void* packed, float* out, int threads);
  void (*add_rms_norm)(int dtype, int weight_dtype, int64_t m, int64_t dim, const void* x, void* residual,
                       const void* weight, float eps, void* out, int threads);
  void (*rope)(int dtype, int64_t m, int32_t q_heads, int32_t kv_heads, int32_t rotary, void* q, int64_t q_stride,
               void* k, int64_t k_stride, int64_t head_stride, const float* cosines, const float* sines, int threads);
  void (*gated)(int dtype, int kind, int64_t m, int64_t dim, const void* x, void* out, int threads);
};
