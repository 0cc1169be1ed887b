// Routing, sorting and combining of experts. Everything is computed in float and rounded once.

// ---- routing -----------------------------------------------------------------------------------------

// A float as an integer of the same order; NaN is the largest, both zeros are equal.
INLINE int32_t sort_key(float x) {
  if (x != x) return 0x7fffffff;
  const int32_t code = __builtin_bit_cast(int32_t, x + 0.0f);
  return code < 0 ? code ^ 0x7fffffff : code;
}

const int32_t EXCLUDED = -0x7fffffff - 1;  // below every key: selected already, or not allowed

// The first of the largest keys; it is excluded from then on.
INLINE int64_t pop_best(int32_t* keys, int64_t count) {
  int32_t top = EXCLUDED;
  for (int64_t i = 0; i < count; ++i) top = keys[i] > top ? keys[i] : top;
  int64_t best = 0;
  while (keys[best] != top) ++best;
  keys[best] = EXCLUDED;
  return best;
}

struct RouterConfig {
  int64_t tokens, experts, top_k, sigmoid, topk_before_scoring, renormalize, num_groups, topk_groups, is_top2_sum;
  float scaling_factor;
};

// The score of a group: its best choice, or the sum of its best two.
static float group_score(const float* choice, int64_t size, bool two) {
  int32_t top = EXCLUDED, next_position = EXCLUDED;
  float best = 0.0f, second = 0.0f;
  for (int64_t i = 0; i < size; ++i) {
    const int32_t key = sort_key(choice[i]);
    if (key > top) second = best, next_position = top, best = choice[i], top = key;
    else if (key > next_position) second = choice[i], next_position = key;
  }
  return two && size > 1 ? best + second : best;
}

static void softmax_row(float* x, int64_t count) {
  float row_max = -__builtin_inff(), total = 0.0f;
  for (int64_t i = 0; i < count; ++i) row_max = x[i] > row_max || x[i] != x[i] ? x[i] : row_max;
  for (int64_t i = 0; i < count; i += LANES) store_partial(x + i, vector_exp(load_partial(x + i, count - i) - row_max), count - i);
  for (int64_t i = 0; i < count; ++i) total += x[i];
  for (int64_t i = 0; i < count; ++i) x[i] /= total;
}
static void score_row(const RouterConfig& config, float* x, int64_t count) {
  if (!config.sigmoid) return softmax_row(x, count);
  for (int64_t i = 0; i < count; ++i) x[i] = sigmoid(x[i]);
}

// One token. `scores` holds logits at first; `choice` and `keys` are scratch of the same size.
static void select_topk(const RouterConfig& config, float* scores, const float* bias, float* choice, int32_t* keys,
                   float* weights, int64_t* experts) {
  const int64_t count = config.experts, size = count / config.num_groups;
  const bool selects_groups = config.topk_groups < config.num_groups;
  const bool by_logits = !bias && !(selects_groups && config.is_top2_sum);
  for (int64_t i = 0; i < count; ++i) choice[i] = scores[i];
  if (!config.topk_before_scoring) score_row(config, scores, count);
  if (!by_logits)
    for (int64_t i = 0; i < count; ++i) choice[i] = scores[i] + (bias ? bias[i] : 0.0f);
  for (int64_t i = 0; i < count; ++i) keys[i] = sort_key(choice[i]);
  if (selects_groups) {
    int32_t group_keys[config.num_groups];
    for (int64_t g = 0; g < config.num_groups; ++g) group_keys[g] = sort_key(group_score(choice + g * size, size, config.is_top2_sum));
    for (int64_t g = 0; g < config.topk_groups; ++g) pop_best(group_keys, config.num_groups);
    for (int64_t i = 0; i < count; ++i) keys[i] = group_keys[i / size] == EXCLUDED ? keys[i] : EXCLUDED;
  }
  float total = 0.0f;
  for (int64_t k = 0; k < config.top_k; ++k) {
    experts[k] = pop_best(keys, count);
    weights[k] = scores[experts[k]];
  }
  if (config.topk_before_scoring) score_row(config, weights, config.top_k);
  for (int64_t k = 0; k < config.top_k; ++k) total += weights[k];
  for (int64_t k = 0; k < config.top_k; ++k)
    weights[k] = (config.renormalize ? weights[k] / (total + 1e-20f) : weights[k]) * config.scaling_factor;
}

