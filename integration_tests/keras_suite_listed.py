"""Tests of Keras that need not pass under a distribution, and why."""

import collections
import fnmatch


class Listed(
    collections.namedtuple(
        "Listed", ["pattern", "backends", "distributions", "reason"]
    )
):
    """Tests that may fail under a distribution.

    Args:
        pattern: String, a pattern of `fnmatch` for ids of tests.
        backends: Tuple of names of backends.
        distributions: Tuple of names of distributions of `keras_suite.py`.
        reason: String, what in the test, or in Keras, is at fault.
    """


ALL = ("jax", "tensorflow", "torch")
ANY = ("data", "map", "tensor")

# Backends with a process for each device.
PROCESSES = ("torch",)

LISTED = [
    *(
        Listed(
            pattern,
            ALL,
            ANY,
            "counts the files of weights in parts: an empty one has the name "
            "that Keras opens first, the parts have names that no older file "
            "has, so that a save that is cut short leaves the older one whole",
        )
        for pattern in (
            "saving/saving_api_test.py::*::test_load_sharded_weights",
            "saving/saving_lib_test.py::*::test_weights_sharding_*",
        )
    ),
    Listed(
        "saving/saving_lib_test.py::*::test_save_model_exception_raised_*",
        ALL,
        ANY,
        "asserts that a save that raises leaves a file without weights; here "
        "no file is left, and an older one stays",
    ),
    *(
        Listed(
            pattern,
            ALL,
            ANY,
            "makes a variable under the distribution of the run, and asserts "
            "the layout that another one would give it; a variable keeps its "
            "layout, in Keras too",
        )
        for pattern in (
            "distribution/distribution_lib_test.py::"
            "DataParallelDistributionTest::test_get_variable_layout",
            "distribution/distribution_lib_test.py::"
            "ModelParallelDistributionTest::test_distribute_weights",
            "initializers/initializer_test.py::InitializersLayoutTest::"
            "test_initializer_with_data_parallel_layout",
        )
    ),
    *(
        Listed(
            pattern,
            PROCESSES,
            ANY,
            "writes a file itself, so both processes write the same one at a "
            "time",
        )
        for pattern in (
            "saving/file_editor_test.py::*",
            "saving/saving_lib_test.py::SavingH5IOStoreTest::*",
            "saving/saving_lib_test.py::SavingNpzIOStoreTest::*",
            "saving/saving_lib_test.py::SafeGetH5DatasetTest::*",
            "saving/saving_api_test.py::*::"
            "test_load_weights_rejects_h5_external_link",
        )
    ),
    Listed(
        "callbacks/orbax_checkpoint_test.py::*::test_checkpoint_with_assets*",
        PROCESSES,
        ANY,
        "waits for Orbax in the process that writes; the other one reads too "
        "early (`OrbaxCheckpoint.wait_until_finished` waits in both)",
    ),
    *(
        Listed(
            f"callbacks/{name}_test.py::*::test_verbose_logging",
            PROCESSES,
            ANY,
            "asserts a line in the output of each process; only process 0 "
            "prints",
        )
        for name in ("learning_rate_scheduler", "reduce_lr_on_plateau")
    ),
    Listed(
        "callbacks/model_checkpoint_test.py::*::test_model_checkpoint_options",
        PROCESSES,
        ANY,
        "makes a folder in each process, which the other one has made already",
    ),
    Listed(
        "trainers/data_adapters/tf_dataset_adapter_test.py::*::"
        "test_distributed_datasets_from_function_model_integration",
        PROCESSES,
        ANY,
        "draws its data from TensorFlow without a seed, so each process has "
        "other data, which is an error",
    ),
    Listed(
        "callbacks/tensorboard_test.py::*::test_custom_summary",
        PROCESSES,
        ANY,
        "asserts that each process writes its summaries; only process 0 does",
    ),
    Listed(
        "callbacks/backup_and_restore_test.py::*::test_backup_corrupted",
        PROCESSES,
        ANY,
        "damages a file in each process, while the other one reads it",
    ),
    *(
        Listed(
            pattern,
            PROCESSES,
            ANY,
            "counts the files in a folder, where the other process has its "
            "temporary one at that time",
        )
        for pattern in (
            "saving/saving_lib_test.py::*::test_load_model_exception_raised_*",
            "saving/saving_lib_test.py::*::test_load_model_read_only_system",
        )
    ),
    *(
        Listed(
            pattern,
            ("tensorflow",),
            ANY,
            "asserts that a sparse gradient stays an IndexedSlices: slots are "
            "split as their variable is, and DTensor has no sparse tensors, so "
            "it is made dense; test_sparse_correctness passes",
        )
        for pattern in (
            "layers/core/dense_test.py::DenseTest::test_dense_sparse",
            "trainers/trainer_test.py::TestTrainer::test_fit_sparse_*",
            "optimizers/optimizer_sparse_test.py::*::test_sparse_gradients_*",
        )
    ),
    *(
        Listed(
            pattern,
            ("tensorflow",),
            ANY,
            "feeds a RaggedTensor, which DTensor has none of; an error says so",
        )
        for pattern in (
            "trainers/trainer_test.py::TestTrainer::test_trainer_with_raggeds_*",
            "layers/core/embedding_test.py::EmbeddingTest::test_ragged",
        )
    ),
    Listed(
        "layers/core/*dense_test.py::*::test_quantize_float8",
        ("tensorflow",),
        ("map", "tensor"),
        "gathers a kernel that was cast to float8, for which TensorFlow has no "
        "Fill on CPU; the error is TensorFlow's",
    ),
    *(
        Listed(
            pattern,
            ("tensorflow",),
            ANY,
            f"puts {operation} into a step, which DTensor cannot run; the "
            "error names the operation and the layer",
        )
        for operation, patterns in {
            "LookupTableFindV2": (
                "layers/preprocessing/feature_space_test.py::*::"
                "test_functional_api_sync_processing",
                "layers/preprocessing/feature_space_test.py::*::test_saving",
            ),
            "DenseBincount": (
                "layers/preprocessing/image_preprocessing/"
                "equalization_test.py::*::test_layer",
                "layers/preprocessing/image_preprocessing/"
                "rand_augment_test.py::*::test_layer",
            ),
            "MatrixSolve": (
                "layers/preprocessing/image_preprocessing/"
                "random_perspective_test.py::*::test_layer",
            ),
            "stateless_gamma": (
                "layers/preprocessing/image_preprocessing/"
                "aug_mix_test.py::*::test_layer",
                "layers/preprocessing/image_preprocessing/"
                "cut_mix_test.py::*::test_layer",
                "layers/preprocessing/image_preprocessing/"
                "mix_up_test.py::*::test_layer",
            ),
        }.items()
        for pattern in patterns
    ),
    Listed(
        "backend/jax/trainer_test.py::JAXTrainerTest::"
        "test_warns_when_model_built_outside_scope_*",
        ("jax",),
        ANY,
        "asserts that a model that is built first is on one device; here it is "
        "built under the distribution of the run",
    ),
    Listed(
        "distribution/distribution_lib_test.py::DistributionTest::test_scope",
        ALL,
        ANY,
        "asserts that no distribution is set when it begins",
    ),
    Listed(
        "utils/jax_layer_test.py::TestJaxLayer::*",
        ("tensorflow",),
        ANY,
        "puts a program of XLA into a step of TensorFlow (XlaCallModule), "
        "which DTensor cannot split; the error names the operation",
    ),
    Listed(
        "saving/saving_lib_test.py::SavingTest::test_load_model_concurrently",
        ("tensorflow",),
        ANY,
        "forks processes after TensorFlow's runtime of several devices has "
        "started, which does not run in them",
    ),
    Listed(
        "callbacks/swap_ema_weights_test.py::SwapEMAWeightsTest::"
        "test_swap_ema_weights_with_tf_distribute",
        ("tensorflow",),
        ANY,
        "uses `tf.distribute`, which has devices of its own, together with "
        "DTensor",
    ),
    *(
        Listed(
            pattern,
            PROCESSES,
            ANY,
            "asserts that each process prints; process 0 does, for all",
        )
        for pattern in (
            "utils/io_utils_test.py::TestIoUtils::test_print_msg_*",
            "utils/progbar_test.py::ProgbarTest::test_stateful_*",
        )
    ),
    Listed(
        "utils/torch_utils_test.py::TorchUtilsTest::*",
        ("torch",),
        ANY,
        "wraps a module of torch, whose parameters are refused with an error",
    ),
    *(
        Listed(
            pattern,
            ("tensorflow",),
            ANY,
            "replaces TensorFlow's context, and with it the devices of DTensor",
        )
        for pattern in (
            "backend/tensorflow/distribute_test.py::*",
            "backend/tensorflow/optimizer_distribute_test.py::*",
        )
    ),
    Listed(
        "export/saved_model_test.py::ExportArchiveTest::"
        "test_model_combined_with_tf_preprocessing",
        ("tensorflow",),
        ANY,
        "looks strings up, which DTensor cannot; the error names the operation",
    ),
    Listed(
        "layers/rnn/gru_test.py::GRUTest::test_stateful_with_symbolic_batch_size",
        ("tensorflow",),
        ANY,
        "traces a step for a batch of unknown size; DTensor's rules need sizes",
    ),
    Listed(
        "layers/preprocessing/stft_spectrogram_test.py::TestSpectrogram::"
        "test_spectrogram_channels_*",
        ("jax",),
        ("map", "tensor"),
        "asserts 1e-6; a split convolution rounds 295 of 335,916 values in "
        "another way, by up to 2e-6",
    ),
    Listed(
        "layers/preprocessing/stft_spectrogram_test.py::TestSpectrogram::"
        "test_tf_data_compatibility",
        ("tensorflow",),
        ("map", "tensor"),
        "calls a layer with split weights in a pipeline of tf.data, which runs "
        "on one device",
    ),
]


def reason_for(test, backend, distribution):
    """Returns why a test need not pass, or `None`."""
    for row in LISTED:
        if (
            backend in row.backends
            and distribution in row.distributions
            and fnmatch.fnmatchcase(test, row.pattern)
        ):
            return row.reason
    return None
