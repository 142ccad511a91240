from keras_tp.distribution.pages import findings

MIB = 2**20


def test_large_variables_that_are_whole_the_largest_first():
    groups = [
        (["norm/scale"], 1, "small"),
        ([f"block_{k}/up/kernel" for k in range(12)], 30 * MIB, "why"),
        (["table/embeddings"], 60 * MIB, "dim 0: unused; dim 1: unused"),
    ]
    first, second = findings.whole_variables(groups, 100 * MIB, 4)
    assert first.text == (
        "`table/embeddings` is whole on each device: 60.00 MiB of 100.00 MiB."
    )
    assert "each would hold 45.00 MiB less" in first.detail
    # What is true of all dims is said once.
    assert first.detail.endswith("Reason: unused.")
    assert second.text.startswith("12 x `block_[0-11]/up/kernel` are whole")


def test_one_device_has_no_such_problem():
    groups = [(["table/embeddings"], 60 * MIB, "why")]
    assert not findings.whole_variables(groups, 100 * MIB, 1)


def test_three_at_most():
    groups = [([f"{name}/kernel"], 10 * MIB, "why") for name in "abcde"]
    found = findings.whole_variables(groups, 50 * MIB, 2)
    assert len(found) == 3
