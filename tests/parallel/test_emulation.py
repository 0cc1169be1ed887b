"""Emulated nodes: what a network costs, and an engine over them."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.kernels.dispatch.wire_format import WireFormat
from fulgurite.models.moe import Experts
from fulgurite.parallel.emulation import EmulatedNetwork, network_from_environment, parse_network
from fulgurite.plan.cluster import LinkSpeeds
from fulgurite.plan.step_time import (
    DispatchShape,
    count_dispatch_traffic,
    predict_dispatch_seconds,
)
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
from tests.parallel import emulation_cases as cases
from tests.parallel.checkpoints import save, save_tokenizer
from tests.parallel.dispatch import hierarchical_cases
from tests.parallel.engine_cases import PLAIN
from tests.parallel.test_load_shard import fields_of

LENGTHS = (1, 9, 30, 4)
FAST = "latency=50us,bandwidth=10GB/s"


def test_a_network_is_written_with_units():
    network = parse_network("latency=100us, bandwidth=2.5GB/s,loss=1e-2,retransmission=3ms,seed=7")
    assert math.isclose(network.latency, 1e-4) and network.bandwidth == 2.5e9
    assert (network.loss, network.seed) == (0.01, 7) and network.retransmission == 0.003
    assert network_from_environment() is None
    for text in ("", "latency=5", "latency=5GB/s", "delay=5s", "latency=1s;loss=0", "loss=x"):
        with pytest.raises(ArgumentError, match="is not a property of an emulated network"):
            parse_network(text)
    for text in ("loss=1", "bandwidth=0B/s"):
        with pytest.raises(ArgumentError, match="loss in"):
            parse_network(text)


def test_a_transfer_takes_latency_and_the_larger_direction():
    network = EmulatedNetwork(latency=0.001, bandwidth=1e6)
    remote = [False, True, True]
    assert math.isclose(network.transfer(0, remote, [9, 1000, 500], [9, 0, 4000]), 0.005)
    assert network.transfer(0, remote, [10**9, 0, 0], [10**9, 0, 0]) == 0  # inside the node
    traffic = network.collect_traffic()
    assert (traffic.messages, traffic.bytes_sent, traffic.bytes_received) == (2, 1500, 4000)
    assert network.collect_traffic().messages == 0


def test_losses_are_seeded_and_cost_a_retransmission():
    def lost(seed: int, rank: int) -> list[float]:
        network = EmulatedNetwork(loss=0.5, retransmission=1e-5, seed=seed)
        return [network.transfer(rank, [True] * 4, [1] * 4, [1] * 4) for _ in range(30)]

    first = lost(0, 0)
    assert first == lost(0, 0) != lost(1, 0)
    assert first != lost(0, 1)
    assert 30 < round(sum(first) / 1e-5) < 90  # of 120 messages


def test_collectives_wait_for_the_network(ranks):
    network = EmulatedNetwork(latency=0.02, bandwidth=1e5)
    for found in ranks(4).run(cases.time_collectives, network):
        wanted = {"all-to-all": 2000, "inside": 0, "all-gather": 8000, "all-reduce": 4000}
        for name, size in wanted.items():
            seconds, traffic = found[name]
            assert traffic.bytes_sent == size, name
            least = 0.02 + size / 1e5 if size else 0.0
            assert least <= seconds < least + 0.5, name
            assert math.isclose(traffic.seconds, least)


# ---- predictions -----------------------------------------------------------------------------------


def compare_with_prediction(pool, num_ranks: int, num_nodes: int) -> dict[str, dict[str, float]]:
    """By transport, over the prediction: wall seconds, those of the network, and its bytes."""
    tokens, hidden, top_k, bandwidth, latency = 64, 512, 4, 2e6, 0.005
    links = LinkSpeeds(link=1e12, network=bandwidth, link_latency=0.0, network_latency=latency)
    args = (num_ranks, num_nodes, tokens, hidden, top_k, (latency, bandwidth))
    by_rank = pool.run(hierarchical_cases.count_traffic, *args)
    found = {}
    for transport in ("all_to_all", "hierarchical"):
        shape = DispatchShape(
            tokens, top_k, 4 * num_ranks, 4 * hidden, num_ranks, num_ranks // num_nodes
        )
        traffic = count_dispatch_traffic(shape, transport)
        seconds = 2 * predict_dispatch_seconds(traffic, links)
        totals = [(one[transport][0], one[transport][1]) for one in by_rank]
        found[transport] = {
            "wall": sum(wall for wall, _ in totals) / num_ranks / seconds,
            "network": sum(one.seconds for _, one in totals) / num_ranks / seconds,
            "bytes": sum(one.bytes_sent for _, one in totals)
            / num_ranks
            / (2 * traffic.network_bytes),
        }
    return found


def check_prediction(found: dict[str, dict[str, float]]) -> None:
    """Random routes, counts, slots and their latencies come on top; so does the work of the host."""
    for transport, over in found.items():
        print(transport, {name: round(value, 3) for name, value in over.items()})
        assert 0.95 < over["bytes"] < 1.1, transport
        assert 0.95 < over["network"] < 1.25, transport
        assert over["network"] <= over["wall"] < 5, transport  # ranks share the cores


def test_two_nodes_of_two_take_as_long_as_predicted(ranks):
    check_prediction(compare_with_prediction(ranks(4), 4, 2))


@pytest.mark.slow  # eight processes
def test_four_nodes_of_two_take_as_long_as_predicted(ranks):
    check_prediction(compare_with_prediction(ranks(8), 8, 4))


# ---- an engine over emulated nodes -----------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    fields = fields_of("qwen3_moe")
    path = save(tmp_path_factory.mktemp("qwen3_moe"), fields)
    save_tokenizer(path, int(str(fields["vocab_size"])))
    return path


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 97, (n,), generator=generator).tolist() for n in LENGTHS]


PARAMS = [SamplingParams(max_tokens=6 + n % 3, ignore_eos=True) for n in range(len(LENGTHS))]


def tokens_of_one_rank(path: Path, wire: str, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rounding oracle: one rank whose experts get tokens that went through the wire format."""
    forward = Experts.forward

    def rounded(self, x_TD, routes):
        format = WireFormat(wire, x_TD.shape[1])
        return forward(self, format.unpack(format.pack(x_TD), x_TD.dtype), routes)

    with monkeypatch.context() as patch:
        if wire != "auto":
            patch.setattr(Experts, "forward", rounded)
        llm = LLM(path, **PLAIN)
        return [one.token_ids for one in llm.generate(prompts(), PARAMS)]


