"""Colours, fonts and the style sheet of a `Theme`, and the controller that applies it to the application.

Widgets have no colours of their own.  The style sheet sets their look by these dynamic properties:

- `QPushButton` and `QToolButton`, `kind`: `primary` (one per page), `quiet` (no frame), `danger`; plain without it.
- `QLabel`, `role`: `title`, `heading`, `secondary`, `caption`, `pill`; body text without it.
- `QFrame`, `card`: true for a card; `QWidget`, `pane`: `surface`, `background`, `sunken` for backgrounds.
- `QFrame`, `banner`: `info`, `warning` or `danger`.

Widgets that paint themselves (plots, Markdown, icons) call `colours()` and `body_px()` while painting: Qt repaints
every widget when the theme changes.  Cached pictures and layouts are renewed in `changeEvent`, on `StyleChange`, which
every widget receives.
"""

from __future__ import annotations

import dataclasses
import string
from dataclasses import dataclass
from typing import Any, Literal

from PySide6.QtCore import QCoreApplication, QEvent, QObject, Qt
from PySide6.QtGui import QColor, QFont, QFontDatabase, QGuiApplication, QPalette
from PySide6.QtWidgets import QApplication, QLabel, QProxyStyle, QWidget

from engine.common.paths import resources_dir

Choice = Literal["system", "light", "dark"]
ColourName = Literal[
    "background", "surface", "raised", "sunken", "hover", "border", "text", "muted", "faint", "accent", "accent_hover",
    "accent_background", "accent_text", "on_accent", "danger", "gpu", "cpu", "pcie", "disk", "hit", "miss", "idle",
]  # fmt: skip

BODY_PX = 14
MIN_FONT_PX, MAX_FONT_PX = 11, 24
FAMILY = "Inter"


@dataclass(frozen=True, slots=True)
class Theme:
    """Every colour of the window as `#RRGGBB`.

    Text in `text`, `muted`, `accent_text` and `danger` has a contrast of at least 4.5:1 on each surface it is used on.
    `faint` has not: it is for lines, marks and disabled controls, never for text that has to be read.
    """

    name: str
    is_dark: bool
    background: str
    surface: str
    raised: str
    sunken: str
    hover: str
    border: str
    text: str
    muted: str
    faint: str
    accent: str
    accent_hover: str
    accent_background: str
    accent_text: str
    on_accent: str
    danger: str
    gpu: str
    cpu: str
    pcie: str
    disk: str
    hit: str
    miss: str
    idle: str


LIGHT = Theme(
    name="light",
    is_dark=False,
    background="#F6F7F9",
    surface="#FFFFFF",
    raised="#FFFFFF",
    sunken="#F2F4F7",
    hover="#F0F2F5",
    border="#E2E5EA",
    text="#1B1F27",
    muted="#5D6779",
    faint="#98A1B0",
    accent="#2F6FDE",
    accent_hover="#2762C8",
    accent_background="#E8F0FE",
    accent_text="#2460C4",
    on_accent="#FFFFFF",
    danger="#B3400F",
    gpu="#0072B2",
    cpu="#E69F00",
    pcie="#009E73",
    disk="#CC79A7",
    hit="#56B4E9",
    miss="#D55E00",
    idle="#999999",
)

DARK = Theme(
    name="dark",
    is_dark=True,
    background="#14161A",
    surface="#1B1E24",
    raised="#22262E",
    sunken="#101216",
    hover="#262B34",
    border="#2C313A",
    text="#E6E9EF",
    muted="#9AA3B2",
    faint="#6B7483",
    accent="#6EA0F7",
    accent_hover="#86B0F9",
    accent_background="#23324F",
    accent_text="#7FACF8",
    on_accent="#14161A",
    danger="#F2925A",
    gpu="#3E9BD6",
    cpu="#E9AE2D",
    pcie="#21B58A",
    disk="#D992BB",
    hit="#7CC6F0",
    miss="#EA7A2C",
    idle="#6F7683",
)


@dataclass(slots=True)
class _InUse:
    theme: Theme = LIGHT
    font_px: int = BODY_PX


_in_use = _InUse()


def colours() -> Theme:
    return _in_use.theme


def themed(name: ColourName) -> QColor:
    return QColor(getattr(_in_use.theme, name))


def body_px() -> int:
    return _in_use.font_px


def scaled(px: float) -> int:
    return round(px * _in_use.font_px / BODY_PX)


def style_sheet(theme: Theme, font_px: int, dpi: float = 96.0) -> str:
    """The whole application's style sheet.

    Args:
        font_px: size of body text in device-independent pixels; every other size follows in proportion.
        dpi: logical dots per inch of the screen, for sizes between two pixels (Qt rounds `px`, but not `pt`).
    """
    scale = font_px / BODY_PX

    def size(px: float) -> str:
        return f"{px * scale * 72 / dpi:.3f}pt"

    values = dataclasses.asdict(theme) | {
        "family": FAMILY,
        "body": size(14),
        "secondary": size(12.5),
        "caption": size(11.5),
        "heading": size(15),
        "title": size(16),
        "percent": size(20),
        "greeting": size(22),
        "bubble": theme.raised if theme.is_dark else theme.accent_background,
        "images": (resources_dir() / "themes" / theme.name).as_posix(),
    }
    template = (resources_dir() / "themes" / "switchyard.qss").read_text(encoding="utf-8")
    return string.Template(template).substitute(values)


