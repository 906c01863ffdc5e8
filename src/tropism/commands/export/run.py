"""Export a run from end to end."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tropism.borders import read_object
from tropism.commands.export import adapter as adapters
from tropism.commands.export import card, gguf, ollama, serving
from tropism.commands.export.output_directory import read_back, shard_bytes, whole
from tropism.commands.export.push import FACTS, Repository, check_base, check_exported
from tropism.commands.export.read_run import Chosen, ExportedRun, choose, read_run
from tropism.commands.export.tokenizer_and_generation import generation_of, tokenizer_of
from tropism.commands.export.weights import (
    CheckSpace,
    Rounding,
    Weights,
    dtype_named,
    of_checkpoint,
    of_result,
    rounded,
)
from tropism.commands.files import check_export
from tropism.errors import ModelError, UsageError, count_of
from tropism.files import check_space
from tropism.model import load, save
from tropism.model.adapters.files import GGUF_BASE
from tropism.model.source import ModelSource, public_name
from tropism.observe.checksums import checksums
from tropism.observe.console import Voice
from tropism.observe.manifest import libraries

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Args:
        path: the directory.
        dtype: of every weight in it.
        step: optimizer step of the run that the weights are from.
        is_adapter: whether it is an adapter alone.
        merged: whether an adapter was merged into it.
        rounding: how the dtype changed the weights.
        files: size and hash of each file.
        url: address on the Hub, if it was pushed.
    """

    path: Path
    dtype: torch.dtype
    step: int
    is_adapter: bool
    merged: bool
    rounding: Rounding
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    url: str | None = None


def export(run: str | Path, to: str | Path, *, merge: bool = False, dtype: str | None = None,
           checkpoint: str | None = None, max_shard_size: str | int | None = None,
           base: str | Path | None = None, gguf: str | None = None, llama_cpp: str | Path | None = None,
           ollama: bool = False, trust_remote_code: bool = False, push: str | None = None, private: bool = False,
           voice: Voice | None = None) -> Exported:
    """Write the result of a run, or one of its checkpoints, as a model directory. The run is not changed.

    Args:
        run: run directory.
        to: a directory that is empty or absent.
        merge: merge the adapter into its base; the result is a plain model.
        dtype: of the weights: fp32, bf16, fp16 or fp64, or their long names; by default the dtype of the run's result.
        checkpoint: `best`, `last`, a step (`step-00000100`), or a path; by default the result.
        max_shard_size: maximum size of a weights file, by default 50GB; larger models get several files and an index.
        base: directory or hub id of the adapter's base, if it was moved since the run.
        gguf: also write a GGUF file in this format, by llama.cpp: f32, bf16, f16, q8_0 or q4_k_m.
        llama_cpp: directory of llama.cpp, by default found on PATH.
        ollama: also write a Modelfile for Ollama.
        trust_remote_code: run code that comes with the run's models. The run's own option is not obeyed.
        push: repository on the Hub, `owner/name`, to upload the directory to. If it holds an export of the run already,
            that is uploaded.
        private: make the repository private if it does not exist yet.
        voice: prints to the user.

    Raises:
        UsageError: for options that exclude each other, or name something that was not found.
        OutputExistsError: if the directory is not empty, or the repository has other content.
        CheckpointError: if files of the run are corrupted, or weights are missing.
        ModelError: if the base, tokenizer or adapter cannot be used, or the weights do not fit the dtype.
        OutputError: if the disk refuses, or the export does not read back. Nothing is left then. Or if the
            upload fails; the directory is complete then.
    """
    if private and push is None:
        raise UsageError("--private has no effect without --push owner/name")
    repository = None if push is None else Repository.of(push, private)
    path, place, voice = Path(to).expanduser(), Path(run).expanduser(), (voice or Voice()).preparing()
    if path.name in ("", "..") or path.is_symlink():
        path = path.resolve()  # the temporary directory needs its name, and can only replace a directory
    wanted, shards = None if dtype is None else dtype_named(dtype), shard_bytes(max_shard_size or save.SHARD_SIZE)
    found = replace(read_run(place), trust_remote_code=trust_remote_code)
    if found.options.get("trust_remote_code") and not trust_remote_code:
        voice.warn(f"{place}: the run allowed the code of its models, but it is not run here. If you trust it, pass "
                   "--trust-remote-code")
    check_export(path, place, push is not None)
    if repository is not None and (path / FACTS).is_file():
        done = _exported_before(path, found, merge, wanted, checkpoint, base, gguf, ollama)
        repository.check(_origin(found))
        voice.say(f"{path}: this run was exported here before, and the files are intact")
        return _pushed(done, repository, place, voice)
    chosen = choose(found, checkpoint)
    if merge and not chosen.is_adapter:
        raise UsageError(f"--merge: {place} trained all weights, so there is no adapter to merge. Omit --merge.")
    if max_shard_size is not None and chosen.is_adapter and not merge:
        raise UsageError("--max-shard-size has no effect on an adapter alone, which is one file. Omit it, or add "
                         "--merge.")
    if base is not None:
        if not chosen.is_adapter:
            raise UsageError(f"--base: {place} trained all weights; only an adapter has a base. Omit --base.")
        found = replace(found, other_base=ModelSource.of(str(base)).absolute)
    extras = _Extras.of(gguf, llama_cpp, ollama, str(place) if chosen.is_adapter and not merge else None)
    if repository is not None:
        if chosen.is_adapter and not merge:
            check_base(adapters.base_of(found, chosen))
        repository.check(_origin(found))
    voice.say(f"{chosen.path}: step {chosen.step}" + ("" if chosen.notes else ", files intact"))
    for note in chosen.notes:
        voice.warn(note)
    work = _Work(found, chosen, path, merge, wanted, shards, voice, extras, push)
    done = work.adapter() if chosen.is_adapter and not merge else work.model()
    return done if repository is None else _pushed(done, repository, place, voice)


