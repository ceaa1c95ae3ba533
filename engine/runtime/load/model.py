"""Makes a checkpoint directory into a model that runs, its experts in a bank outside the module."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from engine.common.config import EngineConfig
from engine.devices.cuda import cuda_count
from engine.devices.device import Device
from engine.devices.memory_budget import DeviceMemoryError
from engine.devices.opening import open_devices
from engine.experts.sites import verify
from engine.hardware.core_kinds import compute_threads
from engine.hardware.probe import usable_cpus
from engine.kernels.native.library import load_kernels
from engine.runtime.kv.memory import measure_kv
from engine.runtime.load.binding import bind_dense, bind_experts
from engine.runtime.load.checkpoint import open_checkpoint
from engine.runtime.load.decision import decide
from engine.runtime.load.devices import ModelDevices, move_between
from engine.runtime.load.foresight import Foresight
from engine.runtime.load.hand_over import hand_over
from engine.runtime.load.library_models import quiet_library
from engine.runtime.load.weights import read_weights
from engine.runtime.loaded_model import LoadedModel, LoadingParts

_log = logging.getLogger(__name__)


def open_compute_devices(config: EngineConfig) -> list[Device]:
    """The devices asked for beside the CPU; whoever asks closes them.

    Raises:
        EngineError: `DEVICE_UNAVAILABLE` if this machine has no such device, `INVALID_REQUEST` if nothing is called so.
    """
    name = config.device
    if name == "auto":
        name = "cuda" if cuda_count() else "cpu"
    if name == "cpu":
        return []
    return open_devices(name, config.vram_bytes)


def set_threads(threads: int | None) -> int:
    """Lets torch compute with this many threads, or one per fast core; never more than this process may use."""
    count = max(1, min(threads or compute_threads(), usable_cpus()))
    torch.set_num_threads(count)
    return count


def load_model(
    config: EngineConfig,
    *,
    on_progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
) -> LoadedModel:
    """Loads the checkpoint directory `config.model`.

    `on_progress(done, total)` counts bytes read; `cancelled()` is asked often.

    Raises:
        EngineError: the checkpoint, the machine or the request does not allow it; the message says why.
        RequestCancelled: `cancelled()` was true; everything allocated has been freed.
    """
    set_threads(config.threads)  # before devices are opened: their threads take torch's number over
    devices = ModelDevices(open_compute_devices(config))  # one that is not there is told before gigabytes are read
    try:
        return _load(config, devices, on_progress, cancelled)
    except (DeviceMemoryError, torch.OutOfMemoryError) as error:
        refusal = str(error).partition("\n")[0]
    # Others took the memory while the model was being loaded, or it was misjudged: without the device it runs all the
    # same.  Not in the handler: the error's traceback holds what was allocated.
    gc.collect()
    _log.warning("loading again for the CPU: %s", refusal)
    on_cpu = replace(config, device="cpu")
    return _load(on_cpu, ModelDevices(()), on_progress, cancelled, f"Runs on the CPU: {refusal}")


def _load(
    config: EngineConfig,
    devices: ModelDevices,
    on_progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
    note: str = "",
) -> LoadedModel:
    parts = LoadingParts(devices, Foresight(learns_always=config.prefetch == "mlp"))
    try:
        with torch.no_grad(), quiet_library():
            return _load_parts(config, parts, on_progress, cancelled, note)
    except BaseException:
        parts.free()
        raise


def _load_parts(
    config: EngineConfig,
    parts: LoadingParts,
    on_progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
    note: str,
) -> LoadedModel:
    threads = torch.get_num_threads()
    opened = open_checkpoint(config)
    model = parts.model = opened.model
    decision = decide(opened, config, parts.devices.devices)
    parts.place(decision.devices, decision.layers)
    if decision.uses_cpu and opened.dtype == torch.bfloat16:
        parts.kernels = load_kernels(threads)
    read_weights(opened, decision, parts, on_progress, cancelled)
    move_between(model, decision.layers, [device.torch_device for device in decision.devices])
    model.eval().requires_grad_(False)
    if decision.devices or parts.disk_backed is not None:
        kv = measure_kv(model, decision.dense)  # first: the experts get what room it leaves
        if decision.devices:
            parts.devices.expect_kv(kv, opened.profile.layers)
        bind_experts(opened, decision, parts, config)
        bind_dense(opened, decision, parts)
    else:
        bind_dense(opened, decision, parts)
        kv = measure_kv(model, decision.dense)  # by native kernels, in half the time
    verify(model, decision.sites)
    return hand_over(
        opened,
        decision,
        parts,
        config,
        kv_bytes=kv.per_token,
        threads=threads,
        note=note,
    )
