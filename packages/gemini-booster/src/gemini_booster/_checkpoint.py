"""Saving and loading full states, streamed tensor by tensor."""

from __future__ import annotations

import contextlib
import json
import numbers
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gemini_booster._gemini_ddp import GeminiDDP
from gemini_booster._optimizer import GeminiOptimizer

_MIB = 2**20
_BIN_INDEX = "pytorch_model.bin.index.json"
_SAFE_INDEX = "model.safetensors.index.json"
# What loaders look for in a folder.
_FOUND_IN_FOLDERS = ("model.safetensors", _SAFE_INDEX, "pytorch_model.bin", _BIN_INDEX)


def save_model(
    model: GeminiDDP,
    checkpoint: str | os.PathLike[str],
    *,
    shard: bool,
    prefix: str | None,
    size_per_shard: float,
    use_safetensors: bool,
    dtype: torch.dtype | None,
) -> None:
    """Save a wrapped model; see `Booster.save_model`."""
    if size_per_shard <= 0:
        raise ValueError(f"size_per_shard must be a positive number of MiB, got {size_per_shard}.")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating dtype, or None for the working dtype; got {dtype}.")
    path = Path(checkpoint)
    if path.suffix == ".safetensors" and not (shard or use_safetensors):
        raise ValueError(
            f"{path.name!r} would hold what torch.save writes: give use_safetensors=True, or another name."
        )
    writer = is_writer(model.process_group)
    with report_to_all(model.process_group):
        if writer:
            _check_place(path, shard=shard, prefix=prefix, use_safetensors=use_safetensors)
            if use_safetensors:
                _check_tensors(model.unwrap())
    entries = _entries(model, dtype, skip_ties=use_safetensors)
    with report_to_all(model.process_group):
        try:
            if shard:
                _save_folder(model, entries, path, prefix, size_per_shard * _MIB, use_safetensors, writer)
            else:
                state = {name: _on_cpu(value) for name, value in entries if writer}
                if writer:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with _replacing(path) as temporary:
                        _write(state, temporary, use_safetensors)
        except Exception:
            for _ in entries:  # the other ranks still gather: leaving them would hang them
                pass
            raise


def _check_place(path: Path, *, shard: bool, prefix: str | None, use_safetensors: bool) -> None:
    """Refuse a path where loaders would not find what is to be saved.

    Raises:
        ValueError: a file is where a folder should be or the reverse, or a folder holds other weights.
    """
    if not shard:
        if path.is_dir():
            raise ValueError(f"With shard=False the checkpoint is a file; {str(path)!r} is a folder.")
        return
    if path.is_file():
        raise ValueError(f"With shard=True the checkpoint is a folder; {str(path)!r} is a file.")
    own = _SAFE_INDEX if use_safetensors else _BIN_INDEX
    others = [name for name in _FOUND_IN_FOLDERS if name != own and (path / name).exists()]
    if others and prefix is None:  # who gives a prefix names the index in order to load
        raise ValueError(
            f"{str(path)!r} holds other weights, {' and '.join(others)}, and from_pretrained or load_model would take "
            "those. Save to another folder, or remove these files first."
        )


def _check_tensors(module: nn.Module) -> None:
    """Refuse what safetensors cannot hold.

    Raises:
        ValueError: there is something of the kind.
    """
    others = [name for name, entry in module.state_dict(keep_vars=True).items() if not isinstance(entry, Tensor)]
    if others:
        raise ValueError(
            "safetensors holds tensors only, and get_extra_state of a module returns something else: "
            f"{', '.join(others)}. Save with use_safetensors=False."
        )


def _entries(model: GeminiDDP, dtype: torch.dtype | None, *, skip_ties: bool) -> Iterator[tuple[str, object]]:
    """Yield the names of a state with full values, and what ``get_extra_state`` of modules returns as it is.

    A tied parameter comes once where the format cannot share and the model ties by itself.
    """
    ties_itself = skip_ties and bool(getattr(model.unwrap(), "_tied_weights_keys", None))
    state = model.unwrap().state_dict(keep_vars=True)
    times = Counter(entry for entry in state.values() if isinstance(entry, nn.Parameter))
    seen: dict[Tensor, Tensor] = {}
    values = model.named_full_values() if dtype is None else model.named_master_values(dtype)
    for name, entry in state.items():
        if not isinstance(entry, Tensor):
            yield name, entry
            continue
        _, value = next(values)
        if isinstance(entry, nn.Parameter) and entry in seen:
            if not ties_itself:
                yield name, value if skip_ties else seen[entry]
            continue
        if isinstance(entry, nn.Parameter):
            seen[entry] = value if times[entry] > 1 else value.new_empty(0)
        yield name, value


