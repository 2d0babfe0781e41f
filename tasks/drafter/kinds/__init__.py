"""Kinds of drafters, one module each, named as in `drafter.kind`."""

from importlib import import_module

from tasks.drafter.kinds.base import Kind


def kind(name: str) -> Kind:
    """The kind called `name`."""
    return import_module(f"{__name__}.{name}")
