"""`Server`: everything behind the HTTP interface. A `ServerConfig` in, replies to prompts out.

It holds the engines, the tokenizer, admission and metrics. Endpoints (api/) call it; app.py connects
them to HTTP.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from starlette.requests import Request

from fulgurite.errors import ArgumentError
from fulgurite.models.tokenizer import Tokenizer, find_tokenizer
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.http.admission import Admission, Ticket
from fulgurite.serve.http.api.sampling import find_param
from fulgurite.serve.http.config import ServerConfig
from fulgurite.serve.http.engines import choose_environments, make_load
from fulgurite.serve.http.errors import ApiError, invalid
from fulgurite.serve.http.generation import Generation, GenerationRequest
from fulgurite.serve.http.metrics import Metrics
from fulgurite.serve.http.parsers.choice import (
    ParserChoice,
    choose_formats,
    shows_known_calls,
)
from fulgurite.serve.http.parsers.special_tokens import DetokenizePlan, plan_detokenization
from fulgurite.serve.http.request_template import TemplateProcesses
from fulgurite.serve.http.response_store import ResponseStore
from fulgurite.serve.http.router import Router
from fulgurite.serve.http.sampling_defaults import read_sampling_defaults
from fulgurite.serve.http.token_texts import TokenTexts
from fulgurite.serve.remote.client import EngineClient, EngineLoadError
from fulgurite.serve.remote.launch import LaunchedEngine
from fulgurite.serve.remote.messages import EngineInfo, LoadModel
from fulgurite.serve.structured.compiler import GrammarCompiler

T = TypeVar("T")
TOKENIZER_THREADS = 2
INLINE_CHARACTERS = 512  # shorter texts are tokenized at once: a thread would take longer


ClientFactory = Callable[[LoadModel, int], EngineClient]  # by the model and the replica's number


class Server:
    """The state of one server. `start` loads the engines.

    `launched`: engines of this machine that load already. `make_client`: where engines are otherwise;
    None: on this machine.
    """

    def __init__(
        self,
        config: ServerConfig,
        make_client: ClientFactory | None = None,
        launched: Sequence[LaunchedEngine] = (),
    ) -> None:
        self.config = config
        self.created = int(time.time())
        self.started_at = time.monotonic()
        self.model_names = config.model_names
        self.model_name = self.model_names[0]
        load = launched[0].load if launched else make_load(config)
        self.tokenizer = load_tokenizer(Path(load.name), config)
        self.sampling_defaults: dict[str, float] = {}
        if config.sampling_defaults == "model":
            self.sampling_defaults = read_sampling_defaults(Path(load.name))
        self.metrics = Metrics(self.model_name)
        if make_client is not None:
            self.clients = [make_client(load, index) for index in range(config.replicas)]
        else:
            self.clients = make_local_clients(config, load, launched)
        self.router = Router(self.clients, config.routing, config.prefill_replicas)
        self.admission = Admission(
            config.max_waiting, config.limits.pending_bytes, lambda: self.router.capacity
        )
        self.pool = ThreadPoolExecutor(TOKENIZER_THREADS, "fulgurite-tokenizer")
        self.responses = ResponseStore(config.limits.stored_responses)
        self.templates = TemplateProcesses()
        self.token_texts: TokenTexts | None = None
        self.formats = ParserChoice(None, None)
        self.detokenize_plan = DetokenizePlan(skip_special_tokens=True)
        self.info: EngineInfo | None = None
        self.grammars: GrammarCompiler | None = None

    async def start(self) -> EngineInfo:
        """Load all engines; EngineLoadError if the model can't be loaded."""
        if self.tokenizer is not None:
            self._prepare_tokens(self.tokenizer)
        results = await asyncio.gather(
            *(client.start() for client in self.clients), return_exceptions=True
        )
        failure = next((one for one in results if isinstance(one, BaseException)), None)
        if failure is not None:
            await self.close()
            raise failure
        for client in self.clients:
            client.on_progress.append(self.metrics.observe_progress)
            client.on_ready.append(self.admission.grant_turns)  # requests may have waited for it
        info = self.info = self.clients[0].info
        if info is None:
            raise EngineLoadError("the engine has no model")
        try:
            self.router.check_engine(info)
        except ArgumentError:
            await self.close()
            raise
        if self.tokenizer is not None:
            self.tokenizer = drop_unknown_tool_template(self.tokenizer)
            self._choose_formats(self.tokenizer, info)
        return info

    def _prepare_tokens(self, tokenizer: Tokenizer) -> None:
        """What needs no engine, while the engines load. Grammars are only checked here."""
        self.token_texts = TokenTexts(tokenizer)
        self.grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size)
        self.grammars.start_warm_up()

    def _choose_formats(self, tokenizer: Tokenizer, info: EngineInfo) -> None:
        config = self.config
        self.formats = choose_formats(
            "".join(filter(None, (tokenizer.chat_template, tokenizer.tool_template))),
            info.model_type,
            config.tool_call_parser,
            config.reasoning_parser,
        )
        self.detokenize_plan = plan_detokenization(
            tokenizer, self.formats.tool_format, self.formats.reasoning_format
        )

    async def close(self) -> None:
        await self.responses.close()
        await asyncio.gather(*(client.close() for client in self.clients))
        self.pool.shutdown(wait=False, cancel_futures=True)

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and wait for the others; whether all of them finished."""
        self.admission.is_draining = True
        deadline = time.monotonic() + seconds
        while self.admission.entered and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self.admission.entered

    # ---- what endpoints use ------------------------------------------------------------------------

    @property
    def context(self) -> int:
        return self.require_info().context

    def require_info(self) -> EngineInfo:
        if self.info is None:
            raise ApiError(503, "the model is loading", headers={"retry-after": "2"})
        return self.info

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise invalid("this model has no tokenizer; send token ids to /v1/completions")
        return self.tokenizer

    def check_model(self, name: str | None) -> str:
        """The name as the client wrote it; ApiError 404 for a model that is not served."""
        if name is None or name == "":
            return self.model_name
        if name not in self.model_names:
            raise ApiError(
                404,
                f"The model '{name[:200]}' does not exist. Served: {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )
        return name

    def enter(self, request: Request, num_bytes: int, deadline: float | None) -> Ticket:
        """A ticket for a request; ApiError 429 or 503 if it can't be served."""
        if deadline is None:
            deadline = self.config.deadline
        key = request.state.key if hasattr(request.state, "key") else ""
        try:
            return self.admission.enter(key, num_bytes, deadline)
        except ApiError as error:
            self.metrics.observe_rejection(error.code or str(error.status))
            raise

    async def run_in_pool(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.pool, function, *arguments)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text; long texts in a thread."""
        tokenizer = self.require_tokenizer()
        if len(text) <= INLINE_CHARACTERS:
            return tokenizer.encode(text, add_special_tokens)
        return await self.run_in_pool(tokenizer.encode, text, add_special_tokens)

    def check_prompt(self, prompt_ids: Sequence[int], param: str) -> int:
        """The tokens that are left for a reply; ApiError if the prompt can't run."""
        info = self.require_info()
        if not prompt_ids:
            raise invalid("the prompt is empty", param)
        left = info.context - len(prompt_ids)
        if left < 1:
            raise invalid(
                f"This model's maximum context length is {info.context} tokens. However, your "
                f"prompt has {len(prompt_ids)} tokens. Please shorten it.",
                param,
                "context_length_exceeded",
            )
        bad = next((one for one in prompt_ids if not 0 <= one < info.vocab_size), None)
        if bad is not None:
            raise invalid(
                f"token {bad} is not in the vocabulary of {info.vocab_size} tokens", param
            )
        return left

    def choose_max_tokens(self, asked: int | None, left: int, param: str) -> int:
        """The tokens of a reply: what was asked for, the server's default, or all that are left."""
        if asked is None:
            return left if self.config.max_tokens is None else min(self.config.max_tokens, left)
        if asked < 1:
            raise invalid(f"'{param}' must be 1 or more, not {asked}", param)
        return min(asked, left)

    async def check_params(
        self, params: SamplingParams, grammar_param: str = "response_format"
    ) -> None:
        """ApiError 400 for token ids outside the vocabulary, and for a grammar that can't be used.

        `grammar_param`: the field that the grammar comes from.
        """
        try:
            params.check_token_ids(self.require_info().vocab_size)
        except ArgumentError as error:
            text = error.one_line()
            raise invalid(text, find_param(text)) from None
        spec = params.grammar_spec
        if spec is None:
            return
        if self.grammars is None:
            raise invalid("structured output and bad_words need a tokenizer", grammar_param)
        try:
            await self.run_in_pool(self.grammars.check, spec)
        except ArgumentError as error:
            text = error.one_line()
            param = "bad_words" if text.startswith("bad_words") else grammar_param
            raise invalid(text, param, "invalid_grammar") from None

    def generate(self, request: GenerationRequest, ticket: Ticket) -> Generation:
        return Generation(self, request, ticket)

    async def audit(self) -> dict[str, dict[str, int]]:
        """Leaks by place and kind: of admission, and of each engine."""
        asked = [one for one in self.clients if one.is_ready and one.state != "stalled"]
        engines = {f"engine {one.index}": await one.audit() for one in asked}
        return {"server": self.admission.audit(), **engines}


