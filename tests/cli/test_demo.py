import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import diskreplay as dr
from diskreplay.cli import demo_collector, demo_learner, demo_run
from diskreplay.cli.demo_collector import Policy
from diskreplay.cli.demo_learner import policy_layers
from diskreplay.cli.dqn_per import Learner, QNetwork, evaluate
from diskreplay.cli.main import main

COMMAND = [sys.executable, "-m", "diskreplay", "demo"]
# It learns within a second of its first thousand steps: on a busy machine before a test has seen those.
NEVER_DONE = """
import sys
from diskreplay.cli import demo_run, main
demo_run.ENOUGH_RETURN = float("inf")
sys.exit(main.main(["demo", *sys.argv[1:]]))
"""
ENDLESS = [sys.executable, "-c", NEVER_DONE]
PATIENCE_SECONDS = 600.0


def network(seed: int = 0) -> QNetwork:
    torch.manual_seed(seed)
    return QNetwork()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[dr.Store]:
    with dr.create(tmp_path / "store", demo_collector.schema()) as store:
        yield store


def test_the_policy_in_numpy_is_the_network_in_torch() -> None:
    net, obs = network(), np.random.default_rng(0).normal(0, 2, (50, 4)).astype(np.float32)
    policy = Policy(policy_layers(net), epsilon=0.0, allowed=0)
    expected = net(torch.from_numpy(obs)).detach().numpy()
    np.testing.assert_allclose([policy.q_values(row) for row in obs], expected, rtol=1e-5, atol=1e-5)
    rng = np.random.default_rng(0)
    assert [policy.act(row, rng) for row in obs] == expected.argmax(1).tolist()


def test_epsilon_is_how_often_an_action_is_random() -> None:
    constant = [(np.zeros((2, 4), np.float32), np.array([0, 1], np.float32))]
    rng = np.random.default_rng(0)
    actions = [Policy(constant, 0.5, 0).act(np.zeros(4, np.float32), rng) for _ in range(4000)]
    assert abs(np.mean(actions) - 0.75) < 0.03


def test_a_published_policy_is_loaded_as_it_was(tmp_path: Path) -> None:
    policy = Policy(policy_layers(network()), 0.25, 1234)
    policy.publish(tmp_path / "policy.npz")
    loaded = Policy.load(tmp_path / "policy.npz")
    assert (loaded.epsilon, loaded.allowed, len(loaded.layers)) == (0.25, 1234, 3)
    for ours, theirs in zip(policy.layers, loaded.layers, strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1], theirs[1])
    assert [path.name for path in tmp_path.iterdir()] == ["policy.npz"]


def test_later_training_does_not_change_a_published_copy() -> None:
    net = network()
    before = policy_layers(net)
    kept = [(weight.copy(), bias.copy()) for weight, bias in before]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1.0)
    for (weight, bias), (old_weight, old_bias) in zip(before, kept, strict=True):
        np.testing.assert_array_equal(weight, old_weight)
        np.testing.assert_array_equal(bias, old_bias)


def test_collectors_get_each_new_policy_once_until_the_trainer_closes_the_pipe(tmp_path: Path) -> None:
    file, (theirs, ours) = tmp_path / "policy.npz", Pipe(duplex=False)
    threading.Timer(0.05, Policy([], 1.0, 1).publish, [file]).start()
    found = demo_collector.policies(file, theirs)
    assert next(found).allowed == 1
    Policy([], 1.0, 2).publish(file)
    assert next(found).allowed == 2
    ours.close()
    assert list(found) == []
    theirs.close()


