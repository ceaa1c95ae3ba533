"""The plans being compared, as a table: predicted and measured speed, including those that lost or failed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from PySide6.QtCore import QLocale, QObject, Qt

from app.models.headed_table import ROW_ROLE, HeadedTable, Index
from engine.tuning.result import Contestant, Timed, TuningResult

NAME, PREDICTED, TIMED, BAR = range(4)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A candidate plan as the table shows it."""

    contestant: Contestant
    timed: Timed | None = None
    doing: str = ""
    live: float = 0.0
    is_winner: bool = False

    @property
    def tokens_per_s(self) -> float:
        return (self.timed.tokens_per_s if self.timed is not None else 0.0) or self.live

    @property
    def problem(self) -> str:
        return self.timed.problem if self.timed is not None else ""


class PlanTable(HeadedTable):
    MOST = ROW_ROLE + 1

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(
            (), (PREDICTED, TIMED), parent, cell=self._words, describe=self.spoken, key=lambda row: row.contestant.name
        )
        self._headings = (self.tr("Plan"), self.tr("Predicted"), self.tr("Timed"), self.tr("Tokens/s"))

    # --- progress ---------------------------------------------------------------------------------

    def show_contestants(self, contestants: tuple[Contestant, ...]) -> None:
        self._reset([PlanRow(one) for one in contestants])

    def show_doing(self, name: str, doing: str, live: float = 0.0) -> None:
        for at, row in enumerate(self._rows):
            mine = row.contestant.name == name
            self._set(at, replace(row, doing=doing if mine else "", live=live if mine else 0.0))

    def show_timed(self, timed: Timed) -> None:
        at = self.row_of(timed.contestant.name)
        if at >= 0:
            self._set(at, PlanRow(timed.contestant, timed))

    def show_result(self, result: TuningResult) -> None:
        self._reset(
            [PlanRow(one.contestant, one, is_winner=one.contestant.name == result.winner) for one in result.timed]
        )

    def show_winner(self, name: str) -> None:
        for at, row in enumerate(self._rows):
            self._set(at, replace(row, is_winner=row.contestant.name == name))

    def stop(self) -> None:
        for at, row in enumerate(self._rows):
            self._set(at, replace(row, doing="", live=0.0))

    def clear(self) -> None:
        self._reset([])

    def _reset(self, rows: list[PlanRow]) -> None:
        self.beginResetModel()
        self._rows = rows
        self.endResetModel()

    def _set(self, at: int, row: PlanRow) -> None:
        if row != self._rows[at]:
            self._rows[at] = row
            # All bars: the longest may have changed.
            self.dataChanged.emit(self.index(0, 0), self.index(len(self._rows) - 1, BAR))

    # --- words ------------------------------------------------------------------------------------

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        if role == self.MOST:
            return max((max(one.tokens_per_s, one.contestant.high) for one in self._rows), default=0.0)
        return super().data(index, role)

    def _words(self, row: PlanRow, column: int) -> str:
        return (row.contestant.name, self._predicted(row), self._timed(row), "")[column]

    def spoken(self, row: PlanRow) -> str:
        one = row.contestant
        said = [one.name, *self.marks(row)]
        if one.predicted_tokens_per_s:
            words = self.tr("predicted {0} tokens/s ({1} to {2})")
            said.append(words.format(_figures(one.predicted_tokens_per_s), _figures(one.low), _figures(one.high)))
        timed = row.timed
        if row.problem:
            said.append(row.problem)
        elif timed is not None:
            said.append(self.tr("timed {0} tokens/s").format(_figures(timed.tokens_per_s)))
            if len(timed.rates) > 1:
                span = (_figures(min(timed.rates)), _figures(max(timed.rates)), len(timed.rates))
                said.append(self.tr("{2} runs from {0} to {1}").format(*span))
            if timed.ttft_s:
                said.append(self.tr("first token after {0} s").format(QLocale().toString(timed.ttft_s, "f", 2)))
            if timed.note:
                said.append(timed.note)
        elif row.doing:
            said.append(row.doing)
        return "\n".join(said)

    def marks(self, row: PlanRow) -> list[str]:
        one = row.contestant
        said = []
        if row.is_winner:
            said.append(self.tr("winner"))
        if one.is_plan:
            said.append(self.tr("the plan"))
        if one.is_before:
            said.append(self.tr("as it ran before"))
        return said

    def _predicted(self, row: PlanRow) -> str:
        rate = row.contestant.predicted_tokens_per_s
        return _figures(rate) if rate else "–"

    def _timed(self, row: PlanRow) -> str:
        if row.problem:
            return self.tr("failed")
        if row.timed is not None and not row.live:
            return _figures(row.timed.tokens_per_s)
        return _figures(row.live) + "…" if row.live else ""


def _figures(value: float) -> str:
    return QLocale().toString(float(value), "f", 1 if abs(value) >= 1 else 2)
