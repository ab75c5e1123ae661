// The C interface: picks the kernels of one instruction set at run time.
#include <string.h>

#include <new>

#include "copy.h"
#include "table.h"

#define PKV_API extern "C" __attribute__((visibility("default")))

namespace generic {
extern const pkv_table table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const pkv_table table;
}
namespace avx512 {
extern const pkv_table table;
}
namespace avx512_vnni {
extern const pkv_table table;
}
namespace avx512_bf16 {
extern const pkv_table table;
}
#endif

namespace {

struct Isa {
  const char* name;
  const pkv_table* table;
  bool (*here)();
};

bool always() { return true; }
#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_bf16() { return has_vnni() && __builtin_cpu_supports("avx512bf16"); }
#endif

// From the best to the one that is everywhere.
const Isa ISAS[] = {
#if defined(__x86_64__)
    {"avx512_bf16", &avx512_bf16::table, has_bf16}, {"avx512_vnni", &avx512_vnni::table, has_vnni},
    {"avx512", &avx512::table, has_avx512},         {"avx2", &avx2::table, has_avx2},
#endif
    {"generic", &generic::table, always},
};

}  // namespace

struct pkv_context {
  const Isa* isa;
  int threads;
};

PKV_API int pkv_version(void) { return PKV_VERSION; }

PKV_API pkv_context* pkv_open(const char* isa, int threads) {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  for (const Isa& one : ISAS)
    if ((!strcmp(isa, "auto") || !strcmp(isa, one.name)) && one.here())
      return new (std::nothrow) pkv_context{&one, threads < 1 ? 1 : threads};
  return nullptr;
}

PKV_API void pkv_close(pkv_context* context) { delete context; }
PKV_API const char* pkv_isa(const pkv_context* context) { return context->isa->name; }

PKV_API void pkv_copy(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t planes,
                      int64_t block_bytes, const int32_t* pairs, int64_t count) {
  copy_planes(from, from_stride, to, to_stride, planes, block_bytes, pairs, count);
}

PKV_API void pkv_append(const pkv_context* c, const pkv_layer* layer, const pkv_batch* batch, const void* k,
                        int64_t k_stride, const void* v, int64_t v_stride) {
  c->isa->table->append(*layer, *batch, k, k_stride, v, v_stride, c->threads);
}

PKV_API int64_t pkv_attend_work(const pkv_context* c, int64_t rows, int64_t tokens, int64_t context, int32_t v_dim) {
  return c->isa->table->attend_work(rows, tokens, context, v_dim, c->threads);
}

PKV_API void pkv_attend(const pkv_context* c, const pkv_layer* layer, const pkv_batch* batch, const void* q,
                        int64_t q_stride, void* out, float* lse, void* work) {
  c->isa->table->attend(*layer, *batch, q, q_stride, out, lse, work, c->threads);
}

PKV_API int64_t pkv_packed_bytes(int32_t format, int64_t n, int64_t k) {
  const int64_t panels = (n + 15) / 16;
  if (format == PKV_PLAIN_BF16 || format == PKV_PLAIN_FP16) return panels * ((k + 1) / 2) * 64;
  return panels * (k / 32) * (format == PKV_Q4_0 ? 288 : format == PKV_Q4_1 ? 320 : 544);
}

PKV_API void pkv_pack(const pkv_context* c, int32_t format, int64_t n, int64_t k, const void* weights, void* packed) {
  c->isa->table->pack(format, n, k, weights, packed, c->threads);
}

PKV_API int64_t pkv_linear_work(int32_t format, int64_t m, int64_t k) {
  if (format == PKV_PLAIN_BF16 || format == PKV_PLAIN_FP16) return m * ((k + 1) / 2) * 8;
  return m * k + m * (k / 32) * 8;
}

PKV_API void pkv_linear(const pkv_context* c, int32_t format, int64_t m, int64_t n, int64_t k, const void* x,
                        const void* packed, const void* bias, void* out, void* work) {
  c->isa->table->linear(format, m, n, k, x, packed, bias, out, work, c->threads);
}

PKV_API void pkv_rows(const pkv_context* c, int32_t format, int64_t m, int64_t k, const int64_t* ids,
                      const void* packed, float* out) {
  c->isa->table->rows(format, m, k, ids, packed, out, c->threads);
}

PKV_API void pkv_add_rms_norm(const pkv_context* c, int32_t dtype, int32_t weight_dtype, int64_t m, int64_t dim,
                              const void* x, void* residual, const void* weight, float eps, void* out) {
  c->isa->table->add_rms_norm(dtype, weight_dtype, m, dim, x, residual, weight, eps, out, c->threads);
}

PKV_API void pkv_rope(const pkv_context* c, int32_t dtype, int64_t m, int32_t q_heads, int32_t kv_heads, int32_t rotary,
                      void* q, int64_t q_stride, void* k, int64_t k_stride, int64_t head_stride, const float* cosines,
                      const float* sines) {
  c->isa->table->rope(dtype, m, q_heads, kv_heads, rotary, q, q_stride, k, k_stride, head_stride, cosines, sines,
                      c->threads);
}

PKV_API void pkv_gated(const pkv_context* c, int32_t dtype, int32_t kind, int64_t m, int64_t dim, const void* x,
                       void* out) {
  c->isa->table->gated(dtype, kind, m, dim, x, out, c->threads);
}
