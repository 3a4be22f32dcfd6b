"""Twins of Hopper's instructions."""

from __future__ import annotations

GROUP_SIZES: dict[type, int] = {}
"""Instructions that a group of so many threads executes, waiting for other groups."""
