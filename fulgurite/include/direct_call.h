// Direct calls: the way from a compiled function's call to its graph, without Python. It continues
// graph_replay.h; `fulgurite/capture/direct_call.py` says what is checked and why.

// Whether this thread may capture or differentiate forward now. Python then looks more closely.
EXPORT Object may_trace(Object, Object) {
  bool found = api.dict_item(api.compiler_dict, api.exporting_key) == api.true_ || api.num_dispatch_modes() ||
               api.includes_dispatch_key(api.pre_dispatch_key);
  if (!found) {
    Object values = api.get_attribute(api.tracing_local, api.dict_key);
    if (!values) return 0;
    Object context = api.dict_item(values, api.tracing_context_key);
    found = context && context != api.none;
    api.decref(values);
  }
  if (!found) {
    Object level = api.dict_item(api.forward_ad_dict, api.level_key);
    found = !level || api.long_as(level) >= 0;
  }
  Object result = found ? api.true_ : api.none;
  api.incref(result);
  return result;
}

static bool returns_none(Object function) {
  Object result = api.vectorcall(function, 0, 0, 0);
  if (!result) { api.error_clear(); return false; }
  api.decref(result);
  return result == api.none;
}

// self: (torch's function that returns the hooks on saved tensors, TorchDynamo's guard). A guard of a graph that was
// captured without hooks: TorchDynamo's looks at hooks that there are.
EXPORT Object has_no_saved_tensor_hooks(Object self, Object value) {
  Object hooks = api.vectorcall(api.tuple_item(self, 0), &api.true_, 1, 0);
  if (!hooks) return 0;
  api.decref(hooks);
  if (hooks != api.none) return api.vectorcall(api.tuple_item(self, 1), &value, 1, 0);
  api.incref(api.true_);
  return api.true_;
}

struct Direct {
  Object function, code, defaults, keyword_defaults;
  Object module;      // whose forward it is, or null
  Object bound_self;  // the first argument, or null
  Object bind;        // arguments -> local variables by name
  Object slow;        // calls through TorchDynamo
  Object entries;     // list of (guard manager, its check, the code to run)
  Object parameters;  // names, if arguments by position are all local variables; or null
};

// The local variables by name, as a new reference; null after a Python error.
static Object bind_arguments(const Direct& d, Object const* arguments, int64_t count, Object names) {
  if (!d.parameters || names || api.tuple_size(d.parameters) != count)
    return api.vectorcall(d.bind, arguments, count, names);
  Object values = api.dict_new();
  for (int64_t k = 0; values && k < count; ++k)
    if (api.dict_set(values, api.tuple_item(d.parameters, k), arguments[k])) { api.decref(values); return 0; }
  return values;
}

static bool is_unchanged(const Direct& d) {
  if (api.function_code(d.function) != d.code || api.function_defaults(d.function) != d.defaults ||
      api.function_keyword_defaults(d.function) != d.keyword_defaults)
    return false;
  if (!d.module) return true;
  Object values = api.get_dict(d.module, 0);
  if (!values) { api.error_clear(); return false; }
  bool same = !api.dict_item(values, api.forward_key);
  for (int64_t k = 0; same && k < 4; ++k) {
    Object hooks = api.dict_item(values, api.hook_keys[k]);
    same = hooks && api.length(hooks) == 0;
  }
  api.decref(values);
  if (!same) return false;
  Object forward = api.get_attribute(((Object*)d.module)[1], api.forward_key);
  if (!forward) { api.error_clear(); return false; }
  api.decref(forward);
  return forward == d.function;
}

static bool can_bypass_dynamo(const Direct& d) {
  if (api.dict_item(api.eval_frame_dict, api.stance_key) != api.default_stance) return false;
  for (int64_t k = 0; k < 6; ++k)
    if (api.length(api.global_hooks[k]) != 0) return false;
  return is_unchanged(d) && returns_none(api.get_frame_callback) && returns_none(api.get_tracing_state);
}

// The code of the first entry whose guards hold, as a new reference; null without or with a Python error.
static Object find_entry(const Direct& d, Object const* arguments, int64_t count, Object names) {
  if (api.list_size(d.entries) == 0) return 0;
  Object values = bind_arguments(d, arguments, count, names);
  if (!values) return 0;
  Object found = 0;
  for (int64_t k = 0; !found && k < api.list_size(d.entries); ++k) {
    Object entry = api.list_item(d.entries, k);
    api.incref(entry);  // guards may run Python, which may change the list
    Object cached = api.get_attribute(api.tuple_item(entry, 0), api.cache_entry_key);
    if (!cached) { api.decref(entry); break; }
    if (cached != api.none) {
      Object holds = api.vectorcall(api.tuple_item(entry, 1), &values, 1, 0);
      if (holds == api.true_) {
        found = api.tuple_item(entry, 2);
        api.incref(found);
      }
      if (holds) api.decref(holds);
    }
    api.decref(cached);
    api.decref(entry);
    if (api.error_occurred()) break;
  }
  api.decref(values);
  return found;
}

// self: (words, objects...). Calls the code of the entry that applies, or TorchDynamo.
EXPORT Object call_directly(Object self, Object const* arguments, int64_t count, Object names) {
  const Direct& d = *(const Direct*)api.bytes_data(api.tuple_item(self, 0));
  int64_t num_names = names ? api.tuple_size(names) : 0;
  if (can_bypass_dynamo(d)) {
    Object* all = (Object*)__builtin_alloca(8 * (count + num_names + 2));
    int64_t first = d.bound_self ? 1 : 0;
    all[0] = d.bound_self;
    for (int64_t k = 0; k < count + num_names; ++k) all[first + k] = arguments[k];
    Object run = find_entry(d, all, count + first, names);
    if (run) {
      Object result = api.vectorcall(run, all, count + first, names);
      api.decref(run);
      return result;
    }
    if (UNLIKELY(api.error_occurred())) return 0;
  }
  return api.vectorcall(d.slow, arguments, count, names);
}

// Runs what a graph's `run` is on the inputs. steals: their references
static Object run_graph(Object run, Object const* inputs, int64_t count, bool steals) {
  if (((Object*)run)[1] == api.builtin_type) {
    void* function = api.builtin_function(run);
    if (function == (void*)run_program) return execute(api.builtin_self(run), inputs, count, 0, steals);
    if (function == (void*)run_graphed) return execute_graphed(api.builtin_self(run), inputs, count, 0, steals);
  }
  Object list = make_list(inputs, count, steals);
  Object result = list ? api.vectorcall(run, &list, 1, 0) : 0;
  if (list) api.decref(list);
  return result;
}

// self: (a graph with an attribute `run`,). Runs the graph on the arguments, without gradient recording.
EXPORT Object call_graph(Object self, Object const* arguments, int64_t count) {
  Object run = api.get_attribute(api.tuple_item(self, 0), api.run_key);
  if (!run) return 0;
  bool records = api.is_grad_enabled();
  if (records) api.set_grad_enabled(false);
  Object result = run_graph(run, arguments, count, false);
  if (records) api.set_grad_enabled(true);
  api.decref(run);
  return result;
}
