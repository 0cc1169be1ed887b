// y = x @ weight.T, a panel of 16 rows of the weight and a few rows of x (tokens) at a time.
//
// Integer kernels: x in q8_0. A block's sum is exact in 32 bits, then scaled into a float:
//   y += (scale * x_scale) * (sum of codes * x_codes + offset * sum of x_codes) + minimum * sum of x
// Float kernels: a code becomes a float in its register; sums of 16 columns are scaled.
// With one token a call reads every byte of the weight once; with many, a panel's codes are unpacked
// once for eight tokens and stay in the first cache for the others.
const int MOST_TOKENS = 8;
const int64_t FEW_TOKENS = 4;       // each thread prepares x for itself: cheaper than a barrier
const int64_t CHUNK_TOKENS = 256;   // rows of x prepared at a time
const int64_t AHEAD = 4096;         // bytes of codes fetched before they are needed: over a page's end
// products under which a second thread costs more than it gives: a parallel region took 0.9 to 1.1 us
// (two cores of a Xeon, libgomp), one thread 50 products a nanosecond
const int64_t SMALL_WORK = 1 << 17;

typedef void (*PanelKernel)(const Weight&, int64_t panel, const Tile& x, Floats* result);

// Sums live in registers only if the loops over them are written out; -O2 alone leaves them loops.
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

template <int codes, int tokens, bool halves, bool minimum>
static void integer_panel(const Weight& w, int64_t panel, const Tile& x, Floats* result) {
  const int64_t blocks = w.columns / BLOCK, groups = w.columns / w.group;
  const int64_t blocks_per_group = halves ? 1 : w.group / BLOCK;
  const uint8_t* code = w.codes + panel * blocks * (codes == NIBBLES ? 256 : 512);
  const Bytes table = byte_table(w.table);
  // Minimums have sums of their own: with few tokens a chain of additions is what takes the time.
  const int apart = minimum && tokens <= 2;
  Floats total[tokens], lows[tokens];
  UNROLL
  for (int t = 0; t < tokens; ++t) total[t] = lows[t] = all(0.0f);
  int64_t index = panel * groups * ROWS, left = blocks_per_group;
  const int8_t* x_codes = x.codes;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t super = (panel * (w.columns / SUPER) + b * BLOCK / SUPER) * ROWS;
    Ints sum[tokens];
    UNROLL
    for (int line = 0; line < (codes == NIBBLES ? 4 : 8); ++line)
      __builtin_prefetch(code + AHEAD + 64 * line);
    UNROLL
    for (int half = 0; half < 2; ++half) {
      if (halves || half == 0)
        UNROLL
        for (int t = 0; t < tokens; ++t) sum[t] = all_ints(x.starts[(2 * b + half) * tokens + t]);
      if (codes == NIBBLES) {
        UNROLL
        for (int v = 2 * half; v < 2 * half + 2; ++v) {
          const Bytes packed = load_bytes(code + 64 * v);
          const Bytes low = low_codes(table, packed), high = high_codes(table, packed);
          UNROLL
          for (int t = 0; t < tokens; ++t) {
            sum[t] = dot_nibbles(sum[t], low, x_codes + t * BLOCK + 8 * v);
            sum[t] = dot_nibbles(sum[t], high, x_codes + t * BLOCK + 8 * v + 4);
          }
        }
      } else {
        UNROLL
        for (int v = 4 * half; v < 4 * half + 4; ++v) {
          const Bytes wide = load_bytes(code + 64 * v);
          UNROLL
          for (int t = 0; t < tokens; ++t)
            sum[t] = dot_bytes(sum[t], wide, x_codes + t * BLOCK + 4 * v);
        }
      }
      if (halves || half == 1) {
        const Floats scale = load_numbers(w.scales, w.scale_type, index, w.super_scales, super);
        UNROLL
        for (int t = 0; t < tokens; ++t)
          total[t] = fma(to_floats(sum[t]), multiply(scale, all(x.scales[b * tokens + t])), total[t]);
        if (minimum) {
          const Floats low = load_numbers(w.minimums, w.minimum_type, index, w.super_minimums, super);
          UNROLL
          for (int t = 0; t < tokens; ++t)
            (apart ? lows : total)[t] = fma(
                low, all(x.sums[(2 * b + (halves ? half : 0)) * tokens + t]), (apart ? lows : total)[t]);
        }
        if (halves) index += ROWS;
        else if (--left == 0) index += ROWS, left = blocks_per_group;
      }
    }
    code += codes == NIBBLES ? 256 : 512;
    x_codes += tokens * BLOCK;
  }
  UNROLL
  for (int t = 0; t < tokens; ++t) result[t] = apart ? add(total[t], lows[t]) : total[t];
}

template <int codes, int shift> INLINE Floats value_of(const Weight& w, Bytes packed) {
  if (codes == NIBBLES) return nibble_value<shift>(w.values, packed);
  if (codes == BYTES) return byte_value<shift>(packed);
  if (codes == E4M3) return float_value<shift, 4, 0x87f00000u>(packed, 0x1p120f);
  return float_value<shift, 3, 0x8fe00000u>(packed, 0x1p112f);
}

