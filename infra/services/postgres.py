"""PostgreSQL for the books of Prefect and MLflow, with data of its own below Lockstep's home."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

from infra.services import secret
from infra.services.home import home
from infra.services.record import Record
from infra.services.supervise import LOOPBACK, ServiceError

PORT = 5432
USER, OWNER = "lockstep", "postgres"  # of the databases, and of the server
DATABASES = ("prefect", "mlflow")
ACCOUNT = "postgres"  # of the operating system: PostgreSQL refuses to run as root
CONNECT_S = 5
DEBIAN = Path("/usr/lib/postgresql")  # a folder for each version, none of which is in PATH
HINT = "`apt-get install postgresql` gets it on Debian and Ubuntu; elsewhere put its bin folder in PATH"


def binary(name: str) -> str:
    """The path of one of PostgreSQL's programs. Raises ServiceError where it is not installed."""
    versions = sorted(DEBIAN.glob(f"*/bin/{name}"), key=lambda path: float(path.parts[-3]))
    found = str(versions[-1]) if versions else shutil.which(name)
    if not found:
        raise ServiceError(f"the profile team needs PostgreSQL, which is not installed here: {HINT}")
    return found


def command(port: int) -> list[str]:
    """What runs the server on loopback at `port`."""
    settings = {
        "listen_addresses": LOOPBACK,
        "port": port,
        "unix_socket_directories": "",
        "max_connections": 100,
        "shared_buffers": "64MB",
    }
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    return [*_unprivileged(), binary("postgres"), "-D", str(_data()), *options]


def prepare() -> None:
    """Make the data folder where there is none, and end what a killed server left at work on it."""
    passwords()
    if _data().is_dir():
        _end_orphans()
        return
    initdb, folder = binary("initdb"), _data().parent
    scratch, password = folder / "new", folder / "password"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(scratch, ignore_errors=True)
    password.unlink(missing_ok=True)
    with open(os.open(password, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(_password_of(OWNER))
    if os.geteuid() == 0:
        account = _account()
        for path in (folder, password):
            os.chown(path, account.pw_uid, account.pw_gid)
    done = subprocess.run(
        [*_unprivileged(), initdb, "-D", scratch, "-U", OWNER, f"--pwfile={password}", "--encoding=UTF8"]
        + ["--locale=C.UTF-8", "--auth=scram-sha-256"],
        capture_output=True,
        text=True,
        cwd="/",
    )
    password.unlink()
    if done.returncode:
        raise ServiceError(f"PostgreSQL cannot make its data folder: {done.stderr.strip().splitlines()[-1]}")
    os.rename(scratch, _data())


def ready(record: Record) -> bool:
    """Whether the server takes connections. The databases are made when they are not there yet.

    Raises ServiceError when it does not know the passwords of this home.
    """
    import psycopg

    try:
        with _connect(record, "postgres") as link:
            _make_databases(link)
    except psycopg.OperationalError as error:
        if "password authentication failed" in str(error):
            raise ServiceError(
                f"PostgreSQL refuses the password in {passwords()}: bring back the file that was made with {_data()}"
            ) from None
        return False  # still starting
    return True


def passwords() -> Path:
    """The password file, in libpq's format: PGPASSFILE of whoever connects."""
    return secret.file("pgpass", lambda: "".join(f"*:*:*:{user}:{secret.make()}\n" for user in (OWNER, USER)))


def url(record: Record, driver: str, database: str) -> str:
    """The SQLAlchemy address of a database, without a password."""
    return f"postgresql+{driver}://{USER}@{LOOPBACK}:{record.port}/{database}"


def _make_databases(link) -> None:
    from psycopg import sql

    if not link.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [USER]).fetchone():
        password = _password_of(USER).encode()
        digest = link.pgconn.encrypt_password(password, USER.encode(), b"scram-sha-256").decode()
        names = (sql.Identifier(USER), sql.Literal(digest))
        link.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(*names))
    held = {name for (name,) in link.execute("SELECT datname FROM pg_database").fetchall()}
    for database in set(DATABASES) - held:
        names = (sql.Identifier(database), sql.Identifier(USER))
        link.execute(sql.SQL("CREATE DATABASE {} OWNER {}").format(*names))


def _connect(record: Record, database: str):
    import psycopg

    return psycopg.connect(
        host=LOOPBACK,
        port=record.port,
        user=OWNER,
        dbname=database,
        passfile=str(passwords()),
        connect_timeout=CONNECT_S,
        options="-c log_min_error_statement=panic",  # a statement that fails may hold a password's digest
        autocommit=True,
    )


def _password_of(user: str) -> str:
    lines = (line.rstrip("\n").split(":") for line in passwords().open())
    return next(password for *_, name, password in lines if name == user)


def _unprivileged() -> Sequence[str]:
    """What runs a program as `ACCOUNT` when we are root. It may still pass through folders of root's, as data below a
    home in /root needs."""
    if os.geteuid() != 0:
        return []
    account = _account()
    ids = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
    closed = [path for path in _data().parents if path.exists() and not path.stat().st_mode & 0o001]
    may = [f"--{kind}-caps=+dac_override" for kind in ("inh", "ambient")] if closed else []
    return ["setpriv", *ids, *may, "--"]


def _account() -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(ACCOUNT)
    except KeyError:
        raise ServiceError(f"PostgreSQL refuses to run as root and there is no account {ACCOUNT!r}: add it") from None


def _end_orphans() -> None:
    """The processes of a killed server end by themselves, but not before they notice, and the next one needs the data
    for itself."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.name() == "postgres" and process.cwd() == str(_data().resolve()):
                process.kill()
                left.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # gone meanwhile, or another user's, so not ours
    psutil.wait_procs(left, timeout=10)
    (_data() / "postmaster.pid").unlink(missing_ok=True)  # it takes a dead parent that nobody reaps for a live one


def _data() -> Path:
    return home() / "postgres" / "data"
