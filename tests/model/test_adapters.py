"""Adapters in one batch with each other and with the base: each row is that of its merged model, none depends on others."""

import copy
import json

import pytest
import torch

from services.predictor.engine.adapters.peft import MAX_RANK
from services.predictor.engine.cpu.packed_linear import pack_linears
from services.predictor.engine.runners.adapters import Adapters
from services.predictor.engine.runners.fused_layers import fuse_layers
from services.predictor.engine.runners.memory import cache_shape
from services.predictor.engine.runners.paged import PagedRunner
from services.predictor.engine.state.sequence import Row, detached_sequence
from tests.model.bfloat16 import PACKED_DTYPES
from tests.random_adapters import merge, save_random_adapter
from tests.random_models import PAGED, VOCABULARY, random_model

LENGTH = 45
# Some layers only, as most adapters have it: the rest of a joined product is zero.
TARGETS = {
    1: "",
    2: "q_proj|v_proj|up_proj|fc1|c_attn|qkv_proj|query_key_value|gate_up_proj",
    3: "o_proj|out_proj|gate_proj|fc2|c_proj|dense",
}


def runner_of(model, record=None):
    adapters = Adapters(model)
    fuse_layers(model)
    pack_linears(model)
    return PagedRunner(model, cache_shape(model), 64, record, adapters)


def sequences(runner, numbers):
    """Sequences of these adapters with blocks of their own, of different ids."""
    found = []
    for place, number in enumerate(numbers):
        sequence = detached_sequence([(7 * i + 13 * place + 1) % VOCABULARY for i in range(LENGTH)])
        sequence.blocks = [1 + 2 * place, 2 + 2 * place]
        sequence.adapter = runner.adapters.get(number)
        found.append(sequence)
    return found


def logits(runner, numbers, places=None):
    """The logits of steps with chunks, with chunks and decodes, and with decodes; by place, of rows that sample."""
    every = sequences(runner, numbers)
    # A row's own neighbours change, and the order of the rows, but not what they compute.
    places = list(range(len(every))) if places is None else places
    ids = {place: list(every[place].ids) for place in places}
    computed = dict.fromkeys(places, 0)
    found = {place: [] for place in places}
    with torch.inference_mode():
        for step in range(5):
            rows = []
            for place in places:
                end = min(LENGTH, computed[place] + (20 if place % 2 or step else 44))
                if computed[place] >= 44:
                    end = computed[place] + 1
                every[place].ids = ids[place][:end] if end <= LENGTH else [*ids[place], *[5] * (end - LENGTH)]
                rows.append(Row(every[place], computed[place], end - computed[place]))
                computed[place] = end
            output = runner.run(rows)
            for place, row in zip([p for p, row in zip(places, rows, strict=True) if row.samples], output, strict=True):
                found[place].append(row.float().clone())
    return {place: torch.stack(steps) for place, steps in found.items()}


@pytest.mark.parametrize("architecture", PAGED)
@pytest.mark.parametrize("dtype", PACKED_DTYPES)
def test_rows_equal_merged_models_and_do_not_depend_on_their_neighbours(architecture, dtype, tmp_path):
    model = random_model(architecture).to(dtype)
    merged = {0: copy.deepcopy(model)}
    for number, targets in TARGETS.items():
        weights = save_random_adapter(tmp_path / str(number), model, "base", number, 3 + number, targets)
        merged[number] = merge(copy.deepcopy(model), weights)
    runner = runner_of(model)
    alone = logits(runner, [0, 0, 0], places=[1])
    for number in TARGETS:
        runner.adapters.load(number, tmp_path / str(number))
    numbers = [1, 0, 2, 1, 3, 0]
    together = logits(runner, numbers)
    # Bit by bit: the base's row as before any adapter was loaded, and each row as it is without the others.
    assert torch.equal(together[1], alone[1])
    for place in range(len(numbers)):
        if dtype == torch.float32:
            assert torch.equal(logits(runner, numbers, [place])[place], together[place])
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for number, reference in merged.items():
        expected = logits(runner_of(reference), [0] * len(numbers))
        for place in (place for place, own in enumerate(numbers) if own == number):
            got, wanted = together[place], expected[place]
            assert (got - wanted).abs().max() <= tolerance * wanted.abs().max()
            base = logits(runner, [0] * len(numbers), [place])[place]
            assert number == 0 or (got - base).abs().max() > 0.1 * base.abs().max()
