"""Checks the law of `scaling.py` against programs and a published run.

    python benchmarks/scaling.py --check

Four parts: bytes of small models compiled for 1 to 8 virtual CPU devices, equal
to the law's; bytes that small models send in programs for H100, within 1 %;
FLOPs in the programs of `compile_for.json`, within 2 %; and the efficiency that
Megatron-LM published, beside the law's, which is no test.
"""

import json
import math

import compile_for
import keras
import keras_hub
import numpy as np
import scaling
import scaling_law

from keras_tp import distribution
from keras_tp.distribution import accelerators

LENGTH, WIDTH = 64, 128
# Plain, sequence parallel, FSDP, both.
PLAIN, ALONG, FULLY, BOTH = scaling.WAYS.values()
ALL_WAYS = PLAIN, ALONG, FULLY, BOTH
# A loss over a split vocabulary, which plans leave out.
H100_TOLERANCE = 0.01
FLOPS_TOLERANCE = 0.02


def small_llama():
    """Returns a Llama without a head; all of its variables have a gradient."""
    return keras_hub.models.Llama3Backbone(
        vocabulary_size=LENGTH,
        num_layers=2,
        num_query_heads=8,
        num_key_value_heads=8,
        hidden_dim=WIDTH,
        intermediate_dim=3 * WIDTH,
        tie_word_embeddings=True,
    )


def small_gpt():
    """Returns a GPT-2 without a head."""
    return keras_hub.models.GPT2Backbone(
        vocabulary_size=LENGTH,
        num_layers=2,
        num_heads=8,
        hidden_dim=WIDTH,
        intermediate_dim=4 * WIDTH,
        max_sequence_length=LENGTH,
        dropout=0.0,
    )


def small_vit():
    """Returns a ViT without a head, of as many positions as the others."""
    return keras_hub.models.ViTBackbone(
        image_shape=(64, 64, 3),
        patch_size=8,
        num_layers=2,
        num_heads=8,
        hidden_dim=WIDTH,
        mlp_dim=4 * WIDTH,
        use_class_token=False,
    )


# XLA for CPUs leaves out some gathers of FSDP where there is a model axis too;
# the programs for H100 have them.
CPU_CASES = [
    *(((1, n), PLAIN) for n in (1, 2, 4, 8)),
    *(((n, 1), PLAIN) for n in (2, 4, 8)),
    *((shape, PLAIN) for shape in ((2, 2), (4, 2), (2, 4))),
    *(((n, 1), FULLY) for n in (2, 4, 8)),
    *((shape, ALONG) for shape in ((1, 2), (1, 8), (2, 4))),
]


