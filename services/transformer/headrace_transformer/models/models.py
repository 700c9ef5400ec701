"""Models in the catalogue: their kinds, and the data that the transformer needs for each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.models.sentence_files import SentenceFiles
from headrace.oip.model_description import POOLING_MASK, TOKEN_TYPE_IDS, Activation
from headrace.sampling import ContextLimits, SamplingParameters
from headrace_transformer.models.processors import RunningProcessor
from headrace_transformer.predictors.discovery.descriptions import OURS, Dialect, PredictorModel
from headrace_transformer.predictors.engines.pools import EnginePool
from headrace_transformer.text.model_text import ModelText
from headrace_transformer.text.tokenizer import TextTokenizer

VERSION = "1"


@dataclass(frozen=True)
class TextModel:
    """A model that generates text.

    `resumes`: it can continue after earlier ids. `scores_prompts`: it has log probabilities of prompts.
    """

    name: str
    tokenizer: TextTokenizer
    defaults: SamplingParameters
    limits: ContextLimits
    resumes: bool = True
    dialect: Dialect = OURS
    versions: Sequence[str] = (VERSION,)
    fingerprint: str = ""  # Of its weights; "" if the predictor reports none.
    scores_prompts: bool = False
    facts: Mapping[str, str] = field(default_factory=dict)  # See predictors/discovery/descriptions.py.
    base: str = ""  # The name of the model whose adapter it is.
    pool: EnginePool | None = None  # The engines that generate, None for predictors.


@dataclass(frozen=True)
class RowModel:
    """How a model makes a vector of a text, or of a pair of texts: see headrace/oip/model_description.py."""

    tokenizer: TextTokenizer
    files: SentenceFiles
    output: str
    context_length: int | None = None  # Tokens of a row at most; None if the predictor reports no limit.
    takes_types: bool = False  # It distinguishes the texts of a pair by token_type_ids.
    takes_pooling_mask: bool = False
    labels: Sequence[str] = ()
    activation: Activation = Activation.SOFTMAX


@dataclass(frozen=True)
class RelayedModel:
    """A model that needs no text processing; an encoder or classifier takes text too, if its folder has a tokenizer.

    A direct one is served by our predictor, which can answer calls without the transformer. One that `generates` has
    token ids for its callers, because its folder has no tokenizer.
    """

    name: str
    versions: Sequence[str] = ()  # Empty: the predictor checks the version.
    fingerprint: str = ""
    is_direct: bool = False
    rows: RowModel | None = None
    generates: bool = False


@dataclass(frozen=True)
class ProcessedModel:
    """A processor of the user's own, before and after the model of the predictor that it names."""

    name: str
    processor: RunningProcessor
    versions: Sequence[str] = (VERSION,)


@dataclass(frozen=True)
class PassedModel:
    """A model at engines whose requests pass as they are: its tokenizer is not here, or its engine takes no ids."""

    name: str
    pool: EnginePool
    versions: Sequence[str] = (VERSION,)
    fingerprint: str = ""


Model = TextModel | RelayedModel | ProcessedModel | PassedModel


def engine_model(pool: EnginePool, described: PredictorModel, text: ModelText) -> TextModel | PassedModel:
    """The model that engines serve, with the text side that its files give.

    Without max_tokens an answer has what the context has left, as engines have it.
    """
    name, limits = described.name, _limits_of(described, text)
    if text.tokenizer is None or limits is None or not described.generates:
        return PassedModel(name, pool)
    pool.token_bytes = text.tokenizer.token_bytes
    limits = replace(limits, max_new_tokens=limits.max_new_tokens or limits.context_length, max_length=None)
    return TextModel(name, text.tokenizer, text.defaults, limits, resumes=True, facts=described.facts, pool=pool)


def model_of(name: str, described: PredictorModel, text: ModelText) -> TextModel | RelayedModel:
    """The model that a predictor describes, with the text side that its files give."""
    if not described.generates:
        return _relayed(name, described, text)
    limits = _limits_of(described, text)
    if text.tokenizer is None or limits is None:
        return _relayed(name, described)
    return TextModel(
        name=name,
        tokenizer=text.tokenizer,
        defaults=text.defaults,
        limits=limits,
        resumes=described.resumes,
        dialect=described.dialect,
        versions=described.versions or (VERSION,),
        fingerprint=described.fingerprint,
        scores_prompts=described.scores_prompts,
        facts=described.facts,
        base=described.base[0] if described.base is not None else "",
    )


def _relayed(name: str, described: PredictorModel, text: ModelText | None = None) -> RelayedModel:
    is_ours = described.source is not None  # Only our predictors report the source of a model.
    rows = None
    if text is not None and text.tokenizer is not None and text.rows is not None and described.row_output is not None:
        rows = RowModel(
            text.tokenizer,
            text.rows,
            described.row_output,
            described.context_length,
            takes_types=TOKEN_TYPE_IDS in described.inputs and text.tokenizer.makes_types,
            takes_pooling_mask=POOLING_MASK in described.inputs,
            labels=described.labels,
            activation=described.activation,
        )
    return RelayedModel(name, described.versions, described.fingerprint, is_ours, rows, described.generates)


def _limits_of(described: PredictorModel, text: ModelText) -> ContextLimits | None:
    """The predictor's limits, which may be lower than those in the model's files."""
    if described.context_length is None:
        return text.limits
    is_encoder_decoder = described.is_encoder_decoder
    if is_encoder_decoder is None:
        is_encoder_decoder = text.limits is not None and text.limits.is_encoder_decoder
    limits = ContextLimits(described.context_length, is_encoder_decoder)
    return limits if text.limits is None else limits.with_defaults(vars(text.limits))