template <int codes, int shift, int tokens>
INLINE void add_column(const Weight& w, Bytes packed, const float* x, Floats* part) {
  const Floats value = value_of<codes, shift>(w, packed);
  UNROLL
  for (int t = 0; t < tokens; ++t) part[t] = fma(value, all(x[t]), part[t]);
}

template <int codes, int tokens, bool minimum>
static void float_panel(const Weight& w, int64_t panel, const Tile& x, Floats* result) {
  const int64_t halves = w.columns / 16, groups = w.columns / w.group, each = w.group / 16;
  const uint8_t* code = w.codes + panel * w.columns / BLOCK * (codes == NIBBLES ? 256 : 512);
  Floats total[tokens];
  UNROLL
  for (int t = 0; t < tokens; ++t) total[t] = all(0.0f);
  int64_t index = panel * groups * ROWS, left = each;
  const float* column = x.values;
  for (int64_t h = 0; h < halves; ++h) {
    const int64_t super = (panel * (w.columns / SUPER) + h * 16 / SUPER) * ROWS;
    // With few tokens a chain of additions is what takes the time: vectors then have sums of their own.
    const int chains = tokens <= 2 ? 2 : 1;
    Floats parts[chains][tokens];
    UNROLL
    for (int c = 0; c < chains; ++c)
      UNROLL
      for (int t = 0; t < tokens; ++t) parts[c][t] = all(0.0f);
    UNROLL
    for (int v = 0; v < (codes == NIBBLES ? 2 : 4); ++v) {
      Floats* part = parts[v % chains];
      const Bytes packed = load_bytes(code);
      __builtin_prefetch(code + AHEAD);
      if (codes == NIBBLES) {
        add_column<codes, 0, tokens>(w, packed, column, part);
        add_column<codes, 8, tokens>(w, packed, column + 1 * tokens, part);
        add_column<codes, 16, tokens>(w, packed, column + 2 * tokens, part);
        add_column<codes, 24, tokens>(w, packed, column + 3 * tokens, part);
        add_column<codes, 4, tokens>(w, packed, column + 4 * tokens, part);
        add_column<codes, 12, tokens>(w, packed, column + 5 * tokens, part);
        add_column<codes, 20, tokens>(w, packed, column + 6 * tokens, part);
        add_column<codes, 28, tokens>(w, packed, column + 7 * tokens, part);
      } else {
        add_column<codes, 0, tokens>(w, packed, column, part);
        add_column<codes, 8, tokens>(w, packed, column + 1 * tokens, part);
        add_column<codes, 16, tokens>(w, packed, column + 2 * tokens, part);
        add_column<codes, 24, tokens>(w, packed, column + 3 * tokens, part);
      }
      code += 64;
      column += (codes == NIBBLES ? 8 : 4) * tokens;
    }
    const Floats scale = load_numbers(w.scales, w.scale_type, index, w.super_scales, super);
    UNROLL
    for (int t = 0; t < tokens; ++t) {
      const Floats part = chains == 2 ? add(parts[0][t], parts[chains - 1][t]) : parts[0][t];
      total[t] = fma(part, scale, total[t]);
    }
    if (minimum) {
      const Floats low = load_numbers(w.minimums, w.minimum_type, index, w.super_minimums, super);
      UNROLL
      for (int t = 0; t < tokens; ++t) total[t] = fma(low, all(x.sums[h * tokens + t]), total[t]);
    }
    if (--left == 0) index += ROWS, left = each;
  }
  UNROLL
  for (int t = 0; t < tokens; ++t) result[t] = total[t];
}

// [1, 2, 4 or 8 tokens]
#define INTEGER(codes, halves, minimum)                                                        \
  {integer_panel<codes, 1, halves, minimum>, integer_panel<codes, 2, halves, minimum>,         \
   integer_panel<codes, 4, halves, minimum>, integer_panel<codes, 8, halves, minimum>}
#define FLOATING(codes, minimum)                                                               \
  {float_panel<codes, 1, minimum>, float_panel<codes, 2, minimum>, float_panel<codes, 4, minimum>, \
   float_panel<codes, 8, minimum>}
static const PanelKernel INTEGER_KERNELS[2][2][2][4] = {  // [codes][halves][minimum]
    {{INTEGER(NIBBLES, false, false), INTEGER(NIBBLES, false, true)},
     {INTEGER(NIBBLES, true, false), INTEGER(NIBBLES, true, true)}},
    {{INTEGER(BYTES, false, false), INTEGER(BYTES, false, true)},
     {INTEGER(BYTES, true, false), INTEGER(BYTES, true, true)}}};
static const PanelKernel FLOAT_KERNELS[4][2][4] = {  // [codes][minimum]
    {FLOATING(NIBBLES, false), FLOATING(NIBBLES, true)},
    {FLOATING(BYTES, false), FLOATING(BYTES, true)},
    {FLOATING(E4M3, false), FLOATING(E4M3, false)},
    {FLOATING(E5M2, false), FLOATING(E5M2, false)}};
