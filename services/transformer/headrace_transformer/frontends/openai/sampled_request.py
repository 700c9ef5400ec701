"""What requests for generated text share: its sampling parameters, where it ends, and what it must not have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import field_validator

from headrace.rpc.server.call_context import CallContext
from headrace.sampling import SamplingParameters
from headrace_transformer.frontends.openai.requests import OpenAIRequest
from headrace_transformer.generation.requests import TextRequest, check_bad_words, check_stop

# The parameters of APIs whose answers have no log probabilities, and whose maximum of tokens has a field of its own.
SCORELESS = tuple(
    name for name in SamplingParameters.model_fields if name not in ("max_tokens", "logprobs", "top_logprobs")
)


class SampledRequest(OpenAIRequest):
    """`SAMPLING` are the names of the sampling parameters that are read from the request's undeclared fields."""

    SAMPLING: ClassVar[Sequence[str]] = ()

    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _read_texts(cls, value: Any) -> Any:
        if isinstance(value, str):
            return (value,)
        return tuple(value) if isinstance(value, list) else value

    def trim(self) -> None:
        SamplingParameters().changed(self.sampling())
        check_stop(self.stop)
        check_bad_words(self.bad_words)
        super().trim()

    def text_request(self, call: CallContext, **own: Any) -> TextRequest:
        """One of its generations; `own` is what not all kinds of request have."""
        return TextRequest(
            call=call,
            model=self.model,
            sampling=self.sampling(),
            stop=self.stop,
            bad_words=self.bad_words,
            ignored_fields=self.ignored_fields(),
            **own,
        )

    def sampling(self) -> dict[str, Any]:
        """The sampling parameters given."""
        given = {name: self.extra[name] for name in self.SAMPLING if self.extra.get(name) is not None}
        return given | ({"structured_outputs": self._structured_outputs} if self._structured_outputs else {})
