"""What the conformance suite cannot ask of TensorFlow."""

CANNOT = {
    "test_computing_layers_again_adds_no_collective": (
        "what TensorFlow computes again has its sums again"
    ),
}
