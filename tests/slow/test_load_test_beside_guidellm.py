"""Locust's `ChatUser` agrees with guidellm under the same closed load: first tokens, time between tokens.

The model is the bundled one at a fixed pace: each token is text that is shown at once. Skipped where guidellm is not
installed, which takes 1.2 GB: `make .venv-tools/guidellm/.installed`.
"""

import asyncio
import csv
import json
import os
import random
import sys
from statistics import median

import pytest

from headrace_runner.settings import ROOT
from tests.support.locust_run import LocustRun, figures_of

GUIDELLM = ROOT / ".venv-tools" / "guidellm" / "bin" / "guidellm"
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not GUIDELLM.exists(), reason="guidellm is missing: make .venv-tools/guidellm/.installed"),
]

PACE = {"PACE_MS": "25"}
USERS, REQUESTS, SECONDS, ROUNDS = 8, 300, 25, 3
NEAR, NEAR_AT_THE_END = 0.10, 0.25
ROW = "chat/completions"


def write_prompts(path):
    """Prompts and lengths for both; lengths vary, so that requests begin at different moments of a step."""
    prompts = ("Once upon a time", "Tell me a story about a fox.", "A king had three sons.")
    lines = [
        json.dumps({"prompt": prompt, "max_tokens": tokens, "output_tokens_count": tokens})
        for tokens in range(8, 25)
        for prompt in prompts
    ]
    random.Random(1).shuffle(lines)
    path.write_text("\n".join(lines * (1 + REQUESTS // len(lines))))


async def guidellm_times(gateway, prompts, folder):
    """Milliseconds: TTFT's p50 and p90, and the mean time between two tokens."""
    output = folder / "guidellm.json"
    process = await asyncio.create_subprocess_exec(
        *(str(GUIDELLM), "run", "--disable-console", "--profile", f"kind=concurrent,streams={USERS}"),
        *(
            "--backend",
            f"kind=openai_http,target=http://{gateway},model=storyteller,request_format=/v1/chat/completions",
        ),
        *("--constraint", f"kind=max_requests,count={REQUESTS}", "--data", f"kind=json_file,path={prompts}"),
        *("--tokenizer", f"kind=hf_auto,model={ROOT / 'models' / 'storyteller'}"),
        *("--output", f"kind=json,path={output}"),
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "GUIDELLM__MAX_WORKER_PROCESSES": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    log, _ = await asyncio.wait_for(process.communicate(), 180)
    assert process.returncode == 0, log.decode()
    [benchmark] = json.loads(output.read_text())["benchmarks"]
    assert not benchmark["requests"]["errored"]
    first, between = (
        benchmark["metrics"][name]["successful"] for name in ("time_to_first_token_ms", "inter_token_latency_ms")
    )
    return {
        "TTFT p50": first["percentiles"]["p50"],
        "TTFT p90": first["percentiles"]["p90"],
        "between tokens": between["mean"],
    }


async def locust_times(gateway, prompts, folder):
    """The same for `ChatUser`. Its gaps are between messages; their sum divided by tokens is guidellm's measure."""
    report = folder / "report.html"
    run = LocustRun()
    fields = ("--prompts-file", str(prompts), "--think-time", "0", "--html", str(report), "--csv", str(folder / "run"))
    await run.run(gateway, *fields, "-u", str(USERS), "-r", "100", "-t", f"{SECONDS}s", "ChatUser")
    assert run.status == 0, run.output
    figures = figures_of(report)
    [row] = figures["rows"]
    with (folder / "run_stats.csv").open() as file:
        stats = {line["Name"]: line for line in csv.DictReader(file)}
    gaps, firsts = stats[f"{ROW} gap"], stats[f"{ROW} TTFT"]
    tokens = row["tokens"] * figures["window_s"]
    sum_ms = float(gaps["Average Response Time"]) * int(gaps["Request Count"])
    return {
        "TTFT p50": row["ttft"]["p50"],
        "TTFT p90": row["ttft"]["p90"],
        "between tokens": sum_ms / (tokens - int(firsts["Request Count"])),
    }


async def test_first_tokens_and_times_between_tokens_agree(new_stack, tmp_path):
    """Both run in turns; the median of the rounds counts."""
    stack = await new_stack(
        models="storyteller=models/storyteller",
        commands={"predictor": (sys.executable, "-m", "bench.paced_predictor")},
        environment={"predictor": PACE},
    )
    prompts = tmp_path / "prompts.jsonl"
    write_prompts(prompts)
    rounds = []
    for _ in range(ROUNDS):
        theirs = await guidellm_times(stack.gateway, prompts, tmp_path)
        ours = await locust_times(stack.gateway, prompts, tmp_path)
        rounds.append({name: ours[name] / theirs[name] for name in ours})
        for name in ours:
            print(f"{name}: Locust {ours[name]:.2f} ms, guidellm {theirs[name]:.2f} ms, {rounds[-1][name]:.3f}")
    ratios = {name: median(one[name] for one in rounds) for name in rounds[0]}
    print({name: round(ratio, 3) for name, ratio in ratios.items()})
    for name, ratio in ratios.items():
        assert abs(ratio - 1) <= (NEAR_AT_THE_END if "p90" in name else NEAR), (name, ratios)
