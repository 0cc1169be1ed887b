// Convolutions of float32 tensors with a packed weight, as an implicit GEMM:
//
//   out[n,h,w,o] = activation(bias[o] + residual[n,h,w,o] + scale[o] * sum)
//   sum = sum_{kh,kw,c} x[n, h*SH - PH + kh*DH, w*SW - PW + kw*DW, c] * weight[o,c,kh,kw]
//
// The output is channels-last. A row of the GEMM is an output pixel, a column an output channel. The
// weight is packed into panels of up to four vectors of channels: [panel][kh][kw][c][channels]. A tile of
// a few pixels by one panel stays in registers; inputs are broadcast. Inputs with padding, or not
// channels-last, are first copied to a band of rows in cache, so that the main loop has no bounds checks.
extern "C" void* malloc(unsigned long);
extern "C" void free(void*);
#define UNROLL_ALL _Pragma("GCC unroll 32")

// Products are summed in float32 in groups of this many, and then the groups: one long sum would round more.
const int64_t SUM_LENGTH = 64;
const int64_t PANEL_BYTES = 256 << 10;  // of a panel that stays in L2 while a band of pixels is walked

struct Conv {
  const float *x, *weight, *residual;
  float* out;                                   // channels are neighbours
  int64_t batch, channels, height, width;       // of the input
  int64_t x_n, x_c, x_h, x_w;                   // its strides
  int64_t out_channels, out_height, out_width;
  int64_t kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
  int64_t groups, threads;
  Epilogue epilogue;
  int64_t out_n, out_h, out_w;                  // strides of the output, and of the residual
};

INLINE Conv read_conv(const int64_t* a) {
  Conv c = {(const float*)a[0], (const float*)a[1], (const float*)a[3], (float*)a[4],
            a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15],
            a[16], a[17], a[18], a[19], a[20], a[21], a[22], a[23], a[24], a[30], {}};
  const float low = __builtin_bit_cast(float, (int32_t)a[26]), high = __builtin_bit_cast(float, (int32_t)a[27]);
  const float* bias = (const float*)a[2];
  c.epilogue = Epilogue{bias, a[29] ? bias + a[29] : nullptr, a[25], low, high};
  c.out_w = c.out_channels;
  c.out_h = c.out_width * c.out_w;
  c.out_n = c.out_height * c.out_h;
  return c;
}

// x[m,k] @ weight + bias as a convolution of one column of m pixels; the weight is packed, the output contiguous
INLINE Conv gemm_as_conv(const float* x, int64_t x_row, int64_t x_column, const float* weight, const float* bias,
                         float* out, int64_t rows, int64_t depth, int64_t columns, int64_t threads) {
  Conv c = {};
  c.x = x, c.weight = weight, c.out = out;
  c.batch = c.width = c.out_width = 1;
  c.channels = depth, c.x_c = x_column, c.x_h = x_row;
  c.height = c.out_height = rows;
  c.out_channels = c.out_n = c.out_h = c.out_w = columns;
  c.kernel_h = c.kernel_w = c.stride_h = c.stride_w = c.dilation_h = c.dilation_w = c.groups = 1;
  c.threads = threads;
  c.epilogue = Epilogue{bias, nullptr, NO_ACTIVATION, 0.0f, 0.0f};
  return c;
}

// Rows of the input in the layout [row][column][channel], with padding.
struct Band {
  const float* values;
  int64_t row, column;  // strides
};

// ---- the tile in registers ----------------------------------------------------------------------

// One contiguous run of the reduction: `length` inputs of each pixel, from `offset` on.
struct Run { int64_t offset, length, weight_row; };

