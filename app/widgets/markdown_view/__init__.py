"""A streaming Markdown view: `MarkdownView`; `import_parser` spares the first one the wait for its modules."""

from app.widgets.markdown_view.stream_parser import import_parser
from app.widgets.markdown_view.view import MarkdownView

__all__ = ["MarkdownView", "import_parser"]
