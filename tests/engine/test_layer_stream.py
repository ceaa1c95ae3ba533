"""Layers that come from disk for each pass: the same answers bit by bit, in no more RAM than planned."""

import ctypes
import mmap
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.checkpoint.headers import TensorEntry
from engine.common import footprint
from engine.common.config import SamplingParams
from engine.common.errors import EngineError, ErrorCode, RequestCancelled
from engine.experts.file_image import HUGE
from engine.experts.whole_layer import LayerStream
from engine.hardware.surroundings import _in_use
from engine.kernels.native.library import usable_isas
from engine.planner.placement import NotEnoughRamError
from engine.runtime.batch.packed_sweep import PackedModel
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.decode.step_model import StepModel
from engine.runtime.decoder_layers import decoder_layers
from engine.runtime.load.plan import Plan
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.request import BatchRequest
from tests.combinations import some
from tests.engine.loaded_tiny import NO_END, library_tokens, open_model, random_prompt
from tests.engine.single_streams import Alone, answers_of, rows_of
from tests.engine.test_planned_memory import stored_model
from tests.engine.tiny_families import tiny_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is in memory is asked of Linux")

PAGE, KIB = 4096, 2**10
LAYERS = 8
PROMPT = random_prompt(40)
POLICY = BatchPolicy(rows=4, kv_bytes=2**22, sweep_tokens=60, micro_batch_tokens=45)


# --- a file ---------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "layers"
    path.write_bytes(random.Random(3).randbytes(LAYERS * 300_000 + 1234))
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
    return path


def layers_of(file: Path, chosen: tuple[int, ...] = tuple(range(LAYERS))) -> dict[int, list[TensorEntry]]:
    """Each of two tensors, with what is no layer's between them."""
    return {
        layer: [
            TensorEntry(file, f"{layer}.{part}", "U8", (90_001,), layer * 300_000 + part * 170_000 + 7, 90_001)
            for part in (0, 1)
        ]
        for layer in chosen
    }


@pytest.fixture
def stream(file: Path) -> Iterator[LayerStream]:
    before = _in_use[0]
    made = LayerStream(layers_of(file), 2 * 180_002)
    assert _in_use[0] == before + made.window
    yield made
    made.close()
    assert _in_use[0] == before


def through(stream: LayerStream, first: int) -> None:
    for layer in range(first, LAYERS):
        stream.enter(layer)


