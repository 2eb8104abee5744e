"""Stores whose content is known, and what they may answer once they are damaged."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import holdfast

from . import processes, workload
from .checking import named, scratch
from .journal import FLEETING
from .ledger import Ledger, complete_lines, digest
from .workload import Backend, url_of
from .writer import Writer

UNHARMED = ["unharmed"]


@dataclass
class Subject:
    """A store whose content is known; `moments` are what it held after each acknowledgement."""

    backend: Backend
    files: dict[str, bytes]
    folders: list[str]
    ledger: Ledger
    moments: list[tuple[frozenset[str], dict[str, str]]]
    paths: dict[str, list[str]]  # session -> ids from the head to the root
    lengths: dict[str, int]
    facts: dict[str, tuple[Any, ...]]  # id -> what its record says
    marks: dict[str, tuple[Any, ...]]  # id -> its label and tags


def subject(*, closed: bool, script: str = "small", backend: Backend = "sqlite") -> Subject:
    """The files of a store after a clean close, or as a killed writer leaves them."""
    with scratch() as folder:

        def run(out: int) -> None:
            writer = Writer(url_of(folder, backend), out)
            for step in workload.SCRIPTS[script]():
                if closed or step.kind != "reopen":
                    writer.attempt(step)
            if not closed:
                os._exit(0)  # before anything is tidied up
            writer.close()

        child = processes.fork(run)
        child.finish()
        lines = complete_lines(bytes(child.said))
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not FLEETING.search(str(path))
        }
        folders = [str(each.relative_to(folder)) for each in folder.rglob("*/")]
        with holdfast.open(url_of(folder, backend)) as store:
            names = list(Ledger.of(lines).heads)
            paths = {name: _history(store, name) for name in names}
            lengths = {name: _length(store, name) for name in names}
            promised = Ledger.of(lines).saved.items()
            facts = {id_: _facts(store, name, id_) for id_, (name, _) in promised}
            found = {id_: store.session(name).get(id_) for id_, (name, _) in promised}
            marks = {id_: (each.label, each.tags) for id_, each in found.items()}
    moments = [(frozenset[str](), dict[str, str]())]
    ledger = Ledger()
    for line in lines:
        ledger.add(line)
        if b'"ack"' in line:
            heads = {n: next(iter(d)) for n, d in ledger.heads.items() if len(d) == 1}
            moments.append((frozenset(ledger.saved), heads))
    return Subject(backend, files, folders, ledger, moments, paths, lengths, facts, marks)


@dataclass
class Interview:
    """Asks a damaged store; a typed error is an honest answer, a different one is not."""

    found: list[str] = field(default_factory=list)
    harmed: bool = False

    def ask(self, what: str, question: Callable[..., Any], *about: Any, expect: Any) -> None:
        try:
            answer = question(*about)
        except holdfast.HoldfastError:
            self.harmed = True
        except Exception as error:
            self.found.append(f"{what}: not one of the library's errors: {named(error)}")
        else:
            if answer != expect:
                self.found.append(f"{what}: a different answer")


def original_or_error(url: str, known: Subject) -> list[str]:
    """The findings for a damaged main file; UNHARMED if everything is as it was."""
    try:
        store = holdfast.open(url)
    except holdfast.HoldfastError:
        return []
    except Exception as error:
        return [f"open: not one of the library's errors: {named(error)}"]
    talk = Interview()
    for id_, (name, expected) in known.ledger.saved.items():
        talk.ask(f"load {id_}", _load, store, name, id_, expect=expected)
        talk.ask(f"get {id_}", _facts, store, name, id_, expect=known.facts[id_])
        talk.ask(f"marks of {id_}", _marks, store, name, id_, known.marks[id_], expect=True)
    for name, path in known.paths.items():
        talk.ask(f"head of {name}", _head, store, name, expect=path[0])
        talk.ask(f"history of {name}", _follows, store, name, path, expect=True)
        talk.ask(f"length of {name}", _length, store, name, expect=known.lengths[name])
        for revision, expected in _revisions(known, name):
            talk.ask(f"load {revision} of {name}", _load, store, name, revision, expect=expected)
    loaded = _loadable(store, known)
    talk.ask("verify misses it", _missed, store, talk.harmed, len(loaded), expect=False)
    talk.ask("save", _save, store, "main", expect=True)
    talk.ask("save to a new session", _save, store, "new", expect=True)
    for name in known.paths.keys() - {"main"}:  # a save must not make it worse
        (latest,) = known.ledger.heads[name]
        talk.ask(f"load {name} after a save", _load, store, name, None, expect=latest)
    # In a damaged file SQLite may write over what it no longer sees: then loading that is an error.
    if url.startswith("files:") and (lost := loaded - _loadable(store, known)):
        talk.found.append(f"a save makes it worse: {min(lost)} does not load any more")
    talk.ask("close", store.close, expect=None)
    return talk.found or ([] if talk.harmed else UNHARMED)


def repaired(url: str, known: Subject, *, hides: bool = False) -> list[str]:
    """The findings for a damaged store that is repaired: what loads still does, and saving works.

    The same for gc, before and after that: it may refuse to do anything, but frees nothing living.
    If it `hides` that, since SQLite misses rows in a tree that it has changed although its keys are
    out of order, the repair brings it back.
    Sessions of which nothing loads are lost, and so is a store that does not open. But no name may
    be free that was taken.
    """
    try:
        store = holdfast.open(url)
    except holdfast.HoldfastError:
        return []
    found = []
    with store:
        before = _loadable(store, known)
        with suppress(holdfast.HoldfastError):
            store.gc()
        if not hides:
            found += [f"gc: {what}" for what in _kept(store, known, before)]
        try:
            store.repair()
        except holdfast.HoldfastError:
            if url.startswith("files:"):
                raise
            return _kept(store, known, before)  # a file that SQLite gives up on: it has said so
        found += _kept(store, known, before)
        after = _loadable(store, known)
        for name in known.paths:
            states = {known.ledger.saved[id_][1] for id_ in after if known.facts[id_][0] == name}
            if not states:
                continue
            try:
                if _load(store, name, None) not in states:
                    found.append(f"the head of {name} is not one that loads")
                if not _save(store, name):
                    found.append(f"save to {name}: a different state")
            except holdfast.HoldfastError as error:
                found.append(f"{name} does not go on: {named(error)}")
        with suppress(holdfast.Corrupt):  # the counters may be
            if not _save(store, "new"):
                found.append("save to a new session: a different state")
        with suppress(holdfast.HoldfastError):
            store.gc()
        return found + _kept(store, known, after)


def recovered(url: str, known: Subject) -> list[str]:
    """The findings for a damaged store that is as it was once it is repaired."""
    with holdfast.open(url) as store:
        before = _loadable(store, known)
        store.repair()
        if lost := known.ledger.saved.keys() - _loadable(store, known):
            return [f"{min(lost)} does not load"]
        if not _sound(store):
            return [f"verify reports damage: {store.verify(read_data=True)}"]
        for name in known.paths:
            if not _save(store, name):
                return [f"save to {name}: a different state"]
        return UNHARMED if len(before) == len(known.ledger.saved) else []


def _kept(store: Any, known: Subject, before: set[str]) -> list[str]:
    """What has become worse: checkpoints that loaded, and names that were taken."""
    found = []
    if lost := before - _loadable(store, known):
        found.append(f"made worse: {min(lost)} does not load any more")
    for name in known.paths:
        with suppress(holdfast.HoldfastError):
            if not store.session(name).exists():
                found.append(f"session {name} could be begun anew")
    return found


def acknowledged_prefix(url: str, known: Subject) -> list[str]:
    """The findings for a damaged log: the store has to be as it was after some acknowledgement."""
    try:
        store = holdfast.open(url)
    except holdfast.HoldfastError:
        return []
    try:
        loaded, heads = set(), {}
        for id_, (name, expected) in known.ledger.saved.items():
            try:
                state = _load(store, name, id_)
            except holdfast.NotFound:
                continue
            if state != expected:
                return [f"load {id_}: a different state"]
            loaded.add(id_)
        for name in known.paths:
            if _head(store, name) is not None:
                heads[name] = _load(store, name, None)
        if (frozenset(loaded), heads) not in known.moments:
            return ["not the state after any acknowledgement"]
        if not _sound(store):
            return ["verify reports damage"]
        if not _save(store, "main"):
            return ["save: a different state"]
        return UNHARMED if (frozenset(loaded), heads) == known.moments[-1] else []
    except Exception as error:
        return [f"not a prefix: {named(error)}"]
    finally:
        store.close()


def contained(url: str, known: Subject, most: int) -> list[str]:
    """The findings for one damaged row: `most` so many states are lost, and lists stay complete."""
    lists = Interview()
    with holdfast.open(url) as store:
        lost = 0
        for id_, (name, _) in known.ledger.saved.items():
            try:
                store.session(name).load(id_)
            except holdfast.HoldfastError:
                lost += 1
        if lost > most:
            lists.found.append(f"{lost} states are lost")
        if _sound(store):
            lists.found.append("verify misses it")
        for name, length in known.lengths.items():
            lists.ask(f"tree of {name}", _tree, store, name, expect=length)
            lists.ask(f"history of {name}", _follows, store, name, known.paths[name], expect=True)
        if lists.harmed:
            lists.found.append("it breaks a list")
    answers = original_or_error(url, known)
    return lists.found + [found for found in answers if found not in UNHARMED]


def _loadable(store: Any, known: Subject) -> set[str]:
    """Checkpoints that load, and rightly; what is wrong is found elsewhere."""
    loaded = set()
    for id_, (name, expected) in known.ledger.saved.items():
        with suppress(holdfast.HoldfastError):
            if _load(store, name, id_) == expected:
                loaded.add(id_)
    return loaded


def _tree(store: Any, name: str) -> int:
    return len(list(store.session(name).tree()))


def _load(store: Any, name: str, rev: str | None) -> str:
    return digest(store.session(name).load(rev))


def _head(store: Any, name: str) -> str | None:
    head = store.session(name).head
    return None if head is None else head.id


def _history(store: Any, name: str) -> list[str]:
    return [checkpoint.id for checkpoint in store.session(name).history()]


def _follows(store: Any, name: str, path: list[str]) -> bool:
    """Whether the history is `path`, or is so down to a record that says that it is damaged."""
    seen: list[str] = []
    for checkpoint in store.session(name).history():
        if checkpoint.damaged:
            return seen == path[: len(seen)]
        seen.append(checkpoint.id)
    return seen == path


def _facts(store: Any, name: str, id_: str) -> tuple[Any, ...]:
    found = store.session(name).get(id_)
    return (found.session, found.id, found.seq, found.step, found.parent, found.key)


def _marks(store: Any, name: str, id_: str, marks: tuple[Any, ...]) -> bool:
    """Whether label and tags are right.

    They live outside of the record, so that one is gone is for `verify` to notice, not for `get`.
    """
    found = store.session(name).get(id_)
    if (found.label, found.tags) == marks:
        return True
    if found.label in {None, marks[0]} and set(found.tags) <= set(marks[1]):
        raise holdfast.Corrupt("a mark is gone")
    return False


def _revisions(known: Subject, name: str) -> Iterator[tuple[str, str]]:
    """Other ways to name the checkpoints of a session, with the digest of what they name."""
    for back, id_ in enumerate(known.paths[name]):
        _, expected = known.ledger.saved[id_]
        home, _, _, step, _, key = known.facts[id_]
        label, _ = known.marks[id_]
        yield f"@~{back}", expected
        yield f"step:{step}", expected
        if label is not None:
            yield f"label:{label}", expected
        if key is not None and home == name:
            yield f"key:{key}", expected


def _length(store: Any, name: str) -> int:
    return len(store.session(name))


def _missed(store: Any, harmed: bool, loaded: int) -> bool:
    """Whether verify does not tell of damage, or does not count what loads."""
    report = store.verify(read_data=True)
    return bool((harmed and report.ok) or report.loadable != loaded)


def _sound(store: Any) -> bool:
    return bool(store.verify(read_data=True).ok)


def _save(store: Any, name: str) -> bool:
    """Whether what can be saved into a damaged store can also be loaded."""
    session = store.session(name)
    state = {} if session.head is None else session.load()
    state["after"] = ["damage"] * 400
    return _load(store, name, session.save(state).id) == digest(state)
