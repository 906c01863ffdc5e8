"""`tropism verify`: check that a run directory is intact and that the run is reproducible on this machine."""

import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tropism.borders import read_object
from tropism.commands.files import write_json
from tropism.commands.run_files import Check, State, check_output
from tropism.config import METHODS, MethodOptions
from tropism.config_file import CODE, read_yaml
from tropism.errors import ModelError, TropismError, UsageError, count_of, first_line
from tropism.model import load
from tropism.model.language_model import LanguageModel
from tropism.model.options import LoraOptions
from tropism.model.source import ModelSource
from tropism.observe.console import Voice
from tropism.observe.manifest import code_hash, read_manifest, text_fingerprints
from tropism.observe.rundir import RunDirectory
from tropism.train.frozen.teacher import shared_vocabulary, stored_name
from tropism.train.setup.data import prepare_data
from tropism.train.setup.models import Numerics
from tropism.train.setup.policy import PolicyBuilder


@dataclass(frozen=True)
class Verdict:
    """All checks of a run.

    Args:
        directory: run directory.
        checks: in the order in which they are printed.
    """

    directory: Path
    checks: tuple[Check, ...]

    def holds(self, of: str) -> bool:
        """Whether all checks of this kind passed."""
        return all(check.state == "same" for check in self.checks if check.of == of)

    @property
    def intact(self) -> bool:
        """Whether everything that the run wrote is unchanged."""
        return self.holds("intact")

    @property
    def repeatable(self) -> bool:
        """Whether the same command would train the same model on this machine."""
        return self.holds("repeatable")

    def to_json(self) -> dict[str, Any]:
        """The content of `--json`."""
        return {"run": str(self.directory), "intact": self.intact, "reproducible_here": self.repeatable,
                "checks": [{"what": check.what, "state": check.state, "how": check.how, "of": check.of}
                           for check in self.checks]}


def verify(directory: Path, trust_remote_code: bool = False) -> Verdict:
    """Compare everything with its fingerprint in the manifest. Nothing is written.

    Args:
        directory: of the run.
        trust_remote_code: run code that comes with the run's models. The run's own option is not obeyed.

    Raises:
        UsageError: if this is not a run directory.
    """
    RunDirectory(directory).check_kinds()
    manifest = _manifest(directory)
    kept = tuple(check_output(directory, manifest or {"fingerprints": {}}))
    if not manifest:
        return Verdict(directory, (Check("manifest.json", "gone", of="intact"), *kept, Check(
            "options", "unknown", "nothing can be compared without manifest.json")))
    try:
        method, values = read_yaml(directory / "config.yaml", decided=CODE)
        known = METHODS[method or manifest["method"]]
        options = known.model_validate(known.nested(values | {"output": str(directory),
                                                              "trust_remote_code": trust_remote_code}))
    except (TropismError, ValueError, KeyError) as error:
        return Verdict(directory, (*kept, Check("options", "unknown",
                                                  f"config.yaml cannot be read: {first_line(error)}"),
                                   *_of_machine(manifest)))
    return Verdict(directory, (*kept, *_of_inputs(options, manifest, directory), *_of_machine(manifest)))


def show(verdict: Verdict, voice: Voice) -> None:
    """Print the checks and the verdict."""
    for check in verdict.checks:
        (voice.say if check.state == "same" else voice.warn)(str(check))
    voice.concluding()
    voice.say(f"{verdict.directory}: {'intact' if verdict.intact else 'NOT intact'}, "
              f"{'reproducible' if verdict.repeatable else 'NOT reproducible'} on this machine")


def write(verdict: Verdict, path: Path) -> None:
    """Write the verdict as JSON.

    Raises:
        OutputError: if the disk refuses.
    """
    write_json(path, verdict.to_json())


def _manifest(directory: Path) -> dict[str, Any]:
    """The manifest; empty if a run has lost it."""
    path = directory / "manifest.json"
    try:
        found = read_manifest(path)
    except FileNotFoundError:
        if RunDirectory(directory).holds_run:
            return {}
        raise UsageError(f"{directory}: not a run directory (no manifest.json)") from None
    except ValueError as error:
        raise UsageError(f"{path}: not the manifest of a run: {first_line(error)}") from None
    if "fingerprints" not in found:
        raise UsageError(f"{path}: not the manifest of a run")
    return found


def _of_inputs(options: MethodOptions, manifest: Mapping[str, Any], directory: Path) -> Iterator[Check]:
    """Checks of what determines a run: tokenizer, data, weights."""
    prints, remote = manifest["fingerprints"], options.trust_remote_code
    try:
        if _from_python(options.model):
            raise ModelError("the model was passed in Python")
        tokenizer = load.load_tokenizer(ModelSource.of(options.model), trust_remote_code=remote)
    except ModelError as error:
        gone = _state_of_missing(options.model)
        for what in ("tokenizer", "template", *(name for name in ("data", "eval_data") if name in prints)):
            yield Check(what, gone if what == "tokenizer" else "unknown", str(error) if what == "tokenizer" else
                        "depends on the tokenizer")
    else:
        for what, found in text_fingerprints(tokenizer).items():
            yield _compared(what, found, prints.get(what))
        yield from _of_data(options, manifest, tokenizer, directory)
    yield _weights("initial weights", options.model, options, manifest, manifest.get("policy"))
    for what, name in (("reference", options.values.get("reference")), ("teacher", options.values.get("teacher"))):
        if name not in (None, "live"):
            yield _weights(what, str(name), options, manifest, manifest.get(what))


