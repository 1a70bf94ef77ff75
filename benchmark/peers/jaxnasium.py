"""Jaxnasium's PPO on its EnvPoolXLAWrapper, compiled.

What differs from our script: networks and statistics in float64, as the wrapper needs JAX's 64-bit mode for MuJoCo;
autoreset on the next step, the wrapper's faster mode, whose reset steps are trained on; advantages not recomputed in
each epoch; rewards rather than returns normalised; a clipped value loss; actions neither clipped nor rescaled; no
episode statistics.
"""

from peers.driver import measure


def make_training(args):
    import envpool
    import equinox as eqx
    import jax
    from jaxnasium.algorithms import PPO
    from jaxnasium.algorithms.architectures import MLP
    from jaxnasium.wrappers import EnvPoolXLAWrapper

    jax.config.update("jax_enable_x64", True)
    envs = envpool.make_gymnasium(args.env_id, num_envs=args.num_envs, seed=1)
    env = EnvPoolXLAWrapper(envs, autoreset_mode="next_step")
    network = {"body": MLP.with_params(hidden_sizes=(64, 64), activation=jax.nn.tanh)}
    ppo = PPO(
        num_envs=args.num_envs,
        num_steps=args.num_steps,
        num_minibatches=args.num_minibatches,
        num_epochs=args.update_epochs,
        learning_rate_start=3e-4,
        ent_coef_start=0.0,
        ent_coef_end=None,
        max_grad_norm=0.5,
        actor_kwargs=network,
        critic_kwargs=network,
        log_function=None,
        reduce_metrics_fn=None,
    )
    key = jax.random.PRNGKey(1)
    obs, env_state = env.reset(jax.random.split(key, args.num_envs))
    state = (ppo.init_agent(key, env), env_state, obs, key)
    train_iteration = eqx.filter_jit(lambda state: ppo.train_iteration(state, None, env=env)[0], donate="all")

    def train(iterations):
        nonlocal state
        for _ in range(iterations):
            state = train_iteration(state)
        jax.block_until_ready(state)

    return train


if __name__ == "__main__":
    measure(__doc__, ["jaxnasium", "jax", "envpool"], make_training)
