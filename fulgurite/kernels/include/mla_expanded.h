// Expanded MLA: one head of one sequence at a time, one block of expanded keys and values at a time.

// Transpose one head's weights into panels of TILE_LANES columns: [columns / TILE_LANES][rank][TILE_LANES].
static void transpose_weights(const MlaArgs& p, int64_t head, int64_t columns, float* scratch, float* to) {
  for (int64_t u = 0; u < columns; u += LANES) {
    for (int64_t l = 0; l < LANES; ++l) {
      const int64_t at = head * p.kv_b_head_stride + (u + l) * p.kv_b_row_stride;
      if (u + l < p.nope_dim + p.value_dim) widen_dtype(p.kv_b, at, p.dtype, p.rank, scratch + l * p.latent_width);
      else __builtin_memset(scratch + l * p.latent_width, 0, sizeof(float) * p.latent_width);
    }
    float* panel = to + u / TILE_LANES * p.rank * TILE_LANES + u % TILE_LANES;
    for (int64_t c = 0; c < p.rank; c += LANES) {
      vec square[LANES];
      UNROLL
      for (int64_t l = 0; l < LANES; ++l) square[l] = load(scratch + l * p.latent_width + c);
      transpose_16x16(square);
      for (int64_t l = 0; l < min_i64(LANES, p.rank - c); ++l) store_vec(panel + (c + l) * TILE_LANES, square[l]);
    }
  }
}

// Load up to TILE_LANES queries of one head, apply RoPE, and transpose them into lanes.
static void load_queries(const MlaArgs& p, int64_t head, int64_t token, int64_t rows, float* scratch, float* to) {
  const int64_t size = p.nope_dim + p.rope_dim, step = round_up(size) + LANES;
  float* rope_in = scratch + TILE_LANES * step;
  for (int64_t l = 0; l < rows; ++l) {
    const int64_t at = (token + l) * p.q_token_stride + head * p.q_head_stride, angle = (token + l) * (p.rope_dim / 2);
    widen_dtype(p.q, at, p.dtype, size, scratch + l * step);
    __builtin_memcpy(rope_in, scratch + l * step + p.nope_dim, sizeof(float) * p.rope_dim);
    apply_rope(rope_in, p.cos + angle, p.sin + angle, p.rope_dim, p.interleaved, scratch + l * step + p.nope_dim);
  }
  transpose_queries(scratch, step, rows, size, to);
}

static void write_expanded(const MlaArgs& p, const Tile& tile, int64_t head, int64_t token, int64_t rows) {
  for (int64_t l = 0; l < rows; ++l) {
    const float factor = 1.0f / tile.row_sum[l];
    const int64_t at = ((token + l) * p.heads + head) * p.value_dim;
    for (int64_t v = 0; v < p.value_dim; ++v)
      store_dtype(p.out, at + v, p.dtype, tile.acc[v * TILE_LANES + l] * factor);
  }
}

// Workspace of a thread that expands one head of a sequence with `count` new tokens.
struct ExpandWorkspace {
  float *weights, *keys, *expanded, *scores, *scratch, *tiles;
  int64_t columns, floats;
};
static ExpandWorkspace assign_workspace(const MlaArgs& p, int64_t count, float* memory) {
  ExpandWorkspace e;
  e.columns = (p.nope_dim + p.value_dim + TILE_LANES - 1) / TILE_LANES * TILE_LANES;
  e.weights = memory;
  e.keys = e.weights + p.rank * e.columns;
  e.expanded = e.keys + KEY_BLOCK * p.key_width;
  e.scores = e.expanded + KEY_BLOCK * e.columns;
  e.scratch = e.scores + KEY_BLOCK * TILE_LANES;
  e.tiles = e.scratch + max_i64(LANES * p.latent_width, (TILE_LANES + 1) * (round_up(p.nope_dim + p.rope_dim) + LANES));
  const int64_t tile = (p.nope_dim + p.rope_dim + p.value_dim + 2) * TILE_LANES;
  e.floats = e.tiles - memory + (count + TILE_LANES - 1) / TILE_LANES * tile;
  return e;
}
static Tile get_tile(const MlaArgs& p, const ExpandWorkspace& e, int64_t index, int64_t first, int64_t count) {
  Tile tile;
  tile.q = e.tiles + index * (p.nope_dim + p.rope_dim + p.value_dim + 2) * TILE_LANES;
  tile.acc = tile.q + (p.nope_dim + p.rope_dim) * TILE_LANES;
  tile.row_max = tile.acc + p.value_dim * TILE_LANES;
  tile.row_sum = tile.row_max + TILE_LANES;
  for (int64_t l = 0; l < TILE_LANES; ++l) {
    const int64_t token = index * TILE_LANES + l;
    tile.to[l] = token < count ? (int32_t)(first + token + 1) : 0;
  }
  return tile;
}

