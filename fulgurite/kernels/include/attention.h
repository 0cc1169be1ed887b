// Paged attention on the CPU. CACHE_T is the element type of the KV cache: one library per type.
//
//   out[t, n] = sum_j p_j value[j],  p = softmax over the visible keys j, and the sink, of
//   softcap * tanh(scale * q[t, n] . key[j] / softcap)
//
// Queries that share a key head are rows: row r of sequence s is token r / group, head r % group. A work item
// is a tile of rows and a range of keys. It iterates over blocks of keys with a running maximum and sum (online
// softmax). Keys are transposed, so that a vector holds one coordinate of sixteen keys: in registers for small
// tiles (decode), and a block at a time for large ones (prefill). Causal, window and chunk masks all make the
// visible keys of a row an interval, so a mask is two numbers.
//
// The keys of a sequence are split (split-KV) every SPLIT_KEYS positions. The splits of a row are folded in
// order, by one thread or, with fewer items than threads, from partial results of several. Blocks and splits lie
// at fixed positions of the sequence. So the result of a row depends neither on the other rows and sequences of
// the batch, nor on the chunk of the prompt that it is computed in, nor on the number of threads.
//
// Context parallelism: of every `shard_count` blocks of a sequence the cache has number `shard_index`. Keys are
// then numbered within the cache. The visible ones are an interval of these numbers as well, since they are in
// order: only its ends are translated. The log-sum-exp of a row (`lse`) merges the results of all shards.

const int PREFILL_ROWS = 32;         // rows of a prefill tile
const int MAX_DECODE_ROWS = 8;       // a tile of at most this many rows reads keys in place
const int KEY_BLOCK = 64;            // keys of a block
const int64_t SPLIT_KEYS = 256;      // positions of a split

// ---- arguments ---------------------------------------------------------------------------------------

struct AttentionArgs {
  const char* q;
  const CACHE_T *keys, *values;
  const int32_t *block_table, *query_start_loc, *seq_lens;
  const char* sinks;
  char* out;
  int64_t sequences, heads, key_heads, group, key_dim, value_dim, block_size;
  int64_t q_token_stride, q_head_stride, table_row_stride;
  int64_t key_block_stride, key_slot_stride, key_head_stride, value_block_stride, value_slot_stride, value_head_stride;
  int64_t window, chunk;       // 0: none
  int64_t query_dtype, sink_dtype;  // 0 float, 1 bf16, 2 f16
  float scale, softcap, value_scale;
  int64_t key_width, value_width;  // rounded up to a multiple of LANES
  float* lse;                      // [tokens, heads]; null: not wanted
  int64_t shard_index, shard_count;
};

INLINE int64_t round_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
INLINE int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

// How many of the first `n` keys of a sequence are in this cache: all but for context parallelism.
INLINE int64_t local_keys(const AttentionArgs& p, int64_t n) {
  if (p.shard_count == 1) return n;
  const int64_t round = p.block_size * p.shard_count, rest = n % round - p.shard_index * p.block_size;
  return n / round * p.block_size + max_i64(0, min_i64(rest, p.block_size));
}

static float load_number(const char* from, int64_t at, int64_t dtype) {
  if (dtype == 0) return ((const float*)from)[at];
  return dtype == 1 ? widen(((const bf16*)from)[at]) : widen(((const f16*)from)[at]);
}

// Rows first .. first + rows of one sequence and key head, over keys low .. high.
struct WorkItem {
  int64_t sequence, key_head, first, rows, low, high;
};

// A tile's online softmax state (row_max, row_sum, acc = weighted values) and its workspace.
struct Tile {
  float *q, *scores, *row_sum, *row_max, *acc, *keys, *values;
  int64_t from[PREFILL_ROWS], to[PREFILL_ROWS];  // visible keys of each row
};

INLINE int64_t workspace_floats(const AttentionArgs& p, int64_t rows) {
  int64_t keys = max_i64(p.key_width, 1) * KEY_BLOCK, values = p.value_width * KEY_BLOCK;
  return rows * (p.key_width + KEY_BLOCK + 2 + p.value_width) + keys + values + 8 * LANES;
}

static void assign_workspace(const AttentionArgs& p, int64_t rows, float* memory, Tile& tile) {
  tile.keys = memory;
  tile.values = tile.keys + p.key_width * KEY_BLOCK;
  tile.q = tile.values + p.value_width * KEY_BLOCK;
  tile.scores = tile.q + rows * p.key_width;
  tile.acc = tile.scores + rows * KEY_BLOCK;
  tile.row_max = tile.acc + rows * p.value_width;
  tile.row_sum = tile.row_max + rows;
}

