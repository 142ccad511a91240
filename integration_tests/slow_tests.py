"""The tests that CI leaves out; KERAS_TP_SLOW=1 runs them."""

import collections
import os
import re
import zlib

import keras
import pytest

SLOW = os.environ.get("KERAS_TP_SLOW") == "1"


def optimize_less():
    """Leaves out TensorFlow's optimizations of graphs in this process.

    They take a third of the time of these small programs. Tests that launch
    processes show the optimized programs that users run.
    """
    if keras.config.backend() == "tensorflow" and not SLOW:
        import tensorflow as tf

        tf.config.optimizer.set_experimental_options(
            {"disable_meta_optimizer": True}
        )


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "slow: too slow for CI; KERAS_TP_SLOW=1 runs it"
    )


# Kinds of layers, ways to quantize and ways to shard, not each with each.
DERIVED = (
    r"derived_variables_test\.py::test_after_sharding\[(?!lora-(mixed|tied)-1x4"
    r"|lora-images-1x2|int8-(columns|untied)-1x2|int4-(mixed|tied)-1x2"
    r"|int4 in groups, lora-mixed-1x4)",
    r"derived_variables_test\.py::test_ways_to_shard\[(planned-(lora|int4)"
    r"|provisional-(lora|int4)|provisional, used-int|distribute_model-int"
    r"|TensorParallelKeras-(lora|int8))",
    r"derived_variables_test\.py::test_before_sharding\[(int4|int8, lora)\]",
    r"derived_variables_test\.py::test_nothing_is_gathered\["
    r"(.*1x4|int8-|int4 in)",
)
# An order of models, and a shape of a mesh, for each claim.
ORDERS_AND_SHAPES = (
    r"contamination_test\.py::.*\[(forwards|backwards)\]",
    r"faults_test\.py::test_nothing_is.*\[(sgd-1x4|adam-1x2)\]",
    r"train_lm_test\.py::test_losses_are_those_of_one_device\[mesh1",
)
# Where both axes of a mesh split (2x2), each does. Meshes of one axis are tried
# with some models.
ONE_AXIS = (
    r"parity_test\.py::test_sgd\[(?!mlp|llama|conv2d|lstm|gpt2|emb)\w+-1x4",
    r"gradients_test\.py::test_clipped.*\[(?!mlp|lstm)\w+-(1x2|1x4)",
    r"faults_test\.py::test_a_planted.*-1x2\]",
    r"residence_test\.py::test_weights_and_slots\[(?!adam-).*1x4",
    r"saving_test\.py::test_from_one_mesh.*(2x2_to_1x4|1x2_to_1x4)",
)
# A child process trains the reference: one model that is right is enough.
VERIFIED = (r"verification_test\.py::test_a_right_model_passes\[(mlp|lstm)",)
# JAX runs all; the others one of each kind.
NAMED = (
    r"named_checkpoints_test\.py::(?!test_(models\[split|a_model_is_made"
    r"|model_checkpoint\[models))",
    r"resumed_runs_test\.py::(?!test_(in_the_middle_of_an_epoch\[arrays"
    r"|at_the_start_of_an_epoch\[split))",
)
# Files whose tests have many cases. CI runs each case on one of the backends
# that do not leave it out, and at least one case of each test on each. Of cases
# that one backend alone has (a mesh, a function), those that this gives to
# another are left out.
SPREAD = "|".join(
    rf"^integration_tests/{name}_test\.py::.*\["
    for name in (
        *("derived_variables", "forms", "generate", "gradients"),
        *("hub_backbones", "ops", "ops_layers", "parity", "planned_models"),
        *("planning", "planning_rules", "recipes", "saving", "training"),
        *("split_vocabulary", "uneven", "whole_model", "zero"),
        *("checkpoint_derived", "checkpoint_hub", "checkpoints"),
        *("resumed_runs",),
        *("rematerialization", "sequence_parallel", "stored_weights"),
        *("benchmark", "blocks", "collective_calls", "examples", "faults"),
        *("gathers", "guides", "keras_suite", "mesh_axes", "output"),
        *("recurrent",),
    )
)
BACKENDS = ("jax", "tensorflow", "torch")
# What CI leaves out on a backend that needs too long for all: patterns of test
# names. At least one instance of each claim stays, or two backends show it.
SLOW_ON = {
    "jax": (
        *DERIVED,
        *ONE_AXIS,
        *ORDERS_AND_SHAPES,
        *VERIFIED,
        r"parity_test\.py::test_sgd\[(?!mlp|llama|conv2d|lstm)\w+-1x2",
        r"parity_test\.py::test_adam\[\w+-(1x2|1x4)",
        r"planned_models_test\.py::test_training\[2x2-(opt|multi_head)",
        r"generate_test\.py::.*one_device\[(2-(?!opt)|4-(?!llama))",
        r"generate_test\.py::test_tokens_that_are_drawn\[2\]",
        r"benchmark_test\.py::test_plan_survey\[all",
        # The launcher prints the same on each backend.
        r"output_test\.py::.*(speak_if_asked|all_errors|abort-13)",
        # Another host is lost in `kill_step`, too.
        r"processes_test\.py::.*on_another_host\[kill_saving1\]",
        # Shown on torch.
        r"collective_calls_test\.py::.*\[(count_collectives|verify)",
        # It is shown on TensorFlow; `kill_saving0` and `kill_step` here.
        r"processes_test\.py::test_an_error_ends.*\[kill_saving1\]",
        # The loop that is compiled shows the other optimizers.
        r"blocks_test\.py::test_a_loop_that_is_not_compiled"
        r"\[(?!adam|averaged)",
    ),
    "torch": (
        # Not among the tests of `shell/test.sh` and `torch_ranks.py`.
        r"(planning_rules|mesh_axes)_test\.py",
        *DERIVED,
        *NAMED,
        # Each of these starts processes of its own.
        r"contamination_test\.py::.*\[(forwards|backwards)\]",
        r"faults_test\.py::test_nothing_is.*\[sgd-1x2\]",
        *VERIFIED,
        # Plans are the same on each backend, and JAX reads some; TensorFlow
        # runs the other survey; JAX and TensorFlow compare times of steps.
        r"benchmark_test\.py::test_(plan_|collectives_survey|step_time)",
        # One of three scripts, and one of two calls, is tried.
        r"benchmark_test\.py::test_benchmarks_of_torch\[(data|keras_over)",
        r"collective_calls_test\.py::.*\[count_collectives\]",
        r"readme_test\.py::test_snippet_runs\[(plans-1|layouts-0)",
        # Eight processes need more than a minute, and `verify` starts more.
        r"guides_test\.py::test_guide_runs\[(fine_tune|debug)_",
        # Each starts two processes; one value that is no time stays.
        r"torch_launch_test\.py::test_a_time_to_wait_that_is_none"
        r"\[(soon|-3|inf|nan)",
        # torch's compiler takes minutes; `torch_models_test.py` has one model.
        r"compiling_test\.py::test_(a_train_step|evaluate_and_predict)",
        r"torch_models_test\.py::test_jit_compile_(does_not_break|of_a_model)",
        r"torch_data_test\.py::test_compiled_steps",
        # The child and the seed are the same code on each backend.
        r"verification_test\.py::test_(another_model_each|batches_seed)",
        # One case of each is shown.
        r"torch_processes_test\.py::.*\[(torch\]|0\])",
        # How the suite of Keras ends is read alike on each backend.
        r"keras_suite_test\.py::test_(how_tests_end|distribution_is_active"
        r"|a_test_that_asks_nothing)",
        # No process is started: the same on each backend.
        r"launch_test\.py::test_bad_arguments",
        r"command_line_test\.py::test_(doctor_names|launch_passes)",
        # JAX trains the same example, and TensorFlow with two processes.
        r"train_lm_test\.py::test_losses_are_those_of_one_device",
    ),
    "tensorflow": (
        # The launcher prints the same on each backend, and ends alike.
        r"output_test\.py::.*(speak|all_errors|abort-13|exit-7|first_error"
        r"|told_once)",
        r"launch_test\.py::test_(the_exit_code|a_script_that_chooses)",
        # Runs end by an error, and by a kill while they save, in other cases;
        # a call by one process is refused alike where it saves.
        r"processes_test\.py::test_an_error_ends.*"
        r"\[(exit|kill_step|kill_saving0|one_reads|one_saves)\]",
        r"processes_test\.py::test_the_others_wait_for_the_one_that_writes",
        r"keras_suite_test\.py::test_how_tests_end",
        r"processes_test\.py::.*on_another_host\[kill_step\]",
        *VERIFIED,
        # The child and the seed are the same code on each backend.
        r"verification_test\.py::test_(another_model_each|batches_seed)",
        # 2x2 is shown.
        r"sharded_model_test\.py::test_a_trained_model.*\[1x[24]\]",
        # Slots of three kinds stay; so does a mesh of 2.
        r"sharded_model_test\.py::test_slots_of_every_kind.*\[<lambda>",
        r"tensor_parallel_keras_test\.py::test_training_goes_on.*\[opt-4\]",
        # Whole blocks are counted in `sequence_parallel_test.py` too.
        r"ops/sequence_test\.py::test_collectives_of_two_blocks\[shape[01]\]",
        r"tensor_parallel_keras_test\.py::test_its_file.*\[opt\]",
        r"ops/conv_test\.py::test_split_kernels\[conv2d_strides\]",
        # A separable convolution of images is shown.
        r"ops/conv_test\.py::test_split_kernels\[separable_conv1d\]",
        r"ops/table_test\.py::.*cell.*\[stacked_gru-kernel\]",
        # Two processes train the same example here.
        r"train_lm_test\.py::test_losses_are_those_of_one_device",
        # OPT is trained and counted on the others; Llama here.
        r"planned_models_test\.py::test_keras_hub\[opt",
        *NAMED,
        # No devices are used: the same on each backend.
        r"launch_test\.py::test_(dry_run|bad_arguments)",
        r"command_line_test\.py::test_(doctor_names|launch_passes)",
        # Files are written by the same code; JAX has two processes, too.
        r"checkpoint_processes_test\.py",
        # More than a minute; the mesh of one axis is tried.
        r"ops_test\.py::.*_of_two_axes\[depthwise_conv\]",
        r"benchmark_test\.py::test_(plan_|step_time)",
        r"collective_calls_test\.py::.*(count_collectives\]|verify\]|may_plan)",
        *DERIVED,
        *ONE_AXIS,
        *ORDERS_AND_SHAPES,
        # Layers that compile for long: `fit`, `loop` and `function`.
        r"forms_test\.py::test_losses.*\[(gru|lstm|bidirectional|separable"
        r"|depthwise|conv2d|grouped_attention)-\w+-(predict|eval|train_|call)",
        # Of kinds of layers, two uses beside all of `dense`.
        r"forms_test\.py::test_losses.*\[(?!dense)\w+-sequential-loop",
        r"forms_test\.py::test_losses.*\[dense-(functional|marked)\w*-"
        r"(predict|evaluate|train_on_batch)",
        r"generate_test\.py::.*one_device\[(2-(?!opt)|4-(?!llama))",
        r"generate_test\.py::test_tokens_that_are_drawn\[2\]",
        r"table_test\.py::test_a_layer_on_split.*\[(alpha|gaussian|spatial)_",
        r"parity_test\.py::test_sgd\[(?!mlp|llama)\w+-1x2",
        r"parity_test\.py::test_sgd\[(?!mlp|gpt2)\w+-1x4",
        r"parity_test\.py::test_sgd\[(roberta|mistral)",
        r"parity_test\.py::test_adam\[\w+-(1x2|1x4)",
        r"parity_test\.py::test_adam\[(?!mlp|conv2d|lstm|multi_h|llama)",
        r"planned_models_test\.py::test_training\[(2x2-(?!mlp)|1x4-opt)",
        r"planned_models_test\.py::test_shapes_of_models\[nameless",
        r"planned_models_test\.py::test_what_is_predicted.*\[gated",
        r"readme_test\.py::test_snippet_runs\[(plans-1|layouts-0)",
        r"whole_model_test\.py::test_(ten_steps|the_training).*\[2\]",
        r"whole_model_test\.py::test_models_of_every_kind.*-2\]",
        r"saving_test\.py::test_loading_.*truncated.*(0\.0|0\.6|0\.99)\]",
        r"training_test\.py::test_kinds.*\[(sequential_with_input|nested)\]",
        r"residence_test\.py::.*language_model\[(gpt2|\w+-1x2)",
    ),
}


