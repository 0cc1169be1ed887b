"""`Trainer`: the loop of a run; a config in, checkpoints, metrics and a `RunResult` out.

    load the newest checkpoint ─▶ for each step: batches ─ TrainStep ─▶ metrics, receipt, heartbeat
                                        │ every so many steps: evaluate, save
                                        └ SIGINT, SIGTERM: save and end

`train(config)` is a whole run on this rank, from its folder's newest checkpoint on. The state of a run is
weights, optimizer, step and the number of skipped steps; the loader needs the step only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fulgurite.errors import ArgumentError, NonFiniteError
from fulgurite.files import write_atomically
from fulgurite.logs import LOG
from fulgurite.train.batch import Batch
from fulgurite.train.checkpoint import CheckpointManager, list_checkpoints, training_state
from fulgurite.train.checks import check_run
from fulgurite.train.config import TrainConfig
from fulgurite.train.config_file import to_toml
from fulgurite.train.data import Loader, prepare_tokenizer
from fulgurite.train.evaluate import Evaluation, evaluate
from fulgurite.train.finish import RunResult, export_run, keep_figures, write_result
from fulgurite.train.flops import find_peak
from fulgurite.train.heartbeat import Heartbeat
from fulgurite.train.layout import ModelParallelLayout
from fulgurite.train.metrics import MetricsWriter, StepMeter, StepRecord
from fulgurite.train.nonfinite import name_nonfinite
from fulgurite.train.profile import StepProfiler
from fulgurite.train.receipt import Receipt
from fulgurite.train.report import EXPLANATION_FILE
from fulgurite.train.run_folder import CHECKPOINTS, CONFIG
from fulgurite.train.run_log import LOG_FILE, RunLog
from fulgurite.train.setup import Parts, build_parts, resolve
from fulgurite.train.step import StepResult, TrainStep
from fulgurite.train.stop import StopRequest
from fulgurite.train.tune.rollouts import RolloutLoader
from fulgurite.train.tune.task import open_data
from fulgurite.train.view import View, make_view

MAX_REPEATS = 40  # of a text; later epochs are worth nothing (Muennighoff et al. 2023, figure 5)


class Trainer:
    """Runs the steps of one rank. `step` steps are done.

    Args:
        parts: of the run.
        view: what a terminal shows; None: nothing.
    """

    def __init__(self, parts: Parts, view: View | None = None) -> None:
        config = parts.config
        assert config.steps is not None, "the config is resolved"
        self.parts, self.config, self.layout, self.view = parts, config, parts.layout, view
        self.steps = config.steps
        self.step = 0
        self.skipped = 0
        self.skip_cause: str | None = None  # of the last steps, if they were not finite
        self.record: StepRecord | None = None
        self.evaluation: Evaluation | None = None
        self.stopped_by: signal.Signals | None = None
        self.run_step = TrainStep(
            parts.loss_module, parts.model, parts.optimizer, parts.layout, config
        )

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """The state of the run: live tensors, which a load overwrites, and numbers."""
        state = training_state(self.parts.model, self.parts.optimizer)
        if self.parts.task is not None:
            state["model"] = self.parts.task.select_state(state["model"])
        return {**state, "step": self.step, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the numbers of a state whose tensors were loaded in place."""
        self.step, self.skipped = int(state["step"]), int(state["skipped"])

    def load(self, manager: CheckpointManager, path: Path) -> None:
        """Go on from a checkpoint."""
        state = self.state_dict()
        manager.load(path, state)
        self.load_state_dict(state)

    def _check_steps(self) -> None:
        if self.step > self.steps:
            raise ArgumentError(
                f"steps={self.steps}, but the run has done {self.step}",
                next=f"--steps {self.step} or more",
            )

    # ---- the loop

    def run(self, folder: Path) -> bool:
        """Run the steps that are left; False if a signal ended the run before its last step."""
        parts, section = self.parts, self.config.checkpoint
        with ExitStack() as stack:
            manager = stack.enter_context(
                CheckpointManager(folder / CHECKPOINTS, section, self.layout)
            )
            path = manager.latest()
            if path is not None:
                self.load(manager, path)
                self.tell("resume", f"after step {self.step}, from {path}")
                self._check_steps()
            if self.layout.rank == 0:  # not before: a checkpoint of another config is an error
                write_atomically(folder / CONFIG, to_toml(self.config))
            manager.overlap_copies(parts.optimizer)
            if section.is_async:
                manager.prepare(self.state_dict())
            receipt = self._open_receipt(folder, path)
            if receipt is not None:
                manager.on_saved = receipt.record_checkpoint
                stack.callback(receipt.close)
            loader = stack.enter_context(_closing(make_loader(parts, self.step)))
            heartbeat = stack.enter_context(_closing(Heartbeat(folder, self.layout.rank)))
            writer = self._open_metrics(folder)
            if writer is not None:
                stack.enter_context(_closing(writer))
            profiler = stack.enter_context(_closing(StepProfiler(self.config.log.profile, folder)))
            stop = stack.enter_context(StopRequest(self.layout.rank, self.layout.world_size))
            meter, saved, is_due = self._make_meter(), self.step, False
            is_explained = should_stop = False
            while self.step < self.steps:
                profiler.before(self.step)
                self._run_one(loader, meter, writer, receipt)
                if self.config.log.explain and not is_explained:
                    is_explained = True
                    self._explain(folder)
                    meter.skip_time()
                heartbeat.beat(self.step)
                manager.check()
                should_stop = should_stop or stop.poll()
                is_due = is_due or _is_due(section.every, self.step)
                if not loader.can_resume(self.step) and self.step < self.steps:
                    continue
                # weights that give no finite loss would replace the checkpoint to go back to
                can_wait = self.skip_cause is not None
                if (is_due and not can_wait) or should_stop or self.step == self.steps:
                    is_due = False
                    manager.save(self.step, self.state_dict())
                    meter.skip_time()
                    saved = self.step
                if should_stop:
                    self.stopped_by = stop.received or signal.SIGTERM  # or another rank got it
                    break
            if saved == self.step:
                manager.wait()
                self.tell("saved", str(folder / CHECKPOINTS))
        return self.step >= self.steps

    def _run_one(
        self,
        loader: Loader | RolloutLoader,
        meter: StepMeter,
        writer: MetricsWriter | None,
        receipt: Receipt | None,
    ) -> None:
        """One step and what is recorded of it."""
        batches = [batch.to(self.parts.device) for batch in loader.step(self.step)]
        result = self.run_step(self.step, batches)
        if self.parts.compiled_layers is not None:
            self.parts.compiled_layers.report()
        if result.is_skipped:
            self._report_skip(result, batches)
        else:
            self.skip_cause = None
        record = meter.measure(self.step, result)
        if self.parts.task is not None:
            record = replace(record, task=self.parts.task.metrics())
        self.step += 1
        is_due = _is_due(self.config.evaluate.every, self.step) or self.step == self.steps
        if is_due and self.config.tune.task != "grpo":  # it has rewards, and no text to predict
            self.evaluation = self.evaluate()
            record = replace(record, evaluation=self.evaluation.values())
            meter.skip_time()
        self.record = record
        if receipt is not None:
            receipt.record(self.step, result.loss)
        if writer is not None:
            writer.write(record)
        if self.view is not None:
            self.view.step(record, meter.seconds_left(self.step - 1, self.steps))

    def evaluate(self) -> Evaluation:
        """Loss on held-out text. All ranks call it together."""
        assert self.config.microbatch_size is not None, "the config is resolved"
        return evaluate(
            self.parts.eager,
            self.parts.validation_data,
            self.layout,
            batches=self.config.evaluate.batches,
            batch_size=self.config.microbatch_size,
            device=self.parts.device,
        )

    def _report_skip(self, result: StepResult, batches: Sequence[Batch]) -> None:
        """Say what was not finite; end the run if it was too often."""
        self.skipped += 1
        is_first = self.skip_cause is None
        if is_first:  # of the first one in a row: naming runs the step op by op
            self.skip_cause = "ranks share the model; run the step on one rank to name the op"
            if self._runs_alone():
                self.skip_cause = name_nonfinite(self.parts.eager, batches)
        cause = self.skip_cause or ""
        limit = self.config.log.max_nonfinite
        text = f"step {self.step + 1}: loss {result.loss}, gradient norm {result.gradient_norm}"
        LOG.warning("%s; skipped: %s", text, cause if is_first else "as the step before")
        if self.skipped > limit:
            count = "1 step was" if self.skipped == 1 else f"{self.skipped} steps were"
            kept = "; the last checkpoint is whole, and of a step that was finite"
            raise NonFiniteError(
                f"{count} not finite; {text}",
                cause=cause,
                next=f"lower optimizer.learning_rate, or raise log.max_nonfinite (now {limit})"
                + (kept if list_checkpoints(self.parts.output / CHECKPOINTS) else ""),
            )

    def _runs_alone(self) -> bool:
        """Whether a forward of this rank waits for no other: those may stop at another op."""
        section, layout = self.config.parallel, self.layout
        is_whole = section.data_shard == 1 and section.expert == 1
        return layout.world_size == 1 or (is_whole and not isinstance(layout, ModelParallelLayout))

    def _explain(self, folder: Path) -> None:
        """Write what was compiled, and why so."""
        compiled = self.parts.compiled
        if self.layout.rank == 0 and compiled is not None:
            write_atomically(folder / EXPLANATION_FILE, f"{compiled.explain()}\n")

    def tell(self, label: str, text: str) -> None:
        if self.view is not None:
            self.view.event(label, text)

    # ---- what a run writes

    def _open_receipt(self, folder: Path, resumed_from: Path | None) -> Receipt | None:
        if self.layout.rank != 0:
            return None
        return Receipt.open(
            folder,
            config=self.config,
            data=self.parts.train_data.hashes(),
            device=self.parts.device.type,
            ranks=self.layout.world_size,
            step=self.step,
            resumed_from=resumed_from,
        )

    def _open_metrics(self, folder: Path) -> MetricsWriter | None:
        if self.layout.rank != 0:
            return None
        return MetricsWriter(folder, self.config.log, self.step, asdict(self.config))

    def _make_meter(self) -> StepMeter:
        config = self.config
        assert config.batch_size is not None and config.data.sequence_length is not None
        return StepMeter(
            tokens_per_step=config.batch_size * config.data.sequence_length,
            flops_per_token=self.parts.flops.training,
            peak_flops=find_peak(self.parts.device, config.precision.matmul).flops,
            world_size=self.layout.world_size,
            bytes_per_token=self.parts.train_data.mean_bytes_per_token(),
            device=self.parts.device,
        )


