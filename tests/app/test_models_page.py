"""The Models page: what is on this PC, what is recommended, what the hub has, and the downloads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from PySide6.QtCore import QMimeData, QModelIndex, QObject, QPointF, Qt, QUrl, Signal
from PySide6.QtGui import QDropEvent
from PySide6.QtWidgets import QMessageBox, QPushButton, QWidget
from pytestqt.qtbot import QtBot

from app.models.library import Column
from app.services.downloads import FOLDER_KEY
from app.services.hub import RepositoryAnswer, SearchAnswer, Trouble
from app.services.library import Work
from app.services.settings import Settings
from app.views.models.on_this_pc import FoldersDialog
from app.views.models.page import ModelsPage
from app.views.models.phrases import ended_words, used_words, work_words
from app.widgets.downloads_card import TokenDialog
from app.widgets.fit_table import fit_bars
from engine.checkpoint.downloads.queue import Download, DownloadState
from engine.checkpoint.library import LibraryEntry, Verification
from engine.checkpoint.model_directories import Room, model_folders
from engine.checkpoint.ownership import Removed
from engine.common.config import KvPrecision
from engine.common.paths import models_dir
from engine.planner.plan_parts import Limits, PicturePlan
from engine.tuning.fit import DiskBytes, FitCard
from tests.app import model_parts as parts
from tests.app import tuning_results as made
from tests.app.scripted_engine import STARTER, ScriptedEngine


class Recorder(QObject):
    """Notes which of its methods are called; what is asked for does not happen."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = MagicMock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.calls, name)


class FakeLibrary(Recorder):
    listed = Signal()
    work_changed = Signal()
    ended = Signal(object)

    def __init__(self) -> None:
        super().__init__()
        self.entries: tuple[LibraryEntry, ...] = ()
        self.problems: tuple[str, ...] = ()
        self.work: Work | None = None

    def entry(self, name: str) -> LibraryEntry | None:
        return next((one for one in self.entries if name in (one.name, str(one.path))), None)

    def entry_from(self, reference: str) -> LibraryEntry | None:
        return next((one for one in self.entries if one.source.startswith(f"{reference}@")), None)

    def show(self, *entries: LibraryEntry) -> None:
        self.entries = entries
        self.listed.emit()


class FakeDownloads(Recorder):
    changed = Signal()
    finished = Signal(object)
    problem = Signal(str)

    def __init__(self) -> None:
        super().__init__()
        self.entries: tuple[Download, ...] = ()
        self.limit = 0
        self.token = False

    def ask_token(self, _host: str, then: Callable[[bool], object]) -> None:
        then(self.token)

    def entry(self, key: str) -> Download | None:
        return next((one for one in self.entries if one.key == key), None)

    def show(self, *entries: Download) -> None:
        self.entries = entries
        self.changed.emit()


class FakeHub(Recorder):
    found = Signal(object)
    opened = Signal(object)
    judged = Signal(object)
    looked = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.look = made.look(made.gpu())
        self.offers = parts.RECOMMENDATIONS

    def limits(self, kv_precision: KvPrecision = "auto") -> Limits:
        return Limits(vram_of_others=1, ram_of_others=2, kv_precision=kv_precision)

    def show(self) -> None:
        """A repository is there, and judged."""
        self.opened.emit(RepositoryAnswer(parts.REPOSITORY.id, parts.shaped(), len(parts.CANDIDATES)))
        self.judge_now()

    def judge_now(self) -> None:
        shaped, limits = self.calls.judge.call_args.args
        self.judged.emit(parts.fit_card(shaped, self.look, limits))


class FakeSpeeds(Recorder):
    found = Signal(str, float, bool)


@dataclass
class Scene:
    page: ModelsPage
    engine: ScriptedEngine
    settings: Settings
    library: FakeLibrary
    downloads: FakeDownloads
    hub: FakeHub
    speeds: FakeSpeeds

    def answer(self, label: str) -> None:
        """Presses a button of the question that is asked."""
        box = self.page.findChild(QMessageBox)
        assert box is not None
        next(one for one in box.findChildren(QPushButton) if one.text() == label).click()


@pytest.fixture
def scene(settings: Settings, qtbot: QtBot) -> Iterator[Scene]:
    services = (FakeLibrary(), FakeDownloads(), FakeHub(), FakeSpeeds())
    engine = ScriptedEngine()
    page = ModelsPage(engine, settings, *services)  # type: ignore[arg-type]
    qtbot.addWidget(page)
    page.resize(1072, 760)
    page.show()
    scene = Scene(page, engine, settings, *services)
    scene.hub.looked.emit()
    yield scene
    page.close_down()
    for one in (engine, *services):
        one.deleteLater()


