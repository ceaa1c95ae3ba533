"""How fast a model writes here: what tuning measures, and `bench`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.common import clock
from engine.common.config import SamplingParams
from engine.common.errors import CancelCheck, never_cancelled
from engine.runtime.loaded_model import LoadedModel
from engine.runtime.schedule.request import BatchRequest
from engine.runtime.schedule.scheduler import Scheduler
from engine.tuning.result import DecodeRate

TIMED_PROMPT = (
    "A railway switchyard sorts freight cars. Explain in plain words how the hump, the switches and the retarders work."
)
_FEWEST_TOKENS = 4


def time_decode(
    loaded: LoadedModel,
    prompt: Sequence[int],
    tokens: int,
    *,
    seconds: float = float("inf"),
    speculates: bool = False,
    on_token: Callable[[int, float], None] = lambda _count, _rate: None,
    cancelled: CancelCheck = never_cancelled,
) -> DecodeRate:
    """Continues a prompt greedily by `tokens` tokens after the first, past any end token.

    Args:
        seconds: a slow model is stopped after so long, with the tokens that it has made, four at the least.
        speculates: whether coming tokens may be guessed; what repeats itself would be timed as if all answers did.
        on_token: called with their number, and the rate since the first.

    Raises:
        EngineError: as `Scheduler.answer`.
    """
    arrivals: list[tuple[int, float]] = []
    begun = clock.now()

    def on_text(_text: str, count: int) -> None:
        if arrivals and count == arrivals[-1][0]:
            return  # what was held back of the text: no further token
        arrivals.append((count, clock.now()))
        first, since = arrivals[0]
        if count > first:
            on_token(count - first, (count - first) / (arrivals[-1][1] - since))

    def enough() -> bool:
        if cancelled():
            return True
        return bool(arrivals) and arrivals[-1][0] > _FEWEST_TOKENS and clock.now() - arrivals[0][1] > seconds

    scheduler = Scheduler(replace(loaded, speculates=speculates, kept=None))
    sampling = SamplingParams(max_tokens=tokens + 1)
    try:
        scheduler.answer(
            BatchRequest(
                0, ids=tuple(prompt), sampling=sampling, end_ids=frozenset(), on_text=on_text, cancelled=enough
            )
        )
    finally:
        scheduler.close()
    if not arrivals:
        return DecodeRate(0.0, 0.0, 0)
    # Not every token completes a text.
    (first, first_s), (last, last_s) = arrivals[0], arrivals[-1]
    rate = (last - first) / (last_s - first_s) if last > first else 0.0
    return DecodeRate(rate, first_s - begun, last - first)
