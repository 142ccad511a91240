"""Plans the backbones of KerasHub and writes a table of what is split.

    KERAS_BACKEND=torch python benchmarks/plan_survey.py > benchmarks/plans.md
    KERAS_BACKEND=torch python benchmarks/plan_survey.py SAM Gemma3n

The models are tiny and nothing is trained. The plan is the same on every
backend.
"""

import argparse
import collections
import functools
import re

import keras
from survey_composites import BUILDERS
from survey_models import CONFIGS
from survey_models import INPUT_SPECS

from integration_tests import hub_models
from keras_tp import distribution

DEVICES = 4
# These models are tiny: their kernels are worth a gather from this number of
# bytes on. In models of ordinary sizes, it is 16 MiB.
LEAST_GATHERED = 1024
# Backbones of KerasHub that have no plan, and why.
WITHOUT_PLAN = {
    "FeaturePyramid": "a base class: others derive from it, it has no layers",
}


def whole(plan):
    """Returns what is not split, by reason: paths with `#` for each number."""
    found = collections.defaultdict(dict)
    for row in plan.variables:
        if len(row.shape) > 1 and not row.is_split:
            path = re.sub(r"\d+", "#", row.path)
            found[row.why][f"`{path}`"] = None
    for kind in plan.without_rule:
        found["no rule"][kind] = None
    return "; ".join(f"{', '.join(key)}: {why}" for why, key in found.items())


def builders():
    """Returns a dict of each model's name to a function that builds it."""
    found = {**hub_models.MODELS, **BUILDERS}
    for name, config in CONFIGS.items():
        found[name] = functools.partial(hub_models.backbone, name, **config)
    return {name: found[name] for name in sorted(found, key=str.lower)}


def survey(names):
    """Returns a dict of the name of each of these models to its plan."""
    devices = [f"cpu:{i}" for i in range(DEVICES)]
    mesh = keras.distribution.DeviceMesh(
        (1, DEVICES), ["batch", "model"], devices
    )
    return {
        name: distribution.plan_sharding(
            build,
            mesh,
            INPUT_SPECS.get(name),
            gather_outputs=LEAST_GATHERED,
        )
        for name, build in builders().items()
        if name in names
    }


def not_planned(names):
    """Returns the backbones of KerasHub that are neither these nor reported."""
    hub = hub_models.models()
    known = {name.replace("_", "").lower() for name in names}
    known |= {name.lower() for name in WITHOUT_PLAN}
    left = {}
    for name in sorted(dir(hub)):
        short = name.removesuffix("Backbone")
        if short and short != name:
            # Some have two names.
            left.setdefault(getattr(hub, name), []).append(short)
    return [
        aliases[0]
        for aliases in left.values()
        if not known & {alias.replace("_", "").lower() for alias in aliases}
    ]


def print_rows(plans):
    """Prints a row of the table for each of these plans."""
    for name, plan in plans.items():
        others = sum(not row.is_predicted for row in plan.variables)
        print(
            f"| {name} | {plan.split_share:.1%} | {len(plan.reductions)} | "
            f"{len(plan.gathers) or ''} | {others or ''} | {whole(plan)} |"
        )


def main():
    """Prints the table, or the rows of the models that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="models; all by default")
    chosen = parser.parse_args().names
    known = builders()
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        parser.error(f"no model is called {unknown}; there are {list(known)}")
    left = not_planned(known)
    if left:
        raise ValueError(
            "Each backbone of KerasHub needs a tiny model in `survey_models` "
            "or `survey_composites`, or a reason in `WITHOUT_PLAN`. Received: "
            f"{left}"
        )
    plans = survey(chosen or known)
    if chosen:
        return print_rows(plans)
    print(f"# Plans of KerasHub's models on {DEVICES} devices\n")
    print("Written by `plan_survey.py`, of tiny models. The share is that of")
    print("the bytes of all matrices, kernels and embeddings; sums are those")
    print("over the devices in a training step, with the gradients'; gathers")
    print("are outputs of layers that what follows needs whole (of kernels")
    print(f"from {LEAST_GATHERED} bytes on, by default from 16 MiB). Others")
    print("are the variables that cause collectives which the plan does not")
    print("predict. A path has `#` for each number. An operation without a")
    print("rule is one that the planner does not know, or a layer that calls")
    print("functions of the framework. All that it meets stays whole.\n")
    print("| model | split | sums | gathers | others | not split, and why |")
    print("| --- | --- | --- | --- | --- | --- |")
    print_rows(plans)
    for name, why in sorted(WITHOUT_PLAN.items()):
        print(f"| {name} | no plan | | | | {why} |")


if __name__ == "__main__":
    main()
