"""The sidebar: the pages, and the machine's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from PySide6.QtCore import QEvent, QSize, Qt, Signal
from PySide6.QtGui import QKeySequence, QResizeEvent
from PySide6.QtWidgets import QButtonGroup, QPushButton, QWidget

from app.icons import IconMark, icon
from app.theme import BODY_PX, body_px
from app.views.main_window.machine_footer import MachineFooter
from app.widgets.page import MODELS, PageEntry, add_shortcut
from app.widgets.scaffold import LEFT, STRETCH, add_items, hbox, push_button, text_label, vbox

if TYPE_CHECKING:
    from engine.checkpoint.downloads.queue import Download

WIDTH_PX = 208
RAIL_PX = 64
RAIL_BELOW_PX = 860
"""Below this window width, at the standard font size, the sidebar shows icons only."""
MARGIN_PX, RAIL_MARGIN_PX = 12, 8
SHORT_PX = 480
ICON_PX = 18
LOGO_PX = 24


class DownloadsMark(QPushButton):
    """Hidden while nothing is fetched, waits or has failed; in the icon rail its tooltip says how many and how far."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("kind", "navigation")
        self.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        self._is_rail = False
        self._words = ""
        self.setIcon(icon("download", "muted"))
        self.setAccessibleName(self.tr("Downloads"))
        self.hide()

    def show_downloads(self, downloads: Sequence[Download]) -> None:
        under_way = [one for one in downloads if one.state in ("running", "waiting")]
        failed = [one for one in downloads if one.state == "failed"]
        if under_way:
            total = sum(one.total_bytes for one in under_way)
            percent = 100 * sum(one.done_bytes for one in under_way) // total if total else 0
            count = len(under_way)
            self._words = (
                self.tr("1 download, {0}%").format(percent)
                if count == 1
                else self.tr("{0} downloads, {1}%", "", count).format(count, percent)
            )
        elif failed:
            self._words = self.tr("A download stopped")
        else:
            self._words = ""
        self.setVisible(bool(self._words))
        self._show_text()

    def set_narrow(self, narrow: bool) -> None:
        self._is_rail = narrow
        self._show_text()

    def _show_text(self) -> None:
        self.setText("" if self._is_rail else f" {self._words}")
        self.setAccessibleName(self._words or self.tr("Downloads"))
        self.setToolTip(self.tr("{0}: show them").format(self._words))


class Sidebar(QWidget):
    """Becomes an icon rail in a narrow window; what the footer cannot show is in its tooltip.

    Signals: `page_chosen(str)`, the name of a page.
    """

    page_chosen = Signal(str)

    def __init__(self, pages: Sequence[PageEntry], footer: MachineFooter, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("pane", "surface")
        self.setAttribute(Qt.WidgetAttribute.WA_StyledBackground)
        self.setAccessibleName(self.tr("Navigation"))
        self._pages = tuple(pages)
        self._footer = footer
        self._is_rail = False
        self._name = text_label(self, "Switchyard", role="title")
        self._head = QWidget(self)
        hbox(
            (IconMark("logo", "text", LOGO_PX, self._head), LEFT),
            (self._name, 1),
            into=self._head,
            margins=(10, 0, 0, 14),
        )

        self._column = column = vbox(self._head, into=self, margins=(MARGIN_PX, 18, MARGIN_PX, 14), gap=4)
        self._group = QButtonGroup(self)
        self._buttons: dict[str, QPushButton] = {}
        for index, page in enumerate(self._pages):
            column.addWidget(self._button(index, page))
        self.downloads = DownloadsMark(self)
        add_items(column, self.downloads, STRETCH, footer)
        self.downloads.clicked.connect(lambda: self._go(MODELS))
        self._group.idClicked.connect(lambda index: self.page_chosen.emit(self._pages[index].name))
        self._show_labels()
        self._apply()

    def follow_window(self, width: int) -> None:
        rail = width < RAIL_BELOW_PX * body_px() / BODY_PX
        if rail != self._is_rail:
            self._is_rail = rail
            self._footer.set_narrow(rail)
            self.downloads.set_narrow(rail)
            self._show_labels()
            self._apply()

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:
            self._apply()

    def event(self, event: QEvent) -> bool:
        handled = super().event(event)
        if event.type() == QEvent.Type.LayoutRequest:
            self._fit()
        return handled

    def choose(self, name: str) -> None:
        self.button(name).setChecked(True)

    def has_focus(self) -> bool:
        return any(button.hasFocus() for button in self._group.buttons())

    def button(self, name: str) -> QPushButton:
        return self._buttons[name]

    def _button(self, index: int, page: PageEntry) -> QPushButton:
        button = push_button(self, checkable=True, kind="navigation")
        button.setIcon(icon(page.name, "muted", "accent_text"))
        button.setAccessibleName(page.label)
        keys = QKeySequence(f"Ctrl+{index + 1}")
        button.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        add_shortcut(self, keys, self.tr("Go to {0}").format(page.label), lambda: self._go(page.name))
        self._group.addButton(button, index)
        self._buttons[page.name] = button
        return button

    def _go(self, name: str) -> None:
        self.choose(name)
        self.page_chosen.emit(name)

    def _show_labels(self) -> None:
        for index, page in enumerate(self._pages):
            button, label = self.button(page.name), page.label
            keys = QKeySequence(f"Ctrl+{index + 1}").toString(QKeySequence.SequenceFormat.NativeText)
            button.setText("" if self._is_rail else f" {label}")
            button.setToolTip(f"{label}  {keys}" if self._is_rail else keys)
        self._name.setVisible(not self._is_rail)

    def _fit(self) -> None:
        short = self.height() < SHORT_PX * body_px() / BODY_PX
        self._head.setVisible(not (short and self._is_rail))
        margins = self._column.contentsMargins()
        top = margins.top() + margins.bottom()
        above = [self._head] if not self._head.isHidden() else []
        mark = [self.downloads] if not self.downloads.isHidden() else []
        widgets = [*above, *self._group.buttons(), *mark]
        taken = sum(widget.sizeHint().height() + self._column.spacing() for widget in widgets)
        room = self.width() - margins.left() - margins.right()
        self._footer.fit(room, self.height() - top - taken - self._column.spacing())

    def _apply(self) -> None:
        scale = body_px() / BODY_PX
        side_px = RAIL_MARGIN_PX if self._is_rail else MARGIN_PX
        end_px = RAIL_MARGIN_PX if self._is_rail else 14
        self._column.setContentsMargins(side_px, end_px if self._is_rail else 18, side_px, end_px)
        self.setFixedWidth(round(RAIL_PX * (0.4 + 0.6 * scale) if self._is_rail else WIDTH_PX * (0.4 + 0.6 * scale)))
        side = round(ICON_PX * scale)
        for button in (*self._buttons.values(), self.downloads):
            button.setIconSize(QSize(side, side))
        self._fit()
