"""How clients that compete share the engine: slots, tokens of a step, blocks and the queue, in proportion to weights.

Each client has an account of its service: tokens computed for it, divided by its weight. The client with the least
service has the first turn. A client that arrives gets at least the service of its competitors, so time without requests
earns no credit; a client that leaves while its service is above another's keeps it until the others catch up, so to
leave and return pays no debt. A client with few running sequences may take a slot or blocks from the one with the most
per weight, but never so much that this client would have less per weight than the newcomer: so nothing is taken back.

With one client nothing is counted. Pure: no clock. Source: the virtual token counter (Sheng et al. 2024, Fairness in
Serving Large Language Models), to which slots, blocks and short steps are added.
"""

import math
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Rows

from headrace_predictor.engine.state.blocks import BlockManager
from headrace_predictor.engine.state.sequence import Row, Sequence

# Tokens, for a weight of 1, by which a client may be ahead of another and still take from it: a prompt of usual length.
_QUANTUM = 1024
# A client with so many times as many running sequences per weight leaves steps to another's prompt.
_HEAVY = 4
_DEBTS_KEPT = 256
_LEAST_WEIGHT = 1e-6


class _Account:
    """Of a client with sequences: its service, and the numbers of its sequences."""

    __slots__ = ("running", "served", "waiting", "weight")

    def __init__(self, weight: float, served: float) -> None:
        self.weight = weight
        self.served = served
        self.running = 0
        self.waiting = 0

    @property
    def load(self) -> float:
        """Running sequences per weight."""
        return self.running / self.weight

    @property
    def quantum(self) -> float:
        return _QUANTUM / self.weight


