"""The picture of a trace: what is in it, and where it is put."""

from __future__ import annotations

import itertools
import operator
import random
import sys

import pytest
import torch
from torch import fx

import fulgurite
from fulgurite.explain import Explanation
from fulgurite.report.graph import draw_trace, executor_colour, layout_level, shorten_label
from fulgurite.report.items import Level, build_level, build_levels
from fulgurite.report.layout import MAX_LANE_LAYERS, Box, Layout, compute_layout
from fulgurite.trace import Trace
from fulgurite.trace.cost import is_view
from fulgurite.trace.region import Region
from tests.report.support import chain


def random_graph(seed: int, size: int) -> tuple[list[Box], list[tuple[int, int]]]:
    chance = random.Random(seed)
    boxes = [Box(chance.randint(10, 200), chance.choice([16.0, 24.0, 40.0])) for _ in range(size)]
    boxes = [Box(box.width, box.height, chance.random() < 0.3) for box in boxes]
    edges = set()
    for target in range(1, size):
        for _ in range(chance.randint(0, 3)):
            nearest = target - 1 if chance.random() < 0.8 else chance.randrange(target)
            edges.add((chance.randint(max(0, nearest - 4), nearest), target))
    return boxes, sorted(edges)


def finals(explanation: Explanation) -> list[Trace]:
    return [trace for trace in explanation.traces if trace.stage == "final"]


# ---- layout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_boxes_are_placed_once_inside_and_apart(seed: int) -> None:
    boxes, edges = random_graph(seed, 5 + 12 * seed)
    layout = compute_layout(boxes, edges)
    assert [(p.width, p.height) for p in layout.places] == [(b.width, b.height) for b in boxes]
    for place in layout.places:
        assert place.left >= 0 and place.top >= 0
        assert place.left + place.width <= layout.width and place.bottom <= layout.height
    for one, two in itertools.combinations(layout.places, 2):
        side_by_side = one.left + one.width < two.left or two.left + two.width < one.left
        above = one.bottom < two.top or two.bottom < one.top
        assert side_by_side or above, f"{one} and {two} overlap"


@pytest.mark.parametrize("seed", range(12))
def test_edges_go_downwards_and_around_boxes(seed: int) -> None:
    boxes, edges = random_graph(seed, 5 + 12 * seed)
    layout = compute_layout(boxes, edges)
    assert len(layout.routes) == len(edges)
    for (source, target), route in zip(edges, layout.routes, strict=True):
        start, end = layout.places[source], layout.places[target]
        assert start.bottom < end.top
        assert route.points[0] == (start.center, start.bottom)
        assert route.points[-1][1] == end.top
        assert end.left < route.points[-1][0] < end.left + end.width
        heights = [y for _, y in route.points]
        assert heights == sorted(heights)
        assert route.direct == (end.layer - start.layer > MAX_LANE_LAYERS)
        if not route.direct:
            assert_clear(layout, route.points, {source, target})


def assert_clear(layout: Layout, points: list[tuple[float, float]], ends: set[int]) -> None:
    """The vertical stretches of a route, the parts inside layers, meet no other box."""
    for (x, top), (other_x, bottom) in zip(points[::2], points[1::2], strict=True):
        assert x == other_x
        for number, place in enumerate(layout.places):
            if number in ends or not (place.left < x < place.left + place.width):
                continue
            assert bottom <= place.top or top >= place.bottom, f"an edge crosses box {number}"


def test_a_chain_is_straight() -> None:
    boxes = [Box(40.0 + 10 * (i % 5), 24.0) for i in range(40)]
    layout = compute_layout(boxes, [(i, i + 1) for i in range(39)])
    assert max(p.center for p in layout.places) - min(p.center for p in layout.places) <= 0.2
    assert [p.layer for p in layout.places] == list(range(40))


