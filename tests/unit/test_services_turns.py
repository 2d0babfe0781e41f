"""Transactions of Prefect's server on SQLite, of which one has read when another writes."""

import sqlite3

import pytest
from prefect.server.database.configurations import AioSqliteConfiguration
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from infra.services import prefect_server


async def read_then_write(file, begin) -> bool:
    """One counts up what it has read; whether another, who does not wait, could write meanwhile."""
    config = AioSqliteConfiguration(f"sqlite+aiosqlite:///{file}")
    async with await config.session(await config.engine()) as session, begin(config, session):
        (count,) = (await session.execute(text("SELECT n FROM counted"))).one()
        try:
            with sqlite3.connect(file, timeout=0) as other:
                other.execute("UPDATE counted SET n = 10")
            written = True
        except sqlite3.OperationalError:
            written = False
        await session.execute(text(f"UPDATE counted SET n = {count + 1}"))
    return written


@pytest.fixture
def counted(tmp_path):
    file = tmp_path / "counted.db"
    with sqlite3.connect(file) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE counted (n INT)")
        database.execute("INSERT INTO counted VALUES (1)")
    return file


def test_whoever_has_begun_is_not_overtaken(counted, run):
    assert not run(read_then_write(counted, prefect_server.immediate))
    with sqlite3.connect(counted) as database:
        assert database.execute("SELECT n FROM counted").fetchall() == [(2,)]


def test_prefects_own_transactions_are_still_refused_once_overtaken(counted, run):
    """When this fails, Prefect has mended it: remove infra/services/prefect_server.py."""
    with pytest.raises(OperationalError, match="database is locked"):
        run(read_then_write(counted, prefect_server.deferred))
