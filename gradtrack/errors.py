"""The exceptions of gradtrack, in one tree.

```
GradtrackError
├── UsageError              (ValueError)     a call that cannot mean anything
│   ├── ConfigError                          a configuration that cannot be read or is not valid
│   └── SecondBackwardError  (RuntimeError)  a second backward pass where one was expected
├── InputTypeError          (TypeError)      an argument of the wrong type
├── ClosedError             (RuntimeError)   a manager, monitor or backend used after its close
├── NonFiniteGradientError  (ArithmeticError) raised by `nonfinite_action="raise"`
├── PluginError                              a backend or analyzer that cannot be used
│   ├── UnknownPluginError  (ValueError)     no plugin of that name
│   └── MissingExtraError   (ImportError)    a part whose package is not installed
├── BackendError                             a tracker that did not take a record
│   └── PermanentBackendError                trying again cannot help
├── RunDirectoryError       (OSError)        a run directory that cannot be made or written
├── JournalError            (ValueError)     a journal that cannot be read
└── CaptureError            (ValueError)     a captured step that cannot be read, or does not fit a model
```
"""


class GradtrackError(Exception):
    """The base of every error that gradtrack raises."""


class UsageError(GradtrackError, ValueError):
    """A call whose arguments or order are wrong; the text says what to do instead."""


class ConfigError(UsageError):
    """A configuration that cannot be read or is not valid."""


class SecondBackwardError(UsageError, RuntimeError):
    """A second backward pass of one loss, or through a monitor that expects one between two resets."""


class InputTypeError(GradtrackError, TypeError):
    """An argument of the wrong type."""


class ClosedError(GradtrackError, RuntimeError):
    """A manager, monitor or backend that was used after its close."""


class NonFiniteGradientError(GradtrackError, ArithmeticError):
    """Non-finite gradients under `nonfinite_action="raise"`; the text names the worst parameters."""


class PluginError(GradtrackError):
    """A backend or an analyzer that cannot be used."""


class UnknownPluginError(PluginError, ValueError):
    """A name that no plugin has; the text names the nearest one."""


class MissingExtraError(PluginError, ImportError):
    """A part of gradtrack whose package is not installed; `command` installs it."""

    def __init__(self, part: str, package: str, extra: str) -> None:
        self.command = f'pip install "gradtrack[{extra}]"'
        super().__init__(f"{part}: expected the package {package}, which is not installed. Run: {self.command}")


class BackendError(GradtrackError):
    """A tracker that did not take a record; trying again may help."""


class PermanentBackendError(BackendError):
    """A tracker that will never take a record; the journal keeps it."""


class RunDirectoryError(GradtrackError, OSError):
    """A run directory that cannot be made or written."""


class JournalError(GradtrackError, ValueError):
    """A journal that cannot be read."""


class CaptureError(GradtrackError, ValueError):
    """A captured step that cannot be read, or that does not fit the model it is to be replayed with."""
