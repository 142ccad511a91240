import types

import numpy as np
import pytest

from keras_tp.distribution import state_trees


def model(**groups):
    """Stands in for a model: names of groups to dicts of path to shape."""
    held = {
        kind: [types.SimpleNamespace(path=p, shape=s) for p, s in rows.items()]
        for kind, rows in groups.items()
    }
    optimizer = types.SimpleNamespace(variables=held.pop("optimizer", []))
    return types.SimpleNamespace(name="net", optimizer=optimizer, **held)


def values(**shapes):
    return {path.replace("__", "/"): np.ones(s) for path, s in shapes.items()}


def found(owner, kind, given):
    matched = state_trees._by_own_path(owner, kind, given)
    return {path: value.shape for path, value in matched.items()}


def test_equal_paths_and_a_part_of_them():
    own = model(trainable_variables={"d/kernel": (2, 3), "d/bias": (3,)})
    given = values(d__kernel=(2, 3))
    assert found(own, "trainable_variables", given) == {"d/kernel": (2, 3)}


def test_another_name_of_the_model_and_other_numbers():
    own = model(
        trainable_variables={
            "net/dense_8/kernel": (2, 3),
            "net/dense_10/kernel": (3, 4),
        }
    )
    given = values(dense_1__kernel=(2, 3), dense_2__kernel=(3, 4))
    assert found(own, "trainable_variables", given) == {
        # By number, not by text: 10 comes after 8.
        "net/dense_8/kernel": (2, 3),
        "net/dense_10/kernel": (3, 4),
    }


def test_seed_generators_are_matched_apart_from_weights():
    seed = "seed_generator_{}/seed_generator_state"
    own = model(non_trainable_variables={"n/mean": (3,), seed.format(7): (2,)})
    given = {"n/mean": np.ones(3), seed.format(1): np.ones(2)}
    assert found(own, "non_trainable_variables", given) == {
        "n/mean": (3,),
        seed.format(7): (2,),
    }


@pytest.mark.parametrize(
    "given",
    [values(d__kernel=(3, 2)), values(d__other=(2, 3))],
    ids=["shape", "name"],
)
def test_values_of_another_model(given):
    own = model(trainable_variables={"net/d/kernel": (2, 3)})
    with pytest.raises(ValueError, match="Only in the model: .'net/d/kernel'"):
        state_trees._by_own_path(own, "trainable_variables", given)


def test_an_optimizer_of_another_name():
    own = model(optimizer={"adam/iteration": (), "adam/net_d_kernel_m": (2, 3)})
    given = {"adam_1/iteration": np.ones(()), "adam_1/d_kernel_m": np.ones(6)}
    given["adam_1/d_kernel_m"] = given["adam_1/d_kernel_m"].reshape(2, 3)
    assert found(own, "optimizer_variables", given) == {
        "adam/iteration": (),
        "adam/net_d_kernel_m": (2, 3),
    }


def test_an_optimizer_that_is_not_built_takes_no_state():
    own = model(optimizer={"sgd/iteration": ()})
    given = values(sgd__iteration=(), sgd__momentum=(2, 3))
    with pytest.warns(UserWarning, match="state is not loaded"):
        assert found(own, "optimizer_variables", given) == {}


def test_metrics_are_made_when_they_are_needed():
    given = values(mean__total=())
    assert found(model(), "metrics_variables", given) == {"mean/total": ()}
