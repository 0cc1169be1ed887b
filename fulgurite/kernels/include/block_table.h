// Checks of a paged KV cache's metadata before a kernel reads or writes: block table, offsets, slots.

extern "C" void* malloc(unsigned long);
extern "C" void free(void*);

enum { BAD_QUERY_START_LOC = 1, BLOCK_TABLE_TOO_SHORT = 2, NO_SUCH_BLOCK = 3, NO_SUCH_SLOT = 4 };

// A block table of `width` blocks a row, `row_stride` apart, out of `num_blocks` blocks of `block_size` slots.
// `first_key(s, count)` is the first key that the `count` query tokens of sequence s read: blocks before it
// may have been freed and given to another sequence.
template <class FirstKey>
static int64_t check_block_table(const int32_t* query_start_loc, const int32_t* seq_lens, const int32_t* block_table,
                                 int64_t row_stride, int64_t sequences, int64_t tokens, int64_t block_size,
                                     int64_t width, int64_t num_blocks, FirstKey first_key) {
  if (sequences && query_start_loc[0] < 0) return BAD_QUERY_START_LOC;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t count = query_start_loc[s + 1] - query_start_loc[s], length = seq_lens[s];
    if (count < 0 || query_start_loc[s + 1] > tokens) return BAD_QUERY_START_LOC;
    if (count == 0) continue;
    if (length < count || length > width * block_size) return BLOCK_TABLE_TOO_SHORT;
    for (int64_t j = first_key(s, count) / block_size; j * block_size < length; ++j) {
      const int32_t block = block_table[s * row_stride + j];
      if (block < 0 || block >= num_blocks) return NO_SUCH_BLOCK;
    }
  }
  return 0;
}

static int64_t check_slot_mapping(const int64_t* slot_mapping, int64_t count, int64_t num_slots) {
  for (int64_t t = 0; t < count; ++t)
    if (slot_mapping[t] >= num_slots) return NO_SUCH_SLOT;
  return 0;
}
