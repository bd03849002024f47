"""The notebook's cells, run in one process as a notebook does, print what the notebook shows."""

import json
from pathlib import Path

import pytest

from tests.helpers import launch, require

NOTEBOOK = launch.ROOT / "examples/two_ranks.ipynb"


@pytest.mark.launches
def test_the_cells_print_what_the_notebook_shows(tmp_path: Path) -> None:
    require.need("torch")
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code, shown = [f"import os; os.chdir({str(tmp_path)!r})"], []
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        source = "".join(cell["source"])
        magic, _, rest = source.partition("\n")
        if magic.startswith("%%writefile "):
            (tmp_path / magic.removeprefix("%%writefile ")).write_text(rest)
        else:
            code.append(source)
        shown += [line for output in cell["outputs"] for line in output["text"]]
    assert shown
    assert launch.printed("-c", "\n".join(code)) == "".join(shown)
