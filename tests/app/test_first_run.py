"""The page for a PC without a model: what it says, what its buttons begin, and what happens when a model is there."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PySide6.QtCore import QSize
from PySide6.QtTest import QSignalSpy
from PySide6.QtWidgets import QApplication, QLabel, QMessageBox, QPushButton
from pytestqt.qtbot import QtBot

import app.services.hub as hub_module
import app.services.library as library_module
from app.services.downloads import Downloads
from app.services.engine_part import EnginePart
from app.services.hub import Hub
from app.services.installation import StarterDownload
from app.services.library import Library
from app.services.settings import Settings
from app.theme import ThemeController
from app.views.first_run import FirstRunPage, meaning_words, parts_words
from app.widgets.downloads_card import TokenDialog
from app.widgets.page import CHAT, MODELS, SETTINGS
from app.widgets.scaffold import WrappedLabel
from app.widgets.starter_offer import StarterOffer
from engine.checkpoint.downloads.queue import Download, DownloadState
from engine.checkpoint.library import LibraryEntry, Listing
from engine.checkpoint.names import not_in_library
from engine.common.settings import STARTER
from tests.app import tuning_results as made
from tests.app.model_parts import DOWNLOADS, RECOMMENDATIONS
from tests.app.model_parts import MODELS as MODELS_HERE
from tests.app.scripted_engine import STARTER as STARTER_INFO
from tests.app.scripted_engine import ScriptedEngine
from tests.app.stage import SCENES, staged

FOUND = (
    LibraryEntry("Granite", Path("/lm/granite"), bytes_on_disk=19_400_000_000, origin="LM Studio"),
    LibraryEntry("half", Path("/models/half"), problem="model.safetensors is missing."),
    LibraryEntry("small", Path("/models/small"), bytes_on_disk=93_000_000),
)


def download(state: DownloadState = DownloadState.RUNNING, **other: object) -> Download:
    """Of the balanced recommendation, some of which is there."""
    return replace(DOWNLOADS[0], reference=RECOMMENDATIONS[1].reference, state=state, **other)  # type: ignore[arg-type]


class NoDownloads(Downloads):
    """Notes what is asked for; nothing is fetched."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, command=["/no/such/program"])
        self.asked: list[tuple[str, str]] = []
        self.then: Callable[[Download], object] = lambda _download: None

    def watch(self, *, on: bool) -> None:
        self.asked.append(("watch", str(on)))

    def add_reference(self, reference: str, then: Callable[[Download], object] = lambda _download: None) -> None:
        self.asked.append(("add", reference))
        self.then = then

    def pause(self, key: str) -> None:
        self.asked.append(("pause", key))

    def resume(self, key: str) -> None:
        self.asked.append(("resume", key))

    def save_token(self, host: str, token: str, then: Callable[[bool], object]) -> None:
        self.asked.append(("token", host))
        then(True)

    def cancel(self, key: str) -> None:
        self.asked.append(("cancel", key))

    def show(self, *found: Download) -> None:
        self._entries = found
        self.changed.emit()


@pytest.fixture
def downloads(qapp: QApplication, settings: Settings) -> Iterator[NoDownloads]:
    result = NoDownloads(settings)
    yield result
    result.close()
    result.deleteLater()


@pytest.fixture
def engine(qapp: QApplication) -> ScriptedEngine:
    return ScriptedEngine(None)


@pytest.fixture
def page(
    qtbot: QtBot, engine: ScriptedEngine, downloads: NoDownloads, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FirstRunPage]:
    """Shown on a made-up machine; the three recommendations are there."""
    look = made.look(made.gpu())
    monkeypatch.setattr(hub_module, "catalogue_here", lambda _device, _free: (look, RECOMMENDATIONS))
    monkeypatch.setattr(library_module, "_look_around", lambda _cancelled: Listing(FOUND))
    hub, library, starter = Hub(), Library(), StarterDownload(command=["/no/such/program"])
    part = EnginePart(downloads)
    result = FirstRunPage(engine, hub, downloads, library, starter, settings, part)  # type: ignore[arg-type]
    qtbot.addWidget(result)
    result.resize(1072, 800)
    result.show()
    qtbot.waitUntil(lambda: bool(result.list.rows) and not result.here.isHidden())
    yield result
    for service in (part, hub, library, starter):
        service.close()
        service.deleteLater()


