"""What the window costs while it works: GUI latency while answers stream, for `switchyard bench startup`.

The window prompts the loaded model, shows the answers as usual, and records the longest delay of a GUI event that
is due every few milliseconds.  Then an answer of 4,000 tokens with formulas, code, lists and tables is shown token by
token, whatever the model can write, and each update of it is timed, painting included.
"""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter

from PySide6.QtCore import QEventLoop, QObject, Qt, QTimer
from PySide6.QtWidgets import QApplication, QScrollArea, QWidget

from app.services.chat_store import Message, MessageState
from app.views.chat.chat_view import ChatView
from app.views.main_window.window import MainWindow
from app.widgets.answer_text import AnswerView, import_parser
from app.widgets.page import CHAT
from app.widgets.scaffold import vbox
from engine.common.config import SamplingParams
from engine.common.files import write_whole
from engine.common.model_info import ModelInfo

TOKENS = 512
"""Tokens to stream in total; short answers are followed by further prompts."""
_EVERY_MS = 5
REPLAYED_TOKENS = 4_000
_TOKEN = 4
"""Characters of a token, about."""
_SECTION = r"""
## Track {n}

The sum $\sum_{{i=1}}^n x_i$ over all rows bounds $\mu_{n}$, so the **bound** holds for every `index` in the table.

$$
\frac{{a_{n}}}{{b}} = \sqrt{{x + {n}}}
$$

1. First, sort the cars by track, and the tracks by their number.
2. Then count those that are left over:

```python
def count_{n}(cars: list[int], track: int = {n}) -> int:
    left = 0
    for car in cars:
        if car % 2 == track:
            left += 1  # it stays
    return left
```

| Track | Cars | Share |
|:------|-----:|------:|
| North | {n} | 1 % |
| South | 20 | 2 % |

> What is left over is coupled to the next train, and leaves with it.
"""
_QUESTION = "Write a long story about a railway yard, with a table of its tracks and a program that sorts the cars."


class StreamingReport(QObject):
    def __init__(self, window: MainWindow, path: Path) -> None:
        super().__init__(window)
        chat = window.page(CHAT)
        assert isinstance(chat, ChatView)
        self._presenter = chat.presenter
        self._path = path
        self._waits_ms: list[float] = []
        self._tokens = 0
        self._due = 0.0
        self._timer = QTimer(self)
        self._timer.setTimerType(Qt.TimerType.PreciseTimer)
        self._timer.timeout.connect(self._note_wait)
        window.services.client.model_loaded.connect(self._begin)
        self._presenter.queue.changed.connect(self._on_answer)

    def _begin(self, _model: ModelInfo) -> None:
        sampling = SamplingParams(temperature=0.7, repetition_penalty=1.1, seed=7, max_tokens=TOKENS)
        self._presenter.set_sampling(sampling)
        self._due = perf_counter() + _EVERY_MS / 1000
        self._timer.start(_EVERY_MS)
        self._presenter.send(_QUESTION)

    def _note_wait(self) -> None:
        now = perf_counter()
        self._waits_ms.append(max(now - self._due, 0.0) * 1000)
        self._due = now + _EVERY_MS / 1000

    def _on_answer(self, answer: Message) -> None:
        if answer.state is MessageState.STREAMING:
            return
        self._tokens += answer.stats.generated_tokens if answer.stats is not None else 0
        if answer.stats is None:
            self._write(answer.reason)
        elif self._tokens < TOKENS:
            # Deferred: the page has not handled the end of this answer yet.
            QTimer.singleShot(0, self, lambda: self._presenter.send(_QUESTION))
        else:
            self._write("")

    def _write(self, error: str) -> None:
        self._timer.stop()
        report = {
            "tokens": self._tokens,
            "events": len(self._waits_ms),
            "longest_wait_ms": max(self._waits_ms, default=0.0),
            "updates_ms": update_times_ms() if not error else [],
            "error": error,
        }
        write_whole(self._path, json.dumps(report) + "\n")
        QApplication.quit()


def update_times_ms(tokens: int = REPLAYED_TOKENS) -> list[float]:
    text = "".join(_SECTION.format(n=n) for n in range(tokens * _TOKEN // len(_SECTION) + 1))
    import_parser()
    area = QScrollArea()
    area.setWidgetResizable(True)
    content = QWidget()
    view = AnswerView(content)
    vbox(view, (None, 0), into=content, margins=None, gap=-1)
    area.setWidget(content)
    area.resize(760, 700)
    area.show()
    bar = area.verticalScrollBar()
    bar.rangeChanged.connect(lambda _least, most: bar.setValue(most))
    times = []
    for start in range(0, tokens * _TOKEN, _TOKEN):
        began = perf_counter()
        view.append_markdown(text[start : start + _TOKEN])
        view.flush()
        QApplication.processEvents(QEventLoop.ProcessEventsFlag.ExcludeUserInputEvents)
        times.append(1000 * (perf_counter() - began))
    area.close()
    return times
