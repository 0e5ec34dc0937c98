"""The threads that bring rows to a backend and issues to an alert, however slow or broken these are."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from gradtrack.alerts.base import Alert, Message
from gradtrack.backends.base import Backend, address_of
from gradtrack.delivery.at_exit import come_first
from gradtrack.delivery.journal.offsets import Offsets
from gradtrack.delivery.status import Faults, describe, log_unposted
from gradtrack.delivery.writer import QUEUE_ROWS, Feed, Row, Writer
from gradtrack.errors import PermanentBackendError
from gradtrack.records import Record, RunInfo
from gradtrack.reports import IssueSeverity
from gradtrack.support.interrupts import pass_on, start

BATCH_ROWS: Final = 256
_FIRST_DELAY_SECONDS: Final = 0.25
_LONGEST_DELAY_SECONDS: Final = 30.0
_CLOSING_DELAY_SECONDS: Final = 0.5
_ENDING_SHARE: Final = 0.25
"""The part of the time for a close in which no failed write is tried again: the backend may need it to end well."""
_IDLE_SECONDS: Final = 1.0
_GATHER_SECONDS: Final = 2.0
"""For how long rows come together: a batch of many costs a tracker less than many of few do."""
_POLL_SECONDS: Final = 0.05
_REST: Final = 3.0
_REST_OF_INTERPRETER: Final = 9.0
"""How long a worker rests after it has written what was there: in times of how long that took, and of what of it was
computed here, holding the interpreter. It does so while training goes on and few rows wait."""
_LONGEST_REST_SECONDS: Final = 5.0
_MANY_ROWS: Final = QUEUE_ROWS // 2
"""With so many rows waiting there is no rest: the queue still has room for those that come meanwhile."""


class Worker:
    """Writes the rows of a feed to a backend in order and in batches, again and again until they are taken.

    It is a daemon thread: a `write` that never returns keeps neither `close` nor the interpreter waiting. Rows that a
    backend refuses for good are left to the journal. `unsettled` is why what was taken may not be durable.
    """

    def __init__(self, name: str, backend: Backend, feed: Feed, run: RunInfo, offsets: Offsets) -> None:
        self.name, self.feed = name, feed
        self.unsettled: str | None = None
        self.faults = Faults(name)
        self.writer = Writer(backend, run, on_refusal=self._note_refusal)
        self._backend, self._offsets = backend, offsets
        self._flushes: list[tuple[int, threading.Event]] = []
        self._hurry = threading.Event()
        self._failed = self._gave_up = self._began = False
        self._end: float | None = None
        self._last_retry = math.inf
        self._thread = threading.Thread(target=self._work, name=f"gradtrack-{name}", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        try:
            start(self._thread)
        except RuntimeError as fault:  # no thread can start while the interpreter exits
            self.faults.note(fault, "what the journal has of its rows is left to a replay")

    def ask_flush(self) -> threading.Event:
        """Flush the backend once everything that was offered so far is delivered."""
        done = threading.Event()
        if self._end is not None:  # the backend is closed, or about to be
            done.set()
            return done
        self._flushes.append((self.feed.accepted, done))
        self._hurry.set()
        self.feed.wake()
        return done

    def ask_close(self, *, failed: bool, end: float) -> None:
        """Deliver what is left, begin no write after `end` (of the monotonic clock), and let the backend go."""
        now = time.monotonic()
        self._failed, self._last_retry = failed, now + (1 - _ENDING_SHARE) * (end - now)
        self._end = end
        self._hurry.set()
        self.feed.wake()

    def give_up(self, reason: str) -> None:
        """Note that the close does not wait for this thread any longer."""
        self.faults.note(reason, "the close does not wait for it any longer")
        self.unsettled = self.faults.last

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread, and say whether it ended; where it could not begin, let the backend go here."""
        if self._thread.ident is None:
            self._close()
            return True
        self._thread.join(max(timeout_seconds, 0.0))
        return not self._thread.is_alive()

    def _work(self) -> None:
        target, begin, computed = 0, 0.0, 0.0
        while not self._out_of_time():
            rows = self.feed.take(BATCH_ROWS, _IDLE_SECONDS)
            if rows and rows[0][0] >= target:  # what was there before is written: a new round begins
                target, begin, computed = self.feed.accepted, time.monotonic(), time.thread_time()
            if rows:
                self._deliver(rows)
            self._flush_due()
            if self._end is not None and self.feed.position >= self.feed.accepted:
                break
            if rows and self.feed.position >= target:
                taken, of_interpreter = time.monotonic() - begin, time.thread_time() - computed
                self._rest(max(_REST * taken, _REST_OF_INTERPRETER * of_interpreter))
        self._close()

    def _deliver(self, rows: list[Row]) -> None:
        delay, again = _FIRST_DELAY_SECONDS, False
        while not self._out_of_time():
            try:
                self.writer.write(rows, again=again)
            except BaseException as fault:  # also a tracker that exits: it must not end this thread in silence
                self.faults.note(fault, f"the rows are kept {'in memory ' * bool(self.feed.unkept)}until it is back")
            else:
                if not self._began:
                    come_first()
                self._began = True
                self.feed.settle(rows[-1][0])
                self._offsets.set(self.name, rows[-1][0] + 1, self.writer.refused, address_of(self._backend))
                return
            again = True
            self._pause(delay)
            delay = min(2 * delay, _LONGEST_DELAY_SECONDS)

    def _note_refusal(self, fault: PermanentBackendError, record: Record) -> None:
        kept = "the journal keeps those that it has" if self.feed.unkept else "the journal keeps them"
        self.faults.note(fault, f"it refuses rows for good, the first at step {record.step}; {kept}")

    def _pause(self, delay_seconds: float) -> None:
        """Wait before the next attempt, less long while a close waits for this thread."""
        if self._end is not None:
            delay_seconds = min(delay_seconds, _CLOSING_DELAY_SECONDS)
            if time.monotonic() + delay_seconds < self._last_retry:
                time.sleep(delay_seconds)
            else:
                self._gave_up = True
            return
        self._hurry.wait(delay_seconds)
        self._hurry.clear()

    def _rest(self, seconds: float) -> None:
        """Leave the machine to the training and let rows come together, unless a flush, a close or many rows wait."""
        end = time.monotonic() + max(min(seconds, _LONGEST_REST_SECONDS), _GATHER_SECONDS)
        while self._end is None and not self._flushes and self.feed.accepted - self.feed.position < _MANY_ROWS:
            remaining = end - time.monotonic()
            if remaining <= 0:
                break
            self._hurry.wait(min(remaining, _POLL_SECONDS))
        self._hurry.clear()

    def _out_of_time(self) -> bool:
        return self._gave_up or (self._end is not None and time.monotonic() >= self._end)

    def _flush_due(self) -> None:
        due = [flush for flush in self._flushes if flush[0] <= self.feed.position]
        if due:
            self._make_durable(self._backend.flush)
        for flush in due:
            self._flushes.remove(flush)
            flush[1].set()

    def _close(self) -> None:
        self._make_durable(lambda: self._backend.close(failed=self._failed))
        self._offsets.save()

    def _make_durable(self, action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as fault:
            _pass_on_interrupt(fault)
            self.faults.note(fault, "what it has taken may not be durable")
            self.unsettled = self.faults.last
        else:
            self.unsettled = None


def _pass_on_interrupt(fault: BaseException) -> None:
    """Raise what has struck the main thread, which ends a plugin whose own thread has never begun."""
    pass_on(fault)
    if isinstance(fault, KeyboardInterrupt):
        raise fault


_MOST_MESSAGES: Final = 256
_MOST_ATTEMPTS: Final = 10
"""How often a message is tried: for about three minutes, with the pauses that double up to half a minute."""

_MOST_NAMED: Final = 5
_LOST: Final = "the issue is not posted"


class AlertWorker:
    """Posts the messages of one alert in their order, each again and again until it is taken or given up.

    Its daemon thread begins with the first message. Nothing here waits for the alert or raises its faults: they are
    counted, and logged once each. Beyond `_MOST_MESSAGES` that wait, a message is lost.
    """

    def __init__(self, name: str, alert: Alert, min_severity: IssueSeverity) -> None:
        self.name, self.min_severity = name, min_severity
        self.accepted = self.sent = self.lost = 0
        self.faults = Faults(f"alert {name}")
        self._alert, self._messages = alert, deque[Message]()
        self._unposted = list[Message]()
        """The first messages that were lost, which are named at the end."""
        self._changed = threading.Condition()
        self._end: float | None = None
        self._process = os.getpid()
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Count the messages that are neither posted nor lost."""
        return max(self.accepted - self.sent - self.lost, 0)

    def status(self) -> dict[str, Any]:
        """Return the numbers of messages and faults, and the last fault."""
        return {
            "sent": self.sent,
            "pending": self.pending,
            "lost": self.lost,
            "faults": sum(self.faults.counts.values()),
            "last_fault": self.faults.last,
        }

    def post(self, message: Message) -> None:
        """Post a message as soon as those before it are through."""
        if os.getpid() != self._process:  # a forked copy has no thread, and may have a lock that stays taken
            return
        with self._changed:
            self.accepted += 1
            if self._end is not None or len(self._messages) >= _MOST_MESSAGES:
                self._lose(message)
                self.faults.note("too many wait" if self._end is None else "the run is closed", _LOST)
                return
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=f"gradtrack-alert-{self.name}", daemon=True)
                try:
                    start(thread)
                except RuntimeError as fault:  # no thread can start while the interpreter exits
                    self._lose(message)
                    self.faults.note(fault, _LOST)
                    return
                self._thread = thread
            self._messages.append(message)
            self._changed.notify_all()

    def ask_close(self, end: float) -> None:
        """Post what waits, and begin no attempt after `end` (of the monotonic clock)."""
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def join(self, end: float) -> None:
        """Wait for the thread until `end`, count as lost what it has not posted by then, and say once what was lost."""
        if self._thread is not None:
            self._thread.join(max(end - time.monotonic(), 0.0))
        elif self._process == os.getpid():
            self._close()
        if self.pending:
            self.faults.last = self.faults.last or "it has not answered in time"
            for message in self._messages.copy():
                self._lose(message)
        if self.lost:
            log_unposted(self.name, self.lost, self.accepted, self._unposted, self.faults.last)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._messages or self._end is not None)
            if not self._messages or not self._deliver(self._messages[0]):
                break
        self._close()

    def _deliver(self, message: Message) -> bool:
        """Post a message, and take it out of the queue; False where no time is left for any attempt."""
        delay = _FIRST_DELAY_SECONDS
        for attempt in range(1, _MOST_ATTEMPTS + 1):
            if self._end is not None and time.monotonic() >= self._end:
                return False
            try:
                self._alert.send(message)
            except BaseException as fault:  # also a plugin that exits: it must not end this thread in silence
                reason = self._hidden(fault)
                last = attempt == _MOST_ATTEMPTS or isinstance(fault, PermanentBackendError)
                self.faults.note(reason, _LOST if last else "it is tried again")
                if last:
                    break
            else:
                self.sent += 1
                self._messages.popleft()
                return True
            with self._changed:
                if self._end is None:
                    self._changed.wait_for(lambda: self._end is not None, delay)
                if self._end is not None:
                    self._changed.wait(max(min(delay, _CLOSING_DELAY_SECONDS, self._end - time.monotonic()), 0.0))
            delay = min(2 * delay, _LONGEST_DELAY_SECONDS)
        self._lose(self._messages.popleft())
        return True

    def _lose(self, message: Message) -> None:
        self.lost += 1
        if len(self._unposted) < _MOST_NAMED:
            self._unposted.append(message)

    def _hidden(self, fault: BaseException) -> str:
        try:
            return self._alert.hide(describe(fault))
        except Exception:
            return type(fault).__name__

    def _close(self) -> None:
        try:
            self._alert.close()
        except BaseException as fault:
            _pass_on_interrupt(fault)
            self.faults.note(self._hidden(fault), "it may have kept what it was sent")
