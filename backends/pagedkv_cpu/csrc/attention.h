// Attention over the paged cache.
//
// A tile is a few queries of one row that read the same KV head. It walks its keys in chunks of 64 positions and splits
// of 1024, both counted from position 0: for each chunk the scores, their maximum, the weights e^(s - max), and the
// weighted sum of the values (the online softmax of Milakov and Gimelshein 2018); splits are merged in their order.
// A query's sums always run over its own visible keys in the same order, so its bits depend on nothing else. A position
// that a query may not see is never multiplied with anything: whatever it holds cannot leak.
#pragma once
#include "simd.h"
#if defined(_OPENMP)
#include <omp.h>
#endif

namespace PKV_ISA {

constexpr int CHUNK = 64, SPLIT = 1024, TILE = 16, MAX_DIM = 512;

// What one thread needs for a tile.
struct Scratch {
  float queries[TILE * MAX_DIM];                         // scaled, [query][k_dim]
  float sums[TILE * MAX_DIM];                            // of a split, [query][v_dim]
  float total[TILE * MAX_DIM];                           // of all splits so far
  float keys[CHUNK * MAX_DIM], values[CHUNK * MAX_DIM];  // a chunk of a 16-bit cache as floats
  float scores[TILE * CHUNK];
};

// State of the online softmax of one query.
struct State {
  float top, weight;  // largest score so far, sum of the weights relative to it
};

struct Query {
  int64_t token;                      // its row in q and out
  int32_t head, low, high, position;  // visible keys low .. high - 1
};

struct Tile {
  const pkv_layer* layer;
  const pkv_batch* batch;
  const int32_t* blocks;  // the row's block table
  int32_t kv_head, count;
  Query query[TILE];
};

static inline int64_t scratch_bytes() { return (int64_t(sizeof(Scratch)) + 63) / 64 * 64; }

static inline const char* slot_of(const Tile& t, const char* plane, int width, int position) {
  const int size = t.batch->block_size;
  const int64_t slot = int64_t(t.blocks[position / size]) * size + position % size;
  return plane + (int64_t(t.kv_head) * t.layer->slots + slot) * width * size_of(t.layer->kv_dtype);
}

// Ask for the keys and values of positions first .. last - 1. Blocks lie anywhere in memory, where no processor guesses
// the next one by itself.
static void fetch(const Tile& t, int first, int last) {
  const pkv_layer& layer = *t.layer;
  const int size = t.batch->block_size, item = size_of(layer.kv_dtype);
  for (int at = first; at < last;) {
    const int run = size - at % size < last - at ? size - at % size : last - at;
    const char* keys = slot_of(t, layer.keys, layer.k_width, at);
    const char* values = slot_of(t, layer.values, layer.v_width, at);
    for (int64_t i = 0; i < int64_t(run) * layer.k_width * item; i += 64) __builtin_prefetch(keys + i, 0, 2);
    for (int64_t i = 0; i < int64_t(run) * layer.v_width * item; i += 64) __builtin_prefetch(values + i, 0, 2);
    at += run;
  }
}

// Pointers to the floats of positions first .. last - 1; numbers of 16 bits are converted into `wide`.
static void rows_of(const Tile& t, const char* plane, int width, int dim, int first, int last, float* wide,
                    const float** rows) {
  const int32_t dtype = t.layer->kv_dtype;
  const int size = t.batch->block_size, bytes = width * size_of(dtype);
  for (int at = first; at < last;) {
    const char* from = slot_of(t, plane, width, at);
    const int run = size - at % size < last - at ? size - at % size : last - at;
    for (int i = 0; i < run; i++, at++) {
      if (dtype == PKV_FP32) {
        rows[at - first] = reinterpret_cast<const float*>(from + int64_t(i) * bytes);
      } else {
        float* to = wide + int64_t(at - first) * dim;
        widen(from + int64_t(i) * bytes, dtype, dim, to);
        rows[at - first] = to;
      }
    }
  }
}

// scores [count] = q . row; the part of dim beyond whole vectors is added at the end.
static void dots(const float* q, const float* const* rows, int count, int dim, float* scores) {
  const int whole = dim / W * W;
  for (int i = 0; i < count; i += 8) {
    const float* row[8];
    for (int j = 0; j < 8; j++) row[j] = rows[i + j < count ? i + j : count - 1];
    vf sums[8] = {};
    for (int d = 0; d < whole; d += W) {
      const vf x = load(q + d);
      for (int j = 0; j < 8; j++) sums[j] = fma(x, load(row[j] + d), sums[j]);
    }
    float some[8], *out = i + 8 <= count ? scores + i : some;
    sums8(sums, out);
    for (int d = whole; d < dim; d++)
      for (int j = 0; j < 8; j++) out[j] = fmaf(q[d], row[j][d], out[j]);
    for (int j = 0; out == some && i + j < count; j++) scores[i + j] = out[j];
  }
}

// sums[n][dim] += weights[n][i] * rows[i] for i = first .. last - 1, NQ queries and NV vectors at a time.
template <int NQ, int NV>
static void add_values(const float* const* rows, const float* const* weights, float* const* sums, int first, int last,
                       int d) {
  vf acc[NQ][NV];
  for (int n = 0; n < NQ; n++)
    for (int v = 0; v < NV; v++) acc[n][v] = load(sums[n] + d + v * W);
  for (int i = first; i < last; i++) {
    vf w[NQ];
    for (int n = 0; n < NQ; n++) w[n] = splat(weights[n][i]);
    for (int v = 0; v < NV; v++) {
      const vf value = load(rows[i] + d + v * W);
      for (int n = 0; n < NQ; n++) acc[n][v] = fma(w[n], value, acc[n][v]);
    }
  }
  for (int n = 0; n < NQ; n++)
    for (int v = 0; v < NV; v++) store(sums[n] + d + v * W, acc[n][v]);
}

template <int NQ>
static void weigh(const float* const* rows, const float* const* weights, float* const* sums, int first, int last,
                  int dim) {
  if (first >= last) return;
  constexpr int NV = NQ == 1 ? 8 : NQ == 4 ? 2 : 4;
  int d = 0;
  for (; d + NV * W <= dim; d += NV * W) add_values<NQ, NV>(rows, weights, sums, first, last, d);
  for (; d + W <= dim; d += W) add_values<NQ, 1>(rows, weights, sums, first, last, d);
  for (; d < dim; d++)
    for (int n = 0; n < NQ; n++)
      for (int i = first; i < last; i++) sums[n][d] = fmaf(weights[n][i], rows[i][d], sums[n][d]);
}

// Scores of one query with rows of positions first .. last - 1 -> weights [CHUNK]; updates state and scales sums.
static void soften(const Tile& t, const Query& q, int first, int last, float* scores, State& state, float* sums) {
  const pkv_layer& layer = *t.layer;
  const int low = q.low > first ? q.low - first : 0, high = (q.high < last ? q.high : last) - first;
  if (layer.softcap > 0)
    for (int i = low; i < high; i++) scores[i] = layer.softcap * tanhf(scores[i] / layer.softcap);
  if (layer.slopes)
    for (int i = low; i < high; i++) scores[i] += layer.slopes[q.head] * float(first + i - q.position);
  for (int i = 0; i < low; i++) scores[i] = -INFINITY;
  for (int i = high; i < CHUNK; i++) scores[i] = -INFINITY;
  vf most = load(scores);
  for (int i = W; i < CHUNK; i += W) most = vmax(most, load(scores + i));
  const float top = fmaxf(state.top, highest(most)), keep = state.top == top ? 1.0f : exp1(state.top - top);
  vf weight = vf{};
  for (int i = 0; i < CHUNK; i += W) {
    const vf w = vexp(load(scores + i) - splat(top));
    store(scores + i, w);
    weight += w;
  }
  state.weight = fmaf(state.weight, keep, sum(weight));
  state.top = top;
  if (keep != 1.0f)
    for (int d = 0; d < layer.v_dim; d++) sums[d] *= keep;
}

// One chunk for all queries of the tile that see any of it.
static void chunk(const Tile& t, int first, int last, Scratch& s, State* states) {
  const pkv_layer& layer = *t.layer;
  const float *keys[CHUNK], *values[CHUNK], *weights[TILE];
  float* sums[TILE];
  int lows[TILE], highs[TILE], seen = 0, low = last, high = first;
  for (int n = 0; n < t.count; n++) {
    const int from = t.query[n].low > first ? t.query[n].low : first;
    const int to = t.query[n].high < last ? t.query[n].high : last;
    if (from < low && from < to) low = from;
    if (to > high && from < to) high = to;
  }
  if (low >= high) return;
  rows_of(t, layer.keys, layer.k_width, layer.k_dim, low, high, s.keys, keys + (low - first));
  rows_of(t, layer.values, layer.v_width, layer.v_dim, low, high, s.values, values + (low - first));
  for (int n = 0; n < t.count; n++) {
    const Query& q = t.query[n];
    const int from = (q.low > first ? q.low : first) - first, to = (q.high < last ? q.high : last) - first;
    if (from >= to) continue;
    float* scores = s.scores + n * CHUNK;
    dots(s.queries + n * layer.k_dim, keys + from, to - from, layer.k_dim, scores + from);
    soften(t, q, first, last, scores, states[n], s.sums + n * layer.v_dim);
    lows[seen] = from, highs[seen] = to, weights[seen] = scores, sums[seen++] = s.sums + n * layer.v_dim;
  }
  for (int n = 0; n < seen;) {
    const int many = seen - n >= 4 ? 4 : seen - n;
    int from = 0, to = CHUNK;
    for (int i = n; i < n + many; i++) from = lows[i] > from ? lows[i] : from, to = highs[i] < to ? highs[i] : to;
    if (from >= to) from = to = highs[n];  // no key is common to all: one by one
    for (int i = n; i < n + many; i++)
      weigh<1>(values, weights + i, sums + i, lows[i], from < highs[i] ? from : highs[i], layer.v_dim);
    if (many == 4) weigh<4>(values, weights + n, sums + n, from, to, layer.v_dim);
    if (many == 3) weigh<3>(values, weights + n, sums + n, from, to, layer.v_dim);
    if (many == 2) weigh<2>(values, weights + n, sums + n, from, to, layer.v_dim);
    if (many == 1) weigh<1>(values, weights + n, sums + n, from, to, layer.v_dim);
    for (int i = n; i < n + many; i++)
      weigh<1>(values, weights + i, sums + i, to > lows[i] ? to : lows[i], highs[i], layer.v_dim);
    n += many;
  }
}

static void load_queries(const Tile& t, const void* q, int64_t stride, Scratch& s) {
  const pkv_layer& layer = *t.layer;
  for (int n = 0; n < t.count; n++) {
    const int64_t at = t.query[n].token * stride + int64_t(t.query[n].head) * layer.k_dim;
    float* to = s.queries + n * layer.k_dim;
    widen(static_cast<const char*>(q) + at * size_of(layer.dtype), layer.dtype, layer.k_dim, to);
    for (int d = 0; d < layer.k_dim; d++) to[d] *= layer.scale;
  }
}

// Keys of split `index` for all queries of a tile: sums in the scratch, states.
static void split(const Tile& t, int index, Scratch& s, State* states) {
  int end = 0, begin = INT32_MAX;
  for (int n = 0; n < t.count; n++) {
    states[n] = State{-INFINITY, 0.0f};
    end = t.query[n].high > end ? t.query[n].high : end;
    begin = t.query[n].low < begin ? t.query[n].low : begin;
  }
  memset(s.sums, 0, sizeof(float) * size_t(t.count) * size_t(t.layer->v_dim));
  const int first = index * SPLIT, last = first + SPLIT < end ? first + SPLIT : end;
  const int from = begin > first ? begin / CHUNK * CHUNK : first;
  if (from < last) fetch(t, from, from + CHUNK < last ? from + CHUNK : last);
  for (int at = from; at < last; at += CHUNK) {
    const int next = at + CHUNK < last ? at + CHUNK : last;
    if (next < last) fetch(t, next, next + CHUNK < last ? next + CHUNK : last);
    chunk(t, at, next, s, states);
  }
}

// total, all += sums, one : both relative to their own largest score.
static void merge(float* total, State& all, const float* sums, const State& one, int dim) {
  if (one.top == -INFINITY && one.weight == 0.0f) return;
  const float top = fmaxf(all.top, one.top);
  const float keep = all.top == -INFINITY ? 0.0f : exp1(all.top - top), take = exp1(one.top - top);
  for (int d = 0; d < dim; d++) total[d] = total[d] * keep + sums[d] * take;
  all.weight = all.weight * keep + one.weight * take;
  all.top = top;
}

static void finish(const Tile& t, int n, const float* total, State all, void* out, float* lse, float* line) {
  const pkv_layer& layer = *t.layer;
  const Query& q = t.query[n];
  float weight = all.weight, scale = 1.0f, top = all.top;
  if (layer.sinks) {
    const float sink = layer.sinks[q.head];
    top = fmaxf(all.top, sink);
    scale = all.top == -INFINITY ? 0.0f : exp1(all.top - top);
    weight = weight * scale + exp1(sink - top);
  }
  const float factor = weight > 0 || weight != weight ? scale / weight : 0.0f;
  for (int d = 0; d < layer.v_dim; d++) line[d] = total[d] * factor;
  const int64_t at = q.token * layer.q_heads + q.head;
  narrow(line, layer.dtype, layer.v_dim, static_cast<char*>(out) + at * layer.v_dim * size_of(layer.dtype));
  if (lse) lse[at] = weight > 0 || weight != weight ? top + logf(weight) : -INFINITY;
}

static inline int splits_of(int context) { return (context + SPLIT - 1) / SPLIT; }

// The first query head that reads KV head `kv`.
static inline int first_head(const pkv_layer& layer, int kv) {
  return (kv * layer.q_heads + layer.kv_heads - 1) / layer.kv_heads;
}

static int tokens_of_tile(const pkv_layer& layer) {
  const int group = (layer.q_heads + layer.kv_heads - 1) / layer.kv_heads;
  return group >= TILE ? 1 : TILE / group;
}

// Tile number `index` of row `row` for one KV head; `part`: which TILE of its query heads.
static Tile make_tile(const pkv_layer& layer, const pkv_batch& batch, int row, int kv, int index, int part) {
  Tile t{&layer, &batch, batch.table + row * batch.table_stride, kv, 0, {}};
  const int tokens = tokens_of_tile(layer), count = batch.cu_q[row + 1] - batch.cu_q[row];
  const int context = batch.ctx_len[row], head = first_head(layer, kv) + part * TILE;
  const int heads = first_head(layer, kv + 1) - head < TILE ? first_head(layer, kv + 1) - head : TILE;
  for (int j = index * tokens; j < (index + 1) * tokens && j < count; j++)
    for (int h = 0; h < heads && t.count < TILE; h++) {
      const int position = context - count + j;
      const int high = layer.causal && position + 1 < context ? position + 1 : context;
      const int low = layer.window > 0 && position - layer.window + 1 > 0 ? position - layer.window + 1 : 0;
      t.query[t.count++] = Query{batch.cu_q[row] + j, head + h, low, high < low ? low : high, position};
    }
  return t;
}

static int parts_of(const pkv_layer& layer) {
  const int group = (layer.q_heads + layer.kv_heads - 1) / layer.kv_heads;
  return (group + TILE - 1) / TILE;
}

static void whole_tile(const Tile& t, const void* q, int64_t q_stride, void* out, float* lse, Scratch& s) {
  State states[TILE], all[TILE];
  int context = 0;
  for (int n = 0; n < t.count; n++) context = t.query[n].high > context ? t.query[n].high : context;
  const int dim = t.layer->v_dim;
  load_queries(t, q, q_stride, s);
  memset(s.total, 0, sizeof(float) * size_t(t.count) * size_t(dim));
  for (int n = 0; n < t.count; n++) all[n] = State{-INFINITY, 0.0f};
  for (int i = 0; i < splits_of(context); i++) {
    split(t, i, s, states);
    for (int n = 0; n < t.count; n++) merge(s.total + n * dim, all[n], s.sums + n * dim, states[n], dim);
  }
  for (int n = 0; n < t.count; n++) finish(t, n, s.total + n * dim, all[n], out, lse, s.sums + n * dim);
}

static inline int thread_number() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Tiles of a batch, and whether there are so few that the splits of each are shared out as well.
struct Tiles {
  int64_t count, splits;
  bool shared;
};

static Tiles count_tiles(const pkv_layer& layer, const pkv_batch& batch, int threads) {
  Tiles found{0, 0, false};
  const int tokens = tokens_of_tile(layer);
  for (int row = 0; row < batch.num_seqs; row++) {
    found.count += (batch.cu_q[row + 1] - batch.cu_q[row] + tokens - 1) / tokens;
    const int splits = splits_of(batch.ctx_len[row]);
    found.splits = splits > found.splits ? splits : found.splits;
  }
  found.count *= int64_t(layer.kv_heads) * parts_of(layer);
  found.shared = found.splits > 1 && found.count < 4 * int64_t(threads);
  return found;
}

struct Place {
  int32_t row, index;
};

static int64_t attend_work(int64_t rows, int64_t tokens, int64_t context, int32_t v_dim, int threads) {
  const int64_t splits = splits_of(int(context < INT32_MAX / 2 ? context : INT32_MAX / 2)) + 1;
  const int64_t partial = 4 * int64_t(threads) * splits * TILE * (int64_t(v_dim) + 2) * 4;
  return 64 + threads * scratch_bytes() + partial + (rows + tokens + 64) * int64_t(sizeof(Place));
}

static void attend(const pkv_layer& layer, const pkv_batch& batch, const void* q, int64_t q_stride, void* out,
                   float* lse, void* work, int threads) {
  const int tokens = tokens_of_tile(layer), parts = parts_of(layer), dim = layer.v_dim;
  const Tiles tiles = count_tiles(layer, batch, threads);
  char* memory = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(work) + 63) / 64 * 64);
  Scratch* scratch = reinterpret_cast<Scratch*>(memory);
  Place* places = reinterpret_cast<Place*>(memory + threads * scratch_bytes());
  int64_t count = 0;
  for (int row = 0; row < batch.num_seqs; row++)
    for (int i = 0; i * tokens < batch.cu_q[row + 1] - batch.cu_q[row]; i++) places[count++] = Place{row, i};
  const int64_t lanes = int64_t(layer.kv_heads) * parts;
  auto scratch_of = [&](int thread) -> Scratch& {
    return *reinterpret_cast<Scratch*>(reinterpret_cast<char*>(scratch) + thread * scratch_bytes());
  };
  auto tile_of = [&](int64_t i) {
    const Place& p = places[i / lanes];
    return make_tile(layer, batch, p.row, int(i % lanes / parts), p.index, int(i % parts));
  };
  if (!tiles.shared) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (tiles.count > 1)
    for (int64_t i = 0; i < tiles.count; i++)
      whole_tile(tile_of(i), q, q_stride, out, lse, scratch_of(thread_number()));
    return;
  }
  float* partial = reinterpret_cast<float*>(places + count);
  const int64_t size = int64_t(TILE) * (dim + 2);
