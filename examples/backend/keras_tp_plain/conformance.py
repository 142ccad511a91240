"""What this backend says of itself to the conformance suite."""

from keras_tp.backend.jax import conformance

KERAS_BACKEND = "jax"
# The name of a test, with its case if it has some, and why it cannot pass.
CANNOT = {
    **conformance.CANNOT,
    "test_computing_layers_again_adds_no_collective": (
        "layers that are computed again add up their outputs again"
    ),
    "test_activations_split_along_the_sequence": (
        "activations are whole along the sequence"
    ),
    "test_the_largest_values_are_found_without_a_gather": (
        "XLA gathers the values of a `top_k`"
    ),
    "test_nothing_is_gathered_that_the_plan_does_not_gather[repeated]": (
        "XLA gathers heads that are repeated if the devices do not divide them"
    ),
}
