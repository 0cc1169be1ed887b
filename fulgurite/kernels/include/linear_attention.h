// Layers with a state a sequence: a causal convolution and the gated delta rule, in float32. Both run token by
// token, so the outputs of a token don't depend on how a sequence is cut into calls.

const int64_t ERROR_SEQUENCES = 1, ERROR_SLOT = 2;

// query_start_loc rises from 0 to at most `tokens`, and each slot exists or is negative (padding).
INLINE int64_t check_sequences(const int32_t* starts, const int32_t* lengths, const int32_t* slots, int64_t sequences,
                               int64_t tokens, int64_t num_slots) {
  if (starts[0] != 0 || starts[sequences] > tokens) return ERROR_SEQUENCES;
  for (int64_t s = 0; s < sequences; ++s) {
    if (starts[s + 1] < starts[s] || lengths[s] < starts[s + 1] - starts[s]) return ERROR_SEQUENCES;
    if (slots[s] >= num_slots) return ERROR_SLOT;
  }
  return 0;
}

// ---- out[t] = activation(bias + sum_w weight[w] x[t - W + 1 + w]); the state is the last W - 1 inputs -----------

template <class T> struct Conv {
  const T *x, *weight, *bias;
  T *state, *out;
  const int32_t *starts, *lengths, *slots;
  int64_t tokens, channels, taps, x_stride, sequences;
  bool use_silu;

  // sixteen channels of the input `back` tokens before token t of the sequence
  inline vec input(int64_t s, int64_t t, int64_t back, int64_t c, int64_t left, bool is_new) const {
    const int64_t row = t - back;
    if (row >= 0) return load_partial(x + (starts[s] + row) * x_stride + c, left);
    if (is_new) return vec{};
    return load_partial(state + ((int64_t)slots[s] * (taps - 1) + taps - 1 + row) * channels + c, left);
  }

  void sequence(int64_t s, int64_t c) const {
    const int64_t count = starts[s + 1] - starts[s], left = channels - c, last = taps - 1;
    if (slots[s] < 0 || count == 0) return;
    const bool is_new = lengths[s] == count;
    for (int64_t t = 0; t < count; ++t) {
      vec sum = bias ? load_partial(bias + c, left) : vec{};
      for (int64_t w = 0; w < taps; ++w)
        sum += load_partial(weight + w * channels + c, left) * input(s, t, last - w, c, left, is_new);
      store_partial(out + (starts[s] + t) * channels + c, use_silu ? silu(sum) : sum, left);
    }
    // row w of the new state is `last - 1 - w` tokens before the last one: an old row that comes later
    for (int64_t w = 0; w < last; ++w) {
      const vec v = input(s, count - 1, last - 1 - w, c, left, is_new);
      store_partial(state + ((int64_t)slots[s] * last + w) * channels + c, v, left);
    }
  }

  void run(int max_threads) const {
    const int64_t blocks = (channels + LANES - 1) / LANES;
    const int threads = choose_num_threads(tokens * channels * taps, 1 << 15, max_threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t block = 0; block < blocks; ++block)
      for (int64_t s = 0; s < sequences; ++s) sequence(s, block * LANES);
  }
};

// a: x, weight [W, C], bias or 0, states [R, W - 1, C], out, query_start_loc, seq_lens, slots, tokens, channels, taps,
// row stride of x, sequences, slots, dtype, silu, threads
EXPORT int64_t causal_conv(const int64_t* a) {
  const int32_t *starts = (const int32_t*)a[5], *lengths = (const int32_t*)a[6], *slots = (const int32_t*)a[7];
  const int64_t status = check_sequences(starts, lengths, slots, a[12], a[8], a[13]);
  if (status) return status;
#define CALL(T) \
  Conv<T>{(const T*)a[0], (const T*)a[1], (const T*)a[2], (T*)a[3], (T*)a[4], starts, lengths, slots, a[8], a[9], \
          a[10], a[11], a[12], (bool)a[15]}.run((int)a[16])
  DISPATCH_DTYPE(a[14], CALL)
#undef CALL
  return 0;
}

// ---- the gated delta rule ------------------------------------------------------------------------------------------
//
//   S = decay S + k (beta (v - k^T decay S))^T,   out = q^T S

const int TILE = 8;  // vectors of a value that one task keeps in registers

INLINE float load_number(const void* from, int64_t index, int64_t dtype) {
  if (dtype == 0) return ((const float*)from)[index];
  return dtype == 1 ? widen(((const bf16*)from)[index]) : widen(((const f16*)from)[index]);
}
INLINE float softplus(float x) { return x > 20.0f ? x : log1p(exp(x)); }

// to = x / |x| * scale, padded with zeros
template <class T> static void normalize(const T* x, int64_t size, float scale, float* to) {
  widen_row(x, size, to);
  vec squares{};
  for (int64_t c = 0; c < size; c += LANES) squares += load(to + c) * load(to + c);
  const float factor = rsqrt(lane_sum(squares) + 1e-6f) * scale;
  for (int64_t c = 0; c < size; c += LANES) store_vec(to + c, load(to + c) * factor);
}

