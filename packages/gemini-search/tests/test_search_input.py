"""Input that is refused, and the command line."""

import io
import json

import pytest

from gemini_search import search_chunk_configuration
from gemini_search.__main__ import main


@pytest.mark.parametrize(
    ("sizes", "error", "says"),
    [
        ({}, ValueError, "sizes is empty"),
        ([], ValueError, "sizes is empty"),
        ({"a": -1}, ValueError, "'a' must not be negative, got -1"),
        ({"a": 1.5}, TypeError, "'a' must be an int"),
        ({"a": True}, TypeError, "'a' must be an int"),
        ({3: 1}, TypeError, "name must be a str, got 3"),
        ([("a", 1), ("a", 2)], ValueError, "'a' occurs twice"),
        ([("a", 1, 2)], TypeError, r"Entry 0 of sizes must be a pair"),
        (["ab"], TypeError, "Entry 0 of sizes must be a pair"),
        ("a 1", TypeError, "got str"),
        ({1, 2}, TypeError, "got set"),
    ],
)
def test_sizes_that_are_no_list_of_tensors_are_refused(sizes, error, says) -> None:
    with pytest.raises(error, match=says):
        search_chunk_configuration(sizes, 2)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
        ({"world_size": 2.0}, TypeError, "world_size must be an int"),
        ({"hidden_dim": 0}, ValueError, "hidden_dim must be at least 1, got 0"),
        ({"search_range_m": -1}, ValueError, "search_range_m must be finite and not negative"),
        ({"search_range_m": "32"}, TypeError, "search_range_m must be a number"),
        ({"min_chunk_size_m": float("nan")}, ValueError, "min_chunk_size_m must be finite"),
        ({"min_chunk_size_m": float("inf")}, ValueError, "min_chunk_size_m must be finite"),
        ({"method": "greedy"}, ValueError, 'method must be "best" or "sweep", got \'greedy\''),
        ({"group_by": "layer"}, TypeError, "group_by must be a function"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(options, error, says) -> None:
    with pytest.raises(error, match=says):
        search_chunk_configuration({"a": 1}, **{"world_size": 1, **options})


def test_command_prints_the_table_for_lines_and_for_json(tmp_path, capsys, monkeypatch) -> None:
    lines = tmp_path / "sizes.txt"
    lines.write_text("# name numel\nembed 1_000\n\nhead 24\n")
    arguments = ["--world-size", "2", "--min-chunk-size-m", "0"]
    assert main([str(lines), *arguments]) == 0
    from_lines = capsys.readouterr().out
    for value in ({"embed": 1000, "head": 24}, [["embed", 1000], ["head", 24]]):
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(value)))
        assert main(arguments) == 0
        assert capsys.readouterr().out == from_lines
    assert "tensors 2, elements 1,024, chunks 1, ranks 2" in from_lines


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("embed\n", "Line 1 must read `name numel`"),
        ("a 1\nb x\n", "Line 2 must read `name numel`"),
        ('{"a": "x"}', "must be an int"),
        ('{"a": 1, "a": 2}', "occurs twice"),
        ("[1, 2]", "must be a pair"),
        ("{", "Expecting"),
        ("", "sizes is empty"),
    ],
)
def test_command_refuses_bad_input_with_status_two(text, says, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main([]) == 2
    assert says in capsys.readouterr().err


def test_command_names_a_file_that_is_missing(tmp_path, capsys) -> None:
    assert main([str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err
