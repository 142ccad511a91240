"""Checks a layout map that was written by hand against a model.

It names patterns that match nothing, paths that several patterns match, layouts
that do not fit, large variables that stay whole, and what a plan does better.
"""

import warnings

from keras_tp.command_line import options as shared
from keras_tp.distribution.distribution_lib import ModelParallel
from keras_tp.distribution.layout_map import LayoutMap
from keras_tp.distribution.planning import discarded
from keras_tp.distribution.sharding_plan import plan_sharding

HELP = "check a layout map that was written by hand"


def add_arguments(parser):
    """Adds the arguments of this command."""
    shared.add_model(parser)
    parser.add_argument(
        "layout_map",
        metavar="MODULE:LAYOUT_MAP",
        help="a `LayoutMap`, or a function that takes a `DeviceMesh` (--mesh) "
        "and returns one",
    )
    shared.add_mesh(parser)


def run(options):
    """Prints a line for each problem; returns 1 if there is any."""
    build_fn = shared.build_fn(options.model)
    try:
        layout_map = _layout_map(options)
    except shared.UsageError:
        raise
    except ValueError as e:
        # The map refuses a layout while it is made.
        problems = [str(e)]
    else:
        problems = problems_of(layout_map, build_fn)
    for problem in problems:
        print(problem)
    count = len(problems)
    print(f"{count} problem(s)." if count else "No problem was found.")
    return 1 if count else 0


def problems_of(layout_map, build_fn):
    """Returns a list of messages about a map for the model of a function."""
    found = []
    with (
        discarded.built_without_weights(build_fn) as model,
        warnings.catch_warnings(record=True) as warned,
    ):
        warnings.simplefilter("always")
        parallel = ModelParallel(layout_map=layout_map)
        for variable in model.variables:
            try:
                parallel.get_variable_layout(variable)
            except ValueError as e:
                found.append(str(e))
        if not found:
            found += layout_map.report(model).problems()
        found += [str(warning.message) for warning in warned]
    if not found:
        plan = plan_sharding(build_fn, layout_map.device_mesh)
        found += [
            f"{path!r}: {message}" for path, message in plan.compare(layout_map)
        ]
    return found


def _layout_map(options):
    found = shared.load(options.layout_map)
    if callable(found) and not isinstance(found, LayoutMap):
        if options.mesh is None:
            raise shared.UsageError(
                f"{options.layout_map} is a function of a mesh: pass --mesh, "
                "such as `--mesh batch=2,model=4`"
            )
        found = found(options.mesh)
    if not hasattr(found, "device_mesh") or not hasattr(found, "items"):
        raise shared.UsageError(
            f"{options.layout_map} has to be a LayoutMap, or a function that "
            f"returns one. Received: {found!r}"
        )
    return LayoutMap.from_keras(found)
