// The layout of a quantized weight: panels of 16 rows, blocks of 32 columns.
//
//   codes     [N / 16][K / 32][vectors][16 rows][4 bytes]
//             4 bits:  4 vectors; byte j of vector v holds column 8v + j low and 8v + 4 + j high
//             8 bits:  8 vectors; byte j of vector v holds column 4v + j
//   scales    [N / 16][K / group][16], minimums in the same way. Bytes are multiplied by a float16 that 256
//             columns share: super_scales [N / 16][K / 256][16], super_minimums in the same way
//
//   value = row_scale * (scale * (table[code] + offset) + minimum)          4-bit codes
//   value = row_scale * (scale * (code - 128) + minimum)                    8-bit codes
//   value = row_scale * scale * e4m3(code)  or  e5m2(code)                  FP8
const int PANEL_ROWS = 16, BLOCK_COLUMNS = 32, SUPER_BLOCK_COLUMNS = 256;

enum CodeKind { CODES_4BIT, CODES_8BIT, E4M3, E5M2 };
enum ScaleType { NO_SCALE, F16, BF16, F32, U8, I8 };

struct Weight {
  int64_t rows, columns;  // N, and K rounded up to whole blocks
  int64_t group;          // columns that share a scale: 16, or a multiple of 32
  int32_t codes_kind, scale_type, minimum_type, offset;
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* minimums;
  const float* row_scales;  // null: ones
  const uint16_t* super_scales;
  const uint16_t* super_minimums;
  uint8_t table[16];        // 4-bit code -> unsigned integer
  float values[16];         // 4-bit code -> table[code] + offset
};

INLINE int64_t block_bytes(const Weight& w) { return w.codes_kind == CODES_4BIT ? 256 : 512; }

// The scales (or minimums) of one group of a panel; `super` is the index of their super block.
INLINE Floats load_scales(const uint8_t* from, int32_t type, int64_t index, const uint16_t* supers,
                           int64_t super) {
  if (type == U8) return multiply(load_u8(from + index), load_f16(supers + super));
  if (type == I8) return multiply(load_i8((const int8_t*)from + index), load_f16(supers + super));
  if (type == F16) return load_f16((const uint16_t*)from + index);
  if (type == BF16) return load_bf16((const uint16_t*)from + index);
  if (type == F32) return load_f32((const float*)from + index);
  return all(1.0f);
}
