// Paged attention on the CPU. PAGE is the type keys and values are kept in: one library a type.
//
//   out[t, n] = sum_j p_j value[j],  p = softmax over the seen keys j, and the sink, of
//   softcap * tanh(scale * q[t, n] . key[j] / softcap)
//
// The queries that share a key head are rows: row r of sequence s is token r / group, head r % group.
// A work item is a tile of rows over a span of keys. It walks the keys in blocks with a running maximum
// and sum (online softmax). Tiles of few rows (decode) read keys where they lie; taller ones (prefill)
// first turn a block of keys over, so that a vector holds one coordinate of sixteen keys. Where there
// are fewer items than threads, contexts are split into spans, whose results are merged afterwards.
// What a row sees is an interval of keys whether by cause, window or chunk, so masks are two numbers.

const int TALL = 32;       // rows of a tile of prefill
const int FLAT = 8;        // a tile of at most this many rows reads keys where they lie
const int BLOCK = 64;      // keys of a block of prefill
const int64_t SPAN = 256;  // keys worth a span of their own

// ---- the problem -------------------------------------------------------------------------------------

struct Problem {
  const char* q;
  const PAGE *keys, *values;
  const int32_t *tables, *starts, *lengths;
  const char* sinks;
  char* out;
  int64_t sequences, heads, key_heads, group, key_dim, value_dim, page;
  int64_t q_token, q_head, table_row;
  int64_t key_page, key_slot, key_head, value_page, value_slot, value_head;
  int64_t window, chunk;       // 0: none
  int64_t query_kind, sink_kind;  // 0 float, 1 bf16, 2 f16
  float scale, softcap, value_scale;
  int64_t key_width, value_width;  // rounded up to whole vectors
};

INLINE int64_t rounded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static float number_at(const char* from, int64_t at, int64_t kind) {
  if (kind == 0) return ((const float*)from)[at];
  return kind == 1 ? widen(((const bf16*)from)[at]) : widen(((const f16*)from)[at]);
}

// Rows first .. first + rows of sequence s under one key head, over keys low .. high.
struct Item {
  int64_t sequence, key_head, first, rows, low, high;
};

// What a tile of rows has gathered: maxima, sums, weighted values; and room to work in.
struct Tile {
  float *q, *scores, *sum, *largest, *gathered, *keys, *values;
  int64_t from[TALL], to[TALL];  // the keys each row sees
};

INLINE int64_t tile_floats(const Problem& p, int64_t rows) {
  int64_t keys = larger(p.key_width, 1) * BLOCK, values = p.value_width * BLOCK;
  return rows * (p.key_width + BLOCK + 2 + p.value_width) + keys + values + 8 * LANES;
}

static void lay_out(const Problem& p, int64_t rows, float* memory, Tile& tile) {
  tile.keys = memory;
  tile.values = tile.keys + p.key_width * BLOCK;
  tile.q = tile.values + p.value_width * BLOCK;
  tile.scores = tile.q + rows * p.key_width;
  tile.gathered = tile.scores + rows * BLOCK;
  tile.largest = tile.gathered + rows * p.value_width;
  tile.sum = tile.largest + rows;
}

static void begin(const Problem& p, const Item& item, Tile& tile) {
  const int64_t start = p.starts[item.sequence];
  const int64_t before = p.lengths[item.sequence] - (p.starts[item.sequence + 1] - start);
  for (int64_t r = 0; r < item.rows; ++r) {
    const int64_t token = (item.first + r) / p.group;
    const int64_t head = item.key_head * p.group + (item.first + r) % p.group;
    const int64_t at = (start + token) * p.q_token + head * p.q_head;
    float* row = tile.q + r * p.key_width;
    if (p.query_kind == 0) widen_row((const float*)p.q + at, p.key_dim, row);
    else if (p.query_kind == 1) widen_row((const bf16*)p.q + at, p.key_dim, row);
    else widen_row((const f16*)p.q + at, p.key_dim, row);
    for (int64_t c = 0; c < p.key_width; c += LANES) put(row + c, load(row + c) * p.scale);
    const int64_t position = before + token;
    int64_t from = p.window ? larger(0, position - p.window + 1) : 0;
    if (p.chunk) from = larger(from, position / p.chunk * p.chunk);
    tile.from[r] = larger(from, item.low);
    tile.to[r] = least(position + 1, item.high);
    tile.largest[r] = -__builtin_inff();
    tile.sum[r] = 0;
    for (int64_t c = 0; c < p.value_width; c += LANES) put(tile.gathered + r * p.value_width + c, vec{});
  }
}

// ---- scores of one block -----------------------------------------------------------------------------

// Few rows: products along the key, sixteen keys at a time, whose lanes are then summed together.
static void scores_flat(const Problem& p, const Item& item, Tile& tile, const float* keys, int64_t step,
                        int64_t count) {
  for (int64_t j = 0; j < count; j += LANES) {
    const int64_t there = least(count - j, LANES);
    for (int64_t r = 0; r < item.rows; ++r) {
      const float* q = tile.q + r * p.key_width;
      vec parts[LANES];
      for (int64_t l = 0; l < LANES; ++l) {
        const float* key = keys + (j + least(l, there - 1)) * step;
        vec part = load(key) * load(q);
        for (int64_t c = LANES; c < p.key_width; c += LANES) part += load(key + c) * load(q + c);
        parts[l] = part;
      }
      put(tile.scores + r * BLOCK + j, sums(parts));
    }
  }
}

