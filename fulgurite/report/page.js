// Search over everything, light and dark, paper, and the start of the page.

// ---- search -------------------------------------------------------------------------------------

const search = one("#search");
const found = one("#found");

function runSearch() {
  page.query = search.value.trim().toLowerCase();
  page.hits = new Set();
  if (page.query) {
    data.lines.forEach((line, number) => {
      if (line.toLowerCase().includes(page.query)) page.hits.add(number);
    });
  }
  const nodes = page.pictures.map((picture) => picture.search());
  listFound(nodes);
  for (const viewer of page.viewers.filter(({ shown }) => shown)) {
    if (!page.query && viewer.lines === "found") {
      viewer.lines = "changed";
      press(viewer.lineChoice, viewer.lines);
    }
    viewer.show({ keep: true });
  }
}

function listFound(nodes) {
  found.hidden = !page.query;
  if (!page.query) return;
  const entries = [];
  page.viewers.forEach((viewer, at) => {
    const boxes = nodes[at] || 0;
    viewer.program.stages.forEach((stage, number) => {
      const count = stage.lines.filter((line) => page.hits.has(line)).length;
      const last = number === viewer.program.stages.length - 1;
      if (count) entries.push(foundEntry(viewer, number, stage.title, count, last ? boxes : 0));
    });
  });
  const none = make("p", { className: "quiet" }, "Nothing matches.");
  found.replaceChildren(...(entries.length ? entries : [none]));
}

function foundEntry(viewer, number, title, count, boxes) {
  const says = `${count} line${count === 1 ? "" : "s"}` + (boxes ? `, ${boxes} node${boxes === 1 ? "" : "s"}` : "");
  const button = make("button", { type: "button" }, title, make("span", {}, says));
  button.addEventListener("click", () => {
    found.hidden = true;
    const graph = viewer.section.closest("details");
    if (graph) graph.open = true;
    press(viewer.lineChoice, "found");
    viewer.lines = "found";
    viewer.choose(number);
    one(".stages", viewer.section).scrollIntoView({ block: "start" });
  });
  return button;
}

let waiting = 0;
search.addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(runSearch, 120);
});
search.addEventListener("focus", () => (found.hidden = !page.query));
addEventListener("pointerdown", (event) => {
  if (!event.target.closest(".search")) found.hidden = true;
});
addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName);
  if (event.key === "/" && !typing) {
    event.preventDefault();
    search.focus();
    search.select();
  } else if (event.key === "Escape" && event.target.closest(".search")) {
    if (found.hidden) search.value = "";
    found.hidden = true;
    if (!search.value) runSearch();
  } else if (event.key === "ArrowDown" && event.target.closest(".search") && !found.hidden) {
    const buttons = all("button", found);
    const next = buttons[buttons.indexOf(document.activeElement) + 1];
    if (next) { event.preventDefault(); next.focus(); }
  } else if (event.key === "ArrowUp" && event.target.closest("#found")) {
    const buttons = all("button", found);
    event.preventDefault();
    (buttons[buttons.indexOf(document.activeElement) - 1] || search).focus();
  }
});

// ---- light and dark, paper, start ---------------------------------------------------------------

const theme = one("#theme");
const THEMES = ["auto", "light", "dark"];

function stored(value) {
  try { // a browser may refuse storage to a page opened from a file
    if (value) localStorage.setItem("fulgurite-theme", value);
    return localStorage.getItem("fulgurite-theme");
  } catch (error) {
    return null;
  }
}

function useTheme(name) {
  theme.textContent = name;
  theme.ariaLabel = `colours: ${name}`;
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
}

theme.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(theme.textContent) + 1) % THEMES.length];
  useTheme(next);
  stored(next);
});
useTheme(THEMES.includes(stored()) ? stored() : "auto");

page.viewers = all(".program").map((section) => new Viewer(section));
page.pictures = all(".picture").map((figure) => new Picture(figure));

// Stages are filled in one program at a time, those of a folded graph when it is unfolded.
function fill(viewers) {
  const next = viewers.find((viewer) => !viewer.shown);
  if (!next) return;
  next.show();
  setTimeout(() => fill(viewers), 0);
}

for (const graph of all("details.graph")) {
  let done = false;
  const open = () => {
    if (!graph.open || done) return;
    done = true;
    for (const picture of page.pictures) if (graph.contains(picture.figure)) picture.fit(0.7);
    fill(page.viewers.filter((viewer) => graph.contains(viewer.section)));
  };
  graph.addEventListener("toggle", open);
  setTimeout(open, 0);
}

// A link into a folded graph unfolds it.
function unfold() {
  const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
  const graph = target && target.closest("details");
  if (!graph || graph.open) return;
  graph.open = true;
  target.scrollIntoView();
}
addEventListener("hashchange", unfold);
unfold();

addEventListener("beforeprint", () => {
  for (const viewer of page.viewers.filter(({ shown }) => shown)) {
    viewer.chosen = viewer.layout;
    viewer.show({ layout: "single", keep: true });
  }
});
addEventListener("afterprint", () => {
  for (const viewer of page.viewers) if (viewer.chosen) viewer.show({ layout: viewer.chosen, keep: true });
});
