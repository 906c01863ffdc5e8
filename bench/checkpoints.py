"""What saving costs: a run that keeps checkpoints, and how much longer its steps take while one is being written.

    tropism kto --model DIR --data FILE --output RUN --batch-size 4 --max-steps 110 --save-every 50 --keep 0
    python bench/checkpoints.py RUN

Within one run: the time of a step is fitted to its computed tokens over the steps with no save going on. The cost of a
save is the time for which training stood still, and what the steps beside its writing took more than the fit.
"""

import argparse
import json
from pathlib import Path

import numpy as np


def main() -> None:
    """Print the share of the wall time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--writing", type=float, default=15.0, help="seconds that a save is written beside the steps")
    given = parser.parse_args()
    lines = [json.loads(line) for line in (given.run / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in lines if record["split"] == "train"]
    steps = np.array([record["step"] for record in records])
    times = np.array([record["step_time"] for record in records])
    tokens = np.diff([0, *(record["tokens/computed"] for record in records)])
    stalls = {json.loads(path.read_text())["step"]: json.loads(path.read_text())["stall_s"]
              for path in sorted((given.run / "checkpoints").glob("*/trainer.json"))}
    saved = [step for step in stalls if step < steps[-1]]  # the one at the end is written beside nothing
    beside = np.zeros(len(steps), dtype=bool)
    for step in saved:
        after = steps > step
        beside |= after & (np.cumsum(np.where(after, times, 0)) - np.where(after, times, 0) < given.writing)
    quiet = ~beside & (steps > 2)
    slope, base = np.polyfit(tokens[quiet], times[quiet], 1)
    excess = float((times[beside] - (base + slope * tokens[beside])).sum())
    stall = sum(stalls[step] for step in saved)
    spread = float(np.std(times[quiet] - (base + slope * tokens[quiet])))
    print(f"{len(steps)} steps, {times.sum():.0f} s, {len(saved)} saves beside them; fit: {base:.2f} s + "
          f"{1000 * slope:.2f} ms a token, spread {spread:.2f} s")
    print(f"stood still {stall:.2f} s; {int(beside.sum())} steps beside the writing took {excess:+.2f} s more than "
          "the fit")
    print(f"saving cost {100 * (stall + excess) / times.sum():.2f} % of the wall time")


if __name__ == "__main__":
    main()
