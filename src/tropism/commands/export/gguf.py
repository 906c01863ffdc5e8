"""GGUF files: written by llama.cpp's converter, read back by transformers, and compared with the exported model."""

import contextlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tropism.data.tokenization.apply_template import ChatTemplate
from tropism.errors import DataError, ModelError, OutputError, UsageError, clause, did_you_mean, first_line
from tropism.model import load
from tropism.model.source import ModelSource
from tropism.printable import escaped

BYTES_PER_WEIGHT = {"f32": 4.0, "bf16": 2.0, "f16": 2.0, "q8_0": 34 / 32, "q4_k_m": 0.65}
"""Formats, and an upper estimate of their size."""
_BY_QUANTIZER = {"q4_k_m": "Q4_K_M"}
_OUTTYPES = {torch.float32: "f32", torch.float64: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_SCRIPT, _QUANTIZER = "convert_hf_to_gguf.py", "llama-quantize"
_USUAL = ("~/llama.cpp", "/opt/llama.cpp", "/usr/local/share/llama.cpp", "/usr/share/llama.cpp")
_BUILT = ("", "build/bin", "bin")
_INSTALL = ("Get llama.cpp with `git clone https://github.com/ggml-org/llama.cpp`, and pass its directory: "
            "--llama-cpp DIR")
_TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "  two  spaces,\ta tab\n\n\nand lines\n", "In 1999, 12 345.67 + 89 = ?", "I'll say we've DON'T won't can't.",
    "na\u00efve caf\u00e9 \u2014 \u201cquoted\u201d \u65e5\u672c\u8a9e \u0434\u0430 \U0001f642 e\u0301",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2]}  # <b>&amp;</b>\n")
_FAR = 0.1
"""Mean change of a log-prob, in nats, that rounding to 16 bits does not explain."""


@dataclass(frozen=True)
class Converter:
    """Programs of llama.cpp.

    Args:
        form: format to write.
        convert: the command of the converter.
        quantize: path of `llama-quantize`, if the format needs it.
    """

    form: str
    convert: tuple[str, ...]
    quantize: str | None = None


@dataclass(frozen=True)
class Agreement:
    """A GGUF file compared with the exported model on a few texts.

    Args:
        file: its name.
        tokens: predicted tokens.
        mean, largest: absolute change of the log-prob of the next token, in nats.
        same_argmax: tokens for which the most probable one is the same.
        adds_bos: whether servers add the beginning of text by what the file says; None if it does not say.
        end: id of the token at which they stop; None if it does not say.
    """

    file: str
    tokens: int
    mean: float
    largest: float
    same_argmax: int
    adds_bos: bool | None = None
    end: int | None = None

    def __str__(self) -> str:
        return (f"{self.file}: same token ids. Log-probs of {self.tokens} tokens differ by {self.mean:.2g} nats on "
                f"average and {self.largest:.2g} at most, and the most probable token is the same for "
                f"{self.same_argmax} of them ({self.same_argmax / self.tokens:.1%})")

    def to_json(self) -> dict[str, Any]:
        """For `export.json`."""
        return {"file": self.file, "same_token_ids": True, "tokens": self.tokens, "mean_logp_change": self.mean,
                "largest_logp_change": self.largest, "same_argmax": self.same_argmax, "summary": str(self)}


def find_converter(form: str, directory: str | Path | None) -> Converter:
    """The programs that write a format.

    Args:
        form: such as `q8_0`.
        directory: a checkout of llama.cpp; by default PATH and the usual places.

    Raises:
        UsageError: for an unsupported format, or if a program or package is not found.
    """
    if form not in BYTES_PER_WEIGHT:
        raise UsageError(f"--gguf {form}: unsupported. {did_you_mean(form, BYTES_PER_WEIGHT)}")
    if importlib.util.find_spec("gguf") is None:
        raise UsageError("--gguf: the file is read back with the package gguf. Install it with "
                         "`pip install 'tropism[gguf]'`.")
    script = _find(_SCRIPT, directory)
    if script is None:
        raise UsageError(f"--gguf: {_SCRIPT} of llama.cpp not found in {directory or 'PATH'}. "
                         f"{_INSTALL}")
    quantizer = _find(_QUANTIZER, directory, _BUILT) if form in _BY_QUANTIZER else None
    if form in _BY_QUANTIZER and quantizer is None:
        raise UsageError(f"--gguf {form}: {_QUANTIZER} of llama.cpp not found in {directory or 'PATH'}. Build it with "
                         "`cmake -B build && cmake --build build --target llama-quantize` in llama.cpp, or use "
                         "--gguf q8_0, which needs only the converter")
    return Converter(form, _command(script), None if quantizer is None else str(quantizer))


