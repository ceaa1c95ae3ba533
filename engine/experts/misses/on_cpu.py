"""Serves misses on the CPU, from their records in RAM: only activations are copied (Fiddler, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.common import clock
from engine.experts.misses.way import ExpertLayer, Step, Way
from engine.experts.record_source import Held
from engine.experts.shares import Estimate


class OnCpu(Way):
    """Computes with the source's kernel and copies the output to the device."""

    name = "cpu"
    keeps_caller = True
    is_possible = True

    def __init__(self, layer: ExpertLayer) -> None:
        super().__init__(layer)
        self._of_token = Estimate(layer.latency.cpu_s, keeps_caller=True)

    def estimate(self, step: Step, busy_s: float) -> Estimate:  # noqa: ARG002
        """See `Way.estimate`: it does not depend on how busy the device is, but a prompt's states have to come, and
        its results to go back."""
        if not step.is_prefill:
            return self._of_token
        latency = self._layer.latency
        back_s = latency.carrying_s(step.hidden[0].nbytes)

        def seconds(tokens: int) -> float:
            return latency.cpu_prompt_s(tokens) + tokens * back_s

        return Estimate(seconds, keeps_caller=True, entry_s=latency.price_of_entering_s(_bytes_to_come(step)))

    def prepare(self, step: Step, experts: Sequence[int]) -> None:
        """See `Way.prepare`."""
        if step.is_prefill:
            visits = sum(step.routing.tokens(expert) for expert in experts)
            self._layer.activations.outgoing((visits, step.hidden.shape[1]), step.hidden.dtype)

    def serve(self, step: Step, experts: Sequence[int], held: Held) -> None:
        """See `Way.serve`."""
        layer, activations = self._layer, self._layer.activations
        begun_s, to_come = clock.now(), _bytes_to_come(step)
        if step.host_hidden is None:
            # The routing came after it, and is here. Hits and fetched experts that are queued are not waited for.
            step.host_hidden = activations.to_host(step.hidden, "hidden", is_computed=True)
        tokens = [step.routing.tokens(expert) for expert in experts]
        out = activations.outgoing((sum(tokens), step.hidden.shape[1]), step.hidden.dtype)
        took_s = step.sums.on_host(layer.source.kernel, step.host_hidden, experts, held.rows, out)
        layer.latency.observe_cpu(tokens, took_s, is_prompt=step.is_prefill)
        added = layer.submit(step)
        if added is not None:
            activations.read_until(added)
        landed, event = activations.to_device(out)
        step.pending.append(step.sums.add(landed, experts))
        layer.device.compute_stream.wait(event)
        if step.is_prefill:
            layer.latency.observe_entering(to_come, clock.now() - begun_s - took_s)


def _bytes_to_come(step: Step) -> int:
    """Of the hidden states, which are only on the device."""
    return step.hidden.nbytes if step.host_hidden is None else 0
