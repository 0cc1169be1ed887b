// The main loops of paged attention: items over threads, splits and key blocks within an item; and the store of
// new keys and values into the cache.

INLINE const CACHE_T* key_at(const AttentionArgs& p, const WorkItem& item, int64_t j) {
  const int64_t block = p.block_table[item.sequence * p.table_row_stride + j / p.block_size], slot = j % p.block_size;
  return p.keys + block * p.key_block_stride + slot * p.key_slot_stride + item.key_head * p.key_head_stride;
}
INLINE const CACHE_T* value_at(const AttentionArgs& p, const WorkItem& item, int64_t j) {
  if (!p.values) return key_at(p, item, j);
  const int64_t block = p.block_table[item.sequence * p.table_row_stride + j / p.block_size], slot = j % p.block_size;
  return p.values + block * p.value_block_stride + slot * p.value_slot_stride + item.key_head * p.value_head_stride;
}
INLINE int64_t value_stride(const AttentionArgs& p) { return p.values ? p.value_slot_stride : p.key_slot_stride; }

// Rows of the cache as floats: in place if they are floats in full vectors, converted otherwise.
INLINE const float* as_floats(const float* from, int64_t stride, int64_t count, int64_t dim, float* scratch,
                              int64_t width, int64_t* new_stride) {
  *new_stride = stride;
  if (dim == width) return from;
  for (int64_t j = 0; j < count; ++j) widen_row(from + j * stride, dim, scratch + j * width);
  *new_stride = width;
  return scratch;
}
template <class T>
INLINE const float* as_floats(const T* from, int64_t stride, int64_t count, int64_t dim, float* scratch, int64_t width,
                              int64_t* new_stride) {
  for (int64_t j = 0; j < count; ++j) widen_row(from + j * stride, dim, scratch + j * width);
  *new_stride = width;
  return scratch;
}

// The keys from `j` on that lie in one cache block, before `end`.
INLINE int64_t adjacent_keys(const AttentionArgs& p, int64_t j, int64_t end) {
  return min_i64(p.block_size - j % p.block_size, end - j);
}

// Decode: the keys and values of a block are read where they are, or converted a cache block at a time.
static void attend_decode(const AttentionArgs& p, const WorkItem& item, Tile& tile) {
  for (int64_t low = item.low; low < item.high;) {
    const int64_t first = low / KEY_BLOCK * KEY_BLOCK, end = min_i64(first + KEY_BLOCK, item.high);
    int64_t stride;
    for (int64_t j = low, count; j < end; j += count) {
      count = min_i64(adjacent_keys(p, j, end), LANES);
      const float* keys =
          as_floats(key_at(p, item, j), p.key_slot_stride, count, p.key_dim, tile.keys, p.key_width, &stride);
      decode_scores_of_rows(p, item.rows, tile.q, keys, stride, count, tile.scores + j - first);
    }
    softmax_block(p, item, tile, first, end - first);
    for (int64_t j = low, count; j < end; j += count) {
      count = adjacent_keys(p, j, end);
      const float* values =
          as_floats(value_at(p, item, j), value_stride(p), count, p.value_dim, tile.values, p.value_width, &stride);
      accumulate_values(p, item, tile, values, stride, j - first, count);
    }
    low = end;
  }
}

// Transpose sixteen keys: lane l of to[h * KEY_BLOCK] is coordinate h of key l.
static void transpose_keys(const AttentionArgs& p, const float* const* keys, int64_t count, float* to) {
  for (int64_t h = 0; h < p.key_width; h += LANES) {
    vec row[LANES];
    UNROLL
    for (int64_t l = 0; l < LANES; ++l) row[l] = load(keys[min_i64(l, count - 1)] + h);
    transpose_16x16(row);
    UNROLL
    for (int64_t l = 0; l < LANES; ++l) store_vec(to + (h + l) * KEY_BLOCK, row[l]);
  }
}

