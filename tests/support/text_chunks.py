"""Text chunks of the pipeline, as tests state them."""

from headrace_protos.headrace_pb2 import Usage
from headrace_transformer.generation.chunks import End, Origin, TextChunk
from headrace_transformer.predictors import TokenChunk
from headrace_transformer.text.answer_parts import Answer


def text_chunk(
    text="", ids=(), reason=None, *, model=None, prompt_ids=(), usage=None, parts=None, elapsed_s=0.0, **tokens
):
    """The last one of an answer with a `reason`; `tokens` are fields of its TokenChunk."""
    return TextChunk(
        text=text,
        tokens=TokenChunk(token_ids=list(ids), **tokens),
        origin=Origin(model, prompt_ids),
        elapsed_s=elapsed_s,
        answer=None if parts is None else Answer(parts),
        end=None if reason is None else End(reason, usage or Usage()),
    )
