"""Prefect's server, whose transactions on SQLite take turns.

Prefect begins them DEFERRED: one that has read and then writes is refused at once, whatever the timeout, when another
has written in between. On a busy machine the evaluation of one event is refused four times in a row: what the event
should have started is lost, and what it had started before the refusal is started again. IMMEDIATE waits for its turn.
"""

from contextlib import AbstractAsyncContextManager
from typing import Any

from prefect.server.database.configurations import AioSqliteConfiguration

deferred = AioSqliteConfiguration.begin_transaction


def immediate(
    self: AioSqliteConfiguration, session: Any, with_for_update: bool = False
) -> AbstractAsyncContextManager[Any]:
    """A transaction that holds the database for writing from its begin."""
    return deferred(self, session, with_for_update=True)


if __name__ == "__main__":
    from prefect.cli import app

    AioSqliteConfiguration.begin_transaction = immediate
    app()
