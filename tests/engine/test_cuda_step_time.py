"""The estimate of a step on a card: what it may never say, whatever the numbers in it are."""

import pytest

from benchmarks.card_kernels import CARDS, QWEN3_30B_A3B, Card, estimate, main
from engine.formats import FORMATS
from engine.kernels.cuda.compiled import CompileError


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "lut4"])
def test_nothing_is_faster_than_the_cards_memory(card: Card, name: str) -> None:
    found = estimate(card, QWEN3_30B_A3B, FORMATS[name], 4096)
    assert found.bound_s < found.seconds < 20 * found.bound_s
    assert found.launches == QWEN3_30B_A3B.layers * (4 + QWEN3_30B_A3B.others) + QWEN3_30B_A3B.of_token + 1


def test_the_tables_are_printed_without_a_card_or_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--estimates"]) == 0
    assert "| RTX 4090 | int4 |" in capsys.readouterr().out

    def there_is_none() -> None:
        raise CompileError("there is no compiler")

    monkeypatch.setattr("benchmarks.card_kernels.find_nvrtc", there_is_none)
    assert main([]) == 1
    assert capsys.readouterr().err == "there is no compiler.\n"