def test_two_branches_stand_beside_their_fork() -> None:
    layout = compute_layout([Box(50.0, 24.0)] * 4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    fork, left, right, join = layout.places
    assert left.top == right.top
    assert fork.center == pytest.approx(join.center, abs=1)
    assert fork.center == pytest.approx((left.center + right.center) / 2, abs=1)


def test_an_input_stands_just_above_its_first_use() -> None:
    """Box 0 is used by box 5 only: it sinks from the first layer to the one above box 5."""
    boxes = [Box(40.0, 16.0, light=True), *[Box(60.0, 24.0)] * 5]
    layout = compute_layout(boxes, [(1, 2), (2, 3), (3, 4), (4, 5), (0, 5)])
    assert layout.places[0].layer == layout.places[5].layer - 1


def test_layout_refuses_an_edge_against_the_order() -> None:
    with pytest.raises(AssertionError, match="goes against"):
        compute_layout([Box(1.0, 1.0)] * 2, [(1, 0)])


def test_nothing_to_place() -> None:
    assert compute_layout([], []).places == []


def count_calls(function, *arguments) -> int:
    """Python and C calls made by a function: time, in a unit that doesn't depend on the machine."""
    counted = 0

    def count(frame, event, argument) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function(*arguments)
    finally:
        sys.setprofile(before)
    return counted


def test_layout_is_linear() -> None:
    small, large = (place_work(length) for length in (300, 900))
    assert large["slots"] < 3.3 * small["slots"]
    assert large["calls"] < 3.3 * small["calls"]


def place_work(length: int) -> dict[str, int]:
    level = build_level(chain(length), None)
    return {"slots": layout_level(level).slots, "calls": count_calls(layout_level, level)}


# ---- what is drawn -------------------------------------------------------------------------------


def expected_edges(trace: Trace) -> set[tuple[str, str]]:
    """Which call reads from which, with items of tuples followed to the call that made them."""

    def maker(node: fx.Node) -> fx.Node:
        while node.target is operator.getitem and isinstance(node.args[0].meta["val"], tuple):
            node = node.args[0]
        return node

    return {
        (maker(source).name, node.name)
        for node in trace.ops
        for source in node.all_input_nodes
        if maker(node) is node
    }


def test_every_call_has_one_box_and_every_value_one_edge(explained: Explanation) -> None:
    for trace in finals(explained):
        level = build_level(trace, None)
        names = [name for item in level.items for name in item.nodes]
        calls = {target for _, target in expected_edges(trace)}
        inputs = {node.name for node in trace.inputs}
        assert len(names) == len(set(names))
        assert set(names) == calls | inputs
        edges = {
            (level.items[flow.source].nodes[0], level.items[flow.target].nodes[0])
            for flow in level.flows
        }
        assert edges == expected_edges(trace)


def test_modules_hold_every_call_once_at_each_depth(explained: Explanation) -> None:
    for trace in finals(explained):
        *modules, ops = build_levels(trace)
        assert modules and ops.depth is None
        everything = sorted(name for item in ops.items for name in item.nodes)
        for level in modules:
            assert sorted(name for item in level.items for name in item.nodes) == everything
            assert len(level.items) < len(ops.items)
            assert all(flow.source < flow.target for flow in level.flows)
            for item in level.items:
                if not item.values:
                    held = [
                        n for entry in ops.items[item.first : item.last + 1] for n in entry.nodes
                    ]
                    assert set(held) <= set(item.nodes)


def test_layers_of_a_model_are_boxes(plain: Explanation, explained: Explanation) -> None:
    (forward, *_) = finals(explained)
    labels = [item.label for level in build_levels(forward) for item in level.items]
    assert {"self.layers.0", "self.layers.1", "self.layers.2"} <= set(labels)
    assert "self.up" not in labels  # of the other model


def test_boxes_say_what_runs_them(explained: Explanation) -> None:
    forward = finals(explained)[0]
    level = build_level(forward, None)
    item_of = {item.nodes[0]: item for item in level.items}
    kinds = set()
    for node in forward.ops:
        if node.name not in item_of:
            continue
        item = item_of[node.name]
        kinds.add(item.kind)
        if isinstance(node.target, Region):
            inner = [n for n in node.target.module.graph.nodes if n.op == "call_function"]
            count = sum(not is_view(n) for n in inner)
            assert item.kind == "region" and item.detail.startswith(f"{count} op")
            assert item.executor == "pointwise"
        else:
            assert item.kind == ("view" if is_view(node) else "op")
            assert item.executor == "torch"
    assert kinds == {"op", "view", "region"}
    widths = {p.height for p, i in zip(layout_level(level).places, level.items, strict=True)}
    assert len(widths) == 3  # views and inputs are smaller than calls, and those than regions


def test_an_edge_names_its_value_with_dtype_and_shape(plain: Explanation) -> None:
    level = build_level(finals(plain)[0], None)
    said = [text for flow in level.flows for text in flow.values]
    assert "x: f32[4, 16]" in said
    assert "up_weight: f32[48, 16]" in said


def test_returned_values_are_marked(plain: Explanation) -> None:
    trace = finals(plain)[0]
    level = build_level(trace, None)
    returned = {name for item in level.items if item.returned for name in item.values}
    assert {node.name for node in trace.outputs if isinstance(node, fx.Node)} <= returned
    assert not all(item.returned for item in level.items)


@pytest.mark.usefixtures("torch_only")
def test_a_module_called_twice_keeps_the_graph_acyclic() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.twice(torch.sin(self.twice(x)).cos() * 2)

    compiled = fulgurite.compile(Twice())
    with torch.no_grad():
        compiled(torch.randn(2, 4))
    level = build_level(compiled.last_trace(), 2)
    labels = [item.label for item in level.items if item.kind != "input"]
    assert labels == ["self.twice", "sin", "cos", "mul", "self.twice"]
    assert all(flow.source < flow.target for flow in level.flows)


def test_drawing_is_deterministic(explained: Explanation) -> None:
    for trace in finals(explained):
        assert draw_trace(trace, ["pointwise", "torch"]) == draw_trace(
            trace, ["pointwise", "torch"]
        )


def test_colours_are_fixed_for_ours_and_distinct_for_others() -> None:
    assert [executor_colour(name) for name in ("torch", "fuser", "kernels", "inductor")] == [
        0,
        1,
        2,
        3,
    ]
    known = ["a", "b", "torch", "c"]
    assert len({executor_colour(name, known) for name in known}) == 4


def test_long_names_keep_their_end() -> None:
    assert shorten_label("self.layers.11.attention.projection", 16) == "…tion.projection"
    assert shorten_label("mm") == "mm"


def test_a_level_without_ops_draws() -> None:
    level = Level(None, [], [])
    assert layout_level(level).places == []
