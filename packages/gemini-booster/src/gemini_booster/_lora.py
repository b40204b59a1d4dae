"""Adapters: PEFT makes them, ranks share them, rank 0 saves them."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

from torch import nn

from gemini_booster._checkpoint import is_writer, report_to_all
from gemini_booster._gemini_ddp import GeminiDDP


def enable_lora(model: nn.Module, pretrained_dir: str | os.PathLike[str] | None, lora_config: object) -> nn.Module:
    """Put adapters into a model; see `Booster.enable_lora`."""
    peft = _peft()
    if isinstance(model, GeminiDDP):
        raise ValueError("The model is wrapped already. Call enable_lora first, then boost what it returns.")
    if (pretrained_dir is None) is (lora_config is None):
        raise ValueError("Give either lora_config, for new adapters, or pretrained_dir, where saved ones are.")
    if pretrained_dir is None:
        adapted = peft.get_peft_model(model, lora_config)
    else:
        adapted = peft.PeftModel.from_pretrained(model, os.fspath(pretrained_dir), is_trainable=True)
    assert isinstance(adapted, nn.Module)
    return adapted


def save_lora_as_pretrained(model: GeminiDDP, checkpoint: str | os.PathLike[str], *, use_safetensors: bool) -> None:
    """Save a model's adapters; see `Booster.save_lora_as_pretrained`."""
    peft = _peft()
    module = model.unwrap()
    if not isinstance(module, peft.PeftModel):
        raise ValueError(f"This {type(module).__name__} has no adapters: call booster.enable_lora before boost.")
    with report_to_all(model.process_group):
        entries = module.state_dict(keep_vars=True)
        saved = {
            id(entry)
            for adapter in module.peft_config
            for entry in peft.get_peft_model_state_dict(module, entries, adapter_name=adapter).values()
        }
        store = model.chunk_manager
        values = {
            name: (store.full_value(entry) if entry in store else entry.detach()).cpu()
            for name, entry in entries.items()
            if id(entry) in saved
        }
        if is_writer(model.process_group):
            if (path := Path(checkpoint)).is_file():
                raise ValueError(f"Adapters are saved in a folder, but {str(path)!r} is a file.")
            module.save_pretrained(os.fspath(checkpoint), safe_serialization=use_safetensors, state_dict=values)


def _peft() -> ModuleType:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ImportError("Adapters need the package peft: pip install peft.") from error
