"""The frozen models of a run: where they come from, and how the policy is held against them."""

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tropism.data.tree import PromptTree
from tropism.distributed.shard import Sharding, is_sharded, let_go
from tropism.distributed.world import World
from tropism.errors import ModelError, UsageError
from tropism.model import load
from tropism.model import moe_router as router
from tropism.model.adapters.peft_module import inner
from tropism.model.bf16_weights import round_to_bf16
from tropism.model.config import check_architecture, dropout_of
from tropism.model.language_model import LanguageModel, Precision
from tropism.model.layout_check import Layout, choose_layout
from tropism.model.load_sharded import load_sharded
from tropism.model.source import ModelSource
from tropism.observe.console import Voice
from tropism.train.frozen import reference as references
from tropism.train.frozen import teacher as teachers
from tropism.train.options import ParallelOptions, TeacherOptions
from tropism.train.preemption import Preemption

ModelOrModule = ModelSource | Any
"""A model by its name, or the module itself."""


@dataclass(frozen=True)
class Numerics:
    """How every model of a run computes.

    Args:
        precision: of the run.
        device: where the models live.
        microbatch_tokens: tokens of a pack.
        trust_remote_code: run code that comes with a model.
        world: the processes of the run.
        spreading: how models are spread over them; None where each process has a whole copy.
        sum_once: sum gradients over processes after the last pack of a step only.
    """

    precision: Precision
    device: torch.device
    microbatch_tokens: int
    trust_remote_code: bool = False
    world: World | None = None
    spreading: Sharding | None = None
    sum_once: bool = False

    def module(self, named: ModelOrModule, change: Callable[[Any], None] = lambda module: None) -> Any:
        """The module in evaluation mode, with the weights' dtype of the precision, on the device.

        A module that was given is changed in place, so that an optimizer that holds its weights goes on holding them.

        Args:
            change: called with a model that is to be spread over processes, as `load_sharded` says.
        """
        if isinstance(named, ModelSource):
            if self.spreading is not None and self.world is not None:
                return load_sharded(named, self.precision, self.world, self.spreading,
                                    trust_remote_code=self.trust_remote_code, change=change)
            return load.load_model(named, self.precision, self.device, trust_remote_code=self.trust_remote_code)
        check_architecture(named.config)
        return named.to(device=self.device, dtype=load.weights_dtype(self.precision)).eval()

    def frozen(self, named: ModelOrModule, probes: Sequence[PromptTree], layout: Layout | Literal["auto"],
               name: str) -> LanguageModel:
        """A model that does not learn, in a layout that is exact for it.

        Raises:
            ModelError: beginning with `name`, if there is none.
        """
        return self.settled(self.module(named), isinstance(named, ModelSource), probes, layout, name)

    def settled(self, module: Any, own: bool, probes: Sequence[PromptTree], layout: Layout | Literal["auto"],
                name: str) -> LanguageModel:
        """A module that does not learn any more, in a layout that is exact for it.

        Args:
            own: nobody else holds it, so that its weights may be held in fewer bytes.

        Raises:
            ModelError: beginning with `name`, if there is none.
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
        return model


def given(module: Any, name: str) -> Any:
    """A frozen model that came as a module: of a PeftModel the causal model in it, with its adapter.

    Raises:
        ModelError: for an adapter that is not served.
    """
    return module if module is None else inner(module, f"the {name} that was given")


def numerics_of(options: Any, world: World) -> Numerics:
    """What `auto` means on this machine.

    Args:
        options: with `precision`, `microbatch_tokens` and `trust_remote_code`.
    """
    cuda = world.device.type == "cuda"
    parallel = getattr(options, "parallel", None)
    precision: Precision = options.precision if options.precision != "auto" else "bf16" if cuda else "fp32"
    return Numerics(precision, world.device, options.microbatch_tokens or (16384 if cuda else 2048),
                    options.trust_remote_code, world, _spreading(parallel, precision, world),
                    parallel is not None and parallel.reduce_once)


def _spreading(parallel: ParallelOptions | None, precision: Precision, world: World) -> Sharding | None:
    if world.mesh is None or parallel is None:
        return None
    return Sharding(world.mesh, torch.bfloat16 if precision == "bf16" else None, parallel.offload)


def config_of(named: ModelOrModule, trust_remote_code: bool) -> Any:
    """The config of a model, which is not loaded for it."""
    if isinstance(named, ModelSource):
        return load.load_config(named, trust_remote_code=trust_remote_code)
    return named.config


def turned_off(config: Any, router_aux_weight: float) -> list[str]:
    """What a config asks for and training leaves out, a sentence each."""
    notes = []
    if dropout := dropout_of(config):
        listed = ", ".join(f"{name} {rate}" for name, rate in dropout.items())
        notes.append(f"dropout is off (the config asks for {listed})")
    if asked := router.coefficient_of(config) if not router_aux_weight else None:
        notes.append(f"the routers' load-balancing loss is off (the config has router_aux_loss_coef {asked:g}); "
                     f"{router.OPTION} turns it on")
    return notes


def tokenizer_of(named: ModelOrModule, name: str, own: Any, trust_remote_code: bool) -> None:
    """Check that a model by name gives every id the policy's token; a module brings no tokenizer to check.

    Raises:
        ModelError: naming the first id that differs.
    """
    if isinstance(named, ModelSource):
        references.check_vocabulary(load.load_tokenizer(named, trust_remote_code=trust_remote_code), own, name)


def check_teacher(named: ModelOrModule | None, config: Any, tokenizer: Any, top_k: int | None,
                  trust_remote_code: bool) -> None:
    """Find out before a model is loaded whether a student can be compared with its teacher.

    Args:
        named: the teacher; None if there is none.
        config: the student's.
        tokenizer: of the student.
        top_k: how many of the teacher's tokens are to be kept.

    Raises:
        ModelError: naming the first id that differs, or if a head has no room for the tokens.
        UsageError: if k is not below the vocabulary.
    """
    if named is None:
        return
    tokenizer_of(named, "teacher", tokenizer, trust_remote_code)
    other = config_of(named, trust_remote_code)
    vocabulary = teachers.shared_vocabulary(tokenizer)
    rows = min(entry.get_text_config().vocab_size for entry in (config, other))
    if rows < vocabulary:
        raise ModelError(f"the tokenizer has ids up to {vocabulary - 1}, and the smaller of the two heads only {rows} "
                         "rows; student and teacher need one tokenizer")
    if top_k is not None and top_k >= vocabulary:
        raise UsageError(f"top_k {top_k}: the vocabulary has {vocabulary} tokens; leave top_k out for the exact "
                         "divergence")


def build_reference(policy: LanguageModel, named: ModelOrModule | None, trees: list[PromptTree],
                    probes: Sequence[PromptTree], numerics: Numerics, store: Path, world: World,
                    voice: Voice, preemption: Preemption,
                    as_reference: Callable[[Any], AbstractContextManager[None]]) -> references.Reference:
    """Stored scores of the policy as it is now, or of another model.

    Args:
        named: another model.
        trees: every (prompt, completion) that will be asked for.
        probes: as `choose_layout` takes them.
        preemption: may stop the pass.
        as_reference: inside of it a module is what the policy's reference is.
    """
    frozen = policy if named is None else numerics.frozen(named, probes, "auto", "reference")
    with voice.bar("reference") as report, as_reference(policy.module):
        built = references.build(frozen, trees, numerics.microbatch_tokens, store, world,
                                 preemption.interruptible(report))
    _tell_damaged(built.damaged, "reference", voice)
    if is_sharded(frozen.module) and named is not None:
        let_go(frozen.module)
        del frozen
        gc.collect()  # a sharded module is a ring of references, and would stay through the first step
    return built


def build_teacher(policy: LanguageModel, named: ModelOrModule, options: TeacherOptions, tokenizer: Any,
                  trees: list[PromptTree], probes: Sequence[PromptTree], numerics: Numerics, store: Path,
                  world: World, voice: Voice, preemption: Preemption) -> teachers.Teacher:
    """A teacher in memory, or its likeliest tokens from the store."""
    model = numerics.frozen(named, probes, "auto", "teacher")
    rows = [len(one.module.get_output_embeddings().weight) for one in (policy, model)]
    vocabulary = teachers.shared_vocabulary(tokenizer, *rows)
    comparison = teachers.compare_as(options, vocabulary)
    voice.say(f"teacher: {teachers.describe(options)}"
              + (f"; columns beyond the {vocabulary} tokens of the tokenizer are left out on both sides"
                 if max(rows) > vocabulary else ""))
    if options.top_k is None:
        return teachers.LiveTeacher(model, comparison)
    with voice.bar("teacher") as report:
        built = teachers.build(model, trees, options, comparison, numerics.microbatch_tokens, store, world, voice.say,
                               preemption.interruptible(report))
    _tell_damaged(built.store.damaged, "teacher", voice)
    if is_sharded(model.module):
        let_go(model.module)
        del model
        gc.collect()  # as above
    return built


def take_weights(module: Any, directory: Path, numerics: Numerics, world: World) -> None:
    """Overwrite the weights of a module with those of a model directory. All ranks call this together.

    Raises:
        ModelError: if they are not of the same shapes and names.
    """
    def load_them() -> None:
        try:
            module.load_state_dict(numerics.module(ModelSource.of(str(directory))).state_dict())
        except RuntimeError as error:
            raise ModelError(f"{directory}: does not fit the module that was given: "
                             f"{' '.join(str(error).split())}") from error

    if world.mesh is not None:
        world.together(load_them)  # each its part
        return
    world.on_main(load_them)
    world.broadcast_into(module.state_dict().values())


def _tell_damaged(files: Sequence[Path], what: str, voice: Voice) -> None:
    if files:
        voice.warn(f"{len(files)} damaged files of the {what} store were left out and their content computed again "
                   f"(first {files[0]})")
