"""`Processor`: users' code in the transformer, before and after a model.

    class Upper(Processor):
        inputs = {"text": ("BYTES", [-1])}    the tensors of callers; requests are validated
        outputs = {"text": ("BYTES", [-1])}   the tensors of answers; for metadata
        model = "echo"                        the predictor's model; by default the processor's own name

        def preprocess(self, request):        its tensors go to the model
            return {"x": np.char.upper(request.inputs["text"].astype(str))}

        def postprocess(self, request, outputs):
            return {"text": outputs["x"]}

`TRANSFORMER_PROCESSORS=name=package.module:Class` or `name=folder/file.py:Class` gives it a name that callers use as a
model's. Values are numpy arrays by name: BYTES are object arrays of bytes (text is taken too), BF16 its bits as uint16.

A plain method may block: it runs on one of a few threads, where several requests' calls may run at the same time. An
`async def` runs on the event loop and must not block. `load` runs once, before the first request; an exception prevents
the transformer from starting. `postprocess` runs once for each answer of the model. An exception fails its request
alone, as INTERNAL with the traceback in the log; `raise InvalidRequestError(text)` (headrace.errors) refuses it, as do
the other HeadraceErrors.
"""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headrace.oip.tensors import Array

Tensors = Mapping[str, Any]  # numpy arrays by name.
Declared = Mapping[str, tuple[str, Sequence[int]]]


@dataclass
class ProcessorRequest:
    """A caller's request.

    `inputs` of fixed size are read-only. The `parameters` after `preprocess` go to the model; `state` is the
    processor's own, from `preprocess` to `postprocess`.
    """

    id: str
    inputs: Mapping[str, Array]
    parameters: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)


class Processor:
    """See the module. This class passes everything on unchanged."""

    inputs: ClassVar[Declared | None] = None
    outputs: ClassVar[Declared | None] = None
    model: ClassVar[str] = ""

    def load(self) -> Awaitable[None] | None:
        """Prepares the processor."""

    def preprocess(self, request: ProcessorRequest) -> Tensors | Awaitable[Tensors]:
        """The tensors for the model."""
        return request.inputs

    def postprocess(self, request: ProcessorRequest, outputs: Mapping[str, Array]) -> Tensors | Awaitable[Tensors]:
        """The caller's tensors, from one answer of the model."""
        return outputs
