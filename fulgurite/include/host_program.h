// The host program: the steps of a final trace, run without Python between kernels.
//
// A program is one array of 64-bit words, written by `fulgurite/host/`. It has slots (tensors, integers and
// other objects of the trace), registers (sizes that are computed at a call) and steps, one for each line of
// the trace. A step has instructions, and a Python function that does the same. Where an instruction can't
// run (other strides than expected, a variant that is not compiled yet, an error of torch) and no kernel of
// the step has run, the Python function runs instead. So results and errors are those of the trace.
//
// No headers: torch is called by its C interface (aoti_torch_*), Python by functions of its stable ABI. All
// addresses come in one table, `set_api`.
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned int uint32_t;
typedef int int32_t;
#define EXPORT extern "C" __attribute__((visibility("default")))
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

typedef void* Handle;  // at::Tensor*: AtenTensorHandle
typedef void* Object;  // PyObject*

// fulgurite/host_api.py writes the table, in this order.
struct Api {
  // Python
  void (*incref)(Object);
  void (*decref)(Object);
  int64_t (*list_size)(Object);
  Object (*list_item)(Object, int64_t);                            // borrowed
  int (*list_set_slice)(Object, int64_t, int64_t, Object);
  Object (*tuple_new)(int64_t);
  int (*tuple_set)(Object, int64_t, Object);                       // steals
  Object (*tuple_item)(Object, int64_t);                           // borrowed
  int64_t (*tuple_size)(Object);                                   // sets an error for others
  Object (*sequence_item)(Object, int64_t);
  Object (*long_from)(int64_t);
  int64_t (*long_as)(Object);
  Object (*vectorcall)(Object, Object const*, uint64_t, Object);
  Object (*error_occurred)();
  void (*error_clear)();
  char* (*bytes_data)(Object);
  Object (*dict_item)(Object, Object);                             // borrowed
  Object (*list_new)(int64_t);
  int (*list_set)(Object, int64_t, Object);                        // steals
  Object (*get_attribute)(Object, Object);
  int64_t (*length)(Object);
  Object (*get_dict)(Object, void*);
  Object (*function_code)(Object);                                 // borrowed, as the next two
  Object (*function_defaults)(Object);
  Object (*function_keyword_defaults)(Object);
  void* (*builtin_function)(Object);
  Object (*builtin_self)(Object);                                  // borrowed
  void* (*save_thread)();
  void (*restore_thread)(void*);
  int (*set_attribute)(Object, Object, Object);
  Object (*sequence_tuple)(Object);
  Object (*vectorcall_method)(Object, Object const*, uint64_t, Object);
  Object (*context_copy)(Object);
  int (*context_enter)(Object);
  int (*context_exit)(Object);
  int (*compare)(Object, Object, int);                             // PyObject_RichCompareBool
  void (*error_fetch)(Object*, Object*, Object*);
  void (*error_restore)(Object, Object, Object);
  Object (*dict_new)();
  int (*dict_set)(Object, Object, Object);
  // torch
  int32_t (*empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*);
  int32_t (*reinterpret)(Handle, int64_t, const int64_t*, const int64_t*, int64_t, Handle*);
  int32_t (*new_handle)(Handle, Handle*);
  int32_t (*delete_handle)(Handle);
  int32_t (*data_ptr)(Handle, void**);
  int32_t (*dim)(Handle, int64_t*);
  int32_t (*sizes)(Handle, int64_t**);
  int32_t (*strides)(Handle, int64_t**);
  int32_t (*storage_offset)(Handle, int64_t*);
  int32_t (*get_dtype)(Handle, int32_t*);
  int32_t (*device_type)(Handle, int32_t*);
  int32_t (*device_index)(Handle, int32_t*);
  int32_t (*copy)(Handle, Handle, int32_t);                        // target, source, without waiting
  Object (*wrap)(Handle);                                          // THPVariable_Wrap
  int (*num_threads)();
  int64_t (*num_dispatch_modes)();
  bool (*includes_dispatch_key)(unsigned short);
  bool (*is_grad_enabled)();
  void (*set_grad_enabled)(bool);
  // CUDA; null without it
  int32_t (*current_stream)(int32_t, void**);
  int32_t (*launch)(void*, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, void*, void**,
                    void**);
  int32_t (*copy_memory)(void*, void*, uint64_t, void*);           // target, source, bytes, stream
  // values
  int64_t cdata_offset;      // of the at::Tensor in a Python tensor
  Object tensor_type;
  Object parameter_type;
  Object none, true_;
  Object profiler_dict, profiler_key;  // torch.autograd.profiler's flag
  const int64_t* num_recordings;       // of fulgurite.replay
  Object current_device;               // torch._C._cuda_getDevice, or null
  Object create_context;               // makes the CUDA context of a thread, or null
  Object as_strided;                   // torch.as_strided
  // for include/direct_call.h
  Object builtin_type;                 // of functions that are written in C
  Object compiler_dict, exporting_key;
  Object tracing_local, dict_key, tracing_context_key;
  Object forward_ad_dict, level_key;
  int64_t pre_dispatch_key;
  Object get_frame_callback, get_tracing_state;
  Object eval_frame_dict, stance_key, default_stance;
  Object global_hooks[6];
  Object hook_keys[4];
  Object forward_key, cache_entry_key, run_key;
  // for include/training_call.h
  Object false_, list_type, tuple_type;
  Object version_key, call_inputs_key, to_save_key, sizes_key, saved_tensors_key, non_differentiable_key;
  Object materialize_key, materialize_all_key, clear_saved_key, backward_key, context_key;
  Object has_functorch_transforms, functorch_stack, has_autocast, is_deterministic, keeps_graph;
  Object is_view, detach, unsafe_view, has_thread_object, get_thread_object;
  // for include/launch_plan.h
  Object requires_grad_key;
  // for include/graph_replay.h
  Object words_key, plan_key, successor_key;
  Object is_capturing;                 // torch._C._cuda_isCurrentStreamCapturing, or null
  Object clone, int_type;
};
static Api api;

