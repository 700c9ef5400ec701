"""Requests for what takes texts and generates nothing: embeddings, classes, scores, `/tokenize` and `/detokenize`.

Apart from what serves them: the processes that parse large bodies import this, and no tokenizer with it.
"""

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BeforeValidator, Field, field_validator

from headrace.errors import InvalidRequestError
from headrace_transformer.frontends.openai.chat_prompts import ChatPromptRequest
from headrace_transformer.frontends.openai.requests import OpenAIRequest, Prompt, read_prompts
from headrace_transformer.text.tools import ToolUse

MAX_INPUTS = 2048  # OpenAI's limit.
_MAX_IDS = 128 * 1024  # Decoded in about 10 ms.


def _texts(value: Any) -> Any:
    """A text or texts, as a list; raises ValueError."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a string or a list of strings")
    if len(texts) > MAX_INPUTS:
        raise ValueError(f"has {len(texts)} items, at most {MAX_INPUTS} are allowed")
    return texts


Texts = Annotated[list[str], BeforeValidator(_texts)]


class RowsRequest(OpenAIRequest):
    """A request for vectors of texts; see `RowReader` for the fields."""

    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    prompt_name: str | None = None

    def check(self) -> None:
        super().check()
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens: 0 leaves no token of a text; give a number, or -1 for the model's",
                param="truncate_prompt_tokens",
            )


class InputsRequest(RowsRequest):
    """A request about each of its inputs."""

    input: Annotated[list[Prompt], BeforeValidator(partial(read_prompts, limit=MAX_INPUTS))]


class EmbeddingsRequest(InputsRequest):
    """A request for the vectors of its inputs."""

    dimensions: int | None = Field(None, ge=1)
    input_type: str | None = None
    encoding_format: Literal["float", "base64"] = "float"


class ClassifyRequest(InputsRequest):
    """A request for the classes of its inputs; without `use_activation` for the logits."""

    use_activation: bool = True


class ScoreRequest(RowsRequest):
    """A request for the scores of pairs of texts: of one text with each other one, or of those in equal places."""

    text_1: Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: Texts = Field(validation_alias=AliasChoices("text_2", "documents", "data_2"))
    use_activation: bool = True

    def check(self) -> None:
        super().check()
        if len(self.text_1) not in (1, len(self.text_2)):
            raise InvalidRequestError(
                f"text_1 has {len(self.text_1)} texts and text_2 {len(self.text_2)}; give one, or as many",
                param="text_1",
            )


class RerankRequest(RowsRequest):
    """A request for the order of documents by a query; `top_n` 0: all of them."""

    UNSUPPORTED: ClassVar = {"max_chunks_per_doc": (), "max_tokens_per_doc": ()}

    query: str
    documents: list[str]
    top_n: int = Field(0, ge=0)
    return_documents: bool = True
    use_activation: bool = True

    @field_validator("documents", mode="before")
    @classmethod
    def _read_documents(cls, value: Any) -> Any:
        if isinstance(value, list):
            return _texts([one.get("text") if isinstance(one, dict) else one for one in value])
        return value


class TokenizeRequest(ChatPromptRequest):
    """A prompt, or messages to be rendered by the chat template, whose token ids are wanted."""

    UNSUPPORTED: ClassVar = {
        "chat_template": (),
        "documents": ([],),
        "mm_processor_kwargs": (),
    }

    prompt: str | None = None
    add_special_tokens: bool | None = None  # By default for prompts: chat templates write their own.
    return_token_strs: bool = False

    def check(self) -> None:
        super().check()
        if (self.prompt is None) == (not self.messages):
            raise InvalidRequestError("give either a prompt or messages")
        self._tool_use = ToolUse(self.tools) if self.tools else None


class DetokenizeRequest(OpenAIRequest):
    """Token ids whose text is wanted."""

    tokens: list[Prompt]

    @field_validator("tokens", mode="before")
    @classmethod
    def _read_tokens(cls, value: Any) -> Any:
        if not isinstance(value, list) or len(value) > _MAX_IDS:
            raise ValueError(f"must be a list of {_MAX_IDS} token ids at most")
        return read_prompts(value, 1) if value else [[]]

    def check(self) -> None:
        super().check()
        if not isinstance(self.tokens[0], list):
            raise InvalidRequestError("tokens must be token ids", param="tokens")
