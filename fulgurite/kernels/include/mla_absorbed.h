// Absorbed: all queries of a step into latent space, over the latents as they are kept, and out again.

// ---- which sequences are absorbed --------------------------------------------------------------------

// `mla.expands`
INLINE bool expands(const Problem& p, int64_t queries, int64_t keys) {
  const int64_t pairs = queries * (2 * keys - queries + 1) / 2, up = p.rank * (p.plain + p.value);
  const int64_t absorbed = queries * up + pairs * (2 * p.rank + p.rope);
  return queries >= FEW && keys * up + pairs * (p.plain + p.rope + p.value) < absorbed;
}

// The absorbed tokens end to end: sequence s has rows places[s] .. places[s + 1], token[r] is a row's.
const int64_t ROWS = TILES * WIDE;  // of an item
struct Absorbed {
  int64_t *places, *token;
  int64_t tokens, items, longest;
  float* rows;  // [tokens][heads][kept]: queries in latent space, then what they gathered
};

INLINE int64_t new_tokens(const Problem& p, int64_t s) { return p.starts[s + 1] - p.starts[s]; }
INLINE bool is_expanded(const Problem& p, int64_t s) { return expands(p, new_tokens(p, s), p.lengths[s]); }

static void find_absorbed(const Problem& p, Absorbed& all) {
  all.places = (int64_t*)malloc(sizeof(int64_t) * (p.sequences + 1 + p.tokens));
  all.token = all.places + p.sequences + 1;
  all.tokens = all.items = all.longest = 0;
  for (int64_t s = 0; s < p.sequences; ++s) {
    all.places[s] = all.tokens;
    if (new_tokens(p, s) == 0 || is_expanded(p, s)) continue;
    for (int64_t t = p.starts[s]; t < p.starts[s + 1]; ++t) all.token[all.tokens++] = t;
    all.items += (new_tokens(p, s) * p.heads + ROWS - 1) / ROWS;
    all.longest = larger(all.longest, p.lengths[s]);
  }
  all.places[p.sequences] = all.tokens;
  all.rows = (float*)malloc(sizeof(float) * all.tokens * p.heads * p.kept + 64);
}

// ---- absorbed: queries into latent space, and what was gathered out of it ----------------------------

const int64_t TOGETHER = 64;  // tokens that pass a head's weights at once

// (U_k^T q, q turned) of some tokens of one head; `room`: their queries, and weights that need padding
template <class T>
static void absorb(const Problem& p, const Absorbed& all, int64_t head, int64_t first, int64_t count, float* room) {
  const int64_t wide_q = rounded(p.plain), step = p.heads * p.kept;
  float* to = all.rows + (first * p.heads + head) * p.kept;
  float *turned = room + TOGETHER * wide_q, *weights = turned + rounded(p.rope);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t token = all.token[first + r], at = token * p.q_token + head * p.q_head;
    widen_row((const T*)p.q + at, p.plain, room + r * wide_q);
    float* rope = to + r * step + p.width;
    for (int64_t c = 0; c < p.kept - p.width; ++c) rope[c] = 0;
    widen_row((const T*)p.q + at + p.plain, p.rope, turned);
    turn(turned, p.cos + token * (p.rope / 2), p.sin + token * (p.rope / 2), p.rope, p.interleaved, rope);
  }
  const T* up = (const T*)p.up + head * p.up_head;
  if (p.rank == p.width) {
    multiply_through(count, p.width, room, wide_q, up, p.up_row, p.plain, to, step);
    return;
  }
  for (int64_t d = 0; d < p.plain; ++d) widen_row(up + d * p.up_row, p.rank, weights + d * p.width);
  multiply_through(count, p.width, room, wide_q, (const float*)weights, p.width, p.plain, to, step);
}

// sixteen rows of U_v times one token's gathered latent
template <class T>
INLINE vec sixteen_values(const T* up, int64_t step, int64_t there, int64_t width, const float* x) {
  vec parts[LANES];
  for (int64_t l = 0; l < LANES; ++l) {
    const T* row = up + least(l, there - 1) * step;
    vec part = wide(row) * load(x);
    for (int64_t c = LANES; c < width; c += LANES) part += wide(row + c) * load(x + c);
    parts[l] = part;
  }
  return sums(parts);
}

template <class T>
static void leave(const Problem& p, const Absorbed& all, int64_t head, int64_t first, int64_t count, float* room) {
  const T* up = (const T*)p.up + head * p.up_head + p.plain * p.up_row;
  const bool padded = p.rank != p.width;
  for (int64_t v = 0; v < p.value; v += LANES) {
    const int64_t there = least(LANES, p.value - v);
    if (padded)
      for (int64_t l = 0; l < there; ++l) widen_row(up + (v + l) * p.up_row, p.rank, room + l * p.width);
    for (int64_t r = 0; r < count; ++r) {
      const float* x = all.rows + ((first + r) * p.heads + head) * p.kept;
      const vec found = padded ? sixteen_values((const float*)room, p.width, there, p.width, x)
                               : sixteen_values(up + v * p.up_row, p.up_row, there, p.width, x);
      const int64_t at = (all.token[first + r] * p.heads + head) * p.value + v;
      for (int64_t l = 0; l < there; ++l) put_kind(p.out, at + l, p.kind, found[l]);
    }
  }
}

