// Absorbed MLA: queries into latent space, attention to the cached latents, results out of latent space.

// ---- which sequences are absorbed --------------------------------------------------------------------

// `should_expand` of tuning/mla.py
INLINE bool should_expand(const MlaArgs& p, int64_t queries, int64_t keys) {
  const int64_t pairs = queries * (2 * keys - queries + 1) / 2, expansion = p.rank * (p.nope_dim + p.value_dim);
  const int64_t absorbed = queries * expansion + pairs * (2 * p.rank + p.rope_dim);
  const int64_t expanded = keys * expansion + pairs * (p.nope_dim + p.rope_dim + p.value_dim);
  return queries >= MIN_EXPANDED_QUERIES && expanded < absorbed;
}

// The absorbed tokens end to end: sequence s has rows first_row[s] .. first_row[s + 1]; token[r] is the token of row r.
const int64_t ITEM_ROWS = MAX_TILES * TILE_LANES;  // of a work item
struct AbsorbedQueries {
  int64_t *first_row, *token;
  int64_t tokens, items, max_seq_len;
  float* rows;  // [tokens][heads][key_width]: queries in latent space, then their results
};

INLINE int64_t new_tokens(const MlaArgs& p, int64_t s) { return p.query_start_loc[s + 1] - p.query_start_loc[s]; }
INLINE bool is_expanded(const MlaArgs& p, int64_t s) { return p.can_expand && should_expand(p, new_tokens(p, s), p.seq_lens[s]); }

static void collect_absorbed(const MlaArgs& p, AbsorbedQueries& queries) {
  queries.first_row = (int64_t*)malloc(sizeof(int64_t) * (p.sequences + 1 + p.tokens));
  queries.token = queries.first_row + p.sequences + 1;
  queries.tokens = queries.items = queries.max_seq_len = 0;
  for (int64_t s = 0; s < p.sequences; ++s) {
    queries.first_row[s] = queries.tokens;
    if (new_tokens(p, s) == 0 || is_expanded(p, s)) continue;
    for (int64_t t = p.query_start_loc[s]; t < p.query_start_loc[s + 1]; ++t) queries.token[queries.tokens++] = t;
    queries.items += (new_tokens(p, s) * p.heads + ITEM_ROWS - 1) / ITEM_ROWS;
    queries.max_seq_len = max_i64(queries.max_seq_len, p.seq_lens[s]);
  }
  queries.first_row[p.sequences] = queries.tokens;
  queries.rows = (float*)malloc(sizeof(float) * queries.tokens * p.heads * p.key_width + 64);
}

// ---- queries into latent space, and results out of it ------------------------------------------------

const int64_t HEAD_TOKENS = 64;  // tokens multiplied with a head's weights at once

// (W_uk^T q_nope, rope(q_rope)) of some tokens and one head; `scratch` holds queries and padded weights
template <class T>
static void absorb(const MlaArgs& p, const AbsorbedQueries& queries, int64_t head, int64_t first, int64_t count,
                   float* scratch) {
  const int64_t q_width = round_up(p.nope_dim), step = p.heads * p.key_width;
  float* to = queries.rows + (first * p.heads + head) * p.key_width;
  float *rope_in = scratch + HEAD_TOKENS * q_width, *weights = rope_in + round_up(p.rope_dim);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t token = queries.token[first + r], at = token * p.q_token_stride + head * p.q_head_stride;
    widen_row((const T*)p.q + at, p.nope_dim, scratch + r * q_width);
    float* rope_out = to + r * step + p.latent_width;
    for (int64_t c = 0; c < p.key_width - p.latent_width; ++c) rope_out[c] = 0;
    widen_row((const T*)p.q + at + p.nope_dim, p.rope_dim, rope_in);
    const int64_t angle = token * (p.rope_dim / 2);
    apply_rope(rope_in, p.cos + angle, p.sin + angle, p.rope_dim, p.interleaved, rope_out);
  }
  const T* kv_b = (const T*)p.kv_b + head * p.kv_b_head_stride;
  if (p.rank == p.latent_width) {
    gemm_streaming(count, p.latent_width, scratch, q_width, kv_b, p.kv_b_row_stride, p.nope_dim, to, step);
    return;
  }
  for (int64_t d = 0; d < p.nope_dim; ++d)
    widen_row(kv_b + d * p.kv_b_row_stride, p.rank, weights + d * p.latent_width);
  gemm_streaming(count, p.latent_width, scratch, q_width, (const float*)weights, p.latent_width, p.nope_dim, to, step);
}