def _find(name: str, directory: str | Path | None, below: Sequence[str] = ("",)) -> Path | None:
    """A program in a checkout, on PATH, or in the usual places."""
    on_path = shutil.which(name)
    if directory is None and on_path:
        return Path(on_path)
    for place in _USUAL if directory is None else [directory]:
        for part in below:
            path = Path(place).expanduser() / part / name
            if path.is_file():
                return path.absolute()
    return Path(on_path) if on_path and name == _QUANTIZER else None  # which is often installed by itself


def _command(script: Path) -> tuple[str, ...]:
    """A script for any Python runs with this one, which has torch and transformers; another program as it is."""
    with script.open("rb") as file:
        first = file.readline(200).split()
    plain = not first or not first[0].startswith(b"#!") or first[-1] in (b"python", b"python3")
    return (sys.executable, str(script)) if plain or not os.access(script, os.X_OK) else (str(script),)


def file_bytes(form: str, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> int:
    """Space for a file and for what is written on the way to it.

    Args:
        weights: by their names, on any device; of tied ones each name.
    """
    count = sum({id(weight): weight.numel() for weight in weights.values()}.values())
    between = min(dtype.itemsize, 4) if form in _BY_QUANTIZER else 0
    return int(count * (BYTES_PER_WEIGHT[form] + between)) + 2**20


def write(converter: Converter, directory: Path, name: str, dtype: torch.dtype, trust_remote_code: bool) -> Agreement:
    """Convert the model in a directory, and compare the result with it.

    Args:
        directory: of the exported model; the file is written into it.
        name: of the model, for the file's metadata.
        dtype: of the exported weights.

    Raises:
        OutputError: if a program fails, the file cannot be read back, its tokenizer gives other ids, or its weights
            compute something else.
    """
    file, form = directory / f"model-{converter.form}.gguf", converter.form
    if converter.quantize is None:
        _convert(converter, directory, file, form, name)
    else:
        between = directory / "model-unquantized.gguf"
        _convert(converter, directory, between, _OUTTYPES[dtype], name)
        _call([converter.quantize, str(between), str(file), _BY_QUANTIZER[form]], file)
        between.unlink()
    with tempfile.TemporaryDirectory(dir=directory) as alone:  # beside a tokenizer.json transformers reads that instead
        (Path(alone) / file.name).symlink_to(file.absolute())
        return _compare(directory, Path(alone) / file.name, form, trust_remote_code)


def _convert(converter: Converter, directory: Path, file: Path, outtype: str, name: str) -> None:
    _call([*converter.convert, str(directory.absolute()), f"--outfile={file.absolute()}", f"--outtype={outtype}",
           f"--model-name={escaped(name)}"], file)


def _call(command: list[str], file: Path) -> None:
    """Run a program that writes a file."""
    program = Path(next(part for part in command if part != sys.executable)).name
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False,  # noqa: S603
                              env={**os.environ, "HF_HUB_OFFLINE": "1"})
    except OSError as error:
        raise OutputError(f"--gguf: {program} cannot be run: {error.strerror}") from error
    if done.returncode or not file.is_file():
        output = (done.stderr + b"\n" + done.stdout).decode(errors="backslashreplace")
        said = [line.strip() for line in output.splitlines() if line.strip()]
        errors = [line for line in said if "Error" in line] or said or ["no output"]
        hint = (" Install it with pip, as llama.cpp's requirements say." if "No module named" in errors[-1] else
                " The converter may not support this architecture, or may be too old for it.")
        raise OutputError(f"--gguf: {program} failed with exit code {done.returncode}: {clause(errors[-1])}.{hint}")


