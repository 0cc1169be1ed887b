// What the caller says of sequences and pages, held against what it gave, before anything is read or written.

extern "C" void* malloc(unsigned long);
extern "C" void free(void*);

enum { QUERIES_OUTSIDE = 1, TABLE_TOO_SHORT = 2, NO_SUCH_PAGE = 3, NO_SUCH_SLOT = 4 };

// `tokens` queries; `tables` of `width` pages a row, out of `pages` of `page` slots; `first_key(s, count)` is the
// first key that the `count` new tokens of sequence s read: pages before it may be anyone's by now.
template <class First>
static int64_t check_tables(const int32_t* starts, const int32_t* lengths, const int32_t* tables, int64_t row,
                            int64_t sequences, int64_t tokens, int64_t page, int64_t width, int64_t pages,
                            First first_key) {
  if (sequences && starts[0] < 0) return QUERIES_OUTSIDE;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t count = starts[s + 1] - starts[s], length = lengths[s];
    if (count < 0 || starts[s + 1] > tokens) return QUERIES_OUTSIDE;
    if (count == 0) continue;
    if (length < count || length > width * page) return TABLE_TOO_SHORT;
    for (int64_t j = first_key(s, count) / page; j * page < length; ++j)
      if (tables[s * row + j] < 0 || tables[s * row + j] >= pages) return NO_SUCH_PAGE;
  }
  return 0;
}

static int64_t check_slots(const int64_t* slots, int64_t count, int64_t most) {
  for (int64_t t = 0; t < count; ++t)
    if (slots[t] >= most) return NO_SUCH_SLOT;
  return 0;
}