// sixteen rows of W_uv times one token's latent result
template <class T>
INLINE vec project_16_values(const T* kv_b, int64_t step, int64_t valid, int64_t latent_width, const float* x) {
  vec partials[LANES];
  for (int64_t l = 0; l < LANES; ++l) {
    const T* row = kv_b + min_i64(l, valid - 1) * step;
    vec partial = load_widened(row) * load(x);
    for (int64_t c = LANES; c < latent_width; c += LANES) partial += load_widened(row + c) * load(x + c);
    partials[l] = partial;
  }
  return row_sums(partials);
}

template <class T>
static void project_values(const MlaArgs& p, const AbsorbedQueries& queries, int64_t head, int64_t first,
                           int64_t count, float* scratch) {
  const T* kv_b = (const T*)p.kv_b + head * p.kv_b_head_stride + p.nope_dim * p.kv_b_row_stride;
  const bool padded = p.rank != p.latent_width;
  for (int64_t v = 0; v < p.value_dim; v += LANES) {
    const int64_t valid = min_i64(LANES, p.value_dim - v);
    if (padded)
      for (int64_t l = 0; l < valid; ++l)
        widen_row(kv_b + (v + l) * p.kv_b_row_stride, p.rank, scratch + l * p.latent_width);
    for (int64_t r = 0; r < count; ++r) {
      const float* x = queries.rows + ((first + r) * p.heads + head) * p.key_width;
      const vec values =
          padded ? project_16_values((const float*)scratch, p.latent_width, valid, p.latent_width, x)
                 : project_16_values(kv_b + v * p.kv_b_row_stride, p.kv_b_row_stride, valid, p.latent_width, x);
      const int64_t at = (queries.token[first + r] * p.heads + head) * p.value_dim + v;
      for (int64_t l = 0; l < valid; ++l) store_dtype(p.out, at + l, p.dtype, values[l]);
    }
  }
}

// `absorb` or `project_values` for every head and every HEAD_TOKENS tokens.
static void for_each_head(const MlaArgs& p, const AbsorbedQueries& queries, bool absorbing) {
  const int64_t chunks = (queries.tokens + HEAD_TOKENS - 1) / HEAD_TOKENS, work = p.heads * chunks;
  const int64_t products = queries.tokens * p.heads * p.rank * (absorbing ? p.nope_dim : p.value_dim);
  const int threads = choose_num_threads(products, 1 << 17, p.threads);
  const int64_t absorb_floats = HEAD_TOKENS * round_up(p.nope_dim) + round_up(p.rope_dim) + p.nope_dim * p.latent_width;
  const int64_t floats = max_i64(absorb_floats, LANES * p.latent_width) + LANES;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float* scratch = (float*)malloc(sizeof(float) * floats);
#pragma omp for schedule(static)
    for (int64_t w = 0; w < work; ++w) {
      const int64_t head = w / chunks, first = w % chunks * HEAD_TOKENS;
      const int64_t count = min_i64(HEAD_TOKENS, queries.tokens - first);
#define CALL(T) \
  absorbing ? absorb<T>(p, queries, head, first, count, scratch) \
            : project_values<T>(p, queries, head, first, count, scratch)
      if (p.dtype == 0) CALL(float);
      else if (p.dtype == 1) CALL(bf16);
      else CALL(f16);
#undef CALL
    }
    free(scratch);
  }
}

// ---- attention ---------------------------------------------------------------------------------------

// Rows first .. first + rows of a sequence's (token, head) pairs, over keys low .. high.
struct WorkItem {
  int64_t sequence, first, rows, low, high;
};

static WorkItem find_item(const MlaArgs& p, const AbsorbedQueries& queries, int64_t index) {
  WorkItem item;
  for (item.sequence = 0;; ++item.sequence) {
    const int64_t rows = (queries.first_row[item.sequence + 1] - queries.first_row[item.sequence]) * p.heads;
    const int64_t items = (rows + ITEM_ROWS - 1) / ITEM_ROWS;
    if (index < items) {
      item.first = index * ITEM_ROWS;
      item.rows = min_i64(ITEM_ROWS, rows - item.first);
      break;
    }
    index -= items;
  }
  const int64_t cached = p.seq_lens[item.sequence] - new_tokens(p, item.sequence);
  item.low = 0;
  item.high = cached + (item.first + item.rows - 1) / p.heads + 1;
  return item;
}

// Split `split` of an item's keys.
static WorkItem split_item(WorkItem item, int64_t split) {
  item.low = split * SPLIT_KEYS;
  item.high = min_i64(item.high, item.low + SPLIT_KEYS);
  return item;
}
INLINE int64_t num_splits(const WorkItem& item) { return (item.high + SPLIT_KEYS - 1) / SPLIT_KEYS; }

INLINE int64_t tile_rows(const WorkItem& item, int64_t tile) {
  return min_i64(TILE_LANES, item.rows - tile * TILE_LANES);
}

