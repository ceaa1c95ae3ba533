"""The whole window on a stage: its engine is scripted, and `SCENES` puts it into each of its states.

What looks at every page (`test_scenes`, `screenshots`) walks through the same scenes.
"""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import openpyxl
from PySide6.QtCore import QEventLoop, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QColor, QImage, QPainter
from PySide6.QtWidgets import QApplication, QScrollArea, QWidget

import app.services.downloads as downloading
import app.services.hub as hub
import app.services.library as library
import app.services.planning as planning
import app.services.tuning as tuning
import app.widgets.downloads_card as folder_choice
from app.main import first_run_entry, page_entries
from app.services.api_server import ServerState
from app.services.chat_files import ImportReport
from app.services.chat_store import AnswerStats, ChatStore, Conversation, Folder, Message, MessageState, new_id
from app.services.chat_store.other_programs import LeftOut
from app.services.chat_store.reading import Unread
from app.services.engine_part import PartStage
from app.services.formulas import formulas
from app.services.hub import RepositoryAnswer
from app.services.planning import PlanAnswer, PlanQuestion
from app.services.services import Services
from app.services.settings import Settings
from app.services.updates import UpdateStage
from app.theme import ThemeController
from app.views.batch.job_view import CUT_OFF
from app.views.batch.page import BatchPage
from app.views.chat.answer_message import AnswerMessage
from app.views.chat.attachment_row import PassageDialog
from app.views.chat.chat_view import ChatView
from app.views.chat.side_by_side import SideBySide
from app.views.chat.thought import Thought
from app.views.main_window.window import MainWindow, ShortcutsDialog
from app.views.models.page import ModelsPage
from app.views.monitor.page import MonitorPage
from app.views.settings.few_rows import ComputingCard, LicencesDialog
from app.views.tray import QuickPrompt
from app.views.tune.cards import TIMED
from app.views.tune.page import TunePage
from app.widgets.answer_text import AnswerView
from app.widgets.asking import ask
from app.widgets.downloads_card import TokenDialog
from app.widgets.page import BATCH, CHAT, MODELS, MONITOR, SETTINGS, TUNE, BatchDraft
from app.widgets.timeline.view import TimelineView
from engine.batch_files.job_watcher import PlacePace
from engine.checkpoint.catalogue import read_catalogue
from engine.checkpoint.downloads.queue import Download
from engine.checkpoint.library import Listing
from engine.common.chat import Tool
from engine.common.config import EngineConfig
from engine.common.errors import ErrorCode
from engine.hardware.gpu_info import Vendor
from engine.hardware.sensors import GpuSample
from engine.parts.updates import Update
from engine.protocol import Outcome, Served, Telemetry, TelemetryCounters, TelemetrySpans, TuningFinished
from engine.remote.capabilities import About
from engine.remote.endpoint import Endpoint, Found, endpoint_at, remote_name, save_endpoint
from engine.telemetry.lanes import ELSEWHERE as ELSEWHERE_WAITS
from engine.telemetry.lanes import JOB, QUEUED, READING, SWEEPS, WRITING, WRITTEN_ELSEWHERE
from engine.telemetry.recorder import Recorder
from engine.telemetry.records import pack
from engine.tools.servers import ToolServer
from engine.tuning.fit import offers
from tests.app import model_parts
from tests.app import tuning_results as made
from tests.app.cache_reports import report
from tests.app.recorded import STEP_NS, decoded, expert_map, sample, steady_devices
from tests.app.scripted_batches import ScriptedBatches, row
from tests.app.scripted_engine import STARTER, seer
from tests.made_documents import docx, pdf

PATIENCE_S = 30.0
GIB = 2**30
QUESTION = "Explain how a mixture of experts chooses which expert answers, and show it in a few lines of Python."
ANSWER = f"""A **router** scores every expert for every token and keeps the best few. {QUESTION}

```python
def choose(scores: list[float], k: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda expert: -scores[expert])[:k]  # the best first, as the papers have it
```

1. The chosen experts compute.
2. Their outputs are summed, weighted by the router's probabilities.

| expert | score |
|---|---|
| 3 | 0.61 |
| 7 | 0.22 |
"""

MATHEMATICS = r"""# How far a car rolls

A car of mass $m$ leaves the hump of height $h$ with the energy $E = mgh$, and **rolls** until friction has taken all
of it: see https://example.org/humps. With a coefficient of friction \(\mu\) and the slope \(\alpha\):

$$
s = \frac{h}{\mu \cos\alpha - \sin\alpha}, \qquad \mu > \tan\alpha
$$

## What the retarder does

1. It measures the speed $v_0$ with `radar`.
2. It brakes to $v_1 = \sqrt{2 \mu g s}$:
   - in dry weather by $\Delta v = v_0 - v_1$,
   - on wet rails by less.

```python
def exit_speed(distance: float, friction: float) -> float:
    # Metres per second that a car may have behind the retarder.
    return (2 * friction * 9.81 * distance) ** 0.5  # from the energy
```

| Car | $m$ in t | $\sum_i x_i$ |
|:----|--------:|:------------:|
| open | 12.5 | $\frac{3}{4}$ |
| tank | 24 | 0.5 |

> All in one line: $\int_0^s F\,dx = \tfrac{1}{2} m v^2$, whatever the car.

\[ A = \begin{pmatrix} a_{11} & a_{12} \\ a_{21} & a_{22} \end{pmatrix} \]

- [x] weighed
- [ ] sorted
"""

THOUGHT = """The user asks why the wheels stop. Let me go through it:

1. A **retarder** grips the wheel flanges from both sides.
2. It measures the speed with radar, so `exit_speed` depends on how far the car still has to roll.

A light car on a wet rail needs less. I should mention the hump first. Two short paragraphs are enough."""


class StagedEngine(ScriptedBatches):
    """Chats, jobs, tunings and what is recorded, all moved by the scene."""

    recorded = Signal(object)

    def watch_telemetry(self, *, on: bool, expert_map: bool = False) -> None:
        """Nothing is recorded but what the scene says."""

    def resize_cache(self, tier: str, slots: int) -> None:
        """Nothing is resized here."""