def test_the_update_goes_for_reward_plus_discounted_value_of_the_other_networks_choice(store: dr.Store) -> None:
    torch.manual_seed(1)
    learner = Learner(store, seed=0, updates=100)
    learner.target.load_state_dict(network(2).state_dict())
    online, target = learner.online, learner.target
    generator = torch.Generator().manual_seed(0)
    batch = SimpleNamespace(
        obs=torch.randn(8, 4, generator=generator),
        next_obs=torch.randn(8, 4, generator=generator),
        action=torch.tensor([0, 1] * 4),
        reward=torch.arange(8.0),
        discount=torch.tensor([0.95, 0.0] * 4),
        weight=torch.linspace(0.3, 1.0, 8),
        index=torch.arange(8),
    )
    td_errors = []
    learner.sampler = SimpleNamespace(
        sample=lambda: batch, update_priorities=lambda index, td_error: td_errors.append(td_error.detach())
    )
    with torch.no_grad():
        values, ours, theirs = online(batch.obs), online(batch.next_obs), target(batch.next_obs)
    errors = [
        values[i, batch.action[i]] - (batch.reward[i] + batch.discount[i] * theirs[i, ours[i].argmax()])
        for i in range(8)
    ]
    old = [parameter.detach().clone() for parameter in target.parameters()]
    losses = [learner.update() for _ in range(20)]
    torch.testing.assert_close(td_errors[0], torch.stack(errors))
    assert losses[0] == pytest.approx(float((batch.weight * torch.stack(errors).square()).mean()), rel=1e-5)
    assert losses[-1] < losses[0]
    assert all(not torch.equal(was, now) for was, now in zip(old, target.parameters(), strict=True))


def test_the_learner_waits_for_the_first_steps_and_then_gives_back_the_errors_of_each_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, updates = [], []
    sample, update_priorities = dr.Sampler.sample, dr.Sampler.update_priorities

    def noting_sample(sampler: dr.Sampler) -> dr.Batch:
        batches.append((repr(sampler), sample(sampler)))
        return batches[-1][1]

    def noting_update(sampler: dr.Sampler, index: torch.Tensor, td_error: torch.Tensor) -> int:
        updates.append((index, td_error, update_priorities(sampler, index, td_error)))
        return updates[-1][-1]

    monkeypatch.setattr(dr.Sampler, "sample", noting_sample)
    monkeypatch.setattr(dr.Sampler, "update_priorities", noting_update)
    rng = np.random.default_rng(0)
    with dr.create(tmp_path / "store", demo_collector.schema()) as store, store.writer() as writer:
        found = demo_learner.learn(store, tmp_path / "policy.npz", seed=0, collectors=4)
        assert next(found).steps == 0
        for _ in range(50):
            obs = rng.normal(size=(21, 4)).astype("f4")
            writer.append_episode(obs, rng.integers(2, size=20), np.ones(20, "f4"), terminated=True)
        progress = next(found)
        found.close()
    assert (progress.steps, progress.updates) == (1000, demo_learner.ROUND)
    assert batches[0][0] == "Prioritized(alpha=0.6, beta=0.4→1.0) over Transitions(n_step=5)"
    assert len(batches) == len(updates) == demo_learner.ROUND
    for (_, batch), (index, td_error, skipped) in zip(batches, updates, strict=True):
        assert torch.equal(index, batch.index)
        assert td_error.isfinite().all()
        assert skipped == 0
    assert float(batches[0][1].weight.min()) == 1.0  # all are new, and as likely
    assert float(batches[-1][1].weight.min()) < 1.0


def test_the_time_to_give_up_counts_from_the_first_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(demo_run.time, "monotonic", lambda: now[0])

    def learn(*_: object) -> Iterator[demo_learner.Progress]:
        for seconds, updates in ((1000, 0), (1000, 25), (3, 50), (3, 75), (3, 100)):
            now[0] += seconds
            yield demo_learner.Progress(updates=updates)

    class Nobody:
        policy_file = tmp_path / "policy"

        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> "Nobody":
            return self

        def __exit__(self, *_: object) -> None: ...
        def check(self) -> None: ...

    monkeypatch.setattr(demo_learner, "learn", learn)
    monkeypatch.setattr(demo_run, "Collectors", Nobody)
    assert demo_run._learn(tmp_path / "store", tmp_path, 0, 0.0, 6.0, lambda: None).updates == 75


def test_a_path_at_which_something_is_advises_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["demo", "--path", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"diskreplay: {tmp_path} exists already, and the demo makes a new store: give it another --path"
    )
    assert said.endswith(f"with `diskreplay inspect {tmp_path}`\n")


def test_an_evaluation_is_a_function_of_the_seed_and_counts_each_episode_once(store: dr.Store) -> None:
    learner = Learner(store, seed=0, updates=100)
    with torch.no_grad():
        for parameter in learner.online.parameters():
            parameter.zero_()
    first, again = (evaluate(learner, 7) for _ in range(2))  # always to the left: falls in about ten steps
    assert first == again
    assert 8 <= first <= 11


