"""What is being downloaded, in an order that can be changed; where it goes to, and tokens for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import (
    QCoreApplication,
    QEvent,
    QMimeData,
    QModelIndex,
    QObject,
    QRectF,
    QSize,
    Qt,
    QUrl,
    Signal,
)
from PySide6.QtGui import QDesktopServices, QFont, QFontMetricsF, QKeyEvent, QPainter
from PySide6.QtWidgets import (
    QAbstractItemView,
    QListView,
    QStyle,
    QStyledItemDelegate,
    QStyleOptionViewItem,
    QToolButton,
    QWidget,
)

from app.icons import icon
from app.models.headed_table import ROW_ROLE, HeadedTable, Index
from app.services.background import LatestTask
from app.services.downloads import FOLDER_KEY
from app.services.settings import Settings
from app.theme import themed
from app.widgets.asking import ask
from app.widgets.chip import draw_elided, small_font
from app.widgets.fields import ComboBox
from app.widgets.flow_layout import Flow
from app.widgets.page import native, note_keys
from app.widgets.quantities import SEPARATOR, duration, figures, file_size, number, percent
from app.widgets.scaffold import (
    Card,
    FormDialog,
    add_items,
    hbox,
    line_edit,
    muted_label,
    push_button,
    set_message,
    text_label,
    warning_label,
)
from engine.checkpoint.downloads.queue import Download, DownloadState
from engine.common.errors import ErrorCode
from engine.common.paths import models_dir

if TYPE_CHECKING:
    from app.services.downloads import Downloads
    from engine.checkpoint.downloads.queue import Download
    from engine.checkpoint.model_directories import Room


LONGEST_NAME = 24


class FolderChoice(QWidget):
    """Hidden as long as there is only one folder; what is chosen holds for the next downloads, too.

    Signals:
    room_changed(Room): where downloads go now, whenever the folders were looked at or another one was chosen.
    """

    room_changed = Signal(object)

    def __init__(self, settings: Settings, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._settings = settings
        self._rooms: tuple[Room, ...] = ()
        self._looking = LatestTask(self)
        self.combo = ComboBox(self, name=self.tr("Download folder"))
        name = text_label(self, self.tr("Download to"), role="secondary", buddy=self.combo)
        self.combo.setSizeAdjustPolicy(ComboBox.SizeAdjustPolicy.AdjustToContents)
        hbox(Flow(name, self.combo, parent=self), into=self)
        self.combo.activated.connect(lambda _at: self._choose())
        self.hide()

    def look(self) -> None:
        self._looking.ask(_rooms, self.show_rooms)

    def show_rooms(self, rooms: tuple[Room, ...]) -> None:
        self._rooms = rooms
        chosen = self._settings.get(FOLDER_KEY, "") or str(models_dir())
        names = [room.folder.name for room in rooms if room.folder != models_dir()]
        self.combo.clear()
        for room in rooms:
            name = room.folder.name if names.count(room.folder.name) < 2 else "/".join(room.folder.parts[-2:])
            name = self.tr("Library") if room.folder == models_dir() else _cut(name or str(room.folder))
            words = self.tr("not connected") if room.free is None else self.tr("{0} free").format(file_size(room.free))
            self.combo.addItem(f"{name}{SEPARATOR}{words}", str(room.folder))
            at = self.combo.count() - 1
            self.combo.setItemData(at, room.trouble or str(room.folder), Qt.ItemDataRole.ToolTipRole)
            if room.free is None:
                self.combo.setItemData(at, 0, Qt.ItemDataRole.UserRole - 1)  # which disables an item
        self.combo.setCurrentIndex(max(0, self.combo.findData(chosen)))
        self._say_folder()
        self.setVisible(len(rooms) > 1)

    def close_down(self) -> None:
        self._looking.close()

    def _choose(self) -> None:
        folder = Path(self.combo.currentData())
        self._settings.set(FOLDER_KEY, "" if folder == models_dir() else str(folder))
        self._say_folder()

    def _say_folder(self) -> None:
        words = str(self.combo.currentData(Qt.ItemDataRole.ToolTipRole) or "")
        self.combo.setToolTip(words)
        self.combo.setAccessibleDescription(words)
        if 0 <= self.combo.currentIndex() < len(self._rooms):
            self.room_changed.emit(self._rooms[self.combo.currentIndex()])


def _cut(name: str) -> str:
    half = LONGEST_NAME // 2
    return name if len(name) <= LONGEST_NAME else f"{name[:half]}…{name[-half:]}"


def _rooms() -> tuple[Room, ...]:
    from engine.checkpoint.model_directories import model_folders, rooms_of

    return rooms_of(model_folders())


class TokenDialog(FormDialog):
    """Asks for a hub's access token."""

    def __init__(
        self, name: str, page: str, host: str, sentence: str, save: Callable[[str], object], parent: QWidget
    ) -> None:
        super().__init__("", translate("TokenDialog", "Save and download"), parent, width_px=480)
        self._save = save
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.setWindowTitle(self.tr("Access to {0}").format(name))
        refused = warning_label(self)
        set_message(refused, sentence)
        first = self.tr("1. Open the page of {0}, sign in, and accept what is asked there.").format(name)
        self.open_page = push_button(
            self, self.tr("Open {0}").format(page), lambda: QDesktopServices.openUrl(QUrl(page))
        )
        second = self.tr("2. Create an access token (reading is enough) in your settings there, and paste it here.")
        self.field = line_edit(self, self.tr("Access token"), secret=True, hints=True)
        for widget in (
            text_label(self, self.tr("Its makers ask you to accept their terms first"), role="heading", wrap=True),
            refused,
            muted_label(self, first, role=""),
            self.open_page,
            muted_label(self, second, role=""),
            self.field,
        ):
            self.add_across(widget)
        kept = self.tr(
            "It is kept in the system's keyring, or for this run only where there is none, and sent to {0} alone."
        )
        self.said.setText(kept.format(host))
        self.save = self.keep
        self.save.setEnabled(False)
        self.field.textChanged.connect(lambda text: self.save.setEnabled(bool(text.strip())))
        self.field.setFocus()

    def kept(self) -> None:
        token = self.field.text().strip()
        self.field.clear()
        self._save(token)
        self.accept()


