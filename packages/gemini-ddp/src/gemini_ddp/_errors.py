"""Errors of this package."""

from __future__ import annotations


class ZeroDDPError(RuntimeError):
    """A call that does not fit the state of a wrapped model."""
