"""Ways of working that diskreplay serves, written as the users of other buffers write; prints `usage ok`."""

# Left as such users write, and not as this project does.
# fmt: off
# ruff: noqa: B905, E501, PT017, PT018

import random
import tempfile

import gymnasium as gym
import numpy as np
import torch

import diskreplay as dr

# 1. one experience at a time, tensors with a leading axis of one environment; the newest step can be sampled at once
buffer = dr.ReplayBuffer(capacity=100_000, device="cpu")
exp = dr.Experience(state=torch.zeros((1, 4)), action=1.0, reward=2.0, next_state=torch.zeros((1, 4)), done=False)
buffer.push(exp)
batch = buffer.sample(batch_size=1)
assert len(buffer) == 1 and batch.states.shape == (1, 4) and batch.next_states.shape == (1, 4)
assert batch.actions.shape == batch.rewards.shape == batch.dones.shape == (1, 1) and float((1 - batch.dones).sum()) == 1.0
try:
    buffer.sample(batch_size=2)
except BufferError as e:
    assert "1" in str(e) and "2" in str(e), e
else:
    raise AssertionError("two of one")
states, actions, rewards, next_states, dones = zip(*random.sample(buffer, 1))      # a buffer is a sequence of Experience

# 2. a rollout buffer that is filled, read whole and emptied
rollout = dr.RolloutBuffer(capacity=1)
rollout.push(exp)
for call in (lambda: rollout.push(exp), lambda: (rollout.empty(), rollout.sample())):
    if len(rollout):
        assert rollout.sample().states.shape == (1, 4)
    try:
        call()
    except BufferError:
        continue
    raise AssertionError("no BufferError")
assert len(rollout) == 0

# 3. an environment's loop
env, buffer = gym.make("CartPole-v1"), dr.ReplayBuffer(capacity=10_000)
for episode in range(3):
    state, _ = env.reset(seed=episode)
    done = False
    while not done:
        action = env.action_space.sample()
        next_state, reward, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
        buffer.push(dr.Experience(state, int(action), reward, next_state, done))
        state = next_state
        if len(buffer) >= 10:
            assert buffer.sample(10).states.shape == (10, 4)

# 4. on-policy, thousands of environments at once, with privileged observations; (num_steps, num_envs, ...) and the plain GAE recursion
N, T = 512, 24
for privileged in (0, 6):
    buffer = dr.RolloutBuffer(num_envs=N, num_steps=T, obs_shape=(48,), action_shape=(12,), num_privileged_obs=privileged, device="cpu")
    g = torch.Generator().manual_seed(0)
    rew, val, don = torch.randn(T, N, generator=g), torch.randn(T, N, generator=g), (torch.rand(T, N, generator=g) < 0.1).float()
    for t in range(T):
        buffer.add(observations=torch.full((N, 48), float(t)), privileged_observations=torch.ones(N, privileged) if privileged else None,
                   actions=torch.zeros(N, 12), rewards=rew[t], dones=don[t], values=val[t], log_probs=torch.zeros(N))
    try:
        buffer.add(observations=torch.zeros(N, 48), privileged_observations=torch.ones(N, privileged) if privileged else None,
                   actions=torch.zeros(N, 12), rewards=rew[0], dones=don[0], values=val[0], log_probs=torch.zeros(N))
    except BufferError:
        pass
    else:
        raise AssertionError("a full rollout buffer took a step")
    last = torch.randn(N, generator=g)
    buffer.compute_returns_and_advantages(last_values=last)
    adv, run = torch.zeros(T, N), torch.zeros(N)
    for t in reversed(range(T)):
        nxt = last if t == T - 1 else val[t + 1]
        run = rew[t] + 0.99 * nxt * (1 - don[t]) - val[t] + 0.99 * 0.95 * (1 - don[t]) * run
        adv[t] = run
    data = buffer.get_all_data()
    assert buffer.observations.shape == (T, N, 48) and buffer.actions.shape == (T, N, 12) and float(buffer.observations[5, 7, 0]) == 5.0
    assert torch.allclose(buffer.advantages, adv, atol=1e-4) and torch.allclose(data["returns"], adv + val, atol=1e-4)
    assert {"observations", "actions", "rewards", "dones", "values", "log_probs", "advantages", "returns"} <= set(data)
    assert not privileged or buffer.privileged_observations.shape == (T, N, privileged)
    buffer.clear()

