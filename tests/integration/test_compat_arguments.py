"""Arguments of the published trainers in the forms that scripts give them: other types, limits, and mistakes."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tropism
from compat_helpers import apart, loader_of, models, optimizer_of, rows_of, strategy_of, weights_of
from published_batches import coati_kto, nemo_kto, openrlhf_dpo, openrlhf_kto, openrlhf_sft
from tropism.compat.coati import KTOTrainer as CoatiTrainer
from tropism.compat.nemo_aligner import KTOTrainer as NemoTrainer
from tropism.compat.openrlhf import DPOTrainer, KDTrainer, KTOTrainer
from tropism.errors import DataError, UsageError
from tropism.observe.console import Voice

QUIET = Voice(loud=False)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROPISM_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)


def kto(directory: Path, strategy: Any = None, train: Any = None, held_out: Any = None, **others: Any) -> Any:
    policy, frozen = models(directory)
    optimizer, scheduler = optimizer_of(policy)
    loader = loader_of(rows_of(6), openrlhf_kto) if train is None else train
    return KTOTrainer(policy, frozen, strategy or strategy_of(1), None, optimizer, loader, held_out, scheduler,
                      max_epochs=1, beta=0.3, voice=QUIET, **others)


def test_arguments_may_be_a_mapping_or_absent(tiny_model_dir: Path) -> None:
    """They were ignored in silence: the run took defaults."""
    args = {"ckpt_path": "mine", "save_steps": 1, "max_ckpt_num": 1, "desirable_loss_weight": 0.5, "ipo": True,
            "kd_coef": 0.9}
    trainer = kto(tiny_model_dir, SimpleNamespace(args=args, accumulated_gradient=1))
    assert trainer.door.options["desirable_weight"] == 0.5
    result = trainer.fit(None)
    assert (result.directory, len(list((result.directory / "checkpoints").iterdir()))) == (Path("mine"), 1)
    assert trainer.fit(dict(args, ckpt_path="other")).directory == Path("other")
    strategy, (policy, frozen) = SimpleNamespace(args=args), models(tiny_model_dir)
    assert DPOTrainer(policy, frozen, strategy, None, None, None, None, None).door.options["loss"] == "ipo"
    assert KDTrainer(policy, frozen, strategy, None, None, None, None).door.options["kd_weight"] == 0.9


@pytest.mark.parametrize(("args", "saved"), [
    ({"save_steps": 1, "max_ckpt_num": math.inf, "logging_steps": math.inf}, 2),
    ({"save_steps": 1, "max_ckpt_num": 0, "eval_steps": 0, "logging_steps": None}, 1),
    ({"save_steps": 0, "eval_steps": -2, "logging_steps": 0}, 0)])
def test_numbers_without_a_plain_meaning(args: dict[str, Any], saved: int, tiny_model_dir: Path) -> None:
    """Infinity keeps all checkpoints and logs the last step; 0 is off; below -1 is as -1."""
    trainer = kto(tiny_model_dir, strategy_of(1, **args))
    folder = trainer.fit(trainer.args).directory / "checkpoints"
    assert (len(list(folder.iterdir())) if folder.exists() else 0) == saved


@pytest.mark.parametrize("name", ["eval_steps", "save_steps", "max_ckpt_num", "logging_steps"])
def test_numbers_that_are_none(name: str, tiny_model_dir: Path) -> None:
    trainer = kto(tiny_model_dir, strategy_of(1, **{"save_steps": 1, name: "often"}))
    with pytest.raises(UsageError, match=f"args.{name}: must be a whole number"):
        trainer.fit(trainer.args)


def test_dataloaders_that_are_missing(tiny_model_dir: Path, fixture_tokenizer: Any) -> None:
    trainer = kto(tiny_model_dir)
    for nothing in (None, []):
        with pytest.raises(UsageError, match="eval_dataloader is required"):
            trainer.evaluate(nothing)
    trainer.train_dataloader = None
    with pytest.raises(UsageError, match="train_dataloader is required"):
        trainer.fit(trainer.args)
    policy = trainer.model
    with pytest.raises(UsageError, match="train_dataloader is a list_iterator without a length"):
        NemoTrainer({}, policy, None, None, iter([1]), None, None, None, None, None)
    with pytest.raises(UsageError, match="eval_dataloader yielded no batch"):
        tropism.KTOTrainer(policy, train_dataloader=loader_of(rows_of(6), openrlhf_kto), eval_dataloader=[],
                           tokenizer=fixture_tokenizer, quiet=True)
    said: list[str] = []
    coati = CoatiTrainer(policy, None, None, optimizer_of(policy)[0], None, None, fixture_tokenizer, voice=QUIET,
                         coordinator=SimpleNamespace(print_on_master=said.append))
    assert coati.fit(loader_of(rows_of(6), coati_kto), []) is not None
    assert said == ["No eval dataloader is provided, skip evaluation"]


def test_epochs_without_a_limit(tiny_model_dir: Path) -> None:
    def of(**cfg: Any) -> Any:
        loader = loader_of(rows_of(6), nemo_kto)
        return NemoTrainer(cfg, models(tiny_model_dir)[0], None, None, loader, None, None, None, None, None)

    assert of(max_epochs=math.inf, max_steps=5).max_steps == 5
    assert of(max_epochs="3", max_steps=math.inf).max_steps == 6
    with pytest.raises(UsageError, match="max_epochs is infinite, and max_steps is not set"):
        of(max_epochs=math.inf)
    with pytest.raises(UsageError, match="max_steps: must be a whole number"):
        of(max_steps="all")


def test_published_methods_take_batches_as_the_collate_functions_make_them(tiny_model_dir: Path) -> None:
    """`[n, 1, L]` and `[n, L]` give the same."""
    trainer = kto(tiny_model_dir)
    batches = [(trainer.compute_model_logps_with_KL, next(iter(trainer.train_dataloader)))]
    policy, frozen = models(tiny_model_dir)
    pairs = loader_of(rows_of(6, 2), openrlhf_dpo)
    dpo = DPOTrainer(policy, frozen, strategy_of(1), None, None, pairs, None, None)
    batches.append((dpo.concatenated_forward, next(iter(pairs))))
    for method, batch in batches:
        flat = [part.squeeze(1) if torch.is_tensor(part) and part.dim() == 3 else part for part in batch]
        for one, other in zip(method(policy, *batch), method(policy, *flat), strict=True):
            torch.testing.assert_close(one, other)


def test_what_follows_an_update_needs_no_argument(tiny_model_dir: Path) -> None:
    trainer = kto(tiny_model_dir)
    trainer.save_logs_and_checkpoints(SimpleNamespace(), 1, None, {"loss": 0.5}, {})
    trainer.save_logs_and_checkpoints({"save_steps": 1}, 1)
    assert Path("ckpt/checkpoints_kto/global_step1_hf/config.json").is_file()


def test_another_reference_point(tiny_model_dir: Path, fixture_tokenizer: Any) -> None:
    """As the plain trainer with that scope, and no word about OpenRLHF's numbers."""
    for scope in ("step", "micro_batch"):
        trainer = kto(tiny_model_dir, strategy_of(2, train_batch_size=6), reference_point=scope, output="run")
        assert not trainer.door.notes
        start = weights_of(trainer.model)
        assert trainer.fit(trainer.args).directory.name.startswith("run")
        policy, frozen = models(tiny_model_dir)
        optimizer, scheduler = optimizer_of(policy)
        tropism.KTOTrainer(policy, frozen, tokenizer=fixture_tokenizer, optimizer=optimizer, scheduler=scheduler,
                           train_dataloader=loader_of(rows_of(6), openrlhf_kto), accumulation_steps=2, beta=0.3,
                           max_grad_norm=0, reference_point=scope, output=f"plain-{scope}",
                           quiet=True).fit()
        assert apart(trainer.model, policy, start) < 1e-6
    policy, frozen = models(tiny_model_dir)
    with pytest.raises(UsageError, match="reference_point='micro_batch' has no effect"):
        KDTrainer(policy, frozen, strategy_of(1), None, loader_of(rows_of(6), openrlhf_sft), None, None,
                  reference_point="micro_batch")  # type: ignore[arg-type]


