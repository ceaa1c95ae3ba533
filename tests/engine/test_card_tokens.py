"""Tokens that an emulated card computes by itself: bit by bit those of the CPU, whatever is in its slots."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.shared_experts import replaced_kernels
from engine.common import clock
from engine.common.errors import EngineError
from engine.devices.device import CopyRecord
from engine.experts.card_tokens import CardTokens
from engine.experts.latency import LatencyModel
from engine.experts.path_choice import PathChoice
from engine.kernels.native.build import library_path
from engine.kernels.native.paged_attention import KvType, Piece, Pieces
from engine.runtime.decode.step_model import StepModel
from engine.runtime.kv.layers import library_cache
from engine.runtime.kv.paged_cache import PagedCaches
from engine.runtime.loaded_model import LoadedModel
from engine.telemetry import lanes
from engine.telemetry.recorder import RECORDER
from tests.engine.on_devices import answer, chatting, opened
from tests.engine.single_streams import PagedSequence
from tests.engine.tiny_families import tiny_checkpoint

pytestmark = pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")

FAMILIES = ["mixtral", "qwen3_moe", "olmoe", "qwen2_moe", "gpt_oss", "deepseek_v2", "deepseek_v3"]
_LARGER: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "num_key_value_heads": 4}
"""Enough for weights to be quantised."""
_LATENT = {"head_dim": 32, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 72, "kv_lora_rank": 136}
TOKENS, PASSES = 40, 20
_PROMPT = torch.arange(5, 12)[None]


@contextmanager
def on_card(folder: Path, **config: Any) -> Iterator[tuple[LoadedModel, CardTokens]]:
    """A model on an emulated card that computes its tokens by itself."""
    options = {"precision": "bf16", "misses": "cpu", "cache_slots": 4, **config}
    with opened(folder, vram_bytes=2**26, **options) as model:
        assert model.devices is not None, model.info.device_note
        tokens = model.devices.experts.tokens
        assert tokens is not None
        yield model, tokens


@dataclass(frozen=True)
class OnCpu:
    """What the CPU alone makes of some tokens after a prompt.

    Attributes:
        prompted: the sequence after the prompt.
        logits: [n, V] after each token, one at a time.
    """

    folder: Path
    prompted: PagedSequence
    logits: torch.Tensor

    @classmethod
    def of(cls, folder: Path, count: int = TOKENS, precision: Any = "bf16") -> "OnCpu":
        with opened(folder, 0, precision=precision) as model, torch.inference_mode():
            prompted = PagedSequence(model.model)
            StepModel(model.model, model.context_tokens)(_PROMPT, prompted.next(_PROMPT.shape[1]), 0)
            made = cls(folder, prompted, torch.empty(0))
            return replace(made, logits=made.logits_of(model, count))

    @torch.inference_mode()
    def logits_of(self, model: LoadedModel, count: int = TOKENS) -> torch.Tensor:
        """The same of a model, after the CPU's prompt: prompts are not computed bit by bit alike everywhere."""
        vocabulary = model.model.config.vocab_size
        tokens = torch.randint(3, vocabulary, (count,), generator=torch.Generator().manual_seed(3))
        step, each = StepModel(model.model, model.context_tokens), PagedSequence(model.model, read=self.prompted.read)
        each.become(self.prompted)
        native = step.rows_of(1)
        assert native is not None
        return torch.cat([each.rows(native, token[None]) for token in tokens])


