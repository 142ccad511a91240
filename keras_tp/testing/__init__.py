"""The tests that every backend has to pass.

    python -m keras_tp.testing --backend jax

They are written against the backend interface, and are installed with the
package. A backend that cannot do something says so in its `conformance.py`.
"""
