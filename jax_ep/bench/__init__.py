"""Times dispatch and combine on this machine's devices, beside the floor of the link and plain JAX.

    jax-ep bench --tokens 8,32,128 --wire none,fp8 --json rows.json --plot pairs.png
    jax-ep bench --report FOLDER

In several processes (started by jax-ep launch, srun or mpirun), the bench measures the devices of all processes. A time
on the host's clock is then the time of the slowest process, and process 0 reports.

Method: one jitted executable runs a chain of dependent dispatch -> combine pairs. The experts compute nothing: they
return the rows that they get. If this would be a cast of fp8 rows, they return an array that was made before. All
numbers are chosen so that no step rounds. So the result must equal the input, bit for bit, and the last dispatch must
have delivered each row to its expert.

Each row of the JSON file holds a `Case` (tokens are per rank) and the measurements. Times are in microseconds. null
means that a value cannot be measured here:

    pair_us                              from the start of a pair to the start of the next pair, on the GPUs' time lines
                                         (from a profiler trace, with CUDA graphs): the mean over a chain, then the
                                         median over executions and ranks
    pair_us_fastest_rank, pair_us_slowest_rank   the same for one rank
    pair_us_median, pair_us_p95          the median and the 95th percentile of all single pairs
    dispatch_us, combine_us              all GPU work of the operation: its kernel, and everything until the next kernel
    wall_pair_us                         on the host's clock: the median of nine samples. A sample is ten executions,
                                         enqueued without waiting, divided by their number of pairs
    wall_waiting_pair_us                 the same if the host waits for each execution
    grad_*                               with --grad: the same for the backward pass of a pair. All other values are
                                         then of a differentiated call, which also zeroes padding (zero_pad)
    lax_pair_us, lax_ragged_pair_us      on the host's clock, with lax.all_to_all (padded) and lax.ragged_all_to_all
    floor_dispatch_us, floor_combine_us  the time that the link needs: a push of one row per token and rank, and a
                                         barrier; null in several processes, because one process must push for all
    floor_pair_us                        the sum of the two
    arena_bytes                          device memory that the group holds on each rank, outside XLA's memory
    processes, nodes                     the numbers of processes and nodes. A node is a host, or JAX_EP_NODE_SIZE ranks
    transport                            "nvlink" if all ranks store into each other's memory, "nvshmem" if ranks reach
                                         other nodes over a network, null if XLA chooses
    network_rows, network_bytes          with nvshmem: the rows, and their bytes, that a rank sends to other nodes in a
                                         pair. Each row is a message. The values are of the rank that sends most
    checked                              true if all results were right

`cases.Case` describes what to time. An `exchanges.Exchange` is a way to move tokens. `timing.time_forward` runs it, and
`timeline.time_line` reads its trace. `__main__.measure` makes a row of the results. `options.mismatches` checks the
options before the bench measures anything. `run_page.write` writes the page of --report.
"""
