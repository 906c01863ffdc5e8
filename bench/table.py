"""The table of docs/performance.md, measured on this machine: Tropism beside TRL and a plain loop.

    python bench/table.py            # KTO and DPO, short rows, tuned TRL: within 8 minutes (make bench)
    python bench/table.py --full     # every method, kind of rows and side: hours (make bench-full)

The model is SmolLM2-135M on a CPU, and the shapes of Qwen3-0.6B and Llama-3.2-1B with random weights on a GPU. Rows are
those of --data-dir or $TROPISM_TEST_DATA; without them, the demo's feedback, which is short. Each comparison is a file
in the directory of --results. One that is there is not measured again, so a stopped call can be continued. The exit
code is 1 if sides did different work, and 2 if something could not be measured.
"""

import argparse
import importlib.util
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRL_EXPERIMENTAL_SILENCE": "1",
               "PYTHONWARNINGS": "ignore::FutureWarning"}

KINDS = ("short", "long answers", "long prompts", "grouped")
RIVALS = ("trl-tuned", "trl-defaults", "plain")
Plan = list[tuple[str, str, str, str, str]]


def plan(full: bool, gpu: bool, kinds: tuple[str, ...], rivals: tuple[str, ...]) -> Plan:
    """Method, kind of rows, model, precision and other side of each comparison, the most telling first."""
    models = ("qwen3-0.6b", "llama-1.2b") if gpu else ("smollm2",)
    if not full:
        return [(method, "short", models[0], "bf16" if gpu else "fp32", rivals[0]) for method in ("kto", "dpo")]
    wanted = [(method, kind, model, precision, rival)
              for rival in rivals for model in models for precision in (("bf16",) if gpu else ("fp32", "bf16"))
              for kind in kinds for method in ("kto", "dpo", "kd")]
    # bf16 on a CPU is measured on short rows only: few train so
    return [one for one in wanted if gpu or one[3] == "fp32" or (one[1] == "short" and one[4] == "trl-tuned")]


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="everything; the default is KTO and DPO on short rows")
    parser.add_argument("--data-dir", type=Path, help="directory of real rows (default: $TROPISM_TEST_DATA)")
    parser.add_argument("--model", help="model directory to compare on (default: by the device)")
    parser.add_argument("--results", type=Path, default=Path("build/bench/results"),
                        help="directory of finished comparisons (default: build/bench/results)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of each side (default: all)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps; the first is discarded (default: 6)")
    parser.add_argument("--patience", type=float, default=0.0, metavar="S",
                        help="wait up to S seconds for an idle machine before each round of steps (default: 0)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="kinds of rows of --full (default: all)")
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, help="other sides (default: all, or tuned TRL)")
    parser.add_argument("--again", action="store_true", help="measure finished comparisons again")
    parser.add_argument("--write", type=Path, metavar="PAGE",
                        help="put the table between the two lines of a page that begin with <!-- measured")
    parser.add_argument("--smoke", action="store_true", help="try it: a tiny random model, without TRL")
    return parser.parse_args()


def measure(args: argparse.Namespace, one: tuple[str, str, str, str, str], gpu: bool, folder: Path) -> dict[str, Any]:
    """The record of a comparison."""
    from harness import inputs
    from harness.comparison import compare
    from harness.work import Cell

    method, kind, name, precision, rival = one
    if args.smoke:
        model, data = inputs.tiny_model(folder / "model"), inputs.tiny_rows(method, folder)
    else:
        model = inputs.model_directory(args.model or name)
        data = inputs.rows_of(method, kind, inputs.data_directory(args.data_dir), folder)
    size = (32 if gpu else 8 if kind == "grouped" else 4)
    teacher = str(inputs.teacher_directory(model)) if method == "kd" else None
    cell = Cell(method, str(model), str(data), teacher, size, args.steps, kind == "grouped", precision,
                threads=args.threads, micro_batch=2 if args.smoke else None)
    return compare(cell, [rival], args.patience, apart=not args.smoke) | {"rows": kind}


def main() -> int:
    """Measure what is missing, and print the table; 1 if sides did different work."""
    args = parse_arguments()
    rivals = tuple(args.rivals or (RIVALS if args.full else RIVALS[:1]))
    if args.smoke:
        rivals, args.steps, args.threads = ("plain",), 2, 1
    elif any(name.startswith("trl") for name in rivals) and importlib.util.find_spec("trl") is None:
        print("TRL is not installed: run `pip install trl -c constraints/tested.txt`, or pass `--rivals plain`",
              file=sys.stderr)
        return 2
    import torch  # not for --help
    from harness.comparison import HEAD, gate_lines, table_rows

    from tropism.errors import TropismError

    gpu, lines, status = torch.cuda.is_available(), [], 0
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) if args.smoke else args.results
        results.mkdir(parents=True, exist_ok=True)
        for one in plan(args.full, gpu, tuple(args.kinds or KINDS), rivals):
            file = results / ("_".join([*one, *([Path(args.model).name] if args.model else [])]).replace(" ", "-")
                              + ".json")
            try:
                if args.again or not file.exists():
                    print(f"-- {', '.join(one)}", file=sys.stderr, flush=True)
                    record = measure(args, one, gpu, Path(scratch))
                    partial = file.with_suffix(".partial")
                    partial.write_text(json.dumps(record) + "\n", encoding="utf-8")
                    partial.replace(file)
                    print("\n".join(gate_lines(record)), file=sys.stderr, flush=True)
                record = json.loads(file.read_text(encoding="utf-8"))
            except (TropismError, EOFError) as error:  # a side that ended has said why
                print(f"{', '.join(one)}: {error or 'a side stopped'}", file=sys.stderr)
                status = 2
                continue
            lines += table_rows(record)
            status = max(status, int(not record["same_work"]))
    text = "\n".join([HEAD, *lines])
    if lines:
        versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
        text += (f"\n\nMeasured on {record['date']}: {record['gpu'] or record['cpu']}, {args.threads} threads a side; "
                 f"{versions}; load {record['load'][0]} to {record['load'][1]} in the last comparison.")
    print(text)
    if args.write and lines:
        page = args.write.read_text(encoding="utf-8")
        args.write.write_text(re.sub(r"(<!-- measured[^\n]*\n).*?(<!-- measured)", lambda found: (
            f"{found[1]}\n{text}\n\n{found[2]}"), page, flags=re.DOTALL), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