def ask_token_of(download: Download, downloads: Downloads, parent: QWidget) -> None:
    """Tells how to get at a download that the hub refused; with a token it goes on."""
    from engine.checkpoint.hub import HUGGINGFACE, place_of

    hub, _, name = download.reference.rpartition(":")[0].rpartition(":")
    page = place_of(hub or HUGGINGFACE, name).link
    host = QUrl(page).host()

    def save(token: str) -> None:
        downloads.save_token(host, token, lambda _stays: downloads.resume(download.key))

    TokenDialog(name, page, host, download.problem, save, parent).open()


translate = QCoreApplication.translate


def rate_words(bytes_per_s: float) -> str:
    """`48.2 MB/s`."""
    if bytes_per_s >= 1e6:
        return f"{figures(bytes_per_s / 1e6)} MB/s"
    return f"{number(bytes_per_s / 1e3, 0)} kB/s"


def download_words(download: Download) -> str:
    done, total = file_size(download.done_bytes), file_size(download.total_bytes)
    amount = translate("Downloads", "{0} of {1}").format(done, total)
    if download.problem and download.state is not DownloadState.FAILED:
        return f"{amount}{SEPARATOR}{download.problem}"
    if download.state is DownloadState.RUNNING:
        parts = [amount]
        parts.append(rate_words(download.bytes_per_s) if download.bytes_per_s else translate("Downloads", "connecting"))
        if download.eta_s is not None:
            parts.append(translate("Downloads", "{0} left").format(duration(download.eta_s)))
        return SEPARATOR.join(parts)
    words = {
        DownloadState.WAITING: translate("Downloads", "waits for its turn"),
        DownloadState.PAUSED: translate("Downloads", "paused"),
        DownloadState.FAILED: translate("Downloads", "failed"),
        DownloadState.DONE: translate("Downloads", "done"),
    }[download.state]
    return f"{amount if download.done_bytes else total}{SEPARATOR}{words}"