// rows x 64 products of q [rows][width] with keys turned over, [width][64]
template <int rows>
INLINE void products(const float* q, int64_t q_step, const float* keys, int64_t width, float* out) {
  vec total[rows][4] = {};
  for (int64_t h = 0; h < width; ++h) {
    const float* key = keys + h * BLOCK;
    vec k[4];
    UNROLL
    for (int v = 0; v < 4; ++v) k[v] = load(key + v * LANES);
    UNROLL
    for (int r = 0; r < rows; ++r)
      UNROLL
      for (int v = 0; v < 4; ++v) total[r][v] += k[v] * q[r * q_step + h];
  }
  UNROLL
  for (int r = 0; r < rows; ++r)
    UNROLL
    for (int v = 0; v < 4; ++v) put(out + r * BLOCK + v * LANES, total[r][v]);
}

static void scores_tall(const Problem& p, const Item& item, Tile& tile) {
  int64_t r = 0;
  for (; r + 4 <= item.rows; r += 4)
    products<4>(tile.q + r * p.key_width, p.key_width, tile.keys, p.key_dim, tile.scores + r * BLOCK);
  for (; r < item.rows; ++r)
    products<1>(tile.q + r * p.key_width, p.key_width, tile.keys, p.key_dim, tile.scores + r * BLOCK);
}

// ---- softmax and values of one block -----------------------------------------------------------------

// Scores become weights exp(score - maximum); what was gathered before is scaled to the new maximum.
static void weigh(const Problem& p, const Item& item, Tile& tile, int64_t first, int64_t count) {
  const ivec lane = EACH_LANE(SAME);
  for (int64_t r = 0; r < item.rows; ++r) {
    float* scores = tile.scores + r * BLOCK;
    const int32_t from = (int32_t)larger(0, least(tile.from[r] - first, BLOCK));
    const int32_t to = (int32_t)larger(0, least(tile.to[r] - first, count));
    const int64_t whole = rounded(count);
    if (from >= to) {  // sees nothing here
      for (int64_t j = 0; j < whole; j += LANES) put(scores + j, vec{});
      continue;
    }
    vec most = spread(-__builtin_inff());
    for (int64_t j = 0; j < whole; j += LANES) {
      vec s = load(scores + j);
      if (p.softcap > 0) s = vector_tanh(s / p.softcap) * p.softcap;
      ivec at = lane + (int32_t)j;
      s = choose((at >= from) & (at < to), s, spread(-__builtin_inff()));
      put(scores + j, s);
      most = largest(s, most);
    }
    const float here = top_of(most), top = here > tile.largest[r] ? here : tile.largest[r];
    const float base = top == -__builtin_inff() ? 0.0f : top;
    vec total = vec{};
    for (int64_t j = 0; j < whole; j += LANES) {
      ivec at = lane + (int32_t)j;
      vec weight = vector_exp(load(scores + j) - base);
      weight = choose((at >= from) & (at < to), weight, vec{});
      put(scores + j, weight);
      total += weight;
    }
    if (top != tile.largest[r]) {
      const float factor = vector_exp(spread(tile.largest[r] - base))[0];
      tile.sum[r] *= factor;
      float* gathered = tile.gathered + r * p.value_width;
      for (int64_t c = 0; c < p.value_width; c += LANES) put(gathered + c, load(gathered + c) * factor);
      tile.largest[r] = top;
    }
    tile.sum[r] += sum(total);
  }
}

// gathered [rows][columns * 16] += weights [rows][count] * values [count]
template <int rows, int columns>
INLINE void accumulate(const float* weights, const float* values, int64_t step, int64_t count, float* to,
                       int64_t width) {
  vec total[rows][columns];
  UNROLL
  for (int r = 0; r < rows; ++r)
    UNROLL
    for (int c = 0; c < columns; ++c) total[r][c] = load(to + r * width + c * LANES);
  for (int64_t j = 0; j < count; ++j) {
    vec value[columns];
    UNROLL
    for (int c = 0; c < columns; ++c) value[c] = load(values + j * step + c * LANES);
    UNROLL
    for (int r = 0; r < rows; ++r)
      UNROLL
      for (int c = 0; c < columns; ++c) total[r][c] += value[c] * weights[r * BLOCK + j];
  }
  UNROLL
  for (int r = 0; r < rows; ++r)
    UNROLL
    for (int c = 0; c < columns; ++c) put(to + r * width + c * LANES, total[r][c]);
}

template <int rows>
INLINE void accumulate_rows(const Problem& p, Tile& tile, int64_t r, const float* values, int64_t step,
                            int64_t count) {
  const float* weights = tile.scores + r * BLOCK;
  float* to = tile.gathered + r * p.value_width;
  int64_t c = 0;
  for (; c + 4 * LANES <= p.value_width; c += 4 * LANES)
    accumulate<rows, 4>(weights, values + c, step, count, to + c, p.value_width);
  for (; c < p.value_width; c += LANES)
    accumulate<rows, 1>(weights, values + c, step, count, to + c, p.value_width);
}

static void gather_values(const Problem& p, const Item& item, Tile& tile, const float* values, int64_t step,
                          int64_t count) {
  int64_t r = 0;
  for (; r + 4 <= item.rows; r += 4) accumulate_rows<4>(p, tile, r, values, step, count);
  if (item.rows - r == 3) accumulate_rows<3>(p, tile, r, values, step, count);
  if (item.rows - r == 2) accumulate_rows<2>(p, tile, r, values, step, count);
  if (item.rows - r == 1) accumulate_rows<1>(p, tile, r, values, step, count);
}