EXPORT void set_api(const int64_t* table, int64_t count) {
  int64_t* words = (int64_t*)&api;
  for (int64_t k = 0; k < count; ++k) words[k] = table[k];
}
EXPORT int64_t api_size() { return sizeof(Api) / 8; }

// ---- values --------------------------------------------------------------------------------------

enum Kind { TENSOR = 0, INTEGER = 1, OBJECT = 2 };

struct Slot {
  Handle handle;   // of a plain tensor; null for subclasses and None
  Object object;   // owned; null for a tensor that only this program has seen
  int64_t owned;   // whether `handle` is ours to delete; an integer's value
};

struct Header {
  int64_t num_slots, num_inputs, num_registers, steps, num_outputs, outputs, num_constants, constants, kinds;
  int64_t objects;      // address of an array of Object
  int64_t device;       // of CUDA, or -1
  int64_t python_form;  // index of the object that runs the trace as Python
};

struct Frame {
  const int64_t* code;
  const Header* header;
  Object const* objects;
  const int64_t* kinds;
  Slot* slots;
  int64_t* registers;
  void* thread;         // saved thread state while the GIL is released
  void* stream;
  bool has_stream;
};

static inline void take_gil(Frame& f) {
  if (f.thread) { api.restore_thread(f.thread); f.thread = 0; }
}
static inline void release_gil(Frame& f) {
  if (!f.thread) f.thread = api.save_thread();
}

static inline bool is_plain_tensor(Object object) {
  Object type = ((Object*)object)[1];
  return type == api.tensor_type || type == api.parameter_type;
}

static inline void set_object(Frame& f, int64_t slot, Object object) {  // steals; needs the GIL
  Slot& s = f.slots[slot];
  s.object = object;
  s.owned = 0;
  s.handle = 0;
  if (f.kinds[slot] == TENSOR) {
    if (is_plain_tensor(object)) s.handle = (char*)object + api.cdata_offset;
  } else if (f.kinds[slot] == INTEGER) {
    s.owned = api.long_as(object);
    if (UNLIKELY(s.owned == -1 && api.error_occurred())) {  // not an int: Python steps use the object
      api.error_clear();
      s.owned = 0;
    }
  }
}

static inline void set_handle(Frame& f, int64_t slot, Handle handle) {
  Slot& s = f.slots[slot];
  s.handle = handle;
  s.object = 0;
  s.owned = 1;
}

static inline void drop(Frame& f, int64_t slot) {
  Slot& s = f.slots[slot];
  if (f.kinds[slot] == TENSOR) {
    if (s.owned) api.delete_handle(s.handle);
    s.handle = 0;
    s.owned = 0;
  }
  if (!s.object) return;
  // The caller may keep an input alive: the end of the program releases it, with the GIL. Of other values
  // the owners are slots of this program, as of a buffer and of the result that overwrites it.
  if (f.thread && slot < f.header->num_inputs && *(uint32_t*)s.object > 1) return;
  take_gil(f);
  api.decref(s.object);
  s.object = 0;
}