// adds the products of at most `SUM_LENGTH` inputs from `first` on to the sums
template <int ROWS, int VECTORS>
INLINE void multiply_run(const float* const* x, const Run& run, int64_t first, int64_t length, const float* panel,
                         vec (*sum)[VECTORS]) {
  const float* w = panel + (run.weight_row + first) * VECTORS * LANES;
  const float* rows[ROWS];
  UNROLL
  for (int m = 0; m < ROWS; ++m) rows[m] = x[m] + run.offset + first;
  for (int64_t k = 0; k < length; ++k, w += VECTORS * LANES) {
    vec column[VECTORS];
    UNROLL
    for (int v = 0; v < VECTORS; ++v) column[v] = load(w + v * LANES);
    UNROLL
    for (int m = 0; m < ROWS; ++m) {
      const vec value = broadcast(rows[m][k]);
      UNROLL
      for (int v = 0; v < VECTORS; ++v) sum[m][v] += value * column[v];
    }
  }
}

// Where a tile's results go: rows of `columns` values.
struct Tile {
  float* const* out;
  const float* const* residual;  // null: none
  int64_t columns;
  float* total;                  // of earlier sums, [row][vector]
  int is_first, is_last;
};

// moves the sums to the totals
template <int ROWS, int VECTORS> INLINE void add_to_total(vec (*sum)[VECTORS], float* total, int has_total) {
  UNROLL
  for (int m = 0; m < ROWS; ++m)
    UNROLL
    for (int v = 0; v < VECTORS; ++v) {
      float* to = total + (m * VECTORS + v) * LANES;
      store_vec(to, has_total ? load(to) + sum[m][v] : sum[m][v]);
      sum[m][v] = vec{};
    }
}

// adds the residual and applies the activation to rows of `width` values, and stores them
__attribute__((noinline)) static void finish_tile(float* rows, int count, int width, const Tile& tile, const Epilogue& e) {
  if (tile.residual)
    for (int m = 0; m < count; ++m)
      for (int64_t k = 0; k < tile.columns; ++k) rows[m * width + k] += tile.residual[m][k];
  activate(rows, count * width, e);
  for (int m = 0; m < count; ++m)
    __builtin_memcpy(tile.out[m], rows + m * width, tile.columns * sizeof(float));
}

template <int ROWS, int VECTORS>
static void multiply_tile(const float* const* x, const Run* runs, int64_t count, const float* panel,
                          const Tile& tile, const Epilogue& epilogue) {
  vec sum[ROWS][VECTORS] = {};
  const int width = VECTORS * LANES;
  int64_t summed = 0;
  int has_total = !tile.is_first;
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t k = 0; k < runs[r].length;) {
      int64_t length = runs[r].length - k;
      if (length > SUM_LENGTH - summed) length = SUM_LENGTH - summed;
      multiply_run<ROWS, VECTORS>(x, runs[r], k, length, panel, sum);
      k += length;
      summed += length;
      if (summed == SUM_LENGTH) {
        add_to_total<ROWS, VECTORS>(sum, tile.total, has_total);
        has_total = 1;
        summed = 0;
      }
    }
  }
  if (!tile.is_last) {
    add_to_total<ROWS, VECTORS>(sum, tile.total, has_total);
    return;
  }
  if (has_total)
    UNROLL
    for (int m = 0; m < ROWS; ++m)
      UNROLL
      for (int v = 0; v < VECTORS; ++v) sum[m][v] += load(tile.total + m * width + v * LANES);
  const int is_plain = tile.columns == width && epilogue.activation <= RELU;
  if (epilogue.scale) {
    UNROLL
    for (int v = 0; v < VECTORS; ++v) {
      const vec scale = load(epilogue.scale + v * LANES);
      UNROLL
      for (int m = 0; m < ROWS; ++m) sum[m][v] *= scale;
    }
  }
  if (epilogue.bias) {
    UNROLL
    for (int v = 0; v < VECTORS; ++v) {
      const vec bias = load(epilogue.bias + v * LANES);
      UNROLL
      for (int m = 0; m < ROWS; ++m) sum[m][v] += bias;
    }
  }
  if (is_plain) {
    UNROLL
    for (int m = 0; m < ROWS; ++m)
      UNROLL
      for (int v = 0; v < VECTORS; ++v) {
        vec y = sum[m][v];
        if (tile.residual) y += load(tile.residual[m] + v * LANES);
        if (epilogue.activation == RELU) y = blend(y < 0.0f, vec{}, y);
        store_vec(tile.out[m] + v * LANES, y);
      }
    return;
  }
  float buffer[ROWS][VECTORS * LANES];
  UNROLL
  for (int m = 0; m < ROWS; ++m)
    UNROLL
    for (int v = 0; v < VECTORS; ++v) store_vec(buffer[m] + v * LANES, sum[m][v]);
  finish_tile(buffer[0], ROWS, width, tile, epilogue);
}

