"""Keyboard shortcuts, with their descriptions for the list of shortcuts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from PySide6.QtCore import Qt
from PySide6.QtGui import QKeySequence, QShortcut
from PySide6.QtWidgets import QWidget

_NOTED = "notedKeys"

Key = tuple[str, str]


def add_shortcut(
    widget: QWidget,
    keys: QKeySequence | QKeySequence.StandardKey | str,
    words: str,
    do: Callable[[], object],
    *,
    context: Qt.ShortcutContext = Qt.ShortcutContext.WindowShortcut,
) -> None:
    """Runs `do` on these keys while `widget` is shown; `words` describe it, empty for a second shortcut to the same."""
    shortcut = QShortcut(QKeySequence(keys), widget, context=context)
    shortcut.setWhatsThis(words)
    shortcut.activated.connect(lambda: do())


def native(keys: str) -> str:
    return QKeySequence(keys).toString(QKeySequence.SequenceFormat.NativeText)


def note_keys(widget: QWidget, keys: Iterable[Key]) -> None:
    """Lists keys that the widget handles itself, such as Enter in a text box."""
    widget.setProperty(_NOTED, [list(key) for key in keys])


def keys_of(widget: QWidget, *, excluding: QWidget | None = None) -> list[Key]:
    """All shortcuts within a widget, except those within `excluding`."""
    return list(_keys(widget, excluding))


def _keys(widget: QWidget, excluding: QWidget | None) -> Iterator[Key]:
    def counts(one: QWidget) -> bool:
        return excluding is None or not (one is excluding or excluding.isAncestorOf(one))

    for one in (widget, *widget.findChildren(QWidget)):
        if counts(one):
            for keys, words in one.property(_NOTED) or []:
                yield str(keys), str(words)
    for shortcut in widget.findChildren(QShortcut):
        parent = shortcut.parent()
        if shortcut.whatsThis() and isinstance(parent, QWidget) and counts(parent):
            yield shortcut.key().toString(QKeySequence.SequenceFormat.NativeText), shortcut.whatsThis()
