"""Adapters: the low-rank product that one adds to the output of a linear layer, scale · B(A(x)), and their files.

Sources: Hu et al. 2021, LoRA; https://huggingface.co/docs/peft, "PEFT checkpoint format" and "LoRA". The scale is part
of B. Where a model's weights are packed, so are these, because the sums of a packed product do not depend on the other
rows: see packed_linear.py. Only low-rank products of linear layers are supported; whatever else would change an answer
raises ValueError with its name.

Streamed layers get an adapter's products with the step's plan. In any other model a hook of each adapted module adds
them to its output; the first step with an adapter sets the hooks.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import re2
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from headrace.models.generation_config import GENERATION_FILE, GenerationRules, eos_ids_of, read_generation, rules_of
from headrace.models.kinds import ADAPTER_FILE
from headrace.models.sources import read_config
from headrace.models.tokenizer_files import own_end_ids
from headrace_predictor.engine.cpu.packed_linear import PackedLinear, is_linear, packs

MAX_RANK = 256
_MAX_PATTERNS = 4096
WEIGHTS_FILE = "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(?P<path>.+)\.lora_(?P<side>[AB])\.weight")
# Fields that do not change what the weights mean, or that are read below. All others must be empty.
_READ = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules", "fan_in_fan_out"),
    *("inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout"),
    *("megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision"),
    *("target_modules", "task_type", "use_rslora"),
}
# The other ways to begin a training change the base's weights too.
_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


class LowRankWeights(NamedTuple):
    """`down` [rank, in] and `up` [out, rank], with the scale."""

    down: Tensor
    up: Tensor


class LowRank:
    """x [n, in] to [n, out]."""

    def __init__(self, weights: LowRankWeights, packed: bool) -> None:
        self._down, self._up = (_product(weight, packed) for weight in weights)

    def __call__(self, x: Tensor) -> Tensor:
        return self._up(self._down(x))


@dataclass(eq=False)
class Adapter:
    """The products of a loaded adapter by module path; its end tokens beside the base's, and the rules of its answers.

    `number` is unique in its engine, also after the adapter has been unloaded.
    """

    number: int
    modules: dict[str, LowRank]
    end_ids: frozenset[int] = frozenset()
    rules: GenerationRules | None = None


class AdaptedTokens(NamedTuple):
    """Tokens `begin` to `end` of a step, which have this adapter."""

    adapter: Adapter
    begin: int
    end: int


def _product(weight: Tensor, packed: bool) -> Callable[[Tensor], Tensor]:
    if packed:
        return PackedLinear(weight, None).forward
    return partial(functional.linear, weight=weight)


class LinearShape(NamedTuple):
    """The sizes of a linear layer's input and output."""

    inputs: int
    outputs: int


def linear_shapes(model: Any) -> dict[str, LinearShape]:
    """The linear layers of a model that an adapter may change, by path: all but those of its head, which reads the
    sampled positions only."""
    head, body = model.get_output_embeddings(), {*model.base_model.modules()}
    shapes = {}
    for path, module in model.named_modules():
        if module is head or module not in body:
            continue
        if isinstance(module, Conv1D):  # GPT-2's, whose weight is transposed.
            shapes[path] = LinearShape(*module.weight.shape)
        elif is_linear(module):
            shapes[path] = LinearShape(module.in_features, module.out_features)
    return shapes


def read_adapter(
    folder: Path, shapes: Mapping[str, LinearShape], dtype: torch.dtype, device: torch.device
) -> dict[str, LowRankWeights]:
    """The weights by module path, in the model's dtype; raises ValueError, and safetensors' own errors."""
    config = read_config(folder, ADAPTER_FILE)
    _check(config)
    if not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(f"it has no {WEIGHTS_FILE}; other formats are not loaded")
    sides: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(folder / WEIGHTS_FILE).items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise ValueError(f"its weight {key} is not that of a low-rank product of a linear layer")
        sides.setdefault(match["path"], {})[match["side"]] = tensor
    if not sides:
        raise ValueError("it has no weights")
    alphas = _alpha_patterns(config)
    weights = {}
    for path, pair in sides.items():
        down, up = _checked(path, pair, shapes)
        # Scaled before it is rounded to the model's dtype.
        up = up.float() * _scale(config, alphas, path, len(down))
        weights[path] = LowRankWeights(*(tensor.to(device, dtype).contiguous() for tensor in (down, up)))
    return weights


def _check(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"it is of the kind {config.get('peft_type')}; only LORA is supported")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise ValueError(f"its task_type is {config['task_type']}; only CAUSAL_LM is supported")
    if config.get("bias", "none") != "none":
        raise ValueError("it changes biases, which is not supported")
    if config.get("init_lora_weights") not in _BEGINNINGS:
        raise ValueError(f"init_lora_weights={config['init_lora_weights']} changes the base, which is not supported")
    for name, value in config.items():
        if value and name not in _READ:
            raise ValueError(f"{name} is not supported")


