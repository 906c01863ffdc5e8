"""Options of the model and the run."""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from tropism.errors import UsageError
from tropism.model.options import LoraOptions
from tropism.options import Options
from tropism.train.interval import Interval, seconds_of

Schedule = Literal["linear", "cosine", "constant", "polynomial", "cosine_with_min_lr", "inverse_sqrt"]


class StoreOptions(Options):
    """Where what can be used again is kept."""

    store: str | None = None
    """Directory of the scores of frozen models and of rendered rows; by default TROPISM_STORE, else
    ~/.cache/tropism/store."""

    @property
    def store_root(self) -> Path:
        """The store's directory."""
        return Path(self.store).expanduser() if self.store else default_root()


def default_root() -> Path:
    """TROPISM_STORE, else tropism/store in the user's cache."""
    if named := os.environ.get("TROPISM_STORE"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tropism" / "store"


class ReferenceOptions(StoreOptions):
    """Which model the policy is held close to."""

    reference: str | None = None
    """Reference model: by default the policy as it is before step 1; a directory or hub id for another model;
    `live` keeps a copy in memory instead of stored scores."""


class TeacherOptions(StoreOptions):
    """Which teacher to distill from, and how. Without a teacher none of these has an effect."""

    teacher: str | None = None
    """Teacher model, with the same tokenizer: a Hugging Face directory, a hub id, or a GGUF file."""
    kd_weight: float | None = Field(None, ge=0.0, le=1.0)
    """Weight of the divergence from the teacher, by default 0.5: `tropism kd` minimizes (1 - kd_weight) x
    cross-entropy + kd_weight x divergence; other methods add kd_weight x divergence to their loss."""
    divergence: Literal["forward_kl", "reverse_kl", "js", "skew", "tvd"] | None = None
    """Divergence from the teacher; by default forward_kl."""
    divergence_mix: float | None = Field(None, gt=0.0, lt=1.0)
    """Weight of the teacher in the mixture of js (default 0.5) and skew (default 0.1)."""
    temperature: float | None = Field(None, gt=0.0)
    """Temperature T of both distributions; by default 1."""
    temperature_scaling: bool | None = None
    """Multiply the divergence by T^2, so that its gradient keeps its size; by default true."""
    top_k: int | None = Field(None, ge=1)
    """Keep the teacher's k likeliest tokens and the mass of the others in the store, instead of the teacher in
    memory."""


class ParallelOptions(Options):
    """How the model is spread over the processes that torchrun starts; without torchrun none of these is needed."""

    shard: int | None = Field(None, ge=1)
    """Processes that share one copy of weights, gradients and optimizer state (FSDP); by default all that the other
    two leave. 1 keeps a whole copy in each process."""
    replicate: int | None = Field(None, ge=1)
    """Such groups side by side, each with a copy of its own (HSDP): gradients are summed across them once per step. By
    default 1, or what a given parallel.shard leaves."""
    tensor: int = Field(1, ge=1)
    """Processes that compute each layer together (tensor parallel), by the model's own plan; they divide its heads and
    its vocabulary."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in the host's memory, and bring a layer to the GPU when it is
    due."""
    reduce_once: bool = False
    """Sum gradients over processes once per step, not after each pack: less communication, and each process holds
    whole gradients until then."""

    def sizes(self, world: int) -> tuple[int, int, int]:
        """(replicate, shard, tensor) for so many processes.

        Raises:
            UsageError: if they do not come out.
        """
        replicate = self.replicate or (max(1, world // (self.shard * self.tensor)) if self.shard else 1)
        shard = self.shard or max(1, world // (replicate * self.tensor))
        if replicate * shard * self.tensor != world:
            more = ": torchrun starts more" if world == 1 else ""
            raise UsageError(f"parallel.shard {shard} x parallel.replicate {replicate} x parallel.tensor {self.tensor} "
                             f"does not make the number of processes, which is {world}{more}")
        return replicate, shard, self.tensor


class RunOptions(Options):
    """Which model, how to train it, where the result goes."""

    model: str
    """The policy: a Hugging Face directory, a hub id, or a GGUF file."""
    output: str
    """The run directory; it must not hold anything yet, unless the run in it goes on."""
    trust_remote_code: bool = False
    """Run code that comes with a model."""
    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """Dtype of the computation: bf16 on GPUs, fp32 on CPUs; weights and optimizer stay float32 (float64 in fp64)."""
    layout: Literal["auto", "tree", "padded"] = "auto"
    """`tree` computes every prompt once; `padded` puts each completion beside its own copy of the prompt; `auto`
    takes the tree where the start-up comparison shows that it is exact for this model."""
    batch_size: int = Field(32, ge=1)
    """Rows of an optimizer step, over all ranks."""
    microbatch_tokens: int | None = Field(None, ge=1)
    """Tokens of one forward and backward pass: memory and speed, never the result. Default 2048 on a CPU, 16384 on
    a GPU."""
    epochs: int = Field(1, ge=1)
    """Passes over the data."""
    max_steps: int | None = Field(None, ge=1)
    """Optimizer steps; wins over epochs."""
    learning_rate: float = Field(1e-6, ge=0.0)
    """Peak learning rate."""
    schedule: Schedule = "linear"
    """Learning-rate schedule after warm-up, by its name in transformers."""
    warmup_ratio: float = Field(0.1, ge=0.0, le=1.0)
    """Share of the steps that warm up; step k of them uses k / warm-up steps of the peak."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW (0.9, 0.999, 1e-8), or plain SGD."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Weight decay, on matrices only; decoupled in AdamW."""
    max_grad_norm: float = Field(1.0, ge=0.0)
    """Clip the gradient to this global norm; 0 does not clip."""
    eval_every: int | str | None = None
    """How often to evaluate: steps (50), epochs (0.25ep) or time (30min); by default a tenth of the run; 0 evaluates
    at start and end only."""
    eval_limit: int | None = Field(None, ge=1)
    """Evaluate this many of the held-out rows, evenly spread, and the same every time; by default all."""
    log_every: int | str = 1
    """How often to write a line of metrics.jsonl: steps (1), epochs (0.1ep) or time (30s)."""
    save_every: int | str | None = None
    """How often to write a checkpoint: steps (500), epochs (1ep) or time (30min); by default only when the run is
    stopped."""
    keep: int = Field(2, ge=0)
    """Checkpoints that stay, the newest ones; 0 keeps all."""
    keep_best: str | None = None
    """Metric of the evaluations, such as loss or rewards/auc; the checkpoint that is best by it stays too."""
    checkpoint_model: bool = False
    """Put the model into every checkpoint too, as Hugging Face loads it."""
    max_time: str | None = None
    """Stop in time before so long (3h, 90min), with a checkpoint and an evaluation, and exit code 75."""
    resume: str = "never"
    """`auto` goes on with the run in output if there is one, `never` refuses it; or the path of the run or of one of
    its checkpoints."""
    fall_back: bool = False
    """Go on from the newest checkpoint that is whole, where a later one is damaged."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a step whose loss, log-prob or gradient is not finite does to the run: `stop`, or `skip` the step, which
    changes nothing in any case; ten in a row stop it too."""
    stop_metric: str | None = None
    """Metric of the evaluations, such as loss or rewards/auc, by which the run ends early when it gets no better."""
    stop_patience: int | None = Field(None, ge=1)
    """Evaluations in a row without a better value that end the run, by default 3."""
    stop_delta: float | None = Field(None, ge=0.0)
    """By how much a value must be better to count, by default 0."""
    track: str | None = None
    """Also log to these trackers, comma-separated: tensorboard, wandb, trackio, mlflow and others."""
    log_dir: str | None = None
    """Where trackers write; by default RUN/logs."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of the order of rows, and of the values with which a new adapter begins."""
    router_aux_weight: float = Field(0.0, ge=0.0)
    """Weight of the router's load-balancing loss (Switch Transformer, arXiv:2101.03961, as transformers has it for
    Mixtral and Qwen-MoE), over the tokens of the whole step; for mixture-of-experts models."""
    lora: LoraOptions = LoraOptions()
    """Adapters."""
    parallel: ParallelOptions = ParallelOptions()
    """More than one process."""
    samples: int = Field(4, ge=0)
    """Held-out prompts that are answered before and after training."""
    export_dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Dtype of the exported weights."""

    @field_validator("eval_every", "log_every", "save_every", mode="before")
    @classmethod
    def _interval(cls, value: Any) -> Any:
        """Steps are a number, whoever wrote them; everything else stays as it was written."""
        if value is None or isinstance(value, bool):
            return value
        found = Interval.parse(value)
        return int(found.every) if found.unit == "steps" else str(value).strip()

    @field_validator("log_every", "save_every")
    @classmethod
    def _not_never(cls, value: int | str | None) -> int | str | None:
        if value == 0:
            raise ValueError("Input should be greater than or equal to 1 (got 0)")
        return value

    @field_validator("max_time", mode="before")
    @classmethod
    def _time(cls, value: Any) -> Any:
        if value is not None and not seconds_of(str(value)):
            raise ValueError(f"{value!r} is no time; it takes 90s, 30min, 3h or 1h30min")
        return value

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds."""
        return None if self.max_time is None else seconds_of(self.max_time)
