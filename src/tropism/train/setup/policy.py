"""How the policy of a run gets its adapter, and what its reference is then."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tropism.data.tree import PromptTree
from tropism.distributed.shard import is_sharded
from tropism.distributed.world import World
from tropism.errors import ModelError, UsageError
from tropism.model import base_weights as base
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
from tropism.model.bf16_weights import round_to_bf16
from tropism.model.language_model import LanguageModel, Precision
from tropism.model.options import LoraOptions, is_adapter
from tropism.model.source import ModelSource
from tropism.observe.console import Voice
from tropism.train.frozen import reference as references
from tropism.train.setup import models
from tropism.train.setup.models import ModelOrModule, Numerics

_GIVEN = "the model that was given"


@dataclass(frozen=True)
class PolicyBuilder:
    """What the policy is made of.

    Args:
        named: the base, by its name or as a module.
        lora: options of a fresh adapter, or of one to start from; without effect if neither is wanted.
        directory: of the adapter to start from; None for a fresh one.
        held: the module that was given has an adapter already, on which it is trained.
    """

    named: ModelOrModule
    lora: LoraOptions
    directory: Path | None = None
    held: bool = False

    @classmethod
    def of(cls, named: ModelOrModule, lora: LoraOptions, optimizer: Any, world: World,
           merge: bool = False) -> "PolicyBuilder":
        """Understand the options.

        Args:
            named: the policy: by its name, which may be that of an adapter, or a module, which may hold one.
            optimizer: that was given in Python.
            merge: an adapter by its name is merged, not trained on.

        Raises:
            UsageError: for options that cannot go together.
            ModelError: if the directory holds no adapter, or one that is not served; or a package is missing.
        """
        if lora.quantize is not None:
            _check_quantize(named, world)
        if isinstance(named, ModelSource):
            if named.adapter is not None and lora.wanted:
                raise UsageError(f"model: {named.adapter} is an adapter, which is trained on; give --model "
                                 f"{named.base.absolute} with lora.rank or lora.adapter, or leave those out")
            if named.adapter is not None and not merge:
                return cls(named.base, lora, _checked(Path(named.adapter)))
        elif getattr(named, "is_quantized", False):
            raise ModelError("the model that was given holds quantized weights, which would be spelled out in float32; "
                             "give it by its name, with lora.quantize")
        elif (name := adapter_name(inner := given.inner(named, _GIVEN))) is not None:
            if lora.wanted:
                raise UsageError(f"{_GIVEN} has an adapter already, which is trained as it is; leave lora.rank and "
                                 "lora.adapter out, or merge it first")
            adapter_settings.check_served(inner.peft_config[name], _GIVEN)
            given.check_trainable(inner, _GIVEN)
            return cls(inner, lora, held=True)
        if lora.wanted and optimizer is not None:
            raise UsageError("an optimizer that was given cannot hold weights of an adapter that is only made now; "
                             "leave it out, or pass a PeftModel and an optimizer over its weights")
        if lora.adapter is None:
            return cls(named, lora)
        path = Path(lora.adapter).expanduser()
        if not path.is_dir():
            raise UsageError(f"lora.adapter {lora.adapter}: no such directory")
        if not (path / adapter_files.CONFIG).is_file():
            hint = (f"; it is a run, whose adapter is {path / 'model'}" if is_adapter(path / "model") else "")
            raise UsageError(f"lora.adapter {lora.adapter}: no {adapter_files.CONFIG} in this directory{hint}")
        return cls(named, lora, _checked(path.resolve()))

    @property
    def adapts(self) -> bool:
        """Whether an adapter is trained."""
        return self.lora.rank is not None or self.directory is not None or self.held

    @property
    def fresh(self) -> bool:
        """Whether the adapter changes nothing yet, so that the policy before step 1 is the base."""
        return self.adapts and self.directory is None and not self.held

    def check(self, config: Any, trust_remote_code: bool, tensor: int = 1) -> None:
        """Put the adapter on a model without weights, before anything is spent.

        Args:
            tensor: processes that compute a layer together.

        Raises:
            UsageError: for a name that no module has, or if processes compute layers together.
            ModelError: if the adapter does not fit.
        """
        if self.adapts and tensor > 1:
            raise UsageError("parallel.tensor with an adapter is not served; leave it out, and shard the weights")
        if not self.adapts or self.held:
            return
        by_name = isinstance(self.named, ModelSource)
        model = load.skeleton(config, trust_remote_code=trust_remote_code) if by_name else self.named
        its_config = self._config(model)
        adapter_targets.check_ends(model, its_config, str(self.directory or "lora.targets"))
        if by_name:
            make_structure(model, its_config)

    def module(self, numerics: Numerics, seed: int) -> Any:
        """The policy's module, with its adapter as it is before step 1."""
        if not self.adapts:
            return numerics.module(self.named)
        if self.lora.quantize is not None:
            module = load.load_model(self.named, numerics.precision, numerics.device, quantize=self.lora.quantize,
                                     trust_remote_code=numerics.trust_remote_code,
                                     plain=self._plain_names(numerics.trust_remote_code))
        elif self.held:
            module = numerics.module(self.named)
        else:
            module = numerics.module(self.named, lambda model: make_structure(model, self._config(model)))
        dtype = load.weights_dtype(numerics.precision)
        if self.held:
            _check_learning(module)
            config = module.peft_config[adapter_name(module)]
            config.base_model_name_or_path = self._base or _found_again(config.base_model_name_or_path)
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
        """Hold what does not learn in bfloat16 where the run computes so; not in a module that was given.

        Args:
            sharded: do it now only if the module is, or only if it is not: a sharded one must not have computed yet,
                and the others show first that their layout is exact.
        """
        if self.adapts and precision == "bf16" and isinstance(self.named, ModelSource) and is_sharded(
                module) is sharded:
            round_to_bf16(module)

    @contextmanager
    def as_reference(self, module: Any) -> Iterator[None]:
        """The policy as it is before step 1: a fresh adapter changes nothing, so that the scores are those of the base,
        which other runs share."""
        if not self.fresh:
            yield
            return
        with adapter_off(module):
            yield

    def live(self, policy: LanguageModel, probes: Sequence[PromptTree], numerics: Numerics,
             seed: int) -> references.Reference:
        """The policy as it is before step 1, kept in memory. All ranks call this together.

        Of a fresh adapter it is the base that the policy holds. Else it is a frozen copy: of what learns, or of the
        whole, made as the policy was, where that is spread over processes.

        Raises:
            ModelError: as `Numerics.settled` says.
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
        """Of the policy before step 1."""
        with self.as_reference(model.module):
            return references.fingerprint(model)

    def take_result(self, module: Any, directory: Path, numerics: Numerics, world: World) -> None:
        """Overwrite what learns in a module with what a run left. All ranks call this together.

        Raises:
            ModelError: if it does not fit.
        """
        if not self.adapts:
            models.take_weights(module, directory, numerics, world)
            return
        if is_sharded(module):
            world.together(lambda: adapter_files.load_values(module, directory))  # each its part
            return
        world.on_main(lambda: adapter_files.load_values(module, directory))
        world.broadcast_into([weight.detach() for weight in saved_parameters(module)])

    def begin(self, numerics: Numerics, seed: int, voice: Voice, is_reference: bool) -> tuple[Any, dict[str, Any]]:
        """The policy's module; what of it learns is said, and given as facts for the manifest.

        Args:
            is_reference: what it is before step 1 is the reference.
        """
        module = self.module(numerics, seed)
        if not self.adapts:
            return module, {}
        facts = summarize(module)
        self._check_origin(module, voice)
        voice.say(f"adapter: {facts}" + (f"; weights held in {self.lora.quantize}" if self.lora.quantize else ""))
        if note := rank_warning(module):
            voice.warn(note)
        if not self.fresh:
            origin = self.directory or "the adapter of the model that was given"
            voice.say(f"  it starts from {origin}" + ("; the reference is the model with that adapter, as it is before "
                                                      "step 1" if is_reference else ""))
        known = base.base_hash(module)
        self._check_base(known, voice)
        self.round_weights(module, numerics.precision, sharded=True)
        config = module.peft_config[adapter_name(module)]
        return module, {"adapter": asdict(facts), "adapter_config": adapter_files.values_of(config)} | (
            {} if known is None else {"base_weights": known})

    def _check_base(self, found: str | None, voice: Voice) -> None:
        """An adapter to start from may have been trained on other weights than it stands on now.

        Args:
            found: hash of the weights without the adapter; None where they are held in fewer bits.
        """
        if self.directory is None:
            return
        known, origin = base.recorded_hash(self.directory), self._base or "the model that was given"
        named = _found_again(adapter_files.read_values(self.directory).get("base_model_name_or_path"))
        if found is not None and known is not None:
            if found != known:
                voice.warn(f"{self.directory}: was trained on other weights than {origin} has now; it goes on from "
                           "another model than the one that it was trained as")
        elif named is not None and self._base is not None and not _same(named, self._base):
            voice.warn(f"{self.directory}: names {named} as its base, and goes on on {origin}; whether these are the "
                       "same weights cannot be told")

    def _check_origin(self, module: Any, voice: Voice) -> None:
        """A module that was given may come from nowhere, or have learned since it was loaded: its adapter's file then
        names no base."""
        if isinstance(self.named, ModelSource):
            return
        config = module.peft_config[adapter_name(module)]
        origin = config.base_model_name_or_path
        if not origin:
            why = "says of no directory or hub id that it came from there"
        elif Path(origin).is_dir() and (name := base.first_difference(module, Path(origin))):
            why = f"is not what {origin} holds ({name} differs)"
        else:
            return
        config.base_model_name_or_path = None
        voice.warn(f"the model that was given {why}: the adapter's file will name no base. Save the model without the "
                   "adapter, and name it where the adapter is used: tropism export RUN --base DIR")

    def _plain_names(self, trust_remote_code: bool) -> list[str]:
        """Full names of the modules that are not quantized: those that learn whole, as peft finds them, and the head,
        whatever a model calls it."""
        config = load.load_config(self.named, trust_remote_code=trust_remote_code)
        model = load.skeleton(config, trust_remote_code=trust_remote_code)
        head = [name for name, layer in model.named_modules() if layer is model.get_output_embeddings()]
        make_structure(model, self._config(model))
        return head + [name for name, layer in model.named_modules() if hasattr(layer, "modules_to_save")]

    def _config(self, module: Any) -> Any:
        if self.directory is None:
            return adapter_targets.new_config(module, self.lora, self._base)
        config = adapter_files.read_config(self.directory)
        config.base_model_name_or_path = self._base or _found_again(config.base_model_name_or_path)
        return config

    @property
    def _base(self) -> str | None:
        """What the adapter's file says that it belongs to; None for a module that says nothing of where it is from."""
        if isinstance(self.named, ModelSource):
            return self.named.absolute
        return _found_again(getattr(self.named.config, "name_or_path", None))


