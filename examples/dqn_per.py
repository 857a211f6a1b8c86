"""Double DQN with prioritized 5-step replay learns CartPole-v1 while four processes play it.

Each step of a game is appended to a store on disk. The 5-step returns are computed when a batch is drawn. With `--path`
a run that was stopped or killed continues from its checkpoint. `diskreplay demo` runs this file, too.

    python examples/dqn_per.py [--small] [--seed 0] [--path cartpole.replay]
"""

import argparse
import signal
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

import diskreplay as dr

GAMMA, N_STEP, BATCH_SIZE, LEARNING_RATE, TARGET_RATE = 0.99, 5, 128, 1e-3, 0.005
COLLECTORS, UPDATES, UPDATES_PER_ROUND, UPDATES_PER_EVALUATION = 4, 15_000, 25, 250
STEPS_FIRST, STEPS_PER_ROUND = 1_000, 100  # how many steps all collectors together play
EPSILON, BETA = dr.Linear(1.0, 0.05, 10_000), dr.Linear(0.4, 1.0, 5_000)  # by number of steps, and of batches
EVALUATION_EPISODES, ENOUGH_RETURN = 20, 475.0
CHECKPOINTED = "online", "target", "optimizer", "sampler"
SCALE = torch.tensor([2.0, 1.0, 10.0, 1.0])  # each element of an observation is multiplied by its factor
SCHEMA = dr.Schema.from_env(gym.make("CartPole-v1"))


class QNetwork(nn.Sequential):
    """A network that computes the value of each of the two actions."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))

    def forward(self, obs: Tensor) -> Tensor:
        """Compute (batch, 2) values of (batch, 4) observations."""
        return super().forward(obs * SCALE)


class Learner:
    """Double DQN (van Hasselt et al. 2016) on batches of prioritized n-step transitions."""

    def __init__(self, store: dr.Store, seed: int) -> None:
        self.online, self.target = QNetwork(), QNetwork()
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(self.online.parameters(), LEARNING_RATE)
        view, distribution = dr.Transitions(n_step=N_STEP, gamma=GAMMA), dr.Prioritized(alpha=0.6, beta=BETA)
        self.sampler = dr.Sampler(store, view, distribution, batch_size=BATCH_SIZE, seed=seed)
        self.updates, self.mean_return = 0, float("nan")  # the mean return of the latest evaluation

    def update(self) -> float:
        """Take one gradient step, pass the errors to the sampler, and return the loss."""
        batch = self.sampler.sample()  # the batch is drawn from all steps so far
        with torch.no_grad():
            best = self.online(batch.next_obs).argmax(1, keepdim=True)  # `online` chooses, and `target` values
            goal = batch.reward + batch.discount * self.target(batch.next_obs).gather(1, best)[:, 0]
        td_error = self.online(batch.obs).gather(1, batch.action[:, None])[:, 0] - goal
        loss = (batch.weight * td_error.square()).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.online.parameters(), 10.0)
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, TARGET_RATE)
        self.sampler.update_priorities(batch.index, td_error)
        self.updates += 1
        return loss.item()


@torch.no_grad()
def evaluate(network: QNetwork, seed: int) -> float:
    """Play episodes with the greedy policy, all at once, and return their mean return."""
    envs = gym.make_vec("CartPole-v1", EVALUATION_EPISODES, vectorization_mode="vector_entry_point")
    obs, _ = envs.reset(seed=seed)
    playing, returns = np.ones(EVALUATION_EPISODES, bool), np.zeros(EVALUATION_EPISODES)
    while playing.any():
        obs, reward, terminated, truncated, _ = envs.step(network(torch.from_numpy(obs)).argmax(1).numpy())
        returns += reward * playing
        playing &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


@torch.no_grad()
def collect(path: Path, seed: Sequence[int], trainer: connection.Connection) -> None:
    """Play the steps that the trainer requests, with the trainer's parameters, until the trainer is gone."""
    torch.set_num_threads(1)
    network, rng = QNetwork(), np.random.default_rng(seed)
    try:
        with dr.open(path, "a") as store, dr.RecordEpisodes(gym.make("CartPole-v1"), store) as env:
            obs, _ = env.reset(seed=int(rng.integers(2**31)))
            while True:
                parameters, epsilon, steps = trainer.recv()
                nn.utils.vector_to_parameters(torch.from_numpy(parameters), network.parameters())
                for _ in range(steps):
                    action = rng.integers(2) if rng.random() < epsilon else network(torch.from_numpy(obs)).argmax()
                    obs, _, terminated, truncated, _ = env.step(int(action))  # the wrapper appends the step
                    if terminated or truncated:
                        obs, _ = env.reset()
                trainer.send(None)
    except (EOFError, ConnectionError):
        pass  # the trainer has closed its end of the pipe, or has died
    except Exception as error:
        trainer.send(f"a collector died: {type(error).__name__}: {error}")


