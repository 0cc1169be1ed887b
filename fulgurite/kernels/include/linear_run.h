// A call of the kernels: rows of x prepared, panels shared out to threads, results finished and stored.

// One call, whose description may be kept and used again.
struct Call {
  const Weight* weight;
  const Weight* up;      // null, or: y = activation(x @ weight.T) * (x @ up.T)
  const void* x;         // [tokens, given] in `type`, rows `x_stride` elements apart
  void* out;             // [tokens, rows] in `type`
  const float* bias;     // [rows up to whole panels], or null
  const float* up_bias;
  const void* residual;  // added to the result, like `out`, or null; may be `out` itself
  int64_t tokens, given, x_stride, out_stride;
  int32_t type, integer, activation, threads;
};
enum Activation { NO_ACTIVATION, SILU, GELU_TANH };

INLINE float activate(int32_t kind, float x) {
  if (kind == NO_ACTIVATION) return x;
  if (kind == SILU) return x * sigmoid(x);
  return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));  // 0.5x (1 + tanh(u)) = x sigmoid(2u)
}

INLINE const PanelKernel* kernels_of(const Weight& w, bool integer) {
  const bool minimum = w.minimum_type != ABSENT;
  if (integer) return INTEGER_KERNELS[w.codes_kind][w.group == 16][minimum];
  return FLOAT_KERNELS[w.codes_kind][minimum];
}

INLINE Floats finished(Floats sum, const float* scales, const float* bias, int64_t first) {
  if (scales) sum = multiply(sum, load_f32(scales + first));
  return bias ? add(sum, load_f32(bias + first)) : sum;
}

// `bias` has whole panels, like row_scales; x and the result end with the weight's last row.
static void store_panel(const Call& call, int64_t panel, int64_t token, const Floats* one,
                        const Floats* two, int tokens) {
  const Weight& w = *call.weight;
  const int64_t first = panel * ROWS;
  const int count = (int)(w.rows - first < ROWS ? w.rows - first : ROWS);
  for (int t = 0; t < tokens; ++t) {
    Floats sum = finished(one[t], w.row_scales, call.bias, first);
    if (two) {
      float gate[ROWS];
      store_f32(gate, sum);
      for (int i = 0; i < ROWS; ++i) gate[i] = activate(call.activation, gate[i]);
      sum = multiply(load_f32(gate), finished(two[t], call.up->row_scales, call.up_bias, first));
    }
    const int64_t at = (token + t) * call.out_stride + first;
    if (call.type == TYPE_F32 && count == ROWS) {
      if (call.residual) sum = add(sum, load_f32((const float*)call.residual + at));
      store_f32((float*)call.out + at, sum);
      continue;
    }
    float y[ROWS];
    store_f32(y, sum);
    if (call.residual)
      for (int i = 0; i < count; ++i) y[i] += read(call.residual, call.type, at + i);
    for (int i = 0; i < count; ++i) write(call.out, call.type, at + i, y[i]);
  }
}

INLINE int width_index(int64_t width) { return width == 8 ? 3 : width == 4 ? 2 : width == 2 ? 1 : 0; }

INLINE bool has_minimums(const Call& call) {
  return call.weight->minimum_type != ABSENT || (call.up && call.up->minimum_type != ABSENT);
}

static void prepare_tile(const Call& call, Tile tile, int64_t token, float* row, bool sums) {
  const Weight& w = *call.weight;
  const int64_t size = call.type == TYPE_F32 ? 4 : 2;
  for (int64_t t = 0; t < tile.width; ++t) {
    const char* x = (const char*)call.x + (token + t) * call.x_stride * size;
    read_row(row, x, call.type, call.given, w.columns);
    if (call.integer) place_codes(tile, t, row, w.columns, w.offset, w.group == 16);
    else place_floats(tile, t, row, w.columns, sums);
  }
}

static void run_panels(const Call& call, char* memory, int64_t first_panel, int64_t last_panel,
                       int64_t first_token, int64_t tokens) {
  const Weight& w = *call.weight;
  const PanelKernel* one = kernels_of(w, call.integer);
  const PanelKernel* two = call.up ? kernels_of(*call.up, call.integer) : nullptr;
  for (int64_t panel = first_panel; panel < last_panel; ++panel) {
    for (int64_t token = 0, width; token < tokens; token += width) {
      width = tile_width(tokens - token);
      const Tile tile = tile_at(memory, w.columns, token, width);
      Floats result[MOST_TOKENS], other[MOST_TOKENS];
      one[width_index(width)](w, panel, tile, result);
      if (two) two[width_index(width)](*call.up, panel, tile, other);
      store_panel(call, panel, first_token + token, result, two ? other : nullptr, (int)width);
    }
  }
}

