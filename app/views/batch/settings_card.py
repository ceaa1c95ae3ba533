"""A job's template and settings."""

from __future__ import annotations

import html
import re

from PySide6.QtCore import QEvent, Qt
from PySide6.QtWidgets import QGridLayout, QLabel, QWidget

from app.services.batch_job import JobEntry
from app.theme import colours
from app.widgets.chip import ElidedLabel
from app.widgets.quantities import count, number
from app.widgets.scaffold import STRETCH, Card, add_items, text_label
from engine.common.config import HERE
from engine.remote.endpoint import named_at

_PLACE = re.compile(r"\{\{.+?\}\}")
_PLACE_NAME = re.compile(r"\{\{\s*(.+?)\s*\}\}")
_MOST_CHARACTERS = 600


class SharedSettingsCard(Card):
    """Read-only: all answers of a job come from the same settings."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self.set_heading(self.tr("Template"))
        self._entry: JobEntry | None = None
        self._template = text_label(self, wrap=True)
        self._template.setTextFormat(Qt.TextFormat.RichText)
        self._template.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self._template.setObjectName("templateText")
        self._grid = QGridLayout()
        self._grid.setHorizontalSpacing(12)
        self._grid.setVerticalSpacing(6)
        self._grid.setColumnStretch(1, 1)
        add_items(self.body, self._template, self._grid, STRETCH)
        self._values: list[ElidedLabel] = []
        for row, name in enumerate(
            (
                self.tr("Input"),
                self.tr("Result"),
                self.tr("Model"),
                self.tr("Sent to"),
                self.tr("Max tokens"),
                self.tr("Temperature"),
                self.tr("Answer must be"),
                self.tr("System prompt"),
            )
        ):
            label, value = QLabel(name, self), ElidedLabel(self)
            label.setProperty("role", "secondary")
            value.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
            self._grid.addWidget(label, row, 0)
            self._grid.addWidget(value, row, 1)
            self._values.append(value)

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange and self._entry is not None:
            self.show_job(self._entry)  # the columns' colour is part of the HTML

    def show_job(self, entry: JobEntry) -> None:
        self._entry = entry
        job = entry.job
        text = job.template or self.tr("Each row's own messages")
        if job.image_column and job.image_column not in _PLACE_NAME.findall(text):
            text = f"{{{{{job.image_column}}}}}\n{text}"  # which is before the text
        shown = html.escape(text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…")
        colour = colours().accent_text
        marked = _PLACE.sub(lambda match: f'<span style="color: {colour}">{match[0]}</span>', shown)
        self._template.setText(marked.replace("\n", "<br>"))
        if job.schema:
            must_be = self.tr("JSON with a schema")
        elif job.choices:
            must_be = self.tr("one of {0}").format(", ".join(job.choices))
        else:
            must_be = self.tr("text")
        temperature = job.sampling.temperature
        values = (
            job.input,
            job.output,
            self._model_text(entry),
            self._sent_text(entry),
            count(job.sampling.max_tokens),
            self.tr("0 (the likeliest token)") if temperature == 0 else number(temperature, 2),
            must_be,
            job.system or self.tr("none"),
        )
        for label, value in zip(self._values, values, strict=True):
            label.set_full_text(value if label not in self._values[:2] else _name(value))
            if label in self._values[:2]:
                label.setToolTip(value)

    def _model_text(self, entry: JobEntry) -> str:
        if entry.job.is_remote and not entry.job.ray:
            return self.tr("the servers' own")
        return _name(entry.model) or self.tr("the loaded one")

    def _sent_text(self, entry: JobEntry) -> str:
        if not entry.job.is_remote:
            return self.tr("nobody: answered on this PC")
        if entry.job.ray:
            return self.tr("the Ray cluster at {0}").format(entry.job.ray)
        hosts = [named_at(place.name, place.host) for place in entry.places if place.host]
        return ", ".join(hosts or (name for name in entry.job.endpoints if name != HERE))


def _name(path: str) -> str:
    return path.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