def in_memory(stream: LayerStream) -> int:
    """Bytes of the mapped files that are, by the system's word."""
    mincore, total = ctypes.CDLL(None).mincore, 0
    for opened in stream._files.values():
        pages = (ctypes.c_ubyte * -(-opened.nbytes // PAGE))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(opened.memory))
        assert not mincore(ctypes.c_void_p(address), ctypes.c_size_t(opened.nbytes), pages)
        total += PAGE * sum(page & 1 for page in pages)
    return total


def mapped(file: Path) -> int:
    """Bytes of its pages that this process has in use."""
    (part,) = re.findall(rf"{file}\n.*?\nRss: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.DOTALL)
    return int(part) * KIB


def test_each_layer_is_what_the_file_has(stream: LayerStream, file: Path) -> None:
    content = file.read_bytes()
    for layer, entries in layers_of(file).items():
        stream.enter(layer)
        for entry in entries:
            found = stream.view(entry)
            assert bytes(found.numpy()) == content[entry.offset : entry.offset + entry.nbytes]
    assert stream.view(TensorEntry(file, "other", "U8", (5,), 3, 5)) is None


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.lists(st.integers(0, LAYERS + 1), max_size=20), start=st.integers(0, LAYERS))
def test_whatever_the_order_no_more_is_there_than_two_layers(file: Path, order: list[int], start: int) -> None:
    stream = LayerStream(layers_of(file), 2 * 180_002)
    content = file.read_bytes()
    try:
        for layer in [*range(start), *order]:
            stream.enter(layer)  # those beyond the last are held, and need nothing
            assert len(stream._coming) <= 2
            for entry in layers_of(file).get(layer, ()):
                found = stream.view(entry)
                assert bytes(found[:9].numpy()) == content[entry.offset : entry.offset + 9]
    finally:
        stream.close()


def test_a_layer_that_follows_is_read_meanwhile(stream: LayerStream) -> None:
    for entered, there in ((0, [0, 1]), (LAYERS + 3, [1, 2]), (LAYERS - 1, [LAYERS - 1, 0])):
        stream.enter(entered)  # the second is held: the first one may go, for the third
        assert list(stream._coming) == there
        assert not wait(stream._coming.values(), 20).not_done


def test_a_file_that_becomes_shorter_ends_the_request_and_not_the_process(stream: LayerStream, file: Path) -> None:
    content = file.read_bytes()
    stream.enter(0)
    os.truncate(file, 3 * 300_000)
    with pytest.raises(EngineError, match="cut short, or has become shorter") as caught:
        through(stream, 0)
    assert caught.value.code is ErrorCode.CHECKPOINT_DAMAGED
    assert str(file) in caught.value.message
    file.write_bytes(content)  # which keeps the file that is mapped
    stream.enter(5)
    found = stream.view(layers_of(file)[5][0])
    assert bytes(found[:9].numpy()) == content[1_500_007:1_500_016]


def test_a_disk_that_fails_is_told(stream: LayerStream, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream.enter(0)

    def fails(_begin: int, _nbytes: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(stream._files[file], "bring", fails)
        with pytest.raises(EngineError, match=r"Input/output error\): check the disk"):
            through(stream, 1)
    through(stream, 0)  # it is back


def test_waiting_can_be_cancelled(stream: LayerStream, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(stream, "_read", lambda _layer: goes_on.wait(20))
    try:
        with stream.until(lambda: True), pytest.raises(RequestCancelled):
            stream.enter(2)
    finally:
        goes_on.set()


# --- a model --------------------------------------------------------------------------------------


def of_blocks(family: str, folder: Path) -> Path:
    return stored_model(folder, family, layers=LAYERS)


def of_numbers(family: str, folder: Path) -> Path:
    return tiny_checkpoint(family, folder / family, dtype=torch.bfloat16, num_hidden_layers=LAYERS)


@pytest.fixture(autouse=True)
def small_layers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "LARGE_LAYER_BYTES", 4 * KIB)


def load(path: Path, ram: int | None = None, **more: Any) -> LoadedModel:
    return open_model(path, ram_bytes=ram, context_tokens=256, **{"precision": "auto", **more})


def least(path: Path, **more: Any) -> int:
    with pytest.raises(NotEnoughRamError) as caught:
        load(path, 1, **more)
    return caught.value.needed


def answers(loaded: LoadedModel) -> tuple[torch.Tensor, list[int], list[list[int]]]:
    """Logits, greedy tokens, and those of rows of a file."""
    with torch.inference_mode():
        logits = loaded.model(input_ids=torch.tensor([PROMPT, PROMPT[::-1]])).logits
    rows = answers_of(loaded, rows_of((1, 40, 33, 70, 12), 4), POLICY)
    return logits, library_tokens(loaded.model, PROMPT, 16), [list(rows[row]) for row in range(len(rows))]


def listened(loaded: LoadedModel) -> LoadedModel:
    """With a listener at each layer, so that it takes the way that streamed layers take."""
    for layer in decoder_layers(loaded.model):
        layer.register_forward_pre_hook(lambda *_: None)
    return loaded


MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "dense blocks": (partial(of_blocks, "llama"), "auto"),
    "experts in blocks": (partial(of_blocks, "qwen3_moe"), "auto"),
    "bf16": (partial(of_numbers, "llama"), "bf16"),
    "bf16 of latent attention": (partial(of_numbers, "deepseek_v3"), "bf16"),
    "bf16 with experts": (partial(of_numbers, "mixtral"), "bf16"),
}


@pytest.mark.takes_turns(2)
@pytest.mark.skipif(not usable_isas(), reason="no native kernels here")
@pytest.mark.parametrize("name", some(MODELS, every=4))
def test_answers_are_those_of_layers_in_memory(
    name: str, tmp_path: Path, planned: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, precision = MODELS[name]
    path = make(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(footprint, "LARGE_LAYER_BYTES", 2**40)
        most = least(path, precision=precision)
        held = listened(load(path, most, precision=precision))
    try:
        assert held.stream is None
        wanted = answers(held)
    finally:
        held.close()
    fewest = least(path, precision=precision)
    for ram in (fewest, (fewest + most) // 2):
        with closing(load(path, ram, precision=precision)) as apart:
            placed = planned[-1].placement
            if ram == fewest:
                assert len(placed.streamed.layers) == LAYERS
            assert apart.stream is not None
            logits, tokens, rows = answers(apart)
            assert torch.equal(logits, wanted[0])
            assert (tokens, rows) == wanted[1:]
            assert apart.stream.bytes_read > 10 * placed.streamed.nbytes
            assert apart.stream.nbytes == placed.streamed.nbytes
            assert "read from disk for each token" in apart.info.device_note
            assert apart.info.weights_bytes <= 1.1 * placed.ram.dense + 8 * KIB
        assert apart.stream is None


def test_a_search_ends_while_it_waits_for_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = of_numbers("llama", tmp_path)
    with closing(load(path, least(path, precision="bf16"), precision="bf16")) as loaded:
        stream, entered, told = loaded.stream, list[int](), list[int]()
        enter, is_unwanted = stream.enter, lambda: len(told) > 1 and len(entered) - told[1] > 1

        def awaited(layer: int) -> None:
            entered.append(layer)
            assert len(entered) < 500
            if stream._cancelled():
                raise RequestCancelled
            enter(layer)

        monkeypatch.setattr(stream, "enter", awaited)
        sampling = SamplingParams(max_tokens=8, beams=2)
        asked = BatchRequest(0, ids=tuple(PROMPT), sampling=sampling, end_ids=NO_END, cancelled=is_unwanted)
        alone = Alone(loaded)
        ended = alone.answer(replace(asked, on_text=lambda _text, _count: told.append(len(entered))))
        assert ended.finish_reason == "cancelled"
        assert alone.generate_from_ids(PROMPT, SamplingParams(max_tokens=2), end_ids=NO_END).generated_tokens == 2
        alone.clear()


def test_what_is_held_of_a_file_is_what_was_planned(tmp_path: Path, planned: list[Plan]) -> None:
    """Of a model large enough for the pages that the system reads at once not to matter much."""
    wide = {"hidden_size": 768, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 8}
    path = tiny_checkpoint("llama", tmp_path / "wide", dtype=torch.bfloat16, num_hidden_layers=LAYERS, **wide)
    (file,) = path.glob("*.safetensors")
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with closing(load(path, least(path, precision="bf16"), precision="bf16")) as loaded:
        assert loaded.stream is not None
        streamed, most = planned[-1].placement.streamed, (0, 0)

        def look(_module: Any, _arguments: Any) -> None:
            nonlocal most
            assert loaded.stream is not None
            most = max(most[0], in_memory(loaded.stream)), max(most[1], mapped(file))

        for layer in decoder_layers(loaded.model):
            layer.register_forward_pre_hook(look)
        library_tokens(loaded.model, PROMPT, 4)
        assert streamed.nbytes > 3.5 * streamed.window
        # The system reads and maps in large pages, of which one may be begun at either end of a layer, and one ahead.
        assert streamed.window < most[0] <= streamed.window + 2 * 3 * HUGE
        assert streamed.window // 2 < most[1] <= streamed.window + 3 * HUGE


@pytest.mark.skipif(not usable_isas(), reason="no native kernels here")
def test_single_tokens_go_through_the_layers_and_never_past_them(tmp_path: Path) -> None:
    path = of_blocks("llama", tmp_path)
    with closing(load(path, least(path))) as loaded:
        pages = PackedModel(loaded, POLICY, opens=False)
        assert pages.sizes.nbytes > 1
        assert loaded.stream.bytes_read < 2 * loaded.stream.nbytes  # once to open it, and the first layers ahead
        step, before = StepModel(loaded.model, 64), loaded.stream.bytes_read
        with torch.inference_mode():
            _, cache = step(torch.tensor([PROMPT]), None, 0)
            assert step.rows_of(1) is None
            step(torch.tensor([[5]]), cache, len(PROMPT))
        assert loaded.stream.bytes_read >= before + loaded.stream.nbytes


@pytest.mark.skipif(not usable_isas(), reason="no native kernels here")
def test_a_model_whose_file_is_cut_short_answers_with_a_sentence(tmp_path: Path) -> None:
    path = of_blocks("llama", tmp_path)
    with closing(load(path, least(path))) as loaded:
        os.truncate(path, path.stat().st_size // 2)
        with torch.inference_mode(), pytest.raises(EngineError, match="cut short, or has become shorter"):
            loaded.model(input_ids=torch.tensor([PROMPT]))


def test_there_is_no_file(tmp_path: Path) -> None:
    before = _in_use[0]
    with pytest.raises(EngineError, match="nothing"):
        LayerStream(layers_of(tmp_path / "nothing"), 5)
    assert _in_use[0] == before


def test_older_systems_read_by_touching(stream: LayerStream, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.experts.file_image._POPULATE_READ", 12345)
    assert mmap.PAGESIZE == PAGE
    stream.enter(0)
    found = stream.view(layers_of(file)[0][1])
    assert bytes(found.numpy()) == file.read_bytes()[170_007 : 170_007 + 90_001]
