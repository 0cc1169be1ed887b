"""`fulgurite train` and `fulgurite verify`: command-line arguments in, a run and its summary out.

fulgurite train                                        a small mixture of experts on the demo text
fulgurite train run.toml --size small --steps 2000     a file, the dial, and any field
fulgurite train --model.init_from smollm2 --data.train notes/*.md    a field with several values
fulgurite train --resume runs/nano-001                 go on from the newest checkpoint
fulgurite train --ranks 4                              four processes, restarted if one dies
fulgurite train --print-config > run.toml              every option of a run as TOML
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from fulgurite.errors import ArgumentError, FulguriteError, RankError
from fulgurite.train.checkpoint import list_checkpoints
from fulgurite.train.checks import check_run
from fulgurite.train.config import TrainConfig
from fulgurite.train.config_file import (
    check_choices,
    is_boolean,
    is_list,
    load_config,
    override,
    read_config,
    to_toml,
)
from fulgurite.train.data.tokenizer import LOCK
from fulgurite.train.drill import run_drill
from fulgurite.train.finish import EXPORT, RESULT, TOKENIZER, RunResult, read_result, write_sample
from fulgurite.train.parallel import resolve_degrees
from fulgurite.train.report import write_report
from fulgurite.train.run_folder import CHECKPOINTS, CONFIG, has_begun, hold_run, remove_abandoned
from fulgurite.train.setup import resolve
from fulgurite.train.sizes import SIZES
from fulgurite.train.supervisor import supervise
from fulgurite.train.trainer import hash_data, replay, train
from fulgurite.train.verify import verify_run
from fulgurite.train.view import name_figure

RUNS = Path("runs")
CONFIG_SUFFIXES = (".toml", ".py")
DRILL_STEPS = 40
DRILL_RANKS = 2
# of a run that goes on: its folder and its tokenizer
FIXED_FIELDS = ("size", "output", "data.tokenizer", "data.vocab_size")
# options that are no fields of the config, and whether a value follows them
OPTIONS = {"size": True, "ranks": True, "resume": True, "drill": False, "print-config": False}


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """The options that are no fields of the config; `--section.field VALUE` is read apart."""
    parser.add_argument("config", nargs="?", help="a .toml or .py file (default: the defaults)")
    parser.add_argument("--size", help=f"the one dial: {', '.join(SIZES)} (default: nano)")
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes on this machine (default: 1)"
    )
    parser.add_argument("--resume", metavar="FOLDER", help="go on with the run of this folder")
    parser.add_argument(
        "--drill",
        action="store_true",
        help="run twice, once with random kill -9, and compare the final weights to the bit",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print every option as TOML, and end"
    )
    parser.epilog = (
        "Every field of the config is an option: --steps 500, --optimizer.learning_rate 3e-4, "
        "--data.train notes/, --model.architecture Qwen3ForCausalLM. --print-config lists them."
    )


def add_verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="the folder of a run")
    parser.add_argument("--steps", type=int, default=3, help="random steps to replay (default: 3)")
    parser.add_argument("--seed", type=int, default=None, help="of the choice of steps")


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """The words that argparse knows, and the fields of the config as pairs of name and text.

    `--a.b VALUE` and `--a.b=VALUE` set a field. A field that is true or false needs no value before
    another option or a config file. A list takes all words up to the next option (a shell expands
    `notes/*.md`) or a .toml file.
    """
    known: list[str] = []
    pairs: list[tuple[str, str]] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, has_value, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name in ("", "help", *OPTIONS):
            known.append(word)
            if OPTIONS.get(name) and not has_value and word.startswith("--"):
                known += words[:1]
                del words[:1]
            continue
        name = name.replace("-", "_")
        if not has_value:
            value = _take_value(name, words)
        pairs.append((name, value))
    return known, pairs


def _take_value(name: str, words: list[str]) -> str:
    """The value of a field from the words after its name."""
    is_value = bool(words) and not words[0].startswith("--")
    if is_boolean(name) and not (is_value and not words[0].endswith(CONFIG_SUFFIXES)):
        return "true"
    if not is_value:
        raise ArgumentError(f"--{name} has no value", next=f"write --{name} VALUE")
    if not is_list(name):
        return words.pop(0)
    taken = [words[0], *itertools.takewhile(_is_list_value, words[1:])]
    del words[: len(taken)]
    return json.dumps(taken) if len(taken) > 1 else taken[0]


def _is_list_value(word: str) -> bool:
    return not word.startswith("--") and not word.endswith(".toml")


def run_train(options: argparse.Namespace) -> None:
    """The command `train`; `options.overrides` are the fields of `split_arguments`."""
    config = read_options(options)
    if options.print_config:
        print(to_toml(resolve(config, None if is_rank() else options.ranks)), end="")
        return
    if options.drill:
        _run_drill(config, options.ranks)
        return
    is_numbered, is_new = config.output is None, options.resume is None and not is_rank()
    config = choose_output(config, options.resume)
    world = None if is_rank() else options.ranks
    check_run(resolve(config, world), world)  # raises before a folder is made
    with create_output(config, is_new, is_numbered) as config:
        assert config.output is not None, "choose_output has set it"
        folder = Path(config.output)
        if is_rank():  # torchrun started this process
            result = train(config)
            if is_first_rank():
                print_summary(resolve(config), result)
            return
        status = supervise(config, options.ranks, train) if options.ranks != 1 else _train(config)
        if not status or (folder / RESULT).is_file():  # else a signal came before the first step
            print_summary(resolve(config, options.ranks), read_result(folder))
    if status:
        raise SystemExit(status)


def _train(config: TrainConfig) -> int:
    """A run in this process; its exit status: 0, or 128 + the signal that ended it."""
    result = train(config)
    return 128 + result.stopped_by if result.stopped_by is not None else 0


def is_rank() -> bool:
    """Whether a launcher such as torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_first_rank() -> bool:
    """Whether this process is rank 0, or no rank of a launcher."""
    return not is_rank() or os.environ.get("RANK") == "0"


