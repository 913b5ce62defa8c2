"""A database that an episode changes without a copy of the whole database.

A table of the database is an `Overlay`: an entity is copied when a tool first touches the entity.
The episode's state is the set of entities that differ from the shared database.
"""

import json
import pickle
from collections.abc import Iterator, MutableMapping
from typing import Any

State = dict[tuple[str, str], str | None]  # (table, key): the entity as JSON; None: deleted


class Base:
    """The shared tables of a database, whose entities never change."""

    def __init__(self, database: Any) -> None:
        self.database = type(database)
        names = type(database).model_fields
        self.tables: dict[str, dict[str, Any]] = {n: getattr(database, n) for n in names}
        self._copies: dict[tuple[str, str], bytes] = {}
        self._texts: dict[tuple[str, str], str] = {}

    def copy(self, table: str, key: str) -> Any:
        """Return a new copy of an entity."""
        place = table, key
        if place not in self._copies:
            self._copies[place] = pickle.dumps(self.tables[table][key], protocol=5)
        return pickle.loads(self._copies[place])

    def text(self, table: str, key: str) -> str | None:
        """Return an entity as JSON, or None if the table has no such entity."""
        place = table, key
        if place not in self._texts and key in self.tables[table]:
            self._texts[place] = as_text(self.tables[table][key])
        return self._texts.get(place)

    def overlay(self) -> Any:
        """Return a database for one episode."""
        tables = {name: Overlay(self, name) for name in self.tables}
        return self.database.model_construct(**tables)


class Overlay(MutableMapping[str, Any]):
    """One table of an episode's database.

    `table[key]` gives the episode's own copy. Loops over `values()` and `items()` give shared
    entities uncopied while `is_read_only` is True, which is for tools that change nothing.
    """

    def __init__(self, base: Base, name: str) -> None:
        self._base = base
        self._name = name
        self._shared = base.tables[name]
        self._own: dict[str, Any] = {}
        self._deleted: set[str] = set()
        self.is_read_only = False

    def __getitem__(self, key: str) -> Any:
        if key not in self._own:
            if key in self._deleted or key not in self._shared:
                raise KeyError(key)
            self._own[key] = self._base.copy(self._name, key)
        return self._own[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._own[key] = value
        self._deleted.discard(key)

    def __delitem__(self, key: str) -> None:
        if key not in self:
            raise KeyError(key)
        self._own.pop(key, None)
        self._deleted.add(key)

    def __contains__(self, key: object) -> bool:
        return key in self._own or (key in self._shared and key not in self._deleted)

    def __iter__(self) -> Iterator[str]:
        yield from (key for key in self._shared if key not in self._deleted)
        yield from (key for key in self._own if key not in self._shared)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _seen(self, key: str) -> Any:
        return self._shared[key] if self.is_read_only and key not in self._own else self[key]

    def values(self) -> Any:
        return [self._seen(key) for key in self]

    def items(self) -> Any:
        return [(key, self._seen(key)) for key in self]

    def changes(self) -> State:
        """Return the entities that differ from the shared table."""
        found: State = dict.fromkeys((self._name, k) for k in self._deleted & self._shared.keys())
        for key, entity in self._own.items():
            if (text := as_text(entity)) != self._base.text(self._name, key):
                found[self._name, key] = text
        return found


def tables_of(database: Any) -> list[Overlay]:
    return [table for table in vars(database).values() if isinstance(table, Overlay)]


def changes_of(database: Any) -> State:
    """Return the state of an episode: two episodes with equal states have equal databases."""
    return {place: text for table in tables_of(database) for place, text in table.changes().items()}


def as_text(entity: Any) -> str:
    """Return an entity as the JSON text whose hash the official evaluator compares."""
    return json.dumps(entity.model_dump(warnings=False), sort_keys=True, default=str)