static void init_tile(const AttentionArgs& p, const WorkItem& item, Tile& tile) {
  const int64_t start = p.query_start_loc[item.sequence];
  const int64_t before = p.seq_lens[item.sequence] - (p.query_start_loc[item.sequence + 1] - start);
  for (int64_t r = 0; r < item.rows; ++r) {
    const int64_t token = (item.first + r) / p.group;
    const int64_t head = item.key_head * p.group + (item.first + r) % p.group;
    const int64_t at = (start + token) * p.q_token_stride + head * p.q_head_stride;
    float* row = tile.q + r * p.key_width;
    if (p.query_dtype == 0) widen_row((const float*)p.q + at, p.key_dim, row);
    else if (p.query_dtype == 1) widen_row((const bf16*)p.q + at, p.key_dim, row);
    else widen_row((const f16*)p.q + at, p.key_dim, row);
    for (int64_t c = 0; c < p.key_width; c += LANES) store_vec(row + c, load(row + c) * p.scale);
    const int64_t position = before + token;
    int64_t from = p.window ? max_i64(0, position - p.window + 1) : 0;
    if (p.chunk) from = max_i64(from, position / p.chunk * p.chunk);
    tile.from[r] = max_i64(local_keys(p, from), item.low);
    tile.to[r] = min_i64(local_keys(p, position + 1), item.high);
    tile.row_max[r] = -__builtin_inff();
    tile.row_sum[r] = 0;
    for (int64_t c = 0; c < p.value_width; c += LANES) store_vec(tile.acc + r * p.value_width + c, vec{});
  }
}

// ---- scores of one block -----------------------------------------------------------------------------

// Decode: scores of up to sixteen keys, `stride` floats apart, with `rows` queries.
template <int rows>
static void decode_scores(const AttentionArgs& p, const float* q, const float* keys, int64_t stride, int64_t count,
                          float* scores) {
  vec total[rows] = {};
  for (int64_t h = 0; h < p.key_width; h += LANES) {
    vec square[LANES];
    UNROLL
    for (int64_t l = 0; l < LANES; ++l) square[l] = load(keys + min_i64(l, count - 1) * stride + h);
    transpose_16x16(square);
    UNROLL
    for (int l = 0; l < LANES; ++l)
      UNROLL
      for (int r = 0; r < rows; ++r) total[r] += square[l] * q[r * p.key_width + h + l];
  }
  UNROLL
  for (int r = 0; r < rows; ++r) {
    float* to = scores + r * KEY_BLOCK;
    if (count == LANES) store_vec(to, total[r]);
    else
      for (int64_t l = 0; l < count; ++l) to[l] = total[r][l];
  }
}
static void decode_scores_of_rows(const AttentionArgs& p, int64_t rows, const float* q, const float* keys,
                                  int64_t stride, int64_t count, float* scores) {
#define CASE(n) \
  case n: return decode_scores<n>(p, q, keys, stride, count, scores);
  switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) default: return decode_scores<8>(p, q, keys, stride, count, scores); }
#undef CASE
}

// rows x 64 scores of q [rows][width] with transposed keys [width][64]
template <int rows>
INLINE void score_rows(const float* q, int64_t q_stride, const float* keys, int64_t width, float* out) {
  vec total[rows][4] = {};
  for (int64_t h = 0; h < width; ++h) {
    const float* key = keys + h * KEY_BLOCK;
    vec k[4];
    UNROLL
    for (int v = 0; v < 4; ++v) k[v] = load(key + v * LANES);
    UNROLL
    for (int r = 0; r < rows; ++r)
      UNROLL
      for (int v = 0; v < 4; ++v) total[r][v] += k[v] * q[r * q_stride + h];
  }
  UNROLL
  for (int r = 0; r < rows; ++r)
    UNROLL
    for (int v = 0; v < 4; ++v) store_vec(out + r * KEY_BLOCK + v * LANES, total[r][v]);
}

static void prefill_scores(const AttentionArgs& p, const WorkItem& item, Tile& tile) {
  int64_t r = 0;
  for (; r + 4 <= item.rows; r += 4)
    score_rows<4>(tile.q + r * p.key_width, p.key_width, tile.keys, p.key_dim, tile.scores + r * KEY_BLOCK);
  for (; r < item.rows; ++r)
    score_rows<1>(tile.q + r * p.key_width, p.key_width, tile.keys, p.key_dim, tile.scores + r * KEY_BLOCK);
}

// ---- softmax and values of one block -----------------------------------------------------------------

