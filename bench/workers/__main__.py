"""`python -m bench.workers MODULE FOLDER [ARGUMENTS]`: runs one contender of this folder; see `protocol`."""

import os
import sys
from importlib import import_module

from bench.workers.protocol import serve

if __name__ == "__main__":
    # Before any library is imported, because some print at import.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    contender = import_module(f"bench.workers.{sys.argv[1]}").create(*sys.argv[2:])
    try:
        serve(contender, answers)
    finally:
        contender.close()
