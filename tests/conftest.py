"""What all tests share: their environment, which of a family run, and, where tests run, `shared`."""

import gc
import os
import signal
from pathlib import Path

# Before anybody imports torch: processes that tests start inherit this. Several of them share two cores, and threads
# that spin while they wait make each step many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["TROPISM_NO_REPORT"] = "1"  # drawing takes longer than most runs of tests

# A shell lets what it starts in the background ignore this signal, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import settings

# Before anybody imports rich, which obeys what a terminal or a CI says of colors and widths: tests read its output
# as plain text, here and from the processes that they start.
for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
    os.environ.pop(name, None)

# The suite tries the same examples every time; `--hypothesis-profile explore` looks for new ones.
settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.register_profile("explore", max_examples=2000, deadline=None, database=None)
settings.load_profile("same")


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Models and data too large for the repository; tests that need them are skipped where they are not given."""
    if "TROPISM_TEST_DATA" not in os.environ:
        pytest.skip("TROPISM_TEST_DATA is not set")
    return Path(os.environ["TROPISM_TEST_DATA"])


def pytest_configure(config: pytest.Config) -> None:
    """Shared fixtures import torch and transformers, which a process that only hands out tests does without."""
    if not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("shared")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `some` says."""
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some"):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for family in families.values():
        count = min(family[0].get_closest_marker("some").args[0], len(family))
        kept = {round(number * (len(family) - 1) / max(count - 1, 1)) for number in range(count)}
        for number, item in enumerate(family):
            if number not in kept:
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Leave what all modules hold out of garbage collections, which some code under test asks for often."""
    gc.collect()
    gc.freeze()
