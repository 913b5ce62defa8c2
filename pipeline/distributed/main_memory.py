"""The main memory of a node: how much its ranks may take, and a refusal of ranks too many."""

from contextlib import suppress
from pathlib import Path

import psutil

from pipeline.common.errors import UserError

PROCESS = 0.6 * (1 << 30)  # bytes of Python and the libraries in a rank; measured on CPUs
CGROUPS = Path("/sys/fs/cgroup")
# Of version 2 and of version 1 of control groups: the folder of the memory's, and names of files.
FILES = (
    ("", "memory.max", "memory.current"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def main_memory(groups: str | None = None) -> tuple[int, int]:
    """Return the bytes of main memory that this node has, and those that are free now.

    The limits of a container and of a scheduler's job, which are control groups, count. `groups`
    has the lines of /proc/self/cgroup.
    """
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    if groups is None:
        with suppress(OSError):
            groups = Path("/proc/self/cgroup").read_text(encoding="utf-8")
    for line in (groups or "").splitlines():
        _, controllers, name = line.split(":", 2)
        for kind, limit, usage in FILES:
            if kind not in controllers.split(","):
                continue
            inner = CGROUPS / kind / name.lstrip("/")
            # In a container, the group's folder may be seen as the outermost one.
            for folder in (inner, *inner.parents):
                with suppress(OSError, ValueError):  # `max`, or no such file
                    most = int((folder / limit).read_text())
                    total, free = min(total, most), min(free, most)
                    used = int((folder / usage).read_text()) - _reclaimable(folder)
                    free = min(free, most - used)
                if folder == CGROUPS:
                    break
    return total, max(0, free)


def _reclaimable(group: Path) -> int:
    """Return the bytes of files in the page cache, which the kernel gives up for a process."""
    sizes = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return sum(
        int(sizes.get(f"total_{name}", sizes.get(name, 0)))
        for name in ("inactive_file", "active_file")
    )


def refuse_too_many(num_ranks: int, have: int) -> None:
    """Raise UserError if the ranks of this node need more main memory than `have` bytes."""
    if num_ranks > 1 and num_ranks * PROCESS > have:
        gib = 1 << 30
        raise UserError(
            f"--num-gpus: got {num_ranks} ranks on CPU for this node, which take about "
            f"{num_ranks * PROCESS / gib:.1f} GiB of main memory, but {have / gib:.1f} GiB are "
            f"free; give --num-gpus {max(1, int(have / PROCESS))}"
        )
