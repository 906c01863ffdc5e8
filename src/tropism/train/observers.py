"""What observes the records of a run: `metrics.jsonl`, trackers, progress, guards and early stopping."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tropism.distributed.world import World
from tropism.errors import UsageError
from tropism.methods import Method
from tropism.observe.console import Voice
from tropism.observe.metrics import OtherNames, goal, is_known, renamed
from tropism.observe.rundir import SAMPLES_DURING, RunDirectory
from tropism.observe.track import Trackers
from tropism.train.engine import Engine
from tropism.train.evaluation.samples import Sampler, start_of
from tropism.train.monitor.early_stopping import EarlyStopping, check_evaluated, make_rule
from tropism.train.monitor.guards import Guards, Subject
from tropism.train.options import RunOptions
from tropism.train.records import Record
from tropism.train.setup.build import RunInputs


class Observers:
    """Every process has one and sees the same records; the main process speaks and writes.

    Args:
        world: this process among the others.
        directory: of the run.
        voice: speaks to the user.
        guards: look at train records.
        early_stopping: looks at evaluations; None to run the whole schedule.
        keep_best: the metric that every evaluation must have; None for none.
        other_names: further names of metrics.
    """

    def __init__(self, world: World, directory: RunDirectory, voice: Voice, guards: Guards,
                 early_stopping: EarlyStopping | None, keep_best: str | None = None,
                 other_names: OtherNames | None = None) -> None:
        self.world = world
        self.directory = directory
        self.voice = voice
        self.guards = guards
        self.early_stopping = early_stopping
        self.keep_best = None if keep_best is None else goal(keep_best)[0]
        self.other_names = other_names or {}
        self._trackers: Trackers | None = None
        self._total = 0
        self._progress: Callable[[Record], None] = lambda record: None

    @classmethod
    def of(cls, inputs: RunInputs, directory: RunDirectory) -> "Observers":
        """The observers that the options of a run ask for."""
        options, method = inputs.options, inputs.method
        rule = make_rule(options.stop_metric, options.stop_patience, options.stop_delta, method,
                         bool(inputs.data.evaluation), options.evaluator is not None)
        guards = Guards(Subject.of(method, getattr(options, "reference", None)))
        return cls(inputs.world, directory, inputs.voice, guards, EarlyStopping(rule) if rule else None,
                   options.keep_best, inputs.objects.other_names)

    @contextmanager
    def showing(self, total: int, options: RunOptions, written: dict[str, Any]) -> Iterator[None]:
        """Show progress, and log to trackers, while the block runs.

        Args:
            total: optimizer steps of the run.
            options: name the trackers.
            written: every option of the run with its value.
        """
        if self.world.is_main and options.track:
            logs = Path(options.log_dir).expanduser() if options.log_dir else self.directory.path / "logs"
            self._trackers = Trackers(options.track.split(","), self.directory.path.name, logs, written,
                                      self.voice.warn)
        try:
            with self.voice.bar("train", lasting=True, every=options.log_every != 1) as report:
                self._progress = lambda record: report(record.step, total, record.metrics, **shown(record.metrics))
                self._total = total
                yield
        finally:
            if self._trackers is not None:
                self._trackers.finish()

    def see(self, record: Record) -> str | None:
        """Write a record, show it and judge it. What this changes is in `state`, so call it before the next save.

        Returns:
            Why the run ends with this step; None to continue.

        Raises:
            OutputError: on all processes, if it cannot be written.
            UsageError: if an evaluation lacks the metric of `--keep-best`.
        """
        others = renamed(record.metrics | {"step": record.step}, self.other_names.get(record.split, {}))
        self.world.on_main(lambda: self.directory.append_record(record.to_json() | others))
        if self._trackers is not None:
            self._trackers.log(record.metrics, record.step, record.split, others)
        for bad in record.skipped:
            self.voice.warn(f"{bad}. The step was skipped.")
            self._append("skipped.jsonl", bad.to_json())
        if record.split == "train":
            for found in self.guards.see(record.step, record.metrics):
                self.voice.warn(found.text)
                self._append("notices.jsonl", found.to_json())
            self._progress(record)
            return None
        self.voice.measured("eval", record.step, self._total, described(record.metrics), record.metrics)
        if self.keep_best is not None and self.keep_best not in record.metrics:
            raise UsageError(f"--keep-best {self.keep_best} is not a metric of this evaluation. Its metrics: "
                             f"{', '.join(sorted(record.metrics))}")
        if self.early_stopping is not None and self.early_stopping.see(record.step, record.metrics):
            self.voice.say(f"step {record.step}: early stopping: {self.early_stopping.reason}")
            return self.early_stopping.reason
        return None

    def sample(self, sampler: Sampler, engine: Engine, step: int, during: bool = False) -> list[str]:
        """Complete the sample prompts, and send them to the trackers. All processes call this together.

        Args:
            during: training continues, so the completions are written, and the first one is shown.

        Returns:
            The completions, on the main process.
        """
        completions = sampler.ask_together(engine)
        samples = sampler.lines(completions)
        if during:
            lines = [{"step": step, **sample} for sample in samples]
            self.world.on_main(lambda: self.directory.append_lines(SAMPLES_DURING, lines))
            for sample in samples[:1]:
                self.voice.say(f"sample {step}/{self._total}  {start_of(sample['completion'])}")
        self.sampled(step, samples)
        return completions

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Send prompts with their completions after a step to the trackers."""
        if self._trackers is not None and samples:
            self._trackers.table("samples", ("step", "prompt", "completion"),
                                 [(str(step), sample["prompt"], sample["completion"]) for sample in samples], step)

    def note(self, step: int, text: str) -> None:
        """Warn of an evaluator without a value, and write that down. All processes call this together."""
        self.voice.warn(text)
        self._append("notices.jsonl", {"step": step, "guard": "evaluator", "text": text})

    def _append(self, name: str, line: dict[str, Any]) -> None:
        self.world.on_main(lambda: self.directory.append_lines(name, [line]))

    @property
    def ending(self) -> str | None:
        """Why the run has ended; None if it has not. A run can be killed between its last save and its end."""
        return self.early_stopping.reason if self.early_stopping is not None and self.early_stopping.over else None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; plain values."""
        return {"guards": self.guards.state(),
                "stopper": self.early_stopping.state() if self.early_stopping else None}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`; what it lacks starts from zero."""
        if state.get("guards"):
            self.guards.restore(state["guards"])
        if self.early_stopping is not None and state.get("stopper"):
            self.early_stopping.restore(state["stopper"])


