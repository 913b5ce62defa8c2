"""The run folder of a run on several machines, of which some do not see the disk of rank 0.

Only rank 0 needs the run folder. A machine that does not see it has a folder of its own: the run
folder's name with `.rank-N`, where N is the first rank of the machine. What its ranks read is
copied there, and what they write there is sent to rank 0; so a resume needs the run folder of rank
0 alone.
"""

import os
import pickle
import platform
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from pipeline.checkpoints import run_folder
from pipeline.checkpoints.run_folder import Opened, drop_newer
from pipeline.checkpoints.transcripts import read_records, without_messages
from pipeline.config.recipe import SETTINGS
from pipeline.config.settings import Config
from pipeline.distributed.ranks import Ranks, parameter_hash
from pipeline.errors import UserError
from pipeline.rollout.trajectory import RunRecord

PIECE = 64 << 20  # bytes that rank 0 sends at once, to all machines together
LATE_S = 2.0  # network file systems show a new file a little late
# What a resumed run reads in the run folder, besides a checkpoint and records.
ALSO_READ = ("kl_probe", "customers", "judges", "agents", "checkpoints/base")


def sees_disk_of_rank_0(folder: Path, ranks: Ranks) -> tuple[str, bool]:
    """Return a folder of rank 0, and whether this rank sees a file that rank 0 makes there.

    It is rank 0's `folder`, or the next folder above that exists, as an absolute path. Raises
    OSError, on rank 0, if no file can be made there.
    """
    with ExitStack() as stack:
        name = ""
        if ranks.is_main:
            path = folder.absolute()
            above = next(at for at in (path, *path.parents) if at.exists())
            name = stack.enter_context(NamedTemporaryFile(dir=above, prefix=".seen-")).name
        name = ranks.all_gather_objects(name, "disks")[0]
        until = time.monotonic() + LATE_S
        while not (sees := os.path.exists(name)) and time.monotonic() < until:
            time.sleep(0.1)
        ranks.barrier("disks")
    return os.path.dirname(name), sees


def open_disk(config: Config, ranks: Ranks) -> tuple[Config, "Disk"]:
    """Return rank 0's settings, with the run folder as this rank sees it, and the rank's Disk.

    A machine without the run folder gets copies of what a resume reads. Raises UserError.
    """
    given = config
    if ranks.is_main:
        run = config.run.model_copy(update={"output_dir": run_folder.folder_of(config)})
        config = config.model_copy(update={"run": run})
        run_folder.check_folder(config)
        _refuse_part_of_run(config)
    config = ranks.all_gather_objects(config, "settings")[0]
    own, of_0 = given.model_dump(), config.model_dump()
    other = [name for part, name in SETTINGS if own[part][name] != of_0[part][name]]
    if not ranks.is_main and (changed := ", ".join(n for n in other if n != "output_dir")):
        where = f"rank {ranks.rank} on {platform.node()}"
        print(f"{where} takes rank 0's settings, which differ: {changed}", flush=True)
    try:
        disk = Disk(Path(config.run.output_dir or ""), ranks, config.run.gather_trajectories)
    except OSError as error:
        where = f"{Path(error.filename or '').parent} takes no file ({error.strerror})"
        raise UserError(f"output_dir: {where}; make room, or name another folder") from None
    now: dict[str, Any] = {"output_dir": disk.folder}
    if disk.num_away:
        name, found = config.run.resume_from_checkpoint, None
        disk.prepare(is_new=name is None)
        if name and ranks.is_main:
            found = run_folder.find_checkpoint(disk.folder, name)[0]
        names = ranks.all_gather_objects(found.name if found else None, "checkpoint")
        disk.fetch(*ALSO_READ, f"checkpoints/{names[0]}")
        now |= {"resume_from_checkpoint": names[0]} if disk.is_away else {}
    return config.model_copy(update={"run": config.run.model_copy(update=now)}), disk