class Stage:
    """The window and what it hangs on; `folder` is for files."""

    def __init__(self, settings: Settings, theme: ThemeController, folder: Path) -> None:
        self.settings, self.theme, self.folder = settings, theme, folder
        self.engine = StagedEngine()
        self.store = ChatStore()
        card = GpuSample("0000:01:00.0", Vendor.NVIDIA, vram_total=8 * GIB, vram_used=round(0.25 * GIB))
        self._says = replace(sample(), gpus=(card,), ram_used=11 * GIB, ram_total=32 * GIB, ram_ours=1150 * 2**20)
        self._found = made.probe(made.gpu("NVIDIA GeForce RTX 4060 Laptop GPU"))
        devices = steady_devices(self._says, self._found)
        self.services = Services.around(self.engine, self.store, settings, theme, devices)  # type: ignore[arg-type]
        self._hub = self.services.telemetry
        self.downloads: tuple[Download, ...] = ()
        """What lies on the disk."""
        self.dialog: QWidget | None = None
        """What lies over the window, if the scene opened something."""
        self.window = MainWindow(self.services, page_entries(), first_run_entry())

    # --- the pages ---

    @property
    def chat(self) -> ChatView:
        page = self.window.page(CHAT)
        assert isinstance(page, ChatView)
        return page

    @property
    def batch(self) -> BatchPage:
        page = self.window.page(BATCH)
        assert isinstance(page, BatchPage)
        return page

    @property
    def monitor(self) -> MonitorPage:
        page = self.window.page(MONITOR)
        assert isinstance(page, MonitorPage)
        return page

    @property
    def tune(self) -> TunePage:
        page = self.window.page(TUNE)
        assert isinstance(page, TunePage)
        return page

    # --- what happens ---

    def show(self, size: QSize) -> None:
        """Opens the window, with what the sidebar says about the machine."""
        self.window.resize(size)
        self.window.show()
        self.window.resize(size)
        devices = self.services.devices
        devices.sampled.emit(self._says)
        devices.hardware_found.emit(self._found)
        self.engine.telemetry.emit(Telemetry(900 * 2**20, 110 * 2**20, 160 * 2**20, 20 * 2**20, 900, 0.0))
        self.until(lambda: self.chat.presenter is not None)

    def until(self, reached: Callable[[], object]) -> None:
        """Lets the window work until something is so."""
        end = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < end, "the scene was not reached"
            self.breathe(5)

    def breathe(self, ms: int = 0) -> None:
        """Lets the window work for so long, and then until it has nothing to do."""
        loop = QEventLoop()
        QTimer.singleShot(ms, loop.quit)
        loop.exec()
        QApplication.sendPostedEvents()
        QApplication.processEvents()

    def settle(self) -> None:
        """Lets the window come to rest after a change of size, theme or text."""
        self.breathe(30)
        for answer in self.window.findChildren(AnswerView):
            answer.flush()  # long ones are written piece by piece
        self.until(lambda: not formulas().is_busy)
        # A prediction that comes just before a look finds the rows above it pressed together for a moment.
        self.until(lambda: not any(card.is_busy for card in self.window.findChildren(ComputingCard)))
        self.breathe(30)

    def close(self) -> None:
        if self.dialog is not None:
            self.dialog.close()
            self.dialog.deleteLater()
        self.window.close()
        formulas().forget()
        self.store.close()
        self.window.deleteLater()
        self._hub.close()
        self._hub.deleteLater()
        self.engine.deleteLater()
        self.store.deleteLater()
        self.breathe()

    # --- chats ---

    def open_conversation(self, answer: str = ANSWER, *, failed: bool = False) -> None:
        """A chat of two turns that was held before."""
        conversation = Conversation(new_id(), QUESTION, created_at=1.0, updated_at=1.0)
        user = Message(new_id(), conversation.id, None, "user", QUESTION, created_at=1.0)
        stats = AnswerStats("length", prompt_tokens=20, generated_tokens=1072, ttft_s=9.3, tokens_per_s=12.5)
        message = Message(new_id(), conversation.id, user.id, "assistant", answer, created_at=2.0, stats=stats)
        if failed:
            reason = "The engine was killed (signal 9), perhaps for lack of memory."
            message = Message(
                new_id(),
                conversation.id,
                user.id,
                "assistant",
                answer,
                MessageState.PARTIAL,
                reason=reason,
                reason_code=ErrorCode.ENGINE_DIED.value,
                created_at=2.0,
            )
        with self.signalled(self.store.listed):
            pass
        self.store.create(conversation, [user, message])
        self.chat.presenter.list_model.put(conversation)
        self.chat.presenter.open(conversation.id)
        self.until(lambda: len(self.chat.transcript.turns) == 2)

    def answers(self) -> list[AnswerMessage]:
        """Those on screen, top to bottom."""
        return [turn for turn in self.chat.transcript.turns if isinstance(turn, AnswerMessage)]

    def thought(self) -> Thought:
        """That of the last answer."""
        thought = self.answers()[-1].thought
        assert thought is not None
        return thought

    @contextlib.contextmanager
    def signalled(self, signal: object) -> Iterator[None]:
        """Waits for a signal that what is inside brings about, or that has come already: a moment at most."""
        yield
        self.breathe(20)

    # --- jobs ---

    def table(self, rows: int = 40) -> Path:
        file = self.folder / "complaints-about-late-deliveries.csv"
        text = "The parcel came three weeks late and nobody answered the telephone"
        lines = "".join(f"{text},{n},Portsmouth\n" for n in range(rows))
        file.write_text("text,number,city\n" + lines, encoding="utf-8")
        return file

    def fill_form(self) -> None:
        self.window.show_page(BATCH)
        self.batch.open_files([self.table()])
        self.until(self.batch.form.foot.start.isEnabled)
        self.until(lambda: self.batch.form.input.caption.text().startswith("40"))

    def fill_workbook(self) -> None:
        book, file = openpyxl.Workbook(), self.folder / "tickets.xlsx"
        book.remove(book.active)
        for name, text in (("Open tickets", "The parcel has not come."), ("Closed tickets", "It came, thank you.")):
            sheet = book.create_sheet(name)
            sheet.append(["customer", "text"])
            sheet.append(["Rossi", text])
        book.save(file)
        self.window.show_page(BATCH)
        self.batch.open_files([file])
        self.until(self.batch.form.foot.start.isEnabled)

    def start_job(self) -> None:
        self.fill_form()
        self.batch.form.foot.start.click()
        self.until(lambda: self.batch.pages.currentWidget() is self.batch.job_view)
        self.engine.tell(12, 40, failed=1, rate=184.2, left=95.0)
        self.engine.answer(*(row(number) for number in range(11)), row(11, problem="is empty"))
        self.breathe(50)

    # --- the machine ---

    def decode(self) -> None:
        """The engine has decoded until now."""
        now = time.perf_counter_ns()
        spans, steps = decoded(60, now - 60 * STEP_NS, on_device=True)
        self.engine.recorded.emit(TelemetrySpans(now, time.time(), len(spans), pack(spans), 0))
        self.engine.recorded.emit(TelemetryCounters(len(steps), pack(steps), 0))
        self.engine.recorded.emit(report())
        self.engine.recorded.emit(expert_map(12, 64))
        self.until(lambda: self._hub.findings is not None and self._hub.report is not None)
        self.monitor._refresh()
        self.monitor._refresh()

    def tuned(self) -> None:
        page = self.tune
        self.window.show_page(TUNE)
        self.until(lambda: page._plan is not None)
        page.cards.run.start.click()
        run = self.engine.tunings[-1]
        self.engine.state = self.engine.state.READY
        run.end(TuningFinished(run.id, True, made.result(), True, None))


@contextlib.contextmanager
def staged(settings: Settings, theme: ThemeController, folder: Path) -> Iterator[Stage]:
    """A stage on a made-up machine, closed at the end."""
    look = made.look(made.gpu())
    stages: list[Stage] = []

    planned_for = planning.answer

    def planned(question: PlanQuestion) -> PlanAnswer:
        return planned_for(question) if question.change else PlanAnswer(question, made.plan(question.look))

    with (
        patch.object(tuning, "look_at_machine", lambda *_: look),
        patch.object(planning, "answer", planned),
        patch.object(downloading, "read_downloads", lambda: stages[0].downloads if stages else ()),
    ):
        stage = Stage(settings, theme, folder)
        stages.append(stage)
        try:
            yield stage
        finally:
            stage.close()


# --- the scenes -------------------------------------------------------------------------------------


def _chat_error(stage: Stage) -> None:
    stage.open_conversation(ANSWER, failed=True)
    stage.engine.die()


def _chat_toast(stage: Stage) -> None:
    """The error card with a toast: one lay over the other."""
    _chat_error(stage)
    other = Conversation(new_id(), "A chat that is deleted, and its long title", created_at=1.0, updated_at=1.0)
    stage.store.create(other, [])
    stage.chat.presenter.list_model.put(other)
    stage.chat.presenter.delete(other.id)


