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
const int64_t GRAIN = 64 << 10;          // blocks are multiples of it
const int64_t LEAST_CHUNK = 512l << 20;  // what the system is asked for at once

// A chunk of memory from the system is a row of blocks, free ones and blocks in use; neighbours that are free
// are one. Sizes share chunks: what an activation gives back serves a gradient of another size.
struct Block {
  char* start;
  int64_t bytes;
  Block *before, *after;         // neighbours in the chunk
  Block *free_before, *free_after;
  bool is_free, is_clean;        // clean: its pages are back with the system
};

static Block free_blocks = {0, 0, 0, 0, &free_blocks, &free_blocks, true, false};  // the list's head
static int64_t kept_bytes, kept_limit;
static volatile char busy;

static void lock() { while (__atomic_test_and_set(&busy, __ATOMIC_ACQUIRE)) {} }
static void unlock() { __atomic_clear(&busy, __ATOMIC_RELEASE); }

// what a free block counts for: memory that the process has and nobody uses
static int64_t weight(const Block* block) { return block->is_clean ? 0 : block->bytes; }

static void list(Block* block) {
  block->is_free = true;
  block->free_after = free_blocks.free_after;
  block->free_before = &free_blocks;
  free_blocks.free_after->free_before = block;
  free_blocks.free_after = block;
  kept_bytes += weight(block);
}

static void unlist(Block* block) {
  block->is_free = false;
  block->free_before->free_after = block->free_after;
  block->free_after->free_before = block->free_before;
  kept_bytes -= weight(block);
}

static Block* make_block(char* start, int64_t bytes) {
  Block* block = (Block*)malloc(sizeof(Block));
  if (!block) return nullptr;
  *block = {start, bytes, nullptr, nullptr, nullptr, nullptr, false, false};
  return block;
}

// memory on huge pages where the system has them: a fault for 2 MiB instead of 512
static char* fresh(int64_t bytes) {
  char* area = (char*)mmap(nullptr, bytes + HUGE_PAGE, 3, 0x22, -1, 0);
  if (area == (char*)-1) return nullptr;
  int64_t lead = (HUGE_PAGE - (int64_t)area % HUGE_PAGE) % HUGE_PAGE;
  if (lead) munmap(area, lead);
  if (HUGE_PAGE - lead) munmap(area + lead + bytes, HUGE_PAGE - lead);
  madvise(area + lead, bytes, 14);
  return area + lead;
}

static Block* new_chunk(int64_t wanted) {
  int64_t bytes = wanted > LEAST_CHUNK ? wanted : LEAST_CHUNK;
  bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  char* area = fresh(bytes);
  if (!area) return nullptr;
  Block* block = make_block(area, bytes);
  if (!block) {
    munmap(area, bytes);
    return nullptr;
  }
  block->is_clean = true;  // nothing of it was touched yet
  return block;
}

// the smallest free block that is large enough; of equals the one given back last, which caches may hold
static Block* best_fit(int64_t bytes) {
  Block* best = nullptr;
  for (Block* block = free_blocks.free_after; block != &free_blocks; block = block->free_after)
    if (block->bytes >= bytes && (!best || block->bytes < best->bytes)) best = block;
  return best;
}

static Block* take(int64_t bytes) {
  bytes = (bytes + GRAIN - 1) / GRAIN * GRAIN;
  lock();
  Block* block = best_fit(bytes);
  if (block) unlist(block);
  else block = new_chunk(bytes);
  if (block && block->bytes > bytes) {
    Block* rest = make_block(block->start + bytes, block->bytes - bytes);
    if (rest) {
      rest->before = block;
      rest->after = block->after;
      if (rest->after) rest->after->before = rest;
      rest->is_clean = block->is_clean;
      block->after = rest;
      block->bytes = bytes;
      list(rest);
    }
  }
  if (block) block->is_clean = false;
  unlock();
  return block;
}

// `later` becomes part of `block`, its neighbour
static void join(Block* block, Block* later) {
  block->bytes += later->bytes;
  block->after = later->after;
  if (block->after) block->after->before = block;
  block->is_clean = block->is_clean && later->is_clean;
  free(later);
}

static void drop(Block* chunk) {
  munmap(chunk->start, chunk->bytes);
  free(chunk);
}

static void give(Block* block) {
  lock();
  if (block->after && block->after->is_free) {
    unlist(block->after);
    join(block, block->after);
  }
  if (block->before && block->before->is_free) {
    Block* first = block->before;
    unlist(first);
    join(first, block);
    block = first;
  }
  bool whole = !block->before && !block->after;
  if (whole && kept_bytes + block->bytes > kept_limit) drop(block);
  else list(block);
  unlock();
}

static void forget(Managed* managed) {
  give((Block*)managed->block);
  free(managed);
}

// A DLPack tensor on a block of the pool; `numbers` are sizes then strides. Null without memory.
EXPORT void* make(int64_t bytes, int64_t code, int64_t bits, int64_t rank, const int64_t* numbers) {
  Block* block = take(bytes);
  if (!block) return nullptr;
  Managed* managed = (Managed*)malloc(sizeof(Managed) + sizeof(int64_t) * 2 * rank);
  if (!managed) {
    give(block);
    return nullptr;
  }
  int64_t* kept = (int64_t*)(managed + 1);
  for (int64_t k = 0; k < 2 * rank; ++k) kept[k] = numbers[k];
  managed->tensor.data = block->start;
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

// Gives the memory of every free block back to the system: whole chunks, and of others the pages.
EXPORT void release(void) {
  lock();
  Block* block = free_blocks.free_after;
  while (block != &free_blocks) {
    Block* next = block->free_after;
    unlist(block);
    if (!block->before && !block->after) drop(block);
    else {
      madvise(block->start, block->bytes, 4);
      block->is_clean = true;
      list(block);  // at the list's head: it is not met again
    }
    block = next;
  }
  unlock();
}
