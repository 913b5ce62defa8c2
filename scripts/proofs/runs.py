"""Whole runs on real ranks, whose tokens can be compared with or forced in other runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parameters_to_vector

from pipeline.config.cli import parse
from pipeline.config.settings import RolloutSettings
from pipeline.data.rng import stream_key, uniforms
from pipeline.distributed.sharding import fill, whole
from pipeline.models.chat.template import Chat
from pipeline.models.sampling_copy import trained_weights
from pipeline.rollout.samplers.drawing import cumulative
from pipeline.rollout.samplers.own import RowSampler
from pipeline.rollout.trajectory import Trajectory
from pipeline.run_state import Run, open_run
from pipeline.train import main
from scripts.proofs.ranks import play_ranks

Place = tuple[str, int, str, str, int]  # stage or evaluation, step, domain, task, trial


@dataclass(frozen=True, kw_only=True)
class Said:
    """The sampled tokens of one episode."""

    ids: list[int]
    logprobs: list[float]


@dataclass(kw_only=True)
class Played:
    """The results of a run: episodes of all ranks, final parameters, and forced tokens."""

    episodes: dict[Place, Said] = field(default_factory=dict)
    parameters: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0))
    num_forced: int = 0
    ties: list[float] = field(default_factory=list)  # distances in `ForcedSampler.misses`
    update_gap: float = 0.0  # largest relative difference of parameters after any one step

    @property
    def num_tokens(self) -> int:
        return sum(len(said.ids) for said in self.episodes.values())

    def largest_gap(self, other: Played) -> float:
        """The largest difference of log-probabilities of equal tokens in training episodes."""
        return max(
            abs(mine - theirs)
            for place, said in self.episodes.items()
            if not place[0].startswith("evaluation-")
            for mine, theirs in zip(said.logprobs, other.episodes[place].logprobs, strict=True)
        )

    def forced_streams(self, seed: int) -> dict[int, list[int]]:
        """The tokens of training episodes, by random-number key."""
        return {
            stream_key(seed, "rollout", stage, step - 1, domain, task, trial): said.ids
            for (stage, step, domain, task, trial), said in self.episodes.items()
            if not stage.startswith("evaluation-")
        }


class ForcedSampler(RowSampler):
    """A sampler that returns given tokens instead of sampled tokens.

    `forced` holds the tokens of each random-number key, in order. Other keys are sampled. `misses`
    holds, for each forced token by key and position, the distance of the random number from the
    token's interval of the cumulative distribution; None if sampling gives the token, too.
    """

    forced: Mapping[int, Sequence[int]] = {}

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.misses: dict[tuple[int, int], float | None] = {}

    def sample_tokens(self, logprobs_BV: Any, keys: Any, positions: Any, greedy: bool) -> Any:
        picked = super().sample_tokens(logprobs_BV, keys, positions, greedy)
        for row, (key, position) in enumerate(zip(keys.tolist(), positions.tolist(), strict=True)):
            tokens = self.forced.get(key, ())
            if position >= len(tokens):  # no forced token
                continue
            # A finished message is sampled again together with the next message.
            self.misses[key, position] = None
            if picked[row] != tokens[position]:
                picked[row] = tokens[position]
                line = [0.0, *cumulative(logprobs_BV[row : row + 1])[0].tolist()]
                draw = float(uniforms(keys[row], positions[row])) * line[-1]
                low, high = line[tokens[position]], line[tokens[position] + 1]
                self.misses[key, position] = max(low - draw, draw - high)
        return picked


def forced_sampler(
    model: Any, chat: Chat, settings: RolloutSettings, dtype: torch.dtype, is_main: bool
) -> ForcedSampler:
    """Make the sampler of a run, like `make_sampler`."""
    return ForcedSampler.of_settings(model, settings, dtype, [chat.end_of_turn_id])


def without_report(run: Run) -> None:
    """The end of a run without the final report, which takes longer than a small run."""
    if run.ranks.is_main:
        run.write_results()
    run.ranks.barrier("end")


def play_run(
    num_ranks: int,
    flags: Sequence[str],
    output_dir: Path,
    forced: Mapping[int, Sequence[int]] | None = None,
    weights: Path | None = None,
) -> Played:
    """Run the pipeline's `main` on `num_ranks` ranks with flags over the default recipe.

    `forced` replaces sampled tokens. Without `weights`, the run saves its parameters after each
    step. `weights` is the folder of another run: after each step, the parameters are compared with
    the other run's parameters and replaced by them.
    """
    argv = [*flags, "--output-dir", str(output_dir), "--report-to", "none"]
    argv += ["--num-gpus", str(num_ranks)]
    results = play_ranks(_run_on_this_rank, num_ranks, argv, forced, weights, timeout_s=1800)
    failed = [result for result in results if isinstance(result, str)]
    if failed:
        raise RuntimeError(failed[0])
    whole = Played(parameters=results[0].parameters)
    for result in results:
        whole.episodes |= result.episodes
        whole.num_forced += result.num_forced
        whole.ties += result.ties
        whole.update_gap = max(whole.update_gap, result.update_gap)
    return whole


def _run_on_this_rank(
    argv: list[str], forced: Mapping[int, Sequence[int]] | None, weights: Path | None
) -> Played:
    played = Played()
    runs: list[Run] = []

    def keep(run: Run, name: str, trajectories: Sequence[Trajectory]) -> None:
        runs.append(run)
        for t in trajectories:
            ids = [i for i, mask in zip(t.completion_ids, t.loss_mask, strict=True) if mask]
            logprobs = [p for p, mask in zip(t.logprobs, t.loss_mask, strict=True) if mask]
            place = (name, run.state.step, t.domain, t.task_id, t.trial)
            assert place not in played.episodes
            played.episodes[place] = Said(ids=ids, logprobs=logprobs)
        if name.startswith("evaluation-"):
            return
        learner = run.learner
        step = run.state.step
        found = flat(learner.model)
        if weights is not None:
            theirs = np.load(weights / f"parameters-{step}.npy")
            gap = np.linalg.norm(found - theirs) / np.linalg.norm(theirs)
            played.update_gap = max(played.update_gap, float(gap))
            left = torch.from_numpy(theirs)
            for parameter in learner.model.parameters():
                fill(parameter, left[: parameter.numel()].view(parameter.shape))
                left = left[parameter.numel() :]
            learner.sampling.sampler.load_weights(trained_weights(learner.model))
        elif run.ranks.is_main:
            np.save(run.folder / f"parameters-{step}.npy", found)

    def end(run: Run) -> None:
        played.parameters = flat(run.learner.model)
        without_report(run)

    hooks: dict[str, Any] = {"on_batch": keep}
    if forced is not None:
        ForcedSampler.forced = forced
        hooks["make_sampler"] = forced_sampler
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        main(parse(argv), open_run=partial(open_run, **hooks), end=end)
    if forced is not None:
        misses = runs[-1].learner.sampling.sampler.misses
        played.num_forced = len(misses)
        played.ties = [distance for distance in misses.values() if distance is not None]
    return played


def flat(model: Any) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return parameters_to_vector(whole(p) for p in model.parameters()).numpy().copy()