def test_nothing_is_downloaded_before_a_click(page: FirstRunPage, downloads: NoDownloads) -> None:
    assert downloads.asked == [("watch", "True")]  # goes on with what was begun before, and no more
    assert [row.recommendation.role for row in page.list.rows] == ["fast", "balanced", "best"]
    assert [row.button.property("kind") == "primary" for row in page.list.rows] == [False, True, False]
    page.list.rows[1].button.click()
    assert downloads.asked[1:] == [("add", RECOMMENDATIONS[1].reference)]
    assert [row.button.isEnabled() for row in page.list.rows] == [True, False, True]
    downloads.problem.emit("The hub cannot be reached.")
    assert page.problem.text() == "The hub cannot be reached."
    assert page.list.rows[1].button.isEnabled()


def test_a_download_is_paused_resumed_and_cancelled_here(
    page: FirstRunPage, downloads: NoDownloads, qtbot: QtBot
) -> None:
    one = download()
    downloads.show(one)
    assert not page.list.rows[1].button.isEnabled()
    page.progress.pause.setFocus()
    page.progress.pause.click()
    downloads.show(download(DownloadState.PAUSED))
    assert page.progress.resume.hasFocus()  # and not Cancel, which would be pressed by the next key
    page.progress.resume.click()
    assert downloads.asked[1:] == [("pause", one.key), ("resume", one.key)]
    page.progress.cancel.click()
    (box,) = page.findChildren(QMessageBox)  # something of it is there already
    assert downloads.asked[3:] == []
    (sure,) = [button for button in box.buttons() if "Cancel the download" in button.text()]
    sure.click()
    downloads.show(download(DownloadState.WAITING, done_bytes=0))
    page.progress.cancel.click()
    assert downloads.asked[3:] == [("cancel", one.key)] * 2


def test_the_model_that_has_come_is_loaded_from_now_on(
    page: FirstRunPage, downloads: NoDownloads, engine: ScriptedEngine, settings: Settings, qtbot: QtBot
) -> None:
    loads, pages = QSignalSpy(page.load_wanted), QSignalSpy(page.page_wanted)
    come = replace(FOUND[2], source=f"{RECOMMENDATIONS[1].reference}@0123456")

    def finish(entry: LibraryEntry) -> None:
        downloads.finished.emit(download(DownloadState.DONE))
        page._library._on_listed(Listing((entry,)))

    finish(FOUND[2])  # from elsewhere
    assert loads.count() == 0
    finish(come)
    assert settings.default_model == "small"
    assert (loads.count(), pages.at(0)) == (1, [CHAT])
    engine.start_loading()
    finish(come)
    engine.end_loading(STARTER_INFO)
    finish(come)
    engine.unload()
    finish(replace(come, name="other"))
    assert (loads.count(), settings.default_model) == (1, "small")  # only the first model is nobody else's choice


def test_a_download_that_is_asked_for_here_is_loaded_after_another_model_was_unloaded(
    page: FirstRunPage, downloads: NoDownloads, engine: ScriptedEngine, settings: Settings
) -> None:
    engine.end_loading(STARTER_INFO)
    engine.unload()
    page.list.rows[1].button.click()
    downloads.then(download())
    page._library._on_listed(Listing((replace(FOUND[2], source=f"{RECOMMENDATIONS[1].reference}@0123456"),)))
    assert settings.default_model == "small"


def test_a_download_that_needs_permission_is_given_a_token_here(page: FirstRunPage, downloads: NoDownloads) -> None:
    downloads.show(download(DownloadState.FAILED, error_code="download_failed", problem="Its makers ask for more."))
    page.progress.token.click()
    dialog = page.findChild(TokenDialog)
    dialog.field.setText("hf_secret")
    dialog.save.click()
    assert downloads.asked[1:] == [("token", "huggingface.co"), ("resume", downloads.entries[0].key)]


def test_the_speed_limit_is_kept(page: FirstRunPage, settings: Settings) -> None:
    page.progress.limit_wanted.emit(5_000_000)
    assert settings.get("download_limit", 0) == 5_000_000