// Scores become weights exp(score - row_max); acc and row_sum are rescaled to the new maximum.
static void softmax_block(const AttentionArgs& p, const WorkItem& item, Tile& tile, int64_t first, int64_t count) {
  const ivec lane = EACH_LANE(LANE_INDEX);
  for (int64_t r = 0; r < item.rows; ++r) {
    float* scores = tile.scores + r * KEY_BLOCK;
    const int32_t from = (int32_t)max_i64(0, min_i64(tile.from[r] - first, KEY_BLOCK));
    const int32_t to = (int32_t)max_i64(0, min_i64(tile.to[r] - first, count));
    const int64_t padded_count = round_up(count);
    if (from >= to) {  // no visible key in this block
      for (int64_t j = 0; j < padded_count; j += LANES) store_vec(scores + j, vec{});
      continue;
    }
    vec block_max = broadcast(-__builtin_inff());
    for (int64_t j = 0; j < padded_count; j += LANES) {
      vec s = load(scores + j);
      if (p.softcap > 0) s = vector_tanh(s / p.softcap) * p.softcap;
      ivec at = lane + (int32_t)j;
      s = blend((at >= from) & (at < to), s, broadcast(-__builtin_inff()));
      store_vec(scores + j, s);
      block_max = vec_max(s, block_max);
    }
    const float new_max = lane_max(block_max), max_score = new_max > tile.row_max[r] ? new_max : tile.row_max[r];
    const float base = max_score == -__builtin_inff() ? 0.0f : max_score;
    vec total = vec{};
    for (int64_t j = 0; j < padded_count; j += LANES) {
      ivec at = lane + (int32_t)j;
      vec weight = vector_exp(load(scores + j) - base);
      weight = blend((at >= from) & (at < to), weight, vec{});
      store_vec(scores + j, weight);
      total += weight;
    }
    if (max_score != tile.row_max[r]) {
      const float factor = vector_exp(broadcast(tile.row_max[r] - base))[0];
      tile.row_sum[r] *= factor;
      float* acc = tile.acc + r * p.value_width;
      for (int64_t c = 0; c < p.value_width; c += LANES) store_vec(acc + c, load(acc + c) * factor);
      tile.row_max[r] = max_score;
    }
    tile.row_sum[r] += lane_sum(total);
  }
}

// acc [rows][columns * 16] += weights [rows][count] * values [count]
template <int rows, int columns>
INLINE void accumulate(const float* weights, const float* values, int64_t stride, int64_t count, float* to,
                       int64_t width) {
  vec total[rows][columns];
  UNROLL
  for (int r = 0; r < rows; ++r)
    UNROLL
    for (int c = 0; c < columns; ++c) total[r][c] = load(to + r * width + c * LANES);
  for (int64_t j = 0; j < count; ++j) {
    vec value[columns];
    UNROLL
    for (int c = 0; c < columns; ++c) value[c] = load(values + j * stride + c * LANES);
    UNROLL
    for (int r = 0; r < rows; ++r)
      UNROLL
      for (int c = 0; c < columns; ++c) total[r][c] += value[c] * weights[r * KEY_BLOCK + j];
  }
  UNROLL
  for (int r = 0; r < rows; ++r)
    UNROLL
    for (int c = 0; c < columns; ++c) store_vec(to + r * width + c * LANES, total[r][c]);
}

template <int rows>
INLINE void accumulate_rows(const AttentionArgs& p, Tile& tile, int64_t r, const float* values, int64_t stride,
                            int64_t first, int64_t count) {
  const float* weights = tile.scores + r * KEY_BLOCK + first;
  float* to = tile.acc + r * p.value_width;
  int64_t c = 0;
  for (; c + 4 * LANES <= p.value_width; c += 4 * LANES)
    accumulate<rows, 4>(weights, values + c, stride, count, to + c, p.value_width);
  for (; c < p.value_width; c += LANES)
    accumulate<rows, 1>(weights, values + c, stride, count, to + c, p.value_width);
}

// `count` values, from number `first` of the block on
static void accumulate_values(const AttentionArgs& p, const WorkItem& item, Tile& tile, const float* values,
                              int64_t stride, int64_t first, int64_t count) {
  int64_t r = 0;
  for (; r + 4 <= item.rows; r += 4) accumulate_rows<4>(p, tile, r, values, stride, first, count);
  if (item.rows - r == 3) accumulate_rows<3>(p, tile, r, values, stride, first, count);
  if (item.rows - r == 2) accumulate_rows<2>(p, tile, r, values, stride, first, count);
  if (item.rows - r == 1) accumulate_rows<1>(p, tile, r, values, stride, first, count);
}
