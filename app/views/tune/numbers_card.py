"""The measured numbers, listed as they come in."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QGridLayout, QLabel, QWidget

from app.theme import use_tabular_figures
from app.views.tune.machine_boxes import Found
from app.views.tune.phrases import measured_name, number_words
from app.widgets.scaffold import Card, muted_label
from engine.hardware.machine import Origin
from engine.hardware.measured import Measurements
from engine.hardware.other_programs import is_busy
from engine.tuning.machine_state import MachineLook
from engine.tuning.messages import Measured, TuningNumber
from engine.tuning.result import busy_note
from engine.tuning.saved_results import day

_ORDER: tuple[Measured, ...] = (
    "ram", "cpu_experts", "cpu_flops", "gpu_memory", "gpu_experts", "gpu_flops", "h2d", "d2h", "disk",
)  # fmt: skip


class NumbersCard(Card):
    """Shows an earlier run's saved numbers, or those of the current run."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.set_heading(self.tr("Measurements"))
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(12)
        self._grid.setVerticalSpacing(6)
        self._grid.setColumnStretch(0, 1)
        self._rows: dict[str, tuple[QLabel, QLabel]] = {}
        self.words = muted_label(self)
        self.body.addWidget(self.words)
        self.body.addLayout(self._grid)
        self.notes = muted_label(self)
        self.body.addWidget(self.notes)
        self.body.addStretch(1)

    def show_kept(self, look: MachineLook) -> None:
        """The numbers known of this machine."""
        measured = look.measurements
        if measured is None:
            self.words.setText(
                self.tr(
                    "Not measured yet. Numbers with “about” are assumed, from data sheets of similar hardware; "
                    "measuring takes ten seconds."
                )
            )
            self._show({})
            self._show_notes(())
            return
        kind = self.tr("quick") if measured.kind == "quick" else self.tr("thorough")
        self.words.setText(self.tr("Measured on {0}, {1}. The best of each kind:").format(day(measured.taken_at), kind))
        self._show(best_numbers(look, measured))
        names: dict[str, list[str]] = {}
        for name, why in measured.skipped.items():
            names.setdefault(why, []).append(name)
        skipped = [self.tr("Skipped: {0} ({1}).").format(", ".join(left), why) for why, left in names.items()]
        unsteady = [
            self.tr("{0} varied by {1}% in every repeat.").format(name, round(100 * by))
            for name, by in measured.unsteady.items()
        ]
        busy = (busy_note(measured.others),) if is_busy(measured.others) else ()
        self._show_notes((*busy, *measured.notes, *unsteady, *skipped))

    def show_found(self, found: Found) -> None:
        """The numbers measured so far."""
        self.words.setText(
            self.tr("Each is measured several times; the best of each kind so far:")
            if found
            else self.tr("Numbers appear here as they are measured.")
        )
        self._show(
            {measured_name(what): (number_words(found[what]), found[what].detail) for what in _ORDER if what in found}
        )
        self._show_notes(())

    def _show_notes(self, notes: tuple[str, ...]) -> None:
        self.notes.setText("\n".join(notes))
        self.notes.setVisible(bool(notes))

    def _show(self, numbers: dict[str, tuple[str, str]]) -> None:
        for name in [name for name in self._rows if name not in numbers]:
            for label in self._rows.pop(name):
                self._grid.removeWidget(label)
                label.hide()
                label.deleteLater()
        for at, (name, (value, detail)) in enumerate(numbers.items()):
            if name not in self._rows:
                self._rows[name] = (QLabel(name, self), QLabel(self))
                use_tabular_figures(self._rows[name][1])
                self._rows[name][1].setAlignment(Qt.AlignmentFlag.AlignRight)
            left, right = self._rows[name]
            right.setText(value)
            for label in (left, right):
                label.setToolTip(detail)
                label.setAccessibleDescription(detail)
            self._grid.addWidget(left, at, 0)
            self._grid.addWidget(right, at, 1)


def best_numbers(look: MachineLook, measured: Measurements) -> dict[str, tuple[str, str]]:
    """(value, detail) of the best measured number of each kind, by its name."""
    profile = look.profile
    paths: tuple[tuple[Measured, str, float, str], ...] = (
        ("ram", "cpu.ram_bytes_per_s", profile.cpu.ram_bytes_per_s, "bytes/s"),
        ("cpu_experts", "cpu.weights_bytes_per_s", max(profile.cpu.weights_bytes_per_s.values(), default=0), "bytes/s"),
        ("cpu_flops", "cpu.flops", profile.cpu.flops, "flop/s"),
        ("gpu_memory", "gpu.bytes_per_s", profile.gpu.bytes_per_s if profile.gpu else 0, "bytes/s"),
        ("gpu_flops", "gpu.flops", profile.gpu.flops if profile.gpu else 0, "flop/s"),
        ("h2d", "link.h2d", profile.link.h2d, "bytes/s"),
        ("d2h", "link.d2h", profile.link.d2h, "bytes/s"),
        ("disk", "disk_bytes_per_s", profile.disk_bytes_per_s, "bytes/s"),
    )
    found = {}
    for what, path, value, unit in paths:
        if value and profile.origins.get(path) is Origin.MEASURED:
            number = TuningNumber(what, "", value, "flop/s" if unit == "flop/s" else "bytes/s")
            found[measured_name(what)] = (number_words(number), day(measured.taken_at))
    return found
