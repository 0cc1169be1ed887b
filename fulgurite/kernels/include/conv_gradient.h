// The gradient of a convolution's weight, as outer products:
//
//   out[o,c,kh,kw] = sum over n, h, w of gradient[n,h,w,o] * x[n, h*SH - PH + kh*DH, w*SW - PW + kw*DW, c]
//
// The gradient is channels-last. Inputs are copied to a band of rows in cache, with padding. There, the inputs of
// a row of the filter are neighbours (a run), so a vector holds sixteen (kw, c). A tile of a few output channels
// by some vectors stays in registers over a block of pixels; blocks are summed in `total`, [kh][run][o][kw, c].

const int64_t GRADIENT_PIXELS = 128;  // of a block: its products are summed in float32 before the total

struct WeightGradient {
  Conv c;
  const float* gradient;
  int64_t num_runs, length, padded;  // runs of a row of the filter, their inputs, and the same in whole vectors
};

// total[m][v] += sum over pixels of gradient[pixel][m] * x[pixel][v]
template <int ROWS, int VECTORS>
static void add_products(const float* const* x, int64_t offset, const float* gradient, int64_t step, int64_t count,
                         float* total, int64_t total_row) {
  vec sum[ROWS][VECTORS] = {};
  for (int64_t p = 0; p < count; ++p, gradient += step) {
    const float* from = x[p] + offset;
    vec value[VECTORS];
    UNROLL
    for (int v = 0; v < VECTORS; ++v) value[v] = load(from + v * LANES);
    UNROLL
    for (int m = 0; m < ROWS; ++m) {
      const vec factor = broadcast(gradient[m]);
      UNROLL
      for (int v = 0; v < VECTORS; ++v) sum[m][v] += factor * value[v];
    }
  }
  UNROLL
  for (int m = 0; m < ROWS; ++m)
    UNROLL
    for (int v = 0; v < VECTORS; ++v) {
      float* to = total + m * total_row + v * LANES;
      store_vec(to, load(to) + sum[m][v]);
    }
}

// the products of a block of pixels for output channels [first, last) and some vectors of a run
template <int VECTORS, int ROWS>
static void add_block(const float* const* x, int64_t offset, const float* gradient, int64_t step, int64_t count,
                      int64_t first, int64_t last, float* total, int64_t total_row) {
  for (int64_t o = first; o < last;) {
    const int64_t left = last - o;
    float* to = total + o * total_row;
    if (left >= ROWS) add_products<ROWS, VECTORS>(x, offset, gradient + o, step, count, to, total_row), o += ROWS;
    else if (left >= 4) add_products<4, VECTORS>(x, offset, gradient + o, step, count, to, total_row), o += 4;
    else add_products<1, VECTORS>(x, offset, gradient + o, step, count, to, total_row), o += 1;
  }
}

static void add_any_block(int64_t vectors, const float* const* x, int64_t offset, const float* gradient, int64_t step,
                          int64_t count, int64_t first, int64_t last, float* total, int64_t total_row) {
  if (vectors == 4) add_block<4, 6>(x, offset, gradient, step, count, first, last, total, total_row);
  else if (vectors == 3) add_block<3, 8>(x, offset, gradient, step, count, first, last, total, total_row);
  else if (vectors == 2) add_block<2, 8>(x, offset, gradient, step, count, first, last, total, total_row);
  else add_block<1, 8>(x, offset, gradient, step, count, first, last, total, total_row);
}

// adds the products of a block of pixels, whose inputs are at x
static void add_pixels(const WeightGradient& g, const float* const* x, int64_t count, const float* gradient,
                       int64_t first, int64_t last, float* total) {
  const Conv& c = g.c;
  const int64_t columns = band_columns(c) * c.channels, vectors = g.padded / LANES, size = c.out_channels * g.padded;
  for (int64_t kh = 0; kh < c.kernel_h; ++kh)
    for (int64_t run = 0; run < g.num_runs; ++run, total += size) {
      const int64_t offset = kh * c.dilation_h * columns + run * c.dilation_w * c.channels;
      for (int64_t v = 0; v < vectors;) {
        const int64_t left = vectors - v, wide = left == 5 ? 3 : left < 4 ? left : 4;
        add_any_block(wide, x, offset + v * LANES, gradient, c.out_channels, count, first, last, total + v * LANES, g.padded);
        v += wide;
      }
    }
}

