"""The forward pass of gated decoders (Llama, Mistral, Qwen2, Qwen3) whose weights are streamed.

See cpu/decode.py for the computation and cpu/formats.py for the weights. Keys and values have the dtype of the cache,
all other numbers between products are float32. A step with adapters (LoRA) computes the same numbers for tokens without
one: its products, norms and attention are the same code, called one by one.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import __version__ as transformers_version
from transformers.activations import SiLUActivation
from transformers.models.llama import LlamaForCausalLM
from transformers.models.mistral import MistralForCausalLM
from transformers.models.qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3 import Qwen3ForCausalLM

from headrace.errors import StartupError
from headrace_predictor.engine.cpu.packed_file import SUFFIX, PackedFile
from headrace_predictor.engine.cpu.packed_linear import FORMATS, packs
from headrace_predictor.engine.runners.attention import StepPlan
from headrace_predictor.engine.runners.reach import Reach
from headrace_predictor.engine.runners.rotary import RotaryAngles
from headrace_predictor.engine.runners.unread import grouped_matrix
from headrace_predictor.engine.state.cache import Array

try:
    from headrace_predictor.engine.cpu import decode, formats, pairs
    from headrace_predictor.engine.cpu.attention import parts
    from headrace_predictor.engine.cpu.compiled import CODE
    from headrace_predictor.engine.cpu.grouped import BLOCK, HALF, PANEL, PackedMatrix, pack_grouped, padded_bytes
    from headrace_predictor.engine.cpu.team import Team

    _IS_COMPILED = True
except ImportError:  # Numba is optional.
    _IS_COMPILED = False

# Their pass is nothing but embedding, layers, norm and head.
GATED_MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
SWISH = (nn.SiLU, SiLUActivation)
# The embedding and the head of 4-bit weights have 8: with 4, they alone would cost as much quality as all layers.
_FORMAT_OF_HEADS = {"int4": "int8"}
GROUPED = "grouped"
GPU_INT8 = "int8 on a GPU"  # See gpu_decoder.py.
INTEGERS = ("int8", "int4")  # The formats of linear layers in any model.
_LANES = 16
_LEAST_KEPT_BYTES = 64 << 20  # Smaller models are packed in no time.
_FEW_TOKENS = 8  # The heads of so few are divided among threads.


def weight_format(name: str, model: Any, wanted: str) -> str | None:
    """The format in which a paged model's weights are streamed; None: they are not.

    `wanted`: auto, int8, int4 or q8_0. float32 and bfloat16 are streamed, and quantised matrices of a file as they are,
    if all are such. Raises StartupError for an integer format that cannot be computed; int8 and int4
    can in the linear layers of other models too, and int8 on a GPU.
    """
    if wanted == "int8" and model.device.type == "cuda" and type(model) in GATED_MODELS:
        return GPU_INT8
    reason = _reason_against(model)
    outer = model.get_input_embeddings(), model.get_output_embeddings()
    linears = [module for module in model.modules() if isinstance(module, nn.Linear) and module not in outer]
    # Of checkpoints neither embedding nor head are quantised: they get 8 bits, as with int4.
    is_stored = bool(linears) and all(hasattr(module, "stored") for module in linears)
    is_stored = is_stored and len({hasattr(module, "stored") for module in outer}) == 1
    if reason is None and (wanted == "q8_0" or (wanted == "auto" and is_stored)):
        attention = model.model.layers[0].self_attn
        if not any(one.out_features % PANEL for one in (attention.q_proj, attention.k_proj)):
            return GROUPED
        reason = f"its heads' sizes are not multiples of {PANEL} together"
    if wanted != "auto":
        if reason is not None and wanted in INTEGERS and _reason_against_kernels(model) is None:
            return None
        if reason is not None:
            raise StartupError(f"model {name}: PREDICTOR_WEIGHTS={wanted} is not for it: {reason}")
        return wanted
    return None if reason is not None else FORMATS[model.dtype]


def _reason_against_kernels(model: Any) -> str | None:
    if not _IS_COMPILED:
        return "Numba is not installed"
    if not packs(model.device, model.dtype):
        return "it is computed on the CPU in fp32 or bf16 only"
    return None


def _reason_against(model: Any) -> str | None:
    if (reason := _reason_against_kernels(model)) is not None:
        return reason
    if (reason := unlike_gated(model)) is not None:
        return reason
    config, layer = model.config, model.model.layers[0]
    sizes = config.hidden_size, config.intermediate_size, layer.self_attn.head_dim
    if any(size % _LANES for size in sizes):
        return f"its sizes {sizes} are not all multiples of {_LANES}"
    return None if layer.mlp.up_proj.bias is None else "its feed-forward part has a bias"


def unlike_gated(model: Any) -> str | None:
    """Why a model's pass is not that of `GATED_MODELS`, with SiLU and whole heads turned; a subclass may differ too."""
    if type(model) not in GATED_MODELS:
        return f"{type(model).__name__} is none of {', '.join(kind.__name__ for kind in GATED_MODELS)}"
    layer = model.model.layers[0]
    if not isinstance(layer.mlp.act_fn, SWISH):
        return "its feed-forward part has another activation"
    if 2 * len(model.model.rotary_emb.inv_freq) != layer.self_attn.head_dim:
        return "it rotates only a part of a head"
    return None


