// The graph: zoom, pointing, keyboard, opening modules.

// ---- pictures -----------------------------------------------------------------------------------

const tooltip = one(".tooltip");

function tell(text, x, y) {
  tooltip.textContent = text;
  tooltip.hidden = !text;
  if (!text) return;
  const { width, height } = tooltip.getBoundingClientRect();
  tooltip.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - width - 8))}px`;
  tooltip.style.top = `${y + 18 + height > innerHeight ? Math.max(6, y - height - 10) : y + 18}px`;
}

class Drawing {
  constructor(svg) {
    this.svg = svg;
    this.width = svg.viewBox.baseVal.width;
    this.height = svg.viewBox.baseVal.height;
    this.nodes = all(".node", svg);
    this.edges = all(".edge", svg).map((path) => ({ path, between: path.dataset.between.split(" ").map(Number) }));
    this.about = new Map();
    for (const element of [...this.nodes, ...this.edges.map((edge) => edge.path)]) {
      const title = one("title", element);
      this.about.set(element, title.textContent);
      title.remove();
    }
    for (const { path } of this.edges) { // a wider, invisible line to point at
      const touch = path.cloneNode();
      touch.setAttribute("class", "touch");
      path.before(touch);
      this.about.set(touch, this.about.get(path));
    }
    svg.addEventListener("pointermove", (event) => {
      const element = event.target.closest(".node, .touch");
      tell(element ? this.about.get(element) : "", event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", () => tell(""));
    svg.addEventListener("blur", () => tell(""));
    svg.addEventListener("keydown", (event) => this.key(event));
  }

  select(node, reveal) {
    for (const marked of all(".selected, .near", this.svg)) marked.classList.remove("selected", "near");
    this.selected = node;
    if (!node) return;
    node.classList.add("selected");
    const number = Number(node.dataset.box);
    for (const { path, between } of this.edges) path.classList.toggle("near", between.includes(number));
    if (reveal) this.reveal(node);
  }

  reveal(node) {
    const canvas = this.svg.parentElement;
    const box = node.getBoundingClientRect();
    const frame = canvas.getBoundingClientRect();
    canvas.scrollTop += box.top + box.height / 2 - frame.top - frame.height / 2;
    canvas.scrollLeft += box.left + box.width / 2 - frame.left - frame.width / 2;
  }

  // Arrows: to a user, to a source, to a neighbour in the same layer.
  key(event) {
    const steps = { ArrowDown: 1, ArrowUp: -1, ArrowLeft: -1, ArrowRight: 1 };
    if (event.key === "Escape") { this.select(null); tell(""); return; }
    if (event.key === "Enter" && this.selected) {
      this.selected.dispatchEvent(new MouseEvent("click", { bubbles: true }));
      return;
    }
    if (!(event.key in steps)) return;
    event.preventDefault();
    const at = this.selected ? Number(this.selected.dataset.box) : -1;
    const sideways = event.key === "ArrowLeft" || event.key === "ArrowRight";
    let next = this.nodes[0];
    if (at >= 0 && sideways) next = this.neighbour(steps[event.key]);
    else if (at >= 0) {
      const [from, to] = event.key === "ArrowDown" ? [0, 1] : [1, 0];
      const edge = this.edges.find(({ between }) => between[from] === at);
      next = edge && this.nodes[edge.between[to]];
    }
    if (!next) return;
    this.select(next, true);
    const box = next.getBoundingClientRect();
    tell(this.about.get(next), box.right, box.top - 18);
  }

  neighbour(step) {
    const middle = (node) => {
      const box = node.getBoundingClientRect();
      return [box.left + box.width / 2, Math.round(box.top + box.height / 2)];
    };
    const [x, y] = middle(this.selected);
    const row = this.nodes.map((node) => [node, ...middle(node)])
      .filter((entry) => entry[2] === y && (entry[1] - x) * step > 0);
    row.sort((one, two) => (one[1] - two[1]) * step);
    return row.length ? row[0][0] : undefined;
  }

  // The box that shows an op, given as a box of the drawing of every op.
  holder(op) {
    const number = Number(op.dataset.box);
    return this.nodes.find((node) => {
      if (node.dataset.names) return node.dataset.names === op.dataset.names;
      const [first, last] = node.dataset.holds.split(" ").map(Number);
      return first <= number && number <= last;
    });
  }

  // Mark what matches; a module matches if one of its ops does.
  search(ops) {
    this.svg.classList.toggle("searching", Boolean(page.query));
    let count = 0;
    for (const node of this.nodes) {
      const text = `${node.dataset.names || ""}\n${this.about.get(node)}`.toLowerCase();
      const [first, last] = (node.dataset.holds || "0 -1").split(" ").map(Number);
      const inner = () => ops.nodes.slice(first, last + 1).some((op) => op.classList.contains("found"));
      const found = Boolean(page.query) && (text.includes(page.query) || (ops !== this && inner()));
      node.classList.toggle("found", found);
      count += found;
    }
    return count;
  }
}

class Picture {
  constructor(figure) {
    this.figure = figure;
    this.canvas = one(".canvas", figure);
    this.drawings = all(".drawing", figure).map((svg) => new Drawing(svg));
    this.levels = all(".levels button", figure);
    this.scale = 1;
    this.levels.forEach((button, number) => button.addEventListener("click", () => this.show(number)));
    this.shown = Math.max(0, this.drawings.findIndex((drawing) => !drawing.svg.hasAttribute("hidden")));
    const button = (text, title, act) => {
      const made = make("button", { type: "button", title, ariaLabel: title }, text);
      made.addEventListener("click", act);
      return made;
    };
    one(".toolbar", figure).append(
      button("−", "smaller", () => this.zoom(this.scale / 1.25)),
      button("+", "larger", () => this.zoom(this.scale * 1.25)),
      button("fit", "fit the width", () => this.fit(0)),
      button("1:1", "full size", () => this.zoom(1)));
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(this.scale * Math.exp(-event.deltaY / 300), event);
    }, { passive: false });
    this.canvas.addEventListener("keydown", (event) => {
      if (event.key === "+" || event.key === "=") this.zoom(this.scale * 1.25);
      else if (event.key === "-") this.zoom(this.scale / 1.25);
      else if (event.key === "0") this.fit();
    });
    this.drag();
  }

  get drawing() { return this.drawings[this.shown]; }
  get ops() { return this.drawings.at(-1); }

  show(number) {
    const focused = document.activeElement === this.drawing.svg;
    this.shown = number;
    this.drawings.forEach((drawing, at) => drawing.svg.toggleAttribute("hidden", at !== number));
    if (focused) this.drawing.svg.focus({ preventScroll: true });
    this.levels.forEach((button, at) => (button.ariaPressed = String(at === number)));
    this.fit(0.7);
  }

  zoom(scale, event) {
    const before = this.scale;
    this.scale = Math.min(4, Math.max(0.05, scale));
    const frame = this.canvas.getBoundingClientRect();
    const x = event ? event.clientX - frame.left : frame.width / 2;
    const y = event ? event.clientY - frame.top : frame.height / 2;
    const [left, top] = [this.canvas.scrollLeft, this.canvas.scrollTop];
    const { svg, width, height } = this.drawing;
    svg.setAttribute("width", width * this.scale);
    svg.setAttribute("height", height * this.scale);
    this.canvas.scrollLeft = (left + x) * (this.scale / before) - x;
    this.canvas.scrollTop = (top + y) * (this.scale / before) - y;
  }

  fit(smallest = 0) {
    const scale = (this.canvas.clientWidth - 2) / this.drawing.width;
    this.zoom(Math.min(1, Math.max(scale, smallest)));
    this.canvas.scrollLeft = (this.canvas.scrollWidth - this.canvas.clientWidth) / 2;
  }

  // Pull the canvas; a press that doesn't move is a click on what is under it.
  drag() {
    let start = null;
    let moved = false;
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.button || event.pointerType === "touch") return;
      const { scrollLeft, scrollTop } = this.canvas;
      start = { x: event.clientX, y: event.clientY, scrollLeft, scrollTop };
      moved = false;
    });
    addEventListener("pointermove", (event) => {
      if (!start) return;
      const [x, y] = [start.x - event.clientX, start.y - event.clientY];
      moved ||= Math.abs(x) + Math.abs(y) > 4;
      if (!moved) return;
      this.canvas.classList.add("dragging");
      this.canvas.scrollLeft = start.scrollLeft + x;
      this.canvas.scrollTop = start.scrollTop + y;
    });
    addEventListener("pointerup", () => {
      start = null;
      this.canvas.classList.remove("dragging");
    });
    this.canvas.addEventListener("click", (event) => {
      if (!moved) this.click(event.target.closest(".node"));
      moved = false;
    });
  }

  click(node) {
    this.drawing.select(node);
    if (!node) return;
    if (node.dataset.names) select(this.figure.parentElement, node.dataset.names.split(" "), node);
    else if (this.shown + 1 < this.drawings.length) this.enter(node);
  }

  // A module's box opens into the next drawing, where its ops are.
  enter(node) {
    const first = this.ops.nodes[Number(node.dataset.holds.split(" ")[0])];
    this.show(this.shown + 1);
    this.drawing.select(this.drawing.holder(first), true);
  }

  // How many ops match.
  search() {
    const count = this.ops.search(this.ops);
    for (const drawing of this.drawings) if (drawing !== this.ops) drawing.search(this.ops);
    return count;
  }
}

// A value chosen in a stage is shown in the picture, and the other way round.
function select(section, names, origin) {
  for (const marked of all(".line.selected", section)) marked.classList.remove("selected");
  const matches = (element) => (element.dataset.names || "").split(" ").some((n) => n !== "_" && names.includes(n));
  for (const line of all(".line", section).filter(matches)) {
    line.classList.add("selected");
    const pane = line.closest(".pane");
    if (origin.closest(".pane")) continue;
    pane.scrollTop = line.offsetTop - pane.offsetTop - pane.clientHeight / 2;
  }
  const picture = page.pictures.find(({ figure }) => figure && section.contains(figure));
  if (!picture || picture.figure.contains(origin)) return;
  const op = picture.ops.nodes.find(matches);
  picture.drawing.select(op ? picture.drawing.holder(op) : null, true);
}
