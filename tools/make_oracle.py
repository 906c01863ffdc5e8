"""Write the results of TRL's own loss code for 200 random pairs: the oracle of `tests/unit/test_losses_oracle.py`.

    python tools/make_oracle.py tests/cases/oracle

Needs TRL, and does not need Tropism. Writes `trl-<version>.npz` with arrays `input/<name>`, and for every case
`<case>/loss`, `<case>/chosen` and `<case>/rejected`: the mean loss of one step of all pairs and its gradients with
respect to the policy's log-probs. `about` is JSON with the versions and each case's settings.

TRL's loss methods are called with a stand-in for the trainer and its models, whose forward pass returns the log-probs
made here. All arithmetic is TRL's.
"""

import argparse
import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

try:
    import trl
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.gkd.gkd_trainer import GKDTrainer
    from trl.experimental.orpo import orpo_trainer
    from trl.trainer import dpo_trainer, kto_trainer
except ImportError as error:
    MISSING = str(error)
else:
    MISSING = ""

SEED, PAIRS, LONGEST = 23, 200, 60
GRID = 8192  # log-probs are multiples of 1/8192 nat: exact in float32, sums included
POSITIONS, VOCABULARY = 12, 16  # of the divergences
REFERENCE_POINT = 0.75
WEIGHTS = (1.0, 1.33)  # of desirable and undesirable completions


class Completions(NamedTuple):
    """Both sides of the pairs, chosen first: `[2 P]` each. `shared` is the part up to the shorter side's length."""

    lengths: Tensor
    shared: Tensor
    tail: Tensor
    reference_shared: Tensor
    reference_tail: Tensor
    confidence: Tensor  # mean over tokens of log p(token) - log sum p^2


Case = tuple[dict[str, Any], Callable[[], tuple[Tensor, tuple[Tensor, Tensor]]]]


def completions() -> Completions:
    """Random completions with log-ratios of a few nats, some of them tens."""
    rng = np.random.default_rng(SEED)

    def on_grid(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.round(values * GRID) / GRID)

    lengths = rng.integers(1, LONGEST + 1, size=(2, PAIRS))
    share = np.minimum(lengths.min(axis=0) / lengths, 1.0)
    reference = -lengths * rng.gamma(2.0, 0.6, size=(2, PAIRS)) - 0.25
    ratios = rng.normal(size=(2, PAIRS)) * rng.choice([0.5, 3.0, 8.0], p=[0.3, 0.6, 0.1], size=(2, PAIRS))
    policy = np.minimum(reference + ratios, -0.125)
    tail = np.where(share < 1, 1 - share, 0.0)
    assert np.abs(ratios).max() < 30
    parts = [on_grid(part.ravel()) for part in (policy * (1 - tail), policy * tail, reference * (1 - tail),
                                                reference * tail, rng.normal(-0.5, 0.4, size=(2, PAIRS)))]
    of = Completions(torch.from_numpy(lengths.ravel()), *parts)
    policy, reference = of.shared + of.tail, of.reference_shared + of.reference_tail
    for values in (policy - reference, policy.chunk(2)[0] - policy.chunk(2)[1],
                   reference.chunk(2)[0] - reference.chunk(2)[1]):
        assert len(values.unique()) == len(values), "equal values have no rank of their own: try another seed"
    return of


# --- stand-ins -------------------------------------------------------------------------------------------------------


class DoubleTorch:
    """`torch`, except that what a module calls float32 is float64. TRL writes `.float()` and looks float32 up."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def in_float64(*modules: Any) -> Iterator[None]:
    """Run the code of some modules in double precision throughout."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "torch", DoubleTorch()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def per_token(lengths: Tensor, shared: Tensor, tail: Tensor) -> Tensor:
    """`[2 P, LONGEST]` log-probs: the shared part's on its first token, the tail's on the last; so sums are exact."""
    one_hot = torch.nn.functional.one_hot
    return shared[:, None] * one_hot(torch.zeros_like(lengths), LONGEST) + tail[:, None] * one_hot(lengths - 1, LONGEST)


def model_of(log_probs: Tensor, log_sum_sq_probs: Tensor | None = None) -> Callable[..., SimpleNamespace]:
    """A model whose output carries these log-probs, whatever it is given."""
    zeros = torch.zeros_like(log_probs)
    return lambda **inputs: SimpleNamespace(log_probs=log_probs, log_sum_sq_probs=log_sum_sq_probs, entropy=zeros,
                                            mean_logits=zeros, is_top1=zeros.bool())


