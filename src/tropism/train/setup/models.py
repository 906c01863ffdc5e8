"""The frozen models of a run: how they are loaded and checked, and how reference and teacher are built."""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tropism.data.tree import PromptTree
from tropism.distributed.passes import let_go
from tropism.distributed.shard import Sharding, is_sharded
from tropism.distributed.world import World
from tropism.errors import ModelError, ReferenceMismatchError, UsageError, count_of
from tropism.model import load
from tropism.model import moe_router as router
from tropism.model.adapters.files import GGUF_BASE
from tropism.model.adapters.peft_module import inner
from tropism.model.bf16_weights import round_to_bf16
from tropism.model.config import check_architecture, dropout_of
from tropism.model.cpu_products import Products, use_products
from tropism.model.finite_weights import check_finite
from tropism.model.generation import corrected, read_generation
from tropism.model.language_model import LanguageModel, Precision
from tropism.model.layout_check import Layout, choose_layout
from tropism.model.load_sharded import load_sharded
from tropism.model.options import LoraOptions
from tropism.model.source import ModelSource
from tropism.observe.console import Voice
from tropism.train.frozen import reference as references
from tropism.train.frozen import teacher as teachers
from tropism.train.frozen.sample import Sample, sample_reference, sample_teacher
from tropism.train.frozen.score_store import ScoreStore
from tropism.train.frozen.topk_store import TopKStore
from tropism.train.frozen.write_store import advice
from tropism.train.options import ParallelOptions, TeacherOptions
from tropism.train.preemption import Preemption
from tropism.train.score_packs import PlaceOf

ModelOrModule = ModelSource | Any
"""A model by its name, or a module."""


@dataclass(frozen=True)
class Numerics:
    """Dtype, device and sharding of all models of a run.

    Args:
        precision: of the run.
        device: of the models.
        microbatch_tokens: tokens of a pack without gradients.
        trust_remote_code: run code that comes with a model.
        world: the processes of the run.
        spreading: how models are sharded over them; None if each process holds a full copy.
        sum_once: sum gradients over processes only after the last pack of a step.
        products: library of the matrix products of linear layers on a CPU.
    """

    precision: Precision
    device: torch.device
    microbatch_tokens: int
    trust_remote_code: bool = False
    world: World | None = None
    spreading: Sharding | None = None
    sum_once: bool = False
    products: Products = "mkl"

    def module(self, named: ModelOrModule, change: Callable[[Any], None] = lambda module: None) -> Any:
        """The module in evaluation mode, on the device, with weights in the dtype of the precision.

        A module from the user is changed in place, so that its optimizer still holds its weights.

        Args:
            change: called with a model before it is sharded; see `load_sharded`.
        """
        if isinstance(named, ModelSource):
            if self.spreading is not None and self.world is not None:
                return load_sharded(named, self.precision, self.world, self.spreading,
                                    trust_remote_code=self.trust_remote_code, change=change)
            return load.load_model(named, self.precision, self.device, trust_remote_code=self.trust_remote_code)
        check_architecture(named.config)
        check_finite(named.named_parameters(), f"the {type(named).__name__} that was passed as a module")
        return named.to(device=self.device, dtype=load.weights_dtype(self.precision)).eval()

    def frozen(self, named: ModelOrModule, probes: Sequence[PromptTree], layout: Layout | Literal["auto"],
               name: str) -> LanguageModel:
        """A model that does not learn, in a layout that is exact for it.

        Raises:
            ModelError: starting with `name`, if no layout is exact.
        """
        return self.settled(self.module(named), isinstance(named, ModelSource), probes, layout, name)

    def settled(self, module: Any, own: bool, probes: Sequence[PromptTree], layout: Layout | Literal["auto"],
                name: str) -> LanguageModel:
        """A module, frozen, in a layout that is exact for it.

        Args:
            own: the user does not hold the module, so its weights may be rounded to fewer bytes.

        Raises:
            ModelError: starting with `name`, if no layout is exact.
        """
        module.requires_grad_(False)
        narrows = own and self.precision == "bf16"
        if narrows and is_sharded(module):
            round_to_bf16(module)
        try:
            model = replace(choose_layout(module, self.precision, self.device, probes, layout)[0], stays=True)
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from None
        if narrows and not is_sharded(module):
            round_to_bf16(module)
        use_products(module, self.products)
        return model


def given(module: Any, name: str) -> Any:
    """A frozen model from the user's module. For a PeftModel it is the causal model inside, with its adapter.

    Raises:
        ModelError: for an unsupported adapter.
    """
    return module if module is None else inner(module, f"the {name} module")