// output channels [first, last) of the gradient; returns 1 if there is no memory
static int weight_gradient_share(const WeightGradient& g, int64_t first, int64_t last) {
  const Conv& c = g.c;
  const int64_t extent = filter_height(c), band_row = band_columns(c) * c.channels, slack = 4 * LANES;
  int64_t at_once = (CONV_BAND_BYTES / (int64_t)sizeof(float) / band_row - extent) / c.stride_h + 1;
  if (at_once < 1) at_once = 1;
  if (at_once > c.out_height) at_once = c.out_height;
  const int64_t band_size = ((at_once - 1) * c.stride_h + extent) * band_row;
  const int64_t total_size = c.kernel_h * g.num_runs * c.out_channels * g.padded;
  float* copy = (float*)malloc((band_size + slack) * sizeof(float));
  // a filter of one tap and whole vectors is summed where it is stored
  const int in_place = c.kernel_h * c.kernel_w == 1 && g.length == g.padded;
  float* total = in_place ? c.out : (float*)malloc((total_size + LANES) * sizeof(float));
  if (!copy || !total) {
    free(copy);
    if (!in_place) free(total);
    return 1;
  }
  __builtin_memset(copy + band_size, 0, slack * sizeof(float));
  if (in_place) __builtin_memset(total + first * g.padded, 0, (last - first) * g.padded * sizeof(float));
  else __builtin_memset(total, 0, total_size * sizeof(float));
  const float* x[GRADIENT_PIXELS];
  for (int64_t n = 0; n < c.batch; ++n)
    for (int64_t h = 0; h < c.out_height; h += at_once) {
      const int64_t rows = c.out_height - h < at_once ? c.out_height - h : at_once, pixels = rows * c.out_width;
      copy_band(c, n, h * c.stride_h - c.pad_h, (rows - 1) * c.stride_h + extent, copy);
      const float* gradient = g.gradient + ((n * c.out_height + h) * c.out_width) * c.out_channels;
      int64_t row = 0, column = 0;
      for (int64_t p = 0; p < pixels; p += GRADIENT_PIXELS) {
        const int64_t count = pixels - p < GRADIENT_PIXELS ? pixels - p : GRADIENT_PIXELS;
        for (int64_t k = 0; k < count; ++k) {
          x[k] = copy + row * c.stride_h * band_row + column * c.stride_w * c.channels;
          if (++column == c.out_width) column = 0, ++row;
        }
        add_pixels(g, x, count, gradient + p * c.out_channels, first, last, total);
      }
    }
  if (in_place) {
    free(copy);
    return 0;
  }
  const int64_t taps = c.kernel_h * c.kernel_w, size = c.out_channels * g.padded;
  for (int64_t o = first; o < last; ++o)
    for (int64_t kh = 0; kh < c.kernel_h; ++kh)
      for (int64_t kw = 0; kw < c.kernel_w; ++kw) {
        const int64_t run = g.num_runs == 1 ? 0 : kw, start = g.num_runs == 1 ? kw * c.channels : 0;
        const float* from = total + (kh * g.num_runs + run) * size + o * g.padded + start;
        float* to = c.out + o * c.channels * taps + kh * c.kernel_w + kw;
        for (int64_t i = 0; i < c.channels; ++i) to[i * taps] = from[i];
      }
  free(copy);
  free(total);
  return 0;
}

static int64_t run_weight_gradient(const Conv& c, const float* gradient) {
  const int64_t taps = c.kernel_h * c.kernel_w, is_contiguous = c.dilation_w == 1;
  const int64_t length = is_contiguous ? c.kernel_w * c.channels : c.channels;
  const WeightGradient g = {c, gradient, is_contiguous ? 1 : c.kernel_w, length, (length + LANES - 1) / LANES * LANES};
  const int64_t pixels = c.batch * c.out_height * c.out_width;
  if (pixels == 0) __builtin_memset(c.out, 0, c.out_channels * c.channels * taps * sizeof(float));
  if (pixels == 0 || c.out_channels == 0 || c.channels == 0) return 0;
  int threads = choose_num_threads(pixels * c.out_channels * c.channels * taps, CONV_MIN_PARALLEL_WORK, (int)c.threads);
  if (threads > c.out_channels) threads = (int)c.out_channels;
  int failed = 0;
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1) reduction(| : failed)
  for (int t = 0; t < threads; ++t)
    failed |= weight_gradient_share(g, c.out_channels * t / threads, c.out_channels * (t + 1) / threads);
  return failed;
}

// a: as for `conv`, without groups, where the second address is that of the gradient. The output is contiguous.
EXPORT int64_t conv_weight_gradient(const int64_t* a) {
  const Conv c = read_conv(a);
  return run_weight_gradient(c, c.weight);
}

// ---- depthwise ---------------------------------------------------------------------------------------