// One of the two for every head and every TOGETHER tokens.
static void each_head(const Problem& p, const Absorbed& all, bool in) {
  const int64_t pieces = (all.tokens + TOGETHER - 1) / TOGETHER, work = p.heads * pieces;
  const int threads = threads_for(all.tokens * p.heads * p.rank * (in ? p.plain : p.value), 1 << 17, p.threads);
  const int64_t room_in = TOGETHER * rounded(p.plain) + rounded(p.rope) + p.plain * p.width;
  const int64_t floats = larger(room_in, LANES * p.width) + LANES;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float* room = (float*)malloc(sizeof(float) * floats);
#pragma omp for schedule(static)
    for (int64_t w = 0; w < work; ++w) {
      const int64_t head = w / pieces, first = w % pieces * TOGETHER, count = least(TOGETHER, all.tokens - first);
#define CALL(T) in ? absorb<T>(p, all, head, first, count, room) : leave<T>(p, all, head, first, count, room)
      if (p.kind == 0) CALL(float);
      else if (p.kind == 1) CALL(bf16);
      else CALL(f16);
#undef CALL
    }
    free(room);
  }
}

// ---- absorbed: the walk ------------------------------------------------------------------------------

// Rows first .. first + rows of a sequence's (token, head) pairs, over keys low .. high.
struct Item {
  int64_t sequence, first, rows, low, high;
};

static Item item_at(const Problem& p, const Absorbed& all, int64_t index) {
  Item item;
  for (item.sequence = 0;; ++item.sequence) {
    const int64_t rows = (all.places[item.sequence + 1] - all.places[item.sequence]) * p.heads;
    const int64_t items = (rows + ROWS - 1) / ROWS;
    if (index < items) {
      item.first = index * ROWS;
      item.rows = least(ROWS, rows - item.first);
      break;
    }
    index -= items;
  }
  const int64_t before = p.lengths[item.sequence] - new_tokens(p, item.sequence);
  item.low = 0;
  item.high = before + (item.first + item.rows - 1) / p.heads + 1;
  return item;
}

// The share `span` of `spans` of an item's keys, in whole blocks.
static Item part_of(Item item, int64_t span, int64_t spans) {
  const int64_t blocks = (item.high + BLOCK - 1) / BLOCK, each = (blocks + spans - 1) / spans * BLOCK;
  item.low = span * each;
  item.high = least(item.high, item.low + each);
  return item;
}

INLINE int64_t rows_of(const Item& item, int64_t tile) { return least(WIDE, item.rows - tile * WIDE); }

static void begin_absorbed(const Problem& p, const Absorbed& all, const Item& item, int64_t index, Tile& tile) {
  const int64_t before = p.lengths[item.sequence] - new_tokens(p, item.sequence);
  const int64_t first = item.first + index * WIDE, rows = rows_of(item, index);
  turn_over(all.rows + (all.places[item.sequence] * p.heads + first) * p.kept, p.kept, rows, p.kept, tile.q);
  for (int64_t l = 0; l < WIDE; ++l) tile.to[l] = l < rows ? (int32_t)(before + (first + l) / p.heads + 1) : 0;
  clear(tile, p.width);
}

// A block of keys meets all tiles of the item, while the next one is fetched.
static void walk_absorbed(const Problem& p, const Absorbed& all, const Item& item, Tile* tiles, float* keys, float* scores) {
  const int64_t count_tiles = (item.rows + WIDE - 1) / WIDE;
  const char* soon[BLOCK / 8];
  const Ahead ahead = {soon, (8 * p.slot_bytes + p.kept - 1) / p.kept};
  for (int64_t i = 0; i < count_tiles; ++i) begin_absorbed(p, all, item, i, tiles[i]);
  for (int64_t j = item.low; j < item.high; j += BLOCK) {
    const int64_t count = least(BLOCK, item.high - j);
    read_block(p, item.sequence, j, count, keys);
    look_ahead(p, item.sequence, j + BLOCK, item.high, soon);
    for (int64_t i = 0; i < count_tiles; ++i) {
      Tile& tile = tiles[i];
      const int64_t lanes = rounded(rows_of(item, i));
      if (i == 0) multiply_fetching(count, lanes, keys, p.kept, tile.q, p.kept, scores, WIDE, ahead);
      else multiply(count, lanes, keys, p.kept, tile.q, p.kept, scores, WIDE, false);
      weigh(tile, scores, j, count, lanes, p.rank, p.scale);
      multiply_columns(p.rank, lanes, keys, p.kept, scores, count, tile.gathered);
    }
  }
}

