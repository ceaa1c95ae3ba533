"""One of several cards stops responding: answers go on on the others, and one sentence says so."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from engine import cli
from engine.batch_files.job_watcher import JobEnding, JobWatcher
from engine.batch_files.prepared_job import PreparedJob, prepare
from engine.batch_files.rows import Answer
from engine.common.config import BatchJob, EngineConfig, SamplingParams
from engine.common.falls import FALLS
from engine.common.model_info import ModelInfo
from engine.devices.device import Device
from engine.devices.memory_budget import MemoryCategory
from engine.devices.opening import open_devices
from engine.runtime.batch import job_plan
from engine.runtime.batch.policy import policy_for
from engine.runtime.engine import Engine
from tests.engine.on_devices import MIB, PROMPT, Reference, reference
from tests.engine.test_lost_card import ask, tokens


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    yield reference("qwen3_moe", tmp_path_factory.mktemp("several"))
    reference.cache_clear()


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(
    ("cards", "lost", "sharing"),
    [
        (2, 1, "experts"),
        (3, 0, "experts"),
        (2, 1, "layers"),
        pytest.param(2, 0, "layers", marks=pytest.mark.exhaustive),
    ],
)
def test_the_others_go_on(cards: int, lost: int, sharing: str, expected: Reference) -> None:
    engine, moved = Engine(), list[ModelInfo]()
    engine.on_moved = moved.append
    config = EngineConfig(
        str(expected.folder),
        device=f"emulated:slow-linkx{cards}",
        vram_bytes=8 * MIB,
        precision="fp32",
        threads=1,
        cache_slots=5,
        sharing=sharing,  # type: ignore[arg-type]
    )
    engine.load_exactly(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    try:
        assert engine._loaded.devices is not None
        engine._failback._prove = lambda: None
        assert tokens(ask(engine, [PROMPT])[0]) == expected.first
        engine._loaded.devices.devices[lost].close()
        assert tokens(ask(engine, [PROMPT])[0]) == expected.first
        assert engine.info is not None
        left = [f"emulated:slow-link#{index}" for index in range(cards) if index != lost]
        assert engine.info.device == ", ".join(left)
        gone = f"emulated:slow-link#{lost} stopped responding, so the model runs on {' and '.join(left)} now."
        assert engine.info.device_note.startswith(gone)
        assert tokens(ask(engine, [expected.second_prompt])[0]) == expected.second
        for device in engine._loaded.devices.devices:
            device.close()
        assert tokens(ask(engine, [PROMPT])[0]) == expected.first
        assert engine.info.device == "cpu"
        assert "stopped responding" in engine.info.device_note
    finally:
        engine.unload()


def test_cards_can_be_named_one_by_one() -> None:
    devices = open_devices("emulated:slow-link#2,emulated:slow-link#5")
    try:
        assert [device.name for device in devices] == ["emulated:slow-link#2", "emulated:slow-link#5"]
        assert [device.index for device in devices] == [2, 5]
    finally:
        for device in devices:
            device.close()


@dataclass
class Job:
    """A job on an engine whose card goes away while its rows are answered."""

    engine: Engine
    folder: Path
    at: int
    go_away: Callable[[], None]
    beside_chats: bool
    name: str = "out"

    def run(self) -> tuple[JobEnding, list[str]]:
        rows = self.folder / "rows.csv"
        rows.write_text("text\n" + "".join(f"row {row} of a table of cards\n" for row in range(6)))
        output, answered = self.folder / f"{self.name}.jsonl", [0]

        def on_answer(_answer: Answer, _question: str) -> None:
            answered[0] += 1
            if answered[0] == self.at:
                self.go_away()

        watcher = JobWatcher(lambda *_: None, on_answer, lambda: False, lambda: None, lambda: False)
        job = BatchJob(str(rows), str(output), sampling=SamplingParams(max_tokens=9))
        prepared = prepare(job)
        if not self.beside_chats:
            ending = self.engine.run_batch(prepared, watcher)
        else:
            endings, runner = list[JobEnding](), self.engine.job_runner()
            thread = threading.Thread(target=lambda: endings.append(runner(prepared, watcher)))
            thread.start()
            while thread.is_alive():
                self.engine.scheduler.serve()
                thread.join(0.005)
            (ending,) = endings
        return ending, [json.loads(line)["answer"] for line in output.read_text().splitlines()]


@pytest.fixture
def two_cards(expected: Reference) -> Iterator[Engine]:
    engine = Engine()
    config = EngineConfig(
        str(expected.folder),
        device="emulated:slow-linkx2",
        vram_bytes=8 * MIB,
        precision="fp32",
        threads=1,
        cache_slots=5,
        sharing="experts",
    )
    engine.load_exactly(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    engine._failback._prove = lambda: None
    yield engine
    engine.unload()


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("beside_chats", [False, True], ids=["its own", "beside chats"])
@pytest.mark.parametrize("lost", [(1,), (0, 1)], ids=["one", "all"])
def test_a_job_goes_on_by_itself_where_cards_are_lost(
    two_cards: Engine, lost: tuple[int, ...], beside_chats: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_plan, "policy_for", lambda *args, **plan: replace(policy_for(*args, **plan), rows=2))
    engine = two_cards
    wanted = Job(engine, tmp_path, 0, lambda: None, beside_chats, "whole").run()[1]

    def go_away() -> None:
        assert engine._loaded.devices is not None
        for index in lost:
            engine._loaded.devices.devices[index].close()

    ending, answers = Job(engine, tmp_path, 1, go_away, beside_chats).run()
    assert (ending.finished, ending.pace.done, ending.pace.failed) == (True, 6, 0)
    assert answers == wanted
    assert ending.note.count("stopped responding") == 1
    assert engine.info.device == ("cpu" if len(lost) == 2 else "emulated:slow-link#0")
    assert "stopped responding" in engine.info.device_note
    assert "stopped responding" in FALLS.note


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("beside_chats", [False, True], ids=["its own", "beside chats"])
@pytest.mark.parametrize("left", [0, 2**16], ids=["nothing", "less than a layer needs"])
@pytest.mark.parametrize("full", [(1,), (0, 1)], ids=["one", "all"])
def test_a_job_goes_on_by_itself_where_cards_fill_up(
    two_cards: Engine,
    full: tuple[int, ...],
    left: int,
    beside_chats: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What stays on a card at all times is more than it may still hold: nothing waits for that to change."""
    monkeypatch.setattr(job_plan, "policy_for", lambda *args, **plan: replace(policy_for(*args, **plan), rows=2))
    engine = two_cards
    wanted = Job(engine, tmp_path, 0, lambda: None, beside_chats, "whole").run()[1]

    def fill_up() -> None:
        assert engine._loaded.devices is not None
        for index in full:
            memory = engine._loaded.devices.devices[index].memory
            memory.limit(memory.use().by_category[MemoryCategory.WEIGHTS] + left)

    ending, answers = Job(engine, tmp_path, 1, fill_up, beside_chats).run()
    assert (ending.finished, ending.pace.done, ending.pace.failed) == (True, 6, 0)
    assert answers == wanted
    assert ending.note.count("Other programs use") == 1
    assert engine.info.device == ("cpu" if len(full) == 2 else "emulated:slow-link#0")


