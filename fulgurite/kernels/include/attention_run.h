// Walking the keys: items over threads, blocks within an item, spans merged; and new keys into pages.

INLINE const PAGE* key_at(const Problem& p, const Item& item, int64_t j) {
  const int64_t page = p.tables[item.sequence * p.table_row + j / p.page];
  return p.keys + page * p.key_page + j % p.page * p.key_slot + item.key_head * p.key_head;
}
INLINE const PAGE* value_at(const Problem& p, const Item& item, int64_t j) {
  if (!p.values) return key_at(p, item, j);
  const int64_t page = p.tables[item.sequence * p.table_row + j / p.page];
  return p.values + page * p.value_page + j % p.page * p.value_slot + item.key_head * p.value_head;
}
INLINE int64_t value_step(const Problem& p) { return p.values ? p.value_slot : p.key_slot; }

// Rows of kept numbers as floats: where they lie if they are floats in whole vectors, widened otherwise.
INLINE const float* as_floats(const float* from, int64_t step, int64_t count, int64_t dim, float* room,
                              int64_t width, int64_t* new_step) {
  *new_step = step;
  if (dim == width) return from;
  for (int64_t j = 0; j < count; ++j) widen_row(from + j * step, dim, room + j * width);
  *new_step = width;
  return room;
}
template <class T>
INLINE const float* as_floats(const T* from, int64_t step, int64_t count, int64_t dim, float* room,
                              int64_t width, int64_t* new_step) {
  for (int64_t j = 0; j < count; ++j) widen_row(from + j * step, dim, room + j * width);
  *new_step = width;
  return room;
}

// Decode: a block is what is left of a page, at most BLOCK keys.
static void walk_flat(const Problem& p, const Item& item, Tile& tile) {
  for (int64_t j = item.low; j < item.high;) {
    const int64_t count = least(least(p.page - j % p.page, item.high - j), BLOCK);
    int64_t step;
    const float* keys = as_floats(key_at(p, item, j), p.key_slot, count, p.key_dim, tile.keys, p.key_width, &step);
    scores_flat(p, item, tile, keys, step, count);
    weigh(p, item, tile, j, count);
    const float* values =
        as_floats(value_at(p, item, j), value_step(p), count, p.value_dim, tile.values, p.value_width, &step);
    gather_values(p, item, tile, values, step, count);
    j += count;
  }
}

// Sixteen keys turned over: lane l of to[h * BLOCK] is key l's coordinate h.
static void turn_keys(const Problem& p, const float* const* keys, int64_t count, float* to) {
  for (int64_t h = 0; h < p.key_width; h += LANES) {
    vec row[LANES];
    UNROLL
    for (int64_t l = 0; l < LANES; ++l) row[l] = load(keys[least(l, count - 1)] + h);
    turn_square(row);
    UNROLL
    for (int64_t l = 0; l < LANES; ++l) put(to + (h + l) * BLOCK, row[l]);
  }
}

// Prefill: BLOCK keys from as many pages as they lie in.
static void walk_tall(const Problem& p, const Item& item, Tile& tile, float* room) {
  for (int64_t j = item.low; j < item.high; j += BLOCK) {
    const int64_t count = least(BLOCK, item.high - j);
    for (int64_t part = 0; part < count; part += LANES) {
      const int64_t there = least(LANES, count - part);
      const float* keys[LANES];
      for (int64_t l = 0; l < there; ++l) {
        widen_row(key_at(p, item, j + part + l), p.key_dim, room + l * p.key_width);
        keys[l] = room + l * p.key_width;
      }
      turn_keys(p, keys, there, tile.keys + part);
    }
    for (int64_t l = 0; l < count; ++l)
      widen_row(value_at(p, item, j + l), p.value_dim, tile.values + l * p.value_width);
    scores_tall(p, item, tile);
    weigh(p, item, tile, j, count);
    gather_values(p, item, tile, tile.values, p.value_width, count);
  }
}

static void put_number(char* to, int64_t at, int64_t kind, float x) {
  if (kind == 0) ((float*)to)[at] = x;
  else if (kind == 1) store((bf16*)to + at, x);
  else store((f16*)to + at, x);
}

// One row's result: divided by the sum, to which the sink adds its share.
static void finish(const Problem& p, const Item& item, int64_t r, float largest, float sum, const float* gathered) {
  const int64_t token = p.starts[item.sequence] + (item.first + r) / p.group;
  const int64_t head = item.key_head * p.group + (item.first + r) % p.group;
  float factor = 1.0f;
  if (p.sinks) {
    const float sink = number_at(p.sinks, head, p.sink_kind);
    const float top = sink > largest ? sink : largest;
    factor = exp(largest - top);
    sum = sum * factor + exp(sink - top);
  }
  const float scale = factor * p.value_scale / sum;
  const int64_t at = (token * p.heads + head) * p.value_dim;
  for (int64_t c = 0; c < p.value_dim; ++c) put_number(p.out, at + c, p.query_kind, gathered[c] * scale);
}