// The same for many tokens, STRIP panels at a time.
template <int panels>
static void run_strip(const Call& call, char* memory, int64_t panel, int64_t first_token, int64_t tokens,
                      float* mine) {
  float *decoded = mine, *one = mine + DEPTH * STRIP * ROWS, *two = one + tokens * STRIP * ROWS;
  multiply_strip<panels>(*call.weight, panel, memory, tokens, decoded, one);
  if (call.up) multiply_strip<panels>(*call.up, panel, memory, tokens, decoded, two);
  for (int64_t t = 0; t < tokens; ++t)
    for (int p = 0; p < panels; ++p) {
      const int64_t at = (t * panels + p) * ROWS;
      const Floats gate = load_f32(one + at), other = call.up ? load_f32(two + at) : all(0.0f);
      store_panel(call, panel + p, first_token + t, &gate, call.up ? &other : nullptr, 1);
    }
}

static void run_strips(const Call& call, char* memory, int64_t first_panel, int64_t last_panel,
                       int64_t first_token, int64_t tokens, float* mine) {
  int64_t panel = first_panel;
  for (; panel + STRIP <= last_panel; panel += STRIP)
    run_strip<STRIP>(call, memory, panel, first_token, tokens, mine);
  for (; panel < last_panel; ++panel) run_strip<1>(call, memory, panel, first_token, tokens, mine);
}

// One thread's share of `count` tokens from `start` on; with more than a few tokens x is prepared once
// for all threads, in `memory`.
static void run_share(const Call& call, char* memory, int64_t start, int64_t count, int64_t thread,
                      int64_t threads) {
  const int64_t columns = call.weight->columns;
  const int64_t panels = (call.weight->rows + ROWS - 1) / ROWS;
  const bool alone = memory == nullptr, many = !call.integer && count >= MANY_TOKENS;
  const int64_t extra = alone ? token_bytes(columns) * count : many ? many_bytes(count) : 0;
  const bool sums = !many && has_minimums(call);
  char* mine = own.take(columns * 4 + extra);
  if (alone) memory = mine + columns * 4;
  int64_t number = 0;
  for (int64_t token = 0, width; token < count; token += width, ++number) {
    width = tile_width(count - token);
    if (alone || number % threads == thread)
      prepare_tile(call, tile_at(memory, columns, token, width), start + token, (float*)mine, sums);
  }
  if (!alone) {
#pragma omp barrier
  }
  const int64_t first = panels * thread / threads, last = panels * (thread + 1) / threads;
  if (many) run_strips(call, memory, first, last, start, count, (float*)(mine + columns * 4));
  else run_panels(call, memory, first, last, start, count);
  if (!alone) {
#pragma omp barrier
  }
}

EXPORT void linear(const Call* call) {
  const int64_t columns = call->weight->columns, tokens = call->tokens;
  const int64_t work = columns * call->weight->rows * tokens;
  const int threads = work < SMALL_WORK ? 1 : call->threads;
  const bool few = tokens <= FEW_TOKENS;
  if (few && threads == 1) return run_share(*call, nullptr, 0, tokens, 0, 1);
  const int64_t chunk = tokens < CHUNK_TOKENS ? tokens : CHUNK_TOKENS;
  char* memory = few ? nullptr : shared.take(token_bytes(columns) * chunk);
#pragma omp parallel num_threads(threads)
  for (int64_t start = 0; start < tokens; start += chunk) {
    const int64_t count = tokens - start < chunk ? tokens - start : chunk;
    run_share(*call, memory, start, count, omp_get_thread_num(), omp_get_num_threads());
  }
}

// the same as a native kernel that can be replayed: the array is the call itself
EXPORT int64_t linear_kernel(const int64_t* call) {
  linear((const Call*)call);
  return 0;
}

EXPORT const char* instructions(void) { return INSTRUCTIONS; }
EXPORT int64_t weight_size(void) { return sizeof(Weight); }
EXPORT int64_t call_size(void) { return sizeof(Call); }
