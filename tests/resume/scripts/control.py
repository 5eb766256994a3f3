"""Reinforcement learning in an environment of our own: DQN, PPO, SAC."""

import copy
import math
import random
from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

import safeckpt


class Transition(NamedTuple):
    state: torch.Tensor
    action: torch.Tensor
    next_state: torch.Tensor | None
    reward: torch.Tensor


class Pole:
    """A pole on a cart, pushed left or right, or by a force; it draws its start from a generator of its own."""

    def __init__(self, seed):
        self.np_random = np.random.default_rng(seed)
        self.state = None
        self.age = 0

    def reset(self):
        self.state = self.np_random.uniform(-0.05, 0.05, size=4)
        self.age = 0
        return self.state.astype(np.float32)

    def step(self, force):
        x, speed, angle, turning = self.state
        pull = (10.0 * force + 0.05 * turning**2 * math.sin(angle)) / 1.1
        turn = (9.8 * math.sin(angle) - math.cos(angle) * pull) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
        push = pull - 0.05 * turn * math.cos(angle) / 1.1
        self.state = np.array([x + 0.02 * speed, speed + 0.02 * push, angle + 0.02 * turning, turning + 0.02 * turn])
        self.age += 1
        done = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.2 or self.age >= 60
        return self.state.astype(np.float32), 1.0, bool(done)

    def state_dict(self):
        return {"state": self.state, "age": self.age, "generator": self.np_random.bit_generator.state}

    def load_state_dict(self, state):
        self.state = state["state"]
        self.age = state["age"]
        self.np_random.bit_generator.state = state["generator"]


class ReplayMemory:
    """The replay memory of the DQN tutorial: a deque of named tuples of tensors."""

    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def push(self, *values):
        self.memory.append(Transition(*values))

    def sample(self, size):
        return random.sample(self.memory, size)

    def state_dict(self):
        return {"memory": [tuple(transition) for transition in self.memory]}

    def load_state_dict(self, state):
        self.memory.clear()
        self.memory.extend(Transition(*values) for values in state["memory"])


def _q_network():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))


def train_dqn(directory):
    """Actions with an epsilon that falls, a replay memory, and a target network that follows softly."""
    torch.manual_seed(0)
    random.seed(0)
    env = Pole(seed=1)
    policy, target = _q_network(), _q_network()
    target.load_state_dict(policy.state_dict())
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, amsgrad=True)
    memory = ReplayMemory(200)
    now = {"state": None, "acted": 0, "length": 0, "durations": []}
    components = {
        "policy": policy,
        "target": target.requires_grad_(False),
        "optimizer": optimizer,
        "env": env,
        "memory": memory,
        "now": now,
    }

    def act(state):
        epsilon = 0.05 + 0.85 * math.exp(-now["acted"] / 40)
        now["acted"] += 1
        if random.random() > epsilon:
            with torch.no_grad():
                return policy(state).max(1).indices.view(1, 1)
        return torch.tensor([[random.randrange(2)]])

    def learn():
        batch = Transition(*zip(*memory.sample(16), strict=True))
        alive = torch.tensor([state is not None for state in batch.next_state])
        values = policy(torch.cat(batch.state)).gather(1, torch.cat(batch.action)).squeeze(1)
        following = torch.zeros(16)
        with torch.no_grad():
            following[alive] = target(torch.cat([one for one in batch.next_state if one is not None])).max(1).values
        loss = nn.functional.smooth_l1_loss(values, following * 0.99 + torch.cat(batch.reward))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy.parameters(), 100)
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(target.parameters(), policy.parameters(), strict=True):
                mine.lerp_(theirs, 0.05)
        return loss

    with safeckpt.CheckpointManager(directory, components, save_every=7) as manager:
        manager.restore()
        while manager.step < 70:
            if now["state"] is None:
                now["state"] = torch.from_numpy(env.reset())[None]
                now["length"] = 0
            action = act(now["state"])
            seen, reward, done = env.step(2 * action.item() - 1)
            following = None if done else torch.from_numpy(seen)[None]
            memory.push(now["state"], action, following, torch.tensor([reward]))
            now["state"] = following
            now["length"] += 1
            if done:
                now["durations"].append(now["length"])
            if len(memory.memory) >= 16:
                manager.end_step(manager.step + 1, loss=learn())
    return now["durations"]


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x, action=None):
        chosen = torch.distributions.Categorical(logits=self.actor(x))
        action = chosen.sample() if action is None else action
        return action, chosen.log_prob(action), chosen.entropy(), self.critic(x).squeeze(-1)


