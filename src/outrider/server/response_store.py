"""Responses that clients may continue or fetch again: a bounded store in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_BYTES = 64 * 2**20  # of all stored responses, with the conversations before them


@dataclass(frozen=True)
class StoredResponse:
    body: bytes  # the response as it was sent
    messages: Sequence[Any]  # the conversation, with the answer; without the instructions
    size: int  # bytes of both
    owner: bytes  # digest of the API key that asked


class ResponseStore:
    """The newest responses by id, at most `limit` of them and `max_bytes`. Used on the event loop's thread only."""

    def __init__(self, limit: int, max_bytes: int = MAX_BYTES) -> None:
        self.limit, self.max_bytes = limit, max_bytes
        self.size = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, response_id: str, response: StoredResponse) -> None:
        """Store a response; those that were not used for the longest time make room for it."""
        self._responses[response_id] = response
        self.size += response.size
        while len(self._responses) > self.limit or self.size > self.max_bytes:
            _, oldest = self._responses.popitem(last=False)
            self.size -= oldest.size

    def get(self, response_id: str, owner: bytes) -> StoredResponse | None:
        """Return a response that this owner asked for; None if it is not stored, or not any more."""
        found = self._responses.get(response_id)
        if found is None or found.owner != owner:
            return None
        self._responses.move_to_end(response_id)
        return found

    def remove(self, response_id: str, owner: bytes) -> bool:
        """Delete a response; return whether it was stored."""
        if self.get(response_id, owner) is None:
            return False
        self.size -= self._responses.pop(response_id).size
        return True
