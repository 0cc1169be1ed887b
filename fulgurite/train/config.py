"""`TrainConfig`: every option of a run, as typed dataclasses.

A section is one table of the TOML file (`[optimizer]`), and `--optimizer.learning_rate 3e-4` on the
command line overrides one field. `config_file.py` reads and writes both. `sizes.py` fills what is None.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelSection:
    """What is trained.

    Attributes:
        init_from: a folder, file or name to start from. None: random weights.
        architecture: of random weights: a name in `models.ARCHITECTURES`. None: `sizes.py` chooses.
        fields: fields of the `config.json` of random weights; they override those of the size.
        dtype: of the weights: `float32`, `bfloat16`. None: float32 on a CPU, bfloat16 on a GPU.
    """

    init_from: str | None = None
    architecture: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None


@dataclass(frozen=True)
class DataSection:
    """What it is trained on.

    Attributes:
        train: files, folders or glob patterns: `.txt`, `.md`, `.py` and other text, `.jsonl`,
            `.parquet`, token files (`.bin`); `demo`: the text that comes with the project.
        validation: the same. Empty: every `holdout`-th document of `train`, chosen by its hash.
        holdout: one document in this many is held out for validation.
        text_field: of JSONL and parquet.
        sequence_length: tokens of a sample. None: `sizes.py` chooses.
        tokenizer: a folder or `tokenizer.json`. None: that of `init_from`, or one trained on `train`.
        vocab_size: of a tokenizer that is trained. None: `sizes.py` chooses.
        document_mask: tokens attend only to tokens of their own document.
        shuffle: the order of samples is a permutation, another one every epoch.
        max_bad_samples: unreadable samples to skip before the run stops.
        workers: threads that prepare samples ahead.
    """

    train: tuple[str, ...] = ("demo",)
    validation: tuple[str, ...] = ()
    holdout: int = 50
    text_field: str = "text"
    sequence_length: int | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    document_mask: bool = True
    shuffle: bool = True
    max_bad_samples: int = 100
    workers: int = 2


@dataclass(frozen=True)
class OptimizerSection:
    """How weights are updated.

    Attributes:
        name: `adamw`, or `muon` (matrices by Muon, all other parameters by AdamW). None: `muon` for
            new weights, `adamw` for those of a checkpoint.
        learning_rate: the peak; of matrices with Muon. None: `sizes.py` chooses.
        adam_learning_rate: of what Muon leaves to AdamW. None: `sizes.py` chooses.
        schedule: `wsd` (warmup, stable, decay), `cosine`, `linear`, `constant`.
        warmup: steps, or a fraction of all steps if below 1.
        decay: the share of steps over which `wsd` decays.
        final_ratio: of the last learning rate to the peak.
        weight_decay: of matrices; norms, biases and embeddings have none.
        betas, epsilon: of AdamW.
        momentum: of Muon.
        clip_norm: the largest norm of all gradients together; 0: none.
        states: `float32`, `bfloat16` or `int8` (block-wise 8 bit).
        rounding: how 16-bit weights take small updates: `master` (a float32 copy of each weight) or
            `stochastic` (random rounding, no copy).
    """

    name: str | None = None
    learning_rate: float | None = None
    adam_learning_rate: float | None = None
    schedule: str = "wsd"
    warmup: float = 0.02
    decay: float = 0.2
    final_ratio: float = 0.0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    momentum: float = 0.95
    clip_norm: float = 1.0
    states: str = "float32"
    rounding: str = "master"


@dataclass(frozen=True)
class LossSection:
    """What is minimized, besides the cross entropy.

    Attributes:
        z_loss: weight of the squared log of the softmax's denominator.
        balance: how experts are kept evenly loaded: `bias` (no loss: a bias on the selection,
            DeepSeek-V3), `aux` (a loss), `none`, or `auto`: `bias` where the family stores one, else `aux`.
        balance_rate: the step of the bias; it decays with the learning rate. None: `sizes.py` chooses.
        aux_loss: weight of the auxiliary loss.
    """

    z_loss: float = 0.0
    balance: str = "auto"
    balance_rate: float | None = None
    aux_loss: float = 0.01


@dataclass(frozen=True)
class PrecisionSection:
    """Number formats of the matmuls.

    Attributes:
        matmul: `none` (the dtype of the model), `fp8_tensorwise`, `fp8_rowwise`, `fp8_blockwise`,
            `mxfp8`, `nvfp4`. The last two are emulated where the hardware lacks them.
        skip: patterns of module names that stay in the model's dtype.
    """

    matmul: str = "none"
    skip: tuple[str, ...] = ("lm_head", "*router*")


@dataclass(frozen=True)
class ParallelSection:
    """How ranks share the work. The product of all degrees is the number of ranks.

    Attributes:
        data: ranks with samples of their own. None: all that are left.
        data_shard: of the data ranks, how many share one copy of the weights (FSDP2): 1 replicates,
            0 shards over all data ranks, values between are HSDP.
        tensor: ranks over which matrices are split.
        sequence: with `tensor` above 1, also split the tokens between the matmuls.
        expert: ranks over which experts are distributed; they are data ranks of all other layers.
        pipeline: stages.
        pipeline_schedule: `1f1b`, `interleaved`, `zero_bubble`.
        context: ranks over which one sequence is split.
        remat: what backward recomputes: `none`, `mincut` (compiled: fewest bytes saved),
            `selective` (all but matmuls and attention of each layer), `full` (each layer).
        timeout: seconds that ranks wait for each other.
    """

    data: int | None = None
    data_shard: int = 1
    tensor: int = 1
    sequence: bool = True
    expert: int = 1
    pipeline: int = 1
    pipeline_schedule: str = "1f1b"
    context: int = 1
    remat: str = "mincut"
    timeout: float = 300.0


@dataclass(frozen=True)
class CheckpointSection:
    """What is saved.

    Attributes:
        every: steps between checkpoints; 0: only at the end. None: ten of them.
        keep: the newest checkpoints that are kept.
        is_async: write while training goes on.
        export: also write safetensors in the published layout at the end.
        max_restarts: of a run whose ranks fail.
    """

    every: int | None = None
    keep: int = 2
    is_async: bool = True
    export: bool = True
    max_restarts: int = 3


@dataclass(frozen=True)
class EvaluateSection:
    """What is measured on held-out text.

    Attributes:
        every: steps between evaluations; 0: only at the end. None: ten of them.
        batches: of validation.
        sample: a prompt that is continued at the end. Empty: none.
        sample_tokens: of that sample.
    """

    every: int | None = None
    batches: int = 8
    sample: str = "The"
    sample_tokens: int = 64


@dataclass(frozen=True)
class LogSection:
    """What is written about a run, besides `metrics.jsonl`.

    Attributes:
        every: steps between lines of metrics.
        tensorboard, wandb: also write there; wandb must be installed.
        live: a live view in a terminal. None: if stdout is one.
        report: an HTML page at the end.
        profile: steps `A:B` to record with torch.profiler.
        explain: write `explain.txt` after the first step: what was compiled, and why so.
        max_nonfinite: steps with a NaN or infinite loss or gradient to skip before the run stops.
    """

    every: int = 1
    tensorboard: bool = False
    wandb: bool = False
    live: bool | None = None
    report: bool = True
    profile: str | None = None
    explain: bool = False
    max_nonfinite: int = 10


@dataclass(frozen=True)
class TuneSection:
    """Fine-tuning.

    Attributes:
        method: `none` (all weights), `lora`, `qlora`.
        task: `text` (pretraining), `chat` (loss on answers only), `dpo`, `grpo`.
        rank, alpha, dropout: of LoRA.
        use_rslora: multiply adapters by alpha / sqrt(rank) instead of alpha / rank.
        targets: patterns of module names that get adapters. Empty: all linears and experts.
        quantize: format of the frozen weights of QLoRA.
        beta: of DPO and of GRPO's KL term.
        reference: of DPO: `precomputed` (before the first step) or `live` (in every step).
        group_size: completions a prompt of GRPO.
        updates: optimizer steps on the completions of one sampling.
        clip_range: of GRPO's ratio.
        max_tokens: of a completion of GRPO.
        temperature: of GRPO's sampler.
        rewards: `module:function` names for GRPO.
    """

    method: str = "none"
    task: str = "text"
    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    use_rslora: bool = False
    targets: tuple[str, ...] = ()
    quantize: str = "nf4"
    beta: float = 0.1
    reference: str = "precomputed"
    group_size: int = 8
    updates: int = 1
    clip_range: float = 0.2
    max_tokens: int = 64
    temperature: float = 1.0
    rewards: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainConfig:
    """A run.

    Attributes:
        size: the one dial: `nano`, `tiny`, `small`, `medium`, ... (`sizes.py`).
        output: the folder of the run. None: a new one under `runs/`.
        device: `cpu` or `cuda`. None: `cuda` if there is a GPU.
        steps: optimizer steps. None: `sizes.py` chooses.
        batch_size: sequences of a step, over all ranks. None: `sizes.py` chooses.
        microbatch_size: sequences of one forward and backward. None: `sizes.py` chooses.
        seed: of weights, samples and dropout.
        compile: run the step under `fulgurite.compile`.
        deterministic: losses and weights don't depend on the number of data ranks or on restarts, to
            the bit.
    """

    size: str = "nano"
    output: str | None = None
    device: str | None = None
    steps: int | None = None
    batch_size: int | None = None
    microbatch_size: int | None = None
    seed: int = 0
    compile: bool = True
    deterministic: bool = False
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    loss: LossSection = field(default_factory=LossSection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)
    log: LogSection = field(default_factory=LogSection)
    tune: TuneSection = field(default_factory=TuneSection)
