"""A store that others can write to: planted scores stop a run before step 1. A store that cannot be written serves."""

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from integration import distillation
from integration.conftest import distance, records, weights
from integration.distillation import Said
from tropism import store
from tropism.config import METHODS
from tropism.errors import OutputError, OutputExistsError, ReferenceMismatchError, StoppedEarly
from tropism.runner import run
from tropism.train.frozen.score_store import ScoreStore
from tropism.train.frozen.topk_store import TopKStore

options, distill = distillation.options, distillation.distill
teacher_dir, texts = distillation.teacher_dir, distillation.texts

AGREE = r"reference: (\d+) of (\d+) scores from the store; (\d+) recomputed in [\d.]+ s, agree"


@pytest.fixture
def go(tiny_model_dir: Path, tmp_path: Path, data_of: dict[str, Path]) -> Callable[..., Any]:
    """Run with small settings; the words of the run are in `said`."""
    count = 0

    def start(method: str = "dpo", said: Said | None = None, **changes: Any) -> Any:
        nonlocal count
        count += 1
        settings = {"model": str(tiny_model_dir), "data": str(data_of[method]), "output": str(tmp_path / f"own{count}"),
                    "store": str(tmp_path / "store"), "batch_size": 8, "max_steps": 2, "learning_rate": 1e-3,
                    "samples": 0, **changes}
        return run(METHODS[method](**settings), said or Said())

    return start


def plant(root: Path, shift: float, share: float = 1.0) -> list[Path]:
    """Shift stored scores, as another user would: under names that are right."""
    written = []
    for file in [*root.glob("*/*.npz")]:
        entries = ScoreStore(root, file.parent.name, {}).load()
        changed = {key: value - shift * (number < share * len(entries))
                   for number, (key, value) in enumerate(entries.items())}
        file.unlink()
        ScoreStore(root, file.parent.name, {}).add(changed)
        written += file.parent.glob("*.npz")
    return written


@pytest.mark.some(4)
@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 4}}, {"reference": "other"}, {"precision": "bf16"},
                                     {"precision": "fp64"}])
@pytest.mark.parametrize("shift", [50.0, -0.9])
def test_planted_scores_stop_the_run(go: Callable[..., Any], tmp_path: Path, teacher_dir: Path,
                                     changes: dict[str, Any], shift: float) -> None:
    """R1, R4: of the default reference, with an adapter, and of another model; with file, row and remedy."""
    changes = {**changes, "reference": str(teacher_dir)} if "reference" in changes else changes
    go(**changes)
    file, = plant(tmp_path / "store", shift)
    with pytest.raises(ReferenceMismatchError) as caught:
        go(**changes)
    said = str(caught.value)
    assert re.match(rf"{file}: pairs\.jsonl:\d+: the stored log-prob is -[\d.]+, but the reference gives -[\d.]+ "
                    r"\(\d+ of \d+ recomputed scores differ\)\. ", said), said
    assert said.endswith(f"Remove the stored scores with: tropism store clean --store {tmp_path / 'store'}")
    assert ("--allow-reference-mismatch" in said) is ("reference" not in changes)


def test_a_resumed_run_is_stopped_too(go: Callable[..., Any], tmp_path: Path) -> None:
    """R2: its policy has moved on, but its reference is that of the start."""
    first = go(save_every=1)
    plant(tmp_path / "store", 50.0)
    with pytest.raises(ReferenceMismatchError, match="the stored log-prob is"):
        go(output=str(first.directory), resume="auto", max_steps=4, save_every=1)


def test_a_mismatch_is_the_users_choice(go: Callable[..., Any], tmp_path: Path) -> None:
    """R1: both checks become notes."""
    go()
    plant(tmp_path / "store", 50.0)
    said = Said()
    result = go(said=said, allow_reference_mismatch=True)
    assert "note: " in said.text
    assert "recomputed scores differ" in said.text
    assert "policy and reference differ before step 1: mean |log-ratio| 50 nats" in said.text
    assert abs(records(result)[0]["rewards/chosen"]) > 4