// The slot's value as a new reference; needs the GIL.
static Object as_object(Frame& f, int64_t slot) {
  Slot& s = f.slots[slot];
  if (!s.object) {
    if (f.kinds[slot] == INTEGER) return api.long_from(s.owned);
    if (!s.handle) { api.incref(api.none); return api.none; }
    Object wrapped = api.wrap(s.handle);
    if (!wrapped) return 0;
    if (s.owned) api.delete_handle(s.handle);
    s.object = wrapped;
    s.handle = is_plain_tensor(wrapped) ? (char*)wrapped + api.cdata_offset : 0;  // undefined: None
    s.owned = 0;
  }
  api.incref(s.object);
  return s.object;
}

// An operand: a constant (even), or a register (odd).
static inline int64_t operand(const Frame& f, int64_t word) {
  return word & 1 ? f.registers[word >> 1] : word >> 1;
}

// ---- integer expressions -------------------------------------------------------------------------

enum Code { CONSTANT, REGISTER, SLOT, SIZE, STRIDE, ADD, SUB, MUL, FLOORDIV, MOD, MIN, MAX, LT, LE, EQ, NE, SELECT,
            AND, OR, NOT };

static bool evaluate(Frame& f, const int64_t* code, int64_t count, int64_t* result) {
  int64_t stack[64];
  int64_t top = 0;
  for (int64_t k = 0; k < count; ++k) {
    int64_t op = code[2 * k], value = code[2 * k + 1];
    if (op >= ADD && op < SELECT) --top;
    int64_t a = top > 0 ? stack[top - 1] : 0, b = stack[top];
    switch (op) {
      case CONSTANT: stack[top++] = value; continue;
      case REGISTER: stack[top++] = f.registers[value]; continue;
      case SLOT: stack[top++] = f.slots[value].owned; continue;
      case SIZE: case STRIDE: {
        Handle handle = f.slots[value >> 16].handle;
        int64_t* found;
        if (!handle || (op == SIZE ? api.sizes : api.strides)(handle, &found)) return false;
        stack[top++] = found[value & 0xffff];
        continue;
      }
      case ADD: a += b; break;
      case SUB: a -= b; break;
      case MUL: a *= b; break;
      case FLOORDIV: case MOD: {
        if (b == 0) return false;
        int64_t q = a / b, r = a % b;
        if (r != 0 && (r < 0) != (b < 0)) { --q; r += b; }
        a = op == MOD ? r : q;
        break;
      }
      case MIN: a = a < b ? a : b; break;
      case MAX: a = a > b ? a : b; break;
      case LT: a = a < b; break;
      case LE: a = a <= b; break;
      case EQ: a = a == b; break;
      case NE: a = a != b; break;
      case SELECT:  // condition, yes, no
        top -= 2;
        stack[top - 1] = stack[top - 1] ? stack[top] : stack[top + 1];
        continue;
      case AND: --top; stack[top - 1] = stack[top - 1] && stack[top]; continue;
      case OR: --top; stack[top - 1] = stack[top - 1] || stack[top]; continue;
      case NOT: stack[top - 1] = !stack[top - 1]; continue;
    }
    stack[top - 1] = a;
  }
  *result = stack[0];
  return true;
}

// ---- instructions --------------------------------------------------------------------------------

enum Op { END, EVALUATE, CHECK, ALLOCATE, RUN, VARIANT, LAUNCH, VIEW, CALL, ALIAS, SET_INTEGER, PYTHON, CALL_INTEGER,
          ALLOCATE_BY };

// What an instruction came to. NEXT: go on. FALL_BACK: the step's Python function runs. FAILED: a Python error.
enum Result { NEXT, FALL_BACK, FAILED };

const int64_t MAX_RANK = 64;

static inline void read_operands(const Frame& f, const int64_t* words, int64_t count, int64_t* out) {
  for (int64_t k = 0; k < count; ++k) out[k] = operand(f, words[k]);
}

