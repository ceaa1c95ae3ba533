"""What is on this PC: the models, what is known of the chosen one, and what can be done with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PySide6.QtCore import QModelIndex, QPersistentModelIndex, QPoint, QRectF, QSize, Qt, QUrl, Signal
from PySide6.QtGui import QAction, QDesktopServices, QFont, QFontMetricsF, QKeyEvent, QPainter
from PySide6.QtWidgets import (
    QDialog,
    QListWidget,
    QMenu,
    QProgressBar,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QWidget,
)

from app.models.library import ROW_ROLE, Column, LibraryTable, ModelRow
from app.services.background import TaskQueue, sentence_of
from app.services.library import Work
from app.theme import themed, use_tabular_figures
from app.views.models.phrases import (
    abilities_of,
    able_choices,
    also_words,
    cell_words,
    marks,
    model_facts,
    model_text,
    speed_sentence,
    work_words,
)
from app.widgets.asking import ask_path
from app.widgets.chip import ElidedLabel, draw_pills, pills_width, small_font
from app.widgets.fields import ComboBox
from app.widgets.flow_layout import Flow
from app.widgets.page import native, note_keys
from app.widgets.quantities import SEPARATOR, file_size, translate
from app.widgets.scaffold import STRETCH, Card, hbox, muted_label, push_button, set_message, vbox, warning_label
from app.widgets.text_table import TextTable
from engine.checkpoint.library import LibraryEntry
from engine.checkpoint.model_directories import add_model_folder, drop_model_folder, model_folders


class FoldersDialog(QDialog):
    """Folders are added and dropped in the background: one on a network that does not answer takes long to look at.

    Signals: `changed`, when a folder was added or dropped.
    """

    changed = Signal()

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self.setWindowTitle(self.tr("Model folders"))
        self._changes = TaskQueue(self)
        words = muted_label(
            self,
            self.tr(
                "Models in these folders are listed and used where they lie. The Models page asks which of them a "
                "download goes into. Those of LM Studio, Ollama, Jan, GPT4All and the hub's own cache are found "
                "automatically."
            ),
        )
        self.list = QListWidget(self)
        self.list.setAccessibleName(self.tr("Model folders"))
        self.list.setTextElideMode(Qt.TextElideMode.ElideMiddle)
        self.trouble = warning_label(self)
        self.add = push_button(self, self.tr("Add a folder…"), self._ask)
        self.drop = push_button(self, self.tr("Remove from list"), self._drop)
        self.open_ = push_button(self, self.tr("Open"), self._open)
        close = push_button(self, self.tr("Close"), self.accept)
        vbox(
            words,
            self.list,
            self.trouble,
            hbox(self.add, self.drop, self.open_, STRETCH, close, gap=-1),
            into=self,
            margins=(20, 18, 20, 18),
            gap=10,
        )
        self.resize(560, 320)
        self.list.currentRowChanged.connect(lambda _at: self._show_buttons())
        self.finished.connect(lambda _result: self._delete_when_idle())
        self._show(model_folders())

    def add_folder(self, folder: Path) -> None:
        self._change(lambda: add_model_folder(folder))

    def _ask(self) -> None:
        ask_path(self, self.tr("Folder with models"), self.add_folder, folder=True)

    def _drop(self) -> None:
        item = self.list.currentItem()
        if item is not None:
            folder = Path(item.text())
            self._change(lambda: drop_model_folder(folder))

    def _open(self) -> None:
        item = self.list.currentItem()
        if item is not None:
            QDesktopServices.openUrl(QUrl.fromLocalFile(item.text()))

    def _change(self, change: Callable[[], tuple[Path, ...]]) -> None:
        set_message(self.trouble, "")
        self._changes.add(change, self._on_changed, self._on_failed)
        self._show_buttons()

    def _on_changed(self, folders: tuple[Path, ...]) -> None:
        self._show(folders)
        self.changed.emit()
        self._delete_when_idle()

    def _on_failed(self, error: Exception) -> None:
        self._show_buttons()
        self._delete_when_idle()
        set_message(self.trouble, sentence_of(error))

    def _delete_when_idle(self) -> None:
        """A change that goes on when the dialog is closed is still reported."""
        if self.isHidden() and not self._changes.is_busy:
            self.deleteLater()

    def _show_buttons(self) -> None:
        self.add.setEnabled(not self._changes.is_busy)
        self.drop.setEnabled(not self._changes.is_busy and self.list.currentRow() > 0)

    def _show(self, folders: tuple[Path, ...]) -> None:
        self.list.clear()
        self.list.addItems([str(folder) for folder in folders])
        self.list.setCurrentRow(0)
        self._show_buttons()


LEAST_ROWS, MOST_ROWS = 2, 7
_WIDTHS: dict[int, int] = {Column.ORIGIN: 9, Column.SIZE: 8, Column.PRECISION: 9, Column.SPEED: 8, Column.USED: 10}
"""Characters; the name takes the rest."""
LEAST_NAME = 0.5
"""Of its column."""
_NARROW_EM, _NARROWER_EM = 84, 62
"""Widths below which columns are left out; their texts are in the lines below the table."""

_Index = QModelIndex | QPersistentModelIndex


class OnThisPcCard(Card):
    """Signals: what is wanted of a `LibraryEntry`; `cancel_wanted` of the work that is being done."""

    load_wanted = Signal(object)
    unload_wanted = Signal()
    default_wanted = Signal(object)
    verify_wanted = Signal(object)
    move_wanted = Signal(object)
    export_wanted = Signal(object)
    folder_wanted = Signal(object)
    converted_wanted = Signal(object)
    remove_wanted = Signal(object)
    cancel_wanted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("OnThisPcCard", "On this PC"), parent)
        self._default = ""
        headings = (
            self.tr("Model"),
            self.tr("From"),
            self.tr("Size"),
            self.tr("Precision"),
            self.tr("Tokens/s"),
            self.tr("Used"),
        )
        self.able = ComboBox(self, name=self.tr("What a model can do"))
        self.able.addItem(self.tr("Any ability"), -1)
        for at, words in enumerate(able_choices()):
            self.able.addItem(words, at)
        self.able.activated.connect(lambda: self._show_chosen())
        self.head.addWidget(self.able)
        self._shown: tuple[LibraryEntry, ...] = ()
        self._of_rows: dict[str, Any] = {}
        self.rows = LibraryTable(headings, cell_words, model_text, self)
        self.table = ModelTable(self.rows, self.tr("Models on this PC"), self)
        self.nothing = muted_label(self)
        self.trouble = warning_label(self)
        self.name = ElidedLabel(self, tone="head")
        self.facts = muted_label(self)
        self.place = ElidedLabel(self, role="secondary")
        self.problem = warning_label(self)
        self.load = push_button(self, self.tr("Load"))
        self.unload = push_button(self, self.tr("Unload"))
        self.default = push_button(self, self.tr("Set as default"))
        self.more = push_button(self, self.tr("More"))
        self.menu = QMenu(self)
        self.verify = self.menu.addAction(self.tr("Verify files"))
        self.reveal = self.menu.addAction(self.tr("Show in folder"))
        self.move_ = self.menu.addAction(self.tr("Move to another folder…"))
        self.export = self.menu.addAction(self.tr("Export a copy…"))
        self.converted = self.menu.addAction("")
        self.menu.addSeparator()
        self.remove = self.menu.addAction(self.tr("Remove…"))
        self.menu.setToolTipsVisible(True)
        self.more.setMenu(self.menu)
        self.work = WorkLine(self)
        self._lay_out()
        self._connect()
        self._show_row()

    @property
    def entry(self) -> LibraryEntry | None:
        row = self._row
        return row.entry if row is not None else None

    def show_models(
        self,
        entries: tuple[LibraryEntry, ...],
        problems: tuple[str, ...],
        *,
        loaded: str,
        default: str,
        predicted: Mapping[str, float],
    ) -> None:
        self._shown, self._of_rows = entries, {"loaded": loaded, "default": default, "predicted": predicted}
        set_message(self.trouble, " ".join(problems))
        self.able.setVisible(len(entries) > 1)
        self._show_chosen()

    def _show_chosen(self) -> None:
        able = -1 if self.able.isHidden() else int(self.able.currentData())
        entries = tuple(entry for entry in self._shown if able < 0 or abilities_of(entry)[able])
        before, loaded = self.entry, self._of_rows["loaded"]
        self.rows.show(entries, **self._of_rows)
        if entries and not self.table.currentIndex().isValid():
            at = self.rows.row_of(str(before.path)) if before is not None else self.rows.row_of(loaded)
            self.table.setCurrentIndex(self.rows.index(max(at, 0), 0))
        self.table.setVisible(bool(entries))
        self.table.show_rows(min(max(len(entries), LEAST_ROWS), MOST_ROWS))
        nothing = self.tr("No model is here yet: take one that suits this PC.")
        nothing = self.tr("No model here can do that.") if self._shown else nothing
        set_message(self.nothing, "" if entries else nothing)
        total = sum(entry.bytes_on_disk for entry in entries)
        amount = (
            self.tr("1 model") if len(entries) == 1 else self.tr("{0} models", "", len(entries)).format(len(entries))
        )
        self.caption.setText(SEPARATOR.join((amount, *([file_size(total)] if total else []))) if entries else "")
        self._show_row()

    def choose(self, path: str) -> None:
        at = self.rows.row_of(path)
        if at >= 0:
            self.table.setCurrentIndex(self.rows.index(at, 0))

    @property
    def _row(self) -> ModelRow | None:
        row = self.table.currentIndex().data(ROW_ROLE)
        return row if isinstance(row, ModelRow) else None

    def _show_row(self) -> None:
        row = self._row
        for widget in (self.name, self.facts, self.place, self.default, self.more):
            widget.setVisible(row is not None)
        self.load.setVisible(row is not None and not row.is_loaded)
        self.unload.setVisible(row is not None and row.is_loaded)
        if row is None:
            set_message(self.problem, "")
            return
        entry = row.entry
        self.name.set_full_text(entry.name)
        self.facts.setText(SEPARATOR.join(filter(None, (model_facts(entry), speed_sentence(row), also_words(entry)))))
        self.facts.setVisible(bool(self.facts.text()))
        self.place.set_full_text(str(entry.path))
        set_message(self.problem, entry.problem)
        self.load.setEnabled(not entry.problem)
        self.default.setEnabled(not row.is_default and not entry.problem)
        self.default.setText(self.tr("Default") if row.is_default else self.tr("Set as default"))
        for button in (self.load, self.unload, self.default, self.more):
            button.setAccessibleName(f"{button.text()}: {entry.name}")
        self.move_.setVisible(not entry.is_in_place)
        self.converted.setVisible(entry.converted_bytes > 0)
        self.converted.setText(self.tr("Delete converted weights ({0})").format(file_size(entry.converted_bytes)))
        self.remove.setEnabled(not entry.is_in_place and not row.is_loaded)
        reason = self.tr("Unload it first.") if row.is_loaded else ""
        if entry.is_in_place:
            reason = self.tr("It is used where it lies: remove it there.")
        self.remove.setToolTip(reason)

    # --- building -------------------------------------------------------------------------------------

    def _connect(self) -> None:
        self.table.moved.connect(lambda _index: self._show_row())
        self.rows.dataChanged.connect(lambda *_: self._show_row())
        self.table.opened_by_key.connect(lambda: self._emit(self.load_wanted))
        self.table.doubleClicked.connect(lambda _index: self._emit(self.load_wanted))
        self.table.removed.connect(self.remove.trigger)
        self.table.customContextMenuRequested.connect(self._open_menu)
        self.load.clicked.connect(lambda: self._emit(self.load_wanted))
        self.unload.clicked.connect(self.unload_wanted)
        self.default.clicked.connect(lambda: self._emit(self.default_wanted))
        self.work.cancel.clicked.connect(self.cancel_wanted)
        actions: tuple[tuple[QAction, object], ...] = (
            (self.verify, self.verify_wanted),
            (self.reveal, self.folder_wanted),
            (self.move_, self.move_wanted),
            (self.export, self.export_wanted),
            (self.converted, self.converted_wanted),
            (self.remove, self.remove_wanted),
        )
        for action, signal in actions:
            action.triggered.connect(lambda _checked=False, signal=signal: self._emit(signal))

    def _emit(self, signal: object) -> None:
        row = self._row
        if row is None or (signal is self.load_wanted and (row.is_loaded or row.entry.problem)):
            return
        signal.emit(row.entry)  # type: ignore[attr-defined]

    def _open_menu(self, place: QPoint) -> None:
        if self.table.indexAt(place).isValid():
            self.menu.popup(self.table.viewport().mapToGlobal(place))

    def _lay_out(self) -> None:
        self.table.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        buttons = Flow(self.load, self.unload, self.default, self.more, parent=self)
        for widget in (
            self.nothing, self.trouble, self.table, self.name, self.facts, self.place, self.problem, buttons, self.work,
        ):  # fmt: skip
            self.body.addWidget(widget)
        self.body.setSpacing(6)
        self.body.addStretch(1)


class ModelTable(TextTable):
    opened_by_key = Signal()
    removed = Signal()

    def __init__(self, rows: LibraryTable, name: str, parent: QWidget | None = None) -> None:
        super().__init__(rows, name, parent)
        self.setItemDelegateForColumn(Column.NAME, NameDelegate(self))
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        use_tabular_figures(self)
        self.share_width(_WIDTHS)
        keys = {"Return": self.tr("Load the model"), "Del": self.tr("Remove the model")}
        note_keys(self, [(native(key), words) for key, words in keys.items()])

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter):
            self.opened_by_key.emit()
        elif event.key() == Qt.Key.Key_Delete:
            self.removed.emit()
        else:
            super().keyPressEvent(event)

    def share_width(self, fixed: Mapping[int, float], spare: int = -1) -> None:
        super().share_width(fixed, spare)
        room = self.viewport().width() / max(1, self.fontMetrics().averageCharWidth())
        self.setColumnHidden(Column.USED, room < _NARROW_EM)
        self.setColumnHidden(Column.ORIGIN, room < _NARROWER_EM)
        self.setColumnHidden(Column.PRECISION, room < _NARROWER_EM)

    def resizeEvent(self, event: object) -> None:
        super().resizeEvent(event)  # type: ignore[arg-type]
        self.share_width(_WIDTHS)


class NameDelegate(QStyledItemDelegate):
    """The name, and after it what the model is: loaded, default."""

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: _Index) -> None:
        row: ModelRow = index.data(ROW_ROLE)
        self.initStyleOption(option, index)
        option.text = ""
        widget = option.widget
        widget.style().drawControl(QStyle.ControlElement.CE_ItemViewItem, option, painter, widget)
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        area = QRectF(option.rect).adjusted(8, 0, -6, 0)
        small, name, pills = small_font(option.font, 11.5), QFont(option.font), marks(row)
        metrics = QFontMetricsF(name)
        least = min(metrics.horizontalAdvance(row.entry.name), area.width() * LEAST_NAME)
        while pills and pills_width(pills, small) > area.width() - least:
            pills.pop()  # all are in the line below the table
        shown = metrics.elidedText(
            row.entry.name, Qt.TextElideMode.ElideMiddle, area.width() - pills_width(pills, small)
        )
        painter.setFont(name)
        painter.setPen(themed("danger" if row.entry.problem else "text"))
        painter.drawText(area, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, shown)
        left = area.left() + metrics.horizontalAdvance(shown) + 8
        draw_pills(painter, left, area.center().y(), pills, small, "pcie" if row.is_loaded else "border")
        painter.restore()

    def sizeHint(self, option: QStyleOptionViewItem, index: _Index) -> QSize:
        return super().sizeHint(option, index)


class WorkLine(QWidget):
    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._words = ElidedLabel(self)
        self._bar = QProgressBar(self)
        self._bar.setTextVisible(False)
        self._bar.setMaximumWidth(160)
        self.cancel = push_button(self, self.tr("Stop"))
        self.cancel.setProperty("compact", "true")
        hbox((self._words, 2), (self._bar, 1), self.cancel, into=self, margins=(0, 4, 0, 0), gap=10)
        self.hide()

    def show_work(self, work: Work | None) -> None:
        self.setVisible(work is not None)
        if work is not None:
            words = work_words(work)
            self._words.set_full_text(words)
            self._bar.setAccessibleName(words)
            self.cancel.setAccessibleName(f"{self.cancel.text()}: {words}")
            self._bar.setRange(0, 1000 if work.total else 0)
            self._bar.setValue(1000 * work.done // work.total if work.total else 0)
            self.cancel.setVisible(work.kind not in ("remove", "converted"))
