// Training graphs: forward and backward of the autograd function that runs them, without Python. It continues
// direct_call.h; `fulgurite/capture/training.py` has the same functions in Python. They run where anything is
// unusual: gradients of gradients, autocast, functorch, a backward graph that is not built yet.

struct Training {
  Object forward_graph;    // has an attribute `run`
  Object graphs;           // has an attribute `backward`: a graph, or None
  Object python_backward;
  Object read_versions;    // of the inputs, where one is no plain tensor
  int64_t num_outputs, num_sizes, num_tangents, num_non_differentiable, num_unsafe_views;
  int64_t keeps_inputs, may_miss_gradients, forbids_deterministic;
  // non-differentiable outputs..., unsafe views..., (output, coerce, rank or -1, strides...) of each tangent...
  const int64_t* non_differentiable() const { return (const int64_t*)(this + 1); }
  const int64_t* unsafe_views() const { return non_differentiable() + num_non_differentiable; }
  const int64_t* tangents() const { return unsafe_views() + num_unsafe_views; }
};

static const Training& training_of(Object self) {
  return *(const Training*)api.bytes_data(api.tuple_item(self, 0));
}

static bool returns_false(Object function) {
  Object result = api.vectorcall(function, 0, 0, 0);
  if (!result) { api.error_clear(); return false; }
  api.decref(result);
  return result == api.false_;
}

static Object as_tuple(Object values) {  // steals
  if (!values || ((Object*)values)[1] == api.tuple_type) return values;
  Object tuple = api.sequence_tuple(values);
  api.decref(values);
  return tuple;
}

static bool set_and_release(Object target, Object name, Object value) {  // steals `value`
  if (!value) return false;
  int error = api.set_attribute(target, name, value);
  api.decref(value);
  return !error;
}

// self: (a list: the function's `apply`, or None before the first call. The Python function that makes it)
EXPORT Object call_training(Object self, Object const* arguments, int64_t count) {
  Object apply = api.list_item(api.tuple_item(self, 0), 0);
  if (apply == api.none || !api.is_grad_enabled() || !returns_false(api.has_functorch_transforms))
    return api.vectorcall(api.tuple_item(self, 1), arguments, count, 0);
  return api.vectorcall(apply, arguments, count, 0);
}

// ---- forward -------------------------------------------------------------------------------------

// The versions of the inputs that are tensors, as a tuple; null with a Python error.
static Object read_versions(const Training& t, Object values, Object const* inputs, int64_t count) {
  Object versions = api.tuple_new(count);
  int64_t k = 0;
  for (; versions && k < count && is_plain_tensor(inputs[k]); ++k) {
    Object version = api.get_attribute(inputs[k], api.version_key);
    if (!version) { api.error_clear(); break; }  // an inference tensor
    api.tuple_set(versions, k, version);
  }
  if (!versions || k == count) return versions;
  api.decref(versions);
  return api.vectorcall(t.read_versions, &values, 1, 0);
}

// ctx.call_inputs = inputs, versions: what double backward needs
static bool keep_inputs(const Training& t, Object ctx, Object const* inputs, int64_t count) {
  Object pair = api.tuple_new(2), values = pair ? api.tuple_new(count) : 0;
  if (!values) { if (pair) api.decref(pair); return false; }
  for (int64_t k = 0; k < count; ++k) {
    api.incref(inputs[k]);
    api.tuple_set(values, k, inputs[k]);
  }
  api.tuple_set(pair, 0, values);
  Object versions = read_versions(t, values, inputs, count);
  if (!versions) { api.decref(pair); return false; }
  api.tuple_set(pair, 1, versions);
  return set_and_release(ctx, api.call_inputs_key, pair);
}

// A saved view keeps its base's autograd graph alive; its version counter is shared either way.
static Object without_base(Object tensor) {
  if (((Object*)tensor)[1] == api.parameter_type) { api.incref(tensor); return tensor; }  // never a view
  Object is_view = api.vectorcall(api.is_view, &tensor, 1, 0);
  if (!is_view) return 0;
  api.decref(is_view);
  if (is_view == api.true_) return api.vectorcall(api.detach, &tensor, 1, 0);
  api.incref(tensor);
  return tensor;
}

static Object saved_tensors(Object results, int64_t first, int64_t count) {
  Object saved = api.tuple_new(count);
  for (int64_t k = 0; saved && k < count; ++k) {
    Object tensor = without_base(api.tuple_item(results, first + k));
    if (!tensor) { api.decref(saved); return 0; }
    api.tuple_set(saved, k, tensor);
  }
  return saved;
}