def _found_again(origin: Any) -> str | None:
    """The name of a model as another process finds it; None for no name."""
    name = str(origin or "")
    return os.path.abspath(name) if name and Path(name).is_dir() else name or None


def _same(name: str, other: str) -> bool:
    """Whether two names are of one model."""
    return name == other or (Path(name).is_dir() and Path(other).is_dir() and os.path.samefile(name, other))


def _checked(path: Path) -> Path:
    adapter_files.read_config(path)
    return path


def _check_quantize(named: ModelOrModule, world: World) -> None:
    quantized.check_installed()
    if world.size > 1:
        raise UsageError(f"lora.quantize works on one process, and there are {world.size}; leave it out, and shard the "
                         "weights over them")
    if not isinstance(named, ModelSource):
        raise UsageError("lora.quantize has no effect on a module that was given; give the model by its name")
    if named.gguf_file:
        raise UsageError("lora.quantize cannot hold a GGUF file's weights in other bits than it has; name the model "
                         "that it was made from")


def _check_learning(module: Any) -> None:
    """Let the adapter of a module that was given learn, and nothing else.

    Raises:
        ModelError: if other weights would learn, which no adapter's directory can hold.
    """
    names = adapter_weight_names(module) or set()
    outside = [name for name, weight in module.named_parameters(remove_duplicate=False)
               if weight.requires_grad and name not in names]
    if outside:
        raise ModelError(f"{len(outside)} weights outside the adapter would learn ({outside[0]}, ...), and the result, "
                         "an adapter, cannot hold them; freeze them, or name their modules in peft's modules_to_save")
    if not any(weight.requires_grad for weight in saved_parameters(module)):
        for weight in saved_parameters(module):  # loaded for inference, as peft does by default
            weight.requires_grad_(True)
    for layer in module.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.eval()
