"""All graphics cards of this machine, most useful first."""

from __future__ import annotations

from pathlib import Path

from engine.hardware.gpu_info import GpuInfo, Vendor
from engine.hardware.nvml import Nvml, nvidia_gpus
from engine.hardware.other_gpus import other_gpus
from engine.hardware.sysfs_gpus import DRM, sysfs_gpus

_ORDER = (Vendor.NVIDIA, Vendor.AMD, Vendor.APPLE, Vendor.INTEL, Vendor.OTHER)
_nvml = Nvml()


def graphics_cards(nvml: Nvml = _nvml, drm: Path = DRM) -> tuple[tuple[GpuInfo, ...], str]:
    """(the cards, a note on why there are none or NVIDIA's are missing).

    The note is empty only if NVIDIA's driver responded, or if there is none and other cards were found.
    """
    ours, note = nvidia_gpus(nvml)
    others = (*sysfs_gpus(drm), *other_gpus())
    found = sorted((*ours, *others), key=lambda gpu: (gpu.is_integrated, _ORDER.index(gpu.vendor)))
    if found and note.startswith("No NVIDIA driver"):
        note = ""
    return tuple(found), note