def check_engine(pool, path, shape, nodes, wire, monkeypatch) -> None:
    options = {"nodes": nodes, "wire": wire}
    found = pool.run(cases.generate, path, shape, prompts(), PARAMS, options, FAST)
    assert found[0][0] == tokens_of_one_rank(path, wire, monkeypatch)
    size = shape[2] // nodes
    for _, dispatcher, messages in found:
        assert dispatcher == f"hierarchical dispatcher, {nodes} nodes x {size} ranks"
        assert messages > 0


@pytest.mark.parametrize("wire", ["auto", "bf16", "fp8", "nvfp4"])
def test_two_nodes_of_two_generate_the_tokens_of_one_rank(ranks, folder, wire, monkeypatch):
    check_engine(ranks(4), folder, (4, 1, 4), 2, wire, monkeypatch)


def test_tensor_parallel_attention_inside_nodes(ranks, folder, monkeypatch):
    check_engine(ranks(4), folder, (2, 2, 4), 2, "auto", monkeypatch)


@pytest.mark.slow  # eight processes
@pytest.mark.parametrize("wire", ["auto", "fp8", "nvfp4"])
def test_four_nodes_of_two_generate_the_tokens_of_one_rank(ranks, folder, wire, monkeypatch):
    check_engine(ranks(8), folder, (8, 1, 8), 4, wire, monkeypatch)


# ---- torchrun --------------------------------------------------------------------------------------

PROGRAM = """
import sys
from fulgurite.parallel import Mesh
with Mesh(expert=4, timeout=60) as mesh:
    print(f"rank {mesh.rank}: nodes {mesh.expert.nodes}\\n", end="", flush=True)
"""


@pytest.mark.slow  # two torchrun agents
def test_two_torchrun_agents_are_two_nodes(tmp_path):
    """The two-host recipe of the docs, with both hosts on this machine."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "recipe",
        "--local-addr", "127.0.0.1", str(script),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    agents = [
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    text = ""
    for agent in agents:
        output, errors = agent.communicate(timeout=240)
        assert agent.returncode == 0, errors[-3000:]
        text += output
    assert all(f"rank {rank}: nodes (0, 0, 1, 1)" in text for rank in range(4)), text
