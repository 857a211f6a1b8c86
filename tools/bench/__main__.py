"""Run benches by name and print their results."""

import argparse
import importlib
import tempfile
from pathlib import Path

from tools.bench.harness import LEAST_ROUNDS, RESULTS, Report

# name -> module below tools.bench
BENCHES = {
    "append": "append",
    "online": "online",
    "busy": "busy",
    "uniform": "uniform",
    "prioritized": "prioritized",
    "pixels": "pixels",
    "sequences": "sequences",
    "open": "open_time",
    "many_segments": "many_segments",
    "packs": "packs",
    "compressed": "compressed",
    "compacting": "compacting",
    "grown": "grown",
    "memory": "reader_memory",
    "episode_layout": "episode_layout",
    "import": "import_time",
    "compile": "compile_time",
    "processors": "processors",
    "save": "save_time",
    "write_path": "write_path",
    "durability": "durability",
    "before": "before",
    "cold": "cold",
    "device": "device",
    "retention": "retention",
    "sb3": "sb3",
    "exchange": "exchange",
    "sharded": "sharded",
    "scale": "scale",
    "thousands": "thousands",
}


def run_bench(name: str, *, tiny: bool, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Run one bench with its files in an empty folder."""
    bench = importlib.import_module(f"tools.bench.{BENCHES[name]}")
    report: Report = bench.run(bench.TINY if tiny else bench.FULL, rounds, folder, peers)
    return report


def parser() -> argparse.ArgumentParser:
    """Describe the arguments."""
    made = argparse.ArgumentParser(prog="tools/bench/run", description="Time diskreplay beside its peers.")
    made.add_argument("names", nargs="+", choices=[*BENCHES, "all"], metavar="name", help=", ".join([*BENCHES, "all"]))
    made.add_argument("--rounds", type=int, default=11, help=f"rounds in turn with the peer, {LEAST_ROUNDS} at least")
    made.add_argument("--tiny", action="store_true", help="a few steps, to see that it runs; numbers mean nothing")
    made.add_argument("--save", action="store_true", help="write tools/bench/results/<name>.md")
    made.add_argument("--folder", type=Path, help="where the files go for the time being; otherwise the system's")
    return made


def main() -> None:
    """Run the benches of the command line."""
    arguments = parser().parse_args()
    if arguments.rounds < LEAST_ROUNDS and not arguments.tiny:
        parser().error(f"fewer than {LEAST_ROUNDS} rounds say nothing")
    if arguments.save and arguments.tiny:
        parser().error("numbers of a tiny run are not worth saving")
    names = list(BENCHES) if "all" in arguments.names else list(dict.fromkeys(arguments.names))
    for name in names:
        with tempfile.TemporaryDirectory(prefix="diskreplay-bench-", dir=arguments.folder) as temporary:
            folder = Path(temporary)
            report = run_bench(name, tiny=arguments.tiny, rounds=arguments.rounds, folder=folder)
            page = report.markdown(f"tools/bench/run {name} --rounds {arguments.rounds}", folder)
        print(page, flush=True)
        if arguments.save:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{name}.md").write_text(page, encoding="utf-8")
    if arguments.save:
        from tools.bench import chart  # needs matplotlib

        chart.draw(chart.CHART)


if __name__ == "__main__":
    main()
