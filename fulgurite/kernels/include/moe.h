// Around the experts' matmuls: experts chosen from logits, pairs of token and expert sorted, each
// token's rows summed. Numbers are floats while they are worked on, and rounded once.

// ---- choosing ----------------------------------------------------------------------------------------

// A float as an integer with the same order, NaN above all and both zeros equal.
INLINE int32_t rank_of(float x) {
  if (x != x) return 0x7fffffff;
  const int32_t code = __builtin_bit_cast(int32_t, x + 0.0f);
  return code < 0 ? code ^ 0x7fffffff : code;
}

const int32_t NEVER = -0x7fffffff - 1;  // below every rank: chosen already, or not allowed

// The first of the largest; it is taken out.
INLINE int64_t take_best(int32_t* ranks, int64_t count) {
  int32_t top = NEVER;
  for (int64_t i = 0; i < count; ++i) top = ranks[i] > top ? ranks[i] : top;
  int64_t best = 0;
  while (ranks[best] != top) ++best;
  ranks[best] = NEVER;
  return best;
}

struct Rule {
  int64_t tokens, experts, per_token, sigmoid, topk_before_scoring, renormalize, groups, topk_groups, by_two;
  float scaling;
};

// what a group is worth: its best choice, or the sum of its best two
static float strength(const float* choice, int64_t size, bool two) {
  int32_t top = NEVER, next = NEVER;
  float best = 0.0f, second = 0.0f;
  for (int64_t i = 0; i < size; ++i) {
    const int32_t rank = rank_of(choice[i]);
    if (rank > top) second = best, next = top, best = choice[i], top = rank;
    else if (rank > next) second = choice[i], next = rank;
  }
  return two && size > 1 ? best + second : best;
}

static void softmax_row(float* x, int64_t count) {
  float most = -__builtin_inff(), total = 0.0f;
  for (int64_t i = 0; i < count; ++i) most = x[i] > most || x[i] != x[i] ? x[i] : most;
  for (int64_t i = 0; i < count; i += LANES) store_partial(x + i, vector_exp(load_partial(x + i, count - i) - most), count - i);
  for (int64_t i = 0; i < count; ++i) total += x[i];
  for (int64_t i = 0; i < count; ++i) x[i] /= total;
}
static void score_row(const Rule& rule, float* x, int64_t count) {
  if (!rule.sigmoid) return softmax_row(x, count);
  for (int64_t i = 0; i < count; ++i) x[i] = sigmoid(x[i]);
}

// One token. `scores` comes in as logits; `choice`, `ranks` are room for as many numbers.
static void choose(const Rule& rule, float* scores, const float* bias, float* choice, int32_t* ranks,
                   float* weights, int64_t* experts) {
  const int64_t count = rule.experts, size = count / rule.groups;
  const bool limited = rule.topk_groups < rule.groups;
  const bool by_logits = !bias && !(limited && rule.by_two);
  for (int64_t i = 0; i < count; ++i) choice[i] = scores[i];
  if (!rule.topk_before_scoring) score_row(rule, scores, count);
  if (!by_logits)
    for (int64_t i = 0; i < count; ++i) choice[i] = scores[i] + (bias ? bias[i] : 0.0f);
  for (int64_t i = 0; i < count; ++i) ranks[i] = rank_of(choice[i]);
  if (limited) {
    int32_t groups[rule.groups];
    for (int64_t g = 0; g < rule.groups; ++g) groups[g] = rank_of(strength(choice + g * size, size, rule.by_two));
    for (int64_t kept = 0; kept < rule.topk_groups; ++kept) take_best(groups, rule.groups);
    for (int64_t i = 0; i < count; ++i) ranks[i] = groups[i / size] == NEVER ? ranks[i] : NEVER;
  }
  float total = 0.0f;
  for (int64_t k = 0; k < rule.per_token; ++k) {
    experts[k] = take_best(ranks, count);
    weights[k] = scores[experts[k]];
  }
  if (rule.topk_before_scoring) score_row(rule, weights, rule.per_token);
  for (int64_t k = 0; k < rule.per_token; ++k) total += weights[k];
  for (int64_t k = 0; k < rule.per_token; ++k)
    weights[k] = (rule.renormalize ? weights[k] / (total + 1e-20f) : weights[k]) * rule.scaling;
}

