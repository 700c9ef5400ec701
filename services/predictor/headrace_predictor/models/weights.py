"""Loads weights of transformers' models: complete, onto one device, from safetensors or GGUF."""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.models.auto import AutoConfig
from transformers.utils.logging import disable_progress_bar

from headrace.errors import StartupError
from headrace.models.gguf.folder import WEIGHTS_FILE
from headrace.models.gguf.reader import read_gguf
from headrace.models.sources import read_config
from headrace.models.weight_headers import weight_bytes, weight_files
from headrace_predictor.engine.cpu.grouped import padded_bytes
from headrace_predictor.engine.cpu.packed_linear import packs
from headrace_predictor.engine.runners.streamed import GATED_MODELS
from headrace_predictor.engine.runners.unread import StoredMatrix, leave_unread, read_weights
from headrace_predictor.models import gguf_weights, quantised_checkpoints
from headrace_predictor.models.gguf_weights import has_gguf
from headrace_predictor.models.quantised_checkpoints import METHODS, quantisation_of
from headrace_predictor.settings import PredictorSettings

# These modules log long tables of missing weights, which Headrace logs in one line, and warnings on tensor parallelism,
# which does not apply to a model on one device.
_QUIET_LOGGERS = ("transformers.modeling_utils", "transformers.distributed.tensor_parallel")

_NAMED = 3
# Masks and angles of older files, states of other libraries, scales of caches: what no class needs.
_UNNEEDED = re.compile(
    r"(.*[._])?(inv_freq|masked_bias|causal_mask|_extra_state|[qkv]_scale|(attn|attention)\.bias"
    r"|EncDecAttention\.relative_attention_bias\.weight)"
)
_SCALE = re.compile(r"SCB|scales|scale_weight|(weight|gate_up_proj|down_proj)_scales?(_inv|_2)?")
# Smaller models are faster without a helper on the core that the services need. More cores than a few do not make the
# reading of weights faster.
_LARGE_BYTES, _FEW_CORES = 128 << 20, 4
_BESIDE_LAYERS = re.compile("norm|Norm|embed|wpe|ln_")
_INDEX = re.compile(r"\.(\d+)(?=\.)")
_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def prepare_torch(settings: PredictorSettings, weights_bytes: int = 0) -> torch.device:
    """Sets the number of this process's threads; returns the device of its models; raises StartupError.

    `weights_bytes`: of the only model of this process, 0 in a process that does other work too.
    """
    cores = _default_threads()
    takes_all = weights_bytes >= _LARGE_BYTES and cores <= _FEW_CORES
    torch.set_num_threads(settings.threads or (cores if takes_all else max(1, cores - 1)))
    return choose_device(settings.device)


@cache
def _default_threads() -> int:
    """The number of threads before it was set."""
    return torch.get_num_threads()


def choose_device(setting: str) -> torch.device:
    """Resolves `PREDICTOR_DEVICE` on this machine."""
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise StartupError("DEVICE=cuda, but torch finds no CUDA device; install its CUDA build or set DEVICE=cpu")
    return torch.device("cuda" if setting != "cpu" and available else "cpu")


