"""Options of the model and the run."""

import os
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from tropism.errors import UsageError
from tropism.model.options import LoraOptions
from tropism.options import Everyday, Options, check_size, size_bytes
from tropism.train.interval import Interval, seconds_of

Schedule = Literal["linear", "cosine", "constant", "polynomial", "cosine_with_min_lr", "inverse_sqrt"]


class StoreOptions(Options):
    """The cache that runs share."""

    heading: ClassVar[str] = "Data"

    store: str | None = None
    """Cache directory for reference scores, teacher tokens and rendered rows. Default: $TROPISM_STORE, else
    ~/.cache/tropism/store."""
    store_limit: str = "20GB"
    """Maximum size of the cache directory, such as 500MB or 20GB; 0 or `none` for no limit. At the start of a run, the
    files that were used least recently are deleted. Files that a run is using are kept."""

    @field_validator("store_limit", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        """Accept a number of bytes, and null in YAML."""
        text = "none" if value is None else str(value).strip()
        if text.lower() != "none":
            size_bytes(text)
        return text

    @property
    def store_bytes(self) -> int | None:
        """`store_limit` in bytes; None for no limit."""
        return None if self.store_limit.lower() == "none" else size_bytes(self.store_limit) or None

    @property
    def store_root(self) -> Path:
        """The store's directory."""
        return Path(self.store).expanduser() if self.store else default_root()


def default_root() -> Path:
    """$TROPISM_STORE, else tropism/store in the user's cache directory."""
    if named := os.environ.get("TROPISM_STORE"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tropism" / "store"


class ReferenceOptions(StoreOptions):
    """Which model the policy is held close to."""

    heading: ClassVar[str] = "Method"

    reference: Everyday[str | None] = None
    """Reference model, or `live`. A model is a directory, Hub id or GGUF file; `live` keeps a copy of the initial
    policy in memory instead of storing its scores. Default: the policy before step 1."""
    allow_reference_mismatch: bool = False
    """Train even if policy and default reference differ before step 1. Otherwise a difference beyond rounding stops
    the run, since the two should be the same model."""


class TeacherOptions(StoreOptions):
    """Which teacher to distill from, and how. Without a teacher none of these has an effect."""

    heading: ClassVar[str] = "Teacher"

    teacher: Everyday[str | None] = None
    """Teacher model with the same tokenizer. A directory, Hub id or GGUF file."""
    kd_weight: Everyday[float | None] = Field(None, ge=0.0, le=1.0)
    """Weight of the divergence from the teacher, 0 to 1. `tropism kd` minimizes (1 - kd_weight) x cross-entropy +
    kd_weight x divergence. The other methods add kd_weight x divergence to their loss. Default: 0.5."""
    divergence: Literal["forward_kl", "reverse_kl", "js", "skew", "tvd"] | None = None
    """Divergence from the teacher. Default: forward_kl."""
    divergence_mix: float | None = Field(None, gt=0.0, lt=1.0)
    """Teacher's share in the mixture of `js` and `skew`, between 0 and 1. Default: 0.5 (`js`), 0.1 (`skew`)."""
    temperature: float | None = Field(None, gt=0.0)
    """Softmax temperature T of teacher and student. Default: 1."""
    temperature_scaling: bool | None = None
    """Multiply the divergence by T^2, which preserves the scale of its gradient. Default: true."""
    top_k: int | None = Field(None, ge=1)
    """Store the teacher's k most likely tokens instead of keeping the teacher in memory. The probability mass of the
    other tokens is stored too. Default: exact, with the teacher in memory."""


class ParallelOptions(Options):
    """How the model is divided among the processes that torchrun starts. The result does not depend on it."""

    heading: ClassVar[str] = "Parallelism"

    shard: Everyday[Annotated[int, Field(ge=1)] | Literal["auto", "on", "off"]] = "auto"
    """Processes that share a training state (FSDP). The state is weights, gradients and optimizer state. `on` shares
    it among all, and `off` or 1 keeps a full copy in each. `auto` is `off` if full copies fit without smaller packs."""
    replicate: int | None = Field(None, ge=1)
    """Copies of the sharded model (HSDP). Gradients are summed across copies once per optimizer step. Default: 1, or
    with `--parallel.shard` as many as use all processes."""
    tensor: int = Field(1, ge=1)
    """Processes that compute each layer together (tensor parallel). Uses the model's own plan. Must divide the
    number of heads and the vocabulary size."""
    offload: bool = False
    """Keep weights, gradients and optimizer state in host memory. Each layer is moved to the GPU when it is
    needed."""
    reduce_once: bool = False
    """Sum gradients over processes once per optimizer step, not after each pack. This saves communication, but each
    process then holds all gradients."""

    @field_validator("shard", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        """Accept null in YAML, as earlier versions wrote it, and a boolean, as YAML reads `on` and `off`."""
        return "auto" if value is None else {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @property
    def given_shard(self) -> int | None:
        """The size of `shard`; None if it is what the other sizes leave."""
        return self.shard if isinstance(self.shard, int) else 1 if self.shard == "off" else None

    @property
    def may_copy(self) -> bool:
        """Whether each process keeps a full copy if it fits."""
        return self.shard == "auto" and self.tensor == 1 and not (self.offload or self.reduce_once)

    def sizes(self, world: int) -> tuple[int, int, int]:
        """(replicate, shard, tensor) for a number of processes, where `auto` is `on`.

        Raises:
            UsageError: if their product is another number.
        """
        given = self.given_shard
        replicate = self.replicate or (max(1, world // (given * self.tensor)) if given else 1)
        shard = given or max(1, world // (replicate * self.tensor))
        if replicate * shard * self.tensor != world:
            more = ". Start more with torchrun." if world == 1 else ""
            raise UsageError(f"--parallel.shard {shard} x --parallel.replicate {replicate} x --parallel.tensor "
                             f"{self.tensor} does not equal the number of processes, {world}{more}")
        return replicate, shard, self.tensor


class ModelOptions(Options):
    """Which model is trained."""

    heading: ClassVar[str] = "Optimization"

    model: str
    """Model to train: a directory, Hub id (or ID@REVISION) or GGUF file."""
    trust_remote_code: bool = False
    """Run Python code that comes with a model. Must be passed with each command: a YAML file cannot allow it."""


class OptimizationOptions(Options):
    """How the model is trained and computed."""

    heading: ClassVar[str] = "Optimization"

    batch_size: Everyday[int] = Field(32, ge=1)
    """Rows per optimizer step, over all processes. A row is a labeled completion (`kto`, where the loss `kto` needs at
    least 2), a pair (`dpo`) or a completion (`sft`, `kd`)."""
    epochs: Everyday[int] = Field(1, ge=1)
    """Number of passes over the data."""
    max_steps: Everyday[int | None] = Field(None, ge=1)
    """Number of optimizer steps; overrides `--epochs`. The data is repeated as often as needed."""
    learning_rate: Everyday[float] = Field(1e-6, ge=0.0)
    """Peak learning rate. If the run trains an adapter, the default is 1e-4."""
    schedule: Schedule = "linear"
    """Learning-rate schedule after warmup, by its name in transformers. `cosine_with_min_lr` decays to a tenth of the
    peak."""
    warmup_ratio: float = Field(0.1, ge=0.0, le=1.0)
    """Share of the optimizer steps used for linear warmup. Warmup step k of w uses k/w of the peak, so no step has
    rate 0."""
    optimizer: Literal["adamw", "adamw8bit", "paged-adamw8bit", "sgd"] = "adamw"
    """AdamW with betas 0.9 and 0.999 and eps 1e-8, or plain SGD. `adamw8bit` stores the moments of large matrices in 8
    bits (about 2 bytes per weight instead of 8), `paged-adamw8bit` also moves them to the host if the GPU is full."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Weight decay of matrices. Norms and biases are not decayed. AdamW decouples it from the gradient."""
    max_grad_norm: float = Field(1.0, ge=0.0)
    """Maximum global norm of the gradient; larger gradients are clipped. 0 turns clipping off."""
    router_aux_weight: float = Field(0.0, ge=0.0)
    """Weight of the load-balancing loss, for mixture-of-experts models. Computed over the tokens of the whole
    optimizer step (Switch Transformer, arXiv:2101.03961, as in transformers for Mixtral and Qwen-MoE)."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Action on a non-finite loss, log-prob or gradient: stop the run or skip the step. The update is not applied in
    either case. Ten skipped steps in a row stop the run."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Random seed for row order and adapter initialization."""
    precision: Everyday[Literal["auto", "fp32", "bf16", "fp64"]] = "auto"
    """Compute dtype; auto is bf16 on GPUs and fp32 on CPUs. Weights and optimizer state stay float32 (float64 with
    fp64)."""

class ComputeOptions(Options):
    """How steps are computed. No result depends on it beyond rounding."""

    heading: ClassVar[str] = "Memory and speed"

    layout: Literal["auto", "tree", "padded"] = "auto"
    """Batch layout: `tree` computes each prompt once, `padded` once per completion. `auto` uses the tree if a
    comparison at startup shows that it is exact for the model."""
    microbatch_tokens: Everyday[Annotated[int, Field(ge=1)] | Literal["auto"]] = "auto"
    """Maximum tokens in a forward and backward pass. `auto` takes what fits into memory, at most 2048 on a CPU and
    32768 on a GPU. The result does not depend on it."""
    checkpointing: Literal["auto", "none", "selective", "full"] = "auto"
    """Compute activations again in the backward pass instead of keeping them: `full` keeps only the input of each
    layer, `selective` also its matrix products. `auto` does so only if memory would not suffice. The result does not
    depend on it."""
    offload_checkpoints: bool = False
    """Keep what `--checkpointing full` keeps in host memory."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile each layer of the model. `auto` compiles on GPUs if the run is long enough to gain from it."""
    memory_limit: str | None = None
    """Memory that a process may use, such as 20GiB. Default: what is free at the start on the GPU, or available on
    the machine."""
    profile: int | None = Field(None, ge=1)
    """Number of optimizer steps to profile: where their time goes, as a table, and RUN/profile.json for Perfetto."""
    prefetch: int = Field(0, ge=0)
    """Number of threads that prepare the next optimizer steps during training. The result does not depend on it."""

    @field_validator("microbatch_tokens", mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        """Accept null in YAML, as earlier versions wrote it."""
        return "auto" if value is None else value

    @field_validator("memory_limit", mode="before")
    @classmethod
    def _limit(cls, value: Any) -> Any:
        """Accept a number of bytes."""
        return None if value is None else check_size(str(value).strip())


class EvaluationOptions(Options):
    """When and how the run is evaluated."""

    heading: ClassVar[str] = "Evaluation"

    eval_every: Everyday[int | str | None] = None
    """Evaluation interval: steps (50), epochs (0.25ep) or time (30min). 0 evaluates only at start and end. Default: a
    tenth of the run."""
    eval_limit: int | None = Field(None, ge=1)
    """Maximum number of evaluation rows. They are spread evenly over the data and the same every time. Default:
    all."""
    samples: int = Field(4, ge=0)
    """Number of held-out prompts to complete before and after training. Training prompts are used if none are held
    out. 0 turns it off."""
    sample_every: int | str | None = None
    """Sampling interval: steps (100), epochs (0.5ep) or time (1h). The prompts of `--samples` are also completed in the
    course of training. Default: only before and after."""
    evaluator: str | None = None
    """Function that adds metrics to each evaluation, as module:function. It is called with (model, tokenizer, rows) and
    returns {metric: value}. Several are separated by commas; `none` turns those of a resumed run off. Must be passed
    with each command: a YAML file cannot name code."""
    stop_metric: str | None = None
    """Evaluation metric for early stopping, such as loss or rewards/auc. The run stops when it no longer improves. A
    metric of an evaluator is named with its better side, such as accuracy:max."""
    stop_patience: int | None = Field(None, ge=1)
    """Number of evaluations in a row without improvement after which the run stops. Default: 3."""
    stop_delta: float | None = Field(None, ge=0.0)
    """Smallest change of `--stop-metric` that counts as an improvement. Default: 0."""


class CheckpointOptions(Options):
    """What is saved, and when."""

    heading: ClassVar[str] = "Checkpoints"

    save_every: Everyday[int | str | None] = None
    """Checkpoint interval: steps (500), epochs (1ep) or time (30min). The last step is saved too. Default: only when
    stopped."""
    keep: int = Field(2, ge=0)
    """Number of newest checkpoints to keep. 0 keeps all."""
    keep_best: str | None = None
    """Evaluation metric that selects the best checkpoint, such as loss or rewards/auc. That checkpoint is also kept. A
    metric of an evaluator is named with its better side, such as accuracy:max."""
    checkpoint_model: bool = False
    """Also write the model to every checkpoint, in Hugging Face format."""
    max_time: Everyday[str | None] = None
    """Time limit (3h, 90min, 1h30min) from the start of the command. The run evaluates, saves a checkpoint
    and exits with code 75 before it is reached."""
    resume: Everyday[str] = "never"
    """Resume a run: `auto`, `never`, or the path of a run. `auto` resumes the run in `--output` if there is one;
    `never` stops if there is one. A path may also name a checkpoint."""
    fall_back: bool = False
    """If the newest checkpoint is corrupted, resume from the newest intact one. Requires `--resume`."""
    export_dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Dtype of the saved model. If weights are rounded, the log reports the share of trained changes that survive."""


class TrackingOptions(Options):
    """What is logged, and where."""

    heading: ClassVar[str] = "Tracking"

    track: Everyday[str | None] = None
    """Trackers, comma-separated, such as tensorboard or wandb. Also trackio, mlflow, comet_ml, aim, clearml, dvclive,
    swanlab, and those that an installed package registers under the entry point `tropism.trackers`."""
    log_every: int | str = 1
    """Logging interval: steps (1), epochs (0.1ep) or time (30s). Each entry is one line of metrics.jsonl."""
    log_dir: str | None = None
    """Directory for tracker files. Default: RUN/logs."""
    report: bool = True
    """Write RUN/report.html at the end, if matplotlib is installed. The environment variable TROPISM_NO_REPORT turns it
    off for all runs."""


class RunOptions(TrackingOptions, CheckpointOptions, EvaluationOptions, ComputeOptions, OptimizationOptions,
                 ModelOptions):
    """Which model, how to train it, where the result goes."""

    heading: ClassVar[str] = "Checkpoints"

    output: str
    """Run directory: new or empty, unless you resume the run in it."""
    lora: LoraOptions = LoraOptions()
    """Adapters."""
    parallel: ParallelOptions = ParallelOptions()
    """Several processes."""

    @field_validator("eval_every", "log_every", "sample_every", "save_every", mode="before")
    @classmethod
    def _interval(cls, value: Any) -> Any:
        """Make a number of steps an int; epochs and time stay text."""
        if value is None or isinstance(value, bool):
            return value
        found = Interval.parse(value)
        return int(found.every) if found.unit == "steps" else str(value).strip()

    @field_validator("log_every", "sample_every", "save_every")
    @classmethod
    def _not_never(cls, value: int | str | None) -> int | str | None:
        if value == 0:
            raise ValueError("must be at least 1 step (got 0)")
        return value

    @field_validator("max_time", mode="before")
    @classmethod
    def _time(cls, value: Any) -> Any:
        if value is not None and not seconds_of(str(value)):
            raise ValueError(f"{value!r} is not a duration. Use 90s, 30min, 3h or 1h30min.")
        return value

    @property
    def max_seconds(self) -> float | None:
        """`max_time` in seconds."""
        return None if self.max_time is None else seconds_of(self.max_time)
