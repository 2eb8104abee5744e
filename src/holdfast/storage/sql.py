"""The queries of views, for storages that speak SQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from holdfast.storage.tables import Index


class Queries:
    """Makes the text of each query once. All values are bound as parameters.

    `mark` stands for a parameter. `computed` has the SQL of computed columns. `found_by` has the
    columns that are compared in place of others. `sources` has the SQL for tables, where an index
    must be forced.
    """

    def __init__(
        self,
        mark: str,
        computed: Mapping[str, str],
        found_by: Mapping[tuple[str, str], str] | None = None,
        sources: Mapping[Index, str] | None = None,
    ) -> None:
        self._mark, self._computed = mark, computed
        self._found_by, self._sources = found_by or {}, sources or {}
        self._texts: dict[Any, str] = {}

    def get(self, index: Index) -> str:
        """Return the text of a look-up by the key of an index."""
        text = self._texts.get(index)
        if text is None:
            terms = [f"{self._name(index, column)} = {self._mark}" for column in index.by]
            text = self._texts[index] = self._select(index) + " AND ".join(terms)
        return text

    def scan(
        self,
        index: Index,
        low: Any,
        high: Any,
        *,
        prefix: tuple[Any, ...],
        limit: int | None,
        reverse: bool,
        floor: Any,
    ) -> tuple[str, tuple[Any, ...]]:
        """Return the text and the bindings of a scan."""
        bindings = prefix
        if floor is not None:
            bindings += (floor, low, low)
        elif low is not None:
            bindings += (low,)
        if high is not None:
            bindings += (high,)
        if limit is not None:
            bindings += (limit,)
        shape = index, len(prefix), low is None, high is None, floor is None, reverse, limit is None
        text = self._texts.get(shape)
        if text is None:
            text = self._texts[shape] = self._scan(*shape)
        return text, bindings

    def _scan(
        self,
        index: Index,
        fixed: int,
        from_first: bool,  # noqa: FBT001 - the parts of a scan that its text depends on
        to_last: bool,  # noqa: FBT001
        exact: bool,  # noqa: FBT001
        reverse: bool,  # noqa: FBT001
        unlimited: bool,  # noqa: FBT001
    ) -> str:
        mark, column, table = self._mark, index.by[fixed], index.table
        terms = [f"{self._name(index, name)} = {mark}" for name in index.by[:fixed]]
        if not exact:
            before = (
                f"SELECT {column} FROM {table} WHERE {column} BETWEEN {mark} AND {mark} "  # noqa: S608
                f"ORDER BY {column} DESC LIMIT 1"
            )
            terms.append(f"{column} >= coalesce(({before}), {mark})")
        elif not from_first:
            terms.append(f"{column} >= {mark}")
        if not to_last:
            terms.append(f"{column} < {mark}")
        if index.only is not None:
            terms.append(f"{index.only} IS NOT NULL")
        text = self._select(index) + (" AND ".join(terms) or "TRUE") + " ORDER BY "
        text += ", ".join([name + " DESC" * reverse for name in index.by[fixed:]])
        return text if unlimited else f"{text} LIMIT {mark}"

    def _select(self, index: Index) -> str:
        columns = ", ".join([self._computed.get(column, column) for column in index.columns])
        return f"SELECT {columns} FROM {self._sources.get(index, index.table)} WHERE "  # noqa: S608

    def _name(self, index: Index, column: str) -> str:
        return self._found_by.get((index.table, column), column)
