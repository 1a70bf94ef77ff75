"""Our script, four seeds at once.

What differs from one run of our script: four trainings in one process, each with environments of its own; the steps
are those of all four.
"""

from peers.driver import measure

NUM_SEEDS = 4


def make_training(args):
    from dataclasses import replace

    from cleanrl_utils.models import load_script

    script = load_script("ppo_continuous_action_envpool_xla_jax_scan")
    sizes = {name: getattr(args, name) for name in ("num_envs", "num_steps", "num_minibatches", "update_epochs")}
    script_args = script.start_jax(script.Args(env_id=args.env_id, num_seeds=NUM_SEEDS, **sizes))
    lanes = [replace(script_args, seed=seed, num_seeds=1) for seed in range(1, NUM_SEEDS + 1)]
    state = script.init_lanes(lanes, script.make_env(*lanes))
    args.batch_size *= NUM_SEEDS

    def train(iterations):
        nonlocal state
        for _ in range(iterations):
            state, metrics = script.train_iteration(script_args, state)
            script.fetch(metrics)

    return train


if __name__ == "__main__":
    measure(__doc__, ["jax", "envpool"], make_training)
