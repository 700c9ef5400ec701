"""The owners of the KV cache's blocks, and the blocks that other sequences can reuse.

Pure: block numbers and names, no tensors. A block holds the keys and values of `block_tokens` tokens. Full blocks are
named by a hash of all ids up to their end, salted with the client's name, the request's `cache_salt`, the adapter's
number and the stage of a scaling, so equal names mean equal contents, and response times do not reveal another client's
prompts. A block that is
not in use keeps its contents until it is evicted as the least recently used one. Block 0 is never allocated: padding
rows write there.
Source: prefix caching by hashed blocks (Kwon et al. 2023, PagedAttention; vLLM's design notes).
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from hashlib import blake2b

from headrace.clients import WITHOUT_KEY

RESERVED = 1  # Block 0.
PREFIX_TOKENS = 128  # Recurrent states of prefixes are kept at multiples of this, which each pass of a prompt ends at.


def first_name(client: str, salt: str, adapter: int = 0, stage: int = 0) -> bytes:
    """The name from which the name of a sequence's first block is derived; callers without keys share theirs."""
    key = blake2b(client.encode()).digest() if client and not client.startswith(WITHOUT_KEY) else b""
    return blake2b(salt.encode(), key=key, salt=adapter.to_bytes(8) + stage.to_bytes(8), digest_size=32).digest()


def block_name(before: bytes, ids: Ids[int]) -> bytes:
    """The name of a block that holds `ids` and follows the block named `before`."""
    return blake2b(array("q", ids).tobytes(), key=before, digest_size=32).digest()


class BlockManager:
    """References, names and order of use of `blocks` blocks."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.total = blocks - RESERVED
        self._references = [0] * blocks
        self._names: list[bytes | None] = [None] * blocks
        self._by_name: dict[bytes, int] = {}
        self._announced: set[bytes] = set()
        # Blocks not in use, the least recently used one first.
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(RESERVED, blocks))

    @property
    def free(self) -> int:
        """The number of blocks that can be allocated."""
        return len(self._idle)

    @property
    def in_use(self) -> float:
        """The share of all blocks that sequences hold."""
        return 1 - self.free / self.total

    def blocks_for(self, tokens: int) -> int:
        """The number of blocks for `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def references(self, block: int) -> int:
        """How many sequences hold a block."""
        return self._references[block]

    def find(self, names: Iterable[bytes]) -> tuple[list[int], bool]:
        """The blocks of the longest known run of `names`, and whether the next one is being computed."""
        found: list[int] = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                return found, name in self._announced
            found.append(block)
        return found, False

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are not in use."""
        return sum(block in self._idle for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each of these blocks."""
        for block in blocks:
            self._references[block] += 1
            self._idle.pop(block, None)

    def take(self) -> int | None:
        """Allocates a block for new contents; None if all are in use."""
        if not self._idle:
            return None
        block, _ = self._idle.popitem(last=False)
        self._forget(block)
        self._references[block] = 1
        return block

    def announce(self, names: Iterable[bytes]) -> None:
        """Announces that blocks with these names are being computed."""
        self._announced.update(names)

    def withdraw(self, names: Iterable[bytes]) -> None:
        """Withdraws an announcement: a sequence that waits for the block must compute it itself."""
        self._announced.difference_update(names)

    def name(self, block: int, name: bytes) -> None:
        """Names a block whose contents are complete, unless another block already has the name."""
        self._announced.discard(name)
        if name not in self._by_name:
            self._forget(block)
            self._by_name[name] = block
            self._names[block] = name

    def release(self, blocks: Iterable[int], forget: bool = False) -> list[int]:
        """Drops a reference to each block; returns those whose contents cannot be reused: with `forget`, all."""
        released = []
        # The end of a sequence is less useful to others than its beginning, so it is evicted first.
        for block in reversed(list(blocks)):
            if forget:
                self._forget(block)
            self._references[block] -= 1
            if self._references[block] == 0:
                self._idle[block] = None
                if self._names[block] is None:
                    released.append(block)
                    self._idle.move_to_end(block, last=False)
        return released

    def _forget(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            del self._by_name[name]
            self._names[block] = None
