"""A prefetcher for a target, with all the predictors that its model allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.experts.prediction.correlation import Correlation
from engine.experts.prediction.learning import Learning
from engine.experts.prediction.next_gate import NextGate
from engine.experts.prediction.predictor import Gate, Predictor
from engine.experts.prediction.prefetcher import Prefetcher
from engine.experts.prediction.previous_token import PreviousToken
from engine.experts.prediction.target import PrefetchTarget, PrefetchTimes
from engine.experts.replay.trace_file import RoutingTrace


def make_prefetcher(
    target: PrefetchTarget,
    times: Callable[[], PrefetchTimes],
    *,
    layers: int,
    experts: int,
    per_token: int,
    choice: str = "auto",
    gates: Sequence[Gate | None] = (),
    learning: Learning | None = None,
    trace: RoutingTrace | None = None,
    pools: Sequence[int] | None = None,
) -> Prefetcher | None:
    """See `Prefetcher`; None if `choice` is `off`, or there is nothing to predict or nobody who could.

    Args:
        layers: of the target; its numbers are those of `gates`, `trace` and `learning` too.
        choice: as in the engine's configuration.
        gates: of each layer.
        learning: of the trained predictor; the prefetcher closes it.
        trace: that the correlation table starts from.
    """
    limit = min(2 * per_token, experts)
    makers: dict[str, Callable[[], Predictor]] = {
        "previous": lambda: PreviousToken(layers),
        "correlation": lambda: Correlation(layers, experts, limit, trace=trace),
    }
    if any(gate is not None for gate in gates):
        makers["gate"] = lambda: NextGate(gates, limit)
    wanted = [name for name in makers if choice in ("auto", name)]
    learns = learning is not None and choice in ("auto", "mlp")
    if layers < 2 or not (wanted or learns):
        if learning is not None:
            learning.close()
        return None
    if learning is not None and not learns:
        learning.close()
    return Prefetcher(
        target,
        [makers[name]() for name in wanted],
        times,
        layers=layers,
        experts=experts,
        per_token=per_token,
        choice=choice,
        learning=learning if learns else None,
        pools=pools,
    )
