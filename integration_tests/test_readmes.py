"""Every Python block of every README runs: the blocks of one README, in order, are one script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", *sorted((ROOT / "packages").glob("*/README.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def script_of(readme: str) -> str:
    """Return the Python blocks of a README as one script, each line where it was, so that errors name its number."""
    script, position = "", 0
    for block in BLOCK.finditer(readme):
        script += "\n" * readme.count("\n", position, block.start(1)) + block[1]
        position = block.end(1)
    return script


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_python_blocks_of_the_readme_run(readme: Path, tmp_path: Path) -> None:
    script = script_of(readme.read_text())
    assert script.strip(), f"{readme} has no ```python block."
    file = tmp_path / "readme.py"
    file.write_text(script)
    # No warning may greet whoever tries an example, except torch's own without numpy.
    command = [sys.executable, "-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{readme.relative_to(ROOT)}:\n{done.stdout}{done.stderr}"


def test_blocks_become_one_script_with_the_line_numbers_of_the_readme() -> None:
    readme = "# Title\n\n```python\na = 1\n```\ntext\n```bash\nnot python\n```\n```python\nb = a\n```\n"
    assert script_of(readme) == "\n\n\na = 1\n\n\n\n\n\n\nb = a\n"
    assert script_of(readme).splitlines().index("b = a") == readme.splitlines().index("b = a")