// Prefill: KEY_BLOCK keys from as many cache blocks as they are in.
static void attend_prefill(const AttentionArgs& p, const WorkItem& item, Tile& tile, float* scratch) {
  for (int64_t low = item.low; low < item.high;) {
    const int64_t first = low / KEY_BLOCK * KEY_BLOCK, end = min_i64(first + KEY_BLOCK, item.high);
    for (int64_t j = first; j < end; j += LANES) {
      const int64_t count = min_i64(LANES, end - j);
      if (j + count <= low) continue;
      const float* keys[LANES];
      for (int64_t l = 0; l < count; ++l) {
        keys[l] = scratch + l * p.key_width;
        widen_row(key_at(p, item, max_i64(j + l, low)), p.key_dim, scratch + l * p.key_width);
      }
      transpose_keys(p, keys, count, tile.keys + j - first);
    }
    for (int64_t j = low; j < end; ++j)
      widen_row(value_at(p, item, j), p.value_dim, tile.values + (j - low) * p.value_width);
    prefill_scores(p, item, tile);
    softmax_block(p, item, tile, first, end - first);
    accumulate_values(p, item, tile, tile.values, p.value_width, low - first, end - low);
    low = end;
  }
}

static void store_number(char* to, int64_t at, int64_t dtype, float x) {
  if (dtype == 0) ((float*)to)[at] = x;
  else if (dtype == 1) store((bf16*)to + at, x);
  else store((f16*)to + at, x);
}

// Write one row's result: acc / row_sum, where the sink adds to the sum.
static void write_row(const AttentionArgs& p, const WorkItem& item, int64_t r, float row_max, float row_sum,
                      const float* acc) {
  const int64_t token = p.query_start_loc[item.sequence] + (item.first + r) / p.group;
  const int64_t head = item.key_head * p.group + (item.first + r) % p.group;
  float factor = 1.0f;
  if (p.sinks) {
    const float sink = load_number(p.sinks, head, p.sink_dtype);
    const float max_score = sink > row_max ? sink : row_max;
    factor = exp(row_max - max_score);
    row_sum = row_sum * factor + exp(sink - max_score);
    row_max = max_score;
  }
  if (p.lse) {  // a row without keys here: zeros
    p.lse[token * p.heads + head] = row_sum == 0 ? -__builtin_inff() : row_max + __builtin_logf(row_sum);
    if (row_sum == 0) row_sum = 1;
  }
  const float scale = factor * p.value_scale / row_sum;
  const int64_t at = (token * p.heads + head) * p.value_dim;
  for (int64_t c = 0; c < p.value_dim; ++c) store_number(p.out, at + c, p.query_dtype, acc[c] * scale);
}

// ---- items -------------------------------------------------------------------------------------------

INLINE int64_t num_rows(const AttentionArgs& p, int64_t s) {
  return (p.query_start_loc[s + 1] - p.query_start_loc[s]) * p.group;
}
INLINE int64_t num_tiles(const AttentionArgs& p, int64_t s) {
  return (num_rows(p, s) + PREFILL_ROWS - 1) / PREFILL_ROWS;
}

// Work item `index`; ends[s] is the number of items of sequences 0 .. s.
static WorkItem find_item(const AttentionArgs& p, const int64_t* ends, int64_t index) {
  int64_t low = 0, high = p.sequences;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (ends[middle] <= index) low = middle + 1; else high = middle;
  }
  WorkItem item;
  const int64_t within = index - (low ? ends[low - 1] : 0), tiles = num_tiles(p, low);
  item.sequence = low;
  item.key_head = within / tiles;
  // later tiles have more keys: run them first
  item.first = (tiles - 1 - within % tiles) * PREFILL_ROWS;
  item.rows = min_i64(PREFILL_ROWS, num_rows(p, low) - item.first);
  const int64_t before = p.seq_lens[low] - (p.query_start_loc[low + 1] - p.query_start_loc[low]);
  const int64_t first = before + item.first / p.group;
  const int64_t last = before + (item.first + item.rows - 1) / p.group;
  item.high = local_keys(p, last + 1);
  item.low = p.window ? max_i64(0, first - p.window + 1) : 0;
  if (p.chunk) item.low = max_i64(item.low, first / p.chunk * p.chunk);
  item.low = local_keys(p, item.low);
  return item;
}

