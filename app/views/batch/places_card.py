"""Where the rows of a new job are answered: this PC, servers elsewhere, several together, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QCheckBox, QLineEdit, QWidget

from app.views.batch.phrases import cluster_sent_text, host_text, sent_text
from app.widgets.chip import ElidedLabel
from app.widgets.scaffold import Card, add_items, hbox, muted_label, set_message, vbox
from engine.common.config import HERE
from engine.remote.endpoint import Endpoint

AUTO = "auto"
"""The cluster that this PC belongs to."""


class PlacesCard(Card):
    """Shown where there is something to choose.  Signals: `changed`, after every choice."""

    changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(self.tr("Answered by"), parent)
        self._endpoints: tuple[Endpoint, ...] = ()
        self._boxes: list[tuple[str, QCheckBox]] = []
        self._lines: list[QWidget] = []
        self._list = vbox(gap=6)
        self.sent = muted_label(self)
        self.twice = QCheckBox(self.tr("Ask two for slow last rows"), self)
        self.twice.setToolTip(
            self.tr("Near the end, a row that one server is slow with is asked of another as well, which costs tokens.")
        )
        self.twice.toggled.connect(self.changed)
        self.column = QCheckBox(self.tr("Add a column that says who answered"), self)
        self.column.toggled.connect(self.changed)
        self.cluster = QCheckBox(self.tr("A Ray cluster at"), self)
        self.cluster.setToolTip(self.tr("Each of its nodes answers rows with the model that is loaded here."))
        self.cluster.toggled.connect(self._on_chosen)
        self.address = QLineEdit(AUTO, self)
        self.address.setAccessibleName(self.tr("Address of the Ray cluster"))
        self.address.setPlaceholderText(self.tr("auto, or 10.0.0.5:6379"))
        self.address.textChanged.connect(self._on_chosen)
        self._ray_is_here = False
        of_cluster = hbox(self.cluster, (self.address, 1))
        add_items(self.body, self._list, of_cluster, self.sent, self.twice, self.column)
        self.set_endpoints(())

    @property
    def is_offered(self) -> bool:
        """Whether there is more than this PC to choose."""
        return bool(self._endpoints) or self._ray_is_here

    @property
    def ray(self) -> str:
        """As `BatchJob.ray` has it: the cluster's address, or empty."""
        return self.address.text().strip() if self.cluster.isChecked() else ""

    def offer_cluster(self, offered: bool) -> None:
        self._ray_is_here = offered
        self.cluster.setChecked(self.cluster.isChecked() and offered)
        self._show()

    @property
    def names(self) -> tuple[str, ...]:
        """As `BatchJob.endpoints` has them: none if only this PC answers."""
        if self.cluster.isChecked():
            return ()
        chosen = tuple(name for name, box in self._boxes if box.isChecked())
        return () if chosen == (HERE,) else chosen

    @property
    def is_remote(self) -> bool:
        """Whether rows are sent to servers, which can be asked at once."""
        return any(name != HERE for name in self.names)

    @property
    def needs_model(self) -> bool:
        """Whether rows are answered by this PC's model: here, or on the nodes of a cluster."""
        return not self.names or HERE in self.names

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
        """Offers these; what was chosen before stays so, unless it is gone."""
        if self._boxes and tuple(endpoints) == self._endpoints:
            return
        chosen = {name for name, box in self._boxes if box.isChecked()} or {HERE}
        for line in self._lines:
            self._list.removeWidget(line)
            line.deleteLater()
        self._endpoints = tuple(endpoints)
        self._boxes, self._lines = [], []
        self._add(HERE, self.tr("This PC"), "", is_chosen=HERE in chosen)
        for each in self._endpoints:
            self._add(each.name, each.name, host_text(each), is_chosen=each.name in chosen)
        if not any(box.isChecked() for _name, box in self._boxes):
            self._boxes[0][1].setChecked(True)
        self._show()

    def _add(self, name: str, label: str, where: str, *, is_chosen: bool) -> None:
        line = QWidget(self)
        box, place = QCheckBox(label, line), ElidedLabel(line)
        box.setChecked(is_chosen)
        box.toggled.connect(self._on_chosen)
        box.setAccessibleDescription(where)
        place.setProperty("role", "secondary")
        place.set_full_text(where)
        hbox(box, (place, 1), into=line)
        self._list.addWidget(line)
        self._boxes.append((name, box))
        self._lines.append(line)

    def box(self, name: str) -> QCheckBox:
        return next(box for each, box in self._boxes if each == name)

    def problem(self) -> str:
        if self.cluster.isChecked():
            good = len(self.ray.split()) == 1
            return "" if good else self.tr("Give the address of the Ray cluster, or auto for the one of this PC.")
        return "" if any(box.isChecked() for _name, box in self._boxes) else self.tr("Choose who answers the rows.")

    def _on_chosen(self) -> None:
        self._show()
        self.changed.emit()

    def _show(self) -> None:
        chosen = [each for each in self._endpoints if self.box(each.name).isChecked()]
        on_cluster = self.cluster.isChecked()
        for _name, box in self._boxes:
            box.setEnabled(not on_cluster)
        self.cluster.setVisible(self._ray_is_here)
        self.address.setVisible(self._ray_is_here)
        self.address.setEnabled(on_cluster)
        set_message(self.sent, cluster_sent_text(self.ray) if on_cluster else sent_text(chosen))
        many = not on_cluster and len(chosen) + self.box(HERE).isChecked() > 1
        self.twice.setVisible(many)
        self.column.setVisible(many)
