"""The report that times updates of an answer runs, and times each of them."""

from PySide6.QtWidgets import QApplication

from app.services.formulas import formulas
from app.streaming_report import update_times_ms


def test_each_token_is_timed(qapp: QApplication) -> None:
    assert len(update_times_ms(120)) == 120
    assert formulas().is_busy or formulas().is_running
    formulas().forget()