// ---- splits ------------------------------------------------------------------------------------------

// The result of some keys for one row: [row_max, row_sum, .. LANES, acc].
INLINE int64_t partial_floats(const AttentionArgs& p) { return LANES + p.value_width; }
static void clear_partial(const AttentionArgs& p, float* partial) {
  partial[0] = -__builtin_inff();
  for (int64_t c = 1; c < partial_floats(p); ++c) partial[c] = 0.0f;
}

// Add the result of the next keys: the part with the smaller maximum is rescaled. An empty one changes nothing.
static void fold_partial(const AttentionArgs& p, float* into, float row_max, float row_sum, const float* acc) {
  const bool is_larger = row_max > into[0];
  const float largest = is_larger ? row_max : into[0], smallest = is_larger ? into[0] : row_max;
  const float factor = largest == -__builtin_inff() ? 0.0f : exp(smallest - largest);
  const float scaled_sum = is_larger ? into[1] : row_sum, other_sum = is_larger ? row_sum : into[1];
  into[0] = largest;
  into[1] = scaled_sum * factor + other_sum;
  for (int64_t c = 0; c < p.value_width; c += LANES) {
    const vec before = load(into + LANES + c), next = load(acc + c);
    store_vec(into + LANES + c, is_larger ? before * factor + next : next * factor + before);
  }
}

INLINE int64_t num_splits(const WorkItem& item) {
  return item.high > item.low ? (item.high - 1) / SPLIT_KEYS - item.low / SPLIT_KEYS + 1 : 0;
}
static WorkItem split_item(WorkItem item, int64_t split) {
  const int64_t first = (item.low / SPLIT_KEYS + split) * SPLIT_KEYS;
  item.low = max_i64(item.low, first);
  item.high = min_i64(item.high, first + SPLIT_KEYS);
  return item;
}

static void attend_split(const AttentionArgs& p, const WorkItem& item, Tile& tile, float* scratch) {
  init_tile(p, item, tile);
  if (item.rows <= MAX_DECODE_ROWS) attend_decode(p, item, tile);
  else attend_prefill(p, item, tile, scratch);
}

// One item by one thread. `partials` has room for its rows.
static void run_item(const AttentionArgs& p, const WorkItem& item, Tile& tile, float* scratch, float* partials) {
  const int64_t splits = num_splits(item), stride = partial_floats(p);
  if (splits <= 1) {
    attend_split(p, item, tile, scratch);
    for (int64_t r = 0; r < item.rows; ++r)
      write_row(p, item, r, tile.row_max[r], tile.row_sum[r], tile.acc + r * p.value_width);
    return;
  }
  for (int64_t r = 0; r < item.rows; ++r) clear_partial(p, partials + r * stride);
  for (int64_t split = 0; split < splits; ++split) {
    attend_split(p, split_item(item, split), tile, scratch);
    for (int64_t r = 0; r < item.rows; ++r)
      fold_partial(p, partials + r * stride, tile.row_max[r], tile.row_sum[r], tile.acc + r * p.value_width);
  }
  for (int64_t r = 0; r < item.rows; ++r) {
    const float* partial = partials + r * stride;
    write_row(p, item, r, partial[0], partial[1], partial + LANES);
  }
}

// Fold the splits of one row.
static void merge_splits(const AttentionArgs& p, const WorkItem& item, int64_t r, const float* partials, float* into) {
  const int64_t splits = num_splits(item), stride = partial_floats(p);
  clear_partial(p, into);
  for (int64_t s = 0; s < splits; ++s)
    fold_partial(p, into, partials[s * stride], partials[s * stride + 1], partials + s * stride + LANES);
  write_row(p, item, r, into[0], into[1], into + LANES);
}

