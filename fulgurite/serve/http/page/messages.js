// Messages as elements: what the user wrote, and an answer with its reasoning, text, tool calls, error and numbers.

function makeMessage(name, label) {
  const element = make("article", { className: `message ${name}` });
  element.ariaLabel = label;
  return element;
}

function makeUserMessage(message, onEdit) {
  const element = makeMessage("user", "You");
  element.append(make("div", { className: "said" }, message.content));
  if (onEdit) element.append(make("div", { className: "foot" }, makeButton("Edit", onEdit)));
  return element;
}

// The user's message as a text field. Enter sends it, Esc leaves it as it was.
function makeEditor(text, onSend, onCancel) {
  const field = make("textarea", { value: text, rows: Math.min(12, text.split("\n").length) });
  field.ariaLabel = "Edit the message";
  const submit = () => field.value.trim() && onSend(field.value);
  field.addEventListener("keydown", (event) => {
    if (isSendKey(event)) {
      event.preventDefault();
      submit();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      onCancel();
    }
  });
  const buttons = [makeButton("Cancel", onCancel, ""), makeButton("Send", submit, "accent")];
  const element = makeMessage("user editing", "You, edited");
  element.append(field, make("div", { className: "foot" }, ...buttons));
  return element;
}

function isSendKey(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

// ---- an answer ----------------------------------------------------------------------------------

// The element of an answer. `draw` brings it up to date while the answer grows; `finish` when it is complete.
class AnswerView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.blocks = [];
    this.isComplete = false;
    this.element = makeMessage("answer", "Answer");
    this.reasoning = make("details", { className: "reasoning", hidden: true });
    this.reasoningText = make("div");
    this.reasoningTitle = make("summary");
    this.reasoning.append(this.reasoningTitle, this.reasoningText);
    this.body = make("div", { className: "body" });
    this.calls = make("div", { className: "calls" });
    this.problem = make("p", { className: "error", hidden: true });
    this.foot = make("div", { className: "foot" });
    this.element.append(this.reasoning, this.body, this.calls, this.problem, this.foot);
    watchTokens(this.body, message);
  }

  draw() {
    this.drawReasoning();
    this.drawBody(this.blocks.at(-2)?.start ?? 0);
    this.calls.replaceChildren(...this.message.calls.map((call) => makeCallCard(call)));
  }

  drawReasoning() {
    const { reasoning, content } = this.message;
    this.reasoning.hidden = !reasoning;
    this.reasoningTitle.textContent = reasoning && !content ? "Reasoning…" : "Reasoning";
    if (this.reasoningText.textContent !== reasoning) this.reasoningText.textContent = reasoning;
  }

  // Blocks before `start` are complete and stay. The block before the last may still grow: "2" becomes "2. an item".
  drawBody(start) {
    while (this.blocks.length && this.blocks.at(-1).start >= start) this.blocks.pop().element.remove();
    const blocks = renderBlocks(this.message.content, makeLeaf(this.message), start);
    this.body.append(...blocks.map(({ element }) => element));
    this.blocks.push(...blocks);
  }

  // How long it has taken so far, and how fast it goes.
  drawProgress(seconds) {
    const { stats } = this.message;
    const rate = computeRate(stats);
    const parts = [formatTokens(stats.tokens), rate && `${formatRate(rate)} tokens/s`, formatSeconds(seconds)];
    const text = stats.tokens ? parts.filter(Boolean).join(" · ") : `waiting ${formatSeconds(seconds)}`;
    if (!one(".stats", this.foot)) this.foot.replaceChildren(make("span", { className: "stats" }));
    one(".stats", this.foot).textContent = text;
  }

  finish(isLast) {
    if (!this.isComplete) this.complete();
    this.drawCalls(isLast);
    this.drawFoot(isLast);
  }

  complete() {
    hideAlternatives();
    this.drawReasoning();
    this.drawBody(0);
    this.problem.hidden = !this.message.error;
    this.problem.textContent = this.message.error ?? "";
    const first = one(".token", this.body);
    if (first) first.tabIndex = 0;
    this.isComplete = true;
  }

  drawCalls(isLast) {
    const { message, actions } = this;
    const open = isLast && needsResults(message);
    const cards = message.calls.map((call) => makeCallCard(call, open, !hasCompleteCalls(message)));
    this.calls.replaceChildren(...cards);
    if (!open) return;
    const submit = () => actions.sendResults(all("textarea", this.calls).map(({ value }) => value));
    const many = message.calls.length > 1;
    this.calls.append(makeButton(many ? "Send results" : "Send result", submit, "accent"));
    for (const field of all("textarea", this.calls)) {
      field.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit();
      });
    }
  }

  drawFoot(isLast) {
    const { message, actions } = this;
    const buttons = [];
    if (message.content && navigator.clipboard) buttons.push(makeCopyButton(message.content));
    if (isLast) buttons.push(makeButton(message.error ? "Try again" : "Regenerate", actions.regenerate));
    this.foot.replaceChildren(make("span", { className: "stats" }, describeAnswer(message)), ...buttons);
  }
}

function makeCopyButton(text) {
  const button = makeButton("Copy", async () => {
    const copied = await navigator.clipboard.writeText(text).then(() => true, () => false);
    button.textContent = copied ? "Copied" : "Can't copy";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

const ENDINGS = {
  length: "cut at the token limit",
  content_filter: "cut by a filter",
  stopped: "stopped",
};

// "24 tokens · 18.3 tokens/s · first token 84 ms · prompt 31 tokens (16 cached)"
function describeAnswer({ stats, finish, error }) {
  if (!stats || (error && !stats.tokens)) return "";
  const rate = computeRate(stats);
  const cached = stats.cached ? ` (${formatCount(stats.cached)} cached)` : "";
  const parts = [
    `${stats.exact ? "" : "about "}${formatTokens(stats.tokens)}`,
    rate && `${formatRate(rate)} tokens/s`,
    stats.first !== null && `first token ${formatSeconds(stats.first)}`,
    stats.prompt !== null && `prompt ${formatTokens(stats.prompt)}${cached}`,
    ENDINGS[finish],
  ];
  return parts.filter(Boolean).join(" · ");
}

// ---- tool calls ---------------------------------------------------------------------------------

// Calls of an answer that was cut are not complete: they are shown and not sent back.
function hasCompleteCalls({ calls, finish, error }) {
  return calls.length > 0 && !error && finish !== "stopped" && finish !== "length";
}

function needsResults(message) {
  return hasCompleteCalls(message) && message.calls.some(({ result }) => result === null);
}

function makeCallCard(call, open = false, cut = false) {
  const card = make("section", { className: "call" });
  const title = make("h3", {}, make("code", {}, call.name || "…"), make("small", {}, cut ? "cut off" : "tool call"));
  card.append(title, make("pre", { tabIndex: 0 }, make("code", {}, formatArguments(call.arguments))));
  if (open) {
    const field = make("textarea", { className: "code", rows: 2, value: call.result ?? "" });
    card.append(make("label", {}, "Result", field));
  } else if (call.result !== null) {
    card.append(make("h4", {}, "Result"), make("pre", { tabIndex: 0 }, make("code", {}, call.result)));
  }
  return card;
}

// Complete JSON on lines of its own; anything else as it came.
function formatArguments(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch (error) {
    return text;
  }
}