def _origin(run: ExportedRun) -> dict[str, Any]:
    """What `export.json` says of the run."""
    return {"run": run.path.resolve().name, "fingerprints": _fingerprints(run.manifest)}


def _exported_before(path: Path, run: ExportedRun, merge: bool, dtype: torch.dtype | None, checkpoint: str | None,
                     base: str | Path | None, gguf: str | None, ollama: bool) -> Exported:
    """The export that a directory holds, whose upload failed or was not asked for. Options that are given must agree.

    Raises:
        OutputExistsError: if it is another one.
    """
    wanted = _origin(run)
    if merge:
        wanted["merged"] = True
    if dtype is not None:
        wanted["dtype"] = _name(dtype)
    if checkpoint is not None:
        wanted["step"] = choose(run, checkpoint).step
    if base is not None:
        wanted["base"] = public_name(ModelSource.of(str(base)).absolute)
    wanted |= {name: value for name, value in (("gguf", gguf), ("ollama", ollama)) if value}
    found = check_exported(path, wanted)
    there, merged = dtype_named(str(found.get("dtype"))), found.get("merged") is True
    return Exported(path, there, int(found.get("step", 0)), found.get("adapter") is True and not merged, merged,
                    Rounding(there), checksums(path))


def _pushed(done: Exported, repository: Repository, run: Path, voice: Voice) -> Exported:
    """Upload an export. An error gives the command that uploads it again."""
    words = ["tropism", "export", str(run), "--to", str(done.path), "--push", repository.name]
    again = shlex.join([*words, "--private"] if repository.private else words)
    url = repository.upload(done.path, again)
    voice.say(f"uploaded to {url}")
    return replace(done, url=url)


@dataclass(frozen=True)
class _Extras:
    """Files for servers that are written beside the model."""

    converter: gguf.Converter | None = None
    modelfile: bool = False

    @classmethod
    def of(cls, form: str | None, llama_cpp: str | Path | None, modelfile: bool, adapter_of: str | None) -> "_Extras":
        """Check the options.

        Args:
            adapter_of: the run, if its adapter is exported without its base.

        Raises:
            UsageError: if one has no effect, or llama.cpp was not found.
        """
        if adapter_of is not None and (form is not None or modelfile):
            raise UsageError(f"--{'ollama' if form is None else 'gguf'}: {adapter_of} trained an adapter, and only a "
                             "plain model can be written in this way. Add --merge.")
        if llama_cpp is not None and form is None:
            raise UsageError("--llama-cpp has no effect without --gguf. Omit it, or add --gguf.")
        return cls(None if form is None else gguf.find_converter(form, llama_cpp), modelfile)


