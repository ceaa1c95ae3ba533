"""Chats and batches of tiny models, recorded, with every copy that the devices themselves tell of."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from engine.devices.device import CopyRecord
from engine.jobs.rows import BatchOutcome
from engine.runtime.batch.policy import BatchPolicy
from engine.runtime.schedule.executor import BatchExecutor
from engine.runtime.telemetry.model_telemetry import ModelTelemetry
from engine.telemetry.lanes import DECODE
from engine.telemetry.recorder import RECORDER
from engine.telemetry.records import Records
from engine.telemetry.trace_export import Collection, collected
from tests.engine.on_devices import NEW_TOKENS, PROMPT, answer, chatting
from tests.engine.single_streams import rows_of


def recorded(model: Any, run: Callable[[], object]) -> tuple[Collection, list[CopyRecord]]:
    """All that happens in `run`, the copies for later that its last step has begun among it; nothing is lost.

    A last step of no tokens takes what these count.
    """
    heard: list[CopyRecord] = []
    devices = model.devices.devices if model.devices is not None else ()
    rest(model)  # loading leaves the caches' first copies under way
    telemetry = ModelTelemetry(model)
    telemetry.start()
    stops = [device.copy_log.listen(heard.append) for device in devices]
    try:
        with collected() as collection:
            run()
            rest(model)
            RECORDER.phase(DECODE, 0)
    finally:
        telemetry.stop()
        for stop in stops:
            stop()
    assert collection.dropped == 0
    return collection, heard


def rest(model: Any) -> None:
    """Returns when nothing is on its way to or from a device."""
    for cache in model.caches:
        cache.wait()
    for device in model.devices.devices if model.devices is not None else ():
        device.synchronize()


def recorded_chat(
    model: Any, prompt: Sequence[int] = PROMPT, tokens: int = NEW_TOKENS
) -> tuple[Collection, list[CopyRecord]]:
    """An answer."""
    with chatting(model) as session:
        return recorded(model, lambda: answer(session, prompt, tokens))


def recorded_batch(
    model: Any, lengths: Sequence[int], policy: BatchPolicy, tokens: int = 4
) -> tuple[Collection, list[CopyRecord]]:
    """Rows with prompts of these lengths."""
    rows = rows_of(lengths, tokens)
    answered: list[int] = []

    def run() -> None:
        assert executor.run(iter(rows), lambda answer: answered.append(answer.row)) is BatchOutcome.FINISHED

    with closing(BatchExecutor(model, policy)) as executor:
        result = recorded(model, run)
    assert sorted(answered) == list(range(len(rows)))
    return result


def total(steps: Records, name: str) -> int:
    """Of all steps together."""
    return int(steps[name].sum())


def of_lane(spans: Records, lane: int) -> Records:
    """In order."""
    return np.sort(spans[spans["lane"] == lane], order="start_ns")
