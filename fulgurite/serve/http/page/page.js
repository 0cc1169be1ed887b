// The conversation: sending, streaming, stopping, regenerating, editing; keys, themes, and the start of the page.
//
// A conversation is a list of messages, in this order: the user's ({ role, content }) and answers (see `makeAnswer`). The
// results of tool calls are kept in the answer that made the calls.

const entry = one("#entry");
const log = one("#log");
const modelChoice = one("#model");
const chat = { messages: loadMessages(), running: null, starting: false };
const views = new WeakMap(); // the view of each answer: what the reader has unfolded stays so

// ---- keeping ------------------------------------------------------------------------------------

function loadMessages() {
  const messages = load("chat");
  if (!Array.isArray(messages)) return [];
  const complete = (message) => {
    if (message.role !== "assistant") return message;
    const answer = { ...makeAnswer(), ...message };
    if (!answer.finish && !answer.error) answer.finish = "stopped"; // the page was closed while it streamed
    return answer;
  };
  return messages.filter((message) => typeof message?.content === "string").map(complete);
}

// Probabilities are large: without room for them, the text alone is kept.
function saveMessages() {
  const bare = () => chat.messages.map((message) => (message.tokens ? { ...message, tokens: [] } : message));
  if (save("chat", chat.messages) || save("chat", bare())) return;
  showNotice("This conversation is too long to be kept by the browser. It is lost when the tab is closed.");
}

function showNotice(text) {
  const notice = one("#notice");
  notice.hidden = !text;
  notice.textContent = text ?? "";
}

// ---- the messages of a request ------------------------------------------------------------------

function buildMessages(messages) {
  const system = form.elements.system.value;
  const built = system.trim() ? [{ role: "system", content: system }] : [];
  return built.concat(messages.flatMap(buildMessage));
}

function buildMessage(message) {
  if (message.role === "user") return [{ role: "user", content: message.content }];
  const calls = hasCompleteCalls(message) ? message.calls : [];
  if (!calls.length) return message.content ? [{ role: "assistant", content: message.content }] : [];
  const toolCalls = calls.map(({ id, name, arguments: text }) => ({
    id,
    type: "function",
    function: { name, arguments: text },
  }));
  const results = calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result ?? "" }));
  return [{ role: "assistant", content: message.content || null, tool_calls: toolCalls }, ...results];
}

function buildBody() {
  return {
    model: modelChoice.value,
    messages: buildMessages(chat.messages),
    stream: true,
    stream_options: { include_usage: true },
    ...readRequestFields(),
  };
}

// ---- one answer ---------------------------------------------------------------------------------

// Ask for the next answer. Returns false, with a notice, where the settings or the models forbid it.
async function ask() {
  if (modelChoice.disabled && !(await loadModels())) return false;
  const body = tryBuildBody();
  if (!body) return false;
  const message = makeAnswer();
  const running = { stopper: new AbortController(), message, view: null };
  chat.messages.push(message);
  chat.running = running;
  chat.starting = false;
  drawLog();
  await stream(body, running);
  if (chat.running !== running) return true; // the conversation was left: the answer belongs to nobody
  chat.running = null;
  saveMessages();
  finishLog();
  return true;
}

function tryBuildBody() {
  try {
    return buildBody();
  } catch (error) {
    if (!(error instanceof SettingError)) throw error;
    openSettings(true, error.field);
    showNotice(error.message);
    return null;
  }
}

async function stream(body, running) {
  const { message, stopper } = running;
  const start = performance.now();
  const progress = () => running.view?.drawProgress((performance.now() - start) / 1000);
  const timer = setInterval(progress, 100);
  running.drawProgress = progress;
  try {
    const drawing = streamAnswer(body, message, stopper.signal, () => scheduleDraw(running));
    progress();
    await drawing;
  } catch (error) {
    if (stopper.signal.aborted) message.finish = "stopped";
    else message.error = describeFailure(error);
  } finally {
    clearInterval(timer);
  }
}

function describeFailure(error) {
  if (!(error instanceof ServerError)) return `The connection broke: ${error.message}`;
  return error.status === 401 ? `${error.message} Enter the API key in Settings.` : error.message;
}

// At most one drawing a frame, however many tokens come.
function scheduleDraw(running) {
  if (running.scheduled) return;
  running.scheduled = true;
  requestAnimationFrame(() => {
    running.scheduled = false;
    if (chat.running !== running) return;
    keepBottom(() => {
      running.view.draw();
      running.drawProgress(); // with the text: never "waiting" beside tokens
    });
  });
}

