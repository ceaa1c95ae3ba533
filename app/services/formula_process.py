"""The child process that draws formulas: `python -m app.services.formula_process`, a line of JSON in, a line out.

    {"tex": T, "display": B}     {"svg": S} or {"problem": why}

Formulas come from a model: some take for ever, and one that does ends this process.  Nothing of Qt is imported here.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

CPU_SECONDS = 0.2
"""That a formula may take.  Of the processor, so that a busy machine draws as many of them as an idle one."""
MOST_BYTES = 1 << 30
SIZE = 16.0
COLOUR = "#010203"
"""What the text's colour is to be put in for."""
_UNKNOWN = re.compile(r">\\[A-Za-z]+")
"""In MathML: what latex2mathml does not know it writes as if it were the name of a variable."""
_ENVIRONMENT = re.compile(r"\\begin\s*\{([^}]*)\}")
_ENVIRONMENTS = frozenset(
    {
        *("matrix", "pmatrix", "bmatrix", "Bmatrix", "vmatrix", "Vmatrix", "smallmatrix", "array", "cases"),
        *("aligned", "align", "align*", "gather", "gather*", "split", "equation", "equation*"),
    }
)
_NUMBERED = re.compile(r"\\(begin|end)\s*\{(?:align|gather\*?)\}")
_UNDONE = re.compile(r"\\(?:begin|end)\s*\{equation\*?\}")
_OWN_COLOURS = re.compile(r'(?<=")black(?=")')
"""ziamath draws bars in black, whatever the colour of the text."""
_FILLED = re.compile(r"<(path|rect) (?![^>]*stroke=)")
_LOOK_S = 0.02


class _Watch:
    def __init__(self) -> None:
        self._until: float | None = None
        threading.Thread(target=self._look, daemon=True).start()

    def begin(self) -> None:
        self._until = time.process_time() + CPU_SECONDS

    def end(self) -> None:
        self._until = None

    def _look(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            until = self._until
            if until is not None and time.process_time() > until:
                os._exit(3)


def _svg(tex: str, *, display: bool) -> str:
    import ziamath

    # 1.1, which Qt reads: 2 draws glyphs by reference.
    ziamath.config.svg2 = False
    mathml = ziamath.tex.tex2mml(tex, inline=not display)
    if unknown := _UNKNOWN.search(mathml):
        raise ValueError(f"{unknown.group()[1:]} is not known")
    mathml = mathml.replace("<math ", f'<math mathcolor="{COLOUR}" ', 1)
    return str(ziamath.Math(mathml, size=SIZE).svg())


def draw(tex: str, *, display: bool) -> str:
    """The formula as SVG: black as `COLOUR`, an em of `SIZE`, with the baseline at y = 0.

    Raises:
        ValueError: it has a command that is not known, or cannot be drawn.
    """
    for name in _ENVIRONMENT.findall(tex):
        if name not in _ENVIRONMENTS:
            raise ValueError(f"{name} is not known")
    # Their numbers would go on from formula to formula.
    tex = _NUMBERED.sub(r"\\\1{align*}", _UNDONE.sub("", tex))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            svg = _svg(tex, display=display)
    except ValueError:
        raise
    except Exception as error:  # of third-party code, about anything
        raise ValueError(type(error).__name__) from None
    # Qt strokes what is only filled in a PDF, a pixel wide, unless it has a stroke of its own, and even with "none".
    return _OWN_COLOURS.sub(COLOUR, _FILLED.sub(rf'<\1 stroke="{COLOUR}" stroke-width="0.01" ', svg))


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # Windows; its length is limited anyway
        return
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))


def _serve(read: Callable[[], bytes], write: Callable[[bytes], Any]) -> None:
    watch = _Watch()
    while line := read():
        request = json.loads(line)
        watch.begin()
        try:
            answer = {"svg": draw(request["tex"], display=request["display"])}
        except ValueError as problem:
            answer = {"problem": str(problem)}
        watch.end()
        write(json.dumps(answer).encode("ascii") + b"\n")


def main() -> None:
    _limit_memory()
    import ziamath  # noqa: F401  # before the first formula, whose time it is not

    def write(line: bytes) -> None:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()

    _serve(sys.stdin.buffer.readline, write)


if __name__ == "__main__":
    main()