static void init_absorbed_tile(const MlaArgs& p, const AbsorbedQueries& queries, const WorkItem& item, int64_t index,
                               Tile& tile) {
  const int64_t cached = p.seq_lens[item.sequence] - new_tokens(p, item.sequence);
  const int64_t first = item.first + index * TILE_LANES, rows = tile_rows(item, index);
  const float* q = queries.rows + (queries.first_row[item.sequence] * p.heads + first) * p.key_width;
  transpose_queries(q, p.key_width, rows, p.key_width, tile.q);
  for (int64_t l = 0; l < TILE_LANES; ++l) tile.to[l] = l < rows ? (int32_t)(cached + (first + l) / p.heads + 1) : 0;
}

// Each block of keys is used by all tiles of the item while the next block is prefetched.
static void attend_absorbed(const MlaArgs& p, const WorkItem& item, Tile* tiles, float* keys, float* scores) {
  const int64_t num_tiles = (item.rows + TILE_LANES - 1) / TILE_LANES;
  const char* prefetch_rows[KEY_BLOCK / 8];
  const Prefetch prefetch = {prefetch_rows, (8 * p.slot_bytes + p.key_width - 1) / p.key_width};
  for (int64_t i = 0; i < num_tiles; ++i) clear_tile(tiles[i], p.latent_width);
  for (int64_t j = item.low; j < item.high; j += KEY_BLOCK) {
    const int64_t count = min_i64(KEY_BLOCK, item.high - j);
    load_key_block(p, item.sequence, j, count, keys);
    find_prefetch_rows(p, item.sequence, j + KEY_BLOCK, item.high, prefetch_rows);
    for (int64_t i = 0; i < num_tiles; ++i) {
      Tile& tile = tiles[i];
      const int64_t lanes = round_up(tile_rows(item, i));
      if (i == 0) gemm_prefetching(count, lanes, keys, p.key_width, tile.q, p.key_width, scores, TILE_LANES, prefetch);
      else gemm(count, lanes, keys, p.key_width, tile.q, p.key_width, scores, TILE_LANES, false);
      softmax_block(tile, scores, j, count, lanes, p.rank, p.scale);
      gemm_columns(p.rank, lanes, keys, p.key_width, scores, count, tile.acc);
    }
  }
}

// Transpose acc [latent_width][TILE_LANES] back to rows, each times its factor.
static void transpose_acc(const Tile& tile, int64_t rows, int64_t latent_width, const float* factor, float* to,
                          int64_t step) {
  for (int64_t c = 0; c < latent_width; c += LANES)
    for (int64_t row = 0; row < rows; row += LANES) {
      vec square[LANES];
      UNROLL
      for (int64_t l = 0; l < LANES; ++l) square[l] = load(tile.acc + (c + l) * TILE_LANES + row);
      transpose_16x16(square);
      for (int64_t l = 0; l < min_i64(LANES, rows - row); ++l)
        store_vec(to + (row + l) * step + c, square[l] * factor[row + l]);
    }
}

// A tile's results overwrite its queries.
static void write_absorbed(const MlaArgs& p, const AbsorbedQueries& queries, const WorkItem& item, int64_t index,
                           const Tile& tile) {
  float factor[TILE_LANES];
  for (int64_t l = 0; l < tile_rows(item, index); ++l) factor[l] = 1.0f / tile.row_sum[l];
  const int64_t row = queries.first_row[item.sequence] * p.heads + item.first + index * TILE_LANES;
  float* to = queries.rows + row * p.key_width;
  transpose_acc(tile, tile_rows(item, index), p.latent_width, factor, to, p.key_width);
}

// A tile's partial results: rows of maximum, sum, latent, `step` apart.
static void write_partial(const MlaArgs& p, const WorkItem& item, int64_t index, const Tile& tile, float* partials,
                          int64_t step) {
  float factor[TILE_LANES];
  float* partial = partials + index * TILE_LANES * step;
  for (int64_t l = 0; l < tile_rows(item, index); ++l) {
    partial[l * step] = tile.row_max[l];
    partial[l * step + 1] = tile.row_sum[l];
    factor[l] = 1.0f;
  }
  transpose_acc(tile, tile_rows(item, index), p.latent_width, factor, partial + LANES, step);
}

// Fold the splits of one row, each (maximum, sum, latent).
static void merge_splits(const MlaArgs& p, const float* partials, int64_t splits, int64_t stride, float* to) {
  vec row_max = broadcast(-__builtin_inff()), total = vec{};
  for (int64_t c = 0; c < p.latent_width; c += LANES) store_vec(to + c, vec{});
  for (int64_t s = 0; s < splits; ++s) {
    const float* partial = partials + s * stride;
    const Fold fold = compare_maxima(row_max, broadcast(partial[0]));
    row_max = fold.largest;
    total = fold_values(fold, total, broadcast(partial[1]));
    for (int64_t c = 0; c < p.latent_width; c += LANES)
      store_vec(to + c, fold_values(fold, load(to + c), load(partial + LANES + c)));
  }
  for (int64_t c = 0; c < p.latent_width; c += LANES) store_vec(to + c, load(to + c) * (1.0f / total[0]));
}

