"""The smallest program that runs dispatch and combine over the GPUs of several processes. Use it to test a set-up.

jax-ep launch -n 4 python examples/multihost.py     # on this machine
srun python examples/multihost.py                   # under Slurm; mpirun works in the same way
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep as ep

T, H, E, K = 16, 512, 32, 4  # tokens per device, channels, experts, experts per token

jax.distributed.initialize()  # Slurm, Open MPI or jax-ep launch describes the processes
mesh = Mesh(jax.devices(), ("ep",))  # jax.make_mesh refuses the GPUs of several hosts
sharding = NamedSharding(mesh, P("ep"))

with ep.Group(mesh, num_experts=E, top_k=K, hidden=H, max_tokens_per_rank=T) as group:

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
    def there_and_back(x, topk_idx):
        recv = ep.dispatch(x, topk_idx, group=group, layout="ragged")
        return ep.combine(recv.x, recv)

    @partial(jax.jit, out_shardings=sharding)  # each process makes the part of its own devices
    def inputs(key):
        scores = jax.random.normal(key, (mesh.size * T, E))
        return jax.random.normal(key, (mesh.size * T, H), jnp.bfloat16), jax.lax.top_k(scores, K)[1]

    x, topk_idx = inputs(jax.random.key(0))
    out = there_and_back(x, topk_idx)
    error = jnp.linalg.norm((out - K * x).astype(jnp.float32)) / jnp.linalg.norm((K * x).astype(jnp.float32))
    print(
        f"process {jax.process_index()} of {jax.process_count()}: {len(mesh.local_devices)} of {mesh.size} devices, "
        f"{group.backend} backend, relative error {error.item():.1e}"
    )
    group.check()
