// One linear: x is rearranged into tiles, panels are divided among threads, the epilogue stores the
// output.

// The arguments of a call, which may be stored and used again.
struct LinearArgs {
  const Weight* weight;
  const Weight* up;      // null, or: y = activation(x @ weight.T) * (x @ up.T)
  const void* x;         // [tokens, given] in `type`, rows `x_stride` elements apart
  void* out;             // [tokens, rows] in `type`
  const float* bias;     // [rows up to whole panels], or null
  const float* up_bias;
  const void* residual;  // added to the output, or null; may be `out` itself
  int64_t tokens, given, x_stride, out_stride;
  int32_t type, integer, activation, threads;
};
enum Activation { NO_ACTIVATION, SILU, GELU_TANH };

INLINE float activate(int32_t kind, float x) {
  if (kind == NO_ACTIVATION) return x;
  if (kind == SILU) return x * sigmoid(x);
  return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));  // 0.5x (1 + tanh(u)) = x sigmoid(2u)
}

INLINE const PanelKernel* select_kernels(const Weight& w, bool integer) {
  const bool minimum = w.minimum_type != NO_SCALE;
  if (integer) return INT8_KERNELS[w.codes_kind][w.group == 16][minimum];
  return FLOAT_KERNELS[w.codes_kind][minimum];
}

INLINE Floats apply_scale_and_bias(Floats sum, const float* scales, const float* bias, int64_t first) {
  if (scales) sum = multiply(sum, load_f32(scales + first));
  return bias ? add(sum, load_f32(bias + first)) : sum;
}

// `bias` and row_scales are padded to whole panels; x and the output are not.
static void store_panel(const LinearArgs& call, int64_t panel, int64_t token, const Floats* one,
                        const Floats* two, int tokens) {
  const Weight& w = *call.weight;
  const int64_t first = panel * PANEL_ROWS;
  const int count = (int)(w.rows - first < PANEL_ROWS ? w.rows - first : PANEL_ROWS);
  for (int t = 0; t < tokens; ++t) {
    Floats sum = apply_scale_and_bias(one[t], w.row_scales, call.bias, first);
    if (two) {
      float gate[PANEL_ROWS];
      store_f32(gate, sum);
      for (int i = 0; i < PANEL_ROWS; ++i) gate[i] = activate(call.activation, gate[i]);
      sum = multiply(load_f32(gate), apply_scale_and_bias(two[t], call.up->row_scales, call.up_bias, first));
    }
    const int64_t at = (token + t) * call.out_stride + first;
    if (call.type == TYPE_F32 && count == PANEL_ROWS) {
      if (call.residual) sum = add(sum, load_f32((const float*)call.residual + at));
      store_f32((float*)call.out + at, sum);
      continue;
    }
    float y[PANEL_ROWS];
    store_f32(y, sum);
    if (call.residual)
      for (int i = 0; i < count; ++i) y[i] += read(call.residual, call.type, at + i);
    for (int i = 0; i < count; ++i) write(call.out, call.type, at + i, y[i]);
  }
}

INLINE int tile_index(int64_t width) { return width == 8 ? 3 : width == 4 ? 2 : width == 2 ? 1 : 0; }

static void fill_x_tile(const LinearArgs& call, XTile tile, int64_t token, float* row) {
  const Weight& w = *call.weight;
  const int64_t size = call.type == TYPE_F32 ? 4 : 2;
  for (int64_t t = 0; t < tile.width; ++t) {
    const char* x = (const char*)call.x + (token + t) * call.x_stride * size;
    read_row(row, x, call.type, call.given, w.columns);
    if (call.integer) store_codes(tile, t, row, w.columns, w.offset, w.group == 16);
    else store_floats(tile, t, row, w.columns);
  }
}

// A tile of tokens, and one panel or as many as few tokens take.
static void run_tile(const LinearArgs& call, const XTile& tile, int64_t panel, int panels, int64_t token) {
  const int kernel = tile_index(tile.width) + (panels > 1 ? 4 : 0), tokens = (int)tile.width;
  Floats result[MAX_TILE_TOKENS], other[MAX_TILE_TOKENS];
  select_kernels(*call.weight, call.integer)[kernel](*call.weight, panel, tile, result);
  if (call.up) select_kernels(*call.up, call.integer)[kernel](*call.up, panel, tile, other);
  for (int p = 0; p < panels; ++p)
    store_panel(call, panel + p, token, result + p * tokens, call.up ? other + p * tokens : nullptr, tokens);
}

static void run_panels(const LinearArgs& call, char* memory, int64_t first_panel, int64_t last_panel,
                       int64_t first_token, int64_t tokens) {
  const int step = call.integer || tokens > 2 ? 1 : tokens == 1 ? FLOAT_PANELS_1 : FLOAT_PANELS_2;
  for (int64_t panel = first_panel, panels; panel < last_panel; panel += panels) {
    panels = last_panel - panel < step ? 1 : step;
    for (int64_t token = 0, width; token < tokens; token += width) {
      width = x_tile_width(tokens - token);
      run_tile(call, x_tile_at(memory, call.weight->columns, token, width), panel, (int)panels, first_token + token);
    }
  }
}

