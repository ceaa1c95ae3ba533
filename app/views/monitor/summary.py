"""One sentence and one picture of where the last tokens' time went, and the one change that would help most."""

from __future__ import annotations

import html

from PySide6.QtCore import QCoreApplication, QEvent, Qt, Signal
from PySide6.QtWidgets import QFrame, QWidget

from app.services.engine_client import EngineState
from app.theme import ColourName, themed
from app.widgets.memory_bar import BarPart, MemoryBar
from app.widgets.quantities import count, figures, nearest_percent, number
from app.widgets.scaffold import hbox, muted_label, push_button, set_message, text_label, vbox
from app.widgets.timeline.lanes import doing_words
from engine.common.lanes import LANES
from engine.hardware.probe import is_busy
from engine.telemetry.analysis import Waiting
from engine.tuning.advice import Advice

translate = QCoreApplication.translate

_LEAST = 0.05
"""A smaller share is not mentioned."""
_WHOLE = 1000
"""Parts that the picture divides the time into."""
_PICTURE_PX = 14


class SummaryCard(QFrame):
    """Signals: `tune_wanted`, when the user wants to act on the advice."""

    tune_wanted = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("card", "true")
        self._sentence = text_label(self)
        font = self._sentence.font()
        font.setBold(True)
        self._sentence.setFont(font)
        self._sentence.setStyleSheet("font-weight: 600")
        self._sentence.setWordWrap(True)
        self._sentence.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self._details = muted_label(self, role="")
        self.picture = MemoryBar(self)
        self.picture.setFixedHeight(_PICTURE_PX)
        self._legend = text_label(self)
        self._legend.setTextFormat(Qt.TextFormat.RichText)
        self._legend.setWordWrap(True)
        self._parts: tuple[BarPart, ...] = ()
        self._change = text_label(self, role="lead", wrap=True)
        self.button = push_button(self, self.tr("Open Tune"), lambda: self.tune_wanted.emit(), kind="primary")
        vbox(
            self._sentence,
            self._details,
            self.picture,
            self._legend,
            hbox((self._change, 1), self.button, gap=12),
            into=self,
            margins=(16, 12, 16, 12),
        )
        self._draw(())

    def show_waiting(self, waiting: Waiting, advice: Advice | None) -> None:
        headline, details = waiting_words(waiting)
        self._tell(headline, advice_sentence(advice), details, waiting)
        self.button.setVisible(advice is not None and advice.change not in ("none", "other_programs"))

    def show_state(self, state: EngineState, *, has_model: bool) -> None:
        sentence, hint = {
            EngineState.STARTING: (self.tr("The engine is starting."), ""),
            EngineState.LOADING: (self.tr("The model is loading."), ""),
            EngineState.DIED: (
                self.tr("The engine has stopped."),
                self.tr("Its recording is still here; the machine's lanes continue."),
            ),
        }.get(
            state,
            (self.tr("Nothing computed yet."), self.tr("Ask something in Chat and watch it here."))
            if has_model
            else (
                self.tr("No model is loaded."),
                self.tr("The machine is still shown. Load a model in Settings, then ask something in Chat."),
            ),
        )
        self._tell(sentence, hint)
        self.button.hide()

    def show_recorded(self, waiting: Waiting, hint: str) -> None:
        headline, details = waiting_words(waiting)
        if not waiting.tokens:
            headline = self.tr("Nothing was decoded in this session.")
        self._tell(headline, hint, details, waiting)
        self.button.hide()

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.StyleChange:  # the legend has colours of the theme
            self._draw(self._parts)

    def _tell(self, sentence: str, change: str, details: str = "", waiting: Waiting | None = None) -> None:
        self._sentence.setText(sentence)
        self._details.setText("" if waiting is not None and waiting.tokens else details)
        self._details.setVisible(bool(self._details.text()))
        set_message(self._change, change)
        self._draw(time_parts(waiting) if waiting is not None else ())
        self.setAccessibleName(" ".join(part for part in (sentence, details, change) if part))

    def _draw(self, parts: tuple[BarPart, ...]) -> None:
        self._parts = parts
        self.picture.show_parts(parts, sum(part.amount for part in parts))
        self._legend.setText(
            "&nbsp;&nbsp; ".join(
                f'<span style="color:{themed(part.colour).name()}">{"▨" if part.hatched else "■"}</span>&nbsp;'
                f"{html.escape(part.name)}"
                for part in parts
                if part.amount >= _LEAST * _WHOLE
            )
        )
        for shown in (self.picture, self._legend):
            shown.setVisible(bool(parts))


