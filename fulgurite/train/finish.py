"""What a run leaves behind: trained parts in; safetensors, `result.json` and a written sample out.

export_run     all ranks: export/ in the published layout
write_result   rank 0: result.json
write_sample   the process that started the run: the engine loads export/ and continues a prompt
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from fulgurite.errors import ArgumentError
from fulgurite.files import write_atomically
from fulgurite.models.loading import hub
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
from fulgurite.train.config import TrainConfig
from fulgurite.train.data.tokenizer import restore_tokenizer
from fulgurite.train.export import ExportOptions, save_pretrained
from fulgurite.train.layout import ModelParallelLayout
from fulgurite.train.metrics import read_metrics
from fulgurite.train.setup import Parts
from fulgurite.train.tune.lora import adapters_merged
from fulgurite.train.tune.task import ADAPTER_FOLDER

RESULT = "result.json"
EXPORT = "export"
TOKENIZER = "tokenizer"
TEMPERATURE, TOP_P = 0.7, 0.95  # of the sample: a small model repeats itself if it is greedy


@dataclass(frozen=True)
class RunResult:
    """The end of a run.

    Attributes:
        output: its folder.
        steps: that are done; `is_finished`: all of them are.
        loss: of the last step.
        validation_loss, bits_per_byte: on held-out text, of the last evaluation.
        tokens_per_second: over the last steps.
        skipped: steps that were not finite.
        export: the folder that the engine loads; None: not written.
        task: figures of fine-tuning in the last step, such as the mean reward of GRPO.
        stopped_by: the number of the signal that ended the run before its last step.
    """

    output: str
    steps: int
    is_finished: bool
    loss: float | None = None
    validation_loss: float | None = None
    bits_per_byte: float | None = None
    tokens_per_second: float | None = None
    skipped: int = 0
    export: str | None = None
    task: dict[str, float] = field(default_factory=dict)
    stopped_by: int | None = None


def export_run(parts: Parts) -> Path:
    """Write the weights in the published layout. All ranks call it."""
    folder = parts.output / EXPORT
    if parts.is_first and folder.exists():  # of the same run, before it went on
        shutil.rmtree(folder)
    if parts.is_first:
        restore_tokenizer(parts.tokenizer, parts.output)
    parts.layout.barrier()
    model, gather = parts.model, None
    if isinstance(parts.layout, ModelParallelLayout):
        model, gather = parts.layout.prepare_export(model)
    options = ExportOptions(
        tokenizer=parts.output / TOKENIZER, base=find_base(parts.config), gather=gather
    )
    with adapters_merged(parts.model):
        save_pretrained(model, parts.built.family, parts.built.fields, folder, options)
    if parts.task is not None and parts.is_first:
        parts.task.save(parts.output / ADAPTER_FOLDER)
    return folder


def find_base(config: TrainConfig) -> Path | None:
    """The checkpoint folder that training started from, if it is one of safetensors."""
    if config.model.init_from is None:
        return None
    path = hub.resolve_model_path(config.model.init_from)
    return None if path.suffix == ".gguf" else path


def write_result(result: RunResult) -> None:
    text = json.dumps(asdict(result), indent=1)
    write_atomically(Path(result.output) / RESULT, text + "\n")


def keep_figures(result: RunResult) -> RunResult:
    """The result of a run that had no step left, with the figures of its last step: those of
    `result.json`, or of `metrics.jsonl` if the run was killed before it wrote the former."""
    folder = Path(result.output)
    if (folder / RESULT).is_file() and read_result(folder).steps == result.steps:
        return replace(
            read_result(folder),
            output=result.output,
            is_finished=result.is_finished,
            export=result.export,
        )
    records = read_metrics(folder)
    if not records or records[-1].step + 1 != result.steps:
        return result
    last = records[-1]
    return replace(
        result,
        loss=last.loss,
        validation_loss=last.evaluation.get("loss"),
        bits_per_byte=last.evaluation.get("bits_per_byte"),
        tokens_per_second=last.tokens_per_second,
        task=dict(last.task),
    )


def read_result(folder: Path) -> RunResult:
    """The result of a run that has ended."""
    try:
        values = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ArgumentError(f"{folder} has no {RESULT}", next="its run has not ended") from error
    return RunResult(**values)


def write_sample(folder: Path, config: TrainConfig) -> str:
    """A continuation of `evaluate.sample` by the engine, from the exported weights; prompt included."""
    section = config.evaluate
    params = SamplingParams(
        temperature=TEMPERATURE, top_p=TOP_P, max_tokens=section.sample_tokens, seed=config.seed
    )
    with LLM(folder, device=config.device, max_sequences=1) as llm:
        result = llm.generate([section.sample], params)[0]
    return section.sample + result.text
