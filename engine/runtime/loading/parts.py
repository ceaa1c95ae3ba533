"""What has been allocated for a model on its way: freed together if it does not arrive."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

from engine.experts.bank import ExpertBank
from engine.experts.disk_backed import DiskBackedBank
from engine.experts.sites import unbind
from engine.kernels.native.library import NativeKernels
from engine.runtime.foresight import Foresight
from engine.runtime.model_devices import ModelDevices


@dataclass
class LoadingParts:
    """Belongs to the loading until all of it is handed over; filled phase by phase."""

    devices: ModelDevices
    foresight: Foresight
    model: Any = None
    bank: ExpertBank | None = None
    disk_backed: DiskBackedBank | None = None
    kernels: NativeKernels | None = None

    def without_devices(self) -> None:
        """The model is not going to run on them."""
        self.devices.close()
        self.devices = ModelDevices(())

    def free(self) -> None:
        """Frees everything."""
        if self.model is not None:
            unbind(self.model)
        for held in (self.foresight, self.devices, self.disk_backed, self.bank, self.kernels):
            if held is not None:
                held.close()
        self.model = None
        gc.collect()
