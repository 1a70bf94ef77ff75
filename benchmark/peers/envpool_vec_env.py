"""EnvPool as a vectoriser of SB3 and SBX, after the one in EnvPool's own example for SB3."""

import envpool
import numpy as np
from stable_baselines3.common.vec_env import VecEnv, VecNormalize


class EnvPoolVecEnv(VecEnv):
    """SB3 expects a finished environment to be reset in the same step, its last observation in `infos`."""

    def __init__(self, env_id: str, num_envs: int):
        self.envs = envpool.make_gymnasium(env_id, num_envs=num_envs, seed=1)
        super().__init__(num_envs, self.envs.observation_space, self.envs.action_space)

    def reset(self):
        return self.envs.reset()[0]

    def step_async(self, actions):
        self.envs.send(actions.astype(self.action_space.dtype))

    def step_wait(self):
        obs, rewards, terminated, truncated, _ = self.envs.recv()
        dones = terminated | truncated
        infos = [{} for _ in range(self.num_envs)]
        finished = np.flatnonzero(dones).astype(np.int32)
        if len(finished):
            for i in finished:
                infos[i] = {"terminal_observation": obs[i].copy(), "TimeLimit.truncated": not terminated[i]}
            obs[finished] = self.envs.reset(finished)[0]
        return obs, rewards, dones, infos

    def close(self):
        self.envs.close()

    def get_attr(self, attr_name, indices=None):
        return [getattr(self.envs, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name, value, indices=None):
        raise NotImplementedError

    def env_method(self, method_name, *method_args, indices=None, **method_kwargs):
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class, indices=None):
        return [False for _ in self._get_indices(indices)]


def make_normalized(env_id: str, num_envs: int) -> VecNormalize:
    return VecNormalize(EnvPoolVecEnv(env_id, num_envs), gamma=0.99)


def make_training(args, algorithm, **kwargs):
    """A function that trains SB3's or SBX's PPO, whose defaults are 10 epochs and networks of 64 x 64 with tanh."""
    model = algorithm(
        "MlpPolicy",
        make_normalized(args.env_id, args.num_envs),
        n_steps=args.num_steps,
        batch_size=args.minibatch_size,
        n_epochs=args.update_epochs,
        vf_coef=0.25,
        seed=1,
        device="cpu",
        **kwargs,
    )
    return lambda iterations: model.learn(iterations * args.batch_size, reset_num_timesteps=False, log_interval=None)