# --- on this PC -------------------------------------------------------------------------------------


def test_models_are_listed_with_what_is_known_of_them(scene: Scene, qtbot: QtBot) -> None:
    here = scene.page.here
    assert not here.table.isVisible()
    scene.library.show(*parts.MODELS)
    scene.speeds.found.emit(str(parts.MODELS[2].path), 24.6, False)
    speeds = ["38.4", "31.2", "≈ 25", "–", "–"]
    qtbot.waitUntil(lambda: [here.rows.index(row, Column.SPEED).data() for row in range(5)] == speeds)
    assert [here.rows.rows[row].is_default for row in range(2)] == [True, False]
    asked = list(scene.speeds.calls.ask.call_args.args[0])
    assert asked == [str(parts.MODELS[2].path), str(parts.MODELS[3].path)]  # not what was measured, nor what is damaged


def test_what_models_can_do_is_marked_and_filtered_by(scene: Scene) -> None:
    seer, *others = (replace(entry, sees=at == 0, embeds=at == 3) for at, entry in enumerate(parts.MODELS))
    scene.library.show(seer, *others)
    card = scene.page.here
    assert not card.able.isHidden()
    texts = [card.rows.data(card.rows.index(at, 0), Qt.ItemDataRole.AccessibleTextRole) for at in range(4)]
    assert ["pictures" in text.split("\n")[0] for text in texts] == [True, False, False, False]
    assert texts[1].startswith("gpt-oss-20b, ")
    assert "tools, thinks" in texts[1]

    def shown(words: str) -> list[str]:
        card.able.setCurrentIndex(card.able.findText(words))
        card.able.activated.emit(0)
        return [row.entry.name for row in card.rows.rows]

    assert shown("Sees pictures") == ["starter"]
    assert "pictures" in card.facts.text()
    assert shown("Calls tools") == ["gpt-oss-20b", "Qwen3-30B-A3B-Instruct-2507-Q4_K_M"]
    assert shown("Thinks first") == ["gpt-oss-20b"]
    assert shown("Embeds texts") == ["mixtral:8x7b"]
    scene.library.show(*parts.MODELS)  # the choice stays
    assert shown("Embeds texts") == []
    assert card.nothing.text() == "No model here can do that."
    assert len(shown("Any ability")) == 5


def test_the_loaded_model_can_be_unloaded_and_another_loaded(scene: Scene, qtbot: QtBot) -> None:
    scene.engine.model = replace(STARTER, path=str(parts.MODELS[1].path))
    scene.library.show(*parts.MODELS)
    here = scene.page.here
    assert here.entry == parts.MODELS[1]
    assert (here.load.isHidden(), here.unload.isHidden()) == (True, False)
    with qtbot.waitSignal(scene.page.unload_wanted):
        here.unload.click()
    scene.engine.model = None
    scene.engine.set_state(scene.engine.state.STARTING)
    assert (here.load.isHidden(), here.unload.isHidden()) == (False, True)
    here.choose(str(parts.MODELS[2].path))
    with qtbot.waitSignal(scene.page.load_wanted) as wanted:
        qtbot.keyClick(here.table, Qt.Key.Key_Return)
    assert wanted.args == [str(parts.MODELS[2].path)]


def test_a_model_that_was_opened_from_elsewhere_is_listed_while_it_is_loaded(scene: Scene) -> None:
    scene.engine.model = replace(STARTER, name="mine", path="/elsewhere/mine.gguf")
    scene.library.show()
    here = scene.page.here
    assert here.nothing.isHidden()
    assert (here.entry.name, here.unload.isHidden(), here.remove.isEnabled()) == ("mine", False, False)
    assert here.caption.text() == "1 model"
    copy = replace(parts.MODELS[1], also=(("folder", Path("/elsewhere/mine.gguf")),))
    scene.library.show(copy)  # it is known by another place
    assert here.rows.rowCount() == 1
    scene.engine.model = None
    scene.library.show()
    assert not here.nothing.isHidden()


def test_a_damaged_model_cannot_be_loaded_and_says_why(scene: Scene, qtbot: QtBot) -> None:
    scene.library.show(*parts.MODELS)
    here = scene.page.here
    here.choose(str(parts.MODELS[4].path))
    assert not here.load.isEnabled()
    assert here.problem.text() == parts.MODELS[4].problem
    with qtbot.assertNotEmitted(scene.page.load_wanted):
        qtbot.keyClick(here.table, Qt.Key.Key_Return)


