"""A page is one file, put together from the scaffold, and its line in `page_entries`."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QSize

from app.main import page_entries
from app.services.services import Services
from app.services.settings import Settings
from app.theme import ThemeController
from app.widgets.page import Page, PageEntry
from app.widgets.scaffold import Card, PageBody, PageHeader, add_items, line_edit, muted_label, push_button, text_label
from tests.app.layout_walker import layout_problems, without_name
from tests.app.stage import staged


class ToyPage(Page):
    def __init__(self, _services: Services) -> None:
        super().__init__()
        header = PageHeader("Toys", self)
        header.add_buttons(*(push_button(self, f"Wind up toy {number}") for number in range(6)))
        card = Card("Rows", self)
        card.explain("What a row of toys is. It squeaks.")
        field = line_edit(self, "Name of the toy", hint="a short one")
        add_items(
            card.body, text_label(self, "Name", buddy=field), field, muted_label(self, "No toy is here yet. " * 20)
        )
        self.lay_out(header, body=PageBody(self, card, widest_px=600))


@pytest.mark.parametrize(("size", "text"), [(QSize(1280, 800), 14), (QSize(720, 450), 20)])
def test_a_page_of_the_scaffold_fits_every_window(
    settings: Settings, theme: ThemeController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: QSize, text: int
) -> None:
    toy = PageEntry("tools", "Toys", ToyPage)
    monkeypatch.setattr("tests.app.stage.page_entries", lambda: (*page_entries(), toy))
    with staged(settings, theme, tmp_path) as stage:
        theme.set_font_px(text)
        stage.show(size)
        stage.window.show_page("tools")
        stage.settle()
        assert stage.window.page("tools").isVisible()
        assert layout_problems(stage.window, size) == []
        assert without_name(stage.window) == []