def _save_folder(
    model: GeminiDDP,
    entries: Iterator[tuple[str, object]],
    folder: Path,
    prefix: str | None,
    limit: float,
    use_safetensors: bool,
    writer: bool,
) -> None:
    if writer:
        folder.mkdir(parents=True, exist_ok=True)
    stem = ("model" if use_safetensors else "pytorch_model") + (f".{prefix}" if prefix else "")
    suffix = ".safetensors" if use_safetensors else ".bin"
    weight_map: dict[str, str] = {}
    files: list[str] = []
    state: dict[str, object] = {}
    state_bytes = total_bytes = 0
    name = _SAFE_INDEX if use_safetensors else _BIN_INDEX
    if prefix:
        name = name.replace("model.", f"model.{prefix}.", 1)
    with contextlib.ExitStack() as written:  # nothing is put in place before all of it is written

        def flush() -> None:
            nonlocal state, state_bytes
            if state:
                files.append(f"{stem}-{len(files) + 1:05d}{suffix}")
                weight_map.update(dict.fromkeys(state, files[-1]))
                _write(state, written.enter_context(_replacing(folder / files[-1])), use_safetensors)
                state, state_bytes = {}, 0

        index = written.enter_context(_replacing(folder / name)) if writer else None
        for entry, value in entries:
            if index is None:
                continue
            value_bytes = value.nbytes if isinstance(value, Tensor) else 0
            if state_bytes + value_bytes > limit:
                flush()
            state[entry] = _on_cpu(value)
            state_bytes += value_bytes
            total_bytes += value_bytes
        if index is None:
            return
        flush()
        content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        index.write_text(json.dumps(content, indent=2))
    for part in ("config", "generation_config"):  # what a transformers model has beside its weights
        save = getattr(getattr(model.unwrap(), part, None), "save_pretrained", None)
        if save is not None:
            save(folder)
    for stale in set(folder.glob(f"{stem}-?????{suffix}")) - {folder / file for file in files}:
        stale.unlink()


def _on_cpu(value: object) -> object:
    return value.cpu() if isinstance(value, Tensor) else value


def _write(state: Mapping[str, object], path: Path, use_safetensors: bool) -> None:
    if use_safetensors:
        tensors = {name: value.contiguous() for name, value in state.items() if isinstance(value, Tensor)}
        save_file(tensors, path, metadata={"format": "pt"})
    else:
        torch.save(state, path)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Write beside ``path`` and put it in place whole: a failure leaves what was there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_model(model: GeminiDDP, checkpoint: str | os.PathLike[str], *, strict: bool) -> None:
    """Load a full state into a wrapped model; see `Booster.load_model`."""
    state = _SavedState(_files(Path(checkpoint)))
    module = model.unwrap()
    entries = module.state_dict(keep_vars=True)
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, Tensor)}
    by_entry = {entry: name for name, entry in tensors.items() if name in state}
    # A format that cannot share tensors holds a tied parameter under one of its names.
    aliases = {name: by_entry[entry] for name, entry in tensors.items() if name not in state and entry in by_entry}
    model.load_state_dict(_Aliased(state, aliases), strict=strict)


def _read(file: Path) -> tuple[Iterable[str], Callable[[str], object]]:
    """Return the names in a file, and what reads one of them; the format is told by the file's first bytes.

    Raises:
        ValueError: it is none that is known.
    """
    with file.open("rb") as opened:
        start = opened.read(9)
    if start[8:] == b"{":  # the header's length, and then the header in JSON
        reader = safe_open(file, framework="pt")
        return reader.keys(), reader.get_tensor  # type: ignore[no-untyped-call] # safetensors is untyped
    state: dict[str, object] | None = None
    if start[:2] == b"PK" and file.suffix != ".safetensors":
        state = torch.load(file, weights_only=True, mmap=True)
    elif start[:2] == b"PK" or start[:1] == b"\x80":  # a pickle, as torch.save wrote before it wrote zip archives
        with file.open("rb") as opened:  # of a path, torch would look at the suffix
            state = torch.load(opened, weights_only=True)
    if state is not None:
        return state, state.__getitem__
    raise ValueError(
        f"{str(file)!r} is neither in safetensors nor written by torch.save. It may be damaged, or stand for a file "
        "that was not downloaded."
    )


