"""Checks of refusals by Triton's clients."""

from tritonclient.utils import InferenceServerException


def refused(status, text, call, *arguments, **named):
    """Checks that the call fails with a status, by its number or name, and a message with the text."""
    refusal = None
    try:
        call(*arguments, **named)
    except InferenceServerException as error:
        refusal = error
    assert refusal is not None, f"was not refused: {text}"
    assert str(refusal.status()).removeprefix("StatusCode.").startswith(status), refusal
    assert text in refusal.message(), refusal
