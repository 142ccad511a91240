"""Steps of stored HLO: fragments of what XLA compiles for H100 and TPU v5e."""

from keras_tp.backend import hlo_collectives
from keras_tp.backend.jax import schedule

GPU = """HloModule jit_step, is_scheduled=true, num_partitions=8

%fused_dot (a: bf16[64,128], b: bf16[128,32]) -> bf16[64,32] {
  %a = bf16[64,128]{1,0} parameter(0)
  %b = bf16[128,32]{1,0} parameter(1)
  ROOT %dot.1 = bf16[64,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_take (t: f32[1000,8], i: s32[4]) -> f32[4,8] {
  %t = f32[1000,8]{1,0} parameter(0)
  %i = s32[4]{0} parameter(1)
  ROOT %gather.1 = f32[4,8]{1,0} gather(%t, %i), offset_dims={1}
}

ENTRY %main (p0: bf16[64,128], p1: bf16[128,32], p2: f32[1000,8], p3: s32[4]) -> bf16[64,32] {
  %p0 = bf16[64,128]{1,0} parameter(0)
  %p1 = bf16[128,32]{1,0} parameter(1)
  %p2 = f32[1000,8]{1,0} parameter(2)
  %p3 = s32[4]{0} parameter(3)
  %all-reduce-start = bf16[64,128]{1,0} all-reduce-start(%p0), channel_id=1, replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}, to_apply=%add, backend_config={"collective_backend_config":{"is_sync":false}}
  %fusion.1 = bf16[64,32]{1,0} fusion(%p0, %p1), kind=kCustom, calls=%fused_dot
  %all-reduce-done = bf16[64,128]{1,0} all-reduce-done(%all-reduce-start)
  %fusion.2 = f32[4,8]{1,0} fusion(%p2, %p3), kind=kLoop, calls=%fused_take
  %cublas = (bf16[64,32]{1,0}, s8[1024]{0}) custom-call(%p0, %p1), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %query = bf16[2,16,4,8]{3,2,1,0} bitcast(%fusion.1)
  %flash = (bf16[2,16,4,8]{3,2,1,0}, u8[0]{0}) custom-call(%query, %query, %query), custom_call_target="__cudnn$fmhaSoftmax"
  %all-reduce-start.1 = f32[4]{0} all-reduce-start(%p3), channel_id=2, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add, backend_config={"collective_backend_config":{"is_sync":true}}
  %all-reduce-done.1 = f32[4]{0} all-reduce-done(%all-reduce-start.1)
  ROOT %out = bf16[64,32]{1,0} bitcast(%fusion.1)
}
"""  # noqa: E501

TPU = """HloModule jit_step, is_scheduled=true, num_partitions=8

%fused_computation.1 (p: s32[4]) -> (s32[4], s32[32]) {
  %p = s32[4]{0:T(128)} parameter(0)
  %all-gather.1 = s32[32]{0:T(128)} all-gather(%p), channel_id=5, replica_groups=mesh['axis_0'=8] {'axis_0'}, metadata={op_name="a"}
  ROOT %tuple.1 = (s32[4]{0:T(128)}, s32[32]{0:T(128)}) tuple(%p, %all-gather.1)
}

%fused_computation.2 (q: s32[4]) -> s32[32] {
  %q = s32[4]{0:T(128)} parameter(0)
  ROOT %all-gather.2 = s32[32]{0:T(128)} all-gather(%q), channel_id=5, replica_groups=mesh['axis_0'=8] {'axis_0'}, metadata={op_name="a"}
}

%all-reduce-scatter.3 (r: f32[64]) -> f32[8] {
  %r = f32[64]{0:T(128)} parameter(0)
  %all-reduce.9 = f32[64]{0:T(128)} all-reduce(%r), channel_id=6, replica_groups=mesh['axis_0'=8] {'axis_0'}, to_apply=%add, metadata={op_name="b"}
  ROOT %slice = f32[8]{0:T(128)} dynamic-slice(%all-reduce.9, %r), dynamic_slice_sizes={8}
}

ENTRY %main (x: s32[4], g: f32[64], l: bf16[8,16,32], r: bf16[8,32,4]) -> f32[8] {
  %x = s32[4]{0:T(128)} parameter(0)
  %g = f32[64]{0:T(128)} parameter(1)
  %l = bf16[8,16,32]{2,1,0:T(8,128)(2,1)} parameter(2)
  %r = bf16[8,32,4]{2,1,0:T(8,128)(2,1)} parameter(3)
  %async-collective-start = (s32[4]{0:T(128)}, s32[32]{0:T(128)}) fusion(%x), kind=kCustom, calls=%fused_computation.1
  %convolution = bf16[8,16,4]{2,1,0:T(8,128)(2,1)} convolution(%l, %r), window={size=8 stride=7 pad=0_0 lhs_dilate=8}, dim_labels=0bf_0io->0bf
  %async-collective-done = s32[32]{0:T(128)} fusion(%x), kind=kCustom, calls=%fused_computation.2
  ROOT %fusion.3 = f32[8]{0:T(128)} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.3
}
"""  # noqa: E501


