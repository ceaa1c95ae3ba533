"""A window emits signals for as long as it lives, thousands per answer: no number of them may end the process."""

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def test_a_hundred_thousand_emits_do_not_abort_the_interpreter() -> None:
    script = (
        "import app\n"
        "from PySide6.QtCore import QObject, Signal\n"
        "class Source(QObject):\n"
        "    said = Signal(object)\n"
        "source = Source()\n"
        "for n in range(100_000):\n"
        "    source.said.emit(n)\n"
        "    source.setObjectName('x')\n"
        "print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.stdout == "alive\n", done.stderr
