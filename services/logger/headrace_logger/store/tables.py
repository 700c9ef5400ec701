"""The tables of the payload log.

`records` holds each record as its serialized protobuf beside the columns that queries filter by. `position` is the
order of commit, never reused. Every index ends in `time_us` and, like all of SQLite's, in `position`: matches are in
the order of queries. `of_call` marks a record of only the gateway's access log, and whether a service's record of the
same call may still replace it. `calls` holds the gateway's part of a call, by the gateway's call id; without contents
if the call's records were deleted. `appended` holds the received sequences of each source, apart from the records: a
deleted record does not return. `deletions` holds requested deletions, for records that arrive later. `cursors` holds
the positions of readers of all records. `shares` holds the space of each client's records, with refused requests
separately; triggers maintain it. `usage` holds sums over the services' records, apart from the records too: see
usage.py.

Times are whole microseconds since 1970, hours whole hours since then.
"""

from __future__ import annotations

import time

import sqlalchemy as sql

# Values of `of_call`: a service's record; a call's record for good; a call's record until a service's record arrives.
NOT_OF_CALL, OF_CALL, OF_CALL_FOR_NOW = 0, 1, 2

metadata = sql.MetaData()
records = sql.Table(
    "records",
    metadata,
    sql.Column("position", sql.Integer, primary_key=True),
    sql.Column("record_id", sql.String, nullable=False, unique=True),
    sql.Column("time_us", sql.BigInteger, nullable=False),
    sql.Column("model", sql.String, nullable=False),
    sql.Column("request_id", sql.String, nullable=False),
    sql.Column("trace_id", sql.String, nullable=False),
    sql.Column("client", sql.String, nullable=False),
    sql.Column("status", sql.String, nullable=False),
    sql.Column("finish_reason", sql.String, nullable=False),
    sql.Column("duration_ms", sql.Double),
    sql.Column("duration_class", sql.Integer),
    sql.Column("ttft_ms", sql.Double),
    sql.Column("ttft_class", sql.Integer),
    sql.Column("call_id", sql.String),
    sql.Column("of_call", sql.Integer, nullable=False),
    # Whether the request was refused, or left by its caller, before any output.
    sql.Column("refused", sql.Integer, nullable=False, server_default="0"),
    sql.Column("body", sql.LargeBinary, nullable=False),
    *(
        sql.Index(f"records_by_{name}", name, "time_us")
        for name in ("model", "request_id", "trace_id", "client", "status", "finish_reason")
    ),
    # For scans of the newest records: it contains every column that they compare.
    sql.Index("records_by_time", "time_us", "position", "duration_ms", "ttft_ms"),
    sql.Index("records_by_duration", "duration_class"),
    sql.Index("records_by_ttft", "ttft_class"),
    sql.Index("records_by_call", "call_id", sqlite_where=sql.text("call_id IS NOT NULL")),
    sql.Index("records_refused", "client", "time_us", sqlite_where=sql.text("refused")),
    sqlite_autoincrement=True,
)
calls = sql.Table(
    "calls",
    metadata,
    sql.Column("call_id", sql.String, primary_key=True),
    sql.Column("time_us", sql.BigInteger, nullable=False),
    sql.Column("gateway", sql.LargeBinary),
    sql.Index("calls_deleted", "time_us", sqlite_where=sql.text("gateway IS NULL")),
    sqlite_with_rowid=False,
)
sources = sql.Table(
    "sources",
    metadata,
    sql.Column("source_id", sql.Integer, primary_key=True),
    sql.Column("source", sql.String, nullable=False, unique=True),
)
appended = sql.Table(
    "appended",
    metadata,
    sql.Column("source_id", sql.Integer, primary_key=True),
    sql.Column("sequence", sql.BigInteger, primary_key=True),
    sql.Column("time_us", sql.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
deletions = sql.Table(
    "deletions",
    metadata,
    sql.Column("key", sql.String, primary_key=True),
    sql.Column("value", sql.String, primary_key=True),
    sql.Column("time_us", sql.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
cursors = sql.Table(
    "cursors",
    metadata,
    sql.Column("name", sql.String, primary_key=True),
    sql.Column("position", sql.Integer, nullable=False),
    sqlite_with_rowid=False,
)
shares = sql.Table(
    "shares",
    metadata,
    sql.Column("client", sql.String, primary_key=True),
    sql.Column("refused", sql.Integer, primary_key=True),
    sql.Column("bytes", sql.BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
usage = sql.Table(
    "usage",
    metadata,
    sql.Column("client", sql.String, primary_key=True),
    sql.Column("hour", sql.BigInteger, primary_key=True),
    sql.Column("model", sql.String, primary_key=True),
    *(
        sql.Column(name, sql.BigInteger, nullable=False)
        for name in (
            "requests",
            "failed_requests",
            "prompt_tokens",
            "cached_tokens",
            "completion_tokens",
            "duration_us",
        )
    ),
    # Later than the others: a migrated table has it last too.
    sql.Column("engine_us", sql.BigInteger, nullable=False, server_default="0"),
    sqlite_with_rowid=False,
)
BESIDES_BODY = 600  # An estimate of a record's space besides its body: columns and index entries.
TRIGGERS = (
    "CREATE TRIGGER IF NOT EXISTS share_more AFTER INSERT ON records BEGIN"
    " INSERT INTO shares (client, refused, bytes) VALUES (new.client, new.refused, length(new.body) + 600)"
    " ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes; END",
    "CREATE TRIGGER IF NOT EXISTS share_less AFTER DELETE ON records BEGIN"
    " UPDATE shares SET bytes = bytes - length(old.body) - 600"
    " WHERE client = old.client AND refused = old.refused; END",
)


def now_us() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1_000
