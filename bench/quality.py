"""What the formats of weights cost in quality: perplexity, KL divergence to float32, agreement of the first choice.

`python -m bench.quality` computes held-out stories and conversations with the engine in each format that it has, and
with choices of formats that torch imitates: weights and inputs of linear layers, and the embedding, are rounded to what
the format can store. Only predicted tokens count. Writes bench/results/quality.json.
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss, pad
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.runs import parser, write
from headrace.sampling import SamplingParameters
from headrace_predictor.engine.build import build_engine
from headrace_predictor.engine.state.cache import BLOCK_TOKENS
from headrace_predictor.engine.state.sequence import Row, Sequence
from headrace_predictor.engine.state.slot import MergingSlot
from headrace_predictor.settings import PredictorSettings
from headrace_protos.steps_pb2 import Submission
from models.storyteller_rows import RowEncoder, converse, draw_story

_STORYTELLER = Path(__file__).resolve().parent.parent / "models" / "storyteller"
_FORMATS = {"bf16": {"dtype": "bf16"}, "int8": {"weights": "int8"}, "int4": {"weights": "int4"}}
_Rounding = Callable[[Tensor], Tensor]
_Rows = list[tuple[list[int], Tensor]]  # Ids, and which of the next ids count.


def main() -> None:
    options = parser(__doc__, "quality")
    options.add_argument("--rows", type=int, default=60, help="stories and conversations")
    arguments = options.parse_args()
    torch.set_grad_enabled(False)
    random = Random(77)  # noqa: S311  # stories, not secrets
    story, encoder = partial(draw_story, random, held_out=True), RowEncoder(AutoTokenizer.from_pretrained(_STORYTELLER))
    examples = [encoder.story(story()) for _ in range(arguments.rows // 2)]
    examples += [encoder.conversation(converse(random, story)) for _ in range(arguments.rows // 2)]
    rows = [(row.ids, torch.tensor(row.weights[1:]) > 0) for row in examples]
    model = AutoModelForCausalLM.from_pretrained(_STORYTELLER, dtype=torch.float32).eval()
    exact = [logprobs(model, ids) for ids, _ in rows]
    report = {"fp32": compared(exact, exact, rows)}
    for name, settings in _FORMATS.items():
        if settings.keys() <= PredictorSettings.model_fields.keys():
            report[name] = compared(exact, engine_logprobs(settings, rows), rows)
    for name, choice in CHOICES.items():
        other = imitation(model, *choice)
        report[f"imitated {name}"] = compared(exact, [logprobs(other, ids) for ids, _ in rows], rows)
    write(arguments.out, {"model": _STORYTELLER.name, "formats": report})
    for name, figures in report.items():
        print(f"{name:45}", *(f"{figure:.6f}" for figure in figures.values()))


def logprobs(model: Any, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids])).logits[0].log_softmax(-1)  # type: ignore[no-any-return]


def engine_logprobs(settings: dict[str, str], rows: _Rows) -> list[Tensor]:
    """Those of the engine's own runner."""
    model = AutoModelForCausalLM.from_pretrained(_STORYTELLER, dtype=torch.bfloat16).eval()
    engine = build_engine(_STORYTELLER.name, model, PredictorSettings(**settings))  # type: ignore[arg-type]
    results = []
    for ids, _ in rows:
        scored = Submission(prompt_ids=ids, prompt_logprobs=0)
        sequence = Sequence(scored, MergingSlot(SamplingParameters()), frozenset())
        sequence.blocks = list(range(1, 2 + len(ids) // BLOCK_TOKENS))
        last, *others = engine._runner.run([Row(sequence, 0, len(ids))]).float().log_softmax(-1)
        results.append(torch.stack([*others, last]))
    engine.close()
    return results


def compared(exact: list[Tensor], others: list[Tensor], rows: _Rows) -> dict[str, float]:
    masks = [counts for _, counts in rows]
    own, other = (torch.cat([x[:-1][mask] for x, mask in zip(each, masks, strict=True)]) for each in (exact, others))
    targets = torch.cat([torch.tensor(ids[1:])[counts] for ids, counts in rows])
    return {
        "perplexity": nll_loss(other, targets).exp().item(),
        "kl": (own.exp() * (own - other)).sum(-1).mean().item(),
        "first_choice": (own.argmax(-1) == other.argmax(-1)).float().mean().item(),
    }


def imitation(model: Any, layers: _Rounding, ends: _Rounding, inputs: _Rounding) -> Any:
    """The model with rounded weights of layers, rounded embedding and head, and rounded inputs of linear layers."""
    other = copy.deepcopy(model)
    head = other.get_output_embeddings()
    for module in (other.get_input_embeddings(), head):
        module.weight = nn.Parameter(ends(module.weight))
    for module in [module for module in other.modules() if isinstance(module, nn.Linear)]:
        module.weight = module.weight if module is head else nn.Parameter(layers(module.weight))
        module.register_forward_pre_hook(lambda _, given: (inputs(given[0]),))
    return other


def to_8_bits(x: Tensor, size: int = 0) -> Tensor:
    """With a scale for each group of so many numbers of a row; 0: for each row."""
    size = size or x.shape[-1]
    groups = pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scales.clamp(min=1e-30)).round() * scales).flatten(-2)[..., : x.shape[-1]]


