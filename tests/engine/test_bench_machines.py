"""The engine against fixed choices on emulated machines whose time is modelled, processor and all."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import machines
from benchmarks.machines import CHOICES, OURS, MachinesPlan, bench_machines, resident_share
from engine.bench.report import Report
from engine.common.config import EngineConfig
from engine.common.errors import EngineError
from engine.hardware.profiles import DeviceProfile, lent, read_profile
from tests.engine.tiny_families import tiny_checkpoint

SMALLER = 500
"""An expert of Qwen3-30B-A3B has about so many times the bytes and operations of one of the tiny model's."""
WORST = 0.98


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("machines") / "qwen3_moe")


def small(name: str) -> DeviceProfile:
    """The machine, its rates as much smaller as the model is."""
    profile = read_profile(name)
    rates = ("link_h2d_gbps", "link_d2h_gbps", "card_gbps", "card_tflops", "cpu_gbps", "cpu_tflops")
    return replace(profile, **{rate: getattr(profile, rate) / SMALLER for rate in rates})


def test_a_card_s_share_of_the_experts() -> None:
    assert resident_share(2 * 10**9) == 0
    assert 0.09 < resident_share(4 * 2**30) < 0.11
    assert resident_share(32 * 2**30) == 1


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCHYARD_HOME", str(tmp_path))  # which experts were used is kept there


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        "link8-8gb",
        pytest.param("link1-4gb", marks=pytest.mark.exhaustive),
        pytest.param("link64-12gb", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.usefixtures("prepared")
def test_never_slower_than_the_best_fixed_choice(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = small(name)
    monkeypatch.setattr(machines, "timed_profiles", lambda: [profile])
    report = Report({})
    config = EngineConfig(str(folder), precision="fp32", threads=1, context_tokens=256)
    with lent(profile):
        bench_machines(config, MachinesPlan(tokens=40, prompt_tokens=100), report, lambda _text: None)
    for kind, beaten in {
        "decode": CHOICES.keys(),
        "prompt": ["fetch always", "cache off", "experts on the CPU"],
    }.items():
        rows = [row for row in report.rows if row.name == f"{name}, {kind}"]
        assert {row.peer for row in rows} | {"whole layers"} == CHOICES.keys() - {OURS}  # none may fit
        assert rows[0].ratio == min(row.ratio or 0 for row in rows)
        # Of a tiny model's prompt, next to nothing is its experts.
        assert all((row.ratio or 0) >= WORST for row in rows if row.peer in beaten), report.text()


def test_a_choice_that_nobody_knows_is_refused_in_a_sentence(folder: Path) -> None:
    plan = MachinesPlan(beside=["fetch never"])
    with pytest.raises(EngineError, match="'fetch never' is not a choice to run beside ours"):
        bench_machines(EngineConfig(str(folder)), plan, Report({}), lambda _text: None)