// Many tokens: GEMM_STRIP_PANELS panels at a time.
template <int panels>
static void run_large_m_strip(const LinearArgs& call, char* memory, int64_t panel, int64_t first_token, int64_t tokens,
                      float* scratch) {
  float *dequantized = scratch, *one = scratch + GEMM_BLOCK_K * GEMM_STRIP_PANELS * PANEL_ROWS, *two = one + tokens * GEMM_STRIP_PANELS * PANEL_ROWS;
  gemm_strip<panels>(*call.weight, panel, memory, tokens, dequantized, one);
  if (call.up) gemm_strip<panels>(*call.up, panel, memory, tokens, dequantized, two);
  for (int64_t t = 0; t < tokens; ++t)
    for (int p = 0; p < panels; ++p) {
      const int64_t at = (t * panels + p) * PANEL_ROWS;
      const Floats gate = load_f32(one + at), other = call.up ? load_f32(two + at) : all(0.0f);
      store_panel(call, panel + p, first_token + t, &gate, call.up ? &other : nullptr, 1);
    }
}

static void run_large_m_panels(const LinearArgs& call, char* memory, int64_t first_panel, int64_t last_panel,
                       int64_t first_token, int64_t tokens, float* scratch) {
  int64_t panel = first_panel;
  for (; panel + GEMM_STRIP_PANELS <= last_panel; panel += GEMM_STRIP_PANELS)
    run_large_m_strip<GEMM_STRIP_PANELS>(call, memory, panel, first_token, tokens, scratch);
  for (; panel < last_panel; ++panel) run_large_m_strip<1>(call, memory, panel, first_token, tokens, scratch);
}

// The panels of one thread for `count` tokens from `start` on. With more than a few tokens, all
// threads share the rearranged x in `memory`.
static void run_thread(const LinearArgs& call, char* memory, int64_t start, int64_t count, int64_t thread,
                      int64_t threads) {
  const int64_t columns = call.weight->columns;
  const int64_t panels = (call.weight->rows + PANEL_ROWS - 1) / PANEL_ROWS;
  const bool is_private_x = memory == nullptr, is_large_m = !call.integer && count >= GEMM_DEQUANTIZE_FIRST_TOKENS;
  const int64_t extra = is_private_x ? token_bytes(columns) * count : is_large_m ? large_m_scratch_bytes(count) : 0;
  char* scratch = thread_scratch.take(columns * 4 + extra);
  if (is_private_x) memory = scratch + columns * 4;
  int64_t number = 0;
  for (int64_t token = 0, width; token < count; token += width, ++number) {
    width = x_tile_width(count - token);
    if (is_private_x || number % threads == thread)
      fill_x_tile(call, x_tile_at(memory, columns, token, width), start + token, (float*)scratch);
  }
  if (!is_private_x) {
#pragma omp barrier
  }
  const int64_t first = panels * thread / threads, last = panels * (thread + 1) / threads;
  if (is_large_m) run_large_m_panels(call, memory, first, last, start, count, (float*)(scratch + columns * 4));
  else run_panels(call, memory, first, last, start, count);
  if (!is_private_x) {
#pragma omp barrier
  }
}

EXPORT void linear(const LinearArgs* call) {
  const int64_t columns = call->weight->columns, tokens = call->tokens;
  const int64_t work = columns * call->weight->rows * tokens;
  const int threads = work < GEMM_MIN_PARALLEL_WORK ? 1 : call->threads;
  const bool has_private_x = tokens <= GEMM_PRIVATE_X_TOKENS;
  if (has_private_x && threads == 1) return run_thread(*call, nullptr, 0, tokens, 0, 1);
  const int64_t chunk = tokens < GEMM_CHUNK_TOKENS ? tokens : GEMM_CHUNK_TOKENS;
  char* memory = has_private_x ? nullptr : shared_scratch.take(token_bytes(columns) * chunk);
#pragma omp parallel num_threads(threads)
  for (int64_t start = 0; start < tokens; start += chunk) {
    const int64_t count = tokens - start < chunk ? tokens - start : chunk;
    run_thread(*call, memory, start, count, omp_get_thread_num(), omp_get_num_threads());
  }
}

// The same as a native kernel that can be recorded: the array is the struct itself.
EXPORT int64_t linear_kernel(const int64_t* call) {
  linear((const LinearArgs*)call);
  return 0;
}

EXPORT const char* instructions(void) { return INSTRUCTIONS; }
EXPORT int64_t weight_size(void) { return sizeof(Weight); }
EXPORT int64_t call_size(void) { return sizeof(LinearArgs); }
