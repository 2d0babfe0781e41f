"""What nobody may read later. Settings are kept with every version, in Prefect, MLflow, reports and run folders, so
what is secret is given in the environment, and never becomes one of them."""

import os
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

WHY = (
    "settings are kept with versions, in Prefect and in MLflow, where others read them: put it in an environment "
    "variable of the worker and, where something must know which, name that variable here"
)
SHORT = 8  # characters; the value of a variable below that is found in other words by chance

# what keys and flags are called that hold a secret; `api_key_var`, `eos_token` and `max_tokens` do not
_NAME = re.compile(
    r"(^|[-_.])((api|access|secret|private|auth)[-_]?key|secret|password|passwd|passphrase|credentials?|authorization"
    r"|(access|api|auth|bearer|hf|hub|refresh|session|security)[-_]?token)$|^(token|bearer)$",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH_STRING)$", re.IGNORECASE)
_VALUE = re.compile(
    r"://[^/\s@]+@"  # a URL with a user or password
    r"|\bhf_\w{20,}|\bsk-[\w-]{20,}|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_\w{30,}|\bxox[abprs]-[\w-]{10,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_FLAG = re.compile(r"--?(?P<name>[\w.-]+)(=(?P<value>.+))?", re.DOTALL)


def secret_variables() -> dict[str, str]:
    """The variables of this process's environment that hold a secret, going by their names."""
    return {name: value for name, value in os.environ.items() if is_secret_variable(name)}


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable of this name holds a secret."""
    return _VARIABLE.search(name) is not None


def find(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Where settings (JSON: dicts, lists, scalars) hold a secret: the path of each, and by what it was known. A secret
    is the value of a key or flag that is called so, a form that tokens and URLs with passwords have, or the value of
    one of `secret_variables`. What is no JSON, such as a section that was validated before, is passed over."""
    known = {name: value for name, value in secret_variables().items() if len(value) >= SHORT and value[0] != "/"}
    yield from _find(values, path, known)


def shown(url: str) -> str:
    """`url` without user, password and query, for messages and pages."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _find(value: Any, path: tuple[str, ...], known: dict[str, str]) -> Iterator[tuple[tuple[str, ...], str]]:
    if path and _NAME.search(path[-1]) and value not in (None, "", True, False):
        yield path, "its name is that of a secret"
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _find(one, (*path, str(key)), known)
    elif isinstance(value, list | tuple):
        for at, one in enumerate(value):
            flag = _FLAG.fullmatch(one) if isinstance(one, str) else None
            if flag and _NAME.search(flag["name"]) and (flag["value"] or _is_argument(value[at + 1 : at + 2])):
                yield (*path, str(at)), f"--{flag['name']} takes a secret"
            else:
                yield from _find(one, (*path, str(at)), known)
    elif isinstance(value, str):
        if _VALUE.search(value):
            yield path, "it has the form of a secret"
        elif variable := next((name for name, secret in known.items() if secret in value), None):
            yield path, f"it holds the value of {variable}"


def _is_argument(following: list[Any]) -> bool:
    return bool(following) and not str(following[0]).startswith("-")