def multiplies_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 numbers.

    It is asked and not timed: each predictor of a machine must find the same, however busy the machine is, because
    predictors with unlike numbers cannot continue each other's answers.
    """
    has = torch.cpu.get_capabilities()
    return packs(torch.device("cpu"), torch.bfloat16) and bool(has.get("avx512_bf16") or has.get("bf16"))


def load_weights(name: str, folder: Path, auto: Any, dtype: str, device: torch.device, optional: str = "-") -> Any:
    """Returns the model in a folder, loaded by `auto`, one of transformers' Auto classes; raises StartupError.

    Every weight must be there, in the shape that config.json makes, but those whose names begin with `optional`.
    """
    for logger in _QUIET_LOGGERS:
        logging.getLogger(logger).setLevel(logging.ERROR)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # Of the weights' reading, which takes seconds; a download's is shown.
    own = _DTYPES.get(dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)
    config = _config(folder, auto)
    _check_positions(name, folder, config.get_text_config(decoder=True))
    for one in (config, config.get_text_config(decoder=True), config.get_text_config(encoder=True)):
        one.return_dict = True
    if has_gguf(folder) or quantisation_of(config):
        model, info = _from_quantised(folder, auto._model_mapping[type(config)], config, own)
        if device.type != "cpu":
            read_weights(model)
    else:
        model, info = _from_pretrained(name, folder, auto, config, dtype, own if device.type == "cpu" else "auto")
    if mismatched := sorted(info["mismatched_keys"]):
        shapes = [f"{key} is {list(there)}, config.json makes it {list(wanted)}" for key, there, wanted in mismatched]
        raise StartupError(f"model {name}: the weights in {folder} do not fit: {_some(shapes)}")
    if missing := [key for key in sorted(info["missing_keys"]) if not key.startswith(optional)]:
        raise StartupError(f"model {name}: {folder} lacks {_some(missing)}, without which its answers are random")
    if left_out := [key for key in sorted(info["unexpected_keys"]) if _is_left_out(model, folder, key)]:
        raise StartupError(
            f"model {name}: {folder} has {_some(left_out)}, without which {type(model).__name__} would compute; does "
            "config.json lack attention_bias, quantization_config or the like?"
        )
    if getattr(model.config, "attention_type", None) == "block_sparse" and not model.config.is_decoder:
        raise StartupError(
            f"model {name}: after a short text transformers leaves block-sparse attention, so answers to long ones "
            "would change; set attention_type to original_full in config.json"
        )
    _check_room(name, model, device)
    model = model.to(device).eval()
    # Weights that were converted have memory of their own already.
    model.are_pages_of_files = weight_bytes(folder)[_STORED.get(model.dtype, "")] > 0
    _check_devices(name, model, device)
    return model


def _config(folder: Path, auto: Any) -> Any:
    """The configuration of the class that `auto` loads, which may be the decoder alone of a model of images.

    Either may say that the head is tied, and the whole model's has how its weights are quantised.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    text = config.get_text_config(decoder=True)
    own, of_text = (auto._model_mapping.get(type(one), None) for one in (config, text))
    if isinstance(config, type(text)) or own is None or own is not of_text:
        return config
    text.tie_word_embeddings = text.tie_word_embeddings or getattr(config, "tie_word_embeddings", False)
    if hasattr(config, "quantization_config"):
        text.quantization_config = config.quantization_config
    return text


