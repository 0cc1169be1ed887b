// y = x @ weight.T with a quantized weight: a panel of 16 rows of the weight by a few rows of x
// (tokens).
//
// Int8 kernels: x in q8_0. The sum of a block is exact in 32 bits, then scaled to float:
//   y += (scale * x_scale) * (sum of codes * x_codes + offset * sum of x_codes) + minimum * sum of x
// Float kernels: a code is dequantized in its register; sums of 16 columns are scaled.
//
// With one token every byte of the weight is read once. With more, the codes of a panel are
// unpacked once for eight tokens and stay in L1 for the others. Tuned constants:
// kernels/tuning/cpu.py.
const int MAX_TILE_TOKENS = 8;

typedef void (*PanelKernel)(const Weight&, int64_t panel, const XTile& x, Floats* result);

// Accumulators stay in registers only if the loops over them are unrolled, which -O2 does not do.
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

template <int codes, int tokens, bool per_half, bool minimum>
static void int8_panel(const Weight& w, int64_t panel, const XTile& x, Floats* result) {
  const int64_t blocks = w.columns / BLOCK_COLUMNS, groups = w.columns / w.group;
  const int64_t blocks_per_group = per_half ? 1 : w.group / BLOCK_COLUMNS;
  const uint8_t* code = w.codes + panel * blocks * (codes == CODES_4BIT ? 256 : 512);
  const Bytes table = byte_table(w.table);
  // Minimums have accumulators of their own: with few tokens the latency of additions is the bound.
  const int separate_minimums = minimum && tokens <= 2;
  Floats total[tokens], minimum_sums[tokens];
  UNROLL
  for (int t = 0; t < tokens; ++t) total[t] = minimum_sums[t] = all(0.0f);
  int64_t index = panel * groups * PANEL_ROWS, left = blocks_per_group;
  const int8_t* x_codes = x.codes;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t super = (panel * (w.columns / SUPER_BLOCK_COLUMNS) + b * BLOCK_COLUMNS / SUPER_BLOCK_COLUMNS) * PANEL_ROWS;
    Ints sum[tokens];
    UNROLL
    for (int line = 0; line < (codes == CODES_4BIT ? 4 : 8); ++line)
      __builtin_prefetch(code + GEMM_PREFETCH_BYTES + 64 * line);
    UNROLL
    for (int half = 0; half < 2; ++half) {
      if (per_half || half == 0)
        UNROLL
        for (int t = 0; t < tokens; ++t) sum[t] = all_ints(x.offset_sums[(2 * b + half) * tokens + t]);
      if (codes == CODES_4BIT) {
        UNROLL
        for (int v = 2 * half; v < 2 * half + 2; ++v) {
          const Bytes packed = load_bytes(code + 64 * v);
          const Bytes low = low_codes(table, packed), high = high_codes(table, packed);
          UNROLL
          for (int t = 0; t < tokens; ++t) {
            sum[t] = dot_nibbles(sum[t], low, x_codes + t * BLOCK_COLUMNS + 8 * v);
            sum[t] = dot_nibbles(sum[t], high, x_codes + t * BLOCK_COLUMNS + 8 * v + 4);
          }
        }
      } else {
        UNROLL
        for (int v = 4 * half; v < 4 * half + 4; ++v) {
          const Bytes wide = load_bytes(code + 64 * v);
          UNROLL
          for (int t = 0; t < tokens; ++t)
            sum[t] = dot_bytes(sum[t], wide, x_codes + t * BLOCK_COLUMNS + 4 * v);
        }
      }
      if (per_half || half == 1) {
        const Floats scale = load_scales(w.scales, w.scale_type, index, w.super_scales, super);
        UNROLL
        for (int t = 0; t < tokens; ++t)
          total[t] = fma(to_floats(sum[t]), multiply(scale, all(x.scales[b * tokens + t])), total[t]);
        if (minimum) {
          const Floats low = load_scales(w.minimums, w.minimum_type, index, w.super_minimums, super);
          UNROLL
          for (int t = 0; t < tokens; ++t)
            (separate_minimums ? minimum_sums : total)[t] = fma(
                low, all(x.sums[(2 * b + (per_half ? half : 0)) * tokens + t]), (separate_minimums ? minimum_sums : total)[t]);
        }
        if (per_half) index += PANEL_ROWS;
        else if (--left == 0) index += PANEL_ROWS, left = blocks_per_group;
      }
    }
    code += codes == CODES_4BIT ? 256 : 512;
    x_codes += tokens * BLOCK_COLUMNS;
  }
  UNROLL
  for (int t = 0; t < tokens; ++t) result[t] = separate_minimums ? add(total[t], minimum_sums[t]) : total[t];
}

template <int codes, int shift> INLINE Floats dequantize_code(const Weight& w, Bytes packed) {
  if (codes == CODES_4BIT) return nibble_value<shift>(w.values, packed);
  if (codes == CODES_8BIT) return byte_value<shift>(packed);
  if (codes == E4M3) return float_value<shift, 4, 0x87f00000u>(packed, 0x1p120f);
  return float_value<shift, 3, 0x8fe00000u>(packed, 0x1p112f);
}

template <int codes, int shift, int tokens>
INLINE void accumulate_column(const Weight& w, Bytes packed, const float* x, Floats* part) {
  const Floats value = dequantize_code<codes, shift>(w, packed);
  UNROLL
  for (int t = 0; t < tokens; ++t) part[t] = fma(value, all(x[t]), part[t]);
}

