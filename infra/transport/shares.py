"""Weights divided among the ranks of a trainer, so that each sends its own share over its own link."""

from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import parse_qs, urlsplit

import torch

from infra.transport.base import Published
from infra.transport.flat import flat_bytes

_BETWEEN = " "


def own(named_tensors: Iterable[tuple[str, torch.Tensor]], rank: int, world: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of the tensors that `rank` of `world` sends: each goes to the rank with the fewest bytes so far.

    All of them are taken, since gathering one is everybody's work.
    """
    load = [0] * world
    for name, tensor in named_tensors:
        lightest = load.index(min(load))
        load[lightest] += tensor.nbytes
        if lightest == rank:
            yield name, tensor


def joined(shares: Sequence[Published]) -> Published:
    """One publication of what the ranks published, the shares one after the other. It comes from the first rank."""
    start, params, locations = 0, [], []
    for share in shares:
        params += [meta.model_copy(update={"offset": meta.offset + start}) for meta in share.params]
        stop = start + flat_bytes(share.params)
        locations.append(f"{share.location}&start={start}&stop={stop}")
        start = stop
    return shares[0].model_copy(
        update={
            "location": _BETWEEN.join(locations),
            "params": params,
            "publish_s": max(share.publish_s for share in shares),
        }
    )


def parts(published: Published) -> list[tuple[str, int, int]]:
    """(location, start, stop): which bytes come from where. One part where one rank sends all."""
    found = []
    for location in published.location.split(_BETWEEN):
        said = parse_qs(urlsplit(location).query)
        start = int(said.get("start", ["0"])[0])
        found.append((location, start, int(said["stop"][0]) if "stop" in said else flat_bytes(published.params)))
    return found
