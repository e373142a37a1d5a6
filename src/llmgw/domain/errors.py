"""Every failure llmgw raises on purpose; anything else that escapes is a bug."""
from __future__ import annotations

from typing import Optional


class LlmgwError(Exception):
    """An expected failure, written for the operator who has to act on it.

    ``message`` says what and why (lower-case start, no full stop, value last);
    ``hint`` is an order a person can carry out.
    """

    reason = "Error"          # one CamelCase word: stable, unique, shown in tables
    exit_code = 1

    def __init__(self, message: str, *, hint: Optional[str] = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(LlmgwError):
    """A configuration file that cannot be used; the message starts with file, line and key."""

    reason = "InvalidConfig"
    exit_code = 78            # EX_CONFIG


class UsageError(LlmgwError):
    """A command line that argparse accepts and llmgw does not."""

    reason = "Usage"
    exit_code = 2


class CheckFailed(LlmgwError):
    """A check ran and found problems."""

    reason = "CheckFailed"
    exit_code = 3


class TryAgain(LlmgwError):
    """Nothing is wrong that waiting would not cure."""

    reason = "TryAgain"
    exit_code = 75            # EX_TEMPFAIL


class ParseError(LlmgwError):
    """Foreign bytes that do not have the shape their format demands."""

    reason = "Malformed"


class RebootNeeded(ParseError):
    """What a driver says between its update and the next reboot."""

    reason = "RebootNeeded"


class DigestMismatch(LlmgwError):
    """Bytes whose sha256 is not the one that was named."""

    reason = "DigestMismatch"

    def __init__(self, name: str, *, expected: str, actual: str) -> None:
        super().__init__(f"{name}: sha256 is {actual}, expected {expected}",
                         hint="nothing of it was kept; fetch or import the file again")
        self.expected = expected
        self.actual = actual


class UnsafeArchive(LlmgwError):
    """An archive with a member that would land, or point, outside its folder."""

    reason = "UnsafeArchive"


class DownloadFailed(LlmgwError):
    """A transfer that did not bring the whole file."""

    reason = "DownloadFailed"


class DiskFull(LlmgwError):
    """No space left for what was to be written."""

    reason = "DiskFull"


class StorageError(LlmgwError):
    """A file or folder that cannot be read or written as needed."""

    reason = "StorageError"


class CommandFailed(LlmgwError):
    """A program that could not be run, ended badly or did not end in time."""

    reason = "CommandFailed"


class RequirementMissing(LlmgwError):
    """This machine lacks something that an engine needs."""

    reason = "RequirementMissing"


class PackagesFailed(LlmgwError):
    """The package manager installed nothing; ``waits``: it may well do so later."""

    reason = "PackagesFailed"

    def __init__(self, message: str, *, hint: Optional[str] = None, waits: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.waits = waits


class EngineFailed(LlmgwError):
    """An engine that did not start, died, or does not answer as it must."""

    reason = "EngineFailed"


class PortTaken(LlmgwError):
    """Somebody else listens where llmgw was told to."""

    reason = "PortTaken"


class AlreadyRunning(LlmgwError):
    """Another llmgw process owns this data folder."""

    reason = "AlreadyRunning"


class Unreachable(LlmgwError):
    """A server that did not answer: refused, timed out, or cut off."""

    reason = "Unreachable"


class ApiError(LlmgwError):
    """An answer of the control API that says no; carries its HTTP status."""

    reason = "ApiError"

    def __init__(self, message: str, *, status: int, reason: str = "ApiError",
                 hint: Optional[str] = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.reason = reason


class Unauthorized(LlmgwError):
    """No token, or not one that opens this."""

    reason = "Unauthorized"


class Forbidden(LlmgwError):
    """A known token without the role this needs."""

    reason = "Forbidden"


class NotFound(LlmgwError):
    """The named thing does not exist."""

    reason = "NotFound"


class Conflict(LlmgwError):
    """The named thing exists, is in use, or has changed since it was read."""

    reason = "Conflict"


class TooLarge(LlmgwError):
    """More bytes than this place accepts."""

    reason = "TooLarge"


class IllegalTransition(LlmgwError):
    """An event that the state does not know."""

    reason = "IllegalTransition"