def test_the_default_is_set_and_shown(scene: Scene) -> None:
    scene.library.show(*parts.MODELS)
    here = scene.page.here
    here.choose(str(parts.MODELS[1].path))
    here.default.click()
    assert scene.settings.default_model == "gpt-oss-20b"
    assert not here.default.isEnabled()
    assert here.rows.rows[1].is_default


def test_models_of_other_programs_are_neither_moved_nor_removed(scene: Scene) -> None:
    scene.library.show(*parts.MODELS)
    here = scene.page.here
    here.choose(str(parts.MODELS[2].path))
    assert not here.remove.isEnabled()
    assert here.remove.toolTip()
    assert not here.move_.isVisible()
    here.choose(str(parts.MODELS[1].path))
    assert here.remove.isEnabled()
    assert here.move_.isVisible()
    assert here.converted.isVisible()


def test_removing_asks_first_and_takes_the_default_along(scene: Scene, qtbot: QtBot) -> None:
    scene.library.show(*parts.MODELS)
    scene.settings.default_model = "gpt-oss-20b"
    scene.page.here.choose(str(parts.MODELS[1].path))
    qtbot.keyClick(scene.page.here.table, Qt.Key.Key_Delete)
    scene.library.calls.remove.assert_not_called()
    scene.answer("Move to the trash")
    scene.library.calls.remove.assert_called_once_with(parts.MODELS[1])
    assert scene.settings.default_model == "starter"


def test_actions_reach_the_library(scene: Scene) -> None:
    scene.library.show(*parts.MODELS)
    here, model = scene.page.here, parts.MODELS[1]
    here.choose(str(model.path))
    here.verify.trigger()
    here.converted.trigger()
    scene.library.calls.verify.assert_called_once_with(model)
    scene.library.calls.remove_converted.assert_called_once_with(model)


def test_work_shows_how_far_it_is_and_can_be_stopped(scene: Scene) -> None:
    scene.library.work = Work("verify", "gpt-oss-20b", 43, 100)
    scene.library.work_changed.emit()
    line = scene.page.here.work
    assert line.isVisible()
    line.cancel.click()
    scene.library.calls.cancel.assert_called_once_with()
    scene.library.work = None
    scene.library.work_changed.emit()
    assert line.isHidden()
    scene.library.ended.emit(Work("verify", "gpt-oss-20b", problem="The disk is gone."))
    assert scene.page.trouble.text == "The disk is gone."


@pytest.mark.parametrize("name", ["model.gguf", "folder"])
def test_a_dropped_model_is_imported(scene: Scene, tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    if name == "folder":
        file.mkdir()
        (file / "model.gguf").touch()
    else:
        file.touch()
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(file))])
    event = QDropEvent(
        QPointF(5, 5), Qt.DropAction.CopyAction, data, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
    )
    scene.page.dropEvent(event)
    scene.library.calls.bring_in.assert_called_once_with(file)
    assert event.isAccepted()


def test_what_came_of_work_is_said() -> None:
    damaged = Verification("m", Path("/m"), "sha256", 2, {"a.gguf": "has other bytes"})
    for work, part in (
        (Work("verify", "m", result=Verification("m", Path("/m"), "sha256", 2, {})), "m"),
        (Work("verify", "m", result=damaged), "a.gguf"),
        (Work("import", "m", result=parts.MODELS[1]), "gpt-oss-20b"),
        (Work("move", "m", result=parts.MODELS[1]), str(parts.MODELS[1].path.parent)),
        (Work("export", "m", result=Path("/media/copy")), "copy"),
        (Work("remove", "m", result=Removed(4_000_000_000, Path("/m"))), "4.00 GB"),
        (Work("remove", "m", result=Removed(1, Path("/m"), others=2)), "in /m stays"),
        (Work("converted", "m", result=4_000_000_000), "4.00 GB"),
    ):
        assert part in ended_words(work)
        assert "m" in work_words(work)
    assert "50" in work_words(Work("move", "m", 1, 2))


@pytest.mark.parametrize(("days", "text"), [(0, "today"), (1, "yesterday"), (12, "12 days ago")])
def test_when_a_model_was_used_is_said_in_days(days: int, text: str) -> None:
    noon = 1_790_000_000.0
    assert used_words(noon - 86_400 * days, noon) == text


