"""`fulgurite generate` and `fulgurite chat`: command-line options in, streamed text out.

Only the reply goes to stdout, so it can be piped. Progress bars and statistics go to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from fulgurite.errors import ArgumentError, FulguriteError
from fulgurite.models.loading import hub
from fulgurite.models.loading.checkpoint import IMPLEMENTATIONS
from fulgurite.models.tokenizer import Message
from fulgurite.plan.kv_cache import KV_CACHE_DTYPES
from fulgurite.serve.engine.request import Result, SamplingParams, Update
from fulgurite.serve.expert_options import add_expert_arguments, given_expert_options
from fulgurite.serve.llm import LLM
from fulgurite.serve.profile import check_profile_path, write_profile

MAX_THREADS_PER_CORE = 16  # thousands of threads crash OpenMP
COMPILING_LABEL = "compiling kernels (cached next time)"
CHAT_HELP = "/reset starts a new conversation · /exit or ctrl-D quits · ctrl-C stops a reply"


def add_generate_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("prompt", nargs="?", help="the prompt (default: read from stdin)")
    command.add_argument(
        "--raw", action="store_true", help="use the prompt as it is, without the chat template"
    )
    add_options(command, max_tokens=256)


def add_chat_options(command: argparse.ArgumentParser) -> None:
    add_options(command, max_tokens=1024)


def add_options(command: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the options that both commands share."""
    model = command.add_argument_group("model")
    model.add_argument(
        "--model",
        default="smollm2",
        metavar="NAME",
        help="folder, .safetensors or .gguf file, smollm2 (default), or owner/model on the hub",
    )
    model.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    model.add_argument("--threads", type=int, metavar="N", help="number of CPU threads")
    model.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="maximum number of tokens of prompt and reply together",
    )
    model.add_argument(
        "--kv-dtype",
        default="auto",
        choices=["auto", *KV_CACHE_DTYPES],
        help="dtype of the KV cache",
    )
    model.add_argument(
        "--dequantize",
        action="store_true",
        help="dequantize the weights of a quantized file while loading: exact, slower",
    )
    model.add_argument(
        "--quantize", metavar="FORMAT", help="quantize the linears of a dense model: fp8, q8_0, …"
    )
    model.add_argument(
        "--implementation",
        default="auto",
        choices=IMPLEMENTATIONS,
        help="whose modules run (default auto: fulgurite's if it has the architecture)",
    )
    model.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="the same bits for a request whatever else runs (default: on a CPU)",
    )
    model.add_argument("--plan", action="store_true", help="print the memory plan")
    model.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="write a Chrome trace of all steps (torch.profiler): open it in ui.perfetto.dev",
    )
    ranks = command.add_argument_group(
        "ranks", "processes that run one model: started here, or by torchrun on several machines"
    )
    for name, text in (
        ("tensor", "weights are sharded"),
        ("expert", "experts are distributed"),
        ("pipeline", "layers are distributed: pipeline stages"),
        ("context-parallel", "the tokens and the KV cache of a prompt are distributed"),
    ):
        ranks.add_argument(
            f"--{name}", type=int, default=1, metavar="N", help=f"ranks over which {text}"
        )
    add_expert_arguments(ranks)
    reply = command.add_argument_group("reply")
    reply.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    reply.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help=f"maximum number of tokens of a reply (default {max_tokens})",
    )
    reply.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="string that ends a reply; may be repeated",
    )
    _add_sampling_options(command.add_argument_group("sampling"))
    _add_grammar_options(
        command.add_argument_group(
            "structured output", "replies that follow a grammar: one of these"
        )
    )


def _add_sampling_options(group: argparse._ArgumentGroup) -> None:
    for name, default, text in (
        ("temperature", 0.0, "0 (default): greedy decoding"),
        ("top-p", 1.0, "sample from the most likely tokens of this total probability; 1: all"),
        ("min-p", 0.0, "minimum probability relative to the most likely token; 0: no limit"),
        ("repetition-penalty", 1.0, "above 1: tokens of prompt and reply become less likely"),
    ):
        group.add_argument(f"--{name}", type=float, default=default, metavar="X", help=text)
    group.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="N",
        help="sample from the N most likely tokens; 0: all",
    )
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same reply")


def _add_grammar_options(group: argparse._ArgumentGroup) -> None:
    only = group.add_mutually_exclusive_group()
    only.add_argument(
        "--json-schema", metavar="FILE", help="JSON of this schema: a file, or the schema itself"
    )
    only.add_argument("--json-object", action="store_true", help="a JSON object")
    only.add_argument("--regex", metavar="REGEX", help="text that matches this regex")
    only.add_argument("--choices", metavar="A,B", help="one of these texts; or a JSON list of them")
    only.add_argument("--grammar", metavar="FILE", help="text of this Lark grammar")


