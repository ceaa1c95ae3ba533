"""An answer's text: `AnswerView` shows Markdown in one document, `write_markdown` writes it into any.

Call `import_parser` early to load the parser's modules before the first text.
"""

from app.widgets.answer_text.maths import formula_in
from app.widgets.answer_text.paper import formulas_in, print_document, read_markdown, write_markdown
from app.widgets.answer_text.parser import import_parser, markdown
from app.widgets.answer_text.style import Style
from app.widgets.answer_text.view import AnswerView, Match, open_link
from app.widgets.answer_text.writer import InertDocument

__all__ = [
    "AnswerView",
    "InertDocument",
    "Match",
    "Style",
    "formula_in",
    "formulas_in",
    "import_parser",
    "markdown",
    "open_link",
    "print_document",
    "read_markdown",
    "write_markdown",
]
