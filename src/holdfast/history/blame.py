"""Find the checkpoint in which a value last changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.errors import NotFound
from holdfast.format import ropes, state_paths
from holdfast.format.patch import check_path
from holdfast.history import lineage
from holdfast.history.load import at

if TYPE_CHECKING:
    from holdfast.format.item_streams import Source
    from holdfast.format.nodes import Node
    from holdfast.storage.reader import Reader
    from holdfast.storage.rows import Address


def blame(reader: Reader, source: Source, start: Address, path: state_paths.Path) -> Address:
    """Return the checkpoint that last changed the value at `path`: `start` or an ancestor of it.

    All checkpoints from there to `start` have an equal value. Damaged ones are skipped. Raises
    NotFound if the state has no such path.
    """
    steps = state_paths.parse(path)
    wanted: bytes | None = None
    shown: Node | None = None
    found: Address | None = None
    for place, record in lineage.ancestors(reader, start):
        if record.damaged:
            continue
        root = lineage.read_row(reader, place).node()
        if found is None:
            check_path(root, path, source)
        node = at(root, steps, source)
        digest = node.hash if node is not None else None
        if found is None:
            if digest is None:
                raise NotFound(
                    f"the state has nothing at {'.'.join(map(str, steps))!r}",
                    hint="a path begins at the top of the state, such as plan.steps[3]; "
                    + state_paths.DOTS,
                )
            shown = node
        elif digest != wanted and not _same(node, shown, source):
            break
        wanted, found = digest, place
    if found is None:
        raise NotFound("no checkpoint that can be read")
    return found


def _same(a: Node | None, b: Node | None, source: Source) -> bool:
    """Return whether two nodes with different hashes have equal values.

    This happens if format version 1 computed one of the hashes.
    """
    if a is None or b is None or a.size != b.size:
        return False
    return ropes.flatten(a, source) == ropes.flatten(b, source)
