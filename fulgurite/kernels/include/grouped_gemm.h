// Rows sorted by expert, each times the matrix of its expert, then gated.
//
//   y[s] = gate(factor[s] * (x[row[s]] . weight[e]) + bias[e])
//
// A work item is a block of columns of one expert's result. Few rows: x and the weight both lie along K,
// so a tile of sixteen sums (1 row by 16 columns, 2 by 8, 4 by 4) needs nothing copied; each byte of the
// weight is read once, and its memory is the floor. More rows: a piece of the weight is turned over, so
// that a vector holds sixteen columns, and serves all rows from the first cache. Which of the two is
// decided by shapes alone, and within either a row's sums are taken in the same order whatever the
// others are: a token's result does not depend on where its neighbours went.

const int64_t COLUMNS = 32;     // columns of an item (of each half, with a gate)
const int64_t TALL = 512;       // rows whose sums are kept together
const int64_t DEPTH = 256;      // of K that is turned over at a time: 32 KB, the first cache
const int64_t WIDENED = 16384;  // of K that few rows widen at once: four columns, on the stack
// rows of an average expert up to which weights are read where they lie: turning them over pays from
// about 24 on (8 experts [1536, 2048], two cores of a Xeon with AVX-512)
const int64_t FEW = 24;
const int64_t LINE = 64;  // bytes of a cache line

enum Gates { PLAIN, SILU, GELU, GELU_TANH, CLAMPED };

struct Job {
  const float* x;                // [R][x_step], padded with zeros to whole vectors
  const int32_t* rows;           // or null
  const float* factors;          // or null
  const int32_t* offsets;
  const char *weight, *bias;     // bias: or null
  char* out;
  int64_t count, experts, columns, size, x_step, of_expert, of_column, bias_step;
  int64_t kind, weight_kind, bias_kind, gate;
  float alpha, limit;
};

template <class T> INLINE vec read(const char* from, int64_t at, int64_t left) { return load_partial((const T*)from + at, left); }
INLINE vec read_kind(const char* from, int64_t kind, int64_t at, int64_t left) {
  if (kind == 0) return read<float>(from, at, left);
  return kind == 1 ? read<bf16>(from, at, left) : read<f16>(from, at, left);
}

// ---- few rows ----------------------------------------------------------------------------------------

