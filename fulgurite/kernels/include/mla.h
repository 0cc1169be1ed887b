// Multi-head latent attention (MLA) on the CPU. CACHE_T is the element type of cached latents: float, bf16, f16, or
// f8e4m3 for FP8 rows (`fp8_row_layout` of mla/reference.py). One library per type.
//
//   key_j = (W_uk c_j, r_j), value_j = W_uv c_j,  out[t, n] = sum_j softmax_j(scale q[t, n] . key_j) value_j
//
// Queries are in the lanes of vectors and keys are read one number at a time. Scores, maxima, weights and
// accumulators are vectors over queries, so the softmax needs no sum within a vector and keys are never
// transposed. Everything is one small GEMM: `dot_tile`.
//
// absorbed: a lane is a (token, head) with the query W_uk^T q; a key is (c, r) and the value c itself.
//           Blocks and splits of keys lie at fixed positions of the sequence, and splits are folded in order.
//           So the result of a token depends neither on the batch nor on the chunk of the prompt it is in.
// expanded: a lane is a token of one head. A block of keys and values is expanded and used by all new tokens
//           of the sequence before the next one, so expanded keys never leave the L2 cache.

const int TILE_LANES = 2 * LANES;  // queries of a tile
const int MAX_TILES = 4;         // tiles that share a block of keys, at most
const int KEY_BLOCK = 64;        // keys of a block
const int64_t SPLIT_KEYS = 256;  // positions of a split

// ---- the GEMM that everything uses --------------------------------------------------------------------

// to[r][0 .. vecs] (+)= sum over k of a[r * a_row + k * a_step] * b[k * b_step + 0 .. vecs]
// Every fourth row has its own pointer: sixteen strides would not fit the registers. `contiguous_rows`: a_row is 1.
// `prefetch` names rows that are prefetched into L2 meanwhile, `step` bytes with each k.
struct Prefetch {
  const char* const* from;  // one per eight rows
  int64_t step;             // bytes per k
};
template <int rows, int vecs, bool contiguous_rows, bool fetch, class B>
INLINE void dot_tile(const float* a, int64_t a_row, int64_t a_step, const B* b, int64_t b_step, int64_t depth,
                     float* to, int64_t to_row, bool add, Prefetch prefetch) {
  vec total[rows][vecs];
  const float* from[(rows + 3) / 4];
  UNROLL
  for (int r = 0; r < rows; r += 4) from[r / 4] = a + r * a_row;
  UNROLL
  for (int r = 0; r < rows; ++r)
    UNROLL
    for (int v = 0; v < vecs; ++v) total[r][v] = add ? load(to + r * to_row + v * LANES) : vec{};
  for (int64_t k = 0; k < depth; ++k) {
    vec right[vecs];
    UNROLL
    for (int v = 0; v < vecs; ++v) right[v] = load_widened(b + k * b_step + v * LANES);
    UNROLL
    for (int r = 0; r < rows; ++r) {
      const float left = contiguous_rows ? a[r] : from[r / 4][r % 4 * a_row];
      UNROLL
      for (int v = 0; v < vecs; ++v) total[r][v] += right[v] * left;
    }
    if (fetch)
      UNROLL
      for (int r = 0; r < rows; r += 8) __builtin_prefetch(prefetch.from[r / 8] + k * prefetch.step, 0, 2);
    if (contiguous_rows) a += a_step;
    UNROLL
    for (int r = 0; r < rows; r += 4) from[r / 4] += a_step;
  }
  UNROLL
  for (int r = 0; r < rows; ++r)
    UNROLL
    for (int v = 0; v < vecs; ++v) store_vec(to + r * to_row + v * LANES, total[r][v]);
}