def read_options(options: argparse.Namespace) -> TrainConfig:
    """The config of a command line."""
    overrides = list(options.overrides)
    if options.size is not None:
        overrides.append(("size", options.size))
    if options.resume is None:
        config = load_config(options.config, overrides)
    else:
        if options.config is not None:
            raise ArgumentError(
                "--resume uses the config of its run", next=f"leave out {options.config}"
            )
        folder = Path(options.resume)
        if not (folder / CONFIG).is_file():
            raise ArgumentError(
                f"{folder} is no folder of a run: it has no {CONFIG}", next=_list_runs()
            )
        _check_resumed(overrides)
        config = replace(read_config(folder / CONFIG), output=str(folder))
        config = load_overrides(config, overrides)
        if "microbatch_size" not in dict(overrides):
            config = refit_microbatch(config, options.ranks)
    check_choices(config)
    return config


def _check_resumed(overrides: Sequence[tuple[str, str]]) -> None:
    """Raise for options that can't change a run that has begun."""
    for name, text in overrides:
        if name in FIXED_FIELDS:
            raise ArgumentError(
                f"--{name} {text} can't change a run that is resumed",
                next=f"leave it out, or start a new run without --resume: --{name} {text}",
            )


def refit_microbatch(config: TrainConfig, ranks: int) -> TrainConfig:
    """The config with a microbatch that divides the share of each of `ranks`.

    In deterministic mode it stays as it is: another one has other bits.
    """
    world = int(os.environ["WORLD_SIZE"]) if is_rank() else ranks
    if config.deterministic or config.batch_size is None or not config.microbatch_size:
        return config
    data_ranks = resolve_degrees(config.parallel, world).data
    is_fitting = config.batch_size % (config.microbatch_size * data_ranks) == 0
    return config if is_fitting else replace(config, microbatch_size=None)


def load_overrides(config: TrainConfig, overrides: Sequence[tuple[str, str]]) -> TrainConfig:
    for name, text in overrides:
        config = override(config, name, text)
    return config


def _list_runs() -> str:
    found = sorted(path.parent.name for path in RUNS.glob(f"*/{CONFIG}"))
    return f"runs here: {', '.join(str(RUNS / name) for name in found)}" if found else "start one"


def choose_output(config: TrainConfig, resume: str | None = None) -> TrainConfig:
    """The config with a folder: the given one if it is new, else the next number under runs/."""
    if resume is not None or is_rank():
        if config.output is None:
            raise ArgumentError("ranks of a launcher share no folder", next="set --output FOLDER")
        return config
    if config.output is None:
        return choose_number(config)
    if list_checkpoints(Path(config.output) / CHECKPOINTS):
        raise ArgumentError(
            f"{config.output} has a run already",
            next=f"--resume {config.output} goes on with it; or give another --output",
        )
    if (Path(config.output) / EXPORT).exists():  # the end of the run would replace it
        raise ArgumentError(
            f"{config.output} has a folder {EXPORT!r} already", next="give another --output"
        )
    return config


def choose_number(config: TrainConfig) -> TrainConfig:
    """The config with the next folder under runs/ that is not there, or was left before its run began."""
    for number in itertools.count(1):
        folder = RUNS / f"{config.size}-{number:03}"
        if not folder.exists() or remove_abandoned(folder):
            break
    return replace(config, output=str(folder))