def test_a_download_that_ended_between_two_windows_is_loaded_by_the_later_one(
    page: FirstRunPage, downloads: NoDownloads
) -> None:
    page.list.rows[1].button.click()
    downloads.then(download())
    loads = QSignalSpy(page.load_wanted)
    page._library._on_listed(Listing(FOUND))
    assert loads.count() == 0
    page._library._on_listed(Listing((replace(FOUND[2], source=f"{RECOMMENDATIONS[1].reference}@0123456"),)))
    assert loads.count() == 1


def test_what_is_here_already_is_used_where_it_lies(page: FirstRunPage, settings: Settings) -> None:
    loads = QSignalSpy(page.load_wanted)
    granite, small = page.here.buttons  # the largest first; what is damaged is not offered
    assert granite.accessibleName().endswith("Granite")
    granite.click()
    assert (settings.default_model, loads.count()) == ("Granite", 1)
    small.click()
    assert (settings.default_model, loads.count()) == ("small", 2)


def test_a_recommendation_that_is_here_is_loaded_and_not_fetched_again(
    page: FirstRunPage, downloads: NoDownloads, settings: Settings
) -> None:
    fetched = replace(FOUND[2], source=f"{RECOMMENDATIONS[0].reference}@0123456")
    page._library._on_listed(Listing((fetched,)))
    page.list.rows[0].button.click()
    assert settings.default_model == "small"
    assert downloads.asked == [("watch", "True")]


def test_the_other_ways(page: FirstRunPage, settings: Settings) -> None:
    files, pages, loads = QSignalSpy(page.file_wanted), QSignalSpy(page.page_wanted), QSignalSpy(page.load_wanted)
    for button in page.ways:
        button.click()
    assert (files.count(), [pages.at(at)[0] for at in range(pages.count())]) == (1, [MODELS, SETTINGS, CHAT])
    settings.default_model = "other"
    page.starter.ready.emit()
    assert (settings.default_model, loads.count()) == (STARTER, 1)
    page.hide()
    settings.default_model = "other"
    page.starter.ready.emit()  # got on another page
    assert (settings.default_model, loads.count()) == ("other", 1)


def test_a_file_that_is_opened_here_is_the_default_model_from_then_on(
    page: FirstRunPage, engine: ScriptedEngine, settings: Settings
) -> None:
    pages = QSignalSpy(page.page_wanted)
    engine.start_loading()
    assert [pages.at(at)[0] for at in range(pages.count())] == [CHAT]  # which says how far it is
    engine.end_loading(replace(STARTER_INFO, path="/files/coder.gguf", precision="stored", stored_as="Q4_K_M"))
    assert settings.default_model == "/files/coder.gguf"
    engine.end_loading(replace(STARTER_INFO, path="/files/other.gguf"))
    assert settings.default_model == "/files/coder.gguf"


def test_the_machine_in_plain_words(page: FirstRunPage) -> None:
    with_card, without = made.look(made.gpu()), made.look()
    assert "NVIDIA GeForce RTX 4060" in parts_words(with_card)
    assert all(words in parts_words(without) for words in ("32.0 GB", "8 cores", "440 GB"))
    said = {meaning_words(look) for look in (with_card, without, replace(with_card, device=""))}
    assert len(said) == 3
    assert "29.4 GB" in meaning_words(with_card)
    old = replace(without, probe=replace(without.probe, architecture="x86_64", instructions=("sse4_2", "avx")))
    assert "no AVX2: everything works" in meaning_words(old)
    assert "AVX2" not in meaning_words(without)
    assert "22.0 GB" in meaning_words(without)


# --- the starter ----------------------------------------------------------------------------------


COMMANDS = {
    "done": "import sys; print('getting: 40 %', file=sys.stderr, flush=True); print('{}')",
    "refused": 'import sys; print(\'{"error": {"code": "x", "message": "No network is there."}}\'); sys.exit(2)',
    "crashed": "import os; os.abort()",
    "endless": "import sys, time; print('getting: 7 %', file=sys.stderr, flush=True); time.sleep(60)",
}


@pytest.fixture
def card(qtbot: QtBot) -> Iterator[Callable[[str], StarterOffer]]:
    made: list[StarterDownload] = []

    def make(kind: str) -> StarterOffer:
        command = [sys.executable, "-c", COMMANDS[kind]] if kind in COMMANDS else ["/no/such/program"]
        starter = StarterDownload(command=command)
        made.append(starter)
        result = StarterOffer(starter, "A small Mixture of Experts")
        qtbot.addWidget(result)
        result.show()
        return result

    yield make
    for one in made:
        one.close()
        one.deleteLater()


