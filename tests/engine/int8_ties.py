"""Numbers that no two ways of computing round to different whole ones."""

import torch

_NEAR = 0.01


def without_ties(states: torch.Tensor, group: int | None = None) -> torch.Tensor:
    """`states`, where 8 bits with a scale for each group are plain about every number.

    Those that lie between two codes become one of them: x * (127 / most) and x / (most / 127) fall to different sides.

    Args:
        group: numbers of the last dimension that share a scale; all of them if not given.
    """
    width = states.shape[-1]
    group = group or width
    groups = torch.nn.functional.pad(states.float(), (0, -width % group)).unflatten(-1, (-1, group))
    step = groups.abs().amax(-1, keepdim=True) / 127
    codes = groups / step.where(step > 0, torch.ones(()))
    between = (codes - codes.floor() - 0.5).abs() < _NEAR
    return torch.where(between, codes.floor() * step, groups).flatten(-2)[..., :width].to(states.dtype)
