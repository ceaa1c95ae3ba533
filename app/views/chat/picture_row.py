"""Pictures of a message as thumbnails, in the chat and above the box that one writes in."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QImage, QPixmap
from PySide6.QtWidgets import QHBoxLayout, QLabel, QSizePolicy, QWidget

from app.services.pictures import size_of, thumbnail
from app.theme import scaled
from app.views.chat.icon_button import IconButton
from app.widgets.flow_layout import FlowLayout
from engine.common.chat import Picture

HEIGHT_PX, WIDEST_PX = 88, 176
GAP_PX = 8


class PictureRow(QWidget):
    """Wraps into lines.

    Args:
        removable: each has a button that takes it away.

    Signals: `removed`, with the number of a picture from 0.
    """

    removed = Signal(int)

    def __init__(self, parent: QWidget, *, removable: bool = False) -> None:
        super().__init__(parent)
        self._removable = removable
        self._pictures: tuple[Picture, ...] = ()
        self._flow = FlowLayout(self, GAP_PX)
        policy = QSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Fixed)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self.buttons: list[IconButton] = []
        self.hide()

    def show_pictures(self, pictures: Sequence[Picture]) -> None:
        """Shows these instead; hidden without any."""
        if tuple(pictures) == self._pictures:
            return
        self._pictures = tuple(pictures)
        while (item := self._flow.takeAt(0)) is not None:
            widget = item.widget()
            if widget is not None:
                widget.hide()
                widget.deleteLater()
        self.buttons.clear()
        for number, picture in enumerate(self._pictures):
            self._flow.addWidget(self._framed(number, picture))
        self.setVisible(bool(self._pictures))
        self._flow.invalidate()
        self.updateGeometry()

    def widest(self, room: int) -> int:
        """How wide it would like to be, at most `room`."""
        return min(self._flow.sizeHint().width(), room) if self._pictures else 0

    def heightForWidth(self, width: int) -> int:
        return self._flow.heightForWidth(width)

    def hasHeightForWidth(self) -> bool:
        return True

    def sizeHint(self) -> QSize:
        return self._flow.sizeHint()

    def minimumSizeHint(self) -> QSize:
        return QSize(0, self._flow.minimumSize().height())

    def _framed(self, number: int, picture: Picture) -> QWidget:
        ratio = self.devicePixelRatioF()
        most = QSize(scaled(WIDEST_PX), scaled(HEIGHT_PX)) * ratio
        image, pixels = thumbnail(picture, most), size_of(picture)
        words = self.tr("Picture {0} of {1}, {2} by {3} pixels").format(
            number + 1, len(self._pictures), pixels.width(), pixels.height()
        )
        shown = QLabel(self)
        shown.setAccessibleName(words)
        shown.setToolTip(words)
        if image.isNull():
            shown.setText(self.tr("damaged picture"))
        else:
            shown.setPixmap(_pixmap(image, ratio))
        if not self._removable:
            return shown
        frame = QWidget(self)
        line = QHBoxLayout(frame)
        line.setContentsMargins(0, 0, 0, 0)
        line.setSpacing(2)
        line.addWidget(shown)
        name = self.tr("Remove picture {0}").format(number + 1)
        button = IconButton("close", name, lambda: self.removed.emit(number), frame)
        line.addWidget(button, 0, Qt.AlignmentFlag.AlignTop)
        self.buttons.append(button)
        return frame


def _pixmap(image: QImage, ratio: float) -> QPixmap:
    found = QPixmap.fromImage(image)
    found.setDevicePixelRatio(ratio)
    return found
