"""The start of the transformer."""

import subprocess
import sys

STARTS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from headrace.models.sources import ModelSource
from headrace_transformer import __main__
from headrace_transformer.models import catalogue
from headrace_transformer.text.model_text import read_text
text = read_text(ModelSource("storyteller", "models/storyteller"), ThreadPoolExecutor(1))
assert text.tokenizer.has_chat_template
assert not {"torch", "transformers"} & set(sys.modules)
"""


def test_the_start_imports_neither_torch_nor_transformers():
    done = subprocess.run((sys.executable, "-c", STARTS), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
