// Expanded: one head of one sequence at a time; a block of keys and values is made, used and forgotten.

// One head's weights turned over, in panels of WIDE columns: [columns / WIDE][rank][WIDE].
static void turn_weights(const Problem& p, int64_t head, int64_t columns, float* room, float* to) {
  for (int64_t u = 0; u < columns; u += LANES) {
    for (int64_t l = 0; l < LANES; ++l) {
      const int64_t at = head * p.up_head + (u + l) * p.up_row;
      if (u + l < p.plain + p.value) widen_kind(p.up, at, p.kind, p.rank, room + l * p.width);
      else __builtin_memset(room + l * p.width, 0, sizeof(float) * p.width);
    }
    float* panel = to + u / WIDE * p.rank * WIDE + u % WIDE;
    for (int64_t c = 0; c < p.rank; c += LANES) {
      vec square[LANES];
      UNROLL
      for (int64_t l = 0; l < LANES; ++l) square[l] = load(room + l * p.width + c);
      turn_square(square);
      for (int64_t l = 0; l < least(LANES, p.rank - c); ++l) put(panel + (c + l) * WIDE, square[l]);
    }
  }
}

// Up to WIDE queries of one head, their rotary part turned, into lanes.
static void load_queries(const Problem& p, int64_t head, int64_t token, int64_t rows, float* room, float* to) {
  const int64_t size = p.plain + p.rope, step = rounded(size) + LANES;
  float* turned = room + WIDE * step;
  for (int64_t l = 0; l < rows; ++l) {
    const int64_t at = (token + l) * p.q_token + head * p.q_head, angle = (token + l) * (p.rope / 2);
    widen_kind(p.q, at, p.kind, size, room + l * step);
    __builtin_memcpy(turned, room + l * step + p.plain, sizeof(float) * p.rope);
    turn(turned, p.cos + angle, p.sin + angle, p.rope, p.interleaved, room + l * step + p.plain);
  }
  turn_over(room, step, rows, size, to);
}

static void finish_expanded(const Problem& p, const Tile& tile, int64_t head, int64_t token, int64_t rows) {
  for (int64_t l = 0; l < rows; ++l) {
    const float factor = 1.0f / tile.sum[l];
    const int64_t at = ((token + l) * p.heads + head) * p.value;
    for (int64_t v = 0; v < p.value; ++v) put_kind(p.out, at + v, p.kind, tile.gathered[v * WIDE + l] * factor);
  }
}

// Memory of a thread that expands one head of a sequence of `count` new tokens.
struct Expansion {
  float *weights, *keys, *expanded, *scores, *room, *tiles;
  int64_t columns, floats;
};
static Expansion lay_out(const Problem& p, int64_t count, float* memory) {
  Expansion e;
  e.columns = (p.plain + p.value + WIDE - 1) / WIDE * WIDE;
  e.weights = memory;
  e.keys = e.weights + p.rank * e.columns;
  e.expanded = e.keys + BLOCK * p.kept;
  e.scores = e.expanded + BLOCK * e.columns;
  e.room = e.scores + BLOCK * WIDE;
  e.tiles = e.room + larger(LANES * p.width, (WIDE + 1) * (rounded(p.plain + p.rope) + LANES));
  const int64_t tile = (p.plain + p.rope + p.value + 2) * WIDE;
  e.floats = e.tiles - memory + (count + WIDE - 1) / WIDE * tile;
  return e;
}
static Tile tile_of(const Problem& p, const Expansion& e, int64_t index, int64_t first, int64_t count) {
  Tile tile;
  tile.q = e.tiles + index * (p.plain + p.rope + p.value + 2) * WIDE;
  tile.gathered = tile.q + (p.plain + p.rope) * WIDE;
  tile.largest = tile.gathered + p.value * WIDE;
  tile.sum = tile.largest + WIDE;
  for (int64_t l = 0; l < WIDE; ++l) tile.to[l] = index * WIDE + l < count ? (int32_t)(first + index * WIDE + l + 1) : 0;
  return tile;
}

// Every key block of a sequence is expanded once for a head and meets all tiles of new tokens that see it.
static void expand_head(const Problem& p, int64_t sequence, int64_t head, const Expansion& e) {
  const int64_t start = p.starts[sequence], count = new_tokens(p, sequence), length = p.lengths[sequence];
  const int64_t before = length - count, tiles = (count + WIDE - 1) / WIDE;
  turn_weights(p, head, e.columns, e.room, e.weights);
  for (int64_t i = 0; i < tiles; ++i) {
    Tile tile = tile_of(p, e, i, before, count);
    load_queries(p, head, start + i * WIDE, least(WIDE, count - i * WIDE), e.room, tile.q);
    clear(tile, p.value);
  }
  for (int64_t j = 0; j < length; j += BLOCK) {
    const int64_t many = least(BLOCK, length - j);
    read_block(p, sequence, j, many, e.keys);
    for (int64_t u = 0; u < e.columns; u += WIDE)
      multiply(many, WIDE, e.keys, p.kept, e.weights + u * p.rank, p.rank, e.expanded + u, e.columns, false);
    for (int64_t i = larger(0, j - before) / WIDE; i < tiles; ++i) {
      const int64_t lanes = rounded(least(WIDE, count - i * WIDE));
      const int64_t seen = least(many, before + least((i + 1) * WIDE, count) - j);  // by the tile's last
      if (seen <= 0) continue;
      Tile tile = tile_of(p, e, i, before, count);
      multiply(seen, lanes, e.expanded, e.columns, tile.q, p.plain, e.scores, WIDE, false);
      multiply(seen, lanes, e.keys + p.width, p.kept, tile.q + p.plain * WIDE, p.rope, e.scores, WIDE, true);
      weigh(tile, e.scores, j, seen, lanes, p.value, p.scale);
      multiply_columns(p.value, lanes, e.expanded + p.plain, e.columns, e.scores, seen, tile.gathered);
    }
  }
  for (int64_t i = 0; i < tiles; ++i)
    finish_expanded(p, tile_of(p, e, i, before, count), head, start + i * WIDE, least(WIDE, count - i * WIDE));
}

static void run_expanded(const Problem& p, int64_t longest) {
  const int64_t floats = lay_out(p, longest, nullptr).floats;
#pragma omp parallel num_threads(p.threads) if (p.threads > 1)
  {
    float* memory = (float*)malloc(sizeof(float) * floats);
    const Expansion e = lay_out(p, longest, memory);
#pragma omp for schedule(dynamic, 1)
    for (int64_t w = 0; w < p.sequences * p.heads; ++w)
      if (new_tokens(p, w / p.heads) && is_expanded(p, w / p.heads)) expand_head(p, w / p.heads, w % p.heads, e);
    free(memory);
  }
}
