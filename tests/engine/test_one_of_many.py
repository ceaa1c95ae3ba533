"""What goes wrong in one sequence ends that one: all others go on with the same tokens, and the model answers on."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch_files.rows import Answer, RowRequest
from engine.common.chat import ChatMessage
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode
from engine.devices.failures import is_fault_of_device
from engine.jobs.rows import BatchOutcome, never
from engine.runtime.batch.model_rows import ModelRows
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.decode.paged_steps import PagedSteps
from engine.runtime.decode.sampling import make_chooser, penalise_repetition
from engine.runtime.decode.sequence import Sequence, SequenceError, of_one
from engine.runtime.decode.speculation import Speculation
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.schedule.request import BatchRequest
from engine.runtime.schedule.scheduler import Scheduler
from tests.engine.loaded_tiny import NO_END, random_prompt, tiny_loaded
from tests.engine.single_streams import Alone, answered_together
from tests.refusals import refused

POISON = 666
"""The seed of the sequence in which something goes wrong."""
TOKENS = 12


class FaultError(Exception):
    """Whatever it may be."""


def failing(call: Callable[..., Any], after: int = 3) -> Callable[..., Any]:
    """The function, which fails at the call after so many."""
    calls = 0

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > after:
            raise FaultError("a prompt")
        return call(*args, **kwargs)

    return called


class Free:
    """A constraint that allows everything, until it fails."""

    def __init__(self, fails: str, after: int = 3) -> None:
        setattr(self, fails, failing(getattr(self, fails), after))

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def accept(self, token_id: int) -> bool:
        return False


class Nothing(Free):
    """Allows no token from the fourth on."""

    def __init__(self) -> None:
        self._calls = 0

    def restrict(self, logits: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        return torch.full_like(logits, -torch.inf) if self._calls > 3 else logits


def _logits(value: float) -> Callable[[Sequence], None]:
    def spoil(sequence: Sequence) -> None:
        choose, calls = sequence.choose, 0

        def chooses(logits: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls > 3:
                logits = logits.clone()
                logits[0, 7] = value
            return choose(logits)

        sequence.choose = chooses  # type: ignore[method-assign]

    return spoil


def _part(of: str, name: str) -> Callable[[Sequence], None]:
    def spoil(sequence: Sequence) -> None:
        part = getattr(sequence, of) if of else sequence
        setattr(part, name, failing(getattr(part, name)))

    return spoil


IN_SEQUENCE: dict[str, Callable[[Sequence], None]] = {
    "sample": _part("", "_choose"),
    "penalise": _part("_dry", "apply"),
    "detokenise": _part("_detokenizer", "feed"),
    "stop": _part("_stops", "feed"),
    "take": _part("", "take"),
    "NaN": _logits(torch.nan),
    "infinite": _logits(torch.inf),
}
IN_REQUEST: dict[str, Callable[[BatchRequest], BatchRequest]] = {
    "constrain": lambda request: replace(request, constraint=Free("restrict")),
    "accept": lambda request: replace(request, constraint=Free("accept")),
    "dead end": lambda request: replace(request, constraint=Nothing()),
    "count": lambda request: replace(request, on_text=failing(request.on_text)),
    "cancel": lambda request: replace(request, cancelled=failing(request.cancelled, 6)),
    "cancel at once": lambda request: replace(request, cancelled=failing(request.cancelled, 0)),
    "progress": lambda request: replace(request, on_progress=failing(request.on_progress, 0)),
}
STEPS = [*IN_SEQUENCE, *IN_REQUEST, "begin"]


def _request(number: int, *, greedy: bool = True, seed: int | None = None) -> BatchRequest:
    sampling = SamplingParams(max_tokens=TOKENS, seed=seed)
    if not greedy:
        sampling = replace(sampling, temperature=1.0, repetition_penalty=1.1, dry_multiplier=0.1)
    return BatchRequest(number, ids=tuple(random_prompt(20 + number, seed=number)), sampling=sampling, end_ids=NO_END)


def _poisoned(number: int, step: str, patch: pytest.MonkeyPatch) -> BatchRequest:
    request = _request(number, greedy=False, seed=POISON)
    if step in IN_REQUEST:
        return IN_REQUEST[step](request)
    own = Sequence.begin

    def begins(sequence: Sequence, *args: Any) -> None:
        is_poisoned = sequence.request.sampling.seed == POISON
        if step == "begin" and is_poisoned:
            raise FaultError
        own(sequence, *args)
        if is_poisoned:
            IN_SEQUENCE[step](sequence)

    patch.setattr(Sequence, "begin", begins)
    return request


def _check_error(error: EngineError | None, step: str) -> None:
    assert isinstance(error, SequenceError)
    if step in ("NaN", "infinite"):
        assert error.code is ErrorCode.MODEL_UNSUPPORTED
        assert error.message.startswith("Token 4 of the answer could not be chosen")
    elif step == "dead end":
        assert error.code is ErrorCode.INVALID_REQUEST
    else:
        assert error.code is ErrorCode.INTERNAL
        assert "FaultError at test_one_of_many.py" in error.message
        assert "a prompt" not in error.message


@pytest.fixture(scope="module")
def expected(mixtral: LoadedModel) -> dict[int, tuple[int, ...]]:
    alone, found = Alone(mixtral), dict[int, tuple[int, ...]]()
    for number in range(6):
        request = _request(number)
        found[number] = alone.generate_from_ids(request.ids, request.sampling, end_ids=NO_END).token_ids
    return found


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(("step", "place"), [(step, number % 2 * 2) for number, step in enumerate(STEPS)])
def test_four_streams_beside_one_in_which_something_goes_wrong(
    mixtral: LoadedModel, expected: dict[int, tuple[int, ...]], step: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(mixtral)
    requests = [_request(number) for number in range(5)]
    requests[place] = _poisoned(place, step, monkeypatch)
    answers = answered_together(scheduler, requests)
    _check_error(answers[place].error, step)
    assert {n: answer.token_ids for n, answer in answers.items() if n != place} == {
        n: expected[n] for n in range(5) if n != place
    }
    assert answered_together(scheduler, [_request(5)])[5].token_ids == expected[5]
    assert not scheduler.is_busy
    scheduler.close()


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("step", STEPS)
def test_alone_with_the_model(
    mixtral: LoadedModel, expected: dict[int, tuple[int, ...]], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, answers = Scheduler(mixtral), dict[int, GenerationResult]()
    for request in (_request(1), _poisoned(0, step, monkeypatch), _request(2)):
        answers |= answered_together(scheduler, [request])
    _check_error(answers[0].error, step)
    assert [answers[n].token_ids for n in (1, 2)] == [expected[n] for n in (1, 2)]
    scheduler.close()


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(
    ("step", "way"), [(step, ("together", "one by one")[number // 2 % 2]) for number, step in enumerate(STEPS)]
)
def test_rows_of_a_job(
    mixtral: LoadedModel,
    expected: dict[int, tuple[int, ...]],
    step: str,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if way == "one by one":
        monkeypatch.setattr("engine.runtime.batch.packed_sweep.why_not_packed", lambda _model: "it is not")
    policy = BatchPolicy(rows=5, kv_bytes=2**22, sweep_tokens=30, micro_batch_tokens=25)
    executor, answers = BatchExecutor(mixtral, policy), dict[int, GenerationResult]()
    requests = [_request(number) for number in range(6)]
    requests[2] = _poisoned(2, step, monkeypatch)
    outcome = executor.run(iter(requests), lambda answer: answers.__setitem__(answer.row, answer))
    executor.close()
    assert outcome is BatchOutcome.FINISHED
    _check_error(answers[2].error, step)
    assert answers[2].error is not None
    assert {n: answer.token_ids for n, answer in answers.items() if n != 2} == {
        n: tokens for n, tokens in expected.items() if n != 2
    }


def test_a_row_whose_answer_cannot_be_read_fails_alone(mixtral: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Sequence._end_reading

    def end(sequence: Sequence) -> None:
        if sequence._reader is not None and sequence.told == 3:
            sequence._reader.end = failing(sequence._reader.end, 0)  # type: ignore[method-assign]
        own(sequence)

    monkeypatch.setattr(Sequence, "_end_reading", end)
    rows = ModelRows(BatchExecutor(mixtral), never_constrained)
    answers = dict[int, Answer]()

    def asked() -> Iterator[RowRequest]:
        for number, most in enumerate((5, 3, 6)):
            yield RowRequest(number, (ChatMessage("user", "Why?"),), SamplingParams(max_tokens=most))

    rows.run(asked(), lambda answer: answers.__setitem__(answer.row, answer), never, never)
    rows.close()
    assert [answers[n].finish_reason == "failed" for n in range(3)] == [False, True, False]
    assert "Fault" in answers[1].problem


def never_constrained() -> Any:
    raise AssertionError


def test_a_draft_that_fails_ends_its_answer(mixtral: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(PagedSteps, "most_rows", 4)
        patch.setattr(Speculation, "_worthwhile", failing(lambda *_args: None))
        with pytest.raises(SequenceError, match="Fault"):
            Alone(mixtral, speculates=True).answer(_request(0))
    assert len(Alone(mixtral, speculates=True).answer(_request(0)).token_ids) == TOKENS


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("sampling", [{}, {"beams": 3}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1e-320}])
def test_logits_that_are_no_numbers(value: float, sampling: dict[str, Any]) -> None:
    loaded = tiny_loaded("mixtral")
    spoilt = torch.tensor([11])
    loaded.model.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits.index_fill(-1, spoilt, value))
    with refused(ErrorCode.MODEL_UNSUPPORTED, match="are no numbers", kind=SequenceError):
        Alone(loaded).answer(replace(_request(0), sampling=SamplingParams(max_tokens=4, **sampling)))


def test_a_fault_of_a_device_is_everybodys() -> None:
    lost = EngineError(ErrorCode.DEVICE_UNAVAILABLE, "The card was lost.")
    with pytest.raises(EngineError) as caught, of_one():
        raise lost
    assert caught.value is lost
    assert is_fault_of_device(torch.AcceleratorError("CUDA error: an illegal memory access was encountered", -1))
    with refused(ErrorCode.NOT_ENOUGH_MEMORY, kind=SequenceError), of_one():
        raise MemoryError


@pytest.mark.parametrize(("name", "value"), [("top_p", 1e-320), ("top_p", 1e-45), ("repetition_penalty", 1e-39)])
def test_what_is_nothing_in_fp32_is_refused(name: str, value: float) -> None:
    with refused(ErrorCode.INVALID_REQUEST, match=f"{name} is .* counts as 0"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


_SMALL = st.sampled_from([1e-37, 2e-30, 1e-7, 0.5, 1.0])


@given(
    temperature=st.sampled_from([0.0, 1e-320, 9e-6, 1e-5, 1e-3, 1.0, 10.0]),
    top_p=_SMALL,
    top_k=st.sampled_from([0, 1, 2, 10**30]),
    min_p=st.sampled_from([0.0, 1e-320, 1e-45, 1e-8, 0.999999999]),
    penalty=st.one_of(_SMALL, st.just(10.0)),
    logits=st.lists(
        st.floats(-1e4, 1e4, width=32) | st.just(-torch.inf) | st.just(3.0), min_size=3, max_size=40
    ).filter(lambda values: max(values) > -torch.inf),
)
def test_every_sampling_that_is_taken_chooses_a_token(
    temperature: float, top_p: float, top_k: int, min_p: float, penalty: float, logits: list[float]
) -> None:
    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=1)
    changed = penalise_repetition(torch.tensor([logits]), torch.tensor([[0, 2]]), penalty)
    token = int(make_chooser(sampling, torch.device("cpu"))(changed))
    assert 0 <= token < len(logits)
    assert changed[0, token] > -torch.inf
    if temperature < 1e-5:
        assert token == int(changed.argmax())
