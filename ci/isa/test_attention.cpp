// Attention: against the formula in double, and the same bits alone, in company, elsewhere and on other threads.
#include "check.h"

namespace {

struct Row {
  int count, context;  // query tokens, and the positions it has
};

struct Shape {
  int block, k_dim, v_dim, q_heads, kv_heads, dtype, kv_dtype, window;
  bool causal, sinks, slopes;
  float scale, softcap;
  std::vector<Row> rows;

  std::string text() const {
    char out[200];
    snprintf(out, sizeof out, "block %d dims %d %d heads %d/%d %s over %s window %d %s%s%s softcap %g rows %zu", block,
             k_dim, v_dim, q_heads, kv_heads, name_of(dtype), name_of(kv_dtype), window, causal ? "causal" : "open",
             sinks ? " sinks" : "", slopes ? " slopes" : "", double(softcap), rows.size());
    return out;
  }
};

// Queries first .. first + count - 1 of a row, which then has `context` positions.
struct Part {
  int row, first, count, context;
};

struct Outcome {
  Numbers out;             // [tokens][q_heads][v_dim]
  std::vector<float> lse;  // [tokens][q_heads]
};

// Random numbers as stored, and what they are.
struct Drawn {
  Numbers stored;
  std::vector<double> values;

  Drawn(int dtype, int64_t count, Random& random) : stored(dtype, count), values(size_t(count)) {
    for (int64_t i = 0; i < count; i++) set(i, random.normal());
  }
  void set(int64_t i, double x) {
    stored.set(i, x);
    values[size_t(i)] = stored.get(i);
  }
};

// What the sequences hold, wherever it will be stored.
struct Problem {
  const Shape& shape;
  std::vector<Drawn> queries, keys, values;  // of each row [count][q_heads][k_dim], [context][kv_heads][dim]
  std::vector<float> sinks, slopes;

  Problem(const Shape& shape, Random& random) : shape(shape) {
    for (const Row& row : shape.rows) {
      queries.emplace_back(shape.dtype, int64_t(row.count) * shape.q_heads * shape.k_dim, random);
      keys.emplace_back(shape.kv_dtype, int64_t(row.context) * shape.kv_heads * shape.k_dim, random);
      values.emplace_back(shape.kv_dtype, int64_t(row.context) * shape.kv_heads * shape.v_dim, random);
    }
    for (int h = 0; h < shape.q_heads; h++) {
      sinks.push_back(float(2 * random.normal()));
      slopes.push_back(float(ldexp(1.0, -1 - h % 8)));
    }
  }

  std::vector<Part> whole() const {
    std::vector<Part> parts;
    for (size_t r = 0; r < shape.rows.size(); r++)
      parts.push_back({int(r), 0, shape.rows[r].count, shape.rows[r].context});
    return parts;
  }
};

// The parts of a batch in blocks of a cache that is NaN wherever no query looks.
class Stored {
 public:
  Stored(const Problem& problem, const std::vector<Part>& parts, Random& random)
      : problem_(problem),
        shape_(problem.shape),
        cu_q_{0},
        k_width_(shape_.k_dim + 8 * random.below(2)),
        v_width_(shape_.v_dim + 8 * random.below(2)),
        stride_(int64_t(shape_.q_heads) * shape_.k_dim + 3 * random.below(2)) {
    int needed = 1;
    for (const Part& part : parts) {
      cu_q_.push_back(cu_q_.back() + part.count);
      ctx_len_.push_back(part.context);
      width_ = std::max(width_, blocks_of(part));
      longest_ = std::max(longest_, part.context);
      needed += blocks_of(part);
    }
    slots_ = int64_t(needed + 2) * shape_.block;
    keys_ = Numbers(shape_.kv_dtype, shape_.kv_heads * slots_ * k_width_, NANS);
    values_ = Numbers(shape_.kv_dtype, shape_.kv_heads * slots_ * v_width_, NANS);
    queries_ = Numbers(shape_.dtype, cu_q_.back() * stride_, NANS);
    place(parts, needed + 2, random);
  }

