"""The public surface: a change to it must be made here too."""

from __future__ import annotations

import dataclasses
import inspect

import gemini_booster
import gemini_booster.zero
from gemini_booster import Booster, GeminiPlugin
from gemini_booster.zero import GeminiAdamOptimizer, GeminiDDP, GeminiOptimizer

CHECKPOINT = "checkpoint: 'str | os.PathLike[str]'"
SIGNATURES = {
    "__init__": "(self, *, plugin: 'GeminiPlugin | None' = None) -> 'None'",
    "backward": "(self, loss: 'Tensor', optimizer: 'torch.optim.Optimizer') -> 'None'",
    "no_sync": ("(self, model: 'nn.Module', optimizer: 'torch.optim.Optimizer | None' = None) -> 'Iterator[None]'"),
    "save_model": (
        f"(self, model: 'nn.Module', {CHECKPOINT}, *, shard: 'bool' = False, prefix: 'str | None' = None, "
        "size_per_shard: 'float' = 1024, use_safetensors: 'bool' = False, dtype: 'torch.dtype | None' = None) -> 'None'"
    ),
    "load_model": f"(self, model: 'nn.Module', {CHECKPOINT}, *, strict: 'bool' = True) -> 'None'",
    "enable_lora": (
        "(self, model: 'nn.Module', pretrained_dir: 'str | os.PathLike[str] | None' = None, "
        "lora_config: 'object' = None) -> 'nn.Module'"
    ),
    "save_lora_as_pretrained": (
        f"(self, model: 'nn.Module', {CHECKPOINT}, *, use_safetensors: 'bool' = False) -> 'None'"
    ),
    "save_optimizer": f"(self, optimizer: 'torch.optim.Optimizer', {CHECKPOINT}) -> 'None'",
    "load_optimizer": f"(self, optimizer: 'torch.optim.Optimizer', {CHECKPOINT}) -> 'None'",
    "save_lr_scheduler": f"(self, lr_scheduler: 'LRScheduler', {CHECKPOINT}) -> 'None'",
    "load_lr_scheduler": f"(self, lr_scheduler: 'LRScheduler', {CHECKPOINT}) -> 'None'",
    "execute_pipeline": "(self) -> 'NoReturn'",
}
MODEL_SETTINGS = [
    "precision",
    "placement_policy",
    "shard_param_frac",
    "offload_optim_frac",
    "offload_param_frac",
    "disk_optim_frac",
    "disk_param_frac",
    "warmup_non_model_data_ratio",
    "steady_cuda_cap_ratio",
    "gpu_margin_mem_ratio",
    "device_capacity",
    "host_capacity",
    "offload_directory",
    "max_prefetch",
    "max_fetch",
    "max_held",
    "hidden_dim",
    "min_chunk_size_m",
    "search_range_m",
    "chunk_configuration",
    "memstats",
    "pin_memory",
    "master_weights",
    "enable_gradient_accumulation",
    "reduce_dtype",
    "keep_fp32",
    "leaf_modules",
    "scatter_after_inference",
    "force_outputs_fp32",
    "process_group",
]
OPTIMIZER_SETTINGS = [
    "initial_scale",
    "min_scale",
    "max_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
    "max_norm",
    "norm_type",
]
ADAM_SETTINGS = ["lr", "betas", "eps", "weight_decay", "bias_correction", "adamw_mode"]


def keywords(function: object) -> dict[str, object]:
    """Return the keyword-only parameters of a constructor with their defaults."""
    assert callable(function)
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def test_public_names_are_as_stated() -> None:
    assert gemini_booster.__all__ == ["Booster", "GeminiPlugin", "__version__", "launch_from_torch"]
    assert gemini_booster.zero.__all__ == ["GeminiAdamOptimizer", "GeminiDDP", "GeminiOptimizer"]
    launch = str(inspect.signature(gemini_booster.launch_from_torch))
    assert launch == "(seed: 'int' = 1024, *, timeout_s: 'float' = 600.0) -> 'None'"


def test_methods_of_the_booster_are_as_stated() -> None:
    public = {name for name, value in vars(Booster).items() if inspect.isfunction(value) and name[0] != "_"}
    assert public == {*SIGNATURES, "boost"} - {"__init__"}
    for name, signature in SIGNATURES.items():
        assert str(inspect.signature(getattr(Booster, name))) == signature, name
    boost = inspect.signature(Booster.boost).parameters
    assert list(boost) == ["self", "model", "optimizer", "criterion", "dataloader", "lr_scheduler"]
    assert [boost[name].default for name in list(boost)[2:]] == [None] * 4


def test_plugin_model_and_optimizers_have_the_same_settings_with_the_same_defaults() -> None:
    plugin = {field.name: field.default for field in dataclasses.fields(GeminiPlugin)}
    assert list(plugin) == [*MODEL_SETTINGS, *OPTIMIZER_SETTINGS, "verbose"]
    model, optimizer, adam = map(keywords, (GeminiDDP, GeminiOptimizer, GeminiAdamOptimizer))
    assert list(model) == [*MODEL_SETTINGS, "verbose"]
    assert list(optimizer) == [*OPTIMIZER_SETTINGS, "verbose"]
    assert list(adam) == [*ADAM_SETTINGS, *OPTIMIZER_SETTINGS, "verbose"]
    for settings in (model, optimizer):
        assert all(plugin[name] == default for name, default in settings.items())
    assert all(adam[name] == default for name, default in optimizer.items())


def test_every_setting_is_documented() -> None:
    for documented, settings in (
        (GeminiDDP, MODEL_SETTINGS),
        (GeminiOptimizer, OPTIMIZER_SETTINGS),
        (GeminiAdamOptimizer, ADAM_SETTINGS),
    ):
        text = inspect.getdoc(documented)
        assert text is not None
        assert [name for name in settings if f"\n    {name}: " not in text] == []