// slot, rank, has sizes, strides..., sizes...: strides of dimensions of one element don't matter
static Result check(Frame& f, const int64_t* w) {
  Handle handle = f.slots[w[0]].handle;
  int64_t rank, *sizes, *strides;
  if (UNLIKELY(!handle || api.dim(handle, &rank) || rank != w[1])) return FALL_BACK;
  api.sizes(handle, &sizes);
  api.strides(handle, &strides);
  bool same = true;
  for (int64_t k = 0; k < rank; ++k)
    same &= strides[k] == operand(f, w[3 + k]) || sizes[k] == 1;
  if (w[2])
    for (int64_t k = 0; k < rank; ++k)
      if (UNLIKELY(sizes[k] != operand(f, w[3 + rank + k]))) return FALL_BACK;
  return same ? NEXT : FALL_BACK;
}

static Object make_tuple(const int64_t* values, int64_t count) {
  Object tuple = api.tuple_new(count);
  for (int64_t k = 0; tuple && k < count; ++k) api.tuple_set(tuple, k, api.long_from(values[k]));
  return tuple;
}

// slot, dtype, device type, device index, elements from which the pool is used (or -1), the pool's function,
// dtype object, rank, sizes..., strides...
static Result allocate(Frame& f, const int64_t* w) {
  int64_t rank = w[7], values[2 * MAX_RANK];
  read_operands(f, w + 8, 2 * rank, values);
  int64_t elements = 1;
  for (int64_t k = 0; k < rank; ++k) elements *= values[k];
  if (w[4] >= 0 && elements >= w[4]) {
    take_gil(f);
    Object arguments[3] = {make_tuple(values, rank), make_tuple(values + rank, rank), f.objects[w[6]]};
    Object tensor = arguments[0] && arguments[1] ? api.vectorcall(f.objects[w[5]], arguments, 3, 0) : 0;
    for (int64_t k = 0; k < 2; ++k)
      if (arguments[k]) api.decref(arguments[k]);
    if (!tensor) return FAILED;
    set_object(f, w[0], tensor);
    return NEXT;
  }
  Handle handle;
  if (UNLIKELY(api.empty_strided(rank, values, values + rank, w[1], w[2], w[3], &handle))) return FALL_BACK;
  set_handle(f, w[0], handle);
  return NEXT;
}

// slot, function, sizes, strides, dtype: the four objects are constants. torch's own function for Inductor
// allocates on a GPU in half the time of the C interface, which goes through the dispatcher.
static Result allocate_by(Frame& f, const int64_t* w) {
  take_gil(f);
  Object arguments[3] = {f.objects[w[2]], f.objects[w[3]], f.objects[w[4]]};
  Object tensor = api.vectorcall(f.objects[w[1]], arguments, 3, 0);
  if (!tensor) return FAILED;
  set_object(f, w[0], tensor);
  return NEXT;
}

static inline bool address_of(Frame& f, int64_t slot, int64_t* address) {
  Handle handle = f.slots[slot].handle;
  return handle && !api.data_ptr(handle, (void**)address);
}

enum Argument { ADDRESS, VALUE, THREADS };

// function, error function, count, (kind, a, b)...
static Result run_kernel(Frame& f, const int64_t* w, int64_t* status) {
  int64_t count = w[2];
  int64_t* arguments = (int64_t*)__builtin_alloca(8 * (count + 1));
  for (int64_t k = 0; k < count; ++k) {
    const int64_t* a = w + 3 + 3 * k;
    if (a[0] == ADDRESS) {
      if (!address_of(f, a[1], arguments + k)) return FALL_BACK;
      arguments[k] += a[2];
    } else {
      arguments[k] = a[0] == VALUE ? operand(f, a[1]) : api.num_threads();
    }
  }
  release_gil(f);
  *status = ((int64_t(*)(const int64_t*))w[0])(arguments);
  return *status ? FAILED : NEXT;
}

struct Kernel { void* function; int64_t threads, shared; };

// register, table, kernels of a variant, constant bits, wide condition (operand), count of addresses, slots...,
// count of sizes, operands...
static Result choose_variant(Frame& f, const int64_t* w) {
  int64_t bits = 0, variant = w[3];
  for (int64_t k = 0; k < w[5]; ++k) {
    int64_t address;
    if (!address_of(f, w[6 + k], &address)) return FALL_BACK;
    bits |= address;
  }
  if (!(bits & 15)) variant |= 1;
  const int64_t* sizes = w + 6 + w[5];
  if (sizes[0]) {
    int64_t either = 0;
    for (int64_t k = 0; k < sizes[0]; ++k) either |= operand(f, sizes[1 + k]);
    if (!(either & 15)) variant |= 2;
  }
  if (operand(f, w[4])) variant |= 4;
  const Kernel* kernels = (const Kernel*)w[1] + variant * w[2];
  if (!kernels[0].function) return FALL_BACK;  // compiled by the Python function
  f.registers[w[0]] = (int64_t)kernels;
  return NEXT;
}

