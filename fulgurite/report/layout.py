"""Where the boxes of a graph go.

In: boxes in program order and edges between them, each from an earlier box to a later one. Out: a place for every
box and a route for every edge, always downwards, in time linear in boxes and edges (up to sorting).

1. A box's layer is one below its lowest source; boxes with slack sink towards their users.
2. A value used several layers further down gets a lane: one slot in every layer between. Beyond LANE layers
   it has none and its edge is drawn straight through, so that lanes stay linear in number.
3. Each layer is sorted by where its neighbours are, a few times down and up.
4. Each layer is moved as close to its neighbours as its order allows: least squares with the order as a
   constraint, solved exactly by pooling neighbours that would overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_LANE_LAYERS = 32  # an edge crosses at most so many layers in a lane
LONG_LANE_LAYERS = 6  # lanes of at least so many layers count as long
SWEEPS = 6
STIFFNESS = (1.0, 0.3, 4.0)  # by the number of edge ends that are lanes: lanes stay straight
GRAVITY = 0.02  # pull to the middle; a neighbour pulls with 1
COLUMN_GAP = 14.0
LANE_GAP = 9.0
LAYER_GAP = 22.0
PORT_GAP = 9.0
MARGIN = 16.0
LIGHT_WEIGHT = 0.01  # pull of a light box; a call pulls with 1


@dataclass(frozen=True)
class Box:
    """A box to place. A light box (input, view) follows its neighbours and hardly pulls them."""

    width: float
    height: float
    light: bool = False


@dataclass(frozen=True)
class Rectangle:
    """A placed box: upper left corner, size and layer."""

    left: float
    top: float
    width: float
    height: float
    layer: int

    @property
    def center(self) -> float:
        return self.left + self.width / 2

    @property
    def bottom(self) -> float:
        return self.top + self.height


@dataclass(frozen=True)
class Route:
    """An edge as points from top to bottom; segments from even to odd points are vertical."""

    points: list[tuple[float, float]]
    direct: bool  # has no lane of its own: drawn faintly, behind the boxes


@dataclass(frozen=True)
class Layout:
    places: list[Rectangle]
    routes: list[Route]
    width: float
    height: float
    slots: int  # boxes and lanes: what the work is proportional to


@dataclass
class _Slot:
    """A box, or one layer of a lane."""

    layer: int
    width: float
    weight: float
    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    lane: bool = False
    # of its layer's middle a slot starts on; long lanes alternate, lest the graph lean
    side: int = 1
    order: float = 0.0
    center: float = 0.0


def compute_layout(boxes: Sequence[Box], edges: Sequence[tuple[int, int]]) -> Layout:
    """Layered graph layout: place boxes and route edges."""
    for source, target in edges:
        assert source < target, f"edge {source} → {target} goes against the program's order"
    layers = _assign_layers(boxes, edges)
    slots, lanes = _make_slots(boxes, edges, layers)
    rows = _group_by_layer(slots)
    for sweep in range(SWEEPS):
        _order_layer(slots, rows, downwards=sweep % 2 == 0)
    _initial_positions(slots, rows)
    for sweep in range(SWEEPS):
        _improve_positions(slots, rows, downwards=sweep % 2 == 0)
    left = min((slot.center - slot.width / 2 for slot in slots), default=0.0) - MARGIN
    for slot in slots:
        slot.center = round(slot.center - left, 1)
    bands = _layer_bands(boxes, rows, slots)
    places = [_make_rectangle(box, slots[i], bands) for i, box in enumerate(boxes)]
    routes = _route_edges(places, edges, slots, lanes, bands)
    width = max((slot.center + slot.width / 2 for slot in slots), default=0.0) + MARGIN
    height = (bands[-1][1] if bands else 0.0) + MARGIN
    return Layout(places, routes, width, height, len(slots))


# ---- layers and lanes ----------------------------------------------------------------------------


def _assign_layers(boxes: Sequence[Box], edges: Sequence[tuple[int, int]]) -> list[int]:
    sources: list[list[int]] = [[] for _ in boxes]
    users: list[list[int]] = [[] for _ in boxes]
    for source, target in edges:
        sources[target].append(source)
        users[source].append(target)
    layers = [0] * len(boxes)
    for box in range(len(boxes)):
        layers[box] = max((layers[source] + 1 for source in sources[box]), default=0)
    for box in reversed(range(len(boxes))):
        if users[box] and (len(sources[box]) <= len(users[box]) or boxes[box].light):
            layers[box] = min(layers[user] for user in users[box]) - 1
    return layers


def _make_slots(
    boxes: Sequence[Box], edges: Sequence[tuple[int, int]], layers: Sequence[int]
) -> tuple[list[_Slot], dict[int, list[int]]]:
    """One slot per box, and lanes: the slots of a source in the layers that its edges cross."""
    slots = [
        _Slot(layer, box.width, LIGHT_WEIGHT if box.light else 1.0)
        for box, layer in zip(boxes, layers, strict=True)
    ]
    lanes: dict[int, list[int]] = {}
    for source, target in edges:
        span = layers[target] - layers[source]
        if span > MAX_LANE_LAYERS:
            continue
        lane = lanes.setdefault(source, [source])
        while len(lane) < span:
            slots.append(_Slot(layers[source] + len(lane), 2.0, slots[source].weight, lane=True))
            _connect(slots, lane[-1], len(slots) - 1)
            lane.append(len(slots) - 1)
        _connect(slots, lane[span - 1], target)
    long = [lane for lane in lanes.values() if len(lane) > LONG_LANE_LAYERS]
    for lane in long[::2]:
        for index in lane[1:]:
            slots[index].side = -1
    return slots, lanes


def _connect(slots: list[_Slot], above: int, below: int) -> None:
    slots[above].down.append(below)
    slots[below].up.append(above)


def _group_by_layer(slots: Sequence[_Slot]) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(1 + max((s.layer for s in slots), default=-1))]
    for index, slot in enumerate(slots):
        rows[slot.layer].append(index)
    for row in rows:
        row.sort(key=lambda index: slots[index].side)
        for position, index in enumerate(row):
            slots[index].order = float(position)
    return rows


# ---- order and position within a layer -----------------------------------------------------------


def _order_layer(slots: list[_Slot], rows: list[list[int]], downwards: bool) -> None:
    """Order each layer by the mean position of its neighbours (barycenter heuristic)."""
    for row in rows if downwards else reversed(rows):
        wanted = {}
        for index in row:
            near = slots[index].up if downwards else slots[index].down
            here = slots[index].order
            wanted[index] = sum(slots[n].order for n in near) / len(near) if near else here
        row.sort(key=lambda index: (wanted[index], slots[index].order))
        middle = (len(row) - 1) / 2
        for position, index in enumerate(row):
            slots[index].order = position - middle


def _min_distance(one: _Slot, two: _Slot) -> float:
    gap = LANE_GAP if one.lane or two.lane else COLUMN_GAP
    return (one.width + two.width) / 2 + gap


def _initial_positions(slots: list[_Slot], rows: list[list[int]]) -> None:
    """Initial positions: each layer packed around zero."""
    for row in rows:
        at = 0.0
        for before, index in zip([None, *row], row, strict=False):
            at += 0.0 if before is None else _min_distance(slots[before], slots[index])
            slots[index].center = at
        for index in row:
            slots[index].center -= at / 2


def _improve_positions(slots: list[_Slot], rows: list[list[int]], downwards: bool) -> None:
    """Move each layer towards its neighbours, keeping order and minimum distances."""
    for row in rows if downwards else reversed(rows):
        offset = 0.0
        targets: list[tuple[float, float]] = []
        offsets: list[float] = []
        for before, index in zip([None, *row], row, strict=False):
            offset += 0.0 if before is None else _min_distance(slots[before], slots[index])
            offsets.append(offset)
            wish, weight = _preferred_position(slots, index, downwards)
            targets.append((wish - offset, weight))
        for index, at, shift in zip(row, _isotonic_regression(targets), offsets, strict=True):
            slots[index].center = at + shift


def _preferred_position(slots: list[_Slot], index: int, downwards: bool) -> tuple[float, float]:
    """The preferred position of a slot, and its weight."""
    slot = slots[index]
    near = slot.up if downwards else slot.down
    total, weights = 0.0, GRAVITY * slot.weight
    for neighbour in near:
        other = slots[neighbour]
        weight = slot.weight * other.weight * STIFFNESS[slot.lane + other.lane]
        total += weight * other.center
        weights += weight
    return total / weights, weights


def _isotonic_regression(targets: Sequence[tuple[float, float]]) -> list[float]:
    """Weighted isotonic regression by pool-adjacent-violators."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for mean, weight in targets:
        length = 1
        while pools and pools[-1][0] >= mean:
            other, other_weight, other_length = pools.pop()
            mean = (mean * weight + other * other_weight) / (weight + other_weight)
            weight += other_weight
            length += other_length
        pools.append((mean, weight, length))
    return [mean for mean, _, length in pools for _ in range(length)]


