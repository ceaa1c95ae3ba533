"""Which instruction sets are chosen for which work, by made-up times, and what is kept of it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.kernels.native import choice
from engine.kernels.native.choice import (
    FEW,
    MANY,
    Use,
    choice_file,
    choice_for,
    choose,
    load_choices,
    save_choice,
)
from engine.kernels.native.library import Isa
from engine.runtime.load.model import threads_note
from engine.verbs.doctor import _measured

_ALL = [Isa.PORTABLE, Isa.AVX2, Isa.AVX512, Isa.AVX512_VNNI]
_INT8 = Use(FEW, 1)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path))
    monkeypatch.setattr(choice, "_machine", lambda: "this processor, these kernels")


def _times(faster: dict[tuple[Use, Isa], float], noise: Iterator[float] | None = None) -> Callable[[Use, Isa], float]:
    def seconds(use: Use, isa: Isa) -> float:
        return faster.get((use, isa), 1.0) * (next(noise) if noise is not None else 1.0)

    return seconds


def test_what_is_clearly_faster_is_chosen_for_that_work_alone() -> None:
    assert choose(_ALL, _times({(_INT8, Isa.AVX2): 0.8})) == {_INT8: Isa.AVX2}


def test_the_newest_stays_within_noise() -> None:
    assert choose(_ALL, _times({(_INT8, Isa.AVX2): 0.95})) == {}


def test_plain_code_is_never_chosen_where_there_is_other() -> None:
    assert choose(_ALL, _times({(_INT8, Isa.PORTABLE): 0.1})) == {}
    assert choose([Isa.PORTABLE], _times({})) == {}


def test_a_single_lucky_burst_decides_nothing() -> None:
    bursts = 0

    def seconds(use: Use, isa: Isa) -> float:
        nonlocal bursts
        if (use, isa) != (_INT8, Isa.AVX2):
            return 1.0
        bursts += 1
        return 0.5 if bursts == 2 else 1.0

    assert choose(_ALL, seconds) == {}


def test_a_busy_machine_keeps_the_newest_and_is_measured_again() -> None:
    noise = iter([1.0, 2.5, 2.2, 1.0, 3.0, 1.4, 2.0] * 1000)
    assert choose(_ALL, _times({(_INT8, Isa.AVX2): 0.5}, noise)) is None


def test_a_choice_is_kept_by_thread_count() -> None:
    assert choice_for(4) is None
    save_choice(4, {_INT8: Isa.AVX2})
    save_choice(2, {})
    assert load_choices() == {4: {_INT8: Isa.AVX2}, 2: {}}
    assert choice_for(2) == {}
    assert choice_for(1) == {_INT8: Isa.AVX2}  # a small pool beside the large one


def test_another_processor_or_version_measures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    save_choice(4, {_INT8: Isa.AVX2})
    monkeypatch.setattr(choice, "_machine", lambda: "another")
    assert load_choices() == {}


@pytest.mark.parametrize(
    "threads", ['{"4": [[0, 1, 99]]}', '{"4": [[7, 1, 1]]}', '{"4": [[0, 1]]}', '{"x": []}', "[]", "3"]
)
def test_a_damaged_file_is_as_none(threads: str) -> None:
    choice_file().parent.mkdir(parents=True)
    choice_file().write_text(f'{{"machine": "this processor, these kernels", "threads": {threads}}}', encoding="utf-8")
    assert load_choices() == {}
    choice_file().write_bytes(b"\xff\x00{")
    assert choice_for(4) is None
    save_choice(4, {Use(MANY, 0): Isa.AVX512})
    assert json.loads(choice_file().read_text(encoding="utf-8"))["threads"] == {"4": [[1, 0, 3]]}


def test_doctor_says_what_was_measured() -> None:
    assert _measured(None) == ""
    assert "none is clearly faster" in _measured([])
    assert "AVX2 for int8 with one token" in _measured([[str(_INT8), "AVX2"]])


def test_more_threads_than_cores_are_noticed() -> None:
    assert threads_note(None, 2) == threads_note(2, 2) == ""
    assert threads_note(16, 2).startswith("2 threads compute, not 16:")
    assert threads_note(2, 1).startswith("1 thread computes, not 2:")