// A reader at the end of the page stays there; one who scrolled up is left alone.
function keepBottom(change) {
  const page = document.documentElement;
  const atBottom = page.scrollHeight - innerHeight - scrollY < 80;
  change();
  if (atBottom) scrollTo(0, page.scrollHeight);
}

// ---- what the user does -------------------------------------------------------------------------

async function send() {
  const text = entry.value;
  if (chat.running || chat.starting || !text.trim()) return;
  const last = chat.messages.at(-1);
  if (last?.role === "assistant" && needsResults(last)) {
    showNotice("Enter the result of the tool call first, or start a new chat.");
    one(".call textarea")?.focus();
    return;
  }
  entry.value = "";
  await askFrom([...chat.messages, { role: "user", content: text }], () => (entry.value = text));
}

// Continue from these messages; where that can't start, everything is as before.
async function askFrom(messages, undo = () => {}) {
  if (chat.running || chat.starting) return;
  const before = chat.messages;
  chat.messages = messages;
  chat.starting = true;
  showNotice(null);
  const asking = ask();
  scrollTo(0, document.documentElement.scrollHeight);
  if (await asking) return;
  chat.starting = false;
  chat.messages = before;
  undo();
  finishLog();
}

function stop() {
  chat.running?.stopper.abort();
}

function regenerate() {
  askFrom(chat.messages.slice(0, -1));
}

function sendResults(results) {
  const last = chat.messages.at(-1);
  const calls = last.calls.map((call, index) => ({ ...call, result: results[index] }));
  askFrom([...chat.messages.slice(0, -1), { ...last, calls }]);
}

function edit(index, element) {
  const cancel = () => {
    finishLog();
    entry.focus();
  };
  const submit = (content) => askFrom([...chat.messages.slice(0, index), { role: "user", content }]);
  const editor = makeEditor(chat.messages[index].content, submit, cancel);
  element.replaceWith(editor);
  one("textarea", editor).focus();
}

function startNewChat() {
  stop();
  chat.running = null;
  chat.messages = [];
  saveMessages();
  showNotice(null);
  finishLog();
  entry.focus();
}

// ---- the log ------------------------------------------------------------------------------------

// All messages; the last answer is the one that is being written, if one is.
function drawLog() {
  const lastUser = chat.messages.findLastIndex(({ role }) => role === "user");
  const { running, messages } = chat;
  const elements = messages.map((message, index) => {
    const isLast = index === messages.length - 1;
    if (message.role === "user") return drawUser(message, index, !running && index === lastUser);
    const view = views.get(message) ?? new AnswerView(message, { regenerate, sendResults });
    views.set(message, view);
    if (running?.message === message) running.view = view;
    else view.finish(isLast && !running);
    return view.element;
  });
  log.replaceChildren(...elements);
  log.ariaBusy = String(Boolean(running)); // an answer is read aloud when it is complete
  one("#welcome").hidden = messages.length > 0;
  one("#send").hidden = Boolean(running);
  one("#stop").hidden = !running;
}

function drawUser(message, index, mayEdit) {
  const element = makeUserMessage(message, mayEdit && (() => edit(index, element)));
  return element;
}

function finishLog() {
  keepBottom(drawLog);
}

// ---- models, keys, themes -----------------------------------------------------------------------

async function loadModels() {
  try {
    const names = await fetchModels();
    if (!names.length) throw new ServerError("The server has no model.");
    const kept = load("model");
    modelChoice.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    modelChoice.value = names.includes(kept) ? kept : names[0];
    modelChoice.disabled = false;
    showNotice(null);
    return true;
  } catch (error) {
    showNotice(describeFailure(error));
    return false;
  }
}

const THEMES = ["auto", "light", "dark"];
const themeButton = one("#theme");

function useTheme(name) {
  themeButton.textContent = name;
  themeButton.ariaLabel = `colours: ${name}`;
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
}

themeButton.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(themeButton.textContent) + 1) % THEMES.length];
  useTheme(next);
  save("theme", next);
});
one("#new-chat").addEventListener("click", startNewChat);
one("#stop").addEventListener("click", stop);
one("#composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
entry.addEventListener("keydown", (event) => {
  if (!isSendKey(event)) return;
  event.preventDefault();
  send();
});
modelChoice.addEventListener("change", () => save("model", modelChoice.value));
form.elements.api_key.addEventListener("change", loadModels);
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  hideAlternatives();
  stop();
});
addEventListener("scroll", hideAlternatives, { passive: true });
addEventListener("pagehide", saveMessages);

const keptTheme = load("theme");
useTheme(THEMES.includes(keptTheme) ? keptTheme : "auto");
loadSettings();
finishLog();
loadModels();
if (matchMedia("(hover: hover)").matches) entry.focus();
