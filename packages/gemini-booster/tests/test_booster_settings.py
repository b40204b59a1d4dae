"""Settings in words: amounts of memory, precisions, policies."""

from __future__ import annotations

import pytest
import torch

from gemini_booster import Booster, GeminiPlugin
from gemini_booster.zero import GeminiDDP


def capacity_of(amount: int | str | None) -> int | None:
    model = GeminiDDP(torch.nn.Linear(2, 2), precision="fp32", device_capacity=amount)
    return model.memory_usage()["device"]["capacity"]


@pytest.mark.parametrize(
    ("amount", "numel"),
    [
        (123456, 123456),
        ("123456", 123456),
        ("123456 B", 123456),
        ("100kB", 100_000),
        ("100 KiB", 102_400),
        ("1.5MB", 1_500_000),
        ("2mib", 2 * 2**20),
        (" 3 GB ", 3 * 10**9),
        ("0.5GiB", 2**29),
        ("1TB", 10**12),
        ("1TiB", 2**40),
        (None, None),
    ],
)
def test_amounts_of_memory_are_understood(amount: int | str | None, numel: int | None) -> None:
    assert capacity_of(amount) == numel


@pytest.mark.parametrize("amount", ["", "much", "-1", "1 GiBi", "1e3", "1,5GB", "GiB", True, -5, "2 G"])
def test_other_amounts_are_refused_by_name(amount: int | str) -> None:
    for name in ("device_capacity", "host_capacity"):
        with pytest.raises(ValueError, match=f"{name} must be a number of bytes, or text such as '2GiB'"):
            GeminiPlugin(**{name: amount})  # type: ignore[arg-type] # the name varies


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_precision_is_that_of_the_working_parameters(precision: str, dtype: torch.dtype) -> None:
    model = GeminiDDP(torch.nn.Linear(3, 2), precision=precision)  # type: ignore[arg-type] # one of the three
    assert {param.dtype for param in model.parameters()} == {dtype}
    assert model(torch.ones(1, 3)).dtype == dtype
    assert model.scales_loss == (precision == "fp16")
    assert {shard.master().dtype for shard in model.shards} == {torch.float32}


@pytest.mark.parametrize(
    ("settings", "stays"),
    [
        ({}, True),
        ({"precision": "bf16"}, True),
        ({"host_capacity": "1GiB"}, True),
        ({"device_capacity": "1GiB"}, False),
        ({"offload_optim_frac": 1.0}, False),
        ({"offload_optim_frac": 1.0, "offload_param_frac": 1.0}, False),
        ({"placement_policy": "auto"}, False),
    ],
)
def test_a_model_is_resident_if_all_of_it_stays_on_a_device_without_a_limit(
    settings: dict[str, object], stays: bool
) -> None:
    model = GeminiDDP(torch.nn.Linear(3, 2), **{"precision": "fp32", **settings})  # type: ignore[arg-type] # they vary
    assert model.is_resident == stays


def test_defaults_are_those_that_users_know() -> None:
    plugin = GeminiPlugin()
    assert (plugin.precision, plugin.placement_policy) == ("fp16", "static")
    assert (plugin.shard_param_frac, plugin.offload_optim_frac, plugin.offload_param_frac) == (1.0, 0.0, 0.0)
    assert (plugin.warmup_non_model_data_ratio, plugin.steady_cuda_cap_ratio) == (0.8, 0.9)
    assert (plugin.search_range_m, plugin.min_chunk_size_m) == (32, 32)
    assert (plugin.initial_scale, plugin.max_norm, plugin.norm_type) == (2**16, 0.0, 2.0)
    assert plugin.master_weights
    assert not plugin.pin_memory
    assert Booster().plugin == plugin


def test_plugin_is_a_value() -> None:
    assert GeminiPlugin(precision="bf16") == GeminiPlugin(precision="bf16") != GeminiPlugin()
    with pytest.raises(AttributeError):
        GeminiPlugin().precision = "fp32"  # type: ignore[misc] # that is the test


def test_settings_are_checked_when_the_plugin_is_made() -> None:
    with pytest.raises(ValueError, match="precision must be one of"):
        GeminiPlugin(precision="fp64")  # type: ignore[arg-type] # that is the test
    with pytest.raises(ValueError, match="placement_policy must be 'static' or 'auto', got 'cpu'"):
        GeminiPlugin(placement_policy="cpu")  # type: ignore[arg-type] # that is the test
    with pytest.raises(ValueError, match="warmup_non_model_data_ratio must be a number in"):
        GeminiPlugin(placement_policy="auto", warmup_non_model_data_ratio=-1)
    with pytest.raises(ValueError, match="growth_interval must be at least 1"):
        GeminiPlugin(growth_interval=0)
    with pytest.raises(ValueError, match=r"offload_param_frac=0.5 and disk_param_frac=0.7 are shares of the same"):
        GeminiPlugin(offload_param_frac=0.5, disk_param_frac=0.7, offload_directory=".")
    with pytest.raises(ValueError, match=r"disk_param_frac=0.7 send model states to the disk: give offload_directory"):
        GeminiPlugin(disk_param_frac=0.7)
