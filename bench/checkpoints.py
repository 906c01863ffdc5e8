"""Measure what checkpoints cost: the share of a run's wall time that saving takes.

    tropism kto --model DIR --data FILE --output RUN --batch-size 4 --max-steps 110 --save-every 50 --keep 0
    python bench/checkpoints.py RUN

Step time is fitted to computed tokens over the steps that run while nothing is written. The cost of a save is the time
for which training paused, plus what the steps during its writing took beyond the fit.
"""

import argparse
import json
import tempfile
from pathlib import Path


def main() -> None:
    """Print the share of the wall time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="run directory with checkpoints")
    parser.add_argument("--writing", type=float, default=15.0,
                        help="seconds for which a save is written in the background (default: 15)")
    parser.add_argument("--smoke", action="store_true", help="try it: records of an invented run")
    given = parser.parse_args()
    if given.smoke:
        with tempfile.TemporaryDirectory() as folder:
            report(invented(Path(folder)), writing=4.0)
    elif given.run is None:
        parser.error("the run directory is missing")
    else:
        report(given.run, given.writing)


def invented(run: Path) -> Path:
    """20 steps of 1 s; a save after step 10 pauses for 0.5 s and slows the next two steps down by 1 s each: 11.36%."""
    records = [{"split": "train", "step": step, "step_time": 2.0 if step in (11, 12) else 1.0,
                "tokens/computed": 100 * step + step % 2} for step in range(1, 21)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    saved = run / "checkpoints" / "step-10" / "trainer.json"
    saved.parent.mkdir(parents=True)
    saved.write_text(json.dumps({"step": 10, "stall_s": 0.5}))
    return run


def report(run: Path, writing: float) -> None:
    """Fit, and print what saving took."""
    import numpy as np  # not for --help

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in lines if record["split"] == "train"]
    steps = np.array([record["step"] for record in records])
    times = np.array([record["step_time"] for record in records])
    tokens = np.diff([0, *(record["tokens/computed"] for record in records)])
    stalls = {json.loads(path.read_text())["step"]: json.loads(path.read_text())["stall_s"]
              for path in sorted((run / "checkpoints").glob("*/trainer.json"))}
    saved = [step for step in stalls if step < steps[-1]]  # no step runs while the last one is written
    beside = np.zeros(len(steps), dtype=bool)
    for step in saved:
        after = steps > step
        beside |= after & (np.cumsum(np.where(after, times, 0)) - np.where(after, times, 0) < writing)
    quiet = ~beside & (steps > 2)
    slope, base = np.polyfit(tokens[quiet], times[quiet], 1)
    excess = float((times[beside] - (base + slope * tokens[beside])).sum())
    stall = sum(stalls[step] for step in saved)
    spread = float(np.std(times[quiet] - (base + slope * tokens[quiet])))
    print(f"{len(steps)} steps in {times.sum():.0f} s with {len(saved)} saves; fit: {base:.2f} s + "
          f"{1000 * slope:.2f} ms per token, spread {spread:.2f} s")
    print(f"paused for {stall:.2f} s; {int(beside.sum())} steps during writing took {excess:+.2f} s beyond the fit")
    print(f"saving took {100 * (stall + excess) / times.sum():.2f}% of the wall time")


if __name__ == "__main__":
    main()
