// Replays of CUDA graphs without Python. It continues host_program.h; `fulgurite/cudagraph/native_replay.py`
// writes the words. A call replays the capture that followed the last one, if it serves these inputs. Everything
// else is left to `slow`, which is Python: other addresses, streams and devices, outputs that are still held.

struct Graphed {
  Object expected;          // a list of one: a weak reference to the capture that comes next, or None
  Object acquire, release;  // of the lock of the captures' memory
  Object slow;              // takes a list of inputs
  int64_t* replays;         // of all captures of the function
  const int64_t* stream;    // of the captures: whether it is known, and its handle
  int64_t device;           // of CUDA, or -1
};

enum ResultKind { GRAPH_MEMORY, GRAPH_COPY, GRAPH_INPUT, GRAPH_VIEW, GRAPH_CONSTANT };

struct GraphResult {
  int64_t kind;
  Object value;              // a tensor in the graph's memory, or a constant
  Object layout;             // of a copy: (allocating function, sizes, strides, dtype); of a view: (sizes, strides)
  int64_t number, offset;    // bytes of a copy; position of an input, and a view's offset to it
};

struct CopiedInput { int64_t position; Object buffer; };

struct Replay {
  Object replay;             // launches the graph
  Object copy_inputs;        // of a list of inputs: where many are copied, in one launch; or null
  Object draw_seeds, finish; // or null. finish: of the inputs and a list of results, which it completes
  Object shared;             // a list of the outputs that callers may hold, of all captures of the memory
  Object own_outputs;        // one of them, or null
  int64_t* state;            // number of replays, number of the function's last replay, whether Python has to look at it
  int64_t order, num_inputs, num_static, num_copied, num_results, num_dynamic;
  // (position, address)..., CopiedInput..., GraphResult..., (position, rank, sizes..., strides...) of tensors and
  // (position, -1, value) of integers that were captured with these
  const int64_t* static_inputs() const { return (const int64_t*)(this + 1); }
  const CopiedInput* copied() const { return (const CopiedInput*)(static_inputs() + 2 * num_static); }
  const GraphResult* results() const { return (const GraphResult*)(copied() + num_copied); }
  const int64_t* dynamic_inputs() const { return (const int64_t*)(results() + num_results); }
};

static inline Handle handle_of(Object tensor) { return (char*)tensor + api.cdata_offset; }

static bool has_layout(Object value, int64_t expected_rank, const int64_t* expected) {
  int64_t rank, *sizes, *strides;
  if (!is_plain_tensor(value) || api.dim(handle_of(value), &rank) || rank != expected_rank) return false;
  if (api.sizes(handle_of(value), &sizes) || api.strides(handle_of(value), &strides)) return false;
  for (int64_t k = 0; k < rank; ++k)
    if (sizes[k] != expected[k] || strides[k] != expected[rank + k]) return false;
  return true;
}

// Whether inputs of changing sizes, and integers, are those that were captured.
static bool has_captured_sizes(const Replay& r, Object const* inputs) {
  const int64_t* w = r.dynamic_inputs();
  for (int64_t k = 0; k < r.num_dynamic; ++k, w += w[1] < 0 ? 3 : 2 + 2 * w[1]) {
    Object value = inputs[w[0]];
    if (w[1] >= 0) {
      if (!has_layout(value, w[1], w + 2)) return false;
    } else {
      if (((Object*)value)[1] != api.int_type) return false;
      int64_t found = api.long_as(value);
      if (found == -1 && api.error_occurred()) { api.error_clear(); return false; }
      if (found != w[2]) return false;
    }
  }
  return true;
}

static bool takes(const Replay& r, Object const* inputs, int64_t count) {
  if (count != r.num_inputs || r.state[2]) return false;
  const int64_t* w = r.static_inputs();
  for (int64_t k = 0; k < r.num_static; ++k, w += 2) {
    void* address;
    if (!is_plain_tensor(inputs[w[0]]) || api.data_ptr(handle_of(inputs[w[0]]), &address) || (int64_t)address != w[1])
      return false;
  }
  for (int64_t k = 0; k < r.num_copied; ++k)
    if (!is_plain_tensor(inputs[r.copied()[k].position])) return false;
  return has_captured_sizes(r, inputs);
}

// Whether the current stream is that of the captures, and not being captured itself.
static bool is_on_stream(const Graphed& g, void** stream) {
  *stream = 0;
  if (g.device < 0) return true;
  if (!prepare_device(g.device) || api.current_stream(g.device, stream)) return false;
  if (!g.stream[0] || (int64_t)*stream != g.stream[1]) return false;
  Object capturing = api.vectorcall(api.is_capturing, 0, 0, 0);
  if (!capturing) { api.error_clear(); return false; }
  api.decref(capturing);
  return capturing == api.false_;
}

