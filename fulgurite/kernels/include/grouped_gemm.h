// Grouped GEMM with dense weights: rows sorted by expert, each times the weight of its expert, then
// gated.
//
//   y[s] = gate(row_weight[s] * (x[row[s]] . weight[e]) + bias[e])
//
// A work item is a block of columns of one expert's output. Small M: x and the weight are both
// contiguous along K, so a tile of sixteen sums (1 row by 16 columns, 2 by 8, 4 by 4) needs no
// copy. Each byte of the weight is read once: memory bandwidth is the bound. Large M: a block of
// the weight is transposed, so that a vector holds sixteen columns, and serves all rows from L1.
// Shapes alone decide between the two, and in both a row's sums are taken in the same order. So a
// token's result does not depend on the routes of other tokens. Tuned constants:
// kernels/tuning/cpu.py.

const int64_t BLOCK_N = 32;  // columns of a work item (of each half, with a gate)
const int64_t CACHE_LINE_BYTES = 64;

enum GateKind { NO_GATE, SILU, GELU, GELU_TANH, CLAMPED_SWIGLU };

struct GroupedGemmArgs {
  const float* x;                // [R][x_stride], padded with zeros to whole vectors
  const int32_t* rows;           // or null
  const float* row_weights;          // or null
  const int32_t* offsets;
  const char *weight, *bias;     // bias: or null
  char* out;
  int64_t count, experts, columns, size, x_stride, expert_stride, row_stride, bias_stride;
  int64_t dtype, weight_dtype, bias_dtype, gate;
  float alpha, limit;
};

template <class T> INLINE vec read(const char* from, int64_t at, int64_t left) { return load_partial((const T*)from + at, left); }
INLINE vec load_any_dtype(const char* from, int64_t dtype, int64_t at, int64_t left) {
  if (dtype == 0) return read<float>(from, at, left);
  return dtype == 1 ? read<bf16>(from, at, left) : read<f16>(from, at, left);
}

// ---- small M -----------------------------------------------------------------------------------------

// `rows` x `columns` sums, sixteen in all. The columns that are read next, `prefetch_distance`
// further, are prefetched meanwhile. If several tiles of rows share these columns, each prefetches
// a part of them, from `prefetch` on, `lines` cache lines for sixteen of K: one tile that
// prefetched all would wait for memory while the others leave it idle.
template <int rows, int columns, int lines, class W>
static void small_m_tile(const float* const* x, const W* const* w, int64_t size, int64_t prefetch_distance, const char* prefetch,
                     float* out) {
  vec total[16] = {};
  int64_t c = 0;
  for (; c + LANES <= size; c += LANES, prefetch += lines * CACHE_LINE_BYTES) {
    vec b[columns];
    UNROLL
    for (int n = 0; n < columns; ++n) {
      b[n] = load_widened(w[n] + c);
      if (lines == 0 && (sizeof(W) == 4 || c % 32 == 0)) __builtin_prefetch(w[n] + c + prefetch_distance, 0, 2);
    }
    UNROLL
    for (int n = 0; n < lines; ++n) __builtin_prefetch(prefetch + n * CACHE_LINE_BYTES, 0, 2);
    UNROLL
    for (int r = 0; r < rows; ++r) {
      const vec a = load(x[r] + c);
      UNROLL
      for (int n = 0; n < columns; ++n) total[r * columns + n] += a * b[n];
    }
  }
  if (c < size)
    for (int n = 0; n < columns; ++n) {
      const vec b = load_partial(w[n] + c, size - c);
      for (int r = 0; r < rows; ++r) total[r * columns + n] += load(x[r] + c) * b;
    }
  store_vec(out, row_sums(total));
}

// A group of columns and all rows. `prefetch` is the start of the next group, `bytes` long.
template <int rows, int columns, int lines, class W>
static void small_m_column_group(const float* const* x, int64_t count, const W* const* w, int64_t valid, int64_t size,
                      int64_t prefetch_distance, const char* prefetch, int64_t bytes, float* out) {
  for (int64_t m = 0; m < count; m += rows) {
    const float* rows_x[rows];
    float sum[16];
    for (int64_t r = 0; r < rows; ++r) rows_x[r] = x[min_i64(m + r, count - 1)];
    small_m_tile<rows, columns, lines>(rows_x, w, size, prefetch_distance, prefetch + bytes * m / count, sum);
    for (int64_t r = 0; r < min_i64(count - m, rows); ++r)
      for (int64_t k = 0; k < valid; ++k) out[(m + r) * BLOCK_N + k] = sum[r * columns + k];
  }
}

