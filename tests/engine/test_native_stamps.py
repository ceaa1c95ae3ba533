"""The ring that native steps are stamped into: nothing is lost, mixed up or invented, whoever reads it and when."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.kernels.native.build import library_path
from engine.kernels.native.experts import MAX_TOKENS
from engine.kernels.native.library import NativeStamps
from engine.runtime.fast_path.decoder_layer import SingleTokenLayer
from engine.runtime.fast_path.sparse_block import SparseBlock
from engine.telemetry.layer_log import Stamped
from tests.engine.loaded_tiny import open_model
from tests.engine.tiny_families import tiny_checkpoint

pytestmark = pytest.mark.skipif(not library_path().exists(), reason="the native kernels are not built here")


class _Steps:
    """Steps of random tokens through the layers of a model, in turn, and what the stamps of the first `n` must be."""

    def __init__(self, blocks: list[SparseBlock], stamps: NativeStamps, most_tokens: int) -> None:
        torch.manual_seed(7)
        self.stamps = stamps
        self._blocks = blocks
        width = blocks[0].struct.experts.hidden
        counts = [int(torch.randint(1, most_tokens + 1, ())) for _ in range(16)]
        self._inputs = [torch.randn(1, tokens, width) for tokens in counts]
        self._expected: list[tuple[int, list[int]]] = []
        for step in range(16 * len(blocks)):
            block, tokens = blocks[step % len(blocks)], self._inputs[step % 16]
            block.step(tokens)
            chosen = block._chosen[: tokens.shape[1]].flatten().tolist()
            self._expected.append((block.address, list(dict.fromkeys(chosen))))
        self._run = 0

    def run(self, count: int) -> None:
        for step in range(self._run, self._run + count):
            self._blocks[step % len(self._blocks)].step(self._inputs[step % 16])
        self._run += count

    def agree(self, stamps: Stamped, chosen: NDArray[np.int32], begin: int = 0) -> bool:
        """Whether these are the stamps of the steps from `begin` on."""
        wanted = [self._expected[(begin + step) % len(self._expected)] for step in range(len(stamps))]
        begun, ended = stamps["begun_ns"], stamps["ended_ns"]
        return (
            [address for address, _ in wanted] == stamps["which"].tolist()
            and [len(ids) for _, ids in wanted] == stamps["count"].tolist()
            and [expert for _, ids in wanted for expert in ids] == chosen.tolist()
            and bool((begun <= ended).all() and (ended[:-1] <= begun[1:]).all())
        )


@pytest.fixture
def steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Steps]:
    path = tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("stamps") / "model")
    loaded = open_model(path)
    layers = [m.forward for m in loaded.model.modules() if isinstance(m.__dict__.get("forward"), SingleTokenLayer)]
    blocks = [layer.sparse for layer in layers]
    stamps = blocks[0]._kernels.stamps
    made = _Steps(blocks, stamps, request.param)
    _empty(stamps)
    stamps.switch(True)
    try:
        yield made
    finally:
        stamps.switch(False)
        _empty(stamps)
        loaded.close()


def _empty(stamps: NativeStamps) -> None:
    while len(stamps.take(2**14)[0]):
        pass


@pytest.mark.parametrize("steps", [MAX_TOKENS], indirect=True)
def test_a_reader_beside_running_steps_takes_each_stamp_once_and_whole(steps: _Steps) -> None:
    stamps, ending = steps.stamps, threading.Event()
    taken: list[tuple[Stamped, NDArray[np.int32]]] = []

    def read() -> None:
        last = False
        while not last or len(taken[-1][0]):
            last = ending.is_set()
            taken.append(stamps.take(1 + len(taken) % 50))
            if not len(taken[-1][0]):
                ending.wait(0.0005)  # who spins here holds the steps up

    reader = threading.Thread(target=read)
    reader.start()
    steps.run(5000)
    ending.set()
    reader.join()
    every = np.concatenate([some for some, _ in taken])
    assert len(every) == 5000
    assert steps.agree(every, np.concatenate([ids for _, ids in taken]))