  Outcome attend(const pkv_context* context, bool lse) const {
    const int64_t heads = int64_t(cu_q_.back()) * shape_.q_heads;
    Outcome got{Numbers(shape_.dtype, heads * shape_.v_dim, NANS), std::vector<float>(lse ? size_t(heads) : 0, NAN)};
    std::vector<char> work(
        size_t(pkv_attend_work(context, int64_t(ctx_len_.size()), cu_q_.back(), longest_, shape_.v_dim)));
    const pkv_layer layer = this->layer();
    const pkv_batch batch = this->batch();
    pkv_attend(context, &layer, &batch, queries_.at(0), stride_, got.out.data(), lse ? got.lse.data() : nullptr,
               work.data());
    return got;
  }

 private:
  int blocks_of(const Part& part) const { return (part.context + shape_.block - 1) / shape_.block; }

  // The first position that any query of the part sees.
  int start_of(const Part& part) const {
    const int p = part.context - part.count;
    return shape_.window ? std::max(0, std::min(p - shape_.window + 1, part.context)) : 0;
  }

  void place(const std::vector<Part>& parts, int blocks, Random& random) {
    std::vector<int> free;
    for (int b = 1; b < blocks; b++) free.push_back(b);
    random.shuffle(free);
    table_.assign(parts.size() * size_t(width_), 0);
    for (size_t r = 0; r < parts.size(); r++) {
      int32_t* line = table_.data() + int64_t(r) * width_;
      for (int b = 0; b < blocks_of(parts[r]); b++) {
        const bool behind = (b + 1) * shape_.block <= start_of(parts[r]);
        if (behind && random.chance(50)) continue;  // block 0 stands where nobody looks
        line[b] = free.back();
        free.pop_back();
      }
      for (int i = start_of(parts[r]); i < parts[r].context; i++) store(parts[r].row, i, line);
      const int64_t size = int64_t(shape_.q_heads) * shape_.k_dim * bytes_of(shape_.dtype);
      for (int j = 0; j < parts[r].count; j++)
        memcpy(queries_.data() + (cu_q_[r] + j) * stride_ * bytes_of(shape_.dtype),
               problem_.queries[size_t(parts[r].row)].stored.at(0) + (parts[r].first + j) * size, size_t(size));
    }
  }

  void store(int row, int i, const int32_t* line) {
    const int64_t slot = int64_t(line[i / shape_.block]) * shape_.block + i % shape_.block;
    for (int h = 0; h < shape_.kv_heads; h++) {
      copy(problem_.keys[size_t(row)].stored, (int64_t(i) * shape_.kv_heads + h) * shape_.k_dim, shape_.k_dim, keys_,
           (h * slots_ + slot) * k_width_);
      copy(problem_.values[size_t(row)].stored, (int64_t(i) * shape_.kv_heads + h) * shape_.v_dim, shape_.v_dim,
           values_, (h * slots_ + slot) * v_width_);
    }
  }

  static void copy(const Numbers& from, int64_t first, int count, Numbers& to, int64_t at) {
    memcpy(to.data() + at * bytes_of(to.dtype), from.at(first), size_t(count) * size_t(bytes_of(to.dtype)));
  }

  pkv_layer layer() const {
    pkv_layer layer{};
    layer.keys = keys_.at(0), layer.values = values_.at(0);
    layer.sinks = shape_.sinks ? problem_.sinks.data() : nullptr;
    layer.slopes = shape_.slopes ? problem_.slopes.data() : nullptr;
    layer.slots = slots_, layer.q_heads = shape_.q_heads, layer.kv_heads = shape_.kv_heads;
    layer.k_dim = shape_.k_dim, layer.v_dim = shape_.v_dim, layer.k_width = k_width_, layer.v_width = v_width_;
    layer.kv_dtype = shape_.kv_dtype, layer.dtype = shape_.dtype, layer.causal = shape_.causal,
    layer.window = shape_.window;
    layer.scale = shape_.scale, layer.softcap = shape_.softcap;
    return layer;
  }