def _compare(directory: Path, file: Path, form: str, trust_remote_code: bool) -> Agreement:
    sources = [ModelSource(str(directory)), ModelSource(str(file.parent), file.name)]
    try:
        tokenizers = [load.load_tokenizer(source, trust_remote_code=trust_remote_code) for source in sources]
        asked = _texts(tokenizers[0])
        if not _is_bpe(file):  # transformers splits texts differently for these; their tokens are compared instead
            _same_tokens(tokenizers[0], file)
            tokenizers[1] = tokenizers[0]
        ids = _same_ids(tokenizers, asked, file.name)
        _same_ids(tokenizers, _all_tokens(tokenizers[0]), file.name)
        results = [_next_logps(source, ids, trust_remote_code) for source in sources]
    except OutputError:
        raise
    except Exception as error:
        raise OutputError(f"--gguf: {file.name} was written, but transformers cannot read it back to compare it: "
                          f"{clause(first_line(error))}. Export without --gguf, and convert the directory with "
                          f"{_SCRIPT}") from error
    (logps, best), (other, other_best) = results
    change = (logps - other).abs()
    if not bool(torch.isfinite(change).all()):
        raise OutputError(f"--gguf: {file.name} failed verification and was removed: its log-probs are not finite")
    found = Agreement(file.name, len(change), float(change.mean()), float(change.max()),
                      int((best == other_best).sum()), *_said(file, "add_bos_token", "eos_token_id"))
    if form in ("f32", "bf16", "f16") and found.mean > _FAR:
        raise OutputError(f"--gguf: {file.name} failed verification and was removed: its log-probs differ by "
                          f"{found.mean:.2g} nats on average, which rounding does not explain. Use another version of "
                          "llama.cpp")
    return found


def _said(file: Path, *names: str) -> list[Any]:
    """Numbers that a file gives for its tokenizer; None for one that it does not give."""
    from gguf import GGUFReader  # of an extra

    fields = [GGUFReader(file).get_field(f"tokenizer.ggml.{name}") for name in names]
    return [None if field is None else field.parts[field.data[0]][0].item() for field in fields]


def _is_bpe(file: Path) -> bool:
    from gguf import GGUFReader  # of an extra

    said = GGUFReader(file).get_field("tokenizer.ggml.model")
    return said is not None and said.contents() == "gpt2"


def _same_tokens(tokenizer: Any, file: Path) -> None:
    """Check that each id stands for the same token in a file."""
    from gguf import GGUFReader  # of an extra

    said = GGUFReader(file).get_field("tokenizer.ggml.tokens")
    tokens = [] if said is None else list(said.contents())
    ours = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    if tokens[:len(ours)] != ours:
        raise OutputError(f"--gguf: {file.name} failed verification and was removed: its vocabulary differs from the "
                          "trained one. Use another version of llama.cpp")


def _texts(tokenizer: Any) -> list[str]:
    """Texts to compare on, one of them with the special tokens of a conversation."""
    marked = "".join(dict.fromkeys(filter(None, (tokenizer.bos_token, tokenizer.eos_token))))
    with contextlib.suppress(DataError, ModelError):  # a template that rejects it, or none
        marked = ChatTemplate(tokenizer, {}, "the chat template").render(
            [{"role": "user", "content": "Why?"}], None, "a message", generate=True)
    return [*_TEXTS, *([marked] if marked else [])]


def _all_tokens(tokenizer: Any) -> list[str]:
    """Texts in which every token of the vocabulary that is text was written once."""
    count = len(tokenizer)
    return [tokenizer.decode(list(range(start, min(start + 64, count)))) for start in range(0, count, 64)]


def _same_ids(tokenizers: Sequence[Any], texts: Sequence[str], name: str) -> list[list[int]]:
    """The ids of the texts by the first tokenizer, which the second must give too."""
    found = []
    for text in texts:
        ids, others = (list(one(text, add_special_tokens=False)["input_ids"]) for one in tokenizers)
        if ids != others:
            raise OutputError(f"--gguf: {name} failed verification and was removed: its tokenizer reads {text!r} as "
                              f"{others[:8]}..., but {ids[:8]}... were trained. Use another version of llama.cpp")
        found.append(ids)
    return [ids for ids in found if len(ids) > 1]


@torch.no_grad()
def _next_logps(source: ModelSource, texts: Sequence[Sequence[int]], trust_remote_code: bool,
                ) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each next token, and the most probable one, computed in float32."""
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar of transformers
        model = load.load_model(source, "fp32", torch.device("cpu"), trust_remote_code=trust_remote_code)
    logps, best = [], []
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for text in texts:
        ids = torch.tensor(text[:longest])[None]
        scores = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        logps.append(scores.gather(1, ids[0, 1:, None])[:, 0])
        best.append(scores.argmax(-1))
    return torch.cat(logps), torch.cat(best)
