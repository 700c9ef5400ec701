"""Recorded passes: repetitions have the numbers of the pass, also where places serve again, and what they cannot."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace_predictor.engine.build import build_engine
from headrace_predictor.engine.cpu.recording import Passes, launch
from headrace_predictor.settings import PredictorSettings
from tests.support.full import usually
from tests.zoo import FAMILIES


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.inference_mode():
        yield


def _rows(seed: int, rows: int = 3) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed))


def _mixed(x: Tensor) -> Tensor:
    """Views, operations with several results, some that write in place, and some without a form for that."""
    layer = nn.Linear(16, 32, bias=False)
    nn.init.constant_(layer.weight, 0.1)
    left, right = layer(x).chunk(2, dim=-1)
    values, places = nn.functional.silu(left).topk(4)
    chosen = right.gather(1, places).softmax(-1).mul_(values)
    bits = x.to(torch.bfloat16).float().t().contiguous().t()
    return torch.cat((chosen, bits, bits.repeat_interleave(2, 0)[::2].flip(1), x.new_zeros(len(x), 2).add_(1)), dim=1)


def test_repetitions_have_the_numbers_of_the_pass():
    passes = Passes()
    for seed in range(4):
        assert torch.equal(passes.run(0, _mixed, _rows(seed)), _mixed(_rows(seed)))


def test_a_repetition_runs_no_code_of_the_pass():
    calls = []

    def compute(x: Tensor) -> Tensor:
        calls.append(x)
        return x * 2 + 1

    passes = Passes()
    results = [passes.run(0, compute, _rows(seed)) for seed in range(3)]
    assert len(calls) == 1
    assert all(torch.equal(result, _rows(seed) * 2 + 1) for seed, result in enumerate(results))
    passes.run(1, compute, _rows(0, 5))
    assert len(calls) == 2


def test_results_that_nothing_refers_to_give_their_places_to_others():
    def compute(x: Tensor) -> Tensor:
        for _ in range(50):
            x = x + 1
        return x

    passes = Passes()
    passes.run(0, compute, _rows(0))
    assert passes._bytes <= 4 * _rows(0).nbytes
    assert torch.equal(passes.run(0, compute, _rows(1)), compute(_rows(1)))


@pytest.mark.parametrize(
    "decide",
    [
        lambda x: x + 1 if x.sum() > 0 else x - 1,
        lambda x: x[x > 0],
        lambda x: x * x[0, 0].item(),
        lambda x: (x > 0).nonzero(),
        lambda x: x * (x > 0).int().unique().sum(),
        lambda x: x * x[0].tolist()[0],
    ],
)
def test_a_pass_that_decides_by_numbers_is_not_recorded(decide):
    passes = Passes()
    for seed in range(4):
        assert torch.equal(passes.run(0, decide, _rows(seed)), decide(_rows(seed)))


def test_what_is_launched_runs_again_with_its_addresses():
    def double(numbers: np.ndarray, out: Tensor) -> None:
        out.copy_(torch.from_numpy(numbers) * 2)

    def compute(x: Tensor) -> Tensor:
        x, out = x + 1, torch.empty_like(x)
        launch(double, x.numpy(), out)
        return out - 1

    passes = Passes()
    for seed in range(3):
        assert torch.equal(passes.run(0, compute, _rows(seed)), (_rows(seed) + 1) * 2 - 1)


def test_a_pass_whose_recording_failed_runs_without():
    def compute(x: Tensor) -> Tensor:
        if not calls:
            calls.append(x)
            raise ValueError("once")
        return x + 1

    passes, calls = Passes(), []
    with pytest.raises(ValueError, match="once"):
        passes.run(0, compute, _rows(0))
    for seed in range(3):
        assert torch.equal(passes.run(0, compute, _rows(seed)), _rows(seed) + 1)


@pytest.mark.parametrize(
    "name", usually({"GPT-OSS", "Qwen 3.5, text"}, ("GPT-OSS", "BLOOM", "Qwen 3.5, text", "Falcon-H1"))
)
def test_passes_of_a_family_s_model_are_recorded_and_recorded_ones_run(name):
    model = next(family for family in FAMILIES if family.name == name).model()
    engine = build_engine(name, model, PredictorSettings(max_running=4))
    try:
        runner = engine._runner
        recorded = [one for one in runner.passes._recorded.values() if one is not None]
        assert recorded
        expected = runner._try_decoding()
        for one in recorded:
            one.recorder.steps.clear()
            one.result.fill_(7)
        assert not torch.equal(runner._try_decoding(), expected)
    finally:
        engine.close()


def test_states_that_have_moved_are_read_where_they_are():
    engine = build_engine("m", next(one for one in FAMILIES if one.name == "Falcon-H1").model(), PredictorSettings())
    try:
        runner = engine._runner
        expected, tensors = runner._try_decoding(), runner._slots.tensors
        tensors[0] = tensors[0].clone()  # As after a growth that memory ended, and another.
        assert torch.equal(runner._try_decoding(), expected)
    finally:
        engine.close()
