"""The engine: requests in, text out, many at a time.

    step():  schedule ─▶ run ─▶ choose ─▶ finish

One step computes a piece of every request that has its turn and gives each request that is through
with its prompt one token more. Requests come and go between steps. Where text is wanted as it is
made, a listener hears of every update; `stream` and `generate` are made of that, and so is
`async_engine.py`. Any thread may call: one step runs at a time, whoever asked for it.

A step that is interrupted, or in which a grammar fails, leaves every request as it was, to be run
again; a listener that fails keeps no other from hearing.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from numbers import Integral

import torch

from fulgurite.errors import ArgumentError
from fulgurite.models.layers import Decoder
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.plan.memory import MemoryPlan
from fulgurite.serve.engine.block_pool import BlockPool
from fulgurite.serve.engine.block_tables import BlockTables, make_groups
from fulgurite.serve.engine.detokenizer import Detokenizer
from fulgurite.serve.engine.kv_cache import PagedCache
from fulgurite.serve.engine.ranks import UNFIXED, Link
from fulgurite.serve.engine.request import (
    Constraint,
    Request,
    Result,
    SamplingParams,
    State,
    Update,
)
from fulgurite.serve.engine.runner import Runner
from fulgurite.serve.engine.sampler import Draws, choose, log_probabilities
from fulgurite.serve.engine.scheduler import Scheduler

Prompt = str | Sequence[int]
Listener = Callable[[Update], None]
FINISHED = State.FINISHED


class Engine:
    """A model with its cache and the requests on their way.

    Without a tokenizer prompts are token ids and results have no text. Through a `link` the engines of
    other ranks follow this one.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None,
        plan: MemoryPlan,
        *,
        reuse: bool = True,
        link: Link | None = None,
    ) -> None:
        if tokenizer is not None:
            tokenizer.check_fits(model.config.vocabulary)
        self.model, self.tokenizer, self.plan = model, tokenizer, plan
        limits, specs = plan.limits, model.attention_specs
        groups = make_groups(specs)
        self.tables = BlockTables(
            groups,
            [BlockPool(count) for count in plan.blocks],
            limits.block_size,
            limits.max_sequences,
            limits.context,
            limits.step_tokens,
            # Keys that depend on how long a text becomes are not those of the same beginning.
            reuse=reuse and not model.needs_extent,
        )
        self.cache = PagedCache(
            specs, groups, plan.blocks, limits.block_size, limits.kv_dtype, plan.device
        )
        self.scheduler = Scheduler(
            self.tables, limits.max_sequences, limits.step_tokens, model.stale_after
        )
        self.link = link
        self.runner = Runner(model, self.cache, self.tables, None if link is None else UNFIXED)
        self.context = min(limits.context, self.tables.capacity())
        self.draws = Draws()
        self.requests: dict[str, Request] = {}
        self.texts: dict[str, Detokenizer] = {}
        self.listeners: dict[str, Listener] = {}
        self.numbers = itertools.count()
        self.lock = threading.RLock()
        self.end_ids = frozenset(model.config.eos_token_ids)
        if tokenizer is not None:
            self.end_ids |= frozenset(tokenizer.stop_ids)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        listener: Listener | None = None,
        constraint: Constraint | None = None,
    ) -> Request:
        """Put a request in line. A prompt that can't be run is refused here, and only it."""
        params = self._checked(SamplingParams() if params is None else params)
        prompt_ids = self.encode(prompt)
        with self.lock:
            id = self._unused() if id is None else id
            if id in self.requests:
                raise ArgumentError(f"there is a request {id!r} already")
            request = Request(id, prompt_ids, params, self.context, constraint)
            if self.link is not None:
                self.link.added(request, prompt_ids)
            self.requests[id] = request
            if self.tokenizer is not None:
                self.texts[id] = Detokenizer(self.tokenizer, params.stop)
            if listener is not None:
                self.listeners[id] = listener
            if self._here(request):
                self.scheduler.add(request)
        return request

    def _unused(self) -> str:
        names = (f"request-{number}" for number in self.numbers)
        return next(name for name in names if name not in self.requests)

    def _here(self, request: Request) -> bool:
        """Whether this rank's own cache has a request's keys."""
        return self.link is None or self.link.here(request)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt that can be run; an ArgumentError says why one can't."""
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise ArgumentError(
                f"a prompt can't be {prompt!r}", next="give a text, or a list of token ids"
            )
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ArgumentError("a text needs a tokenizer", next="give token ids")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        if not ids or prompt == "":
            raise ArgumentError("the prompt is empty", next="give at least one token")
        if len(ids) >= self.context:
            most = self.model.config.max_positions
            longer = f", or give a longer context: the model takes {most}"
            raise ArgumentError(
                f"the prompt has {len(ids)} tokens, and prompt and reply together may have "
                f"{self.context}",
                next="shorten the prompt" + (longer if self.context < most else ""),
            )
        size = self.model.config.vocabulary
        wrong = [token for token in ids if not isinstance(token, Integral) or not 0 <= token < size]
        if wrong:
            raise ArgumentError(
                f"the prompt has token {wrong[0]!r}",
                next=f"token ids are whole numbers from 0 to {size - 1}",
            )
        return ids

    def cancel(self, id: str) -> Update | None:
        """End a request now, with what it has written; None where there is no such request."""
        with self.lock:
            request = self.requests.get(id)
            if request is None:
                return None
            if self._here(request):
                self.scheduler.cancel(request)
            if self.link is not None:
                self.link.ended(request, cancelled=True)
            request.finish("cancelled")
            return self._tell(self._closing(request, ""), request)

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Update]:
        """One step of the model: what each request that got a token has to say."""
        with self.lock:
            return self._step()

    def _step(self) -> list[Update]:
        pieces = self.scheduler.schedule()
        if not pieces and all(self._here(request) for request in self.requests.values()):
            assert not self.requests, "there are requests and none can run"
            return []
        if self.link is not None:
            self.link.begin(pieces)
        logits_RO = self.runner.run(pieces)
        requests = [piece.request for piece in pieces if piece.last]
        tokens = choose(logits_RO, requests, self.draws) if requests else []
        chosen = list(zip(requests, tokens, strict=True))
        told = [
            (request, log_probabilities(logits_RO[row], token, request.params.logprobs))
            for row, (request, token) in enumerate(chosen)
            if request.params.logprobs is not None
        ]
        self.scheduler.done(pieces)  # from here on nothing takes long: an interrupt comes before
        for request, token in chosen:
            request.append(token)
        for request, logprobs in told:
            request.logprobs.append(logprobs)
        return self._finish(chosen)

    def _finish(self, chosen: list[tuple[Request, int]]) -> list[Update]:
        """See who is done with the tokens that were chosen, here and elsewhere; tell everyone."""
        if self.link is not None:
            elsewhere = self.link.from_others(self.plan.limits.max_sequences)
            for one in elsewhere:
                self.requests[one.id].append(one.token)
                chosen.append((self.requests[one.id], one.token))
            for request, token in chosen:
                self.link.chose(request, token)
        updates: list[Update] = []
        left = iter(chosen)
        try:
            for request, token in left:
                self._take(request, token, updates)
        finally:  # goes on behind one that fails
            with ExitStack() as others:
                for request, token in reversed(list(left)):
                    others.callback(self._take, request, token, updates)
        return updates

    def _take(self, request: Request, token: int, updates: list[Update]) -> None:
        if request.state is FINISHED:  # as who was cancelled by a listener is
            return
        if request.constraint is not None:
            request.constraint.accept(token)
        update = self._advance(request, token)
        updates.append(self._tell(update, request) if request.id in self.listeners else update)

    def _advance(self, request: Request, token: int) -> Update:
        params, text = request.params, self.texts.get(request.id)
        ends = (not params.ignore_eos and token in self.end_ids) or token in params.stop_token_ids
        new = "" if ends or text is None else text.push(token)
        if ends:
            request.finish("stop", token)
        elif text is not None and text.stopped_by is not None:
            request.finish("stop", text.stopped_by)
        elif request.length == request.limit:
            request.finish("length")
        else:
            return Update(request.id, new, (token,))
        if self._here(request):
            self.scheduler.end(request)
        if self.link is not None:
            self.link.ended(request)
        return self._closing(request, new, (token,))

    def _closing(self, request: Request, new: str, token_ids: tuple[int, ...] = ()) -> Update:
        """The last update of a finished request, after which the engine forgets it."""
        text = self.texts.pop(request.id, None)
        if text is not None:
            new += text.finish()
            if text.stopped_by is not None and request.finish_reason == "length":
                request.finish("stop", text.stopped_by)
        del self.requests[request.id]
        result = request.result(text.text if text is not None else "")
        return Update(request.id, new, token_ids, result)

    def _tell(self, update: Update, request: Request) -> Update:
        listener = self.listeners.get(request.id)
        if listener is not None:
            if update.result is not None:
                del self.listeners[request.id]
            listener(update)
        return update

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Update]:
        """The updates of one request as they come; a stream that is closed early is cancelled."""
        updates: deque[Update] = deque()
        following = self._follow(self.add(prompt, params, listener=updates.append), updates)
        next(following)  # into its `try`: a stream that nobody reads is closed as well
        return following

    def _follow(self, request: Request, updates: deque[Update]) -> Iterator[Update]:
        try:
            update = Update(request.id, "", ())
            yield update
            while update.result is None:
                if not updates:
                    self.step()
                while updates:
                    update = updates.popleft()
                    yield update
        finally:
            self.cancel(request.id)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """All prompts to their end, in one batch that changes as they come and go.

        Every prompt is checked before the first one runs.
        """
        each = self._params(prompts, params)
        encoded = [self.encode(prompt) for prompt in prompts]
        found: dict[str, Result] = {}

        def listen(update: Update) -> None:
            if update.result is not None:
                found[update.id] = update.result

        ids: list[str] = []
        try:
            for prompt, one in zip(encoded, each, strict=True):
                ids.append(self.add(prompt, one, listener=listen).id)
            while len(found) < len(ids):
                self.step()
        finally:
            for id in ids:
                self.cancel(id)
        return [found[id] for id in ids]

    def _params(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ArgumentError(
                f"{len(prompts)} prompts and {len(params)} sampling params",
                next="give one SamplingParams for all, or a list of one each",
            )
        return [self._checked(one) for one in params]

    def _checked(self, params: SamplingParams) -> SamplingParams:
        """Params that this model can follow."""
        if not isinstance(params, SamplingParams):
            raise ArgumentError(f"{params!r} are no SamplingParams")
        params.check_tokens(self.model.config.vocabulary)
        if params.stop and self.tokenizer is None:
            raise ArgumentError("stop strings need a tokenizer", next="use stop_token_ids")
        return params

    def warm_up(self) -> None:
        """Run one short request, so that the first real one waits for nothing to be built."""
        plain = SamplingParams(max_tokens=2, ignore_eos=True)
        self.generate([[0] * max(1, min(4, self.context - 2))], plain)
        self.forget()

    def forget(self) -> None:
        """No request finds keys in the cache that an earlier one left there."""
        with self.lock:
            if self.link is not None:
                self.link.forgot()
            self.tables.forget()


def choose_device(device: str | torch.device | None) -> torch.device:
    """What was asked for; else a GPU where there is one."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"{device!r} is no device", next="cpu, or cuda") from error
    if place.type not in ("cpu", "cuda"):
        raise ArgumentError(f"models can't run on {device} here", next="cpu, or cuda")
    if place.type == "cuda" and not 0 <= (place.index or 0) < torch.cuda.device_count():
        built = "" if torch.version.cuda else ", since it is built without CUDA"
        raise ArgumentError(
            f"there is no device {device}: torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} GPUs{built}",
            next="cpu, or a torch that is built for the GPU of this machine",
        )
    return place
