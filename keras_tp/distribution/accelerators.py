"""Published figures of the accelerators that `compile_for` knows."""

import collections

_GIB = 2**30


class Accelerator(
    collections.namedtuple(
        "Accelerator",
        [
            "name",
            "title",
            "device_type",
            "memory",
            "memory_speed",
            "flops",
            "link_speed",
            "node_size",
            "network_speed",
            "source",
        ],
    )
):
    """Figures of one device, as its maker publishes them.

    Args:
        name: String, the `target` of `compile_for`.
        title: String, for reports.
        device_type: String, `"gpu"` or `"tpu"`.
        memory: Int, bytes.
        memory_speed: Float, bytes per second.
        flops: Dict of the dtype of a matmul's operands in XLA's spelling, such
            as `"bf16"`, to the peak FLOPs per second, dense. Other dtypes take
            the lowest of them.
        link_speed: Float, bytes per second that a device sends in a ring of
            neighbours, while it receives as much.
        node_size: Int, number of devices that these links join.
        network_speed: Float, bytes per second that a device sends to devices
            outside of its node.
        source: String, where the figures are published.
    """

    def peak_flops(self, dtype):
        """Returns the peak FLOPs per second of matmuls of a dtype."""
        return self.flops.get(dtype, min(self.flops.values()))

    def send_seconds(self, kind, nbytes, devices):
        """Returns how long a collective takes in a ring, without latency.

        The amounts that each device sends are those of ring algorithms
        (Patarasu and Yuan 2009; also in the "Performance" notes of
        nccl-tests).

        Args:
            kind: String, such as `"all_reduce"`.
            nbytes: Int, bytes of the result on one device.
            devices: Tuple of ints, indices of the devices of one group.
        """
        count = len(devices)
        share = (count - 1) / count
        sent = {
            "all_reduce": 2 * share * nbytes,
            "all_gather": share * nbytes,
            "reduce_scatter": (count - 1) * nbytes,
            "all_to_all": share * nbytes,
            "collective_permute": nbytes,
        }[kind]
        return sent / self.ring_speed(devices)

    def ring_speed(self, devices):
        """Returns the bytes per second that each device of a group sends.

        A group inside of a node uses the links of the node. Between nodes, a
        group has one ring for each of its members in a node, and each of these
        rings goes through the port of another member, as in NCCL. So a device
        sends as much as their ports together, and no more than its own links.

        Args:
            devices: Sequence of ints, indices of the devices of the group.
        """
        nodes = collections.Counter(
            index // self.node_size for index in devices
        )
        if len(nodes) == 1:
            return self.link_speed
        ports = min(nodes.values()) * self.network_speed
        return min(ports, self.link_speed)


# A ring along one axis of a torus uses two links of a chip. Google publishes
# the bandwidth of all links (4 in a 2D torus, 6 in a 3D torus), both directions
# together. Half of it, divided by the number of links, is one link's.
ACCELERATORS = {
    row.name: row
    for row in (
        Accelerator(
            name="h100",
            title="NVIDIA H100 SXM 80 GB",
            device_type="gpu",
            # What is left for programs: XLA's description of this device.
            memory=84_942_979_072,
            memory_speed=3.35e12,
            flops={"bf16": 989.4e12, "f16": 989.4e12, "f32": 494.7e12},
            link_speed=450e9,
            node_size=8,
            network_speed=50e9,
            source=(
                "NVIDIA H100 datasheet and H100 architecture whitepaper "
                "(dense, float32 as TF32; NVLink 900 GB/s in both directions); "
                "NVIDIA DGX H100 user guide (one 400 Gb/s port per GPU)"
            ),
        ),
        Accelerator(
            name="v5e",
            title="Cloud TPU v5e",
            device_type="tpu",
            memory=16 * _GIB,
            memory_speed=819e9,
            flops={"bf16": 197e12},
            link_speed=400e9 / 2 / 4 * 2,
            node_size=256,
            network_speed=25e9 / 8,
            source="https://docs.cloud.google.com/tpu/docs/v5e",
        ),
        Accelerator(
            name="v5p",
            title="Cloud TPU v5p",
            device_type="tpu",
            memory=95 * _GIB,
            memory_speed=2765e9,
            flops={"bf16": 459e12},
            link_speed=1200e9 / 2 / 6 * 2,
            node_size=8960,
            network_speed=50e9 / 8,
            source="https://docs.cloud.google.com/tpu/docs/v5p",
        ),
        Accelerator(
            name="v6e",
            title="Cloud TPU v6e",
            device_type="tpu",
            memory=32 * _GIB,
            memory_speed=1638e9,
            flops={"bf16": 918e12},
            link_speed=800e9 / 2 / 4 * 2,
            node_size=256,
            network_speed=100e9 / 8,
            source="https://docs.cloud.google.com/tpu/docs/v6e",
        ),
    )
}


def accelerator(target):
    """Returns the `Accelerator` of a target; `ValueError` if unknown."""
    if target not in ACCELERATORS:
        raise ValueError(
            f"`target` must be one of {list(ACCELERATORS)}. Received: "
            f"target={target!r}"
        )
    return ACCELERATORS[target]
