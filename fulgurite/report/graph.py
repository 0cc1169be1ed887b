"""A trace as a picture.

In: a trace. Out: SVG, one drawing for each depth of module paths, laid out here (layout.py): boxes are calls,
filled in the colour of their executor; views and inputs are small; a region or a module says how many ops it
holds; edges are values, and say dtype and shape when pointed at. Colours and behaviour are the page's.
"""

from __future__ import annotations

from collections.abc import Sequence

from fulgurite.report.items import Flow, Item, Level, levels_of
from fulgurite.report.layout import Box, Layout, Place, Route, lay_out
from fulgurite.report.markup import Markup, element, join
from fulgurite.trace import Trace

COMFORTABLE = 90  # boxes of the drawing that is shown first, where there is a choice
LABEL_WIDTH = 30  # characters
CHARACTER = 6.65  # width of a character at the label's size, in pixels
SMALL_CHARACTER = 5.45

EXECUTOR_COLOURS = {
    "torch": 0,
    "fuser": 1,
    "kernels": 2,
    "inductor": 3,
}  # of page.css; others follow
COLOURS = 7
LEGEND = "round: input · dashed: view · filled: call · heavy outline: returned"


def colour_of(executor: str, others: Sequence[str] = ()) -> int:
    """The colour of an executor: fixed for ours, in order of appearance for a user's."""
    if executor in EXECUTOR_COLOURS:
        return EXECUTOR_COLOURS[executor]
    unknown = [name for name in others if name not in EXECUTOR_COLOURS]
    place = unknown.index(executor) if executor in unknown else 0
    free = COLOURS - len(EXECUTOR_COLOURS)
    return len(EXECUTOR_COLOURS) + place % free


def draw(trace: Trace, executors: Sequence[str] = ()) -> Markup:
    """Every drawing of a trace, all but one hidden, and the buttons that choose among them."""
    levels = levels_of(trace)
    first = _first_shown(levels)
    grouped = any(level.depth is not None for level in levels)
    drawings = [
        draw_level(level, executors, hidden=position != first)
        for position, level in enumerate(levels)
    ]
    canvas = element("div", *drawings, class_="canvas", tabindex="-1")
    legend = LEGEND + (" · click a module to open it" if grouped else "")
    return join([_choices(levels, first), canvas, element("figcaption", legend, class_="quiet")])


def _first_shown(levels: Sequence[Level]) -> int:
    fitting = [i for i, level in enumerate(levels) if len(level.items) <= COMFORTABLE]
    return fitting[-1] if fitting else 0


def _choices(levels: Sequence[Level], first: int) -> Markup:
    if len(levels) < 2:
        return Markup("")
    buttons = [
        element(
            "button",
            "ops" if level.depth is None else f"depth {level.depth}",
            element("small", len(level.items)),
            type="button",
            aria_pressed="true" if position == first else "false",
            title=f"{len(level.items)} boxes",
        )
        for position, level in enumerate(levels)
    ]
    label = element("span", "modules to", class_="quiet")
    return element("div", label, *buttons, class_="choices levels", role="group")


def draw_level(level: Level, executors: Sequence[str] = (), hidden: bool = False) -> Markup:
    """One drawing."""
    layout = place_level(level)
    edges = [
        _edge(flow, route, level.items)
        for flow, route in zip(level.flows, layout.routes, strict=True)
    ]
    nodes = [
        _node(number, item, place, executors)
        for number, (item, place) in enumerate(zip(level.items, layout.places, strict=True))
    ]
    return _svg(level, layout, [*edges, *nodes], hidden)


def place_level(level: Level) -> Layout:
    """Where everything goes."""
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
    return lay_out(boxes, [(flow.source, flow.target) for flow in level.flows])


def _svg(level: Level, layout: Layout, children: list[Markup], hidden: bool) -> Markup:
    width, height = round(layout.width), round(layout.height)
    what = "every op" if level.depth is None else f"modules to depth {level.depth}"
    return element(
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


def shorten(label: str, limit: int = LABEL_WIDTH) -> str:
    """A long name keeps its end, which tells it from its neighbours."""
    return label if len(label) <= limit else f"…{label[-(limit - 1) :]}"


def _box(item: Item, light: bool) -> Box:
    label, detail = len(shorten(item.label)), len(shorten(item.detail))
    if item.kind in ("input", "view"):
        return Box(round(SMALL_CHARACTER * label + 14), 16.0, light)
    if item.kind == "op":
        return Box(round(CHARACTER * label + SMALL_CHARACTER * detail + 30), 24.0)
    return Box(round(max(CHARACTER * label, SMALL_CHARACTER * detail) + 28), 40.0)


def _node(number: int, item: Item, place: Place, executors: Sequence[str]) -> Markup:
    classes = ["node", item.kind]
    if item.executor:
        classes.append(f"x{colour_of(item.executor, executors)}")
    if item.returned:
        classes.append("returned")
    return element(
        "g",
        element("title", item.about),
        element("rect", width=_number(place.width), height=_number(place.height)),
        *_texts(item, place),
        class_=" ".join(classes),
        data_box=number,
        data_names=" ".join(item.values) or None,
        data_holds=None if item.values else f"{item.first} {item.last}",
        transform=f"translate({_number(place.left)} {_number(place.top)})",
    )


def _texts(item: Item, place: Place) -> list[Markup]:
    label, detail = shorten(item.label), shorten(item.detail)
    if item.kind in ("input", "view"):
        return [element("text", label, x=_number(place.width / 2), y="11.5")]
    if item.kind == "op":
        return [
            element("text", label, x="10", y="16"),
            element("text", detail, class_="detail", x=_number(place.width - 10), y="16"),
        ]
    middle = _number(place.width / 2)
    return [
        element("text", label, x=middle, y="17"),
        element("text", detail, class_="detail", x=middle, y="31"),
    ]


# ---- edges ---------------------------------------------------------------------------------------


def _edge(flow: Flow, route: Route, items: Sequence[Item]) -> Markup:
    shown = flow.values[:6]
    more = [f"and {len(flow.values) - len(shown)} more"] if len(flow.values) > len(shown) else []
    between = f"{shorten(items[flow.source].label)} → {shorten(items[flow.target].label)}"
    return element(
        "path",
        element("title", "\n".join([*shown, *more, between])),
        class_="edge direct" if route.direct else "edge",
        data_between=f"{flow.source} {flow.target}",
        d=_path_data(route),
    )


def _path_data(route: Route) -> str:
    """Vertical through a layer, a curve from one layer to the next."""
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
