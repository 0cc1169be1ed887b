// One request to the server: its answer as a stream of server-sent events, put together into a message.

class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

function makeHeaders() {
  const headers = { "Content-Type": "application/json" };
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  return headers;
}

// The names of the models, the first one first.
async function fetchModels() {
  const response = await request("v1/models", { headers: makeHeaders() });
  const { data } = await response.json();
  return data.map(({ id }) => id);
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(`The server can't be reached: ${error.message}`);
  }
  if (!response.ok) throw await readError(response);
  return response;
}

// What a refusal says: OpenAI's shape where it has that shape, else its first words.
async function readError(response) {
  const text = await response.text();
  let message = text.slice(0, 400);
  try {
    const body = JSON.parse(text);
    message = describeError(body.error ?? body);
  } catch (error) {
    // no JSON: the text itself
  }
  const retry = response.headers.get("Retry-After");
  const status = `${response.status} ${response.statusText}`.trim();
  const sentences = [message && endSentence(`${status}: ${message}`), retry && `Try again in ${retry} s.`];
  return new ServerError(sentences.filter(Boolean).join(" ") || status, response.status);
}

function endSentence(text) {
  return /[.!?]$/.test(text) ? text : `${text}.`;
}

function describeError(error) {
  if (typeof error === "string") return error;
  return error?.message ?? error?.detail ?? JSON.stringify(error);
}

// The data of each event, as text. An event ends with a blank line, or with the stream.
async function* readEvents(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    buffer += done ? decoder.decode() : decoder.decode(value, { stream: true });
    const events = buffer.split(/\r?\n\r?\n/);
    buffer = done ? "" : events.pop();
    for (const event of events) {
      const data = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (data.length) yield data.map((line) => line.slice(line[5] === " " ? 6 : 5)).join("\n");
    }
    if (done) return;
  }
}

// ---- an answer ----------------------------------------------------------------------------------

function makeAnswer() {
  return { role: "assistant", content: "", reasoning: "", calls: [], tokens: [], finish: null, error: null, stats: null };
}

// Stream an answer into `message`. `onChange` is called after each event. Throws what stops it.
async function streamAnswer(body, message, signal, onChange) {
  const clock = new Clock();
  message.stats = clock.stats;
  const options = { method: "POST", headers: makeHeaders(), body: JSON.stringify(body), signal };
  const response = await request("v1/chat/completions", options);
  for await (const data of readEvents(response)) {
    if (data === "[DONE]") return;
    const chunk = parseChunk(data);
    if (chunk.error) throw new ServerError(describeError(chunk.error));
    applyChunk(message, chunk, clock);
    onChange();
  }
  if (!message.finish) throw new ServerError("The stream ended before the answer was complete.");
}

function parseChunk(data) {
  try {
    return JSON.parse(data);
  } catch (error) {
    throw new ServerError(`The server sent an event that is not JSON: ${data.slice(0, 200)}`);
  }
}

function applyChunk(message, chunk, clock) {
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  const logprobs = choice?.logprobs?.content ?? [];
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  if (delta.content) {
    message.tokens.push(...placeTokens(logprobs, delta.content, message.content.length));
    message.content += delta.content;
  }
  message.reasoning += reasoning;
  for (const part of delta.tool_calls ?? []) applyCall(message.calls, part);
  if (delta.content || reasoning || delta.tool_calls?.length) clock.count(logprobs.length || 1);
  if (choice?.finish_reason) message.finish = choice.finish_reason;
  if (chunk.usage) clock.use(chunk.usage);
}

function applyCall(calls, { index = 0, id, function: called = {} }) {
  let call = calls.find((known) => known.index === index);
  if (!call) calls.push((call = { index, id: "", name: "", arguments: "", result: null }));
  if (id) call.id = id;
  call.name += called.name ?? "";
  call.arguments += called.arguments ?? "";
}

// Times and token counts of one answer. The counts are the server's where it has sent them (`exact`).
class Clock {
  constructor() {
    this.start = performance.now();
    this.stats = { first: null, last: null, tokens: 0, prompt: null, cached: 0, exact: false };
  }

  count(tokens) {
    const now = (performance.now() - this.start) / 1000;
    this.stats.first ??= now;
    this.stats.last = now;
    if (!this.stats.exact) this.stats.tokens += tokens;
  }

  use(usage) {
    this.stats.exact = true;
    this.stats.tokens = usage.completion_tokens ?? this.stats.tokens;
    this.stats.prompt = usage.prompt_tokens ?? null;
    this.stats.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  }
}

// Tokens a second, from the first token to the last; null where there is no time between them.
function computeRate({ first, last, tokens }) {
  return tokens > 1 && last > first ? (tokens - 1) / (last - first) : null;
}