// ---- a panel of output channels by many pixels ----------------------------------------------------

const int MAX_RUNS = 256;   // of one part of the reduction
const int MAX_TILE_ROWS = 8;
const int64_t MIN_WALK = 48;  // pixels at least for which a panel is read once

struct Pixels {
  int64_t count;                     // output pixels, in order
  int64_t per_row, x_row, x_column;  // pixels of a row, and the input's strides from row to row and pixel to pixel
  const float* x;
  float* out;
  const float* residual;             // null, or in the layout of `out`
  int64_t out_row, out_column;       // strides
};

template <int VECTORS, int ROWS>
static void multiply_panel(const Pixels& p, const Run* runs, int64_t num_runs, const float* panel,
                           int64_t columns, float* total, int is_first, int is_last, const Epilogue& epilogue) {
  const float* x[MAX_TILE_ROWS];
  float* out[MAX_TILE_ROWS];
  const float* residual[MAX_TILE_ROWS];
  int64_t row = 0, column = 0;
  for (int64_t first = 0; first < p.count;) {
    const int64_t left = p.count - first;
    const int rows = left >= ROWS ? ROWS : left >= 4 && ROWS > 4 ? 4 : left >= 2 ? 2 : 1;
    for (int m = 0; m < rows; ++m) {
      x[m] = p.x + row * p.x_row + column * p.x_column;
      const int64_t to = row * p.out_row + column * p.out_column;
      out[m] = p.out + to;
      residual[m] = p.residual + to;
      if (++column == p.per_row) column = 0, ++row;
    }
    const Tile tile = {out, p.residual ? residual : nullptr, columns, total + first * VECTORS * LANES, is_first, is_last};
    if (rows == ROWS) multiply_tile<ROWS, VECTORS>(x, runs, num_runs, panel, tile, epilogue);
    else if (rows == 4) multiply_tile<4, VECTORS>(x, runs, num_runs, panel, tile, epilogue);
    else if (rows == 2) multiply_tile<2, VECTORS>(x, runs, num_runs, panel, tile, epilogue);
    else multiply_tile<1, VECTORS>(x, runs, num_runs, panel, tile, epilogue);
    first += rows;
  }
}

static void multiply_any_panel(int vectors, const Pixels& p, const Run* runs, int64_t num_runs, const float* panel,
                               int64_t columns, float* total, int is_first, int is_last, const Epilogue& e) {
  if (vectors == 4) multiply_panel<4, 6>(p, runs, num_runs, panel, columns, total, is_first, is_last, e);
  else if (vectors == 3) multiply_panel<3, 8>(p, runs, num_runs, panel, columns, total, is_first, is_last, e);
  else if (vectors == 2) multiply_panel<2, 8>(p, runs, num_runs, panel, columns, total, is_first, is_last, e);
  else multiply_panel<1, 8>(p, runs, num_runs, panel, columns, total, is_first, is_last, e);
}

