"""A stand-in for verifiers 0.1.14: the calls that the worker makes, with their answers' form."""

import importlib
import logging

__version__ = "0.1.14"


def load_environment(name, **arguments):
    try:
        return importlib.import_module(name).load_environment(**arguments)
    except ImportError as error:
        raise ValueError(f"Could not import '{name}' environment.") from error
    except Exception as error:
        raise RuntimeError(f"Failed to load environment '{name}': {error}") from error


class Rubric:
    def __init__(self, funcs, weights=None):
        self.funcs = funcs
        self.weights = weights or [1.0] * len(funcs)


class RubricGroup:
    def __init__(self, rubrics):
        self.rubrics = rubrics


class Environment:
    """Asks for `turns` messages, with a question between them, and scores the last one."""

    requires_group_rollouts = False

    def __init__(self, dataset, rubric, eval_dataset=None, turns=1, before=None, bonus=0.0):
        self.dataset = dataset
        self.eval_dataset = eval_dataset
        self.rubric = RubricGroup([rubric, Rubric([num_turns], [0.0])])
        self.turns = turns
        self.before = before
        self.bonus = bonus

    def build_dataset(self):
        return self.dataset

    def build_eval_dataset(self):
        return self.eval_dataset

    async def run_rollout(self, row, client, model, sampling_args):
        assert (model, sampling_args) == ("policy", {})
        messages = [*row["prompt"]]
        error = None
        try:
            for turn in range(self.turns):
                messages += [{"role": "user", "content": "sure?"}] * (turn > 0)
                messages.append(await client.message(messages))
                if self.before is not None:
                    await self.before(row)
        except ConnectionError as failure:  # what verifiers calls an Error
            error = {"error": "ModelError", "error_chain_repr": repr(failure)}
        metrics, reward = {}, self.bonus
        for rubric in self.rubric.rubrics:
            for function, weight in zip(rubric.funcs, rubric.weights, strict=True):
                try:
                    value = function(messages[-1]["content"], row.get("answer"))
                except Exception as failure:
                    logging.getLogger("verifiers.rubrics.rubric.Rubric").error(
                        f"Error calling reward function {function.__name__}: {failure}"
                    )
                    value = 0.0
                metrics[function.__name__] = value
                reward += weight * value
        return {"reward": reward, "metrics": metrics, **({"error": error} if error else {})}


def num_turns(text, answer):
    return 3.0
