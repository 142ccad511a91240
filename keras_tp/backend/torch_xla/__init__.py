"""The backend on torch_xla."""

import os

# Read when torch_xla is imported. XLA warns with each program that another
# partitioner will replace the one that torch_xla uses.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