// sum[kw] += gradient[w] * x[w * stride + kw], of sixteen channels
template <int WIDTH>
INLINE void add_depthwise_row(const float* x, int64_t x_step, int64_t x_tap, const float* gradient, int64_t step,
                              int64_t count, vec* total) {
  vec sum[WIDTH] = {};
  for (int64_t w = 0; w < count; ++w) {
    const vec value = load(gradient + w * step);
    UNROLL
    for (int k = 0; k < WIDTH; ++k) sum[k] += value * load(x + w * x_step + k * x_tap);
  }
  UNROLL
  for (int k = 0; k < WIDTH; ++k) total[k] += sum[k];
}

// channels of vectors [first, last): the gradient of [c, kh, kw]
static int depthwise_gradient_share(const Conv& c, const float* gradient, int64_t first, int64_t last) {
  const int64_t extent = filter_height(c), band_row = band_columns(c) * c.channels, taps = c.kernel_h * c.kernel_w;
  int64_t at_once = (CONV_BAND_BYTES / (int64_t)sizeof(float) / band_row - extent) / c.stride_h + 1;
  if (at_once < 1) at_once = 1;
  if (at_once > c.out_height) at_once = c.out_height;
  float* copy = (float*)malloc((((at_once - 1) * c.stride_h + extent) * band_row + LANES) * sizeof(float));
  float* total = (float*)malloc((last - first) * taps * LANES * sizeof(float));
  if (!copy || !total) {
    free(copy);
    free(total);
    return 1;
  }
  __builtin_memset(total, 0, (last - first) * taps * LANES * sizeof(float));
  for (int64_t n = 0; n < c.batch; ++n)
    for (int64_t start = 0; start < c.out_height; start += at_once) {
      const int64_t rows = c.out_height - start < at_once ? c.out_height - start : at_once;
      copy_band(c, n, start * c.stride_h - c.pad_h, (rows - 1) * c.stride_h + extent, copy);
      for (int64_t vector = first; vector < last; ++vector) {
        const int64_t end = c.channels - LANES, channel = vector * LANES < end ? vector * LANES : end;
        for (int64_t kh = 0; kh < c.kernel_h; ++kh) {
          float* to = total + ((vector - first) * taps + kh * c.kernel_w) * LANES;
          for (int64_t kw = 0; kw < c.kernel_w;) {
            const int64_t left = c.kernel_w - kw, wide = left >= 4 ? 4 : left;
            vec sum[4] = {};
            for (int64_t r = 0; r < rows; ++r) {
              const float* x = copy + (r * c.stride_h + kh * c.dilation_h) * band_row + kw * c.dilation_w * c.channels + channel;
              const float* from = gradient + ((n * c.out_height + start + r) * c.out_width) * c.channels + channel;
              const int64_t step = c.stride_w * c.channels, tap = c.dilation_w * c.channels;
              if (wide == 4) add_depthwise_row<4>(x, step, tap, from, c.channels, c.out_width, sum);
              else if (wide == 3) add_depthwise_row<3>(x, step, tap, from, c.channels, c.out_width, sum);
              else if (wide == 2) add_depthwise_row<2>(x, step, tap, from, c.channels, c.out_width, sum);
              else add_depthwise_row<1>(x, step, tap, from, c.channels, c.out_width, sum);
            }
            for (int64_t k = 0; k < wide; ++k) store_vec(to + (kw + k) * LANES, load(to + (kw + k) * LANES) + sum[k]);
            kw += wide;
          }
        }
      }
    }
  for (int64_t vector = first; vector < last; ++vector) {
    const int64_t end = c.channels - LANES, channel = vector * LANES < end ? vector * LANES : end;
    for (int64_t l = vector * LANES - channel; l < LANES; ++l)  // the vector before has the others
      for (int64_t k = 0; k < taps; ++k)
        c.out[(channel + l) * taps + k] = total[((vector - first) * taps + k) * LANES + l];
  }
  free(copy);
  free(total);
  return 0;
}

// a: as for `conv_weight_gradient`, with one filter a channel and at least sixteen channels
EXPORT int64_t depthwise_weight_gradient(const int64_t* a) {
  const Conv c = read_conv(a);
  const int64_t pixels = c.batch * c.out_height * c.out_width, vectors = (c.channels + LANES - 1) / LANES;
  if (pixels == 0) __builtin_memset(c.out, 0, c.channels * c.kernel_h * c.kernel_w * sizeof(float));
  if (pixels == 0) return 0;
  int threads = choose_num_threads(pixels * c.channels * c.kernel_h * c.kernel_w, DEPTHWISE_MIN_PARALLEL_WORK, (int)c.threads);
  if (threads > vectors) threads = (int)vectors;
  int failed = 0;
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1) reduction(| : failed)
  for (int t = 0; t < threads; ++t)
    failed |= depthwise_gradient_share(c, c.weight, vectors * t / threads, vectors * (t + 1) / threads);
  return failed;
}