def download_text(download: Download) -> str:
    share = download.done_bytes / download.total_bytes if download.total_bytes else 0.0
    problem = download.problem if download.state is DownloadState.FAILED else ""
    return "\n".join(filter(None, (f"{download.title}, {percent(share)}", download_words(download), problem)))


_KIND = "application/x-switchyard-download"


class DownloadList(HeadedTable):
    """Downloads in the order in which they are fetched.  Rows can be dragged.

    Signals:
        moved(str, int): the user wants the download of this key at this place.
    """

    moved = Signal(str, int)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(
            parent=parent, cell=lambda one, _column: str(one.title), describe=download_text, key=lambda one: one.key
        )

    def flags(self, index: Index) -> Qt.ItemFlag:
        if not index.isValid():
            return Qt.ItemFlag.ItemIsDropEnabled  # between two rows, not onto one
        return super().flags(index) | Qt.ItemFlag.ItemIsDragEnabled

    def supportedDropActions(self) -> Qt.DropAction:
        return Qt.DropAction.MoveAction

    def mimeTypes(self) -> list[str]:
        return [_KIND]

    def mimeData(self, indexes: Sequence[QModelIndex]) -> QMimeData:
        data = QMimeData()
        data.setData(_KIND, self._rows[indexes[0].row()].key.encode())
        return data

    def dropMimeData(self, data: QMimeData, _action: Qt.DropAction, row: int, _column: int, _parent: Index) -> bool:
        key = bytes(data.data(_KIND).data()).decode()
        at = self.row_of(key)
        if at >= 0:
            place = len(self._rows) if row < 0 else row
            self.moved.emit(key, place - 1 if place > at else place)
        return False  # whoever wants it elsewhere changes the queue, which then is shown


MOST_ROWS = 4
_BAR_PX = 6.0
_PAD = 10.0
_LIMITS = (0, 1_000_000, 2_000_000, 5_000_000, 10_000_000, 25_000_000, 50_000_000)