def generate(options: argparse.Namespace) -> None:
    """Stream a reply to one prompt."""
    if run_as_worker(options):
        return
    prompt = options.prompt if options.prompt is not None else _read_prompt()
    if not prompt.strip():
        raise ArgumentError(
            "the prompt is empty",
            next='run fulgurite generate "Why is the sky blue?", or pass text on stdin',
        )
    params = read_sampling_params(options)
    if options.profile is not None:
        check_profile_path(options.profile)
    with load_and_warm_up(options, max_sequences=1) as llm:
        llm.engine.check_grammar(params)
        request: str | Sequence[Message] = prompt
        if not _uses_raw_prompt(options, llm):
            request = _with_system_message(options, [_user_message(prompt)])
        with profile_steps(options, llm):
            result = _stream_reply(llm, request, params)
        print(f"\n{format_stats(result, llm.device)}", file=sys.stderr)
    if result.finish_reason == "error":
        raise FulguriteError(result.error or "the request failed")
    if result.finish_reason == "cancelled":
        raise KeyboardInterrupt  # sets the exit status


def chat(options: argparse.Namespace) -> None:
    """Chat with a model, using its chat template."""
    if run_as_worker(options):
        return
    if options.profile is not None:
        check_profile_path(options.profile)
    params = read_sampling_params(options)
    with load_and_warm_up(options, max_sequences=1) as llm:
        if llm.require_tokenizer().chat_template is None:
            raise ArgumentError(
                "this model has no chat template",
                next="use fulgurite generate, or an instruction-tuned model",
            )
        llm.engine.check_grammar(params)
        print(CHAT_HELP, file=sys.stderr)
        with profile_steps(options, llm):
            _run_chat(llm, options, params)


@contextmanager
def profile_steps(options: argparse.Namespace, llm: LLM) -> Iterator[None]:
    """Write the trace of `--profile`, if it was given."""
    if options.profile is None:
        yield
        return
    with write_profile(options.profile, llm.device):
        yield
    print(f"profile written to {options.profile}", file=sys.stderr)


def _run_chat(llm: LLM, options: argparse.Namespace, params: SamplingParams) -> None:
    messages: list[Message] = []
    while (line := _read_line()) is not None and line != "/exit":
        if line == "/reset":
            messages = []
        elif line.startswith("/"):
            print(CHAT_HELP, file=sys.stderr)
        elif line:
            messages = _reply_to(llm, options, [*messages, _user_message(line)], params)


def _reply_to(
    llm: LLM, options: argparse.Namespace, messages: list[Message], params: SamplingParams
) -> list[Message]:
    """Print one reply and return the conversation with it.

    If the conversation is too long, or ctrl-C came before the first token, the last message is
    dropped.
    """
    try:
        result = _stream_reply(llm, _with_system_message(options, messages), params)
    except ArgumentError as error:
        print(f"{error}\n/reset starts a new conversation", file=sys.stderr)
        return messages[:-1]
    if not result.token_ids:
        return messages[:-1]
    return [*messages, {"role": "assistant", "content": result.text}]


def _stream_reply(llm: LLM, prompt: str | Sequence[Message], params: SamplingParams) -> Result:
    """Print a reply as it is generated. Ctrl-C ends it between two steps."""
    result, updates = None, deque[Update]()
    with defer_interrupts() as is_interrupted:
        request = llm.engine.add_request(llm.to_prompt(prompt), params, listener=updates.append)
        while result is None:
            if is_interrupted():
                llm.engine.cancel(request.id)
            else:
                llm.engine.step()
            while updates:
                text, result = updates[0].text, updates.popleft().result
                sys.stdout.write(text)
                sys.stdout.flush()
    print(flush=True)
    return result


@contextmanager
def defer_interrupts() -> Iterator[Callable[[], bool]]:
    """Record ctrl-C instead of raising; yields a function that says whether it was pressed."""
    interrupts = []

    def record(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)

    previous = signal.signal(signal.SIGINT, record)
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, previous)


def _read_prompt() -> str:
    if sys.stdin is None:  # closed: `<&-`
        return ""
    if sys.stdin.isatty():
        print("enter the prompt; end it with ctrl-D on a new line", file=sys.stderr)
    return sys.stdin.read()


