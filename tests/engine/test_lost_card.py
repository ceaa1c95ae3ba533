"""A card that stops responding while answers are written: they go on on the CPU, and it is said once."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from engine.common.config import EngineConfig, SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.common.model_info import ModelInfo
from engine.devices.card import CardKind
from engine.devices.card_proof import CardProof
from engine.devices.device import Device
from engine.devices.host_memory import HostMemory
from engine.devices.opening import CARD_KINDS
from engine.runtime import engine as engine_module
from engine.runtime.engine import Engine, Failback
from engine.runtime.schedule.request import BatchRequest, Outcome
from tests.engine.loaded_tiny import NO_END
from tests.engine.on_devices import NEW_TOKENS, PROMPT, Reference, reference
from tests.fake_cards import FakeCards

FAULT = "CUDA error: unspecified launch failure"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    yield reference("qwen3_moe", tmp_path_factory.mktemp("lost"))
    reference.cache_clear()


class Card:
    """A card that fails at some call of a layer, and from then on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.torch = FakeCards()
        self._monkeypatch = monkeypatch
        self.calls = 0
        monkeypatch.setitem(
            CARD_KINDS, "xpu", CardKind("cpu", self.torch, lambda _place: HostMemory(), lambda _index: "fake")
        )

    def fails_at(self, engine: Engine, call: int) -> None:
        attention = engine._loaded.model.model.layers[1].self_attn
        forward = attention.forward

        def failing(*args: object, **kwargs: object) -> object:
            self.calls += 1
            if self.calls > call:
                self.torch.is_lost = True
            if self.torch.is_lost:
                raise RuntimeError(FAULT)
            return forward(*args, **kwargs)

        self._monkeypatch.setattr(attention, "forward", failing)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


@pytest.fixture
def engine(expected: Reference, card: Card) -> Iterator[Engine]:
    engine = Engine()
    config = EngineConfig(str(expected.folder), device="xpu", precision="fp32", threads=1, cache_slots=5)
    engine.load_exactly(config, on_progress=lambda _done, _total: None, cancelled=lambda: False)
    assert engine.info.device != "cpu"
    engine._failback._prove = lambda: None
    yield engine
    engine.unload()


def ask(
    engine: Engine, prompts: Sequence[Sequence[int]], on_text: Callable[[str, int], None] = lambda _text, _count: None
) -> list[Outcome | None]:
    """How requests end that are there at once."""
    ended: list[Outcome | None] = [None] * len(prompts)
    for number, prompt in enumerate(prompts):

        def end(outcome: Outcome, number: int = number) -> None:
            assert ended[number] is None, "it ended before"
            ended[number] = outcome

        sampling = SamplingParams(max_tokens=NEW_TOKENS)
        request = BatchRequest(0, ids=tuple(prompt), sampling=sampling, end_ids=NO_END, on_text=on_text)
        engine.scheduler.submit(request, end)
    engine.scheduler.serve(lambda: all(outcome is not None for outcome in ended))
    return ended


def tokens(outcome: Outcome | None) -> list[int]:
    if isinstance(outcome, BaseException):
        raise outcome
    return list(outcome.token_ids)