def _press(card: StarterOffer, text: str) -> None:
    (button,) = [b for b in card.findChildren(QPushButton) if b.isVisible() and b.text().startswith(text)]
    button.click()


def _says(card: StarterOffer, text: str) -> bool:
    return any(text in label.text() for label in card.findChildren(QLabel) if label.isVisible())


def test_getting_the_starter_ends_in_ready(card: Callable[[str], StarterOffer], qtbot: QtBot) -> None:
    shown = card("done")
    with qtbot.waitSignal(shown.ready):
        _press(shown, "Get the starter")


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [("refused", "No network is there."), ("crashed", "could not be built"), ("absent", "could not be started")],
)
def test_a_download_that_fails_says_why_and_can_be_tried_again(
    card: Callable[[str], StarterOffer], qtbot: QtBot, kind: str, sentence: str
) -> None:
    shown = card(kind)
    for button in ("Get the starter", "Try again"):
        _press(shown, button)
        qtbot.waitUntil(lambda: _says(shown, sentence))


def test_a_download_shows_how_far_it_is_and_can_be_cancelled(card: Callable[[str], StarterOffer], qtbot: QtBot) -> None:
    shown = card("endless")
    _press(shown, "Get the starter")
    qtbot.waitUntil(lambda: _says(shown, "7%"))
    _press(shown, "Cancel")
    qtbot.waitUntil(lambda: _says(shown, "small Mixture of Experts"))


# --- offered wherever models are chosen -----------------------------------------------------------


def test_the_starter_can_be_had_from_the_picker_models_and_tune(
    settings: Settings, theme: ThemeController, tmp_path: Path, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_module, "_look_around", lambda _: Listing(()))
    with staged(settings, theme, tmp_path) as stage:
        stage.services.download._command = [sys.executable, "-c", COMMANDS["endless"]]
        stage.show(QSize(1280, 800))
        stage.engine.unload()
        SCENES["tune-start"](stage)
        stage.window.show_page(MODELS)
        stage.window.show_page(CHAT)
        stage.chat.choose_model()
        offers = [page.findChild(StarterOffer) for page in (stage.chat.picker, stage.window.page(MODELS), stage.tune)]
        picker, models, tune = offers
        assert tune is not None
        qtbot.waitUntil(lambda: not any(offer.isHidden() for offer in (picker, models, tune)))
        picker.get_button.click()
        for offer in (picker, models, tune):  # all of them say how far it is
            qtbot.waitUntil(lambda offer=offer: "7%" in offer.text.text())
        models.cancel_button.click()
        qtbot.waitUntil(lambda: not stage.services.download.is_running)
        assert not picker.get_button.isHidden()
        assert picker.cancel_button.isHidden()
        begun: list[None] = []
        monkeypatch.setattr(stage.services.model_start, "begin", lambda: begun.append(None))
        monkeypatch.setattr(library_module, "_look_around", lambda _: Listing(MODELS_HERE))
        stage.services.download.ended.emit(True, "")
        assert begun == [None]  # it is loaded, as nothing else is
        qtbot.waitUntil(lambda: picker.isHidden() and models.isHidden())


def test_messages_in_the_window_name_no_commands(qtbot: QtBot) -> None:
    said = {
        str(not_in_library("x")): "There is no model called 'x' in the library.",
        "The starter model is not on this machine yet: run `switchyard models pull starter`.": (
            "The starter model is not on this machine yet."
        ),
        "There is no folder a/b; if it is on the hub, `switchyard models pull a/b` downloads it. Else.": (
            "There is no folder a/b. Else."
        ),
        "Give a new one, or remove it (`switchyard models forget-token`).": "Give a new one, or remove it.",
        "This machine has no card: use cpu, or run `switchyard doctor`.": "This machine has no card: use cpu.",
        "It is broken: reinstall Switchyard; `switchyard doctor` says more.": "It is broken: reinstall Switchyard.",
    }
    for sentence, shown in said.items():
        label = WrappedLabel(sentence)
        qtbot.addWidget(label)
        assert label.text() == shown
