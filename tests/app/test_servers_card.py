"""The card of servers elsewhere in Settings: one is tested before it is kept, and its key goes nowhere else."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtWidgets import QMessageBox, QPushButton, QScrollArea, QVBoxLayout, QWidget
from pytestqt.qtbot import QtBot

from app.services.endpoints import Endpoints
from app.services.settings import Settings
from app.views.settings.server_dialog import ServerDialog, ServersCard
from engine.remote import endpoint as keys
from engine.remote.endpoint import endpoint_at, endpoints_file, save_endpoint, saved_endpoints
from engine.remote.nearby import Nearby
from engine.remote.trust import fingerprint
from tests.bad_endpoint import MODEL, BadEndpoint, write_certificate

SECRET = "sk-very-secret-1234567890"


@pytest.fixture
def server() -> Iterator[BadEndpoint]:
    with BadEndpoint() as found:
        yield found


@pytest.fixture
def card(settings: Settings, qtbot: QtBot, monkeypatch: pytest.MonkeyPatch) -> ServersCard:
    monkeypatch.setattr(keys, "_this_run", {})
    monkeypatch.setattr(keys, "_of_keyring", {})
    endpoints = Endpoints(settings)
    made = ServersCard(endpoints)
    qtbot.addWidget(made, before_close_func=lambda _card: endpoints.close())
    made.show()
    return made


def opened(card: ServersCard, endpoint: object = None) -> ServerDialog:
    card.edit(endpoint)  # type: ignore[arg-type]
    assert card.dialog is not None
    return card.dialog


def rows(card: ServersCard) -> list[str]:
    return [button.accessibleName() for button in card.rows.findChildren(QPushButton) if button.isVisible()]


def test_added_tested_kept_changed_and_removed(card: ServersCard, server: BadEndpoint, qtbot: QtBot) -> None:
    dialog = opened(card)
    assert not dialog.save.isEnabled()
    assert not dialog.test.isEnabled()
    dialog.address.setText(f"127.0.0.1:{server.port}")
    dialog.name.setText("Rack")
    dialog.key.setText(SECRET)
    dialog.price_in.setValue(0.5)
    dialog.test.setFocus()
    dialog.test.click()
    qtbot.waitUntil(dialog.save.isEnabled)
    assert dialog.focusWidget() is dialog.save
    assert MODEL in dialog.said.text()
    assert "top-k" in dialog.said.text()
    assert {each.key for each in server.posted} == {SECRET}
    with qtbot.waitSignal(dialog.accepted):
        dialog.save.click()
    (kept,) = saved_endpoints()
    assert (kept.name, kept.url, kept.price_in, kept.found.models) == ("Rack", server.url, 0.5, (MODEL,))
    assert keys.read_key(kept) == SECRET
    assert SECRET not in endpoints_file().read_text()
    qtbot.waitUntil(lambda: rows(card) == ["Edit Rack", "Remove Rack"])
    server.asked.clear()
    again = opened(card, kept)
    again.name.setText("Cellar")
    again.test.click()
    qtbot.waitUntil(again.save.isEnabled)
    assert {each.key for each in server.posted} == {SECRET}
    with qtbot.waitSignal(again.accepted):
        again.save.click()
    qtbot.waitUntil(lambda: rows(card) == ["Edit Cellar", "Remove Cellar"])
    next(each for each in card.rows.findChildren(QPushButton) if each.accessibleName() == "Remove Cellar").click()
    box = card.window().findChild(QMessageBox)
    assert box is not None
    next(each for each in box.findChildren(QPushButton) if each.text() == "Remove").click()
    qtbot.waitUntil(lambda: saved_endpoints() == ())
    qtbot.waitUntil(lambda: rows(card) == [])


def test_a_new_one_is_shown_where_the_page_was_scrolled_elsewhere(
    card: ServersCard, server: BadEndpoint, qtbot: QtBot
) -> None:
    area = QScrollArea()
    qtbot.addWidget(area)
    page = QWidget()
    column = QVBoxLayout(page)
    column.addSpacing(2000)
    column.addWidget(card)
    column.addSpacing(2000)
    area.setWidget(page)
    area.resize(800, 500)
    area.show()
    dialog = opened(card)
    dialog.address.setText(f"127.0.0.1:{server.port}")
    dialog.test.click()
    qtbot.waitUntil(dialog.save.isEnabled)
    dialog.save.click()
    qtbot.waitUntil(lambda: bool(rows(card)) and card.rows.visibleRegion().boundingRect() == card.rows.rect())
    column.removeWidget(card)
    card.setParent(None)


def test_what_changes_after_a_test_is_tested_again(card: ServersCard, server: BadEndpoint, qtbot: QtBot) -> None:
    dialog = opened(card)
    dialog.address.setText(server.url)
    dialog.test.click()
    qtbot.waitUntil(dialog.save.isEnabled)
    dialog.address.setText("http://127.0.0.1:1")
    assert not dialog.save.isEnabled()
    dialog.test.click()
    qtbot.waitUntil(lambda: not dialog.trouble.isHidden())
    assert not dialog.save.isEnabled()
    dialog.reject()
    assert saved_endpoints() == ()


@pytest.mark.parametrize(
    ("address", "key", "said"),
    [
        ("ftp://x", "", "http"),
        ("http://10.0.0.5:8000", SECRET, "readable"),
        ("http://127.0.0.1:1", "two words", "not a key"),
    ],
)
def test_bad_input_is_a_sentence(card: ServersCard, qtbot: QtBot, address: str, key: str, said: str) -> None:
    dialog = opened(card)
    dialog.address.setText(address)
    dialog.key.setText(key)
    dialog.test.click()
    qtbot.waitUntil(lambda: not dialog.trouble.isHidden())
    assert said in dialog.trouble.text()
    assert SECRET not in dialog.trouble.text()
    dialog.reject()


def test_a_server_without_its_key_says_so(card: ServersCard, server: BadEndpoint, qtbot: QtBot) -> None:
    server.answer = lambda asked: asked.error(401, "no")
    dialog = opened(card)
    dialog.address.setText(server.url)
    dialog.test.click()
    qtbot.waitUntil(lambda: "wants a key" in dialog.trouble.text())
    dialog.reject()


def test_a_list_that_cannot_be_read_is_said(settings: Settings, qtbot: QtBot) -> None:
    endpoints_file().parent.mkdir(parents=True, exist_ok=True)
    endpoints_file().write_text("{")
    endpoints = Endpoints(settings)
    made = ServersCard(endpoints)
    qtbot.addWidget(made, before_close_func=lambda _card: endpoints.close())
    made.show()
    assert str(endpoints_file()) in made.trouble.text()
    endpoints_file().unlink()
    save_endpoint(endpoint_at("http://127.0.0.1:1", "new"))
    made.hide()
    made.show()
    assert made.trouble.isHidden()
    assert rows(made) == ["Edit new", "Remove new"]


def test_who_answers_on_the_network_can_be_added(card: ServersCard, qtbot: QtBot) -> None:
    card.show_near(())
    assert "No Switchyard answered" in card._seen.text()
    card.show_near((Nearby("Cellar", "https://10.0.0.5:8490/v1"),))
    assert rows(card) == ["Add Cellar"]
    card.rows.findChildren(QPushButton)[-1].click()
    assert card.dialog.address.text() == "https://10.0.0.5:8490/v1"
    assert card.dialog.name.text() == "Cellar"
    card.dialog.reject()


def test_a_certificate_is_trusted_once_it_was_compared(card: ServersCard, qtbot: QtBot, tmp_path: Path) -> None:
    both, _alone = write_certificate(tmp_path)
    with BadEndpoint(certificate=both) as server:
        dialog = opened(card)
        dialog.address.setText(server.url)
        dialog.test.click()
        qtbot.waitUntil(dialog.trust.isVisible)
        dialog.trust.click()
        qtbot.waitUntil(lambda: dialog.question is not None)
        assert fingerprint(both.read_bytes()) in dialog.question.informativeText()
        next(each for each in dialog.question.findChildren(QPushButton) if each.text() == "Trust it").click()
        qtbot.waitUntil(dialog.save.isEnabled)
        with qtbot.waitSignal(dialog.accepted):
            dialog.save.click()
    assert saved_endpoints()[0].ca_file