def packed_file(model: Any, format_: str, kept_at: Path | None, most: int) -> PackedFile:
    """The file of a model's packed weights: see `open_file`."""
    size = 0
    for module in model.modules() if format_ == GROUPED else ():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            matrix = grouped_matrix(module)
            size += padded_bytes(matrix.kind, matrix.outputs + PANEL, matrix.inputs)
    for name, weight in () if format_ == GROUPED else model.named_parameters():
        if weight.dim() == 2:
            one = format_ if ".layers." in name else _FORMAT_OF_HEADS.get(format_, format_)
            count = len(weight) // PANEL + 2  # Each of several matrices in one may have a part of a panel.
            size += count * (formats.panel_bytes(one, weight.shape[1]) + 4 * PANEL)
    return open_file(model, format_, kept_at, most, size)


def open_file(model: Any, format_: str, kept_at: Path | None, most: int, size: int) -> PackedFile:
    """The file of a model's packed weights, of `size` bytes at most. For `most` see PackedFile.

    `kept_at`: the folder, and a digest of the model; code, dtype and format are added.
    """
    if kept_at is None or size < _LEAST_KEPT_BYTES:
        return PackedFile()
    code = sha256(Path(__file__).read_bytes() + transformers_version.encode()).hexdigest()[:16]
    dtype = str(model.dtype).removeprefix("torch.")
    return PackedFile(kept_at.with_name(f"{kept_at.name}-{CODE}-{code}-{dtype}-{format_}{SUFFIX}"), size, most)


