"""A streaming Markdown view: `MarkdownView`; call `import_parser` early to load its modules before the first text.

Its blocks are custom widgets.  HTML was tried: a text browser per block that is given markdown-it's HTML (code from
Pygments' formatter) again whenever text arrives.  It took 0.6 to 0.7 of the time of these widgets for a growing list
of 200 items and a table of 80 rows, the same for a paragraph, but four to five times as long for 300 lines of code.
Copying lost list markers and table columns, and each token cleared the selection in its block.
"""

from app.widgets.markdown_view.stream_parser import import_parser
from app.widgets.markdown_view.view import MarkdownView

__all__ = ["MarkdownView", "import_parser"]
