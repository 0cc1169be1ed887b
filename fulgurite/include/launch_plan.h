// Launch plans of hand-written kernels, replayed without Python. It continues training_call.h;
// `fulgurite/kernels/common/native_plan.py` writes the words, `launch_plan.py` says what a plan is.

struct Plan {
  int64_t device;                     // of CUDA, or -1: the CPU, for tests
  int64_t launch;                     // cuLaunchKernel
  Object modes[2], mode_values[2];    // functions, and what they returned when it was recorded: True or False
  Object allocate, acquire_counters, device_object, raise_error;
  Object build;                       // makes the result from tensors; null: the only one; `tuple`: a tuple
  int64_t num_names, num_values, num_tensors, num_allocations, num_results, num_counters, num_launches;
  // names..., values..., allocations..., counts of counters..., launches...
  const int64_t* words() const { return (const int64_t*)(this + 1); }
};

enum PlanValue { PLAN_TENSOR, PLAN_OBJECT, PLAN_TUPLE };

struct Matched {
  Handle* handles;
  int64_t count;
  bool records;  // gradients: plans have none
};

// dtype, rank, sizes..., strides...
static const int64_t* match_tensor(const Plan& plan, const int64_t* w, Object value, Matched& m) {
  if (!is_plain_tensor(value)) return 0;
  Handle handle = (char*)value + api.cdata_offset;
  int32_t dtype, device_type, device;
  int64_t rank, *sizes, *strides;
  if (api.get_dtype(handle, &dtype) || dtype != w[0] || api.dim(handle, &rank) || rank != w[1]) return 0;
  if (api.sizes(handle, &sizes) || api.strides(handle, &strides)) return 0;
  if (api.device_type(handle, &device_type) || device_type != (plan.device >= 0)) return 0;
  if (plan.device >= 0 && (api.device_index(handle, &device) || device != plan.device)) return 0;
  for (int64_t k = 0; k < rank; ++k)
    if (sizes[k] != w[2 + k] || strides[k] != w[2 + rank + k]) return 0;
  if (m.records) {
    Object requires_grad = api.get_attribute(value, api.requires_grad_key);
    if (!requires_grad) { api.error_clear(); return 0; }
    api.decref(requires_grad);
    if (requires_grad != api.false_) return 0;
  }
  m.handles[m.count++] = handle;
  return w + 2 + 2 * rank;
}

static bool is_equal(Object value, Object expected) {
  if (value == expected) return true;
  if (((Object*)value)[1] != ((Object*)expected)[1]) return false;
  int same = api.compare(value, expected, 2);  // Py_EQ
  if (same < 0) api.error_clear();
  return same == 1;
}

// The words after a value that the plan was recorded for; null if it is another.
static const int64_t* match_value(const Plan& plan, const int64_t* w, Object value, Matched& m) {
  if (w[0] == PLAN_TENSOR) return match_tensor(plan, w + 1, value, m);
  if (w[0] == PLAN_OBJECT) return is_equal(value, (Object)w[1]) ? w + 2 : 0;
  if (((Object*)value)[1] != (Object)w[1] || api.tuple_size(value) != w[2]) return 0;
  const int64_t* next = w + 3;
  for (int64_t k = 0; next && k < w[2]; ++k) next = match_value(plan, next, api.tuple_item(value, k), m);
  return next;
}

static bool returns(Object function, Object expected) {
  Object result = api.vectorcall(function, 0, 0, 0);
  if (!result) { api.error_clear(); return false; }
  api.decref(result);
  return result == expected;
}

// The words of the plan's allocations if the call is of its kind; null otherwise.
static const int64_t* match_call(const Plan& plan, Object const* arguments, int64_t count, Object names, Matched& m) {
  int64_t num_names = names ? api.tuple_size(names) : 0;
  if (num_names != plan.num_names || count + num_names != plan.num_values) return 0;
  const int64_t* w = plan.words();
  for (int64_t k = 0; k < num_names; ++k)
    if (!is_equal(api.tuple_item(names, k), (Object)w[k])) return 0;
  w += num_names;
  for (int64_t k = 0; w && k < plan.num_values; ++k) w = match_value(plan, w, arguments[k], m);
  for (int64_t k = 0; w && k < 2; ++k)
    if (!returns(plan.modes[k], plan.mode_values[k])) return 0;
  if (!w) return 0;
  return plan.device < 0 || prepare_device(plan.device) ? w : 0;
}

static bool address_of_object(Object tensor, int64_t* address) {
  return is_plain_tensor(tensor) && !api.data_ptr((char*)tensor + api.cdata_offset, (void**)address);
}

// sizes, strides, dtype, sizes of a view or 0, its strides, its offset
static Object allocate_result(const Plan& plan, const int64_t* w, int64_t* address) {
  Object tensor = api.vectorcall(plan.allocate, (Object const*)w, 3, 0);
  if (!tensor || !address_of_object(tensor, address) || !w[3]) return tensor;
  Object arguments[4] = {tensor, (Object)w[3], (Object)w[4], (Object)w[5]};
  Object view = api.vectorcall(api.as_strided, arguments, 4, 0);
  api.decref(tensor);
  return view;
}

