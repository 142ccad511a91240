"""What the conformance suite cannot ask of TensorFlow."""

CANNOT = {
    "test_computing_layers_again_adds_no_collective": (
        "what TensorFlow computes again has its sums again"
    ),
}
CANNOT_BETWEEN_PROCESSES = {
    "test_a_trained_model_moves_there_and_back": (
        "DTensor's meshes hold the devices of all processes, so a model "
        "cannot go back to one"
    ),
}
