"""Decode steps repeated as graphs, on an emulated card: tokens are those of transformers; who cannot is left alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.common.errors import EngineError, ErrorCode
from engine.devices.device import CaptureError
from engine.devices.emulated import RecordedCapture
from engine.devices.memory_budget import MemoryCategory
from engine.experts.dispatch import BANK_LAYER, bound_kernel
from engine.experts.dispatcher import HybridExperts
from engine.kernels.native.experts import MAX_TOKENS
from engine.kernels.torch_experts import TorchExperts
from engine.runtime.batch.policy import policy_for
from engine.runtime.decode import graphs, pieces
from engine.runtime.decode.graphs import GraphStep
from engine.runtime.decode.speculation import Guess
from engine.runtime.schedule import executor
from engine.runtime.schedule.row import PagedRow
from engine.runtime.telemetry.experts import RoutingRecorder
from tests.combinations import some
from tests.engine.graph_cases import FAMILIES, check_conversation, graphs_of, step_of
from tests.engine.loaded_tiny import random_prompt
from tests.engine.on_devices import PROMPT, answer, chatting, memory_use, opened, reference, share_misses


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    share_misses(monkeypatch)


CONFIGS: list[dict[str, Any]] = [{}, {"cache_slots": 4}, {"cache_slots": 4, "misses": "fetch"}]


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize(
    ("family", "config"), [(family, CONFIGS[number % 3]) for number, family in enumerate(FAMILIES)], ids=str
)
def test_tokens_are_those_of_transformers(family: str, config: dict[str, Any], checkpoints: Path) -> None:
    check_conversation(family, checkpoints, graphs="on", **config)


def test_a_family_that_cannot_is_left_alone_and_it_is_said_once(
    checkpoints: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = reference("llama4_text", checkpoints)
    with caplog.at_level("INFO"), opened(expected.folder, graphs="on") as model, chatting(model) as session:
        assert list(answer(session, PROMPT).token_ids) == expected.first
        assert list(answer(session, expected.second_prompt).token_ids) == expected.second
        graphs = graphs_of(session)
        assert graphs.refused is not None
        assert graphs.counters.captures == graphs.counters.replays == 0
    assert sum("graph of decode steps" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("family", some(["mixtral", "qwen3_moe", "gpt_oss"], every=4))
def test_long_answers_grow_out_of_their_pages(family: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "GATHERED_PAGES", 2)
    folder = reference(family, checkpoints).folder
    prompt = random_prompt(20, seed=4)
    with opened(folder, cache_slots=4) as model, chatting(model) as session:
        wanted = answer(session, prompt, 150).token_ids
    with opened(folder, cache_slots=4, graphs="on") as model, chatting(model) as session:
        assert answer(session, prompt, 150).token_ids == wanted
        counters = graphs_of(session).counters
        assert counters.eager == 0
        assert counters.replays > 130
        assert counters.captures >= 3


def test_pages_that_a_window_has_passed_are_given_up(checkpoints: Path) -> None:
    folder, prompt = reference("gpt_oss", checkpoints).folder, random_prompt(20, seed=4)
    with opened(folder, 0) as model, chatting(model) as session:
        wanted = answer(session, prompt, 200).token_ids
    with opened(folder, graphs="on") as model, chatting(model) as session:
        held = list[tuple[int, int]]()
        found = answer(
            session,
            prompt,
            200,
            on_text=lambda _text, _count: held.append((session.batch.pool.held, session.batch.pool.held_windows)),
        )
        assert found.token_ids == wanted
        pages, windows = held[-1]
        assert pages == 7
        assert max(count for _pages, count in held) <= windows + 1 < pages
        room = session.batch.pool.room
        assert 0 < room.windows < room.pages
        again = answer(session, [*prompt, *wanted, 5], 3)
        assert again.reused_tokens > 0


def test_a_long_piece_of_a_prompt_has_room_for_its_windows(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "wanted_tokens", lambda _layers, _usual, most, _left: most)
    monkeypatch.setattr(executor, "policy_for", lambda loaded: replace(policy_for(loaded), sweep_tokens=32))
    folder, prompt = reference("gpt_oss", checkpoints).folder, random_prompt(240, seed=4)
    with opened(folder, cache_slots=4, misses="fetch") as model:
        short = replace(model, chunk_tokens=60)
        with chatting(short) as session:
            assert short.devices is not None
            room = session.batch.pool
            assert len(answer(session, prompt, 3).token_ids) == 3
            assert room.windows > 0
            assert session.batch.exact.at_once(len(prompt)) == 240


def test_what_was_guessed_is_computed_though_steps_have_a_single_token_now(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompts = reference("qwen3_moe", checkpoints).folder, [random_prompt(20, seed=seed) for seed in range(2)]
    with opened(folder, graphs="on", cache_slots=4) as model, chatting(model) as session:
        alone = [answer(session, prompt, 6).token_ids for prompt in prompts]
        exact, made = session.batch.exact, list[int]()
        write = exact.write

        def refused(ids: Sequence[int], *rest: Any) -> torch.Tensor:
            made.append(len(ids))
            graphs_of(session)._most = 1  # as if found out by another step of the same round
            return write(ids, *rest)

        monkeypatch.setattr(exact, "write", refused)
        monkeypatch.setattr(
            PagedRow, "guess", lambda _row, most, *_rest: Guess((5,), (1.0,), (0,)) if most > 1 else None
        )
        assert session.together(prompts, 6) == alone
        assert max(made) >= 3


def test_experts_that_wait_for_nothing_are_part_of_the_graph(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a card's kernel for experts that are all on it."""
    expected = reference("qwen3_moe", checkpoints)
    with opened(expected.folder, graphs="on") as model, chatting(model) as session:
        for module in model.model.modules():
            if BANK_LAYER in module.__dict__:
                layer, kernel = bound_kernel(module)
                assert isinstance(kernel, TorchExperts)
                setattr(module, BANK_LAYER, (layer, _WaitsForNothing(kernel)))
        assert list(answer(session, PROMPT).token_ids) == expected.first
        graphs = graphs_of(session)
        assert graphs.refused is None
        assert step_of(graphs).pieces == 1


