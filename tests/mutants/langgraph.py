"""Mutants of the saver for LangGraph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from holdfast.adapters.langgraph.names import id_of
from tests.mutants import entry, mutant, nothing


@mutant(".adapters.langgraph.serde:Snapshot.is_current")
def trusts_the_message(real: Any) -> Any:
    """A message that was changed in place is stored changed."""
    return lambda _: True


@mutant(".adapters.langgraph.serde:Snapshot._see")
def trusts_the_parts_of_a_message(real: Any) -> Any:
    """A part of a message that was changed in place is stored changed."""
    return lambda *a: None if a[2] else real(*a)


@mutant(".history.notes:Notes.first")
def forgets_early_writes(real: Any) -> Any:
    """Writes that come before their checkpoint are kept."""
    return lambda self, _, **how: real(self, "another", **how)


@mutant(".adapters.langgraph.namespace:Namespace.latest")
def takes_the_head_for_the_latest(real: Any) -> Any:
    """The latest checkpoint is the one of the highest id."""

    def head(namespace: Any) -> Any:
        found = namespace.session.head
        return found if found and found.key else None

    return head


@mutant(".adapters.langgraph.namespace:Namespace.latest")
def does_not_go_back(real: Any) -> Any:
    """After a rewind, the latest checkpoint is on the line of the head."""
    return lambda self: max(self.all(), key=id_of, default=None)


@mutant(".adapters.langgraph.namespace:Namespace.descending")
def lists_as_committed(real: Any) -> Any:
    """Checkpoints are listed by their ids."""
    return lambda self: self.own(newest_first=True)


takes_every_list_for_grown = entry(
    "takes_every_list_for_grown", "A list is appended to only if it is the same and longer.",
    ".adapters.langgraph.namespace:operator", SimpleNamespace(is_=lambda *_: True),
)  # fmt: skip
keeps_the_first_of_special_writes = entry(
    "keeps_the_first_of_special_writes", "The last write to a special channel counts.",
    ".adapters.langgraph.saver:WRITES_IDX_MAP", {},
)  # fmt: skip


@mutant(".adapters.langgraph.forks:Ancestry.inherited")
def forks_nothing_but_the_state(real: Any) -> Any:
    """A fork has the checkpoints that its point builds on."""
    return lambda self: (c for c in [self.fork_point()] if c)


@mutant(".adapters.langgraph.writes:before_fork")
def forks_with_all_writes(real: Any) -> Any:
    """A fork at a question is not answered yet."""
    return lambda found: found


adopts_no_writes = entry(
    "adopts_no_writes", "Writes are adopted with their checkpoint.",
    ".adapters.langgraph:HoldfastSaver.set_writes", nothing,
)  # fmt: skip
runs_for_the_latest = entry(
    "runs_for_the_latest", "A subgraph continues from what belongs to the checkpoint it runs for.",
    ".adapters.langgraph.saver:_root_checkpoint", nothing,
)  # fmt: skip
