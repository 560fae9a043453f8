"""The one family of errors a caller can meet.

Every error names the values it saw and the way out. All are `ValueError`s, because each is
about something the caller passed in; our own broken invariants are `assert`s instead.
"""

__all__ = ["MeshAttentionError", "MissingPackageError", "PlanError", "PlanTextError"]


class MeshAttentionError(ValueError):
    """Base of all errors that this library raises on purpose."""


class MissingPackageError(MeshAttentionError, ImportError):
    """A package that is not installed is needed; the message has the line that installs it."""


class PlanError(MeshAttentionError):
    """A plan cannot be made from these settings."""


class PlanTextError(MeshAttentionError):
    """A text is not the text form of a plan."""