@pytest.mark.slow
def test_a_collector_plays_what_is_allowed_and_loads_neither_torch_nor_numba(tmp_path: Path) -> None:
    script = """
import sys, threading
from multiprocessing import Pipe
from pathlib import Path
import diskreplay as dr
from diskreplay.cli import demo_collector
folder = Path(sys.argv[1])
dr.create(folder / "store", demo_collector.schema()).close()
layer = demo_collector.np.zeros((2, 4), "f4"), demo_collector.np.zeros(2, "f4")
demo_collector.Policy([layer], 1.0, 70).publish(folder / "policy.npz")
theirs, ours = Pipe(duplex=False)
def stop():
    with dr.open(folder / "store") as store:
        while len(store) < 70:
            store.refresh()
    ours.close()
threading.Thread(target=stop).start()
demo_collector.collect(folder / "store", folder / "policy.npz", theirs, 5)
print([name for name in ("torch", "numba", "matplotlib", "pandas") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    with dr.open(tmp_path / "store") as store:
        assert len(store) == 70
        for episode in store.episodes:
            assert episode.obs.shape == (len(episode) + 1, 4)
            assert episode.total_reward == len(episode)
            assert episode.terminated != episode.cut


def test_what_went_wrong_in_a_collector_is_left_for_the_trainer(tmp_path: Path) -> None:
    theirs, ours = Pipe(duplex=False)
    with pytest.raises(SystemExit, match="1"):
        demo_collector.run(tmp_path / "no store", tmp_path / "policy.npz", theirs, 0, tmp_path / "complaint")
    assert (tmp_path / "complaint").read_text().startswith("StoreNotFound: ")
    ours.close()
    theirs.close()


def collected(path: Path) -> int:
    with dr.open(path) as store:
        return len(store)


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.slow(turns=4)
def test_collectors_fill_the_store_stop_when_asked_and_a_dead_one_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "store"
    dr.create(path, demo_collector.schema()).close()
    with demo_run.Collectors(path, tmp_path, seed=3) as collectors:
        Policy(policy_layers(network()), 0.5, 25).publish(collectors.policy_file)
        wait_for(lambda: collected(path) == 100)
        collectors.check()
        processes = list(collectors._processes)
        os.kill(processes[2].pid, signal.SIGKILL)
        processes[2].join()
        with pytest.raises(demo_run.CollectorDied, match=r"^collector 2 died: exit code -9$"):
            collectors.check()
    with dr.open(path) as store:
        assert len(store) == 100
        assert sorted(writer["state"] for writer in store.info()["writers"]) == ["closed", "closed", "closed", "dead"]


@contextmanager
def makes_another_error() -> Iterator[None]:
    """Do as a library does that turns whatever is raised in it into an error of its own."""
    try:
        yield
    except SystemExit:
        raise OSError("something was raised") from None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_block_whatever_becomes_of_what_it_raises(number: int) -> None:
    before = signal.signal(number, signal.default_int_handler)  # it may have been ignored from the start
    try:
        with pytest.raises(SystemExit) as raised, demo_run._signals_unwind(), makes_another_error():
            os.kill(os.getpid(), number)
        assert raised.value.code == 128 + number
        with pytest.raises(SystemExit) as raised, demo_run._signals_unwind(), suppress(SystemExit):
            os.kill(os.getpid(), number)
        assert raised.value.code == 128 + number
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


class SignalledWhenFinalized:
    """Something of which the finalizer is interrupted by a signal: what the signal's handler raises is dropped."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        for _ in range(1000):  # the handler runs between two steps of the interpreter
            pass


def finalize_and_go_on(number: int, check: Callable[[], None], went_on: list[str]) -> None:
    check()
    SignalledWhenFinalized(number)
    went_on.append("to the check")
    check()
    went_on.append("beyond it")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_a_finalizer_ends_the_block_at_the_next_check_and_prints_nothing(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(number, signal.default_int_handler)
    went_on: list[str] = []
    try:
        with pytest.raises(SystemExit) as raised, demo_run._signals_unwind() as check:
            finalize_and_go_on(number, check, went_on)
        assert (raised.value.code, went_on) == (128 + number, ["to the check"])
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert capfd.readouterr() == ("", "")


def send_each(numbers: Sequence[int], went_on: list[int]) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)
        went_on.append(number)


