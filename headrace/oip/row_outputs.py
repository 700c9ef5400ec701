"""What encoders and classifiers make of rows of token ids, between predictor and transformer.

The output is `embedding` FP32 [B, size] or `logits` FP32 [B, labels]. The parameters of a classifier's ModelConfig have
the names of its labels, as a JSON list, and the function that makes probabilities or scores of its logits.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

EMBEDDING, LOGITS = "embedding", "logits"
TOKEN_TYPE_IDS = "token_type_ids"  # noqa: S105  # no password
POOLING_MASK = "pooling_mask"  # Input of embedding models that leave the tokens of a prompt out of the pooling.
LABELS, ACTIVATION = "labels", "activation"

Vector = NDArray[np.float32]


class Activation(StrEnum):
    IDENTITY = "identity"
    SIGMOID = "sigmoid"  # Each label by itself.
    SOFTMAX = "softmax"  # One label of all.

    def __call__(self, logits: Vector) -> Vector:
        """The probabilities, or scores, of a row's logits [labels]."""
        if self is Activation.IDENTITY:
            return logits
        if self is Activation.SIGMOID:
            return np.exp(-np.logaddexp(0, -logits))
        powers = np.exp(logits - logits.max())
        return np.asarray(powers / powers.sum())