class Disk:
    """The run folder as this rank sees it. All ranks must call each method.

    `folder` is rank 0's run folder. With `gathers`, transcripts of machines that do not see it are
    sent to rank 0; without, they stay there, and rank 0 gets all but messages and tokens.
    """

    def __init__(self, folder: Path, ranks: Ranks, gathers: bool = True) -> None:
        self.ranks, self._gathers = ranks, gathers
        self._sent: dict[Path, int] = {}  # bytes of this rank's files that rank 0 has
        first = ranks.rank - int(os.environ.get("LOCAL_RANK", "0"))  # of this machine
        sees = sees_disk_of_rank_0(folder, ranks)[1]
        own = platform.node(), sees, first, folder.absolute()
        self.hosts, seen, firsts, paths = zip(*ranks.all_gather_objects(own, "disks"), strict=True)
        away = [rank for rank, sees in enumerate(seen) if not sees]
        self.is_away, self.num_away = not sees, len(away)
        # On each machine, the first rank writes the copies.
        writers = {firsts[rank]: rank for rank in reversed(away)}
        self._every, self._away, self._writers = range(ranks.num_ranks), away, writers.values()
        self._writes = ranks.rank in self._writers
        self.folder = folder if ranks.is_main else paths[0]
        if self.is_away:
            own_path = folder.absolute()
            self.folder = own_path.with_name(f"{own_path.name}.rank-{writers[first]}")
        if away and ranks.is_main:
            hosts = ", ".join(dict.fromkeys(self.hosts[rank] for rank in away))
            what = "travel to rank 0" if gathers else f"stay there, in {folder.name}.rank-N"
            print(f"disks: {hosts} cannot see {paths[0]}, so trajectories {what}", flush=True)

    def refuse_other_weights(self, model: Any) -> None:
        """Raise UserError, on all ranks, if a machine has loaded another model than rank 0."""
        if len(set(self.hosts)) == 1:
            return
        own = parameter_hash(model.named_parameters())
        hosts, found = self.hosts, self.ranks.all_gather_objects(own, "model")
        if rank := next((rank for rank in self._every if found[rank] != found[0]), 0):
            where = f"rank {rank} on {hosts[rank]} has other weights than rank 0 on {hosts[0]}"
            raise UserError(f"model: {where}; give all the same files")

    def prepare(self, is_new: bool) -> None:
        """Make the folder of a machine that does not see the run folder. Raises UserError."""
        if self._writes:
            where = f"output_dir: rank {self.ranks.rank} on {platform.node()}: {self.folder}"
            if is_new and _files(self.folder / "trajectories"):
                raise UserError(f"{where} holds transcripts of an earlier run; remove it")
            try:
                self._clear()
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / ".lock").touch()
            except OSError as error:
                why = f"cannot be written to ({error.strerror or error})"
                raise UserError(f"{where} {why}; name one that each machine can make") from None
        self.ranks.barrier("disks")

    def _clear(self) -> None:
        """Remove this machine's own folder, except for transcripts."""
        kept = self.folder / "trajectories"
        for path in self.folder.glob("*") if _files(kept) else [self.folder]:
            if path != kept and path.exists():
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def fetch(self, *names: str) -> Path:
        """Copy files and folders of rank 0's run folder, if it has them, to the other machines.

        Returns the path of the last one on this rank. One machine, and machines that see the run
        folder, copy nothing.
        """
        files: list[tuple[str, int]] = []
        if self.num_away and self.ranks.is_main:
            paths = (path for name in names for path in _files(self.folder / name))
            files = [(p.relative_to(self.folder).as_posix(), p.stat().st_size) for p in paths]
        if self.num_away:
            files = self.ranks.all_gather_objects(files, "files")[0]
        for name, size in files:
            self._copy(self.folder / name, size)
        if files:
            self.ranks.barrier("files")
        for path in {self.folder / name for name, _ in files}.intersection(self._own_files()):
            self._sent[path] = path.read_bytes().rfind(b"\n") + 1  # whole lines
        return self.folder / names[-1]

    def _copy(self, path: Path, size: int) -> None:
        piece, nothing = max(1, PIECE // len(self._writers)), b""
        with ExitStack() as stack:
            file: Any = None
            if self.ranks.is_main:
                file = stack.enter_context(path.open("rb"))
            elif self._writes:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.open("wb"))
            for _ in range(0, size, piece):
                data = file.read(piece) if self.ranks.is_main else nothing
                to = [data if rank in self._writers else nothing for rank in self._every]
                arrived = self.ranks.exchange(to)[0]
                if self._writes:
                    file.write(arrived)

    def deliver(self, transcripts: Path | None = None) -> list[Path]:
        """Send rank 0 what this rank wrote since the last call, if it does not see the run folder.

        Returns the files in this rank's run folder that are new and not yet synced.
        """
        own = [] if transcripts is None else [transcripts]
        if not self.num_away:
            return own
        parts: list[tuple[str, int, bytes]] = []
        if self.is_away and transcripts is not None:
            content = transcripts.read_bytes()
            name = transcripts.relative_to(self.folder).as_posix()
            parts.append((name, 0, content if self._gathers else without_messages(content)))
            if self._gathers:
                transcripts.unlink()
                own = []
        for path in self._own_files():
            with path.open("rb") as file:
                sent = self._sent.get(path, 0)
                file.seek(sent)
                if new := file.read():
                    parts.append((path.relative_to(self.folder).as_posix(), sent, new))
                    self._sent[path] = sent + len(new)
        nothing = [b""] * (len(self._every) - 1)
        arrived = self.ranks.exchange([pickle.dumps(parts) if parts else b"", *nothing])
        for message in filter(None, arrived) if self.ranks.is_main else ():
            own += [self._write(*part) for part in pickle.loads(message)]
        return own

    def _own_files(self) -> list[Path]:
        """Answers of endpoints, skipped micro-batches and traces of a rank without the folder."""
        of_rank = f"*/*rank-{self.ranks.rank}.*"
        return sorted(self.folder.glob(of_rank)) if self.is_away else []

    def _write(self, name: str, start: int, content: bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.truncate(start)
            file.write(content)
        return path

    def read_records(self, stage: str) -> list[RunRecord]:
        """Return this rank's share of a stage's records, which rank 0 reads for other machines."""
        folder, size = self.folder / "trajectories" / stage, len(self._every)
        messages = [b""] * size
        for rank in self._away if self.ranks.is_main else ():
            messages[rank] = pickle.dumps(read_records(folder, rank, size))
        arrived = self.ranks.exchange(messages)[0] if self.num_away else b""
        if self.is_away:
            records: list[RunRecord] = pickle.loads(arrived)
            return records
        return read_records(folder, self.ranks.rank, size)

    def begin(
        self, opened: Opened | None, config: Config, step: int, evaluations: Sequence[Any]
    ) -> None:
        """Write the settings on rank 0; remove on each machine what is newer than `step`."""
        evaluated = {evaluation["after"] for evaluation in evaluations}
        if opened is not None:
            run_folder.begin(opened, config, step, evaluated)
        elif self._writes:
            drop_newer(self.folder, step, evaluated)

    def drop_copies(self) -> None:
        """Remove the copies of checkpoints, after all ranks have loaded them."""
        if self.num_away:
            self.ranks.barrier("copies")
        if self._writes:
            shutil.rmtree(self.folder / "checkpoints", ignore_errors=True)

    def close(self) -> None:
        """Wait for all ranks, and remove a machine's own folder unless it keeps transcripts."""
        self.ranks.barrier("end")
        if self._writes:
            self._clear()


def _refuse_part_of_run(config: Config) -> None:
    """Raise UserError where a resume finds no run, but the own folder of another of its ranks."""
    folder = run_folder.folder_of(config).absolute()
    parts = sorted(folder.parent.glob(f"{folder.name}.rank-*"))
    if config.run.resume_from_checkpoint and parts and not folder.is_dir():
        why = f"{folder} is not here, but {parts[0].name}, of another rank of the run"
        remedy = "start rank 0 on the machine that has the run folder, or remove it"
        raise UserError(f"resume_from_checkpoint: {why}; {remedy}")


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())