class DownloadsCard(Card):
    """Signals: what is wanted of the download of a key; `token_wanted(Download)` for one that needs permission."""

    pause_wanted = Signal(str)
    resume_wanted = Signal(str)
    cancel_wanted = Signal(str)
    move_wanted = Signal(str, int)
    limit_wanted = Signal(int)
    token_wanted = Signal(object)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("DownloadsCard", "Downloads"), parent)
        self.list = DownloadsView(self)
        self.limit = ComboBox(self, name=self.tr("Speed limit"))
        for amount in _LIMITS:
            text = self.tr("at most {0}").format(rate_words(amount)) if amount else self.tr("no speed limit")
            self.limit.addItem(text, amount)
        self.limit.activated.connect(lambda _at: self.limit_wanted.emit(self.limit.currentData()))
        self.pause = push_button(self, self.tr("Pause"), lambda: self._on(self.pause_wanted))
        self.resume = push_button(self, self.tr("Resume"), lambda: self._on(self.resume_wanted))
        self.token = push_button(self, self.tr("Access token…"), self._on_token)
        self.cancel = push_button(self, self.tr("Cancel"), lambda: self._on(self.cancel_wanted))
        self.up = self._arrow("chevron-up", self.tr("Earlier (Alt+Up)"))
        self.down = self._arrow("chevron-down", self.tr("Later (Alt+Down)"))
        for button in (self.pause, self.resume, self.token, self.cancel):
            button.setProperty("compact", "true")
        self.buttons = Flow(self.pause, self.resume, self.token, self.cancel, self.up, self.down, parent=self)
        self.head.addWidget(self.limit)
        self.trouble = warning_label(self)
        add_items(self.body, self.list, self.trouble, self.buttons)
        self.up.clicked.connect(lambda: self._move(-1))
        self.down.clicked.connect(lambda: self._move(1))
        self.list.toggled.connect(self._toggle)
        self.list.cancelled.connect(lambda: self._on(self.cancel_wanted))
        self.list.shifted.connect(self._move)
        self.list.rows.moved.connect(self.move_wanted)
        self.list.selectionModel().currentRowChanged.connect(lambda *_: self._show_buttons())
        self.hide()

    def show_downloads(self, downloads: tuple[Download, ...], limit: int) -> None:
        current = self.list.download
        self.list.rows.show_rows(downloads)
        if downloads:
            at = self.list.rows.row_of(current.key) if current is not None else -1
            if self.list.currentIndex().row() != max(at, 0) or not self.list.currentIndex().isValid():
                self.list.setCurrentIndex(self.list.rows.index(max(at, 0), 0))
        self.limit.setCurrentIndex(max(0, self.limit.findData(limit)))
        rate = sum(one.bytes_per_s for one in downloads)
        self.caption.setText(rate_words(rate) if rate else "")
        self.setVisible(bool(downloads))
        self._show_buttons()

    def _show_buttons(self) -> None:
        download = self.list.download
        state = download.state if download is not None else None
        had_focus = self.pause.hasFocus() or self.resume.hasFocus()
        set_message(self.trouble, download.problem if download and state is DownloadState.FAILED else "")
        self.pause.setVisible(state in (DownloadState.RUNNING, DownloadState.WAITING))
        self.resume.setVisible(state in (DownloadState.PAUSED, DownloadState.FAILED))
        if had_focus:  # not to Cancel, which is the next
            (self.resume if self.pause.isHidden() else self.pause).setFocus()
        self.token.setVisible(download is not None and needs_access(download))
        at, rows = self.list.currentIndex().row(), self.list.rows.rowCount()
        for arrow in (self.up, self.down):
            arrow.setVisible(rows > 1)
        self.up.setEnabled(at > 0)
        self.down.setEnabled(0 <= at < rows - 1)
        if download is not None:
            for button in (self.pause, self.resume, self.cancel, self.token):
                button.setAccessibleName(f"{button.text()}: {download.title}")

    def _toggle(self) -> None:
        self._on(self.pause_wanted if not self.pause.isHidden() else self.resume_wanted)

    def _on(self, signal: object) -> None:
        download = self.list.download
        if download is not None:
            signal.emit(download.key)  # type: ignore[attr-defined]

    def _on_token(self) -> None:
        if self.list.download is not None:
            self.token_wanted.emit(self.list.download)

    def _move(self, places: int) -> None:
        download, at = self.list.download, self.list.currentIndex().row()
        if download is not None and 0 <= at + places < self.list.rows.rowCount():
            self.move_wanted.emit(download.key, at + places)

    def _arrow(self, name: str, words: str) -> QToolButton:
        button = QToolButton(self)
        button.setProperty("kind", "small")
        button.setIcon(icon(name))
        button.setToolTip(words)
        button.setAccessibleName(words)
        return button


def needs_access(download: Download) -> bool:
    """Whether a token may help: the hub refused the files, which no further try changes."""
    return download.state is DownloadState.FAILED and download.error_code == ErrorCode.DOWNLOAD_FAILED


def before_cancelling(download: Download, parent: QWidget, cancel: Callable[[], object]) -> None:
    if not download.done_bytes:
        cancel()
        return
    details = translate("Downloads", "{0} that are already here are deleted. To keep them, pause it instead.")
    ask(
        parent,
        translate("Downloads", "Cancel the download of {0}?").format(download.title),
        details.format(file_size(download.done_bytes)),
        [(translate("Downloads", "Cancel the download"), "destroy", cancel)],
        translate("Downloads", "Keep it"),
    )