#pragma omp parallel num_threads(threads)
  {
    Scratch& s = scratch_of(thread_number());
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tiles.count * tiles.splits; i++) {
      const Tile t = tile_of(i / tiles.splits);
      State states[TILE];
      load_queries(t, q, q_stride, s);
      split(t, int(i % tiles.splits), s, states);
      float* to = partial + i * size;
      memcpy(to + 2 * TILE, s.sums, sizeof(float) * size_t(t.count) * size_t(dim));
      for (int n = 0; n < t.count; n++) to[2 * n] = states[n].top, to[2 * n + 1] = states[n].weight;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tiles.count; i++) {
      const Tile t = tile_of(i);
      for (int n = 0; n < t.count; n++) {
        State all{-INFINITY, 0.0f};
        memset(s.total, 0, sizeof(float) * size_t(dim));
        for (int64_t j = 0; j < tiles.splits; j++) {
          const float* from = partial + (i * tiles.splits + j) * size;
          merge(s.total, all, from + 2 * TILE + n * dim, State{from[2 * n], from[2 * n + 1]}, dim);
        }
        finish(t, n, s.total, all, out, lse, s.sums);
      }
    }
  }
}

// One token's heads are contiguous; planes are head-major.
static void append_plane(const pkv_layer& layer, const pkv_batch& batch, const void* from, int64_t stride, int dim,
                         int width, const char* plane, int threads) {
  const int in = size_of(layer.dtype), size = size_of(layer.kv_dtype);
#pragma omp parallel for num_threads(threads) if (batch.num_slots >= 64)
  for (int64_t i = 0; i < batch.num_slots; i++) {
    if (batch.slots[i] < 0) continue;
    float wide[MAX_DIM];
    for (int h = 0; h < layer.kv_heads; h++) {
      const char* source = static_cast<const char*>(from) + (i * stride + int64_t(h) * dim) * in;
      char* target = const_cast<char*>(plane) + (int64_t(h) * layer.slots + batch.slots[i]) * width * size;
      if (layer.dtype == layer.kv_dtype) {
        memcpy(target, source, size_t(dim) * in);
      } else {
        widen(source, layer.dtype, dim, wide);
        narrow(wide, layer.kv_dtype, dim, target);
      }
      memset(target + int64_t(dim) * size, 0, size_t(width - dim) * size);
    }
  }
}

static void append(const pkv_layer& layer, const pkv_batch& batch, const void* k, int64_t k_stride, const void* v,
                   int64_t v_stride, int threads) {
  append_plane(layer, batch, k, k_stride, layer.k_dim, layer.k_width, layer.keys, threads);
  append_plane(layer, batch, v, v_stride, layer.v_dim, layer.v_width, layer.values, threads);
}

}  // namespace PKV_ISA
