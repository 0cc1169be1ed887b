"""Requests whose grammars are being compiled: they wait here, and then enter the scheduler.

Compiling takes from a millisecond to seconds, in another thread. Steps of other requests run meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait

from fulgurite.errors import ArgumentError
from fulgurite.serve.engine.grammar import Grammar, GrammarCompiler, GrammarSpec
from fulgurite.serve.engine.request import Request

WAIT_SECONDS = 0.05  # of a step that has nothing else to do


class GrammarQueue:
    """Compiles grammars of requests with the engine's compiler, if it has one.

    pending    requests by id, with their grammars that are being compiled
    started    requests in the scheduler that have not run: their first tokens may be forced
    """

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self.compiler = compiler
        self.pending: dict[str, tuple[Request, Future[Grammar]]] = {}
        self.started: list[Request] = []

    def require_compiler(self) -> GrammarCompiler:
        if self.compiler is None:
            raise ArgumentError(
                "structured output needs a tokenizer, and this engine has none",
                next="use a model with a tokenizer.json, or pass constraint= to add_request",
            )
        return self.compiler

    def start(self, spec: GrammarSpec) -> Future[Grammar]:
        """Start to compile; see `GrammarCompiler.start`."""
        return self.require_compiler().start(spec)

    def add(self, request: Request, grammar: Future[Grammar]) -> None:
        self.pending[request.id] = request, grammar

    def remove(self, request: Request) -> bool:
        """Forget a request; whether it was pending."""
        return self.pending.pop(request.id, None) is not None

    def take_compiled(self) -> list[tuple[Request, Future[Grammar]]]:
        """Requests whose grammars are compiled, in order of arrival."""
        done = [one for one in self.pending.values() if one[1].done()]
        for request, _ in done:
            del self.pending[request.id]
        return done

    def take_started(self) -> list[Request]:
        started, self.started = self.started, []
        return started

    @property
    def requests(self) -> Collection[Request]:
        return [request for request, _ in self.pending.values()]

    def wait(self) -> None:
        """Wait for a grammar, for a short time."""
        futures = [future for _, future in list(self.pending.values())]
        wait(futures, timeout=WAIT_SECONDS, return_when=FIRST_COMPLETED)