class _WaitsForNothing:
    """All experts of a layer for every token, those that are not wanted with weight 0."""

    is_capturable = True

    def __init__(self, kernel: TorchExperts) -> None:
        self._kernel = kernel

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if len(hidden) > 1:
            return self._kernel(hidden, index, weights)
        return self._kernel._one_token_all_experts(hidden, index, weights)


def test_experts_that_fail_end_the_answer_and_the_next_one_is_right(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference("qwen3_moe", checkpoints)
    calls = 0
    real = HybridExperts.__call__

    def failing(self: HybridExperts, *args: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise EngineError(ErrorCode.DEVICE_UNAVAILABLE, "The card has gone.")
        return real(self, *args)

    with opened(expected.folder, graphs="on", cache_slots=3) as model:
        layers = model.model.config.num_hidden_layers
        # In the prompt's only piece, the warm-up (twice all layers), the capture, and a repetition.
        for step in (1, 2, 3.5, 4.5, 5.5):
            calls, fails_at = 0, int(step * layers) + 1
            with chatting(model) as session:
                monkeypatch.setattr(HybridExperts, "__call__", failing)
                with pytest.raises(EngineError, match="has gone"):
                    answer(session, PROMPT)
                monkeypatch.setattr(HybridExperts, "__call__", real)
                session.clear()
                assert list(answer(session, PROMPT).token_ids) == expected.first
                assert graphs_of(session).refused is None
                assert graphs_of(session).counters.replays > 0


def test_a_cancelled_answer_goes_on_from_its_cache(checkpoints: Path) -> None:
    expected = reference("qwen3_moe", checkpoints)
    with opened(expected.folder, graphs="on", cache_slots=3) as model, chatting(model) as session:
        told: list[int] = []
        stopped = answer(
            session, PROMPT, on_text=lambda _text, count: told.append(count), cancelled=lambda: len(told) >= 6
        )
        assert stopped.finish_reason == "cancelled"
        assert list(stopped.token_ids) == expected.first[: len(stopped.token_ids)]
        again = answer(session, PROMPT)
        assert list(again.token_ids) == expected.first
        assert again.reused_tokens > 0
        # The buffers are the same: nothing was captured again.
        assert graphs_of(session).counters.captures == 1


def test_a_step_serves_every_chat_and_is_captured_anew_with_other_kernels(checkpoints: Path) -> None:
    expected = reference("qwen3_moe", checkpoints)
    with opened(expected.folder, graphs="on", cache_slots=3) as model, chatting(model) as session:
        for seed in range(2):
            assert list(answer(session, PROMPT).token_ids) == expected.first
            answer(session, random_prompt(40, seed=seed))
        graphs = graphs_of(session)
        captured = [kind for kind in graphs._kinds.values() if kind.step is not None]
        assert graphs.counters.captures == len(captured)  # of one token, and of tokens that were guessed more than once
        recorder = RoutingRecorder(model)
        recorder.begin_sequence()
        before = graphs.counters.replays
        assert list(answer(session, expected.second_prompt).token_ids) == expected.second
        assert graphs.counters.replays > before
        assert recorder._tokens() >= len(expected.second) - 1


def test_what_graphs_hold_is_counted_and_given_back(checkpoints: Path) -> None:
    expected = reference("qwen3_moe", checkpoints)
    with opened(expected.folder, graphs="on", cache_slots=3) as model, chatting(model) as session:
        answer(session, PROMPT)
        step = step_of(graphs_of(session))
        assert step.nbytes > 0
        held = memory_use(model)[0].by_category[MemoryCategory.ACTIVATIONS]
        assert held >= step.nbytes
        session.clear()
        assert memory_use(model)[0].by_category[MemoryCategory.ACTIVATIONS] < held


def test_steps_of_several_tokens_hold_nothing_once_there_is_no_room_for_more(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, prompts = reference("qwen3_moe", checkpoints).folder, [random_prompt(20, seed=seed) for seed in range(3)]
    taken = GraphStep.nbytes.fget
    assert taken is not None
    monkeypatch.setattr(GraphStep, "nbytes", property(lambda step: taken(step) if len(step.logits) < 3 else 2**40))
    with opened(folder, graphs="on", cache_slots=3) as model, chatting(model) as session:
        alone = [answer(session, prompt).token_ids for prompt in prompts]
        session.together(prompts[:2], 8)
        graphs = graphs_of(session)
        of_two, held = step_of(graphs, 2).nbytes, memory_use(model)[0].by_category[MemoryCategory.ACTIVATIONS]
        assert graphs._places is not None
        of_more_rows = graphs._places.nbytes * (MAX_TOKENS - 1) // MAX_TOKENS
        assert session.together(prompts, 8) == alone
        assert memory_use(model)[0].by_category[MemoryCategory.ACTIVATIONS] <= held - of_two - of_more_rows
        before = graphs.counters.replays
        assert answer(session, prompts[0]).token_ids == alone[0]
        assert graphs.counters.replays > before
        assert set(graphs._kinds) == {1}


def test_a_device_without_room_for_graphs_does_without(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference("qwen3_moe", checkpoints)
    monkeypatch.setattr(GraphStep, "nbytes", 2**40)
    with opened(expected.folder, graphs="on", cache_slots=3) as model, chatting(model) as session:
        assert list(answer(session, PROMPT).token_ids) == expected.first
        graphs = graphs_of(session)
        assert graphs.refused is not None
        assert "memory" in graphs.refused


class TestTheStandIn:
    def test_repeats_on_the_same_memory(self) -> None:
        x, state = torch.ones(4), torch.zeros(4)
        factor = 3.0
        capture = RecordedCapture()
        capture.begin()
        y = (x * factor).view(2, 2).t().contiguous()
        state += x
        graph = capture.end()
        factor = 5.0  # what Python knew is part of the graph
        x.fill_(2)
        graph.replay()
        assert y.tolist() == [[6.0, 6.0], [6.0, 6.0]]
        assert state.tolist() == [3.0] * 4
        assert capture.nbytes >= y.nbytes
        capture.close()

    @pytest.mark.parametrize(
        "read",
        [lambda x: x.tolist(), lambda x: x[0].item(), lambda x: bool(x.any()), torch.nonzero, lambda x: x.numpy()],
    )
    def test_reading_back_is_refused(self, read: Any) -> None:
        capture = RecordedCapture()
        capture.begin()
        with pytest.raises(CaptureError):
            read(torch.ones(3))
        capture.abandon()
        assert torch.ones(3).tolist() == [1.0] * 3
