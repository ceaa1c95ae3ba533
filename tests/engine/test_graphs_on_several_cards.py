"""Decode steps over several cards: a graph for each card's layers, copies between them, the same tokens."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.devices.device import Device
from engine.devices.emulated import RecordedGraph, open_emulated
from engine.devices.memory_budget import MemoryCategory
from engine.hardware.profiles import read_profile
from engine.kernels.native.paged_attention import KvType, Piece, StatePages
from engine.runtime.decode.graphs import GraphedSteps
from engine.runtime.decode.step_model import StepModel
from engine.runtime.decode.tabled_attention import TabledAttention
from engine.runtime.decoder_layers import SegmentedCapture, _carriers, _Crossing, _Segments, layer_names, move_between
from engine.runtime.kv import tabled
from engine.runtime.kv.layers import library_cache
from engine.runtime.kv.paged_cache import PagedCaches, parts_of_pages
from tests.engine.cards_apart import CARDS, CardsApart
from tests.engine.graph_cases import check_conversation, graphs_of, step_of
from tests.engine.on_devices import PROMPT, answer, chatting, opened, reference, share_misses
from tests.engine.tiny_families import tiny_model


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    share_misses(monkeypatch)
    yield
    assert _carriers == []


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("mixtral", {}),
        ("qwen3_moe", {"cache_slots": 4}),
        ("gpt_oss", {"cache_slots": 4, "misses": "fetch"}),
        ("deepseek_v3", {}),
        ("qwen3_next", {"cache_slots": 4}),
    ],
    ids=str,
)
def test_conversations_are_those_of_transformers(family: str, config: dict[str, Any], checkpoints: Path) -> None:
    check_conversation(family, checkpoints, devices=2, graphs="on", **config)


@pytest.mark.parametrize("devices", [2, 3])
def test_each_card_has_a_graph_of_its_own_layers(devices: int, checkpoints: Path) -> None:
    expected = reference("qwen3_moe", checkpoints)
    with opened(expected.folder, 1, graphs="on", cache_slots=4) as alone, chatting(alone) as session:
        on_one = answer(session, PROMPT)
        step = step_of(graphs_of(session))
        logits = step.logits.clone()
    with opened(expected.folder, devices, graphs="on", cache_slots=4) as model, chatting(model) as session:
        assert model.devices is not None
        assert list(answer(session, PROMPT).token_ids) == list(on_one.token_ids) == expected.first
        graphs = graphs_of(session)
        step = step_of(graphs)
        assert torch.equal(step.logits, logits)
        parts = [part for piece in step._pieces if isinstance(piece, _Segments) for part in piece.parts]
        crossings = sum(isinstance(part, _Crossing) for part in parts)
        way = [0, *model.devices.layers.of_layer, 0]
        assert crossings == sum(here != there for here, there in pairwise(way)) > 1
        assert sum(isinstance(part, RecordedGraph) for part in parts) == step.pieces + crossings
        assert graphs.counters.replays > 0
        assert graphs.counters.eager == 0


def test_what_a_card_holds_for_graphs_is_counted_there_and_given_back(checkpoints: Path) -> None:
    with opened(reference("qwen3_moe", checkpoints).folder, 2, graphs="on", cache_slots=4) as model:
        cards = model.devices.devices
        with chatting(model) as session:
            answer(session, PROMPT)
            held = [card.memory.use().by_category[MemoryCategory.ACTIVATIONS] for card in cards]
            graphs_of(session).forget()
            left = [card.memory.use().by_category[MemoryCategory.ACTIVATIONS] for card in cards]
            assert all(now < before for now, before in zip(left, held, strict=True))


def test_a_second_card_without_room_for_graphs_does_without(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference("qwen3_moe", checkpoints)
    with opened(expected.folder, 2, graphs="on", cache_slots=3) as model, chatting(model) as session:
        second = model.devices.devices[1]
        answer(session, PROMPT, 1)
        graphs = graphs_of(session)
        graphs.forget()
        free = second.memory.reserve(second.memory.free, MemoryCategory.WEIGHTS)
        assert list(answer(session, PROMPT).token_ids) == expected.first
        assert graphs.refused is not None
        assert "memory" in graphs.refused
        free.release()


class Capture:
    """Says what it was asked for."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said, self.nbytes = name, said, 7

    def __getattr__(self, what: str) -> Any:
        return lambda: self.said.append(f"{what} {self.name}") or self

    def replay(self) -> None:
        self.said.append(f"replay {self.name}")