// a: logits (float, overwritten), choice bias (float) or 0, weights, experts, the rule's numbers, threads,
// stride of logits
EXPORT int64_t route(const int64_t* a) {
  const Rule rule = {a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], unpack_double(a[13])};
  const int threads = choose_num_threads(rule.tokens * rule.experts, 1 << 12, (int)a[14]);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < rule.tokens; ++t) {
    float choice[rule.experts];
    int32_t ranks[rule.experts];
    choose(rule, (float*)a[0] + t * a[15], (const float*)a[1], choice, ranks,
           (float*)a[2] + t * rule.per_token, (int64_t*)a[3] + t * rule.per_token);
  }
  return 0;
}

// ---- sorting -----------------------------------------------------------------------------------------

// a: experts, their kind (0 int64, 1 int32), counts, offsets, tokens, slots, places, T, k, E, room for E + 1
EXPORT int64_t moe_sort(const int64_t* a) {
  const int64_t tokens = a[7], per_token = a[8], experts = a[9];
  int32_t *counts = (int32_t*)a[2], *offsets = (int32_t*)a[3], *next = (int32_t*)a[10];
  auto expert_of = [&](int64_t pair) {
    const int64_t e = a[1] ? ((const int32_t*)a[0])[pair] : ((const int64_t*)a[0])[pair];
    return e < 0 || e >= experts ? experts : e;
  };
  for (int64_t e = 0; e <= experts; ++e) next[e] = 0;
  for (int64_t pair = 0; pair < tokens * per_token; ++pair) ++next[expert_of(pair)];
  int32_t start = 0;
  for (int64_t e = 0; e <= experts; ++e) {
    const int32_t count = next[e];
    next[e] = start;
    start += count;
    if (e < experts) counts[e] = count, offsets[e] = start;
  }
  for (int64_t t = 0, pair = 0; t < tokens; ++t)
    for (int64_t k = 0; k < per_token; ++k, ++pair) {
      const int32_t place = next[expert_of(pair)]++;
      ((int32_t*)a[4])[place] = (int32_t)t;
      ((int32_t*)a[5])[place] = (int32_t)k;
      ((int32_t*)a[6])[pair] = place;
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

// ---- summing -----------------------------------------------------------------------------------------

// out[t] = sum over k of weights[t, k] * y[places[t, k]], in this order
template <class T> static void combine_tokens(const int64_t* a) {
  const int64_t tokens = a[4], per_token = a[5], size = a[6];
  const int threads = choose_num_threads(tokens * per_token * size, 1 << 15, (int)a[9]);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t* place = (const int32_t*)a[1] + t * per_token;
    const float* weight = a[2] ? (const float*)a[2] + t * per_token : nullptr;
    for (int64_t c = 0; c < size; c += LANES) {
      vec total = {};
      for (int64_t k = 0; k < per_token; ++k) {
        const vec row = load_partial((const T*)a[0] + place[k] * a[7] + c, size - c);
        total += weight ? row * weight[k] : row;
      }
      store_partial((T*)a[3] + t * size + c, total, size - c);
    }
  }
}
// a: y, places, weights or 0, out, T, k, columns, stride of y, kind, threads, rows of y
EXPORT int64_t moe_combine(const int64_t* a) {
  const int32_t* places = (const int32_t*)a[1];
  for (int64_t pair = 0; pair < a[4] * a[5]; ++pair)
    if (places[pair] < 0 || places[pair] >= a[10]) return 1;  // as grouped_gemm.h says it
#define CALL(T) combine_tokens<T>(a)
  DISPATCH_DTYPE(a[8], CALL)
#undef CALL
  return 0;
}
