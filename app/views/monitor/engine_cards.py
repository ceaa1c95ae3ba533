"""The cards below the timeline: experts, cache, token; policies and prefetching; memory and sensors."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QSize, Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import (
    QBoxLayout,
    QGridLayout,
    QLabel,
    QSizePolicy,
    QSpacerItem,
    QTableView,
    QVBoxLayout,
    QWidget,
)

from app.models.cache_figures import FREE, TokenFigures, memory_places, sound, token_figures
from app.services.engine_client import EngineClient
from app.services.session_library import OpenedSession
from app.services.telemetry_hub import TelemetryHub
from app.theme import ColourName, scaled, use_tabular_figures
from app.views.monitor.cache_card import CacheCard
from app.views.monitor.machine_card import MachineCard
from app.views.monitor.prediction_card import PoliciesCard, PredictionCard
from app.widgets.expert_map.data import MapData, map_data
from app.widgets.expert_map.view import ExpertMapView, ExpertTable, MapLegend
from app.widgets.fields import Slider
from app.widgets.memory_bar import BarPart, MemoryBar, MemoryGauge, MemoryLegend
from app.widgets.quantities import number, translate
from app.widgets.scaffold import STRETCH, Card, add_items, muted_label, push_button, text_label, vbox
from engine.common.errors import EngineError
from engine.hardware.sensors import SensorSample
from engine.protocol import CacheReport, ExpertMap

_COLUMN_DIGITS = (9, 10, 10, 8, 13, 10, 16)
"""Column widths in digits; a wider table scrolls."""


class ExpertCard(Card):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("ExpertCard", "Expert map"), parent)
        self.explain(
            self.tr(
                "A model like this has many small parts in each layer, called experts, and every token uses only a few "
                "of them. Each square is one expert: the stronger its colour, the more it is used; its pattern shows "
                "where it is stored."
            )
        )
        self.by_use = push_button(
            self,
            self.tr("By use"),
            kind="chip",
            checkable=True,
            tip=self.tr("Sort each layer's experts by use instead of by number"),
        )
        self.as_table = push_button(
            self,
            self.tr("Table"),
            kind="chip",
            checkable=True,
            tip=self.tr("The same experts as numbers, sorted by any column"),
            name=self.tr("Show the experts as a table"),
        )
        add_items(self.head, self.by_use, self.as_table)
        self.view = ExpertMapView(self)
        self.legend = MapLegend(self)
        self.table = self._make_table()
        self._hint = muted_label(self)
        add_items(self.body, (self.view, 1), (self.table, 1), self.legend, self._hint)
        self._room = QSpacerItem(0, 0)
        self.body.addItem(self._room)
        self.by_use.toggled.connect(self.view.sort_by_use)
        self.as_table.toggled.connect(lambda: self._show_parts())
        self._event: ExpertMap | None = None
        self._data: MapData | None = None
        self._replayed: list[tuple[int, ExpertMap]] | None = None
        self.replay = Slider(self, name=self.tr("Time in the recorded session"))
        self.replay.setToolTip(self.tr("Scrubs through the session's maps"))
        self.replay.valueChanged.connect(self._show_replayed)
        self.replay.hide()
        self.body.insertWidget(3, self.replay)
        self.show_event(None)

    def show_recording(self, maps: list[tuple[int, ExpertMap]] | None) -> None:
        self._replayed = maps
        self.replay.setVisible(bool(maps) and len(maps or ()) > 1)
        if maps is not None:
            self.replay.setRange(0, max(0, len(maps) - 1))
            self.replay.setValue(len(maps) - 1)
            self._show_replayed()

    def _show_replayed(self) -> None:
        if self._replayed is not None:
            self._show(self._replayed[self.replay.value()][1] if self._replayed else None)

    def show_event(self, event: ExpertMap | None) -> None:
        if self._replayed is None:
            self._show(event)

    def _show(self, event: ExpertMap | None) -> None:
        if event is not None and event is self._event:
            return
        self._event = event
        data: MapData | None = None
        if event is not None:
            try:
                data = map_data(event)
            except EngineError:
                data = None
        self._data = data
        self.view.show_data(data)
        self.legend.show_data(data)
        self._show_parts()
        if data is None:
            self.caption.setText("")
            self._hint.setText(self.tr("Load a model with experts and ask something: each square is an expert."))
            return
        rows, columns = data.shape
        self.caption.setText(self.tr("{0} × {1}").format(rows, columns))
        self.caption.setToolTip(self.tr("{0} layers with {1} experts each").format(rows, columns))
        self.caption.setAccessibleName(self.caption.toolTip())

    def _show_parts(self) -> None:
        data, as_table = self._data, self.as_table.isChecked()
        self.experts.show_data(data if as_table else None)
        self.view.setVisible(data is not None and not as_table)
        self.table.setVisible(data is not None and as_table)
        self.legend.setVisible(data is not None and not as_table)
        self._hint.setVisible(data is None)
        self._room.changeSize(0, 0, QSizePolicy.Policy.Minimum, _growing(data is None))
        self.body.invalidate()
        self.by_use.setVisible(data is not None and not as_table)
        self.as_table.setVisible(data is not None)

    def _make_table(self) -> QTableView:
        table = QTableView(self)
        self.experts = ExpertTable(self)
        table.setModel(self.experts)
        table.setAccessibleName(self.tr("Experts as a table"))
        table.verticalHeader().hide()
        table.verticalHeader().setDefaultSectionSize(24)
        wide = table.fontMetrics().horizontalAdvance("0")
        for column, digits in enumerate(_COLUMN_DIGITS):  # no resizing to contents: there may be 60,000 rows
            table.setColumnWidth(column, digits * wide)
        table.horizontalHeader().setStretchLastSection(True)
        table.horizontalHeader().setSortIndicator(0, Qt.SortOrder.AscendingOrder)
        table.setSortingEnabled(True)
        table.setEditTriggers(QTableView.EditTrigger.NoEditTriggers)
        table.setSelectionBehavior(QTableView.SelectionBehavior.SelectRows)
        table.setMinimumHeight(160)
        return table


def _growing(grows: bool) -> QSizePolicy.Policy:
    return QSizePolicy.Policy.Expanding if grows else QSizePolicy.Policy.Fixed


_NOTHING = "–"
_SWATCH = QSize(10, 10)
_PARTS = 1000
_KINDS = ("hit", "fetched", "cpu")


class TokenCard(Card):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("TokenCard", "Per token"), parent)
        self.explain(
            self.tr(
                "What one token, a word or a part of one, costs on average. Of the experts that it used, a hit was "
                "already in the graphics card’s memory; a miss was fetched or computed on the processor."
            )
        )
        self.bar = MemoryBar(self)
        self.bar.setFixedHeight(_SWATCH.height())
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(8)
        self._grid.setVerticalSpacing(6)
        self._grid.setColumnStretch(1, 1)
        self._names: dict[str, str] = {}
        self._rows: dict[str, list[QWidget]] = {}
        self.values: dict[str, QLabel] = {}
        self._add_row("used", self.tr("Experts used"))
        self._grid.addWidget(self.bar, 1, 0, 1, 3)
        self._add_row("hit", self.tr("in VRAM (hit)"))
        self._add_row("fetched", self.tr("fetched (miss)"))
        self._add_row("cpu", self.tr("on the CPU"))
        self._add_row("took", self.tr("Time"))
        self._add_row("moved", self.tr("To the GPU"))
        self._add_row("read", self.tr("From disk"))
        self._add_row("energy", self.tr("Energy"))
        self._note = muted_label(self)
        add_items(self.body, self._grid, STRETCH, self._note)
        self.show_figures(None, None)

    def show_experts(self, has_experts: bool) -> None:
        for key in ("used", *_KINDS):
            for widget in self._rows[key]:
                widget.setVisible(has_experts)
        self.bar.setVisible(has_experts)

    def show_figures(self, figures: TokenFigures | None, watts: float | None) -> None:
        texts = dict.fromkeys(self.values, _NOTHING)
        shares = (0.0, 0.0, 0.0)
        if figures is not None:
            shares = figures.experts["hit"], figures.experts["fetched"], figures.experts["cpu"]
            texts |= {kind: _count(figures.experts[kind]) for kind in _KINDS}
            texts["used"] = _count(figures.used)
            texts["took"] = self.tr("{0} ms").format(number(1000 * figures.took_s, 1))
            texts["moved"], texts["read"] = _moved(figures.h2d_bytes), _moved(figures.disk_bytes)
        if figures is not None and figures.joules is not None:
            texts["energy"] = self.tr("{0} J").format(number(figures.joules, 2 if figures.joules < 10 else 1))
        elif watts is None:
            texts["energy"] = self.tr("not available here")
        self.bar.show_parts(_parts(*shares), _PARTS)
        for key, label in self.values.items():
            label.setText(texts[key])
            label.setAccessibleName(f"{self._names[key]}: {texts[key]}")
        self.values["energy"].setToolTip(
            self.tr("Neither a graphics card nor the processor reports its power here (NVML, RAPL).")
            if watts is None
            else self.tr("Power as graphics cards and processors report it, over the tokens' time; now {0} W.").format(
                number(watts, 0)
            )
        )
        self._note.setVisible(figures is not None)
        if figures is not None:
            words = self.tr("Mean of the last {0} tokens")
            if figures.is_batch:
                words = self.tr("Mean of the last {0} batch tokens, {1} per step")
            each = number(figures.tokens / max(figures.steps, 1), 0)
            self._note.setText(words.format(number(figures.tokens, 0), each))

    def _add_row(self, key: str, text: str) -> None:
        name = text_label(self, text)
        value = text_label(self)
        for label in (name, value):
            label.setProperty("role", "secondary")
        use_tabular_figures(value)
        row = self._grid.rowCount() + 1  # the bar is below the first
        self._rows[key] = [name, value]
        if key in _KINDS:
            swatch = MemoryBar(self)
            swatch.setFixedSize(_SWATCH)
            swatch.show_parts(_parts(*(float(kind == key) for kind in _KINDS)), _PARTS)
            self._rows[key].append(swatch)
            self._grid.addWidget(swatch, row, 0)
            self._grid.addWidget(name, row, 1)
        else:
            row = 0 if key == "used" else row
            self._grid.addWidget(name, row, 0, 1, 2)
        self._grid.addWidget(value, row, 2, Qt.AlignmentFlag.AlignRight)
        self._names[key] = text
        self.values[key] = value


def _parts(hit: float, fetched: float, on_cpu: float) -> tuple[BarPart, ...]:
    scale = _PARTS / ((hit + fetched + on_cpu) or 1.0)
    return (
        BarPart("", round(scale * hit), "hit"),
        BarPart("", round(scale * fetched), "pcie", hatched=True, falls=True),
        BarPart("", round(scale * on_cpu), "miss", hatched=True),
    )


def _count(value: float) -> str:
    return number(value, 0 if value >= 100 or value == round(value) else 1)


def _moved(nbytes: float) -> str:
    mib = nbytes / 2**20
    amount = number(mib, 0 if mib >= 100 or not mib else 1 if mib >= 1 else 2)
    return translate("Fit", "{0} MB").format(amount)


_RAM, _DISK = "ram", "disk"


class MemoryCard(Card):
    """A bar per place with named parts; counted by the engine as far as it can, the rest reported by the system."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("MemoryCard", "Memory"), parent)
        self.explain(
            self.tr(
                "What fills the computer's memory and its graphics card's. Weights and experts are the model itself; "
                "KV (keys and values) is what it remembers of the conversation, and grows with its length. Kept "
                "context is that of other conversations, which go on at once with it."
            )
        )
        self._column = vbox(gap=6)
        self.body.addLayout(self._column)
        self._empty = muted_label(self, self.tr("Shows a model's memory once one is loaded."))
        add_items(self.body, self._empty, STRETCH)
        self._places: dict[str, tuple[MemoryGauge, MemoryLegend]] = {}
        self._shown: tuple[CacheReport | None, int | None, int | None] = None, None, None

    def show_report(
        self, report: CacheReport | None, ram_used: int | None = None, ram_total: int | None = None
    ) -> None:
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
            add_items(self._column, *widgets, 6)
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