// Outputs that callers may hold, as `SharedOutputs.words`: order, count (or -1: ask Python), (storage, its
// references while nobody else holds it)...
static const int64_t* shared_words(Object outputs) {
  Object address = api.get_attribute(outputs, api.words_key);
  if (!address) { api.error_clear(); return 0; }
  int64_t found = api.long_as(address);
  api.decref(address);
  return (const int64_t*)found;
}

static bool are_held(const int64_t* words) {
  if (words[1] < 0) return true;
  for (int64_t k = 0; k < words[1]; ++k)
    if (*(const uint32_t*)(words[2 + 2 * k] + 8) > words[3 + 2 * k]) return true;
  return false;
}

// Whether nobody holds outputs of this capture or of later ones. Forgets those that are no longer held.
static bool may_replay(const Replay& r, bool* is_listed) {
  *is_listed = false;
  int64_t count = api.list_size(r.shared);
  for (int64_t k = 0; k < count; ++k) {
    const int64_t* words = shared_words(api.list_item(r.shared, k));
    if (!words || (words[0] >= r.order && are_held(words))) return false;
  }
  for (int64_t k = count; k--;) {
    Object outputs = api.list_item(r.shared, k);
    if (outputs == r.own_outputs && !*is_listed) *is_listed = true;
    else if (shared_words(outputs)[0] >= r.order) api.list_set_slice(r.shared, k, k + 1, 0);
  }
  return true;
}

static bool append(Object list, Object item) {
  Object one = make_list(&item, 1);
  int64_t end = api.list_size(list);
  bool appended = one && !api.list_set_slice(list, end, end, one);
  if (one) api.decref(one);
  return appended;
}

// Calls a function for its effect; false after a Python error.
static bool run_effect(Object function, Object const* arguments, int64_t count) {
  Object result = api.vectorcall(function, arguments, count, 0);
  if (result) api.decref(result);
  return result != 0;
}

static bool copy_inputs(const Replay& r, Object const* inputs, int64_t count) {
  if (r.copy_inputs) {
    Object list = make_list(inputs, count);
    bool copied = list && run_effect(r.copy_inputs, &list, 1);
    if (list) api.decref(list);
    if (!copied) api.error_clear();  // Python copies them again, and raises the error
    return copied;
  }
  for (int64_t k = 0; k < r.num_copied; ++k) {
    const CopiedInput& c = r.copied()[k];
    if (api.copy(handle_of(c.buffer), handle_of(inputs[c.position]), 1)) return false;
  }
  return true;
}

// A tensor in the graph's memory, as a new object.
static Object alias_of(Object tensor) {
  Handle handle = handle_of(tensor), made;
  int64_t rank, *sizes, *strides;
  if (api.dim(handle, &rank) || api.sizes(handle, &sizes) || api.strides(handle, &strides) ||
      api.reinterpret(handle, rank, sizes, strides, 0, &made))
    return api.vectorcall(api.detach, &tensor, 1, 0);
  Object wrapped = api.wrap(made);
  api.delete_handle(made);
  return wrapped;
}

// A copy of a dense tensor, on this stream.
static Object copy_of(const GraphResult& result, int64_t device, void* stream) {
  Object arguments[3];
  for (int64_t k = 0; k < 3; ++k) arguments[k] = api.tuple_item(result.layout, k + 1);
  Object made = api.vectorcall(api.tuple_item(result.layout, 0), arguments, 3, 0);
  if (!made || !result.number) return made;
  void *target, *source;
  int32_t error = api.data_ptr(handle_of(made), &target) || api.data_ptr(handle_of(result.value), &source);
  if (!error && device < 0) __builtin_memcpy(target, source, result.number);
  else if (!error) error = api.copy_memory(target, source, result.number, stream);
  if (UNLIKELY(error) && api.copy(handle_of(made), handle_of(result.value), 1)) {
    api.decref(made);
    return api.vectorcall(api.clone, &result.value, 1, 0);  // raises what torch raises
  }
  return made;
}

// A view of an input. Autograd must know that it shares the input's version counter.
static Object view_of(const GraphResult& result, Object input) {
  int64_t offset;
  if (!is_plain_tensor(input) || api.storage_offset(handle_of(input), &offset)) return 0;
  Object arguments[4] = {input, api.tuple_item(result.layout, 0), api.tuple_item(result.layout, 1),
                         api.long_from(offset + result.offset)};
  Object made = arguments[3] ? api.vectorcall(api.as_strided, arguments, 4, 0) : 0;
  if (arguments[3]) api.decref(arguments[3]);
  return made;
}

