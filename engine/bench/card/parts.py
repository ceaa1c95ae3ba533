"""The parts of `switchyard bench card` that measure, each in a process of its own: a failed card harms no other part.

python -m engine.bench.card.parts PART DEVICE MODEL

Prints one line of JSON: the figures, by name.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from engine.bench.card import run
from engine.bench.card.run import Figures, between, kernels, median_seconds, number_of
from engine.common import clock
from engine.process.lifetime import quiet_libraries

if TYPE_CHECKING:
    from engine.devices.device import Device
    from engine.runtime.loaded_model import LoadedModel

_RECORD = 3 * 2**20
"""Bytes: about an int4 expert of Qwen3-30B-A3B."""
_LARGE = 64 * 2**20
_TOKENS, _PROMPT, _ROUNDS = 64, 2048, 3


def machine(device: str, _model: str) -> Figures:
    """Versions of everything, and what torch's build has kernels for."""
    import torch

    from engine.devices.opening import open_devices

    with open_devices(device)[0] as opened:
        card = opened.identity or opened.name
        budget, reserve = opened.memory.total, opened.watch.reserve if opened.watch is not None else 0
    found: Figures = {
        "card": card,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "memory that is planned with, MiB": budget >> 20,
        "memory that is left to others, MiB": reserve >> 20,
        "torch": torch.__version__,
        "torch has kernels for": ", ".join(torch.cuda.get_arch_list()) if torch.cuda.is_available() else "no card",
    }
    if torch.cuda.is_available() and device.startswith("cuda"):
        found["compute capability"] = "{}.{}".format(*torch.cuda.get_device_capability(number_of(device)))
    return found


def link(device: str, _model: str) -> Figures:
    """Copies of weights and of small things, and what launches cost the host."""
    import torch

    from engine.devices.host_memory import aligned
    from engine.devices.memory_budget import MemoryCategory
    from engine.devices.opening import open_devices

    with open_devices(device)[0] as opened, torch.inference_mode():
        there = opened.memory.allocate(_LARGE, MemoryCategory.STAGING)
        pinned = opened.host_memory.allocate(_LARGE)
        pageable = aligned(_LARGE, torch.device("cpu"))
        for memory in (pinned, pageable):
            memory.zero_()
        found = {
            "pinned to card, GB/s": _rate(opened, there, pinned, to_card=True),
            "pageable to card, GB/s": _rate(opened, there, pageable, to_card=True),
            "card to pinned, GB/s": _rate(opened, there, pinned, to_card=False),
            "pinned memory, GB": opened.host_memory.pinned_bytes / 1e9,
        }
        small = pinned[:4096]
        found["4 KB to card, us"] = 1e6 * median_seconds(lambda: _copied(opened, there[:4096], small))
        records = [there[at : at + _RECORD] for at in range(_RECORD, 9 * _RECORD, _RECORD)]

        def behind() -> None:
            last = [opened.h2d_stream.copy(record, pinned[: record.nbytes], None) for record in records][-1]
            _copied(opened, there[:4096], small)
            waits.append(clock.now())
            last.wait()

        waits: list[float] = []
        spans = []
        for _ in range(run.REPEATS):
            begun_s = clock.now()
            behind()
            spans.append(waits.pop() - begun_s)
        found["4 KB to card behind 8 experts, us"] = 1e6 * statistics.median(spans)
        found |= _launches(opened)
        opened.host_memory.release(pinned)
        opened.memory.release(there)
    return found


def _rate(device: Device, there: Any, here: Any, *, to_card: bool) -> float:
    def copied() -> None:
        stream = device.h2d_stream if to_card else device.d2h_stream
        stream.copy(*((there, here) if to_card else (here, there)), None).wait()

    return float(here.nbytes) / median_seconds(copied) / 1e9


def _copied(device: Device, there: Any, here: Any) -> None:
    device.small_copy_stream.copy(there, here, None).wait()


