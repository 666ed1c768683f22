"""The two ends of a group meet over gloo here; the server's requests are answered by a thread."""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta

import httpx
import pytest
import torch
import torch.distributed as dist

from smopd.engine.remote.servers import ServerUnavailable
from smopd.engine.remote.weight_group import WeightGroup, address_towards
from smopd.engine.weights.group import TRAINER, join, received

CPU = torch.device("cpu")
PART = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(7)}


class Server:
    """Workers behind the endpoints that a sync asks; `refuses` names one that answers by status 500."""

    def __init__(self, workers: int = 1, refuses: str = "", absent: bool = False):
        self.workers, self.refuses, self.absent = workers, refuses, absent
        self.held = [{} for _ in range(workers)]
        self.groups = [None] * workers
        self.listening = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # whom address_towards can reach
        url = f"http://127.0.0.1:{self.listening.port}"
        self.client = httpx.Client(base_url=url, transport=httpx.MockTransport(self.answer))
        self.client.url = url  # as the client of ours has it

    def answer(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, request.content and json.loads(request.content)
        if path == self.refuses:
            return httpx.Response(500, text="no room")
        if path == "/get_world_size":
            return httpx.Response(200, json={"world_size": self.workers})
        if self.absent:
            time.sleep(0.5)
            raise httpx.ConnectError("gone")
        act = self.join if path == "/init_weight_transfer_engine" else self.receive
        threads = [
            threading.Thread(target=act, args=(worker, *body.values())) for worker in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return httpx.Response(200, json={})

    def join(self, worker: int, info: dict) -> None:
        store = dist.TCPStore(info["address"], info["port"], info["size"], timeout=timedelta(seconds=20))
        waits = (info["join_seconds"], info["seconds"])
        self.groups[worker] = join(store, info["backend"], TRAINER + 1 + worker, info["size"], *waits)

    def receive(self, worker: int, info: dict) -> None:
        found = received(self.groups[worker], info["names"], info["dtypes"], info["shapes"], CPU)
        self.held[worker].update(found)


@pytest.mark.parametrize("workers", [1, 3])
def test_every_worker_gets_every_tensor(workers):
    server = Server(workers)
    group, joined = WeightGroup.meet(server.client, CPU, 20.0, 20.0)
    assert joined.is_success
    for part in (PART, {"d": torch.zeros(0, 4)}):
        assert group.send(server.client, part).is_success
        for held in server.held:
            for name, value in part.items():
                assert held[name].dtype == value.dtype
                torch.testing.assert_close(held[name], value, rtol=0, atol=0)


def test_a_server_that_refuses_is_away_with_its_reason():
    with pytest.raises(ServerUnavailable, match="status 500: no room"):
        WeightGroup.meet(Server(refuses="/init_weight_transfer_engine").client, CPU, 20.0, 20.0)
    with pytest.raises(ServerUnavailable, match="500 Internal Server Error"):
        WeightGroup.meet(Server(refuses="/get_world_size").client, CPU, 20.0, 20.0)
    server = Server(refuses="/update_weights")
    group, _ = WeightGroup.meet(server.client, CPU, 20.0, 20.0)
    with pytest.raises(ServerUnavailable, match="status 500: no room"):
        group.send(server.client, PART)


def test_a_server_that_goes_is_away_at_once():
    start = time.monotonic()
    with pytest.raises(ServerUnavailable, match="ConnectError: gone"):
        WeightGroup.meet(Server(absent=True).client, CPU, 60.0, 60.0)
    assert time.monotonic() - start < 30.0


def test_the_address_is_the_one_that_the_server_sees():
    server = Server()
    assert address_towards(server.client.url) == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        address_towards("http://127.0.0.1:9")
