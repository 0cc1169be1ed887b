// The exported functions: attention to cached latents, and the store of new latents.

// a: as kernels/mla/cpu.py packs it
EXPORT int64_t mla_attention(const int64_t* a) {
  MlaArgs p;
  p.q = (const char*)a[0];
  p.kv_b = (const char*)a[1];
  p.cos = (const float*)a[2];
  p.sin = (const float*)a[3];
  p.cache = (const char*)a[4];
  p.block_table = (const int32_t*)a[5];
  p.query_start_loc = (const int32_t*)a[6];
  p.seq_lens = (const int32_t*)a[7];
  p.out = (char*)a[8];
  p.tokens = a[9];
  p.sequences = a[10];
  p.heads = a[11];
  p.nope_dim = a[12];
  p.rope_dim = a[13];
  p.rank = a[14];
  p.value_dim = a[15];
  p.block_size = a[16];
  p.q_token_stride = a[17];
  p.q_head_stride = a[18];
  p.kv_b_head_stride = a[19];
  p.kv_b_row_stride = a[20];
  p.table_row_stride = a[21];
  p.block_bytes = a[22];
  p.slot_bytes = a[23];
  p.rope_offset = a[24];
  p.scale_offset = a[25];
  p.dtype = a[26];
  p.interleaved = a[27];
  p.scale = unpack_double(a[28]);
  p.threads = (int)a[29];
  p.can_expand = a[32];
  p.latent_width = round_up(p.rank);
  p.key_width = p.latent_width + round_up(p.rope_dim);
  const auto first_key = [](int64_t, int64_t) { return (int64_t)0; };
  const int64_t error = check_block_table(p.query_start_loc, p.seq_lens, p.block_table, p.table_row_stride,
                                          p.sequences, p.tokens, p.block_size, a[30], a[31], first_key);
  if (error) return error;
  const int64_t used = p.sequences ? p.query_start_loc[p.sequences] : 0;
  const int64_t row = p.heads * p.value_dim * dtype_bytes(p.dtype);
  __builtin_memset(p.out + used * row, 0, (p.tokens - used) * row);  // tokens of no sequence
  AbsorbedQueries queries;
  collect_absorbed(p, queries);
  if (queries.items) run_absorbed(p, queries);
  free(queries.rows);
  free(queries.first_row);
  int64_t max_query_len = 0;
  for (int64_t s = 0; s < p.sequences; ++s)
    if (is_expanded(p, s)) max_query_len = max_i64(max_query_len, new_tokens(p, s));
  if (max_query_len) run_expanded(p, max_query_len);
  return 0;
}

// ---- storing new latents -----------------------------------------------------------------------------

INLINE bool is_finite(float x) { return x - x == 0.0f; }

// c / sqrt(mean(c^2) + eps) * weight
static void rms_norm(float* c, const float* weight, int64_t rank, float eps) {
  vec squares = vec{};
  for (int64_t i = 0; i < round_up(rank); i += LANES) squares += load(c + i) * load(c + i);
  const float factor = rsqrt(lane_sum(squares) / (float)rank + eps);
  for (int64_t i = 0; i < round_up(rank); i += LANES) store_vec(c + i, load(c + i) * factor * load(weight + i));
}

static float fp8_scale(const float* c, int64_t rank) {
  float amax = 0;
  for (int64_t i = 0; i < rank; ++i) {
    if (!is_finite(c[i])) return __builtin_nanf("");
    const float magnitude = c[i] < 0 ? -c[i] : c[i];
    amax = magnitude > amax ? magnitude : amax;
  }
  if (amax == 0) return 1.0f;
  const float scale = amax / 448.0f;
  return scale < 0x1p-126f ? 0x1p-126f : scale;
}

static void store_row(char* row, const float* c, const float* r, int64_t rank, int64_t rope_dim, int64_t rope_offset,
                      int64_t scale_offset) {
  if (sizeof(CACHE_T) > 1) {
    for (int64_t i = 0; i < rank; ++i) store((CACHE_T*)row + i, c[i]);
    for (int64_t i = 0; i < rope_dim; ++i) store((CACHE_T*)(row + rope_offset) + i, r[i]);
    return;
  }
  const float scale = fp8_scale(c, rank);
  for (int64_t i = 0; i < rank; ++i) {
    float x = c[i] / scale;
    x = x > 448.0f ? 448.0f : x < -448.0f ? -448.0f : x;
    store((CACHE_T*)row + i, x);
  }
  for (int64_t i = 0; i < rope_dim; ++i) store((bf16*)(row + rope_offset) + i, r[i]);
  __builtin_memcpy(row + scale_offset, &scale, sizeof scale);
}

// a: kv_a, weight, cos, sin, cache, slot_mapping, tokens, rank, rope_dim, stride of kv_a, block size, bytes of a block
// and of a slot, offsets of the rotary key and the scale, dtypes of kv_a and weight, interleaved, eps, threads, slots
EXPORT int64_t store_mla_cache(const int64_t* a) {
  const int64_t *slot_mapping = (const int64_t*)a[5], tokens = a[6], rank = a[7], rope_dim = a[8];
  const float eps = unpack_double(a[18]);
  if (const int64_t error = check_slot_mapping(slot_mapping, tokens, a[20])) return error;
  const int threads = choose_num_threads(tokens * (rank + rope_dim), 1 << 14, (int)a[19]);
  float* weight = (float*)malloc(sizeof(float) * round_up(rank) + 64);
  widen_dtype((const char*)a[1], 0, a[16], rank, weight);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float* c = (float*)malloc(sizeof(float) * (round_up(rank) + 2 * round_up(rope_dim) + LANES));
    float *r = c + round_up(rank), *rotated = r + round_up(rope_dim);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      if (slot_mapping[t] < 0) continue;
      widen_dtype((const char*)a[0], t * a[9], a[15], rank, c);
      widen_dtype((const char*)a[0], t * a[9] + rank, a[15], rope_dim, r);
      rms_norm(c, weight, rank, eps);
      const float *cos = (const float*)a[2] + t * (rope_dim / 2), *sin = (const float*)a[3] + t * (rope_dim / 2);
      apply_rope(r, cos, sin, rope_dim, a[17], rotated);
      char* row = (char*)a[4] + slot_mapping[t] / a[10] * a[11] + slot_mapping[t] % a[10] * a[12];
      store_row(row, c, rotated, rank, rope_dim, a[13], a[14]);
    }
    free(c);
  }
  free(weight);
  return 0;
}
