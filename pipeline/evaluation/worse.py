"""Find domains, families and branches whose held-out success is lower after GRPO than before."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pipeline.data.curriculum import BEFORE_GRPO
from pipeline.evaluation.transfer import mean_over_tasks, points_of
from pipeline.evaluation.transfer_metrics import succeeded

MIN_TASKS = 5  # fewer tasks give an interval that is too narrow
KINDS = {"tasks": "sampled", "greedy_tasks": "greedy"}  # key in `results.json` -> name in reports


def worse(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return what became worse, the largest fall first, and how many were compared.

    Something became worse if the 95 % interval of the change, over the same tasks, is below 0.
    About one of 40 comparisons finds a fall where there is none.
    """
    found = list[dict[str, Any]]()
    num_compared = 0
    threshold = float(results["success_threshold"])
    points = points_of(results)
    if len(points) < 2 or points[0]["after"] not in BEFORE_GRPO:
        return {"compared": 0, "found": []}
    before = points[0]["success"]
    after = points[-1]["success"]
    for domain in before.keys() & after.keys():
        groups = _groups(results, domain)
        for key, kind in KINDS.items():
            first, last = (_successes(of[domain].get(key, {}), threshold) for of in (before, after))
            if first.keys() != last.keys():
                continue  # a run that went on with `override` may have other tasks
            for name, tasks in groups.items():
                tasks = [task for task in tasks if task in first]
                if len(tasks) < MIN_TASKS:
                    continue
                num_compared += 1
                changes = [last[task] - first[task] for task in tasks]
                change = mean_over_tasks(changes, f"worse {name} {kind}")
                if change and change[2] is not None and change[2] < 0:
                    rates = [sum(of[t] for t in tasks) / len(tasks) for of in (first, last)]
                    row = {"name": name, "kind": kind, "num_tasks": len(tasks), "change": change}
                    found.append({**row, "before": rates[0], "after": rates[1]})
    found.sort(key=lambda row: (row["change"][0], row["name"], row["kind"]))
    return {"compared": num_compared, "found": found}


def _groups(results: Mapping[str, Any], domain: str) -> dict[str, list[str]]:
    """Return the tasks of a domain, and of its families and branches, by name."""
    families = results["task_families"].get(domain, {})
    branches = results["task_branches"].get(domain, {})
    groups = defaultdict[str, list[str]](list)
    for task, family in families.items():
        names = [domain, f"{domain}/{family}", f"{domain}/{family}/{branches[task]}"]
        # Without a family or a branch, the names are equal but for slashes at their ends.
        for name in dict.fromkeys(name.rstrip("/") for name in names):
            groups[name].append(task)
    return groups


def _successes(tasks: Mapping[str, Any], threshold: float) -> dict[str, float]:
    """Return each task's share of successful trials; a greedy task has one trial."""
    trials = {task: of if isinstance(of, list) else [of] for task, of in tasks.items()}
    return {
        task: sum(succeeded(reward, threshold) for reward in of) / len(of)
        for task, of in trials.items()
    }