def _of_data(options: MethodOptions, manifest: Mapping[str, Any], tokenizer: Any, directory: Path) -> Iterator[Check]:
    prints = manifest["fingerprints"]
    names = [name for name in ("data", "eval_data") if name in prints]
    for value in (options.data, options.eval_data):
        if value and _from_python(value):
            yield from (Check(name, "unknown", "passed in Python") for name in names)
            return
    configs = []
    try:
        for name in (options.model, options.values.get("reference"), options.values.get("teacher")):
            if name not in (None, "live"):
                configs.append(load.load_config(ModelSource.of(str(name)), trust_remote_code=options.trust_remote_code))
        data = prepare_data(options, tokenizer, configs, options.view, most=options.most_rows)
    except TropismError as error:
        paths = [Path(path).expanduser() for path in (options.data, options.eval_data) if path]
        gone = any(path.is_absolute() and not path.exists() for path in paths)
        yield from (Check(name, "gone" if gone else "differs", first_line(error)) for name in names)
        return
    found = data.fingerprints()
    counts = {"data": len(data.train), "eval_data": len(data.evaluation)}
    for name in names:
        yield _compared(name, found.get(name), prints[name], _row_counts(directory, name, counts[name]))


def _row_counts(directory: Path, name: str, now: int) -> str:
    try:
        split = read_object(directory / "audit.json", kind=UsageError)["split"]
        then = split["train" if name == "data" else "eval"]
    except (UsageError, KeyError, TypeError):
        return "its rows changed"
    if type(then) is not int:
        return "its rows changed"
    if then != now:
        return f"was {count_of(then, 'row')}, now {now:,}"
    return f"{count_of(now, 'row')} as before, but content or order changed"


def _weights(what: str, name: str, options: MethodOptions, manifest: Mapping[str, Any], known: str | None) -> Check:
    """Check a model's weights, with the precision and device type of the run even if this machine lacks them."""
    if known is None or "precision" not in manifest or "device" not in manifest:
        return Check(what, "unknown", "the manifest has no fingerprint of it; the run ended before it was loaded")
    if _from_python(name):
        return Check(what, "unknown", "passed in Python")
    precision = manifest["precision"]
    try:
        cpu = torch.device("cpu")
        lora = options.lora if what == "initial weights" else LoraOptions()
        start = PolicyBuilder.of(ModelSource.of(name), lora, None, merge=what != "initial weights")
        module = start.module(Numerics(precision, cpu, 0, options.trust_remote_code), options.seed)
    except (ModelError, UsageError) as error:
        return Check(what, _state_of_missing(name), str(error))
    try:
        device = torch.device(manifest["device"])
    except RuntimeError:
        return Check(what, "unknown", f"the manifest names no device of torch: {manifest['device']}")
    found = {}
    for layout in ("tree", "padded"):
        with suppress(ModelError):  # some models support only one layout
            found[layout] = start.fingerprint(LanguageModel(module, layout, precision, device))
    if what == "teacher" and options.values.get("top_k"):
        found = {layout: stored_name(one, options, _vocabulary(name, module, options))  # type: ignore[arg-type]
                 for layout, one in found.items()}
    if known in found.values():
        return Check(what, "same")
    return Check(what, "differs", f"weights or config of {name} changed, or this version computes with them "
                                  "differently")


def _vocabulary(name: str, module: Any, options: MethodOptions) -> int:
    tokenizer = load.load_tokenizer(ModelSource.of(options.model), trust_remote_code=options.trust_remote_code)
    student = load.load_config(ModelSource.of(options.model), trust_remote_code=options.trust_remote_code)
    return shared_vocabulary(tokenizer, student.get_text_config().vocab_size,
                                    len(module.get_output_embeddings().weight))


def _of_machine(manifest: Mapping[str, Any]) -> Iterator[Check]:
    """Checks of versions and hardware, which decide the last bits of a result."""
    changed = []
    for name, then in manifest.get("libraries", {}).items():
        try:
            now = metadata.version(name)
        except metadata.PackageNotFoundError:
            now = "not installed"
        if now != then:
            changed.append(f"{name} was {then}, now {now}")
    yield Check("libraries", "differs", ", ".join(changed)) if changed else Check("libraries", "same")
    if "code" in manifest:
        yield _compared("code", code_hash(), manifest["code"], "Tropism's source files changed")
    yield _compared("python", platform.python_version(), manifest.get("python"))
    device = str(manifest.get("device", "")).partition(":")[0]
    here = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and here == "cuda" and (then := manifest.get("device_name")) is not None:
        yield _compared("device", torch.cuda.get_device_name(), then)
    else:
        yield _compared("device", here, device)


def _compared(what: str, now: str | None, then: str | None, how: str = "") -> Check:
    if then is None:
        return Check(what, "unknown", "the manifest has no fingerprint of it")
    return Check(what, "same") if now == then else Check(what, "differs", how or f"was {then}, now {now}")


def _from_python(name: str) -> bool:
    """Whether the name describes a Python object, which no other process has."""
    return " given in Python" in name or name == "batches of a dataloader"


def _state_of_missing(name: str) -> State:
    """State of a model that cannot be loaded: corrupted on disk, missing, or on a hub that is out of reach."""
    path = Path(name).expanduser()
    if path.exists():
        return "differs"
    return "gone" if path.is_absolute() else "unknown"