@pytest.mark.parametrize(
    "call", [0, 4, *(pytest.param(call, marks=pytest.mark.exhaustive) for call in (1, 2, NEW_TOKENS - 1))]
)
@pytest.mark.parametrize("count", [1, 3])
def test_answers_go_on_where_they_were(
    engine: Engine, card: Card, expected: Reference, call: int, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    moved: list[ModelInfo] = []
    engine.on_moved = moved.append
    card.fails_at(engine, call)
    outcomes = ask(engine, [PROMPT] * count)
    assert [tokens(outcome) for outcome in outcomes] == [expected.first] * count
    assert moved == [engine.info]
    assert engine.info.device == "cpu"
    assert "stopped responding" in engine.info.device_note
    assert "no longer used: The graphics card stopped responding" in caplog.text
    assert tokens(ask(engine, [expected.second_prompt])[0]) == expected.second
    assert len(moved) == 1


def test_what_was_written_is_not_written_again(engine: Engine, card: Card, expected: Reference) -> None:
    told: list[str] = []
    whole = ask(engine, [PROMPT])[0]
    card.calls = 0
    card.fails_at(engine, 6)
    again = ask(engine, [PROMPT], lambda text, _count: told.append(text))[0]
    assert not isinstance(whole, BaseException | None)
    assert tokens(again) == expected.first
    assert "".join(told) == whole.text


def test_who_leaves_meanwhile_has_what_was_written(engine: Engine, card: Card, expected: Reference) -> None:
    card.fails_at(engine, 4)
    ended: list[Outcome] = []
    sampling, told = SamplingParams(max_tokens=NEW_TOKENS), list[str]()
    request = BatchRequest(
        0,
        ids=tuple(PROMPT),
        sampling=sampling,
        end_ids=NO_END,
        on_text=lambda text, _count: told.append(text),
        cancelled=lambda: card.torch.is_lost,
    )
    engine.scheduler.submit(request, ended.append)
    engine.scheduler.serve()
    (outcome,) = ended
    written = tokens(outcome)
    assert 0 < len(written) < NEW_TOKENS
    assert written == expected.first[: len(written)]
    assert (outcome.finish_reason, outcome.text) == ("cancelled", "".join(told))


def test_a_fault_that_the_card_survives_ends_the_answer(
    engine: Engine, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    card.fails_at(engine, 3)
    devices = engine._loaded.devices
    monkeypatch.setattr(type(devices.devices[0]), "responds", lambda _device: True)
    outcome = ask(engine, [PROMPT])[0]
    assert isinstance(outcome, RuntimeError)
    assert engine.info.device != "cpu"


def test_a_model_that_does_not_fit_without_the_card(
    engine: Engine, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = EngineError(ErrorCode.NOT_ENOUGH_MEMORY, "It does not fit.")

    def refuse(*_args: object, **_options: object) -> None:
        raise error

    card.fails_at(engine, 5)
    monkeypatch.setattr(engine_module, "load_model", refuse)
    with pytest.raises(EngineError, match="does not fit"):
        ask(engine, [PROMPT, PROMPT])
    assert engine.info is None
    with pytest.raises(EngineError, match="No model is loaded"):
        engine.scheduler.serve()


@pytest.mark.parametrize("count", [1, 3])
def test_the_model_returns_once_the_card_responds_again(
    engine: Engine, card: Card, expected: Reference, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.runtime.engine._FIRST_S", 0.0)
    moved: list[ModelInfo] = []
    before = engine.info
    assert before is not None
    engine.on_moved = moved.append
    card.fails_at(engine, 4)
    assert [tokens(outcome) for outcome in ask(engine, [PROMPT] * count)] == [expected.first] * count
    assert [info.device for info in moved] == ["cpu"]
    assert moved[0].needs_restart
    assert tokens(ask(engine, [PROMPT])[0]) == expected.first  # the card is asked, and does not respond yet
    assert [info.device for info in moved] == ["cpu"]
    card.torch.is_lost = False
    assert [tokens(outcome) for outcome in ask(engine, [expected.second_prompt] * count)] == [expected.second] * count
    assert moved[1:] == [before]
    assert tokens(ask(engine, [PROMPT])[0]) == expected.first
    assert len(moved) == 2


def test_a_card_that_only_another_process_can_use_is_offered_once(
    engine: Engine, card: Card, expected: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[ModelInfo] = []
    engine.on_moved = moved.append
    proofs = [[CardProof("Fake", "unknown error")], None, [CardProof("Fake")]]
    back = engine._failback
    back._prove = lambda: proofs.pop(0)
    monkeypatch.setattr("engine.runtime.engine._FIRST_S", 0.0)
    monkeypatch.setattr("engine.runtime.engine._MOST_S", 0.0)
    card.fails_at(engine, 2)
    assert tokens(ask(engine, [PROMPT])[0]) == expected.first
    card.torch.broken = FAULT
    while proofs:
        assert [info.card_is_back for info in moved] == [False]
        assert tokens(ask(engine, [PROMPT])[0]) == expected.first
        if back._proving is not None:
            back._proving.join()
    for _ in range(2):
        assert tokens(ask(engine, [PROMPT])[0]) == expected.first
    assert [info.card_is_back for info in moved] == [False, True]
    assert moved[1].device_note == "The graphics card works again: reload the model to use it."


def test_where_it_cannot_be_loaded_on_the_card_again_the_cpu_goes_on(
    engine: Engine, card: Card, expected: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.runtime.engine._FIRST_S", 0.0)
    moved: list[ModelInfo] = []
    engine.on_moved = moved.append
    card.fails_at(engine, 2)
    assert tokens(ask(engine, [PROMPT])[0]) == expected.first
    card.torch.is_lost = False
    load, refused = engine_module.load_model, list[str]()

    def refuse(config: EngineConfig, **options: object) -> object:
        if config.device != "cpu":
            refused.append(config.device)
            raise EngineError(ErrorCode.DEVICE_UNAVAILABLE, "It is gone again.")
        return load(config, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(engine_module, "load_model", refuse)
    assert tokens(ask(engine, [expected.second_prompt])[0]) == expected.second
    assert refused == ["xpu"]
    assert [info.device for info in moved] == ["cpu", "cpu"]
    assert "stopped responding" in moved[-1].device_note


def test_a_card_is_asked_ever_less_often(engine: Engine, card: Card) -> None:
    assert engine._loaded.devices is not None
    opened: list[float] = []

    def refuse() -> tuple[list[Device], str]:
        opened.append(now_s)
        raise EngineError(ErrorCode.DEVICE_UNAVAILABLE, "It is not there.")

    back = Failback(engine._loaded.devices, refuse)
    back._prove = lambda: None
    now_s = 0.0
    assert not back.is_open(now_s)
    back.left(now_s, is_lost=True)
    for second in range(5_000):
        now_s = float(second)
        assert not back.is_open(now_s)
    assert opened == [10, 30, 70, 150, 310, 630, *range(1230, 5000, 600)]
    back.returned(now_s)
    back.left(now_s + 1, is_lost=False)  # at once: it is waited for longer than before
    opened.clear()
    for second in range(5_000, 6_000):
        now_s = float(second)
        back.is_open(now_s)
    assert opened == [5_600]