def test_a_second_signal_does_not_wait_for_a_check() -> None:
    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]  # one may have been ignored
    went_on: list[int] = []
    try:
        with pytest.raises(SystemExit) as raised, demo_run._signals_unwind():
            send_each(numbers, went_on)
        assert (raised.value.code, went_on) == (128 + signal.SIGTERM, [signal.SIGTERM])
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with demo_run._signals_unwind():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, handler)


@contextmanager
def started_demo(folder: Path, *arguments: object, command: Sequence[str] = COMMAND) -> Iterator[subprocess.Popen]:
    """Run the demo as the leader of a session of its own, with the folder for its temporary files."""
    (folder / "tmp").mkdir()
    command = [*command, *map(str, arguments)]
    with subprocess.Popen(
        command,
        env=os.environ | {"TMPDIR": str(folder / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell ignores it for what it starts in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            yield process
        finally:
            for pid in session_of(process.pid):
                os.kill(pid, signal.SIGKILL)


def session_of(leader: int) -> list[int]:
    """List the processes of a session."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue  # it ended meanwhile
        state, _, _, session = stat.rpartition(")")[2].split()[:4]
        if int(session) == leader and state != "Z":
            found.append(int(pid))
    return found


def nothing_is_left(folder: Path, leader: int) -> bool:
    # torch makes the folder of its compiler's cache by itself, and leaves it.
    left = [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor_")]
    return session_of(leader) == [] and left == []


@pytest.mark.slow(turns=2)
@pytest.mark.parametrize("how", ["it gives up", "SIGINT", "SIGTERM", "a collector dies", "the trainer is killed"])
def test_however_it_ends_nothing_runs_on_and_the_store_that_was_asked_for_is_left(tmp_path: Path, how: str) -> None:
    path, gives_up = tmp_path / "store", how == "it gives up"
    arguments = ["--max-seconds", 0] if gives_up else []
    command = COMMAND if gives_up else ENDLESS
    with started_demo(tmp_path, *arguments, "--path", path, command=command) as process:
        if not gives_up:
            wait_for(lambda: path.exists() and collected(path) >= 1000)
        if how == "a collector dies":
            os.kill(collectors_of(process.pid)[0], signal.SIGKILL)
        elif how == "the trainer is killed":
            process.kill()
            wait_for(lambda: session_of(process.pid) == [])
        elif not gives_up:
            os.killpg(process.pid, signal.Signals[how])
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        if how != "the trainer is killed":  # who takes the temporary files along
            assert "Traceback" not in err
            wait_for(lambda: nothing_is_left(tmp_path, process.pid))
    last = err.splitlines()[-1] if err else ""
    if gives_up:
        assert (process.returncode, out) == (1, "")
        assert last.startswith("diskreplay: not learnt: a mean return of - over 20 episodes after ")
        assert last.endswith(f"; the store is kept at {path}")
    elif how == "a collector dies":
        assert process.returncode == 1
        assert last.endswith(f" died: exit code -9; the store is kept at {path}")
    elif how != "the trainer is killed":
        assert process.returncode == 128 + signal.Signals[how], err
    assert collected(path) >= (0 if gives_up else 1000)
    if how == "the trainer is killed":
        with dr.open(path) as store:
            assert {writer["state"] for writer in store.info()["writers"]} == {"closed"}


def collectors_of(leader: int) -> list[int]:
    """Return the processes of a session that collect."""
    found = [pid for pid in session_of(leader) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == demo_run.COLLECTORS
    return found


@pytest.mark.slow
def test_it_learns_and_prints_what_inspect_prints(tmp_path: Path, run: Callable) -> None:
    path = tmp_path / "store"
    with started_demo(tmp_path, "--path", path) as process:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0, err
        wait_for(lambda: nothing_is_left(tmp_path, process.pid))
    first, _, report = out.partition("\n\n")
    assert first.startswith("learnt: a mean return of ")
    assert report == run("inspect", path).out


def test_a_path_that_is_taken_is_refused(tmp_path: Path, run: Callable) -> None:
    dr.create(tmp_path / "store", demo_collector.schema()).close()
    done = run("demo", "--path", tmp_path / "store")
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