// Work: whole items, or (max_splits > 1) splits of items, at most `max_rows` rows of each.
static void run_items(const AttentionArgs& p, const int64_t* ends, int64_t items, int64_t max_splits, int64_t max_rows,
                      int threads) {
  const int64_t stride = partial_floats(p), of_item = max_rows * max_splits * stride;
  const int64_t floats = workspace_floats(p, PREFILL_ROWS) + LANES * p.key_width;
  float* partials = max_splits > 1 ? (float*)malloc(sizeof(float) * items * of_item) : nullptr;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float* memory = (float*)malloc(sizeof(float) * (floats + PREFILL_ROWS * stride + LANES));
    Tile tile;
    assign_workspace(p, PREFILL_ROWS, memory, tile);
    float *scratch = memory + workspace_floats(p, PREFILL_ROWS), *folded = memory + floats;
#pragma omp for schedule(dynamic, 1)
    for (int64_t work = 0; work < items * max_splits; ++work) {
      const WorkItem item = find_item(p, ends, work / max_splits);
      if (max_splits == 1) {
        run_item(p, item, tile, scratch, folded);
        continue;
      }
      const int64_t split = work % max_splits;
      if (split >= num_splits(item)) continue;
      attend_split(p, split_item(item, split), tile, scratch);
      for (int64_t r = 0; r < item.rows; ++r) {
        float* partial = partials + work / max_splits * of_item + (r * max_splits + split) * stride;
        partial[0] = tile.row_max[r];
        partial[1] = tile.row_sum[r];
        __builtin_memcpy(partial + LANES, tile.acc + r * p.value_width, sizeof(float) * p.value_width);
      }
    }
    if (max_splits > 1) {
#pragma omp for schedule(static)
      for (int64_t work = 0; work < items * max_rows; ++work) {
        const WorkItem item = find_item(p, ends, work / max_rows);
        if (work % max_rows < item.rows)
          merge_splits(p, item, work % max_rows, partials + work * max_splits * stride, folded);
      }
    }
    free(memory);
  }
  free(partials);
}

INLINE float unpack_double(int64_t bits64) { return (float)__builtin_bit_cast(double, bits64); }

