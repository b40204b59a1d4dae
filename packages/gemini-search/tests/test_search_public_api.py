"""The public surface: a change to it must be made here too."""

import inspect
import sys

import gemini_search


def test_public_names_and_signature_are_as_stated() -> None:
    assert gemini_search.__all__ == [
        "ChunkConfiguration",
        "ChunkSpec",
        "TensorSlot",
        "__version__",
        "search_chunk_configuration",
    ]
    assert str(inspect.signature(gemini_search.search_chunk_configuration)) == (
        "(sizes: 'Mapping[str, int] | Sequence[tuple[str, int]]', world_size: 'int', *, hidden_dim: 'int' = 1024, "
        "search_range_m: 'float' = 32, min_chunk_size_m: 'float' = 32, filter_exlarge_params: 'bool' = True, "
        "group_by: 'Callable[[str], Hashable] | None' = None, method: \"Literal['best', 'sweep']\" = 'best') "
        "-> 'ChunkConfiguration'"
    )


def test_package_needs_the_standard_library_only() -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("gemini_search")]
    imported = {
        value.__name__.partition(".")[0]
        for module in modules
        for value in vars(module).values()
        if inspect.ismodule(value)
    }
    assert imported <= sys.stdlib_module_names | {"gemini_search"}
