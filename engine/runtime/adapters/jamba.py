"""Jamba: Mamba layers that go on from where they were, also with several tokens at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu, softplus
from transformers.cache_utils import Cache
from transformers.models.jamba.modeling_jamba import (
    JambaMambaMixer,
    apply_mask_to_padding_states,
    causal_conv1d_fn,
    mamba_selective_scan,
)

from engine.runtime.adapters import Adapter


class ContinuedMixer(JambaMambaMixer):  # type: ignore[misc]  # the library is untyped
    """The library's, which starts anew with every forward of several tokens."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        tokens = hidden_states.shape[1]
        held = cache.get_recurrent_state(self.layer_idx) if cache is not None else None
        if cache is None or held is None or tokens == 1:
            return super().forward(hidden_states, cache, attention_mask, **kwargs)
        mixed = self.in_proj(apply_mask_to_padding_states(hidden_states, attention_mask)).transpose(1, 2)
        states, gate = mixed.chunk(2, dim=1)
        states = cache.update_conv_state(states, self.layer_idx, conv_kernel_size=self.conv_kernel_size)
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        states = causal_conv1d_fn(states, weight, bias, activation=self.activation)[:, :, -tokens:]
        rows = apply_mask_to_padding_states(states.transpose(1, 2), attention_mask)
        sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
        steps, keys, queries = torch.split(self.x_proj(rows), sizes, dim=-1)
        steps = self.dt_proj.weight @ self.dt_layernorm(steps).transpose(1, 2)
        keys, queries = self.b_layernorm(keys), self.c_layernorm(queries)
        decay, offset = -torch.exp(self.A_log.float()), self.dt_proj.bias.float()
        out, behind = mamba_selective_scan(
            rows.transpose(1, 2),
            steps,
            decay,
            keys.transpose(1, 2),
            queries.transpose(1, 2),
            D=self.D.float(),
            z=gate,
            delta_bias=offset,
            delta_softplus=True,
            return_last_state=True,
        )
        # The scan begins with nothing: what was held decays beside it, and is added, as all of it is linear.
        passed = softplus(steps + offset[:, None]).float().cumsum(-1)
        left = torch.exp(decay[:, None] * passed[..., None]) * held.float()[:, :, None]
        out = out + torch.einsum("bdsn,bsn->bds", left, queries.float()) * silu(gate)
        cache.update_recurrent_state((behind + left[:, :, -1]).to(held.dtype), self.layer_idx)
        return self.out_proj(out.transpose(1, 2).to(hidden_states.dtype))


class JambaAdapter(Adapter):
    def prepare(self, model: Any) -> None:
        for module in model.modules():
            if type(module) is JambaMambaMixer:
                module.__class__ = ContinuedMixer
