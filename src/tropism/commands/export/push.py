"""Upload an exported directory to the Hugging Face Hub.

Name, token and repository are checked before weights are read, and the upload begins when the directory is complete.
"""

import re
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from tropism.borders import read_object
from tropism.errors import ModelError, OutputError, OutputExistsError, TropismError, UsageError, clause, first_line
from tropism.model.source import public_name
from tropism.observe.checksums import differences

FACTS = "export.json"
"""Describes an export. It is in the directory and in its repository."""

MESSAGE = "Upload a model exported by Tropism"

_OWN_FILES = (FACTS, "README.md")  # which are not in the list of files, or may be edited
_STALE = ("*.safetensors", "*.safetensors.index.json", "*.gguf", "Modelfile", "config.json", "adapter_config.json")
"""Files of an earlier push that would mix with this one: weights in other files, or of an adapter."""


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository on the Hub that a model may be pushed to.

    Args:
        name: `owner/name`.
        private: create it as a private one.
        api: client with the user's token.
    """

    name: str
    private: bool
    api: HfApi

    @classmethod
    def of(cls, name: str, private: bool = False) -> "Repository":
        """Check the name, and that there is a token. Nothing is sent.

        Raises:
            UsageError: naming what to change.
        """
        try:
            validate_repo_id(name)
        except HFValidationError:
            name_is_valid = False
        else:
            name_is_valid = name.count("/") == 1
        if not name_is_valid:
            raise UsageError(f"--push {name}: not a valid repository name. Write owner/name with letters, digits, '-', "
                             "'_' and '.'")
        if get_token() is None:
            raise UsageError("--push: no token for the Hub was found. Run `hf auth login`, or set HF_TOKEN to a token "
                             "that may write.")
        return cls(name, private, HfApi())

    def check(self, facts: Mapping[str, Any]) -> None:
        """Check that the token may write, and that the repository is absent, empty, or holds an export of the same run.

        Args:
            facts: `run` and `fingerprints` of the export.

        Raises:
            UsageError: if the token cannot write, or the repository is public but should not be.
            OutputExistsError: if it has other content.
            OutputError: if the Hub cannot be asked.
        """
        try:
            token = (self.api.whoami().get("auth") or {}).get("accessToken") or {}
            try:
                found = self.api.repo_info(self.name)
            except RepositoryNotFoundError:
                found = None
            files = {file.rfilename for file in (found.siblings or [])} - {".gitattributes"} if found else set()
            known = self._facts() if FACTS in files else {}
        except Exception as error:  # requests fail in many ways
            if getattr(getattr(error, "response", None), "status_code", None) == 401:
                raise UsageError("--push: the Hub does not accept the token. Run `hf auth login`, or set HF_TOKEN to a "
                                 "valid one.") from error
            raise OutputError(f"--push {self.name}: the repository cannot be looked up: {clause(_reason(error))}. "
                              "Nothing was written. Omit --push to export only.") from error
        if token.get("role") == "read":
            raise UsageError("--push: the token may only read. Create one that may write at "
                             f"{self.api.endpoint}/settings/tokens")
        if found is not None and self.private and not found.private:
            raise UsageError(f"--push {self.name} --private: the repository exists and is public. Make it private in "
                             "its settings, or choose another name.")
        if files and not _same(known, facts):
            raise OutputExistsError(f"--push {self.name}: the repository has files that are not an export of this run, "
                                    f"such as {min(files)}. Nothing was changed. Choose another name.")

    def _facts(self) -> dict[str, Any]:
        """What the export in the repository says of itself; empty if it cannot be read."""
        with tempfile.TemporaryDirectory() as directory:
            file = Path(self.api.hf_hub_download(self.name, FACTS, local_dir=directory))
            with suppress(TropismError):
                return read_object(file)
        return {}

    def upload(self, directory: Path, again: str) -> str:
        """Upload a complete export. Files that are there already are not uploaded again.

        Args:
            again: command that uploads it again.

        Returns:
            the address of the model.

        Raises:
            OutputError: if that fails. The directory is complete.
        """
        names = [*read_object(directory / FACTS)["files"], FACTS]
        try:
            made = self.api.create_repo(self.name, private=True if self.private else None, exist_ok=True)
            # First what tells that the repository is ours: large uploads are several commits, and one may be the last.
            self.api.upload_file(repo_id=self.name, path_or_fileobj=directory / FACTS, path_in_repo=FACTS,
                                 commit_message=MESSAGE)
            self.api.upload_folder(repo_id=self.name, folder_path=directory, commit_message=MESSAGE,
                                   allow_patterns=[_literal(name) for name in names], delete_patterns=list(_STALE))
        except Exception as error:  # uploads fail in many ways
            raise OutputError(f"--push {self.name}: the upload failed: {clause(_reason(error))}. {directory} is "
                              f"complete. To upload it again, run: {again}") from error
        return str(made)


def check_base(base: str) -> None:
    """Check that the base of an adapter can be named to others.

    Raises:
        UsageError: if it is a local one.
    """
    if public_name(base) != base:
        raise UsageError(f"--push: the adapter's base is a local directory ({base}), which others do not have, and "
                         "adapter_config.json would tell its path. Name the base's repository on the Hub with "
                         "--base owner/name, or add --merge.")


def check_exported(directory: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Check that a directory is a complete export of a run, whose card may have been edited.

    Args:
        facts: entries that its `export.json` must have.

    Returns:
        the content of `export.json`.

    Raises:
        OutputExistsError: if it is another export, or a file in it changed.
    """
    advice = "Nothing was changed. Choose another directory with --to."
    try:
        found = read_object(directory / FACTS)
        files = {str(name): entry for name, entry in found["files"].items()}
    except (ModelError, KeyError, AttributeError) as error:
        raise OutputExistsError(f"{directory}: not a complete export: {FACTS} cannot be read: {first_line(error)}. "
                                f"{advice}") from error
    for name, value in facts.items():
        if found.get(name) != value:
            raise OutputExistsError(f"{directory} holds another export: its {name} is {_short(found.get(name))}, not "
                                    f"{_short(value)}. {advice}")
    if wrong := differences(directory, {name: entry for name, entry in files.items() if name not in _OWN_FILES}):
        raise OutputExistsError(f"{directory}: the export has changed: {', '.join(wrong[:3])}. {advice}")
    if (directory / "adapter_config.json").is_file():
        check_base(str(read_object(directory / "adapter_config.json").get("base_model_name_or_path")))
    return found


def _same(known: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    return all(known.get(name) == value for name, value in facts.items())


def _short(value: Any) -> str:
    return "different" if isinstance(value, dict) else str(value)[:100]


def _literal(name: str) -> str:
    """A pattern that matches a file's name alone."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def _reason(error: BaseException) -> str:
    """Why a request failed, with the causes that libraries wrap."""
    causes: list[str] = []
    found: BaseException | None = error
    while found is not None and len(causes) < 3:
        causes.append(f"{type(found).__name__}: {first_line(found)}"[:300])
        found = found.__cause__
    return "; ".join(dict.fromkeys(causes))
