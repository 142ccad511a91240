"""What DTensor cannot run, or computes whole, and for which there is no rule.

Names are those of TensorFlow's operations, as errors and graphs have them.
What stands here is a limit of the backend; what does not, `ops` and `images`
have rules for, or DTensor splits.
"""

# An error names operation and layer.
REFUSED = {
    "DTensor has no expansion of a decomposition": (
        "Cholesky",
        "LogMatrixDeterminant",
        "Lu",
        "MatrixDeterminant",
        "MatrixInverse",
        "MatrixSolve",
        "MatrixTriangularSolve",
        "SelfAdjointEigV2",
        "Svd",
    ),
    "DTensor has no expansion of a change of an image's geometry": (
        "DepthToSpace",
        "ExtractImagePatches",
        "ImageProjectiveTransformV3",
        "MirrorPad",
        "ResizeBilinear",
        "ResizeNearestNeighbor",
        "SpaceToDepth",
    ),
    "DTensor has no layout for the lists of a loop": ("TensorListStack",),
    "DTensor has no expansion": (
        "Bucketize",
        "Cross",
        "Cumprod",
        "DenseBincount",
        "LowerBound",
        "Tile",
        "UnsortedSegmentMax",
    ),
    "the numbers would depend on the mesh": (
        "stateless_binomial",
        "stateless_gamma",
        "stateless_truncated_normal",
    ),
}

# Every device computes all of it, whatever is split.
WHOLE = {
    "needs all of a dim, and DTensor gathers the others with it": (
        "Cumsum",
        "TopKV2",
    ),
    "DTensor replicates what it has no expansion of its own for": (
        "Qr",
        "TensorScatterUpdate",
    ),
    "a convolution in groups, or of channels that come first": ("Conv2D",),
}
