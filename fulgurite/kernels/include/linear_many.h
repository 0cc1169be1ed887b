// Many tokens at once in float32: a strip of panels is decoded for DEPTH columns, into the first cache,
// and multiplied by every token of a chunk before the next columns are decoded.
//   sums[token][panel][16] += decoded[k][panel][16] * x[k][token]
// A decoded number serves a whole chunk, so decoding costs little whatever the format, and the inner
// loop is that of a plain matmul: STRIP vectors of weights, `tokens` broadcasts, STRIP * tokens sums.
const int64_t DEPTH = 128;
const int64_t MANY_TOKENS = 16;  // from here on decoding apart pays

template <int codes, int shift, bool minimum>
INLINE void decode_column(const Weight& w, Bytes packed, Floats scale, Floats low, float* to) {
  const Floats value = value_of<codes, shift>(w, packed);
  store_f32(to, minimum ? fma(value, scale, low) : multiply(value, scale));
}

// Columns [start, start + depth) of a panel, `step` floats from one column to the next.
template <int codes, bool minimum>
static void decode_panel(const Weight& w, int64_t panel, int64_t start, int64_t depth, float* to,
                         int64_t step) {
  const int64_t each = w.group / 16;
  const uint8_t* code = w.codes + (panel * w.columns + start) * (codes == NIBBLES ? 8 : 16);
  int64_t index = (panel * (w.columns / w.group) + start / w.group) * ROWS;
  int64_t left = each - start / 16 % each;
  for (int64_t h = start / 16; h < (start + depth) / 16; ++h) {
    const int64_t super = (panel * (w.columns / SUPER) + h * 16 / SUPER) * ROWS;
    const Floats scale = load_numbers(w.scales, w.scale_type, index, w.super_scales, super);
    const Floats low = minimum
        ? load_numbers(w.minimums, w.minimum_type, index, w.super_minimums, super) : all(0.0f);
    UNROLL
    for (int v = 0; v < (codes == NIBBLES ? 2 : 4); ++v) {
      const Bytes packed = load_bytes(code);
      __builtin_prefetch(code + AHEAD);
      decode_column<codes, 0, minimum>(w, packed, scale, low, to);
      decode_column<codes, 8, minimum>(w, packed, scale, low, to + step);
      decode_column<codes, 16, minimum>(w, packed, scale, low, to + 2 * step);
      decode_column<codes, 24, minimum>(w, packed, scale, low, to + 3 * step);
      to += 4 * step;
      if (codes == NIBBLES) {
        decode_column<codes, 4, minimum>(w, packed, scale, low, to);
        decode_column<codes, 12, minimum>(w, packed, scale, low, to + step);
        decode_column<codes, 20, minimum>(w, packed, scale, low, to + 2 * step);
        decode_column<codes, 28, minimum>(w, packed, scale, low, to + 3 * step);
        to += 4 * step;
      }
      code += 64;
    }
    if (--left == 0) index += ROWS, left = each;
  }
}

typedef void (*Decoder)(const Weight&, int64_t, int64_t, int64_t, float*, int64_t);
static const Decoder DECODERS[4][2] = {  // [codes][minimum]
    {decode_panel<NIBBLES, false>, decode_panel<NIBBLES, true>},
    {decode_panel<BYTES, false>, decode_panel<BYTES, true>},
    {decode_panel<E4M3, false>, decode_panel<E4M3, false>},
    {decode_panel<E5M2, false>, decode_panel<E5M2, false>}};

// `tokens` of the `width` tokens of x that lie side by side; `next` is what will be read after them.
template <int panels, int tokens>
static void add_products(const float* decoded, const float* x, int64_t width, int64_t depth,
                         const float* next, float* sums) {
  Floats sum[tokens][panels];
  UNROLL
  for (int t = 0; t < tokens; ++t)
    UNROLL
    for (int p = 0; p < panels; ++p) {
      sum[t][p] = load_f32(sums + (t * panels + p) * ROWS);
      __builtin_prefetch(sums + ((tokens + t) * panels + p) * ROWS);  // the next tokens' sums
    }
  for (int64_t k = 0; k < depth; ++k, decoded += panels * ROWS, x += width) {
    __builtin_prefetch(next + k * width);
    Floats column[panels];
    UNROLL
    for (int p = 0; p < panels; ++p) column[p] = load_f32(decoded + p * ROWS);
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
    for (int p = 0; p < panels; ++p) store_f32(sums + (t * panels + p) * ROWS, sum[t][p]);
}

// All of a tile's tokens, as many together as the registers hold sums for.
template <int panels>
static void add_tile(const float* decoded, const float* x, int64_t width, int64_t depth,
                     const float* next, float* sums) {
  for (int64_t t = 0; t < width;) {
    float* to = sums + t * panels * ROWS;
    const int64_t left = width - t, taken = left >= TOGETHER ? TOGETHER : left >= 2 ? 2 : 1;
    if (taken == TOGETHER) add_products<panels, TOGETHER>(decoded, x + t, width, depth, next, to);
    else if (taken == 2) add_products<panels, 2>(decoded, x + t, width, depth, next, to);
    else add_products<panels, 1>(decoded, x + t, width, depth, next, to);
    t += taken;
  }
}

// sums[token][panel][16] of `panels` panels and all tokens of a chunk prepared in `memory`.
template <int panels>
static void multiply_strip(const Weight& w, int64_t first, char* memory, int64_t tokens, float* decoded,
                           float* sums) {
  const Decoder decode = DECODERS[w.codes_kind][w.minimum_type != ABSENT];
  for (int64_t i = 0; i < tokens * panels * ROWS; ++i) sums[i] = 0.0f;
  for (int64_t start = 0; start < w.columns; start += DEPTH) {
    const int64_t depth = w.columns - start < DEPTH ? w.columns - start : DEPTH;
    for (int p = 0; p < panels; ++p)
      decode(w, first + p, start, depth, decoded + p * ROWS, panels * ROWS);
    for (int64_t token = 0, width; token < tokens; token += width) {
      width = tile_width(tokens - token);
      const float* x = tile_at(memory, w.columns, token, width).values + start * width;
      const float* next = (const float*)((const char*)x + token_bytes(w.columns) * width);
      add_tile<panels>(decoded, x, width, depth, next, sums + token * panels * ROWS);
    }
  }
}

// Memory a thread needs for it: decoded columns, and sums of a strip (and of its gate's other half).
INLINE int64_t many_bytes(int64_t tokens) { return (DEPTH + 2 * tokens) * STRIP * ROWS * 4; }