def expected_on_cpu(plan, batch_size):
    """Returns the bytes of each kind in a program of XLA for CPUs.

    It has no reduce-scatter for gradients, but an all-reduce, and it sums the
    input gradients of parallel projections one by one. The positions of a ViT
    are split and read whole, so their gradient is summed whole.
    """
    found = scaling.collectives_of(plan, batch_size, LENGTH)
    replicas = plan.device_mesh.shape[0]
    scattered = found["data"].pop("reduce_scatter")[1]
    total = {"all_reduce": replicas * scattered}
    for collectives in found.values():
        for kind, (_, nbytes) in collectives.items():
            total[kind] = total.get(kind, 0) + nbytes
    for row in plan.reductions:
        if not row.scattered:
            size = row.size.at(batch_size // replicas, LENGTH)
            total["all_reduce"] += (row.terms - 1) * size
    for row in plan.variables if replicas > 1 else ():
        if "position" in row.path and "model" in row.axes:
            parts = plan.device_mesh.shape[1]
            total["all_reduce"] += row.nbytes - row.nbytes // parts
    return total


def check_on_cpu():
    """Compiles small models for virtual devices; yields whether bytes agree."""
    for build in (small_llama, small_gpt, small_vit):
        for shape, way in CPU_CASES:
            if way is ALONG and build is not small_llama:
                # The plan says that it does not predict all of these.
                continue
            keras.utils.clear_session()
            devices = [f"cpu:{i}" for i in range(math.prod(shape))]
            mesh = distribution.DeviceMesh(shape, ["batch", "model"], devices)
            plan = distribution.plan_sharding(build, mesh, **way)
            batch_size = 2 * shape[0]
            with plan.distribution().scope():
                model = build()
                model.compile("sgd", "mse")
                x = np.ones((batch_size, LENGTH), "int32")
                x = {"token_ids": x, "padding_mask": x}
                if build is small_vit:
                    x = np.ones((batch_size, 64, 64, 3), "float32")
                y = np.zeros((batch_size, LENGTH, WIDTH), "float32")
                counted = distribution.count_collectives(model, x, y)
            expected = expected_on_cpu(plan, batch_size)
            found = {k: nbytes for k, (_, nbytes) in counted.items()}
            # The loss is a number or two.
            loss = found["all_reduce"] - expected["all_reduce"]
            agrees = 0 <= loss <= 8 and all(
                found[kind] == expected.get(kind, 0)
                for kind in found
                if kind != "all_reduce"
            )
            name = f"{build.__name__} {shape} {list(way)}"
            print(f"CPU {name}: law {expected}, program {found}", flush=True)
            yield agrees


def medium_llama():
    """Returns a Llama of two layers for programs of H100."""
    config = {
        "vocabulary_size": 2048,
        "num_query_heads": 8,
        "num_key_value_heads": 8,
        "hidden_dim": 1024,
        "intermediate_dim": 4096,
    }
    return compile_for.causal_lm("Llama3", **config)(2, scaling.DTYPE)


def medium_vit():
    """Returns a ViT of two layers for programs of H100."""
    return scaling.vit_giant(2, scaling.DTYPE)


H100_CASES = [
    (medium_llama, (1, 8), (PLAIN, ALONG)),
    (medium_llama, (8, 1), (PLAIN, FULLY)),
    (medium_llama, (2, 4), ALL_WAYS),
    (medium_vit, (1, 8), (PLAIN,)),
    (medium_vit, (8, 1), (PLAIN, FULLY)),
]


def check_on_h100():
    """Compiles models for a node of H100; yields whether bytes agree.

    A program's bytes are those that a device sends, from the kind, the size
    and the devices of each of its collectives.
    """
    target = accelerators.accelerator("h100")
    for build, shape, ways in H100_CASES:
        length = 1024 if build is medium_llama else None
        batch_size = 8 if length else 16
        for way in ways:
            devices = [f"gpu:{i}" for i in range(math.prod(shape))]
            mesh = distribution.DeviceMesh(shape, ["batch", "model"], devices)
            report = distribution.compile_for(
                build,
                distribution.TensorParallel(mesh, **way),
                target.name,
                batch_size=batch_size,
                sequence_length=length,
                loss=compile_for.LOSS,
            )
            plan = distribution.plan_sharding(build, mesh, **way)
            found = scaling.collectives_of(plan, batch_size, length)
            law = sum(
                scaling_law.bytes_sent(target, found[axis], count)
                for axis, count in zip(("data", "model"), shape)
            )
            sent = target.link_speed * sum(
                row["seconds"] for row in report.collectives.values()
            )
            name = f"{build.__name__} {shape} {list(way)}"
            print(
                f"H100 {name}: law {law / 1e6:.2f} MB, program "
                f"{sent / 1e6:.2f} MB ({law / sent - 1:+.2%})",
                flush=True,
            )
            yield abs(law / sent - 1) <= H100_TOLERANCE


def check_flops():
    """Yields whether FLOPs agree with those in programs of whole models."""
    results = json.loads(compile_for.RESULTS.read_text())
    for key in ("Llama 3 8B/h100", "Llama 3 70B, 64/h100"):
        row, name = results[key], key.partition("/")[0].partition(",")[0]
        case = scaling.CASES[name]
        length, count = row["sequence_length"], math.prod(row["mesh"].values())
        law = scaling_law.train_flops(
            scaling.kernel_elements(case),
            row["batch_size"] * length,
            case.depth,
            case.width,
            length,
        )
        law, found = law / count, sum(row["flops"].values())
        print(
            f"FLOPs {name}: law {law / 1e12:.1f} T, program "
            f"{found / 1e12:.1f} T ({law / found - 1:+.1%})",
            flush=True,
        )
        yield abs(law / found - 1) <= FLOPS_TOLERANCE


# A device of a DGX-2H, as the paper says (section 5): 300 GB/s between GPUs in
# both directions, 100 GB/s between servers of 16.
V100 = accelerators.accelerator("h100")._replace(
    name="v100",
    title="NVIDIA V100 SXM3 32 GB",
    flops={"f16": 39e12 / 0.3},
    link_speed=150e9,
    node_size=16,
    network_speed=100e9 / 16,
)
# Size -> width, heads, layers, devices of the model axis (table 1), and the
# efficiency without and with 64 replicas (figure 5).
MEGATRON = {
    "1.2 B": (1536, 16, 40, 1, 1.0, 0.96),
    "2.5 B": (1920, 20, 54, 2, 0.95, 0.83),
    "4.2 B": (2304, 24, 64, 4, 0.82, 0.79),
    "8.3 B": (3072, 32, 72, 8, 0.77, 0.74),
}


def compare_with_megatron():
    """Prints the law beside the scaling of Megatron-LM (arXiv 1909.08053).

    Batches are of 8 sequences of 1024 for each replica, in float16. Every layer
    is computed again in the backward pass (section 4), with its sums: a third
    more FLOPs, and the sums of the forward pass twice. Computations reach the
    39 TFLOP/s that they measured on one device.
    """
    for name, row in MEGATRON.items():
        width, heads, depth, parts, *published = row
        build = compile_for.causal_lm(
            "GPT2",
            vocabulary_size=51200,
            num_heads=heads,
            hidden_dim=width,
            intermediate_dim=4 * width,
            max_sequence_length=1024,
        )
        case = scaling.Case(build, depth, width, 1024, 8, True)
        elements = scaling.kernel_elements(case)
        for replicas, efficiency in zip((1, 64), published):
            plan = scaling.plan_of(case, (replicas, parts), "float16")
            batch_size = case.batch * replicas
            found = scaling.collectives_of(plan, batch_size, case.length)
            number, nbytes = found["model"]["all_reduce"]
            nbytes += sum(
                one.size.at(case.batch, case.length)
                for one in plan.reductions
                if not one.backward
            )
            found["model"]["all_reduce"] = number, nbytes
            flops = scaling_law.train_flops(
                elements, case.batch * case.length, depth, width, case.length
            )
            args = V100, (replicas, parts), found, 4 / 3 * flops / parts
            law = scaling_law.step(*args, 0.3, False)
            ms = {k: round(1000 * s) for k, s in law["seconds"].items()}
            print(
                f"Megatron-LM {name}, {replicas} x {parts}: published "
                f"{efficiency:.0%}; law {law['efficiency']:.0%} if nothing is "
                f"hidden, {law['efficiency_hidden']:.0%} if the data axis is; "
                f"ms {ms}",
                flush=True,
            )


def main():
    """Runs all checks; returns 1 if one of them fails, else 0."""
    agree = [
        agrees
        for check in (check_on_cpu, check_on_h100, check_flops)
        for agrees in check()
    ]
    compare_with_megatron()
    print(f"{sum(agree)} of {len(agree)} comparisons agree")
    return int(not all(agree))
