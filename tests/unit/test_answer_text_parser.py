"""Parsing Markdown as it arrives gives what parsing the whole gives, and costs what has just arrived."""

import pytest
from hypothesis import given

from app.widgets.answer_text import parser as stream_parser
from app.widgets.answer_text.blocks import (
    CodeBlock,
    Gap,
    Marker,
    MathsBlock,
    RuleBlock,
    Segment,
    TableBlock,
    TextBlock,
    TextSpan,
)
from app.widgets.answer_text.parser import StreamParser
from tests.unit.markdown_texts import chunked_texts


def parse(text: str) -> list[Segment]:
    parser = StreamParser()
    parser.append(text)
    parser.finish()
    return parser.finished


def stream(chunks: list[str]) -> StreamParser:
    parser = StreamParser()
    for chunk in chunks:
        parser.append(chunk)
        while parser.advance():
            pass
        parser.tail()
    return parser


def texts(segments: list[Segment]) -> list[str]:
    return ["".join(span.text for span in segment.spans) for segment in segments if isinstance(segment, TextBlock)]


def test_inline_styles() -> None:
    [block] = parse("a **b *c* ** ~~d~~ `e*` [f](https://g.h)")
    assert TextSpan("e*", code=True) in block.spans
    assert TextSpan("d", strike=True) in block.spans
    assert TextSpan("c", bold=False, italic=True) in block.spans
    assert TextSpan("f", href="https://g.h") in block.spans


def test_headings_rules_and_code() -> None:
    assert parse("## Two\n\n---\n\n```c++ x\nint a;\n\n```") == [
        TextBlock((TextSpan("Two"),), gap=Gap.HEADING, heading=2),
        RuleBlock(),
        CodeBlock("int a;\n", "c++"),
    ]


def test_lists_carry_their_numbers_depth_and_ticks() -> None:
    blocks = parse("3. a\n4. b\n   - [x] c\n   - [ ] d\n")
    assert [(block.containers, block.marker) for block in blocks if isinstance(block, TextBlock)] == [
        ("l", Marker(3)),
        ("l", Marker(4)),
        ("ll", Marker(checked=True)),
        ("ll", Marker(checked=False)),
    ]
    assert texts(blocks) == ["a", "b", "c", "d"]


def test_code_in_a_list_item_stays_in_it() -> None:
    first, code, second = parse("- ```\n  x\n  ```\n- y")
    assert first == TextBlock((), "l", marker=Marker())
    assert code == CodeBlock("x", containers="l")
    assert second.containers == "l"


def test_quotes_nest() -> None:
    assert [segment.containers for segment in parse("> a\n> > b\n> - c\n\nd")] == ["q", "qq", "ql", ""]


def test_tables() -> None:
    [table] = parse("| a | b |\n|:-:|--:|\n| 1 | `x` |\n| 2 |")
    assert table.alignments == ("center", "right")
    assert table.rows[1] == ((TextSpan("1"),), (TextSpan("x", code=True),))
    assert table.rows[2] == ((TextSpan("2"),), ())


@pytest.mark.parametrize(
    "address", ["javascript:alert(1)", "file:///etc/passwd", "data:text/html,x", "/relative", "ftp://a.b", "#anchor"]
)
def test_only_web_and_mail_addresses_are_links(address: str) -> None:
    for text in (f"[label]({address})", f"<{address}>", f"![alt]({address})"):
        assert not any(span.href for block in parse(text) if isinstance(block, TextBlock) for span in block.spans)


def test_images_are_words() -> None:
    assert parse("![a *photo*](https://example.org/p.png)") == [
        TextBlock((TextSpan("[image: a photo]", href="https://example.org/p.png"),))
    ]


def test_html_is_text() -> None:
    text = "<script>alert(1)</script>\n\n<img src=x onerror=y> and <b>bold</b> &lt;"
    assert texts(parse(text)) == ["<script>alert(1)</script>", "<img src=x onerror=y> and <b>bold</b> <"]