def train_ppo(directory):
    """Rollouts of four environments, generalized advantages, shuffled minibatches, a rate that falls."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    updates, length, count = 10, 16, 4
    environments = [Pole(seed) for seed in range(count)]
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-3, eps=1e-5)
    now = {"obs": None, "done": None, "global_step": 0}
    components = {"agent": agent, "optimizer": optimizer, "now": now}
    components |= {f"env{index}": env for index, env in enumerate(environments)}

    def rollout():
        kept = {name: torch.zeros(length, count) for name in ("done", "action", "log", "value", "reward")}
        kept["obs"] = torch.zeros(length, count, 4)
        for place in range(length):
            now["global_step"] += count
            kept["obs"][place], kept["done"][place] = now["obs"], now["done"]
            with torch.no_grad():
                action, kept["log"][place], _, kept["value"][place] = agent(now["obs"])
            kept["action"][place] = action
            seen, dones = [], []
            for index, env in enumerate(environments):
                state, kept["reward"][place, index], done = env.step(2 * action[index].item() - 1)
                seen.append(torch.from_numpy(env.reset() if done else state))
                dones.append(float(done))
            now["obs"], now["done"] = torch.stack(seen), torch.tensor(dones)
        return kept

    def advantages_of(kept):
        with torch.no_grad():
            following = agent(now["obs"], torch.zeros(count))[3]
        advantages, last, alive = torch.zeros(length, count), 0.0, 1 - now["done"]
        for place in reversed(range(length)):
            delta = kept["reward"][place] + 0.99 * following * alive - kept["value"][place]
            advantages[place] = last = delta + 0.99 * 0.95 * alive * last
            following, alive = kept["value"][place], 1 - kept["done"][place]
        return advantages

    def improve(kept, advantages):
        flat = {name: values.flatten(0, 1) for name, values in kept.items()}
        returns = (advantages + kept["value"]).flatten()
        order = np.arange(length * count)
        for _ in range(2):
            np.random.shuffle(order)
            for start in range(0, len(order), 16):
                rows = torch.from_numpy(order[start : start + 16])
                _, log, entropy, value = agent(flat["obs"][rows], flat["action"][rows])
                ratio = (log - flat["log"][rows]).exp()
                gain = advantages.flatten()[rows]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                loss = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean() - 0.01 * entropy.mean()
                loss = loss + 0.25 * (value - returns[rows]).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        return loss

    with safeckpt.CheckpointManager(directory, components, save_every=2) as manager:
        if manager.restore() is None:
            now["obs"] = torch.stack([torch.from_numpy(env.reset()) for env in environments])
            now["done"] = torch.zeros(count)
        while manager.step < updates:
            optimizer.param_groups[0]["lr"] = (1.0 - manager.step / updates) * 5e-3
            kept = rollout()
            loss = improve(kept, advantages_of(kept))
            manager.end_step(manager.step + 1, loss=loss)
    return now["global_step"]


class ReplayBuffer:
    def __init__(self, size):
        self.obs = np.zeros((size, 4), dtype=np.float32)
        self.next_obs = np.zeros((size, 4), dtype=np.float32)
        self.action = np.zeros((size, 1), dtype=np.float32)
        self.reward = np.zeros(size, dtype=np.float32)
        self.done = np.zeros(size, dtype=np.float32)
        self.place, self.size, self.most = 0, 0, size

    def store(self, obs, action, reward, next_obs, done):
        self.obs[self.place], self.action[self.place], self.reward[self.place] = obs, action, reward
        self.next_obs[self.place], self.done[self.place] = next_obs, done
        self.place = (self.place + 1) % self.most
        self.size = min(self.size + 1, self.most)

    def sample(self, count):
        rows = np.random.randint(0, self.size, size=count)
        return [torch.as_tensor(one[rows]) for one in (self.obs, self.action, self.reward, self.next_obs, self.done)]


class SquashedActor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, obs):
        mean, spread = self.net(obs).chunk(2, dim=-1)
        normal = torch.distributions.Normal(mean, spread.clamp(-5, 2).exp())
        raw = normal.rsample()
        log = normal.log_prob(raw) - torch.log(1 - raw.tanh().pow(2) + 1e-6)
        return raw.tanh(), log.sum(dim=-1)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1)) for _ in range(2))

    def forward(self, obs, action):
        return [net(torch.cat([obs, action], dim=-1)).squeeze(-1) for net in self.nets]


def train_sac(directory):
    """Twin critics with targets, a temperature that is learned, a replay buffer of arrays, steps of the environment."""
    torch.manual_seed(0)
    np.random.seed(0)
    env = Pole(seed=3)
    actor, critic = SquashedActor(), Critic()
    target = copy.deepcopy(critic).requires_grad_(False)
    log_alpha = torch.zeros(1, requires_grad=True)
    optimizers = {
        "actor": torch.optim.Adam(actor.parameters(), lr=3e-3),
        "critic": torch.optim.Adam(critic.parameters(), lr=3e-3),
        "alpha": torch.optim.Adam([log_alpha], lr=3e-3),
    }
    buffer = ReplayBuffer(100)
    now = {"obs": None, "t": 0, "return": 0.0, "returns": []}
    components = {
        "actor": actor, "critic": critic, "target": target, "temperature": {"log_alpha": log_alpha}, "env": env,
        "buffer": vars(buffer), "now": now, **{f"{name}_optimizer": one for name, one in optimizers.items()},
    }  # fmt: skip

    def update():
        obs, action, reward, next_obs, done = buffer.sample(16)
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            following, log = actor(next_obs)
            backup = reward + 0.99 * (1 - done) * (torch.minimum(*target(next_obs, following)) - alpha * log)
        loss = sum((value - backup).pow(2).mean() for value in critic(obs, action))
        optimizers["critic"].zero_grad()
        loss.backward()
        optimizers["critic"].step()
        chosen, log = actor(obs)
        actor_loss = (alpha * log - torch.minimum(*critic(obs, chosen))).mean()
        optimizers["actor"].zero_grad()
        actor_loss.backward()
        optimizers["actor"].step()
        optimizers["alpha"].zero_grad()
        (-log_alpha * (log.detach() - 1.0)).mean().backward()
        optimizers["alpha"].step()
        with torch.no_grad():
            for mine, theirs in zip(target.parameters(), critic.parameters(), strict=True):
                mine.mul_(0.95).add_(theirs, alpha=0.05)
        return loss

    with safeckpt.CheckpointManager(directory, components, save_every=5) as manager:
        if manager.restore() is None:
            now["obs"] = env.reset()
        while now["t"] < 80:
            now["t"] += 1
            if now["t"] > 25:
                with torch.no_grad():
                    action = actor(torch.as_tensor(now["obs"]))[0].item()
            else:
                action = np.random.uniform(-1, 1)
            seen, reward, done = env.step(action)
            now["return"] += reward
            buffer.store(now["obs"], action, reward, seen, done)
            now["obs"] = seen
            if done:
                now["returns"].append(now["return"])
                now["obs"], now["return"] = env.reset(), 0.0
            if now["t"] > 30:
                manager.end_step(manager.step + 1, loss=update())
    return now["returns"]
