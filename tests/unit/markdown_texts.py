"""Markdown for tests: a text with everything in it, and a strategy for texts that stress the block structure."""

from itertools import pairwise

from hypothesis import strategies as st

EVERYTHING = """\
# A title

A paragraph with **bold**, *italic*, ~~struck~~ and `code`,
and a [link](https://example.org/a?b=c).

1. First:
   ```python
   def f(x):
       return x + 1
   ```
2. Second
   - nested
   - again
     1. deep

- [x] done
- [ ] to do

> A quote
>
> > inside a quote
>
> - with a list

| Left | Right |
|:-----|------:|
| a    | 1     |
| b    | 2     |

---

See [late] and [early][late].

    indented code

[late]: https://example.org/late

The end."""

_LINES = st.sampled_from(
    [
        "",
        "",
        "",
        "text",
        "more *text*",
        "**bold",
        "# heading",
        "===",
        "---",
        "- item",
        "-",
        "  - nested",
        "  continued",
        "1. one",
        "2) two",
        "> quote",
        ">> deeper",
        "> - item in quote",
        "```",
        "```python",
        "~~~",
        "    code",
        "\tcode",
        "| a | b |",
        "|---|---|",
        "[ref]: http://example.org",
        "[other]: /relative",
        "'a title",
        "a title'",
        "use [ref] here",
        "[ref]",
        "- [ ] task",
        "* * *",
        "<b>html</b>",
        "$$x_1 * y$$",
        "\\[ a * b",
        "\\]",
        "$$",
        "$$z$$",
        "so $a_1$ is \\(b\\)",
        "see https://example.org/x.",
        "naïve 日本 🚂 مرحبا",
        "null \x00 and \ufdd0 and \u2029 end",
        "!\x1b[image](http://example.org/i.png)",
    ]
)


@st.composite
def chunked_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text and the same text in pieces."""
    lines = draw(st.lists(_LINES, max_size=14))
    text = draw(st.sampled_from(["\n", "\n", "\r\n"])).join(lines) + draw(st.sampled_from(["", "\n", "\r"]))
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=12))
    edges = [0, *sorted(cuts), len(text)]
    return text, [text[start:end] for start, end in pairwise(edges)]