@dataclass
class _Work:
    """One export, after its options were checked."""

    run: ExportedRun
    chosen: Chosen
    path: Path
    merge: bool
    wanted: torch.dtype | None
    shards: int
    voice: Voice
    extras: _Extras
    pushed_to: str | None = None
    adapter_config: Any = None

    def model(self) -> Exported:
        """Export a plain model."""
        run, chosen = self.run, self.chosen
        dtype = self.wanted or self._usual()
        needed = 0

        def room(wanted: Weights) -> None:
            nonlocal needed
            needed = self._room(wanted, tokenizer, dtype)

        adapter = adapters.read(run, chosen) if self.merge else None  # raises if its base was not found
        tokenizer = tokenizer_of(run, chosen, adapter.base if adapter is not None else None)
        module, weights = self._weights(adapter, dtype, room)
        base = run.base if adapter is None else adapter.base
        weights, rounding = self._rounded(weights, dtype)
        module = module.to(dtype)
        generation, notes = generation_of(run, chosen, base, tokenizer, module.config)
        self._tell(notes)
        module.generation_config = generation
        with whole(self.path, needed) as partial:
            failed = save.write_model(module, tokenizer, partial, dtype, (), weights, self.shards)
            read_back(partial, weights, dtype, run.trust_remote_code)
            served = serving.Serving() if failed else self._serving(partial, tokenizer, generation, dtype)
            self._describe(partial, dtype, rounding, generation, tokenizer, base, served)
            files = checksums(partial)
        if failed is not None:
            raise failed
        return self._done(dtype, rounding, files, is_adapter=False)

    def _room(self, weights: Weights, tokenizer: Any, dtype: torch.dtype) -> int:
        """Check that there is space. Returns the bytes that are needed."""
        needed = save.export_bytes(weights, tokenizer, self.path, dtype)
        if self.extras.converter is not None:
            needed += gguf.file_bytes(self.extras.converter.form, weights, dtype)
        check_space(self.path, needed, "cannot be written")
        return needed

    def _weights(self, adapter: adapters.Adapter | None, dtype: torch.dtype, room: CheckSpace) -> tuple[Any, Weights]:
        run, chosen = self.run, self.chosen
        if adapter is None:
            of = of_result if chosen.trainer is None else of_checkpoint
            return of(run, chosen, room)
        self.adapter_config = adapter.config
        wide = torch.float64 in (dtype, *(weight.dtype for weight in adapter.weights.values()))
        found = adapters.merged(run, adapter, "fp64" if wide else "fp32", room)
        self.voice.say(f"adapter merged into {adapter.base}; the outputs before and after agree")
        return found

    def adapter(self) -> Exported:
        """Export an adapter alone."""
        run, chosen = self.run, self.chosen
        adapter = adapters.read(run, chosen)
        self.adapter_config = adapter.config
        dtype = self.wanted or (self._usual() if chosen.trainer is not None else _common(adapter.weights))
        tokenizer = tokenizer_of(run, chosen, adapter.base)
        needed = self._room(adapter.weights, tokenizer, dtype)
        generation, notes = generation_of(run, chosen, adapter.base, tokenizer, _config(run, adapter.base))
        self._tell(notes)
        weights, rounding = self._rounded(adapter.weights, dtype)
        with whole(self.path, needed) as partial:
            save.save_tokenizer(tokenizer, partial)
            generation.save_pretrained(partial)
            adapters.write(adapter, weights, partial, dtype)
            served = self._serving(partial, tokenizer, generation, dtype)
            served.gguf_base = adapter.base.lower().endswith(".gguf")
            if served.gguf_base:
                self.voice.warn(f"{GGUF_BASE}.")
            self._describe(partial, dtype, rounding, generation, tokenizer, adapter.base, served)
            files = checksums(partial)
        return self._done(dtype, rounding, files, is_adapter=True)

    def _serving(self, partial: Path, tokenizer: Any, generation: Any, dtype: torch.dtype) -> serving.Serving:
        """Check what servers read from the written files, and write the files for them."""
        run, converter = self.run, self.extras.converter
        found = serving.check(run, self.chosen, partial, tokenizer, run.trust_remote_code)
        adds_bos = serving.adds_bos(tokenizer)
        if converter is not None:
            self.voice.say(f"converting with {converter.convert[-1]}")
            agreement = gguf.write(converter, partial, self.path.resolve().name, dtype, run.trust_remote_code)
            self.voice.say(str(agreement))
            found.gguf = agreement.to_json()
            adds_bos = adds_bos if agreement.adds_bos is None else agreement.adds_bos
            if agreement.end is not None and agreement.end not in serving.stop_ids(generation):
                found.problems.append(f"{agreement.file} ends at {tokenizer.convert_ids_to_tokens(agreement.end)}, at "
                                      "which no completion ended in training. Pass stop strings in requests.")
        if self.extras.modelfile:
            stops = {number: tokenizer.convert_ids_to_tokens(number) for number in serving.stop_ids(generation)}
            text, found.modelfile = ollama.modelfile(
                tokenizer, stops, "." if found.gguf is None else f"./{found.gguf['file']}",
                serving.template_kwargs(run), run.options.get("system_prompt"), adds_bos)
            (partial / ollama.FILE).write_text(text, encoding="utf-8")
        self._tell([*found.problems, *(f"{ollama.FILE}: {sentence}" for sentence in found.modelfile or ())])
        return found

    def _usual(self) -> torch.dtype:
        """The dtype of the run's result; for a checkpoint, the dtype that the result would have."""
        if self.chosen.trainer is None and not self.chosen.is_adapter:
            config = read_object(self.chosen.path / "config.json")
            return dtype_named(str(config.get("dtype") or config.get("torch_dtype") or "float32"))
        return dtype_named(str(self.run.options.get("export_dtype") or "float32"))

    def _rounded(self, weights: Weights, dtype: torch.dtype) -> tuple[Weights, Rounding]:
        narrower = any(weight.is_floating_point() and torch.promote_types(weight.dtype, dtype) != dtype
                       for weight in weights.values())
        found, rounding = rounded(weights, dtype)
        if narrower:
            self.voice.say(str(rounding))
        return found, rounding

    def _tell(self, notes: list[str]) -> None:
        for note in notes:
            self.voice.warn(note)

    def _describe(self, partial: Path, dtype: torch.dtype, rounding: Rounding, generation: Any, tokenizer: Any,
                  base: str, served: serving.Serving) -> None:
        """Write the model card, and `export.json` with the hashes of all other files."""
        run, chosen = self.run, self.chosen
        facts: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION, "exported": datetime.now(UTC).isoformat(timespec="seconds"),
            "libraries": libraries(), **_origin(run), "step": chosen.step,
            "checkpoint": chosen.path.name if chosen.trainer is not None else None, "base": public_name(base),
            "adapter": chosen.is_adapter, "merged": self.merge, "dtype": _name(dtype),
            "rounding": str(rounding) if rounding.exact < rounding.weights else None,
            "stop_tokens": {number: tokenizer.convert_ids_to_tokens(number) for number in serving.stop_ids(generation)},
            "serving": asdict(served), "ollama": self.extras.modelfile,
            "gguf": None if self.extras.converter is None else self.extras.converter.form,
            "needs_code": _needs_code(partial / "config.json")}
        text = card.render(run, chosen, facts, self.pushed_to or self.path.resolve().name,
                           self.adapter_config)
        (partial / "README.md").write_text(text, encoding="utf-8")
        facts["files"] = checksums(partial)
        (partial / FACTS).write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8",
                                              errors="backslashreplace")

    def _done(self, dtype: torch.dtype, rounding: Rounding, files: dict[str, dict[str, Any]], *,
              is_adapter: bool) -> Exported:
        size = sum(entry["bytes"] for entry in files.values())
        shards = sum(name.endswith(".safetensors") for name in files)
        self.voice.concluding()
        self.voice.say(f"{self.path}: {'an adapter' if is_adapter else 'a model'} in "
                       f"{_name(dtype)}, {count_of(shards, 'weight file')}, "
                       f"{size:,} bytes in total; every weight was read back and compared")
        return Exported(self.path, dtype, self.chosen.step, is_adapter, self.merge, rounding, files)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _common(weights: Weights) -> torch.dtype:
    """The widest dtype among weights."""
    dtypes = [weight.dtype for weight in weights.values() if weight.is_floating_point()]
    return max(dtypes, key=lambda one: (one.itemsize, one is torch.bfloat16), default=torch.float32)


def _config(run: ExportedRun, base: str) -> Any | None:
    """The base's config if it is available: an adapter can be exported without."""
    try:
        return load.load_config(ModelSource.of(base), trust_remote_code=run.trust_remote_code)
    except ModelError:
        return None


def _needs_code(config: Path) -> bool:
    """Whether a written config names code that comes with the model."""
    return config.is_file() and "auto_map" in read_object(config)


def _fingerprints(manifest: Mapping[str, Any]) -> dict[str, str]:
    """All fingerprints of a run."""
    found = dict(manifest.get("fingerprints") or {})
    called = {"policy": "initial weights", "reference": "reference", "teacher": "teacher"}
    return found | {name: manifest[key] for key, name in called.items() if manifest.get(key)}
