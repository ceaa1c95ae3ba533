"""An answer's colours, fonts and spacing, derived from the theme and the widget's font."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from PySide6.QtGui import QColor, QFont, QFontDatabase, QFontInfo, QFontMetricsF, QTextCharFormat

from app.theme import Theme, colours
from app.widgets.answer_text.blocks import Gap, Segment, TextBlock

MOST_MATCHES = 500
"""Of one message: nobody looks at more one by one."""


def mark_format(*, is_chosen: bool) -> QTextCharFormat:
    theme, look = colours(), QTextCharFormat()
    mark, ground = QColor(theme.cpu), QColor(theme.surface)
    share = 1.0 if is_chosen else 0.4 if theme.is_dark else 0.45
    both = ((mark.red(), ground.red()), (mark.green(), ground.green()), (mark.blue(), ground.blue()))
    look.setBackground(QColor(*(round(share * one + (1 - share) * other) for one, other in both)))
    look.setForeground(QColor("#14161A" if is_chosen else theme.text))
    look.setFontUnderline(is_chosen)
    return look


# Okabe and Ito's hues, darkened or lightened to at least 4.5:1 on their theme's code card.
_LIGHT_SYNTAX = {
    "keyword": "#0069A3",
    "string": "#0B6B4F",
    "number": "#8A4B00",
    "type": "#8E3A73",
    "inserted": "#0B6B4F",
    "deleted": "#B3400F",
}
_DARK_SYNTAX = {
    "keyword": "#56B4E9",
    "string": "#4CC9A4",
    "number": "#E9AE2D",
    "type": "#E0A3C8",
    "inserted": "#4CC9A4",
    "deleted": "#F2925A",
}
COLOURED = ("comment", *_LIGHT_SYNTAX)
"""The kinds of tokens that have a colour."""
_HEADING_SCALE = {1: 1.5, 2: 1.3, 3: 1.15, 4: 1.0, 5: 1.0, 6: 1.0}
_GAP_EMS = {Gap.ITEM: 0.3, Gap.LOOSE: 0.6, Gap.PARAGRAPH: 0.85, Gap.HEADING: 1.4}
_AFTER_HEADING_EMS = 0.5
MAX_VISIBLE_DEPTH = 8  # containers nested deeper are not indented further, so that text keeps room
CODE_LINE = 1.6  # line height of code in ems


@dataclass(frozen=True)
class Style:
    """One answer's look; lengths are device-independent pixels."""

    theme: Theme
    font: QFont

    @cached_property
    def body_px(self) -> int:
        return max(6, QFontInfo(self.font).pixelSize())

    def px(self, ems: float) -> int:
        return round(self.body_px * ems)

    @property
    def indent(self) -> int:
        return self.px(1.7)

    @property
    def quote_indent(self) -> int:
        return self.px(1.1)

    def left_of(self, containers: str) -> int:
        visible = containers[:MAX_VISIBLE_DEPTH]
        return visible.count("l") * self.indent + visible.count("q") * self.quote_indent

    def gap(self, above: Segment | None, segment: Segment) -> int:
        if above is None:
            return 0
        if isinstance(above, TextBlock) and above.heading and segment.gap is not Gap.HEADING:
            return self.px(_AFTER_HEADING_EMS)
        if not isinstance(above, TextBlock) and segment.gap in (Gap.ITEM, Gap.LOOSE):
            return self.px(_GAP_EMS[Gap.PARAGRAPH])
        return self.px(_GAP_EMS[segment.gap])

    def line_distance(self, font: QFont) -> float:
        px = QFontInfo(font).pixelSize()
        wanted = px * (1.5 if px <= self.body_px else 1.3)
        return max(0.0, wanted - QFontMetricsF(font).height())

    def heading_font(self, level: int) -> QFont:
        font = QFont(self.font)
        font.setPixelSize(self.px(_HEADING_SCALE[level]))
        font.setWeight(QFont.Weight.DemiBold)
        return font

    def code_font(self, px: int | None = None) -> QFont:
        font = QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont)
        font.setPixelSize(px or self.px(0.9))
        font.setStyleHint(QFont.StyleHint.Monospace)
        font.setFixedPitch(True)
        return font

    @cached_property
    def code_line_height(self) -> int:
        return max(round(self.px(0.9) * CODE_LINE), int(QFontMetricsF(self.code_font()).height()) + 1)

    @property
    def small_font(self) -> QFont:
        font = QFont(self.font)
        font.setPixelSize(max(6, self.px(0.84)))
        font.setWeight(QFont.Weight.Normal)
        return font

    def syntax(self, name: str) -> QColor:
        if name == "comment":
            return QColor(self.theme.muted)
        return QColor((_DARK_SYNTAX if self.theme.is_dark else _LIGHT_SYNTAX)[name])

    @property
    def inline_code_background(self) -> QColor:
        return QColor(self.theme.border)

    @property
    def card_padding(self) -> int:
        return self.px(0.85)

    @cached_property
    def card_header(self) -> int:
        return int(QFontMetricsF(self.small_font).height()) + 16

    @property
    def card_top(self) -> int:
        return self.card_header + self.px(0.55)

    @property
    def maths_px(self) -> float:
        """An em of formulas: their small letters are smaller than those of the text around them."""
        return self.body_px * 1.12

    def same_as(self, other: Style) -> bool:
        return self.theme == other.theme and self.font.family() == other.font.family() and self.body_px == other.body_px