class StreamedDecoder:
    """Logits of a decoder, whose own weights it packs and frees."""

    def __init__(self, model: Any, format_: str, threads: int, file: PackedFile | None = None) -> None:
        decoder = model.model
        self.format = format_
        self._file = file or PackedFile()
        self.weights_bytes = 0
        self._kept: list[Any] = []  # What the addresses in the layers point to.
        self._reaches: list[Reach] = []
        first = decoder.layers[0].self_attn
        self._head_size: int = first.head_dim
        self._heads = first.q_proj.out_features // first.head_dim
        self._key_heads = first.k_proj.out_features // first.head_dim
        self._size: int = decoder.embed_tokens.embedding_dim
        self._inner: int = decoder.layers[0].mlp.up_proj.out_features
        self._vocabulary: int = model.lm_head.out_features
        self._angles = RotaryAngles(decoder.rotary_emb, self._head_size)
        self.origin = self._angles.origin
        if format_ == "bf16":  # Tiles add in another order than vectors, and in attention floats are not rounded.
            self.origin += " tiles" if pairs.HAS_MATRICES else " pairs" if pairs.HAS_BF16 else ""
        self._layers = np.zeros((len(decoder.layers) + 1, decode.LAYER_NUMBERS), np.int64)
        for numbers, layer in zip(self._layers, decoder.layers, strict=False):
            self._set_layer(numbers, layer)
        head, embedding = model.lm_head, decoder.embed_tokens
        tied = head.weight is embedding.weight
        outer = _FORMAT_OF_HEADS.get(format_, format_)
        packed_head = self._set_product(self._layers[-1], decode.QKV, head, format_=outer)
        self._embedding = packed_head if tied else self._pack(embedding, format_=outer)
        _free(embedding)
        self._layers[-1][decode.FIRST_NORM] = self._address(decoder.norm.weight)
        sizes = np.array([self._size, self._heads, self._key_heads, self._head_size, threads], np.int64)
        numbers = np.array([decoder.norm.variance_epsilon, first.scaling], np.float32)
        self._model = (self._layers, sizes, numbers, formats.MARKERS[format_])
        self._team = Team(threads, len(decoder.layers))
        # What only steps with adapters call is compiled here, while nobody waits.
        row = np.zeros((1, _LANES), np.float32)
        decode.norm_rows(row, row.ctypes.data, numbers[decode.EPSILON], row.copy())
        decode.swish_rows(row, row, row.copy())
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # The file of the model's own weights is mapped no more.
        self._file.keep()

    def _set_layer(self, numbers: Array, layer: Any) -> None:
        attention, feed_forward = layer.self_attn, layer.mlp
        self._set_product(numbers, decode.QKV, attention.q_proj, attention.k_proj, attention.v_proj)
        self._set_product(numbers, decode.OUTPUT, attention.o_proj)
        self._set_product(numbers, decode.GATE_UP, feed_forward.gate_proj, feed_forward.up_proj, interleave=True)
        numbers[decode.GATE_UP + decode.OUTPUTS] = self._inner
        self._set_product(numbers, decode.DOWN, feed_forward.down_proj)
        numbers[decode.FIRST_NORM] = self._address(layer.input_layernorm.weight)
        numbers[decode.SECOND_NORM] = self._address(layer.post_attention_layernorm.weight)
        for at, name in ((decode.QUERY_NORM, "q_norm"), (decode.KEY_NORM, "k_norm")):
            norm = getattr(attention, name, None)
            numbers[at] = 0 if norm is None else self._address(norm.weight)
        numbers[decode.LAYER] = attention.layer_idx
        if attention.reach not in self._reaches:
            self._reaches.append(attention.reach)
        numbers[decode.REACH] = self._reaches.index(attention.reach)

    def _set_product(self, numbers: Array, at: int, *linears: Any, **packing: Any) -> PackedMatrix:
        packed = self._pack(*linears, **packing)
        biases = [linear.bias for linear in linears]
        numbers[at : at + 8] = packed.numbers(None if biases[0] is None else self._keep(torch.cat(biases)))
        return packed

    def _pack(self, *modules: Any, format_: str = "", interleave: bool = False) -> PackedMatrix:
        packed: PackedMatrix
        if self.format == GROUPED:
            packed = pack_grouped([grouped_matrix(module) for module in modules], self._file, interleave)
        else:
            matrices = [module.weight.detach() for module in modules]
            packed = formats.pack(format_ or self.format, *matrices, file=self._file, interleave=interleave)
        for module in modules:
            if isinstance(module, nn.Linear):
                _free(module)
        self._kept.append(packed)
        self.weights_bytes += packed.nbytes
        return packed

    def _keep(self, tensor: Tensor) -> Tensor:
        """A copy in float32, to which an address may point."""
        self._kept.append(own := tensor.detach().to(torch.float32, copy=True).contiguous())
        return own

    def _address(self, tensor: Tensor) -> int:
        return self._keep(tensor).data_ptr()

    @property
    def mapped_bytes(self) -> int:
        """The bytes of weights that are pages of a file."""
        return self.weights_bytes if self._file.is_mapped else 0

    def __call__(self, ids: Tensor, positions: Tensor, plan: StepPlan, places: Tensor | None = None) -> Tensor:
        """Logits of the tokens at `places`, by default of all, for ids and positions [1, T]."""
        hidden = self._embedding.rows(ids[0])
        tokens = len(hidden)
        places = torch.arange(tokens) if places is None else places
        logits = torch.empty(len(places), self._vocabulary)
        step = _Step(self, hidden, self._angles(hidden, positions), plan)
        step.set({decode.LOGITS: logits, decode.PLACES: places})
        step.parameters[decode.SAMPLED] = len(places)
        cache = plan.cache.arrays[0]
        with self._team.awake((*self._model, cache.keys, cache.values)):
            if plan.adapted:
                for index in range(len(self._layers) - 1):
                    self._compute_adapted(step, index, plan)
                self._team.run(decode.LAST, step.parameters)
            else:
                self._team.run(decode.DECODER, step.parameters)
        return logits

    def _compute_adapted(self, step: _Step, index: int, plan: StepPlan) -> None:
        """Computes a layer of a step with adapters: their products are added to those of the layer."""
        numbers, epsilon = self._layers[index], self._model[2][decode.EPSILON]
        prefix = f"model.layers.{index}."

        def add(x: Tensor, output: Tensor, first: int, name: str) -> None:
            for adapter, begin, end in plan.adapted:
                if (product := adapter.modules.get(prefix + name)) is not None:
                    added = product(x[begin:end])
                    output[begin:end, first : first + added.shape[1]] += added

        def normed(at: int) -> Tensor:
            out = torch.empty_like(step.hidden)
            decode.norm_rows(step.hidden.numpy(), numbers[at], epsilon, out.numpy())
            return out

        x, size = normed(decode.FIRST_NORM), self._head_size
        self._linear(step, numbers, decode.QKV, x, step.packed)
        for first, name in ((0, "q"), (self._heads, "k"), (self._heads + self._key_heads, "v")):
            add(x, step.packed, first * size, f"self_attn.{name}_proj")
        step.parameters[decode.PRODUCT] = index
        self._team.run(decode.HEADS, step.parameters)
        output = torch.empty_like(step.hidden)
        self._linear(step, numbers, decode.OUTPUT, step.attended, output)
        step.hidden.copy_(output + step.hidden)
        add(step.attended, step.hidden, 0, "self_attn.o_proj")
        x = normed(decode.SECOND_NORM)
        count = int(numbers[decode.GATE_UP + decode.PANELS])
        both = torch.empty(len(x), count * PANEL)
        self._linear(step, numbers, decode.GATE_UP, x, both, both.shape[1])
        gate, up = both.view(len(x), count // 2, 2, PANEL).unbind(2)
        gate, up = (part.reshape(len(x), -1)[:, : self._inner].contiguous() for part in (gate, up))
        add(x, gate, 0, "mlp.gate_proj")
        add(x, up, 0, "mlp.up_proj")
        decode.swish_rows(gate.numpy(), up.numpy(), step.inner.numpy())
        self._linear(step, numbers, decode.DOWN, step.inner, output)
        step.hidden.copy_(output + step.hidden)
        add(step.inner, step.hidden, 0, "mlp.down_proj")

    def _linear(self, step: _Step, numbers: Array, at: int, x: Tensor, out: Tensor, width: int = 0) -> None:
        """Writes one product of inputs [T, in] to an output [T, out]; `width`: its width if it is not the product's."""
        parameters = step.parameters.copy()
        parameters[decode.PRODUCT : decode.FIRSTS] = numbers[at : at + 8]
        if width:
            parameters[decode.PRODUCT + decode.OUTPUTS] = width
        parameters[decode.HIDDEN], parameters[decode.PACKED] = x.data_ptr(), out.data_ptr()
        self._team.run(decode.LINEAR, parameters)


class _Step:
    """The memory and the parameters of a step: see cpu/decode.py."""

    def __init__(self, decoder: StreamedDecoder, hidden: Tensor, angles: tuple[Tensor, Tensor], plan: StepPlan) -> None:
        tokens, (heads, key_heads, size) = len(hidden), (decoder._heads, decoder._key_heads, decoder._head_size)
        blocks = -(-max(decoder._size, decoder._inner, heads * size) // BLOCK)
        self.hidden = hidden
        self.packed = torch.empty(tokens, (heads + 2 * key_heads) * size)
        self.attended = torch.empty(tokens, heads * size)
        self.inner = torch.empty(tokens, decoder._inner)
        self.parameters = np.zeros(decode.FIRSTS + decode.REACHES, np.int64)
        self._kept: list[Any] = []
        partition = parts(plan.owners.numpy(), heads, key_heads, tokens <= _FEW_TOKENS)
        self.parameters[[decode.TOKENS, decode.PARTS, decode.SEQUENCES, decode.WIDTH]] = [
            *(tokens, len(partition)),
            *plan.table.shape,
        ]
        self.set(
            {
                decode.HIDDEN: hidden,
                decode.PACKED: self.packed,
                decode.ATTENDED: self.attended,
                decode.INNER: self.inner,
                decode.INPUTS: torch.empty(tokens, 4 * blocks * BLOCK + decode.ROW_GAP, dtype=torch.uint8),
                decode.SCALES: torch.empty(tokens, blocks),
                decode.SUMS: torch.empty(tokens, blocks * BLOCK // HALF, dtype=torch.int32),
                decode.COSINES: angles[0],
                decode.SINES: angles[1],
                decode.TABLE: plan.table,
                decode.OWNERS: plan.owners,
                decode.ENDS: plan.ends,
                decode.PARTITION: torch.from_numpy(partition),
            }
            | {decode.FIRSTS + i: plan.firsts(reach).int() for i, reach in enumerate(decoder._reaches)}
        )

    def set(self, tensors: dict[int, Tensor]) -> None:
        """Sets the addresses of tensors, which it keeps."""
        for at, tensor in tensors.items():
            self._kept.append(tensor)
            self.parameters[at] = tensor.data_ptr()


def _free(module: Any) -> None:
    module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
