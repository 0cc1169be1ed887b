// Packing the weight of a convolution into panels, as `packing.pack_weight` and `packing.pack_transposed` do, and
// convolutions whose weights change with each call, as in training: pack, then multiply.

struct Packing {
  const float* weight;
  int64_t rows, channels, groups;  // output and input channels of a group
  int64_t kernel_h, kernel_w, by_o, by_c, by_h, by_w, by_group;
  int64_t step_h, step_w;          // of the phases of a transposed convolution; 0: there are none
  int64_t vectors;                 // of a panel
};

INLINE Packing read_packing(const float* weight, const int64_t* a) {
  return Packing{weight, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12]};
}

INLINE int64_t padded_rows(const Packing& p) { return (p.rows + LANES - 1) / LANES * LANES; }

// Where a tap of the filter goes. Without phases that is its own place, else that in its phase, rotated.
struct TapPlace {
  int64_t before;  // taps of the phases before
  int64_t taps;    // of its phase
  int64_t index;   // in its phase
};

INLINE int64_t phase_taps(int64_t phase, int64_t kernel, int64_t step) {
  return phase < kernel ? (kernel - phase + step - 1) / step : 0;
}

static TapPlace place_tap(const Packing& p, int64_t kh, int64_t kw) {
  if (!p.step_h) return TapPlace{0, p.kernel_h * p.kernel_w, kh * p.kernel_w + kw};
  const int64_t phase_h = kh % p.step_h, phase_w = kw % p.step_w;
  const int64_t height = phase_taps(phase_h, p.kernel_h, p.step_h), width = phase_taps(phase_w, p.kernel_w, p.step_w);
  int64_t before = 0;
  for (int64_t h = 0; h < phase_h; ++h) before += phase_taps(h, p.kernel_h, p.step_h) * p.kernel_w;
  for (int64_t w = 0; w < phase_w; ++w) before += height * phase_taps(w, p.kernel_w, p.step_w);
  return TapPlace{before, height * width, (height - 1 - kh / p.step_h) * width + width - 1 - kw / p.step_w};
}

// copies `count` neighbours of each of sixteen rows: element j of row l goes to lane l of to[j]
INLINE void transpose_block(const float* from, int64_t row, float* const* to, int64_t count) {
  vec block[LANES];
  UNROLL
  for (int l = 0; l < LANES; ++l) block[l] = load(from + l * row);
  transpose_16x16(block);
  for (int64_t j = 0; j < count; ++j) store_vec(to[j], block[j]);
}

// packs sixteen output channels of a group, from `first` on; `taps` is room for the places of the taps
static void pack_vector(const Packing& p, int64_t group, int64_t first, float* packed, float** taps) {
  const int64_t width = p.vectors * LANES, panel = first / width * width, padded = padded_rows(p);
  const int64_t wide = padded - panel < width ? padded - panel : width;
  const int64_t num_taps = p.kernel_h * p.kernel_w, lanes = p.rows - first < LANES ? p.rows - first : LANES;
  for (int64_t kh = 0; kh < p.kernel_h; ++kh)
    for (int64_t kw = 0; kw < p.kernel_w; ++kw) {
      const TapPlace place = place_tap(p, kh, kw);
      const int64_t columns = p.groups * padded * place.before + (group * padded + panel) * place.taps;
      taps[kh * p.kernel_w + kw] = packed + columns * p.channels + place.index * p.channels * wide + first - panel;
    }
  const float* from = p.weight + group * p.by_group + first * p.by_o;
  const int64_t size = (p.groups - 1) * p.by_group + (p.rows - 1) * p.by_o + (p.channels - 1) * p.by_c + num_taps;
  const float* end = p.weight + size;
  const int is_dense = (p.by_w == 1 || p.kernel_w == 1) && (p.by_h == p.kernel_w || p.kernel_h == 1);
  const int is_block = lanes == LANES && p.by_o != 1 && is_dense;
  for (int64_t c = 0; c < p.channels; ++c) {
    const float* x = from + c * p.by_c;
    int64_t tap = 0;
    if (is_block && num_taps > 1)  // a block of taps by output channels
      for (; tap < num_taps && x + 15 * p.by_o + tap + LANES <= end; tap += LANES) {
        float* to[LANES];
        const int64_t count = num_taps - tap < LANES ? num_taps - tap : LANES;
        for (int64_t j = 0; j < count; ++j) to[j] = taps[tap + j] + c * wide;
        transpose_block(x + tap, p.by_o, to, count);
      }
    if (is_block && num_taps == 1 && p.by_c == 1 && c + LANES <= p.channels) {  // of input by output channels
      float* to[LANES];
      for (int64_t j = 0; j < LANES; ++j) to[j] = taps[0] + (c + j) * wide;
      transpose_block(x, p.by_o, to, LANES);
      c += LANES - 1;
      continue;
    }
    for (; tap < num_taps; ++tap) {
      const float* value = x + tap / p.kernel_w * p.by_h + tap % p.kernel_w * p.by_w;
      float* to = taps[tap] + c * wide;
      if (lanes == LANES && p.by_o == 1) store_vec(to, load(value));
      else
        for (int64_t l = 0; l < LANES; ++l) to[l] = l < lanes ? value[l * p.by_o] : 0.0f;
    }
  }
}

