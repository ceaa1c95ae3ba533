"""How a Markdown view looks, for comparing two."""

from __future__ import annotations

from collections.abc import Callable

from app.widgets.markdown_view import MarkdownView
from app.widgets.markdown_view.column import Pane
from app.widgets.markdown_view.text_pane import TextPane

ViewMaker = Callable[[str], MarkdownView]


def look(view: MarkdownView) -> list[tuple[str, str, str]]:
    """Everything that decides how the panes look."""
    panes: list[Pane] = view.column.panes
    result = []
    for pane in panes:
        browser = pane.browser()
        content = browser.toHtml() if browser is not None else ""
        if isinstance(pane, TextPane):
            content += repr(pane.state())
        result.append((type(pane).__name__, pane.containers, content))
    return result


def heights(view: MarkdownView) -> list[int]:
    return [pane.geometry().top() for pane in view.column.panes] + [view.heightForWidth(view.width())]
