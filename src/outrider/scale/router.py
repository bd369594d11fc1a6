"""Which replica gets a request: the one that holds its prefix, while that one is not far busier than the rest."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

HOLDERS = 4  # replicas remembered for one block: a prefix that many ask for lives on several
LONGEST = 512  # blocks of one prompt; what follows does not change where it goes
CHARACTERS_PER_TOKEN = 4  # about: a block of token ids should be as long as one of text


@dataclass(frozen=True)
class Hints:
    """What a request says about where it should go."""

    blocks: tuple[bytes, ...] = ()  # that its prompt begins with
    avoid: frozenset[str] = frozenset()  # replicas that could not answer it


class PrefixTable:
    """Who was sent which block of a prompt last. Bounded: what nobody asked for in a long time is forgotten."""

    def __init__(self, capacity: int = 65_536) -> None:
        self.capacity = capacity
        self._holders: OrderedDict[bytes, list[str]] = OrderedDict()  # block -> replicas, the latest last

    def __len__(self) -> int:
        return len(self._holders)

    def remember(self, blocks: Sequence[bytes], replica: str) -> None:
        """`replica` has seen these blocks, from the start of a prompt on."""
        for block in reversed(blocks):  # the start of a prompt outlives its end
            holders = self._holders.setdefault(block, [])
            if replica in holders:
                holders.remove(replica)
            holders.append(replica)
            del holders[:-HOLDERS]
            self._holders.move_to_end(block)
        while len(self._holders) > self.capacity:
            self._holders.popitem(last=False)

    def forget(self, replica: str) -> None:
        """The replica is gone, and its cache with it."""
        for block, holders in list(self._holders.items()):
            if replica in holders:
                holders.remove(replica)
                if not holders:
                    del self._holders[block]

    def depths(self, blocks: Sequence[bytes]) -> dict[str, int]:
        """How many blocks of this prompt each replica holds; those with none are left out."""
        found: dict[str, int] = {}
        for depth, block in enumerate(blocks, start=1):
            for replica in self._holders.get(block, ()):
                found[replica] = depth
        return found


def choose(
    table: PrefixTable,
    hints: Hints,
    loads: Mapping[str, int],
    imbalance: int,
    dice: random.Random,
) -> list[str]:
    """All replicas of `loads`, the best one first.

    First those that hold the start of the prompt, the longest piece first, unless they have more than `imbalance`
    requests above the least loaded. Then the better of two drawn at random, so that many doors with old news do not
    all run to the same replica. Then the rest, the least loaded first, and
    those to avoid at the very end.
    """
    if not loads:
        return []
    least = min(loads.values())
    depths = table.depths(hints.blocks)
    holders = [name for name in depths if name in loads and loads[name] - least <= imbalance]
    holders.sort(key=lambda name: (-depths[name], loads[name]))
    others = [name for name in loads if name not in holders]
    dice.shuffle(others)
    others[:2] = sorted(others[:2], key=loads.__getitem__)
    others[1:] = sorted(others[1:], key=loads.__getitem__)
    return sorted(holders + others, key=hints.avoid.__contains__)


def prefix_blocks(body: bytes, size: int) -> list[bytes]:
    """A name for each block of `size` characters that the prompt in this request begins with.

    The name of a block depends on all before it. The last, incomplete one has none. A body that cannot be read has no
    blocks: the replica that gets it says what is wrong.
    """
    try:
        request = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    if not isinstance(request, dict):
        return []
    key = request.get("prompt_cache_key")
    # Whoever names a conversation wants it kept together, however short it is.
    names = [digest(b"", key.encode(errors="replace"))] if isinstance(key, str) and key else []
    previous = names[0] if names else b""
    for piece in pieces(request, size):
        if len(names) == LONGEST:
            break
        previous = digest(previous, piece)
        names.append(previous)
    return names


def digest(previous: bytes, piece: bytes) -> bytes:
    return blake2b(piece, digest_size=12, key=previous).digest()


def pieces(request: Mapping[str, Any], size: int) -> Iterator[bytes]:
    """The whole blocks of a prompt: of text, of token ids, or of a conversation."""
    prompt = request.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # several prompts: they travel together, and the first leads
    if isinstance(prompt, list):
        ids = max(1, size // CHARACTERS_PER_TOKEN)
        for start in range(0, len(prompt) - ids + 1, ids):
            yield msgspec.json.encode(prompt[start : start + ids])
        return
    text = prompt if isinstance(prompt, str) else "".join(conversation(request))
    for start in range(0, len(text) - size + 1, size):
        yield text[start : start + size].encode(errors="replace")


def conversation(request: Mapping[str, Any]) -> Iterable[str]:
    """A chat in the order in which templates write it: tools, then messages."""
    if request.get("tools"):
        yield msgspec.json.encode(request["tools"]).decode()
    messages = request.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            content = message.get("content")
            said = content if isinstance(content, str) else msgspec.json.encode(content).decode()
            yield f"\x1e{message.get('role')}\x1f{said}"
