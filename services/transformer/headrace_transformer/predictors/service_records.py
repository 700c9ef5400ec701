"""The SRV records of a service (RFC 2782), whose form is `_name._tcp.domain`.

The name servers and search domains are those of /etc/resolv.conf. Weights are not read: the transformer knows the load
of each predictor.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby

from headrace.threads import run_in_daemon_thread


async def service_records(service: str) -> list[list[str]]:
    """The host:port of each record, those of one priority together, the lowest priority number first.

    Empty where there is no such service. Raises OSError if no name server answers within 5 s.
    """
    return await run_in_daemon_thread(f"resolve-{service}", partial(_look_up, service))


def _look_up(service: str) -> list[list[str]]:
    # Only a stack with a service pays for the import.
    from dns.exception import DNSException
    from dns.resolver import NXDOMAIN, NoAnswer, Resolver

    try:
        answer = Resolver().resolve(service, "SRV", search=True)
    except (NXDOMAIN, NoAnswer):
        return []
    except DNSException as error:
        raise OSError(str(error)) from None
    records = sorted((record.priority, record.target.to_text(omit_final_dot=True), record.port) for record in answer)
    present = [record for record in records if record[1] != "."]  # "." means that the service is not offered.
    return [
        [f"{host}:{port}" for _, host, port in same_priority]
        for _, same_priority in groupby(present, lambda record: record[0])
    ]
