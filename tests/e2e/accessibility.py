"""What a screen reader sees of a window: its widgets by role and name, asked over the accessibility bus (AT-SPI).

The tests find buttons by what they are called instead of by where they are drawn, and fail if a button has no name.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from jeepney import DBusAddress, HeaderFields, MessageType, new_method_call
from jeepney.io.blocking import open_dbus_connection

_ROOT = "/org/a11y/atspi/accessible/root"
_STATE_SHOWING = 25  # AtspiStateType
_STATE_ENABLED = 8
_STATE_FOCUSED = 12
_LABELLED_BY = 2  # AtspiRelationType
_WITHOUT_TEXT = {"filler", "frame", "panel", "push button", "check box", "radio button", "scroll bar", "scroll pane"}


class _GoneError(Exception):
    """The widget went away while it was looked at, or the window does not answer."""


@dataclass(frozen=True)
class Widget:
    """One thing in the window.  `x`, `y`, `width`, `height` are pixels of the screen."""

    path: str
    role: str
    name: str
    states: int
    x: int = 0
    y: int = 0
    width: int = 0
    height: int = 0

    @property
    def is_showing(self) -> bool:
        return bool(self.states >> _STATE_SHOWING & 1)

    @property
    def is_enabled(self) -> bool:
        return bool(self.states >> _STATE_ENABLED & 1)

    @property
    def is_focused(self) -> bool:
        return bool(self.states >> _STATE_FOCUSED & 1)


class AccessibleWindow:
    """The one application on the bus, as its accessibility tree."""

    def __init__(self, bus_address: str) -> None:
        self._bus = open_dbus_connection(bus=bus_address)

    def __enter__(self) -> "AccessibleWindow":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bus.close()

    def find(self, name: str, role: str | None = None) -> Widget | None:
        """The first widget that shows and has that accessible name (and role, such as `push button`), or None."""
        try:
            application = self._application()
            walk = self._walk(application, _ROOT) if application else iter(())
            return next((w for w in walk if w.name == name and role in (None, w.role)), None)
        except _GoneError:
            return None

    def showing(self) -> list[Widget]:
        """Every widget that shows now, in the order of the tree; empty while there is no window."""
        try:
            application = self._application()
            return list(self._walk(application, _ROOT)) if application else []
        except _GoneError:
            return []

    def texts(self) -> list[str]:
        """What there is to read: the names of all widgets, and the text of those that hold some."""
        application, texts = self._application(), []
        for widget in self.showing():
            texts.append(widget.name)
            if widget.role in _WITHOUT_TEXT:
                continue
            with contextlib.suppress(_GoneError):  # most other widgets have none either
                texts += self._call(application, widget.path, "org.a11y.atspi.Text", "GetText", "ii", (0, -1))
        return texts

    def text(self, widget: Widget) -> str:
        """The text in a field or a document."""
        application = self._application()
        (text,) = self._call(application, widget.path, "org.a11y.atspi.Text", "GetText", "ii", (0, -1))
        return str(text)

    def description(self, widget: Widget) -> str:
        """What a screen reader says of a widget beside its name."""
        accessible = "org.a11y.atspi.Accessible"
        body = (accessible, "Description")
        ((_, said),) = self._call(
            self._application(), widget.path, "org.freedesktop.DBus.Properties", "Get", "ss", body
        )
        return str(said)

    def press(self, widget: Widget) -> None:
        """Does what a widget is for, wherever it lies, without waiting for the end of it: a dialog stays open."""
        there = DBusAddress(widget.path, bus_name=self._application(), interface="org.a11y.atspi.Action")
        self._bus.send(new_method_call(there, "DoAction", "i", (0,)))

    def label(self, widget: Widget) -> str:
        """The name of what stands as a widget's label; empty without one."""
        accessible = "org.a11y.atspi.Accessible"
        (relations,) = self._call(self._application(), widget.path, accessible, "GetRelationSet")
        for kind, targets in relations:
            if kind == _LABELLED_BY:
                return self._widget(self._application(), targets[0][1]).name
        return ""

    def describe(self) -> str:
        """Every widget that shows, a line each, for the message of a failed test."""
        return "\n".join(f"{w.role} {w.name!r} at {w.x},{w.y} {w.width}x{w.height}" for w in self.showing())

    # --- the bus --------------------------------------------------------------------------------------

    def _walk(self, application: str, path: str) -> Iterator[Widget]:
        """Every question costs this process and the window time: most of a window is hidden pages, asked one each."""
        try:
            states = self._states(application, path)
            if path != _ROOT:
                if not states >> _STATE_SHOWING & 1:
                    return
                yield self._widget(application, path, states)
            children = self._call(application, path, "org.a11y.atspi.Accessible", "GetChildren")[0]
        except _GoneError:
            return
        for _, child in children:
            yield from self._walk(application, child)

    def _states(self, application: str, path: str) -> int:
        ((low, high),) = self._call(application, path, "org.a11y.atspi.Accessible", "GetState")
        return int(low | high << 32)

    def _widget(self, application: str, path: str, states: int | None = None) -> Widget:
        accessible = "org.a11y.atspi.Accessible"
        (role,) = self._call(application, path, accessible, "GetRoleName")
        ((_, name),) = self._call(
            application, path, "org.freedesktop.DBus.Properties", "Get", "ss", (accessible, "Name")
        )
        states = self._states(application, path) if states is None else states
        (extents,) = self._call(application, path, "org.a11y.atspi.Component", "GetExtents", "u", (0,))
        return Widget(path, role, name, states, *extents)

    def _application(self) -> str:
        """Bus name of the window's process; empty while it is not on the bus."""
        driver, path = "org.freedesktop.DBus", "/org/freedesktop/DBus"
        (names,) = self._call(driver, path, driver, "ListNames")
        return next((n for n in names if n.startswith(":") and n != self._bus.unique_name), "")

    def _call(
        self, service: str, path: str, interface: str, method: str, signature: str = "", body: tuple[Any, ...] = ()
    ) -> tuple[Any, ...]:
        call = new_method_call(
            DBusAddress(path, bus_name=service, interface=interface), method, signature or None, body
        )
        try:
            reply = self._bus.send_and_get_reply(call, timeout=20)
        except TimeoutError as error:
            raise _GoneError(f"{method} of {path}: no answer") from error
        if reply.header.message_type is MessageType.error:
            raise _GoneError(f"{method} of {path}: {reply.header.fields.get(HeaderFields.error_name)}")
        return tuple(reply.body)
