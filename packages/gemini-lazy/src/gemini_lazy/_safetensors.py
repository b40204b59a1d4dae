"""Reading parts of ``.safetensors`` files.

The format: eight bytes with the length of the header (little endian), the header in JSON, then the data. The header
gives each tensor its dtype, shape and place in the data, where it lies contiguously. Reading it takes no library, and
any run of elements can be had without the rest.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gemini_lazy._tape import LazyError

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_BLOCK_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: the file.
        name: its name there.
        dtype: its dtype there.
        shape: its shape.
        offset: bytes of the file before it.
    """

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements ``start`` to ``stop`` of the flattened tensor, shape ``(stop - start,)``."""
        if start >= stop:
            return torch.empty(0, dtype=self.dtype)
        data = bytearray((stop - start) * self.dtype.itemsize)
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.offset + start * self.dtype.itemsize)
            view, done = memoryview(data), 0
            while done < len(data):
                if (count := file.readinto(view[done:])) == 0:
                    raise LazyError(f"{self.file} ends in the middle of {self.name!r}: it was cut since it was opened.")
                done += count
        return torch.frombuffer(data, dtype=self.dtype)

    def read_into(self, target: Tensor) -> None:
        """Fill ``target``, of any dtype and device and the same number of elements, a block at a time."""
        flat = target.view(-1) if target.is_contiguous() else None
        if flat is None:
            target.copy_(self.read(0, target.numel()).view(self.shape))
            return
        step = _BLOCK_BYTES // self.dtype.itemsize
        for start in range(0, flat.numel(), step):
            stop = min(start + step, flat.numel())
            flat[start:stop].copy_(self.read(start, stop))


def stored_tensors(source: Path) -> dict[str, StoredTensor]:
    """List the tensors of a checkpoint.

    Args:
        source: a ``.safetensors`` file, an index (``*.safetensors.index.json``), or a folder with either.

    Returns:
        Each tensor by its name.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: a file is damaged, or lacks what the index says it has.
    """
    if not source.is_dir():
        return _read_index(source) if source.suffix == ".json" else _read_header(source)
    for pattern in ("*.safetensors.index.json", "*.safetensors"):
        found = sorted(source.glob(pattern))
        if len(found) > 1:
            found = [path for path in found if path.name == "model" + pattern[1:]]
            if not found:
                raise ValueError(f"{source} holds several {pattern} files and none is the model's. Name the file.")
        if found:
            return stored_tensors(found[0])
    raise FileNotFoundError(f"{source} holds no .safetensors file: it has {sorted(p.name for p in source.iterdir())}.")


def _read_index(index: Path) -> dict[str, StoredTensor]:
    names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    files = {file: _read_header(index.parent / file) for file in sorted(set(names.values()))}
    absent = [f"{name} in {file}" for name, file in names.items() if name not in files[file]]
    if absent:
        raise ValueError(f"{index} names tensors that the files lack: {', '.join(absent)}.")
    return {name: files[file][name] for name, file in names.items()}


def _read_header(file: Path) -> dict[str, StoredTensor]:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError(
                f"{file} is no .safetensors file, or is cut: its header would take {length} of {size} bytes."
            )
        header = json.loads(opened.read(length))
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{file}: {name!r} has dtype {entry['dtype']}; known are {', '.join(_DTYPES)}.")
        dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        if end - begin != math.prod(shape) * dtype.itemsize or not 0 <= begin <= end <= size - 8 - length:
            raise ValueError(f"{file} is damaged or cut: {name!r} does not fit where the header puts it.")
        tensors[name] = StoredTensor(file, name, dtype, shape, 8 + length + begin)
    return tensors
