"""The commands as help shows them: summary, own arguments and examples. Options are described by their classes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # pydantic is not for the first screen
    from tropism.options import Option

HEADINGS = ("Required", "Data", "Method", "Optimization", "Memory and speed", "Evaluation", "Checkpoints", "Adapters",
            "Parallelism", "Teacher", "Tracking")
"""Groups of training options, in the order of help and reference."""

_FIRST = ("model", "teacher", "data", "to", "output")


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument that belongs to one command and to no options class.

    Args:
        name: as typed: `RUN`, or `--json FILE`.
        text: what it does.
        required: the command does not work without it.
        default: what happens without it, if its text does not tell.
        everyday: the short help shows it.
    """

    name: str
    text: str
    required: bool = False
    default: str = ""
    everyday: bool = True


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Args:
        group: its heading in `tropism --help`.
        summary: one sentence.
        examples: commands that work as they are.
        arguments: its own, in the order of help.
        options: its class of options in `tropism.config`.
        note: further sentences below the summary.
    """

    group: str
    summary: str
    examples: tuple[str, ...]
    arguments: tuple[Argument, ...] = ()
    options: str = ""
    note: str = ""


def in_order(options: "Iterable[Option]") -> "list[Option]":
    """Options as they are listed within a group: required ones first, then everyday ones."""
    return sorted(options, key=lambda option: (_FIRST.index(option.name) if option.info.is_required() else len(_FIRST),
                                               not option.everyday))


_CONFIG = Argument("--config FILE", "YAML file with options. Options on the command line override it.", everyday=False)
_JSON = "Also write the result to this JSON file."
_DATA = "Data to read: files, a directory, or a dataset on the Hub. Separate several with commas."
_MODEL = "A directory, Hub id, GGUF file, adapter or run directory."
_TRUST = Argument("--trust-remote-code", "Run Python code that comes with a model. The run's own option has no effect.")
_STORE = Argument("--store DIR", "Cache directory.", default="$TROPISM_STORE, else ~/.cache/tropism/store")


def _method(name: str, summary: str, options: str, data: str, extra: str = "") -> Command:
    examples = (f"tropism {name} --model Qwen/Qwen3-0.6B {extra}--data {data} --output runs/first",
                f"tropism {name} --config base.yaml --output runs/lora --lora.rank 16")
    return Command("Train", summary, examples, (_CONFIG,), options, "`--config FILE` reads options from YAML.")


COMMANDS: dict[str, Command] = {
    "kto": _method("kto", "Train on completions labeled desirable or undesirable.", "KTOOptions",
                   "feedback.jsonl"),
    "dpo": _method("dpo", "Train on pairs of a chosen and a rejected completion.", "DPOOptions", "pairs.jsonl"),
    "sft": _method("sft", "Fine-tune on completions to imitate.", "SFTOptions", "texts.jsonl"),
    "kd": _method("kd", "Distill a teacher model into a student.", "KDOptions", "texts.jsonl",
                  "--teacher Qwen/Qwen3-8B "),
    "train": Command(
        "Train", "Train from a YAML file.",
        ("tropism train runs/first/config.yaml --output runs/second",
         "tropism train runs/first/config.yaml --output runs/third --beta 0.2"),
        (Argument("CONFIG", "YAML file with `method:` and options by name.", required=True),
         Argument("--KEY VALUE", "Override an option of the file.")),
        note="RUN/config.yaml reproduces a run."),
    "resume": Command(
        "Train", "Resume a stopped run from its last checkpoint.",
        ("tropism resume runs/first", "tropism resume runs/first --max-steps 2000"),
        (Argument("RUN", "Run directory, or one of its checkpoints.", required=True),
         Argument("--KEY VALUE", "Override an option that may change, such as --max-steps."))),
    "sweep": Command(
        "Train", "Train with every combination of several values of options.",
        ("tropism sweep base.yaml --learning-rate 1e-6,5e-6 --seed 0,1",
         "tropism sweep base.yaml --loss sigmoid --loss sigmoid,sft --output runs/losses"),
        (Argument("CONFIG", "YAML file with `method:` and options by name.", required=True),
         Argument("--KEY V1,V2", "Values of an option. Repeat options that take a list or a text: --loss A --loss B,C. "
                  "`none` leaves an option unset."),
         Argument("--output DIR", "Directory of the runs. The same command resumes the sweep in it.",
                  default="CONFIG-sweep"), _TRUST),
        note="Each combination gets a run directory in DIR. The table at the end compares the runs on the held-out "
             "rows that all of them have. Resume a stopped sweep with tropism resume DIR."),
    "plan": Command(
        "Train", "Predict the memory and time of a run, without its weights.",
        ("tropism plan kto --model Qwen/Qwen3-0.6B --data feedback.jsonl --device rtx4090",
         "tropism plan runs/first/config.yaml --json plan.json"),
        (Argument("CONFIG", "YAML file with `method:` and options, or a method: kto, dpo, sft or kd.", required=True),
         Argument("--KEY VALUE", "Any option of training. `--output` is not needed."),
         Argument("--device NAME", "Device to plan for: h100-80gb, h200, a100-80gb, rtx4090 or cpu.",
                  default="this machine"),
         Argument("--json FILE", _JSON)),
        note="Shows peak memory by component, the settings that the run would choose and why, and what would fit "
             "if it does not."),
    "init": Command(
        "Train", "Write a YAML file with options for a model and data.",
        ("tropism init kto --model Qwen/Qwen3-0.6B --data feedback.jsonl --to run.yaml",
         "tropism init --model Qwen/Qwen3-8B --data pairs.jsonl --device rtx4090 --to -"),
        (Argument("METHOD", "kto, dpo, sft, kd, or auto for the one that fits the data.", default="auto"),
         Argument("--KEY VALUE", "Any option of training. `--model` and `--data` are required, and what is given is "
                  "kept."),
         Argument("--to FILE", "New file to write, or - for standard output.", default="run.yaml"),
         Argument("--device NAME", "Device that the run must fit: h100-80gb, h200, a100-80gb, rtx4090 or cpu.",
                  default="this machine")),
        note="Chooses lengths, balance, batch size, learning rate and what to train by the data and the plan, with a "
             "comment on each choice."),
    "inspect": Command(
        "Data", "Preview data as training will see it.",
        ("tropism inspect feedback.jsonl --model Qwen/Qwen3-0.6B",
         "tropism inspect pairs.jsonl --model Qwen/Qwen3-0.6B --html report.html"),
        (Argument("DATA", _DATA, required=True), Argument("--html FILE", "Also write an HTML page to this file."),
         Argument("--json FILE", _JSON)), "InspectOptions",
        "Shows what is kept, truncated or suspicious, with sample rows token by token."),
    "convert": Command(
        "Data", "Convert data between supported formats.",
        ("tropism convert hh.jsonl --to paired --output pairs.jsonl",
         "tropism convert pairs.jsonl --to unpaired --output feedback.parquet"),
        (Argument("DATA", _DATA, required=True), Argument("--json FILE", _JSON)), "ConvertOptions",
        "Reports what the target shape cannot hold."),
    "evaluate": Command(
        "Results", "Evaluate models on held-out data.",
        ("tropism evaluate runs/first", "tropism evaluate runs/first runs/second",
         "tropism evaluate runs/first --data heldout.jsonl",
         "tropism evaluate runs/first --data heldout.jsonl --reference Qwen/Qwen3-0.6B --json figures.json"),
        (Argument("MODEL", _MODEL, required=True),
         Argument("MODELS", "More models or run directories, compared with the first one in one table."),
         Argument("--json FILE", _JSON)), "ScoringOptions",
        "Reports accuracy or AUC, margins, log-probs, perplexity and KL. A run is evaluated as it was trained, on the "
        "rows that it held out."),
    "score": Command(
        "Results", "Write the log-probs of each row under a model to a file.",
        ("tropism score runs/first --data feedback.jsonl --output scores.parquet",
         "tropism score runs/first --data pairs.jsonl --reference Qwen/Qwen3-0.6B --output scores.jsonl"),
        (Argument("MODEL", _MODEL, required=True),
         Argument("--output FILE", "New file to write: .jsonl or .parquet.", required=True),
         Argument("--keep-columns", "Copy the other fields of the rows.")), "ScoringOptions"),
    "chat": Command(
        "Results", "Talk to a model or to the result of a run in the terminal.",
        ("tropism chat runs/first", "tropism chat runs/first --feedback feedback.jsonl",
         "tropism chat runs/second --compare runs/first --blind --feedback pairs.jsonl"),
        (Argument("MODEL", _MODEL, required=True),), "ChatOptions",
        "/help in the session lists its commands. Without a terminal, answers one question per line."),
    "export": Command(
        "Results", "Export the result of a run as a model directory.",
        ("tropism export runs/first --to models/first", "tropism export runs/lora --to models/merged --merge"),
        (Argument("RUN", "Run directory.", required=True),
         Argument("--to DIR", "Directory to write, empty or absent.", required=True),
         Argument("--merge", "Merge the adapter into its base model."),
         Argument("--dtype DTYPE", "Dtype of the weights: fp32, bf16, fp16 or fp64.", default="that of the result"),
         Argument("--checkpoint NAME", "Checkpoint to export: `best`, `last`, a step such as step-00000100, or a path.",
                  default="the result"),
         Argument("--max-shard-size SIZE", "Maximum size of a weight file, such as 5GB.", default="50GB"),
         Argument("--base DIR", "Base model of the adapter, if it has moved since the run."),
         Argument("--gguf FORMAT", "Also write a GGUF file: f32, bf16, f16, q8_0 or q4_k_m. Needs llama.cpp."),
         Argument("--llama-cpp DIR", "Directory of llama.cpp, with its converter.", default="found on PATH"),
         Argument("--ollama", "Also write a Modelfile for Ollama."), _TRUST,
         Argument("--push NAME", "Repository on the Hub, owner/name, to upload the result to."),
         Argument("--private", "Make a new repository private.")),
        note="`--checkpoint` exports a checkpoint instead. Adds a model card. Leaves the run unchanged."),
    "report": Command(
        "Results", "Write a page about a run, or about several side by side.",
        ("tropism report runs/first", "tropism report runs/first runs/second --html compared.html --open"),
        (Argument("RUN", "Run directory: of a run that is done, stopped or still going.", required=True),
         Argument("RUNS", "More run directories, side by side with the first."),
         Argument("--html FILE", "File to write. It needs no other file and no network.", default="RUN/report.html"),
         Argument("--figures DIR", "Also write each figure as a PNG file to this directory."),
         Argument("--open", "Open the page in a browser.")),
        note="Needs matplotlib: pip install 'tropism[plots]'."),
    "verify": Command(
        "Results", "Check that a run is intact and reproducible on this machine.",
        ("tropism verify runs/first", "tropism verify runs/first --json findings.json"),
        (Argument("RUN", "Run directory.", required=True), Argument("--json FILE", _JSON), _TRUST),
        note="Exits with code 0 if so, 1 otherwise."),
    "migrate": Command(
        "Other", "Translate a command or configuration of another trainer.",
        ("tropism migrate trl \"trl kto --model_name_or_path MODEL --dataset_name DATA --beta 0.2\"",
         "tropism migrate llamafactory train.yaml --yaml new.yaml"),
        (Argument("TRAINER", "Where it comes from: openrlhf, trl, llamafactory, axolotl, coati or nemo-aligner.",
                  required=True),
         Argument("COMMAND", "A command line in quotes, its words, or a YAML or JSON configuration file.",
                  required=True),
         Argument("--yaml FILE", "Also write the options to this new file, for tropism train.")),
        note="Prints our command, and what became of each option: taken, replaced, without effect here or not "
             "supported. Nothing in the command is run."),
    "schema": Command(
        "Other", "Print a JSON schema of the YAML files, for editors.",
        ("tropism schema > tropism.schema.json", "tropism schema kto"),
        (Argument("METHOD", "kto, dpo, sft or kd: the schema of files for this method.", default="all methods"),),
        note="It has descriptions, choices, limits and defaults of all options."),
    "demo": Command(
        "Other", "Train a small model on sample feedback and show what changed.", ("tropism demo",),
        (Argument("--output DIR", "Run directory.", default="demo-run, or the next free name"),)),
    "doctor": Command(
        "Other", "Check the installation and show what a run would use here.",
        ("tropism doctor", "tropism doctor --json machine.json"), (Argument("--json FILE", _JSON), _STORE),
        note="Shows versions, GPUs, CPU, memory, disk, optional packages and environment variables. Exits with code 1 "
             "if something that a run needs is broken. Uses no network."),
    "store list": Command("Other", "List the contents of the cache.", ("tropism store list",), (_STORE,)),
    "store clean": Command(
        "Other", "Delete cached scores and rendered rows.", ("tropism store clean", "tropism store clean 3f2a"),
        (Argument("FINGERPRINT", "Leading characters of the fingerprint of scores to delete.", default="all"), _STORE),
        note="They are recomputed when a run needs them."),
}