template <int vecs, bool contiguous_rows, bool fetch = false, class B>
INLINE void dot_rows(int64_t rows, const float* a, int64_t a_row, int64_t a_step, const B* b, int64_t b_step,
                     int64_t depth, float* to, int64_t to_row, bool add, Prefetch prefetch = {}) {
  const int max_rows = 16 / vecs;
  int64_t r = 0;
#define DOT_ROWS(n, prefetching) \
  for (; r + n <= rows; r += n) \
    dot_tile<n, vecs, contiguous_rows, prefetching>(a + r * a_row, a_row, a_step, b, b_step, depth, to + r * to_row, \
                                                    to_row, add, Prefetch{prefetch.from + r / 8, prefetch.step});
  DOT_ROWS(max_rows, fetch)
  if (max_rows > 4) DOT_ROWS(4, false)
  DOT_ROWS(1, false)
#undef DOT_ROWS
}

// Rows of a times b, of one or two vectors.
static void gemm(int64_t rows, int64_t lanes, const float* a, int64_t a_row, const float* b, int64_t depth, float* to,
                 int64_t to_row, bool add) {
  if (lanes > LANES) dot_rows<2, false>(rows, a, a_row, 1, b, TILE_LANES, depth, to, to_row, add);
  else dot_rows<1, false>(rows, a, a_row, 1, b, TILE_LANES, depth, to, to_row, add);
}
static void gemm_prefetching(int64_t rows, int64_t lanes, const float* a, int64_t a_row, const float* b, int64_t depth,
                             float* to, int64_t to_row, Prefetch prefetch) {
  if (lanes > LANES) dot_rows<2, false, true>(rows, a, a_row, 1, b, TILE_LANES, depth, to, to_row, false, prefetch);
  else dot_rows<1, false, true>(rows, a, a_row, 1, b, TILE_LANES, depth, to, to_row, false, prefetch);
}
// Columns of a times b, added to the result.
static void gemm_columns(int64_t columns, int64_t lanes, const float* a, int64_t a_step, const float* b, int64_t depth,
                         float* to) {
  if (lanes > LANES) dot_rows<2, true>(columns, a, 1, a_step, b, TILE_LANES, depth, to, TILE_LANES, true);
  else dot_rows<1, true>(columns, a, 1, a_step, b, TILE_LANES, depth, to, TILE_LANES, true);
}
// A few rows times a matrix that is read once, in place.
template <class B>
static void gemm_streaming(int64_t rows, int64_t width, const float* a, int64_t a_row, const B* b,
                           int64_t b_step, int64_t depth, float* to, int64_t to_row) {
  int64_t c = 0;
  for (; c + 16 * LANES <= width && rows < 4; c += 16 * LANES)
    dot_rows<16, false>(rows, a, a_row, 1, b + c, b_step, depth, to + c, to_row, false);
  for (; c + 4 * LANES <= width; c += 4 * LANES)
    dot_rows<4, false>(rows, a, a_row, 1, b + c, b_step, depth, to + c, to_row, false);
  for (; c < width; c += LANES)
    dot_rows<1, false>(rows, a, a_row, 1, b + c, b_step, depth, to + c, to_row, false);
}

// ---- arguments ---------------------------------------------------------------------------------------

INLINE int64_t round_up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
INLINE int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE float unpack_double(int64_t bits64) { return (float)__builtin_bit_cast(double, bits64); }
INLINE void store(float* to, float x) { *to = x; }

struct MlaArgs {
  const char *q, *kv_b;
  const float *cos, *sin;
  const char* cache;
  const int32_t *block_table, *query_start_loc, *seq_lens;
  char* out;
  int64_t tokens, sequences, heads, nope_dim, rope_dim, rank, value_dim, block_size;
  int64_t q_token_stride, q_head_stride, kv_b_head_stride, kv_b_row_stride, table_row_stride;  // in numbers
  int64_t block_bytes, slot_bytes, rope_offset, scale_offset;                                  // in bytes
  int64_t dtype, interleaved;  // dtype of q, kv_b and out: 0 float, 1 bf16, 2 f16
  float scale;
  int threads;
  bool can_expand;       // false: every sequence is absorbed
  int64_t key_width;     // floats of a key: latent_width, then the rotary part rounded up
  int64_t latent_width;  // the rank rounded up to a multiple of LANES
};

