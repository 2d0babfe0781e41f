"""This process's connection to Ray: the cluster that LOCKSTEP_RAY_ADDRESS names, or a Ray of its own."""

import logging
import os
import socket
import threading

from infra.cluster.placement import PlacementError

ADDRESS_VARIABLE = "LOCKSTEP_RAY_ADDRESS"
_OBJECT_STORE_BYTES = 128 * 2**20  # weights and hidden states never travel through it
_ANSWER_S = 10.0


class Connection:
    """A thread that connects to Ray and then lives as long as the connection: the kernel ends the processes of a local
    Ray together with the thread that started them, and callers' threads come and go.

    local: whether Ray was started here, for this process alone.
    Raises PlacementError when no cluster answers at LOCKSTEP_RAY_ADDRESS.
    """

    def __init__(self) -> None:
        self.local = False
        self._error: BaseException | None = None
        self._connected, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray", daemon=True)
        self._thread.start()
        self._connected.wait()
        if self._error:
            raise self._error

    def close(self) -> None:
        """Leave Ray, and end it if it was started here."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        import ray

        try:
            self._connect(ray)
        except BaseException as error:  # raised in the caller's thread
            self._error = error
            return
        finally:
            self._connected.set()
        self._closing.wait()
        ray.shutdown()

    def _connect(self, ray) -> None:
        address = os.environ.get(ADDRESS_VARIABLE)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        logging.getLogger("ray").setLevel(logging.ERROR)
        quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "include_dashboard": False}
        if address:
            _check_answers(address)
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
            return
        self.local = True
        cpus = len(os.sched_getaffinity(0))
        ray.init(address="local", num_cpus=cpus, object_store_memory=_OBJECT_STORE_BYTES, **quiet)


def _check_answers(address: str) -> None:
    """Ray itself tries for minutes before it says so."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError) as error:
        raise PlacementError(
            f"no Ray cluster answers at {address} ({error}): start it, or unset {ADDRESS_VARIABLE}"
        ) from error