template <int rows, int columns, class W>
static void small_m_rows(const float* const* x, int64_t count, const W* w, int64_t step, int64_t width, int64_t size,
                     float* out) {
  const int all = columns * sizeof(W) / 4;  // lines of a group for sixteen of K
  const int64_t prefetch_distance = columns * step, bytes = prefetch_distance * sizeof(W);
  for (int64_t n = 0; n < width; n += columns) {
    const W* from[columns];
    for (int64_t k = 0; k < columns; ++k) from[k] = w + min_i64(n + k, width - 1) * step;
    const char* prefetch = (const char*)(w + n * step + prefetch_distance);
    const int64_t valid = min_i64(width - n, columns);
    if (count <= rows) small_m_column_group<rows, columns, 0>(x, count, from, valid, size, prefetch_distance, prefetch, bytes, out + n);
    else if (count <= 3 * rows)
      small_m_column_group<rows, columns, (all + 1) / 2>(x, count, from, valid, size, prefetch_distance, prefetch, bytes, out + n);
    else small_m_column_group<rows, columns, (all + 3) / 4>(x, count, from, valid, size, prefetch_distance, prefetch, bytes, out + n);
  }
}

// The same for 16-bit weights that several tiles of rows read: four columns are widened once.
template <class W>
static void small_m_widened(const float* const* x, int64_t count, const W* w, int64_t step, int64_t width, int64_t size,
                        float* out) {
  const int64_t padded = (size + LANES - 1) / LANES * LANES;
  float columns[4 * padded];
  const float* from[4];
  for (int64_t n = 0; n < width; n += 4) {
    const int64_t valid = min_i64(width - n, 4);
    for (int64_t k = 0; k < valid; ++k) widen_row(w + (n + k) * step, size, columns + k * padded);
    for (int64_t k = 0; k < 4; ++k) from[k] = columns + min_i64(k, valid - 1) * padded;
    const char* prefetch = (const char*)(w + (n + 4) * step);
    small_m_column_group<4, 4, 1>(x, count, from, valid, padded, 0, prefetch, 4 * step * sizeof(W), out + n);
  }
}

// ---- large M -----------------------------------------------------------------------------------------

// `width` rows of the weight, `depth` of K, as [depth][BLOCK_N] floats; zeros past the end of
// either.
template <class W> static void transpose_block(const W* w, int64_t step, int64_t width, int64_t depth, float* to) {
  for (int64_t n = 0; n < BLOCK_N; n += LANES)
    for (int64_t c = 0; c < depth; c += LANES) {
      vec square[LANES];
      for (int64_t l = 0; l < LANES; ++l)
        square[l] = n + l < width ? load_partial(w + (n + l) * step + c, depth - c) : vec{};
      transpose_16x16(square);
      for (int64_t l = 0; l < LANES; ++l) store_vec(to + (c + l) * BLOCK_N + n, square[l]);
    }
}

// Blocks of the weight that are transposed next: one cache line is prefetched at a time while
// others are multiplied.
struct PrefetchCursor {
  const char* at;  // `length` lines of a column; the next column is `step` bytes away
  int64_t step, length, left, line;
};
INLINE void prefetch_line(PrefetchCursor& prefetch) {
  __builtin_prefetch(prefetch.at + prefetch.line * CACHE_LINE_BYTES, 0, 2);
  if (++prefetch.line == prefetch.length) prefetch.line = 0, prefetch.at += prefetch.step;
}