INLINE int64_t dtype_bytes(int64_t dtype) { return dtype ? 2 : 4; }
static void widen_dtype(const char* from, int64_t at, int64_t dtype, int64_t count, float* to) {
  if (dtype == 0) widen_row((const float*)from + at, count, to);
  else if (dtype == 1) widen_row((const bf16*)from + at, count, to);
  else widen_row((const f16*)from + at, count, to);
}
static void store_dtype(char* to, int64_t at, int64_t dtype, float x) {
  if (dtype == 0) ((float*)to)[at] = x;
  else if (dtype == 1) store((bf16*)to + at, x);
  else store((f16*)to + at, x);
}

// RoPE: (a, b) -> (a cos - b sin, b cos + a sin) for each pair
static void apply_rope(const float* x, const float* cos, const float* sin, int64_t rope_dim, bool interleaved,
                       float* to) {
  const int64_t pairs = rope_dim / 2, step = interleaved ? 2 : 1, apart = interleaved ? 1 : pairs;
  for (int64_t i = 0; i < pairs; ++i) {
    const float a = x[i * step], b = x[i * step + apart];
    to[i * step] = a * cos[i] - b * sin[i];
    to[i * step + apart] = b * cos[i] + a * sin[i];
  }
}

// Keys of a sequence as floats: latent, then rotary part.
INLINE float load_scale(const char* row, const MlaArgs& p) {
  if (sizeof(CACHE_T) > 1) return 1.0f;
  float scale;
  __builtin_memcpy(&scale, row + p.scale_offset, sizeof scale);
  return scale;
}
static void load_rope(const char* row, const MlaArgs& p, float* to) {
  if (sizeof(CACHE_T) == 1) widen_row((const bf16*)(row + p.rope_offset), p.rope_dim, to);
  else widen_row((const CACHE_T*)(row + p.rope_offset), p.rope_dim, to);
}
static void load_key_block(const MlaArgs& p, int64_t sequence, int64_t first, int64_t count, float* to) {
  const int32_t* table = p.block_table + sequence * p.table_row_stride;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t at = first + j;
    const char* row = p.cache + table[at / p.block_size] * p.block_bytes + at % p.block_size * p.slot_bytes;
    float* key = to + j * p.key_width;
    widen_row((const CACHE_T*)row, p.rank, key);
    if (sizeof(CACHE_T) == 1) {
      const float scale = load_scale(row, p);
      for (int64_t c = 0; c < p.latent_width; c += LANES) store_vec(key + c, load(key + c) * scale);
    }
    load_rope(row, p, key + p.latent_width);
  }
}

// Addresses of every eighth key of the block from `first` on; past the end, of the last key.
static void find_prefetch_rows(const MlaArgs& p, int64_t sequence, int64_t first, int64_t end, const char** from) {
  const int32_t* table = p.block_table + sequence * p.table_row_stride;
  for (int64_t j = 0; j < KEY_BLOCK; j += 8) {
    const int64_t at = min_i64(first + j, end - 1);
    from[j / 8] = p.cache + table[at / p.block_size] * p.block_bytes + at % p.block_size * p.slot_bytes;
  }
}

// Transpose up to TILE_LANES queries: lane l of to[h * TILE_LANES] is number h of row l.
static void transpose_queries(const float* rows, int64_t step, int64_t count, int64_t size, float* to) {
  for (int64_t h = 0; h < size; h += LANES)
    for (int64_t lane = 0; lane < TILE_LANES; lane += LANES) {
      vec row[LANES];
      UNROLL
      for (int64_t l = 0; l < LANES; ++l)
        row[l] = lane + l < count ? load(rows + (lane + l) * step + h) : vec{};
      transpose_16x16(row);
      for (int64_t l = 0; l < min_i64(LANES, size - h); ++l) store_vec(to + (h + l) * TILE_LANES + lane, row[l]);
    }
}

// ---- softmax of one block ----------------------------------------------------------------------------

// A tile's online softmax state; lane l sees keys below `to[l]`.
struct Tile {
  float *q, *row_max, *row_sum, *acc;
  float* folded;  // absorbed: row_max, row_sum and acc of the splits before
  int32_t to[TILE_LANES];
};