static Object slice(Object tuple, int64_t first, int64_t count) {
  Object part = api.tuple_new(count);
  for (int64_t k = 0; part && k < count; ++k) {
    Object item = api.tuple_item(tuple, first + k);
    api.incref(item);
    api.tuple_set(part, k, item);
  }
  return part;
}

// The same tensor without its base: autograd must not know that it is a view of an intermediate value.
static Object untracked_alias(Object tensor) {
  Handle handle = (char*)tensor + api.cdata_offset, made;
  int64_t rank, *sizes, *strides;
  if (!is_plain_tensor(tensor) || api.dim(handle, &rank) || api.sizes(handle, &sizes) || api.strides(handle, &strides) ||
      api.reinterpret(handle, rank, sizes, strides, 0, &made))
    return api.vectorcall(api.unsafe_view, &tensor, 1, 0);
  Object wrapped = api.wrap(made);
  api.delete_handle(made);
  return wrapped;
}

static bool replace_unsafe_views(const Training& t, Object outputs) {
  for (int64_t k = 0; k < t.num_unsafe_views; ++k) {
    int64_t position = t.unsafe_views()[k];
    Object alias = untracked_alias(api.tuple_item(outputs, position));
    if (!alias) return false;
    api.tuple_set(outputs, position, alias);
  }
  return true;
}

static bool mark_non_differentiable(const Training& t, Object ctx, Object outputs) {
  if (!t.num_non_differentiable) return true;
  Object found[2] = {api.list_new(0), 0};
  for (int64_t k = 0; found[0] && k < t.num_non_differentiable; ++k) {
    Object output = api.tuple_item(outputs, t.non_differentiable()[k]);
    if (!is_plain_tensor(output)) continue;
    Object one = make_list(&output, 1);
    if (!one) { api.decref(found[0]); return false; }
    int64_t end = api.list_size(found[0]);
    api.list_set_slice(found[0], end, end, one);
    api.decref(one);
  }
  return set_and_release(ctx, api.non_differentiable_key, as_tuple(found[0])) &&
         !api.set_attribute(ctx, api.materialize_key, api.false_);
}

// self: (words, objects...). arguments: ctx, inputs... Returns the tuple of outputs.
EXPORT Object run_training_forward(Object self, Object const* arguments, int64_t count) {
  const Training& t = training_of(self);
  Object ctx = arguments[0];
  if (t.keeps_inputs && !keep_inputs(t, ctx, arguments + 1, count - 1)) return 0;
  if (t.may_miss_gradients && api.set_attribute(ctx, api.materialize_all_key, api.false_)) return 0;
  Object run = api.get_attribute(t.forward_graph, api.run_key);
  if (!run) return 0;
  Object results = as_tuple(run_graph(run, arguments + 1, count - 1, false));
  api.decref(run);
  if (!results) return 0;
  int64_t first_size = api.tuple_size(results) - t.num_sizes;
  bool kept = set_and_release(ctx, api.to_save_key, saved_tensors(results, t.num_outputs, first_size - t.num_outputs));
  if (kept && t.num_sizes) kept = set_and_release(ctx, api.sizes_key, slice(results, first_size, t.num_sizes));
  Object outputs = kept ? slice(results, 0, t.num_outputs) : 0;
  api.decref(results);
  if (outputs && !(replace_unsafe_views(t, outputs) && mark_non_differentiable(t, ctx, outputs))) {
    api.decref(outputs);
    return 0;
  }
  return outputs;
}

// ---- backward ------------------------------------------------------------------------------------

// The gradient in the layout that the backward graph was traced with, as a new reference.
static Object coerce_gradient(Object gradient, Object coerce, int64_t expected_rank, const int64_t* expected) {
  if (((Object*)gradient)[1] == api.tensor_type && expected_rank >= 0) {
    Handle handle = (char*)gradient + api.cdata_offset;
    int64_t rank, *strides;
    bool same = !api.dim(handle, &rank) && rank == expected_rank && !api.strides(handle, &strides);
    for (int64_t k = 0; same && k < rank; ++k) same = strides[k] == expected[k];
    if (same) {
      api.incref(gradient);
      return gradient;
    }
  }
  return api.vectorcall(coerce, &gradient, 1, 0);
}

static void release_all(Object* values, int64_t count) {
  for (int64_t k = 0; k < count; ++k) api.decref(values[k]);
}

static int64_t copy_items(Object tuple, int64_t count, Object* values) {
  for (int64_t k = 0; k < count; ++k) {
    values[k] = api.tuple_item(tuple, k);
    api.incref(values[k]);
  }
  return count;
}

