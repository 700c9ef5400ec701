"""Compares the log likelihoods of two runs of lm-eval with --log_samples, sample by sample.

Usage: compare_samples.py FOLDER FOLDER LIMIT. Exits with 1 if the samples are not the same, or if two log likelihoods
differ by more than LIMIT nats; prints the largest difference.
"""

import json
import sys
from pathlib import Path


def likelihoods(folder: str) -> dict[tuple[str, int, int], float]:
    """Each choice's log likelihood, by task, document and choice."""
    found = {}
    for path in Path(folder).rglob("samples_*.jsonl"):
        task = path.name.removeprefix("samples_").rpartition("_")[0]
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            for choice, ((value, _),) in enumerate(sample["resps"]):
                found[task, sample["doc_id"], choice] = float(value)
    return found


def main(one: str, other: str, limit: str) -> int:
    first, second = likelihoods(one), likelihoods(other)
    if not first or first.keys() != second.keys():
        print(f"{len(first)} and {len(second)} samples, not the same ones")
        return 1
    largest = max(abs(value - second[key]) for key, value in first.items())
    print(f"{len(first)} log likelihoods differ by {largest:.2g} at most")
    return int(not largest <= float(limit))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
