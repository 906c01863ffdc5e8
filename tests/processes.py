"""Processes that tests start: of one fork server, where what they need is imported already."""

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tropism.cli.app import main
from tropism.config import METHODS
from tropism.distributed import connect
from tropism.runner import run


def fork_server() -> Any:
    """Starts processes as the module `multiprocessing` does; the first call starts the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["server_imports"])
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([path] if path else [])])
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ |= {"PYTHONPATH": path} if path else {}
    return context


@contextmanager
def free_port() -> Iterator[int]:
    """A port that nobody else is given while the block runs. Whoever listens there shares it with us, as TCP allows:
    both say that the address may be used again, and we do not listen."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        yield int(probe.getsockname()[1])


def one_rank(rank: int, size: int, port: int, jobs: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """What torchrun does, without its start-up time; one run after another in one process group."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with connect():
        for method, settings in jobs:
            run(METHODS[method](**settings))


def run_ranks(size: int, target: Callable[..., None], *args: Any, limit_s: float = 240) -> list[int]:
    """Run `target(rank, size, port, *args)` in processes of a fork server; exit codes, -1 of one that ran longer than
    the limit and was killed."""
    context = fork_server()
    with free_port() as port:
        ranks = [context.Process(target=target, args=(rank, size, port, *args)) for rank in range(size)]
        try:
            for rank in ranks:
                rank.start()
            deadline = time.monotonic() + limit_s
            for rank in ranks:
                rank.join(max(0.0, deadline - time.monotonic()))
            return [int(rank.exitcode if rank.exitcode is not None else -1) for rank in ranks]
        finally:
            for rank in ranks:
                if rank.pid is not None:
                    rank.kill()
                    rank.join()


def start_fork_server() -> None:
    """Let it import what all ranks need, so that nobody measures that."""
    assert run_ranks(1, _nothing) == [0]


def _nothing(rank: int, size: int, port: int) -> None:
    pass


def tropism(command: list[str], *, capture_output: bool, text: bool, env: Mapping[str, str]) -> CompletedProcess[str]:
    """What `subprocess.run` does with `python -m tropism ...`, without its start-up time."""
    assert (command[1:3], capture_output, text) == (["-m", "tropism"], True, True)
    with TemporaryDirectory() as folder:
        files = [f"{folder}/{name}" for name in ("out", "err")]
        process = fork_server().Process(target=_tropism, args=(command[3:], files, dict(env)))
        process.start()
        process.join()
        return CompletedProcess(command, process.exitcode, *(Path(file).read_text() for file in files))


def _tropism(arguments: list[str], files: list[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    torch.set_num_threads(1)
    sys.exit(main(arguments))
