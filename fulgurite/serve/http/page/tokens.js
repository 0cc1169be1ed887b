// The probability of each token: where a token lies in the text, its shade, and its alternatives when pointed at.
//
// A token is { from, to, text, logprob, top }: its place in the message's content, and the most likely tokens there
// as [text, logprob], best first.

const SHADES = [0.9, 0.7, 0.5, 0.3, 0.1]; // a token below the n-th probability has a shade of n + 1

// Place the tokens of one chunk in its text, which starts at `offset`. Bytes decide, because a token can hold a part of
// a character. A token that is not in the text (an end-of-sequence token, a stop string) is left out.
function placeTokens(entries, content, offset) {
  const encoder = new TextEncoder();
  const bytes = encoder.encode(content);
  const starts = findCharacterStarts(content);
  const tokens = [];
  let at = 0;
  let character = 0;
  for (const entry of entries) {
    const own = Array.isArray(entry.bytes) ? entry.bytes : encoder.encode(entry.token);
    if (!own.length || own.some((byte, index) => bytes[at + index] !== byte)) continue;
    at += own.length;
    const from = character;
    while (character < starts.length && starts[character].byte < at) character += 1;
    const to = character < starts.length ? starts[character].index : content.length;
    const begin = from < starts.length ? starts[from].index : content.length;
    if (to > begin) tokens.push(makeToken(entry, offset + begin, offset + to));
  }
  return tokens;
}

// For each character: its index in the string and its first byte in UTF-8.
function findCharacterStarts(content) {
  const starts = [];
  let index = 0;
  let byte = 0;
  for (const character of content) {
    starts.push({ index, byte });
    index += character.length;
    const code = character.codePointAt(0);
    byte += code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
  }
  return starts;
}

function makeToken(entry, from, to) {
  const top = (entry.top_logprobs ?? []).map(({ token, logprob }) => [token, logprob]);
  return { from, to, text: entry.token, logprob: entry.logprob, top };
}

// A function that makes nodes of a part of the content: a span for each token in it.
function makeLeaf(message) {
  const { content, tokens } = message;
  if (!tokens.length) return (from, to) => (from < to ? [content.slice(from, to)] : []);
  return (from, to) => {
    const nodes = [];
    let at = from;
    for (let number = findToken(tokens, from); number < tokens.length; number += 1) {
      const token = tokens[number];
      if (token.from >= to) break;
      if (at < token.from) nodes.push(content.slice(at, token.from));
      at = Math.max(at, token.from);
      const end = Math.min(token.to, to);
      nodes.push(makeTokenSpan(content.slice(at, end), token, number));
      at = end;
    }
    if (at < to) nodes.push(content.slice(at, to));
    return nodes;
  };
}

// The first token that ends after an offset.
function findToken(tokens, offset) {
  let low = 0;
  let high = tokens.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tokens[middle].to > offset) high = middle;
    else low = middle + 1;
  }
  return low;
}

function makeTokenSpan(text, token, number) {
  const probability = Math.exp(token.logprob);
  const shade = SHADES.filter((bound) => probability < bound).length;
  const span = make("span", { className: `token shade-${shade}`, tabIndex: -1 }, text);
  span.dataset.token = number;
  return span;
}

// ---- the alternatives of a token ----------------------------------------------------------------

const popup = one("#alternatives");
let pointedAt = null;

// Spaces and newlines, made visible at the ends of a token.
function showBlanks(text) {
  const visible = text.replaceAll("\n", "↵").replaceAll("\t", "⇥");
  return visible.replace(/^ +| +$/g, (blanks) => "␣".repeat(blanks.length)) || "(empty)";
}

function showAlternatives(span, token) {
  hideAlternatives();
  const entries = token.top.length ? [...token.top] : [[token.text, token.logprob]];
  if (!entries.some(([text, logprob]) => text === token.text && logprob === token.logprob)) {
    entries.push([token.text, token.logprob]);
  }
  let chosen = false;
  const rows = entries.map(([text, logprob]) => {
    const isChosen = !chosen && text === token.text && logprob === token.logprob;
    chosen ||= isChosen;
    return makeAlternative(text, logprob, isChosen);
  });
  popup.replaceChildren(...rows);
  popup.hidden = false;
  pointedAt = span;
  span.setAttribute("aria-describedby", popup.id);
  placePopup(span.getClientRects()[0] ?? span.getBoundingClientRect());
}

function makeAlternative(text, logprob, isChosen) {
  const probability = Math.exp(logprob);
  const fill = make("i");
  fill.style.width = `${100 * Math.min(1, probability)}%`;
  const row = make("div", { className: isChosen ? "row chosen" : "row" });
  row.append(
    make("code", {}, showBlanks(text)),
    make("span", { className: "meter", ariaHidden: "true" }, fill),
    make("span", { className: "percent" }, formatPercent(probability)),
  );
  return row;
}

// Below the token if there is room, else above it; never past an edge.
function placePopup(box) {
  const margin = 8;
  const { width, height } = popup.getBoundingClientRect();
  const right = document.documentElement.clientWidth - width - margin;
  const below = box.bottom + margin / 2;
  const fits = below + height < innerHeight - margin;
  popup.style.left = `${Math.max(margin, Math.min(box.left, right))}px`;
  popup.style.top = `${Math.max(margin, fits ? below : box.top - height - margin / 2)}px`;
}

function hideAlternatives() {
  popup.hidden = true;
  pointedAt?.removeAttribute("aria-describedby");
  pointedAt = null;
}

// One token of an answer can be reached with Tab; the arrows go on from there.
function watchTokens(body, message) {
  const show = ({ target }) => {
    const span = target.closest(".token");
    if (span && span !== pointedAt) showAlternatives(span, message.tokens[span.dataset.token]);
  };
  body.addEventListener("pointerover", show);
  body.addEventListener("pointerout", (event) => {
    if (event.target.closest(".token")) hideAlternatives();
  });
  body.addEventListener("focusin", show);
  body.addEventListener("focusout", hideAlternatives);
  body.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !event.target.matches(".token")) return;
    event.preventDefault();
    const spans = all(".token", body);
    const next = spans[spans.indexOf(event.target) + step];
    if (!next) return;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
}
