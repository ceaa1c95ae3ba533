"""Memory by place and purpose: bars whose parts add up to the total."""

from __future__ import annotations

from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.models.cache_figures import FREE, memory_places, sound
from app.theme import ColourName
from app.widgets.card import Card, muted_label
from app.widgets.memory_bar import BarPart
from app.widgets.memory_gauge import MemoryGauge, MemoryLegend
from engine.telemetry.messages import CacheReport

_RAM, _DISK = "ram", "disk"


class MemoryCard(Card):
    """A bar per place with named parts; counted by the engine as far as it can, the rest reported by the system."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.heading.setText(self.tr("Memory"))
        self.setAccessibleName(self.tr("Memory"))
        self.explain(
            self.tr(
                "What fills the computer's memory and its graphics card's. Weights and experts are the model itself; "
                "KV (keys and values) is what it remembers of the conversation, and grows with its length. Kept "
                "context is that of other conversations, which go on at once with it."
            )
        )
        self._column = QVBoxLayout()
        self._column.setSpacing(6)
        self.body.addLayout(self._column)
        self._empty = muted_label(self, self.tr("Shows a model's memory once one is loaded."))
        self.body.addWidget(self._empty)
        self.body.addStretch(1)
        self._places: dict[str, tuple[MemoryGauge, MemoryLegend]] = {}
        self._shown: tuple[CacheReport | None, int | None, int | None] = None, None, None

    def show_report(
        self, report: CacheReport | None, ram_used: int | None = None, ram_total: int | None = None
    ) -> None:
        """The latest report; None while no engine runs.

        Args:
            ram_used, ram_total: bytes of the machine's RAM, of all programs, if known.
        """
        if self._shown != (report, ram_used, ram_total):
            self._shown = report, ram_used, ram_total
            self._show()

    def _show(self) -> None:
        report, ram_used, ram_total = self._shown
        places = memory_places(sound(report).memory) if report is not None else {}
        for place, (gauge, legend) in self._places.items():
            gauge.setVisible(place in places)
            legend.setVisible(place in places)
        for place, (amounts, engine_total) in places.items():
            gauge, legend = self._place(place)
            amounts, total = dict(amounts), engine_total
            if place == _RAM and ram_total is not None and ram_used is not None and ram_total >= engine_total:
                amounts[FREE] = max(0, ram_total - max(ram_used, engine_total))
                amounts["others"] = ram_total - amounts[FREE] - engine_total
                total = ram_total
            free = amounts.pop(FREE)
            parts = tuple(self._part(purpose, nbytes) for purpose, nbytes in amounts.items() if nbytes > 0)
            source = {
                _RAM: self.tr("Parts of the model: counted by the engine. Total RAM: reported by the system."),
                _DISK: self.tr("Computed context of chats, of all models, of what it may take (see Settings)."),
            }.get(place, self.tr("Counted by the engine, of the memory it may use."))
            gauge.show_parts(parts, total - free, total, source=source)
            legend.show_parts((*parts, BarPart(self.tr("free"), free, "border")))
        self._empty.setVisible(not places)

    def _place(self, place: str) -> tuple[MemoryGauge, MemoryLegend]:
        if place not in self._places:
            widgets = MemoryGauge(self._name(place), self), MemoryLegend(self)
            for widget in widgets:
                self._column.addWidget(widget)
            self._column.addSpacing(6)
            self._places[place] = widgets
        return self._places[place]

    def _name(self, place: str) -> str:
        if place == _RAM:
            return self.tr("RAM")
        if place == _DISK:
            return self.tr("Disk")
        return self.tr("VRAM (emulated)") if place.startswith("emulated") else self.tr("VRAM {0}").format(place[:24])

    def _part(self, purpose: str, nbytes: int) -> BarPart:
        names: dict[str, tuple[str, ColourName, bool]] = {
            "weights": (self.tr("weights"), "gpu", False),
            "experts": (self.tr("experts"), "hit", False),
            "kv": (self.tr("conversation (KV)"), "disk", False),
            "kept": (self.tr("kept context"), "accent", False),
            "staging": (self.tr("staging"), "pcie", False),
            "activations": (self.tr("activations"), "cpu", False),
            "pictures": (self.tr("reading pictures"), "accent", True),
            "other": (self.tr("the engine itself"), "faint", False),
            "others": (self.tr("window and other programs"), "idle", True),
        }
        name, colour, hatched = names.get(purpose, (purpose[:40], "faint", True))
        return BarPart(name, nbytes, colour, hatched)
