"""The terminal: log lines, and one live line below them that says what runs."""

import logging
import sys
import threading
import time
from datetime import UTC, datetime
from shutil import get_terminal_size

from infra.services.durations import words
from infra.services.follow import Line, Snapshot

QUIET_EVERY_S = 30.0  # without a terminal, the live line is printed this often
_ERASE = "\r\x1b[K"
_COLOURS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31m"}


class Screen:
    """Writes to stderr, so that stdout carries results alone. Whoever follows a run may be late: once closed, by any
    thread, it shows nothing more."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._started = time.monotonic()
        self._printed = ("", 0.0)
        self._lock, self._closed = threading.Lock(), False

    def show(self, news: Snapshot) -> None:
        """Print the new log lines and renew the live line."""
        with self._lock:
            if not self._closed:
                self._show(news)

    def close(self) -> None:
        """Take the live line away. May be called again."""
        with self._lock:
            if self._live and not self._closed:
                sys.stderr.write(_ERASE)
                sys.stderr.flush()
            self._closed = True

    def _show(self, news: Snapshot) -> None:
        for line in news.lines:
            self._print(line)
        text = self._doing(news)
        if self._live:
            sys.stderr.write(_ERASE + text[: get_terminal_size().columns - 1])
            sys.stderr.flush()
        elif news.doing != self._printed[0] or time.monotonic() - self._printed[1] > QUIET_EVERY_S:
            self._printed = (news.doing, time.monotonic())
            print(text, file=sys.stderr, flush=True)

    def _print(self, line: Line) -> None:
        text = f"{line.time.astimezone():%H:%M:%S} {line.text}"
        if self._live:
            colour = _COLOURS.get(line.level, "")
            text = f"{_ERASE}{colour}{text}\x1b[0m" if colour else _ERASE + text
        print(text, file=sys.stderr, flush=True)

    def _doing(self, news: Snapshot) -> str:
        text = f"[{words(time.monotonic() - self._started)}] {news.doing}"
        if news.task_started is None:
            return text
        elapsed = words((datetime.now(UTC) - news.task_started).total_seconds())
        usual = f", usually {words(news.usual_s)}" if news.usual_s is not None else ""
        return f"{text} ({elapsed}{usual})"
