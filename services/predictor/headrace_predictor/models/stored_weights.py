"""Builds a model whose quantised matrices stay in their files until a runner needs them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace_predictor.engine.cpu.grouped import padded_bytes
from headrace_predictor.engine.runners.streamed import GATED_MODELS
from headrace_predictor.engine.runners.unread import StoredMatrix, leave_unread


def build_model(
    source: object,
    kind: Any,
    config: Any,
    dtype: torch.dtype,
    state: dict[str, Tensor],
    unread: Mapping[str, StoredMatrix],
    *,
    drops_zeros: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """The model of transformers' class `kind`, and transformers' report; raises ValueError, which names the source.

    `state` has the weights that have been read, `unread` the matrices of the other modules. They have their weights
    only after `read_weights` of runners/unread.py; `unread_bytes` is the memory that these will take. A tensor that the
    class lacks is refused, with `drops_zeros` unless all of it is zero.
    """
    matrices = {name: matrix.grouped for name, matrix in unread.items()}
    for name, matrix in matrices.items():
        state[f"{name}.weight"] = torch.zeros(1, dtype=dtype).expand(matrix.outputs, matrix.inputs)
    model, report = kind.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    further = [
        name for name in report["unexpected_keys"] if not (drops_zeros and name in state and not state[name].any())
    ]
    if further:
        raise ValueError(f"{source} has {min(further)}, which {kind.__name__} lacks")
    model.unread_bytes = sum(
        padded_bytes(one.kind, one.outputs, one.inputs)
        if kind in GATED_MODELS
        else one.outputs * one.inputs * dtype.itemsize
        for one in matrices.values()
    )
    for name, stored in unread.items():
        module = model.get_submodule(name)
        leave_unread(module, stored)
        if module is model.get_input_embeddings() and config.tie_word_embeddings:
            leave_unread(model.get_output_embeddings(), stored)
    return model, report
