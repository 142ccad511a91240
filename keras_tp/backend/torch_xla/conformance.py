"""What this backend cannot do of the tests that every backend has to pass."""

KERAS_BACKEND = "torch"

CANNOT = {}