def to_4_bits(x: Tensor, factors: tuple[float, ...] = (1.0,), minimum: bool = False) -> Tensor:
    """In groups of 32: symmetric, with the best of the largest scale times these factors, or with a minimum."""
    groups = pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    start, first = (low.bfloat16().float(), 0) if minimum else (torch.zeros_like(low), -8)
    largest = (high - low) / 15 if minimum else torch.where(-low >= high, low, high) / -8
    results = []
    for scale in ((largest * factor).bfloat16().float() for factor in factors):
        steps = ((groups - start) / torch.where(scale == 0, 1, scale)).round().clamp(first, first + 15)
        results.append(steps * scale + start)
    best = torch.stack([(groups - result).square().sum(-1) for result in results]).argmin(0)[None, ..., None]
    return torch.stack(results).take_along_dim(best, 0)[0].flatten(-2)[..., : x.shape[-1]]


def rotated(rounding: _Rounding, x: Tensor) -> Tensor:
    """Rounds the Hadamard transform of each 128 numbers, or fewer that divide a row: outliers become small in it."""
    size = math.gcd(x.shape[-1], 128)
    matrix = torch.ones(1, 1)
    for _ in range(size.bit_length() - 1):
        matrix = torch.kron(torch.tensor([[1.0, 1], [1, -1]]) / math.sqrt(2), matrix)
    turned = rounding((x.unflatten(-1, (-1, size)) @ matrix).flatten(-2))
    return (turned.unflatten(-1, (-1, size)) @ matrix).flatten(-2)


_A32, _A128 = partial(to_8_bits, size=32), partial(to_8_bits, size=128)
_INT4, _MINIMUM = partial(to_4_bits, factors=(1.0, 0.95, 0.9, 0.85)), partial(to_4_bits, minimum=True)
_ROTATED_8, _ROTATED_128 = partial(rotated, to_8_bits), partial(rotated, _A128)
# Weights of layers; embedding and head; inputs.
CHOICES: dict[str, tuple[_Rounding, _Rounding, _Rounding]] = {
    "int8": (to_8_bits, to_8_bits, _A128),
    "int8, inputs by 32": (to_8_bits, to_8_bits, _A32),
    "int8, inputs by token": (to_8_bits, to_8_bits, to_8_bits),
    "int8, rotated": (_ROTATED_8, _ROTATED_8, _ROTATED_128),
    "int4": (_INT4, _INT4, _A128),
    "int4, head int8": (_INT4, to_8_bits, _A128),
    "int4, head int8, rotated": (partial(rotated, _INT4), _ROTATED_8, _ROTATED_128),
    "int4 without search, head int8": (to_4_bits, to_8_bits, _A128),
    "int4 with minimum, head int8": (_MINIMUM, to_8_bits, _A128),
}

if __name__ == "__main__":
    main()
