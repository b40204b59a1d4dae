"""Tensors are found in, and changed inside, what modules take and return."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor

from gemini_ddp._tensors import map_tensors, walk_tensors

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Frozen:
    value: Tensor
    note: str = "kept"


class Plain:
    def __init__(self, value: Tensor) -> None:
        self.value = value


def test_tensors_are_found_wherever_modules_put_them() -> None:
    tensors = [torch.full((), float(index)) for index in range(8)]
    value = {
        "bare": tensors[0],
        "list": [tensors[1], (tensors[2], None, "text", 3)],
        "named": Pair(tensors[3], 1.5),
        "data": Frozen(tensors[4]),
        "object": Plain(tensors[5]),
        "ordered": OrderedDict(a=tensors[6]),
        "set": {tensors[7]},
    }
    found = list(walk_tensors(value))
    assert len(found) == 8
    assert all(any(tensor is other for other in found) for tensor in tensors)


def test_walk_ends_in_what_refers_to_itself() -> None:
    loop: list[object] = [torch.ones(1)]
    loop.append(loop)
    assert len(list(walk_tensors(loop))) >= 1


def test_mapping_changes_tensors_and_keeps_everything_else() -> None:
    value = {
        "a": [torch.ones(2), "text"],
        "b": Pair(torch.ones(1), 2),
        "c": Frozen(torch.ones(3)),
        "d": OrderedDict(x=torch.ones(1)),
        "e": (torch.ones(1),),
    }
    changed = map_tensors(value, lambda tensor: tensor * 2)
    assert isinstance(changed, dict)
    assert torch.equal(changed["a"][0], torch.full((2,), 2.0))
    assert changed["a"][1] == "text"
    assert isinstance(changed["b"], Pair)
    assert changed["b"].left.item() == 2
    assert changed["c"] == Frozen(changed["c"].value, "kept")
    assert changed["c"].value.sum().item() == 6
    assert type(changed["d"]) is OrderedDict
    assert isinstance(changed["e"], tuple)
    assert torch.equal(value["c"].value, torch.ones(3))  # type: ignore[union-attr] # the entry is a Frozen


class Noted(dict[str, Tensor]):
    def __init__(self, note: str) -> None:
        super().__init__()
        self.note = note


def test_mapping_keeps_the_kind_of_a_dict_and_what_it_knows() -> None:
    noted = Noted("kept")
    noted["x"] = torch.ones(1)
    missing = defaultdict(list, x=[torch.ones(1)])
    changed_noted, changed_missing = (map_tensors(value, lambda tensor: tensor * 2) for value in (noted, missing))
    assert isinstance(changed_noted, Noted)
    assert (changed_noted.note, changed_noted["x"].item(), noted["x"].item()) == ("kept", 2.0, 1.0)
    assert isinstance(changed_missing, defaultdict)
    assert changed_missing["x"][0].item() == 2
    assert changed_missing["y"] == []
    assert "y" not in missing


def test_mapping_returns_what_does_not_change_as_it_is() -> None:
    value = {"a": [torch.ones(2)], "b": Frozen(torch.ones(1)), "c": Plain(torch.ones(1))}
    assert map_tensors(value, lambda tensor: tensor) is value
