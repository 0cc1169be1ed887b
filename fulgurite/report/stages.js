// Two stages side by side: colour, difference, folding.

// ---- a line of Python in colour -----------------------------------------------------------------

const TOKEN = new RegExp(
  [
    /(?<c>#.*)/,
    /(?<s>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')/,
    /(?<k>\b(?:import|from|as|def|return|del|if|else|for|in|and|or|not|with|lambda)\b|@[\w.]+)/,
    /(?<l>\b(?:True|False|None)\b|(?<![\w.])\d[\w.]*(?:(?<=e)-\d+)?)/,
    /(?<f>[A-Za-z_][\w.]*(?=\())/,
    /[A-Za-z_][\w.]*/,
  ].map((part) => part.source).join("|"),
  "g",
);

// Ranges of a line by what they are, cut where any two overlap and put into elements.
function paint(target, text, inside) {
  const ranges = [];
  for (const token of text.matchAll(TOKEN)) {
    const kind = Object.keys(token.groups).find((name) => token.groups[name] !== undefined);
    if (kind) ranges.push([token.index, token.index + token[0].length, kind]);
  }
  for (const range of inside) ranges.push([...range, "inside"]);
  if (page.query) {
    const lower = text.toLowerCase();
    for (let at = lower.indexOf(page.query); at >= 0; at = lower.indexOf(page.query, at + 1)) {
      ranges.push([at, at + page.query.length, "mark"]);
    }
  }
  const cuts = [...new Set([0, text.length, ...ranges.flatMap((r) => [r[0], r[1]])])];
  cuts.sort((a, b) => a - b);
  let open = [];
  ranges.sort((a, b) => a[0] - b[0]);
  let next = 0;
  for (let i = 0; i + 1 < cuts.length; i++) {
    while (next < ranges.length && ranges[next][0] <= cuts[i]) open.push(ranges[next++]);
    open = open.filter((range) => range[1] > cuts[i]);
    const piece = text.slice(cuts[i], cuts[i + 1]);
    const names = open.map((range) => range[2]);
    if (!names.length) {
      target.append(piece);
      continue;
    }
    const className = names.filter((name) => name !== "mark").join(" ");
    target.append(make(names.includes("mark") ? "mark" : "span", { className }, piece));
  }
}

// The parts of a line that another line lacks: words outside their longest common subsequence.
function difference(text, other) {
  const words = (line) => [...line.matchAll(/\w+|[^\w\s]/g)];
  const [mine, theirs] = [words(text), words(other)];
  const width = theirs.length + 1;
  const common = new Uint16Array((mine.length + 1) * width);
  for (let i = mine.length - 1; i >= 0; i--) {
    for (let j = theirs.length - 1; j >= 0; j--) {
      common[i * width + j] = mine[i][0] === theirs[j][0]
        ? common[(i + 1) * width + j + 1] + 1
        : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
    }
  }
  const ranges = [];
  for (let i = 0, j = 0; i < mine.length; ) {
    if (j < theirs.length && mine[i][0] === theirs[j][0]) { i++; j++; continue; }
    if (j < theirs.length && common[i * width + j + 1] > common[(i + 1) * width + j]) { j++; continue; }
    const [start, end] = [mine[i].index, mine[i].index + mine[i][0].length];
    const last = ranges.at(-1);
    if (last && !text.slice(last[1], start).trim()) last[1] = end;
    else ranges.push([start, end]);
    i++;
  }
  return ranges;
}

// ---- stages -------------------------------------------------------------------------------------

// Rows of two stages: threads keep their order in every stage, so one walk over both is enough.
function compare(before, after) {
  const there = new Set(after.threads);
  const here = new Set(before.threads);
  const rows = [];
  let a = 0;
  let b = 0;
  const ends = [before.lines.length - 1, after.lines.length - 1]; // a text ends in a newline
  while (a < ends[0] || b < ends[1]) {
    if (a < ends[0] && !there.has(before.threads[a])) rows.push({ kind: "removed", a: a++ });
    else if (b < ends[1] && !here.has(after.threads[b])) rows.push({ kind: "added", b: b++ });
    else {
      const same = before.lines[a] === after.lines[b] || after.threads[b] === 0;
      rows.push({ kind: same ? "same" : "changed", a: a++, b: b++ });
    }
  }
  return rows;
}

class Viewer {
  constructor(section) {
    this.section = section;
    this.program = data.programs[Number(section.dataset.program)];
    this.panes = one(".panes", section);
    this.from = one("select.from", section);
    this.to = one("select.to", section);
    this.opened = new Set();
    this.layout = matchMedia("(max-width: 900px)").matches ? "single" : "beside";
    this.lines = this.program.stages.at(-1).lines.length > 220 ? "changed" : "all";
    this.tools();
    for (const select of [this.from, this.to]) {
      select.addEventListener("change", () => this.show());
    }
    for (const button of all("button[data-stage]", section)) {
      button.addEventListener("click", () => {
        this.choose(Number(button.dataset.stage));
        one(".stages", section).scrollIntoView({ block: "nearest" });
      });
    }
  }

  tools() {
    const step = (text, title, by) => {
      const button = make("button", { type: "button", title, ariaLabel: title }, text);
      button.addEventListener("click", () => this.choose(Number(this.to.value) + by));
      return button;
    };
    const copy = make("button", { type: "button", title: "copy the stage on the right" }, "copy");
    copy.addEventListener("click", async () => {
      try { // a browser may refuse the clipboard to a page opened from a file
        await navigator.clipboard.writeText(this.text(this.after));
        copy.textContent = "copied";
      } catch (error) {
        copy.textContent = "not allowed here";
      }
      setTimeout(() => (copy.textContent = "copy"), 1200);
    });
    this.lineChoice = choices("lines", [["all", "all"], ["changed", "changed"], ["found", "found"]],
      this.lines, (value) => this.show({ lines: value }));
    const sides = choices("", [["beside", "side by side"], ["single", "unified"]],
      this.layout, (value) => this.show({ layout: value }));
    one(".stages .toolbar", this.section).append(
      step("‹", "the stage before", -1), step("›", "the next stage", 1),
      make("span", { className: "space" }),
      this.lineChoice, sides, copy);
  }

  get before() { return this.program.stages[Number(this.from.value)]; }
  get after() { return this.program.stages[Number(this.to.value)]; }
  text(stage) { return stage.lines.map((line) => data.lines[line]).join("\n"); }

  choose(stage) {
    const last = this.program.stages.length - 1;
    const chosen = Math.max(0, Math.min(last, stage));
    this.to.value = String(chosen);
    this.from.value = String(Math.max(0, chosen - 1));
    this.show();
  }

  show(change = {}) {
    Object.assign(this, change);
    if (!change.keep) this.opened.clear();
    this.shown = true;
    const rows = compare(this.before, this.after);
    const visible = this.folded(rows);
    const single = this.layout === "single";
    this.panes.classList.toggle("single", single);
    if (!visible.length) {
      const what = this.lines === "found" ? "No line of these two stages matches." : "The two stages are the same.";
      this.panes.replaceChildren(make("div", { className: "nothing" }, what));
      return;
    }
    const panes = single
      ? [this.pane(`${this.before.title}  →  ${this.after.title}`, this.unified(visible))]
      : [this.pane(this.before.title, this.side(visible, "a")),
         this.pane(this.after.title, this.side(visible, "b"))];
    this.panes.replaceChildren(...panes);
    if (!single) together(...panes);
  }

  // Rows to show; a run of others becomes one row that says how many.
  folded(rows) {
    if (this.lines === "all") return rows;
    const hit = (row) => this.lines === "changed"
      ? row.kind !== "same"
      : page.hits.has(this.before.lines[row.a]) || page.hits.has(this.after.lines[row.b]);
    const keep = new Uint8Array(rows.length);
    const around = this.lines === "changed" ? 3 : 0;
    rows.forEach((row, at) => {
      if (hit(row)) keep.fill(1, Math.max(0, at - around), at + around + 1);
    });
    if (!keep.includes(1)) return [];
    const result = [];
    for (let at = 0; at < rows.length; at++) {
      if (keep[at] || this.opened.has(at)) {
        result.push(rows[at]);
        continue;
      }
      const start = at;
      while (at + 1 < rows.length && !keep[at + 1] && !this.opened.has(at + 1)) at++;
      if (at - start < 2) result.push(...rows.slice(start, at + 1));
      else result.push({ kind: "fold", start, end: at + 1 });
    }
    return result;
  }

  pane(title, lines) {
    const code = make("div", { className: "code" }, ...lines);
    return make("div", { className: "pane", tabIndex: 0 }, make("h4", {}, title), code);
  }

  side(rows, which) {
    const [stage, other] = which === "a" ? [this.before, this.after] : [this.after, this.before];
    return rows.map((row) => {
      if (row.kind === "fold") return this.fold(row);
      if (row[which] === undefined) return make("div", { className: "line blank" });
      const opposite = row[which === "a" ? "b" : "a"];
      return this.line(stage, row[which], row.kind, "", row.kind === "changed" && other.lines[opposite]);
    });
  }

  unified(rows) {
    const result = [];
    let held = [];
    for (const row of [...rows, { kind: "end" }]) {
      if (row.kind !== "changed" && held.length) {
        result.push(...held);
        held = [];
      }
      if (row.kind === "fold") result.push(this.fold(row));
      else if (row.kind === "same") result.push(this.line(this.after, row.b, "", " "));
      else if (row.kind === "added") result.push(this.line(this.after, row.b, "added", "+"));
      else if (row.kind === "removed") result.push(this.line(this.before, row.a, "removed", "−"));
      else if (row.kind === "changed") {
        result.push(this.line(this.before, row.a, "removed", "−", this.after.lines[row.b]));
        held.push(this.line(this.after, row.b, "added", "+", this.before.lines[row.a]));
      }
    }
    return result;
  }

  line(stage, at, kind, sign, other) {
    const number = stage.lines[at];
    const text = data.lines[number];
    const found = page.hits.has(number) ? " found" : "";
    const element = make("div", { className: `line ${kind}${found}` }, make("b", {}, String(at + 1)));
    if (sign) element.append(make("i", {}, sign));
    const code = make("span");
    paint(code, text, typeof other === "number" ? difference(text, data.lines[other]) : []);
    element.append(code);
    const assigned = /^ *([\w, ]+?),? = /.exec(text);
    if (assigned) {
      const names = assigned[1].split(", ");
      element.dataset.names = names.join(" ");
      element.addEventListener("click", () => select(this.section, names, element));
    }
    return element;
  }

  fold(row) {
    const count = row.end - row.start;
    const element = make("div", { className: "line fold", tabIndex: 0, role: "button" },
      make("b", {}, "⋯"), `${count} ${this.lines === "found" ? "other" : "equal"} lines`);
    const open = () => {
      for (let at = row.start; at < row.end; at++) this.opened.add(at);
      this.show({ keep: true });
    };
    element.addEventListener("click", open);
    element.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(); }
    });
    return element;
  }
}

// Two panes that scroll as one.
function together(one, two) {
  let leader = null;
  for (const [pane, other] of [[one, two], [two, one]]) {
    pane.addEventListener("scroll", () => {
      if (leader && leader !== pane) return;
      leader = pane;
      other.scrollTop = pane.scrollTop;
      other.scrollLeft = pane.scrollLeft;
      requestAnimationFrame(() => (leader = null));
    });
  }
}