@pytest.mark.parametrize(
    ("source", "tex"),
    [
        ("$a*b*c$", "a*b*c"),
        ("\\(x_1 * y_1 * z\\)", "x_1 * y_1 * z"),
        ("\\[ a*b*c \\]", " a*b*c "),
        ("$$\\frac{a}{b}_c_d$$", "\\frac{a}{b}_c_d"),
    ],
)
def test_mathematics_is_left_alone(source: str, tex: str) -> None:
    assert parse(f"Given {source} so") == [
        TextBlock((TextSpan("Given "), TextSpan(source, tex=tex), TextSpan(" so"))),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "from $5 **more** to $6",
        "$ a $ and $a $ and $ a$",
        "US$x and $y",
        "$1,000-$2,000",
        "`$a$` and \\$a\\$",
        "$$ open",
        "\\( open",
    ],
)
def test_dollars_are_not_always_mathematics(text: str) -> None:
    assert not any(span.tex for block in parse(text) if isinstance(block, TextBlock) for span in block.spans)


@pytest.mark.parametrize(
    ("text", "tex"),
    [
        ("$$x$$", "x"),
        ("\\[\nx\n\\]", "x"),
        ("$$\nx\n- y\n= z\n===\n$$", "x\n- y\n= z\n==="),
        ("$$x$$.", "x."),
    ],
)
def test_displayed_mathematics_is_a_block(text: str, tex: str) -> None:
    assert parse(f"So\n{text}\nis") == [
        TextBlock((TextSpan("So"),)),
        MathsBlock(tex, text),
        TextBlock((TextSpan("is"),)),
    ]
    [first, second] = parse("- " + text.replace("\n", "\n  "))
    assert first == TextBlock((), "l", marker=Marker())
    assert second == MathsBlock(tex, text, "l")


def test_mathematics_without_an_end_is_text_up_to_an_empty_line() -> None:
    assert texts(parse("$$\nx\n- y\n\n- z")) == ["$$\nx\n- y", "z"]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("see https://example.org/a_b_c(1).", "https://example.org/a_b_c(1)"),
        ("(HTTP://a.b/x?y=1&z=2)", "HTTP://a.b/x?y=1&z=2"),
        ("**https://a.b/c**", "https://a.b/c"),
        ("- https://a.b, then", "https://a.b"),
        ("<https://a.b>", "https://a.b"),
        ("file://a.b and ftp://a.b and xhttp://a.b and http:// and `http://a.b`", ""),
        ("[https://a.b](https://c.d)", "https://c.d"),
    ],
)
def test_bare_addresses_are_links(text: str, address: str) -> None:
    hrefs = {span.href for block in parse(text) if isinstance(block, TextBlock) for span in block.spans} - {""}
    assert hrefs == ({address} if address else set())


def test_what_cannot_be_shown_is_replaced() -> None:
    assert texts(parse("a\x00b\x1bc\ufdd0d\ud800e\ufffcf\u2028g")) == ["a\ufffdb\ufffdc\ufffdd\ufffde\ufffdf\ng"]


@pytest.mark.parametrize(
    ("prefix", "last"),
    [
        ("text\n\n```py\nx = 1", CodeBlock("x = 1", "py")),
        ("```", CodeBlock("")),
        ("- a\n- ", TextBlock((), "l", Gap.ITEM, marker=Marker())),
        ("| a |\n|---|\n| b", TableBlock(("left",), (((TextSpan("a"),),), ((TextSpan("b"),),)))),
        ("> q", TextBlock((TextSpan("q"),), "q")),
        ("so **bo", TextBlock((TextSpan("so **bo"),))),
    ],
)
def test_open_ends_show_sensibly(prefix: str, last: Segment) -> None:
    parser = stream([prefix])
    assert [*parser.finished, *parser.tail()][-1] == last