class Shares:
    """The accounts. The scheduler reports the events of each sequence: `arrive`, `start`, `preempt`, `leave`."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._debts: dict[str, float] = {}  # The service of clients without sequences, where it is above the least.

    @property
    def competing(self) -> bool:
        """Whether more than one client has sequences."""
        return len(self._accounts) > 1

    def arrive(self, sequence: Sequence) -> None:
        name, weight = sequence.client, _weight(sequence)
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(weight, self._debts.pop(name, 0.0))
        account.weight = weight
        if not account.waiting:
            account.served = max(account.served, self._level(account))
        account.waiting += 1

    def start(self, sequence: Sequence) -> None:
        account = self._accounts[sequence.client]
        account.waiting -= 1
        account.running += 1

    def preempt(self, sequence: Sequence) -> None:
        account = self._accounts[sequence.client]
        account.running -= 1
        account.waiting += 1

    def leave(self, sequence: Sequence, running: bool) -> None:
        name = sequence.client
        account = self._accounts[name]
        if running:
            account.running -= 1
        else:
            account.waiting -= 1
        if account.running or account.waiting:
            return
        del self._accounts[name]
        self._debts[name] = account.served
        self._settle()
        if len(self._debts) > _DEBTS_KEPT:
            del self._debts[min(self._debts, key=self._debts.__getitem__)]

    def charge(self, rows: Iterable[Row]) -> None:
        """Adds the tokens of a step to the service of their clients, where there is more than one to compare."""
        if not self.competing and not self._debts:
            return
        for row in rows:
            account = self._accounts[row.sequence.client]
            account.served += row.count / account.weight
        if self._debts:
            self._settle()

    def turns(self) -> list[str]:
        """All clients, the one with the least service first."""
        return sorted(self._accounts, key=lambda name: (self._accounts[name].served, self._accounts[name].load))

    def resting(self, prompts: Iterable[str]) -> frozenset[str]:
        """Clients whose rows a step may omit for the prompt of a client with fewer. `prompts` are clients with one."""
        accounts = [self._accounts[name] for name in prompts]
        least = min((account.served for account in accounts), default=0.0)
        close = [account for account in accounts if account.served <= least + account.quantum]
        if not close:
            return frozenset()
        light = min(close, key=lambda account: account.load)
        heavy = _HEAVY * max(1, light.running) / light.weight
        return frozenset(
            name
            for name, account in self._accounts.items()
            if account.load >= heavy and account is not light and light.served <= account.served + light.quantum
        )

    def newest_of_heaviest(self, running: Rows[Sequence]) -> Sequence:
        """The sequence to preempt: never the oldest of all, if there are two."""
        several = [name for name, account in self._accounts.items() if account.running > 1]
        if not self.competing or not several:
            return running[-1]
        return self._newest(max(several, key=lambda name: self._accounts[name].load), running)

    def slot_for(self, client: str, running: Rows[Sequence]) -> Sequence | None:
        """The sequence that gives its slot to one of a client that has fewer than its share."""
        taker = self._accounts[client]
        name = max(self._accounts, key=lambda name: self._accounts[name].load)
        giver = self._accounts[name]
        if (giver.running - 1) / giver.weight < (taker.running + 1) / taker.weight or not _may_take(taker, giver):
            return None
        return self._newest(name, running)

    def blocks_for(
        self, client: str, missing: int, needed: int, running: Rows[Sequence], blocks: BlockManager
    ) -> list[Sequence]:
        """The sequences that give `missing` blocks to one that needs `needed`; none where its share is less."""
        held: dict[str, set[int]] = {name: set() for name in self._accounts}
        for sequence in running:
            held[sequence.client].update(sequence.blocks)
        name = max(held, key=lambda name: len(held[name]) / self._accounts[name].weight)
        taker, giver = self._accounts[client], self._accounts[name]
        after = (len(held[client]) + needed) / taker.weight
        if taker is giver or not _may_take(taker, giver) or (len(held[name]) - missing) / giver.weight < after:
            return []
        givers: list[Sequence] = []
        released: Counter[int] = Counter()
        freed = 0
        own = [sequence for sequence in running if sequence.client == name]
        for sequence in reversed(own[1:]):
            givers.append(sequence)
            released.update(sequence.blocks)
            freed += sum(released[block] == blocks.references(block) for block in sequence.blocks)
            if (len(held[name]) - freed) / giver.weight < after:
                return []
            if freed >= missing:
                return givers
        return []

    def crowded_out(self, newcomer: Sequence, waiting: Rows[Sequence]) -> Sequence | None:
        """The waiting sequence that gives its place in a full queue to one of a client with fewer there."""
        own = self._accounts.get(newcomer.client)
        if not self._accounts:
            return None
        name = max(self._accounts, key=lambda name: self._accounts[name].waiting / self._accounts[name].weight)
        most = self._accounts[name]
        if most is own or most.waiting / most.weight <= ((own.waiting if own else 0) + 1) / _weight(newcomer):
            return None
        mine = (sequence for sequence in reversed(waiting) if sequence.client == name)
        return next((one for one in mine if one.timeline.started is None and not one.moved), None)

    def stretched(self, newcomer: Sequence, own: int) -> int:
        """How many sequences of all clients are served until `own` of the newcomer's client are."""
        others = sum(account.weight for name, account in self._accounts.items() if name != newcomer.client)
        return math.ceil(own * (1 + others / _weight(newcomer)))

    def _level(self, account: _Account) -> float:
        """The service to which a client without waiting sequences is lifted when one arrives."""
        others = [other for other in self._accounts.values() if other is not account]
        backlogged = [other.served for other in others if other.waiting]
        if backlogged or not others:
            return min(backlogged, default=0.0)
        # Not the least: one long stream lags behind although nothing of its client waits.
        return max(others, key=lambda other: other.load).served

    def _settle(self) -> None:
        """Forgets the debts with which the others have caught up; all debts if no client is left."""
        least = min((account.served for account in self._accounts.values()), default=math.inf)
        self._debts = {name: served for name, served in self._debts.items() if served > least}

    @staticmethod
    def _newest(client: str, running: Rows[Sequence]) -> Sequence:
        return next(sequence for sequence in reversed(running) if sequence.client == client)


def _weight(sequence: Sequence) -> float:
    return max(_LEAST_WEIGHT, sequence.weight)


def _may_take(taker: _Account, giver: _Account) -> bool:
    return taker.served <= giver.served + taker.quantum
