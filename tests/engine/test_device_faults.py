"""What goes wrong on a device while a model is loaded or answers: a smaller plan, the same tokens, and it is said."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.common.config import EngineConfig
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.devices.emulated import EmulatedStream, allocate_host
from engine.devices.memory_budget import MemoryBudget, MemoryCategory
from engine.runtime.decode.generation import GenerationResult
from engine.runtime.load import binding as device_binding
from engine.runtime.load.model import load_model
from engine.runtime.loaded_model import LoadedModel
from tests.engine.loaded_tiny import library_tokens, random_prompt
from tests.engine.on_devices import MIB, answer, chatting, memory_use, opened, share_misses, slots
from tests.engine.tiny_families import model_class, tiny_checkpoint, tiny_config
from tests.refusals import refused

CONTEXT = 1024
LONG = random_prompt(600, seed=2)
PROMPT = LONG[:20]
TOKENS = 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    return tiny_checkpoint("qwen3_moe", folder, max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def tokens(checkpoint: Path) -> Callable[[list[int], int], list[int]]:
    """What transformers says to a prompt."""
    config = tiny_config("qwen3_moe", max_position_embeddings=CONTEXT)
    model = model_class(config).from_pretrained(checkpoint, dtype=torch.float32).eval()
    known: dict[tuple[int, int], list[int]] = {}

    def tokens(prompt: list[int], count: int) -> list[int]:
        if (len(prompt), count) not in known:  # all prompts begin alike
            known[len(prompt), count] = library_tokens(model, prompt, count)
        return known[len(prompt), count]

    return tokens


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    share_misses(monkeypatch)


class Failing:
    """Wraps a function such that some of its calls raise."""

    def __init__(self, function: Callable[..., Any], error: Callable[[], BaseException]) -> None:
        self._function, self._error = function, error
        self.coming: Iterator[bool] = iter(())
        self.failed = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if next(self.coming, False):
            self.failed += 1
            raise self._error()
        return self._function(*args, **kwargs)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Of experts to a device."""
    failing = Failing(lambda work: work(), lambda: RuntimeError("the link was shaken"))
    put_off = EmulatedStream._put_off

    def shaky(stream: EmulatedStream, work: Callable[[], object], slowdown: float) -> Callable[[], float]:
        is_failing = stream.name.endswith(" h2d") and work.__name__ == "move"
        return put_off(stream, (lambda: failing(work)) if is_failing else work, slowdown)

    monkeypatch.setattr(EmulatedStream, "_put_off", shaky)
    return failing


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Of the device."""
    failing = Failing(lambda kernel, *args: kernel(*args), lambda: torch.OutOfMemoryError("no memory for a kernel"))
    maker = device_binding._maker

    def failing_maker(*args: Any) -> Any:
        make = maker(*args)

        def failing_kernel(records: Any) -> Any:
            kernel = make(records)
            return lambda *args: failing(kernel, *args)

        return failing_kernel

    monkeypatch.setattr(device_binding, "_maker", failing_maker)
    return failing


def answer_while(model: LoadedModel, during: Callable[[int], None], prompt: list[int] = PROMPT) -> GenerationResult:
    """An answer during which `during(tokens so far)` is called after each token."""
    with chatting(model) as session:
        return answer(session, prompt, TOKENS, on_text=lambda _text, count: during(count))


def nothing(_count: int) -> None:
    """For answers that are left in peace."""


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("devices", [1, 2])
def test_another_program_takes_the_memory_in_the_middle(devices: int, checkpoint: Path, tokens: Any) -> None:
    with opened(checkpoint, devices, cache_slots=1000) as model:
        assert model.devices is not None
        before = slots(model)
        first = model.devices.devices[0]

        left, notes = [], list[str]()

        def take(count: int) -> None:
            if count == 5:
                first.memory.limit(first.memory.use().used - MIB // 20)
            left.append((slots(model), first.memory.excess))
            notes.extend(model.devices.experts.notes if model.devices is not None else [])

        assert list(answer_while(model, take).token_ids) == tokens(PROMPT, TOKENS)
        assert left[0] == (before, 0)
        assert 0 < left[-1][0] < before
        assert left[-1][1] == 0
        assert any("others need its memory" in note for note in notes)
        first.memory.limit(0)  # not even the weights are left in peace
        with refused(ErrorCode.NOT_ENOUGH_MEMORY, match="needs another"):
            answer_while(model, nothing)
        first.memory.limit(8 * MIB)
        assert list(answer_while(model, nothing).token_ids) == tokens(PROMPT, TOKENS)


@pytest.mark.parametrize("refused", [MemoryCategory.EXPERTS, MemoryCategory.STAGING])
@pytest.mark.parametrize("granted", [0, 1, 3])
def test_a_refused_allocation_makes_the_cache_smaller_and_is_said(
    refused: MemoryCategory, granted: int, checkpoint: Path, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, allocate = {refused: granted}, MemoryBudget.allocate

    def refuse(budget: MemoryBudget, nbytes: int, category: MemoryCategory) -> torch.Tensor:
        left[category] = left.get(category, 1000) - 1
        if left[category] < 0:
            monkeypatch.setattr(budget, "_allocator", _no_memory)
        try:
            return allocate(budget, nbytes, category)
        finally:
            monkeypatch.setattr(budget, "_allocator", allocate_host)

    monkeypatch.setattr(MemoryBudget, "allocate", refuse)
    with opened(checkpoint, cache_slots=1000) as model:
        assert model.devices is not None
        if refused is MemoryCategory.EXPERTS:
            assert slots(model) < 16
        if left[refused] < 0:
            assert "emulated:slow-link#0" in model.info.device_note
        assert list(answer_while(model, nothing).token_ids) == tokens(PROMPT, TOKENS)


def test_whoever_is_refused_everything_runs_on_the_cpu(
    checkpoint: Path, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.devices.emulated.allocate_host", _no_memory)
    with opened(checkpoint, cache_slots=1000) as model:
        assert model.devices is None
        assert model.info.device == "cpu"
        assert "emulated:slow-link#0" in model.info.device_note
        assert list(answer_while(model, nothing).token_ids) == tokens(PROMPT, TOKENS)


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("misses", ["mixed", "fetch", "off"])
@pytest.mark.parametrize("seed", range(3))
def test_copies_that_fail_change_no_token(
    misses: str, seed: int, checkpoint: Path, tokens: Any, copies: Failing
) -> None:
    rng = random.Random(seed)
    with opened(checkpoint, cache_slots=5, misses=misses) as model, chatting(model) as session:
        for prompt in (PROMPT, LONG[:100]):
            copies.coming = iter([rng.random() < 0.2 for _ in range(300)])
            assert list(answer(session, prompt, TOKENS).token_ids) == tokens(prompt, TOKENS)
        assert copies.failed > 0


@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=len)
@pytest.mark.parametrize("place", [0, 3, 50])
def test_a_kernel_without_memory_gets_some_from_the_cache(
    place: int, prompt: list[int], checkpoint: Path, tokens: Any, kernels: Failing
) -> None:
    with opened(checkpoint, cache_slots=1000, misses="fetch") as model:
        left = [slots(model)]
        kernels.coming = iter([False] * place + [True])
        given = answer_while(model, lambda _count: left.append(slots(model)), prompt)
        assert list(given.token_ids) == tokens(prompt, TOKENS)
        assert kernels.failed == 1
        assert 0 < left[-1] < left[0]


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("misses", ["mixed", "fetch", "off"])
def test_a_device_whose_kernels_never_have_memory_leaves_experts_to_the_cpu(
    misses: str, checkpoint: Path, tokens: Any, kernels: Failing
) -> None:
    with opened(checkpoint, cache_slots=6, misses=misses) as model, chatting(model) as session:
        kernels.coming = iter([True] * 10_000)
        for prompt in (PROMPT, LONG):
            assert list(answer(session, prompt, TOKENS).token_ids) == tokens(prompt, TOKENS)
        assert slots(model) == 0
        kernels.coming = iter(())
        assert list(answer(session, PROMPT, TOKENS).token_ids) == tokens(PROMPT, TOKENS)


@pytest.mark.parametrize("where", [0, 1, 20])
def test_what_is_not_an_expert_may_lack_memory_too(
    where: int, checkpoint: Path, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(checkpoint, cache_slots=1000) as model:
        before = slots(model)
        attention = model.model.model.layers[1].self_attn
        failing = Failing(attention.forward, lambda: torch.OutOfMemoryError("no memory for attention"))
        with chatting(model) as session:
            failing.coming = iter([False] * where + [True])
            monkeypatch.setattr(attention, "forward", failing)
            assert list(answer(session, PROMPT, TOKENS).token_ids) == tokens(PROMPT, TOKENS)
        assert failing.failed == 1
        assert 0 < slots(model) < before


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 60))])
def test_all_of_it_in_any_order(seed: int, checkpoint: Path, tokens: Any, copies: Failing, kernels: Failing) -> None:
    """Answers, beams and cancels while memory comes and goes and copies and kernels fail: right tokens, or refused."""
    rng = random.Random(seed)
    settings = {"cache_slots": rng.choice([2, 5, 1000]), "misses": rng.choice(["mixed", "fetch", "off"])}
    with opened(checkpoint, rng.choice([1, 2]), **settings) as model, chatting(model) as session:
        assert model.devices is not None
        for _ in range(15):
            card = rng.choice(model.devices.devices)
            card.memory.limit(rng.choice([8 * MIB, 8 * MIB, card.memory.use().used - rng.randint(0, 40_000)]))
            copies.coming = iter([rng.random() < 0.05 for _ in range(rng.choice([0, 100]))])
            kernels.coming = iter([rng.random() < 0.02 for _ in range(rng.choice([0, 50]))])
            prompt, stops_after = LONG[: rng.choice([5, 20, 70, 300])], rng.choice([1, 5, 1000])
            given: list[int] = []
            try:
                result = answer(
                    session,
                    prompt,
                    TOKENS,
                    on_text=lambda _text, count, given=given: given.append(count),
                    cancelled=lambda given=given, most=stops_after: len(given) >= most,
                )
            except EngineError as error:
                assert error.code is ErrorCode.NOT_ENOUGH_MEMORY, error.message  # noqa: PT017 - it need not happen
            else:
                assert list(result.token_ids) == tokens(prompt, TOKENS)[: result.generated_tokens]
                assert result.finish_reason == ("length" if stops_after == 1000 else "cancelled")
        for card in model.devices.devices:
            card.memory.limit(8 * MIB)
        copies.coming = kernels.coming = iter(())
        assert list(answer(session, PROMPT, TOKENS).token_ids) == tokens(PROMPT, TOKENS)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("devices", [1, 2])
def test_loading_can_be_cancelled_anywhere(devices: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[MemoryBudget] = []
    made = MemoryBudget.__init__
    monkeypatch.setattr(MemoryBudget, "__init__", lambda self, *args: (budgets.append(self), made(self, *args))[1])
    config = EngineConfig(str(checkpoint), device=f"emulated:slow-linkx{devices}", precision="fp32", threads=1)
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked == last

    last = 1
    while True:
        asked = 0
        try:
            load_model(config, on_progress=lambda _done, _total: None, cancelled=cancelled).close()
        except RequestCancelled:
            last += 1 + last // 3
        else:
            break
        assert all(budget.use().used == 0 for budget in budgets)
    assert last > 2
    assert all(budget.use().used == 0 for budget in budgets)


def test_a_long_piece_can_be_cancelled(checkpoint: Path, tokens: Any) -> None:
    with opened(checkpoint, cache_slots=5) as model, chatting(model) as session:
        assert model.chunk_tokens >= len(LONG) - 100
        answer(session, LONG[:30], 4)
        heard: list[tuple[int, int]] = []
        cancelled = answer(
            session, LONG, TOKENS, on_progress=lambda *at: heard.append(at), cancelled=lambda: len(heard) > 1
        )
        assert (cancelled.finish_reason, cancelled.generated_tokens) == ("cancelled", 0)
        assert heard[-1][0] < len(LONG)
        assert list(answer(session, LONG, TOKENS).token_ids) == tokens(LONG, TOKENS)
        for use in memory_use(model):
            assert use.peak <= use.total


def test_an_answer_can_be_cancelled_and_the_next_one_is_right(checkpoint: Path, tokens: Any) -> None:
    with opened(checkpoint, cache_slots=5) as model, chatting(model) as session:
        for count in (1, 2, 7):
            given: list[int] = []
            part = answer(
                session,
                PROMPT,
                TOKENS,
                on_text=lambda _text, so_far, given=given: given.append(so_far),
                cancelled=lambda given=given, count=count: len(given) >= count,
            )
            assert part.finish_reason == "cancelled"
            assert list(part.token_ids) == tokens(PROMPT, TOKENS)[: len(part.token_ids)]
        assert list(answer(session, PROMPT, TOKENS).token_ids) == tokens(PROMPT, TOKENS)


@pytest.mark.parametrize("devices", [0, 2])
def test_the_files_vanish_while_the_model_runs(devices: int, checkpoint: Path, tokens: Any, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    with opened(copy, devices, cache_slots=5) as model:
        during = {5: lambda: shutil.rmtree(copy)}
        given = answer_while(model, lambda count: during.get(count, lambda: None)())
        assert list(given.token_ids) == tokens(PROMPT, TOKENS)
        assert not copy.exists()
        assert list(answer_while(model, nothing, LONG).token_ids) == tokens(LONG, TOKENS)


def _no_memory(nbytes: int) -> torch.Tensor:
    raise MemoryError(f"{nbytes} bytes are not to be had")