class DownloadsView(QListView):
    """Signals: `toggled` (space: pause or resume), `cancelled` (delete), `shifted(int)` (Alt and an arrow)."""

    toggled = Signal()
    cancelled = Signal()
    shifted = Signal(int)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.rows = DownloadList(self)
        self.setModel(self.rows)
        self.setItemDelegate(DownloadDelegate(self))
        self.setAccessibleName(self.tr("Downloads"))
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setDragDropMode(QAbstractItemView.DragDropMode.InternalMove)
        self.setDefaultDropAction(Qt.DropAction.MoveAction)
        self.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.rows.modelReset.connect(self._fit)
        keys = {
            "Space": self.tr("Pause or resume the download"),
            "Alt+Up": self.tr("Download it earlier"),
            "Alt+Down": self.tr("Download it later"),
            "Del": self.tr("Cancel the download"),
        }
        note_keys(self, [(native(key), words) for key, words in keys.items()])
        self._fit()

    @property
    def download(self) -> Download | None:
        download = self.currentIndex().data(ROW_ROLE)
        return download if isinstance(download, Download) else None

    def keyPressEvent(self, event: QKeyEvent) -> None:
        alt = bool(event.modifiers() & Qt.KeyboardModifier.AltModifier)
        if event.key() == Qt.Key.Key_Space:
            self.toggled.emit()
        elif event.key() == Qt.Key.Key_Delete:
            self.cancelled.emit()
        elif alt and event.key() in (Qt.Key.Key_Up, Qt.Key.Key_Down):
            self.shifted.emit(-1 if event.key() == Qt.Key.Key_Up else 1)
        else:
            super().keyPressEvent(event)

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._fit()

    def _fit(self) -> None:
        height = self.itemDelegate().sizeHint(QStyleOptionViewItem(), QModelIndex()).height()
        self.setFixedHeight(height * max(1, min(MOST_ROWS, self.rows.rowCount())))


class DownloadDelegate(QStyledItemDelegate):
    """Title and percent, a bar, and a line of figures."""

    def __init__(self, view: DownloadsView) -> None:
        super().__init__(view)
        self._view = view

    def sizeHint(self, _option: QStyleOptionViewItem, _index: Index) -> QSize:
        upper, lower = self._fonts()
        lines = QFontMetricsF(upper).lineSpacing() + QFontMetricsF(lower).lineSpacing()
        return QSize(120, round(lines + _BAR_PX + 20))

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        download: Download = index.data(ROW_ROLE)
        area = QRectF(option.rect).adjusted(1, 1, -1, -1)
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        selected = bool(option.state & QStyle.StateFlag.State_Selected)
        if (selected and self._view.rows.rowCount() > 1) or option.state & QStyle.StateFlag.State_HasFocus:
            painter.setBrush(themed("accent_background"))
            painter.drawRoundedRect(area, 8, 8)
        inner = area.adjusted(_PAD, 5, -_PAD, -5)
        upper, lower = self._fonts()
        line = QFontMetricsF(upper).lineSpacing()
        share = download.done_bytes / download.total_bytes if download.total_bytes else 0.0
        part = percent(share)
        wide = QFontMetricsF(upper).horizontalAdvance(part) + 12
        head = QRectF(inner.left(), inner.top(), inner.width(), line)
        draw_elided(painter, head.adjusted(0, 0, -wide, 0), download.title, upper, "text")
        draw_elided(painter, QRectF(head.right() - wide + 12, head.top(), wide - 12, line), part, upper, "text")
        bar = QRectF(inner.left(), head.bottom() + 3, inner.width(), _BAR_PX)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(themed("border"))
        painter.drawRoundedRect(bar, 3, 3)
        if share > 0:
            running = download.state is DownloadState.RUNNING
            painter.setBrush(themed("accent" if running else "faint"))
            painter.drawRoundedRect(QRectF(bar.left(), bar.top(), max(6.0, bar.width() * share), _BAR_PX), 3, 3)
        below = QRectF(inner.left(), bar.bottom() + 3, inner.width(), QFontMetricsF(lower).lineSpacing())
        failed = download.state is DownloadState.FAILED
        draw_elided(painter, below, download_words(download), lower, "danger" if failed else "muted")
        painter.restore()

    def _fonts(self) -> tuple[QFont, QFont]:
        upper = small_font(self._view.font(), 14)
        upper.setWeight(QFont.Weight.Medium)
        return upper, small_font(self._view.font(), 12.5)