def test_folders_are_added_and_taken_off_the_list(scene: Scene, tmp_path: Path, qtbot: QtBot) -> None:
    dialog = scene.page.open_folders()
    before = scene.library.calls.look.call_count
    with qtbot.waitSignal(dialog.changed):
        dialog.add_folder(tmp_path)
        assert not dialog.add.isEnabled()  # a disk may take its time
    assert tmp_path in model_folders()
    assert scene.library.calls.look.call_count == before + 1
    dialog.add_folder(tmp_path / "nowhere")
    qtbot.waitUntil(lambda: dialog.trouble.isVisible() and dialog.add.isEnabled())
    dialog.list.setCurrentRow(1)
    dialog.drop.click()
    looks = scene.library.calls.look.call_count
    dialog.accept()  # and is closed meanwhile
    qtbot.waitUntil(lambda: scene.library.calls.look.call_count == looks + 1)
    assert model_folders()[1:] == ()
    qtbot.waitUntil(lambda: not scene.page.findChildren(FoldersDialog))


# --- the catalogue ----------------------------------------------------------------------------------


def test_the_catalogue_is_listed_and_its_models_are_downloaded_by_a_click_and_then_loaded(
    scene: Scene, qtbot: QtBot
) -> None:
    search = scene.page.search
    assert [row.role for row in search.results.rows.rows] == ["balanced", "fast", "best"]  # type: ignore[union-attr]
    scene.downloads.calls.add_reference.assert_not_called()
    search.results.choose(1)
    offer = search.offer.offer
    search.offer.get.click()
    assert scene.downloads.calls.add_reference.call_args.args[0] == offer.reference
    scene.downloads.show(replace(parts.download("one"), reference=offer.reference))
    assert not search.offer.get.isEnabled()
    scene.downloads.show()
    scene.library.show(replace(parts.MODELS[1], source=f"{offer.reference}@0123"))
    with qtbot.waitSignal(scene.page.load_wanted) as wanted:
        search.offer.get.click()
    assert wanted.args == [str(parts.MODELS[1].path)]
    search.offer.files.click()
    scene.hub.calls.open.assert_called_once_with(offer.reference.partition(":")[0])
    assert search.offer.isHidden()
    assert search.right.isVisible()


def test_the_catalogue_is_filtered_by_words_size_ability_licence_and_fit(scene: Scene, qtbot: QtBot) -> None:
    one = parts.RECOMMENDATIONS[0]
    coder = replace(
        one, role="", entry=replace(one.entry, name="Coder", abilities=("code",), licence="Own"), bytes=70 * parts.GB
    )
    large = replace(
        one, role="", entry=replace(one.entry, name="Large"), speed=None, verdict="too-large", sentence="No."
    )
    scene.hub.offers = (*parts.RECOMMENDATIONS, coder, large)
    scene.hub.looked.emit()
    search = scene.page.search

    def names() -> list[str]:
        return [row.entry.name for row in search.results.rows.rows]  # type: ignore[union-attr]

    assert names()[-2:] == ["Coder", "Large"]
    qtbot.keyClicks(search.field, "CODE")
    assert "Coder" in names()
    assert "Large" not in names()
    search.field.clear()
    search.field.textEdited.emit("")
    search.ability.setCurrentIndex(search.ability.findData("code"))
    search.ability.activated.emit(0)
    assert names() == ["Coder"]
    search.is_free.click()
    assert names() == []
    assert "Enter" in search.hint.text()
    search.is_free.click()
    search.ability.setCurrentIndex(0)
    search.ability.activated.emit(0)
    search.sizes.setCurrentIndex(search.sizes.findData(8 * parts.GB))
    search.sizes.activated.emit(0)
    assert names() == ["LFM2.5-8B-A1B", "Large"]
    search.runs_well.click()
    assert names() == ["LFM2.5-8B-A1B"]


def test_what_does_not_fit_says_why_and_has_no_button(scene: Scene) -> None:
    large = replace(parts.RECOMMENDATIONS[0], speed=None, verdict="too-large", sentence="It needs 57 GB of RAM.")
    scene.hub.offers = (large,)
    scene.hub.looked.emit()
    view = scene.page.search.offer
    assert view.why.text() == "It needs 57 GB of RAM."
    assert view.get.isHidden()


# --- the hub ----------------------------------------------------------------------------------------


