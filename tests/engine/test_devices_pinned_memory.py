"""How much can be pinned is found out in a child process, whatever becomes of it."""

import sys

import pytest
import torch

from engine.devices import host_memory
from engine.devices.host_memory import PinnedMemory, measure_pinnable

MB, GB = 2**20, 2**30


def child(script: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, sys, time\n{script}"]


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
def test_what_the_child_got_counts(script: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "python_module", lambda _name: (child(script), {}))
    assert measure_pinnable(8 * MB) == expected


def test_a_child_that_hangs_is_ended_and_what_it_got_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # A child that had no time to print has got nothing.
    script = f"print({4 * MB}, flush=True); time.sleep(600)"
    monkeypatch.setattr(host_memory, "python_module", lambda _name: (child(script), {}))
    assert measure_pinnable(8 * MB, timeout_s=0.5) in (0, int(4 * MB * 0.9))


def test_what_can_be_pinned_is_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measured(wanted: int, _index: int) -> int:
        asked.append(wanted)
        return wanted if wanted <= 3 * GB else 2 * GB

    monkeypatch.setattr(host_memory, "measure_pinnable", measured)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a card")

    def limit_for(nbytes: int) -> int:
        memory = PinnedMemory(torch.device("cuda", 0))
        memory.expect(nbytes)
        return memory.limit

    assert limit_for(GB // 2) == GB  # so little needs no measurement
    assert (limit_for(2 * GB), limit_for(2 * GB), asked) == (2 * GB, 2 * GB, [2 * GB])
    # All that was tried could be pinned: more is tried when more is wanted.
    assert (limit_for(3 * GB), asked) == (3 * GB, [2 * GB, 3 * GB])
    # Less could be pinned than was tried: that will not change.
    assert (limit_for(5 * GB), limit_for(7 * GB), asked) == (2 * GB, 2 * GB, [2 * GB, 3 * GB, 5 * GB])


def test_memory_that_a_card_shares_is_pinned_and_mapped_whole_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, tuple[int, int]] = {}

    def register(address: int, nbytes: int, _device: torch.device, how: int) -> bool:
        pinned[address] = nbytes, how
        return len(pinned) < 2

    monkeypatch.setattr(host_memory, "register", register)
    monkeypatch.setattr(host_memory, "unregister", lambda address, _device: pinned.pop(address))
    memory = PinnedMemory(torch.device("cuda", 0), limit=0)
    here = memory.share(5000)
    assert pinned == {here.data_ptr(): (8192, 3)}  # whole pages; cudaHostRegisterPortable and -Mapped
    assert memory.pinned_bytes == 8192
    with pytest.raises(MemoryError, match="does not map"):
        memory.share(100)
    pinned.popitem()  # what was refused
    memory.release(here)
    assert (pinned, memory.pinned_bytes) == ({}, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a card")
def test_nothing_can_be_pinned_without_a_card() -> None:
    assert measure_pinnable(64 * MB) == 0
