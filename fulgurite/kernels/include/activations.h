// Rows of x, converted to the layout of the linear kernels: float, or q8_0 (int8 in blocks of 32
// with a float16 scale) with the sums that offsets and minimums are multiplied by.
enum Type { TYPE_F32, TYPE_BF16, TYPE_F16 };

extern "C" void* malloc(unsigned long);
extern "C" void free(void*);

INLINE float read(const void* from, int32_t type, int64_t i) {
  if (type == TYPE_F32) return ((const float*)from)[i];
  return type == TYPE_BF16 ? widen(((const bf16*)from)[i]) : widen(((const f16*)from)[i]);
}
INLINE void write(void* to, int32_t type, int64_t i, float x) {
  if (type == TYPE_F32) ((float*)to)[i] = x;
  else if (type == TYPE_BF16) store((bf16*)to + i, x);
  else store((f16*)to + i, x);
}

// Up to eight rows of x, interleaved in the order that a kernel reads them: [K / 32] blocks of [2
// halves] of [width] tokens.
struct XTile {
  int64_t width;    // tokens: 1, 2, 4 or 8
  float* values;    // [K][width]               float kernels
  int8_t* codes;    // [K / 32][width][32]      integer kernels
  float* scales;    // [K / 32][width]
  int32_t* offset_sums;  // [K / 16][width]          offset * sum of codes, of a half or (first half) of all
  float* sums;      // [K / 16][width]          sum of scaled codes, in the same way
};

// A tile starts at each multiple of eight tokens; the remaining tokens make smaller tiles.
INLINE int64_t x_tile_width(int64_t left) { return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1; }

INLINE int64_t token_bytes(int64_t columns) {  // whole cache lines
  return (columns * 4 + columns + columns / 32 * 4 + columns / 16 * 8 + 63) / 64 * 64;
}

INLINE XTile x_tile_at(char* memory, int64_t columns, int64_t token, int64_t width) {
  char* at = memory + token_bytes(columns) * token;
  XTile tile;
  tile.width = width;
  tile.values = (float*)at;
  tile.codes = (int8_t*)(at + columns * 4 * width);
  tile.scales = (float*)(at + columns * 5 * width);
  tile.offset_sums = (int32_t*)(tile.scales + columns / 32 * width);
  tile.sums = (float*)(tile.offset_sums + columns / 16 * width);
  return tile;
}

static void read_row(float* row, const void* x, int32_t type, int64_t given, int64_t columns) {
  if (type == TYPE_F32) __builtin_memcpy(row, x, given * 4);
  else if (type == TYPE_BF16)
    for (int64_t k = 0; k < given; ++k) row[k] = widen(((const bf16*)x)[k]);
  else
    for (int64_t k = 0; k < given; ++k) row[k] = widen(((const f16*)x)[k]);
  for (int64_t k = given; k < columns; ++k) row[k] = 0.0f;
}

static void store_floats(XTile tile, int64_t t, const float* row, int64_t columns) {
  for (int64_t k = 0; k < columns; ++k) tile.values[k * tile.width + t] = row[k];
}

// One block of GGUF's q8_0: scale = amax / 127 over finite x, round half away from zero, x divided
// by the scale before it is rounded to float16. A NaN makes the scale NaN; an infinity saturates.
#ifndef QUANTIZE_BLOCK
INLINE float quantize_block(const float* from, int8_t* to, int32_t* sums) {
  float x[BLOCK_COLUMNS];  // local copies, so that the compiler knows they don't alias
  int8_t codes[BLOCK_COLUMNS];
  for (int k = 0; k < BLOCK_COLUMNS; ++k) x[k] = from[k];
  int32_t largest = 0, strange = 0;
  for (int k = 0; k < BLOCK_COLUMNS; ++k) {
    int32_t magnitude = (int32_t)(bits(x[k]) & 0x7fffffffu);
    strange |= magnitude > 0x7f800000 ? 1 : 0;
    magnitude = magnitude >= 0x7f800000 ? 0 : magnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  float scale = as_float((uint32_t)largest) / 127.0f;
  scale = scale > 65504.0f ? 65504.0f : scale;
  const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  for (int k = 0; k < BLOCK_COLUMNS; ++k) {
    float step = x[k] * inverse;
    step = step == step ? step : 0.0f;
    step = step > 127.0f ? 127.0f : step;
    step = step < -127.0f ? -127.0f : step;
    const float whole = __builtin_truncf(step);
    codes[k] = (int8_t)(int32_t)(whole + __builtin_truncf(2.0f * (step - whole)));
  }
  sums[0] = sums[1] = 0;
  for (int k = 0; k < 16; ++k) sums[0] += codes[k];
  for (int k = 16; k < BLOCK_COLUMNS; ++k) sums[1] += codes[k];
  for (int k = 0; k < BLOCK_COLUMNS; ++k) to[k] = codes[k];
  return strange ? __builtin_nanf("") : round_f16(scale);
}
#endif

static void store_codes(XTile tile, int64_t t, const float* row, int64_t columns, int32_t offset,
                        bool per_half) {
  for (int64_t b = 0; b < columns / BLOCK_COLUMNS; ++b) {
    int8_t* codes = tile.codes + (b * tile.width + t) * BLOCK_COLUMNS;
    int32_t sum[2];
    const float scale = quantize_block(row + b * BLOCK_COLUMNS, codes, sum);
    if (!per_half) sum[0] += sum[1];
    tile.scales[b * tile.width + t] = scale;
    for (int h = 0; h < 2; ++h) {
      tile.offset_sums[(2 * b + h) * tile.width + t] = offset * sum[h];
      tile.sums[(2 * b + h) * tile.width + t] = scale * (float)sum[h];
    }
  }
}

// Scratch memory of a thread, cached for the life of the process, like the threads of the pool.
struct Scratch {
  char* memory;
  int64_t size;
  char* take(int64_t bytes) {
    if (bytes > size) {
      free(memory);
      size = bytes;
      memory = (char*)malloc(bytes + 64);
    }
    return (char*)(((uint64_t)memory + 63) / 64 * 64);
  }
};
static thread_local Scratch thread_scratch, shared_scratch;