// a: as kernels/attention/cpu.py packs it
EXPORT int64_t paged_attention(const int64_t* a) {
  AttentionArgs p;
  p.q = (const char*)a[0];
  p.keys = (const CACHE_T*)a[1];
  p.values = (const CACHE_T*)a[2];
  p.block_table = (const int32_t*)a[3];
  p.query_start_loc = (const int32_t*)a[4];
  p.seq_lens = (const int32_t*)a[5];
  p.sinks = (const char*)a[6];
  p.out = (char*)a[7];
  const int64_t tokens = a[8];
  p.sequences = a[9];
  p.heads = a[10];
  p.key_heads = a[11];
  p.group = p.heads / p.key_heads;
  p.key_dim = a[12];
  p.value_dim = a[13];
  p.block_size = a[14];
  p.q_token_stride = a[15];
  p.q_head_stride = a[16];
  p.table_row_stride = a[17];
  p.key_block_stride = a[18];
  p.key_slot_stride = a[19];
  p.key_head_stride = a[20];
  p.value_block_stride = a[21];
  p.value_slot_stride = a[22];
  p.value_head_stride = a[23];
  p.window = a[24];
  p.chunk = a[25];
  p.query_dtype = a[26];
  p.sink_dtype = a[27];
  p.scale = unpack_double(a[28]);
  p.softcap = unpack_double(a[29]);
  p.value_scale = unpack_double(a[30]);
  const int threads = (int)a[31];
  p.lse = (float*)a[34];
  p.shard_index = a[35];
  p.shard_count = a[36];
  p.key_width = round_up(p.key_dim);
  p.value_width = round_up(p.value_dim);
  const auto first_key = [&](int64_t s, int64_t count) {
    const int64_t first = p.seq_lens[s] - count, seen = p.window ? max_i64(0, first - p.window + 1) : 0;
    return p.chunk ? max_i64(seen, first / p.chunk * p.chunk) : seen;
  };
  const int64_t error = check_block_table(p.query_start_loc, p.seq_lens, p.block_table, p.table_row_stride,
                                          p.sequences, tokens, p.block_size * p.shard_count, a[32], a[33], first_key);
  if (error) return error;
  const int64_t size = p.query_dtype ? 2 : 4, row = p.heads * p.value_dim * size;
  const int64_t used = p.sequences ? p.query_start_loc[p.sequences] : 0;
  __builtin_memset(p.out + used * row, 0, (tokens - used) * row);  // tokens of no sequence
  int64_t* ends = (int64_t*)malloc(sizeof(int64_t) * (p.sequences + 1));
  int64_t items = 0, max_seq_len = 0;
  for (int64_t s = 0; s < p.sequences; ++s) {
    items += num_tiles(p, s) * p.key_heads;
    ends[s] = items;
    max_seq_len = max_i64(max_seq_len, p.seq_lens[s]);
  }
  int64_t max_keys = p.window ? min_i64(max_seq_len, p.window) : max_seq_len;
  if (p.chunk) max_keys = min_i64(max_keys, p.chunk);
  int64_t max_rows = 0, max_splits = 1;
  for (int64_t s = 0; s < p.sequences; ++s) max_rows = max_i64(max_rows, min_i64(num_rows(p, s), PREFILL_ROWS));
  // the keys of a tile start and end anywhere, and a tile of a window has up to a key more for each row
  if (items % threads && items < 4 * threads) max_splits = (max_keys + PREFILL_ROWS) / SPLIT_KEYS + 2;
  const int64_t work = items * max_keys * (p.key_dim + p.value_dim);
  run_items(p, ends, items, max_keys > SPLIT_KEYS ? max_splits : 1, max_rows, choose_num_threads(work, 1 << 15, threads));
  free(ends);
  return 0;
}

// ---- storing new keys and values ---------------------------------------------------------------------

static float cache_max(const float*) { return __builtin_inff(); }
static float cache_max(const bf16*) { return __builtin_inff(); }
static float cache_max(const f16*) { return __builtin_inff(); }
static float cache_max(const f8e4m3*) { return 448.0f; }
static float cache_max(const f8e5m2*) { return 57344.0f; }
INLINE void store(float* to, float x) { *to = x; }

// a: new, cache, slot_mapping, tokens, heads, head size; strides of new (token, head) and of the cache (block, slot,
// head); block size, dtype of new, scale
static void store_rows(const int64_t* a, int threads) {
  const char* from = (const char*)a[0];
  CACHE_T* cache = (CACHE_T*)a[1];
  const int64_t* slot_mapping = (const int64_t*)a[2];
  const int64_t tokens = a[3], heads = a[4], size = a[5], block_size = a[11], dtype = a[12];
  const float scale = unpack_double(a[13]), limit = cache_max(cache);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; ++t) {
    if (slot_mapping[t] < 0) continue;
    for (int64_t k = 0; k < heads; ++k) {
      const int64_t at = t * a[6] + k * a[7];
      const int64_t block = slot_mapping[t] / block_size, slot = slot_mapping[t] % block_size;
      CACHE_T* to = cache + block * a[8] + slot * a[9] + k * a[10];
      for (int64_t h = 0; h < size; ++h) {
        float x = load_number(from, at + h, dtype) / scale;
        x = x > limit ? limit : x < -limit ? -limit : x;
        store(to + h, x);
      }
    }
  }
}

EXPORT int64_t store_kv_cache(const int64_t* a) {
  if (const int64_t error = check_slot_mapping((const int64_t*)a[2], a[3], a[29])) return error;
  const int threads = choose_num_threads(a[3] * a[4] * a[5], 1 << 15, (int)a[28]);
  store_rows(a, threads);
  if (a[15]) store_rows(a + 14, threads);
  return 0;
}
