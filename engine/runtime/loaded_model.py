"""A model that is ready to run, or on its way there, and everything that was allocated for it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.common.errors import CancelCheck, EngineError
from engine.common.footprint import SHORT_TOKENS
from engine.common.model_info import ModelInfo
from engine.devices.device import Device
from engine.experts.dispatch import unbind
from engine.experts.ram_tier import RamTier
from engine.experts.record import ExpertBank
from engine.experts.vram_cache import VramCache
from engine.experts.whole_layer import LayerStream
from engine.kernels.native.library import NativeKernels
from engine.kernels.native.paged_attention import KvType
from engine.protocol import LoadPhase
from engine.runtime.decoder_layers import LayerDevices
from engine.runtime.load.devices import ModelDevices
from engine.runtime.load.foresight import Foresight
from engine.runtime.load.tables import TableReads
from engine.runtime.load.tensor_reader import TensorReader
from engine.runtime.pictures import Blind, Sight
from engine.runtime.prefix_cache.store import PrefixCache
from engine.untrusted_text.process import UNTRUSTED_TEXT


@dataclass(kw_only=True)
class ModelParts:
    """Everything that was allocated for a model, whether it is ready or on its way there.

    Attributes:
        model: transformers' `PreTrainedModel`, in eval mode, without gradients; its experts are served by `bank`.
        tokenizer: transformers' `PreTrainedTokenizerBase`.

        bank: the weights of all experts but those on disk; `None` for a dense model.
        disk_backed: the experts that are read from disk as they are needed, if they do not fit into RAM.
        tables: reads rows of embeddings that stay on disk, if any do.
        stream: reads decoder layers for each pass, if some have no room.
        kernels: the native CPU kernels that it computes with, if any.

        devices: what it runs on beside the CPU, if anything.
        foresight: predicts the experts of coming layers, and keeps what it learns for later sessions.
    """

    model: Any = None
    tokenizer: Any = None

    bank: ExpertBank | None = None
    disk_backed: RamTier | None = None
    tables: TableReads | None = None
    stream: LayerStream | None = None
    kernels: NativeKernels | None = None

    devices: ModelDevices | None = None
    foresight: Foresight | None = None

    def close(self) -> None:
        """Frees everything.  The object is of no use afterwards; calling it twice is harmless."""
        if self.model is not None:
            unbind(self.model)
        if self.tokenizer is not None:
            UNTRUSTED_TEXT.drop(self.tokenizer)
        opened = self.devices.devices if self.devices is not None else ()
        on_card = any(device.torch_device.type != "cpu" for device in opened)
        # Devices before the bank: what is on its way reads from it.
        for held in (self.foresight, self.devices, self.bank, self.disk_backed, self.tables, self.stream):
            if held is not None:
                # A lost card gives nothing back.
                with suppress(EngineError, RuntimeError) if on_card else nullcontext():
                    held.close()
        self.model = self.tokenizer = self.bank = self.disk_backed = self.devices = self.foresight = None
        self.tables = self.stream = None
        gc.collect()
        if self.kernels is not None:
            self.kernels.close()
            self.kernels = None
        if on_card:
            with suppress(RuntimeError):
                torch.accelerator.empty_cache()


@dataclass(kw_only=True)
class LoadedModel(ModelParts):
    """What `load_model` returns.

    Attributes:
        info: what the window shows about it.

        device: where the non-expert weights are.
        graph_device: the device that all of it is on, or the first of several, if decode steps are to be captured.

        context_tokens: longest context allowed, prompt and answer together.
        chunk_tokens: how much of a prompt is computed at once.
        ram_bytes: of RAM that all of it may take, if a budget was set.
        prepared: files of weights that the next start can read early.
        speculates: whether coming tokens of an answer may be guessed and tried together.
        kv_type: of keys and values, if not the model's own.
        kv_fixed_bytes: what a sequence takes beside its tokens.
        read: the library's cache of some tokens; None if it has read none yet.
        kept: what is kept of prompts and answers that were read or written; None keeps nothing.
        sight: what it has to read pictures; `blind` says why it has none.
    """

    info: ModelInfo

    device: torch.device
    graph_device: Device | None = None

    context_tokens: int
    chunk_tokens: int = SHORT_TOKENS
    ram_bytes: int | None = None
    prepared: tuple[Path, ...] = ()
    speculates: bool = False
    kv_type: KvType | None = None
    kv_fixed_bytes: int = 0
    read: Any = None
    kept: PrefixCache | None = None
    sight: Sight | None = None
    blind: Blind | None = None

    def close(self) -> None:
        if self.sight is not None:
            self.sight.close()
            self.sight = None
        if self.kept is not None:
            self.kept.close()  # first: what it is writing may be in the model's own cache
            self.kept = None
        super().close()

    @property
    def caches(self) -> list[VramCache]:
        """The expert caches of all its devices."""
        return self.devices.experts.all_caches if self.devices is not None else []

    @contextmanager
    def token_by_token(self) -> Iterator[None]:
        """While one token at a time is decoded with native kernels, torch keeps to the calling thread.

        What is left to torch then is too small to share, and its idle threads spin on the cores that the kernels
        compute on.
        """
        if self.kernels is None:
            yield
            return
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


OnPhase = Callable[[LoadPhase], None]


def ignore_phase(_phase: LoadPhase) -> None:
    """For whoever does not show it."""


@dataclass(kw_only=True)
class LoadingParts(ModelParts):
    """Owned by the loader until the model is complete; filled phase by phase.

    Attributes:
        devices: that were opened, until it is decided whether the model runs on them and what is where.
        reader: has the files that the experts of `bank` and the linear layers are used in.
        on_phase: is told what is done from now on; on_arriving: how much of these files is there.
    """

    devices: ModelDevices
    on_phase: OnPhase = ignore_phase
    on_arriving: Callable[[int, int], None] = lambda _done, _total: None
    reader: TensorReader | None = None

    def wait_for_weights(self, cancelled: CancelCheck) -> tuple[Path, ...]:
        """Until all that is read for `bank` and for linear layers is there; the files that the next start can read.

        Raises:
            As `TensorReader.wait`.
        """
        if self.reader is None or not self.reader.whole_files:
            return ()
        self.on_phase("reading")
        self.reader.wait(self.on_arriving, cancelled)
        return self.reader.whole_files

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()  # first: it writes into the bank
        super().close()

    def place(self, devices: Sequence[Device], layers: LayerDevices) -> None:
        """The model is going to run on these devices, with its layers split so; if there are none, on the CPU."""
        if not devices:
            self.devices.close()
        self.devices = ModelDevices(devices, layers)