def test_a_search_leads_to_a_repository_and_its_recommended_file(scene: Scene, qtbot: QtBot) -> None:
    search = scene.page.search
    search.field.setText("qwen3 30b")
    qtbot.keyClick(search.field, Qt.Key.Key_Return)
    scene.hub.calls.search.assert_called_once_with("qwen3 30b")
    scene.hub.found.emit(SearchAnswer("qwen3 30b", parts.FOUND))
    scene.hub.calls.open.assert_called_once_with(parts.REPOSITORY.id)  # the first is looked into at once
    scene.hub.show()
    row = search.fit.table.row
    assert row.candidate.label == "Q4_K_M"
    search.fit.download.click()
    assert scene.downloads.calls.add.call_args.args[0] == row.candidate


def test_a_file_that_is_here_is_loaded_and_one_on_its_way_is_not_asked_for_again(scene: Scene, qtbot: QtBot) -> None:
    scene.hub.show()
    fit, reference = scene.page.search.fit, parts.CANDIDATES[4].reference
    scene.downloads.show(replace(parts.download("one"), reference=reference))
    assert not fit.download.isEnabled()
    qtbot.keyClick(fit.table, Qt.Key.Key_Return)
    scene.downloads.calls.add.assert_not_called()
    scene.downloads.show()
    scene.library.show(replace(parts.MODELS[1], source=f"{reference}@0123"))
    with qtbot.waitSignal(scene.page.load_wanted) as wanted:
        fit.download.click()
    assert wanted.args == [str(parts.MODELS[1].path)]
    scene.downloads.calls.add.assert_not_called()


def test_a_pasted_link_is_opened_without_a_search(scene: Scene) -> None:
    for text in (
        "https://huggingface.co/org/Name",
        "org/Name",
        "modelscope:org/Name",
        "org/Name:Q4_K_M",
        "hf.co/org/Name:Q4_K_M",
    ):
        scene.page.search.field.setText(text)
        scene.page.search.button.click()
        assert scene.hub.calls.open.call_args.args == (text,)
    scene.hub.calls.search.assert_not_called()


def test_candidates_appear_as_they_are_read(scene: Scene) -> None:
    scene.page.search.field.setText("org/Name")
    scene.page.search.button.click()
    scene.hub.opened.emit(RepositoryAnswer("org/Name", parts.shaped()[:2], 7))
    scene.hub.judge_now()
    fit = scene.page.search.fit
    assert fit.table.rows.rowCount() == 2
    assert fit.progress.isVisible()
    scene.hub.show()
    assert fit.table.rows.rowCount() == 7
    assert not fit.progress.isVisible()


def test_the_card_follows_context_and_memory(scene: Scene, qtbot: QtBot) -> None:
    scene.hub.show()
    fit = scene.page.search.fit
    assert scene.hub.calls.judge.call_args.args[1] == Limits(vram_of_others=1, ram_of_others=2, context_tokens=8192)
    qtbot.keyClick(fit.context, Qt.Key.Key_Right)
    qtbot.keyClick(fit.memory, Qt.Key.Key_Left)
    limits = scene.hub.calls.judge.call_args.args[1]
    assert limits.context_tokens == 16_384
    assert limits.vram_bytes is not None
    assert 0 < limits.vram_bytes < 8 * parts.GIB
    before = fit.table.card
    scene.hub.judge_now()
    assert fit.table.card != before


def test_a_file_that_the_user_chose_stays_chosen(scene: Scene) -> None:
    scene.hub.show()
    fit = scene.page.search.fit
    fit.table.setCurrentIndex(fit.table.rows.index(2, 0))
    fit.context.setValue(fit.context.value() + 1)
    scene.hub.judge_now()
    assert fit.table.row.candidate.label == "Q6_K"


def test_a_file_that_is_too_large_is_loaded_only_after_the_answer_to_a_question(scene: Scene, qtbot: QtBot) -> None:
    scene.hub.show()
    fit = scene.page.search.fit
    fit.table.setCurrentIndex(fit.table.rows.index(0, 0))
    assert (fit.download.isHidden(), fit.anyway.isHidden()) == (True, False)
    fit.anyway.click()
    scene.downloads.calls.add.assert_not_called()
    scene.answer("Download 61.1 GB and load it")
    candidate, then = scene.downloads.calls.add.call_args.args
    assert candidate.label == "BF16"
    download = parts.download("one")
    then(download)
    with qtbot.waitSignal(scene.page.load_wanted) as wanted:
        scene.downloads.finished.emit(replace(download, state=DownloadState.DONE))
    assert wanted.args == [str(download.folder)]


