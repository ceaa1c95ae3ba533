"""What has been allocated for a model on its way: freed together if it does not arrive."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.devices.device import Device
from engine.experts.bank import ExpertBank
from engine.experts.disk_backed import DiskBackedBank
from engine.experts.sites import unbind
from engine.kernels.native.library import NativeKernels
from engine.runtime.foresight import Foresight
from engine.runtime.layer_devices import LayerDevices
from engine.runtime.model_devices import ModelDevices


@dataclass
class LoadingParts:
    """Belongs to the loading until all of it is handed over; filled phase by phase.

    Attributes:
        devices: that were opened, until it is decided whether the model runs on them and what is where.
    """

    devices: ModelDevices
    foresight: Foresight
    model: Any = None
    bank: ExpertBank | None = None
    disk_backed: DiskBackedBank | None = None
    kernels: NativeKernels | None = None

    def place(self, devices: Sequence[Device], layers: LayerDevices) -> None:
        """The model is going to run on these devices, with its layers split so; if there are none, on the CPU."""
        if not devices:
            self.devices.close()
        self.devices = ModelDevices(devices, layers)

    def free(self) -> None:
        """Frees everything."""
        if self.model is not None:
            unbind(self.model)
        for held in (self.foresight, self.devices, self.disk_backed, self.bank, self.kernels):
            if held is not None:
                held.close()
        self.model = None
        gc.collect()
