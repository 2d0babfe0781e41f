"""Starts the services of this home again when they die, whatever killed them."""

import logging
import signal
import sys
import threading
import time

from infra.services import catalog, local, profile, supervise
from infra.services.record import Record
from infra.services.supervise import ServiceError

LOOK_S = 1.0
PATIENCE_S = (1.0, 60.0)  # between attempts to start one that cannot: twice as long each time, up to the second figure

log = logging.getLogger("keeper")
_end = threading.Event()


class Keeper:
    """Looks after every service that `lockstep up` started but itself."""

    def __init__(self) -> None:
        self._retry: dict[str, tuple[float, float]] = {}  # when, and how long to wait if that fails too

    def look(self) -> None:
        """Start again what has died, in the order in which they need each other, and wait for each.

        Nothing is done while `lockstep up` or `down` is at work.
        """
        dead = {record.name for record in Record.all() if not supervise.alive(record)}
        now = time.monotonic()
        due = [name for name in catalog.ORDER if name in dead and self._retry.get(name, (0.0, 0.0))[0] <= now]
        if not due:
            return
        try:
            with local.locked():
                for name in due:
                    self._restart(name)
        except local.Busy:
            return

    def _restart(self, name: str) -> None:
        record = Record.read(name)
        if record is None or supervise.alive(record) or _end.is_set():
            return  # stopped or started while we waited
        began, patience = time.monotonic(), self._retry.get(name, (0.0, PATIENCE_S[0]))[1]
        self._retry[name] = (began + patience, min(2 * patience, PATIENCE_S[1]))
        try:
            service = catalog.service(name, profile.current())
            record = catalog.ensure(service, log.info, record.port or None)
            supervise.wait_ready(record, lambda: _go_on() and service.ready(record), local.READY_S)
        except Exception as error:  # the others still need looking after, whatever is wrong with this one
            log.error("%s: %s; again in %.0f s", name, error, patience, exc_info=not isinstance(error, ServiceError))
            return
        self._retry.pop(name)
        log.info("%s: was gone, works again after %.1f s", name, time.monotonic() - began)


def _go_on() -> bool:
    if _end.is_set():
        raise ServiceError("asked to end while it was starting")
    return True


def main() -> None:
    """Look every second until asked to end."""
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: _end.set())
    keeper = Keeper()
    while not _end.wait(LOOK_S):
        keeper.look()


if __name__ == "__main__":
    main()
