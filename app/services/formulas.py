"""Formulas as pictures, drawn by a process of their own: some take for ever, and only a process can be stopped."""

from __future__ import annotations

import json
import re
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field

from PySide6.QtCore import (
    QByteArray,
    QCoreApplication,
    QObject,
    QProcess,
    QRectF,
    Qt,
    Signal,
)
from PySide6.QtGui import QColor, QPainter
from PySide6.QtSvg import QSvgRenderer

from app.services.background import timer
from app.services.child_process import child, delete_child
from app.services.formula_process import COLOUR, SIZE
from engine.common.errors import CancelCheck, RequestCancelled
from engine.common.paths import confined_module

MOST_CHARACTERS = 2_000
MOST_NESTED = 6
"""Braces, \\left and \\begin within each other: the time for fractions doubles with each."""
MOST_WAITING = 4_000
STARTING_MS = 20_000
FORMULA_MS = 2_000
"""By the clock, for a process that does not even see that its own time is over."""
IDLE_MS = 30_000
"""After which the process ends: 60 MB for what takes a quarter of a second to start again."""
MOST_LOST = 10
"""Formulas in a row that took too long: an answer that has more is not worth a processor."""
_MOST_KEPT = 2_000
_MOST_SVG = 500_000
_POLL_S = 0.05
_NESTING = re.compile(r"\\(?:left|right|begin|end)(?![A-Za-z])|\\.|[{}]", re.DOTALL)
_STEPS = {"{": 1, "\\left": 1, "\\begin": 1, "}": -1, "\\right": -1, "\\end": -1}


@dataclass(frozen=True, slots=True)
class Formula:
    tex: str
    display: bool = False


class Picture:
    def __init__(self, svg: str) -> None:
        self.svg = svg
        self._renderers: dict[str, QSvgRenderer] = {}
        box = self._renderer(COLOUR).viewBoxF()
        self.width = box.width() / SIZE
        self.ascent = -box.top() / SIZE
        self.descent = box.bottom() / SIZE

    def paint(self, painter: QPainter, target: QRectF, colour: QColor) -> None:
        self._renderer(colour.name()).render(painter, target)

    def _renderer(self, colour: str) -> QSvgRenderer:
        found = self._renderers.get(colour)
        if found is None:
            if len(self._renderers) > 3:
                self._renderers.clear()
            svg = self.svg.replace(COLOUR, colour).encode()
            found = self._renderers[colour] = QSvgRenderer(QByteArray(svg))
        return found


def nesting(tex: str) -> int:
    depth = deepest = 0
    for match in _NESTING.finditer(tex):
        depth += _STEPS.get(match.group(), 0)
        deepest = max(deepest, depth)
    return deepest


@dataclass(slots=True)
class _Errand:
    waiting: set[Formula]
    result: Future[dict[Formula, str]]
    drawn: dict[Formula, str] = field(default_factory=dict)