static Object make_result(const GraphResult& result, Object const* inputs, int64_t device, void* stream) {
  if (result.kind == GRAPH_MEMORY) return alias_of(result.value);
  if (result.kind == GRAPH_COPY) return copy_of(result, device, stream);
  if (result.kind == GRAPH_VIEW) return view_of(result, inputs[result.number]);
  Object value = result.kind == GRAPH_INPUT ? inputs[result.number] : result.value;
  api.incref(value);
  return value;
}

// The results as a tuple; as a list where Python completed them. null after a Python error.
static Object make_results(const Replay& r, Object const* inputs, int64_t count, int64_t device, void* stream) {
  Object results = r.finish ? api.list_new(r.num_results) : api.tuple_new(r.num_results);
  for (int64_t k = 0; results && k < r.num_results; ++k) {
    Object value = make_result(r.results()[k], inputs, device, stream);
    if (!value) { api.decref(results); return 0; }
    if (r.finish) api.list_set(results, k, value);
    else api.tuple_set(results, k, value);
  }
  if (!results || !r.finish) return results;
  Object arguments[2] = {make_list(inputs, count), results};
  bool finished = arguments[0] && run_effect(r.finish, arguments, 2);
  if (arguments[0]) api.decref(arguments[0]);
  if (finished) return results;
  api.decref(results);
  return 0;
}

// Whether this capture was replayed; then `result` is null after a Python error.
static bool try_replay(const Graphed& g, Object call, const Replay& r, Object const* inputs, int64_t count,
                       Object* result) {
  void* stream;
  bool is_listed;
  if (!takes(r, inputs, count) || !is_on_stream(g, &stream) || !may_replay(r, &is_listed)) return false;
  if (r.num_copied && !copy_inputs(r, inputs, count)) return false;
  Object successor = api.get_attribute(call, api.successor_key);
  if (!successor) { api.error_clear(); return false; }
  api.list_set(g.expected, 0, successor);
  r.state[1] = ++*g.replays;
  if (r.own_outputs && !is_listed && !append(r.shared, r.own_outputs)) return true;
  if (r.draw_seeds && !run_effect(r.draw_seeds, 0, 0)) return true;
  if (!run_effect(r.replay, 0, 0)) return true;
  int64_t replays = ++r.state[0];
  r.state[2] = r.num_copied && (replays == 4 || replays == 16 || replays == 64 || replays == 256);
  *result = make_results(r, inputs, count, g.device, stream);
  return true;
}

static bool try_expected(const Graphed& g, Object const* inputs, int64_t count, Object* result) {
  Object call = api.vectorcall(api.list_item(g.expected, 0), 0, 0, 0);
  Object plan = call && call != api.none ? api.get_attribute(call, api.plan_key) : 0;
  bool replayed = false;
  if (plan == api.none) {
    api.decref(plan);
  } else if (plan) {
    const Replay& r = *(const Replay*)api.bytes_data(api.tuple_item(plan, 0));
    replayed = try_replay(g, call, r, inputs, count, result);
    api.decref(plan);
  } else if (api.error_occurred()) {
    api.error_clear();
  }
  if (call) api.decref(call);
  return replayed;
}

static void release_lock(const Graphed& g) {
  Object type, value, trace;
  api.error_fetch(&type, &value, &trace);
  if (!run_effect(g.release, 0, 0)) api.error_clear();
  if (type) api.error_restore(type, value, trace);
}

// list     holds the inputs; or null
// steals   the references to the inputs
static Object execute_graphed(Object self, Object const* inputs, int64_t count, Object list, bool steals) {
  const Graphed& g = *(const Graphed*)api.bytes_data(api.tuple_item(self, 0));
  Object result = 0;
  bool replayed = false;
  api.incref(self);
  if (api.list_item(g.expected, 0) != api.none && !api.num_dispatch_modes()) {
    Object acquired = api.vectorcall(g.acquire, &api.false_, 1, 0);
    if (acquired == api.true_) {
      replayed = api.list_item(g.expected, 0) != api.none && try_expected(g, inputs, count, &result);
      release_lock(g);
    }
    if (acquired) api.decref(acquired);
    else api.error_clear();
  }
  if (!replayed) {
    Object given = list ? list : make_list(inputs, count);
    if (given) result = api.vectorcall(g.slow, &given, 1, 0);
    if (given && !list) api.decref(given);
  }
  if (steals)
    for (int64_t k = 0; k < count; ++k) api.decref(inputs[k]);
  api.decref(self);
  return result;
}

// self: (words, objects...). inputs: a list. Returns the results.
EXPORT Object run_graphed(Object self, Object list) {
  int64_t count = api.list_size(list);
  if (count < 0) return 0;
  Object* inputs = (Object*)__builtin_alloca(8 * (count + 1));
  for (int64_t k = 0; k < count; ++k) inputs[k] = api.list_item(list, k);
  return execute_graphed(self, inputs, count, list, false);
}
