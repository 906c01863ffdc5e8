"""The surface of the command line: help by groups, everyday options, arguments that the parser knows, defaults."""

import re
import subprocess
import sys

import pytest

from tropism import __version__, config
from tropism.cli.app import main
from tropism.cli.commands import app
from tropism.cli.table import COMMANDS
from tropism.config import METHODS, ChatOptions, ConvertOptions, InspectOptions, KTOOptions, ScoringOptions

GROUPS = {
    "Required": "model data output",
    "Data": "as_messages chat_template chat_template_kwargs columns control_tokens format group_prompts "
            "label_name label_threshold labels max_expansion max_length max_prompt_length max_record_bytes "
            "overlong pair_by_prompt plain_text shuffle split store store_limit streaming strict supervise "
            "system_prompt weight_divisor workers",
    "Optimization": "batch_size epochs learning_rate max_grad_norm max_steps on_nonfinite optimizer precision "
                    "router_aux_weight schedule seed trust_remote_code warmup_ratio weight_decay",
    "Memory and speed": "checkpointing compile layout memory_limit microbatch_tokens offload_checkpoints prefetch "
                        "profile",
    "Evaluation": "eval_data eval_every eval_fraction eval_limit eval_split evaluator sample_every samples "
                  "stop_delta stop_metric stop_patience",
    "Checkpoints": "checkpoint_model export_dtype fall_back keep keep_best max_time resume save_every",
    "Adapters": "lora.adapter lora.alpha lora.dora lora.modules_to_save lora.quantize lora.rank lora.rslora "
                "lora.targets",
    "Parallelism": "parallel.offload parallel.reduce_once parallel.replicate parallel.shard parallel.tensor",
    "Tracking": "log_dir log_every report track",
}
"""Options of all methods by their group in help."""
TEACHER = "divergence divergence_mix kd_weight teacher temperature temperature_scaling top_k"
METHOD = "allow_reference_mismatch beta loss loss_weights reference"
SURFACE: dict[str, dict[str, str]] = {
    "kto": {**GROUPS, "Teacher": TEACHER, "Method": f"{METHOD} desirable_weight undesirable_weight"},
    "dpo": {**GROUPS, "Teacher": TEACHER, "Method": f"{METHOD} cpo_alpha discopop_tau f_alpha f_divergence "
            "label_smoothing ld_alpha simpo_gamma wpo"},
    "sft": GROUPS,
    "kd": {**GROUPS, "Teacher": TEACHER.replace("teacher ", ""), "Required": "model teacher data output"},
}
EVERYDAY = ("batch_size epochs eval_data eval_every eval_fraction learning_rate lora.quantize lora.rank max_length "
            "max_steps max_time microbatch_tokens parallel.shard precision resume save_every track")
OF_PREFERENCES = "beta kd_weight loss reference teacher"
SHORT = {"kto": f"{EVERYDAY} {OF_PREFERENCES} desirable_weight undesirable_weight",
         "dpo": f"{EVERYDAY} {OF_PREFERENCES} label_smoothing", "sft": EVERYDAY, "kd": f"{EVERYDAY} kd_weight"}


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def listed(text: str) -> dict[str, list[str]]:
    """Options by group, as a help screen shows them."""
    groups: dict[str, list[str]] = {}
    for line in text.splitlines():
        if re.fullmatch(r"[A-Z][\w ]+", line):
            groups[line] = []
        elif found := re.match(r"  --(?:\[no-\])?(\S+)", line):
            groups[list(groups)[-1]].append(found[1].replace("-", "_"))
    return groups