// register of the variant, kernel, grid x, grid y, can run again, count, (kind, a, b)...
static Result launch(Frame& f, const int64_t* w, int64_t* status) {
  int64_t x = operand(f, w[2]), y = operand(f, w[3]), count = w[5];
  if (x == 0) return NEXT;
  if (!f.has_stream) {
    if (api.current_stream(f.header->device, &f.stream)) return FALL_BACK;
    f.has_stream = true;
  }
  int64_t* values = (int64_t*)__builtin_alloca(8 * (count + 2));
  void** pointers = (void**)__builtin_alloca(8 * (count + 2));
  for (int64_t k = 0; k < count; ++k) {
    const int64_t* a = w + 6 + 3 * k;
    pointers[k] = values + k;
    if (a[0] == ADDRESS) {
      if (!address_of(f, a[1], values + k)) return FALL_BACK;
      values[k] += a[2];
    } else {
      values[k] = operand(f, a[1]);  // little-endian: the first four bytes are those of an int32
    }
  }
  values[count] = values[count + 1] = 0;  // Triton's scratch memory: none
  pointers[count] = values + count;
  pointers[count + 1] = values + count + 1;
  const Kernel& kernel = ((const Kernel*)f.registers[w[0]])[w[1]];
  release_gil(f);
  int32_t error = api.launch(kernel.function, x, y, 1, kernel.threads, 1, 1, kernel.shared, f.stream, pointers, 0);
  if (UNLIKELY(error && !w[4])) *status = -error;  // an input may be written already
  return UNLIKELY(error) ? FALL_BACK : NEXT;
}

// A view that leaves the program: autograd must know that it shares its source's version counter.
static Result tracked_view(Frame& f, const int64_t* w, const int64_t* values) {
  int64_t rank = w[2], offset;
  if (api.storage_offset(f.slots[w[1]].handle, &offset)) return FALL_BACK;
  take_gil(f);
  Object arguments[4] = {as_object(f, w[1]), make_tuple(values, rank), make_tuple(values + rank, rank),
                         api.long_from(offset + operand(f, w[3]))};
  bool complete = arguments[0] && arguments[1] && arguments[2] && arguments[3];
  Object result = complete ? api.vectorcall(api.as_strided, arguments, 4, 0) : 0;
  for (int64_t k = 0; k < 4; ++k)
    if (arguments[k]) api.decref(arguments[k]);
  if (!result) return FAILED;
  set_object(f, w[0], result);
  return NEXT;
}

// slot, source, rank, offset, whether it is tracked, sizes..., strides...
static Result view(Frame& f, const int64_t* w) {
  int64_t rank = w[2], values[2 * MAX_RANK];
  Handle source = f.slots[w[1]].handle, handle;
  if (UNLIKELY(!source)) return FALL_BACK;
  read_operands(f, w + 5, 2 * rank, values);
  if (w[4]) return tracked_view(f, w, values);
  if (UNLIKELY(api.reinterpret(source, rank, values, values + rank, operand(f, w[3]), &handle))) return FALL_BACK;
  set_handle(f, w[0], handle);
  return NEXT;
}

enum Parameter { WORD, HANDLE, OPTIONAL_HANDLE, OUTPUT, OPERAND, WORDS, WORDS_ADDRESS };
const int64_t MAX_PARAMETERS = 24, FEW_PARAMETERS = 6, MAX_OUTPUTS = 12;

