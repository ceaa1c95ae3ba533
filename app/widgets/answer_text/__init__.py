"""An answer's text: `AnswerView` shows Markdown in one document, `write_markdown` writes it into any.

Call `import_parser` early to load the parser's modules before the first text.
"""

from app.widgets.answer_text.paper import print_document, write_markdown
from app.widgets.answer_text.parser import import_parser
from app.widgets.answer_text.style import Style
from app.widgets.answer_text.view import AnswerView, Match

__all__ = ["AnswerView", "Match", "Style", "import_parser", "print_document", "write_markdown"]