def _vanishes(card: Device) -> None:
    card.close()


def _fills_up(card: Device) -> None:
    card.memory.limit(card.memory.use().by_category[MemoryCategory.WEIGHTS])


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(
    ("fault", "device", "said"),
    [
        (_vanishes, "emulated:slow-link,emulated:pcie3-x8-8gb", "emulated:pcie3-x8-8gb#0 stopped responding"),
        (_fills_up, "emulated:slow-linkx2", "Other programs use"),
    ],
    ids=["of another size vanishes", "fills up"],
)
def test_the_command_line_says_in_one_sentence_what_became_of_a_card(
    fault: Callable[[Device], None],
    device: str,
    said: str,
    expected: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(job_plan, "policy_for", lambda *args, **plan: replace(policy_for(*args, **plan), rows=2))
    rows, answered, run_batch = tmp_path / "rows.csv", [0], Engine.run_batch
    rows.write_text("text\n" + "".join(f"row {row} of a table of cards\n" for row in range(6)))

    def run_with_fault(engine: Engine, prepared: PreparedJob, watcher: JobWatcher) -> JobEnding:
        on_answer = watcher.on_answer

        def answers(answer: Answer, question: str) -> None:
            on_answer(answer, question)
            answered[0] += 1
            if answered[0] == 1:
                fault(engine._loaded.devices.devices[1])

        return run_batch(engine, prepared, replace(watcher, on_answer=answers))

    monkeypatch.setattr(Engine, "run_batch", run_with_fault)

    output = tmp_path / "out.csv"
    options = ("--vram", "8MiB", "--threads", "1", "--sharing", "experts", "--max-tokens", "9", "--json")
    where = ("--model", str(expected.folder), "--device", device)
    assert cli.main(["batch", str(rows), "-o", str(output), *where, *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["finished"], told["done"], told["failed"]) == (True, 6, 0)
    assert said in told["note"]
    assert told["note"].count("stopped responding") + told["note"].count("Other programs use") == 1
    assert len(output.read_text().splitlines()) == 7