def by_name(text):
    return {step.name: step for step in schedule.steps(text)}


def kinds(text):
    return [step.kind for step in schedule.steps(text)]


def test_what_lies_between_start_and_end():
    assert kinds(GPU)[:3] == ["all_reduce", "compute", "done"]
    assert by_name(GPU)["all-reduce-start.1"].is_started is False
    assert kinds(TPU)[:3] == ["all_gather", "compute", "done"]


def test_devices_of_a_group():
    steps = schedule.steps(GPU)
    groups = {step.name: step.devices for step in steps if step.devices}
    assert groups == {
        "all-reduce-start": (0, 1),
        "all-reduce-start.1": (0, 2, 4, 6),
    }


def test_matmuls_in_fusions_libraries_and_kernels_count():
    steps = by_name(GPU)
    assert steps["fusion.1"].flops == {"bf16": 2 * 64 * 128 * 32}
    assert steps["cublas"].flops == {"bf16": 2 * 64 * 128 * 32}
    # Two matmuls of (16, 8) and (8, 16), for each of 2 x 4 heads.
    assert steps["flash"].flops == {"bf16": 2 * 2 * 8 * 16 * 16 * 8}
    assert steps["flash"].kernel == "cuDNN flash attention, forward"


def test_gradients_of_a_convolution_cost_as_much_as_its_result():
    shapes = {"x": "2,8,8,3", "w": "16,4,4,3", "y": "2,2,2,16"}
    calls = {
        "Forward": ("y", "x", "w"),
        "BackwardFilter": ("w", "x", "y"),
        "BackwardInput": ("x", "y", "w"),
    }
    text = (
        "HloModule jit_step, is_scheduled=true\n\nENTRY %main () -> f32[] {\n"
    )
    for index, (name, shape) in enumerate(shapes.items()):
        text += f"  %{name} = f32[{shape}]{{3,2,1,0}} parameter({index})\n"
    for name, (result, *operands) in calls.items():
        text += (
            f"  %{name} = (f32[{shapes[result]}]{{3,2,1,0}}, u8[0]{{0}}) "
            f"custom-call(%{operands[0]}, %{operands[1]}), "
            "window={size=4x4 stride=4x4}, dim_labels=b01f_o01i->b01f, "
            f'custom_call_target="__cudnn$conv{name}"\n'
        )
    steps = by_name(text + "}\n")
    for name in calls:
        # 2 x 2 windows of 4 x 4 x 3 numbers, for each of 2 x 16 results.
        assert steps[name].flops == {"f32": 2 * 2 * 2 * 4 * 4 * 3 * 2 * 16}


def test_a_batched_matmul_on_tpu_has_no_products_of_its_padding():
    assert by_name(TPU)["convolution"].flops == {"bf16": 2 * 8 * 16 * 32 * 4}


def test_a_lookup_reads_the_rows_that_it_returns():
    assert by_name(GPU)["fusion.2"].bytes == 2 * 4 * 8 * 4 + 4 * 4


def test_clones_count_once_and_a_slice_of_a_sum_is_a_reduce_scatter():
    found = hlo_collectives.count(TPU)
    assert {kind: pair for kind, pair in found.items() if pair[0]} == {
        "all_gather": (1, 32 * 4),
        "reduce_scatter": (1, 8 * 4),
    }
