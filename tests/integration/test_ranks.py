"""The verbs of `dist`, and the KTO fixture's six rows on two gloo ranks."""

import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch

from processes import run_ranks

# PARITY's fixture: log-ratios of the rows, and of their mismatched completions under our pairing (the next unit).
LOGRATIOS = [2.0, -3.0, 4.0, -1.5, 5.0, -0.5]
MISMATCHED = [1.5, 0.5, 3.0, -1.0, 1.0, -2.0]
DESIRABLE = [True, False, True, True, False, False]
WEIGHTS = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.33}


def _six_rows(rank: int, size: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from tropism.distributed import connect
    from tropism.losses.scored import Scored
    from tropism.losses.unpaired import kto
    from tropism.train.reference_point import pool, reference_moments

    with connect() as world:
        own = slice(3 * rank, 3 * rank + 3)
        logps = torch.tensor(LOGRATIOS[own], dtype=torch.float64, requires_grad=True)
        moments = reference_moments(torch.tensor(MISMATCHED[own], dtype=torch.float64), torch.ones(3).double())
        point = pool(world.sum(moments))
        scored = Scored(logps, torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.int64))
        loss = kto(scored, torch.tensor(DESIRABLE[own]), point.value, **WEIGHTS).sum() / 6
        loss.backward()
        total = world.sum(loss.detach())
        gradient = [value for part in world.gather(logps.grad.tolist()) for value in part]
        found = {"z0": float(point.value), "loss": float(total), "gradient": gradient}
        (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


def test_the_kto_fixture_on_two_ranks_equals_one_process(tmp_path: Path) -> None:
    """K2, X1: z0 0.5 and loss 0.569918842, though one rank's own mean is 5/3 and the other's is below 0."""
    assert run_ranks(2, _six_rows, str(tmp_path)) == [0, 0]
    expected = [-0.004143317, 0.005375359, -0.004041623, -0.004125276, 0.005270324, 0.005527836]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert abs(found["z0"] - 0.5) < 1e-12
        assert abs(found["loss"] - 0.569918842) < 1e-9
        for got, wanted in zip(found["gradient"], expected, strict=True):
            assert abs(got - wanted) < 1e-8


def _verbs(rank: int, size: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from tropism.distributed import connect

    with connect() as world:
        mine = torch.full((3,), float(rank + 1))
        summed = world.sum(mine)
        parameters = [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(5))]
        frozen = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        parameters[rank].grad = torch.full_like(parameters[rank], 10.0 + rank)  # each rank lacks the other's
        world.sum_gradients([*parameters, frozen])
        found = {"sum": summed.tolist(), "mine": mine.tolist(), "gather": world.gather(rank * 2),
                 "broadcast": world.broadcast(f"from {rank}"), "main": world.is_main,
                 "gradients": [p.grad.flatten().tolist() for p in parameters], "frozen": frozen.grad is None}
        (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


def test_the_verbs_on_two_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, _verbs, str(tmp_path)) == [0, 0]
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == {"sum": [3.0] * 3, "mine": [rank + 1.0] * 3, "gather": [0, 2], "broadcast": "from 0",
                         "main": rank == 0, "gradients": [[10.0] * 4, [11.0] * 5], "frozen": True}


def _slow(rank: int, size: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from torch import distributed as dist

    from tropism.distributed import connect

    with connect() as world:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), dist.group.WORLD)
        world.on_main(lambda: time.sleep(1.5))
        with world.main_first():
            time.sleep(0 if rank else 1.5)
    (Path(folder) / f"{rank}.json").write_text("done")


def test_others_wait_for_what_the_main_process_does_alone(tmp_path: Path) -> None:
    """X1: hashing a checkpoint or writing a model may take longer than an exchange of tensors ever should."""
    assert run_ranks(2, _slow, str(tmp_path)) == [0, 0]
    assert all((tmp_path / f"{rank}.json").is_file() for rank in range(2))
