"""Clients and their policies: the gateway checks the key of a call and passes both on with the call.

The gateway sets the metadata `x-headrace-client`, a name, and `x-headrace-policy`, a Policy as JSON, and removes values
that a caller sent under these names. Without keys there is neither: every caller is ANYONE, which may do everything.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv6Address, IPv6Network
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.errors import ForbiddenError, UnauthenticatedError

CLIENT = "x-headrace-client"
POLICY = "x-headrace-policy"
NAME_PATTERN = r"^[A-Za-z0-9._:@|-]{1,128}$"  # Of a client's name; envoy/callers.lua has it for the subjects of tokens.
_FORWARDED_FOR = "x-forwarded-for"


class Policy(BaseModel):
    """The rights and limits of a client; None: no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["user", "admin"] = "user"
    models: frozenset[str] | None = Field(None, description="The models that the client may use; None: all.")
    weight: float = Field(1.0, gt=0, le=1000, allow_inf_nan=False, description="Its share where clients compete.")
    requests_per_second: int | None = Field(None, ge=1, le=10_000, description="Maximum of calls in a second.")
    requests_per_minute: int | None = Field(None, ge=1, description="Maximum of calls in a minute.")
    tokens_per_minute: int | None = Field(None, ge=1, description="Tokens of prompts and completions together.")
    tokens_per_month: int | None = Field(None, ge=1, description="The same, by calendar month in UTC.")
    streams: int | None = Field(None, ge=1, description="Requests in flight at once.")


@dataclass(frozen=True)
class Client:
    """A caller; `name` is "" where the gateway asks for no keys."""

    name: str
    policy: Policy

    @property
    def is_limited(self) -> bool:
        """Whether its requests are counted."""
        policy = self.policy
        return (policy.requests_per_second, policy.requests_per_minute, policy.streams) != (None, None, None)

    @property
    def has_minute(self) -> bool:
        """Whether it has a limit for a minute, whose remaining amount is in the headers of answers."""
        return self.policy.requests_per_minute is not None or self.policy.tokens_per_minute is not None

    @property
    def counts_tokens(self) -> bool:
        """Whether its tokens are limited."""
        return (self.policy.tokens_per_minute, self.policy.tokens_per_month) != (None, None)

    @property
    def is_admin(self) -> bool:
        return self.policy.role == "admin"

    def may_use(self, model: str) -> bool:
        return self.policy.models is None or model in self.policy.models

    def check_model(self, model: str) -> None:
        """Raises ForbiddenError where the client may not use the model, whether it exists or not."""
        if not self.may_use(model):
            raise ForbiddenError(f"the key of {self.name} does not allow the model {model}")


WITHOUT_KEY = "~@"  # Begins the name of an account that is an address; no client of a key can have such a name.
ANYONE = Client("", Policy(role="admin"))
_LOWEST_WEIGHT = 0.001


def client_of(metadata: Iterable[tuple[str, str | bytes]]) -> Client:
    """The client of a call by its metadata; raises UnauthenticatedError if a policy cannot be read."""
    name, policy = _values(metadata, CLIENT, POLICY)
    return _client(name, policy) if name else ANYONE


def caller_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Identifies a caller: the client's name, or without keys the address that the gateway saw.

    "" for another service. All IPv6 addresses of one /64 are one caller, because a single host has that many.
    """
    name, forwarded = _values(metadata, CLIENT, _FORWARDED_FOR)
    # The gateway appends the address; the caller may have sent everything before it.
    return name or _network(forwarded.rpartition(",")[2].strip())


def account(client: Client, metadata: Iterable[tuple[str, str | bytes]]) -> Client:
    """On whose account a client's call competes for an engine: its own or, without a key, its address's."""
    return client if client.name or not (address := caller_of(metadata)) else _of_address(address)


@lru_cache(maxsize=1024)
def account_of_batches(client: str) -> Client:
    """Where a client's batches compete: below all clients, apart from those of others.

    For an account is also whose prefixes are shared. No client of a key can have such a name.
    """
    return Client(f"~batches {client}", Policy(weight=_LOWEST_WEIGHT))


@lru_cache(maxsize=1024)
def _of_address(address: str) -> Client:
    return Client(WITHOUT_KEY + address, Policy())


def _values(metadata: Iterable[tuple[str, str | bytes]], first: str, second: str) -> tuple[str, str]:
    """The last values of two names, "" for none, in one pass."""
    of_first = of_second = ""
    for key, value in metadata:
        if key == first and isinstance(value, str):
            of_first = value
        elif key == second and isinstance(value, str):
            of_second = value
    return of_first, of_second


@lru_cache(maxsize=1024)
def _network(address: str) -> str:
    if ":" not in address:
        return address
    try:
        parsed = IPv6Address(address)
    except ValueError:
        return address
    return str(parsed.ipv4_mapped or IPv6Network((parsed, 64), strict=False))


@lru_cache(maxsize=1024)
def _client(name: str, policy: str) -> Client:
    try:
        return Client(name, Policy.model_validate_json(policy or "{}"))
    except ValidationError:
        raise UnauthenticatedError(f"the policy of the client {name} cannot be read") from None