# ---- geometry ------------------------------------------------------------------------------------


def _layer_bands(
    boxes: Sequence[Box], rows: Sequence[Sequence[int]], slots: Sequence[_Slot]
) -> list[tuple[float, float]]:
    """Top and bottom of each layer; layers whose edges run far sideways get more room above."""
    bands: list[tuple[float, float]] = []
    top = MARGIN
    for row in rows:
        height = max((boxes[i].height for i in row if i < len(boxes)), default=0.0)
        sideways = max(
            (abs(slots[i].center - slots[n].center) for i in row for n in slots[i].up), default=0.0
        )
        top += min(sideways / 14, 26.0) if bands else 0.0
        bands.append((round(top, 1), round(top + height, 1)))
        top += height + LAYER_GAP
    return bands


def _make_rectangle(box: Box, slot: _Slot, bands: Sequence[tuple[float, float]]) -> Rectangle:
    top, bottom = bands[slot.layer]
    return Rectangle(
        left=round(slot.center - box.width / 2, 1),
        top=round((top + bottom - box.height) / 2, 1),
        width=box.width,
        height=box.height,
        layer=slot.layer,
    )


def _route_edges(
    places: Sequence[Rectangle],
    edges: Sequence[tuple[int, int]],
    slots: Sequence[_Slot],
    lanes: dict[int, list[int]],
    bands: Sequence[tuple[float, float]],
) -> list[Route]:
    through = []
    for source, target in edges:
        span = places[target].layer - places[source].layer
        through.append([] if span > MAX_LANE_LAYERS else lanes[source][1:span])
    ports = _assign_ports(places, edges, slots, through)
    routes = []
    for (source, target), lane, port in zip(edges, through, ports, strict=True):
        start, end = places[source], places[target]
        points = [(start.center, start.bottom), (start.center, bands[start.layer][1])]
        for index in lane:
            points += [(slots[index].center, edge) for edge in bands[slots[index].layer]]
        points += [(port, bands[end.layer][0]), (port, end.top)]
        routes.append(Route(points, end.layer - start.layer > MAX_LANE_LAYERS))
    return routes


def _assign_ports(
    places: Sequence[Rectangle],
    edges: Sequence[tuple[int, int]],
    slots: Sequence[_Slot],
    through: Sequence[Sequence[int]],
) -> list[float]:
    """The entry point of each edge at its target, ordered by origin."""
    arriving: dict[int, list[tuple[float, int]]] = {}
    for number, ((source, target), lane) in enumerate(zip(edges, through, strict=True)):
        comes_from = slots[lane[-1]].center if lane else places[source].center
        arriving.setdefault(target, []).append((comes_from, number))
    ports = [0.0] * len(edges)
    for target, entries in arriving.items():
        place = places[target]
        step = min(PORT_GAP, place.width / (len(entries) + 1))
        first = place.center - step * (len(entries) - 1) / 2
        for position, (_, number) in enumerate(sorted(entries)):
            ports[number] = round(first + step * position, 1)
    return ports
