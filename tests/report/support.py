"""Traces of any length made by hand, and a reader of pages."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fulgurite.explain import CompiledGraphSummary, Explanation, GraphSummary
from fulgurite.report.markup import VOID
from fulgurite.trace import Trace


def chain(length: int, stage: str = "final", kind: str = "inference") -> Trace:
    """A trace of `length` additions, each also reading a value from some lines before."""
    graph = fx.Graph()
    with FakeTensorMode():
        value = torch.empty(8, 8)
    nodes = [graph.placeholder("x")]
    nodes[0].meta["val"] = value
    for position in range(length):
        far = nodes[max(0, position - 7 * (position % 11))]
        node = graph.call_function(torch.ops.aten.add.Tensor, (nodes[-1], far))
        node.meta = {"val": value, "executor": "torch"}
        nodes.append(node)
    graph.output((nodes[-1],))
    return Trace(fx.GraphModule(nn.Module(), graph), kind, stage)


def chain_explanation(length: int) -> Explanation:
    """The explanation of a long trace."""
    traces = [chain(length, stage) for stage in ("functional", "claimed", "final")]
    stages = [(trace.stage, 0.001) for trace in traces]
    program = CompiledGraphSummary("inference", length, {"torch": length}, 256, 256, stages)
    graph = GraphSummary(0, "model.py:1", 0.1, [program], {}, [])
    return Explanation("executors torch", "mincut", "whole", [graph], [], {}, traces)


class Element:
    """An element of a parsed page."""

    def __init__(self, tag: str, attributes: dict[str, str | None]) -> None:
        self.tag = tag
        self.attributes = attributes
        self.children: list[Element | str] = []

    @property
    def text(self) -> str:
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    def all(self, tag: str = "", **attributes: str) -> list[Element]:
        """Every element below this one with the tag and, where given, an attribute's word."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                fits = not tag or child.tag == tag
                for key, word in attributes.items():
                    fits = fits and word in (child.attributes.get(key.rstrip("_")) or "").split()
                found += [child] if fits else []
                found += child.all(tag, **attributes)
        return found


class Page(HTMLParser):
    """A page as a tree; an element that is closed out of turn, twice or never is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("page", {})
        self.open = [self.root]
        self.feed(text)
        self.close()
        assert self.open == [self.root], f"never closed: {[e.tag for e in self.open[1:]]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"<{tag}> has an attribute twice: {attrs}"
        element = Element(tag, dict(attrs))
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        last = self.open.pop()
        assert last.tag == tag, f"</{tag}> closes <{last.tag}>"

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)

    @property
    def data(self) -> dict[str, Any]:
        """What the page's script reads."""
        (element,) = [e for e in self.root.all("script") if e.attributes.get("id") == "data"]
        return json.loads(element.text)

    def stage_texts(self) -> list[str]:
        data = self.data
        return [
            "\n".join(data["lines"][number] for number in stage["lines"])
            for program in data["programs"]
            for stage in program["stages"]
        ]
