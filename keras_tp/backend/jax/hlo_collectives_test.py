import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from keras_tp.backend import hlo_collectives


@pytest.fixture
def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()[:4]), ("model",))


def counted(function, *arrays, out):
    compiled = jax.jit(function, out_shardings=out).lower(*arrays).compile()
    found = hlo_collectives.count(compiled.as_text())
    return {name: pair for name, pair in found.items() if pair[0]}


def test_all_reduce_of_a_row_parallel_product(mesh):
    x = jax.device_put(
        np.ones((3, 8), "f"), NamedSharding(mesh, P(None, "model"))
    )
    w = jax.device_put(np.ones((8, 5), "f"), NamedSharding(mesh, P("model")))
    out = NamedSharding(mesh, P())
    assert counted(lambda a, b: a @ b, x, w, out=out) == {
        "all_reduce": (1, 3 * 5 * 4)
    }


def test_all_gather_counts_the_bytes_of_the_result(mesh):
    x = jax.device_put(np.ones((8, 6), "f"), NamedSharding(mesh, P("model")))
    out = NamedSharding(mesh, P())
    assert counted(lambda a: a * 2, x, out=out) == {
        "all_gather": (1, 8 * 6 * 4)
    }


def test_a_loop_counts_once_for_each_trip(mesh):
    x = jax.device_put(
        np.ones((3, 8), "f"), NamedSharding(mesh, P(None, "model"))
    )
    w = jax.device_put(
        np.ones((8, 8), "f") / 8, NamedSharding(mesh, P("model"))
    )
    out = NamedSharding(mesh, P())

    def loop(x, w):
        def body(carry, _):
            return jax.lax.with_sharding_constraint(carry @ w, out), None

        return jax.lax.scan(body, x, None, length=7)[0]

    assert counted(loop, x, w, out=out)["all_reduce"] == (7, 7 * 3 * 8 * 4)


def test_nothing_is_counted_where_nothing_is_split(mesh):
    x = jax.device_put(np.ones((8, 6), "f"), NamedSharding(mesh, P()))
    assert counted(lambda a: a @ a.T, x, out=NamedSharding(mesh, P())) == {}


COMBINED = """HloModule jit_step

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%body (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %ar = bf16[4,8]{1,0} all-reduce(%x), replica_groups=[1,4]<=[4], to_apply=%sum
}

%cond (p: (s32[], bf16[4,8])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%branch (p: f32[4]) -> f32[16] {
  ROOT %g = f32[16]{0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
}

ENTRY %main (x: f32[4]) -> f32[16] {
  %all-reduce.1 = (f32[2,3]{1,0}, f32[5]{0}, /*index=2*/f32[]) all-reduce(%a, %b, %c), replica_groups={{0,1},{2,3}}, to_apply=%sum
  %alone = f32[9]{0} all-reduce(%a), replica_groups={{0},{1},{2},{3}}, to_apply=%sum
  %alone.2 = f32[9]{0} all-reduce(%a), replica_groups=[4,1]<=[4], to_apply=%sum
  %start = (f32[4]{0}, f32[16]{0}) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %done = f32[16]{0} all-gather-done(%start)
  %scatters = ((f32[8]{0}, bf16[4]{0}), f32[2]{0}, /*index=2*/bf16[1]{0}) reduce-scatter-start(%y, %z), replica_groups={{0,1,2,3}}, to_apply=%sum
  %permute = (f32[6]{0}, f32[6]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1}}
  %w = (s32[], bf16[4,8]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %c = f32[16] conditional(%i, %x, %x), branch_computations={%branch, %sum}
  ROOT %rs = pred[2,3]{1,0} reduce-scatter(%y), replica_groups={{0,1,2,3}}, to_apply=%sum
}
"""  # noqa: E501


def test_combined_started_looped_and_branched_operations():
    assert hlo_collectives.count(COMBINED) == {
        # Three tensors of 4-byte numbers, and three trips of 2-byte ones.
        "all_reduce": (3 + 3, (6 + 5 + 1) * 4 + 3 * 32 * 2),
        "all_gather": (1 + 1, 2 * 16 * 4),
        # Two that were started together, and one.
        "reduce_scatter": (2 + 1, 2 * 4 + 2 + 6),
        "all_to_all": (0, 0),
        "collective_permute": (1, 6 * 4),
    }


def test_tensors_that_are_concatenated_count_one_by_one():
    """XLA for GPUs sums small tensors as parts of one."""
    text = """
HloModule m, num_partitions=2

%joined (a: f32[32], b: f32[2048]) -> f32[2080] {
  %a = f32[32]{0} parameter(0)
  %b = f32[2048]{0} parameter(1)
  ROOT %c = f32[2080]{0} concatenate(%a, %b), dimensions={0}
}

ENTRY %main (x: f32[32], y: f32[2048], z: f32[7]) -> f32[2080] {
  %x = f32[32]{0} parameter(0)
  %y = f32[2048]{0} parameter(1)
  %z = f32[7]{0} parameter(2)
  %both = f32[2080]{0} fusion(%x, %y), kind=kLoop, calls=%joined
  %alone = f32[7]{0} all-reduce(%z), channel_id=1, replica_groups={{0,1}}, to_apply=%sum
  %named = f32[2080]{0} all-reduce(%both), channel_id=2, replica_groups={{0,1}}, to_apply=%sum, metadata={op_name="a sum of the model"}
  %start = f32[2080]{0} all-reduce-start(%both), channel_id=3, replica_groups={{0,1}}, to_apply=%sum
  ROOT %done = f32[2080]{0} all-reduce-done(%start)
}
"""  # noqa: E501
    found = hlo_collectives.count(text)
    assert found["all_reduce"] == (1 + 1 + 2, (7 + 2080 + 2080) * 4)


def test_tpu_clones_count_once_and_others_do_not():
    """Those of `shard_map` have one channel, and in one layer one name."""
    text = """
HloModule m, num_partitions=4

ENTRY %main (x: f32[16]) -> f32[4] {
  %one = f32[4]{0:T(128)} reduce-scatter(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%sum, metadata={op_name="up"}
  %clone = f32[4]{0:T(128)} reduce-scatter(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%sum, metadata={op_name="up"}
  %other = f32[4]{0:T(128)} reduce-scatter(%x), channel_id=1, replica_groups={{0,2},{1,3}}, to_apply=%sum, metadata={op_name="up"}
  ROOT %small = f32[2]{0:T(128)} reduce-scatter(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%sum, metadata={op_name="up"}
}
"""  # noqa: E501
    found = hlo_collectives.count(text)
    assert found["reduce_scatter"] == (3, (4 + 4 + 2) * 4)
