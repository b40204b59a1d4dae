"""Reading chunks from the disk before they are asked for."""

from __future__ import annotations

from gemini_chunk._chunk import Chunk


class ReadAhead:
    """Learns in which order chunks are gathered, and has the system read the next one while the present one is used.

    What follows a chunk depends on what came before it: forward goes one way and backward the other. A step that takes
    another course costs nothing but a wrong guess.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[Chunk | None, Chunk | None], Chunk] = {}
        self._last: tuple[Chunk | None, Chunk | None] = (None, None)

    def gathering(self, chunk: Chunk) -> None:
        """Note that a chunk is about to be gathered, and start to read the one that came after it last time."""
        self._next[self._last] = chunk
        self._last = (self._last[1], chunk)
        following = self._next.get(self._last)
        if following is not None and following is not chunk:
            following.page_in()

    def forget(self) -> None:
        """Forget the order: chunks have come or gone."""
        self._next.clear()
        self._last = (None, None)
