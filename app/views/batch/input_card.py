"""The form's input and output: the file and how it is read, who answers its rows, and the result's name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QCheckBox, QLineEdit, QWidget

from app.models.batch_rows import InputRowsModel
from app.services.batch_input import TEXT_SUFFIXES, InputPreview, free_output, usual_suffix
from app.views.batch.phrases import cluster_sent_text, host_text, sent_text
from app.widgets.asking import ask_path
from app.widgets.chip import ElidedLabel
from app.widgets.fields import ComboBox
from app.widgets.flow_layout import Flow
from app.widgets.quantities import SEPARATOR, count
from app.widgets.scaffold import (
    Card,
    add_items,
    hbox,
    line_edit,
    muted_label,
    push_button,
    set_message,
    text_label,
    vbox,
    warning_label,
)
from app.widgets.text_table import TextTable
from engine.batch_files.opening import InputForm
from engine.batch_files.result_file import OUTPUT_SUFFIXES
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
        return bool(self._endpoints) or self._ray_is_here

    @property
    def ray(self) -> str:
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
        return any(name != HERE for name in self.names)

    @property
    def needs_model(self) -> bool:
        return not self.names or HERE in self.names

    def set_endpoints(self, endpoints: Sequence[Endpoint]) -> None:
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


class OutputCard(Card):
    """Signals: `changed`, after every edit."""

    changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(self.tr("Result file"), parent)
        self._folder = Path()
        self.name = line_edit(self, self.tr("Name of the result file"))
        self.name.textEdited.connect(self._on_name)
        self.format = ComboBox(self, name=self.tr("File type"))
        for suffix in OUTPUT_SUFFIXES:
            self.format.addItem(suffix[1:], suffix)
        self.format.activated.connect(self._on_format)
        self._place = ElidedLabel(self, role="secondary")
        self.change = push_button(self, self.tr("Another folder…"), self._choose_folder)
        line = hbox((self.name, 1), self.format, self.change)
        into = text_label(self, self.tr("In"), role="secondary")
        where = hbox(into, (self._place, 1), gap=6)
        self._words = muted_label(self)
        add_items(self.body, line, where, self._words)

    def suggest(self, preview: InputPreview) -> None:
        suffix = ".jsonl" if preview.openai else usual_suffix(preview.path)
        output = free_output(preview.path, suffix)
        self._folder = output.parent
        self.name.setText(output.name)
        self.format.setEnabled(not preview.openai)
        self._words.setText(
            self.tr("In OpenAI's output format; rows that fail go into an error file beside it.")
            if preview.openai
            else self.tr(
                "Keeps the input's columns; adds the answer, how it ended, token counts and, for failed rows, why."
            )
        )
        self._show()

    @property
    def path(self) -> Path:
        return self._folder / self.name.text().strip()

    def problem(self) -> str:
        name = self.name.text().strip()
        if not name or name in (".", ".."):
            return self.tr("Name the result file.")
        if "/" in name or "\\" in name:
            return self.tr("The result file's name contains a slash: choose the folder beside it instead.")
        return ""

    def _show(self) -> None:
        index = self.format.findData(Path(self.name.text()).suffix.lower())
        self.format.setCurrentIndex(index)
        self._place.set_full_text(str(self._folder))
        self.changed.emit()

    def _on_name(self) -> None:
        self.format.setCurrentIndex(self.format.findData(Path(self.name.text().strip()).suffix.lower()))
        self.changed.emit()

    def _on_format(self) -> None:
        name = Path(self.name.text().strip() or "answers")
        known = name.suffix.lower() in OUTPUT_SUFFIXES
        self.name.setText(f"{name.stem if known else name.name}{self.format.currentData(Qt.ItemDataRole.UserRole)}")
        self.changed.emit()

    def _choose_folder(self) -> None:
        ask_path(self, self.tr("Folder of the result file"), self._take_folder, folder=True, start=str(self._folder))

    def _take_folder(self, folder: Path) -> None:
        self._folder = folder
        self._show()


_ENCODINGS = ("utf-8", "cp1252", "latin-1", "utf-16", "cp1251", "cp1250", "shift_jis", "gb18030", "euc_kr", "big5")
_SEPARATORS = (",", ";", "\t", "|")
SHORT, LEAST, MOST = 22, 26, 100
"""Characters: the most for a column shown in full, the least for others, the most for all before scrolling."""


class InputCard(Card):
    """Signals: `form_changed`, an `InputForm`; `change_wanted`, to choose another file."""

    form_changed = Signal(object)
    change_wanted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__("", parent)
        self._name = ElidedLabel(self, role="heading")
        self.head.replaceWidget(self.heading, self._name)
        self.heading.hide()
        self.change = push_button(self, self.tr("Another file…"), self.change_wanted)
        self.change.setProperty("compact", "true")
        self.head.addWidget(self.change)
        self._words = muted_label(self)
        self._trouble = warning_label(self)
        self._rows = InputRowsModel(self)
        self.table = TextTable(self._rows, self.tr("First rows of the file"), self)
        self.encoding = self._combo(self.tr("Encoding"))
        self.encoding.addItem(self.tr("Encoding: automatic"), None)
        for name in _ENCODINGS:
            self.encoding.addItem(name, name)
        self.separator = self._combo(self.tr("Separator"))
        self.separator.addItem(self.tr("Separator: automatic"), None)
        for sign in _SEPARATORS:
            self.separator.addItem(self.tr("tab") if sign == "\t" else sign, sign)
        self.sheet = self._combo(self.tr("Sheet"))
        self.whole_files = QCheckBox(self.tr("A text file is one row"), self)
        self.whole_files.setToolTip(self.tr("Otherwise each line is a row"))
        self.whole_files.clicked.connect(self._on_whole_files)
        self._are_whole: bool | None = None
        add_items(self.body, self._words, self._trouble, self.table)
        self._doubts = Flow(self.sheet, self.encoding, self.separator, self.whole_files, parent=self)
        self.body.addWidget(self._doubts)
        self._total: int | None = None
        self._preview: InputPreview | None = None

    def show_loading(self, name: str) -> None:
        self._name.set_full_text(name)
        self.caption.setText("")
        set_message(self._words, self.tr("Reading the file…"))
        set_message(self._trouble, "")
        self.table.hide()
        self._doubts.hide()

    def show_failure(self, path: Path, sentence: str) -> None:
        set_message(self._words, "")
        set_message(self._trouble, sentence)
        suffix = path.suffix.lower()
        self.encoding.setVisible(suffix in TEXT_SUFFIXES)
        self.separator.setVisible(suffix == ".csv")
        self.whole_files.hide()
        self.sheet.hide()
        self._doubts.setVisible(suffix in TEXT_SUFFIXES and path.is_file())

    def show_preview(self, preview: InputPreview) -> None:
        self._preview, self._total = preview, None
        self._name.set_full_text(preview.path.name)
        self.setAccessibleName(preview.path.name)
        self._rows.set_rows(preview.columns, preview.rows)
        self.table.setVisible(True)
        self._share_width(preview)
        self.table.show_rows(len(preview.rows))
        self.encoding.setVisible(preview.is_text)
        self.separator.setVisible(preview.is_delimited)
        self.whole_files.setVisible(preview.has_plain_text)
        self.whole_files.setChecked(preview.whole_files)
        self._show_sheets(preview)
        self._doubts.setVisible(preview.is_text or bool(preview.sheets))
        openai = self.tr(
            "An OpenAI batch file: rows have their own messages and settings; answers are in OpenAI's format."
        )
        set_message(self._words, openai if preview.openai else "")
        set_message(self._trouble, self._trouble_text(preview))
        self._show_facts()

    def show_total(self, total: int | None) -> None:
        self._total = total
        self._show_facts()

    def form(self) -> InputForm:
        return InputForm(
            self.encoding.currentData(), self._are_whole, self.separator.currentData(), self.sheet.currentData()
        )

    def reset_form(self) -> None:
        self.encoding.setCurrentIndex(0)
        self.separator.setCurrentIndex(0)
        self.sheet.clear()
        self._are_whole = None

    def _show_sheets(self, preview: InputPreview) -> None:
        self.sheet.setVisible(bool(preview.sheets))
        self.sheet.clear()
        for name in preview.sheets:
            self.sheet.addItem(self.tr("Sheet: {0}").format(name), name)
        self.sheet.setCurrentIndex(self.sheet.findData(preview.sheet))

    def _share_width(self, preview: InputPreview) -> None:
        """Short columns get the width they need, the others share the rest; too many columns scroll."""
        longest = [
            max([len(name), *(len(row[place]) for row in preview.rows)]) for place, name in enumerate(preview.columns)
        ]
        fixed = {place: max(5, length + 1) for place, length in enumerate(longest) if length <= SHORT}
        if len(fixed) == len(longest):
            del fixed[max(fixed, key=lambda place: fixed[place])]
        if sum(fixed.values()) + LEAST * (len(longest) - len(fixed)) > MOST:
            fixed = dict(enumerate(min(max(5, length + 1), LEAST) for length in longest))
        self.table.share_width(fixed)

    def _trouble_text(self, preview: InputPreview) -> str:
        if not preview.problem:
            return ""
        if "encoding" in preview.problem:
            return self.tr("Some rows are not valid text in this encoding: choose another below the table.")
        return self.tr("Some of the first rows cannot be answered: one {0}.").format(preview.problem)

    def _show_facts(self) -> None:
        preview = self._preview
        if preview is None:
            return
        columns = len(preview.columns)
        parts = [self.tr("1 column") if columns == 1 else self.tr("{0} columns", "", columns).format(count(columns))]
        if self._total is not None:
            rows = (
                self.tr("1 row")
                if self._total == 1
                else self.tr("{0} rows", "", self._total).format(count(self._total))
            )
            parts.insert(0, rows)
        self.caption.setText(SEPARATOR.join(parts))

    def _combo(self, name: str) -> ComboBox:
        combo = ComboBox(self, name=name)
        combo.setToolTip(name)
        combo.activated.connect(self._on_form)
        return combo

    def _on_whole_files(self) -> None:
        self._are_whole = self.whole_files.isChecked()
        self._on_form()

    def _on_form(self) -> None:
        self.form_changed.emit(self.form())