// Scores [count][TILE_LANES] become weights; acc [values][TILE_LANES] is rescaled to the new maximum.
static void softmax_block(Tile& tile, float* scores, int64_t first, int64_t count, int64_t lanes, int64_t values,
                          float scale) {
  for (int64_t lane = 0; lane < lanes; lane += LANES) {
    ivec to;
    __builtin_memcpy(&to, tile.to + lane, sizeof to);
    const vec neg_inf = broadcast(-__builtin_inff()), old_max = load(tile.row_max + lane);
    vec new_max = old_max;
    for (int64_t j = 0; j < count; ++j) {
      vec s = blend(to > (int32_t)(first + j), load(scores + j * TILE_LANES + lane) * scale, neg_inf);
      store_vec(scores + j * TILE_LANES + lane, s);
      new_max = blend((new_max > s) | (new_max != new_max), new_max, s);  // NaN stays
    }
    const vec base = blend(new_max == neg_inf, vec{}, new_max);
    vec total = vec{};
    for (int64_t j = 0; j < count; ++j) {
      const vec weight = blend(to > (int32_t)(first + j), vector_exp(load(scores + j * TILE_LANES + lane) - base),
                               vec{});
      store_vec(scores + j * TILE_LANES + lane, weight);
      total += weight;
    }
    const ivec changed = old_max != new_max;
    const vec factor = vector_exp(old_max - base);
    store_vec(tile.row_sum + lane, load(tile.row_sum + lane) * factor + total);
    store_vec(tile.row_max + lane, new_max);
    bool any = false;
    for (int l = 0; l < LANES; ++l) any |= changed[l] != 0;
    if (!any) continue;
    for (int64_t v = 0; v < values; ++v)
      store_vec(tile.acc + v * TILE_LANES + lane, load(tile.acc + v * TILE_LANES + lane) * factor);
  }
}

static void clear_tile(Tile& tile, int64_t values) {
  for (int64_t lane = 0; lane < TILE_LANES; lane += LANES) {
    store_vec(tile.row_max + lane, broadcast(-__builtin_inff()));
    store_vec(tile.row_sum + lane, vec{});
  }
  __builtin_memset(tile.acc, 0, sizeof(float) * values * TILE_LANES);
}

// The sum of two results, of which the one with the smaller maximum is rescaled. An empty one changes nothing.
struct Fold {
  ivec is_larger;  // whether the second maximum is
  vec factor, largest;
};
INLINE Fold compare_maxima(vec first, vec second) {
  Fold fold;
  fold.is_larger = (second > first) | (second != second);
  fold.largest = blend(fold.is_larger, second, first);
  const vec smallest = blend(fold.is_larger, first, second), neg_inf = broadcast(-__builtin_inff());
  fold.factor = blend(fold.largest == neg_inf, vec{}, vector_exp(smallest - fold.largest));
  return fold;
}
INLINE vec fold_values(const Fold& fold, vec first, vec second) {
  return blend(fold.is_larger, first, second) * fold.factor + blend(fold.is_larger, second, first);
}

// Add a tile's result to `folded`: [row_max, row_sum, acc ..][TILE_LANES].
static void clear_folded(float* folded, int64_t values) {
  for (int64_t lane = 0; lane < TILE_LANES; lane += LANES) store_vec(folded + lane, broadcast(-__builtin_inff()));
  __builtin_memset(folded + TILE_LANES, 0, sizeof(float) * (1 + values) * TILE_LANES);
}
static void fold_tile(Tile& tile, int64_t values) {
  float *row_max = tile.folded, *row_sum = row_max + TILE_LANES, *acc = row_sum + TILE_LANES;
  for (int64_t lane = 0; lane < TILE_LANES; lane += LANES) {
    const Fold fold = compare_maxima(load(row_max + lane), load(tile.row_max + lane));
    store_vec(row_max + lane, fold.largest);
    store_vec(row_sum + lane, fold_values(fold, load(row_sum + lane), load(tile.row_sum + lane)));
    for (int64_t v = lane; v < values * TILE_LANES; v += TILE_LANES)
      store_vec(acc + v, fold_values(fold, load(acc + v), load(tile.acc + v)));
  }
}
