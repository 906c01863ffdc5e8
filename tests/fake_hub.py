"""A small Hugging Face Hub on loopback: what pushing, downloading and streaming ask of it.

It can drop connections in the middle. Its validation of cards is stricter than the Hub's about what we write.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

TOKEN = "hf_of_the_test"
_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass
class Repo:
    """A repository: each commit is all its files."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], message: str = "", branch: str = "main") -> str:
        sha = hashlib.sha1(repr((sorted(files.items()), len(self.commits))).encode()).hexdigest()
        self.commits[sha], self.heads[branch] = files, sha
        self.messages.append(message)
        return sha

    def sha(self, revision: str) -> str | None:
        return self.heads.get(revision, revision if revision in self.commits else None)

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.heads["main"]]


class Hub:
    """The state of the server, and which connections it drops."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.blobs: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.sent = 0
        self.role = "write"
        self.drops: list[tuple[str, int]] = []
        self.endpoint = ""

    def add(self, name: str, files: dict[str, bytes], kind: str = "model", branch: str = "main") -> str:
        """Add a commit, and the repository if it is new. Returns the hash."""
        return self.repos.setdefault((kind, name), Repo()).commit(files, branch=branch)

    def drop(self, request: str, times: int = 1) -> None:
        """Drop the connection of the next requests that begin like this, such as `PUT /lfs`, after half an answer."""
        self.drops.append((request, times))

    def drops_now(self, request: str) -> bool:
        for number, (start, times) in enumerate(self.drops):
            if request.startswith(start) and times > 0:
                self.drops[number] = (start, times - 1)
                return True
        return False


def invalid(card: str) -> list[str]:
    """What is wrong with the front matter of a card."""
    found = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    if not found:
        return ["no front matter"]
    values = yaml.safe_load(found[1])
    wrong = [f"{name}: {one!r} is not an id" for name in ("base_model", "datasets") if name in values
             for one in (values[name] if isinstance(values[name], list) else [values[name]])
             if not isinstance(one, str) or not _ID.fullmatch(one)]
    if values.get("base_model_relation", "finetune") not in ("adapter", "finetune", "merge", "quantized"):
        wrong.append("base_model_relation")
    for entry in values.get("model-index", []):
        if not isinstance(entry["name"], str) or not entry["name"]:
            wrong.append("model-index name")
        for result in entry["results"]:
            texts = [result["task"]["type"], result["dataset"]["type"], result["dataset"]["name"],
                     *(metric["type"] for metric in result["metrics"])]
            wrong += [f"model-index: {text!r}" for text in texts if not isinstance(text, str) or not text]
            wrong += ["value" for metric in result["metrics"] if not isinstance(metric["value"], int | float)]
    return wrong


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        size = int(self.headers.get("Content-Length") or 0)
        request = f"{self.command} {path}"
        self.hub.asked.append(request)
        dropped = self.hub.drops_now(request)
        if dropped and size:
            self.rfile.read(size // 2)
            self.close_connection = True
            return
        body = self.rfile.read(size) if size else b""
        code, content, headers = self._answer(path, body)
        self.send_response(code)
        headers = {"Content-Length": str(len(content)), **headers}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            sent = content[:len(content) // 2] if dropped else content
            self.hub.sent += len(sent)
            self.wfile.write(sent)
        self.close_connection = dropped

    do_GET = do_POST = do_PUT = do_HEAD = _serve

    def _answer(self, path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        hub = self.hub
        authorized = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if path == "/api/whoami-v2":
            me = {"type": "user", "name": "me", "auth": {"accessToken": {"displayName": "t", "role": hub.role}}}
            return _json(me) if authorized else _json({"error": "Invalid user token"}, 401)
        if path == "/api/validate-yaml":
            wrong = invalid(json.loads(body)["content"])
            return _json({"errors": [{"message": one} for one in wrong], "warnings": []}, 400 if wrong else 200)
        if path.startswith("/lfs/"):
            hub.blobs[path.removeprefix("/lfs/")] = body
            return 200, b"", {}
        if path == "/api/repos/create":
            asked = json.loads(body)
            key = ("model", f"{asked['organization']}/{asked['name']}")
            code = 409 if key in hub.repos else 200
            private = asked.get("visibility") == "private" or asked.get("private") is True
            hub.repos.setdefault(key, Repo(private=private)).heads or hub.add(key[1], {".gitattributes": b""})
            return _json({"url": f"{hub.endpoint}/{key[1]}", "id": key[1], "name": key[1]}, code)
        if found := re.fullmatch(r"/(.+?)\.git/info/lfs/objects/batch", path):
            return _json({"transfer": "basic", "objects": [
                {**one, **({} if one["oid"] in hub.blobs else {
                    "actions": {"upload": {"href": f"{hub.endpoint}/lfs/{one['oid']}"}}})}
                for one in json.loads(body)["objects"]]})
        if found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(("dataset" if found[1] else "model", found[2]), found[3], found[4])
        found = re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/([\w-]+)(?:/([^/]+))?(?:/(.*))?)?", path)
        repo = hub.repos.get((found[1], found[2])) if found else None
        if repo is None or (repo.private and not authorized):
            return _json({"error": "not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        assert found is not None
        return self._of_repo(repo, found[2], found[3] or "revision", found[4] or "main", found[5] or "", body)

    def _of_repo(self, repo: Repo, name: str, verb: str, revision: str, below: str,
                 body: bytes) -> tuple[int, bytes, dict[str, str]]:
        sha = repo.sha(revision)
        if sha is None:
            return _json({"error": "no such revision"}, 404, {"X-Error-Code": "RevisionNotFound"})
        files = repo.commits[sha]
        if verb == "revision":
            return _json({"id": name, "sha": sha, "private": repo.private, "tags": [], "downloads": 0,
                          "siblings": [{"rfilename": file} for file in files]})
        if verb == "tree":
            return _json([_entry(file, content) for file, content in files.items() if file.startswith(below)])
        if verb == "paths-info":
            asked = json.loads(body)["paths"]
            return _json([_entry(file, files[file]) for file in asked if file in files])
        if verb == "preupload":
            return _json({"files": [{"path": file["path"], "shouldIgnore": False, "oid": None,
                                     "uploadMode": "lfs" if file["path"].endswith("safetensors") else "regular"}
                                    for file in json.loads(body)["files"]]})
        if verb == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            new = dict(files)
            for line in lines[1:]:
                value = line["value"]
                if line["key"] == "deletedFile":
                    del new[value["path"]]
                else:
                    new[value["path"]] = (self.hub.blobs[value["oid"]] if line["key"] == "lfsFile"
                                          else base64.b64decode(value["content"]))
            sha = repo.commit(new, lines[0]["value"]["summary"])
            return _json({"success": True, "commitOid": sha, "commitUrl": f"{self.hub.endpoint}/{name}/commit/{sha}"})
        return _json({"error": "unknown"}, 404)

    def _file(self, key: tuple[str, str], revision: str, file: str) -> tuple[int, bytes, dict[str, str]]:
        repo = self.hub.repos.get(key)
        sha = repo.sha(revision) if repo else None
        if repo is None or sha is None:
            return _json({"error": "not found"}, 404, {
                "X-Error-Code": "RepoNotFound" if repo is None else "RevisionNotFound"})
        content = repo.commits[sha].get(file)
        if content is None:
            return _json({"error": "not found"}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        headers = {"X-Repo-Commit": sha, "ETag": f'"{hashlib.sha1(content).hexdigest()}"', "Accept-Ranges": "bytes"}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            return 206, content[first:last + 1], {**headers, "Content-Range": f"bytes {first}-{last}/{len(content)}"}
        return 200, content, headers


def _entry(file: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def _json(content: Any, code: int = 200, headers: dict[str, str] | None = None) -> tuple[int, bytes, dict[str, str]]:
    return code, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})}


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub that listens."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(hub: Hub, monkeypatch: pytest.MonkeyPatch, cache: str) -> None:
    """Let huggingface_hub in this process ask it, with a token and a cache of its own, and wait little to retry."""
    import huggingface_hub.utils._http as http
    from huggingface_hub import constants

    values = {"ENDPOINT": hub.endpoint, "HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": cache,
              "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"}
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # it keeps its first endpoint
    monkeypatch.setattr(http.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
