from __future__ import annotations

import math

import pytest

from gemini_optim import DynamicLossScaler


def scales(scaler: DynamicLossScaler, pattern: str) -> list[float]:
    found = []
    for step in pattern:
        scaler.update(step == "1")
        found.append(scaler.scale)
    return found


def test_scale_follows_overflows_and_clean_steps_with_hysteresis() -> None:
    # The tenth step's overflow is the first since the growth at the ninth: hysteresis forgives it.
    scaler = DynamicLossScaler(growth_interval=4, hysteresis=2)
    assert scales(scaler, "1001100001") == [65536] * 3 + [32768] + [16384] * 4 + [32768, 32768]
    assert scales(scaler, "1") == [16384]


def test_an_overflow_restarts_the_count_of_clean_steps() -> None:
    assert scales(DynamicLossScaler(8, growth_interval=3, hysteresis=9), "001001000") == [8] * 8 + [16]


def test_scale_stays_within_its_bounds() -> None:
    scaler = DynamicLossScaler(4, growth_interval=1, hysteresis=1, min_scale=2, max_scale=8)
    assert scales(scaler, "00011111") == [8, 8, 8, 4, 2, 2, 2, 2]


def test_factors_set_the_size_of_a_change() -> None:
    scaler = DynamicLossScaler(100, growth_factor=3, backoff_factor=0.1, growth_interval=1, hysteresis=1)
    assert scales(scaler, "01") == [300, pytest.approx(30)]


@pytest.mark.parametrize("cut", range(12))
def test_state_dict_restores_every_later_step(cut: int) -> None:
    pattern = "110001100000"
    whole = DynamicLossScaler(growth_interval=3)
    expected = scales(whole, pattern)
    first = DynamicLossScaler(growth_interval=3)
    scales(first, pattern[:cut])
    second = DynamicLossScaler(1, growth_factor=7, backoff_factor=0.1, growth_interval=9, hysteresis=5, max_scale=3)
    second.load_state_dict(first.state_dict())
    assert scales(second, pattern[cut:]) == expected[cut:]
    assert second.state_dict() == whole.state_dict()


def test_state_with_unknown_or_missing_keys_is_refused() -> None:
    scaler = DynamicLossScaler()
    state = scaler.state_dict()
    with pytest.raises(ValueError, match="growth_step"):
        scaler.load_state_dict({key: value for key, value in state.items() if key != "growth_step"})
    with pytest.raises(ValueError, match="extra"):
        scaler.load_state_dict({**state, "extra": 1.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial_scale": 0.5}, "min_scale"),
        ({"min_scale": 0}, "min_scale"),
        ({"max_scale": 2}, "max_scale"),
        ({"max_scale": math.inf}, "finite"),
        ({"initial_scale": math.nan}, "initial_scale"),
        ({"growth_factor": 1}, "growth_factor"),
        ({"backoff_factor": 1}, "backoff_factor"),
        ({"backoff_factor": 0}, "backoff_factor"),
        ({"growth_interval": 0}, "growth_interval"),
        ({"hysteresis": 0}, "hysteresis"),
    ],
)
def test_arguments_out_of_bounds_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicLossScaler(**arguments)  # type: ignore[arg-type]  # floats where ints belong, too