def _launches(device: Device) -> Figures:
    """Host's times of an ordinary launch, of a captured one, and of waiting for one."""
    import torch

    x = torch.ones(1024, device=device.torch_device)

    def launch() -> None:
        torch.add(x, 1.0, out=x)

    def launched() -> None:
        launch()
        device.compute_stream.record().wait()

    found = {"launch, us": 1e6 * median_seconds(launch), "launch and wait, us": 1e6 * median_seconds(launched)}
    if device.new_capture is not None:
        capture = device.new_capture()
        try:
            capture.begin()
            for _ in range(20):
                launch()
            graph = capture.end()
            found["graph of 20 launches, us"] = 1e6 * median_seconds(graph.replay)
        finally:
            capture.close()
    device.synchronize()
    return found


def experts(device: str, model: str) -> Figures:
    """What the dispatcher measures of this machine, for experts of the model's shape."""
    from engine.bench.opened import hybrid_layers

    with _opened(device, model, cache_slots=16) as loaded:
        layers = hybrid_layers(loaded.model)
        if not layers:
            return {"experts": "all of them fit on the card: nothing is dispatched"}
        latency = layers[0][1].latency
    own_s = max(latency.gpu_flat_s - latency.gpu_launch_s, 1e-9)
    return {
        "an expert's bytes, MB": latency.record_nbytes / 1e6,
        "on the CPU, us": 1e6 * latency.cpu_s(1),
        "on the card, us": 1e6 * latency.gpu_s(1),
        "of that the launch, us": 1e6 * latency.gpu_launch_s,
        "the card reads, GB/s": latency.record_nbytes / own_s / 1e9,
        "over the link, us": 1e6 * latency.transfer_s,
        "8 on the card, us": 1e6 * latency.hits_s([1] * 8),
    }


def resident(device: str, model: str) -> Figures:
    """Decoding with all experts on the card."""
    return _decoded(device, model)


def mixed(device: str, model: str) -> Figures:
    """Decoding with half of the experts on the card, the others where they are computed soonest."""
    return _decoded(device, model, cache_slots=_half(model), misses="mixed")


def on_cpu(device: str, model: str) -> Figures:
    """The same, and all others on the CPU."""
    return _decoded(device, model, cache_slots=_half(model), misses="cpu")


def tokens(device: str, model: str) -> Figures:
    """What a layer's hand-over to the CPU and back takes, where a token is the card's own: beside what is computed."""
    from engine.bench.opened import decode_seconds, random_text, vocabulary_of
    from engine.kernels.cuda.exchange import handover_ns

    with _opened(device, model, cache_slots=_half(model), misses="cpu") as loaded:
        assert loaded.devices is not None
        own = loaded.devices.experts.tokens
        if own is None:
            return {"tokens of its own": f"none. {' '.join(loaded.devices.experts.notes)}".strip()}
        spans: list[int] = []
        for seed in range(run.REPEATS):
            decode_seconds(loaded, random_text(vocabulary_of(loaded), 16, 4, seed=seed))
            spans += handover_ns(own.records()).tolist()
        kind = "as one graph" if own.is_captured else "of an emulated card"
        found: Figures = {"tokens of its own": kind if own.can_run_more else "given up while they ran"}
    if spans:
        found["hand-over of a layer, us"] = statistics.median(spans) / 1e3
        found["the slowest hand-over, us"] = max(spans) / 1e3
    return found


def fetched(device: str, model: str) -> Figures:
    """The same, and all others fetched."""
    return _decoded(device, model, cache_slots=_half(model), misses="fetch")


def prompt(device: str, model: str) -> Figures:
    """Reading a prompt with half of the experts on the card."""
    from engine.bench.opened import prefill_seconds, random_text, vocabulary_of

    with _opened(device, model, cache_slots=_half(model)) as loaded:
        texts = [random_text(vocabulary_of(loaded), _PROMPT, 0, seed=seed).prompt for seed in range(_ROUNDS + 1)]
        seconds = [prefill_seconds(loaded, text) for text in texts][1:]
    return {f"prompt of {_PROMPT:,} tokens, tokens/s": _PROMPT / statistics.median(seconds)}


