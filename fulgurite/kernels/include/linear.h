// y = x @ weight.T with a quantized weight: a panel of 16 rows of the weight by a few rows of x
// (tokens).
//
// Int8 kernels: x in q8_0. The sum of a block is exact in 32 bits, then scaled to float:
//   y += (scale * x_scale) * (sum of codes * x_codes + offset * sum of x_codes) + minimum * sum of x
// Float kernels: a code is dequantized in its register; products are added in the order of columns.
//
// The sums of a token are taken in the same order in every kernel here and in linear_large_m.h. So
// its results don't depend on the other tokens.
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
            minimum_sums[t] = fma(low, all(x.sums[(2 * b + (per_half ? half : 0)) * tokens + t]), minimum_sums[t]);
        }
        if (per_half) index += PANEL_ROWS;
        else if (--left == 0) index += PANEL_ROWS, left = blocks_per_group;
      }
    }
    code += codes == CODES_4BIT ? 256 : 512;
    x_codes += tokens * BLOCK_COLUMNS;
  }
  UNROLL
  for (int t = 0; t < tokens; ++t) result[t] = minimum ? add(total[t], minimum_sums[t]) : total[t];
}

// Scales (and minimums) of a group of columns, as `dequantize_column` multiplies codes with them: the
// powers of two that make FP8 codes floats, and the offset of bytes, are in them already. The packed
// scales of FP8 leave room for that power (`_limit_scales` of cpu_layout.py), so both are exact.
struct GroupScales {
  Floats scale, low;
};
template <int codes, bool minimum> INLINE GroupScales load_group(const Weight& w, int64_t index, int64_t super) {
  GroupScales group;
  group.scale = load_scales(w.scales, w.scale_type, index, w.super_scales, super);
  if (minimum) group.low = load_scales(w.minimums, w.minimum_type, index, w.super_minimums, super);
  else if (codes == CODES_8BIT) group.low = multiply(group.scale, all(-128.0f));
  else group.low = all(0.0f);
  if (codes == E4M3) group.scale = multiply(group.scale, all(0x1p120f));
  if (codes == E5M2) group.scale = multiply(group.scale, all(0x1p112f));
  return group;
}

// One column of a panel, rounded once: scale * code + minimum.
template <int codes, int shift, bool minimum>
INLINE Floats dequantize_column(const Weight& w, Bytes packed, const GroupScales& group) {
  if (codes == CODES_4BIT) {
    const Floats value = nibble_value<shift>(w.values, packed);
    return minimum ? fma(value, group.scale, group.low) : multiply(value, group.scale);
  }
  if (codes == CODES_8BIT && minimum) return fma(byte_value<shift>(packed, 128.0f), group.scale, group.low);
  if (codes == CODES_8BIT) return fma(byte_value<shift>(packed, 0.0f), group.scale, group.low);
  if (codes == E4M3) return multiply(float_bits<shift, 4, 0x87f00000u>(packed), group.scale);
  return multiply(float_bits<shift, 3, 0x8fe00000u>(packed), group.scale);
}

template <int codes, int shift, int tokens, bool minimum>
INLINE void accumulate_column(const Weight& w, Bytes packed, const GroupScales& group, const float* x, Floats* total) {
  const Floats value = dequantize_column<codes, shift, minimum>(w, packed, group);
  UNROLL
  for (int t = 0; t < tokens; ++t) total[t] = fma(value, all(x[t]), total[t]);
}

// A vector of codes: four or eight columns.
template <int codes, int tokens, bool minimum>
INLINE void accumulate_vector(const Weight& w, Bytes packed, const GroupScales& group, const float* x, Floats* total) {
  accumulate_column<codes, 0, tokens, minimum>(w, packed, group, x, total);
  accumulate_column<codes, 8, tokens, minimum>(w, packed, group, x + 1 * tokens, total);
  accumulate_column<codes, 16, tokens, minimum>(w, packed, group, x + 2 * tokens, total);
  accumulate_column<codes, 24, tokens, minimum>(w, packed, group, x + 3 * tokens, total);
  if (codes != CODES_4BIT) return;
  accumulate_column<codes, 4, tokens, minimum>(w, packed, group, x + 4 * tokens, total);
  accumulate_column<codes, 12, tokens, minimum>(w, packed, group, x + 5 * tokens, total);
  accumulate_column<codes, 20, tokens, minimum>(w, packed, group, x + 6 * tokens, total);
  accumulate_column<codes, 28, tokens, minimum>(w, packed, group, x + 7 * tokens, total);
}