// out [rows][BLOCK_N] += x [rows][depth] @ panel [depth][BLOCK_N]
template <int rows>
static void accumulate_tile(const float* const* x, const float* panel, int64_t depth, float* const* out, PrefetchCursor& prefetch,
                     int64_t prefetched_lines) {
  vec total[rows][2] = {};
  const auto add = [&](int64_t c) __attribute__((always_inline)) {
    const vec left = load(panel + c * BLOCK_N), right = load(panel + c * BLOCK_N + LANES);
    UNROLL
    for (int r = 0; r < rows; ++r) {
      total[r][0] += left * x[r][c];
      total[r][1] += right * x[r][c];
    }
  };
  int64_t c = 0;
  PrefetchCursor mine = prefetch;
  for (; c < prefetched_lines; ++c) add(c), prefetch_line(mine);
  prefetch = mine;
  for (; c < depth; ++c) add(c);
  UNROLL
  for (int r = 0; r < rows; ++r) {
    store_vec(out[r], load(out[r]) + total[r][0]);
    store_vec(out[r] + LANES, load(out[r] + LANES) + total[r][1]);
  }
}
template <int rows>
INLINE void accumulate_rows(const float* const* x, int64_t from, int64_t m, int64_t count, const float* panel, int64_t depth,
                     float* out, PrefetchCursor& prefetch) {
  const float* rows_x[rows];
  float unused[BLOCK_N] = {};
  float* into[rows];
  for (int64_t r = 0; r < rows; ++r) {
    rows_x[r] = x[min_i64(m + r, count - 1)] + from;
    into[r] = m + r < count ? out + (m + r) * BLOCK_N : unused;
  }
  // an even part of what is left to prefetch, at most one line a column
  const int64_t tiles = (count - m + rows - 1) / rows;
  const int64_t prefetched_lines = min_i64(depth, (prefetch.left + tiles - 1) / tiles);
  prefetch.left -= prefetched_lines;
  accumulate_tile<rows>(rows_x, panel, depth, into, prefetch, prefetched_lines);
}

template <class W>
static void large_m_rows(const float* const* x, int64_t count, const W* w, int64_t step, int64_t width, int64_t size,
                      const W* after, float* panel, float* out) {
  __builtin_memset(out, 0, count * BLOCK_N * sizeof(float));
  for (int64_t from = 0; from < size; from += GROUPED_GEMM_BLOCK_K) {
    const int64_t depth = min_i64(size - from, GROUPED_GEMM_BLOCK_K);
    transpose_block(w + from, step, width, depth, panel);
    const int64_t next = from + depth;
    const bool last = next == size;
    const int64_t length = (min_i64(last ? size : size - next, GROUPED_GEMM_BLOCK_K) * sizeof(W) + CACHE_LINE_BYTES - 1) / CACHE_LINE_BYTES;
    PrefetchCursor prefetch{(const char*)(last ? after : w + next), (int64_t)(step * sizeof(W)), length, BLOCK_N * length, 0};
    int64_t m = 0;
    for (; m + 12 <= count; m += 12) accumulate_rows<12>(x, from, m, count, panel, depth, out, prefetch);
    for (; m < count; m += 4) accumulate_rows<4>(x, from, m, count, panel, depth, out, prefetch);
  }
}

// Sums [count][BLOCK_N] of `width` columns, from `first` on, of an expert.
template <class W>
static void compute_block(const GroupedGemmArgs& args, const float* const* x, int64_t count, int64_t expert, int64_t first,
                       int64_t width, int64_t next, float* panel, float* out) {
  const W *all = (const W*)args.weight + expert * args.expert_stride, *w = all + first * args.row_stride;
  if (args.count > GROUPED_GEMM_SMALL_M * args.experts)
    large_m_rows(x, count, w, args.row_stride, width, args.size, all + next * args.row_stride, panel, out);
  else if (sizeof(W) < 4 && count > 4 && args.size <= GROUPED_GEMM_WIDEN_MAX_K)
    small_m_widened(x, count, w, args.row_stride, width, args.size, out);
  else if (count > 2) small_m_rows<4, 4>(x, count, w, args.row_stride, width, args.size, out);
  else if (count == 2) small_m_rows<2, 8>(x, count, w, args.row_stride, width, args.size, out);
  else small_m_rows<1, 16>(x, count, w, args.row_stride, width, args.size, out);
}

// ---- epilogue ----------------------------------------------------------------------------------------

INLINE vec apply_gate(const GroupedGemmArgs& args, vec left, vec right) {
  if (args.gate == SILU) return silu(left) * right;
  if (args.gate == GELU) return gelu(left) * right;
  if (args.gate == GELU_TANH) return gelu_tanh(left) * right;
  const vec limit = broadcast(args.limit);
  left = blend(left > limit, limit, left);
  right = blend(right > limit, limit, blend(right < -limit, -limit, right));
  return (right + 1.0f) * left / (1.0f + vector_exp(-args.alpha * left));
}