class Formulas(QObject):
    """Draws one formula at a time, and keeps what it has drawn.  The process starts with the first.

    Signals:
        drawn: a `Formula` whose picture was asked for is there, or is known to have none.
    """

    drawn = Signal(object)

    _sent = Signal(object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._known: OrderedDict[Formula, Picture | None] = OrderedDict()
        self._waiting: deque[Formula] = deque()
        self._process: QProcess | None = None
        self._is_drawing = False
        self._cannot_start = False
        self._lost = 0
        self._clock = timer(self, self._on_lost, once=True)
        self._idle = timer(self, self.close, IDLE_MS, once=True)
        self._errands: list[_Errand] = []
        self._sent.connect(self._on_errand, Qt.ConnectionType.QueuedConnection)
        self.drawn.connect(self._bring)

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting)

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def picture(self, formula: Formula) -> Picture | None:
        """The picture, if it is known: it costs nothing to ask."""
        found = self._known.get(formula)
        if found is not None:
            self._known.move_to_end(formula)
        return found

    def ask(self, formula: Formula) -> bool:
        """Has a picture drawn; `drawn` follows if this is True.  False: it is there, or there will be none."""
        if formula in self._known or self._cannot_start:
            return False
        tex = formula.tex
        if not tex.strip() or len(tex) > MOST_CHARACTERS or nesting(tex) > MOST_NESTED:
            return False
        if formula not in self._waiting:
            if len(self._waiting) >= MOST_WAITING:
                return False
            self._waiting.append(formula)
            self._draw_next()
        return True

    def draw_all(self, wanted: Iterable[Formula], cancelled: CancelCheck) -> dict[Formula, str]:
        """The SVG of each that can be drawn, for a `Picture` of the calling thread's own; never on this object's.

        Raises:
            RequestCancelled: `cancelled`.
        """
        errand = _Errand(set(wanted), Future())
        if errand.waiting:
            self._sent.emit(errand)
            while True:
                try:
                    return errand.result.result(_POLL_S)
                except NotYet:
                    if cancelled():
                        raise RequestCancelled from None
        return {}

    def _on_errand(self, errand: _Errand) -> None:
        self._errands.append(errand)
        for formula in list(errand.waiting):
            if not self.ask(formula):
                self._bring(formula)
        self._end_errands()

    def _bring(self, formula: Formula) -> None:
        """To those who wait for it, at once: only so many pictures are kept."""
        picture = self._known.get(formula)
        for errand in self._errands:
            if formula in errand.waiting:
                errand.waiting.discard(formula)
                if picture is not None:
                    errand.drawn[formula] = picture.svg
        self._end_errands()

    def _end_errands(self) -> None:
        for errand in [errand for errand in self._errands if not errand.waiting]:
            self._errands.remove(errand)
            errand.result.set_result(errand.drawn)

    def forget(self) -> None:
        self.close()
        self._known.clear()
        self._cannot_start = False

    def close(self) -> None:
        self._clock.stop()
        self._idle.stop()
        self._waiting.clear()
        self._end_process()
        for errand in self._errands:
            errand.waiting.clear()
        self._end_errands()

    def _draw_next(self) -> None:
        if self._is_drawing or not self._waiting:
            return
        self._idle.stop()
        process, is_new = self._process, self._process is None
        if process is None:
            command, variables = confined_module("app.services.formula_process")
            process = self._process = child(
                self,
                command,
                variables,
                ended=lambda *_: self._on_lost(),
                not_started=self._on_not_started,
                reads=self._on_answer,
                confined=True,
            )
            process.start()
        formula = self._waiting[0]
        self._is_drawing = True
        self._clock.start(STARTING_MS if is_new else FORMULA_MS)
        request = json.dumps({"tex": formula.tex, "display": formula.display}).encode("ascii")
        process.write(request + b"\n")

    def _on_answer(self) -> None:
        process = self._process
        while process is not None and self._is_drawing and process.canReadLine():
            svg = json.loads(bytes(process.readLine().data())).get("svg")
            self._lost = 0
            self._settle(Picture(svg) if svg and len(svg) < _MOST_SVG else None)

    def _settle(self, picture: Picture | None) -> None:
        """The first of the queue is done, one way or the other."""
        self._clock.stop()
        self._is_drawing = False
        formula = self._waiting.popleft()
        self._known[formula] = picture
        if len(self._known) > _MOST_KEPT:
            self._known.popitem(last=False)
        self._draw_next()
        if not self._waiting:
            self._idle.start()
        self.drawn.emit(formula)

    def _on_lost(self) -> None:
        """The formula that it was drawing is shown as its source; the next gets a new process."""
        was_drawing = self._is_drawing
        self._end_process()
        if was_drawing and self._waiting:
            self._lost += 1
            given_up = []
            while self._lost >= MOST_LOST and len(self._waiting) > 1:
                given_up.append(self._waiting.pop())
                self._known[given_up[-1]] = None
            self._settle(None)
            for formula in given_up:
                self.drawn.emit(formula)

    def _on_not_started(self) -> None:
        self._cannot_start = True
        while self._waiting:
            self.drawn.emit(self._waiting.popleft())
        self.close()

    def _end_process(self) -> None:
        process, self._process = self._process, None
        self._is_drawing = False
        if process is not None:
            process.blockSignals(True)
            process.closeWriteChannel()
            process.kill()
            process.waitForFinished(1000)
            delete_child(process)


def formulas() -> Formulas:
    """Those of this program: one process, and one memory of what was drawn, for all windows, answers and printing."""
    application = QCoreApplication.instance()
    assert application is not None
    found: Formulas | None = application.findChild(Formulas, options=Qt.FindChildOption.FindDirectChildrenOnly)
    if found is None:
        found = Formulas(application)
        application.aboutToQuit.connect(found.close)
    return found
