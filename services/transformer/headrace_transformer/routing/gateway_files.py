"""Files that the transformer keeps for the gateway; each is replaced as a whole, and several transformers may share it.

The models whose calls need not pass the transformer, a name a line: the gateway sends their ModelInfer calls straight
to a predictor (envoy/first_message.lua), which answers and records them as the transformer would.

The predictors' addresses, where a service's SRV records have them: Envoy resolves names by itself, but no SRV records,
so it reads this file as a cluster's endpoints, a DiscoveryResponse of its API. Records of a higher priority number are
endpoints of a lower Envoy priority, which get calls while none of those before is healthy.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from headrace.endpoints import host_and_port
from headrace.files import replace_file
from headrace_transformer.predictors.link.links import Links
from headrace_transformer.routing.router import Router

logger = logging.getLogger(__name__)

_INTERVAL_S, _RETRY_S = 1.0, 10.0
# In percent of the healthy hosts, so that a priority with one of at most a hundred healthy passes no call on.
_OVERPROVISIONING = 10_000
_HOST = "socket_address"


async def list_direct_models(path: Path, router: Router) -> None:
    """Keeps the file equal to what the router knows, until cancelled."""
    written: list[str] | None = None
    while True:
        changed = router.catalogue.changed
        names = sorted(router.direct_names)
        if names != written:
            try:
                await asyncio.to_thread(replace_file, path, "".join(f"{name}\n" for name in names))
                written = names
            except OSError as error:
                logger.warning("%s cannot be written, all calls go through the transformer: %s", path, error.strerror)
                await asyncio.sleep(_RETRY_S)
                continue
        await changed.wait()


async def list_endpoints(path: Path, links: Links) -> None:
    """Keeps the file equal to the addresses, until cancelled; if none is left, to the last ones."""
    written: Mapping[str, int] | None = None
    while True:
        listed, text = links.listed, await asyncio.to_thread(_text, path)
        is_due = (listed != written or _HOST not in text) if listed else not text
        if is_due:
            try:
                await asyncio.to_thread(replace_file, path, endpoints_file(listed))
                written = listed
            except OSError as error:
                logger.warning("%s cannot be written, the gateway keeps its predictors: %s", path, error.strerror)
                await asyncio.sleep(_RETRY_S)
        await asyncio.sleep(_INTERVAL_S)


def _text(path: Path) -> str:
    """The file's contents, which the runner may have replaced by a list without addresses; "" without a file."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def endpoints_file(ranks: Mapping[str, int]) -> str:
    """The file's contents for addresses with their ranks."""
    in_order = sorted(ranks, key=lambda address: (ranks[address], address))
    groups = [list(addresses) for _, addresses in groupby(in_order, lambda address: ranks[address])]
    resource = {
        "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": "predictor",
        "endpoints": [
            # Envoy's priorities have no gaps.
            {"priority": priority, "lb_endpoints": list(map(_endpoint, addresses))}
            for priority, addresses in enumerate(groups)
        ],
        "policy": {"overprovisioning_factor": _OVERPROVISIONING},
    }
    return json.dumps({"resources": [resource]}, indent=1)


def _endpoint(address: str) -> dict[str, object]:
    host, port = host_and_port(address)
    return {"endpoint": {"address": {_HOST: {"address": host, "port_value": port}}}}