def check_metrics(options: RunOptions, method: Method, evaluates: bool, has_evaluators: bool) -> None:
    """Check before a model is loaded that the evaluations have the metrics of `--keep-best` and `--stop-metric`.

    Args:
        evaluates: rows are held out.
        has_evaluators: functions of the user add metrics.

    Raises:
        UsageError: with the known metrics.
    """
    if options.keep_best is not None:
        check_evaluated("keep_best", options.keep_best, method, evaluates, has_evaluators)
    make_rule(options.stop_metric, options.stop_patience, options.stop_delta, method, evaluates, has_evaluators)


def shown(metrics: dict[str, float]) -> dict[str, str]:
    """The metrics of a train record that the progress bar shows."""
    figures = {"loss": f"{metrics['loss']:.4f}"} if "loss" in metrics else {}
    if "rewards/margins" in metrics:
        figures["margin"] = f"{round(metrics['rewards/margins'], 4) + 0.0:+.4f}"  # no -0.0000
    return {**figures, "tokens/s": f"{metrics['tokens_per_second']:,.0f}"}


_OF_EVALUATION = {"loss": "loss {:.4f}", "perplexity": "perplexity {:.4g}", "kd/divergence": "divergence {:.4f}",
                  "rewards/auc": "reward AUC {:.3f}", "rewards/accuracies": "reward accuracy {:.3f}",
                  "rewards/margins": "margin {:+.4f}"}


def described(metrics: dict[str, float]) -> str:
    """The main metrics of an evaluation in one line, a ranking with its 95% interval."""
    parts = []
    for key, form in _OF_EVALUATION.items():
        if key in metrics:
            low, high = metrics.get(f"{key}_low"), metrics.get(f"{key}_high")
            interval = "" if low is None or high is None else f" (95%: {low:.3f} to {high:.3f})"
            value = round(metrics[key], 4) + 0.0 if key == "rewards/margins" else metrics[key]  # no -0.0000
            parts.append(form.format(value) + interval)
    parts += [f"{key} {value:.4g}" for key, value in metrics.items()
              if not is_known(key) and not key.endswith(("_low", "_high"))]
    return "  ".join(parts)
