"""Prometheus metrics under vLLM's names, so that its dashboards work, and ours beside them.

Requests report when they end; engines report their counters with every flush.
"""

from __future__ import annotations

from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from fulgurite.serve.remote.client import EngineClient
from fulgurite.serve.remote.messages import Progress

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
LONG_SECONDS = (*SECONDS, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
SHORT_SECONDS = (0.0005, *SECONDS)
STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
MASK_SECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
CHOICES = (1, 2, 5, 10, 20)
RECENT_REQUESTS = 200  # whose first tokens the status line is about
STATES = {"idle": 0, "busy": 1, "stalled": 2, "starting": 3, "restarting": 4}


class Metrics:
    """All metrics of one server. `model_name` is a label of each; `engine` of those of a replica."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.model_name = model_name
        self.last: dict[int, Progress] = {}  # by replica: counters of its last report
        self.recent_first_tokens: deque[float] = deque(maxlen=RECENT_REQUESTS)  # seconds
        self._make_request_metrics()
        self._make_engine_metrics()

    # ---- definitions -------------------------------------------------------------------------------

    def _make_request_metrics(self) -> None:
        self.prompt_tokens = self.counter("vllm:prompt_tokens", "Prompt tokens processed")
        self.generation_tokens = self.counter("vllm:generation_tokens", "Generated tokens")
        self.success = self.counter(
            "vllm:request_success", "Finished requests", extra=("finished_reason",)
        )
        self.first_token = self.histogram(
            "vllm:time_to_first_token_seconds", "Time to the first token", LONG_SECONDS
        )
        self.inter_token = self.histogram(
            "vllm:inter_token_latency_seconds", "Time between tokens", SHORT_SECONDS
        )
        self.latency = self.histogram(
            "vllm:e2e_request_latency_seconds", "Time of whole requests", LONG_SECONDS
        )
        self.queue_time = self.histogram(
            "vllm:request_queue_time_seconds", "Time before the first step", LONG_SECONDS
        )
        self.prefill_time = self.histogram(
            "vllm:request_prefill_time_seconds", "Time of the prompt's steps", LONG_SECONDS
        )
        self.decode_time = self.histogram(
            "vllm:request_decode_time_seconds", "Time after the first token", LONG_SECONDS
        )
        self.inference_time = self.histogram(
            "vllm:request_inference_time_seconds", "Time of all steps", LONG_SECONDS
        )
        self.token_time = self.histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time of a token after the first",
            SHORT_SECONDS,
        )
        self.request_prompt_tokens = self.histogram(
            "vllm:request_prompt_tokens", "Tokens of a prompt", TOKENS
        )
        self.request_generation_tokens = self.histogram(
            "vllm:request_generation_tokens", "Tokens of a reply", TOKENS
        )
        self.max_generation_tokens = self.histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest reply", TOKENS
        )
        self.params_n = self.histogram("vllm:request_params_n", "n of a request", CHOICES)
        self.params_max_tokens = self.histogram(
            "vllm:request_params_max_tokens", "max_tokens of a request", TOKENS
        )
        self.rejected = self.counter(
            "fulgurite:requests_rejected", "Refused requests", extra=("reason",)
        )
        self.disconnects = self.counter("fulgurite:disconnects", "Clients that left early")
        self.deadline_exceeded = self.counter(
            "fulgurite:deadline_exceeded", "Requests that ended at their deadline"
        )

    def _make_engine_metrics(self) -> None:
        per_engine = ("engine",)
        self.running = self.gauge("vllm:num_requests_running", "Running requests", per_engine)
        self.waiting = self.gauge("vllm:num_requests_waiting", "Waiting requests", per_engine)
        self.cache_usage = self.gauge(
            "vllm:kv_cache_usage_perc", "Used part of the KV cache, 0 to 1", per_engine
        )
        self.prefix_queries = self.counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up", per_engine
        )
        self.prefix_hits = self.counter("vllm:prefix_cache_hits", "Prompt tokens found", per_engine)
        self.preemptions = self.counter("vllm:num_preemptions", "Preempted requests", per_engine)
        self.iteration_tokens = self.histogram(
            "vllm:iteration_tokens_total", "Tokens of a step", TOKENS, per_engine
        )
        self.steps = self.histogram(
            "fulgurite:step_seconds", "Time of a step", STEP_SECONDS, per_engine
        )
        self.masks = self.histogram(
            "fulgurite:mask_seconds",
            "Time that steps wait for grammar masks",
            MASK_SECONDS,
            per_engine,
        )
        self.forced_tokens = self.counter(
            "fulgurite:forced_tokens", "Tokens that grammars forced", per_engine
        )
        self.failed_steps = self.counter("fulgurite:failed_steps", "Steps that raised", per_engine)
        self.engine_state = self.gauge(
            "fulgurite:engine_state",
            "0 idle, 1 busy, 2 stalled, 3 starting, 4 restarting ranks",
            per_engine,
        )
        self.restarts = self.gauge(
            "fulgurite:engine_restarts_total", "Engine processes started again", per_engine
        )
        self.replica_running = self.gauge(
            "fulgurite:replica_requests_running", "Requests sent to a replica", per_engine
        )
        self.audit = self.gauge(
            "fulgurite:audit_leaks", "What is held without a request", ("where", "kind")
        )

    def counter(self, name: str, text: str, extra: tuple[str, ...] = ()) -> Counter:
        """With `extra` labels the caller picks a child; without, this is the one there is."""
        made = Counter(name, text, ("model_name", *extra), registry=self.registry)
        return made if extra else made.labels(self.model_name)

    def gauge(self, name: str, text: str, extra: tuple[str, ...] = ()) -> Gauge:
        return Gauge(name, text, ("model_name", *extra), registry=self.registry)

    def histogram(
        self, name: str, text: str, buckets: tuple[float, ...], extra: tuple[str, ...] = ()
    ) -> Histogram:
        labels = ("model_name", *extra)
        made = Histogram(name, text, labels, buckets=buckets, registry=self.registry)
        return made if extra else made.labels(self.model_name)

    # ---- observations ------------------------------------------------------------------------------

    def observe_first_token(self, seconds: float) -> None:
        self.first_token.observe(seconds)
        self.recent_first_tokens.append(seconds)

    def observe_rejection(self, reason: str) -> None:
        self.rejected.labels(self.model_name, reason).inc()

    def observe_progress(self, client: EngineClient, progress: Progress) -> None:
        """Counters of a replica; totals go back to 0 when it restarts."""
        index, name = str(client.index), self.model_name
        last = self.last.get(client.index, Progress())
        if progress.steps < last.steps:
            last = Progress()
        self.last[client.index] = progress
        for metric, now, before in (
            (self.prefix_queries, progress.prefix_queries, last.prefix_queries),
            (self.prefix_hits, progress.prefix_hits, last.prefix_hits),
            (self.preemptions, progress.preemptions, last.preemptions),
            (self.forced_tokens, progress.forced_tokens, last.forced_tokens),
            (self.failed_steps, progress.failed_steps, last.failed_steps),
        ):
            if now > before:
                metric.labels(name, index).inc(now - before)
        for seconds in progress.step_seconds:
            self.steps.labels(name, index).observe(seconds)
        for tokens in progress.step_tokens:
            self.iteration_tokens.labels(name, index).observe(tokens)
        for seconds in progress.mask_seconds:
            self.masks.labels(name, index).observe(seconds)

    def read_engine(self, client: EngineClient, waiting: int) -> None:
        """Bring the gauges of a replica up to date, before they are read."""
        index, name, progress = str(client.index), self.model_name, client.progress
        self.running.labels(name, index).set(progress.running)
        self.waiting.labels(name, index).set(progress.waiting + waiting)
        used = progress.used_blocks / progress.total_blocks if progress.total_blocks else 0.0
        self.cache_usage.labels(name, index).set(used)
        self.engine_state.labels(name, index).set(STATES[client.state])
        self.restarts.labels(name, index).set(client.restarts)
        self.replica_running.labels(name, index).set(client.num_requests)
        for kind, count in progress.audit.items():
            self.audit.labels(name, f"engine {index}", kind).set(count)

    def render(self) -> bytes:
        return generate_latest(self.registry)
