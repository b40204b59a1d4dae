"""What one recorded step used: parameters by access, and the memory beside the model states."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from gemini_placement._chunk_trace import ChunkTrace, make_trace
from gemini_placement.interfaces import ChunkT, Phase

_FORMAT: Final = 2
_PHASES: Final[tuple[Phase, ...]] = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessStats:
    """One access of the recorded step: a module that owns parameters was entered.

    Attributes:
        phase: "forward" or "backward".
        params: names of the parameters that it uses.
        non_model_bytes: the most device memory that all but the model states took until the next access.
        module: the module's path in the model.
        within: names of the parameters that others, which are not over, use at the same time.
        gradients: names of the parameters whose gradients came until the next access, in order.
        ends: names of parameters whose use was over before the next access, and with which of the gradients.
    """

    phase: Phase
    params: tuple[str, ...]
    non_model_bytes: int
    module: str = ""
    within: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    ends: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemStats:
    """The record of a step, by names, so that it serves another process and another chunk size.

    Attributes:
        accesses: first to last.
    """

    accesses: tuple[AccessStats, ...]

    def __post_init__(self) -> None:
        for index, access in enumerate(self.accesses):
            if access.phase not in _PHASES:
                raise ValueError(f"Access {index} has the phase {access.phase!r}; use one of {_PHASES}.")
            if access.non_model_bytes < 0:
                raise ValueError(f"Access {index} has non_model_bytes={access.non_model_bytes}; use 0 or more.")

    @property
    def param_order(self) -> tuple[str, ...]:
        """The parameters in the order of their first use."""
        return tuple(dict.fromkeys(name for access in self.accesses for name in access.params))

    @property
    def non_model_bytes(self) -> tuple[int, ...]:
        """Bytes beside the model states, one number for each access."""
        return tuple(access.non_model_bytes for access in self.accesses)

    @property
    def max_non_model_bytes(self) -> int:
        """The most of them; 0 without accesses."""
        return max(self.non_model_bytes, default=0)

    def accesses_of(self, param: str) -> tuple[int, ...]:
        """Return the indices of the accesses that use a parameter; none if it was never used."""
        return tuple(index for index, access in enumerate(self.accesses) if param in access.params)

    def trace(self, chunks: Mapping[str, ChunkT], *, world_size: int = 1) -> ChunkTrace[ChunkT]:
        """Return the order in which the step uses chunks.

        Args:
            chunks: the chunk of each parameter, by name; names that are not there are passed over.
            world_size: ranks that share them.
        """
        return make_trace(self.accesses, chunks, world_size=world_size)

    def to_json(self) -> str:
        """Return the record as JSON text; `from_json` reads it."""
        return json.dumps({"format": _FORMAT, "accesses": [asdict(access) for access in self.accesses]})

    @classmethod
    def from_json(cls, text: str) -> MemStats:
        """Read a record.

        Raises:
            ValueError: the text is not JSON, or not a record of this format.
        """
        parsed = json.loads(text)
        if not isinstance(parsed, dict) or parsed.get("format") != _FORMAT:
            raise ValueError(f"This is not a record of format {_FORMAT}; record a step again with this version.")
        try:
            accesses = tuple(
                AccessStats(
                    phase=entry["phase"],
                    params=tuple(str(name) for name in entry["params"]),
                    non_model_bytes=int(entry["non_model_bytes"]),
                    module=str(entry["module"]),
                    within=tuple(str(name) for name in entry["within"]),
                    gradients=tuple(str(name) for name in entry["gradients"]),
                    ends=tuple((str(name), int(number)) for name, number in entry["ends"]),
                )
                for entry in parsed["accesses"]
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"The record is damaged: {error!r}. Record a step again.") from error
        return cls(accesses=accesses)

    def save(self, path: str | Path) -> None:
        """Write the record to a file as JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> MemStats:
        """Read a record from a file.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no record of this format.
        """
        return cls.from_json(Path(path).read_text(encoding="utf-8"))