@contextmanager
def create_output(
    config: TrainConfig, is_new: bool, is_numbered: bool = False
) -> Iterator[TrainConfig]:
    """Make the folder of a run and hold it. Yields the config, with the next number if another run took
    the one of `choose_output` in between.

    The folder is removed if the run ends before its first step: before it has a config in it, as with text
    that is too short, or by an error, of this process or of its ranks. A new run does not use the tokenizer
    of one that was killed at that point.
    """
    config, is_made = _make_folder(config, is_numbered)
    assert config.output is not None, "choose_output has set it"
    folder = Path(config.output)
    has_failed = False
    try:
        with hold_run(folder) if is_first_rank() else nullcontext():
            if is_new and (folder / LOCK).exists():  # else the tokenizer is not ours
                shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
            yield config
    except (ArgumentError, RankError):
        has_failed = True
        raise
    finally:
        has_ended_early = has_failed or not (folder / CONFIG).exists()
        if is_made and has_ended_early and not has_begun(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _make_folder(config: TrainConfig, is_numbered: bool) -> tuple[TrainConfig, bool]:
    """Make the folder of a run; whether it was not there."""
    assert config.output is not None, "choose_output has set it"
    folder = Path(config.output)
    is_made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=not is_numbered)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except FileExistsError as error:
        if is_numbered:
            return _make_folder(choose_number(config), is_numbered)
        raise _unwritable(folder, error) from error
    except OSError as error:
        raise _unwritable(folder, error) from error
    return config, is_made


def _unwritable(folder: Path, error: OSError) -> ArgumentError:
    return ArgumentError(
        f"the run can't be written to {folder}: {error.strerror}", next="give another --output"
    )


def print_summary(config: TrainConfig, result: RunResult) -> None:
    """Figures, a sample, and what to do next."""
    figures = []
    if result.loss is not None:
        figures.append(f"loss {result.loss:.3f}")
    if result.validation_loss is not None:
        figures.append(f"validation {result.validation_loss:.3f}")
    if result.bits_per_byte is not None:
        figures.append(f"{result.bits_per_byte:.3f} bits/byte")
    figures += [f"{name_figure(name)} {value:.3g}" for name, value in result.task.items()]
    if result.tokens_per_second is not None:
        figures.append(f"{result.tokens_per_second:,.0f} tokens/s")
    if result.skipped:
        figures.append(f"{result.skipped} steps skipped")
    print(f"\n{' · '.join(figures)}")
    if not result.is_finished:
        print(f"stopped after step {result.steps}; go on with")
        print(f"  fulgurite train --resume {result.output}")
        return
    sample = None
    if result.export is not None and config.evaluate.sample and config.evaluate.sample_tokens:
        with _go_on_without("sample"):
            sample = write_sample(Path(result.export), config)
            print(f"\n{sample}\n")
    if config.log.report:
        with _go_on_without("report"):
            print(f"  report: {write_report(Path(result.output), sample)}")
    for command in next_commands(config, result) if result.export is not None else ():
        print(f"  {command}")


@contextmanager
def _go_on_without(what: str) -> Iterator[None]:
    """Show an error of something beside the model: the run is done, and is no failure."""
    try:
        yield
    except FulguriteError as error:
        print(f"\nwarning: there is no {what}: {error.one_line()}\n", file=sys.stderr)


def next_commands(config: TrainConfig, result: RunResult) -> list[str]:
    """Commands that use the model: generate for one of plain text, chat for one of chats."""
    has_chats = config.tune.task in ("chat", "dpo", "grpo") or config.model.init_from is not None
    model = shlex.quote(str(result.export))
    if has_chats:
        return [f"fulgurite chat --model {model}"]
    return [
        f'fulgurite generate --raw --model {model} "{config.evaluate.sample or "The"}"',
        f"fulgurite chat --model {model}",
    ]


def _run_drill(config: TrainConfig, ranks: int) -> None:
    config = replace(config, deterministic=True)
    if config.steps is None:
        config = replace(config, steps=DRILL_STEPS)
    if config.output is None:
        config = choose_output(replace(config, size=config.size))
        config = replace(config, output=f"{config.output}-drill")
    ranks = ranks if ranks > 1 else DRILL_RANKS
    check_run(resolve(config, ranks), ranks)
    assert config.output is not None, "choose_output has set it"
    folder = Path(config.output)
    is_made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with hold_run(folder):
            report = run_drill(config, ranks, train, seed=config.seed)
    except (ArgumentError, RankError):
        if is_made and not any(has_begun(one) for one in folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)  # as with text that is too short
        raise
    print(report.describe())
    if not report.has_passed:
        raise SystemExit(1)


def run_verify(options: argparse.Namespace) -> None:
    """The command `verify`: replay random steps of a run and compare with its receipt."""
    report = verify_run(
        options.run, steps=options.steps, seed=options.seed, replay=replay, hash_data=hash_data
    )
    print(report.describe())
    if not report.has_passed:
        sys.exit(1)
