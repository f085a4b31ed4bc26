"""Executes the cells of a notebook from top to bottom and stores their output: printed text, and the figures of `plt.show()`.

Usage: MPLBACKEND=agg python scripts/notebook.py docs/examples/own-model.ipynb
"""

import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the output of its code cells, which share one namespace. Raises what a cell raises."""
    plt.close("all")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(codes, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
        lines = printed.getvalue().splitlines(keepends=True)
        cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []
        cell["outputs"] += [_picture(figure) for figure in plt.get_fignums()]
        cell["execution_count"] = number
    return notebook


def _picture(number: int) -> dict[str, Any]:
    file = io.BytesIO()
    plt.figure(number).savefig(file, format="png")
    plt.close(number)
    data = {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": ["<Figure>"]}
    return {"output_type": "display_data", "data": data, "metadata": {}}


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(json.dumps(execute(json.loads(path.read_text())), indent=1, ensure_ascii=False) + "\n")
