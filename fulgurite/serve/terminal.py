"""`fulgurite generate` and `fulgurite chat`: words of the command line in, streamed text out.

The text goes to stdout and nothing else does, so it can be piped; bars while the model loads, and the
line of figures at the end, go to stderr.
"""

from __future__ import annotations

import argparse
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

from fulgurite.errors import ArgumentError
from fulgurite.models import hub
from fulgurite.models.tokenizer import Message
from fulgurite.serve.engine.kv_cache import DTYPES
from fulgurite.serve.engine.request import Result, SamplingParams, Update
from fulgurite.serve.llm import LLM

THREADS_A_CORE = 16  # no more are started: thousands crash OpenMP
COMPILING = "compiling kernels (cached next time)"
HELP = "/reset forgets the conversation · /exit or ctrl-D ends it · ctrl-C stops a reply"


def add_options(command: argparse.ArgumentParser, max_tokens: int) -> None:
    """The options of both commands."""
    model = command.add_argument_group("model")
    model.add_argument(
        "--model",
        default="smollm2",
        metavar="NAME",
        help="folder, .safetensors or .gguf file, smollm2 (default), or owner/model on the hub",
    )
    model.add_argument("--device", help="cpu or cuda (default: cuda where there is)")
    model.add_argument("--threads", type=int, metavar="N", help="of the CPU")
    model.add_argument("--context", type=int, metavar="N", help="most tokens of prompt and reply")
    model.add_argument(
        "--kv-dtype", default="auto", choices=["auto", *DTYPES], help="of cached keys and values"
    )
    model.add_argument("--dense", action="store_true", help="unpack packed weights: exact, slower")
    model.add_argument("--quantize", metavar="FORMAT", help="pack dense weights: fp8, q8_0, …")
    model.add_argument("--plan", action="store_true", help="print the plan of memory")
    ranks = command.add_argument_group(
        "ranks", "processes that share the work: started here, or by torchrun on many machines"
    )
    for name, text in (("tensor", "weights"), ("expert", "experts")):
        ranks.add_argument(
            f"--{name}", type=int, default=1, metavar="N", help=f"ranks that share the {text}"
        )
    reply = command.add_argument_group("reply")
    reply.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    reply.add_argument(
        "--max-tokens", type=int, default=max_tokens, metavar="N", help=f"default {max_tokens}"
    )
    reply.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends a reply; may be repeated"
    )
    _add_sampling(command.add_argument_group("sampling"))


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    for name, default, text in (
        ("temperature", 0.0, "0 (default) takes the likeliest token"),
        ("top-p", 1.0, "keep the likeliest that make up this share; 1 (default) keeps all"),
        ("min-p", 0.0, "keep what is at least this likely beside the likeliest; 0 (default): all"),
        ("repetition-penalty", 1.0, "above 1 makes tokens that came before less likely"),
    ):
        group.add_argument(f"--{name}", type=float, default=default, metavar="X", help=text)
    group.add_argument(
        "--top-k", type=int, default=0, metavar="N", help="keep the N likeliest; 0 (default): all"
    )
    group.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same reply")


def generate(options: argparse.Namespace) -> None:
    """Stream a reply to one prompt."""
    if follows(options):
        return
    prompt = options.prompt if options.prompt is not None else _read_prompt()
    if not prompt.strip():
        raise ArgumentError(
            "the prompt is empty",
            next='fulgurite generate "Why is the sky blue?", or text on stdin',
        )
    params = sampling_params(options)
    with open_model(options, max_sequences=1) as llm:
        asked = prompt if _plain(options, llm) else _conversation(options, [_user(prompt)])
        result = _say(llm, asked, params)
        print(f"\n{figures(result, llm.device)}", file=sys.stderr)
    if result.finish_reason == "cancelled":
        raise KeyboardInterrupt  # for the exit status


def chat(options: argparse.Namespace) -> None:
    """A conversation, by the model's own template."""
    if follows(options):
        return
    params = sampling_params(options)
    with open_model(options, max_sequences=1) as llm:
        if llm.tokenizer.chat_template is None:
            raise ArgumentError(
                "this model has no chat template",
                next="use fulgurite generate, or an instruct model",
            )
        print(HELP, file=sys.stderr)
        _converse(llm, options, params)


def _converse(llm: LLM, options: argparse.Namespace, params: SamplingParams) -> None:
    said: list[Message] = []
    while (line := _read_line()) is not None and line != "/exit":
        if line == "/reset":
            said = []
        elif line.startswith("/"):
            print(HELP, file=sys.stderr)
        elif line:
            said = _turn(llm, options, [*said, _user(line)], params)


def _turn(
    llm: LLM, options: argparse.Namespace, said: list[Message], params: SamplingParams
) -> list[Message]:
    """One reply; the conversation with it, or without the last question where it has no room."""
    try:
        result = _say(llm, _conversation(options, said), params)
    except ArgumentError as problem:
        print(f"{problem}\n/reset starts anew", file=sys.stderr)
        return said[:-1]
    if not result.token_ids:  # ctrl-C took the question back
        return said[:-1]
    return [*said, {"role": "assistant", "content": result.text}]