// Functions of torch's C interface have integers, addresses and doubles as parameters. In the calling
// conventions of x86-64 and AArch64 doubles use registers of their own, so their places among the others don't
// matter, and a function doesn't see surplus arguments.
// function, count of integers, count of doubles, count of outputs, 2 * slot + is tensor..., (kind, value)...,
// doubles...
static Result call(Frame& f, const int64_t* w) {
  typedef int64_t I;
  typedef int32_t (*Function)(I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, I, double, double,
                              double, double);
  typedef int32_t (*FewParameters)(I, I, I, I, I, I, double, double, double, double);
  I i[MAX_PARAMETERS];
  double d[4] = {0, 0, 0, 0};
  Handle outputs[MAX_OUTPUTS];
  const int64_t* arrays[MAX_PARAMETERS];
  const int64_t* p = w + 4 + w[3];
  for (int64_t k = 0; k < w[1]; ++k, p += 2) {
    switch (p[0]) {
      case WORD: i[k] = p[1]; break;
      case HANDLE: i[k] = (I)f.slots[p[1]].handle; if (!i[k]) return FALL_BACK; break;
      case OPTIONAL_HANDLE: i[k] = (I)&f.slots[p[1]].handle; if (!f.slots[p[1]].handle) return FALL_BACK; break;
      case OUTPUT: outputs[p[1]] = 0; i[k] = (I)(outputs + p[1]); break;
      case OPERAND: i[k] = operand(f, p[1]); break;
      case WORDS: i[k] = (I)(f.code + p[1]); break;
      case WORDS_ADDRESS: arrays[k] = f.code + p[1]; i[k] = (I)(arrays + k); break;
    }
  }
  int64_t few = w[1] <= FEW_PARAMETERS;
  for (int64_t k = w[1]; k < (few ? FEW_PARAMETERS : MAX_PARAMETERS); ++k) i[k] = 0;
  for (int64_t k = 0; k < w[2]; ++k) d[k] = ((const double*)p)[k];
  release_gil(f);
  int32_t error = few ? ((FewParameters)w[0])(i[0], i[1], i[2], i[3], i[4], i[5], d[0], d[1], d[2], d[3])
                      : ((Function)w[0])(
      i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13], i[14], i[15], i[16],
      i[17], i[18], i[19], i[20], i[21], i[22], i[23], d[0], d[1], d[2], d[3]);
  if (UNLIKELY(error)) return FALL_BACK;
  for (int64_t k = 0; k < w[3]; ++k) {  // (slot, whether it is a tensor)...
    int64_t slot = w[4 + k] >> 1, is_tensor = w[4 + k] & 1;
    if (!is_tensor) {
      if (slot >= 0) f.slots[slot].owned = (int64_t)outputs[k];
    } else if (slot >= 0 && f.kinds[slot] == TENSOR) {
      set_handle(f, slot, outputs[k]);
    } else {
      api.delete_handle(outputs[k]);  // an undefined tensor, which is None, or one that nobody reads
    }
  }
  return NEXT;
}

// slot, source: the same tensor
static Result alias(Frame& f, const int64_t* w) {
  Handle source = f.slots[w[1]].handle, handle;
  if (!source || api.new_handle(source, &handle)) return FALL_BACK;
  set_handle(f, w[0], handle);
  return NEXT;
}

// register, function: an integer that only Python can give, such as a seed
static Result call_integer(Frame& f, const int64_t* w) {
  take_gil(f);
  Object value = api.vectorcall(f.objects[w[1]], 0, 0, 0);
  if (!value) return FAILED;
  f.registers[w[0]] = api.long_as(value);
  api.decref(value);
  return UNLIKELY(f.registers[w[0]] == -1 && api.error_occurred()) ? FAILED : NEXT;
}

// ---- steps ---------------------------------------------------------------------------------------

struct Step {
  int64_t length;       // words to the next step
  int64_t function;     // index of the Python function
  int64_t on_error;     // index of the function (status, arguments) that raises a kernel's error, or -1
  int64_t is_tuple;     // whether the Python function returns a tuple of the outputs
  int64_t num_inputs, num_outputs, num_dead;
  int64_t runs_python;  // set where torch refused a call that Python then did
  // inputs..., outputs..., dead..., instructions...
  const int64_t* inputs() const { return (const int64_t*)(this + 1); }
  const int64_t* outputs() const { return inputs() + num_inputs; }
  const int64_t* dead() const { return outputs() + num_outputs; }
  const int64_t* instructions() const { return dead() + num_dead; }
};

// The values of the step's inputs; false after a Python error.
static bool gather_inputs(Frame& f, const Step& step, Object* arguments) {
  for (int64_t k = 0; k < step.num_inputs; ++k) {
    arguments[k] = as_object(f, step.inputs()[k]);
    if (!arguments[k]) {
      while (k--) api.decref(arguments[k]);
      return false;
    }
  }
  return true;
}

