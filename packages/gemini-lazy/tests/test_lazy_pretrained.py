"""Weights from ``.safetensors`` files: exact, by slices, and with every mismatch named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from lazy_checks import peak_bytes
from torch import Tensor, nn

from gemini_lazy import (
    LazyError,
    LazyInitContext,
    is_lazy,
    load_pretrained,
    materialize,
    materialize_value,
    read_slice,
)

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.bool: "BOOL"}


def save(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file as the format's specification has it, independently of the reader."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def lazy_model() -> Model:
    with LazyInitContext():
        return Model()


@pytest.fixture
def values() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(value.shape).to(value.dtype) for name, value in Model().state_dict().items()}


def assert_loaded(model: nn.Module, values: dict[str, Tensor]) -> None:
    state = model.state_dict()
    for name, value in values.items():
        assert torch.equal(state[name], value.to(state[name].dtype)), name


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_tied_weight_is_found_under_either_name(tmp_path: Path, values: dict[str, Tensor], kept: str) -> None:
    weight = values.pop("head.weight")
    values.pop("embed.weight")
    save(tmp_path / "model.safetensors", values | {kept: weight})
    model = lazy_model()
    report = load_pretrained(model, tmp_path)
    assert report.missing == report.unexpected == ()
    assert all(is_lazy(parameter) for parameter in model.parameters())
    LazyInitContext.materialize(model)
    assert model.head.weight is model.embed.weight
    assert_loaded(model, values | {"embed.weight": weight})


def test_ordinary_and_half_materialised_modules_are_filled(tmp_path: Path, values: dict[str, Tensor]) -> None:
    values["head.weight"] = values["embed.weight"]
    save(tmp_path / "any_name.safetensors", values)
    ordinary, half = Model(), lazy_model()
    materialize(half.norm.weight)
    for model in (ordinary, half):
        load_pretrained(model, str(tmp_path / "any_name.safetensors"))
        LazyInitContext.materialize(model)
        assert_loaded(model, values)
        assert model.norm.weight.requires_grad


def test_sharded_checkpoint_is_read_by_its_index(tmp_path: Path, values: dict[str, Tensor]) -> None:
    del values["head.weight"]
    names = list(values)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, part in parts.items():
        save(tmp_path / file, {name: values[name] for name in part})
    weight_map = {name: file for file, part in parts.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    model = lazy_model()
    load_pretrained(model, tmp_path)
    LazyInitContext.materialize(model)
    assert_loaded(model, values)

    weight_map["ghost"] = "a.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"files lack: ghost in a\.safetensors"):
        load_pretrained(model, tmp_path)


def test_all_mismatches_come_in_one_message_and_change_nothing(tmp_path: Path, values: dict[str, Tensor]) -> None:
    del values["norm.bias"]
    values["norm.weight"] = torch.zeros(7)
    values["other"] = torch.zeros(1)
    save(tmp_path / "model.safetensors", values)
    model = lazy_model()
    before = materialize_value(model.embed.weight)
    wanted = "Missing: norm.bias. Unexpected: other. Of another shape: norm.weight is (7,), the module wants (6,)."
    with pytest.raises(ValueError, match=re.escape(wanted)):
        load_pretrained(model, tmp_path)
    assert torch.equal(materialize_value(model.embed.weight), before)

    values["norm.weight"] = torch.zeros(6)
    save(tmp_path / "model.safetensors", values)
    report = load_pretrained(model, tmp_path, strict=False)
    assert (report.missing, report.unexpected) == (("norm.bias",), ("other",))
    LazyInitContext.materialize(model)
    assert torch.equal(model.embed.weight, values["embed.weight"])
    assert torch.equal(model.norm.bias, torch.zeros(6))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_slices_equal_the_whole_in_every_dtype(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    weight = torch.randn(5, 7).to(stored)
    save(tmp_path / "model.safetensors", {"first": torch.zeros(3), "weight": weight})
    with LazyInitContext():
        module = nn.ParameterDict({"weight": torch.zeros(5, 7, dtype=wanted)})
    load_pretrained(module, tmp_path, strict=False)
    parameter = module["weight"]
    assert torch.equal(materialize_value(parameter), weight.to(wanted))
    for start, stop in ((0, 35), (3, 11), (34, 35), (8, 8)):
        part = read_slice(parameter, start, stop)
        assert part.dtype == wanted
        assert torch.equal(part, weight.to(wanted).flatten()[start:stop])
    with pytest.raises(ValueError, match="do not lie within a tensor of 35"):
        read_slice(parameter, 3, 36)


def test_slices_of_what_comes_from_no_file_are_cut_from_the_value(tmp_path: Path) -> None:
    with LazyInitContext():
        module = nn.ParameterDict({"weight": torch.randn(6, 2), "other": torch.zeros(2, 6).t()})
    whole = materialize_value(module["weight"])
    assert torch.equal(read_slice(module["weight"], 2, 9), whole.flatten()[2:9])
    save(tmp_path / "model.safetensors", {"weight": whole, "other": whole + 1})
    load_pretrained(module, tmp_path)
    with LazyInitContext(), torch.no_grad():
        module["weight"].mul_(2)
    assert torch.equal(read_slice(module["weight"], 2, 9), (whole * 2).flatten()[2:9])
    assert torch.equal(read_slice(module["other"], 2, 9), (whole + 1).flatten()[2:9])
    assert torch.equal(materialize(module["other"]), whole + 1)


def test_slice_costs_only_its_own_bytes(tmp_path: Path) -> None:
    numel = 2**20
    save(tmp_path / "model.safetensors", {"weight": torch.ones(numel // 16, 16, dtype=torch.bool)})
    with LazyInitContext():
        module = nn.ParameterDict({"weight": torch.randn(numel // 16, 16)})
    load_pretrained(module, tmp_path)
    peak = peak_bytes(lambda: read_slice(module["weight"], 1000, 2000))
    assert 4 * 1000 <= peak <= 5 * 1000 + 64


def test_damaged_and_absent_files_are_errors(tmp_path: Path) -> None:
    model = lazy_model()
    with pytest.raises(FileNotFoundError):
        load_pretrained(model, tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"old")
    with pytest.raises(FileNotFoundError, match=r"pytorch_model\.bin"):
        load_pretrained(model, tmp_path)
    file = tmp_path / "model.safetensors"
    save(file, {"weight": torch.zeros(100)})
    whole = file.read_bytes()
    for cut, message in ((5, "is no .safetensors file"), (len(whole) - 1, "is damaged or cut")):
        file.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=message):
            load_pretrained(model, tmp_path)
    file.write_bytes(whole.replace(b"F32", b"F99"))
    with pytest.raises(ValueError, match="dtype F99; known are"):
        load_pretrained(model, tmp_path)

    file.write_bytes(whole)
    with LazyInitContext():
        module = nn.ParameterDict({"weight": torch.zeros(100)})
    load_pretrained(module, file)
    file.write_bytes(whole[:-4])
    with pytest.raises(LazyError, match="ends in the middle of 'weight'"):
        materialize_value(module["weight"])


def test_several_files_without_an_index_need_a_choice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path / f"{name}.safetensors", {})
    with pytest.raises(ValueError, match="Name the file"):
        load_pretrained(lazy_model(), tmp_path)