def test_what_cannot_run_says_why_and_offers_nothing(scene: Scene) -> None:
    broken = replace(parts.CANDIDATES[0], problem="It holds an adapter and no model.")
    row = replace(parts.fit_row(broken), speed=None, verdict="too-large", card=None, ram=None)
    scene.hub.opened.emit(RepositoryAnswer("org/x", ((broken, None),), 1))
    scene.hub.judged.emit(FitCard((row,), None, ""))
    fit = scene.page.search.fit
    assert "adapter" in fit.details.text()
    assert fit.download.isHidden()
    assert fit.anyway.isHidden()
    seeing = replace(parts.fit_row(parts.CANDIDATES[0]), pictures=PicturePlan(0.42, 620 * 2**20))
    scene.hub.judged.emit(FitCard((seeing,), 0, ""))
    assert "pictures: about 0.4 s each on the CPU, 620 MB" in fit.details.text()


def test_offline_is_said_once_and_calmly(scene: Scene) -> None:
    search = scene.page.search
    for _ in range(2):
        search.field.setText("qwen")
        search.button.click()
        scene.hub.found.emit(SearchAnswer("qwen", trouble=Trouble("The hub could not be reached.", is_network=True)))
        assert search.hint.text() == "The hub could not be reached."
        assert search.trouble.isHidden()
        assert search.button.isEnabled()
        assert scene.page.toast.isHidden()


def test_trouble_with_a_repository_replaces_the_card(scene: Scene) -> None:
    scene.hub.show()
    scene.hub.opened.emit(RepositoryAnswer("org/x", trouble=Trouble("There is no model org/x.")))
    fit = scene.page.search.fit
    assert fit.trouble.text() == "There is no model org/x."
    assert fit.table.isHidden()
    assert fit.download.isHidden()


def test_a_gated_model_asks_for_a_token_before_the_download(scene: Scene, qtbot: QtBot) -> None:
    gated = replace(parts.CANDIDATES[4], repository=replace(parts.REPOSITORY, gated=True))
    scene.hub.opened.emit(RepositoryAnswer("org/x", parts.shaped((gated,)), 1))
    scene.hub.judge_now()
    scene.page.search.fit.download.click()
    scene.downloads.calls.add.assert_not_called()
    dialog = scene.page.findChild(TokenDialog)
    assert not dialog.save.isEnabled()
    dialog.field.setText(" hf_secret ")
    dialog.save.click()
    host, token, then = scene.downloads.calls.save_token.call_args.args
    assert (host, token) == ("huggingface.co", "hf_secret")
    then(True)
    assert scene.downloads.calls.add.call_args.args[0] == gated
    scene.downloads.token = True
    scene.page.search.fit.download.click()
    assert scene.downloads.calls.add.call_count == 2


def test_a_repository_that_is_not_open_is_read_again_with_a_token(scene: Scene) -> None:
    search = scene.page.search
    search.field.setText("org/x")
    search.button.click()
    assert search.token.isHidden()
    trouble = Trouble("It is not open to everybody.", needs_token=True, link="https://huggingface.co/org/x")
    scene.hub.opened.emit(RepositoryAnswer("org/x", trouble=trouble))
    search.token.click()
    dialog = scene.page.findChild(TokenDialog)
    dialog.field.setText("hf_secret")
    dialog.save.click()
    host, _token, then = scene.downloads.calls.save_token.call_args.args
    assert host == "huggingface.co"
    then(True)
    assert scene.hub.calls.open.call_count == 2
    assert search.token.isHidden()


# --- downloads --------------------------------------------------------------------------------------


def test_downloads_are_paused_cancelled_and_ordered_by_keyboard(scene: Scene, qtbot: QtBot) -> None:
    card = scene.page.downloads
    assert card.isHidden()
    scene.downloads.show(*parts.DOWNLOADS)
    assert card.isVisible()
    keys = [one.key for one in parts.DOWNLOADS]
    qtbot.keyClick(card.list, Qt.Key.Key_Space)
    scene.downloads.calls.pause.assert_called_once_with(keys[0])
    qtbot.keyClick(card.list, Qt.Key.Key_Down)
    qtbot.keyClick(card.list, Qt.Key.Key_Up, Qt.KeyboardModifier.AltModifier)
    scene.downloads.calls.move.assert_called_once_with(keys[1], 0)
    qtbot.keyClick(card.list, Qt.Key.Key_Delete)
    scene.downloads.calls.cancel.assert_called_once_with(keys[1])  # nothing was fetched: nothing is asked
    card.list.setCurrentIndex(card.list.rows.index(0, 0))
    qtbot.keyClick(card.list, Qt.Key.Key_Delete)
    assert scene.downloads.calls.cancel.call_count == 1
    scene.answer("Cancel the download")
    scene.downloads.calls.cancel.assert_called_with(keys[0])