// The next runs of the reduction whose weights fit in a part of the cache. A run is a row of the kernel
// where its inputs are neighbours in memory, else one tap.
static int64_t next_runs(const Conv& c, const Band& band, int vectors, int64_t* done, Run* runs) {
  const int64_t channels = c.channels / c.groups;
  const int contiguous = c.dilation_w == 1 && band.column == channels;
  const int64_t length = contiguous ? c.kernel_w * channels : channels;
  const int64_t total = c.kernel_h * c.kernel_w * channels;
  int64_t limit = PANEL_BYTES / (vectors * LANES * sizeof(float)), count = 0;
  while (*done < total && count < MAX_RUNS && limit > 0) {
    const int64_t tap = *done / length, start = *done % length;
    const int64_t kh = contiguous ? tap : tap / c.kernel_w, kw = contiguous ? 0 : tap % c.kernel_w;
    int64_t size = length - start;
    if (size > limit) size = limit;
    runs[count++] = Run{kh * c.dilation_h * band.row + kw * c.dilation_w * band.column + start, size, *done};
    *done += size;
    limit -= size;
  }
  return count;
}

// ---- rows of the input, copied where the main loop can't read them in place -------------------------

INLINE int64_t filter_height(const Conv& c) { return (c.kernel_h - 1) * c.dilation_h + 1; }
// columns of the input that a row of outputs reads, from -pad_w on
INLINE int64_t band_columns(const Conv& c) { return (c.out_width - 1) * c.stride_w + (c.kernel_w - 1) * c.dilation_w + 1; }

INLINE int needs_band(const Conv& c) {
  const int64_t last_row = (c.out_height - 1) * c.stride_h + filter_height(c) - c.pad_h;
  return c.pad_h > 0 || c.pad_w > 0 || last_row > c.height || band_columns(c) - c.pad_w > c.width || c.x_c != 1;
}

// input rows [first, first + rows) of image n, which may lie outside, as [row][column][channel]
static void copy_band(const Conv& c, int64_t n, int64_t first, int64_t rows, float* to) {
  const int64_t columns = band_columns(c), channels = c.channels;
  const int64_t left = c.pad_w > 0 ? (c.pad_w < columns ? c.pad_w : columns) : 0, start = left - c.pad_w;
  int64_t inner = c.width - start < columns - left ? c.width - start : columns - left;
  if (inner < 0) inner = 0;
  for (int64_t r = 0; r < rows; ++r, to += columns * channels) {
    const int64_t h = first + r;
    if (h < 0 || h >= c.height) {
      __builtin_memset(to, 0, columns * channels * sizeof(float));
      continue;
    }
    const float* from = c.x + n * c.x_n + h * c.x_h + start * c.x_w;
    float* inside = to + left * channels;
    __builtin_memset(to, 0, left * channels * sizeof(float));
    __builtin_memset(inside + inner * channels, 0, (columns - left - inner) * channels * sizeof(float));
    if (c.x_c == 1 && c.x_w == channels) {
      __builtin_memcpy(inside, from, inner * channels * sizeof(float));
    } else if (c.x_c == 1) {
      for (int64_t w = 0; w < inner; ++w)
        __builtin_memcpy(inside + w * channels, from + w * c.x_w, channels * sizeof(float));
    } else {
      for (int64_t w = 0; w < inner; w += LANES)  // blocks of columns: both sides stay in L1
        for (int64_t k = 0; k < channels; ++k) {
          const int64_t end = w + LANES < inner ? w + LANES : inner;
          for (int64_t i = w; i < end; ++i) inside[i * channels + k] = from[i * c.x_w + k * c.x_c];
        }
    }
  }
}

// ---- one thread's share: output rows [from, to) of all images, panels [first, last) of each group ----

INLINE int64_t panel_start(int64_t columns, int64_t vectors, int64_t panel) {
  const int64_t start = panel * vectors * LANES;
  return start < columns ? start : columns;
}

