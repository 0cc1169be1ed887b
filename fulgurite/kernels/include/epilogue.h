// Epilogues of float32 GEMMs and convolutions: y = activation(sum * scale + bias + residual).
//
// Activations are those of `kernels/conv/activations.py`, with two float parameters. They use the
// functions of math.h, the same as generated kernels.
enum Activation {
  NO_ACTIVATION, RELU, CLAMP, SILU, SIGMOID, TANH, GELU_ERF, GELU_TANH, HARDSWISH, HARDSIGMOID,
  LEAKY_RELU, ELU
};

struct Epilogue {
  const float *bias, *scale;  // one value a column, or null; with a scale there is a bias
  int64_t activation;
  float low, high;        // CLAMP: bounds. LEAKY_RELU: the slope. ELU: alpha.
};

// a minimum and a maximum that keep NaN, as torch's do
INLINE float clamp_value(float x, float low, float high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

// not inlined: a copy in every tile would take seconds to compile
__attribute__((noinline)) static void activate(float* y, int64_t count, const Epilogue& e) {
#define EACH(expression) \
  _Pragma("omp simd") for (int64_t k = 0; k < count; ++k) { const float x = y[k]; y[k] = expression; } \
  break;
  const float low = e.low, high = e.high;
  switch (e.activation) {
    case RELU: EACH(x < 0.0f ? 0.0f : x)
    case CLAMP: EACH(clamp_value(x, low, high))
    case SILU: EACH(x / (1.0f + exp(-x)))
    case SIGMOID: EACH(sigmoid(x))
    case TANH: EACH(tanh(x))
    case GELU_ERF: EACH(0.5f * x * (1.0f + erf(x * 0.707106781f)))
    case GELU_TANH: EACH(0.5f * x * (1.0f + tanh(0.797884561f * (x + 0.044715f * x * x * x))))
    case HARDSWISH: EACH(x * clamp_value(x + 3.0f, 0.0f, 6.0f) / 6.0f)
    case HARDSIGMOID: EACH(clamp_value(x + 3.0f, 0.0f, 6.0f) / 6.0f)
    case LEAKY_RELU: EACH(x > 0.0f ? x : x * low)
    case ELU: EACH(x > 0.0f ? x : low * expm1(x))
  }
#undef EACH
}
