// A small part of Markdown: paragraphs, headings, lists, code fences, tables as they are typed, `code`, **bold**, *italic*.
// In: a text. Out: elements. Every piece of text goes through `leaf(from, to)`, which makes nodes of that part of the
// source: so a token keeps its place, and nothing of the model is ever read as HTML.

const FENCE = /^ *(`{3,}|~{3,})\s*([^`]*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const HEADING = /^(#{1,6}) +/;
const TABLE = /^ *\|/;
const RULE = /^ *([-*_])(?: *\1){2,} *$/;
const MAX_LIST_DEPTH = 8;

// The blocks of `text` from an offset on, as { start, element }.
function renderBlocks(text, leaf, from = 0) {
  const lines = splitLines(text, from);
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].text.trim()) {
      at += 1;
      continue;
    }
    const render = findRenderer(lines[at].text);
    const { element, next } = render(lines, at, { text, leaf });
    blocks.push({ start: lines[at].start, element });
    at = next;
  }
  return blocks;
}

function splitLines(text, from) {
  const lines = [];
  for (let start = from; start <= text.length; ) {
    const newline = text.indexOf("\n", start);
    const end = newline < 0 ? text.length : newline;
    lines.push({ start, end, text: text.slice(start, end) });
    start = end + 1;
  }
  return lines;
}

function findRenderer(line) {
  if (FENCE.test(line)) return renderFence;
  if (HEADING.test(line)) return renderHeading;
  if (RULE.test(line)) return (lines, at) => ({ element: make("hr"), next: at + 1 });
  if (ITEM.test(line)) return renderList;
  if (TABLE.test(line)) return renderTable;
  return renderParagraph;
}

const isPlain = (line) => line.trim() && findRenderer(line) === renderParagraph;

// A code block ends at a fence that is as long and of the same kind, or with the text.
function renderFence(lines, at, { leaf }) {
  const [, fence, info] = lines[at].text.match(FENCE);
  const indent = lines[at].text.indexOf(fence);
  const code = make("code");
  let next = at + 1;
  for (; next < lines.length; next += 1) {
    const trimmed = lines[next].text.trim();
    if (trimmed.length >= fence.length && trimmed === fence[0].repeat(trimmed.length)) break;
    const { start, end, text } = lines[next];
    const blank = text.length - text.trimStart().length;
    code.append(...leaf(start + Math.min(indent, blank), Math.min(end + 1, lines.at(-1).end)));
  }
  const block = make("pre", { tabIndex: 0 }, code);
  if (info.trim()) block.dataset.language = info.trim().split(/\s/)[0];
  return { element: block, next: next + 1 };
}

function renderHeading(lines, at, source) {
  const { start, end, text } = lines[at];
  const [mark, { length }] = text.match(HEADING);
  const tag = `h${Math.min(length + 2, 6)}`; // the page's own headings come first
  return { element: make(tag, {}, ...renderInline(start + mark.length, end, source)), next: at + 1 };
}

function renderTable(lines, at, { leaf }) {
  let next = at;
  while (next < lines.length && TABLE.test(lines[next].text)) next += 1;
  const nodes = leaf(lines[at].start, lines[next - 1].end);
  return { element: make("pre", { className: "typed", tabIndex: 0 }, ...nodes), next };
}

function renderParagraph(lines, at, source) {
  let next = at + 1;
  while (next < lines.length && isPlain(lines[next].text)) next += 1;
  const nodes = renderInline(lines[at].start, lines[next - 1].end, source);
  return { element: make("p", {}, ...nodes), next };
}