def _say(llm: LLM, prompt: str | Sequence[Message], params: SamplingParams) -> Result:
    """Print a reply as it comes; ctrl-C ends it where it is, between two steps."""
    result, heard = None, deque[Update]()
    with interruptible() as interrupted:
        request = llm.engine.add(llm.as_prompt(prompt), params, listener=heard.append)
        while result is None:
            if interrupted():
                llm.engine.cancel(request.id)
            else:
                llm.engine.step()
            while heard:
                text, result = heard[0].text, heard.popleft().result
                sys.stdout.write(text)
                sys.stdout.flush()
    print(flush=True)
    return result


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Between steps, not inside one, is asked whether ctrl-C was pressed."""
    pressed = []

    def press(number: int, frame: FrameType | None) -> None:
        pressed.append(number)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _read_prompt() -> str:
    if sys.stdin is None:  # closed: `<&-`
        return ""
    if sys.stdin.isatty():
        print("write the prompt; ctrl-D on a line of its own ends it", file=sys.stderr)
    return sys.stdin.read()


def _read_line() -> str | None:
    """The next line that was typed: None at the end, nothing where ctrl-C took it back."""
    try:
        return input("› " if sys.stdin.isatty() else "").strip()
    except EOFError:
        print(file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print(f"\n{HELP}", file=sys.stderr)
        return ""


def follows(options: argparse.Namespace) -> bool:
    """True once all is done, on ranks that only help the first; False where there is a reply to write."""
    if options.tensor == options.expert == 1 or int(os.environ.get("RANK", 0)) == 0:
        return False
    with interruptible():  # ctrl-C is for rank 0 to see
        load(options, max_sequences=1).close()
    return True


def load(options: argparse.Namespace, max_sequences: int) -> LLM:
    """The model as the options want it."""
    if options.threads is not None:
        most = THREADS_A_CORE * (os.cpu_count() or 1)
        if not 1 <= options.threads <= most:
            raise ArgumentError(f"--threads {options.threads} must be 1 to {most}")
        torch.set_num_threads(options.threads)
    return LLM(
        hub.resolve(options.model),
        device=options.device,
        kv_dtype=options.kv_dtype,
        context=options.context,
        max_sequences=max_sequences,
        packed=False if options.dense else None,
        quantize=options.quantize,
        tensor=options.tensor,
        expert=options.expert,
    )


def open_model(options: argparse.Namespace, max_sequences: int) -> LLM:
    """Load and warm up, with a bar for each."""
    path = hub.resolve(options.model)
    name = f"loading   {Path(options.model).name} · {_megabytes(path)}"
    console = Console(stderr=True)
    with Progress(
        *_columns(console.width, max(len(name), len(COMPILING))), console=console
    ) as bars:
        with bar(bars, name):
            llm = load(options, max_sequences)
        with bar(bars, COMPILING):
            llm.engine.warm_up()
    if options.plan:
        print(llm.plan.table(), file=sys.stderr)
        print(f"decode steps  {llm.engine.runner.unfixed or 'prepared'}", file=sys.stderr)
        if llm.shares is not None:
            print(f"\n{llm.shares}", file=sys.stderr)
    print(file=sys.stderr)
    return llm


def _columns(width: int, text: int) -> list[ProgressColumn]:
    """Text, bar and time; a narrow terminal takes from the bar, and then from the text."""
    rest = width - len(" 1000.0 s")
    bar_width = min(20, rest - text - 1)
    clipped = Column(no_wrap=True, max_width=rest)
    bars = [BarColumn(bar_width=bar_width)] if bar_width > 2 else []
    return [TextColumn("{task.description}", table_column=clipped), *bars, Seconds()]


class Seconds(ProgressColumn):
    """How long a task took so far."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_time or task.elapsed or 0:.1f} s")


@contextmanager
def bar(bars: Progress, text: str) -> Iterator[None]:
    """A bar that moves while something is under way and is full once it is done."""
    task = bars.add_task(text, total=None)
    yield
    bars.update(task, total=1, completed=1)


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        max_tokens=options.max_tokens,
        stop=options.stop,
        seed=options.seed,
        repetition_penalty=options.repetition_penalty,
    )


def figures(result: Result, device: torch.device) -> str:
    """The last line: speed of prompt and reply, time to the first token, peak memory."""
    first = result.first_token_seconds
    if not result.token_ids:
        return f"no token yet · {peak_bytes(device) / 1e6:.0f} MB"
    prompt = len(result.prompt_ids) - result.cached_tokens
    return (
        f"prompt {prompt} tokens at {prompt / first:.0f} tokens/s, first token {first * 1e3:.0f} ms"
        f" · {len(result.token_ids)} tokens at {result.tokens_per_second:.0f} tokens/s"
        f" · {peak_bytes(device) / 1e6:.0f} MB"
    )


def peak_bytes(device: torch.device) -> int:
    """The most memory the process (on a GPU: its tensors) ever had."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _plain(options: argparse.Namespace, llm: LLM) -> bool:
    return options.raw or llm.tokenizer.chat_template is None


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _conversation(options: argparse.Namespace, said: Sequence[Message]) -> Sequence[Message]:
    system = [] if options.system is None else [{"role": "system", "content": options.system}]
    return [*system, *said]


def _megabytes(path: Path) -> str:
    files = [path] if path.is_file() else [*path.glob("*.safetensors")]
    return f"{sum(file.stat().st_size for file in files) / 1e6:.0f} MB"
