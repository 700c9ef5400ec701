"""What the catalogue knows of a model: its kind, and what that needs of the transformer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.sampling import ContextLimits, SamplingParameters
from services.transformer.models.processors import RunningProcessor
from services.transformer.predictors.descriptions import OURS, Dialect, PredictorModel
from services.transformer.text.model_text import ModelText
from services.transformer.text.tokenizer import TextTokenizer

VERSION = "1"


@dataclass(frozen=True)
class TextModel:
    """A model that generates text; one that resumes goes on after ids that were given before.

    One that scores prompts gives log probabilities of their tokens.
    """

    name: str
    tokenizer: TextTokenizer
    defaults: SamplingParameters
    limits: ContextLimits
    resumes: bool = True
    dialect: Dialect = OURS
    versions: Sequence[str] = (VERSION,)
    fingerprint: str = ""  # Of its weights; "" where the predictor says none.
    scores_prompts: bool = False


@dataclass(frozen=True)
class RelayedModel:
    """A model that needs no text processing; one that embeds has a tokenizer where its folder has one.

    A direct one is served by a predictor of ours, which can do for a call of its tensors all that the transformer does.
    """

    name: str
    tokenizer: TextTokenizer | None = None
    versions: Sequence[str] = ()  # None known: the predictor will say.
    context_length: int | None = None  # Of a model that embeds: tokens a row at most.
    fingerprint: str = ""
    is_direct: bool = False


@dataclass(frozen=True)
class ProcessedModel:
    """A processor of the user's own, before and after the model of the predictor that it names."""

    name: str
    processor: RunningProcessor
    versions: Sequence[str] = (VERSION,)


Model = TextModel | RelayedModel | ProcessedModel


def model_of(name: str, described: PredictorModel, text: ModelText) -> TextModel | RelayedModel:
    """The model that a predictor describes, with the text side that its files give."""
    if not described.generates:
        tokenizer = text.tokenizer if described.embeds else None
        return _relayed(name, described, tokenizer, described.context_length)
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
    )


def _relayed(
    name: str, described: PredictorModel, tokenizer: TextTokenizer | None = None, context_length: int | None = None
) -> RelayedModel:
    is_ours = described.source is not None  # No other server says from where it has loaded a model.
    return RelayedModel(name, tokenizer, described.versions, context_length, described.fingerprint, is_ours)


def _limits_of(described: PredictorModel, text: ModelText) -> ContextLimits | None:
    """The predictor's own, which may be less than the model's files say."""
    if described.context_length is None:
        return text.limits
    is_encoder_decoder = described.is_encoder_decoder
    if is_encoder_decoder is None:
        is_encoder_decoder = text.limits is not None and text.limits.is_encoder_decoder
    return ContextLimits(described.context_length, is_encoder_decoder)
