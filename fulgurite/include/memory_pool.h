// A pool of memory blocks for large outputs. A released block stays in the pool for the next
// output. A block is released when the last tensor that shares its storage is gone: torch then
// calls `delete_tensor`, the deleter of the DLPack tensor. So memory that is still in use is never
// reused.
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
const int64_t BLOCK_MULTIPLE = 64 << 10;
const int64_t MIN_CHUNK = 512l << 20;    // requested from the system at once

// A chunk of memory from the system is a sequence of blocks, free or in use. Free neighbors are
// merged. All sizes share chunks: the block of an activation may later hold a gradient of another
// size.
struct Block {
  char* start;
  int64_t bytes;
  Block *before, *after;         // neighbors in the chunk
  Block *free_before, *free_after;
  bool is_free, is_clean;        // clean: the system has its pages back
};

static Block free_blocks = {0, 0, 0, 0, &free_blocks, &free_blocks, true, false};  // head of the list
static int64_t pooled_bytes, pool_limit;
static volatile char is_locked;

static void lock() { while (__atomic_test_and_set(&is_locked, __ATOMIC_ACQUIRE)) {} }
static void unlock() { __atomic_clear(&is_locked, __ATOMIC_RELEASE); }

// bytes that a free block adds to the pool: memory that the process has and nothing uses
static int64_t resident_bytes(const Block* block) { return block->is_clean ? 0 : block->bytes; }

static void add_to_free_list(Block* block) {
  block->is_free = true;
  block->free_after = free_blocks.free_after;
  block->free_before = &free_blocks;
  free_blocks.free_after->free_before = block;
  free_blocks.free_after = block;
  pooled_bytes += resident_bytes(block);
}

static void remove_from_free_list(Block* block) {
  block->is_free = false;
  block->free_before->free_after = block->free_after;
  block->free_after->free_before = block->free_before;
  pooled_bytes -= resident_bytes(block);
}

static Block* make_block(char* start, int64_t bytes) {
  Block* block = (Block*)malloc(sizeof(Block));
  if (!block) return nullptr;
  *block = {start, bytes, nullptr, nullptr, nullptr, nullptr, false, false};
  return block;
}

// memory on huge pages where available: one page fault per 2 MiB instead of 512
static char* map_memory(int64_t bytes) {
  char* area = (char*)mmap(nullptr, bytes + HUGE_PAGE, 3, 0x22, -1, 0);
  if (area == (char*)-1) return nullptr;
  int64_t lead = (HUGE_PAGE - (int64_t)area % HUGE_PAGE) % HUGE_PAGE;
  if (lead) munmap(area, lead);
  if (HUGE_PAGE - lead) munmap(area + lead + bytes, HUGE_PAGE - lead);
  madvise(area + lead, bytes, 14);
  return area + lead;
}

static Block* new_chunk(int64_t wanted) {
  int64_t bytes = wanted > MIN_CHUNK ? wanted : MIN_CHUNK;
  bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  char* area = map_memory(bytes);
  if (!area) return nullptr;
  Block* block = make_block(area, bytes);
  if (!block) {
    munmap(area, bytes);
    return nullptr;
  }
  block->is_clean = true;  // not touched yet
  return block;
}

// the smallest free block that is large enough; of equal ones the last released, which may be in a
// cache
static Block* best_fit(int64_t bytes) {
  Block* best = nullptr;
  for (Block* block = free_blocks.free_after; block != &free_blocks; block = block->free_after)
    if (block->bytes >= bytes && (!best || block->bytes < best->bytes)) best = block;
  return best;
}

static Block* acquire(int64_t bytes) {
  bytes = (bytes + BLOCK_MULTIPLE - 1) / BLOCK_MULTIPLE * BLOCK_MULTIPLE;
  lock();
  Block* block = best_fit(bytes);
  if (block) remove_from_free_list(block);
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
      add_to_free_list(rest);
    }
  }
  if (block) block->is_clean = false;
  unlock();
  return block;
}

// merges `later` into `block`, its neighbor
static void merge(Block* block, Block* later) {
  block->bytes += later->bytes;
  block->after = later->after;
  if (block->after) block->after->before = block;
  block->is_clean = block->is_clean && later->is_clean;
  free(later);
}

static void unmap(Block* chunk) {
  munmap(chunk->start, chunk->bytes);
  free(chunk);
}

static void release_block(Block* block) {
  lock();
  if (block->after && block->after->is_free) {
    remove_from_free_list(block->after);
    merge(block, block->after);
  }
  if (block->before && block->before->is_free) {
    Block* first = block->before;
    remove_from_free_list(first);
    merge(first, block);
    block = first;
  }
  bool is_chunk = !block->before && !block->after;
  if (is_chunk && pooled_bytes + block->bytes > pool_limit) unmap(block);
  else add_to_free_list(block);
  unlock();
}

static void delete_tensor(Managed* managed) {
  release_block((Block*)managed->block);
  free(managed);
}

// Allocates a DLPack tensor from the pool; `layout` holds sizes, then strides. Null: out of memory.
EXPORT void* allocate_tensor(int64_t bytes, int64_t code, int64_t bits, int64_t rank, const int64_t* layout) {
  Block* block = acquire(bytes);
  if (!block) return nullptr;
  Managed* managed = (Managed*)malloc(sizeof(Managed) + sizeof(int64_t) * 2 * rank);
  if (!managed) {
    release_block(block);
    return nullptr;
  }
  int64_t* own_layout = (int64_t*)(managed + 1);
  for (int64_t k = 0; k < 2 * rank; ++k) own_layout[k] = layout[k];
  managed->tensor.data = block->start;
  managed->tensor.device = {1, 0};
  managed->tensor.rank = (int)rank;
  managed->tensor.dtype = {(unsigned char)code, (unsigned char)bits, 1};
  managed->tensor.sizes = own_layout;
  managed->tensor.strides = own_layout + rank;
  managed->tensor.byte_offset = 0;
  managed->block = block;
  managed->deleter = delete_tensor;
  return managed;
}

EXPORT int64_t get_pooled_bytes(void) { return pooled_bytes; }

EXPORT void set_limit(int64_t bytes) { pool_limit = bytes; }

// Returns the memory of every free block to the system: whole chunks, or the pages of a block.
EXPORT void release_pool(void) {
  lock();
  Block* block = free_blocks.free_after;
  while (block != &free_blocks) {
    Block* next = block->free_after;
    remove_from_free_list(block);
    if (!block->before && !block->after) unmap(block);
    else {
      madvise(block->start, block->bytes, 4);
      block->is_clean = true;
      add_to_free_list(block);  // at the list's head: the loop doesn't see it again
    }
    block = next;
  }
  unlock();
}
