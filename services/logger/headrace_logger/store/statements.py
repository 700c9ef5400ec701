"""Statements that the driver gets as they are, written once for SQLite and PostgreSQL.

Thousands of rows arrive each second, and expressions of SQLAlchemy cost more than SQLite needs for the statements. So a
statement here is text that both databases know, with SQLite's placeholders and lists, which `run` rewrites for
PostgreSQL once. A list is one parameter of any length: `IN_EACH` in the statement, `each` around the values. `EachOf`
is the same in an expression.

Each function runs within the transaction of its connection.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import sqlalchemy as sql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

IN_EACH = "IN (SELECT value FROM json_each(?))"
_SIZES = (256, 64, 16, 4, 1)
_POSTGRESQL_TYPES = {
    sql.String: "text[]",
    sql.BigInteger: "bigint[]",
    sql.Integer: "integer[]",
    sql.Double: "float8[]",
    sql.LargeBinary: "bytea[]",
}

Row = tuple[Any, ...]


def is_postgresql(connection: sql.Connection) -> bool:
    return connection.dialect.name == "postgresql"


def run(connection: sql.Connection, statement: str, *parameters: Any) -> sql.CursorResult[Any]:
    """Executes a statement."""
    if is_postgresql(connection):
        statement = _for_postgresql(statement)
    return connection.exec_driver_sql(statement, parameters)


def column(connection: sql.Connection, statement: str, *parameters: Any) -> list[Any]:
    """The first column of a statement's result."""
    return list(run(connection, statement, *parameters).scalars())


def each(connection: sql.Connection, values: Iterable[int | str]) -> Any:
    """The parameter of `IN_EACH`."""
    return list(values) if is_postgresql(connection) else json.dumps(list(values))


def insert(connection: sql.Connection, into: sql.Table, columns: tuple[str, ...], rows: Sequence[Row]) -> None:
    """Inserts rows in their order, many in one statement.

    SQLite's driver reacquires the interpreter's lock after each statement, which can take long while the event loop is
    busy; only a few sizes occur, so that the statements stay prepared. PostgreSQL gets a list for each column.
    """
    if not rows:
        return
    if is_postgresql(connection):
        _insert_lists(connection, into, columns, rows)
        return
    begin = 0
    for size in _SIZES:
        while len(rows) - begin >= size:
            some = rows[begin : begin + size]
            begin += size
            connection.exec_driver_sql(_insert_rows(into.name, columns, size), tuple(chain.from_iterable(some)))


def upsert(
    connection: sql.Connection, into: sql.Table, columns: tuple[str, ...], rows: Sequence[Row], on_conflict: str
) -> None:
    """Inserts rows, at least one, with different keys, or does what `on_conflict` says with the row that is there."""
    if is_postgresql(connection):
        _insert_lists(connection, into, columns, rows, on_conflict)
        return
    connection.exec_driver_sql(_insert_rows(into.name, columns, 1, on_conflict), list(rows))


@lru_cache
def _insert_rows(into: str, columns: tuple[str, ...], count: int, on_conflict: str = "") -> str:
    """SQLite's statement for a number of rows."""
    row = f"({', '.join('?' * len(columns))})"
    values = ", ".join([row] * count)
    return f"INSERT INTO {into} ({', '.join(columns)}) VALUES {values} {on_conflict}"  # noqa: S608


def _insert_lists(
    connection: sql.Connection, into: sql.Table, columns: tuple[str, ...], rows: Sequence[Row], on_conflict: str = ""
) -> None:
    lists = ", ".join(f"%s::{_type_of(into.c[name])}" for name in columns)
    statement = f"INSERT INTO {into.name} ({', '.join(columns)}) SELECT * FROM unnest({lists}) {on_conflict}"  # noqa: S608
    connection.exec_driver_sql(statement, tuple(map(list, zip(*rows, strict=True))))


class _Integers(sql.TypeDecorator[list[int]]):
    """A list as one parameter: JSON for SQLite, an array for PostgreSQL."""

    impl = sql.String
    cache_ok = True

    def load_dialect_impl(self, dialect: sql.Dialect) -> sql.types.TypeEngine[Any]:
        own = sql.ARRAY(sql.BigInteger) if dialect.name == "postgresql" else sql.String()
        return dialect.type_descriptor(own)

    def process_bind_param(self, value: list[int] | None, dialect: sql.Dialect) -> Any:
        return value if dialect.name == "postgresql" else json.dumps(value)


class EachOf(FunctionElement[Any]):
    """The values of a list of integers, for `column.in_`."""

    inherit_cache = True

    def __init__(self, values: Sequence[int]) -> None:
        super().__init__(sql.literal(list(values), _Integers))


def in_each(tested: sql.ColumnElement[Any], values: Sequence[int]) -> sql.ColumnElement[bool]:
    """Whether a column has one of these integers."""
    return tested.bool_op("IN")(EachOf(values))


@compiles(EachOf, "sqlite")
def _each_of_sqlite(element: EachOf, compiler: SQLCompiler, **options: Any) -> str:
    return f"(SELECT value FROM json_each({compiler.process(element.clauses, **options)}))"  # noqa: S608


@compiles(EachOf, "postgresql")
def _each_of_postgresql(element: EachOf, compiler: SQLCompiler, **options: Any) -> str:
    return f"(SELECT unnest({compiler.process(element.clauses, **options)}))"


@lru_cache
def _for_postgresql(statement: str) -> str:
    return statement.replace(IN_EACH, "= ANY(%s)").replace("?", "%s")


def _type_of(written: sql.Column[Any]) -> str:
    """The type of a list of the column's values."""
    listed = next(name for kind, name in _POSTGRESQL_TYPES.items() if isinstance(written.type, kind))
    # SQLite has no boolean.
    return f"{listed}::boolean[]" if written.name == "refused" else listed