def test_a_failed_capture_leaves_no_card_capturing() -> None:
    said: list[str] = []
    cards: list[Device] = [open_emulated(read_profile("slow-link"), index) for index in range(2)]
    for name, card in zip("ab", cards, strict=True):
        object.__setattr__(card, "new_capture", lambda name=name: Capture(name, said))
    capture = SegmentedCapture(cards)
    capture.begin()
    x = torch.ones(2)
    (there,) = _carriers[0]([x], 1)
    assert there.tolist() == [1, 1]
    assert there is not x
    capture.abandon()
    assert _carriers == []
    assert said == ["begin a", "end a", "begin b", "abandon a", "abandon b"]
    capture.close()
    assert said[-2:] == ["close b", "close a"]
    for card in cards:
        assert card.memory.use().used == 0
        card.close()


@pytest.mark.parametrize("family", ["qwen3", "llama", "mixtral", "qwen3_next", "deepseek_v4"])
@pytest.mark.parametrize("cards", [2, 3])
def test_no_operator_is_given_tensors_of_two_cards(family: str, cards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabled, "upload", lambda tensor, place: tensor.to(place))  # which would pin it for a card
    kinds = {"layer_types": ["linear_attention", "full_attention"] * 2} if family == "qwen3_next" else {}
    model = tiny_model(family, **({} if family == "deepseek_v4" else {"num_hidden_layers": 4, **kinds}))
    if family in ("mixtral", "qwen3_next", "deepseek_v4"):
        model.set_experts_implementation("batched_mm")  # what else the library has reads numbers back
    prompt, tokens = torch.tensor([[5, 9, 2, 7, 1]]), [4, 8, 3, 6]
    with torch.inference_mode():
        told = model(torch.cat([prompt, torch.tensor([tokens])], dim=1)).logits[0, -len(tokens) :]
    names = layer_names(model)
    of_layer = tuple(layer * cards // names.count for layer in range(names.count))
    places = CARDS[:cards]
    apart = CardsApart()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        apart.put(tensor, places[names.on(of_layer).of(name)])
    with contextlib.ExitStack() as opened:
        devices = [
            replace(opened.enter_context(open_emulated(read_profile("slow-link"), index)), torch_device=place)
            for index, place in enumerate(places)
        ]
        opened.enter_context(torch.inference_mode())
        opened.enter_context(apart)
        move_between(model, names.on(of_layer), places, is_captured=True)
        step = StepModel(model, 64)
        like = library_cache(model)
        step(torch.tensor([[3]]).to(places[0]), like, 0)
        caches = PagedCaches.like(like, KvType.FP32, 4, 4)
        for paged, index in zip(caches.layers, of_layer, strict=True):
            if isinstance(paged, StatePages):  # what is empty is on no card here
                there = (
                    apart.put(part.new_empty(1, *part.shape[1:]), places[index])
                    for part in (paged.recent, paged.states)
                )
                paged.recent, paged.states = there
        caches.resize(3, 0, 4)
        held = [(parts_of_pages(paged) or [paged.states])[0] for paged in caches.layers]  # type: ignore[union-attr]
        assert [part.device for part in held] == [places[index] for index in of_layer]
        pages = [torch.tensor([page], dtype=torch.int32) for page in (2, 0)]
        for state, own in enumerate(pages):
            step(prompt.to(places[0]), caches.of(Piece(own, 0, prompt.shape[1], state, state)), 0)

        def one_by_one(ids: Sequence[int], pieces: Sequence[Piece], positions: Sequence[int]) -> torch.Tensor:
            each = zip(ids, pieces, positions, strict=True)
            return torch.cat([step(torch.tensor([[i]]).to(places[0]), caches.of(p), at)[0] for i, p, at in each])

        first = replace(devices[0], new_capture=lambda: SegmentedCapture(devices))
        attention = TabledAttention(model, {}, 64)
        graphs = GraphedSteps(step, first, caches, 64, attention, one_by_one, takes_rows=family != "qwen3_next")
        for count, (token, expected) in enumerate(zip(tokens, told, strict=True)):
            at = prompt.shape[1] + count
            if count == 2:  # pages get other memory, where a longer context needs that
                caches.resize(4, 0, 4)
            states = [(state + 2 * (count % 2), state + 2 * (1 - count % 2)) for state in range(2)]
            pieces = [Piece(own, at, 1, *moving) for own, moving in zip(pages, states, strict=True)]
            logits = graphs.step([token] * 2, [at] * 2, pieces)
            if family == "deepseek_v4":  # no step repeats what compresses
                logits = one_by_one([token] * 2, pieces, [at] * 2)
            else:
                assert graphs.refused is None, graphs.refused
            assert logits.device == places[0]
            for row in logits:
                torch.testing.assert_close(row, expected, check_device=False)
        captures = 0 if family == "deepseek_v4" else 2
        assert (graphs.counters.captures, graphs.counters.replays) == (captures, 0)
        assert apart.copies
        graphs.forget()
