"""The runs in a folder with their progress and, if they failed, the reason."""

from pathlib import Path

from rich.table import Table

from bitcycle.training.run_folder import RunFolder

DEFAULT_ROOT = Path("results/runs")


def status_table(root: Path) -> Table:
    """One row for each run folder below `root`."""
    table = Table("run", "state", "step", "last update", "result", title=f"runs in {root}")
    for status_file in sorted(root.rglob("status.json")):
        folder = RunFolder(status_file.parent)
        status, summary = folder.read_status(), folder.read_summary()
        state = str(status.get("state", "unreadable"))
        if state == "running" and not folder.is_in_use():
            state = "stopped"
        result = (
            f"{summary['metric']} {summary['final']:.2f}" if state == "done" and summary else status.get("reason") or ""
        )
        step = f"{status.get('step', '?')}/{status.get('total_steps', '?')}"
        table.add_row(str(folder.path.relative_to(root)), state, step, str(status.get("updated", "")), str(result)[:60])
    return table