// Items that follow each other, deeper ones inside; `stack` holds the open lists with their indents.
function renderList(lines, at, source) {
  const stack = [];
  let next = at;
  while (next < lines.length) {
    const item = lines[next].text.match(ITEM);
    if (!item || RULE.test(lines[next].text)) {
      if (lines[next].text.trim() || !ITEM.test(lines[next + 1]?.text ?? "")) break;
      next += 1; // a blank line between two items
      continue;
    }
    const last = findItemEnd(lines, next);
    const list = openList(stack, item);
    const start = lines[next].start + item[0].length;
    list.append(make("li", {}, ...renderInline(start, Math.max(start, lines[last].end), source)));
    next = last + 1;
  }
  return { element: stack[0].list, next };
}

function findItemEnd(lines, at) {
  while (at + 1 < lines.length && isPlain(lines[at + 1].text)) at += 1;
  return at;
}

function openList(stack, [, { length: indent }, marker]) {
  while (stack.length > 1 && stack.at(-1).indent > indent) stack.pop();
  const deeper = stack.length && indent > stack.at(-1).indent + 1 && stack.length < MAX_LIST_DEPTH;
  if (!stack.length || deeper) {
    const ordered = /\d/.test(marker);
    const list = make(ordered ? "ol" : "ul");
    if (ordered) list.start = parseInt(marker, 10);
    stack.at(-1)?.list.lastElementChild.append(list);
    stack.push({ list, indent });
  }
  return stack.at(-1).list;
}

// ---- inside a line ------------------------------------------------------------------------------

const SPANS = [
  ["**", "strong"],
  ["__", "strong"],
  ["*", "em"],
];

// Nodes of a part of the text. A marker without its other half is text.
function renderInline(from, to, source) {
  const { text, leaf } = source;
  const nodes = [];
  const unmatched = new Set(); // markers with no other half further on: not searched again
  let plain = from;
  const push = (element, start, end) => {
    if (plain < start) nodes.push(...leaf(plain, start));
    if (element) nodes.push(element);
    plain = end;
  };
  for (let at = from; at < to; ) {
    if (text[at] === "\\" && /[\\`*_#|~[\]<>{}.!+-]/.test(text[at + 1] ?? "")) {
      push(null, at, at + 1);
      at += 2;
      continue;
    }
    const span = findCode(at, to, text) ?? findSpan(at, to, text, unmatched);
    if (span) {
      const { tag, start, end, after } = span;
      const inner = tag === "code" ? leaf(start, end) : renderInline(start, end, source);
      push(make(tag, {}, ...inner), at, after);
    }
    at = span ? span.after : at + skipLength(at, to, text);
  }
  push(null, to, to);
  return nodes;
}

// How far the next marker can be; runs of one marker that opened nothing are passed as a whole.
function skipLength(at, to, text) {
  let next = at + 1;
  if (text[at] === "`" || text[at] === "*" || text[at] === "_") {
    while (next < to && text[next] === text[at]) next += 1;
  }
  return next - at;
}

// A run of backticks ends at the next run of the same length, so each run is searched for about once.
function findCode(at, to, text) {
  if (text[at] !== "`") return null;
  let start = at;
  while (start < to && text[start] === "`") start += 1;
  const marker = text.slice(at, start);
  for (let end = text.indexOf(marker, start); end >= 0 && end + marker.length <= to; ) {
    let after = end;
    while (after < to && text[after] === "`") after += 1;
    if (after - end === marker.length) return { tag: "code", start, end, after };
    end = text.indexOf(marker, after);
  }
  return null;
}

function findSpan(at, to, text, unmatched) {
  for (const [marker, tag] of SPANS) {
    if (!text.startsWith(marker, at) || unmatched.has(marker)) continue;
    const start = at + marker.length;
    if (start >= to || /\s/.test(text[start]) || (marker === "__" && /\w/.test(text[at - 1] ?? ""))) continue;
    let end = text.indexOf(marker, start + 1);
    while (end > 0 && marker === "*" && text[end + 1] === "*") end = text.indexOf(marker, end + 2);
    if (end < 0 || end + marker.length > to) {
      unmatched.add(marker);
    } else if (!/\s/.test(text[end - 1])) {
      return { tag, start, end, after: end + marker.length };
    }
  }
  return null;
}
