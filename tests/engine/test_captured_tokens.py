"""Tokens that a real card runs as one graph, with experts of the CPU: its kernels are C++ here, all else is real."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.common.errors import EngineError, ErrorCode
from engine.experts.card_tokens import CardTokens
from engine.experts.latency import LatencyModel
from engine.experts.path_choice import PathChoice
from engine.kernels.gpu.experts import CardExperts
from engine.kernels.interface import ExpertMath, LayerRecords
from engine.kernels.native.build import library_path
from engine.kernels.native.exchange import OverdueError
from engine.kernels.native.paged_attention import KvType, Piece
from engine.kernels.torch_experts import TorchExperts
from engine.runtime.decode.graphs import GraphedSteps
from engine.runtime.decode.step_model import StepModel
from engine.runtime.decode.tabled_attention import TabledAttention
from engine.runtime.kv.layers import library_cache
from engine.runtime.kv.paged_cache import PagedCaches, keeps_latents
from engine.runtime.load import binding
from engine.runtime.load import model as loading
from engine.runtime.load.forms import Forms
from engine.runtime.loaded_model import LoadedModel
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER
from tests.engine.emulated_cuda_card import EmulatedCudaCard, emulated_kernels, needs_compiler
from tests.engine.graph_cases import graphs_of, step_of
from tests.engine.on_devices import answer, chatting, opened, share_misses
from tests.engine.single_streams import PagedSequence
from tests.engine.tiny_families import tiny_checkpoint

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here"),
]

KERNELS = emulated_kernels(1)
_LARGER: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "num_key_value_heads": 4}
"""Enough for weights to be quantised."""
_PROMPT = torch.arange(5, 12)[None]
_SHORT = [7, 9, 11, 13]
TOKENS = 6


def model_latency() -> LatencyModel:
    """Of experts that both ways are as good for."""
    return LatencyModel("bf16", 10**4, 1e-4, 0.0, 1e-5, 1, 0.0, 0.0, 10**8)


def _on_card(module: Any, *_: object) -> Any:
    def make(records: LayerRecords) -> CardExperts:
        math = ExpertMath.of(module)
        return CardExperts(records, math, KERNELS, many_tokens=TorchExperts(records, math, None))

    return make


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> EmulatedCudaCard:
    """The emulated device is taken for a real card: what is in its slots is computed by kernels in CUDA C, and its
    steps are captured, for which dense layers must be PyTorch's operators."""
    found = EmulatedCudaCard(1)
    share_misses(monkeypatch)
    monkeypatch.setattr(binding, "nvidia_card", lambda place: found)
    monkeypatch.setattr(binding, "_maker", _on_card)
    monkeypatch.setattr(loading, "bind_dense", lambda *_: None)
    monkeypatch.setattr(Forms, "linears", {})
    monkeypatch.setattr(loading, "_graph_device", lambda _plan, parts: parts.devices.devices[0])
    return found


@contextmanager
def captured(folder: Path, **config: Any) -> Iterator[tuple[LoadedModel, CardTokens]]:
    """A model whose tokens are captured steps."""
    options = {"precision": "bf16", "misses": "cpu", "cache_slots": 6, "graphs": "on", **config}
    with opened(folder, vram_bytes=2**26, **options) as model:
        assert model.devices is not None, model.info.device_note
        tokens = model.devices.experts.tokens
        assert tokens is not None, model.devices.experts.notes
        assert tokens.is_captured
        yield model, tokens


class Steps:
    """A sequence by captured steps, and beside it by the dispatcher."""

    def __init__(self, model: LoadedModel, tokens: CardTokens | None) -> None:
        assert model.devices is not None
        step = self._step = StepModel(model.model, model.context_tokens)
        self._beside, self.held, like = PagedSequence(model.model), _PROMPT.shape[1], library_cache(model.model)
        for cache in (self._beside.next(self.held), like):
            step(_PROMPT, cache, 0)
        kv_type = next(each for each in KvType if each.dtype == model.model.dtype)
        caches = PagedCaches.like(like, kv_type, 2, 0)
        self._pages = torch.tensor([1, 0], dtype=torch.int32)
        step(_PROMPT, caches.of(Piece(self._pages, 0, self.held)), 0)

        def one_by_one(ids: Sequence[int], pieces: Sequence[Piece], positions: Sequence[int]) -> torch.Tensor:
            (piece,), (begin,) = pieces, positions
            each = [(Piece(piece.pages, piece.held + at, 1), begin + at) for at in range(piece.tokens)]
            return torch.cat(
                [
                    step(torch.tensor([[own]]), caches.of(at), place)[0]
                    for own, (at, place) in zip(ids, each, strict=True)
                ]
            )

        attention = TabledAttention(model.model, {}, model.context_tokens)
        device = model.devices.devices[0]
        self.graphs = GraphedSteps(step, device, caches, 64, attention, one_by_one, takes_rows=True, tokens=tokens)
        self._vocabulary, self._drawn = model.model.config.vocab_size, torch.Generator().manual_seed(3)

    def go_on(self, count: int, rows: int = 1) -> None:
        for _ in range(count):
            tokens = torch.randint(3, self._vocabulary, (1, rows), generator=self._drawn)
            positions = list(range(self.held, self.held + rows))
            logits = self.graphs.step(tokens[0].tolist(), positions, [Piece(self._pages, self.held, rows)])
            assert logits is not None, self.graphs.refused
            each = [self._step(tokens[:, at : at + 1], self._beside.next(1), self.held + at)[0] for at in range(rows)]
            assert torch.cosine_similarity(logits.float(), torch.cat(each).float()).min().item() > 0.995
            self.held += rows