typedef int32_t (*LaunchFunction)(void*, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, void*,
                                  void**, void**);

// function, threads, shared memory, grid..., count, (1, source, offset) or (0, value, 0)...
static int32_t launch_planned(const Plan& plan, const int64_t* w, const int64_t* addresses, void* stream) {
  int64_t count = w[6];
  int64_t* values = (int64_t*)__builtin_alloca(8 * (count + 2));
  void** pointers = (void**)__builtin_alloca(8 * (count + 2));
  for (int64_t k = 0; k < count; ++k) {
    const int64_t* a = w + 7 + 3 * k;
    values[k] = a[0] ? addresses[a[1]] + a[2] : a[1];
    pointers[k] = values + k;
  }
  values[count] = values[count + 1] = 0;  // Triton's scratch memory: none
  pointers[count] = values + count;
  pointers[count + 1] = values + count + 1;
  return ((LaunchFunction)plan.launch)((void*)w[0], w[3], w[4], w[5], w[1], 1, 1, w[2], stream, pointers, 0);
}

static Object build_result(const Plan& plan, Object* tensors) {
  if (!plan.build) {
    api.incref(tensors[0]);
    return tensors[0];
  }
  if (plan.build != api.tuple_type) return api.vectorcall(plan.build, tensors, plan.num_results, 0);
  Object tuple = api.tuple_new(plan.num_results);
  for (int64_t k = 0; tuple && k < plan.num_results; ++k) {
    api.incref(tensors[k]);
    api.tuple_set(tuple, k, tensors[k]);
  }
  return tuple;
}

// Allocates, launches and returns the result. `held` is what was allocated, for the caller to release.
static Object replay(const Plan& plan, const int64_t* w, int64_t* addresses, Object* held, int64_t* num_held) {
  int64_t entry = plan.num_tensors;
  for (int64_t k = 0; k < plan.num_allocations; ++k, w += 6) {
    Object tensor = allocate_result(plan, w, addresses + entry++);
    if (!tensor) return 0;
    held[(*num_held)++] = tensor;
  }
  for (int64_t k = 0; k < plan.num_counters; ++k, ++w) {
    Object arguments[2] = {plan.device_object, (Object)w[0]};
    Object counters = api.vectorcall(plan.acquire_counters, arguments, 2, 0);
    if (!counters) return 0;
    held[(*num_held)++] = counters;
    address_of_object(counters, addresses + entry++);
  }
  void* stream = 0;
  int32_t error = plan.device >= 0 ? api.current_stream(plan.device, &stream) : 0;
  for (int64_t k = 0; !error && k < plan.num_launches; ++k, w += 7 + 3 * w[6])
    error = launch_planned(plan, w, addresses, stream);
  if (!error) return build_result(plan, held);
  Object code = api.long_from(error);
  Object result = code ? api.vectorcall(plan.raise_error, &code, 1, 0) : 0;
  if (code) api.decref(code);
  if (result) api.decref(result);
  return 0;
}

// Replays the plan in `found` if the call is of its kind; *is_match says whether it was.
static Object try_plan(const Plan& plan, Object const* arguments, int64_t count, Object names, bool* is_match) {
  Handle* handles = (Handle*)__builtin_alloca(8 * (plan.num_tensors + 1));
  int64_t num_entries = plan.num_tensors + plan.num_allocations + plan.num_counters;
  int64_t* addresses = (int64_t*)__builtin_alloca(8 * (num_entries + 1));
  Object* held = (Object*)__builtin_alloca(8 * (num_entries + 1));
  Matched m = {handles, 0, api.is_grad_enabled()};
  const int64_t* w = match_call(plan, arguments, count, names, m);
  int64_t bits = 0, num_held = 0;
  for (int64_t k = 0; w && k < plan.num_tensors; ++k) {
    if (api.data_ptr(handles[k], (void**)(addresses + k))) return 0;
    bits |= addresses[k];
  }
  if (!w || bits & 15) return 0;
  *is_match = true;
  Object result = replay(plan, w, addresses, held, &num_held);
  for (int64_t k = 0; k < num_held; ++k) api.decref(held[k]);
  return result;
}

// self: (list of plans, the last used first, each (words, objects...); the Python function that finds others)
EXPORT Object call_planned(Object self, Object const* arguments, int64_t count, Object names) {
  Object plans = api.tuple_item(self, 0);
  if (!api.num_dispatch_modes())
    for (int64_t k = 0; k < api.list_size(plans); ++k) {
      Object plan = api.list_item(plans, k);
      api.incref(plan);  // an allocation may run Python, which may change the list
      bool is_match = false;
      const Plan& words = *(const Plan*)api.bytes_data(api.tuple_item(plan, 0));
      Object result = try_plan(words, arguments, count, names, &is_match);
      api.decref(plan);
      if (is_match) return result;
    }
  return api.vectorcall(api.tuple_item(self, 1), arguments, count, names);
}
