"""Every rank but the first: messages of rank 0 in, the same steps of the model out (see ranks.py)."""

from __future__ import annotations

import pickle

from fulgurite.errors import RankError
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.ranks import Added, Chosen, Event, Forgot, Link, Message, digest
from fulgurite.serve.engine.request import Request
from fulgurite.serve.engine.sampler import choose


class Follower:
    """Every rank but the first: does what the messages say until there are no more."""

    def __init__(self, engine: Engine, link: Link) -> None:
        self.engine, self.link = engine, link
        self.numbers: dict[str, int] = {}

    def run(self) -> None:
        while True:
            message: Message = pickle.loads(self.link.channel.receive())
            for event in message.events:
                self._apply(event)
            if message.last:
                return
            self._step(message)

    def _step(self, message: Message) -> None:
        engine, mesh = self.engine, self.link.mesh
        pieces = engine.scheduler.schedule()
        if self.link.home == 0 and digest(pieces) != (message.pieces, message.tokens):
            raise RankError(
                f"rank 0 runs {message.tokens} tokens of {message.pieces} requests, and this rank "
                f"would run {digest(pieces)[1]} of {len(pieces)}",
                where=f"rank {mesh.rank}",
                next="start all ranks with the same model and options; this is a mistake of ours "
                "if they were",
            )
        logits_RO = engine.runner.run(pieces)
        engine.scheduler.done(pieces)
        if mesh.data.size > 1 and mesh.tensor.index == 0:
            requests = [piece.request for piece in pieces if piece.last]
            tokens = choose(logits_RO, requests, engine.draws) if requests else []
            named = zip((self.numbers[one.id] for one in requests), tokens, strict=True)
            self.link.gather(dict(named), engine.plan.limits.max_sequences)

    def _apply(self, event: Event) -> None:
        engine = self.engine
        if isinstance(event, Forgot):
            engine.tables.forget()
        elif isinstance(event, Added):
            if event.home == self.link.home:
                self._add(event)
        elif event.id in engine.requests:
            request = engine.requests[event.id]
            if isinstance(event, Chosen):
                request.append(event.token)
            else:
                self._end(request, event.cancelled)

    def _add(self, event: Added) -> None:
        request = Request(event.id, event.prompt_ids, event.params, self.engine.context)
        request.seed = event.seed
        self.engine.requests[event.id] = request
        self.numbers[event.id] = event.number
        self.engine.scheduler.add(request)

    def _end(self, request: Request, cancelled: bool) -> None:
        if cancelled:
            self.engine.scheduler.cancel(request)
        else:
            self.engine.scheduler.end(request)
        request.finish("followed")
        del self.engine.requests[request.id], self.numbers[request.id]