static int conv_share(const Conv& c, int64_t from, int64_t to, int64_t first_panel, int64_t last_panel,
                      int64_t vectors) {
  const int64_t columns = c.out_channels / c.groups, channels = c.channels / c.groups;
  const int64_t depth = c.kernel_h * c.kernel_w * channels;
  const int64_t padded = (columns + LANES - 1) / LANES * LANES;
  const int64_t extent = filter_height(c), band_row = band_columns(c) * c.channels;
  const int copies = needs_band(c);
  // The input of the pixels that a panel walks over stays in L2, too.
  const int64_t input_row = c.stride_h * c.width * channels, least = (MIN_WALK + c.out_width - 1) / c.out_width;
  int64_t rows_at_once = copies ? (CONV_BAND_BYTES / (int64_t)sizeof(float) / band_row - extent) / c.stride_h + 1
                                : CONV_BAND_BYTES / (int64_t)sizeof(float) / input_row;
  if (!copies && rows_at_once < least) rows_at_once = least;
  if (rows_at_once < 1) rows_at_once = 1;
  if (rows_at_once > to - from) rows_at_once = to - from;
  if (rows_at_once > c.out_height) rows_at_once = c.out_height;
  const int64_t input_rows = (rows_at_once - 1) * c.stride_h + extent;
  float* copy = copies ? (float*)malloc(input_rows * band_row * sizeof(float) + 64) : nullptr;
  float* total = (float*)malloc(rows_at_once * c.out_width * vectors * LANES * sizeof(float) + 64);
  if ((copies && !copy) || !total) {
    free(copy);
    free(total);
    return 1;
  }
  Run runs[MAX_RUNS];
  for (int64_t row = from; row < to;) {
    const int64_t n = row / c.out_height, h = row % c.out_height;
    int64_t rows = rows_at_once;
    if (rows > to - row) rows = to - row;
    if (rows > c.out_height - h) rows = c.out_height - h;
    Band band = {c.x + n * c.x_n + (h * c.stride_h - c.pad_h) * c.x_h - c.pad_w * c.x_w, c.x_h, c.x_w};
    if (copies) {
      copy_band(c, n, h * c.stride_h - c.pad_h, (rows - 1) * c.stride_h + extent, copy);
      band = Band{copy, band_row, c.channels};
    }
    for (int64_t g = 0; g < c.groups; ++g) {
      for (int64_t panel = first_panel; panel < last_panel; ++panel) {
        const int64_t start = panel_start(columns, vectors, panel), end = panel_start(columns, vectors, panel + 1);
        const int wide = (int)((end - start + LANES - 1) / LANES);
        const float* weight = c.weight + (g * padded + start) * depth;
        float* out = c.out + n * c.out_n + h * c.out_h + g * columns + start;
        const float* residual = c.residual ? c.residual + (out - c.out) : nullptr;
        const Pixels pixels = {rows * c.out_width, c.out_width, c.stride_h * band.row, c.stride_w * band.column,
                               band.values + g * channels, out, residual, c.out_h, c.out_w};
        Epilogue epilogue = c.epilogue;
        if (epilogue.bias) epilogue.bias += g * padded + start;
        if (epilogue.scale) epilogue.scale += g * padded + start;
        int64_t done = 0;
        do {
          const int is_first = done == 0;
          const int64_t count = next_runs(c, band, wide, &done, runs);
          multiply_any_panel(wide, pixels, runs, count, weight, end - start, total, is_first, done == depth, epilogue);
        } while (done < depth);
      }
    }
    row += rows;
  }
  free(copy);
  free(total);
  return 0;
}

