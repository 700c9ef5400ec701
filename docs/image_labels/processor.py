"""The transformer's side: the bytes of an image file to pixels, and what the model `pixels` says of them to a label.

Input `image` BYTES [1], any file that Pillow reads; output `label` BYTES [1], and `size` INT32 [2], the
image's width and height.
"""

import io
from typing import ClassVar

import numpy as np
from PIL import Image

from headrace.errors import InvalidRequestError
from headrace.processor import Processor

LABELS = ("red", "green", "blue")
MAX_PIXELS = 4096 * 4096  # Of the file as it says itself: a small file can hold a huge image.
SIDE = 64


class ImageLabels(Processor):
    inputs: ClassVar = {"image": ("BYTES", [1])}
    outputs: ClassVar = {"label": ("BYTES", [1]), "size": ("INT32", [2])}
    model: ClassVar = "pixels"

    def preprocess(self, request):
        try:
            with Image.open(io.BytesIO(request.inputs["image"][0])) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise InvalidRequestError(f"the image has {image.width} x {image.height} pixels, too many")
                request.state["size"] = image.size
                pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE)), dtype=np.float32)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise InvalidRequestError(f"the image cannot be read: {error}") from None
        return {"pixels": pixels / 255}

    def postprocess(self, request, outputs):
        nearest = LABELS[int(outputs["distances"].argmin())]
        return {
            "label": np.array([nearest], dtype=object),
            "size": np.array(request.state["size"], dtype=np.int32),
        }