// ---- items -------------------------------------------------------------------------------------------

INLINE int64_t rows_of(const Problem& p, int64_t s) { return (p.starts[s + 1] - p.starts[s]) * p.group; }
INLINE int64_t tiles_of(const Problem& p, int64_t s) { return (rows_of(p, s) + TALL - 1) / TALL; }

// Item number `index` of all; `ends` are the items up to each sequence, heads and tiles counted.
static Item item_at(const Problem& p, const int64_t* ends, int64_t index) {
  int64_t low = 0, high = p.sequences;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (ends[middle] <= index) low = middle + 1; else high = middle;
  }
  Item item;
  const int64_t within = index - (low ? ends[low - 1] : 0), tiles = tiles_of(p, low);
  item.sequence = low;
  item.key_head = within / tiles;
  // later tiles have more keys: they go first
  item.first = (tiles - 1 - within % tiles) * TALL;
  item.rows = least(TALL, rows_of(p, low) - item.first);
  const int64_t before = p.lengths[low] - (p.starts[low + 1] - p.starts[low]);
  const int64_t first = before + item.first / p.group;
  const int64_t last = before + (item.first + item.rows - 1) / p.group;
  item.high = last + 1;
  item.low = p.window ? larger(0, first - p.window + 1) : 0;
  if (p.chunk) item.low = larger(item.low, first / p.chunk * p.chunk);
  return item;
}

static void run_item(const Problem& p, const Item& item, Tile& tile, float* room) {
  begin(p, item, tile);
  if (item.rows <= FLAT) walk_flat(p, item, tile);
  else walk_tall(p, item, tile, room);
}

// The share `span` of `spans` of an item's keys, in whole pages.
static Item part_of(const Problem& p, Item item, int64_t span, int64_t spans) {
  const int64_t pages = (item.high - item.low + p.page - 1) / p.page;
  const int64_t each = (pages + spans - 1) / spans * p.page;
  const int64_t low = item.low + span * each;
  item.high = least(item.high, low + each);
  item.low = low;
  return item;
}

// The spans of one row, merged: each scaled to the largest maximum.
static void merge(const Problem& p, const Item& item, int64_t r, const float* parts, int64_t spans, int64_t stride,
                  float* gathered) {
  float largest = -__builtin_inff(), total = 0;
  for (int64_t s = 0; s < spans; ++s) largest = parts[s * stride] > largest ? parts[s * stride] : largest;
  const float base = largest == -__builtin_inff() ? 0.0f : largest;
  for (int64_t c = 0; c < p.value_width; c += LANES) put(gathered + c, vec{});
  for (int64_t s = 0; s < spans; ++s) {
    const float* part = parts + s * stride;
    const float factor = exp(part[0] - base);
    total += part[1] * factor;
    for (int64_t c = 0; c < p.value_width; c += LANES)
      put(gathered + c, load(gathered + c) + load(part + LANES + c) * factor);
  }
  finish(p, item, r, largest, total, gathered);
}

static void run_all(const Problem& p, const int64_t* ends, int64_t items, int64_t spans, int threads) {
  const int64_t floats = tile_floats(p, TALL) + LANES * p.key_width + p.value_width;
  const int64_t stride = LANES + p.value_width;
  float* parts = spans > 1 ? (float*)malloc(sizeof(float) * items * spans * TALL * stride) : nullptr;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float* memory = (float*)malloc(sizeof(float) * (floats + LANES));
    Tile tile;
    lay_out(p, TALL, memory, tile);
    float* room = memory + tile_floats(p, TALL);
#pragma omp for schedule(dynamic, 1)
    for (int64_t work = 0; work < items * spans; ++work) {
      const Item whole = item_at(p, ends, work / spans);
      const Item item = spans > 1 ? part_of(p, whole, work % spans, spans) : whole;
      run_item(p, item, tile, room);
      for (int64_t r = 0; r < item.rows; ++r) {
        const float* gathered = tile.gathered + r * p.value_width;
        if (spans == 1) {
          finish(p, item, r, tile.largest[r], tile.sum[r], gathered);
          continue;
        }
        float* part = parts + ((work / spans * TALL + r) * spans + work % spans) * stride;
        part[0] = tile.largest[r];
        part[1] = tile.sum[r];
        __builtin_memcpy(part + LANES, gathered, sizeof(float) * p.value_width);
      }
    }
    if (spans > 1) {
#pragma omp for schedule(static)
      for (int64_t work = 0; work < items * TALL; ++work) {
        const Item item = item_at(p, ends, work / TALL);
        if (work % TALL < item.rows)
          merge(p, item, work % TALL, parts + work * spans * stride, spans, stride, room);
      }
    }
    free(memory);
  }
  free(parts);
}

INLINE float number_in(int64_t bits64) { return (float)__builtin_bit_cast(double, bits64); }

