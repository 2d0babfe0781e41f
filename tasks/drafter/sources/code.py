"""Requests to write functions that the running Python's standard library documents."""

import importlib
import inspect

from tasks.drafter.sources.base import Conversation, user

MODULES = """
base64 bisect calendar cmath colorsys copy csv datetime difflib fnmatch fractions functools glob heapq html
inspect ipaddress json keyword linecache math mimetypes ntpath numbers operator os posixpath pprint quopri
random re reprlib shlex shutil socket statistics string struct tempfile textwrap threading time timeit
tokenize types unicodedata urllib.parse uuid weakref zipfile zlib
"""


def conversations() -> list[Conversation]:
    """One function each."""
    found = {}
    for module_name in MODULES.split():
        module = importlib.import_module(module_name)
        for name, function in sorted(vars(module).items()):
            if name.startswith("_") or not inspect.isroutine(function):
                continue
            summary = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
            if 30 <= len(summary) <= 400 and summary not in found:
                try:
                    signature = str(inspect.signature(function))
                except ValueError:  # some builtins have none
                    signature = "(...)"
                if " at 0x" not in signature:  # an address differs in every process
                    found[summary] = f"Write a Python function `{name}{signature}`. {summary}"
    return [user(request) for request in found.values()]