static int64_t run_conv(const Conv& c, int64_t vectors) {
  const int64_t rows = c.batch * c.out_height, columns = c.out_channels / c.groups;
  if (rows == 0 || c.out_width == 0 || columns == 0) return 0;
  const int64_t panels = (columns + vectors * LANES - 1) / (vectors * LANES);
  const int64_t depth = c.kernel_h * c.kernel_w * c.channels / c.groups;
  const int64_t work = rows * c.out_width * c.out_channels * depth;
  const int threads = choose_num_threads(work, CONV_MIN_PARALLEL_WORK, (int)c.threads);
  // Threads share the rows, or the panels where the weight is the larger operand.
  const int64_t weight_size = columns * depth, x_size = c.batch * c.channels * c.height * c.width;
  const int by_panel = rows < threads || (panels >= threads && weight_size > x_size);
  const int64_t items = by_panel ? panels : rows;
  int failed = 0;
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1) reduction(| : failed)
  for (int t = 0; t < threads; ++t) {
    const int64_t first = items * t / threads, last = items * (t + 1) / threads;
    if (first < last)
      failed |= by_panel ? conv_share(c, 0, rows, first, last, vectors)
                         : conv_share(c, first, last, 0, panels, vectors);
  }
  return failed;
}

// a: x, weight, bias, residual, out, then the numbers in the order of `Conv`, activation, the bits of its
// two parameters, vectors of a panel, where scales are after the bias (0: there are none), threads. The bias
// is padded like the weight. Returns 1 if there is no memory.
EXPORT int64_t conv(const int64_t* a) { return run_conv(read_conv(a), a[28]); }

// ---- depthwise: one filter a channel ---------------------------------------------------------------

const int DEPTHWISE_PIXELS = 8;

// adds one row of the filter to neighbouring outputs, sixteen channels; the inputs stay in registers
template <int WIDTH, int STRIDE>
INLINE void add_filter_row(const float* x, int64_t column, const float* taps, vec* sum) {
  const int inputs = (DEPTHWISE_PIXELS - 1) * STRIDE + WIDTH;
  vec value[inputs];
  UNROLL_ALL
  for (int k = 0; k < inputs; ++k) value[k] = load(x + k * column);
  UNROLL_ALL
  for (int k = 0; k < WIDTH; ++k) {
    const vec tap = load(taps + k * LANES);
    UNROLL_ALL
    for (int m = 0; m < DEPTHWISE_PIXELS; ++m) sum[m] += tap * value[m * STRIDE + k];
  }
}

INLINE void add_any_filter_row(const Conv& c, const float* x, int64_t column, const float* taps, vec* sum) {
  for (int64_t k = 0; k < c.kernel_w; ++k) {
    const vec tap = load(taps + k * LANES);
    const float* from = x + k * c.dilation_w * column;
    UNROLL_ALL
    for (int m = 0; m < DEPTHWISE_PIXELS; ++m) sum[m] += tap * load(from + m * c.stride_w * column);
  }
}

// WIDTH 0: any filter
template <int WIDTH, int STRIDE>
static void depthwise_row(const Conv& c, const Band& band, int64_t channel, const float* weight, float* out,
                          const float* residual) {
  for (int64_t w = 0; w < c.out_width; w += DEPTHWISE_PIXELS) {
    const int64_t left = c.out_width - w, pixels = left < DEPTHWISE_PIXELS ? left : DEPTHWISE_PIXELS;
    const float* x = band.values + w * c.stride_w * band.column + channel;
    vec sum[DEPTHWISE_PIXELS] = {};
    for (int64_t kh = 0; kh < c.kernel_h; ++kh) {
      const float *row = x + kh * c.dilation_h * band.row, *taps = weight + kh * c.kernel_w * LANES;
      if constexpr (WIDTH > 0) add_filter_row<WIDTH, STRIDE>(row, band.column, taps, sum);
      else add_any_filter_row(c, row, band.column, taps, sum);
    }
    const int64_t offset = w * c.out_channels + channel;
    const vec bias = c.epilogue.bias ? load(c.epilogue.bias + channel) : vec{};
    const vec scale = c.epilogue.scale ? load(c.epilogue.scale + channel) : vec{} + 1.0f;
    UNROLL_ALL
    for (int m = 0; m < DEPTHWISE_PIXELS; ++m) {
      if (m >= pixels) break;
      vec y = sum[m] * scale + bias;
      if (residual) y += load(residual + offset + m * c.out_channels);
      if (c.epilogue.activation == RELU) y = blend(y < 0.0f, vec{}, y);
      store_vec(out + offset + m * c.out_channels, y);
    }
  }
}

