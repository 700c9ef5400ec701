"""From one predictor to eight: tokens a second of a paced model, with two workers of the transformer.

Each predictor computes the bundled model `storyteller`, and takes 100 ms longer for a step: so its speed is that of a
device, and what is measured is whether the stack before the predictors keeps up, and shares the streams evenly. There
are 8 streams of `Generate` for each predictor, one answer of 64 tokens after another. `share` is the rate divided by
that of one predictor and the number of predictors: 1 where nothing is lost.

Each number of predictors has a stack of its own, one after the other; the rate is the median of three windows.

`python -m bench.scale` writes bench/results/scale.json; 3 minutes.
"""

import asyncio
import random
from statistics import median

import grpc
import uvloop

from bench.runs import PROMPT, machine, parser, running_stack, write
from headrace_protos import headrace_pb2, headrace_pb2_grpc

_PREDICTORS = (1, 2, 4, 8)
_STREAMS = 8  # For each predictor.
_PACE_MS, _TOKENS = 100, 64
_WARM_UP_S, _WINDOW_S, _WINDOWS = 8.0, 8.0, 3


def main() -> None:
    given = parser(__doc__, "scale").parse_args()
    rates = {}
    for predictors in _PREDICTORS:
        rates[predictors] = rate = uvloop.run(_measure(predictors))
        share = rate["tokens_per_s"] / (predictors * rates[1]["tokens_per_s"])
        print(f"{predictors} predictors: {rate['tokens_per_s']:7.1f} tokens/s, share {share:.3f}")
        rate["share"] = share
    write(given.out, {"machine": machine(), "pace_ms": _PACE_MS, "streams": _STREAMS, "predictors": rates})


async def _measure(predictors: int) -> dict[str, float]:
    environment = {"predictor": {"PACE_MS": str(_PACE_MS)}, "transformer": {"TRANSFORMER_WORKERS": "2"}}
    async with (
        running_stack(
            "storyteller", predictor="paced_predictor", predictors=predictors, environment=environment
        ) as stack,
        grpc.aio.insecure_channel(stack.gateway) as channel,
    ):
        tokens = [0]
        callers = [asyncio.create_task(_read(channel, tokens)) for _ in range(predictors * _STREAMS)]
        try:
            await asyncio.sleep(_WARM_UP_S)
            windows = []
            for _ in range(_WINDOWS):
                before = tokens[0]
                await asyncio.sleep(_WINDOW_S)
                windows.append((tokens[0] - before) / _WINDOW_S)
            for caller in callers:
                if caller.done():
                    caller.result()
        finally:
            for caller in callers:
                caller.cancel()
            await asyncio.gather(*callers, return_exceptions=True)
    return {"tokens_per_s": median(windows)}


async def _read(channel: grpc.aio.Channel, tokens: list[int]) -> None:
    """One answer after another; the first one begins at any time, as those of a running service do."""
    stub = headrace_pb2_grpc.TextGenerationStub(channel)
    await asyncio.sleep(random.uniform(0, _WARM_UP_S / 2))  # noqa: S311
    while True:
        request = headrace_pb2.GenerateRequest(
            model="storyteller", prompt=PROMPT, max_tokens=_TOKENS, ignore_eos=True, temperature=1.0
        )
        async for response in stub.Generate(request, timeout=120):
            tokens[0] += len(response.token_ids)


if __name__ == "__main__":
    main()
