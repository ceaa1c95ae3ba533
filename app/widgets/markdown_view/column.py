"""The column of panes for a list of segments, updated by rewriting only from the first difference."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from PySide6.QtWidgets import QWidget

from app.widgets.markdown_view.code_card import CodeCard
from app.widgets.markdown_view.document_pane import DocumentPane
from app.widgets.markdown_view.rule_line import RuleLine
from app.widgets.markdown_view.segments import CodeBlock, RuleBlock, Segment, TableBlock, TextBlock
from app.widgets.markdown_view.style import Style
from app.widgets.markdown_view.table_pane import TablePane
from app.widgets.markdown_view.text_pane import RunState, TextPane

Pane: TypeAlias = TextPane | CodeCard | TablePane | RuleLine

_PANES: dict[type, type[Pane]] = {TextBlock: TextPane, CodeBlock: CodeCard, TableBlock: TablePane, RuleBlock: RuleLine}


@dataclass(frozen=True, slots=True)
class _Mark:
    """The column's state before a segment was written: number of panes, and how far the last text run went."""

    panes: int
    run: RunState | None


class PaneColumn:
    """Owns the panes, and sets only their position and height."""

    def __init__(self, parent: QWidget, on_new_browser: Callable[[DocumentPane], None]) -> None:
        self._parent = parent
        self._on_new_browser = on_new_browser
        self._shown: list[Segment] = []
        self._marks: list[_Mark] = []
        self._gaps: list[int] = []  # above each pane
        self._certain = 0  # segments known to match the target since the last update
        self._heights: list[int] = []  # of the panes laid out for `_width`
        self._width = -1
        self._placed = 0  # panes at the top that are in their final position
        self.panes: list[Pane] = []
        self.written_segments = 0

    @property
    def shown(self) -> Sequence[Segment]:
        return self._shown

    def clear(self) -> None:
        """Removes all panes."""
        for pane in self.panes:
            _dispose(pane)
        self.panes, self._shown, self._marks, self._gaps, self._heights = [], [], [], [], []
        self._certain = self._placed = 0

    def update(
        self, finished: Sequence[Segment], tail: Sequence[Segment], style: Style, deadline: float, recheck: bool = False
    ) -> bool:
        """Shows `finished` and then `tail`; stops after `deadline` (of `time.perf_counter`) and then returns False.

        Args:
            recheck: also compare finished segments that were compared before.
        """
        if recheck:
            self._certain = 0
        same = self._certain = self._first_difference(finished, tail)
        spare: list[Pane] = []
        if same < len(self._shown):
            spare = self._rewind(same)
        is_complete = True
        for segment in _rest(finished, tail, same):
            self._write(segment, style, spare)
            if time.perf_counter() > deadline:
                is_complete = len(self._shown) == len(finished) + len(tail)
                break
        for pane in spare:
            _dispose(pane)
        self._certain = min(len(finished), len(self._shown))
        return is_complete

    def place(self, width: int, style: Style) -> int:
        """Positions every pane in a column of `width`; returns the total height.

        Panes that are already laid out for this width and have not changed since are skipped.
        """
        height = self.height_for(width, style)
        top = 0
        for index, (pane, gap) in enumerate(zip(self.panes, self._gaps, strict=True)):
            top += gap
            if index >= self._placed:
                left = style.left_of(pane.containers)
                pane.setGeometry(left, top, max(1, width - left), self._heights[index])
            top += self._heights[index]
        self._placed = len(self.panes)
        return height

    def height_for(self, width: int, style: Style) -> int:
        """The height at `width`; it lays the panes out for it, so `place` must follow for the actual width."""
        if width != self._width:
            self._width = width
            self._touch(0)
        for pane in self.panes[len(self._heights) :]:
            self._heights.append(pane.height_for(max(1, width - style.left_of(pane.containers))))
        return sum(self._gaps) + sum(self._heights)

    def _touch(self, index: int) -> None:
        """Invalidates the layout from this pane on."""
        del self._heights[index:]
        self._placed = min(self._placed, index)

    def browsers(self) -> list[DocumentPane]:
        """The documents from top to bottom."""
        return [browser for pane in self.panes if (browser := pane.browser()) is not None]

    def _first_difference(self, finished: Sequence[Segment], tail: Sequence[Segment]) -> int:
        index = min(self._certain, len(self._shown))
        total = len(finished) + len(tail)
        while index < min(len(self._shown), total):
            wanted = finished[index] if index < len(finished) else tail[index - len(finished)]
            if self._shown[index] != wanted:
                break
            index += 1
        return index

    def _rewind(self, count: int) -> list[Pane]:
        """Goes back to the first `count` segments; returns the panes no longer used, topmost first."""
        mark = self._marks[count]
        spare = self.panes[mark.panes :]
        del self.panes[mark.panes :], self._gaps[mark.panes :], self._shown[count:], self._marks[count:]
        if mark.run is not None:
            last = self.panes[-1]
            assert isinstance(last, TextPane)
            last.rewind(mark.run)
            self._touch(mark.panes - 1)
        self._touch(mark.panes)
        return spare

    def _write(self, segment: Segment, style: Style, spare: list[Pane]) -> None:
        last = self.panes[-1] if self.panes else None
        self._marks.append(_Mark(len(self.panes), last.state() if isinstance(last, TextPane) else None))
        gap = style.gap(self._shown[-1] if self._shown else None, segment)
        self._shown.append(segment)
        self.written_segments += 1
        if isinstance(last, TextPane) and last.accepts(segment):
            last.add(segment, gap)
            self._touch(len(self.panes) - 1)
            return
        pane = self._take(segment, spare)
        pane.begin(segment, style)
        if isinstance(pane, TextPane):
            pane.add(segment, gap)
        self.panes.append(pane)
        self._gaps.append(gap)

    def _take(self, segment: Segment, spare: list[Pane]) -> Pane:
        """A pane for `segment`: the previous one here if it is of the right kind, so that it keeps its focus."""
        kind = _PANES[type(segment)]
        while spare:
            pane = spare.pop(0)
            if type(pane) is kind:
                return pane
            _dispose(pane)
        pane = kind(self._parent)
        browser = pane.browser()
        if browser is not None:
            self._on_new_browser(browser)
        # Placed and shown by the next layout; until then it must not cover the top of the answer.
        pane.setGeometry(0, -1, 1, 1)
        pane.show()
        return pane


def _rest(finished: Sequence[Segment], tail: Sequence[Segment], start: int) -> list[Segment]:
    return [*finished[start:], *tail[max(0, start - len(finished)) :]]


def _dispose(pane: Pane) -> None:
    # It keeps its parent: without one, Python would own it and could destroy it during one of its own events.
    pane.hide()
    pane.deleteLater()
