"""A streaming Markdown view: `MarkdownView`."""

from app.widgets.markdown_view.view import MarkdownView

__all__ = ["MarkdownView"]
