"""The start of the transformer."""

import subprocess
import sys

STARTS = """
import sys
from services.transformer import __main__ as transformer
transformer._leave_out_torch()
import services.transformer.models.catalogue, services.transformer.text.tokenizer
assert "torch" not in sys.modules
import torch
"""


def test_the_start_does_not_import_torch_and_processors_can():
    done = subprocess.run((sys.executable, "-c", STARTS), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