template <class T> struct DeltaRule {
  const T *q, *k, *v, *a, *b;
  const void *a_log, *dt_bias;
  float* state;
  T* out;
  const int32_t *starts, *lengths, *slots;
  int64_t tokens, key_heads, heads, key_dim, value_dim, sequences;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head, a_token, b_token, a_log_dtype, dt_bias_dtype;

  // `VECS` vectors of the values of head n in sequence s, from column c on
  template <int VECS> void columns(int64_t s, int64_t n, int64_t c) const {
    const int64_t count = starts[s + 1] - starts[s], key_head = n / (heads / key_heads), left = value_dim - c;
    float* rows = state + ((int64_t)slots[s] * heads + n) * key_dim * value_dim + c;
    if (lengths[s] == count)
      for (int64_t i = 0; i < key_dim; ++i)
        for (int64_t l = 0; l < min_i64(left, VECS * LANES); ++l) rows[i * value_dim + l] = 0.0f;
    const int64_t padded = (key_dim + LANES - 1) / LANES * LANES;
    float q_row[padded], k_row[padded];
    const float rate = exp(load_number(a_log, n, a_log_dtype)), shift = load_number(dt_bias, n, dt_bias_dtype);
    const float scale = rsqrt((float)key_dim);
    for (int64_t t = starts[s]; t < starts[s + 1]; ++t) {
      normalize(q + t * q_token + key_head * q_head, key_dim, scale, q_row);
      normalize(k + t * k_token + key_head * k_head, key_dim, 1.0f, k_row);
      const float decay = exp(-rate * softplus(widen(a[t * a_token + n]) + shift));
      const float beta = sigmoid(widen(b[t * b_token + n]));
      vec read[VECS] = {}, delta[VECS], result[VECS] = {};
      for (int64_t i = 0; i < key_dim; ++i) {
        UNROLL
        for (int j = 0; j < VECS; ++j)
          read[j] += k_row[i] * (decay * load_partial(rows + i * value_dim + j * LANES, left - j * LANES));
      }
      const T* value = v + t * v_token + n * v_head + c;
      UNROLL
      for (int j = 0; j < VECS; ++j)
        delta[j] = beta * (load_partial(value + j * LANES, left - j * LANES) - read[j]);
      for (int64_t i = 0; i < key_dim; ++i) {
        UNROLL
        for (int j = 0; j < VECS; ++j) {
          float* row = rows + i * value_dim + j * LANES;
          const vec updated = decay * load_partial(row, left - j * LANES) + k_row[i] * delta[j];
          store_partial(row, updated, left - j * LANES);
          result[j] += q_row[i] * updated;
        }
      }
      T* to = out + (t * heads + n) * value_dim + c;
      UNROLL
      for (int j = 0; j < VECS; ++j) store_partial(to + j * LANES, result[j], left - j * LANES);
    }
  }

  void run(int max_threads) const {
    const int64_t tiles = (value_dim + TILE * LANES - 1) / (TILE * LANES), tasks = sequences * heads * tiles;
    const int threads = choose_num_threads(tokens * heads * key_dim * value_dim, 1 << 14, max_threads);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t task = 0; task < tasks; ++task) {
      const int64_t s = task / (heads * tiles), n = task / tiles % heads, c = task % tiles * TILE * LANES;
      if (slots[s] < 0 || starts[s + 1] == starts[s]) continue;
      const int64_t vectors = (value_dim - c + LANES - 1) / LANES;
      if (vectors >= TILE) columns<TILE>(s, n, c);
      else
        for (int64_t j = 0; j < vectors; ++j) columns<1>(s, n, c + j * LANES);
    }
  }
};

// a: q, k, v, a, b, A_log, dt_bias, states [R, N, D, V], out, query_start_loc, seq_lens, slots, tokens, key heads,
// value heads, key size, value size, sequences, strides (token, head) of q, k and v, token strides of a and b, dtypes
// of A_log and dt_bias, slots, dtype, threads
EXPORT int64_t gated_delta_rule(const int64_t* a) {
  const int32_t *starts = (const int32_t*)a[9], *lengths = (const int32_t*)a[10], *slots = (const int32_t*)a[11];
  const int64_t status = check_sequences(starts, lengths, slots, a[17], a[12], a[28]);
  if (status) return status;
#define CALL(T) \
  DeltaRule<T>{(const T*)a[0], (const T*)a[1], (const T*)a[2], (const T*)a[3], (const T*)a[4], (const void*)a[5], \
               (const void*)a[6], (float*)a[7], (T*)a[8], starts, lengths, slots, a[12], a[13], a[14], a[15], a[16], \
               a[17], a[18], a[19], a[20], a[21], a[22], a[23], a[24], a[25], a[26], a[27]}.run((int)a[30])
  DISPATCH_DTYPE(a[29], CALL)
#undef CALL
  return 0;
}
