"""A trace as a picture.

In: a trace. Out: SVG, one drawing for each depth of module paths, laid out here (layout.py): boxes are calls,
filled in the colour of their executor; views and inputs are small; a region or a module says how many ops it
holds; edges are values, and say dtype and shape when pointed at. Colours and behaviour are the page's.
"""

from __future__ import annotations

from collections.abc import Sequence

from fulgurite.report.items import Flow, Item, Level, build_levels
from fulgurite.report.layout import Box, Layout, Rectangle, Route, compute_layout
from fulgurite.report.markup import Markup, join_markup, make_element
from fulgurite.trace import Trace

PREFERRED_BOXES = 90  # the drawing shown first has at most so many boxes, if there is one
LABEL_WIDTH = 30  # characters
CHAR_WIDTH = 6.65  # width of a character at the label's size, in pixels
SMALL_CHAR_WIDTH = 5.45

EXECUTOR_COLOURS = {
    "torch": 0,
    "fuser": 1,
    "kernels": 2,
    "inductor": 3,
}  # of page.css; others follow
NUM_COLOURS = 7
LEGEND = "round: input · dashed: view · filled: call · heavy outline: returned"


def executor_colour(executor: str, others: Sequence[str] = ()) -> int:
    """The colour of an executor: fixed for built-in ones, in order of appearance for a user's."""
    if executor in EXECUTOR_COLOURS:
        return EXECUTOR_COLOURS[executor]
    unknown = [name for name in others if name not in EXECUTOR_COLOURS]
    place = unknown.index(executor) if executor in unknown else 0
    free = NUM_COLOURS - len(EXECUTOR_COLOURS)
    return len(EXECUTOR_COLOURS) + place % free


def draw_trace(trace: Trace, executors: Sequence[str] = ()) -> Markup:
    """One drawing per level, all but one hidden, and the buttons that switch between them."""
    levels = build_levels(trace)
    first = _choose_level(levels)
    grouped = any(level.depth is not None for level in levels)
    drawings = [
        draw_level(level, executors, hidden=position != first)
        for position, level in enumerate(levels)
    ]
    canvas = make_element("div", *drawings, class_="canvas", tabindex="-1")
    legend = LEGEND + (" · click a module to open it" if grouped else "")
    return join_markup(
        [_level_buttons(levels, first), canvas, make_element("figcaption", legend, class_="quiet")]
    )


def _choose_level(levels: Sequence[Level]) -> int:
    fitting = [i for i, level in enumerate(levels) if len(level.items) <= PREFERRED_BOXES]
    return fitting[-1] if fitting else 0


def _level_buttons(levels: Sequence[Level], first: int) -> Markup:
    if len(levels) < 2:
        return Markup("")
    buttons = [
        make_element(
            "button",
            "ops" if level.depth is None else f"depth {level.depth}",
            make_element("small", len(level.items)),
            type="button",
            aria_pressed="true" if position == first else "false",
            title=f"{len(level.items)} boxes",
        )
        for position, level in enumerate(levels)
    ]
    label = make_element("span", "modules to", class_="quiet")
    return make_element("div", label, *buttons, class_="choices levels", role="group")


def draw_level(level: Level, executors: Sequence[str] = (), hidden: bool = False) -> Markup:
    """Draw one level as SVG."""
    layout = layout_level(level)
    edges = [
        _edge(flow, route, level.items)
        for flow, route in zip(level.flows, layout.routes, strict=True)
    ]
    nodes = [
        _node(number, item, place, executors)
        for number, (item, place) in enumerate(zip(level.items, layout.places, strict=True))
    ]
    return _svg(level, layout, [*edges, *nodes], hidden)


def layout_level(level: Level) -> Layout:
    """Compute positions of boxes and edges."""
    sources: list[list[int]] = [[] for _ in level.items]
    used = [False] * len(level.items)
    for flow in level.flows:
        sources[flow.target].append(flow.source)
        used[flow.source] = True
    light: list[bool] = []
    for number, item in enumerate(level.items):  # a view on the way of data is as heavy as a call
        aside = not used[number] or all(light[source] for source in sources[number])
        light.append(item.kind == "input" or (item.kind == "view" and aside))
    boxes = [_box(item, weight) for item, weight in zip(level.items, light, strict=True)]
    return compute_layout(boxes, [(flow.source, flow.target) for flow in level.flows])