def trainer_of(reference: Callable[..., SimpleNamespace], **settings: Any) -> SimpleNamespace:
    """What the loss methods read from `self`."""
    return SimpleNamespace(
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False), ref_model=reference,
        accelerator=SimpleNamespace(device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, discopop_tau=settings.pop("discopop_tau", 0.05)),
        aux_loss_enabled=False, precompute_ref_logps=False, _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0, _tp_size=1, **settings)


def batch_of(lengths: Tensor) -> dict[str, Tensor]:
    """A prompt of one token before each completion, padded on the right."""
    mask = (torch.arange(LONGEST) < lengths[:, None]).long()
    mask = torch.cat((torch.zeros(len(lengths), 1, dtype=torch.long), mask), dim=1)
    return {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}


# --- the trainers' losses --------------------------------------------------------------------------------------------


def dpo(of: Completions, **settings: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`DPOTrainer._compute_loss`: its loss and the gradients with respect to the two sides' log-probs.

    The gradient is the one of the shared part: with `ld_alpha` the tail's is `ld_alpha` times that.
    """
    defaults = {"beta": 0.1, "label_smoothing": 0.0, "ld_alpha": None, "loss_weights": [1.0], "use_weighting": False,
                "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5}
    shared, tail = of.shared.clone().requires_grad_(), of.tail.clone()
    log_probs = per_token(of.lengths, shared, tail)
    mask = batch_of(of.lengths)["completion_mask"][:, 1:]
    # The mean over tokens of (log-prob - log sum p^2) is then `confidence`.
    level = (shared.detach() + tail - of.confidence * of.lengths) / of.lengths
    reference = model_of(per_token(of.lengths, of.reference_shared, of.reference_tail))
    with in_float64(dpo_trainer):
        loss = dpo_trainer.DPOTrainer._compute_loss(
            trainer_of(reference, **(defaults | settings)), model_of(log_probs, level[:, None] * mask),
            batch_of(of.lengths), return_outputs=False)
    (gradient,) = torch.autograd.grad(loss, shared)
    return loss.detach(), gradient.chunk(2)


def kto(of: Completions, loss_type: str) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`KTOTrainer._compute_loss`: chosen sides are the desirable completions, rejected ones the undesirable."""
    leaf = of.shared.clone().requires_grad_()
    reference = model_of(per_token(of.lengths, of.reference_shared, of.reference_tail))
    policy = model_of(per_token(of.lengths, leaf, of.tail))
    trainer = trainer_of(reference, beta=0.1, loss_type=loss_type, calculate_KL=loss_type == "kto",
                         desirable_weight=WEIGHTS[0], undesirable_weight=WEIGHTS[1])
    # Mismatched completions whose mean log-ratio is the reference point.
    trainer._compute_kl_logps = lambda model, batch: torch.tensor([REFERENCE_POINT * (model is policy)])
    batch = batch_of(of.lengths) | {"label": torch.arange(2 * PAIRS) < PAIRS}
    with in_float64(kto_trainer):
        loss = kto_trainer.KTOTrainer._compute_loss(trainer, policy, batch, return_outputs=False)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient.chunk(2)


def cpo(of: Completions, **settings: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`CPOTrainer.cpo_loss`; SimPO is fed with means per token, as its trainer does."""
    logps = (of.shared + of.tail).requires_grad_()
    fed = logps / of.lengths if settings["loss_type"] == "simpo" else logps
    loss = CPOTrainer.cpo_loss(trainer_of(model_of(logps), alpha=0.0, **settings), *fed.chunk(2))[0].mean()
    (gradient,) = torch.autograd.grad(loss, logps)
    return loss.detach(), gradient.chunk(2)


def orpo(of: Completions, beta: float) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`ORPOTrainer.odds_ratio_loss`, whose sign its caller turns."""
    logps = (of.shared + of.tail).requires_grad_()
    with in_float64(orpo_trainer):
        loss = -orpo_trainer.ORPOTrainer.odds_ratio_loss(
            trainer_of(model_of(logps), beta=beta), *(logps / of.lengths).chunk(2))[0].mean()
    (gradient,) = torch.autograd.grad(loss, logps)
    return loss.detach(), gradient.chunk(2)


def cases(of: Completions) -> dict[str, Case]:
    """Every case by name: the settings that are not obvious from the name, and how to get its numbers."""
    table: dict[str, Case] = {}

    def add_dpo(name: str, *loss_types: str, **settings: Any) -> None:
        table[name] = ({"beta": 0.1, **settings}, lambda: dpo(of, loss_types=list(loss_types), **settings))

    for loss in ("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero",
                 "apo_down", "discopop", "sigmoid_norm", "sft"):
        add_dpo(loss, loss)
    for loss, smoothing in (("exo_pair", 1e-3), ("exo_pair", 0.1), ("robust", 0.1), ("aot", 0.1),
                            ("aot_unpaired", 0.1)):
        add_dpo(f"{loss} smoothed {smoothing}", loss, label_smoothing=smoothing)
    for link in ("forward_kl", "js_divergence"):
        for loss in ("sigmoid", "hinge", "ipo"):
            add_dpo(f"{loss} {link}", loss, f_divergence_type=link)
    for coefficient in (0.5, 0.9, 1.5, 2.0):
        for loss in ("sigmoid", "hinge", "ipo"):
            add_dpo(f"{loss} alpha {coefficient}", loss, f_divergence_type="alpha_divergence",
                    f_alpha_divergence_coef=coefficient)
    add_dpo("sigmoid ld", "sigmoid", ld_alpha=0.5)
    add_dpo("sigmoid wpo", "sigmoid", use_weighting=True)
    add_dpo("sigmoid and sft", "sigmoid", "sft", loss_weights=[1.0, 0.2])
    for name, settings in (("cpo", {"loss_type": "sigmoid", "beta": 0.1, "label_smoothing": 0.0}),
                           ("cpo smoothed 0.1", {"loss_type": "sigmoid", "beta": 0.1, "label_smoothing": 0.1}),
                           ("simpo", {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "label_smoothing": 0.0})):
        table[name] = settings, lambda settings=settings: cpo(of, **settings)
    table["odds_ratio"] = {"beta": 0.1}, lambda: orpo(of, 0.1)
    for loss in ("kto", "apo_zero_unpaired"):
        settings = {"beta": 0.1, "reference_point": REFERENCE_POINT, "desirable_weight": WEIGHTS[0],
                    "undesirable_weight": WEIGHTS[1]}
        table[loss] = settings, lambda loss=loss: kto(of, loss)
    return table


def divergences() -> tuple[dict[str, np.ndarray], dict[str, dict[str, float]]]:
    """`GKDTrainer.generalized_jsd_loss` of random logits: sums over positions, and gradients of the student's."""
    rng = np.random.default_rng(SEED)
    teacher, student = (torch.from_numpy(np.round(rng.normal(0, 3, size=(POSITIONS, VOCABULARY)) * GRID) / GRID)
                        for _ in range(2))
    arrays, about = {"input/teacher_logits": teacher.numpy(), "input/student_logits": student.numpy()}, {}
    for name, mix in (("forward_kl", 0.0), ("reverse_kl", 1.0), ("js 0.5", 0.5), ("js 0.1", 0.1), ("js 0.9", 0.9)):
        leaf = student.clone().requires_grad_()
        loss = GKDTrainer.generalized_jsd_loss(leaf[None], teacher[None], beta=mix, reduction="sum")
        loss.backward()
        about[f"divergence/{name}"] = {"mix": mix}
        arrays[f"divergence/{name}/loss"] = loss.detach().numpy()
        arrays[f"divergence/{name}/logits"] = leaf.grad.numpy()
    return arrays, about


def main() -> None:
    """Compute every case and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="directory for trl-<version>.npz")
    folder = parser.parse_args().folder
    if MISSING:
        parser.exit(2, f"TRL cannot be imported ({MISSING}): run `pip install trl -c constraints/tested.txt`\n")
    torch.set_default_dtype(torch.float64)
    of = completions()
    arrays, settings = divergences()
    arrays |= {f"input/{name}": value.numpy() for name, value in of._asdict().items()}
    for name, (options, numbers) in cases(of).items():
        loss, (chosen, rejected) = numbers()
        arrays |= {f"{name}/loss": loss.numpy(), f"{name}/chosen": chosen.numpy(), f"{name}/rejected": rejected.numpy()}
        settings[name] = options
    assert all(np.isfinite(value).all() for value in arrays.values())
    about = {"trl": trl.__version__, "torch": torch.__version__, "numpy": np.__version__, "seed": SEED,
             "settings": settings}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"trl-{trl.__version__}.npz"
    np.savez_compressed(path, about=np.array(json.dumps(about)), **arrays)
    print(f"{path}: {len(settings)} cases, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
