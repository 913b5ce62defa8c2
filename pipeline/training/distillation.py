"""On-policy distillation: the experts of the domains teach a student on the student's own tokens.

The student plays tasks of all domains. The teacher of a task is the expert of the task's domain.
GRPO's loss is used, but each sampled token has an advantage of its own:

    advantage = teacher_logprob - old_logprob

`old_logprob` is the log-probability of the policy at the start of the step: the sampler's, as in
`grpo.py`, or the trainer's, where the loss corrects an inexact sampler. At the first update, the
expected gradient of a token, given the tokens before it, is that of KL(student || teacher), the
reverse KL divergence of the next token (Agarwal et al. 2024, GKD, arXiv 2306.13649, and Gu et al.
2024, MiniLLM, arXiv 2306.08543). As in "On-Policy Distillation" (Lu, Thinking Machines Lab 2025),
the divergence of later tokens, which MiniLLM adds, does not count. With a teacher for each domain,
the method is MOPD (MiMo-V2-Flash, 2026, arXiv 2601.02780; Ma et al. 2026, arXiv 2606.30406).

Rewards take no part, so groups with equal rewards teach, too. The loss has no entropy bonus.
"""

from collections.abc import Mapping
from itertools import chain, compress

from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks
from pipeline.training.collect import RolloutBatch
from pipeline.training.updater import Reference, Updater


def teach(
    batch: RolloutBatch,
    teachers: Mapping[str, Reference],
    updater: Updater,
    ranks: Ranks,
    config: Config,
) -> dict[str, float]:
    """Set the advantage of each sampled token, and which samples are kept; return metrics.

    `teachers` has the teacher of each domain. Every rank must call this function. The advantage of
    a sample becomes the mean over its tokens. The metrics are those of `divergences`.
    """
    for sample in batch.samples:
        sample.kept = not sample.trajectory.left_out
        sample.advantage = 0.0
    for domain, teacher in teachers.items():
        sequences = [
            sequence
            for sample in batch.samples
            if sample.kept and sample.trajectory.domain == domain
            for sequence in sample.trajectory.sequences
            if sequence.num_sampled_tokens
        ]
        of_teacher = updater.logprobs(teacher, sequences)
        of_student = [[*compress(one.logprobs, one.loss_mask)] for one in sequences]
        if updater.corrects:
            of_student = updater.logprobs(None, sequences)
        for sequence, *pair in zip(sequences, of_teacher, of_student, strict=True):
            values = (new - old for new, old in zip(*pair, strict=True))
            sequence.advantages = [
                next(values) if is_sampled else 0.0 for is_sampled in sequence.loss_mask
            ]
    metrics = divergences(batch, ranks, config)
    for sample in batch.samples:
        scale = config.grpo.domain_advantage_scale.get(sample.trajectory.domain, 1.0)
        for sequence in sample.trajectory.sequences:
            sequence.advantages = [scale * advantage for advantage in sequence.advantages]
    return metrics


def divergences(batch: RolloutBatch, ranks: Ranks, config: Config) -> dict[str, float]:
    """Set the mean advantage of each sample; return KL estimates of all ranks, nats per token.

    `train/teacher_kl` is the mean of the student's minus the teacher's log-probability over all
    tokens, and `train/teacher_kl/DOMAIN` that over a domain's tokens. The order of summation does
    not depend on the number of ranks.
    """
    mine = list[float]()
    for sample in batch.samples:
        total = sum(chain(*(one.advantages for one in sample.trajectory.sequences)))
        count = sample.trajectory.num_sampled_in_all * sample.kept
        sample.advantage = total / max(count, 1)
        mine += [sample.index, total, count]
    gathered = ranks.all_gather_numbers(mine)
    rows = sorted(row for of in gathered for row in zip(of[::3], of[1::3], of[2::3], strict=True))
    sums: dict[str, list[float]] = {}
    for index, total, count in rows:
        domain = batch.tasks[int(index) // config.rollout.num_generations].domain
        for name in ("train/teacher_kl", f"train/teacher_kl/{domain}"):
            of = sums.setdefault(name, [0.0, 0.0])
            of[0] -= total
            of[1] += count
    return {name: total / count for name, (total, count) in sums.items() if count}
