"""What the conformance suite cannot ask of torch_xla."""

KERAS_BACKEND = "torch"
CANNOT = {
    "test_activations_split_along_the_sequence": (
        "activations are whole along the sequence, and a warning says so"
    ),
}