_FAMILIES = [("olmoe", "bf16"), ("gpt_oss", "lut4"), ("deepseek_v3", "bf16"), ("qwen2_moe", "int8")]
"""Beyond those that are always tried."""


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("qwen3_moe", "bf16"),
        ("mixtral", "int4"),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in _FAMILIES),
    ],
)
def test_tokens_are_those_of_the_dispatcher(
    family: str, precision: str, card: EmulatedCudaCard, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(family, tmp_path, **({} if precision == "bf16" else _LARGER))
    with captured(folder, precision=precision) as (model, tokens):
        steps = Steps(model, tokens)
        steps.go_on(TOKENS)
        counters = steps.graphs.counters
        # Without a kernel for them, latents are tried in their pages first and then gathered, a token at a time.
        gathers = int(keeps_latents(model.model))
        warm_ups = 1 + gathers
        assert (counters.warm_ups, counters.captures) == (warm_ups, 1)
        assert (counters.replays, counters.eager) == (TOKENS - warm_ups - 1, 0)
        assert step_of(steps.graphs).pieces == 1
        of_cache = model.caches[0].counters
        assert min(of_cache.hits, of_cache.misses, of_cache.post_fetches) > 0
        launched = [kernel.defines[0][1] for kernel, _ in card.launched if kernel.source == "exchange.cu"]
        # In two trials launch by launch and captured, and captured again: repetitions launch nothing of their own.
        layers = len(tokens._layers)
        assert launched == [*["begin", *["post", "join"] * layers, "finish"] * 5]
        assert (steps.graphs.most == 1) == bool(gathers)
        if not gathers:
            steps.go_on(TOKENS, rows=3)
            assert (counters.warm_ups, counters.captures, counters.replays, counters.eager) == (2, 2, 2 * TOKENS - 4, 0)
            assert step_of(steps.graphs, 3).pieces == 1
            assert (tokens.records()["rows"] == 3).all()
        steps.graphs.forget()


@torch.inference_mode()
@pytest.mark.parametrize(
    ("slots", "ways"),
    [
        (0, None),
        pytest.param(6, 2, marks=pytest.mark.exhaustive),
        pytest.param(1000, None, marks=pytest.mark.exhaustive),
    ],
)
def test_whatever_is_in_the_slots(slots: int, ways: int | None, card: EmulatedCudaCard, tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    with captured(folder, cache_slots=slots, cache_ways=ways) as (model, tokens):
        steps = Steps(model, tokens)
        steps.go_on(TOKENS)
        assert steps.graphs.counters.replays == TOKENS - 2
        steps.graphs.forget()


@torch.inference_mode()
def test_tokens_go_the_way_that_is_chosen(card: EmulatedCudaCard, tmp_path: Path) -> None:
    """Steps of both ways come out alike, and none is repeated in the other way."""
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    with captured(folder) as (model, tokens):
        choice = tokens.choice = PathChoice(model_latency(), len(tokens._layers), model.info.experts_per_token, 0.5)
        steps, counters = Steps(model, tokens), model.caches[0].counters
        steps.go_on(3)
        for turn, by_itself in enumerate((False, True, False), 1):
            choice.by_itself, before = by_itself, counters.misses
            choice._new.clear()
            number = int(tokens.records()["token"].max())
            steps.go_on(3)
            assert steps.graphs.counters.captures == 1 + turn
            assert (step_of(steps.graphs).pieces == 1) == by_itself
            assert (int(tokens.records()["token"].max()) > number) == by_itself
            assert len(choice._new) == 3
            assert counters.misses > before
        steps.graphs.forget()


@torch.inference_mode()
def test_a_step_is_captured_anew_when_slots_come_or_go(card: EmulatedCudaCard, tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    with captured(folder, cache_slots=1000) as (model, tokens):
        cache, steps = model.caches[0], Steps(model, tokens)
        most = cache.slots
        for captures, slots in enumerate((most, most // 2, 0, most), 1):
            cache.resize(slots)
            steps.go_on(2 + (captures == 1))
            assert steps.graphs.counters.captures == captures
        steps.graphs.forget()


def test_conversations(card: EmulatedCudaCard, tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    with captured(folder) as (model, tokens), chatting(model) as session:
        first = answer(session, _SHORT, 6).token_ids
        graphs = graphs_of(session)
        assert graphs.refused is None
        assert graphs.counters.replays > 0
        number = int(tokens.records()["token"].max())
        answer(session, [*_SHORT, *first, 7, 8], 6)
        assert int(tokens.records()["token"].max()) >= number + 5
        session.clear()
        assert answer(session, _SHORT, 6).token_ids == first


@torch.inference_mode()
@pytest.mark.parametrize("late", [1, 2])
def test_a_late_answer_is_asked_for_once_more_and_then_the_dispatcher_goes_on(
    late: int, card: EmulatedCudaCard, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    with captured(folder, cache_slots=0) as (model, tokens):
        steps = Steps(model, tokens)
        steps.go_on(3)
        wait, left = tokens._exchange.wait, [None] * late

        def wait_for_late(timeout_s: float) -> bool:
            is_over = wait(timeout_s)
            if is_over and left:
                left.pop()
                raise OverdueError(ErrorCode.INTERNAL, "late")
            return is_over

        monkeypatch.setattr(tokens._exchange, "wait", wait_for_late)
        with caplog.at_level("WARNING"):
            steps.go_on(4)
        assert tokens.can_run_more == (late == 1)
        assert sum("by itself" in message for message in caplog.messages) == late - 1
        assert step_of(steps.graphs).pieces == (1 if late == 1 else len(tokens._layers) + 1)
        steps.graphs.forget()


@torch.inference_mode()
def test_a_step_that_fails_half_way_leaves_nothing_behind(card: EmulatedCudaCard, tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    with captured(folder) as (model, tokens):
        steps = Steps(model, tokens)
        steps.go_on(3)
        with pytest.raises(RuntimeError, match="half way"), tokens.token():
            raise RuntimeError("half way")
        assert not tokens.is_open
        steps.go_on(3)
        steps.graphs.forget()


@torch.inference_mode()
def test_a_card_that_is_lost_is_asked_nothing_more(
    card: EmulatedCudaCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    with captured(folder) as (model, tokens):
        steps = Steps(model, tokens)
        steps.go_on(3)
        assert tokens._card is not None

        def lost(*_: object) -> None:
            raise EngineError(ErrorCode.DEVICE_UNAVAILABLE, "The card has fallen off the bus.")

        monkeypatch.setattr(step_of(steps.graphs), "replay", lost)
        monkeypatch.setattr(tokens._card, "begin", lost)
        with pytest.raises(EngineError, match="bus"):
            steps.go_on(1)
        assert not tokens.can_run_more
        steps.graphs.forget()


@pytest.mark.parametrize("fault", ["wrong", "refused"])
def test_what_fails_its_trial_is_left_to_the_dispatcher(
    fault: str, card: EmulatedCudaCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = card.launch
    if fault == "refused":

        def refuse(_memory: torch.Tensor) -> int:
            raise RuntimeError("The driver could not map the host's memory: not supported")

        monkeypatch.setattr(card, "address_of", refuse)
    else:

        def spoil(kernel: Any, grid: Any, arguments: Any) -> None:
            if kernel.source == "exchange.cu" and kernel.defines[0][1] == "join":
                arguments.count -= 1
            launch(kernel, grid, arguments)

        monkeypatch.setattr(card, "launch", spoil)
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    options = {"precision": "bf16", "misses": "cpu", "cache_slots": 6, "graphs": "on"}
    with opened(folder, vram_bytes=2**26, **options) as model, chatting(model) as session:
        assert model.devices.experts.tokens is None
        assert "cannot run tokens by itself" in " ".join(model.devices.experts.notes)
        assert len(answer(session, _SHORT, 3).token_ids) == 3


def test_a_timeline_has_one_clock(card: EmulatedCudaCard, tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    with captured(folder) as (model, tokens), torch.inference_mode():
        steps = Steps(model, tokens)
        steps.go_on(3)
        RECORDER.start()
        try:
            steps.go_on(5)
            spans = RECORDER.take_spans()
        finally:
            RECORDER.stop()
        steps.graphs.forget()
        assert {lanes.GPU, lanes.CPU_EXPERTS} <= set(spans["lane"].tolist())
        assert (spans["end_ns"] >= spans["start_ns"]).all()
        records = tokens.records()
        asked = records[records["answered_ns"] > 0]
        assert (asked["posted_ns"] <= asked["taken_ns"]).all()
        assert (asked["answered_ns"] <= asked["joined_ns"]).all()
