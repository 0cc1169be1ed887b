// Grouped GEMM with dense weights: rows sorted by expert, each times the weight of its expert, then
// gated. A linear is one expert that has all rows.
//
//   y[s] = gate(row_weight[s] * (x[s] . weight[e]) + bias[e]) + residual[s]
//
// A work item is a block of columns of one expert's output (dense_gemm.h). The result of a row depends
// on that row alone. Tuned constants: kernels/tuning/cpu.py.

enum GateKind { NO_GATE, SILU, GELU, GELU_TANH, CLAMPED_SWIGLU };

struct GroupedGemmArgs {
  const char* x;                 // [S][x_stride] float, or bf16 if is_paired; padded with zeros to 32 columns
  const char* residual;          // or null
  const float* row_weights;      // or null
  const int32_t* offsets;
  const char *weight, *bias;     // bias: or null
  char* out;
  int64_t count, experts, columns, size, x_stride, expert_stride, row_stride, bias_stride;
  int64_t dtype, weight_dtype, bias_dtype, gate;
  float alpha, limit;
  int64_t residual_stride, is_paired;
};

template <class T> INLINE vec read(const char* from, int64_t at, int64_t left) { return load_partial((const T*)from + at, left); }
INLINE vec load_any_dtype(const char* from, int64_t dtype, int64_t at, int64_t left) {
  if (dtype == 0) return read<float>(from, at, left);
  return dtype == 1 ? read<bf16>(from, at, left) : read<f16>(from, at, left);
}

// Sums [count][BLOCK_N] of `width` columns, from `first` on, of an expert; `next` are read after them.
static void compute_block(const GroupedGemmArgs& args, const char* x, int64_t count, int64_t expert, int64_t first,
                          int64_t width, int64_t next, float* panel, float* out) {
  const int64_t item = args.weight_dtype == 0 ? 4 : 2, step = args.row_stride * item, bytes = args.size * item;
  const char *all = args.weight + expert * args.expert_stride * item, *w = all + first * step;
#define CALL(Words) compute_sums<Words>(x, args.x_stride, count, w, step, width, bytes, all + next * step, panel, out)
  if (args.weight_dtype == 0) CALL(F32Words);
  else if (args.is_paired) CALL(PairWords);
  else if (args.weight_dtype == 1) CALL(SplitWords<bf16>);
  else CALL(SplitWords<f16>);
#undef CALL
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
    if (args.residual) v += load_any_dtype(args.residual, args.dtype, row * args.residual_stride + n, left);
    store_partial(out + n, v, left);
  }
}

static __attribute__((noinline)) void store_row_any_dtype(const GroupedGemmArgs& args, const float* left, const float* right, int64_t row,
                                                 int64_t expert, int64_t first, int64_t last) {
  if (args.dtype == 0) store_row<float>(args, left, right, row, expert, first, last);
  else if (args.dtype == 1) store_row<bf16>(args, left, right, row, expert, first, last);
  else store_row<f16>(args, left, right, row, expert, first, last);
}

static void run_work_item(const GroupedGemmArgs& args, int64_t expert, int64_t block, float* scratch) {
  const int64_t half = args.gate == NO_GATE ? args.columns : args.columns / 2;
  const int64_t first = block * BLOCK_N, last = min_i64(first + BLOCK_N, half);
  const int64_t start = expert ? args.offsets[expert - 1] : 0, end = args.offsets[expert];
  const int64_t x_bytes = args.x_stride * (args.is_paired ? 2 : 4);
  float *other = scratch + GROUPED_GEMM_MAX_ROWS * BLOCK_N, *panel = other + GROUPED_GEMM_MAX_ROWS * BLOCK_N;
  for (int64_t from = start; from < end; from += GROUPED_GEMM_MAX_ROWS) {
    const int64_t count = min_i64(end - from, GROUPED_GEMM_MAX_ROWS);
    const char* x = args.x + from * x_bytes;
    const bool apply_gate = args.gate != NO_GATE;
    compute_block(args, x, count, expert, first, last - first, apply_gate ? half + first : last, panel, scratch);
    if (apply_gate) compute_block(args, x, count, expert, half + first, last - first, last, panel, other);
    for (int64_t m = 0; m < count; ++m)
      store_row_any_dtype(args, scratch + m * BLOCK_N, other + m * BLOCK_N, from + m, expert, first, last);
  }
}

static GroupedGemmArgs unpack_args(const int64_t* a) {
  return GroupedGemmArgs{(const char*)a[0], (const char*)a[1], (const float*)a[2], (const int32_t*)a[3], (const char*)a[4],
             (const char*)a[5], (char*)a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], a[16],
             a[17], a[18], unpack_double(a[19]), unpack_double(a[20]), a[23], a[24]};
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

// a: the arguments, threads and scratch for the experts that have rows after `limit`
EXPORT int64_t grouped_gemm(const int64_t* a) {
  GroupedGemmArgs args = unpack_args(a);
  const int32_t all = (int32_t)args.count;
  if (!args.offsets) args.offsets = &all;  // one expert that has all rows
  if (const int64_t error = check_offsets(args.offsets, args.experts, args.count)) return error;
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
    alignas(64) float scratch[(2 * GROUPED_GEMM_MAX_ROWS + GROUPED_GEMM_BLOCK_WORDS) * BLOCK_N];
#pragma omp for schedule(dynamic, items_per_task)
    for (int64_t item = 0; item < num_active * blocks; ++item) {
      const int64_t expert = active[item / blocks], block = item % blocks;
      run_work_item(args, expert, block, scratch);
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
    const float* sums = (const float*)args.x + row * args.x_stride;
    store_row_any_dtype(args, sums, sums + half, row, low, 0, half);
  }
  return 0;
}

// a: x, out, rows, columns, stride of x, columns of out, dtype, row indices (or 0: all), threads,
// rows of x, is_paired. Rows of x as floats, or (is_paired) as they are, in bf16; padded with zeros.
EXPORT int64_t prepare_rows(const int64_t* a) {
  if (const int64_t error = check_rows((const int32_t*)a[7], a[2], a[9])) return error;
  const int threads = choose_num_threads(a[2] * a[3], WIDEN_MIN_PARALLEL_WORK, (int)a[8]);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < a[2]; ++r) {
    const int64_t at = (a[7] ? ((const int32_t*)a[7])[r] : r) * a[4];
    if (a[10]) {
      uint16_t* out = (uint16_t*)a[1] + r * a[5];
      __builtin_memcpy(out, (const uint16_t*)a[0] + at, a[3] * 2);
      __builtin_memset(out + a[3], 0, (a[5] - a[3]) * 2);
      continue;
    }
    float* out = (float*)a[1] + r * a[5];
    if (a[6] == 0) widen_row((const float*)a[0] + at, a[3], out);
    else if (a[6] == 1) widen_row((const bf16*)a[0] + at, a[3], out);
    else widen_row((const f16*)a[0] + at, a[3], out);
    for (int64_t c = (a[3] + LANES - 1) / LANES * LANES; c < a[5]; ++c) out[c] = 0.0f;
  }
  return 0;
}

EXPORT int64_t has_pair_words(void) { return HAS_PAIR_WORDS; }
