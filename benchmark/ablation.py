"""Controlled experiments on learning: the training script with one thing changed, several seeds side by side.

    python benchmark/ablation.py --variant gae_lambda_0.9 --env-id Hopper-v4 --num-seeds 4
    python benchmark/ablation.py --list

A variant is some of the script's arguments, or a function of the script that is replaced here. The other flags are
the script's own. Each run is a run of the script, named after its variant, which benchmark/ablation.sh reports on.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax.linen.initializers import constant, orthogonal
from flax.training.train_state import TrainState

import cleanrl.ppo_continuous_action_envpool_xla_jax_scan as ppo
from cleanrl_utils.envs.wrappers import NormalizeReward, RunningMeanStd


@dataclass(frozen=True)
class Variant:
    args: dict = field(default_factory=dict)
    patch: Callable[[], None] = lambda: None


def clip_gradients_apart():
    """The actor's gradient and the critic's each have a norm of at most --max-grad-norm."""

    def clip(max_norm):
        def update(grads, state, params=None):
            critic = {"critic": grads["params"]["critic"]}
            actor = {name: x for name, x in grads["params"].items() if name != "critic"}
            clipped = [
                optax.clip_by_global_norm(max_norm).update(part, optax.EmptyState())[0] for part in (actor, critic)
            ]
            return {"params": {**clipped[0], **clipped[1]}}, state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

    replace_optimizer(clip=clip)


def replace_optimizer(clip=optax.clip_by_global_norm, eps=1e-8):
    def make_agent(args, env, key):
        agent = ppo.Agent(int(np.prod(env.action_shape[1:])), args.hidden_size)
        bound = ppo.bound_log_std(args.min_log_std, args.num_iterations * args.update_epochs * args.num_minibatches)
        tx = optax.inject_hyperparams(
            lambda learning_rate, max_grad_norm: optax.chain(
                clip(max_grad_norm), optax.adam(learning_rate, eps=eps), bound
            )
        )(learning_rate=args.learning_rate, max_grad_norm=args.max_grad_norm)
        return TrainState.create(apply_fn=agent.apply, params=agent.init(key, jnp.zeros(env.obs_dim)), tx=tx)

    ppo.make_agent = make_agent


def adapt_learning_rate(target_kl: float):
    """As rsl_rl does: 1.5 times more or less when the KL divergence is half the target or twice."""

    def patch():
        learn = ppo.learn

        def adaptive_learn(args, state, batch):
            learning_rate = state.agent.opt_state.hyperparams["learning_rate"]
            state, metrics = learn(replace(args, learning_rate=learning_rate, anneal_lr=False), state, batch)
            kl = metrics["losses/approx_kl"]
            factor = jnp.where(kl > 2 * target_kl, 1 / 1.5, jnp.where(kl < target_kl / 2, 1.5, 1.0))
            learning_rate = jnp.clip(learning_rate * factor, 1e-5, 1e-2)
            opt_state = state.agent.opt_state
            opt_state = opt_state._replace(hyperparams={**opt_state.hyperparams, "learning_rate": learning_rate})
            return state.replace(agent=state.agent.replace(opt_state=opt_state)), metrics

        ppo.learn = adaptive_learn

    return patch


def anneal_to(floor: float):
    """The learning rate ends at this share of the first one."""

    def patch():
        learn = ppo.learn

        def floored_learn(args, state, batch):
            remaining = 1.0 - state.iteration / args.num_iterations
            learning_rate = args.learning_rate * (floor + (1 - floor) * remaining)
            return learn(replace(args, learning_rate=learning_rate, anneal_lr=False), state, batch)

        ppo.learn = floored_learn

    return patch


def first_log_std(value: float):
    def patch():
        ppo.constant = lambda x: constant(value if x == -0.5 else x)

    return patch


bound_log_std = ppo.bound_log_std


def constant_min_log_std(value: float):
    """A lower bound that does not fall."""

    def patch():
        ppo.bound_log_std = lambda min_log_std, num_updates: bound_log_std(value, num_updates=1)

    return patch


def falling_min_log_std(last: float):
    """One that falls from -1."""

    def patch():
        ppo.bound_log_std = lambda min_log_std, num_updates: bound_log_std(last, num_updates)

    return patch


def squash_actions():
    ppo.VectorEnvClipAct.send = lambda self, action: (
        self,
        self.low + (jnp.tanh(jnp.nan_to_num(action)) + 1.0) / 2.0 * (self.high - self.low),
    )


def replace_networks(actor: int = 64, critic: int = 64, layer_norm: bool = False):
    class MLP(nn.Module):
        hidden_size: int
        out_features: int
        out_scale: float

        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = nn.Dense(self.hidden_size, kernel_init=orthogonal(np.sqrt(2)), bias_init=constant(0.0))(x)
                x = nn.tanh(nn.LayerNorm()(x) if layer_norm else x)
            return nn.Dense(self.out_features, kernel_init=orthogonal(self.out_scale), bias_init=constant(0.0))(x)

    class Agent(nn.Module):
        action_dim: int
        hidden_size: int

        @nn.compact
        def __call__(self, obs):
            mean = MLP(actor, self.action_dim, out_scale=0.01, name="actor")(obs)
            log_std = self.param("log_std", constant(-0.5), (self.action_dim,))
            value = MLP(critic, 1, out_scale=np.sqrt(2), name="critic")(obs).squeeze(-1)
            return mean, log_std, value

    ppo.Agent = Agent


def normalize_advantages_of_batch():
    compute_targets = ppo.compute_targets

    def patched(args, agent, return_stats, batch, last_obs):
        targets, return_stats = compute_targets(args, agent, return_stats, batch, last_obs)
        advantage, valid = targets.advantage.reshape(-1), batch.valid.reshape(-1)
        mean, var = ppo.masked_mean(advantage, valid), ppo.masked_var(advantage, valid)
        return targets.replace(advantage=(targets.advantage - mean) / jnp.sqrt(var + 1e-8)), return_stats

    ppo.compute_targets = patched


def clip_observations(at: float):
    def patch():
        create = ppo.VectorEnvNormObs
        ppo.VectorEnvNormObs = lambda *inputs, **more: create(*inputs, **more, clip=at)

    return patch


def last_layer_scale(value: float):
    """Of the actor's first weights."""

    def patch():
        scaled = ppo.orthogonal
        ppo.orthogonal = lambda scale: scaled(value if scale == 0.01 else scale)

    return patch