def numerics_of(options: Any, world: World) -> Numerics:
    """Resolve `auto` for this machine.

    Args:
        options: with `precision`, `microbatch_tokens` and `trust_remote_code`.
    """
    cuda = world.device.type == "cuda"
    parallel = getattr(options, "parallel", None)
    precision: Precision = options.precision if options.precision != "auto" else "bf16" if cuda else "fp32"
    tokens = (16384 if cuda else 2048) if options.microbatch_tokens == "auto" else options.microbatch_tokens
    return Numerics(precision, world.device, tokens,
                    options.trust_remote_code, world, _spreading(parallel, precision, world),
                    parallel is not None and parallel.reduce_once)


def _spreading(parallel: ParallelOptions | None, precision: Precision, world: World) -> Sharding | None:
    if world.mesh is None or parallel is None:
        return None
    return Sharding(world.mesh, torch.bfloat16 if precision == "bf16" else None, parallel.offload)


def config_of(named: ModelOrModule, trust_remote_code: bool) -> Any:
    """The config of a model, without loading the model."""
    if isinstance(named, ModelSource):
        return load.load_config(named, trust_remote_code=trust_remote_code)
    return named.config


def generation_notes(model: ModelOrModule) -> list[str]:
    """What is corrected in the generation config of the policy, before training instead of when it is saved."""
    if isinstance(model, ModelSource):
        return [] if model.gguf_file else read_generation(model.name, model.revision)[1]
    generation = getattr(model, "generation_config", None)
    if generation is None:
        return []
    model.generation_config, notes = corrected(generation)
    return notes


def gguf_notes(model: ModelOrModule, lora: LoraOptions) -> list[str]:
    """A sentence about how the result can be served, if an adapter is trained on a GGUF file."""
    trains_adapter = lora.rank is not None or lora.adapter is not None
    return [f"{GGUF_BASE}."] if trains_adapter and isinstance(model, ModelSource) and model.gguf_file else []


def turned_off(config: Any, router_aux_weight: float) -> list[str]:
    """A sentence for each setting of the config that training ignores."""
    notes = []
    if dropout := dropout_of(config):
        listed = ", ".join(f"{name} {rate}" for name, rate in dropout.items())
        notes.append(f"dropout is off (the config sets {listed})")
    if asked := router.coefficient_of(config) if not router_aux_weight else None:
        notes.append(f"the routers' load-balancing loss is off, although the config sets router_aux_loss_coef "
                     f"{asked:g}. To use it, pass {router.OPTION} {asked:g}")
    return notes


def tokenizer_of(named: ModelOrModule, name: str, own: Any, trust_remote_code: bool) -> None:
    """Check that a model by name has the policy's token for every id. A module has no tokenizer to check.

    Raises:
        ModelError: for the first id that differs.
    """
    if isinstance(named, ModelSource):
        references.check_vocabulary(load.load_tokenizer(named, trust_remote_code=trust_remote_code), own, name)


def check_teacher(named: ModelOrModule | None, config: Any, tokenizer: Any, top_k: int | None,
                  trust_remote_code: bool) -> None:
    """Check before a model is loaded that the student can be compared with its teacher.

    Args:
        named: the teacher; None if there is none.
        config: the student's.
        tokenizer: of the student.
        top_k: number of the teacher's tokens to store.

    Raises:
        ModelError: for the first id that differs, or if an output head has fewer rows than the tokenizer has tokens.
        UsageError: if k is not below the vocabulary.
    """
    if named is None:
        return
    tokenizer_of(named, "teacher", tokenizer, trust_remote_code)
    other = config_of(named, trust_remote_code)
    vocabulary = teachers.shared_vocabulary(tokenizer)
    rows = min(entry.get_text_config().vocab_size for entry in (config, other))
    if rows < vocabulary:
        raise ModelError(f"the tokenizer has token ids up to {vocabulary - 1}, but the output head of student or "
                         f"teacher has only {rows} rows. Both need the same tokenizer.")
    if top_k is not None and top_k >= vocabulary:
        raise UsageError(f"--top-k {top_k} must be less than the vocabulary size, {vocabulary} tokens. For the exact "
                         "divergence, omit --top-k.")


