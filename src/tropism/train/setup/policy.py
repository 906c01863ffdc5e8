"""Builds the policy of a run with its adapter, and determines its reference."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tropism.data.tree import PromptTree
from tropism.distributed.shard import is_sharded
from tropism.distributed.world import World
from tropism.errors import ModelError, UsageError, count_of
from tropism.model import load
from tropism.model import quantization as quantized
from tropism.model.adapters import files as adapter_files
from tropism.model.adapters import peft_module as given
from tropism.model.adapters import peft_settings as adapter_settings
from tropism.model.adapters import targets as adapter_targets
from tropism.model.adapters.create import make_structure, set_initial_values
from tropism.model.adapters.parameters import adapter_name, adapter_weight_names, saved_parameters
from tropism.model.adapters.summary import rank_warning, summarize
from tropism.model.adapters.switch import adapter_off
from tropism.model.base_weights import base_hash
from tropism.model.bf16_weights import round_to_bf16
from tropism.model.language_model import LanguageModel, Precision
from tropism.model.load_sharded import shard_quantized
from tropism.model.names import find_adapter
from tropism.model.options import LoraOptions
from tropism.model.source import ModelSource
from tropism.model.tied_weights import is_tied, ties
from tropism.observe.console import Voice
from tropism.train.frozen import reference as references
from tropism.train.setup import models
from tropism.train.setup.adapter_base import PASSED_MODULE, absolute_name, check_base, clear_unknown_base
from tropism.train.setup.models import ModelOrModule, Numerics


@dataclass(frozen=True)
class PolicyBuilder:
    """Builds the policy.

    Args:
        named: the base model, by its name or as a module.
        lora: options of a new adapter, or of one to start from. Without either they have no effect.
        directory: of the adapter to start from; None for a new one.
        held: the user's module already has an adapter, which is trained.
    """

    named: ModelOrModule
    lora: LoraOptions
    directory: Path | None = None
    held: bool = False

    @classmethod
    def of(cls, named: ModelOrModule, lora: LoraOptions, optimizer: Any, merge: bool = False) -> "PolicyBuilder":
        """The builder that the options ask for.

        Args:
            named: the policy, by its name or as a module. Either can have an adapter.
            optimizer: the user's optimizer object.
            merge: merge an adapter that is passed by name instead of training it.

        Raises:
            UsageError: for options that exclude each other.
            ModelError: if the directory holds no adapter or an unsupported one, or a package is missing.
        """
        if lora.quantize is not None:
            _check_quantize(named)
        if isinstance(named, ModelSource):
            if named.adapter is not None and lora.wanted:
                raise UsageError(f"--model {named.adapter} is an adapter, which is trained further. Remove --lora.rank "
                                 f"and --lora.adapter, or pass --model {named.base.absolute} with them.")
            if named.adapter is not None and not merge:
                return cls(named.base, lora, _checked(Path(named.adapter)))
        elif (name := adapter_name(inner := given.inner(named, PASSED_MODULE))) is not None:
            if lora.wanted:
                raise UsageError(f"{PASSED_MODULE} already has an adapter, which is trained further. Remove "
                                 "lora.rank and lora.adapter, or merge the adapter first.")
            adapter_settings.check_served(inner.peft_config[name], PASSED_MODULE)
            given.check_trainable(inner, PASSED_MODULE)
            return cls(inner, lora, held=True)
        if lora.wanted and optimizer is not None:
            raise UsageError("optimizer cannot hold the weights of a new adapter, which does not exist yet. Remove "
                             "optimizer, or pass a PeftModel and an optimizer over its weights.")
        if lora.adapter is None:
            return cls(named, lora)
        return cls(named, lora, _checked(find_adapter(lora.adapter).resolve()))

    @property
    def adapts(self) -> bool:
        """Whether an adapter is trained."""
        return self.lora.rank is not None or self.directory is not None or self.held

    @property
    def fresh(self) -> bool:
        """Whether the adapter is new, so that the policy before step 1 equals the base model."""
        return self.adapts and self.directory is None and not self.held

    def check(self, config: Any, trust_remote_code: bool, tensor: int = 1) -> None:
        """Check the adapter on a model without weights.

        Args:
            tensor: size of tensor parallelism.

        Raises:
            UsageError: for a target that no module has, or with tensor parallelism.
            ModelError: if the adapter does not fit.
        """
        if self.adapts and tensor > 1:
            raise UsageError("--parallel.tensor does not support adapters. Use --parallel.shard instead.")
        if not self.adapts or self.held:
            return
        by_name = isinstance(self.named, ModelSource)
        model = load.skeleton(config, trust_remote_code=trust_remote_code) if by_name else self.named
        its_config = self._config(model)
        adapter_targets.check_ends(model, its_config, str(self.directory or "lora.targets"))
        if by_name:
            make_structure(model, its_config)

    def skeleton(self, numerics: Numerics) -> Any:
        """The policy with its adapter on the meta device, with the dtypes that it has in a run. A module from the user
        is returned as it is."""
        if not isinstance(self.named, ModelSource):
            return self.named
        remote = numerics.trust_remote_code
        model = load.skeleton(load.load_config(self.named, trust_remote_code=remote),
                              dtype=load.weights_dtype(numerics.precision), trust_remote_code=remote)
        if self.adapts:
            make_structure(model, self._config(model))
        return model.eval()

    def module(self, numerics: Numerics, seed: int) -> Any:
        """The policy's module with its adapter, before step 1."""
        if not self.adapts:
            return numerics.module(self.named)
        module = self._adapted(numerics, seed)
        if self.lora.quantize is not None and numerics.spreading is not None:
            shard_quantized(module, numerics.spreading)
        return module

    def _adapted(self, numerics: Numerics, seed: int) -> Any:
        if self.lora.quantize is not None:
            module = load.load_model(self.named, numerics.precision, numerics.device, quantize=self.lora.quantize,
                                     trust_remote_code=numerics.trust_remote_code,
                                     plain=self.plain_names(numerics.trust_remote_code))
        elif self.held:
            module = numerics.module(self.named)
        else:
            module = numerics.module(self.named, lambda model: make_structure(model, self._config(model)))
        dtype = load.weights_dtype(numerics.precision)
        if self.held:
            _check_learning(module)
            config = module.peft_config[adapter_name(module)]
            adapter_files.name_base(config, self._base or absolute_name(config.base_model_name_or_path))
            return module
        if self.directory is not None:
            if is_sharded(module):
                adapter_files.load_values(module, self.directory)
            else:
                adapter_files.load_adapter(module, self._config(module), self.directory, dtype)
            return module
        if not is_sharded(module):
            make_structure(module, self._config(module))
        set_initial_values(module, seed, dtype)
        return module

    def round_weights(self, module: Any, precision: Precision, sharded: bool) -> None:
        """Round the frozen weights to bfloat16 if the run computes in it. Never rounds a module from the user.

        Args:
            sharded: round only if the module is sharded (True) or not (False). A sharded module is rounded before its
                first pass, another one after its layout was found exact.
        """
        if self.adapts and precision == "bf16" and isinstance(self.named, ModelSource) and is_sharded(
                module) is sharded:
            round_to_bf16(module)

    @contextmanager
    def as_reference(self, module: Any) -> Iterator[None]:
        """Context in which the module is the reference. A new adapter is switched off: the scores are then those of the
        base model, which runs share."""
        if not self.fresh:
            yield
            return
        with adapter_off(module):
            yield

    def live(self, policy: LanguageModel, probes: Sequence[PromptTree], numerics: Numerics,
             seed: int) -> references.Reference:
        """A live reference: the policy before step 1, in memory. All processes call this together.

        With a new adapter it is the policy's own base model. Otherwise it is a frozen copy, which shares the weights
        that do not learn. A sharded policy is loaded a second time instead.

        Raises:
            ModelError: as in `Numerics.settled`.
        """
        if self.fresh:
            return references.OffReference(policy)
        own = isinstance(self.named, ModelSource)
        if is_sharded(policy.module):
            return references.LiveReference(numerics.settled(self.module(numerics, seed), own, probes, policy.layout,
                                                             "reference"))
        copied = references.freeze(policy)
        if own and policy.precision == "bf16":
            round_to_bf16(copied.module)
        return references.LiveReference(copied)

    def fingerprint(self, model: LanguageModel) -> str:
        """Fingerprint of the policy before step 1."""
        with self.as_reference(model.module):
            return references.fingerprint(model)

    def take_result(self, module: Any, directory: Path, numerics: Numerics, world: World) -> None:
        """Overwrite the trainable weights of a module with the result of a run. All processes call this together.

        Raises:
            ModelError: if the weights do not fit.
        """
        if not self.adapts:
            models.take_weights(module, directory, numerics, world)
            return
        if is_sharded(module):
            world.together(lambda: adapter_files.load_values(module, directory))  # each process loads its part
            return
        world.on_main(lambda: adapter_files.load_values(module, directory))
        world.broadcast_into([weight.detach() for weight in saved_parameters(module)])

    def build(self, numerics: Numerics, seed: int, voice: Voice, is_reference: bool) -> tuple[Any, dict[str, Any]]:
        """The policy's module, and facts about its adapter for the manifest. Logs what is trained.

        Args:
            is_reference: the policy before step 1 is the reference.
        """
        module = self.module(numerics, seed)
        if isinstance(self.named, ModelSource) and not is_sharded(module) and not is_tied(module) and ties(
                load.load_config(self.named, trust_remote_code=numerics.trust_remote_code)):
            voice.warn(f"{self.named.name}: config.json ties embedding and output head, but the files hold two "
                       "different tables. They stay apart, and the result says tie_word_embeddings: false.")
        if not self.adapts:
            return module, {}
        facts = summarize(module)
        if not isinstance(self.named, ModelSource):
            clear_unknown_base(module, voice)
        voice.say(f"adapter: {facts}" + (f"; base weights in {self.lora.quantize}" if self.lora.quantize else ""))
        if note := rank_warning(module):
            voice.warn(note)
        if not self.fresh:
            origin = self.directory or "the adapter of the module that was passed as model"
            voice.say(f"  starts from {origin}" + ("; the reference is the model with this adapter before step 1"
                                                   if is_reference else ""))
        known = base_hash(module)
        if self.directory is not None:
            check_base(self.directory, self._base, known, voice)
        self.round_weights(module, numerics.precision, sharded=True)
        config = module.peft_config[adapter_name(module)]
        return module, {"adapter": asdict(facts), "adapter_config": adapter_files.values_of(config)} | (
            {} if known is None else {"base_weights": known})

    def plain_names(self, trust_remote_code: bool) -> list[str]:
        """Full names of the modules that are not quantized: those in peft's `modules_to_save`, and the output head."""
        config = load.load_config(self.named, trust_remote_code=trust_remote_code)
        model = load.skeleton(config, trust_remote_code=trust_remote_code)
        head = [name for name, layer in model.named_modules() if layer is model.get_output_embeddings()]
        make_structure(model, self._config(model))
        return head + [name for name, layer in model.named_modules() if hasattr(layer, "modules_to_save")]

    def _config(self, module: Any) -> Any:
        if self.directory is None:
            config = adapter_targets.new_config(module, self.lora, self._base)
        else:
            config = adapter_files.read_config(self.directory)
        adapter_files.name_base(config, self._base or absolute_name(config.base_model_name_or_path))
        return config

    @property
    def _base(self) -> str | None:
        """Name of the base model in the adapter's file; None for a module without an origin."""
        if isinstance(self.named, ModelSource):
            return self.named.absolute
        return absolute_name(getattr(self.named.config, "name_or_path", None))


def _checked(path: Path) -> Path:
    adapter_files.read_config(path)
    return path


def _check_quantize(named: ModelOrModule) -> None:
    quantized.check_installed()
    if not isinstance(named, ModelSource):
        raise UsageError("lora.quantize has no effect on a module. Pass the model by name.")
    if named.gguf_file:
        raise UsageError("--lora.quantize does not support GGUF files, which are quantized already. Pass the model "
                         "that the file was made from.")


def _check_learning(module: Any) -> None:
    """Make the adapter of the user's module trainable, and check that nothing else is.

    Raises:
        ModelError: if other weights are trainable, which the adapter's directory cannot hold.
    """
    names = adapter_weight_names(module) or set()
    outside = [name for name, weight in module.named_parameters(remove_duplicate=False)
               if weight.requires_grad and name not in names]
    if outside:
        raise ModelError(f"{count_of(len(outside), 'trainable tensor')} outside the adapter ({outside[0]}, ...): the "
                         "result is an adapter and cannot hold them. Freeze them, or use peft's modules_to_save.")
    if not any(weight.requires_grad for weight in saved_parameters(module)):
        for weight in saved_parameters(module):  # loaded for inference, as peft does by default
            weight.requires_grad_(True)
    for layer in module.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.eval()