def test_a_key_is_no_answer_of_the_plain_trainers(tiny_model_dir: Path) -> None:
    with pytest.raises(UsageError, match="WANDB_API_KEY") as caught:
        tropism.KTOTrainer(models(tiny_model_dir)[0], use_wandb="5ecre7", quiet=True)  # type: ignore[arg-type]
    assert "5ecre7" not in str(caught.value)


def test_a_wrapped_model_keeps_its_configuration(tiny_model_dir: Path, fixture_tokenizer: Any) -> None:
    """Under DDP or torch.compile, beta, tokenizer and reference were replaced by defaults in silence."""
    policy, frozen = models(tiny_model_dir)
    policy.cfg = SimpleNamespace(micro_batch_size=2, global_batch_size=3, kto={"ref_policy_kl_penalty": 0.7})
    policy.tokenizer, policy.ref_policy_state_dict = fixture_tokenizer, frozen.state_dict()
    for wrapped in (torch.nn.DataParallel(policy), torch.compile(policy)):
        trainer = NemoTrainer({}, wrapped, None, None, loader_of(rows_of(6), nemo_kto), *[None] * 5)
        assert trainer._door.options["beta"] == 0.7
        assert trainer._door.tokenizer is fixture_tokenizer
        assert trainer._door.rule.size == 2
        torch.testing.assert_close(weights_of(trainer._door.reference), weights_of(frozen))