// One item by one thread: its splits are folded in the tiles.
static void run_absorbed_item(const MlaArgs& p, const AbsorbedQueries& queries, const WorkItem& item, Tile* tiles,
                              float* keys, float* scores) {
  const int64_t splits = num_splits(item), num_tiles = (item.rows + TILE_LANES - 1) / TILE_LANES;
  for (int64_t i = 0; i < num_tiles && splits > 1; ++i) clear_folded(tiles[i].folded, p.latent_width);
  for (int64_t split = 0; split < splits; ++split) {
    attend_absorbed(p, split_item(item, split), tiles, keys, scores);
    for (int64_t i = 0; i < num_tiles && splits > 1; ++i) fold_tile(tiles[i], p.latent_width);
  }
  for (int64_t i = 0; i < num_tiles; ++i) {
    Tile result = tiles[i];
    if (splits > 1) result.row_sum = result.folded + TILE_LANES, result.acc = result.folded + 2 * TILE_LANES;
    write_absorbed(p, queries, item, i, result);
  }
}

static void run_absorbed(const MlaArgs& p, AbsorbedQueries& queries) {
  for_each_head(p, queries, true);
  int64_t splits = 1;  // work items of an item
  if (queries.items % p.threads && queries.items < 4 * p.threads)
    splits = max_i64(1, (queries.max_seq_len + SPLIT_KEYS - 1) / SPLIT_KEYS);
  const int64_t stride = LANES + p.latent_width, work = queries.items * splits;
  const int64_t max_tiles = min_i64(MAX_TILES, (queries.tokens * p.heads + TILE_LANES - 1) / TILE_LANES);  // of an item
  float* partials = splits > 1 ? (float*)malloc(sizeof(float) * work * ITEM_ROWS * stride) : nullptr;
  const int64_t products = queries.items * TILE_LANES * queries.max_seq_len * (p.key_width + p.latent_width);
  const int threads = choose_num_threads(products, 1 << 17, p.threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t state = (p.latent_width + 2) * TILE_LANES, each = p.key_width * TILE_LANES + 2 * state;
    const int64_t floats = KEY_BLOCK * p.key_width + KEY_BLOCK * TILE_LANES + max_tiles * each;
    float *memory = (float*)malloc(sizeof(float) * floats), *keys = memory, *scores = keys + KEY_BLOCK * p.key_width;
    Tile tiles[MAX_TILES];
    for (int64_t i = 0; i < max_tiles; ++i) {
      tiles[i].q = scores + KEY_BLOCK * TILE_LANES + i * each;
      tiles[i].acc = tiles[i].q + p.key_width * TILE_LANES;
      tiles[i].row_max = tiles[i].acc + p.latent_width * TILE_LANES;
      tiles[i].row_sum = tiles[i].row_max + TILE_LANES;
      tiles[i].folded = tiles[i].row_sum + TILE_LANES;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t w = 0; w < work; ++w) {
      const WorkItem item = find_item(p, queries, w / splits);
      if (w % splits >= num_splits(item)) continue;
      const int64_t num_tiles = (item.rows + TILE_LANES - 1) / TILE_LANES;
      for (int64_t i = 0; i < num_tiles; ++i) init_absorbed_tile(p, queries, item, i, tiles[i]);
      if (splits == 1) {
        run_absorbed_item(p, queries, item, tiles, keys, scores);
        continue;
      }
      attend_absorbed(p, split_item(item, w % splits), tiles, keys, scores);
      for (int64_t i = 0; i < num_tiles; ++i)
        write_partial(p, item, i, tiles[i], partials + (w / splits * ITEM_ROWS * splits + w % splits) * stride,
                      splits * stride);
    }
    if (splits > 1) {
#pragma omp for schedule(static)
      for (int64_t w = 0; w < queries.items * ITEM_ROWS; ++w) {
        const WorkItem item = find_item(p, queries, w / ITEM_ROWS);
        if (w % ITEM_ROWS >= item.rows) continue;
        const int64_t row = queries.first_row[item.sequence] * p.heads + item.first + w % ITEM_ROWS;
        merge_splits(p, partials + w * splits * stride, num_splits(item), stride, queries.rows + row * p.key_width);
      }
    }
    free(memory);
  }
  free(partials);
  for_each_head(p, queries, false);
}
