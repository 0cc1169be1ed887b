"""The engine's steps: waiting requests in, `Update`s of their tokens out.

    step():  schedule ─▶ launch ─▶ read ─▶ postprocess

One step computes a chunk of every scheduled request, and samples one token for each request whose
prompt is complete. With asynchronous scheduling the next step is scheduled and launched before the
tokens of this one are read:

    device     step n          │ step n + 1      │ step n + 2
    host       launch n + 1, read n, postprocess n, launch n + 2, ...

Tokens go from step to step on the device. A request that turns out to have ended in step n also ran in
step n + 1; that token is dropped. Over several ranks all of them do so in the same order
(coordinator.py).

If a step is interrupted, all requests stay as they were and run again. A listener that raises does
not affect the other listeners. A request whose grammar raises, whose logits are NaN, or for which every
token is banned, ends with an error; the others continue. A step that runs out of memory is tried again,
smaller (out_of_memory.py).

Requests with a grammar wait until it is compiled (grammar_queue.py). Tokens that it forces are appended
without a step (reply.py).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import NamedTuple

import torch
from torch.autograd import profiler

from fulgurite.device import is_out_of_memory
from fulgurite.errors import ArgumentError, RankError
from fulgurite.kernels.linear_attention.ops import CUT_ALIGNMENT
from fulgurite.kernels.sampling.table import NAN_LOGITS, NO_ALLOWED_TOKEN
from fulgurite.logs import LOG
from fulgurite.models.expert_load import ExpertLoadFile
from fulgurite.models.layers import CausalLM
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.plan.kv_cache import group_layers
from fulgurite.plan.memory import MemoryPlan
from fulgurite.serve.engine.agreement import agree_on_step, can_launch, propose_step
from fulgurite.serve.engine.block_manager import BlockManager, BlockPool
from fulgurite.serve.engine.communication import Communication
from fulgurite.serve.engine.context_kv_cache import build_kv_cache
from fulgurite.serve.engine.coordinator import Coordinator, StepProposal
from fulgurite.serve.engine.detokenizer import Detokenizer
from fulgurite.serve.engine.grammar import GrammarCompiler
from fulgurite.serve.engine.grammar_queue import GrammarQueue
from fulgurite.serve.engine.kv_cache import allocate_states
from fulgurite.serve.engine.logprobs import PendingPromptLogprobs
from fulgurite.serve.engine.out_of_memory import OutOfMemoryHandler, describe_failure
from fulgurite.serve.engine.rank_restart import RankRestarter, fail_all
from fulgurite.serve.engine.reply import advance_reply
from fulgurite.serve.engine.request import (
    Request,
    RequestState,
    TokenLogprob,
    Update,
)
from fulgurite.serve.engine.runner import CapturedShape, ModelRunner
from fulgurite.serve.engine.sampler import SampledTokens, Sampler
from fulgurite.serve.engine.scheduler import ScheduledChunk, Scheduler, sampled_requests
from fulgurite.serve.engine.stats import StepRecorder, describe_step
from fulgurite.serve.engine.token_broadcast import make_token_broadcast

Listener = Callable[[Update], None]
MAX_STEPS_IN_FLIGHT = 2  # with asynchronous scheduling: one runs while the other is read
SAMPLING_ERRORS = {  # by what the sampler returns instead of a token
    NAN_LOGITS: "the model's logits are NaN (check the weights; float16 may overflow: try bfloat16)",
    NO_ALLOWED_TOKEN: "every token is banned (by logit_bias, banned_token_ids, allowed_token_ids, "
    "min_tokens, bad_words or the grammar)",
}


class SampledToken(NamedTuple):
    """A token that was sampled for a request; negative: one of `SAMPLING_ERRORS`."""

    request: Request
    token: int


class StepTokens(NamedTuple):
    """What a step gives, once the device is done: tokens, and log-probabilities of prompts."""

    sampled: SampledTokens | None
    prompt_logprobs: Sequence[PendingPromptLogprobs] = ()

    def read(self) -> tuple[list[int], list[TokenLogprob | None]]:
        """Wait for the sampled tokens and their log-probabilities; requests get those of prompts."""
        for pending in self.prompt_logprobs:
            pending.store()
        return ([], []) if self.sampled is None else self.sampled.read()


class LaunchedStep(NamedTuple):
    """A step that was launched. `tokens` has those of `requests`, once the device is done.

    finished    on a GPU with several ranks: all of the step has run
    message     with several ranks: number of the message of rank 0 that began it
    """

    chunks: list[ScheduledChunk]
    requests: list[Request]
    tokens: StepTokens
    finished: torch.cuda.Event | None = None
    message: int = -1


class EngineCore:
    """A model with its KV cache and unfinished requests.

    Without a tokenizer prompts are token ids and results have no text. With a `coordinator` this
    engine drives the engines of other ranks. `async_scheduling`: launch a step before the one before is
    read; None: on a GPU, unless ranks communicate through the host. All ranks have the same setting.
    `grammar_compiler`: for structured output.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer | None,
        plan: MemoryPlan,
        *,
        prefix_caching: bool = True,
        coordinator: Coordinator | None = None,
        async_scheduling: bool | None = None,
        deterministic: bool | None = None,
        grammar_compiler: GrammarCompiler | None = None,
    ) -> None:
        if tokenizer is not None:
            tokenizer.check_vocab_size(model.config.vocab_size)
        self.model, self.tokenizer, self.plan = model, tokenizer, plan
        limits, specs = plan.limits, model.attention_specs
        groups = group_layers(specs)
        self.block_manager = BlockManager(
            groups,
            [BlockPool(count) for count in plan.group_blocks],
            limits,
            prefix_caching=prefix_caching and model.no_prefix_cache_reason is None,
        )
        self.kv_cache = build_kv_cache(
            model.context,
            specs,
            groups,
            plan.group_blocks,
            limits.block_size,
            limits.kv_dtype,
            plan.device,
            allocate_states(model.state_specs, limits.max_sequences, model.dtype, plan.device),
        )
        self.scheduler = Scheduler(
            self.block_manager,
            limits.max_sequences,
            limits.max_batched_tokens,
            model.recompute_after,
            has_states=bool(model.state_specs),
            prefill_alignment=CUT_ALIGNMENT[plan.device.type] if model.state_specs else 1,
            max_mixed_tokens=limits.max_mixed_tokens,
        )
        self.coordinator = coordinator
        if coordinator is not None and self.block_manager.prefix_caching:
            coordinator.use_prefix_caches(plan.cache_tokens, limits.max_sequences)
        self.communication = None if coordinator is None else Communication(model, coordinator.mesh)
        self.sampler = Sampler(limits.max_sequences, model.config.vocab_size, plan.device)
        self.runner = ModelRunner(
            model,
            self.kv_cache,
            self.block_manager,
            self.sampler,
            None if self.communication is None else self.communication.no_capture_reason,
            is_deterministic=plan.device.type == "cpu" if deterministic is None else deterministic,
            mesh=None if coordinator is None else coordinator.mesh,
        )
        if async_scheduling is None:
            async_scheduling = plan.device.type == "cuda" and (
                self.communication is None or self.communication.is_on_device
            )
        if async_scheduling and coordinator is not None:
            self.runner.token_broadcast = make_token_broadcast(
                coordinator.mesh, self.sampler.rows.last_tokens_W
            )
        self.memory = OutOfMemoryHandler(self.scheduler, self.runner, plan)
        self.recorder = StepRecorder()
        self.failed_updates: list[Update] = []  # of requests that ended before a step was launched
        self.max_in_flight = MAX_STEPS_IN_FLIGHT if async_scheduling else 1
        self.in_flight: deque[LaunchedStep] = deque()
        self.launching: Sequence[ScheduledChunk] = ()  # of the step that is being launched
        self.context = min(limits.context, self.block_manager.max_request_tokens())
        self.grammars = GrammarQueue(grammar_compiler)
        self.requests: dict[str, Request] = {}
        self.detokenizers: dict[str, Detokenizer] = {}
        self.listeners: dict[str, Listener] = {}
        self.request_counter = itertools.count()
        self.lock = threading.RLock()
        self.load_file: ExpertLoadFile | None = None  # these by `record_load`
        self.load_interval: float | None = None
        self.load_saved_at = 0.0
        self.restarter: RankRestarter | None = None  # set by whoever has started the ranks
        self.failure: RankError | None = None  # ranks were lost, and are not restarted
        self.eos_token_ids = frozenset(model.config.eos_token_ids)
        if tokenizer is not None:
            self.eos_token_ids |= frozenset(tokenizer.stop_ids)

    def unscheduled_requests(self) -> Collection[Request]:
        """Requests that the scheduler does not have yet: their grammars are being compiled."""
        return self.grammars.requests

    def _is_local(self, request: Request) -> bool:
        """Whether the request runs on this rank's replica."""
        if self.coordinator is None or request.id in self.grammars.pending:
            return True
        return self.coordinator.is_local(request)

    # ---- one step ----------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """Run one step of the model and return an update for every new token."""
        updates = self._step_or_recover()
        if not updates and len(self.grammars.pending) == len(self.requests) > 0:
            self.grammars.wait()  # without the lock: others may add and cancel requests
        return updates

    def _step_or_recover(self) -> list[Update]:
        """A step. If a rank is lost: its restart, or the end of all requests and the error."""
        with self.lock:
            try:
                self.check_ranks()
                with self._finish_together():
                    return self._step()
            except RankError as error:
                if self.failure is not None:
                    raise
                if self.restarter is None:
                    self.failure = error
                    fail_all(self, error)
                    raise
                lost = error
            # Not inside `except`: the error's traceback holds the tensors of the failed step.
            return self.restarter.recover(self, lost)

    def check_ranks(self) -> None:
        """RankError if ranks were lost for good, or a worker process of this one has ended."""
        if self.failure is not None:
            raise self.failure
        if self.restarter is not None:
            self.restarter.processes.check()
        if self.coordinator is not None:
            self.coordinator.check_in_step()

    def _finish_together(self) -> AbstractContextManager[None]:
        """Around what all ranks do together."""
        return nullcontext() if self.coordinator is None else self.coordinator.finish_together()

    def _step(self) -> list[Update]:
        with self.lock:
            start = time.perf_counter()
            self._start_compiled()
            while len(self.in_flight) < self.max_in_flight and self._launch():
                pass
            updates: list[Update] = []
            if self.in_flight:
                step, tokens, logprobs = self.read_step()
                self.recorder.record_step(step.chunks, len(tokens), time.perf_counter() - start)
                updates = self._postprocess(step, tokens, logprobs)
            self._save_load_if_due()
            failed, self.failed_updates = self.failed_updates, []
            return failed + updates

    def _launch(self) -> bool:
        """Schedule and launch the next step; False if there is none, or it must wait for tokens.

        Requests change only once it is launched, so that an interrupted step can rerun.
        """
        chunks = self.schedule()
        if not chunks and not self.in_flight and self._is_idle():
            return False
        proposal = None
        if self.coordinator is None:
            is_ready = can_launch(self, chunks, sampled_requests(chunks or ()))
        else:
            proposal = propose_step(self, chunks)
            self.coordinator.begin_step(proposal)
            is_ready = proposal.can_launch
        return chunks is not None and is_ready and self.launch_step(chunks, proposal)

    def schedule(self) -> list[ScheduledChunk] | None:
        """The chunks of the next step; None: it must wait for the tokens of one in flight."""
        return self.scheduler.schedule_ahead() if self.in_flight else self.scheduler.schedule()

    def launch_step(
        self, chunks: list[ScheduledChunk], proposal: StepProposal | None, samples: bool = True
    ) -> bool:
        """Launch a step that was scheduled, once all ranks agree; False if it was not launched, or only
        smaller ones can be. `proposal`: of this rank among several. `samples`: this rank samples the
        tokens of its replica."""
        shape = None
        if self.coordinator is not None and proposal is not None:
            agreed = agree_on_step(self, chunks, proposal, self.coordinator)
            if agreed is None:
                return False
            chunks, shape = agreed
        self.launching = chunks
        requests = sampled_requests(chunks) if samples else []
        try:
            tokens = self.execute(chunks, requests, shape)
        except (RuntimeError, MemoryError) as error:
            if self.coordinator is not None or not is_out_of_memory(error):
                raise
            failure = str(error) or type(error).__name__
        else:
            finished = None if self.communication is None else self.communication.mark_step()
            message = -1 if self.coordinator is None else self.coordinator.last_message
            self.scheduler.mark_computed(chunks)
            self.memory.record_success(chunks)
            self.in_flight.append(LaunchedStep(chunks, requests, tokens, finished, message))
            self.launching = ()
            return True
        # Not inside `except`: the error's traceback holds the tensors of the failed step.
        return self._shrink_step(chunks, failure)

    def read_step(self) -> tuple[LaunchedStep, list[int], list[TokenLogprob | None]]:
        """Wait for the oldest step in flight; it, its tokens and their log-probabilities."""
        step = self.in_flight[0]
        tokens, logprobs = step.tokens.read()
        if self.communication is not None:
            self.communication.check(step.finished)
        if self.coordinator is not None:
            self.coordinator.release_messages(step.message, has_tokens=bool(tokens))
        self.in_flight.popleft()
        self.scheduler.cache_blocks(step.chunks)
        return step, tokens, logprobs

    def _shrink_step(self, chunks: Sequence[ScheduledChunk], failure: str) -> bool:
        """Make the next step smaller after this one ran out of memory; whether to launch it now."""
        if self.in_flight:
            self.max_in_flight = 1  # two steps at once need more memory than one
            return False
        request = self.memory.shrink(chunks, failure)
        if request is not None:
            request.error = describe_failure(request, failure)
            request.finish("error")
            self.failed_updates.append(self._notify(self._end(request, ""), request))
        return bool(self.requests)

    def fail_step(self, reason: str) -> list[Update]:
        """End the requests of a step that raised, and of the steps in flight; the others continue.

        Only for one rank: after a failure, ranks are no longer in step with each other.
        """
        with self.lock:
            steps = [self.launching, *(step.chunks for step in self.in_flight)]
            failed = dict.fromkeys(chunk.request for chunks in steps for chunk in chunks)
            self.launching = ()
            self.in_flight.clear()
            updates = []
            for request in failed:
                if request.state is RequestState.RUNNING:
                    request.error = f"{request.id}, token {request.length}: {reason}"
                    request.finish("error")
                    updates.append(self._notify(self._end(request, ""), request))
            return updates

    def record_load(self, file: ExpertLoadFile, interval: float | None = None) -> None:
        """Count the tokens of experts from now on. On a CPU, recorded native calls would not.

        `interval`: seconds after which the next step saves the file; None: only `save_load` does.
        """
        self.runner.load_counter = file.counter
        self.load_file, self.load_interval = file, interval
        self.load_saved_at = time.monotonic()
        if self.plan.device.type == "cpu":
            self.runner.no_capture_reason = "the expert load is recorded"

    def save_load(self) -> None:
        """Save the expert load as it is now; rank 0 calls it, and all ranks take part."""
        with self.lock:
            file = self.require_load_file()
            self.check_ranks()
            self.load_saved_at = time.monotonic()
            with self._finish_together():
                if self.coordinator is not None:
                    self.coordinator.begin_saving_load()
                file.collect()
            file.write()

    def require_load_file(self) -> ExpertLoadFile:
        if self.load_file is None:
            raise ArgumentError(
                "the expert load is not recorded", next="LLM(..., record_load='load.json')"
            )
        return self.load_file

    def _save_load_if_due(self) -> None:
        if self.load_interval is None:
            return
        if time.monotonic() - self.load_saved_at < self.load_interval:
            return
        try:
            self.save_load()
        except ArgumentError as error:  # a full disk, for example: requests go on
            LOG.warning("the expert load was not saved: %s", error.one_line())

    def _is_idle(self) -> bool:
        """Whether no rank has anything to run; this one has not."""
        if not all(self._is_local(request) for request in self.requests.values()):
            return False
        assert len(self.requests) == len(self.grammars.pending), (
            "there are requests, but none can run"
        )
        return True

    # ---- grammars ----------------------------------------------------------------------------------

    def _start_compiled(self) -> None:
        """Start the requests whose grammars are compiled, with the tokens that begin every reply."""
        for request, future in self.grammars.take_compiled():
            error = future.exception()
            if error is None:
                request.set_constraint(future.result())
                self._start(request)
            else:
                request.error = f"{request.id}: {error}"
                request.finish("error")
                self._report_early(request, self._build_final_update(request, ""))
        for request in self.grammars.take_started():
            if request.state is RequestState.WAITING and not request.num_preemptions:
                update = self._advance(request, None)
                if update.token_ids or update.result is not None:
                    self._report_early(request, update)

    def _start(self, request: Request) -> None:
        """Give a request to the scheduler of its replica."""
        if self.coordinator is not None:
            prompt_ids = request.tokens[: request.prompt_length].tolist()
            self.coordinator.add_request(request, prompt_ids)
        if self._is_local(request):
            self.scheduler.add(request)
        if request.grammar is not None:
            self.grammars.started.append(request)

    def _report_early(self, request: Request, update: Update) -> None:
        """Notify of an update without a step; `step` returns it."""
        self.failed_updates.append(update)
        self._notify(update, request)

    def execute(
        self,
        chunks: Sequence[ScheduledChunk],
        requests: list[Request],
        shape: CapturedShape | None = None,
    ) -> StepTokens:
        """Run the model and sample for these requests, without waiting for the device.

        `shape`: of the captured step that all ranks replay.
        """
        if not profiler._is_profiler_enabled:
            return self._execute(chunks, requests, shape)
        number = self.recorder.steps + len(self.in_flight) + 1
        with profiler.record_function(describe_step(number, chunks)):
            return self._execute(chunks, requests, shape)

    def _execute(
        self,
        chunks: Sequence[ScheduledChunk],
        requests: list[Request],
        shape: CapturedShape | None,
    ) -> StepTokens:
        sampling = self.sampler.prepare(requests) if requests else None
        output = self.runner.execute(chunks, sampling, shape)
        if sampling is None or output.tokens_R is None:
            return StepTokens(None, output.prompt_logprobs)
        sampled = self.sampler.collect(output.logits_RO, output.tokens_R, requests)
        self.sampler.finish(sampling)
        return StepTokens(sampled, output.prompt_logprobs)

    def _postprocess(
        self, step: LaunchedStep, tokens: list[int], logprobs: list[TokenLogprob | None]
    ) -> list[Update]:
        """Append the tokens of all replicas, finish requests and notify listeners."""
        sampled = []
        for request, token, logprob in zip(step.requests, tokens, logprobs, strict=True):
            if request.state is RequestState.FINISHED:  # while this step ran: drop its token
                continue
            sampled.append(SampledToken(request, token))
            if token >= 0:
                request.append(token)
            if token >= 0 and logprob is not None:
                request.logprobs.append(logprob)
        if self.coordinator is not None:
            num_local = len(sampled)
            for remote in self.coordinator.gather_remote_tokens(self.plan.limits.max_sequences):
                request = self.requests[remote.id]
                if not request.num_sampled:
                    request.cached_tokens = remote.cached_tokens
                    request.first_step_time = time.perf_counter() - 1e-6 * remote.microseconds
                self.coordinator.take_prompt_logprobs(request)
                sampled.append(SampledToken(request, remote.token))
                if remote.token >= 0:
                    request.append(remote.token)
                    if request.params.logprobs is not None and remote.logprob is not None:
                        request.logprobs.append(remote.logprob)
            self.coordinator.finish_step()
            counts = self.coordinator.replica_counts.values()
            self.recorder.record_replicas(
                sum(one.prefill_tokens for one in counts),
                sum(one.decode_tokens for one in counts),
                len(sampled) - num_local,
            )
            for request, token in sampled:
                if token >= 0:
                    self.coordinator.record_token(request, token)
        updates: list[Update] = []
        remaining = iter(sampled)
        try:
            for request, token in remaining:
                self._process_token(request, token, updates)
        finally:  # if a listener raises, the other requests still get their tokens
            with ExitStack() as stack:
                for request, token in reversed(list(remaining)):
                    stack.callback(self._process_token, request, token, updates)
        return updates

    def _process_token(self, request: Request, token: int, updates: list[Update]) -> None:
        if request.state is RequestState.FINISHED:  # a listener has cancelled it in this step
            return
        update = self._advance(request, token) if token >= 0 else self._fail(request, token)
        updates.append(self._notify(update, request) if request.id in self.listeners else update)

    def _advance(self, request: Request, token: int | None) -> Update:
        """Process a sampled token and those that are forced after it; None: before the first one."""
        detokenizer = self.detokenizers.get(request.id)
        text, tokens, num_forced, end = advance_reply(request, detokenizer, token)
        self.recorder.forced_tokens += num_forced
        if self.coordinator is not None:
            for forced in tokens[len(tokens) - num_forced :]:
                self.coordinator.record_token(request, forced)
        if end is None:
            return Update(request.id, text, tokens)
        is_waiting = request.state is RequestState.WAITING
        if is_waiting and self._is_local(request):
            self.scheduler.cancel(request)
        request.error = end.error
        request.error_cause = "" if end.error is None else "request"  # its grammar has failed
        request.finish(end.reason, end.stopped_by)
        return self._end(request, text, tokens, is_waiting)

    def _fail(self, request: Request, error: int) -> Update:
        """End a request for which no token could be sampled."""
        grammar = request.grammar
        if error == NO_ALLOWED_TOKEN and request.constraint_error is not None:
            request.error = f"{request.id}, token {request.length}: {request.constraint_error}"
            request.error_cause = "request"
        elif error != NO_ALLOWED_TOKEN or grammar is None or not grammar.is_accepting:
            request.error = f"{request.id}, token {request.length}: {SAMPLING_ERRORS[error]}"
            request.error_cause = "request" if error == NO_ALLOWED_TOKEN else ""
        # A grammar that may end here, but whose end token is banned, ends.
        request.finish("stop" if request.error is None else "error")
        return self._end(request, "")

    def _end(
        self,
        request: Request,
        new_text: str,
        token_ids: tuple[int, ...] = (),
        was_waiting: bool = False,
    ) -> Update:
        """Free what a finished request holds. One that was waiting has left the queue already."""
        if self._is_local(request) and not was_waiting:
            self.scheduler.finish(request)
        if self.coordinator is not None:
            self.coordinator.record_end(request, cancelled=was_waiting)
        return self._build_final_update(request, new_text, token_ids)

    def _build_final_update(
        self, request: Request, new_text: str, token_ids: tuple[int, ...] = ()
    ) -> Update:
        """The last update of a finished request, which leaves the engine."""
        detokenizer = self.detokenizers.pop(request.id, None)
        if detokenizer is not None:
            new_text += detokenizer.finish()
            if detokenizer.stopped_by is not None and request.finish_reason == "length":
                request.finish("stop", detokenizer.stopped_by)
        del self.requests[request.id]
        if not self.requests and self.in_flight:
            self.in_flight.clear()  # nobody needs what these steps sample
            if self.coordinator is not None:
                self.coordinator.record_drop()
        result = request.build_result(detokenizer.text if detokenizer is not None else "")
        self.recorder.record_result(request, result)
        return Update(request.id, new_text, token_ids, result)

    def _notify(self, update: Update, request: Request) -> Update:
        listener = self.listeners.get(request.id)
        if listener is not None:
            if update.result is not None:
                del self.listeners[request.id]
            listener(update)
        return update
