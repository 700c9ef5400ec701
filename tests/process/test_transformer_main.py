"""How the transformer starts."""

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


def test_it_does_not_wait_for_torch_which_stays_there_for_processors():
    done = subprocess.run((sys.executable, "-c", STARTS), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