@contextmanager
def collectors(path: Path, seed: Sequence[int]) -> Iterator[list[connection.Connection]]:
    """Start the collectors, and yield a pipe to each one. The end of the `with` block ends the collectors."""
    context, started = get_context("spawn"), []
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # collectors inherit this: they ignore Ctrl-C
    try:
        for number in range(COLLECTORS):
            ours, theirs = context.Pipe()
            process = context.Process(target=collect, args=(path, (*seed, number), theirs), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        signal.signal(signal.SIGINT, handler)
        with suppress(EOFError, ConnectionError):  # a collector has closed its pipe
            yield [pipe for _, pipe in started]
    finally:
        deadline = time.monotonic() + 10
        for _, pipe in started:
            pipe.close()
        for process, _ in started:
            process.join(max(0, deadline - time.monotonic()))
            process.kill()  # no effect on a process that has ended
    raise ChildProcessError(f"a collector died: the exit codes are {[process.exitcode for process, _ in started]}")


def train(store: dr.Store, seed: int, checkpoint: Path) -> Generator[Learner, None, None]:
    """Learn while collectors play. Yield after each round, and often while waiting, so that the caller can stop."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # more threads would only slow down networks this small
    learner = Learner(store, seed)
    if checkpoint.exists():
        learner.updates, learner.mean_return, states = torch.load(checkpoint)
        for name, state in states.items():
            getattr(learner, name).load_state_dict(state)
    print(f"{COLLECTORS} collectors start; batches are drawn by {learner.sampler}", flush=True)
    with collectors(store.path, (seed, len(store))) as pipes:
        while True:
            parameters = nn.utils.parameters_to_vector(learner.online.parameters()).detach().numpy()
            epsilon, steps = EPSILON(len(store)), max(STEPS_FIRST - len(store), STEPS_PER_ROUND)
            for pipe in pipes:
                pipe.send((parameters, epsilon, -(-steps // COLLECTORS)))
            losses = [learner.update() for _ in range(UPDATES_PER_ROUND if len(store) >= STEPS_FIRST else 0)]
            for pipe in pipes:
                while not pipe.poll(0.1):
                    yield learner
                if problem := pipe.recv():
                    raise ChildProcessError(problem)
            store.refresh()
            if losses and learner.updates % UPDATES_PER_EVALUATION == 0:
                learner.mean_return = evaluate(learner.online, 1_000_000 * (seed + 1) + learner.updates)
                states = {name: getattr(learner, name).state_dict() for name in CHECKPOINTED}
                torch.save((learner.updates, learner.mean_return, states), f"{checkpoint}.new")
                Path(f"{checkpoint}.new").replace(checkpoint)  # at any moment, the file is a complete checkpoint
                now = f"step {len(store)}, update {learner.updates}, epsilon {epsilon:.2f}, loss {losses[-1]:.4f}"
                print(f"{now}, mean return {learner.mean_return:.1f} of {ENOUGH_RETURN:.0f}", flush=True)
            yield learner


def main(arguments: Sequence[str] | None = None) -> bool:
    """Run the example. Return whether the policy became good enough."""
    parser = argparse.ArgumentParser(description="Double DQN with prioritized 5-step replay on CartPole-v1.")
    parser.add_argument("--small", action="store_true", help="a few hundred updates only, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", type=Path, help="make the store here and keep it, or continue with the one here")
    args = parser.parse_args(arguments)
    with TemporaryDirectory() as folder, dr.create(args.path or f"{folder}/store", SCHEMA, exist_ok=True) as store:
        for learner in train(store, args.seed, Path(f"{store.path}.pt")):
            learnt = learner.mean_return >= ENOUGH_RETURN
            if learnt or learner.updates >= (UPDATES_PER_EVALUATION if args.small else UPDATES):
                break
        said = f"{'learnt' if learnt else 'not learnt'}: a mean return of {learner.mean_return:.1f}"
        print(f"{said} over {EVALUATION_EPISODES} episodes, from {len(store)} steps of {store.num_episodes} episodes")
    return learnt or args.small


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
