"""What each layer's attention reaches: all earlier positions, a window, or the token's chunk.

Not read from a configuration, where each family has names of its own: transformers' functions for masks give the
model's layers a mask of ours, which only their attention reads, and so each layer shows what it would look at.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

_NAME = "headrace_reach"


class Reach(NamedTuple):
    """The maximum of positions that a token attends to, its own included, or the size of chunks; 0: no limit."""

    window: int = 0
    chunk: int = 0

    def firsts(self, positions: Tensor) -> Tensor:
        """The first position that each position attends to."""
        if self.chunk:
            return positions - positions % self.chunk
        return (positions + 1 - self.window).clamp(min=0) if self.window else torch.zeros_like(positions)


class Mask:
    """A mask's function of query and key positions; whatever computes with it as with a tensor fails."""

    def __init__(self, allows: Callable[..., Tensor]) -> None:
        self._allows = allows

    def reach(self, context: int, device: torch.device) -> Reach:
        """Raises NotImplementedError for a mask of another form within the context."""

        def allowed(*positions: int) -> Tensor:
            queries = torch.tensor(positions, device=device)[:, None]
            return self._allows(0, 0, queries, torch.arange(context, device=device)[None]).expand(-1, context)

        def first(position: int) -> int:
            return int(allowed(position)[0].int().argmax())

        reach, edge = Reach(), first(context - 1)
        if edge and first(edge) == edge:
            reach = Reach(chunk=edge - first(edge - 1))
        elif edge:
            reach = Reach(window=context - edge)
        limit = reach.window or reach.chunk or context // 2
        around = (place * limit + offset for place in (0, 1, 2, 3) for offset in (-1, 0, 1, limit // 2))
        queries = sorted({*around, edge, context - 1} & set(range(context)))
        ends = torch.tensor(queries, device=device)[:, None]
        keys = torch.arange(context, device=device)[None]
        if not torch.equal(allowed(*queries), (keys <= ends) & (keys >= reach.firsts(ends))):
            raise NotImplementedError("its attention has a mask of another form")
        return reach


def attention_functions(model: Any) -> dict[str, str]:
    """The names of a model's attention functions by part of its configuration, as `set_attn_implementation` takes them.

    Towers of images and sound may have others than the decoder.
    """
    config = model.config
    parts = {"": config} | {name: getattr(config, name) for name in config.sub_configs}
    own = {name: getattr(part, "_attn_implementation", None) for name, part in parts.items()}
    return {name: function for name, function in own.items() if function is not None}


def find_reaches(model: Any, context: int) -> None:
    """Sets `reach` of every attention module; raises what the model raises if it does more with a mask than pass it."""
    own = attention_functions(model)
    model.set_attn_implementation(_NAME)
    try:
        model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)
    finally:
        model.set_attn_implementation(own)
    reaches: dict[Mask | None, Reach] = {None: Reach()}
    for module in model.modules():
        mask = module.__dict__.get("reach", Reach())
        if isinstance(mask, Mask) and mask not in reaches:
            reaches[mask] = mask.reach(context, model.device)
        if not isinstance(mask, Reach):
            module.reach = reaches[mask]


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask | None, **_: Any
) -> tuple[Tensor, None]:
    if not (attention_mask is None or isinstance(attention_mask, Mask)):
        raise NotImplementedError("its attention has a mask of its own")
    module.reach = attention_mask
    return value.new_zeros((*query.transpose(1, 2).shape[:3], value.shape[-1])), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, lambda *, mask_function, **_: Mask(mask_function))
