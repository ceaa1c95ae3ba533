"""The estimate of a step on a card: what it may never say, whatever the numbers in it are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.formats import FORMATS
from engine.kernels.cuda.__main__ import CARDS, CHAIN_S, LAUNCH_S, QWEN3_30B_A3B, Card, estimate, main, product_seconds
from engine.kernels.cuda.compiled import CompileError
from engine.planner.costs import GRAPH_OPERATOR_S


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "lut4"])
def test_nothing_is_faster_than_the_cards_memory(card: Card, name: str) -> None:
    found = estimate(card, QWEN3_30B_A3B, FORMATS[name], 4096)
    assert found.bound_s < found.seconds < 20 * found.bound_s
    assert found.launches == QWEN3_30B_A3B.layers * (4 + QWEN3_30B_A3B.others) + QWEN3_30B_A3B.of_token + 1


def test_more_costs_more() -> None:
    card, int4 = CARDS[2], FORMATS["int4"]
    base = estimate(card, QWEN3_30B_A3B, int4).seconds
    assert estimate(card, QWEN3_30B_A3B, int4, 4096).seconds > base
    assert estimate(card, QWEN3_30B_A3B, FORMATS["int8"]).seconds > base
    assert estimate(card, replace(QWEN3_30B_A3B, others=6), int4).seconds < base
    assert estimate(replace(card, gbps=500), QWEN3_30B_A3B, int4).seconds > base


def test_the_planner_has_the_same_launch_in_a_graph() -> None:
    assert pytest.approx(LAUNCH_S + CHAIN_S) == GRAPH_OPERATOR_S


def test_columns_in_parts_help_a_short_matrix_on_a_large_card() -> None:
    # 16 blocks of rows would leave most of 128 multiprocessors idle.
    seconds = product_seconds(CARDS[2], FORMATS["int4"], 512, 2048)
    assert seconds < 1.3 * product_seconds(replace(CARDS[2], multiprocessors=16), FORMATS["int4"], 512, 2048)


def test_the_tables_are_printed_without_a_card_or_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--estimates"]) == 0
    assert "| RTX 4090 | int4 |" in capsys.readouterr().out

    def there_is_none() -> None:
        raise CompileError("there is no compiler")

    monkeypatch.setattr("engine.kernels.cuda.__main__.find_nvrtc", there_is_none)
    assert main([]) == 1
    assert capsys.readouterr().err == "there is no compiler.\n"
