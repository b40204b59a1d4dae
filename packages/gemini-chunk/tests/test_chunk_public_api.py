"""The public surface: a change to it must be made in ``chunk_public_api.txt`` too."""

import inspect
import sys
from pathlib import Path

import gemini_chunk
import gemini_chunk.testing


def surface() -> list[str]:
    """Return one line for each public name and each public member of a class, with its signature."""
    lines = []
    for module in (gemini_chunk, gemini_chunk.testing):
        for name in module.__all__:
            value = getattr(module, name)
            is_built = (
                inspect.isclass(value) and "__init__" in vars(value) and not getattr(value, "_is_protocol", False)
            )
            if inspect.isfunction(value) or is_built:
                lines.append(f"{module.__name__}.{name}{inspect.signature(value)}")
            else:
                lines.append(f"{module.__name__}.{name}")
            if inspect.isclass(value):
                for member, _ in sorted(inspect.getmembers(value), key=lambda pair: pair[0]):
                    found = inspect.getattr_static(value, member)
                    if not member.startswith("_") and inspect.isfunction(found):
                        lines.append(f"    {member}{inspect.signature(found)}")
                    elif not member.startswith("_") and isinstance(found, property):
                        lines.append(f"    {member}")
    return lines


def test_public_names_and_signatures_are_as_stated() -> None:
    stated = Path(__file__).with_name("chunk_public_api.txt").read_text().splitlines()
    assert surface() == stated


def test_package_needs_torch_and_the_standard_library_only() -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("gemini_chunk")]
    imported = {
        value.__module__.partition(".")[0]
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value) or inspect.isfunction(value)
    }
    assert imported <= sys.stdlib_module_names | {"gemini_chunk", "torch"}