def _read_line() -> str | None:
    """The next input line: None at the end of input, an empty line after ctrl-C."""
    try:
        return input("› " if sys.stdin.isatty() else "").strip()
    except EOFError:
        print(file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print(f"\n{CHAT_HELP}", file=sys.stderr)
        return ""


def run_as_worker(options: argparse.Namespace) -> bool:
    """On a worker rank: work until rank 0 is done, then return True. On rank 0: False."""
    sizes = (options.tensor, options.expert, options.pipeline, options.context_parallel)
    if max(sizes) == 1 or int(os.environ.get("RANK", 0)) == 0:
        return False
    with defer_interrupts():  # rank 0 handles ctrl-C
        load_llm(options, max_sequences=1).close()
    return True


def load_llm(options: argparse.Namespace, max_sequences: int) -> LLM:
    """The LLM of these options."""
    if options.threads is not None:
        maximum = MAX_THREADS_PER_CORE * (os.cpu_count() or 1)
        if not 1 <= options.threads <= maximum:
            raise ArgumentError(f"--threads {options.threads} must be 1 to {maximum}")
        torch.set_num_threads(options.threads)
    return LLM(
        hub.resolve_model_path(options.model),
        device=options.device,
        kv_dtype=options.kv_dtype,
        context=options.context,
        max_sequences=max_sequences,
        keep_quantized=False if options.dequantize else None,
        quantize=options.quantize,
        implementation=options.implementation,
        deterministic=options.deterministic,
        tensor=options.tensor,
        expert=options.expert,
        pipeline=options.pipeline,
        context_parallel=options.context_parallel,
        **given_expert_options(options),
    )


def load_and_warm_up(options: argparse.Namespace, max_sequences: int) -> LLM:
    """Load the model and warm it up, with a progress bar for each."""
    path = hub.resolve_model_path(options.model)
    label = f"loading   {Path(options.model).name} · {_format_weights_size(path)}"
    console = Console(stderr=True)
    label_width = max(len(label), len(COMPILING_LABEL))
    with Progress(*_progress_columns(console.width, label_width), console=console) as bars:
        with progress_bar(bars, label):
            llm = load_llm(options, max_sequences)
        with progress_bar(bars, COMPILING_LABEL):
            llm.engine.warm_up()
    if options.plan:
        print(llm.plan.format_table(), file=sys.stderr)
        reason = llm.model.no_prefix_cache_reason
        if reason is not None:
            print(f"no prefix cache: {reason}", file=sys.stderr)
        reason = llm.engine.runner.no_capture_reason
        decode_steps = "captured" if reason is None else f"not captured: {reason}"
        print(f"decode steps  {decode_steps}", file=sys.stderr)
        if llm.sharding is not None:
            print(f"\n{llm.sharding}", file=sys.stderr)
    print(file=sys.stderr)
    return llm


def _progress_columns(width: int, label_width: int) -> list[ProgressColumn]:
    """Label, bar and time. On a narrow terminal first the bar shrinks, then the label."""
    rest = width - len(" 1000.0 s")
    bar_width = min(20, rest - label_width - 1)
    clipped = Column(no_wrap=True, max_width=rest)
    bars = [BarColumn(bar_width=bar_width)] if bar_width > 2 else []
    return [TextColumn("{task.description}", table_column=clipped), *bars, ElapsedColumn()]


class ElapsedColumn(ProgressColumn):
    """Seconds that a task has taken so far."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_time or task.elapsed or 0:.1f} s")


@contextmanager
def progress_bar(bars: Progress, label: str) -> Iterator[None]:
    """An indeterminate progress bar that is full at the end of the block."""
    task = bars.add_task(label, total=None)
    yield
    bars.update(task, total=1, completed=1)


def read_sampling_params(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        max_tokens=options.max_tokens,
        stop=options.stop,
        seed=options.seed,
        repetition_penalty=options.repetition_penalty,
        json_schema=_read_json_schema(options.json_schema),
        json_object=options.json_object,
        regex=options.regex,
        grammar=None if options.grammar is None else _read_text(options.grammar, "--grammar"),
        choices=None if options.choices is None else _read_choices(options.choices),
    )


def _read_json_schema(value: str | None) -> str | None:
    """The text of a schema: the value itself if it is JSON, or the content of the file."""
    if value is None or value.lstrip().startswith("{") or value.strip() in ("true", "false"):
        return value
    return _read_text(value, "--json-schema")


def _read_choices(value: str) -> list[str]:
    """Choices between commas, or a JSON list, whose texts may have commas."""
    if not value.lstrip().startswith("["):
        return value.split(",")
    try:
        choices: list[str] = json.loads(value)
    except ValueError as error:
        raise ArgumentError(f"--choices is not a JSON list: {error}") from error
    return choices


def _read_text(name: str, option: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: bytes that are not UTF-8
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ArgumentError(f"{option}: can't read {name}: {reason}") from error


def format_stats(result: Result, device: torch.device) -> str:
    """The last line: prefill and decode speed, time to the first token, peak memory."""
    ttft = result.first_token_seconds
    if not result.token_ids:
        return f"no tokens · {peak_bytes(device) / 1e6:.0f} MB"
    prefilled = len(result.prompt_ids) - result.cached_tokens
    return (
        f"prompt {prefilled} tokens at {prefilled / ttft:.0f} tokens/s, "
        f"first token {ttft * 1e3:.0f} ms"
        f" · {len(result.token_ids)} tokens at {result.tokens_per_second:.0f} tokens/s"
        f" · {peak_bytes(device) / 1e6:.0f} MB"
    )


def peak_bytes(device: torch.device) -> int:
    """Peak memory of the process; on a GPU of its tensors."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _uses_raw_prompt(options: argparse.Namespace, llm: LLM) -> bool:
    return options.raw or llm.require_tokenizer().chat_template is None


def _user_message(text: str) -> Message:
    return {"role": "user", "content": text}


def _with_system_message(
    options: argparse.Namespace, messages: Sequence[Message]
) -> Sequence[Message]:
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*system, *messages]


def _format_weights_size(path: Path) -> str:
    files = [path] if path.is_file() else [*path.glob("*.safetensors")]
    return f"{sum(file.stat().st_size for file in files) / 1e6:.0f} MB"
