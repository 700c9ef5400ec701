"""The benchmark's cases and targets, as data.

A case is one model under one load. A target compares two contenders in one case, or compares a measure of headrace
alone with a bound.
"""

from dataclasses import dataclass

HEADRACE = "headrace"
BATCHING = "transformers-batching"
GENERATE = "generate"
VLLM = "vllm"
CT2_FP32 = "ctranslate2-fp32"
CT2_INT8 = "ctranslate2-int8"

PROMPT_IDS = range(10, 8000)  # In every model's vocabulary, without special tokens.

_CAUSAL = (HEADRACE, BATCHING, GENERATE, VLLM, CT2_FP32, CT2_INT8)
_ENCODER_DECODER = (HEADRACE, GENERATE, CT2_FP32, CT2_INT8)

TOKENS_PER_S = "tokens_per_s"
OUTSIDE_FORWARD = "outside_forward"


@dataclass(frozen=True)
class Case:
    """One load: `callers` prompts at once, `batches` times in sequence, so that a measurement takes about a second.

    `command` is the command to the worker; `measure` is the figure of its answer that is compared.
    """

    name: str
    model: str
    callers: int
    contenders: tuple[str, ...]
    prompt_tokens: int = 32
    new_tokens: int = 64
    batches: int = 1
    command: str = "generate"
    measure: str = TOKENS_PER_S


@dataclass(frozen=True)
class Target:
    """A bound on headrace's measure in a case: on its ratio to `peer`'s, or on itself if there is no peer."""

    case: str
    peer: str | None = None
    at_least: float | None = None
    at_most: float | None = None


# Ordered by model, because a model's contenders are started once.
CASES = (
    Case("llama-10M/1", "llama-10M", 1, _CAUSAL, batches=6),
    Case("llama-10M/8", "llama-10M", 8, _CAUSAL, batches=3),
    Case("llama-10M/32", "llama-10M", 32, _CAUSAL, batches=2),
    Case(
        *("llama-10M/outside-forward", "llama-10M", 32, (HEADRACE,)),
        command="outside_forward",
        measure=OUTSIDE_FORWARD,
    ),
    Case("OPT-125M/1", "OPT-125M", 1, _CAUSAL, batches=2),
    Case("OPT-125M/8", "OPT-125M", 8, _CAUSAL),
    Case("OPT-125M/32", "OPT-125M", 32, _CAUSAL),
    Case("OPT-125M/16-prompt-200", "OPT-125M", 16, (HEADRACE, BATCHING), prompt_tokens=200),
    Case("T5-small/1", "T5-small", 1, _ENCODER_DECODER, batches=3),
    Case("T5-small/8", "T5-small", 8, _ENCODER_DECODER, batches=2),
    Case("T5-small/32", "T5-small", 32, _ENCODER_DECODER),
)

_CALLERS = (1, 8, 32)

TARGETS = (
    *(Target(f"llama-10M/{n}", BATCHING, at_least=x) for n, x in zip(_CALLERS, (0.95, 1.2, 2.5), strict=True)),
    *(Target(f"OPT-125M/{n}", BATCHING, at_least=x) for n, x in zip(_CALLERS, (0.95, 1.0, 1.4), strict=True)),
    Target("OPT-125M/16-prompt-200", BATCHING, at_least=1.8),
    Target("llama-10M/32", GENERATE, at_least=1.3),
    *(Target(f"T5-small/{n}", GENERATE, at_least=0.95) for n in _CALLERS),
    *(Target(f"{model}/{n}", VLLM, at_least=0.95) for model in ("llama-10M", "OPT-125M") for n in _CALLERS),
    Target("llama-10M/outside-forward", at_most=0.10),
)
