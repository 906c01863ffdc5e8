"""Compare Tropism with TRL or a plain loop on this machine: one method, one kind of rows.

    pip install trl -c constraints/tested.txt
    python bench/compare.py --method dpo --model DIR --data FILE --batch-size 4

Each side runs in its own process. The sides take steps in turn, on the same rows and the same token ids. Only the
optimizer step is timed, after a check that all sides do the same work. bench/README.md describes the measurement. The
exit code is 1 if the sides did different work, and 2 if the comparison could not start.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRL_EXPERIMENTAL_SILENCE": "1",
               "PYTHONWARNINGS": "ignore::FutureWarning"}


def parse_arguments() -> argparse.Namespace:
    """Parse the command line, and exit if TRL is needed and not installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=("kto", "dpo", "kd"), default="kto", help="method (default: kto)")
    parser.add_argument("--model", default="smollm2",
                        help="model directory, or smollm2, qwen3-0.6b, llama-1.2b, llama-8b: the demo's model, or a "
                             "shape with random weights (default: smollm2)")
    parser.add_argument("--data", type=Path, help="rows in any format that Tropism reads (default: the demo's)")
    parser.add_argument("--teacher", help="teacher of kd (default: the model with noise on its weights)")
    parser.add_argument("--batch-size", type=int, default=4, help="rows per optimizer step (default: 4)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps; the first is discarded (default: 6)")
    parser.add_argument("--max-length", type=int, default=2048,
                        help="maximum length of a prompt with its completion in tokens (default: 2048)")
    parser.add_argument("--group-prompts", action="store_true", help="put all rows of a prompt in one step")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32",
                        help="bf16 uses autocast, on all sides (default: fp32)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of each side (default: all)")
    parser.add_argument("--microbatch-tokens", type=int, help="Tropism's pack size in tokens (default: its choice)")
    parser.add_argument("--micro-batch", type=int,
                        help="rows of a micro-batch of the other sides (default: the fastest of several)")
    parser.add_argument("--rivals", nargs="*", choices=("trl-tuned", "trl-defaults", "plain"), default=["trl-tuned"],
                        help="the other sides (default: trl-tuned)")
    parser.add_argument("--patience", type=float, default=0.0, metavar="S",
                        help="wait up to S seconds for an idle machine before each round of steps (default: 0)")
    parser.add_argument("--json", type=Path, help="file to add the record to, as a line of JSON")
    parser.add_argument("--smoke", action="store_true", help="try it: a tiny random model, without TRL")
    given = parser.parse_args()
    if given.smoke:
        given.rivals = ["plain"]
    if any(name.startswith("trl") for name in given.rivals) and importlib.util.find_spec("trl") is None:
        parser.exit(2, "TRL is not installed: run `pip install trl -c constraints/tested.txt`, or pass `--rivals "
                       "plain`\n")
    return given


def main() -> int:
    """Run all sides in turn; 1 if they did different work."""
    args = parse_arguments()
    from harness import inputs  # imports torch: not for --help
    from harness.comparison import HEAD, compare, gate_lines, table_rows
    from harness.work import Cell

    from tropism.errors import TropismError

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            if args.smoke:
                model, data = inputs.tiny_model(folder / "model"), inputs.tiny_rows(args.method, folder)
                args.steps, args.threads, args.micro_batch = 2, 1, 2
            else:
                model = inputs.model_directory(args.model)
                data = args.data or inputs.rows_of(args.method, "short", None, folder)
            teacher = args.teacher or (str(inputs.teacher_directory(model)) if args.method == "kd" else None)
            record = compare(Cell(args.method, str(model), str(data), teacher, args.batch_size, args.steps,
                                  args.group_prompts, args.precision, args.max_length, args.threads,
                                  args.microbatch_tokens, args.micro_batch),
                             args.rivals, args.patience, apart=not args.smoke)
        except (TropismError, EOFError) as error:  # a side that ended has said why
            print(error or "a side stopped", file=sys.stderr)
            return 2
    print("\n".join([*gate_lines(record), "", HEAD, *table_rows(record)]))
    print(f"load {record['load'][0]} before, {record['load'][1]} after; {record['gpu'] or record['cpu']}, "
          f"{args.threads} threads; " + ", ".join(f"{name} {value}" for name, value in record["versions"].items()))
    if args.json:
        with args.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return 0 if record["same_work"] else 1


if __name__ == "__main__":
    sys.exit(main())