@pytest.mark.parametrize("method", METHODS)
def test_help_by_groups(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The short screen shows the everyday options of every group and fits; --help-all shows every option."""
    monkeypatch.setenv("COLUMNS", "100")
    short, full = help_of(capsys, method, "--help"), help_of(capsys, method, "--help-all")
    assert len(short.splitlines()) <= 60
    assert max(map(len, full.splitlines())) <= 100
    wanted = {group: sorted(names.split()) for group, names in SURFACE[method].items()}
    found = listed(full)
    assert next(iter(found)) == "Required"
    assert found["Required"] == SURFACE[method]["Required"].split()
    assert found.pop("Options") == ["config"]
    assert not found.pop("Examples")
    assert {group: sorted(names) for group, names in found.items()} == wanted
    everyday = {*SHORT[method].split(), *SURFACE[method]["Required"].split()}
    assert {group: set(names) for group, names in listed(short).items()} == {
        **{group: everyday & {*names} for group, names in wanted.items()}, "Examples": set()}
    assert short.count(f"\n  tropism {method} --") == 2


def test_help_is_quick_and_imports_little() -> None:
    """The first screen without any class of options, that of a command without torch."""
    code = ("import sys; from tropism.cli.app import main\n"
            "assert main({!r}) == 0\n"
            "assert not {!r} & {{name.split('.')[0] for name in sys.modules}}")
    heavy = {"torch", "transformers", "peft", "cyclopts"}
    for arguments, names in ((["--help"], heavy | {"pydantic", "numpy"}), (["kto", "--help"], heavy)):
        done = subprocess.run([sys.executable, "-c", code.format(arguments, names)], capture_output=True, text=True,
                              check=False)
        assert done.returncode == 0, done.stderr
        assert "kto" in done.stdout


def test_the_first_screen_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys, "--help")
    assert text == help_of(capsys)
    assert re.findall(r"^  ((?:store )?[a-z]+)  ", text, re.MULTILINE) == list(COMMANDS)
    assert [line for line in text.splitlines() if re.fullmatch(r"[A-Z][\w ]+", line)] == [
        "Train", "Data", "Results", "Other", "Options", "Example"]
    assert help_of(capsys, "--version") == help_of(capsys, "kto", "--version") == f"{__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_and_parser_know_the_same_arguments(capsys: pytest.CaptureFixture[str], name: str) -> None:
    command = app
    for word in name.split():
        command = command[word]
    parsed = {argument.names[0].lower().lstrip("-") for argument in command.assemble_argument_collection()}
    own = {argument.name.split()[0].lower().lstrip("-") for argument in COMMANDS[name].arguments}
    options = getattr(config, COMMANDS[name].options).described() if COMMANDS[name].options else []
    assert own - {"config" if name in METHODS else "", "key"} | {option.flag[2:] for option in options} == (
        parsed - {"*", "lora", "parallel"})
    text = help_of(capsys, *name.split(), "--help")
    assert max(map(len, text.splitlines())) <= 100
    assert text.startswith(f"Usage: tropism {name}")
    assert f"\n  {COMMANDS[name].examples[0]}\n" in f"{text}\n"


def test_descriptions_follow_the_rules() -> None:
    """They begin with the verb or the thing; a default that the field has is not described again."""
    for options in (*METHODS.values(), ScoringOptions, InspectOptions, ConvertOptions, ChatOptions):
        for option in options.described():
            assert option.text, option.name
            assert not re.match(r"(Of|Whether|What|By how|How|Say|Where) ", option.text), option.name
            assert option.text.endswith("."), option.name
            assert option.info.default is None or " Default: " not in (option.info.description or ""), option.name


CONVERT = ("columns format keep_columns label_name label_threshold labels max_expansion max_record_bytes output "
           "pair_by_prompt split strict to turns")


def test_the_surface_of_convert_changes_only_on_purpose() -> None:
    assert sorted(ConvertOptions.model_fields) == CONVERT.split()
    assert all(info.description for info in ConvertOptions.model_fields.values())


CHAT = ("blind chat_template chat_template_kwargs compare feedback max_new_tokens plain_text precision seed "
        "system_prompt temperature top_p trust_remote_code")


def test_the_surface_of_chat_changes_only_on_purpose() -> None:
    assert sorted(ChatOptions.model_fields) == CHAT.split()
    options = ChatOptions()
    assert (options.temperature, options.max_new_tokens, options.seed) == (0.0, 512, 0)


def test_defaults_of_the_contract() -> None:
    """DESIGN, Defaults; an option of a loss is left to the loss."""
    options = KTOOptions(model="m", data="d", output="o")
    assert (options.batch_size, options.epochs, options.learning_rate, options.loss) == (32, 1, 5e-6, "kto")
    assert (options.schedule, options.warmup_ratio, options.weight_decay, options.max_grad_norm) == (
        "linear", 0.1, 0.0, 1.0)
    dpo, sft, kd = (METHODS[method](model="m", data="d", output="o", **extra)
                    for method, extra in (("dpo", {}), ("sft", {}), ("kd", {"teacher": "t"})))
    assert (dpo.learning_rate, sft.learning_rate, kd.learning_rate) == (1e-6, 2e-5, 2e-5)
    assert (dpo.loss, dpo.wpo) == ("sigmoid", False)
    for given, names in ((options, f"{METHOD} {TEACHER}"), (dpo, SURFACE["dpo"]["Method"]), (kd, TEACHER)):
        values = given.model_dump()
        assert {name for name in names.split() if values[name] is not None} <= {
            "allow_reference_mismatch", "loss", "teacher", "wpo"}
