// One layer of a recurrent network over float32 numbers, step by step, in one or two directions:
//
//   LSTM      i, f, g, o = gates[t] + W h + b      c = sigmoid(f) c + sigmoid(i) tanh(g)
//                                                  h = sigmoid(o) tanh(c)
//   GRU       r, z, n = gates[t], s = W h + b      n = tanh(n + sigmoid(r + s_r) s_n)
//                                                  h = n + sigmoid(z + s_z) (h - n)
//   TANH_RNN, RELU_RNN                             h = activation(gates[t] + W h + b)
//
// `gates` are the projected inputs of all steps. W is packed as for `conv`, so a step is a GEMM of few rows.
// Directions, and rows of the batch, are independent: threads share them, and never wait for each other.
enum Cell { LSTM_CELL, GRU_CELL, TANH_RNN_CELL, RELU_RNN_CELL };

struct Recurrence {
  int64_t cell, steps, batch, hidden, num_gates, vectors;
  int64_t gates_step, gates_row, out_step, out_row;  // strides of times and of rows of the batch
};

// What one direction reads and writes. `state` and `memory` (of an LSTM) hold the first values, then the last ones.
struct Direction {
  const float *gates, *weight, *bias;
  float *out, *state, *memory;
  int is_reverse;
};

static void apply(float* values, int64_t count, int64_t activation) {
  activate(values, count, Epilogue{nullptr, nullptr, activation, 0.0f, 0.0f});
}

// h of one row of the batch; `sums` is W h + b and is overwritten
static void lstm_row(int64_t hidden, const float* gates, float* sums, float* h, float* c) {
  for (int64_t k = 0; k < 4 * hidden; ++k) sums[k] += gates[k];
  float *i = sums, *f = sums + hidden, *g = sums + 2 * hidden, *o = sums + 3 * hidden;
  apply(i, 2 * hidden, SIGMOID);
  apply(g, hidden, TANH);
  apply(o, hidden, SIGMOID);
  for (int64_t k = 0; k < hidden; ++k) i[k] = c[k] = f[k] * c[k] + i[k] * g[k];
  apply(i, hidden, TANH);
  for (int64_t k = 0; k < hidden; ++k) h[k] = o[k] * i[k];
}

static void gru_row(int64_t hidden, const float* gates, float* sums, float* h) {
  float *r = sums, *z = sums + hidden, *n = sums + 2 * hidden;
  for (int64_t k = 0; k < 2 * hidden; ++k) sums[k] += gates[k];
  apply(r, 2 * hidden, SIGMOID);
  for (int64_t k = 0; k < hidden; ++k) n[k] = gates[2 * hidden + k] + r[k] * n[k];
  apply(n, hidden, TANH);
  for (int64_t k = 0; k < hidden; ++k) h[k] = n[k] + z[k] * (h[k] - n[k]);
}

static void rnn_row(int64_t hidden, const float* gates, float* sums, float* h, int64_t activation) {
  for (int64_t k = 0; k < hidden; ++k) h[k] = sums[k] + gates[k];
  apply(h, hidden, activation);
}

// all steps of the rows [first, last) of the batch
static int run_direction(const Recurrence& r, const Direction& d, int64_t first, int64_t last) {
  const int64_t rows = last - first, columns = r.num_gates * r.hidden;
  float* sums = (float*)malloc(rows * columns * sizeof(float) + 64);
  if (!sums) return 1;
  float *state = d.state + first * r.hidden, *memory = d.memory + first * r.hidden;
  const Conv gemm = gemm_as_conv(state, r.hidden, 1, d.weight, d.bias, sums, rows, r.hidden, columns, 1);
  const int64_t panels = (columns + r.vectors * LANES - 1) / (r.vectors * LANES);
  int failed = 0;
  for (int64_t s = 0; s < r.steps && !failed; ++s) {
    const int64_t step = d.is_reverse ? r.steps - 1 - s : s;
    failed = conv_share(gemm, 0, rows, 0, panels, r.vectors);
    for (int64_t b = 0; b < rows; ++b) {
      const float* gates = d.gates + step * r.gates_step + (first + b) * r.gates_row;
      float *sum = sums + b * columns, *h = state + b * r.hidden;
      if (r.cell == LSTM_CELL) lstm_row(r.hidden, gates, sum, h, memory + b * r.hidden);
      else if (r.cell == GRU_CELL) gru_row(r.hidden, gates, sum, h);
      else rnn_row(r.hidden, gates, sum, h, r.cell == RELU_RNN_CELL ? RELU : TANH);
      __builtin_memcpy(d.out + step * r.out_step + (first + b) * r.out_row, h, r.hidden * sizeof(float));
    }
  }
  free(sums);
  return failed;
}

// a: cell, steps, batch, hidden, gates of a cell, vectors of a panel, the strides of gates and out (of a step,
// then of a row), threads, directions, then of each direction the addresses of gates, weight, bias, out, state
// and memory. Returns 1 if there is no memory.
EXPORT int64_t recurrence(const int64_t* a) {
  const Recurrence r = {a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]};
  const int64_t directions = a[11], work = r.steps * r.batch * r.num_gates * r.hidden * r.hidden;
  const int threads = choose_num_threads(work * directions, CONV_MIN_PARALLEL_WORK, (int)a[10]);
  int64_t parts = threads / directions;  // of the batch
  parts = parts > r.batch ? r.batch : parts < 1 ? 1 : parts;
  int failed = 0;
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1) reduction(| : failed)
  for (int t = 0; t < directions * parts; ++t) {
    const int64_t* from = a + 12 + t / parts * 6;
    const Direction d = {(const float*)from[0], (const float*)from[1], (const float*)from[2],
                         (float*)from[3], (float*)from[4], (float*)from[5], (int)(t / parts)};
    failed |= run_direction(r, d, r.batch * (t % parts) / parts, r.batch * (t % parts + 1) / parts);
  }
  return failed;
}
