"""The tests of kernels that do not run on emulated GPUs, each with the reason."""

GRAPHS = "CUDA graphs are XLA:GPU's; to kernels they are launches like others"
MEMORY = "it is about the memory of groups without a network; test_network.py is about that of others"
NETWORK = "the emulated network joins the devices of one process: test_network.py"
ORDER = "over a network a process has one GPU, and does not see in which order others run two groups"
COPIES = "XLA:CPU drops optimization barriers, and copies the arrays of a pending call"
PROGRAMS = "it runs a program for users, which offers users' backends only"
RANDOM_RANKS = "it makes groups of any number of ranks, most of which nodes of several ranks do not divide"

# Maps "file::test", or "file::test[value]" for the cases with this parameter value, to the reason.
NOT_EMULATED = {
    "test_bench.py::test_floor_of_the_link": "it measures NVLink",
    "test_bench.py::test_rows_of_the_report": PROGRAMS,
    "test_moe_step.py::test_all_variants_give_the_same_loss_and_gradients": PROGRAMS,
    "test_moe_step.py::test_skewed_routing": PROGRAMS,
    "test_overlap.py::test_all_tokens_come_back": PROGRAMS,
    "test_cuda.py::test_closed_groups_give_their_memory_back": "it asks nvidia-smi",
    "test_cuda.py::test_graphs_give_the_same_bits": GRAPHS,
    "test_cuda.py::test_operands_are_waited_for": "XLA:CPU waits for operands before it calls a handler",
    "test_cuda.py::test_training_gives_the_curve_of_the_reference": "examples offer users' backends only",
    "test_cuda.py::test_xla_adds_nothing_around_the_calls": "it reads the HLO of XLA:GPU",
    "test_doctor.py::test_every_link_is_measured": "it measures NVLink",
    "test_faults.py::test_a_failed_group_returns_poison_and_refuses_work[in_graphs]": GRAPHS,
    "test_faults.py::test_a_program_outlives_its_group[in_graphs]": GRAPHS,
    "test_faults.py::test_more_starts_than_slots": "XLA:CPU drops optimization barriers, so dones run in order",
    "test_faults.py::test_nothing_waits_twice[in_graphs]": GRAPHS,
    "test_multiprocess.py::test_a_layer_over_a_network": NETWORK,
    "test_multiprocess.py::test_a_network_gives_the_same_bits": NETWORK,
    "test_multiprocess.py::test_a_process_that_dies_over_a_network": NETWORK,
    "test_multiprocess.py::test_bench": PROGRAMS,
    "test_multiprocess.py::test_doctor_on_gpus": PROGRAMS,
    "test_multiprocess.py::test_each_rank_on_a_host_of_its_own": NETWORK,
    "test_multiprocess.py::test_groups_over_a_network_again_and_again": NETWORK,
    "test_multiprocess.py::test_order_of_sums_over_a_network": NETWORK,
    "test_multiprocess.py::test_traffic": NETWORK,
    "test_split.py::test_gradients_of_layers_with_checkpoint": COPIES,
    "test_overlap.py::test_gemms_are_those_that_were_asked_for": "it reads the names of XLA:GPU's kernels",
}

# The same for the tests whose groups use an emulated network.
NOT_OVER_NETWORK = {
    "test_call_order.py::test_groups_in_other_order_in_one_program": ORDER,
    "test_call_order.py::test_groups_of_two_threads": ORDER,
    "test_cuda.py::test_an_arena_that_does_not_fit": MEMORY,
    "test_cuda.py::test_memory_bytes": MEMORY,
    "test_doctor.py::test_memory_is_that_of_a_group": MEMORY,
    "test_faults.py::test_ranks_in_different_groups": ORDER,
    "test_handlers.py::test_ranks_in_runs_of_their_own": ORDER,
    "test_observability.py::test_counts_are_those_of_the_routing": "ranks do not see what far ranks have counted",
    "test_routing_fuzz.py::test_random_groups_and_programs[emulated_nodes_of_2]": RANDOM_RANKS,
    "test_routing_fuzz.py::test_random_groups_and_programs[emulated_nodes_of_4]": RANDOM_RANKS,
    "test_routing_fuzz.py::test_wrong_results_are_found": "it is about the test",
}


def reason_not_emulated(file: str, name: str, over_network: bool = False) -> str | None:
    """Why this test does not run emulated, or None. `name` has pytest's values in brackets behind it."""
    function, _, values = name.partition("[")
    entries = [f"{file}::{function}", *(f"{file}::{function}[{value}]" for value in values.rstrip("]").split("-"))]
    reasons = NOT_EMULATED | (NOT_OVER_NETWORK if over_network else {})
    return next((reasons[entry] for entry in entries if entry in reasons), None)
