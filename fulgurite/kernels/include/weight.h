// A packed weight as the kernels read it: panels of 16 rows, blocks of 32 columns.
//
//   codes     [N / 16][K / 32][vectors][16 rows][4 bytes]
//             nibbles: 4 vectors; byte j of vector v holds column 8v + j low and 8v + 4 + j high
//             bytes:   8 vectors; byte j of vector v holds column 4v + j
//   scales    [N / 16][K / group][16], minimums alike; bytes among them are multiplied by a float16 that
//             256 columns share: super_scales [N / 16][K / 256][16], super_minimums alike
//
//   value = row_scale * (scale * (table[code] + offset) + minimum)          nibbles
//   value = row_scale * (scale * (code - 128) + minimum)                    bytes
//   value = row_scale * scale * e4m3(code)  or  e5m2(code)                  small floats
const int ROWS = 16, BLOCK = 32, SUPER = 256;

enum Codes { NIBBLES, BYTES, E4M3, E5M2 };
enum Number { ABSENT, F16, BF16, F32, U8, I8 };

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
  uint8_t table[16];        // nibble -> unsigned number
  float values[16];         // nibble -> table[nibble] + offset
};

INLINE int64_t block_bytes(const Weight& w) { return w.codes_kind == NIBBLES ? 256 : 512; }

// The scales (or minimums) of one group in a panel; `super` is the place of their 256 columns.
INLINE Floats load_numbers(const uint8_t* from, int32_t type, int64_t index, const uint16_t* supers,
                           int64_t super) {
  if (type == U8) return multiply(load_u8(from + index), load_f16(supers + super));
  if (type == I8) return multiply(load_i8((const int8_t*)from + index), load_f16(supers + super));
  if (type == F16) return load_f16((const uint16_t*)from + index);
  if (type == BF16) return load_bf16((const uint16_t*)from + index);
  if (type == F32) return load_f32((const float*)from + index);
  return all(1.0f);
}
