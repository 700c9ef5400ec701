"""Mamba 2 of transformers on the CPU: shorter scans, and a step that reads and writes each state a few times less.

transformers pads a pass of several ids to a multiple of `chunk_size`, usually 256, so that four ids took a third of the
time of 256; with `_SCAN` longer passes are no slower. Its step for one id makes ten tensors of the size of the state.
Here it changes the state in place, and as many states take a tenth of the time. The proof (proof.py) compares both with
what transformers computes.
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

_SCAN = 64  # Ids.
_STEP = "mamba2_selective_state_update"  # In the modules of transformers that have such layers.


def quicken(model: Any) -> None:
    """Changes the layers of a model, and for its process the step of all models of its class."""
    if model.device.type != "cpu":
        return
    for module in model.modules():
        if isinstance(getattr(module, "chunk_size", None), int):
            module.chunk_size = min(module.chunk_size, _SCAN)
        own = sys.modules[type(module).__module__]
        if hasattr(own, _STEP):
            setattr(own, _STEP, update_states)


def update_states(
    states: Tensor,
    inputs: Tensor,
    time_steps: Tensor,
    decay_rates: Tensor,
    keys: Tensor,
    queries: Tensor,
    skip: Tensor,
    *,
    z: Tensor | None = None,
    dt_bias: Tensor,
    dt_softplus: bool,
    **_: Any,
) -> Tensor:
    """The outputs [rows, heads, size] for inputs of one id, whose states [rows, heads, size, n] it changes.

    As in transformers `keys` and `queries` are [rows, groups, n], and the other tensors views of one number for each
    head: `time_steps` [rows, heads, size], `decay_rates` [heads, size, n], `skip` and `dt_bias` [heads, size].
    """
    heads = inputs.shape[1]
    steps = time_steps[..., 0] + dt_bias[:, 0].to(time_steps.dtype)
    if dt_softplus:
        steps = F.softplus(steps)
    keys, queries = (part.repeat_interleave(heads // part.shape[1], dim=1).to(states.dtype) for part in (keys, queries))
    decays = torch.exp(steps.float() * decay_rates[:, 0, 0].float())
    added = (steps[..., None] * inputs).to(states.dtype)
    states.mul_(decays[..., None, None]).addcmul_(added[..., None], keys[:, :, None])
    outputs = torch.matmul(states, queries[..., None])[..., 0].to(inputs.dtype) + inputs * skip
    return (outputs if z is None else outputs * F.silu(z)).to(inputs.dtype)
