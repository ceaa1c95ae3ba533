"""The report of a fault, saved from the window."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.services.installation import Diagnosis
from app.views.settings.few_rows import AboutCard

WRITES = "import sys; open(sys.argv[-1], 'w').write('all of it'); sys.exit(2)"


def test_a_report_is_saved_whatever_is_wrong_with_this_pc(qtbot: QtBot, tmp_path: Path) -> None:
    card = AboutCard()
    qtbot.addWidget(card)
    card.diagnosis._command = [sys.executable, "-c", WRITES]
    file = tmp_path / "report.txt"
    with qtbot.waitSignal(card.diagnosis.written):
        card._write(file)
        assert not card.save_report.isEnabled()
    assert file.read_text() == "all of it"
    assert str(file) in card.report_words.text()
    assert card.save_report.isEnabled()


@pytest.mark.parametrize("command", [["/no/such/program"], [sys.executable, "-c", "raise SystemExit(1)"]])
def test_one_that_cannot_be_written_is_told(qtbot: QtBot, tmp_path: Path, command: list[str]) -> None:
    diagnosis = Diagnosis(command=command)
    with qtbot.waitSignal(diagnosis.problem) as told:
        diagnosis.write(tmp_path / "report.txt")
    assert "another folder" in told.args[0]
    diagnosis.close()
    diagnosis.deleteLater()


def test_closing_stops_it(qtbot: QtBot, tmp_path: Path) -> None:
    diagnosis = Diagnosis(command=[sys.executable, "-c", "import time; time.sleep(60)"])
    diagnosis.write(tmp_path / "report.txt")
    diagnosis.close()
    diagnosis.deleteLater()