@pytest.mark.takes_turns(3)
@pytest.mark.parametrize("precision", ["bf16", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_cpu_bit_by_bit(family: str, precision: str, tmp_path: Path) -> None:
    larger = {**_LARGER, **(_LATENT if family.startswith("deepseek") else {})}
    folder = tiny_checkpoint(family, tmp_path, **({} if precision == "bf16" else larger))
    cpu = OnCpu.of(folder, precision=precision)
    # Where copies take long, policies that count know the best experts before the first slot is filled, and evict none.
    with on_card(folder, precision=precision, cache_policy="lru") as (model, tokens):
        counters, passes = model.caches[0].counters, 0
        while passes < PASSES and not min(counters.hits, counters.misses, counters.post_fetches, counters.evictions):
            assert torch.equal(cpu.logits_of(model), cpu.logits)
            model.caches[0].wait()
            passes += 1
        layers = len(tokens._layers)
        assert counters.lookups == counters.hits + counters.misses
        assert counters.lookups == passes * TOKENS * layers * model.info.experts_per_token
        assert counters.misses == counters.on_cpu
        assert counters.post_fetched_bytes == counters.post_fetches * model.caches[0].layout.nbytes
        assert counters.fetched_bytes == 0
        assert min(counters.hits, counters.misses, counters.post_fetches, counters.evictions) > 0


@torch.inference_mode()
def rows_of(model: LoadedModel, rows: int = 3, steps: int = 4) -> torch.Tensor:
    """Logits after each token of a few sequences that are computed together, and of guesses of one of them."""
    step, like = StepModel(model.model, model.context_tokens, has_card=True), library_cache(model.model)
    step(torch.tensor([[3]]), like, 0)
    caches = PagedCaches.like(like, KvType.BF16, rows, 0)
    assert caches is not None
    pages = [torch.tensor([row], dtype=torch.int32) for row in range(rows)]
    ids = torch.randint(3, model.model.config.vocab_size, (steps + 1, rows), generator=torch.Generator().manual_seed(5))
    found = list[torch.Tensor]()
    for at in range(steps + 1):
        pieces = [Piece(own, at, 1) for own in pages] if at < steps else [Piece(pages[1], at, rows)]
        positions = [at] * rows if at < steps else list(range(at, at + rows))
        together = step.rows_of(rows)
        found.append(together.rows(ids[at].tolist(), positions, caches.structs, Pieces(pieces)))
    return torch.cat(found)


@pytest.mark.takes_turns(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_the_cpu_bit_by_bit(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path, **(_LATENT if family.startswith("deepseek") else {}))
    with opened(folder, 0, precision="bf16") as model:
        wanted = rows_of(model)
    for slots in (0, 5):
        with on_card(folder, cache_slots=slots) as (model, tokens):
            assert torch.equal(rows_of(model), wanted)
            records = tokens.records()
            assert (records["rows"] == 3).all()
            counters, layers = model.caches[0].counters, len(tokens._layers)
            assert counters.lookups == counters.hits + counters.misses == 16 * layers * model.info.experts_per_token
            assert slots == 0 or counters.post_fetches > 0


def test_several_at_once_and_guesses_go_the_card_s_way(tmp_path: Path) -> None:
    prompts = [[5, 6, 7, 8] * 4, [9, 3, 4], [11, 12, 11, 12, 11]]
    with on_card(tiny_checkpoint("qwen3_moe", tmp_path)) as (model, tokens), chatting(model) as session:
        rows, real = list[int](), tokens._exchange.records
        tokens._exchange.records = lambda: (rows.append(int(real()["rows"][0])), real())[1]  # type: ignore[method-assign,func-returns-value]
        alone = [answer(session, prompt, 8).token_ids for prompt in prompts]
        assert session.together(prompts, 8) == alone
        assert max(rows) >= len(prompts)


def test_tokens_go_the_way_that_is_chosen(tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    cpu = OnCpu.of(folder)
    with on_card(folder) as (model, tokens):
        latency = LatencyModel("bf16", 10**4, 1e-4, 0.0, 1e-5, 1, 0.0, 0.0, 10**8)
        choice = tokens.choice = PathChoice(latency, len(tokens._layers), model.info.experts_per_token, 0.5)
        counters = model.caches[0].counters
        for by_itself in (True, False, True):
            choice._choice.take = lambda *_, way=by_itself, **__: way  # type: ignore[method-assign]
            choice.by_itself, choice._choice.present = by_itself, by_itself
            choice._new.clear()
            number, lookups = tokens._exchange.records()["token"].max(), counters.lookups
            logits = cpu.logits_of(model)
            assert choice.by_itself == by_itself
            assert counters.lookups - lookups == TOKENS * len(tokens._layers) * model.info.experts_per_token
            assert (tokens._exchange.records()["token"].max() > number) == by_itself
            if by_itself:
                assert torch.equal(logits, cpu.logits)
            else:
                assert torch.cosine_similarity(logits.float(), cpu.logits.float()).min().item() > 0.995


@pytest.mark.parametrize("policy", ["lru", "lfu", "auto"])
@pytest.mark.parametrize(("slots", "ways"), [(0, None), (1, None), (6, 2), (1000, None)])
def test_whatever_is_in_the_slots(policy: str, slots: int, ways: int | None, tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    cpu = OnCpu.of(folder)
    with on_card(folder, cache_slots=slots, cache_ways=ways, cache_policy=policy) as (model, _):
        assert torch.equal(cpu.logits_of(model), cpu.logits)
        assert torch.equal(cpu.logits_of(model), cpu.logits)


def test_prompts_and_tokens_take_turns(tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    with on_card(folder, speculation="off") as (model, tokens), chatting(model) as session:
        first = answer(session, list(range(5, 60)), 20).token_ids
        number = int(tokens._exchange.records()["token"].max())
        assert number >= 19
        again = answer(session, [*range(5, 60), *first, 7, 8], 20).token_ids
        assert int(tokens._exchange.records()["token"].max()) > number
        session.clear()
        assert answer(session, list(range(5, 60)), 20).token_ids == first
        assert len(again) == 20


def test_slots_that_come_and_go_meanwhile(tmp_path: Path) -> None:
    """Other programs want memory, and give it back, while tokens run."""
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    cpu = OnCpu.of(folder, 150)
    with on_card(folder, cache_slots=1000) as (model, _):
        cache, ends = model.caches[0], threading.Event()
        most, sizes = cache.slots, [0]

        def resize() -> None:
            while not ends.wait(0.0005):
                sizes.extend(cache.resize(slots) for slots in (most // 3, most, 0, most // 2))

        other = threading.Thread(target=resize)
        other.start()
        try:
            assert torch.equal(cpu.logits_of(model, 150), cpu.logits)
        finally:
            ends.set()
            other.join()
        assert len(set(sizes)) > 2


def test_a_cancelled_token_fails_and_the_next_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    cpu = OnCpu.of(folder, 5)
    with on_card(folder, cache_slots=0) as (model, tokens):
        start = tokens._exchange.start

        def cancelled() -> int:
            number = start()
            tokens._exchange.cancel()
            return number

        monkeypatch.setattr(tokens._exchange, "start", cancelled)
        with pytest.raises(EngineError, match="cancelled"):
            cpu.logits_of(model, 1)
        monkeypatch.undo()
        assert torch.equal(cpu.logits_of(model, 5), cpu.logits)


def test_a_token_that_fails_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    cpu = OnCpu.of(folder, 5)
    with on_card(folder) as (model, tokens):
        with pytest.raises(RuntimeError, match="half way"), tokens.token():
            raise RuntimeError("half way")
        assert not tokens.is_open
        assert torch.equal(cpu.logits_of(model, 5), cpu.logits)


@pytest.mark.parametrize("device", ["emulated:slow-link", "emulated:link8-4gb"])
def test_a_timeline_shows_both_sides(device: str, tmp_path: Path) -> None:
    """Every expert once, and every byte."""
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    cpu = OnCpu.of(folder, 10)
    with on_card(folder, device=device) as (model, tokens):
        cpu.logits_of(model, 10)
        model.caches[0].wait()
        before, copied = copy(model.caches[0].counters), list[CopyRecord]()
        stop = tokens._layers[0].device.copy_log.listen(copied.append)
        begun_ns = clock.now_ns()
        RECORDER.start()
        try:
            cpu.logits_of(model, 10)
            spans = RECORDER.take_spans()
        finally:
            RECORDER.stop()
        model.caches[0].wait()
        stop()
        after = model.caches[0].counters
        experts = spans[spans["name"] == lanes.EXPERTS]
        counts = {lane: int(experts["count"][experts["lane"] == lane].sum()) for lane in (lanes.GPU, lanes.CPU_EXPERTS)}
        assert counts == {lanes.GPU: after.hits - before.hits, lanes.CPU_EXPERTS: after.misses - before.misses}
        assert min(counts.values()) > 0
        assert (spans["end_ns"] >= spans["start_ns"]).all()
        assert begun_ns <= experts["start_ns"].min() < experts["end_ns"].max() <= clock.now_ns()
        into_slots = sum(each.nbytes for each in copied if each.nbytes == model.caches[0].layout.nbytes)
        assert into_slots == after.post_fetched_bytes - before.post_fetched_bytes


@pytest.mark.parametrize(("host", "slots"), [("", 4), ("?host=fixed", 0)])
def test_on_a_card_whose_time_is_modelled(host: str, slots: int, tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    cpu, took = OnCpu.of(folder), []
    for _ in range(2):
        with on_card(folder, device=f"emulated:link8-4gb{host}", cache_slots=slots) as (model, _):
            begun_s = clock.now()
            assert torch.equal(cpu.logits_of(model), cpu.logits)
            took.append(clock.now() - begun_s)
            counters = model.caches[0].counters
            assert (counters.hits > 0) == (slots > 0)
            assert counters.misses == counters.on_cpu
    launches = TOKENS * len(cpu.prompted.caches.layers)
    assert min(took) > launches * 4e-6  # of the kernels of a layer, by the card's profile
    assert not host or took[0] == pytest.approx(took[1])


def test_experts_that_others_compute_meanwhile(tmp_path: Path) -> None:
    """As benches do, to see what a step takes without them."""
    folder = tiny_checkpoint("qwen3_moe", tmp_path)
    cpu = OnCpu.of(folder, 3)
    with on_card(folder) as (model, _):
        with replaced_kernels(model.model, lambda _experts: lambda hidden, _index, _weights: torch.zeros_like(hidden)):
            assert not torch.equal(cpu.logits_of(model, 3), cpu.logits)
            assert model.caches[0].counters.lookups == 0
        assert torch.equal(cpu.logits_of(model, 3), cpu.logits)
