// The two calls: attention over kept latents, and new latents into pages.

// a: as `cpu/mla.py` packs it
EXPORT int64_t latent_attention(const int64_t* a) {
  Problem p;
  p.q = (const char*)a[0];
  p.up = (const char*)a[1];
  p.cos = (const float*)a[2];
  p.sin = (const float*)a[3];
  p.pages = (const char*)a[4];
  p.tables = (const int32_t*)a[5];
  p.starts = (const int32_t*)a[6];
  p.lengths = (const int32_t*)a[7];
  p.out = (char*)a[8];
  p.tokens = a[9];
  p.sequences = a[10];
  p.heads = a[11];
  p.plain = a[12];
  p.rope = a[13];
  p.rank = a[14];
  p.value = a[15];
  p.page = a[16];
  p.q_token = a[17];
  p.q_head = a[18];
  p.up_head = a[19];
  p.up_row = a[20];
  p.table_row = a[21];
  p.page_bytes = a[22];
  p.slot_bytes = a[23];
  p.rope_at = a[24];
  p.scale_at = a[25];
  p.kind = a[26];
  p.interleaved = a[27];
  p.scale = number_in(a[28]);
  p.threads = (int)a[29];
  p.width = rounded(p.rank);
  p.kept = p.width + rounded(p.rope);
  const int64_t wrong = check_tables(p.starts, p.lengths, p.tables, p.table_row, p.sequences, p.tokens, p.page, a[30],
                                     a[31], [](int64_t, int64_t) { return (int64_t)0; });
  if (wrong) return wrong;
  const int64_t used = p.sequences ? p.starts[p.sequences] : 0, row = p.heads * p.value * size_of(p.kind);
  __builtin_memset(p.out + used * row, 0, (p.tokens - used) * row);  // tokens that are nobody's
  Absorbed all;
  find_absorbed(p, all);
  if (all.items) run_absorbed(p, all);
  free(all.rows);
  free(all.places);
  int64_t longest = 0;
  for (int64_t s = 0; s < p.sequences; ++s)
    if (is_expanded(p, s)) longest = larger(longest, new_tokens(p, s));
  if (longest) run_expanded(p, longest);
  return 0;
}

// ---- new latents into pages --------------------------------------------------------------------------

INLINE bool is_finite(float x) { return x - x == 0.0f; }

// c / sqrt(mean(c^2) + eps) * weight
static void norm(float* c, const float* weight, int64_t rank, float eps) {
  vec squares = vec{};
  for (int64_t i = 0; i < rounded(rank); i += LANES) squares += load(c + i) * load(c + i);
  const float factor = rsqrt(sum(squares) / (float)rank + eps);
  for (int64_t i = 0; i < rounded(rank); i += LANES) put(c + i, load(c + i) * factor * load(weight + i));
}

static float packed_scale(const float* c, int64_t rank) {
  float most = 0;
  for (int64_t i = 0; i < rank; ++i) {
    if (!is_finite(c[i])) return __builtin_nanf("");
    const float magnitude = c[i] < 0 ? -c[i] : c[i];
    most = magnitude > most ? magnitude : most;
  }
  if (most == 0) return 1.0f;
  const float scale = most / 448.0f;
  return scale < 0x1p-126f ? 0x1p-126f : scale;
}

static void keep_row(char* row, const float* c, const float* r, int64_t rank, int64_t rope, int64_t rope_at,
                     int64_t scale_at) {
  if (sizeof(PAGE) > 1) {
    for (int64_t i = 0; i < rank; ++i) store((PAGE*)row + i, c[i]);
    for (int64_t i = 0; i < rope; ++i) store((PAGE*)(row + rope_at) + i, r[i]);
    return;
  }
  const float scale = packed_scale(c, rank);
  for (int64_t i = 0; i < rank; ++i) {
    float x = c[i] / scale;
    x = x > 448.0f ? 448.0f : x < -448.0f ? -448.0f : x;
    store((PAGE*)row + i, x);
  }
  for (int64_t i = 0; i < rope; ++i) store((bf16*)(row + rope_at) + i, r[i]);
  __builtin_memcpy(row + scale_at, &scale, sizeof scale);
}

// a: latents, weight, cos, sin, pages, slots, tokens, rank, rope, stride of latents, slots a page, bytes of a page
// and of a slot, where the rotary key and the scale begin, kinds of latents and weight, interleaved, eps, threads
EXPORT int64_t write_latent(const int64_t* a) {
  const int64_t *slots = (const int64_t*)a[5], tokens = a[6], rank = a[7], rope = a[8];
  const float eps = number_in(a[18]);
  if (const int64_t wrong = check_slots(slots, tokens, a[20])) return wrong;
  const int threads = threads_for(tokens * (rank + rope), 1 << 14, (int)a[19]);
  float* weight = (float*)malloc(sizeof(float) * rounded(rank) + 64);
  widen_kind((const char*)a[1], 0, a[16], rank, weight);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float* c = (float*)malloc(sizeof(float) * (rounded(rank) + 2 * rounded(rope) + LANES));
    float *r = c + rounded(rank), *turned = r + rounded(rope);
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; ++t) {
      if (slots[t] < 0) continue;
      widen_kind((const char*)a[0], t * a[9], a[15], rank, c);
      widen_kind((const char*)a[0], t * a[9] + rank, a[15], rope, r);
      norm(c, weight, rank, eps);
      turn(r, (const float*)a[2] + t * (rope / 2), (const float*)a[3] + t * (rope / 2), rope, a[17], turned);
      keep_row((char*)a[4] + slots[t] / a[10] * a[11] + slots[t] % a[10] * a[12], c, turned, rank, rope, a[13], a[14]);
    }
    free(c);
  }
  free(weight);
  return 0;
}