static bool run_python(Frame& f, const Step& step) {
  take_gil(f);
  for (int64_t k = 0; k < step.num_outputs; ++k)
    if (step.outputs()[k] >= 0) drop(f, step.outputs()[k]);
  Object* arguments = (Object*)__builtin_alloca(8 * (step.num_inputs + 1));
  if (!gather_inputs(f, step, arguments)) return false;
  Object result = api.vectorcall(f.objects[step.function], arguments, step.num_inputs, 0);
  for (int64_t k = 0; k < step.num_inputs; ++k) api.decref(arguments[k]);
  if (!result) return false;
  if (!step.is_tuple) {
    if (step.num_outputs == 1 && step.outputs()[0] >= 0) set_object(f, step.outputs()[0], result);
    else api.decref(result);
    return true;
  }
  for (int64_t k = 0; k < step.num_outputs; ++k) {
    if (step.outputs()[k] < 0) continue;
    Object item = api.sequence_item(result, k);
    if (!item) { api.decref(result); return false; }
    set_object(f, step.outputs()[k], item);
  }
  api.decref(result);
  return true;
}

// A kernel has reported an error: raise it as Python does.
static bool raise_kernel_error(Frame& f, const Step& step, int64_t status) {
  take_gil(f);
  Object* arguments = (Object*)__builtin_alloca(8 * (step.num_inputs + 2));
  if (!gather_inputs(f, step, arguments + 1)) return false;
  arguments[0] = api.long_from(status);
  Object result = api.vectorcall(f.objects[step.on_error], arguments, step.num_inputs + 1, 0);
  for (int64_t k = 0; k <= step.num_inputs; ++k) api.decref(arguments[k]);
  if (result) api.decref(result);
  return false;
}

// Nanoseconds in kernels and library calls, of all programs and threads, while `is_timed` is set.
struct Clock { long seconds, nanoseconds; };
extern "C" int clock_gettime(int, Clock*);
static bool is_timed = false;
static int64_t kernel_time = 0;

EXPORT int64_t set_timing(int64_t enabled) {
  int64_t spent = kernel_time;
  kernel_time = 0;
  is_timed = enabled;
  return spent;
}
static int64_t now() {
  Clock clock;
  clock_gettime(1, &clock);  // CLOCK_MONOTONIC
  return clock.seconds * 1000000000 + clock.nanoseconds;
}

static bool run_step(Frame& f, Step& step) {
  if (UNLIKELY(step.runs_python)) return run_python(f, step);
  const int64_t* w = step.instructions();
  for (;; w += w[1]) {
    Result result = NEXT;
    int64_t status = 0;
    bool timed = UNLIKELY(is_timed) && (w[0] == RUN || w[0] == CALL);
    int64_t start = timed ? now() : 0;
    switch (w[0]) {
      case END: return true;
      case EVALUATE:
        if (!evaluate(f, w + 4, w[3], f.registers + w[2])) result = FALL_BACK;
        break;
      case CHECK: result = check(f, w + 2); break;
      case ALLOCATE: result = allocate(f, w + 2); break;
      case ALLOCATE_BY: result = allocate_by(f, w + 2); break;
      case RUN: result = run_kernel(f, w + 2, &status); break;
      case VARIANT: result = choose_variant(f, w + 2); break;
      case LAUNCH: result = launch(f, w + 2, &status); break;
      case VIEW: result = view(f, w + 2); break;
      case CALL: result = call(f, w + 2); break;
      case ALIAS: result = alias(f, w + 2); break;
      case SET_INTEGER: f.slots[w[2]].owned = operand(f, w[3]); break;
      case CALL_INTEGER: result = call_integer(f, w + 2); break;
      case PYTHON: result = FALL_BACK; break;
    }
    if (timed) __atomic_fetch_add(&kernel_time, now() - start, __ATOMIC_RELAXED);
    if (result == NEXT) continue;
    if (status) return raise_kernel_error(f, step, status);
    if (result == FAILED || !run_python(f, step)) return false;
    if (w[0] == CALL) step.runs_python = 1;
    return true;
  }
}

// ---- programs ------------------------------------------------------------------------------------

// A thread's first CUDA program: the driver needs a context, which torch's runtime calls create.
static __thread bool has_cuda_context = false;

static bool prepare_device(int64_t device) {
  Object index = api.vectorcall(api.current_device, 0, 0, 0);
  if (!index) { api.error_clear(); return false; }
  bool is_current = api.long_as(index) == device;
  if (is_current && UNLIKELY(!has_cuda_context)) {
    Object result = api.vectorcall(api.create_context, &index, 1, 0);
    if (result) { api.decref(result); has_cuda_context = true; }
    else api.error_clear();
  }
  api.decref(index);
  return is_current && has_cuda_context;
}