def test_the_chosen_download_stays_chosen_while_others_move(scene: Scene) -> None:
    first, second, third = parts.DOWNLOADS
    scene.downloads.show(first, second, third)
    view = scene.page.downloads.list
    view.setCurrentIndex(view.rows.index(1, 0))
    scene.downloads.show(second, first, third)
    assert view.download == second
    assert (scene.page.downloads.up.isEnabled(), scene.page.downloads.down.isEnabled()) == (False, True)


def test_downloads_are_ordered_by_dragging(scene: Scene, qtbot: QtBot) -> None:
    scene.downloads.show(*parts.DOWNLOADS)
    rows = scene.page.downloads.list.rows
    data = rows.mimeData([rows.index(0, 0)])
    for row, place in ((0, 0), (2, 1), (3, 2), (-1, 2)):
        rows.dropMimeData(data, Qt.DropAction.MoveAction, row, 0, QModelIndex())
        scene.downloads.calls.move.assert_called_with(parts.DOWNLOADS[0].key, place)


def test_a_failed_download_is_resumed_or_given_a_token(scene: Scene) -> None:
    scene.downloads.show(*parts.DOWNLOADS)
    card = scene.page.downloads
    assert card.trouble.isHidden()
    card.list.setCurrentIndex(card.list.rows.index(2, 0))
    assert card.pause.isHidden()
    assert card.trouble.text() == parts.DOWNLOADS[2].problem  # in full: it says what to do
    card.resume.click()
    scene.downloads.calls.resume.assert_called_once_with("gemma")
    card.token.click()
    dialog = scene.page.findChild(TokenDialog)
    dialog.field.setText("hf_secret")
    dialog.save.click()
    host, _token, then = scene.downloads.calls.save_token.call_args.args
    assert host == "huggingface.co"
    then(False)
    assert scene.downloads.calls.resume.call_count == 2


def test_sizes_that_nobody_checked_are_marked(scene: Scene) -> None:
    view = scene.page.search.offer
    assert not view.unchecked.isHidden()
    assert "≈" in view.figures.text()
    scene.hub.offers = tuple(replace(one, entry=replace(one.entry, unchecked=())) for one in parts.RECOMMENDATIONS)
    scene.hub.looked.emit()
    assert view.unchecked.isHidden()
    assert "≈" not in view.figures.text()


def test_a_speed_limit_is_set_only_when_it_is_chosen(scene: Scene) -> None:
    scene.downloads.show(*parts.DOWNLOADS)
    limit = scene.page.downloads.limit
    scene.downloads.calls.set_limit.assert_not_called()
    at = limit.findData(5_000_000)
    limit.setCurrentIndex(at)
    limit.activated.emit(at)
    scene.downloads.calls.set_limit.assert_called_with(5_000_000)


def test_a_finished_download_can_be_loaded_from_the_message(scene: Scene, qtbot: QtBot) -> None:
    done = parts.download("one", state=DownloadState.DONE)
    scene.downloads.finished.emit(done)
    with qtbot.waitSignal(scene.page.load_wanted) as wanted:
        scene.page.toast.button.click()
    assert wanted.args == [str(done.folder)]


def test_downloads_are_watched_only_while_the_page_is_seen(scene: Scene) -> None:
    scene.downloads.calls.watch.assert_called_with(on=True)
    scene.page.hide()
    scene.downloads.calls.watch.assert_called_with(on=False)


def test_tab_goes_through_the_page_from_top_to_bottom(scene: Scene, qtbot: QtBot) -> None:
    scene.library.show(*parts.MODELS)
    scene.downloads.show(*parts.DOWNLOADS)
    scene.hub.found.emit(SearchAnswer("qwen", parts.FOUND))
    scene.hub.show()
    page, search = scene.page, scene.page.search
    wanted: list[QWidget] = [
        search.field,
        page.folders_button,
        page.downloads.list,
        page.downloads.limit,
        page.here.table,
        page.here.load,
        page.here.more,
        search.runs_well,
        search.sizes,
        search.results,
        search.fit.context,
        search.fit.table,
        search.fit.download,
    ]
    seen: list[QWidget] = [page]
    while (following := seen[-1].nextInFocusChain()) is not page:
        seen.append(following)
    assert [one for one in seen if one in wanted] == wanted


