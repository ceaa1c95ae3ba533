"""Memory in huge pages."""

from __future__ import annotations

import torch

from engine.experts.record import HugePages, empty_in_huge_pages

SHAPES = ((3, 5), (1,), (0, 4), (2**20,), (7, 64, 1000), (3, 2**20), (33,))


def test_tensors_side_by_side_are_apart() -> None:
    pages = HugePages()
    types = (torch.uint8, torch.bfloat16, torch.float32)
    tensors = [pages.empty(shape, dtype=dtype) for shape in SHAPES for dtype in types]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert tensor.shape == SHAPES[number // len(types)]
        assert tensor.dtype == types[number % len(types)]
        assert tensor.data_ptr() % 64 == 0 or not tensor.numel()
        assert tensor.is_contiguous()
        assert (tensor == number).all()


def test_a_block_lives_as_long_as_its_last_tensor() -> None:
    first, last = (HugePages().empty((1000,), dtype=torch.int32) for _ in range(2))
    last[:] = 7
    del first
    assert last.sum() == 7000


def test_a_tensor_of_a_whole_page_fills_it() -> None:
    tensor = empty_in_huge_pages((2**20,), dtype=torch.bfloat16)
    tensor.fill_(3)
    assert tensor.float().mean() == 3