def _from_quantised(folder: Path, kind: Any, config: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model of transformers' class `kind`, and transformers' report; raises ValueError.

    Modules whose weights are quantised have them only after `read_weights` of runners/unread.py; `unread_bytes` is the
    memory that these will take. A tensor of a GGUF file that the class lacks is refused.
    """
    state: dict[str, Tensor]
    unread: Mapping[str, StoredMatrix]
    source = folder
    if is_gguf := has_gguf(folder):
        file = read_gguf(folder / WEIGHTS_FILE)
        source = file.path
        state, unread = gguf_weights.read_state(file, config, dtype)
    else:
        state, unread = quantised_checkpoints.read_state(folder, config, dtype, keeps_integers=kind in GATED_MODELS)
        del config.quantization_config
    matrices = {name: matrix.grouped for name, matrix in unread.items()}
    for name, matrix in matrices.items():
        state[f"{name}.weight"] = torch.zeros(1, dtype=dtype).expand(matrix.outputs, matrix.inputs)
    model, report = kind.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    if is_gguf and report["unexpected_keys"]:
        raise ValueError(f"{source} has {min(report['unexpected_keys'])}, which {kind.__name__} lacks")
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


def _from_pretrained(name: str, folder: Path, auto: Any, config: Any, dtype: str, own: Any) -> tuple[Any, Any]:
    try:
        return auto.from_pretrained(  # type: ignore[no-any-return]
            folder,
            config=config,
            dtype=_DTYPES.get(dtype, own),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # They are refused here, by name.
        )
    except KeyError as error:  # Of a rope_type, for example.
        raise StartupError(f"model {name}: of config.json transformers refuses {error}") from None
    except (ImportError, RuntimeError, ValueError) as error:
        stated = getattr(config, "quantization_config", None)
        if stated is None and "automatic conversion of the weights" in str(error):
            raise StartupError(
                f"model {name}: of the weights in {folder} transformers cannot make those of its class; does a layer "
                "lack an expert, or has one another shape?"
            ) from None
        if stated is None:
            raise
        method = stated.get("quant_method") if isinstance(stated, dict) else stated.quant_method
        raise StartupError(
            f"model {name} is quantised by {method}, which is not served: {str(error).splitlines()[0]}; take its "
            f"unquantised weights, a GGUF file, or a checkpoint of {', '.join(METHODS)}"
        ) from None


def _is_left_out(model: Any, folder: Path, key: str) -> bool:
    """Whether a tensor that the class has no place for changes what the model computes: it is in a layer, a norm or an
    embedding beside them, a scale of quantised weights, or a layer's bias; some tools write zeros.
    """
    if _UNNEEDED.fullmatch(key):
        return False
    modules = {_path(model, path): module for path, module in model.named_modules()}
    layer, _, part = key.rpartition(".")
    module, (holder, _, name) = modules.get(_path(model, layer)), layer.rpartition(".")
    if part == "bias" and getattr(module, "weight", None) is not None:
        return _has_numbers(folder, key)
    if module is not None and _SCALE.fullmatch(part):
        return True
    if holder and module is None and _path(model, holder) in modules and _BESIDE_LAYERS.search(name):
        return True
    return _is_in_layer(model.config, modules, _path(model, key))


def _path(model: Any, name: str) -> str:
    """A name that is the same in files of the decoder or the encoder alone, of a model with a head, and of images."""
    prefix = model.base_model_prefix
    return "" if name == prefix else name.removeprefix(f"{prefix}.").replace("language_model.", "")


def _is_in_layer(config: Any, modules: Mapping[str, Any], key: str) -> bool:
    """Those that predict tokens beyond the next one are behind the layers that the configuration counts."""
    further = getattr(config.get_text_config(), "num_nextn_predict_layers", 0) or 0
    for found in reversed([*_INDEX.finditer(key)]):
        if isinstance(layers := modules.get(key[: found.start()]), nn.ModuleList):
            return not len(layers) <= int(found[1]) < len(layers) + further
    return False


def _has_numbers(folder: Path, key: str) -> bool:
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            if key in file.keys():  # noqa: SIM118
                return bool(file.get_tensor(key).any())
    return False


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def dtype_name(model: Any) -> str:
    """The model's own dtype in torch's notation, such as float32."""
    return str(model.dtype).removeprefix("torch.")


def _check_positions(name: str, folder: Path, config: Any) -> None:
    """Checks the numbers by which positions are rotated: transformers reads them unchecked, and leaves some out."""
    own = getattr(config, "rope_parameters", None) or {}
    parts = (own, *(part for part in own.values() if isinstance(part, dict)))
    for part in parts:
        for key, value in part.items():
            if isinstance(value, str) and not key.endswith("type"):
                raise StartupError(f"model {name}: {key} in config.json is the text {value!r}, not a number")
    stated = read_config(folder, "config.json")
    stated = stated.get("text_config") or stated
    inner = (part for part in stated.values() if isinstance(part, dict) and not part.get("model_type"))
    bases = {part["rope_theta"] for part in inner if "rope_theta" in part and part.get("rope", True)}
    unread = bases - {part.get("rope_theta") for part in parts}
    if unread:  # DBRX's.
        raise StartupError(f"model {name}: transformers leaves out rope_theta={unread.pop()} in config.json")
    width, is_read = stated.get("rotary_dim"), hasattr(type(config), "rotary_dim") or "partial_rotary_factor" in own
    if own and not is_read and width not in (None, stated.get("head_dim")):  # MiniMax's.
        raise StartupError(f"model {name}: transformers leaves out rotary_dim={width} in config.json")


def _check_room(name: str, model: Any, device: torch.device) -> None:
    """Checks that the weights, which go from their file straight to a GPU, have room there."""
    if device.type == "cuda":
        size = sum(tensor.numel() * tensor.itemsize for tensor in model.parameters())
        free, total = torch.cuda.mem_get_info(device)
        if size > free:
            raise StartupError(
                f"model {name}: its weights are {size / 1e9:.3g} GB, and {free / 1e9:.3g} of the GPU's "
                f"{total / 1e9:.3g} GB are free"
            )


def _check_devices(name: str, model: Any, device: torch.device) -> None:
    """Checks that all of the model is on the device: otherwise only the requests that reach the rest would fail."""
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for part, tensor in tensors:
            if tensor.device.type != device.type:
                raise StartupError(f"model {name}: {kind} {part} is on {tensor.device}, not on {device}")
