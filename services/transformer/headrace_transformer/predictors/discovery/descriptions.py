"""A predictor's description of a model, from its metadata and, if it has one, its configuration.

Another server need not have ModelConfig, nor our parameters in it: missing values are None.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.models.generation_config import IGNORED_FIELDS
from headrace.oip.model_description import (
    ACTIVATION,
    EMBEDDING,
    FINGERPRINT,
    INPUT_IDS,
    LABELS,
    LOGITS,
    OUTPUT_IDS,
    Activation,
)
from headrace.oip.prompt_scores import OUTPUTS as PROMPT_OUTPUTS
from headrace.sampling import LENGTHS
from headrace_protos import inference_pb2 as pb
from headrace_protos import model_config_pb2


@dataclass(frozen=True)
class Dialect:
    """How a predictor takes token ids, [N] or batched as [1, N], and whether its last answer has a finish_reason.

    Without a reason, a generation is complete when its call ends without an error.
    """

    datatype: str = "INT32"
    batched: bool = False
    reports_reason: bool = True


OURS = Dialect()

# How a predictor of ours runs a model, by its own report; passed on to callers.
_RUN = ("architecture", "device", "dtype", "runner", "parameter_count", "weights_bytes", "cache_bytes")
FACTS = (*_RUN, *LENGTHS, IGNORED_FIELDS)  # The last ones are the generation config's.


@dataclass(frozen=True)
class PredictorModel:
    """One model at a predictor; `source` is a folder or hub id as `MODELS` names it, `fingerprint` that of its weights,
    `base` the name and source of the model whose adapter it is, `facts` are those of FACTS that it states.
    `labels` are those of a classifier, empty if the predictor does not name them.
    """

    name: str
    versions: Sequence[str]
    inputs: frozenset[str]
    outputs: frozenset[str]
    context_length: int | None = None
    is_encoder_decoder: bool | None = None
    source: str | None = None
    base: tuple[str, str] | None = None
    fingerprint: str = ""
    dialect: Dialect = OURS
    facts: Mapping[str, str] = field(default_factory=dict)
    labels: Sequence[str] = ()
    activation: Activation = Activation.SOFTMAX

    @property
    def generates(self) -> bool:
        """It makes token ids of token ids."""
        return INPUT_IDS in self.inputs and OUTPUT_IDS in self.outputs

    @property
    def resumes(self) -> bool:
        """It continues after ids that it, or another replica, generated before; see resuming.py."""
        return self.generates and OUTPUT_IDS in self.inputs and self.dialect == OURS

    @property
    def scores_prompts(self) -> bool:
        """It gives log probabilities of prompts, see headrace/oip/prompt_scores.py."""
        return self.resumes and self.outputs.issuperset(PROMPT_OUTPUTS)

    @property
    def row_output(self) -> str | None:
        """The output of a model that makes a vector of a row of ids, see headrace/oip/model_description.py."""
        found = [name for name in (EMBEDDING, LOGITS) if name in self.outputs]
        return found[0] if found and INPUT_IDS in self.inputs and not self.generates else None


def described(metadata: pb.ModelMetadataResponse, config: model_config_pb2.ModelConfig | None) -> PredictorModel:
    parameters = {key: value.string_value for key, value in config.parameters.items()} if config is not None else {}
    length = parameters.get("context_length", "")
    is_ours = length.isdecimal()
    return PredictorModel(
        name=metadata.name,
        versions=tuple(metadata.versions),
        inputs=frozenset(tensor.name for tensor in metadata.inputs),
        outputs=frozenset(tensor.name for tensor in metadata.outputs),
        context_length=int(length) if is_ours else None,
        is_encoder_decoder={"true": True, "false": False}.get(parameters.get("is_encoder_decoder", "")),
        source=parameters.get("source") or None,
        base=(parameters["base"], parameters["base_source"]) if is_ours and "base" in parameters else None,
        fingerprint=parameters.get(FINGERPRINT, ""),
        dialect=OURS if is_ours else _dialect(metadata),
        facts={name: parameters[name] for name in FACTS if name in parameters} if is_ours else {},
        labels=tuple(json.loads(parameters.get(LABELS, "[]"))) if is_ours else (),
        activation=Activation(parameters[ACTIVATION]) if is_ours and ACTIVATION in parameters else Activation.SOFTMAX,
    )


def _dialect(metadata: pb.ModelMetadataResponse) -> Dialect:
    ids = next((tensor for tensor in metadata.inputs if tensor.name == INPUT_IDS), None)
    if ids is None:
        return Dialect(reports_reason=False)
    return Dialect(ids.datatype, batched=len(ids.shape) == 2, reports_reason=False)
