// Products of float32 matrices: out[m,n] = sum_k a[m,k] * b[k,n] + bias[n]. The output is contiguous.
//
// b is packed into panels at each call, and multiplied like the weight of a convolution (conv.h). Where a is the
// transpose of a matrix, as in the gradient of a linear's weight, nothing is packed: the rows of both are summed as
// outer products (conv_gradient.h).

struct Matmul {
  const float *a, *b, *bias;
  float* out;
  int64_t rows, depth, columns, a_row, a_column, b_row, b_column, vectors, threads;
};

// packs columns [first, first + wide * LANES) of b: [depth][columns]
static void pack_panel(const Matmul& p, int64_t first, int64_t wide, float* to) {
  for (int64_t v = 0; v < wide; ++v) {
    const int64_t column = first + v * LANES;
    const int64_t lanes = p.columns - column < LANES ? p.columns - column : LANES;
    const float* from = p.b + column * p.b_column;
    float* out = to + v * LANES;
    const int64_t step = wide * LANES;
    int64_t k = 0;
    if (lanes == LANES && p.b_column == 1) {
      for (; k < p.depth; ++k) store_vec(out + k * step, load(from + k * p.b_row));
    } else if (lanes == LANES && p.b_row == 1) {
      for (; k + LANES <= p.depth; k += LANES) {
        vec rows[LANES];
        UNROLL
        for (int l = 0; l < LANES; ++l) rows[l] = load(from + l * p.b_column + k);
        transpose_16x16(rows);
        UNROLL
        for (int l = 0; l < LANES; ++l) store_vec(out + (k + l) * step, rows[l]);
      }
    }
    for (; k < p.depth; ++k)
      for (int64_t l = 0; l < LANES; ++l) out[k * step + l] = l < lanes ? from[k * p.b_row + l * p.b_column] : 0.0f;
  }
}

static int64_t multiply_packed(const Matmul& p) {
  const int64_t padded = (p.columns + LANES - 1) / LANES * LANES, panel = p.vectors * LANES;
  float* packed = (float*)malloc((padded * (p.depth + 1)) * sizeof(float));
  if (!packed) return 1;
  float* bias = packed + padded * p.depth;
  if (p.bias) {
    __builtin_memcpy(bias, p.bias, p.columns * sizeof(float));
    __builtin_memset(bias + p.columns, 0, (padded - p.columns) * sizeof(float));
  }
  const int64_t panels = (padded + panel - 1) / panel;
  const int threads = choose_num_threads(p.rows * p.depth * p.columns, CONV_MIN_PARALLEL_WORK, (int)p.threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t k = 0; k < panels; ++k) {
    const int64_t first = k * panel, wide = padded - first < panel ? (padded - first) / LANES : p.vectors;
    pack_panel(p, first, wide, packed + first * p.depth);
  }
  const Conv c = gemm_as_conv(p.a, p.a_row, p.a_column, packed, p.bias ? bias : nullptr, p.out, p.rows, p.depth,
                              p.columns, p.threads);
  const int64_t failed = run_conv(c, p.vectors);
  free(packed);
  return failed;
}

// out[m,n] = sum_k a[k,m] * b[k,n]: rows of both are pixels of a weight's gradient
static int64_t multiply_transposed(const Matmul& p) {
  Conv c = gemm_as_conv(p.b, p.b_row, 1, nullptr, nullptr, p.out, p.depth, p.columns, p.rows, p.threads);
  return run_weight_gradient(c, p.a);
}

// a: the addresses of a, b, bias (or 0) and out, rows, depth, columns, the strides of a and b, vectors of a panel,
// threads. Returns 1 if there is no memory.
EXPORT int64_t matmul(const int64_t* a) {
  const Matmul p = {(const float*)a[0], (const float*)a[1], (const float*)a[2], (float*)a[3], a[4], a[5], a[6],
                    a[7], a[8], a[9], a[10], a[11], a[12]};
  if (p.rows == 0 || p.columns == 0) return 0;
  const int is_transposed = p.a_row == 1 && p.a_column == p.rows && p.b_column == 1;
  return is_transposed && p.rows > 1 && !p.bias && p.depth > 0 ? multiply_transposed(p) : multiply_packed(p);
}