def test_a_planted_score_of_step_1_that_the_sample_misses(go: Callable[..., Any], tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """R1: the comparison before step 1 stops the run, not a note."""
    from tropism.train.frozen import sample

    go()
    plant(tmp_path / "store", 50.0)
    monkeypatch.setattr(sample, "_DRAWS", 0)
    with pytest.raises(ReferenceMismatchError, match=r"differ before step 1: mean \|log-ratio\| 50 nats"):
        go()


def test_scores_that_agree_are_counted(go: Callable[..., Any], tmp_path: Path) -> None:
    """The line names what came from the store and what was computed again; nothing else changes."""
    said, again, partly = Said(), Said(), Said()
    cold = go(said=said)
    assert "from the store" not in said.text
    warm = go(said=again)
    found = re.search(AGREE, again.text)
    assert found is not None
    assert found[1] == found[2]
    assert int(found[3]) > 10
    assert distance(weights(cold.model), weights(warm.model)) == 0.0
    go(said=partly, max_steps=5)
    found = re.search(AGREE, partly.text)
    assert found is not None
    assert int(found[1]) < int(found[2])


def test_scores_of_another_fingerprint_are_not_taken(go: Callable[..., Any], tmp_path: Path) -> None:
    """Copied into the directory of the run's model, they are damaged; the run is the one with an empty store."""
    wanted = go(store=str(tmp_path / "empty"))
    go(precision="fp64")
    other, = (tmp_path / "store").glob("*/*.npz")
    own, = (tmp_path / "empty").glob("*/*.npz")
    copy = tmp_path / "store" / own.parent.name / other.name
    copy.parent.mkdir()
    copy.write_bytes(other.read_bytes())
    said = Said()
    result = go(said=said)
    assert f"the reference store has 1 unusable file (first: {copy})" in said.text
    assert not copy.exists()
    assert distance(weights(result.model), weights(wanted.model)) == 0.0


# --- the teacher ------------------------------------------------------------------------------------------------------


def test_planted_teacher_tokens_stop_the_run(distill: Callable[..., Any], tmp_path: Path) -> None:
    """R4: other probabilities that add up to 1, of other tokens that the vocabulary has."""
    distill(top_k=4)
    said = Said()
    distill(voice=said, top_k=4)
    assert re.search(r"teacher: (\d+) of \1 completions from the store; \d+ recomputed in [\d.]+ s, agree", said.text)
    file, = (tmp_path / "store").glob("*/*.safetensors")
    opened = TopKStore(tmp_path / "store", file.parent.name, {})
    opened.open()
    entries = {key: opened.read(key) for key in opened._where}
    for change in (lambda ids, logps, tail: ((ids + 40) % 100, logps, tail),
                   lambda ids, logps, tail: (ids, logps[:, ::-1].copy(), tail)):
        for path in file.parent.glob("*.safetensors"):
            path.unlink()
        TopKStore(tmp_path / "store", file.parent.name, {}).add(
            {key: change(*entry) for key, entry in entries.items()}, 102)
        planted, = (tmp_path / "store").glob("*/*.safetensors")
        with pytest.raises(ReferenceMismatchError) as caught:
            distill(top_k=4)
        assert re.match(rf"{planted}: texts\.jsonl:\d+: [\d.]+% of the stored probabilities are not the teacher's",
                        str(caught.value))


def test_entries_of_other_lengths_stop_the_run(distill: Callable[..., Any], tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    from tropism.train.frozen import sample

    distill(top_k=4)
    file, = (tmp_path / "store").glob("*/*.safetensors")
    opened = TopKStore(tmp_path / "store", file.parent.name, {})
    opened.open()
    twice = {key: tuple(np.concatenate([part, part]) for part in opened.read(key)) for key in opened._where}
    file.unlink()
    TopKStore(tmp_path / "store", file.parent.name, {}).add(twice, 102)  # type: ignore[arg-type]
    monkeypatch.setattr(sample, "_DRAWS", 0)
    with pytest.raises(ReferenceMismatchError, match=r"\.safetensors: \d+ tokens of a completion that has \d+\. "):
        distill(top_k=4)


# --- a reference of its own -------------------------------------------------------------------------------------------


def test_another_reference_is_named_with_its_distance(go: Callable[..., Any], teacher_dir: Path,
                                                      tiny_model_dir: Path) -> None:
    """R1: it may differ, and the log says by how much; from the store or not."""
    for _ in range(2):
        said = Said()
        first = records(go(said=said, reference=str(teacher_dir)))[0]
        found = re.search(rf"reference: {teacher_dir}; mean \|log-ratio\| before training ([\d.]+) nats, over the "
                          r"(\d+) completions of step 1", said.text)
        assert found is not None
        assert float(found[1]) > 1
        assert first["loss"] != pytest.approx(np.log(2), abs=1e-6)
    said = Said()
    go(said=said, reference=str(tiny_model_dir))
    assert f"reference: {tiny_model_dir}; mean |log-ratio| before training 0 nats" in said.text


# --- a store that cannot be written -----------------------------------------------------------------------------------


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], None]:
    """Make the store a directory that this user must not write; root may write anywhere, so the calls are refused."""
    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def refused(path: Any, *args: Any, **kwargs: Any) -> Any:
            if (tmp_path / "store") in (Path(path), *Path(path).parents):
                if real is mkdir and Path(path).exists():
                    raise FileExistsError
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(path, *args, **kwargs)

        return refused

    mkdir = os.mkdir

    def refuse() -> None:
        for owner, name in ((os, "mkdir"), (os, "utime"), (Path, "touch"), (Path, "write_bytes"), (Path, "unlink")):
            monkeypatch.setattr(owner, name, refusing(getattr(owner, name)))

    return refuse