_WIDE_PX = 780
"""Below this width the cards are stacked."""

_SHARES, _SHARES_WITHOUT_CACHE = (42, 38, 20), (50, 25, 25)


class EngineCards(QWidget):
    def __init__(
        self,
        client: EngineClient,
        hub: TelemetryHub,
        experts: ExpertCard,
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(parent)
        self._client, self._hub, self._experts = client, hub, experts
        self._session: OpenedSession | None = None
        self.cache = CacheCard(self)
        self.token = TokenCard(self)
        self.policies = PoliciesCard(self)
        self.prediction = PredictionCard(self)
        self.memory = MemoryCard(self)
        self.machine = MachineCard(self)
        self._revision = -1
        self._rows: list[QBoxLayout] = []
        column = vbox(into=self, gap=14)
        column.setSizeConstraint(QVBoxLayout.SizeConstraint.SetNoConstraint)  # so that the window can get narrower
        first = tuple(zip((experts, self.cache, self.token), _SHARES, strict=True))
        rows = (first, ((self.policies, 1), (self.prediction, 1)), ((self.memory, 1), (self.machine, 1)))
        for cards in rows:
            row = QBoxLayout(QBoxLayout.Direction.LeftToRight)
            row.setSpacing(14)
            for card, share in cards:
                row.addWidget(card, share)
            column.addLayout(row, 1 if cards is first else 0)
            self._rows.append(row)
        self.cache.resize_wanted.connect(client.resize_cache)
        experts.replay.valueChanged.connect(self._show_moment)

    def refresh(self) -> None:
        hub = self._hub
        if self._session is not None:
            return
        self._show_experts(self._client.model is None or self._client.model.experts > 0)
        sample = hub.sample
        used, total = (sample.ram_used, sample.ram_total) if sample is not None else (None, None)
        free = max(0, total - used) if used is not None and total is not None else None
        self.cache.show_report(hub.report, free)
        self._show_rest(hub.report, used, total)
        self.machine.show_sample(sample)
        if hub.history is not None and hub.history.revision != self._revision:
            self._revision = hub.history.revision
            self.token.show_figures(token_figures(hub.history), _watts(sample))

    def show_session(self, session: OpenedSession) -> None:
        """Shows an opened session instead of live data; the map's slider chooses the moment."""
        self._session = session
        self.machine.hide()  # sessions have sensor data in the timeline only
        self._show_experts(bool(session.maps) or session.history.has_experts)
        self._show_moment()

    def show_live(self) -> None:
        self._session = None
        self.machine.show()
        self.cache.is_recorded = False
        self.cache.show_report(None)
        self._revision = -1
        self.refresh()

    def _show_experts(self, has_experts: bool) -> None:
        """What is about experts only; a dense model has none."""
        self._experts.setVisible(has_experts)
        self.cache.setVisible(has_experts)
        self.token.show_experts(has_experts)

    def _show_moment(self, *_place: int) -> None:
        session = self._session
        if session is None:
            return
        maps, place = session.maps, self._experts.replay.value()
        until_ns = maps[place][0] if place < len(maps) - 1 else None
        reports = [report for at_ns, report in session.reports if until_ns is None or at_ns <= until_ns]
        self.cache.show_past(reports)
        self._show_rest(reports[-1] if reports else None, None, None)
        self.token.show_figures(token_figures(session.history, until_ns), None)

    def _show_rest(self, report: CacheReport | None, ram_used: int | None, ram_total: int | None) -> None:
        shares = _SHARES if report is not None and report.tiers else _SHARES_WITHOUT_CACHE
        for card, share in zip((self._experts, self.cache, self.token), shares, strict=True):
            self._rows[0].setStretchFactor(card, share)
        self.policies.show_report(report)
        self.prediction.show_report(report)
        self.memory.show_report(report, ram_used, ram_total)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._turn()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.FontChange:
            self._turn()

    def minimumSizeHint(self) -> QSize:
        """As wide as the widest card: below that width the cards are stacked."""
        whole = super().minimumSizeHint()
        widest = max(card.minimumSizeHint().width() for row in self._rows for card in _shown(row))
        return QSize(min(whole.width(), widest), whole.height())

    def _turn(self) -> None:
        for row in self._rows:
            needed = sum(card.minimumSizeHint().width() + row.spacing() for card in _shown(row))
            is_wide = self.width() >= max(needed, scaled(_WIDE_PX))
            wanted = QBoxLayout.Direction.LeftToRight if is_wide else QBoxLayout.Direction.TopToBottom
            if row.direction() != wanted:
                row.setDirection(wanted)


def _shown(row: QBoxLayout) -> list[QWidget]:
    items = [row.itemAt(place) for place in range(row.count())]
    cards = [item.widget() for item in items if item is not None]
    return [card for card in cards if card is not None and not card.isHidden()]


def _watts(sample: SensorSample | None) -> float | None:
    if sample is None:
        return None
    known = [power for power in (*(gpu.power_w for gpu in sample.gpus), sample.cpu_power_w) if power is not None]
    return float(sum(known)) if known else None
