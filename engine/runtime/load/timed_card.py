"""What a model costs on a card whose time is modelled: its own operators by their weights, its experts by theirs.

The library's modules run on the host's tensors, which know nothing of a card.  So the model's forward is the card's, in
pieces between two calls of experts, and experts that are shared with the processor are the host's, which tells the card
what to do by its streams.  Attention to keys and values is not counted: it is the same wherever experts are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.devices.device import Device
from engine.devices.emulated import Meter
from engine.experts.card_tokens import CardTokens
from engine.experts.dispatch import BANK_LAYER, ExpertsSite
from engine.formats.tiles import RecordLayout
from engine.kernels.interface import ExpertKernel, LayerRecords
from engine.kernels.native.exchange import MISSED
from engine.runtime.decoder_layers import decoder_layers, layer_names

LAUNCHES = 4
"""Of a layer's operators: norms, projections, attention and the router, as captured graphs run them."""


class TimedKernel:
    def __init__(self, kernel: ExpertKernel, records: LayerRecords, meter: Meter, *, on_card: bool) -> None:
        self._kernel, self._records, self._meter, self._on_card = kernel, records, meter, on_card
        self._flops = _flops(records.layout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        meter = self._meter
        with meter.clock.stopped():
            chosen = top_k_index[top_k_index < self._records.num_experts]
            nbytes = len(set(chosen.tolist())) * self._records.layout.nbytes
            flops = chosen.numel() * self._flops
        if self._on_card:
            meter.kernel(nbytes, flops)
            with meter.clock.stopped():
                return self._kernel(hidden_states, top_k_index, top_k_weights)
        with meter.on_processor(nbytes, flops):
            return self._kernel(hidden_states, top_k_index, top_k_weights)


def timed(kernel: ExpertKernel, records: LayerRecords, device: Device | None, *, on_card: bool) -> ExpertKernel:
    if device is None or device.meter is None:
        return kernel
    return TimedKernel(kernel, records, device.meter, on_card=on_card)


def charge_model(
    model: Any,
    devices: Sequence[Device],
    sites: Sequence[ExpertsSite],
    dense_sizes: Mapping[str, int],
    tokens: CardTokens | None,
) -> None:
    """Charges the model's forward to the card that it is on, if the card's time is modelled."""
    meter = devices[0].meter if devices else None
    if meter is None:
        return
    layouts = [site.layout for site in sites]
    whole = sum(part.nbytes for layout in layouts for part in layout.unquantised.parts)
    share = sum(layout.nbytes for layout in layouts) / whole if whole else 1.0
    layers, behind = _weights(model, dense_sizes)
    forward = _Forward(devices[0], meter, layers, behind, share)
    model.register_forward_pre_hook(forward.begin, with_kwargs=True)
    model.register_forward_hook(forward.end, always_call=True)
    for site in sites:
        site.module.register_forward_pre_hook(forward.leave)
        site.module.register_forward_hook(forward.enter, always_call=True)
    if tokens is not None:
        dense = [(nbytes * share, nbytes) for nbytes in [*layers, behind]]
        tokens.take_time(TimedTokens(meter, dense, tokens.layouts, model.config.get_text_config().hidden_size))
        return
    for layer in decoder_layers(model)[:1]:  # a step past the library's model would not be seen
        layer.register_forward_pre_hook(lambda *_: None)


class TimedTokens:
    """The time of tokens that the card computes by itself, from what their records say.

    A layer's experts in slots and the rest, which the processor computes meanwhile, take the longer of their two times;
    the rows and the answer cross the link.  What the processor takes is what it took, by the records.

    Args:
        dense: what other operators read for a step, and their flops for a row, of each layer and of what is behind.
    """

    def __init__(
        self, meter: Meter, dense: Sequence[tuple[float, int]], layouts: Sequence[RecordLayout], hidden: int
    ) -> None:
        self._meter, self._dense, self._layouts, self._hidden = meter, dense, layouts, hidden

    def stopped(self) -> AbstractContextManager[None]:
        return self._meter.clock.stopped()

    def charge(self, records: NDArray[np.void]) -> NDArray[np.void]:
        with self.stopped():
            records, begun_s = records.copy(), self._meter.clock.now()
            rows = int(records["rows"].max(initial=1))
            dense_s = sum(self._meter.kernel_s(nbytes, rows * flops, LAUNCHES) for nbytes, flops in self._dense)
            between_s = dense_s / (len(records) + 1)
            end_s = begun_s
            for layout, record in zip(self._layouts, records, strict=True):
                end_s = self._layer(layout, record, end_s + between_s)
        self._meter.charge(end_s + between_s - begun_s)
        return records

    def _layer(self, layout: RecordLayout, record: np.void, begun_s: float) -> float:
        """When a layer's experts that begin now are done; its record says the same by this clock."""
        meter, flops, misses, rows = self._meter, _flops(layout), int(record["missed"]), int(record["rows"])
        visits = rows * int(record["count"])
        experts, slots = record["experts"][:visits], record["slots"][:visits]
        found, missed = (len(np.unique(experts[of])) for of in (slots >= 0, slots == MISSED))
        hits = visits - misses
        took_s = int(record["answered_ns"] - record["posted_ns"]) / 1e9
        computed_s = begun_s + (meter.kernel_s(found * layout.nbytes, hits * flops) if hits else 0.0)
        answered_s = joined_s = taken_s = begun_s
        if misses:
            taken_s = begun_s + meter.link_s(2 * rows * self._hidden)
            answered_s = taken_s + meter.processor_s(missed * layout.nbytes, misses * flops, took_s)
            joined_s = answered_s + meter.link_s(4 * misses * self._hidden)
        for name, moment_s in (
            ("begun_ns", begun_s),
            ("computed_ns", computed_s),
            ("taken_ns", taken_s),
            ("answered_ns", answered_s),
        ):
            record[name] = round(moment_s * 1e9)
        return max(computed_s, joined_s)


def _flops(layout: RecordLayout) -> int:
    return 2 * sum(torch.Size(part.shape).numel() for part in layout.unquantised.parts)


def time_resident(sites: Sequence[ExpertsSite], devices: Sequence[Device]) -> None:
    """Models the time of experts that are all on the card; before faster paths are made, which would go past this."""
    if not devices or devices[0].meter is None:
        return
    for site in sites:
        layer, kernel = getattr(site.module, BANK_LAYER)
        if isinstance(layer, LayerRecords):
            setattr(site.module, BANK_LAYER, (layer, timed(kernel, layer, devices[0], on_card=True)))


def _weights(model: Any, dense_sizes: Mapping[str, int]) -> tuple[list[int], int]:
    """Bytes that a token reads of each decoder layer, and of what is behind them."""
    tied = model.get_output_embeddings() is not None and (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    table = next((name for name, each in model.named_parameters() if each is model.get_input_embeddings().weight), "")
    read = {name: nbytes for name, nbytes in dense_sizes.items() if tied or name != table}
    layers, elsewhere = layer_names(model).sums(read)
    return list(layers), elsewhere


class _Forward:
    """One forward after another, in pieces between calls of experts.

    Args:
        home: the first card, that all but experts is charged to, wherever a layer is: one works at a time.
        layers, behind: bytes in 16 bits.
        share: part of these that is read: linear layers are quantised as experts are.
    """

    def __init__(self, home: Device, meter: Meter, layers: list[int], behind: int, share: float) -> None:
        self._home, self._meter = home, meter
        self._layers, self._behind, self._share = layers, behind, share
        self._card: ExitStack | None = None
        self._host: AbstractContextManager[None] | None = None
        self._tokens = self._piece = 0

    def begin(self, _module: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs.get("input_ids")
        self._tokens = ids.numel() if ids is not None else args[0].numel() if args else 1
        self._piece, self._card = 0, ExitStack()
        self._card.enter_context(self._meter.on_card())
        self._count()

    def leave(self, module: Any, _args: Any) -> None:
        """Experts are called: what is before them has been launched."""
        if self._card is not None:
            self._host = self._meter.on_host()
            self._host.__enter__()
            if (device := self._elsewhere(module)) is not None:
                device.compute_stream.wait(self._home.compute_stream.record())

    def _elsewhere(self, module: Any) -> Device | None:
        """The card that computes its experts, if that is another than the first."""
        device = getattr(module.__dict__.get(BANK_LAYER, (None, None))[1], "device", None)
        return device if isinstance(device, Device) and device is not self._home else None

    def enter(self, module: Any, _args: Any, _output: Any) -> None:
        """They are computed, or queued: on a card that the next layer waits for."""
        if (device := self._elsewhere(module)) is not None:
            self._home.compute_stream.wait(device.compute_stream.record())
        if self._host is not None:
            self._host.__exit__(None, None, None)
            self._host = None
            self._count()

    def end(self, _module: Any, _args: Any, _output: Any) -> None:
        if self._card is None:
            return
        card, self._card = self._card, None
        for layer in self._layers[self._piece :]:
            self._kernels(layer, self._tokens)
        self._kernels(self._behind, 1)
        card.close()

    def _count(self) -> None:
        if self._piece < len(self._layers):
            self._kernels(self._layers[self._piece], self._tokens)
        self._piece += 1

    def _kernels(self, nbytes: int, tokens: int) -> None:
        # As many operations for a token as there would be bytes in 16 bits.
        self._meter.kernel(nbytes * self._share, nbytes * tokens, LAUNCHES)
