"""Measure the memory of distillation's head: the divergence, forward and backward, in chunks and with all logits.

    python bench/kd_memory.py [--tokens 512 2048 8192] [--vocabulary 50000 150000] [--plain-gib 6]

Each configuration runs in its own process. The figure is the peak of resident memory during one forward and backward
pass, minus what was resident before it (weights and hidden states of student and teacher) and minus what every
implementation must add (gradients of the student's weights and hidden states). The C allocator returns large arrays at
once, so the figure is memory in use. The exit code is 1 if the chunked implementation's figure grows with the number of
tokens or the vocabulary. The smallest configuration should span several chunks of 4 million logits. Linux only.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

HIDDEN, K, TEMPERATURE = 64, 32, 2.0
MIB = 2**20
SLACK_MIB = 32  # the allocator's own, and arrays of [tokens] and [tokens, k] that no chunk can do without
PLAIN_ARRAYS = 6  # of [tokens, vocabulary], that the plain way holds at once: decides whether it is tried


def main() -> int:
    """Measure every configuration and print the table; 1 if the chunked implementation's memory grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192],
                        help="numbers of supervised tokens (default: 512 2048 8192)")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[50_000, 150_000],
                        help="vocabulary sizes (default: 50000 150000)")
    parser.add_argument("--plain-gib", type=float, default=6.0,
                        help="skip plain runs that need more memory, in GiB (default: 6)")
    parser.add_argument("--smoke", action="store_true", help="try it: every way once, on a few tokens")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smoke:
        for way in WAYS:
            print(way, json.dumps(measure(way, tokens=8, vocabulary=50)))
        return 0
    if options.only:
        print(json.dumps(measure(**json.loads(options.only))))
        return 0
    print("| vocabulary | tokens | " + " | ".join(f"{way} MiB | s" for way in WAYS) + " |")
    print("|---" * (2 + 2 * len(WAYS)) + "|")
    peaks: dict[str, list[float]] = {}
    for vocabulary in options.vocabulary:
        for tokens in options.tokens:
            cells = []
            for way in WAYS:
                expected = PLAIN_ARRAYS * tokens * vocabulary * 4 / 2**30
                if way == "plain" and expected > options.plain_gib:
                    cells.append(f"not run (some {expected:.0f} GiB) | -")
                    continue
                found = in_a_process(way=way, tokens=tokens, vocabulary=vocabulary)
                peaks.setdefault(way, []).append(found["peak_mib"])
                cells.append(f"{found['peak_mib']:.0f} | {found['seconds']:.1f}")
            print(f"| {vocabulary} | {tokens} | " + " | ".join(cells) + " |", flush=True)
    grown = {way: max(found) - min(found) for way, found in peaks.items() if way != "plain"}
    for way, growth in grown.items():
        print(f"{way}: {min(peaks[way]):.0f} to {max(peaks[way]):.0f} MiB; "
              + ("does not grow" if growth <= SLACK_MIB else f"GROWS by {growth:.0f} MiB"))
    return int(any(growth > SLACK_MIB for growth in grown.values()))


def in_a_process(**what: Any) -> dict[str, float]:
    """`measure` in a fresh process."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)}
    done = subprocess.run([sys.executable, __file__, "--only", json.dumps(what)], capture_output=True, text=True,
                          check=False, env=environment)
    if done.returncode:
        sys.exit(f"{what}: exit code {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout)


def measure(way: str, tokens: int, vocabulary: int) -> dict[str, float]:
    """Peak memory beyond what is unavoidable, and seconds, of one forward and backward pass."""
    import torch

    from tropism.model.head.logprob import Head

    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    weight = draw(vocabulary, HIDDEN).mul_(0.1).requires_grad_()
    hidden = draw(tokens, HIDDEN).requires_grad_()
    teacher = draw(tokens, HIDDEN), Head(draw(vocabulary, HIDDEN).mul_(0.1))
    ids = torch.randint(vocabulary, (tokens,), generator=generator)
    step = WAYS[way](teacher, vocabulary)
    step(hidden[:4], Head(weight), ids[:4], slice(0, 4)).backward()  # loads kernels, starts threads
    weight.grad = hidden.grad = None
    before = reset_peak()
    began = time.monotonic()
    step(hidden, Head(weight), ids, slice(0, tokens)).backward()
    seconds = time.monotonic() - began
    peak = status("VmHWM")
    assert weight.grad is not None
    assert hidden.grad is not None
    unavoidable = weight.grad.nbytes + hidden.grad.nbytes
    return {"peak_mib": (peak - before - unavoidable) / MIB, "seconds": seconds}


def chunked(stored: bool, teacher: Any, vocabulary: int) -> Any:
    """Ours, with a live or a stored teacher."""
    from tropism.losses.divergence import forward_kl
    from tropism.model.head.divergence import Comparison, FullTargets, TopK, top_k

    compare = Comparison(partial(forward_kl, mix=0.5), TEMPERATURE, TEMPERATURE**2, vocabulary)
    best = top_k(*teacher, K, TEMPERATURE, vocabulary) if stored else None

    def step(hidden: Any, head: Any, ids: Any, rows: slice) -> Any:
        targets: Any = FullTargets(teacher[0][rows], teacher[1])
        if best is not None:
            targets = TopK(best.ids[rows], best.logps[rows], best.tail[rows])
        logps, away = compare.per_token(hidden, head, ids, targets)
        return away.mean() - logps.mean()

    return step


def plain(teacher: Any, vocabulary: int) -> Any:
    """The usual implementation: the logits of all tokens, and autograd."""
    import torch
    from torch.nn import functional

    def step(hidden: Any, head: Any, ids: Any, rows: slice) -> Any:
        logits = hidden @ head.weight.t()
        with torch.no_grad():
            log_p = torch.log_softmax(teacher[0][rows] @ teacher[1].weight.t() / TEMPERATURE, dim=-1)
        log_q = torch.log_softmax(logits / TEMPERATURE, dim=-1)
        away = functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True) * TEMPERATURE**2
        return away + functional.cross_entropy(logits, ids)

    return step


WAYS = {"chunked live": partial(chunked, False), "chunked top-k": partial(chunked, True), "plain": plain}


def status(name: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"this system does not report {name}")


def reset_peak() -> int:
    """Reset the peak; resident memory now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return status("VmRSS")


if __name__ == "__main__":
    sys.exit(main())
