"""What both trainers share: the command line, the budget of CPU time, the held-out split, saving in bfloat16.

Time is process CPU time, so that a busy machine does not shorten a training. Every split is by a hash of what an
example is about: which examples are held out depends on neither the seed nor the order in which they are drawn.
"""

import argparse
import ctypes
import hashlib
import math
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast


def parse_options(description: str, minutes: float, output: Path) -> argparse.Namespace:
    """Read the command line of a trainer."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--minutes", type=float, default=minutes, help="CPU time to train for, evaluation not counted")
    parser.add_argument("--output", type=Path, default=output, help="folder to write the model and its card to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the data, the weights and the evaluation")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    return parser.parse_args()


def keep_freed_memory() -> None:
    """Ask glibc to reuse big freed buffers; giving them back at every step costs two thirds of the training time."""
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


class CpuBudget:
    """A budget of process CPU time, running from its creation."""

    def __init__(self, minutes: float) -> None:
        self._total_s = minutes * 60.0
        self._start_s = time.process_time()

    @property
    def spent_s(self) -> float:
        """CPU seconds spent so far."""
        return time.process_time() - self._start_s

    @property
    def fraction(self) -> float:
        """Spent part of the budget, from 0 to 1."""
        return min(1.0, self.spent_s / self._total_s)


def schedule(step: int, fraction: float, warmup_steps: int) -> float:
    """Return a linear warm-up by steps times a cosine decay by spent budget, from 1 to 0.03, for the learning rate."""
    decay = 0.5 * (1.0 + math.cos(math.pi * fraction))
    return min(1.0, (step + 1) / warmup_steps) * (0.03 + 0.97 * decay)


def is_held_out(key: str, one_in: int) -> bool:
    """Say whether an example about `key` belongs to the held-out part, about one in `one_in` of all."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % one_in == 0


class Optimizer:
    """Steps all weights of a model, with clipped gradients, each group at its own peak rate times a shared schedule."""

    def __init__(self, model: PreTrainedModel, parts: list[torch.optim.Optimizer], warmup_steps: int) -> None:
        self._model = model
        self._parts = [(part, float(part.param_groups[0]["lr"])) for part in parts]
        self._warmup_steps = warmup_steps
        self.steps = 0

    def step(self, loss: torch.Tensor, fraction: float) -> None:
        """Descend by the gradient of a loss, with that fraction of the budget spent."""
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        factor = schedule(self.steps, fraction, self._warmup_steps)
        for part, peak in self._parts:
            for group in part.param_groups:
                group["lr"] = peak * factor
            part.step()
            part.zero_grad(set_to_none=True)
        self.steps += 1


def save_in_bfloat16(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write weights, configuration and tokenizer to the folder, readable for all."""
    model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # the weights come out readable for their owner alone, who is another in a container


def read_back(auto_model: Any, folder: Path) -> tuple[Any, PreTrainedTokenizerFast]:
    """Load what was saved, as its users will, the bfloat16 weights in float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TypeError(f"{folder} has no fast tokenizer but {type(tokenizer).__name__}")
    return auto_model.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def parameter_count(model: PreTrainedModel) -> int:
    """Count the weights of a model, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def folder_bytes(folder: Path) -> int:
    """Add up the sizes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())