def build_reference(policy: LanguageModel, named: ModelOrModule | None, trees: list[PromptTree],
                    probes: Sequence[PromptTree], numerics: Numerics, store: Path, world: World,
                    voice: Voice, preemption: Preemption, place: PlaceOf,
                    as_reference: Callable[[Any], AbstractContextManager[None]],
                    forgive: bool | None = False) -> references.Reference:
    """Stored scores of the policy before step 1, or of another model.

    Args:
        named: the other model; None for the policy.
        trees: every (prompt, completion) that the run will score.
        probes: as in `choose_layout`.
        preemption: may stop the pass.
        place: names the row of a completion, for errors.
        as_reference: context in which the policy's module is its reference.
        forgive: use stored scores that differ from the model's; None if the user cannot ask for that.

    Raises:
        ReferenceMismatchError: if stored scores cannot be used, or a score is not a log-prob.
    """
    with preemption.at_once():
        frozen = policy if named is None else numerics.frozen(named, probes, "auto", "reference")
    with as_reference(policy.module):
        with voice.bar("reference scores") as report:
            built = references.build(frozen, trees, numerics.microbatch_tokens, store, world,
                                     preemption.interruptible(report), place)
        sample = sample_reference(frozen, built, trees, numerics.microbatch_tokens, world)
    _judge(sample, "reference", len(built.stored), f"{count_of(len(built.scores), 'score')}", built.store, place, voice,
           forgive if named is None else None)
    built.stored = ()
    if built.unsaved:
        voice.warn(f"{built.unsaved}. The new scores are used, but not kept. To keep them, choose another place with "
                   "--store.")
    if is_sharded(frozen.module) and named is not None:
        let_go(frozen.module)
        del frozen
        gc.collect()  # a sharded module has reference cycles, and would stay in memory through the first step
    return built


def build_teacher(policy: LanguageModel, named: ModelOrModule, options: TeacherOptions, tokenizer: Any,
                  trees: list[PromptTree], probes: Sequence[PromptTree], numerics: Numerics, store: Path,
                  world: World, voice: Voice, preemption: Preemption,
                  place: Callable[[PromptTree], str]) -> teachers.Teacher:
    """A teacher in memory, or its most likely tokens from the store.

    Raises:
        ReferenceMismatchError: if stored tokens cannot be used.
    """
    with preemption.at_once():
        model = numerics.frozen(named, probes, "auto", "teacher")
    rows = [len(one.module.get_output_embeddings().weight) for one in (policy, model)]
    vocabulary = teachers.shared_vocabulary(tokenizer, *rows)
    comparison = teachers.compare_as(options, vocabulary)
    voice.say(f"teacher: {teachers.describe(options)}"
              + (f"; output columns beyond the tokenizer's {vocabulary} tokens are ignored in both models"
                 if max(rows) > vocabulary else ""))
    if options.top_k is None:
        return teachers.LiveTeacher(model, comparison)
    with voice.bar("teacher") as report:
        built = teachers.build(model, trees, options, comparison, numerics.microbatch_tokens, store, world, voice.say,
                               preemption.interruptible(report), place)
    sample = sample_teacher(model, built, trees, numerics.microbatch_tokens, options.top_k, world)
    _judge(sample, "teacher", len(built.stored), count_of(built.completions, "completion"), built.store, place, voice)
    built.stored = ()
    if is_sharded(model.module):
        let_go(model.module)
        del model
        gc.collect()  # as above
    return built


def take_weights(module: Any, directory: Path, numerics: Numerics, world: World) -> None:
    """Overwrite the weights of a module with those of a model directory. All processes call this together.

    Raises:
        ModelError: if names or shapes differ.
    """
    def load_them() -> None:
        try:
            module.load_state_dict(numerics.module(ModelSource.of(str(directory))).state_dict())
        except RuntimeError as error:
            raise ModelError(f"{directory}: its weights do not fit the module that was passed as model: "
                             f"{' '.join(str(error).split())}") from error

    if world.mesh is not None:
        world.together(load_them)  # each process loads its part
        return
    world.on_main(load_them)
    world.broadcast_into(module.state_dict().values())


def _judge(sample: Sample, what: str, stored: int, needed: str, store: ScoreStore | TopKStore,
           place: Callable[[PromptTree], str], voice: Voice, forgive: bool | None = None) -> None:
    """Report what came from the store, and stop if it is not what the model gives.

    Args:
        stored: number of scores that were in the store.
        needed: how many the run needs.
        forgive: continue anyway; None if the user cannot ask for that.

    Raises:
        ReferenceMismatchError: naming the first row that differs, and its file.
    """
    if store.damaged:
        voice.warn(f"the {what} store has {count_of(len(store.damaged), 'unusable file')} (first: "
                   f"{store.damaged[0]}): damaged, copied from elsewhere, or from an earlier version. Missing "
                   "scores were computed again.")
    if not stored:
        return
    heard = f"{what}: {stored:,} of {needed} from the store; {sample.count} recomputed in {sample.seconds:.1f} s"
    if not sample.differences:
        voice.say(f"{heard}, agree")
        return
    first = sample.differences[0]
    text = (f"{store.file_of(first.key)}: {place(first.tree)}: {first.text} ({len(sample.differences)} of "
            f"{sample.count} recomputed scores differ). Another user may have changed the store.")
    if forgive:
        voice.warn(text)
        return
    text += " To train anyway, pass --allow-reference-mismatch." if forgive is False else ""
    raise ReferenceMismatchError(f"{text} {advice(store.path.parent)}")
