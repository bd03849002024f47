"""Train CartPole on ranks that see different states, with shared and with separate normalizers.

torchrun --standalone --nproc-per-node 2 examples/observations.py

Takes 35 s. The policy with one shared normalizer holds the pole for 276 of 300 steps on both ranks.
With a separate normalizer per rank, the same weights hold the pole for 225 steps on rank 0, and for
190 steps on average over the ranks.
"""

import argparse
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from multibn import SingleProcess
from multibn.torch import RunningNorm, average_gradients

ENVIRONMENTS, STEPS, EPOCHS, DISCOUNT = 8, 64, 4, 0.98
STARTS = 0.02, 0.2  # bounds of the initial state, plus and minus, on even and on odd ranks


class Policy(nn.Module):
    """Logits of two actions, and the value of a state, from normalized observations."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        self.norm = RunningNorm(4, clip=5.0, process_group=None if shares else SingleProcess())
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(self.norm(x))
        return y[..., :2], y[..., 2]


def environments(seed: int, start: float) -> tuple[Any, Tensor]:
    envs = gymnasium.make_vec("CartPole-v1", ENVIRONMENTS, vectorization_mode="vector_entry_point")
    states, _ = envs.reset(seed=seed, options={"low": -start, "high": start})
    return envs, torch.as_tensor(states)


@torch.no_grad()
def mean_return(policy: Policy, limit: int) -> float:
    """Return the mean steps until the pole falls (at most `limit`), for all of STARTS."""
    lengths = []
    for start in STARTS:
        envs, states = environments(1234, start)
        alive, steps = np.ones(ENVIRONMENTS, bool), np.zeros(ENVIRONMENTS)
        for _ in range(limit):
            states, _, ended, cut, _ = envs.step(
                policy(torch.as_tensor(states))[0].argmax(1).numpy()
            )
            steps += alive
            alive &= ~(ended | cut)
        lengths += [*steps]
    return float(np.mean(lengths))


def train(shares: bool, rollouts: int) -> float:
    rank = dist.get_rank()
    torch.manual_seed(0)
    policy = Policy(shares)
    optimizer = torch.optim.Adam(policy.parameters(), 5e-3)
    torch.manual_seed(rank)
    envs, states = environments(rank, STARTS[rank % 2])
    for _ in range(rollouts):
        seen: list[tuple[Tensor, ...]] = []
        with torch.no_grad():
            for _ in range(STEPS):
                logits, value = policy(states)
                action = torch.distributions.Categorical(logits=logits).sample()
                found, reward, ended, cut, _ = envs.step(action.numpy())
                done = torch.as_tensor(ended | cut)
                seen.append((states, action, value, torch.as_tensor(reward), done))
                states = torch.as_tensor(found)
            latest = policy(states)[1]
            x, actions, values, rewards, dones = (torch.stack(v) for v in zip(*seen, strict=True))
            returns = torch.empty_like(values)
            for k in reversed(range(STEPS)):
                latest = rewards[k].float() + DISCOUNT * latest * ~dones[k]
                returns[k] = latest
            before = torch.log_softmax(policy(x)[0], -1).gather(-1, actions[..., None])[..., 0]
        gain = returns - values
        gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        for _ in range(EPOCHS):  # PPO
            logits, value = policy(x)
            chosen = torch.log_softmax(logits, -1).gather(-1, actions[..., None])[..., 0]
            ratio = (chosen - before).exp()
            surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            loss = -surrogate + 0.002 * (value - returns).square().mean()
            optimizer.zero_grad()
            loss.backward()
            average_gradients(policy)
            optimizer.step()
        policy.norm.update(x)
        policy.norm.synchronize()
    return mean_return(policy, 300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=30)
    rollouts = parser.parse_args().rollouts
    dist.init_process_group("gloo")
    for shares in (True, False):
        found = train(shares, rollouts)
        dist.all_reduce(total := torch.tensor(found))
        if dist.get_rank() == 0:
            how = "one normalizer of all ranks" if shares else "a normalizer for each rank"
            mean = total.item() / dist.get_world_size()
            print(f"{how}: return of rank 0 {found:.0f}, mean over ranks {mean:.0f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