def _svg(level: Level, layout: Layout, children: list[Markup], hidden: bool) -> Markup:
    width, height = round(layout.width), round(layout.height)
    what = "every op" if level.depth is None else f"modules to depth {level.depth}"
    return make_element(
        "svg",
        *children,
        class_="drawing",
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
        role="application",
        aria_label=f"{what}: {len(level.items)} boxes, {len(level.flows)} edges",
        tabindex="0",
        hidden=hidden,
    )


# ---- boxes ---------------------------------------------------------------------------------------


def shorten_label(label: str, limit: int = LABEL_WIDTH) -> str:
    """Shorten from the left: the end of a name is what differs."""
    return label if len(label) <= limit else f"…{label[-(limit - 1) :]}"


def _box(item: Item, light: bool) -> Box:
    label, detail = len(shorten_label(item.label)), len(shorten_label(item.detail))
    if item.kind in ("input", "view"):
        return Box(round(SMALL_CHAR_WIDTH * label + 14), 16.0, light)
    if item.kind == "op":
        return Box(round(CHAR_WIDTH * label + SMALL_CHAR_WIDTH * detail + 30), 24.0)
    return Box(round(max(CHAR_WIDTH * label, SMALL_CHAR_WIDTH * detail) + 28), 40.0)


def _node(number: int, item: Item, place: Rectangle, executors: Sequence[str]) -> Markup:
    classes = ["node", item.kind]
    if item.executor:
        classes.append(f"x{executor_colour(item.executor, executors)}")
    if item.returned:
        classes.append("returned")
    return make_element(
        "g",
        make_element("title", item.about),
        make_element("rect", width=_number(place.width), height=_number(place.height)),
        *_texts(item, place),
        class_=" ".join(classes),
        data_box=number,
        data_names=" ".join(item.values) or None,
        data_holds=None if item.values else f"{item.first} {item.last}",
        transform=f"translate({_number(place.left)} {_number(place.top)})",
    )


def _texts(item: Item, place: Rectangle) -> list[Markup]:
    label, detail = shorten_label(item.label), shorten_label(item.detail)
    if item.kind in ("input", "view"):
        return [make_element("text", label, x=_number(place.width / 2), y="11.5")]
    if item.kind == "op":
        return [
            make_element("text", label, x="10", y="16"),
            make_element("text", detail, class_="detail", x=_number(place.width - 10), y="16"),
        ]
    middle = _number(place.width / 2)
    return [
        make_element("text", label, x=middle, y="17"),
        make_element("text", detail, class_="detail", x=middle, y="31"),
    ]


# ---- edges ---------------------------------------------------------------------------------------


def _edge(flow: Flow, route: Route, items: Sequence[Item]) -> Markup:
    shown = flow.values[:6]
    more = [f"and {len(flow.values) - len(shown)} more"] if len(flow.values) > len(shown) else []
    between = (
        f"{shorten_label(items[flow.source].label)} → {shorten_label(items[flow.target].label)}"
    )
    return make_element(
        "path",
        make_element("title", "\n".join([*shown, *more, between])),
        class_="edge direct" if route.direct else "edge",
        data_between=f"{flow.source} {flow.target}",
        d=_path_data(route),
    )


def _path_data(route: Route) -> str:
    """SVG path: straight inside a layer, a curve between layers."""
    x, y = route.points[0]
    parts = [f"M{_number(x)} {_number(y)}"]
    for next_x, next_y in route.points[1:]:
        if (next_x, next_y) == (x, y):
            continue
        if next_x == x:
            if parts[-1].startswith("V"):
                parts.pop()
            parts.append(f"V{_number(next_y)}")
        else:
            middle, to = _number((y + next_y) / 2), _number(next_x)
            parts.append(f"C{_number(x)} {middle} {to} {middle} {to} {_number(next_y)}")
        x, y = next_x, next_y
    return "".join(parts)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