// returns 1 if there is no memory
static int64_t pack_panels(const Packing& p, float* packed, int threads) {
  const int64_t vectors = padded_rows(p) / LANES, taps = p.kernel_h * p.kernel_w;
  float** places = (float**)malloc(threads * taps * sizeof(float*) + 1);
  if (!places) return 1;
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
  for (int t = 0; t < threads; ++t)
    for (int64_t k = p.groups * vectors * t / threads; k < p.groups * vectors * (t + 1) / threads; ++k)
      pack_vector(p, k / vectors, k % vectors * LANES, packed, places + t * taps);
  free(places);
  return 0;
}

// a: weight, out, output channels and input channels of a group, groups, filter height and width, strides of the
// output channel, input channel, row and column, of a group, then of phases: rows and columns, and vectors of a panel
EXPORT int64_t pack_conv_weight(const int64_t* a) {
  return pack_panels(read_packing((const float*)a[0], a + 2), (float*)a[1], 1);
}

// ---- convolutions that pack their weight ----------------------------------------------------------------

const int CONV_ARGUMENTS = 31;

// runs a convolution with a packed weight and bias in place of those of `a`
INLINE int64_t run_packed(const int64_t* a, const float* packed, const float* bias, int64_t (*run)(const int64_t*)) {
  int64_t arguments[CONV_ARGUMENTS];
  __builtin_memcpy(arguments, a, sizeof arguments);
  arguments[1] = (int64_t)packed;
  arguments[2] = (int64_t)bias;
  return run(arguments);
}

static int64_t pack_and_run(const int64_t* a, int64_t (*run)(const int64_t*)) {
  const Packing p = read_packing((const float*)a[1], a + CONV_ARGUMENTS);
  const int64_t padded = padded_rows(p), size = p.groups * padded * p.channels * p.kernel_h * p.kernel_w;
  const float* given = (const float*)a[2];
  float* packed = (float*)malloc((size + p.groups * padded) * sizeof(float) + 64);
  if (!packed) return 1;
  float* bias = packed + size;
  if (given)
    for (int64_t g = 0; g < p.groups; ++g) {
      __builtin_memcpy(bias + g * padded, given + g * p.rows, p.rows * sizeof(float));
      __builtin_memset(bias + g * padded + p.rows, 0, (padded - p.rows) * sizeof(float));
    }
  const int threads = choose_num_threads(size * LANES, CONV_MIN_PARALLEL_WORK, (int)a[30]);
  int64_t failed = pack_panels(p, packed, threads);
  if (!failed) failed = run_packed(a, packed, given ? bias : nullptr, run);
  free(packed);
  return failed;
}

// a: as for `conv`, but weight and bias are not packed; then the numbers of the packing
EXPORT int64_t dense_conv(const int64_t* a) { return pack_and_run(a, conv); }

// a: as for `conv_transpose`, in the same way
EXPORT int64_t dense_conv_transpose(const int64_t* a) { return pack_and_run(a, conv_transpose); }

// a: as for `depthwise_conv`, in the same way; with phases the filter is rotated
EXPORT int64_t dense_depthwise_conv(const int64_t* a) {
  const Packing p = read_packing((const float*)a[1], a + CONV_ARGUMENTS);
  const int64_t taps = p.kernel_h * p.kernel_w, vectors = (p.groups + LANES - 1) / LANES;
  float* packed = (float*)malloc(vectors * taps * LANES * sizeof(float) + 64);
  if (!packed) return 1;
  for (int64_t v = 0; v < vectors; ++v) {
    const int64_t last = p.groups - LANES, channel = v * LANES < last ? v * LANES : last;
    for (int64_t k = 0; k < taps; ++k) {
      const int64_t tap = p.step_h ? taps - 1 - k : k;
      const float* from = p.weight + channel * p.by_group + tap / p.kernel_w * p.by_h + tap % p.kernel_w * p.by_w;
      float* to = packed + (v * taps + k) * LANES;
      for (int64_t l = 0; l < LANES; ++l) to[l] = from[l * p.by_group];
    }
  }
  const int64_t failed = run_packed(a, packed, (const float*)a[2], depthwise_conv);
  free(packed);
  return failed;
}
