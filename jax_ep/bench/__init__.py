"""Times dispatch + combine on this machine's devices, next to what the link needs and what plain JAX offers.

    jax-ep bench --tokens 8,32,128 --wire none,fp8 --json rows.json --plot pairs.png

In several processes, as jax-ep launch, srun or mpirun starts them, it measures all of their devices: ranks
are those of all processes, a time on the host's clock is that of the slowest process, and process 0 reports.

Method: a chain of dependent dispatch -> combine pairs is one jitted executable. The experts do nothing: they give back
what they get, or, where that would be a cast of fp8 rows, an array made before. The numbers are chosen such that no
step rounds: what comes out must equal what went in, bit for bit, and the last dispatch must have delivered each row to
its expert.

Each row of the JSON file is a `Case` (tokens are per rank) and what was measured. Times are in microseconds; null
stands for what cannot be measured here:

    pair_us                              from the start of a pair to that of the next, on the GPUs' time lines (of a
                                         profiler's trace, CUDA graphs included): the mean of a chain's, of which the
                                         median over executions and ranks
    pair_us_fastest_rank, pair_us_slowest_rank   the same, of one rank
    pair_us_median, pair_us_p95          the median and the 95th percentile of all single pairs
    dispatch_us, combine_us              all GPU work of the operation: its kernel, and what runs until the next one's
    wall_pair_us                         on the host's clock: the median of nine runs, each of ten executions, one
                                         behind the other as in a loop that waits for none, divided by their pairs
    wall_waiting_pair_us                 the same of executions that the host waits for one by one
    grad_*                               with --grad: the same of a pair's backward pass. All else is then that of a
                                         differentiated call, which zeroes rows that hold no token (zero_pad), too
    lax_pair_us, lax_ragged_pair_us      on the host's clock, with lax.all_to_all (padded) and lax.ragged_all_to_all
    floor_dispatch_us, floor_combine_us  what the link needs: a push of one row per token and rank, and a barrier
    floor_pair_us                        the sum of the two
                                         (null in several processes, as one has to push for all)
    arena_bytes                          device memory that the group holds on each rank, outside XLA's
    processes, nodes                     over which the ranks are spread; a node is a host, or what JAX_EP_NODE_SIZE
                                         makes of one
    transport                            "nvlink" where ranks store into each other's memory, "nvshmem" where those of
                                         other nodes are reached over a network; null: it is left to XLA
    network_rows, network_bytes          with nvshmem: messages, of a row each, that a rank sends to other nodes in a
                                         pair, and their bytes; of the rank with the most
    checked                              whether all results were right

`cases.Case` says what to time, an `exchanges.Exchange` is a way to do it, `timing.time_forward` runs one and
`timeline.time_line` reads its trace; `__main__.measure` makes a row of all. `options.mismatches` checks the options
before anything is measured.
"""
