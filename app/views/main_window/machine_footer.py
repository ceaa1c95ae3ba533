"""The machine at a glance: RAM and VRAM by purpose, the hardware, and where the model runs."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QFrame, QLabel, QWidget

from app.icons import IconButton
from app.services.device_monitor import DeviceMonitor
from app.services.engine_client import EngineClient, EngineState
from app.widgets.memory_bar import BarPart, MemoryGauge, MemoryLegend
from app.widgets.scaffold import hbox, text_label, vbox
from engine.common.model_info import ModelInfo
from engine.hardware.gpu_info import CARD_NAMES
from engine.hardware.probe import GpuInfo, Probe
from engine.hardware.sensors import SensorSample
from engine.protocol import Telemetry

SPACING_PX = 6
_NOTHING = Telemetry(0, 0, 0, 0, 0, 0.0)


class MachineFooter(QWidget):
    """Follows the engine and the device monitor; keeps only their latest values.

    Signals: `folded(bool)`, when people fold it into one bar or unfold it.
    """

    folded = Signal(bool)

    def __init__(self, client: EngineClient, devices: DeviceMonitor, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._client = client
        self._sample: SensorSample | None = None
        self._held = _NOTHING
        self._gpu: GpuInfo | None = None
        self._profile: Probe | None = None
        self._is_narrow = self._is_folded = self._has_vram = False
        self._heading = text_label(self, self.tr("Memory"), role="caption")
        self.fold = IconButton("chevron-down", "", self._fold, self)
        self._ram_bar = MemoryGauge(self.tr("RAM"), self)
        self._vram_bar = MemoryGauge(self.tr("VRAM"), self)
        self._legend = MemoryLegend(self)
        self._legend.show_parts(self._parts(0, 0, 0, 0, 0))  # reserve its space
        self._no_gpu = _caption(self)
        self._hardware = _caption(self)
        self._where = _caption(self)
        line = QFrame(self)
        line.setProperty("line", "true")
        self._inner = inner = vbox(
            hbox((self._heading, 1), self.fold),
            self._vram_bar,
            self._ram_bar,
            self._legend,
            self._where,
            self._hardware,
            self._no_gpu,
            margins=(8, 6, 8, 0),
            gap=SPACING_PX,
        )
        vbox(line, inner, into=self, gap=6)
        self.set_folded(False)
        self._no_gpu.setText(self.tr("No GPU in use"))

        devices.sampled.connect(self._on_sample)
        devices.hardware_found.connect(self._on_hardware)
        client.telemetry.connect(self._on_telemetry)
        client.loading_changed.connect(self._say_where)
        client.state_changed.connect(self._on_state)
        client.model_loaded.connect(self._say_where)
        self._say_where()

    def set_folded(self, folded: bool) -> None:
        self._is_folded = folded
        words = self.tr("Show what holds the memory") if folded else self.tr("Fold the memory into one bar")
        self.fold.set_icon("chevron-up" if folded else "chevron-down", words)
        self._show_bars()
        self.updateGeometry()

    def _fold(self) -> None:
        self.set_folded(not self._is_folded)
        self.folded.emit(self._is_folded)

    def _show_bars(self) -> None:
        self._vram_bar.setVisible(self._has_vram)
        self._ram_bar.setVisible(not (self._is_folded and self._has_vram))
        for widget in (self._heading, self.fold):
            widget.setVisible(not self._is_narrow)

    def _show_vram(self, has_vram: bool) -> None:
        if has_vram != self._has_vram:
            self._has_vram = has_vram
            self._show_bars()

    def set_narrow(self, narrow: bool) -> None:
        self._is_narrow = narrow
        self._show_bars()
        side = 2 if narrow else 8
        self._inner.setContentsMargins(side, 6, side, 0)
        for bar in (self._vram_bar, self._ram_bar):
            bar.set_narrow(narrow)

    def fit(self, width: int, height: int) -> None:
        margins = self._inner.contentsMargins()
        room = width - margins.left() - margins.right()
        bars = [bar for bar in (self._vram_bar, self._ram_bar) if not bar.isHidden()]
        left = height - 1 - SPACING_PX - margins.top()
        left -= sum(bar.sizeHint().height() + SPACING_PX for bar in bars)
        left -= 0 if self._is_narrow else self.fold.height() + SPACING_PX
        is_room = not self._is_narrow and not self._is_folded
        for part in (self._legend, self._where, self._hardware, self._no_gpu):
            if part is self._legend:
                needed = part.sizeHint().height() if is_room else 0
            else:
                needed = part.heightForWidth(room) if is_room else 0
            is_room = is_room and needed + SPACING_PX <= left
            part.setVisible(is_room)
            left -= needed + SPACING_PX
        self._tell_rest()

    def _tell_rest(self) -> None:
        hidden = [label.text() for label in (self._where, self._hardware, self._no_gpu) if label.isHidden()]
        bars = [bar.accessibleName() for bar in (self._vram_bar, self._ram_bar) if self._is_folded and bar.isHidden()]
        self.setToolTip("\n".join(filter(None, (*hidden, *(bars if self._has_vram else ())))))

    def take_over(self, before: MachineFooter) -> None:
        self._sample, self._held = before._sample, before._held
        if before._profile is not None:
            self._on_hardware(before._profile)
        self._show_memory()

    # --- memory -----------------------------------------------------------------------------------

    def _on_sample(self, sample: SensorSample) -> None:
        self._sample = sample
        self._show_memory()

    def _on_telemetry(self, held: Telemetry) -> None:
        self._held = held
        self._show_memory()

    def _show_memory(self) -> None:
        sample = self._sample
        if sample is None or sample.ram_used is None or sample.ram_total is None:
            return
        held = self._held
        on_gpu = self._on_gpu()
        in_ram = (0 if on_gpu else held.weights_bytes, held.experts_bytes, 0 if on_gpu else held.kv_bytes)
        ours = sample.ram_ours or 0
        parts = self._parts(*in_ram, ours - sum(in_ram), sample.ram_used - max(ours, sum(in_ram)))
        tip = self.tr(
            "Model: the weights that every token needs. Its experts: those of which each token needs a few. Chat "
            "memory: keys and values of conversations (KV). These figures are the engine's; RAM in use and in all are "
            "the operating system's."
        )
        self._ram_bar.show_parts(parts, sample.ram_used, sample.ram_total, source=tip)
        self._legend.show_parts(parts)
        self._legend.setToolTip(tip)
        if held.device_total_bytes and not on_gpu:
            self._show_emulated_memory()
            return
        card = sample.gpus[0] if sample.gpus else None
        self._show_vram(card is not None and card.vram_total is not None)
        if card is not None and card.vram_total is not None and card.vram_used is not None:
            used = card.vram_used
            in_vram = (held.weights_bytes, held.device_experts_bytes, held.kv_bytes) if on_gpu else (0, 0, 0)
            ours = max(held.device_used_bytes, sum(in_vram)) if on_gpu else 0
            parts = self._parts(*in_vram, ours - sum(in_vram), used - ours)
            source = self.tr("VRAM in use and total: from the driver.")
            self._vram_bar.show_parts(parts, used, card.vram_total, source=source)

    def _show_emulated_memory(self) -> None:
        held = self._held
        total, used, experts, kv = (
            held.device_total_bytes,
            held.device_used_bytes,
            held.device_experts_bytes,
            held.kv_bytes,
        )
        self._show_vram(True)
        parts = self._parts(used - experts - kv, experts, kv, 0, 0)
        source = self.tr("Memory of the emulated graphics card: from the engine.")
        self._vram_bar.show_parts(parts, used, total, source=source)

    def _parts(self, weights: int, experts: int, kv: int, program: int, other: int) -> tuple[BarPart, ...]:
        model = self._client.model
        has_experts = model is None or model.experts > 0
        return (
            BarPart(self.tr("Model"), weights, "gpu"),
            *([BarPart(self.tr("Its experts"), experts, "hit")] if has_experts else ()),
            BarPart(self.tr("Chat memory"), kv, "disk"),
            BarPart(self.tr("Switchyard"), max(0, program), "faint"),
            BarPart(self.tr("Other programs"), max(0, other), "idle", hatched=True),
        )

    # --- the machine and the model ----------------------------------------------------------------

    def _on_hardware(self, profile: Probe) -> None:
        self._profile = profile
        cores = profile.physical_cores or profile.logical_cores or profile.usable_cpus
        name = _short_cpu_name(profile.cpu) if profile.cpu else profile.architecture
        counted = self.tr("1 core") if cores == 1 else self.tr("{0} cores", "", cores).format(cores)
        self._hardware.setText(f"{name} · {counted}")
        self._gpu = profile.gpus[0] if profile.gpus else None
        self._no_gpu.setText(self._gpu_line())
        self._no_gpu.setToolTip(profile.gpu_note)

    def _gpu_line(self) -> str:
        if self._gpu is None:
            return self.tr("No GPU in use")
        return self._gpu.name if self._on_gpu() else self.tr("{0}, not in use").format(self._gpu.name)

    def _on_gpu(self) -> bool:
        model = self._client.model
        return model is not None and model.device.startswith(CARD_NAMES)

    def _on_state(self, state: EngineState) -> None:
        if state in (EngineState.DIED, EngineState.STOPPED):
            self._held = _NOTHING
            self._show_memory()
        self._say_where()

    def _say_where(self, _info: ModelInfo | None = None) -> None:
        model = self._client.model
        if model is not None:
            device = model.device
            for name, said in (("cpu", "CPU"), *((card, "GPU") for card in CARD_NAMES)):
                device = device.replace(name, said)
            threads = (
                self.tr("1 thread")
                if model.threads == 1
                else self.tr("{0} threads", "", model.threads).format(model.threads)
            )
            tuned = " · " + self.tr("tuned") if model.is_tuned else ""
            text = f"{model.name}\n{device}, {threads} · {model.precision_words}{tuned}"
            self._where.setToolTip(model.device_note or self.tr("Where the model runs, as reported by the engine."))
        elif self._client.state is EngineState.LOADING:
            read = self._client.loading
            text = self.tr("Loading the model")
            if read is not None:
                text = self.tr("Loading the model, {0}%").format(round(100 * read))
        elif self._client.state is EngineState.STARTING:
            text = self.tr("Starting the engine")
        else:
            text = self.tr("No model loaded")
        self._where.setText(text)
        self._no_gpu.setText(self._gpu_line())


def _caption(parent: QWidget) -> QLabel:
    return text_label(parent, role="caption", wrap=True)


def _short_cpu_name(name: str) -> str:
    """Without vendors' trademark signs: `Intel(R) Xeon(R) CPU @ 2.60GHz` is `Intel Xeon`."""
    for mark in ("(R)", "(TM)", "(r)", "(tm)", "CPU", "Processor"):
        name = name.replace(mark, " ")
    return " ".join(name.split("@")[0].split())