INLINE vec apply_row_weight_and_bias(const GroupedGemmArgs& args, const float* sums, int64_t row, int64_t expert, int64_t column, int64_t left) {
  vec v = load_partial(sums, left);
  if (args.row_weights) v *= args.row_weights[row];
  if (args.bias) v += load_any_dtype(args.bias, args.bias_dtype, expert * args.bias_stride + column, left);
  return v;
}

// The epilogue of one row: row weight, bias, gate, rounding.
template <class T>
static void store_row(const GroupedGemmArgs& args, const float* left_sums, const float* right_sums, int64_t row, int64_t expert,
                       int64_t first, int64_t last) {
  const int64_t half = args.gate == NO_GATE ? args.columns : args.columns / 2;
  T* out = (T*)args.out + row * half;
  for (int64_t n = first; n < last; n += LANES) {
    const int64_t left = last - n;
    vec v = apply_row_weight_and_bias(args, left_sums + n - first, row, expert, n, left);
    if (args.gate != NO_GATE)
      v = apply_gate(args, v, apply_row_weight_and_bias(args, right_sums + n - first, row, expert, half + n, left));
    store_partial(out + n, v, left);
  }
}

static __attribute__((noinline)) void store_row_any_dtype(const GroupedGemmArgs& args, const float* left, const float* right, int64_t row,
                                                 int64_t expert, int64_t first, int64_t last) {
  if (args.dtype == 0) store_row<float>(args, left, right, row, expert, first, last);
  else if (args.dtype == 1) store_row<bf16>(args, left, right, row, expert, first, last);
  else store_row<f16>(args, left, right, row, expert, first, last);
}

template <class W> static void run_work_item(const GroupedGemmArgs& args, int64_t expert, int64_t block, float* scratch) {
  const int64_t half = args.gate == NO_GATE ? args.columns : args.columns / 2;
  const int64_t first = block * BLOCK_N, last = min_i64(first + BLOCK_N, half);
  const int64_t start = expert ? args.offsets[expert - 1] : 0, end = args.offsets[expert];
  float *other = scratch + GROUPED_GEMM_MAX_ROWS * BLOCK_N, *panel = other + GROUPED_GEMM_MAX_ROWS * BLOCK_N;
  for (int64_t from = start; from < end; from += GROUPED_GEMM_MAX_ROWS) {
    const int64_t count = min_i64(end - from, GROUPED_GEMM_MAX_ROWS);
    const float* x[GROUPED_GEMM_MAX_ROWS];
    for (int64_t m = 0; m < count; ++m)
      x[m] = args.x + (args.rows ? args.rows[from + m] : from + m) * args.x_stride;
    const bool apply_gate = args.gate != NO_GATE;
    compute_block<W>(args, x, count, expert, first, last - first, apply_gate ? half + first : last, panel, scratch);
    if (apply_gate) compute_block<W>(args, x, count, expert, half + first, last - first, last, panel, other);
    for (int64_t m = 0; m < count; ++m)
      store_row_any_dtype(args, scratch + m * BLOCK_N, other + m * BLOCK_N, from + m, expert, first, last);
  }
}

static GroupedGemmArgs unpack_args(const int64_t* a) {
  return GroupedGemmArgs{(const float*)a[0], (const int32_t*)a[1], (const float*)a[2], (const int32_t*)a[3], (const char*)a[4],
             (const char*)a[5], (char*)a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16],
             a[17], a[18], unpack_double(a[19]), unpack_double(a[20])};
}

enum { ROW_OUT_OF_RANGE = 1, OFFSET_OUT_OF_RANGE = 2 };

// Row indices are below `limit_rows`, and offsets at most `count`.
static int64_t check_rows(const int32_t* rows, int64_t count, int64_t limit_rows) {
  for (int64_t r = 0; rows && r < count; ++r)
    if (rows[r] < 0 || rows[r] >= limit_rows) return ROW_OUT_OF_RANGE;
  return 0;
}
static int64_t check_offsets(const int32_t* offsets, int64_t experts, int64_t count) {
  for (int64_t e = 0; e < experts; ++e)
    if (offsets[e] < 0 || offsets[e] > count) return OFFSET_OUT_OF_RANGE;
  return 0;
}

