"""The interface of an alert, and the message that it posts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gradtrack.support.redact import redact


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """An issue that has opened: its run, the pair of model and optimizer, its step, and the issue as plain data."""

    run_id: str
    run_dir: str | None
    source: str
    step: int
    time: float
    issue: Mapping[str, Any]

    @property
    def text(self) -> str:
        """Return the message in words: what is wrong and where, what to do, and in which run."""
        issue = self.issue
        where = f" at {issue['layer']}" if issue.get("layer") else ""
        advice = f"\n{issue['recommendation']}" if issue.get("recommendation") else ""
        pair = f" of {self.source}" if self.source else ""
        return (
            f"{issue.get('severity')} {issue.get('issue_type')}{where}: {issue.get('message', '')}{advice}"
            f"\nRun {self.run_id}, step {self.step}{pair}"
        )

    def to_plain(self) -> dict[str, Any]:
        """Return the message as plain data."""
        return {**asdict(self), "text": self.text}


class Alert(ABC):
    """A place where an issue is posted when it opens.

    An alert is one file with one class, and `send` is all that it must have. It runs on a thread of the alert's own, so
    it may block or raise without slowing or stopping the training. After `PermanentBackendError` a message is given up;
    after any other exception it comes again, for a few minutes.
    """

    @abstractmethod
    def send(self, message: Message) -> None:
        """Post a message."""

    def close(self) -> None:
        """Let go of connections; no message follows."""

    def hide(self, text: str) -> str:
        """Return a text on a fault without this alert's secrets."""
        return redact(text)