// Every key block of a sequence is expanded once per head and used by all tiles of new tokens that see it.
static void attend_expanded_head(const MlaArgs& p, int64_t sequence, int64_t head, const ExpandWorkspace& e) {
  const int64_t start = p.query_start_loc[sequence], count = new_tokens(p, sequence), length = p.seq_lens[sequence];
  const int64_t cached = length - count, tiles = (count + TILE_LANES - 1) / TILE_LANES;
  transpose_weights(p, head, e.columns, e.scratch, e.weights);
  for (int64_t i = 0; i < tiles; ++i) {
    Tile tile = get_tile(p, e, i, cached, count);
    load_queries(p, head, start + i * TILE_LANES, min_i64(TILE_LANES, count - i * TILE_LANES), e.scratch, tile.q);
    clear_tile(tile, p.value_dim);
  }
  for (int64_t j = 0; j < length; j += KEY_BLOCK) {
    const int64_t num_keys = min_i64(KEY_BLOCK, length - j);
    load_key_block(p, sequence, j, num_keys, e.keys);
    for (int64_t u = 0; u < e.columns; u += TILE_LANES)
      gemm(num_keys, TILE_LANES, e.keys, p.key_width, e.weights + u * p.rank, p.rank, e.expanded + u, e.columns, false);
    for (int64_t i = max_i64(0, j - cached) / TILE_LANES; i < tiles; ++i) {
      const int64_t lanes = round_up(min_i64(TILE_LANES, count - i * TILE_LANES));
      // keys that the last token of the tile sees
      const int64_t visible = min_i64(num_keys, cached + min_i64((i + 1) * TILE_LANES, count) - j);
      if (visible <= 0) continue;
      Tile tile = get_tile(p, e, i, cached, count);
      gemm(visible, lanes, e.expanded, e.columns, tile.q, p.nope_dim, e.scores, TILE_LANES, false);
      gemm(visible, lanes, e.keys + p.latent_width, p.key_width, tile.q + p.nope_dim * TILE_LANES, p.rope_dim, e.scores,
           TILE_LANES, true);
      softmax_block(tile, e.scores, j, visible, lanes, p.value_dim, p.scale);
      gemm_columns(p.value_dim, lanes, e.expanded + p.nope_dim, e.columns, e.scores, visible, tile.acc);
    }
  }
  for (int64_t i = 0; i < tiles; ++i)
    write_expanded(p, get_tile(p, e, i, cached, count), head, start + i * TILE_LANES,
                   min_i64(TILE_LANES, count - i * TILE_LANES));
}

static void run_expanded(const MlaArgs& p, int64_t max_query_len) {
  const int64_t floats = assign_workspace(p, max_query_len, nullptr).floats;
#pragma omp parallel num_threads(p.threads) if (p.threads > 1)
  {
    float* memory = (float*)malloc(sizeof(float) * floats);
    const ExpandWorkspace e = assign_workspace(p, max_query_len, memory);
#pragma omp for schedule(dynamic, 1)
    for (int64_t w = 0; w < p.sequences * p.heads; ++w)
      if (new_tokens(p, w / p.heads) && is_expanded(p, w / p.heads))
        attend_expanded_head(p, w / p.heads, w % p.heads, e);
    free(memory);
  }
}