static void zero_rows_without_expert(const GroupedGemmArgs& args) {
  const int64_t half = args.gate == NO_GATE ? args.columns : args.columns / 2;
  const int64_t bytes = half * (args.dtype == 0 ? 4 : 2), used = args.offsets[args.experts - 1];
  __builtin_memset(args.out + used * bytes, 0, (args.count - used) * bytes);
}

// a: the arguments, threads, scratch for the experts that have rows
EXPORT int64_t grouped_gemm(const int64_t* a) {
  GroupedGemmArgs args = unpack_args(a);
  const int32_t all = (int32_t)args.count;
  if (!args.offsets) args.offsets = &all;  // one expert that has all rows
  int64_t error = check_offsets(args.offsets, args.experts, args.count);
  if (!error) error = check_rows(args.rows, args.count, a[23]);
  if (error) return error;
  int32_t* active = (int32_t*)a[22];
  int64_t num_active = 0;
  for (int64_t e = 0, start = 0; e < args.experts; start = args.offsets[e], ++e)
    if (args.offsets[e] > start) active[num_active++] = (int32_t)e;
  const int64_t half = args.gate == NO_GATE ? args.columns : args.columns / 2;
  const int64_t blocks = (half + BLOCK_N - 1) / BLOCK_N;
  zero_rows_without_expert(args);
  const int threads = choose_num_threads(args.count * args.columns * args.size, GROUPED_GEMM_MIN_PARALLEL_WORK, (int)a[21]);
  // neighbouring items in one task: each prefetches what the next one reads
  const int64_t items_per_task = max_i64(1, min_i64(8, num_active * blocks / (4 * threads)));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    alignas(64) float scratch[(2 * GROUPED_GEMM_MAX_ROWS + GROUPED_GEMM_BLOCK_K) * BLOCK_N];
#pragma omp for schedule(dynamic, items_per_task)
    for (int64_t item = 0; item < num_active * blocks; ++item) {
      const int64_t expert = active[item / blocks], block = item % blocks;
      if (args.weight_dtype == 0) run_work_item<float>(args, expert, block, scratch);
      else if (args.weight_dtype == 1) run_work_item<bf16>(args, expert, block, scratch);
      else run_work_item<f16>(args, expert, block, scratch);
    }
  }
  return 0;
}

// The epilogue of sums in memory: a[0] is [S][columns].
EXPORT int64_t grouped_epilogue(const int64_t* a) {
  const GroupedGemmArgs args = unpack_args(a);
  if (const int64_t error = check_offsets(args.offsets, args.experts, args.count)) return error;
  const int64_t half = args.gate == NO_GATE ? args.columns : args.columns / 2;
  const int threads = choose_num_threads(args.count * args.columns, GROUPED_EPILOGUE_MIN_PARALLEL_WORK, (int)a[21]);
  zero_rows_without_expert(args);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < (int64_t)args.offsets[args.experts - 1]; ++row) {
    int64_t low = 0, high = args.experts - 1;  // the first expert that ends after this row
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (args.offsets[middle] > row) high = middle;
      else low = middle + 1;
    }
    const float* sums = args.x + row * args.x_stride;
    store_row_any_dtype(args, sums, sums + half, row, low, 0, half);
  }
  return 0;
}

// a: x, out, rows, columns, stride of x, columns of out, dtype, row indices (or 0: all), threads,
// rows of x. Rows of x as floats, padded with zeros.
EXPORT int64_t widen_rows(const int64_t* a) {
  if (const int64_t error = check_rows((const int32_t*)a[7], a[2], a[9])) return error;
  const int threads = choose_num_threads(a[2] * a[3], WIDEN_MIN_PARALLEL_WORK, (int)a[8]);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < a[2]; ++r) {
    float* out = (float*)a[1] + r * a[5];
    const int64_t at = (a[7] ? ((const int32_t*)a[7])[r] : r) * a[4];
    if (a[6] == 0) widen_row((const float*)a[0] + at, a[3], out);
    else if (a[6] == 1) widen_row((const bf16*)a[0] + at, a[3], out);
    else widen_row((const f16*)a[0] + at, a[3], out);
  }
  return 0;
}