// `panels` panels from `first` on; the results of a panel are next to each other. With few tokens
// the latency of additions is the bound, so several panels alternate.
template <int codes, int tokens, int panels, bool minimum>
static void float_panel(const Weight& w, int64_t first, const XTile& x, Floats* result) {
  const int vectors = codes == CODES_4BIT ? 2 : 4;  // of 16 columns
  const int64_t halves = w.columns / 16, groups = w.columns / w.group, each = w.group / 16;
  const int64_t supers = w.columns / SUPER_BLOCK_COLUMNS, bytes = halves * vectors * 64;
  const uint8_t* code = w.codes + first * bytes;
  Floats total[panels][tokens];
  GroupScales group[panels];
  UNROLL
  for (int p = 0; p < panels; ++p)
    UNROLL
    for (int t = 0; t < tokens; ++t) total[p][t] = all(0.0f);
  int64_t index = first * groups, left = 0;
  const float* column = x.values;
  for (int64_t h = 0; h < halves; ++h, --left) {
    if (left == 0) {
      const int64_t super = first * supers + h * 16 / SUPER_BLOCK_COLUMNS;
      UNROLL
      for (int p = 0; p < panels; ++p)
        group[p] = load_group<codes, minimum>(w, (index + p * groups) * PANEL_ROWS, (super + p * supers) * PANEL_ROWS);
      ++index, left = each;
    }
    UNROLL
    for (int v = 0; v < vectors; ++v) {
      UNROLL
      for (int p = 0; p < panels; ++p) {
        __builtin_prefetch(code + p * bytes + GEMM_PREFETCH_BYTES);
        accumulate_vector<codes, tokens, minimum>(w, load_bytes(code + p * bytes), group[p], column, total[p]);
      }
      code += 64;
      column += 16 / vectors * tokens;
    }
  }
  UNROLL
  for (int p = 0; p < panels; ++p)
    UNROLL
    for (int t = 0; t < tokens; ++t) result[p * tokens + t] = total[p][t];
}

// [1, 2, 4 or 8 tokens]
#define INT8_PANELS(codes, per_half, minimum)                                                        \
  {int8_panel<codes, 1, per_half, minimum>, int8_panel<codes, 2, per_half, minimum>,         \
   int8_panel<codes, 4, per_half, minimum>, int8_panel<codes, 8, per_half, minimum>}
// [1, 2, 4 or 8 tokens; one token and FLOAT_PANELS_1 panels, two and FLOAT_PANELS_2]
const int FLOAT_PANELS_1 = 4, FLOAT_PANELS_2 = 2;
#define FLOAT_PANELS(codes, minimum)                                                                 \
  {float_panel<codes, 1, 1, minimum>, float_panel<codes, 2, 1, minimum>,                             \
   float_panel<codes, 4, 1, minimum>, float_panel<codes, 8, 1, minimum>,                             \
   float_panel<codes, 1, FLOAT_PANELS_1, minimum>, float_panel<codes, 2, FLOAT_PANELS_2, minimum>}
static const PanelKernel INT8_KERNELS[2][2][2][4] = {  // [codes][per_half][minimum]
    {{INT8_PANELS(CODES_4BIT, false, false), INT8_PANELS(CODES_4BIT, false, true)},
     {INT8_PANELS(CODES_4BIT, true, false), INT8_PANELS(CODES_4BIT, true, true)}},
    {{INT8_PANELS(CODES_8BIT, false, false), INT8_PANELS(CODES_8BIT, false, true)},
     {INT8_PANELS(CODES_8BIT, true, false), INT8_PANELS(CODES_8BIT, true, true)}}};
static const PanelKernel FLOAT_KERNELS[4][2][6] = {  // [codes][minimum]
    {FLOAT_PANELS(CODES_4BIT, false), FLOAT_PANELS(CODES_4BIT, true)},
    {FLOAT_PANELS(CODES_8BIT, false), FLOAT_PANELS(CODES_8BIT, true)},
    {FLOAT_PANELS(E4M3, false), FLOAT_PANELS(E4M3, false)},
    {FLOAT_PANELS(E5M2, false), FLOAT_PANELS(E5M2, false)}};
