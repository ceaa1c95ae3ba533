"""What a decoded token costs: experts by how they were served, time, bytes, and energy."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt
from PySide6.QtWidgets import QGridLayout, QLabel, QWidget

from app.models.token_figures import TokenFigures
from app.theme import use_tabular_figures
from app.widgets.memory_bar import BarPart, MemoryBar
from app.widgets.quantities import number, translate
from app.widgets.scaffold import Card, muted_label, text_label

_NOTHING = "–"
_SWATCH = QSize(10, 10)
_PARTS = 1000
"""Of the bar."""
_KINDS = ("hit", "fetched", "cpu")


class TokenCard(Card):
    """Means over the last tokens; unknown values are dashes, unavailable ones say so."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.heading.setText(self.tr("Per token"))
        self.setAccessibleName(self.tr("Per token"))
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
        self.body.addLayout(self._grid)
        self.body.addStretch(1)
        self.body.addWidget(self._note)
        self.show_figures(None, None)

    def show_figures(self, figures: TokenFigures | None, watts: float | None) -> None:
        """Shows new figures.

        Args:
            figures: None while nothing has been decoded.
            watts: present power of cards and processors, if reported.
        """
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
        if key in _KINDS:
            swatch = MemoryBar(self)
            swatch.setFixedSize(_SWATCH)
            swatch.show_parts(_parts(*(float(kind == key) for kind in _KINDS)), _PARTS)
            self._grid.addWidget(swatch, row, 0)
            self._grid.addWidget(name, row, 1)
        else:
            row = 0 if key == "used" else row
            self._grid.addWidget(name, row, 0, 1, 2)
        self._grid.addWidget(value, row, 2, Qt.AlignmentFlag.AlignRight)
        self._names[key] = text
        self.values[key] = value


def _parts(hit: float, fetched: float, on_cpu: float) -> tuple[BarPart, ...]:
    """Shares of their sum, in the colours and hatching that the timeline has for them."""
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