def make_local_clients(
    config: ServerConfig, load: LoadModel, launched: Sequence[LaunchedEngine]
) -> list[EngineClient]:
    """Clients of engines on this machine, in processes or threads."""
    environments = [one.env for one in launched] or choose_environments(config)
    return [
        EngineClient(
            load,
            in_thread=config.engine_in == "thread",
            stall_seconds=config.stall_seconds,
            stall_timeout=config.stall_timeout,
            index=index,
            env=env,
            launched=launched[index] if launched else None,
        )
        for index, env in enumerate(environments)
    ]


def load_tokenizer(path: Path, config: ServerConfig) -> Tokenizer | None:
    """The model's tokenizer, with the chat template of the config if it has one."""
    tokenizer = find_tokenizer(path)
    if tokenizer is None or config.chat_template is None:
        return tokenizer
    try:
        template = Path(config.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"the chat template {config.chat_template} can't be read") from error
    return Tokenizer(
        tokenizer.backend,
        tokenizer.bos_id,
        tokenizer.stop_ids,
        template,
        tokenizer.special_tokens,
        tokenizer.adds_bos,
    )


def drop_unknown_tool_template(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer without a template for tools if its calls could not be parsed.

    Our own description of the tools asks for calls that can be.
    """
    template = tokenizer.tool_template
    if template is None or shows_known_calls(template):
        return tokenizer
    return replace(tokenizer, tool_template=None)


def new_id(prefix: str, given: str | None = None) -> str:
    """An id that the client gave, or a random one."""
    return prefix + (uuid.uuid4().hex if given is None else given)
