"""Pictures of a message as thumbnails, in the chat and above the box that one writes in."""

from __future__ import annotations

import math
from collections.abc import Sequence

from PySide6.QtCore import QSize, Signal
from PySide6.QtGui import QPixmap
from PySide6.QtWidgets import QLabel, QSizePolicy, QWidget

from app.icons import IconButton
from app.services.pictures import fitting
from app.services.thumbnails import Thumbnail, Thumbnails, size_of
from app.theme import scaled, set_look
from app.widgets.flow_layout import Flow
from app.widgets.scaffold import LEFT, STRETCH, TOP, hbox, text_label, vbox
from app.widgets.small_font import small_font
from engine.common.chat import Picture

HEIGHT_PX, WIDEST_PX = 88, 176
GAP_PX = 8
CAPTION_PX = 12


class PictureRow(Flow):
    """Wraps into lines.

    Each takes its place at once, and is shown there when it is decoded.

    Args:
        removable: each has a button that takes it away.

    Signals: `removed`, with the number of a picture from 0; `resized`, when one takes another place than was expected.
    """

    removed = Signal(int)
    resized = Signal()

    def __init__(self, thumbnails: Thumbnails, parent: QWidget, *, removable: bool = False) -> None:
        super().__init__(parent=parent, gap=GAP_PX)
        self._thumbnails = thumbnails
        self._removable = removable
        self._pictures: tuple[Picture, ...] = ()
        self._captions: tuple[str, ...] = ()
        policy = QSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Minimum)
        policy.setHeightForWidth(True)
        self.setSizePolicy(policy)
        self.buttons: list[IconButton] = []
        self.hide()

    def show_pictures(self, pictures: Sequence[Picture], captions: Sequence[str] = ()) -> None:
        if tuple(pictures) == self._pictures and tuple(captions) == self._captions:
            return
        self._pictures, self._captions = tuple(pictures), tuple(captions)
        self.clear()
        self.buttons.clear()
        for number, picture in enumerate(self._pictures):
            self.add(self._framed(number, picture))
        self.setVisible(bool(self._pictures))
        self._lines.invalidate()
        self.updateGeometry()

    def minimumSizeHint(self) -> QSize:
        return QSize(0, super().minimumSizeHint().height())

    def _framed(self, number: int, picture: Picture) -> QWidget:
        shown = self._place_of(number, picture)
        if not self._removable:
            return shown
        frame = QWidget(self)
        name = self.tr("Remove picture {0}").format(number + 1)
        button = IconButton("close", name, lambda: self.removed.emit(number), frame)
        hbox(shown, (button, TOP), into=frame, gap=2)
        self.buttons.append(button)
        caption = self._captions[number] if number < len(self._captions) else ""
        if not caption:
            return frame
        column = QWidget(self)
        words = text_label(column, caption, role="secondary")
        words.setFont(small_font(words.font(), CAPTION_PX))
        column.setMinimumHeight(scaled(HEIGHT_PX) + 2 + words.sizeHint().height())  # so that captions are on one line
        # A gap on the right, so that one caption ends before the next begins.
        vbox(STRETCH, (frame, LEFT), (words, LEFT), into=column, gap=2, margins=(0, 0, GAP_PX, 0))
        shown.setAccessibleDescription(caption)
        return column

    def _place_of(self, number: int, picture: Picture) -> QLabel:
        ratio = self.devicePixelRatioF()
        most = QSize(scaled(WIDEST_PX), scaled(HEIGHT_PX)) * ratio
        place = text_label(self)
        place.setProperty("picture", "awaited")
        pixels = size_of(picture)
        self._name(place, number, pixels)
        expected = fitting(pixels, most) if pixels.isValid() else QSize(most.height(), most.height())
        place.setFixedSize(_in_window(expected, ratio))
        known = self._thumbnails.ask(picture, most, place, lambda made: self._show_in(place, number, made, ratio))
        if known is not None:
            self._show_in(place, number, known, ratio)
        return place

    def _show_in(self, place: QLabel, number: int, made: Thumbnail, ratio: float) -> None:
        if made.image.isNull():
            place.setText(self.tr("damaged picture"))
            size = place.sizeHint()
        else:
            image = QPixmap.fromImage(made.image)
            image.setDevicePixelRatio(ratio)
            place.setPixmap(image)
            size = _in_window(made.image.size(), ratio)
        set_look(place, "picture", "shown")
        self._name(place, number, made.pixels)
        if size != place.size():
            place.setFixedSize(size)
            self._lines.invalidate()
            self.updateGeometry()
            self.resized.emit()

    def _name(self, place: QLabel, number: int, pixels: QSize) -> None:
        words = self.tr("Picture {0} of {1}").format(number + 1, len(self._pictures))
        if pixels.isValid():
            words = self.tr("{0}, {1} by {2} pixels").format(words, pixels.width(), pixels.height())
        place.setAccessibleName(words)
        place.setToolTip(words)


def _in_window(size: QSize, ratio: float) -> QSize:
    """Real pixels as those of the window, rounded up, so that nothing is cut off."""
    return QSize(math.ceil(size.width() / ratio), math.ceil(size.height() / ratio))
