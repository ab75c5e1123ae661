// The C interface of the CPU kernels. Plain data only: no Python, no torch. One library serves every version of both.
//
// Every function is a pure computation on the caller's arrays. Numbers of type `dtype` are fp32, bf16 or fp16. A row's
// bits depend on that row alone, never on the number of rows, the number of threads or the ids of blocks.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PKV_VERSION 3

enum pkv_dtype { PKV_FP32 = 0, PKV_BF16 = 1, PKV_FP16 = 2 };
enum pkv_format { PKV_Q4_0 = 0, PKV_Q4_1 = 1, PKV_Q8_0 = 2, PKV_PLAIN_BF16 = 3, PKV_PLAIN_FP16 = 4 };

// One layer's cache: head-major planes [kv_heads][slots][width], `width` numbers of `kv_dtype` from slot to slot.
typedef struct {
  const char* keys;
  const char* values;
  const float* sinks;   // [q_heads] or NULL
  const float* slopes;  // [q_heads] or NULL
  int64_t slots;
  int32_t q_heads, kv_heads, k_dim, v_dim, k_width, v_width;
  int32_t kv_dtype, dtype, causal, window;  // window 0: none
  float scale, softcap;                     // softcap 0: none
} pkv_layer;

// One batch: rows of queries over a block table. `rows` picks each row's line of the table.
typedef struct {
  const int32_t* cu_q;     // [num_seqs + 1]
  const int32_t* ctx_len;  // [num_seqs]
  const int32_t* table;    // [num_seqs][table_stride], gathered
  const int64_t* slots;    // [num_slots], -1 is not written
  int64_t table_stride, num_slots;
  int32_t num_seqs, num_tokens, block_size;
} pkv_batch;

int pkv_version(void);
// An instruction set and a number of threads: "auto" takes the best that is here, else "generic", "avx2", "avx512",
// "avx512_vnni", "avx512_bf16". NULL where this processor (or this build) does not have it. Closed with pkv_close.
typedef struct pkv_context pkv_context;
pkv_context* pkv_open(const char* isa, int threads);
void pkv_close(pkv_context* context);
const char* pkv_isa(const pkv_context* context);

// Blocks pairs[i][0] of `from` to pairs[i][1] of `to`: planes [planes][blocks][block_bytes], `stride` bytes from plane
// to plane. No block is both read and written.
void pkv_copy(const char* from, int64_t from_stride, char* to, int64_t to_stride, int64_t planes, int64_t block_bytes,
              const int32_t* pairs, int64_t count);

// k, v [num_slots][kv_heads][dim] of `dtype`, `stride` numbers from token to token, into the cache.
void pkv_append(const pkv_context*, const pkv_layer* layer, const pkv_batch* batch, const void* k, int64_t k_stride,
                const void* v, int64_t v_stride);
// q [num_tokens][q_heads][k_dim] -> out [num_tokens][q_heads][v_dim], contiguous; lse [num_tokens][q_heads] or NULL.
// `work` holds at least pkv_attend_work(...) bytes.
int64_t pkv_attend_work(const pkv_context*, int64_t rows, int64_t tokens, int64_t context, int32_t v_dim);
void pkv_attend(const pkv_context*, const pkv_layer* layer, const pkv_batch* batch, const void* q, int64_t q_stride,
                void* out, float* lse, void* work);

// Weights [n][k] -> panels: in GGUF blocks (see linear.h), k a multiple of 32, or plain numbers of 16 bits (see
// plain.h). `packed` holds pkv_packed_bytes(...).
int64_t pkv_packed_bytes(int32_t format, int64_t n, int64_t k);
void pkv_pack(const pkv_context*, int32_t format, int64_t n, int64_t k, const void* weights, void* packed);
// x [m][k] -> out [m][n] (+ bias [n] or NULL), all of the weights' dtype if these are plain, else float32. `work` holds
// pkv_linear_work(format, m, k) bytes.
int64_t pkv_linear_work(int32_t format, int64_t m, int64_t k);
void pkv_linear(const pkv_context*, int32_t format, int64_t m, int64_t n, int64_t k, const void* x, const void* packed,
                const void* bias, void* out, void* work);
// Rows of a packed table of blocks: ids [m] -> out [m][k].
void pkv_rows(const pkv_context*, int32_t format, int64_t m, int64_t k, const int64_t* ids, const void* packed,
              float* out);

// residual += x (x NULL: not), then out = rms_norm(residual) * weight. [m][dim] of `dtype`; the weight may be fp32.
void pkv_add_rms_norm(const pkv_context*, int32_t dtype, int32_t weight_dtype, int64_t m, int64_t dim, const void* x,
                      void* residual, const void* weight, float eps, void* out);
// Turn the first `rotary` entries of each head of q and k in place; cos, sin [m][rotary / 2].
void pkv_rope(const pkv_context*, int32_t dtype, int64_t m, int32_t q_heads, int32_t kv_heads, int32_t rotary, void* q,
              int64_t q_stride, void* k, int64_t k_stride, int64_t head_stride, const float* cosines,
              const float* sines);
// x = [gate, up] [m][2 dim] -> out [m][dim]; kind 0: silu(gate) * up, 1: gelu_tanh(gate) * up.
void pkv_gated(const pkv_context*, int32_t dtype, int32_t kind, int64_t m, int64_t dim, const void* x, void* out);

#ifdef __cplusplus
}
#endif
