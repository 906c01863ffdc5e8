"""`tropism doctor`: facts of the machine, and faults with what to do."""

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hostile import as_an_ordinary_user
from tropism.cli.app import main
from tropism.commands.doctor import hardware, places, software
from tropism.commands.doctor.findings import examine
from tropism.observe.console import Voice
from tropism.observe.log_format import LogFormat, printing


def test_a_machine_without_gpu_is_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0; the same facts as text and as JSON; no network, no file, no secret."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("network"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "_has_nvidia", lambda: False)
    for name, value in (("HF_TOKEN", "hf_abc"), ("WANDB_API_KEY", "abc"), ("HF_ENDPOINT", "http://me:abc@hub:80"),
                        ("https_proxy", "http://me:abc@proxy"), ("TROPISM_STORE", str(tmp_path / "a" / "store"))):
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--json", str(tmp_path / "found.json")]) == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["ok"], found["faults"], found["gpus"]) == (True, [], [])
    assert found["run"]["device"] == "cpu"
    assert said.endswith("ready: a run would use cpu in fp32\n")
    for name, version in found["versions"].items():
        assert f"  {name}: {version}\n" in said
    assert found["versions"]["torch"] == torch.__version__
    assert {"matplotlib", "bitsandbytes", "gguf", "triton"} <= {*found["packages"]} | {"matplotlib"}
    assert all(one["for"] for one in found["packages"].values())
    assert found["places"]["store"] == {"path": str(tmp_path / "a" / "store"), "writable": True,
                                        "free_bytes": found["places"]["store"]["free_bytes"]}
    assert 0 < found["memory"]["available_bytes"] <= found["memory"]["machine_bytes"]
    assert found["cpu"]["cores"] >= 1
    assert "abc" not in said + json.dumps(found)
    assert found["environment"]["HF_TOKEN"] == "(set)"
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    with printing(LogFormat(quiet=True)):
        assert main(["doctor", "--quiet"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ready: a run would use cpu in fp32"


@pytest.mark.parametrize(("needed", "told"), [
    (["torch>=99"], "torch 2.13.0+cpu is installed, but torch>=99 is required. Install it with: pip install"),
    (["transformers<5"], "transformers<5 is required"), (["nothing-here>=1"], "nothing-here is not installed"),
    (["numpy>=2", "nothing-here>=1; extra == 'x'"], "")])
def test_a_version_that_does_not_do(needed: list[str], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software.importlib.metadata, "requires", lambda name: needed)
    faults: list[str] = []
    software.versions(faults)
    assert len(faults) == bool(told)
    assert told.replace("2.13.0+cpu", torch.__version__) in "".join(faults)


def test_old_optional_packages_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software.importlib.metadata, "requires", lambda name: [
        "numpy>=99; extra == 'plots'", "nothing-here; extra == 'quant'", "numpy>=99; extra == 'test'"])
    notes: list[str] = []
    found = software.optional_packages(notes)
    assert len(notes) == 1
    assert "numpy>=99" in notes[0]
    assert found["nothing-here"]["version"] is None
    assert "--lora.quantize" in found["nothing-here"]["for"]


def _breaks(*names: str) -> Any:
    def load(name: str) -> Any:
        if name in names:
            raise OSError("libcudart.so.13: cannot open shared object file\nmore")
        return SimpleNamespace()

    return load


def test_a_broken_library_is_named_and_the_rest_is_told(monkeypatch: pytest.MonkeyPatch,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(software, "import_module", _breaks("torch"))
    monkeypatch.setattr("tropism.commands.doctor.findings.import_module", _breaks("tropism.commands.doctor.hardware"))
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "fault: torch cannot be imported: OSError: libcudart.so.13: cannot open shared object file" in said
    assert "store:" in said
    assert said.endswith("1 fault: a run would fail here\n")
    with printing(LogFormat(json=True)):
        examine_and_show()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["text"][:12] for one in lines if one["kind"] == "error"] == ["fault: torch"]


def examine_and_show() -> None:
    from tropism.commands.doctor import show

    show(examine(), Voice())


def test_a_store_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Below a file, behind a dangling link, in a directory of somebody else, and without space."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "theirs").mkdir(mode=0o555)
    for store in (tmp_path / "file" / "store", tmp_path / "link", tmp_path / "theirs" / "a" / "b"):
        faults: list[str] = []
        with as_an_ordinary_user():
            found = places.places(store, faults, [])
        assert found["store"]["writable"] is False
        assert len(faults) == 1
        assert f"store: {store} cannot be written: " in faults[0]
        assert "TROPISM_STORE" in faults[0]
    assert main(["doctor", "--store", str(tmp_path / "file" / "store")]) == 1
    assert "fault: store: " in capsys.readouterr().out


def test_little_space_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places.shutil, "disk_usage", lambda path: SimpleNamespace(total=2**26, used=0, free=2**26))
    faults: list[str] = []
    notes: list[str] = []
    places.places(None, faults, notes)
    assert (len(faults), len(notes)) == (0, 4)
    assert "64.0 MiB free" in notes[0]
    for gpus, count in ((1, 4), (2, 5)):
        assert places.shared_memory(gpus, notes) == {"total_bytes": 2**26, "free_bytes": 2**26}
        assert len(notes) == count
    assert "--shm-size" in notes[-1]


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(places, "default_root", lost)
    faults: list[str] = []
    assert places.places(None, faults, [])["store"]["path"] is None
    assert "TROPISM_STORE" in faults[0]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs: a new one, an old one, and one that is broken."""
    kinds = [("H200", 9, 0), ("V100", 7, 0), ("A100", 8, 0)]

    def zeros(*_: Any, device: str) -> torch.Tensor:
        if device == "cuda:2":
            raise RuntimeError("CUDA error: uncorrectable ECC error\nand so on")
        return torch.ones(1)

    class Chosen:
        index = 0

        def __init__(self, index: int) -> None:
            self.new = index

        def __enter__(self) -> None:
            Chosen.index = self.new

        def __exit__(self, *_: object) -> None:
            Chosen.index = 0

    fake = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 3, device=Chosen, mem_get_info=lambda index: (2**30, 2**37),
        get_device_properties=lambda index: SimpleNamespace(name=kinds[index][0], major=kinds[index][1], minor=0),
        is_bf16_supported=lambda including_emulation: kinds[Chosen.index][1] >= 8,
        nccl=SimpleNamespace(version=lambda: (2, 30, 1)))
    monkeypatch.setattr(hardware, "torch", SimpleNamespace(cuda=fake, zeros=zeros, version=torch.version))


def test_gpus(devices: None) -> None:
    faults: list[str] = []
    notes: list[str] = []
    found = hardware.gpus(faults, notes)
    assert [(one["name"], one["capability"], one["bf16"]) for one in found] == [("H200", "9.0", True),
                                                                                ("V100", "7.0", False)]
    assert found[0]["memory_bytes"] == 2**37
    assert len(notes) == 1
    assert "GPU 1 (V100)" in notes[0]
    assert "--precision fp32" in notes[0]
    assert [fault[:60] for fault in faults] == ["GPU 2 cannot be used: CUDA error: uncorrectable ECC error. L"]
    assert hardware.would_use(found)["processes"] == "one, or torchrun --nproc-per-node 2"
    assert hardware.would_use(found)["device"] == "cuda"
    assert hardware.cuda(faults, notes)["nccl"] == "2.30.1"


@pytest.mark.parametrize(("built", "hidden", "faults", "notes"), [
    ("13.0", None, 1, 0), ("13.0", "", 0, 0), (None, None, 0, 1), ("13.0", "0", 1, 0)])
def test_a_gpu_that_torch_cannot_use(built: str | None, hidden: str | None, faults: int, notes: int, tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of a torch for CUDA, a note on a torch for CPUs, nothing if the user hid the GPU."""
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27\n")
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(hardware, "_DRIVER", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if hidden is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    told: tuple[list[str], list[str]] = ([], [])
    assert hardware.cuda(*told)["driver"] == "470.82.01"
    assert (len(told[0]), len(told[1])) == (faults, notes)
    assert not faults or "470.82.01 is installed" in told[0][0]


def test_variables_are_those_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        monkeypatch.delenv(name)
    for name in ("NCCL_DEBUG", "HOME", "SHELL", "OMP_NUM_THREADS", "RANK", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "1")
    assert software.environment() == {"NCCL_DEBUG": "1", "OMP_NUM_THREADS": "1", "RANK": "1"}


@pytest.mark.parametrize(("name", "value", "shown"), [
    ("MLFLOW_TRACKING_URI", "http://u:hid@den@host/x", "http://(login)@host/x"),
    ("http_proxy", "u:hidden@host:1", "(login)@host:1"), ("HF_TOKEN", "hidden", "(set)"),
    ("https_proxy", "http://host:1/a@b", "http://host:1/a@b")])
def test_secrets_in_variables_are_hidden(name: str, value: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert software.environment()[name] == shown
