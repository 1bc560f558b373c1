"""Two processes of jax.distributed on CPU devices; this file is also the program that each of them runs."""

import os
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep as ep
import oracle
from helpers import COMBINE_BOUND, assert_same_bits, random_rows, spmd
from shapes import SMALL, make_inputs, np_dtype

NUM_PROCESSES = 2
TIMEOUT_S = 240


@pytest.mark.parametrize("devices_per_process", [2, 4])
def test_two_processes(devices_per_process, tmp_path):
    """Each compares what its own devices got with the oracle's answer for all of them."""
    flags = f"--xla_force_host_platform_device_count={devices_per_process}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    coordinator = f"localhost:{free_port()}"
    logs = [tmp_path / f"process_{i}.log" for i in range(NUM_PROCESSES)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, coordinator, str(i)],
            env=environment,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for i, log in enumerate(logs)
    ]
    try:
        codes = wait_until_all_end_or_one_fails(processes)
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * NUM_PROCESSES, "\n".join(log.read_text() for log in logs)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def wait_until_all_end_or_one_fails(processes) -> list[int | None]:
    """Exit codes. A process whose peer has failed would wait for it, so this does not."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            break
        time.sleep(0.1)
    return codes


def main(coordinator: str, process_id: int) -> None:
    jax.distributed.initialize(coordinator, num_processes=NUM_PROCESSES, process_id=process_id)
    assert jax.process_count() == NUM_PROCESSES
    mesh = jax.sharding.Mesh(jax.devices(), ("ep",))
    for layout in ("expert", "ragged"):
        check(mesh, layout)


def check(mesh: jax.sharding.Mesh, layout: str) -> None:
    """dispatch bit for bit; combine and a gradient within combine's bound."""
    inputs = make_inputs(SMALL, mesh.size, "uneven")
    expected = oracle.dispatch(*inputs, num_experts=SMALL.num_experts, layout=layout)
    route = expected.route
    y = random_rows(route, SMALL.hidden, SMALL.dtype)
    group = ep.Group(
        mesh,
        num_experts=SMALL.num_experts,
        top_k=SMALL.top_k,
        hidden=SMALL.hidden,
        max_tokens_per_rank=SMALL.tokens,
        dtype=np_dtype(SMALL.dtype),
        backend="reference",
    )

    def step(y, x, topk_idx, topk_weights):
        def rows(x):
            recv = ep.dispatch(x, topk_idx, topk_weights, group=group, layout=layout, zero_pad=True)
            return recv.x, recv

        _, transpose, recv = jax.vjp(rows, x, has_aux=True)
        return recv, ep.combine(y, recv), transpose(y)[0]

    recv, out, dx = jax.jit(spmd(step, mesh))(*(shard(a, mesh) for a in (y, *inputs)))
    assert_local_bits(recv.x, expected.x)
    assert_local_bits(recv.weights, expected.weights)
    assert_local_bits(recv.counts, route.counts)
    assert_local_bits(recv.num_dropped, route.num_dropped)
    assert_local_sum(out, *oracle.combine(y, expected.weights, route))
    assert_local_sum(dx, *oracle.combine(y, None, route))


def shard(array: np.ndarray, mesh: jax.sharding.Mesh) -> jax.Array:
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ep"))
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def assert_local_bits(actual: jax.Array, expected: np.ndarray) -> None:
    for local in actual.addressable_shards:
        assert_same_bits(local.data, expected[local.index])


def assert_local_sum(actual: jax.Array, total: np.ndarray, magnitude: np.ndarray) -> None:
    for local in actual.addressable_shards:
        error = np.linalg.norm(np.asarray(local.data.astype(jnp.float32)) - total[local.index])
        assert error <= COMBINE_BOUND[SMALL.dtype] * np.linalg.norm(magnitude[local.index])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