// Gathered latents [width][WIDE] as rows, each times its factor.
static void turn_back(const Tile& tile, int64_t rows, int64_t width, const float* factor, float* to, int64_t step) {
  for (int64_t c = 0; c < width; c += LANES)
    for (int64_t part = 0; part < rows; part += LANES) {
      vec square[LANES];
      UNROLL
      for (int64_t l = 0; l < LANES; ++l) square[l] = load(tile.gathered + (c + l) * WIDE + part);
      turn_square(square);
      for (int64_t l = 0; l < least(LANES, rows - part); ++l)
        put(to + (part + l) * step + c, square[l] * factor[part + l]);
    }
}

// What a tile gathered takes the place of its queries.
static void finish_absorbed(const Problem& p, const Absorbed& all, const Item& item, int64_t index, const Tile& tile) {
  float factor[WIDE];
  for (int64_t l = 0; l < rows_of(item, index); ++l) factor[l] = 1.0f / tile.sum[l];
  float* to = all.rows + (all.places[item.sequence] * p.heads + item.first + index * WIDE) * p.kept;
  turn_back(tile, rows_of(item, index), p.width, factor, to, p.kept);
}

// What a tile gathered from its span: rows `step` apart of maximum, sum, latent.
static void leave_part(const Problem& p, const Item& item, int64_t index, const Tile& tile, float* parts, int64_t step) {
  float factor[WIDE];
  float* part = parts + index * WIDE * step;
  for (int64_t l = 0; l < rows_of(item, index); ++l) {
    part[l * step] = tile.largest[l];
    part[l * step + 1] = tile.sum[l];
    factor[l] = 1.0f;
  }
  turn_back(tile, rows_of(item, index), p.width, factor, part + LANES, step);
}

// The spans of one row, merged: each scaled to the largest maximum. A part: maximum, sum, gathered latent.
static void merge(const Problem& p, const float* parts, int64_t spans, int64_t stride, float* to) {
  float largest = -__builtin_inff(), total = 0;
  for (int64_t s = 0; s < spans; ++s)
    if (!(parts[s * stride] <= largest)) largest = parts[s * stride];
  const float base = largest == -__builtin_inff() ? 0.0f : largest;
  for (int64_t c = 0; c < p.width; c += LANES) put(to + c, vec{});
  for (int64_t s = 0; s < spans; ++s) {
    const float* part = parts + s * stride;
    const float factor = exp(part[0] - base);
    total += part[1] * factor;
    for (int64_t c = 0; c < p.width; c += LANES) put(to + c, load(to + c) + load(part + LANES + c) * factor);
  }
  for (int64_t c = 0; c < p.width; c += LANES) put(to + c, load(to + c) * (1.0f / total));
}

static void run_absorbed(const Problem& p, Absorbed& all) {
  each_head(p, all, true);
  int64_t spans = 1;
  if (all.items % p.threads && all.items < 4 * p.threads)
    spans = larger(1, least((4 * p.threads + all.items - 1) / all.items, all.longest / SPAN));
  const int64_t stride = LANES + p.width, work = all.items * spans;
  const int64_t most = least(TILES, (all.tokens * p.heads + WIDE - 1) / WIDE);  // tiles of any item
  float* parts = spans > 1 ? (float*)malloc(sizeof(float) * work * ROWS * stride) : nullptr;
  const int threads = threads_for(all.items * WIDE * all.longest * (p.kept + p.width), 1 << 17, p.threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    const int64_t each = (p.kept + p.width + 2) * WIDE, floats = BLOCK * p.kept + BLOCK * WIDE + most * each;
    float *memory = (float*)malloc(sizeof(float) * floats), *keys = memory, *scores = keys + BLOCK * p.kept;
    Tile tiles[TILES];
    for (int64_t i = 0; i < most; ++i) {
      tiles[i].q = scores + BLOCK * WIDE + i * each;
      tiles[i].gathered = tiles[i].q + p.kept * WIDE;
      tiles[i].largest = tiles[i].gathered + p.width * WIDE;
      tiles[i].sum = tiles[i].largest + WIDE;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t w = 0; w < work; ++w) {
      const Item whole = item_at(p, all, w / spans), item = spans > 1 ? part_of(whole, w % spans, spans) : whole;
      walk_absorbed(p, all, item, tiles, keys, scores);
      for (int64_t i = 0; i * WIDE < item.rows; ++i)
        if (spans == 1) finish_absorbed(p, all, item, i, tiles[i]);
        else leave_part(p, item, i, tiles[i], parts + (w / spans * ROWS * spans + w % spans) * stride, spans * stride);
    }
    if (spans > 1) {
#pragma omp for schedule(static)
      for (int64_t w = 0; w < all.items * ROWS; ++w) {
        const Item item = item_at(p, all, w / ROWS);
        if (w % ROWS >= item.rows) continue;
        float* to = all.rows + (all.places[item.sequence] * p.heads + item.first + w % ROWS) * p.kept;
        merge(p, parts + w * spans * stride, spans, stride, to);
      }
    }
    free(memory);
  }
  free(parts);
  each_head(p, all, false);
}