# --- folders, copies, and pasted references ------------------------------------------------------------


def test_of_several_folders_one_is_chosen_and_remembered(scene: Scene, settings: Settings, qtbot: QtBot) -> None:
    choice = scene.page.folder
    choice.show_rooms((Room(models_dir(), 50 * parts.GB),))
    assert choice.isHidden()
    usb, nas = Path("/media/usb/models"), Path("/mnt/nas/llm")
    choice.show_rooms((Room(models_dir(), 50 * parts.GB), Room(usb, 900 * parts.GB), Room(nas, None, "It is away.")))
    assert choice.isVisible()
    texts = [choice.combo.itemText(at) for at in range(3)]
    assert "50.0 GB" in texts[0]
    assert "900 GB" in texts[1]
    assert "not connected" in texts[2]
    assert not choice.combo.model().flags(choice.combo.model().index(2, 0)) & Qt.ItemFlag.ItemIsEnabled
    choice.combo.setCurrentIndex(1)
    choice.combo.activated.emit(1)
    assert settings.get(FOLDER_KEY, "") == str(usb)
    assert choice.combo.accessibleDescription() == str(usb)
    choice.show_rooms((Room(models_dir(), 50 * parts.GB), Room(usb, 900 * parts.GB)))
    assert choice.combo.currentIndex() == 1
    choice.combo.setCurrentIndex(0)
    choice.combo.activated.emit(0)
    assert settings.get(FOLDER_KEY, "-") == ""


def test_the_fit_card_follows_the_folder_that_is_chosen(scene: Scene) -> None:
    scene.hub.show()
    usb = Room(Path("/media/usb/models"), 900 * parts.GB, is_elsewhere=True)
    choice = scene.page.folder
    choice.show_rooms((Room(models_dir(), 50 * parts.GB), usb))
    scene.hub.calls.judge.reset_mock()
    choice.combo.setCurrentIndex(1)
    choice.combo.activated.emit(1)
    scene.hub.calls.download_to.assert_called_with(usb)
    scene.hub.calls.judge.assert_called_once()


def test_a_disk_for_files_and_one_for_prepared_experts_have_a_bar_each() -> None:
    row = parts.fit_card(parts.shaped(), made.look(made.gpu()), Limits()).rows[0]
    files, prepared = fit_bars(replace(row, disk=DiskBytes(900, 60, 40, 500)))[-2:]
    assert (files.used, files.total, prepared.used, prepared.total) == (60, 900, 40, 500)
    assert fit_bars(replace(row, disk=DiskBytes(900, 60, 40)))[-1].used == 100


def test_a_model_in_two_stores_says_so_and_which_copy_goes(scene: Scene) -> None:
    other = Path("/home/somebody/.lmstudio/models/gpt-oss-20b.gguf")
    twice = replace(parts.MODELS[1], also=(("LM Studio", other),))
    scene.engine.model = replace(STARTER, path=str(other))
    scene.library.show(parts.MODELS[0], twice)
    here = scene.page.here
    assert here.rows.rows[1].is_loaded  # from wherever
    scene.engine.model = None
    scene.library.show(parts.MODELS[0], twice)
    here.choose(str(other))
    assert here.entry == twice
    assert "also in LM Studio" in here.facts.text()
    here.remove_wanted.emit(twice)
    box = scene.page.findChild(QMessageBox)
    assert str(twice.path.parent) in box.informativeText()
    assert str(other.parent) in box.informativeText()
    box.close()


def test_a_pasted_reference_says_which_file_is_taken(scene: Scene, qtbot: QtBot) -> None:
    search = scene.page.search
    search.field.setText(parts.REPOSITORY.id)
    search.button.click()
    scene.hub.show()
    row = search.fit.table.row
    assert search.fit.which.isVisible()
    assert row.candidate.label in search.fit.which.text()
    assert row.candidate.files[0].path.rpartition("/")[2] in search.fit.details.text()
    other = next(each for each in search.fit.rows if each.candidate.label != row.candidate.label)
    search.field.setText(f"{parts.REPOSITORY.id}:{other.candidate.label.lower()}")
    search.button.click()
    scene.hub.show()
    assert search.fit.table.row == other
    assert search.fit.which.isHidden()
    scene.hub.judge_now()
    assert search.fit.table.row == other  # also when the card follows the sliders
    search.field.setText(f"{parts.REPOSITORY.id}:Q9_Z")
    search.button.click()
    scene.hub.show()
    assert "no Q9_Z" in search.fit.which.text()