def palette(theme: Theme) -> QPalette:
    result = QPalette()
    role = QPalette.ColorRole
    for name, colour in {
        role.Window: theme.background,
        role.WindowText: theme.text,
        role.Base: theme.surface,
        role.AlternateBase: theme.sunken,
        role.Text: theme.text,
        role.PlaceholderText: theme.muted,
        role.Button: theme.raised,
        role.ButtonText: theme.text,
        role.ToolTipBase: theme.raised,
        role.ToolTipText: theme.text,
        role.BrightText: theme.danger,
        role.Highlight: theme.accent,
        role.HighlightedText: theme.on_accent,
        role.Accent: theme.accent,
        role.Link: theme.accent_text,
        role.LinkVisited: theme.accent_text,
        role.Light: theme.raised,
        role.Mid: theme.border,
        role.Dark: theme.border,
    }.items():
        result.setColor(name, QColor(colour))
    for name in (role.WindowText, role.Text, role.ButtonText):
        result.setColor(QPalette.ColorGroup.Disabled, name, QColor(theme.faint))
    return result


def load_fonts() -> None:
    if FAMILY not in QFontDatabase.families():
        for path in sorted((resources_dir() / "fonts").glob("*.otf")):
            QFontDatabase.addApplicationFont(str(path))


def tabular(font: QFont) -> QFont:
    result = QFont(font)
    result.setFeature(QFont.Tag("tnum"), 1)
    return result


def use_tabular_figures(widget: QWidget) -> None:
    """Uses tabular digits, so that changing numbers do not move the text after them."""
    widget.setFont(tabular(widget.font()))
    widget.installEventFilter(_TabularFigures(widget))


def set_look(widget: QWidget, name: str, value: str) -> None:
    if widget.property(name) != value:
        widget.setProperty(name, value)
        widget.style().unpolish(widget)
        widget.style().polish(widget)
        QCoreApplication.sendEvent(widget, QEvent(QEvent.Type.StyleChange))


class _TabularFigures(QObject):
    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() == QEvent.Type.StyleChange and isinstance(watched, QWidget):
            watched.setFont(tabular(watched.font()))
        return False


class PlainTextStyle(QProxyStyle):
    """A style in which labels, tooltips and message boxes show their text as it is.

    Qt guesses whether a text is HTML, and HTML loads files, which on Windows may be another machine's: the names, cells
    and messages shown here come from strangers. What is meant as HTML says so with `setTextFormat`. A style sees every
    label before its text is laid out, also those that Qt makes itself.
    """

    def polish(self, what: Any) -> None:
        if isinstance(what, QLabel) and what.textFormat() == Qt.TextFormat.AutoText:
            what.setTextFormat(Qt.TextFormat.PlainText)
        super().polish(what)


class ThemeController(QObject):
    def __init__(self, choice: Choice = "system", font_px: int = BODY_PX, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._choice: Choice = choice
        QApplication.setStyle(PlainTextStyle("Fusion"))
        load_fonts()
        QGuiApplication.styleHints().colorSchemeChanged.connect(self._follow_system)
        self._force_scheme()
        self._apply(self._wanted(QGuiApplication.styleHints().colorScheme()), _clamp(font_px))

    @property
    def theme(self) -> Theme:
        return _in_use.theme

    @property
    def choice(self) -> Choice:
        return self._choice

    @property
    def font_px(self) -> int:
        return _in_use.font_px

    def set_choice(self, choice: Choice) -> None:
        if choice != self._choice:
            self._choice = choice
            self._force_scheme()
            self._show(self._wanted(QGuiApplication.styleHints().colorScheme()))

    def set_font_px(self, font_px: int) -> None:
        font_px = _clamp(font_px)
        if font_px != _in_use.font_px:
            self._apply(_in_use.theme, font_px)

    def _wanted(self, system: Qt.ColorScheme) -> Theme:
        if self._choice == "system":
            return DARK if system == Qt.ColorScheme.Dark else LIGHT
        return DARK if self._choice == "dark" else LIGHT

    def _follow_system(self, system: Qt.ColorScheme) -> None:
        if self._choice == "system":
            self._show(self._wanted(system))

    def _force_scheme(self) -> None:
        """Sets the platform's colour scheme too, so that title bars and native dialogs match the window."""
        scheme = {"light": Qt.ColorScheme.Light, "dark": Qt.ColorScheme.Dark}.get(self._choice, Qt.ColorScheme.Unknown)
        QGuiApplication.styleHints().setColorScheme(scheme)

    def _show(self, theme: Theme) -> None:
        if theme is not _in_use.theme:
            self._apply(theme, _in_use.font_px)

    def _apply(self, theme: Theme, font_px: int) -> None:
        app = QApplication.instance()
        if not isinstance(app, QApplication):
            raise RuntimeError("A ThemeController needs a QApplication.")
        _in_use.theme, _in_use.font_px = theme, font_px
        font = QFont(FAMILY)
        font.setPixelSize(font_px)
        app.setFont(font)
        app.setPalette(palette(theme))
        screen = app.primaryScreen()
        # Removed first: Qt would otherwise restyle every object the old sheet has cached, among them widgets that were
        # measured and deleted before they were shown: dangling pointers.
        app.setStyleSheet("")
        app.setStyleSheet(style_sheet(theme, font_px, screen.logicalDotsPerInchY() if screen else 96.0))


def _clamp(font_px: int) -> int:
    return max(MIN_FONT_PX, min(MAX_FONT_PX, font_px))