template <int codes, int tokens, bool minimum>
static void float_panel(const Weight& w, int64_t panel, const XTile& x, Floats* result) {
  const int64_t per_half = w.columns / 16, groups = w.columns / w.group, each = w.group / 16;
  const uint8_t* code = w.codes + panel * w.columns / BLOCK_COLUMNS * (codes == CODES_4BIT ? 256 : 512);
  Floats total[tokens];
  UNROLL
  for (int t = 0; t < tokens; ++t) total[t] = all(0.0f);
  int64_t index = panel * groups * PANEL_ROWS, left = each;
  const float* column = x.values;
  for (int64_t h = 0; h < per_half; ++h) {
    const int64_t super = (panel * (w.columns / SUPER_BLOCK_COLUMNS) + h * 16 / SUPER_BLOCK_COLUMNS) * PANEL_ROWS;
    // With few tokens the latency of additions is the bound: two accumulators alternate.
    const int chains = tokens <= 2 ? 2 : 1;
    Floats parts[chains][tokens];
    UNROLL
    for (int c = 0; c < chains; ++c)
      UNROLL
      for (int t = 0; t < tokens; ++t) parts[c][t] = all(0.0f);
    UNROLL
    for (int v = 0; v < (codes == CODES_4BIT ? 2 : 4); ++v) {
      Floats* part = parts[v % chains];
      const Bytes packed = load_bytes(code);
      __builtin_prefetch(code + GEMM_PREFETCH_BYTES);
      if (codes == CODES_4BIT) {
        accumulate_column<codes, 0, tokens>(w, packed, column, part);
        accumulate_column<codes, 8, tokens>(w, packed, column + 1 * tokens, part);
        accumulate_column<codes, 16, tokens>(w, packed, column + 2 * tokens, part);
        accumulate_column<codes, 24, tokens>(w, packed, column + 3 * tokens, part);
        accumulate_column<codes, 4, tokens>(w, packed, column + 4 * tokens, part);
        accumulate_column<codes, 12, tokens>(w, packed, column + 5 * tokens, part);
        accumulate_column<codes, 20, tokens>(w, packed, column + 6 * tokens, part);
        accumulate_column<codes, 28, tokens>(w, packed, column + 7 * tokens, part);
      } else {
        accumulate_column<codes, 0, tokens>(w, packed, column, part);
        accumulate_column<codes, 8, tokens>(w, packed, column + 1 * tokens, part);
        accumulate_column<codes, 16, tokens>(w, packed, column + 2 * tokens, part);
        accumulate_column<codes, 24, tokens>(w, packed, column + 3 * tokens, part);
      }
      code += 64;
      column += (codes == CODES_4BIT ? 8 : 4) * tokens;
    }
    const Floats scale = load_scales(w.scales, w.scale_type, index, w.super_scales, super);
    UNROLL
    for (int t = 0; t < tokens; ++t) {
      const Floats part = chains == 2 ? add(parts[0][t], parts[chains - 1][t]) : parts[0][t];
      total[t] = fma(part, scale, total[t]);
    }
    if (minimum) {
      const Floats low = load_scales(w.minimums, w.minimum_type, index, w.super_minimums, super);
      UNROLL
      for (int t = 0; t < tokens; ++t) total[t] = fma(low, all(x.sums[h * tokens + t]), total[t]);
    }
    if (--left == 0) index += PANEL_ROWS, left = each;
  }
  UNROLL
  for (int t = 0; t < tokens; ++t) result[t] = total[t];
}

// [1, 2, 4 or 8 tokens]
#define INT8_PANELS(codes, per_half, minimum)                                                        \
  {int8_panel<codes, 1, per_half, minimum>, int8_panel<codes, 2, per_half, minimum>,         \
   int8_panel<codes, 4, per_half, minimum>, int8_panel<codes, 8, per_half, minimum>}
#define FLOAT_PANELS(codes, minimum)                                                               \
  {float_panel<codes, 1, minimum>, float_panel<codes, 2, minimum>, float_panel<codes, 4, minimum>, \
   float_panel<codes, 8, minimum>}
static const PanelKernel INT8_KERNELS[2][2][2][4] = {  // [codes][per_half][minimum]
    {{INT8_PANELS(CODES_4BIT, false, false), INT8_PANELS(CODES_4BIT, false, true)},
     {INT8_PANELS(CODES_4BIT, true, false), INT8_PANELS(CODES_4BIT, true, true)}},
    {{INT8_PANELS(CODES_8BIT, false, false), INT8_PANELS(CODES_8BIT, false, true)},
     {INT8_PANELS(CODES_8BIT, true, false), INT8_PANELS(CODES_8BIT, true, true)}}};
static const PanelKernel FLOAT_KERNELS[4][2][4] = {  // [codes][minimum]
    {FLOAT_PANELS(CODES_4BIT, false), FLOAT_PANELS(CODES_4BIT, true)},
    {FLOAT_PANELS(CODES_8BIT, false), FLOAT_PANELS(CODES_8BIT, true)},
    {FLOAT_PANELS(E4M3, false), FLOAT_PANELS(E4M3, false)},
    {FLOAT_PANELS(E5M2, false), FLOAT_PANELS(E5M2, false)}};
