"""Time of a gradient of the Nature network on a CPU: convolutions as products of matrices, and XLA's own.

    python benchmark/convolution.py

Each in a loop of `jax.lax.scan`, as in the training, and outside of one. Medians of alternating rounds; not a test.
"""

import statistics
import time
from types import SimpleNamespace

import gymnasium as gym
import jax
import jax.numpy as jnp
from measure import describe_machine

import cleanrl.ppo_atari_envpool_xla_jax_scan as ppo

BATCH_SIZE, STEPS, ROUNDS = 64, 2, 3


def gradient_step(params, apply_fn, obs):
    grads = jax.grad(lambda params: sum((x**2).sum() for x in apply_fn(params, obs)))(params)
    return jax.tree.map(lambda x, g: x - 1e-6 * g, params, grads)


def compiled_steps(backend: str, in_loop: bool):
    """A function of no arguments that makes `STEPS` gradient steps with that backend's convolution."""
    default_backend = jax.default_backend
    jax.default_backend = lambda: backend
    env = SimpleNamespace(envs=SimpleNamespace(action_space=gym.spaces.Discrete(6)), obs_shape=(84, 84, 4))
    agent = ppo.make_agent(ppo.Args(), env, jax.random.PRNGKey(0))
    obs = jnp.zeros((BATCH_SIZE, *env.obs_shape), jnp.uint8)

    def loop(params):
        if in_loop:
            step = lambda params, _: (gradient_step(params, agent.apply_fn, obs), None)  # noqa: E731
            return jax.lax.scan(step, params, None, length=STEPS)[0]
        return gradient_step(params, agent.apply_fn, obs)

    run = jax.jit(loop).lower(agent.params).compile()
    jax.default_backend = default_backend

    def steps():
        params = agent.params
        for _ in range(1 if in_loop else STEPS):
            params = run(params)
        jax.block_until_ready(params)

    steps()
    return steps


def main() -> None:
    ppo.start_jax(ppo.Args(compilation_cache=False))
    kinds = {"products of matrices": "cpu", "XLA's own": "gpu"}
    runs = {(name, loop): compiled_steps(backend, loop) for name, backend in kinds.items() for loop in (True, False)}
    times = {key: [] for key in runs}
    for _ in range(ROUNDS):
        for key, run in runs.items():
            start_time = time.perf_counter()
            run()
            times[key].append((time.perf_counter() - start_time) / STEPS)
    print(f"{describe_machine()}; a gradient of {BATCH_SIZE} pictures, medians of {ROUNDS} rounds\n")
    print("| convolution | in a loop, ms | outside, ms |\n| --- | --- | --- |")
    for name in kinds:
        print(
            f"| {name} |",
            " | ".join(f"{1000 * statistics.median(times[name, loop]):.0f}" for loop in (True, False)),
            "|",
        )


if __name__ == "__main__":
    main()