def normalize_rewards():
    """Gymnasium's wrapper, outside of the one for raw returns."""
    make_env = ppo.make_env

    def patched(*lanes, evaluation=False, iteration=0):
        env = make_env(*lanes, evaluation=evaluation, iteration=iteration)
        stats = RunningMeanStd.create(jnp.zeros(()), lanes[0].axis_name)
        reward = NormalizeReward(stats, gamma=lanes[0].gamma, training=not evaluation, axis_name=lanes[0].axis_name)
        return env.replace(wrappers=(*env.wrappers, reward))

    ppo.make_env = patched


def learn_from_reset_steps():
    rollout = ppo.rollout

    def patched(args, state):
        state, batch = rollout(args, state)
        return state, batch.replace(valid=jnp.ones_like(batch.valid))

    ppo.rollout = patched


VARIANTS = {
    "default": Variant(),
    # tianshou's, from which all that was tried starts
    "former_default": Variant(patch=constant_min_log_std(-20.0)),
    "no_norm_adv": Variant({"norm_adv": False}),
    "norm_adv_batch": Variant({"norm_adv": False}, normalize_advantages_of_batch),
    "no_norm_return": Variant({"norm_return": False}),
    "normalized_rewards": Variant({"norm_return": False}, normalize_rewards),
    "no_recompute": Variant({"recompute_advantage": False}),
    "gae_lambda_0.9": Variant({"gae_lambda": 0.9}),
    "gae_lambda_0.98": Variant({"gae_lambda": 0.98}),
    "gamma_0.98": Variant({"gamma": 0.98}),
    "gamma_0.995": Variant({"gamma": 0.995}),
    "gamma_0.999": Variant({"gamma": 0.999}),
    "gamma_0.9999": Variant({"gamma": 0.9999}),
    "vf_coef_0.5": Variant({"vf_coef": 0.5}),
    "vf_coef_1": Variant({"vf_coef": 1.0}),
    "clip_vloss": Variant({"clip_vloss": True}),
    "max_grad_norm_1": Variant({"max_grad_norm": 1.0}),
    "clip_gradients_apart": Variant(patch=clip_gradients_apart),
    "adam_eps_1e-5": Variant(patch=lambda: replace_optimizer(eps=1e-5)),
    "learning_rate_1e-3": Variant({"learning_rate": 1e-3}),
    "learning_rate_5e-4": Variant({"learning_rate": 5e-4}),
    "no_anneal": Variant({"anneal_lr": False}),
    "anneal_to_0.1": Variant(patch=anneal_to(0.1)),
    "kl_adaptive_0.01": Variant(patch=adapt_learning_rate(0.01)),
    "kl_adaptive_0.02": Variant(patch=adapt_learning_rate(0.02)),
    "target_kl_0.02": Variant({"target_kl": 0.02}),
    "clip_coef_0.1": Variant({"clip_coef": 0.1}),
    "clip_coef_0.3": Variant({"clip_coef": 0.3}),
    "ent_coef_0.001": Variant({"ent_coef": 0.001}),
    "epochs_5": Variant({"update_epochs": 5}),
    "epochs_20": Variant({"update_epochs": 20}),
    "minibatches_8": Variant({"num_minibatches": 8}),
    "minibatches_16": Variant({"num_minibatches": 16}),
    "num_steps_64": Variant({"num_steps": 64}),
    "envs_32_steps_64": Variant({"num_envs": 32, "num_steps": 64}),
    "envs_16_steps_128": Variant({"num_envs": 16, "num_steps": 128}),
    "envs_8_steps_256": Variant({"num_envs": 8, "num_steps": 256}),
    "log_std_0": Variant(patch=first_log_std(0.0)),
    "log_std_-1": Variant(patch=first_log_std(-1.0)),
    "last_layer_1": Variant(patch=last_layer_scale(1.0)),
    "log_std_at_least_-1.5": Variant(patch=constant_min_log_std(-1.5)),
    "log_std_at_least_-1.75": Variant(patch=constant_min_log_std(-1.75)),
    "log_std_at_least_-2": Variant(patch=constant_min_log_std(-2.0)),
    "log_std_at_least_-1_to_-2.5": Variant(patch=falling_min_log_std(-2.5)),
    "reset_steps_learned": Variant(patch=learn_from_reset_steps),
    "tanh": Variant(patch=squash_actions),
    "observations_clipped_at_5": Variant(patch=clip_observations(5.0)),
    "hidden_128": Variant({"hidden_size": 128}),
    "critic_256": Variant(patch=lambda: replace_networks(critic=256)),
    "layer_norm": Variant(patch=lambda: replace_networks(layer_norm=True)),
    # RL Zoo's setting for Swimmer, in what differs from the default
    "rl_zoo_swimmer": Variant(
        {
            "num_envs": 4,
            "num_steps": 1024,
            "num_minibatches": 16,
            "gamma": 0.9999,
            "gae_lambda": 0.98,
            "learning_rate": 6e-4,
        }
    ),
    # the recipe of 64 x 64 steps without normalisation of returns that gives high scores on Humanoid
    "large_steps": Variant(
        {
            "num_steps": 64,
            "num_minibatches": 4,
            "update_epochs": 2,
            "learning_rate": 0.00295,
            "vf_coef": 1.3,
            "max_grad_norm": 3.5,
            "norm_return": False,
            "norm_obs": False,
        }
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, metavar="VARIANT")
    parser.add_argument("--list", action="store_true")
    own, others = parser.parse_known_args()
    if own.list or not own.variant:
        print("\n".join(VARIANTS))
        sys.exit(0 if own.list else 2)
    changes = {}
    for name in own.variant:
        changes |= VARIANTS[name].args
        VARIANTS[name].patch()
    args = tyro.cli(ppo.Args, args=others, default=ppo.Args(exp_name="+".join(own.variant), **changes))
    ppo.check_args(args)
    ppo.main(args)


if __name__ == "__main__":
    main()