// a: logits (float, overwritten), correction bias (float) or 0, weights, experts, fields of the
// config, threads, stride of logits
EXPORT int64_t route(const int64_t* a) {
  const RouterConfig config = {a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], unpack_double(a[13])};
  const int threads = choose_num_threads(config.tokens * config.experts, ROUTE_MIN_PARALLEL_WORK, (int)a[14]);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < config.tokens; ++t) {
    float choice[config.experts];
    int32_t keys[config.experts];
    select_topk(config, (float*)a[0] + t * a[15], (const float*)a[1], choice, keys,
           (float*)a[2] + t * config.top_k, (int64_t*)a[3] + t * config.top_k);
  }
  return 0;
}

// ---- sorting -----------------------------------------------------------------------------------------

// a: experts, their dtype (0 int64, 1 int32), counts, offsets, tokens, slots, positions, T, k, E,
// scratch of E + 1
EXPORT int64_t moe_sort(const int64_t* a) {
  const int64_t tokens = a[7], top_k = a[8], experts = a[9];
  int32_t *counts = (int32_t*)a[2], *offsets = (int32_t*)a[3], *next_position = (int32_t*)a[10];
  auto expert_of = [&](int64_t pair) {
    const int64_t e = a[1] ? ((const int32_t*)a[0])[pair] : ((const int64_t*)a[0])[pair];
    return e < 0 || e >= experts ? experts : e;
  };
  for (int64_t e = 0; e <= experts; ++e) next_position[e] = 0;
  for (int64_t pair = 0; pair < tokens * top_k; ++pair) ++next_position[expert_of(pair)];
  int32_t start = 0;
  for (int64_t e = 0; e <= experts; ++e) {
    const int32_t count = next_position[e];
    next_position[e] = start;
    start += count;
    if (e < experts) counts[e] = count, offsets[e] = start;
  }
  for (int64_t t = 0, pair = 0; t < tokens; ++t)
    for (int64_t k = 0; k < top_k; ++k, ++pair) {
      const int32_t position = next_position[expert_of(pair)]++;
      ((int32_t*)a[4])[position] = (int32_t)t;
      ((int32_t*)a[5])[position] = (int32_t)k;
      ((int32_t*)a[6])[pair] = position;
    }
  return 0;
}

// a: weights [T, k], tokens, slots, out [S], S, k, T
EXPORT int64_t moe_gather_weights(const int64_t* a) {
  const int32_t *tokens = (const int32_t*)a[1], *slots = (const int32_t*)a[2];
  for (int64_t s = 0; s < a[4]; ++s)
    if (tokens[s] < 0 || tokens[s] >= a[6] || slots[s] < 0 || slots[s] >= a[5]) return 1;
  for (int64_t s = 0; s < a[4]; ++s)
    ((float*)a[3])[s] = ((const float*)a[0])[tokens[s] * a[5] + slots[s]];
  return 0;
}

// ---- combining ---------------------------------------------------------------------------------------

// out[t] = sum over k of weights[t, k] * y[positions[t, k]], in this order
template <class T> static void combine_tokens(const int64_t* a) {
  const int64_t tokens = a[4], top_k = a[5], size = a[6];
  const int threads = choose_num_threads(tokens * top_k * size, COMBINE_MIN_PARALLEL_WORK, (int)a[9]);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t* position = (const int32_t*)a[1] + t * top_k;
    const float* weight = a[2] ? (const float*)a[2] + t * top_k : nullptr;
    for (int64_t c = 0; c < size; c += LANES) {
      vec total = {};
      for (int64_t k = 0; k < top_k; ++k) {
        const vec row = load_partial((const T*)a[0] + position[k] * a[7] + c, size - c);
        total += weight ? row * weight[k] : row;
      }
      store_partial((T*)a[3] + t * size + c, total, size - c);
    }
  }
}
// a: y, positions, weights or 0, out, T, k, columns, stride of y, dtype, threads, rows of y
EXPORT int64_t moe_combine(const int64_t* a) {
  const int32_t* positions = (const int32_t*)a[1];
  for (int64_t pair = 0; pair < a[4] * a[5]; ++pair)
    if (positions[pair] < 0 || positions[pair] >= a[10]) return 1;  // ROW_OUT_OF_RANGE of grouped_gemm.h
#define CALL(T) combine_tokens<T>(a)
  DISPATCH_DTYPE(a[8], CALL)
#undef CALL
  return 0;
}
