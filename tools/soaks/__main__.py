"""Many processes on one store: they are killed, stopped, and it is moved below them; then an exact account.

They write, sample, save, evict by hand, open and close, verify and repair, and merge segments, while the capacity
evicts what is old.

Every step says who wrote it, in which lane, and as the how-manieth. A writer notes each step in shared memory as soon
as `append` has returned, so it is known what must be there when it is killed.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tools.bench.harness import Report, Table
from tools.soaks.account import Account, Plan, Soak

RESULT = Path(__file__).parent / "result.md"


def page(account: Account, command: str, folder: Path) -> str:
    """Return the result as a page."""
    rows = [
        ["seconds", f"{account.seconds:,.0f}"],
        ["processes killed by SIGKILL", f"{account.kills:,}"],
        ["of them writers", f"{account.writer_kills:,}"],
        ["processes that stood still for longer than a lock is waited for", f"{account.stops:,}"],
        ["moves of the store over another one, whose writer lived on", f"{account.moves:,}"],
        ["steps committed", f"{account.committed:,}"],
        ["steps evicted", f"{account.evicted:,}"],
        ["of them chosen by hand", f"{account.evicted_by_hand:,}"],
        ["steps kept, each there once", f"{account.kept:,}"],
        ["checks of every value in the store", f"{account.checks:,}"],
        ["runs of verify and repair beside it all", f"{account.inspections:,}"],
        ["segments merged into packs beside it all", f"{account.merged:,}"],
        ["batches drawn, every value checked", f"{account.batches:,}"],
        ["slowest open, s", f"{account.slowest_open_s:.2f}"],
        ["steps lost, torn or doubled, findings of verify --deep, processes that failed", f"{len(account.problems)}"],
    ]
    tables = [Table(["what", "count"], rows)]
    if account.growth:
        tables.append(Table(["long-lived process", "holds", "second quarter", "last quarter"], account.growth))
    return Report("Soak", tables, caveats=account.problems).markdown(command, folder)


def parser() -> argparse.ArgumentParser:
    """Describe the arguments."""
    made = argparse.ArgumentParser(prog="tools/soak", description="Use, kill, stop and move; then count steps.")
    defaults = Plan()
    made.add_argument("--seconds", type=float, default=defaults.seconds, help="how long, at most")
    made.add_argument("--kills", type=int, default=defaults.kills, help="how many processes are killed, at most")
    made.add_argument("--writers", type=int, default=defaults.writers, help="every other one of several environments")
    made.add_argument("--samplers", type=int, default=defaults.samplers)
    made.add_argument(
        "--others", type=int, default=defaults.others, help="of each who evict, open, verify and repair, merge"
    )
    made.add_argument("--stop-every", type=float, default=defaults.stop_every, help="seconds between long stops")
    made.add_argument("--stop-s", type=float, default=defaults.stop_s, help="how long one is")
    made.add_argument("--move-every", type=float, default=defaults.move_every, help="seconds between moves")
    made.add_argument("--kill-every", type=float, default=defaults.kill_every, help="mean of the seconds between kills")
    made.add_argument("--capacity", type=int, default=defaults.capacity, help="steps that the store keeps")
    made.add_argument("--check-every", type=int, default=defaults.check_every, help="kills between two full checks")
    made.add_argument("--seed", type=int, default=defaults.seed)
    made.add_argument("--folder", type=Path, help="where the store goes for the time being; otherwise the system's")
    made.add_argument("--save", action="store_true", help=f"write tools/soaks/{RESULT.name}")
    return made


def main() -> None:
    """Run what the command line says; exit code 1 where anything was wrong."""
    given = parser().parse_args()
    plan = Plan(
        seconds=given.seconds,
        kills=given.kills,
        writers=given.writers,
        samplers=given.samplers,
        others=given.others,
        stop_every=given.stop_every,
        stop_s=given.stop_s,
        move_every=given.move_every,
        kill_every=given.kill_every,
        capacity=given.capacity,
        check_every=given.check_every,
        seed=given.seed,
    )
    with tempfile.TemporaryDirectory(prefix="diskreplay-soak-", dir=given.folder) as temporary:
        folder = Path(temporary)
        account = Soak(plan, folder).run()
        arguments = [argument for argument in sys.argv[1:] if argument != "--save"]
        text = page(account, " ".join(["tools/soak", *arguments]), folder)
    print(text, flush=True)
    if given.save:
        RESULT.write_text(text, encoding="utf-8")
    sys.exit(1 if account.problems else 0)


if __name__ == "__main__":
    main()
