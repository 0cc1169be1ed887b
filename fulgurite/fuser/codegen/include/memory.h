// Blocks of memory for large results, kept when they are released and given out again.
// A block goes back when the last tensor that shares its storage is gone: torch calls `forget`, the
// deleter of the DLPack tensor it was made from. So memory that anyone still holds is never reused.
typedef long int64_t;
typedef unsigned long uint64_t;
#define EXPORT extern "C" __attribute__((visibility("default")))

extern "C" void* mmap(void*, unsigned long, int, int, int, long);
extern "C" int munmap(void*, unsigned long);
extern "C" int madvise(void*, unsigned long, int);
extern "C" void* malloc(unsigned long);
extern "C" void free(void*);

// the ABI of DLPack 0.8
struct Device { int type, id; };
struct Type { unsigned char code, bits; unsigned short lanes; };
struct DlTensor {
  void* data;
  Device device;
  int rank;
  Type dtype;
  int64_t* sizes;
  int64_t* strides;
  uint64_t byte_offset;
};
struct Managed {
  DlTensor tensor;
  void* block;
  void (*deleter)(Managed*);
};

const int64_t HUGE_PAGE = 2 << 20;
const int KINDS = 512;

struct Free { Free* next; };
struct Kind { int64_t bytes; Free* first; };

static Kind kinds[KINDS];  // one list a size, in the order sizes were first asked for
static int kind_count;
static int64_t kept_bytes, kept_limit;
static volatile char busy;

static void lock() { while (__atomic_test_and_set(&busy, __ATOMIC_ACQUIRE)) {} }
static void unlock() { __atomic_clear(&busy, __ATOMIC_RELEASE); }

// sizes are rounded up to 2 MiB, and past 16 MiB to an eighth of their power of two
static int64_t rounded(int64_t bytes) {
  int64_t step = HUGE_PAGE;
  while (step * 16 <= bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

static int kind_of(int64_t bytes, bool add) {
  for (int k = 0; k < kind_count; ++k)
    if (kinds[k].bytes == bytes) return k;
  if (!add || kind_count == KINDS) return -1;
  kinds[kind_count].bytes = bytes;
  kinds[kind_count].first = nullptr;
  return kind_count++;
}

// memory on huge pages where the system has them: a fault for 2 MiB instead of 512
static void* fresh(int64_t bytes) {
  char* area = (char*)mmap(nullptr, bytes + HUGE_PAGE, 3, 0x22, -1, 0);
  if (area == (char*)-1) return nullptr;
  int64_t lead = (HUGE_PAGE - (int64_t)area % HUGE_PAGE) % HUGE_PAGE;
  if (lead) munmap(area, lead);
  if (HUGE_PAGE - lead) munmap(area + lead + bytes, HUGE_PAGE - lead);
  madvise(area + lead, bytes, 14);
  return area + lead;
}

static void* take(int64_t bytes) {
  lock();
  int k = kind_of(bytes, false);
  Free* found = k < 0 ? nullptr : kinds[k].first;
  if (found) {
    kinds[k].first = found->next;
    kept_bytes -= bytes;
  }
  unlock();
  return found ? found : fresh(bytes);
}

static void give(void* block, int64_t bytes) {
  lock();
  int k = kept_bytes + bytes <= kept_limit ? kind_of(bytes, true) : -1;
  if (k >= 0) {
    Free* entry = (Free*)block;
    entry->next = kinds[k].first;
    kinds[k].first = entry;
    kept_bytes += bytes;
  }
  unlock();
  if (k < 0) munmap(block, bytes);
}

static void forget(Managed* managed) {
  // the block's size is kept behind the sizes and strides
  int64_t* numbers = (int64_t*)(managed + 1);
  give(managed->block, numbers[2 * managed->tensor.rank]);
  free(managed);
}

// A DLPack tensor on a block of the pool; `numbers` are sizes then strides. Null without memory.
EXPORT void* make(int64_t bytes, int64_t code, int64_t bits, int64_t rank, const int64_t* numbers) {
  int64_t whole = rounded(bytes);
  void* block = take(whole);
  if (!block) return nullptr;
  Managed* managed = (Managed*)malloc(sizeof(Managed) + sizeof(int64_t) * (2 * rank + 1));
  int64_t* kept = (int64_t*)(managed + 1);
  for (int64_t k = 0; k < 2 * rank; ++k) kept[k] = numbers[k];
  kept[2 * rank] = whole;
  managed->tensor.data = block;
  managed->tensor.device = {1, 0};
  managed->tensor.rank = (int)rank;
  managed->tensor.dtype = {(unsigned char)code, (unsigned char)bits, 1};
  managed->tensor.sizes = kept;
  managed->tensor.strides = kept + rank;
  managed->tensor.byte_offset = 0;
  managed->block = block;
  managed->deleter = forget;
  return managed;
}

EXPORT int64_t kept(void) { return kept_bytes; }

EXPORT void set_limit(int64_t bytes) { kept_limit = bytes; }

// Gives every kept block back to the system.
EXPORT void release(void) {
  lock();
  for (int k = 0; k < kind_count; ++k) {
    while (kinds[k].first) {
      Free* entry = kinds[k].first;
      kinds[k].first = entry->next;
      munmap(entry, kinds[k].bytes);
    }
  }
  kept_bytes = 0;
  unlock();
}