// `rows` x `columns` sums, sixteen in all. The columns that are read next, `ahead` of these, are fetched meanwhile. Where
// several tiles of rows share these columns each of them fetches a part, from `soon` on, `lines` cache lines for
// sixteen of K: one tile that fetched all would wait for memory, and the others leave it idle.
template <int rows, int columns, int lines, class W>
static void few_tile(const float* const* x, const W* const* w, int64_t size, int64_t ahead, const char* soon,
                     float* out) {
  vec total[16] = {};
  int64_t c = 0;
  for (; c + LANES <= size; c += LANES, soon += lines * LINE) {
    vec b[columns];
    UNROLL
    for (int n = 0; n < columns; ++n) {
      b[n] = load_widened(w[n] + c);
      if (lines == 0 && (sizeof(W) == 4 || c % 32 == 0)) __builtin_prefetch(w[n] + c + ahead, 0, 2);
    }
    UNROLL
    for (int n = 0; n < lines; ++n) __builtin_prefetch(soon + n * LINE, 0, 2);
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

// A group of columns and all rows. `soon` is where the next group begins, `bytes` long.
template <int rows, int columns, int lines, class W>
static void few_group(const float* const* x, int64_t count, const W* const* w, int64_t there, int64_t size,
                      int64_t ahead, const char* soon, int64_t bytes, float* out) {
  for (int64_t m = 0; m < count; m += rows) {
    const float* given[rows];
    float sum[16];
    for (int64_t r = 0; r < rows; ++r) given[r] = x[min_i64(m + r, count - 1)];
    few_tile<rows, columns, lines>(given, w, size, ahead, soon + bytes * m / count, sum);
    for (int64_t r = 0; r < min_i64(count - m, rows); ++r)
      for (int64_t k = 0; k < there; ++k) out[(m + r) * COLUMNS + k] = sum[r * columns + k];
  }
}

template <int rows, int columns, class W>
static void few_rows(const float* const* x, int64_t count, const W* w, int64_t step, int64_t width, int64_t size,
                     float* out) {
  const int all = columns * sizeof(W) / 4;  // lines of a group for sixteen of K
  const int64_t ahead = columns * step, bytes = ahead * sizeof(W);
  for (int64_t n = 0; n < width; n += columns) {
    const W* from[columns];
    for (int64_t k = 0; k < columns; ++k) from[k] = w + min_i64(n + k, width - 1) * step;
    const char* soon = (const char*)(w + n * step + ahead);
    const int64_t there = min_i64(width - n, columns);
    if (count <= rows) few_group<rows, columns, 0>(x, count, from, there, size, ahead, soon, bytes, out + n);
    else if (count <= 3 * rows)
      few_group<rows, columns, (all + 1) / 2>(x, count, from, there, size, ahead, soon, bytes, out + n);
    else few_group<rows, columns, (all + 3) / 4>(x, count, from, there, size, ahead, soon, bytes, out + n);
  }
}

// The same for narrow numbers that several tiles of rows read: four columns are widened once.
template <class W>
static void few_widened(const float* const* x, int64_t count, const W* w, int64_t step, int64_t width, int64_t size,
                        float* out) {
  const int64_t padded = (size + LANES - 1) / LANES * LANES;
  float columns[4 * padded];
  const float* from[4];
  for (int64_t n = 0; n < width; n += 4) {
    const int64_t there = min_i64(width - n, 4);
    for (int64_t k = 0; k < there; ++k) widen_row(w + (n + k) * step, size, columns + k * padded);
    for (int64_t k = 0; k < 4; ++k) from[k] = columns + min_i64(k, there - 1) * padded;
    const char* soon = (const char*)(w + (n + 4) * step);
    few_group<4, 4, 1>(x, count, from, there, padded, 0, soon, 4 * step * sizeof(W), out + n);
  }
}

// ---- more rows ---------------------------------------------------------------------------------------

// `width` rows of the weight, `depth` of K, as [depth][COLUMNS] floats; zeros past the end of either
template <class W> static void turn_over(const W* w, int64_t step, int64_t width, int64_t depth, float* to) {
  for (int64_t n = 0; n < COLUMNS; n += LANES)
    for (int64_t c = 0; c < depth; c += LANES) {
      vec square[LANES];
      for (int64_t l = 0; l < LANES; ++l)
        square[l] = n + l < width ? load_partial(w + (n + l) * step + c, depth - c) : vec{};
      transpose_16x16(square);
      for (int64_t l = 0; l < LANES; ++l) store_vec(to + (c + l) * COLUMNS + n, square[l]);
    }
}

// Pieces of the weight that are turned over next, fetched a cache line at a time while others are multiplied.
struct Soon {
  const char* at;  // a column's stretch of `length` lines; the next one is `step` bytes away
  int64_t step, length, left, line;
};
INLINE void fetch(Soon& soon) {
  __builtin_prefetch(soon.at + soon.line * LINE, 0, 2);
  if (++soon.line == soon.length) soon.line = 0, soon.at += soon.step;
}

// out [rows][COLUMNS] += x [rows][depth] @ panel [depth][COLUMNS]
template <int rows>
static void add_tile(const float* const* x, const float* panel, int64_t depth, float* const* out, Soon& soon,
                     int64_t fetched) {
  vec total[rows][2] = {};
  const auto add = [&](int64_t c) __attribute__((always_inline)) {
    const vec left = load(panel + c * COLUMNS), right = load(panel + c * COLUMNS + LANES);
    UNROLL
    for (int r = 0; r < rows; ++r) {
      total[r][0] += left * x[r][c];
      total[r][1] += right * x[r][c];
    }
  };
  int64_t c = 0;
  Soon mine = soon;
  for (; c < fetched; ++c) add(c), fetch(mine);
  soon = mine;
  for (; c < depth; ++c) add(c);
  UNROLL
  for (int r = 0; r < rows; ++r) {
    store_vec(out[r], load(out[r]) + total[r][0]);
    store_vec(out[r] + LANES, load(out[r] + LANES) + total[r][1]);
  }
}
template <int rows>
INLINE void add_rows(const float* const* x, int64_t from, int64_t m, int64_t count, const float* panel, int64_t depth,
                     float* out, Soon& soon) {
  const float* given[rows];
  float unused[COLUMNS] = {};
  float* into[rows];
  for (int64_t r = 0; r < rows; ++r) {
    given[r] = x[min_i64(m + r, count - 1)] + from;
    into[r] = m + r < count ? out + (m + r) * COLUMNS : unused;
  }
  // an even share of what is left to fetch, one line for a column at most
  const int64_t tiles = (count - m + rows - 1) / rows;
  const int64_t fetched = min_i64(depth, (soon.left + tiles - 1) / tiles);
  soon.left -= fetched;
  add_tile<rows>(given, panel, depth, into, soon, fetched);
}

template <class W>
static void more_rows(const float* const* x, int64_t count, const W* w, int64_t step, int64_t width, int64_t size,
                      const W* after, float* panel, float* out) {
  __builtin_memset(out, 0, count * COLUMNS * sizeof(float));
  for (int64_t from = 0; from < size; from += DEPTH) {
    const int64_t depth = min_i64(size - from, DEPTH);
    turn_over(w + from, step, width, depth, panel);
    const int64_t next = from + depth;
    const bool last = next == size;
    const int64_t length = (min_i64(last ? size : size - next, DEPTH) * sizeof(W) + LINE - 1) / LINE;
    Soon soon{(const char*)(last ? after : w + next), (int64_t)(step * sizeof(W)), length, COLUMNS * length, 0};
    int64_t m = 0;
    for (; m + 12 <= count; m += 12) add_rows<12>(x, from, m, count, panel, depth, out, soon);
    for (; m < count; m += 4) add_rows<4>(x, from, m, count, panel, depth, out, soon);
  }
}

// Sums [count][COLUMNS] of `width` columns, from `first` on, of an expert.
template <class W>
static void block_sums(const Job& job, const float* const* x, int64_t count, int64_t expert, int64_t first,
                       int64_t width, int64_t next, float* panel, float* out) {
  const W *all = (const W*)job.weight + expert * job.of_expert, *w = all + first * job.of_column;
  if (job.count > FEW * job.experts)
    more_rows(x, count, w, job.of_column, width, job.size, all + next * job.of_column, panel, out);
  else if (sizeof(W) < 4 && count > 4 && job.size <= WIDENED)
    few_widened(x, count, w, job.of_column, width, job.size, out);
  else if (count > 2) few_rows<4, 4>(x, count, w, job.of_column, width, job.size, out);
  else if (count == 2) few_rows<2, 8>(x, count, w, job.of_column, width, job.size, out);
  else few_rows<1, 16>(x, count, w, job.of_column, width, job.size, out);
}

// ---- what follows a sum ------------------------------------------------------------------------------

INLINE vec gated(const Job& job, vec left, vec right) {
  if (job.gate == SILU) return silu(left) * right;
  if (job.gate == GELU) return gelu(left) * right;
  if (job.gate == GELU_TANH) return gelu_tanh(left) * right;
  const vec limit = broadcast(job.limit);
  left = blend(left > limit, limit, left);
  right = blend(right > limit, limit, blend(right < -limit, -limit, right));
  return (right + 1.0f) * left / (1.0f + vector_exp(-job.alpha * left));
}

INLINE vec finished(const Job& job, const float* sums, int64_t row, int64_t expert, int64_t column, int64_t left) {
  vec v = load_partial(sums, left);
  if (job.factors) v *= job.factors[row];
  if (job.bias) v += read_kind(job.bias, job.bias_kind, expert * job.bias_step + column, left);
  return v;
}

// One row's sums (of both halves, with a gate), scaled, biased, gated and rounded.
template <class T>
static void finish_row(const Job& job, const float* left_sums, const float* right_sums, int64_t row, int64_t expert,
                       int64_t first, int64_t last) {
  const int64_t half = job.gate == PLAIN ? job.columns : job.columns / 2;
  T* out = (T*)job.out + row * half;
  for (int64_t n = first; n < last; n += LANES) {
    const int64_t left = last - n;
    vec v = finished(job, left_sums + n - first, row, expert, n, left);
    if (job.gate != PLAIN)
      v = gated(job, v, finished(job, right_sums + n - first, row, expert, half + n, left));
    store_partial(out + n, v, left);
  }
}

static __attribute__((noinline)) void finish_any(const Job& job, const float* left, const float* right, int64_t row,
                                                 int64_t expert, int64_t first, int64_t last) {
  if (job.kind == 0) finish_row<float>(job, left, right, row, expert, first, last);
  else if (job.kind == 1) finish_row<bf16>(job, left, right, row, expert, first, last);
  else finish_row<f16>(job, left, right, row, expert, first, last);
}

template <class W> static void run_item(const Job& job, int64_t expert, int64_t block, float* room) {
  const int64_t half = job.gate == PLAIN ? job.columns : job.columns / 2;
  const int64_t first = block * COLUMNS, last = min_i64(first + COLUMNS, half);
  const int64_t start = expert ? job.offsets[expert - 1] : 0, end = job.offsets[expert];
  float *other = room + TALL * COLUMNS, *panel = other + TALL * COLUMNS;
  for (int64_t from = start; from < end; from += TALL) {
    const int64_t count = min_i64(end - from, TALL);
    const float* x[TALL];
    for (int64_t m = 0; m < count; ++m)
      x[m] = job.x + (job.rows ? job.rows[from + m] : from + m) * job.x_step;
    const bool gated = job.gate != PLAIN;
    block_sums<W>(job, x, count, expert, first, last - first, gated ? half + first : last, panel, room);
    if (gated) block_sums<W>(job, x, count, expert, half + first, last - first, last, panel, other);
    for (int64_t m = 0; m < count; ++m)
      finish_any(job, room + m * COLUMNS, other + m * COLUMNS, from + m, expert, first, last);
  }
}

static Job job_of(const int64_t* a) {
  return Job{(const float*)a[0], (const int32_t*)a[1], (const float*)a[2], (const int32_t*)a[3], (const char*)a[4],
             (const char*)a[5], (char*)a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16],
             a[17], a[18], unpack_double(a[19]), unpack_double(a[20])};
}

enum { ROWS_OUTSIDE = 1, OFFSETS_OUTSIDE = 2 };

// Rows and offsets name rows that are there: `most` rows of x, `count` of the result.
static int64_t check_rows(const int32_t* rows, int64_t count, int64_t most) {
  for (int64_t r = 0; rows && r < count; ++r)
    if (rows[r] < 0 || rows[r] >= most) return ROWS_OUTSIDE;
  return 0;
}
static int64_t check_offsets(const int32_t* offsets, int64_t experts, int64_t count) {
  for (int64_t e = 0; e < experts; ++e)
    if (offsets[e] < 0 || offsets[e] > count) return OFFSETS_OUTSIDE;
  return 0;
}

static void zero_rest(const Job& job) {
  const int64_t half = job.gate == PLAIN ? job.columns : job.columns / 2;
  const int64_t bytes = half * (job.kind == 0 ? 4 : 2), used = job.offsets[job.experts - 1];
  __builtin_memset(job.out + used * bytes, 0, (job.count - used) * bytes);
}

// a: the job, threads, room for the experts that have rows
EXPORT int64_t grouped_gemm(const int64_t* a) {
  Job job = job_of(a);
  const int32_t all = (int32_t)job.count;
  if (!job.offsets) job.offsets = &all;  // one expert with all rows
  int64_t wrong = check_offsets(job.offsets, job.experts, job.count);
  if (!wrong) wrong = check_rows(job.rows, job.count, a[23]);
  if (wrong) return wrong;
  int32_t* active = (int32_t*)a[22];
  int64_t found = 0;
  for (int64_t e = 0, start = 0; e < job.experts; start = job.offsets[e], ++e)
    if (job.offsets[e] > start) active[found++] = (int32_t)e;
  const int64_t half = job.gate == PLAIN ? job.columns : job.columns / 2;
  const int64_t blocks = (half + COLUMNS - 1) / COLUMNS;
  zero_rest(job);
  const int threads = choose_num_threads(job.count * job.columns * job.size, 1 << 17, (int)a[21]);
  // neighbours are taken together: each fetches what the next will read
  const int64_t together = max_i64(1, min_i64(8, found * blocks / (4 * threads)));
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    alignas(64) float room[(2 * TALL + DEPTH) * COLUMNS];
#pragma omp for schedule(dynamic, together)
    for (int64_t item = 0; item < found * blocks; ++item) {
      const int64_t expert = active[item / blocks], block = item % blocks;
      if (job.weight_kind == 0) run_item<float>(job, expert, block, room);
      else if (job.weight_kind == 1) run_item<bf16>(job, expert, block, room);
      else run_item<f16>(job, expert, block, room);
    }
  }
  return 0;
}