@given(chunked_texts())
def test_streaming_equals_the_whole(case: tuple[str, list[str]]) -> None:
    text, chunks = case
    parser = stream(chunks)
    parser.finish()
    assert parser.finished == parse(text)


@given(chunked_texts())
def test_streaming_equals_the_whole_where_blocks_outgrow_the_window(case: tuple[str, list[str]]) -> None:
    text, chunks = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_parser, "WINDOW", 24)
        parser = stream(chunks)
        parser.finish()
        assert parser.finished == parse(text)


@given(chunked_texts())
def test_what_is_finished_stays(case: tuple[str, list[str]]) -> None:
    _, chunks = case
    parser = StreamParser()
    before: list[Segment] = []
    for chunk in chunks:
        parser.append(chunk)
        parser.advance()
        assert parser.finished[: len(before)] == before
        before = list(parser.finished)


def test_a_late_definition_makes_links_of_what_came_before() -> None:
    parser = stream(["See [a].\n\n", "More.\n\n", "[a]: https://example.org\n\n", "End."])
    assert not any(span.href for span in parser.finished[0].spans)  # type: ignore[union-attr]
    parser.finish()
    assert TextSpan("a", href="https://example.org") in parser.finished[0].spans  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 10_000,
        "![" * 10_000,
        "[a](" * 5_000,
        "*" * 10_000,
        "*a " * 10_000,
        "_*" * 10_000,
        "`a``" * 5_000,
        "~~a" * 5_000,
        "<" * 10_000,
        "&" * 10_000,
        "\\" * 10_000,
        "$" * 10_001,
        "$a" * 10_000,
        "\\(" * 10_000,
        ">" * 10_000,
        "> " * 5_000 + "x",
        "- " * 5_000 + "x",
        "1. " * 3_000 + "x",
        "\n".join("  " * depth + "- x" for depth in range(200)),
        "|a" * 5_000 + "\n" + "|-" * 5_000,
        "[a]: /b\n" * 3_000,
        "\n" * 50_000,
        "# \n" * 10_000,
        "word " * 200_000,
        "x" * 1_000_000,
        "```\n" + "y = 1\n" * 30_000,
    ],
    ids=lambda text: repr(text[:8]) if isinstance(text, str) else None,
)
def test_hostile_text_is_read_in_windows(text: str) -> None:
    parser = StreamParser()
    for start in range(0, len(text), 50_000):
        parser.append(text[start : start + 50_000])
        while parser.advance():
            pass
    parser.finish()
    assert parser.parsed_characters <= 8 * len(text) + 8 * stream_parser.WINDOW


def test_deep_nesting_loses_no_text() -> None:
    assert "treasure" in repr(parse("> " * 300 + "treasure"))
    assert "treasure" in repr(parse("- " * 300 + "treasure"))


def test_a_fence_longer_than_the_window_stays_one() -> None:
    lines = [f"line {number}" for number in range(5_000)]
    assert parse("  ```sql\n" + "\n".join(f"  {line}" for line in lines) + "\n  ```\n\nAfter.") == [
        CodeBlock("\n".join(lines), "sql"),
        TextBlock((TextSpan("After."),)),
    ]


def test_a_list_longer_than_the_window_is_cut_between_items() -> None:
    source = "\n".join(f"{number}. item {number}\n   goes on" for number in range(1, 2_000))
    blocks = [segment for segment in parse(source) if isinstance(segment, TextBlock)]
    assert [block.marker for block in blocks] == [Marker(number) for number in range(1, 2_000)]


def test_a_table_longer_than_the_window_keeps_its_header() -> None:
    source = "| name | value |\n|---|---:|\n" + "\n".join(f"| n{number} | {number} |" for number in range(3_000))
    tables = parse(source)
    assert all(isinstance(table, TableBlock) and table.rows[0][0] == (TextSpan("name"),) for table in tables)
    assert sum(len(table.rows) - 1 for table in tables if isinstance(table, TableBlock)) == 3_000
