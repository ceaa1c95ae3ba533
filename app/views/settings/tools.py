"""Settings: tools that chats may offer to models, and the servers that bring them."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from PySide6.QtCore import QCoreApplication, Qt
from PySide6.QtWidgets import (
    QCheckBox,
    QWidget,
)

from app.engine_words import said
from app.services.tools import Tools
from app.theme import scaled
from app.views.settings.card import SettingsCard
from app.widgets.fields import TextBox
from app.widgets.flow_layout import Flow
from app.widgets.scaffold import (
    TOP,
    FormDialog,
    WrappedLabel,
    hbox,
    line_edit,
    muted_label,
    push_button,
    set_message,
    vbox,
)
from engine.tools.built_in import BUILT_IN
from engine.tools.rounds import Outcome
from engine.tools.servers import ServerError, ToolServer, server_of, servers_of

translate = QCoreApplication.translate

_MOST_NAMES = 12
_KEPT = "••••••••"
"""Stands for a value that is kept."""


class ToolsCard(SettingsCard):
    def __init__(self, tools: Tools, parent: QWidget | None = None) -> None:
        super().__init__(translate("ToolsCard", "Tools"), parent)
        self._tools = tools
        words = {
            "calculator": (self.tr("Calculator"), self.tr("Computes what models get wrong. Runs without asking.")),
            "clock": (self.tr("Clock"), self.tr("Tells the date and the time. Runs without asking.")),
            "read_file": (self.tr("Read a file"), self.tr("Of folders that are attached to the chat.")),
            "run_batch": (self.tr("Run a batch"), self.tr("Starts a job that answers a prompt for each of many rows.")),
            "search_documents": (
                self.tr("Search documents"),
                self.tr("Those that are attached to the chat. Runs without asking."),
            ),
        }
        intro = muted_label(
            self,
            self.tr(
                "Offered to the model in chats where the switch at the message box is on. Before a tool runs you are "
                "asked, unless you allowed it."
            ),
        )
        self.add_wide(intro)
        self.switches: dict[str, QCheckBox] = {}
        for tool in BUILT_IN:
            box = self.switches[tool.name] = QCheckBox(self)
            box.setChecked(tools.is_on(tool.name))
            box.toggled.connect(lambda on, name=tool.name: tools.set_on(name, on))
            self.add_row(*words[tool.name], box)
        self.ask_again = push_button(self, self.tr("Ask again for all"))
        self.ask_again.clicked.connect(tools.ask_again)
        self._allowed = self.add_row(self.tr("Always allowed"), "-", self.ask_again)
        self.add = push_button(self, self.tr("Add…"), lambda: self.edit(None), name=self.tr("Add a server with tools"))
        words_of_servers = self.tr(
            "Programs or addresses that bring tools by the Model Context Protocol, such as a web search. A program "
            "runs on this PC with your rights: add only what you trust."
        )
        self.add_row(self.tr("MCP servers"), words_of_servers, self.add)
        self.rows = QWidget(self)
        self._lines = vbox(into=self.rows, gap=12)
        self.add_wide(self.rows)
        self.dialog: ToolServerDialog | None = None
        tools.changed.connect(self._show)
        self._show()

    def edit(self, server: ToolServer | None) -> None:
        self.dialog = ToolServerDialog(self._tools, server, self.window())
        self.dialog.open()

    def _show(self) -> None:
        allowed = self._tools.always_allowed
        self._allowed.setText(
            ", ".join(key.partition("\n")[0].strip("/").replace("/", ": ") for key in allowed)
            or self.tr("No tool yet.")
        )
        self.ask_again.setEnabled(bool(allowed))
        while (item := self._lines.takeAt(0)) is not None:
            if (row := item.widget()) is not None:
                row.hide()
                row.deleteLater()
        for server in self._tools.servers:
            self._lines.addWidget(self._row(server))
        self.rows.setVisible(bool(self._tools.servers))

    def _row(self, server: ToolServer) -> QWidget:
        row = QWidget(self.rows)
        name = WrappedLabel(server.name, row)
        words = WrappedLabel(server.place, row, role="secondary")
        told = WrappedLabel(self._told(server), row, role="secondary")
        is_on = QCheckBox(row)
        is_on.setChecked(server.is_on)
        is_on.setAccessibleName(self.tr("Offer the tools of {0}").format(server.name))
        is_on.setLayoutDirection(Qt.LayoutDirection.RightToLeft)
        is_on.toggled.connect(lambda on: self._tools.put(replace(server, is_on=on)))
        edit = push_button(
            row, self.tr("Edit…"), lambda: self.edit(server), name=self.tr("Edit {0}").format(server.name)
        )
        remove = push_button(
            row,
            self.tr("Remove"),
            lambda: self._tools.remove(server.name),
            name=self.tr("Remove {0}").format(server.name),
        )
        hbox((vbox(name, words, told, 4, Flow(edit, remove, parent=row), gap=2), 1), (is_on, TOP), into=row)
        return row

    def _told(self, server: ToolServer) -> str:
        if problem := self._tools.problems.get(server.name):
            return said(problem)
        if server.name in self._tools.for_this_run:
            return self.tr("Its variables or headers are known for this run only: this system has no keyring.")
        if server.tools is None:
            return self.tr("Its tools are asked for when a chat needs them.")
        if not server.tools:
            return self.tr("It offers no tools; its prompts and resources are not used here.")
        names = [tool.name for tool in server.tools]
        shown = ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")
        return self.tr("{0} tools: {1}", "", len(names)).format(len(names), shown)


def _parts(command: str) -> list[str]:
    if sys.platform == "win32":  # where a backslash is no quote
        return [part.strip('"') for part in shlex.split(command, posix=False)]
    return shlex.split(command)


class ToolServerDialog(FormDialog):
    """A server's command or address; for new ones also a block of JSON as other programs have it."""

    def __init__(self, tools: Tools, server: ToolServer | None, parent: QWidget) -> None:
        words = translate("ToolServerDialog", "Save"), translate("ToolServerDialog", "Test")
        super().__init__("", words[0], parent, tests=words[1])
        self._tools, self._old = tools, server
        self._tested: tuple[ToolServer, ...] = ()
        self.setWindowTitle(self.tr("Add a server with tools") if server is None else server.name)
        self.name = line_edit(self, self.tr("Name"), hint=self.tr("for example files"))
        self.command = line_edit(self, self.tr("Command"), hint="npx -y some-server")
        self.address = line_edit(self, self.tr("or address"), hint="https://example.org/mcp")
        self.variables = self._box(self.tr("Variables or headers"), self.tr("NAME=value, one on each line"))
        self.variables.setToolTip(
            self.tr(
                "Values are kept in the system's keyring, or for this run only where there is none. ${NAME} in a value "
                "is read from the environment."
            )
        )
        self.pasted = self._box(
            self.tr("or JSON"), '{"mcpServers": {"files": {"command": "npx", "args": ["-y", "…"]}}}'
        )
        for field in (self.name, self.command, self.address, self.variables, self.pasted):
            if field is self.pasted and server is not None:
                field.hide()
            else:
                self.add_field(field.accessibleName(), field)
        self.test.clicked.connect(self._test)
        self.finished.connect(self._end_tests)
        set_message(self.trouble, "")
        self.said.hide()
        if server is not None:
            self.name.setText(server.name)
            self.command.setText(server.place if server.command else "")
            self.address.setText(server.url)
            self.variables.setPlainText(
                "\n".join(f"{key}={_KEPT if value is None else value}" for key, value in server.pairs)
            )

    def _box(self, name: str, example: str) -> TextBox:
        box = TextBox(self)
        box.setPlaceholderText(example)
        box.setAccessibleName(name)
        box.setTabChangesFocus(True)
        box.setFixedHeight(scaled(72))
        return box

    def entered(self) -> tuple[ToolServer, ...]:
        pasted = self.pasted.toPlainText().strip()
        if pasted and self._old is None:
            return servers_of(pasted)
        try:
            command, *args = _parts(self.command.text()) or [""]
        except ValueError:
            raise ServerError(self.tr("The command has a quote that does not end: correct it.")) from None
        lines = [line for line in self.variables.toPlainText().splitlines() if line.strip()]
        if any("=" not in line for line in lines):
            raise ServerError(self.tr("Each variable or header is NAME=value, on a line of its own."))
        pairs = {key.strip(): value.strip() for key, value in (line.split("=", 1) for line in lines)}
        address = self.address.text().strip()
        raw = {"command": command, "args": args, "url": address, "headers" if address else "env": pairs}
        if self._old is None:
            return (server_of(self.name.text(), raw),)
        known = {key for key, value in self._old.pairs if value is None}
        kept: dict[str, Any] = {**raw, "on": self._old.is_on, "vault": self._old.vault}
        unchanged = {key: None for key, value in pairs.items() if value == _KEPT and key in known}
        kept["headers" if address else "env"] = pairs | unchanged
        server = server_of(self.name.text(), kept, is_kept=True)
        if unchanged and server.place != self._old.place:
            raise ServerError(
                self.tr("Enter the variables or headers again: they are kept for the old command or address alone.")
            )
        return (server,)

    def _entered(self) -> tuple[ToolServer, ...]:
        try:
            found = self.entered()
            taken = {each.name for each in self._tools.servers if self._old is None or each.name != self._old.name}
            for server in found:
                if server.name in taken:
                    raise ServerError(self.tr("There is a server named {0}: choose another name.").format(server.name))
        except ServerError as error:
            self.said.hide()
            set_message(self.trouble, said(str(error)))
            self.fit()
            return ()
        set_message(self.trouble, "")
        return found

    def kept(self) -> None:
        if found := self._entered():
            for server in found:
                self._tools.put(server, instead_of=self._old.name if self._old is not None else "")
            self.accept()

    def _test(self) -> None:
        found = self._entered()
        if not found:
            return
        self.test.setEnabled(False)
        self._tell(self.tr("Starting…"))
        self._told: list[tuple[bool, str]] = []
        self._tested += found
        self._left = len(found)
        for server in found:
            self._tools.look(server, partial(self._on_tested, server))

    def _end_tests(self) -> None:
        """What was only tried does not go on."""
        for server in self._tested:
            if not any(each.name == server.name and each.is_same_place(server) for each in self._tools.servers):
                self._tools.stop(server.name)

    def _on_tested(self, server: ToolServer, outcome: Outcome) -> None:
        words = said(outcome.text) if outcome.failed else f"{server.name}: {outcome.text}"
        self._told.append((outcome.failed, words))
        self._left -= 1
        if not self._left:
            self.test.setEnabled(True)
            self._tell("\n".join(words for failed, words in self._told if not failed))
            set_message(self.trouble, "\n".join(words for failed, words in self._told if failed))

    def _tell(self, words: str) -> None:
        set_message(self.said, words)
        self.fit()
