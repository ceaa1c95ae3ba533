"""What Python tells of its imports, by package."""

from __future__ import annotations

from engine.bench.startup import seconds_by_package


def test_imports_are_summed_by_package() -> None:
    told = "\n".join(
        [
            "import time: self [us] | cumulative | imported package",
            "import time:      1500 |       1500 |     torch._C",
            "import time:       500 |       2000 | torch",
            "import time:        10 |         10 |   engine.common.paths",
            "a warning | of | something",
        ]
    )
    assert seconds_by_package(told) == {"torch": 0.002, "engine": 0.00001}
