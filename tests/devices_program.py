"""What test_devices.py needs two devices for, in a process of its own: leaves `results.npz` and a run."""

import glob
import os
from contextlib import suppress
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo

ONE = ppo.Args(
    env_id="Pendulum-v1",
    num_envs=4,
    num_steps=8,
    num_minibatches=2,
    update_epochs=3,
    hidden_size=8,
    total_timesteps=4 * 32,
    learning_rate=3e-3,
    ent_coef=0.01,
)
TWO = replace(ONE, num_devices=2)
results = {}


def save(prefix, tree):
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        results[f"{prefix}{jax.tree_util.keystr(path)}"] = np.asarray(x)


def as_one_device(batch):
    """[2, num_seeds, num_steps, num_envs / 2, ...] to [num_seeds, num_steps, num_envs, ...]."""
    return jax.tree.map(lambda x: np.concatenate(list(x), axis=2), jax.device_get(batch))


def call(function, args, *inputs):
    """Of one lane on one device, [...], for arrays [num_devices, 1, ...]."""
    return jax.device_get(ppo.parallel(partial(function, args), args)(*jax.tree.map(jnp.array, inputs)))


if __name__ == "__main__":
    ppo.start_jax(TWO)

    # The same environments, as one pool or as two: the first observations, and what the same actions make of them.
    rng = np.random.default_rng(0)
    actions = rng.uniform(-2, 2, (300, 4, 1)).astype(np.float32)  # longer than an episode
    for name, args in [("one", ONE), ("two", TWO)]:
        env = ppo.make_env(args)
        split = np.stack(np.split(actions, args.num_devices, axis=1))[:, None]
        handle = np.broadcast_to(env.handle, (args.num_devices, 1, *env.handle.shape))
        obs = env.reset_fn()
        _, steps = ppo.parallel(partial(jax.lax.scan, env.step_fn), args)(jnp.array(handle), jnp.array(split))
        save(f"streams/{name}", (np.concatenate(list(obs), axis=1)[0], as_one_device(steps)))

    # The learning from the same rollout, on two devices and, its halves side by side, on one.
    for name, changes in {
        "default": {"max_grad_norm": 1e6},  # Adam's moments show the gradients' size
        "other": {"norm_adv": False, "norm_return": False, "recompute_advantage": False, "clip_vloss": True}
        | {"max_grad_norm": 0.1, "clip_coef": 0.01, "target_kl": 1e-5},
    }.items():
        one, two = (replace(args, num_minibatches=1, **changes) for args in (ONE, TWO))
        state = ppo.init_lanes([two], ppo.make_env(two))
        state, batch = ppo.compiled(ppo.rollout, two)(state)
        state, batch = jax.device_get((state, batch))
        batch = batch.replace(valid=batch.valid * (rng.random(batch.valid.shape) < 0.7))  # unequally many of each
        learned, metrics = call(ppo.learn, two, state, batch)
        state_of_one = jax.tree.map(lambda x: x[:1], state)
        last_obs = np.concatenate(list(state.timestep.obs), axis=1)[None]
        state_of_one = state_of_one.replace(timestep=state_of_one.timestep.replace(obs=last_obs))
        learned_of_one, metrics_of_one = call(
            ppo.learn, one, state_of_one, jax.tree.map(lambda x: x[None], as_one_device(batch))
        )
        for kind, s, m in [("two", learned, metrics), ("one", learned_of_one, metrics_of_one)]:
            save(f"learn/{name}/{kind}", (s.agent.params, s.agent.opt_state, s.return_stats, m))

    # A whole training of two seeds on two devices: what the devices share, and what they don't.
    lanes = [TWO, replace(TWO, seed=2)]
    args = replace(TWO, num_seeds=len(lanes))
    state = ppo.init_lanes(lanes, ppo.make_env(*lanes))
    for _ in range(args.num_iterations):
        state, batch = ppo.compiled(ppo.rollout, args)(state)
        batch = jax.device_get(batch)  # before it is given away
        state, metrics = ppo.compiled(ppo.learn, args)(state, batch)
    stats = [wrapper.stats for wrapper in state.env.wrappers if hasattr(wrapper, "stats")]
    save("shared", (state.agent.params, state.agent.opt_state, state.return_stats, stats, metrics))
    save("own", {"key": state.key, "action": batch.action, "obs": batch.obs})
    np.savez("results.npz", **results)
    ppo.main(replace(TWO, eval_episodes=2, progress=False))

    # A run that goes on with as many devices, and would with another number of them.
    os.mkdir("resumed")
    os.chdir("resumed")
    half = replace(TWO, total_timesteps=2 * 32, eval_episodes=2, progress=False)
    ppo.main(half)
    (run,) = glob.glob("runs/*")
    ppo.main(replace(half, total_timesteps=4 * 32, resume=run))
    with suppress(SystemExit):
        ppo.main(replace(half, total_timesteps=6 * 32, resume=run, num_devices=1))