def _checked(path: str, pair: Mapping[str, Tensor], shapes: Mapping[str, LinearShape]) -> tuple[Tensor, Tensor]:
    shape = shapes.get(path)
    if shape is None:
        raise ValueError(f"it changes {path}, which is not a linear layer of the base's decoder")
    if pair.keys() != {"A", "B"}:
        raise ValueError(f"of {path} it has only one of two weights")
    down, up = pair["A"], pair["B"]
    rank = len(down)
    if tuple(down.shape) != (rank, shape.inputs) or tuple(up.shape) != (shape.outputs, rank):
        raise ValueError(
            f"its weights of {path} are {list(down.shape)} and {list(up.shape)}, but the base's layer has"
            f" {shape.inputs} inputs and {shape.outputs} outputs"
        )
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"{path} has rank {rank}; the maximum is {MAX_RANK}")
    return down, up


def _alpha_patterns(config: Mapping[str, Any]) -> list[tuple[Any, float]]:
    """Regular expressions for the end of a path, as PEFT reads them, by RE2: none of them backtracks."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    if len(patterns) > _MAX_PATTERNS:
        raise ValueError(f"its alpha_pattern has {len(patterns)} patterns; the maximum is {_MAX_PATTERNS}")
    options = re2.Options()
    options.log_errors = False
    try:
        return [(re2.compile(rf"(.*\.)?({pattern})", options), alpha) for pattern, alpha in patterns.items()]
    except re2.error as error:
        raise ValueError(f"its alpha_pattern is not a regular expression that RE2 reads: {error}") from None


def _scale(config: Mapping[str, Any], alphas: Sequence[tuple[Any, float]], path: str, rank: int) -> float:
    """The first pattern that fits counts."""
    alpha = next((alpha for pattern, alpha in alphas if pattern.fullmatch(path)), config.get("lora_alpha", 8))
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


class Adapters:
    """The loaded adapters by number. Created before the model's layers are replaced.

    Loads and unloads on any thread, one at a time. A sequence keeps its adapter until it ends, even after an unload.
    """

    def __init__(self, model: Any, dtype: torch.dtype | None = None) -> None:
        """`dtype`: that of the layers' inputs, by default the model's."""
        self._model = model
        self._dtype = dtype or model.dtype
        self._shapes = linear_shapes(model)
        self._loaded: dict[int, Adapter] = {}
        self.is_used = False  # Becomes true with the first adapter.

    def load(self, number: int, folder: Path, rules: GenerationRules | None = None) -> None:
        """`rules`: the base's, for an adapter without a generation_config.json. Raises ValueError, or safetensors' own
        errors."""
        with torch.inference_mode():
            weights = read_adapter(folder, self._shapes, self._dtype, self._model.device)
            packed = packs(self._model.device, self._dtype)
            modules = {path: LowRank(pair, packed) for path, pair in weights.items()}
        ends = eos_ids_of(read_generation(folder), folder, own_end_ids(folder))
        vocabulary = self._model.get_input_embeddings().num_embeddings
        if stated := read_config(folder, GENERATION_FILE):
            rules = rules_of(stated, is_encoder_decoder=False, vocabulary=vocabulary)
        known = frozenset(token_id for token_id in ends if token_id < vocabulary)
        self._loaded[number] = Adapter(number, modules, known, rules)
        self.is_used = True

    def unload(self, number: int) -> None:
        self._loaded.pop(number, None)

    def get(self, number: int) -> Adapter | None:
        return self._loaded.get(number)


class AdapterHooks:
    """Adds products to the outputs of a model's modules. Used only by the engine's thread."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._hooked: set[str] = set()
        self._tokens: Sequence[AdaptedTokens] = ()

    @contextmanager
    def adding(self, tokens: Sequence[AdaptedTokens]) -> Iterator[None]:
        """Adds the products of these tokens during the block."""
        for path in {path for each in tokens for path in each.adapter.modules} - self._hooked:
            self._hook(path)
        self._tokens = tokens
        try:
            yield
        finally:
            self._tokens = ()

    def _hook(self, path: str) -> None:
        def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not self._tokens:
                return
            x, y = inputs[0].flatten(0, -2), output.flatten(0, -2)
            for adapter, begin, end in self._tokens:
                product = adapter.modules.get(path)
                if product is not None:
                    y[begin:end].add_(product(x[begin:end]))

        self._model.get_submodule(path).register_forward_hook(add)
        self._hooked.add(path)
