from setuptools import setup

setup(
    name="keras_tp_plain",
    version="0.1",
    packages=["keras_tp_plain"],
    install_requires=["keras_tp[jax]"],
    # The name of the backend, and the package with its modules.
    entry_points={"keras_tp.backends": ["plain = keras_tp_plain"]},
)
