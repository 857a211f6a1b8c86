"""Each example at small size: what it stores, how often it learns, and that it says so."""

import functools
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from itertools import islice
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

import diskreplay as dr
from examples import (
    apex_dqn,
    behaviour_cloning,
    decision_transformer,
    dqn_per,
    drq_pixels,
    offline_iql,
    ppo_rollouts,
    r2d2_memory,
)
from tests.testing.support import said

EXAMPLES = Path(dqn_per.__file__).parent
MODULES = [
    apex_dqn,
    behaviour_cloning,
    decision_transformer,
    dqn_per,
    drq_pixels,
    offline_iql,
    ppo_rollouts,
    r2d2_memory,
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Examples set the number of torch's threads; here all tests have their one, and leave what was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def results_of(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list:
    """Note what each call of a function returns from now on."""
    results: list = []
    function: Callable = getattr(owner, name)

    def noting(*args: object, **kwargs: object) -> object:
        results.append(function(*args, **kwargs))
        return results[-1]

    monkeypatch.setattr(owner, name, noting)
    return results


def set_to_zero(*networks: torch.nn.Module) -> None:
    for network in networks:
        for parameter in network.parameters():
            torch.nn.init.zeros_(parameter)


def last_line(capsys: pytest.CaptureFixture) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_every_example_is_tested_here() -> None:
    # In tests/interop: to be imported, these need Ray and Isaac Lab.
    elsewhere = [EXAMPLES / "many_machines.py", EXAMPLES / "isaac_lab.py"]
    assert sorted(EXAMPLES.glob("*.py")) == sorted([*(Path(module.__file__) for module in MODULES), *elsewhere])


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_an_example_is_short_and_its_docstring_shows_how_it_is_called(module) -> None:
    source = Path(module.__file__).read_text()
    assert len(source.splitlines()) <= 190
    assert f"python examples/{Path(module.__file__).name} [--small] [--seed 0] [--path " in module.__doc__


def test_a_dqn_collector_plays_what_it_is_asked_for_with_the_parameters_that_it_is_sent(tmp_store) -> None:
    left = dqn_per.QNetwork()
    set_to_zero(left)
    left[4].bias.data[0] = 1.0  # the better action is to push to the left, whatever is seen
    parameters = torch.nn.utils.parameters_to_vector(left.parameters()).detach().numpy()
    dr.create(tmp_store, dqn_per.SCHEMA).close()
    trainer, theirs = Pipe()
    playing = threading.Thread(target=dqn_per.collect, args=(tmp_store, (3, 0), theirs))
    playing.start()
    for epsilon, steps in ((0.0, 40), (1.0, 200)):
        trainer.send((parameters, epsilon, steps))
        assert trainer.recv() is None
    trainer.close()
    playing.join()
    theirs.close()
    with dr.open(tmp_store) as store:
        actions = np.concatenate([episode.action for episode in store.episodes])
        assert [writer["state"] for writer in store.info()["writers"]] == ["closed"]
        assert all(episode.total_reward == len(episode) for episode in store.episodes)
        assert [episode.cut for episode in store.episodes][:-1] == [False] * (store.num_episodes - 1)
    assert len(actions) == 240
    assert (actions[:40] == 0).all()
    assert 60 <= actions[40:].sum() <= 140


def test_a_dqn_collector_says_why_it_ends_and_the_trainer_raises_it(tmp_store, monkeypatch) -> None:
    trainer, theirs = Pipe()
    dqn_per.collect(tmp_store, (0,), theirs)  # where no store is
    theirs.close()
    problem = trainer.recv()
    assert problem.startswith(f"a collector died: StoreNotFound: {tmp_store} does not exist")
    trainer.close()
    ours, theirs = Pipe()
    monkeypatch.setattr(dqn_per, "collectors", lambda *_: nullcontext([ours]))
    theirs.send(problem)
    with (
        dr.create(tmp_store, dqn_per.SCHEMA) as store,
        closing(dqn_per.train(store, 0, tmp_store.with_name("none"))) as rounds,
        pytest.raises(ChildProcessError, match=re.escape(problem)),
    ):
        next(rounds)
    ours.close()
    theirs.close()


def test_dqn_goes_for_reward_plus_discounted_value_of_the_other_networks_choice(tmp_store) -> None:
    torch.manual_seed(1)
    with dr.create(tmp_store, dqn_per.SCHEMA) as store:
        learner = dqn_per.Learner(store, seed=0)
    learner.target.load_state_dict(dqn_per.QNetwork().state_dict())
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


def test_dqn_evaluates_by_the_seed_and_counts_each_episode_once() -> None:
    network = dqn_per.QNetwork()
    set_to_zero(network)
    first, again = (dqn_per.evaluate(network, 7) for _ in range(2))  # always to the left: falls in about ten steps
    assert first == again
    assert 8 <= first <= 11


@pytest.mark.slow(turns=2)
def test_dqn_learns_while_four_processes_play_and_continues_after_a_kill(tmp_store, monkeypatch, capsys) -> None:
    command = [sys.executable, dqn_per.__file__, "--seed", "3", "--path", str(tmp_store)]
    environment = os.environ | {"TMPDIR": str(tmp_store.parent)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as killed:
        while not (line := killed.stdout.readline()).startswith("step "):
            assert line, "it ended before its first evaluation"
        killed.kill()
    assert re.match(r"step 2000, update 250, epsilon 0\.82, loss \d+\.\d{4}, mean return \d+\.\d of 475\n", line)
    checkpoint = tmp_store.with_name(f"{tmp_store.name}.pt")
    saved = checkpoint.read_bytes()
    with dr.open(tmp_store) as store:
        while {writer["state"] for writer in store.info()["writers"]} != {"closed"}:
            store.refresh()  # until its collectors have seen that it is gone
        before = len(store)
    assert before >= 2000
    monkeypatch.setattr(dqn_per, "UPDATES_PER_EVALUATION", 500)  # so that --small means 250 more
    losses = results_of(monkeypatch, dqn_per.Learner, "update")
    skipped = results_of(monkeypatch, dr.Sampler, "update_priorities")
    assert dqn_per.main(["--small", "--seed", "3", "--path", str(tmp_store)])
    assert len(losses) == 250
    assert all(map(math.isfinite, losses))
    assert skipped == [0] * len(losses)
    assert checkpoint.read_bytes() != saved
    with dr.open(tmp_store) as store:
        assert len(store) == before + 1000
        assert all(episode.total_reward == len(episode) for episode in store.episodes)
        assert sum(episode.cut for episode in store.episodes) <= 2 * dqn_per.COLLECTORS
        assert store.verify(deep=True) == []
    steps = rf"from {before + 1000} steps of \d+ episodes"
    assert re.fullmatch(rf"(not )?learnt: a mean return of \d+\.\d over 20 episodes, {steps}", last_line(capsys))


def test_dqn_weighs_the_errors_and_tells_them_to_the_sampler(tmp_store, monkeypatch) -> None:
    with dr.create(tmp_store, dr.Schema.from_env(gym.make("CartPole-v1"))) as store, store.writer() as writer:
        writer.append_episode(np.zeros((4, 4), "f4"), np.zeros(3, int), np.ones(3, "f4"), terminated=True)
        learner = dqn_per.Learner(store, seed=0)
        set_to_zero(learner.online, learner.target)  # all values are 0: the error of a step is what it returned
        returns = {0: 1 + 0.99 + 0.99**2, 1: 1 + 0.99, 2: 1.0}
        batches = results_of(monkeypatch, learner.sampler, "sample")
        for _ in range(20):  # the networks are set back, so that errors stay what they are
            loss = learner.update()
            set_to_zero(learner.online, learner.target)
        steps = batches[-1].index.tolist()
        assert set(steps) == {0, 1, 2}
        squares = torch.tensor([returns[step] ** 2 for step in steps])
        assert loss == pytest.approx(float((batches[-1].weight * squares).mean()), rel=1e-5)
        # P(i) is p_i / sum of p with p = (|td| + eps) ** 0.6, and the strata leave at most two draws to chance
        masses = {step: (error + 1e-6) ** 0.6 for step, error in returns.items()}
        for step, mass in masses.items():
            assert abs(steps.count(step) - len(steps) * mass / sum(masses.values())) <= 2


def test_apex_gives_each_step_the_error_that_its_sampled_transition_has(tmp_store) -> None:
    torch.manual_seed(0)
    network = apex_dqn.q_network()
    with dr.create(tmp_store, dr.Schema.from_env(apex_dqn.FourRooms())) as store, store.writer() as writer:
        for step, error in islice(apex_dqn.play(network, 0.9, seed=0), 3_000):
            writer.append(**step, priority=error)
        store.refresh()
        assert {(episode.terminated, episode.cut) for episode in store.episodes[:-1]} == {(True, False), (False, False)}
        view = dr.Transitions(n_step=apex_dqn.N_STEP, gamma=apex_dqn.GAMMA)
        with dr.Sampler(store, view, fields=("...", "priority")) as sampler:
            batch = sampler.gather(sampler.ids())
    assert len(batch.index) >= 3_000 - 2
    assert set(batch.n_steps.tolist()) == {1, 2, 3}
    with torch.no_grad():
        goal = batch.reward + batch.discount * network(batch.next_obs).max(1).values
        error = goal - network(batch.obs).gather(1, batch.action[:, None])[:, 0]
    torch.testing.assert_close(batch.priority, error.abs().double(), rtol=1e-4, atol=1e-6)


def test_apex_collectors_differ_in_exploration_and_play_each_round_with_its_parameters(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(apex_dqn, "STEPS_PER_ROUND", 20)
    folder, explored, seen = tmp_path, [], []
    for played in range(2):
        network = apex_dqn.q_network()
        torch.nn.init.zeros_(network[2].weight)
        torch.nn.init.constant_(network[2].bias, float(played))  # what any action is worth
        torch.save(network.state_dict(), folder / f"parameters-{played}")

    def fake(network: torch.nn.Module, epsilon: float, seed: int) -> Iterator:
        explored.append((epsilon, seed))
        step = dict(obs=20, action=0, reward=0.0, terminated=False, truncated=False, next_obs=20)
        while True:
            seen.append(network(torch.tensor(20)).max().item())
            yield step, -seen[-1] - 1

    monkeypatch.setattr(apex_dqn, "play", fake)
    with dr.create(folder / "store", dr.Schema.from_env(apex_dqn.FourRooms())) as store:
        for number, initial in enumerate(["td", "largest", "td", "largest"]):
            apex_dqn.collect(store.path, folder, 2, number, 5, initial)
        store.refresh()
        priorities = [episode["priority"] for episode in store.episodes]
    assert explored == [
        (pytest.approx(epsilon), seed)
        for epsilon, seed in zip([0.4, 0.4 ** (10 / 3), 0.4 ** (17 / 3), 0.4**8], range(20, 24), strict=True)
    ]
    assert seen == ([0.0] * 20 + [1.0] * 20) * 4
    assert [len(each) for each in priorities] == [40] * 4
    assert sorted(np.isnan(each).all() for each in priorities) == [False, False, True, True]
    assert all(each.tolist() == [1.0] * 20 + [2.0] * 20 for each in priorities if not np.isnan(each).any())


def test_apex_counts_the_cells_from_which_the_greedy_policy_comes_to_the_reward() -> None:
    network, rooms = apex_dqn.q_network(), apex_dqn.FourRooms
    assert len(rooms.CELLS) == 103
    torch.nn.init.zeros_(network[2].weight)
    for action, cells in enumerate([0, 3, 0, 4]):  # three above the corner with the reward, four left of it
        network[2].bias.data = torch.eye(4)[action]
        assert apex_dqn.evaluate(network) == cells / 103
    # the shortest ways, found backwards from the reward
    away, distance = [rooms.PLAN.index("G")], {rooms.PLAN.index("G"): 0}
    policy = torch.zeros(169, 4)
    for cell in away:
        for action, move in enumerate(rooms.MOVES):
            if rooms.PLAN[cell - move] != "#" and cell - move not in distance:
                distance[cell - move] = distance[cell] + 1
                policy[cell - move, action] = 1
                away.append(cell - move)
    assert set(away) == {*rooms.CELLS, away[0]}
    assert max(distance.values()) < rooms.STEPS
    assert apex_dqn.evaluate(torch.nn.Embedding.from_pretrained(policy)) == 1


@pytest.mark.slow(turns=4)
def test_apex_learns_while_four_processes_append_with_priorities(tmp_store, monkeypatch, capsys) -> None:
    losses = results_of(monkeypatch, apex_dqn.Learner, "update")
    skipped = results_of(monkeypatch, dr.Sampler, "update_priorities")
    assert apex_dqn.main(["--small", "--path", str(tmp_store)])
    assert len(losses) == 2 * apex_dqn.UPDATES_PER_ROUND
    assert all(map(math.isfinite, losses))
    assert skipped == [0] * len(losses)
    steps = 3 * apex_dqn.COLLECTORS * apex_dqn.STEPS_PER_ROUND
    with dr.open(tmp_store) as store:
        assert len(store) == steps
        assert np.isfinite(np.concatenate([episode["priority"] for episode in store.episodes])).all()
        assert store.verify(deep=True) == []
    assert re.fullmatch(
        rf"(not )?learnt: a mean return of \d\.\d+ over 103 episodes, from {steps} steps of \d+ episodes",
        last_line(capsys),
    )


def test_later_observations_of_the_corridor_do_not_tell_the_sign_so_one_of_two_answers_is_right() -> None:
    found = {}
    for action in (0, 1):
        env, signs = r2d2_memory.Corridor(), []
        for seed in range(20):
            obs, _ = env.reset(seed=seed)
            signs.append(obs.argmax())
            steps = [env.step(action) for _ in range(40)]
            assert [ended for _, _, ended, _, _ in steps] == [False] * 39 + [True]
            assert all((obs[:2] == 0).all() for obs, *_ in steps)
            found[action, seed] = np.array([reward for _, reward, *_ in steps])
        assert set(signs) == {0, 1}
        assert all((found[action, seed] > 0).any() == (sign == action) for seed, sign in enumerate(signs))
    for seed in range(20):
        np.testing.assert_array_equal(found[0, seed], -found[1, seed])


def test_r2d2_stores_the_state_that_the_player_had_before_each_step(tmp_store) -> None:
    extra = {"recurrent_state": dr.Field((1, r2d2_memory.HIDDEN), "float32")}
    torch.manual_seed(0)
    network = r2d2_memory.RecurrentQ()
    with dr.create(tmp_store, dr.Schema.from_env(r2d2_memory.Corridor(), extra=extra)) as store:
        env = dr.RecordEpisodes(r2d2_memory.Corridor(), store)
        r2d2_memory.play(env, network, 0.5, np.random.default_rng(0))
        env.close()
        view = dr.Sequences(16, 8, 4, start_only=("recurrent_state",))
        batch = dr.Sampler(store, view).gather([0, 8, 16, 24])
        obs = torch.from_numpy(np.array(store.episodes[0].obs))
    outputs, _ = network.memory(obs[None], torch.zeros(1, 1, r2d2_memory.HIDDEN))
    states = torch.cat([torch.zeros(1, r2d2_memory.HIDDEN), outputs[0]])
    torch.testing.assert_close(batch.recurrent_state[:, 0], states[[0, 8, 16, 24]].detach(), rtol=1e-4, atol=1e-5)
    # unrolled from there, every window has the values of the whole episode
    values = network.values(outputs)[0]
    whole = torch.stack([values[start : start + 17] for start in (0, 8, 16, 24)])
    torch.testing.assert_close(r2d2_memory.unroll(network, batch), whole, rtol=1e-4, atol=1e-5)


def test_r2d2_learns_nothing_from_a_burn_in_except_at_an_episodes_start() -> None:
    network = r2d2_memory.RecurrentQ()
    obs = torch.rand(2, 17, 3, requires_grad=True)
    batch = dr.Batch(
        {
            "obs": obs[:, :16],
            "next_obs": obs[:, 1:],
            "recurrent_state": torch.zeros(2, 1, r2d2_memory.HIDDEN),
            "is_first": torch.tensor([[True] + [False] * 15, [False] * 16]),
        }
    )
    r2d2_memory.unroll(network, batch)[:, r2d2_memory.BURN_IN :].sum().backward()
    reached = (obs.grad != 0).any(dim=2)
    assert reached[0].all()
    assert reached[1].tolist() == [False] * 4 + [True] * 13


@pytest.mark.slow
def test_r2d2_learns_from_windows_and_skips_no_priority(tmp_store, monkeypatch, capsys) -> None:
    losses = results_of(monkeypatch, r2d2_memory.Learner, "update")
    skipped = results_of(monkeypatch, dr.Sampler, "update_priorities")
    assert r2d2_memory.main(["--small", "--path", str(tmp_store)])
    assert len(losses) == 6 * r2d2_memory.UPDATES_PER_EPISODE
    assert all(map(math.isfinite, losses))
    assert skipped == [0] * len(losses)
    with dr.open(tmp_store) as store:
        assert [(len(episode), episode.terminated) for episode in store.episodes] == [(40, True)] * 12
    assert re.fullmatch(
        r"not learnt: \d+\.\d% of the doors opened, \d+\.\d% with the state wiped at each step, "
        r"from 480 steps of 12 episodes",
        last_line(capsys),
    )


@pytest.mark.slow
def test_ppo_learns_each_rollout_for_some_epochs_and_starts_from_a_ratio_of_one(tmp_store, monkeypatch, capsys) -> None:
    losses = results_of(monkeypatch, ppo_rollouts, "loss_of")
    rollouts = results_of(monkeypatch, dr.RolloutBuffer, "sample")
    assert ppo_rollouts.main(["--small", "--path", str(tmp_store)])
    steps = ppo_rollouts.NUM_STEPS * ppo_rollouts.NUM_ENVS
    assert len(losses) == 2 * steps // ppo_rollouts.MINIBATCH * ppo_rollouts.EPOCHS
    assert all(torch.isfinite(loss) for loss in losses)
    first, second = rollouts
    assert first.advantages.shape == second.advantages.shape == (steps, 1)
    ids = torch.cat([first.index, second.index])
    assert len(ids.unique()) == 2 * steps
    torch.manual_seed(0)
    network = ppo_rollouts.ActorCritic()  # as it was when the first rollout was played
    log_probs = network.policy(first.observations).log_prob(first.actions[:, 0])
    torch.testing.assert_close(log_probs, first.log_probs[:, 0])
    torch.testing.assert_close(network.value(first.observations), first["values"][:, 0])
    assert (torch.cat([first.rewards, second.rewards]) == 1).all()
    # who has learnt so little does not come to the time limit
    ended = int(first.dones.sum() + second.dones.sum())
    with dr.open(tmp_store) as store:
        assert len(store) == 2 * steps
        assert sum(episode.terminated for episode in store.episodes) == ended > 0
        assert store.num_episodes - ended <= ppo_rollouts.NUM_ENVS
    assert last_line(capsys).endswith(f" over 20 episodes, from {2 * steps} steps and {ended} ended episodes")


@torch.no_grad()
def test_ppo_values_what_lies_behind_a_time_limit_and_behind_a_rollouts_edge(monkeypatch) -> None:
    monkeypatch.setattr(gym, "make", functools.partial(gym.make, max_episode_steps=12))  # some poles fall before
    stepped = results_of(monkeypatch, SyncVectorEnv, "step")
    shape = steps, envs = ppo_rollouts.NUM_STEPS, ppo_rollouts.NUM_ENVS
    torch.manual_seed(0)
    network = ppo_rollouts.ActorCritic()
    with dr.RolloutBuffer(envs, steps, obs_shape=(4,), action_shape=()) as buffer:
        collector = ppo_rollouts.Collector(buffer, seed=0)
        collector.collect(network)
        collector.envs.close()
        obs, rewards, dones, advantages = buffer.observations, buffer.rewards, buffer.dones, buffer.advantages
    next_obs, terminated, truncated = (
        torch.from_numpy(np.stack([step[part] for step in stepped])) for part in (0, 2, 3)
    )
    ended = terminated | truncated
    assert (terminated.any(1) & truncated.any(1)).any()
    assert not ended[-1].all()
    assert torch.equal(dones, terminated.float())
    assert (collector.steps, collector.episodes) == (steps * envs, int(ended.sum()))
    value, next_value = (network.value(array.flatten(0, 1)).view(shape) for array in (obs, next_obs))
    assert (rewards == 1).all()
    error = 1 + ppo_rollouts.GAMMA * next_value * ~terminated - value
    later = torch.cat([advantages[1:], torch.zeros(1, envs)]) * ~ended
    torch.testing.assert_close(advantages, error + ppo_rollouts.GAMMA * ppo_rollouts.GAE_LAMBDA * later)


def test_cloning_learns_what_the_expert_would_do_where_expert_and_student_came(tmp_store, monkeypatch, capsys) -> None:
    played = results_of(monkeypatch, behaviour_cloning, "play")
    losses = results_of(monkeypatch, behaviour_cloning.Student, "update")
    done = results_of(monkeypatch, behaviour_cloning.Student, "act")
    assert behaviour_cloning.main(["--small", "--seed", "2", "--path", str(tmp_store)])
    assert len(losses) == 2 * 10
    assert all(map(math.isfinite, losses))
    experts, measured, students, measured_last = played
    assert len(experts) == behaviour_cloning.EXPERT_GAMES * 500
    assert len(students) < behaviour_cloning.GAMES * 500  # nobody plays like the expert after so few updates
    assert len({tuple(obs[0]) for obs in played}) == len(played)
    with dr.open(tmp_store) as store:
        assert [episode.obs.tolist() for episode in store.episodes] == [experts.tolist(), students.tolist()]
        for episode in store.episodes:
            assert episode.action.tolist() == behaviour_cloning.expert(episode.obs).tolist()
    learnt_from = set(map(tuple, np.concatenate([experts, students]).tolist()))
    assert not learnt_from & set(map(tuple, np.concatenate([measured, measured_last]).tolist()))
    # what an evaluation calls last is what the student would do in all its states
    agreement = np.mean(done[-1] == behaviour_cloning.expert(measured_last))
    assert last_line(capsys) == (
        f"not learnt: the expert's action in {agreement:.1%} of the steps of unseen games, a mean return of "
        f"{len(measured_last) / 20:.1f} over 20 episodes, from {len(experts) + len(students)} labelled states"
    )


def test_a_kept_buffer_is_learnt_from_again(tmp_store, capsys) -> None:
    counts = []
    for seed in ("0", "1"):
        assert behaviour_cloning.main(["--small", "--seed", seed, "--path", str(tmp_store)])
        counts.append(int(last_line(capsys).split()[-3]))
    with dr.open(tmp_store) as store:
        lengths = [len(episode) for episode in store.episodes]
    assert counts == [sum(lengths[:2]), sum(lengths)]


def test_a_student_takes_up_the_labels_of_the_buffer() -> None:
    torch.manual_seed(0)
    obs = np.random.default_rng(0).standard_normal((256, 4)).astype("f4")
    label = (obs[:, 3] < 0).astype(int)  # not what the expert would do
    student = behaviour_cloning.Student()
    with dr.DistillationBuffer(256, obs_shape=(4,), action_shape=(), seed=0) as buffer:
        buffer.add(obs, label)
        losses = [student.update(buffer) for _ in range(200)]
    assert losses[-1] < losses[0] / 2
    assert np.mean(student.act(obs) == label) > 0.95


def test_an_evaluation_counts_the_experts_actions_and_the_steps() -> None:
    student = behaviour_cloning.Student()
    student.act = behaviour_cloning.expert
    assert behaviour_cloning.evaluate(student, seed=0) == (1.0, 500.0)
    student.act = lambda obs: 1 - behaviour_cloning.expert(obs)
    agreement, mean_return = behaviour_cloning.evaluate(student, seed=0)
    assert agreement == 0
    assert 5 <= mean_return < 20


def test_most_recorded_controllers_leave_the_track_and_few_do_not(tmp_store) -> None:
    with dr.create(tmp_store, dr.Schema.from_env(gym.make("CartPole-v1"))) as store:
        mean_return = decision_transformer.collect(store, 60, seed=0)
        returns = np.array([episode.total_reward for episode in store.episodes])
        assert len(store) == sum(returns)
    assert mean_return == returns.mean()
    assert 0 < np.mean(returns >= decision_transformer.ENOUGH_RETURN) < 0.25
    assert np.median(returns) < 250


@torch.no_grad()
def test_a_decision_transformer_sees_what_came_before_an_action_and_the_clone_no_return() -> None:
    torch.manual_seed(0)
    length = decision_transformer.CONTEXT
    returns, obs = 100 * torch.rand(1, length), torch.rand(1, length, 4)
    action, step = torch.zeros(1, length, dtype=torch.int64), torch.arange(length)[None]
    for conditioned in (True, False):
        network = decision_transformer.DecisionTransformer(conditioned).eval()
        logits = network(returns, obs, action, step)
        for at in range(length):
            for part, first in {"returns": at, "obs": at, "action": at + 1}.items():
                given = {"returns": returns.clone(), "obs": obs.clone(), "action": action.clone()}
                given[part][0, at] += 1
                changed = (network(*given.values(), step) - logits).abs().amax(2)[0] > 1e-6
                sees = part != "returns" or conditioned
                assert changed.tolist() == [sees and step >= first for step in range(length)]


def test_a_return_that_is_asked_for_gets_smaller_by_what_was_paid() -> None:
    told = []

    class Player(decision_transformer.DecisionTransformer):
        def forward(self, return_to_go, obs, action, step):
            told.append((return_to_go, obs, action, step))
            return torch.stack([-obs[:, :, 2], obs[:, :, 2]], dim=2)  # push to the side of the pole

    mean_return = decision_transformer.evaluate(Player(True), 100, seed=0)
    context = decision_transformer.CONTEXT
    assert 20 < mean_return < 100
    for steps, (_, obs, action, step) in enumerate(told):
        first = max(0, steps + 1 - context)
        assert step.tolist() == [[*range(first, steps + 1)]] * 20
        assert (action[:, :-1] == (obs[:, :-1, 2] > 0)).all()
        assert (action[:, -1] == 0).all()
    for return_to_go, _, _, step in told[:15]:  # nobody has fallen yet
        assert (return_to_go == 100 - step).all()


@pytest.mark.slow
def test_transformer_and_clone_learn_from_the_same_windows(tmp_store, monkeypatch, capsys) -> None:
    batches = results_of(monkeypatch, dr.Sampler, "sample")
    assert decision_transformer.main(["--small", "--seed", "2", "--path", str(tmp_store)])
    assert len(batches) == 2 * 5
    for one, other in zip(batches[:5], batches[5:], strict=True):
        assert torch.equal(one.index, other.index)
    with dr.open(tmp_store) as store:
        assert store.num_episodes == 10
        mean_return = len(store) / 10
    assert re.fullmatch(
        r"not learnt: a mean return of \d+\.\d over 20 episodes, \d+\.\d by behaviour cloning, from episodes of "
        rf"{mean_return:.1f}",
        last_line(capsys),
    )


@pytest.mark.slow
def test_iql_learns_each_epoch_from_all_steps_and_from_none_as_an_end(tmp_store, monkeypatch, capsys) -> None:
    seen = []
    update = offline_iql.Learner.update
    monkeypatch.setattr(offline_iql.Learner, "update", lambda self, batch: seen.append(batch) or update(self, batch))
    assert offline_iql.main(["--small", "--path", str(tmp_store)])
    ids = torch.cat([batch.index for batch in seen])
    assert len(ids) == len(ids.unique()) == offline_iql.NUM_ENVS * offline_iql.EPISODE_STEPS
    assert all((batch.discount == torch.tensor(0.99)).all() for batch in seen)
    with dr.open(tmp_store) as store:
        assert len(store) == len(ids)
        assert [(len(episode), episode.truncated) for episode in store.episodes] == [(200, True)] * 20
        recorded = np.mean([episode.total_reward for episode in store.episodes])
        obs, action = (
            np.concatenate([episode[name][:200] for episode in store.episodes]) for name in ("obs", "action")
        )
    scripted = np.mean(action == offline_iql.script(obs))
    assert abs(scripted - (1 - offline_iql.NOISE)) < 0.05
    assert re.fullmatch(
        rf"not learnt: a mean return of -\d+\.\d over 20 episodes, from episodes of {recorded:.1f}; "
        r"the script without noise reaches -\d+\.\d",
        last_line(capsys),
    )


@pytest.mark.slow
def test_iql_values_what_good_actions_get_and_does_them(tmp_store, monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(offline_iql, "TARGET_RATE", 0.1)
    with dr.create(tmp_store, dr.Schema.from_env(gym.make("Pendulum-v1"))) as store, store.writer() as writer:
        for reward in [0.0, 1.0] * 128:
            torque = np.full((1, 1), 2 * reward - 1, "f4")
            writer.append_episode(np.zeros((1, 3), "f4"), torque, np.full(1, reward, "f4"), terminated=True)
        store.refresh()
        learner = offline_iql.Learner(store, epochs=250, seed=0)
        for batch in learner.sampler:
            learner.update(batch)
        best = learner.act(np.zeros((1, 3), "f4"))
    # rewards are divided by their standard deviation, 1/2, and the expectile of 0 and 1, equally likely, is tau
    assert learner.value(torch.zeros(1, 3)).item() == pytest.approx(2 * offline_iql.EXPECTILE, abs=0.05)
    assert best == pytest.approx(1.0, abs=0.1)


def caught(player: Callable[[drq_pixels.Catch], int], balls: int) -> float:
    env, rewards = drq_pixels.Catch(), []
    for seed in range(balls):
        env.reset(seed=seed)
        ended = False
        while not ended:
            _, reward, ended, _, _ = env.step(np.int64(player(env)))
            rewards += [reward] if ended else [] if reward == 0 else [math.nan]
    assert len(rewards) == balls
    return float(np.mean(np.array(rewards) > 0))


def test_every_ball_can_be_caught_but_not_by_following_it() -> None:
    def towards(env: drq_pixels.Catch, x: int) -> int:
        return 1 + int(np.sign(x + env.BALL // 2 - env.paddle - env.PADDLE // 2))

    def foreseeing(env: drq_pixels.Catch) -> int:
        wall = env.SIZE - env.BALL
        x = (env.x + env.slant * (wall - env.y) // env.FALL) % (2 * wall)
        return towards(env, min(x, 2 * wall - x))

    assert caught(foreseeing, 300) == 1.0
    assert caught(lambda env: towards(env, env.x), 300) < drq_pixels.ENOUGH_CAUGHT - 0.1


@pytest.mark.slow
def test_drq_learns_from_the_stacks_that_the_player_saw_shifted(tmp_store, monkeypatch, capsys) -> None:
    losses = results_of(monkeypatch, drq_pixels.Learner, "update")
    batches = results_of(monkeypatch, dr.Sampler, "sample")
    seen = []
    act = drq_pixels.Learner.act
    monkeypatch.setattr(drq_pixels.Learner, "act", lambda self, stack: seen.append(stack) or act(self, stack))
    monkeypatch.setattr(drq_pixels, "EPSILON", lambda step: 0.0)
    monkeypatch.setattr(drq_pixels, "evaluate", lambda learner, seed: 0.0)
    assert drq_pixels.main(["--small", "--path", str(tmp_store)])
    assert len(seen) == 400
    assert len(losses) == len(batches) == len(range(200, 401, 4))
    assert all(map(math.isfinite, losses))
    with dr.open(tmp_store) as store:
        assert [len(episode) for episode in store.episodes][:-1] == [11] * 36
        plain = dr.Sampler(store, dr.Transitions(n_step=3, frame_stack=3))
        ids = plain.ids()
        batch = plain.gather(ids)
        np.testing.assert_array_equal(batch.obs, np.stack(seen)[: len(ids)])
        last = batches[-1]
        frames, unshifted = last.obs, plain.gather(last.index).obs.float() / 255
    assert (frames.dtype, frames.shape) == (torch.float32, (64, 3, 48, 48))
    pad, size = drq_pixels.PAD, drq_pixels.Catch.SIZE
    padded = torch.nn.functional.pad(unshifted, [pad] * 4, mode="replicate")
    found = {
        (down, right)
        for down in range(2 * pad + 1)
        for right in range(2 * pad + 1)
        for one, other in zip(frames, padded, strict=True)
        if torch.equal(one, other[:, down : down + size, right : right + size])
    }
    assert len(found) > 20
    assert last_line(capsys) == "not learnt: 0.0% of 100 balls caught, from 400 frames of 37 episodes"


def test_a_full_run_that_has_not_learnt_says_no(monkeypatch, capsys) -> None:
    for name, value in {"ROUNDS": 1, "UPDATES": 1}.items():
        monkeypatch.setattr(behaviour_cloning, name, value)
    assert not behaviour_cloning.main([])
    assert last_line(capsys).startswith("not learnt: ")


@pytest.mark.slow(turns=4)
def test_an_example_runs_as_a_script_without_warnings_and_removes_its_buffer(tmp_path, tmp_path_factory) -> None:
    torch_cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("torch"))}  # a folder of torch's own
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / "behaviour_cloning.py"), "--small"],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "TMPDIR": str(tmp_path), **torch_cache},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, said(done.stderr)) == (0, "")
    assert done.stdout.startswith("round 0, expert played 1000 steps, ")
    assert list(tmp_path.iterdir()) == []