  pkv_batch batch() const {
    pkv_batch batch{};
    batch.cu_q = cu_q_.data(), batch.ctx_len = ctx_len_.data(), batch.table = table_.data(),
    batch.table_stride = width_;
    batch.num_seqs = int32_t(ctx_len_.size()), batch.num_tokens = cu_q_.back(), batch.block_size = shape_.block;
    return batch;
  }

  const Problem& problem_;
  const Shape& shape_;
  std::vector<int32_t> cu_q_, ctx_len_, table_;
  int k_width_, v_width_, width_ = 0, longest_ = 0;
  int64_t stride_, slots_ = 0;
  Numbers keys_{PKV_FP32, 0}, values_{PKV_FP32, 0}, queries_{PKV_FP32, 0};
};

// One query of one head by the formula: its values and the log of its denominator.
struct Expected {
  std::vector<double> out;
  double lse, largest;  // largest: of the values it sees

  Expected(const Problem& problem, int row, int j, int head)
      : out(size_t(problem.shape.v_dim)), lse(-INFINITY), largest(0) {
    const Shape& shape = problem.shape;
    const Row& of = problem.shape.rows[size_t(row)];
    const int kv = int(int64_t(head) * shape.kv_heads / shape.q_heads), p = of.context - of.count + j;
    std::vector<double> scores(size_t(of.context), -INFINITY);
    double top = shape.sinks ? problem.sinks[size_t(head)] : -INFINITY;
    for (int i = 0; i < of.context; i++) {
      if ((shape.causal && i > p) || (shape.window && i <= p - shape.window)) continue;
      scores[size_t(i)] =
          score(problem, row, j, head, kv, i) + (shape.slopes ? problem.slopes[size_t(head)] * (i - p) : 0.0);
      top = std::max(top, scores[size_t(i)]);
    }
    if (top == -INFINITY) return;
    double total = shape.sinks ? exp(problem.sinks[size_t(head)] - top) : 0.0;
    for (int i = 0; i < of.context; i++)
      if (scores[size_t(i)] > -INFINITY) total += add(problem, row, kv, i, exp(scores[size_t(i)] - top));
    for (double& x : out) x /= total;
    lse = top + log(total);
  }

 private:
  static double score(const Problem& problem, int row, int j, int head, int kv, int i) {
    const Shape& shape = problem.shape;
    const double* q = problem.queries[size_t(row)].values.data() + (int64_t(j) * shape.q_heads + head) * shape.k_dim;
    const double* k = problem.keys[size_t(row)].values.data() + (int64_t(i) * shape.kv_heads + kv) * shape.k_dim;
    double s = 0;
    for (int d = 0; d < shape.k_dim; d++) s += q[d] * k[d];
    s *= shape.scale;
    return shape.softcap > 0 ? shape.softcap * tanh(s / shape.softcap) : s;
  }