// Whether an output has no gradient. Python then chooses the backward graph.
static bool misses_gradients(const Training& t, Object const* given, Object list) {
  if (!t.may_miss_gradients) return false;
  const int64_t* w = t.tangents();
  for (int64_t k = 0; k < t.num_tangents; ++k, w += 3 + (w[2] > 0 ? w[2] : 0))
    if ((list ? api.list_item(list, w[0]) : given[w[0]]) == api.none) return true;
  return false;
}

// Appends the gradients to `values`; -1 after a Python error.
static int64_t add_gradients(const Training& t, Object const* given, Object list, Object* values, int64_t count) {
  const int64_t* w = t.tangents();
  for (int64_t k = 0; k < t.num_tangents; ++k, w += 3 + (w[2] > 0 ? w[2] : 0)) {
    Object gradient = list ? api.list_item(list, w[0]) : given[w[0]];
    Object value = gradient ? coerce_gradient(gradient, (Object)w[1], w[2], w + 3) : 0;
    if (!value) { release_all(values, count); return -1; }
    values[count++] = value;
  }
  if (list) api.list_set_slice(list, 0, api.list_size(list), 0);  // frees the gradients early
  return count;
}

// Enters a copy of the context of the thread that called backward: devices have threads of their own. null: none.
static Object enter_context() {
  Object found = api.vectorcall(api.has_thread_object, &api.context_key, 1, 0);
  if (found) api.decref(found);
  Object context = found == api.true_ ? api.vectorcall(api.get_thread_object, &api.context_key, 1, 0) : 0;
  Object copy = context && context != api.none ? api.context_copy(context) : 0;
  if (context) api.decref(context);
  if (copy && api.context_enter(copy)) { api.decref(copy); copy = 0; }
  return copy;
}

static Object run_backward_graph(Object graph, Object* values, int64_t count) {
  Object run = api.get_attribute(graph, api.run_key);
  if (!run) { release_all(values, count); return 0; }
  Object context = enter_context();
  Object result = 0;
  if (UNLIKELY(api.error_occurred() != 0)) release_all(values, count);
  else result = as_tuple(run_graph(run, values, count, true));
  if (context) { api.context_exit(context); api.decref(context); }
  api.decref(run);
  return result;
}

static bool is_usual_backward(const Training& t, Object graph) {
  return graph != api.none && !api.is_grad_enabled() && returns_none(api.functorch_stack) &&
         returns_false(api.has_autocast) && (!t.forbids_deterministic || returns_false(api.is_deterministic));
}

// The graph will not be differentiated again: free what only its forward pass still holds.
static bool release_graph(const Training& t, Object ctx) {
  if (t.keeps_inputs && returns_false(api.keeps_graph) && api.set_attribute(ctx, api.call_inputs_key, api.none))
    return false;
  Object cleared = api.vectorcall_method(api.clear_saved_key, &ctx, 1, 0);
  if (cleared) api.decref(cleared);
  return cleared != 0;
}

// self: (words, objects...). arguments: ctx, then the gradients, or one list of them, which is cleared.
EXPORT Object run_training_backward(Object self, Object const* arguments, int64_t count) {
  const Training& t = training_of(self);
  Object ctx = arguments[0], graph = api.get_attribute(t.graphs, api.backward_key);
  if (!graph) return 0;
  Object list = count == 2 && ((Object*)arguments[1])[1] == api.list_type ? arguments[1] : 0;
  if (!is_usual_backward(t, graph) || misses_gradients(t, arguments + 1, list)) {
    api.decref(graph);
    return api.vectorcall(t.python_backward, arguments, count, 0);
  }
  Object saved = api.get_attribute(ctx, api.saved_tensors_key);  // raises if one was modified in place
  Object sizes = saved && t.num_sizes ? api.get_attribute(ctx, api.sizes_key) : 0;
  Object result = 0;
  if (saved && (sizes || !t.num_sizes)) {
    int64_t num_saved = api.tuple_size(saved);
    Object* values = (Object*)__builtin_alloca(8 * (t.num_sizes + num_saved + t.num_tangents + 1));
    int64_t total = t.num_sizes ? copy_items(sizes, t.num_sizes, values) : 0;
    total += copy_items(saved, num_saved, values + total);
    api.decref(saved);
    saved = 0;
    total = add_gradients(t, arguments + 1, list, values, total);
    if (total >= 0 && !release_graph(t, ctx)) { release_all(values, total); total = -1; }
    if (total >= 0) result = run_backward_graph(graph, values, total);
  }
  if (saved) api.decref(saved);
  if (sizes) api.decref(sizes);
  api.decref(graph);
  return result;
}