static void depthwise_any_row(const Conv& c, const Band& band, int64_t channel, const float* weight, float* out,
                              const float* residual) {
  const int plain = c.dilation_w == 1, wide = (int)c.kernel_w, step = (int)c.stride_w;
#define CASE(WIDTH, STRIDE) \
  if (plain && wide == WIDTH && step == STRIDE) return depthwise_row<WIDTH, STRIDE>(c, band, channel, weight, out, residual);
  CASE(3, 1) CASE(5, 1) CASE(7, 1) CASE(3, 2) CASE(5, 2)
#undef CASE
  depthwise_row<0, 0>(c, band, channel, weight, out, residual);
}

// output rows [from, to) of all images
static int depthwise_share(const Conv& c, int64_t from, int64_t to) {
  const int64_t vectors = (c.channels + LANES - 1) / LANES, taps = c.kernel_h * c.kernel_w;
  const int64_t extent = filter_height(c), band_row = band_columns(c) * c.channels;
  // the last tile of a row may read past its end
  const int64_t slack = DEPTHWISE_PIXELS * c.stride_w * c.channels;
  int64_t at_once = (CONV_BAND_BYTES / (int64_t)sizeof(float) / band_row - extent) / c.stride_h + 1;
  if (at_once < 1) at_once = 1;
  if (at_once > to - from) at_once = to - from;
  if (at_once > c.out_height) at_once = c.out_height;
  const int64_t input_rows = (at_once - 1) * c.stride_h + extent;
  float* copy = (float*)malloc((input_rows * band_row + slack + LANES) * sizeof(float));
  if (!copy) return 1;
  __builtin_memset(copy + input_rows * band_row, 0, (slack + LANES) * sizeof(float));
  for (int64_t row = from; row < to;) {
    const int64_t n = row / c.out_height, h = row % c.out_height;
    int64_t rows = at_once;
    if (rows > to - row) rows = to - row;
    if (rows > c.out_height - h) rows = c.out_height - h;
    copy_band(c, n, h * c.stride_h - c.pad_h, (rows - 1) * c.stride_h + extent, copy);
    for (int64_t r = 0; r < rows; ++r) {
      const Band band = {copy + r * c.stride_h * band_row, band_row, c.channels};
      const int64_t offset = (row + r) * c.out_width * c.out_channels;
      for (int64_t v = 0; v < vectors; ++v) {
        const int64_t last = c.channels - LANES, channel = v * LANES < last ? v * LANES : last;
        depthwise_any_row(c, band, channel, c.weight + v * taps * LANES, c.out + offset,
                          c.residual ? c.residual + offset : nullptr);
      }
      if (c.epilogue.activation > RELU) activate(c.out + offset, c.out_width * c.out_channels, c.epilogue);
    }
    row += rows;
  }
  free(copy);
  return 0;
}

// a: as for `conv`, with at least sixteen channels. The weight is packed as [vector of channels][kh][kw]
// [channel]; the last vector overlaps the one before it, as in x and out.
EXPORT int64_t depthwise_conv(const int64_t* a) {
  const Conv c = read_conv(a);
  const int64_t rows = c.batch * c.out_height;
  if (rows == 0 || c.out_width == 0) return 0;
  const int64_t work = rows * c.out_width * c.channels * c.kernel_h * c.kernel_w;
  int threads = choose_num_threads(work, DEPTHWISE_MIN_PARALLEL_WORK, (int)c.threads);
  if (threads > rows) threads = (int)rows;
  int failed = 0;
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1) reduction(| : failed)
  for (int t = 0; t < threads; ++t) failed |= depthwise_share(c, rows * t / threads, rows * (t + 1) / threads);
  return failed;
}