def time_parts(waiting: Waiting) -> tuple[BarPart, ...]:
    colours: dict[str, tuple[ColourName, bool]] = {
        track.name: (lane.colour, place > 0) for lane in LANES for place, track in enumerate(lane.tracks)
    }
    parts = []
    for track, share in waiting.share.items():
        colour, is_second = colours.get(track, ("idle", False))
        name = f"{nearest_percent(share)} {doing_words(track)}"
        parts.append(BarPart(name, round(_WHOLE * share), colour, hatched=is_second))
    return tuple(part for part in parts if part.amount)


def waiting_words(waiting: Waiting) -> tuple[str, str]:
    """A headline and the text below it: `Last 200 tokens, 48.7 tokens/s. Their time went to: 61% computing ...`

    Other programs' CPU use comes first: it is a cause of its own, and prolongs everything else.
    """
    if not waiting.tokens:
        return translate("SummaryCard", "Nothing has been decoded yet."), ""
    shares = [(lane, share) for lane, share in waiting.share.items() if share >= _LEAST][:3]
    parts = [f"{number(100 * share, 0)}% {doing_words(lane)}" for lane, share in shares or waiting.share.items()]
    went = translate("SummaryCard", "Their time went to: {0}.").format(", ".join(parts))
    if waiting.tokens == 1:
        went = translate("SummaryCard", "Its time went to: {0}.").format(", ".join(parts))
    pace = " ".join(filter(None, (_pace_words(waiting), _pictures_words(waiting))))
    headline, *rest = [part for part in (_others_words(waiting), pace, went) if part]
    return headline, " ".join(rest)


def _others_words(waiting: Waiting) -> str:
    if not is_busy(waiting.others):
        return ""
    return translate("SummaryCard", "Other programs used {0}% of the CPU, which slows everything down.").format(
        number(100 * waiting.others, 0)
    )


def _pictures_words(waiting: Waiting) -> str:
    if not waiting.pictures:
        return ""
    seconds = number(waiting.pictures_s, 1 if waiting.pictures_s >= 0.95 else 2)
    if waiting.pictures == 1:
        return translate("SummaryCard", "A picture was read first, in {0} s.").format(seconds)
    words = translate("SummaryCard", "{0} pictures were read first, in {1} s.")
    return words.format(number(waiting.pictures, 0), seconds)


def _pace_words(waiting: Waiting) -> str:
    rate = figures(waiting.tokens / waiting.seconds) if waiting.seconds > 0 else ""
    if waiting.is_batch:
        each = number(waiting.tokens / max(waiting.steps, 1), 0)
        words = translate("SummaryCard", "Batch: last {0} tokens, {1} per step, {2}/s.")
        return words.format(number(waiting.tokens, 0), each, rate)
    if waiting.tokens == 1:
        return translate("SummaryCard", "The last token took {0} ms.").format(number(1000 * waiting.seconds, 0))
    return translate("SummaryCard", "Last {0} tokens, {1}/s.", "", waiting.tokens).format(
        number(waiting.tokens, 0), rate
    )


def advice_sentence(advice: Advice | None) -> str:
    if advice is None:
        return ""
    gain = number(advice.gain, 1 if advice.gain >= 1.1 else 2)
    return {
        "other_programs": translate("SummaryCard", "Close or pause them first; further advice needs an idle machine."),
        "threads": translate("SummaryCard", "{0} CPU threads would be about {1} times as fast (predicted)."),
        "cache_slots": translate(
            "SummaryCard", "With {0} experts kept in VRAM it would be about {1} times as fast (predicted)."
        ),
        "ram": translate(
            "SummaryCard", "With {0} experts kept in RAM it would be about {1} times as fast (predicted)."
        ),
        "precision": translate("SummaryCard", "{0} weights would be about {1} times as fast (predicted)."),
    }.get(advice.change, translate("SummaryCard", "No single change is predicted to gain over 5%.")).format(
        count(int(advice.value)) if advice.value.isdecimal() else advice.value, gain
    )
