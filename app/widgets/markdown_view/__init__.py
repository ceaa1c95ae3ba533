"""A streaming Markdown view: `MarkdownView`; `import_parser` spares the first one the wait for its modules.

Its blocks are widgets of our own.  HTML was tried: a text browser for each block, given markdown-it's HTML (code by
Pygments' formatter) again whenever text arrives.  A growing list of 200 items and a table of 80 rows took 0.6 to 0.7 of
the time of these widgets, a paragraph as long, but 300 lines of code four to five times as long.  Copying lost the
numbers and bullets of lists and the columns of tables, and with each token the selection in the block was gone.
"""

from app.widgets.markdown_view.stream_parser import import_parser
from app.widgets.markdown_view.view import MarkdownView

__all__ = ["MarkdownView", "import_parser"]
