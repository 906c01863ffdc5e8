"""How cost grows: CPU seconds against necessary FLOPs inside of a step, and against rows outside of it.

    python bench/growth.py [--only completions rows] [--svg docs/assets/growth.svg] [--json FILE]

Every series varies one thing: completions per prompt, tokens of the prompt, size of the vocabulary, number of
processes, number of rows. `growth` is how many times the cost grew from the first point, divided by how many times the
work did: at most 1 if the cost grows no faster than the work. The exit code is 1 if it is above --slack anywhere. Rows
may cost three times as much each when there are ten times as many, since their arrays leave the caches and are sorted;
what is quadratic would cost ten times as much. CPU seconds
are the least of several repetitions with one thread, so that other processes disturb little.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

for name, value in (("OMP_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "passive"), ("HF_HUB_OFFLINE", "1")):
    os.environ.setdefault(name, value)

SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 4096}
Point = tuple[str, float, float]


def step_cost(folder: Path, prompts: int, tokens: int, completions: int, learned: int, repeats: int,
              **sizes: int) -> tuple[float, float]:
    """Necessary FLOPs and CPU seconds of a KTO step on random rows, summed over the processes that torchrun started.

    Args:
        prompts: distinct prompts of `tokens` tokens, each with `completions` of `learned` tokens.
        sizes: of the model.
    """
    import torch
    from harness.product import step_flops
    from harness.work import Cell

    from tropism.distributed import connect
    from tropism.observe.console import Voice
    from tropism.runner import Run
    from tropism.train.step import train_step

    torch.set_num_threads(1)
    with connect() as world:
        model, data = folder / "model", folder / "rows.jsonl"
        world.on_main(lambda: _inputs(model, data, prompts, tokens, completions, learned, sizes))
        cell = Cell("kto", str(model), str(data), batch_size=prompts * completions, steps=1, grouped=True,
                    max_length=1 << 15)
        options = cell.options(str(folder / "store"))
        if world.size > 1:
            options = options.model_copy(update={"parallel": options.parallel.model_copy(
                update={"shard": 1, "replicate": world.size})})
        run = Run(options, world, Voice(loud=False))
        engine = run.build()
        packs = run.planner.packs_of(1)
        spent = []
        for _ in range(repeats + 1):  # the first one is the warm-up
            began = time.process_time()
            train_step(engine, packs)
            spent.append(time.process_time() - began)
        both = torch.tensor([step_flops(engine, packs), min(spent[1:])], dtype=torch.float64)
        flops, seconds = world.sum(both).tolist()
        return flops, seconds


def _inputs(model: Path, data: Path, prompts: int, tokens: int, completions: int, learned: int,
            sizes: dict[str, int]) -> None:
    """A random model, and random rows of exact lengths."""
    from harness import inputs

    inputs.tiny_model(model, **{**SIZES, **sizes})
    generator = random.Random(0)

    def text(count: int) -> str:
        return " ".join(f"w{generator.randrange(100, 1000)}" for _ in range(count))

    rows = [{"prompt": start + " ", "completion": text(learned), "label": (number + turn) % 2 == 0}
            for turn, start in enumerate([text(tokens) for _ in range(prompts)]) for number in range(completions)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def measured(**what: Any) -> tuple[float, float]:
    """`step_cost` in fresh processes; `processes` of them."""
    processes = what.pop("processes", 1)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, *launcher, __file__, "--point", json.dumps({"folder": folder, **what})],
                              capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{what}: exit code {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("point "))
    flops, seconds = json.loads(line.removeprefix("point "))
    return flops, seconds


def inside(name: str, smoke: bool) -> list[Point]:
    """The points of a series inside of a step."""
    few: dict[str, Any] = {"prompts": 2, "tokens": 512, "completions": 2, "learned": 64, "repeats": 3}
    if smoke:
        few |= {"tokens": 16, "learned": 8, "repeats": 1, "hidden_size": 32, "num_hidden_layers": 1}
    series: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "completions": [(str(count), {"completions": count}) for count in (1, 2, 4, 8, 16)],
        "prompt": [(str(count), {"tokens": count}) for count in (256, 512, 1024, 2048, 4096, 8192)],
        "vocabulary": [(f"{count // 1000}k", {"vocab_size": count}) for count in (50_000, 150_000)],
        "processes": [(str(count), {"processes": count, "prompts": 8}) for count in (1, 2, 3, 4)]}
    points = series[name][:1] if smoke else series[name]
    if smoke:
        with tempfile.TemporaryDirectory() as folder:
            return [(label, *step_cost(Path(folder), **few | changes)) for label, changes in points]
    return [(label, *measured(**few | changes)) for label, changes in points]


def outside(most: int) -> dict[str, list[Point]]:
    """CPU seconds of what is done once per row: schedule, packing of the reference pass, reading."""
    import numpy as np
    from harness import inputs

    from tropism.data.batching.pack import best_fit
    from tropism.data.read_rows import read_rows
    from tropism.data.schedule import Schedule
    from tropism.data.tokenization.render import Renderer
    from tropism.data.tokenization.truncate import Limits

    def schedule(count: int) -> None:
        steps = Schedule(tuple(number // 4 for number in range(count)), 32, 0, group_prompts=True, needs_partners=True)
        for number in range(1, steps.total_steps + 1):
            steps.step(number)

    def packing(count: int) -> None:
        best_fit(np.random.default_rng(0).integers(50, 1500, count).tolist(), 2048)

    def reading(count: int) -> None:
        with tempfile.TemporaryDirectory() as place:
            data = inputs.tiny_rows("kto", Path(place), count)
            renderer = Renderer(inputs.tiny_tokenizer(), Limits(512))
            began.append(time.process_time())  # writing the rows does not count
            facts = read_rows(data, renderer, "unpaired", workers=1, cache=Path(place)).rows.facts  # type: ignore[attr-defined]
            assert len(facts.row_numbers) == count

    began: list[float] = []

    def series(action: Callable[[int], None], up_to: int) -> list[Point]:
        points: list[Point] = []
        for count in (1_000, 10_000, 100_000, 1_000_000):
            spent = []
            for _ in range((3 if count <= 100_000 and action is not reading else 1) if count <= up_to else 0):
                began.append(time.process_time())
                action(count)
                spent.append(time.process_time() - began[-1])
            points += [(f"{count // 1000}k", float(count), min(spent))] if spent else []
        return points

    return {"rows: schedule": series(schedule, most), "rows: packing": series(packing, most),
            "rows: reading": series(reading, most)}


def report(name: str, points: Sequence[Point], slack: float) -> bool:
    """Print a series; whether cost grows no faster than work."""
    good, before = True, points[0]
    for label, work, cost in points:
        growth = (cost / points[0][2]) / (work / points[0][1])
        fine = (cost / before[2]) / (work / before[1]) <= 3 if name.startswith("rows") else growth <= slack
        before = label, work, cost
        good &= fine
        print(f"| {name} | {label} | {work:.3g} | {cost:.3g} | {cost / work:.2e} | {growth:.2f} "
              f"| {'ok' if fine else 'FASTER THAN ITS WORK'} |", flush=True)
    return good


def main() -> int:
    """Measure the series and print them; 1 if a cost grows faster than its work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("completions", "prompt", "vocabulary", "processes", "rows")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="series to measure (default: all)")
    parser.add_argument("--most-rows", type=int, default=1_000_000,
                        help="largest number of rows outside of a step (default: 1000000)")
    parser.add_argument("--slack", type=float, default=1.3, help="growth that is still taken for noise (default: 1.3)")
    parser.add_argument("--svg", type=Path, help="file to draw the series into")
    parser.add_argument("--json", type=Path, help="file to write the points to")
    parser.add_argument("--smoke", action="store_true", help="try it: one tiny point, and a thousand rows")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        what = json.loads(given.point)
        found = step_cost(Path(what.pop("folder")), **what)
        if int(os.environ.get("RANK", "0")) == 0:
            print("point " + json.dumps(found), flush=True)
        return 0
    from harness.chart import chart

    print("| series | point | work (FLOPs or rows) | CPU s | CPU s per unit | growth | |\n"
          "|---|---|---|---|---|---|---|")
    series: dict[str, list[Point]] = {}
    good = True
    for name in ("completions",) if given.smoke else [name for name in names if name in given.only]:
        made = outside(given.most_rows) if name == "rows" else {name: inside(name, given.smoke)}
        for title, points in made.items():
            good &= report(title, points, given.slack)
        series |= made
    if given.smoke:
        series |= outside(1_000)
    if given.json:
        given.json.write_text(json.dumps(series, indent=1) + "\n", encoding="utf-8")
    drawing = chart(series)
    if given.svg:
        given.svg.write_text(drawing, encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