def _chat_editing(stage: Stage) -> None:
    stage.open_conversation()
    stage.chat.transcript.verticalScrollBar().setValue(0)
    stage.chat.transcript.turns[0].start_editing()  # type: ignore[union-attr]


def _chat_answering(stage: Stage) -> None:
    stage.chat.composer.box.setPlainText("Go on\nwith two lines")
    stage.chat.composer.box.entered.emit()
    stage.engine.write("Here:\n\n```python\nprint(1)  # " + "a long line " * 12 + "\n```\n")
    stage.until(lambda: "a long line" in stage.chat.transcript.turns[-1].body.plain_text())  # type: ignore[union-attr]


def _chat_thought(stage: Stage) -> None:
    """Two answers after a thought each: one is folded, the other is not."""
    told = "The cars roll down the hump, and **retarders** beside the rails brake each of them as much as it needs."
    failing = "Then the next one down the track brakes harder, and a skate on the rail is the last resort."
    for question, answer in (("Why do the cars not crash into each other?", told), ("And if one fails?", failing)):
        stage.chat.composer.box.setPlainText(question)
        stage.chat.composer.box.entered.emit()
        stage.engine.think(THOUGHT)
        stage.engine.reply(answer)
    for turn, seconds in zip(stage.answers(), (12.4, 7.0), strict=True):
        turn.set_row(replace(turn.row, message=replace(turn.row.message, reasoning_s=seconds)))
    stage.thought().header.click()