def make_loader(parts: Parts, start_step: int) -> Loader | RolloutLoader:
    """The microbatches of this rank."""
    config = parts.config
    sampling = None if parts.task is None else parts.task.make_loader()
    if sampling is not None:
        return sampling
    assert config.batch_size is not None and config.microbatch_size is not None
    return Loader(
        parts.train_data,
        batch_size=config.batch_size,
        microbatch_size=config.microbatch_size,
        data_rank=parts.layout.data_rank,
        data_ranks=parts.layout.data_ranks,
        start_step=start_step,
        shuffle_seed=config.seed if config.data.shuffle else None,
        workers=config.data.workers,
    )


def _is_due(every: int | None, step: int) -> bool:
    return bool(every) and step % (every or 1) == 0


class _closing(ExitStack):
    """`contextlib.closing` for objects whose `close` is typed."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.thing = thing

    def __enter__(self) -> Any:
        super().__enter__()
        self.callback(self.thing.close)
        return self.thing


# ---- whole runs ------------------------------------------------------------------------------------


def train(config: TrainConfig) -> RunResult:
    """A whole run on this rank: it goes on from the newest checkpoint of `config.output`."""
    with RunLog(is_first=int(os.environ.get("RANK", "0")) == 0) as log:
        config = resolve(config)
        assert config.output is not None, "a run has a folder"
        check_run(config)
        folder = Path(config.output)
        parts = build_parts(config)
        log.open(folder / LOG_FILE)
        report_repeats(parts)
        view = make_view(config.log, config.steps or 1) if parts.is_first else None
        trainer = Trainer(parts, view)
        if view is not None:
            view.start(describe_run(parts))
        try:
            is_finished = trainer.run(folder)
        finally:
            if view is not None:
                view.close()
        return _finish(parts, trainer, is_finished)


def _finish(parts: Parts, trainer: Trainer, is_finished: bool) -> RunResult:
    """Export the weights, write the result, and leave the other ranks."""
    config, record, evaluation = parts.config, trainer.record, trainer.evaluation
    is_exported = is_finished and config.checkpoint.export
    export = export_run(parts) if is_exported else None
    result = RunResult(
        output=str(parts.output),
        steps=trainer.step,
        is_finished=is_finished,
        loss=None if record is None else record.loss,
        validation_loss=None if evaluation is None else evaluation.loss,
        bits_per_byte=None if evaluation is None else evaluation.bits_per_byte,
        tokens_per_second=None if record is None else record.tokens_per_second,
        skipped=trainer.skipped,
        export=None if export is None else str(export),
        task={} if record is None else dict(record.task),
        stopped_by=None if is_finished else trainer.stopped_by,
    )
    if parts.is_first:
        result = keep_figures(result) if record is None else result
        write_result(result)
    close = getattr(parts.layout, "close", None)
    if close is not None:
        close()
    return result


def report_repeats(parts: Parts) -> None:
    """Warn of a plan that reads its text so often that more steps teach nothing."""
    config, tokens = parts.config, parts.train_data.num_tokens
    assert config.steps and config.batch_size and config.data.sequence_length, "it is resolved"
    repeats = config.steps * config.batch_size * config.data.sequence_length / max(1, tokens)
    if repeats <= MAX_REPEATS or config.model.init_from is not None:
        return
    LOG.warning(
        "the text is read %.0f times; beyond about %d a model learns it by heart and nothing else: "
        "add text (data.train), or take fewer steps (--steps) or a smaller --size",
        repeats,
        MAX_REPEATS,
    )


def describe_run(parts: Parts) -> str:
    """The headline of a run: model, data, batch."""
    config, flops = parts.config, parts.flops
    name = config.model.architecture or config.model.init_from
    sizes = f"{_format_count(flops.parameters)} parameters"
    if flops.active_parameters != flops.parameters:
        sizes += f", {_format_count(flops.active_parameters)} a token"
    assert config.batch_size is not None and config.data.sequence_length is not None
    tokens = config.batch_size * config.data.sequence_length
    ranks = parts.layout.world_size
    where = parts.device.type if ranks == 1 else f"{ranks} ranks on {parts.device.type}"
    return (
        f"{name} · {sizes} · {_format_count(parts.train_data.num_tokens)} tokens of text · "
        f"{config.steps} {'step' if config.steps == 1 else 'steps'} of {_format_count(tokens)} tokens · {where}"
    )


def _format_count(count: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:g}"


def replay(config: TrainConfig, checkpoint: Path | None, last_step: int) -> dict[int, float]:
    """The losses of the steps from a checkpoint (None: the start) to `last_step`, computed again."""
    assert config.output is not None, "a run has a folder"
    parts = build_parts(config)
    trainer = Trainer(parts)
    if checkpoint is not None:
        with CheckpointManager(checkpoint.parent, config.checkpoint, parts.layout) as manager:
            trainer.load(manager, checkpoint)
    losses: dict[int, float] = {}
    with _closing(make_loader(parts, trainer.step)) as loader:
        while trainer.step < last_step:
            batches = [batch.to(parts.device) for batch in loader.step(trainer.step)]
            result = trainer.run_step(trainer.step, batches)
            trainer.step += 1
            losses[trainer.step] = result.loss
    return losses


def hash_data(config: TrainConfig) -> dict[str, str]:
    """The hashes of the data of a run, as its receipt has them."""
    assert config.output is not None, "a run has a folder"
    tokenizer = prepare_tokenizer(config, Path(config.output))
    return open_data(config, tokenizer, "train").hashes()
