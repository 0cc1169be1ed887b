// Sixteen rows at a time in plain C++: the compiler's own vectors, on any machine.
#define INSTRUCTIONS "generic"
// panels and tokens whose sums are kept at once

typedef uint8_t Bytes __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));

INLINE Bytes load_bytes(const uint8_t* from) {
  Bytes result;
  __builtin_memcpy(&result, from, 64);
  return result;
}
INLINE Bytes byte_table(const uint8_t* sixteen) {
  Bytes result;
  for (int i = 0; i < 64; ++i) result[i] = sixteen[i % 16];
  return result;
}
INLINE Bytes low_codes(Bytes table, Bytes packed) {
  Bytes result;
  for (int i = 0; i < 64; ++i) result[i] = table[packed[i] & 15];
  return result;
}
INLINE Bytes high_codes(Bytes table, Bytes packed) { return low_codes(table, packed >> 4); }

INLINE Ints all_ints(int32_t x) { return x - Ints{}; }
INLINE Floats all(float x) { return x - Floats{}; }
INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
INLINE Floats multiply(Floats a, Floats b) { return a * b; }
INLINE Floats add(Floats a, Floats b) { return a + b; }
INLINE Floats fma(Floats a, Floats b, Floats c) {
  Floats result;
  for (int i = 0; i < 16; ++i) result[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return result;
}

INLINE Ints dot_bytes(Ints sum, Bytes codes, const int8_t* x) {
  for (int row = 0; row < 16; ++row)
    for (int i = 0; i < 4; ++i) sum[row] += (int32_t)codes[4 * row + i] * (int32_t)x[i];
  return sum;
}
INLINE Ints dot_nibbles(Ints sum, Bytes codes, const int8_t* x) { return dot_bytes(sum, codes, x); }

INLINE Floats load_f32(const float* from) {
  Floats result;
  __builtin_memcpy(&result, from, 64);
  return result;
}
INLINE Floats load_f16(const uint16_t* from) {
  Floats result;
  for (int i = 0; i < 16; ++i) result[i] = widen(f16{from[i]});
  return result;
}
INLINE Floats load_bf16(const uint16_t* from) {
  Floats result;
  for (int i = 0; i < 16; ++i) result[i] = widen(bf16{from[i]});
  return result;
}
INLINE Floats load_u8(const uint8_t* from) {
  Floats result;
  for (int i = 0; i < 16; ++i) result[i] = from[i];
  return result;
}
INLINE Floats load_i8(const int8_t* from) {
  Floats result;
  for (int i = 0; i < 16; ++i) result[i] = from[i];
  return result;
}
INLINE void store_f32(float* to, Floats x) { __builtin_memcpy(to, &x, 64); }

template <int shift> INLINE Floats nibble_value(const float* table, Bytes packed) {
  Floats result;
  for (int i = 0; i < 16; ++i) result[i] = table[((Words)packed)[i] >> shift & 15];
  return result;
}
template <int shift> INLINE Floats byte_value(Bytes packed, float offset) {
  return to_floats((Ints)((Words)packed >> shift & 255)) - offset;
}
template <int shift, int down, uint32_t mask> INLINE Floats float_bits(Bytes packed) {
  Ints top = (Ints)((Words)packed << (24 - shift));
  return (Floats)((top >> down) & (int32_t)mask);
}