// a: as `cpu/attention.py` packs it
EXPORT int64_t attend(const int64_t* a) {
  Problem p;
  p.q = (const char*)a[0];
  p.keys = (const PAGE*)a[1];
  p.values = (const PAGE*)a[2];
  p.tables = (const int32_t*)a[3];
  p.starts = (const int32_t*)a[4];
  p.lengths = (const int32_t*)a[5];
  p.sinks = (const char*)a[6];
  p.out = (char*)a[7];
  const int64_t tokens = a[8];
  p.sequences = a[9];
  p.heads = a[10];
  p.key_heads = a[11];
  p.group = p.heads / p.key_heads;
  p.key_dim = a[12];
  p.value_dim = a[13];
  p.page = a[14];
  p.q_token = a[15];
  p.q_head = a[16];
  p.table_row = a[17];
  p.key_page = a[18];
  p.key_slot = a[19];
  p.key_head = a[20];
  p.value_page = a[21];
  p.value_slot = a[22];
  p.value_head = a[23];
  p.window = a[24];
  p.chunk = a[25];
  p.query_kind = a[26];
  p.sink_kind = a[27];
  p.scale = number_in(a[28]);
  p.softcap = number_in(a[29]);
  p.value_scale = number_in(a[30]);
  const int threads = (int)a[31];
  p.key_width = rounded(p.key_dim);
  p.value_width = rounded(p.value_dim);
  const auto first_key = [&](int64_t s, int64_t count) {
    const int64_t first = p.lengths[s] - count, seen = p.window ? larger(0, first - p.window + 1) : 0;
    return p.chunk ? larger(seen, first / p.chunk * p.chunk) : seen;
  };
  const int64_t wrong = check_tables(p.starts, p.lengths, p.tables, p.table_row, p.sequences, tokens, p.page, a[32],
                                     a[33], first_key);
  if (wrong) return wrong;
  const int64_t size = p.query_kind ? 2 : 4, row = p.heads * p.value_dim * size;
  const int64_t used = p.sequences ? p.starts[p.sequences] : 0;
  __builtin_memset(p.out + used * row, 0, (tokens - used) * row);  // tokens that are nobody's
  int64_t* ends = (int64_t*)malloc(sizeof(int64_t) * (p.sequences + 1));
  int64_t items = 0, longest = 0;
  for (int64_t s = 0; s < p.sequences; ++s) {
    items += tiles_of(p, s) * p.key_heads;
    ends[s] = items;
    longest = larger(longest, p.lengths[s]);
  }
  int64_t reach = p.window ? least(longest, p.window) : longest;
  if (p.chunk) reach = least(reach, p.chunk);
  int64_t spans = 1;
  if (items && items % threads && items < 4 * threads)
    spans = larger(1, least((4 * threads + items - 1) / items, reach / SPAN));
  const int64_t work = items * reach * (p.key_dim + p.value_dim);
  run_all(p, ends, items, spans, threads_for(work, 1 << 15, threads));
  free(ends);
  return 0;
}

// ---- new keys and values into pages ------------------------------------------------------------------

static float limit_of(const float*) { return __builtin_inff(); }
static float limit_of(const bf16*) { return __builtin_inff(); }
static float limit_of(const f16*) { return __builtin_inff(); }
static float limit_of(const f8e4m3*) { return 448.0f; }
static float limit_of(const f8e5m2*) { return 57344.0f; }
INLINE void store(float* to, float x) { *to = x; }

// a: new, pages, slots, tokens, heads, size; strides of new: token, head; of pages: page, slot, head;
// slots a page, kind of new, scale
static void store_rows(const int64_t* a, int threads) {
  const char* from = (const char*)a[0];
  PAGE* pages = (PAGE*)a[1];
  const int64_t* slots = (const int64_t*)a[2];
  const int64_t tokens = a[3], heads = a[4], size = a[5], page = a[11], kind = a[12];
  const float scale = number_in(a[13]), limit = limit_of(pages);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; ++t) {
    if (slots[t] < 0) continue;
    for (int64_t k = 0; k < heads; ++k) {
      const int64_t at = t * a[6] + k * a[7];
      PAGE* to = pages + slots[t] / page * a[8] + slots[t] % page * a[9] + k * a[10];
      for (int64_t h = 0; h < size; ++h) {
        float x = number_at(from, at + h, kind) / scale;
        x = x > limit ? limit : x < -limit ? -limit : x;
        store(to + h, x);
      }
    }
  }
}

EXPORT int64_t store_pages(const int64_t* a) {
  if (const int64_t wrong = check_slots((const int64_t*)a[2], a[3], a[29])) return wrong;
  const int threads = threads_for(a[3] * a[4] * a[5], 1 << 15, (int)a[28]);
  store_rows(a, threads);
  if (a[15]) store_rows(a + 14, threads);
  return 0;
}