def test_methods_that_fit_does_not_call_are_named(tiny_model_dir: Path) -> None:
    class Mine(KTOTrainer):
        def evaluate(self, eval_dataloader: Any, steps: int = 0) -> Any:
            return {}

        def _get_batch_logps(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    said: list[str] = []
    policy, frozen = models(tiny_model_dir)
    trainer = Mine(policy, frozen, strategy_of(1), None, optimizer_of(policy)[0], loader_of(rows_of(3), openrlhf_kto),
                   None, None, max_epochs=1, voice=QUIET)
    trainer.door.announce = lambda: said.extend(trainer.door.notes)
    trainer.fit(trainer.args)
    assert "fit() does not call evaluate, _get_batch_logps. Records are in metrics.jsonl" in said[-1]


def test_wrapped_optimizers_and_names(tiny_model_dir: Path) -> None:
    """The optimizer in a wrapper with methods of its own is stepped; a model's name is no module."""
    policy, frozen = models(tiny_model_dir)
    optimizer = optimizer_of(policy)[0]
    wrapped = SimpleNamespace(optimizer=optimizer, param_groups=optimizer.param_groups, zero_grad=lambda: None)
    before = weights_of(policy)
    trainer = KTOTrainer(policy, frozen, strategy_of(1), None, wrapped, loader_of(rows_of(6), openrlhf_kto), None, None,
                         max_epochs=1, voice=QUIET)
    trainer.fit(trainer.args)
    assert len(optimizer.state) == len(list(policy.parameters()))
    assert (weights_of(policy) != before).any()
    for pair, argument in ((("NAME", frozen), "model"), ((policy, Path("NAME")), "ref_model")):
        with pytest.raises(UsageError, match=f"^{argument} is the name 'NAME'. Pass the loaded model"):
            KTOTrainer(*pair, strategy_of(1), None, None, None, None, None)


def test_objects_of_another_shape(tiny_model_dir: Path, fixture_tokenizer: Any) -> None:
    """They are refused before the first step, not after it."""
    policy, frozen = models(tiny_model_dir)
    with pytest.raises(UsageError, match=r"ckpt_callback \(object\) has no custom_save"):
        NemoTrainer({}, policy, None, None, loader_of(rows_of(6), nemo_kto), None, None, None, object(), None)
    coati = CoatiTrainer(policy, frozen, None, optimizer_of(policy)[0], None, None, fixture_tokenizer,
                         apply_loss_mask=False, voice=QUIET)
    for batch in (openrlhf_kto(rows_of(3), 2, "right"), {"input_ids": torch.ones(3, 2)}):
        with pytest.raises(DataError, match="apply_loss_mask=False needs batches of coati's layout"):
            coati.fit([batch])
