"""Where models are looked for: the hub's address, its access tokens, and the catalogue of recommendations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import QCoreApplication, Signal
from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QLineEdit, QPushButton, QWidget

from app.services.background import LatestTask, TaskQueue, sentence_of
from app.views.settings.card import SettingsCard
from app.widgets.asking import ask_path
from app.widgets.scaffold import hbox, push_button, set_message, text_label, vbox, warning_label
from engine.checkpoint.mirror import chosen, mirror_of_environment, use

if TYPE_CHECKING:
    from engine.checkpoint.catalogue import Catalogue

translate = QCoreApplication.translate


WIDTH_PX = 240


class AddressField(QLineEdit):
    """Its contents are what was kept, also after a change; one that cannot be used is left to be mended.

    Args:
        name: of the address, see `engine.checkpoint.mirror.use`.
    """

    def __init__(
        self, name: str, doing: TaskQueue, tell: Callable[[Exception | None], object], parent: QWidget
    ) -> None:
        super().__init__(chosen(name), parent)
        self._name, self._doing, self._tell = name, doing, tell
        self.setFixedWidth(WIDTH_PX)
        self.editingFinished.connect(self._leave)

    def _leave(self) -> None:
        address = self.text()
        self._tell(None)
        if address != chosen(self._name):  # else the field was only left
            self._doing.add(lambda: use(self._name, address), self._on_kept, self._tell)

    def _on_kept(self, address: str) -> None:
        if not self.hasFocus():
            self.setText(address)


class HubCard(SettingsCard):
    """Signals: `changed`, when the catalogue is another; `token_forgotten`, when what runs may still use it."""

    changed = Signal()
    token_forgotten = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(translate("HubCard", "Finding models"), parent)
        self._reading, self._doing = LatestTask(self), TaskQueue(self)
        self.load = push_button(self, self.tr("Load from file…"), self._choose)
        self.catalogue = self.add_row(self.tr("Catalogue of recommendations"), " ", self.load)
        self.address = AddressField("mirror", self._doing, self._tell, self)
        self.address.setPlaceholderText("https://huggingface.co")
        words = self.tr("Asked instead of Hugging Face, also on the command line.")
        if theirs := mirror_of_environment():
            self.address.setEnabled(False)
            words = self.tr("HF_ENDPOINT in the environment names {0}, which is used.").format(theirs)
        self.add_row(self.tr("Mirror of the hub"), words, self.address)
        self.packages = AddressField("packages", self._doing, self._tell, self)
        self.packages.setPlaceholderText(self.tr("PyPI and PyTorch"))
        words = self.tr("Where the engine of an installed Switchyard is fetched from instead.")
        self.add_row(self.tr("Mirror of packages"), words, self.packages)
        self.proxy = AddressField("proxy", self._doing, self._tell, self)
        self.proxy.setPlaceholderText(self.tr("the system's"))
        words = self.tr("For everything from the network; where it wants a login, as http://NAME:PASSWORD@HOST:PORT.")
        self.add_row(self.tr("Proxy"), words, self.proxy)
        self._no_token = self.tr("None is kept. One is asked for when a model needs it.")
        self._tokens_kept = self.tr("In the system's keyring, or for this run only where there is none.")
        self.tokens_words = self.add_row(self.tr("Access tokens"), self._no_token)
        self.tokens = TokenRows(self)
        self.tokens.forget_wanted.connect(self.forget_token)
        self.add_wide(self.tokens)
        self.trouble = warning_label(self)
        self.add_wide(self.trouble)
        set_message(self.trouble, "")

    def use_catalogue(self, path: Path) -> None:
        set_message(self.trouble, "")
        self.load.setEnabled(False)
        self._reading.ask(lambda: _keep(path), self._on_kept, self._on_failed)

    def forget_token(self, host: str) -> None:
        set_message(self.trouble, "")
        self._doing.add(lambda: _forget(host), lambda left: self._on_forgotten(host, left), self._on_failed)

    def close_down(self) -> None:
        self._reading.close()
        self._doing.close()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._look_for_tokens()
        if not self._reading.is_busy:
            self._reading.ask(_read, self._show_catalogue, self._on_failed)

    def _choose(self) -> None:
        ask_path(self, self.tr("A newer catalogue"), self.use_catalogue, kinds=self.tr("Catalogues (*.json)"))

    def _show_catalogue(self, catalogue: Catalogue) -> None:
        words = self.tr("{0} models, as of {1}.").format(len(catalogue.entries), catalogue.date)
        self.catalogue.setText(words)
        self.load.setAccessibleDescription(words)

    def _on_kept(self, catalogue: Catalogue) -> None:
        self.load.setEnabled(True)
        self._show_catalogue(catalogue)
        self.changed.emit()

    def _on_failed(self, error: Exception) -> None:
        self.load.setEnabled(True)
        set_message(self.trouble, sentence_of(error))

    def _tell(self, error: Exception | None) -> None:
        if error is None:
            set_message(self.trouble, "")
        else:
            self._on_failed(error)

    def _look_for_tokens(self) -> None:
        self._doing.add(_hosts, self._show_tokens, self._on_failed)

    def _show_tokens(self, hosts: tuple[str, ...]) -> None:
        self.tokens.show_hosts(hosts)
        self.tokens_words.setText(self._tokens_kept if hosts else self._no_token)

    def _on_forgotten(self, host: str, is_another_left: bool) -> None:
        self._look_for_tokens()
        self.token_forgotten.emit()
        if is_another_left:
            words = self.tr("The token of another program is still used for {0}: see “hf auth logout”, or HF_TOKEN.")
            set_message(self.trouble, words.format(host))


class TokenRows(QWidget):
    """A row for each hub with a token.

    Signals: `forget_wanted(str)`, of a host.
    """

    forget_wanted = Signal(str)

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent)
        self._hosts: tuple[str, ...] = ()
        self._rows: list[QWidget] = []
        self._column = vbox(into=self)
        self.hide()

    @property
    def buttons(self) -> list[QPushButton]:
        return [button for row in self._rows for button in row.findChildren(QPushButton)]

    def show_hosts(self, hosts: Sequence[str]) -> None:
        if tuple(hosts) != self._hosts:
            self._hosts = tuple(hosts)
            for row in self._rows:
                row.deleteLater()
            self._rows = [self._row(host) for host in hosts]
        self.setVisible(bool(hosts))

    def _row(self, host: str) -> QWidget:
        row = QWidget(self)
        name = text_label(row, host)
        remove = push_button(
            row,
            self.tr("Remove token"),
            lambda: self.forget_wanted.emit(host),
            name=self.tr("Remove the token for {0}").format(host),
        )
        hbox((name, 1), remove, into=row, gap=-1)
        self._column.addWidget(row)
        return row


def _hosts() -> tuple[str, ...]:
    from engine.checkpoint.hub.http import hosts_with_tokens

    return hosts_with_tokens()


def _forget(host: str) -> bool:
    """Whether there still is one, of another program."""
    from engine.checkpoint.hub.http import forget_token, read_token

    forget_token(host)
    return bool(read_token(host))


def _read() -> Catalogue:
    from engine.checkpoint.catalogue import read_catalogue  # imported late: it is slow to load

    return read_catalogue()


def _keep(path: Path) -> Catalogue:
    from engine.checkpoint.catalogue import use_catalogue

    return use_catalogue(path)
