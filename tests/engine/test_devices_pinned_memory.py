"""How much can be pinned is found out in a child process, whatever becomes of it."""

from __future__ import annotations

import sys

import pytest
import torch

from engine.devices.pinned_memory import measure_pinnable

MB = 2**20


def child(script: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, sys, time\n{script}"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_nothing_can_be_pinned_without_a_card() -> None:
    assert measure_pinnable(64 * MB) == 0


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"print({4 * MB}); print({8 * MB})", 8 * MB),
        (f"print({4 * MB})", int(4 * MB * 0.9)),
        ("", 0),
        ("sys.exit(1)", 0),
        (f"print({4 * MB}, flush=True); os.kill(os.getpid(), signal.SIGKILL)", int(4 * MB * 0.9)),
        # Killed in the middle of a line.
        (f"sys.stdout.write('{4 * MB}\\n81'); sys.stdout.flush(); os._exit(3)", int(4 * MB * 0.9)),
        ("print('nonsense'); print(-5); print('1e9')", 0),
    ],
)
def test_what_the_child_got_counts(script: str, expected: int) -> None:
    assert measure_pinnable(8 * MB, command=child(script)) == expected


def test_a_child_that_hangs_is_ended_and_what_it_got_counts() -> None:
    # The child has been given time to print: it does so at once, and Python starts in less than two seconds.
    script = f"print({4 * MB}, flush=True); time.sleep(600)"
    assert measure_pinnable(8 * MB, timeout_s=2.0, command=child(script)) in (0, int(4 * MB * 0.9))