// Whether this call can run here: plain tensors, no mode or profiler that wants to see every op of torch.
static bool can_run(const Header& header, const int64_t* kinds, Object const* inputs, int64_t count) {
  if (count != header.num_inputs || *api.num_recordings || api.num_dispatch_modes()) return false;
  if (api.dict_item(api.profiler_dict, api.profiler_key) == api.true_) return false;
  for (int64_t k = 0; k < count; ++k)
    if (kinds[k] == TENSOR && UNLIKELY(!is_plain_tensor(inputs[k]))) return false;
  return header.device < 0 || prepare_device(header.device);
}

static Object make_outputs(Frame& f) {
  const Header& header = *f.header;
  Object tuple = api.tuple_new(header.num_outputs);
  for (int64_t k = 0; tuple && k < header.num_outputs; ++k) {
    Object value = as_object(f, f.code[header.outputs + k]);
    if (!value) { api.decref(tuple); return 0; }
    api.tuple_set(tuple, k, value);
  }
  return tuple;
}

static Object make_list(Object const* items, int64_t count, bool steals = false) {
  Object list = api.list_new(count);
  for (int64_t k = 0; k < count; ++k) {
    if (!list) {
      if (steals) api.decref(items[k]);
      continue;
    }
    if (!steals) api.incref(items[k]);
    api.list_set(list, k, items[k]);
  }
  return list;
}

// The trace as Python; `list` is null if the inputs did not come in one.
static Object run_python_form(Frame& f, Object const* inputs, int64_t count, Object list, bool steals) {
  Object given = list ? list : make_list(inputs, count, steals);
  Object result = given ? api.vectorcall(f.objects[f.header->python_form], &given, 1, 0) : 0;
  if (given && !list) api.decref(given);
  return result;
}

// list     holds the inputs, and is cleared; or null
// steals   the references to the inputs: each is released after its last use
static Object execute(Object self, Object const* inputs, int64_t count, Object list, bool steals = false) {
  Frame f;
  f.code = (const int64_t*)api.bytes_data(api.tuple_item(self, 0));
  f.header = (const Header*)f.code;
  const Header& header = *f.header;
  f.objects = (Object const*)header.objects;
  f.kinds = f.code + header.kinds;
  if (UNLIKELY(!can_run(header, f.kinds, inputs, count))) return run_python_form(f, inputs, count, list, steals);
  f.slots = (Slot*)__builtin_alloca(sizeof(Slot) * (header.num_slots + 1));
  f.registers = (int64_t*)__builtin_alloca(8 * (header.num_registers + 1));
  f.thread = 0;
  f.stream = 0;
  f.has_stream = false;
  for (int64_t k = 0; k < header.num_slots; ++k) f.slots[k] = Slot{0, 0, 0};
  for (int64_t k = 0; k < count; ++k) {
    if (!steals) api.incref(inputs[k]);
    set_object(f, k, inputs[k]);
  }
  for (int64_t k = 0; k < header.num_constants; ++k) {
    const int64_t* constant = f.code + header.constants + 2 * k;  // slot, object
    api.incref(f.objects[constant[1]]);
    set_object(f, constant[0], f.objects[constant[1]]);
  }
  if (list) api.list_set_slice(list, 0, count, 0);
  api.incref(self);  // a Python step may drop the last reference to the program
  const int64_t* word = f.code + header.steps;
  bool succeeded = true;
  while (*word) {
    Step& step = *(Step*)word;
    if (UNLIKELY(!run_step(f, step))) { succeeded = false; break; }
    for (int64_t k = 0; k < step.num_dead; ++k) drop(f, step.dead()[k]);
    word += step.length;
  }
  take_gil(f);
  Object result = succeeded ? make_outputs(f) : 0;
  for (int64_t k = 0; k < header.num_slots; ++k) drop(f, k);
  api.decref(self);
  return result;
}

// self: (words, objects...). inputs: a list, which is cleared. Returns a tuple.
EXPORT Object run_program(Object self, Object list) {
  int64_t count = api.list_size(list);
  if (count < 0) return 0;
  Object* inputs = (Object*)__builtin_alloca(8 * (count + 1));
  for (int64_t k = 0; k < count; ++k) inputs[k] = api.list_item(list, k);
  return execute(self, inputs, count, list);
}
