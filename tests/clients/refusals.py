"""How a client of Triton's is refused."""

from tritonclient.utils import InferenceServerException


def refused(status, text, call, *arguments, **named):
    """The call fails with a status, by its number or its name, and a message that has the text."""
    refusal = None
    try:
        call(*arguments, **named)
    except InferenceServerException as error:
        refusal = error
    assert refusal is not None, f"was not refused: {text}"
    assert str(refusal.status()).removeprefix("StatusCode.").startswith(status), refusal
    assert text in refusal.message(), refusal