  double add(const Problem& problem, int row, int kv, int i, double weight) {
    const double* v =
        problem.values[size_t(row)].values.data() + (int64_t(i) * problem.shape.kv_heads + kv) * problem.shape.v_dim;
    for (size_t d = 0; d < out.size(); d++) {
      out[d] += weight * v[d];
      largest = std::max(largest, fabs(v[d]));
    }
    return weight;
  }
};

// Half a unit in the last place of the output's format, relative to the number; for float32 the sums count alone.
double rounding(int dtype) { return dtype == PKV_BF16 ? 0x1p-8 : dtype == PKV_FP16 ? 0x1p-11 : 0; }

void compare(const Problem& problem, const Outcome& got, Result& result) {
  const Shape& shape = problem.shape;
  int64_t at = 0;
  for (int r = 0; r < int(shape.rows.size()); r++)
    for (int j = 0; j < shape.rows[size_t(r)].count; j++)
      for (int h = 0; h < shape.q_heads; h++, at++) {
        const Expected expected(problem, r, j, h);
        for (int d = 0; d < shape.v_dim; d++) {
          const double want = expected.out[size_t(d)], have = got.out.get(at * shape.v_dim + d),
                       off = fabs(have - want);
          const double allowed = 1e-5 * expected.largest + rounding(shape.dtype) * fabs(want) + 1e-7;
          result.error(off, allowed);
          CHECK(off <= allowed, "%s: row %d query %d head %d entry %d is %g, not %g", shape.text().c_str(), r, j, h, d,
                have, want);
        }
        const double lse = got.lse[size_t(at)];
        CHECK(lse == expected.lse || fabs(lse - expected.lse) <= 1e-5 * (1 + fabs(expected.lse)),
              "%s: row %d query %d head %d: lse %g, not %g", shape.text().c_str(), r, j, h, lse, expected.lse);
      }
}

// The same bits as queries first .. of the whole batch, in other blocks, with and without other rows.
void same_bits(const Problem& problem, const Outcome& whole, const Part& part, const Kernels& kernels, Random& random) {
  const Shape& shape = problem.shape;
  int64_t token = part.first;
  for (int r = 0; r < part.row; r++) token += shape.rows[size_t(r)].count;
  const int threads = random.between(1, Kernels::MOST);
  const Outcome alone = Stored(problem, {part}, random).attend(kernels.on(threads), true);
  const int64_t head = token * shape.q_heads;
  CHECK(same(alone.out.at(0), whole.out.at(head * shape.v_dim), alone.out.bytes.size()),
        "%s: row %d query %d, %d tokens alone on %d threads: other bits", shape.text().c_str(), part.row, part.first,
        part.count, threads);
  CHECK(same(alone.lse.data(), whole.lse.data() + head, alone.lse.size()), "%s: row %d alone: another lse",
        shape.text().c_str(), part.row);
}

void other_ways(const Problem& problem, const Outcome& whole, const Stored& stored, const Kernels& kernels,
                Random& random) {
  const Shape& shape = problem.shape;
  for (int threads = 2; threads <= Kernels::MOST; threads++) {
    const Outcome again = stored.attend(kernels.on(threads), true);
    CHECK(again.out.bytes == whole.out.bytes, "%s: other bits on %d threads", shape.text().c_str(), threads);
    CHECK(same(again.lse.data(), whole.lse.data(), whole.lse.size()), "%s: another lse on %d threads",
          shape.text().c_str(), threads);
  }
  CHECK(stored.attend(kernels.on(1), false).out.bytes == whole.out.bytes, "%s: lse changes bits of out",
        shape.text().c_str());
  for (int r = 0; r < int(shape.rows.size()); r++) {
    const Row& row = shape.rows[size_t(r)];
    if (!row.count) continue;
    same_bits(problem, whole, {r, 0, row.count, row.context}, kernels, random);
    if (!shape.causal) continue;  // as a chunk of a longer prefill, and as a decode step
    const int first = random.below(row.count), count = random.between(1, row.count - first);
    same_bits(problem, whole, {r, first, count, row.context - row.count + first + count}, kernels, random);
    same_bits(problem, whole, {r, first, 1, row.context - row.count + first + 1}, kernels, random);
  }
}

void run(const Shape& shape, const Kernels& kernels, Random& random, Result& result) {
  const Problem problem(shape, random);
  const Stored stored(problem, problem.whole(), random);
  const Outcome whole = stored.attend(kernels.on(1), true);
  compare(problem, whole, result);
  other_ways(problem, whole, stored, kernels, random);
  result.cases++;
}

Shape drawn(Random& random) {
  Shape shape{};
  shape.block = random.one_of({1, 3, 16, 64});
  shape.k_dim = random.one_of({8, 12, 20, 33, 40, 64, 72, 80, 96, 100, 128, 192, 256});
  shape.v_dim = random.chance(70) ? shape.k_dim : random.one_of({8, 12, 21, 48, 64, 104, 128, 256});
  shape.kv_heads = random.between(1, 3);
  shape.q_heads = shape.kv_heads * random.one_of({1, 3, 4, 7, 8, 20});
  if (random.chance(10)) shape.q_heads = shape.kv_heads + random.between(0, 4);  // groups of unequal sizes
  shape.dtype = random.below(3);
  shape.kv_dtype = random.below(3);
  shape.causal = random.chance(75);
  shape.window = random.chance(35) ? random.one_of({1, 2, 7, 64, 65, 100}) : 0;
  shape.sinks = random.chance(30);
  shape.slopes = random.chance(30);
  shape.softcap = random.chance(30) ? random.one_of({2.0f, 30.0f}) : 0.0f;
  shape.scale = float((random.chance(30) ? 3.0 : 1.0) / sqrt(shape.k_dim));
  return shape;
}

Row drawn_row(const Shape& shape, int most, Random& random) {
  const int count = random.chance(50) ? 1 : random.between(1, most);
  const int before = random.chance(20) ? 0 : random.one_of({1, 5, 31, 63, 64, 65, 130, 200});
  if (!shape.causal && random.chance(20)) return {count, random.below(3)};  // an encoder with almost nothing
  if (random.chance(5)) return {0, before};
  return {count, before + count};
}

// Contexts over 1024, whose splits are shared out where there are few tiles.
void long_contexts(const Kernels& kernels, bool full, Random& random, Result& result) {
  for (int context : {1025, 2048, 2500}) {
    if (!full && context != 1025) continue;
    for (int window : {0, 1100}) {
      Shape shape = drawn(random);
      shape.kv_heads = 1, shape.q_heads = random.one_of({1, 3}), shape.causal = true, shape.window = window;
      shape.k_dim = shape.v_dim = random.one_of({20, 64});
      shape.rows = {{1, context}};
      run(shape, kernels, random, result);
      shape.q_heads = 20;  // a full tile for each split
      run(shape, kernels, random, result);
      shape.q_heads = 3;
      shape.rows = {{1, context}, {2, 7}, {3, context - 900}};
      run(shape, kernels, random, result);
    }
  }
}

// A NaN that a query sees makes its whole answer NaN; another query of the tile, which does not see it, is as before.
void nan_seen(const Kernels& kernels, Random& random, Result& result) {
  Shape shape{16, 32, 32, 4, 1, PKV_FP32, PKV_FP32, 0, true, false, false, 0.2f, 0.0f, {{3, 40}}};
  Problem problem(shape, random);
  const Outcome before = Stored(problem, problem.whole(), random).attend(kernels.on(1), true);
  problem.keys[0].set(38 * 32 + 5, NAN);  // position 38: seen by queries 1 and 2
  const Outcome after = Stored(problem, problem.whole(), random).attend(kernels.on(1), true);
  const size_t one = size_t(shape.q_heads * shape.v_dim);
  CHECK(same(before.out.at(0), after.out.at(0), one * 4), "a NaN ahead changed query 0");
  for (size_t i = one; i < 3 * one; i++) CHECK(isnan(after.out.get(int64_t(i))), "entry %zu: a NaN key was lost", i);
  for (size_t h = 4; h < 12; h++)
    CHECK(isnan(after.lse[h]), "a NaN key was lost from the lse, which is %g", double(after.lse[h]));
  result.cases++;
}

void nobody(const Kernels& kernels, Random& random, Result& result) {
  Shape shape = drawn(random);
  const Problem problem(shape, random);
  CHECK(Stored(problem, {}, random).attend(kernels.on(2), true).out.bytes.empty(), "out of nothing");
  result.cases++;
}

}  // namespace

Result test_attention(const Kernels& kernels, bool full) {
  Random random(1);
  Result result;
  for (int i = 0; i < (full ? 150 : 14); i++) {
    Shape shape = drawn(random);
    for (int r = random.between(1, 4); r > 0; r--) shape.rows.push_back(drawn_row(shape, full ? 40 : 12, random));
    run(shape, kernels, random, result);
  }
  long_contexts(kernels, full, random, result);
  nan_seen(kernels, random, result);
  nobody(kernels, random, result);
  return result;
}
