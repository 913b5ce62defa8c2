"""The environment of verifiers v0 for reasoning-gym."""

from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv


def load_environment(**arguments):
    return ReasoningGymEnv("chain_sum", num_train_examples=40, num_eval_examples=10, **arguments)