def pytest_collection_modifyitems(items):
    if SLOW:
        return
    backend = keras.config.backend()
    slow = slow_on(backend)
    spread = collections.defaultdict(list)
    skip = pytest.mark.skip(reason="set KERAS_TP_SLOW=1 to run it")
    for item in items:
        # A condition says that other backends lack the test.
        has_condition = any(m.name == "skipif" for m in item.own_markers)
        if item.get_closest_marker("slow") or re.search(slow, item.nodeid):
            item.add_marker(skip)
        elif re.search(SPREAD, item.nodeid) and not has_condition:
            spread[item.nodeid.partition("[")[0]].append(item)
    for cases in spread.values():
        own = [item for item in cases if backend_of(item.nodeid) == backend]
        for item in cases:
            if item not in (own or cases[:1]):
                item.add_marker(skip)


def backend_of(name):
    """Returns the backend on which CI runs a case."""
    possible = [
        backend for backend in BACKENDS if not re.search(slow_on(backend), name)
    ]
    # torch has two devices in CI, and needs the least time for a case.
    meshes = re.findall(r"\b(\d)x(\d)\b", name)
    sizes = [int(data) * int(model) for data, model in meshes]
    if "torch" in possible and max(sizes, default=2) == 2:
        possible.append("torch")
    elif possible != ["torch"]:
        possible = [backend for backend in possible if backend != "torch"]
    return possible[zlib.crc32(name.encode()) % len(possible)]


def slow_on(backend):
    """Returns a pattern of the tests that CI leaves out on a backend."""
    return "|".join(SLOW_ON.get(backend, ())) or "$^"
