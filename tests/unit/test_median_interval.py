"""How sure a median of pairs is."""

import random

from engine.bench.report import median_interval


def test_it_holds_the_true_median_about_as_often_as_it_says() -> None:
    dice = random.Random(1)
    held = 0
    for _ in range(2000):
        sure = median_interval(sorted(dice.lognormvariate(0, 1) for _ in range(41)))
        assert sure is not None
        held += sure[0] <= 1 <= sure[1]
    assert 0.93 < held / 2000 < 0.985
