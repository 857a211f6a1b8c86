"""Draw the chart of the documents from the saved results: `python -m tools.bench.chart`."""

from pathlib import Path
from typing import NamedTuple

import matplotlib

from tools.bench.harness import OURS, RESULTS

CHART = Path(__file__).parents[2] / "docs/images/benchmarks.svg"
OWN, PEER = "#3f51b5", "#b0bec5"


class Panel(NamedTuple):
    """Bars of one table: a column by its header, and a label for each row that is shown."""

    title: str
    result: str
    table: str
    column: str
    rows: dict[str, str]


PANELS = (
    Panel(
        "Collect and learn: append a step, then draw\na batch of 256 (µs, less is better)",
        "online",
        "append and sample, uniform",
        "median µs",
        {
            "diskreplay": "diskreplay, on disk",
            "diskreplay, full store": "the same, full",
            "cpprb (RAM)": "cpprb, RAM",
            "SB3 (RAM)": "SB3, RAM",
            "Tianshou (RAM)": "Tianshou, RAM",
            "TorchRL, memory-mapped": "TorchRL, on disk",
        },
    ),
    Panel(
        "The same with 5-step returns, priorities\nand their update (µs, less is better)",
        "online",
        "append, sample and update, 5-step priorities",
        "median µs",
        {
            "diskreplay": "diskreplay, on disk",
            "diskreplay, full store": "the same, full",
            "cpprb (RAM)": "cpprb, RAM",
            "Tianshou (RAM)": "Tianshou, RAM",
        },
    ),
    Panel(
        "256 stacks of four frames, 84 × 84,\nin memory (µs, less is better)",
        "pixels",
        "a batch of 256, drawn and updated",
        "median µs",
        {
            "diskreplay": "diskreplay, priorities",
            "cpprb (RAM)": "cpprb, priorities, RAM",
            "TorchRL ReplayBuffer, uniform": "TorchRL, uniform",
        },
    ),
    Panel(
        "Four times more frames than fit in memory\n(batches a second, more is better)",
        "cold",
        "a quarter in memory",
        "batches a second",
        {
            "diskreplay, prefetch=4": "diskreplay, prefetch=4",
            "diskreplay": "diskreplay",
            "TorchRL memmap": "TorchRL, on disk",
        },
    ),
)


def values(panel: Panel) -> dict[str, str]:
    """Read a panel's rows from the saved page, without absent peers: the number as written, by label."""
    page = (RESULTS / f"{panel.result}.md").read_text(encoding="utf-8")
    (found,) = [block for block in page.split("\n\n") if block.startswith(f"| {panel.table} |")]
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()]
    at = header.index(panel.column)
    cells = {row[0]: row[at] for row in rows}
    return {label: cells[name] for name, label in panel.rows.items() if name in cells}


def draw(path: Path) -> None:
    """Draw all panels into an SVG whose texts are texts."""
    from matplotlib.figure import Figure

    style = {"svg.fonttype": "none", "svg.hashsalt": "diskreplay", "font.size": 9, "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, 4.6), layout="constrained")
        rows = [PANELS[:2], PANELS[2:]]
        grid = figure.subplots(2, 2, gridspec_kw={"height_ratios": [6, 3]})
        for axes, panel, row in zip(grid.flat, PANELS, [rows[0], rows[0], rows[1], rows[1]], strict=True):
            shown = values(panel)
            lengths = [float(text.replace(",", "")) for text in shown.values()]
            own = {label for name, label in panel.rows.items() if name.startswith(OURS)}
            colors = [OWN if label in own else PEER for label in shown]
            bars = axes.barh(list(shown), lengths, color=colors, height=0.7)
            axes.bar_label(bars, labels=list(shown.values()), padding=3)
            axes.set_title(panel.title, fontsize=9, loc="left", x=-0.3, fontweight="bold")
            axes.set_ylim(max(len(each.rows) for each in row) - 0.5, -0.5)
            axes.set_xlim(0, max(lengths) * 1.15)
            axes.xaxis.set_visible(False)
            axes.tick_params(left=False)
            axes.spines[:].set_visible(False)
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    draw(CHART)