# 5. distillation: what the expert saw and did
buffer = dr.DistillationBuffer(capacity=10_000, obs_shape=(48,), device="cpu")
for _ in range(300):
    buffer.add(torch.ones(48), torch.zeros(12))
buffer.add(torch.ones(64, 48), torch.zeros(64, 12))
obs, expert_actions = buffer.sample(batch_size=256)
assert obs.shape == (256, 48) and expert_actions.shape == (256, 12) and len(buffer) == 364

# 6. several collectors' streams, hybrid actions, a bonus with a weight chosen at sample time, PER with annealing, n-step; each switched at run time
space = gym.spaces.Tuple((gym.spaces.Discrete(7), gym.spaces.Box(-1, 1, (2,), np.float32)))
store = dr.create(tempfile.mkdtemp() + "/s", dr.Schema.from_spaces(gym.spaces.Box(-1, 1, (5,), np.float32), space, extra={"diversity_bonus": dr.Field((), "float32")}))
clients = [store.writer() for _ in range(3)]
rng = np.random.default_rng(0)
for t in range(200):
    for c in clients:
        c.append(rng.standard_normal(5).astype("f4"), (3, np.zeros(2, "f4")), 1.0, t % 20 == 19, diversity_bonus=0.5)
for c in clients:
    c.flush()
sampler = dr.Sampler(store, dr.Transitions(n_step=5, gamma=0.99, reward={"reward": 1.0, "diversity_bonus": 2.0}),
                     dr.Prioritized(alpha=0.6, beta=dr.Linear(0.4, 1.0, 1_000_000), eps=1e-6), batch_size=64, seed=0)
batch = sampler.sample()
full = batch.n_steps == 5
assert torch.allclose(batch.reward[full], torch.full((int(full.sum()),), 2.0 * (1 - 0.99**5) / (1 - 0.99))), batch.reward
assert batch.action["0"].shape == (64,) and batch.action["1"].shape == (64, 2)
sampler.update_priorities(batch.index, torch.randn(64, 1, requires_grad=True))
sampler.view, sampler.distribution = dr.Transitions(n_step=1), dr.Uniform()
assert float(sampler.sample().weight.min()) == 1.0 and int(sampler.sample().n_steps.max()) == 1

# 7. recurrent replay: windows of 80 that overlap by 40, the first 40 burn-in, the collector's recurrent state at each window's start
store = dr.create(tempfile.mkdtemp() + "/s", dr.Schema(obs=dr.Field((5,), "float32"), action=dr.Field((), "int64"), extra={"recurrent_state": dr.Field((2, 8), "float32")}))
with store.writer() as w:
    for T in (30, 80, 200):
        w.append_episode(np.zeros((T + 1, 5), "f4"), np.arange(T), np.ones(T, "f4"), terminated=True, recurrent_state=np.arange(T, dtype="f4")[:, None, None] * np.ones((2, 8), "f4"))
sampler = dr.Sampler(store, dr.Sequences(length=80, overlap=40, burn_in=40, start_only=("recurrent_state",)), dr.Prioritized(alpha=0.9, beta=0.6, eta=0.9), batch_size=6, seed=0)
batch = sampler.sample()
assert batch.obs.shape == (6, 80, 5) and batch.recurrent_state.shape == (6, 2, 8) and batch.mask.shape == (6, 80)
assert torch.equal(batch.recurrent_state[:, 0, 0].long(), batch.action[:, 0])
target = dr.nstep_targets(batch.reward, batch.terminated, torch.zeros(6, 81), n=5, gamma=0.997, mask=batch.mask)
assert target.shape == (6, 80)
sampler.update_priorities(batch.index, target)

# 8. n-step experiences as a generator, over an endless stream of episodes
stream = ((np.full(2, t), t % 4, 1.0, t % 7 == 6) for t in range(21))
out = list(dr.nstep_experiences(stream, n_step=3, gamma=0.5))
assert len(out) == 21 and out[0][2] == 1.75 and out[0][4] == 3 and out[6][2] == 1.0 and out[6][3] and out[6][4] == 1 and out[4][3] and not out[3][3]
print("usage ok")