def profile(device: str, model: str) -> Figures:
    """What the host asks of the card for a token: launches, waits and copies."""
    import torch

    if not device.startswith("cuda"):
        return {"profile": "only a real card has one"}
    from engine.bench.opened import decode_seconds, random_text, vocabulary_of

    with _opened(device, model, cache_slots=_half(model)) as loaded:
        vocabulary, tokens = vocabulary_of(loaded), 5
        decode_seconds(loaded, random_text(vocabulary, 16, _TOKENS))
        kinds = (torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds) as watched:
            decode_seconds(loaded, random_text(vocabulary, 16, tokens))
        calls = {event.key: event.count for event in watched.key_averages()}
        on_card = [event for event in watched.key_averages() if event.device_type.name == "CUDA"]
        ran = sum(event.count for event in on_card if not event.key.startswith(("Memcpy", "Memset")))
    return {**per_token(calls, tokens), "kernels a token": ran / tokens}


def per_token(calls: Mapping[str, int], tokens: int) -> Figures:
    kinds = {
        "launches a token": ("LaunchKernel",),
        "graphs a token": ("GraphLaunch",),
        "waits a token": ("Synchronize",),
        "copies a token": ("Memcpy",),
    }
    runtime = {name: count for name, count in calls.items() if name.startswith(("cuda", "cu", "hip"))}
    return {
        kind: sum(count for name, count in runtime.items() if any(word in name for word in words)) / tokens
        for kind, words in kinds.items()
    }


def _decoded(device: str, model: str, **options: Any) -> Figures:
    from engine.bench.decode import bytes_per_token
    from engine.bench.opened import caches_of, decode_seconds, random_text, vocabulary_of

    with _opened(device, model, **options) as loaded:
        vocabulary = vocabulary_of(loaded)
        decode_seconds(loaded, random_text(vocabulary, 16, _TOKENS))  # fills the cache
        counters = [cache.counters for cache in caches_of(loaded)]
        names = ("lookups", "hits", "hits_on_cpu", "on_cpu", "fetched")
        before = {name: sum(getattr(each, name) for each in counters) for name in names}
        seconds: list[float] = []
        for seed in range(_ROUNDS):
            seconds += decode_seconds(loaded, random_text(vocabulary, 16, _TOKENS, seed=seed + 1))
        after = {name: sum(getattr(each, name) for each in counters) - before[name] for name in names}
        rate, read = 1 / statistics.median(seconds), bytes_per_token(loaded)
    found: Figures = {"tokens/s": rate, "weights read, GB/s": rate * read / 1e9}
    if after["lookups"]:
        for name in names[1:]:
            found[f"{name.replace('_', ' ')}, %"] = 100 * after[name] / after["lookups"]
    return found


def _opened(device: str, model: str, **options: Any) -> AbstractContextManager[LoadedModel]:
    from engine.bench.opened import opened, resolve_model
    from engine.common.config import EngineConfig

    checkpoint = resolve_model(model, lambda _text: None)
    return opened(EngineConfig(str(checkpoint), device=device, precision="int4", speculation="off", **options))


def _half(model: str) -> int:
    from engine.bench.opened import resolve_model
    from engine.checkpoint.profile import read_profile

    found = read_profile(resolve_model(model, lambda _text: None))
    return max(1, found.layers * found.experts // 2)


def _vocabulary(loaded: LoadedModel) -> int:
    return int(loaded.model.config.get_text_config().vocab_size)


PARTS: Mapping[str, Callable[[str, str], Figures]] = {
    part.__name__: part
    for part in (machine, kernels, between, link, experts, resident, mixed, on_cpu, tokens, fetched, prompt, profile)
}


def main(arguments: list[str]) -> int:
    """Measures a part; returns the exit code."""
    part, device, model = arguments
    quiet_libraries()
    sys.stdout.write(json.dumps(PARTS[part](device, model)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
