"""A session: the state of one agent, conversation or job, and its history of checkpoints."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from holdfast import ids
from holdfast.errors import CheckpointNotFound, InvalidRequest, NotSerializable, SessionExists
from holdfast.format import records, state_paths, values
from holdfast.format.delta import lay_out
from holdfast.format.typed_states import to_model
from holdfast.history import checkpoint_fields as fielding
from holdfast.history import leases, lineage
from holdfast.history import load as loading
from holdfast.history.checkpoint import Checkpoint, SessionInfo, pack
from holdfast.history.checkpoint_fields import Details
from holdfast.history.leases import Owner
from holdfast.history.lineage import Parent
from holdfast.history.load import Items, Part, Series
from holdfast.history.oplog import CHECKPOINT, OPERATION, NextStep, Operator, next_step
from holdfast.history.revisions import Resolver, check_own
from holdfast.history.sessions import describe
from holdfast.history.watch import Watcher
from holdfast.history.writer import Writer
from holdfast.log import logger
from holdfast.model import NOTHING, Operation, ToolCall
from holdfast.storage.rows import Address, SessionRow

# As in store.py, methods import maintenance, runs, and what few programs need, when they use it.

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Unpack

    from holdfast.format.item_streams import Source
    from holdfast.format.nodes import Node
    from holdfast.format.records import Head
    from holdfast.history.checkpoint_fields import Fields
    from holdfast.history.diff import Changes, Diff
    from holdfast.history.filters import Filters
    from holdfast.history.message_parts import MessagePart
    from holdfast.history.notes import Notes
    from holdfast.history.search import SearchHit
    from holdfast.history.token_usage import Totals
    from holdfast.maintenance.retention import Plan, Retention
    from holdfast.maintenance.verify import VerifyResult
    from holdfast.runs.abandoned import Abandoned
    from holdfast.runs.autosave import Autosave
    from holdfast.runs.budget import Budget
    from holdfast.runs.checkpoint_policy import Policy
    from holdfast.runs.conversation import Conversation
    from holdfast.runs.pending import MadeCall, Pending
    from holdfast.runs.resume import RunTarget
    from holdfast.runs.run import Run
    from holdfast.storage.contract import Backend
    from holdfast.storage.reader import Reader
    from holdfast.storage.repository import Repository

    Revision = str | Checkpoint
    Path = str | tuple[str, ...]
    Entry = Checkpoint | Operation | tuple[str, int]

M = TypeVar("M")
T = TypeVar("T")
SAME: Any = object()
"""Default of `Session.fork(state=…)`: the fork starts with the state of its origin."""
_FIRST_PAGE = 4
"""Checkpoints in the first page of history(). Most callers want only the newest."""


class Session:
    """A handle on one session. Nothing is written before the first save.

    A handle remembers the head that it last loaded, saved or refreshed. If another writer has moved
    the head since then, a save raises HeadMoved and writes nothing. A handle is safe to use from
    many threads. Their saves run one after the other.

    A revision is a Checkpoint or a string that names one: an id or an unambiguous prefix of it, a
    label, "label:x", "tag:x", "key:x", "step:3", "@" (the head) or "@~3" (three checkpoints before
    it). Without a revision, methods use the head.
    """

    def __init__(
        self,
        repository: Repository,
        name: str,
        agent: str | None = None,
        reader: Reader | None = None,
        parent: str | None = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"a session's name must be a non-empty string, not {name!r}")
        if agent is not None:
            fielding.check_text("agent", agent)
        if parent is not None:
            fielding.check_text("parent", parent)
        self.agent, self.parent = agent, parent
        self.closed_calls: tuple[ToolCall, ...] = ()
        """The tool calls that the last load(close_calls=True) has closed."""
        self._repository = repository
        self._lock = threading.RLock()
        repository.after_fork(self, Session._reset_lock)
        self._writer = Writer(repository, name)
        self._operator = Operator(self._writer)
        if reader is None:
            self.refresh()
        else:
            self._writer.read_head(reader)

    @property
    def name(self) -> str:
        """The name of the session. If another handle renames it, this handle takes the new name
        when it next reads or writes.
        """
        return self._writer.name

    def __repr__(self) -> str:
        return f"<Session {self.name!r}>"

    def _reset_lock(self) -> None:
        """Replace the lock in a forked child, where the thread that held it does not exist."""
        self._lock = threading.RLock()

    # -- writing -------------------------------------------------------------------------------

    def save(
        self, state: Any, *, parent: Revision | None = None, **fields: Unpack[Fields]
    ) -> Checkpoint:
        """Save `state` as the session's next checkpoint, and return that checkpoint.

        When this returns, the checkpoint is durable, as open(durability=…) says. Only the parts
        that differ from the parent are written. The parent is the head. With `parent`, the new
        checkpoint becomes a child of that checkpoint instead, and the head moves to the new one.

        `fields` describe the checkpoint: label, tags, trigger, status, reason, usage, pending,
        hint, meta and key.

        Raises HeadMoved if another writer has moved the head, SessionBusy if a run has the session,
        KeyTaken if another checkpoint of the session has the key, and NotSerializable if a value
        cannot be stored exactly. Nothing is written then.
        """
        try:
            with self._lock, self._repository.measure("save", self.name):
                tip = None if parent is None else self._parent(parent)
                return self._writer.save(state, self._details(fields), tip)
        except NotSerializable:
            values.check(state, "state")  # raises again, with the full path
            values.check(fields, "fields")
            raise

    def append(self, path: Path, *items: Any, **fields: Unpack[Fields]) -> Checkpoint:
        """Add items to the end of the list at `path`, as a new checkpoint. Return it.

        The rest of the state is neither touched nor encoded again. A path is "messages",
        "plan.steps" or a tuple of keys. Write a key that contains a dot as "['a.b']" or ("a.b",).
        `fields` and errors are those of save().
        """
        try:
            with self._lock, self._repository.measure("append", self.name):
                return self._writer.append(path, items, self._details(fields))
        except NotSerializable:
            values.check(items, f"new items of {state_paths.dotted(state_paths.parse_delta(path))}")
            values.check(fields, "fields")
            raise

    def patch(
        self,
        *,
        append: Mapping[Path, Sequence[Any]] | None = None,
        set: Mapping[Path, Any] | None = None,
        drop: Sequence[Path] = (),
        **fields: Unpack[Fields],
    ) -> Checkpoint:
        """Make several changes to the state in one checkpoint, and return it.

        `append` adds items to the lists at its paths, `set` replaces the values at its paths, and
        `drop` removes keys. Paths are as in append(); `fields` and errors are those of save().
        """
        grown, assigned = state_paths.deltas(append, "append"), state_paths.deltas(set, "set")
        state_paths.check_deltas(grown, assigned, drop)
        try:
            with self._lock, self._repository.measure("patch", self.name):
                return self._writer.patch(grown, assigned, drop, self._details(fields))
        except NotSerializable:
            for path, value in assigned.items():
                values.check(value, state_paths.dotted(state_paths.parse_delta(path)))
            for path, items in grown.items():
                values.check(
                    items, f"new items of {state_paths.dotted(state_paths.parse_delta(path))}"
                )
            values.check(fields, "fields")
            raise

    def _details(self, fields: Fields) -> Details:
        """Return the fields of the next checkpoint, with the agent and parent of this handle."""
        return fielding.of_session(fields, self.agent, self.parent)

    def _parent(self, revision: Revision) -> Parent:
        with self._repository.reader() as reader:
            place = self._place(reader, revision)
            if place.session != self._writer.number:
                raise InvalidRequest(
                    "a parent must lie in the same session", hint="fork() from another session"
                )
            return Parent.read(reader, place)

    def fork(
        self,
        name: str,
        at: Revision | None = None,
        *,
        state: Any = SAME,
        **fields: Unpack[Fields],
    ) -> Session:
        """Make a new session that starts with the state at `at` (default: the head). Return it.

        No data is copied: both sessions share what they have in common. With `state`, the first
        checkpoint of the fork holds that state instead, and only the parts that differ from the
        state at `at` are written. Raises SessionExists if the name is taken.
        """
        details = fielding.of_session(fields, self.agent, None)
        with self._repository.reader() as reader:
            place = self._place(reader, at)
            tip = (
                Parent.read(reader, place)
                if at is not None
                else self._writer.head_at(reader, place)
            )
            home = self.name
            if place.session != self._writer.number:
                home = lineage.session_name(reader, place.session)
            other = Session(self._repository, name, self.agent, reader)
            if other._writer.number is not None:
                raise SessionExists(f"session {name!r} exists already")
        details.extra["origin"] = home
        try:
            build = None if state is SAME else partial(lay_out, state)
            other._writer.fork(tip, details, build)
        except NotSerializable:
            values.check(state, "state")  # raises again, with the full path
            values.check(fields, "fields")
            raise
        return other

    def rewind(self, revision: Revision) -> Checkpoint:
        """Move the head to another checkpoint of this session. Return that checkpoint.

        Nothing is lost. Later checkpoints stay in the tree, and the next save makes a sibling of
        them. undo() moves the head back.
        """
        with self._lock:
            self._operator.rewind(partial(self._own_place, revision=revision))
            return self.get()

    def adopt(self, fork: Session | str) -> Checkpoint:
        """Make the line of a fork the line of this session. Return the new head.

        The checkpoints of the fork, from the fork point to its head, are added to this session with
        all their fields, so that state, steps, usage and cost are the fork's. They get new ids;
        `adopted` is the id of the original. No data is copied, and the fork stays. Nothing of this
        session is lost either: later checkpoints stay in the tree, and one undo() moves the head
        back.

        Raises InvalidRequest if it is no fork of this session, KeyTaken if both have a checkpoint
        with the same key, and SessionBusy if a process runs this session.
        """
        name = fork.name if isinstance(fork, Session) else fielding.check_text("fork", fork)
        with self._lock:
            self._operator.adopt(name)
            return self.get()

    def rename(self, name: str) -> Operation:
        """Give the session another name. Return the operation, which undo() takes back.

        Nothing else changes: checkpoints keep their ids and hashes, and forks and child sessions
        still belong to it. Other handles on the session follow it to the new name. The old name is
        free for another session. The usage of child sessions that were saved under the old name
        counts for this session until another one has that name.

        Raises SessionExists if the name is taken, and SessionBusy if a process runs the session.
        """
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"a session's name must be a non-empty string, not {name!r}")
        with self._lock:
            return self._operator.rename(name)

    def tag(self, revision: Revision | None, *tags: str) -> Checkpoint:
        """Add tags to a checkpoint (None: the head), and return it. It keeps the tags it has."""
        checked = fielding.check_tags(tags)
        with self._lock:
            done = self._operator.tag(partial(self._own_place, revision=revision), checked)
            return self._at(done.details["seq"])

    def label(self, revision: Revision | None, label: str) -> Checkpoint:
        """Set the label of a checkpoint (None: the head), and return it.

        It replaces the old label.
        """
        checked = fielding.check_text("label", label)
        with self._lock:
            done = self._operator.label(partial(self._own_place, revision=revision), checked)
            return self._at(done.details["seq"])

    def untag(self, revision: Revision | None, *tags: str) -> Checkpoint:
        """Remove tags from a checkpoint (None: the head), and return it.

        Raises InvalidRequest if it does not have one of them.
        """
        checked = fielding.check_tags(tags)
        with self._lock:
            done = self._operator.untag(partial(self._own_place, revision=revision), checked)
            return self._at(done.details["seq"])

    def unlabel(self, revision: Revision | None) -> Checkpoint:
        """Remove the label of a checkpoint (None: the head), and return the checkpoint.

        Raises InvalidRequest if it has none.
        """
        with self._lock:
            done = self._operator.label(partial(self._own_place, revision=revision), None)
            return self._at(done.details["seq"])

    def delete(
        self, revision: Revision | None = None, *, expect: Revision | None = None
    ) -> Operation:
        """Delete one checkpoint, or without a revision the whole session. Return the operation.

        The checkpoint or session disappears at once. undo() restores it until gc() has freed it.
        If it is the head, the head moves to the nearest ancestor that is left, and undo() moves it
        back. The operation's `deleted` is the number of deleted checkpoints. Its `forks` names the
        sessions that were forked from them; these keep the data that they share.

        Raises InvalidRequest for a checkpoint that an interrupted run continues from, and for a
        head that has no ancestor left in this session. With `expect`, raises HeadMoved if the head
        is not that checkpoint.
        """
        with self._lock:
            expected = None if expect is None else self.get(expect).id
            find = None if revision is None else partial(self._own_place, revision=revision)
            return self._operator.delete(find, expected)

    def prune(self, rule: Retention, *, dry_run: bool = False) -> Plan:
        """Delete the checkpoints that a rule does not keep. Return the plan.

        The plan lists the deleted checkpoints with the reasons. With `dry_run`, nothing is deleted.
        """
        if getattr(rule, "store_bytes", None) is not None:
            raise InvalidRequest("store_bytes is a rule for store.prune()", hint="max_bytes=…")
        from holdfast.maintenance.retention import prune

        with self._lock:
            return prune(self._operator, rule, dry_run=dry_run)

    def undo(self, *, expect: Entry | None = None) -> Operation:
        """Undo the newest operation that is not undone yet. Return the new operation.

        A save is an operation, too. With `expect`, raises Conflict unless that entry is the one to
        undo. An entry is an Operation, a Checkpoint (for the save that made it), ("operation",
        number) or ("checkpoint", seq). Raises InvalidRequest if there is nothing to undo.
        """
        with self._lock:
            return self._operator.undo(_reference(expect))

    def redo(self, *, expect: Entry | None = None) -> Operation:
        """Undo the newest undo(), if nothing else was done since. Return the new operation.

        With `expect`, raises Conflict unless that entry is the one to restore; entries are those of
        undo(). Raises InvalidRequest if there is nothing to redo.
        """
        with self._lock:
            return self._operator.redo(_reference(expect))

    def next_undo(self) -> NextStep:
        """Return what undo() would do now. Raises the errors that it would raise."""
        with self._repository.reader() as reader:
            self._writer.find(reader)
            return next_step(reader, self.name)

    def next_redo(self) -> NextStep:
        """Return what redo() would do now. Raises the errors that it would raise."""
        with self._repository.reader() as reader:
            self._writer.find(reader)
            return next_step(reader, self.name, redo=True)

    # -- runs ----------------------------------------------------------------------------------

    def run(
        self,
        *,
        policy: Policy | None = None,
        name: str | None = None,
        state: Any = None,
        takeover: bool = False,
        resume: bool | None = None,
        budget: Budget | None = None,
        sigterm: bool = False,
    ) -> Run:
        """Run the session: `with session.run() as run`. An interrupted run is resumed.

        `policy` decides when the run takes checkpoints; the default is after every turn. `name`
        names a new run. `state` is the first state of a new session. If the session exists, `state`
        must equal the state that this run starts or once started with; otherwise InvalidRequest is
        raised.

        `resume=True` resumes an interrupted run, and raises InvalidRequest if there is none. With a
        `name` as well, it resumes only the run of that name, and raises NotFound for another.
        `resume=False` always starts a new run.

        `budget` halts the run once it is spent; see Budget.

        While another live worker runs the session, entering the run raises SessionBusy.
        `takeover=True` takes the session even then; the other worker's next write raises Fenced.
        `sigterm=True` halts the run on SIGTERM; this works in the main thread only.
        """
        from holdfast.runs.resume import RunOptions
        from holdfast.runs.run import Run
        from holdfast.runs.run_core import RunCore

        options = RunOptions(policy, name, state, takeover, resume, budget)
        return Run(RunCore(run_target(self), options), sigterm=sigterm)

    def pending(self) -> list[Pending]:
        """Return the calls that have not ended, and the questions that runs wait for."""
        from holdfast.runs.pending import of_session

        with self._repository.reader() as reader:
            return of_session(reader, self._number(reader), self.name)

    def calls(self) -> list[MadeCall]:
        """Return all steps, tool calls and questions of the session's runs, by their first call."""
        from holdfast.runs.pending import made

        with self._repository.reader() as reader:
            return [*made(reader, self._number(reader), self.name)]

    def tool_calls(self) -> list[MadeCall]:
        """Return the tool calls among calls()."""
        return [call for call in self.calls() if call.kind == "tool"]

    def resolve(
        self,
        key: str | Pending,
        result: Any = NOTHING,
        *,
        action: Literal["rerun", "skip"] | None = None,
    ) -> None:
        """Decide a call in doubt: a call that began, but whose end was never recorded.

        Give its `result` if it had its effect, or else the `action`: "rerun" makes the call again,
        "skip" leaves it out. The run uses the decision when it is resumed.

        A string is the key of the call, and means its newest attempt. A Pending means the attempt
        that it was listed for. Raises AlreadyDecided if the call has ended, Conflict if it was
        begun again since, SessionBusy while a live worker may still make the call, and NotFound if
        there is no such call.
        """
        from holdfast.runs.pending import Verdict, resolve

        verdict = Verdict(result, action)
        with self._repository.reader() as reader:
            number = self._number(reader)
        resolve(self._repository.backend, number, self.name, key, verdict)

    def answer(self, name: str | Pending, value: Any) -> None:
        """Answer a question that a run waits for. The run reads the answer when it is resumed.

        A string is the key or the name of the question. A Pending means exactly the question that
        it was listed for. The first answer is final: a second one raises AlreadyDecided.
        """
        from holdfast.runs.pending import answer

        with self._repository.reader() as reader:
            number = self._number(reader)
        answer(self._repository.backend, number, self.name, name, value)

    def stream(
        self, key: str, *, after: int = 0, interval: float = 0.1, patience: float | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Yield the cursors and chunks of a stream that a step of a run writes, in any process.

        This reads the newest stream of this key, waits for new chunks, and ends when the step has
        returned. With `after`, it starts behind the chunk of that cursor, in its stream. If the
        step is made again, a RESTART comes in place of a chunk: forget the chunks before it.

        Waits for a stream that a run may still begin. `interval` is the pause between two checks,
        in seconds. Raises StepFailed if the step failed, or if the run went on without it; NotFound
        if there is no such stream, if gc() has freed it, or if nothing came for `patience` seconds;
        and InvalidRequest if `after` is not a cursor of the stream.
        """
        from holdfast.runs.streams import StreamReader

        reader = StreamReader(self._repository.backend, self.name, key, after)
        return reader.follow(interval, patience)

    def owner(self) -> Owner | None:
        """Return the process that runs the session now, or None."""
        with self._repository.reader() as reader:
            number, _, head = self._own_head(reader)
            found = leases.holder(reader, number, head)
            return None if found is None else found[1].owner

    def abandoned(self) -> Abandoned | None:
        """Return the session's run if it can be resumed, or None: it died, failed or halted."""
        from holdfast.runs.abandoned import abandoned_run

        with self._repository.reader() as reader:
            return abandoned_run(reader, self._number(reader))

    def notes(self) -> Notes:
        """Return the notes of the session, for facts that are stored before the next checkpoint."""
        from holdfast.history.notes import Notes

        return Notes(self._repository.backend, self._follow())

    def usage(self) -> Totals:
        """Return tokens and cost of the session, its children, and its history before a fork.

        All records of the session are read. `usage().spent.by_model()` is the usage by model.
        """
        from holdfast.history.token_usage import totals

        with self._repository.reader() as reader:
            return totals(reader, self._number(reader), self.name)

    def conversation(
        self,
        *,
        system: str | None = None,
        budget: float | None = None,
        count: Callable[[dict[str, Any]], float] | None = None,
        key: str = "messages",
    ) -> Conversation:
        """Return the conversation in the session's state, or a new one; see Conversation.

        `system` sets the system prompt. `budget` is the default limit of window(), in the unit of
        `count`, which returns the tokens of one message; the default estimates them. `key` is the
        key of the message list in the state.
        """
        from holdfast.runs.conversation import Conversation

        return Conversation(
            self, lambda: self._lock, self._expected,
            system=system, budget=budget, count=count, key=key,
        )  # fmt: skip

    def autosave(self, policy: Policy | None = None) -> Autosave:
        """Save the states of a hand-written loop when the policy wants it; by default every turn.

        ```
        with session.autosave(holdfast.AfterToolCall()) as saver:
            while not done(state):
                state["messages"].append(model(state))
                saver.offer(state, "llm")
        ```

        Raises InvalidRequest if `policy` is no Policy.
        """
        from holdfast.runs.autosave import Autosave

        return Autosave(self.save, policy)

    def _expected(self) -> str | None:
        """Return the id of the checkpoint that this handle expects to be the head."""
        tip = self._writer.parent
        return None if tip is None else ids.to_text(tip.id)

    def _follow(self) -> str:
        """Return the name of the session, after another handle may have renamed it."""
        with self._repository.reader() as reader:
            self._writer.find(reader)
        return self.name

    def _number(self, reader: Reader) -> int:
        self._writer.find(reader)
        return lineage.find_session(reader, self.name)

    # -- reading -------------------------------------------------------------------------------

    @overload
    def load(
        self,
        revision: Revision | None = None,
        *,
        path: state_paths.Path | None = None,
        close_calls: bool = False,
    ) -> Any: ...
    @overload
    def load(
        self, revision: Revision | None = None, *, as_: type[M], close_calls: bool = False
    ) -> M: ...
    def load(
        self,
        revision: Revision | None = None,
        *,
        as_: type[Any] | None = None,
        path: state_paths.Path | None = None,
        close_calls: bool = False,
    ) -> Any:
        """Return the state at `revision` (default: the head). Every byte is verified on the way.

        With `as_`, the state is converted to that model or dataclass. Loading the head also makes
        it the expected head of this handle.

        With `path`, only the value at that path is read and returned, such as "plan.budget".

        With `close_calls`, every tool call that has no result gets one which says that it was
        interrupted, so that the conversation can be sent to a model again. Then `closed_calls`
        lists these calls. The stored state does not change.

        Raises CheckpointNotFound or SessionNotFound if there is nothing to load, NotFound if the
        state has no such path, and Corrupt if stored bytes are damaged.
        """
        if path is not None:
            if as_ is not None or close_calls:
                raise InvalidRequest("path cannot be combined with as_ or close_calls")
            with self._opened(revision) as (root, source):
                return loading.value(root, path, source)
        measured = self._repository.measure("load", self.name)
        with measured, self._lock, self._repository.reader() as reader:
            place = self._place(reader, revision)
            state = loading.load(reader, place, self._repository.data(reader))
            if revision is None:
                self._writer.read_head(reader)
        if close_calls:
            from holdfast.runs.messages import closed_state

            state, calls = closed_state(state)
            self.closed_calls = tuple(calls)
            if calls:
                logger.warning("session %r: %d calls without a result", self.name, len(calls))
        return state if as_ is None else to_model(state, as_)

    def pack(self, revision: Revision | None = None) -> bytes:
        """Return the checkpoint at `revision` (default: the head) with its state, as bytes.

        holdfast.unpack() reads them in any process, without the store. Every byte of the state is
        verified on the way. Raises what load() raises, and NotSerializable for a state of more than
        512 MiB.
        """
        with self._repository.reader() as reader:
            place = self._place(reader, revision)
            state = loading.load(reader, place, self._repository.data(reader))
            return pack(self._checkpoint(reader, place), state)

    def part(
        self,
        path: state_paths.Path = (),
        revision: Revision | None = None,
        *,
        start: int = 0,
        limit: int = 100,
    ) -> Part:
        """Return an outline of the value at a path, with `limit` of its entries from `start` on.

        Nothing else of the state is read. An empty path is the whole state. Raises NotFound if the
        state has no such path.
        """
        with self._opened(revision) as (root, source):
            return loading.part(root, path, source, start, limit)

    def items(
        self,
        path: state_paths.Path,
        revision: Revision | None = None,
        *,
        start: int | None = None,
        limit: int = 100,
    ) -> Items:
        """Return at most `limit` items from `start` on of the list at a path; the last by default.

        Nothing else of the state is read. Raises NotFound if there is no list at the path.
        """
        with self._opened(revision) as (root, source):
            return loading.items(root, path, source, start, limit)

    @contextmanager
    def _opened(self, revision: Revision | None) -> Iterator[tuple[Node, Source]]:
        """Yield the root of a state, and the source to read the rest of it from."""
        with self._repository.reader() as reader:
            root = lineage.read_row(reader, self._place(reader, revision)).node()
            yield root, self._repository.data(reader)

    def series(self) -> Series:
        """Return a Series, which loads many states of this session and reads shared items once."""
        return Series(self._repository.backend, self._follow())

    def transcript(
        self, revision: Revision | None = None, *, path: state_paths.Path | None = None
    ) -> list[MessagePart]:
        """Return the conversation at `revision` (default: the head), for people to read.

        Its parts are texts, tool calls, each followed by its result, and the names of files. The
        messages may have the shape of any framework that holdfast has an adapter or an importer
        for. They are those at `path`; by default, the longest list of messages in the state.
        """
        from holdfast.history.transcript import conversation, transcript

        if path is None:
            return transcript(conversation(self.load(revision)))
        found = self.load(revision, path=path)
        return transcript(found if isinstance(found, list) else [found])

    def refresh(self) -> Checkpoint | None:
        """Make the present head the expected head of this handle, and return it.

        After HeadMoved, this allows the next save. Returns None if the session has no checkpoint.
        """
        with self._lock, self._repository.reader() as reader:
            self._writer.read_head(reader)
            number, tip = self._writer.number, self._writer.parent
            if number is None or tip is None:
                return None
            if self.agent is None:
                self.agent = lineage.session_agent(reader, number)
            return self._checkpoint(reader, tip.place)

    @property
    def head(self) -> Checkpoint | None:
        """The current head in the store, which may be newer than the expected one.

        None if there is none.
        """
        with self._repository.reader() as reader:
            if self._writer.find(reader) is None or not self._own_head(reader)[2].seq:
                return None
            return self._checkpoint(reader, self._place(reader, None))

    @property
    def step(self) -> int:
        """The step number of the head; 0 before the first save."""
        head = self.head
        return head.step if head else 0

    def __len__(self) -> int:
        """Return the number of checkpoints, on all branches."""
        with self._repository.reader() as reader:
            found = self._writer.find(reader)
            return lineage.count(reader, found.number) if found else 0

    def __bool__(self) -> bool:
        """Return True: a session without checkpoints is not false."""
        return True

    def exists(self) -> bool:
        """Return whether the store has this session. A deleted session does not count."""
        with self._repository.reader() as reader:
            return self._writer.find(reader) is not None

    def info(self) -> SessionInfo:
        """Return the session with its head and counts. Parts that cannot be read are left out.

        Raises SessionNotFound if there is no session of this name.
        """
        with self._repository.reader() as reader:
            number = self._number(reader)
            return describe(
                reader, reader.session_by_number(number) or SessionRow(number, b"", b"")
            )

    def forks(self) -> dict[int, list[str]]:
        """Return the names of the sessions that were forked from each checkpoint, by its seq."""
        self._follow()
        return lineage.forks(self._repository.backend, self._writer.raw_name)

    def get(self, revision: Revision | None = None) -> Checkpoint:
        """Return the checkpoint at `revision` (default: the head), without its state.

        Raises CheckpointNotFound or AmbiguousRevision if the revision names none or several.
        """
        with self._repository.reader() as reader:
            return self._checkpoint(reader, self._place(reader, revision))

    def history(
        self, revision: Revision | None = None, *, summary: bool = False
    ) -> Iterator[Checkpoint]:
        """Yield the head (or `revision`) and its ancestors, newest first, across forks.

        With `summary`, each has a `summary`: one line on what it changed.
        """
        found = self._line(revision)
        return self._with_summaries(found) if summary else found

    def _line(self, revision: Revision | None) -> Iterator[Checkpoint]:
        with self._repository.reader() as reader:
            if self._writer.find(reader) is None:
                return
            head = self._own_head(reader)[2]
            if revision is None and not head.seq:
                return
            at: Address | None = self._place(reader, revision)
            parent = head.parent if revision is None else None
        limit = _FIRST_PAGE
        while at is not None:
            # Read a page at a time, so that no view of the store stays open while the caller works.
            with self._repository.reader() as reader:
                page, at, parent = lineage.page(reader, at, parent, limit)
            limit = min(4 * limit, lineage.HISTORY_PAGE)
            yield from page

    def tree(
        self, *, newest_first: bool = False, before: int | None = None, summary: bool = False
    ) -> Iterator[Checkpoint]:
        """Yield every checkpoint of the session, on all branches, in commit order.

        `before` leaves out the checkpoints from that seq on. With `summary`, each has a `summary`:
        one line on what it changed.
        """
        high = None if before is None else before - 1
        found = self._following(
            lambda name: lineage.tree(
                self._repository.backend, records.encode_name(name), name,
                newest_first=newest_first, high=high,
            )
        )  # fmt: skip
        return self._with_summaries(found) if summary else found

    def _with_summaries(self, found: Iterator[Checkpoint]) -> Iterator[Checkpoint]:
        from holdfast.history.summary import with_summaries

        return with_summaries(self._repository, found)

    def checkpoints(
        self,
        *,
        before: str | Checkpoint | None = None,
        limit: int | None = None,
        summary: bool = False,
        **filters: Unpack[Filters],
    ) -> Iterator[Checkpoint]:
        """Yield the checkpoints that match all filters, on all branches, newest first.

        The filters are those of Store.checkpoints(), without `agent`. With `summary`, each has a
        `summary`: one line on what it changed.
        """
        from holdfast.history.filters import Query, check, checkpoints

        query, backend = Query.of(filters), self._repository.backend
        check(query, limit)
        found = self._following(lambda name: checkpoints(backend, query, before, limit, name))
        return self._with_summaries(found) if summary else found

    def search(
        self,
        text: str,
        *,
        case_sensitive: bool = False,
        before: str | Checkpoint | SearchHit | None = None,
        limit: int | None = None,
        summary: bool = False,
        **filters: Unpack[Filters],
    ) -> Iterator[SearchHit]:
        """Yield the checkpoints in which a text came into the state, newest first.

        The options are those of Store.search(). In a fork, the text of its origin came with the
        first checkpoint.
        """
        from holdfast.history.filters import Query, check
        from holdfast.history.search import search

        query = Query.of(filters)
        check(query, limit)
        return self._following(
            lambda name: search(
                self._repository, text, query, case_sensitive=case_sensitive,
                before=before, limit=limit, session=name, summary=summary,
            )
        )  # fmt: skip

    def _following(self, found: Callable[[str], Iterator[T]]) -> Iterator[T]:
        """Yield what is found under the name that the session has when the first is asked for."""
        yield from found(self._follow())

    def operations(self) -> list[Operation]:
        """Return the operations other than saves, oldest first: rewinds, labels, tags, deletions.

        A save's operation is its checkpoint.
        """
        with self._repository.reader() as reader:
            number, _, head = self._own_head(reader)
            return lineage.operations(reader, number, self.name, head.operations)

    def watch(
        self, *, interval: float = 0.1, patience: float | None = None
    ) -> Iterator[Checkpoint | Operation]:
        """Yield checkpoints and operations of any process, as they are committed from now on.

        Ends when nothing was committed for `patience` seconds, and when the store is closed.
        `interval` is the pause between two checks, in seconds.
        """
        return Watcher(self._repository.backend, self._follow()).follow(interval, patience)

    def diff(self, a: Revision, b: Revision | None = None) -> Diff:
        """Return the changes from `a` to `b` (default: the head).

        Only parts that differ are read.
        """
        from holdfast.history.diff import diff

        with self._repository.reader() as reader:
            left, right = (lineage.read_row(reader, self._place(reader, r)).node() for r in (a, b))
            return diff(left, right, self._repository.data(reader))

    def changes(self, revision: Revision | None = None) -> Changes:
        """Return what a checkpoint changed (default: the head), against the nearest ancestor.

        Damaged and pruned ancestors are skipped. The whole state of a first checkpoint counts as
        added.
        """
        from holdfast.history.diff import changes

        with self._repository.reader() as reader:
            place = self._place(reader, revision)
            return changes(reader, place, self._repository.data(reader))

    def blame(self, path: state_paths.Path, revision: Revision | None = None) -> Checkpoint:
        """Return the checkpoint in which the value at `path` last changed.

        `path` is for example "plan.budget". The search starts at `revision` (default: the head) and
        follows its ancestors.
        """
        from holdfast.history.blame import blame

        with self._repository.reader() as reader:
            place = self._place(reader, revision)
            source = self._repository.data(reader)
            found = blame(reader, source, place, path)
            # As in history(): a session whose name cannot be read does not fail here.
            return lineage.page(reader, found, limit=1)[0][0]

    def verify(self, revision: Revision | None = None, *, read_data: bool = True) -> VerifyResult:
        """Check this session, or one checkpoint, and return a report. Damage does not raise.

        With `read_data`, every byte of the states is read and checked as well. The report on one
        checkpoint lists only its own damage, not that of its ancestors.
        """
        from holdfast.maintenance.verify import verify, verify_one

        if revision is None:
            names = [self._follow()]
            return verify(self._repository.backend, read_data=read_data, sessions=names)
        with self._repository.reader() as reader:
            place = self._place(reader, revision)
        return verify_one(self._repository.backend, place, read_data=read_data)

    def _own_head(self, reader: Reader) -> tuple[int, bytes, Head]:
        number = self._number(reader)
        return number, *lineage.read_head(reader, number)

    def _place(self, reader: Reader, revision: Revision | None) -> Address:
        if isinstance(revision, Checkpoint):
            revision = revision.id
        if revision is not None:
            number = self._number(reader)
            return Resolver(reader, number, self.name).find(revision)
        number, _, head = self._own_head(reader)
        if not head.seq:
            raise CheckpointNotFound(f"session {self.name!r} has no checkpoint")
        return Address(number, head.seq)

    def _own_place(self, reader: Reader, revision: Revision | None) -> Address:
        """Return the address of a checkpoint. Raises InvalidRequest if it is in another session."""
        own = self._number(reader)
        return check_own(reader, own, self._place(reader, revision))

    def _at(self, seq: int) -> Checkpoint:
        with self._repository.reader() as reader:
            number = self._number(reader)
            return self._checkpoint(reader, Address(number, seq))

    def _checkpoint(self, reader: Reader, place: Address) -> Checkpoint:
        return lineage.to_checkpoint(reader, place, lineage.read_row(reader, place).record)


def _reference(expect: Entry | None) -> tuple[str, int] | None:
    """Return the kind and number of an entry in the operation log; None for None."""
    if isinstance(expect, Checkpoint):
        return (CHECKPOINT, expect.seq)
    return (OPERATION, expect.number) if isinstance(expect, Operation) else expect


def backend_of(session: Session) -> Backend:
    """Return the backend of a session, for other modules of this package."""
    return session._repository.backend  # noqa: SLF001


def run_target(session: Session) -> RunTarget:
    """Return a session's data that a run needs, for other modules of this package."""
    from holdfast.runs.resume import RunTarget

    repository = session._repository  # noqa: SLF001
    return RunTarget(repository, session.name, session.agent, session.parent, session)
