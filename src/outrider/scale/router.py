"""Prefix-aware routing: a request goes to the replica that has its prefix cached, unless that one is too busy."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

MAX_HOLDERS = 4  # replicas remembered for one block, because a popular prefix is cached on several
MAX_BLOCKS = 512  # blocks of one prompt that are compared; later ones do not affect the routing
CHARACTERS_PER_TOKEN = 4  # approximate, so that a block of token ids is about as long as one of text


@dataclass(frozen=True)
class RoutingHints:
    """The properties of a request that decide its routing."""

    blocks: tuple[bytes, ...] = ()  # names of the blocks that its prompt begins with
    avoid: frozenset[str] = frozenset()  # replicas that could not process it


class PrefixTable:
    """Remembers the replicas that received each block of a prompt; the least recently used blocks are dropped."""

    def __init__(self, capacity: int = 65_536) -> None:
        self.capacity = capacity
        self._holders: OrderedDict[bytes, list[str]] = OrderedDict()  # block -> replicas, the most recent last

    def __len__(self) -> int:
        return len(self._holders)

    def remember(self, blocks: Sequence[bytes], replica: str) -> None:
        """Record that `replica` received these blocks, in order from the start of a prompt."""
        for block in reversed(blocks):  # so that the end of a prompt is dropped before its start
            holders = self._holders.setdefault(block, [])
            if replica in holders:
                holders.remove(replica)
            holders.append(replica)
            del holders[:-MAX_HOLDERS]
            self._holders.move_to_end(block)
        while len(self._holders) > self.capacity:
            self._holders.popitem(last=False)

    def forget(self, replica: str) -> None:
        """Remove a replica that has stopped."""
        for block, holders in list(self._holders.items()):
            if replica in holders:
                holders.remove(replica)
                if not holders:
                    del self._holders[block]

    def depths(self, blocks: Sequence[bytes]) -> dict[str, int]:
        """Return the number of leading blocks that each replica holds; replicas without any are left out."""
        depths: dict[str, int] = {}
        for depth, block in enumerate(blocks, start=1):
            for replica in self._holders.get(block, ()):
                depths[replica] = depth
        return depths


def choose(
    table: PrefixTable,
    hints: RoutingHints,
    loads: Mapping[str, int],
    imbalance: int,
    rng: random.Random,
) -> list[str]:
    """Return all replicas of `loads`, the best one first.

    1. Replicas that hold the start of the prompt, the longest prefix first, unless they have more than `imbalance`
       requests above the least loaded replica.
    2. The less loaded of two random replicas, so that several gateways with old load reports do not all choose the
       same one.
    3. The rest, the least loaded first.
    Replicas to avoid come last.
    """
    if not loads:
        return []
    least = min(loads.values())
    depths = table.depths(hints.blocks)
    holders = [name for name in depths if name in loads and loads[name] - least <= imbalance]
    holders.sort(key=lambda name: (-depths[name], loads[name]))
    others = [name for name in loads if name not in holders]
    rng.shuffle(others)
    others[:2] = sorted(others[:2], key=loads.__getitem__)
    others[1:] = sorted(others[1:], key=loads.__getitem__)
    return sorted(holders + others, key=hints.avoid.__contains__)


def prefix_blocks(body: bytes, size: int) -> list[bytes]:
    """Return a hash for each block of `size` characters that the prompt in this request begins with.

    The hash of a block depends on all blocks before it. The last, incomplete block has none. An invalid body has no
    blocks: the replica that receives it reports the error.
    """
    try:
        request = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    if not isinstance(request, dict):
        return []
    key = request.get("prompt_cache_key")
    # Requests with the same key go to the same replica, however short their common prefix is.
    hashes = [digest(b"", key.encode(errors="replace"))] if isinstance(key, str) and key else []
    previous = hashes[0] if hashes else b""
    for piece in pieces(request, size):
        if len(hashes) == MAX_BLOCKS:
            break
        previous = digest(previous, piece)
        hashes.append(previous)
    return hashes


def digest(previous: bytes, piece: bytes) -> bytes:
    return blake2b(piece, digest_size=12, key=previous).digest()


def pieces(request: Mapping[str, Any], size: int) -> Iterator[bytes]:
    """Yield the complete blocks of a prompt: of text, of token ids, or of a conversation."""
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # several prompts go to one replica, chosen by the first
    if isinstance(prompt, list):
        ids = max(1, size // CHARACTERS_PER_TOKEN)
        for start in range(0, len(prompt) - ids + 1, ids):
            yield msgspec.json.encode(prompt[start : start + ids])
        return
    text = prompt if isinstance(prompt, str) else "".join(conversation(request))
    for start in range(0, len(text) - size + 1, size):
        yield text[start : start + size].encode(errors="replace")


def conversation(request: Mapping[str, Any]) -> Iterable[str]:
    """Yield the texts of a chat in the order in which templates write them: tools, then messages."""
    if request.get("tools"):
        yield msgspec.json.encode(request["tools"]).decode()
    messages = request.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            content = message.get("content")
            text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
            yield f"\x1e{message.get('role')}\x1f{text}"
