"""Paints the lines of the chat list: headings, titles, and search snippets with the matches in bold."""

from __future__ import annotations

import html

from PySide6.QtCore import (
    QAbstractItemModel,
    QModelIndex,
    QPersistentModelIndex,
    QPointF,
    QRect,
    QRectF,
    QSize,
    Qt,
    Signal,
)
from PySide6.QtGui import QFont, QFontMetrics, QPainter, QPainterPath, QTextDocument
from PySide6.QtWidgets import QAbstractItemView, QLineEdit, QStyle, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app.icons import icon
from app.models.conversation_list import ENTRY_ROLE, Entry
from app.services.chat_store import Folder
from app.services.chat_store.records import MATCH_END, MATCH_START
from app.theme import colours, scaled, themed
from app.widgets.quantities import count

Index = QModelIndex | QPersistentModelIndex
RADIUS = 8
INSET = 9


class ConversationDelegate(QStyledItemDelegate):
    """Paints an `Entry`; renaming happens in place.

    Signals: `renamed`, a conversation's id and its new title; `folder_renamed`, the same of a folder.
    """

    renamed = Signal(str, str)
    folder_renamed = Signal(str, str)

    def sizeHint(self, _option: QStyleOptionViewItem, index: Index) -> QSize:
        entry: Entry = index.data(ENTRY_ROLE)
        line = QFontMetrics(self._font(12.5)).lineSpacing()
        if _is_heading(entry):
            return QSize(0, line + (12 if index.row() == 0 else 22))
        snippet = self._snippet_lines(entry) * QFontMetrics(self._font(11.5)).lineSpacing() + 4
        return QSize(0, line + 18 + (snippet if self._has_snippet(entry) else 0))

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: Index) -> None:
        entry: Entry = index.data(ENTRY_ROLE)
        rect: QRect = option.rect
        state: QStyle.StateFlag = option.state
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if _is_heading(entry):
            painter.setFont(self._heading_font())
            painter.setPen(themed("muted"))
            place = rect.adjusted(INSET, 0, -INSET, -6)
            flags = Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignBottom
            painter.drawText(place, flags, str(index.data()).upper())
            painter.restore()
            return
        selected = bool(state & QStyle.StateFlag.State_Selected)
        hovered = bool(state & QStyle.StateFlag.State_MouseOver)
        pill = QPainterPath()
        pill.addRoundedRect(QRectF(rect).adjusted(1, 1, -1, -1), RADIUS, RADIUS)
        if selected or hovered:
            painter.fillPath(pill, themed("accent_background" if selected else "hover"))
        if state & QStyle.StateFlag.State_HasFocus and state & QStyle.StateFlag.State_KeyboardFocusChange:
            painter.setPen(themed("accent"))
            painter.drawPath(pill)
        if entry.conversation is None and entry.folder is not None:
            self._paint_folder(painter, rect, entry.folder, entry.chats)
        else:
            self._paint_title(painter, rect, str(index.data()), entry)
        if self._has_snippet(entry):
            self._paint_snippet(painter, rect, entry.snippet)
        painter.restore()

    def createEditor(self, parent: QWidget, _option: QStyleOptionViewItem, _index: Index) -> QWidget:
        editor = QLineEdit(parent)
        editor.setMaxLength(200)
        editor.setAccessibleName(self.tr("New title"))
        editor.setStyleSheet("padding: 2px 7px;")
        return editor

    def updateEditorGeometry(self, editor: QWidget, option: QStyleOptionViewItem, _index: Index) -> None:
        rect: QRect = option.rect
        line = QFontMetrics(self._font(12.5)).lineSpacing() + 16
        editor.setGeometry(rect.x(), rect.y() + 1, rect.width(), line)

    def setModelData(self, editor: QWidget, _model: QAbstractItemModel, index: Index) -> None:
        # The page updates the model, as it also updates the store.
        entry: Entry = index.data(ENTRY_ROLE)
        if isinstance(editor, QLineEdit) and entry.conversation is not None:
            self.renamed.emit(entry.conversation.id, editor.text())
        elif isinstance(editor, QLineEdit) and entry.folder is not None:
            self.folder_renamed.emit(entry.folder.id, editor.text())

    # --- inside ---

    def _paint_folder(self, painter: QPainter, rect: QRect, folder: Folder, chats: int) -> None:
        font, side = self._font(12.5), scaled(14)
        font.setWeight(QFont.Weight.Medium)
        painter.setFont(font)
        metrics = QFontMetrics(font)
        place = rect.adjusted(INSET, 8, -INSET, 0)
        place.setHeight(metrics.lineSpacing())
        top = place.y() + (place.height() - side) // 2
        icon("chevron-down" if folder.is_open else "chevron-right", "muted").paint(
            painter, QRect(place.x() - 3, top, side, side)
        )
        icon("folder", "muted").paint(painter, QRect(place.x() + side, top, side, side))
        number = count(chats)
        room = metrics.horizontalAdvance(number)
        painter.setPen(themed("muted"))
        flags = Qt.AlignmentFlag.AlignVCenter
        painter.drawText(place, flags | Qt.AlignmentFlag.AlignRight, number)
        painter.setPen(themed("text"))
        words = place.adjusted(2 * side + 6, 0, -room - 8, 0)
        elided = metrics.elidedText(folder.name, Qt.TextElideMode.ElideRight, words.width())
        painter.drawText(words, flags | Qt.AlignmentFlag.AlignLeft, elided)

    def _paint_title(self, painter: QPainter, rect: QRect, text: str, entry: Entry) -> None:
        font = self._font(12.5)
        font.setWeight(QFont.Weight.Medium if self._has_snippet(entry) else QFont.Weight.Normal)
        painter.setFont(font)
        painter.setPen(themed("text"))
        metrics = QFontMetrics(font)
        inside = scaled(14) if entry.folder is not None else 0
        place = rect.adjusted(INSET + inside, 8, -INSET, 0)
        place.setHeight(metrics.lineSpacing())
        elided = metrics.elidedText(text.replace("\n", " "), Qt.TextElideMode.ElideRight, place.width())
        painter.drawText(place, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, elided)

    def _paint_snippet(self, painter: QPainter, rect: QRect, snippet: str) -> None:
        marked = html.escape(snippet).replace(MATCH_START, "<b>").replace(MATCH_END, "</b>")
        document = QTextDocument()
        font = self._font(11.5)
        document.setDefaultFont(font)
        document.setDocumentMargin(0)
        width = rect.width() - 2 * INSET
        document.setTextWidth(width)
        document.setHtml(f'<div style="color: {colours().muted}">{marked}</div>')
        line = QFontMetrics(self._font(12.5)).lineSpacing()
        painter.translate(QPointF(rect.x() + INSET, rect.y() + 10 + line))
        document.drawContents(painter, QRectF(0, 0, width, QFontMetrics(font).lineSpacing() * 2))

    def _snippet_lines(self, entry: Entry) -> int:
        view = self.parent()
        room = view.viewport().width() - 2 * INSET if isinstance(view, QAbstractItemView) else 200
        return (
            1 if QFontMetrics(self._font(11.5)).horizontalAdvance(_without_marks(entry.snippet)) <= room * 0.95 else 2
        )

    def _has_snippet(self, entry: Entry) -> bool:
        return bool(entry.snippet) and entry.message_id is not None

    def _font(self, px: float) -> QFont:
        font = QFont(self._theme_font_family())
        font.setPixelSize(max(8, scaled(px)))
        return font

    def _heading_font(self) -> QFont:
        font = self._font(11)
        font.setLetterSpacing(QFont.SpacingType.AbsoluteSpacing, 0.3)
        return font

    def _theme_font_family(self) -> str:
        parent = self.parent()
        return parent.font().family() if isinstance(parent, QWidget) else ""


def _is_heading(entry: Entry) -> bool:
    return entry.conversation is None and entry.folder is None


def _without_marks(snippet: str) -> str:
    return snippet.replace(MATCH_START, "").replace(MATCH_END, "")
