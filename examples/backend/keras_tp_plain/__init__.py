"""A backend of keras_tp outside of keras_tp: plain JAX, in one process."""