def test_a_complete_store_that_is_read_only_serves(go: Callable[..., Any], distill: Callable[..., Any],
                                                   read_only: Callable[[], None]) -> None:
    """Nothing is said, as nothing needs to be done."""
    wanted, taught = go(), distill(top_k=4)
    read_only()
    said = Said()
    assert distance(weights(go(said=said).model), weights(wanted.model)) == 0.0
    assert re.search(AGREE, said.text)
    assert "note" not in said.text
    assert distance(weights(distill(top_k=4).model), weights(taught.model)) == 0.0


def test_an_incomplete_store_that_is_read_only(go: Callable[..., Any], distill: Callable[..., Any],
                                               read_only: Callable[[], None], tmp_path: Path) -> None:
    """New scores are used and not kept, which is said once; a teacher's tokens need the disk."""
    wanted = go(store=str(tmp_path / "other"), max_steps=5)
    go()
    read_only()
    said = Said()
    result = go(said=said, max_steps=5)
    assert len(re.findall(r"the reference store cannot be written: Read-only file system.*\. The new scores are used, "
                          r"but not kept\. To keep them, choose another place with --store", said.text)) == 1
    assert distance(weights(result.model), weights(wanted.model)) < 1e-6
    with pytest.raises(OutputError, match=r"teacher's store cannot be written: Read-only file system.*--store"):
        distill(top_k=4)


# --- the limit --------------------------------------------------------------------------------------------------------


def test_a_run_keeps_what_it_needs_and_removes_the_rest(go: Callable[..., Any], tmp_path: Path) -> None:
    """The model of an earlier run goes, also a half-written file; with `none` everything stays."""
    go(precision="fp64")
    old, = (tmp_path / "store").iterdir()
    (old / ".a.npz.1.1").write_bytes(bytes(10))
    os.utime(old / ".a.npz.1.1", (0, 0))
    go(store_limit="none")
    assert len(list((tmp_path / "store").iterdir())) == 2
    assert not (old / ".a.npz.1.1").exists()
    said = Said()
    go(said=said, store_limit="1KB")
    assert [path.name for path in (tmp_path / "store").iterdir() if path == old] == []
    assert "store: removed 1 file used least recently (" in said.text
    assert "which exceeds --store-limit 1KB, because all of it is in use" in said.text
    assert not list((tmp_path / "store").glob("*/.*"))


def test_a_note_names_a_store_that_others_can_write(go: Callable[..., Any], tmp_path: Path) -> None:
    said, quiet = Said(), Said()
    go(said=quiet)
    assert "other users" not in quiet.text
    (tmp_path / "store").chmod(0o777)
    go(said=said)
    assert said.text.count("other users can write to it") == 1
    assert f"note: {tmp_path / 'store'}: other users can write to it" in said.text


def test_a_run_leaves_no_lease(go: Callable[..., Any], tmp_path: Path) -> None:
    """However it ends: stopped, refused, or with nothing left to do."""
    with pytest.raises(StoppedEarly):
        go(max_time="0.001s")
    assert store._leases == {}
    output = str(go().directory)
    store.use(tmp_path / "store" / ("a" * 32))  # as rows do that are read before the run begins
    with pytest.raises(OutputExistsError):
        go(output=output)
    assert store._leases == {}
    store.use(tmp_path / "store" / ("a" * 32))
    go(output=output, resume="auto")
    assert store._leases == {}
    assert not list((tmp_path / "store").glob("*/.*"))


@pytest.mark.slow
def test_sharded_processes_are_stopped_together(go: Callable[..., Any], tiny_model_dir: Path, data_of: dict[str, Path],
                                                tmp_path: Path) -> None:
    """R1: the sample is computed by all processes, and each stops with the same reason."""
    go()
    plant(tmp_path / "store", 50.0)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tropism",
               "dpo", "--model", str(tiny_model_dir), "--data", str(data_of["dpo"]), "--output", str(tmp_path / "two"),
               "--store", str(tmp_path / "store"), "--batch-size", "8", "--max-steps", "2", "--samples", "0",
               "--parallel.shard", "on"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode != 0
    assert re.search(r"pairs\.jsonl:\d+: the stored log-prob is", done.stderr + done.stdout)
    assert not (tmp_path / "two" / "model").exists()
