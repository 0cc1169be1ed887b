// The same in float32 for many tokens (large M): a strip of panels is dequantized for GEMM_BLOCK_K
// columns, into L1, and multiplied by every token of a chunk before the next columns are
// dequantized.
//   sums[token][panel][16] += dequantized[k][panel][16] * x[k][token]
// A dequantized value serves a whole chunk, so dequantization costs little for every format. The
// inner loop is that of a dense GEMM: GEMM_STRIP_PANELS vectors of weights, `tokens` broadcasts,
// and their products in accumulators.

template <int codes, int shift, bool minimum>
INLINE void store_column(const Weight& w, Bytes packed, const GroupScales& group, float* to) {
  store_f32(to, dequantize_column<codes, shift, minimum>(w, packed, group));
}

// Columns [start, start + depth) of a panel, `step` floats from one column to the next.
template <int codes, bool minimum>
static void dequantize_panel(const Weight& w, int64_t panel, int64_t start, int64_t depth, float* to,
                         int64_t step) {
  const int64_t each = w.group / 16;
  const uint8_t* code = w.codes + (panel * w.columns + start) * (codes == CODES_4BIT ? 8 : 16);
  int64_t index = (panel * (w.columns / w.group) + start / w.group) * PANEL_ROWS;
  int64_t left = each - start / 16 % each;
  for (int64_t h = start / 16; h < (start + depth) / 16; ++h) {
    const int64_t super = (panel * (w.columns / SUPER_BLOCK_COLUMNS) + h * 16 / SUPER_BLOCK_COLUMNS) * PANEL_ROWS;
    const GroupScales group = load_group<codes, minimum>(w, index, super);
    UNROLL
    for (int v = 0; v < (codes == CODES_4BIT ? 2 : 4); ++v) {
      const Bytes packed = load_bytes(code);
      __builtin_prefetch(code + GEMM_PREFETCH_BYTES);
      store_column<codes, 0, minimum>(w, packed, group, to);
      store_column<codes, 8, minimum>(w, packed, group, to + step);
      store_column<codes, 16, minimum>(w, packed, group, to + 2 * step);
      store_column<codes, 24, minimum>(w, packed, group, to + 3 * step);
      to += 4 * step;
      if (codes == CODES_4BIT) {
        store_column<codes, 4, minimum>(w, packed, group, to);
        store_column<codes, 12, minimum>(w, packed, group, to + step);
        store_column<codes, 20, minimum>(w, packed, group, to + 2 * step);
        store_column<codes, 28, minimum>(w, packed, group, to + 3 * step);
        to += 4 * step;
      }
      code += 64;
    }
    if (--left == 0) index += PANEL_ROWS, left = each;
  }
}

typedef void (*PanelDequantizer)(const Weight&, int64_t, int64_t, int64_t, float*, int64_t);
static const PanelDequantizer DEQUANTIZERS[4][2] = {  // [codes][minimum]
    {dequantize_panel<CODES_4BIT, false>, dequantize_panel<CODES_4BIT, true>},
    {dequantize_panel<CODES_8BIT, false>, dequantize_panel<CODES_8BIT, true>},
    {dequantize_panel<E4M3, false>, dequantize_panel<E4M3, false>},
    {dequantize_panel<E5M2, false>, dequantize_panel<E5M2, false>}};

// `tokens` of the `width` interleaved tokens of x; `next` is what is read after them.
template <int panels, int tokens>
static void accumulate_tokens(const float* dequantized, const float* x, int64_t width, int64_t depth,
                         const float* next, float* sums) {
  Floats sum[tokens][panels];
  UNROLL
  for (int t = 0; t < tokens; ++t)
    UNROLL
    for (int p = 0; p < panels; ++p) {
      sum[t][p] = load_f32(sums + (t * panels + p) * PANEL_ROWS);
      __builtin_prefetch(sums + ((tokens + t) * panels + p) * PANEL_ROWS);  // the next tokens' sums
    }
  for (int64_t k = 0; k < depth; ++k, dequantized += panels * PANEL_ROWS, x += width) {
    __builtin_prefetch(next + k * width);
    Floats column[panels];
    UNROLL
    for (int p = 0; p < panels; ++p) column[p] = load_f32(dequantized + p * PANEL_ROWS);
    UNROLL
    for (int t = 0; t < tokens; ++t) {
      const Floats one = all(x[t]);
      UNROLL
      for (int p = 0; p < panels; ++p) sum[t][p] = fma(column[p], one, sum[t][p]);
    }
  }
  UNROLL
  for (int t = 0; t < tokens; ++t)
    UNROLL
    for (int p = 0; p < panels; ++p) store_f32(sums + (t * panels + p) * PANEL_ROWS, sum[t][p]);
}

// All tokens of a tile, as many at a time as registers hold accumulators for.
template <int panels>
static void accumulate_tile(const float* dequantized, const float* x, int64_t width, int64_t depth,
                     const float* next, float* sums) {
  for (int64_t t = 0; t < width;) {
    float* to = sums + t * panels * PANEL_ROWS;
    const int64_t left = width - t, taken = left >= GEMM_REGISTER_TOKENS ? GEMM_REGISTER_TOKENS : left >= 2 ? 2 : 1;
    if (taken == GEMM_REGISTER_TOKENS) accumulate_tokens<panels, GEMM_REGISTER_TOKENS>(dequantized, x + t, width, depth, next, to);
    else if (taken == 2) accumulate_tokens<panels, 2>(dequantized, x + t, width, depth, next, to);
    else accumulate_tokens<panels, 1>(dequantized, x + t, width, depth, next, to);
    t += taken;
  }
}

// sums[token][panel][16] of `panels` panels and all tokens of a chunk; `memory` holds x.
template <int panels>
static void gemm_strip(const Weight& w, int64_t first, char* memory, int64_t tokens, float* dequantized,
                           float* sums) {
  const PanelDequantizer decode = DEQUANTIZERS[w.codes_kind][w.minimum_type != NO_SCALE];
  for (int64_t i = 0; i < tokens * panels * PANEL_ROWS; ++i) sums[i] = 0.0f;
  for (int64_t start = 0; start < w.columns; start += GEMM_BLOCK_K) {
    const int64_t depth = w.columns - start < GEMM_BLOCK_K ? w.columns - start : GEMM_BLOCK_K;
    for (int p = 0; p < panels; ++p)
      decode(w, first + p, start, depth, dequantized + p * PANEL_ROWS, panels * PANEL_ROWS);
    for (int64_t token = 0, width; token < tokens; token += width) {
      width = x_tile_width(tokens - token);
      const float* x = x_tile_at(memory, w.columns, token, width).values + start * width;
      const float* next = (const float*)((const char*)x + token_bytes(w.columns) * width);
      accumulate_tile<panels>(dequantized, x, width, depth, next, sums + token * panels * PANEL_ROWS);
    }
  }
}

// Scratch memory of a thread: dequantized columns, and sums of a strip (and of up).
INLINE int64_t large_m_scratch_bytes(int64_t tokens) { return (GEMM_BLOCK_K + 2 * tokens) * GEMM_STRIP_PANELS * PANEL_ROWS * 4; }
