"""Tensor parallelism from a plan table: a model on every rank in, each rank's share of it left.

    plan = {"embedding": "vocabulary", "layers.*.attention.query": "query", ...}    a family's PLAN
    shares = parallelize(model, mesh, plan)
    print(shares)                                      what was divided, and what was not and why
    loss.backward(); shares.reduce_gradients()

What a plan may say of a module or parameter (`*` stands for one name between dots):

    vocabulary     an embedding or a head: rows divided; logits come out whole
    attention      whole tokens go in; its specs say how many heads there are
    query, key     rows belong to query or key heads; fewer key heads than ranks are kept by several
    output         columns belong to query heads; its sums are taken over ranks
    feed_forward   whole tokens go in; `column` and `row` inside it divide the inner size
    column, row    rows divided; columns divided and sums taken over ranks, the bias once
    experts        over the expert axis where the mesh has one, else each expert's inner size
    last           the norm before the head

With experts spread over ranks, tokens are divided too (`split_tokens`): between attention and attention
each rank has its share of the tokens, norms and routers see only those, sums are scattered instead of
repeated, and attention gathers. Heads that can't be divided leave attention whole on every rank.

Weights, dense or packed, are cut where they lie; packed ones at block boundaries.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fulgurite.errors import ArgumentError
from fulgurite.parallel.collectives import share
from fulgurite.parallel.cutting import Cutter, step_of
from fulgurite.parallel.expert import ExpertParallel, SharedBeside, spread_experts
from fulgurite.parallel.gradients import ExpertCopies, KeyCopies
from fulgurite.parallel.layers import (
    DividedExperts,
    OwnLinear,
    RowLinear,
    Tokens,
    VocabularyTable,
    enter_whole,
    gather_at_end,
)
from fulgurite.parallel.mesh import Mesh
from fulgurite.parallel.placement import Placement
from fulgurite.parallel.shares import Range, Shares
from fulgurite.parallel.transport import Collective, Transport
from fulgurite.quant import QuantTensor
from fulgurite.quant.sharding import boundary

Plan = Mapping[str, str]
STYLES = (
    *("vocabulary", "attention", "query", "key", "output"),
    *("feed_forward", "column", "row", "experts", "last"),
)


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    plan: Plan,
    *,
    split_tokens: bool | None = None,
    transport: Transport | None = None,
    placement: Placement | None = None,
) -> Shares:
    """Keep this rank's share of a model, in place.

    split_tokens   None: where both the tensor and the expert axis have several ranks
    transport      how tokens reach experts; `Collective` by default
    placement      where experts lie, one row a layer with experts; in order by default
    """
    if split_tokens is None:
        split_tokens = mesh.tensor.size > 1 and mesh.expert.size > 1
    if mesh.tensor.size > 1 and mesh.expert.size > 1 and not split_tokens:
        raise ArgumentError(
            "split_tokens=False, but tensor and expert axis both have several ranks",
            where=str(mesh.shape),
            next="tokens that every tensor rank has would be sent to the experts several times: "
            "leave split_tokens out, or choose expert=1",
        )
    if transport is None and mesh.expert.size > 1:
        transport = Collective(mesh.expert)
    work = _Work(model, mesh, _matches(model, plan), split_tokens, transport, placement)
    return work.run()


def _matches(model: nn.Module, plan: Plan) -> dict[str, str]:
    """Module or parameter -> style, in the order of the model."""
    unknown = {style for style in plan.values() if style not in STYLES}
    if unknown:
        raise ArgumentError(
            f"a plan can't say {', '.join(sorted(unknown))}", next=f"one of {', '.join(STYLES)}"
        )
    patterns = [
        (re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")), style)
        for pattern, style in plan.items()
    ]
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters()]
    found = {}
    for name in names:
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                found[name] = style
    return found


class _Work:
    """One run of `parallelize`."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        styles: dict[str, str],
        split_tokens: bool,
        transport: Transport | None,
        placement: Placement | None,
    ) -> None:
        self.model, self.mesh, self.styles = model, mesh, styles
        self.axis = mesh.tensor
        self.tokens = Tokens(self.axis) if split_tokens else None
        self.transport, self.placement = transport, placement
        self.shares = Shares(mesh)
        self.mixtures = 0
        self.cutter = Cutter(model, self.axis, self.shares)
        # For gradients. Modules are wrapped on the way, so parameters are known by themselves.
        self.spread: set[nn.Parameter] = set()
        self.after_sum: set[nn.Parameter] = set()
        self.partial: list[nn.Module] = []
        self.copies: dict[nn.Parameter, KeyCopies] = {}
        self.slots: dict[nn.Parameter, ExpertCopies] = {}

    def run(self) -> Shares:
        divided = self.axis.size > 1
        for name, style in self.styles.items():
            if style == "vocabulary" and divided:
                self._vocabulary(name)
            elif style == "attention" and divided:
                self._attention(name)
            elif style == "feed_forward" and divided:
                self._feed_forward(name)
            elif style == "last" and self.tokens is not None:
                gather_at_end(self.model.get_submodule(name), self.tokens)
        for name in self._named("experts", ""):
            self._experts(name)
        self._note_gradients()
        self.shares.kept = {n: self.cutter.kept[p] for n, p in self.model.named_parameters()}
        return self.shares

    def _note_gradients(self) -> None:
        gradients = self.shares.gradients
        gradients.model = self.model
        partial = {p for module in self.partial for p in module.parameters()} - self.after_sum
        for name, parameter in self.model.named_parameters():
            if parameter in self.spread:
                gradients.axes[name] = "replica"
            elif parameter in self.cutter.divided:
                gradients.axes[name] = "data"
            else:
                whole = self.tokens is None and parameter not in partial
                gradients.axes[name] = "data" if whole else "world"
            if parameter in self.copies:
                gradients.copies[name] = self.copies[parameter]
            if parameter in self.slots:
                gradients.slots[name] = self.slots[parameter]

    def _named(self, style: str, inside: str) -> list[str]:
        prefix = f"{inside}." if inside else ""
        return [n for n, s in self.styles.items() if s == style and n.startswith(prefix)]

    # ---- the parts of a model ----------------------------------------------------------------------

    def _vocabulary(self, name: str) -> None:
        module = self.model.get_submodule(name)
        weight = module.weight
        assert isinstance(weight, Tensor), f"{name} has no weight"
        step = boundary(weight.format, 0, 2) if isinstance(weight, QuantTensor) else 1
        total = weight.shape[0]
        self.cutter.check_enough(name, total, step)
        self.cutter.cut(f"{name}.weight", "vocabulary", 0, self.cutter.share(total, step))
        bias = getattr(module, "bias", None)
        if bias is not None:
            raise ArgumentError(f"{name} has a bias", next="heads of our families have none")
        self.cutter.replace(name, VocabularyTable(module, self.axis, total, step, self.tokens))

    def _attention(self, name: str) -> None:
        module = self.model.get_submodule(name)
        spec: Any = module.spec  # an AttentionSpec of models, which is further up
        heads, kv_heads = spec.heads, spec.kv_heads
        split = split_heads(heads, kv_heads, self.axis.index, self.axis.size)
        if split is None:
            note = f"{heads} query and {kv_heads} key heads don't divide by {self.axis.size}"
            self.cutter.line(name, "whole", (heads, kv_heads), (heads, kv_heads), note)
            if self.tokens is not None:
                enter_whole(module, self.axis, self.tokens)
                for child in self._named("output", name):
                    self.cutter.replace(
                        child, OwnLinear(self.model.get_submodule(child), self.tokens)
                    )
            return
        queries, keys = split
        module.spec = dataclasses.replace(
            spec, heads=queries[1] - queries[0], kv_heads=keys[1] - keys[0]
        )
        for child in self._named("query", name):
            self.cutter.cut_module(child, "query", 0, heads, queries)
        for child in self._named("key", name):
            self.cutter.cut_module(child, "key", 0, kv_heads, keys)
            if kv_heads < self.axis.size:
                self._remember_copies(child, kv_heads, keys)
        for child in self._named("output", name):
            self.cutter.cut(f"{child}.weight", "output", 1, queries, heads)
            self._reduce_after(child)
        self._enter(name)

    def _feed_forward(self, name: str) -> None:
        mixture = bool(self._named("experts", name))
        if mixture and self.mesh.expert.size > 1:
            return  # tokens are divided already, and a shared expert is kept whole
        columns, rows = self._named("column", name), self._named("row", name)
        # Those of one MLP have one inner size; a shared expert inside has another.
        for parent in dict.fromkeys(child.rpartition(".")[0] for child in rows):
            self._inner(
                parent,
                [child for child in columns if child.rpartition(".")[0] == parent],
                [child for child in rows if child.rpartition(".")[0] == parent],
            )
        self._enter(name)

    def _inner(self, parent: str, columns: list[str], rows: list[str]) -> None:
        """Divide one inner size: the rows of `columns`, and the columns of `rows` alike."""
        weights = [(self.cutter.weight(child), 0) for child in columns]
        weights += [(self.cutter.weight(child), 1) for child in rows]
        total = weights[0][0].shape[weights[0][1]]
        step = math.lcm(*(step_of(weight, dim) for weight, dim in weights))
        self.cutter.check_enough(parent, total, step)
        inner = self.cutter.share(total, step)
        for child in columns:
            self.cutter.cut_module(child, "column", 0, total, inner)
        for child in rows:
            self.cutter.cut(f"{child}.weight", "row", 1, inner)
            self._reduce_after(child)

    def _experts(self, name: str) -> None:
        experts = self.model.get_submodule(name)
        before = dict(experts.named_parameters(recurse=False))
        cuts: dict[str, tuple[int, tuple[Range, ...]]] = {}  # parameter -> what of which dimension
        if self.mesh.expert.size > 1:
            assert self.transport is not None, "parallelize made one"
            parallel = spread_experts(experts, self.transport, self.placement, self.mixtures)
            self.cutter.replace(name, parallel)
            self._run_beside(name.rpartition(".")[0], parallel)
            cuts = dict.fromkeys(before, (0, tuple((e, e + 1) for e in parallel.mine)))
            self.spread |= set(experts.parameters())
            if parallel.redundant:
                copies = ExpertCopies(parallel.mine, parallel.placement.experts)
                self.slots |= dict.fromkeys(experts.parameters(), copies)
            self.mixtures += 1
        elif self.axis.size > 1:
            if self.tokens is not None:
                raise ArgumentError(
                    "tokens can't be divided where all ranks hold a part of every expert",
                    where=name,
                    next="leave split_tokens out, or give the mesh an expert axis",
                )
            down = experts.get_parameter("down")
            step = math.lcm(step_of(down, 2), step_of(experts.get_parameter("gate_up"), 1))
            self.cutter.check_enough(name, down.shape[2], step)
            inner = self.cutter.share(down.shape[2], step)
            both = tuple((half + inner[0], half + inner[1]) for half in (0, down.shape[2]))
            cuts = {"gate_up": (1, both), "gate_up_bias": (1, both), "down": (2, (inner,))}
            self.cutter.replace(name, DividedExperts(experts, self.axis, inner))
            self.cutter.divided |= set(experts.parameters())
        after = before | dict(experts.named_parameters(recurse=False))  # a bias may have moved
        for parameter, whole in before.items():
            kept = after[parameter]
            if parameter in cuts:
                dim, ranges = cuts[parameter]
                self.cutter.kept[kept] = self.cutter.kept[whole].cut(dim, *ranges)
            self.cutter.line(
                f"{name}.{parameter}", "experts", tuple(whole.shape), tuple(kept.shape)
            )

    def _run_beside(self, name: str, experts: ExpertParallel) -> None:
        """A shared expert of the same mixture runs while tokens travel."""
        mixture: Any = self.model.get_submodule(name)
        if getattr(mixture, "shared", None) is not None:
            self.cutter.replace(name, SharedBeside(mixture.router, experts, mixture.shared))

    # ---- what is done to modules -------------------------------------------------------------------

    def _enter(self, name: str) -> None:
        module = self.model.get_submodule(name)
        enter_whole(module, self.axis, self.tokens)
        self.partial.append(module)

    def _reduce_after(self, name: str) -> None:
        linear = RowLinear(self.model.get_submodule(name), self.axis, self.tokens)
        self.cutter.replace(name, linear)
        if linear.bias is not None:
            self.after_sum.add(linear.bias)

    def _remember_copies(self, name: str, kv_heads: int, keys: Range) -> None:
        for path in self.cutter.parameters(name):
            parameter = self.model.get_parameter(path)
            local = parameter.shape[0]
            self.copies[parameter] = KeyCopies(local * kv_heads, keys[0] * local)


def split_heads(heads: int, kv_heads: int, index: int, count: int) -> tuple[Range, Range] | None:
    """The query and key heads of one rank; None where ranks can't have equally many."""
    if heads % count:
        return None
    queries = share(heads, index, count)
    if kv_heads % count == 0:
        return queries, share(kv_heads, index, count)
    if count % kv_heads == 0:
        first = index * kv_heads // count
        return queries, (first, first + 1)
    return None