class _SavedState(Mapping[str, object]):
    """Tensors of files, and extra states of modules, read when asked for."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._readers: dict[str, Callable[[str], object]] = {}
        for file in files:
            names, read = _read(file)
            self._readers.update(dict.fromkeys(names, read))

    def __contains__(self, name: object) -> bool:
        return name in self._readers

    def __getitem__(self, name: str) -> object:
        return self._readers[name](name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


class _Aliased(Mapping[str, object]):
    """A state with further names for some of its entries."""

    def __init__(self, state: Mapping[str, object], aliases: Mapping[str, str]) -> None:
        self._state = state
        self._aliases = aliases

    def __contains__(self, name: object) -> bool:
        return name in self._state or name in self._aliases

    def __getitem__(self, name: str) -> object:
        return self._state[self._aliases.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        yield from self._state
        yield from self._aliases

    def __len__(self) -> int:
        return len(self._state) + len(self._aliases)


def _files(path: Path) -> list[Path]:
    """Return the files of a checkpoint: those of an index, a known file of a folder, or the file itself."""
    if path.is_dir():
        indices = sorted(path.glob("*.index*.json"))
        if len(indices) == 1:
            path = indices[0]
        else:
            known = [path / name for name in ("model.safetensors", "pytorch_model.bin") if (path / name).is_file()]
            if not known:
                raise FileNotFoundError(
                    f"{str(path)!r} holds {len(indices)} index files, and neither model.safetensors nor "
                    "pytorch_model.bin: name the index or the file to load."
                )
            return known[:1]
    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint at {str(path)!r}.")
    if path.suffix == ".json":
        names: dict[str, str] = json.loads(path.read_text())["weight_map"]
        return [path.parent / name for name in dict.fromkeys(names.values())]
    return [path]


def save_optimizer(optimizer: GeminiOptimizer, checkpoint: str | os.PathLike[str]) -> None:
    """Save an optimizer's full state; see `Booster.save_optimizer`."""
    save_on_rank_0(optimizer.state_dict(), checkpoint, optimizer.module.process_group)


def load_optimizer(optimizer: GeminiOptimizer, checkpoint: str | os.PathLike[str]) -> None:
    """Load an optimizer's full state; see `Booster.load_optimizer`."""
    optimizer.load_state_dict(torch.load(checkpoint, weights_only=True, mmap=True))


def save_on_rank_0(
    state: dict[str, Any], checkpoint: str | os.PathLike[str], process_group: dist.ProcessGroup | None
) -> None:
    """Write a state from rank 0 of a group, None for a single rank; an error there is raised on every rank."""
    with report_to_all(process_group):
        if is_writer(process_group):
            path = Path(checkpoint)
            path.parent.mkdir(parents=True, exist_ok=True)
            with _replacing(path) as temporary:
                torch.save(tree_map(_plain_number, state), temporary)


def _plain_number(value: object) -> object:
    """Return a number of numpy's, as a scheduler may make of a learning rate, as one that ``torch.load`` takes."""
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def is_writer(process_group: dist.ProcessGroup | None) -> bool:
    return process_group is None or dist.get_rank(process_group) == 0


@contextlib.contextmanager
def report_to_all(process_group: dist.ProcessGroup | None) -> Iterator[None]:
    """Let rank 0's error be raised on every rank, and let no rank go on before the files are there.

    What rank 0 refuses is refused alike on all ranks, by a `ValueError`.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # whatever it is, the other ranks must hear of it
        error = caught
    if process_group is not None:
        failed = None if error is None else (isinstance(error, ValueError), f"{type(error).__name__}: {error}")
        message = [failed]
        dist.broadcast_object_list(message, group=process_group, group_src=0)
        if error is None and message[0] is not None:
            is_refusal, text = message[0]
            error = (ValueError if is_refusal else RuntimeError)(f"Rank 0 could not save: {text}")
    if error is not None:
        raise error