def _chat_thinking(stage: Stage) -> None:
    """A thought that is being thought, unfolded."""
    stage.chat.composer.box.setPlainText("Why do the cars not crash into each other?")
    stage.chat.composer.box.entered.emit()
    stage.engine.think(THOUGHT[: len(THOUGHT) // 2])
    thought = stage.thought()
    thought.header.click()
    stage.until(lambda: thought.body is not None and "retarder" in thought.body.plain_text())


def _chat_thinking_setting(stage: Stage) -> None:
    stage.chat.composer.set_model(replace(STARTER, thinking=("off", "low", "medium", "high")))
    stage.chat.composer.edit_sampling()


def _chat_mathematics(stage: Stage) -> None:
    """Formulas in lines and by themselves, below a heading, in a list, a table and a quote, with code between them."""
    stage.open_conversation(MATHEMATICS)


def _chat_code_only(stage: Stage) -> None:
    stage.open_conversation("```python\nprint('" + "wide " * 40 + "')\n```")


def _chat_list(stage: Stage) -> None:
    """The list of chats, over the chat where there is no room beside it."""
    stage.open_conversation()
    stage.chat.search()


def _shortcuts(stage: Stage) -> None:
    stage.window.show_shortcuts()
    stage.dialog = stage.window.findChild(ShortcutsDialog)


def _chat_system_prompt(stage: Stage) -> None:
    stage.chat.composer.edit_system_prompt()


def _chat_sampling(stage: Stage) -> None:
    stage.chat.composer.edit_sampling()


def _batch_list(stage: Stage) -> None:
    stage.start_job()
    rows = stage.batch.job_view.rows
    with patch.object(type(rows.answers), "page", lambda *_, **__: [row(number) for number in range(40)]):
        stage.engine.end(40, 1)
        stage.until(lambda: rows.model.rowCount() == 40)


def _batch_cut_off(stage: Stage) -> None:
    """Rows that ended at their limit of tokens, alone."""
    stage.start_job()
    cut = [replace(row(number), finish_reason="length") for number in (3, 8, 21)]
    stage.engine.end(40, 1, cut_off=len(cut))
    rows = stage.batch.job_view.rows
    with patch.object(type(rows.answers), "page", lambda *_, **__: cut):
        rows.filters.button(CUT_OFF).click()
        stage.until(lambda: rows.model.rowCount() == len(cut))


def _batch_failed(stage: Stage) -> None:
    stage.start_job()
    stage.engine.fail_job(ErrorCode.INVALID_REQUEST, "The input was changed since the job began: begin it again.")


def _batch_schema(stage: Stage) -> None:
    stage.fill_form()
    stage.batch.form.answers.kinds.button(2).click()


_RACK = PlacePace("Rack", "10.0.0.5:8000", "working", "", 16, 16, 210, 1, 41_000, 9_800, 212.4, 0.0312, "EUR")
_ATTIC = PlacePace(
    "Attic",
    "attic.lan:8080",
    "resting",
    "Attic gave no answer (the connection was refused).",
    0,
    4,
    31,
    0,
    6_100,
    1_400,
)
_PC = PlacePace("", "", "working", "", 4, 8, 64, 0, 12_000, 3_000, 41.0)


def _servers(stage: Stage) -> None:
    save_endpoint(Endpoint("Rack", "http://10.0.0.5:8000/v1", "Qwen/Qwen3-30B-A3B", price_in=0.2, currency="EUR"))
    save_endpoint(Endpoint("Attic", "http://attic.lan:8080/v1"))
    stage.fill_form()
    form = stage.batch.form
    for name in ("Rack", "Attic"):
        form.places.box(name).setChecked(True)
    stage.breathe(50)
    form._scroll.ensureWidgetVisible(form.places, 0, 40)
    stage.breathe(50)


_COMPLAINTS = (
    ("The parcel came three weeks late and nobody answered the telephone.", "Late delivery; no answer by telephone."),
    ("Only one of the two lamps that I paid for was in the box.", "Part of the order is missing."),
    ("Your driver left it in the rain, and the book is ruined.", "Damaged by rain; left outside."),
    ("It says delivered, but my neighbours have not got it either.", "Marked as delivered, not received."),
    ("I was charged twice for the same order in October.", "Charged twice."),
    ("The size is wrong again, although I returned the first one.", "Wrong size, for the second time."),
    ("Where is my refund? You promised it for last Monday.", "The promised refund has not come."),
    ("The screen was cracked when I opened the box.", "Screen cracked on arrival."),
    ("Someone signed for it, and it was not me.", "Signed for by somebody else."),
    ("I moved, and you keep sending parcels to the old address.", "Sent to the old address."),
    ("The courier wanted another fee at the door.", "Unexpected fee at the door."),
)


def _servers_running(stage: Stage) -> None:
    _servers(stage)
    stage.batch.form.foot.start.click()
    stage.until(lambda: stage.batch.pages.currentWidget() is stage.batch.job_view)
    stage.engine.tell(305, 500, failed=1, rate=253.4, left=95.0, places=(_RACK, _ATTIC, _PC))
    rows = [
        replace(row(number), prompt=prompt, answer=answer, generated_tokens=len(answer) // 4)
        for number, (prompt, answer) in enumerate(_COMPLAINTS)
    ]
    stage.engine.answer(*rows, replace(row(len(rows), problem="is empty"), prompt=""))
    stage.breathe(50)


def _batch_tried(stage: Stage) -> None:
    stage.fill_form()
    stage.batch.form.sample.button.click()
    stage.engine.answer(row(0), row(1), row(2), sample=True)
    stage.engine.end_sample()
    stage.breathe(150)


def _monitor_folded(stage: Stage) -> None:
    """As it opens: where the time went."""
    _monitor(stage)
    stage.until(lambda: stage.monitor.summary.picture.isVisible())
    stage.settings.monitor_details = False


def _monitor(stage: Stage) -> None:
    stage.settings.monitor_details = True
    stage.window.show_page(MONITOR)
    stage.decode()
    stage.monitor.findChild(TimelineView).refresh()


def _monitor_requests(stage: Stage) -> None:
    """Five programs ask at about the same time, beside a job."""
    _monitor(stage)
    history = stage.services.telemetry.history
    assert history.end_ns is not None
    recorder, second = Recorder(), 10**9
    for number in range(5):
        begins = history.end_ns - (40 - 3 * number) * second
        reads, writes = begins + (1 + number) * second, begins + (3 + 2 * number) * second
        ends = min(writes + 14 * second, history.end_ns)
        recorder.request_did(QUEUED, begins, reads, number, 0)
        recorder.request_did(READING, reads, writes, number, 400 + 700 * number)
        recorder.request_did(WRITING, writes, ends, number, 180)
    recorder.request_did(JOB, history.end_ns - 45 * second, history.end_ns - second, 9, 5200)
    sweeps = history.end_ns - 37 * second
    for number in range(130):
        recorder.span(SWEEPS, WRITING, sweeps, sweeps + second // 4, layer=-1, count=1 + number % 70 // 16)
        if number % 9 < 3:
            recorder.span(SWEEPS, READING, sweeps, sweeps + second // 4, layer=-1, count=9 - number % 9)
        recorder.span(SWEEPS, JOB, sweeps + second // 8, sweeps + second // 4, layer=-1, count=12)
        sweeps += second // 4
    recorder.request_did(ELSEWHERE_WAITS, history.end_ns - 30 * second, history.end_ns - 24 * second, 11, 0)
    recorder.request_did(WRITTEN_ELSEWHERE, history.end_ns - 24 * second, history.end_ns - 4 * second, 11, 410)
    history.places[11] = "Rack in the cellar"
    history.add_spans(recorder.take_spans())
    stage.monitor.findChild(TimelineView).refresh()


def _tune_start(stage: Stage) -> None:
    stage.window.show_page(TUNE)
    stage.until(lambda: stage.tune._plan is not None)


def _tune_plan(stage: Stage) -> None:
    _tune_start(stage)
    stage.tune.show_step(2)


def _tune_what_if(stage: Stage) -> None:
    """A model of the catalogue with another card, found by a few letters each."""
    _tune_start(stage)
    run, card = stage.tune.cards.run, stage.tune.cards.what_if
    stage.until(lambda: run.models.count() > 20)
    stage.tune.what_if_button.click()
    for box, typed in ((run.models, "qwen3 30b"), (card.card, "4090")):
        box.typed.setText(typed)
        box.typed.editingFinished.emit()
    stage.until(lambda: "→" in card.result.text())


def _tune_results(stage: Stage) -> None:
    stage.tuned()
    stage.tune.show_step(TIMED)


def _settings(stage: Stage) -> None:
    stage.window.show_page(SETTINGS)


def _settings_hub(stage: Stage) -> None:
    """Where models are found: a mirror, and a token for it."""
    stage.window.show_page(SETTINGS)
    page = stage.window.page(SETTINGS)
    stage.until(lambda: not page.hub._doing.is_busy)
    page.hub.address.setText("https://mirror.example")
    page.hub._show_tokens(("huggingface.co", "mirror.example"))
    (scroll,) = page.findChildren(QScrollArea)
    scroll.verticalScrollBar().setValue(page.hub.y() - 12)


def _settings_updates(stage: Stage) -> None:
    """A newer version is there, and one before to go back to."""
    updates = stage.services.updates
    with patch("app.services.updates.can_update", lambda: True):
        stage.window.show_page(SETTINGS)
    updates.update = Update(
        "0.3.0", "2026-12-01", "Faster prompts on cards.", "https://x.example/w.zip", "0" * 64, 92 * 10**6
    )
    updates._set(UpdateStage.OFFERED)
    page = stage.window.page(SETTINGS)
    assert page.updates is not None
    stage.until(lambda: not page.hub._doing.is_busy)
    (scroll,) = page.findChildren(QScrollArea)
    scroll.verticalScrollBar().setValue(scroll.verticalScrollBar().maximum())


def _settings_others(stage: Stage) -> None:
    """Other programs use the model, with a key; one came without it."""
    stage.settings.serves, stage.settings.serves_others = "key", True
    server = stage.services.api_server
    server._key, server._key_stays = "dGhpcyBpcyBub3QgYSBzZWNyZXQ", True
    stage.window.show_page(SETTINGS)
    page = stage.window.page(SETTINGS)
    at_s = 1_790_000_000.0
    asked: list[tuple[str, str, int, int, float, int, Outcome]] = [
        ("curl/8.5.0", "/v1/messages", 0, 0, 0.0, 401, "refused"),
        ("OpenAI/Python 3.54.1", "/v1/chat/completions", 1834, 212, 9.4, 200, "answered"),
        ("Aider", "/v1/chat/completions", 6120, 95, 11.8, 200, "left"),
        ("ollama-python/0.6.3", "/api/chat", 41, 380, 14.2, 200, "answered"),
    ]
    for number, (program, path, read, written, seconds, status, outcome) in enumerate(asked):
        model = "" if status == 401 else "Starter"
        row = Served(at_s + 40 * number, program, path, model, read, written, seconds, status, outcome)
        page.others._on_served(row)
    server._become(ServerState.ON)
    stage.breathe(50)
    scroll = page.findChild(QScrollArea)
    scroll.verticalScrollBar().setValue(page.others.y() - 12)


def _licences(stage: Stage) -> None:
    stage.window.show_page(SETTINGS)
    stage.dialog = LicencesDialog(stage.window)
    stage.dialog.show()


def _question(stage: Stage) -> None:
    _batch_list(stage)
    stage.dialog = ask(
        stage.window,
        "complaints-about-late-deliveries.answers.csv already exists.",
        "Replacing it deletes the answers in it. To keep them, choose another name.",
        [("Replace it", "destroy", lambda: None)],
        "Back",
    )


def _banners(stage: Stage) -> None:
    window = stage.window
    window.engine_banner.show_text("The engine was killed (signal 9), perhaps for lack of memory. Your text is kept.")
    window.problem_banner.show_text(
        "The settings could not be written to /home/somebody/.config/switchyard: no space left."
    )
    window.tune_banner.show_text(
        "Your hardware has changed since the last tuning. The RAM was 16 GiB and is now 32 GiB."
    )


def _card_is_back(stage: Stage) -> None:
    info = replace(
        STARTER,
        device_note="The graphics card works again: reload the model to use it.",
        needs_restart=True,
        card_is_back=True,
    )
    stage.engine.model = info
    stage.engine.model_loaded.emit(info)


def _first_run(stage: Stage) -> None:
    """No model is here."""
    stage.engine.unload()
    services = stage.services
    found = made.look(made.gpu()), model_parts.RECOMMENDATIONS
    with (
        patch.object(hub, "catalogue_here", lambda _device, _free: found),
        patch.object(library, "_look_around", lambda _: Listing(())),
    ):
        services.model_start.starter_missing.emit()
        stage.until(lambda: services.hub.look is not None and services.library.was_listed)


def _first_run_downloading(stage: Stage) -> None:
    """A model is on its way, and other programs have left some."""
    _first_run(stage)
    _show_downloads(stage, replace(model_parts.DOWNLOADS[0], reference=model_parts.RECOMMENDATIONS[1].reference))
    stage.services.library._on_listed(Listing(model_parts.MODELS[1:]))


def _first_run_trouble(stage: Stage) -> None:
    _first_run(stage)
    _show_downloads(stage, model_parts.DOWNLOADS[2])
    stage.services.downloads.problem.emit("The hub cannot be reached: check the network. Everything on this PC works.")


def _first_run_engine(stage: Stage) -> None:
    """An installed package that has to fetch its engine."""
    _first_run(stage)
    part = stage.services.engine_part
    part.choice = model_parts.ENGINE
    part._set(PartStage.OFFERED)


def _first_run_engine_fetching(stage: Stage) -> None:
    _first_run_engine(stage)
    stage.services.downloads._entries = (model_parts.ENGINE_DOWNLOAD,)
    stage.services.downloads.changed.emit()


def _first_run_engine_testing(stage: Stage) -> None:
    _first_run_engine(stage)
    stage.services.engine_part._installation.step = "testing"
    stage.services.engine_part._set(PartStage.INSTALLING)


def _first_run_engine_trouble(stage: Stage) -> None:
    _first_run_engine(stage)
    words = "The disk of /home/somebody is full: make room and let the download go on; nothing is lost."
    stage.services.engine_part._set(PartStage.FAILED, words)


def _show_downloads(stage: Stage, *found: Download) -> None:
    stage.downloads = found
    stage.services.downloads.begin()
    stage.until(lambda: len(stage.services.downloads.entries) == len(found))


# --- models -----------------------------------------------------------------------------------------


def _models_empty(stage: Stage) -> None:
    with patch.object(hub, "catalogue_here", lambda _device, _free: (made.look(made.gpu()), ())):
        stage.window.show_page(MODELS)
        stage.until(lambda: stage.services.hub.look is not None and stage.services.library.was_listed)


def _models_catalogue(stage: Stage) -> None:
    """The whole catalogue on this machine, and one of it."""
    look = made.look(made.gpu())
    offered = offers(read_catalogue(), look, look.limits(EngineConfig("")))
    page = _models(stage)
    page.search.show_offers(offered, None)
    page.search.results.choose(2)
    page.search.used.emit()


def _settings_computing(stage: Stage) -> None:
    """Budgets, and the speed that is predicted for them."""
    stage.window.show_page(SETTINGS)
    page = stage.window.page(SETTINGS)
    card = page.computing
    with patch("app.views.settings.few_rows.look_at_machine", lambda _device: made.look(made.gpu())):
        stage.settings.default_model = "Qwen3 30B A3B Instruct 2507"
        card._look_again()
        slider = card.controls["vram_bytes"]
        stage.until(slider.isEnabled)
    slider.setValue(20)
    stage.until(lambda: any(map(str.isdigit, card.predicted.text())))
    (scroll,) = page.findChildren(QScrollArea)
    scroll.verticalScrollBar().setValue(card.y() - 12)


def _models_with_downloads(stage: Stage) -> None:
    _models(stage, downloads=2)


def _models(stage: Stage, downloads: int = 0) -> ModelsPage:
    """Models of our own and of other programs, one loaded, one damaged; and what suits this machine."""
    parts, services = model_parts, stage.services
    stage.engine.model = replace(STARTER, path=str(parts.MODELS[1].path))
    also = ("LM Studio", Path("/home/somebody/.lmstudio/models/ggml-org/gpt-oss-20b-GGUF/gpt-oss-20b-mxfp4.gguf"))
    models = (parts.MODELS[0], replace(parts.MODELS[1], also=(also,)), *parts.MODELS[2:])
    with (
        patch.object(library, "_look_around", lambda _: Listing(models)),
        patch.object(folder_choice, "_rooms", lambda: parts.rooms() if downloads else parts.rooms()[:1]),
        patch.object(hub, "catalogue_here", lambda _device, _free: (made.look(made.gpu()), parts.RECOMMENDATIONS)),
        patch.object(services.speeds, "ask"),
    ):
        page = stage.window.page(MODELS)
        assert isinstance(page, ModelsPage)
        stage.downloads = parts.DOWNLOADS[:downloads]
        services.downloads.begin()
        stage.window.show_page(MODELS)
        stage.until(lambda: page.here.rows.rows and page.search.results.rows.rows)
        stage.until(lambda: len(services.downloads.entries) == downloads)
        stage.until(lambda: page.folder.combo.count() > 0)
    stage.window.sidebar.downloads.show_downloads(services.downloads.entries)
    services.speeds.found.emit(str(parts.MODELS[2].path), 24.6, False)
    return page


def _models_search(stage: Stage) -> None:
    """A repository with files that run well, slowly and not at all."""
    page = _models(stage)
    _search(stage, page)


def _search(stage: Stage, page: ModelsPage) -> None:
    parts = model_parts
    answer = RepositoryAnswer(parts.REPOSITORY.id, parts.shaped(), len(parts.CANDIDATES))
    with (
        patch.object(hub, "search_hub", lambda *_: parts.FOUND),
        patch.object(hub, "read_candidates", lambda *_: answer),
        patch.object(hub, "judge_candidates", parts.fit_card),
    ):
        page.search.field.setText("qwen3 30b")
        page.search.button.click()
        stage.until(lambda: page.search.fit.table.card.rows)


def _models_too_large(stage: Stage) -> None:
    page = _models(stage, downloads=1)
    _search(stage, page)
    page.search.fit.table.setCurrentIndex(page.search.fit.table.rows.index(0, 0))


def _models_token(stage: Stage) -> None:
    page = _models(stage, downloads=3)
    page.downloads.list.setCurrentIndex(page.downloads.list.rows.index(2, 0))
    page.downloads.token.click()
    stage.dialog = page.findChild(TokenDialog)


def _models_folders(stage: Stage) -> None:
    stage.dialog = _models(stage).open_folders()


def _chat_models(stage: Stage) -> None:
    """The list of models, of which one is loaded and one is too slow to be looked at."""
    picker, services = stage.chat.picker, stage.services
    stage.engine.model = replace(STARTER, path=str(model_parts.MODELS[0].path))
    stage.engine.model_loaded.emit(stage.engine.model)
    with (
        patch.object(library, "_look_around", lambda _: Listing(model_parts.MODELS)),
        patch.object(services.speeds, "ask"),
    ):
        stage.chat.choose_model()
        stage.until(picker.rows.rowCount)
    services.speeds.found.emit(str(model_parts.MODELS[2].path), 24.6, False)


def _chat_too_long(stage: Stage) -> None:
    """A message with which the chat would not fit the context; something else cannot be attached."""
    stage.open_conversation()
    stage.chat.attaching.give([Path("/home/somebody/report.pdf")])
    stage.chat.composer.box.setPlainText("All of it, once more, please. " * 2000)
    stage.until(stage.chat.room.banner.isVisible)


SUMMARY = (
    "The user asked how a mixture of experts chooses which expert answers. The router scores every expert and keeps "
    "the best two; a sketch in Python (choose, 4 lines) was given and accepted. Still open: how load is balanced."
)


def _long_conversation(stage: Stage, *, prompt_tokens: int = 6400) -> None:
    """A chat of eight turns that fills its context."""
    stage.open_conversation()
    presenter = stage.chat.presenter
    chat = presenter.conversation.id
    for number in range(3):
        last = presenter.model.last
        question = Message(new_id(), chat, last.id, "user", f"And what of point {number + 1}?", created_at=3.0 + number)
        stats = AnswerStats("stop", prompt_tokens=prompt_tokens, generated_tokens=60, ttft_s=0.4, tokens_per_s=12.5)
        text = f"Point {number + 1}: a router that always picks the same expert is **collapsed**: a loss prevents it."
        answer = Message(
            new_id(), chat, question.id, "assistant", text, created_at=3.5 + number, stats=stats, model="Starter"
        )
        presenter.model.add_all([question, answer])
        stage.store.add_messages([question, answer])


def _chat_filling(stage: Stage) -> None:
    """A chat that will soon be too long."""
    _long_conversation(stage, prompt_tokens=7500)


def _chat_context(stage: Stage) -> None:
    """The length of the context, which was changed, and what it costs."""
    _long_conversation(stage)
    stage.chat.room.open()
    stage.chat.room.popover.tokens.setValue(4096)


def _chat_folding(stage: Stage) -> None:
    """A summary that is being written."""
    _long_conversation(stage, prompt_tokens=7500)
    stage.chat.room.fold()
    stage.engine.read(40, 100)


def _chat_folded(stage: Stage) -> None:
    """A chat whose earlier turns are folded."""
    _long_conversation(stage, prompt_tokens=7500)
    turn = stage.chat.presenter.model.rows[3].message.id
    stage.chat.edits.fold(turn, SUMMARY, "Starter")
    stage.chat.transcript.verticalScrollBar().setValue(0)


def _chat_folded_open(stage: Stage) -> None:
    """The same, with the turns shown and the summary being edited."""
    _chat_folded(stage)
    stage.chat.presenter.model.show_folded(True)
    card = stage.chat.transcript.turns[0]
    card.start_editing()
    stage.breathe(50)
    stage.chat.transcript.verticalScrollBar().setValue(0)


def _chat_full(stage: Stage) -> None:
    """An answer that ran into the end of the context."""
    stage.open_conversation()
    last = stage.chat.presenter.model.last
    assert last.stats is not None
    full = replace(last.stats, finish_reason="context", prompt_tokens=7900, generated_tokens=292)
    stage.chat.presenter.model.update(replace(last, stats=full))


def _chat_folders(stage: Stage) -> None:
    """Folders, one of them collapsed, and a chat in one."""
    stage.open_conversation()
    first = stage.chat.presenter.conversation.id
    for name, is_open in (("Work", True), ("Garden and balcony, next spring", False)):
        folder = Folder(f"folder-{name}", name, is_open)
        stage.chat.presenter.list_model.put_folder(folder)
        stage.store.put_folder(folder)
    stage.chat.folders.move([first], "folder-Work")
    stage.chat.panel.set_current(first)


def _chat_find(stage: Stage) -> None:
    """A text is looked for in a chat."""
    _long_conversation(stage)
    stage.chat.finding.open("expert")
    stage.until(lambda: any(map(str.isdigit, stage.chat.find_bar.count.text())))
    stage.chat.finding.step(1)


def _chat_scratch(stage: Stage) -> None:
    """A chat that is never stored."""
    stage.open_conversation()
    stage.chat.new_scratch()


def _chat_edit_answer(stage: Stage) -> None:
    """An answer is edited."""
    stage.open_conversation()
    stage.answers()[0].start_editing()


def _chat_loading(stage: Stage) -> None:
    _chat_models(stage)
    stage.engine.model = None
    stage.engine.start_loading(0.43)


def _chat_no_model(stage: Stage) -> None:
    stage.engine.unload()


ELSEWHERE = endpoint_at(
    "http://10.0.0.5:8000/v1",
    "Rack in the cellar",
    at_once=8,
    price_in=0.5,
    price_out=1.5,
    currency="€",
    found=Found("vllm", "0.12.1", ("Qwen/Qwen3-235B-A22B", "zai-org/GLM-5-Air"), (131072, 65536), ("sampling",)),
)


def _add_servers(stage: Stage) -> None:
    save_endpoint(ELSEWHERE)
    found = Found("llama.cpp", "b7120", ("gpt-oss-20b",), (8192,), (), ("gpt-oss-20b",))
    save_endpoint(endpoint_at("http://127.0.0.1:8080/v1", "Beside", found=found))
    stage.services.endpoints.look_again()


def _chat_elsewhere(stage: Stage) -> None:
    """A chat that another server answers."""
    _add_servers(stage)
    stage.open_conversation()
    stage.chat.presenter.choose_model(remote_name(ELSEWHERE, "Qwen/Qwen3-235B-A22B"))


def _chat_elsewhere_empty(stage: Stage) -> None:
    _add_servers(stage)
    stage.chat.presenter.choose_model(remote_name(ELSEWHERE, "Qwen/Qwen3-235B-A22B"))


def _picture(width: int, height: int) -> QImage:
    """A made-up photo of hills under a sun."""
    image = QImage(width, height, QImage.Format.Format_RGB32)
    image.fill(QColor("#9ec9e8"))
    painter = QPainter(image)
    painter.setPen(Qt.PenStyle.NoPen)
    for colour, shape in (("#f2c14e", (0.7, 0.1, 0.2)), ("#5b8c5a", (-0.2, 0.55, 0.9)), ("#3c6e47", (0.4, 0.65, 0.9))):
        painter.setBrush(QColor(colour))
        painter.drawEllipse(round(shape[0] * width), round(shape[1] * height), *(round(shape[2] * width),) * 2)
    painter.end()
    return image


def _chat_pictures(stage: Stage) -> None:
    """A chat about pictures at another server, with one more to be sent."""
    _chat_elsewhere_empty(stage)
    chat = stage.chat
    stage.services.endpoints.agree(ELSEWHERE)
    chat.attaching.give([_picture(1200, 800), _picture(600, 900)])
    stage.until(lambda: len(chat.presenter.pictures) == 2)
    chat.presenter.send("Which of these two was taken in the morning?")
    stage.engine.reply("The first: the sun stands low on the right, and the hills have hardly any shadow.")
    chat.attaching.give([_picture(900, 900), _picture(300, 900)])
    stage.until(lambda: len(chat.presenter.pictures) == 2)
    chat.composer.box.setPlainText("And these?")


def _chat_pictures_here(stage: Stage) -> None:
    """A chat about pictures with a model on this PC that sees."""
    stage.engine.model = model = seer(stage.folder)
    stage.engine.model_loaded.emit(model)
    chat = stage.chat
    chat.attaching.give([_picture(1200, 800)])
    stage.until(lambda: len(chat.presenter.pictures) == 1)
    chat.presenter.send("What time of day is it in this picture?")
    stage.engine.reply(
        "Early morning: the sun stands low on the right, and the hills have hardly any shadow.",
        pictures=1,
        pictures_s=1.84,
    )
    chat.attaching.give([_picture(900, 900), _picture(300, 900), _picture(1600, 500)])
    stage.until(lambda: len(chat.presenter.pictures) == 3)
    chat.composer.box.setPlainText("And in these?")


def _batch_pictures(stage: Stage) -> None:
    """The form of a file that names pictures, with a model that reads text only."""
    file = stage.folder / "photos.csv"
    file.write_text("photo,place\n" + "".join(f"photos/{n}.jpg,Hill {n}\n" for n in range(1, 9)), encoding="utf-8")
    stage.window.show_page(BATCH)
    stage.batch.open_files([file])
    stage.until(stage.batch.form.foot.start.isEnabled)


def _chat_pictures_unread(stage: Stage) -> None:
    """The same chat with a model of this PC."""
    _chat_pictures(stage)
    stage.chat.presenter.attach(())
    stage.chat.presenter.choose_model("")
    stage.chat.attaching.give([_picture(300, 200)])


def _handbook() -> bytes:
    """A handbook of 42 pages, one of which says what is asked."""
    filler = "Readings are taken at eight and written into the log.\nThe gate stays closed while the pump runs."
    pages = [f"{number}. Part of the handbook\n\n" + "\n".join([filler] * 9) for number in range(1, 43)]
    pages[11] += "\nThe filter of the intake tower is washed every 36 hours, with the pump at half speed."
    pages[12] += "\nAfter washing, the first water of the filter is led away for 20 minutes."
    return pdf(pages, titles=[("Introduction", 0), ("Filters and intake", 10), ("Pumps", 20)])


def _chat_documents(stage: Stage) -> None:
    """Documents and a folder that will go with a message, and what was wrong with some."""
    folder = stage.folder / "papers"
    (folder / "waterworks" / "src").mkdir(parents=True)
    (folder / "handbook.pdf").write_bytes(_handbook())
    (folder / "minutes.pdf").write_bytes(pdf(["", "", ""]))
    (folder / "contract.pdf").write_bytes(pdf(["hidden"], password="secret"))
    docx(folder / "Supply contract with the town, second draft.docx", ["# Supply", *["The town pays for water."] * 40])
    for number in range(12):
        (folder / "waterworks" / "src" / f"pump{number}.py").write_text("def run():\n    return 'water'\n" * 30)
    given = [each for each in sorted(folder.iterdir()) if each.name != "waterworks"]
    stage.chat.attaching.give([*given, folder / "waterworks"])
    stage.until(lambda: all(one.is_read for one in stage.chat.presenter.attachments))
    stage.chat.composer.box.setPlainText("How often is the filter of the intake tower washed?")


def _chat_documents_elsewhere(stage: Stage) -> None:
    """The same, with a model of another server."""
    _chat_elsewhere_empty(stage)
    _chat_documents(stage)


def _chat_sources(stage: Stage) -> None:
    """An answer with its sources, and more to be sent."""
    _chat_documents(stage)
    chat = stage.chat
    names = ("handbook.pdf", "waterworks")
    chat.presenter.document_room = lambda _texts: 3000
    chat.presenter.attach_documents([one for one in chat.presenter.attachments if one.name in names])
    before = len(stage.engine.requests)
    chat._send(chat.composer.text)
    stage.until(lambda: len(stage.engine.requests) > before)
    sources = chat.presenter.model.rows[-1].message.sources
    one, other = (next(each.number for each in sources if each.page == page) for page in (12, 13))
    stage.engine.write(
        f"The filter of the intake tower is washed **every 36 hours**, with the pump at half speed [{one}]. After it, "
        f"the first water is led away for 20 minutes [{other}]."
    )
    stage.engine.finish()
    chat.attaching.give([stage.folder / "papers" / "minutes.pdf"])
    stage.until(lambda: all(each.is_read for each in chat.presenter.attachments))


def _chat_tools(stage: Stage) -> None:
    """Calls of tools, one of them opened, and the answer behind them."""
    chat, engine = stage.chat, stage.engine
    chat.presenter.set_tools(True)
    chat._send("What are 17.5% of 2,340 litres, and how many buckets of 12 litres is that?")
    stage.until(lambda: len(engine.requests) == 1)
    engine.write("I will compute that in two steps.")
    engine.call(("calculator", '{"expression": "0.175 * 2340"}'), ("calculator", '{"expression": "0.175 * 2340 /"}'))
    stage.until(lambda: len(engine.requests) == 2)
    engine.call(("calculator", '{"expression": "409.5 / 12"}'))
    stage.until(lambda: len(engine.requests) == 3)
    engine.reply("17.5% of 2,340 litres are **409.5 litres**: 34 buckets of 12 litres, and an eighth of one more.")
    turn = chat.transcript.turns[-1]
    next(iter(turn.calls.rows.values())).header.click()


def _chat_tools_asking(stage: Stage) -> None:
    """Whether a tool may run."""
    chat, engine = stage.chat, stage.engine
    schema = '{"type": "object", "properties": {"query": {"type": "string"}}}'
    tools = (Tool("search_web", "Searches the web.", schema),)
    stage.services.tools.put(ToolServer("web", "npx", ("-y", "web-search"), tools=tools))
    chat.presenter.set_tools(True)
    chat._send("When does the water tower open to visitors this weekend?")
    stage.until(lambda: len(engine.requests) == 1)
    engine.write("I will look that up.")
    given = {"query": "water tower opening hours Saturday Sunday", "count": 5}
    engine.call(("clock", "{}"), ("search_web", json.dumps(given)))
    stage.until(lambda: bool(chat.presenter.queue.waiting_calls(chat.presenter.answering_id or "")))


def _settings_tools(stage: Stage) -> None:
    """Tools, and servers with them, in view."""
    schema = '{"type": "object", "properties": {}}'
    names = ("read_note", "search_notes", "write_note")
    tools, listed = stage.services.tools, tuple(Tool(name, "", schema) for name in names)
    command = ("-y", "@modelcontextprotocol/server-filesystem", "/home/me/Documents/notes of the waterworks")
    tools.put(ToolServer("notes", "npx", command, tools=listed))
    tools.put(ToolServer("web", url="https://search.example.org/mcp", is_on=False))
    tools.problems["web"] = "web did not speak MCP within 30 seconds of its start: check its command or address."
    tools.allow_always(next(each.key for each in tools.offered() if each.name == "read_note"))
    page = stage.window.page(SETTINGS)
    stage.window.show_page(SETTINGS)
    stage.breathe(50)
    scroll = page.findChild(QScrollArea)
    scroll.verticalScrollBar().setValue(page.tools.y() - 8)


def _settings_tool_server(stage: Stage) -> None:
    """The dialog for a server with tools."""
    _settings_tools(stage)
    page = stage.window.page(SETTINGS)
    page.tools.edit(None)
    dialog = page.tools.dialog
    dialog.pasted.setPlainText('{"mcpServers": {"files": {}}}')
    dialog.test.click()
    stage.dialog = dialog


def _chat_passage(stage: Stage) -> None:
    """A source that was opened."""
    _chat_sources(stage)
    turn = stage.chat.transcript.turns[-1]
    turn.sources.buttons[0].click()
    (dialog,) = stage.chat.findChildren(PassageDialog)
    stage.until(lambda: bool(dialog.text.toPlainText()))
    stage.dialog = dialog


def _chat_elsewhere_models(stage: Stage) -> None:
    """The models on this PC, and those of other servers."""
    _add_servers(stage)
    _chat_models(stage)


def _chat_elsewhere_question(stage: Stage) -> None:
    """Whether a chat may go there."""
    _chat_elsewhere_empty(stage)
    stage.chat.composer.box.setPlainText(QUESTION)
    stage.chat.composer.send_button.click()
    stage.dialog = stage.chat.question


def _settings_servers(stage: Stage) -> None:
    """Servers elsewhere, in view."""
    _add_servers(stage)
    stage.window.show_page(SETTINGS)
    page = stage.window.page(SETTINGS)
    stage.breathe(50)
    scroll = page.findChild(QScrollArea)
    scroll.verticalScrollBar().setValue(page.servers.y() - 20)


def _settings_server(stage: Stage) -> None:
    """One of them, tested."""
    _settings_servers(stage)
    page = stage.window.page(SETTINGS)
    page.servers.edit(ELSEWHERE)
    dialog = page.servers.dialog
    dialog.show_seen(About(ELSEWHERE.found, "Qwen/Qwen3-235B-A22B", 0.012, 0.34))
    stage.dialog = dialog


def _keep_prompts(stage: Stage) -> None:
    prompts = stage.services.prompts
    stage.until(lambda: not prompts._doing.is_busy)
    prompts.put("Complaint to topic", "Which topic is this complaint about? Answer with one word.\n\n{{text}}")
    prompts.put("Explain to a beginner", "Explain {{subject}} to somebody who knows nothing of it.")
    prompts.put("Translate", "Translate the following text into {{language}} and keep its tone:\n\n{{text}}")


def _chat_prompts(stage: Stage) -> None:
    stage.open_conversation()
    _keep_prompts(stage)
    stage.chat.composer.box.setFocus()
    stage.chat.tools.open_prompts()


def _chat_prompt_form(stage: Stage) -> None:
    _chat_prompts(stage)
    popover = stage.chat.tools.popover
    popover.filter.setText("translate")
    popover._choose()


def _chat_prompt_editor(stage: Stage) -> None:
    _chat_prompts(stage)
    stage.chat.tools.popover.edit_button.click()


def _chat_presets(stage: Stage) -> None:
    presets = stage.services.presets
    stage.until(lambda: not presets._doing.is_busy)
    own = stage.chat.composer.sampling_popover.own
    presets.put("Wild ideas", replace(own, temperature=1.2, top_p=0.98))
    presets.put("The same every time", replace(own, temperature=0.0, seed=7))
    stage.chat.presenter.set_sampling(replace(own, temperature=1.2, top_p=0.98))
    stage.chat.composer.edit_sampling()
    stage.chat.composer.sampling_popover._explain(stage.chat.composer.sampling_popover.fields["top_p"])


def _side_by_side(stage: Stage) -> SideBySide:
    stage.chat.compare(QUESTION)
    dialog = stage.chat.side_by_side
    assert dialog is not None
    stage.dialog = dialog
    return dialog


def _chat_side_by_side(stage: Stage) -> None:
    dialog = _side_by_side(stage)
    dialog.ask_button.click()
    stage.engine.turn_to(0)
    stage.engine.reply(ANSWER)
    stage.engine.turn_to(1)
    stage.engine.write(ANSWER[:420])
    stage.breathe(80)


def _chat_imported(stage: Stage) -> None:
    stage.open_conversation()
    left = Counter({LeftOut.TOOLS: 31, LeftOut.PICTURES: 8})
    unread = Unread(left, damaged=2)
    stage.chat.transfer._on_imported(ImportReport(added=1204, grown=3, known=12, messages=18_250, unread=unread))


def _chat_importing(stage: Stage) -> None:
    stage.open_conversation()
    stage.chat.transfer._begin("Importing conversations.json…")
    stage.chat.transfer._on_progress(0.35, 420)


def _batch_handed(stage: Stage) -> None:
    stage.chat.batch_wanted.emit(BatchDraft("Which topic is this complaint about? {{text}}", "Answer with one word."))


def _batch_handed_form(stage: Stage) -> None:
    _batch_handed(stage)
    stage.fill_form()


def _quick_question(stage: Stage) -> None:
    services = stage.services
    prompt = QuickPrompt(services.store, services.answers, services.settings, services.endpoints)
    prompt.box.setPlainText("How does an expert cache choose what to evict?")
    stage.dialog = prompt
    prompt.show()
    prompt.ask(prompt.box.toPlainText())
    stage.engine.reply(ANSWER)
    stage.breathe(60)


def _settings_tray(stage: Stage) -> None:
    stage.settings.tray = True
    _settings(stage)
    page = stage.window.page(SETTINGS)
    stage.breathe(30)
    scroll = page.findChild(QScrollArea)
    scroll.ensureWidgetVisible(page.cards["Quick question"], 0, 200)


SCENES: dict[str, Callable[[Stage], None]] = {
    "chat-empty": lambda stage: None,
    "chat-conversation": lambda stage: stage.open_conversation(),
    "chat-code": _chat_code_only,
    "chat-answering": _chat_answering,
    "chat-editing": _chat_editing,
    "chat-error": _chat_error,
    "chat-toast": _chat_toast,
    "chat-list": _chat_list,
    "chat-system-prompt": _chat_system_prompt,
    "chat-sampling": _chat_sampling,
    "chat-thought": _chat_thought,
    "chat-thinking": _chat_thinking,
    "chat-thinking-setting": _chat_thinking_setting,
    "chat-models": _chat_models,
    "chat-elsewhere": _chat_elsewhere,
    "chat-elsewhere-empty": _chat_elsewhere_empty,
    "chat-pictures": _chat_pictures,
    "chat-documents": _chat_documents,
    "chat-documents-elsewhere": _chat_documents_elsewhere,
    "chat-sources": _chat_sources,
    "chat-passage": _chat_passage,
    "chat-pictures-here": _chat_pictures_here,
    "chat-tools": _chat_tools,
    "chat-tools-asking": _chat_tools_asking,
    "settings-tools": _settings_tools,
    "settings-tool-server": _settings_tool_server,
    "chat-pictures-unread": _chat_pictures_unread,
    "chat-elsewhere-models": _chat_elsewhere_models,
    "chat-elsewhere-question": _chat_elsewhere_question,
    "chat-too-long": _chat_too_long,
    "chat-loading": _chat_loading,
    "chat-no-model": _chat_no_model,
    "chat-banners": _banners,
    "chat-card-is-back": _card_is_back,
    "first-run": _first_run,
    "first-run-downloading": _first_run_downloading,
    "first-run-trouble": _first_run_trouble,
    "first-run-engine": _first_run_engine,
    "first-run-engine-fetching": _first_run_engine_fetching,
    "first-run-engine-testing": _first_run_engine_testing,
    "first-run-engine-trouble": _first_run_engine_trouble,
    "batch-empty": lambda stage: stage.window.show_page(BATCH),
    "batch-new": lambda stage: stage.fill_form(),
    "batch-sheet": lambda stage: stage.fill_workbook(),
    "batch-pictures": _batch_pictures,
    "batch-schema": _batch_schema,
    "batch-tried": _batch_tried,
    "batch-servers": _servers,
    "batch-servers-running": _servers_running,
    "batch-running": lambda stage: stage.start_job(),
    "batch-finished": _batch_list,
    "batch-cut-off": _batch_cut_off,
    "batch-failed": _batch_failed,
    "batch-question": _question,
    "monitor-empty": lambda stage: stage.window.show_page(MONITOR),
    "monitor": _monitor,
    "monitor-folded": _monitor_folded,
    "monitor-requests": _monitor_requests,
    "tune-start": _tune_start,
    "tune-plan": _tune_plan,
    "tune-what-if": _tune_what_if,
    "tune-results": _tune_results,
    "models-empty": _models_empty,
    "models": _models_with_downloads,
    "models-catalogue": _models_catalogue,
    "models-search": _models_search,
    "models-too-large": _models_too_large,
    "models-token": _models_token,
    "models-folders": _models_folders,
    "settings": _settings,
    "settings-computing": _settings_computing,
    "settings-hub": _settings_hub,
    "settings-others": _settings_others,
    "settings-servers": _settings_servers,
    "settings-server": _settings_server,
    "settings-updates": _settings_updates,
    "licences": _licences,
    "shortcuts": _shortcuts,
    "chat-context-filling": _chat_filling,
    "chat-context-length": _chat_context,
    "chat-context-full": _chat_full,
    "chat-folding": _chat_folding,
    "chat-folded": _chat_folded,
    "chat-folded-open": _chat_folded_open,
    "chat-folders": _chat_folders,
    "chat-find": _chat_find,
    "chat-scratch": _chat_scratch,
    "chat-edit-answer": _chat_edit_answer,
    "chat-mathematics": _chat_mathematics,
    "chat-prompts": _chat_prompts,
    "chat-prompt-form": _chat_prompt_form,
    "chat-prompt-editor": _chat_prompt_editor,
    "chat-presets": _chat_presets,
    "chat-side-by-side": _chat_side_by_side,
    "chat-side-by-side-empty": lambda stage: _side_by_side(stage) and None,
    "chat-imported": _chat_imported,
    "chat-importing": _chat_importing,
    "quick-question": _quick_question,
    "batch-handed": _batch_handed,
    "batch-handed-form": _batch_handed_form,
    "settings-tray": _settings_tray,
}
"""Each begins with the window just opened, on an empty chat."""