// The same for sums that were made elsewhere: a[0] holds them, [S][columns]
EXPORT int64_t grouped_epilogue(const int64_t* a) {
  const Job job = job_of(a);
  if (const int64_t wrong = check_offsets(job.offsets, job.experts, job.count)) return wrong;
  const int64_t half = job.gate == PLAIN ? job.columns : job.columns / 2;
  const int threads = choose_num_threads(job.count * job.columns, 1 << 14, (int)a[21]);
  zero_rest(job);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < (int64_t)job.offsets[job.experts - 1]; ++row) {
    int64_t low = 0, high = job.experts - 1;  // the first expert that ends after this row
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (job.offsets[middle] > row) high = middle;
      else low = middle + 1;
    }
    const float* sums = job.x + row * job.x_step;
    finish_any(job, sums, sums + half, row, low, 0, half);
  }
  return 0;
}

// a: x, out, count, columns, stride of x, columns of out, kind, which rows (or 0: all), threads, rows
// there are: rows of x as floats, zeros behind them
EXPORT int64_t widen_rows(const int64_t* a) {
  if (const int64_t wrong = check_rows((const int32_t*)a[7], a[2], a[9])) return wrong;
  const int threads = choose_num_threads(a[2] * a[3], 1 << 15, (int)a[8]);
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
