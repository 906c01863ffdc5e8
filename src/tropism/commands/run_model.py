"""The model that a user means by the name of a run directory or a checkpoint."""

import shlex
from pathlib import Path

from tropism.errors import ModelError
from tropism.model.source import ModelSource
from tropism.observe.manifest import read_manifest
from tropism.train.checkpoints import files as checkpoint


def directory_of(model: str) -> Path | None:
    """The run that a directory is, or that it belongs to as its result, a checkpoint or a checkpoint's model."""
    path = Path(model).expanduser().absolute()
    found = (one for one in (path, *path.parents[:3]) if (one / "manifest.json").is_file())
    return next((one for one in found if (one / "config.yaml").is_file()), None)


def model_of(name: str, use: str = "evaluate") -> ModelSource:
    """The model of a name; of a run directory and of a checkpoint the model in it.

    Args:
        use: what is done with the model, for the advice.

    Raises:
        ModelError: if it has none.
    """
    path = Path(name).expanduser()
    if (path / "model").is_dir() and ((path / "manifest.json").is_file() or (path / "COMPLETE").is_file()):
        return ModelSource.of(str(path / "model"))
    run = directory_of(name)
    if run is not None and (path / "COMPLETE").is_file():
        raise ModelError(f"{path}: this checkpoint has no model/. Write one with `tropism export "
                         f"{shlex.quote(str(run))} --checkpoint {path.name} --to DIR`, and {use} DIR.")
    if run is not None and run == path.absolute():
        raise ModelError(f"{path}: {_unfinished(run, use)}")
    return ModelSource.of(name)


def _unfinished(run: Path, use: str) -> str:
    try:
        status = read_manifest(run / "manifest.json").get("status")
    except (OSError, ValueError):
        status = "unknown"
    named = shlex.quote(str(run))
    steps = [one.path.name for one in checkpoint.listed(run / "checkpoints")]
    other = (f", or write the model of a checkpoint with `tropism export {named} --checkpoint {steps[-1]} --to DIR` "
             f"and {use} DIR" if steps else "")
    return f"the run has no trained model yet (status: {status}). Finish it with `tropism resume {named}`{other}."
