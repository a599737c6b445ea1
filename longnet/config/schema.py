"""The shape of a job: every key that `conf/` may set, with its type and its default.

Plain dataclasses with no heavy import, so that a config can be checked in well under a second.
What each key is for is said beside it in `conf/`; what goes together is said in `checks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class RunConfig:
    """Which run this is, and where it lies."""

    name: str = "default"
    root: str = "runs"


@dataclass
class ModelConfig:
    """The decoder, in transformers' own words; `LongNetConfig` takes these as they are."""

    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    hidden_act: Literal["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2"] = "silu"
    gated_mlp: bool = True
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    sub_layernorm: bool = False
    position_embedding: Literal["rope", "xpos"] = "rope"
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    dropout: float = 0.0
    initialization: Literal["normal", "magneto"] = "normal"
    initializer_range: float = 0.02
    pretrained: str | None = None
    keep_code: bool = False
    rope_extension: Literal["keep", "linear", "ntk", "dynamic", "yarn", "base"] = "keep"


@dataclass
class DilatedConfig:
    """The levels of a `dilated` block; without lists, a geometric pattern from `base` and `ratio`."""

    segment_lengths: list[int] | None = None
    dilation_rates: list[int] | None = None
    base: int = 2048
    ratio: int = 2
    heads: Literal["all", "grouped"] = "all"
    shift: int = 0


@dataclass
class SlidingWindowConfig:
    """The `sliding_window` block."""

    window: int = 512


@dataclass
class BlockSparseConfig:
    """The `block_sparse` block."""

    block_size: int = 128
    local_blocks: int = 4
    stride: int = 8
    global_blocks: int = 1


@dataclass
class AttentionConfig:
    """`layers` is cycled over the depth; an entry is a block's name or a mapping with its own options."""

    layers: list[Any] = field(default_factory=lambda: ["dilated"])
    backend: Literal["auto", "reference", "sdpa"] = "auto"
    dropout: float = 0.0
    dilated: DilatedConfig = field(default_factory=DilatedConfig)
    sliding_window: SlidingWindowConfig = field(default_factory=SlidingWindowConfig)
    block_sparse: BlockSparseConfig = field(default_factory=BlockSparseConfig)


@dataclass
class DataConfig:
    """What is read, and in which rows and batches."""

    source: Literal[
        "stdlib", "text", "jsonl", "parquet", "arrow", "hf", "prepared", "mixture",
        "passkey", "needle", "multi_key", "recall", "lookup", "copy", "multi_hop", "variable_tracking",
    ] = "stdlib"  # fmt: skip
    path: str | None = None
    include: list[str] | None = None
    text_field: str = "text"
    subset: str | None = None
    revision: str | None = None
    split: str = "train"
    validation_split: str | None = None
    streaming: bool = False
    block_rows: int = 256
    on_bad_input: Literal["fatal", "skip"] = "fatal"
    tokenizer: str | None = "bytes"
    packing: Literal["concat", "isolate", "whole"] = "concat"
    context_length: int = 2048
    batch_size: int = 8
    validation_fraction: float = 0.05
    validation_every: int | None = None
    samples: int = 10_000
    validation_samples: int = 64
    answer_only: bool = False
    sample_lengths: list[int] | None = None
    mixture: list[Any] = field(default_factory=list)
    num_workers: int = 0


@dataclass
class FinetuneConfig:
    """What of a pretrained model is trained, and how its context grows."""

    train: Literal["all", "attention", "no_embeddings", "lora"] = "all"
    lora_rank: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_targets: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )
    context_growth: list[Any] = field(default_factory=list)


@dataclass
class OptimConfig:
    """AdamW, its schedule and the loss's extra term."""

    lr: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    schedule: Literal["cosine", "linear", "polynomial", "wsd", "constant"] = "cosine"
    warmup_steps: int = 100
    min_lr_ratio: float = 0.1
    decay_fraction: float = 0.2
    power: float = 1.0
    z_loss: float = 0.0


@dataclass
class ActivationCheckpointingConfig:
    """What is recomputed in backward instead of kept."""

    kind: Literal["none", "selective", "full", "offload"] = "none"
    every: int = 1


@dataclass
class GuardConfig:
    """What to do when numbers go bad."""

    non_finite: Literal["raise", "skip"] = "raise"
    skip_limit: int = 5
    spike_factor: float = 0.0
    spike_window: int = 50
    rewinds: int = 3


@dataclass
class TrainerConfig:
    """How long, how much at once, in which format and on what."""

    max_steps: int = 1000
    accumulate: int = 1
    tokens_per_step: int | None = None
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto"
    devices: int = 1
    num_nodes: int = 1
    compile: Literal["auto", "on", "off"] = "auto"
    log_every: int = 10
    val_every: int = 200
    val_batches: int | None = None
    overfit_batches: int = 0
    profiler: Literal["none", "simple"] = "none"
    residual: Literal["fp32", "bf16"] = "fp32"
    tile: int | None = None
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)


@dataclass
class StrategyConfig:
    """How several processes share the work."""

    name: Literal["auto", "ddp", "sequence_parallel", "sequence_parallel_fsdp"] = "auto"
    sequence_parallel_size: int = 1
    sequence_parallel: Literal["gather", "ring", "ulysses"] = "gather"
    timeout: float = 600.0


@dataclass
class LoggerConfig:
    """Where metrics go beside `metrics.csv`."""

    wandb: bool = False
    wandb_project: str = "longnet"
    tensorboard: bool = False


@dataclass
class CallbacksConfig:
    """What a run shows and keeps."""

    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    save_every: int = 200
    keep_last: int = 2
    save_async: bool = False
    plot: bool = True
    summary: bool = True
    sample_prompt: str = "def "
    sample_tokens: int = 200


@dataclass
class MeasurementConfig:
    """What is measured of a model beside its validation loss, in training and by `scripts/evaluate.py`."""

    contexts: list[int] | None = None
    max_tokens: int = 65536
    within_documents: bool = False
    beyond: Literal["read", "slide"] = "read"
    documents: int = 16
    document_tokens: int | None = None
    tasks: list[str] = field(default_factory=list)
    lengths: list[int] | None = None
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    samples: int = 20
    placements: bool = False
    batch_tokens: int = 65536


@dataclass
class EvaluationConfig(MeasurementConfig):
    """What is measured while training, and how often."""

    every: int = 0


@dataclass
class JobConfig:
    """A whole job: what `train` takes."""

    seed: int = 1337
    resume: str = "auto"
    memory: Literal["manual", "auto"] = "manual"
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
