"""`bench kernels` on shapes that take no time: every precision and instruction set beside the limit of its moment."""

from __future__ import annotations

import pytest
import torch

from engine.bench import kernels
from tests.engine.native_isas import isas


def test_every_row_has_a_limit_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    found = isas()
    monkeypatch.setattr(kernels, "_COLD_BYTES", 2**20)
    monkeypatch.setattr(kernels, "_CALL_SECONDS", 1e-3)
    before = torch.get_num_threads()
    try:
        report = kernels.bench_kernels(1, 2, shapes=(kernels.KernelShape("small", 256, 256, 2),))
    finally:
        torch.set_num_threads(before)
    names = {row.name for row in report.rows}
    assert names == {f"small top-2 {each.name} {isa.name}" for each in kernels.WEIGHTS for isa in found}
    assert report.machine["read_bandwidth_gb_per_s"] > 0
    for row in report.rows:
        assert row.value > 0
        assert row.limit is not None
        assert row.limit > 0
        assert (row.peer == "torch") == ("bf16" in row.name)
        assert (row.ratio is not None) == ("bf16" in row.name or "lut4" in row.name)
