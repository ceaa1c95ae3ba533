"""Tiny models on emulated devices, and what transformers says of the same files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.common.config import SamplingParams
from engine.common.errors import CancelCheck, never_cancelled
from engine.devices.device import Device
from engine.devices.memory_budget import MemoryUse
from engine.experts.latency import LatencyModel
from engine.kernels.interface import LayerRecords
from engine.runtime.decode.generation import (
    GenerationResult,
    ProgressCallback,
    TextCallback,
    ignore_progress,
    ignore_text,
)
from engine.runtime.load import binding as device_binding
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.continuous_batch import ContinuousBatch
from engine.runtime.schedule.request import BatchRequest, Outcome
from engine.runtime.schedule.scheduler import Scheduler
from tests.engine.loaded_tiny import NO_END, library_tokens, open_model, random_prompt
from tests.engine.tiny_families import model_class, tiny_checkpoint, tiny_config

MIB = 2**20
PROMPT = random_prompt(80)
"""Long enough to be a prefill, which is dispatched in another way than a step of a few tokens."""
NEXT_TURN = [7, 8, 9]
NEW_TOKENS = 8
BEAMS = 3


@dataclass(frozen=True)
class Reference:
    """What transformers says.

    Attributes:
        folder: the checkpoint.
        logits: [1, n, V] of the prompt.
        first, second: greedy answers to the prompt, and to prompt, answer and the next turn; beams: to the prompt.
    """

    folder: Path
    logits: torch.Tensor
    first: list[int]
    second: list[int]
    beams: list[int]

    @property
    def second_prompt(self) -> list[int]:
        return [*PROMPT, *self.first, *NEXT_TURN]


@cache
def reference(family: str, parent: Path) -> Reference:
    """The family's tiny checkpoint, in a folder of its own in `parent`, and its answers."""
    folder = tiny_checkpoint(family, parent / family)
    model = model_class(tiny_config(family)).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([PROMPT])).logits
    first = library_tokens(model, PROMPT, NEW_TOKENS)
    second = library_tokens(model, [*PROMPT, *first, *NEXT_TURN], NEW_TOKENS)
    beams = library_tokens(model, PROMPT, NEW_TOKENS, num_beams=BEAMS)
    return Reference(folder, logits, first, second, beams)


def share_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some misses are computed on the CPU and some fetched, whatever this machine's processors are worth."""

    def measured(_device: Device, bank: LayerRecords, *_args: object, **_options: object) -> LatencyModel:
        nbytes = bank.layout.nbytes
        return LatencyModel("float32", nbytes, 1e-4, 1e-6, 2e-5, 16, 1e-6, 2e-5, nbytes / 4e-5)

    monkeypatch.setattr(device_binding, "measure", measured)


@contextmanager
def opened(folder: Path, devices: int = 1, **config: Any) -> Iterator[LoadedModel]:
    """The checkpoint on so many emulated cards of 8 MiB, or on the CPU if there are none.

    Raises:
        AssertionError: when it has been closed, a device still counts something.
    """
    device = {0: "cpu", 1: "emulated:slow-link"}.get(devices, f"emulated:slow-linkx{devices}")
    options = {"device": device, "vram_bytes": 8 * MIB, "precision": "fp32", "threads": 1, **config}
    model = open_model(folder, **options)
    cards = model.devices.devices if model.devices is not None else ()
    try:
        yield model
    finally:
        model.close()
        for card in cards:
            assert card.memory.use().used == 0, (card.name, card.memory.use())


class Chats:
    """Requests of one model, one after the other."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.scheduler = Scheduler(loaded)

    @property
    def batch(self) -> ContinuousBatch:
        """Where they are answered, if they share steps."""
        assert self.scheduler._batch is not None
        return self.scheduler._batch

    @property
    def kv_bytes(self) -> int:
        """Bytes that context takes."""
        return self.scheduler.kv_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens of context that are held."""
        return self.scheduler.kv_tokens

    def clear(self) -> None:
        """Frees the context."""
        self.scheduler.forget()

    def generate_from_ids(self, ids: Sequence[int], sampling: SamplingParams, **options: Any) -> GenerationResult:
        """Continues a prompt given as tokens."""
        return self.scheduler.answer(BatchRequest(0, ids=tuple(ids), sampling=sampling, **options))

    def together(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[tuple[int, ...]]:
        """The tokens of answers to several prompts at the same time."""
        ends = dict[int, Outcome]()
        for number, prompt in enumerate(prompts):
            request = BatchRequest(0, ids=tuple(prompt), sampling=SamplingParams(max_tokens=tokens), end_ids=NO_END)
            self.scheduler.submit(request, partial(ends.__setitem__, number))
        self.scheduler.serve()
        found = [ends[number] for number in range(len(prompts))]
        assert all(isinstance(end, GenerationResult) for end in found), found
        return [end.token_ids for end in found if isinstance(end, GenerationResult)]


@contextmanager
def chatting(model: LoadedModel) -> Iterator[Chats]:
    """Requests that give the memory of their context back at the end."""
    session = Chats(model)
    try:
        yield session
    finally:
        session.scheduler.close()


def answer(
    session: Chats,
    prompt: Sequence[int],
    tokens: int = NEW_TOKENS,
    *,
    on_progress: ProgressCallback = ignore_progress,
    on_text: TextCallback = ignore_text,
    cancelled: CancelCheck = never_cancelled,
    **sampling: Any,
) -> GenerationResult:
    """What the session says to a prompt, without an end of its own."""
    return session.generate_from_ids(
        prompt,
        SamplingParams(max_tokens=tokens, **sampling),
        end_ids=NO_END,
        on_progress=on_progress,
        on_text=on_text,
        cancelled=cancelled,
    )


def memory_use(model: LoadedModel) -> list[MemoryUse]:
    """Of every device that the model runs on."""
    return [card.memory.use() for card in model.devices.devices] if model.devices is not None else []


def slots(model: LoadedModel) -> int:
    """Experts that can be kept on the devices of the model."""
    return model.devices.experts.slots if model.devices is not None else 0
